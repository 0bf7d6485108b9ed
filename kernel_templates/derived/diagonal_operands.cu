// What gated linear attention takes for ops whose decays, keys or values come from other inputs. Per token, for each
// value head h and its key head h / (H / G):
//
//     r = q;   new_k = k                                                            with REPEATS
//     w = g                                      for all channels of a head         SOURCE heads: g is a log-decay
//     step = limits(softplus(dt + dt_bias));   w = A step;   new_v = step v         SOURCE steps: g is dt
//     new_k = 1 - e^g                                                               SOURCE gates: g is a log-decay
//
// with the steps of state_steps.cuh. Steps and decays are float32, and everything is rounded once, where it is written.
//
//   q, k       [batch, tokens, G, HEAD_SIZE]  T_IO  in, by strides     v  [batch, tokens, H, VALUE_SIZE]  T_IO  the same
//   g          [batch, tokens, H], of gates with HEAD_SIZE behind, of fixed decays [H]  T_G  in, by strides
//   A, dt_bias [H]  T_A, T_DT_BIAS  in
//   r, new_k   [batch, tokens, H, HEAD_SIZE]  T_IO  out;   w  the same  T_W  out
//   new_v      [batch, tokens, H, VALUE_SIZE]  T_IO  out
//
// What is not wanted is null, and is neither read nor written. Grid (rows / block_rows, slices): the slots of the first
// `key_slices` are pieces of PART value heads that share a key head, whose pieces are read once; those of the others
// are pieces of values. No shared memory; a thread holds a piece of each input. Any decay and any step is safe.
#include "diagonal_operands.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) diagonal_operands(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_G* __restrict__ g,
    const T_A* __restrict__ A, const T_DT_BIAS* __restrict__ dt_bias, T_IO* __restrict__ r, T_IO* __restrict__ new_k,
    T_W* __restrict__ w, T_IO* __restrict__ new_v, Strides q_strides, Strides k_strides, Strides v_strides,
    Strides g_strides, i64 rows, i64 tokens, i64 heads, i64 key_heads, i64 key_slices, i64 block_rows, float least,
    float most) {
    RowWalk walk(rows, block_rows, tokens);
    const Limits limits = {least, most};
    if (blockIdx.y < key_slices) {
        const PieceOfHead<HEAD_SIZE> piece;
        const i64 first = piece.head * PART, key_head = first / (heads / key_heads);
        if (first >= heads) return;
        float rates[PART], biases[PART];
        if constexpr (HAS_STEPS)
#pragma unroll
            for (int j = 0; j < PART; ++j) {
                const StepMap map(A, dt_bias, first + j, limits);
                rates[j] = map.rate, biases[j] = map.bias;
            }
#pragma unroll 1
        for (; walk.exists(); walk.next()) {
            Piece<T_IO> query, key;
            Piece<T_G> gate;
            float of_heads[PART];
            const i64 start = (walk.row * heads + first) * HEAD_SIZE + piece.channel;
            if constexpr (REPEATS) {
                if (r != nullptr) query.load(q + walk.in(q_strides, key_head) + piece.channel);
                if (new_k != nullptr) key.load(k + walk.in(k_strides, key_head) + piece.channel);
            }
            if constexpr (HAS_GATES) gate.load(g + walk.in(g_strides, first) + piece.channel);
            if constexpr (HAS_DECAYS)
                if (w != nullptr)
#pragma unroll
                    for (int j = 0; j < PART; ++j) of_heads[j] = to_float(g[walk.in(g_strides, first + j)]);
#pragma unroll
            for (int j = 0; j < PART; ++j) {
                const i64 place = start + i64(j) * HEAD_SIZE;
                if constexpr (REPEATS) {
                    if (r != nullptr) copy(r + place, query);
                    if (new_k != nullptr) copy(new_k + place, key);
                }
                if constexpr (HAS_GATES) {
                    float keys[VECTOR];
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) keys[i] = -expm1f(gate.at(i));
                    write(new_k + place, keys);
                }
                if constexpr (HAS_DECAYS)
                    if (w != nullptr) {
                        float decay = of_heads[j], decays[VECTOR];
                        if constexpr (HAS_STEPS) decay = StepMap(rates[j], biases[j], limits).step(decay) * rates[j];
#pragma unroll
                        for (int i = 0; i < VECTOR; ++i) decays[i] = decay;
                        write(w + place, decays);
                    }
            }
        }
    } else if constexpr (HAS_STEPS) {
        const PieceOfHead<VALUE_SIZE> piece(key_slices);
        if (piece.head >= heads) return;
        const StepMap map(A, dt_bias, piece.head, limits);
#pragma unroll 1
        for (; walk.exists(); walk.next()) {
            Piece<T_IO> value;
            value.load(v + walk.in(v_strides, piece.head) + piece.channel);
            const float step = map.step(to_float(g[walk.in(g_strides, piece.head)]));
            float values[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) values[i] = value.at(i) * step;
            write(new_v + (walk.row * heads + piece.head) * VALUE_SIZE + piece.channel, values);
        }
    }
}
