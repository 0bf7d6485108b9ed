// Copies to and from tiles of 64 columns: of tiles, of a tensor's rows of values, of gradients.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, NUM_THREADS.
#pragma once
#include "copy.cuh"
#include "slab.cuh"

// Tiles as they are; `source` is the thread's first unit.
template <typename Tiles> __device__ inline void copy_units(Tiles& target, const uint4* source) {
    constexpr int COUNT = sizeof(Tiles) / 16;
    const unsigned start = shared_address(&target) + 16 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < COUNT; i += NUM_THREADS)
        if (i + NUM_THREADS <= COUNT || i + static_cast<int>(threadIdx.x) < COUNT)
            copy_async<16>(start + 16 * i, source + i, true);
}

// A tensor's rows of values to tiles, COLUMNS after COLUMNS, by THREADS threads; zeros where there is nothing. The
// thread's place in them is worked out once.
template <int COLUMNS, int THREADS, typename T> struct ValueColumns {
    static constexpr int VECTOR = vector_of(VALUE_SIZE, sizeof(T)), PER_ROW = COLUMNS / VECTOR;
    static constexpr int ROW_STEP = THREADS / PER_ROW;
    static_assert(CHUNK_LEN % ROW_STEP == 0, "each of the threads has equally many rows");
    const T* next;
    i64 stride;
    int row = threadIdx.x % THREADS / PER_ROW, column = threadIdx.x % PER_ROW * VECTOR;
    int left = VALUE_SIZE - column;  // values from the next one on

    __device__ ValueColumns(const T* values, i64 stride) : next(values), stride(stride) {
        next += row * stride + column;
    }
    // The next, to `tile` from `target` on.
    __device__ void copy(Slab<CHUNK_LEN>& tile, int target, int steps) {
        const int place = target + column;
        const T* from = next;
#pragma unroll
        for (int n = 0; n < CHUNK_LEN; n += ROW_STEP) {
            const bool present = row + n < steps && (VALUE_SIZE % COLUMNS == 0 || left > 0);
            uint4& unit = tile.units[row + n][place / 8 ^ (row + n) % 8];
            if constexpr (VECTOR == 1) reinterpret_cast<T*>(&unit)[place % 8] = present ? *from : T{};
            else copy_async<2 * VECTOR>(shared_address(&unit) + place % 8 * 2, from, present);
            from += ROW_STEP * stride;
        }
        next += COLUMNS, left -= COLUMNS;
    }
};

// The other way: a tile of 64 channels, from `first_channel` on, to `rows` rows of a head's channels.
template <typename T> __device__ inline void write_slab_rows(T* target, i64 stride, const Slab<CHUNK_LEN>& tile,
                                                             int first_channel, int rows) {
    constexpr int VECTOR = vector_of(HEAD_SIZE, sizeof(T)), PER_ROW = TILE_COLUMNS / VECTOR;
    using Vector = Pack<T, VECTOR>;
#pragma unroll
    for (int i = 0; i < CHUNK_LEN * PER_ROW / NUM_THREADS; ++i) {
        const int item = threadIdx.x + i * NUM_THREADS, row = item / PER_ROW, column = item % PER_ROW * VECTOR;
        const T* const from = reinterpret_cast<const T*>(&tile.units[row][column / 8 ^ row % 8]) + column % 8;
        if (row < rows && first_channel + column < HEAD_SIZE)
            *reinterpret_cast<Vector*>(target + row * stride + first_channel + column) =
                *reinterpret_cast<const Vector*>(from);
    }
}
