// Gradients by halves (levels.cuh), 16 tokens of a warp's 16 channels at a time: as [channel, token], a lane has two
// neighbouring tokens of eight for two channels, and what it needs of the others comes from its three neighbours.
//
// The rows of levels are a tree. Those of single tokens are X; where two blocks become one, the rows of the later one's
// left tokens take the decay of the whole earlier one, and the rows of the earlier one's right tokens that of the later
// one. The way back is from the chunk down: the gradient of a row takes the same factor, and on the level on which the
// row multiplied others, what they give to it. A block's decay gets, on each level, what the rows of the other block
// have to do with it; and the decay of the block of both counts for each. So no sum cancels, however small it is.
//
// Blocks of 16 tokens are the leaves of a second tree, whose levels are 16 and 32.
//
// Needs what chunk.cuh needs.
#pragma once
#include "chunk.cuh"
#include "levels.cuh"

using BlockSums = Accumulator[2];  // [channel, token] of 16 tokens
constexpr int BLOCK_LEVELS = 4;    // 1 2 4 8
__device__ constexpr int index_of(int level) { return level == 1 ? 0 : 1 + index_of(level / 2); }

// Calls `visit(n, j, i)` for the elements of sums: sums[n][2 j + i], of token 8 n + 2 quad_lane() + i.
template <typename Visit> __device__ inline void for_each_element(Visit visit) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) visit(n, j, i);
}
__device__ inline int token_of(int n, int i) { return 8 * n + 2 * quad_lane() + i; }
// An element of rows [channel, token], from its place in sums.
template <typename T> __device__ inline float element_of(const Fragment& rows, int n, int j, int i) {
    const unsigned word = rows.at[2 * n + j];
    return to_float(T{static_cast<unsigned short>(i ? word >> 16 : word)});
}
__device__ inline float sum_quad(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Whether a token of the lane is in the later of a level's two blocks: left there.
template <int LEVEL> __device__ inline bool is_later(int n, int i) {
    return LEVEL == 1 ? i : LEVEL < 8 ? 2 * quad_lane() & LEVEL : n;
}

// The lane's decays: of each token; on the levels 2, 4 and 8 of the whole other block; and of all 16 tokens.
struct TreeDecays {
    BlockSums own;
    float other[BLOCK_LEVELS - 1][2][2], all[2];

    template <int LEVEL> __device__ float factor(int n, int j, int i) const {
        if constexpr (LEVEL == 1) return own[n][2 * j + 1 - i];
        else return other[index_of(LEVEL) - 1][n][j];
    }
    // From the decays of tokens, `rows` of them.
    template <int PITCH> __device__ TreeDecays(const float (*rows)[PITCH], int column) {
        for_each_element([&](int n, int j, int i) {
            own[n][2 * j + i] = rows[token_of(n, i)][column + group() + 8 * j];
        });
        float eight[2][2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float two = own[n][2 * j] * own[n][2 * j + 1];
                other[0][n][j] = __shfl_xor_sync(0xffffffffu, two, 1);
                const float four = two * other[0][n][j];
                other[1][n][j] = __shfl_xor_sync(0xffffffffu, four, 2);
                eight[n][j] = four * other[1][n][j];
            }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            other[2][0][j] = eight[1][j], other[2][1][j] = eight[0][j];
            all[j] = eight[0][j] * eight[1][j];
        }
    }
    // What rows take up to a level: left ones from the block's beginning on, right ones up to its end.
    template <int LEVEL> __device__ float grown(bool is_left, int n, int j, int i) const {
        if constexpr (LEVEL == 1) return 1.0f;
        else {
            constexpr int BELOW = LEVEL / 2;
            const bool takes = is_later<BELOW>(n, i) == is_left;
            return grown<BELOW>(is_left, n, j, i) * (takes ? factor<BELOW>(n, j, i) : 1.0f);
        }
    }
};

// The rounded rows of the levels, of the left ones and the right ones in one.
struct TreeRows {
    Fragment at[BLOCK_LEVELS];

