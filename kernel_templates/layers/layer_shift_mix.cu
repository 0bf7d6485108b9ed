// Where a half of a layer begins: the residual, its norm, and mixes of a token with the one before it. Per token t:
//
//     z_t = x_t + add_t;  n_t = (z_t - mean) / sqrt(variance + eps) weight + bias;  mixed[m] = n_t + (n_{t-1} - n_t) mixes[m]
//
//   x, add         [rows, CHANNELS]  T_IO  in; add with HAS_ADD, else null
//   weight, bias   [CHANNELS]  T_WEIGHT, T_BIAS  in       mixes  [MIXES, CHANNELS]  T_MIXES  in
//   shift          [slots, CHANNELS]  T_SHIFT  in and out: n of the token before the first, and of the last; no gaps
//   state_indices  [sequences]  int32 or int64  in, or null: sequence i has slot i
//   cu_seqlens     [sequences + 1]  int32 or int64  in where PACKED: where sequences begin and end; else each has
//                  `tokens` rows
//   has_initial_state  [sequences]  one byte each  in or null: all have one. Where it is 0, a sequence begins with zeros
//   num_active     [1]  int  in or null: how many sequences there are; rows of none of these get zeros
//   residual       [rows, CHANNELS]  T_IO  out with HAS_ADD, else null: z
//   mixed          [MIXES, rows, CHANNELS]  T_IO  out
//
// A sequence whose slot is at or below `null_index`, or past the pool, begins with zeros and keeps nothing. So does a row
// that is in none, whatever the bounds say; with `num_active` it gets zeros.
// n_{t-1} is rounded as the pool has it also within a sequence, so that it does not matter where a text is cut.
//
// Grid (rows). A block has a row, and with more than one token the row before it too, whose norm it makes again: blocks
// need not wait for each other. The block of a sequence's first row has the last row for that, and is the one that reads
// the pool and then writes it.
#include "layer_rows.cuh"

template <int BYTES> struct IntegerOf { using Type = int; };
template <> struct IntegerOf<8> { using Type = i64; };
using Index = IntegerOf<INDEX_BYTES>::Type;
using Bound = IntegerOf<BOUND_BYTES>::Type;

struct Smem {
    Parts parts[ONE_TOKEN ? 2 : 4][1];
};

// What a thread reads of the parameters. In a step of decode all of that is under way before the sums.
constexpr bool IS_AHEAD = ONE_TOKEN && ITEMS == 1;
struct Norm {
    const T_WEIGHT* weight;
    const T_BIAS* bias;
    Piece<T_WEIGHT> slope;
    Piece<T_BIAS> offset;
    __device__ void load(int channel) { slope.load(weight + channel), offset.load(bias + channel); }

    // z becomes n.
    __device__ void apply(Row& z, float eps, Parts (&first)[1], Parts (&second)[1]) {
        const float factor = centre(z, eps, first, second).factor;
        for_pieces([&](int n, int channel) {
            if constexpr (!IS_AHEAD) load(channel);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) z[n][i] = z[n][i] * factor * slope.at(i) + offset.at(i);
        });
    }
};

