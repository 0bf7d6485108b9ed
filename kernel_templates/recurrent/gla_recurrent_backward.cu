// Gated linear attention, backward. With E_t = dL/dS_t from later tokens and delta_t = v_t . dy_t, with BONUS:
//
//     dr_t = scale (S_{t-1}^T dy_t + delta_t u * k_t);   dk_t = E_t^T v_t + scale delta_t u * r_t;
//     dv_t = E_t k_t + scale (sum_j u_j r_tj k_tj) dy_t;   du = scale sum_t delta_t r_t * k_t;
//     dd_t = sum_v E_t * S_{t-1};   dw_t = dd_t slope(w_t);   E_{t-1} = E_t diag(d_t) + scale dy_t r_t^T
//
// Without, y_t sees S_t, so with G_t = E_t + scale dy_t r_t^T:
//
//     dr_t = scale S_t^T dy_t = scale (d_t * S_{t-1}^T dy_t + delta_t k_t);   dk_t = G_t^T v_t;   dv_t = G_t k_t;
//     dd_t = sum_v G_t * S_{t-1};   dw_t = dd_t slope(w_t);   E_{t-1} = G_t diag(d_t)
//
//   r k v w u, cu_seqlens, checkpoints   as in the forward       dy  [batch, tokens, heads, V]  T_IO  in
//   grad_final_state    [sequences, heads, V, K] or kv  fp32  in or null
//   dr dk  T_IO, dw  T_W  [batch, tokens, heads, K];   dv  T_IO  [batch, tokens, heads, V]   out
//   du, and with CONSTANT_DECAY dw  [sequences, heads, K]  fp32  out: to be added over the sequences
//   dw is null with Decay::none, du without BONUS
//   grad_initial_state  [sequences, heads, V, K] or kv  fp32  out or null
//   scratch  [gridDim.x, scratch_stride]  fp32
//
// The states are recomputed forward, never by dividing by the decay, so any decay is safe. From the checkpoint at
// the start of an interval pass A runs forward and saves the state every HELD_STATES tokens (scratch, which stays in
// L2). Pass B walks back over these pieces: it rebuilds a piece's states in registers, where each step needs S_{t-1}
// and E_t at once, and goes through them in reverse.
//
// One block per (sequence, head), in a loop, since a resident block owns a piece of scratch. A block takes the
// value rows ROW_BLOCKS pieces at a time, one after the other in every interval: sums over rows are added in a
// fixed order by the thread that owns them, so results are the same bit for bit from run to run.
#include "column_sums.cuh"
#include "gla_decay_gradient.cuh"

static_assert(HELD_STATES >= 1 && CHUNK_LEN % HELD_STATES == 0, "held_states must divide chunk_len");

constexpr bool TOKEN_DECAY = DECAY != Decay::none && !CONSTANT_DECAY;  // every token has a dw of its own
constexpr int SUMS = TOKEN_DECAY ? 3 : 2;  // dr dd dk, or dr dk: sums over the value rows
constexpr int DK = SUMS - 1;
constexpr int RECTANGLE = ROWS_PER_THREAD * COLUMNS * NUM_THREADS;
constexpr int PIECES = CHUNK_LEN / HELD_STATES;
constexpr int STATE_SIZE = VALUE_SIZE * HEAD_SIZE;
constexpr int STAGED_FLOATS = CHUNK_LEN * (4 * PADDED_HEAD + 3 * BLOCK_ROWS);
constexpr int FLUSH_LEN = flush_len<SUMS>(HELD_STATES, STAGED_FLOATS * static_cast<int>(sizeof(float)));

