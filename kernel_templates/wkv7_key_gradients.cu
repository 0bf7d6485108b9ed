// RWKV-7 time mixing, gradients of the keys' side for all chunks at once: the end of the split form's backward. With the
// operands of wkv7_chunk.cuh, S' and U from wkv7_scan forwards, E' and dX from backwards, dArk .. from
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
//   u dx         [batch, tokens, heads, V]  bf16  in        states e  [slots, heads, SLABS, VALUES] rows  bf16  in
//   gradients    [slots, heads, 4] triangles  in: dArk dArb dAak dAab
//   dr dk da db  T_IO, dw  T_W  [batch, tokens, heads, K]  out
//
// Grid (slots x slabs of 64 channels, heads), a block per chunk, head and slab. It goes over the values in steps of
// VALUE_STEP, one ahead. Half of the warps make dR and dA, the others dK and dB, for 32 tokens and 32 channels each.
#include "wkv7_operands.cuh"

constexpr int VALUE_STEP = 32;
constexpr int VALUE_STEPS = ceil_div(VALUE_SIZE, VALUE_STEP);
constexpr int WARP_CHANNELS = 32;
constexpr int TOKEN_WARPS = CHUNK_LEN / 32;
constexpr int PITCH = SLAB + 8;
static_assert(NUM_THREADS == 4 * CHUNK_LEN, "num_threads must be four times chunk_len");

union Stage {
    struct {
        Slab<CHUNK_LEN> v_dy, u_dx;  // VALUE_STEP columns of each
        Slab<VALUE_STEP> state, e;
    } values;
    Triangle gradients[4];  // the last stage: dArk dArb dAak dAab
};
using Products = float[CHUNK_LEN][PITCH];
struct Smem {
    Operands operands;
    union {
        struct {
            Stage first_stage;  // it is on its way while the operands are made
            RawKeys raw;
        };
        Stage stages[2];
        struct { Products a, k; } products;  // A dA, K dK + B dB
    };
    union {
        float growth[CHUNK_LEN + 1][PITCH];  // e^(c_t - m), the row before the first token first
        Products r_products;                 // R dR
    };
    float2 totals[SEGMENTS][PAIRS];
    float2 state_terms[WARPS + TOKEN_WARPS][PAIRS];  // z, in parts
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// Eight neighbouring channels to a row in global memory, where they exist.
__device__ inline void write_channels(T_IO* row, int channel, const float (&x)[8]) {
    if constexpr (HEAD_SIZE % 8 != 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (channel + i < HEAD_SIZE) row[channel + i] = from_float<T_IO>(x[i]);
    } else if (channel < HEAD_SIZE) {
        write_global(row + channel, {pack_as<T_IO>(x[0], x[1]), pack_as<T_IO>(x[2], x[3]), pack_as<T_IO>(x[4], x[5]),
                                     pack_as<T_IO>(x[6], x[7])});
    }
}
// A pair of channels as one store, spelt out as write_global is.
__device__ inline void write_pair(T_W* target, float x, float y) {
    if constexpr (sizeof(T_W) == 4) asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(x), "f"(y) : "memory");
    else asm volatile("st.global.b32 [%0], %1;" ::"l"(target), "r"(pack_as<T_W>(x, y)) : "memory");
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_key_gradients(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_IO* __restrict__ dy,
    const i64* __restrict__ cu_seqlens, const bf16* __restrict__ u, const bf16* __restrict__ dx,
    const uint4* __restrict__ states, const uint4* __restrict__ e, const uint4* __restrict__ gradients,
    T_IO* __restrict__ dr, T_W* __restrict__ dw, T_IO* __restrict__ dk, T_IO* __restrict__ da, T_IO* __restrict__ db,
    Strides r_strides, Strides w_strides, Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides,
    Strides dy_strides, i64 tokens, i64 heads, i64 sequences, float scale) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 slot = blockIdx.x / SLABS, head = blockIdx.y;
    const int slab = blockIdx.x % SLABS, first_channel = slab * SLAB;
    const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
    if (chunk.steps == 0) return;
    const int warp = warp_id(), steps = chunk.steps;
    const i64 token = chunk.span.begin + chunk.token;
    const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
    const KeyRows keys = {{r + start(r_strides), r_strides.token}, {a + start(a_strides), a_strides.token},
                          {k + start(k_strides), k_strides.token}, {b + start(b_strides), b_strides.token}};
    const Rows<T_W> decays = {w + start(w_strides), w_strides.token};
    const i64 key_stride = heads * HEAD_SIZE, value_stride = heads * VALUE_SIZE;  // what is contiguous
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
    copy_keys(smem.raw, keys, first_channel, steps), commit_copies();
    raw_w.load(decays, first_channel, steps);
    // Half of the threads copy V and U, the others dY and dX.
    const bool copies_gradients = threadIdx.x >= NUM_THREADS / 2;
    const i64 row = row_of_outputs * VALUE_SIZE;
    const ValueColumns<VALUE_STEP, NUM_THREADS / 2, T_IO> values(
        copies_gradients ? dy + start(dy_strides) : v + start(v_strides),
        copies_gradients ? dy_strides.token : v_strides.token);
    const ValueColumns<VALUE_STEP, NUM_THREADS / 2, bf16> solutions((copies_gradients ? dx : u) + row, value_stride);
    const int copied_column = copies_gradients ? VALUE_STEP : 0;
    const auto load_stage = [&](int step) {
        Stage& stage = smem.stages[step % 2];
        if (step < VALUE_STEPS) {
            auto& to = stage.values;
            const int value = step * VALUE_STEP;
            values.copy(to.v_dy, copied_column, value, steps), solutions.copy(to.u_dx, copied_column, value, steps);
            copy_units(to.state, states + value * 8), copy_units(to.e, e + value * 8);
        } else if (step == VALUE_STEPS) {
            copy_units(stage.gradients, gradients);
        }
        commit_copies();
    };
    load_stage(0);
    RateSums rates;
    sum_rates(rates, smem.totals, raw_w, first_channel, steps);
    wait_for_copies<1>();
    __syncthreads();  // the raw rows are there
    write_operands<Order::lanes>(rates, smem.totals, smem.raw, smem.operands, first_channel, scale,
                                 [&](int row, int pair, float2 grown) {
                                     *reinterpret_cast<float2*>(&smem.growth[row][2 * pair]) = grown;
                                 });
    __syncthreads();  // the operands are there, and nobody reads the raw rows any more

