// Which chunks of a sequence a block takes (head_decay_walks.cu).
//
// Needs CHUNK_LEN, KEPT_LEN, SEGMENTED: whether blocks share sequences.
#pragma once
#include "types.cuh"

constexpr int KEPT_CHUNKS = max_of(KEPT_LEN / CHUNK_LEN, 1);  // of which the forward keeps a state

// A block sets out at chunk `start`, or walking back in front of it, to have the state at its own chunks, [begin, end).
// With a start below 0 it has none.
struct __align__(16) Walk { int start, begin, end, unused; };

template <bool IS_BACKWARD> __device__ inline Walk walk_of(const Walk* walks, int chunks, i64 heads) {
    if constexpr (!SEGMENTED) return {IS_BACKWARD ? chunks : 0, 0, chunks};
    else return walks[(IS_BACKWARD * gridDim.x + blockIdx.x) * heads + blockIdx.y];
}
