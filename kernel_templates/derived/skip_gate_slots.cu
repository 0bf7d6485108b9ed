// What skip_gate.cu computes, of packed tokens whose sequences have states in a pool: those without a slot get zeros.
//
//   y, x, z, D, out  as there
//   state_indices    [sequences]  Index  in or null: sequence i has slot i
//   cu_seqlens       [sequences + 1]  Bound  in: where sequences begin and end; tokens of none get zeros
//   num_active       [1]  int  in or null: how many sequences there are; tokens of those behind them get zeros
//
// A slot at or below `null_index`, or outside the pool, is none. Grid as there. A thread looks for the sequence of each
// token among the bounds, by halves.
#include "skip_gate.cuh"

template <int BYTES> struct IntegerOf { using Type = int; };
template <> struct IntegerOf<8> { using Type = i64; };
using Bound = IntegerOf<BOUND_BYTES>::Type;
using Index = IntegerOf<INDEX_BYTES>::Type;

// The sequence of a token; -1 where it is in none.
__device__ inline i64 sequence_of(i64 token, const Bound* cu_seqlens, const int* num_active, i64 sequences) {
    const i64 active = num_active != nullptr ? min(max(i64(*num_active), i64(0)), sequences) : sequences;
    i64 low = 0, high = active + 1;  // the first bound behind the token is one of these, or there is none
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (i64(cu_seqlens[middle]) > token)
            high = middle;
        else
            low = middle + 1;
    }
    return low <= active ? low - 1 : -1;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) skip_gate_slots(
    const T_IO* y, const T_IO* __restrict__ x, const T_D* __restrict__ D, const T_IO* __restrict__ z, T_IO* out,
    const Index* __restrict__ state_indices, const Bound* __restrict__ cu_seqlens, const int* __restrict__ num_active,
    Strides y_strides, Strides x_strides, Strides z_strides, i64 rows, i64 tokens, i64 heads, i64 block_rows,
    i64 sequences, i64 slots, i64 null_index) {
    write_outputs(y, x, D, z, out, y_strides, x_strides, z_strides, rows, tokens, heads, block_rows,
                  [&](const RowWalk& walk) {
        const i64 owner = sequence_of(walk.token, cu_seqlens, num_active, sequences);
        if (owner < 0) return false;
        const i64 slot = state_indices != nullptr ? i64(state_indices[owner]) : owner;
        return (state_indices == nullptr || slot > null_index) && slot >= 0 && slot < slots;
    });
}
