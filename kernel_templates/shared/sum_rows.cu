// Sums of rows, group by group:   sums[g][i] = rows[first(g)][i] + ... + rows[first(g + 1) - 1][i]
//
//   rows        [all rows, width]  fp32  in
//   cu_seqlens  [groups + 1]  in or null: a group is a packed sequence, with a row for each of its chunks
//   sums        [groups, width]  T_OUT  out
//
// Without cu_seqlens a group has group_rows rows. With it a sequence begins at row (its first token) / chunk_len + (its
// number), which leaves room for a chunk that is not full.
// Grid (width / (COLUMNS VECTOR), groups); a block has COLUMNS times VECTOR neighbouring columns, which a thread reads
// at once, and NUM_THREADS / COLUMNS threads for each. A thread adds up every so many rows; then the first one adds up
// what the others have, in the order of threads. All fp32; a thread also keeps what its sums round away, so that the
// error does not grow with the rows. The width is a multiple of VECTOR.
#include "types.cuh"

constexpr int THREADS = NUM_THREADS / COLUMNS;  // of a column
static_assert(THREADS * COLUMNS == NUM_THREADS, "columns must divide the threads");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) sum_rows(
    const float* __restrict__ rows, const i64* __restrict__ cu_seqlens, T_OUT* __restrict__ sums, i64 group_rows,
    i64 width, i64 tokens, int chunk_len) {
    using Floats = Pack<float, VECTOR>;
    __shared__ Floats parts[THREADS][COLUMNS];
    const i64 group = blockIdx.y, column = (i64(blockIdx.x) * COLUMNS + threadIdx.x % COLUMNS) * VECTOR;
    const int thread = threadIdx.x / COLUMNS;
    // Bounds are clamped, so that a wrong cu_seqlens can give wrong values but never a stray access.
    const auto first = [&](i64 g) {
        return cu_seqlens == nullptr ? g * group_rows : min(max(cu_seqlens[g], i64(0)), tokens) / chunk_len + g;
    };
    Floats sum = {}, excess = {};  // what the sum has too much
    const auto add = [&](const Floats& x) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float term = x.at[i] - excess.at[i], next = sum.at[i] + term;
            excess.at[i] = next - sum.at[i] - term;
            sum.at[i] = next;
        }
    };
    const i64 end = first(group + 1);
    if (column < width) {
#pragma unroll 8
        for (i64 row = first(group) + thread; row < end; row += THREADS)
            add(*reinterpret_cast<const Floats*>(rows + row * width + column));
    }
    parts[thread][threadIdx.x % COLUMNS] = sum;
    __syncthreads();  // all parts are there
    if (thread != 0 || column >= width) return;
#pragma unroll
    for (int other = 1; other < THREADS; ++other) add(parts[other][threadIdx.x]);
    Pack<T_OUT, VECTOR> rounded;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) rounded.at[i] = from_float<T_OUT>(sum.at[i]);
    *reinterpret_cast<Pack<T_OUT, VECTOR>*>(sums + group * width + column) = rounded;
}
