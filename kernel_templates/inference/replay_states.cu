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
//   entry_d, entry_b, entry_k  [slots, heads, ENTRIES, K]  float, T_IO, T_IO  in and out; b with DELTA, d with a decay
//   entry_v, entry_u           [slots, heads, ENTRIES, V]  T_IO, float        in and out; u with DELTA
//   cursors       [slots]  int  in and out: how many entries there are, up to LENGTH
//   arrivals      [slots]  unsigned  zeros, before and after
//   accept_lens   [batch]  int32 or int64  in without TOKENS, or null: how many entries behind the cursor count too
//
// With TOKENS a step of decoding: a row whose ring would have more than `kept` entries has its state written, with all
// of them and with these tokens, and begins anew. As a DRAFT: the tokens become entries behind the cursor, which stays,
// and no state is written. Without TOKENS: cursors move on, and what has more than `kept` entries then is written.
//
// Grid (heads * VALUE_BLOCKS, rows, further rows). The state is asked for first, by all threads. Then a group of lanes
// has an entry, for its products with a and r of all tokens; all threads have the sums over the state; and a thread has
// a value, for which the tokens follow each other. A cursor is moved by the last block of a row that has read it.
#include "overlap.cuh"
#include "update_token.cuh"

using AcceptLen = IndexOf<ACCEPT_BYTES>::Type;
constexpr bool HAS_TOKENS = TOKENS > 0, HAS_DECAY = DECAY != Decay::none;
constexpr int PAST = HAS_TOKENS ? LENGTH : ENTRIES;  // the most entries that there are before
constexpr int AT_ONCE = min_of(max_of(TOKENS, 1), 4);  // tokens that are loaded together
constexpr int MOST = PAST + TOKENS, STEPS = max_of(TOKENS, 1), FOLDED = DRAFT ? 1 : MOST;
// Entries are read by accesses of so many neighbours, those of a row of a token in shared memory too.
__device__ constexpr bool are_whole(int count) { return HEAD_SIZE % count == 0 && PADDED_KEYS % count == 0; }
constexpr int ENTRY_VECTOR = are_whole(4) ? 4 : are_whole(2) ? 2 : 1;
constexpr int ENTRY_LANES = min_of(max_of(ceil_power(ceil_div(HEAD_SIZE, ENTRY_VECTOR)), 4), 32);
constexpr int ENTRY_KEYS = ENTRY_VECTOR * ceil_div(HEAD_SIZE, ENTRY_VECTOR * ENTRY_LANES);
constexpr int GROUPS = NUM_THREADS / ENTRY_LANES;

// What a token reads of an entry: its products with r, and with a.
struct alignas(DELTA ? 16 : 4) Read { float at[DELTA ? 4 : 1]; };
constexpr int OF_B = 0, OF_K = DELTA ? 1 : 0, WITH_A = 2;

struct Smem {
    Token token[STEPS];
    float behind[HAS_DECAY ? PAST + 1 : 1][HAS_DECAY ? PADDED_KEYS : 4];  // products; in front those of all entries
    float b[DELTA ? FOLDED : 1][DELTA ? PADDED_KEYS : 4], k[FOLDED][PADDED_KEYS];  // as they stand in the new state
    Read read[MOST][STEPS];
    float sums[STEPS][DELTA ? 2 : 1][KEY_WARPS][BLOCK_VALUES];  // over the state, with r and with a
    float u[DELTA ? FOLDED : 1][DELTA ? BLOCK_VALUES : 1], v[FOLDED][BLOCK_VALUES];
};
static_assert(sizeof(Smem) <= SHARED_BYTES, "shared_bytes is what the geometry says");
static_assert(ENTRIES >= LENGTH && LENGTH > 0 && (!DRAFT || LENGTH + TOKENS <= ENTRIES), "drafts have room");

// How many blocks of a row came before; the last one leaves a zero.
__device__ inline unsigned arrive(unsigned* arrivals) { return atomicInc(arrivals, gridDim.x - 1); }

// ---- entries ----

// The lane's keys of an entry, as they come from memory.
struct Keys {
    Words<T_IO, ENTRY_VECTOR> held[ENTRY_KEYS / ENTRY_VECTOR];

