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
#include "operand_rows.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) skip_gate(
    const T_IO* y, const T_IO* __restrict__ x, const T_D* __restrict__ D, const T_IO* __restrict__ z, T_IO* out,
    Strides y_strides, Strides x_strides, Strides z_strides, i64 rows, i64 tokens, i64 heads, i64 block_rows) {
    const PieceOfHead<VALUE_SIZE> piece;
    if (piece.head >= heads) return;
    Factors<T_D, SKIP_PER_CHANNEL, VALUE_SIZE> share;
    if constexpr (HAS_SKIP) share.load(D, piece.head, piece.channel);
#pragma unroll 1
    for (RowWalk walk(rows, block_rows, tokens); walk.exists(); walk.next()) {
        Piece<T_IO> output, input, gate;
        output.load(y + walk.in(y_strides, piece.head) + piece.channel);
        if constexpr (HAS_SKIP) input.load(x + walk.in(x_strides, piece.head) + piece.channel);
        if constexpr (HAS_GATE) gate.load(z + walk.in(z_strides, piece.head) + piece.channel);
        float result[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            result[i] = output.at(i);
            if constexpr (HAS_SKIP) result[i] += input.at(i) * share.at(i);
            if constexpr (HAS_GATE) result[i] *= opened<Gate(GATE)>(gate.at(i));
        }
        write(out + (walk.row * heads + piece.head) * VALUE_SIZE + piece.channel, result);
    }
}
