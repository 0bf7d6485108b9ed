// The key side of the backward of gated linear attention and its kin, all chunks at once, for heads that one block does
// not hold. With S' and E' of every chunk from gla_scan and the operands of gla_chunk.cuh
//
//     dP = tril(dY V^T), strictly with the bonus;   dQ = dP K + dY S';   dK = dP^T Q + V E'
//     z = sum_v S' * E' + sum_t (Q (dY S'))_t
//
// and dq, dk, dw, du from these as in gla_chunked_backward.cu.
//
//   q k w v u dy, cu_seqlens   as there     states, e  [slots, heads]  in: S' and E'     framed  as there
//   dq dk  T_IO, dw  T_W  [batch, tokens, heads, K]  out
//   du, dw_sums  [slots, heads, K]  fp32  out, of the bonus and of a constant decay: sums of a chunk
//
// Grid (slots x blocks of channels, heads). A warp has 16 channels and all tokens of the chunk.
#include "chunk.cuh"
#include "gla_halves.cuh"
#include "slots.cuh"

constexpr int BLOCK_CHANNELS = 16 * WARPS, CHANNEL_BLOCKS = ceil_div(CHANNELS, BLOCK_CHANNELS);  // channels of a block
constexpr int BLOCK_PITCH = BLOCK_CHANNELS + 8, BLOCK_PAIRS = BLOCK_CHANNELS / 2;
constexpr int GROWTH_PITCH = BLOCK_CHANNELS + 4;  // eight channels of every other row are in different banks
// a thread prepares a pair of channels
constexpr int TOKENS = ceil_power(ceil_div(CHUNK_LEN * BLOCK_PAIRS, NUM_THREADS));
constexpr int PARTS = CHUNK_LEN / TOKENS;
constexpr int PIECE = 32, PIECES = VALUES / PIECE, PIECE_PITCH = PIECE + 8;  // values at a time
constexpr int TASKS = BLOCKS * (BLOCKS + 1) / 2, OWN_TASKS = ceil_div(TASKS, WARPS);
static_assert(PARTS >= 2, "a middle lies between two segments");

