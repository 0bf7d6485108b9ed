// RWKV-7 time mixing, forward, one token after another with the state in registers. Per head, S [V, K]:
//
//     sa_t = S_{t-1} a_t;   S_t = S_{t-1} diag(d_t) + sa_t b_t^T + v_t k_t^T;   y_t = scale S_t r_t
//
//   r k a b   [batch, tokens, heads, K]  T_IO   in     w  the same shape, T_W, in; d = decay_factor(w), with w0, see
//   decay_bias.cuh, of w + w0
//   v, y      [batch, tokens, heads, V]  T_IO   in, out or null
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//   checkpoints  [slots, heads, V, K]  fp32  out or null: the state before every `interval`-th token
//   sa  [batch, tokens, heads, V]  fp32  out or null: for the backward
//
// Grid (sequences * heads, ROW_BLOCKS): value rows do not depend on each other, so any split of them is exact.
// Shared memory holds CHUNK_LEN tokens as floats, the decay already mapped; the next chunk waits in registers.
// Every sum and the state are fp32 and any decay is safe: nothing is ever divided by it.
#include "decay_bias.cuh"
#include "pooled.cuh"
#include "tile.cuh"

struct Smem {
    float r[CHUNK_LEN][PADDED_HEAD], d[CHUNK_LEN][PADDED_HEAD], k[CHUNK_LEN][PADDED_HEAD];
    float a[CHUNK_LEN][PADDED_HEAD], b[CHUNK_LEN][PADDED_HEAD];
    float v[CHUNK_LEN][BLOCK_ROWS], sa[CHUNK_LEN][BLOCK_ROWS], y[CHUNK_LEN][BLOCK_ROWS];
};
static_assert(sizeof(Smem) <= STATIC_SHARED_LIMIT, "chunk_len x head_size needs more than 48 KB of shared memory");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv7_forward(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_STATE* __restrict__ initial_state,
    const i64* __restrict__ cu_seqlens, T_IO* __restrict__ y, T_STATE* __restrict__ final_state,
    float* __restrict__ checkpoints, float* __restrict__ sa, Strides r_strides, DecayStrides w_strides,
    Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides, i64 tokens, i64 heads, int interval,
    float scale, const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    __shared__ alignas(16) Smem smem;
    const i64 sequence = piece_of(blockIdx.x / heads, wave, waves), head = blockIdx.x % heads;
    const int block_row = blockIdx.y * BLOCK_ROWS;
    const int width = min(BLOCK_ROWS, VALUE_SIZE - block_row);
    if (is_for_others(pieces, sequence, wave)) return;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);

    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
    r += start(r_strides), w += start(w_strides), k += start(k_strides), a += start(a_strides), b += start(b_strides);
    v += start(v_strides) + block_row;
    const i64 y_stride = heads * VALUE_SIZE;
    const i64 y_start = (span.batch * tokens + span.begin) * y_stride + head * VALUE_SIZE + block_row;
    if (y != nullptr) y += y_start;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    float* checkpoint = nullptr;
    if (checkpoints != nullptr)
        checkpoint = checkpoints +
            (first_checkpoint(cu_seqlens, sequence, span, interval) * heads + head) * (VALUE_SIZE * HEAD_SIZE);

    StagedKeys<T_IO> next_r, next_k, next_a, next_b;
    StagedKeys<T_W> next_w;
    StagedValues<T_IO> next_v;
    const auto load = [&](i64 token) {
        const i64 steps = span.length - token;
        next_r.load(r + token * r_strides.token, r_strides.token, steps);
        next_w.load(w + token * w_strides.token, w_strides.token, steps);
        next_k.load(k + token * k_strides.token, k_strides.token, steps);
        next_a.load(a + token * a_strides.token, a_strides.token, steps);
        next_b.load(b + token * b_strides.token, b_strides.token, steps);
        next_v.load(v + token * v_strides.token, v_strides.token, steps, width);
    };

    load(0);
    clear_shared(reinterpret_cast<float*>(&smem), sizeof(Smem) / sizeof(float));
    Rectangle state;
    read_state<STATE_LAYOUT>(state, first_state(initial_state, state_offset, pieces, sequence, head, slot_stride), block_row);
    __syncthreads();

    i64 next_checkpoint = checkpoints != nullptr ? 0 : span.length;
    for (i64 token = 0; token < span.length; token += CHUNK_LEN) {
        const int steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
        next_r.store<PADDED_HEAD>(smem.r[0], steps, 0.0f, [&](float x, int) { return x * scale; });
        next_w.store<PADDED_HEAD>(smem.d[0], steps, 1.0f, [&](float x, int channel) {
            return decay_factor<DECAY>(add_bias(x, w_strides, head, channel));
        });
        next_k.store<PADDED_HEAD>(smem.k[0], steps);
        next_a.store<PADDED_HEAD>(smem.a[0], steps);
        next_b.store<PADDED_HEAD>(smem.b[0], steps);
        next_v.store<BLOCK_ROWS>(smem.v[0], steps, width);
        __syncthreads();
        load(token + CHUNK_LEN);

        const auto step = [&](int s) {
            float a_t[COLUMNS], sa_t[ROWS_PER_THREAD] = {};
            read_columns(a_t, smem.a[s]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) sa_t[i] += state[i][c] * a_t[c];
            write_row_sums(sa_t, smem.sa[s]);

            float v_t[ROWS_PER_THREAD], y_t[ROWS_PER_THREAD] = {};
            float r_t[COLUMNS], d_t[COLUMNS], k_t[COLUMNS], b_t[COLUMNS];
            read_rows(v_t, smem.v[s]);
            read_columns(d_t, smem.d[s]);
            read_columns(k_t, smem.k[s]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) state[i][c] = state[i][c] * d_t[c] + v_t[i] * k_t[c];
            read_row_sums(sa_t, smem.sa[s]);
            read_columns(b_t, smem.b[s]);
            read_columns(r_t, smem.r[s]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) {
                    state[i][c] += sa_t[i] * b_t[c];
                    y_t[i] += state[i][c] * r_t[c];
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
        if (sa != nullptr) write_values(sa + y_start + token * y_stride, y_stride, smem.sa[0], steps, width);
    }
    if (has_last_state(final_state, pieces, sequence))
        write_state<STATE_LAYOUT>(last_state(final_state, state_offset, pieces, sequence, head, slot_stride), state, block_row);
}
