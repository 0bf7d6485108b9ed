// The rows of a chunk by halves (levels.cuh): a thread has a pair of channels over SEGMENT_LEN tokens, as in
// chunk_decay.cuh. Blocks begin as single tokens and double until they are the chunk. Where two become one, the rows of
// the later one's left tokens take the decay of the whole earlier one, and those of the earlier one's right tokens that
// of the later one. At the end left rows have decayed from the chunk's start, right ones up to its end. All factors are
// products of decays: where tokens decay none is above 1, and what underflows is nothing.
//
// Needs what chunk_decay.cuh needs, and LARGEST_DECAY.
#pragma once
#include "chunk_decay.cuh"

// The range that the frame of a chunk's middle has on both sides, to the base 2. Where few tokens decay by more than 8
// nats each, gradients of their decays are less than what is left of sums.
__device__ inline float range_of(int steps) { return LOG2_E * min(8 * steps, LARGEST_DECAY); }

// Whether a thread's pair of channels is out of it. A NaN is.
__device__ inline bool leaves_range(const Frame& frame, int steps) {
    const float range = range_of(steps);
    const auto leaves = [=](float exponent) { return !(fabsf(exponent) <= range); };
    bool found = leaves(frame.middle.x) || leaves(frame.middle.y);
    found |= leaves(frame.end.x - frame.middle.x) || leaves(frame.end.y - frame.middle.y);
    // Growth may hide a decay from the sums over halves.
    if constexpr (DECAY == Decay::log || DECAY == Decay::direct) found |= leaves(frame.farthest);
    return found;
}

// Whether a token of the thread decays by more than 8 nats where the decay is `direct`: its gradient is divided by what
// may be as small as what sums over a chunk leave of it.
__device__ inline bool is_steep(const RateSums& sums) {
    bool found = false;
    if constexpr (DECAY == Decay::direct)
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const float2 before = i == 0 ? float2{0.0f, 0.0f} : sums.at[i - 1], now = sums.at[i];
            found |= now.x - before.x < -8.0f * LOG2_E || now.y - before.y < -8.0f * LOG2_E;
        }
    return found;
}

// The decays of a thread's blocks, each at the place of the block's first token.
struct BlockDecays { float2 at[SEGMENT_LEN]; };

__device__ inline float2 product(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }

// Blocks of single tokens; `totals` takes the decays of whole segments, `kept` those of tokens. Tokens that are not
// there do not decay.
template <bool KEEPS_DECAYS, int PITCH, typename Bias = NoBias>
__device__ inline void begin_blocks(BlockDecays& decays, float2 (&totals)[SEGMENTS][PAIRS], const RawDecays& raw,
                                    int steps, float (*kept)[PITCH], int first_channel = 0, Bias bias = {}) {
    const int channel = first_channel + threadIdx.x % PAIRS * 2, segment = threadIdx.x / PAIRS;
    float2 total = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const bool present = segment * SEGMENT_LEN + i < steps;
        const auto factor = [&](int j) {
            return present && has_channel(channel + j) ? token_decay<DECAY>(raw.with(bias, i, j)) : 1.0f;
        };
        decays.at[i] = {factor(0), factor(1)};
        total = product(total, decays.at[i]);
    }
    if (!DECAYS_COME_IN_PARTS && segment >= SEGMENTS) return;
    totals[segment][threadIdx.x % PAIRS] = total;
    if constexpr (KEEPS_DECAYS)
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i)
            *reinterpret_cast<float2*>(&kept[segment * SEGMENT_LEN + i][threadIdx.x % PAIRS * 2]) = decays.at[i];
}

// The product over segments [first, first + COUNT).
template <int COUNT> __device__ inline float2 multiply_segments(const float2 (&totals)[SEGMENTS][PAIRS], int first) {
    float2 all = totals[first][threadIdx.x % PAIRS];
#pragma unroll
    for (int s = 1; s < COUNT; ++s) all = product(all, totals[first + s][threadIdx.x % PAIRS]);
    return all;
}

