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
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null; with
//            POOLED slots of a pool (pooled.cuh)
//   states, matrices  [slots of 64 tokens, heads]  S_0, Tm and M; kept_u  as y  T_IO: U; with KEEPS  out
//
// Grid (sequences, heads). Two groups of four warps have 64 value rows of S each, in fp32 registers, and work with
// transposes, [value, token], so that what one product gives is the next one's left operand as it lies in registers.
// Before that they make M, and take rows from the frames of channel_decay_makers.cuh to the chunk's start. Meanwhile
// two more groups make operands and Tm of the next chunk. Its rows take the places of its queries and keys, and there
// is room for those of two chunks. Any decay is safe.
#include "channel_decay_makers.cuh"
#include "slot_states.cuh"

static_assert(NUM_THREADS == 512, "num_threads must be 512");

constexpr int MAKERS = TWO_GROUPS;  // the first of their threads

// Of a thread: the groups have all of a multiprocessor's 65536 together.
constexpr int PRODUCT_REGISTERS = 160, MAKER_REGISTERS = 96;

// Sums of values and all tokens: the state, with channels along its rows, times rows of keys or of queries. With
// TURNED the rows have the two channels of each pair in each other's place.
template <bool TURNED>
__device__ inline void multiply_state(Accumulator (&sums)[CHUNK_LEN / 8], const StateRows& state,
                                      const Slab<CHUNK_LEN> (&rows)[SLABS]) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        Fragment left[TILE_COLUMNS / 16];
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS / 16; ++c) {
            const int n = 2 * (slab * TILE_COLUMNS / 16 + c);
            if constexpr (TURNED) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &state[n + i / 2][i % 2 * 2];
                    left[c].at[i] = pack(pair[1], pair[0]);
                }
            } else left[c] = to_fragment(state[n], state[n + 1]);
        }
        hold(left);
        begin_products();
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS / 16; ++c)
            multiply_group<CHUNK_LEN, Read::rows>(slab == 0 && c == 0, sums, left[c],
                                                  descriptor(tile_of(rows[slab]), 0, 16 * c));
        end_batch();
        wait_for_batches<0>();
        hold(sums);
    }
}
// A block's rows go to their places in the frame of the chunk's start; with TURNED, channels as [1, 0, 3, 2, ..]. So
// the state is rounded in another order for queries than for keys: in the same one the compiler would keep it rounded
// beside itself, for which registers are too few.
template <bool TURNED>
__device__ inline void store_rows(Slab<CHUNK_LEN> (&rows)[SLABS], Fragment (&left)[SLABS][TILE_COLUMNS / 16],
                                  const Powers& power, int block) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        power.multiply(left[slab], slab);
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS / 16; ++c) {
            if constexpr (TURNED)
#pragma unroll
                for (int i = 0; i < 4; ++i) left[slab][c].at[i] = __byte_perm(left[slab][c].at[i], 0, 0x1032);
            store_block(tile_of(rows[slab]), BLOCK * block, 16 * c, left[slab][c]);
        }
    }
}

