// One or a few tokens of many sequences, from the states in one memory to those in another, for ops whose decays and
// values are computed of other inputs. Per head, S [V, K], with d and u as below:
//
//     S' = S diag(d);   S'' = S' + u k^T;   y = (scale S'' q + D v) silu(z)
//
//     with DELTA   x <- x / sqrt(|x|^2 + 1e-6) for q and k, if HAS_NORM;   d = e^l;   u = rate (v - S' k)
//                  l = 0, g, -exp(A_log) softplus(g + dt_bias) or lower_bound sigmoid(exp(A_log) (g + dt_bias))
//                  rate = beta, sigmoid(beta) or 2 sigmoid(beta);   one of each channel  u = write_gate v - S' (rate k)
//     else, by SOURCE
//       heads      d = e^g;   u = v
//       steps      step = limits(softplus(dt + dt_bias));   d = e^(A step);   u = step v
//       gates      d = e^g;   u = v;   k = 1 - e^g
//
// Norms need no pass of their own: all is linear in q and k, so their squares are summed beside the products.
//
//   r, k          [batch, tokens, heads / group, K]  T_IO  in, r is q;  k is null with gates
//   v, z, y       [batch, tokens, heads, V]  T_IO  in, in or null, out; y without gaps;  write_gate as z
//   w             [batch, tokens, heads] or, with G_PER_CHANNEL or gates, [.., K]  T_G  in or null: g; without tokens
//                 its stride is 0
//   beta          the same, of each channel with BETA_PER_CHANNEL  T_BETA  in or null: beta or dt
//   a_log         [heads]  T_A_LOG  in or null: A_log or A
//   dt_bias, own  [heads], or [heads, K] with G_PER_CHANNEL, [heads, V] with SKIP_PER_CHANNEL  T_DT_BIAS, T_D  in or
//                 null; own is D
//   initial_state, final_state, state_indices, write_indices, seed  as in update_states.cu, and so are HAS_STATE and
//                 rows without a slot, and with PACKED pieces in the place of rows
//
// Inputs are read by their strides, and nothing is rounded before it is written. Any decay, gate and step is safe. Grid,
// shared memory and registers are as there.
#include "rule_token.cuh"
#include "update_rows.cuh"

constexpr int ONES = HAS_NORM ? 3 : 1;  // q . k, and the squares of both

struct Smem {
    Token token[BUFFERS];
    Sums<ONES> sums;
};
static_assert(sizeof(Smem) <= 48 * 1024, "head_size needs more than 48 KB of shared memory");

