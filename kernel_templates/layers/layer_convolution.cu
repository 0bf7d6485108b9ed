// A causal convolution over tokens, of each channel for itself. Per token t of a text:
//
//     y_t = opened(bias + sum_j weight[j] x_{t-WIDTH+1+j})
//
// where opened(z) is z or z sigmoid(z), and before the text stands its initial state, or zeros.
//
//   x              [batch, tokens, CHANNELS]  T_IO  in, neighbouring channels
//   weight, bias   [CHANNELS, WIDTH], [CHANNELS]  T_WEIGHT, T_BIAS  in; bias with HAS_BIAS, else null
//   initial_state  [texts, CHANNELS, WIDTH - 1]  T_IO  in with HAS_STATE, else null
//   cu_seqlens     [texts + 1]  int32 or int64  in where PACKED: where texts begin and end; else each is a row of x
//   y              [batch, tokens, CHANNELS]  T_IO  out
//
// Grid (batch runs, channels / (VECTOR NUM_THREADS)): a block has run_len tokens, and reads WIDTH - 1 before them too.
// A thread has the taps and a window of tokens in registers, with AHEAD tokens under way.
#include "layer_convolution_texts.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_convolution(
    const T_IO* __restrict__ x, const T_WEIGHT* __restrict__ weight, const T_BIAS* __restrict__ bias,
    const T_IO* __restrict__ initial_state, const Bound* __restrict__ cu_seqlens, T_IO* __restrict__ y,
    RowStrides x_strides, i64 tokens, i64 texts, i64 runs, i64 run_len) {
    let_next_launch_begin();
    x = after_previous_launch(x), weight = written_meanwhile(weight), bias = written_meanwhile(bias);
    initial_state = written_meanwhile(initial_state), cu_seqlens = written_meanwhile(cu_seqlens);
    const int channel = own_channel();
    if (channel >= CHANNELS) return;
    const Run run(runs, run_len, tokens);
    const Tokens own{x + run.batch * x_strides.batch + channel, initial_state, cu_seqlens, x_strides.token,
                     tokens, texts, run.batch, channel};
    y += run.batch * tokens * CHANNELS + channel;

    Piece<T_IO> next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (run.begin + i < run.end) next[i].load(own.at(run.begin + i));
    const Taps taps(weight, bias, channel);
    Text text = own.text_of_token(run.begin);
    float window[WIDTH][VECTOR];
    own.fill(window, text, run.begin - WIDTH);
    for (i64 first = run.begin; first < run.end; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 token = first + i;
            if (token >= run.end) break;
            if (PACKED && token == text.end) {
                text = own.text_of_token(token);
                own.fill(window, text, token - WIDTH);
            }
            move_on(window);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) window[BEFORE][e] = next[i].at(e);
            if (token + AHEAD < run.end) next[i].load(own.at(token + AHEAD));
            float result[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) result[e] = opened<Gate(GATE)>(taps.sum(window, e));
            write(y + token * CHANNELS, result);
        }
    }
}