    template <typename Left, typename Right> __device__ void make(const TreeDecays& decays, Left left, Right right) {
        add_level<1>(decays, left, right), add_level<2>(decays, left, right);
        add_level<4>(decays, left, right), add_level<8>(decays, left, right);
    }
    template <int LEVEL, typename Left, typename Right>
    __device__ void add_level(const TreeDecays& decays, Left left, Right right) {
        BlockSums rows;
        for_each_element([&](int n, int j, int i) {
            const bool later = is_later<LEVEL>(n, i);
            rows[n][2 * j + i] = (later ? left(n, j, i) : right(n, j, i)) * decays.grown<LEVEL>(later, n, j, i);
        });
        at[index_of(LEVEL)] = to_fragment(rows[0], rows[1]);
    }
};

// Which pairs of a block are of a level, as masks of a right operand's words: (summed token, token of the sum) where
// the latter is left, and where it is right.
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
// Z += X^T M of a level of block `b`: it takes rows X, which come transposed, to the gradients of their partners. M
// has, for left tokens, the pairs of the lower triangle `of_left`, for right tokens those of the transpose of
// `of_right`.
template <int LEVEL, typename Matrix>
__device__ inline void add_level_gradients(BlockSums& z, const TreeRows& rows, Matrix of_left, Matrix of_right, int b) {
    const LevelMasks<LEVEL> masks;
    Right block = load_right_transposed(of_left, 16 * b, 16 * b);
    const Right transpose = load_right(of_right, 16 * b, 16 * b);
#pragma unroll
    for (int i = 0; i < 4; ++i) block.at[i] = block.at[i] & masks.left[i] | transpose.at[i] & masks.right[i];
    multiply_add(z, rows.at[index_of(LEVEL)], block);
}

// The gradients of rows on both sides, on their way down the tree of a block.
struct TreeGradients {
    BlockSums left = {}, right = {};
    float shared[2][2] = {};  // of the logarithms of the decays of eights

    // `d_rows` is what the level's products give to its rows. At the end `d_decay` takes the gradients of the
    // logarithms of the tokens' decays, but for what these have to do with other blocks.
    template <int LEVEL>
    __device__ void descend(const TreeDecays& decays, const TreeRows& rows, const BlockSums& d_rows,
                            BlockSums& d_decay) {
        BlockSums terms;
        for_each_element([&](int n, int j, int i) {
            const int at = 2 * j + i;
            const bool later = is_later<LEVEL>(n, i);
            const float carried = (later ? left[n][at] : right[n][at]) * decays.factor<LEVEL>(n, j, i);
            terms[n][at] = carried * element_of<T_IO>(rows.at[index_of(LEVEL)], n, j, i);
            const float sum = carried + d_rows[n][at];
            left[n][at] = later ? sum : left[n][at], right[n][at] = later ? right[n][at] : sum;
        });
        const auto swap = [](float x, int delta) { return __shfl_xor_sync(0xffffffffu, x, delta); };
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float two = terms[n][2 * j] + terms[n][2 * j + 1],
                            across = terms[1 - n][2 * j] + terms[1 - n][2 * j + 1];
                float& sum = shared[n][j];
                if constexpr (LEVEL == 8) sum += sum_quad(across);
                else if constexpr (LEVEL == 4) sum += swap(two + swap(two, 1), 2);
                else if constexpr (LEVEL == 2) sum += swap(two, 1);
                else
#pragma unroll
                    for (int i = 0; i < 2; ++i) d_decay[n][2 * j + i] += sum + terms[n][2 * j + 1 - i];
            }
    }
};

// Z += X^T M of another block `o`, whose rows X are those of the level on which the two meet.
template <typename Matrix>
__device__ inline void add_block_gradients(BlockSums& z, const Fragment& rows, Matrix of_left, Matrix of_right, int b,
                                           int o, bool later) {
    multiply_add(z, rows,
                 later ? load_right_transposed(of_left, 16 * b, 16 * o) : load_right(of_right, 16 * o, 16 * b));
}

// Decays of the lane's channels: of all tokens of each block, and those of blocks [first, last).
using BlockProducts = float[BLOCKS][2];
template <int PITCH>
__device__ inline void load_products(BlockProducts& all, const float (*growth)[PITCH], int column) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const TreeDecays decays(growth + 16 * b, column);
        all[b][0] = decays.all[0], all[b][1] = decays.all[1];
    }
}
__device__ inline void multiply_blocks(float (&product)[2], const BlockProducts& all, int first, int last) {
    product[0] = product[1] = 1.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
        if (b >= first && b < last) product[0] *= all[b][0], product[1] *= all[b][1];
}
// Between block `b` and those that it meets on the level of `distance` blocks.
__device__ inline void multiply_between(float (&product)[2], const BlockProducts& all, int b, int distance) {
    const int begin = b & -distance;
    if (b & distance) multiply_blocks(product, all, begin, b);
    else multiply_blocks(product, all, b + 1, begin + distance);
}

