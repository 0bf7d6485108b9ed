// The maps of delta rules from numbers to rates of writing and to log-decays, and the least square of a norm.
//
// Needs GATE, BETA_MAP, and what layer.cuh needs.
#pragma once
#include "layer.cuh"

enum class LogDecay { none, log, softplus, bounded };
constexpr LogDecay GATE_KIND = LogDecay(GATE);
constexpr bool HAS_PARAMETERS = GATE_KIND == LogDecay::softplus || GATE_KIND == LogDecay::bounded;
enum class RateMap { identity, sigmoid, twice_sigmoid };
constexpr RateMap RATE_MAP = RateMap(BETA_MAP);
constexpr float NORM_EPS = 1e-6f;

__device__ inline float rate_of(float x) {
    if constexpr (RATE_MAP == RateMap::identity) return x;
    return RATE_MAP == RateMap::sigmoid ? sigmoid(x) : 2.0f * sigmoid(x);
}

// exp(A_log), finite, as an infinite one times a gate of 0 would be no number.
__device__ inline float speed_of(float a_log) { return expf(a_log > 88.0f ? 88.0f : a_log); }

__device__ inline float log_decay_of(float x, float speed, float lower_bound) {
    if constexpr (GATE_KIND == LogDecay::none) return 0.0f;
    if constexpr (GATE_KIND == LogDecay::log) return x;
    if constexpr (GATE_KIND == LogDecay::bounded) return lower_bound * sigmoid(speed * x);
    return -speed * (x > 20.0f ? x : log1pf(exponential(x)));
}
