// Kimi Delta Attention, forward, 64 tokens after another, with the products of sm_90a. Per head, with q_t and k_t as
// they are behind their norm, c_t[j] the sum of channel j's log-decays up to token t of the chunk and D over all of it,
//
//     L_ts = rate_s sum_j k_t[j] k_s[j] e^(c_t[j] - c_s[j]), s < t    Tm = (I + L)^-1
//     M_ts = scale rate_s sum_j q_t[j] k_s[j] e^(c_t[j] - c_s[j]), s <= t
//     U = Tm (V - (K e^c) S_0^T)    Y = scale (Q e^c) S_0^T + M U    S = S_0 e^D + (rate U)^T (K e^(D - c))
//
//   r k      [batch, tokens, heads / GROUP, K]  T_IO  in   v, y  [batch, tokens, heads, V]  T_IO  in, out
//   g        [batch, tokens, heads, K]  T_W  in; a_log  [heads], dt_bias  [heads, K]  fp32  in, the second or null: the
//            log-decay is -exp(a_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(a_log) (g + dt_bias))
//   beta     [batch, tokens, heads]  T_BETA  in: the rate, or what it is a sigmoid of
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//
// Grid (sequences, heads). Two groups of four warps have 64 value rows of S each, in fp32 registers, and work with
// transposes, [value, token], so that what one product gives is the next one's left operand as it lies in registers. A
// third group makes operands and token matrices of the next chunk meanwhile, a warp of 16 tokens and 64 channels at a
// time (channel_decay.cuh); its rows come to shared memory a chunk ahead. Norms and rates are factors of rows and
// columns of products. Any decay is safe.
#include "bulk_copy.cuh"
#include "chunk.cuh"
#include "channel_decay.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(HEAD_SIZE == 128 && VALUE_SIZE == 128, "heads have 128 channels and values");
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");
static_assert(NUM_THREADS == 384, "num_threads must be 384");

constexpr int SLABS = HEAD_SIZE / TILE_COLUMNS, GROUP_THREADS = 128, MAKERS = 2 * GROUP_THREADS;

// Of a thread: of a multiprocessor's 65536 the groups have 64512 together.
constexpr int PRODUCT_REGISTERS = 176, MAKER_REGISTERS = 152;

struct Factors {
    float of_k[CHUNK_LEN];     // 1 over the norm of k
    float of_q[CHUNK_LEN];     // scale over the norm of q
    float written[CHUNK_LEN];  // the rate over the norm of k
    float diagonal[CHUNK_LEN]; // of M
    float end[HEAD_SIZE];      // e^D
};
// Of blocks 16 tokens apart, and of halves: rows of keys and of queries, columns.
struct CrossTiles {
    Slab<64> rows[2];     // k_1 q_1 k_3 q_3; k_2 k_3 q_2 q_3
    Slab<32> columns[2];  // k_0 k_2; k_0 k_1
};
struct TokenMatrices { Slab<CHUNK_LEN> tm, m; };
struct BlockTiles {
    LevelTile levels[4][2];
};
struct Solver {
    Slab<CHUNK_LEN> lower;  // -L, without the blocks on its diagonal
    Slab<BLOCK> turned[4];
    float diagonal[4][BLOCK][BLOCK + 4];  // its blocks there, a column per row
};
// In turns: there is no room for all of them.
union Work {
    BlockTiles tiles;
    CrossTiles cross;
    Solver solver;
};

