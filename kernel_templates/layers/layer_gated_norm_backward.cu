// Gradients of layer_gated_norm. With n = (y - mean) factor, factor = 1 / sqrt(variance + eps), s the sum over the
// head of r k r_k, and z = n weight + bias + s v, per token and head:
//
//     dg = grad_out z opened'(g);   dz = grad_out opened(g);   dbias = dz;   dweight = dz n;   dn = dz weight
//     dy = factor (dn - mean(dn) - n mean(dn n));              dv = dz s;    ds = sum over the head of dz v
//     dr = ds k r_k;   dk = ds r r_k;   dr_k = ds r k
//
// where mean(dn) is 0 without CENTERED. With TAKES_BONUS, z = n weight + bias + bonus, and dbonus = dz.
//
//   the inputs             as layer_gated_norm
//   grad_out               [rows, heads, HEAD_SIZE]  T_IO  in
//   dy, dg, dr, dk, dv, dbonus  the same shape  T_IO  out, or null
//   dweight_rows, dbias_rows, dr_k_rows  [blocks of rows, heads, HEAD_SIZE]  fp32  out, or null
//
// Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "layer_heads.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_gated_norm_backward(
    const T_IO* __restrict__ y, const T_IO* __restrict__ g, const T_WEIGHT* __restrict__ weight,
    const T_BIAS* __restrict__ bias, const T_IO* __restrict__ r, const T_IO* __restrict__ k,
    const T_IO* __restrict__ v, const T_R_K* __restrict__ r_k, const T_IO* __restrict__ bonus,
    const T_IO* __restrict__ grad_out,
    T_IO* __restrict__ dy, T_IO* __restrict__ dg, float* __restrict__ dweight_rows, float* __restrict__ dbias_rows,
    T_IO* __restrict__ dr, T_IO* __restrict__ dk, T_IO* __restrict__ dv, float* __restrict__ dr_k_rows,
    T_IO* __restrict__ dbonus, i64 rows, i64 heads, i64 block_rows, float eps) {
    const i64 own = own_head(), head = min(own, heads - 1), of_row = head * HEAD_SIZE;
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    constexpr float SHARE = 1.0f / HEAD_SIZE;
    constexpr Gate OWN_GATE = Gate(GATE);

    Piece<T_WEIGHT> slope[ITEMS];
    Piece<T_BIAS> offset[ITEMS];
    Piece<T_R_K> bonus_share[ITEMS];
    load_pieces(slope, weight + of_row);
    if constexpr (HAS_BIAS) load_pieces(offset, bias + of_row);
    if constexpr (HAS_BONUS) load_pieces(bonus_share, r_k + of_row);
    ColumnSums dweight, dbias, dr_k;

    for (i64 row = begin; row < end; ++row) {
        const i64 start = (row * heads + head) * HEAD_SIZE;
        Piece<T_IO> input[ITEMS], gate[ITEMS], g_out[ITEMS], receptance[ITEMS], key[ITEMS], value[ITEMS];
        load_pieces(input, y + start), load_pieces(gate, g + start);
        load_pieces(g_out, grad_out + start);
        if constexpr (HAS_BONUS) {
            load_pieces(receptance, r + start), load_pieces(key, k + start);
            load_pieces(value, v + start);
        }
        if constexpr (TAKES_BONUS) load_pieces(value, bonus + start);

        float dz[ITEMS][VECTOR], sums[4] = {};  // of y, dn, r k r_k and dz v
        sum_over_head(sums, [&](int n, int i) {
            dz[n][i] = g_out[n].at(i) * opened<OWN_GATE>(gate[n].at(i));
            if constexpr (CENTERED) sums[0] += input[n].at(i), sums[1] += dz[n][i] * slope[n].at(i);
            if constexpr (HAS_BONUS) {
                sums[2] += receptance[n].at(i) * key[n].at(i) * bonus_share[n].at(i);
                sums[3] += dz[n][i] * value[n].at(i);
            }
        });
        const float mean = SHARE * sums[0], mean_dn = SHARE * sums[1], share = sums[2], of_share = sums[3];
        float centred[ITEMS][VECTOR], squares[2] = {};  // of y, and dn y
        sum_over_head(squares, [&](int n, int i) {
            const float x = centred[n][i] = input[n].at(i) - mean;
            squares[0] += x * x, squares[1] += dz[n][i] * slope[n].at(i) * x;
        });
        const float factor = reciprocal_root(SHARE * squares[0] + eps), along = SHARE * squares[1] * factor;
        const auto normed = [&](int n, int i) { return centred[n][i] * factor; };
        write_pieces(dy, start, is_there, [&](int n, int i) {
            return factor * (dz[n][i] * slope[n].at(i) - mean_dn - normed(n, i) * along);
        });
        write_pieces(dg, start, is_there, [&](int n, int i) {
            float z = normed(n, i) * slope[n].at(i);
            if constexpr (HAS_BIAS) z += offset[n].at(i);
            if constexpr (HAS_BONUS) z += share * value[n].at(i);
            if constexpr (TAKES_BONUS) z += value[n].at(i);
            return g_out[n].at(i) * z * opened_slope<OWN_GATE>(gate[n].at(i));
        });
        if constexpr (HAS_BONUS) {
            write_pieces(dr, start, is_there, [&](int n, int i) {
                return of_share * key[n].at(i) * bonus_share[n].at(i);
            });
            write_pieces(dk, start, is_there, [&](int n, int i) {
                return of_share * receptance[n].at(i) * bonus_share[n].at(i);
            });
            write_pieces(dv, start, is_there, [&](int n, int i) { return dz[n][i] * share; });
        }
        if constexpr (TAKES_BONUS) write_pieces(dbonus, start, is_there, [&](int n, int i) { return dz[n][i]; });
        for_elements([&](int n, int i) {
            dweight.add(n, i, dz[n][i] * normed(n, i));
            if constexpr (HAS_BIAS) dbias.add(n, i, dz[n][i]);
            if constexpr (HAS_BONUS) dr_k.add(n, i, of_share * receptance[n].at(i) * key[n].at(i));
        });
    }
    dweight.write_to(dweight_rows, head, heads, is_there);
    if constexpr (HAS_BIAS) dbias.write_to(dbias_rows, head, heads, is_there);
    if constexpr (HAS_BONUS) dr_k.write_to(dr_k_rows, head, heads, is_there);
}
