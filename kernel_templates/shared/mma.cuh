// Tensor-core products of 16-bit tiles in shared memory: fragments, their loads and stores, mma.sync m16n8k16. What is
// multiplied has the type of the call's rows.
//
// A lane is (g, t) = (lane / 4, lane % 4). An accumulator of 16 x 8 floats holds row g in [0], [1] and row g + 8 in
// [2], [3], columns 2 t and 2 t + 1. A fragment is a 16 x 16 block of pairs of T_IO in the same order: two accumulators
// side by side, rounded, are a fragment as they are. As the left operand it is the block itself; read as the right
// operand, `first_half` and `second_half` are the two 16 x 8 halves of its transpose. So a product can feed the next
// one without leaving the registers.
#pragma once
#include "types.cuh"

struct Fragment { unsigned at[4]; };
using Accumulator = float[4];

// A tile [rows][PITCH] of 16-bit elements by its address in shared memory. A pitch of an odd number of 16-byte
// units keeps eight neighbouring rows in different banks.
template <int PITCH> struct Tile {
    unsigned start;
    __device__ unsigned address(int row, int column) const { return start + 2 * (row * PITCH + column); }
};

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int group() { return threadIdx.x % 32 / 4; }
__device__ inline int quad_lane() { return threadIdx.x % 4; }

template <typename T = T_IO> __device__ inline unsigned pack(float low, float high) {
    unsigned pair;
    if constexpr (is_bf16<T>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <typename T = T_IO> __device__ inline float low_of(unsigned pair) {
    if constexpr (is_bf16<T>) return __uint_as_float(pair << 16);
    else return to_float(T{static_cast<unsigned short>(pair)});
}
template <typename T = T_IO> __device__ inline float high_of(unsigned pair) {
    if constexpr (is_bf16<T>) return __uint_as_float(pair & 0xffff0000u);
    else return to_float(T{static_cast<unsigned short>(pair >> 16)});
}

__device__ inline Fragment to_fragment(const Accumulator& left, const Accumulator& right) {
    return {{pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])}};
}

// Loads are volatile, which keeps them between the barriers; nothing else need wait for them, so they name no memory.
// Lane addresses for the four 8 x 8 matrices of a block: down first, or across first.

template <int PITCH> __device__ inline unsigned down_first() {
    return 2 * (lane_id() % 16 * PITCH + lane_id() / 16 * 8);
}
template <int PITCH> __device__ inline unsigned across_first() {
    return 2 * ((lane_id() % 8 + lane_id() / 16 * 8) * PITCH + lane_id() / 8 % 2 * 8);
}

__device__ inline Fragment load_matrices(unsigned address) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.at[0]), "=r"(f.at[1]), "=r"(f.at[2]), "=r"(f.at[3]) : "r"(address));
    return f;
}
__device__ inline Fragment load_matrices_transposed(unsigned address) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.at[0]), "=r"(f.at[1]), "=r"(f.at[2]), "=r"(f.at[3]) : "r"(address));
    return f;
}

// Left operand X[16, 16] = tile block, or its transpose.
template <int PITCH> __device__ inline Fragment load_left(Tile<PITCH> tile, int row, int column) {
    return load_matrices(tile.address(row, column) + down_first<PITCH>());
}
template <int PITCH> __device__ inline Fragment load_left_transposed(Tile<PITCH> tile, int row, int column) {
    return load_matrices_transposed(tile.address(row, column) + across_first<PITCH>());
}

// Right operand [16 (summed), 16], in halves of eight columns: at[0], at[1] and at[2], at[3].
struct Right { unsigned at[4]; };

template <int PITCH> __device__ inline Right load_right(Tile<PITCH> tile, int row, int column) {
    const Fragment f = load_matrices_transposed(tile.address(row, column) + down_first<PITCH>());
    return {{f.at[0], f.at[1], f.at[2], f.at[3]}};
}
// The transpose of the tile block: rows of the tile are columns of the operand.
template <int PITCH> __device__ inline Right load_right_transposed(Tile<PITCH> tile, int row, int column) {
    const Fragment f = load_matrices(tile.address(row, column) + across_first<PITCH>());
    return {{f.at[0], f.at[1], f.at[2], f.at[3]}};
}
__device__ inline Right transposed(const Fragment& f) { return {{f.at[0], f.at[2], f.at[1], f.at[3]}}; }

__device__ inline void multiply_add(Accumulator& sum, const Fragment& left, unsigned right_low, unsigned right_high) {
#define MULTIPLY(TYPE)                                                                                                 \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                            \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                       \
        : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(right_low), "r"(right_high))
    if constexpr (is_bf16<T_IO>) MULTIPLY("bf16");
    else MULTIPLY("f16");
#undef MULTIPLY
}
// sum[0 .. 1] += left x right: 16 x 16 outputs.
__device__ inline void multiply_add(Accumulator* sum, const Fragment& left, const Right& right) {
    multiply_add(sum[0], left, right.at[0], right.at[1]);
    multiply_add(sum[1], left, right.at[2], right.at[3]);
}

// By the lanes' addresses of the four matrices; before sm_90 there is no such store, and `word` gives the address of a
// lane's word of each matrix.
template <typename Word> __device__ inline void store_matrices(unsigned address, const Fragment& f, Word word) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(f.at[0]), "r"(f.at[1]), "r"(f.at[2]), "r"(f.at[3]) : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("st.shared.b32 [%0], %1;" ::"r"(word(i)), "r"(f.at[i]) : "memory");
#endif
}
template <int PITCH> __device__ inline void store_block(Tile<PITCH> tile, int row, int column, const Fragment& f) {
    store_matrices(tile.address(row, column) + down_first<PITCH>(), f, [&](int i) {
        return tile.address(row + group() + i % 2 * 8, column + 2 * quad_lane() + i / 2 * 8);
    });
}
// The block's transpose goes to the tile.
template <int PITCH>
__device__ inline void store_block_transposed(Tile<PITCH> tile, int row, int column, const Fragment& f) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(tile.address(row, column) + across_first<PITCH>()), "r"(f.at[0]), "r"(f.at[1]), "r"(f.at[2]),
                 "r"(f.at[3]) : "memory");
#else
    Fragment turned;
#pragma unroll
    for (int i = 0; i < 4; ++i)  // matrix (i % 2, i / 2) of the block goes to (i / 2, i % 2)
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned.at[i / 2 + i % 2 * 2]) : "r"(f.at[i]));
    store_block(tile, row, column, turned);
#endif
}

// Keeps what is on or below the diagonal `offset` places down, of a block on the diagonal.
__device__ inline void keep_lower(Accumulator (&sum)[2], int offset) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        if (row < column + offset) sum[i / 4][i % 4] = 0.0f;
    }
}
// The same of a rounded one, whose words [1] are below the diagonal and words [2] above it in every lane.
__device__ inline void keep_lower(Fragment& f, int offset) {
    const int below = group() - 2 * quad_lane() - offset;
    const unsigned mask = (below >= 0 ? 0xffffu : 0u) | (below > 0 ? 0xffff0000u : 0u);
    f.at[0] &= mask, f.at[2] = 0, f.at[3] &= mask;
}
// The blocks of a lower triangle by number: 0 is (0, 0), 1 (1, 0), 2 (1, 1), 3 (2, 0) ..
struct TriangleBlock { int p, q; };
__device__ inline TriangleBlock triangle_block(int number) {
    int p = 0;
    while (number > p) number -= ++p;
    return {p, number};
}