using BlockTile = T_IO[CHUNK_LEN][BLOCK_PITCH];
struct Smem {
    BlockTile q, k;
    TokenTile d_pairs;
    union {
        struct { T_IO q[CHUNK_LEN][BLOCK_CHANNELS], k[CHUNK_LEN][BLOCK_CHANNELS]; } raw;
        struct { T_IO v[CHUNK_LEN][PIECE_PITCH], dy[CHUNK_LEN][PIECE_PITCH]; } pieces[2];
    };
    float2 totals[PARTS][BLOCK_PAIRS];
    float growth[CHUNK_LEN + 1][GROWTH_PITCH];  // e^(c_t - m), the row before the first token first; later dL/dc
    float diagonal[CHUNK_LEN];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// A fragment as it was stored, its transpose as the left operand.
__device__ inline Fragment turned(const uint4& lane) {
    const unsigned words[4] = {lane.x, lane.z, lane.y, lane.w};
    Fragment f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(f.at[i]) : "r"(words[i]));
    return f;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_key_gradients(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_IO* __restrict__ dy, const i64* __restrict__ cu_seqlens,
    const Checkpoint* __restrict__ states, const Checkpoint* __restrict__ e, const int* __restrict__ framed,
    T_IO* __restrict__ dq, T_IO* __restrict__ dk, T_DW* __restrict__ dw, float* __restrict__ du, Strides q_strides,
    Strides k_strides, Strides v_strides, Strides w_strides, Strides dy_strides, i64 tokens, i64 heads, i64 sequences,
    float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 slot = blockIdx.x / CHANNEL_BLOCKS, head = blockIdx.y;
    const int first_channel = blockIdx.x % CHANNEL_BLOCKS * BLOCK_CHANNELS,
              width = min(BLOCK_CHANNELS, HEAD_SIZE - first_channel);
    const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
    const int warp = warp_id(), steps = chunk.steps;
    if (steps == 0) return;
    const i64 token = chunk.span.begin + chunk.token;
    const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
    q += start(q_strides) + first_channel, k += start(k_strides) + first_channel, w += start(w_strides);
    v += start(v_strides), dy += start(dy_strides);
    const i64 key_stride = heads * HEAD_SIZE;
    const i64 out = ((chunk.span.batch * tokens + token) * heads + head) * HEAD_SIZE;
    dq += out + first_channel, dk += out + first_channel;
    if (!CONSTANT_DECAY) dw += out;
    states += slot * heads + head, e += slot * heads + head;
    // A chunk by halves: then `growth` holds the tokens' decays, and S and E have no frame.
    const bool by_halves = LARGEST_DECAY > 0 && chunk.token / CHUNK_LEN >= framed[chunk.sequence * heads + head];

    clear<NUM_THREADS>(smem);
    __syncthreads();
    const auto copy_keys = [&] {
        copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, BLOCK_CHANNELS, BLOCK_CHANNELS, NUM_THREADS>(
            smem.raw.q[0], q, q_strides.token, steps, width, threadIdx.x);
        copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, BLOCK_CHANNELS, BLOCK_CHANNELS, NUM_THREADS>(
            smem.raw.k[0], k, k_strides.token, steps, width, threadIdx.x);
        commit_copies();
    };
    copy_keys();

    // Operands: a thread prepares a pair of channels over TOKENS tokens.
    const int index = threadIdx.x % BLOCK_PAIRS, part = threadIdx.x / BLOCK_PAIRS;
    float2 sums[TOKENS], sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const int row = part * TOKENS + i;
        const auto at = [&](int j) {
            return HAS_DECAY && row < steps && 2 * index + j < width
                       ? to_float(w[row * w_strides.token + first_channel + 2 * index + j])
                       : NO_DECAY;
        };
        const float2 both = {at(0), at(1)};
        if constexpr (HAS_DECAY) sum.x += decay_rate<DECAY>(both.x), sum.y += decay_rate<DECAY>(both.y);
        sums[i] = sum;
        if (HAS_DECAY && by_halves && part < PARTS)
            *reinterpret_cast<float2*>(&smem.growth[row][2 * index]) = {token_decay<DECAY>(both.x),
                                                                        token_decay<DECAY>(both.y)};
    }
    if (part < PARTS) smem.totals[part][index] = sum;
    wait_for_copies<0>();
    __syncthreads();
    float2 before = {0.0f, 0.0f}, middle = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < PARTS; ++s) {
        const float2 total = smem.totals[s][index];
        if (s < part) before.x += total.x, before.y += total.y;
        if (s < PARTS / 2) middle.x += total.x, middle.y += total.y;
    }
    if (!by_halves && part < PARTS) {
        const float2 origin = {RATE_UNIT * (before.x - middle.x), RATE_UNIT * (before.y - middle.y)};
        float2 grown = {exp2_fast(origin.x), exp2_fast(origin.y)};
        if (part == 0) *reinterpret_cast<float2*>(&smem.growth[0][2 * index]) = grown;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int row = part * TOKENS + i;
            const float2 x = unpack(*reinterpret_cast<const unsigned*>(&smem.raw.q[row][2 * index]));
            const float2 y = unpack(*reinterpret_cast<const unsigned*>(&smem.raw.k[row][2 * index]));
            const float2 c = {origin.x + RATE_UNIT * sums[i].x, origin.y + RATE_UNIT * sums[i].y};
            const float2 now = {exp2_fast(c.x), exp2_fast(c.y)}, seen = BONUS ? grown : now;
            *word_of(smem.q, row, index) = pack(x.x * seen.x * scale, x.y * seen.y * scale);
            *word_of(smem.k, row, index) = pack(y.x * exp2_fast(-c.x), y.y * exp2_fast(-c.y));
            grown = now;
            *reinterpret_cast<float2*>(&smem.growth[row + 1][2 * index]) = grown;
        }
    }
    __syncthreads();  // the operands are there, and nobody reads the raw rows any more

    const auto copy_piece = [&](int piece) {
        if (piece < PIECES) {
            auto& to = smem.pieces[piece % 2];
            const int value = piece * PIECE, present = max(min(PIECE, VALUE_SIZE - value), 0);
            // What a last piece does not fill holds another one.
            if (VALUE_SIZE % PIECE != 0 && present < PIECE)
                for (int i = threadIdx.x; i < CHUNK_LEN * PIECE; i += NUM_THREADS)
                    if (i % PIECE >= present) to.v[i / PIECE][i % PIECE] = {}, to.dy[i / PIECE][i % PIECE] = {};
            copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, PIECE, PIECE_PITCH, NUM_THREADS>(
                to.v[0], v + value, v_strides.token, steps, present, threadIdx.x);
            copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, PIECE, PIECE_PITCH, NUM_THREADS>(
                to.dy[0], dy + value, dy_strides.token, steps, present, threadIdx.x);
        }
        commit_copies();
    };
    copy_piece(0);

    // the warp's channels, in the block and in the head
    const int column = 16 * warp, block = first_channel / 16 + warp;
    const bool has_channels = block < CHANNELS / 16;
    TokenSums d_q = {}, d_k = {};  // [channel, token]
    Accumulator d_p[OWN_TASKS][2] = {};
    float overlap[4] = {};  // S' * E' of the lane's four places, summed over the value rows
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
        wait_for_copies<0>();
        __syncthreads();  // this piece is there, and nobody reads the last one any more
        copy_piece(piece + 1);
        auto& now = smem.pieces[piece % 2];
        const auto tile_v = tile_of(now.v), tile_dy = tile_of(now.dy);
        if (has_channels) {
#pragma unroll
            for (int c = 0; c < PIECE; c += 16) {
                const int row = (piece * PIECE + c) / 16;
                const uint4 s = states->lanes[row][block][lane_id()], x = e->lanes[row][block][lane_id()];
                const unsigned states_of[4] = {s.x, s.y, s.z, s.w}, others[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    overlap[j / 2 * 2] += low_of(states_of[j]) * low_of(others[j]);
                    overlap[j / 2 * 2 + 1] += high_of(states_of[j]) * high_of(others[j]);
                }
                const Fragment with_state = turned(s), with_e = turned(x);
                add_columns(c, full(d_q, tile_dy, with_state), full(d_k, tile_v, with_e));  // dQ <- dY S'   dK <- V E'
            }
        }
