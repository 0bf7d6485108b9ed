// Gated linear attention and its kin over a chunk of CHUNK_LEN tokens after another on the tensor cores: the forward,
// and what the backward of large heads does first. With the operands of gla_chunk.cuh and S [V, K] at the chunk's start
//
//     Y = P V + Q S'^T;   S <- (S' + V^T K) diag(e^(D - m))
//
// and backwards, from the last chunk to the first, with E = dL/dS at the chunk's end and E' = E diag(e^(D - m))
//
//     dV = P^T dY + K E'^T;   E <- (E' + dY^T Q) diag(e^m)
//
//   q k      [batch, tokens, heads, K]  T_IO  in     w  the same shape, T_W, in; with w0, see decay_bias.cuh
//   u        [heads, K]  T_U  in, for the bonus
//   input, output  V and Y, or dY and dV  [batch, tokens, heads, V]  T_IO  in, out
//   first, last    S or E  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//   checkpoints    [slots, heads]  out or null: S' or E' of every chunk; FOR_GROUPS, without decays, S of every 64th
//                  token, as gla_group_backward.cu reads it
//   framed         [sequences, heads]  out of the forward, in of the backward, or null: how many chunks of a head, from
//                  its first on, are in frames; the others are by halves (levels.cuh)
//
// Where decays leave the range of a chunk's frame, the rest of the head goes by halves: then S' is S, the factor e^D
// lies between Y's product and the state's, and P, Q and K are as write_pairs_by_halves of gla_chunk.cuh makes them.
//
// Grid (sequences, heads, value rows / ROWS); with POOLED heads come first, as in wkv7_chunked_forward. A warp holds 16
// TILES rows of the state in fp32 for the whole sequence.
#include "gla_chunk.cuh"
#include "decay_bias.cuh"
#include "pooled.cuh"

