// Recurrences with one decay for a head, forward, as head_decay_forward.cu runs them (arguments and formulas are there),
// with the products of four warps at once: for key heads of 64 or 128 and value heads of 64 or 128, on sm_90a.
//
// A block has ROWS value rows of a head, and a group of warps for each 64 of them: a warp holds 16 rows of S in fp32 all
// the time and works with transposes, [value, token]. As many groups more make what there is without the state, each of
// its own chunks, some ahead: three warps copy rows while the fourth solves for the last chunk's Tm, and all four find
// factors and token matrices. Products of rows with all rows have the squares of norms on their diagonal.
#include "bulk_copy.cuh"
#include "head_decay_chunk.cuh"
#include "slot_states.cuh"
#include "wgmma.cuh"

static_assert(HEAD_SIZE % TILE_COLUMNS == 0 && VALUE_SIZE % ROWS == 0, "head sizes in steps of 64");
static_assert(ROWS == 64 || ROWS == 128, "rows must be 64 or 128");
static_assert(CHUNK_LEN == 32, "chunk_len must be 32");
constexpr int GROUP_THREADS = 128, MAKERS = ROWS / 64, WALKERS = MAKERS * GROUP_THREADS;
static_assert(NUM_THREADS == 2 * WALKERS, "num_threads must be four times the rows");
constexpr int WALKER_REGISTERS = 160, MAKER_REGISTERS = 96;  // of a multiprocessor's 65536 for two threads of 256 each

constexpr int RING = ROWS == 128 ? 6 : 4, AHEAD = 2 / MAKERS;  // of a maker's own chunks
constexpr int SLABS = HEAD_SIZE / TILE_COLUMNS;
using PairTile = SlabsTile<sizeof(Slab<2 * CHUNK_LEN>)>;
struct __align__(16) Stage {
    T_IO v[CHUNK_LEN][ROW_PITCH];  // later U, then Y
    TokenWork work;
};
struct __align__(1024) Smem {
    Slab<2 * CHUNK_LEN> pairs[RING][SLABS];  // rows of k, and behind them those of q
    Stage stages[RING];
    CopyBarrier ready[RING], empty[RING];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// Sixteen bytes of some of a chunk's rows of keys or queries, chunk after chunk, for one of two warps.
struct RowsOfTile {
    static constexpr int UNITS = HEAD_SIZE / 8, ROW_STEP = 64 / UNITS;
    const T_IO* next;
    i64 stride;
    int row;
    unsigned place;
    __device__ RowsOfTile(const T_IO* rows, i64 stride, int thread, int first_row)
        : stride(stride), row(thread / UNITS) {
        const int unit = thread % UNITS;
        next = rows + row * stride + 8 * unit;
        place = unit / 8 * sizeof(Slab<2 * CHUNK_LEN>) + 128 * (first_row + row) + (unit % 8 ^ row % 8) * 16;
    }
    __device__ void copy(unsigned tile, int steps) {
        const T_IO* from = next;
#pragma unroll
        for (int i = 0; i < CHUNK_LEN; i += ROW_STEP, from += ROW_STEP * stride)
            copy_async<16>((tile + place + 128 * i) ^ i % 8 * 16, from, row + i < steps);
        next += MAKERS * CHUNK_LEN * stride;
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) head_decay_forward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_BETA* __restrict__ beta, const float* __restrict__ own, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, const T_STATE* __restrict__ initial_state,
    const i64* __restrict__ cu_seqlens, const Walk* __restrict__ walks, T_IO* __restrict__ y,
    T_STATE* __restrict__ final_state, Checkpoint* __restrict__ states, KeptMatrices* __restrict__ matrices,
    TokenFactors* __restrict__ factors, T_IO* __restrict__ kept_u, Strides r_strides, Strides k_strides,
    Strides v_strides, Strides w_strides, Strides beta_strides, i64 tokens, i64 heads, i64 segments, float scale,
    const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 place = SEGMENTED ? blockIdx.x / static_cast<unsigned>(segments) : blockIdx.x;
    const i64 sequence = piece_of(place, wave, waves);
    if (is_for_others(pieces, sequence, wave)) return;
    const i64 head = blockIdx.y, key_head = head / GROUP;
    if constexpr (POOLED) __builtin_assume(cu_seqlens != nullptr);  // which spares registers
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int length = static_cast<int>(span.length), chunks = (length + CHUNK_LEN - 1) / CHUNK_LEN;
    const Walk walk = walk_of<false>(walks, chunks, heads);
    if (walk.start < 0) return;
    const int first = walk.start, end = walk.end;
    const auto steps_of = [&](int chunk) { return max(min(length - chunk * CHUNK_LEN, CHUNK_LEN), 0); };
    const i64 first_chunk = (first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) + first) * heads + head;

