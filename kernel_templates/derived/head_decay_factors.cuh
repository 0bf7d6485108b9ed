// What multiplies the tokens of a chunk of LENGTH, by token: the forward makes it, and keeps it for the backward.
//
// Needs DECAY, HAS_DELTA, HAS_RATE, HAS_NORM.
#pragma once
#include "decay.cuh"
#include "mma.cuh"

constexpr float LEAST_FACTOR_EXPONENT = -126.0f;  // to the base 2: less is a factor of 0

// A factor of each token, or one that is the same for all of them, and takes their room but once.
template <bool BY_TOKEN, int LENGTH> struct Factor {
    alignas(BY_TOKEN ? 8 : 4) float of[BY_TOKEN ? LENGTH : 1];

    __device__ float operator[](int token) const { return of[BY_TOKEN ? token : 0]; }
    __device__ void set(int token, float x) {
        if (BY_TOKEN || token == 0) of[BY_TOKEN ? token : 0] = x;
    }
};
template <int LENGTH> __device__ inline float2 pair_of(const float (&factors)[LENGTH], int token) {
    return *reinterpret_cast<const float2*>(&factors[token]);
}
template <bool BY_TOKEN, int LENGTH>
__device__ inline float2 pair_of(const Factor<BY_TOKEN, LENGTH>& factor, int token) {
    if constexpr (BY_TOKEN) return pair_of(factor.of, token);
    return {factor[0], factor[0]};
}

// Of pairs of tokens.
template <int LENGTH> struct __align__(16) PairFactors {
    float decay[LENGTH];                        // c, to the base 2
    Factor<HAS_RATE || HAS_NORM, LENGTH> rate;  // beta over the norm of k
    Factor<HAS_NORM, LENGTH> of_q;              // scale over the norm of q
    Factor<HAS_NORM, LENGTH> of_k;              // 1 over the norm of k
    Factor<HAS_NORM, LENGTH> norm_of_q;         // 1 over the norm of q
};
// Of tokens with the state, and with themselves.
template <int LENGTH> struct __align__(16) StateFactors {
    float grown_q[LENGTH];               // of_q e^c
    float written[LENGTH];               // rate e^(D - c)
    Factor<HAS_DELTA, LENGTH> grown_k;   // of_k e^c, for what a delta erases
    Factor<!HAS_DELTA, LENGTH> of_self;  // M's diagonal, with no delta
    float end;                           // e^D
};
template <int LENGTH> struct FactorsOf : PairFactors<LENGTH>, StateFactors<LENGTH> {};
// Those of a longer chunk that consists of such parts; a token that is not there has zeros, and does not decay.
template <int LENGTH> struct ChunkFactors {
    float decay[LENGTH];
    float of_q[LENGTH], of_k[LENGTH], beta[LENGTH], norm_of_q[LENGTH];

    // The gradient of a token's log-decay. It is a difference of sums, whose rounding is left where the decay is 0.
    __device__ float of_decay(int token, float gradient) const {
        return decay[token] - (token > 0 ? decay[token - 1] : 0.0f) < LEAST_FACTOR_EXPONENT ? 0.0f : gradient;
    }
    // Of a token of `steps`, from what `factors_of` a part returns.
    template <int PART_LENGTH, typename FactorsOfPart>
    __device__ void read(int token, int steps, FactorsOfPart factors_of) {
        const int part = token / PART_LENGTH, place = token % PART_LENGTH, last = (steps - 1) / PART_LENGTH;
        const bool exists = token < steps;
        const auto& own = factors_of(min(part, last));
        float sum = 0.0f;
        if constexpr (HAS_DECAY) {
#pragma unroll
            for (int i = 0; i < LENGTH / PART_LENGTH; ++i)
                if (i < part && i <= last) sum += factors_of(i).decay[PART_LENGTH - 1];
            if (part <= last) sum += own.decay[place];
        }
        decay[token] = sum;
        of_q[token] = exists ? own.of_q[place] : 0.0f, of_k[token] = exists ? own.of_k[place] : 0.0f;
        beta[token] = !exists ? 0.0f : HAS_RATE ? own.rate[place] / own.of_k[place] : 1.0f;
        norm_of_q[token] = exists ? own.norm_of_q[place] : 0.0f;
    }
};

// The sum over lanes FIRST, 2 FIRST .. up to COUNT apart, and that of a warp's lanes from each on.
template <int FIRST, int COUNT> __device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int delta = FIRST; delta < COUNT; delta *= 2) x += __shfl_xor_sync(0xffffffffu, x, delta);
    return x;
}
__device__ inline float sum_from(float x) {
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const float other = __shfl_down_sync(0xffffffffu, x, delta);
        if (lane_id() + delta < 32) x += other;
    }
    return x;
}
__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
