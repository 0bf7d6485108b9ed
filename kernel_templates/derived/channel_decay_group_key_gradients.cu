// Kimi Delta Attention, backward, what chunks of 64 tokens have for themselves: the gradients of queries, keys, rates
// and log-decays, from those of outputs and values, with the products of sm_90a. With S_0 the state before a chunk, E
// the gradient of the one behind it, n_q and n_k 1 over norms, and all else as in channel_decay_group_forward.cu:
//
//     P = scale dY U^T, s <= t    N = dV U^T, s < t
//     Q' = n_q Q e^(c - m)    K' = -n_k K e^(c - m)    W = rate n_k K e^(m - c)
//     A = scale e^m dY S_0 + P F W    B = e^m dV S_0 + N F W    C = e^(D - m) U E + F^T (P^T Q' + N^T K')
//     dQ = n_q e^(c - m) A    dK = rate n_k e^(m - c) C - n_k e^(c - m) B    d rate = n_k K . e^(m - c) C
//     dc = Q' A + K' B - W C, by channel, and that of D is e^D S_0 . E + the sum over tokens of W e^(D - m) U E
//
// Each block of 16 tokens has a frame: m is c in the middle of a token's own block. F takes what a block gives to the
// frame of one behind it, by channel: e^(m_b - m_a) from block a to b, which is at most 1. Products of 16 channels and
// all tokens have channels as rows, so that this is a factor of a row of sums: products of A and B go from the first
// block to the last, those of C from the last to the first, and between two blocks sums are multiplied by what decays
// from one middle to the next. A chunk is in its frames where no half of a block decays by more than LARGEST_DECAY.
//
// dQ and dK then lose what is along queries and keys, where these have a norm. Gradients of log-decays are sums of dc
// over the tokens behind. A pair of two of these has to cancel there: it does, as the rounded Q', K' and W that are
// multiplied make dc too. A gradient of a rate is no quotient by the rate, which may be 0.
//
//   r k w beta a_log dt_bias  as in the forward, with as many key heads as heads  in
//   dy       [batch, tokens, heads, V]  T_IO  in; dv, kept_u  the same, without gaps: the gradient of values, and U  in
//   states, slopes  [slots of 64 tokens, heads]  S_0 and E, tiles of 64 values and channels  in
//   dr dk    [batch, tokens, heads, K]  T_IO  out; dw  the same  T_W  out; dbeta  [batch, tokens, heads]  T_BETA  out
//   a_log_chunks  [slots, heads], bias_chunks  [slots, heads, K]  fp32  out: what is to be summed over slots, or null;
//            slots that belong to no chunk are not written
//
// A block takes one chunk and head after another. Its two groups of four warps have 64 channels each, and work with
// transposes, [channel, token]: a warp has all tokens of its 16 channels, so that sums over tokens stay in it. What
// states give is multiplied while operands are made; the next chunk's states and values come while pairs are
// multiplied, its keys and gates when the gradients have left their places. Chunks that leave their frames have Q', K'
// and W without decays, and multiply these from token to token for each pair: slow, but right for any decay.
#include "bulk_copy.cuh"
#include "channel_decay_channel_sums.cuh"
#include "channel_decay_one_by_one.cuh"
#include "head_decay_group_sums.cuh"
#include "slots.cuh"

static_assert(NUM_THREADS == 256, "num_threads must be 256");

constexpr float LEAST_OF_HALF = -LOG2_E * LARGEST_DECAY;
constexpr bool ONE_FACTOR = 2 * LEAST_OF_HALF >= -126.0f;  // what two halves leave is a number to a float
constexpr float LEAST_LOGARITHM = -1024.0f;  // nothing to a float, and sums of them are numbers

// A chunk and head.
struct Task {
    i64 q, k, w, beta, dy, row;  // where its first token lies in the inputs, and in rows of outputs
    int slot, head, steps;       // no steps: there is none left
};
// A block's tasks, one after another.
struct Tasks {
    const i64* cu_seqlens;
    i64 slots, heads, sequences, tokens;
    Strides of_q, of_k, of_w, of_beta, of_dy;
    unsigned number = blockIdx.x;

    __device__ Task next() {
        for (; number < slots * heads; number += gridDim.x) {
            const unsigned slot = number / static_cast<unsigned>(heads);
            const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
            if (chunk.steps == 0) continue;
            const int head = number - slot * static_cast<unsigned>(heads);
            number += gridDim.x;
            const i64 batch = chunk.span.batch, token = chunk.span.begin + chunk.token;
            const auto start = [&](Strides s) { return batch * s.batch + token * s.token + head * s.head; };
            return {start(of_q), start(of_k), start(of_w), start(of_beta), start(of_dy), batch * tokens + token,
                    static_cast<int>(slot), head, chunk.steps};
        }
        return {};
    }
};

