// Recurrences with one decay for a head, backward, what chunks have for themselves: the gradients of queries, keys,
// rates and decays, from the states and their gradients around each (head_decay_backward.cu) and from U and dV. None
// of that depends on how tokens were cut into chunks before, so that chunks are longer here. Per value head, with q_t
// and k_t as they come, n their norms, E and D of the chunk and head_decay_chunk.cuh's names,
//
//     P = tril(dY U^T) * scale e^(c_t - c_s) beta_s / (n_t n_s)
//     N = -tril(dV U^T, -1) * e^(c_t - c_s) beta_s / (n_t n_s)
//     A = (scale e^c / n) dY S_0    B = -(e^c / n) dV S_0    C = (e^(D - c) / n) U E
//     dQ = A + P K                  dK = B + N K + beta C + P^T Q + N^T K
//
// With sums over rows and columns of P * Q K^T and N * K K^T, the parts of k . dK for what is erased, x, and for what
// is written, beta y, are
//
//     x_t = k . B + sum_s (N * K K^T)_ts    y_s = k . C + sum_t (P * Q K^T + N * K K^T)_ts / beta_s
//     dbeta = y    dc = q . dQ + x - beta y    dg_t = sum_(s >= t) dc_s + e^D S_0 . E + sum_s beta_s (k . C)_s
//
// and behind the norms dq = dQ - q (q . dQ) / n^2, dk likewise. Without a delta dV, N and B are none.
//
//   q k, dr dk     [batch, tokens, heads / GROUP, K]  T_IO  in, out     dy  [batch, tokens, heads, V]  T_IO  in
//   u, dv          [batch, tokens, heads, V]  T_IO  in; u with its strides, as without a delta it is v; dv null then
//   states, slopes, factors  as the other kernels left them  in
//   g, dw, dbeta   [batch, tokens, heads]  T_W, T_W, T_BETA  in, out, each null where there is none; g with HAS_GATE
//   a_log, dt_bias  as in the forward  in
//   own_chunks     [slots, heads, V]  fp32  out, of what outputs have of values themselves: sums of a chunk; or null
//   a_log_chunks, bias_chunks  [slots, heads]  fp32  out, of a_log and dt_bias: sums of a chunk; or null
//
// Grid (slots of CHUNK_LEN tokens, key heads). A block takes the value heads of its key head in turn. A warp has 16 or
// 32 tokens, 16 from each half of the chunk so that triangles are shared out evenly, and a part of the channels.
#include "chunk.cuh"
#include "head_decay_factors.cuh"
#include "head_decay_gate_gradients.cuh"
#include "slots.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(CHUNK_LEN == 32 || CHUNK_LEN == 64, "chunk_len must be 32 or 64");
constexpr int TOKEN_TILES = CHUNK_LEN / 32;  // of 16 tokens, of a warp
constexpr int COLUMN_WARPS = WARPS / 2;      // that share the channels
constexpr int COLUMN_TILES = ceil_div(CHANNELS / 16, COLUMN_WARPS);
constexpr int SIDES = HAS_DELTA ? 2 : 1;     // what is read, and what is erased
using PartFactors = PairFactors<PART_LEN>;
using TokenFactors = FactorsOf<PART_LEN>;

struct __align__(16) Smem {
    KeyTile q, k;              // later dq and dk
    ValueTile u, left[SIDES];  // U; dY and dV
    TokenTile pairs[SIDES];    // P and N
    ChunkFactors<CHUNK_LEN> factors;
    // q . dQ, x and y: what states give, a part for each warp that shares the channels, and what pairs of tokens
    // give, by the other token's block
    float dots[3][COLUMN_WARPS][CHUNK_LEN];
    float of_rows[SIDES][BLOCKS][CHUNK_LEN], of_columns[SIDES][BLOCKS][CHUNK_LEN];
    float squares[2][CHUNK_LEN];  // q . dQ and k . dK, of all value heads
    float ends[WARPS];            // of the gradient of D
    float of_self[CHUNK_LEN];     // P's diagonal, with no delta, of all value heads
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// A fragment of X as the right operand X.
__device__ inline Right turned(const Fragment& f) {
    Right right;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(right.at[i]) : "r"(f.at[i]));
    return right;
}

