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
using T_A = T_A_LOG;  // as state_steps.cuh calls them
constexpr bool HAS_BIAS = HAS_DT_BIAS;

#include "delta_maps.cuh"
#include "diagonal_operands.cuh"
#include "update_rows.cuh"

// Whether there are decays of channels, or of heads.
constexpr bool OF_CHANNELS = G_PER_CHANNEL || HAS_GATES;
constexpr bool OF_HEADS = DELTA ? !G_PER_CHANNEL && GATE_KIND != LogDecay::none : HAS_DECAYS;
constexpr bool BIAS_OF_CHANNELS = HAS_DT_BIAS && G_PER_CHANNEL;
constexpr int ONES = HAS_NORM ? 3 : 1;  // q . k, and the squares of both
constexpr int PADDED_VALUES = ceil_div(BLOCK_VALUES, 4) * 4;

// A token as all threads read it; zeros past HEAD_SIZE, so that these keys add nothing. With a rate of each channel
// `erased` is rate k.
struct Token {
    float r[PADDED_KEYS], k[PADDED_KEYS];
    float d[OF_CHANNELS ? PADDED_KEYS : 4], erased[BETA_PER_CHANNEL ? PADDED_KEYS : 4];
    float v[PADDED_VALUES], z[HAS_GATE ? PADDED_VALUES : 4];
};

struct Smem {
    Token token[BUFFERS];
    Sums<ONES> sums;
};
static_assert(sizeof(Smem) <= 48 * 1024, "head_size needs more than 48 KB of shared memory");

// What a head has one of.
struct OfHead { float decay = 1.0f, rate = 1.0f; };

// What the tokens of a head share: rates of decay, biases, and the values' D.
struct Parameters {
    Share<T_DT_BIAS, HEAD_SIZE, PADDED_KEYS> biases;
    float bias = 0.0f, speed = 0.0f, skip[KEPT];

    __device__ void load(const T_A_LOG* a_log, const T_DT_BIAS* dt_bias, const T_D* own, i64 head, int first_value) {
        if constexpr (BIAS_OF_CHANNELS) biases.load(dt_bias + head * HEAD_SIZE);
        else if constexpr (HAS_DT_BIAS) bias = to_float(dt_bias[head]);
        if constexpr (HAS_STEPS) speed = to_float(a_log[head]);
        else if constexpr (DELTA && HAS_PARAMETERS) speed = speed_of(to_float(a_log[head]));
        if constexpr (HAS_SKIP) {
            const int first = first_value + own_values() + kept_index();
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                const i64 place = SKIP_PER_CHANNEL ? head * VALUE_SIZE + min(first + i, VALUE_SIZE - 1) : head;
                skip[i] = to_float(own[place]);
            }
        }
    }
};

// A token between its load and its place in shared memory.
struct Held {
    Share<T_IO, HEAD_SIZE, PADDED_KEYS> r, k;
    Share<T_G, HEAD_SIZE, PADDED_KEYS> gates;
    Share<T_BETA, HEAD_SIZE, PADDED_KEYS> rates;
    Share<T_IO, VALUE_SIZE, BLOCK_VALUES> v, write_gate, z;
    T_G gate;
    T_BETA rate;

    // Returns what the head has one of.
    __device__ OfHead store(Token& token, const Parameters& own, float lower_bound, Limits limits) const {
        const auto decay_of = [&](float g, float bias) {
            return expf(DELTA ? log_decay_of(g + bias, own.speed, lower_bound) : g);
        };
        r.store(token.r);
        if constexpr (HAS_GATES) gates.store(token.k, [](int, float g) { return -expm1f(g); });
        else k.store(token.k);
        if constexpr (OF_CHANNELS)
            gates.store(token.d, [&](int n, float g) {
                return decay_of(g, BIAS_OF_CHANNELS ? to_float(own.biases.held[n]) : 0.0f);
            });
        if constexpr (BETA_PER_CHANNEL)
            rates.store(token.erased, [&](int n, float x) { return rate_of(x) * to_float(k.held[n]); });
        v.store(token.v, [&](int n, float x) { return HAS_WRITE_GATE ? x * to_float(write_gate.held[n]) : x; });
        if constexpr (HAS_GATE) z.store(token.z);
        OfHead head;
        if constexpr (HAS_STEPS) {
            head.rate = StepMap(own.speed, own.bias, limits).step(to_float(rate));
            head.decay = expf(own.speed * head.rate);
        } else {
            if constexpr (OF_HEADS) head.decay = decay_of(to_float(gate), own.bias);
            if constexpr (DELTA && !BETA_PER_CHANNEL) head.rate = rate_of(to_float(rate));
        }
        return head;
    }
};