struct __align__(1024) Smem {
    Slab<CHUNK_LEN> erased[SLABS], read[SLABS];  // K e^c, Q e^c
    Slab<CHUNK_LEN> written[2][SLABS];           // K e^(D - c)
    TokenMatrices matrices;
    Slab<CHUNK_LEN> values[2][2];                // by chunk and group; later U and Y
    Slab<CHUNK_LEN> q[SLABS], k[SLABS];          // as they come
    T_W w[CHUNK_LEN][HEAD_SIZE];
    Work work;
    float4 sums[4][10][32];                      // products of the first slab, by lane
    float totals[4][HEAD_SIZE];                  // decays over blocks
    Factors factors[2];
    CopyBarrier ready, keys_free, matrices_free;
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

__device__ inline void store_element(Slab<CHUNK_LEN>& slab, int row, int column, float x) {
    reinterpret_cast<T_IO*>(word_of(slab, row, column / 2))[column % 2] = from_float<T_IO>(x);
}
// A block of pairs times the factors of its tokens.
__device__ inline Fragment scaled_pairs(const Accumulator& left, const Accumulator& right, const float* of_row,
                                        const float* of_column, float sign) {
    const float rows[2] = {sign * of_row[group()], sign * of_row[group() + 8]};
    Accumulator sums[2];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        sums[i / 4][i % 4] =
            (i < 4 ? left : right)[i % 4] * rows[i % 4 / 2] * of_column[i / 4 * 8 + 2 * quad_lane() + i % 2];
    return to_fragment(sums[0], sums[1]);
}

// Keeps the compiler from rounding later than here, so that what is rounded leaves its registers.
template <int COUNT> __device__ inline void hold(Fragment (&fragments)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragments[i].at[j])::"memory");
}

// Sums of a lane.
template <int COUNT>
__device__ inline void read_sums(Accumulator (&sums)[COUNT], const float4 (*from)[32], bool exist) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float4 sum = exist ? from[i][lane_id()] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        sums[i][0] = sum.x, sums[i][1] = sum.y, sums[i][2] = sum.z, sums[i][3] = sum.w;
    }
}
template <int COUNT> __device__ inline void write_sums(float4 (*to)[32], const Accumulator (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i][lane_id()] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
}

// By a warp, of its tokens.
__device__ inline void write_factors(Smem& smem, Factors& factors, const T_BETA* beta, i64 beta_stride, int first,
                                     int steps, float scale) {
    Words<T_BETA, 1> of_beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        of_beta[i] = load_early<Words<T_BETA, 1>>(beta + min(first + group() + 8 * i, steps - 1) * beta_stride);
    DiagonalSums sums = {};
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) sums.add(tile_of(smem.k[slab]), tile_of(smem.q[slab]), first);
    if (has_diagonal())
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first + group() + 8 * i;
            const float of_k = HAS_NORM ? norm_factor(sums.keys[i]) : 1.0f;
            const float of_q = scale * (HAS_NORM ? norm_factor(sums.queries[i]) : 1.0f);
            const float written = token < steps ? rate_of(of_beta[i].at(0)) * of_k : 0.0f;
            factors.of_k[token] = of_k, factors.of_q[token] = of_q, factors.written[token] = written;
            factors.diagonal[token] = sums.both[i] * of_q * written;
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
        begin_barrier(smem.ready, 4), begin_barrier(smem.keys_free, 8), begin_barrier(smem.matrices_free, 8);
        publish_barriers();
    }
    __syncthreads();
    const auto arrive = [&](CopyBarrier& barrier) {
        __syncwarp();
        if (lane == 0) arrive_at<1>(barrier, 0);
    };

    if (warp >= MAKERS / 32) {
        leave_registers<MAKER_REGISTERS>();
        const int p = warp % 4, first = BLOCK * p;  // the warp's tokens of a chunk
        r += start_of(r_strides, key_head) + first * r_strides.token;
        k += start_of(k_strides, key_head) + first * k_strides.token;
        w += start_of(w_strides, head) + first * w_strides.token;
        beta += start_of(beta_strides, head);
        const Gate gate = {exp2_fast(LOG2_E * a_log[head]) * (IS_BOUNDED ? LOG2_E : 1.0f), LOG2_E * lower_bound};
        float bias[SLABS][2] = {};
        if constexpr (HAS_BIAS)
#pragma unroll
            for (int i = 0; i < 2 * SLABS; ++i)
                bias[i / 2][i % 2] = dt_bias[head * HEAD_SIZE + i / 2 * TILE_COLUMNS + 2 * lane + i % 2];
        const auto synchronize = [] { synchronize_threads(1, GROUP_THREADS); };
        // Rows of the warp's tokens and of a slab's channels.
        const auto copy = [&](int chunk, int slab) {
            const int present = min(length - chunk * CHUNK_LEN - first, BLOCK);
            if (chunk < chunks) {
                const i64 token = i64(chunk) * CHUNK_LEN;
#pragma unroll
                for (int i = 0; i < BLOCK; i += 4) {
                    const int row = i + lane / 8, unit = lane % 8, column = slab * TILE_COLUMNS + 8 * unit;
                    const auto place = [&](Slab<CHUNK_LEN>& to) {
                        return shared_address(&to.units[first + row][unit ^ row % 8]);
                    };
                    copy_async<16>(place(smem.q[slab]), r + ((token + row) * r_strides.token + column), row < present);
                    copy_async<16>(place(smem.k[slab]), k + ((token + row) * k_strides.token + column), row < present);
                }
                constexpr int PER_UNIT = 16 / sizeof(T_W), UNITS = TILE_COLUMNS / PER_UNIT, ROWS = 32 / UNITS;
#pragma unroll
                for (int i = 0; i < BLOCK; i += ROWS) {
                    const int row = i + lane / UNITS, column = slab * TILE_COLUMNS + lane % UNITS * PER_UNIT;
                    copy_async<16>(shared_address(&smem.w[first + row][column]),
                                   w + ((token + row) * w_strides.token + column), row < present);
                }
            }
            commit_copies();
        };
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) copy(0, slab);
        Work& work = smem.work;
        CrossTiles& cross = work.cross;

        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int steps = length - chunk * CHUNK_LEN, parity = chunk % 2;
            Factors& factors = smem.factors[parity];
            wait_for_copies<0>();
            __syncwarp();  // the warp's rows are there
            write_factors(smem, factors, beta + i64(chunk) * CHUNK_LEN * beta_strides.token, beta_strides.token, first,
                          steps, scale);
            Accumulator of_level[4], of_cross[6];  // of blocks and of halves