    clear<NUM_THREADS>(smem.stages);  // what no token is nor has a use is kept too
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < RING; ++i) {
            begin_barrier(smem.ready[i], 1);
            begin_barrier(smem.empty[i], WALKERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();

    if (threadIdx.x >= WALKERS) {
        leave_registers<MAKER_REGISTERS>();
        const int thread = threadIdx.x % GROUP_THREADS, warp = warp_id() % 4, maker = warp_id() / 4 - MAKERS;
        const int own_first = first + maker;
        const auto start_of = [&](Strides s, i64 own_head) {
            return span.batch * s.batch + (span.begin + i64(own_first) * CHUNK_LEN) * s.token + own_head * s.head;
        };
        RowsOfTile from_k(k + start_of(k_strides, key_head), k_strides.token, thread % 64, 0);
        RowsOfTile from_q(r + start_of(r_strides, key_head), r_strides.token, thread % 64, CHUNK_LEN);
        RowCursor<T_IO, VALUE_SIZE, CHUNK_LEN, ROWS, ROW_PITCH, 32> from_v(
            v + start_of(v_strides, head) + blockIdx.z * ROWS, v_strides.token, lane_id());
        if constexpr (HAS_RATE) beta += start_of(beta_strides, head);
        if constexpr (HAS_DECAY) w += start_of(w_strides, head);
        const GateMap map(a_log, dt_bias, head);
        Gates gates;
        const auto load_gates = [&](int chunk) {
            if (warp != 2) return;
            gates.load(w, w_strides.token, beta, beta_strides.token, steps_of(chunk));
            if constexpr (HAS_RATE) beta += MAKERS * CHUNK_LEN * beta_strides.token;
            if constexpr (HAS_DECAY) w += MAKERS * CHUNK_LEN * w_strides.token;
        };
        const auto copy_chunk = [&](int chunk) {
            const unsigned number = chunk - first, slot = number % RING;
            if (chunk < end && warp < 3) {
                if (number >= RING) wait_for(smem.empty[slot], (number / RING - 1) % 2);
                const int steps = steps_of(chunk);
                if (warp < 2) {
                    const unsigned tile = shared_address(&smem.pairs[slot][0]);
                    from_k.copy(tile, steps), from_q.copy(tile, steps);
                } else {
                    from_v.copy(smem.stages[slot].v[0], steps, ROWS, lane_id());
                    from_v.next += i64(MAKERS - 1) * CHUNK_LEN * from_v.stride;
                }
            }
            commit_copies();
        };
        const auto finish = [&](unsigned number) {  // what all others have done for a chunk
            Stage& stage = smem.stages[number % RING];
            if constexpr (HAS_DELTA) solve_lower(stage.work.solver, load_left(tile_of(stage.work.m), 0, 16));
            __syncwarp();
            if (lane_id() == 0) arrive_at<1>(smem.ready[number % RING], 0);
        };
        const auto keep_work = [&](unsigned number) {
            if (KEPT_LEN == 0 || blockIdx.z > 0 || first + static_cast<int>(number) < walk.begin) return;
            const TokenWork& work = smem.stages[number % RING].work;
            const i64 place = first_chunk + number * heads;
            matrices[place].at[OF_M].keep<GROUP_THREADS>(work.m, thread);
            if constexpr (HAS_DELTA) matrices[place].at[OF_TM].keep<GROUP_THREADS>(work.solver.tm, thread);
            keep<GROUP_THREADS>(factors[place], work.factors, thread);
        };

        load_gates(own_first);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) copy_chunk(own_first + i * MAKERS);
        for (int chunk = own_first; chunk < end; chunk += MAKERS) {
            const unsigned number = chunk - first, slot = number % RING;
            TokenWork& work = smem.stages[slot].work;
            if (warp == 2) {
                const TokenGates of_lane(gates, map);
                work.factors.decay[lane_id()] = of_lane.decay, work.factors.rate.set(lane_id(), of_lane.rate);
                if (lane_id() == 0) work.factors.end = exp2_fast(of_lane.end);
                load_gates(chunk + MAKERS);
            }
            wait_for_copies<AHEAD - 1>();
            publish_writes();
            synchronize_threads(1 + maker, GROUP_THREADS);  // rows and gates are there, and the pairs before them

            // Keys, and below them queries, times both: 16 rows of products for a warp.
            Accumulator sum[2 * CHUNK_LEN / 8];
            const PairTile tile = {shared_address(&smem.pairs[slot][0])};
            begin_products();
#pragma unroll
            for (int c = 0; c < CHANNELS; c += 16)
                multiply_group<64, Read::rows, Read::rows>(c == 0, sum, descriptor(tile, 0, c), descriptor(tile, 0, c));
            end_batch();
            copy_chunk(chunk + AHEAD * MAKERS);
            wait_for_batches<0>();
            hold(sum);
            const bool is_q = warp >= 2;
            {
                // The lanes of the diagonal have the squares of rows group() and group() + 8.
                float squares[2] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (i == warp) {
                        squares[0] = group() % 2 ? sum[2 * i][1] : sum[2 * i][0];
                        squares[1] = group() % 2 ? sum[2 * i + 1][3] : sum[2 * i + 1][2];
                    }
                const int own = lane_id() % 16, of_diagonal = 4 * (own % 8) + own % 8 / 2, token = 16 * (warp % 2) + own;
                const float upper = __shfl_sync(0xffffffffu, squares[0], of_diagonal),
                            lower = __shfl_sync(0xffffffffu, squares[1], of_diagonal);
                const float factor = HAS_NORM ? norm_factor(own < 8 ? upper : lower) : 1.0f;
                TokenFactors& made = work.factors;
                if (lane_id() < 16)
                    write_factors(made, is_q, token, factor, made.decay[token], made.rate[token],
                                  made.decay[CHUNK_LEN - 1], scale);
            }
            if (warp == 3 && chunk > own_first) finish(number - MAKERS);
            synchronize_threads(1 + maker, GROUP_THREADS);  // the factors are there, and all of the last chunk's work
            if (chunk > own_first) keep_work(number - MAKERS);
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                Accumulator block[2];
#pragma unroll
                for (int i = 0; i < 8; ++i) block[i / 4][i % 4] = sum[2 * q + i / 4][i % 4];
                if (q > warp % 2) continue;
                if (is_q) write_pairs<true>(work, block, warp % 2, q);
                else if constexpr (HAS_DELTA) write_pairs<false>(work, block, warp, q);
            }
        }
        synchronize_threads(1 + maker, GROUP_THREADS);
        const int left = end - own_first;  // chunks from the maker's first one on, of which every MAKERS-th is its own
        const unsigned last = maker + (left - 1) / MAKERS * MAKERS;
        if (left > 0 && warp == 3) finish(last);
        if constexpr (KEPT_LEN > 0) {
            synchronize_threads(1 + maker, GROUP_THREADS);
            if (left > 0) keep_work(last);
        }
        wait_for_copies<0>();
    } else {
        take_registers<WALKER_REGISTERS>();
        const OwnRows share;
        const int walker = warp_id() / 4;
        const i64 y_stride = heads * VALUE_SIZE;
        const i64 y_start = (span.batch * tokens + span.begin + i64(first) * CHUNK_LEN) * y_stride +
                            head * VALUE_SIZE + blockIdx.z * ROWS + walker * 64;
        y += y_start;
        if constexpr (KEPT_LEN > 0) {
            kept_u += y_start;
            states += (first_checkpoint(cu_seqlens, sequence, span, KEPT_LEN) + first / KEPT_CHUNKS) * heads + head;
        }
        const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
        const auto write_values = [&](T_IO* rows, const Stage& stage, int chunk) {
            synchronize_threads(1 + MAKERS + walker, GROUP_THREADS);  // all of the group's values are there
            write_rows_at_once<T_IO, VALUE_SIZE, CHUNK_LEN, 64, ROW_PITCH, GROUP_THREADS>(
                rows, y_stride, &stage.v[0][64 * walker], steps_of(chunk), 64, threadIdx.x % GROUP_THREADS);
        };
        StateRows state;
        // Blocks that share a sequence read a copy: the last one may write its slot before the first one begins.
        if constexpr (POOLED && !SEGMENTED)
            read_slot(state, first_state(initial_state, state_offset, pieces, sequence, head, slot_stride),
                      share.first_value);
        else
            read_state<STATE_LAYOUT>(state, initial_state && first == 0 ? initial_state + state_offset : nullptr,
                                     share.first_value);
        float of_own[1][2] = {};
        if constexpr (HAS_OWN) read_own<SKIP_PER_CHANNEL>(of_own, own, head, share.first_value);

        for (int chunk = first; chunk < end; ++chunk) {
            const bool is_own = chunk >= walk.begin;  // the others are run through for the state alone
            const unsigned number = chunk - first, slot = number % RING;
            Stage& stage = smem.stages[slot];
            const TokenWork& work = stage.work;
            const PairTile tile = {shared_address(&smem.pairs[slot][0])};
            const auto values = tile_of(stage.v);

            // X <- K S_0^T, and behind it Y <- Q S_0^T
            Fragment start_rows[CHANNELS / 16];
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) start_rows[c] = to_fragment(state[2 * c], state[2 * c + 1]);
            if constexpr (KEPT_LEN > 0) {
                if (is_own && chunk % KEPT_CHUNKS == 0)
#pragma unroll
                    for (int c = 0; c < CHANNELS / 16; ++c) keep_state(states, share.first_value, c, start_rows[c]);
                if ((chunk + 1) % KEPT_CHUNKS == 0) states += heads;
            }
            wait_for(smem.ready[slot], number / RING % 2);
            constexpr int FIRST = HAS_DELTA ? 0 : CHUNK_LEN, COLUMNS = 2 * CHUNK_LEN - FIRST;
            Accumulator sum[COLUMNS / 8];
            begin_products();
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c)
                multiply_group<COLUMNS, Read::rows>(c == 0, sum, start_rows[c], descriptor(tile, FIRST, 16 * c));
            end_batch();
            TokenFragments v_rows[1];
            load_rows(v_rows, values, share.column);
            wait_for_batches<0>();
            hold(sum);
            TokenSums u[1] = {}, out[1];