constexpr int TILES = ceil_div(ROWS / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;
constexpr int INPUT_PITCH = ROWS + 8;
constexpr int CHECKPOINT_LEN = FOR_GROUPS ? GROUP_CHUNK_LEN : CHUNK_LEN;  // tokens from one to the next

// What a warp walks over: rows of its head, from its sequence's first token on.
struct Rows {
    const T_IO *q, *k, *input;  // input and output from the warp's first value on
    const T_W* w;
    T_IO* output;
    Checkpoint* checkpoints;  // the state's at the first chunk, or null
    i64 length, q_stride, k_stride, input_stride, w_stride, output_stride, checkpoint_stride;
    float2 bonus;  // of the thread's pair of channels, with the scale
    float scale;
    int own_row, first_value, width;  // value rows of the warp
    bool has_values;

    __device__ bool exists(i64 token) const { return BACKWARD ? token >= 0 : token < length; }
    __device__ int steps_from(i64 token) const { return static_cast<int>(min(length - token, i64(CHUNK_LEN))); }
    template <typename Smem> __device__ void copy(Smem& smem, i64 token) const {
        const i64 steps = length - token;
        const auto copy_keys = [&](T_IO (&rows)[CHUNK_LEN][CHANNELS], const T_IO* source, i64 stride) {
            copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS>(
                rows[0], source + token * stride, stride, steps, HEAD_SIZE, threadIdx.x);
        };
        copy_keys(smem.raw.q, q, q_stride), copy_keys(smem.raw.k, k, k_stride);
        copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, INPUT_PITCH, 32>(  // a warp reads what it has copied itself
            &smem.input[0][own_row], input + token * input_stride, input_stride, steps, width,
            lane_id());
        commit_copies();
    }
    __device__ void load(RawDecays& decays, i64 token) const {
        if constexpr (HAS_DECAY) decays.load(w + token * w_stride, w_stride, steps_from(token));
    }
    __device__ void prefetch_decays(i64 token) const {
        if (threadIdx.x < steps_from(token)) prefetch_row<HEAD_SIZE>(w + (token + threadIdx.x) * w_stride);
    }
};

struct Smem {
    union {
        PairOperands operands;
        KeyTile levels[LEVEL_TILES];  // by halves, before the operands are there
    };
    TokenTile pairs;
    RawPair raw;
    T_IO input[CHUNK_LEN][INPUT_PITCH], output[CHUNK_LEN][INPUT_PITCH];
    float2 totals[SEGMENTS][PAIRS];
    float factor[CHANNELS], bonus_terms[PAIRS / 16][CHUNK_LEN];
    float2 pending_exponent[PAIRS];
    Rows rows[WARPS];  // by halves, for which there are no registers
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");
static_assert(ROWS % WARP_ROWS == 0, "rows must be a multiple of those of a warp");
static_assert(!FOR_GROUPS || (!BACKWARD && !HAS_DECAY && CHECKPOINT_LEN % CHUNK_LEN == 0),
              "a forward for groups must have no decay and chunks of up to 64");

// The same with what is added to w, which is a thread's.
struct Head : Rows, DecayBias {
    static constexpr int STEP = BACKWARD ? -CHUNK_LEN : CHUNK_LEN;
};

// Where decays may leave the range of a chunk's frame.
constexpr bool HAS_HALVES = LARGEST_DECAY > 0;

// Walks over chunks, from that of `token` on, whose rows are on their way, as long as `goes_on` holds. In frames a
// forward stops at a chunk that leaves them. Returns the first token of the chunk that comes next.
template <bool BY_HALVES, typename GoesOn>
__device__ inline i64 walk(Smem& smem, const Rows& head, const float2& own_bonus, const DecayBias& bias,
                           StateRows (&state)[TILES], i64 token, GoesOn goes_on) {
    const auto with_state = tile_of(BACKWARD ? smem.operands.k : smem.operands.q);
    const auto with_input = tile_of(BACKWARD ? smem.operands.q : smem.operands.k);
    const auto pairs = tile_of(smem.pairs);
    const auto inputs = tile_of(smem.input), outputs = tile_of(smem.output);
    // the factor that the state lacks, which threads below PAIRS write
    float2& pending_exponent = smem.pending_exponent[threadIdx.x % PAIRS];
    Checkpoint* checkpoint = head.checkpoints;
    if (checkpoint != nullptr) checkpoint += token / CHECKPOINT_LEN * head.checkpoint_stride;
    const auto is_kept = [&](i64 token) {
        return checkpoint != nullptr && (!FOR_GROUPS || token % CHECKPOINT_LEN == 0);
    };
    RawDecays next_w;
    if (!BY_HALVES && goes_on(token)) head.load(next_w, token);
    for (; goes_on(token); token += Head::STEP) {
        const int steps = head.steps_from(token);
        const i64 next = token + Head::STEP;
        if constexpr (BY_HALVES) {
            head.load(next_w, token);  // a chunk ahead there are no registers for them
            wait_for_copies<0>();
            __syncthreads();  // the raw rows are there, and nobody reads the last chunk's operands any more
            if (goes_on(next)) head.prefetch_decays(next);
            const float2 bonus = BONUS ? own_bonus : float2{head.scale, head.scale};
            const float2 factor = write_pairs_by_halves<false, CHANNELS>(
                smem.pairs, smem.levels, smem.raw, next_w, steps, smem.totals, head.scale, bonus, smem.bonus_terms,
                nullptr, bias);
            write_decay(smem.factor, factor);
        } else {
            RateSums sums;
            sum_decays(sums, smem.totals, next_w, steps, bias);
            if (goes_on(next)) head.load(next_w, next);
            wait_for_copies<0>();
            __syncthreads();  // the raw rows are there, and nobody reads the last chunk's operands any more
            float bonus_terms[SEGMENT_LEN];
            const Frame frame = write_pair<false, CHANNELS>(sums, smem.totals, smem.raw, smem.operands, head.scale,
                                                            own_bonus, bonus_terms, nullptr);
            if constexpr (BONUS) write_own_terms(smem.bonus_terms, bonus_terms);
            const float2 end_exponent = {frame.end.x - frame.middle.x, frame.end.y - frame.middle.y};
            const float2 start_exponent = BACKWARD ? end_exponent : frame.middle;
            if constexpr (HAS_DECAY)
                write_factor(smem.factor,
                             {pending_exponent.x + start_exponent.x, pending_exponent.y + start_exponent.y});
            if constexpr (HAS_HALVES && !BACKWARD)
                if (__syncthreads_or(leaves_range(frame, steps) || is_steep(sums))) return token;
            if (HAS_DECAY && threadIdx.x < PAIRS) pending_exponent = BACKWARD ? frame.middle : end_exponent;
        }
        if (BY_HALVES || !HAS_HALVES || BACKWARD) __syncthreads();  // the operands are there

        Checkpoint* own_checkpoint = nullptr;  // from the warp's rows on, so that what it writes has constant offsets
        if (FOR_GROUPS && checkpoint != nullptr)
            own_checkpoint = reinterpret_cast<Checkpoint*>(&checkpoint->lanes[head.first_value / 16]);
        Fragment input_rows[TILES][BLOCKS];
        Accumulator out[TILES][CHUNK_LEN / 8] = {};
        if (head.has_values) {
            load_rows(input_rows, inputs, head.own_row);
            __syncwarp();
        }
        if (head.exists(next)) head.copy(smem, next);
        if constexpr (!BY_HALVES) write_pairs(smem.pairs, smem.operands, smem.bonus_terms);
        if (head.has_values) {
            if (HAS_DECAY && !BY_HALVES) scale_columns(state, smem.factor);
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                Fragment start_rows[TILES];
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    start_rows[i] = to_fragment(state[i][2 * c], state[i][2 * c + 1]);
                    if (!is_kept(token)) continue;
                    if constexpr (FOR_GROUPS) write_matrices(own_checkpoint, 16 * i, c, start_rows[i]);
                    else write_checkpoint(checkpoint, head.first_value + 16 * i, c, start_rows[i]);
                }
                add_columns(16 * c, full(out, with_state, start_rows));  // Y <- Q S'^T, or dV <- K E'^T
                if constexpr (BY_HALVES) scale_columns<1>(state, smem.factor, c);
                // S' <- S' + V^T K, or E' <- E' + dY^T Q, of these channels, which nobody needs any more as they were
                add_outer(c, state, outer(input_rows, with_input));
            }
        }
        if (is_kept(token)) checkpoint += BACKWARD ? -head.checkpoint_stride : head.checkpoint_stride;
        __syncthreads();  // the pairs are there
        if (!head.has_values) continue;
        add_triangles(triangle<BACKWARD>(out, pairs, input_rows));  // Y <- Y + P V, or dV <- dV + P^T dY
        store_sums(outputs, head.own_row, out);
        __syncwarp();
        write_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, INPUT_PITCH, 32>(
            head.output + token * head.output_stride, head.output_stride,
            &smem.output[0][head.own_row], steps, head.width, lane_id());
    }
    return token;
}

