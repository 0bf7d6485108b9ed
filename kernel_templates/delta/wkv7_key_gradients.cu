// RWKV-7 time mixing, gradients of the keys' side for all chunks at once: the end of the split form's backward. With
// the operands of wkv7_chunk.cuh, S' and U from wkv7_scan forwards, E' and dX from backwards, dArk .. from
// wkv7_token_gradients,
//
//     dR = dArk K + dArb B + dY S'          dA = dAak K + dAab B + dX S'
//     dK = dArk^T R + dAak^T A + V E'       dB = dArb^T R + dAab^T A + U E'
//
// and dr, da, dk, db are dR, dA, dK, dB times the factors that made R, A, K, B. With z = sum_v S' * (E' + dY^T R +
// dX^T A) the gradient of token t's log-decay is
//
//     z - sum_(s < t) (R dR - K dK - B dB)_s - sum_(s <= t) (A dA)_s
//
// from the rounded operands and the unrounded dR .. dB, so that what belongs to pairs of tokens on one side of t
// cancels exactly, as both of its places hold the same products.
//
//   r w k v a b  [batch, tokens, heads, K or V]  in         dy  [batch, tokens, heads, V]  T_IO  in
//   u dx         [batch, tokens, heads, V]  T_IO  in        states e  [slots, heads, SLABS, VALUES] rows  T_IO  in
//   gradients    [slots, heads, 4] triangles  in: dArk dArb dAak dAab
//   halved       [slots, heads, SLABS]  in: the slabs that are left to wkv7_key_gradients_by_halves
//   dr dk da db  T_IO, dw  T_W  [batch, tokens, heads, K]  out
//
// Grid (chunks x slabs of 64 channels, heads, sequences), a block per chunk, head and slab. It goes over the values in
// steps of VALUE_STEP, two ahead. Half of the warps make dR and dA, the others dK and dB, for 32 tokens and 32 channels
// each. These sums meet in shared memory, and a thread finishes a pair of channels over a segment of tokens, as it made
// the operands.
#include "wkv7_operands.cuh"
#include "pair_rows.cuh"

constexpr int VALUE_STEP = 32;
constexpr int VALUE_STEPS = ceil_div(VALUE_SIZE, VALUE_STEP);
constexpr int WARP_CHANNELS = 32;
constexpr int TOKEN_WARPS = CHUNK_LEN / 32;
constexpr int PITCH = TILE_COLUMNS + 8;
constexpr int STAGES = 3;
static_assert(NUM_THREADS == 4 * CHUNK_LEN, "num_threads must be four times chunk_len");

union Stage {
    struct {
        Slab<CHUNK_LEN> v_dy, u_dx;  // VALUE_STEP columns of each
        Slab<VALUE_STEP> state, e;
    } values;
    Triangle gradients[4];  // the last stage: dArk dArb dAak dAab
};
using Sums = float[CHUNK_LEN][PITCH];
struct Smem {
    Operands operands;
    union {
        struct {
            Stage stage;  // it is on its way while the operands are made
            RawKeys raw;
        } first;
        Stage stages[STAGES];
        struct { Sums r, a, k, b; } sums;  // dR dA dK dB
    };
    float2 totals[SEGMENTS][PAIRS];
    float2 state_terms[WARPS + TOKEN_WARPS][PAIRS];  // z, in parts
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_key_gradients(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_IO* __restrict__ dy,
    const i64* __restrict__ cu_seqlens, const T_IO* __restrict__ u, const T_IO* __restrict__ dx,
    const uint4* __restrict__ states, const uint4* __restrict__ e, const uint4* __restrict__ gradients,
    const int* __restrict__ halved, T_IO* __restrict__ dr, T_W* __restrict__ dw, T_IO* __restrict__ dk,
    T_IO* __restrict__ da, T_IO* __restrict__ db,
    Strides r_strides, Strides w_strides, Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides,
    Strides dy_strides, i64 tokens, i64 heads, i64 sequences, float scale, int first_chunk) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that what all threads share evenly needs no test
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 slot = slot_of(blockIdx.x / SLABS, first_chunk, tokens), head = blockIdx.y;
    const int slab = blockIdx.x % SLABS, first_channel = slab * TILE_COLUMNS;
    const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
    if (chunk.steps == 0 || !has_channel(first_channel)) return;
    if (LARGEST_DECAY > 0 && halved[(slot * heads + head) * SLABS + slab]) return;
    const int steps = chunk.steps;
    const unsigned warp = warp_id();  // unsigned, so that quotients and remainders are shifts
    const i64 token = chunk.span.begin + chunk.token;
    const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
    const KeyRows keys = {{r + start(r_strides), r_strides.token}, {a + start(a_strides), a_strides.token},
                          {k + start(k_strides), k_strides.token}, {b + start(b_strides), b_strides.token}};
    w += start(w_strides);
    const i64 row_of_outputs = (chunk.span.batch * tokens + token) * heads + head;
    dr += row_of_outputs * HEAD_SIZE, dw += row_of_outputs * HEAD_SIZE, dk += row_of_outputs * HEAD_SIZE;
    da += row_of_outputs * HEAD_SIZE, db += row_of_outputs * HEAD_SIZE;
    const i64 image = ((slot * heads + head) * SLABS + slab) * (VALUES * 8);
    states += image + threadIdx.x, e += image + threadIdx.x;
    gradients += (slot * heads + head) * (4 * TRIANGLE_UNITS) + threadIdx.x;

