// The gradients of the keys' side of RWKV-7 by halves (levels.cuh).
//
// Needs what block_tree.cuh needs.
#pragma once
#include "block_tree.cuh"

// The gradients of the token matrices.
template <typename Matrix> struct PairGradients { Matrix rk, rb, ak, ab; };

// Rows of levels, those that come from r and k, and those from a and b.
template <typename Rows> struct BothRows { Rows with_r, with_a; };

// 16 tokens: their decays, and the rows as they are.
struct KeyBlock {
    TreeDecays decays;
    Fragment r, a, k, b;
    float scale;

    template <typename Raw, int PITCH>
    __device__ KeyBlock(const Raw& raw, const float (*growth)[PITCH], int column, int block, float scale)
        : decays(growth + 16 * block, column), scale(scale) {
        r = load_raw(raw.r, column, block), a = load_raw(raw.a, column, block);
        k = load_raw(raw.k, column, block), b = load_raw(raw.b, column, block);
    }
    // Rows of single tokens.
    __device__ float r_row(int n, int j, int i) const {
        return scale * element_of<T_IO>(r, n, j, i) * decays.own[n][2 * j + i];
    }
    __device__ float a_row(int n, int j, int i) const { return element_of<T_IO>(a, n, j, i); }
    __device__ float k_row(int n, int j, int i) const { return element_of<T_IO>(k, n, j, i); }
    __device__ float b_row(int n, int j, int i) const { return element_of<T_IO>(b, n, j, i); }
    __device__ void make_rows(BothRows<TreeRows>& rows) const {
        rows.with_r.make(decays, [&](int n, int j, int i) { return r_row(n, j, i); },
                         [&](int n, int j, int i) { return k_row(n, j, i); });
        rows.with_a.make(decays, [&](int n, int j, int i) { return a_row(n, j, i); },
                         [&](int n, int j, int i) { return b_row(n, j, i); });
    }
    // As block `b` its rows for those that it meets on the level of `distance` blocks: left ones where it is the later
    // one. `all` has what blocks decay.
    __device__ BothRows<Fragment> whole_rows_for(int distance, const BlockProducts& all, int b) const {
        const bool is_left = b & distance;
        float between[2];
        multiply_between(between, all, b, distance);
        BlockSums with_r, with_a;
        for_each_element([&](int n, int j, int i) {
            const float grown = decays.grown<16>(is_left, n, j, i) * between[j];
            with_r[n][2 * j + i] = (is_left ? r_row(n, j, i) : k_row(n, j, i)) * grown;
            with_a[n][2 * j + i] = (is_left ? a_row(n, j, i) : b_row(n, j, i)) * grown;
        });
        return {to_fragment(with_r[0], with_r[1]), to_fragment(with_a[0], with_a[1])};
    }
};

// What takes rows R and K, and A and B, to the gradients of one tree's rows: matrices for left and for right ones.
// `whole_rows_of` gives the rows of other blocks.
template <typename Matrix, typename WholeRowsOf> struct KeyProducts {
    const BothRows<TreeRows>& rows;
    WholeRowsOf whole_rows_of;
    Matrix r_left, r_right, a_left, a_right;
    int b;

    __device__ void add_block(BlockSums& z, int o, bool later) const {
        const BothRows<Fragment> others = whole_rows_of(o);
        add_block_gradients(z, others.with_r, r_left, r_right, b, o, later);
        add_block_gradients(z, others.with_a, a_left, a_right, b, o, later);
    }
    template <int LEVEL> __device__ void add_level(BlockSums& z) const {
        add_level_gradients<LEVEL>(z, rows.with_r, r_left, r_right, b);
        add_level_gradients<LEVEL>(z, rows.with_a, a_left, a_right, b);
    }
};

