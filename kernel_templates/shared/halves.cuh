// Products by halves (levels.cuh) of a chunk whose operands are tiles of all channels of a head, and the gradients of
// these.
//
// Needs what chunk.cuh needs.
#pragma once
#include "chunk.cuh"
#include "levels.cuh"

// The blocks on the diagonal of a matrix of pairs, summed over the levels.
using DiagonalBlocks = Accumulator[BLOCKS][2];

// A block of the matrix left right^T.
template <typename Tile>
__device__ inline void multiply_block(Accumulator (&sum)[2], Tile left, Tile right, int p, int q) {
    const LeftRows rows(left, p);
    multiply_rows(sum, rows, right, q);
}
template <typename Tile> __device__ inline Fragment pair_block(Tile left, Tile right, int p, int q) {
    Accumulator sum[2] = {};
    multiply_block(sum, left, right, p, q);
    return to_fragment(sum[0], sum[1]);
}
// Those pairs of a block that `is_kept` names, by the numbers of their tokens in it.
template <typename Tile, typename IsKept>
__device__ inline void add_pairs(Accumulator (&sum)[2], Tile left, Tile right, int p, IsKept is_kept) {
    Accumulator all[2] = {};
    multiply_block(all, left, right, p, p);
#pragma unroll
    for (int n = 0; n < 8; ++n)
        if (is_kept(group() + n % 4 / 2 * 8, n / 4 * 8 + 2 * quad_lane() + n % 2))
            sum[n / 4][n % 4] += all[n / 4][n % 4];
}
// A level's pairs within blocks.
template <typename Tile>
__device__ inline void add_level(DiagonalBlocks& sums, Tile left, Tile right, int level) {
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p)
        add_pairs(sums[p], left, right, p, [&](int row, int column) { return is_of_level(row, column, level); });
}
// Tokens with themselves.
template <typename Tile> __device__ inline void add_own_pairs(DiagonalBlocks& sums, Tile left, Tile right) {
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p)
        add_pairs(sums[p], left, right, p, [](int row, int column) { return row == column; });
}

// Gradients by halves. A warp has 16 channels of all tokens as [channel, token], a lane two neighbouring tokens of
// eight for two channels: what it needs of other tokens than its own comes from its three neighbours.

// Calls `visit(n, j, i, token)` for the elements of sums [channel, token]: sums[n][2 j + i].
template <typename Visit> __device__ inline void for_each_token(Visit visit) {
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) visit(n, j, i, 8 * n + 2 * quad_lane() + i);
}
// An element of an operand's rows [channel, token], from its place in sums.
template <typename T> __device__ inline float element_of(const TokenFragments& rows, int n, int j, int i) {
    const unsigned word = rows[n / 2].at[n % 2 * 2 + j];
    return to_float(T{static_cast<unsigned short>(i ? word >> 16 : word)});
}

// A warp's channels of rows as they come, from `column` on.
template <int COLUMNS>
__device__ inline void load_raw(TokenFragments& rows, const T_IO (&source)[CHUNK_LEN][COLUMNS], int column) {
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p)
        rows[p] = load_left_transposed(Tile<COLUMNS>{shared_address(source[0])}, 16 * p, column);
}

// The rows of levels are a tree. Those of single tokens are X; where two blocks become one, the rows of the later one's
// left tokens take the decay of the whole earlier one, and the rows of the earlier one's right tokens that of the later
// one. The way back is from the chunk down: the gradient of a row takes the same factor, and on the level on which the
// row multiplied others, what they give to it. A block's decay gets, on each level, what the rows of the other block
// have to do with it; and the decay of the block of both counts for each. So no sum cancels, however small it is.
constexpr int LEVELS = CHUNK_LEN == 16 ? 4 : CHUNK_LEN == 32 ? 5 : 6;
__device__ constexpr int index_of(int level) { return level == 1 ? 0 : 1 + index_of(level / 2); }

// Whether a token of the lane is in the later of a level's two blocks: left there.
template <int LEVEL> __device__ inline bool is_later(int n, int i) {
    return LEVEL == 1 ? i : LEVEL < 8 ? 2 * quad_lane() & LEVEL : 8 * n & LEVEL;
}
// A float for each eight tokens of the lane's two channels.
using EightSums = float[CHUNK_LEN / 8][2];

template <typename Visit> __device__ inline void for_each_eight(Visit visit) {
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) visit(n, j);
}
// The lane's decays: of each token; on each level from 2 on, of the whole other block; and of the chunk.
struct Decays {
    TokenSums own;
    EightSums other[LEVELS], all;

    template <int LEVEL> __device__ float factor(int n, int j, int i) const {
        return LEVEL == 1 ? own[n][2 * j + 1 - i] : other[index_of(LEVEL)][n][j];
    }
    template <int LEVEL> __device__ void add_level() {
        for_each_eight([&](int n, int j) {
            float& factor = other[index_of(LEVEL)][n][j];
            if (LEVEL < 8) factor = __shfl_xor_sync(0xffffffffu, all[n][j], LEVEL / 2);
            else factor = all[n ^ LEVEL / 8][j];
        });
        for_each_eight([&](int n, int j) { all[n][j] *= other[index_of(LEVEL)][n][j]; });
        if constexpr (2 * LEVEL < CHUNK_LEN) add_level<2 * LEVEL>();
    }
    // From rows of them.
    template <int PITCH> __device__ void load(const float (*rows)[PITCH], int column) {
        for_each_token([&](int n, int j, int i, int token) {
            own[n][2 * j + i] = rows[token][column + group() + 8 * j];
        });
        for_each_eight([&](int n, int j) { all[n][j] = own[n][2 * j] * own[n][2 * j + 1]; });
        add_level<2>();
    }
};

