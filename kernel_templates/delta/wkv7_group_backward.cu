// RWKV-7 time mixing, backward, as wkv7_chunked_backward does it (arguments and formulas are there), with the large
// products by four warps at once: for head sizes of 64 and 128 and chunks of 32 on sm_90a.
//
// Every product has 64 rows: value rows of E and S', of which a warp holds 16; channels of the gradients of the keys'
// side; or tokens of two operands, one below the other ("twins"). The products of tokens with tokens are all four at
// once,
//
//     [R; A] [B; K]^T = [Arb Ark; Aab Aak]      [dY; dX] [V; U]^T = [dArk dArb; dAak dAab]
//     [dR; dA]^T = S'^T [dY; dX]^T + K^T [dArk; dAak]^T + B^T [dArb; dAab]^T
//     [dK; dB]^T = E'^T [V; U]^T + R^T [dArk dArb] + A^T [dAak dAab]
//
// The launch may begin beside that of the chunks by halves (overlap.cuh).
//
// The solve with Tm and the products with single token matrices stay a warp's own. Results go by way of the operands'
// tiles to the tensors, whole rows at a time: pieces of 32 bytes by single warps cost 0.2 ms in 1.9.
#include "wgmma.cuh"
#include "wkv7_key_side.cuh"
#include "wkv7_value_side.cuh"
#include "overlap.cuh"

static_assert(HEAD_SIZE % TILE_COLUMNS == 0 && VALUE_SIZE % TILE_COLUMNS == 0 && CHUNK_LEN == 32,
              "head sizes in steps of 64, chunks of 32");
static_assert(NUM_THREADS == 2 * VALUES, "num_threads must be twice the value size");

// Two tiles of tokens, one below the other: together the right side of products for both.
template <int COLUMNS> struct Twins { uint4 units[COLUMNS / TILE_COLUMNS][2][CHUNK_LEN][8]; };
constexpr int TWIN_STRIDE = 2 * CHUNK_LEN * 128;
using TwinTile = SlabsTile<TWIN_STRIDE>;
struct Twin {
    uint4 (*units)[8];  // of the first 64 columns
};
template <int COLUMNS> __device__ inline Twin twin_of(Twins<COLUMNS>& twins, int which) {
    return {twins.units[0][which]};
}
__device__ inline TwinTile tile_of(const Twin& twin) { return {shared_address(twin.units)}; }
__device__ inline uint4* unit_of(const Twin& twin, int row, int unit) {
    return &twin.units[unit / 8 * 2 * CHUNK_LEN + row][unit % 8 ^ row % 8];
}
__device__ inline unsigned* word_of(const Twin& twin, int row, int pair) {
    return reinterpret_cast<unsigned*>(unit_of(twin, row, pair / 4)) + pair % 4;
}
struct OperandTwins { Twin r, a, b, k; };

template <int COLUMNS> struct States { uint4 units[COLUMNS / TILE_COLUMNS][VALUES][8]; };
using StatesTile = SlabsTile<VALUES * 128>;

// The slopes of the decays, half made as they are with the rates, until a chunk's end.
using ChunkSlopes = float[CHUNK_LEN][CHANNELS];

struct __align__(1024) Smem {
    Twins<CHANNELS> r_a, b_k;
    Twins<VALUES> dy_dx, v_u;
    States<CHANNELS> state, e;               // S' and E'
    union {
        TokenMatrices matrices;
        uint4 d_matrices[2][CHUNK_LEN][8];   // later dArk dArb, below them dAak dAab
    };
    ChunkSlopes slopes;
    RawKeys raw;
    union {
        float2 totals[SEGMENTS][PAIRS];  // while the operands are made
        ValueTile dv;                    // later
    };
    float growth[CHUNK_LEN + 1][GROWTH_PITCH];  // e^(c_t - m), the row before the first token first; later dL/dc
    float state_terms[WARPS][CHANNELS];         // z, a part for each 16 value rows
    float factor[CHANNELS];
};

constexpr int COLUMNS = 2 * CHUNK_LEN / (WARPS / 4);  // of products of tokens with tokens, a group

// The blocks on and below the diagonals of a warp's rows: which tile of columns, and which block of it.
template <typename Visit> __device__ inline void for_each_block(int warp, Accumulator (&sums)[COLUMNS / 8],
                                                                Visit visit) {
    static_assert(COLUMNS % CHUNK_LEN == 0, "a group has whole tiles of columns");
    const int p = warp & 1, first = COLUMNS / CHUNK_LEN * (warp / 4);
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
        const int q = n % BLOCKS;
        if (q <= p) visit(first + n / BLOCKS, p, q, *reinterpret_cast<Accumulator(*)[2]>(&sums[2 * n]));
    }
}

