// The gradient of layer_activate:   dx[p][i] = grad_y[p][i] f_p'(x[p][i])
//
//   x, grad_y, dx  [parts, count]  T_IO  in, in, out
//
// `kinds` as there. Grid (count / (VECTOR NUM_THREADS), parts).
#include "layer.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_activate_backward(
    const T_IO* __restrict__ x, const T_IO* __restrict__ grad_y, T_IO* __restrict__ dx, i64 count, i64 kinds) {
    const int part = blockIdx.y, kind = static_cast<int>(kinds >> (2 * part) & 3);
    const i64 first = (i64(blockIdx.x) * NUM_THREADS + threadIdx.x) * VECTOR;
    if (first >= count) return;
    Piece<T_IO> held, grad;
    held.load(x + part * count + first), grad.load(grad_y + part * count + first);
    float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float own = held.at(i), bounded = kind == 1 ? tanhf(own) : sigmoid(own);
        const float slope = kind == 1   ? 1.0f - bounded * bounded
                            : kind == 2 ? bounded * (1.0f - bounded)
                            : kind == 3 ? 2.0f * fmaxf(own, 0.0f)
                                        : 1.0f;
        result[i] = grad.at(i) * slope;
    }
    write(dx + part * count + first, result);
}
