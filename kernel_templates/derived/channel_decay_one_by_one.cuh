// Kimi Delta Attention, gradients of keys without frames: what pairs of tokens give to a lane's channels, with the
// decays between both, multiplied from token to token. Two neighbours of the lane's tokens are taken at once, with
// eight other tokens at a time; of those that do not count as pairs P and N have zeros. Memory has pairs, q, k and
// written, as in channel_decay_group_key_gradients.cu.
//
// Needs what channel_decay.cuh needs.
#pragma once
#include "channel_decay_channel_sums.cuh"

using ChannelTable = float[CHUNK_LEN][HEAD_SIZE];
__device__ inline float element_of(const Slab<CHUNK_LEN>& slab, int row, int column) {
    return to_float(reinterpret_cast<const T_IO*>(&slab.units[row][column / 8 ^ row % 8])[column % 8]);
}
__device__ inline float element_of(const uint4& unit, int i) {
    const unsigned word = i < 2 ? unit.x : i < 4 ? unit.y : i < 6 ? unit.z : unit.w;
    return i % 2 ? high_of(word) : low_of(word);
}
// P W and N W.
template <typename Memory>
__device__ inline void multiply_before(const Memory& smem, const ChannelTable& decays, int slab, int own,
                                       ChannelTable& of_q, ChannelTable& of_k) {
    const int channel = slab * TILE_COLUMNS + own;
#pragma unroll 1
    for (int n = 0; n < CHUNK_LEN / 8; ++n) {
        const int token = 8 * n + 2 * quad_lane();
        OfChannels decay[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}}, read[2] = {}, erased[2] = {};
#pragma unroll 1
        for (int unit = n; unit >= 0; --unit) {
            uint4 pairs[2][2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int side = 0; side < 2; ++side)
                    pairs[side][j] = smem.pairs[side].units[token + j][unit ^ (token + j) % 8];
#pragma unroll
            for (int step = 7; step >= 0; --step) {
                const int other = 8 * unit + step;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float written = element_of(smem.written[slab], other, own + 8 * i),
                                own_decay = decays[other][channel + 8 * i];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float x = decay[j][i] * written;
                        read[j][i] += element_of(pairs[0][j], step) * x;
                        erased[j][i] += element_of(pairs[1][j], step) * x;
                        decay[j][i] *= other <= token + j ? own_decay : 1.0f;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            of_q[token + i % 2][channel + i / 2 * 8] = read[i % 2][i / 2];
            of_k[token + i % 2][channel + i / 2 * 8] = erased[i % 2][i / 2];
        }
    }
}
// P^T Q' + N^T K'.
template <typename Memory>
__device__ inline void multiply_behind(Memory& smem, const ChannelTable& decays, int slab, int own,
                                       ChannelTable& of_w) {
    const int channel = slab * TILE_COLUMNS + own;
#pragma unroll 1
    for (int n = 0; n < CHUNK_LEN / 8; ++n) {
        const int token = 8 * n + 2 * quad_lane();
        OfChannels decay[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}}, sums[2] = {};
#pragma unroll 1
        for (int unit = n; unit < CHUNK_LEN / 8; ++unit)
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                const int other = 8 * unit + step;
                const unsigned of_p = *word_of(smem.pairs[0], other, token / 2),
                               of_n = *word_of(smem.pairs[1], other, token / 2);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float query = element_of(smem.q[slab], other, own + 8 * i),
                                key = element_of(smem.k[slab], other, own + 8 * i),
                                own_decay = decays[other][channel + 8 * i];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        decay[j][i] *= other > token + j ? own_decay : 1.0f;
                        sums[j][i] += decay[j][i] * ((j ? high_of(of_p) : low_of(of_p)) * query +
                                                     (j ? high_of(of_n) : low_of(of_n)) * key);
                    }
                }
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) of_w[token + i % 2][channel + i / 2 * 8] = sums[i % 2][i / 2];
    }
}
