// A function of every element, another one in each part:   y[p][i] = f_p(x[p][i])
//
//   x, y  [parts, count]  T_IO  in, out; may be one
//
// `kinds` says f_p in the bits 2 p and 2 p + 1: 0 is x itself, 1 tanh, 2 the sigmoid, 3 the square of relu.
// Grid (count / (VECTOR NUM_THREADS), parts).
#include "layer.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_activate(const T_IO* x, T_IO* y, i64 count,
                                                                         i64 kinds) {
    const int part = blockIdx.y, kind = static_cast<int>(kinds >> (2 * part) & 3);
    const i64 first = (i64(blockIdx.x) * NUM_THREADS + threadIdx.x) * VECTOR;
    let_next_launch_begin();
    x = after_previous_launch(x);
    if (first >= count || (kind == 0 && x == y)) return;
    Piece<T_IO> held;
    held.load(x + part * count + first);
    float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float own = held.at(i), positive = own < 0.0f ? 0.0f : own;
        result[i] = kind == 1 ? tanhf(own) : kind == 2 ? sigmoid(own) : kind == 3 ? positive * positive : own;
    }
    write(y + part * count + first, result);
}
