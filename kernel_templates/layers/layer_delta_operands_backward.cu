// Gradients of layer_delta_operands, with its names, k and q as they are after their norm, s = grad_new_k - grad_b and
// e = e^l, per token, key head and value head of it:
//
//     dk = e grad_a + rate s;   drate = sum_j k_j s_j;   dl = grad_w + e k grad_a
//     with a rate for each channel  dk = rate e grad_a + s;   drate = e k grad_a;   dl = grad_w + rate e k grad_a
//
// dk and dq = grad_r are summed over the value heads of a key head, and a norm f x takes dx to f (dx - x (x . dx)). dl
// goes through its map to dg, summed over the channels where g has one for a head, dA_log and ddt_bias.
//
//   the inputs                    as layer_delta_operands
//   grad_r, grad_new_k, grad_a, grad_b  [rows, heads GROUP, HEAD_SIZE]  T_IO  in;  grad_w the same  float  in; or null
//   dk, dq                        [rows, heads, HEAD_SIZE]  T_IO  out, or null: of each of the SHARED heads of a key head
//   dbeta, dg                     like beta and g  out, or null
//   dA_log_rows, ddt_bias_rows    [blocks of rows, heads GROUP], or with HEAD_SIZE behind  fp32  out, or null
//
// Grid (rows / block_rows, heads / BLOCK_HEADS).
#include "delta_gates.cuh"

// A sum over rows for a head, or for each of its channels.
template <bool PER_CHANNEL> struct Sums {
    ColumnSums sums;
    __device__ void add(int n, int i, float x) { sums.add(n, i, x); }
    __device__ void write_to(float* target, i64 head, i64 heads, bool is_there) const {
        sums.write_to(target, head, heads, is_there);
    }
};
template <> struct Sums<false> {
    float sum = 0.0f;
    __device__ void add(int, int, float x) { sum += x; }
    __device__ void write_to(float* target, i64 head, i64 heads, bool is_there) const {
        if (target == nullptr) return;
        const float all = sum_of_head(sum);
        if (is_there && threadIdx.x % LANES == 0) target[i64(blockIdx.x) * heads + head] = all;
    }
};

// The gradient of what a head has, or each of its channels.
template <bool PER_CHANNEL, typename T, typename F>
__device__ inline void write_gradient(T* target, i64 head, bool is_there, F f) {
    if constexpr (PER_CHANNEL) {
        write_pieces(target, head * HEAD_SIZE, is_there, f);
    } else {
        float sums[1] = {};
        sum_over_head(sums, [&](int n, int i) { sums[0] += f(n, i); });
        if (target != nullptr && is_there && threadIdx.x % LANES == 0) target[head] = from_float<T>(sums[0]);
    }
}

