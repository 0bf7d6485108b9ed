// Kimi Delta Attention, backward, what has to go from the last chunk of 64 tokens to the first: the gradients of values
// and of the initial state, and E, those of the states between, from which the gradients of keys are made. With the
// names of channel_decay_group_forward.cu, Tm and M as it kept them,
//
//     dU = rate (M^T dY + (K e^(D - c)) E^T)    dV = Tm^T dU    E <- E e^D + (scale dY)^T (Q e^c) - dV^T (K e^c)
//
//   r k w beta a_log dt_bias  as in the forward  in;  dy, dv  [batch, tokens, heads, V]  T_IO  in, out
//   matrices, slopes  [slots of 64 tokens, heads]  as the forward kept them  in;  E at the end of each  out
//   grad_final_state, grad_initial_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out
//                      or null
//
// Grid (sequences, heads), groups of warps and transposes as in the forward: two have 64 value rows of E each, two make
// the rows of the next chunk. Decays stand alone there, as none of these products has two tokens.
#include "channel_decay_rows.cuh"

static_assert(NUM_THREADS == 512, "num_threads must be 512");

constexpr int MAKERS = TWO_GROUPS;  // the first of their threads
constexpr int PRODUCT_REGISTERS = 168, MAKER_REGISTERS = 88;

