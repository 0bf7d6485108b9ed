// RWKV-7 time mixing, backward, a chunk after another from the last to the first on the tensor cores. With the
// operands of wkv7_chunk.cuh, S' from the forward, E = dL/dS at the chunk's end and E' = E diag(e^(D - m)):
//
//     U = Tm (Aak V + A S'^T);   dX = Tm^T (Arb^T dY + B E'^T);   dV = Ark^T dY + K E'^T + Aak^T dX
//     dArk = tril(dY V^T)   dArb = tril(dY U^T)   dAak = tril(dX V^T, -1)   dAab = tril(dX U^T, -1)
//     dR = dArk K + dArb B + dY S'          dA = dAak K + dAab B + dX S'
//     dK = dArk^T R + dAak^T A + V E'       dB = dArb^T R + dAab^T A + U E'
//     E <- (E' + dY^T R + dX^T A) diag(e^m)
//
// and dr, da, dk, db are dR, dA, dK, dB times the factors that made R, A, K, B. With z = sum_v S' * (E' + dY^T R +
// dX^T A) the gradient of token t's log-decay is
//
//     z - sum_(s < t) (R dR - K dK - B dB)_s - sum_(s <= t) (A dA)_s
//
// from the rounded operands and the unrounded dR .. dB, so that what belongs to pairs of tokens on one side of t
// cancels exactly, as both of its places hold the same products.
//
//   r w k v a b, cu_seqlens, checkpoints, framed   as in the forward         dy  [batch, tokens, heads, V]  T_IO  in
//   carried  [sequences, heads], as the states  in, by halves out: E before the chunks that are taken by halves, where
//            these are not all
//   grad_final_state    [sequences, heads, V, K] or kv  fp32  in or null
//   dr dk da db  T_IO, dw  T_W  [batch, tokens, heads, K];   dv  T_IO  [batch, tokens, heads, V]   out
//   grad_initial_state  [sequences, heads, V, K] or kv  fp32  out or null
//
// Grid (sequences, heads). A warp holds 16 TILES value rows of E in fp32 for the whole sequence and makes U, dX and dV
// for them as the forward does, in transposes; then the gradients of the keys' side for 16 channels at a time. The
// chunks of a head behind those in frames come first, in a launch of its own with BY_HALVES: as in the forward S' and
// E' are S and E then, and the gradients of the keys' side are those of wkv7_halves.cuh. The launch for the chunks in
// frames may begin beside it (overlap.cuh). SKIPS_ZEROS is as in the forward.
#include "wkv7_key_side.cuh"
#include "wkv7_value_side.cuh"
#include "wkv7_halves.cuh"
#include "overlap.cuh"

