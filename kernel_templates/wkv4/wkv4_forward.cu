// RWKV-4 time mixing, forward, one token after another. Per channel, with the log-decay w:
//
//     y_t = (num_t + e^(u + k_t) v_t) / (den_t + e^(u + k_t))
//     num_(t+1) = e^w num_t + e^(k_t) v_t;   den_(t+1) = e^w den_t + e^(k_t)
//
//   k v y          [batch, tokens, channels]  T_IO  in, in, out
//   w u            [channels]  T_W, T_U  in
//   initial_state  [batch, 3, channels]  fp32  in or null: num, den, max, where the sums are e^max times num and den
//   final_state    [batch, 3, channels]  fp32  out or null; may be the initial one
//   checkpoints    [batch, ceil(tokens / CHUNK_LEN), 3, channels]  fp32  out or null: the state before every chunk
//   summaries      [parts, batch, 3, channels]  fp32  the state that a part leaves when it begins with none: out
//                  without RESULTS, where nothing else is written; with them in, for the states that parts begin with
//
// Grid (channels of all rows / NUM_THREADS, parts of the tokens): a thread is a channel of a row, and walks over a part
// with its sums in registers, a chunk computed while the next one is loaded. No shared memory. Any decay is safe: of
// two exponents the larger one is taken out.
#include "wkv4.cuh"

// Sums of a part behind those before it, `steps` tokens ago.
__device__ inline void join(Sums& sums, const Sums& part, float steps, float w) {
    sums.age = steps;
    const Sums past = sums.settled(w);
    const float lead = part.key - past.key;
    const Weights weight = weights(lead);
    sums = {weight.past * past.num + weight.now * part.num, weight.past * past.den + weight.now * part.den,
            lead > 0.0f ? part.key : past.key, 0.0f};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv4_forward(
    const T_W* __restrict__ w_raw, const T_U* __restrict__ bonus, const T_IO* __restrict__ k,
    const T_IO* __restrict__ v, const float* initial_state, T_IO* __restrict__ y, float* final_state,
    float* __restrict__ checkpoints, float* __restrict__ summaries, RowStrides k_strides, RowStrides v_strides,
    i64 tokens, i64 batch, i64 channels, i64 part_len) {
    const i64 item = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (item >= batch * channels) return;
    const i64 row = item / channels, channel = item % channels, whole = 3 * row * channels + channel;
    const i64 begin = blockIdx.y * part_len, end = min(begin + part_len, tokens);
    const float w = log_decay(to_float(w_raw[channel])), u = to_float(bonus[channel]);
    k += row * k_strides.batch + begin * k_strides.token + channel;
    v += row * v_strides.batch + begin * v_strides.token + channel;

    Chunk<T_IO> next_k, next_v;
    next_k.load(k, k_strides.token, end - begin);
    next_v.load(v, v_strides.token, end - begin);

    Sums sums = {0.0f, 0.0f, NEVER, 0.0f};
    if constexpr (RESULTS) {
        if (initial_state != nullptr) sums = read_sums(initial_state + whole, channels);
        for (i64 part = 0; part < blockIdx.y; ++part)
            join(sums, read_sums(summaries + part * 3 * batch * channels + whole, channels),
                 static_cast<float>(part_len), w);
        y += (row * tokens + begin) * channels + channel;
        if (checkpoints != nullptr)
            checkpoints += 3 * (row * ((tokens + CHUNK_LEN - 1) / CHUNK_LEN) + begin / CHUNK_LEN) * channels + channel;
    }

    for (i64 token = begin; token < end; token += CHUNK_LEN) {
        const i64 left = end - token;
        float k_now[CHUNK_LEN], v_now[CHUNK_LEN];
        next_k.to_floats(k_now), next_v.to_floats(v_now);
        k += CHUNK_LEN * k_strides.token, v += CHUNK_LEN * v_strides.token;
        next_k.load(k, k_strides.token, left - CHUNK_LEN);
        next_v.load(v, v_strides.token, left - CHUNK_LEN);
        if constexpr (RESULTS) {
            if (checkpoints != nullptr) {
                write_sums(checkpoints, channels, sums.settled(w));
                checkpoints += 3 * channels;
            }
        }
        const auto step = [&](int i) {
            if constexpr (RESULTS) {
                const Weights at = weights(fmaf(-sums.age, w, k_now[i] - sums.key) + u);
                *y = from_float<T_IO>((at.past * sums.num + at.now * v_now[i]) *
                                      reciprocal(at.past * sums.den + at.now));
                y += channels;
            }
            const Weights at = step_weights(sums, k_now[i], w);
            sums.num = at.past * sums.num + at.now * v_now[i];
            sums.den = at.past * sums.den + at.now;
        };
        if (left >= CHUNK_LEN) {
#pragma unroll
            for (int i = 0; i < CHUNK_LEN; ++i) step(i);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK_LEN; ++i)
                if (i < left) step(i);
        }
    }

    float* const left_behind = !RESULTS        ? summaries + blockIdx.y * 3 * batch * channels
                               : end == tokens ? final_state
                                               : nullptr;
    if (left_behind != nullptr) write_sums(left_behind + whole, channels, sums.settled(w));
}
