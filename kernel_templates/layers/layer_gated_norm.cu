// What the output matrix of time mixing reads. Per token and head:
//
//     out = ((y - mean) / sqrt(variance + eps) weight + bias + (sum_j r_j k_j r_k_j) v) opened(g)
//
// or, with TAKES_BONUS, `bonus` in the place of what is made of r, k, v and r_k.
//
//   y, g          [rows, heads, HEAD_SIZE]  T_IO  in
//   r, k, v       the same shape  T_IO  in with HAS_BONUS, else null
//   r_k           [heads, HEAD_SIZE]  T_R_K  in with HAS_BONUS, else null
//   bonus         [rows, heads, HEAD_SIZE]  T_IO  in with TAKES_BONUS, else null
//   weight, bias  [heads, HEAD_SIZE]  T_WEIGHT, T_BIAS  in; bias is null without HAS_BIAS
//   out           [rows, heads, HEAD_SIZE]  T_IO  out, or null
//   means         [rows, heads]  fp32  out with MAKES_MEANS, else null
//   factors       [rows, heads]  fp32  out with MAKES_FACTORS, else null: 1 / sqrt(variance + eps)
//
// Without CENTERED the mean is 0, and the variance that of squares. What the next row needs is on its way while one is
// made, where a thread has registers for it. Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "layer_heads.cuh"

constexpr bool IS_AHEAD = ITEMS <= 2;

// A row of a head as it comes from memory.
struct Incoming {
    Piece<T_IO> input[ITEMS], gate[ITEMS];
    Piece<T_IO> receptance[ITEMS], key[ITEMS], value[ITEMS];
    __device__ void load(const T_IO* y, const T_IO* g, const T_IO* r, const T_IO* k, const T_IO* v, const T_IO* bonus,
                         i64 start) {
        load_pieces(input, y + start), load_pieces(gate, g + start);
        if constexpr (HAS_BONUS)
            load_pieces(receptance, r + start), load_pieces(key, k + start), load_pieces(value, v + start);
        if constexpr (TAKES_BONUS) load_pieces(value, bonus + start);
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_gated_norm(
    const T_IO* __restrict__ y, const T_IO* __restrict__ g, const T_WEIGHT* __restrict__ weight,
    const T_BIAS* __restrict__ bias, const T_IO* __restrict__ r, const T_IO* __restrict__ k,
    const T_IO* __restrict__ v, const T_R_K* __restrict__ r_k, const T_IO* __restrict__ bonus,
    T_IO* __restrict__ out, float* __restrict__ means, float* __restrict__ factors, i64 rows, i64 heads,
    i64 block_rows, float eps) {
    const i64 own = own_head(), head = min(own, heads - 1), of_row = head * HEAD_SIZE;
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    let_next_launch_begin();
    for_pieces(true, [&](int, int channel) {
        prefetch(weight + of_row + channel);
        if constexpr (HAS_BONUS) prefetch(r_k + of_row + channel);
        if constexpr (HAS_BIAS) prefetch(bias + of_row + channel);
    });
    y = after_previous_launch(y);
    r = written_meanwhile(r), k = written_meanwhile(k), v = written_meanwhile(v), g = written_meanwhile(g);
    r_k = written_meanwhile(r_k), weight = written_meanwhile(weight), bias = written_meanwhile(bias);
    bonus = written_meanwhile(bonus);

    const auto place = [&](i64 row) { return (row * heads + head) * HEAD_SIZE; };
    Incoming next;
    if constexpr (IS_AHEAD) next.load(y, g, r, k, v, bonus, place(begin));
    Piece<T_WEIGHT> slope[ITEMS];
    Piece<T_BIAS> offset[ITEMS];
    Piece<T_R_K> bonus_share[ITEMS];
    load_pieces(slope, weight + of_row);
    if constexpr (HAS_BIAS) load_pieces(offset, bias + of_row);
    if constexpr (HAS_BONUS) load_pieces(bonus_share, r_k + of_row);
#pragma unroll 1
    for (i64 row = begin; row < end; ++row) {
        const i64 start = place(row);
        if constexpr (!IS_AHEAD) next.load(y, g, r, k, v, bonus, start);
        const Incoming held = next;
        if (IS_AHEAD && row + 1 < end) next.load(y, g, r, k, v, bonus, place(row + 1));
        float sums[2] = {}, squares[1] = {}, x[ITEMS][VECTOR];  // of y, and the share of v in the bonus
        sum_over_head(sums, [&](int n, int i) {
            x[n][i] = held.input[n].at(i);
            if constexpr (CENTERED) sums[0] += x[n][i];
            if constexpr (HAS_BONUS) sums[1] += held.receptance[n].at(i) * held.key[n].at(i) * bonus_share[n].at(i);
        });
        const float mean = sums[0] * (1.0f / HEAD_SIZE);
        sum_over_head(squares, [&](int n, int i) { x[n][i] -= mean, squares[0] += x[n][i] * x[n][i]; });
        const float factor = reciprocal_root(squares[0] * (1.0f / HEAD_SIZE) + eps);
        write_pieces(out, start, is_there, [&](int n, int i) {
            float z = x[n][i] * factor * slope[n].at(i);
            if constexpr (HAS_BIAS) z += offset[n].at(i);
            if constexpr (HAS_BONUS) z += sums[1] * held.value[n].at(i);
            if constexpr (TAKES_BONUS) z += held.value[n].at(i);
            return z * opened<Gate(GATE)>(held.gate[n].at(i));
        });
        if constexpr (MAKES_MEANS) write_of_head(means, row, head, heads, is_there, mean);
        if constexpr (MAKES_FACTORS) write_of_head(factors, row, head, heads, is_there, factor);
    }
}
