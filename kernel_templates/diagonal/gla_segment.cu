// What a segment of a sequence does to any state of gated linear attention and its kin: it takes S at its start to
// S diag(e^D) + Q, with D the sum of its log-decays and Q what becomes of zeros. A chunk after another on the tensor
// cores, with c_t and D of the chunk,
//
//     S <- S diag(e^D) + V^T K;   K = k e^(D - c_t)
//
// Backwards a segment takes the gradient E after its end to E diag(e^D) + Q: the same with dY for V and chunks in
// reverse,
//
//     E <- E diag(e^D) + dY^T Q;   Q = scale q e^(e_t), with e_t as in gla_chunk.cuh
//
// Tokens do not meet here, so keys are taken to the end of the chunk and queries to its start, not to its middle, by
// products of the decays in between alone: where tokens decay nothing grows, and what has decayed is zero.
//
//   keys       k, backwards q  [segments, tokens, heads, K]  T_IO  in     w  the same shape, or [heads, K]  T_W  in,
//              with w0, see decay_bias.cuh
//   values     v, backwards dy  [segments, tokens, heads, V]  T_IO  in
//   additions  [segments, heads, V, K]  fp32  out: Q
//   decays     [segments, heads, K]  fp32  out: e^D, of the forward alone
//   bounds, neighbours  of cut_sequences.cu  in or null, where segments are RAGGED. Without bounds a segment is a row
//              of the batch. With neighbours, those without one on the side that `purpose` asks for are left out
//
// Grid (segments, heads). Tokens are a multiple of CHUNK_LEN, unless segments are RAGGED. A warp holds 16 value rows of
// the state in fp32. Rows and columns of padding may hold anything: they go to no others.
#include "chunk.cuh"

constexpr int DECAY_CHANNELS = CHANNELS, DECAY_PARTS = 1;
constexpr bool DECAYS_COME_IN_PARTS = false;
#include "chunk_decay.cuh"
#include "decay_bias.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(NUM_THREADS == 2 * VALUES, "num_threads must be twice the value size, rounded up to a multiple of 32");