// The 16-byte units of a chunk's rows, as the threads share them.
template <int COLUMNS> struct Units {
    static constexpr int PER_ROW = COLUMNS / 8, ROW_STEP = NUM_THREADS / PER_ROW, COUNT = CHUNK_LEN / ROW_STEP;

    __device__ static int row(int n) { return threadIdx.x / PER_ROW + n * ROW_STEP; }
    __device__ static int unit() { return threadIdx.x % PER_ROW; }
    __device__ static uint4* in(const Twin& twin, int n) { return unit_of(twin, row(n), unit()); }
    template <typename T, int PITCH> __device__ static uint4* in(T (*rows)[PITCH], int n) {
        return reinterpret_cast<uint4*>(&rows[row(n)][8 * unit()]);
    }

    // Tiles to tensors of the same strides. All is read before any is written: a row that is not there would else be a
    // branch around each unit, with its wait.
    template <typename Tile, int TILES>
    __device__ static void write(T_IO* const (&targets)[TILES], unsigned stride, const Tile (&tiles)[TILES], int rows) {
        uint4 held[TILES][COUNT];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int n = 0; n < COUNT; ++n) held[i][n] = *in(tiles[i], n);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const unsigned offset = row(n) * stride + 8 * unit();
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                if (row(n) < rows) write_global(targets[i] + offset, held[i][n]);
        }
    }
};

// A tensor's rows of a chunk, and then of the chunk before, from the thread's first unit on.
template <int COLUMNS> struct Source {
    const T_IO* next;
    i64 stride;

    __device__ Source(const T_IO* chunk, i64 stride)
        : next(chunk + Units<COLUMNS>::row(0) * stride + 8 * Units<COLUMNS>::unit()), stride(stride) {}
    // To a tile; zeros from row `present` on. Offsets within a chunk have 32 bits (tensors.needs_copy).
    template <typename Tile> __device__ void copy(Tile tile, int present) {
        using Place = Units<COLUMNS>;
#pragma unroll
        for (int n = 0; n < Place::COUNT; ++n)
            copy_async<16>(shared_address(Place::in(tile, n)), next + n * Place::ROW_STEP * unsigned(stride),
                           Place::row(n) < present);
        next -= CHUNK_LEN * stride;
    }
};

// The slopes of a thread's tokens, as RateSums are the sums of their rates.
struct Slopes {
    float2 at[SEGMENT_LEN];

