// Gated linear attention and its kin, backward, a chunk after another from the last to the first on the tensor cores.
// With the operands of gla_chunk.cuh, S' from the forward, E = dL/dS at the chunk's end and E' = E diag(e^(D - m)):
//
//     dV = P^T dY + K E'^T;   dP = tril(dY V^T), strictly with the bonus
//     dQ = dP K + dY S';   dK = dP^T Q + V E';   E <- (E' + dY^T Q) diag(e^m)
//
// and dq, dk are dQ, dK times the factors that made Q, K. With z = sum_v S' * (E' + dY^T Q) the gradient of token t's
// log-decay is z - sum_(s < t) (Q dQ - K dK)_s, with the bonus z - sum_(s <= t) (Q dQ)_s + sum_(s < t) (K dK)_s, from
// the rounded operands and the unrounded dQ, dK as in wkv7_chunked_backward.cu. The bonus adds scale (dy_t . v_t) u k_t
// to dq_t, the same with q_t to dk_t, and with q_t k_t to du.
//
//   q k w v u, cu_seqlens, checkpoints, framed   as in the forward         dy  [batch, tokens, heads, V]  T_IO  in
//   grad_final_state    [sequences, heads, V, K] or kv  fp32  in or null
//   dq dk  T_IO, dw  T_W  [batch, tokens, heads, K];   dv  T_IO  [batch, tokens, heads, V]   out
//   du  [sequences, heads, K]  fp32  out, of the bonus; dw  the same, of a constant decay
//   grad_initial_state  [sequences, heads, V, K] or kv  fp32  out or null
//
// Grid (sequences, heads).
#include "gla_chunk.cuh"
#include "gla_halves.cuh"