#pragma unroll 1
            for (int slab = 0; slab < SLABS; ++slab) {
                // Sums of the first slab wait in shared memory for the second: registers are few.
                const bool is_last = slab + 1 == SLABS;
                __syncwarp();  // nobody reads the tiles of levels any more
                ScaledBlock rows;
                const int channel = slab * TILE_COLUMNS + 2 * lane;
                const float own_bias[2] = {slab == 0 ? bias[0][0] : bias[1][0], slab == 0 ? bias[0][1] : bias[1][1]};
                LevelTile(&tiles)[2] = work.tiles.levels[p];
#pragma unroll
                for (int four = 0; four < BLOCK; four += 4) {
#pragma unroll
                    for (int t = four; t < four + 4; ++t) {
                        const Words<T_W, 2> g = *reinterpret_cast<const Words<T_W, 2>*>(&smem.w[first + t][channel]);
                        const float2 of_q = unpack(*word_of(smem.q[slab], first, t, lane));
                        const float2 of_k = unpack(*word_of(smem.k[slab], first, t, lane));
                        const float one_k[2] = {of_k.x, of_k.y}, one_q[2] = {of_q.x, of_q.y};
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const float decay = gate.decay(g.at(j), own_bias[j]);
                            rows.whole[t][j] = decay, rows.column[t][j] = one_k[j];
                            rows.k[t][j] = decay * one_k[j], rows.q[t][j] = decay * one_q[j];
                        }
                    }
                    if (first + BLOCK > steps)  // what is past the last token does not decay; its keys are zeros
#pragma unroll
                        for (int t = four; t < four + 4; ++t)
                            if (first + t >= steps) rows.whole[t][0] = rows.whole[t][1] = 1.0f;
                    rows.write<1>(tiles[0], four, 4), rows.grow<1>(four, 4);
                    rows.write<2>(tiles[1], four, 4), rows.grow<2>(four, 4);
                }
                __syncwarp();
                Accumulator(&of_small)[2] = reinterpret_cast<Accumulator(&)[2]>(of_level[0]);
                read_sums(of_small, &smem.sums[p][0], is_last);
                multiply_level(of_small[0], tiles[0]), multiply_level(of_small[1], tiles[1]);
                if (!is_last) write_sums(&smem.sums[p][0], of_small);
                __syncwarp();
                copy(chunk + 1, slab);
                rows.write<4>(tiles[0], 0, BLOCK), rows.grow<4>(0, BLOCK);
                rows.write<8>(tiles[1], 0, BLOCK), rows.grow<8>(0, BLOCK);
                *reinterpret_cast<float2*>(&smem.totals[p][channel]) = {rows.whole[0][0], rows.whole[0][1]};
                __syncwarp();
                Accumulator(&of_large)[2] = reinterpret_cast<Accumulator(&)[2]>(of_level[2]);
                read_sums(of_large, &smem.sums[p][2], is_last);
                multiply_level(of_large[0], tiles[0]), multiply_level(of_large[1], tiles[1]);
                if (!is_last) write_sums(&smem.sums[p][2], of_large);
                if (slab == 0 && chunk > 0) wait_for(smem.keys_free, (chunk - 1) % 2);
                synchronize();  // the decays over all blocks are there, and nobody reads the last slab's tiles any more

                float2 whole[4], before = {1.0f, 1.0f}, after = {1.0f, 1.0f};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    whole[i] = *reinterpret_cast<const float2*>(&smem.totals[i][channel]);
                    if (i < p) before.x *= whole[i].x, before.y *= whole[i].y;
                    if (i > p) after.x *= whole[i].x, after.y *= whole[i].y;
                }
                if (p == 0)
                    *reinterpret_cast<float2*>(&factors.end[channel]) = {whole[0].x * after.x, whole[0].y * after.y};
                const float2 between = p == 0 ? whole[1] : p == 3 ? whole[2] : float2{1.0f, 1.0f};