// A token matrix goes to memory, by two groups.
__device__ inline void keep(Slab<CHUNK_LEN>& to, const Slab<CHUNK_LEN>& from) {
    constexpr int UNITS = sizeof(from) / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < UNITS; i += TWO_GROUPS) {
        const int unit = i + fresh(threadIdx.x % TWO_GROUPS);
        write_global(&to.units[0][0] + unit, (&from.units[0][0])[unit]);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) channel_decay_forward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_BETA* __restrict__ beta, const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const T_STATE* __restrict__ initial_state, const i64* __restrict__ cu_seqlens, T_IO* __restrict__ y,
    T_STATE* __restrict__ final_state, StateTiles* __restrict__ states, TokenMatrices* __restrict__ matrices,
    T_IO* __restrict__ kept_u, Strides r_strides, Strides k_strides, Strides v_strides, Strides w_strides,
    Strides beta_strides, i64 tokens, i64 heads, float scale, float lower_bound, const Piece* __restrict__ pieces,
    i64 slot_stride, int wave, int waves) {
    __builtin_assume(threadIdx.x < NUM_THREADS);
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = piece_of(blockIdx.x, wave, waves), head = blockIdx.y, key_head = head / GROUP;
    if (is_for_others(pieces, sequence, wave)) return;
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
        begin_barrier(smem.columns_free, 8);
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
        Maker maker(smem, slab, Gate(speed_of(a_log, head), lower_bound),
                    HAS_BIAS ? dt_bias + head * HEAD_SIZE : nullptr);
        RowCopies<Smem> copies(smem, slab, first, r + start_of(r_strides, key_head), k + start_of(k_strides, key_head),
                               w + start_of(w_strides, head));
        beta += start_of(beta_strides, head);
        const auto copy_gates = [&](int chunk) {
            copies.copy_gates(i64(chunk) * CHUNK_LEN, chunk < chunks, length - chunk * CHUNK_LEN, w_strides);
        };
        const auto copy_rows = [&](int chunk) {
            copies.copy_rows(smem.rows[chunk % 2], i64(chunk) * CHUNK_LEN, chunk < chunks, length - chunk * CHUNK_LEN,
                             r_strides, k_strides);
        };
        copy_gates(0), copy_rows(0);

        for (int chunk = 0; chunk < chunks; ++chunk) {
            maker.chunk = chunk, maker.steps = length - chunk * CHUNK_LEN;
            const int token = first + fresh_lane() % BLOCK;
            const auto of_beta = load_early<Words<T_BETA, 1>>(
                beta + (i64(chunk) * CHUNK_LEN + (token < maker.steps ? token : 0)) * beta_strides.token);
            wait_for_copies<0>();
            __syncwarp();  // the warp's rows are there
            maker.multiply_rows();
            maker.make(smem.factors[chunk % 2], of_beta.at(0), scale, [&] { copy_gates(chunk + 1); }, [&] {
                if (chunk > 0) wait_for(smem.rows_free[(chunk - 1) % 2], (chunk - 1) / 2 % 2);
                copy_rows(chunk + 1);
            });
            __syncwarp();
            if (AHEAD == 1) maker.wait_for_place(chunk + 1);
            if (slab == 0) maker.solve();
            else Maker::synchronize();  // -L is there
            publish_writes();
            arrive(smem.ready[chunk % 2]);
        }
        wait_for_copies<0>();
    } else {
        take_registers<PRODUCT_REGISTERS>();
        const int half = warp / 4, first_value = 16 * warp, own = first_value % TILE_COLUMNS;
        const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
        const i64 y_stride = heads * VALUE_SIZE;
        const i64 y_start = (span.batch * tokens + span.begin) * y_stride + head * VALUE_SIZE + first_value;
        v += start_of(v_strides, head) + half * TILE_COLUMNS;
        y += y_start;
        if constexpr (KEEPS) kept_u += y_start, states += first_chunk, matrices += first_chunk;
        // The group's values of 16 tokens.
        const auto copy = [&](int chunk) {
            if (chunk < chunks) {
                const int lane = fresh_lane(), first = 16 * (warp % 4);
                copy_values(smem.values[chunk % 2][half], first, lane, v, i64(chunk) * CHUNK_LEN + first,
                            length - chunk * CHUNK_LEN - first, v_strides);
            }
            commit_copies();
        };
        copy(0);
        StateRows state;
        if constexpr (POOLED)
            read_slot(state, first_state(initial_state, state_offset, pieces, sequence, head, slot_stride), first_value);
        else
            read_state<STATE_LAYOUT>(state, initial_state == nullptr ? nullptr : initial_state + state_offset,
                                     first_value);
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
            const int column = fresh(own);
            wait_for(smem.ready[parity], chunk / 2 % 2);
            // M, and rows of all blocks in the chunk's frame
            {
                Pairs pairs(smem, half);
                const int p = warp % 4;
                pairs.load(of_chunk().q);
                synchronize_threads(3, TWO_GROUPS);  // nobody needs rows of queries in their frames any more
                const bool is_direct = smem.leaves[parity][p] | smem.leaves[parity][BLOCKS + p];
                pairs.make(!is_direct, [&](int b, Accumulator (&sums)[2]) {
                    write_query_pairs(smem.m[parity], factors, sums, pairs.row, b);
                });
                arrive(smem.columns_free);
                if (half == 0) {
                    store_rows<true>(of_chunk().q, pairs.left, smem.from_start[parity][p], p);
                    pairs.load(of_chunk().k);
                    store_rows<false>(of_chunk().k, pairs.left, smem.from_start[parity][p], p);
                }
                publish_writes();
                wait_for_copies<0>();
                synchronize_threads(3, TWO_GROUPS);  // all of this is there, and so are the values
                if constexpr (KEEPS) {
                    keep(matrices->tm, smem.tm[parity % AHEAD]);
                    keep(matrices->m, smem.m[parity]);
                    matrices += heads;
                }
            }
            if constexpr (KEEPS) {
#pragma unroll
                for (int c = 0; c < HEAD_SIZE / 16; ++c)
                    write_tiles(*states, first_value, c, to_fragment(state[2 * c], state[2 * c + 1]));
                states += heads;
            }
            copy(chunk + 1);  // nobody reads the last Y any more

            // X <- S_0 (K e^c)^T, then U <- Tm (V - X). Above the diagonals of Tm and M there are zeros.
            Fragment written[BLOCKS];
            {
                Accumulator x[CHUNK_LEN / 8] = {};
                multiply_state<false>(x, state, of_chunk().k);
                Fragment rest[BLOCKS];
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p) {
                    const Fragment of_v = load_left_transposed(values, 16 * p, column);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float2 f =
                            *reinterpret_cast<const float2*>(&factors.of_k[16 * p + 8 * n + 2 * quad_lane()]);
                        float* of_tokens = x[2 * p + n];
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const unsigned word = of_v.at[2 * n + j];
                            of_tokens[2 * j] = low_of(word) - f.x * of_tokens[2 * j];
                            of_tokens[2 * j + 1] = high_of(word) - f.y * of_tokens[2 * j + 1];
                        }
                    }
                    rest[p] = to_fragment(x[2 * p], x[2 * p + 1]);
                }
                hold(rest);
                Accumulator u[CHUNK_LEN / 8] = {};
                begin_products();
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    multiply_group<CHUNK_LEN, Read::rows>(q == 0, u, rest[q],
                                                          descriptor(tile_of(smem.tm[parity % AHEAD]), 0, 16 * q));
                end_batch();
                wait_for_batches<0>();
                hold(u);
                if constexpr (KEEPS)
