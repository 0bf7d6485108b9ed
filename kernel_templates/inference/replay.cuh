// Tokens, entries of a ring and the state that was written last, as replay_states.cu says what these are: read in one
// pass, and folded into the state once in a while.
//
// Needs BONUS, DELTA, OF_CHANNELS, OF_HEADS and what overlap.cuh and update.cuh need. PAIRS: an entry is v k^T + u b^T,
// and a reads the state before the decay, as in wkv7; else it is v k^T, and what is erased is read behind the decay.
// IS_RULE: what a token adds is not its value. KEYS_SAY_DECAYS: d = 1 - k.
// `StepToken` is a token in shared memory, with rows r, k, d, v, and b with PAIRS; `erased_of` returns its a.
#pragma once
#include "overlap.cuh"
#include "update.cuh"

using AcceptLen = IndexOf<ACCEPT_BYTES>::Type;
constexpr bool HAS_TOKENS = TOKENS > 0, HAS_DECAY = OF_CHANNELS || OF_HEADS;
constexpr bool SHARES_KEYS = IS_RULE || !HAS_TOKENS;
constexpr int DECAYS = OF_HEADS ? 1 : HEAD_SIZE;  // of a token
constexpr int PAST = HAS_TOKENS ? LENGTH : ENTRIES;  // the most entries that there are before
constexpr int AT_ONCE = min_of(max_of(TOKENS, 1), 4);  // tokens that are loaded together
constexpr int MOST = PAST + TOKENS, STEPS = max_of(TOKENS, 1), FOLDED = DRAFT ? 1 : MOST;
// Entries are read by accesses of so many neighbours, those of a row of a token in shared memory too.
__device__ constexpr bool are_whole(int count) { return HEAD_SIZE % count == 0 && PADDED_KEYS % count == 0; }
constexpr int ENTRY_VECTOR = are_whole(4) ? 4 : are_whole(2) ? 2 : 1;
constexpr int ENTRY_LANES = min_of(max_of(ceil_power(ceil_div(HEAD_SIZE, ENTRY_VECTOR)), 4), 32);
constexpr int ENTRY_KEYS = ENTRY_VECTOR * ceil_div(HEAD_SIZE, ENTRY_VECTOR * ENTRY_LANES);
constexpr int GROUPS = NUM_THREADS / ENTRY_LANES;

// What a token reads of an entry: its products with r, and with a; of b and k, or k alone.
constexpr int READS = (DELTA ? 2 : 1) * (PAIRS ? 2 : 1), OF_B = 0, OF_K = PAIRS ? 1 : 0, WITH_A = PAIRS ? 2 : 1;
struct alignas(4 * READS) Read { float at[READS]; };

// The entries of all slots.
struct Ring {
    float* d;
    T_IO* b;
    T_KEY* k;
    T_VALUE* v;
    float* u;
    int* cursors;
    unsigned* arrivals;
};

struct Smem {
    StepToken token[STEPS];
    float behind[HAS_DECAY ? PAST + 1 : 1][OF_CHANNELS ? PADDED_KEYS : 4];  // products; in front those of all entries
    float b[PAIRS ? FOLDED : 1][PAIRS ? PADDED_KEYS : 4], k[FOLDED][PADDED_KEYS];  // as they stand in the new state
    Read read[MOST][STEPS];
    float sums[STEPS][DELTA ? 2 : 1][KEY_WARPS][BLOCK_VALUES];  // over the state, with r and with a
    float u[PAIRS ? FOLDED : 1][PAIRS ? BLOCK_VALUES : 1], v[IS_RULE ? MOST : FOLDED][BLOCK_VALUES];
};
static_assert(sizeof(Smem) <= SHARED_BYTES, "shared_bytes is what the geometry says");
static_assert(ENTRIES >= LENGTH && LENGTH > 0 && (!DRAFT || LENGTH + TOKENS <= ENTRIES), "drafts have room");

// How many blocks of a row came before; the last one leaves a zero.
__device__ inline unsigned arrive(unsigned* arrivals) { return atomicInc(arrivals, gridDim.x - 1); }

// ---- entries ----

__device__ inline int entry_key_of(int j) {
    return (j / ENTRY_VECTOR * ENTRY_LANES + threadIdx.x % ENTRY_LANES) * ENTRY_VECTOR + j % ENTRY_VECTOR;
}

