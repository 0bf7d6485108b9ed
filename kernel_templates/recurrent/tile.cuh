// The state S [VALUE_SIZE, HEAD_SIZE] of one head, held in registers as one rectangle per thread.
//
// Threads form row groups of LANES_PER_ROW lanes. A thread holds ROWS_PER_THREAD neighbouring value rows and
// COLUMNS key columns; column c of lane l is key channel 4 (l + LANES_PER_ROW (c / 4)) + c % 4, so that the lanes
// of a group read shared memory 16 bytes side by side. Channels past HEAD_SIZE read zeros and stay zero.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, NUM_THREADS, LANES_PER_ROW, ROWS_PER_THREAD, DECAY.
#pragma once
#include "sequence.cuh"

constexpr int COLUMNS = 4 * ceil_div(HEAD_SIZE, 4 * LANES_PER_ROW);
constexpr int PADDED_HEAD = LANES_PER_ROW * COLUMNS;
constexpr int BLOCK_ROWS = NUM_THREADS / LANES_PER_ROW * ROWS_PER_THREAD;
constexpr int ROW_BLOCKS = ceil_div(VALUE_SIZE, BLOCK_ROWS);

static_assert(HEAD_SIZE >= 1 && VALUE_SIZE >= 1, "head_size and value_size must be at least 1");
static_assert(NUM_THREADS >= 32 && NUM_THREADS <= 256 && (NUM_THREADS & (NUM_THREADS - 1)) == 0,
              "num_threads must be 32, 64, 128 or 256");
static_assert(LANES_PER_ROW >= 1 && LANES_PER_ROW <= 32 && (LANES_PER_ROW & (LANES_PER_ROW - 1)) == 0,
              "lanes_per_row must be a power of two up to 32");
static_assert(ROWS_PER_THREAD >= 1 && ROWS_PER_THREAD <= 8 && (ROWS_PER_THREAD & (ROWS_PER_THREAD - 1)) == 0,
              "rows_per_thread must be 1, 2, 4 or 8");
static_assert(CHUNK_LEN >= 1 && CHUNK_LEN <= 16 && (CHUNK_LEN & (CHUNK_LEN - 1)) == 0,
              "chunk_len must be 1, 2, 4, 8 or 16");

constexpr int STATIC_SHARED_LIMIT = 48 * 1024;  // what every GPU gives a block without asking

__device__ inline int lane_in_row() { return threadIdx.x % LANES_PER_ROW; }
__device__ inline int first_row() { return threadIdx.x / LANES_PER_ROW * ROWS_PER_THREAD; }
__device__ inline int key_channel(int column) {
    return 4 * (lane_in_row() + LANES_PER_ROW * (column / 4)) + column % 4;
}

__device__ inline void read_columns(float (&x)[COLUMNS], const float* row_smem) {
#pragma unroll
    for (int q = 0; q < COLUMNS / 4; ++q) {
        const float4 four = reinterpret_cast<const float4*>(row_smem)[lane_in_row() + LANES_PER_ROW * q];
        x[4 * q] = four.x, x[4 * q + 1] = four.y, x[4 * q + 2] = four.z, x[4 * q + 3] = four.w;
    }
}

// The factors of one token; with Decay::none they are 1, and row_smem is not read.
__device__ inline void read_factors(float (&d)[COLUMNS], const float* row_smem) {
    if constexpr (DECAY == Decay::none) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) d[c] = 1.0f;
    } else {
        read_columns(d, row_smem);
    }
}

__device__ inline void read_rows(float (&x)[ROWS_PER_THREAD], const float* rows_smem) {
    using Rows = Pack<float, min_of(ROWS_PER_THREAD, 4)>;
    const Rows* packs = reinterpret_cast<const Rows*>(rows_smem + first_row());
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i) x[i] = packs[i / 4].at[i % 4];
}

// Adds x[i] over all lanes whose index differs in the bits FIRST, 2 FIRST, ... below END. As long as the count is
// even each exchange also halves what a lane keeps, so COUNT sums cost about COUNT shuffles instead of
// COUNT log2(lanes). The tree of additions is the same whatever COUNT is: results do not depend on the tile.

