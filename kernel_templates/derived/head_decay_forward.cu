// Recurrences with one decay for a head, forward, a chunk of CHUNK_LEN tokens after another on the tensor cores
// (head_decay_chunk.cuh has the formulas).
//
//   q k      [batch, tokens, heads / GROUP, K]  T_IO  in     v, y  [batch, tokens, heads, V]  T_IO  in, out
//   g, beta  [batch, tokens, heads]  T_W, T_BETA  in; the log-decay and the rate, each null where there is none
//   own      [heads, V], or [heads] with no SKIP_PER_CHANNEL  fp32  in: how much of its value an output has, or null
//   a_log, dt_bias  [heads]  fp32  in: of raw gates (head_decay_gates.cuh), or null
//   walks    as head_decay_walks.cu left them  in, with SEGMENTED
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null; with
//            POOLED slots of a pool (pooled.cuh), but what SEGMENTED blocks begin with
//   with KEPT_LEN, for the backward, else null and 0:
//   states             [slots of KEPT_LEN tokens, heads]  out: S at the start of each
//   matrices, factors  [slots of CHUNK_LEN tokens, heads]  out: M and Tm; what multiplies tokens
//   kept_u             [batch, tokens, heads, V]  T_IO  out, with HAS_DELTA: U
//
// Grid (sequences * segments, heads, blocks of ROWS value rows). A warp holds 16 TILES value rows of S in fp32 all the
// time and works with transposes, [value, token], so that what one product gives is the next one's left operand as it
// lies in registers. The factors and token matrices of the next chunk are made beside a chunk's products, and the
// rows of the one after that are on their way.
#include "head_decay_chunk.cuh"
#include "slot_states.cuh"