#pragma unroll
                    for (int q = 0; q < BLOCKS; ++q)
                        store_block_transposed(values, 16 * q, column, to_fragment(u[2 * q], u[2 * q + 1]));
                scale_tokens(written, u, factors.written, 1.0f);
            }
            hold(written);
            if constexpr (KEEPS) {
                __syncwarp();
                write_values(kept_u, smem.values[parity][half], own, steps, y_stride);
                kept_u += CHUNK_LEN * y_stride;
                __syncwarp();  // nobody reads U any more
            }
            // Has the compiler round before the next products, so that sums leave their registers. Nobody reads it.
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) store_block_transposed(values, 16 * q, column, written[q]);
            // Y <- scale S_0 (Q e^c)^T + M (rate U)
            {
                Accumulator out[CHUNK_LEN / 8] = {};
                multiply_state<true>(out, state, of_chunk().q);
                arrive(smem.rows_free[parity]);
#pragma unroll
                for (int n = 0; n < CHUNK_LEN / 8; ++n) {
                    const float2 f = *reinterpret_cast<const float2*>(&factors.of_q[8 * n + 2 * quad_lane()]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) out[n][j] *= j % 2 ? f.y : f.x;
                }
                begin_products();
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    multiply_group<CHUNK_LEN, Read::rows>(out, written[q],
                                                          descriptor(tile_of(smem.m[parity]), 0, 16 * q));
                end_batch();
                wait_for_batches<0>();
                hold(out);
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    store_block_transposed(values, 16 * q, column, to_fragment(out[2 * q], out[2 * q + 1]));
            }
            // S <- S e^D + (rate U)^T K e^(D - c)
            scale_columns<1>(state, factors.end);
            begin_products();
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    multiply_group<64, Read::columns>(&state[8 * slab], written[q],
                                                      descriptor(tile_of(smem.written[parity][slab]), 16 * q, 0));
            end_batch();
            __syncwarp();
            write_values(y, smem.values[parity][half], own, steps, y_stride);
            y += CHUNK_LEN * y_stride;
            wait_for_batches<0>();
            hold(state);
            arrive(smem.free[parity]);
        }
        wait_for_copies<0>();
        if (has_last_state(final_state, pieces, sequence))
            write_state<STATE_LAYOUT>(last_state(final_state, state_offset, pieces, sequence, head, slot_stride), state,
                                      first_value);
    }
}
