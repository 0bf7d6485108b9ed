// Tensor-core products of sm_90a: four warps together multiply 64 rows, from shared memory or held in registers as
// mma.cuh has them, with a tile of shared memory. Tiles are those of slab.cuh, whose swizzle is the hardware's.
#pragma once
#include "slab.cuh"

// What threads wrote to shared memory is seen by these products, and by bulk copies, only after a fence of the
// writer's.
__device__ inline void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Products read and write registers from here on ..
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// .. and until all but the last PENDING of the batches that ended are done.
__device__ inline void end_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ inline void wait_for_batches() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A tile by its place, from a row and a column on: rows of 128 bytes, eight of them 1024 bytes. The first part is what
// tiles differ in, so that places in one of them differ by an addition.
__device__ inline unsigned encoded(unsigned start) { return start >> 4 & 0x3fffu | 1u << 16; }
template <int STRIDE>
__device__ inline unsigned long long descriptor(SlabsTile<STRIDE> tile, int row, int column) {
    const int slab = STRIDE == 0 ? 0 : column / TILE_COLUMNS * STRIDE,
              within = STRIDE == 0 ? column : column % TILE_COLUMNS;
    const unsigned low = encoded(tile.start) + (slab + 128 * row + 2 * within) / 16;
    return 0x4000004000000000ull | low;
}

// Matrices of 8 x 8, each of them 8 rows of 16 bytes without a swizzle, side by side in rows that are `stride` bytes
// apart: as the words of fragments are. To be read along columns.
__device__ inline unsigned long long descriptor_of_matrices(const unsigned (&first)[32], int stride) {
    return 128ull / 16 << 32 | static_cast<unsigned>(stride / 16) << 16 | shared_address(first) >> 4 & 0x3fffu;
}

// How a tile is read: along its rows, or along its columns where its rows are what is summed over.
enum class Read { rows, columns };

#define SUMS_OF_16                                                                                           \
    "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), \
        "+f"(s[1][3])
#define SUMS_OF_32                                                                                                  \
    "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]),        \
        "+f"(s[1][3]), "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]), "+f"(s[3][0]), "+f"(s[3][1]),    \
        "+f"(s[3][2]), "+f"(s[3][3])
#define SUMS_OF_64                                                                                                  \
    SUMS_OF_32, "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]), "+f"(s[5][0]), "+f"(s[5][1]),           \
        "+f"(s[5][2]), "+f"(s[5][3]), "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]), "+f"(s[7][0]),    \
        "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
#define REGISTERS_OF_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_OF_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_OF_64                                                                                             \
    REGISTERS_OF_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define MULTIPLY(COLUMNS, TYPE, PLACES)                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE               \
                 " {" REGISTERS_OF_##COLUMNS "}, " PLACES ";"                                        \
                 : SUMS_OF_##COLUMNS : "l"(left), "l"(right), "n"(TURN_LEFT), "n"(TURN_RIGHT), "n"(ADD))
#define MULTIPLY_HELD(COLUMNS, TYPE, PLACES)                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE               \
                 " {" REGISTERS_OF_##COLUMNS "}, " PLACES ";"                                        \
                 : SUMS_OF_##COLUMNS                                                                 \
                 : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "l"(right),   \
                   "n"(TURN), "n"(ADD))
#define MULTIPLY_AS(MULTIPLY, COLUMNS, PLACES)                       \
    do {                                                             \
        if constexpr (is_bf16<T_IO>) MULTIPLY(COLUMNS, "bf16", PLACES); \
        else MULTIPLY(COLUMNS, "f16", PLACES);                       \
    } while (false)

// sum[64, COLUMNS] += left[64, 16] right[16, COLUMNS]; without ADD what was in the sum is lost.
template <int COLUMNS, Read LEFT, Read RIGHT, bool ADD = true>
__device__ inline void multiply_group(Accumulator* s, unsigned long long left, unsigned long long right) {
    static_assert(COLUMNS == 16 || COLUMNS == 32 || COLUMNS == 64, "products have 16, 32 or 64 columns");
    constexpr int TURN_LEFT = LEFT == Read::columns, TURN_RIGHT = RIGHT == Read::columns;
    if constexpr (COLUMNS == 16) MULTIPLY_AS(MULTIPLY, 16, "%8, %9, %12, 1, 1, %10, %11");
    else if constexpr (COLUMNS == 32) MULTIPLY_AS(MULTIPLY, 32, "%16, %17, %20, 1, 1, %18, %19");
    else MULTIPLY_AS(MULTIPLY, 64, "%32, %33, %36, 1, 1, %34, %35");
}
template <int COLUMNS, Read RIGHT, bool ADD = true>
__device__ inline void multiply_group(Accumulator* s, const Fragment& left, unsigned long long right) {
    static_assert(COLUMNS == 32 || COLUMNS == 64, "products have 32 or 64 columns");
    constexpr int TURN = RIGHT == Read::columns;
    if constexpr (COLUMNS == 32)
        MULTIPLY_AS(MULTIPLY_HELD, 32, "{%16, %17, %18, %19}, %20, %22, 1, 1, %21");
    else MULTIPLY_AS(MULTIPLY_HELD, 64, "{%32, %33, %34, %35}, %36, %38, 1, 1, %37");
}
#undef MULTIPLY
#undef MULTIPLY_HELD
#undef MULTIPLY_AS
#undef SUMS_OF_16
#undef SUMS_OF_32
#undef SUMS_OF_64
#undef REGISTERS_OF_16
#undef REGISTERS_OF_32
#undef REGISTERS_OF_64

// The same for the first of several products, whose sum is new, and for others; `first` is known to the compiler.
template <int COLUMNS, Read LEFT, Read RIGHT>
__device__ inline void multiply_group(bool first, Accumulator* s, unsigned long long left, unsigned long long right) {
    if (first) multiply_group<COLUMNS, LEFT, RIGHT, false>(s, left, right);
    else multiply_group<COLUMNS, LEFT, RIGHT>(s, left, right);
}
template <int COLUMNS, Read RIGHT>
__device__ inline void multiply_group(bool first, Accumulator* s, const Fragment& left, unsigned long long right) {
    if (first) multiply_group<COLUMNS, RIGHT, false>(s, left, right);
    else multiply_group<COLUMNS, RIGHT>(s, left, right);
}

// Keeps the compiler from moving what reads the sums above the wait before this.
template <int COUNT> __device__ inline void hold(Accumulator (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sums[i][j])::"memory");
}

// Registers of a thread from here on, for all of a group's warps: what some leave others can take.
template <int COUNT> __device__ inline void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
