// Gated linear attention and its kin, the walk over the chunks with the products and copies of sm_90a: what gla_scan.cu
// does, from what gla_prepare.cu has made. With the notation of gla_chunk.cuh, from S at the start of a sequence,
//
//     Y = P V + Q S'^T    S <- (S' + V^T K) diag(e^(D - m))
//
// and backwards, from E = dL/dS at its end and with E' = E diag(e^(D - m)),
//
//     dV = P^T dY + K E'^T    E <- (E' + dY^T Q) diag(e^m)
//
// The state is kept transposed, channels down and values across, as in wkv7_group_scan.cu. Two groups of four warps
// have every other slab of it in registers, in fp32, for the whole sequence; per chunk they write its rounded image S' to
// shared memory, and then each of them makes half of the columns of Y.
//
//   input, output  [batch, tokens, heads, V]  T_IO   V and Y; dY and dV
//   first, last    [sequences, heads] states  T_STATE  or null: S at the start and the end; E at the end and the start
//   operands, pairs, frames, halved   in, of gla_prepare; where a slab was taken by halves, the state has no frame, and
//                             what is in it passes all of the chunk's decay before what is added
//   states         [slots, heads, SLABS, VALUES] rows of 64 channels  T_IO  out or null: S', E'
//
// Grid (sequences x blocks of VALUE_ROWS rows, heads).
#include "slab.cuh"

constexpr int SLABS = ceil_div(HEAD_SIZE, TILE_COLUMNS), CHANNELS = SLABS * TILE_COLUMNS,
              VALUES = 32 * ceil_div(VALUE_SIZE, 32);
__device__ inline int channel_of(int row) { return row; }
#include "group_scan.cuh"
#include "pooled.cuh"

constexpr int OWN_ROWS = VALUE_ROWS / GROUPS;  // value rows of Y that a group makes
constexpr int STEPS = SLABS + 1;               // stages of a chunk: Q and K by slab, then P
constexpr int OUTPUT_PITCH = OWN_ROWS + 8;
static_assert(STAGES >= 4, "stages must be 4 at least: two pairs of slabs are held at once");

