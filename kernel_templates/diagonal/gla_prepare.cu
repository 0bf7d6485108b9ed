// Gated linear attention and its kin, the keys' side of all chunks at once, for kernels that walk over the chunks with
// warp groups. With the notation of gla_chunk.cuh, Q, K, P and the frame of every chunk.
//
//   q k, w, u   [batch, tokens, heads, K], [heads, K]  in; w with w0, see decay_bias.cuh
//   operands    [slots, heads, SLABS, 2] tiles  out: Q K
//   pairs       [slots, heads] tiles            out: P, zero above the diagonal
//   frames      [slots, heads, 2, CHANNELS]  fp32  out: m and D - m to the base 2; of slabs by halves twice e^D
//   halved      [slots, heads, SLABS]  out: whether the decays of a slab leave the range of its middle's frame. Then Q
//               and K are as write_pairs_by_halves of gla_chunk.cuh leaves them
//
// Grid (slots, heads), a block per chunk and head. It goes over the channels, 64 at a time. With BY_HALVES any
// number of blocks make those chunks again of which the first launch has found slabs that leave.
#include "bulk_copy.cuh"
#include "copy.cuh"
#include "decay_bias.cuh"
#include "halved.cuh"
#include "slab.cuh"
#include "slots.cuh"
#include "wgmma.cuh"

constexpr int SLABS = ceil_div(HEAD_SIZE, TILE_COLUMNS), CHANNELS = SLABS * TILE_COLUMNS;
constexpr int DECAY_CHANNELS = TILE_COLUMNS, DECAY_PARTS = SLABS;
constexpr bool DECAYS_COME_IN_PARTS = true;
#include "chunk_rows.cuh"
#include "levels.cuh"

constexpr int GROUPS = NUM_THREADS / 128, OWN_TOKENS = CHUNK_LEN / GROUPS;  // columns of P that a group makes
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");
static_assert(NUM_THREADS == 256, "num_threads must be 256");
static_assert(sizeof(T_IO) == 2, "takes float16 and bfloat16");

struct Smem {
    Slab<CHUNK_LEN> operands[2][2];  // Q and K of a slab, and of the last one
    union {
        struct { T_IO q[CHUNK_LEN][TILE_COLUMNS], k[CHUNK_LEN][TILE_COLUMNS]; } raw;
        Slab<CHUNK_LEN> pairs;
    };
    float2 totals[SEGMENTS][PAIRS];
    float own_terms[CHUNK_LEN];  // of tokens with themselves: with the bonus, or by halves
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

using Tiles = Slab<CHUNK_LEN>[2];

// A slab that leaves the range of its middle's frame, by halves (chunk_rows.cuh).
struct LevelPairs {
    Smem& smem;
    Accumulator (&sum)[OWN_TOKENS / 8];
    BlockDecays decays;
    TokenRows q, k;

    __device__ static void write(Slab<CHUNK_LEN>& tile, int i, float2 x) {
        *word_of(tile, threadIdx.x / PAIRS * SEGMENT_LEN + i, threadIdx.x % PAIRS) = pack(x.x, x.y);
    }
    // A level after another. Their rows are written while slower warps may read those of the last one, but not those
    // before.
    template <int LEVEL> __device__ void add_levels(Slab<CHUNK_LEN>& tile, Slab<CHUNK_LEN>& other) {
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) write(tile, i, is_later_token<LEVEL>(i) ? q[i] : k[i]);
        __syncthreads();  // the rows are there
        double_blocks<LEVEL>(q, k, decays, smem.totals), double_blocks<LEVEL>(decays);
        const auto rows = tile_of(tile);
        const int p = warp_id() % 4;
#pragma unroll
        for (int n = 0; n < OWN_TOKENS / 16; ++n) {
            const int column = warp_id() / 4 * (OWN_TOKENS / 16) + n;  // of blocks of 16
            if (column > p || (LEVEL < 16 ? column != p : (p ^ column) / max_of(LEVEL / 16, 1) != 1)) continue;
            Accumulator all[2] = {};
#pragma unroll
            for (int c = 0; c < TILE_COLUMNS; c += 16)
                multiply_add(all, load_left(rows, 16 * p, c), load_right_transposed(rows, 16 * column, c));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = group() + i % 4 / 2 * 8, at = i / 4 * 8 + 2 * quad_lane() + i % 2;
                if (LEVEL >= 16 || is_of_level(row, at, LEVEL)) sum[2 * n + i / 4][i % 4] += all[i / 4][i % 4];
            }
        }
        if constexpr (2 * LEVEL < CHUNK_LEN) add_levels<2 * LEVEL>(other, tile);
    }
};

