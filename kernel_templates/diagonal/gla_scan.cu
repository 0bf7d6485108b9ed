// Gated linear attention and its kin over a chunk of CHUNK_LEN tokens after another on the tensor cores: the forward,
// and what the backward of large heads does first. With the operands of gla_chunk.cuh and S [V, K] at the chunk's start
//
//     Y = P V + Q S'^T;   S <- (S' + V^T K) diag(e^(D - m))
//
// and backwards, from the last chunk to the first, with E = dL/dS at the chunk's end and E' = E diag(e^(D - m))
//
//     dV = P^T dY + K E'^T;   E <- (E' + dY^T Q) diag(e^m)
//
//   q k      [batch, tokens, heads, K]  T_IO  in     w  the same shape, T_W, in
//   u        [heads, K]  T_U  in, for the bonus
//   input, output  V and Y, or dY and dV  [batch, tokens, heads, V]  T_IO  in, out
//   first, last    S or E  [sequences, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out or null
//   checkpoints    [slots, heads]  out or null: S' or E' of every chunk; FOR_GROUPS, without decays, S of every 64th
//                  token, as gla_group_backward.cu reads it
//   leaves         as in wkv7_chunked_forward.cu
//
// Grid (sequences, heads, value rows / ROWS). A warp holds 16 TILES rows of the state in fp32 for the whole sequence.
#include "gla_chunk.cuh"

