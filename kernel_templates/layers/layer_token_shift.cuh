// What both directions of a token shift have in common: a thread has VECTOR channels of all rows of its block.
//
// Needs CHANNELS, MIXES, VECTOR, NUM_THREADS, HAS_AMOUNTS, HAS_FIRST, T_IO, T_MIXES and what layer_texts.cuh needs.
#pragma once
#include "layer.cuh"
#include "layer_texts.cuh"

constexpr int MOST_MIXES = 6;
static_assert(1 <= MIXES && MIXES <= MOST_MIXES, "mixes must be from 1 to 6");
static_assert(CHANNELS % VECTOR == 0, "a row consists of whole accesses");

// The first channel of a thread.
__device__ inline int own_channel() {
    return (static_cast<int>(blockIdx.y) * NUM_THREADS + static_cast<int>(threadIdx.x)) * VECTOR;
}

// How much of the token before is in a mix of a row.
struct Amounts {
    Piece<T_MIXES> mixes[MIXES];
    const T_IO* amounts;
    i64 rows;

    __device__ Amounts(const T_MIXES* mixes_of_all, const T_IO* amounts, i64 rows, int channel)
        : amounts(amounts + channel), rows(rows) {
#pragma unroll
        for (int m = 0; m < MIXES; ++m) mixes[m].load(mixes_of_all + m * CHANNELS + channel);
    }
    struct Row {
        Piece<T_IO> own[HAS_AMOUNTS ? MIXES : 1];
    };
    __device__ Row of(i64 row) const {
        Row loaded;
        if constexpr (HAS_AMOUNTS) {
#pragma unroll
            for (int m = 0; m < MIXES; ++m) loaded.own[m].load(amounts + (m * rows + row) * CHANNELS);
        }
        return loaded;
    }
    __device__ float at(const Row& row, int m, int i) const {
        return HAS_AMOUNTS ? mixes[m].at(i) + row.own[HAS_AMOUNTS ? m : 0].at(i) : mixes[m].at(i);
    }
};

// The token before the first one of a text.
__device__ inline Piece<T_IO> token_before(const Text& text, const T_IO* first, int channel) {
    Piece<T_IO> token = {};
    if (HAS_FIRST && text.number >= 0) token.load(first + text.number * CHANNELS + channel);
    return token;
}
