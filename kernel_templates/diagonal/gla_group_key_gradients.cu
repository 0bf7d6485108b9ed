// The key side of the backward of gated linear attention and its kin, all chunks at once, from what gla_prepare and
// gla_group_scan have left: what gla_key_gradients.cu does, in the same notation, with the products of sm_90a.
//
//   v w u dy, cu_seqlens   as there
//   operands         [slots, heads, SLABS, 2] tiles  in: Q K
//   halved           [slots, heads, SLABS]  in: which slabs were taken by halves; these are differentiated so with
//                    BY_HALVES, from q and k as they are, and the others without
//   states, e        [slots, heads, SLABS, VALUES] rows  in: S', E'
//   dq dk  T_IO, dw  T_W  [batch, tokens, heads, K]  out
//   du, dw_sums  [slots, heads, K]  fp32  out, of the bonus and of a constant decay: sums of a chunk
//
// Grid (slots x slabs of 64 channels, heads), or with BY_HALVES any number of blocks. It goes over the values, PIECE at
// a time.
#include "chunk.cuh"
#include "gla_halves.cuh"
#include "halved.cuh"
#include "slab_copy.cuh"
#include "slots.cuh"
#include "wgmma.cuh"

constexpr int SLABS = ceil_div(HEAD_SIZE, TILE_COLUMNS);
constexpr int DECAY_CHANNELS = TILE_COLUMNS, DECAY_PARTS = SLABS;
constexpr bool DECAYS_COME_IN_PARTS = true;
#include "chunk_rows.cuh"

constexpr int GROWTH_PITCH = TILE_COLUMNS + 4;  // eight channels of every other row are in different banks
constexpr int PIECE = 32, PIECES = VALUES / PIECE;
constexpr int UNITS = TILE_COLUMNS / 8;  // of a tile's row
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");
static_assert(NUM_THREADS == 128, "num_threads must be 128");
static_assert(STAGES >= 2, "stages must be 2 at least");