// Where a warp works: 16 or 32 tokens, and every COLUMN_WARPS-th block of 16 channels.
struct Place {
    int warp;
    __device__ int block(int i) const { return i == 0 ? warp % 2 : BLOCKS - 1 - warp % 2; }
    __device__ int row(int i, int half) const { return 16 * block(i) + group() + 8 * half; }
    __device__ int column(int j) const { return 16 * (warp / 2 + j * COLUMN_WARPS); }
    __device__ bool has(int j) const { return CHANNELS / 16 % COLUMN_WARPS == 0 || column(j) < CHANNELS; }
    template <typename Visit> __device__ void for_rows(Visit visit) const {
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) visit(i, half, row(i, half));
    }
};
// The lane's share of a product with rows of an operand, by its rows.
struct Dots {
    float at[TOKEN_TILES][2] = {};
    // To memory, once lanes of the same row have been added up.
    __device__ void write(float (&target)[COLUMN_WARPS][CHUNK_LEN], Place place) const {
        place.for_rows([&](int i, int half, int row) {
            const float sum = sum_of_lanes<1, 4>(at[i][half]);
            if (quad_lane() == 0) target[place.warp / 2][row] = sum;
        });
    }
};

// What a warp has of X [token, channel] in 16 channels.
struct Part {
    Accumulator at[TOKEN_TILES][2] = {};

    // X += Y S, from rows [token, value] and fragments of S; the next one of these is on its way.
    template <typename Rows, typename Visit>
    __device__ void add_state(Place place, int column, Rows rows, const Checkpoint* state, Visit visit) {
        Fragment next = read_early(state, 0, column / 16);
#pragma unroll
        for (int v = 0; v < VALUES / 16; ++v) {
            visit(v, next);
            const Right right = turned(next);
            if (v + 1 < VALUES / 16) next = read_early(state, 16 * (v + 1), column / 16);
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i)
                multiply_add(at[i], load_left(rows, 16 * place.block(i), 16 * v), right);
        }
    }
    // X += M Y, or with IS_TRANSPOSED M^T Y.
    template <bool IS_TRANSPOSED, typename Matrix, typename Rows>
    __device__ void add_triangle(Place place, int column, Matrix matrix, Rows rows) {
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            const Right right = load_right(rows, 16 * q, column);
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i) {
                const int p = place.block(i);
                if (IS_TRANSPOSED ? q < p : q > p) continue;
                multiply_add(at[i], IS_TRANSPOSED ? load_left_transposed(matrix, 16 * q, 16 * p)
                                                  : load_left(matrix, 16 * p, 16 * q), right);
            }
        }
    }
    template <typename Factor> __device__ void scale_rows(Place place, Factor factor) {
        place.for_rows([&](int i, int half, int row) {
            const float f = factor(row);
#pragma unroll
            for (int n = 0; n < 2; ++n) at[i][n][2 * half] *= f, at[i][n][2 * half + 1] *= f;
        });
    }
    // X += rows times a factor each.
    template <typename Factor> __device__ void add_rows(Place place, int column, const KeyTile& rows, Factor factor) {
        place.for_rows([&](int i, int half, int row) {
            const float f = factor(row);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned word = *reinterpret_cast<const unsigned*>(&rows[row][column + 8 * n + 2 * quad_lane()]);
                at[i][n][2 * half] += f * low_of(word), at[i][n][2 * half + 1] += f * high_of(word);
            }
        });
    }
    __device__ void add(const Part& other) {
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
            for (int n = 0; n < 8; ++n) at[i][n / 4][n % 4] += other.at[i][n / 4][n % 4];
    }
    __device__ void add_dots(Dots& dots, Place place, int column, const KeyTile& rows) const {
        place.for_rows([&](int i, int half, int row) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned word = *reinterpret_cast<const unsigned*>(&rows[row][column + 8 * n + 2 * quad_lane()]);
                dots.at[i][half] += low_of(word) * at[i][n][2 * half];
                dots.at[i][half] += high_of(word) * at[i][n][2 * half + 1];
            }
        });
    }
    // The gradient of rows that were divided by their norm, which stand in the tile, to their place.
    template <typename Factor>
    __device__ void write_behind_norm(Place place, int column, KeyTile& rows, Factor factor) const {
        place.for_rows([&](int i, int half, int row) {
            const float f = HAS_NORM ? factor(row) : 0.0f;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                unsigned& word = *word_of(rows, row, column / 2 + 4 * n + quad_lane());
                float2 x = {at[i][n][2 * half], at[i][n][2 * half + 1]};
                if constexpr (HAS_NORM) x.x -= f * low_of(word), x.y -= f * high_of(word);
                word = pack(x.x, x.y);
            }
        });
    }
};

