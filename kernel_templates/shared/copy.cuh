// Rows of a tensor to shared memory without waiting (cp.async), and rows of shared memory to a tensor.
#pragma once
#include "sequence.cuh"

// Elements that one access moves: as many as both the row's length and its alignment in the tensor allow.
__device__ constexpr int vector_of(int size, int bytes) {
    return size % 8 == 0 ? 16 / bytes : size % 4 == 0 ? min_of(4, 16 / bytes) : 1;
}

// Zeros to all of a block's shared memory.
template <int THREADS, typename Smem> __device__ inline void clear(Smem& smem) {
    constexpr int UNITS = sizeof(Smem) / 16, WORDS = sizeof(Smem) % 16 / 4;
    for (int i = threadIdx.x; i < UNITS; i += THREADS) reinterpret_cast<uint4*>(&smem)[i] = {};
    if (threadIdx.x < WORDS) reinterpret_cast<unsigned*>(&smem)[4 * UNITS + threadIdx.x] = 0;
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Has the SIZE elements of a row brought near, for a load that comes later.
template <int SIZE, typename T> __device__ inline void prefetch_row(const T* row) {
    constexpr int LINE = 128 / sizeof(T);
#pragma unroll
    for (int i = 0; i < SIZE; i += LINE) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i) : "memory");
}

template <int BYTES> __device__ inline void copy_async(unsigned target, const void* source, bool present) {
    const int bytes = present ? BYTES : 0;  // zeros where there is nothing to copy
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(BYTES), "r"(bytes)
                     : "memory");
}

// Rows [0, ROWS) of `width` elements, `stride` apart, to rows of PITCH elements; zeros from row `present` on. The
// threads index, index + THREADS, ... share the work. SIZE is the row's length in the tensor, which decides what one
// access may move; WIDTH bounds `width`.
template <typename T, int SIZE, int ROWS, int WIDTH, int PITCH, int THREADS>
__device__ inline void copy_rows(T* target, const T* source, i64 stride, i64 present, int width, int index) {
    constexpr int VECTOR = vector_of(SIZE, sizeof(T)), PER_ROW = ceil_div(WIDTH, VECTOR);
    constexpr int SIZE_OF_T = sizeof(T);
    const auto copy = [&](const T* from, int row, int column, unsigned place) {
        if constexpr (VECTOR == 1) target[row * PITCH + column] = row < present ? *from : T{};
        else copy_async<VECTOR * SIZE_OF_T>(place, from, row < present);
    };
    const unsigned start = shared_address(target);
    // a thread stays in its column, and a place is a constant from its first one
    if constexpr (THREADS % PER_ROW == 0) {
        constexpr int ROW_STEP = THREADS / PER_ROW;
        const int first = index / PER_ROW, column = index % PER_ROW * VECTOR;
        const T* from = source + first * stride + column;
        const unsigned place = start + SIZE_OF_T * (first * PITCH + column);
#pragma unroll
        for (int n = 0; n < ceil_div(ROWS, ROW_STEP); ++n, from += ROW_STEP * stride) {
            const int row = first + n * ROW_STEP;
            if (column < width && (ROWS % ROW_STEP == 0 || row < ROWS))
                copy(from, row, column, place + n * ROW_STEP * PITCH * SIZE_OF_T);
        }
    } else {
#pragma unroll
        for (int n = 0; n < ceil_div(ROWS * PER_ROW, THREADS); ++n) {
            const int item = index + n * THREADS, row = item / PER_ROW, column = item % PER_ROW * VECTOR;
            if (column < width && item < ROWS * PER_ROW)
                copy(source + row * stride + column, row, column, start + SIZE_OF_T * (row * PITCH + column));
        }
    }
}