struct Stage {
    Slab<CHUNK_LEN> v_dy;  // PIECE columns of each
    Slab<PIECE> state, e;
};
struct Smem {
    Slab<CHUNK_LEN> operands[2];  // Q K, later dq dk
    union {
        Stage ring[STAGES];
        struct {
            // e^(c_t - m), the row before the first token first; later dL/dc
            float growth[CHUNK_LEN + 1][GROWTH_PITCH];
            Slab<CHUNK_LEN> d_pairs alignas(1024);
            struct { T_IO q[CHUNK_LEN][TILE_COLUMNS], k[CHUNK_LEN][TILE_COLUMNS]; } raw;  // of slabs by halves
        } chunk;
    };
    float2 totals[SEGMENTS][PAIRS];
    float state_terms[WARPS][TILE_COLUMNS];
    float diagonal[CHUNK_LEN];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_group_key_gradients(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_IO* __restrict__ dy, const i64* __restrict__ cu_seqlens,
    const uint4* __restrict__ operands, const int* __restrict__ halved, const uint4* __restrict__ states,
    const uint4* __restrict__ e, T_IO* __restrict__ dq, T_IO* __restrict__ dk, T_DW* __restrict__ dw,
    float* __restrict__ du, Strides q_strides, Strides k_strides, Strides v_strides, Strides w_strides,
    Strides dy_strides, i64 tokens, i64 heads,
    i64 sequences, i64 slots, float scale) {
    auto make = [=](i64 slot, i64 head, int slab) mutable {
        extern __shared__ __align__(1024) unsigned char shared_bytes[];
        Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
        const int first_channel = slab * TILE_COLUMNS;
        const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
        const int warp = warp_id(), steps = chunk.steps;
        if (steps == 0) return;
        const i64 token = chunk.span.begin + chunk.token;
        const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
        w += start(w_strides);
        const i64 key_stride = heads * HEAD_SIZE;
        const i64 out = ((chunk.span.batch * tokens + token) * heads + head) * HEAD_SIZE;
        dq += out, dk += out;
        if (!CONSTANT_DECAY) dw += out;
        const i64 place = (slot * heads + head) * SLABS + slab;
        if (LARGEST_DECAY > 0 && !BY_HALVES && halved[place]) return;
        operands += place * (2 * CHUNK_LEN * UNITS) + threadIdx.x;
        states += place * (VALUES * UNITS) + threadIdx.x, e += place * (VALUES * UNITS) + threadIdx.x;

        // Half of the threads copy V, the others dY.
        const bool copies_gradients = threadIdx.x >= NUM_THREADS / 2;
        ValueColumns<PIECE, NUM_THREADS / 2, T_IO> values(
            copies_gradients ? dy + start(dy_strides) : v + start(v_strides),
                                                          copies_gradients ? dy_strides.token : v_strides.token);
        const auto load_piece = [&](int piece) {
            if (piece < PIECES) {
                Stage& stage = smem.ring[piece % STAGES];
                values.copy(stage.v_dy, copies_gradients ? PIECE : 0, steps);
                copy_units(stage.state, states + piece * (PIECE * UNITS)),
                copy_units(stage.e, e + piece * (PIECE * UNITS));
            }
            commit_copies();
        };
        copy_units(smem.operands, operands);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) load_piece(i);
        RawDecays raw_w;
        if constexpr (HAS_DECAY) raw_w.load(w, w_strides.token, steps, first_channel);

        const int column = 16 * warp;  // the warp's channels, in the slab
        Accumulator d_q[CHUNK_LEN / 8] = {}, d_k[CHUNK_LEN / 8] = {};  // [channel, token]
        Accumulator d_p[CHUNK_LEN / 8] = {};                           // [token, token]
        float overlap[8] = {};  // S' * E' of a unit of channels, summed over the thread's value rows
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            wait_for_copies<STAGES - 2>();
            Stage& stage = smem.ring[piece % STAGES];
            publish_writes();
            __syncthreads();  // this piece is there, and nobody reads the last one any more
            load_piece(piece + STAGES - 1);
            const auto v_dy = tile_of(stage.v_dy), state = tile_of(stage.state), with_e = tile_of(stage.e);
            begin_products();
#pragma unroll
            for (int c = 0; c < PIECE; c += 16) {
                const auto of_v = descriptor(v_dy, 0, c), of_dy = descriptor(v_dy, 0, PIECE + c);
                multiply_group<CHUNK_LEN, Read::columns, Read::rows>(d_q, descriptor(state, c, 0), of_dy);
                multiply_group<CHUNK_LEN, Read::columns, Read::rows>(d_k, descriptor(with_e, c, 0), of_v);
                multiply_group<CHUNK_LEN, Read::rows, Read::rows>(d_p, of_dy, of_v);
            }
            end_batch();
#pragma unroll
            for (int i = threadIdx.x / UNITS; i < PIECE; i += NUM_THREADS / UNITS) {
                const int unit = threadIdx.x % 8 ^ i % 8;
                const uint4 x = stage.state.units[i][unit], y = stage.e.units[i][unit];
                const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    overlap[2 * j] += low_of(xs[j]) * low_of(ys[j]);
                    overlap[2 * j + 1] += high_of(xs[j]) * high_of(ys[j]);
                }
            }
            wait_for_batches<0>();
            hold(d_q), hold(d_k), hold(d_p);
        }
        // Lanes of the same channels, then warps.
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int delta = UNITS; delta < 32; delta *= 2)
                overlap[j] += __shfl_xor_sync(0xffffffffu, overlap[j], delta);
        if (lane_id() < UNITS)
