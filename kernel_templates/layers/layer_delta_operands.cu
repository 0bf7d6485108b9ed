// What the recurrence of RWKV-7 takes for the delta rules that share a key between reading, erasing and writing (KDA,
// gated delta rule, DeltaNet, gated delta rule 2). Per token and key head, and for each of its GROUP value heads,
//
//     x <- x / sqrt(|x|^2 + 1e-6) for q and k, if HAS_NORM;   rate = beta, sigmoid(beta) or 2 sigmoid(beta)
//     l = 0, g, -exp(A_log) softplus(g + dt_bias) or lower_bound sigmoid(exp(A_log) (g + dt_bias))
//     r = q;  w = l;  a = k e^l;  new_k = rate k;  b = -rate k
//
// and with a rate for each channel a = rate k e^l, new_k = k, b = -k.
//
// A key head may stand in memory for SHARED heads that are side by side, where it has more value heads than a thread has
// registers for.
//
//   k, q             [rows, heads / SHARED, HEAD_SIZE]  T_IO  in; q or null
//   beta, g          [rows, heads GROUP], or with HEAD_SIZE behind  T_BETA, T_G  in; g or null
//   A_log            [heads GROUP]  T_A_LOG  in;  dt_bias the same or [heads GROUP, HEAD_SIZE]  T_DT_BIAS  in; or null
//   r, new_k, a, b   [rows, heads GROUP, HEAD_SIZE]  T_IO  out;  w the same  float  out; r and w or null
//
// Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "delta_gates.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_delta_operands(
    const T_IO* __restrict__ k, const T_IO* __restrict__ q, const T_BETA* __restrict__ beta,
    const T_G* __restrict__ g, const T_A_LOG* __restrict__ A_log, const T_DT_BIAS* __restrict__ dt_bias,
    T_IO* __restrict__ r, float* __restrict__ w, T_IO* __restrict__ new_k, T_IO* __restrict__ a, T_IO* __restrict__ b,
    i64 rows, i64 heads, i64 block_rows, float lower_bound) {
    const i64 own = own_head(), head = min(own, heads - 1);
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    let_next_launch_begin();
    k = after_previous_launch(k);
    q = written_meanwhile(q), beta = written_meanwhile(beta), g = written_meanwhile(g);
    A_log = written_meanwhile(A_log), dt_bias = written_meanwhile(dt_bias);

#pragma unroll 1
    for (i64 row = begin; row < end; ++row) {
        const i64 place = row * heads + head;
        Piece<T_IO> key[ITEMS], query[ITEMS];
        load_pieces(key, k + place / SHARED * HEAD_SIZE);
        if constexpr (HAS_Q) load_pieces(query, q + place / SHARED * HEAD_SIZE);
        Rates rates[GROUP];
        Logits logits[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) rates[j].load(beta, place * GROUP + j), logits[j].load(g, place * GROUP + j);
        const float factor = HAS_NORM ? factor_of(key) : 1.0f, factor_q = HAS_NORM && HAS_Q ? factor_of(query) : 1.0f;
        // One key for all that is made of it, so that what is erased stays along what is written: that of the same call
        // with keys whose norm was taken before.
        const auto normed = [&](int n, int i) { return HAS_NORM ? rounded<T_IO>(key[n].at(i) * factor) : key[n].at(i); };
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const i64 value_head = head * GROUP + j, start = (place * GROUP + j) * HEAD_SIZE;
            const LogDecays decays(logits[j], A_log, dt_bias, value_head, lower_bound);
            if constexpr (HAS_Q)
                write_pieces(r, start, is_there, [&](int n, int i) { return query[n].at(i) * factor_q; });
            if constexpr (HAS_W) write_pieces(w, start, is_there, [&](int n, int i) { return decays.at(n, i); });
            write_pieces(new_k, start, is_there, [&](int n, int i) {
                return normed(n, i) * (BETA_PER_CHANNEL ? 1.0f : rates[j].at(n, i));
            });
            write_pieces(a, start, is_there, [&](int n, int i) {
                const float x = normed(n, i) * decays.factor(n, i);
                return BETA_PER_CHANNEL ? x * rates[j].at(n, i) : x;
            });
            write_pieces(b, start, is_there, [&](int n, int i) {
                return -(normed(n, i) * (BETA_PER_CHANNEL ? 1.0f : rates[j].at(n, i)));
            });
        }
    }
}
