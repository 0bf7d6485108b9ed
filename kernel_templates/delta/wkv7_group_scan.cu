// RWKV-7 time mixing, what wkv7_scan.cu does, in the same notation, with the products and copies of sm_90a.
//
// The state is kept transposed, channels down and values across, so that a block may have few value rows: a product's
// 64 rows are channels here and tokens in X and Y. Two groups of four warps have every other slab of the state in
// registers, in fp32, for the whole sequence; per chunk they write its rounded image S' to shared memory, and then one of
// them finds X and U, the other Y. Operands and token matrices come in stages of a ring that a warp of its own keeps
// full; blocks of the same head make a cluster and fetch a part of every stage for all of them, as each of them needs
// all of it.
//
//   arguments as in wkv7_scan.cu; operands in the order of lanes (wkv7_operands.cuh), and states therefore as well
//   carried     [blocks] state in registers  fp32  inout
//
// A launch may be one of several parts of the walk, so that other kernels make what it needs or use what it leaves
// beside it: what it has in registers at the end of a part passes to the next one as it is, and results do not depend
// on parts.
//
// Grid (sequences x blocks of VALUE_ROWS rows, heads).
#include "wkv7_slab.cuh"

__device__ inline int channel_of(int row) { return channel_of_column<Order::lanes>(row); }
#include "group_scan.cuh"
#include "pooled.cuh"

// Stages of a chunk: W and R0 by slab, the token matrices, B and K0 by slab; backwards B and K0 first.
constexpr int STEPS = 2 * SLABS + 1;
constexpr int FIRST_MATRIX = BACKWARD ? 1 : 0, TAKEN = BACKWARD ? 3 : 2;  // of the chunk's
constexpr int VALUE_PITCH = VALUE_ROWS + 8;
static_assert(ROW_BLOCKS % CLUSTER == 0 && CLUSTER <= 8, "cluster must divide the blocks of a head");
static_assert(STAGES >= 2, "stages must be 2 at least");

struct Walk { int begin, end; };  // of the chunks in the order they are met in

