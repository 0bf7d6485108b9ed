// Recurrences with one decay for a head, a chunk of tokens at once: the delta rule, and with no HAS_DELTA linear
// attention. Per value head, with q_t and k_t as they are behind their norm, c_t the sum of the log-decays up to token t
// of the chunk and D over all of it,
//
//     L = tril(k_t . k_s rate_s e^(c_t - c_s), -1)    M = scale tril(q_t . k_s rate_s e^(c_t - c_s))    Tm = (I + L)^-1
//     U = Tm (V - e^c K S_0^T), or U = V    Y = scale e^c Q S_0^T + M U    S = e^D S_0 + (rate e^(D - c) U)^T K
//
// with S [V, K]. A decay stands between two tokens of the chunk, between the chunk's start and a token, or between a
// token and its end: no factor is above 1 unless a decay is. Operands are the rows of q, k and v as they come; norms,
// rates and decays are factors of tokens, in float32.
//
// Needs HEAD_SIZE, VALUE_SIZE, ROWS, CHUNK_LEN, KEPT_LEN, NUM_THREADS, T_IO, T_W, T_BETA, DECAY, HAS_DELTA, HAS_RATE,
// HAS_NORM, HAS_GATE, HAS_STEP, HAS_BIAS, BETA_MAP, AS_MATRICES, SEGMENTED.
#pragma once
#include "chunk.cuh"
#include "fresh.cuh"
#include "head_decay_factors.cuh"
#include "head_decay_gates.cuh"
#include "head_decay_walk.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(CHUNK_LEN == 16 || CHUNK_LEN == 32, "chunk_len must be 16 or 32");
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS >= 64 && NUM_THREADS <= 512,
              "num_threads must be a multiple of 32 from 64 to 512");

static_assert(ROWS % 32 == 0, "rows must be a multiple of 32");
constexpr int ROW_PITCH = ROWS + 8;
constexpr int TILES = ceil_div(ROWS / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;  // value rows of a warp
constexpr int STAGES = 3;              // chunks whose rows are in shared memory

// The sum of a value over the lanes up to each.
__device__ inline float sum_up(float x) {
#pragma unroll
    for (int delta = 1; delta < CHUNK_LEN; delta *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, x, delta);
        if (lane_id() >= delta) x += other;
    }
    return x;
}

using TokenFactors = FactorsOf<CHUNK_LEN>;

// The value rows of a warp: the first one among those of the block and of the head, how many there are, and whether
// the block has any for the warp.
struct OwnRows {
    int column, first_value, width;
    bool exist;
    __device__ OwnRows()
        : column(warp_id() * WARP_ROWS), first_value(blockIdx.z * ROWS + column),
          width(VALUE_SIZE % ROWS == 0 && WARPS * WARP_ROWS == ROWS
                    ? WARP_ROWS
                    : max(min(min(WARP_ROWS, ROWS - column), VALUE_SIZE - first_value), 0)),
          exist(WARPS * WARP_ROWS == ROWS || column < ROWS) {}
};
// The decays and rates of a chunk, as lanes have them of their tokens: the sums of decays up to each, and over all.
struct TokenGates {
    float decay, rate, end;
    __device__ TokenGates(const Gates& gates, const GateMap& map)
        : decay(HAS_DECAY ? sum_up(gates.decay(map)) : 0.0f), rate(gates.rate(map)),
          end(HAS_DECAY ? __shfl_sync(0xffffffffu, decay, CHUNK_LEN - 1) : 0.0f) {}
};
// The factors of a query's token, or of a key's, whose row has `factor` over its norm.
__device__ inline void write_factors(TokenFactors& factors, bool is_q, int token, float factor, float decay, float rate,
                                     float end, float scale) {
    const float grown = HAS_DECAY ? exp2_fast(decay) : 1.0f;
    if (is_q) {
        factors.of_q.set(token, scale * factor), factors.norm_of_q.set(token, factor);
        factors.grown_q[token] = scale * factor * grown;
    } else {
        const float shrunk = HAS_DECAY ? exp2_fast(end - decay) : 1.0f;
        factors.decay[token] = decay;
        factors.of_k.set(token, factor), factors.rate.set(token, rate * factor);
        factors.written[token] = rate * factor * shrunk;
        if constexpr (HAS_DELTA) factors.grown_k.set(token, factor * grown);
    }
}

// Tm, and before it the diagonal blocks of -L, a column of a block per row.
union Solver {
    TokenTile tm;
    float lower[BLOCKS][16][20];
};

// What the forward keeps of a matrix: its blocks (0, 0), (1, 0) and (1, 1), one after another.
struct __align__(16) KeptTriangle {
    T_IO blocks[BLOCKS * (BLOCKS + 1) / 2][16][16];

