// What the recurrence of RWKV-7 takes for k, v, a and b. Per token and head, with rate = sigmoid(rate + a0), or with
// RATE_IS_GIVEN rate + a0:
//
//     factor = 1 / max(|k k_k|, 1e-12);  kk = k k_k factor;  a = -kk;  b = kk rate
//     k <- k (1 + (rate - 1) k_a)
//     v <- v + (v_first - v) sigmoid(v_gate + v0);  bonus = (sum_j r_j k_j r_k_j) v
//
//   k, v, v_first, r           [rows, heads, HEAD_SIZE]  T_IO  in
//   rate, v_gate               the same shape  T_RATE, T_V_GATE  in
//   k_k, k_a, a0, v0, r_k      [heads, HEAD_SIZE]  T_K_K, T_K_A, T_A0, T_V0, T_R_K  in; a0 and v0 or null
//   new_k, new_v, a, b, bonus  [rows, heads, HEAD_SIZE]  T_IO  out, or null
//   new_rate                   the same shape  T_IO  out with MAKES_NEW_RATE, else null
//   factors                    [rows, heads]  fp32  out with MAKES_FACTORS, else null
//
// v_first, v_gate, v0 and new_v are null without HAS_V_FIRST, where v stays as it is; r, r_k and bonus without HAS_BONUS.
// The bonus is that of the new k and v. What the next row needs is on its way while one is made, where a thread has
// registers for it. Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "layer_heads.cuh"

constexpr bool IS_AHEAD = ITEMS <= 2;

// A row of a head as it comes from memory.
struct Incoming {
    Piece<T_IO> key[ITEMS], value[ITEMS], value_first[ITEMS], receptance[ITEMS];
    Piece<T_RATE> rates[ITEMS];
    Piece<T_V_GATE> gate[ITEMS];
    __device__ void load(const T_IO* k, const T_IO* v, const T_RATE* rate, const T_IO* v_first, const T_V_GATE* v_gate,
                         const T_IO* r, i64 start) {
        load_pieces(key, k + start), load_pieces(rates, rate + start);
        if constexpr (HAS_V_FIRST || HAS_BONUS) load_pieces(value, v + start);
        if constexpr (HAS_V_FIRST) load_pieces(value_first, v_first + start), load_pieces(gate, v_gate + start);
        if constexpr (HAS_BONUS) load_pieces(receptance, r + start);
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_prepare_keys(
    const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_RATE* __restrict__ rate,
    const T_IO* __restrict__ v_first, const T_V_GATE* __restrict__ v_gate, const T_K_K* __restrict__ k_k,
    const T_K_A* __restrict__ k_a, const T_A0* __restrict__ a0, const T_V0* __restrict__ v0,
    const T_IO* __restrict__ r, const T_R_K* __restrict__ r_k, T_IO* __restrict__ new_k, T_IO* __restrict__ new_v,
    T_IO* __restrict__ a, T_IO* __restrict__ b, T_IO* __restrict__ bonus, T_IO* __restrict__ new_rate,
    float* __restrict__ factors, i64 rows, i64 heads, i64 block_rows) {
    const i64 own = own_head(), head = min(own, heads - 1), of_row = head * HEAD_SIZE;
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    let_next_launch_begin();
    for_pieces(true, [&](int, int channel) {
        prefetch(k_k + of_row + channel), prefetch(k_a + of_row + channel);
        if constexpr (HAS_A0) prefetch(a0 + of_row + channel);
        if constexpr (HAS_V0) prefetch(v0 + of_row + channel);
        if constexpr (HAS_BONUS) prefetch(r_k + of_row + channel);
    });
    k = after_previous_launch(k);
    v = written_meanwhile(v), rate = written_meanwhile(rate), v_first = written_meanwhile(v_first);
    v_gate = written_meanwhile(v_gate), k_k = written_meanwhile(k_k), k_a = written_meanwhile(k_a);
    a0 = written_meanwhile(a0), v0 = written_meanwhile(v0), r = written_meanwhile(r), r_k = written_meanwhile(r_k);

    const auto place = [&](i64 row) { return (row * heads + head) * HEAD_SIZE; };
    Incoming next;
    if constexpr (IS_AHEAD) next.load(k, v, rate, v_first, v_gate, r, place(begin));
    Piece<T_K_K> scale[ITEMS];
    Piece<T_K_A> slope[ITEMS];
    Piece<T_A0> rates_start[ITEMS];
    Piece<T_V0> gate_start[ITEMS];
    Piece<T_R_K> bonus_share[ITEMS];
    load_pieces(scale, k_k + of_row), load_pieces(slope, k_a + of_row);
    if constexpr (HAS_A0) load_pieces(rates_start, a0 + of_row);
    if constexpr (HAS_V0) load_pieces(gate_start, v0 + of_row);
    if constexpr (HAS_BONUS) load_pieces(bonus_share, r_k + of_row);
#pragma unroll 1
    for (i64 row = begin; row < end; ++row) {
        const i64 start = place(row);
        if constexpr (!IS_AHEAD) next.load(k, v, rate, v_first, v_gate, r, start);
        const Incoming held = next;
        if (IS_AHEAD && row + 1 < end) next.load(k, v, rate, v_first, v_gate, r, place(row + 1));
        float values[ITEMS][VECTOR], kk[ITEMS][VECTOR], share[ITEMS][VECTOR], keys[ITEMS][VECTOR];
        float sums[2] = {};  // of the squares of kk, and the share of v in the bonus
        sum_over_head(sums, [&](int n, int i) {
            const float own = held.key[n].at(i);
            kk[n][i] = own * scale[n].at(i);
            const float raw = HAS_A0 ? held.rates[n].at(i) + rates_start[n].at(i) : held.rates[n].at(i);
            share[n][i] = RATE_IS_GIVEN ? raw : sigmoid(raw);
            keys[n][i] = own * (1.0f + (share[n][i] - 1.0f) * slope[n].at(i));
            sums[0] += kk[n][i] * kk[n][i];
            if constexpr (HAS_BONUS) sums[1] += held.receptance[n].at(i) * keys[n][i] * bonus_share[n].at(i);
            if constexpr (HAS_V_FIRST || HAS_BONUS) values[n][i] = held.value[n].at(i);
            if constexpr (HAS_V_FIRST) {
                const float logit = HAS_V0 ? held.gate[n].at(i) + gate_start[n].at(i) : held.gate[n].at(i);
                values[n][i] += (held.value_first[n].at(i) - values[n][i]) * sigmoid(logit);
            }
        });
        const float factor = reciprocal_length(sums[0]);
        if constexpr (HAS_V_FIRST) write_pieces(new_v, start, is_there, [&](int n, int i) { return values[n][i]; });
        write_pieces(new_k, start, is_there, [&](int n, int i) { return keys[n][i]; });
        write_pieces(a, start, is_there, [&](int n, int i) { return -(kk[n][i] * factor); });
        write_pieces(b, start, is_there, [&](int n, int i) { return kk[n][i] * factor * share[n][i]; });
        if constexpr (HAS_BONUS)
            write_pieces(bonus, start, is_there, [&](int n, int i) { return sums[1] * values[n][i]; });
        if constexpr (MAKES_NEW_RATE) write_pieces(new_rate, start, is_there, [&](int n, int i) { return share[n][i]; });
        if constexpr (MAKES_FACTORS) write_of_head(factors, row, head, heads, is_there, factor);
    }
}