constexpr int TILES = ceil_div(VALUES / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;
constexpr int GROWTH_PITCH = CHANNELS + 4;  // eight channels of every other row are in different banks
static_assert(WARPS * WARP_ROWS == VALUES,
              "num_threads must be once or twice the value size, rounded up to a multiple of 32");

using StateTile = T_IO[VALUES][KEY_PITCH];
struct Work {
    PairOperands operands;
    ValueTile dv;
    StateTile state, e;
};
struct Smem {
    union {
        Work work;
        KeyTile levels[LEVELS];  // by halves, before the others are there
    };
    TokenTile pairs, d_pairs;
    RawPair raw;
    ValueTile v, dy;
    float2 totals[SEGMENTS][PAIRS];
    // e^(c_t - m), the row before the first token first, or by halves the tokens' decays; later dL/dc
    float growth[CHUNK_LEN + 1][GROWTH_PITCH];
    float state_terms[WARPS][CHANNELS];
    float factor[CHANNELS], bonus_terms[PAIRS / 16][CHUNK_LEN], diagonal[CHUNK_LEN];  // dy_t . v_t
    float sums[2][4][CHANNELS];  // du and of a constant log-decay, a part for each of four lanes
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");
constexpr bool HAS_HALVES = LARGEST_DECAY > 0;
constexpr bool NEEDS_W = HAS_DECAY && !CONSTANT_DECAY && DECAY != Decay::log;  // for slopes

// What a block walks over, a chunk back with every copy.
struct Head {
    using KeyCursor = RowCursor<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS, -1>;
    using ValueCursor = RowCursor<T_IO, VALUE_SIZE, CHUNK_LEN, VALUE_SIZE, VALUE_PITCH, NUM_THREADS, -1>;
    KeyCursor from_q, from_k;
    ValueCursor from_v, from_dy;
    DecayCursor<-1> from_w;
    const T_W* w;  // of the first token, as what follows
    const T_U* u;
    const Checkpoint* checkpoints;
    T_IO *dq, *dk, *dv;
    T_DW* dw;
    i64 length, w_stride, key_stride, value_stride, checkpoint_stride;
    float2 bonus;  // of the thread's pair of channels, with the scale
    float scale;

    __device__ int steps_from(i64 token) const { return static_cast<int>(min(length - token, i64(CHUNK_LEN))); }
    __device__ void copy_keys(Smem& smem, int present) {
        from_q.copy(smem.raw.q[0], present, HEAD_SIZE, threadIdx.x);
        from_k.copy(smem.raw.k[0], present, HEAD_SIZE, threadIdx.x);
    }
    __device__ void copy_values(Smem& smem, int present) {
        from_v.copy(smem.v[0], present, VALUE_SIZE, threadIdx.x);
        from_dy.copy(smem.dy[0], present, VALUE_SIZE, threadIdx.x);
    }
};

// Walks back over the chunks from that of `token` on, whose keys are on their way, down to that of `end`.
template <bool BY_HALVES>
__device__ inline void walk(Smem& smem, Head& head, StateRows (&e)[TILES], float2& pending_exponent, i64 token,
                            i64 end) {
    const int warp = warp_id(), first_value = WARP_ROWS * warp;
    const auto operand_q = tile_of(smem.work.operands.q), operand_k = tile_of(smem.work.operands.k);
    const auto pairs = tile_of(smem.pairs), d_pairs = tile_of(smem.d_pairs);
    const auto tile_v = tile_of(smem.v), tile_dy = tile_of(smem.dy), tile_dv = tile_of(smem.work.dv);
    const auto tile_state = tile_of(smem.work.state), tile_e = tile_of(smem.work.e);
    RawDecays next_w;
    const auto load_decays = [&](i64 token) {
        const int steps = head.steps_from(token);
        if constexpr (HAS_DECAY) {
            head.from_w.load(next_w, steps);
            if (steps < CHUNK_LEN) clear_decays(next_w, steps);
        }
    };
    if (token >= end) load_decays(token);
    for (; token >= end; token -= CHUNK_LEN) {
        const int steps = head.steps_from(token);
        const i64 next = token - CHUNK_LEN;
        Fragment state_rows[TILES][CHANNELS / 16];  // S'
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c)
                state_rows[i][c] =
                    read_early(head.checkpoints + token / CHUNK_LEN * head.checkpoint_stride, first_value + 16 * i, c);
        if constexpr (BY_HALVES) {
            wait_for_copies<0>();
            __syncthreads();  // the raw keys are there, and nobody reads the last chunk's tiles any more
            head.copy_values(smem, steps), commit_copies();
            commit_copies();  // the keys stay until the end
            const float2 bonus = BONUS ? head.bonus : float2{head.scale, head.scale};
            const float2 factor =
                write_pairs_by_halves<true>(smem.pairs, smem.levels, smem.raw, next_w, CHUNK_LEN, smem.totals,
                                            head.scale, bonus, smem.bonus_terms, smem.growth);
            write_decay(smem.factor, factor);
            __syncthreads();  // the operands are there
        } else {
            RateSums sums;
            sum_decays(sums, smem.totals, next_w, CHUNK_LEN);
            wait_for_copies<0>();
            __syncthreads();  // the raw keys are there, and nobody reads the last chunk's tiles any more
            head.copy_values(smem, steps), commit_copies();
            float bonus_terms[SEGMENT_LEN];
            const Frame frame = write_pair<HAS_DECAY, GROWTH_PITCH>(
                sums, smem.totals, smem.raw, smem.work.operands, head.scale, head.bonus, bonus_terms, smem.growth);
            if constexpr (BONUS) write_own_terms(smem.bonus_terms, bonus_terms);
            write_factor(smem.factor, {pending_exponent.x + frame.end.x - frame.middle.x,
                                       pending_exponent.y + frame.end.y - frame.middle.y});
            pending_exponent = frame.middle;
            __syncthreads();  // the operands are there
            if (next >= 0) head.copy_keys(smem, CHUNK_LEN);
            commit_copies();
            write_pairs(smem.pairs, smem.work.operands, smem.bonus_terms);
            scale_columns(e, smem.factor);  // E' = E diag(e^(D - m))
        }

        Accumulator d_value[TILES][CHUNK_LEN / 8] = {};  // dV, [value, token]
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {
            Fragment e_rows[TILES];
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                e_rows[i] = to_fragment(e[i][2 * c], e[i][2 * c + 1]);
                store_block(tile_e, first_value + 16 * i, 16 * c, e_rows[i]);
                store_block(tile_state, first_value + 16 * i, 16 * c, state_rows[i][c]);
            }
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p) {  // dV <- K E'^T
                const Right block = load_right_transposed(operand_k, 16 * p, 16 * c);
#pragma unroll
                for (int i = 0; i < TILES; ++i) multiply_add(&d_value[i][2 * p], e_rows[i], block);
            }
        }
        wait_for_copies<1>();  // V and dY; the next chunk's keys may still be on their way
        __syncthreads();  // P, V and dY are there

        Fragment dy_rows[TILES][BLOCKS];
        load_rows(dy_rows, tile_dy, first_value);
        add_triangles(upper(d_value, pairs, dy_rows));  // dV <- dV + P^T dY
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p)
                store_block_transposed(tile_dv, 16 * p, first_value + 16 * i,
                                       to_fragment(d_value[i][2 * p], d_value[i][2 * p + 1]));
        constexpr int TASKS = BLOCKS * (BLOCKS + 1) / 2;
        for (int task = warp; task < TASKS; task += WARPS) {
            int p = 0, j = task;
            while (j > p) j -= ++p;
            Accumulator sum[2] = {};
#pragma unroll
            for (int c = 0; c < VALUES; c += 16)
                multiply_add(sum, load_left(tile_dy, 16 * p, c), load_right_transposed(tile_v, 16 * j, c));
            if (j == p) {
                if constexpr (BONUS) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const int at = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
                        if (at == column) smem.diagonal[16 * p + at] = sum[i / 4][i % 4];
                    }
                }
                keep_lower(sum, BONUS);
            }
            store_block(d_pairs, 16 * p, 16 * j, to_fragment(sum[0], sum[1]));
        }
        if constexpr (BY_HALVES) {
            write_state_terms(smem.state_terms[warp], state_rows, e);
            scale_columns<1>(e, smem.factor);
        }
        add_outer(e, outer(dy_rows, operand_q));  // E' <- E' + dY^T Q
        if constexpr (!BY_HALVES) write_state_terms(smem.state_terms[warp], state_rows, e);
        __syncthreads();  // dP, dV and z are there

        write_rows_at_once<T_IO, VALUE_SIZE, CHUNK_LEN, VALUE_SIZE, VALUE_PITCH, NUM_THREADS>(
            head.dv + token * head.value_stride, head.value_stride, smem.work.dv[0], steps, VALUE_SIZE, threadIdx.x);
        if (next >= end) load_decays(next);
        if (BY_HALVES && next >= 0) head.from_q.prefetch(threadIdx.x), head.from_k.prefetch(threadIdx.x);
        ChunkDecays<CHANNELS> raw_w;
        if constexpr (NEEDS_W) raw_w.load<true>(head.w + token * head.w_stride, head.w_stride, steps);
