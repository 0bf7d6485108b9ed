// RWKV-4 time mixing of one or a few tokens of many rows, whose states lie in a pool and are changed in place. Per
// channel as in wkv4_forward.cu:
//
//     y_t = (num_t + e^(u + k_t) v_t) / (den_t + e^(u + k_t))
//     num_(t+1) = e^w num_t + e^(k_t) v_t;   den_(t+1) = e^w den_t + e^(k_t)
//
//   k v y  [batch, tokens, channels]  T_IO  in, in, out; y without gaps
//   w u    [channels]  T_W, T_U  in
//   state  [slots, 3, channels]  fp32  in and out, at any strides: num, den, max
//   state_indices, write_indices  [batch]  int32 or int64  in, or null: row i has slot i, and writes where it reads
//
// A row whose slot is at or below `null_index`, or past the pool, reads no state and gets y of zeros. A state is not
// written to such a slot. Rows that write to one slot leave it with some of both.
//
// Grid (channels of all rows / NUM_THREADS): a thread is a channel of a row, and loads CHUNK_LEN tokens at once. No shared
// memory. Any decay is safe: of two exponents the larger one is taken out.
#include "wkv4.cuh"

template <int BYTES> struct IntegerOf { using Type = int; };
template <> struct IntegerOf<8> { using Type = i64; };
using Index = IntegerOf<INDEX_BYTES>::Type;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv4_update(
    const T_W* __restrict__ w_raw, const T_U* __restrict__ bonus, const T_IO* __restrict__ k,
    const T_IO* __restrict__ v, float* state, const Index* __restrict__ state_indices,
    const Index* __restrict__ write_indices, T_IO* __restrict__ y, RowStrides k_strides, RowStrides v_strides,
    i64 slot_stride, i64 number_stride, i64 channel_stride, i64 slots, i64 null_index, i64 tokens, i64 batch,
    i64 channels) {
    const i64 item = i64(blockIdx.x) * NUM_THREADS + threadIdx.x;
    if (item >= batch * channels) return;
    const i64 row = item / channels, channel = item % channels;
    const i64 from = state_indices != nullptr ? i64(state_indices[row]) : row;
    const i64 to = write_indices != nullptr ? i64(write_indices[row]) : from;
    y += row * tokens * channels + channel;
    if ((state_indices != nullptr && from <= null_index) || from >= slots || from < 0) {
        for (i64 t = 0; t < tokens; ++t) y[t * channels] = from_float<T_IO>(0.0f);
        return;
    }

    k += row * k_strides.batch + channel;
    v += row * v_strides.batch + channel;
    state += channel * channel_stride;
    const float w = log_decay(to_float(w_raw[channel])), u = to_float(bonus[channel]);
    Sums sums = read_sums(state + from * slot_stride, number_stride);
    for (i64 left = tokens; left > 0; left -= CHUNK_LEN) {
        Chunk<T_IO> keys, values;
        keys.load(k, k_strides.token, left);
        values.load(v, v_strides.token, left);
        k += CHUNK_LEN * k_strides.token, v += CHUNK_LEN * v_strides.token;
        float k_now[CHUNK_LEN], v_now[CHUNK_LEN];
        keys.to_floats(k_now), values.to_floats(v_now);
#pragma unroll
        for (int i = 0; i < CHUNK_LEN; ++i) {
            if (i >= left) break;
            const Weights of_y = weights(fmaf(-sums.age, w, k_now[i] - sums.key) + u);
            *y = from_float<T_IO>((of_y.past * sums.num + of_y.now * v_now[i]) *
                                  reciprocal(of_y.past * sums.den + of_y.now));
            y += channels;
            const Weights at = step_weights(sums, k_now[i], w);
            sums.num = at.past * sums.num + at.now * v_now[i];
            sums.den = at.past * sums.den + at.now;
        }
    }
    if ((write_indices != nullptr && to <= null_index) || to >= slots || to < 0) return;
    write_sums(state + to * slot_stride, number_stride, sums.settled(w));
}