struct alignas(16) Smem {
    KeyTile keys;
    T_IO raw[2][CHUNK_LEN][CHANNELS];  // of this chunk and the next one
    ValueTile values[2];
    float2 totals[SEGMENTS][PAIRS];
    float factor[CHANNELS];
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) gla_segment(
    const T_IO* __restrict__ keys, const T_W* __restrict__ w, const T_IO* __restrict__ values,
    const i64* __restrict__ bounds, const int* __restrict__ neighbours, float* __restrict__ additions,
    float* __restrict__ decays, Strides key_strides, DecayStrides w_strides, Strides value_strides, i64 tokens,
    i64 heads, float scale, int purpose) {
    __shared__ Smem smem;
    const i64 segment = blockIdx.x, head = blockIdx.y, item = segment * heads + head;
    if (RAGGED && neighbours != nullptr && !(neighbours[segment] & purpose)) return;
    const Span span = sequence_span(RAGGED ? bounds : nullptr, segment, tokens);
    const int own_row = 16 * warp_id(), width = max(min(16, VALUE_SIZE - own_row), 0);
    // a pair of channels, and of the chunk's tokens
    const int index = threadIdx.x % PAIRS, share = threadIdx.x / PAIRS;
    const auto start = [&](Strides s) { return span.batch * s.batch + span.begin * s.token + head * s.head; };
    const auto steps_from = [&](i64 token) {
        return RAGGED ? static_cast<int>(min(span.length - token, i64(CHUNK_LEN))) : CHUNK_LEN;
    };
    keys += start(key_strides), w += start(w_strides), values += start(value_strides) + own_row;

    RawDecays next_w;
    const DecayBias bias = bias_of(w_strides, head, 2 * index);
    const auto fetch = [&](i64 token, int stage) {
        const int steps = steps_from(token);
        copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, HEAD_SIZE, CHANNELS, NUM_THREADS>(
            smem.raw[stage][0], keys + token * key_strides.token, key_strides.token, steps, HEAD_SIZE, threadIdx.x);
        copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, 16, VALUE_PITCH, 32>(
            &smem.values[stage][0][own_row], values + token * value_strides.token,
            value_strides.token, steps, width, lane_id());
        commit_copies();
        if constexpr (HAS_DECAY) next_w.load(w + token * w_strides.token, w_strides.token, steps);
    };
    i64 token = BACKWARD ? (span.length - 1) / CHUNK_LEN * CHUNK_LEN : 0;
    if (!RAGGED || span.length > 0) fetch(token, 0);
    StateRows state[1] = {};
    const auto product = [](float2 x, float2 y) { return float2{x.x * y.x, x.y * y.y}; };
    float2 decay = {1.0f, 1.0f};  // of the thread's pair of channels, over all chunks
    int stage = 0;
    for (i64 left = span.length; left > 0; left -= CHUNK_LEN) {
        const int steps = steps_from(token);
        float2 kept[SEGMENT_LEN], total = {1.0f, 1.0f};  // what the thread's tokens leave of a token's key
        if constexpr (HAS_DECAY) {
#pragma unroll
            for (int n = 0; n < SEGMENT_LEN; ++n) {
                const int i = BACKWARD ? n : SEGMENT_LEN - 1 - n;
                const float2 before = total;
                if (!RAGGED || share * SEGMENT_LEN + i < steps)  // tokens that are not there do not decay
                    total = product(total, {token_decay<DECAY>(next_w.with(bias, i, 0)),
                                            token_decay<DECAY>(next_w.with(bias, i, 1))});
                kept[i] = BACKWARD && !BONUS ? total : before;
            }
            if (share < SEGMENTS) smem.totals[share][index] = total;
        }
        wait_for_copies<0>();
        __syncthreads();  // totals and rows are there, and nobody reads the last chunk any more
        token += BACKWARD ? -CHUNK_LEN : CHUNK_LEN;
        if (left > CHUNK_LEN) fetch(token, 1 - stage);

        float2 factor = {1.0f, 1.0f};  // what tokens of other threads leave
        if constexpr (HAS_DECAY) {
            float2 all = {1.0f, 1.0f};
#pragma unroll
            for (int s = 0; s < SEGMENTS; ++s) {
                const float2 one = smem.totals[s][index];
                if (BACKWARD ? s < share : s > share) factor = product(factor, one);
                all = product(all, one);
            }
            decay = product(decay, all);
            if (threadIdx.x < PAIRS) *reinterpret_cast<float2*>(&smem.factor[2 * index]) = all;
        }
        if (BACKWARD) factor.x *= scale, factor.y *= scale;
        if (share < SEGMENTS) {
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i) {
                const int row = share * SEGMENT_LEN + i;
                float2 x = unpack(*reinterpret_cast<const unsigned*>(&smem.raw[stage][row][2 * index]));
                if constexpr (HAS_DECAY) x.x *= kept[i].x, x.y *= kept[i].y;
                *word_of(smem.keys, row, index) = pack(x.x * factor.x, x.y * factor.y);
            }
        }
        __syncthreads();  // the operands are there

        TokenFragments rows[1];
        load_rows(rows, tile_of(smem.values[stage]), own_row);
        if constexpr (HAS_DECAY) scale_columns<1>(state, smem.factor);
        add_outer(state, outer(rows, tile_of(smem.keys)));  // S <- S diag(e^D) + V^T K, or E <- E diag(e^D) + dY^T Q
        stage = 1 - stage;
    }
    write_state<StateLayout::vk>(additions + item * (VALUE_SIZE * HEAD_SIZE), state[0], own_row);
    if (BACKWARD || threadIdx.x >= PAIRS) return;
    if (2 * index < HEAD_SIZE) decays[item * HEAD_SIZE + 2 * index] = decay.x;
    if (2 * index + 1 < HEAD_SIZE) decays[item * HEAD_SIZE + 2 * index + 1] = decay.y;
}
