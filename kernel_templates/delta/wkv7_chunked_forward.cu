// RWKV-7 time mixing, forward, a chunk of CHUNK_LEN tokens after another on the tensor cores. With the operands of
// wkv7_chunk.cuh, S [V, K] at the chunk's start and S' = S diag(e^m):
//
//     U = Tm (Aak V + A S'^T);   Y = Ark V + Arb U + R S'^T;   S <- (S' + V^T K + U^T B) diag(e^(D - m))
//
//   r k a b  [batch, tokens, heads, K]  T_IO   in     w  the same shape, T_W, in; with w0, see decay_bias.cuh
//   v, y     [batch, tokens, heads, V]  T_IO   in, out
//   initial_state, final_state  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//   checkpoints  [slots, heads]  out or null: S' of every chunk; where SKIPS_ZEROS, of all but a sequence's first
//   framed  [sequences, heads]  out: how many chunks of a head, from its first on, are in frames. Behind them is one
//           with some |c_t - m| above LARGEST_DECAY (in units of 1, not of log 2), or no number, so that operands would
//           leave the range of bfloat16; less where a chunk has few tokens (range_of). For a LARGEST_DECAY of 0
//           nothing is looked at and nothing written.
//   carried  [sequences, heads], as the states but fp32  out: the state behind those chunks, where it is not the last
//
// With BY_HALVES the kernel does the rest of such heads, from what the first launch left in `framed` and `carried`. With
// a `board` (overlap.cuh, [2 + sequences heads], zeros) it may begin beside the first, whose heads it takes as they come.
// Then S' is S, the factor e^D lies between the outputs' product and the state's, and the token matrices and the
// operands are as write_matrices_by_halves of wkv7_chunk.cuh makes them.
//
// With SKIPS_ZEROS, for short sequences without initial states, nothing is multiplied by a state of zeros, nor added to
// one that nobody reads.
//
// Grid (sequences, heads); with POOLED (heads, sequences), so that sequences for other launches, which end at once, leave
// no multiprocessor with less to do than others. A warp holds 16 TILES value rows of S in fp32 for the whole sequence and
// works with transposes, [value, token], so that what one product gives is the next one's left operand as it lies in
// registers.
// Between two chunks S lacks the factor e^(D - m); it gets it together with the next chunk's e^m.
#include "wkv7_chunk.cuh"
#include "decay_bias.cuh"
#include "overlap.cuh"
#include "pooled.cuh"

