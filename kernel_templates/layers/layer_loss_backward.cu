// The gradient of the cross entropy of every row, and of c / 2 max^2 beside it:
//
//     dlogits_j = scale (e^(logits_j - lse) - [j = target] + [j = argmax] c logits_j)
//
//   logits   [rows, columns]  T_IO  in, from a multiple of 16 bytes on
//   targets  [rows]  int32 or int64, of TARGET_BYTES  in
//   lse      [rows]  float  in     argmax  [rows]  int  in with HAS_ARGMAX, else null
//   scale    [rows]  float  in: the gradient of each row's loss
//   dlogits  [rows, columns]  T_IO  out; may be logits
//
// Where the target is `ignore_index` all of the row is 0, where it is no column NaN. c is `l2_wrap`. Grid (rows).
#include "layer_loss_row.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_loss_backward(
    const T_IO* logits, const Target* __restrict__ targets, const float* __restrict__ lse,
    const int* __restrict__ argmax, const float* __restrict__ scale, T_IO* dlogits, i64 columns, i64 ignore_index,
    float l2_wrap) {
    const i64 row = blockIdx.x, target = targets[row];
    logits += row * columns, dlogits += row * columns;
    const Cut cut(logits, static_cast<int>(columns));
    if (target == ignore_index) {
        write_zeros(dlogits, cut, columns);
        return;
    }

    const bool is_there = target >= 0 && target < columns;
    const float factor = is_there ? scale[row] : __int_as_float(0x7fffffff);
    int largest = -1;
    if constexpr (HAS_ARGMAX) largest = argmax[row];
    write_gradient(logits, dlogits, cut, columns, lse[row], is_there ? static_cast<int>(target) : -1, largest, factor,
                   l2_wrap);
}
