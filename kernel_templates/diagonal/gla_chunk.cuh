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
#include "chunk_rows.cuh"
#include "halves.cuh"

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
    if constexpr (HAS_DECAY) {
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
            const float2 total = totals[s][index];
            if (s < segment) before.x += total.x, before.y += total.y;
            if (s < SEGMENTS / 2) frame.middle.x += total.x, frame.middle.y += total.y;
            frame.end.x += total.x, frame.end.y += total.y;
        }
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
template <typename Bias = NoBias>
__device__ inline void sum_decays(RateSums& sums, float2 (&totals)[SEGMENTS][PAIRS], const RawDecays& raw, int steps,
                                  Bias bias = {}) {
    if constexpr (HAS_DECAY) sum_rates(sums, totals, raw, steps, 0, bias);
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
            if (BONUS) add_own_terms(sum, reduced, 16 * p);
        }
        store_block(tile_of(target), 16 * p, 16 * q, to_fragment(sum[0], sum[1]));
    }
}

// A thread's rows of a chunk by halves, and a warp's blocks of P.
struct LevelPairs {
    BlockDecays decays;
    TokenRows q, k;
    // A warp has blocks on the diagonal, and sums their pairs up over the levels. Where there are warps enough a block
    // has two: one for pairs within four tokens, which are two levels, and one for the others.
    static constexpr int PARTS = WARPS >= 2 * BLOCKS ? 2 : 1;
    static constexpr int SHARE = ceil_div(PARTS * BLOCKS, WARPS);
    Accumulator sums[SHARE][2] = {};
    __device__ static int block(int i) { return (warp_id() + i * WARPS) / PARTS; }
    __device__ static int part(int i) { return (warp_id() + i * WARPS) % PARTS; }

    static constexpr bool HAS_ALL = SEGMENTS * PAIRS == NUM_THREADS;  // threads
    __device__ static bool has_tokens() { return HAS_ALL || threadIdx.x / PAIRS < SEGMENTS; }
    __device__ static void write(KeyTile& tile, int i, float2 x) {
        *word_of(tile, threadIdx.x / PAIRS * SEGMENT_LEN + i, threadIdx.x % PAIRS) = pack(x.x, x.y);
    }
    // The rows of all levels, each in a tile of its own or in two tiles by turns. Then they are written while slower
    // warps may read those of the last level, but not those before.
    template <int NUMBER = 0, int TILE_COUNT>
    __device__ void add_levels(TokenTile& target, KeyTile (&tiles)[TILE_COUNT],
                               const float2 (&totals)[SEGMENTS][PAIRS]) {
        constexpr int LEVEL = 1 << NUMBER;
        constexpr bool TAKES_TURNS = TILE_COUNT < LEVELS;
        if (NUMBER == 0 && !TAKES_TURNS) __syncthreads();  // the totals are there
        KeyTile& tile = tiles[NUMBER % TILE_COUNT];
        if (has_tokens())
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i) write(tile, i, is_later_token<LEVEL>(i) ? q[i] : k[i]);
        if (TAKES_TURNS) __syncthreads();  // the rows are there
        if (has_tokens()) double_blocks<LEVEL>(q, k, decays, totals), double_blocks<LEVEL>(decays);
        if constexpr (TAKES_TURNS) multiply<NUMBER>(target, tile);
        if constexpr (NUMBER + 1 < LEVELS) add_levels<NUMBER + 1>(target, tiles, totals);
        if constexpr (NUMBER == 0 && !TAKES_TURNS) {
            __syncthreads();  // the rows are there
            multiply_all(target, tiles);
        }
    }
    template <int NUMBER = 0, int TILE_COUNT>
    __device__ void multiply_all(TokenTile& target, const KeyTile (&tiles)[TILE_COUNT]) {
        multiply<NUMBER>(target, tiles[NUMBER]);
        if constexpr (NUMBER + 1 < LEVELS) multiply_all<NUMBER + 1>(target, tiles);
    }
    template <int NUMBER> __device__ void multiply(TokenTile& target, const KeyTile& tile) {
        constexpr int LEVEL = 1 << NUMBER;
        const auto rows = tile_of(tile);
        if constexpr (LEVEL < 16) {
#pragma unroll
            for (int i = 0; i < SHARE; ++i)
                if (block(i) < BLOCKS && (PARTS == 1 || part(i) == NUMBER / 2))
                    add_pairs(sums[i], rows, rows, block(i),
                              [](int row, int column) { return is_of_level(row, column, LEVEL); });
        } else {  // blocks below the diagonal, which are of one level as a whole
            constexpr int LENGTH = LEVEL / 16, SQUARE = LENGTH * LENGTH;
            for (int task = WARPS - 1 - warp_id(); task < BLOCKS / 2 * LENGTH; task += WARPS) {
                const int corner = task / SQUARE * 2 * LENGTH;
                const int p = corner + LENGTH + task % SQUARE / LENGTH, column = corner + task % LENGTH;
                store_block(tile_of(target), 16 * p, 16 * column, pair_block(rows, rows, p, column));
            }
        }
    }
};

