// Sequences of any lengths in segments of up to segment_len tokens, the last one of a sequence with what is left.
//
//   cu_seqlens  [sequences + 1]  in, or null where all sequences have `tokens`
//   bounds      [segments + 1]  int64  out: where segments begin, to be read as cu_seqlens
//   neighbours  [segments]  int  out: 1 where another segment of the sequence comes behind, and 2 where one comes before
//
// A place that is left over behind a sequence's segments (span.cuh) is a segment without tokens, and so are those behind
// the last sequence, where there are tokens of none.
// Grid (sequences).
#include "span.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) cut_sequences(
    const i64* __restrict__ cu_seqlens, i64* __restrict__ bounds, int* __restrict__ neighbours, i64 tokens,
    i64 sequences, int segment_len) {
    const i64 sequence = blockIdx.x;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const i64 first = first_checkpoint(cu_seqlens, sequence, span, segment_len);
    const i64 next = next_segment(cu_seqlens, sequence, span, segment_len), count = segments_of(span, segment_len);
    const i64 begin = span.batch * tokens + span.begin, end = begin + span.length;
    for (i64 place = threadIdx.x; first + place < next; place += NUM_THREADS) {
        bounds[first + place] = min(begin + place * segment_len, end);
        neighbours[first + place] = place < count ? (place + 1 < count ? 1 : 0) + (place > 0 ? 2 : 0) : 0;
    }
    if (sequence != sequences - 1) return;
    const i64 places = cu_seqlens == nullptr ? next : tokens / segment_len + sequences;
    for (i64 place = next + threadIdx.x; place <= places; place += NUM_THREADS) {
        bounds[place] = end;
        if (place < places) neighbours[place] = 0;
    }
}
