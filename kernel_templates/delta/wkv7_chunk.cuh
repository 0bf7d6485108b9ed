// One chunk of RWKV-7 in the centred frame: what its forward and its backward begin with.
//
// Rows are the CHUNK_LEN tokens of the chunk; c_t, m and D as in chunk_decay.cuh. Scaled by how far a token is from the
// middle,
//
//     R = scale r e^(c_t - m)    A = a e^(c_(t-1) - m)    K = k e^(m - c_t)    B = b e^(m - c_t)    S' = S_0 diag(e^m)
//
// the chunk is a handful of matrix products in which no decay appears any more:
//
//     Aab = tril(A B^T, -1)   Aak = tril(A K^T, -1)   Arb = tril(R B^T)   Ark = tril(R K^T)   Tm = (I - Aab)^-1
//
// Operands have the type of r, k, v, a and b, sums fp32.
#pragma once
#include "chunk.cuh"

constexpr int DECAY_CHANNELS = CHANNELS, DECAY_PARTS = 1;
constexpr bool DECAYS_COME_IN_PARTS = false;
#include "chunk_decay.cuh"
#include "chunk_rows.cuh"
#include "halves.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(CHUNK_LEN == 16 || CHUNK_LEN == 32, "chunk_len must be 16 or 32");
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS >= 64 && NUM_THREADS <= 512,
              "num_threads must be a multiple of 32 from 64 to 512");

struct Operands {
    KeyTile r, a, k, b;  // R A K B
};
// Of a level by halves: the rows of R and K, and those of A and B.
struct LevelTiles { KeyTile r, a; };

// The raw rows of the next chunk.
struct RawKeys {
    T_IO r[CHUNK_LEN][CHANNELS], a[CHUNK_LEN][CHANNELS], k[CHUNK_LEN][CHANNELS], b[CHUNK_LEN][CHANNELS];
};

// Second half, after a barrier: the operands. `growth` takes e^(c_t - m) in rows 1 .. CHUNK_LEN and e^(-m) in row 0.
template <bool KEEPS_GROWTH, int GROWTH_PITCH, typename Operands>
__device__ inline Frame write_operands(const RateSums& sums, const float2 (&totals)[SEGMENTS][PAIRS],
                                       const RawKeys& raw, Operands& operands, float scale,
                                       float (*growth)[GROWTH_PITCH]) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
    Frame frame = frame_of(totals);
    const float2 origin = frame.origin;
    if (segment >= SEGMENTS) return frame;
    float2 grown = {exp2_fast(origin.x), exp2_fast(origin.y)};  // of the token before
    if (KEEPS_GROWTH && segment == 0) *reinterpret_cast<float2*>(&growth[0][2 * index]) = grown;
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
            const auto scaled = [](unsigned word, float2 factor) {
                const float2 x = unpack(word);
                return pack(x.x * factor.x, x.y * factor.y);
            };
            *word_of(operands.a, token, index) = scaled(words[i][1], grown);
            *word_of(operands.k, token, index) = scaled(words[i][2], shrink);
            *word_of(operands.b, token, index) = scaled(words[i][3], shrink);
            grown = {exp2_fast(c.x), exp2_fast(c.y)};
            *word_of(operands.r, token, index) = scaled(words[i][0], {grown.x * scale, grown.y * scale});
            if (KEEPS_GROWTH) *reinterpret_cast<float2*>(&growth[token + 1][2 * index]) = grown;
        }
    }
    return frame;
}

struct TokenMatrices {
    union {
        TokenTile tm;                    // Tm, once the substitution has read
        float lower[BLOCKS][16][20];     // the diagonal blocks of Aab, a column of a block per row
    };
    TokenTile ak, rb, rk;                // Aak Arb Ark
};

