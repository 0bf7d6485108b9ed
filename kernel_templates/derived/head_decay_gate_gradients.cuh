// What gradients of rates and log-decays become on their way through the maps of gates.
//
// Needs what head_decay_gates.cuh needs; CHUNK_LEN in steps of 32.
#pragma once
#include "head_decay_factors.cuh"
#include "head_decay_gates.cuh"

// The gradients of a chunk's gates, by a warp, from those of log-decays; a lane has every 32nd token. With HAS_GATE the
// chunk's part of those of a_log and dt_bias too; with HAS_STEP, of A.
struct GateGradients {
    Words<T_W, 1> g[CHUNK_LEN / 32];
    float of_speed = 0.0f, of_bias = 0.0f;
    __device__ void load(const T_W* source, i64 stride, int steps) {
        if constexpr (HAS_GATE)
#pragma unroll
            for (int i = 0; i < CHUNK_LEN / 32; ++i)
                g[i] = load_early<Words<T_W, 1>>(source + min(32 * i + lane_id(), steps - 1) * stride);
    }
    // Of a token's g, from those of its log-decay and, where that is made of it too, of its rate.
    __device__ float through(const GateMap& map, int i, float of_decay, float of_rate, bool exists) {
        if constexpr (!HAS_GATE) return of_decay;
        const float x = g[i].at(0), of_step = (HAS_STEP ? of_rate : 0.0f) - map.speed * of_decay;
        const float made = of_step * map.step_slope(x);
        if (exists) of_speed += of_decay * (HAS_STEP ? map.step(x) : fmaxf(map.decay(x), -128.0f)), of_bias += made;
        return made;
    }
    __device__ void write(float* a_log_chunks, float* bias_chunks, i64 place) {
        if constexpr (HAS_GATE) {
            const float speed = sum_of_lanes<1, 32>(of_speed), bias = sum_of_lanes<1, 32>(of_bias);
            if (lane_id() == 0) {
                a_log_chunks[place] = speed;
                if constexpr (HAS_BIAS) bias_chunks[place] = bias;
            }
            __syncwarp();
        }
    }
};