struct Stage { Slab<CHUNK_LEN> tiles[2]; };
struct Smem {
    Stage ring[STAGES];
    Slab<VALUE_ROWS> state[2][SLABS];  // S' of this chunk and of the last one
    Slab<CHUNK_LEN> values[2];
    T_IO outputs[CONSUMERS / 32][16][OUTPUT_PITCH];
    CopyBarrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) gla_group_scan(
    const T_IO* __restrict__ input, const T_STATE* __restrict__ first, const i64* __restrict__ cu_seqlens,
    const uint4* __restrict__ operands, const uint4* __restrict__ pairs, const float* __restrict__ frames,
    const int* __restrict__ halved, T_IO* __restrict__ output, uint4* __restrict__ states, T_STATE* __restrict__ last,
    Strides input_strides, i64 tokens, i64 heads, const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = piece_of(blockIdx.x / ROW_BLOCKS, wave, waves), head = blockIdx.y;
    const int block_row = blockIdx.x % ROW_BLOCKS * VALUE_ROWS, warp = warp_id();
    if (is_for_others(pieces, sequence, wave)) return;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const i64 first_slot = first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN);
    const auto index_of = [&](int n) { return BACKWARD ? chunks - 1 - n : n; };  // chunks by the order they are met in
    const auto place_of_chunk = [&](int n) { return (first_slot + index_of(n)) * heads + head; };

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            begin_barrier(smem.full[i], 1);
            begin_barrier(smem.empty[i], CONSUMERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();

    Turn turn;
    if (warp >= CONSUMERS / 32) {  // keeps the ring full
        leave_registers<COPY_REGISTERS>();
        if (threadIdx.x == CONSUMERS) {
            for (int n = 0; n < chunks; ++n) {
                const i64 place = place_of_chunk(n);
                for (int step = 0; step < STEPS; ++step, turn.advance()) {
                    constexpr int UNITS = CHUNK_LEN * 8;
                    const bool is_last = step == SLABS;
                    const uint4* const source = is_last ? pairs + place * UNITS
                                                        : operands + (place * SLABS + step) * (2 * UNITS);
                    const int bytes = 16 * (is_last ? UNITS : 2 * UNITS);
                    wait_for(smem.empty[turn.slot], turn.parity ^ 1);  // nobody reads it any more
                    expect_bytes(smem.full[turn.slot], bytes);
                    copy_bulk<1>(&smem.ring[turn.slot], source, bytes, smem.full[turn.slot]);
                }
            }
        }
    } else {
        take_registers<PRODUCT_REGISTERS>();
        const int group_of_warps = warp / 4, own_row = warp % 4 * 16;  // of a product's 64
        const int own_values = group_of_warps * OWN_ROWS;
        const Part part = {group_of_warps, own_row};
        const auto release = [&](int slot) {
            __syncwarp();
            if (lane_id() == 0) arrive_at<1>(smem.empty[slot], 0);
        };

        const ValueRows rows_of_values(input + span.batch * input_strides.batch + span.begin * input_strides.token +
                                           head * input_strides.head,
                                       input_strides.token, block_row);
        const auto load_values = [&](int n) {
            if (n < chunks) rows_of_values.copy(smem.values[n % 2], i64(index_of(n)) * CHUNK_LEN, span.length);
            commit_copies();
        };
        Exponents exponents;
        const auto frame = [&](int n) { return frames + place_of_chunk(n) * (2 * CHANNELS); };
        StateSlab state[OWN_SLABS];
        const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
        const auto load_begin = [&](int n) {
            if (n >= chunks) return;
            exponents.load(exponents.begins, frame(n), part, false);
            exponents.load_halved(exponents.by_halves, halved + place_of_chunk(n) * SLABS, part);
        };
        load_begin(0);
        load_values(0);
        const T_STATE* const own_first = first_state(first, state_offset, pieces, sequence, head, slot_stride);
        for_each_element(state, part, block_row, [&](float& x, bool present, i64 place) {
            x = present && own_first != nullptr ? to_float(own_first[place]) : 0.0f;
        });
        const i64 out_stride = heads * VALUE_SIZE;
        const i64 out_place =
            ((span.batch * tokens + span.begin + own_row) * heads + head) * VALUE_SIZE + block_row + own_values;
        const int present_rows = min(VALUE_ROWS, VALUES - block_row);  // of the state that is left behind
        const int width = max(min(OWN_ROWS, VALUE_SIZE - block_row - own_values), 0);

        for (int n = 0; n < chunks; ++n) {
            auto& image = smem.state[n % 2];
            const auto values = tile_of(smem.values[n % 2]);
            exponents.load(exponents.ends, frame(n), part, true);
            exponents.scale(state, false);
            if (states != nullptr) {  // the image of the chunk before the last one may be overwritten
                if (threadIdx.x % GROUP_THREADS == 0) wait_until_read<1>();
                synchronize_threads(2 + group_of_warps, GROUP_THREADS);
            }
            write_image(image, state, part);
            exponents.pass(state);
            load_begin(n + 1);
            wait_for_copies<0>();
            publish_writes();
            synchronize_threads(1, CONSUMERS);  // S' and the values are there, and nobody reads the last ones any more
            load_values(n + 1);
            if (states != nullptr && threadIdx.x % GROUP_THREADS == 0) {
#pragma unroll
                for (int i = 0; i < OWN_SLABS; ++i) {
                    const int slab = part.slab(i);
                    uint4* const target = states + ((place_of_chunk(n) * SLABS + slab) * VALUES + block_row) * 8;
                    if (part.has(i)) write_bulk(target, &image[slab], present_rows * sizeof(image[slab].units[0]));
                }
                end_writes();
            }

            Accumulator sum[OWN_ROWS / 8] = {};
            Turn released = turn;
#pragma unroll
            for (int i = 0; i < OWN_SLABS; ++i) {
                constexpr int WITH_STATE = BACKWARD ? 1 : 0, WITH_VALUES = 1 - WITH_STATE;
                int slot = turn.slot;
#pragma unroll
                for (int other = 0; other < GROUPS; ++other)
                    if (GROUPS * i + other < SLABS) {
                        wait_for(smem.full[turn.slot], turn.parity);
                        // A last slab without a partner is multiplied by both, by one in vain.
                        if (other == group_of_warps) slot = turn.slot;
                        begin_products();
                        const auto operand = tile_of(smem.ring[turn.slot].tiles[WITH_STATE]);
                        const auto of_slab = tile_of(image[GROUPS * i + other]);
#pragma unroll
                        for (int c = 0; c < TILE_COLUMNS; c += 16)
                            multiply_group<OWN_ROWS, Read::rows, Read::rows>(sum, descriptor(operand, 0, c),
                                                                             descriptor(of_slab, own_values, c));
                        turn.advance();
                    }
                const auto with_values = tile_of(smem.ring[slot].tiles[WITH_VALUES]);
#pragma unroll
                for (int q = 0; q < CHUNK_LEN; q += 16)
                    multiply_group<VALUE_ROWS, Read::columns, Read::columns>(state[i], descriptor(with_values, q, 0),
                                                                             descriptor(values, q, 0));
                end_batch();
                if (i > 0) {
                    wait_for_batches<1>();
#pragma unroll
                    for (int other = 0; other < GROUPS; ++other) release(released.slot), released.advance();
                }
            }
            wait_for(smem.full[turn.slot], turn.parity);
            const auto matrix = tile_of(smem.ring[turn.slot].tiles[0]);
            begin_products();
#pragma unroll
            for (int q = 0; q < CHUNK_LEN; q += 16) {
                if constexpr (BACKWARD)
                    multiply_group<OWN_ROWS, Read::columns, Read::columns>(sum, descriptor(matrix, q, 0),
                                                                           descriptor(values, q, own_values));
                else
                    multiply_group<OWN_ROWS, Read::rows, Read::columns>(sum, descriptor(matrix, 0, q),
                                                                        descriptor(values, q, own_values));
            }
            end_batch();
            turn.advance();
            wait_for_batches<0>();
            hold(sum);
#pragma unroll
            for (StateSlab& sums : state) hold(sums);
            while (released.slot != turn.slot || released.parity != turn.parity)
                release(released.slot), released.advance();

            const i64 token = i64(index_of(n)) * CHUNK_LEN;
            const int rows = static_cast<int>(min(span.length - token - own_row, i64(16)));
            write_outputs<OWN_ROWS>(output + out_place + token * out_stride, out_stride, smem.outputs[warp], sum,
                                          rows, width);
        }
        if (has_last_state(last, pieces, sequence)) {
            exponents.scale(state, true);
            T_STATE* const own_last = last_state(last, state_offset, pieces, sequence, head, slot_stride);
            for_each_element(state, part, block_row, [&](float& x, bool present, i64 place) {
                if (present) own_last[place] = from_float<T_STATE>(x);
            });
        }
        wait_until_read();
    }
}