struct TokenTiles { Tile<TOKEN_PITCH> tm, ak, rb, rk; };
__device__ inline TokenTiles tiles_of(const TokenMatrices& matrices) {
    return {tile_of(matrices.tm), tile_of(matrices.ak), tile_of(matrices.rb), tile_of(matrices.rk)};
}

// Where `solve_lower` reads a diagonal block of Aab from.
__device__ inline void write_lower(TokenMatrices& matrices, int p, Accumulator (&sum)[2]) {
    keep_lower(sum, 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
        matrices.lower[p][column][row] = sum[i / 4][i % 4];
    }
}

// Tm = (I - Aab)^-1 by one warp: the diagonal blocks by substitution in fp32, half a warp each and a lane per
// column, since products of narrow powers lose everything where keys repeat. Of two blocks the one below them is
// Tm_10 = Tm_11 Aab_10 Tm_00, rounded, from `below`, which is Aab_10.
__device__ inline void solve_lower(TokenMatrices& matrices, const Fragment& below) {
    const auto tm = tile_of(matrices.tm);
    const int block = lane_id() / 16, column = lane_id() % 16;
    float x[16];  // of Tm - I = Aab Tm
    const auto read_column = [&](int i, int row) {
        return *reinterpret_cast<const float4*>(&matrices.lower[block][i][row]);
    };
    if (block < BLOCKS) {
#pragma unroll
        for (int row = 0; row < 16; row += 4) {
            const float4 four = read_column(column, row);
            x[row] = four.x, x[row + 1] = four.y, x[row + 2] = four.z, x[row + 3] = four.w;
        }
#pragma unroll
        for (int i = 1; i < 15; ++i)
#pragma unroll
            for (int row = (i + 1) / 4 * 4; row < 16; row += 4) {
                const float4 four = read_column(i, row);
                const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (row + j > i) x[row + j] += factors[j] * x[i];
            }
    }
    __syncwarp();
    if (block < BLOCKS) {  // a lane's column as a row, for the moment
        T_IO* const row = &matrices.tm[lane_id()][16 * block];
#pragma unroll
        for (int i = 0; i < 16; i += 8)
            *reinterpret_cast<uint4*>(row + i) = {pack(x[i], x[i + 1]), pack(x[i + 2], x[i + 3]),
                                                  pack(x[i + 4], x[i + 5]), pack(x[i + 6], x[i + 7])};
        row[column] = from_float<T_IO>(1.0f);
    }
    __syncwarp();
    const Fragment first_transposed = load_left(tm, 0, 0);
    if constexpr (BLOCKS == 1) {
        __syncwarp();
        store_block_transposed(tm, 0, 0, first_transposed);
    } else {
        const Fragment second = load_left_transposed(tm, 16, 16);
        __syncwarp();
        store_block_transposed(tm, 0, 0, first_transposed);
        store_block(tm, 16, 16, second);
        Accumulator carried[2] = {}, sum[2] = {};
        multiply_add(carried, first_transposed, transposed(below));  // (Aab_10 Tm_00)^T
        multiply_add(sum, second, transposed(to_fragment(carried[0], carried[1])));
        store_block(tm, 16, 0, to_fragment(sum[0], sum[1]));
    }
}

// The same from the operands.
template <typename Operands> __device__ inline void invert(TokenMatrices& matrices, const Operands& operands) {
    const auto a = tile_of(operands.a), b = tile_of(operands.b);
    Fragment below;
#pragma unroll
    for (int p = 0; p < BLOCKS; ++p) {
        const LeftRows left(a, p);
#pragma unroll
        for (int q = 0; q <= p; ++q) {
            Accumulator sum[2] = {};
            multiply_rows(sum, left, b, q);
            if (q < p) below = to_fragment(sum[0], sum[1]);
            else write_lower(matrices, p, sum);
        }
    }
    __syncwarp();
    solve_lower(matrices, below);
}

// All four; warp 0 the inverse, the others the rest: Arb and Ark, which share their left side, or Aak, 16 rows at a
// time.
template <typename Operands>
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

