// Gated linear attention, forward, one token after another with the state in registers: RWKV-6 and RWKV-5 with BONUS,
// GLA and linear attention without. Per head, S [V, K]:
//
//     S_t = S_{t-1} diag(d_t) + v_t k_t^T
//     with BONUS y_t = scale (S_{t-1} r_t + (sum_j u_j r_tj k_tj) v_t), without y_t = scale S_t r_t
//
//   r k   [batch, tokens, heads, K]  T_IO   in     w  the same shape, T_W, in; d = decay_factor(w), with w0, see
//   decay_bias.cuh, of w + w0
//   v, y  [batch, tokens, heads, V]  T_IO   in, out or null        u  [heads, K]  T_U  in
//   w that is the same for every token has strides of 0; null with Decay::none, where d = 1. u is null without BONUS.
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//   checkpoints  [slots, heads, V, K]  fp32  out or null: the state before every `interval`-th token
//
// Grid (sequences * heads, ROW_BLOCKS): value rows do not depend on each other, so any split of them is exact.
// Shared memory holds CHUNK_LEN tokens as floats, the decay already mapped; the next chunk waits in registers.
// Every sum and the state are fp32 and any decay is safe: nothing is ever divided by it.
#include "decay_bias.cuh"
#include "pooled.cuh"
#include "tile.cuh"

struct Smem {
    float r[CHUNK_LEN][PADDED_HEAD], d[CHUNK_LEN][PADDED_HEAD], k[CHUNK_LEN][PADDED_HEAD];
    float v[CHUNK_LEN][BLOCK_ROWS], y[CHUNK_LEN][BLOCK_ROWS];
};
static_assert(sizeof(Smem) <= STATIC_SHARED_LIMIT, "chunk_len x head_size needs more than 48 KB of shared memory");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gla_forward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_STATE* __restrict__ initial_state, const i64* __restrict__ cu_seqlens,
    T_IO* __restrict__ y, T_STATE* __restrict__ final_state, float* __restrict__ checkpoints,
    Strides r_strides, Strides k_strides, Strides v_strides, DecayStrides w_strides, i64 tokens, i64 heads,
    int interval, float scale,
    const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    __shared__ alignas(16) Smem smem;
    const i64 sequence = piece_of(blockIdx.x / heads, wave, waves), head = blockIdx.x % heads;
    const int block_row = blockIdx.y * BLOCK_ROWS;
    const int width = min(BLOCK_ROWS, VALUE_SIZE - block_row);
    if (is_for_others(pieces, sequence, wave)) return;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);

    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
    r += start(r_strides), k += start(k_strides), w += start(w_strides);
    v += start(v_strides) + block_row;
    const i64 y_stride = heads * VALUE_SIZE;
    if (y != nullptr) y += (span.batch * tokens + span.begin) * y_stride + head * VALUE_SIZE + block_row;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    float* checkpoint = nullptr;
    if (checkpoints != nullptr)
        checkpoint = checkpoints +
            (first_checkpoint(cu_seqlens, sequence, span, interval) * heads + head) * (VALUE_SIZE * HEAD_SIZE);

    StagedKeys<T_IO> next_r, next_k;
    StagedKeys<T_W> next_w;
    StagedValues<T_IO> next_v;
    const auto load = [&](i64 token) {
        const i64 steps = span.length - token;
        next_r.load(r + token * r_strides.token, r_strides.token, steps);
        next_k.load(k + token * k_strides.token, k_strides.token, steps);
        if constexpr (DECAY != Decay::none) next_w.load(w + token * w_strides.token, w_strides.token, steps);
        next_v.load(v + token * v_strides.token, v_strides.token, steps, width);
    };

    load(0);
    clear_shared(reinterpret_cast<float*>(&smem), sizeof(Smem) / sizeof(float));
    Rectangle state;
    read_state<STATE_LAYOUT>(state, first_state(initial_state, state_offset, pieces, sequence, head, slot_stride), block_row);
    float bonus[COLUMNS] = {};
    if constexpr (BONUS) read_channels(bonus, u + head * HEAD_SIZE);
    __syncthreads();

    i64 next_checkpoint = checkpoints != nullptr ? 0 : span.length;
    for (i64 token = 0; token < span.length; token += CHUNK_LEN) {
        const int steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
        next_r.store<PADDED_HEAD>(smem.r[0], steps, 0.0f, [&](float x, int) { return x * scale; });
        if constexpr (DECAY != Decay::none)
            next_w.store<PADDED_HEAD>(smem.d[0], steps, 1.0f, [&](float x, int channel) {
                return decay_factor<DECAY>(add_bias(x, w_strides, head, channel));
            });
        next_k.store<PADDED_HEAD>(smem.k[0], steps);
        next_v.store<BLOCK_ROWS>(smem.v[0], steps, width);
        __syncthreads();
        load(token + CHUNK_LEN);

        const auto step = [&](int s) {
            float v_t[ROWS_PER_THREAD], y_t[ROWS_PER_THREAD] = {}, bonus_t = 0.0f;
            float r_t[COLUMNS], d_t[COLUMNS], k_t[COLUMNS];
            read_rows(v_t, smem.v[s]);
            read_columns(r_t, smem.r[s]);
            read_columns(k_t, smem.k[s]);
            read_factors(d_t, smem.d[s]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                if constexpr (BONUS) bonus_t += bonus[c] * r_t[c] * k_t[c];
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) {
                    if constexpr (BONUS) y_t[i] += state[i][c] * r_t[c];
                    state[i][c] = state[i][c] * d_t[c] + v_t[i] * k_t[c];
                    if constexpr (!BONUS) y_t[i] += state[i][c] * r_t[c];
                }
            }
            if constexpr (BONUS) {
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) y_t[i] += bonus_t * v_t[i];
            }
            write_row_sums(y_t, smem.y[s]);
        };
        for (int s = 0; s < steps;) {
            if (token + s == next_checkpoint) {
                write_state<StateLayout::vk>(checkpoint, state, block_row);
                checkpoint += heads * (VALUE_SIZE * HEAD_SIZE);
                next_checkpoint += interval;
            }
            const int stop = static_cast<int>(min(next_checkpoint - token, i64(steps)));
#pragma unroll 2
            for (; s < stop; ++s) step(s);
        }
        __syncthreads();
        if (y != nullptr) write_values(y + token * y_stride, y_stride, smem.y[0], steps, width);
    }
    if (has_last_state(final_state, pieces, sequence))
        write_state<STATE_LAYOUT>(last_state(final_state, state_offset, pieces, sequence, head, slot_stride), state, block_row);
}