    __device__ static int of(int j) {
        return (j / ENTRY_VECTOR * ENTRY_LANES + threadIdx.x % ENTRY_LANES) * ENTRY_VECTOR + j % ENTRY_VECTOR;
    }
    __device__ void load(const T_IO* row) {
#pragma unroll
        for (int j = 0; j < ENTRY_KEYS; j += ENTRY_VECTOR) {
            const int key = of(j);
            held[j / ENTRY_VECTOR] = key < HEAD_SIZE ? load_early<Words<T_IO, ENTRY_VECTOR>>(row + key)
                                                     : Words<T_IO, ENTRY_VECTOR>{};
        }
    }
    __device__ float at(int j) const { return held[j / ENTRY_VECTOR].at(j % ENTRY_VECTOR); }
};

// The lane's keys of a row in shared memory; zeros past HEAD_SIZE.
__device__ inline void read_entry(float (&x)[ENTRY_KEYS], const float* row) {
#pragma unroll
    for (int j = 0; j < ENTRY_KEYS; j += ENTRY_VECTOR) {
        Pack<float, ENTRY_VECTOR> pack{};
        if (Keys::of(j) < HEAD_SIZE) pack = *reinterpret_cast<const Pack<float, ENTRY_VECTOR>*>(row + Keys::of(j));
#pragma unroll
        for (int i = 0; i < ENTRY_VECTOR; ++i) x[j + i] = pack.at[i];
    }
}
__device__ inline void write_entry(float* row, const float (&x)[ENTRY_KEYS]) {
#pragma unroll
    for (int j = 0; j < ENTRY_KEYS; ++j)
        if (Keys::of(j) < PADDED_KEYS) row[Keys::of(j)] = x[j];
}

// All tokens read one entry, which decays from token to token; the sums of a group of lanes are theirs together. A token
// reads the entries before it and its own, which is entry `own`; what earlier tokens would find is left for nobody.
__device__ inline void read_of_tokens(
    Smem& smem, int entry, int own, bool is_there, float (&b)[ENTRY_KEYS], float (&k)[ENTRY_KEYS]) {
    const int lane_of_entry = threadIdx.x % ENTRY_LANES;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const Token& token = smem.token[t];
        float r[ENTRY_KEYS], x[ENTRY_KEYS], sums[DELTA ? 4 : 1] = {};
        if constexpr (DELTA) {
            read_entry(x, token.a);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j)
                sums[WITH_A + OF_B] += b[j] * x[j], sums[WITH_A + OF_K] += k[j] * x[j];
        }
        read_entry(r, token.r);
        if constexpr (BONUS) {
            read_entry(x, token.u);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) sums[OF_K] += (t == own ? x[j] * r[j] : r[j]) * k[j];
        }
        if constexpr (HAS_DECAY) {
            read_entry(x, token.d);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                const float d = t > own ? x[j] : 1.0f;
                k[j] *= d;
                if constexpr (DELTA) b[j] *= d;
            }
        }
        if constexpr (!BONUS) {
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                sums[OF_K] += k[j] * r[j];
                if constexpr (DELTA) sums[OF_B] += b[j] * r[j];
            }
        }
        if constexpr (DELTA) {
            add_over_lanes<1, 4, ENTRY_LANES>(sums);
            const int kept = lane_of_entry % 2 * 2 + lane_of_entry / 2 % 2;
            if (is_there && lane_of_entry < 4) smem.read[entry][t].at[kept] = sums[0];
        } else {
            add_over_lanes<1, 1, ENTRY_LANES>(sums);
            if (is_there && lane_of_entry == 0) smem.read[entry][t].at[0] = sums[0];
        }
    }
}

// A value's part of the entries, as it comes from memory.
struct Values {
    float u[DELTA ? PAST : 1];
    T_IO v[PAST];

    __device__ void load(const float* entry_u, const T_IO* entry_v, int value, int values, int count) {
#pragma unroll
        for (int i = 0; i < PAST; ++i) {
            const bool is_there = i < count && value < values;
            v[i] = is_there ? load_early<Words<T_IO, 1>>(entry_v + i * VALUE_SIZE + value).whole : from_float<T_IO>(0.0f);
            if constexpr (DELTA)
                u[i] = is_there ? load_early<Words<float, 1>>(entry_u + i * VALUE_SIZE + value).whole : 0.0f;
        }
    }
};

// ---- the state ----