// dx to `target`, with the norm behind which x was taken.
__device__ inline void write_normed(T_IO* target, i64 start, bool is_there, const Piece<T_IO> (&x)[ITEMS], float factor,
                                    const float (&dx)[ITEMS][VECTOR]) {
    float along[1] = {};
    if constexpr (HAS_NORM)
        sum_over_head(along, [&](int n, int i) { along[0] += x[n].at(i) * factor * dx[n][i]; });
    write_pieces(target, start, is_there, [&](int n, int i) {
        return HAS_NORM ? factor * (dx[n][i] - x[n].at(i) * factor * along[0]) : dx[n][i];
    });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_delta_operands_backward(
    const T_IO* __restrict__ k, const T_IO* __restrict__ q, const T_BETA* __restrict__ beta,
    const T_G* __restrict__ g, const T_A_LOG* __restrict__ A_log, const T_DT_BIAS* __restrict__ dt_bias,
    const T_IO* __restrict__ grad_r, const float* __restrict__ grad_w, const T_IO* __restrict__ grad_new_k,
    const T_IO* __restrict__ grad_a, const T_IO* __restrict__ grad_b, T_IO* __restrict__ dk, T_IO* __restrict__ dq,
    T_BETA* __restrict__ dbeta, T_G* __restrict__ dg, float* __restrict__ dA_log_rows,
    float* __restrict__ ddt_bias_rows, i64 rows, i64 heads, i64 block_rows, float lower_bound) {
    const i64 own = own_head(), head = min(own, heads - 1);
    const bool is_there = own < heads;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    Sums<false> of_speed[GROUP];
    Sums<G_PER_CHANNEL> of_bias[GROUP];

#pragma unroll 1
    for (i64 row = begin; row < end; ++row) {
        const i64 place = row * heads + head;
        Piece<T_IO> key[ITEMS], query[ITEMS];
        load_pieces(key, k + place / SHARED * HEAD_SIZE);
        if constexpr (HAS_Q) load_pieces(query, q + place / SHARED * HEAD_SIZE);
        const float factor = HAS_NORM ? factor_of(key) : 1.0f, factor_q = HAS_NORM && HAS_Q ? factor_of(query) : 1.0f;
        float of_key[ITEMS][VECTOR] = {}, of_query[ITEMS][VECTOR] = {};
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const i64 own_place = place * GROUP + j, start = own_place * HEAD_SIZE;
            Piece<T_IO> g_key[ITEMS], g_a[ITEMS], g_b[ITEMS], g_query[ITEMS];
            Piece<float> g_w[ITEMS];
            Rates rates;
            Logits logits;
            load_pieces(g_key, grad_new_k + start), load_pieces(g_a, grad_a + start);
            load_pieces(g_b, grad_b + start);
            if constexpr (HAS_Q) load_pieces(g_query, grad_r + start);
            if constexpr (HAS_W) load_pieces(g_w, grad_w + start);
            rates.load(beta, own_place), logits.load(g, own_place);
            const LogDecays decays(logits, A_log, dt_bias, head * GROUP + j, lower_bound);
            float d_rate[ITEMS][VECTOR], d_decay[ITEMS][VECTOR];
            for_elements([&](int n, int i) {
                const float x = key[n].at(i) * factor, rate = rates.at(n, i), shrunk = decays.factor(n, i);
                const float s = g_key[n].at(i) - g_b[n].at(i), of_a = shrunk * g_a[n].at(i);
                if constexpr (HAS_Q) of_query[n][i] += g_query[n].at(i);
                of_key[n][i] += BETA_PER_CHANNEL ? rate * of_a + s : of_a + rate * s;
                d_rate[n][i] = x * (BETA_PER_CHANNEL ? of_a : s) * rates.slope(n, i);
                d_decay[n][i] = x * of_a * (BETA_PER_CHANNEL ? rate : 1.0f);
                if constexpr (HAS_W) d_decay[n][i] += g_w[n].at(i);
                // A token that leaves nothing has no gradient of its log-decay, however steep the gate is.
                if constexpr (GATE_KIND == LogDecay::softplus)
                    if (shrunk == 0.0f) d_decay[n][i] = 0.0f;
            });
            write_gradient<BETA_PER_CHANNEL>(dbeta, own_place, is_there, [&](int n, int i) { return d_rate[n][i]; });
            if constexpr (GATE_KIND != LogDecay::none)
                write_gradient<G_PER_CHANNEL>(dg, own_place, is_there, [&](int n, int i) {
                    return d_decay[n][i] * decays.slope(n, i);
                });
            if constexpr (HAS_PARAMETERS)
                for_pieces(true, [&](int n, int) {
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        of_speed[j].add(n, i, d_decay[n][i] * decays.slope_of_speed(n, i));
                        if constexpr (HAS_DT_BIAS) of_bias[j].add(n, i, d_decay[n][i] * decays.slope(n, i));
                    }
                });
        }
        write_normed(dk, place * HEAD_SIZE, is_there, key, factor, of_key);
        if constexpr (HAS_Q) write_normed(dq, place * HEAD_SIZE, is_there, query, factor_q, of_query);
    }
    if constexpr (HAS_PARAMETERS)
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            of_speed[j].write_to(dA_log_rows, head * GROUP + j, heads * GROUP, is_there);
            if constexpr (HAS_DT_BIAS) of_bias[j].write_to(ddt_bias_rows, head * GROUP + j, heads * GROUP, is_there);
        }
}
