// What the kernels of timex share: rows of numbers as 16-bit operands in shared memory, and products of 16-bit tiles.
//
// An fp32 number x is two of 16 bits: x s = high + low, s a power of two that brings the largest of some neighbours to
// [2^14, 2^15). Both are fp16 with 11 bits each, and what lies 2^-18 below the largest begins to lose some. A product
// is high high + high low + low high; the fourth is below the rounding of fp32. bf16 and fp16 are taken as they are,
// unless they meet fp32: then they are scaled too, and need no low part.
#pragma once
#include "mma.cuh"

constexpr int SEGMENT = 32;  // columns of a row that have one scale

template <typename T> constexpr int PARTS_OF = sizeof(T) == 4 ? 2 : 1;
template <typename T, bool SCALED> struct ProductOf { using type = T; };
template <typename T> struct ProductOf<T, true> { using type = fp16; };

// What fp16 has left over of two numbers.
__device__ inline unsigned pack_rest(unsigned pair, float low, float high) {
    return pack<fp16>(low - low_of<fp16>(pair), high - high_of<fp16>(pair));
}

// The scale of numbers whose largest is `most`, and one over it: both are powers of two, and not denormal. Beside an
// infinity all others would be zeros: a NaN says that nothing is known of them.
struct Scale {
    float up, down;
    __device__ explicit Scale(float most) {
        const unsigned exponent = max(__float_as_uint(most) >> 23, 15u);
        up = __uint_as_float((268u - exponent) << 23);
        down = __uint_as_float(exponent == 255u ? 0x7fffffffu : (exponent - 14u) << 23);
    }
};

__device__ inline float largest_of_lanes(float x, int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

// PARTS tiles [ROWS][pitch] of 16 bits one behind the other, by their address in shared memory. The pitch is an odd
// number of 16-byte units, so that eight neighbouring rows lie in different banks.
template <int PARTS, int ROWS> struct Rows {
    unsigned start;
    int pitch;  // elements
    __device__ int part_bytes() const { return 2 * ROWS * pitch; }
    __device__ unsigned address(int part, int row, int column) const {
        return start + part * part_bytes() + 2 * (row * pitch + column);
    }
};
__device__ constexpr int pitch_of(int columns) { return columns + 8; }

__device__ inline void store_shared(unsigned address, unsigned first, unsigned second) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

// Four neighbours x[position ...] of `length`, zeros outside of them.
template <typename T, int VECTOR>
__device__ inline void read_four(float (&x)[4], const T* source, int position, int length, bool exists) {
    if constexpr (VECTOR == 4) {
        Words<T, 4> four = {};
        if (exists && position >= 0 && position < length)
            four = *reinterpret_cast<const Words<T, 4>*>(source + position);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = four.at(i);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = position + i;
            x[i] = exists && at >= 0 && at < length ? to_float(source[at]) : 0.0f;
        }
    }
}

// Columns [first, first + columns) of ROWS rows, `present` of which exist, `stride` apart. What a row's segment or,
// with PER_ROW false, the segment of all rows was scaled by goes to `tell(segment, row, down)`.
template <typename T, typename T_PRODUCT, bool SCALED, bool PER_ROW, int VECTOR, int THREADS, int PARTS, int ROWS,
          typename Tell>
__device__ inline void stage(Rows<PARTS, ROWS> target, const T* source, i64 stride, int present, int first, int columns,
                             int length, Tell tell) {
    constexpr int LANES = SEGMENT / 4, STEPS = ROWS / (32 / LANES);
    const int row = lane_id() / LANES, column = lane_id() % LANES * 4;
    for (int segment = threadIdx.x / 32; segment < columns / SEGMENT; segment += THREADS / 32) {
        float x[STEPS][4], most[STEPS];
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            const int at = row + n * (ROWS / STEPS);
            read_four<T, VECTOR>(x[n], source + at * stride, first + segment * SEGMENT + column, length, at < present);
        }
        if constexpr (SCALED) {
            float of_all = 0.0f;
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                most[n] = fmaxf(fmaxf(fabsf(x[n][0]), fabsf(x[n][1])), fmaxf(fabsf(x[n][2]), fabsf(x[n][3])));
                if constexpr (PER_ROW) most[n] = largest_of_lanes(most[n], LANES);
                else of_all = fmaxf(of_all, most[n]);
            }
            if constexpr (!PER_ROW) of_all = largest_of_lanes(of_all, 32);
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                const Scale scale(PER_ROW ? most[n] : of_all);
                if (column == 0) tell(segment, row + n * (ROWS / STEPS), scale.down);
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] *= scale.up;
            }
        }
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            const unsigned pairs[2] = {pack<T_PRODUCT>(x[n][0], x[n][1]), pack<T_PRODUCT>(x[n][2], x[n][3])};
            const int at = row + n * (ROWS / STEPS);
            store_shared(target.address(0, at, segment * SEGMENT + column), pairs[0], pairs[1]);
            if constexpr (PARTS == 2)
                store_shared(target.address(1, at, segment * SEGMENT + column), pack_rest(pairs[0], x[n][0], x[n][1]),
                             pack_rest(pairs[1], x[n][2], x[n][3]));
        }
    }
}

// result = left x right + sum: 16 x 8 outputs of DEPTH products each, 16 or 8. A sum of zeros costs nothing.
template <typename T, int DEPTH> __device__ inline void multiply(Accumulator& result, const unsigned* left,
                                                                 const unsigned* right, const Accumulator& sum) {
    if constexpr (DEPTH == 16 && is_bf16<T>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]),
              "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
    else if constexpr (DEPTH == 16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]),
              "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
    else if constexpr (is_bf16<T>)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
            : "r"(left[0]), "r"(left[1]), "r"(right[0]),
              "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
    else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
            : "r"(left[0]), "r"(left[1]), "r"(right[0]),
              "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
}

// The parts' products from the small ones to the large one: product(result, left part, right part, sum).
template <int LEFT_PARTS, int RIGHT_PARTS, typename Product>
__device__ inline void multiply_parts(Accumulator& sum, Product product) {
    if constexpr (LEFT_PARTS == 2) product(sum, 1, 0, sum);
    if constexpr (RIGHT_PARTS == 2) product(sum, 0, 1, sum);
    product(sum, 0, 0, sum);
}

// The triangle makes work uneven: item 0 is the largest. Warps take items in turn, there and back.
__device__ inline int item_of(int pass, int warp, int warps) {
    return pass * warps + (pass % 2 ? warps - 1 - warp : warp);
}
