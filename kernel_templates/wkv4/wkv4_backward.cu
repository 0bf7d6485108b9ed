// RWKV-4 time mixing, backward: from the last chunk to the first, each one forward again and then in reverse.
//
// In shares of past and present, h of y_t and g of the mean m of all tokens so far, which is num / den:
//
//     y_t = m_t + h_t (v_t - m_t),  h_t = e^(u + k_t) / (den_t + e^(u + k_t));
//     m_(t+1) = m_t + g_t (v_t - m_t),  g_t = e^(k_t) / den_(t+1)
//
// With P the gradient of m_(t+1) and R that of log den_(t+1), m held, which w and the later tokens see; d = v_t - m_t:
//
//     dv = h dy + g P;   dk = h (1-h) d dy + g ((1-g) d P + R);   du += h (1-h) d dy
//     X = (1-g) (R - g d P);   dw += X;   R <- X - h (1-h) d dy;   P <- (1-h) dy + (1-g) P
//
// Nothing here grows with keys or decays, and no two sums of which only a difference is wanted.
//
//   k v dy dk dv   [batch, tokens, channels]  T_IO  in, in, in, out, out
//   w u            [channels]  T_W, T_U  in
//   checkpoints    [batch, ceil(tokens / CHUNK_LEN), 3, channels]  fp32  in: the state before every chunk
//   grad_final     [batch, 3, channels]  fp32  in or null           grad_initial  the same shape  fp32  out or null
//   dw du          [parts, batch, channels]  fp32  out: of w as it is given; their sums are the gradients
//   summaries      [parts, batch, 3, channels]  fp32  P, R and what passes of the final max's gradient before a part,
//                  with no gradient from behind it: out without RESULTS, where nothing else is written; with them in
//
// Grid (channels of all rows / NUM_THREADS, parts of the tokens): a thread is a channel of a row. A chunk's shares stay
// in registers, and the chunk before it is loaded meanwhile. No shared memory.
#include "wkv4.cuh"

