// Whole texts of the short causal convolution, as both directions read them: a block has a run of neighbouring tokens.
//
// Needs HAS_STATE and what layer_convolution.cuh and layer_texts.cuh need.
#pragma once
#include "layer_convolution.cuh"
#include "layer_texts.cuh"

constexpr int AHEAD = 2;  // tokens of a thread that are under way at once

// The tokens of a block, from `begin` to `end` of a row of the batch.
struct Run {
    i64 batch, begin, end;
    __device__ Run(i64 runs, i64 run_len, i64 tokens) {
        batch = i64(blockIdx.x) / runs, begin = i64(blockIdx.x) % runs * run_len, end = min(begin + run_len, tokens);
    }
};

// What a thread reads of its row of the batch: x from its first channel on.
struct Tokens {
    const T_IO *x, *initial_state;
    const Bound* cu_seqlens;
    i64 stride, tokens, texts, batch;
    int channel;

    __device__ const T_IO* at(i64 token) const { return x + token * stride; }

    __device__ Text text_of_token(i64 token) const {
        Text text = text_of(token, cu_seqlens, tokens, texts, tokens);
        if (!PACKED) text.number = batch;
        return text;
    }
    // A token that is before a text: one of the state, from 0 to BEFORE - 1, or zeros.
    __device__ void load_before(float (&target)[VECTOR], const Text& text, i64 place) const {
        const bool is_there = HAS_STATE && text.number >= 0;
        const i64 own = (text.number * CHANNELS + channel) * BEFORE + place;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) target[e] = is_there ? to_float(initial_state[own + e * BEFORE]) : 0.0f;
    }
    // All of a window but its first place, which is that of a token. The text may begin within the window.
    __device__ void fill(float (&window)[WIDTH][VECTOR], const Text& text, i64 first) const {
        Piece<T_IO> held[WIDTH];
#pragma unroll
        for (int j = 1; j < WIDTH; ++j)
            if (first + j >= text.begin) held[j].load(at(first + j));
#pragma unroll
        for (int j = 1; j < WIDTH; ++j) {
            if (first + j >= text.begin) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) window[j][e] = held[j].at(e);
            } else {
                load_before(window[j], text, first + j - text.begin + BEFORE);
            }
        }
    }
};