// The lane's keys of an entry, as they come from memory.
template <typename T> struct Keys {
    Words<T, ENTRY_VECTOR> held[ENTRY_KEYS / ENTRY_VECTOR];

    __device__ void load(const T* row) {
#pragma unroll
        for (int j = 0; j < ENTRY_KEYS; j += ENTRY_VECTOR) {
            const int key = entry_key_of(j);
            held[j / ENTRY_VECTOR] =
                key < HEAD_SIZE ? load_early<Words<T, ENTRY_VECTOR>>(row + key) : Words<T, ENTRY_VECTOR>{};
        }
    }
    __device__ float at(int j) const { return held[j / ENTRY_VECTOR].at(j % ENTRY_VECTOR); }
};

// The lane's keys of a row in shared memory; zeros past HEAD_SIZE.
__device__ inline void read_entry(float (&x)[ENTRY_KEYS], const float* row) {
#pragma unroll
    for (int j = 0; j < ENTRY_KEYS; j += ENTRY_VECTOR) {
        Pack<float, ENTRY_VECTOR> pack{};
        const int key = entry_key_of(j);
        if (key < HEAD_SIZE) pack = *reinterpret_cast<const Pack<float, ENTRY_VECTOR>*>(row + key);
#pragma unroll
        for (int i = 0; i < ENTRY_VECTOR; ++i) x[j + i] = pack.at[i];
    }
}
__device__ inline void write_entry(float* row, const float (&x)[ENTRY_KEYS]) {
#pragma unroll
    for (int j = 0; j < ENTRY_KEYS; ++j)
        if (entry_key_of(j) < PADDED_KEYS) row[entry_key_of(j)] = x[j];
}

// Decays of a thread's keys: each has one, or all the same. `read` reads those of each.
template <int COUNT> __device__ inline void read_decays(
    float (&x)[COUNT], const float* row, void (&read)(float (&)[COUNT], const float*)) {
    if constexpr (!OF_HEADS) return read(x, row);
    const float one = row[0];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) x[j] = one;
}

// All tokens read one entry, which decays from token to token; the sums of a group of lanes are theirs together. A token
// reads the entries before it and its own, which is entry `own`; what earlier tokens would find is left for nobody.
__device__ inline void read_of_tokens(
    Smem& smem, int entry, int own, bool is_there, float (&b)[ENTRY_KEYS], float (&k)[ENTRY_KEYS]) {
    const int lane_of_entry = threadIdx.x % ENTRY_LANES;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const StepToken& token = smem.token[t];
        float r[ENTRY_KEYS], x[ENTRY_KEYS], sums[READS] = {};
        const auto read_with_a = [&] {
            read_entry(x, erased_of(token));
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                if constexpr (PAIRS) sums[WITH_A + OF_B] += b[j] * x[j];
                sums[READS - 1] += k[j] * x[j];
            }
        };
        if constexpr (PAIRS) read_with_a();
        read_entry(r, token.r);
        if constexpr (BONUS) {
            read_entry(x, token.u);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) sums[OF_K] += (t == own ? x[j] * r[j] : r[j]) * k[j];
        }
        if constexpr (HAS_DECAY) {
            read_decays(x, token.d, read_entry);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                const float d = t > own ? x[j] : 1.0f;
                k[j] *= d;
                if constexpr (PAIRS) b[j] *= d;
            }
        }
        if constexpr (DELTA && !PAIRS) read_with_a();
        if constexpr (!BONUS) {
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                sums[OF_K] += k[j] * r[j];
                if constexpr (PAIRS) sums[OF_B] += b[j] * r[j];
            }
        }
        add_over_lanes<1, READS, ENTRY_LANES>(sums);
        const int kept = READS == 4 ? lane_of_entry % 2 * 2 + lane_of_entry / 2 % 2 : lane_of_entry % 2;
        if (is_there && lane_of_entry < READS) smem.read[entry][t].at[kept] = sums[0];
    }
}

// A value's part of the entries, as it comes from memory.
struct Values {
    float u[PAIRS ? PAST : 1];
    T_VALUE v[PAST];

