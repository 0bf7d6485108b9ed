// States of a head in accumulators, from a slot of a pool or a row of a call's states, and back.
//
// Needs POOLED, STATE_LAYOUT, and what chunk.cuh needs.
#pragma once
#include "chunk.cuh"
#include "pooled.cuh"

// From a slot; null for zeros. Where one of both was chosen for each element, what reads and writes share stayed in
// registers in between.
template <typename State, typename T> __device__ inline void read_slot(State& state, const T* slot, int row) {
    if (slot != nullptr) read_state<STATE_LAYOUT>(state, slot, row);
    else read_state<STATE_LAYOUT>(state, static_cast<const T*>(nullptr), row);
}