    template <int THREADS> __device__ void keep(const TokenTile& tile, int thread) {
        const int first = fresh(thread);
        __builtin_assume(first >= 0 && first < THREADS);
        for (int i = first; i < static_cast<int>(sizeof(KeptTriangle) / 16); i += THREADS) {
            const int block = i / 32, row = 16 * (block > 0) + i / 2 % 16, column = 16 * (block > 1) + i % 2 * 8;
            reinterpret_cast<uint4*>(this)[i] = *reinterpret_cast<const uint4*>(&tile[row][column]);
        }
    }
};
struct KeptMatrices { KeptTriangle at[1 + HAS_DELTA]; };
constexpr int OF_M = 0, OF_TM = 1;
// One in shared memory, as an operand.
struct TriangleTile {
    unsigned start;
    __device__ explicit TriangleTile(const KeptTriangle& triangle) : start(shared_address(&triangle)) {}
    __device__ Tile<16> block(int row, int column) const { return {start + 32 * (row + column)}; }
};
__device__ inline Right load_right(TriangleTile triangle, int row, int column) {
    return load_right(triangle.block(row, column), 0, 0);
}
__device__ inline Right load_right_transposed(TriangleTile triangle, int row, int column) {
    return load_right_transposed(triangle.block(row, column), 0, 0);
}

// How much of its value an output has itself, of the lane's rows from `row` on.
template <bool PER_CHANNEL, int TILES>
__device__ inline void read_own(float (&of_own)[TILES][2], const float* own, i64 head, int row) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int value = min(row + 16 * i + group() + 8 * j, VALUE_SIZE - 1);
            of_own[i][j] = PER_CHANNEL ? (own + head * VALUE_SIZE)[value] : own[head];
        }
}

// A block of a state, as what makes the gradients of keys reads it.
__device__ inline void keep_state(Checkpoint* state, int row, int c, const Fragment& f) {
    if constexpr (AS_MATRICES) write_matrices(state, row, c, f);
    else write_checkpoint(state, row, c, f);
}

// Where `solve_lower` reads a diagonal block of -L from.
__device__ inline void write_lower(Solver& solver, int p, Accumulator (&sum)[2]) {
    keep_lower(sum, 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        solver.lower[p][column][row] = sum[i / 4][i % 4];
    }
}

// Tm = (I + L)^-1 by one warp, from -L: the diagonal blocks by substitution in fp32, half a warp each and a lane per
// column. Of two blocks the one below them is Tm_11 (-L)_10 Tm_00, rounded; `below` is (-L)_10.
__device__ inline void solve_lower(Solver& solver, const Fragment& below) {
    const auto tm = tile_of(solver.tm);
    const int block = lane_id() / 16, column = lane_id() % 16;
    float x[16];  // of Tm - I = -L Tm
    const auto read_column = [&](int i, int row) {
        return *reinterpret_cast<const float4*>(&solver.lower[block][i][row]);
    };
    if (block < BLOCKS) {
#pragma unroll
        for (int row = 0; row < 16; row += 4) {
            const float4 four = read_column(column, row);
            x[row] = four.x, x[row + 1] = four.y, x[row + 2] = four.z, x[row + 3] = four.w;
        }
#pragma unroll
        for (int i = 1; i < 15; ++i)
#pragma unroll
            for (int row = (i + 1) / 4 * 4; row < 16; row += 4) {
                const float4 four = read_column(i, row);
                const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (row + j > i) x[row + j] += factors[j] * x[i];
            }
    }
    __syncwarp();
    if (block < BLOCKS) {  // a lane's column as a row, for the moment
        T_IO* const row = &solver.tm[lane_id()][16 * block];
#pragma unroll
        for (int i = 0; i < 16; i += 8)
            *reinterpret_cast<uint4*>(row + i) = {pack(x[i], x[i + 1]), pack(x[i + 2], x[i + 3]),
                                                  pack(x[i + 4], x[i + 5]), pack(x[i + 6], x[i + 7])};
        row[column] = from_float<T_IO>(1.0f);
    }
    __syncwarp();
    const Fragment first_transposed = load_left(tm, 0, 0);
    if constexpr (BLOCKS == 1) {
        __syncwarp();
        store_block_transposed(tm, 0, 0, first_transposed);
    } else {
        const Fragment second = load_left_transposed(tm, 16, 16);
        __syncwarp();
        store_block_transposed(tm, 0, 0, first_transposed);
        store_block(tm, 16, 16, second);
        Accumulator carried[2] = {}, sum[2] = {};
        multiply_add(carried, first_transposed, transposed(below));  // ((-L)_10 Tm_00)^T
        multiply_add(sum, second, transposed(to_fragment(carried[0], carried[1])));
        store_block(tm, 16, 0, to_fragment(sum[0], sum[1]));
    }
}

// The diagonal of M, with no delta, from a block on it, where zeros are left: outputs take it in float32, as the more a
// state decays, the more of an output is of its own token.
__device__ inline void take_diagonal(Accumulator (&sum)[2], Factor<!HAS_DELTA, CHUNK_LEN>& diagonal, int p) {
    if (group() / 2 != quad_lane()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float &even = sum[half][2 * half], &odd = sum[half][2 * half + 1];
        const bool is_odd = group() % 2;
        diagonal.set(16 * p + group() + 8 * half, is_odd ? odd : even);
        even = is_odd ? even : 0.0f, odd = is_odd ? 0.0f : odd;
    }
}