// Rows of a tensor, ROWS at a time, forwards or, with a WAY of -1, backwards: the thread's place in the next ones, so
// that an address is an addition. Strides in bytes have 32 bits (tensors.needs_copy).
template <typename T, int SIZE, int ROWS, int WIDTH, int PITCH, int THREADS, int WAY = 1> struct RowCursor {
    static constexpr int VECTOR = vector_of(SIZE, sizeof(T)), PER_ROW = ceil_div(WIDTH, VECTOR);
    static constexpr bool STAYS = VECTOR > 1 && THREADS % PER_ROW == 0;  // in its column
    const char* next;
    int stride;

    __device__ RowCursor(const T* rows, i64 token_stride, int index)
        : next(reinterpret_cast<const char*>(rows)), stride(static_cast<int>(token_stride * sizeof(T))) {
        if constexpr (STAYS) next += i64(index / PER_ROW) * stride + index % PER_ROW * VECTOR * sizeof(T);
    }
    // Has the rows that are next brought near, all of which are there.
    __device__ void prefetch(int index) const {
        if (index >= ROWS) return;
        const char* row = next + i64(index) * stride;
        if constexpr (STAYS) row -= i64(index / PER_ROW) * stride + index % PER_ROW * VECTOR * sizeof(T);
        prefetch_row<SIZE>(reinterpret_cast<const T*>(row));
    }
    // As copy_rows.
    __device__ void copy(T* target, int present, int width, int index) {
        if constexpr (STAYS) {
            constexpr int ROW_STEP = THREADS / PER_ROW;
            constexpr int SIZE_OF_T = sizeof(T);
            const int first = index / PER_ROW, column = index % PER_ROW * VECTOR;
            const unsigned place = shared_address(target) + SIZE_OF_T * (first * PITCH + column);
#pragma unroll
            for (int n = 0; n < ceil_div(ROWS, ROW_STEP); ++n) {
                const int row = first + n * ROW_STEP;
                if (column < width && (ROWS % ROW_STEP == 0 || row < ROWS))
                    copy_async<VECTOR * SIZE_OF_T>(place + n * ROW_STEP * PITCH * SIZE_OF_T,
                                                   next + i64(n * ROW_STEP) * stride, row < present);
            }
        } else {
            const int elements = stride / static_cast<int>(sizeof(T));
            copy_rows<T, SIZE, ROWS, WIDTH, PITCH, THREADS>(target, reinterpret_cast<const T*>(next), elements, present,
                                                            width, index);
        }
        next += i64(WAY * ROWS) * stride;
    }
};

// One store of 16 bytes, spelt out: the compiler may make four of it.
template <typename T> __device__ inline void write_global(T* target, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// The other way: `rows` rows of `width` elements from shared memory.
template <typename T, int SIZE, int ROWS, int WIDTH, int PITCH, int THREADS>
__device__ inline void write_rows(T* target, i64 stride, const T* source, int rows, int width, int index) {
    constexpr int VECTOR = vector_of(SIZE, sizeof(T)), PER_ROW = ceil_div(WIDTH, VECTOR);
    using Vector = Pack<T, VECTOR>;
#pragma unroll
    for (int n = 0; n < ceil_div(ROWS * PER_ROW, THREADS); ++n) {
        const int item = index + n * THREADS, row = item / PER_ROW, column = item % PER_ROW * VECTOR;
        if (row < rows && column < width)
            *reinterpret_cast<Vector*>(target + row * stride + column) =
                *reinterpret_cast<const Vector*>(source + row * PITCH + column);
    }
}

// The same where rows are read in one go before any is written: a row that is not there would else be a branch around
// each access, with its wait. Takes a register for every four bytes.
template <typename T, int SIZE, int ROWS, int WIDTH, int PITCH, int THREADS>
__device__ inline void write_rows_at_once(T* target, i64 stride, const T* source, int rows, int width, int index) {
    constexpr int VECTOR = vector_of(SIZE, sizeof(T)), PER_ROW = ceil_power(ceil_div(WIDTH, VECTOR)),
                  STEP = THREADS / PER_ROW;
    if constexpr (VECTOR * sizeof(T) != 16 || STEP == 0 || ROWS % STEP != 0) {
        write_rows<T, SIZE, ROWS, WIDTH, PITCH, THREADS>(target, stride, source, rows, width, index);
    } else {
        constexpr int COUNT = ROWS / STEP;
        const int row = index / PER_ROW, column = index % PER_ROW * VECTOR;
        const bool exists = column < width;
        uint4 held[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            held[n] = *reinterpret_cast<const uint4*>(source + (row + n * STEP) * PITCH + min(column, PITCH - VECTOR));
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            if (exists && row + n * STEP < rows)
                write_global(target + (unsigned(row + n * STEP) * unsigned(stride) + column), held[n]);
    }
}
