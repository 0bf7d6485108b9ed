// What kernels share that hold a head's state on chip and take CHUNK_LEN tokens at once: sizes, tiles, products of an
// operand's rows, checkpoints, the state in accumulators.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, NUM_THREADS, T_IO, DECAY.
#pragma once
#include "copy.cuh"
#include "decay.cuh"
#include "mma.cuh"

constexpr int CHANNELS = 32 * ceil_div(HEAD_SIZE, 32);
constexpr int VALUES = 32 * ceil_div(VALUE_SIZE, 32);
constexpr int WARPS = NUM_THREADS / 32;
constexpr int BLOCKS = CHUNK_LEN / 16;  // of 16 tokens
constexpr int KEY_PITCH = CHANNELS + 8, VALUE_PITCH = VALUES + 8, TOKEN_PITCH = CHUNK_LEN + 8;

using KeyTile = T_IO[CHUNK_LEN][KEY_PITCH];
using ValueTile = T_IO[CHUNK_LEN][VALUE_PITCH];
using TokenTile = T_IO[CHUNK_LEN][TOKEN_PITCH];
template <int PITCH, int ROWS> __device__ inline Tile<PITCH> tile_of(const T_IO (&rows)[ROWS][PITCH]) {
    return {shared_address(&rows[0][0])};
}

// A pair of columns (2 `pair`, 2 `pair` + 1) of a row.
template <int PITCH, int ROWS> __device__ inline unsigned* word_of(T_IO (&rows)[ROWS][PITCH], int row, int pair) {
    return reinterpret_cast<unsigned*>(&rows[row][2 * pair]);
}

// Rows [16 p, 16 p + 16) of an operand as the left side of products over the channels.
template <typename Tile> struct LeftRows {
    Fragment at[CHANNELS / 16];
    __device__ LeftRows(Tile tile, int p) {
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) at[c] = load_left(tile, 16 * p, 16 * c);
    }
};
// sum += left right_q^T.
template <typename Tile>
__device__ inline void multiply_rows(Accumulator (&sum)[2], const LeftRows<Tile>& left, Tile right, int q) {
#pragma unroll
    for (int c = 0; c < CHANNELS / 16; ++c)
        multiply_add(sum, left.at[c], load_right_transposed(right, 16 * q, 16 * c));
}

using StateRows = Accumulator[CHANNELS / 8];  // state[n] is the channels [8 n, 8 n + 8)

// Products of a chunk.
// Of X [token, value] a warp holds 16 TILES values, transposed: X^T, [value, token], as sums or, rounded, as rows. So
// what one product gives is the next one's left operand as it lies in registers. Of the state S [value, channel] it
// holds the rows of the same values. A product is named as it reads:
//
//     lower(x, m, y)   X += M Y       M a lower triangular matrix of tokens
//     upper(x, m, y)   X += M^T Y
//     full(x, a, s)    X += A S^T     A an operand [token, channel]
//     outer(x, k)      S += X^T K     K an operand
//
// The functions behind take several, and load the right sides of all before they multiply any.

using TokenSums = Accumulator[CHUNK_LEN / 8];  // of 16 values
using TokenFragments = Fragment[BLOCKS];
// Where a warp has 16 values, or takes 16 at a time, an array of one.
__device__ inline auto& tiles_of(TokenSums& sums) { return reinterpret_cast<TokenSums(&)[1]>(sums); }
__device__ inline auto& tiles_of(const TokenFragments& rows) {
    return reinterpret_cast<const TokenFragments(&)[1]>(rows);
}