constexpr int TILES = ceil_div(ROWS / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;
constexpr int INPUT_PITCH = ROWS + 8;
constexpr int CHECKPOINT_LEN = FOR_GROUPS ? GROUP_CHUNK_LEN : CHUNK_LEN;  // tokens from one to the next

struct Smem {
    PairOperands operands;
    TokenTile pairs;
    RawPair raw;
    bf16 input[CHUNK_LEN][INPUT_PITCH], output[CHUNK_LEN][INPUT_PITCH];
    float2 totals[SEGMENTS][PAIRS];
    float factor[CHANNELS], bonus_terms[PAIRS / 16][CHUNK_LEN];
    float2 pending_exponent[PAIRS];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");
static_assert(ROWS % WARP_ROWS == 0, "rows must be a multiple of those of a warp");
static_assert(!FOR_GROUPS || (!BACKWARD && !HAS_DECAY && CHECKPOINT_LEN % CHUNK_LEN == 0),
              "a forward for groups must have no decay and chunks of up to 64");

// Forwards, where decays may leave the range of a chunk's frame.
constexpr bool RESCANS = LARGEST_DECAY > 0 && !BACKWARD;

// A chunk one token after another in fp32, which any decay allows; what Y is goes to `output`. The state is as it is at
// the chunk's start. A lane has two rows of 16 and a quarter of the channels.
__device__ inline void scan_tokens(StateRows (&state)[TILES], Smem& smem, const T_W* w, i64 w_stride, const T_U* u,
                                   int own_row, bool has_values, int steps, float scale) {
    for (int t = 0; t < steps; ++t) {
        __syncthreads();  // nobody reads the last token's factor any more
        if (threadIdx.x < CHANNELS)
            smem.factor[threadIdx.x] =
                threadIdx.x < HEAD_SIZE ? decay_factor<DECAY>(to_float(w[t * w_stride + threadIdx.x])) : 1.0f;
        __syncthreads();  // the factor is there
        if (!has_values) continue;
        float values[TILES][2], sums[TILES][2] = {}, bonus_terms = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) values[i][h] = to_float(smem.input[t][own_row + 16 * i + group() + 8 * h]);
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; ++n) {
            const int channel = 8 * n + 2 * quad_lane();
            const float2 of_q = unpack(*reinterpret_cast<const unsigned*>(&smem.raw.q[t][channel]));
            const float2 of_k = unpack(*reinterpret_cast<const unsigned*>(&smem.raw.k[t][channel]));
            const float2 factor = *reinterpret_cast<const float2*>(&smem.factor[channel]);
            if constexpr (BONUS) {
                if (channel < HEAD_SIZE) bonus_terms += to_float(u[channel]) * of_q.x * of_k.x;
                if (channel + 1 < HEAD_SIZE) bonus_terms += to_float(u[channel + 1]) * of_q.y * of_k.y;
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float &x = state[i][n][2 * h], &y = state[i][n][2 * h + 1];
                    if (BONUS) sums[i][h] += x * of_q.x + y * of_q.y;
                    x = x * factor.x + values[i][h] * of_k.x, y = y * factor.y + values[i][h] * of_k.y;
                    if (!BONUS) sums[i][h] += x * of_q.x + y * of_q.y;
                }
        }
#pragma unroll
        for (int delta = 1; delta < 4; delta *= 2) bonus_terms += __shfl_xor_sync(0xffffffffu, bonus_terms, delta);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = sums[i][h];
#pragma unroll
                for (int delta = 1; delta < 4; delta *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
                T_IO* const target = reinterpret_cast<T_IO*>(&smem.output[t][own_row + 16 * i + group() + 8 * h]);
                if (quad_lane() == 0) *target = from_float<T_IO>(scale * (sum + bonus_terms * values[i][h]));
            }
    }
    __syncthreads();  // nobody reads the rows any more
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_scan(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ input, const T_W* __restrict__ w,
    const T_U* __restrict__ u, const T_STATE* __restrict__ first, const i64* __restrict__ cu_seqlens,
    T_IO* __restrict__ output, T_STATE* __restrict__ last, Checkpoint* __restrict__ checkpoints,
    int* __restrict__ leaves, Strides q_strides, Strides k_strides, Strides input_strides, Strides w_strides,
    i64 tokens, i64 heads, float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int own_row = warp_id() * WARP_ROWS, first_value = blockIdx.z * ROWS + own_row;
    const bool has_values = own_row < ROWS && first_value < VALUES;
    const int width = has_values ? max(min(WARP_ROWS, VALUE_SIZE - first_value), 0) : 0;

    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
    q += start(q_strides), k += start(k_strides), w += start(w_strides), input += start(input_strides) + first_value;
    const i64 out_stride = heads * VALUE_SIZE;
    output += (span.batch * tokens + span.begin) * out_stride + head * VALUE_SIZE + first_value;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);
    if (checkpoints != nullptr)
        checkpoints += first_checkpoint(cu_seqlens, sequence, span, CHECKPOINT_LEN) * heads + head;

    const auto copy = [&](i64 token) {
        const i64 steps = span.length - token;
        const auto copy_keys = [&](T_IO (&rows)[CHUNK_LEN][CHANNELS], const T_IO* source, i64 stride) {
            copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS>(
                rows[0], source + token * stride, stride, steps, HEAD_SIZE, threadIdx.x);
        };
        copy_keys(smem.raw.q, q, q_strides.token), copy_keys(smem.raw.k, k, k_strides.token);
        copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, INPUT_PITCH, 32>(  // a warp reads what it has copied itself
            reinterpret_cast<T_IO*>(&smem.input[0][own_row]), input + token * input_strides.token, input_strides.token,
            steps, width, lane_id());
        commit_copies();
    };

    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Smem) / 4); i += NUM_THREADS)
        reinterpret_cast<unsigned*>(shared_bytes)[i] = 0;  // padding stays zero
    __syncthreads();
    constexpr int STEP = BACKWARD ? -CHUNK_LEN : CHUNK_LEN;
    const i64 last_chunk = (span.length - 1) / CHUNK_LEN * CHUNK_LEN, first_token = BACKWARD ? last_chunk : 0;
    const auto exists = [&](i64 token) { return BACKWARD ? token >= 0 : token < span.length; };
    const auto load_decays = [&](RawDecays& decays, i64 token) {
        if constexpr (HAS_DECAY)
            decays.load(w + token * w_strides.token, w_strides.token,
                        static_cast<int>(min(span.length - token, i64(CHUNK_LEN))));
    };
    RawDecays next_w;
    if (span.length > 0) copy(first_token), load_decays(next_w, first_token);
    float2 bonus = {0.0f, 0.0f};
    if constexpr (BONUS) {
        const int channel = threadIdx.x % PAIRS * 2;
        if (channel < HEAD_SIZE) bonus.x = scale * to_float(u[head * HEAD_SIZE + channel]);
        if (channel + 1 < HEAD_SIZE) bonus.y = scale * to_float(u[head * HEAD_SIZE + channel + 1]);
    }
    StateRows state[TILES];
    read_state<STATE_LAYOUT>(state, first ? first + state_offset : nullptr, first_value);

    const auto with_state = tile_of(BACKWARD ? smem.operands.k : smem.operands.q);
    const auto with_input = tile_of(BACKWARD ? smem.operands.q : smem.operands.k);
    const auto pairs = tile_of(smem.pairs);
    const auto inputs = tile_of(smem.input), outputs = tile_of(smem.output);

    // the factor that the state lacks, which threads below PAIRS write
    float2& pending_exponent = smem.pending_exponent[threadIdx.x % PAIRS];
    bool leaves_range = false;
    if (checkpoints != nullptr) checkpoints += first_token / CHECKPOINT_LEN * heads;
    const auto is_kept = [&](i64 token) {
        return checkpoints != nullptr && (!FOR_GROUPS || token % CHECKPOINT_LEN == 0);
    };
    for (i64 token = first_token; exists(token) && span.length > 0; token += STEP) {
        const int steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
        RateSums sums;
        sum_decays(sums, smem.totals, next_w, steps);
        const i64 next = token + STEP;
        if (exists(next)) load_decays(next_w, next);
        wait_for_copies<0>();
        __syncthreads();  // the raw rows are there, and nobody reads the last chunk's operands any more
        float bonus_terms[SEGMENT_LEN];
        const Frame frame =
            write_pair<false, CHANNELS>(sums, smem.totals, smem.raw, smem.operands, scale, bonus, bonus_terms, nullptr);
        if constexpr (BONUS) write_bonus_terms(smem.bonus_terms, bonus_terms);
        const float2 end_exponent = {frame.end.x - frame.middle.x, frame.end.y - frame.middle.y};
        const float2 start_exponent = BACKWARD ? end_exponent : frame.middle;
        if constexpr (HAS_DECAY)
            write_factor(smem.factor, {pending_exponent.x + start_exponent.x, pending_exponent.y + start_exponent.y});
        bool leaves_here = false;
        if constexpr (LARGEST_DECAY > 0) {
            const auto in_range = [](float exponent) { return fabsf(exponent) <= LARGEST_DECAY * LOG2_E; };
            leaves_here |= !(in_range(frame.middle.x) && in_range(frame.middle.y));
            leaves_here |= !(in_range(end_exponent.x) && in_range(end_exponent.y));
            if constexpr (DECAY == Decay::log || DECAY == Decay::direct) leaves_here |= !in_range(frame.farthest);
        }
        if constexpr (!is_bf16<T_IO>) {
            round_columns<WARP_ROWS>(smem.input, own_row, has_values);
            __syncwarp();
        }
        if constexpr (RESCANS) {
            if (__syncthreads_or(leaves_here)) {  // the operands are there, but they are of no use
                leaves_range = true;
                if (threadIdx.x < PAIRS) write_factor(smem.factor, pending_exponent), pending_exponent = {0.0f, 0.0f};
                __syncthreads();  // the factor is there
                if (has_values) scale_columns(state, smem.factor);
                scan_tokens(state, smem, w + token * w_strides.token, w_strides.token, u + head * HEAD_SIZE, own_row,
                            has_values, steps, scale);
                if (has_values)
                    write_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, INPUT_PITCH, 32>(
                        output + token * out_stride, out_stride,
                        reinterpret_cast<const T_IO*>(&smem.output[0][own_row]), steps, width, lane_id());
                if (is_kept(token)) {  // nobody needs this one, but it shall not be what memory held before
                    if (has_values)
#pragma unroll
                        for (int i = 0; i < TILES; ++i)
                            for (int c = 0; c < CHANNELS / 16; ++c)
                                write_checkpoint(checkpoints, first_value + 16 * i, c, {});
                    checkpoints += heads;
                }
                if (exists(next)) copy(next);
                continue;
            }
        } else {
            leaves_range |= leaves_here;
            __syncthreads();  // the operands are there
        }
        if (HAS_DECAY && threadIdx.x < PAIRS) pending_exponent = BACKWARD ? frame.middle : end_exponent;

        Checkpoint* own_checkpoint = nullptr;  // from the warp's rows on, so that what it writes has constant offsets
        if (FOR_GROUPS && checkpoints != nullptr)
            own_checkpoint = reinterpret_cast<Checkpoint*>(&checkpoints->lanes[first_value / 16]);
        Fragment input_rows[TILES][BLOCKS];
        Accumulator out[TILES][CHUNK_LEN / 8] = {};
        if (has_values) {
            load_rows(input_rows, inputs, own_row);
            __syncwarp();
        }
        if (exists(next)) copy(next);
        write_pairs(smem.pairs, smem.operands, smem.bonus_terms);
        if (has_values) {
            if constexpr (HAS_DECAY) scale_columns(state, smem.factor);
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c) {
                Fragment start_rows[TILES];
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    start_rows[i] = to_fragment(state[i][2 * c], state[i][2 * c + 1]);
                    if (!is_kept(token)) continue;
                    if constexpr (FOR_GROUPS) write_matrices(own_checkpoint, 16 * i, c, start_rows[i]);
                    else write_checkpoint(checkpoints, first_value + 16 * i, c, start_rows[i]);
                }
                add_columns(16 * c, full(out, with_state, start_rows));     // Y <- Q S'^T, or dV <- K E'^T
                // S' <- S' + V^T K, or E' <- E' + dY^T Q, of these channels, which nobody needs any more as they were
                add_outer(c, state, outer(input_rows, with_input));
            }
        }
        if (is_kept(token)) checkpoints += BACKWARD ? -heads : heads;
        __syncthreads();  // the pairs are there
        if (!has_values) continue;
        add_triangles(triangle<BACKWARD>(out, pairs, input_rows));  // Y <- Y + P V, or dV <- dV + P^T dY
        store_sums<T_IO>(outputs, own_row, out);
        __syncwarp();
        write_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, INPUT_PITCH, 32>(
            output + token * out_stride, out_stride, reinterpret_cast<const T_IO*>(&smem.output[0][own_row]), steps,
            width, lane_id());
    }
    wait_for_copies<0>();
    if constexpr (LARGEST_DECAY > 0) {
        const bool found = __syncthreads_or(leaves_range);
        if (leaves != nullptr && threadIdx.x == 0 && blockIdx.z == 0) leaves[sequence * heads + head] = found;
    }
    if (last == nullptr) return;
    __syncthreads();
    write_factor(smem.factor, pending_exponent);
    __syncthreads();
    if (!has_values) return;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        if constexpr (HAS_DECAY) scale_columns(state[i], smem.factor);
        write_state<STATE_LAYOUT>(last + state_offset, state[i], first_value + 16 * i);
    }
}
