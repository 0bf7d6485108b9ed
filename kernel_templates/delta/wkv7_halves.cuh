// The gradients of the keys' side of RWKV-7 by halves (levels.cuh).
//
// Needs what halves.cuh needs.
#pragma once
#include "halves.cuh"

// The gradients of the token matrices.
template <typename Matrix> struct PairGradients { Matrix rk, rb, ak, ab; };

// sums += X S of the warp's channels from `column` on, transposed; of COUNT values from `first` on.
template <int COUNT, typename States, typename Values>
__device__ inline void multiply_end(TokenSums& sums, States states, Values values, int column, int first = 0) {
#pragma unroll
    for (int c = first; c < first + COUNT; c += 16) {
        const Fragment rows = load_left_transposed(states, c, column);
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) multiply_add(&sums[2 * p], rows, load_right_transposed(values, 16 * p, c));
    }
}

// The decays and the rows of all levels of a warp's 16 channels; all is [channel, token].
struct KeyLevels {
    Decays decays;
    LevelRows with_r, with_a;  // R and K, A and B

    template <typename Rows>
    __device__ void add_levels(LevelRows& rows, const Rows& of_left, const Rows& of_right, int column, bool sees_own,
                               float scale) {
        TokenFragments x, y;
        TokenSums left, right;
        load_raw(x, of_left, column), load_raw(y, of_right, column);
        for_each_token([&](int n, int j, int i, int) {
            const int at = 2 * j + i;
            left[n][at] = element_of<T_IO>(x, n, j, i) * (sees_own ? scale * decays.own[n][at] : 1.0f);
            right[n][at] = element_of<T_IO>(y, n, j, i);
        });
        rows.add_levels<1>(left, right, decays);
    }
    // `raw` has the rows r, a, k and b, and `growth` the tokens' decays. All lanes of the warp have to come.
    template <typename Raw, int PITCH>
    __device__ KeyLevels(const Raw& raw, const float (*growth)[PITCH], int column, float scale) {
        decays.load(growth, column);
        add_levels(with_r, raw.r, raw.k, column, true, scale), add_levels(with_a, raw.a, raw.b, column, false, scale);
        __syncwarp();  // all lanes have read the decays
    }
};

// The gradients of the rows of one tree, R and K or A and B: to begin with those of the rows that meet the states at
// the chunk's start and end, in the end those of the inputs. One tree after the other: for both there are no registers.
struct RowGradients {
    TokenSums left = {}, right = {}, d_decay;
    EightSums shared = {};

    // What multiplies a level's rows R and K to the gradients of these rows, of left and of right ones, and what A and
    // B.
    template <int LEVEL, typename Matrix>
    __device__ void descend_levels(const KeyLevels& levels, const LevelRows& own, Matrix r_left, Matrix r_right,
                                   Matrix a_left, Matrix a_right) {
        TokenSums d_rows = {}, terms = {};
        add_level_gradients<LEVEL>(d_rows, levels.with_r, r_left, r_right);
        add_level_gradients<LEVEL>(d_rows, levels.with_a, a_left, a_right);
        descend<LEVEL>(left, right, d_rows, own.at[index_of(LEVEL)], levels.decays, terms);
        descend<LEVEL>(shared, d_decay, terms);
        if constexpr (LEVEL > 1) descend_levels<LEVEL / 2>(levels, own, r_left, r_right, a_left, a_right);
    }
    template <typename Matrix> __device__ void descend_r(const KeyLevels& levels, const PairGradients<Matrix>& d) {
        descend_levels<CHUNK_LEN / 2>(levels, levels.with_r, d.rk, d.rk, d.rb, d.ak);
    }
    template <typename Matrix> __device__ void descend_a(const KeyLevels& levels, const PairGradients<Matrix>& d) {
        descend_levels<CHUNK_LEN / 2>(levels, levels.with_a, d.ak, d.rb, d.ab, d.ab);
    }
    template <typename Tile> __device__ void store(Tile left_tile, Tile right_tile, int column) const {
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) {
            store_block_transposed(left_tile, 16 * p, column, to_fragment_of<T_IO>(left[2 * p], left[2 * p + 1]));
            store_block_transposed(right_tile, 16 * p, column, to_fragment_of<T_IO>(right[2 * p], right[2 * p + 1]));
        }
    }
};

// dr, dk, da and db to `tiles`, which may be those of `raw`, and the gradient of the log-decay to the place of the
// tokens' decays in `growth`. `begin_r` and `begin_a` begin the gradients with what the states give: dY S and V E, dX S
// and U E. `own_pair` gives dArk and dArb of a token with itself, and `state_terms` is sum_v S E of the lane's
// channels.
template <typename Tiles, typename Raw, typename Matrix, typename BeginR, typename BeginA, typename OwnPair, int PITCH>
__device__ inline void write_key_gradients_by_halves(const Tiles& tiles, const Raw& raw, const PairGradients<Matrix>& d,
                                                     BeginR begin_r, BeginA begin_a, OwnPair own_pair,
                                                     float (*growth)[PITCH], const float (&state_terms)[2], int column,
                                                     float scale) {
    const KeyLevels levels(raw, growth, column, scale);
    const auto gradient = [&](int token, int j) -> float& { return growth[token][column + group() + 8 * j]; };
    TokenFragments r_rows;
    {
        RowGradients grads;
        begin_r(grads);
        grads.descend_r(levels, d);
        TokenFragments k_rows, b_rows;
        load_raw(r_rows, raw.r, column), load_raw(k_rows, raw.k, column), load_raw(b_rows, raw.b, column);
        for_each_token([&](int n, int j, int i, int token) {
            const int at = 2 * j + i;
            const float2 own = own_pair(token);
            const float with_k = scale * own.x, with_b = scale * own.y, r = element_of<T_IO>(r_rows, n, j, i);
            float& x = grads.left[n][at];
            x *= scale * levels.decays.own[n][at];
            // What decays of the state from the chunk's start to its end counts for every token.
            gradient(token, j) = grads.d_decay[n][at] + state_terms[j] * levels.decays.all[0][j] + x * r;
            x += with_k * element_of<T_IO>(k_rows, n, j, i) + with_b * element_of<T_IO>(b_rows, n, j, i);
            grads.right[n][at] += with_k * r;
        });
        __syncwarp();  // all lanes have read the rows
        grads.store(tiles.r, tiles.k, column);
    }
    RowGradients grads;
    begin_a(grads);
    grads.descend_a(levels, d);
    for_each_token([&](int n, int j, int i, int token) {
        gradient(token, j) += grads.d_decay[n][2 * j + i];
        grads.right[n][2 * j + i] += scale * own_pair(token).y * element_of<T_IO>(r_rows, n, j, i);
    });
    grads.store(tiles.a, tiles.b, column);
}
