// Kimi Delta Attention, 64 tokens of a head at once: what two groups of four warps make of a chunk before its state is
// there, in shared memory. Each has 64 of the channels, a warp of it 16 tokens, and a lane a pair of channels. With
// everything as in channel_decay_group_forward.cu.
//
// In a frame, where half a chunk decays by e^-LARGEST_DECAY at most in every channel: rows and columns are scaled by
// the decays from its middle m on and back to it, so that the same three tiles serve tokens and states, which are
// taken to the middle and from there to the end:
//
//     erased = K e^(c - m)    read = Q e^(c - m)    written = K e^(m - c)
//     begin, end = e^m, times e^(D - m) of the chunk before
//
// By halves (channel_decay.cuh) otherwise:  erased = K e^c    read = Q e^c    written = K e^(D - c)
//
// Norms and rates are factors of rows and columns of products.
//
// Needs what channel_decay.cuh needs, and HEAD_SIZE, VALUE_SIZE, HAS_BIAS, LARGEST_DECAY, SHARED_BYTES.
#pragma once
#include "bulk_copy.cuh"
#include "chunk.cuh"
#include "channel_decay.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(HEAD_SIZE == 128 && VALUE_SIZE == 128, "heads have 128 channels and values");
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");

constexpr int SLABS = HEAD_SIZE / TILE_COLUMNS, GROUP_THREADS = 128;
constexpr float LEAST_OF_HALF = -LOG2_E * LARGEST_DECAY;

struct Factors {
    float of_k[CHUNK_LEN];     // 1 over the norm of k
    float of_q[CHUNK_LEN];     // scale over the norm of q
    float written[CHUNK_LEN];  // the rate over the norm of k
    float diagonal[CHUNK_LEN]; // of M
    float begin[HEAD_SIZE];    // of the state before the chunk, for products
    float end[HEAD_SIZE];      // of the same for what the chunk is added to
};
// Of blocks 16 tokens apart, and of halves: rows of keys and of queries, columns.
struct CrossTiles {
    Slab<64> rows[2];     // k_1 q_1 k_3 q_3; k_2 k_3 q_2 q_3
    Slab<32> columns[2];  // k_0 k_2; k_0 k_1
};
struct TokenMatrices { Slab<CHUNK_LEN> tm, m; };
struct Solver {
    Slab<CHUNK_LEN> lower;  // -L, without the blocks on its diagonal
    Slab<BLOCK> turned[4];
    float diagonal[4][BLOCK][BLOCK + 4];  // its blocks there, a column per row
};
// In turns: there is no room for all of them.
union Work {
    LevelTile levels[2 * 4];  // of a warp
    CrossTiles cross;
    Solver solver;
};
// Sums over 64 of the channels, in turns too.
union PartialSums {
    float diagonals[SLABS][3][CHUNK_LEN];  // k . k, q . q and q . k of tokens
    float4 pairs[4][10][32];               // by warp and lane, as they are held
};

struct __align__(1024) Smem {
    Slab<CHUNK_LEN> erased[SLABS], read[SLABS], written[2][SLABS];
    TokenMatrices matrices;
    Slab<CHUNK_LEN> values[2][2];        // by chunk and group; later Y
    Slab<CHUNK_LEN> q[SLABS], k[SLABS];  // as they come
    T_W w[CHUNK_LEN][HEAD_SIZE];
    Work work;
    PartialSums sums;
    float totals[4][HEAD_SIZE];          // of blocks: sums of logarithms, or decays
    Factors factors[2];
    float finish[HEAD_SIZE];             // of the state behind the last chunk
    CopyBarrier ready, keys_free, matrices_free;
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

__device__ inline void store_element(Slab<CHUNK_LEN>& slab, int row, int column, float x) {
    reinterpret_cast<T_IO*>(word_of(slab, row, column / 2))[column % 2] = from_float<T_IO>(x);
}
// Products of tokens from `row` on with keys from `column` on, as M has them, or -L.
__device__ inline void scale_pairs(Accumulator (&pairs)[2], const Factors& factors, int row, int column,
                                   bool is_query) {
    const float* of_row = is_query ? factors.of_q : factors.of_k;
    const float rows[2] = {of_row[row + group()], of_row[row + group() + 8]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float2 written = reinterpret_cast<const float2&>(factors.written[column + 8 * n + 2 * quad_lane()]);
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[n][j] *= rows[j / 2] * (is_query ? 1.0f : j % 2 ? -written.y : -written.x);
    }
}

// Sums of a lane.
template <int COUNT> __device__ inline void add_sums(Accumulator (&sums)[COUNT], const float4 (*from)[32]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float4 more = from[i][lane_id()];
        sums[i][0] += more.x, sums[i][1] += more.y, sums[i][2] += more.z, sums[i][3] += more.w;
    }
}
template <int COUNT> __device__ inline void write_sums(float4 (*to)[32], const Accumulator (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i][lane_id()] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
}

