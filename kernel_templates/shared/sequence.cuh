// Where a sequence lies in the tensors of a call: strides, packed sequences, checkpoint slots, states.
//
// Needs HEAD_SIZE, VALUE_SIZE.
#pragma once
#include "types.cuh"

// Strides in elements; the innermost one is 1.
struct Strides { i64 batch, token, head; };

// The tokens of one sequence: a row of the batch, or the stretch [cu_seqlens[i], cu_seqlens[i + 1]) of a packed
// row. Bounds are clamped, so that a wrong cu_seqlens can give wrong values but never a stray access.
struct Span { i64 batch, begin, length; };

__device__ inline Span sequence_span(const i64* cu_seqlens, i64 sequence, i64 tokens) {
    if (cu_seqlens == nullptr) return {sequence, 0, tokens};
    const i64 begin = min(max(cu_seqlens[sequence], i64(0)), tokens);
    return {0, begin, max(min(cu_seqlens[sequence + 1], tokens) - begin, i64(0))};
}

// First checkpoint slot of a sequence. Packed sequences get disjoint slots without knowing each other's lengths:
// floor(begin / interval) + index grows by at least ceil(length / interval) from one to the next.
__device__ inline i64 first_checkpoint(const i64* cu_seqlens, i64 sequence, Span span, int interval) {
    if (cu_seqlens == nullptr) return sequence * ((span.length + interval - 1) / interval);
    return span.begin / interval + sequence;
}

template <StateLayout LAYOUT> __device__ inline i64 state_index(int row, int channel) {
    return LAYOUT == StateLayout::vk ? i64(row) * HEAD_SIZE + channel : i64(channel) * VALUE_SIZE + row;
}
