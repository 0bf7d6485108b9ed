// Where the state of a head comes from and goes to: a row of a call's states, or with POOLED a slot of a pool.
//
// Needs HEAD_SIZE, VALUE_SIZE, POOLED.
#pragma once
#include "pieces.cuh"
#include "span.cuh"

// They are found where they are wanted, not kept in registers meanwhile. `row_offset` is where the head of a sequence
// lies in the call's states.

__device__ inline i64 slot_offset(i64 slot, i64 slot_stride, i64 head) {
    return slot * slot_stride + head * (VALUE_SIZE * HEAD_SIZE);
}

// The state that a head begins with; null for zeros.
template <typename T>
__device__ inline const T* first_state(const T* states, i64 row_offset, const Piece* pieces, i64 sequence, i64 head,
                                       i64 slot_stride) {
    if constexpr (POOLED) {
        const int slot = pieces[sequence].read;
        return slot < 0 ? nullptr : states + slot_offset(slot, slot_stride, head);
    } else {
        return states ? states + row_offset : nullptr;
    }
}

// Whether somebody wants the state that a head ends with, and where it goes.
template <typename T> __device__ inline bool has_last_state(const T* states, const Piece* pieces, i64 sequence) {
    return POOLED ? pieces[sequence].write >= 0 : states != nullptr;
}
template <typename T>
__device__ inline T* last_state(T* states, i64 row_offset, const Piece* pieces, i64 sequence, i64 head,
                                i64 slot_stride) {
    return states + (POOLED ? slot_offset(pieces[sequence].write, slot_stride, head) : row_offset);
}

// The piece of a sequence that a wave of launches does, of `waves`; without a pool a sequence is one.
__device__ inline i64 piece_of(i64 sequence, int wave, int waves) {
    return POOLED ? sequence * waves + wave : sequence;
}

// Whether a piece is for another launch.
__device__ inline bool is_for_others(const Piece* pieces, i64 sequence, int wave) {
    return POOLED && pieces[sequence].wave != wave;
}