// The groups that make chunks, one after another: a warp of them, with 16 tokens and 64 channels of each chunk.
struct Maker {
    Smem& smem;
    const int slab, p, first;  // its channels, and tokens
    int lane, channel;         // and the first one of a lane's pair
    Gate gate;
    float bias[2] = {};
    // Of the chunk to be made.
    int chunk, steps;

    __device__ Maker(Smem& smem, int slab, const Gate& gate, const float* dt_bias)
        : smem(smem), slab(slab), p(warp_id() % 4), first(BLOCK * p), lane(lane_id()),
          channel(slab * TILE_COLUMNS + 2 * lane), gate(gate) {
        if constexpr (HAS_BIAS) bias[0] = dt_bias[channel], bias[1] = dt_bias[channel + 1];
    }
    // Has the compiler find addresses anew: kept from stage to stage they would not fit into the registers.
    __device__ void forget_addresses() {
        asm volatile("" : "+r"(lane));
        channel = slab * TILE_COLUMNS + 2 * lane;
    }
    __device__ static void synchronize() { synchronize_threads(1, 2 * GROUP_THREADS); }
    __device__ static void synchronize_group() { synchronize_threads(2, GROUP_THREADS); }  // the first one
    // Until the last chunk's rows, or its token matrices, are read.
    __device__ void wait_for_keys() const {
        if (chunk > 0) wait_for(smem.keys_free, (chunk - 1) % 2);
    }
    __device__ void wait_for_matrices() const {
        if (chunk > 0) wait_for(smem.matrices_free, (chunk - 1) % 2);
    }
    // Those of token first + t.
    __device__ float2 gates(int t) const {
        const Words<T_W, 2> g = *reinterpret_cast<const Words<T_W, 2>*>(&smem.w[first + t][channel]);
        return {g.at(0), g.at(1)};
    }
    __device__ float2 query(int t) const { return unpack(*word_of(smem.q[slab], first, t, lane)); }
    __device__ float2 key(int t) const { return unpack(*word_of(smem.k[slab], first, t, lane)); }

    // Rows and columns, as words of tiles: of token first + t times a factor for each channel.
    __device__ unsigned scaled_key(int t, float x, float y) const {
        const float2 k = key(t);
        return pack(k.x * x, k.y * y);
    }
    __device__ unsigned scaled_query(int t, float x, float y) const {
        const float2 q = query(t);
        return pack(q.x * x, q.y * y);
    }

