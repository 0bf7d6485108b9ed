// Tiles of 64 columns, for the kernels of RWKV-7 that take a head apart (wkv7_prepare, wkv7_scan, wkv7_key_gradients).
//
// A tile is [rows][64] T_IO: rows of 128 bytes whose 16-byte units are swapped by the row, unit u of row t at u ^ t %
// 8. Eight neighbouring rows of a column then lie in different banks, and a tile has the same bytes in shared memory as
// in the tensors that pass it from kernel to kernel.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHANNELS, CHUNK_LEN, NUM_THREADS, T_IO, T_W, DECAY.
#pragma once
#include "decay.cuh"
#include "slab_copy.cuh"
#include "slots.cuh"

constexpr int SLABS = CHANNELS / TILE_COLUMNS;
constexpr int WARPS = NUM_THREADS / 32;
constexpr int BLOCKS = CHUNK_LEN / 16;  // of 16 tokens
#include "wkv7_layouts.cuh"

static_assert(sizeof(T_IO) == 2, "the split kernels take float16 and bfloat16");
static_assert(CHUNK_LEN == 32 || CHUNK_LEN == 64, "chunk_len must be 32 or 64");
static_assert(CHANNELS % TILE_COLUMNS == 0 && CHANNELS >= HEAD_SIZE,
              "channels must be head_size, rounded up to multiples of 64");

constexpr int SLAB_UNITS = CHUNK_LEN * 8;  // of a tile with a row per token

// Those that pass from wkv7_prepare to wkv7_scan, in this order: TA, M, Tm, G.
constexpr int MATRICES = 4;

// Products over slabs that give a triangle.
// A warp has rows of blocks BLOCKS - 1 - HALF and HALF of one triangle, so that all have equally many blocks:
// visit(index, p, q) for each.

constexpr int HALVES = BLOCKS / 2;

template <int HALF, typename Visit> __device__ inline void for_blocks_of_half(Visit visit) {
    constexpr int HIGH = BLOCKS - 1 - HALF;
#pragma unroll
    for (int i = 0; i <= BLOCKS; ++i) i <= HIGH ? visit(i, HIGH, i) : visit(i, HALF, i - HIGH - 1);
}
using HalfTriangle = Accumulator[BLOCKS + 1][2];

// sum += left right^T.
template <int HALF>
__device__ inline void add_products(HalfTriangle& sum, SlabTile left, SlabTile right) {
#pragma unroll
    for (int c = 0; c < TILE_COLUMNS; c += 16) {
        const Fragment high = load_left(left, 16 * (BLOCKS - 1 - HALF), c), low = load_left(left, 16 * HALF, c);
        Right columns[BLOCKS - HALF];
#pragma unroll
        for (int q = 0; q < BLOCKS - HALF; ++q) columns[q] = load_right_transposed(right, 16 * q, c);
        for_blocks_of_half<HALF>(
            [&](int i, int p, int q) { multiply_add(sum[i], p == HALF ? low : high, columns[q]); });
    }
}
__device__ inline void from_fragment(Accumulator (&sum)[2], const Fragment& f) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        sum[i / 2][i % 2 * 2] = low_of(f.at[i]), sum[i / 2][i % 2 * 2 + 1] = high_of(f.at[i]);
}
