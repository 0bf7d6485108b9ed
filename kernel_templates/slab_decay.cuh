// The decays of a chunk for 64 of a head's channels, by threads that have a pair of them over SEGMENT_LEN tokens each: what
// chunk_decay.cuh is for whole heads.
//
// Needs HEAD_SIZE, SLABS, CHUNK_LEN, NUM_THREADS, T_IO, T_W, DECAY.
#pragma once
#include "copy.cuh"
#include "decay.cuh"
#include "slab.cuh"

constexpr int PAIRS = SLAB / 2;
constexpr int SEGMENT_LEN = CHUNK_LEN * PAIRS / NUM_THREADS;  // tokens of a thread, which has one pair of channels
constexpr int SEGMENTS = CHUNK_LEN / SEGMENT_LEN;
static_assert(SEGMENTS % 2 == 0 && SEGMENT_LEN * SEGMENTS == CHUNK_LEN && SEGMENTS * PAIRS == NUM_THREADS,
              "num_threads must make two or more equal segments of a chunk");

// Known to the compiler where a head fills its slabs, of which there may be one more than it needs.
__device__ inline bool has_channel(int channel) { return HEAD_SIZE == SLABS * SLAB || channel < HEAD_SIZE; }

// The rows of a chunk in global memory: its first token, and what lies between two tokens.
template <typename T> struct Rows { const T* first; i64 stride; };

// The decays of a thread's tokens, as they come from memory.
struct RawDecays {
    static constexpr int VECTOR = HEAD_SIZE % 4 == 0 ? 2 : 1;
    Words<T_W, VECTOR> held[SEGMENT_LEN][2 / VECTOR];

    // What is past the last token or channel is read from there: a load under a condition would have to wait for the
    // value that it may leave in place.
    __device__ void load(const Rows<T_W>& w, int first_channel, int steps) {
        const int first = threadIdx.x / PAIRS * SEGMENT_LEN, channel = first_channel + threadIdx.x % PAIRS * 2;
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const T_W* row = w.first + min(first + i, steps - 1) * w.stride;
#pragma unroll
            for (int j = 0; j < 2 / VECTOR; ++j)
                held[i][j] = *reinterpret_cast<const Words<T_W, VECTOR>*>(row + min(channel + j, HEAD_SIZE - VECTOR));
        }
    }
    __device__ float at(int i, int j) const { return held[i][j / VECTOR].at(j % VECTOR); }
};

// Sums of the rates of a thread's pair of channels up to each of its tokens.
struct RateSums { float2 at[SEGMENT_LEN]; };

// First half: sums within the thread's segment. Padding has no decay, by its w: a choice between rates would be a branch.
__device__ inline void sum_rates(RateSums& sums, float2 (&totals)[SEGMENTS][PAIRS], const RawDecays& raw,
                                 int first_channel, int steps) {
    const int pair = threadIdx.x % PAIRS, channel = first_channel + 2 * pair, segment = threadIdx.x / PAIRS;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const bool present = segment * SEGMENT_LEN + i < steps;
        const auto rate = [&](int j) {
            return decay_rate<DECAY>(present && has_channel(channel + j) ? raw.at(i, j) : NO_DECAY);
        };
        sum.x += rate(0), sum.y += rate(1);
        sums.at[i] = sum;
    }
    totals[segment][pair] = sum;
}

// Second half, behind a barrier: m and D of a thread's pair of channels and, before its first token, c - m; to the base 2.
struct Frame { float2 middle, end, origin; };
__device__ inline Frame frame_of(const float2 (&totals)[SEGMENTS][PAIRS]) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
    float2 middle = {0.0f, 0.0f}, end = middle, before = middle;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
        const float2 total = totals[s][index];
        if (s < segment) before.x += total.x, before.y += total.y;
        if (s < SEGMENTS / 2) middle.x += total.x, middle.y += total.y;
        end.x += total.x, end.y += total.y;
    }
    return {{RATE_UNIT * middle.x, RATE_UNIT * middle.y},
            {RATE_UNIT * end.x, RATE_UNIT * end.y},
            {RATE_UNIT * (before.x - middle.x), RATE_UNIT * (before.y - middle.y)}};
}
