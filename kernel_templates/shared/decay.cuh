// What all tensor-core kernels share, whatever their tiles are: rates of decay, their slopes, small helpers.
//
// Needs T_IO, DECAY.
#pragma once
#include "types.cuh"

// Taken from lane 0, so that the compiler knows it to be the same in the whole warp.
__device__ inline int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr bool HAS_DECAY = DECAY != Decay::none;
constexpr float LOG2_E = 1.4426950408889634f;

// log2 of the per-step factor as RATE_UNIT times a rate, so that rates can be summed first.
template <Decay MAP> __device__ inline float decay_rate(float w) {
    if constexpr (MAP == Decay::raw) return exp2_fast(w * LOG2_E);
    if constexpr (MAP == Decay::sigmoid) return reciprocal(1.0f + exp2_fast(-w * LOG2_E));
    if constexpr (MAP == Decay::log) return w;
    return log2f(w);
}
constexpr float RATE_UNIT = DECAY == Decay::raw       ? -LOG2_E
                            : DECAY == Decay::sigmoid ? -SIGMOID_RATE * LOG2_E
                            : DECAY == Decay::log     ? LOG2_E
                                                      : 1.0f;
// What a token's decay is where it stands for itself. One below e^-64 is nothing beside what a token adds to a state;
// but a gradient of `direct` is divided by it, so there it is no less, with its sign.
constexpr float LEAST_DECAY = 1.6038109e-28f;
template <Decay MAP> __device__ inline float token_decay(float w) {
    if constexpr (MAP == Decay::direct) return fabsf(w) < LEAST_DECAY ? copysignf(LEAST_DECAY, w) : w;
    return exp2_fast(RATE_UNIT * decay_rate<MAP>(w));
}
// A w without a decay, for tokens that are not there: an exponential takes the last for minus infinity.
constexpr float NO_DECAY = DECAY == Decay::log ? 0.0f : DECAY == Decay::direct ? 1.0f : -3e38f;
// d ln(factor) / dw.
template <Decay MAP> __device__ inline float log_decay_slope(float w) {
    // Finite, so that it takes a gradient of nothing to nothing.
    if constexpr (MAP == Decay::raw) return -exp2_fast(fminf(w, 88.0f) * LOG2_E);
    if constexpr (MAP == Decay::sigmoid) {
        const float sigma = reciprocal(1.0f + exp2_fast(-w * LOG2_E));
        return -SIGMOID_RATE * sigma * (1.0f - sigma);
    }
    if constexpr (MAP == Decay::log) return 1.0f;
    return 1.0f / token_decay<MAP>(w);
}

// A state changes frames by a factor that spans two half chunks. Where the decay's map does not bound it, that may be
// less than a float has, although the product is not: it comes in two steps.
constexpr int FACTOR_STEPS = DECAY == Decay::sigmoid ? 1 : 2;

// Two neighbours of a row, as they come from memory.
__device__ inline float2 unpack(unsigned pair) {
    if constexpr (sizeof(T_IO) == 2) {
        const T_IO low = {static_cast<unsigned short>(pair)}, high = {static_cast<unsigned short>(pair >> 16)};
        return {to_float(low), to_float(high)};
    }
}
