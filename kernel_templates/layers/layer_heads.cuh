// Heads of a row side by side: LANES lanes of a warp share one.
//
// Needs VECTOR, HEAD_SIZE, LANES, NUM_THREADS.
#pragma once
#include "layer.cuh"

constexpr int ITEMS = ceil_div(HEAD_SIZE, VECTOR * LANES);  // pieces of a head that a lane has
constexpr int BLOCK_HEADS = NUM_THREADS / LANES;
static_assert(HEAD_SIZE % VECTOR == 0, "a head consists of whole accesses");
static_assert(32 % LANES == 0 && NUM_THREADS % 32 == 0, "heads do not cross warps");

// The head of a thread, counted over all rows.
__device__ inline i64 own_head() { return i64(blockIdx.x) * BLOCK_HEADS + threadIdx.x / LANES; }

// For each piece of the thread: `act(n, channel)` with its channel in the head. Pieces past the head are left out.
template <typename Act> __device__ inline void for_pieces(bool is_there, Act act) {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
        const int channel = (n * LANES + threadIdx.x % LANES) * VECTOR;
        if (is_there && (HEAD_SIZE % (VECTOR * LANES) == 0 || channel < HEAD_SIZE)) act(n, channel);
    }
}

// The sum over the lanes of a head, in each of them.
__device__ inline float sum_of_head(float x) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

// 1 / max(|x|, 1e-12) by the sum of squares of x.
constexpr float LEAST_SQUARES = 1e-24f;
__device__ inline float reciprocal_length(float squares) {
    return squares < LEAST_SQUARES ? 1e12f : reciprocal_root(squares);
}
