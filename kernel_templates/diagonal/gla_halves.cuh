// The backward of gated linear attention and its kin, for the keys' side of a chunk that leaves the range of its
// middle's frame: by halves.
//
// Needs what gla_key_side.cuh needs.
#pragma once
#include "gla_key_side.cuh"
#include "halves.cuh"

// The gradients of a warp's 16 channels; all is [channel, token]. Of rows they are those of the left and of the right
// ones.
struct PairGradients {
    Decays decays;
    LevelRows rows;
    TokenSums d_q = {}, d_k = {}, d_decay;
    EightSums shared = {};

    template <int LEVEL, typename Matrix> __device__ void descend_levels(Matrix d_pairs) {
        TokenSums d_rows = {}, terms = {};
        add_level_gradients<LEVEL>(d_rows, rows, d_pairs, d_pairs);
        descend<LEVEL>(d_q, d_k, d_rows, rows.at[index_of(LEVEL)], decays, terms);
        descend<LEVEL>(shared, d_decay, terms);
        if constexpr (LEVEL > 1) descend_levels<LEVEL / 2>(d_pairs);
    }
};
// dY S and V E where they are there already.
struct Ends {
    const TokenSums &with_start, &with_end;
    __device__ void operator()(TokenSums& sums, bool is_start) const {
        for_each_token([&](int n, int j, int i, int) {
            sums[n][2 * j + i] = is_start ? with_start[n][2 * j + i] : with_end[n][2 * j + i];
        });
    }
};

// `add_end` adds dY S or V E to sums of the warp's channels from `column` on, `own` is sum_v S E for the lane's. dq and
// dk go to the tiles; `growth` holds the tokens' decays, and takes the gradient of the log-decays. `own_product` gives
// dy_t . v_t.
template <typename Rows, int PITCH, int RAW_COLUMNS, typename Matrix, typename AddEnd, typename OwnProduct>
__device__ inline void write_pair_gradients_by_halves(
    AddEnd add_end, const float (&own)[2], Rows& q_tile, Rows& k_tile, const T_IO (&raw_q)[CHUNK_LEN][RAW_COLUMNS],
    const T_IO (&raw_k)[CHUNK_LEN][RAW_COLUMNS], float (*growth)[PITCH], Matrix d_pairs, OwnProduct own_product,
    const float (&bonus)[2], float scale, int column, int steps, ChannelSums& sums) {
    PairGradients grads;
    TokenFragments q, k;
    grads.decays.load(growth, column);
    load_raw(q, raw_q, column), load_raw(k, raw_k, column);
    const auto row = [&](int n, int j, int i) {  // of a left token alone
        return scale * element_of<T_IO>(q, n, j, i) * (BONUS ? 1.0f : grads.decays.own[n][2 * j + i]);
    };
    {
        TokenSums left, right;
        for_each_token([&](int n, int j, int i, int) {
            left[n][2 * j + i] = row(n, j, i), right[n][2 * j + i] = element_of<T_IO>(k, n, j, i);
        });
        grads.rows.add_levels<1>(left, right, grads.decays);
    }
    add_end(grads.d_q, true), add_end(grads.d_k, false);
    grads.descend_levels<CHUNK_LEN / 2>(d_pairs);
    const float whole[2] = {own[0] * grads.decays.all[0][0], own[1] * grads.decays.all[0][1]};
    __syncwarp();  // all lanes have read the decays
    for_each_token([&](int n, int j, int i, int token) {
        const int at = 2 * j + i;
        const float own_q = element_of<T_IO>(q, n, j, i), own_k = element_of<T_IO>(k, n, j, i);
        const float product = own_product(token) * (BONUS ? bonus[j] : scale);
        const float d_decay = grads.d_decay[n][at] + whole[j] + (BONUS ? 0.0f : grads.d_q[n][at] * row(n, j, i));
        grads.d_q[n][at] *= scale * (BONUS ? 1.0f : grads.decays.own[n][at]);
        grads.d_q[n][at] += product * own_k, grads.d_k[n][at] += product * own_q;
        if constexpr (BONUS) sums.bonus[j] += own_product(token) * scale * own_q * own_k;
        if constexpr (CONSTANT_DECAY) sums.decay[j] += token < steps ? d_decay : 0.0f;
        else growth[token][column + group() + 8 * j] = d_decay;
    });
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) {
        store_block_transposed(tile_of(q_tile), 16 * p, column,
                               to_fragment_of<T_IO>(grads.d_q[2 * p], grads.d_q[2 * p + 1]));
        store_block_transposed(tile_of(k_tile), 16 * p, column,
                               to_fragment_of<T_IO>(grads.d_k[2 * p], grads.d_k[2 * p + 1]));
    }
}