#pragma unroll
            for (int n = 0; n < CHUNK_LEN / 8; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if constexpr (HAS_DELTA) u[0][n][j] = sum[n][j];
                    out[0][n][j] = sum[COLUMNS / 8 - CHUNK_LEN / 8 + n][j];
                }
            add_values(u, out, v_rows, work.factors, of_own);
            TokenFragments u_rows[1], written[1];
            solve_values(u_rows, written, u, v_rows, work);

            if constexpr (HAS_DECAY) {
                const float all = work.factors.end;
#pragma unroll
                for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) state[n][j] *= all;
            }
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q)
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    multiply_group<64, Read::columns>(&state[8 * slab], written[0][q],
                                                      descriptor(tile, 16 * q, slab * TILE_COLUMNS));
            end_batch();
            add_triangles(lower(out, tile_of(work.m), u_rows));  // Y <- Y + M U
            if constexpr (KEPT_LEN > 0 && HAS_DELTA) {
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p) store_block_transposed(values, 16 * p, share.column, u_rows[0][p]);
                if (is_own) {
                    write_values(kept_u, stage, chunk);
                    synchronize_threads(1 + MAKERS + walker, GROUP_THREADS);  // nobody reads them any more
                }
                kept_u += CHUNK_LEN * y_stride;
            }
            store_sums(values, share.column, out);
            if (is_own) write_values(y, stage, chunk);
            y += CHUNK_LEN * y_stride;
            wait_for_batches<0>();
            hold(state);
            __syncwarp();
            if (lane_id() == 0) arrive_at<1>(smem.empty[slot], 0);
        }
        if (has_last_state(final_state, pieces, sequence) && end == chunks)
            write_state<STATE_LAYOUT>(last_state(final_state, state_offset, pieces, sequence, head, slot_stride), state,
                                      share.first_value);
    }
}