    // The dots of rows over the group's channels; those over all are known after the next barrier.
    __device__ void multiply_rows() const {
        DiagonalSums sums = {};
        sums.add(tile_of(smem.k[slab]), tile_of(smem.q[slab]), first);
        if (!has_diagonal()) return;
        auto& to = smem.sums.diagonals[slab];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first + group() + 8 * i;
            to[0][token] = sums.keys[i], to[2][token] = sums.both[i];
            if constexpr (HAS_NORM) to[1][token] = sums.queries[i];
        }
    }
    __device__ void write_factors(Factors& factors, float beta, float scale) const {
        if (slab > 0 || lane >= BLOCK) return;
        const int token = first + lane;
        float sums[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if (!HAS_NORM && i == 1) continue;
            sums[i] = smem.sums.diagonals[0][i][token] + smem.sums.diagonals[1][i][token];
        }
        const float of_k = HAS_NORM ? norm_factor(sums[0]) : 1.0f;
        const float of_q = scale * (HAS_NORM ? norm_factor(sums[1]) : 1.0f);
        const float written = token < steps ? rate_of(beta) * of_k : 0.0f;
        factors.of_k[token] = of_k, factors.of_q[token] = of_q, factors.written[token] = written;
        factors.diagonal[token] = sums[2] * of_q;
    }
    // What the state is multiplied by for the chunk's products, then for what these add, and behind it; by one warp.
    __device__ void write_decays(Factors& factors, float2 begin, float2 end, float2 finish) {
        if (p > 0) return;
        float2& open = reinterpret_cast<float2&>(smem.finish[channel]);
        const float2 before = chunk > 0 ? open : float2{1.0f, 1.0f};
        const float2 first = {before.x * begin.x, before.y * begin.y};
        reinterpret_cast<float2&>(factors.begin[channel]) = first;
        reinterpret_cast<float2&>(factors.end[channel]) = {first.x * end.x, first.y * end.y};
        open = finish;
    }

    // The sums of log-decays from a block's first token on, base 2.
    __device__ void sum_decays(float (&sums)[BLOCK][2]) const {
        float sum[2] = {};
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float2 g = gates(t);
            sums[t][0] = sum[0] += gate.logarithm(g.x, bias[0]);
            sums[t][1] = sum[1] += gate.logarithm(g.y, bias[1]);
        }
        if (first + BLOCK <= steps) return;
        float last[2] = {};  // what is past the last token does not decay
#pragma unroll
        for (int t = 0; t < BLOCK; ++t)
