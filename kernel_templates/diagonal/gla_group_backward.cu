// Linear attention, backward, as gla_chunked_backward does it (arguments and formulas are there), with all products by
// four warps at once: for keys of 72 to 128 and values of 104 to 128 in steps of 8 on sm_90a.
//
// Without a decay every frame is the same, and S' and E' are S and E. What comes from dY has a factor of scale, so E is
// kept without it, E = scale F, and each result is multiplied once where it leaves the registers:
//
//     dQ = scale (tril(dY V^T) K + dY S)      dK = scale (tril(dY V^T)^T Q + V F)
//     dV = scale (tril(Q K^T)^T dY + K F^T)
//     F <- F + dY^T Q
//
// A block has two groups of four warps. A group makes one of the two triangles for both, and one slab of 64 columns of
// each result; it holds 64 value rows of F in fp32 for the whole sequence. Rows of tokens are copied a chunk ahead; S,
// which a chunk is done with halfway, into the place that it had.
//
//   checkpoints  [slots, heads]  in: S of every chunk, as gla_scan leaves it for this kernel
//   w u dw du    null
//
// Grid (sequences, heads).
#include "bulk_copy.cuh"
#include "chunk.cuh"
#include "wgmma.cuh"

constexpr int TOKENS = GROUP_CHUNK_LEN;  // of a chunk here, whatever the chunks of the forward are
constexpr int GROUPS = 2, COLUMNS = GROUPS * TILE_COLUMNS, UNITS = TILE_COLUMNS / 8;
constexpr int KEY_DEPTH = 16 * ceil_div(HEAD_SIZE, 16), VALUE_DEPTH = 16 * ceil_div(VALUE_SIZE, 16);  // of sums
static_assert(DECAY == Decay::none && !BONUS && !CONSTANT_DECAY, "there must be no decay and no bonus");
static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(HEAD_SIZE > TILE_COLUMNS && HEAD_SIZE <= COLUMNS && VALUES == COLUMNS && HEAD_SIZE % 8 == 0 &&
                  VALUE_SIZE % 8 == 0,
              "head sizes must be multiples of 8 from 72 to 128, value sizes from 104");
static_assert(NUM_THREADS == 256, "num_threads must be 256");

// Rows of one width: slabs of 64 columns, one after another.
template <int ROWS> struct Slabs { uint4 units[GROUPS][ROWS][8]; };
template <int ROWS> __device__ inline SlabsTile<128 * ROWS> tile_of(const Slabs<ROWS>& slabs) {
    return {shared_address(&slabs.units[0][0][0])};
}
using RowsTile = SlabsTile<TOKENS * 128>;
struct Rows { Slabs<TOKENS> dy, q, v, k; };
struct __align__(1024) Smem {
    Rows ring[2];
    Slabs<COLUMNS> f;
    Matrices state;
    Slab<TOKENS> pairs[2];  // tril(dY V^T), tril(Q K^T)
    Slab<16> staged[WARPS];
    CopyBarrier state_is_there;
};

// Rows of a tensor's tokens: a thread copies the same unit of every 16th row.
struct TokenRows {
    static constexpr int ROW_STEP = NUM_THREADS / (COLUMNS / 8), COUNT = TOKENS / ROW_STEP;
    const T_IO* source;  // the thread's unit of a chunk
    unsigned stride;     // offsets within a chunk have 32 bits (tensors.needs_copy)
    bool exists;

    __device__ static int row() { return threadIdx.x / (COLUMNS / 8); }
    __device__ static int unit() { return threadIdx.x % (COLUMNS / 8); }
    __device__ TokenRows(const T_IO* first, i64 stride, int size)
        : source(first + (row() * unsigned(stride) + 8 * unit())), stride(stride), exists(8 * unit() < size) {}
    __device__ static uint4* place(Slabs<TOKENS>& slabs, int n) {
        return &slabs.units[unit() / UNITS][row() + n * ROW_STEP][unit() % UNITS ^ row() % 8];
    }
    // Zeros where there is nothing; then goes to the chunk before.
    __device__ void copy(Slabs<TOKENS>& slabs, int present) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            copy_async<16>(shared_address(place(slabs, n)), source + n * ROW_STEP * stride,
                           exists && row() + n * ROW_STEP < present);
        source -= TOKENS * stride;
    }
};

using Sums = Accumulator[TILE_COLUMNS / 8];  // 64 columns of 64 rows, of which a warp has 16

