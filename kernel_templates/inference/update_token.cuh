// A token of the recurrences that calls name by r, w, k, v, a, b and u: in registers, and in shared memory.
//
// Needs DELTA, BONUS, DECAY, T_IO, T_W, T_W0, T_U, and what update.cuh needs.
#pragma once
#include "update.cuh"

// A token's inputs, as all threads read them; zeros past HEAD_SIZE, so that these keys add nothing.
struct Token {
    float r[PADDED_KEYS], k[PADDED_KEYS], d[DECAY == Decay::none ? 4 : PADDED_KEYS];
    float a[DELTA ? PADDED_KEYS : 4], b[DELTA ? PADDED_KEYS : 4], u[BONUS ? PADDED_KEYS : 4];
    float v[ceil_div(BLOCK_VALUES, 4) * 4];
};

struct Held {
    Share<T_IO, HEAD_SIZE, PADDED_KEYS> r, k, a, b;
    Share<T_W, HEAD_SIZE, PADDED_KEYS> w;
    Share<T_W0, HEAD_SIZE, PADDED_KEYS> w0;
    Share<T_U, HEAD_SIZE, PADDED_KEYS> u;
    Share<T_IO, VALUE_SIZE, BLOCK_VALUES> v;

    __device__ void store(Token& token, bool has_w0) const {
        r.store(token.r), k.store(token.k), v.store(token.v);
        if constexpr (DELTA) a.store(token.a), b.store(token.b);
        if constexpr (BONUS) u.store(token.u);
        if constexpr (DECAY != Decay::none)
            w.store(token.d, [&](int n, float x) {
                return decay_factor<DECAY>(has_w0 ? x + to_float(w0.held[n]) : x);
            });
    }
};