// The rounded rows of all levels, from those of single tokens, of which nothing is left.
struct LevelRows {
    TokenFragments at[LEVELS];

    template <int LEVEL> __device__ void add_levels(TokenSums& left, TokenSums& right, const Decays& decays) {
        TokenSums rows;
        for_each_token([&](int n, int j, int i, int) {
            float &x = left[n][2 * j + i], &y = right[n][2 * j + i];
            const bool later = is_later<LEVEL>(n, i);
            const float factor = decays.factor<LEVEL>(n, j, i);
            rows[n][2 * j + i] = later ? x : y;
            if (LEVEL == 1 || LEVEL >= 8) (later ? x : y) *= factor;
            else x *= later ? factor : 1.0f, y *= later ? 1.0f : factor;
        });
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) at[index_of(LEVEL)][p] = to_fragment(rows[2 * p], rows[2 * p + 1]);
        if constexpr (2 * LEVEL < CHUNK_LEN) add_levels<2 * LEVEL>(left, right, decays);
    }
};

// Takes gradients of a level's blocks of twice its length to those of its own: `d_rows` is what the level's products
// give to its rows. `terms` get, for a lane's tokens of eight, what the other block's decay gets from them.
template <int LEVEL>
__device__ inline void descend(TokenSums& d_left, TokenSums& d_right, const TokenSums& d_rows,
                               const TokenFragments& rows,
                               const Decays& decays, TokenSums& terms) {
    for_each_token([&](int n, int j, int i, int) {
        const int at = 2 * j + i;
        const bool later = is_later<LEVEL>(n, i);
        const float carried = (later ? d_left[n][at] : d_right[n][at]) * decays.factor<LEVEL>(n, j, i);
        terms[n][at] += carried * element_of<bf16>(rows, n, j, i);
        const float sum = carried + d_rows[n][at];
        d_left[n][at] = later ? sum : d_left[n][at], d_right[n][at] = later ? d_right[n][at] : sum;
    });
}
// The gradients of the decays' logarithms, of blocks of twice LEVEL: `shared` of eights, a lane's part of it from 8 on,
// becomes that of blocks of LEVEL, with the terms of `descend`. At the end `own` has those of tokens.
template <int LEVEL> __device__ inline void descend(EightSums& shared, TokenSums& own, const TokenSums& terms) {
    EightSums sums;
    for_each_eight([&](int n, int j) { sums[n][j] = terms[n][2 * j] + terms[n][2 * j + 1]; });
    const auto swap = [](float x, int delta) { return __shfl_xor_sync(0xffffffffu, x, delta); };
    for_each_eight([&](int n, int j) {
        if constexpr (LEVEL >= 8) {
#pragma unroll
            for (int m = 0; m < CHUNK_LEN / 8; ++m)
                if ((m ^ n) / (LEVEL / 8) == 1) shared[n][j] += sums[m][j];
            if constexpr (LEVEL == 8) shared[n][j] += swap(shared[n][j], 1), shared[n][j] += swap(shared[n][j], 2);
        } else if constexpr (LEVEL == 4) {
            shared[n][j] += swap(sums[n][j] + swap(sums[n][j], 1), 2);
        } else if constexpr (LEVEL == 2) {
            shared[n][j] += swap(sums[n][j], 1);
        } else {
            own[n][2 * j] = shared[n][j] + terms[n][2 * j + 1], own[n][2 * j + 1] = shared[n][j] + terms[n][2 * j];
        }
    });
}

// Which pairs of a block of 16 tokens are of a level, as masks of a right operand's words: (summed token, token of the
// sum) where the latter is left, and where it is right.
template <int LEVEL> struct LevelMasks {
    unsigned left[4], right[4];
    __device__ LevelMasks() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 2 * quad_lane() + i % 2 * 8, column = group() + i / 2 * 8;
            const bool is_first = ((row ^ column) & -LEVEL) == LEVEL,
                       is_second = ((row + 1 ^ column) & -LEVEL) == LEVEL;
            const unsigned mask = (is_first ? 0xffffu : 0u) | (is_second ? 0xffff0000u : 0u);
            left[i] = column & LEVEL ? mask : 0u, right[i] = column & LEVEL ? 0u : mask;
        }
    }
};
// Z += X^T M of a level: it takes rows X, which come transposed, to the gradients of their partners. M has, for left
// tokens, the pairs of the lower triangle `of_left`, for right tokens those of the transpose of `of_right`.
template <int LEVEL, typename Matrix>
__device__ inline void add_level_gradients(TokenSums& z, const LevelRows& rows, Matrix of_left, Matrix of_right) {
    const TokenFragments& at = rows.at[index_of(LEVEL)];
    if constexpr (LEVEL < 16) {
        const LevelMasks<LEVEL> masks;
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) {
            Right block = load_right_transposed(of_left, 16 * p, 16 * p);
            const Right transpose = load_right(of_right, 16 * p, 16 * p);
#pragma unroll
            for (int i = 0; i < 4; ++i) block.at[i] = block.at[i] & masks.left[i] | transpose.at[i] & masks.right[i];
            multiply_add(&z[2 * p], at[p], block);
        }
    } else {
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p)
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                if ((p ^ q) / (LEVEL / 16) != 1) continue;
                const Right block =
                    p > q ? load_right_transposed(of_left, 16 * p, 16 * q) : load_right(of_right, 16 * q, 16 * p);
                multiply_add(&z[2 * p], at[q], block);
            }
    }
}
