// The decays of a chunk for DECAY_CHANNELS channels at once: a head's, or where DECAYS_COME_IN_PARTS 64 of them in each
// of DECAY_PARTS parts. A thread has a pair of channels over SEGMENT_LEN tokens: c_t, the sum of the log-decays up to
// token t, m over the first half and D over all. Logarithms are to the base 2, for which the GPU has an instruction.
//
// Needs DECAY_CHANNELS, DECAY_PARTS, DECAYS_COME_IN_PARTS, CHANNELS, HEAD_SIZE, CHUNK_LEN, NUM_THREADS, T_IO, T_W,
// DECAY.
#pragma once
#include "decay.cuh"

constexpr int PAIRS = DECAY_CHANNELS / 2;
constexpr int SEGMENT_LEN = ceil_power(ceil_div(CHUNK_LEN * PAIRS, NUM_THREADS));
constexpr int SEGMENTS = CHUNK_LEN / SEGMENT_LEN;
static_assert(DECAYS_COME_IN_PARTS || SEGMENTS >= 2,
              "num_threads must be at least the head size, rounded up to a multiple of 32");
static_assert(!DECAYS_COME_IN_PARTS || (SEGMENTS % 2 == 0 && SEGMENTS * PAIRS == NUM_THREADS),
              "num_threads must make two or more equal segments of a chunk");

// Known to the compiler where a head fills its parts, of which there may be one more than it needs.
__device__ inline bool has_channel(int channel) {
    return HEAD_SIZE == DECAY_PARTS * DECAY_CHANNELS || channel < HEAD_SIZE;
}

// The thread's pair of channels in `factor`.
__device__ inline void write_factor(float (&factor)[CHANNELS], float2 exponent) {
    if (threadIdx.x < PAIRS)
        *reinterpret_cast<float2*>(&factor[2 * threadIdx.x]) = {
            exp2_fast(exponent.x / FACTOR_STEPS), exp2_fast(exponent.y / FACTOR_STEPS)};
}

// The decays of a thread's tokens, as they come from memory.
struct RawDecays {
    static constexpr int VECTOR = HEAD_SIZE % 4 == 0 ? 2 : 1;
    Words<T_W, VECTOR> held[SEGMENT_LEN][2 / VECTOR];

    // `w` is the chunk's first token of `steps`. What is past the last token or channel is read from there: a load
    // under a condition would have to wait for the value that it may leave in place.
    __device__ void load(const T_W* w, i64 token_stride, int steps, int first_channel = 0) {
        const int first = threadIdx.x / PAIRS * SEGMENT_LEN, channel = first_channel + threadIdx.x % PAIRS * 2;
        const T_W* row = w + min(first, steps - 1) * token_stride;
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            // In parts there are no registers for a row that is carried along.
            if constexpr (DECAYS_COME_IN_PARTS) row = w + min(first + i, steps - 1) * token_stride;
#pragma unroll
            for (int j = 0; j < 2 / VECTOR; ++j)
                held[i][j] = *reinterpret_cast<const Words<T_W, VECTOR>*>(row + min(channel + j, HEAD_SIZE - VECTOR));
            if (!DECAYS_COME_IN_PARTS && first + i + 1 < steps) row += token_stride;
        }
    }
    __device__ float at(int i, int j) const { return held[i][j / VECTOR].at(j % VECTOR); }
    // What its map takes.
    template <typename Bias> __device__ float with(Bias bias, int i, int j) const { return bias.add(at(i, j), j); }
};

// The thread's place in w, a chunk further with every load, or back.
template <int WAY = 1> struct DecayCursor {
    static constexpr int VECTOR = RawDecays::VECTOR;
    const char* next;
    int stride;

    __device__ static int first() { return threadIdx.x / PAIRS * SEGMENT_LEN; }
    __device__ static int channel(int j) {
        return min(static_cast<int>(threadIdx.x % PAIRS) * 2 + j, HEAD_SIZE - VECTOR);
    }
    __device__ DecayCursor(const T_W* w, i64 token_stride) : stride(static_cast<int>(token_stride * sizeof(T_W))) {
        next = reinterpret_cast<const char*>(w + channel(0)) + i64(first()) * stride;
    }
    // As RawDecays::load; a chunk that begins behind the last token, `steps` of which are below 1, reads that token.
    __device__ void load(RawDecays& raw, int steps) {
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i)
#pragma unroll
            for (int j = 0; j < 2 / VECTOR; ++j)
                raw.held[i][j] = load_early<Words<T_W, VECTOR>>(
                    next + i64(min(i, steps - 1 - first())) * stride + (channel(j) - channel(0)) * sizeof(T_W));
        next += i64(WAY * CHUNK_LEN) * stride;
    }
};

// Tokens that are not there have no decay.
__device__ inline void clear_decays(RawDecays& raw, int steps) {
    const int first = threadIdx.x / PAIRS * SEGMENT_LEN;
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i)
        if (first + i >= steps)
            reinterpret_cast<Pack<T_W, 2>&>(raw.held[i]) = {from_float<T_W>(NO_DECAY), from_float<T_W>(NO_DECAY)};
}

// Sums of the rates of a thread's pair of channels up to each of its tokens.
struct RateSums { float2 at[SEGMENT_LEN]; };

// First half: sums within the thread's segment. Padding has no decay; in parts by its w, as a choice between rates
// would be a branch.
template <typename Bias = NoBias>
__device__ inline void sum_rates(RateSums& sums, float2 (&totals)[SEGMENTS][PAIRS], const RawDecays& raw, int steps,
                                 int first_channel = 0, Bias bias = {}) {
    const int channel = first_channel + threadIdx.x % PAIRS * 2, segment = threadIdx.x / PAIRS;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const bool present = segment * SEGMENT_LEN + i < steps;
        const auto rate = [&](int j) {
            const bool exists = present && has_channel(channel + j);
            if constexpr (!DECAYS_COME_IN_PARTS) return exists ? decay_rate<DECAY>(raw.with(bias, i, j)) : 0.0f;
            else return decay_rate<DECAY>(exists ? raw.with(bias, i, j) : NO_DECAY);
        };
        sum.x += rate(0), sum.y += rate(1);
        sums.at[i] = sum;
    }
    if (DECAYS_COME_IN_PARTS || segment < SEGMENTS) totals[segment][threadIdx.x % PAIRS] = sum;
}

// Second half, behind a barrier: m and D of a thread's pair of channels and, before its first token, c - m.
struct Frame {
    float2 middle, end, origin;
    // the largest |c_t - m| of the thread's tokens, where it is worked out: growth may hide it from m and D
    float farthest;
};
__device__ inline Frame frame_of(const float2 (&totals)[SEGMENTS][PAIRS]) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
    Frame frame = {};
    float2 before = {0.0f, 0.0f};
    if constexpr (HAS_DECAY) {
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
            const float2 total = totals[s][index];
            if (s < segment) before.x += total.x, before.y += total.y;
            if (s < SEGMENTS / 2) frame.middle.x += total.x, frame.middle.y += total.y;
            frame.end.x += total.x, frame.end.y += total.y;
        }
    }
    frame.origin = {RATE_UNIT * (before.x - frame.middle.x), RATE_UNIT * (before.y - frame.middle.y)};
    frame.middle.x *= RATE_UNIT, frame.middle.y *= RATE_UNIT, frame.end.x *= RATE_UNIT, frame.end.y *= RATE_UNIT;
    return frame;
}
