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
#include "layer_loss.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_loss_backward(
    const T_IO* logits, const Target* __restrict__ targets, const float* __restrict__ lse,
    const int* __restrict__ argmax, const float* __restrict__ scale, T_IO* dlogits, i64 columns, i64 ignore_index,
    float l2_wrap) {
    const i64 row = blockIdx.x, target = targets[row];
    logits += row * columns, dlogits += row * columns;
    const Cut cut(logits, static_cast<int>(columns));
    if (target == ignore_index) {
        const float zeros[VECTOR] = {};
        for (int piece = threadIdx.x; piece < cut.pieces; piece += NUM_THREADS)
            write(dlogits + cut.head + piece * VECTOR, zeros);
        if (cut.edge < columns) dlogits[cut.edge] = from_float<T_IO>(0.0f);
        return;
    }

    const bool is_there = target >= 0 && target < columns;
    const float own_lse = lse[row], factor = is_there ? scale[row] : __int_as_float(0x7fffffff);
    const int own = is_there ? static_cast<int>(target) : -1;
    int largest = -1;
    if constexpr (HAS_ARGMAX) largest = argmax[row];
    const auto gradient = [&](float x, int column) {
        float y = exponential(x - own_lse);
        if (column == own) y -= 1.0f;
        if constexpr (HAS_ARGMAX) {
            if (column == largest) y += l2_wrap * x;
        }
        return factor * y;
    };
    cut.for_pieces(logits, [&](const Piece<T_IO>& held, int column) {
        float result[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) result[i] = gradient(held.at(i), column + i);
        write(dlogits + column, result);
    });
    if (cut.edge < columns) dlogits[cut.edge] = from_float<T_IO>(gradient(to_float(logits[cut.edge]), cut.edge));
}
