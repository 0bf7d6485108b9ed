// Heads of many rows: LANES lanes of a warp share one, and a block has the same BLOCK_HEADS heads of block_rows rows.
//
// Needs VECTOR, HEAD_SIZE, LANES, NUM_THREADS.
#pragma once
#include "layer.cuh"

constexpr int ITEMS = ceil_div(HEAD_SIZE, VECTOR * LANES);  // pieces of a head that a lane has
constexpr int BLOCK_HEADS = NUM_THREADS / LANES;
static_assert(HEAD_SIZE % VECTOR == 0, "a head consists of whole accesses");
static_assert(32 % LANES == 0 && NUM_THREADS % 32 == 0, "heads do not cross warps");

// The head of a thread, which its rows may not have: it reads the last one's then, and writes nothing.
__device__ inline i64 own_head() { return i64(blockIdx.y) * BLOCK_HEADS + threadIdx.x / LANES; }

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

// What a thread adds up over rows, for the channels of its head.
struct ColumnSums {
    float of[ITEMS][VECTOR] = {};
    __device__ void add(int n, int i, float x) { of[n][i] += x; }
    // As row `blockIdx.x` of [blocks of rows, heads, HEAD_SIZE], if it is wanted.
    __device__ void write_to(float* sums, i64 head, i64 heads, bool is_there) const {
        if (sums == nullptr) return;
        for_pieces(is_there, [&](int n, int channel) {
            write(sums + (i64(blockIdx.x) * heads + head) * HEAD_SIZE + channel, of[n]);
        });
    }
};

// Loads the pieces of a row, or of a parameter.
template <typename T>
__device__ inline void load_pieces(Piece<T> (&pieces)[ITEMS], const T* source) {
    for_pieces(true, [&](int n, int channel) { pieces[n].load(source + channel); });
}

// Writes f(n, i) of all pieces of a row, if it is wanted.
template <typename T, typename F> __device__ inline void write_pieces(T* target, i64 start, bool is_there, F f) {
    if (target == nullptr) return;
    for_pieces(is_there, [&](int n, int channel) {
        float x[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[i] = f(n, i);
        write(target + start + channel, x);
    });
}

// Writes x, which all lanes of a head have, as an element of [rows, heads].
__device__ inline void write_of_head(float* target, i64 row, i64 head, i64 heads, bool is_there, float x) {
    if (is_there && threadIdx.x % LANES == 0) target[row * heads + head] = x;
}

// act(n, i) for every element that a thread has.
template <typename Act> __device__ inline void for_elements(Act act) {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) act(n, i);
}

// Adds up sums over a head: `add(n, i)` adds to them what an element has.
template <int COUNT, typename Add> __device__ inline void sum_over_head(float (&sums)[COUNT], Add add) {
    for_pieces(true, [&](int n, int) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) add(n, i);
    });
#pragma unroll
    for (int s = 0; s < COUNT; ++s) sums[s] = sum_of_head(sums[s]);
}

// 1 / max(|x|, 1e-12) by the sum of squares of x.
constexpr float LEAST_SQUARES = 1e-24f;
__device__ inline float reciprocal_length(float squares) {
    return squares < LEAST_SQUARES ? 1e12f : reciprocal_root(squares);
}
