// One or a few tokens of many sequences, as in replay_states.cu, for ops whose decays and values are computed of other
// inputs, as in update_rules.cu. Per head, with S0 [V, K] as it was written last and entries i since:
//
//     S_t x = S0 (D_0 x) + sum_{i <= t} (k_i . (D_i x)) u_i
//
// with k as it comes, so that it is exact in 16 bits: u has the factor of its norm, as it has the rate. With DELTA
// S' = S_{t-1} diag(d_t) is read with k_t for u_t, else u_t is a multiple of v_t. y is read with q_t.
//
//   r, k, v, z, y, w, beta, write_gate, a_log, dt_bias, own   as in update_rules.cu, with `tokens` of TOKENS
//   state, state_indices, seed, entry_d, entry_k, entry_v, cursors, arrivals   as in replay_states.cu: u is entry_v
//
// What entries have:   kda, gated_delta_rule2          d [slots, heads, ENTRIES, K], k T_IO, u float
//                      gated_delta_rule, ssd           d [slots, heads, ENTRIES],    k T_IO, u float
//                      delta_rule; simple_gla          no d; d of a head,            k T_IO, u float; T_IO
//                      hgrn2, with KEYS_SAY_DECAYS     no d, as k = 1 - d,           k float, u T_IO
//
// k is [slots, heads / group, ENTRIES, K]: heads that share a key share it here, too. Any decay, gate and step is safe.
#include "rule_token.cuh"

constexpr bool BONUS = false, PAIRS = false, IS_RULE = true;

// Beside the token what its head has one of, of_k and of_q being one over norms; where decays are of heads, d[0] is one.
struct StepToken : Token {
    float rate, of_k, of_q, unused;
    static constexpr const float *b = nullptr, *u = nullptr;  // there are none
};
__device__ inline const float* erased_of(const Token& token) { return BETA_PER_CHANNEL ? token.erased : token.k; }
#include "replay.cuh"

struct Tokens {
    Inputs inputs;
    const T_A_LOG* a_log;
    const T_DT_BIAS* dt_bias;
    const T_D* own;
    i64 head;
    int first_value;
    float scale, lower_bound;
    Limits limits;
    Held held[AT_ONCE];

    __device__ void load(int first) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
            if (first + n < TOKENS) inputs.load(held[n], first + n, VALUE_SIZE - first_value);
    }
    __device__ void begin() { load(0); }
    __device__ void store(StepToken (&token)[STEPS]) {
        Parameters parameters;
        parameters.load(a_log, dt_bias, head);
#pragma unroll 1
        for (int first = 0; first < TOKENS; first += AT_ONCE) {
            if (first > 0) load(first);
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                if (first + n >= TOKENS) break;
                StepToken& to = token[first + n];
                const OfHead of_head = held[n].store(to, parameters, lower_bound, limits);
                if (threadIdx.x > 0) continue;
                to.rate = of_head.rate;
                if constexpr (OF_HEADS) to.d[0] = of_head.decay;
            }
        }
    }
    // A warp has the norms of a token.
    __device__ void look(StepToken (&token)[STEPS]) const {
#pragma unroll 1
        for (int t = threadIdx.x / 32; HAS_NORM && t < TOKENS; t += WARPS) {
            float squares[2] = {};
            for (int key = lane(); key < HEAD_SIZE; key += 32) {
                squares[0] += token[t].k[key] * token[t].k[key];
                squares[1] += token[t].r[key] * token[t].r[key];
            }
            add_over_lanes<1, 2, 32>(squares);
            const float factor = reciprocal_root(squares[0] + NORM_EPS);
            if (lane() == 0) token[t].of_k = factor;
            if (lane() == 1) token[t].of_q = factor;
        }
    }
    __device__ float added(const StepToken& token, float v, float erased) const {
        const float of_k = HAS_NORM ? token.of_k : 1.0f;
        return token.rate * of_k * (DELTA ? v - of_k * erased : v);
    }
    __device__ float result(const StepToken& token, int value, float v, float found) const {
        float result = scale * (HAS_NORM ? token.of_q : 1.0f) * found;
        if constexpr (HAS_SKIP) result += skip_of(own, head, first_value + value) * v;
        return HAS_GATE ? result * opened<Gate::silu>(token.z[HAS_GATE ? value : 0]) : result;
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) replay_rules(
    const T_IO* __restrict__ r, const T_G* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_BETA* __restrict__ beta, const T_A_LOG* __restrict__ a_log, const T_DT_BIAS* __restrict__ dt_bias,
    const T_IO* __restrict__ write_gate, const T_D* __restrict__ own, const T_IO* __restrict__ z, T_STATE* state,
    const Index* __restrict__ state_indices, const i64* __restrict__ seed, T_IO* __restrict__ y, float* entry_d,
    T_KEY* entry_k, T_VALUE* entry_v, int* cursors, unsigned* arrivals, Strides r_strides, Strides w_strides,
    Strides k_strides, Strides v_strides, Strides beta_strides, Strides write_gate_strides, Strides z_strides,
    i64 slot_stride, i64 slots, i64 null_index, i64 batch, i64 heads, int group, int kept, float scale,
    float lower_bound, float least, float most) {
    const Place place(group);
    let_next_launch_begin();
    state = after_previous_launch(state);
    r = written_meanwhile(r), w = written_meanwhile(w), k = written_meanwhile(k), v = written_meanwhile(v);
    beta = written_meanwhile(beta), a_log = written_meanwhile(a_log), dt_bias = written_meanwhile(dt_bias);
    write_gate = written_meanwhile(write_gate), own = written_meanwhile(own), z = written_meanwhile(z);
    state_indices = written_meanwhile(state_indices), seed = written_meanwhile(seed);
    cursors = written_meanwhile(cursors);
    const auto start = [&](const Strides& s, i64 of) { return place.row * s.batch + of * s.head; };
    const i64 head = place.head, first_value = place.first_value;
    Tokens tokens{
        {r + start(r_strides, place.key_head), k + start(k_strides, place.key_head),
         v + start(v_strides, head) + first_value, write_gate + start(write_gate_strides, head) + first_value,
         z + start(z_strides, head) + first_value, w + start(w_strides, head), beta + start(beta_strides, head),
         r_strides.token, k_strides.token, v_strides.token, write_gate_strides.token, z_strides.token,
         w_strides.token, beta_strides.token},
        a_log, dt_bias, own, head, place.first_value, scale, lower_bound, Limits{least, most}};
    replay(place, tokens, Ring{entry_d, nullptr, entry_k, entry_v, nullptr, cursors, arrivals}, state, state_indices,
           nullptr, seed, y, slot_stride, slots, null_index, batch, heads, kept);
}
