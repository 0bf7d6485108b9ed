// w0 [heads, K]: what is added to w before its map, in float32, in the calls over a pool that have it. The strides of w
// bring it along, so that the kernels of other calls take nothing more. T_W0 is void there.
//
// Needs HEAD_SIZE, T_W0.
#pragma once
#include "span.cuh"

template <typename T> struct StridesAndBias : Strides { const T* w0; };

// The w of a channel with it.
__device__ inline float add_bias(float w, const Strides&, i64, int) { return w; }
template <typename T>
__device__ inline float add_bias(float w, const StridesAndBias<T>& strides, i64 head, int channel) {
    return w + to_float(strides.w0[head * HEAD_SIZE + channel]);
}

// For a thread's pair of channels, as it comes from memory; past the last channel that of the last.
template <typename T> struct BiasPair {
    Words<T, 2> held;
    __device__ float add(float w, int j) const { return w + held.at(j); }
};
__device__ inline NoBias bias_of(const Strides&, i64, int) { return {}; }
template <typename T>
__device__ inline BiasPair<T> bias_of(const StridesAndBias<T>& strides, i64 head, int channel) {
    const auto of = [&](int i) { return strides.w0[head * HEAD_SIZE + min(i, HEAD_SIZE - 1)]; };
    const T low = of(channel), high = of(channel + 1);
    if constexpr (sizeof(T) == 2) return {{low.bits | unsigned(high.bits) << 16}};
    else return {{__float_as_uint(low), __float_as_uint(high)}};
}

// The stride of w from token to token with such a pair, for functions that are called.
template <typename T> struct StrideAndPair { i64 token; BiasPair<T> bias; };
__device__ inline i64 with_bias(i64 stride, NoBias) { return stride; }
template <typename T> __device__ inline StrideAndPair<T> with_bias(i64 stride, BiasPair<T> bias) {
    return {stride, bias};
}
__device__ inline i64 stride_of(i64 stride) { return stride; }
template <typename T> __device__ inline i64 stride_of(const StrideAndPair<T>& both) { return both.token; }
__device__ inline NoBias bias_of(i64) { return {}; }
template <typename T> __device__ inline BiasPair<T> bias_of(const StrideAndPair<T>& both) { return both.bias; }

template <typename T> struct BiasTypes {
    using OfStrides = StridesAndBias<T>;
    using OfPair = BiasPair<T>;
    using OfToken = StrideAndPair<T>;
};
template <> struct BiasTypes<void> { using OfStrides = Strides; using OfPair = NoBias; using OfToken = i64; };
using DecayStrides = BiasTypes<T_W0>::OfStrides;
using DecayBias = BiasTypes<T_W0>::OfPair;
using TokenStride = BiasTypes<T_W0>::OfToken;

__device__ constexpr bool is_bias(NoBias) { return false; }
template <typename T> __device__ constexpr bool is_bias(BiasPair<T>) { return true; }
