// The gates of a chunk's tokens, a lane each, as they come from memory, so that nothing waits for them. What is past
// the last token neither decays nor writes.
//
// Needs CHUNK_LEN, T_W, T_BETA, DECAY, HAS_RATE.
#pragma once
#include "decay.cuh"
#include "mma.cuh"

// Less is a factor of 0 to a float; sums over a chunk keep their digits.
constexpr float LEAST_DECAY_EXPONENT = -160.0f;

struct Gates {
    Words<T_BETA, 1> beta;
    Words<T_W, 1> g;
    bool is_there;
    __device__ void load(const T_W* of_g, i64 g_stride, const T_BETA* of_beta, i64 beta_stride, int steps) {
        is_there = lane_id() < min(steps, CHUNK_LEN);
        const int token = max(min(lane_id(), steps - 1), 0);
        if (steps <= 0) return;
        if constexpr (HAS_RATE) beta = load_early<Words<T_BETA, 1>>(of_beta + token * beta_stride);
        if constexpr (HAS_DECAY) g = load_early<Words<T_W, 1>>(of_g + token * g_stride);
    }
    __device__ float rate() const { return !is_there ? 0.0f : HAS_RATE ? beta.at(0) : 1.0f; }
    // The log-decay, to the base 2; what is no number stays none.
    __device__ float decay() const {
        const float x = LOG2_E * g.at(0);
        return !is_there ? 0.0f : x < LEAST_DECAY_EXPONENT ? LEAST_DECAY_EXPONENT : x;
    }
};
