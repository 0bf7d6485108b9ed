// Rows of a launch over states: where a block's part of a state lies, and its tokens one after another.
//
// Needs T_IO, T_STATE, PACKED, and what update.cuh needs.
#pragma once
#include "overlap.cuh"
#include "update.cuh"
namespace arranged {  // as layer.cuh has another Piece
#include "pieces.cuh"
}

// With one token the numbers of a state are used twice, for sums and for what is written: they stay as they are read.
template <bool AS_READ> struct HeldAs { using Type = float; };
template <> struct HeldAs<true> { using Type = T_STATE; };
using RowTile = Tile<HeldAs<ONE_TOKEN && HAS_STATE && !STOCHASTIC>::Type>;

// What a block has: a head of a row, and its values from `first_value` on.
struct Part {
    i64 row, head;
    int first_value;
    __device__ Part() {
        row = i64(blockIdx.z) * gridDim.y + blockIdx.y, head = blockIdx.x / VALUE_BLOCKS;
        first_value = blockIdx.x % VALUE_BLOCKS * BLOCK_VALUES;
    }
    // The head's place in a slot.
    __device__ i64 in_slot() const { return head * (VALUE_SIZE * HEAD_SIZE); }
};

// Has the state of a part brought near. The launch before may still write the index and the state. With PACKED it writes
// which states these are.
__device__ inline void bring_near(const Part& part, const T_STATE* state, const Index* state_indices, i64 slot_stride,
                                  i64 slots) {
    if constexpr (PACKED) return;
    const i64 likely = state_indices != nullptr ? i64(read_from_l2(state_indices + part.row)) : part.row;
    if (likely >= 0 && likely < slots) prefetch_tile(state + likely * slot_stride + part.in_slot(), part.first_value);
}

// Whether a number is none of a slot; one of those that nobody gives may be at or below `null_index`.
__device__ inline bool is_none(i64 slot, bool is_given, i64 slots, i64 null_index) {
    return (is_given && slot <= null_index) || slot >= slots || slot < 0;
}

// Writes zeros to the tokens [begin, end) of the part's y.
__device__ inline void write_zeros(T_IO* y, i64 y_stride, int first_value, i64 begin, i64 end) {
    const int width = min(BLOCK_VALUES, VALUE_SIZE - first_value);
#pragma unroll 1
    for (i64 t = begin; t < end; ++t)
#pragma unroll 1
        for (int i = threadIdx.x; i < width; i += NUM_THREADS) y[t * y_stride + i] = from_float<T_IO>(0.0f);
}

// A row: its tokens, of which the first is counted from the first row on, and the slots that it reads and writes. It is
// not there where nothing is left to do: its y has the zeros that it gets.
struct Row {
    i64 begin, tokens, from, to;
    bool is_there;
};
// Of `batch` rows of `tokens` each, or with PACKED of pieces. y is the part's, of the first token of all rows.
__device__ inline Row row_of(const Part& part, const Index* state_indices, const Index* write_indices, i64 slots,
                             i64 null_index, i64 batch, i64 tokens, const i64* bounds, const arranged::Piece* pieces, T_IO* y,
                             i64 y_stride) {
    const i64 row = part.row;
    if constexpr (PACKED) {
        const i64 end = bounds[batch], share = (tokens - end + batch - 1) / batch;
        write_zeros(y, y_stride, part.first_value, end + row * share, min(end + (row + 1) * share, tokens));
        const arranged::Piece piece = pieces[row];
        const i64 begin = bounds[row], count = bounds[row + 1] - begin;
        if (piece.kind == arranged::PieceKind::zeros) write_zeros(y, y_stride, part.first_value, begin, begin + count);
        return {begin, count, piece.read, piece.write, piece.kind == arranged::PieceKind::few_tokens};
    } else {
        const i64 from = state_indices != nullptr ? i64(state_indices[row]) : row, begin = row * tokens;
        const i64 to = write_indices != nullptr ? i64(write_indices[row]) : from;
        const bool is_there = !is_none(from, state_indices != nullptr, slots, null_index);
        if (!is_there) write_zeros(y, y_stride, part.first_value, begin, begin + tokens);
        return {begin, tokens, from, to, is_there};
    }
}

// Where the states of rows are written, as `write_tile` does.
struct FinalStates {
    T_STATE* states;
    const i64* seed;
    i64 slot_stride, slots, null_index, heads;
    bool has_indices;

    template <typename Change = Same>
    __device__ void write(const RowTile& tile, const Part& part, i64 to, Change change = {}) const {
        if (states == nullptr || is_none(to, has_indices, slots, null_index)) return;
        const i64 number = STOCHASTIC ? *seed : 0, draw = (to * heads + part.head) * TILES_OF_HEAD;
        write_tile(states + to * slot_stride + part.in_slot(), tile, part.first_value, number, draw, change);
    }
};

// Runs the tokens of a row, of which the first is loaded: each is stored for all threads, the next one loaded meanwhile,
// and `act(t, token)` moves the tile on.
template <typename Token, typename Store, typename Load, typename Act>
__device__ inline void run_tokens(Token (&buffers)[BUFFERS], i64 tokens, Store store, Load load, Act act) {
    const i64 steps = ONE_TOKEN ? 1 : tokens;
#pragma unroll 1
    for (i64 t = 0; t < steps; ++t) {
        Token& token = buffers[t % BUFFERS];
        if (BUFFERS == 1 && t > 0) __syncthreads();
        store(token);
        __syncthreads();
        if (t + 1 < steps) load(t + 1);
        act(t, token);
    }
}
