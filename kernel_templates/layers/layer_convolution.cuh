// What the kernels of the short causal convolution have in common: a thread has VECTOR channels of neighbouring tokens.
//
// Needs CHANNELS, WIDTH, VECTOR, NUM_THREADS, HAS_BIAS, GATE, T_IO, T_WEIGHT, T_BIAS.
#pragma once
#include "layer.cuh"

static_assert(2 <= WIDTH && WIDTH <= 8, "width must be from 2 to 8");
static_assert(CHANNELS % VECTOR == 0, "a row consists of whole accesses");

constexpr int BEFORE = WIDTH - 1;  // tokens that one takes beside itself
struct RowStrides { i64 batch, token; };

// The first channel of a thread.
__device__ inline int own_channel() {
    return (static_cast<int>(blockIdx.y) * NUM_THREADS + static_cast<int>(threadIdx.x)) * VECTOR;
}

// COUNT numbers of each channel, which lie one channel behind the other.
template <int COUNT, typename T>
__device__ inline void load_by_channel(float (&x)[COUNT][VECTOR], const T* source) {
    Piece<T> pieces[COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) pieces[n].load(source + n * VECTOR);
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) x[j][e] = pieces[(e * COUNT + j) / VECTOR].at((e * COUNT + j) % VECTOR);
}
template <int COUNT, typename T>
__device__ inline void write_by_channel(T* target, const float (&x)[COUNT][VECTOR]) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        float piece[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) piece[e] = x[(n * VECTOR + e) % COUNT][(n * VECTOR + e) / COUNT];
        write(target + n * VECTOR, piece);
    }
}

struct Taps {
    float of[WIDTH][VECTOR], offset[VECTOR];

    __device__ Taps(const T_WEIGHT* weight, const T_BIAS* bias, int channel) {
        load_by_channel(of, weight + i64(channel) * WIDTH);
        Piece<T_BIAS> held = {};
        if constexpr (HAS_BIAS) held.load(bias + channel);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) offset[e] = HAS_BIAS ? held.at(e) : 0.0f;
    }
    // What goes through the activation for the last token of a window.
    template <int COUNT> __device__ float sum(const float (&window)[COUNT][VECTOR], int e) const {
        float x = offset[e];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) x += of[j][e] * window[COUNT - WIDTH + j][e];
        return x;
    }
};

// Makes room for a newer token in a window, or for an older one.
template <int COUNT> __device__ inline void move_on(float (&window)[COUNT][VECTOR]) {
#pragma unroll
    for (int j = 1; j < COUNT; ++j)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) window[j - 1][e] = window[j][e];
}
template <int COUNT> __device__ inline void move_back(float (&window)[COUNT][VECTOR]) {
#pragma unroll
    for (int j = COUNT - 1; j > 0; --j)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) window[j][e] = window[j - 1][e];
}