__device__ constexpr int kept_sums(int count, int first, int end) {
    return first >= end ? count : kept_sums(count % 2 ? count : count / 2, first * 2, end);
}
__device__ constexpr int duplicate_lanes(int count, int first, int end) {  // lane bits over which the kept sums repeat
    return first >= end ? 0 : (count % 2 ? first : 0) | duplicate_lanes(count % 2 ? count : count / 2, first * 2, end);
}

// Leaves kept_sums(COUNT, FIRST, END) sums in x[0...]; returns the index that x[0] had.
template <int FIRST, int END, int COUNT> __device__ inline int reduce_scatter(float (&x)[COUNT]) {
    if constexpr (FIRST >= END) {
        return 0;
    } else if constexpr (COUNT % 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], FIRST);
        return reduce_scatter<FIRST * 2, END>(x);
    } else {
        constexpr int HALF = COUNT / 2;
        const bool upper = threadIdx.x & FIRST;
        float kept[HALF];
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float sent = upper ? x[i] : x[i + HALF];
            kept[i] = (upper ? x[i + HALF] : x[i]) + __shfl_xor_sync(0xffffffffu, sent, FIRST);
        }
        const int offset = reduce_scatter<FIRST * 2, END>(kept);
#pragma unroll
        for (int i = 0; i < HALF; ++i) x[i] = kept[i];
        return offset + (upper ? HALF : 0);
    }
}

constexpr int KEPT_ROWS = kept_sums(ROWS_PER_THREAD, 1, LANES_PER_ROW);
constexpr int DUPLICATE_ROW_LANES = duplicate_lanes(ROWS_PER_THREAD, 1, LANES_PER_ROW);

// Sums over the lanes of a row, written to rows_smem [BLOCK_ROWS].
__device__ inline void write_row_sums(float (&x)[ROWS_PER_THREAD], float* rows_smem) {
    const int row = first_row() + reduce_scatter<1, LANES_PER_ROW>(x);
    if ((threadIdx.x & DUPLICATE_ROW_LANES) == 0) {
#pragma unroll
        for (int i = 0; i < KEPT_ROWS; ++i) rows_smem[row + i] = x[i];
    }
}

// What write_row_sums wrote, for every lane of the row. A row group lies inside one warp, so a warp barrier is enough;
// rows_smem must not be written again before the next block barrier. Work between the two hides the exchange.
__device__ inline void read_row_sums(float (&x)[ROWS_PER_THREAD], const float* rows_smem) {
    __syncwarp();
    read_rows(x, rows_smem);
}

// A thread's share of a [STEPS, WIDTH] tile, held in registers between the load from global memory and the store
// to shared memory as floats, so that the load of the next chunk overlaps the arithmetic of this one.

template <typename T, int WIDTH, int ALIGNED_WIDTH, int STEPS = CHUNK_LEN> struct Staged {
    static constexpr int VECTOR = WIDTH % 4 == 0 && ALIGNED_WIDTH % 4 == 0 ? 4 : 1;
    static constexpr int PER_ROW = WIDTH / VECTOR;
    static constexpr int PER_THREAD = ceil_div(STEPS * PER_ROW, NUM_THREADS);
    Words<T, VECTOR> held[PER_THREAD];

    // Rows [0, steps) of width `width` at `source`, token_stride apart.
    __device__ void load(const T* source, i64 token_stride, i64 steps, int width = WIDTH) {
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) {
            const int index = threadIdx.x + n * NUM_THREADS;
            const int step = index / PER_ROW, channel = index % PER_ROW * VECTOR;
            if (step < steps && step < STEPS && channel < width)
                held[n] = *reinterpret_cast<const Words<T, VECTOR>*>(source + step * token_stride + channel);
        }
    }

    // map(x, column) at the loaded places, `fill` elsewhere; PITCH floats from one row to the next.
    template <int PITCH, typename Map>
    __device__ void store(float* target, i64 steps, float fill, Map map, int width = WIDTH) const {
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) {
            const int index = threadIdx.x + n * NUM_THREADS;
            const int step = index / PER_ROW, channel = index % PER_ROW * VECTOR;
            if (STEPS * PER_ROW % NUM_THREADS != 0 && step >= STEPS) continue;
            const bool present = step < steps && channel < width;
            Pack<float, VECTOR> out;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) out.at[i] = present ? map(held[n].at(i), channel + i) : fill;
            *reinterpret_cast<Pack<float, VECTOR>*>(target + step * PITCH + channel) = out;
        }
    }
    template <int PITCH> __device__ void store(float* target, i64 steps, int width = WIDTH) const {
        store<PITCH>(target, steps, 0.0f, [](float x, int) { return x; }, width);
    }
};
template <typename T> using StagedKeys = Staged<T, HEAD_SIZE, HEAD_SIZE>;
template <typename T> using StagedValues = Staged<T, BLOCK_ROWS, VALUE_SIZE>;

