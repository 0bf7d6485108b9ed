// Gated linear attention and its kin, the keys' side of all chunks at once, for kernels that walk over the chunks with
// warp groups. With the notation of gla_chunk.cuh, Q, K, P and the frame of every chunk.
//
//   q k, w, u   [batch, tokens, heads, K], [heads, K]  in
//   operands    [slots, heads, SLABS, 2] tiles  out: Q K
//   pairs       [slots, heads] tiles            out: P, zero above the diagonal
//   frames      [slots, heads, 2, CHANNELS]  fp32  out: m and D - m to the base 2
//   leaves      [sequences, heads]  int32, in and out or null: set where a decay leaves the range of these kernels
//
// Grid (slots, heads), a block per chunk and head. It goes over the channels, 64 at a time.
#include "bulk_copy.cuh"
#include "copy.cuh"
#include "slab.cuh"
#include "slots.cuh"
#include "wgmma.cuh"

constexpr int SLABS = ceil_div(HEAD_SIZE, TILE_COLUMNS), CHANNELS = SLABS * TILE_COLUMNS;
constexpr int DECAY_CHANNELS = TILE_COLUMNS, DECAY_PARTS = SLABS;
constexpr bool DECAYS_COME_IN_PARTS = true;
#include "chunk_decay.cuh"

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
    float bonus_terms[CHUNK_LEN];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_prepare(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_W* __restrict__ w, const T_U* __restrict__ u,
    const i64* __restrict__ cu_seqlens, uint4* __restrict__ operands, uint4* __restrict__ pairs,
    float* __restrict__ frames, int* __restrict__ leaves, Strides q_strides, Strides k_strides, Strides w_strides,
    i64 tokens, i64 heads, i64 sequences, float scale) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 slot = blockIdx.x, head = blockIdx.y;
    const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
    const int steps = chunk.steps;
    if (steps == 0) return;
    const i64 token = chunk.span.begin + chunk.token;
    const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
    q += start(q_strides), k += start(k_strides);
    w += start(w_strides);
    const i64 place = slot * heads + head;
    operands += place * (SLABS * 2 * CHUNK_LEN * 8), pairs += place * (CHUNK_LEN * 8), frames += place * (2 * CHANNELS);

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
    float bonus_terms[SEGMENT_LEN] = {};
    bool leaves_range = false;
    const int group_of_warps = warp_id() / 4;
    load_slab(0);
#pragma unroll 1
    for (int slab = 0; slab < SLABS; ++slab) {
        const int channel = slab * TILE_COLUMNS + 2 * index;
        RateSums sums = {};
        if constexpr (HAS_DECAY) sum_rates(sums, smem.totals, raw_w, steps, slab * TILE_COLUMNS);
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
        const auto in_range = [](float2 c) {
            return fabsf(c.x) <= LARGEST_DECAY * LOG2_E && fabsf(c.y) <= LARGEST_DECAY * LOG2_E;
        };
        if constexpr (LARGEST_DECAY > 0) leaves_range |= !in_range(origin);
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
            if constexpr (LARGEST_DECAY > 0) leaves_range |= !in_range(c);
            const float2 now = {exp2_fast(c.x), exp2_fast(c.y)}, seen = BONUS ? grown : now;
            *word_of(tiles[0], row, index) = pack(x.x * seen.x * scale, x.y * seen.y * scale);
            *word_of(tiles[1], row, index) = pack(y.x * exp2_fast(-c.x), y.y * exp2_fast(-c.y));
            if (BONUS) bonus_terms[i] += x.x * y.x * bonus.x + x.y * y.y * bonus.y;
            grown = now;
        }
        publish_writes();
        __syncthreads();  // Q and K are there, and nobody reads the raw rows any more
        if (slab + 1 < SLABS) load_slab(slab + 1);
        if (threadIdx.x == 0) {
            write_bulk(operands + slab * (2 * CHUNK_LEN * 8), &tiles[0], sizeof(tiles));
            end_writes();
        }
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
    if constexpr (BONUS) {  // a warp has a segment
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
#pragma unroll
            for (int delta = 1; delta < 32; delta *= 2)
                bonus_terms[i] += __shfl_xor_sync(0xffffffffu, bonus_terms[i], delta);
            if (lane_id() == 0) smem.bonus_terms[segment * SEGMENT_LEN + i] = bonus_terms[i];
        }
        __syncthreads();
    }
    const int first_row = warp_id() % 4 * 16, first_column = group_of_warps * OWN_TOKENS;
#pragma unroll
    for (int n = 0; n < OWN_TOKENS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = first_row + group() + j / 2 * 8, column = first_column + 8 * n + 2 * quad_lane() + j % 2;
            if (row < column + BONUS) sum[n][j] = BONUS && row == column ? smem.bonus_terms[row] : 0.0f;
        }
#pragma unroll
    for (int n = 0; n < OWN_TOKENS / 8; n += 2)
        store_block(tile_of(smem.pairs), first_row, first_column + 8 * n, to_fragment(sum[n], sum[n + 1]));
    publish_writes();
    if constexpr (LARGEST_DECAY > 0) {
        const bool found = __syncthreads_or(leaves_range);
        // Whoever finds it writes the same.
        if (found && threadIdx.x == 0 && leaves != nullptr) leaves[chunk.sequence * heads + head] = 1;
    } else {
        __syncthreads();  // P is there
    }
    if (threadIdx.x == 0) write_bulk(pairs, &smem.pairs, sizeof(smem.pairs)), end_writes(), wait_until_read();
}