constexpr int TILES = ceil_div(VALUES / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;  // value rows of a warp
static_assert(WARPS * WARP_ROWS == VALUES,
              "num_threads must be once or twice the value size, rounded up to a multiple of 32");

using StateTile = T_IO[VALUES][KEY_PITCH];
struct Work {
    Operands operands;
    ValueTile u, dx;
    StateTile state, e;  // S' and E'
};
struct Smem {
    union {
        Work work;
        LevelTiles levels[LEVELS];  // by halves, before the others are there
    };
    union {
        TokenMatrices matrices;
        PairGradients<TokenTile> d;
    };
    RawKeys raw;
    ValueTile v, dy;
    union {
        float2 totals[SEGMENTS][PAIRS];  // while the operands are made
        ValueTile dv;                    // later
    };
    // e^(c_t - m), the row before the first token first, or by halves the tokens' decays; later dL/dc
    float growth[CHUNK_LEN + 1][GROWTH_PITCH];
    float state_terms[WARPS][CHANNELS];       // z, a part for each WARP_ROWS of value rows
    float factor[CHANNELS];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_backward(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_IO* __restrict__ dy,
    const i64* __restrict__ cu_seqlens, const Checkpoint* __restrict__ checkpoints, const int* __restrict__ framed,
    float* __restrict__ carried, const float* __restrict__ grad_final_state, T_IO* __restrict__ dr,
    T_W* __restrict__ dw, T_IO* __restrict__ dk,
    T_IO* __restrict__ dv, T_IO* __restrict__ da, T_IO* __restrict__ db, float* __restrict__ grad_initial_state,
    Strides r_strides, Strides w_strides, Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides,
    Strides dy_strides, i64 tokens, i64 heads, float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int warp = warp_id(), first_value = WARP_ROWS * warp;

    // those that are walked over end and begin there
    i64 chunks = (span.length + CHUNK_LEN - 1) / CHUNK_LEN, first = 0;
    bool has_rest = false;                                              // behind them, that was taken by halves
    if constexpr (LARGEST_DECAY > 0) {
        const i64 in_frames = framed[sequence * heads + head];
        if (BY_HALVES && in_frames >= chunks) return;
        if constexpr (BY_HALVES) let_next_launch_begin();
        has_rest = in_frames < chunks;
        if (!BY_HALVES && has_rest && in_frames == 0) return end_behind_previous_launch();  // nothing is left to do
        (BY_HALVES ? first : chunks) = in_frames;
    }
    first *= CHUNK_LEN;
    const i64 last = chunks * CHUNK_LEN - CHUNK_LEN;
    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
    r += start(r_strides), w += start(w_strides), k += start(k_strides), a += start(a_strides), b += start(b_strides);
    v += start(v_strides), dy += start(dy_strides);
    const i64 key_stride = heads * HEAD_SIZE, value_stride = heads * VALUE_SIZE;  // outputs are contiguous
    const i64 out_row = (span.batch * tokens + span.begin) * heads + head;
    dr += out_row * HEAD_SIZE, dw += out_row * HEAD_SIZE, dk += out_row * HEAD_SIZE;
    da += out_row * HEAD_SIZE, db += out_row * HEAD_SIZE, dv += out_row * VALUE_SIZE;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    checkpoints += first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) * heads + head;

    const auto copy_keys = [&](i64 token) {
        const i64 steps = span.length - token;
        const auto copy = [&](T_IO (&rows)[CHUNK_LEN][CHANNELS], const T_IO* source, i64 stride) {
            copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS>(
                rows[0], source + token * stride, stride, steps, HEAD_SIZE, threadIdx.x);
        };
        copy(smem.raw.a, a, a_strides.token), copy(smem.raw.k, k, k_strides.token);
        copy(smem.raw.b, b, b_strides.token), copy(smem.raw.r, r, r_strides.token);
    };
    const auto copy_values = [&](i64 token) {
        const i64 steps = span.length - token;
        const auto copy = [&](ValueTile& rows, const T_IO* source, i64 stride) {
            copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, VALUE_SIZE, VALUE_PITCH, NUM_THREADS>(
                rows[0], source + token * stride, stride, steps, VALUE_SIZE, threadIdx.x);
        };
        copy(smem.v, v, v_strides.token), copy(smem.dy, dy, dy_strides.token);
    };
    Fragment state_rows[TILES][CHANNELS / 16];  // S'
    const auto load_state = [&](i64 token) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c)
                state_rows[i][c] = read_checkpoint(checkpoints + token / CHUNK_LEN * heads, first_value + 16 * i, c);
    };

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    RawDecays next_w;
    if (last >= first) {
        copy_keys(last), commit_copies();
        next_w.load(w + last * w_strides.token, w_strides.token,
                    static_cast<int>(min(span.length - last, i64(CHUNK_LEN))));
    }
    StateRows e[TILES];
    const float* const from = has_rest && !BY_HALVES ? after_previous_launch(carried) : grad_final_state;
    read_state<STATE_LAYOUT>(e, from ? from + state_offset : nullptr, first_value);

    const auto operand_r = tile_of(smem.work.operands.r), operand_a = tile_of(smem.work.operands.a);
    const auto operand_k = tile_of(smem.work.operands.k), operand_b = tile_of(smem.work.operands.b);
    const KeyTiles<Tile<KEY_PITCH>> tiles = {operand_r, operand_a, operand_k, operand_b};
    const TokenTiles matrices = tiles_of(smem.matrices);
    const auto d_rk = tile_of(smem.d.rk), d_rb = tile_of(smem.d.rb);
    const auto d_ak = tile_of(smem.d.ak), d_ab = tile_of(smem.d.ab);
    const PairGradients<Tile<TOKEN_PITCH>> d_tiles = {d_rk, d_rb, d_ak, d_ab};
    const auto tile_v = tile_of(smem.v), tile_dy = tile_of(smem.dy), tile_u = tile_of(smem.work.u),
               tile_dx = tile_of(smem.work.dx);
    const auto tile_state = tile_of(smem.work.state), tile_e = tile_of(smem.work.e);
    const ValueTiles<Tile<VALUE_PITCH>> value_tiles = {tile_v, tile_dy, tile_u, tile_dx, tile_of(smem.dv)};

    float2 pending_exponent = {0.0f, 0.0f};  // the factor that E lacks, for the thread's pair of channels
    for (i64 token = last; token >= first; token -= CHUNK_LEN) {
        const int steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
        const i64 next = token - CHUNK_LEN;
        RateSums sums;
        if constexpr (!BY_HALVES) sum_rates(sums, smem.totals, next_w, steps);
        wait_for_copies<0>();
        __syncthreads();  // the raw keys are there, and nobody reads the last chunk's tiles any more
        copy_values(token), commit_copies();
        const bool starts_empty = SKIPS_ZEROS && token == 0, ends_empty = SKIPS_ZEROS && from == nullptr && token == last;
        if (!starts_empty) load_state(token);
        if constexpr (BY_HALVES) {
            const float2 factor = write_matrices_by_halves<true>(smem.matrices, smem.levels, smem.raw, next_w, steps,
                                                                 smem.totals, scale, smem.growth);
            write_decay(smem.factor, factor);
        } else {
            const Frame frame =
                write_operands<true, GROWTH_PITCH>(sums, smem.totals, smem.raw, smem.work.operands, scale, smem.growth);
            write_factor(smem.factor, {pending_exponent.x + frame.end.x - frame.middle.x,
                                       pending_exponent.y + frame.end.y - frame.middle.y});
            pending_exponent = frame.middle;
        }
        __syncthreads();  // the operands are there, and by halves the matrices
        const auto copy_next = [&] {
            if (next >= first) copy_keys(next);
            commit_copies();
        };
        if constexpr (!BY_HALVES) copy_next();

        // Accumulators [value, token]: U and dX before they are solved, and dV.
        Accumulator u[TILES][CHUNK_LEN / 8] = {}, dx[TILES][CHUNK_LEN / 8] = {}, d_value[TILES][CHUNK_LEN / 8] = {};
        if constexpr (!BY_HALVES) {
            write_token_matrices(smem.matrices, smem.work.operands);
            if (!ends_empty) scale_columns(e, smem.factor);  // E' = E diag(e^(D - m))
        }
        Fragment e_rows[TILES][CHANNELS / 16];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                e_rows[i][c] = to_fragment(e[i][2 * c], e[i][2 * c + 1]);
                if (!ends_empty) store_block(tile_e, first_value + 16 * i, 16 * c, e_rows[i][c]);
                if (!starts_empty) store_block(tile_state, first_value + 16 * i, 16 * c, state_rows[i][c]);
            }
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {  // U <- A S'^T   dX <- B E'^T   dV <- K E'^T
            if constexpr (!SKIPS_ZEROS) {
                add_columns(16 * c, full(u, operand_a, state_rows), full(dx, operand_b, e_rows),
                            full(d_value, operand_k, e_rows));
            } else {
                if (!starts_empty) add_columns(16 * c, full(u, operand_a, state_rows));
                if (!ends_empty) add_columns(16 * c, full(dx, operand_b, e_rows), full(d_value, operand_k, e_rows));
            }
        }
        wait_for_copies<BY_HALVES ? 0 : 1>();  // V and dY; the next chunk's keys may still be on their way
        __syncthreads();  // the token matrices, V and dY are there

        Fragment dy_rows[TILES][BLOCKS], dx_rows[TILES][BLOCKS];
        finish_values(u, dx, d_value, dy_rows, dx_rows, matrices, value_tiles, first_value);
        __syncthreads();  // U and dX are there, and nobody reads the token matrices any more

        write_rows_at_once<T_IO, VALUE_SIZE, CHUNK_LEN, VALUE_SIZE, VALUE_PITCH, NUM_THREADS>(
            dv + token * value_stride, value_stride, smem.dv[0], steps, VALUE_SIZE,
            threadIdx.x);
        // dArk dArb dAak dAab, a block of one of them at a time.
        for (int task = warp; task < 4 * (BLOCKS * (BLOCKS + 1) / 2); task += WARPS) {
            const bool is_x = task & 1, is_u = task & 2;
            const int p = task < 4 ? 0 : 1, q = task < 8 ? 0 : 1;
            const auto left = is_x ? tile_dx : tile_dy, right = is_u ? tile_u : tile_v;
            Accumulator sum[2] = {};
#pragma unroll
            for (int c = 0; c < VALUES; c += 16)
                multiply_add(sum, load_left(left, 16 * p, c), load_right_transposed(right, 16 * q, c));
            if (q == p) keep_lower(sum, is_x);
            store_block(is_x ? (is_u ? d_ab : d_ak) : (is_u ? d_rb : d_rk), 16 * p, 16 * q,
                        to_fragment(sum[0], sum[1]));
        }
        if constexpr (BY_HALVES) {
            if (!starts_empty) write_state_terms(smem.state_terms[warp], state_rows, e);
            scale_columns<1>(e, smem.factor);
        }
        if (!starts_empty)
            add_outer(e, outer(dy_rows, operand_r), outer(dx_rows, operand_a));  // E' <- E' + dY^T R + dX^T A
        if (!BY_HALVES && !starts_empty) write_state_terms(smem.state_terms[warp], state_rows, e);
        if (starts_empty)
            for (int channel = lane_id(); channel < CHANNELS; channel += 32) smem.state_terms[warp][channel] = 0.0f;
        __syncthreads();  // the gradients of the token matrices are there

        if (next >= first) next_w.load(w + next * w_strides.token, w_strides.token, CHUNK_LEN);