    const bool is_query = warp < WARPS / 2;  // dR and dA, of queries; else dK and dB, of keys
    const int first_block = warp / 2 % TOKEN_WARPS * 2;  // of 16 tokens
    const int first_column = warp % 2 * WARP_CHANNELS;
    const auto operand_r = tile_of(smem.operands.r), operand_a = tile_of(smem.operands.a);
    const auto operand_k = tile_of(smem.operands.k), operand_b = tile_of(smem.operands.b);

    RawDecays raw_w;
    copy_keys(smem.first.raw, keys, first_channel, steps), commit_copies();
    raw_w.load(w, w_strides.token, steps, first_channel);
    // Half of the threads copy V and U, the others dY and dX.
    const bool copies_gradients = threadIdx.x >= NUM_THREADS / 2;
    const i64 row = row_of_outputs * VALUE_SIZE;
    ValueColumns<VALUE_STEP, NUM_THREADS / 2, T_IO> values(
        copies_gradients ? dy + start(dy_strides) : v + start(v_strides),
        copies_gradients ? dy_strides.token : v_strides.token);
    ValueColumns<VALUE_STEP, NUM_THREADS / 2, T_IO> solutions((copies_gradients ? dx : u) + row, heads * VALUE_SIZE);
    const int copied_column = copies_gradients ? VALUE_STEP : 0;
    const auto load_stage = [&](Stage& stage, int step) {  // one step after another
        if (step < VALUE_STEPS) {
            auto& to = stage.values;
            values.copy(to.v_dy, copied_column, steps), solutions.copy(to.u_dx, copied_column, steps);
            copy_units(to.state, states), copy_units(to.e, e);
            states += VALUE_STEP * 8, e += VALUE_STEP * 8;
        } else if (step == VALUE_STEPS) {
            copy_units(stage.gradients, gradients);
        }
        commit_copies();
    };
    load_stage(smem.stages[0], 0);
    RateSums rates;
    sum_rates(rates, smem.totals, raw_w, steps, first_channel);
    wait_for_copies<1>();
    __syncthreads();  // the raw rows are there
    const Frame frame = frame_of(smem.totals);
    write_operands<Order::lanes>(rates, frame.origin, smem.first.raw, smem.operands, first_channel, scale);
    __syncthreads();  // the operands are there, and nobody reads the raw rows any more
    load_stage(smem.stages[1], 1);
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;  // as sum_rates shares the work
    smem.totals[segment][index] = frame.origin;  // which this thread alone reads, at the end