// What takes rows q of Y to rows p of X.
template <bool IS_UPPER, typename Matrix> __device__ inline Right load_triangle(Matrix matrix, int p, int q) {
    return IS_UPPER ? load_right(matrix, 16 * q, 16 * p) : load_right_transposed(matrix, 16 * p, 16 * q);
}
template <bool IS_UPPER, int TILES, typename Matrix> struct TriangleProduct {
    TokenSums (&sums)[TILES];
    const TokenFragments (&rows)[TILES];
    Matrix matrix;

    __device__ Right load(int p, int q) const { return load_triangle<IS_UPPER>(matrix, p, q); }
    __device__ void add(int i, int p, int q, const Right& block) const {
        multiply_add(&sums[i][2 * p], rows[i][q], block);
    }
};
template <bool IS_UPPER, int TILES, typename Matrix>
__device__ inline TriangleProduct<IS_UPPER, TILES, Matrix> triangle(TokenSums (&sums)[TILES], Matrix matrix,
                                                                    const TokenFragments (&rows)[TILES]) {
    return {sums, rows, matrix};
}
template <bool IS_UPPER, typename Matrix>
__device__ inline auto triangle(TokenSums& sums, Matrix matrix, const TokenFragments& rows) {
    return triangle<IS_UPPER>(tiles_of(sums), matrix, tiles_of(rows));
}
template <typename Sums, typename Matrix, typename Rows>
__device__ inline auto lower(Sums& sums, Matrix matrix, const Rows& rows) {
    return triangle<false>(sums, matrix, rows);
}
template <typename Sums, typename Matrix, typename Rows>
__device__ inline auto upper(Sums& sums, Matrix matrix, const Rows& rows) {
    return triangle<true>(sums, matrix, rows);
}
template <int TILES, typename First, typename... Others>
__device__ inline void add_blocks(int row, int column, const First& first, const Others&... others) {
    const Right blocks[] = {first.load(row, column), others.load(row, column)...};
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        int n = 0;
        first.add(i, row, column, blocks[0]), (others.add(i, row, column, blocks[++n]), ...);
    }
}
// All of them lower, or all of them upper.
template <bool IS_UPPER, int TILES, typename Matrix, typename... Matrices>
__device__ inline void add_triangles(const TriangleProduct<IS_UPPER, TILES, Matrix>& first,
                                     const TriangleProduct<IS_UPPER, TILES, Matrices>&... others) {
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q)
            if (IS_UPPER ? q >= p : q <= p) add_blocks<TILES>(p, q, first, others...);
}

// `rows` are those of all columns, [TILES][columns / 16], or those of the columns at hand, [TILES].
__device__ inline const Fragment& column_of(const Fragment& rows, int) { return rows; }
__device__ inline const Fragment& column_of(const Fragment* rows, int column) { return rows[column / 16]; }
template <int TILES, typename Operand, typename Rows> struct FullProduct {
    TokenSums (&sums)[TILES];
    const Rows (&rows)[TILES];
    Operand operand;

    __device__ Right load(int p, int column) const { return load_right_transposed(operand, 16 * p, column); }
    __device__ void add(int i, int p, int column, const Right& block) const {
        multiply_add(&sums[i][2 * p], column_of(rows[i], column), block);
    }
};
template <int TILES, typename Operand, typename Rows> __device__ inline FullProduct<TILES, Operand, Rows> full(
    TokenSums (&sums)[TILES], Operand operand, const Rows (&rows)[TILES]) {
    return {sums, rows, operand};
}
template <typename Operand> __device__ inline auto full(TokenSums& sums, Operand operand, const Fragment& rows) {
    return full(tiles_of(sums), operand, reinterpret_cast<const Fragment(&)[1]>(rows));
}
// The part of 16 columns of A and S, from `column` on.
template <int TILES, typename Operand, typename Rows, typename... Others> __device__ inline void add_columns(
    int column, const FullProduct<TILES, Operand, Rows>& first, const Others&... others) {
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) add_blocks<TILES>(p, column, first, others...);
}

template <int TILES, typename Operand> struct OuterProduct {
    const TokenFragments (&rows)[TILES];
    Operand operand;
};
template <int TILES, typename Operand>
__device__ inline OuterProduct<TILES, Operand> outer(const TokenFragments (&rows)[TILES], Operand operand) {
    return {rows, operand};
}
// Channels [16 c, 16 c + 16).
template <int TILES, typename... Operands>
__device__ inline void add_outer(int c, StateRows (&state)[TILES],
                                 const OuterProduct<TILES, Operands>&... products) {
#pragma unroll
    for (int q = 0; q < BLOCKS; ++q) {
        const Right blocks[] = {load_right(products.operand, 16 * q, 16 * c)...};
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            int n = 0;
            (multiply_add(&state[i][2 * c], products.rows[i][q], blocks[n++]), ...);
        }
    }
}
template <int TILES, typename... Operands>
__device__ inline void add_outer(StateRows (&state)[TILES],
                                 const OuterProduct<TILES, Operands>&... products) {
#pragma unroll
    for (int c = 0; c < CHANNELS / 16; ++c) add_outer(c, state, products...);
}

// X <- M X, or with IS_UPPER M^T X; it comes as sums and leaves as rows.
template <bool IS_UPPER, typename Matrix>
__device__ inline void solve(TokenFragments& solution, Matrix matrix, const TokenSums& sums) {
    TokenFragments rows;
#pragma unroll
    for (int q = 0; q < BLOCKS; ++q) rows[q] = to_fragment(sums[2 * q], sums[2 * q + 1]);
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) {
        Accumulator solved[2] = {};
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q)
            if (IS_UPPER ? q >= p : q <= p) multiply_add(solved, rows[q], load_triangle<IS_UPPER>(matrix, p, q));
        solution[p] = to_fragment(solved[0], solved[1]);
    }
}
template <bool IS_UPPER = false, int TILES, typename Matrix>
__device__ inline void solve(TokenFragments (&solution)[TILES], Matrix matrix, const TokenSums (&sums)[TILES]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) solve<IS_UPPER>(solution[i], matrix, sums[i]);
}