// The distance of the two halves on whose level blocks meet.
__device__ constexpr int meeting_distance(int a, int b) { return (a ^ b) & 2 ? 2 : 1; }

// The gradients of block `b` on the level of DISTANCE blocks. `left_row` and `right_row` are the rows of single tokens,
// and `shared` takes what the decays of the other blocks get. `products` give what rows of the others give to its rows.
template <int DISTANCE, typename Products, typename LeftRow, typename RightRow>
__device__ inline void pass_blocks(TreeGradients& grads, const TreeDecays& decays, const BlockProducts& all,
                                   const Products& products, LeftRow left_row, RightRow right_row,
                                   BlockProducts& shared, int b) {
    if constexpr (DISTANCE < BLOCKS) {
        const bool later = b & DISTANCE;
        const int first = b & -DISTANCE ^ DISTANCE, last = first + DISTANCE;
        float factor[2], between[2], terms[2] = {};
        multiply_blocks(factor, all, first, last), multiply_between(between, all, b, DISTANCE);
        BlockSums z = {};
#pragma unroll
        for (int o = 0; o < BLOCKS; ++o)
            if (o >= first && o < last) products.add_block(z, o, later);
        for_each_element([&](int n, int j, int i) {
            // Values and no reference, which would put both into local memory where `b` is not known in advance.
            float &left = grads.left[n][2 * j + i], &right = grads.right[n][2 * j + i];
            const float row = later ? left_row(n, j, i) : right_row(n, j, i),
                        carried = (later ? left : right) * factor[j];
            terms[j] += carried * row * decays.grown<16>(later, n, j, i) * between[j];
            const float sum = carried + z[n][2 * j + i];
            left = later ? sum : left, right = later ? right : sum;
        });
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float sum = sum_quad(terms[j]);
#pragma unroll
            for (int o = 0; o < BLOCKS; ++o)
                if (o >= first && o < last) shared[o][j] += sum;
        }
    }
}
template <int LEVEL, typename Products>
__device__ inline void pass_level(TreeGradients& grads, const TreeDecays& decays, const TreeRows& own,
                                  const Products& products, BlockSums& d_decay) {
    BlockSums d_rows = {};
    products.template add_level<LEVEL>(d_rows);
    grads.descend<LEVEL>(decays, own, d_rows, d_decay);
}
// All levels, from that of the chunk's two halves down to single tokens. `own` has the rows of block `b`.
template <typename Products, typename LeftRow, typename RightRow>
__device__ inline void descend_tree(TreeGradients& grads, const TreeDecays& decays, const BlockProducts& all,
                                    const TreeRows& own, const Products& products, LeftRow left_row,
                                    RightRow right_row, BlockProducts& shared, BlockSums& d_decay, int b) {
    pass_blocks<2>(grads, decays, all, products, left_row, right_row, shared, b);
    pass_blocks<1>(grads, decays, all, products, left_row, right_row, shared, b);
    pass_level<8>(grads, decays, own, products, d_decay), pass_level<4>(grads, decays, own, products, d_decay);
    pass_level<2>(grads, decays, own, products, d_decay), pass_level<1>(grads, decays, own, products, d_decay);
}

// A warp's channels of a block's rows as they come, from `column` on.
template <int COLUMNS>
__device__ inline Fragment load_raw(const T_IO (&rows)[CHUNK_LEN][COLUMNS], int column, int b) {
    return load_left_transposed(Tile<COLUMNS>{shared_address(rows[0])}, 16 * b, column);
}
// sums += X S of the warp's channels from `column` on and of a block, transposed; of COUNT values.
template <int COUNT, typename States, typename Values>
__device__ inline void multiply_end(BlockSums& sums, States states, Values values, int column, int b) {
#pragma unroll
    for (int c = 0; c < COUNT; c += 16)
        multiply_add(sums, load_left_transposed(states, c, column), load_right_transposed(values, 16 * b, c));
}
// A block's part of sums of all tokens.
__device__ inline void copy_block(BlockSums& part, const TokenSums& sums, int b) {
    for_each_element([&](int n, int j, int i) { part[n][2 * j + i] = sums[2 * b + n][2 * j + i]; });
}
