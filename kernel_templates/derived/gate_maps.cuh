// What kernels of delta rules make of beta and of norms.
//
// Needs BETA_MAP, DECAY.
#pragma once
#include "decay.cuh"

constexpr float NORM_EPS = 1e-6f;
// 1 over a row's norm, from the sum of its squares.
__device__ inline float norm_factor(float squares) {
    float factor;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(squares + NORM_EPS));
    return factor;
}

// e^a_log, which stays finite, as an infinite one times a gate of 0 would be no number. What is no number stays none.
__device__ inline float speed_from(float a_log, float most = 88.0f) {
    return exp2_fast(LOG2_E * (a_log > most ? most : a_log));
}

enum class RateMap { identity, sigmoid, twice_sigmoid };
constexpr RateMap RATE_MAP = RateMap(BETA_MAP);
__device__ inline float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2_E * x)); }
__device__ inline float rate_of(float beta) {
    if constexpr (RATE_MAP == RateMap::identity) return beta;
    return RATE_MAP == RateMap::sigmoid ? sigmoid(beta) : 2.0f * sigmoid(beta);
}
// By the rate itself.
__device__ inline float slope_of_rate(float rate) {
    if constexpr (RATE_MAP == RateMap::identity) return 1.0f;
    return rate * (1.0f - (RATE_MAP == RateMap::sigmoid ? rate : 0.5f * rate));
}
