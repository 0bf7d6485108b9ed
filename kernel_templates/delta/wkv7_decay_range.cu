// Whether the kernels for large heads can take a head: in the frame of a chunk's middle its operands are e^(c_t - m)
// times the inputs, which half a chunk of strong decays carries beyond bfloat16.
//
//   w  [batch, tokens, heads, K]  T_W  in
//   leaves[sequences, heads]  out: 1 where in some half of a chunk the sizes of a channel's log-decays sum to more than
//         LARGEST_DECAY, else untouched. Sizes, as growth must not hide what is beside it.
//
// Grid (sequences x parts, heads): several blocks may find the same, and write the same. A thread has neighbouring
// channels, as many as one load, and every so many halves.
constexpr int VALUE_SIZE = HEAD_SIZE;  // of states, which there are none of
#include "copy.cuh"
#include "decay.cuh"

constexpr int HALF = CHUNK_LEN / 2, VECTOR = vector_of(HEAD_SIZE, sizeof(T_W));
constexpr int LANES = ceil_power(HEAD_SIZE / VECTOR), TEAMS = NUM_THREADS / LANES;  // a team has a half at a time
constexpr int BATCH = 8;  // tokens that are on their way at once
static_assert(NUM_THREADS % LANES == 0, "num_threads must be a multiple of the lanes");
constexpr float LARGEST = LARGEST_DECAY * LOG2_E / (RATE_UNIT < 0.0f ? -RATE_UNIT : RATE_UNIT);

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv7_decay_range(
    const T_W* __restrict__ w, const i64* __restrict__ cu_seqlens, int* __restrict__ leaves, Strides strides,
    i64 tokens, i64 heads, int parts) {
    const i64 sequence = blockIdx.x / parts, part = blockIdx.x % parts, head = blockIdx.y;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const i64 halves = (span.length + HALF - 1) / HALF, share = (halves + parts - 1) / parts;
    const i64 end = min((part + 1) * share, halves);
    const int channel = VECTOR * (threadIdx.x % LANES);
    w += span.batch * strides.batch + span.begin * strides.token + head * strides.head + channel;

    bool leaves_range = false;
    if (channel < HEAD_SIZE)
        for (i64 half = part * share + threadIdx.x / LANES; half < end; half += TEAMS) {
            const T_W* const first_row = w + half * HALF * strides.token;
            const int steps = static_cast<int>(min(span.length - half * HALF, i64(HALF)));
            float sums[VECTOR] = {};
#pragma unroll 1
            for (int first = 0; first < steps; first += BATCH) {
                Words<T_W, VECTOR> held[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const T_W* const row = first_row + min(first + i, steps - 1) * strides.token;
                    held[i] = *reinterpret_cast<const Words<T_W, VECTOR>*>(row);
                }
#pragma unroll
                for (int i = 0; i < BATCH; ++i)
#pragma unroll
                    for (int j = 0; j < VECTOR; ++j)
                        if (first + i < steps) sums[j] += fabsf(decay_rate<DECAY>(held[i].at(j)));
            }
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) leaves_range |= !(sums[j] <= LARGEST);  // what is no number leaves too
        }
    const bool found = __syncthreads_or(leaves_range);
    if (threadIdx.x == 0 && found) leaves[sequence * heads + head] = 1;
}
