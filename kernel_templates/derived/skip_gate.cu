// What an output has of an input itself, and its gate, behind a recurrence:
//
//     out = (y + D x) gate(z)
//
// with silu, the sigmoid or z itself as the gate. D x is there with HAS_SKIP, the gate with HAS_GATE. float32, rounded
// once, where out is written.
//
//   y, x, z  [batch, tokens, H, VALUE_SIZE]  T_IO  in, by strides;   D  [H], or with VALUE_SIZE behind  T_D  in
//   out      [batch, tokens, H, VALUE_SIZE]  T_IO  out, without gaps; it may be y, where that has no gaps
//
// Grid (rows / block_rows, slices): the slots of a row are pieces of its heads. No shared memory.
#include "skip_gate.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) skip_gate(
    const T_IO* y, const T_IO* __restrict__ x, const T_D* __restrict__ D, const T_IO* __restrict__ z, T_IO* out,
    Strides y_strides, Strides x_strides, Strides z_strides, i64 rows, i64 tokens, i64 heads, i64 block_rows) {
    write_outputs(y, x, D, z, out, y_strides, x_strides, z_strides, rows, tokens, heads, block_rows,
                  [](const RowWalk&) { return true; });
}