// One token: y is written by the lanes that keep its sums. Returns what a number x of the tile becomes
// by (i, j, x); a wide one has become it.
__device__ inline auto update_tile(RowTile& tile, const Token& token, OfHead head, const float (&skip)[KEPT],
                                   Sums<ONES>& sums, T_IO* y, int first_value, float scale) {
    constexpr bool HAS_DECAY = OF_CHANNELS || OF_HEADS, DECAYS_KEYS = HAS_DECAY && !RowTile::IS_WIDE;
    float sa[VALUES] = {}, read[VALUES] = {}, all_sa[VALUES], ones[ONES] = {};
    // A tile of 16 bits leaves few registers for the rest: what is read later, or is of other keys, shall be in none.
    constexpr int COUNT = RowTile::IS_WIDE ? KEYS : TOGETHER;
#pragma unroll
    for (int first = 0; first < KEYS; first += COUNT) {
        float r[COUNT], k[COUNT], d[COUNT], erased[COUNT];
        read_keys_from(first, r, token.r), read_keys_from(first, k, token.k);
        if constexpr (OF_CHANNELS) read_keys_from(first, d, token.d);
        if constexpr (BETA_PER_CHANNEL) read_keys_from(first, erased, token.erased);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            ones[0] += r[n] * k[n];
            if constexpr (HAS_NORM) ones[1] += k[n] * k[n], ones[ONES - 1] += r[n] * r[n];
            const float decay = OF_CHANNELS ? d[n] : head.decay;
            float q = r[n], a = BETA_PER_CHANNEL ? erased[n] : k[n];
            if constexpr (DECAYS_KEYS) q *= decay, a *= decay;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const int j = first + n;
                if constexpr (HAS_DECAY && !DECAYS_KEYS) tile.set(i, j, tile.at(i, j) * decay);
                read[i] += tile.at(i, j) * q;
                if constexpr (DELTA) sa[i] += tile.at(i, j) * a;
            }
        }
    }
    add_over_keys<DELTA>(read, sa, all_sa, ones, sums);
    if constexpr (!RowTile::IS_WIDE) __syncwarp();

    const float of_k = HAS_NORM ? reciprocal_root(ones[ONES > 1 ? 1 : 0] + NORM_EPS) : 1.0f;
    const float of_q = HAS_NORM ? reciprocal_root(ones[ONES - 1] + NORM_EPS) : 1.0f;
    const auto added = [&](float v, float erased) { return head.rate * of_k * (DELTA ? v - of_k * erased : v); };
    const int own = own_values(), kept = kept_index();
    if (keeps_sums() && key_warp() == 0) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int value = own + kept + i;
            const float v = token.v[value];
            float result = scale * of_q * (read[i] + added(v, sa[i]) * ones[0]);
            if constexpr (HAS_SKIP) result += skip[i] * v;
            if constexpr (HAS_GATE) result *= opened<Gate::silu>(token.z[value]);
            if (first_value + value < VALUE_SIZE) y[value] = from_float<T_IO>(result);
        }
    }
    float u[VALUES], k[KEYS], d[KEYS];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) u[i] = added(token.v[own + i], all_sa[i]);
    read_keys(k, token.k);
    if constexpr (DECAYS_KEYS && OF_CHANNELS) read_keys(d, token.d);
    const auto change = [=](int i, int j, float s) {
        if constexpr (DECAYS_KEYS) s *= OF_CHANNELS ? d[j] : head.decay;
        return fmaf(u[i], k[j], s);
    };
    if constexpr (RowTile::IS_WIDE) change_tile(tile, change);
    return change;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) update_rules(
    const T_IO* __restrict__ r, const T_G* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_BETA* __restrict__ beta, const T_A_LOG* __restrict__ a_log, const T_DT_BIAS* __restrict__ dt_bias,
    const T_IO* __restrict__ write_gate, const T_D* __restrict__ own, const T_IO* __restrict__ z,
    const T_STATE* initial_state, T_STATE* final_state, const Index* __restrict__ state_indices,
    const Index* __restrict__ write_indices, const i64* __restrict__ seed, T_IO* __restrict__ y, Strides r_strides,
    Strides w_strides, Strides k_strides, Strides v_strides, Strides beta_strides, Strides write_gate_strides,
    Strides z_strides, i64 slot_stride, i64 slots, i64 null_index, i64 batch, i64 tokens, i64 heads, int group,
    float scale, float lower_bound, float least, float most, const i64* __restrict__ bounds,
    const arranged::Piece* __restrict__ pieces) {
    __shared__ alignas(16) Smem smem;
    const Part part;
    const i64 row = part.row, head = part.head;
    if (row >= batch) return;
    const int first_value = part.first_value;
    let_next_launch_begin();
    if constexpr (HAS_STATE) bring_near(part, initial_state, state_indices, slot_stride, slots);
    initial_state = after_previous_launch(initial_state);
    r = written_meanwhile(r), w = written_meanwhile(w), k = written_meanwhile(k), v = written_meanwhile(v);
    beta = written_meanwhile(beta), a_log = written_meanwhile(a_log), dt_bias = written_meanwhile(dt_bias);
    write_gate = written_meanwhile(write_gate), own = written_meanwhile(own), z = written_meanwhile(z);
    state_indices = written_meanwhile(state_indices), write_indices = written_meanwhile(write_indices);
    seed = written_meanwhile(seed);
    const i64 y_stride = heads * VALUE_SIZE;
    y += head * VALUE_SIZE + first_value;
    if constexpr (PACKED) bounds = written_meanwhile(bounds), pieces = written_meanwhile(pieces);
    const Row place =
        row_of(part, state_indices, write_indices, slots, null_index, batch, tokens, bounds, pieces, y, y_stride);
    if (!place.is_there) return;
    y += place.begin * y_stride;

    const int key_head = static_cast<int>(head) / group;
    const auto start = [&](const Strides& s, i64 of) {
        return (PACKED ? place.begin * s.token : row * s.batch) + of * s.head;
    };
    const Inputs inputs{
        r + start(r_strides, key_head), k + start(k_strides, key_head), v + start(v_strides, head) + first_value,
        write_gate + start(write_gate_strides, head) + first_value, z + start(z_strides, head) + first_value,
        w + start(w_strides, head), beta + start(beta_strides, head), r_strides.token, k_strides.token,
        v_strides.token, write_gate_strides.token, z_strides.token, w_strides.token, beta_strides.token};
    Held held;
    const auto load = [&](i64 t) { inputs.load(held, t, VALUE_SIZE - first_value); };
    load(0);
    Parameters parameters;
    parameters.load(a_log, dt_bias, head);
    float skip[KEPT];
    if constexpr (HAS_SKIP) {
        const int first = first_value + own_values() + kept_index();
#pragma unroll
        for (int i = 0; i < KEPT; ++i) skip[i] = skip_of(own, head, first + i);
    }

    const i64 to = place.to;
    RowTile tile;
    if (!HAS_STATE || (PACKED && place.from < 0)) clear_tile(tile);
    else read_tile(tile, initial_state + place.from * slot_stride + part.in_slot(), first_value);

    OfHead of_head;
    const FinalStates last{final_state, seed, slot_stride, slots, null_index, heads, write_indices != nullptr};
    run_tokens(
        smem.token, place.tokens,
        [&](Token& token) { of_head = held.store(token, parameters, lower_bound, Limits{least, most}); }, load,
        [&](i64 t, const Token& token) {
            const auto change =
                update_tile(tile, token, of_head, skip, smem.sums, y + t * y_stride, first_value, scale);
            if constexpr (!RowTile::IS_WIDE) last.write(tile, part, to, change);
        });
    if constexpr (RowTile::IS_WIDE) last.write(tile, part, to);
}