// A block of P or of N, and what its pairs add to the dots: times the products of their keys, in float32, so that a
// pair whose tokens are both behind another one cancels in the gradient of that one's decay.
template <bool IS_OUTPUT> __device__ inline void write_pairs(Smem& smem, TriangleBlock block, bool begins) {
    const auto left = tile_of(smem.left[!IS_OUTPUT]), right = tile_of(smem.u);
    const auto left_keys = tile_of(IS_OUTPUT ? smem.q : smem.k), right_keys = tile_of(smem.k);
    Accumulator sum[2] = {}, keys[2] = {};
#pragma unroll 4
    for (int c = 0; c < VALUES / 16; ++c)
        multiply_add(sum, load_left(left, 16 * block.p, 16 * c), load_right_transposed(right, 16 * block.q, 16 * c));
#pragma unroll 4
    for (int c = 0; c < CHANNELS / 16; ++c)
        multiply_add(keys, load_left(left_keys, 16 * block.p, 16 * c),
                     load_right_transposed(right_keys, 16 * block.q, 16 * c));
    float of_row[2] = {}, of_column[2][2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = 16 * block.p + group() + i % 4 / 2 * 8,
                  column = 16 * block.q + i / 4 * 8 + 2 * quad_lane() + i % 2;
        float factor = (IS_OUTPUT ? smem.factors.of_q[row] : -smem.factors.of_k[row]) * smem.factors.of_k[column];
        if (row < column + !IS_OUTPUT) factor = 0.0f;
        else if constexpr (HAS_DECAY) factor *= exp2_fast(smem.factors.decay[row] - smem.factors.decay[column]);
        const float beta = HAS_RATE ? smem.factors.beta[column] : 1.0f, pair = factor * sum[i / 4][i % 4],
                    term = pair * keys[i / 4][i % 4];
        sum[i / 4][i % 4] = beta * pair, of_row[i % 4 / 2] += beta * term, of_column[i / 4][i % 2] += term;
        if (!HAS_DELTA && row == column) {
            smem.of_self[row] = (begins ? 0.0f : smem.of_self[row]) + sum[i / 4][i % 4];
            sum[i / 4][i % 4] = 0.0f;
        }
    }
    store_block(tile_of(smem.pairs[!IS_OUTPUT]), 16 * block.p, 16 * block.q, to_fragment(sum[0], sum[1]));
    if constexpr (HAS_DECAY || HAS_NORM || HAS_RATE) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float row_sum = sum_of_lanes<1, 4>(of_row[half]);
            if (quad_lane() == 0)
                smem.of_rows[!IS_OUTPUT][block.q][16 * block.p + group() + 8 * half] = row_sum;
            const float2 column_sums = {sum_of_lanes<4, 32>(of_column[half][0]),
                                        sum_of_lanes<4, 32>(of_column[half][1])};
            float* const columns = smem.of_columns[!IS_OUTPUT][block.p] + 16 * block.q + 8 * half;
            if (group() == 0) *reinterpret_cast<float2*>(columns + 2 * quad_lane()) = column_sums;
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) head_decay_key_gradients(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ u, const T_IO* __restrict__ dy,
    const T_IO* __restrict__ dv, const T_W* __restrict__ w, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, const i64* __restrict__ cu_seqlens, const Checkpoint* __restrict__ states,
    const Checkpoint* __restrict__ slopes, const TokenFactors* __restrict__ factors, T_IO* __restrict__ dr,
    T_IO* __restrict__ dk, T_W* __restrict__ dw, T_BETA* __restrict__ dbeta, float* __restrict__ own_chunks,
    float* __restrict__ a_log_chunks, float* __restrict__ bias_chunks, Strides r_strides, Strides k_strides,
    Strides u_strides, Strides dy_strides, Strides w_strides, i64 sequences, i64 tokens, i64 heads) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 slot = blockIdx.x, key_head = blockIdx.y;
    const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
    if (chunk.steps == 0) return;
    const i64 first_token = chunk.span.batch * tokens + chunk.span.begin + chunk.token;  // of rows of all sequences
    const auto start = [&](Strides s, i64 own_head) {
        return chunk.span.batch * s.batch + (chunk.span.begin + chunk.token) * s.token + own_head * s.head;
    };
    factors += (first_checkpoint(cu_seqlens, chunk.sequence, chunk.span, PART_LEN) + chunk.token / PART_LEN) * heads;
    states += slot * heads, slopes += slot * heads;

    if constexpr (HEAD_SIZE != CHANNELS || VALUE_SIZE != VALUES) {
        clear<NUM_THREADS>(smem);
        __syncthreads();
    }
    const auto copy_keys = [&](KeyTile& rows, const T_IO* source, i64 stride) {
        copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS>(rows[0], source, stride, chunk.steps,
                                                                                 HEAD_SIZE, threadIdx.x);
    };
    const auto copy_values = [&](ValueTile& rows, const T_IO* source, i64 stride) {
        copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, VALUE_SIZE, VALUE_PITCH, NUM_THREADS>(
            rows[0], source, stride, chunk.steps, VALUE_SIZE, threadIdx.x);
    };
    const i64 value_stride = heads * VALUE_SIZE;
    const auto copy_head = [&](i64 head) {
        copy_values(smem.left[0], dy + start(dy_strides, head), dy_strides.token);
        copy_values(smem.u, u + start(u_strides, head), u_strides.token);
        if constexpr (HAS_DELTA)
            copy_values(smem.left[1], dv + first_token * value_stride + head * VALUE_SIZE, value_stride);
        commit_copies();
        // The states are read twice, by parts.
        constexpr int LINES = sizeof(Checkpoint) / 128;
        for (int i = threadIdx.x; i < 2 * LINES; i += NUM_THREADS) {
            const Checkpoint* const state = (i < LINES ? states : slopes) + head;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(state) + i % LINES * 128)
                         : "memory");
        }
    };
    copy_keys(smem.q, r + start(r_strides, key_head), r_strides.token);
    copy_keys(smem.k, k + start(k_strides, key_head), k_strides.token);
    copy_head(key_head * GROUP);
    if constexpr (HAS_NORM)
        for (int i = threadIdx.x; i < 2 * CHUNK_LEN; i += NUM_THREADS)
            smem.squares[i / CHUNK_LEN][i % CHUNK_LEN] = 0.0f;

    const auto tile_q = tile_of(smem.q), tile_k = tile_of(smem.k);
    const auto tile_dy = tile_of(smem.left[0]), tile_u = tile_of(smem.u);
    const auto tile_p = tile_of(smem.pairs[0]);
    const auto nothing = [](int, const Fragment&) {};
    const Place place = {warp_id()};
    Part d_q[COLUMN_TILES], d_k[COLUMN_TILES];
