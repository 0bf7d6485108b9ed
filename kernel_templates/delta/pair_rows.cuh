// Pairs of neighbouring channels of a head's rows in global memory, for threads that have a pair each.
//
// Needs HEAD_SIZE, and has_channel of chunk_decay.cuh.
#pragma once
#include "mma.cuh"

// A pair of channels, rounded, and to a row in global memory as one store, where it can be: spelt out, as write_global
// is.
template <typename T> __device__ inline Words<T, 2> rounded(float2 x) {
    if constexpr (sizeof(T) == 4) return {{__float_as_uint(x.x), __float_as_uint(x.y)}};
    else return {{pack<T>(x.x, x.y)}};
}
template <typename T> __device__ inline void write_pair(T* row, int channel, const Words<T, 2>& pair) {
    T* const target = row + channel;
    if constexpr (HEAD_SIZE % 2 != 0) {
        const T(&both)[2] = reinterpret_cast<const T(&)[2]>(pair);
        if (has_channel(channel)) target[0] = both[0];
        if (has_channel(channel + 1)) target[1] = both[1];
    } else if (has_channel(channel)) {
        if constexpr (sizeof(T) == 4)
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target), "r"(pair.word[0]), "r"(pair.word[1])
                         : "memory");
        else asm volatile("st.global.b32 [%0], %1;" ::"l"(target), "r"(pair.word[0]) : "memory");
    }
}
// A pair from there, as it is; past the last channel zeros.
template <typename T> __device__ inline unsigned read_pair(const T* row, int channel) {
    if constexpr (HEAD_SIZE % 4 == 0)
        return has_channel(channel) ? *reinterpret_cast<const unsigned*>(row + channel) : 0u;
    const unsigned first = has_channel(channel) ? row[channel].bits : 0u;
    return first | (has_channel(channel + 1) ? unsigned{row[channel + 1].bits} << 16 : 0u);
}