#pragma unroll
                for (int t = 0; t < BLOCK; ++t) {
                    const float(&of_k)[2] = rows.k[t], (&of_q)[2] = rows.q[t], (&column)[2] = rows.column[t];
                    *word_of(smem.erased[slab], first, t, lane) = pack(of_k[0] * before.x, of_k[1] * before.y);
                    *word_of(smem.read[slab], first, t, lane) = pack(of_q[0] * before.x, of_q[1] * before.y);
                    *word_of(smem.written[parity][slab], first, t, lane) =
                        pack(column[0] * after.x, column[1] * after.y);
                }
                if (p % 2 == 1) {
#pragma unroll
                    for (int t = 0; t < BLOCK; ++t) {
                        *word_of(cross.rows[0], p / 2 * 32, t, lane) = pack(rows.k[t][0], rows.k[t][1]);
                        *word_of(cross.rows[0], p / 2 * 32 + 16, t, lane) = pack(rows.q[t][0], rows.q[t][1]);
                    }
                } else {
#pragma unroll
                    for (int t = 0; t < BLOCK; ++t)
                        *word_of(cross.columns[0], p / 2 * 16, t, lane) = pack(rows.column[t][0], rows.column[t][1]);
                }
                if (p >= 2) {
#pragma unroll
                    for (int t = 0; t < BLOCK; ++t) {
                        *word_of(cross.rows[1], first - 32, t, lane) =
                            pack(rows.k[t][0] * between.x, rows.k[t][1] * between.y);
                        *word_of(cross.rows[1], first, t, lane) =
                            pack(rows.q[t][0] * between.x, rows.q[t][1] * between.y);
                    }
                } else {
#pragma unroll
                    for (int t = 0; t < BLOCK; ++t)
                        *word_of(cross.columns[1], first, t, lane) =
                            pack(rows.column[t][0] * between.x, rows.column[t][1] * between.y);
                }
                synchronize();  // rows and columns of blocks and halves are there
                const auto rows_of_blocks = tile_of(cross.rows[0]), rows_of_halves = tile_of(cross.rows[1]);
                const auto of_columns = tile_of(cross.columns[0]), of_half = tile_of(cross.columns[1]);
                read_sums(of_cross, &smem.sums[p][4], is_last);