#pragma unroll 1
    for (int i = 0; i < GROUP; ++i) {
        const i64 head = key_head * GROUP + i;
        const Checkpoint *const state = states + head, *const slope = slopes + head;
        for (int token = threadIdx.x; token < CHUNK_LEN; token += NUM_THREADS)
            smem.factors.read<PART_LEN>(token, chunk.steps, [&](int part) -> const PartFactors& {
                return factors[part * heads + head];
            });
        wait_for_copies<0>();
        __syncthreads();  // rows and factors are there
        constexpr int PAIRS = BLOCKS * (BLOCKS + 1) / 2;
        for (int task = place.warp; task < SIDES * PAIRS; task += WARPS) {
            if (task < PAIRS) write_pairs<true>(smem, triangle_block(task), i == 0);
            else if constexpr (HAS_DELTA) write_pairs<false>(smem, triangle_block(task - PAIRS), false);
        }
        if constexpr (HAS_OWN)
            for (int value = threadIdx.x; value < VALUE_SIZE; value += NUM_THREADS) {
                float sum_of_own = 0.0f;
                for (int token = 0; token < CHUNK_LEN; ++token)
                    sum_of_own += to_float(smem.left[0][token][value]) * to_float(smem.u[token][value]);
                own_chunks[(slot * heads + head) * VALUE_SIZE + value] = sum_of_own;
            }
        __syncthreads();  // P and N are there
        const auto grown = [&](int token) { return HAS_DECAY ? exp2_fast(smem.factors.decay[token]) : 1.0f; };
        Dots dots[3];
        float of_end = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            if (!place.has(j)) continue;
            const int column = place.column(j);
            Part read;
            read.add_state(place, column, tile_dy, state, nothing);
            read.scale_rows(place, [&](int token) { return smem.factors.of_q[token] * grown(token); });
            if constexpr (HAS_DECAY || HAS_NORM) read.add_dots(dots[0], place, column, smem.q);
            d_q[j].add(read);
            d_q[j].template add_triangle<false>(place, column, tile_p, tile_k);
            if constexpr (HAS_DELTA) {
                Part erased;
                erased.add_state(place, column, tile_of(smem.left[1]), state, nothing);
                erased.scale_rows(place, [&](int token) { return -smem.factors.of_k[token] * grown(token); });
                if constexpr (HAS_DECAY || HAS_NORM) erased.add_dots(dots[1], place, column, smem.k);
                d_k[j].add(erased);
            }
            Part written;
            const float end = smem.factors.decay[CHUNK_LEN - 1];
            float product = 0.0f;  // S_0 . E
            written.add_state(place, column, tile_u, slope, [&](int v, const Fragment& f) {
                if constexpr (HAS_DECAY)
                    if (v % 2 == place.warp % 2) {
                        const Fragment other = read_checkpoint(state, 16 * v, column / 16);
#pragma unroll
                        for (int n = 0; n < 4; ++n) {
                            product += low_of(f.at[n]) * low_of(other.at[n]);
                            product += high_of(f.at[n]) * high_of(other.at[n]);
                        }
                    }
            });
            written.scale_rows(place, [&](int token) {
                return smem.factors.of_k[token] * (HAS_DECAY ? exp2_fast(end - smem.factors.decay[token]) : 1.0f);
            });
            if constexpr (HAS_DECAY || HAS_NORM || HAS_RATE) written.add_dots(dots[2], place, column, smem.k);
            if constexpr (HAS_DECAY) of_end += exp2_fast(end) * product;
            if constexpr (HAS_RATE) written.scale_rows(place, [&](int token) { return smem.factors.beta[token]; });
            d_k[j].add(written);
            d_k[j].template add_triangle<true>(place, column, tile_p, tile_q);
            if constexpr (HAS_DELTA) {
                d_k[j].template add_triangle<true>(place, column, tile_of(smem.pairs[1]), tile_k);
                d_k[j].template add_triangle<false>(place, column, tile_of(smem.pairs[1]), tile_k);
            }
        }
        if constexpr (HAS_DECAY || HAS_NORM || HAS_RATE)
