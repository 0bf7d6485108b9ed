// The states between the segments of a sequence. A segment takes the state S at its start to S P + Q: with what every
// segment does, from zero (Q) and from the identity (P), the starts follow one from the other,
//
//     S_(j+1) = S_j P_j + Q_j;   for gradients, from the last segment to the first,   E_j = E_(j+1) P_j^T + Q_j
//
//   transitions  [sequences, segments, heads, K, K]  fp32  in: P
//   additions    [sequences, segments, heads, V, K]  fp32  in: Q
//   first        [sequences, heads, V, K]  fp32  in or null: S of the first segment, or E after the last one
//   states       [sequences, segments, heads, V, K]  fp32  out or null: S at every start, or E after every end
//   last         [sequences, heads, V, K]  fp32  out or null: the state that is left in the end
//
// Where segments are RAGGED, those of a sequence are at the places that cut_sequences.cu gives them. What the walk's
// last segment does is not read, and there is no `last`. A place that is left over gets zeros.
//
// Grid (sequences, heads, value rows / ROWS); a block keeps ROWS rows of the state in shared memory, LANES lanes each,
// and goes through P a few rows at a time, with the next ones on their way. All fp32.
#include "copy.cuh"

constexpr int LANES = NUM_THREADS / ROWS, STAGES = 4;
constexpr int DEPTH = min_of(HEAD_SIZE, HEAD_SIZE > 128 ? 8 : 16);  // rows of P at a time
constexpr int TILES = ceil_div(HEAD_SIZE, DEPTH);
constexpr int GROUPS = ceil_div(HEAD_SIZE, 4 * LANES);  // of four neighbouring columns, for a lane
constexpr int PITCH = 4 * LANES * GROUPS + 4;
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS <= 256, "num_threads must be a multiple of 32 up to 256");
static_assert(LANES * ROWS == NUM_THREADS && 32 % LANES == 0, "rows must leave each equal lanes of one warp");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv7_join(
    const float* __restrict__ transitions, const float* __restrict__ additions, const float* __restrict__ first,
    const i64* __restrict__ cu_seqlens, float* __restrict__ states, float* __restrict__ last, i64 heads, i64 segments,
    i64 tokens, int segment_len) {
    __shared__ float state[ROWS][4 * LANES * GROUPS];
    __shared__ alignas(16) float ring[STAGES][DEPTH][PITCH];
    const i64 sequence = blockIdx.x, head = blockIdx.y;
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES, value = blockIdx.z * ROWS + row;
    const i64 place_in_state = i64(value) * HEAD_SIZE;
    const auto column = [&](int c) { return c / 4 * 4 * LANES + 4 * lane + c % 4; };
    const auto exists = [&](int c) { return value < VALUE_SIZE && column(c) < HEAD_SIZE; };
    const Places places = places_of<RAGGED>(cu_seqlens, sequence, tokens, segments, segment_len);
    const i64 products = places.count - (RAGGED ? 1 : 0);
    const auto item = [&](i64 step) { return places.item(BACKWARD, step) * heads + head; };
    i64 coming = 0;  // the step whose rows are copied next, and which of them
    int coming_tile = 0, coming_stage = 0;
    const auto copy = [&] {
        if (coming < products) {
            const float* const p = transitions + item(coming) * (HEAD_SIZE * HEAD_SIZE);
            const int begin = coming_tile * DEPTH, depth = min(DEPTH, HEAD_SIZE - begin);
            constexpr int VECTOR = !BACKWARD && HEAD_SIZE % 4 == 0 ? 4 : 1, PER_LINE = HEAD_SIZE / VECTOR;
            for (int i = threadIdx.x; i < DEPTH * PER_LINE; i += NUM_THREADS) {
                // A row of P, or backwards a column: neighbouring threads read neighbours.
                const int line = BACKWARD ? i % DEPTH : i / PER_LINE, at = BACKWARD ? i / DEPTH : i % PER_LINE * VECTOR;
                const float* const from =
                    BACKWARD ? p + at * HEAD_SIZE + begin + line : p + (begin + line) * HEAD_SIZE + at;
                if (line < depth) copy_async<4 * VECTOR>(shared_address(&ring[coming_stage][line][at]), from, true);
            }
        }
        commit_copies();
        coming_stage = (coming_stage + 1) % STAGES;
        if (++coming_tile == TILES) coming_tile = 0, ++coming;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy();

    float now[4 * GROUPS];
#pragma unroll
    for (int c = 0; c < 4 * GROUPS; ++c)
        now[c] = exists(c) && first != nullptr
            ? first[(sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE) + place_in_state + column(c)] : 0.0f;
    int stage = 0;
    for (i64 step = 0; step < products; ++step) {
        const i64 offset = item(step) * (VALUE_SIZE * HEAD_SIZE) + place_in_state;
        float next[4 * GROUPS] = {}, added[4 * GROUPS] = {};
#pragma unroll
        for (int c = 0; c < 4 * GROUPS; ++c) {
            state[row][column(c)] = now[c];
            if (!exists(c)) continue;
            added[c] = additions[offset + column(c)];
            if (states != nullptr) states[offset + column(c)] = now[c];
        }
        for (int begin = 0; begin < HEAD_SIZE; begin += DEPTH) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the rows are there, and nobody reads the last ones any more
            copy();
            const int depth = min(DEPTH, HEAD_SIZE - begin);
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                if (HEAD_SIZE % DEPTH != 0 && i >= depth) break;
                const float factor = state[row][begin + i];
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const float4 four = *reinterpret_cast<const float4*>(&ring[stage][i][4 * LANES * g + 4 * lane]);
                    next[4 * g] += factor * four.x, next[4 * g + 1] += factor * four.y;
                    next[4 * g + 2] += factor * four.z, next[4 * g + 3] += factor * four.w;
                }
            }
            stage = (stage + 1) % STAGES;
        }
        __syncwarp();  // the lanes of a row are of one warp
#pragma unroll
        for (int c = 0; c < 4 * GROUPS; ++c) now[c] = next[c] + added[c];
    }
    wait_for_copies<0>();
    if constexpr (RAGGED) {
        const i64 end = item(products) * (VALUE_SIZE * HEAD_SIZE) + place_in_state;
        const i64 left_over = (places.left_over() * heads + head) * (VALUE_SIZE * HEAD_SIZE) + place_in_state;
#pragma unroll
        for (int c = 0; c < 4 * GROUPS; ++c) {
            if (!exists(c)) continue;
            states[end + column(c)] = now[c];
            if (places.has_left_over()) states[left_over + column(c)] = 0.0f;
        }
    }
    if (RAGGED || last == nullptr) return;
#pragma unroll
    for (int c = 0; c < 4 * GROUPS; ++c)
        if (exists(c)) last[(sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE) + place_in_state + column(c)] = now[c];
}
