// One or a few tokens of many sequences, from the states in one memory to those in another. Per head, S [V, K]:
//
//     with DELTA     sa = S a;  S' = S diag(d) + sa b^T + v k^T;  y = scale S' r
//     without        S' = S diag(d) + v k^T;  with BONUS y = scale (S r + (sum_j u_j r_j k_j) v), else y = scale S' r
//
//   r k       [batch, tokens, heads, K]  T_IO   in     w  the same shape, T_W, in; d = decay_factor(w + w0)
//   a b       the same shape as r, T_IO, in with DELTA, else null
//   v, y      [batch, tokens, heads, V]  T_IO   in, out; y without gaps
//   u, w0     [heads, K]  T_U, T_W0  in, or null: u without BONUS, w0 where nothing is added to w
//   initial_state, final_state  [slots, heads, V, K] or, in the kv layout, [.., K, V]  T_STATE  in, out; a slot has no
//                               gaps. Without HAS_STATE the initial one is zeros, and null; a final one of null is not
//                               written. Calls over a pool change it in place: both are the pool.
//   state_indices, write_indices  [batch]  int32 or int64  in, or null: row i has slot i, and writes where it reads
//   seed      [1]  i64  in with STOCHASTIC, else null
//
// A row whose slot is at or below `null_index`, or past the pool, reads no state and gets y of zeros. A state is not
// written to such a slot. Rows that write to one slot leave it with some of both.
//
// With PACKED a row is a piece of `arrange_sequences`, which says its tokens and its slots: r is [tokens, heads, K], and
// so are the others, and the indices are null. Pieces of many tokens are for other launches. What is behind the last
// piece gets zeros.
//
// Grid (heads * VALUE_BLOCKS, rows, further rows). The state passes once: y and the rank-one correction are sums over
// the state as it was. So it is read by accesses of 16 bytes, all of which are under way before the first is used.
// The launch may begin beside the one before, and lets the next one begin beside itself: it has its state brought near
// meanwhile, and reads nothing that the other may still write.
#include "update_rows.cuh"
#include "update_token.cuh"

constexpr int PAIRS = DELTA ? 2 : 1;  // products of r with k, and with b

struct Smem {
    Token token[BUFFERS];
    Sums<PAIRS> sums;
};
static_assert(sizeof(Smem) <= 48 * 1024, "head_size needs more than 48 KB of shared memory");

