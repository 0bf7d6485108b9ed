// A token of the ops whose decays and values are computed of other inputs, as update_rules.cu says what these are: in
// registers, and in shared memory.
//
// Needs DELTA, GATE, G_PER_CHANNEL, BETA_MAP, BETA_PER_CHANNEL, HAS_NORM, HAS_WRITE_GATE, HAS_DT_BIAS, SOURCE,
// HAS_SOFTPLUS, HAS_LIMITS, HAS_SKIP, SKIP_PER_CHANNEL, HAS_GATE, types of inputs, and what update.cuh needs.
#pragma once
using T_A = T_A_LOG;  // as state_steps.cuh calls them
constexpr bool HAS_BIAS = HAS_DT_BIAS;

#include "delta_maps.cuh"
#include "diagonal_operands.cuh"
#include "update.cuh"

// Whether there are decays of channels, or of heads.
constexpr bool OF_CHANNELS = G_PER_CHANNEL || HAS_GATES;
constexpr bool OF_HEADS = DELTA ? !G_PER_CHANNEL && GATE_KIND != LogDecay::none : HAS_DECAYS;
constexpr bool BIAS_OF_CHANNELS = HAS_DT_BIAS && G_PER_CHANNEL;
constexpr int PADDED_VALUES = ceil_div(BLOCK_VALUES, 4) * 4;

// A token as all threads read it; zeros past HEAD_SIZE, so that these keys add nothing. With a rate of each channel
// `erased` is rate k.
struct Token {
    float r[PADDED_KEYS], k[PADDED_KEYS];
    float d[OF_CHANNELS ? PADDED_KEYS : 4], erased[BETA_PER_CHANNEL ? PADDED_KEYS : 4];
    float v[PADDED_VALUES], z[HAS_GATE ? PADDED_VALUES : 4];
};

// What a head has one of.
struct OfHead { float decay = 1.0f, rate = 1.0f; };

// What the tokens of a head share: rates of decay and biases.
struct Parameters {
    Share<T_DT_BIAS, HEAD_SIZE, PADDED_KEYS> biases;
    float bias = 0.0f, speed = 0.0f;

    __device__ void load(const T_A_LOG* a_log, const T_DT_BIAS* dt_bias, i64 head) {
        if constexpr (BIAS_OF_CHANNELS) biases.load(dt_bias + head * HEAD_SIZE);
        else if constexpr (HAS_DT_BIAS) bias = to_float(dt_bias[head]);
        if constexpr (HAS_STEPS) speed = to_float(a_log[head]);
        else if constexpr (DELTA && HAS_PARAMETERS) speed = speed_of(to_float(a_log[head]));
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

// What D is for a value of a head.
__device__ inline float skip_of(const T_D* own, i64 head, int value) {
    return to_float(own[SKIP_PER_CHANNEL ? head * VALUE_SIZE + min(value, VALUE_SIZE - 1) : head]);
}

// Where the tokens of a row are: its part of each input, and the elements from one token to the next.
struct Inputs {
    const T_IO *r, *k, *v, *write_gate, *z;
    const T_G* w;
    const T_BETA* beta;
    i64 r_step, k_step, v_step, write_gate_step, z_step, w_step, beta_step;

    // `width` is how many values there are from the block's first one on.
    __device__ void load(Held& held, i64 t, int width) const {
        held.r.load(r + t * r_step);
        if constexpr (!HAS_GATES) held.k.load(k + t * k_step);
        if constexpr (OF_CHANNELS) held.gates.load(w + t * w_step);
        else if constexpr (OF_HEADS && !HAS_STEPS) held.gate = w[t * w_step];
        if constexpr (BETA_PER_CHANNEL) held.rates.load(beta + t * beta_step);
        else if constexpr (DELTA || HAS_STEPS) held.rate = beta[t * beta_step];
        held.v.load(v + t * v_step, width);
        if constexpr (HAS_WRITE_GATE) held.write_gate.load(write_gate + t * write_gate_step, width);
        if constexpr (HAS_GATE) held.z.load(z + t * z_step, width);
    }
};