union Stage {
    Slab<CHUNK_LEN> tiles[2];
    Triangle matrices[TAKEN];
};
struct Smem {
    Stage ring[STAGES];
    Slab<VALUE_ROWS> state[SLABS];  // S'
    Slab<CHUNK_LEN> solution;       // X
    Slab<CHUNK_LEN> values[2];
    T_IO outputs[CONSUMERS / 32][16][VALUE_PITCH];
    CopyBarrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");
static_assert(sizeof(Triangle[TAKEN]) <= sizeof(Slab<CHUNK_LEN>[2]), "the token matrices fill one stage");

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, 1) wkv7_group_scan(
    const T_IO* __restrict__ input, const T_STATE* __restrict__ first, const i64* __restrict__ cu_seqlens,
    const uint4* __restrict__ operands, const uint4* __restrict__ matrices, const float* __restrict__ frames,
    const int* __restrict__ halved, T_IO* __restrict__ output, T_IO* __restrict__ solved, uint4* __restrict__ states,
    T_STATE* __restrict__ last,
    float4* __restrict__ carried, Strides input_strides, i64 tokens, i64 heads, Walk walk,
    const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = piece_of(blockIdx.x / ROW_BLOCKS, wave, waves), head = blockIdx.y;
    const int block_row = blockIdx.x % ROW_BLOCKS * VALUE_ROWS, warp = warp_id();
    if (is_for_others(pieces, sequence, wave)) return;  // as all of a cluster are
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const int begin = walk.begin, end = min(walk.end, chunks);
    const i64 first_slot = first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN);
    const auto index_of = [&](int n) { return BACKWARD ? chunks - 1 - n : n; };  // chunks by the order they are met in
    const auto place_of_chunk = [&](int n) { return (first_slot + index_of(n)) * heads + head; };

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            begin_barrier(smem.full[i], 1);
            begin_barrier(smem.empty[i], CLUSTER * CONSUMERS / 32);
        }
        publish_barriers();
    }
    synchronize_cluster();

    Turn turn;
    if (warp >= CONSUMERS / 32) {  // keeps the ring full
        leave_registers<COPY_REGISTERS>();
        if (threadIdx.x == CONSUMERS) {
            const int part = block_of_cluster();
            for (int n = begin; n < end; ++n) {
                const i64 place = place_of_chunk(n);
                for (int step = 0; step < STEPS; ++step, turn.advance()) {
                    Stage& stage = smem.ring[turn.slot];
                    const uint4* source;
                    uint4* target = &stage.tiles[0].units[0][0];
                    int units = sizeof(stage.tiles) / 16;
                    if (step == SLABS) {  // TA only where U is wanted
                        const int skipped = BACKWARD || solved != nullptr ? 0 : TRIANGLE_UNITS;
                        source = matrices + (place * MATRICES + FIRST_MATRIX) * TRIANGLE_UNITS + skipped;
                        target = &stage.matrices[0].units[0][0] + skipped;
                        units = TAKEN * TRIANGLE_UNITS - skipped;
                    } else {
                        const int pair = (step > SLABS) != BACKWARD, slab = step > SLABS ? step - SLABS - 1 : step;
                        source = operands + ((place * 2 + pair) * SLABS + slab) * (2 * SLAB_UNITS);
                    }
                    const int share = units / CLUSTER;
                    wait_for(smem.empty[turn.slot], turn.parity ^ 1);  // nobody in the cluster reads it any more
                    expect_bytes(smem.full[turn.slot], 16 * units);
                    copy_bulk<CLUSTER>(target + part * share, source + part * share, 16 * share, smem.full[turn.slot]);
                }
            }
        }
    } else {
        take_registers<PRODUCT_REGISTERS>();
        const int group_of_warps = warp / 4, own_row = warp % 4 * 16;  // of a product's 64
        const Part part = {group_of_warps, own_row};
        const auto release = [&](int slot) {
            __syncwarp();
            if (lane_id() < CLUSTER) arrive_at<CLUSTER>(smem.empty[slot], lane_id());
        };

        const ValueRows rows_of_values(input + span.batch * input_strides.batch + span.begin * input_strides.token +
                                           head * input_strides.head,
                                       input_strides.token, block_row);
        const auto load_values = [&](int n) {
            if (n < end) rows_of_values.copy(smem.values[n % 2], i64(index_of(n)) * CHUNK_LEN, span.length);
            commit_copies();
        };
        Exponents exponents;
        const auto frame = [&](int n) { return frames + place_of_chunk(n) * (2 * CHANNELS); };
        StateSlab state[OWN_SLABS];
        const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
        const auto carried_state = [&] {  // worked out twice, not kept in registers meanwhile
            unsigned row;
            asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(row));
            const unsigned block = row * gridDim.x + blockIdx.x;
            return carried + block * (sizeof(state) / sizeof(float4) * CONSUMERS) + threadIdx.x;
        };
        const auto load_begin = [&](int n) {
            if (n >= end) return;
            exponents.load(exponents.begins, frame(n), part, false);
            exponents.load_halved(exponents.by_halves, halved + place_of_chunk(n) * SLABS, part);
        };
        const bool goes_on = begin > 0;
        if (goes_on) exponents.load_pending(frame(begin - 1), halved + place_of_chunk(begin - 1) * SLABS, part);
        load_begin(begin);
        load_values(begin);
        const T_STATE* const own_first = first_state(first, state_offset, pieces, sequence, head, slot_stride);
        for_each_element(state, part, block_row, [&](float& x, bool present, i64 place) {
            x = present && own_first != nullptr && !goes_on ? to_float(own_first[place]) : 0.0f;
        });
        const float4* const carried_in = carried_state();
        for_each_accumulator(state, [&](Accumulator& x, int i) { load_if(goes_on, x, carried_in + i * CONSUMERS); });
        const i64 out_stride = heads * VALUE_SIZE;
        const i64 out_place = ((span.batch * tokens + span.begin + own_row) * heads + head) * VALUE_SIZE + block_row;
        const int width = min(VALUE_ROWS, VALUE_SIZE - block_row);

        for (int n = begin; n < end; ++n) {
            const auto solution = tile_of(smem.solution), values = tile_of(smem.values[n % 2]);
            exponents.load(exponents.ends, frame(n), part, true);
            if (states != nullptr) {  // the last image may be overwritten
                if (threadIdx.x % GROUP_THREADS == 0) wait_until_read();
                synchronize_threads(2 + group_of_warps, GROUP_THREADS);
            }
            exponents.scale(state, false);
            write_image(smem.state, state, part);
            exponents.pass(state);
            load_begin(n + 1);
            wait_for_copies<0>();
            publish_writes();
            // S' and the values are there, and nobody reads the last values any more
            synchronize_threads(1, CONSUMERS);
            load_values(n + 1);
            if (states != nullptr && threadIdx.x % GROUP_THREADS == 0) {
#pragma unroll
                for (int i = 0; i < OWN_SLABS; ++i) {
                    const int slab = part.slab(i);
                    uint4* const target = states + ((place_of_chunk(n) * SLABS + slab) * VALUES + block_row) * 8;
                    if (part.has(i)) write_bulk(target, &smem.state[slab], sizeof(smem.state[slab]));
                }
                end_writes();
            }

            // X, or what Y has of the state.
            Accumulator sum[VALUE_ROWS / 8] = {};
            Turn released = turn;
#pragma unroll 1
            for (int slab = 0; slab < SLABS; ++slab, turn.advance()) {
                wait_for(smem.full[turn.slot], turn.parity);
                const auto operand = tile_of(smem.ring[turn.slot].tiles[group_of_warps]);
                const auto image = tile_of(smem.state[slab]);
                begin_products();
#pragma unroll
                for (int c = 0; c < TILE_COLUMNS; c += 16)
                    multiply_group<VALUE_ROWS, Read::rows, Read::rows>(sum, descriptor(operand, 0, c),
                                                                       descriptor(image, 0, c));
                end_batch();
                wait_for_batches<1>();
                if (slab > 0) release(released.slot), released.advance();
            }
            wait_for_batches<0>();
            hold(sum);
            release(released.slot);
            if (group_of_warps == 0) {
#pragma unroll
                for (int j = 0; j < VALUE_ROWS / 8; j += 2)
                    store_block(solution, own_row, 8 * j, to_fragment(sum[j], sum[j + 1]));
                publish_writes();
            }
            Fragment with_values[BLOCKS], with_solution[BLOCKS];
            wait_for(smem.full[turn.slot], turn.parity);
            // Forwards TA for U and M for Y; backwards G and Tm for dX, M for dV. Zeros where there is no block.
            const Triangle(&triangles)[TAKEN] = smem.ring[turn.slot].matrices;
            const auto for_values = tile_of(triangles[!BACKWARD ? group_of_warps : group_of_warps == 0 ? 2 : 0]);
            const auto for_solution = tile_of(triangles[1]);
            const int p = warp % 4;
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                with_values[q] = {}, with_solution[q] = {};
                if (!BACKWARD && q <= p) with_values[q] = load_left(for_values, p, q);
                if (BACKWARD && q >= p) with_values[q] = load_left_transposed(for_values, q, p);
                if (BACKWARD && q >= p && group_of_warps == 0)
                    with_solution[q] = load_left_transposed(for_solution, q, p);
            }
            release(turn.slot);
            turn.advance();
            synchronize_threads(1, CONSUMERS);  // X is there

            // Both groups go the same way: the compiler cannot follow products that only some make.
            if constexpr (BACKWARD) {
#pragma unroll
                for (Accumulator& x : sum)
#pragma unroll
                    for (float& e : x) e = group_of_warps == 0 ? 0.0f : e;
            }
            begin_products();
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                if constexpr (BACKWARD)
                    multiply_group<VALUE_ROWS, Read::columns>(
                        sum, with_solution[q], descriptor(group_of_warps == 0 ? solution : values, 16 * q, 0));
                multiply_group<VALUE_ROWS, Read::columns>(sum, with_values[q], descriptor(values, 16 * q, 0));
            }
            end_batch();
            int held = 0;  // the slot that products read
