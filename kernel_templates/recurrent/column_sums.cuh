// Sums over the value rows, one per key channel and token: every key-side gradient is one. They feed nothing
// inside the recurrence, so a block collects SUMS of them per token in shared memory, one part per row
// group, and adds the parts up for several tokens at once.
#pragma once
#include "tile.cuh"

constexpr int ROW_GROUPS = NUM_THREADS / LANES_PER_ROW;

// Tokens collected before the parts are added up: as many of `len` as fit beside `other_bytes` of shared memory.
template <int SUMS> __device__ constexpr int flush_len(int len, int other_bytes) {
    const int bytes = len * ROW_GROUPS * SUMS * PADDED_HEAD * static_cast<int>(sizeof(float));
    return len == 1 || other_bytes + bytes <= STATIC_SHARED_LIMIT ? len : flush_len<SUMS>(len / 2, other_bytes);
}

// One token's sums: a part from every row group.
template <int SUMS> using SumParts = float[ROW_GROUPS][SUMS][PADDED_HEAD];

template <int SUMS>
__device__ inline void write_column_sums(SumParts<SUMS>& parts_smem, const float (&x)[SUMS][COLUMNS]) {
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum)
#pragma unroll
        for (int q = 0; q < COLUMNS / 4; ++q)
            reinterpret_cast<float4*>(parts_smem[threadIdx.x / LANES_PER_ROW][sum])[lane_in_row() + LANES_PER_ROW * q] =
                make_float4(x[sum][4 * q], x[sum][4 * q + 1], x[sum][4 * q + 2], x[sum][4 * q + 3]);
}

// emit(sum, step, channel, four) for every sum, step in [0, steps) and four neighbouring channels: the total over the
// row groups.
template <int SUMS, int STEPS, typename Emit>
__device__ inline void add_up_parts(const SumParts<SUMS> (&smem)[STEPS], int steps, Emit emit) {
    constexpr int QUADS = PADDED_HEAD / 4;
    for (int task = threadIdx.x; task < STEPS * SUMS * QUADS; task += NUM_THREADS) {
        const int channel = task % QUADS * 4, sum = task / QUADS % SUMS, step = task / (SUMS * QUADS);
        if (step >= steps || channel >= HEAD_SIZE) continue;
        Pack<float, 4> total = {};
#pragma unroll 8
        for (int group = 0; group < ROW_GROUPS; ++group) {
            const float4 part = *reinterpret_cast<const float4*>(smem[step][group][sum] + channel);
            total.at[0] += part.x, total.at[1] += part.y, total.at[2] += part.z, total.at[3] += part.w;
        }
        emit(sum, step, channel, total);
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
template <typename T> __device__ inline void write_pack(T* target, const Pack<float, 4>& x, int channel) {
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