    __device__ Slopes(const RawDecays& raw) {
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i)
            at[i] = {log_decay_slope<DECAY>(raw.at(i, 0)), log_decay_slope<DECAY>(raw.at(i, 1))};
    }
    __device__ void write(ChunkSlopes& target) const {
        const int first = threadIdx.x / PAIRS * SEGMENT_LEN;
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i)
            *reinterpret_cast<float2*>(&target[first + i][threadIdx.x % PAIRS * 2]) = at[i];
    }
};
// The gradient of w, a thread's share four neighbouring channels at a time.
__device__ inline void write_dw(T_W* target, unsigned stride, const float (&grad)[CHUNK_LEN + 1][GROWTH_PITCH],
                                const ChunkSlopes& slopes, int steps) {
    using Share = ChunkDecays<CHANNELS>;
    float x[Share::SHARE][4];
#pragma unroll
    for (int i = 0; i < Share::SHARE; ++i) {
        const int row = Share::row(i), column = Share::column(i);
        const float4 slope = *reinterpret_cast<const float4*>(&slopes[row][column]);
        const float4 sum = *reinterpret_cast<const float4*>(&grad[row][column]);
        x[i][0] = sum.x * slope.x, x[i][1] = sum.y * slope.y, x[i][2] = sum.z * slope.z, x[i][3] = sum.w * slope.w;
    }
#pragma unroll
    for (int i = 0; i < Share::SHARE; ++i)
        if (Share::row(i) < steps) write_channels(target + Share::row(i) * stride, Share::column(i), x[i]);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_backward(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_IO* __restrict__ dy,
    const i64* __restrict__ cu_seqlens, const Checkpoint* __restrict__ checkpoints, const int* __restrict__ framed,
    const float* __restrict__ carried, const float* __restrict__ grad_final_state, T_IO* __restrict__ dr,
    T_W* __restrict__ dw, T_IO* __restrict__ dk,
    T_IO* __restrict__ dv, T_IO* __restrict__ da, T_IO* __restrict__ db, float* __restrict__ grad_initial_state,
    Strides r_strides, Strides w_strides, Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides,
    Strides dy_strides, i64 tokens, i64 heads, float scale) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that rows of whole chunks need no test
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int warp = warp_id(), first_value = 16 * warp;
    static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

    i64 chunks = (span.length + CHUNK_LEN - 1) / CHUNK_LEN;
    bool has_rest = false;  // behind them, that was taken by halves
    if constexpr (LARGEST_DECAY > 0) {
        const i64 in_frames = framed[sequence * heads + head];
        has_rest = in_frames < chunks, chunks = in_frames;
        if (has_rest && chunks == 0) return end_behind_previous_launch();  // nothing is left to do
    }
    const i64 last = chunks * CHUNK_LEN - CHUNK_LEN;
    const auto start = [&](Strides s, i64 token) {
        return span.batch * s.batch + (span.begin + token) * s.token + head * s.head;
    };
    w += start(w_strides, 0);
    Source<CHANNELS> from_r(r + start(r_strides, last), r_strides.token),
        from_a(a + start(a_strides, last), a_strides.token);
    Source<CHANNELS> from_k(k + start(k_strides, last), k_strides.token),
        from_b(b + start(b_strides, last), b_strides.token);
    Source<VALUES> from_v(v + start(v_strides, last), v_strides.token),
        from_dy(dy + start(dy_strides, last), dy_strides.token);
    const i64 key_stride = heads * HEAD_SIZE, value_stride = heads * VALUE_SIZE;  // outputs are contiguous
    const i64 out_row = (span.batch * tokens + span.begin) * heads + head;
    dr += out_row * HEAD_SIZE, dw += out_row * HEAD_SIZE, dk += out_row * HEAD_SIZE;
    da += out_row * HEAD_SIZE, db += out_row * HEAD_SIZE, dv += out_row * VALUE_SIZE;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    checkpoints += first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) * heads + head;

    const auto copy_keys = [&](int present) {
        from_a.copy(smem.raw.a, present), from_k.copy(smem.raw.k, present);
        from_b.copy(smem.raw.b, present), from_r.copy(smem.raw.r, present);
    };
    const auto copy_values = [&](int present) {
        from_v.copy(twin_of(smem.v_u, 0), present), from_dy.copy(twin_of(smem.dy_dx, 0), present);
    };
    Fragment all_state_rows[1][CHANNELS / 16];  // S'
    Fragment(&state_rows)[CHANNELS / 16] = all_state_rows[0];
    const auto load_state = [&](i64 token) {
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c)
            state_rows[c] = read_early(checkpoints + token / CHUNK_LEN * heads, first_value, c);
    };

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    RawDecays next_w;
    if (last >= 0) {
        const int steps = static_cast<int>(min(span.length - last, i64(CHUNK_LEN)));
        copy_keys(steps), commit_copies();
        next_w.load(w + last * w_strides.token, w_strides.token, steps), clear_decays(next_w, steps);
    }
    StateRows all_e[1];
    StateRows& e = all_e[0];
    const float* const from = has_rest ? after_previous_launch(carried) : grad_final_state;
    read_state<STATE_LAYOUT>(e, from ? from + state_offset : nullptr, first_value);

    OperandTwins operands = {twin_of(smem.r_a, 0), twin_of(smem.r_a, 1), twin_of(smem.b_k, 0), twin_of(smem.b_k, 1)};
    const TwinTile operand_r = tile_of(operands.r), operand_a = tile_of(operands.a);
    const TwinTile operand_k = tile_of(operands.k), operand_b = tile_of(operands.b);
    const KeyTiles<TwinTile> tiles = {operand_r, operand_a, operand_k, operand_b};
    const TokenTiles matrices = tiles_of(smem.matrices);
    const SlabTile d_matrices = {shared_address(&smem.d_matrices[0][0][0])};
    const TwinTile tile_dy = tile_of(twin_of(smem.dy_dx, 0)), tile_dx = tile_of(twin_of(smem.dy_dx, 1));
    const TwinTile tile_v = tile_of(twin_of(smem.v_u, 0)), tile_u = tile_of(twin_of(smem.v_u, 1));
    const StatesTile tile_state = {shared_address(&smem.state)}, tile_e = {shared_address(&smem.e)};
    const ValueTiles<TwinTile> value_tiles = {tile_v, tile_dy, tile_u, tile_dx, tile_of(smem.dv)};

    // Products of two tiles of tokens with two: the rows of the second begin with a group's third warp.
    const int first_column = COLUMNS * (warp / 4);
    const bool is_second = warp & 2;

    float2 pending_exponent = {0.0f, 0.0f};  // the factor that E lacks, for the thread's pair of channels
    for (i64 token = last; token >= 0; token -= CHUNK_LEN) {
        const int steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
        const i64 next = token - CHUNK_LEN;
        load_state(token);
        RateSums sums;
        const Slopes slopes(next_w);
        sum_rates(sums, smem.totals, next_w, CHUNK_LEN);
        wait_for_copies<0>();
        __syncthreads();  // the raw keys are there, and nobody reads the last chunk's tiles any more
        copy_values(steps), commit_copies();
        slopes.write(smem.slopes);
        const Frame frame =
            write_operands<true, GROWTH_PITCH>(sums, smem.totals, smem.raw, operands, scale, smem.growth);
        write_factor(smem.factor, {pending_exponent.x + frame.end.x - frame.middle.x,
                                   pending_exponent.y + frame.end.y - frame.middle.y});
        pending_exponent = frame.middle;
        publish_writes();
        __syncthreads();  // the operands are there
        if (next >= 0) copy_keys(CHUNK_LEN);
        commit_copies();

        // Accumulators [value, token]: U, and dX and dV, before they are solved.
        TokenSums u;
        Accumulator dx_dv[2 * CHUNK_LEN / 8];
        TokenSums& dx = *reinterpret_cast<TokenSums*>(&dx_dv[0]);
        TokenSums& d_value = *reinterpret_cast<TokenSums*>(&dx_dv[CHUNK_LEN / 8]);
        scale_columns(e, smem.factor);
        Fragment e_rows[CHANNELS / 16];
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {
            e_rows[c] = to_fragment(e[2 * c], e[2 * c + 1]);
            store_block(tile_e, first_value, 16 * c, e_rows[c]);
            store_block(tile_state, first_value, 16 * c, state_rows[c]);
        }
        // [Arb Ark; Aab Aak], COLUMNS of them by a group.
        Accumulator pairs[COLUMNS / 8];
        begin_products();
#pragma unroll
        for (int c = 0; c < CHANNELS; c += 16)
            multiply_group<COLUMNS, Read::rows, Read::rows>(c == 0, pairs, descriptor(operand_r, 0, c),
                                                            descriptor(operand_b, first_column, c));
        end_batch();
        const auto multiply_states = [&] {
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                multiply_group<32, Read::rows>(c == 0, u, state_rows[c], descriptor(operand_a, 0, 16 * c));
                multiply_group<64, Read::rows>(c == 0, dx_dv, e_rows[c], descriptor(operand_b, 0, 16 * c));
            }
            end_batch();
        };
        constexpr bool OVERLAPS = CHANNELS == TILE_COLUMNS;  // registers for more would spill
        if constexpr (OVERLAPS) multiply_states();
        wait_for_batches<OVERLAPS>();
        hold(pairs);
        Fragment below;
        for_each_block(warp, pairs, [&](int is_k, int p, int q, Accumulator(&sum)[2]) {
            const bool is_ab = is_second && !is_k;
            if (is_ab && q == p) return write_lower(smem.matrices, p, sum);
            Fragment block = to_fragment(sum[0], sum[1]);
            if (q == p) keep_lower(block, is_second);
            if (is_ab) below = block;
            else store_block(is_second ? matrices.ak : is_k ? matrices.rk : matrices.rb, 16 * p, 16 * q, block);
        });
        if (warp / 2 == 1) {
            asm volatile("bar.sync 1, 64;" ::: "memory");
            if (warp == 3) solve_lower(smem.matrices, below);
        }
        if constexpr (!OVERLAPS) begin_products(), multiply_states();
        wait_for_batches<0>();
        hold(u), hold(dx_dv);
        wait_for_copies<1>();  // V and dY; the next chunk's keys may still be on their way
        publish_writes();
        __syncthreads();  // the token matrices, V and dY are there

        TokenFragments dy_rows[1], dx_rows[1];
        finish_values(tiles_of(u), tiles_of(dx), tiles_of(d_value), dy_rows, dx_rows, matrices, value_tiles,
                      first_value);
        publish_writes();
        __syncthreads();  // U and dX are there, and nobody reads the token matrices any more

        // [dArk dArb; dAak dAab], likewise.
        Accumulator d_pairs[COLUMNS / 8];
        begin_products();