// P by halves, for decays that leave the range of Q and K. `levels` are tiles for the rows of levels, and the first two
// are those of Q and K, which come last: with e^(e_t) and e^(D - c_t), both at most 1, for the state as it is at the
// chunk's start and at its end. Returns e^D for the thread's pair of channels. `bonus` are its pair of scale u, or
// without the bonus of the scale; `kept` takes the tokens' decays. All threads have to come, and a barrier has to
// follow.
template <bool KEEPS_DECAYS, int PITCH, int TILE_COUNT, typename Bias = NoBias>
__device__ inline float2 write_pairs_by_halves(TokenTile& target, KeyTile (&levels)[TILE_COUNT], const RawPair& raw,
                                               const RawDecays& decays, int steps, float2 (&totals)[SEGMENTS][PAIRS],
                                               float scale, float2 bonus, float (&reduced)[PAIRS / 16][CHUNK_LEN],
                                               float (*kept)[PITCH], Bias bias = {}) {
    LevelPairs pairs;
    begin_blocks<KEEPS_DECAYS>(pairs.decays, totals, decays, steps, kept, 0, bias);
    if (LevelPairs::has_tokens()) {
        float own_terms[SEGMENT_LEN];  // of a token with itself, which does not decay
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const int token = threadIdx.x / PAIRS * SEGMENT_LEN + i, channel = threadIdx.x % PAIRS * 2;
            const float2 q = unpack(*reinterpret_cast<const unsigned*>(&raw.q[token][channel]));
            const float2 k = unpack(*reinterpret_cast<const unsigned*>(&raw.k[token][channel]));
            const float2 decay = BONUS ? float2{1.0f, 1.0f} : pairs.decays.at[i];
            own_terms[i] = q.x * k.x * bonus.x + q.y * k.y * bonus.y;
            pairs.q[i] = {q.x * scale * decay.x, q.y * scale * decay.y}, pairs.k[i] = k;
        }
        write_own_terms(reduced, own_terms);
    }
    pairs.add_levels(target, levels, totals);
#pragma unroll
    for (int i = 0; i < LevelPairs::SHARE; ++i) {
        const int begin = 16 * LevelPairs::block(i), part = LevelPairs::part(i);
        if (begin >= CHUNK_LEN) break;
        Accumulator(&sum)[2] = pairs.sums[i];
        if (part == 0) add_own_terms(sum, reduced, begin);
        if constexpr (LevelPairs::PARTS == 1) {
            store_block(tile_of(target), begin, begin, to_fragment(sum[0], sum[1]));
        } else {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = group() + n % 2 * 8, column = n / 2 * 8 + 2 * quad_lane();
                const float *const two = &sum[n / 2][n % 2 * 2];
                if (((row ^ column) >= 4) == part)
                    *word_of(target, begin + row, (begin + column) / 2) = pack(two[0], two[1]);
            }
        }
    }
    __syncthreads();  // nobody reads the last level's rows any more
    if (LevelPairs::has_tokens())
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i)
            LevelPairs::write(levels[0], i, pairs.q[i]), LevelPairs::write(levels[1], i, pairs.k[i]);
    return multiply_segments<SEGMENTS>(totals, 0);
}
