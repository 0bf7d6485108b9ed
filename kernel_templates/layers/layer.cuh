// Rows of channels as threads hold them: VECTOR neighbours at a time, in float32 once they are used.
//
// Needs VECTOR.
#pragma once
#include "overlap.cuh"

// Elements of a type that one access moves: what VECTOR neighbours take, up to 16 bytes.
template <typename T> constexpr int ACCESS = min_of(VECTOR, 16 / static_cast<int>(sizeof(T)));

// VECTOR neighbours as they come from memory. All loads of a thread are under way before the first is looked at.
template <typename T> struct Piece {
    Words<T, ACCESS<T>> words[VECTOR / ACCESS<T>];
    __device__ void load(const T* source) {
#pragma unroll
        for (int i = 0; i < VECTOR / ACCESS<T>; ++i)
            words[i] = load_early<Words<T, ACCESS<T>>>(source + i * ACCESS<T>);
    }
    __device__ float at(int i) const { return words[i / ACCESS<T>].at(i % ACCESS<T>); }
};

// Stores are spelt out: the compiler may make several of one.
template <typename T> __device__ inline void write(T* target, const float (&x)[VECTOR]) {
    using Access = Pack<T, ACCESS<T>>;
#pragma unroll
    for (int i = 0; i < VECTOR; i += ACCESS<T>) {
        Access pack;
#pragma unroll
        for (int e = 0; e < ACCESS<T>; ++e) pack.at[e] = from_float<T>(x[i + e]);
        if constexpr (sizeof(Access) == 16) {
            const uint4& words = reinterpret_cast<const uint4&>(pack);
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target + i), "r"(words.x), "r"(words.y),
                         "r"(words.z), "r"(words.w) : "memory");
        } else if constexpr (sizeof(Access) == 8) {
            const uint2& words = reinterpret_cast<const uint2&>(pack);
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target + i), "r"(words.x), "r"(words.y) : "memory");
        } else {
            *reinterpret_cast<Access*>(target + i) = pack;
        }
    }
}

// What is left of x where it is stored as T.
template <typename T> __device__ inline float rounded(float x) { return to_float(from_float<T>(x)); }

// Has VECTOR neighbours brought near: a line by the thread whose piece it begins with.
template <typename T> __device__ inline void prefetch(const T* source) {
    if (reinterpret_cast<unsigned long long>(source) % 128 < VECTOR * sizeof(T))
        asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

// By the hardware's own approximations, which are within 2 units in the last place; e^x within 2 + |x|, and 0 below the
// normal numbers.
__device__ inline float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

// What something is multiplied by for its gate, and the slope of that.
enum class Gate { identity, sigmoid, silu };
template <Gate GATE> __device__ inline float opened(float gate) {
    if constexpr (GATE == Gate::identity) return gate;
    return GATE == Gate::silu ? gate * sigmoid(gate) : sigmoid(gate);
}
template <Gate GATE> __device__ inline float opened_slope(float gate) {
    if constexpr (GATE == Gate::identity) return 1.0f;
    const float share = sigmoid(gate);
    return share * (1.0f - share) * (GATE == Gate::silu ? gate : 1.0f) + (GATE == Gate::silu ? share : 0.0f);
}
