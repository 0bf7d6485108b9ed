// Kimi Delta Attention, forward, 64 tokens after another, with the products of sm_90a. Per head, with q_t and k_t as
// they are behind their norm, c_t[j] the sum of channel j's log-decays up to token t of the chunk and D over all of it,
//
//     L_ts = rate_s sum_j k_t[j] k_s[j] e^(c_t[j] - c_s[j]), s < t    Tm = (I + L)^-1
//     M_ts = scale sum_j q_t[j] k_s[j] e^(c_t[j] - c_s[j]), s <= t
//     U = Tm (V - (K e^c) S_0^T)    Y = scale (Q e^c) S_0^T + M (rate U)    S = S_0 e^D + (rate U)^T (K e^(D - c))
//
//   r k      [batch, tokens, heads / GROUP, K]  T_IO  in   v, y  [batch, tokens, heads, V]  T_IO  in, out
//   g        [batch, tokens, heads, K]  T_W  in; a_log  [heads], dt_bias  [heads, K]  fp32  in, or null: the log-decay
//            is g, -exp(a_log) softplus(g + dt_bias) or lower_bound sigmoid(exp(a_log) (g + dt_bias))
//   beta     [batch, tokens, heads]  T_BETA  in: the rate, or what it is a sigmoid of
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//
// Grid (sequences, heads). Two groups of four warps have 64 value rows of S each, in fp32 registers, and work with
// transposes, [value, token], so that what one product gives is the next one's left operand as it lies in registers.
// Two more make operands and token matrices of the next chunk meanwhile (channel_decay_makers.cuh has what stands
// in their place for chunks in a frame); its rows come to shared memory a chunk ahead. Any decay is safe.
#include "channel_decay_makers.cuh"

static_assert(NUM_THREADS == 512, "num_threads must be 512");

constexpr int MAKERS = 2 * GROUP_THREADS;  // the first of their threads

// Of a thread: the groups have all of a multiprocessor's 65536 together.
constexpr int PRODUCT_REGISTERS = 160, MAKER_REGISTERS = 96;

// Keeps the compiler from rounding later than here, so that what is rounded leaves its registers.
template <int COUNT> __device__ inline void hold(Fragment (&fragments)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragments[i].at[j])::"memory");
}

