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
//   r w k v a b, cu_seqlens, checkpoints   as in the forward         dy  [batch, tokens, heads, V]  T_IO  in
//   grad_final_state    [sequences, heads, V, K] or kv  fp32  in or null
//   dr dk da db  T_IO, dw  T_W  [batch, tokens, heads, K];   dv  T_IO  [batch, tokens, heads, V]   out
//   grad_initial_state  [sequences, heads, V, K] or kv  fp32  out or null
//
// Grid (sequences, heads). A warp holds 16 TILES value rows of E in fp32 for the whole sequence and makes U, dX and dV for
// them as the forward does, in transposes; then the gradients of the keys' side for KEY_SLAB channels at a time.
#include "wkv7_chunk.cuh"

constexpr int TILES = ceil_div(VALUES / 16, WARPS);
constexpr int SLAB = 16 * TILES;  // value rows of a warp
constexpr int KEY_TILES = min_of(ceil_div(CHANNELS / 16, WARPS), 2), KEY_SLAB = 16 * KEY_TILES;  // channels, likewise
static_assert(WARPS * SLAB == VALUES, "num_threads must be once or twice the value size, rounded up to a multiple of 32");

using StateTile = bf16[VALUES][KEY_PITCH];
struct Smem {
    Operands operands;
    union {
        TokenMatrices matrices;
        struct { TokenTile d_rk, d_rb, d_ak, d_ab; };
    };
    RawKeys raw;
    ValueTile v, dy, u, dx;
    union {
        float2 totals[SEGMENTS][PAIRS];  // while the operands are made
        ValueTile dv;                    // later
    };
    StateTile state, e;                       // S' and E'
    float growth[CHUNK_LEN + 1][KEY_PITCH];   // e^(c_t - m), the row before the first token first
    float state_terms[WARPS][CHANNELS];       // z, a part for each SLAB of value rows
    float factor[CHANNELS];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// Four neighbouring channels of w, as they come from memory; past the last channel the last ones.
struct RawChannels {
    static constexpr int VECTOR = HEAD_SIZE % 4 == 0 ? 4 : 1;
    Words<T_W, VECTOR> held[4 / VECTOR];
    __device__ void load(const T_W* row, int channel) {
#pragma unroll
        for (int i = 0; i < 4 / VECTOR; ++i)
            held[i] = *reinterpret_cast<const Words<T_W, VECTOR>*>(row + min(channel + i, HEAD_SIZE - VECTOR));
    }
    __device__ float at(int i) const { return held[i / VECTOR].at(i % VECTOR); }
};

// Four neighbouring channels to a row in global memory, where they exist.
template <typename T> __device__ inline void write_channels(T* row, int channel, const float (&x)[4]) {
    if constexpr (HEAD_SIZE % 4 != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (channel + i < HEAD_SIZE) row[channel + i] = from_float<T>(x[i]);
    } else if (HEAD_SIZE == CHANNELS || channel < HEAD_SIZE) {
        // The compiler would store a struct piece by piece.
        if constexpr (sizeof(T) == 2)
            asm volatile("st.global.v2.b32 [%0], {%1, %2};"
                         ::"l"(row + channel), "r"(pack_as<T>(x[0], x[1])), "r"(pack_as<T>(x[2], x[3])) : "memory");
        else
            asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                         ::"l"(row + channel), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_backward(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_IO* __restrict__ dy,
    const i64* __restrict__ cu_seqlens, const Checkpoint* __restrict__ checkpoints,
    const float* __restrict__ grad_final_state, T_IO* __restrict__ dr, T_W* __restrict__ dw, T_IO* __restrict__ dk,
    T_IO* __restrict__ dv, T_IO* __restrict__ da, T_IO* __restrict__ db, float* __restrict__ grad_initial_state,
    Strides r_strides, Strides w_strides, Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides,
    Strides dy_strides, i64 tokens, i64 heads, float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int warp = warp_id(), first_value = SLAB * warp;

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
                reinterpret_cast<T_IO*>(rows[0]), source + token * stride, stride, steps, VALUE_SIZE, threadIdx.x);
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

    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Smem) / 4); i += NUM_THREADS)
        reinterpret_cast<unsigned*>(shared_bytes)[i] = 0;  // padding stays zero
    __syncthreads();
    const i64 last = (span.length + CHUNK_LEN - 1) / CHUNK_LEN * CHUNK_LEN - CHUNK_LEN;
    RawDecays next_w;
    if (last >= 0) {
        copy_keys(last), commit_copies();
        next_w.load(w + last * w_strides.token, w_strides.token, static_cast<int>(span.length - last));
    }
    StateRows e[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        read_state<STATE_LAYOUT>(e[i], grad_final_state ? grad_final_state + state_offset : nullptr, first_value + 16 * i);

    const auto operand_r = tile_of(smem.operands.r), operand_a = tile_of(smem.operands.a);
    const auto operand_k = tile_of(smem.operands.k), operand_b = tile_of(smem.operands.b);
    const auto tm = tile_of(smem.matrices.tm), ak = tile_of(smem.matrices.ak);
    const auto rb = tile_of(smem.matrices.rb), rk = tile_of(smem.matrices.rk);
    const auto d_rk = tile_of(smem.d_rk), d_rb = tile_of(smem.d_rb);
    const auto d_ak = tile_of(smem.d_ak), d_ab = tile_of(smem.d_ab);
    const auto tile_v = tile_of(smem.v), tile_dy = tile_of(smem.dy), tile_u = tile_of(smem.u), tile_dx = tile_of(smem.dx);
    const auto tile_state = tile_of(smem.state), tile_e = tile_of(smem.e);
    const auto tile_dv = tile_of(smem.dv);

    float2 behind = {0.0f, 0.0f};  // the factor that E lacks, for the thread's pair of channels
    for (i64 token = last; token >= 0; token -= CHUNK_LEN) {
        const int steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
        const i64 next = token - CHUNK_LEN;
        RateSums sums;
        sum_rates(sums, smem.totals, next_w, steps);
        wait_for_copies<0>();
        __syncthreads();  // the raw keys are there, and nobody reads the last chunk's tiles any more
        copy_values(token), commit_copies();
        load_state(token);
        const Frame frame =
            write_operands<true, KEY_PITCH>(sums, smem.totals, smem.raw, smem.operands, scale, smem.growth);
        write_factor(smem.factor,
                     {behind.x + frame.end.x - frame.middle.x, behind.y + frame.end.y - frame.middle.y});
        behind = frame.middle;
        __syncthreads();  // the operands are there
        if (next >= 0) copy_keys(next);
        commit_copies();

        // Accumulators [value, token]: U and dX before they are solved, and dV.
        Accumulator u[TILES][CHUNK_LEN / 8] = {}, dx[TILES][CHUNK_LEN / 8] = {}, d_value[TILES][CHUNK_LEN / 8] = {};
        write_token_matrices(smem.matrices, smem.operands);
#pragma unroll
        for (int i = 0; i < TILES; ++i) scale_columns(e[i], smem.factor);
        Fragment e_rows[TILES][CHANNELS / 16];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                e_rows[i][c] = to_fragment(e[i][2 * c], e[i][2 * c + 1]);
                store_block(tile_e, first_value + 16 * i, 16 * c, e_rows[i][c]);
                store_block(tile_state, first_value + 16 * i, 16 * c, state_rows[i][c]);
            }
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p) {
                const Right a_block = load_right_transposed(operand_a, 16 * p, 16 * c);
                const Right b_block = load_right_transposed(operand_b, 16 * p, 16 * c);
                const Right k_block = load_right_transposed(operand_k, 16 * p, 16 * c);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    multiply_add(&u[i][2 * p], state_rows[i][c], a_block);
                    multiply_add(&dx[i][2 * p], e_rows[i][c], b_block);
                    multiply_add(&d_value[i][2 * p], e_rows[i][c], k_block);
                }
            }
        }
        wait_for_copies<1>();  // V and dY; the next chunk's keys may still be on their way
        if constexpr (!is_bf16<T_IO>) {
            __syncthreads();
            for (int i = threadIdx.x; i < CHUNK_LEN * VALUES; i += NUM_THREADS) {
                ValueTile& tile = i < CHUNK_LEN * VALUES / 2 ? smem.v : smem.dy;
                const int index = i % (CHUNK_LEN * VALUES / 2) * 2;
                unsigned& word = *reinterpret_cast<unsigned*>(&tile[index / VALUES][index % VALUES]);
                const float2 x = unpack(word);
                word = pack(x.x, x.y);
            }
        }
        __syncthreads();  // the token matrices, V and dY are there

        Fragment dy_rows[TILES][BLOCKS], dx_rows[TILES][BLOCKS], u_rows[TILES][BLOCKS];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            Fragment v_rows[BLOCKS];
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                v_rows[q] = load_left_transposed(tile_v, 16 * q, first_value + 16 * i);
                dy_rows[i][q] = load_left_transposed(tile_dy, 16 * q, first_value + 16 * i);
            }
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q) {
                    if (q <= p) multiply_add(&u[i][2 * p], v_rows[q], load_right_transposed(ak, 16 * p, 16 * q));
                    if (q < p) continue;
                    multiply_add(&dx[i][2 * p], dy_rows[i][q], load_right(rb, 16 * q, 16 * p));
                    multiply_add(&d_value[i][2 * p], dy_rows[i][q], load_right(rk, 16 * q, 16 * p));
                }
            // U^T = .. Tm^T and dX^T = .. Tm
            Fragment u_sums[BLOCKS], dx_sums[BLOCKS];
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                u_sums[q] = to_fragment(u[i][2 * q], u[i][2 * q + 1]);
                dx_sums[q] = to_fragment(dx[i][2 * q], dx[i][2 * q + 1]);
            }
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p) {
                Accumulator u_solved[2] = {}, dx_solved[2] = {};
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q) {
                    if (q <= p) multiply_add(u_solved, u_sums[q], load_right_transposed(tm, 16 * p, 16 * q));
                    if (q >= p) multiply_add(dx_solved, dx_sums[q], load_right(tm, 16 * q, 16 * p));
                }
                u_rows[i][p] = to_fragment(u_solved[0], u_solved[1]);
                dx_rows[i][p] = to_fragment(dx_solved[0], dx_solved[1]);
            }
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
                for (int q = p; q < BLOCKS; ++q)
                    multiply_add(&d_value[i][2 * p], dx_rows[i][q], load_right(ak, 16 * q, 16 * p));
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int p = 0; p < BLOCKS; ++p) {
                store_block_transposed(tile_u, 16 * p, first_value + 16 * i, u_rows[i][p]);
                store_block_transposed(tile_dx, 16 * p, first_value + 16 * i, dx_rows[i][p]);
                const Accumulator &left = d_value[i][2 * p], &right = d_value[i][2 * p + 1];
                store_block_transposed(tile_dv, 16 * p, first_value + 16 * i,
                                       {{pack_as<T_IO>(left[0], left[1]), pack_as<T_IO>(left[2], left[3]),
                                         pack_as<T_IO>(right[0], right[1]), pack_as<T_IO>(right[2], right[3])}});
            }
        __syncthreads();  // U and dX are there, and nobody reads the token matrices any more

        write_rows<T_IO, VALUE_SIZE, CHUNK_LEN, SLAB, VALUE_PITCH, 32>(
            dv + token * value_stride + first_value, value_stride,
            reinterpret_cast<const T_IO*>(&smem.dv[0][first_value]), steps, min(SLAB, VALUE_SIZE - first_value), lane_id());
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
            store_block(is_x ? (is_u ? d_ab : d_ak) : (is_u ? d_rb : d_rk), 16 * p, 16 * q, to_fragment(sum[0], sum[1]));
        }
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                const Right r_block = load_right(operand_r, 16 * q, 16 * c);
                const Right a_block = load_right(operand_a, 16 * q, 16 * c);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    multiply_add(&e[i][2 * c], dy_rows[i][q], r_block);
                    multiply_add(&e[i][2 * c], dx_rows[i][q], a_block);
                }
            }
        }
        float state_sums[CHANNELS / 16];
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {
            // z: products with S' of the same place, summed over the rows. A fragment's words lie as the accumulators do.
            float terms[4] = {};
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const unsigned word = state_rows[i][c].at[j];
                    const Accumulator& sum = e[i][2 * c + j / 2];
                    terms[j / 2 * 2] += low_of(word) * sum[j % 2 * 2];
                    terms[j / 2 * 2 + 1] += high_of(word) * sum[j % 2 * 2 + 1];
                }
            // Lanes of the same channels: each exchange halves what a lane keeps, the last one only adds.
            const bool upper = lane_id() & 16, odd = lane_id() & 8;
            float2 kept = upper ? float2{terms[2], terms[3]} : float2{terms[0], terms[1]};
            kept.x += __shfl_xor_sync(0xffffffffu, upper ? terms[0] : terms[2], 16);
            kept.y += __shfl_xor_sync(0xffffffffu, upper ? terms[1] : terms[3], 16);
            float term = odd ? kept.y : kept.x;
            term += __shfl_xor_sync(0xffffffffu, odd ? kept.x : kept.y, 8);
            term += __shfl_xor_sync(0xffffffffu, term, 4);
            state_sums[c] = term;
        }
        if ((lane_id() & 4) == 0) {
            const int place = lane_id() / 16 * 8 + 2 * quad_lane() + lane_id() / 8 % 2;
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) smem.state_terms[warp][16 * c + place] = state_sums[c];
        }
        __syncthreads();  // the gradients of the token matrices are there

        if (next >= 0) next_w.load(w + next * w_strides.token, w_strides.token, CHUNK_LEN);