// The sums of a token over the state, which the decays up to it have to reach first.
__device__ inline void read_state(Smem& smem, const Tile& tile, float (&decayed)[KEYS], int t) {
    const Token& token = smem.token[t];
    float r[KEYS], x[KEYS], sums[DELTA ? 2 : 1][VALUES] = {};
    if constexpr (DELTA) {
        read_keys(x, token.a);
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            x[j] *= decayed[j];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) sums[DELTA ? 1 : 0][i] += tile[i][j] * x[j];
        }
    }
    if constexpr (HAS_DECAY) read_keys(x, token.d);
    read_keys(r, token.r);
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float before = decayed[j];
        if constexpr (HAS_DECAY) decayed[j] *= x[j];
        r[j] *= BONUS ? before : decayed[j];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[0][i] += tile[i][j] * r[j];
    }
#pragma unroll
    for (int n = 0; n < (DELTA ? 2 : 1); ++n) {
        add_over_lanes<FIRST_LANE, VALUES>(sums[n]);
        if ((lane() & REPEATS) == 0) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i)
                smem.sums[t][n][key_warp()][own_values() + kept_index() + i] = sums[n][i];
        }
    }
}

// The state with the entries in it.
__device__ inline void fold(Smem& smem, Tile& tile, const float (&decayed)[KEYS], int entries) {
    const int own = own_values();
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) tile[i][j] *= decayed[j];
#pragma unroll 1
    for (int n = 0; n < entries; ++n) {
        float x[KEYS], of_value[VALUES];
        read_keys(x, smem.k[n]);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) of_value[i] = smem.v[n][own + i];
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) tile[i][j] += of_value[i] * x[j];
        if constexpr (DELTA) {
            read_keys(x, smem.b[n]);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) of_value[i] = smem.u[n][own + i];
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
#pragma unroll
                for (int i = 0; i < VALUES; ++i) tile[i][j] += of_value[i] * x[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) replay_states(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_U* __restrict__ u, const T_W0* __restrict__ w0,
    T_STATE* state, const Index* __restrict__ state_indices, const AcceptLen* __restrict__ accept_lens,
    const i64* __restrict__ seed, T_IO* __restrict__ y, float* entry_d, T_IO* entry_b, T_IO* entry_k, T_IO* entry_v,
    float* entry_u, int* cursors, unsigned* arrivals, Strides r_strides, Strides w_strides, Strides k_strides,
    Strides v_strides, Strides a_strides, Strides b_strides, i64 slot_stride, i64 slots, i64 null_index, i64 batch,
    i64 heads, int kept, float scale) {
    extern __shared__ uint4 dynamic[];
    Smem& smem = *reinterpret_cast<Smem*>(dynamic);
    const i64 row = i64(blockIdx.z) * gridDim.y + blockIdx.y, head = blockIdx.x / VALUE_BLOCKS;
    if (row >= batch) return;
    const int first_value = blockIdx.x % VALUE_BLOCKS * BLOCK_VALUES;
    const i64 of_head = head * (VALUE_SIZE * HEAD_SIZE);
    let_next_launch_begin();
    state = after_previous_launch(state);
    r = written_meanwhile(r), w = written_meanwhile(w), k = written_meanwhile(k), v = written_meanwhile(v);
    a = written_meanwhile(a), b = written_meanwhile(b), u = written_meanwhile(u), w0 = written_meanwhile(w0);
    state_indices = written_meanwhile(state_indices), accept_lens = written_meanwhile(accept_lens);
    seed = written_meanwhile(seed), cursors = written_meanwhile(cursors);
    const i64 slot = state_indices != nullptr ? i64(state_indices[row]) : row;

    const i64 y_stride = heads * VALUE_SIZE;
    y += (row * TOKENS * heads + head) * VALUE_SIZE + first_value;
    if ((state_indices != nullptr && slot <= null_index) || slot >= slots || slot < 0) {
        const int width = min(BLOCK_VALUES, VALUE_SIZE - first_value);
#pragma unroll 1
        for (int t = 0; t < TOKENS; ++t)
#pragma unroll 1
            for (int i = threadIdx.x; i < width; i += NUM_THREADS) y[t * y_stride + i] = from_float<T_IO>(0.0f);
        return;
    }

    const i64 of_entries = (slot * heads + head) * ENTRIES;
    entry_d += of_entries * HEAD_SIZE, entry_b += of_entries * HEAD_SIZE, entry_k += of_entries * HEAD_SIZE;
    entry_v += of_entries * VALUE_SIZE + first_value, entry_u += of_entries * VALUE_SIZE + first_value;
    const int cursor = *static_cast<volatile int*>(cursors + slot);
    const auto start = [&](Strides s) { return row * s.batch + head * s.head; };
    Held held[AT_ONCE];
    // The tokens from `first` on; all that are loaded at once have a place in registers.
    const auto load_tokens = [&](int first) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int t = first + n;
            if (t >= TOKENS) break;
            held[n].r.load(r + t * r_strides.token), held[n].k.load(k + t * k_strides.token);
            if constexpr (HAS_DECAY) held[n].w.load(w + t * w_strides.token);
            if constexpr (DELTA) held[n].a.load(a + t * a_strides.token), held[n].b.load(b + t * b_strides.token);
            held[n].v.load(v + t * v_strides.token, VALUE_SIZE - first_value);
        }
    };
    if constexpr (HAS_TOKENS) {
        r += start(r_strides), w += start(w_strides), k += start(k_strides);
        v += start(v_strides) + first_value, a += start(a_strides), b += start(b_strides);
        u += head * HEAD_SIZE;
        load_tokens(0);
    }

    Tile tile;
    T_STATE* const own_state = state + slot * slot_stride + of_head;
    if constexpr (HAS_TOKENS) read_tile(tile, own_state, first_value);

    // How many entries there are; none is read that is not among those of the slot, whatever the cursor is.
    int past = min(max(cursor, 0), LENGTH);
    if (!HAS_TOKENS && accept_lens != nullptr)
        past += static_cast<int>(min(max(i64(accept_lens[row]), i64(0)), i64(ENTRIES - LENGTH)));
    const bool is_flush = !DRAFT && past + TOKENS > kept;
    const int moved = is_flush ? 0 : past + TOKENS;
    unsigned arrived = 0;
    if (!HAS_TOKENS && !is_flush) {
        if (moved == cursor) return;
        __syncthreads();
        if (threadIdx.x == 0 && arrive(arrivals + slot) == gridDim.x - 1) cursors[slot] = moved;
        return;
    }

    // The entries are asked for, all at once, before any is looked at.
    constexpr int SHARES = HAS_DECAY ? ceil_div(PADDED_KEYS, NUM_THREADS) : 1;
    float decays[SHARES][PAST];
    if constexpr (HAS_DECAY) {
#pragma unroll
        for (int n = 0; n < SHARES; ++n) {
            const int key = threadIdx.x + n * NUM_THREADS;
#pragma unroll
            for (int i = 0; i < PAST; ++i)
                decays[n][i] = i < past && key < HEAD_SIZE
                                   ? load_early<Words<float, 1>>(entry_d + i * HEAD_SIZE + key).whole : 1.0f;
        }
    }
    const int group = threadIdx.x / ENTRY_LANES;
    Keys next_b{}, next_k{};
    const auto load_entry = [&](int i) {
        if (i >= past) return;
        next_k.load(entry_k + i * HEAD_SIZE);
        if constexpr (DELTA) next_b.load(entry_b + i * HEAD_SIZE);
    };
    load_entry(group);
    Values of_value{};
    if (threadIdx.x < BLOCK_VALUES) of_value.load(entry_u, entry_v, threadIdx.x, VALUE_SIZE - first_value, past);
    if constexpr (!HAS_TOKENS) read_tile(tile, own_state, first_value);

    if constexpr (HAS_TOKENS) {
        Share<T_W0, HEAD_SIZE, PADDED_KEYS> of_w0;
        Share<T_U, HEAD_SIZE, PADDED_KEYS> of_u;
        if (HAS_DECAY && w0 != nullptr) of_w0.load(w0 + head * HEAD_SIZE);
        if constexpr (BONUS) of_u.load(u);
#pragma unroll 1
        for (int first = 0; first < TOKENS; first += AT_ONCE) {
            if (first > 0) load_tokens(first);
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                if (first + n >= TOKENS) break;
                held[n].w0 = of_w0, held[n].u = of_u;
                held[n].store(smem.token[first + n], w0 != nullptr);
            }
        }
    }
    if constexpr (HAS_DECAY) {
#pragma unroll
        for (int n = 0; n < SHARES; ++n) {
            const int key = threadIdx.x + n * NUM_THREADS;
            if (key >= PADDED_KEYS) break;
            float product = 1.0f;
#pragma unroll
            for (int i = PAST - 1; i >= 0; --i) {
                if (i < past) smem.behind[i + 1][key] = product;
                product *= decays[n][i];
            }
            smem.behind[0][key] = product;
        }
    }
    __syncthreads();
    // By now all threads of the block know the cursor.
    if (!DRAFT && threadIdx.x == 0) arrived = arrive(arrivals + slot);

    if (HAS_TOKENS && !is_flush && first_value == 0) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