    // dR and dA, or dK and dB; products of S' and E'.
    Accumulator first[2][WARP_CHANNELS / 8] = {}, second[2][WARP_CHANNELS / 8] = {};
    constexpr int UNITS = SLAB / 8;  // of a row of state
    float overlap[8] = {};
#pragma unroll 1
    for (int step = 0; step < VALUE_STEPS; ++step) {
        wait_for_copies<0>();
        __syncthreads();  // this step's tiles are there, and nobody reads the last one's any more
        load_stage(step + 1);
        const auto& stage = smem.stages[step % 2].values;
        const auto v_dy = tile_of(stage.v_dy), u_dx = tile_of(stage.u_dx);
        const auto of_side = tile_of(is_query ? stage.state : stage.e);
#pragma unroll
        for (int c = 0; c < VALUE_STEP; c += 16) {
            Fragment with_first[2], with_second[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = is_query ? VALUE_STEP + c : c;
                with_first[i] = load_left(v_dy, 16 * (first_block + i), column);
                convert_raw(with_first[i].at);
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

    auto& first_operand = is_query ? smem.operands.r : smem.operands.k;
    auto& second_operand = is_query ? smem.operands.a : smem.operands.b;
    if (is_query) {  // the rest of z
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 8; ++n) {
            float2 sum = {0.0f, 0.0f};
            const int pair = first_column / 2 + 4 * n + quad_lane();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * first_block + 8 * i + group(), h = i % 2 * 2;
                const unsigned x = *word_of(first_operand, row, pair), y = *word_of(second_operand, row, pair);
                sum.x += low_of(x) * first[i / 2][n][h] + low_of(y) * second[i / 2][n][h];
                sum.y += high_of(x) * first[i / 2][n][h + 1] + high_of(y) * second[i / 2][n][h + 1];
            }
#pragma unroll
            for (int delta = 4; delta < 32; delta *= 2) {
                sum.x += __shfl_xor_sync(0xffffffffu, sum.x, delta);
                sum.y += __shfl_xor_sync(0xffffffffu, sum.y, delta);
            }
            if (group() == 0) smem.state_terms[WARPS + first_block / 2][pair] = sum;
        }
    }
    wait_for_copies<0>();
    __syncthreads();  // the gradients of the token matrices are there
    const Triangle(&matrices)[4] = smem.stages[VALUE_STEPS % 2].gradients;
    const auto d_rk = tile_of(matrices[0]), d_rb = tile_of(matrices[1]);
    const auto d_ak = tile_of(matrices[2]), d_ab = tile_of(matrices[3]);

    // dR += dArk K + dArb B, dA += dAak K + dAab B; dK += dArk^T R + dAak^T A, dB += dArb^T R + dAab^T A.
    const auto with_first_sum = is_query ? operand_k : operand_r, with_second_sum = is_query ? operand_b : operand_a;
    const int last_block = is_query ? first_block + 1 : BLOCKS - 1;
#pragma unroll 1
    for (int q = is_query ? 0 : first_block; q <= last_block; ++q) {
        Fragment to_first[2][2] = {}, to_second[2][2] = {};  // zero across the diagonal: branches around products cost more
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int p = first_block + i;
            if (is_query && q <= p) {
                to_first[i][0] = load_left(d_rk, p, q), to_first[i][1] = load_left(d_rb, p, q);
                to_second[i][0] = load_left(d_ak, p, q), to_second[i][1] = load_left(d_ab, p, q);
            }
            if (!is_query && q >= p) {
                to_first[i][0] = load_left_transposed(d_rk, q, p), to_first[i][1] = load_left_transposed(d_ak, q, p);
                to_second[i][0] = load_left_transposed(d_rb, q, p), to_second[i][1] = load_left_transposed(d_ab, q, p);
            }
        }
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 16; ++n) {
            const Right blocks[2] = {load_right(with_first_sum, 16 * q, first_column + 16 * n),
                                     load_right(with_second_sum, 16 * q, first_column + 16 * n)};
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    multiply_add(&first[i][2 * n], to_first[i][j], blocks[j]);
                    multiply_add(&second[i][2 * n], to_second[i][j], blocks[j]);
                }
        }
    }

    // Gradients of the inputs; then the sums become products with the operands.
    T_IO* const first_gradient = is_query ? dr : dk;
    T_IO* const second_gradient = is_query ? da : db;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * first_block + 8 * i + group(), h = i % 2 * 2;
        float of_first[8], of_second[8];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float(&x)[4] = first[i / 2][n], (&y)[4] = second[i / 2][n];
            const int column = first_column + 8 * n + 2 * quad_lane();
            const float2 grown = *reinterpret_cast<const float2*>(&smem.growth[row + 1][column]);
            float2 for_first = {grown.x * scale, grown.y * scale};
            float2 for_second = *reinterpret_cast<const float2*>(&smem.growth[row][column]);
            if (!is_query) for_first = for_second = {reciprocal(grown.x), reciprocal(grown.y)};
            of_first[2 * n] = x[h] * for_first.x, of_first[2 * n + 1] = x[h + 1] * for_first.y;
            of_second[2 * n] = y[h] * for_second.x, of_second[2 * n + 1] = y[h + 1] * for_second.y;
            const unsigned with_x = *word_of(first_operand, row, column / 2);
            const unsigned with_y = *word_of(second_operand, row, column / 2);
            x[h] *= low_of(with_x), x[h + 1] *= high_of(with_x);
            y[h] *= low_of(with_y), y[h + 1] *= high_of(with_y);
        }
        const int channel = first_channel + first_column + 8 * quad_lane();
        if (row < steps) {
            write_channels(first_gradient + row * key_stride, channel, of_first);
            write_channels(second_gradient + row * key_stride, channel, of_second);
        }
    }
    __syncthreads();  // nobody reads growth or these gradients any more
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * first_block + 8 * i + group(), h = i % 2 * 2;
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 8; ++n) {
            const int column = first_column + 8 * n + 2 * quad_lane();
            const auto write = [&](Products& products, float x, float y) {
                *reinterpret_cast<float2*>(&products[row][column]) = {x, y};
            };
            const Accumulator &x = first[i / 2][n], &y = second[i / 2][n];
            if (is_query) write(smem.r_products, x[h], x[h + 1]), write(smem.products.a, y[h], y[h + 1]);
            else write(smem.products.k, x[h] + y[h], x[h + 1] + y[h + 1]);
        }
    }
    raw_w.load(decays, first_channel, steps);
    __syncthreads();  // the products are there

    // dw of a thread's pair of channels and segment of tokens, as the operands were made.
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS;
    const int pair = column_pair<Order::lanes>(index), channel = first_channel + 2 * index;
    float2 taken[SEGMENT_LEN], taken_first[SEGMENT_LEN], sum = {0.0f, 0.0f};  // by all, and by A dA, of a token
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const auto read = [&](const Products& products) {
            return *reinterpret_cast<const float2*>(&products[segment * SEGMENT_LEN + i][2 * pair]);
        };
        const float2 of_r = read(smem.r_products), of_a = read(smem.products.a), of_k = read(smem.products.k);
        taken_first[i] = of_a, taken[i] = {of_r.x + of_a.x - of_k.x, of_r.y + of_a.y - of_k.y};
        sum.x += taken[i].x, sum.y += taken[i].y;
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
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const int row = segment * SEGMENT_LEN + i;
        const float x = (left.x - taken_first[i].x) * log_decay_slope<DECAY>(raw_w.at(i, 0));
        const float y = (left.y - taken_first[i].y) * log_decay_slope<DECAY>(raw_w.at(i, 1));
        left.x -= taken[i].x, left.y -= taken[i].y;
        T_W* const target = dw + row * key_stride + channel;
        if constexpr (HEAD_SIZE % 2 == 0) {
            if (row < steps && channel < HEAD_SIZE) write_pair(target, x, y);
        } else {
            if (row < steps && channel < HEAD_SIZE) target[0] = from_float<T_W>(x);
            if (row < steps && channel + 1 < HEAD_SIZE) target[1] = from_float<T_W>(y);
        }
    }
}
