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
//   states, matrices  [slots of 64 tokens, heads]  S_0, Tm and M; kept_u  as y  T_IO: U; with KEEPS  out
//
// Grid (sequences, heads). Two groups of four warps have 64 value rows of S each, in fp32 registers, and work with
// transposes, [value, token], so that what one product gives is the next one's left operand as it lies in registers.
// Meanwhile two more make operands and token matrices of the next chunk, in the frames of channel_decay_makers.cuh. Its
// rows take the places of its queries and keys, and there is room for those of two chunks. Any decay is safe.
#include "channel_decay_makers.cuh"

static_assert(NUM_THREADS == 512, "num_threads must be 512");

constexpr int MAKERS = 2 * GROUP_THREADS;  // the first of their threads

// Of a thread: the groups have all of a multiprocessor's 65536 together.
constexpr int PRODUCT_REGISTERS = 160, MAKER_REGISTERS = 96;

constexpr int HALF = CHUNK_LEN / 2;
// Sums of values and half of the tokens, times factors of tokens.
__device__ inline void scale_tokens(Accumulator (&sums)[HALF / 8], const float* factors) {
#pragma unroll
    for (int n = 0; n < HALF / 8; ++n) {
        const float2 f = reinterpret_cast<const float2&>(factors[8 * n + 2 * quad_lane()]);
        sums[n][0] *= f.x, sums[n][1] *= f.y, sums[n][2] *= f.x, sums[n][3] *= f.y;
    }
}