    __device__ void load(const float* entry_u, const T_VALUE* entry_v, int value, int values, int count) {
#pragma unroll
        for (int i = 0; i < PAST; ++i) {
            const bool is_there = i < count && value < values;
            v[i] = is_there ? load_early<Words<T_VALUE, 1>>(entry_v + i * VALUE_SIZE + value).whole
                            : from_float<T_VALUE>(0.0f);
            if constexpr (PAIRS)
                u[i] = is_there ? load_early<Words<float, 1>>(entry_u + i * VALUE_SIZE + value).whole : 0.0f;
        }
    }
};

// The lane's values of an entry, for all threads: rings of rules are longer, and tokens are read in fewer registers.
struct ValuesOfEntry {
    T_VALUE held[IS_RULE ? ceil_div(BLOCK_VALUES, ENTRY_LANES) : 1];

    template <typename Visit> __device__ static void for_values(int count, Visit visit) {
#pragma unroll
        for (int n = 0; n < ceil_div(BLOCK_VALUES, ENTRY_LANES); ++n) {
            const int value = n * ENTRY_LANES + threadIdx.x % ENTRY_LANES;
            if (value < count) visit(n, value);
        }
    }
    __device__ void load(const T_VALUE* row, int count) {
        for_values(min(count, BLOCK_VALUES), [&](int n, int value) {
            held[n] = load_early<Words<T_VALUE, 1>>(row + value).whole;
        });
    }
    __device__ void store(float* row) const {
        for_values(BLOCK_VALUES, [&](int n, int value) { row[value] = to_float(held[n]); });
    }
};

// ---- the state ----

// The sums of a token over the state, which the decays up to it have to reach first.
__device__ inline void read_state(Smem& smem, const Tile<float>& tile, float (&decayed)[KEYS], int t) {
    const StepToken& token = smem.token[t];
    float r[KEYS], x[KEYS], sums[DELTA ? 2 : 1][VALUES] = {};
    const auto read_with_a = [&] {
        read_keys(x, erased_of(token));
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            x[j] *= decayed[j];
#pragma unroll
            for (int i = 0; i < VALUES; ++i) sums[DELTA ? 1 : 0][i] += tile.at(i, j) * x[j];
        }
    };
    if constexpr (PAIRS) read_with_a();
    if constexpr (HAS_DECAY) read_decays(x, token.d, read_keys);
    read_keys(r, token.r);
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float before = decayed[j];
        if constexpr (HAS_DECAY) decayed[j] *= x[j];
        r[j] *= BONUS ? before : decayed[j];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[0][i] += tile.at(i, j) * r[j];
    }
    if constexpr (DELTA && !PAIRS) read_with_a();
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
__device__ inline void fold(Smem& smem, Tile<float>& tile, const float (&decayed)[KEYS], int entries) {
    const int own = own_values();
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) tile.set(i, j, tile.at(i, j) * decayed[j]);
#pragma unroll 1
    for (int n = 0; n < entries; ++n) {
        float x[KEYS], of_value[VALUES];
        read_keys(x, smem.k[n]);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) of_value[i] = smem.v[n][own + i];
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) tile.set(i, j, tile.at(i, j) + of_value[i] * x[j]);
        if constexpr (PAIRS) {
            read_keys(x, smem.b[n]);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) of_value[i] = smem.u[n][own + i];
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
#pragma unroll
                for (int i = 0; i < VALUES; ++i) tile.set(i, j, tile.at(i, j) + of_value[i] * x[j]);
        }
    }
}

// What a block has: a head of a row, its values from `first_value` on, and a key head, which several heads may share.
struct Place {
    i64 row, head;
    int first_value, key_head, sharing;
    __device__ Place(int sharing) : sharing(sharing) {
        row = i64(blockIdx.z) * gridDim.y + blockIdx.y, head = blockIdx.x / VALUE_BLOCKS;
        first_value = blockIdx.x % VALUE_BLOCKS * BLOCK_VALUES, key_head = static_cast<int>(head) / sharing;
    }
};

