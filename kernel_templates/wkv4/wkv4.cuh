// What both directions of RWKV-4 share: a channel's sums, the weights of past and present, loads ahead of their use.
//
// Needs T_IO, DECAY, CHUNK_LEN, NUM_THREADS.
#pragma once
#include "decay.cuh"

static_assert(DECAY == Decay::raw || DECAY == Decay::log, "decay must be raw or log");
static_assert(CHUNK_LEN >= 1 && CHUNK_LEN <= 32, "chunk_len must be 1 to 32");
static_assert(NUM_THREADS >= 32 && NUM_THREADS <= 1024 && NUM_THREADS % 32 == 0,
              "num_threads must be 32, 64, ... 1024");

constexpr float NEVER = -1e38f;  // the max of sums without a token

// Strides in elements; the innermost one is 1.
struct RowStrides { i64 batch, token; };

// The logarithm of the decay of a step. Where there is no past, infinity would be multiplied by zero tokens.
__device__ inline float log_decay(float w) { return fmaxf(DECAY == Decay::raw ? -expf(w) : w, -1e30f); }

// Sums over the tokens so far, e^max times num and den. The max is the key that won plus a w for each of the `age`
// tokens since: adding w in every step would round in every step, and always the same way.
struct Sums {
    float num, den, key, age;

    // The same with an age of 0, to be written. What the max loses to rounding goes into the sums: keys of 100 would
    // lose 4e-6 of them whenever a state is left behind, and a decode does that in every step, always the same way.
    __device__ Sums settled(float w) const {
        const float decay = __fmul_rn(age, w), max = key + decay, change = max - key;
        const float rounding = (key - (max - change)) + (decay - change) + fmaf(age, w, -decay);
        // more has only a max above 1e7, which is beyond help
        const float lost = fabsf(rounding) < 1.0f ? rounding : 0.0f;
        return {fmaf(num, lost, num), fmaf(den, lost, den), max, 0.0f};
    }
    __device__ float mean() const { return den != 0.0f ? num / den : 0.0f; }
};

// Where a channel's three floats lie: num, den, max, `channels` apart.
__device__ inline Sums read_sums(const float* from, i64 channels) {
    return {from[0], from[channels], from[2 * channels], 0.0f};
}
__device__ inline void write_sums(float* to, i64 channels, const Sums& sums) {
    to[0] = sums.num, to[channels] = sums.den, to[2 * channels] = sums.key;
}

// e^(a - max(a, b)) of the past and e^(b - max(a, b)) of the present, from b - a: one exponential, as the other is 1.
struct Weights { float past, now; };
__device__ inline Weights ordered(float lead, float less) {
    return lead > 0.0f ? Weights{less, 1.0f} : Weights{1.0f, less};
}
__device__ inline Weights weights(float lead) { return ordered(lead, exp2_fast(-fabsf(lead) * LOG2_E)); }

// A token joins the sums: the weights with which it does.
__device__ inline Weights step_weights(Sums& sums, float k, float w) {
    sums.age += 1.0f;
    const float lead = fmaf(-sums.age, w, k - sums.key);
    if (lead > 0.0f) sums.key = k, sums.age = 0.0f;
    // Where keys are alike and decays slow, the same weight multiplies the sums in every step, and its error adds up:
    // near 1 a series, which is right to the last bit but one, is 4 times as near as the special function unit.
    const float x = -fabsf(lead);
    const float series = fmaf(fmaf(fmaf(fmaf(x, 1.0f / 24, 1.0f / 6), x, 0.5f), x, 1.0f), x, 1.0f);
    return ordered(lead, x > -0.0625f ? series : exp2_fast(x * LOG2_E));
}

// The tokens of a chunk as they come from memory. Only the last chunk of a sequence has less than CHUNK_LEN.
template <typename T> struct Chunk {
    T at[CHUNK_LEN];

    __device__ void load(const T* from, i64 stride, i64 count) {
        if (count >= CHUNK_LEN) {
#pragma unroll
            for (int i = 0; i < CHUNK_LEN; ++i, from += stride) at[i] = load_early<T>(from);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK_LEN; ++i, from += stride)
                if (i < count) at[i] = load_early<T>(from);
        }
    }
    __device__ void to_floats(float (&x)[CHUNK_LEN]) const {
#pragma unroll
        for (int i = 0; i < CHUNK_LEN; ++i) x[i] = to_float(at[i]);
    }
};
