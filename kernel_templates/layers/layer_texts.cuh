// Which text a row is in: of rows that follow each other, one text behind the other.
//
// Needs PACKED, BOUND_BYTES.
#pragma once
#include "types.cuh"

template <int BYTES> struct IntegerOf { using Type = int; };
template <> struct IntegerOf<8> { using Type = i64; };
using Bound = IntegerOf<BOUND_BYTES>::Type;

// A row's text, and the rows from `begin` to `end` that it has.
struct Text { i64 number, begin, end; };

// Without PACKED each text has `tokens` rows. Bounds are clamped, so that wrong ones can give wrong values but never a
// stray access; a row that is in none is a text of its own, with a number of -1.
__device__ inline Text text_of(i64 row, const Bound* cu_seqlens, i64 tokens, i64 texts, i64 rows) {
    if constexpr (!PACKED) {
        const i64 number = row / tokens;
        return {number, number * tokens, (number + 1) * tokens};
    }
    i64 number = 0;
    for (i64 last = texts - 1; number < last;) {  // the last text that begins at the row or before it
        const i64 middle = (number + last + 1) / 2;
        if (cu_seqlens[middle] <= row) number = middle;
        else last = middle - 1;
    }
    const i64 begin = max(i64(cu_seqlens[number]), i64(0)), end = min(i64(cu_seqlens[number + 1]), rows);
    return begin <= row && row < end ? Text{number, begin, end} : Text{-1, row, row + 1};
}