// Rows from a tile [token, value], and sums to one as T; `value` is the first of the warp.
template <int TILES, typename Tile>
__device__ inline void load_rows(TokenFragments (&rows)[TILES], Tile tile, int value) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) rows[i][q] = load_left_transposed(tile, 16 * q, value + 16 * i);
}
template <int TILES, typename Tile>
__device__ inline void store_sums(Tile tile, int value, const TokenSums (&sums)[TILES]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p)
            store_block_transposed(tile, 16 * p, value + 16 * i,
                                   to_fragment(sums[i][2 * p], sums[i][2 * p + 1]));
}

// Checkpoints.
// S' of a chunk, the state at its start in the frame of its middle, as the fragments of its 16 x 16 blocks, lane by
// lane, so that a warp moves a block in one access. Or, for products of warp groups that read it as it is, as matrices
// of 8 x 8, and then of every GROUP_CHUNK_LEN tokens.

struct Checkpoint { uint4 lanes[VALUES / 16][CHANNELS / 16][32]; };
using Matrices = unsigned[VALUES / 8][CHANNELS / 8][32];
constexpr int GROUP_CHUNK_LEN = 64;

__device__ inline void write_checkpoint(Checkpoint* checkpoint, int row, int c, const Fragment& f) {
    checkpoint->lanes[row / 16][c][lane_id()] = {f.at[0], f.at[1], f.at[2], f.at[3]};
}
__device__ inline void write_matrices(Checkpoint* checkpoint, int row, int c, const Fragment& f) {
    Matrices& matrices = *reinterpret_cast<Matrices*>(checkpoint);
#pragma unroll
    for (int i = 0; i < 4; ++i) matrices[row / 8 + i % 2][2 * c + i / 2][lane_id()] = f.at[i];
}
__device__ inline Fragment read_checkpoint(const Checkpoint* checkpoint, int row, int c) {
    const uint4 lane = checkpoint->lanes[row / 16][c][lane_id()];
    return {{lane.x, lane.y, lane.z, lane.w}};
}
// The same by a load that stays where it stands.
__device__ inline Fragment read_early(const Checkpoint* checkpoint, int row, int c) {
    const uint4 lane = load_early<uint4>(&checkpoint->lanes[row / 16][c][lane_id()]);
    return {{lane.x, lane.y, lane.z, lane.w}};
}

// The state in accumulators.
// A warp holds rows [row, row + 16) and all channels.


template <typename Visit> __device__ inline void for_each_element(StateRows& state, int row, Visit visit) {
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int value = row + group() + i / 2 * 8, channel = 8 * n + 2 * quad_lane() + i % 2;
            visit(state[n][i], value, channel, value < VALUE_SIZE && channel < HEAD_SIZE);
        }
}
// A null pointer stands for zeros.
template <StateLayout LAYOUT, typename T> __device__ inline void read_state(StateRows& state, const T* source,
                                                                            int row) {
    for_each_element(state, row, [&](float& x, int value, int channel, bool present) {
        x = present && source != nullptr ? to_float(source[state_index<LAYOUT>(value, channel)]) : 0.0f;
    });
}
template <StateLayout LAYOUT, typename T> __device__ inline void write_state(T* target, StateRows& state, int row) {
    for_each_element(state, row, [&](float& x, int value, int channel, bool present) {
        if (present) target[state_index<LAYOUT>(value, channel)] = from_float<T>(x);
    });
}
// The same of all of a warp's rows, from `row` on.
template <StateLayout LAYOUT, int TILES, typename T>
__device__ inline void read_state(StateRows (&state)[TILES], const T* source, int row) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) read_state<LAYOUT>(state[i], source, row + 16 * i);
}
// A copy of it, for a function that is called: what that is given lies in memory, and the copy alone.
template <int TILES> __device__ inline void copy_state(StateRows (&to)[TILES], const StateRows (&from)[TILES]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) to[i][n][j] = from[i][n][j];
}
// Multiplies column by column by the power of two that `write_factor` got, in its STEPS, or once by what `write_decay`
// got: columns [8 n, 8 n + 8).
template <int STEPS = FACTOR_STEPS>
__device__ inline void scale_columns(Accumulator& columns, const float (&factor)[CHANNELS], int n) {
    const float2 f = *reinterpret_cast<const float2*>(&factor[8 * n + 2 * quad_lane()]);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) columns[0] *= f.x, columns[1] *= f.y, columns[2] *= f.x, columns[3] *= f.y;
}
template <int STEPS = FACTOR_STEPS>
__device__ inline void scale_columns(StateRows& state, const float (&factor)[CHANNELS]) {
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n) scale_columns<STEPS>(state[n], factor, n);
}
// Those of channels [16 c, 16 c + 16).
template <int STEPS = FACTOR_STEPS, int TILES>
__device__ inline void scale_columns(StateRows (&state)[TILES], const float (&factor)[CHANNELS], int c) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 2 * c; n < 2 * c + 2; ++n) scale_columns<STEPS>(state[i][n], factor, n);
}
template <int STEPS = FACTOR_STEPS, int TILES>
__device__ inline void scale_columns(StateRows (&state)[TILES], const float (&factor)[CHANNELS]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) scale_columns<STEPS>(state[i], factor);
}

