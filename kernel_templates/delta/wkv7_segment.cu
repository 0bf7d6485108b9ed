// What a segment of a sequence does to any state, a chunk after another on the tensor cores: it takes S at its start to
// S P + Q. Q is what becomes of zeros, P of the identity without values, so both are rows of one state; with the
// operands of wkv7_chunk.cuh
//
//     U = Tm (Aak V + A S'^T);   S <- (S' + V^T K + U^T B) diag(e^(D - m))
//
// Backwards a segment takes the gradient E after its end to E P^T + Q: the same with dX for U, dY for V and tokens in
// reverse, from the last chunk to the first,
//
//     dX = Tm^T (Arb^T dY + B E'^T);   E <- (E' + dY^T R + dX^T A) diag(e^m)
//
//   keys     k, backwards r  [segments, tokens, heads, K]  T_IO  in     w a b  the same shape  T_W, T_IO  in; w with
//            w0, see decay_bias.cuh
//   values   v, backwards dy  [segments, tokens, heads, V]  T_IO  in
//   additions    [segments, heads, V, K]  fp32  out: Q
//   transitions  [segments, heads, K, K]  fp32  out: P, of the forward alone
//   bounds, neighbours  of cut_sequences.cu  in or null, where segments are RAGGED. Without bounds a segment is a row
//                of the batch. With neighbours, those without one on the side that `purpose` asks for are left out
//
// Grid (segments, heads, rows / ROWS): the rows of P come behind those of Q, a multiple of 32. Tokens are a multiple of
// CHUNK_LEN, unless segments are RAGGED. A warp holds 16 TILES rows of the state in fp32, as in
// wkv7_chunked_forward.cu.
#include "wkv7_chunk.cuh"
#include "decay_bias.cuh"

constexpr int TILES = ceil_div(ROWS / 16, WARPS);
constexpr int WARP_ROWS = 16 * TILES;  // rows of a warp
constexpr int INPUT_PITCH = ROWS + 8;
static_assert(ROWS % 32 == 0, "rows must be a multiple of 32");

