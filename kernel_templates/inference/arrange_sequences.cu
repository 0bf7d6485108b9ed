// Which launch does which sequence of a call whose states lie in a pool, and where the state of each is.
//
//   cu_seqlens  [sequences + 1]  Bound  in: where sequences begin and end, counted from 0
//   state_indices, write_indices  [sequences]  Index  in or null: row i has slot i, and writes where it reads
//   has_initial_state  [sequences]  one byte each  in or null: all have one. Where it is 0, a sequence begins with zeros
//   num_active  [1]  int  in or null: how many sequences there are; those behind them count as empty
//   checkpoint_offsets  [sequences, checkpoints]  Bound  in or null: tokens after which a state is written too,
//                       in ascending order; what does not ascend, or is behind the sequence, counts as none
//   checkpoint_indices  [sequences, checkpoints]  Index  in or null: the slots of these states
//   bounds  [pieces + 1]  int64  out: where pieces begin, to be read as cu_seqlens
//   pieces  [pieces]  Piece  out: `checkpoints` + 1 for each sequence: one to each checkpoint, and one with what is behind
//           these; those that are left over are empty
//
// A slot at or below `null_index`, or outside the pool, is none. A sequence that has none gets zeros for y. Sequences
// of up to `few_tokens`, without checkpoints, are for the launch that goes token by token.
// Grid (sequences / NUM_THREADS), a thread for a sequence.
#include "pieces.cuh"

template <int BYTES> struct IntegerOf { using Type = int; };
template <> struct IntegerOf<8> { using Type = i64; };
using Bound = IntegerOf<BOUND_BYTES>::Type;
using Index = IntegerOf<INDEX_BYTES>::Type;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) arrange_sequences(
    const Bound* __restrict__ cu_seqlens, const Index* __restrict__ state_indices,
    const Index* __restrict__ write_indices, const unsigned char* __restrict__ has_initial_state,
    const int* __restrict__ num_active, const Bound* __restrict__ checkpoint_offsets,
    const Index* __restrict__ checkpoint_indices, i64* __restrict__ bounds, Piece* __restrict__ pieces, i64 tokens,
    i64 sequences, i64 checkpoints, i64 slots, i64 null_index, i64 few_tokens) {
    const i64 sequence = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (sequence >= sequences) return;
    const i64 active = num_active != nullptr ? min(max(i64(*num_active), i64(0)), sequences) : sequences;
    const auto bound = [&](i64 i) { return min(max(i64(cu_seqlens[min(i, active)]), i64(0)), tokens); };
    const i64 begin = bound(sequence), end = max(bound(sequence + 1), begin);

    const auto legal = [&](i64 slot, bool is_given) {
        return (is_given && slot <= null_index) || slot < 0 || slot >= slots ? -1 : static_cast<int>(slot);
    };
    const i64 own = state_indices != nullptr ? i64(state_indices[sequence]) : sequence;
    const int slot = legal(own, state_indices != nullptr);
    const int last = write_indices != nullptr ? legal(write_indices[sequence], true) : slot;
    const bool is_null = slot < 0, is_empty = begin == end;
    int from = has_initial_state == nullptr || has_initial_state[sequence] != 0 ? slot : -1;

    bounds += sequence * (checkpoints + 1), pieces += sequence * (checkpoints + 1);
    i64 done = begin;
    int wave = 0;  // of the piece that comes next, which is also its place
    for (i64 i = 0; i < checkpoints; ++i) {
        const i64 next = begin + i64(checkpoint_offsets[sequence * checkpoints + i]);
        const int to = legal(checkpoint_indices[sequence * checkpoints + i], true);
        if (is_null || to < 0 || next <= done || next > end) continue;
        bounds[wave] = done;
        pieces[wave] = {from, to, wave, PieceKind::none};
        done = next, from = to, ++wave;
    }
    bounds[wave] = done;
    const bool is_long = !is_null && !is_empty && (wave > 0 || end - done > few_tokens);
    const int kind = is_empty || is_long ? PieceKind::none : is_null ? PieceKind::zeros : PieceKind::few_tokens;
    pieces[wave] = {from, last, is_long ? wave : -1, kind};
    for (i64 i = wave + 1; i <= checkpoints; ++i) {
        bounds[i] = end;
        pieces[i] = {-1, -1, -1, PieceKind::none};
    }
    if (sequence == sequences - 1) bounds[checkpoints + 1] = end;
}
