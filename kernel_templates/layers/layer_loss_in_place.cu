// The cross entropy of every row, and its gradient in the place of the logits, as layer_loss_forward and
// layer_loss_backward make them for a scale of 1. What a row is read for the second time is near by.
//
//   logits   [rows, columns]  T_IO  in and out, from a multiple of 16 bytes on
//   targets  [rows]  int32 or int64, of TARGET_BYTES  in
//   loss     [rows]  float  out
//
// Grid (rows).
#include "layer_loss_row.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_loss_in_place(
    T_IO* logits, const Target* __restrict__ targets, float* __restrict__ loss, i64 columns, i64 ignore_index,
    float l2_wrap) {
    __shared__ Smem smem;
    const i64 row = blockIdx.x, target = targets[row];
    logits += row * columns;
    const Cut cut(logits, static_cast<int>(columns));
    if (target == ignore_index) {
        write_zeros(logits, cut, columns);
        if (threadIdx.x == 0) loss[row] = 0.0f;
        return;
    }

    const bool is_there = target >= 0 && target < columns;
    const float of_target = is_there ? to_float(logits[target]) : 0.0f;  // read by all before anything is written
    const Part part = part_of_row(logits, cut, columns, WARPS, smem);
    const float log_sum = logf(part.sum);
    if (threadIdx.x == 0) loss[row] = loss_of_row(log_sum, part, of_target, is_there);
    write_gradient(logits, logits, cut, columns, part.top + log_sum, is_there ? static_cast<int>(target) : -1,
                   part.place, is_there ? 1.0f : __int_as_float(0x7fffffff), l2_wrap);
}
