// The backward of gated linear attention and its kin, for the keys' side of a chunk that leaves the range of its
// middle's frame: by halves.
//
// Needs what gla_key_side.cuh needs.
#pragma once
#include "block_tree.cuh"
#include "gla_key_side.cuh"

// 16 tokens of a warp's channels: their decays, and the rows as they are.
struct PairBlock {
    TreeDecays decays;
    Fragment q, k;
    float scale;

    template <int COLUMNS, int PITCH>
    __device__ PairBlock(const T_IO (&raw_q)[CHUNK_LEN][COLUMNS], const T_IO (&raw_k)[CHUNK_LEN][COLUMNS],
                         const float (*growth)[PITCH], int column, int b, float scale)
        : decays(growth + 16 * b, column), q(load_raw(raw_q, column, b)), k(load_raw(raw_k, column, b)), scale(scale) {}
    // Rows of single tokens.
    __device__ float q_row(int n, int j, int i) const {
        return scale * element_of<T_IO>(q, n, j, i) * (BONUS ? 1.0f : decays.own[n][2 * j + i]);
    }
    __device__ float k_row(int n, int j, int i) const { return element_of<T_IO>(k, n, j, i); }
    // Its rows for another block: left ones where it is the later one. `between` is what decays between the two.
    __device__ Fragment whole_rows(bool is_left, const float (&between)[2]) const {
        BlockSums rows;
        for_each_element([&](int n, int j, int i) {
            const float row = is_left ? q_row(n, j, i) : k_row(n, j, i);
            rows[n][2 * j + i] = row * decays.grown<16>(is_left, n, j, i) * between[j];
        });
        return to_fragment(rows[0], rows[1]);
    }
};
template <typename Matrix> struct PairProducts {
    const TreeRows& rows;
    const Fragment (&others)[BLOCKS];
    Matrix d_pairs;
    int b;

    __device__ void add_block(BlockSums& z, int o, bool later) const {
        add_block_gradients(z, others[o], d_pairs, d_pairs, b, o, later);
    }
    template <int LEVEL> __device__ void add_level(BlockSums& z) const {
        add_level_gradients<LEVEL>(z, rows, d_pairs, d_pairs, b);
    }
};

// dq and dk to the tiles, and the gradient of the log-decays to the place of the tokens' decays in `growth`. `begin`
// begins the gradients of a block with dY S and V E, `own` is sum_v S E for the lane's channels. `own_product` gives
// dy_t . v_t.
template <typename Rows, int PITCH, int RAW_COLUMNS, typename Matrix, typename Begin, typename OwnProduct>
__device__ inline void write_pair_gradients_by_halves(
    Begin begin, const float (&own)[2], Rows& q_tile, Rows& k_tile, const T_IO (&raw_q)[CHUNK_LEN][RAW_COLUMNS],
    const T_IO (&raw_k)[CHUNK_LEN][RAW_COLUMNS], float (*growth)[PITCH], Matrix d_pairs, OwnProduct own_product,
    const float (&bonus)[2], float scale, int column, int steps, ChannelSums& sums) {
    BlockProducts all, shared = {};
    float whole[2];
    BlockSums d_decay[BLOCKS] = {};
    load_products(all, growth, column);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const PairBlock block(raw_q, raw_k, growth, column, b, scale);
        Fragment others[BLOCKS];
#pragma unroll
        for (int o = 0; o < BLOCKS; ++o) {
            if (o == b) continue;
            float between[2];
            multiply_between(between, all, o, meeting_distance(o, b));
            others[o] = PairBlock(raw_q, raw_k, growth, column, o, scale).whole_rows(o > b, between);
        }
        const auto q_row = [&](int n, int j, int i) { return block.q_row(n, j, i); };
        const auto k_row = [&](int n, int j, int i) { return block.k_row(n, j, i); };
        TreeRows rows;
        rows.make(block.decays, q_row, k_row);
        TreeGradients grads;
        begin(grads, b);
        descend_tree(grads, block.decays, all, rows, PairProducts<Matrix>{rows, others, d_pairs, b}, q_row, k_row,
                     shared, d_decay[b], b);
        for_each_element([&](int n, int j, int i) {
            const int at = 2 * j + i;
            const float own_q = element_of<T_IO>(block.q, n, j, i), own_k = element_of<T_IO>(block.k, n, j, i);
            const float with_own = own_product(16 * b + token_of(n, i)),
                        product = with_own * (BONUS ? bonus[j] : scale);
            if constexpr (!BONUS) d_decay[b][n][at] += grads.left[n][at] * q_row(n, j, i);
            grads.left[n][at] *= scale * (BONUS ? 1.0f : block.decays.own[n][at]);
            grads.left[n][at] += product * own_k, grads.right[n][at] += product * own_q;
            if constexpr (BONUS) sums.bonus[j] += with_own * scale * own_q * own_k;
        });
        store_block_transposed(tile_of(q_tile), 16 * b, column, to_fragment(grads.left[0], grads.left[1]));
        store_block_transposed(tile_of(k_tile), 16 * b, column, to_fragment(grads.right[0], grads.right[1]));
    }
    multiply_blocks(whole, all, 0, BLOCKS);  // what decays of the state from the chunk's start to its end
    __syncwarp();                            // all lanes have read the decays
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
        for_each_element([&](int n, int j, int i) {
            const int token = 16 * b + token_of(n, i);
            const float sum = d_decay[b][n][2 * j + i] + shared[b][j] + own[j] * whole[j];
            if constexpr (CONSTANT_DECAY) sums.decay[j] += token < steps ? sum : 0.0f;
            else growth[token][column + group() + 8 * j] = sum;
        });
}
