// States of another type, or with their last two dimensions in the other order.
//
//   from  [all states, V, K]  T_FROM  in: [V, K] if FROM_VK, else [K, V]
//   to    [sequences, heads, V, K]  T_TO  out: [V, K] if TO_VK, else [K, V]
//
// With FROM_POOL or TO_POOL these are slots of a pool, which `pieces` name; from none there are zeros, to none nothing goes.
//
// The states of sequence i are those of row i * row_step + first_row, of `heads` each: the last ones of its segments, say.
// Where segments are RAGGED, they are those of its first segment or, for a first_row of 1, of its last one.
// Grid (sequences * heads, value rows / TILE, channels / TILE); a block copies a tile by way of shared memory, so that
// neighbouring threads read and write neighbours.
#include "pieces.cuh"
#include "span.cuh"

constexpr int TILE = 32, ROWS_AT_ONCE = NUM_THREADS / TILE;
static_assert(NUM_THREADS % TILE == 0 && NUM_THREADS <= 1024, "num_threads must be a multiple of 32 up to 1024");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_states(
    const T_FROM* __restrict__ from, T_TO* __restrict__ to, const i64* __restrict__ cu_seqlens, i64 heads, i64 row_step,
    i64 first_row, i64 tokens, int segment_len, const Piece* __restrict__ pieces, i64 slot_stride, int wave) {
    __shared__ float tile[TILE][TILE + 1];  // by value row and channel
    const i64 sequence = blockIdx.x / heads, head = blockIdx.x % heads;
    const Piece piece = FROM_POOL || TO_POOL ? pieces[sequence] : Piece{};
    if (TO_POOL && (piece.wave != wave || piece.write < 0)) return;
    const bool has_source = !FROM_POOL || (piece.wave == wave && piece.read >= 0);
    i64 from_row = sequence * row_step + first_row;
    if constexpr (RAGGED)
        from_row = places_of<true>(cu_seqlens, sequence, tokens, row_step, segment_len).item(first_row != 0, 0);
    constexpr int SIZE = VALUE_SIZE * HEAD_SIZE;
    const T_FROM* const source =
        from + (FROM_POOL ? piece.read * slot_stride + head * SIZE : (from_row * heads + head) * SIZE);
    T_TO* const target = to + (TO_POOL ? piece.write * slot_stride + head * SIZE : i64(blockIdx.x) * SIZE);
    const int values = blockIdx.y * TILE, channels = blockIdx.z * TILE;
    const int line = threadIdx.x / TILE, place = threadIdx.x % TILE;
#pragma unroll
    for (int i = line; i < TILE; i += ROWS_AT_ONCE) {
        const int value = FROM_VK ? i : place, channel = FROM_VK ? place : i;
        const int row = values + value, column = channels + channel;
        if (row < VALUE_SIZE && column < HEAD_SIZE)
            tile[value][channel] =
                has_source ? to_float(source[FROM_VK ? row * HEAD_SIZE + column : column * VALUE_SIZE + row]) : 0.0f;
    }
    __syncthreads();  // the tile is there
#pragma unroll
    for (int i = line; i < TILE; i += ROWS_AT_ONCE) {
        const int value = TO_VK ? i : place, channel = TO_VK ? place : i;
        const int row = values + value, column = channels + channel;
        if (row < VALUE_SIZE && column < HEAD_SIZE)
            target[TO_VK ? row * HEAD_SIZE + column : column * VALUE_SIZE + row] = from_float<T_TO>(tile[value][channel]);
    }
}
