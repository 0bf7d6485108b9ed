// Gradients of a sum of losses, times that of the sum:   y = x scale
//
//   x      [count]  T_X  in
//   scale  one float  in
//   y      [count]  T_IO  out
//
// Grid (count / (VECTOR NUM_THREADS)).
#include "layer.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_loss_gradients(
    const T_X* __restrict__ x, const float* __restrict__ scale, T_IO* __restrict__ y, i64 count) {
    const i64 place = (i64(blockIdx.x) * NUM_THREADS + threadIdx.x) * VECTOR;
    if (place >= count) return;
    Piece<T_X> own;
    own.load(x + place);
    const float factor = *scale;
    float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) result[i] = own.at(i) * factor;
    write(y + place, result);
}