// dr, dk, da and db of block `b` to `tiles`, which are not those of its raw rows. `whole_rows_of` gives the rows that
// other blocks have for it. `begin_r` and `begin_a` begin the gradients with what the states give: dY S and V E, dX S
// and U E. `own_pair` gives dArk and dArb of a token with itself. What the tokens' log-decays get goes to `d_decay`,
// but for what those of whole blocks get, to `shared`. `all` has what blocks decay.
template <typename Tiles, typename WholeRowsOf, typename Matrix, typename BeginR, typename BeginA, typename OwnPair>
__device__ inline void write_key_block_by_halves(const Tiles& tiles, const KeyBlock& block, WholeRowsOf whole_rows_of,
                                                 const PairGradients<Matrix>& d, BeginR begin_r, BeginA begin_a,
                                                 OwnPair own_pair, const BlockProducts& all, BlockProducts& shared,
                                                 BlockSums& d_decay, int column, float scale, int b) {
    using Products = KeyProducts<Matrix, WholeRowsOf>;
    BothRows<TreeRows> rows;
    block.make_rows(rows);
    {
        TreeGradients grads;
        begin_r(grads, b);
        descend_tree(grads, block.decays, all, rows.with_r,
                     Products{rows, whole_rows_of, d.rk, d.rk, d.rb, d.ak, b},
                     [&](int n, int j, int i) { return block.r_row(n, j, i); },
                     [&](int n, int j, int i) { return block.k_row(n, j, i); }, shared, d_decay, b);
        for_each_element([&](int n, int j, int i) {
            const int at = 2 * j + i;
            const float2 own = own_pair(16 * b + token_of(n, i));
            const float with_k = scale * own.x, with_b = scale * own.y, r = element_of<T_IO>(block.r, n, j, i);
            float& x = grads.left[n][at];
            x *= scale * block.decays.own[n][at];
            d_decay[n][at] += x * r;
            x += with_k * block.k_row(n, j, i) + with_b * block.b_row(n, j, i);
            grads.right[n][at] += with_k * r;
        });
        store_block_transposed(tiles.r, 16 * b, column, to_fragment(grads.left[0], grads.left[1]));
        store_block_transposed(tiles.k, 16 * b, column, to_fragment(grads.right[0], grads.right[1]));
    }
    TreeGradients grads;
    begin_a(grads, b);
    descend_tree(grads, block.decays, all, rows.with_a, Products{rows, whole_rows_of, d.ak, d.rb, d.ab, d.ab, b},
                 [&](int n, int j, int i) { return block.a_row(n, j, i); },
                 [&](int n, int j, int i) { return block.b_row(n, j, i); }, shared, d_decay, b);
    for_each_element([&](int n, int j, int i) {
        grads.right[n][2 * j + i] += scale * own_pair(16 * b + token_of(n, i)).y * element_of<T_IO>(block.r, n, j, i);
    });
    store_block_transposed(tiles.a, 16 * b, column, to_fragment(grads.left[0], grads.left[1]));
    store_block_transposed(tiles.b, 16 * b, column, to_fragment(grads.right[0], grads.right[1]));
}

// All blocks by one warp, and the gradient of the log-decay to the place of the tokens' decays in `growth`.
// `state_terms` is sum_v S E of the lane's channels.
template <typename Tiles, typename Raw, typename Matrix, typename BeginR, typename BeginA, typename OwnPair, int PITCH>
__device__ inline void write_key_gradients_by_halves(const Tiles& tiles, const Raw& raw, const PairGradients<Matrix>& d,
                                                     BeginR begin_r, BeginA begin_a, OwnPair own_pair,
                                                     float (*growth)[PITCH], const float (&state_terms)[2], int column,
                                                     float scale) {
    BlockProducts all, shared = {};
    float whole[2];
    BlockSums d_decay[BLOCKS] = {};
    load_products(all, growth, column);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const KeyBlock block(raw, growth, column, b, scale);
        BothRows<Fragment> others[BLOCKS];
#pragma unroll
        for (int o = 0; o < BLOCKS; ++o)
            if (o != b)
                others[o] =
                    KeyBlock(raw, growth, column, o, scale).whole_rows_for(meeting_distance(o, b), all, o);
        write_key_block_by_halves(tiles, block, [&](int o) { return others[o]; }, d, begin_r, begin_a, own_pair, all,
                                  shared, d_decay[b], column, scale, b);
    }
    multiply_blocks(whole, all, 0, BLOCKS);  // what decays of the state from the chunk's start to its end
    __syncwarp();  // all lanes have read the decays
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
        for_each_element([&](int n, int j, int i) {
            growth[16 * b + token_of(n, i)][column + group() + 8 * j] =
                d_decay[b][n][2 * j + i] + shared[b][j] + state_terms[j] * whole[j];
        });
}