#pragma unroll
        for (int n = 0; n < OWN_TASKS; ++n) {
            if (warp + n * WARPS >= TASKS) continue;
            const auto [p, j] = triangle_block(warp + n * WARPS);
#pragma unroll
            for (int c = 0; c < PIECE; c += 16)
                multiply_add(d_p[n], load_left(tile_dy, 16 * p, c), load_right_transposed(tile_v, 16 * j, c));
        }
    }
    const auto d_pairs = tile_of(smem.d_pairs);
#pragma unroll
    for (int n = 0; n < OWN_TASKS; ++n) {
        if (warp + n * WARPS >= TASKS) continue;
        const auto [p, j] = triangle_block(warp + n * WARPS);
        if (j == p) {
            if constexpr (BONUS) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int at = group() + i % 4 / 2 * 8, other = i / 4 * 8 + 2 * quad_lane() + i % 2;
                    if (at == other) smem.diagonal[16 * p + at] = d_p[n][i / 4][i % 4];
                }
            }
            keep_lower(d_p[n], BONUS);
        }
        store_block(d_pairs, 16 * p, 16 * j, to_fragment(d_p[n][0], d_p[n][1]));
    }
    ChunkDecays<BLOCK_CHANNELS> raw_w;
    if constexpr (HAS_DECAY && !CONSTANT_DECAY) raw_w.load(w, w_strides.token, steps, first_channel);
    __syncthreads();  // dP is there
    // What four lanes of a group hold for columns, a lane for its rows.
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int delta = 4; delta < 32; delta *= 2) overlap[j] += __shfl_xor_sync(0xffffffffu, overlap[j], delta);
    float left[2], bonus[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float even = __shfl_sync(0xffffffffu, overlap[2 * j], group() / 2);
        const float odd = __shfl_sync(0xffffffffu, overlap[2 * j + 1], group() / 2);
        left[j] = group() % 2 ? odd : even;
    }
    read_bonus(bonus, u + head * HEAD_SIZE, scale, first_channel + column);
    ChannelSums channel_sums = {};
    if (by_halves) {
        copy_keys(), wait_for_copies<0>();
        __syncthreads();  // the raw rows are there again
        const auto own_product = [&](int t) { return BONUS ? smem.diagonal[t] : to_float(smem.d_pairs[t][t]); };
        const auto begin = [&](TreeGradients& grads, int b) {
            copy_block(grads.left, d_q, b), copy_block(grads.right, d_k, b);
        };
        if (has_channels)
            write_pair_gradients_by_halves(begin, left, smem.q, smem.k, smem.raw.q, smem.raw.k, smem.growth,
                                           d_pairs, own_product, bonus, scale, column, steps, channel_sums);
    } else if (has_channels) {
        const auto operand_q = tile_of(smem.q), operand_k = tile_of(smem.k);
        const OperandRows q_rows(operand_q, column), k_rows(operand_k, column);
        float products[2];
        sum_products(products, q_rows, d_q);
#pragma unroll
        for (int j = 0; j < 2; ++j) left[j] += products[j];
        add_triangles(lower(d_q, d_pairs, k_rows.at));  // dQ <- dQ + dP K
        add_triangles(upper(d_k, d_pairs, q_rows.at));  // dK <- dK + dP^T Q
        write_pair_gradients(d_q, d_k, q_rows, k_rows, operand_q, operand_k, smem.growth, left, smem.diagonal, bonus,
                             scale, column, steps, channel_sums);
    }
    if (has_channels)
        write_channel_sums(channel_sums, du, dw, (slot * heads + head) * HEAD_SIZE, w, first_channel + column);
    __syncthreads();  // the gradients are there

    const auto write = [&](T_IO* target, const BlockTile& tile) {
        write_rows_at_once<T_IO, HEAD_SIZE, CHUNK_LEN, BLOCK_CHANNELS, BLOCK_PITCH, NUM_THREADS>(
            target, key_stride, tile[0], steps, width, threadIdx.x);
    };
    write(dq, smem.q), write(dk, smem.k);
    if constexpr (HAS_DECAY && !CONSTANT_DECAY)
        raw_w.write_slopes(dw, static_cast<unsigned>(key_stride), smem.growth, steps, first_channel);
}
