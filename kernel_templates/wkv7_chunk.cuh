// One chunk of RWKV-7 in the centred frame: what its forward and its backward begin with.
//
// Rows are the CHUNK_LEN tokens of the chunk, c_t the sum of the log-decays up to token t, D the sum over
// all, m the sum over the first half. Scaled by how far a token is from the middle,
//
//     R = scale r e^(c_t - m)    A = a e^(c_(t-1) - m)    K = k e^(m - c_t)    B = b e^(m - c_t)    S' = S_0 diag(e^m)
//
// the chunk is a handful of matrix products in which no decay appears any more:
//
//     Aab = tril(A B^T, -1)   Aak = tril(A K^T, -1)   Arb = tril(R B^T)   Ark = tril(R K^T)   Tm = (I - Aab)^-1
//
// Operands are bf16, sums fp32. Logarithms are to the base 2, for which the GPU has an instruction.
//
// Within every 16 key channels a tile keeps the pairs of channels in the order 0 2 4 6 1 3 5 7 ("positions"), so that a
// lane of an accumulator holds four neighbouring channels: two in each of two accumulators side by side.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, NUM_THREADS, T_IO, T_W, DECAY.
#pragma once
#include "copy.cuh"
#include "wkv7_decay.cuh"

constexpr int CHANNELS = 32 * ceil_div(HEAD_SIZE, 32);
constexpr int VALUES = 32 * ceil_div(VALUE_SIZE, 32);
constexpr int WARPS = NUM_THREADS / 32;
constexpr int BLOCKS = CHUNK_LEN / 16;  // of 16 tokens
constexpr int KEY_PITCH = CHANNELS + 8, VALUE_PITCH = VALUES + 8, TOKEN_PITCH = CHUNK_LEN + 8;

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(CHUNK_LEN == 16 || CHUNK_LEN == 32, "chunk_len must be 16 or 32");
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS >= 64 && NUM_THREADS <= 512,
              "num_threads must be a multiple of 32 from 64 to 512");

using KeyTile = bf16[CHUNK_LEN][KEY_PITCH];
using ValueTile = bf16[CHUNK_LEN][VALUE_PITCH];
using TokenTile = bf16[CHUNK_LEN][TOKEN_PITCH];
template <int PITCH, int ROWS> __device__ inline Tile<PITCH> tile_of(const bf16 (&rows)[ROWS][PITCH]) {
    return {shared_address(&rows[0][0])};
}

// ---- operands --------------------------------------------------------------------------------------------------
// A thread prepares one pair of channels over SEGMENT_LEN tokens.

constexpr int PAIRS = CHANNELS / 2;
constexpr int SEGMENT_LEN = ceil_power(ceil_div(CHUNK_LEN * PAIRS, NUM_THREADS));
constexpr int SEGMENTS = CHUNK_LEN / SEGMENT_LEN;
static_assert(SEGMENTS >= 2, "num_threads must be at least the head size, rounded up to a multiple of 32");

// Where the pair of channels `pair` stands in a tile, and which channels an accumulator's lane holds: the columns
// 2 t, 2 t + 1 of the accumulators 2 n and 2 n + 1 are the channels lane_channel(n) + 0, 1 and + 2, 3.
__device__ inline int position_of_pair(int pair) { return 2 * ((pair & ~7) | (pair & 1) << 2 | (pair >> 1 & 3)); }
__device__ inline int lane_channel(int n) { return 16 * n + 4 * quad_lane(); }

// The thread's pair of channels in `factor`, which is by position.
__device__ inline void write_factor(float (&factor)[CHANNELS], float2 exponent) {
    if (threadIdx.x < PAIRS)
        *reinterpret_cast<float2*>(&factor[position_of_pair(threadIdx.x)]) = {
            exp2_fast(exponent.x / FACTOR_STEPS), exp2_fast(exponent.y / FACTOR_STEPS)};
}

struct Operands {
    KeyTile r, a, k, b;  // R A K B
};

// The raw rows of the next chunk.
struct RawKeys {
    T_IO r[CHUNK_LEN][CHANNELS], a[CHUNK_LEN][CHANNELS], k[CHUNK_LEN][CHANNELS], b[CHUNK_LEN][CHANNELS];
};