#pragma unroll 1
            for (int key = threadIdx.x; key < HEAD_SIZE; key += NUM_THREADS) {
                const int place = (past + t) * HEAD_SIZE + key;
                entry_k[place] = from_float<T_IO>(smem.token[t].k[key]);
                if constexpr (DELTA) entry_b[place] = from_float<T_IO>(smem.token[t].b[key]);
                if constexpr (HAS_DECAY) entry_d[place] = smem.token[t].d[key];
            }
    }

    float decayed[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) decayed[j] = 1.0f;
    if constexpr (HAS_DECAY) read_keys(decayed, smem.behind[0]);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) read_state(smem, tile, decayed, t);

#pragma unroll 1
    for (int first = 0; first < past + TOKENS; first += GROUPS) {
        const int i = first + group, own = i - past;
        float of_b[ENTRY_KEYS] = {}, of_k[ENTRY_KEYS] = {};
        if (own < 0) {
            float behind[ENTRY_KEYS];
            if constexpr (HAS_DECAY) read_entry(behind, smem.behind[i + 1]);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                const float factor = HAS_DECAY ? behind[j] : 1.0f;
                of_k[j] = next_k.at(j) * factor;
                if constexpr (DELTA) of_b[j] = next_b.at(j) * factor;
            }
        } else if (own < TOKENS) {
            read_entry(of_k, smem.token[own].k);
            if constexpr (DELTA) read_entry(of_b, smem.token[own].b);
        }
        load_entry(i + GROUPS);
        read_of_tokens(smem, i, own, own < TOKENS, of_b, of_k);
        if (is_flush && own < TOKENS) {
            write_entry(smem.k[i], of_k);
            if constexpr (DELTA) write_entry(smem.b[i], of_b);
        }
    }
    __syncthreads();

