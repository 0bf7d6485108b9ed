// The end of RWKV-7's backward of a chunk, for the keys' side: from dR dA dK dB of 16 channels in accumulators
// [channel, token] to dr da dk db and the gradient of the log-decay.
//
// Needs what wkv7_chunk.cuh needs.
#pragma once
#include "wkv7_chunk.cuh"

constexpr int GROWTH_PITCH = CHANNELS + 4;  // eight channels of every other row are in different banks

// The operands' tiles, which the results take over.
template <typename Tile> struct KeyTiles { Tile r, a, k, b; };

// Operands as [channel, token]: a lane's words lie as the accumulators do.
struct KeyRows {
    Fragment r[BLOCKS], a[BLOCKS], k[BLOCKS], b[BLOCKS];
    template <typename Tile> __device__ KeyRows(const KeyTiles<Tile>& tiles, int column) {
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            r[q] = load_left_transposed(tiles.r, 16 * q, column), a[q] = load_left_transposed(tiles.a, 16 * q, column);
            k[q] = load_left_transposed(tiles.k, 16 * q, column), b[q] = load_left_transposed(tiles.b, 16 * q, column);
        }
    }
};

// dr da dk db go to `tiles`. `growth` holds e^(c_t - m), the row before the first token first, and takes the gradient
// of the log-decays, a row a token. A lane has two neighbouring tokens of eight, for two channels.
template <typename Tile>
__device__ inline void write_key_gradients(const Accumulator* d_r, const Accumulator* d_a, const Accumulator* d_k,
                                           const Accumulator* d_b, const KeyRows& rows, const KeyTiles<Tile>& tiles,
                                           float (*growth)[GROWTH_PITCH], const float (&state_terms)[WARPS][CHANNELS],
                                           int column, float scale) {
    float left[2] = {};  // z less what the tokens so far take from it
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) left[j] += state_terms[i][column + group() + 8 * j];
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) {
        Fragment results[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 2 * p + i / 2, j = i % 2, channel = column + group() + 8 * j;
            float(*const rows_of_growth)[GROWTH_PITCH] = growth + 8 * n + 2 * quad_lane();
            const float grown_before = rows_of_growth[0][channel],
                        grown[2] = {rows_of_growth[1][channel], rows_of_growth[2][channel]};
            const float shrink[2] = {reciprocal(grown[0]), reciprocal(grown[1])};
            const float sum_r[2] = {d_r[n][2 * j], d_r[n][2 * j + 1]}, sum_a[2] = {d_a[n][2 * j], d_a[n][2 * j + 1]};
            const float sum_k[2] = {d_k[n][2 * j], d_k[n][2 * j + 1]}, sum_b[2] = {d_b[n][2 * j], d_b[n][2 * j + 1]};
            results[0].at[i] = pack(sum_r[0] * grown[0] * scale, sum_r[1] * grown[1] * scale);
            results[1].at[i] = pack(sum_a[0] * grown_before, sum_a[1] * grown[0]);
            results[2].at[i] = pack(sum_k[0] * shrink[0], sum_k[1] * shrink[1]);
            results[3].at[i] = pack(sum_b[0] * shrink[0], sum_b[1] * shrink[1]);
            const unsigned r = rows.r[p].at[i], a = rows.a[p].at[i], k = rows.k[p].at[i], b = rows.b[p].at[i];
            const float terms_a[2] = {low_of(a) * sum_a[0], high_of(a) * sum_a[1]};
            const float terms[2] = {low_of(r) * sum_r[0] + terms_a[0] - low_of(k) * sum_k[0] - low_of(b) * sum_b[0],
                                    high_of(r) * sum_r[1] + terms_a[1] - high_of(k) * sum_k[1] - high_of(b) * sum_b[1]};
            const float pair = terms[0] + terms[1];
            const float here = take_pair(left[j], pair);
            __syncwarp();  // everybody has read; the next eight tokens read no row before theirs but the last of these
            rows_of_growth[0][channel] = here - terms_a[0];
            rows_of_growth[1][channel] = here - terms[0] - terms_a[1];
        }
        store_block_transposed(tiles.r, 16 * p, column, results[0]);
        store_block_transposed(tiles.a, 16 * p, column, results[1]);
        store_block_transposed(tiles.k, 16 * p, column, results[2]);
        store_block_transposed(tiles.b, 16 * p, column, results[3]);
    }
}
