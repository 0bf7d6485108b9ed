// Recurrences with one decay for a head, backward, what has to go from the last chunk to the first: the gradients of
// values and of the initial state, and those of the states between, from which head_decay_key_gradients.cu makes the
// rest. With E the gradient of a chunk's last state and head_decay_chunk.cuh's names,
//
//     dU = M^T dY + diag(rate e^(D - c)) K E^T    dV = Tm^T dU, or dU and what outputs have of values themselves
//     E <- e^D E + (scale e^c dY)^T Q - (e^c dV)^T K, the last part with a delta alone
//
//   q k                [batch, tokens, heads / GROUP, K]  T_IO  in     dy, dv  [batch, tokens, heads, V]  T_IO  in, out
//   own, walks, matrices, factors  as in the forward, and as it kept them  in
//   slopes             [slots of KEPT_LEN tokens, heads]  out: E at the end of each
//   grad_final_state, grad_initial_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or
//                      null
//
// Grid (sequences * segments, heads, blocks of ROWS value rows), with E in registers and transposes as in the forward.
#include "head_decay_chunk.cuh"

struct Stage {
    KeyTile q, k;
    T_IO dy[CHUNK_LEN][ROW_PITCH];  // later dV
    KeptMatrices matrices;
    StateFactors<CHUNK_LEN> factors;
};
struct Smem { Stage stages[STAGES]; };
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

template <typename T> __device__ inline void fetch(T& target, const T& source) {
    for (int i = fresh(threadIdx.x); i < static_cast<int>(sizeof(T) / 16); i += NUM_THREADS)
        copy_async<16>(shared_address(&target) + 16 * i, reinterpret_cast<const uint4*>(&source) + i, true);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) head_decay_backward(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ dy,
    const float* __restrict__ own, const i64* __restrict__ cu_seqlens, const Walk* __restrict__ walks,
    const KeptMatrices* __restrict__ matrices, const TokenFactors* __restrict__ factors,
    const T_STATE* __restrict__ grad_final_state, T_IO* __restrict__ dv, Checkpoint* __restrict__ slopes,
    T_STATE* __restrict__ grad_initial_state, Strides r_strides, Strides k_strides,
    Strides dy_strides, i64 tokens, i64 heads, i64 segments) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = SEGMENTED ? blockIdx.x / static_cast<unsigned>(segments) : blockIdx.x;
    const i64 head = blockIdx.y, key_head = head / GROUP;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const int last_steps = static_cast<int>(span.length - i64(chunks - 1) * CHUNK_LEN);
    const OwnRows share;

    const i64 first_chunk = first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) * heads + head;
    matrices += first_chunk, factors += first_chunk;
    const Walk walk = walk_of<true>(walks, chunks, heads);
    if (walk.start < 0) return;
    const int past = walk.start, begin = walk.begin;
    if (begin > 0) grad_initial_state = nullptr;

    const i64 last_chunk = span.begin + i64(past - 1) * CHUNK_LEN;  // its first token
    const auto start = [&](Strides s, i64 own_head) {
        return span.batch * s.batch + last_chunk * s.token + own_head * s.head;
    };
    const i64 dv_stride = heads * VALUE_SIZE;
    dv += (span.batch * tokens + last_chunk) * dv_stride + head * VALUE_SIZE + share.first_value;
    slopes += first_checkpoint(cu_seqlens, sequence, span, KEPT_LEN) * heads + head;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);

    using KeyCursor = RowCursor<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, KEY_PITCH, NUM_THREADS, -1>;
    KeyCursor from_q(r + start(r_strides, key_head), r_strides.token, threadIdx.x);
    KeyCursor from_k(k + start(k_strides, key_head), k_strides.token, threadIdx.x);
    RowCursor<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, ROW_PITCH, 32, -1> from_dy(
        dy + start(dy_strides, head) + share.first_value, dy_strides.token, lane_id());
    const auto steps_of = [&](int chunk) { return chunk + 1 < chunks ? CHUNK_LEN : last_steps; };
    const auto copy_chunk = [&](int chunk) {
        if (chunk >= begin) {
            Stage& stage = smem.stages[chunk % STAGES];
            const int present = steps_of(chunk);
            from_q.copy(stage.q[0], present, HEAD_SIZE, threadIdx.x);
            from_k.copy(stage.k[0], present, HEAD_SIZE, threadIdx.x);
            from_dy.copy(&stage.dy[0][share.column], present, share.width, lane_id());
            fetch(stage.matrices, matrices[chunk * heads]);
            fetch<StateFactors<CHUNK_LEN>>(stage.factors, factors[chunk * heads]);
        }
        commit_copies();
    };

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    copy_chunk(past - 1), copy_chunk(past - 2);
    StateRows e[TILES];
    read_state<STATE_LAYOUT>(e, grad_final_state && past == chunks ? grad_final_state + state_offset : nullptr,
                             share.first_value);

    float of_own[TILES][2] = {};
    if constexpr (HAS_OWN) read_own<true>(of_own, own, head, share.first_value);

    for (int chunk = past - 1; chunk >= begin; --chunk) {
        const bool is_own = chunk < walk.end;  // the others are run through for E alone
        Stage& stage = smem.stages[chunk % STAGES];
        const auto& factors_here = stage.factors;
        wait_for_copies<1>();
        __syncthreads();  // the chunk's rows are there, and nobody reads those behind it any more
        copy_chunk(chunk - 2);
        if (!share.exist) continue;

        // X <- K E^T
        const auto tile_q = tile_of(stage.q), tile_k = tile_of(stage.k);
        const auto values = tile_of(stage.dy);
        const bool is_kept = is_own && ((chunk + 1) % KEPT_CHUNKS == 0 || chunk + 1 == chunks);
        Accumulator du[TILES][CHUNK_LEN / 8] = {};
#pragma unroll
        for (int c = 0; c < CHANNELS / 16; ++c) {
            Fragment end_rows[TILES];
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                end_rows[i] = to_fragment(e[i][2 * c], e[i][2 * c + 1]);
                if (is_kept)
                    keep_state(slopes + chunk / KEPT_CHUNKS * heads, share.first_value + 16 * i, c, end_rows[i]);
            }
            add_columns(16 * c, full(du, tile_k, end_rows));
        }
        // dU <- M^T dY + rate e^(D - c) X, and dY as the state takes it
        Fragment dy_rows[TILES][BLOCKS], read[TILES][BLOCKS], erased[TILES][BLOCKS];
        load_rows(dy_rows, values, share.column);
