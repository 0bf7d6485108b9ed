// Sums of the rows of up to five buffers, in one launch:   sums_n[i] = rows_n[0][i] + ... + rows_n[group_rows_n - 1][i]
//
//   rows0, ... rows4  [group_rows_n, width_n]  fp32  in, or null: there is no such buffer, and its width is 0
//   sums0, ... sums4  [width_n]  out, of the type that storage_n says: 0 for fp16, 1 for bf16, 2 for fp32
//
// Grid (the sum of width_n / COLUMNS, each rounded up): the blocks of one buffer stand behind those of the one before. The
// order of a sum is that of sum_rows. Which types there are is known at the launch alone, so that one kernel serves any
// gradients that a call wants.
#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) sum_buffers(
    const float* __restrict__ rows0, const float* __restrict__ rows1, const float* __restrict__ rows2,
    const float* __restrict__ rows3, const float* __restrict__ rows4, void* __restrict__ sums0,
    void* __restrict__ sums1, void* __restrict__ sums2, void* __restrict__ sums3, void* __restrict__ sums4,
    i64 group_rows0, i64 group_rows1, i64 group_rows2, i64 group_rows3, i64 group_rows4, i64 width0, i64 width1,
    i64 width2, i64 width3, i64 width4, int storage0, int storage1, int storage2, int storage3, int storage4) {
    const float* rows = rows0;
    void* sums = sums0;
    i64 group_rows = group_rows0, width = width0, block = blockIdx.x;
    int storage = storage0;
    const auto go_on = [&](const float* other_rows, void* other_sums, i64 count, i64 columns, int type) {
        const i64 blocks = (width + COLUMNS - 1) / COLUMNS;
        if (block < blocks || columns == 0) return;
        block -= blocks, rows = other_rows, sums = other_sums, group_rows = count, width = columns, storage = type;
    };
    go_on(rows1, sums1, group_rows1, width1, storage1), go_on(rows2, sums2, group_rows2, width2, storage2);
    go_on(rows3, sums3, group_rows3, width3, storage3), go_on(rows4, sums4, group_rows4, width4, storage4);
    const i64 column = block * COLUMNS + threadIdx.x % COLUMNS;
    const auto first = [&](i64 group) { return group * group_rows; };
    if (storage == 0) sum_rows_of_group<1>(rows, width, column, 0, first, static_cast<fp16*>(sums));
    else if (storage == 1) sum_rows_of_group<1>(rows, width, column, 0, first, static_cast<bf16*>(sums));
    else sum_rows_of_group<1>(rows, width, column, 0, first, static_cast<fp32*>(sums));
}