constexpr int OF_RATE = 0, OF_QUERY = 1, OF_KEY = 2;  // what sums over channels are of

struct __align__(1024) Smem {
    // Where a chunk has left its frames, S_0, E, and dY and dV together become tables of channels and tokens.
    StateTiles state, slope;               // S_0 and E
    Slab<CHUNK_LEN> dy[SLABS], dv[SLABS], u[SLABS];
    Slab<CHUNK_LEN> q[SLABS], k[SLABS];    // as they come, then Q' and K', then dQ and dK
    Slab<CHUNK_LEN> written[SLABS];        // W
    Slab<CHUNK_LEN> pairs[2];              // P and N
    GateTile<T_W> w;
    float halves[CHUNK_LEN / 8][HEAD_SIZE];  // sums of log-decays over halves of blocks
    float squares[SLABS][2][CHUNK_LEN];    // k . k and q . q over 64 channels
    float of_q[CHUNK_LEN], of_k[CHUNK_LEN], rate[CHUNK_LEN];
    float of_warps[WARPS][3][CHUNK_LEN];   // sums over a warp's channels: K . dW, q . dQ, k . dK
    float along[2][CHUNK_LEN];             // q . dQ and k . dK over all of them, over the norms of q and k
    float of_speed[WARPS];
    Task tasks[2];
    CopyBarrier arrived;                   // the states of a chunk
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

__device__ inline unsigned offset(const Smem& smem, const Slab<CHUNK_LEN>& slab) {
    return reinterpret_cast<const char*>(&slab) - reinterpret_cast<const char*>(&smem);
}
// Tiles as products take them, those of a block or, named by the first slab, those of a group. The compiler has to find
// them anew for every chunk, as they would not all fit into registers: an addition each, to half of a word.
struct Tiles {
    const Smem& smem;
    unsigned base;
    __device__ Tiles(const Smem& smem, int slab)
        : smem(smem), base(encoded(shared_address(&smem)) + slab * sizeof(Slab<CHUNK_LEN>) / 16) {
        asm volatile("" : "+r"(base));
    }
    __device__ unsigned long long rows(const Slab<CHUNK_LEN>& slab, int row, int column) const {
        return 0x4000004000000000ull | base + (offset(smem, slab) + 128 * row + 2 * column) / 16;
    }
};

__device__ inline float2 pair_at(const float (&of_tokens)[CHUNK_LEN], int n) {
    return reinterpret_cast<const float2&>(of_tokens[8 * n + 2 * quad_lane()]);
}
// S_0 . E of a lane's channels, over all values: what lies on the diagonal of products of the warp's channels.
__device__ inline void multiply_states(const Smem& smem, int slab, int first, OfChannels& sums) {
    Accumulator products[2] = {};
#pragma unroll
    for (int value = 0; value < VALUE_SIZE; value += 16) {
        const int part = value / TILE_COLUMNS, row = value % TILE_COLUMNS;
        const Fragment state = load_left_transposed(tile_of(smem.state.at[part][slab]), row, first),
                       slope = load_left_transposed(tile_of(smem.slope.at[part][slab]), row, first);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_add(products[i], state, slope.at[i], slope.at[2 + i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float own = group() % 2 ? products[i][2 * i + 1] : products[i][2 * i];
        sums[i] = __shfl_sync(ALL_LANES, own, 4 * group() + group() / 2);  // the lane that has_diagonal
    }
}

// Sums of log-decays over halves of blocks, those of a lane's channels. Their place is found anew too.
struct HalfSums {
    Smem& smem;
    int channel;
    __device__ HalfSums(Smem& smem, int channel) : smem(smem), channel(channel) {
        asm volatile("" : "+r"(this->channel));
    }
    __device__ float& at(int n, int i) const { return smem.halves[n][channel + 8 * i]; }
    __device__ float decay(int n, int i) const { return exp2_fast(at(n, i)); }
};
// What takes a lane's sums from a block's frame to the next one's, over the halves of blocks between both middles. What
// both halves leave together may be nothing to a float, though tokens where the blocks meet hardly forget each other:
// their operands are as large as the halves decay. So these sums are multiplied by one after the other. Tokens of other
// blocks have one of the halves between them, and nothing is nothing there.
struct Passage {
    OfChannels one, other, both;
    // Between this block and the next one, in either direction.
    __device__ Passage(const HalfSums& halves, int block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            one[i] = halves.decay(2 * block + 1, i), other[i] = halves.decay(2 * block + 2, i);
            both[i] = one[i] * other[i];
        }
    }
    // Sums of blocks [begin, end), to the frame of block `next`.
    __device__ void take(ChannelSums& x, int next, int begin, int end) const {
#pragma unroll
        for (int n = 2 * begin; n < 2 * end; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (n / 2 == next && !ONE_FACTOR) x[n][i] = x[n][i] * one[i / 2] * other[i / 2];
                else x[n][i] *= both[i / 2];
    }
};
// Sums of blocks [begin, end), which the compiler knows, get what 16 tokens give; `right` says where pairs of a block
// are. There are no products of three blocks: an odd one is taken alone.
template <Read RIGHT, typename Right>
__device__ inline void multiply_blocks(int begin, int end, ChannelSums& sums, unsigned long long left, Right right) {
    if (begin % 2) multiply_group<16, Read::columns, RIGHT>(sums + 2 * begin, left, right(begin)), ++begin;
    if (end % 2) --end, multiply_group<16, Read::columns, RIGHT>(sums + 2 * end, left, right(end));
    if (end - begin == 2) multiply_group<32, Read::columns, RIGHT>(sums + 2 * begin, left, right(begin));
    if (end - begin == 4) multiply_group<64, Read::columns, RIGHT>(sums + 2 * begin, left, right(begin));
}

static_assert(sizeof(ChannelTable) == sizeof(StateTiles), "a table has room in a state's place");
static_assert(sizeof(ChannelTable) == sizeof(Smem::dy) + sizeof(Smem::dv), "and in that of dY and dV");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) channel_decay_key_gradients(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_W* __restrict__ w, const T_BETA* __restrict__ beta,
    const float* __restrict__ a_log, const float* __restrict__ dt_bias, const T_IO* __restrict__ dy,
    const T_IO* __restrict__ dv, const T_IO* __restrict__ kept_u, const StateTiles* __restrict__ states,
    const StateTiles* __restrict__ slopes, const i64* __restrict__ cu_seqlens, T_IO* __restrict__ dr,
    T_IO* __restrict__ dk, T_W* __restrict__ dw, T_BETA* __restrict__ dbeta, float* __restrict__ a_log_chunks,
    float* __restrict__ bias_chunks, Strides r_strides, Strides k_strides, Strides w_strides, Strides beta_strides,
    Strides dy_strides, i64 sequences, i64 tokens, i64 heads, i64 slots, float scale, float lower_bound) {
    __builtin_assume(threadIdx.x < NUM_THREADS);
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    // A number that all lanes know to be the same takes uniform registers, of which given gates leave too few.
    const int warp = LOG_DECAY == LogDecay::given ? threadIdx.x / 32 : warp_id();
    const int slab = warp / 4, first = BLOCK * (warp % 4);                    // the group's, and the warp's channels
    const int own_channel = slab * TILE_COLUMNS + first + group();            // the lane's, and another one eight on
    const auto synchronize_group = [&] { synchronize_threads(1 + slab, GROUP_THREADS); };

    // Rows of 64 elements of a group: a thread has 16 bytes of every 16th row.
    constexpr int ROW_STEP = GROUP_THREADS / 8;
    const int row = threadIdx.x % GROUP_THREADS / 8, unit = threadIdx.x % 8;
    using Gates = GateTile<T_W>;
    const int gate_row = threadIdx.x % GROUP_THREADS / Gates::UNITS, gate_unit = threadIdx.x % Gates::UNITS;
    const auto copy_rows = [&](Slab<CHUNK_LEN>& to, const T_IO* source, i64 stride, int steps) {
        const unsigned target = shared_address(&to.units[row][unit ^ row % 8]);
        source += row * stride + slab * TILE_COLUMNS + 8 * unit;
#pragma unroll
        for (int i = 0; i < CHUNK_LEN; i += ROW_STEP)
            copy_async<16>(target + i * 128, source + i * stride, row + i < steps);
    };
    const auto copy_values = [&](const Task& from) {
        if (threadIdx.x == 0) {
            const i64 place = from.slot * heads + from.head;
            expect_bytes(smem.arrived, 2 * sizeof(StateTiles));
            copy_bulk<1>(&smem.state, states + place, sizeof(StateTiles), smem.arrived);
            copy_bulk<1>(&smem.slope, slopes + place, sizeof(StateTiles), smem.arrived);
        }
        __syncwarp();
        const i64 stride = heads * VALUE_SIZE, start = from.row * stride + from.head * VALUE_SIZE;
        copy_rows(smem.dy[slab], dy + from.dy, dy_strides.token, from.steps);
        copy_rows(smem.u[slab], kept_u + start, stride, from.steps);
        copy_rows(smem.dv[slab], dv + start, stride, from.steps);
    };
    const auto copy_keys = [&](const Task& from) {
        copy_rows(smem.q[slab], r + from.q, r_strides.token, from.steps);
        copy_rows(smem.k[slab], k + from.k, k_strides.token, from.steps);
        const T_W* source = w + from.w + gate_row * w_strides.token + slab * TILE_COLUMNS + Gates::PER_UNIT * gate_unit;
#pragma unroll
        for (int i = 0; i < CHUNK_LEN; i += Gates::STEP)
            copy_async<16>(shared_address(&smem.w.unit(slab, gate_row + i, gate_unit)), source + i * w_strides.token,
                           gate_row + i < from.steps);
    };

    Tasks tasks = {cu_seqlens, slots, heads, sequences, tokens, r_strides, k_strides, w_strides, beta_strides,
                   dy_strides};
    const bool finds_tasks = threadIdx.x == NUM_THREADS - 1;
    if (threadIdx.x == 0) begin_barrier(smem.arrived, 1), publish_barriers();
    if (finds_tasks) smem.tasks[0] = tasks.next();
    __syncthreads();
    if (smem.tasks[0].steps == 0) return;
    copy_values(smem.tasks[0]), commit_copies();
    copy_keys(smem.tasks[0]), commit_copies();
    float own_speed;
    OfChannels bias;
    const auto load_gate = [&](int head) {
        own_speed = speed_of(a_log, head);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            bias[i] = HAS_BIAS ? load_early<float>(dt_bias + head * HEAD_SIZE + own_channel + 8 * i) : 0.0f;
    };
    load_gate(smem.tasks[0].head);

    for (int turn = 0;; turn ^= 1) {
        const Task& here = smem.tasks[turn];
        const Task& next = smem.tasks[turn ^ 1];
        const int head = here.head, steps = here.steps;
        const Gate gate(own_speed, lower_bound);
        const int own_token = threadIdx.x % CHUNK_LEN;
        const auto raw_rate =
            load_early<Words<T_BETA, 1>>(beta + here.beta + min(own_token, steps - 1) * beta_strides.token);
        wait_for_copies<1>();
        publish_writes();
        wait_for(smem.arrived, turn);
        __syncthreads();  // states and values are there, and nobody needs the last chunk's tiles any more
        if (finds_tasks) smem.tasks[turn ^ 1] = tasks.next();
        __syncwarp();

        // P by the first group and N by the second; what states give.
        Accumulator pairs[CHUNK_LEN / 8];
        ChannelSums of_q, of_k, of_w;
        const Tiles tiles(smem, 0), own_tiles(smem, slab), left(smem, slab * SLABS);  // dV lies behind dY
        begin_products();
#pragma unroll
        for (int c = 0; c < VALUE_SIZE; c += 16)
            multiply_group<64, Read::rows, Read::rows>(c == 0, pairs,
                                                       left.rows(smem.dy[c / TILE_COLUMNS], 0, c % TILE_COLUMNS),
                                                       tiles.rows(smem.u[c / TILE_COLUMNS], 0, c % TILE_COLUMNS));
        end_batch();
#pragma unroll
        for (int c = 0; c < VALUE_SIZE; c += 16) {
            const int part = c / TILE_COLUMNS, own = c % TILE_COLUMNS;
            const auto of_state = own_tiles.rows(smem.state.at[part][0], own, 0);
            multiply_group<64, Read::columns, Read::rows>(c == 0, of_q, of_state, tiles.rows(smem.dy[part], 0, own));
            multiply_group<64, Read::columns, Read::rows>(c == 0, of_k, of_state, tiles.rows(smem.dv[part], 0, own));
            multiply_group<64, Read::columns, Read::rows>(c == 0, of_w, own_tiles.rows(smem.slope.at[part][0], own, 0),
                                                          tiles.rows(smem.u[part], 0, own));
        }
        end_batch();
        OfChannels of_states;
        multiply_states(smem, slab, first, of_states);
        wait_for_copies<0>();
        synchronize_group();  // keys and gates are there
        if constexpr (HAS_NORM) {
            DiagonalSums sums = {};
            sums.add(tile_of(smem.k[slab]), tile_of(smem.q[slab]), first);
            if (has_diagonal())
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    smem.squares[slab][0][first + group() + 8 * i] = sums.keys[i];
                    smem.squares[slab][1][first + group() + 8 * i] = sums.queries[i];
                }
            __syncwarp();
        }
        // c - m, to the base 2; nothing where the chunk has left its frames.
        ChannelSums decays;
        const HalfSums halves(smem, own_channel);
        smem.w.load(decays, slab, first);
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) decays[n][i] = gate.logarithm(decays[n][i], bias[i / 2]);
        keep_tokens(decays, steps);  // what is past the last one does not decay
        bool fits = true;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float end = 0.0f;
#pragma unroll
            for (int n = 0; n < CHUNK_LEN / 8; ++n) {
                float &x = decays[n][2 * i], &y = decays[n][2 * i + 1];
                const float half = sum_up_to(x, y);
                if (n % 2 == 0) x -= half, y -= half;
                halves.at(n, i) = half;  // as all lanes do that have the channel
                fits = fits && half >= LEAST_OF_HALF;
                end += half;
            }
            of_states[i] *= exp2_fast(end);
        }
        const bool in_frame = __syncthreads_and(fits);  // the squares are there, too
        if (threadIdx.x < CHUNK_LEN) {
            const auto squares = [&](int i) { return smem.squares[0][i][own_token] + smem.squares[1][i][own_token]; };
            smem.of_k[own_token] = HAS_NORM ? norm_factor(squares(0)) : 1.0f;
            smem.of_q[own_token] = HAS_NORM ? norm_factor(squares(1)) : 1.0f;
            smem.rate[own_token] = own_token < steps ? rate_of(raw_rate.at(0)) : 0.0f;
        }
        wait_for_batches<1>();
        hold(pairs);
        // How far the lane's first pair is below the first one that counts; and where pairs go. Found anew too.
        int below = first + group() - 2 * quad_lane() - slab;
        SlabTile pair_tile = tile_of(smem.pairs[slab]);
        asm volatile("" : "+r"(below), "+r"(pair_tile.start));
        const float of_pairs = slab == 0 ? scale : 1.0f;
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[n][i] = below >= 8 * n + i % 2 - i / 2 * 8 ? of_pairs * pairs[n][i] : 0.0f;
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q)
            store_block(pair_tile, first, 16 * q, to_fragment(pairs[2 * q], pairs[2 * q + 1]));
        __syncthreads();  // the factors are there

        if (!in_frame) set_zero(decays);
        // Q', K' and W, and what tokens have of the gradient of D.
        Fragment queries[BLOCKS], keys[BLOCKS];  // as they come
        unsigned own_start = shared_address(&smem) + slab * sizeof(Slab<CHUNK_LEN>);  // found anew too
        asm volatile("" : "+r"(own_start));
        const auto own_tile = [&](const Slab<CHUNK_LEN>& slab) -> SlabTile { return {own_start + offset(smem, slab)}; };
        const auto q_tile = own_tile(smem.q[0]), k_tile = own_tile(smem.k[0]), written_tile = own_tile(smem.written[0]);
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            queries[q] = load_left_transposed(q_tile, 16 * q, first);
            keys[q] = load_left_transposed(k_tile, 16 * q, first);
            Fragment read, erased, written;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = 2 * q + h;
                const float2 of_query = pair_at(smem.of_q, n), of_key = pair_at(smem.of_k, n),
                             rate = pair_at(smem.rate, n);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float *const x = &decays[n][2 * i], down[2] = {exp2_fast(x[0]), exp2_fast(x[1])},
                                       up[2] = {exp2_fast(-x[0]), exp2_fast(-x[1])};
                    const unsigned query = queries[q].at[2 * h + i], key = keys[q].at[2 * h + i];
                    const float of_keys[2] = {low_of(key) * of_key.x, high_of(key) * of_key.y};
                    read.at[2 * h + i] =
                        pack(low_of(query) * (of_query.x * down[0]), high_of(query) * (of_query.y * down[1]));
                    erased.at[2 * h + i] = pack(-of_keys[0] * down[0], -of_keys[1] * down[1]);
                    written.at[2 * h + i] = pack(of_keys[0] * (rate.x * up[0]), of_keys[1] * (rate.y * up[1]));
                }
            }
            store_block_transposed(q_tile, 16 * q, first, read);
            store_block_transposed(k_tile, 16 * q, first, erased);
            store_block_transposed(written_tile, 16 * q, first, written);
        }
        wait_for_batches<0>();
        hold(of_q), hold(of_k), hold(of_w);
        OfChannels of_end = {};
        if (in_frame) {
            // To the frame of the first block, and to that of the last one.
            const OfChannels begins = {halves.decay(0, 0), halves.decay(0, 1)},
                             ends = {halves.decay(CHUNK_LEN / 8 - 1, 0), halves.decay(CHUNK_LEN / 8 - 1, 1)};
            __syncwarp();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                const Fragment written = load_left_transposed(written_tile, 16 * q, first);
                if (q > 0)
#pragma unroll
                    for (int i = 0; i < 2; ++i) of_end[i] *= exp2_fast(halves.at(2 * q - 1, i) + halves.at(2 * q, i));
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const unsigned word = written.at[2 * h + i / 2];
                        of_q[2 * q + h][i] *= scale * begins[i / 2], of_k[2 * q + h][i] *= begins[i / 2];
                        of_w[2 * q + h][i] *= ends[i / 2];
                        of_end[i / 2] += of_w[2 * q + h][i] * (i % 2 ? high_of(word) : low_of(word));
                    }
            }
        }
        publish_writes();
        __syncthreads();  // operands and pairs are there, and nobody reads states and values any more

        if (in_frame) {
            const Tiles tiles(smem, 0), own_tiles(smem, slab);
            begin_products();
            // Blocks from `a` on read what block `a` wrote, and what blocks up to `b` wrote is read by block `b`. While
            // sums of one kind go to the next block's frame, products of the other go on.
#pragma unroll
            for (int a = 0; a < BLOCKS; ++a) {
                const int b = BLOCKS - 1 - a;
                if (a > 0) {
                    wait_for_batches<1>();
                    hold(of_q), hold(of_k);
                    const Passage passage(halves, a - 1);
                    passage.take(of_q, a, a, BLOCKS), passage.take(of_k, a, a, BLOCKS);
                    begin_products();
                }
                const auto written = own_tiles.rows(smem.written[0], 16 * a, 0);
#pragma unroll
                for (int side = 0; side < 2; ++side)
                    multiply_blocks<Read::rows>(a, BLOCKS, side == 0 ? of_q : of_k, written, [&](int block) {
                        return tiles.rows(smem.pairs[side], 16 * block, 16 * a);
                    });
                end_batch();
                if (a > 0) {
                    wait_for_batches<1>();
                    hold(of_w);
                    const Passage passage(halves, b);
                    passage.take(of_w, b, 0, b + 1);
                    begin_products();
                }
#pragma unroll
                for (int side = 0; side < 2; ++side)
                    multiply_blocks<Read::columns>(
                        0, b + 1, of_w, own_tiles.rows(side == 0 ? smem.q[0] : smem.k[0], 16 * b, 0),
                        [&](int block) { return tiles.rows(smem.pairs[side], 16 * b, 16 * block); });
                end_batch();
            }
            if (next.steps > 0) copy_values(next);
            commit_copies();
            wait_for_batches<0>();
            hold(of_q), hold(of_k), hold(of_w);
        } else {
            // Nobody but the lane reads and writes sums of its channels and tokens, and its warp alone their decays.
            auto &table = reinterpret_cast<ChannelTable&>(smem.state),
                 &sums = reinterpret_cast<ChannelTable&>(smem.slope),
                 &more_sums = reinterpret_cast<ChannelTable&>(smem.dy);
            int own = first + group();  // found anew too
            asm volatile("" : "+r"(own));
            ChannelSums logs;
            const auto load_logs = [&] {
                smem.w.load(logs, slab, own - group());
#pragma unroll
                for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        logs[n][i] = fmaxf(gate.logarithm(logs[n][i], bias[i / 2]), LEAST_LOGARITHM);
                keep_tokens(logs, steps);
            };
            const auto of_lane = [&](ChannelTable& table, int n, int i) -> float& {
                return table[8 * n + 2 * quad_lane() + i % 2][slab * TILE_COLUMNS + own + i / 2 * 8];
            };
            load_logs();
#pragma unroll
            for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) of_lane(table, n, i) = exp2_fast(logs[n][i]);
            __syncwarp();
            multiply_before(smem, table, slab, own, sums, more_sums);
            load_logs();
            sum_up_to(logs);
