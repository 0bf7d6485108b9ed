// Kimi Delta Attention, 64 tokens of a head at once: what the tokens of a block of 16 do to each other's operands. With
// e^g the decay of a channel at a token, and everything else as in channel_decay_group_forward.cu.
//
// Tokens are taken by halves, and no logarithms are summed: of two blocks of N tokens side by side, rows of the upper
// one are multiplied by the decays from its start on, columns of the lower one by those to its end. Both grow from level
// to level by the product over the other block. So there is one exponential for a decay, no factor is above 1, and any
// decay is right; what is nothing to a float is 0.
//
// Needs T_IO, T_W, GATE, HAS_NORM, BETA_MAP, CHUNK_LEN, DECAY.
#pragma once
#include "gate_maps.cuh"
#include "wgmma.cuh"

__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The decays of tokens, from g as it comes: the log-decay, or what makes it with a head's speed, exp(a_log).
enum class LogDecay { given, softplus, bounded };
constexpr LogDecay LOG_DECAY = LogDecay(GATE);
struct Gate {
    float speed = 0.0f, bound;  // with what the logarithm's base asks for

    __device__ Gate(const float* a_log, i64 head, float lower_bound) : bound(LOG2_E * lower_bound) {
        if constexpr (LOG_DECAY != LogDecay::given) speed = exp2_fast(LOG2_E * a_log[head]);
        if constexpr (LOG_DECAY == LogDecay::bounded) speed *= LOG2_E;
    }
    // Of a decay, base 2.
    __device__ float logarithm(float g, float bias) const {
        if constexpr (LOG_DECAY == LogDecay::given) return LOG2_E * g;
        if constexpr (LOG_DECAY == LogDecay::bounded) return bound * reciprocal(1.0f + exp2_fast(-speed * (g + bias)));
        const float x = exp2_fast(LOG2_E * (g + bias));
        // Beside 1 a small x would lose its digits, and many such tokens forget something.
        return -speed * (x < 1e-3f ? LOG2_E * (x - 0.5f * x * x) : log2_fast(1.0f + x));
    }
    __device__ float decay(float g, float bias) const { return exp2_fast(logarithm(g, bias)); }
};

constexpr int BLOCK = 16;  // tokens of a warp
// A pair of channels of all tokens of a block.
using Pairs = float[BLOCK][2];

// A pair of columns of row `first` + t, where `first` is a multiple of 8: the compiler need not find that out.
template <int ROWS> __device__ inline unsigned* word_of(Slab<ROWS>& slab, int first, int t, int pair) {
    return reinterpret_cast<unsigned*>(&slab.units[first + t][pair / 4 ^ t % 8]) + pair % 4;
}

// Rows and columns of a level: 8 tokens of keys and the same of queries; 8 tokens of keys.
struct LevelTile {
    Slab<16> left;
    Slab<8> right;
};
// The rows of a level are the upper tokens of its blocks, its columns the lower ones.
template <int N> __device__ constexpr int lower_token(int i) { return i / N * 2 * N + i % N; }

// Of a block's tokens, in blocks of a level.
struct BlockDecays {
    Pairs from_start;  // the decays from the start of a token's block on, with its own
    Pairs to_end;      // those behind it, to the block's end

    // Blocks of N tokens, to such of twice as many.
    template <int N> __device__ void grow() {
#pragma unroll
        for (int b = 0; b < BLOCK; b += 2 * N)
#pragma unroll
            for (int t = b; t < b + N; ++t)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    to_end[t][j] *= from_start[b + 2 * N - 1][j];
                    // The last one of the upper block is read above, by all of the lower block.
                    if (t == b + N - 1)
#pragma unroll
                        for (int upper = b + N; upper < b + 2 * N; ++upper) from_start[upper][j] *= from_start[t][j];
                }
    }
};

// Products of a level: of keys in [0] and [1], of queries in [2] and [3].
__device__ inline void multiply_level(Accumulator& sum, const LevelTile& tile) {
    const unsigned right = shared_address(&tile.right.units[0][0]), row = lane_id() % 8;
#pragma unroll
    for (int c = 0; c < TILE_COLUMNS; c += 32) {
        const Fragment columns = load_matrices(right + 128 * row + ((c / 8 + lane_id() / 8) ^ row) * 16);
        multiply_add(sum, load_left(tile_of(tile.left), 0, c), columns.at[0], columns.at[1]);
        multiply_add(sum, load_left(tile_of(tile.left), 0, c + 16), columns.at[2], columns.at[3]);
    }
}
// What the lanes of a diagonal have: token `group()` in lane `quad_lane()` == group() / 2.
__device__ inline bool has_diagonal() { return quad_lane() == group() / 2; }
struct DiagonalSums {
    float keys[2], queries[2], both[2];  // k . k, q . q, q . k of a lane's tokens, which are eight apart

    __device__ void add(SlabTile rows_k, SlabTile rows_q, int first) {
        Accumulator sums[4] = {};
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS; c += 16) {
            const Fragment k = load_left(rows_k, first, c), q = load_left(rows_q, first, c);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                multiply_add(sums[i], {{k.at[i], q.at[i], k.at[2 + i], q.at[2 + i]}}, k.at[i], k.at[2 + i]);
                if constexpr (HAS_NORM) multiply_add(sums[2 + i], q, q.at[i], q.at[2 + i]);
            }
        }
        const int odd = group() % 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            keys[i] += odd ? sums[i][1] : sums[i][0];
            both[i] += odd ? sums[i][3] : sums[i][2];
            if constexpr (HAS_NORM) queries[i] += odd ? sums[2 + i][2 * i + 1] : sums[2 + i][2 * i];
        }
    }
};

// Tm of a block by one warp, from -L, a column per row, by substitution in fp32; a lane has a column of Tm - I. It goes
// to a tile whose rows are columns.
__device__ inline void solve_block(const float (&lower)[BLOCK][BLOCK + 4], Slab<BLOCK>& turned) {
    const int column = lane_id() % BLOCK;
    float x[BLOCK];
    const auto read_column = [&](int i, int row) { return *reinterpret_cast<const float4*>(&lower[i][row]); };
#pragma unroll
    for (int row = 0; row < BLOCK; row += 4) {
        const float4 four = read_column(column, row);
        x[row] = four.x, x[row + 1] = four.y, x[row + 2] = four.z, x[row + 3] = four.w;
    }
#pragma unroll
    for (int row = 0; row < BLOCK; ++row) x[row] = row > column ? x[row] : 0.0f;  // nobody has written anything else
#pragma unroll
    for (int i = 1; i < BLOCK - 1; ++i)
#pragma unroll
        for (int row = (i + 1) / 4 * 4; row < BLOCK; row += 4) {
            const float4 four = read_column(i, row);
            const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row + j > i) x[row + j] += factors[j] * x[i];
        }
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) x[i] = i == column ? 1.0f : x[i];
    if (lane_id() < BLOCK)
#pragma unroll
        for (int i = 0; i < BLOCK; i += 8)
            turned.units[column][i / 8 ^ column % 8] = {pack(x[i], x[i + 1]), pack(x[i + 2], x[i + 3]),
                                                        pack(x[i + 4], x[i + 5]), pack(x[i + 6], x[i + 7])};
    __syncwarp();
}
