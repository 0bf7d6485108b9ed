// Rows that a block holds: a thread has ITEMS pieces of VECTOR neighbours.
//
// Needs CHANNELS, VECTOR, NUM_THREADS.
#pragma once
#include "layer.cuh"

constexpr int WARPS = NUM_THREADS / 32, ITEMS = ceil_div(CHANNELS, VECTOR * NUM_THREADS);
using Row = float[ITEMS][VECTOR];
using Parts = float[WARPS];  // of a sum over a row
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS <= 1024, "num_threads must be a multiple of 32 up to 1024");
static_assert(CHANNELS % VECTOR == 0, "a row consists of whole accesses");

// For each piece of the thread: `act(n, channel)`.
template <typename Act> __device__ inline void for_pieces(Act act) {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
        const int channel = (n * NUM_THREADS + static_cast<int>(threadIdx.x)) * VECTOR;
        if (CHANNELS % (VECTOR * NUM_THREADS) == 0 || channel < CHANNELS) act(n, channel);
    }
}

// Sums over a block, in each of its threads. A place serves again behind the next sums, which another one has.
template <int COUNT> __device__ inline void sum_block(float (&sums)[COUNT], Parts (&parts)[COUNT]) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) sums[s] += __shfl_xor_sync(0xffffffffu, sums[s], bit);
        if (threadIdx.x % 32 == 0) parts[s][threadIdx.x / 32] = sums[s];
    }
    __syncthreads();  // all parts are there
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
        sums[s] = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sums[s] += parts[s][i];
    }
}

// The mean of a row, and 1 / sqrt(variance + eps).
struct Statistics { float mean, factor; };

// Takes the mean off a row. The variance is that of what is left.
__device__ inline Statistics centre(Row& z, float eps, Parts (&first)[1], Parts (&second)[1]) {
    float sum[1] = {}, squares[1] = {};
    for_pieces([&](int n, int) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[0] += z[n][i];
    });
    sum_block(sum, first);
    const float mean = sum[0] * (1.0f / CHANNELS);
    for_pieces([&](int n, int) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) z[n][i] -= mean, squares[0] += z[n][i] * z[n][i];
    });
    sum_block(squares, second);
    return {mean, 1.0f / sqrtf(squares[0] * (1.0f / CHANNELS) + eps)};
}
