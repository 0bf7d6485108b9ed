// A parameter of the heads as kernels of other types take it: float32, and a number for each channel.
//
//     out[h][i] = x[h], or x[h][i] where it has PER_CHANNEL
//
//   x    [H], or with SIZE behind  T_X  in;   out  [H, SIZE]  fp32  out
//
// Grid (H SIZE / NUM_THREADS). The gradient of one number for a head is the sum over its channels: sum_rows.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) spread_heads(
    const T_X* __restrict__ x, float* __restrict__ out, i64 heads) {
    const i64 place = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (place < heads * SIZE) out[place] = to_float(x[PER_CHANNEL ? place : place / SIZE]);
}