// The decays of a thread's tokens, as they come from memory.
struct RawDecays {
    static constexpr int VECTOR = HEAD_SIZE % 4 == 0 ? 2 : 1;
    Words<T_W, VECTOR> held[SEGMENT_LEN][2 / VECTOR];

    // `w` is the chunk's first token of `steps`. What is past the last token or channel is read from there: a load
    // under a condition would have to wait for the value that it may leave in place.
    __device__ void load(const T_W* w, i64 token_stride, int steps) {
        const int first = threadIdx.x / PAIRS * SEGMENT_LEN, channel = threadIdx.x % PAIRS * 2;
        const T_W* row = w + min(first, steps - 1) * token_stride;
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
#pragma unroll
            for (int j = 0; j < 2 / VECTOR; ++j)
                held[i][j] = *reinterpret_cast<const Words<T_W, VECTOR>*>(row + min(channel + j, HEAD_SIZE - VECTOR));
            if (first + i + 1 < steps) row += token_stride;
        }
    }
    __device__ float at(int i, int j) const { return held[i][j / VECTOR].at(j % VECTOR); }
};

// Sums of the rates of a thread's pair of channels up to each of its tokens.
struct RateSums { float2 at[SEGMENT_LEN]; };

// First half: sums within the thread's segment. Padding has no decay.
__device__ inline void sum_rates(RateSums& sums, float2 (&totals)[SEGMENTS][PAIRS], const RawDecays& raw, int steps) {
    const int channel = threadIdx.x % PAIRS * 2, segment = threadIdx.x / PAIRS;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const bool present = segment * SEGMENT_LEN + i < steps;
        const auto rate = [&](int j) {
            const bool is_channel = HEAD_SIZE == CHANNELS || channel + j < HEAD_SIZE;
            return present && is_channel ? decay_rate<DECAY>(raw.at(i, j)) : 0.0f;
        };
        sum.x += rate(0), sum.y += rate(1);
        sums.at[i] = sum;
    }
    if (segment < SEGMENTS) totals[segment][threadIdx.x % PAIRS] = sum;
}

// m and D of a thread's pair of channels, and the largest c_t - m of its tokens, which growth may hide from the two.
struct Frame {
    float2 middle, end;
    float farthest;
};

// Second half, after a barrier: the operands. `growth` takes e^(c_t - m) in rows 1 .. CHUNK_LEN and e^(-m) in row 0.
template <bool KEEPS_GROWTH, int GROWTH_PITCH>
__device__ inline Frame write_operands(const RateSums& sums, const float2 (&totals)[SEGMENTS][PAIRS],
                                       const RawKeys& raw, Operands& operands, float scale,
                                       float (*growth)[GROWTH_PITCH]) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS, position = position_of_pair(index);
    Frame frame = {};
    float2 before = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
        const float2 total = totals[s][index];
        if (s < segment) before.x += total.x, before.y += total.y;
        if (s < SEGMENTS / 2) frame.middle.x += total.x, frame.middle.y += total.y;
        frame.end.x += total.x, frame.end.y += total.y;
    }
    const float2 origin = {RATE_UNIT * (before.x - frame.middle.x), RATE_UNIT * (before.y - frame.middle.y)};
    frame.middle.x *= RATE_UNIT, frame.middle.y *= RATE_UNIT, frame.end.x *= RATE_UNIT, frame.end.y *= RATE_UNIT;
    if (segment >= SEGMENTS) return frame;
    float2 grown = {exp2_fast(origin.x), exp2_fast(origin.y)};  // of the token before
    if (KEEPS_GROWTH && segment == 0) *reinterpret_cast<float2*>(&growth[0][position]) = grown;
    constexpr int BATCH = min_of(SEGMENT_LEN, 4);  // tokens read at once, before anything is written