#pragma unroll 1
    for (int value = threadIdx.x; value < BLOCK_VALUES; value += NUM_THREADS) {
        if (value >= NUM_THREADS) of_value.load(entry_u, entry_v, value, VALUE_SIZE - first_value, past);
        const bool is_there = first_value + value < VALUE_SIZE;
        float own_u[STEPS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            // What the token finds in the state and in all entries, with r and with a.
            float found[2] = {};
#pragma unroll
            for (int n = 0; n < KEY_WARPS; ++n)
#pragma unroll
                for (int x = 0; x < (DELTA ? 2 : 1); ++x) found[x] += smem.sums[t][x][n][value];
            const auto add = [&](const Read& read, float of_u, float of_v, bool is_before) {
                found[0] += read.at[OF_K] * of_v;
                if constexpr (DELTA) {
                    found[0] += read.at[OF_B] * of_u;
                    if (is_before) found[1] += read.at[WITH_A + OF_B] * of_u + read.at[WITH_A + OF_K] * of_v;
                }
            };
#pragma unroll
            for (int i = 0; i < PAST; ++i)
                if (i < past) add(smem.read[i][t], of_value.u[DELTA ? i : 0], to_float(of_value.v[i]), true);
#pragma unroll
            for (int s = 0; s < t; ++s)
                add(smem.read[past + s][t], own_u[DELTA ? s : 0], smem.token[s].v[value], true);
            own_u[t] = found[1];
            add(smem.read[past + t][t], own_u[t], smem.token[t].v[value], false);
            if (is_there) y[t * y_stride + value] = from_float<T_IO>(scale * found[0]);
        }
        if (is_flush) {
#pragma unroll
            for (int i = 0; i < PAST; ++i)
                if (i < past) {
                    smem.v[i][value] = to_float(of_value.v[i]);
                    if constexpr (DELTA) smem.u[i][value] = of_value.u[i];
                }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const float of_v = smem.token[t].v[value];
            if (is_flush) {
                smem.v[past + t][value] = of_v;
                if constexpr (DELTA) smem.u[past + t][value] = own_u[t];
            } else if (is_there) {
                entry_v[(past + t) * VALUE_SIZE + value] = from_float<T_IO>(of_v);
                if constexpr (DELTA) entry_u[(past + t) * VALUE_SIZE + value] = own_u[t];
            }
        }
    }
    if constexpr (!DRAFT) {
        if (is_flush) {
            __syncthreads();
            fold(smem, tile, decayed, past + TOKENS);
            const i64 number = STOCHASTIC ? *seed : 0;
            write_tile(own_state, tile, first_value, number, (slot * heads + head) * TILES_OF_HEAD);
        }
        if (threadIdx.x == 0 && arrived == gridDim.x - 1) cursors[slot] = moved;
    }
}
