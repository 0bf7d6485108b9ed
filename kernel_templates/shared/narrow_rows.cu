// Rows of numbers in another type, times powers of two that bring the largest number of a tensor near to one, or back.
//
//   from  [batch, tokens, heads, SIZE]  T_FROM  in, by strides
//   to    the same shape  T_TO  out, contiguous; it may be `from`
//   largest_of_rows [3], largest_of_dy [1]  fp32  in: the largest sizes in q (or r), k and v, and in dy
//   largest  [SLOT + 1]  fp32  out at SLOT, zero before: the largest size in `from`, not of infinities and NaNs
//
// The tensors whose bits are in FACTORS count: numbers are divided by their powers of two, or with RESTORES multiplied.
//
//   narrow_rows         to = from, scaled
//   narrow_as_they_are  to = from, not scaled, and the largest of from
//   narrow_again        to = from, scaled, if that is another result than that of narrow_as_they_are
//   find_largest        the largest of from, scaled
//
// Grid (batch times blocks of TOKENS tokens). A thread has VECTOR neighbours at a time.
#include "types.cuh"

struct Strides { i64 batch, token, head; };  // in elements; the innermost one is 1

enum Tensor { Q, K, V, DY };

constexpr int PER_ROW = SIZE / VECTOR;
static_assert(SIZE % VECTOR == 0, "vectors must divide the rows");
constexpr float LARGEST_FLOAT = 3.402823466e38f;

// The exponent of the power of two that a tensor is divided by. Where all numbers are zero, or less than any that
// float32 has all digits of, it is 0.
template <Tensor TENSOR> __device__ inline int exponent_of(const float* largest) {
    if constexpr ((FACTORS >> TENSOR) % 2 == 0) return 0;
    const int biased = static_cast<int>(__float_as_uint(largest[TENSOR == DY ? 0 : TENSOR]) >> 23);
    if (biased == 0) return 0;
    const int exponent = biased - 127;
    if constexpr (TENSOR == V || TENSOR == DY) return exponent - EXPONENT;
    return exponent < LEAST_EXPONENT || exponent > MOST_EXPONENT ? exponent : 0;
}

// Multiplies by 2^exponent, in two steps: one factor alone can leave the range of float32 where the product does not.
struct Power {
    float first, second;
    __device__ explicit Power(int exponent) {
        const auto of = [](int e) { return __uint_as_float(static_cast<unsigned>(min(max(e, -126), 127) + 127) << 23); };
        first = of(exponent / 2);
        second = of(exponent - exponent / 2);
    }
    __device__ float operator()(float x) const { return x * first * second; }
};

__device__ inline int exponent_of_factors(const float* largest_of_rows, const float* largest_of_dy) {
    const int exponent = exponent_of<Q>(largest_of_rows) + exponent_of<K>(largest_of_rows)
                         + exponent_of<V>(largest_of_rows) + exponent_of<DY>(largest_of_dy);
    return RESTORES ? exponent : -exponent;
}

// Calls visit(the place of a vector in `from`, its place in a contiguous tensor) for the block's share.
template <typename Visit>
__device__ inline void for_each_vector(Strides strides, i64 tokens, int heads, Visit visit) {
    const i64 blocks = (tokens + TOKENS - 1) / TOKENS, batch = blockIdx.x / blocks,
              first = blockIdx.x % blocks * TOKENS;
    const int steps = static_cast<int>(min(tokens - first, i64(TOKENS))), per_token = heads * PER_ROW;
    for (int item = threadIdx.x; item < steps * per_token; item += NUM_THREADS) {
        const int step = item / per_token, rest = item % per_token, head = rest / PER_ROW,
                  column = rest % PER_ROW * VECTOR;
        visit(batch * strides.batch + (first + step) * strides.token + head * strides.head + column,
              ((batch * tokens + first + step) * heads + head) * SIZE + column);
    }
}

// Writes each number as `change` makes it.
template <typename Change>
__device__ inline void write_rows(const T_FROM* from, T_TO* to, Strides strides, i64 tokens, int heads, Change change) {
    for_each_vector(strides, tokens, heads, [&](i64 source, i64 target) {
        const Words<T_FROM, VECTOR> x = *reinterpret_cast<const Words<T_FROM, VECTOR>*>(from + source);
        Pack<T_TO, VECTOR> changed;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) changed.at[i] = from_float<T_TO>(change(x.at(i)));
        *reinterpret_cast<Pack<T_TO, VECTOR>*>(to + target) = changed;
    });
}

// Numbers that are infinite or none do not count: they stay as they are, and must spoil nothing but their own sequence.
__device__ inline float larger(float found, float x) {
    const float size = fabsf(x);
    return size <= LARGEST_FLOAT ? fmaxf(found, size) : found;
}

__device__ inline void keep_largest(float* largest, float found) {
    const unsigned of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(found));  // sizes are ordered as their bits
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned*>(largest) + SLOT, of_warp);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) narrow_rows(
    const T_FROM* from, T_TO* to, const float* __restrict__ largest_of_rows, const float* __restrict__ largest_of_dy,
    Strides from_strides, i64 tokens, i64 heads) {
    const Power power(exponent_of_factors(largest_of_rows, largest_of_dy));
    write_rows(from, to, from_strides, tokens, static_cast<int>(heads), power);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) narrow_as_they_are(
    const T_FROM* __restrict__ from, T_TO* __restrict__ to, float* __restrict__ largest, Strides from_strides,
    i64 tokens, i64 heads) {
    float found = 0.0f;
    write_rows(from, to, from_strides, tokens, static_cast<int>(heads), [&](float x) {
        found = larger(found, x);
        return x;
    });
    keep_largest(largest, found);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) narrow_again(
    const T_FROM* __restrict__ from, T_TO* __restrict__ to, const float* __restrict__ largest_of_rows,
    const float* __restrict__ largest_of_dy, Strides from_strides, i64 tokens, i64 heads) {
    const int exponent = exponent_of_factors(largest_of_rows, largest_of_dy);
    if (exponent != 0) write_rows(from, to, from_strides, tokens, static_cast<int>(heads), Power(exponent));
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) find_largest(
    const T_FROM* __restrict__ from, float* __restrict__ largest, const float* __restrict__ largest_of_rows,
    const float* __restrict__ largest_of_dy, Strides from_strides, i64 tokens, i64 heads) {
    const Power power(exponent_of_factors(largest_of_rows, largest_of_dy));
    float found = 0.0f;
    for_each_vector(from_strides, tokens, static_cast<int>(heads), [&](i64 source, i64) {
        const Words<T_FROM, VECTOR> x = *reinterpret_cast<const Words<T_FROM, VECTOR>*>(from + source);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) found = larger(found, power(x.at(i)));
    });
    keep_largest(largest, found);
}
