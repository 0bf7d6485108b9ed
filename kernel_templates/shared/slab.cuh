// Tiles of 64 columns, for products of four warps (wgmma.cuh) as for those of one.
//
// A tile is [rows][64] T_IO: rows of 128 bytes whose 16-byte units are swapped by the row, unit u of row t at u ^ t %
// 8. Eight neighbouring rows of a column then lie in different banks. A wider tile is several of these, one after
// another.
#pragma once
#include "mma.cuh"

constexpr int TILE_COLUMNS = 64;  // columns of a tile

template <int ROWS> struct Slab { uint4 units[ROWS][8]; };

// By its address in shared memory, a multiple of 1024; STRIDE bytes on the next 64 columns begin, where there are more.
template <int STRIDE> struct SlabsTile {
    unsigned start;
    __device__ unsigned of(int column) const { return STRIDE == 0 ? start : start + column / TILE_COLUMNS * STRIDE; }
    // `lane` is one of the two offsets below; rows and columns are multiples of 16.
    __device__ unsigned address(int row, int column, unsigned lane) const {
        return of(column) + 128 * row + (lane ^ (STRIDE == 0 ? column : column % TILE_COLUMNS) * 2);
    }
};
using SlabTile = SlabsTile<0>;
template <int ROWS> __device__ inline SlabTile tile_of(const Slab<ROWS>& slab) {
    return {shared_address(&slab.units[0][0])};
}
// Lane addresses for the four 8 x 8 matrices of a block: down first, or across first.
__device__ inline unsigned slab_down_first() { return lane_id() % 16 * 128 + (lane_id() / 16 ^ lane_id() % 8) * 16; }
__device__ inline unsigned slab_across_first() {
    return (lane_id() % 8 + lane_id() / 16 * 8) * 128 + (lane_id() / 8 % 2 ^ lane_id() % 8) * 16;
}

template <int STRIDE> __device__ inline Fragment load_left(SlabsTile<STRIDE> tile, int row, int column) {
    return load_matrices(tile.address(row, column, slab_down_first()));
}
template <int STRIDE> __device__ inline Fragment load_left_transposed(SlabsTile<STRIDE> tile, int row, int column) {
    return load_matrices_transposed(tile.address(row, column, slab_across_first()));
}
template <int STRIDE> __device__ inline Right load_right(SlabsTile<STRIDE> tile, int row, int column) {
    const Fragment f = load_matrices_transposed(tile.address(row, column, slab_down_first()));
    return {{f.at[0], f.at[1], f.at[2], f.at[3]}};
}
template <int STRIDE> __device__ inline Right load_right_transposed(SlabsTile<STRIDE> tile, int row, int column) {
    const Fragment f = load_matrices(tile.address(row, column, slab_across_first()));
    return {{f.at[0], f.at[1], f.at[2], f.at[3]}};
}
template <int STRIDE> __device__ inline void store_block(SlabsTile<STRIDE> tile, int row, int column,
                                                         const Fragment& f) {
    store_matrices(tile.address(row, column, slab_down_first()), f, [&](int i) {
        const unsigned unit = (i / 2 ^ group()) * 16 + 4 * quad_lane();
        return tile.address(row + i % 2 * 8, column, group() * 128 + unit);
    });
}
template <int STRIDE>
__device__ inline void store_block_transposed(SlabsTile<STRIDE> tile, int row, int column, const Fragment& f) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(tile.address(row, column, slab_across_first())), "r"(f.at[0]), "r"(f.at[1]), "r"(f.at[2]),
                 "r"(f.at[3]) : "memory");
}
// A pair of columns (2 `pair`, 2 `pair` + 1) of a row.
template <int ROWS> __device__ inline unsigned* word_of(Slab<ROWS>& slab, int row, int pair) {
    return reinterpret_cast<unsigned*>(&slab.units[row][pair / 4 ^ row % 8]) + pair % 4;
}