// All chunks up to `end`, or backwards down to it, by halves: a function that is called, so that the walk in frames
// keeps its registers. What it is given lies in memory.
__device__ __noinline__ void walk_by_halves(Smem& smem, const Head& given, StateRows (&kept)[TILES], i64 token,
                                            i64 end) {
    Rows& head = smem.rows[warp_id()];
    if (lane_id() == 0) head = given;
    __syncwarp();
    StateRows state[TILES];
    copy_state(state, kept);
    walk<true>(smem, head, given.bonus, given, state, token,
               [&](i64 token) { return BACKWARD ? token >= end : token < end; });
    copy_state(kept, state);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_scan(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ input, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_STATE* __restrict__ first, const i64* __restrict__ cu_seqlens,
    T_IO* __restrict__ output, T_STATE* __restrict__ last, Checkpoint* __restrict__ checkpoints,
    int* __restrict__ framed,
    Strides q_strides, Strides k_strides, Strides input_strides, DecayStrides w_strides, i64 tokens, i64 heads,
    float scale, const Piece* __restrict__ pieces, i64 slot_stride, int wave, int waves) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = piece_of(POOLED ? blockIdx.y : blockIdx.x, wave, waves), number = POOLED ? blockIdx.x : blockIdx.y;
    if (is_for_others(pieces, sequence, wave)) return;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + number * s.head; };
    const i64 output_stride = heads * VALUE_SIZE;
    const i64 state_offset = (sequence * heads + number) * (VALUE_SIZE * HEAD_SIZE);
    Head head = {{q + start(q_strides), k + start(k_strides), input + start(input_strides), w + start(w_strides)},
                 bias_of(w_strides, number, threadIdx.x % PAIRS * 2)};
    head.own_row = warp_id() * WARP_ROWS, head.first_value = blockIdx.z * ROWS + head.own_row;
    head.has_values = head.own_row < ROWS && head.first_value < VALUES;
    head.width = head.has_values ? max(min(WARP_ROWS, VALUE_SIZE - head.first_value), 0) : 0;
    head.input += head.first_value;
    head.output = output + (span.batch * tokens + span.begin) * output_stride + number * VALUE_SIZE + head.first_value;
    head.checkpoints = checkpoints;
    if (checkpoints != nullptr)
        head.checkpoints += first_checkpoint(cu_seqlens, sequence, span, CHECKPOINT_LEN) * heads + number;
    head.length = span.length, head.scale = scale, head.checkpoint_stride = heads, head.output_stride = output_stride;
    head.q_stride = q_strides.token, head.k_stride = k_strides.token, head.w_stride = w_strides.token;
    head.input_stride = input_strides.token;

    clear<NUM_THREADS>(smem);  // padding stays zero
    __syncthreads();
    i64 token = BACKWARD ? (span.length - 1) / CHUNK_LEN * CHUNK_LEN : 0;
    const bool has_tokens = span.length > 0;
    if (has_tokens) head.copy(smem, token);
    head.bonus = {0.0f, 0.0f};
    if constexpr (BONUS) {
        const int channel = threadIdx.x % PAIRS * 2;
        if (channel < HEAD_SIZE) head.bonus.x = scale * to_float(u[number * HEAD_SIZE + channel]);
        if (channel + 1 < HEAD_SIZE) head.bonus.y = scale * to_float(u[number * HEAD_SIZE + channel + 1]);
    }
    StateRows state[TILES];
    read_state<STATE_LAYOUT>(state, first_state(first, state_offset, pieces, sequence, number, slot_stride), head.first_value);

    float2& pending_exponent = smem.pending_exponent[threadIdx.x % PAIRS];
    const auto leave_frames = [&](i64 end) {
        if (threadIdx.x < PAIRS) write_factor(smem.factor, pending_exponent), pending_exponent = {0.0f, 0.0f};
        __syncthreads();  // the factor is there
        if (head.has_values) scale_columns(state, smem.factor);
        __syncthreads();  // nobody reads it any more
        const Head given = head;
        StateRows kept[TILES];
        copy_state(kept, state);
        walk_by_halves(smem, given, kept, token, end);
        copy_state(state, kept);
    };
    int* const own_framed = framed == nullptr ? nullptr : &framed[sequence * heads + number];
    if constexpr (HAS_HALVES && BACKWARD) {
        const i64 end = i64(*own_framed) * CHUNK_LEN;
        if (has_tokens && token >= end) leave_frames(end), token = end - CHUNK_LEN;
    }
    if (has_tokens)
        token = walk<false>(smem, head, head.bonus, head, state, token, [&](i64 token) { return head.exists(token); });
    if constexpr (HAS_HALVES && !BACKWARD) {
        if (own_framed != nullptr && threadIdx.x == 0 && blockIdx.z == 0)
            *own_framed = static_cast<int>(token / CHUNK_LEN);
        if (has_tokens && token < span.length) leave_frames(span.length);
    }
    wait_for_copies<0>();
    if (!has_last_state(last, pieces, sequence)) return;
    __syncthreads();
    write_factor(smem.factor, pending_exponent);
    __syncthreads();
    if (!head.has_values) return;
    T_STATE* const own_last = last_state(last, state_offset, pieces, sequence, number, slot_stride);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        if constexpr (HAS_DECAY) scale_columns(state[i], smem.factor);
        write_state<STATE_LAYOUT>(own_last, state[i], head.first_value + 16 * i);
    }
}