#pragma unroll
            for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float decay = exp2_fast(logs[n][i]);
                    of_q[n][i] = scale * decay * of_q[n][i] + of_lane(sums, n, i);
                    of_k[n][i] = decay * of_k[n][i] + of_lane(more_sums, n, i);
                }
            multiply_behind(smem, table, slab, own, sums);
            load_logs();
            sum_behind(logs);
#pragma unroll
            for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 8 * n + 2 * quad_lane() + i % 2;
                    of_w[n][i] *= exp2_fast(logs[n][i]);
                    of_end[i / 2] += of_w[n][i] * element_of(smem.written[slab], token, own + i / 2 * 8);
                    of_w[n][i] += of_lane(sums, n, i);
                }
            set_zero(decays);  // once more, so that they need no registers above
            publish_writes();
            __syncthreads();  // nobody reads decays any more
            if (next.steps > 0) copy_values(next);
            commit_copies();
        }

        // dQ and dK as they are without norms, and dc in the place of c.
        OfTokens of_query, of_key, of_rate;
        float of_speed = 0.0f;
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
            const Fragment read = load_left_transposed(q_tile, 16 * q, first),
                           erased = load_left_transposed(k_tile, 16 * q, first),
                           written = load_left_transposed(written_tile, 16 * q, first);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = 2 * q + h;
                const float2 rates = pair_at(smem.rate, n);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int word = 2 * h + i / 2, j = i % 2;
                    const auto from = [&](const Fragment& f) {
                        return j == 0 ? low_of(f.at[word]) : high_of(f.at[word]);
                    };
                    float &x = of_q[n][i], &y = of_k[n][i], &z = of_w[n][i], &decay = decays[n][i];
                    const float down = exp2_fast(decay), up = exp2_fast(-decay);
                    const float of_read = from(read) * x, of_erased = from(erased) * y, of_written = from(written) * z,
                                change = of_read + of_erased - of_written;
                    z *= up, x *= down, y = (j == 0 ? rates.x : rates.y) * z - y * down;
                    of_speed += change * decay;
                    decay = change;
                    const float of_both = of_erased + of_written, of_written_key = from(keys[q]) * z;
                    of_query[n][j] = i < 2 ? of_read : of_query[n][j] + of_read;
                    of_key[n][j] = i < 2 ? of_both : of_key[n][j] + of_both;
                    of_rate[n][j] = i < 2 ? of_written_key : of_rate[n][j] + of_written_key;
                }
            }
        }
        int lane = lane_id();  // the place is found anew too
        asm volatile("" : "+r"(lane));
        const int column = (lane & 16) * 2 + (lane & 8) * 2 + (lane & 4) * 2 + 2 * (lane % 4);
        const auto write_sums = [&](int kind, OfTokens& sums) {
            reinterpret_cast<float2&>(smem.of_warps[warp][kind][column]) = sum_columns(sums);
        };
        if constexpr (HAS_NORM) write_sums(OF_QUERY, of_query), write_sums(OF_KEY, of_key);
        write_sums(OF_RATE, of_rate);