#pragma unroll
            for (int j = 0; j < 8; ++j) smem.state_terms[warp][8 * lane_id() + j] = overlap[j];
        RateSums sums = {};
        if constexpr (HAS_DECAY) sum_rates(sums, smem.totals, raw_w, steps, first_channel);
        __syncthreads();  // the sums are there, and nobody reads the pieces any more

        if constexpr (BY_HALVES) {
            BlockDecays decays;
            begin_blocks<true>(decays, smem.totals, raw_w, steps, smem.chunk.growth, first_channel);
            const auto copy = [&](T_IO (&rows)[CHUNK_LEN][TILE_COLUMNS], const T_IO* source, Strides strides) {
                copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, TILE_COLUMNS, TILE_COLUMNS, NUM_THREADS>(
                    rows[0], source + start(strides) + first_channel, strides.token, steps,
                    min(TILE_COLUMNS, HEAD_SIZE - first_channel), threadIdx.x);
            };
            copy(smem.chunk.raw.q, q, q_strides), copy(smem.chunk.raw.k, k, k_strides);
            commit_copies(), wait_for_copies<0>();
        } else if constexpr (HAS_DECAY) {
            const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
            const float2 origin = frame_of(smem.totals).origin;
            const auto write = [&](int row, float2 c) {
                *reinterpret_cast<float2*>(&smem.chunk.growth[row][2 * index]) = {exp2_fast(c.x), exp2_fast(c.y)};
            };
            if (segment == 0) write(0, origin);
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i)
                write(segment * SEGMENT_LEN + i + 1,
                      {origin.x + RATE_UNIT * sums.at[i].x, origin.y + RATE_UNIT * sums.at[i].y});
        }
        const auto d_pairs = tile_of(smem.chunk.d_pairs);
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = column + group() + j / 2 * 8, other = 8 * n + 2 * quad_lane() + j % 2;
                if (BONUS && at == other) smem.diagonal[at] = d_p[n][j];
                if (at < other + BONUS) d_p[n][j] = 0.0f;
            }
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; n += 2) store_block(d_pairs, column, 8 * n, to_fragment(d_p[n], d_p[n + 1]));
        publish_writes();
        ChunkDecays<TILE_COLUMNS> slopes;
        if constexpr (HAS_DECAY && !CONSTANT_DECAY) slopes.load(w, w_strides.token, steps, first_channel);
        __syncthreads();  // dP and growth are there

        const auto operand_q = tile_of(smem.operands[0]), operand_k = tile_of(smem.operands[1]);
        const OperandRows q_rows(operand_q, column), k_rows(operand_k, column);
        float left[2] = {}, bonus[2];
        if constexpr (!BY_HALVES) sum_products(left, q_rows, d_q);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < WARPS; ++i) left[j] += smem.state_terms[i][column + group() + 8 * j];
        read_bonus(bonus, u + head * HEAD_SIZE, scale, first_channel + column);
        ChannelSums channel_sums = {};
        if constexpr (BY_HALVES) {
            const auto own_product = [&](int t) {
                const auto* const unit = reinterpret_cast<const T_IO*>(&smem.chunk.d_pairs.units[t][t / 8 ^ t % 8]);
                return BONUS ? smem.diagonal[t] : to_float(unit[t % 8]);
            };
            const auto begin = [&](TreeGradients& grads, int b) {
                copy_block(grads.left, d_q, b), copy_block(grads.right, d_k, b);
            };
            write_pair_gradients_by_halves(begin, left, smem.operands[0], smem.operands[1], smem.chunk.raw.q,
                                           smem.chunk.raw.k, smem.chunk.growth, d_pairs, own_product, bonus, scale,
                                           column, steps,
                                           channel_sums);
        } else {
            hold(d_q), hold(d_k);
            begin_products();
#pragma unroll
            for (int c = 0; c < CHUNK_LEN; c += 16) {
                multiply_group<CHUNK_LEN, Read::columns, Read::rows>(d_q, descriptor(operand_k, c, 0),
                                                                     descriptor(d_pairs, 0, c));
                multiply_group<CHUNK_LEN, Read::columns, Read::columns>(d_k, descriptor(operand_q, c, 0),
                                                                        descriptor(d_pairs, c, 0));
            }
            end_batch();
            wait_for_batches<0>();
            hold(d_q), hold(d_k);
            __syncthreads();  // nobody reads Q and K any more
            write_pair_gradients(d_q, d_k, q_rows, k_rows, operand_q, operand_k, smem.chunk.growth, left,
                                 smem.diagonal, bonus,
                                 scale, column, steps, channel_sums);
        }
        write_channel_sums(channel_sums, du, dw, (slot * heads + head) * HEAD_SIZE, w, first_channel + column);
        __syncthreads();  // the gradients are there

        write_slab_rows(dq, key_stride, smem.operands[0], first_channel, steps);
        write_slab_rows(dk, key_stride, smem.operands[1], first_channel, steps);
        if constexpr (HAS_DECAY && !CONSTANT_DECAY)
            slopes.write_slopes(dw, static_cast<unsigned>(key_stride), smem.chunk.growth, steps, first_channel);
    };
    if constexpr (BY_HALVES)
        for_each_halved<1>(halved, slots * heads * SLABS, [](i64 item) { return item; }, [=](i64 place) mutable {
            make(place / SLABS / heads, place / SLABS % heads, static_cast<int>(place % SLABS));
        });
    else make(blockIdx.x / SLABS, blockIdx.y, blockIdx.x % SLABS);
}