#pragma unroll
        for (int c = 0; c < VALUES; c += 16)
            multiply_group<COLUMNS, Read::rows, Read::rows>(c == 0, d_pairs, descriptor(tile_dy, 0, c),
                                                            descriptor(tile_v, first_column, c));
        end_batch();
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q)
#pragma unroll
            for (int c = 0; c < CHANNELS; c += TILE_COLUMNS) {
                multiply_group<64, Read::columns>(e + c / 8, dy_rows[0][q], descriptor(operand_r, 16 * q, c));
                multiply_group<64, Read::columns>(e + c / 8, dx_rows[0][q], descriptor(operand_a, 16 * q, c));
            }
        end_batch();
        T_IO* const dv_rows[] = {dv + token * value_stride};
        T_IO(*const dv_tile[])[VALUE_PITCH] = {smem.dv};
        Units<VALUES>::write(dv_rows, static_cast<unsigned>(value_stride), dv_tile, steps);
        wait_for_batches<1>();
        hold(d_pairs);
        for_each_block(warp, d_pairs, [&](int is_u, int p, int q, Accumulator(&sum)[2]) {
            Fragment block = to_fragment(sum[0], sum[1]);
            if (q == p) keep_lower(block, is_second);
            if (q == p && p == 0) store_block(d_matrices, 32 * is_second, 32 * is_u + 16, {});  // above the diagonal
            store_block(d_matrices, 32 * is_second + 16 * p, 32 * is_u + 16 * q, block);
        });
        // [channel, token] of 16 channels a warp: of R and behind it of A; of K and of B. First what S' and E' give.
        using KeySums = Accumulator[2 * CHUNK_LEN / 8];
        const auto multiply_states_by_values = [&](KeySums& d_ra, KeySums& d_kb, int column) {
            begin_products();
#pragma unroll
            for (int c = 0; c < VALUES; c += 16) {
                const int slab = column & -TILE_COLUMNS;
                multiply_group<64, Read::columns, Read::rows>(c == 0, d_ra, descriptor(tile_state, c, slab),
                                                              descriptor(tile_dy, 0, c));
                multiply_group<64, Read::columns, Read::rows>(c == 0, d_kb, descriptor(tile_e, c, slab),
                                                              descriptor(tile_v, 0, c));
            }
        };
        const auto finish_keys = [&](KeySums& d_ra, KeySums& d_kb, int column) {
            const KeyRows rows(tiles, column);
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                multiply_group<64, Read::rows>(d_ra, rows.k[q], descriptor(d_matrices, 0, 16 * q));
                multiply_group<64, Read::rows>(d_ra, rows.b[q], descriptor(d_matrices, 0, 32 + 16 * q));
                multiply_group<64, Read::columns>(d_kb, rows.r[q], descriptor(d_matrices, 16 * q, 0));
                multiply_group<64, Read::columns>(d_kb, rows.a[q], descriptor(d_matrices, 32 + 16 * q, 0));
            }
            end_batch();
            wait_for_batches<0>();
            hold(d_ra), hold(d_kb);

            write_key_gradients(d_ra, d_ra + CHUNK_LEN / 8, d_kb, d_kb + CHUNK_LEN / 8, rows, tiles, smem.growth,
                                smem.state_terms, column, scale);
        };
        KeySums d_ra, d_kb;
        constexpr bool IS_EARLY = VALUES == TILE_COLUMNS;  // beside z, where registers allow
        if constexpr (IS_EARLY) multiply_states_by_values(d_ra, d_kb, first_value), end_batch();
        wait_for_batches<IS_EARLY>();
        hold(e);
        write_state_terms(smem.state_terms[warp], all_state_rows, all_e);
        publish_writes();
        __syncthreads();  // the gradients of the token matrices are there

        if (next >= 0) next_w.load(w + next * w_strides.token, w_strides.token, CHUNK_LEN);
        if constexpr (IS_EARLY) finish_keys(d_ra, d_kb, first_value);
        else {
#pragma unroll 1
            for (int column = first_value; column < CHANNELS; column += VALUES) {
                KeySums d_ra, d_kb;
                multiply_states_by_values(d_ra, d_kb, column);
                finish_keys(d_ra, d_kb, column);
            }
        }
        __syncthreads();  // the gradients are there

        const i64 row = token * key_stride;
        T_IO* const rows[] = {dr + row, da + row, dk + row, db + row};
        const Twin results[] = {operands.r, operands.a, operands.k, operands.b};
        Units<CHANNELS>::write(rows, static_cast<unsigned>(key_stride), results, steps);
        write_dw(dw + row, static_cast<unsigned>(key_stride), smem.growth, smem.slopes, steps);
    }
    wait_for_copies<0>();
    if (grad_initial_state != nullptr) {
        __syncthreads();
        write_factor(smem.factor, pending_exponent);
        __syncthreads();
        scale_columns(e, smem.factor);
        write_state<STATE_LAYOUT>(grad_initial_state + state_offset, e, first_value);
    }
    if constexpr (LARGEST_DECAY > 0) end_behind_previous_launch();
}
