// Sums over the value rows, one per key channel and token: every key-side gradient is one. They feed nothing
// inside the recurrence, so a block collects SUMS of them per token in shared memory, one part per warp, and adds
// the parts up for several tokens at once.
#pragma once
#include "tile.cuh"

// Tokens collected before the parts are added up: as many of CHUNK_LEN as fit beside `other_bytes` of shared memory.
template <int SUMS> __device__ constexpr int flush_len(int other_bytes, int len = CHUNK_LEN) {
    const int bytes = len * WARPS * SUMS * PADDED_HEAD * static_cast<int>(sizeof(float));
    return len == 1 || other_bytes + bytes <= STATIC_SHARED_LIMIT ? len : flush_len<SUMS>(other_bytes, len / 2);
}

template <int SUMS> using WarpSums = float[SUMS * COLUMNS][LANES_PER_ROW];

// Adds x[sum * COLUMNS + c] over the row groups of the warp and writes the warp's part.
template <int SUMS> __device__ inline void write_column_sums(float (&x)[SUMS * COLUMNS], WarpSums<SUMS>& warp_smem) {
    constexpr int COUNT = SUMS * COLUMNS;
    const int first = reduce_scatter<LANES_PER_ROW, 32>(x);
    if ((threadIdx.x & duplicate_lanes(COUNT, LANES_PER_ROW, 32)) == 0) {
#pragma unroll
        for (int i = 0; i < kept_sums(COUNT, LANES_PER_ROW, 32); ++i) warp_smem[first + i][lane_in_row()] = x[i];
    }
}

// emit(sum, step, channel, four) for every sum, step in [0, steps) and four neighbouring channels, added over the warps.
template <int SUMS, int STEPS, typename Emit>
__device__ inline void add_up_warps(const WarpSums<SUMS> (&smem)[STEPS][WARPS], int steps, Emit emit) {
    constexpr int QUADS = PADDED_HEAD / 4;
    for (int task = threadIdx.x; task < STEPS * SUMS * QUADS; task += NUM_THREADS) {
        const int step = task / (SUMS * QUADS), sum = task / QUADS % SUMS, quad = task % QUADS;
        if (step >= steps || 4 * quad >= HEAD_SIZE) continue;
        const int column = sum * COLUMNS + quad / LANES_PER_ROW * 4, lane = quad % LANES_PER_ROW;
        Pack<float, 4> total = {};
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp)
#pragma unroll
            for (int i = 0; i < 4; ++i) total.at[i] += smem[step][warp][column + i][lane];
        emit(sum, step, 4 * quad, total);
    }
}

// The running total over row blocks in scratch: the same thread comes back for the same place, so the order of
// additions is fixed. Returns true when the total is complete.
__device__ inline bool add_row_blocks(Pack<float, 4>& total, float* saved, int row_block) {
    if constexpr (ROW_BLOCKS == 1) return true;
    Pack<float, 4>& running = *reinterpret_cast<Pack<float, 4>*>(saved);
    if (row_block > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total.at[i] += running.at[i];
    }
    if (row_block + 1 < ROW_BLOCKS) running = total;
    return row_block + 1 == ROW_BLOCKS;
}

// Up to four neighbouring channels to global memory.
template <typename T> __device__ inline void write_channels(T* target, const Pack<float, 4>& x, int channel) {
    if constexpr (HEAD_SIZE % 4 == 0) {
        Pack<T, 4> out;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.at[i] = from_float<T>(x.at[i]);
        *reinterpret_cast<Pack<T, 4>*>(target + channel) = out;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (channel + i < HEAD_SIZE) target[channel + i] = from_float<T>(x.at[i]);
    }
}

// dL/dd to dL/dw: the slope is taken from w itself, four channels at a time.
template <typename T> __device__ inline void apply_decay_slope(Pack<float, 4>& x, const T* w, int channel) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (channel + i < HEAD_SIZE) x.at[i] *= decay_slope<DECAY>(to_float(w[channel + i]));
}
