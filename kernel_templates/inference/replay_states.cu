// One or a few tokens of many sequences whose states in a pool are written once in a while: a ring of entries for each
// slot and head holds the tokens since. Per head, with S0 [V, K] as it was written last, and what is in the ring:
//
//     S_t x = S0 (D_0 x) + sum_{i <= t} ((b_i . (D_i x)) u_i + (k_i . (D_i x)) v_i)
//
// with D_i the product of the decays behind entry i, up to token t, and u_i = S_{i-1} a_i. It is read with a_{t+1} and
// r_t. Without DELTA there are no b, u and a; with BONUS a token reads its own key with u in the place of a decay.
// Nothing is divided and no logarithm is taken: products go from the newest entry to the oldest.
//
//   r w k v a b u w0, y, state, state_indices, seed   as in update_states.cu; the states are written by a flush
//   entry_d, entry_b, entry_k  [slots, heads, ENTRIES, K]  float, T_IO, T_KEY  in and out; b with DELTA, d with a decay
//   entry_v, entry_u           [slots, heads, ENTRIES, V]  T_VALUE, float      in and out; u with DELTA
//   cursors       [slots]  int  in and out: how many entries there are, up to LENGTH
//   arrivals      [slots]  unsigned  zeros, before and after
//   accept_lens   [batch]  int32 or int64  in without TOKENS, or null: how many entries behind the cursor count too
//
// With TOKENS a step of decoding: a row whose ring would have more than `kept` entries has its state written, with all
// of them and with these tokens, and begins anew. As a DRAFT: the tokens become entries behind the cursor, which stays,
// and no state is written. Without TOKENS: cursors move on, and what has more than `kept` entries then is written, that
// of replay_rules.cu too: `group` heads share an entry_k, and with DECAY_OF_HEAD entry_d is [slots, heads, ENTRIES].
//
// Grid (heads * VALUE_BLOCKS, rows, further rows). The state is asked for first, by all threads. Then a group of lanes
// has an entry, for its products with a and r of all tokens; all threads have the sums over the state; and a thread has
// a value, for which the tokens follow each other. A cursor is moved by the last block of a row that has read it.

#include "update_token.cuh"

constexpr bool OF_HEADS = DECAY_OF_HEAD, OF_CHANNELS = DECAY != Decay::none && !OF_HEADS;
constexpr bool PAIRS = DELTA, IS_RULE = false;
using StepToken = Token;
__device__ inline const float* erased_of(const Token& token) { return token.a; }
#include "replay.cuh"

// The tokens of a row: its part of each input, and the elements from one token to the next.
struct Tokens {
    const T_IO *r, *k, *v, *a, *b;
    const T_W* w;
    const T_U* u;
    const T_W0* w0;
    i64 r_step, w_step, k_step, v_step, a_step, b_step;
    int width;
    float scale;
    Held held[AT_ONCE];

    // The tokens from `first` on; all that are loaded at once have a place in registers.
    __device__ void load(int first) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int t = first + n;
            if (t >= TOKENS) break;
            held[n].r.load(r + t * r_step), held[n].k.load(k + t * k_step);
            if constexpr (HAS_DECAY) held[n].w.load(w + t * w_step);
            if constexpr (DELTA) held[n].a.load(a + t * a_step), held[n].b.load(b + t * b_step);
            held[n].v.load(v + t * v_step, width);
        }
    }
    __device__ void begin() { load(0); }
    __device__ void store(Token (&token)[STEPS]) {
        Share<T_W0, HEAD_SIZE, PADDED_KEYS> of_w0;
        Share<T_U, HEAD_SIZE, PADDED_KEYS> of_u;
        if (HAS_DECAY && w0 != nullptr) of_w0.load(w0);
        if constexpr (BONUS) of_u.load(u);
#pragma unroll 1
        for (int first = 0; first < TOKENS; first += AT_ONCE) {
            if (first > 0) load(first);
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                if (first + n >= TOKENS) break;
                held[n].w0 = of_w0, held[n].u = of_u;
                held[n].store(token[first + n], w0 != nullptr);
            }
        }
    }
    __device__ void look(Token (&)[STEPS]) const {}
    __device__ float added(const Token&, float v, float) const { return v; }
    __device__ float result(const Token&, int, float, float found) const { return scale * found; }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) replay_states(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_U* __restrict__ u, const T_W0* __restrict__ w0,
    T_STATE* state, const Index* __restrict__ state_indices, const AcceptLen* __restrict__ accept_lens,
    const i64* __restrict__ seed, T_IO* __restrict__ y, float* entry_d, T_IO* entry_b, T_KEY* entry_k,
    T_VALUE* entry_v, float* entry_u, int* cursors, unsigned* arrivals, Strides r_strides, Strides w_strides, Strides k_strides,
    Strides v_strides, Strides a_strides, Strides b_strides, i64 slot_stride, i64 slots, i64 null_index, i64 batch,
    i64 heads, int group, int kept, float scale) {
    const Place place(group);
    let_next_launch_begin();
    state = after_previous_launch(state);
    r = written_meanwhile(r), w = written_meanwhile(w), k = written_meanwhile(k), v = written_meanwhile(v);
    a = written_meanwhile(a), b = written_meanwhile(b), u = written_meanwhile(u), w0 = written_meanwhile(w0);
    state_indices = written_meanwhile(state_indices), accept_lens = written_meanwhile(accept_lens);
    seed = written_meanwhile(seed), cursors = written_meanwhile(cursors);
    const auto start = [&](Strides s) { return place.row * s.batch + place.head * s.head; };
    const i64 of_keys = place.head * HEAD_SIZE;
    Tokens tokens{
        r + start(r_strides), k + start(k_strides), v + start(v_strides) + place.first_value, a + start(a_strides),
        b + start(b_strides), w + start(w_strides), u + of_keys, w0 == nullptr ? nullptr : w0 + of_keys,
        r_strides.token, w_strides.token, k_strides.token, v_strides.token, a_strides.token, b_strides.token,
        VALUE_SIZE - place.first_value, scale};
    replay(place, tokens, Ring{entry_d, entry_b, entry_k, entry_v, entry_u, cursors, arrivals}, state, state_indices,
           accept_lens, seed, y, slot_stride, slots, null_index, batch, heads, kept);
}
