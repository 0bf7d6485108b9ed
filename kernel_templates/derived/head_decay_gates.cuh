// The gates of a chunk's tokens, a lane each, as they come from memory, so that nothing waits for them, and their maps:
//
//     log-decay = g, or -exp(a_log) softplus(g + dt_bias)      rate = beta, sigmoid(beta) or 2 sigmoid(beta)
//
// or, with HAS_STEP, where g and beta are the same and a_log is A itself,
//
//     rate = softplus(g + dt_bias)      log-decay = A rate
//
// What is past the last token neither decays nor writes.
//
// Needs CHUNK_LEN, T_W, T_BETA, DECAY, HAS_RATE, HAS_GATE, HAS_STEP, HAS_BIAS, BETA_MAP.
#pragma once
#include "gate_maps.cuh"
#include "mma.cuh"

// Less is a factor of 0 to a float; sums over a chunk keep their digits.
constexpr float LEAST_DECAY_EXPONENT = -160.0f;

// How log-decays of a head come from g, and the slope of that.
struct GateMap {
    float speed = 1.0f, bias = 0.0f;
    __device__ GateMap(const float* a_log, const float* dt_bias, i64 head) {
        if constexpr (HAS_GATE) speed = HAS_STEP ? -a_log[head] : speed_from(a_log[head]);
        if constexpr (HAS_BIAS) bias = dt_bias[head];
    }
    __device__ float step(float g) const {
        const float x = g + bias;
        return x > 20.0f ? x : log1pf(exp2_fast(LOG2_E * x));
    }
    __device__ float step_slope(float g) const { return sigmoid(g + bias); }
    __device__ float decay(float g) const { return HAS_GATE ? -speed * step(g) : g; }
};

struct Gates {
    Words<T_BETA, 1> beta;
    Words<T_W, 1> g;
    bool is_there;
    __device__ void load(const T_W* of_g, i64 g_stride, const T_BETA* of_beta, i64 beta_stride, int steps) {
        is_there = lane_id() < min(steps, CHUNK_LEN);
        const int token = max(min(lane_id(), steps - 1), 0);
        if (steps <= 0) return;
        if constexpr (HAS_RATE && !HAS_STEP) beta = load_early<Words<T_BETA, 1>>(of_beta + token * beta_stride);
        if constexpr (HAS_DECAY) g = load_early<Words<T_W, 1>>(of_g + token * g_stride);
    }
    __device__ float rate(const GateMap& map) const {
        if (!is_there) return 0.0f;
        if constexpr (HAS_STEP) return map.step(g.at(0));
        return HAS_RATE ? rate_of(beta.at(0)) : 1.0f;
    }
    // The log-decay, to the base 2; what is no number stays none.
    __device__ float decay(const GateMap& map) const {
        const float x = LOG2_E * map.decay(g.at(0));
        return !is_there ? 0.0f : x < LEAST_DECAY_EXPONENT ? LEAST_DECAY_EXPONENT : x;
    }
};