#pragma unroll
                for (int c = 0; c < TILE_COLUMNS; c += 16) {
                    multiply_add(&of_cross[0], load_left(rows_of_blocks, 16 * p, c),
                                 load_right_transposed(of_columns, p / 2 * 16, c));
                    const Fragment left = load_left(rows_of_halves, 16 * p, c);
                    multiply_add(&of_cross[2], left, load_right_transposed(of_half, 0, c));
                    multiply_add(&of_cross[4], left, load_right_transposed(of_half, 16, c));
                }
                if (!is_last) write_sums(&smem.sums[p][4], of_cross);
                synchronize();  // nobody reads these tiles any more
            }

            if (chunk > 0) wait_for(smem.matrices_free, (chunk - 1) % 2);
            synchronize();  // the factors are there, and nobody reads the last token matrices any more
            const auto m = tile_of(smem.matrices.m), tm = tile_of(smem.matrices.tm);
            const auto lower = tile_of(work.solver.lower);
            if (lane < BLOCK) {
                const int token = first + lane;
                store_element(smem.matrices.m, token, token, factors.diagonal[token]);
            }
#pragma unroll
            for (int level = 0; level < 4; ++level) {
                const int n = 1 << level, block = group() >> level, row = (block << (level + 1)) + n + group() % n;
                const float of_k = -factors.of_k[first + row], of_q = factors.of_q[first + row];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int i = 2 * quad_lane() + j, column = (i >> level << (level + 1)) + i % n;
                    const float of_column = factors.written[first + column];
                    if (i >> level == block) {
                        work.solver.diagonal[p][column][row] = of_level[level][j] * of_k * of_column;
                        store_element(smem.matrices.m, first + row, first + column,
                                      of_level[level][2 + j] * of_q * of_column);
                    }
                }
            }
            {
                const int row = 16 * (p / 2 * 2 + 1), column = 16 * (p / 2 * 2);
                const bool is_query = p % 2;
                const Fragment f =
                    scaled_pairs(of_cross[0], of_cross[1], &(is_query ? factors.of_q : factors.of_k)[row],
                                 &factors.written[column], is_query ? 1.0f : -1.0f);
                store_block(is_query ? m : lower, row, column, f);
            }
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = 32 + 16 * (p % 2);
                const bool is_query = p >= 2;
                const Fragment f =
                    scaled_pairs(of_cross[2 + 2 * q], of_cross[3 + 2 * q],
                                 &(is_query ? factors.of_q : factors.of_k)[row], &factors.written[16 * q],
                                 is_query ? 1.0f : -1.0f);
                store_block(is_query ? m : lower, row, 16 * q, f);
            }
            __syncwarp();
            // Tm, block by block. Of two blocks the one below them is Tm_11 (-L)_10 Tm_00.
            Slab<BLOCK>& turned = work.solver.turned[p];
            solve_block(work.solver.diagonal[p], turned);
            store_block_transposed(tm, first, first, load_left(tile_of(turned), 0, 0));
            synchronize();  // -L and the blocks on the diagonal are there
            if (p < 2) {
                const int top = 32 * p, bottom = top + 16;
                Accumulator carried[2] = {}, sum[2] = {};
                multiply_add(carried, load_left_transposed(tm, top, top), load_right_transposed(lower, bottom, top));
                multiply_add(sum, load_left(tm, bottom, bottom), transposed(to_fragment(carried[0], carried[1])));
                store_block(tm, bottom, top, to_fragment(sum[0], sum[1]));
            }
            synchronize();
            if (p < 2) {
                Right carried[2];  // rows 32 and 48 of -L Tm, of this warp's columns
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Accumulator sum[2] = {};
#pragma unroll
                    for (int q = 0; q < 2; ++q)  // above the diagonal there are zeros
                        multiply_add(sum, load_left_transposed(tm, 16 * q, 16 * p),
                                     load_right_transposed(lower, 32 + 16 * i, 16 * q));
                    carried[i] = transposed(to_fragment(sum[0], sum[1]));
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Accumulator sum[2] = {};
#pragma unroll
                    for (int q = 0; q <= i; ++q) multiply_add(sum, load_left(tm, 32 + 16 * i, 32 + 16 * q), carried[q]);
                    store_block(tm, 32 + 16 * i, 16 * p, to_fragment(sum[0], sum[1]));
                }
            }
            publish_writes();
            arrive(smem.ready);
            synchronize();  // Tm is there, and nobody reads -L any more
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
            Fragment rows[HEAD_SIZE / 16];
