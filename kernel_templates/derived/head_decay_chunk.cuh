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
// HAS_NORM, AS_MATRICES, SEGMENTED.
#pragma once
#include "chunk.cuh"
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

constexpr float NORM_EPS = 1e-6f;

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
// By all warps, eight tokens at a time, from the chunk's rows and the gates of its lanes' tokens: two lanes share a row.
__device__ inline void write_factors(TokenFactors& factors, const KeyTile& q, const KeyTile& k, const Gates& gates,
                                     float scale) {
    const float c = HAS_DECAY ? sum_up(gates.decay()) : 0.0f;
    const float own_rate = gates.rate();
    const float end = HAS_DECAY ? __shfl_sync(0xffffffffu, c, CHUNK_LEN - 1) : 0.0f;
    for (int first = 8 * warp_id(); first < CHUNK_LEN; first += 8 * WARPS) {
        const int token = first + lane_id() % 8;
        const bool is_q = lane_id() / 8 % 2;
        const float decay = HAS_DECAY ? __shfl_sync(0xffffffffu, c, token) : 0.0f;
        const float rate = __shfl_sync(0xffffffffu, own_rate, token);
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
            const float squares = sum + __shfl_xor_sync(0xffffffffu, sum, 16) + NORM_EPS;
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(squares));
        }
        const float grown = HAS_DECAY ? exp2_fast(decay) : 1.0f, shrunk = HAS_DECAY ? exp2_fast(end - decay) : 1.0f;
        if (lane_id() < 8) {
            factors.decay[token] = decay, factors.of_k[token] = factor, factors.grown_k[token] = factor * grown;
            factors.rate[token] = rate * factor, factors.written[token] = rate * factor * shrunk;
        } else if (lane_id() < 16) {
            factors.of_q[token] = scale * factor, factors.grown_q[token] = scale * factor * grown;
            factors.norm_of_q[token] = factor;
        }
    }
    if (threadIdx.x == 0) factors.end = exp2_fast(end);
}

// Tm, and before it the diagonal blocks of -L, a column of a block per row.
union Solver {
    TokenTile tm;
    float lower[BLOCKS][16][20];
};

// What the forward keeps of them.
struct KeptMatrices { TokenTile tm, m; };

// How much of its value an output has itself, of the lane's rows from `row` on.
template <int TILES> __device__ inline void read_own(float (&of_own)[TILES][2], const float* own, int row) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) of_own[i][j] = own[min(row + 16 * i + group() + 8 * j, VALUE_SIZE - 1)];
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

// Products of tokens with tokens times the factors of both and the decay between them: `of_row` and `of_column` by
// token. What is above the diagonal is left as it comes out, but finite.
__device__ inline void scale_pairs(Accumulator (&sum)[2], const TokenFactors& factors, const float (&of_row)[CHUNK_LEN],
                                   int p, int q) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = 16 * p + group() + i % 4 / 2 * 8, column = 16 * q + i / 4 * 8 + 2 * quad_lane() + i % 2;
        float factor = of_row[row] * factors.rate[column];
        if constexpr (HAS_DECAY) factor *= row < column ? 0.0f : exp2_fast(factors.decay[row] - factors.decay[column]);
        sum[i / 4][i % 4] *= factor;
    }
}
