// Segments of a sequence that blocks take side by side, where its decays let them: which chunks a block runs through.
//
// The decays of some tokens, times what rates past 2 may add, bound what is left behind them of any state before, as
// no key is longer than 1. Where that is nothing, a block of head_decay_forward.cu sets out with no state, that many
// tokens before its own. Where a head forgets too slowly, the block before goes on and this one has nothing to do. The
// gradient of a state is forgotten in the same way by the tokens behind a segment.
//
//   g, beta  [batch, tokens, heads]  T_W, T_BETA  in; beta null where there are no rates
//   a_log, dt_bias  as in head_decay_forward.cu
//   walks    [directions, sequences, segments, heads]  out
//
// Grid (sequences * segments, heads, directions): forward, and where there are two, backward.
#include "head_decay_gates.cuh"
#include "head_decay_walk.cuh"
#include "pieces.cuh"
#include "span.cuh"

static_assert(SEGMENTED, "blocks have whole sequences where no decay lets them share one");
constexpr int WARPS = NUM_THREADS / 32;
constexpr float FORGOTTEN = -40.0f;  // to the base 2: less than a float keeps beside what is new
constexpr int MOST_AHEAD = 32;       // chunks before a block's own, a lane for each

extern "C" __global__ void __launch_bounds__(NUM_THREADS) head_decay_walks(
    const T_W* __restrict__ w, const T_BETA* __restrict__ beta, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, const i64* __restrict__ cu_seqlens, Walk* __restrict__ walks, Strides w_strides,
    Strides beta_strides, i64 tokens, i64 heads, i64 segments, const Piece* __restrict__ pieces, int wave) {
    __shared__ float kept[MOST_AHEAD];
    const unsigned parts = segments;
    const i64 sequence = blockIdx.x / parts, head = blockIdx.y;
    if (POOLED && pieces[sequence].wave != wave) return;  // as it is for others
    const int segment = blockIdx.x % parts;
    const bool is_backward = blockIdx.z > 0;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const auto start_of = [&](Strides s, int chunk) {
        return span.batch * s.batch + (span.begin + i64(chunk) * CHUNK_LEN) * s.token + head * s.head;
    };
    const GateMap map(a_log, dt_bias, head);
    // What a chunk's tokens keep of a state at most, to the base 2.
    const auto kept_over = [&](int chunk) {
        Gates gates;
        gates.load(w + start_of(w_strides, chunk), w_strides.token, beta + start_of(beta_strides, chunk),
                   beta_strides.token, static_cast<int>(min(span.length - i64(chunk) * CHUNK_LEN, i64(CHUNK_LEN))));
        float sum = gates.decay(map);
        if constexpr (HAS_DELTA) sum += log2f(fmaxf(fabsf(1.0f - gates.rate(map)), 1.0f));
#pragma unroll
        for (int delta = 1; delta < 32; delta *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
        return sum;
    };
    // How many chunks next to a place are enough to forget by, at most up to the sequence's end; 0 where too few are.
    const auto distance = [&](int place) {
        for (int i = warp_id(); i < MOST_AHEAD; i += WARPS) {
            const int chunk = is_backward ? place + i : place - 1 - i;
            const float sum = 0 <= chunk && chunk < chunks ? kept_over(chunk) : FORGOTTEN;
            if (lane_id() == 0) kept[i] = sum;
        }
        __syncthreads();
        float sum = kept[lane_id()];
#pragma unroll
        for (int delta = 1; delta < MOST_AHEAD; delta *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, sum, delta);
            if (lane_id() >= delta) sum += other;
        }
        __syncthreads();
        return __ffs(__ballot_sync(0xffffffffu, sum <= FORGOTTEN));
    };
    const int length = (chunks + segments - 1) / segments;
    const int even = (length + KEPT_CHUNKS - 1) / KEPT_CHUNKS * KEPT_CHUNKS;
    Walk walk = {-1, segment * even, min((segment + 1) * even, chunks)};
    if (segment == 0 || walk.begin < chunks) {
        if (is_backward) {
            const int ahead = walk.end < chunks ? distance(walk.end) : 0;
            if (walk.end == chunks || ahead > 0) walk.start = min(walk.end + ahead, chunks);
            if (walk.start >= 0)
                while (walk.begin > 0 && distance(walk.begin) == 0) walk.begin -= even;
        } else {
            const int ahead = walk.begin > 0 ? distance(walk.begin) : 0;
            if (walk.begin == 0 || ahead > 0) walk.start = max(walk.begin - ahead, 0);
            if (walk.start >= 0)
                while (walk.end < chunks && distance(walk.end) == 0) walk.end = min(walk.end + even, chunks);
        }
    }
    if (threadIdx.x == 0) walks[(i64(blockIdx.z) * gridDim.x + blockIdx.x) * heads + head] = walk;
}
