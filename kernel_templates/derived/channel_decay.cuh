// Kimi Delta Attention, 64 tokens of a head at once: log-decays, and what the tokens of a block of 16 are to each
// other. With everything as in channel_decay_group_forward.cu.
//
// Needs T_IO, T_W, GATE, HAS_NORM, BETA_MAP, HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, DECAY.
#pragma once
#include "gate_maps.cuh"
#include "wgmma.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(HEAD_SIZE == 128 && VALUE_SIZE == 128, "heads have 128 channels and values");
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");

constexpr int GROUP_THREADS = 128;
// A state, [value, channel], as gradients of keys read it.
struct StateTiles { Slab<64> at[VALUE_SIZE / TILE_COLUMNS][HEAD_SIZE / TILE_COLUMNS]; };

__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The decays of tokens, from g as it comes: the log-decay, or what makes it with a head's speed, exp(a_log).
enum class LogDecay { given, softplus, bounded };
constexpr LogDecay LOG_DECAY = LogDecay(GATE);

// What is no number stays none.
__device__ inline float smaller(float x, float y) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}
// The logarithm of a decay, base 2, is -`speed` times what a token has of it.
struct Gate {
    float inner = LOG2_E, speed = LOG2_E;

    __device__ Gate(float a_log, float lower_bound) {
        // So far a bounded one is times g and the bias apart.
        if constexpr (LOG_DECAY == LogDecay::softplus) speed = speed_from(a_log);
        if constexpr (LOG_DECAY == LogDecay::bounded)
            inner = -LOG2_E * speed_from(a_log, 64.0f), speed = -LOG2_E * lower_bound;
    }
    __device__ float share(float g, float bias) const {
        if constexpr (LOG_DECAY == LogDecay::given) return -g;
        const float x = exp2_fast(inner * g + inner * bias);
        if constexpr (LOG_DECAY == LogDecay::bounded) return reciprocal(1.0f + x);
        // Beside 1 a small x would lose its digits, and many such tokens forget something.
        return x < 1e-3f ? LOG2_E * (x - 0.5f * x * x) : log2_fast(1.0f + x);
    }
    __device__ float logarithm(float g, float bias) const { return -speed * share(g, bias); }
};

// A head's, where there is one.
__device__ inline float speed_of(const float* a_log, i64 head) {
    return LOG_DECAY == LogDecay::given ? 0.0f : load_early<float>(a_log + head);
}

constexpr int BLOCK = 16;  // tokens of a warp

// A pair of columns of row `first` + t, where `first` is a multiple of 8: the compiler need not find that out.
template <int ROWS> __device__ inline unsigned* word_of(Slab<ROWS>& slab, int first, int t, int pair) {
    return reinterpret_cast<unsigned*>(&slab.units[first + t][pair / 4 ^ t % 8]) + pair % 4;
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
// to a block on the diagonal of a tile, whose rows are columns.
template <int ROWS>
__device__ inline void solve_block(const float (&lower)[BLOCK][BLOCK + 4], Slab<ROWS>& turned, int first) {
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
            turned.units[first + column][(first + i) / 8 ^ column % 8] = {
                pack(x[i], x[i + 1]), pack(x[i + 2], x[i + 3]), pack(x[i + 4], x[i + 5]), pack(x[i + 6], x[i + 7])};
    __syncwarp();
}