#pragma unroll
    for (int first = 0; first < SEGMENT_LEN; first += BATCH) {
        unsigned words[BATCH][4];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = segment * SEGMENT_LEN + first + i;
            const auto word = [&](const T_IO (&rows)[CHUNK_LEN][CHANNELS]) {
                return *reinterpret_cast<const unsigned*>(&rows[token][2 * index]);
            };
            words[i][0] = word(raw.r), words[i][1] = word(raw.a), words[i][2] = word(raw.k), words[i][3] = word(raw.b);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = segment * SEGMENT_LEN + first + i;
            const float2 sum = sums.at[first + i];
            const float2 c = {origin.x + RATE_UNIT * sum.x, origin.y + RATE_UNIT * sum.y};
            const float2 shrink = {exp2_fast(-c.x), exp2_fast(-c.y)};
            frame.farthest = fmaxf(frame.farthest, fmaxf(fabsf(c.x), fabsf(c.y)));
            const auto write = [&](KeyTile& tile, unsigned word, float2 factor) {
                const float2 x = unpack(word);
                *reinterpret_cast<unsigned*>(&tile[token][position]) = pack(x.x * factor.x, x.y * factor.y);
            };
            write(operands.a, words[i][1], grown);
            write(operands.k, words[i][2], shrink);
            write(operands.b, words[i][3], shrink);
            grown = {exp2_fast(c.x), exp2_fast(c.y)};
            write(operands.r, words[i][0], {grown.x * scale, grown.y * scale});
            if (KEEPS_GROWTH) *reinterpret_cast<float2*>(&growth[token + 1][position]) = grown;
        }
    }
    return frame;
}

// ---- products of the chunk's tokens with each other ------------------------------------------------------------

struct TokenMatrices {
    union {
        TokenTile tm;                    // Tm, once the substitution has read
        float lower[BLOCKS][16][20];     // the diagonal blocks of Aab, a column of a block per row
    };
    TokenTile ak, rb, rk;                // Aak Arb Ark
};

// Rows [16 p, 16 p + 16) of an operand as the left side of products over the channels.
struct LeftRows {
    Fragment at[CHANNELS / 16];
    __device__ LeftRows(Tile<KEY_PITCH> tile, int p) {
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) at[c] = load_left(tile, 16 * p, 16 * c);
    }
};
// sum += left right_q^T.
__device__ inline void multiply_rows(Accumulator (&sum)[2], const LeftRows& left, Tile<KEY_PITCH> right, int q) {
#pragma unroll
    for (int c = 0; c < CHANNELS / 16; ++c)
        multiply_add(sum, left.at[c], load_right_transposed(right, 16 * q, 16 * c));
}
// Keeps what is on or below the diagonal `offset` places down.
__device__ inline void keep_lower(Accumulator (&sum)[2], int offset) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        if (row < column + offset) sum[i / 4][i % 4] = 0.0f;
    }
}

// Tm = (I - Aab)^-1 by one warp: the diagonal blocks by substitution in fp32, half a warp each and a lane per
// column, since products of narrow powers lose everything where keys repeat. The blocks below them are
// Tm_pq = Tm_pp sum_m Aab_pm Tm_mq, in bf16.
__device__ inline void invert(TokenMatrices& matrices, const Operands& operands) {
    const auto a = tile_of(operands.a), b = tile_of(operands.b);
    const auto tm = tile_of(matrices.tm);
    Fragment below[BLOCKS > 1 ? BLOCKS * (BLOCKS - 1) / 2 : 1];
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) {
        const LeftRows left(a, p);
#pragma unroll
        for (int q = 0; q <= p; ++q) {
            Accumulator sum[2] = {};
            multiply_rows(sum, left, b, q);
            if (q < p) {
                below[p * (p - 1) / 2 + q] = to_fragment(sum[0], sum[1]);
                continue;
            }
            keep_lower(sum, 1);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
                matrices.lower[p][column][row] = sum[i / 4][i % 4];
            }
        }
    }
    __syncwarp();

    const int block = lane_id() / 16, column = lane_id() % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
    if (block < BLOCKS) {
#pragma unroll
        for (int i = 0; i < 15; ++i)
#pragma unroll
            for (int row = (i + 1) / 4 * 4; row < 16; row += 4) {
                const float4 four = *reinterpret_cast<const float4*>(&matrices.lower[block][i][row]);
                const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (row + j > i) x[row + j] += factors[j] * x[i];
            }
    }
    __syncwarp();
    if (block < BLOCKS) {
#pragma unroll
        for (int i = 0; i < 16; ++i) matrices.tm[16 * block + i][16 * block + column] = from_float<bf16>(x[i]);
    }