// Of the past and of the present in a mean, and what the mean is divided by.
struct Shares { float past, now; };
__device__ inline Shares shares(Weights at, float den, float& total) {
    const float past = at.past * den;
    total = past + at.now;
    const float inverse = reciprocal(total), now = at.now * inverse;
    // A past that keeps nearly all is multiplied by its share token after token: the same error in each would add up.
    return {now < 0.5f ? 1.0f - now : past * inverse, now};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv4_backward(
    const T_W* __restrict__ w_raw, const T_U* __restrict__ bonus, const T_IO* __restrict__ k,
    const T_IO* __restrict__ v, const T_IO* __restrict__ dy, const float* __restrict__ checkpoints,
    const float* __restrict__ grad_final, float* __restrict__ grad_initial, T_IO* __restrict__ dk,
    T_IO* __restrict__ dv, float* __restrict__ dw, float* __restrict__ du, float* __restrict__ summaries,
    RowStrides k_strides, RowStrides v_strides, RowStrides dy_strides, i64 tokens, i64 batch, i64 channels,
    i64 part_len) {
    const i64 item = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (item >= batch * channels) return;
    const i64 row = item / channels, channel = item % channels, whole = 3 * row * channels + channel;
    const i64 own_part = blockIdx.y + (RESULTS ? 0 : 1);  // of the first part nobody asks what it does on its own
    const i64 begin = own_part * part_len, end = min(begin + part_len, tokens);
    const float w = log_decay(to_float(w_raw[channel])), u = to_float(bonus[channel]);
    const i64 chunks = (tokens + CHUNK_LEN - 1) / CHUNK_LEN, last_chunk = (end - 1) / CHUNK_LEN * CHUNK_LEN;
    const auto before = [&](i64 token) {
        return checkpoints + 3 * (row * chunks + token / CHUNK_LEN) * channels + channel;
    };
    k += row * k_strides.batch + last_chunk * k_strides.token + channel;
    v += row * v_strides.batch + last_chunk * v_strides.token + channel;
    dy += row * dy_strides.batch + last_chunk * dy_strides.token + channel;
    dk += (row * tokens + end) * channels + channel;  // behind what is next written
    dv += (row * tokens + end) * channels + channel;

    Chunk<T_IO> next_k, next_v, next_dy;
    Sums next_sums;
    const auto load = [&](i64 token) {
        next_k.load(k, k_strides.token, end - token);
        next_v.load(v, v_strides.token, end - token);
        next_dy.load(dy, dy_strides.token, end - token);
        const float* const from = before(token);
        next_sums = {load_early<float>(from), load_early<float>(from + channels),
                     load_early<float>(from + 2 * channels), 0.0f};
    };
    load(last_chunk);

    // Gradients of the mean, of log den, and of the max with both held: the last goes to the key that is the max.
    float mean_grad = 0.0f, scale_grad = 0.0f, max_grad = 1.0f;
    if constexpr (RESULTS) {
        // A part's P and R are those it has without gradients from behind it, and what passes through it.
        for (i64 part = gridDim.y - 1; part > own_part; --part) {
            const Sums found = read_sums(summaries + part * 3 * batch * channels + whole, channels);
            float passing = 0.0f, shift = 0.0f;
            if (part + 1 < gridDim.y) {
                const Sums first = read_sums(before(part * part_len), channels),
                           then = read_sums(before((part + 1) * part_len), channels);
                passing = first.den / then.den * expf(fmaf(static_cast<float>(part_len), w, first.key - then.key));
                shift = then.mean() - first.mean();
            }
            scale_grad = found.den + passing * (scale_grad - shift * mean_grad);
            mean_grad = found.num + passing * mean_grad;
            max_grad *= found.key;
        }
    }

    float dw_sum = 0.0f, du_sum = 0.0f;
    for (i64 token = last_chunk; token >= begin; token -= CHUNK_LEN) {
        const int count = static_cast<int>(min(end - token, i64(CHUNK_LEN)));
        float k_now[CHUNK_LEN], v_now[CHUNK_LEN], dy_now[CHUNK_LEN];
        next_k.to_floats(k_now), next_v.to_floats(v_now), next_dy.to_floats(dy_now);
        const Sums start = next_sums;
        if (token > begin) {
            k -= CHUNK_LEN * k_strides.token, v -= CHUNK_LEN * v_strides.token, dy -= CHUNK_LEN * dy_strides.token;
            load(token - CHUNK_LEN);
        }

        Shares of_y[CHUNK_LEN], of_mean[CHUNK_LEN];
        float delta[CHUNK_LEN], mean = start.mean();
        Sums sums = start;
        const auto forward = [&](int i) {
            float total;
            of_y[i] = shares(weights(fmaf(-sums.age, w, k_now[i] - sums.key) + u), sums.den, total);
            of_mean[i] = shares(step_weights(sums, k_now[i], w), sums.den, sums.den);
            delta[i] = v_now[i] - mean;
            mean = fmaf(of_mean[i].now, delta[i], mean);
        };
        float dw_here = 0.0f, du_here = 0.0f, later_mean_grad = 0.0f, later_scale_grad = 0.0f;
        const auto reverse = [&](int i) {
            if (i == 0) later_mean_grad = mean_grad, later_scale_grad = scale_grad;
            const float through_mean = of_mean[i].now * mean_grad, slope = through_mean * delta[i];
            const float through_y = of_y[i].now * dy_now[i], of_bonus = of_y[i].past * through_y * delta[i];
            const float of_past = of_mean[i].past * (scale_grad - slope);
            if constexpr (RESULTS) {
                dv -= channels, dk -= channels;
                *dv = from_float<T_IO>(through_y + through_mean);
                *dk = from_float<T_IO>(of_bonus + of_mean[i].past * slope + of_mean[i].now * scale_grad);
            }
            dw_here += of_past, du_here += of_bonus;
            scale_grad = of_past - of_bonus;
            mean_grad = of_y[i].past * dy_now[i] + of_mean[i].past * mean_grad;
        };
        const auto start_from_final = [&]() {
            if (token + count < tokens) return;
            max_grad = 0.0f;
            if (grad_final == nullptr) return;
            const Sums grad = read_sums(grad_final + whole, channels);
            mean_grad = grad.num * sums.den;
            scale_grad = (grad.num * mean + grad.den) * sums.den;
            max_grad = grad.key - scale_grad;
        };
        if (count == CHUNK_LEN) {
#pragma unroll
            for (int i = 0; i < CHUNK_LEN; ++i) forward(i);
            start_from_final();
#pragma unroll
            for (int i = CHUNK_LEN - 1; i >= 0; --i) reverse(i);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK_LEN; ++i)
                if (i < count) forward(i);
            start_from_final();
#pragma unroll
            for (int i = CHUNK_LEN - 1; i >= 0; --i)
                if (i < count) reverse(i);
        }
        dw_sum += dw_here, du_sum += du_here;

        // The max is a key and so many steps of w: one that comes from before the chunk gets its gradient there.
        const int since = static_cast<int>(sums.age);
        if (max_grad != 0.0f) {
            dw_sum += max_grad * since;
            if (since < count) {
                if constexpr (RESULTS) {
                    T_IO* const at = dk + (count - 1 - since) * channels;
                    *at = from_float<T_IO>(to_float(*at) + max_grad);
                }
                max_grad = 0.0f;
            }
        }

        if constexpr (RESULTS) {
            if (token == 0 && grad_initial != nullptr) {
                // The shares of the past without its den, which may be zero.
                const float lead = k_now[0] - start.key;
                const Weights at_y = weights(lead + u), at_mean = weights(lead - w);
                const float of_past_y = at_y.past / (at_y.past * start.den + at_y.now);
                const float of_past_mean = at_mean.past / (at_mean.past * start.den + at_mean.now);
                const float grad_num = of_past_y * dy_now[0] + of_past_mean * later_mean_grad;
                const float slope = of_past_mean * (later_scale_grad - of_mean[0].now * later_mean_grad * delta[0]) -
                    of_past_y * dy_now[0] * of_y[0].now * delta[0];
                const float grad_den = slope - start.mean() * grad_num;
                const float grad_max = grad_num * start.num + grad_den * start.den + max_grad;
                write_sums(grad_initial + whole, channels, {grad_num, grad_den, grad_max});
            }
        }
    }

    if constexpr (RESULTS) {
        const i64 at = own_part * batch * channels + item;
        dw[at] = DECAY == Decay::raw ? w * dw_sum : dw_sum;
        du[at] = du_sum;
    } else {
        write_sums(summaries + own_part * 3 * batch * channels + whole, channels, {mean_grad, scale_grad, max_grad});
    }
}
