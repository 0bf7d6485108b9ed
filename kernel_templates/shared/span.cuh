// Where a sequence lies in the tensors of a call: strides, packed sequences, checkpoint slots, segments.
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

// How many segments of up to `length` tokens a sequence has; one where it has no tokens. Their places are numbered as
// checkpoints every `length` tokens are: the first one is at `first_checkpoint`. A packed sequence may have one place
// more than it has segments, at their end.
__device__ inline i64 segments_of(Span span, int length) {
    return max((span.length + length - 1) / length, i64(1));
}
// Where the places of the next sequence begin.
__device__ inline i64 next_segment(const i64* cu_seqlens, i64 sequence, Span span, int length) {
    if (cu_seqlens == nullptr) return (sequence + 1) * segments_of(span, length);
    return (span.begin + span.length) / length + sequence + 1;
}

// The places of a sequence's segments: `segments` for each sequence, or where they are RAGGED as many as it has.
struct Places {
    i64 begin, count, next;
    // The place of a walk's step, forwards or backwards.
    __device__ i64 item(bool backward, i64 step) const { return begin + (backward ? count - 1 - step : step); }
    __device__ bool has_left_over() const { return begin + count < next; }
    __device__ i64 left_over() const { return begin + count; }
};
template <bool RAGGED>
__device__ inline Places places_of(const i64* cu_seqlens, i64 sequence, i64 tokens, i64 segments, int segment_len) {
    if (!RAGGED) return {sequence * segments, segments, (sequence + 1) * segments};
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    return {first_checkpoint(cu_seqlens, sequence, span, segment_len), segments_of(span, segment_len),
            next_segment(cu_seqlens, sequence, span, segment_len)};
}