// A warp's rows to a tensor, of which `rows` exist, by way of `staged`. All is read before any is written: a row that
// is not there would else be a branch around each unit, with its wait.
__device__ inline void write_sums(T_IO* target, unsigned stride, Slab<16>& staged, const Sums& sums, float factor,
                                  int rows, bool exists) {
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS / 8; j += 2) {
        const auto pair = [&](int i, int first) {
            return pack(factor * sums[i][first], factor * sums[i][first + 1]);
        };
        store_block(tile_of(staged), 0, 8 * j, {{pair(j, 0), pair(j, 2), pair(j + 1, 0), pair(j + 1, 2)}});
    }
    __syncwarp();
    uint4 held[4];
    const int row = lane_id() / UNITS, unit = lane_id() % UNITS;
#pragma unroll
    for (int n = 0; n < 4; ++n) held[n] = staged.units[row + 4 * n][unit ^ (row + 4 * n) % 8];
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n)
        if (exists && row + 4 * n < rows) write_global(target + ((row + 4 * n) * stride + 8 * unit), held[n]);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_backward(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_IO* __restrict__ dy, const i64* __restrict__ cu_seqlens,
    const Checkpoint* __restrict__ checkpoints, const float* __restrict__ grad_final_state, T_IO* __restrict__ dq,
    T_IO* __restrict__ dk, T_IO* __restrict__ dv, T_W* __restrict__ dw, float* __restrict__ du,
    float* __restrict__ grad_initial_state, Strides q_strides, Strides k_strides, Strides v_strides, Strides w_strides,
    Strides dy_strides, i64 tokens, i64 heads, float scale) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int warp = warp_id(), own_slab = warp / 4, own_row = 16 * (warp % 4);
    static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

    // F does not exist with a scale of zero; what comes from dY is zero then, as it would be without dY.
    const bool has_gradient = scale != 0.0f;
    const float factor = has_gradient && span.length > 0 ? scale : 1.0f;
    int chunk = static_cast<int>((span.length + TOKENS - 1) / TOKENS) - 1;
    int steps = static_cast<int>(span.length - i64(chunk) * TOKENS);  // all that come later are whole
    const i64 token = span.begin + i64(chunk) * TOKENS;
    const auto rows_of = [&](const T_IO* tensor, Strides s, int size) {
        return TokenRows(tensor + (span.batch * s.batch + token * s.token + head * s.head), s.token, size);
    };
    TokenRows rows_q = rows_of(q, q_strides, HEAD_SIZE), rows_k = rows_of(k, k_strides, HEAD_SIZE);
    TokenRows rows_v = rows_of(v, v_strides, VALUE_SIZE),
              rows_dy = rows_of(dy, dy_strides, has_gradient ? VALUE_SIZE : 0);
    const i64 out_row = (span.batch * tokens + token + own_row) * heads + head;  // outputs are contiguous
    dq += out_row * HEAD_SIZE + own_slab * TILE_COLUMNS, dk += out_row * HEAD_SIZE + own_slab * TILE_COLUMNS;
    dv += out_row * VALUE_SIZE + own_slab * TILE_COLUMNS;
    const unsigned key_stride = heads * HEAD_SIZE, value_stride = heads * VALUE_SIZE;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    checkpoints += (first_checkpoint(cu_seqlens, sequence, span, TOKENS) + chunk) * heads + head;

    const auto copy_rows = [&](Rows& to, int present) {
        rows_dy.copy(to.dy, present), rows_v.copy(to.v, present), rows_q.copy(to.q, present),
            rows_k.copy(to.k, present);
    };
    const auto copy_state = [&] {
        if (threadIdx.x == 0) {
            expect_bytes(smem.state_is_there, sizeof(smem.state));
            copy_bulk<1>(&smem.state, checkpoints, sizeof(smem.state), smem.state_is_there);
        }
        checkpoints -= heads;
    };
    if (threadIdx.x == 0) begin_barrier(smem.state_is_there, 1), publish_barriers();
    __syncthreads();  // the barrier has begun
    if (chunk >= 0) copy_rows(smem.ring[0], steps), copy_state();
    commit_copies();

    const int own_column = own_slab * TILE_COLUMNS, first_value = own_column + own_row;
    StateRows f;
    read_state<STATE_LAYOUT>(f, grad_final_state ? grad_final_state + state_offset : nullptr, first_value);
#pragma unroll
    for (Accumulator& x : f)
