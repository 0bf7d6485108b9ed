// The states between the segments of a sequence. A segment takes the state S at its start to S P + Q: with what every
// segment does, from zero (Q) and from the identity (P), the starts follow one from the other,
//
//     S_(j+1) = S_j P_j + Q_j;   for gradients, from the last segment to the first,   E_j = E_(j+1) P_j^T + Q_j
//
//   transitions  [sequences, segments, heads, K, K]  fp32  in: P
//   additions    [sequences, segments, heads, V, K]  fp32  in: Q
//   first        [sequences, heads, V, K]  fp32  in or null: S of the first segment, or E after the last one
//   states       [sequences, segments, heads, V, K]  fp32  out: S at every start, or E after every end
//   last         [sequences, heads, V, K]  fp32  out or null: the state that is left in the end
//
// Grid (sequences, heads, value rows / ROWS); a block keeps ROWS rows of the state in shared memory. All fp32.
#include "sequence.cuh"

constexpr int ROWS = 16, DEPTH = 32;  // value rows of a block; rows of P at a time
constexpr int COLUMNS = ceil_div(HEAD_SIZE, 16);
static_assert(NUM_THREADS == 256, "num_threads must be 256");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv7_join(
    const float* __restrict__ transitions, const float* __restrict__ additions, const float* __restrict__ first,
    float* __restrict__ states, float* __restrict__ last, i64 heads, i64 segments) {
    __shared__ float state[ROWS][HEAD_SIZE], part[DEPTH][HEAD_SIZE + 1];
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const int row = threadIdx.x / 16, lane = threadIdx.x % 16, value = blockIdx.z * ROWS + row;
    const bool present = value < VALUE_SIZE;
    const i64 own = i64(value) * HEAD_SIZE;
    float now[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = lane + 16 * c;
        const bool exists = present && column < HEAD_SIZE && first != nullptr;
        now[c] = exists ? first[(sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE) + own + column] : 0.0f;
    }
    for (i64 step = 0; step < segments; ++step) {
        const i64 segment = (sequence * segments + (BACKWARD ? segments - 1 - step : step)) * heads + head;
        const float* const p = transitions + segment * (HEAD_SIZE * HEAD_SIZE);
        float next[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = lane + 16 * c;
            if (column >= HEAD_SIZE) continue;
            state[row][column] = now[c];
            next[c] = present ? additions[segment * (VALUE_SIZE * HEAD_SIZE) + own + column] : 0.0f;
            if (present) states[segment * (VALUE_SIZE * HEAD_SIZE) + own + column] = now[c];
        }
        for (int begin = 0; begin < HEAD_SIZE; begin += DEPTH) {
            const int depth = min(DEPTH, HEAD_SIZE - begin);
            __syncthreads();
            for (int i = threadIdx.x; i < depth * HEAD_SIZE; i += NUM_THREADS) {
                if (BACKWARD) part[i % depth][i / depth] = p[i / depth * HEAD_SIZE + begin + i % depth];
                else part[i / HEAD_SIZE][i % HEAD_SIZE] = p[begin * HEAD_SIZE + i];
            }
            __syncthreads();
#pragma unroll 8
            for (int i = 0; i < depth; ++i) {
                const float factor = state[row][begin + i];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane + 16 * c < HEAD_SIZE) next[c] += factor * part[i][lane + 16 * c];
            }
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) now[c] = next[c];
    }
    if (last == nullptr || !present) return;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (lane + 16 * c < HEAD_SIZE)
            last[(sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE) + own + lane + 16 * c] = now[c];
}
