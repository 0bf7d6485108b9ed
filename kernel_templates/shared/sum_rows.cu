// Sums of rows, group by group:   sums[g][i] = rows[first(g)][i] + ... + rows[first(g + 1) - 1][i]
//
//   rows        [all rows, width]  fp32  in
//   cu_seqlens  [groups + 1]  in or null: a group is a packed sequence, with a row for each of its chunks
//   sums        [groups, width]  T_OUT  out
//
// Without cu_seqlens a group has group_rows rows. With it a sequence begins at row (its first token) / chunk_len + (its
// number), which leaves room for a chunk that is not full.
// Grid (width / (COLUMNS VECTOR), groups). The width is a multiple of VECTOR.
#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) sum_rows(
    const float* __restrict__ rows, const i64* __restrict__ cu_seqlens, T_OUT* __restrict__ sums, i64 group_rows,
    i64 width, i64 tokens, int chunk_len) {
    const i64 group = blockIdx.y, column = (i64(blockIdx.x) * COLUMNS + threadIdx.x % COLUMNS) * VECTOR;
    // Bounds are clamped, so that a wrong cu_seqlens can give wrong values but never a stray access.
    const auto first = [&](i64 g) {
        return cu_seqlens == nullptr ? g * group_rows : min(max(cu_seqlens[g], i64(0)), tokens) / chunk_len + g;
    };
    sum_rows_of_group<VECTOR>(rows, width, column, group, first, sums);
}
