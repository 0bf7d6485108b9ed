// Products by halves (levels.cuh) of a chunk whose operands are tiles of all channels of a head.
//
// Needs what chunk.cuh needs.
#pragma once
#include "chunk.cuh"
#include "levels.cuh"

constexpr int LEVELS = CHUNK_LEN == 64 ? 6 : CHUNK_LEN == 32 ? 5 : 4;

// The blocks on the diagonal of a matrix of pairs, summed over the levels.
using DiagonalBlocks = Accumulator[BLOCKS][2];

// A block of the matrix left right^T.
template <typename Tile>
__device__ inline void multiply_block(Accumulator (&sum)[2], Tile left, Tile right, int p, int q) {
    const LeftRows rows(left, p);
    multiply_rows(sum, rows, right, q);
}
template <typename Tile> __device__ inline Fragment pair_block(Tile left, Tile right, int p, int q) {
    Accumulator sum[2] = {};
    multiply_block(sum, left, right, p, q);
    return to_fragment(sum[0], sum[1]);
}
// Those pairs of a block that `is_kept` names, by the numbers of their tokens in it.
template <typename Tile, typename IsKept>
__device__ inline void add_pairs(Accumulator (&sum)[2], Tile left, Tile right, int p, IsKept is_kept) {
    Accumulator all[2] = {};
    multiply_block(all, left, right, p, p);
#pragma unroll
    for (int n = 0; n < 8; ++n)
        if (is_kept(group() + n % 4 / 2 * 8, n / 4 * 8 + 2 * quad_lane() + n % 2))
            sum[n / 4][n % 4] += all[n / 4][n % 4];
}
// A level's pairs within blocks.
template <typename Tile>
__device__ inline void add_level(DiagonalBlocks& sums, Tile left, Tile right, int level) {
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p)
        add_pairs(sums[p], left, right, p, [&](int row, int column) { return is_of_level(row, column, level); });
}