#pragma unroll
            for (int i = 0; i < OWN_SLABS; ++i) {
                int slot = 0;
#pragma unroll
                for (int other = 0; other < GROUPS; ++other)
                    if (GROUPS * i + other < SLABS) {
                        wait_for(smem.full[turn.slot], turn.parity);
                        // A last slab without a partner is multiplied by both, by one in vain.
                        if (other == group_of_warps || GROUPS * i + 1 == SLABS) slot = turn.slot;
                        else release(turn.slot);
                        turn.advance();
                    }
                const Stage& stage = smem.ring[slot];
                const auto with_x = tile_of(stage.tiles[0]), with_values = tile_of(stage.tiles[1]);
                begin_products();
#pragma unroll
                for (int q = 0; q < CHUNK_LEN; q += 16) {
                    multiply_group<VALUE_ROWS, Read::columns, Read::columns>(state[i], descriptor(with_x, q, 0),
                                                                             descriptor(solution, q, 0));
                    multiply_group<VALUE_ROWS, Read::columns, Read::columns>(state[i], descriptor(with_values, q, 0),
                                                                             descriptor(values, q, 0));
                }
                end_batch();
                wait_for_batches<1>();
                if (i > 0) release(held);
                held = slot;
            }
            hold(sum);
            if (BACKWARD || group_of_warps == 1 || solved != nullptr) {  // while the last slab's products go on
                const i64 token = i64(index_of(n)) * CHUNK_LEN, target = out_place + token * out_stride;
                const int rows = static_cast<int>(min(span.length - token - own_row, i64(16)));
                if (group_of_warps == 0)
                    write_outputs<VALUE_ROWS>(solved + target, out_stride, smem.outputs[warp], sum, rows, width);
                else write_outputs<VALUE_ROWS>(output + target, out_stride, smem.outputs[warp], sum, rows, width);
            }
            wait_for_batches<0>();
#pragma unroll
            for (StateSlab& sums : state) hold(sums);
            release(held);
        }
        if (end < chunks) {
            float4* const carried_out = carried_state();
            for_each_accumulator(state, [&](const Accumulator& x, int i) {
                carried_out[i * CONSUMERS] = {x[0], x[1], x[2], x[3]};
            });
        } else if (has_last_state(last, pieces, sequence)) {
            exponents.scale(state, true);
            T_STATE* const own_last = last_state(last, state_offset, pieces, sequence, head, slot_stride);
            for_each_element(state, part, block_row, [&](float& x, bool present, i64 place) {
                if (present) own_last[place] = from_float<T_STATE>(x);
            });
        }
        wait_until_read();
    }
    synchronize_cluster();  // nobody leaves while others copy to it
}
