// States from which a walk finds what it does to any state: the identity for the matrix P of S P, and where VALUE_SIZE
// is 1 a row of ones, for its diagonal.
//
//   states  [sequences, heads, V, K]  fp32  out
//
// Grid (sequences * heads, value rows); a block writes a row.
#include "types.cuh"

static_assert(VALUE_SIZE == 1 || VALUE_SIZE == HEAD_SIZE, "value size must be 1 or the head size");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) unit_states(float* __restrict__ states) {
    const int value = blockIdx.y;
    float* const row = states + (i64(blockIdx.x) * VALUE_SIZE + value) * HEAD_SIZE;
    for (int channel = threadIdx.x; channel < HEAD_SIZE; channel += NUM_THREADS)
        row[channel] = VALUE_SIZE == 1 || value == channel ? 1.0f : 0.0f;
}
