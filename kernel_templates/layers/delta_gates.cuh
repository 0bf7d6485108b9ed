// Gates of the delta rules, as layer_delta_operands and its backward take them: rates of writing and log-decays, each
// one for a head or one for a channel.
//
// Needs what layer_heads.cuh and delta_maps.cuh need, and G_PER_CHANNEL, BETA_PER_CHANNEL, HAS_NORM, HAS_DT_BIAS.
#pragma once
#include "delta_maps.cuh"
#include "layer_heads.cuh"

// What a head has, or each of its channels.
template <typename T, bool PER_CHANNEL> struct HeadOrChannels {
    Piece<T> pieces[ITEMS];
    __device__ void load(const T* source, i64 head) { load_pieces(pieces, source + head * HEAD_SIZE); }
    __device__ float at(int n, int i) const { return pieces[n].at(i); }
};
template <typename T> struct HeadOrChannels<T, false> {
    float one;
    __device__ void load(const T* source, i64 head) { one = to_float(source[head]); }
    __device__ float at(int, int) const { return one; }
};

// 1 / sqrt(|x|^2 + eps) of a head.
__device__ inline float factor_of(const Piece<T_IO> (&x)[ITEMS]) {
    float squares[1] = {};
    sum_over_head(squares, [&](int n, int i) { squares[0] += x[n].at(i) * x[n].at(i); });
    return reciprocal_root(squares[0] + NORM_EPS);
}

struct Rates {
    HeadOrChannels<T_BETA, BETA_PER_CHANNEL> given;
    __device__ void load(const T_BETA* beta, i64 head) { given.load(beta, head); }
    __device__ float at(int n, int i) const { return rate_of(given.at(n, i)); }
    __device__ float slope(int n, int i) const {
        if constexpr (RATE_MAP == RateMap::identity) return 1.0f;
        const float share = sigmoid(given.at(n, i));
        return share * (1.0f - share) * (RATE_MAP == RateMap::sigmoid ? 1.0f : 2.0f);
    }
};

struct Logits {
    HeadOrChannels<T_G, G_PER_CHANNEL> given;
    __device__ void load(const T_G* g, i64 head) {
        if constexpr (GATE_KIND != LogDecay::none) given.load(g, head);
    }
};

// The log-decays of a value head, and their slopes.
struct LogDecays {
    const Logits& logits;
    HeadOrChannels<T_DT_BIAS, G_PER_CHANNEL> bias;
    float speed, lower_bound;  // exp(A_log)

    __device__ LogDecays(const Logits& logits, const T_A_LOG* A_log, const T_DT_BIAS* dt_bias, i64 head,
                         float lower_bound)
        : logits(logits), lower_bound(lower_bound) {
        if constexpr (HAS_PARAMETERS) speed = speed_of(to_float(A_log[head]));
        if constexpr (HAS_DT_BIAS) bias.load(dt_bias, head);
    }
    __device__ float logit(int n, int i) const {
        return HAS_DT_BIAS ? logits.given.at(n, i) + bias.at(n, i) : logits.given.at(n, i);
    }
    __device__ float at(int n, int i) const {
        if constexpr (GATE_KIND == LogDecay::none) return 0.0f;
        return log_decay_of(logit(n, i), speed, lower_bound);
    }
    __device__ float factor(int n, int i) const {
        return GATE_KIND == LogDecay::none ? 1.0f : exponential(at(n, i));
    }
    // Of the log-decay by g, and by A_log. Both are finite.
    __device__ float slope(int n, int i) const {
        if constexpr (!HAS_PARAMETERS) return 1.0f;
        const float x = logit(n, i);
        if constexpr (GATE_KIND == LogDecay::softplus) return -speed * sigmoid(x);
        const float share = sigmoid(speed * x);
        return lower_bound * share * (1.0f - share) * speed;
    }
    __device__ float slope_of_speed(int n, int i) const {
        return GATE_KIND == LogDecay::softplus ? fmaxf(at(n, i), -128.0f) : slope(n, i) * logit(n, i);
    }
};
