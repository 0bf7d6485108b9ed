// The steps of a state space, and their slopes:
//
//     x = dt + dt_bias;   s = softplus(x) or x;   step = s brought between `least` and `most`;   log-decay = A step
//
// softplus(x) is x above 20 and log(1 + e^x) below, with the slopes 1 and e^x / (1 + e^x). A limit passes the gradient
// of what lies between both, and of what lies on one of them. What is no number stays none, and has no gradient behind
// limits. All of this is as torch has it.
//
// Needs HAS_SOFTPLUS, HAS_BIAS, HAS_LIMITS, T_A, T_DT_BIAS.
#pragma once
#include "types.cuh"

struct Limits { float least, most; };

// How the steps of a head come from dt.
struct StepMap {
    float rate = 1.0f, bias = 0.0f;  // rate is A
    Limits limits;
    __device__ StepMap(float rate, float bias, Limits limits) : rate(rate), bias(bias), limits(limits) {}
    __device__ StepMap(const T_A* A, const T_DT_BIAS* dt_bias, i64 head, Limits limits) : limits(limits) {
        rate = to_float(A[head]);
        if constexpr (HAS_BIAS) bias = to_float(dt_bias[head]);
    }
    __device__ float free(float dt) const {
        const float x = dt + bias;
        if constexpr (!HAS_SOFTPLUS) return x;
        return x > 20.0f ? x : log1pf(expf(x));
    }
    __device__ float step(float dt) const {
        const float x = free(dt);
        if constexpr (!HAS_LIMITS) return x;
        return x < limits.least ? limits.least : x > limits.most ? limits.most : x;
    }
    // The gradient of dt, from that of the step.
    __device__ float back(float dt, float grad) const {
        if constexpr (HAS_LIMITS) {
            const float x = free(dt);
            if (!(x >= limits.least && x <= limits.most)) return 0.0f;
        }
        if constexpr (!HAS_SOFTPLUS) return grad;
        const float x = dt + bias, z = expf(x);
        return x > 20.0f ? grad : grad * z / (z + 1.0f);
    }
};