    // dR and dA, or dK and dB; products of S' and E'.
    Accumulator first[2][WARP_CHANNELS / 8] = {}, second[2][WARP_CHANNELS / 8] = {};
    constexpr int UNITS = TILE_COLUMNS / 8;  // of a row of state
    float overlap[8] = {};
    int place = 0;  // step % STAGES
#pragma unroll 1
    for (int step = 0; step < VALUE_STEPS; ++step) {
        wait_for_copies<1>();
        __syncthreads();  // this step's tiles are there, and nobody reads the last one's any more
        const auto& stage = smem.stages[place].values;
        Stage& last_stage = smem.stages[place == 0 ? STAGES - 1 : place - 1];
        place = place == STAGES - 1 ? 0 : place + 1;
        const auto v_dy = tile_of(stage.v_dy), u_dx = tile_of(stage.u_dx);
        const auto of_side = tile_of(is_query ? stage.state : stage.e);
#pragma unroll
        for (int c = 0; c < VALUE_STEP; c += 16) {
            Fragment with_first[2], with_second[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = is_query ? VALUE_STEP + c : c;
                with_first[i] = load_left(v_dy, 16 * (first_block + i), column);
                with_second[i] = load_left(u_dx, 16 * (first_block + i), column);
            }
#pragma unroll
            for (int n = 0; n < WARP_CHANNELS / 16; ++n) {
                const Right block = load_right(of_side, c, first_column + 16 * n);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    multiply_add(&first[i][2 * n], with_first[i], block);
                    multiply_add(&second[i][2 * n], with_second[i], block);
                }
            }
            if (c == 0) load_stage(last_stage, step + 2);  // while the tensor cores are busy
        }
#pragma unroll
        for (int i = threadIdx.x / UNITS; i < VALUE_STEP; i += NUM_THREADS / UNITS) {
            const int unit = threadIdx.x % 8 ^ i % 8;
            const uint4 x = stage.state.units[i][unit], y = stage.e.units[i][unit];
            const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                overlap[2 * j] += low_of(xs[j]) * low_of(ys[j]);
                overlap[2 * j + 1] += high_of(xs[j]) * high_of(ys[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int delta = UNITS; delta < 32; delta *= 2) overlap[j] += __shfl_xor_sync(0xffffffffu, overlap[j], delta);
    if (lane_id() < UNITS)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            smem.state_terms[warp][4 * lane_id() + j] = {overlap[2 * j], overlap[2 * j + 1]};

    if (is_query) {  // the rest of z
        float2 sums[WARP_CHANNELS / 8] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < WARP_CHANNELS / 16; ++n) {
                const Fragment x = load_left(operand_r, 16 * (first_block + i), first_column + 16 * n);
                const Fragment y = load_left(operand_a, 16 * (first_block + i), first_column + 16 * n);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = 2 * n + j / 2, h = j % 2 * 2;
                    sums[at].x += low_of(x.at[j]) * first[i][at][h] + low_of(y.at[j]) * second[i][at][h];
                    sums[at].y += high_of(x.at[j]) * first[i][at][h + 1] + high_of(y.at[j]) * second[i][at][h + 1];
                }
            }
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 8; ++n) {
#pragma unroll
            for (int delta = 4; delta < 32; delta *= 2) {
                sums[n].x += __shfl_xor_sync(0xffffffffu, sums[n].x, delta);
                sums[n].y += __shfl_xor_sync(0xffffffffu, sums[n].y, delta);
            }
            if (group() == 0)
                smem.state_terms[WARPS + first_block / 2][first_column / 2 + 4 * n + quad_lane()] = sums[n];
        }
    }
    wait_for_copies<0>();
    __syncthreads();  // the gradients of the token matrices are there
    const Triangle(&matrices)[4] = smem.stages[VALUE_STEPS % STAGES].gradients;

    // dR += dArk K + dArb B, dA += dAak K + dAab B; dK += dArk^T R + dAak^T A, dB += dArb^T R + dAab^T A. From column q
    // of the blocks, or row q of the transposed ones, to the warp's blocks [begin, end).
    const auto add_blocks = [&](int q, int begin, int end) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const auto of_first = tile_of(matrices[is_query ? j : 2 * j]);
            const auto of_second = tile_of(matrices[is_query ? 2 + j : 2 * j + 1]);
            const auto with = is_query ? (j == 0 ? operand_k : operand_b) : (j == 0 ? operand_r : operand_a);
            Fragment to_first[2], to_second[2];
            if (is_query) {
#pragma unroll
                for (int i = begin; i < end; ++i) {
                    to_first[i] = load_left(of_first, first_block + i, q);
                    to_second[i] = load_left(of_second, first_block + i, q);
                }
            } else {
#pragma unroll
                for (int i = begin; i < end; ++i) {
                    to_first[i] = load_left_transposed(of_first, q, first_block + i);
                    to_second[i] = load_left_transposed(of_second, q, first_block + i);
                }
            }
#pragma unroll
            for (int n = 0; n < WARP_CHANNELS / 16; ++n) {
                const Right block = load_right(with, 16 * q, first_column + 16 * n);
#pragma unroll
                for (int i = begin; i < end; ++i) {
                    multiply_add(&first[i][2 * n], to_first[i], block);
                    multiply_add(&second[i][2 * n], to_second[i], block);
                }
            }
        }
    };
    if (is_query) add_blocks(first_block + 1, 1, 2);  // the one that lies on the diagonal alone
    else add_blocks(first_block, 0, 1);
    const int end_block = is_query ? first_block + 1 : BLOCKS;