#pragma unroll
            for (int j = 0; j < 2; ++j) last[j] = sums[t][j] = first + t < steps ? sums[t][j] : last[j];
    }

    // Makes the chunk, if no half of it leaves the frame; says whether that is so, to all warps the same.
    template <typename Copy> __device__ bool make_in_frame(Factors& factors, float beta, float scale, Copy copy_next) {
        float sums[BLOCK][2];
        sum_decays(sums);
        reinterpret_cast<float2&>(smem.totals[p][channel]) = {sums[BLOCK - 1][0], sums[BLOCK - 1][1]};
        synchronize();  // the sums over all blocks are there
        write_factors(factors, beta, scale);
        float2 halves[2], from_middle;  // the second of a token before the block's first one
        bool fits = true;
#pragma unroll
        for (int other = 0; other < SLABS; ++other) {  // the other group's channels, then those of the warp
            const int own = slab ^ 1 ^ other;
            float2 whole[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                whole[i] = reinterpret_cast<const float2&>(smem.totals[i][own * TILE_COLUMNS + 2 * lane]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                halves[i] = {whole[2 * i].x + whole[2 * i + 1].x, whole[2 * i].y + whole[2 * i + 1].y};
                fits = fits && halves[i].x >= LEAST_OF_HALF && halves[i].y >= LEAST_OF_HALF;
            }
            const float2 before = p == 0 ? halves[0] : p == 1 ? whole[1] : whole[2];
            const float sign = p < 2 ? -1.0f : p == 2 ? 0.0f : 1.0f;
            from_middle = {sign * before.x, sign * before.y};
        }
        if (!__all_sync(0xffffffffu, fits)) return false;
        wait_for_keys();
        auto& written = smem.written[chunk % 2];
        forget_addresses();
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float x[2] = {from_middle.x + sums[t][0], from_middle.y + sums[t][1]};
            const float2 down = {exp2_fast(x[0]), exp2_fast(x[1])}, up = {exp2_fast(-x[0]), exp2_fast(-x[1])};
            *word_of(smem.erased[slab], first, t, lane) = scaled_key(t, down.x, down.y);
            *word_of(smem.read[slab], first, t, lane) = scaled_query(t, down.x, down.y);
            *word_of(written[slab], first, t, lane) = scaled_key(t, up.x, up.y);
        }
        write_decays(factors, {exp2_fast(halves[0].x), exp2_fast(halves[0].y)}, {1.0f, 1.0f},
                     {exp2_fast(halves[1].x), exp2_fast(halves[1].y)});
        publish_writes();
        synchronize();  // rows, columns and factors are there
        copy_next();
        // The first group multiplies keys, the second queries.
        Accumulator sum[CHUNK_LEN / 8];
        const unsigned left = shared_address(&(slab == 0 ? smem.erased : smem.read)[0].units[0][0]);
        begin_products();
#pragma unroll
        for (int c = 0; c < HEAD_SIZE; c += 16)
            multiply_group<64, Read::rows, Read::rows>(
                c == 0, sum, descriptor(SlabsTile<sizeof(Slab<CHUNK_LEN>)>{left}, 0, c),
                descriptor(tile_of(written[c / TILE_COLUMNS]), 0, c % TILE_COLUMNS));
        end_batch();
        wait_for_batches<0>();
        hold(sum);
        wait_for_matrices();
        if (slab == 0) write_row(factors, sum, false);  // a branch each, as what is written differs
        else write_row(factors, sum, true);
        return true;
    }
    // What the warp's queries, or its keys, are times all keys: a row of blocks of M, or of -L.
    __device__ void write_row(const Factors& factors, const Accumulator (&sum)[CHUNK_LEN / 8], bool is_query) const {
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            if (q > p) continue;
            Accumulator pairs[2];
#pragma unroll
            for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = sum[2 * q + i / 4][i % 4];
            scale_pairs(pairs, factors, first, 16 * q, is_query);
            if (q == p)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
                    float& pair = pairs[i / 4][i % 4];
                    if (is_query) pair = column < row ? pair : column == row ? factors.diagonal[first + row] : 0.0f;
                    else smem.work.solver.diagonal[p][column][row] = pair;
                }
            if (is_query || q < p)
                store_block(tile_of(is_query ? smem.matrices.m : smem.work.solver.lower), first, 16 * q,
                            to_fragment(pairs[0], pairs[1]));
        }
    }

    // Takes a level of N tokens, and makes blocks of twice as many of it.
    template <int N> __device__ void take_level(Accumulator& sum, BlockDecays& decays) {
        forget_addresses();
        LevelTile& tile = smem.work.levels[4 * slab + p];
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) {
            const int lower = lower_token<N>(i), upper = lower + N;
            const float(&of_row)[2] = decays.from_start[upper], (&of_column)[2] = decays.to_end[lower];
            *word_of(tile.left, i, lane) = scaled_key(upper, of_row[0], of_row[1]);
            *word_of(tile.left, 8 + i, lane) = scaled_query(upper, of_row[0], of_row[1]);
            *word_of(tile.right, i, lane) = scaled_key(lower, of_column[0], of_column[1]);
        }
        __syncwarp();
        multiply_level(sum, tile);
        __syncwarp();
        decays.grow<N>();
    }
    // Makes the chunk by halves.
    template <typename Copy> __device__ void make_by_halves(Factors& factors, Copy copy_next) {
        Accumulator of_level[4] = {};
        BlockDecays decays;
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float2 g = gates(t);
            const bool is_there = first + t < steps;  // what is past the last token does not decay
            decays.from_start[t][0] = is_there ? gate.decay(g.x, bias[0]) : 1.0f;
            decays.from_start[t][1] = is_there ? gate.decay(g.y, bias[1]) : 1.0f;
            decays.to_end[t][0] = decays.to_end[t][1] = 1.0f;
        }
        take_level<1>(of_level[0], decays), take_level<2>(of_level[1], decays);
        take_level<4>(of_level[2], decays), take_level<8>(of_level[3], decays);
        synchronize();  // nobody reads the sums of logarithms or the tiles of levels any more
        const float(&all)[2] = decays.from_start[BLOCK - 1];
        reinterpret_cast<float2&>(smem.totals[p][channel]) = {all[0], all[1]};
        wait_for_keys();
        synchronize();  // the decays over all blocks are there

        float2 whole[4], before = {1.0f, 1.0f}, after = {1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            whole[i] = reinterpret_cast<const float2&>(smem.totals[i][channel]);
            if (i < p) before.x *= whole[i].x, before.y *= whole[i].y;
            if (i > p) after.x *= whole[i].x, after.y *= whole[i].y;
        }
        write_decays(factors, {1.0f, 1.0f}, {whole[0].x * after.x, whole[0].y * after.y}, {1.0f, 1.0f});
        forget_addresses();
        const float2 between = p == 0 ? whole[1] : p == 3 ? whole[2] : float2{1.0f, 1.0f};
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float(&start)[2] = decays.from_start[t], (&end)[2] = decays.to_end[t];
            *word_of(smem.erased[slab], first, t, lane) = scaled_key(t, start[0] * before.x, start[1] * before.y);
            *word_of(smem.read[slab], first, t, lane) = scaled_query(t, start[0] * before.x, start[1] * before.y);
            *word_of(smem.written[chunk % 2][slab], first, t, lane) =
                scaled_key(t, end[0] * after.x, end[1] * after.y);
        }
        // The groups take turns, as there is no room for the tiles of both. Each has code of its own, so that decays
        // and sums are not in registers at once.
        Accumulator of_cross[6] = {};  // of blocks and of halves
        if (slab > 0) {
            synchronize(), synchronize();  // the first group's tiles are there, and read
            take_cross(of_cross, decays, between, copy_next);
            write_sums(&smem.sums.pairs[p][0], of_level), write_sums(&smem.sums.pairs[p][4], of_cross);
            synchronize();  // the sums are there
            return;
        }
        take_cross(of_cross, decays, between, copy_next);
        // Its own tiles are read, those of the second group are there, and so are that group's sums.
        synchronize(), synchronize(), synchronize();
        add_sums(of_level, &smem.sums.pairs[p][0]), add_sums(of_cross, &smem.sums.pairs[p][4]);
        wait_for_matrices();
        write_pairs(factors, of_level, of_cross);
    }
    template <typename Copy>
    __device__ void take_cross(Accumulator (&sums)[6], const BlockDecays& decays, float2 between, Copy copy_next) {
        CrossTiles& cross = smem.work.cross;
        forget_addresses();
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float(&start)[2] = decays.from_start[t], (&end)[2] = decays.to_end[t];
            if (p % 2 == 1) {
                *word_of(cross.rows[0], p / 2 * 32, t, lane) = scaled_key(t, start[0], start[1]);
                *word_of(cross.rows[0], p / 2 * 32 + 16, t, lane) = scaled_query(t, start[0], start[1]);
            } else {
                *word_of(cross.columns[0], p / 2 * 16, t, lane) = scaled_key(t, end[0], end[1]);
            }
            if (p >= 2) {
                const float factors[2] = {start[0] * between.x, start[1] * between.y};
                *word_of(cross.rows[1], first - 32, t, lane) = scaled_key(t, factors[0], factors[1]);
                *word_of(cross.rows[1], first, t, lane) = scaled_query(t, factors[0], factors[1]);
            } else {
                *word_of(cross.columns[1], first, t, lane) = scaled_key(t, end[0] * between.x, end[1] * between.y);
            }
        }
        synchronize();  // rows and columns of blocks and halves are there
        copy_next();
        const auto rows_of_blocks = tile_of(cross.rows[0]), rows_of_halves = tile_of(cross.rows[1]);
        const auto of_columns = tile_of(cross.columns[0]), of_half = tile_of(cross.columns[1]);
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS; c += 16) {
            multiply_add(&sums[0], load_left(rows_of_blocks, 16 * p, c),
                         load_right_transposed(of_columns, p / 2 * 16, c));
            const Fragment left = load_left(rows_of_halves, 16 * p, c);
            multiply_add(&sums[2], left, load_right_transposed(of_half, 0, c));
            multiply_add(&sums[4], left, load_right_transposed(of_half, 16, c));
        }
    }
    // -L and M, of what has been taken by halves.
    __device__ void write_pairs(const Factors& factors, const Accumulator (&of_level)[4],
                                const Accumulator (&of_cross)[6]) const {
        const auto m = tile_of(smem.matrices.m);
        const auto lower = tile_of(smem.work.solver.lower);
        if (lane < BLOCK) {
            const int token = first + lane;
            store_element(smem.matrices.m, token, token, factors.diagonal[token]);
        }
#pragma unroll
        for (int level = 0; level < 4; ++level) {
            const int n = 1 << level, block = group() >> level, row = (block << (level + 1)) + n + group() % n;
            const float of_k = -factors.of_k[first + row], of_q = factors.of_q[first + row];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int i = 2 * quad_lane() + j, column = (i >> level << (level + 1)) + i % n;
                const float of_column = factors.written[first + column];
                if (i >> level == block) {
                    smem.work.solver.diagonal[p][column][row] = of_level[level][j] * of_k * of_column;
                    store_element(smem.matrices.m, first + row, first + column,
                                  of_level[level][2 + j] * of_q);
                }
            }
        }
        const auto write = [&](const Accumulator& left, const Accumulator& right, int row, int column, bool is_query) {
            Accumulator pairs[2];
#pragma unroll
            for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = (i < 4 ? left : right)[i % 4];
            scale_pairs(pairs, factors, row, column, is_query);
            store_block(is_query ? m : lower, row, column, to_fragment(pairs[0], pairs[1]));
        };
        write(of_cross[0], of_cross[1], 32 * (p / 2) + 16, 32 * (p / 2), p % 2);
        write(of_cross[2], of_cross[3], 32 + 16 * (p % 2), 0, p >= 2);
        write(of_cross[4], of_cross[5], 32 + 16 * (p % 2), 16, p >= 2);
        __syncwarp();
    }

    // Tm, block by block. Of two blocks the one below them is Tm_11 (-L)_10 Tm_00.
    __device__ void solve() const {
        const auto tm = tile_of(smem.matrices.tm), lower = tile_of(smem.work.solver.lower);
        Slab<BLOCK>& turned = smem.work.solver.turned[p];
        solve_block(smem.work.solver.diagonal[p], turned);
        store_block_transposed(tm, first, first, load_left(tile_of(turned), 0, 0));
        synchronize_group();  // -L and the blocks on the diagonal are there
        if (p < 2) {
            const int top = 32 * p, bottom = top + 16;
            Accumulator carried[2] = {}, sum[2] = {};
            multiply_add(carried, load_left_transposed(tm, top, top), load_right_transposed(lower, bottom, top));
            multiply_add(sum, load_left(tm, bottom, bottom), transposed(to_fragment(carried[0], carried[1])));
            store_block(tm, bottom, top, to_fragment(sum[0], sum[1]));
        }
        synchronize_group();
        if (p < 2) {
            Right carried[2];  // rows 32 and 48 of -L Tm, of this warp's columns
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Accumulator sum[2] = {};
#pragma unroll
                for (int q = 0; q < 2; ++q)  // above the diagonal there are zeros
                    multiply_add(sum, load_left_transposed(tm, 16 * q, 16 * p),
                                 load_right_transposed(lower, 32 + 16 * i, 16 * q));
                carried[i] = transposed(to_fragment(sum[0], sum[1]));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Accumulator sum[2] = {};
#pragma unroll
                for (int q = 0; q <= i; ++q) multiply_add(sum, load_left(tm, 32 + 16 * i, 32 + 16 * q), carried[q]);
                store_block(tm, 32 + 16 * i, 16 * p, to_fragment(sum[0], sum[1]));
            }
        }
    }
};