// z of the warp's value rows: products of S' and a state in accumulators of the same place, summed over the rows, for
// every channel. A fragment's words lie as the accumulators do.
template <int TILES>
__device__ inline void write_state_terms(float (&target)[CHANNELS], const Fragment (&rows)[TILES][CHANNELS / 16],
                                         const StateRows (&state)[TILES]) {
    float sums[CHANNELS / 16];
#pragma unroll
    for (int c = 0; c < CHANNELS / 16; ++c) {
        float terms[4] = {};
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned word = rows[i][c].at[j];
                const Accumulator& sum = state[i][2 * c + j / 2];
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
        sums[c] = term;
    }
    if ((lane_id() & 4) == 0) {
        const int place = lane_id() / 16 * 8 + 2 * quad_lane() + lane_id() / 8 % 2;
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) target[16 * c + place] = sums[c];
    }
}

// A sum that loses two tokens a lane, of four lanes side by side: what is left of it in front of this lane's pair.
// Behind all four it is `left`.
__device__ inline float take_pair(float& left, float pair) {
    float sum = pair;  // over the tokens of the lanes up to this one
#pragma unroll
    for (int delta = 1; delta < 4; delta *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, delta, 4);
        if (quad_lane() >= delta) sum += other;
    }
    const float here = left - (sum - pair);
    left -= __shfl_sync(0xffffffffu, sum, 3, 4);
    return here;
}

// Four neighbouring channels of w, as they come from memory; past the last channel the last ones. Needs T_W.
struct RawChannels {
    static constexpr int VECTOR = HEAD_SIZE % 4 == 0 ? 4 : 1;
    Words<T_W, VECTOR> held[4 / VECTOR];
    template <bool IS_EARLY> __device__ void load(const T_W* row, int channel) {
#pragma unroll
        for (int i = 0; i < 4 / VECTOR; ++i) {
            const T_W* const source = row + min(channel + i, HEAD_SIZE - VECTOR);
            if constexpr (IS_EARLY) held[i] = load_early<Words<T_W, VECTOR>>(source);
            else held[i] = *reinterpret_cast<const Words<T_W, VECTOR>*>(source);
        }
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
                         ::"l"(row + channel), "r"(pack<T>(x[0], x[1])), "r"(pack<T>(x[2], x[3])) : "memory");
        else
            asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                         ::"l"(row + channel), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
    }
}

// The decays of a chunk, a thread's share of COLUMNS channels from `first` on, four neighbouring ones at a time, as
// they come from memory.
template <int COLUMNS> struct ChunkDecays {
    static constexpr int QUADS = COLUMNS / 4, SHARE = ceil_div(CHUNK_LEN * QUADS, NUM_THREADS);
    RawChannels held[SHARE];

    __device__ static int row(int i) { return (threadIdx.x + i * NUM_THREADS) / QUADS; }
    __device__ static int column(int i) { return (threadIdx.x + i * NUM_THREADS) % QUADS * 4; }
    // IS_EARLY: by loads that stay where they stand.
    template <bool IS_EARLY = false> __device__ void load(const T_W* w, i64 token_stride, int steps, int first = 0) {
#pragma unroll
        for (int i = 0; i < SHARE; ++i)
            held[i].template load<IS_EARLY>(w + min(row(i), steps - 1) * token_stride, first + column(i));
    }
    // The gradient of w, from that of the log-decays; all is read before any is written.
    template <typename T, int PITCH> __device__ void write_slopes(T* target, unsigned stride,
                                                                  const float (*grad)[PITCH], int steps,
                                                                  int first = 0) const {
        float x[SHARE][4];
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(&grad[min(row(i), CHUNK_LEN - 1)][column(i)]);
            x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] *= log_decay_slope<DECAY>(held[i].at(j));
            const bool exists = COLUMNS == HEAD_SIZE || first + column(i) < HEAD_SIZE;
            if (exists && row(i) < steps) write_channels(target + row(i) * stride, first + column(i), x[i]);
        }
    }
};
