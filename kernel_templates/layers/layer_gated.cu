// Something behind a gate, and its gradients:   y = x opened(g);   dx = grad_y opened(g);   dg = grad_y x opened'(g)
//
//   x, g, y, grad_y, dx, dg  [count]  T_IO  in and out; dx and dg may be null
//
// Grid (count / (VECTOR NUM_THREADS)).
#include "layer.cuh"

// The first element of a thread.
__device__ inline i64 own_place() { return (i64(blockIdx.x) * NUM_THREADS + threadIdx.x) * VECTOR; }

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_gated(
    const T_IO* __restrict__ x, const T_IO* __restrict__ g, T_IO* __restrict__ y, i64 count) {
    const i64 place = own_place();
    let_next_launch_begin();
    x = after_previous_launch(x), g = written_meanwhile(g);
    if (place >= count) return;
    Piece<T_IO> own, gate;
    own.load(x + place), gate.load(g + place);
    float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) result[i] = own.at(i) * opened<Gate(GATE)>(gate.at(i));
    write(y + place, result);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_gated_backward(
    const T_IO* __restrict__ x, const T_IO* __restrict__ g, const T_IO* __restrict__ grad_y, T_IO* __restrict__ dx,
    T_IO* __restrict__ dg, i64 count) {
    const i64 place = own_place();
    if (place >= count) return;
    Piece<T_IO> own, gate, grad;
    own.load(x + place), gate.load(g + place), grad.load(grad_y + place);
    float of_x[VECTOR], of_gate[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        of_x[i] = grad.at(i) * opened<Gate(GATE)>(gate.at(i));
        of_gate[i] = grad.at(i) * own.at(i) * opened_slope<Gate(GATE)>(gate.at(i));
    }
    if (dx != nullptr) write(dx + place, of_x);
    if (dg != nullptr) write(dg + place, of_gate);
}
