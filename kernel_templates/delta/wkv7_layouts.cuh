// How kernels that take a head of RWKV-7 apart lay out channels and token matrices in the tensors that pass from one to
// the next.
//
// Channels stand in their own order, or, for kernels that write gradients, in the order of lanes: within every 32,
// column 8 n + 2 t + e is channel 8 t + 2 n + e, so that lane t of an accumulator's rows has eight neighbouring
// channels in four accumulators side by side. States that wkv7_scan stores, 16 bytes a lane, come in that order by
// themselves. A matrix of tokens x tokens is lower triangular; of it only the 16 x 16 blocks that are not zero are
// kept, one after another, four 8 x 8 matrices each.
//
// Needs BLOCKS.
#pragma once
#include "mma.cuh"

constexpr int TRIANGLE = BLOCKS * (BLOCKS + 1) / 2;

enum class Order { channels, lanes };

// Where a pair of channels stands, as a pair of columns; and the other way.
template <Order ORDER> __device__ inline int column_pair(int pair) {
    return ORDER == Order::channels ? pair : (pair & ~15) | (pair & 3) << 2 | (pair >> 2 & 3);
}
template <Order ORDER> __device__ inline int channel_of_column(int column) {
    return 2 * column_pair<ORDER>(column / 2) + column % 2;
}

struct Triangle { uint4 units[TRIANGLE][32]; };
constexpr int TRIANGLE_UNITS = TRIANGLE * 32;
struct TriangleTile {
    unsigned start;
    __device__ unsigned block(int p, int q) const { return start + 512 * (p * (p + 1) / 2 + q); }
    // Lane addresses for the four 8 x 8 matrices of a block: down first, or across first.
    __device__ unsigned address(int p, int q) const { return block(p, q) + 16 * lane_id(); }
    __device__ unsigned address_across(int p, int q) const {
        return block(p, q) + 16 * (lane_id() % 8 + lane_id() / 8 % 2 * 16 + lane_id() / 16 * 8);
    }
};
__device__ inline TriangleTile tile_of(const Triangle& triangle) { return {shared_address(&triangle.units[0][0])}; }

__device__ inline Fragment load_left(TriangleTile tile, int p, int q) { return load_matrices(tile.address(p, q)); }
__device__ inline Fragment load_left_transposed(TriangleTile tile, int p, int q) {
    return load_matrices_transposed(tile.address_across(p, q));
}
__device__ inline Right load_right(TriangleTile tile, int p, int q) {
    const Fragment f = load_matrices_transposed(tile.address(p, q));
    return {{f.at[0], f.at[1], f.at[2], f.at[3]}};
}
__device__ inline Right load_right_transposed(TriangleTile tile, int p, int q) {
    const Fragment f = load_matrices(tile.address_across(p, q));
    return {{f.at[0], f.at[1], f.at[2], f.at[3]}};
}
__device__ inline void store_block(TriangleTile tile, int p, int q, const Fragment& f) {
    store_matrices(tile.address(p, q), f, [&](int i) { return tile.block(p, q) + 128 * i + 4 * lane_id(); });
}
