// The sum of rows of floats, by a block that has COLUMNS times VECTOR neighbouring columns, which a thread reads at once,
// and NUM_THREADS / COLUMNS threads for each. A thread adds up every so many rows; then the first one adds up what the
// others have, in the order of threads. All fp32; a thread also keeps what its sums round away, so that the error does
// not grow with the rows.
#pragma once
#include "types.cuh"

constexpr int THREADS = NUM_THREADS / COLUMNS;  // of a column
static_assert(THREADS * COLUMNS == NUM_THREADS, "columns must divide the threads");

// Add up rows of this width, from the first one of a group to that of the next; the first thread of a column writes.
template <int VECTOR, typename T, typename FIRST> __device__ inline void sum_rows_of_group(
    const float* __restrict__ rows, i64 width, i64 column, i64 group, const FIRST& first, T* __restrict__ sums) {
    using Floats = Pack<float, VECTOR>;
    __shared__ Floats parts[THREADS][COLUMNS];
    const int thread = threadIdx.x / COLUMNS;
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
    Pack<T, VECTOR> rounded;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) rounded.at[i] = from_float<T>(sum.at[i]);
    *reinterpret_cast<Pack<T, VECTOR>*>(sums + group * width + column) = rounded;
}
