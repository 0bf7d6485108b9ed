// What the output matrix of time mixing reads. Per token and head:
//
//     out = ((y - mean) / sqrt(variance + eps) weight + bias + (sum_j r_j k_j r_k_j) v) opened(g)
//
//   y, g          [rows, heads, HEAD_SIZE]  T_IO  in
//   r, k, v       the same shape  T_IO  in with HAS_BONUS, else null
//   r_k           [heads, HEAD_SIZE]  T_R_K  in with HAS_BONUS, else null
//   weight, bias  [heads, HEAD_SIZE]  T_WEIGHT, T_BIAS  in; bias is null without HAS_BIAS
//   out           [rows, heads, HEAD_SIZE]  T_IO  out
//
// Without CENTERED the mean is 0, and the variance that of squares. Grid (rows * heads / BLOCK_HEADS); LANES lanes have
// a head.
#include "layer_heads.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_gated_norm(
    const T_IO* __restrict__ y, const T_IO* __restrict__ g, const T_WEIGHT* __restrict__ weight,
    const T_BIAS* __restrict__ bias, const T_IO* __restrict__ r, const T_IO* __restrict__ k,
    const T_IO* __restrict__ v, const T_R_K* __restrict__ r_k, T_IO* __restrict__ out, i64 rows, i64 heads,
    float eps) {
    const i64 head = own_head(), start = head * HEAD_SIZE, of_row = head % heads * HEAD_SIZE;
    const bool is_there = head < rows * heads;
    let_next_launch_begin();
    for_pieces(is_there, [&](int, int channel) {
        prefetch(weight + of_row + channel);
        if constexpr (HAS_BONUS) prefetch(r_k + of_row + channel);
        if constexpr (HAS_BIAS) prefetch(bias + of_row + channel);
    });
    y = after_previous_launch(y);
    r = written_meanwhile(r), k = written_meanwhile(k), v = written_meanwhile(v), g = written_meanwhile(g);
    r_k = written_meanwhile(r_k), weight = written_meanwhile(weight), bias = written_meanwhile(bias);

    float x[ITEMS][VECTOR], sum = 0.0f, squares = 0.0f, bonus = 0.0f;
    {
        Piece<T_IO> held[ITEMS], receptance[ITEMS], key[ITEMS];
        Piece<T_R_K> share[ITEMS];
        for_pieces(is_there, [&](int n, int channel) {
            held[n].load(y + start + channel);
            if constexpr (HAS_BONUS) {
                receptance[n].load(r + start + channel);
                key[n].load(k + start + channel), share[n].load(r_k + of_row + channel);
            }
        });
        for_pieces(is_there, [&](int n, int) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                x[n][i] = held[n].at(i), sum += x[n][i];
                if constexpr (HAS_BONUS) bonus += receptance[n].at(i) * key[n].at(i) * share[n].at(i);
            }
        });
    }
    Piece<T_IO> value[ITEMS], gate[ITEMS];
    for_pieces(is_there, [&](int n, int channel) {
        if constexpr (HAS_BONUS) value[n].load(v + start + channel);
        gate[n].load(g + start + channel);
    });
    const float mean = CENTERED ? sum_of_head(sum) * (1.0f / HEAD_SIZE) : 0.0f;
    if constexpr (HAS_BONUS) bonus = sum_of_head(bonus);
    for_pieces(is_there, [&](int n, int) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[n][i] -= mean, squares += x[n][i] * x[n][i];
    });
    const float factor = reciprocal_root(sum_of_head(squares) * (1.0f / HEAD_SIZE) + eps);
    for_pieces(is_there, [&](int n, int channel) {
        Piece<T_WEIGHT> slope;
        Piece<T_BIAS> offset;
        slope.load(weight + of_row + channel);
        if constexpr (HAS_BIAS) offset.load(bias + of_row + channel);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            float z = x[n][i] * factor * slope.at(i);
            if constexpr (HAS_BIAS) z += offset.at(i);
            if constexpr (HAS_BONUS) z += bonus * value[n].at(i);
            x[n][i] = z * opened<Gate(GATE)>(gate[n].at(i));
        }
        write(out + start + channel, x[n]);
    });
}