constexpr int HALF = CHUNK_LEN / 2;
// Sums of values and half of the tokens, times factors of tokens.
__device__ inline void scale_tokens(Accumulator (&sums)[HALF / 8], const float* factors) {
#pragma unroll
    for (int n = 0; n < HALF / 8; ++n) {
        const float2 f = reinterpret_cast<const float2&>(factors[8 * n + 2 * quad_lane()]);
        sums[n][0] *= f.x, sums[n][1] *= f.y, sums[n][2] *= f.x, sums[n][3] *= f.y;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) channel_decay_forward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_BETA* __restrict__ beta, const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const T_STATE* __restrict__ initial_state, const i64* __restrict__ cu_seqlens, T_IO* __restrict__ y,
    T_STATE* __restrict__ final_state, Strides r_strides, Strides k_strides, Strides v_strides, Strides w_strides,
    Strides beta_strides, i64 tokens, i64 heads, float scale, float lower_bound) {
    __builtin_assume(threadIdx.x < NUM_THREADS);
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y, key_head = head / GROUP;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int length = static_cast<int>(span.length), chunks = (length + CHUNK_LEN - 1) / CHUNK_LEN;
    const int warp = warp_id(), lane = lane_id();
    const auto start_of = [&](Strides s, i64 own_head) {
        return span.batch * s.batch + span.begin * s.token + own_head * s.head;
    };
    clear<NUM_THREADS>(smem);  // what is above diagonals stays zero
    publish_writes();
    __syncthreads();
    if (threadIdx.x == 0) {
        begin_barrier(smem.ready, 8), begin_barrier(smem.keys_free, 8), begin_barrier(smem.matrices_free, 8);
        publish_barriers();
    }
    __syncthreads();
    const auto arrive = [&](CopyBarrier& barrier) {
        __syncwarp();
        if (lane == 0) arrive_at<1>(barrier, 0);
    };

    if (warp >= MAKERS / 32) {
        leave_registers<MAKER_REGISTERS>();
        const int slab = warp / 4 - 2, first = BLOCK * (warp % 4);  // the warp's channels, and tokens of a chunk
        Maker maker(smem, slab, Gate(a_log, head, lower_bound), HAS_BIAS ? dt_bias + head * HEAD_SIZE : nullptr);
        // Rows of the warp's tokens and channels: 16 bytes for a lane at once, of ROWS rows of r and k, W_ROWS of w.
        constexpr int ROWS = 32 / 8, PER_UNIT = 16 / sizeof(T_W), UNITS = TILE_COLUMNS / PER_UNIT, W_ROWS = 32 / UNITS;
        const int row = lane / 8, unit = lane % 8, w_row = lane / UNITS;
        const int w_channel = slab * TILE_COLUMNS + lane % UNITS * PER_UNIT;
        r += start_of(r_strides, key_head) + (first + row) * r_strides.token + slab * TILE_COLUMNS + 8 * unit;
        k += start_of(k_strides, key_head) + (first + row) * k_strides.token + slab * TILE_COLUMNS + 8 * unit;
        w += start_of(w_strides, head) + (first + w_row) * w_strides.token + w_channel;
        const T_BETA* no_beta = beta + start_of(beta_strides, head);  // for what is past the last token
        beta = no_beta + (first + lane % BLOCK) * beta_strides.token;
        const auto copy = [&](int chunk) {
            const int present = min(length - chunk * CHUNK_LEN - first, BLOCK);
            if (chunk < chunks) {
#pragma unroll
                for (int i = 0; i < BLOCK; i += ROWS) {
                    const bool is_there = i + row < present;
                    const auto place = [&](Slab<CHUNK_LEN>& to) {
                        return shared_address(&to.units[first + i + row][unit ^ (i + row) % 8]);
                    };
                    copy_async<16>(place(smem.q[slab]), r + i * r_strides.token, is_there);
                    copy_async<16>(place(smem.k[slab]), k + i * k_strides.token, is_there);
                }
#pragma unroll
                for (int i = 0; i < BLOCK; i += W_ROWS)
                    copy_async<16>(shared_address(&smem.w[first + i + w_row][w_channel]), w + i * w_strides.token,
                                   i + w_row < present);
            }
            commit_copies();
            r += CHUNK_LEN * r_strides.token, k += CHUNK_LEN * k_strides.token, w += CHUNK_LEN * w_strides.token;
        };
        copy(0);

        for (int chunk = 0; chunk < chunks; ++chunk) {
            maker.chunk = chunk, maker.steps = length - chunk * CHUNK_LEN;
            Factors& factors = smem.factors[chunk % 2];
            const auto of_beta = load_early<Words<T_BETA, 1>>(first + lane % BLOCK < maker.steps ? beta : no_beta);
            beta += CHUNK_LEN * beta_strides.token;
            wait_for_copies<0>();
            __syncwarp();  // the warp's rows are there
            maker.multiply_rows();
            const auto copy_next = [&] { copy(chunk + 1); };
            const bool in_frame = maker.make_in_frame(factors, of_beta.at(0), scale, copy_next);
            if (!in_frame) maker.make_by_halves(factors, copy_next);
            __syncwarp();
            if (slab == 0) maker.solve();
            publish_writes();
            arrive(smem.ready);
            Maker::synchronize();  // token matrices are there, and nobody reads -L any more
        }
        wait_for_copies<0>();
    } else {
        take_registers<PRODUCT_REGISTERS>();
        const int half = warp / 4, first_value = 16 * warp, own = first_value % TILE_COLUMNS;
        const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
        const i64 y_stride = heads * VALUE_SIZE;
        const i64 y_start = (span.batch * tokens + span.begin) * y_stride + head * VALUE_SIZE + first_value;
        v += start_of(v_strides, head) + first_value;
        y += y_start;
        // The warp's values of all tokens: rows of 32 bytes.
        const int row_of_lane = lane / 2, unit = own / 8 + lane % 2;
        const auto copy = [&](int chunk) {
            if (chunk < chunks) {
                Slab<CHUNK_LEN>& slab = smem.values[chunk % 2][half];
                const int present = length - chunk * CHUNK_LEN;
#pragma unroll
                for (int i = 0; i < CHUNK_LEN; i += 16) {
                    const int row = i + row_of_lane;
                    copy_async<16>(shared_address(&slab.units[row][unit ^ row % 8]),
                                   v + ((i64(chunk) * CHUNK_LEN + row) * v_strides.token + lane % 2 * 8),
                                   row < present);
                }
            }
            commit_copies();
        };
        const auto write = [&](T_IO* target, const Slab<CHUNK_LEN>& slab, int steps) {
            uint4 held[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * i + row_of_lane;
                held[i] = slab.units[row][unit ^ row % 8];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * i + row_of_lane;
                if (row < steps) write_global(target + (row * y_stride + lane % 2 * 8), held[i]);
            }
        };
        copy(0);
        StateRows state;
        read_state<STATE_LAYOUT>(state, initial_state == nullptr ? nullptr : initial_state + state_offset, first_value);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int parity = chunk % 2, steps = length - chunk * CHUNK_LEN;
            const Factors& factors = smem.factors[parity];
            const auto values = tile_of(smem.values[parity][half]);
            wait_for(smem.ready, parity);
            Fragment rows[HEAD_SIZE / 16];
#pragma unroll
            for (int c = 0; c < HEAD_SIZE / 16; ++c) {
                Accumulator own[2];
#pragma unroll
                for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = state[2 * c + i / 4][i % 4];
                scale_columns<1>(own[0], factors.begin, 2 * c), scale_columns<1>(own[1], factors.begin, 2 * c + 1);
                rows[c] = to_fragment(own[0], own[1]);
            }
            hold(rows);
            wait_for_copies<0>();
            __syncwarp();  // the values are there, and nobody reads the last Y any more
            copy(chunk + 1);

            // X <- S_0 (K e^c)^T
            Accumulator x[CHUNK_LEN / 8] = {};
            begin_products();
#pragma unroll
            for (int c = 0; c < HEAD_SIZE; c += 16)
                multiply_group<64, Read::rows>(c == 0, x, rows[c / 16],
                                               descriptor(tile_of(smem.erased[c / TILE_COLUMNS]), 0, c % TILE_COLUMNS));
            end_batch();
            wait_for_batches<0>();
            hold(x);
            // V - X, then U <- Tm (V - X)
            Fragment w_rows[BLOCKS];
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                const Fragment of_v = load_left_transposed(values, 16 * q, own);
                Accumulator sums[2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 f = *reinterpret_cast<const float2*>(&factors.of_k[16 * q + 8 * n + 2 * quad_lane()]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const unsigned word = of_v.at[2 * n + j];
                        sums[n][2 * j] = low_of(word) - f.x * x[2 * q + n][2 * j];
                        sums[n][2 * j + 1] = high_of(word) - f.y * x[2 * q + n][2 * j + 1];
                    }
                }
                w_rows[q] = to_fragment(sums[0], sums[1]);
            }
            hold(w_rows);
            // Half of U and of Y at a time, as registers are few. Above the diagonals of Tm and M there are zeros.
            Fragment written[BLOCKS];
#pragma unroll
            for (int h = 1; h >= 0; --h) {
                Accumulator u[HALF / 8] = {};
                begin_products();
#pragma unroll
                for (int q = 0; q < 2 + 2 * h; ++q)
                    multiply_group<HALF, Read::rows>(q == 0, u, w_rows[q],
                                                     descriptor(tile_of(smem.matrices.tm), HALF * h, 16 * q));
                end_batch();
                wait_for_batches<0>();
                hold(u);
                scale_tokens(u, &factors.written[HALF * h]);
                written[2 * h] = to_fragment(u[0], u[1]), written[2 * h + 1] = to_fragment(u[2], u[3]);
            }
            hold(written);
            scale_columns<1>(state, factors.end);
            // Y <- S_0 (Q e^c)^T + M (rate U)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Accumulator out[HALF / 8] = {};
                begin_products();
#pragma unroll
                for (int c = 0; c < HEAD_SIZE; c += 16)
                    multiply_group<HALF, Read::rows>(
                        c == 0, out, rows[c / 16],
                        descriptor(tile_of(smem.read[c / TILE_COLUMNS]), HALF * h, c % TILE_COLUMNS));
                end_batch();
                wait_for_batches<0>();
                hold(out);
                if (h == 1) arrive(smem.keys_free);
                scale_tokens(out, &factors.of_q[HALF * h]);
                begin_products();
#pragma unroll
                for (int q = 0; q < 2 + 2 * h; ++q)
                    multiply_group<HALF, Read::rows>(out, written[q],
                                                     descriptor(tile_of(smem.matrices.m), HALF * h, 16 * q));
                end_batch();
                wait_for_batches<0>();
                hold(out);
                if (h == 1) arrive(smem.matrices_free);
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    store_block_transposed(values, HALF * h + 16 * q, own, to_fragment(out[2 * q], out[2 * q + 1]));
            }
            // S <- S + (rate U)^T K e^(D - c)
            begin_products();
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    multiply_group<64, Read::columns>(&state[8 * slab], written[q],
                                                      descriptor(tile_of(smem.written[parity][slab]), 16 * q, 0));
            end_batch();
            __syncwarp();
            write(y, smem.values[parity][half], steps);
            y += CHUNK_LEN * y_stride;
            wait_for_batches<0>();
            hold(state);
        }
        wait_for_copies<0>();
        if (chunks > 0) scale_columns<1>(state, smem.finish);
        if (final_state != nullptr) write_state<STATE_LAYOUT>(final_state + state_offset, state, first_value);
    }
}