#pragma unroll
            for (int c = 0; c < HEAD_SIZE / 16; ++c) rows[c] = to_fragment(state[2 * c], state[2 * c + 1]);
            hold(rows);
            wait_for_copies<0>();
            __syncwarp();  // the values are there, and nobody reads the last Y any more
            copy(chunk + 1);
            wait_for(smem.ready, parity);

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
            // Y <- S_0 (Q e^c)^T, not beside X: registers are few
            Accumulator out[CHUNK_LEN / 8] = {};
            begin_products();
#pragma unroll
            for (int c = 0; c < HEAD_SIZE; c += 16)
                multiply_group<64, Read::rows>(c == 0, out, rows[c / 16],
                                               descriptor(tile_of(smem.read[c / TILE_COLUMNS]), 0, c % TILE_COLUMNS));
            end_batch();
            wait_for_batches<0>();
            hold(out);
            arrive(smem.keys_free);
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; ++n) {
                const float2 f = *reinterpret_cast<const float2*>(&factors.end[8 * n + 2 * quad_lane()]);
                state[n][0] *= f.x, state[n][1] *= f.y, state[n][2] *= f.x, state[n][3] *= f.y;
            }
#pragma unroll
            for (int n = 0; n < CHUNK_LEN / 8; ++n) {
                const float2 f = *reinterpret_cast<const float2*>(&factors.of_q[8 * n + 2 * quad_lane()]);
                out[n][0] *= f.x, out[n][1] *= f.y, out[n][2] *= f.x, out[n][3] *= f.y;
            }
            Accumulator u[CHUNK_LEN / 8] = {};
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q)
                multiply_group<64, Read::rows>(q == 0, u, w_rows[q], descriptor(tile_of(smem.matrices.tm), 0, 16 * q));
            end_batch();
            wait_for_batches<0>();
            hold(u);
            Fragment u_rows[BLOCKS], written[BLOCKS];
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                u_rows[q] = to_fragment(u[2 * q], u[2 * q + 1]);
#pragma unroll
                for (int n = 2 * q; n < 2 * q + 2; ++n) {
                    const float2 f = *reinterpret_cast<const float2*>(&factors.written[8 * n + 2 * quad_lane()]);
                    u[n][0] *= f.x, u[n][1] *= f.y, u[n][2] *= f.x, u[n][3] *= f.y;
                }
                written[q] = to_fragment(u[2 * q], u[2 * q + 1]);
            }
            hold(u_rows), hold(written);
            // Y <- Y + M U   S <- S + (rate U)^T K e^(D - c)
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q)
                multiply_group<64, Read::rows>(out, u_rows[q], descriptor(tile_of(smem.matrices.m), 0, 16 * q));
            end_batch();
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q)
                    multiply_group<64, Read::columns>(&state[8 * slab], written[q],
                                                      descriptor(tile_of(smem.written[parity][slab]), 16 * q, 0));
            end_batch();
            wait_for_batches<1>();
            hold(out);
            arrive(smem.matrices_free);
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q)
                store_block_transposed(values, 16 * q, own, to_fragment(out[2 * q], out[2 * q + 1]));
            __syncwarp();
            write(y, smem.values[parity][half], steps);
            y += CHUNK_LEN * y_stride;
            wait_for_batches<0>();
            hold(state);
        }
        wait_for_copies<0>();
        if (final_state != nullptr) write_state<STATE_LAYOUT>(final_state + state_offset, state, first_value);
    }
}