// Chunks whose rows are there at once: of three the next one's come while the last one's are made and one's are read.
// With wide gates there is no room for them.
constexpr int PLACES = sizeof(T_W) == 2 ? 3 : 2;
struct __align__(1024) Smem {
    Rows rows[PLACES];
    Slab<CHUNK_LEN> written[2][SLABS];  // by chunk: what is added to the state
    TokenMatrices matrices[2];
    Slab<CHUNK_LEN> values[2][2];  // by chunk and group; later dV
    T_W w[CHUNK_LEN][HEAD_SIZE];
    float diagonals[SLABS][3][CHUNK_LEN];  // k . k, q . q and q . k of tokens, over 64 of the channels
    float totals[4][HEAD_SIZE];            // of blocks: sums of logarithms
    Factors factors[2];
    CopyBarrier ready[2], free[2];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) channel_decay_backward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_W* __restrict__ w,
    const T_BETA* __restrict__ beta, const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const T_IO* __restrict__ dy, const i64* __restrict__ cu_seqlens, const TokenMatrices* __restrict__ matrices,
    const T_STATE* __restrict__ grad_final_state, T_IO* __restrict__ dv, StateTiles* __restrict__ slopes,
    T_STATE* __restrict__ grad_initial_state, Strides r_strides, Strides k_strides, Strides w_strides,
    Strides beta_strides, Strides dy_strides, i64 tokens, i64 heads, float scale, float lower_bound) {
    __builtin_assume(threadIdx.x < NUM_THREADS);
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y, key_head = head / GROUP;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int length = static_cast<int>(span.length), chunks = (length + CHUNK_LEN - 1) / CHUNK_LEN;
    const int warp = warp_id(), lane = lane_id();
    const i64 last_token = i64(chunks - 1) * CHUNK_LEN;  // the first one of the last chunk
    const i64 last_slot = (first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) + chunks - 1) * heads + head;
    const auto start_of = [&](Strides s, i64 own_head) {
        return span.batch * s.batch + (span.begin + last_token) * s.token + own_head * s.head;
    };
    const auto steps_of = [&](int number) {
        return number == 0 ? length - static_cast<int>(last_token) : CHUNK_LEN;
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) begin_barrier(smem.ready[i], 8), begin_barrier(smem.free[i], 8);
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
        RowMaker<Smem> maker(smem, slab, Gate(speed_of(a_log, head), lower_bound),
                             HAS_BIAS ? dt_bias + head * HEAD_SIZE : nullptr);
        RowCopies<Smem> copies(smem, slab, first, r + start_of(r_strides, key_head), k + start_of(k_strides, key_head),
                               w + start_of(w_strides, head));
        beta += start_of(beta_strides, head);
        matrices += last_slot;
        const auto copy_gates = [&](int number) {
            copies.copy_gates(-i64(number) * CHUNK_LEN, number < chunks, steps_of(number), w_strides);
        };
        const auto copy_rows = [&](int number) {
            copies.copy_rows(smem.rows[number % PLACES], -i64(number) * CHUNK_LEN, number < chunks, steps_of(number),
                             r_strides, k_strides);
        };
        const auto copy_matrices = [&](int number) {
            const uint4* from = reinterpret_cast<const uint4*>(matrices - i64(number) * heads);
            const unsigned to = shared_address(&smem.matrices[number % 2]);
            constexpr int UNITS = sizeof(TokenMatrices) / sizeof(uint4);
            if (number < chunks)
#pragma unroll
                for (int i = threadIdx.x % TWO_GROUPS; i < UNITS; i += TWO_GROUPS)
                    copy_async<16>(to + 16 * i, from + i, true);
            commit_copies();
        };
        copy_rows(0), copy_gates(0), copy_matrices(0);
        for (int number = 0; number < chunks; ++number) {  // of the chunk, from the last one on
            maker.chunk = number, maker.steps = steps_of(number);
            const auto of_beta = load_early<Words<T_BETA, 1>>(
                beta + (first + lane % BLOCK < maker.steps ? first + lane % BLOCK : 0) * beta_strides.token);
            beta -= CHUNK_LEN * beta_strides.token;
            wait_for_copies<PLACES == 3 ? 1 : 0>();
            __syncwarp();  // the warp's rows are there
            if (PLACES == 3) copy_rows(number + 1);
            maker.multiply_rows();
            maker.make_rows(smem.factors[number % 2], of_beta.at(0), scale, [&] { copy_gates(number + 1); });
            if (PLACES == 3) wait_for_copies<2>();  // the token matrices are there
            publish_writes();
            arrive(smem.ready[number % 2]);
            maker.synchronize();  // nobody reads totals any more
            if (number > 0) wait_for(smem.free[(number - 1) % 2], (number - 1) / 2 % 2);
            if (PLACES == 2) copy_rows(number + 1);
            copy_matrices(number + 1);
        }
        wait_for_copies<0>();
    } else {
        take_registers<PRODUCT_REGISTERS>();
        const int half = warp / 4, first_value = 16 * warp, own = first_value % TILE_COLUMNS;
        const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
        const i64 dv_stride = heads * VALUE_SIZE;
        dy += start_of(dy_strides, head) + half * TILE_COLUMNS;
        dv += (span.batch * tokens + span.begin + last_token) * dv_stride + head * VALUE_SIZE + first_value;
        slopes += last_slot;
        // The group's values of 16 tokens.
        const auto copy = [&](int number) {
            if (number < chunks) {
                const int lane = fresh_lane(), first = 16 * (warp % 4);
                copy_values(smem.values[number % 2][half], first, lane, dy, first - i64(number) * CHUNK_LEN,
                            steps_of(number) - first, dy_strides);
            }
            commit_copies();
        };
        copy(0);
        StateRows state;
        read_state<STATE_LAYOUT>(state, grad_final_state == nullptr ? nullptr : grad_final_state + state_offset,
                                 first_value);
        for (int number = 0; number < chunks; ++number) {
            const int parity = number % 2, steps = steps_of(number);
            const Factors& factors = smem.factors[parity];
            const Rows& tiles = smem.rows[number % PLACES];
            const TokenMatrices& of_tokens = smem.matrices[parity];
            const auto values = tile_of(smem.values[parity][half]);
            Fragment rows[HEAD_SIZE / 16];
#pragma unroll
            for (int c = 0; c < HEAD_SIZE / 16; ++c) {
                rows[c] = to_fragment(state[2 * c], state[2 * c + 1]);
                write_tiles(*slopes, first_value, c, rows[c]);
            }
            slopes -= heads;
            hold(rows);
            wait_for_copies<0>();
            synchronize_threads(2 + half, GROUP_THREADS);  // dY is there, and nobody reads the last dV any more
            copy(number + 1);
            wait_for(smem.ready[parity], number / 2 % 2);

            // d(rate U) <- (K e^(D - c)) E^T + M^T dY
            Accumulator sum[CHUNK_LEN / 8] = {};
            begin_products();
#pragma unroll
            for (int c = 0; c < HEAD_SIZE; c += 16)
                multiply_group<64, Read::rows>(
                    c == 0, sum, rows[c / 16],
                    descriptor(tile_of(smem.written[parity][c / TILE_COLUMNS]), 0, c % TILE_COLUMNS));
            end_batch();
            wait_for_batches<0>();
            hold(sum);
            Fragment of_y[BLOCKS];
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) of_y[q] = load_left_transposed(values, 16 * q, own);
            hold(of_y);
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q)
                multiply_group<64, Read::columns>(sum, of_y[q], descriptor(tile_of(of_tokens.m), 16 * q, 0));
            end_batch();
            wait_for_batches<0>();
            hold(sum);
            Fragment of_u[BLOCKS];
            scale_tokens(of_u, sum, factors.written, 1.0f);
            hold(of_u);
            Accumulator of_v[CHUNK_LEN / 8] = {};
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q)
                multiply_group<64, Read::columns>(q == 0, of_v, of_u[q], descriptor(tile_of(of_tokens.tm), 16 * q, 0));
            end_batch();
            wait_for_batches<0>();
            hold(of_v);
            // E <- E e^D + (scale dY)^T (Q e^c) - dV^T (K e^c)
            scale_columns<1>(state, factors.end);
            Fragment scaled_y[BLOCKS], erased[BLOCKS];
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                Accumulator pair[2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 f = reinterpret_cast<const float2&>(factors.of_q[16 * q + 8 * n + 2 * quad_lane()]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const unsigned word = of_y[q].at[2 * n + j];
                        pair[n][2 * j] = low_of(word) * f.x, pair[n][2 * j + 1] = high_of(word) * f.y;
                    }
                }
                scaled_y[q] = to_fragment(pair[0], pair[1]);
                store_block_transposed(values, 16 * q, own, to_fragment(of_v[2 * q], of_v[2 * q + 1]));
            }
            scale_tokens(erased, of_v, factors.of_k, -1.0f);
            hold(scaled_y), hold(erased);
            begin_products();
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q) {
                    multiply_group<64, Read::columns>(&state[8 * slab], scaled_y[q],
                                                      descriptor(tile_of(tiles.q[slab]), 16 * q, 0));
                    multiply_group<64, Read::columns>(&state[8 * slab], erased[q],
                                                      descriptor(tile_of(tiles.k[slab]), 16 * q, 0));
                }
            end_batch();
            __syncwarp();
            write_values(dv, smem.values[parity][half], own, steps, dv_stride);
            dv -= CHUNK_LEN * dv_stride;
            wait_for_batches<0>();
            hold(state);
            arrive(smem.free[parity]);
        }
        wait_for_copies<0>();
        if (grad_initial_state != nullptr)
            write_state<STATE_LAYOUT>(grad_initial_state + state_offset, state, first_value);
    }
}