// One token: the tile moves on, and y is written by the lanes that keep its sums.
__device__ inline void update_tile(Tile& tile, const Token& token, OfHead head, const Parameters& own_parameters,
                                   Sums<ONES>& sums, T_IO* y, int first_value, float scale) {
    float r[KEYS], k[KEYS], sa[VALUES] = {}, read[VALUES] = {}, all_sa[VALUES], ones[ONES] = {};
    read_keys(r, token.r), read_keys(k, token.k);
    {
        float d[KEYS], erased[KEYS];
        if constexpr (OF_CHANNELS) read_keys(d, token.d);
        if constexpr (BETA_PER_CHANNEL) read_keys(erased, token.erased);
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            ones[0] += r[j] * k[j];
            if constexpr (HAS_NORM) ones[1] += k[j] * k[j], ones[ONES - 1] += r[j] * r[j];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                if constexpr (OF_CHANNELS || OF_HEADS) tile[i][j] *= OF_CHANNELS ? d[j] : head.decay;
                read[i] += tile[i][j] * r[j];
                if constexpr (DELTA) sa[i] += tile[i][j] * (BETA_PER_CHANNEL ? erased[j] : k[j]);
            }
        }
    }
    add_over_keys<DELTA>(read, sa, all_sa, ones, sums);

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
            if constexpr (HAS_SKIP) result += own_parameters.skip[i] * v;
            if constexpr (HAS_GATE) result *= opened<Gate::silu>(token.z[value]);
            if (first_value + value < VALUE_SIZE) y[value] = from_float<T_IO>(result);
        }
    }
    float u[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) u[i] = added(token.v[own + i], all_sa[i]);
    read_keys(k, token.k);
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) tile[i][j] += u[i] * k[j];
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
    r += start(r_strides, key_head), k += start(k_strides, key_head), w += start(w_strides, head);
    v += start(v_strides, head) + first_value, beta += start(beta_strides, head);
    write_gate += start(write_gate_strides, head) + first_value, z += start(z_strides, head) + first_value;
    Held held;
    const auto load = [&](i64 t) {
        const int width = VALUE_SIZE - first_value;
        held.r.load(r + t * r_strides.token);
        if constexpr (!HAS_GATES) held.k.load(k + t * k_strides.token);
        if constexpr (OF_CHANNELS) held.gates.load(w + t * w_strides.token);
        else if constexpr (OF_HEADS && !HAS_STEPS) held.gate = w[t * w_strides.token];
        if constexpr (BETA_PER_CHANNEL) held.rates.load(beta + t * beta_strides.token);
        else if constexpr (DELTA || HAS_STEPS) held.rate = beta[t * beta_strides.token];
        held.v.load(v + t * v_strides.token, width);
        if constexpr (HAS_WRITE_GATE) held.write_gate.load(write_gate + t * write_gate_strides.token, width);
        if constexpr (HAS_GATE) held.z.load(z + t * z_strides.token, width);
    };
    load(0);
    Parameters parameters;
    parameters.load(a_log, dt_bias, own, head, first_value);

    Tile tile;
    if (!HAS_STATE || (PACKED && place.from < 0)) clear_tile(tile);
    else read_tile(tile, initial_state + place.from * slot_stride + part.in_slot(), first_value);

    OfHead of_head;
    run_tokens(
        smem.token, place.tokens,
        [&](Token& token) { of_head = held.store(token, parameters, lower_bound, Limits{least, most}); }, load,
        [&](i64 t, const Token& token) {
            update_tile(tile, token, of_head, parameters, smem.sums, y + t * y_stride, first_value, scale);
        });
    const i64 to = place.to;
    if (final_state == nullptr || is_none(to, write_indices != nullptr, slots, null_index)) return;
    const i64 number = STOCHASTIC ? *seed : 0, draw = (to * heads + head) * TILES_OF_HEAD;
    write_tile(final_state + to * slot_stride + part.in_slot(), tile, first_value, number, draw);
}
