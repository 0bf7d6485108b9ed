// Gradients of layer_prepare_keys. With rate the sigmoid, u = k k_k, f = 1 / max(|u|, 1e-12) and kk = f u, per token and
// head:
//
//     dkk = rate grad_b - grad_a;   du = f (dkk - kk (kk . dkk)), or f dkk where |u| < 1e-12
//     dk = grad_new_k (1 + (rate - 1) k_a) + du k_k;    dk_k = du k;    dk_a = grad_new_k k (rate - 1)
//     drate = (grad_new_k k k_a + grad_b kk) rate (1 - rate);           da0 = drate
//     dv = grad_new_v (1 - share);    dv_first = grad_new_v share
//     dv_gate = grad_new_v (v_first - v) share (1 - share);             dv0 = dv_gate
//
//   the inputs                   as layer_prepare_keys
//   grad_new_k, grad_new_v, grad_a, grad_b  [rows, heads, HEAD_SIZE]  T_IO  in
//   dk, dv, dv_first             the same shape  T_IO  out, or null;    drate, dv_gate  T_RATE, T_V_GATE
//   dk_k_rows, dk_a_rows, da0_rows, dv0_rows  [blocks of rows, heads, HEAD_SIZE]  fp32  out, or null
//
// Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "layer_head_rows.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_prepare_keys_backward(
    const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_RATE* __restrict__ rate,
    const T_IO* __restrict__ v_first, const T_V_GATE* __restrict__ v_gate, const T_K_K* __restrict__ k_k,
    const T_K_A* __restrict__ k_a, const T_A0* __restrict__ a0, const T_V0* __restrict__ v0,
    const T_IO* __restrict__ grad_new_k, const T_IO* __restrict__ grad_new_v, const T_IO* __restrict__ grad_a,
    const T_IO* __restrict__ grad_b, T_IO* __restrict__ dk, T_IO* __restrict__ dv, T_RATE* __restrict__ drate,
    T_IO* __restrict__ dv_first, T_V_GATE* __restrict__ dv_gate, float* __restrict__ dk_k_rows,
    float* __restrict__ dk_a_rows, float* __restrict__ da0_rows, float* __restrict__ dv0_rows, i64 rows, i64 heads,
    i64 block_rows) {
    const i64 own = own_head_of_row(), head = min(own, heads - 1), of_row = head * HEAD_SIZE;
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);

    Piece<T_K_K> scale[ITEMS];
    load_pieces(scale, k_k + of_row);
    ColumnSums dk_k, dk_a, da0, dv0;

    for (i64 row = begin; row < end; ++row) {
        const i64 start = (row * heads + head) * HEAD_SIZE;
        Piece<T_IO> key[ITEMS], g_key[ITEMS], g_a[ITEMS], g_b[ITEMS];
        Piece<T_RATE> rates[ITEMS];
        // These are near by from the second row on: registers are for what is not.
        Piece<T_K_A> slope[ITEMS];
        Piece<T_A0> rates_start[ITEMS];
        load_pieces(slope, k_a + of_row);
        if constexpr (HAS_A0) load_pieces(rates_start, a0 + of_row);
        load_pieces(key, k + start), load_pieces(rates, rate + start);
        load_pieces(g_key, grad_new_k + start);
        load_pieces(g_a, grad_a + start), load_pieces(g_b, grad_b + start);
        if constexpr (HAS_V_FIRST) {
            Piece<T_IO> value[ITEMS], value_first[ITEMS], g_value[ITEMS];
            Piece<T_V_GATE> gate[ITEMS];
            Piece<T_V0> gate_start[ITEMS];
            if constexpr (HAS_V0) load_pieces(gate_start, v0 + of_row);
            load_pieces(value, v + start), load_pieces(value_first, v_first + start);
            load_pieces(g_value, grad_new_v + start), load_pieces(gate, v_gate + start);
            float shares[ITEMS][VECTOR], of_gate[ITEMS][VECTOR];
            for_elements([&](int n, int i) {
                const float share = sigmoid(HAS_V0 ? gate[n].at(i) + gate_start[n].at(i) : gate[n].at(i));
                const float difference = value_first[n].at(i) - value[n].at(i);
                shares[n][i] = share, of_gate[n][i] = g_value[n].at(i) * difference * share * (1.0f - share);
                if constexpr (HAS_V0) dv0.add(n, i, of_gate[n][i]);
            });
            write_pieces(dv, start, is_there, [&](int n, int i) { return g_value[n].at(i) * (1.0f - shares[n][i]); });
            write_pieces(dv_first, start, is_there, [&](int n, int i) { return g_value[n].at(i) * shares[n][i]; });
            write_pieces(dv_gate, start, is_there, [&](int n, int i) { return of_gate[n][i]; });
        }
        float u[ITEMS][VECTOR], share[ITEMS][VECTOR], du[ITEMS][VECTOR], of_rate[ITEMS][VECTOR];
        for_elements([&](int n, int i) {
            u[n][i] = key[n].at(i) * scale[n].at(i);
            share[n][i] = sigmoid(HAS_A0 ? rates[n].at(i) + rates_start[n].at(i) : rates[n].at(i));
            du[n][i] = share[n][i] * g_b[n].at(i) - g_a[n].at(i);  // dkk
        });
        float sums[2] = {};  // u . u and u . dkk
        sum_over_head(sums, [&](int n, int i) { sums[0] += u[n][i] * u[n][i], sums[1] += u[n][i] * du[n][i]; });
        const float factor = reciprocal_length(sums[0]);
        const float along = sums[0] < LEAST_SQUARES ? 0.0f : factor * factor * sums[1] * factor;
        for_elements([&](int n, int i) {
            const float rest = share[n][i] - 1.0f, g = g_key[n].at(i) * key[n].at(i);
            of_rate[n][i] = (g * slope[n].at(i) + g_b[n].at(i) * (u[n][i] * factor)) * share[n][i] * -rest;
            du[n][i] = factor * du[n][i] - along * u[n][i];
            dk_k.add(n, i, du[n][i] * key[n].at(i)), dk_a.add(n, i, g * rest);
            if constexpr (HAS_A0) da0.add(n, i, of_rate[n][i]);
        });
        write_pieces(drate, start, is_there, [&](int n, int i) { return of_rate[n][i]; });
        write_pieces(dk, start, is_there, [&](int n, int i) {
            return g_key[n].at(i) * (1.0f + (share[n][i] - 1.0f) * slope[n].at(i)) + du[n][i] * scale[n].at(i);
        });
    }
    dk_k.write_to(dk_k_rows, head, heads, is_there), dk_a.write_to(dk_a_rows, head, heads, is_there);
    if constexpr (HAS_A0) da0.write_to(da0_rows, head, heads, is_there);
    if constexpr (HAS_V0) dv0.write_to(dv0_rows, head, heads, is_there);
}