#pragma unroll 1
    for (int q = is_query ? 0 : first_block + 1; q < end_block; ++q) add_blocks(q, 0, 2);
    __syncthreads();  // nobody reads these gradients any more
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * first_block + 8 * i + group(), h = i % 2 * 2;
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 8; ++n) {
            const int column = first_column + 8 * n + 2 * quad_lane();
            const auto write = [&](Sums& sums, const Accumulator& x) {
                *reinterpret_cast<float2*>(&sums[row][column]) = {x[h], x[h + 1]};
            };
            write(is_query ? smem.sums.r : smem.sums.k, first[i / 2][n]);
            write(is_query ? smem.sums.a : smem.sums.b, second[i / 2][n]);
        }
    }
    __syncthreads();  // the sums are there

    // Gradients of the inputs, of a thread's pair of channels and segment of tokens, and what tokens take from z.
    const int pair = column_pair<Order::lanes>(index), channel = first_channel + 2 * index;
    float2 taken[SEGMENT_LEN], taken_first[SEGMENT_LEN], sum = {0.0f, 0.0f};  // by all, and by A dA, of a token
    Words<T_IO, 2> results[SEGMENT_LEN][4];  // all is made before any is written: a row that may be missing is a branch
    const float2 origin = smem.totals[segment][index];
    float2 rate = {0.0f, 0.0f}, grown = {exp2_fast(origin.x), exp2_fast(origin.y)};
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const int row = segment * SEGMENT_LEN + i;
        const auto read = [&](const Sums& sums) { return *reinterpret_cast<const float2*>(&sums[row][2 * pair]); };
        const auto times = [&](Slab<CHUNK_LEN>& operand, float2 x) -> float2 {
            const unsigned word = *word_of(operand, row, pair);
            return {low_of(word) * x.x, high_of(word) * x.y};
        };
        const float2 d_r = read(smem.sums.r), d_a = read(smem.sums.a), d_k = read(smem.sums.k), d_b = read(smem.sums.b);
        const float2 of_r = times(smem.operands.r, d_r), of_a = times(smem.operands.a, d_a);
        const float2 of_k = times(smem.operands.k, d_k), of_b = times(smem.operands.b, d_b);
        taken_first[i] = of_a;
        taken[i] = {of_r.x + of_a.x - (of_k.x + of_b.x), of_r.y + of_a.y - (of_k.y + of_b.y)};
        sum.x += taken[i].x, sum.y += taken[i].y;

        const float2 before = grown;
        rate.x += decay_rate<DECAY>(raw_w.at(i, 0)), rate.y += decay_rate<DECAY>(raw_w.at(i, 1));
        const float2 c = {origin.x + RATE_UNIT * rate.x, origin.y + RATE_UNIT * rate.y};
        const float2 shrink = {exp2_fast(-c.x), exp2_fast(-c.y)};
        grown = {exp2_fast(c.x), exp2_fast(c.y)};
        results[i][0] = rounded<T_IO>({d_r.x * (grown.x * scale), d_r.y * (grown.y * scale)});
        results[i][1] = rounded<T_IO>({d_a.x * before.x, d_a.y * before.y});
        results[i][2] = rounded<T_IO>({d_k.x * shrink.x, d_k.y * shrink.y});
        results[i][3] = rounded<T_IO>({d_b.x * shrink.x, d_b.y * shrink.y});
    }
    smem.totals[segment][index] = sum;
    __syncthreads();  // the segments' sums are there
    float2 left = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < WARPS + TOKEN_WARPS; ++i) {
        const float2 part = smem.state_terms[i][pair];
        left.x += part.x, left.y += part.y;
    }
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s)
        if (s < segment) left.x -= smem.totals[s][index].x, left.y -= smem.totals[s][index].y;
    const int present = steps - segment * SEGMENT_LEN;
    const unsigned row_stride = heads * HEAD_SIZE;  // offsets within a chunk have 32 bits
    const unsigned first_row = segment * SEGMENT_LEN * row_stride;
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i)
        if (i < present) {
            const unsigned row = first_row + i * row_stride;
            write_pair(dr + row, channel, results[i][0]), write_pair(da + row, channel, results[i][1]);
            write_pair(dk + row, channel, results[i][2]), write_pair(db + row, channel, results[i][3]);
        }
    Words<T_W, 2> slopes[SEGMENT_LEN];
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const float x = (left.x - taken_first[i].x) * log_decay_slope<DECAY>(raw_w.at(i, 0));
        const float y = (left.y - taken_first[i].y) * log_decay_slope<DECAY>(raw_w.at(i, 1));
        left.x -= taken[i].x, left.y -= taken[i].y;
        slopes[i] = rounded<T_W>({x, y});
    }
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i)
        if (i < present) write_pair(dw + (first_row + i * row_stride), channel, slopes[i]);
}