// Its share of P goes to `sum`, but without the bonus that of tokens with themselves to `own_terms`; and Q and K go to
// the tiles.
__device__ inline void prepare_by_halves(Smem& smem, Tiles& tiles, const RawDecays& raw_w, const DecayBias& bias,
                                         Accumulator (&sum)[OWN_TOKENS / 8], float (&own_terms)[SEGMENT_LEN],
                                         float* frame, int first_channel, int steps, float scale) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS, channel = first_channel + 2 * index;
    LevelPairs pairs = {smem, sum};
    begin_blocks<false, TILE_COLUMNS>(pairs.decays, smem.totals, raw_w, steps, nullptr, first_channel, bias);
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const auto read = [&](const T_IO (&rows)[CHUNK_LEN][TILE_COLUMNS]) {
            const float2 x = unpack(*reinterpret_cast<const unsigned*>(&rows[segment * SEGMENT_LEN + i][2 * index]));
            return float2{has_channel(channel) ? x.x : 0.0f, has_channel(channel + 1) ? x.y : 0.0f};
        };
        const float2 x = read(smem.raw.q), y = read(smem.raw.k), q = {x.x * scale, x.y * scale};
        if (!BONUS) own_terms[i] += q.x * y.x + q.y * y.y;
        pairs.q[i] = BONUS ? q : product(q, pairs.decays.at[i]), pairs.k[i] = y;
    }
    pairs.add_levels<1>(tiles[0], tiles[1]);
    __syncthreads();  // nobody reads the last level's rows any more
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i)
        LevelPairs::write(tiles[0], i, pairs.q[i]), LevelPairs::write(tiles[1], i, pairs.k[i]);
    if (segment == 0) {
        const float2 all = multiply_segments<SEGMENTS>(smem.totals, 0);
        float2* const target = reinterpret_cast<float2*>(frame) + index;
        target[0] = target[CHANNELS / 2] = all;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_prepare(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_W* __restrict__ w, const T_U* __restrict__ u,
    const i64* __restrict__ cu_seqlens, uint4* __restrict__ operands, uint4* __restrict__ pairs,
    float* __restrict__ frames, int* __restrict__ halved, Strides q_strides, Strides k_strides, DecayStrides w_strides,
    i64 tokens, i64 heads, i64 sequences, i64 slots, float scale) {
    auto prepare = [=](i64 slot, i64 head) mutable {
        extern __shared__ __align__(1024) unsigned char shared_bytes[];
        Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
        const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
        const int steps = chunk.steps;
        if (steps == 0) return;
        const i64 token = chunk.span.begin + chunk.token;
        const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
        q += start(q_strides), k += start(k_strides);
        w += start(w_strides);
        const i64 place = slot * heads + head;
        operands += place * (SLABS * 2 * CHUNK_LEN * 8), pairs += place * (CHUNK_LEN * 8),
        frames += place * (2 * CHANNELS);

        const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
        RawDecays raw_w;
        const auto load_slab = [&](int slab) {
            const int channel = slab * TILE_COLUMNS, width = min(TILE_COLUMNS, HEAD_SIZE - channel);
            copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, TILE_COLUMNS, TILE_COLUMNS, NUM_THREADS>(
                smem.raw.q[0], q + channel, q_strides.token, steps, width, threadIdx.x);
            copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, TILE_COLUMNS, TILE_COLUMNS, NUM_THREADS>(
                smem.raw.k[0], k + channel, k_strides.token, steps, width, threadIdx.x);
            commit_copies();
            if constexpr (HAS_DECAY) raw_w.load(w, w_strides.token, steps, channel);
        };
        Accumulator sum[OWN_TOKENS / 8] = {};
        float own_terms[SEGMENT_LEN] = {};
        bool has_own_terms = BONUS;
        bool leaves_any = false;  // whether a slab has left its frame: such a chunk is flagged here and made BY_HALVES
        const int group_of_warps = warp_id() / 4;
        load_slab(0);
#pragma unroll 1
        for (int slab = 0; slab < SLABS; ++slab) {
            const int channel = slab * TILE_COLUMNS + 2 * index;
            const DecayBias bias = bias_of(w_strides, head, channel);
            RateSums sums = {};
            if constexpr (HAS_DECAY) sum_rates(sums, smem.totals, raw_w, steps, slab * TILE_COLUMNS, bias);
            wait_for_copies<0>();
            if (threadIdx.x == 0) wait_until_read();
            __syncthreads();  // the raw rows are there, and nobody reads the tiles of two slabs ago any more
            auto& tiles = smem.operands[slab % 2];
            float2 before = {0.0f, 0.0f}, middle = {0.0f, 0.0f}, end = {0.0f, 0.0f};
            if constexpr (HAS_DECAY) {
#pragma unroll
                for (int s = 0; s < SEGMENTS; ++s) {
                    const float2 total = smem.totals[s][index];
                    if (s < segment) before.x += total.x, before.y += total.y;
                    if (s < SEGMENTS / 2) middle.x += total.x, middle.y += total.y;
                    end.x += total.x, end.y += total.y;
                }
                if (segment == 0) {
                    float2* const target = reinterpret_cast<float2*>(frames + slab * TILE_COLUMNS) + index;
                    target[0] = {RATE_UNIT * middle.x, RATE_UNIT * middle.y};
                    target[CHANNELS / 2] = {RATE_UNIT * (end.x - middle.x), RATE_UNIT * (end.y - middle.y)};
                }
            }
            const float2 origin = {RATE_UNIT * (before.x - middle.x), RATE_UNIT * (before.y - middle.y)};
            const float range = range_of(steps);
            const auto in_range = [range](float2 c) { return fabsf(c.x) <= range && fabsf(c.y) <= range; };
            bool leaves_here = LARGEST_DECAY > 0 && !BY_HALVES && (!in_range(origin) || is_steep(sums));
            float2 grown = {exp2_fast(origin.x), exp2_fast(origin.y)};  // of the token before
            const bool has_first = HEAD_SIZE % TILE_COLUMNS == 0 || channel < HEAD_SIZE;
            const bool has_second = HEAD_SIZE % TILE_COLUMNS == 0 || channel + 1 < HEAD_SIZE;
            float2 bonus = {0.0f, 0.0f};
            if constexpr (BONUS) {
                if (has_first) bonus.x = scale * to_float(u[head * HEAD_SIZE + channel]);
                if (has_second) bonus.y = scale * to_float(u[head * HEAD_SIZE + channel + 1]);
            }
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i) {
                const int row = segment * SEGMENT_LEN + i;
                float2 x = unpack(*reinterpret_cast<const unsigned*>(&smem.raw.q[row][2 * index]));
                float2 y = unpack(*reinterpret_cast<const unsigned*>(&smem.raw.k[row][2 * index]));
                if (!has_first) x.x = y.x = 0.0f;
                if (!has_second) x.y = y.y = 0.0f;
                float2 c = {0.0f, 0.0f};
                if constexpr (HAS_DECAY) c = {origin.x + RATE_UNIT * sums.at[i].x, origin.y + RATE_UNIT * sums.at[i].y};
                if constexpr (LARGEST_DECAY > 0 && !BY_HALVES) leaves_here |= !in_range(c);
                const float2 now = {exp2_fast(c.x), exp2_fast(c.y)}, seen = BONUS ? grown : now;
                *word_of(tiles[0], row, index) = pack(x.x * seen.x * scale, x.y * seen.y * scale);
                *word_of(tiles[1], row, index) = pack(y.x * exp2_fast(-c.x), y.y * exp2_fast(-c.y));
                if (BONUS) own_terms[i] += x.x * y.x * bonus.x + x.y * y.y * bonus.y;
                grown = now;
            }
            publish_writes();
            bool by_halves = false;
            if constexpr (LARGEST_DECAY > 0 && !BY_HALVES) {
                const bool leaves = __syncthreads_or(leaves_here);
                if (threadIdx.x == 0) halved[place * SLABS + slab] = leaves;
                leaves_any |= leaves;
            } else {
                __syncthreads();
            }
            if constexpr (BY_HALVES) {
                by_halves = halved[place * SLABS + slab];
                if (by_halves) {
                    has_own_terms = true;
                    prepare_by_halves(smem, tiles, raw_w, bias, sum, own_terms, frames + slab * TILE_COLUMNS,
                                      slab * TILE_COLUMNS, steps, scale);
                    publish_writes();
                    __syncthreads();
                }
            }
            // Q and K are there, and nobody reads the raw rows any more.
            if (slab + 1 < SLABS) load_slab(slab + 1);
            if (!BY_HALVES && leaves_any) continue;
            if (threadIdx.x == 0) {
                write_bulk(operands + slab * (2 * CHUNK_LEN * 8), &tiles[0], sizeof(tiles));
                end_writes();
            }
            if (by_halves) continue;
            const auto tile_q = tile_of(tiles[0]), tile_k = tile_of(tiles[1]);
            begin_products();
#pragma unroll
            for (int c = 0; c < TILE_COLUMNS; c += 16)
                multiply_group<OWN_TOKENS, Read::rows, Read::rows>(sum, descriptor(tile_q, 0, c),
                                                                   descriptor(tile_k, group_of_warps * OWN_TOKENS, c));
            end_batch();
            wait_for_batches<0>();
            hold(sum);
        }
        if (!BY_HALVES && leaves_any) {
            if (threadIdx.x == 0) wait_until_read();
            return;
        }
        if (has_own_terms) {  // a warp has a segment
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i) {
#pragma unroll
                for (int delta = 1; delta < 32; delta *= 2)
                    own_terms[i] += __shfl_xor_sync(0xffffffffu, own_terms[i], delta);
                if (lane_id() == 0) smem.own_terms[segment * SEGMENT_LEN + i] = own_terms[i];
            }
            __syncthreads();
        }
        const int first_row = warp_id() % 4 * 16, first_column = group_of_warps * OWN_TOKENS;
#pragma unroll
        for (int n = 0; n < OWN_TOKENS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = first_row + group() + j / 2 * 8,
                          column = first_column + 8 * n + 2 * quad_lane() + j % 2;
                if (row < column + BONUS) sum[n][j] = 0.0f;
                if (row == column && has_own_terms) sum[n][j] += smem.own_terms[row];
            }
#pragma unroll
        for (int n = 0; n < OWN_TOKENS / 8; n += 2)
            store_block(tile_of(smem.pairs), first_row, first_column + 8 * n, to_fragment(sum[n], sum[n + 1]));
        publish_writes();
        __syncthreads();  // P is there
        if (threadIdx.x == 0) write_bulk(pairs, &smem.pairs, sizeof(smem.pairs)), end_writes(), wait_until_read();
    };
    if constexpr (BY_HALVES)
        for_each_halved<SLABS>(halved, slots * heads, [](i64 item) { return item; },
                               [=](i64 place) mutable { prepare(place / heads, place % heads); });
    else prepare(blockIdx.x, blockIdx.y);
}