__device__ inline void load_row(Row& z, const T_IO* x, const T_IO* add, i64 row) {
    Piece<T_IO> held[ITEMS], added[ITEMS];
    for_pieces([&](int n, int channel) {
        held[n].load(x + row * CHANNELS + channel);
        if constexpr (HAS_ADD) added[n].load(add + row * CHANNELS + channel);
    });
    for_pieces([&](int n, int) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) z[n][i] = HAS_ADD ? held[n].at(i) + added[n].at(i) : held[n].at(i);
    });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_shift_mix(
    const T_IO* __restrict__ x, const T_IO* __restrict__ add, const T_WEIGHT* __restrict__ weight,
    const T_BIAS* __restrict__ bias, const T_MIXES* __restrict__ mixes, T_SHIFT* shift,
    const Index* __restrict__ state_indices, const Bound* __restrict__ cu_seqlens,
    const unsigned char* __restrict__ has_initial_state, const int* __restrict__ num_active,
    T_IO* __restrict__ residual, T_IO* __restrict__ mixed, i64 rows, i64 tokens, i64 sequences, i64 slots,
    i64 slot_stride, i64 null_index, float eps) {
    __shared__ Smem smem;
    const i64 row = blockIdx.x;
    let_next_launch_begin();
    for_pieces([&](int, int channel) {
        prefetch(weight + channel), prefetch(bias + channel);
#pragma unroll
        for (int m = 0; m < MIXES; ++m) prefetch(mixes + m * CHANNELS + channel);
    });
    shift = after_previous_launch(shift);
    x = written_meanwhile(x), add = written_meanwhile(add), weight = written_meanwhile(weight);
    bias = written_meanwhile(bias), mixes = written_meanwhile(mixes);
    state_indices = written_meanwhile(state_indices), cu_seqlens = written_meanwhile(cu_seqlens);
    has_initial_state = written_meanwhile(has_initial_state), num_active = written_meanwhile(num_active);

    const i64 active = num_active != nullptr ? min(i64(*num_active), sequences) : sequences;
    i64 sequence = row, first = row, last = row;
    if constexpr (PACKED) {
        sequence = 0;
        for (i64 end = active - 1; sequence < end;) {  // the last sequence that begins at the row or before it
            const i64 middle = (sequence + end + 1) / 2;
            if (cu_seqlens[middle] <= row) sequence = middle;
            else end = middle - 1;
        }
        const i64 begin = max(i64(cu_seqlens[sequence]), i64(0)), end = min(i64(cu_seqlens[sequence + 1]), rows);
        if (begin <= row && row < end) first = begin, last = end - 1;
        else sequence = -1;
    } else if constexpr (!ONE_TOKEN) {
        sequence = row / tokens, first = sequence * tokens, last = first + tokens - 1;
    }
    const bool is_first = row == first, is_there = num_active == nullptr || (sequence >= 0 && sequence < active);
    const i64 other = is_first ? last : row - 1;
    i64 slot = -1;
    bool begins_with_zeros = true;
    if (is_first && sequence >= 0) {
        const i64 index = state_indices != nullptr ? i64(state_indices[sequence]) : sequence;
        if ((state_indices == nullptr || index > null_index) && index < slots) slot = index;
        begins_with_zeros = has_initial_state != nullptr && has_initial_state[sequence] == 0;
    }

    Row z, before;
    load_row(z, x, add, row);
    Norm norm{weight, bias};
    Piece<T_SHIFT> kept[ITEMS];
    Piece<T_MIXES> held[IS_AHEAD ? MIXES : 1];
    if constexpr (IS_AHEAD)
        for_pieces([&](int, int channel) {
            norm.load(channel);
#pragma unroll
            for (int m = 0; m < MIXES; ++m) held[m].load(mixes + m * CHANNELS + channel);
        });
    // Behind the others, as its place has to be known first.
    for_pieces([&](int n, int channel) {
        kept[n] = {};
        if (slot >= 0 && !begins_with_zeros) kept[n].load(shift + slot * slot_stride + channel);
    });
    if (!is_there) {
        for_pieces([&](int, int channel) {
            const float zeros[VECTOR] = {};
            if constexpr (HAS_ADD) write(residual + row * CHANNELS + channel, zeros);
#pragma unroll
            for (int m = 0; m < MIXES; ++m) write(mixed + (m * rows + row) * CHANNELS + channel, zeros);
        });
        return;
    }
    if constexpr (HAS_ADD) for_pieces([&](int n, int channel) { write(residual + row * CHANNELS + channel, z[n]); });
    norm.apply(z, eps, smem.parts[0], smem.parts[1]);
    if (!ONE_TOKEN && other != row) {
        load_row(before, x, add, other);
        norm.apply(before, eps, smem.parts[ONE_TOKEN ? 0 : 2], smem.parts[ONE_TOKEN ? 1 : 3]);
    } else {
        for_pieces([&](int n, int) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) before[n][i] = z[n][i];
        });
    }
    if (slot >= 0)
        for_pieces([&](int n, int channel) { write(shift + slot * slot_stride + channel, before[n]); });

    for_pieces([&](int n, int channel) {
        float change[VECTOR], result[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            change[i] = (is_first ? kept[n].at(i) : rounded<T_SHIFT>(before[n][i])) - z[n][i];
#pragma unroll
        for (int m = 0; m < MIXES; ++m) {
            Piece<T_MIXES>& mix = held[IS_AHEAD ? m : 0];
            if constexpr (!IS_AHEAD) mix.load(mixes + m * CHANNELS + channel);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) result[i] = z[n][i] + change[i] * mix.at(i);
            write(mixed + (m * rows + row) * CHANNELS + channel, result);
        }
    });
}