// Products of tokens with tokens times the factors of both and the decay between them: `of_row` and `of_column` by
// token. What is above the diagonal is any number, or none.
__device__ inline void scale_pairs(Accumulator (&sum)[2], const TokenFactors& factors,
                                   const Factor<HAS_NORM, CHUNK_LEN>& of_row, int p, int q) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int column = 16 * q + 8 * n + 2 * quad_lane();
        const float2 rate = pair_of(factors.rate, column), decay = pair_of(factors.decay, column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * p + group() + 8 * half;
            float x = of_row[row] * rate.x, y = of_row[row] * rate.y;
            if constexpr (HAS_DECAY)
                x *= exp2_fast(factors.decay[row] - decay.x), y *= exp2_fast(factors.decay[row] - decay.y);
            sum[n][2 * half] *= x, sum[n][2 * half + 1] *= y;
        }
    }
}

// What the forward makes of a chunk's tokens before it has the state.
struct __align__(16) TokenWork {
    Solver solver;
    TokenTile m;  // M; above its diagonal (-L)_10
    TokenFactors factors;
};
// A block of M or of -L from products of keys, with queries or with keys.
template <bool IS_OUTPUT> __device__ inline void write_pairs(TokenWork& work, Accumulator (&sum)[2], int p, int q) {
    scale_pairs(sum, work.factors, IS_OUTPUT ? work.factors.of_q : work.factors.of_k, p, q);
    if constexpr (IS_OUTPUT) {
        if (q == p) keep_lower(sum, 0);
        if (q == p && !HAS_DELTA) take_diagonal(sum, work.factors.of_self, p);
        store_block(tile_of(work.m), 16 * p, 16 * q, to_fragment(sum[0], sum[1]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = -sum[i / 4][i % 4];
        if (q == p) write_lower(work.solver, p, sum);
        else store_block(tile_of(work.m), 0, 16, to_fragment(sum[0], sum[1]));
    }
}
// What lies together to memory, by THREADS threads.
template <int THREADS, typename T> __device__ inline void keep(T& target, const T& source, int thread) {
    for (int i = thread; i < static_cast<int>(sizeof(T) / 16); i += THREADS)
        reinterpret_cast<uint4*>(&target)[i] = reinterpret_cast<const uint4*>(&source)[i];
}

// U <- V - e^c X   Y <- e^c Y, and what outputs have of their own token's values
template <int TILES>
__device__ inline void add_values(TokenSums (&u)[TILES], TokenSums (&out)[TILES], const TokenFragments (&v_rows)[TILES],
                                  const TokenFactors& factors, const float (&of_own)[TILES][2]) {
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n) {
        const int token = 8 * n + 2 * quad_lane();
        const float2 of_x = pair_of(factors.grown_k, token), of_y = pair_of(factors.grown_q, token),
                     of_self = pair_of(factors.of_self, token);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned word = v_rows[i][n / 2].at[n % 2 * 2 + j];
                out[i][n][2 * j] *= of_y.x, out[i][n][2 * j + 1] *= of_y.y;
                if constexpr (HAS_DELTA) {
                    u[i][n][2 * j] = low_of(word) - of_x.x * u[i][n][2 * j];
                    u[i][n][2 * j + 1] = high_of(word) - of_x.y * u[i][n][2 * j + 1];
                } else {
                    const float own = of_own[i][j];
                    u[i][n][2 * j] = low_of(word), u[i][n][2 * j + 1] = high_of(word);
                    out[i][n][2 * j] += (HAS_OWN ? of_self.x + own : of_self.x) * low_of(word);
                    out[i][n][2 * j + 1] += (HAS_OWN ? of_self.y + own : of_self.y) * high_of(word);
                }
            }
    }
}
// U <- Tm U as rows, and as the state takes it
template <int TILES>
__device__ inline void solve_values(TokenFragments (&u_rows)[TILES], TokenFragments (&written)[TILES],
                                    const TokenSums (&u)[TILES], const TokenFragments (&v_rows)[TILES],
                                    const TokenWork& work) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        TokenFragments rows;
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q)
            rows[q] = HAS_DELTA ? to_fragment(u[i][2 * q], u[i][2 * q + 1]) : v_rows[i][q];
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) {
            Accumulator solved[2] = {};
            if constexpr (HAS_DELTA) {
#pragma unroll
                for (int q = 0; q <= p; ++q)
                    multiply_add(solved, rows[q], load_triangle<false>(tile_of(work.solver.tm), p, q));
                u_rows[i][p] = to_fragment(solved[0], solved[1]);
            } else {
                u_rows[i][p] = rows[p];
                for (int n = 0; n < 2; ++n)
                    for (int j = 0; j < 4; ++j) solved[n][j] = u[i][2 * p + n][j];
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 factor = pair_of(work.factors.written, 16 * p + 8 * n + 2 * quad_lane());
#pragma unroll
                for (int j = 0; j < 2; ++j) solved[n][2 * j] *= factor.x, solved[n][2 * j + 1] *= factor.y;
            }
            written[i][p] = to_fragment(solved[0], solved[1]);
        }
    }
}