// sum[64, 16] += left[64, 16] right[16, 16], as multiply_group; without ADD what was in the sum is lost.
template <bool ADD> __device__ inline void multiply_narrow(Accumulator* s, const Fragment& left,
                                                           unsigned long long right) {
#define MULTIPLY_NARROW(TYPE)                                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                                    \
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, %13, 1, 1, 0;"                    \
                 : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]),    \
                   "+f"(s[1][2]), "+f"(s[1][3])                                                                 \
                 : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "l"(right), "n"(ADD))
    if constexpr (is_bf16<T_IO>) MULTIPLY_NARROW("bf16");
    else MULTIPLY_NARROW("f16");
#undef MULTIPLY_NARROW
}
// Sums of values and block p of the tokens: the state's rows, as they are in the block's frame, times rows of keys and
// of queries.
__device__ inline void multiply_block(Accumulator (&of_keys)[2], Accumulator (&of_queries)[2], const StateRows& state,
                                      const Powers& power, const Rows& rows, int p) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        Fragment left[TILE_COLUMNS / 16];
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS / 16; ++c) {
            const int n = 2 * (slab * TILE_COLUMNS / 16 + c);
            left[c] = to_fragment(state[n], state[n + 1]);
        }
        power.multiply(left, slab);
        hold(left);
        begin_products();
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS / 16; ++c) {
            const auto k = descriptor(tile_of(rows.k[slab]), 16 * p, 16 * c);
            const auto q = descriptor(tile_of(rows.q[slab]), 16 * p, 16 * c);
            if (slab == 0 && c == 0) {
                multiply_narrow<false>(of_keys, left[c], k), multiply_narrow<false>(of_queries, left[c], q);
            } else {
                multiply_narrow<true>(of_keys, left[c], k), multiply_narrow<true>(of_queries, left[c], q);
            }
        }
        end_batch();
        wait_for_batches<0>();
        hold(of_keys), hold(of_queries);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) channel_decay_forward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_BETA* __restrict__ beta, const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const T_STATE* __restrict__ initial_state, const i64* __restrict__ cu_seqlens, T_IO* __restrict__ y,
    T_STATE* __restrict__ final_state, StateTiles* __restrict__ states, TokenMatrices* __restrict__ matrices,
    T_IO* __restrict__ kept_u, Strides r_strides, Strides k_strides, Strides v_strides, Strides w_strides,
    Strides beta_strides, i64 tokens, i64 heads, float scale, float lower_bound) {
    __builtin_assume(threadIdx.x < NUM_THREADS);
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y, key_head = head / GROUP;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int length = static_cast<int>(span.length), chunks = (length + CHUNK_LEN - 1) / CHUNK_LEN;
    const int warp = warp_id(), lane = lane_id();
    const i64 first_chunk = KEEPS ? first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) * heads + head : 0;
    const auto start_of = [&](Strides s, i64 own_head) {
        return span.batch * s.batch + span.begin * s.token + own_head * s.head;
    };
    clear<NUM_THREADS>(smem);  // what is above diagonals stays zero
    publish_writes();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i)
            begin_barrier(smem.ready[i], 8), begin_barrier(smem.rows_free[i], 8), begin_barrier(smem.free[i], 8);
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
        RowCopies<Smem> copies(smem, slab, first, r + start_of(r_strides, key_head), k + start_of(k_strides, key_head),
                               w + start_of(w_strides, head), r_strides, k_strides, w_strides);
        const T_BETA* no_beta = beta + start_of(beta_strides, head);  // for what is past the last token
        beta = no_beta + (first + lane % BLOCK) * beta_strides.token;
        const auto copy_gates = [&](int chunk) {
            copies.copy_gates<1>(chunk < chunks, length - chunk * CHUNK_LEN, w_strides);
        };
        const auto copy_rows = [&](int chunk) {
            copies.copy_rows<1>(smem.rows[chunk % 2], chunk < chunks, length - chunk * CHUNK_LEN, r_strides, k_strides);
        };
        copy_gates(0), copy_rows(0);

        for (int chunk = 0; chunk < chunks; ++chunk) {
            maker.chunk = chunk, maker.steps = length - chunk * CHUNK_LEN;
            const auto of_beta = load_early<Words<T_BETA, 1>>(first + lane % BLOCK < maker.steps ? beta : no_beta);
            beta += CHUNK_LEN * beta_strides.token;
            wait_for_copies<0>();
            __syncwarp();  // the warp's rows are there
            maker.multiply_rows();
            maker.make(smem.factors[chunk % 2], of_beta.at(0), scale, [&] { copy_gates(chunk + 1); }, [&] {
                if (chunk > 0) wait_for(smem.rows_free[(chunk - 1) % 2], (chunk - 1) / 2 % 2);
                copy_rows(chunk + 1);
            });
            __syncwarp();
            if (slab == 0) maker.solve();
            publish_writes();
            arrive(smem.ready[chunk % 2]);
            Maker::synchronize();  // token matrices are there
            if constexpr (KEEPS) maker.keep(matrices[first_chunk + chunk * heads]);
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
        if constexpr (KEEPS) kept_u += y_start, states += first_chunk;
        // The warp's values of all tokens: rows of 32 bytes.
        const auto copy = [&](int chunk) {
            if (chunk < chunks) {
                const int fresh = fresh_lane(), row_of_lane = fresh / 2, unit = own / 8 + fresh % 2;
                Slab<CHUNK_LEN>& slab = smem.values[chunk % 2][half];
                const int present = length - chunk * CHUNK_LEN;
#pragma unroll
                for (int i = 0; i < CHUNK_LEN; i += 16) {
                    const int row = i + row_of_lane;
                    copy_async<16>(shared_address(&slab.units[row][unit ^ row % 8]),
                                   v + ((i64(chunk) * CHUNK_LEN + row) * v_strides.token + fresh % 2 * 8),
                                   row < present);
                }
            }
            commit_copies();
        };
        const auto write = [&](T_IO* target, const Slab<CHUNK_LEN>& slab, int steps) {
            const int fresh = fresh_lane(), row_of_lane = fresh / 2, unit = own / 8 + fresh % 2;
            uint4 held[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * i + row_of_lane;
                held[i] = slab.units[row][unit ^ row % 8];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * i + row_of_lane;
                if (row < steps) write_global(target + (row * y_stride + fresh % 2 * 8), held[i]);
            }
        };
        copy(0);
        StateRows state;
        read_state<STATE_LAYOUT>(state, initial_state == nullptr ? nullptr : initial_state + state_offset, first_value);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            int parity = chunk % 2;
            const int steps = length - chunk * CHUNK_LEN;
            const Factors& factors = smem.factors[parity];
            const auto values = tile_of(smem.values[parity][half]);
            // Their places are found anew: kept, they would not fit into the registers.
            const auto of_chunk = [&]() -> Rows& {
                asm volatile("" : "+r"(parity));
                return smem.rows[parity];
            };
            const auto of_tokens = [&]() -> TokenMatrices& {
                asm volatile("" : "+r"(parity));
                return smem.matrices[AHEAD == 1 ? 0 : parity];
            };
            wait_for(smem.ready[parity], chunk / 2 % 2);
            if constexpr (KEEPS) {
#pragma unroll
                for (int c = 0; c < HEAD_SIZE / 16; ++c)
                    write_tiles(*states, first_value, c, to_fragment(state[2 * c], state[2 * c + 1]));
                states += heads;
            }
            wait_for_copies<0>();
            __syncwarp();  // the values are there, and nobody reads the last Y any more
            copy(chunk + 1);

            // X <- S_0 (K e^c)^T and Y <- scale S_0 (Q e^c)^T, block by block, each in its frame; then V - X
            Accumulator out[CHUNK_LEN / 8];
            Fragment w_rows[BLOCKS];
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p) {
                Accumulator x[2] = {}, of_queries[2] = {};
                multiply_block(x, of_queries, state, smem.from_start[parity][p], of_chunk(), p);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 f = *reinterpret_cast<const float2*>(&factors.of_q[16 * p + 8 * n + 2 * quad_lane()]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) out[2 * p + n][j] = of_queries[n][j] * (j % 2 ? f.y : f.x);
                }
                const Fragment of_v = load_left_transposed(values, 16 * p, own);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 f = *reinterpret_cast<const float2*>(&factors.of_k[16 * p + 8 * n + 2 * quad_lane()]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const unsigned word = of_v.at[2 * n + j];
                        x[n][2 * j] = low_of(word) - f.x * x[n][2 * j];
                        x[n][2 * j + 1] = high_of(word) - f.y * x[n][2 * j + 1];
                    }
                }
                w_rows[p] = to_fragment(x[0], x[1]);
            }
            arrive(smem.rows_free[parity]);
            hold(w_rows);
            // U <- Tm (V - X). Half of U and of Y at a time, as registers are few. Above the diagonals of Tm and M
            // there are zeros.
            Fragment written[BLOCKS];