#pragma unroll 1
        for (int column = 16 * warp; column < CHANNELS; column += 16 * WARPS) {
            TokenSums d_q = {}, d_k = {};  // [channel, token]
            if constexpr (!BY_HALVES) {
#pragma unroll
                for (int c = 0; c < VALUES; c += 16) {
                    const Fragment with_state = load_left_transposed(tile_state, c, column);
                    const Fragment with_e = load_left_transposed(tile_e, c, column);
#pragma unroll
                    for (int p = 0; p < BLOCKS; ++p) {  // dQ <- dY S'   dK <- V E'
                        multiply_add(&d_q[2 * p], with_state, load_right_transposed(tile_dy, 16 * p, c));
                        multiply_add(&d_k[2 * p], with_e, load_right_transposed(tile_v, 16 * p, c));
                    }
                }
            }
            float left[2] = {}, bonus[2];
#pragma unroll
            for (int i = 0; i < WARPS; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) left[j] += smem.state_terms[i][column + group() + 8 * j];
            read_bonus(bonus, head.u, head.scale, column);
            ChannelSums channel_sums = {};
            if constexpr (BY_HALVES) {
                const auto begin = [&](TreeGradients& grads, int b) {
                    multiply_end<VALUES>(grads.left, tile_state, tile_dy, column, b);
                    multiply_end<VALUES>(grads.right, tile_e, tile_v, column, b);
                };
                const auto own_product = [&](int t) { return BONUS ? smem.diagonal[t] : to_float(smem.d_pairs[t][t]); };
                write_pair_gradients_by_halves(begin, left, smem.work.operands.q, smem.work.operands.k,
                                               smem.raw.q, smem.raw.k,
                                               smem.growth, d_pairs, own_product, bonus, head.scale, column, steps,
                                               channel_sums);
            } else {
                const OperandRows q_rows(operand_q, column), k_rows(operand_k, column);
                // dQ <- dQ + dP K   dK <- dK + dP^T Q
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
                    for (int j = 0; j <= p; ++j) {
                        multiply_add(&d_q[2 * p], k_rows.at[j], load_right_transposed(d_pairs, 16 * p, 16 * j));
                        multiply_add(&d_k[2 * j], q_rows.at[p], load_right(d_pairs, 16 * p, 16 * j));
                    }
                write_pair_gradients(d_q, d_k, q_rows, k_rows, operand_q, operand_k, smem.growth, left, smem.diagonal,
                                     bonus, head.scale, column, steps, channel_sums);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int channel = column + group() + 8 * j;
                if constexpr (BONUS) smem.sums[0][quad_lane()][channel] += channel_sums.bonus[j];
                if constexpr (CONSTANT_DECAY) smem.sums[1][quad_lane()][channel] += channel_sums.decay[j];
            }
        }
        __syncthreads();  // the gradients are there
        if constexpr (BY_HALVES) {
            if (next >= 0) head.copy_keys(smem, CHUNK_LEN);
            commit_copies();
        }

        const auto write = [&](T_IO* target, const KeyTile& tile) {
            write_rows_at_once<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS>(
                target + token * head.key_stride, head.key_stride, tile[0], steps, HEAD_SIZE, threadIdx.x);
        };
        write(head.dq, smem.work.operands.q), write(head.dk, smem.work.operands.k);
        if constexpr (HAS_DECAY && !CONSTANT_DECAY)
            raw_w.write_slopes(head.dw + token * head.key_stride, static_cast<unsigned>(head.key_stride), smem.growth,
                               steps);
    }
}