#pragma unroll
    for (int p = 1; p < BLOCKS; ++p) {
#pragma unroll
        for (int q = 0; q < p; ++q) {
            __syncwarp();
            Accumulator carried[2] = {};  // transpose of the sum over m
#pragma unroll
            for (int m = q; m < p; ++m)
                multiply_add(carried, load_left_transposed(tm, 16 * m, 16 * q), transposed(below[p * (p - 1) / 2 + m]));
            Accumulator sum[2] = {};
            multiply_add(sum, load_left(tm, 16 * p, 16 * p), transposed(to_fragment(carried[0], carried[1])));
            store_block(tm, 16 * p, 16 * q, to_fragment(sum[0], sum[1]));
        }
    }
}

// All four; warp 0 the inverse, the others the rest: Arb and Ark, which share their left side, or Aak, 16 rows at a time.
__device__ inline void write_token_matrices(TokenMatrices& matrices, const Operands& operands) {
    if (warp_id() == 0) {
        invert(matrices, operands);
        return;
    }
    const auto k = tile_of(operands.k), b = tile_of(operands.b);
    for (int task = warp_id() - 1; task < 2 * BLOCKS; task += WARPS - 1) {
        const bool is_a = task % 3 == 0;  // A, R, R, A: the costliest, R's last rows, is one warp's only task
        const int p = BLOCKS - 1 - task / 2;
        const LeftRows left(tile_of(is_a ? operands.a : operands.r), p);
        for (int q = 0; q <= p; ++q) {
            Accumulator with_k[2] = {}, with_b[2] = {};
            multiply_rows(with_k, left, k, q);
            if (!is_a) multiply_rows(with_b, left, b, q);
            if (q == p) keep_lower(with_k, is_a), keep_lower(with_b, 0);
            store_block(tile_of(is_a ? matrices.ak : matrices.rk), 16 * p, 16 * q, to_fragment(with_k[0], with_k[1]));
            if (!is_a) store_block(tile_of(matrices.rb), 16 * p, 16 * q, to_fragment(with_b[0], with_b[1]));
        }
    }
}

// ---- checkpoints -----------------------------------------------------------------------------------------------
// S' of a chunk as the fragments of its 16 x 16 blocks, lane by lane, so that a warp moves a block in one access.

struct Checkpoint { uint4 lanes[VALUES / 16][CHANNELS / 16][32]; };

__device__ inline void write_checkpoint(Checkpoint* checkpoint, int row, int c, const Fragment& f) {
    checkpoint->lanes[row / 16][c][lane_id()] = {f.at[0], f.at[1], f.at[2], f.at[3]};
}
__device__ inline Fragment read_checkpoint(const Checkpoint* checkpoint, int row, int c) {
    const uint4 lane = checkpoint->lanes[row / 16][c][lane_id()];
    return {{lane.x, lane.y, lane.z, lane.w}};
}

// ---- the state in accumulators ---------------------------------------------------------------------------------
// A warp holds rows [row, row + 16) and all channels: state[n] is the channels of positions [8 n, 8 n + 8).

using StateRows = Accumulator[CHANNELS / 8];

template <typename Visit> __device__ inline void for_each_element(StateRows& state, int row, Visit visit) {
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int value = row + group() + i / 2 * 8, channel = lane_channel(n / 2) + n % 2 * 2 + i % 2;
            visit(state[n][i], value, channel, value < VALUE_SIZE && channel < HEAD_SIZE);
        }
}
// A null pointer stands for zeros.
template <StateLayout LAYOUT, typename T> __device__ inline void read_state(StateRows& state, const T* source, int row) {
    for_each_element(state, row, [&](float& x, int value, int channel, bool present) {
        x = present && source != nullptr ? to_float(source[state_index<LAYOUT>(value, channel)]) : 0.0f;
    });
}
template <StateLayout LAYOUT, typename T> __device__ inline void write_state(T* target, StateRows& state, int row) {
    for_each_element(state, row, [&](float& x, int value, int channel, bool present) {
        if (present) target[state_index<LAYOUT>(value, channel)] = from_float<T>(x);
    });
}
// Multiplies column by column by the power of two that `write_factor` got; `factor` is by position.
__device__ inline void scale_columns(StateRows& state, const float (&factor)[CHANNELS]) {
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n) {
        const float2 f = *reinterpret_cast<const float2*>(&factor[8 * n + 2 * quad_lane()]);
#pragma unroll
        for (int i = 0; i < FACTOR_STEPS; ++i)
            state[n][0] *= f.x, state[n][1] *= f.y, state[n][2] *= f.x, state[n][3] *= f.y;
    }
}
