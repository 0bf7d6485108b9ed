// Gradients of layer_convolution. With z_t what goes through its activation, made again:
//
//     g_t = grad_y_t opened'(z_t);   dx_s = sum_k weight[WIDTH-1-k] g_{s+k}
//     dweight[j] = sum_t g_t x_{t-WIDTH+1+j};   dbias = sum_t g_t
//
// with g = 0 behind the last token of a text. The gradient of its initial state is that of the tokens before it.
//
//   x, weight, bias, initial_state, cu_seqlens  as layer_convolution
//   grad_y          [batch, tokens, CHANNELS]  T_IO  in, neighbouring channels
//   dx              [batch, tokens, CHANNELS]  T_IO  out, or null
//   dweight_rows    [batch runs, CHANNELS, WIDTH]  fp32  out, or null: the sums of a block
//   dbias_rows      [batch runs, CHANNELS]  fp32  out, or null: the same
//   dinitial_state  [texts, CHANNELS, WIDTH - 1]  T_IO  out, or null
//
// Grid (batch runs, channels / (VECTOR NUM_THREADS)). A block goes from its last token to its first, and makes g of the
// WIDTH - 1 tokens behind too. A thread has taps, sums, a window of tokens and one of g in registers.
#include "layer_convolution_texts.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_convolution_backward(
    const T_IO* __restrict__ x, const T_WEIGHT* __restrict__ weight, const T_BIAS* __restrict__ bias,
    const T_IO* __restrict__ initial_state, const Bound* __restrict__ cu_seqlens, const T_IO* __restrict__ grad_y,
    T_IO* __restrict__ dx, float* __restrict__ dweight_rows, float* __restrict__ dbias_rows,
    T_IO* __restrict__ dinitial_state, RowStrides x_strides, RowStrides grad_y_strides, i64 tokens, i64 texts,
    i64 runs, i64 run_len) {
    const int channel = own_channel();
    if (channel >= CHANNELS) return;
    if (PACKED && dinitial_state != nullptr && blockIdx.x == 0) {
        const float zeros[BEFORE][VECTOR] = {};
        for (i64 number = 0; number < texts; ++number)  // those without tokens
            if (cu_seqlens[number] >= cu_seqlens[number + 1])
                write_by_channel(dinitial_state + (number * CHANNELS + channel) * BEFORE, zeros);
    }
    const Run run(runs, run_len, tokens);
    const Tokens own{x + run.batch * x_strides.batch + channel, initial_state, cu_seqlens, x_strides.token,
                     tokens, texts, run.batch, channel};
    grad_y += run.batch * grad_y_strides.batch + channel;
    Text text = own.text_of_token(run.end - 1);
    const i64 last = min(run.end + BEFORE, text.end) - 1;

    Piece<T_IO> grads[AHEAD], oldest[AHEAD];  // of a token, and the first token that it takes
    // A token before the first of all is not looked at.
    const auto load = [&](int i, i64 token) {
        grads[i].load(grad_y + token * grad_y_strides.token), oldest[i].load(own.at(max(token - BEFORE, i64(0))));
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (last - i >= run.begin) load(i, last - i);
    const Taps taps(weight, bias, channel);
    float window[WIDTH][VECTOR], behind[BEFORE][VECTOR] = {};  // g of the tokens behind, the nearest first
    float sums[WIDTH][VECTOR] = {}, sum[VECTOR] = {};
    own.fill(window, text, last - BEFORE);
    for (i64 first = last; first >= run.begin; first -= AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 token = first - i;
            if (token < run.begin) break;
            if (token - BEFORE >= text.begin) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) window[0][e] = oldest[i].at(e);
            } else {
                own.load_before(window[0], text, token - text.begin);
            }
            float g[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                g[e] = grads[i].at(e) * opened_slope<Gate(GATE)>(taps.sum(window, e));
            if (token - AHEAD >= run.begin) load(i, token - AHEAD);
            if (token < run.end) {
                float result[VECTOR];
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    sum[e] += g[e], result[e] = taps.of[BEFORE][e] * g[e];
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) sums[j][e] += g[e] * window[j][e];
#pragma unroll
                    for (int k = 0; k < BEFORE; ++k) result[e] += taps.of[BEFORE - 1 - k][e] * behind[k][e];
                }
                if (dx != nullptr) write(dx + (run.batch * tokens + token) * CHANNELS + channel, result);
            }
            move_back(behind);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) behind[0][e] = g[e];
            if (token > text.begin) {
                move_back(window);
                continue;
            }
            if (HAS_STATE && dinitial_state != nullptr && text.number >= 0) {
                float before[BEFORE][VECTOR] = {};
#pragma unroll
                for (int j = 0; j < BEFORE; ++j)
#pragma unroll
                    for (int k = 0; k <= j; ++k)
#pragma unroll
                        for (int e = 0; e < VECTOR; ++e) before[j][e] += taps.of[j - k][e] * behind[k][e];
                write_by_channel(dinitial_state + (text.number * CHANNELS + channel) * BEFORE, before);
            }
            if (PACKED && token > run.begin) {
                text = own.text_of_token(token - 1);
                own.fill(window, text, token - WIDTH);
#pragma unroll
                for (int k = 0; k < BEFORE; ++k)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) behind[k][e] = 0.0f;
            }
        }
    }
    const i64 place = i64(blockIdx.x) * CHANNELS + channel;
    if (dweight_rows != nullptr) write_by_channel(dweight_rows + place * WIDTH, sums);
    if (dbias_rows != nullptr) write(dbias_rows + place, sum);
}