// Runs a block. `tokens` loads tokens (`begin`), stores them for all threads (`store`), and looks at them (`look`); it
// says what a token adds to the state, of what it erases (`added`), and what y is of what it reads (`result`).
template <typename Tokens> __device__ inline void replay(
    const Place& place, Tokens& tokens, const Ring& ring, T_STATE* state, const Index* state_indices,
    const AcceptLen* accept_lens, const i64* seed, T_IO* y, i64 slot_stride, i64 slots, i64 null_index, i64 batch,
    i64 heads, int kept) {
    extern __shared__ uint4 dynamic[];
    Smem& smem = *reinterpret_cast<Smem*>(dynamic);
    const i64 row = place.row, head = place.head;
    if (row >= batch) return;
    const int first_value = place.first_value;
    const i64 of_head = head * (VALUE_SIZE * HEAD_SIZE);
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
    const i64 of_keys =
        (SHARES_KEYS ? (slot * (static_cast<int>(heads) / place.sharing) + place.key_head) * ENTRIES : of_entries) *
        HEAD_SIZE;
    float *const entry_d = ring.d + of_entries * DECAYS, *const entry_u = ring.u + of_entries * VALUE_SIZE + first_value;
    T_IO* const entry_b = ring.b + of_keys;
    T_KEY* const entry_k = ring.k + of_keys;
    T_VALUE* const entry_v = ring.v + of_entries * VALUE_SIZE + first_value;
    int* const cursors = ring.cursors;
    unsigned* const arrivals = ring.arrivals;
    const int cursor = *static_cast<volatile int*>(cursors + slot);
    if constexpr (HAS_TOKENS) tokens.begin();

    Tile<float> tile;
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
    constexpr int SHARES = OF_CHANNELS ? ceil_div(PADDED_KEYS, NUM_THREADS) : 1;
    float decays[SHARES][PAST], decay_of_head = 1.0f;
    if (OF_HEADS && threadIdx.x < past) decay_of_head = load_early<Words<float, 1>>(entry_d + threadIdx.x).whole;
    if constexpr (OF_CHANNELS) {
#pragma unroll
        for (int n = 0; n < SHARES; ++n) {
            const int key = threadIdx.x + n * NUM_THREADS;
#pragma unroll
            for (int i = 0; i < PAST; ++i) {
                decays[n][i] = 1.0f;
                if (i >= past || key >= HEAD_SIZE) continue;
                if constexpr (KEYS_SAY_DECAYS)
                    decays[n][i] -= to_float(load_early<Words<T_KEY, 1>>(entry_k + i * HEAD_SIZE + key).whole);
                else decays[n][i] = load_early<Words<float, 1>>(entry_d + i * HEAD_SIZE + key).whole;
            }
        }
    }
    const int group = threadIdx.x / ENTRY_LANES;
    Keys<T_IO> next_b{};
    Keys<T_KEY> next_k{};
    ValuesOfEntry next_v{};
    const auto load_entry = [&](int i) {
        if (i >= past) return;
        next_k.load(entry_k + i * HEAD_SIZE);
        if constexpr (PAIRS) next_b.load(entry_b + i * HEAD_SIZE);
        if constexpr (IS_RULE) next_v.load(entry_v + i * VALUE_SIZE, VALUE_SIZE - first_value);
    };
    load_entry(group);
    Values of_value{};
    if (!IS_RULE && threadIdx.x < BLOCK_VALUES)
        of_value.load(entry_u, entry_v, threadIdx.x, VALUE_SIZE - first_value, past);
    if constexpr (!HAS_TOKENS) read_tile(tile, own_state, first_value);

    if constexpr (HAS_TOKENS) tokens.store(smem.token);
    if (OF_HEADS && threadIdx.x < 32) {  // a lane has an entry
#pragma unroll
        for (int n = 1; n < PAST; n *= 2) decay_of_head *= __shfl_down_sync(0xffffffffu, decay_of_head, n);
        if (lane() <= past) smem.behind[lane()][0] = decay_of_head;
    }
    if constexpr (OF_CHANNELS) {
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
    if constexpr (HAS_TOKENS) tokens.look(smem.token);
    // By now all threads of the block know the cursor.
    if (!DRAFT && threadIdx.x == 0) arrived = arrive(arrivals + slot);

    if (HAS_TOKENS && !is_flush && first_value == 0) {
        const bool has_keys = !SHARES_KEYS || static_cast<int>(head) == place.key_head * place.sharing;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
#pragma unroll 1
            for (int key = threadIdx.x; key < HEAD_SIZE; key += NUM_THREADS) {
                const int place = (past + t) * HEAD_SIZE + key;
                if (has_keys) entry_k[place] = from_float<T_KEY>(smem.token[t].k[key]);
                if constexpr (PAIRS) entry_b[place] = from_float<T_IO>(smem.token[t].b[key]);
                if (HAS_DECAY && !KEYS_SAY_DECAYS && key < DECAYS)
                    entry_d[(past + t) * DECAYS + key] = smem.token[t].d[key];
            }
    }

    float decayed[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) decayed[j] = 1.0f;
    if constexpr (HAS_DECAY) read_decays(decayed, smem.behind[0], read_keys);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) read_state(smem, tile, decayed, t);

#pragma unroll 1
    for (int first = 0; first < past + TOKENS; first += GROUPS) {
        const int i = first + group, own = i - past;
        float of_b[ENTRY_KEYS] = {}, of_k[ENTRY_KEYS] = {};
        if (own < 0) {
            float behind[ENTRY_KEYS];
            if constexpr (HAS_DECAY) read_decays(behind, smem.behind[i + 1], read_entry);
#pragma unroll
            for (int j = 0; j < ENTRY_KEYS; ++j) {
                const float factor = HAS_DECAY ? behind[j] : 1.0f;
                of_k[j] = next_k.at(j) * factor;
                if constexpr (PAIRS) of_b[j] = next_b.at(j) * factor;
            }
            if constexpr (IS_RULE) next_v.store(smem.v[i]);
        } else if (own < TOKENS) {
            read_entry(of_k, smem.token[own].k);
            if constexpr (PAIRS) read_entry(of_b, smem.token[own].b);
        }
        load_entry(i + GROUPS);
        read_of_tokens(smem, i, own, own < TOKENS, of_b, of_k);
        if (is_flush && own < TOKENS) {
            write_entry(smem.k[i], of_k);
            if constexpr (PAIRS) write_entry(smem.b[i], of_b);
        }
    }
    __syncthreads();

#pragma unroll 1
    for (int value = threadIdx.x; value < BLOCK_VALUES; value += NUM_THREADS) {
        if (!IS_RULE && value >= NUM_THREADS)
            of_value.load(entry_u, entry_v, value, VALUE_SIZE - first_value, past);
        const bool is_there = first_value + value < VALUE_SIZE;
        float own_u[PAIRS ? STEPS : 1];
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
                if constexpr (PAIRS) found[0] += read.at[OF_B] * of_u;
                if (DELTA && is_before) {
                    if constexpr (PAIRS) found[1] += read.at[WITH_A + OF_B] * of_u;
                    found[1] += read.at[READS - 1] * of_v;
                }
            };
#pragma unroll
            for (int i = 0; i < PAST; ++i)
                if (i < past) {
                    const float of_v = IS_RULE ? smem.v[i][value] : to_float(of_value.v[i]);
                    add(smem.read[i][t], of_value.u[PAIRS ? i : 0], of_v, true);
                }
#pragma unroll
            for (int s = 0; s < t; ++s)
                add(smem.read[past + s][t], own_u[PAIRS ? s : 0], smem.token[s].v[value], true);
            if constexpr (PAIRS) own_u[t] = found[1];
            const float given = smem.token[t].v[value];
            if constexpr (IS_RULE) smem.token[t].v[value] = tokens.added(smem.token[t], given, found[1]);
            add(smem.read[past + t][t], own_u[PAIRS ? t : 0], smem.token[t].v[value], false);
            const float result = tokens.result(smem.token[t], value, given, found[0]);
            if (is_there) y[t * y_stride + value] = from_float<T_IO>(result);
        }
        if (is_flush && !IS_RULE) {
#pragma unroll
            for (int i = 0; i < PAST; ++i)
                if (i < past) {
                    smem.v[i][value] = to_float(of_value.v[i]);
                    if constexpr (PAIRS) smem.u[i][value] = of_value.u[i];
                }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const float of_v = smem.token[t].v[value];
            if (is_flush) {
                smem.v[past + t][value] = of_v;
                if constexpr (PAIRS) smem.u[past + t][value] = own_u[t];
            } else if (is_there) {
                entry_v[(past + t) * VALUE_SIZE + value] = from_float<T_VALUE>(of_v);
                if constexpr (PAIRS) entry_u[(past + t) * VALUE_SIZE + value] = own_u[t];
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