struct Stage {
    KeyTile q, k;
    T_IO v[CHUNK_LEN][ROW_PITCH];  // later Y
};
struct Smem {
    Stage stages[STAGES];
    TokenWork work[2];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// By all warps, eight tokens at a time, from the chunk's rows and the gates of its lanes' tokens: two lanes share a row.
__device__ inline void write_all_factors(TokenFactors& factors, const KeyTile& q, const KeyTile& k, const Gates& gates,
                                         const GateMap& map, float scale) {
    const TokenGates of_lane(gates, map);
    for (int first = 8 * warp_id(); first < CHUNK_LEN; first += 8 * WARPS) {
        const int token = first + lane_id() % 8;
        const bool is_q = lane_id() / 8 % 2;
        const float decay = HAS_DECAY ? __shfl_sync(0xffffffffu, of_lane.decay, token) : 0.0f;
        const float rate = __shfl_sync(0xffffffffu, of_lane.rate, token);
        float factor = 1.0f;
        if constexpr (HAS_NORM) {
            const T_IO* const row = &(is_q ? q : k)[token][lane_id() / 16 * (CHANNELS / 2)];
            float sums[2] = {};
#pragma unroll
            for (int i = 0; i < CHANNELS / 2; i += 8) {
                const uint4 eight = *reinterpret_cast<const uint4*>(&row[i]);
                const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 x = unpack(words[j]);
                    sums[0] += x.x * x.x, sums[1] += x.y * x.y;
                }
            }
            const float sum = sums[0] + sums[1];
            factor = norm_factor(sum + __shfl_xor_sync(0xffffffffu, sum, 16));
        }
        if (lane_id() < 16) write_factors(factors, is_q, token, factor, decay, rate, of_lane.end, scale);
    }
    if (threadIdx.x == 0) factors.end = exp2_fast(of_lane.end);
}
// A block of M or of -L.
template <bool IS_OUTPUT> __device__ inline void write_pairs(TokenWork& work, const Stage& stage, int p, int q) {
    const auto left = tile_of(IS_OUTPUT ? stage.q : stage.k), right = tile_of(stage.k);
    Accumulator sums[2][2] = {};  // of even and of odd channels, so that products wait less for each other
#pragma unroll 4
    for (int c = 0; c < CHANNELS / 16; ++c)
        multiply_add(sums[c % 2], load_left(left, 16 * p, 16 * c), load_right_transposed(right, 16 * q, 16 * c));
    Accumulator sum[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = sums[0][i / 4][i % 4] + sums[1][i / 4][i % 4];
    write_pairs<IS_OUTPUT>(work, sum, p, q);
}
// Those of M and of -L, shared between the warps, of which the last one has the least.
__device__ inline void write_all_pairs(TokenWork& work, const Stage& stage) {
    constexpr int PAIRS = BLOCKS * (BLOCKS + 1) / 2;
    for (int task = warp_id(); task < (HAS_DELTA ? 2 : 1) * PAIRS; task += WARPS) {
        const int number = task % PAIRS, p = number > 0, q = number > 1;
        if (task < PAIRS) write_pairs<true>(work, stage, p, q);
        else if constexpr (HAS_DELTA) write_pairs<false>(work, stage, p, q);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) head_decay_forward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_BETA* __restrict__ beta, const float* __restrict__ own, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, const T_STATE* __restrict__ initial_state,
    const i64* __restrict__ cu_seqlens, const Walk* __restrict__ walks, T_IO* __restrict__ y,
    T_STATE* __restrict__ final_state, Checkpoint* __restrict__ states, KeptMatrices* __restrict__ matrices,
    TokenFactors* __restrict__ factors, T_IO* __restrict__ kept_u, Strides r_strides, Strides k_strides,
    Strides v_strides, Strides w_strides, Strides beta_strides, i64 tokens, i64 heads, i64 segments, float scale,
    const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 place = SEGMENTED ? blockIdx.x / static_cast<unsigned>(segments) : blockIdx.x;
    const i64 sequence = piece_of(place, wave, waves);
    if (is_for_others(pieces, sequence, wave)) return;
    const i64 head = blockIdx.y, key_head = head / GROUP;
    if constexpr (POOLED) __builtin_assume(cu_seqlens != nullptr);  // which spares registers
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const OwnRows share;

    const int length = static_cast<int>(span.length);
    const auto steps_of = [&](int chunk) { return max(min(length - chunk * CHUNK_LEN, CHUNK_LEN), 0); };
    const auto start_of = [&](Strides s, i64 own_head, int chunk) {
        return span.batch * s.batch + (span.begin + i64(chunk) * CHUNK_LEN) * s.token + own_head * s.head;
    };
    if constexpr (HAS_RATE) beta += start_of(beta_strides, head, 0);
    if constexpr (HAS_DECAY) w += start_of(w_strides, head, 0);
    const auto load_gates = [&](Gates& gates, int chunk) {
        const i64 token = i64(chunk) * CHUNK_LEN;
        gates.load(w + token * w_strides.token, w_strides.token, beta + token * beta_strides.token, beta_strides.token,
                   steps_of(chunk));
    };
    const Walk walk = walk_of<false>(walks, chunks, heads);
    if (walk.start < 0) return;
    const int first = walk.start, end = walk.end;
    if (end < chunks) final_state = nullptr;

    const i64 y_stride = heads * VALUE_SIZE;
    const i64 y_start = (span.batch * tokens + span.begin + i64(first) * CHUNK_LEN) * y_stride + head * VALUE_SIZE +
                        share.first_value;
    y += y_start;
    if constexpr (KEPT_LEN > 0) {
        kept_u += y_start;
        states += (first_checkpoint(cu_seqlens, sequence, span, KEPT_LEN) + first / KEPT_CHUNKS) * heads + head;
        const i64 first_chunk = (first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) + first) * heads + head;
        matrices += first_chunk, factors += first_chunk;
    }
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);

    using KeyCursor = RowCursor<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS>;
    KeyCursor from_q(r + start_of(r_strides, key_head, first), r_strides.token, threadIdx.x);
    KeyCursor from_k(k + start_of(k_strides, key_head, first), k_strides.token, threadIdx.x);
    RowCursor<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, ROW_PITCH, 32> from_v(
        v + start_of(v_strides, head, first) + share.first_value, v_strides.token, lane_id());
    const auto copy_chunk = [&](int chunk) {
        const int present = steps_of(chunk);
        if (present > 0) {
            Stage& stage = smem.stages[chunk % STAGES];
            from_q.copy(stage.q[0], present, HEAD_SIZE, threadIdx.x);
            from_k.copy(stage.k[0], present, HEAD_SIZE, threadIdx.x);
            from_v.copy(&stage.v[0][share.column], present, share.width, lane_id());
        }
        commit_copies();
    };
    const auto write_values = [&](T_IO* rows, const Stage& stage, int chunk) {
        write_rows_at_once<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, ROW_PITCH, 32>(
            rows, y_stride, &stage.v[0][share.column], steps_of(chunk), share.width, lane_id());
    };

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    copy_chunk(first), copy_chunk(first + 1);
    const GateMap map(a_log, dt_bias, head);
    Gates gates;
    load_gates(gates, first);
    StateRows state[TILES];
    // Blocks that share a sequence read a copy: the last one may write its slot before the first one begins.
    if constexpr (POOLED && !SEGMENTED)
        read_slot(state, first_state(initial_state, state_offset, pieces, sequence, head, slot_stride),
                  share.first_value);
    else
        read_state<STATE_LAYOUT>(state, initial_state && first == 0 ? initial_state + state_offset : nullptr,
                                 share.first_value);
    float of_own[TILES][2] = {};
    if constexpr (HAS_OWN) read_own<SKIP_PER_CHANNEL>(of_own, own, head, share.first_value);
    const auto solve = [&](TokenWork& work) {
        if constexpr (HAS_DELTA)
            if (warp_id() == WARPS - 1) solve_lower(work.solver, load_left(tile_of(work.m), 0, 16));
    };
    wait_for_copies<1>();
    __syncthreads();  // the first chunk's rows are there
    TokenWork& first_work = smem.work[first % 2];
    Stage& first_stage = smem.stages[first % STAGES];
    write_all_factors(first_work.factors, first_stage.q, first_stage.k, gates, map, scale);
    load_gates(gates, first + 1);
    __syncthreads();  // its factors are there
    write_all_pairs(first_work, first_stage);
    __syncthreads();  // its pairs are there
    solve(first_work);

    for (int chunk = first; chunk < end; ++chunk) {
        const bool is_own = chunk >= walk.begin;  // the others are run through for the state alone
        Stage& stage = smem.stages[chunk % STAGES];
        const Stage& next_stage = smem.stages[(chunk + 1) % STAGES];
        const TokenWork& work = smem.work[chunk % 2];
        TokenWork& next_work = smem.work[(chunk + 1) % 2];
        wait_for_copies<0>();
        __syncthreads();  // the matrices and the next chunk's rows are there, and nobody reads those before any more
        copy_chunk(chunk + 2);
        write_all_factors(next_work.factors, next_stage.q, next_stage.k, gates, map, scale);
        load_gates(gates, chunk + 2);
        if constexpr (KEPT_LEN > 0)
            if (blockIdx.z == 0) {
                if (is_own) {
                    matrices->at[OF_M].keep<NUM_THREADS>(work.m, threadIdx.x);
                    if constexpr (HAS_DELTA) matrices->at[OF_TM].keep<NUM_THREADS>(work.solver.tm, threadIdx.x);
                    keep<NUM_THREADS>(*factors, work.factors, threadIdx.x);
                }
                matrices += heads, factors += heads;
            }

        // X <- K S_0^T   Y <- Q S_0^T
        const auto tile_q = tile_of(stage.q), tile_k = tile_of(stage.k);
        const auto values = tile_of(stage.v);
        const auto m = tile_of(work.m);
        Accumulator out[TILES][CHUNK_LEN / 8] = {}, u[TILES][CHUNK_LEN / 8] = {};
        if (share.exist) {
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                Fragment start_rows[TILES];
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    start_rows[i] = to_fragment(state[i][2 * c], state[i][2 * c + 1]);
                    if constexpr (KEPT_LEN > 0)
                        if (is_own && chunk % KEPT_CHUNKS == 0)
                            keep_state(states, share.first_value + 16 * i, c, start_rows[i]);
                }
                if constexpr (HAS_DELTA)
                    add_columns(16 * c, full(u, tile_k, start_rows), full(out, tile_q, start_rows));
                else add_columns(16 * c, full(out, tile_q, start_rows));
            }
        }
        if constexpr (KEPT_LEN > 0)
            if ((chunk + 1) % KEPT_CHUNKS == 0) states += heads;
        __syncthreads();  // the next chunk's factors are there
        write_all_pairs(next_work, next_stage);
        TokenFragments u_rows[TILES], written[TILES];
        if (share.exist) {
            TokenFragments v_rows[TILES];
            load_rows(v_rows, values, share.column);
            add_values(u, out, v_rows, work.factors, of_own);
            solve_values(u_rows, written, u, v_rows, work);
            if constexpr (KEPT_LEN > 0 && HAS_DELTA) {
#pragma unroll
                for (int i = 0; i < TILES; ++i)
#pragma unroll
                    for (int p = 0; p < BLOCKS; ++p)
                        store_block_transposed(values, 16 * p, share.column + 16 * i, u_rows[i][p]);
                __syncwarp();
                if (is_own) write_values(kept_u, stage, chunk);
                kept_u += CHUNK_LEN * y_stride;
                __syncwarp();
            }
            add_triangles(lower(out, m, u_rows));  // Y <- Y + M U
            store_sums(values, share.column, out);
        }
        if constexpr (HAS_DELTA) {
            __syncthreads();  // the next chunk's pairs are there
            if (chunk + 1 < end) solve(next_work);
        }
        if (!share.exist) continue;
        if constexpr (HAS_DECAY) {
            const float all = work.factors.end;
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) state[i][n][j] *= all;
        }
        if (chunk + 1 < end || final_state != nullptr) add_outer(state, outer(written, tile_k));
        if (is_own) write_values(y, stage, chunk);
        y += CHUNK_LEN * y_stride;
    }
    wait_for_copies<0>();
    if (final_state != nullptr && share.exist && (!POOLED || has_last_state(final_state, pieces, sequence)))
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            write_state<STATE_LAYOUT>(last_state(final_state, state_offset, pieces, sequence, head, slot_stride),
                                      state[i], share.first_value + 16 * i);
}
