// Kimi Delta Attention, 64 tokens of a head at once, as gradients of keys have them: numbers of [channel, token], of
// which a warp has 16 channels and all tokens; sums over a channel's tokens; and gates, with what gradients become on
// their way through them.
//
// Needs what channel_decay.cuh needs.
#pragma once
#include "channel_decay.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
// Of [channel, token], of which a warp has 16 channels and a lane two, eight apart: [n][2 i + j] is token 8 n + 2
// quad_lane() + j of channel group() + 8 i.
using ChannelSums = Accumulator[CHUNK_LEN / 8];
using OfChannels = float[2];
using OfTokens = float[CHUNK_LEN / 8][2];

// The gates of a chunk as they come, and later their gradients.
template <typename T> struct GateTile {
    static constexpr int PER_UNIT = 16 / sizeof(T), UNITS = TILE_COLUMNS / PER_UNIT, STEP = GROUP_THREADS / UNITS;
    uint4 units[HEAD_SIZE / TILE_COLUMNS][CHUNK_LEN][UNITS];

    // Those of a lane's channels and of the same tokens eight rows on are in different banks.
    __device__ uint4& unit(int slab, int row, int unit) {
        return units[slab][row][unit ^ (sizeof(T) == 4 ? row / 2 % 4 * 2 : row % 8)];
    }
    __device__ float& element(int slab, int row, int channel) {
        return reinterpret_cast<float*>(&unit(slab, row, channel / 4))[channel % 4];
    }
    __device__ SlabTile tile(int slab) const { return {shared_address(&units[slab][0][0])}; }
    // Those of the warp's channels, from `first` on.
    __device__ void load(ChannelSums& x, int slab, int first) {
        if constexpr (sizeof(T) == 4) {
            visit(x, slab, first, [](float& sum, float& gate) { sum = gate; });
        } else {
#pragma unroll
            for (int q = 0; q < CHUNK_LEN / 16; ++q) {
                const Fragment f = load_left_transposed(tile(slab), 16 * q, first);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[2 * q + i / 2][i % 2 * 2] = low_of<T>(f.at[i]);
                    x[2 * q + i / 2][i % 2 * 2 + 1] = high_of<T>(f.at[i]);
                }
            }
        }
    }
    __device__ void store(ChannelSums& x, int slab, int first) {
        if constexpr (sizeof(T) == 4) {
            visit(x, slab, first, [](float& sum, float& gate) { gate = sum; });
        } else {
#pragma unroll
            for (int q = 0; q < CHUNK_LEN / 16; ++q) {
                Fragment f;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    f.at[i] = pack<T>(x[2 * q + i / 2][i % 2 * 2], x[2 * q + i / 2][i % 2 * 2 + 1]);
                store_block_transposed(tile(slab), 16 * q, first, f);
            }
        }
    }
    template <typename Visit> __device__ void visit(ChannelSums& x, int slab, int first, Visit visit) {
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                visit(x[n][i], element(slab, 8 * n + 2 * quad_lane() + i % 2, first + group() + i / 2 * 8));
    }
};

__device__ inline float sum_of_quad(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Of eight of a channel's tokens, sums up to each; returns that of all.
__device__ inline float sum_up_to(float& first, float& second) {
    const float last = second;
    float sum = first + last;
    int lane = quad_lane();  // what is asked of it is found anew, as places are
    asm volatile("" : "+r"(lane));
#pragma unroll
    for (int delta = 1; delta < 4; delta *= 2) {
        const float other = __shfl_up_sync(ALL_LANES, sum, delta, 4);
        sum += lane >= delta ? other : 0.0f;
    }
    first = sum - last, second = sum;
    return __shfl_sync(ALL_LANES, sum, 3, 4);
}
// Of all of them ..
__device__ inline void sum_up_to(ChannelSums& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float before = 0.0f;
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n) {
            const float all = sum_up_to(x[n][2 * i], x[n][2 * i + 1]);
            x[n][2 * i] += before, x[n][2 * i + 1] += before, before += all;
        }
    }
}
// Sums from each on, with what is behind the last one.
__device__ inline void sum_from(ChannelSums& x, const OfChannels& end) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float behind = end[i];
#pragma unroll
        for (int n = CHUNK_LEN / 8 - 1; n >= 0; --n) {
            const float first = x[n][2 * i];
            float sum = first + x[n][2 * i + 1];
#pragma unroll
            for (int delta = 1; delta < 4; delta *= 2) {
                const float other = __shfl_down_sync(ALL_LANES, sum, delta, 4);
                sum += quad_lane() + delta < 4 ? other : 0.0f;
            }
            x[n][2 * i] = behind + sum, x[n][2 * i + 1] = behind + (sum - first);
            behind += __shfl_sync(ALL_LANES, sum, 0, 4);
        }
    }
}

// .. and sums of those behind each.
__device__ inline void sum_behind(ChannelSums& x) {
    sum_from(x, {});
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n) {
            const float of_next = __shfl_down_sync(ALL_LANES, x[n][2 * i], 1, 4);
            float of_eighth = 0.0f;
            if (n + 1 < CHUNK_LEN / 8) of_eighth = __shfl_sync(ALL_LANES, x[n + 1][2 * i], 0, 4);
            x[n][2 * i] = x[n][2 * i + 1], x[n][2 * i + 1] = quad_lane() < 3 ? of_next : of_eighth;
        }
}

__device__ inline void set_zero(ChannelSums& x) {
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = 0.0f;
}
// A lane's tokens from `steps` on get zeros.
__device__ inline void keep_tokens(ChannelSums& x, int steps) {
    if (steps == CHUNK_LEN) return;
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = 8 * n + 2 * quad_lane() + i % 2 < steps ? x[n][i] : 0.0f;
}

// The gradients of a lane's gates, in the place of those of log-decays, and their sums over tokens.
__device__ inline void through_gates(ChannelSums& gradients, const ChannelSums& gates, const Gate& gate,
                                     const OfChannels& bias, OfChannels& sums) {
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = gates[n][i] + bias[i / 2];
            float slope;
            if constexpr (LOG_DECAY == LogDecay::softplus) {
                slope = -gate.speed * reciprocal(1.0f + exp2_fast(-LOG2_E * x));
                if (slope < -88.0f) slope = 0.0f;  // the log-decay is no more than that: such a token leaves nothing
            } else {
                const float share = reciprocal(1.0f + exp2_fast(gate.inner * x));
                slope = gate.speed * gate.inner * (1.0f / (LOG2_E * LOG2_E)) * (share - share * share);
            }
            sums[i / 2] += gradients[n][i] *= slope;
        }
}
// The part of a_log's gradient that a lane's gates have, from the gradients of log-decays. A token that leaves nothing
// has none, however large its logarithm is.
__device__ inline float of_speed_of(const ChannelSums& gradients, const ChannelSums& gates, const Gate& gate,
                                    const OfChannels& bias) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = gate.logarithm(gates[n][i], bias[i / 2]);
            sum += gradients[n][i] * (x < -126.0f ? 0.0f : x);
        }
    return sum * (1.0f / LOG2_E);
}