#pragma unroll
            for (int kind = 0; kind < 3; ++kind) dots[kind].write(smem.dots[kind], place);
        if constexpr (HAS_DECAY) {
            place.for_rows([&](int t, int half, int row) { of_end += smem.factors.beta[row] * dots[2].at[t][half]; });
            of_end = sum_of_lanes<1, 32>(of_end);
            if (lane_id() == 0) smem.ends[place.warp] = of_end;
        }
        __syncthreads();  // the dots are there, and nobody reads the rows of this head any more
        if (i + 1 < GROUP) copy_head(head + 1);
        if constexpr (HAS_DECAY || HAS_NORM || HAS_RATE) {
            if (place.warp == 0) {
                const GateMap map(a_log, dt_bias, head);
                GateGradients of_gates;
                of_gates.load(w + start(w_strides, head), w_strides.token, chunk.steps);
                float behind = 0.0f;  // dc of the tokens behind, and the gradient of D
                if constexpr (HAS_DECAY)
                    for (int n = 0; n < WARPS; ++n) behind += smem.ends[n];
#pragma unroll
                for (int first = CHUNK_LEN - 32; first >= 0; first -= 32) {
                    const int token = first + lane_id();
                    float dots[3] = {};
#pragma unroll
                    for (int kind = 0; kind < 3; ++kind)
#pragma unroll
                        for (int n = 0; n < COLUMN_WARPS; ++n) dots[kind] += smem.dots[kind][n][token];
#pragma unroll
                    for (int n = 0; n < BLOCKS; ++n)
#pragma unroll
                        for (int side = 0; side < SIDES; ++side) {
                            if (n <= token / 16) dots[side] += smem.of_rows[side][n][token];
                            if (n >= token / 16) dots[2] += smem.of_columns[side][n][token];
                        }
                    const float written = smem.factors.beta[token] * dots[2];
                    const bool exists = token < chunk.steps;
                    const i64 at = (first_token + token) * heads + head;
                    if constexpr (HAS_NORM)
                        smem.squares[0][token] += dots[0], smem.squares[1][token] += dots[1] + written;
                    if constexpr (HAS_RATE && !HAS_STEP)
                        if (exists)
                            dbeta[at] = from_float<T_BETA>(dots[2] * slope_of_rate(smem.factors.beta[token]));
                    if constexpr (HAS_DECAY) {
                        const float sum = sum_from(dots[0] + dots[1] - written) + behind;
                        behind = __shfl_sync(0xffffffffu, sum, 0);
                        const float of_decay = smem.factors.of_decay(token, sum);
                        const float of_w = of_gates.through(map, first / 32, of_decay, dots[2], exists);
                        if constexpr (HAS_STEP) {
                            if (exists) dbeta[at] = from_float<T_BETA>(of_w);
                        } else if (exists) {
                            dw[at] = from_float<T_W>(of_w);
                        }
                    }
                }
                of_gates.write(a_log_chunks, bias_chunks, slot * heads + head);
            }
        }
        // Warp 0 still reads factors and dots: the next head's are written behind it.
        if (GROUP > 1) __syncthreads();
    }
    if constexpr (!HAS_DELTA) {
        const auto of_self = [&](int token) { return smem.of_self[token]; };
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            if (!place.has(j)) continue;
            d_q[j].add_rows(place, place.column(j), smem.k, of_self);
            d_k[j].add_rows(place, place.column(j), smem.q, of_self);
        }
    }
    // The squares are there, and nobody reads the keys any more.
    if constexpr (!HAS_DELTA || (HAS_NORM && GROUP == 1)) __syncthreads();
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
        if (!place.has(j)) continue;
        d_q[j].write_behind_norm(place, place.column(j), smem.q, [&](int token) {
            return smem.factors.norm_of_q[token] * smem.factors.norm_of_q[token] * smem.squares[0][token];
        });
        d_k[j].write_behind_norm(place, place.column(j), smem.k, [&](int token) {
            return smem.factors.of_k[token] * smem.factors.of_k[token] * smem.squares[1][token];
        });
    }
    __syncthreads();  // dq and dk are there
    const i64 key_stride = heads / GROUP * HEAD_SIZE, out = first_token * key_stride + key_head * HEAD_SIZE;
    write_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS>(dr + out, key_stride, smem.q[0],
                                                                              chunk.steps, HEAD_SIZE, threadIdx.x);
    write_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS>(dk + out, key_stride, smem.k[0],
                                                                              chunk.steps, HEAD_SIZE, threadIdx.x);
}