struct Smem {
    float r[CHUNK_LEN][PADDED_HEAD], d[CHUNK_LEN][PADDED_HEAD], k[CHUNK_LEN][PADDED_HEAD];
    float slope[CHUNK_LEN][PADDED_HEAD];  // dd/dw
    float v[CHUNK_LEN][BLOCK_ROWS], dy[CHUNK_LEN][BLOCK_ROWS], dv[CHUNK_LEN][BLOCK_ROWS];
    alignas(16) SumParts<SUMS> sums[FLUSH_LEN];  // BLOCK_ROWS may be less than four floats
};
static_assert(sizeof(Smem) <= STATIC_SHARED_LIMIT, "chunk_len x head_size needs more than 48 KB of shared memory");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gla_backward(
    const T_IO* __restrict__ r_all, const T_IO* __restrict__ k_all, const T_IO* __restrict__ v_all,
    const T_W* __restrict__ w_all, const T_U* __restrict__ u_all, const T_IO* __restrict__ dy_all,
    const i64* __restrict__ cu_seqlens, const float* __restrict__ checkpoints,
    const float* __restrict__ grad_final_state, T_IO* __restrict__ dr_all, T_IO* __restrict__ dk_all,
    T_IO* __restrict__ dv_all, T_DW* __restrict__ dw_all, float* __restrict__ du_all,
    float* __restrict__ grad_initial_state, float* __restrict__ scratch_all, Strides r_strides, Strides k_strides,
    Strides v_strides, Strides w_strides, Strides dy_strides, i64 tokens, i64 heads, i64 sequences, i64 scratch_stride,
    int interval, float scale) {
    __shared__ alignas(16) Smem smem;
    clear_shared(reinterpret_cast<float*>(&smem), sizeof(Smem) / sizeof(float));

    // This block's scratch: E, the states at piece starts, and the sums over the row blocks done so far.
    const i64 most_chunks = (interval + CHUNK_LEN - 1) / CHUNK_LEN;
    float* const saved_e = scratch_all + blockIdx.x * scratch_stride;
    float* const saved_state = saved_e + i64(ROW_BLOCKS) * RECTANGLE;
    float* const saved_sums = saved_state + most_chunks * PIECES * RECTANGLE;

    for (i64 item = blockIdx.x; item < sequences * heads; item += gridDim.x) {
        const i64 sequence = item / heads, head = item % heads;
        const Span span = sequence_span(cu_seqlens, sequence, tokens);
        const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
        const i64 out_row = (span.batch * tokens + span.begin) * heads + head;  // outputs are contiguous
        const float* const first_state =
            checkpoints + (first_checkpoint(cu_seqlens, sequence, span, interval) * heads + head) * STATE_SIZE;

        Rectangle e;
        float bonus[COLUMNS] = {}, du[COLUMNS] = {}, dw[COLUMNS] = {};
        if constexpr (BONUS) read_channels(bonus, u_all + head * HEAD_SIZE);
        for (int rows = 0; rows < ROW_BLOCKS; ++rows) {
            const float* const last = grad_final_state ? grad_final_state + item * STATE_SIZE : nullptr;
            read_state<STATE_LAYOUT>(e, last, rows * BLOCK_ROWS);
            save_rectangle(saved_e + i64(rows) * RECTANGLE, e);
        }

        for (i64 index = (span.length + interval - 1) / interval - 1; index >= 0; --index) {
            const i64 begin = index * interval;
            const int length = static_cast<int>(min(span.length - begin, i64(interval)));
            const int chunks = (length + CHUNK_LEN - 1) / CHUNK_LEN, pieces = (length + HELD_STATES - 1) / HELD_STATES;
            const T_IO* const r = r_all + start(r_strides) + begin * r_strides.token;
            const T_IO* const k = k_all + start(k_strides) + begin * k_strides.token;
            const T_W* const w = w_all + start(w_strides) + begin * w_strides.token;
            const i64 key_row = (out_row + begin * heads) * HEAD_SIZE;

            for (int rows = 0; rows < ROW_BLOCKS; ++rows) {
                const int block_row = rows * BLOCK_ROWS;
                const int width = min(BLOCK_ROWS, VALUE_SIZE - block_row);
                const T_IO* const v = v_all + start(v_strides) + begin * v_strides.token + block_row;
                const T_IO* const dy = dy_all + start(dy_strides) + begin * dy_strides.token + block_row;
                T_IO* const dv = dv_all + (out_row + begin * heads) * VALUE_SIZE + block_row;

                StagedKeys<T_IO> next_r, next_k;
                StagedKeys<T_W> next_w;
                StagedValues<T_IO> next_v, next_dy;
                const auto load_forward = [&](int token) {
                    const int steps = length - token;
                    if constexpr (DECAY != Decay::none)
                        next_w.load(w + token * w_strides.token, w_strides.token, steps);
                    next_k.load(k + token * k_strides.token, k_strides.token, steps);
                    next_v.load(v + token * v_strides.token, v_strides.token, steps, width);
                };
                const auto store_forward = [&](int steps) {
                    if constexpr (DECAY != Decay::none)
                        next_w.store<PADDED_HEAD>(smem.d[0], steps, 1.0f,
                                                  [](float x, int) { return decay_factor<DECAY>(x); });
                    next_k.store<PADDED_HEAD>(smem.k[0], steps);
                    next_v.store<BLOCK_ROWS>(smem.v[0], steps, width);
                };
                const auto advance = [&](const Rectangle& from, Rectangle& to, int s) {
                    float v_t[ROWS_PER_THREAD], d_t[COLUMNS], k_t[COLUMNS];
                    read_rows(v_t, smem.v[s]);
                    read_factors(d_t, smem.d[s]);
                    read_columns(k_t, smem.k[s]);
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                        for (int i = 0; i < ROWS_PER_THREAD; ++i) to[i][c] = from[i][c] * d_t[c] + v_t[i] * k_t[c];
                };

                // Pass A. Past the end of the sequence d = 1 and all else is 0, which leaves the state as it is.
                load_forward(0);
                Rectangle state;
                read_state<StateLayout::vk>(state, first_state + index * heads * STATE_SIZE, block_row);
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    __syncthreads();
                    store_forward(length - chunk * CHUNK_LEN);
                    __syncthreads();
                    load_forward((chunk + 1) * CHUNK_LEN);
#pragma unroll 1
                    for (int s = 0; s < CHUNK_LEN; ++s) {
                        if (s % HELD_STATES == 0)
                            save_rectangle(saved_state + (i64(chunk) * PIECES + s / HELD_STATES) * RECTANGLE, state);
                        advance(state, state, s);
                    }
                }

                // Pass B.
                __syncthreads();
                restore_rectangle(e, saved_e + i64(rows) * RECTANGLE);
                const auto load_backward = [&](int chunk) {
                    if (chunk < 0) return;
                    const int token = chunk * CHUNK_LEN, steps = length - token;
                    load_forward(token);
                    next_r.load(r + token * r_strides.token, r_strides.token, steps);
                    next_dy.load(dy + token * dy_strides.token, dy_strides.token, steps, width);
                };
                load_backward(chunks - 1);
                Rectangle next_state;
                restore_rectangle(next_state, saved_state + i64(pieces - 1) * RECTANGLE);
#pragma unroll 1
                for (int piece = pieces - 1; piece >= 0; --piece) {
                    const int token = piece * HELD_STATES, first = token % CHUNK_LEN, chunk = token / CHUNK_LEN;
                    float states[HELD_STATES][ROWS_PER_THREAD][COLUMNS];  // S before each of the tokens
                    copy_rectangle(states[0], next_state);
                    if (piece == pieces - 1 || first == CHUNK_LEN - HELD_STATES) {
                        const int steps = length - chunk * CHUNK_LEN;
                        store_forward(steps);
                        next_r.store<PADDED_HEAD>(smem.r[0], steps, 0.0f, [&](float x, int) { return x * scale; });
                        if constexpr (DECAY != Decay::none)
                            next_w.store<PADDED_HEAD>(smem.slope[0], steps, 0.0f,
                                                      [](float x, int) { return decay_slope<DECAY>(x); });
                        next_dy.store<BLOCK_ROWS>(smem.dy[0], steps, width);
                        __syncthreads();
                        load_backward(chunk - 1);
                    }

#pragma unroll
                    for (int s = 0; s + 1 < HELD_STATES; ++s) advance(states[s], states[s + 1], first + s);

#pragma unroll
                    for (int s = HELD_STATES - 1; s >= 0; --s) {
                        const int at = first + s;
                        // The states of later tokens are done with, which leaves room for the next piece's.
                        if (s == HELD_STATES / 4 && piece > 0)
                            restore_rectangle(next_state, saved_state + i64(piece - 1) * RECTANGLE);
                        const Rectangle& before = states[s];
                        float dy_t[ROWS_PER_THREAD], v_t[ROWS_PER_THREAD], dv_t[ROWS_PER_THREAD] = {};
                        float r_t[COLUMNS], d_t[COLUMNS], k_t[COLUMNS], sums[SUMS][COLUMNS] = {};
                        read_rows(dy_t, smem.dy[at]);
                        read_rows(v_t, smem.v[at]);
                        read_columns(r_t, smem.r[at]);
                        read_columns(k_t, smem.k[at]);
                        read_factors(d_t, smem.d[at]);
                        float slope_t[COLUMNS] = {};  // 0 past the end of the sequence
                        if constexpr (CONSTANT_DECAY) read_columns(slope_t, smem.slope[at]);
                        float delta = 0.0f, bonus_t = 0.0f;
#pragma unroll
                        for (int i = 0; i < ROWS_PER_THREAD; ++i) delta += v_t[i] * dy_t[i];
#pragma unroll
                        for (int c = 0; c < COLUMNS; ++c) {
                            if constexpr (BONUS) {
                                bonus_t += bonus[c] * r_t[c] * k_t[c];
                                du[c] += delta * r_t[c] * k_t[c];
                                sums[0][c] = delta * bonus[c] * k_t[c];
                                sums[DK][c] = delta * bonus[c] * r_t[c];
                            }
                            float dd = 0.0f;
#pragma unroll
                            for (int i = 0; i < ROWS_PER_THREAD; ++i) {
                                if constexpr (!BONUS) e[i][c] += dy_t[i] * r_t[c];
                                dv_t[i] += e[i][c] * k_t[c];
                                sums[0][c] += before[i][c] * dy_t[i];
                                dd += before[i][c] * e[i][c];
                                sums[DK][c] += e[i][c] * v_t[i];
                                e[i][c] *= d_t[c];
                                if constexpr (BONUS) e[i][c] += dy_t[i] * r_t[c];
                            }
                            if constexpr (!BONUS) sums[0][c] = sums[0][c] * d_t[c] + delta * k_t[c];
                            if constexpr (TOKEN_DECAY) sums[1][c] = dd;
                            if constexpr (CONSTANT_DECAY) dw[c] += dd * slope_t[c];
                        }
                        if constexpr (BONUS) {
#pragma unroll
                            for (int i = 0; i < ROWS_PER_THREAD; ++i) dv_t[i] += bonus_t * dy_t[i];
                        }
                        write_row_sums(dv_t, smem.dv[at]);
                        write_column_sums<SUMS>(smem.sums[s % FLUSH_LEN], sums);

                        if (s % FLUSH_LEN == 0) {
                            __syncthreads();
                            const auto emit = [&](int sum, int step, int channel, Pack<float, 4> total) {
                                const int slot = at + step;
                                if (sum == 0) {
#pragma unroll
                                    for (int i = 0; i < 4; ++i) total.at[i] *= scale;
                                }
                                const i64 at_token = token + s + step;
                                float* const running = saved_sums + (at_token * SUMS + sum) * PADDED_HEAD + channel;
                                if (!add_row_blocks(total, running, rows)) return;
                                const i64 out = key_row + at_token * heads * HEAD_SIZE;
                                if (TOKEN_DECAY && sum == 1) {
#pragma unroll
                                    for (int i = 0; i < 4; ++i) total.at[i] *= smem.slope[slot][channel + i];
                                    write_pack(dw_all + out, total, channel);
                                } else {
                                    write_pack((sum == 0 ? dr_all : dk_all) + out, total, channel);
                                }
                            };
                            add_up_parts<SUMS>(smem.sums, length - token - s, emit);
                            __syncthreads();
                        }
                    }
                    if (first == 0) {
                        const int steps = min(length - token, CHUNK_LEN);
                        write_values(dv + i64(token) * heads * VALUE_SIZE, heads * VALUE_SIZE, smem.dv[0], steps,
                                     width);
                    }
                }
                save_rectangle(saved_e + i64(rows) * RECTANGLE, e);
            }
        }

        // du, and the dw of a constant decay, take the places of sums over the value rows, over the whole sequence.
        if constexpr (BONUS || CONSTANT_DECAY) {
            float totals[SUMS][COLUMNS] = {};
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                totals[0][c] = du[c];
                if constexpr (CONSTANT_DECAY) totals[1][c] = dw[c];
            }
            __syncthreads();
            write_column_sums<SUMS>(smem.sums[0], totals);
            __syncthreads();
            add_up_parts<SUMS>(smem.sums, 1, [&](int sum, int, int channel, const Pack<float, 4>& total) {
                if (BONUS && sum == 0) write_pack(du_all + item * HEAD_SIZE, total, channel);
                if (CONSTANT_DECAY && sum == 1) write_pack(dw_all + item * HEAD_SIZE, total, channel);
            });
        }
        if (grad_initial_state != nullptr)
            for (int rows = 0; rows < ROW_BLOCKS; ++rows) {
                restore_rectangle(e, saved_e + i64(rows) * RECTANGLE);
                write_state<STATE_LAYOUT>(grad_initial_state + item * STATE_SIZE, e, rows * BLOCK_ROWS);
            }
    }
}
