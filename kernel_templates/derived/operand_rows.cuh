// What the kernels around a recurrence share: rows of heads by strides, and steps of a state space.
//
// A block has the same slots of block_rows rows, one after another: a slot is a piece of a head, or a lane of one.
//
// Needs VECTOR, NUM_THREADS.
#pragma once
#include "layer.cuh"
#include "span.cuh"

// The rows of a block, which are the tokens of all batches, one behind the other.
struct RowWalk {
    i64 row, end, batch, token, tokens;
    __device__ RowWalk(i64 rows, i64 block_rows, i64 tokens) : tokens(tokens) {
        row = i64(blockIdx.x) * block_rows;
        end = min(row + block_rows, rows);
        batch = row / tokens;
        token = row - batch * tokens;
    }
    __device__ bool exists() const { return row < end; }
    __device__ void next() {
        ++row, ++token;
        if (token == tokens) token = 0, ++batch;
    }
    // Where a head of the row begins in a tensor.
    __device__ i64 in(const Strides& strides, i64 head) const {
        return batch * strides.batch + token * strides.token + head * strides.head;
    }
};

// A piece of a head among `slices` of blocks that are side by side from block `first` on.
template <int SIZE> struct PieceOfHead {
    static constexpr int PIECES = SIZE / VECTOR;
    static_assert(SIZE % VECTOR == 0, "a head consists of whole accesses");
    i64 head;
    int channel;
    __device__ explicit PieceOfHead(i64 first_block = 0) {
        const i64 slot = (i64(blockIdx.y) - first_block) * NUM_THREADS + threadIdx.x;
        head = slot / PIECES;
        channel = static_cast<int>(slot - head * PIECES) * VECTOR;
    }
};

// Writes a piece as it came.
template <typename T> __device__ inline void copy(T* target, const Piece<T>& piece) {
    using Access = Words<T, ACCESS<T>>;
#pragma unroll
    for (int i = 0; i < VECTOR / ACCESS<T>; ++i) {
        const Access& words = piece.words[i];
        T* const place = target + i * ACCESS<T>;
        if constexpr (sizeof(Access) == 16)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(words.word[0]),
                         "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3]) : "memory");
        else if constexpr (sizeof(Access) == 8)
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(place), "r"(words.word[0]), "r"(words.word[1])
                         : "memory");
        else
            *reinterpret_cast<Access*>(place) = words;
    }
}

// A parameter of the heads: a number for each, or for each of its channels.
template <typename T, bool PER_CHANNEL, int SIZE> struct Factors {
    Piece<T> pieces;
    __device__ void load(const T* source, i64 head, int channel) { pieces.load(source + head * SIZE + channel); }
    __device__ float at(int i) const { return pieces.at(i); }
};
template <typename T, int SIZE> struct Factors<T, false, SIZE> {
    float one;
    __device__ void load(const T* source, i64 head, int) { one = to_float(source[head]); }
    __device__ float at(int) const { return one; }
};