constexpr int TILES = ceil_div(VALUES / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;  // value rows of a warp

struct Smem {
    union {
        Operands operands;
        LevelTiles levels[LEVEL_TILES];  // by halves, before the operands are there
    };
    TokenMatrices matrices;
    RawKeys raw;
    ValueTile v, y;
    float2 totals[SEGMENTS][PAIRS];
    float factor[CHANNELS];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

constexpr bool MAY_LEAVE_FRAMES = LARGEST_DECAY > 0 && !BY_HALVES;

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_forward(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_STATE* __restrict__ initial_state,
    const i64* __restrict__ cu_seqlens, T_IO* __restrict__ y, T_STATE* __restrict__ final_state,
    Checkpoint* __restrict__ checkpoints, int* __restrict__ framed, float* __restrict__ carried, int* board,
    Strides r_strides, DecayStrides w_strides, Strides k_strides, Strides v_strides, Strides a_strides,
    Strides b_strides, i64 tokens, i64 heads, float scale, const Piece* __restrict__ pieces, i64 slot_stride, int wave,
    int waves) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    i64 sequence = piece_of(POOLED ? blockIdx.y : blockIdx.x, wave, waves), head = POOLED ? blockIdx.x : blockIdx.y;
    if (MAY_LEAVE_FRAMES && board != nullptr) let_next_launch_begin();
    if (BY_HALVES && board != nullptr) {
        const i64 piece = left_piece(board, POOLED ? i64(blockIdx.y) * gridDim.x + head : head * gridDim.x + sequence,
                                     i64(gridDim.x) * (POOLED ? gridDim.y : heads));
        if (piece < 0) return;
        sequence = piece / heads, head = piece % heads;
    }
    if (is_for_others(pieces, sequence, wave)) {
        if (MAY_LEAVE_FRAMES && board != nullptr && threadIdx.x == 0) report(board, false, 0);
        return;
    }
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const int last_steps = static_cast<int>(span.length - i64(chunks - 1) * CHUNK_LEN);
    const int first = BY_HALVES ? *written_meanwhile(framed + sequence * heads + head) : 0;
    if (BY_HALVES && first >= chunks) return;
    const i64 done = i64(first) * CHUNK_LEN;
    const int first_value = warp_id() * WARP_ROWS;
    const int width = WARPS * WARP_ROWS == VALUE_SIZE ? WARP_ROWS : max(min(WARP_ROWS, VALUE_SIZE - first_value), 0);
    const bool has_values = WARPS * WARP_ROWS == VALUES || first_value < VALUES;

    const auto start = [&](Strides s) { return span.batch * s.batch + (span.begin + done) * s.token + head * s.head; };
    r += start(r_strides), w += start(w_strides), k += start(k_strides), a += start(a_strides), b += start(b_strides);
    v += start(v_strides) + first_value;
    const i64 y_stride = heads * VALUE_SIZE;
    y += (span.batch * tokens + span.begin + done) * y_stride + head * VALUE_SIZE + first_value;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    if (checkpoints != nullptr)
        checkpoints += (first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN) + done / CHUNK_LEN) * heads + head;

    using KeyCursor = RowCursor<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS>;
    KeyCursor from_r(r, r_strides.token, threadIdx.x), from_a(a, a_strides.token, threadIdx.x);
    KeyCursor from_k(k, k_strides.token, threadIdx.x), from_b(b, b_strides.token, threadIdx.x);
    DecayCursor<> from_w(w, w_strides.token);
    // Where no decay leaves a frame the loop has no registers for it, and it is read for every chunk.
    const auto own_bias = [&] { return bias_of(w_strides, head, threadIdx.x % PAIRS * 2); };
    const DecayBias kept_bias = own_bias();
    RowCursor<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, VALUE_PITCH, 32> from_v(v, v_strides.token, lane_id());
    const auto copy_keys = [&](int present) {
        from_a.copy(smem.raw.a[0], present, HEAD_SIZE, threadIdx.x);
        from_k.copy(smem.raw.k[0], present, HEAD_SIZE, threadIdx.x);
        from_b.copy(smem.raw.b[0], present, HEAD_SIZE, threadIdx.x);
        from_r.copy(smem.raw.r[0], present, HEAD_SIZE, threadIdx.x);
    };
    const auto copy_values = [&](int present) {  // a warp reads what it has copied itself
        from_v.copy(&smem.v[0][first_value], present, width, lane_id());
    };

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    RawDecays next_w;
    const int first_steps = static_cast<int>(min(span.length - done, i64(CHUNK_LEN)));
    copy_keys(first_steps), commit_copies();
    copy_values(first_steps), commit_copies();
    if (first_steps > 0) from_w.load(next_w, first_steps);
    StateRows state[TILES];
    if constexpr (BY_HALVES) read_state<STATE_LAYOUT>(state, written_meanwhile(carried + state_offset), first_value);
    else read_state<STATE_LAYOUT>(
        state, first_state(initial_state, state_offset, pieces, sequence, head, slot_stride), first_value);

    const auto operand_r = tile_of(smem.operands.r), operand_a = tile_of(smem.operands.a);
    const auto operand_k = tile_of(smem.operands.k), operand_b = tile_of(smem.operands.b);
    const auto tm = tile_of(smem.matrices.tm), ak = tile_of(smem.matrices.ak);
    const auto rb = tile_of(smem.matrices.rb), rk = tile_of(smem.matrices.rk);
    const auto values = tile_of(smem.v), outputs = tile_of(smem.y);

    float2 pending_exponent = {0.0f, 0.0f};  // the factor that the state lacks, for the thread's pair of channels
    int left = chunks - first;
    for (; left > 0; --left) {
        const int steps = left > 1 ? CHUNK_LEN : last_steps;
        // below 1 at the last
        const int next_steps = left > 2 ? CHUNK_LEN : left > 1 ? last_steps : last_steps - CHUNK_LEN;
        const DecayBias bias = LARGEST_DECAY > 0 ? kept_bias : own_bias();
        // Tokens that are not there have no decay: their w says so, where nothing is added to it.
        const int present = is_bias(bias) ? steps : CHUNK_LEN;
        if (!is_bias(bias) && steps < CHUNK_LEN) clear_decays(next_w, steps);
        if constexpr (BY_HALVES) {
            wait_for_copies<1>();
            __syncthreads();  // the raw keys are there, and nobody reads the last chunk's operands any more
            const float2 factor = write_matrices_by_halves<false, CHANNELS>(
                smem.matrices, smem.levels, smem.raw, next_w, present, smem.totals, scale, nullptr, bias);
            write_decay(smem.factor, factor);
            from_w.load(next_w, next_steps);
            __syncthreads();  // the operands, the matrices and the factor are there
        } else {
            RateSums rates;
            sum_rates(rates, smem.totals, next_w, present, 0, bias);
            from_w.load(next_w, next_steps);
            wait_for_copies<1>();
            __syncthreads();  // the raw keys are there, and nobody reads the last chunk's operands any more
            const Frame frame =
                write_operands<false, CHANNELS>(rates, smem.totals, smem.raw, smem.operands, scale, nullptr);
            write_factor(smem.factor, {pending_exponent.x + frame.middle.x, pending_exponent.y + frame.middle.y});
            if constexpr (MAY_LEAVE_FRAMES) {
                // the operands are of no use
                if (__syncthreads_or(leaves_range(frame, steps) || is_steep(rates))) break;
            } else {
                __syncthreads();  // the operands are there
            }
            pending_exponent = {frame.end.x - frame.middle.x, frame.end.y - frame.middle.y};
        }

        copy_keys(next_steps), commit_copies();
        if constexpr (!BY_HALVES) write_token_matrices(smem.matrices, smem.operands);

        Accumulator out[TILES][CHUNK_LEN / 8] = {}, u[TILES][CHUNK_LEN / 8] = {};
        if (has_values) {
            const bool is_empty = SKIPS_ZEROS && left == chunks;
            if (!BY_HALVES && !is_empty) scale_columns(state, smem.factor);
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                if (is_empty) break;
                Fragment start_rows[TILES];
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    start_rows[i] = to_fragment(state[i][2 * c], state[i][2 * c + 1]);
                    if (checkpoints != nullptr) write_checkpoint(checkpoints, first_value + 16 * i, c, start_rows[i]);
                }
                // U <- A S'^T   Y <- R S'^T
                add_columns(16 * c, full(u, operand_a, start_rows), full(out, operand_r, start_rows));
                if constexpr (BY_HALVES) scale_columns<1>(state, smem.factor, c);
            }
            if (checkpoints != nullptr) checkpoints += heads;
        }
        if constexpr (!BY_HALVES) __syncthreads();  // the token matrices are there
        wait_for_copies<1>();  // the values, which a warp reads that has copied them
        __syncwarp();
        Fragment v_rows[TILES][BLOCKS];
        if (has_values) {
            load_rows(v_rows, values, first_value);
            __syncwarp();
        }
        copy_values(next_steps), commit_copies();
        if (!has_values) continue;

        add_triangles(lower(u, ak, v_rows), lower(out, rk, v_rows));  // U <- Aak V + A S'^T   Y <- Ark V + R S'^T
        Fragment u_rows[TILES][BLOCKS];
        solve(u_rows, tm, u);                                         // U <- Tm U
        add_triangles(lower(out, rb, u_rows));                        // Y <- Y + Arb U
        store_sums(outputs, first_value, out);
        if (!SKIPS_ZEROS || left > 1 || has_last_state(final_state, pieces, sequence))
            add_outer(state, outer(v_rows, operand_k), outer(u_rows, operand_b));  // S' <- S' + V^T K + U^T B
        __syncwarp();
        const T_IO* const own_y = &smem.y[0][first_value];
        if constexpr (NUM_THREADS * BLOCKS_PER_SM < 512)  // which leaves registers for all of it
            write_rows_at_once<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, VALUE_PITCH, 32>(
                y, y_stride, own_y, steps, width, lane_id());
        else
            write_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, VALUE_PITCH, 32>(y, y_stride, own_y, steps, width,
                                                                                lane_id());
        y += CHUNK_LEN * y_stride;
    }
    wait_for_copies<0>();
    if (MAY_LEAVE_FRAMES && threadIdx.x == 0)
        framed[sequence * heads + head] = chunks - left;
    const bool has_left = MAY_LEAVE_FRAMES && left > 0;
    if (has_last_state(final_state, pieces, sequence) || has_left) {
        __syncthreads();
        write_factor(smem.factor, pending_exponent);
        __syncthreads();
        if (has_values)
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                scale_columns(state[i], smem.factor);
                // The row is worked out again: kept, it would be a register more in the loop.
                const int row = warp_id() * WARP_ROWS + 16 * i;
                if (has_left) write_state<STATE_LAYOUT>(carried + state_offset, state[i], row);
                else write_state<STATE_LAYOUT>(
                    last_state(final_state, state_offset, pieces, sequence, head, slot_stride), state[i], row);
            }
    }
    if (MAY_LEAVE_FRAMES && board != nullptr) {
        __syncthreads();  // everybody has written
        if (threadIdx.x == 0) report(board, has_left, sequence * heads + head);
    }
}
