// What kernels share that hold a head's state on chip and take CHUNK_LEN tokens at once: sizes, tiles, products of an
// operand's rows, checkpoints, the state in accumulators.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, NUM_THREADS, T_IO, DECAY.
#pragma once
#include "copy.cuh"
#include "decay.cuh"

constexpr int CHANNELS = 32 * ceil_div(HEAD_SIZE, 32);
constexpr int VALUES = 32 * ceil_div(VALUE_SIZE, 32);
constexpr int WARPS = NUM_THREADS / 32;
constexpr int BLOCKS = CHUNK_LEN / 16;  // of 16 tokens
constexpr int KEY_PITCH = CHANNELS + 8, VALUE_PITCH = VALUES + 8, TOKEN_PITCH = CHUNK_LEN + 8;

using KeyTile = bf16[CHUNK_LEN][KEY_PITCH];
using ValueTile = bf16[CHUNK_LEN][VALUE_PITCH];
using TokenTile = bf16[CHUNK_LEN][TOKEN_PITCH];
template <int PITCH, int ROWS> __device__ inline Tile<PITCH> tile_of(const bf16 (&rows)[ROWS][PITCH]) {
    return {shared_address(&rows[0][0])};
}

// A pair of columns (2 `pair`, 2 `pair` + 1) of a row.
template <int PITCH, int ROWS> __device__ inline unsigned* word_of(bf16 (&rows)[ROWS][PITCH], int row, int pair) {
    return reinterpret_cast<unsigned*>(&rows[row][2 * pair]);
}

// ---- products over the channels --------------------------------------------------------------------------------

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
// Keeps what is on or below the diagonal `offset` places down.
__device__ inline void keep_lower(Accumulator (&sum)[2], int offset) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        if (row < column + offset) sum[i / 4][i % 4] = 0.0f;
    }
}

// ---- checkpoints -----------------------------------------------------------------------------------------------
// S' of a chunk, the state at its start in the frame of its middle, as the fragments of its 16 x 16 blocks, lane by lane,
// so that a warp moves a block in one access. Or, for products of warp groups that read it as it is, as matrices of 8 x 8, and
// then of every GROUP_CHUNK_LEN tokens.

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

// ---- the state in accumulators ---------------------------------------------------------------------------------
// A warp holds rows [row, row + 16) and all channels: state[n] is the channels [8 n, 8 n + 8).

using StateRows = Accumulator[CHANNELS / 8];

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
// Multiplies column by column by the power of two that `write_factor` got.
__device__ inline void scale_columns(StateRows& state, const float (&factor)[CHANNELS]) {
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n) {
        const float2 f = *reinterpret_cast<const float2*>(&factor[8 * n + 2 * quad_lane()]);
#pragma unroll
        for (int i = 0; i < FACTOR_STEPS; ++i)
            state[n][0] *= f.x, state[n][1] *= f.y, state[n][2] *= f.x, state[n][3] *= f.y;
    }
}

// ---- what backwards share --------------------------------------------------------------------------------------

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

// A sum that loses two tokens a lane, of four lanes side by side: what is left of it in front of this lane's pair. Behind
// all four it is `left`.
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
                         ::"l"(row + channel), "r"(pack_as<T>(x[0], x[1])), "r"(pack_as<T>(x[2], x[3])) : "memory");
        else
            asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                         ::"l"(row + channel), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
    }
}

// The decays of a chunk, a thread's share of COLUMNS channels from `first` on, four neighbouring ones at a time, as they
// come from memory.
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
    template <typename T, int PITCH>
    __device__ void write_slopes(T* target, unsigned stride, const float (*grad)[PITCH], int steps, int first = 0) const {
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