#pragma unroll
        for (int n = 0; n < CHUNK_LEN / 8; ++n) {
            const int token = 8 * n + 2 * quad_lane();
            const float2 of_x = pair_of(factors_here.written, token), of_dy = pair_of(factors_here.grown_q, token),
                         of_self = pair_of(factors_here.of_self, token);
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    du[i][n][2 * j] *= of_x.x, du[i][n][2 * j + 1] *= of_x.y;
                    const unsigned word = dy_rows[i][n / 2].at[n % 2 * 2 + j];
                    if constexpr (!HAS_DELTA) {
                        const float own = of_own[i][j];
                        du[i][n][2 * j] += (HAS_OWN ? of_self.x + own : of_self.x) * low_of(word);
                        du[i][n][2 * j + 1] += (HAS_OWN ? of_self.y + own : of_self.y) * high_of(word);
                    }
                    read[i][n / 2].at[n % 2 * 2 + j] = pack(of_dy.x * low_of(word), of_dy.y * high_of(word));
                }
        }
        add_triangles(upper(du, TriangleTile(stage.matrices.at[OF_M]), dy_rows));
        // dV <- Tm^T dU, and as the state takes it
        if constexpr (HAS_DELTA) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                TokenFragments rows;
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q) rows[q] = to_fragment(du[i][2 * q], du[i][2 * q + 1]);
#pragma unroll
                for (int p = 0; p < BLOCKS; ++p) {
                    Accumulator solved[2] = {};
#pragma unroll
                    for (int q = p; q < BLOCKS; ++q)
                        multiply_add(solved, rows[q],
                                     load_triangle<true>(TriangleTile(stage.matrices.at[OF_TM]), p, q));
                    store_block_transposed(values, 16 * p, share.column + 16 * i, to_fragment(solved[0], solved[1]));
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float2 factor = pair_of(factors_here.grown_k, 16 * p + 8 * n + 2 * quad_lane());
#pragma unroll
                        for (int j = 0; j < 2; ++j) solved[n][2 * j] *= -factor.x, solved[n][2 * j + 1] *= -factor.y;
                    }
                    erased[i][p] = to_fragment(solved[0], solved[1]);
                }
            }
        } else {
            store_sums(values, share.column, du);
        }
        if constexpr (HAS_DECAY) {
            const float all = factors_here.end;
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) e[i][n][j] *= all;
        }
        if (chunk > begin || grad_initial_state != nullptr) {
            if constexpr (HAS_DELTA) add_outer(e, outer(read, tile_q), outer(erased, tile_k));
            else add_outer(e, outer(read, tile_q));
        }
        __syncwarp();
        if (is_own)
            write_rows_at_once<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, ROW_PITCH, 32>(
                dv, dv_stride, &stage.dy[0][share.column], steps_of(chunk), share.width, lane_id());
        dv -= CHUNK_LEN * dv_stride;
    }
    wait_for_copies<0>();
    if (grad_initial_state != nullptr && share.exist)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            write_state<STATE_LAYOUT>(grad_initial_state + state_offset, e[i], share.first_value + 16 * i);
}
