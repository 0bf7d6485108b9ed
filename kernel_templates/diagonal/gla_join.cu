// The states between the segments of a sequence, from what gla_segment finds out:
//
//     S_(j+1) = S_j diag(e^(D_j)) + Q_j;   for gradients, from the last segment to the first,
//     E_j = E_(j+1) diag(e^(D_j)) + Q_j
//
//   decays     [sequences, segments, heads, K]  fp32  in: e^D
//   additions  [sequences, segments, heads, V, K]  fp32  in: Q
//   first      [sequences, heads, V, K]  fp32  in or null: S of the first segment, or E after the last one
//   states     [sequences, segments, heads, V, K]  fp32  out or null: S at every start, or E after every end
//   last       [sequences, heads, V, K]  fp32  out or null: the state that is left in the end
//
// Where segments are RAGGED, those of a sequence are at the places that cut_sequences.cu gives them. What the walk's
// last segment does is not read, and there is no `last`. A place that is left over gets zeros.
//
// Grid (sequences, heads, value rows / ROWS); a thread walks with one element of the state, and reads AHEAD segments at
// once.
#include "span.cuh"

constexpr int AHEAD = 8;
static_assert(ROWS * HEAD_SIZE <= NUM_THREADS, "num_threads must be enough for the rows");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gla_join(
    const float* __restrict__ decays, const float* __restrict__ additions, const float* __restrict__ first,
    const i64* __restrict__ cu_seqlens, float* __restrict__ states, float* __restrict__ last, i64 heads, i64 segments,
    i64 tokens, int segment_len) {
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const Places places = places_of<RAGGED>(cu_seqlens, sequence, tokens, segments, segment_len);
    const int row = threadIdx.x / HEAD_SIZE, channel = threadIdx.x % HEAD_SIZE, value = blockIdx.z * ROWS + row;
    if (row >= ROWS || value >= VALUE_SIZE) return;
    const i64 place_in_state = i64(value) * HEAD_SIZE + channel,
              whole = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE) + place_in_state;
    const i64 stride = VALUE_SIZE * HEAD_SIZE, step = BACKWARD ? -heads : heads;
    i64 item = places.item(BACKWARD, 0) * heads + head;
    float state = first != nullptr ? first[whole] : 0.0f;
    for (i64 left = places.count - (RAGGED ? 1 : 0); left > 0; left -= AHEAD) {
        const int count = static_cast<int>(min(left, i64(AHEAD)));
        float decay[AHEAD], added[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 at = item + min(i, count - 1) * step;
            decay[i] = decays[at * HEAD_SIZE + channel];
            added[i] = additions[at * stride + place_in_state];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i, item += step)
            if (i < count) {
                if (states != nullptr) states[item * stride + place_in_state] = state;
                state = state * decay[i] + added[i];
            }
    }
    if constexpr (RAGGED) {
        states[(places.item(BACKWARD, places.count - 1) * heads + head) * stride + place_in_state] = state;
        if (places.has_left_over()) states[(places.left_over() * heads + head) * stride + place_in_state] = 0.0f;
    } else if (last != nullptr) {
        last[whole] = state;
    }
}