// A thread's rows of a chunk by halves, and a warp's token matrices.
struct LevelMatrices {
    enum { AB, AK, RB, RK, COUNT };
    static constexpr int SHARE = ceil_div(COUNT, WARPS);  // of a warp
    BlockDecays decays;
    TokenRows r, a, k, b;
    DiagonalBlocks sums[SHARE] = {};
    Fragment below = {};  // of Aab

    static constexpr bool HAS_ALL = SEGMENTS * PAIRS == NUM_THREADS;  // threads
    __device__ static bool has_tokens() { return HAS_ALL || threadIdx.x / PAIRS < SEGMENTS; }
    __device__ static int token(int i) { return threadIdx.x / PAIRS * SEGMENT_LEN + i; }
    __device__ static float2 read(const T_IO (&rows)[CHUNK_LEN][CHANNELS], int i) {
        return unpack(*reinterpret_cast<const unsigned*>(&rows[token(i)][threadIdx.x % PAIRS * 2]));
    }
    template <typename Tile> __device__ static void write(Tile& tile, int i, float2 x) {
        *word_of(tile, token(i), threadIdx.x % PAIRS) = pack(x.x, x.y);
    }
    __device__ static TokenTile& target(TokenMatrices& matrices, int matrix) {
        return matrix == AK ? matrices.ak : matrix == RB ? matrices.rb : matrices.rk;
    }
    // What the outputs see of a token itself, which does not decay, as sums over half-warps.
    using OwnTerms = float[2][PAIRS / 16][CHUNK_LEN];
    __device__ void load(OwnTerms& own, const RawKeys& raw, float scale) {
        if (!has_tokens()) return;
        float with_b[SEGMENT_LEN], with_k[SEGMENT_LEN];
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const float2 x = read(raw.r, i), decay = decays.at[i];
            a[i] = read(raw.a, i), k[i] = read(raw.k, i), b[i] = read(raw.b, i), r[i] = {scale * x.x, scale * x.y};
            with_b[i] = r[i].x * b[i].x + r[i].y * b[i].y, with_k[i] = r[i].x * k[i].x + r[i].y * k[i].y;
            r[i] = product(r[i], decay);
        }
        write_own_terms(own[0], with_b), write_own_terms(own[1], with_k);
    }
    // The rows of all levels, each in tiles of its own or in two by turns. Then they are written while slower warps may
    // read those of the last level, but not those before.
    template <int NUMBER = 0, int TILE_COUNT>
    __device__ void add_levels(TokenMatrices& matrices, const OwnTerms& own, LevelTiles (&tiles)[TILE_COUNT],
                               const float2 (&totals)[SEGMENTS][PAIRS]) {
        constexpr int LEVEL = 1 << NUMBER;
        constexpr bool TAKES_TURNS = TILE_COUNT < LEVELS;
        if (NUMBER == 0 && !TAKES_TURNS) __syncthreads();  // the totals are there
        LevelTiles& tile = tiles[NUMBER % TILE_COUNT];
        if (has_tokens())
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i) {
                const bool later = is_later_token<LEVEL>(i);
                write(tile.r, i, later ? r[i] : k[i]), write(tile.a, i, later ? a[i] : b[i]);
            }
        if (TAKES_TURNS) __syncthreads();  // the rows are there
        if (has_tokens()) {
            double_blocks<LEVEL>(r, k, decays, totals), double_blocks<LEVEL>(a, b, decays, totals);
            double_blocks<LEVEL>(decays);
        }
        if constexpr (TAKES_TURNS) multiply<NUMBER>(matrices, own, tile);
        if constexpr (NUMBER + 1 < LEVELS) add_levels<NUMBER + 1>(matrices, own, tiles, totals);
        if constexpr (NUMBER == 0 && !TAKES_TURNS) {
            __syncthreads();  // the rows are there
            multiply_all(matrices, own, tiles);
        }
    }
    template <int NUMBER = 0, int TILE_COUNT>
    __device__ void multiply_all(TokenMatrices& matrices, const OwnTerms& own, const LevelTiles (&tiles)[TILE_COUNT]) {
        multiply<NUMBER>(matrices, own, tiles[NUMBER]);
        if constexpr (NUMBER + 1 < LEVELS) multiply_all<NUMBER + 1>(matrices, own, tiles);
    }
    template <int NUMBER>
    __device__ void multiply(TokenMatrices& matrices, const OwnTerms& own, const LevelTiles& tile) {
        constexpr int LEVEL = 1 << NUMBER;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int matrix = warp_id() + i * WARPS;
            if (matrix >= COUNT) break;
            const auto left = tile_of(matrix == AB || matrix == AK ? tile.a : tile.r);
            const auto right = tile_of(matrix == AB || matrix == RB ? tile.a : tile.r);
            if constexpr (LEVEL < 16) {
                add_level(sums[i], left, right, LEVEL);
            } else {  // the one block below the diagonal
                const Fragment whole = pair_block(left, right, 1, 0);
                if (matrix == AB) below = whole;
                else store_block(tile_of(target(matrices, matrix)), 16, 0, whole);
            }
            if (LEVEL == 1 && matrix >= RB)
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p) add_own_terms(sums[i][p], own[matrix - RB], 16 * p);
        }
    }
};

