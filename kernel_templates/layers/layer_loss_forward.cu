// The cross entropy of every row, and what its gradient needs:
//
//     lse = log(sum_j e^logits_j);  loss = lse - logits_target
//
//   logits   [rows, columns]  T_IO  in, from a multiple of 16 bytes on
//   targets  [rows]  int32 or int64, of TARGET_BYTES  in
//   loss     [rows]  float  out: NaN where the target is no column
//   lse      [rows]  float  out
//   argmax   [rows]  int  out with HAS_ARGMAX, else null: the first of the largest logits
//
// Where the target is `ignore_index` the row is not read, and all of these are 0.
// Grid (rows). Each thread has a maximum and a sum of its own, which it scales where its maximum rises.
#include "layer_loss_row.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_loss_forward(
    const T_IO* __restrict__ logits, const Target* __restrict__ targets, float* __restrict__ loss,
    float* __restrict__ lse, int* __restrict__ argmax, i64 columns, i64 ignore_index) {
    __shared__ Smem smem;
    const i64 row = blockIdx.x, target = targets[row];
    logits += row * columns;
    if (target == ignore_index) {
        if (threadIdx.x == 0) {
            loss[row] = 0.0f, lse[row] = 0.0f;
            if constexpr (HAS_ARGMAX) argmax[row] = 0;
        }
        return;
    }

    const Cut cut(logits, static_cast<int>(columns));
    const Part part = part_of_row(logits, cut, columns, 0, smem);
    if (threadIdx.x > 0) return;
    const float log_sum = logf(part.sum);
    lse[row] = part.top + log_sum;
    if constexpr (HAS_ARGMAX) argmax[row] = part.place;
    const bool is_there = target >= 0 && target < columns;
    loss[row] = loss_of_row(log_sum, part, is_there ? to_float(logits[target]) : 0.0f, is_there);
}
