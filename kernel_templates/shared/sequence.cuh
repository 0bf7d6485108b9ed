// Where a sequence lies in the tensors of a call, and an element in its state.
//
// Needs HEAD_SIZE, VALUE_SIZE.
#pragma once
#include "span.cuh"

template <StateLayout LAYOUT> __device__ inline i64 state_index(int row, int channel) {
    return LAYOUT == StateLayout::vk ? i64(row) * HEAD_SIZE + channel : i64(channel) * VALUE_SIZE + row;
}