// One token: y is written by the lanes that keep its sums. Returns what a number x of the tile becomes
// by (i, j, x); a wide one has become it.
__device__ inline auto update_tile(RowTile& tile, const Token& token, Sums<PAIRS>& sums, T_IO* y, int first_value,
                                   float scale) {
    float r[KEYS], k[KEYS], d[KEYS], sa[VALUES] = {}, read[VALUES] = {}, all_sa[VALUES], pair[PAIRS] = {};
    read_keys(r, token.r), read_keys(k, token.k);
    if constexpr (DECAY != Decay::none) read_keys(d, token.d);
    {
        float a[KEYS], b[KEYS], u[KEYS];
        if constexpr (DELTA) read_keys(a, token.a), read_keys(b, token.b);
        if constexpr (BONUS) read_keys(u, token.u);
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const float q = BONUS || DECAY == Decay::none ? r[j] : r[j] * d[j];
            pair[0] += BONUS ? u[j] * r[j] * k[j] : r[j] * k[j];
            if constexpr (DELTA) pair[PAIRS - 1] += r[j] * b[j];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                read[i] += tile.at(i, j) * q;
                if constexpr (DELTA) sa[i] += tile.at(i, j) * a[j];
            }
        }
    }
    add_over_keys<DELTA>(read, sa, all_sa, pair, sums);

    const int own = own_values(), kept = kept_index();
    const auto write_y = [&] {
        if (!keeps_sums() || key_warp() != 0) return;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int value = own + kept + i;
            float sum = read[i] + token.v[value] * pair[0];
            if constexpr (DELTA) sum += sa[i] * pair[PAIRS - 1];
            if (first_value + value < VALUE_SIZE) y[value] = from_float<T_IO>(scale * sum);
        }
    };
    // Where that leaves fewer numbers in registers.
    if constexpr (!RowTile::IS_WIDE) write_y();
    float v[VALUES], b[KEYS];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = token.v[own + i];
    if constexpr (DELTA) read_keys(b, token.b);
    const auto change = [=](int i, int j, float s) {
        if constexpr (DECAY != Decay::none) s *= d[j];
        s += v[i] * k[j];
        if constexpr (DELTA) s += all_sa[i] * b[j];
        return s;
    };
    if constexpr (RowTile::IS_WIDE) change_tile(tile, change), write_y();
    return change;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) update_states(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_U* __restrict__ u, const T_W0* __restrict__ w0,
    const T_STATE* initial_state, T_STATE* final_state, const Index* __restrict__ state_indices,
    const Index* __restrict__ write_indices, const i64* __restrict__ seed, T_IO* __restrict__ y, Strides r_strides,
    Strides w_strides, Strides k_strides, Strides v_strides, Strides a_strides, Strides b_strides, i64 slot_stride,
    i64 slots, i64 null_index, i64 batch, i64 tokens, i64 heads, float scale, const i64* __restrict__ bounds,
    const arranged::Piece* __restrict__ pieces) {
    __shared__ alignas(16) Smem smem;
    const Part part;
    const i64 row = part.row, head = part.head;
    if (row >= batch) return;
    const int first_value = part.first_value;
    let_next_launch_begin();
    if constexpr (HAS_STATE) bring_near(part, initial_state, state_indices, slot_stride, slots);
    initial_state = after_previous_launch(initial_state);
    r = written_meanwhile(r), w = written_meanwhile(w), k = written_meanwhile(k), v = written_meanwhile(v);
    a = written_meanwhile(a), b = written_meanwhile(b), u = written_meanwhile(u), w0 = written_meanwhile(w0);
    state_indices = written_meanwhile(state_indices), write_indices = written_meanwhile(write_indices);
    seed = written_meanwhile(seed);
    const i64 y_stride = heads * VALUE_SIZE;
    y += head * VALUE_SIZE + first_value;
    if constexpr (PACKED) bounds = written_meanwhile(bounds), pieces = written_meanwhile(pieces);
    const Row own =
        row_of(part, state_indices, write_indices, slots, null_index, batch, tokens, bounds, pieces, y, y_stride);
    if (!own.is_there) return;
    y += own.begin * y_stride;

    const auto start = [&](Strides s) { return (PACKED ? own.begin * s.token : row * s.batch) + head * s.head; };
    r += start(r_strides), w += start(w_strides), k += start(k_strides);
    v += start(v_strides) + first_value, a += start(a_strides), b += start(b_strides);
    u += head * HEAD_SIZE;
    Held held;
    const auto load = [&](i64 t) {
        held.r.load(r + t * r_strides.token), held.k.load(k + t * k_strides.token);
        if constexpr (DECAY != Decay::none) held.w.load(w + t * w_strides.token);
        if constexpr (DELTA) held.a.load(a + t * a_strides.token), held.b.load(b + t * b_strides.token);
        held.v.load(v + t * v_strides.token, VALUE_SIZE - first_value);
    };
    load(0);
    if constexpr (BONUS) held.u.load(u);
    // w0 is not moved before: ptxas 12.9 and 13.0 compare a pointer that is null or moved with null too soon.
    if (DECAY != Decay::none && w0 != nullptr) held.w0.load(w0 + head * HEAD_SIZE);

    const i64 to = own.to;
    RowTile tile;
    const bool is_zero = PACKED && own.from < 0;
    // With states of 16 bits loads that are left out spill less than a branch does, with wide ones more.
    if (!HAS_STATE || (sizeof(T_STATE) == 4 && is_zero)) clear_tile(tile);
    else read_tile(tile, initial_state + own.from * slot_stride + part.in_slot(), first_value, is_zero);

    const FinalStates last{final_state, seed, slot_stride, slots, null_index, heads, write_indices != nullptr};
    run_tokens(
        smem.token, own.tokens, [&](Token& token) { held.store(token, w0 != nullptr); }, load,
        [&](i64 t, const Token& token) {
            const auto change = update_tile(tile, token, smem.sums, y + t * y_stride, first_value, scale);
            if constexpr (!RowTile::IS_WIDE) last.write(tile, part, to, change);
        });
    if constexpr (RowTile::IS_WIDE) last.write(tile, part, to);
}