// Rows [0, steps) x [0, width) of a shared [CHUNK_LEN, BLOCK_ROWS] tile to global memory.
template <typename T>
__device__ inline void write_values(T* target, i64 token_stride, const float* rows_smem, int steps, int width) {
    constexpr int VECTOR = BLOCK_ROWS % 4 == 0 && VALUE_SIZE % 4 == 0 ? 4 : 1;
    constexpr int PER_ROW = BLOCK_ROWS / VECTOR;
    for (int index = threadIdx.x; index < steps * PER_ROW; index += NUM_THREADS) {
        const int step = index / PER_ROW, row = index % PER_ROW * VECTOR;
        if (row >= width) continue;
        Pack<T, VECTOR> out;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) out.at[i] = from_float<T>(rows_smem[step * BLOCK_ROWS + row + i]);
        *reinterpret_cast<Pack<T, VECTOR>*>(target + step * token_stride + row) = out;
    }
}

__device__ inline void clear_shared(float* smem, int count) {
    for (int i = threadIdx.x; i < count; i += NUM_THREADS) smem[i] = 0.0f;
}

using Rectangle = float[ROWS_PER_THREAD][COLUMNS];

__device__ inline void copy_rectangle(Rectangle& target, const Rectangle& source) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) target[i][c] = source[i][c];
}

// A null pointer stands for zeros. block_row is the first value row of this block.
template <StateLayout LAYOUT, typename T>
__device__ inline void read_state(Rectangle& state, const T* source, int block_row) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int row = block_row + first_row() + i, channel = key_channel(c);
            const bool present = source != nullptr && row < VALUE_SIZE && channel < HEAD_SIZE;
            state[i][c] = present ? to_float(source[state_index<LAYOUT>(row, channel)]) : 0.0f;
        }
}

template <StateLayout LAYOUT, typename T>
__device__ inline void write_state(T* target, const Rectangle& state, int block_row) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int row = block_row + first_row() + i, channel = key_channel(c);
            if (row < VALUE_SIZE && channel < HEAD_SIZE)
                target[state_index<LAYOUT>(row, channel)] = from_float<T>(state[i][c]);
        }
}

// A per-channel vector of one head; zeros past HEAD_SIZE.
template <typename T> __device__ inline void read_channels(float (&x)[COLUMNS], const T* source) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) x[c] = key_channel(c) < HEAD_SIZE ? to_float(source[key_channel(c)]) : 0.0f;
}

// Scratch that only the same thread reads back: [element / 4][thread], 16 bytes side by side.
__device__ inline void save_rectangle(float* scratch, const Rectangle& state) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i)
#pragma unroll
        for (int q = 0; q < COLUMNS / 4; ++q)
            reinterpret_cast<float4*>(scratch)[(i * (COLUMNS / 4) + q) * NUM_THREADS + threadIdx.x] =
                make_float4(state[i][4 * q], state[i][4 * q + 1], state[i][4 * q + 2], state[i][4 * q + 3]);
}
__device__ inline void restore_rectangle(Rectangle& state, const float* scratch) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i)
#pragma unroll
        for (int q = 0; q < COLUMNS / 4; ++q) {
            const float4 four =
                reinterpret_cast<const float4*>(scratch)[(i * (COLUMNS / 4) + q) * NUM_THREADS + threadIdx.x];
            state[i][4 * q] = four.x, state[i][4 * q + 1] = four.y;
            state[i][4 * q + 2] = four.z, state[i][4 * q + 3] = four.w;
        }
}