#pragma unroll 1
        for (int column = KEY_SLAB * warp; column < CHANNELS; column += KEY_SLAB * WARPS) {
            RawChannels raw_w[2 * BLOCKS][KEY_TILES];
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i)
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
                    raw_w[i][n].load(w + (token + min(8 * i + group(), steps - 1)) * w_strides.token,
                                     column + lane_channel(n));
            using Sums = Accumulator[2 * KEY_TILES];
            Sums d_r[BLOCKS] = {}, d_a[BLOCKS] = {}, d_k[BLOCKS] = {}, d_b[BLOCKS] = {};
            using Columns = Right[KEY_TILES];
            const auto read = [&](Columns& columns, Tile<KEY_PITCH> tile, int row) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) columns[n] = load_right(tile, row, column + 16 * n);
            };
            const auto add = [&](Sums& sums, const Fragment& left, const Columns& columns) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) multiply_add(sums + 2 * n, left, columns[n]);
            };
#pragma unroll
            for (int c = 0; c < VALUES; c += 16) {
                Columns with_state, with_e;
                read(with_state, tile_state, c), read(with_e, tile_e, c);
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p) {
                    add(d_r[p], load_left(tile_dy, 16 * p, c), with_state);
                    add(d_a[p], load_left(tile_dx, 16 * p, c), with_state);
                    add(d_k[p], load_left(tile_v, 16 * p, c), with_e);
                    add(d_b[p], load_left(tile_u, 16 * p, c), with_e);
                }
            }
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                Columns with_k, with_b, with_r, with_a;
                read(with_k, operand_k, 16 * q), read(with_b, operand_b, 16 * q);
                read(with_r, operand_r, 16 * q), read(with_a, operand_a, 16 * q);