#pragma unroll 1
        for (int column = 16 * warp; column < CHANNELS; column += 16 * WARPS) {
            if constexpr (BY_HALVES) {
                float terms[2] = {};
#pragma unroll
                for (int i = 0; i < WARPS; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j) terms[j] += smem.state_terms[i][column + group() + 8 * j];
                const auto own_pair = [&](int t) {
                    return float2{to_float(smem.d.rk[t][t]), to_float(smem.d.rb[t][t])};
                };
                const auto begin_r = [&](TreeGradients& grads, int b) {
                    if (!starts_empty) multiply_end<VALUES>(grads.left, tile_state, tile_dy, column, b);
                    if (!ends_empty) multiply_end<VALUES>(grads.right, tile_e, tile_v, column, b);
                };
                const auto begin_a = [&](TreeGradients& grads, int b) {
                    if (!starts_empty) multiply_end<VALUES>(grads.left, tile_state, tile_dx, column, b);
                    if (!ends_empty) multiply_end<VALUES>(grads.right, tile_e, tile_u, column, b);
                };
                write_key_gradients_by_halves(tiles, smem.raw, d_tiles, begin_r, begin_a, own_pair, smem.growth, terms,
                                              column, scale);
                continue;
            }
            TokenSums d_r = {}, d_a = {}, d_k = {}, d_b = {};  // [channel, token]
#pragma unroll
            for (int c = 0; c < VALUES; c += 16) {
                Fragment with_state, with_e;
                if (!starts_empty) with_state = load_left_transposed(tile_state, c, column);
                if (!ends_empty) with_e = load_left_transposed(tile_e, c, column);
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p) {
                    if (!starts_empty) {  // dR <- dY S'   dA <- dX S'
                        multiply_add(&d_r[2 * p], with_state, load_right_transposed(tile_dy, 16 * p, c));
                        multiply_add(&d_a[2 * p], with_state, load_right_transposed(tile_dx, 16 * p, c));
                    }
                    if (ends_empty) continue;  // dK <- V E'   dB <- U E'
                    multiply_add(&d_k[2 * p], with_e, load_right_transposed(tile_v, 16 * p, c));
                    multiply_add(&d_b[2 * p], with_e, load_right_transposed(tile_u, 16 * p, c));
                }
            }
            const KeyRows rows(tiles, column);
            // dR <- dR + dArk K + dArb B     dA <- dA + dAak K + dAab B
            // dK <- dK + dArk^T R + dAak^T A   dB <- dB + dArb^T R + dAab^T A
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
                for (int q = 0; q <= p; ++q) {
                    multiply_add(&d_r[2 * p], rows.k[q], load_right_transposed(d_rk, 16 * p, 16 * q));
                    multiply_add(&d_r[2 * p], rows.b[q], load_right_transposed(d_rb, 16 * p, 16 * q));
                    multiply_add(&d_a[2 * p], rows.k[q], load_right_transposed(d_ak, 16 * p, 16 * q));
                    multiply_add(&d_a[2 * p], rows.b[q], load_right_transposed(d_ab, 16 * p, 16 * q));
                    multiply_add(&d_k[2 * q], rows.r[p], load_right(d_rk, 16 * p, 16 * q));
                    multiply_add(&d_k[2 * q], rows.a[p], load_right(d_ak, 16 * p, 16 * q));
                    multiply_add(&d_b[2 * q], rows.r[p], load_right(d_rb, 16 * p, 16 * q));
                    multiply_add(&d_b[2 * q], rows.a[p], load_right(d_ab, 16 * p, 16 * q));
                }

            write_key_gradients(d_r, d_a, d_k, d_b, rows, tiles, smem.growth, smem.state_terms, column, scale);
        }
        ChunkDecays<CHANNELS> raw_w;
        raw_w.load(w + token * w_strides.token, w_strides.token, steps);
        __syncthreads();  // the gradients are there

        if constexpr (BY_HALVES) copy_next();  // nobody reads the raw keys any more
        const auto write = [&](T_IO* target, const KeyTile& tile) {
            write_rows_at_once<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS>(
                target + token * key_stride, key_stride, tile[0], steps, HEAD_SIZE,
                threadIdx.x);
        };
        write(dr, smem.work.operands.r), write(da, smem.work.operands.a);
        write(dk, smem.work.operands.k), write(db, smem.work.operands.b);
        raw_w.write_slopes(dw + token * key_stride, static_cast<unsigned>(key_stride), smem.growth, steps);
    }
    wait_for_copies<0>();
    float* const to = BY_HALVES && first > 0 ? carried : grad_initial_state;
    if (to != nullptr) {
        __syncthreads();
        write_factor(smem.factor, pending_exponent);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            scale_columns(e[i], smem.factor);
            write_state<STATE_LAYOUT>(to + state_offset, e[i], first_value + 16 * i);
        }
    }
    if constexpr (LARGEST_DECAY > 0 && !BY_HALVES) end_behind_previous_launch();
}
