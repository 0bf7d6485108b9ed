// What the recurrence of RWKV-7 takes for k, v, a and b. Per token and head, with rate = sigmoid(rate + a0):
//
//     kk = k k_k / max(|k k_k|, 1e-12);  a = -kk;  b = kk rate;  k <- k (1 + (rate - 1) k_a)
//     v <- v + (v_first - v) sigmoid(v_gate + v0)
//
//   k, v, v_first              [rows, heads, HEAD_SIZE]  T_IO  in
//   rate, v_gate               the same shape  T_RATE, T_V_GATE  in
//   k_k, k_a, a0, v0           [heads, HEAD_SIZE]  T_K_K, T_K_A, T_A0, T_V0  in; a0 and v0 or null
//   new_k, new_v, a, b         [rows, heads, HEAD_SIZE]  T_IO  out
//
// v_first, v_gate, v0 and new_v are null without HAS_V_FIRST, where v stays as it is. Grid (rows * heads / BLOCK_HEADS);
// LANES lanes have a head.
#include "layer_heads.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_prepare_keys(
    const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_RATE* __restrict__ rate,
    const T_IO* __restrict__ v_first, const T_V_GATE* __restrict__ v_gate, const T_K_K* __restrict__ k_k,
    const T_K_A* __restrict__ k_a, const T_A0* __restrict__ a0, const T_V0* __restrict__ v0,
    T_IO* __restrict__ new_k, T_IO* __restrict__ new_v, T_IO* __restrict__ a, T_IO* __restrict__ b, i64 rows,
    i64 heads) {
    const i64 head = own_head(), start = head * HEAD_SIZE, of_row = head % heads * HEAD_SIZE;
    const bool is_there = head < rows * heads;
    let_next_launch_begin();
    for_pieces(is_there, [&](int, int channel) {
        prefetch(k_k + of_row + channel), prefetch(k_a + of_row + channel);
        if constexpr (HAS_A0) prefetch(a0 + of_row + channel);
        if constexpr (HAS_V0) prefetch(v0 + of_row + channel);
    });
    k = after_previous_launch(k);
    v = written_meanwhile(v), rate = written_meanwhile(rate), v_first = written_meanwhile(v_first);
    v_gate = written_meanwhile(v_gate), k_k = written_meanwhile(k_k), k_a = written_meanwhile(k_a);
    a0 = written_meanwhile(a0), v0 = written_meanwhile(v0);

    Piece<T_IO> key[ITEMS];
    Piece<T_RATE> rates[ITEMS];
    Piece<T_K_K> scale[ITEMS];
    Piece<T_K_A> slope[ITEMS];
    Piece<T_A0> rates_start[ITEMS];
    for_pieces(is_there, [&](int n, int channel) {
        key[n].load(k + start + channel), scale[n].load(k_k + of_row + channel);
        rates[n].load(rate + start + channel), slope[n].load(k_a + of_row + channel);
        if constexpr (HAS_A0) rates_start[n].load(a0 + of_row + channel);
    });
    if constexpr (HAS_V_FIRST)
        for_pieces(is_there, [&](int, int channel) {
            Piece<T_IO> value, value_first;
            Piece<T_V_GATE> gate;
            Piece<T_V0> gate_start;
            value.load(v + start + channel), value_first.load(v_first + start + channel);
            gate.load(v_gate + start + channel);
            if constexpr (HAS_V0) gate_start.load(v0 + of_row + channel);
            float x[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float own = value.at(i), logit = HAS_V0 ? gate.at(i) + gate_start.at(i) : gate.at(i);
                x[i] = own + (value_first.at(i) - own) * sigmoid(logit);
            }
            write(new_v + start + channel, x);
        });

    float squares = 0.0f;
    for_pieces(is_there, [&](int n, int) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float kk = key[n].at(i) * scale[n].at(i);
            squares += kk * kk;
        }
    });
    const float factor = reciprocal_length(sum_of_head(squares));
    for_pieces(is_there, [&](int n, int channel) {
        float x[VECTOR], minus_kk[VECTOR], moved[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float own = key[n].at(i), kk = own * scale[n].at(i) * factor;
            const float share = sigmoid(HAS_A0 ? rates[n].at(i) + rates_start[n].at(i) : rates[n].at(i));
            x[i] = own * (1.0f + (share - 1.0f) * slope[n].at(i));
            minus_kk[i] = -kk, moved[i] = kk * share;
        }
        write(new_k + start + channel, x);
        write(a + start + channel, minus_kk), write(b + start + channel, moved);
    });
}