#pragma unroll
                for (int p = q; p < BLOCKS; ++p) {
                    add(d_r[p], load_left(d_rk, 16 * p, 16 * q), with_k);
                    add(d_r[p], load_left(d_rb, 16 * p, 16 * q), with_b);
                    add(d_a[p], load_left(d_ak, 16 * p, 16 * q), with_k);
                    add(d_a[p], load_left(d_ab, 16 * p, 16 * q), with_b);
                }
#pragma unroll
                for (int p = 0; p <= q; ++p) {
                    add(d_k[p], load_left_transposed(d_rk, 16 * q, 16 * p), with_r);
                    add(d_k[p], load_left_transposed(d_ak, 16 * q, 16 * p), with_a);
                    add(d_b[p], load_left_transposed(d_rb, 16 * q, 16 * p), with_r);
                    add(d_b[p], load_left_transposed(d_ab, 16 * q, 16 * p), with_a);
                }
            }

            // A lane has four neighbouring channels of a token, two in each of two accumulators.
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) {
                const int place = column + 16 * n + 2 * quad_lane(), channel = column + lane_channel(n);
                float left[4] = {};  // z less what the tokens so far take from it
#pragma unroll
                for (int i = 0; i < WARPS; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float2 part = *reinterpret_cast<const float2*>(&smem.state_terms[i][place + 8 * j]);
                        left[2 * j] += part.x, left[2 * j + 1] += part.y;
                    }
                i64 offset = (token + group()) * key_stride;
#pragma unroll
                for (int i = 0; i < 2 * BLOCKS; ++i, offset += 8 * key_stride) {
                    const int row = 8 * i + group(), p = i / 2, h = i % 2 * 2;
                    const auto read_row = [&](float (&x)[4], const KeyTile& tile) {
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const unsigned word = *reinterpret_cast<const unsigned*>(&tile[row][place + 8 * j]);
                            x[2 * j] = low_of(word), x[2 * j + 1] = high_of(word);
                        }
                    };
                    const auto read_growth = [&](float (&x)[4], const float (&from)[KEY_PITCH]) {
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const float2 pair = *reinterpret_cast<const float2*>(&from[place + 8 * j]);
                            x[2 * j] = pair.x, x[2 * j + 1] = pair.y;
                        }
                    };
                    float r_row[4], a_row[4], k_row[4], b_row[4], grown[4], grown_before[4];
                    read_row(r_row, smem.operands.r), read_row(a_row, smem.operands.a);
                    read_row(k_row, smem.operands.k), read_row(b_row, smem.operands.b);
                    read_growth(grown, smem.growth[row + 1]), read_growth(grown_before, smem.growth[row]);
                    float own[4], own_a[4], sum[4], w_row[4];  // sum: over the lanes' tokens up to this one
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float sum_r = d_r[p][2 * n + j / 2][h + j % 2], sum_a = d_a[p][2 * n + j / 2][h + j % 2];
                        const float sum_k = d_k[p][2 * n + j / 2][h + j % 2], sum_b = d_b[p][2 * n + j / 2][h + j % 2];
                        own_a[j] = a_row[j] * sum_a;
                        own[j] = r_row[j] * sum_r + own_a[j] - k_row[j] * sum_k - b_row[j] * sum_b;
                        sum[j] = own[j];
                        const float shrink = reciprocal(grown[j]);
                        r_row[j] = sum_r * grown[j] * scale, a_row[j] = sum_a * grown_before[j];
                        k_row[j] = sum_k * shrink, b_row[j] = sum_b * shrink;
                    }
#pragma unroll
                    for (int delta = 4; delta < 32; delta *= 2)
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const float other = __shfl_up_sync(0xffffffffu, sum[j], delta);
                            if (lane_id() >= delta) sum[j] += other;
                        }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        w_row[j] = (left[j] - (sum[j] - own[j]) - own_a[j]) * log_decay_slope<DECAY>(raw_w[i][n].at(j));
                        left[j] -= __shfl_sync(0xffffffffu, sum[j], 28 + quad_lane());
                    }
                    if (row < steps) {
                        write_channels(dr + offset, channel, r_row), write_channels(dw + offset, channel, w_row);
                        write_channels(dk + offset, channel, k_row), write_channels(da + offset, channel, a_row);
                        write_channels(db + offset, channel, b_row);
                    }
                }
            }
        }
    }
    wait_for_copies<0>();
    if (grad_initial_state == nullptr) return;
    __syncthreads();
    write_factor(smem.factor, behind);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        scale_columns(e[i], smem.factor);
        write_state<STATE_LAYOUT>(grad_initial_state + state_offset, e[i], first_value + 16 * i);
    }
}
