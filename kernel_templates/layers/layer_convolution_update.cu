// layer_convolution of one or a few tokens of many rows, whose last tokens lie in a pool and are changed in place.
//
//   x              [rows, tokens, CHANNELS]  T_IO  in, neighbouring channels
//   weight, bias   [CHANNELS, WIDTH], [CHANNELS]  T_WEIGHT, T_BIAS  in; bias with HAS_BIAS, else null
//   conv_state     [slots, CHANNELS, STATE_LEN]  T_STATE  in and out: the last tokens before, of which the convolution
//                  takes WIDTH - 1; no gaps in a slot, which is [STATE_LEN, CHANNELS] in memory with CHANNELS_LAST
//   cache_seqlens  [rows]  int  in with RING, else null: how many tokens a row has had. Its slot is a ring buffer then:
//                  token i of a sequence lies at i modulo STATE_LEN
//   state_indices  [rows]  int32 or int64  in, or null: row i has slot i
//   num_active     [1]  int  in or null: how many rows there are; others get zeros, and their slots stay as they are
//   y              [rows, tokens, CHANNELS]  T_IO  out
//
// A row whose slot is at or below `null_index`, or past the pool, begins with zeros and keeps nothing. Tokens are
// rounded as the pool has them before the next one takes them, so that it does not matter where a text is cut.
//
// Grid (rows, channels / (VECTOR NUM_THREADS)). A thread alone reads and writes the state of its channels.
#include "layer_convolution.cuh"

template <int BYTES> struct IntegerOf { using Type = int; };
template <> struct IntegerOf<8> { using Type = i64; };
using Index = IntegerOf<INDEX_BYTES>::Type;
constexpr int HELD = RING ? BEFORE : STATE_LEN;  // tokens of a slot that a thread has
static_assert(BEFORE <= STATE_LEN && HELD <= 16, "state_len must be from width - 1 to 16");

// Where a number of a slot lies, from that of a thread's first channel.
__device__ inline i64 place_of(i64 token, int e) {
    return CHANNELS_LAST ? token * CHANNELS + e : e * STATE_LEN + token;
}

__device__ inline void load_ring(float (&state)[HELD][VECTOR], const T_STATE* source, int end) {
#pragma unroll
    for (int j = 0; j < HELD; ++j)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            state[j][e] = to_float(source[place_of((end + STATE_LEN - HELD + j) % STATE_LEN, e)]);
}

__device__ inline void load_state(float (&state)[HELD][VECTOR], const T_STATE* source) {
    if constexpr (!CHANNELS_LAST) {
        load_by_channel(state, source);
        return;
    }
    Piece<T_STATE> held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) held[j].load(source + j * CHANNELS);
#pragma unroll
    for (int j = 0; j < HELD; ++j)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) state[j][e] = held[j].at(e);
}

__device__ inline void write_state(T_STATE* target, const float (&state)[HELD][VECTOR]) {
    if constexpr (!CHANNELS_LAST) {
        write_by_channel(target, state);
        return;
    }
#pragma unroll
    for (int j = 0; j < HELD; ++j) write(target + j * CHANNELS, state[j]);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_convolution_update(
    const T_IO* __restrict__ x, const T_WEIGHT* __restrict__ weight, const T_BIAS* __restrict__ bias,
    T_STATE* conv_state, const int* __restrict__ cache_seqlens, const Index* __restrict__ state_indices,
    const int* __restrict__ num_active, T_IO* __restrict__ y, RowStrides x_strides, i64 tokens, i64 slots,
    i64 slot_stride, i64 null_index) {
    const i64 row = blockIdx.x;
    const int channel = own_channel();
    let_next_launch_begin();
    if (channel >= CHANNELS) return;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) prefetch(weight + i64(channel) * WIDTH + j * VECTOR);
    conv_state = after_previous_launch(conv_state);
    x = written_meanwhile(x), weight = written_meanwhile(weight), bias = written_meanwhile(bias);
    cache_seqlens = written_meanwhile(cache_seqlens), state_indices = written_meanwhile(state_indices);
    num_active = written_meanwhile(num_active);

    y += row * tokens * CHANNELS + channel;
    if (num_active != nullptr && row >= *num_active) {
        const float zeros[VECTOR] = {};
        for (i64 token = 0; token < tokens; ++token) write(y + token * CHANNELS, zeros);
        return;
    }
    x += row * x_strides.batch + channel;
    Piece<T_IO> next;
    next.load(x);
    const i64 index = state_indices != nullptr ? i64(state_indices[row]) : row;
    const bool has_slot = (state_indices == nullptr || index > null_index) && 0 <= index && index < slots;
    conv_state += has_slot ? index * slot_stride + i64(channel) * (CHANNELS_LAST ? 1 : STATE_LEN) : 0;
    float state[HELD][VECTOR] = {}, window[HELD + 1][VECTOR];
    int end = 0;  // of a ring: where the next token goes
    if constexpr (RING) end = (cache_seqlens[row] % STATE_LEN + STATE_LEN) % STATE_LEN;
    if (has_slot) {
        if constexpr (RING) load_ring(state, conv_state, end);
        else load_state(state, conv_state);
    }
    const Taps taps(weight, bias, channel);
    for (i64 token = 0; token < tokens; ++token) {
        float result[VECTOR];
#pragma unroll
        for (int j = 0; j < HELD; ++j)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) window[j][e] = state[j][e];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) window[HELD][e] = next.at(e);
        if (token + 1 < tokens) next.load(x + (token + 1) * x_strides.token);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) result[e] = opened<Gate(GATE)>(taps.sum(window, e));
        write(y + token * CHANNELS, result);
        move_on(state);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            state[HELD - 1][e] = rounded<T_STATE>(window[HELD][e]);
            if constexpr (RING)
                if (has_slot) conv_state[place_of(end, e)] = from_float<T_STATE>(window[HELD][e]);
        }
        end = end + 1 == STATE_LEN ? 0 : end + 1;
    }
    if (has_slot && !RING) write_state(conv_state, state);
}
