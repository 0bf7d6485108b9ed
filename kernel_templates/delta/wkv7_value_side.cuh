// The value side of RWKV-7's backward of a chunk, for a warp's values, from what the states give to them:
//
//     U = Tm (Aak V + A S'^T);   dX = Tm^T (Arb^T dY + B E'^T);   dV = Ark^T dY + K E'^T + Aak^T dX
//
// Products of M and of M^T take turns here: those of chunk.cuh, one kind after the other, need more registers.
//
// Needs what wkv7_chunk.cuh needs.
#pragma once
#include "wkv7_chunk.cuh"

// V and dY are read; U, dX and, in T_IO, dV are written.
template <typename Values> struct ValueTiles { Values v, dy, u, dx; Tile<VALUE_PITCH> dv; };

// Sums come as U <- A S'^T, dX <- B E'^T, dV <- K E'^T; `value` is the warp's first.
template <int TILES, typename Values>
__device__ inline void finish_values(TokenSums (&u)[TILES], TokenSums (&dx)[TILES], TokenSums (&dv)[TILES],
                                     TokenFragments (&dy_rows)[TILES], TokenFragments (&dx_rows)[TILES],
                                     const TokenTiles& matrices, const ValueTiles<Values>& tiles, int value) {
    TokenFragments u_rows[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        TokenFragments v_rows;
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            v_rows[q] = load_left_transposed(tiles.v, 16 * q, value + 16 * i);
            dy_rows[i][q] = load_left_transposed(tiles.dy, 16 * q, value + 16 * i);
        }
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                if (q <= p)  // U <- Aak V + A S'^T
                    multiply_add(&u[i][2 * p], v_rows[q], load_right_transposed(matrices.ak, 16 * p, 16 * q));
                if (q < p) continue;  // dX <- Arb^T dY + B E'^T   dV <- Ark^T dY + K E'^T
                multiply_add(&dx[i][2 * p], dy_rows[i][q], load_right(matrices.rb, 16 * q, 16 * p));
                multiply_add(&dv[i][2 * p], dy_rows[i][q], load_right(matrices.rk, 16 * q, 16 * p));
            }
        TokenFragments u_sums, dx_sums;
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            u_sums[q] = to_fragment(u[i][2 * q], u[i][2 * q + 1]);
            dx_sums[q] = to_fragment(dx[i][2 * q], dx[i][2 * q + 1]);
        }
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) {  // U <- Tm U   dX <- Tm^T dX
            Accumulator u_solved[2] = {}, dx_solved[2] = {};
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                if (q <= p) multiply_add(u_solved, u_sums[q], load_right_transposed(matrices.tm, 16 * p, 16 * q));
                if (q >= p) multiply_add(dx_solved, dx_sums[q], load_right(matrices.tm, 16 * q, 16 * p));
            }
            u_rows[i][p] = to_fragment(u_solved[0], u_solved[1]);
            dx_rows[i][p] = to_fragment(dx_solved[0], dx_solved[1]);
        }
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
            for (int q = p; q < BLOCKS; ++q)  // dV <- dV + Aak^T dX
                multiply_add(&dv[i][2 * p], dx_rows[i][q], load_right(matrices.ak, 16 * q, 16 * p));
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) {
            store_block_transposed(tiles.u, 16 * p, value + 16 * i, u_rows[i][p]);
            store_block_transposed(tiles.dx, 16 * p, value + 16 * i, dx_rows[i][p]);
            store_block_transposed(tiles.dv, 16 * p, value + 16 * i,
                                   to_fragment(dv[i][2 * p], dv[i][2 * p + 1]));
        }
}