// Whether a thread's token is in the later of two blocks of LEVEL tokens, which become one: then its left row
// multiplies others there, else its right row.
template <int LEVEL> __device__ inline bool is_later_token(int i) {
    return LEVEL < SEGMENT_LEN ? i & LEVEL : threadIdx.x / PAIRS & max_of(LEVEL / SEGMENT_LEN, 1);
}

// The thread's pair of channels of what a whole chunk decays, in `factor`.
template <int COUNT> __device__ inline void write_decay(float (&factor)[COUNT], float2 decay) {
    if (threadIdx.x < PAIRS) *reinterpret_cast<float2*>(&factor[2 * threadIdx.x]) = decay;
}

using TokenRows = float2[SEGMENT_LEN];
// What that does to rows. Between segments it takes the totals, behind a barrier.
template <int LEVEL>
__device__ inline void double_blocks(TokenRows& left, TokenRows& right, const BlockDecays& decays,
                                     const float2 (&totals)[SEGMENTS][PAIRS]) {
    if constexpr (LEVEL < SEGMENT_LEN) {
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const int block = i & -LEVEL;
            if (i & LEVEL) left[i] = product(left[i], decays.at[block - LEVEL]);
            else right[i] = product(right[i], decays.at[block + LEVEL]);
        }
    } else {
        constexpr int COUNT = LEVEL / SEGMENT_LEN;  // segments of a block
        const int segment = min(static_cast<int>(threadIdx.x / PAIRS), SEGMENTS - 1);
        const float2 other = multiply_segments<COUNT>(totals, (segment & -COUNT) ^ COUNT), one = {1.0f, 1.0f};
        const bool later = is_later_token<LEVEL>(0);
        const float2 of_left = later ? other : one, of_right = later ? one : other;
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i)
            left[i] = product(left[i], of_left), right[i] = product(right[i], of_right);
    }
}
// And to their decays.
template <int LEVEL> __device__ inline void double_blocks(BlockDecays& decays) {
    if constexpr (LEVEL < SEGMENT_LEN)
#pragma unroll
        for (int b = 0; b < SEGMENT_LEN; b += 2 * LEVEL) decays.at[b] = product(decays.at[b], decays.at[b + LEVEL]);
}

// Sums of x over half-warps, COUNT of them: each exchange halves what a lane keeps, until one is left; `first` is its
// place.
template <int COUNT, int WIDTH, int SIZE> __device__ inline void sum_half_warps(float (&x)[SIZE], int& first) {
    const bool upper = lane_id() & WIDTH;
    if constexpr (COUNT > 1) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float low = x[i], high = x[COUNT / 2 + i];
            x[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, WIDTH);
        }
        if (upper) first += COUNT / 2;
    } else {
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], WIDTH);
    }
    if constexpr (WIDTH > 1) sum_half_warps<(COUNT > 1 ? COUNT / 2 : 1), WIDTH / 2>(x, first);
}

// Sums over half-warps of a thread's tokens, to a row per 16 pairs of channels: `reduced[g][t]`.
__device__ inline void write_own_terms(float (&reduced)[PAIRS / 16][CHUNK_LEN], float (&terms)[SEGMENT_LEN]) {
    const int segment = threadIdx.x / PAIRS;
    if (segment >= SEGMENTS) return;
    int first = 0;
    sum_half_warps<SEGMENT_LEN, 8>(terms, first);
    constexpr int LEFT = SEGMENT_LEN > 16 ? SEGMENT_LEN / 16 : 1;
    constexpr int COPIES = SEGMENT_LEN < 16 ? 16 / SEGMENT_LEN : 1;  // lanes that hold the same
    if (lane_id() % COPIES == 0) {
#pragma unroll
        for (int i = 0; i < LEFT; ++i)
            reduced[threadIdx.x % PAIRS / 16][segment * SEGMENT_LEN + first + i] = terms[i];
    }
}

// Adds such sums to the diagonal of a block whose rows begin at `row`.
__device__ inline void add_own_terms(Accumulator (&sum)[2], const float (&reduced)[PAIRS / 16][CHUNK_LEN], int row) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        if (at != column) continue;
#pragma unroll
        for (int g = 0; g < PAIRS / 16; ++g) sum[i / 4][i % 4] += reduced[g][row + at];
    }
}
