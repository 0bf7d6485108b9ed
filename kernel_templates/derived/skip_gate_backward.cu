// Gradients of skip_gate, with its names. Per token, head and channel:
//
//     dy = gate(z) grad;   dz = gate'(z) (y + D x) grad;   dx = D gate(z) grad;   dD = sum over tokens of x gate(z) grad
//
// float32, rounded where a gradient is written. dD is a sum over the rows of a block, in their order, which a launch
// behind this one adds up; where D is one number for a head, over its channels too.
//
//   y, x, z, D  as skip_gate;   grad  the gradient of out, like y, by strides  T_IO  in
//   dy, dx, dz  [batch, tokens, H, VALUE_SIZE]  T_IO  out, without gaps
//   dD_rows     [blocks of rows, H, VALUE_SIZE]  fp32  out
//
// What is not wanted is null. Without a gate dy would be grad: it is null. Where diagonal_operands_backward follows, the
// dx of both is its work, from dy, and dx is null here.
//
// Grid (rows / block_rows, slices), as in skip_gate. No shared memory.
#include "operand_rows.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) skip_gate_backward(
    const T_IO* __restrict__ y, const T_IO* __restrict__ x, const T_D* __restrict__ D, const T_IO* __restrict__ z,
    const T_IO* __restrict__ grad, T_IO* __restrict__ dy, T_IO* __restrict__ dx, T_IO* __restrict__ dz,
    float* __restrict__ dD_rows, Strides y_strides, Strides x_strides, Strides z_strides, Strides grad_strides,
    i64 rows, i64 tokens, i64 heads, i64 block_rows) {
    const PieceOfHead<VALUE_SIZE> piece;
    if (piece.head >= heads) return;
    Factors<T_D, SKIP_PER_CHANNEL, VALUE_SIZE> share;
    if constexpr (HAS_SKIP) share.load(D, piece.head, piece.channel);
    float of_skip[VECTOR] = {};
#pragma unroll 1
    for (RowWalk walk(rows, block_rows, tokens); walk.exists(); walk.next()) {
        const i64 place = (walk.row * heads + piece.head) * VALUE_SIZE + piece.channel;
        Piece<T_IO> of_output, output, input, gate;
        of_output.load(grad + walk.in(grad_strides, piece.head) + piece.channel);
        if constexpr (HAS_GATE) output.load(y + walk.in(y_strides, piece.head) + piece.channel);
        if constexpr (HAS_SKIP) input.load(x + walk.in(x_strides, piece.head) + piece.channel);
        if constexpr (HAS_GATE) gate.load(z + walk.in(z_strides, piece.head) + piece.channel);
        float of_y[VECTOR], of_x[VECTOR], of_z[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float part = HAS_SKIP ? share.at(i) : 0.0f;
            of_y[i] = of_output.at(i);
            if constexpr (HAS_GATE) {
                const float open = HAS_SKIP ? output.at(i) + input.at(i) * part : output.at(i);
                of_z[i] = of_y[i] * open * opened_slope<Gate(GATE)>(gate.at(i));
                of_y[i] *= opened<Gate(GATE)>(gate.at(i));
            }
            if constexpr (HAS_SKIP) of_skip[i] += of_y[i] * input.at(i), of_x[i] = of_y[i] * part;
        }
        if (dy != nullptr) write(dy + place, of_y);
        if (HAS_SKIP && dx != nullptr) write(dx + place, of_x);
        if (HAS_GATE && dz != nullptr) write(dz + place, of_z);
    }
    if (HAS_SKIP && dD_rows != nullptr)
        write(dD_rows + (i64(blockIdx.x) * heads + piece.head) * VALUE_SIZE + piece.channel, of_skip);
}
