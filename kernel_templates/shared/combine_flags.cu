// Flags of heads from those of their segments: a head has one where one of its segments has.
//
//   segment_flags  [sequences * segments, heads]  in
//   flags          [sequences, heads]  out
//
// A thread for every head of a sequence.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) combine_flags(
    const int* __restrict__ segment_flags, int* __restrict__ flags, i64 sequences, i64 heads, i64 segments) {
    const i64 index = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (index >= sequences * heads) return;
    const int* const first = segment_flags + index / heads * segments * heads + index % heads;
    int flag = 0;
    for (i64 segment = 0; segment < segments; ++segment) flag |= first[segment * heads];
    flags[index] = flag;
}