// All four by halves, for decays that leave the range of the operands. `levels` are tiles for the rows of levels, and
// the first two of them are the operands, which come last: R with e^(c_t), A with e^(c_(t-1)), and K and B with
// e^(D - c_t), all at most 1, for the state as it is at the chunk's start and at its end. A warp makes a whole matrix.
// Returns e^D for the thread's pair of channels; `kept` takes the tokens' decays. All threads have to come, and a
// barrier has to follow.
template <bool KEEPS_DECAYS, int PITCH, int TILE_COUNT, typename Bias = NoBias>
__device__ inline float2 write_matrices_by_halves(TokenMatrices& matrices, LevelTiles (&levels)[TILE_COUNT],
                                                  const RawKeys& raw, const RawDecays& decays, int steps,
                                                  float2 (&totals)[SEGMENTS][PAIRS], float scale,
                                                  float (*kept)[PITCH], Bias bias = {}) {
    using Level = LevelMatrices;
    static_assert(sizeof(Level::OwnTerms) <= sizeof(TokenTile), "own terms have the place of Tm for a while");
    auto& own = reinterpret_cast<Level::OwnTerms&>(matrices.tm);
    Level level;
    begin_blocks<KEEPS_DECAYS>(level.decays, totals, decays, steps, kept, 0, bias);
    level.load(own, raw, scale);
    level.add_levels(matrices, own, levels, totals);
    __syncthreads();  // nobody reads the last level's rows or own terms any more
    auto& operands = reinterpret_cast<Operands&>(levels);
    if (Level::has_tokens())
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            Level::write(operands.r, i, level.r[i]), Level::write(operands.a, i, level.a[i]);
            Level::write(operands.k, i, level.k[i]), Level::write(operands.b, i, level.b[i]);
        }
#pragma unroll
    for (int i = 0; i < Level::SHARE; ++i) {
        const int matrix = warp_id() + i * WARPS;
        if (matrix >= Level::COUNT) break;
#pragma unroll
        for (int p = 0; p < BLOCKS; ++p) {
            Accumulator(&sum)[2] = level.sums[i][p];
            if (matrix == Level::AB) write_lower(matrices, p, sum);
            else store_block(tile_of(Level::target(matrices, matrix)), 16 * p, 16 * p, to_fragment(sum[0], sum[1]));
        }
        if (matrix != Level::AB) continue;
        __syncwarp();
        solve_lower(matrices, level.below);
    }
    return multiply_segments<SEGMENTS>(totals, 0);
}