struct Smem {
    union {
        Operands operands;
        LevelTiles levels[2];  // by halves, before the operands are there
    };
    TokenMatrices matrices;
    RawKeys raw;
    T_IO input[CHUNK_LEN][INPUT_PITCH];  // V or dY; zeros for the rows of P
    float2 totals[SEGMENTS][PAIRS];
    float factor[CHANNELS];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

constexpr bool HAS_HALVES = LARGEST_DECAY > 0;

// A function that is called, so that chunks in frames keep their registers.
__device__ __noinline__ void prepare_by_halves(Smem& smem, const T_W* w, TokenStride w_stride, int steps, float scale) {
    RawDecays raw;
    raw.load(w, stride_of(w_stride), steps);
    const float2 factor = write_matrices_by_halves<false, CHANNELS>(smem.matrices, smem.levels, smem.raw, raw, steps,
                                                                    smem.totals, scale, nullptr, bias_of(w_stride));
    write_decay(smem.factor, factor);
    __syncthreads();  // the operands, the matrices and the factor are there
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_segment(
    const T_IO* __restrict__ keys, const T_W* __restrict__ w, const T_IO* __restrict__ a, const T_IO* __restrict__ b,
    const T_IO* __restrict__ values, const i64* __restrict__ bounds, const int* __restrict__ neighbours,
    float* __restrict__ additions, float* __restrict__ transitions, Strides key_strides, DecayStrides w_strides,
    Strides a_strides, Strides b_strides, Strides value_strides, i64 tokens, i64 heads, float scale, int purpose) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 segment = blockIdx.x, head = blockIdx.y;
    if (RAGGED && neighbours != nullptr && !(neighbours[segment] & purpose)) return;
    const Span span = sequence_span(RAGGED ? bounds : nullptr, segment, tokens);
    const int block_row = blockIdx.z * ROWS, own_row = warp_id() * WARP_ROWS, first_row = block_row + own_row;
    const bool has_rows = own_row < ROWS;
    const int width = max(min(WARP_ROWS, VALUE_SIZE - first_row), 0);

    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
    const auto steps_from = [&](i64 token) {
        return RAGGED ? static_cast<int>(min(span.length - token, i64(CHUNK_LEN))) : CHUNK_LEN;
    };
    keys += start(key_strides), w += start(w_strides), a += start(a_strides), b += start(b_strides);
    values += start(value_strides) + first_row;

    const auto copy = [&](i64 token) {
        const int steps = steps_from(token);
        const auto copy_keys = [&](T_IO (&rows)[CHUNK_LEN][CHANNELS], const T_IO* source, i64 stride) {
            copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS>(
                rows[0], source + token * stride, stride, steps, HEAD_SIZE, threadIdx.x);
        };
        copy_keys(BACKWARD ? smem.raw.r : smem.raw.k, keys, key_strides.token);
        copy_keys(smem.raw.a, a, a_strides.token), copy_keys(smem.raw.b, b, b_strides.token);
        // A warp reads what it has copied itself.
        copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, WARP_ROWS, INPUT_PITCH, 32>(
            &smem.input[0][own_row], values + token * value_strides.token, value_strides.token, steps, width,
            lane_id());
    };

    clear<NUM_THREADS>(smem);  // padding stays zero, and so does the fourth of the keys
    __syncthreads();
    const i64 first = BACKWARD ? (span.length - 1) / CHUNK_LEN * CHUNK_LEN : 0;
    constexpr i64 step = BACKWARD ? -CHUNK_LEN : CHUNK_LEN;
    RawDecays next_w;
    const DecayBias bias = bias_of(w_strides, head, threadIdx.x % PAIRS * 2);
    if (!RAGGED || span.length > 0) {
        copy(first), commit_copies();
        next_w.load(w + first * w_strides.token, w_strides.token, steps_from(first));
    }
    StateRows state[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        for_each_element(state[i], first_row + 16 * i, [&](float& x, int row, int channel, bool) {
            x = row == VALUES + channel ? 1.0f : 0.0f;
        });

    const auto with_values = tile_of(BACKWARD ? smem.operands.r : smem.operands.k);
    const auto with_solution = tile_of(BACKWARD ? smem.operands.a : smem.operands.b);
    const auto with_state = tile_of(BACKWARD ? smem.operands.b : smem.operands.a);
    const auto pairs = tile_of(BACKWARD ? smem.matrices.rb : smem.matrices.ak);
    const auto tm = tile_of(smem.matrices.tm);
    const auto input = tile_of(smem.input);

    float2 pending_exponent = {0.0f, 0.0f};  // the factor that the state lacks, for the thread's pair of channels
    i64 token = first;
    for (i64 left = span.length; left > 0; left -= CHUNK_LEN, token += step) {
        const int steps = steps_from(token);
        RateSums sums;
        sum_rates(sums, smem.totals, next_w, steps, 0, bias);
        const i64 next = token + step;
        if (left > CHUNK_LEN) next_w.load(w + next * w_strides.token, w_strides.token, steps_from(next));
        wait_for_copies<0>();
        __syncthreads();  // the raw rows are there, and nobody reads the last chunk's operands any more
        const Frame frame =
            write_operands<false, CHANNELS>(sums, smem.totals, smem.raw, smem.operands, scale, nullptr);
        const float2 end_exponent = {frame.end.x - frame.middle.x, frame.end.y - frame.middle.y};
        const float2 start_exponent = BACKWARD ? end_exponent : frame.middle;
        write_factor(smem.factor, {pending_exponent.x + start_exponent.x, pending_exponent.y + start_exponent.y});
        bool by_halves = false;
        if constexpr (HAS_HALVES) {
            // the operands are there, unless they are of no use
            by_halves = __syncthreads_or(leaves_range(frame, steps));
            if (by_halves) {
                write_factor(smem.factor, pending_exponent);
                __syncthreads();  // the factor is there
                if (has_rows) scale_columns(state, smem.factor);
                __syncthreads();  // nobody reads it any more
                prepare_by_halves(smem, w + token * w_strides.token, with_bias(w_strides.token, bias), steps, scale);
            }
        } else {
            __syncthreads();  // the operands are there
        }
        pending_exponent = by_halves ? float2{0.0f, 0.0f} : BACKWARD ? frame.middle : end_exponent;

        Fragment value_rows[TILES][BLOCKS];
        Accumulator sum[TILES][CHUNK_LEN / 8] = {};
        if (has_rows) {
            load_rows(value_rows, input, own_row);
            __syncwarp();
        }
        if (left > CHUNK_LEN) copy(next);
        commit_copies();
        if (!by_halves && warp_id() == 0) {
            invert(smem.matrices, smem.operands);
        } else if (!by_halves) {
            for (int task = warp_id() - 1; task < BLOCKS * (BLOCKS + 1) / 2; task += WARPS - 1) {
                const int p = task == 0 ? 0 : 1, q = task < 2 ? 0 : 1;
                const LeftRows rows(tile_of(BACKWARD ? smem.operands.r : smem.operands.a), p);
                Accumulator products[2] = {};
                multiply_rows(products, rows, tile_of(BACKWARD ? smem.operands.b : smem.operands.k), q);
                if (q == p) keep_lower(products, !BACKWARD);
                store_block(pairs, 16 * p, 16 * q, to_fragment(products[0], products[1]));
            }
        }

        if (has_rows) {
            if (!by_halves) scale_columns(state, smem.factor);
#pragma unroll
            for (int c = 0; c < CHANNELS / 16; ++c)
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    const Fragment start_rows = to_fragment(state[i][2 * c], state[i][2 * c + 1]);
                    add_columns(16 * c, full(sum[i], with_state, start_rows));  // U <- A S'^T, or dX <- B E'^T
                }
            if (by_halves) scale_columns<1>(state, smem.factor);  // what is in the state passes the chunk's decay
        }
        __syncthreads();  // the token matrices are there
        if (!has_rows) continue;

        Fragment solution[TILES][BLOCKS];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            add_triangles(triangle<BACKWARD>(sum[i], pairs, value_rows[i]));  // U <- U + Aak V, or dX <- dX + Arb^T dY
            solve<BACKWARD>(solution[i], tm, sum[i]);                         // U <- Tm U, or dX <- Tm^T dX
        }
        // S' <- S' + V^T K + U^T B, or E' <- E' + dY^T R + dX^T A
        add_outer(state, outer(value_rows, with_values), outer(solution, with_solution));
    }
    __syncthreads();
    write_factor(smem.factor, pending_exponent);
    __syncthreads();
    if (!has_rows) return;
    const i64 item = segment * heads + head;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        scale_columns(state[i], smem.factor);
        for_each_element(state[i], first_row + 16 * i, [&](float& x, int row, int channel, bool present) {
            const int key = row - VALUES;
            if (present) additions[item * (VALUE_SIZE * HEAD_SIZE) + i64(row) * HEAD_SIZE + channel] = x;
            else if (key >= 0 && key < HEAD_SIZE && channel < HEAD_SIZE)
                transitions[item * (HEAD_SIZE * HEAD_SIZE) + i64(key) * HEAD_SIZE + channel] = x;
        });
    }
}
