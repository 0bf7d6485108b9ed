// Gradients of layer_prepare_keys. With rate after the sigmoid, u = k k_k, f = 1 / max(|u|, 1e-12) and kk = f u, per
// token and head:
//
//     dkk = rate grad_b - grad_a;   du = f (dkk - kk (kk . dkk)), or f dkk where |u| < 1e-12
//     dk = grad_new_k (1 + (rate - 1) k_a) + du k_k;    dk_k = du k;    dk_a = grad_new_k k (rate - 1)
//     drate = (grad_new_k k k_a + grad_b kk) rate (1 - rate);           da0 = drate
//     dv = grad_new_v (1 - share);    dv_first = grad_new_v share
//     dv_gate = grad_new_v (v_first - v) share (1 - share);             dv0 = dv_gate
//
// where drate ends before rate (1 - rate) with RATE_IS_GIVEN.
//
// With HAS_BONUS, s = sum_j r_j new_k_j r_k_j and ds the sum over the head of grad_bonus new_v, before all of these
//
//     grad_new_k += ds r r_k;    grad_new_v += s grad_bonus;    dr = ds new_k r_k;    dr_k = ds r new_k
//
// and without HAS_V_FIRST dv = s grad_bonus.
//
//   the inputs                   as layer_prepare_keys
//   grad_new_k, grad_new_v, grad_a, grad_b, grad_bonus  [rows, heads, HEAD_SIZE]  T_IO  in
//   dk, dv, dv_first, dr         the same shape  T_IO  out, or null;    drate, dv_gate  T_RATE, T_V_GATE
//   dk_k_rows, dk_a_rows, da0_rows, dv0_rows, dr_k_rows  [blocks of rows, heads, HEAD_SIZE]  fp32  out, or null
//
// Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "layer_heads.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_prepare_keys_backward(
    const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_RATE* __restrict__ rate,
    const T_IO* __restrict__ v_first, const T_V_GATE* __restrict__ v_gate, const T_K_K* __restrict__ k_k,
    const T_K_A* __restrict__ k_a, const T_A0* __restrict__ a0, const T_V0* __restrict__ v0,
    const T_IO* __restrict__ r, const T_R_K* __restrict__ r_k, const T_IO* __restrict__ grad_new_k,
    const T_IO* __restrict__ grad_new_v, const T_IO* __restrict__ grad_a, const T_IO* __restrict__ grad_b,
    const T_IO* __restrict__ grad_bonus, T_IO* __restrict__ dk, T_IO* __restrict__ dv, T_RATE* __restrict__ drate,
    T_IO* __restrict__ dv_first, T_V_GATE* __restrict__ dv_gate, float* __restrict__ dk_k_rows,
    float* __restrict__ dk_a_rows, float* __restrict__ da0_rows, float* __restrict__ dv0_rows, T_IO* __restrict__ dr,
    float* __restrict__ dr_k_rows, i64 rows, i64 heads, i64 block_rows) {
    const i64 own = own_head(), head = min(own, heads - 1), of_row = head * HEAD_SIZE;
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);

    Piece<T_K_K> scale[ITEMS];
    load_pieces(scale, k_k + of_row);
    ColumnSums dk_k, dk_a, da0, dv0, dr_k;

    for (i64 row = begin; row < end; ++row) {
        const i64 start = (row * heads + head) * HEAD_SIZE;
        Piece<T_IO> key[ITEMS], g_key[ITEMS], g_a[ITEMS], g_b[ITEMS], receptance[ITEMS], g_bonus[ITEMS];
        Piece<T_IO> value[ITEMS], value_first[ITEMS], g_value[ITEMS];
        Piece<T_RATE> rates[ITEMS];
        Piece<T_V_GATE> gate[ITEMS];
        // These are near by from the second row on: registers are for what is not.
        Piece<T_K_A> slope[ITEMS];
        Piece<T_A0> rates_start[ITEMS];
        Piece<T_V0> gate_start[ITEMS];
        Piece<T_R_K> bonus_share[ITEMS];
        load_pieces(slope, k_a + of_row);
        if constexpr (HAS_A0) load_pieces(rates_start, a0 + of_row);
        if constexpr (HAS_V0) load_pieces(gate_start, v0 + of_row);
        if constexpr (HAS_BONUS) load_pieces(bonus_share, r_k + of_row);
        load_pieces(key, k + start), load_pieces(rates, rate + start);
        load_pieces(g_key, grad_new_k + start);
        load_pieces(g_a, grad_a + start), load_pieces(g_b, grad_b + start);
        if constexpr (HAS_BONUS) load_pieces(receptance, r + start), load_pieces(g_bonus, grad_bonus + start);
        if constexpr (HAS_V_FIRST || HAS_BONUS) load_pieces(value, v + start);
        if constexpr (HAS_V_FIRST) {
            load_pieces(value_first, v_first + start);
            load_pieces(g_value, grad_new_v + start), load_pieces(gate, v_gate + start);
        }
        float u[ITEMS][VECTOR], share[ITEMS][VECTOR], du[ITEMS][VECTOR], of_first[ITEMS][VECTOR];
        float sums[4] = {};  // u . u, u . dkk, s and ds
        const auto grown = [&](int n, int i) { return key[n].at(i) * (1.0f + (share[n][i] - 1.0f) * slope[n].at(i)); };
        const auto apart = [&](int n, int i) { return value_first[n].at(i) - value[n].at(i); };
        sum_over_head(sums, [&](int n, int i) {
            u[n][i] = key[n].at(i) * scale[n].at(i);
            const float raw = HAS_A0 ? rates[n].at(i) + rates_start[n].at(i) : rates[n].at(i);
            share[n][i] = RATE_IS_GIVEN ? raw : sigmoid(raw);
            du[n][i] = share[n][i] * g_b[n].at(i) - g_a[n].at(i);  // dkk
            sums[0] += u[n][i] * u[n][i], sums[1] += u[n][i] * du[n][i];
            if constexpr (HAS_V_FIRST)
                of_first[n][i] = sigmoid(HAS_V0 ? gate[n].at(i) + gate_start[n].at(i) : gate[n].at(i));
            if constexpr (HAS_BONUS) {
                const float mixed = HAS_V_FIRST ? apart(n, i) * of_first[n][i] : 0.0f;
                sums[2] += receptance[n].at(i) * grown(n, i) * bonus_share[n].at(i);
                sums[3] += g_bonus[n].at(i) * (value[n].at(i) + mixed);
            }
        });
        const float bonus = sums[2], dbonus = sums[3], factor = reciprocal_length(sums[0]);
        const float along = sums[0] < LEAST_SQUARES ? 0.0f : factor * factor * sums[1] * factor;
        if constexpr (HAS_V_FIRST) {
            float of_value[ITEMS][VECTOR], of_gate[ITEMS][VECTOR];
            for_elements([&](int n, int i) {
                of_value[n][i] = HAS_BONUS ? g_value[n].at(i) + bonus * g_bonus[n].at(i) : g_value[n].at(i);
                of_gate[n][i] = of_value[n][i] * apart(n, i) * of_first[n][i] * (1.0f - of_first[n][i]);
                if constexpr (HAS_V0) dv0.add(n, i, of_gate[n][i]);
            });
            write_pieces(dv, start, is_there, [&](int n, int i) { return of_value[n][i] * (1.0f - of_first[n][i]); });
            write_pieces(dv_first, start, is_there, [&](int n, int i) { return of_value[n][i] * of_first[n][i]; });
            write_pieces(dv_gate, start, is_there, [&](int n, int i) { return of_gate[n][i]; });
        } else if constexpr (HAS_BONUS) {
            write_pieces(dv, start, is_there, [&](int n, int i) { return bonus * g_bonus[n].at(i); });
        }
        if constexpr (HAS_BONUS) {
            write_pieces(dr, start, is_there, [&](int n, int i) { return dbonus * grown(n, i) * bonus_share[n].at(i); });
            for_elements([&](int n, int i) { dr_k.add(n, i, dbonus * grown(n, i) * receptance[n].at(i)); });
        }
        const auto of_key = [&](int n, int i) {
            return HAS_BONUS ? g_key[n].at(i) + dbonus * receptance[n].at(i) * bonus_share[n].at(i) : g_key[n].at(i);
        };
        float of_rate[ITEMS][VECTOR];
        for_elements([&](int n, int i) {
            const float rest = share[n][i] - 1.0f, g = of_key(n, i) * key[n].at(i);
            of_rate[n][i] = g * slope[n].at(i) + g_b[n].at(i) * (u[n][i] * factor);
            if constexpr (!RATE_IS_GIVEN) of_rate[n][i] = of_rate[n][i] * share[n][i] * -rest;
            du[n][i] = factor * du[n][i] - along * u[n][i];
            dk_k.add(n, i, du[n][i] * key[n].at(i)), dk_a.add(n, i, g * rest);
            if constexpr (HAS_A0) da0.add(n, i, of_rate[n][i]);
        });
        write_pieces(drate, start, is_there, [&](int n, int i) { return of_rate[n][i]; });
        write_pieces(dk, start, is_there, [&](int n, int i) {
            return of_key(n, i) * (1.0f + (share[n][i] - 1.0f) * slope[n].at(i)) + du[n][i] * scale[n].at(i);
        });
    }
    dk_k.write_to(dk_k_rows, head, heads, is_there), dk_a.write_to(dk_a_rows, head, heads, is_there);
    if constexpr (HAS_A0) da0.write_to(da0_rows, head, heads, is_there);
    if constexpr (HAS_V0) dv0.write_to(dv0_rows, head, heads, is_there);
    if constexpr (HAS_BONUS) dr_k.write_to(dr_k_rows, head, heads, is_there);
}
