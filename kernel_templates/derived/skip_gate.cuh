// The outputs behind a recurrence, from y as the recurrence leaves it: skip_gate.cu has the equation.
//
// Needs HAS_SKIP, SKIP_PER_CHANNEL, HAS_GATE, GATE, VALUE_SIZE, T_IO, T_D, and what operand_rows.cuh needs.
#pragma once
#include "operand_rows.cuh"

// Writes the rows of a block; those for which `has_state(walk)` is false get zeros.
template <typename Test>
__device__ inline void write_outputs(const T_IO* y, const T_IO* x, const T_D* D, const T_IO* z, T_IO* out,
                                     const Strides& y_strides, const Strides& x_strides, const Strides& z_strides,
                                     i64 rows, i64 tokens, i64 heads, i64 block_rows, const Test& has_state) {
    const PieceOfHead<VALUE_SIZE> piece;
    if (piece.head >= heads) return;
    Factors<T_D, SKIP_PER_CHANNEL, VALUE_SIZE> share;
    if constexpr (HAS_SKIP) share.load(D, piece.head, piece.channel);
#pragma unroll 1
    for (RowWalk walk(rows, block_rows, tokens); walk.exists(); walk.next()) {
        float result[VECTOR];
        if (has_state(walk)) {
            Piece<T_IO> output, input, gate;
            output.load(y + walk.in(y_strides, piece.head) + piece.channel);
            if constexpr (HAS_SKIP) input.load(x + walk.in(x_strides, piece.head) + piece.channel);
            if constexpr (HAS_GATE) gate.load(z + walk.in(z_strides, piece.head) + piece.channel);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                result[i] = output.at(i);
                if constexpr (HAS_SKIP) result[i] += input.at(i) * share.at(i);
                if constexpr (HAS_GATE) result[i] *= opened<Gate(GATE)>(gate.at(i));
            }
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) result[i] = 0.0f;
        }
        write(out + (walk.row * heads + piece.head) * VALUE_SIZE + piece.channel, result);
    }
}