// All that is not in frames: a function that is called, so that the walk in frames keeps its registers. What it is
// given lies in memory.
__device__ __noinline__ void walk_by_halves(Smem& smem, Head& given, StateRows (&kept)[TILES], i64 token, i64 end) {
    Head head = given;
    StateRows e[TILES];
    copy_state(e, kept);
    float2 no_exponent = {0.0f, 0.0f};
    walk<true>(smem, head, e, no_exponent, token, end);
    copy_state(kept, e);
    given = head;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_backward(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_IO* __restrict__ dy, const i64* __restrict__ cu_seqlens,
    const Checkpoint* __restrict__ checkpoints, const int* __restrict__ framed,
    const float* __restrict__ grad_final_state, T_IO* __restrict__ dq,
    T_IO* __restrict__ dk, T_IO* __restrict__ dv, T_DW* __restrict__ dw, float* __restrict__ du,
    float* __restrict__ grad_initial_state, Strides q_strides, Strides k_strides, Strides v_strides, Strides w_strides,
    Strides dy_strides, i64 tokens, i64 heads, float scale) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, number = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int first_value = WARP_ROWS * warp_id();
    const i64 last = (span.length + CHUNK_LEN - 1) / CHUNK_LEN * CHUNK_LEN - CHUNK_LEN;
    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + number * s.head; };
    const auto end = [&](Strides s) { return start(s) + last * s.token; };
    const i64 key_stride = heads * HEAD_SIZE, value_stride = heads * VALUE_SIZE;
    const i64 out_row = (span.batch * tokens + span.begin) * heads + number;
    const i64 state_offset = (sequence * heads + number) * (VALUE_SIZE * HEAD_SIZE);
    w += start(w_strides);
    Head head = {
        Head::KeyCursor(q + end(q_strides), q_strides.token, threadIdx.x),
        Head::KeyCursor(k + end(k_strides), k_strides.token, threadIdx.x),
        Head::ValueCursor(v + end(v_strides), v_strides.token, threadIdx.x),
        Head::ValueCursor(dy + end(dy_strides), dy_strides.token, threadIdx.x),
        DecayCursor<-1>(w + last * w_strides.token, w_strides.token),
        w, u + number * HEAD_SIZE,
        checkpoints + first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) * heads + number,
        dq + out_row * HEAD_SIZE, dk + out_row * HEAD_SIZE, dv + out_row * VALUE_SIZE,
        CONSTANT_DECAY ? dw : dw + out_row * HEAD_SIZE,
        span.length, w_strides.token, key_stride, value_stride, heads, {0.0f, 0.0f}, scale};

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    if (last >= 0) head.copy_keys(smem, head.steps_from(last)), commit_copies();
    if constexpr (BONUS) {
        const int channel = threadIdx.x % PAIRS * 2;
        if (channel < HEAD_SIZE) head.bonus.x = scale * to_float(head.u[channel]);
        if (channel + 1 < HEAD_SIZE) head.bonus.y = scale * to_float(head.u[channel + 1]);
    }
    StateRows e[TILES];
    read_state<STATE_LAYOUT>(e, grad_final_state ? grad_final_state + state_offset : nullptr, first_value);

    i64 token = last;
    if constexpr (HAS_HALVES) {
        const i64 end = i64(framed[sequence * heads + number]) * CHUNK_LEN;
        if (token >= end) {
            Head given = head;
            StateRows kept[TILES];
            copy_state(kept, e);
            walk_by_halves(smem, given, kept, token, end);
            copy_state(e, kept);
            head = given;
            token = end - CHUNK_LEN;
        }
    }
    float2 pending_exponent = {0.0f, 0.0f};  // the factor that E lacks, for the thread's pair of channels
    walk<false>(smem, head, e, pending_exponent, token, 0);
    wait_for_copies<0>();
    __syncthreads();
    if constexpr (BONUS || CONSTANT_DECAY)
        for (int channel = threadIdx.x; channel < HEAD_SIZE; channel += NUM_THREADS) {
            const i64 at = (sequence * heads + number) * HEAD_SIZE + channel;
            float totals[2] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) totals[0] += smem.sums[0][i][channel], totals[1] += smem.sums[1][i][channel];
            if constexpr (BONUS) du[at] = totals[0];
            if constexpr (CONSTANT_DECAY)
                dw[at] = from_float<T_DW>(totals[1] * log_decay_slope<DECAY>(to_float(w[channel])));
        }
    if (grad_initial_state == nullptr) return;
    write_factor(smem.factor, pending_exponent);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        scale_columns(e[i], smem.factor);
        write_state<STATE_LAYOUT>(grad_initial_state + state_offset, e[i], first_value + 16 * i);
    }
}