#pragma unroll
            for (int h = 1; h >= 0; --h) {
                Accumulator u[HALF / 8] = {};
                begin_products();
#pragma unroll
                for (int q = 0; q < 2 + 2 * h; ++q)
                    multiply_group<HALF, Read::rows>(q == 0, u, w_rows[q],
                                                     descriptor(tile_of(of_tokens().tm), HALF * h, 16 * q));
                end_batch();
                wait_for_batches<0>();
                hold(u);
                if constexpr (KEEPS)
#pragma unroll
                    for (int q = 0; q < 2; ++q)
                        store_block_transposed(values, HALF * h + 16 * q, own, to_fragment(u[2 * q], u[2 * q + 1]));
                scale_tokens(u, &factors.written[HALF * h]);
                written[2 * h] = to_fragment(u[0], u[1]), written[2 * h + 1] = to_fragment(u[2], u[3]);
            }
            hold(written);
            if constexpr (KEEPS) {
                __syncwarp();
                write(kept_u, smem.values[parity][half], steps);
                kept_u += CHUNK_LEN * y_stride;
                __syncwarp();  // nobody reads U any more
            }
            // Y <- Y + M (rate U)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Accumulator sum[HALF / 8] = {};
                begin_products();
#pragma unroll
                for (int q = 0; q < 2 + 2 * h; ++q)
                    multiply_group<HALF, Read::rows>(q == 0, sum, written[q],
                                                     descriptor(tile_of(of_tokens().m), HALF * h, 16 * q));
                end_batch();
                wait_for_batches<0>();
                hold(sum);
#pragma unroll
                for (int i = 0; i < HALF / 8; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[i][j] += out[HALF / 8 * h + i][j];
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    store_block_transposed(values, HALF * h + 16 * q, own, to_fragment(sum[2 * q], sum[2 * q + 1]));
            }
            // S <- S e^D + (rate U)^T K e^(D - c)
            scale_columns<1>(state, factors.end);
            begin_products();
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    multiply_group<64, Read::columns>(&state[8 * slab], written[q],
                                                      descriptor(tile_of(of_chunk().written[slab]), 16 * q, 0));
            end_batch();
            __syncwarp();
            write(y, smem.values[parity][half], steps);
            y += CHUNK_LEN * y_stride;
            wait_for_batches<0>();
            hold(state);
            arrive(smem.free[parity]);
        }
        wait_for_copies<0>();
        if (final_state != nullptr) write_state<STATE_LAYOUT>(final_state + state_offset, state, first_value);
    }
}
