// Storage types, conversions and the decay maps. Arithmetic is always fp32; these types only name how a
// tensor is stored. Written without CUDA headers, so NVRTC needs nothing but this text.
#pragma once

struct fp16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
using fp32 = float;
using i64 = long long;

enum class Decay { raw, sigmoid, log, direct, none };
enum class StateLayout { vk, kv };

template <typename T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int ceil_power(int x) { return x <= 1 ? 1 : 2 * ceil_power((x + 1) / 2); }
__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__device__ constexpr int max_of(int a, int b) { return a < b ? b : a; }

__device__ inline float to_float(fp32 x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Round to nearest even, as torch does.
template <typename T> __device__ T from_float(float x);
template <> __device__ inline fp32 from_float<fp32>(float x) { return x; }
template <> __device__ inline fp16 from_float<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ inline bf16 from_float<bf16>(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // The conversion instruction starts with sm_80. A NaN stays a NaN: adding the rounding bias could carry it to inf.
    const unsigned bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = is_nan ? 0x7fffu : static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return y;
}

// COUNT neighbours moved by one instruction; the address must be a multiple of COUNT * sizeof(T).
template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT) Pack { T at[COUNT]; };

// The same as it comes from memory. Kept in whole words until it is used: taking 16-bit elements apart is an
// instruction, and one right after a load would make the thread wait for it.
template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT) Words {
    unsigned word[sizeof(T) * COUNT / 4];
    __device__ float at(int i) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(word[i]);
        else return to_float(T{static_cast<unsigned short>(word[i / 2] >> (16 * (i % 2)))});
    }
};
template <typename T> struct Words<T, 1> {
    T whole;
    __device__ float at(int) const { return to_float(whole); }
};

// The per-step factor d(w) that multiplies the state, and its slope dd/dw. With Decay::none there is no w.
constexpr float SIGMOID_RATE = 0.6065306597126334f;  // e^(-1/2)

template <Decay DECAY> __device__ inline float decay_factor(float w) {
    if constexpr (DECAY == Decay::raw) return expf(-expf(w));
    if constexpr (DECAY == Decay::sigmoid) return expf(-SIGMOID_RATE / (1.0f + expf(-w)));
    if constexpr (DECAY == Decay::log) return expf(w);
    return w;
}

template <Decay DECAY> __device__ inline float decay_slope(float w) {
    // e^w e^(-e^w) as one exponential: the product of the two overflows where the result is an honest zero.
    if constexpr (DECAY == Decay::raw) return -expf(fminf(w, 88.0f) - expf(w));
    if constexpr (DECAY == Decay::sigmoid) {
        const float sigma = 1.0f / (1.0f + expf(-w));
        return -SIGMOID_RATE * sigma / (1.0f + expf(w)) * expf(-SIGMOID_RATE * sigma);
    }
    if constexpr (DECAY == Decay::log) return expf(w);
    return 1.0f;
}

// What is added to the w of a thread's pair of channels before its map: nothing, unless decay_bias.cuh has something.
struct NoBias { __device__ float add(float w, int) const { return w; } };

// The compiler's own conversion: it sees through it, so that tiles of one struct share a base register.
template <typename T> __device__ inline unsigned shared_address(const T* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A load that stays where it stands: what is known to be read-only the compiler moves past barriers, down to its use,
// which then waits for the memory.
template <typename T> __device__ inline T load_early(const void* source) {
    T x;
    if constexpr (sizeof(T) == 16) {
        uint4& words = reinterpret_cast<uint4&>(x);
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(source));
    } else if constexpr (sizeof(T) == 8) {
        uint2& words = reinterpret_cast<uint2&>(x);
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(source));
    } else if constexpr (sizeof(T) == 4) {
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(reinterpret_cast<unsigned&>(x)) : "l"(source));
    } else {
        asm volatile("ld.global.b16 %0, [%1];" : "=h"(reinterpret_cast<unsigned short&>(x)) : "l"(source));
    }
    return x;
}
