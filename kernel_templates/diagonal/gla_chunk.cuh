// One chunk of gated linear attention in the centred frame: what its forward and its backward begin with.
//
// With c_t, m and D as in chunk_decay.cuh and e_t = c_t where y sees the current token (GLA, linear attention), c_(t-1)
// where it sees only those before and a bonus u of its own (wkv5, wkv6),
//
//     Q = scale q e^(e_t - m)    K = k e^(m - c_t)    S' = S_0 diag(e^m)    P = tril(Q K^T) (strictly, with the bonus)
//
// and on P's diagonal, with the bonus, scale sum_j u_j q_tj k_tj.
//
// Needs BONUS, T_U beside what chunk_decay.cuh needs.
#pragma once
#include "chunk.cuh"

constexpr int DECAY_CHANNELS = CHANNELS, DECAY_PARTS = 1;
constexpr bool DECAYS_COME_IN_PARTS = false;
#include "chunk_decay.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(CHUNK_LEN == 16 || CHUNK_LEN == 32 || CHUNK_LEN == 64, "chunk_len must be 16, 32 or 64");
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS >= 64 && NUM_THREADS <= 512,
              "num_threads must be a multiple of 32 from 64 to 512");

struct PairOperands { KeyTile q, k; };
struct RawPair { T_IO q[CHUNK_LEN][CHANNELS], k[CHUNK_LEN][CHANNELS]; };

// Q and K, after a barrier behind `sum_rates`; `growth` takes e^(c_t - m) in rows 1 .. CHUNK_LEN and e^(-m) in row 0.
// `bonus` are the thread's pair of channels of scale u; their share of the diagonal goes to `bonus_terms`.
template <bool KEEPS_GROWTH, int GROWTH_PITCH>
__device__ inline Frame write_pair(const RateSums& sums, const float2 (&totals)[SEGMENTS][PAIRS], const RawPair& raw,
                                   PairOperands& operands, float scale, float2 bonus, float (&bonus_terms)[SEGMENT_LEN],
                                   float (*growth)[GROWTH_PITCH]) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
    Frame frame = {};  // as frame_of makes it, but in this order: with another one some kernels spill
    float2 before = {0.0f, 0.0f};
    if constexpr (HAS_DECAY)
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
    if (KEEPS_GROWTH && segment == 0) *reinterpret_cast<float2*>(&growth[0][2 * index]) = grown;
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const int token = segment * SEGMENT_LEN + i;
        const float2 q = unpack(*reinterpret_cast<const unsigned*>(&raw.q[token][2 * index]));
        const float2 k = unpack(*reinterpret_cast<const unsigned*>(&raw.k[token][2 * index]));
        float2 c = {0.0f, 0.0f};
        if constexpr (HAS_DECAY) c = {origin.x + RATE_UNIT * sums.at[i].x, origin.y + RATE_UNIT * sums.at[i].y};
        frame.farthest = fmaxf(frame.farthest, fmaxf(fabsf(c.x), fabsf(c.y)));
        const float2 now = {exp2_fast(c.x), exp2_fast(c.y)}, seen = BONUS ? grown : now;
        *word_of(operands.q, token, index) = pack(q.x * seen.x * scale, q.y * seen.y * scale);
        *word_of(operands.k, token, index) = pack(k.x * exp2_fast(-c.x), k.y * exp2_fast(-c.y));
        if (BONUS) bonus_terms[i] = q.x * k.x * bonus.x + q.y * k.y * bonus.y;
        grown = now;
        if (KEEPS_GROWTH) *reinterpret_cast<float2*>(&growth[token + 1][2 * index]) = grown;
    }
    return frame;
}

// The rates of a chunk, where there are any.
__device__ inline void sum_decays(RateSums& sums, float2 (&totals)[SEGMENTS][PAIRS], const RawDecays& raw, int steps) {
    if constexpr (HAS_DECAY) sum_rates(sums, totals, raw, steps);
}

// Sums of x over half-warps, COUNT of them: each exchange halves what a lane keeps, until one is left; `first` is its
// place.
template <int COUNT, int WIDTH, int SIZE> __device__ inline void sum_half_warps(float (&x)[SIZE], int& first) {
    const bool upper = lane_id() & WIDTH;
    if constexpr (COUNT > 1) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float low = x[i], high = x[COUNT / 2 + i];
            x[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, WIDTH);
        }
        if (upper) first += COUNT / 2;
    } else {
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], WIDTH);
    }
    if constexpr (WIDTH > 1) sum_half_warps<(COUNT > 1 ? COUNT / 2 : 1), WIDTH / 2>(x, first);
}

// Sums over half-warps of a thread's tokens, to a row per 16 pairs of channels: `reduced[g][t]`.
__device__ inline void write_bonus_terms(float (&reduced)[PAIRS / 16][CHUNK_LEN], float (&bonus_terms)[SEGMENT_LEN]) {
    const int segment = threadIdx.x / PAIRS;
    if (segment >= SEGMENTS) return;
    int first = 0;
    sum_half_warps<SEGMENT_LEN, 8>(bonus_terms, first);
    constexpr int LEFT = SEGMENT_LEN > 16 ? SEGMENT_LEN / 16 : 1;
    constexpr int COPIES = SEGMENT_LEN < 16 ? 16 / SEGMENT_LEN : 1;  // lanes that hold the same
    if (lane_id() % COPIES == 0) {
#pragma unroll
        for (int i = 0; i < LEFT; ++i)
            reduced[threadIdx.x % PAIRS / 16][segment * SEGMENT_LEN + first + i] = bonus_terms[i];
    }
}

// Adds the bonus to the diagonal of a block of P whose rows begin at `row`.
__device__ inline void add_bonus_terms(Accumulator (&sum)[2], const float (&reduced)[PAIRS / 16][CHUNK_LEN], int row) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        if (at != column) continue;
#pragma unroll
        for (int g = 0; g < PAIRS / 16; ++g) sum[i / 4][i % 4] += reduced[g][row + at];
    }
}

// P by all warps, a block of 16 x 16 at a time.
__device__ inline void write_pairs(TokenTile& target, const PairOperands& operands,
                                   const float (&reduced)[PAIRS / 16][CHUNK_LEN]) {
    const auto q_tile = tile_of(operands.q), k_tile = tile_of(operands.k);
    constexpr int TASKS = BLOCKS * (BLOCKS + 1) / 2;
    for (int task = warp_id(); task < TASKS; task += WARPS) {
        int p = 0, q = task;  // as triangle_block finds them, which costs some kernels registers
        while (q > p) q -= ++p;
        const LeftRows rows(q_tile, p);
        Accumulator sum[2] = {};
        multiply_rows(sum, rows, k_tile, q);
        if (q == p) {
            keep_lower(sum, BONUS);
            if (BONUS) add_bonus_terms(sum, reduced, 16 * p);
        }
        store_block(tile_of(target), 16 * p, 16 * q, to_fragment(sum[0], sum[1]));
    }
}