#pragma unroll
        for (int i = 0; i < 2; ++i)
            of_end[i] = sum_of_quad(of_end[i]) + of_states[i];
        sum_from(decays, of_end);
        OfChannels of_bias = {};
        if constexpr (LOG_DECAY != LogDecay::given) {
            if constexpr (LOG_DECAY == LogDecay::softplus) {
                // That of a_log is the sum of log-decays and their gradients, and so of c and dc. The part of c - m is
                // there. That of m is what m grows by from block to block, times all dc behind.
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float sum = halves.at(CHUNK_LEN / 8 - 1, i) * of_end[i];
#pragma unroll
                    for (int n = 0; n < CHUNK_LEN / 8; n += 2)
                        sum += (halves.at(n, i) + (n > 0 ? halves.at(n - 1, i) : 0.0f)) * decays[n][2 * i];
                    of_speed += quad_lane() == 0 ? sum : 0.0f;
                }
                of_speed *= 1.0f / LOG2_E;
            }
            keep_tokens(decays, steps);
            ChannelSums gates;
            smem.w.load(gates, slab, first);
            if (LOG_DECAY == LogDecay::softplus && !in_frame) of_speed = of_speed_of(decays, gates, gate, bias);
            through_gates(decays, gates, gate, bias, of_bias);
            if constexpr (LOG_DECAY == LogDecay::bounded) {  // there it is that of gates and their gradients
                of_speed = 0.0f;
#pragma unroll
                for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) of_speed += decays[n][i] * (gates[n][i] + bias[i / 2]);
            }
        }
        smem.w.store(decays, slab, first);
        const i64 place = here.slot * heads + head;
        if constexpr (LOG_DECAY != LogDecay::given) {
#pragma unroll
            for (int delta = 1; delta < 32; delta *= 2) of_speed += __shfl_xor_sync(ALL_LANES, of_speed, delta);
            if (lane_id() == 0) smem.of_speed[warp] = of_speed;
            __syncwarp();
        }
        if constexpr (HAS_BIAS)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float sum = sum_of_quad(of_bias[i]);
                if (quad_lane() == 0) bias_chunks[place * HEAD_SIZE + own_channel + 8 * i] = sum;
            }
        __syncthreads();  // the sums are there

        if (threadIdx.x < 3 * CHUNK_LEN) {
            const int kind = threadIdx.x / CHUNK_LEN;
            float sum = 0.0f;
            if (HAS_NORM || kind == OF_RATE)
#pragma unroll
                for (int i = 0; i < WARPS; ++i) sum += smem.of_warps[i][kind][own_token];
            sum *= kind == OF_QUERY ? smem.of_q[own_token] : smem.of_k[own_token];
            if (kind > OF_RATE) smem.along[kind - 1][own_token] = sum;
            else if (own_token < steps)
                dbeta[(here.row + own_token) * heads + head] =
                    from_float<T_BETA>(sum * slope_of_rate(smem.rate[own_token]));
        } else if (LOG_DECAY != LogDecay::given && threadIdx.x == 3 * CHUNK_LEN) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) sum += smem.of_speed[i];
            a_log_chunks[place] = sum;
        }
        if constexpr (HAS_NORM) __syncthreads();  // what is along queries and keys is known
        else __syncwarp();
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = 2 * q + h;
                const float2 of_query = pair_at(smem.of_q, n), of_key = pair_at(smem.of_k, n),
                             along_query = pair_at(smem.along[0], n), along_key = pair_at(smem.along[1], n);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    unsigned &query = queries[q].at[2 * h + i], &key = keys[q].at[2 * h + i];
                    float2 x = {of_q[n][2 * i], of_q[n][2 * i + 1]}, y = {of_k[n][2 * i], of_k[n][2 * i + 1]};
                    if constexpr (HAS_NORM) {
                        x.x -= along_query.x * low_of(query), x.y -= along_query.y * high_of(query);
                        y.x -= along_key.x * low_of(key), y.y -= along_key.y * high_of(key);
                        x.x *= of_query.x, x.y *= of_query.y, y.x *= of_key.x, y.y *= of_key.y;
                    }
                    query = pack(x.x, x.y), key = pack(y.x, y.y);
                }
            }
            store_block_transposed(q_tile, 16 * q, first, queries[q]);
            store_block_transposed(k_tile, 16 * q, first, keys[q]);
        }
        if (next.steps > 0) load_gate(next.head);  // it would be waited for at the next chunk's start
        synchronize_group();  // the gradients are in their places

        const unsigned stride = static_cast<unsigned>(heads) * HEAD_SIZE;
        const i64 start = (here.row * heads + head) * HEAD_SIZE + slab * TILE_COLUMNS;
        const auto write_rows = [&](T_IO* target, const Slab<CHUNK_LEN>& from) {
            uint4 held[CHUNK_LEN / ROW_STEP];
#pragma unroll
            for (int i = 0; i < CHUNK_LEN / ROW_STEP; ++i)
                held[i] = from.units[row + i * ROW_STEP][unit ^ row % 8];
#pragma unroll
            for (int i = 0; i < CHUNK_LEN / ROW_STEP; ++i)
                if (row + i * ROW_STEP < steps)
                    write_global(target + start + (row + i * ROW_STEP) * stride + 8 * unit, held[i]);
        };
        write_rows(dr, smem.q[slab]), write_rows(dk, smem.k[slab]);
        uint4 held[CHUNK_LEN / Gates::STEP];
#pragma unroll
        for (int i = 0; i < CHUNK_LEN / Gates::STEP; ++i)
            held[i] = smem.w.unit(slab, gate_row + i * Gates::STEP, gate_unit);
#pragma unroll
        for (int i = 0; i < CHUNK_LEN / Gates::STEP; ++i)
            if (gate_row + i * Gates::STEP < steps)
                write_global(dw + start + (gate_row + i * Gates::STEP) * stride + Gates::PER_UNIT * gate_unit, held[i]);
        if (next.steps == 0) break;
        copy_keys(next);  // each thread where it has read
        commit_copies();
    }
    wait_for_copies<0>();
}