#pragma unroll
        for (float& element : x) element /= factor;
    const auto tile_f = tile_of(smem.f);
    const auto write_f = [&] {
#pragma unroll
        for (int c = 0; c < CHANNELS / 8; c += 2) store_block(tile_f, first_value, 8 * c, to_fragment(f[c], f[c + 1]));
    };
    write_f();
    const SlabTile d_pairs = tile_of(smem.pairs[0]), pairs = tile_of(smem.pairs[1]);
    const SlabTile own_pairs = {d_pairs.start + own_slab * unsigned(sizeof(smem.pairs[0]))};

    int stage = 0;
    for (; chunk >= 0; --chunk, stage ^= 1) {
        Rows& rows = smem.ring[stage];
        wait_for_copies<0>();
        publish_writes();
        wait_for(smem.state_is_there, stage);
        __syncthreads();  // the rows and F are there, and nobody reads the last chunk's rows and triangles any more
        if (chunk > 0) copy_rows(smem.ring[stage ^ 1], TOKENS);
        commit_copies();

        const auto tile_q = tile_of(rows.q), tile_k = tile_of(rows.k), tile_v = tile_of(rows.v),
                   tile_dy = tile_of(rows.dy);
        const unsigned of_own_pair = own_slab * unsigned(sizeof(rows.dy));  // Q lies behind dY, K behind V
        const RowsTile left = {tile_dy.start + of_own_pair}, right = {tile_v.start + of_own_pair};

        Sums pair, d_q, d_k, d_v;
        begin_products();
#pragma unroll
        for (int c = 0; c < max_of(KEY_DEPTH, VALUE_DEPTH); c += 16)
            multiply_group<64, Read::rows, Read::rows>(c == 0, pair, descriptor(left, 0, c), descriptor(right, 0, c));
        end_batch();
#pragma unroll
        for (int c = 0; c < VALUE_DEPTH; c += 16)
            multiply_group<64, Read::rows, Read::columns>(c == 0, d_k, descriptor(tile_v, 0, c),
                                                          descriptor(tile_f, c, own_column));
#pragma unroll
        for (int c = 0; c < KEY_DEPTH; c += 16)
            multiply_group<64, Read::rows, Read::rows>(c == 0, d_v, descriptor(tile_k, 0, c),
                                                       descriptor(tile_f, own_column, c));
        end_batch();
#pragma unroll
        for (int t = 0; t < TOKENS; t += 16) {
            const auto values = descriptor(tile_dy, t, own_column);
            multiply_group<64, Read::columns, Read::columns>(f, values, descriptor(tile_q, t, 0));
            multiply_group<CHANNELS - 64, Read::columns, Read::columns>(f + 8, values, descriptor(tile_q, t, 64));
        }
        end_batch();
        wait_for_batches<2>();
        hold(pair);
#pragma unroll
        for (int j = 0; j < TILE_COLUMNS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (own_row + group() + e / 2 * 8 < 8 * j + 2 * quad_lane() + e % 2) pair[j][e] = 0.0f;
#pragma unroll
        for (int j = 0; j < TILE_COLUMNS / 8; j += 2)
            store_block(own_pairs, own_row, 8 * j, to_fragment(pair[j], pair[j + 1]));
        publish_writes();
        begin_products();
#pragma unroll
        for (int c = 0; c < VALUE_DEPTH; c += 16)
            multiply_group<64, Read::rows, Read::columns>(c == 0, d_q, descriptor(tile_dy, 0, c),
                                                          descriptor_of_matrices(smem.state[c / 8][own_column / 8],
                                                                                 sizeof(smem.state[0])));
        end_batch();
        wait_for_batches<0>();
        hold(f), hold(d_q), hold(d_k), hold(d_v);
        __syncthreads();  // the triangles are there, and nobody reads S and F any more

        if (chunk > 0) copy_state();
        begin_products();
#pragma unroll
        for (int t = 0; t < TOKENS; t += 16) {
            multiply_group<64, Read::rows, Read::columns>(d_q, descriptor(d_pairs, 0, t),
                                                          descriptor(tile_k, t, own_column));
            multiply_group<64, Read::columns, Read::columns>(d_k, descriptor(d_pairs, t, 0),
                                                             descriptor(tile_q, t, own_column));
            multiply_group<64, Read::columns, Read::columns>(d_v, descriptor(pairs, t, 0),
                                                             descriptor(tile_dy, t, own_column));
        }
        end_batch();
        write_f();
        wait_for_batches<0>();
        hold(d_q), hold(d_k), hold(d_v);

        const int column = own_column + 8 * (lane_id() % UNITS);
        const auto write = [&](T_IO* target, unsigned stride, const Sums& sums, int size) {
            write_sums(target, stride, smem.staged[warp], sums, factor, steps - own_row, column < size);
        };
        write(dq, key_stride, d_q, HEAD_SIZE), write(dk, key_stride, d_k, HEAD_SIZE),
            write(dv, value_stride, d_v, VALUE_SIZE);
        dq -= TOKENS * key_stride, dk -= TOKENS * key_stride, dv -= TOKENS * value_stride;
        steps = TOKENS;
    }
    wait_for_copies<0>();
    if (grad_initial_state == nullptr) return;
#pragma unroll
    for (Accumulator& x : f)
#pragma unroll
        for (float& element : x) element *= factor;
    write_state<STATE_LAYOUT>(grad_initial_state + state_offset, f, first_value);
}
