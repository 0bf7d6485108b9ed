// The end of the backward of gated linear attention and its kin, for the keys' side: from dQ and dK of 16 channels in
// accumulators [channel, token] to dq, dk and the gradient of the log-decay.
//
// Needs CONSTANT_DECAY, BONUS, T_U, T_W beside what chunk.cuh needs.
#pragma once
#include "chunk.cuh"
#include "gla_decay_gradient.cuh"

// An operand as [channel, token]: a lane's words lie as the accumulators do.
struct OperandRows {
    Fragment at[BLOCKS];
    template <typename Tile> __device__ OperandRows(const Tile& tile, int column) {
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) at[p] = load_left_transposed(tile, 16 * p, column);
    }
};

// Q * dQ of the lane's two channels, summed over the tokens.
__device__ inline void sum_products(float (&sums)[2], const OperandRows& rows, const Accumulator* d) {
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned word = rows.at[n / 2].at[n % 2 * 2 + j];
            sums[j] += low_of(word) * d[n][2 * j] + high_of(word) * d[n][2 * j + 1];
        }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int delta = 1; delta < 4; delta *= 2) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], delta);
}

// What a lane sums over its tokens, for its two channels: of the bonus, and the log-decay's gradient.
struct ChannelSums { float bonus[2], decay[2]; };

// dq and dk go to the operands' tiles. `growth` holds e^(c_t - m), the row before the first token first, and takes the
// gradient of the log-decays, a row a token. `left` is z. `diagonal` is dy_t . v_t, `bonus` scale u of the lane's
// channels. A lane has two neighbouring tokens of eight, for two channels.
template <int PITCH, typename Tile> __device__ inline void write_pair_gradients(
    const Accumulator* d_q, const Accumulator* d_k, const OperandRows& q_rows, const OperandRows& k_rows,
    const Tile& q_tile, const Tile& k_tile, float (*growth)[PITCH], float (&left)[2], const float* diagonal,
    const float (&bonus)[2], float scale, int column, int steps, ChannelSums& sums) {
    const float inverse_scale = scale == 0.0f ? 0.0f : 1.0f / scale;
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) {
        Fragment results[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 2 * p + i / 2, j = i % 2, channel = column + group() + 8 * j, token = 8 * n + 2 * quad_lane();
            const unsigned q_word = q_rows.at[p].at[i], k_word = k_rows.at[p].at[i];
            const float q[2] = {low_of(q_word), high_of(q_word)}, k[2] = {low_of(k_word), high_of(k_word)};
            const float sum_q[2] = {d_q[n][2 * j], d_q[n][2 * j + 1]}, sum_k[2] = {d_k[n][2 * j], d_k[n][2 * j + 1]};
            float grown[3] = {1.0f, 1.0f, 1.0f};
            if constexpr (HAS_DECAY)
#pragma unroll
                for (int t = 0; t < 3; ++t) grown[t] = growth[token + t][channel];
            float d_plain_q[2], d_plain_k[2];
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const float seen = grown[t + !BONUS];
                d_plain_q[t] = sum_q[t] * seen * scale,
                d_plain_k[t] = HAS_DECAY ? sum_k[t] * reciprocal(grown[t + 1]) : sum_k[t];
                if constexpr (BONUS) {
                    // The rounded operands give q and k back.
                    const float plain_q = q[t] * reciprocal(seen) * inverse_scale, plain_k = k[t] * grown[t + 1];
                    const float product = diagonal[token + t];
                    d_plain_q[t] += product * bonus[j] * plain_k, d_plain_k[t] += product * bonus[j] * plain_q;
                    sums.bonus[j] += product * scale * plain_q * plain_k;
                }
            }
            results[0].at[i] = pack(d_plain_q[0], d_plain_q[1]);
            results[1].at[i] = pack(d_plain_k[0], d_plain_k[1]);
            if constexpr (HAS_DECAY) {
                const float terms_q[2] = {q[0] * sum_q[0], q[1] * sum_q[1]};
                const float terms[2] = {terms_q[0] - k[0] * sum_k[0], terms_q[1] - k[1] * sum_k[1]},
                            pair = terms[0] + terms[1];
                float here = take_pair(left[j], pair);
                // everybody has read; the next eight tokens read no row before theirs but the last of these
                __syncwarp();
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const float grad = BONUS ? here - terms_q[t] : here;
                    if constexpr (!CONSTANT_DECAY) growth[token + t][channel] = grad;
                    else if (token + t < steps) sums.decay[j] += grad;
                    here -= terms[t];
                }
            }
        }
        store_block_transposed(q_tile, 16 * p, column, results[0]);
        store_block_transposed(k_tile, 16 * p, column, results[1]);
    }
}

// scale u of the lane's channels; `channel` is the first of its warp.
__device__ inline void read_bonus(float (&bonus)[2], const T_U* u, float scale, int channel) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int lane_channel = channel + group() + 8 * j;
        bonus[j] = BONUS && lane_channel < HEAD_SIZE ? scale * to_float(u[lane_channel]) : 0.0f;
    }
}

// Those of a chunk, to a row of du and of a constant decay's gradient; `channel` is the first of the warp.
__device__ inline void write_channel_sums(ChannelSums& sums, float* du, T_DW* dw, i64 row, const T_W* w, int channel) {
    if constexpr (BONUS || CONSTANT_DECAY)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float &of_bonus = sums.bonus[j], &of_decay = sums.decay[j];
#pragma unroll
            for (int delta = 1; delta < 4; delta *= 2) {
                of_bonus += __shfl_xor_sync(0xffffffffu, of_bonus, delta);
                of_decay += __shfl_xor_sync(0xffffffffu, of_decay, delta);
            }
            const int lane_channel = channel + group() + 8 * j;
            if (quad_lane() == 0 && lane_channel < HEAD_SIZE) {
                if constexpr (BONUS) du[row + lane_channel] = of_bonus;
                if constexpr (CONSTANT_DECAY)
                    dw[row + lane_channel] =
                        from_float<T_DW>(of_decay * log_decay_slope<DECAY>(to_float(w[lane_channel])));
            }
        }
}
