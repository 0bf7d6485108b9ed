// A head's state in registers for a few tokens: which part of it a thread holds, the sums over keys, rounding.
//
// The state is a matrix whose rows are values in the vk layout and keys in the kv layout. A thread holds KEYS keys of
// VALUES values; VECTOR neighbours of a row are one access. KEY_LANES lanes of a warp share the keys of a value, in
// the kv layout KEY_WARPS warps too.
//
// Needs HEAD_SIZE, VALUE_SIZE, NUM_THREADS, VECTOR, KEY_LANES, KEY_WARPS, ROWS, INDEX_BYTES, ONE_TOKEN, STATE_LAYOUT,
// STOCHASTIC.
#pragma once
#include "sequence.cuh"

template <int BYTES> struct IndexOf { using Type = int; };
template <> struct IndexOf<8> { using Type = i64; };
using Index = IndexOf<INDEX_BYTES>::Type;

constexpr bool IS_VK = STATE_LAYOUT == StateLayout::vk;
constexpr int WARPS = NUM_THREADS / 32, VALUE_LANES = 32 / KEY_LANES, VALUE_WARPS = WARPS / KEY_WARPS;
constexpr int KEYS = IS_VK ? VECTOR * ceil_div(HEAD_SIZE, VECTOR * KEY_LANES) : ROWS;
constexpr int VALUES = IS_VK ? ROWS : VECTOR;
constexpr int PADDED_KEYS = KEYS * KEY_LANES * KEY_WARPS;
constexpr int BLOCK_VALUES = VALUES * VALUE_LANES * VALUE_WARPS;
constexpr int VALUE_BLOCKS = ceil_div(VALUE_SIZE, BLOCK_VALUES);
// The lanes of a warp whose index differs in these bits share the keys of a value.
constexpr int FIRST_LANE = IS_VK ? 1 : VALUE_LANES, END_LANE = FIRST_LANE * KEY_LANES;
// A buffer for the token after this one spares a barrier.
constexpr int BUFFERS = !ONE_TOKEN && PADDED_KEYS <= 512 ? 2 : 1;

static_assert(PADDED_KEYS >= HEAD_SIZE, "the lanes that share keys hold all of them");
static_assert((IS_VK ? HEAD_SIZE : VALUE_SIZE) % VECTOR == 0, "a row of the state consists of whole accesses");
static_assert(!IS_VK || KEY_WARPS == 1, "in the vk layout a warp holds all keys of its values");

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int key_lane() { return IS_VK ? lane() % KEY_LANES : lane() / VALUE_LANES; }
__device__ inline int key_warp() { return threadIdx.x / 32 % KEY_WARPS; }
__device__ inline int key_of(int j) {
    return IS_VK ? (j / VECTOR * KEY_LANES + key_lane()) * VECTOR + j % VECTOR
                 : (j * KEY_WARPS + key_warp()) * KEY_LANES + key_lane();
}
// The first of the thread's values in the block.
__device__ inline int own_values() {
    const int value_lane = IS_VK ? lane() / KEY_LANES : lane() % VALUE_LANES;
    return (static_cast<int>(threadIdx.x / 32) / KEY_WARPS * VALUE_LANES + value_lane) * VALUES;
}

// ---- rows of a token ----

// A thread's share of a row between its load and its place in shared memory, so that loads need not wait.
template <typename T, int SIZE, int PADDED> struct Share {
    static constexpr int COUNT = ceil_div(PADDED, NUM_THREADS);
    T held[COUNT];
    __device__ void load(const T* source, int size = SIZE) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int i = threadIdx.x + n * NUM_THREADS;
            held[n] = i < size && (PADDED % NUM_THREADS == 0 || i < PADDED) ? source[i] : from_float<T>(0.0f);
        }
    }
    template <typename Map> __device__ void store(float* target, Map map) const {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int i = threadIdx.x + n * NUM_THREADS;
            if (PADDED % NUM_THREADS == 0 || i < PADDED) target[i] = map(n, to_float(held[n]));
        }
    }
    __device__ void store(float* target) const {
        store(target, [](int, float x) { return x; });
    }
};

// Keys of the thread that it reads of a row by one access.
constexpr int TOGETHER = IS_VK ? min_of(VECTOR, 4) : 1;

// The thread's keys of a row in shared memory: COUNT of them, from index `first` on, or all.
template <int COUNT> __device__ inline void read_keys_from(int first, float (&x)[COUNT], const float* row) {
    static_assert(COUNT % TOGETHER == 0);
#pragma unroll
    for (int j = 0; j < COUNT; j += TOGETHER) {
        const auto pack = *reinterpret_cast<const Pack<float, TOGETHER>*>(row + key_of(first + j));
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) x[j + i] = pack.at[i];
    }
}
__device__ inline void read_keys(float (&x)[KEYS], const float* row) { read_keys_from(0, x, row); }

// ---- sums over keys ----

// Adds x[i] over the lanes that share keys. While the count is even an exchange halves what a lane keeps, so that sums
// cost about one shuffle each. Afterwards x[0 .. KEPT) are the sums of the indices `kept_index` + 0, 1, ...
__device__ constexpr int kept_of(int count, int bit) {
    return bit >= END_LANE ? count : kept_of(count % 2 ? count : count / 2, 2 * bit);
}
constexpr int KEPT = kept_of(VALUES, FIRST_LANE);

template <int BIT, int COUNT, int END = END_LANE> __device__ inline void add_over_lanes(float* x) {
    if constexpr (BIT < END) {
        if constexpr (COUNT % 2) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], BIT);
            add_over_lanes<2 * BIT, COUNT, END>(x);
        } else {
            const bool upper = threadIdx.x & BIT;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) {
                const float sent = upper ? x[i] : x[i + COUNT / 2];
                x[i] = (upper ? x[i + COUNT / 2] : x[i]) + __shfl_xor_sync(0xffffffffu, sent, BIT);
            }
            add_over_lanes<2 * BIT, COUNT / 2, END>(x);
        }
    }
}
__device__ constexpr int repeats_of(int count, int bit) {
    return bit >= END_LANE ? 0 : (count % 2 ? bit : 0) | repeats_of(count % 2 ? count : count / 2, 2 * bit);
}
constexpr int REPEATS = repeats_of(VALUES, FIRST_LANE);  // the bits of lanes over which kept sums repeat

// The first index that a lane keeps, and the bits of the lanes that keep an index.
__device__ inline int kept_index() {
    int index = 0, count = VALUES;
#pragma unroll
    for (int bit = FIRST_LANE; bit < END_LANE; bit *= 2)
        if (count % 2 == 0) count /= 2, index += threadIdx.x & bit ? count : 0;
    return index;
}
__device__ inline int keeper_of(int index) {
    int bits = 0, count = VALUES;
#pragma unroll
    for (int bit = FIRST_LANE; bit < END_LANE; bit *= 2)
        if (count % 2 == 0) count /= 2, bits |= index / count % 2 ? bit : 0;
    return bits;
}

// What the warps that share keys tell each other: the sums of a value, and some that are one for all values.
template <int ONES> struct Sums {
    float sa[KEY_WARPS][KEY_WARPS > 1 ? BLOCK_VALUES : 1], y[KEY_WARPS][KEY_WARPS > 1 ? BLOCK_VALUES : 1];
    float ones[KEY_WARPS][ONES];
};

// Whether the lane has its own kept sums, or those that another one has too.
__device__ inline bool keeps_sums() { return (lane() & REPEATS) == 0; }

// Makes sums over all keys of those over the thread's: the kept ones of `read` and `sa`, and `ones`. `all_sa` gets those
// of all of the thread's values.
template <bool HAS_SA, int ONES>
__device__ inline void add_over_keys(float (&read)[VALUES], float (&sa)[VALUES], float (&all_sa)[VALUES],
                                     float (&ones)[ONES], Sums<ONES>& sums) {
    add_over_lanes<FIRST_LANE, VALUES>(read);
    if constexpr (HAS_SA) add_over_lanes<FIRST_LANE, VALUES>(sa);
#pragma unroll
    for (int bit = FIRST_LANE; bit < END_LANE; bit *= 2)
#pragma unroll
        for (int i = 0; i < ONES; ++i) ones[i] += __shfl_xor_sync(0xffffffffu, ones[i], bit);

    if constexpr (KEY_WARPS == 1) {
        if constexpr (HAS_SA) {
            const int group = lane() & ~((END_LANE - 1) & ~(FIRST_LANE - 1));
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                all_sa[i] = __shfl_sync(0xffffffffu, sa[i % KEPT], group | keeper_of(i));
        }
    } else {
        const int own = own_values(), first = own + kept_index();
        if (keeps_sums()) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                sums.y[key_warp()][first + i] = read[i];
                if constexpr (HAS_SA) sums.sa[key_warp()][first + i] = sa[i];
            }
        }
        if (lane() == 0) {
#pragma unroll
            for (int i = 0; i < ONES; ++i) sums.ones[key_warp()][i] = ones[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ONES; ++i) ones[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) all_sa[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) read[i] = sa[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < KEY_WARPS; ++n) {
#pragma unroll
            for (int i = 0; i < ONES; ++i) ones[i] += sums.ones[n][i];
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                read[i] += sums.y[n][first + i];
                if constexpr (HAS_SA) sa[i] += sums.sa[n][first + i];
            }
            if constexpr (HAS_SA) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) all_sa[i] += sums.sa[n][own + i];
            }
        }
    }
}

// ---- the state ----

// Neighbours in a row of the state, as they are moved; `set` is what `at` reads.
template <typename T> struct Access : Words<T, VECTOR> {
    __device__ void set(int i, float x) {
        if constexpr (VECTOR == 1) {
            this->whole = from_float<T>(x);
        } else if constexpr (sizeof(T) == 4) {
            this->word[i] = __float_as_uint(x);
        } else {
            const unsigned bits = from_float<T>(x).bits;
            unsigned& word = this->word[i / 2];
            word = i % 2 ? (word & 0xffffu) | bits << 16 : (word & 0xffff0000u) | bits;
        }
    }
    // What `at` reads, by an instruction that the compiler does not take for that one: it would keep what is converted.
    __device__ float at_again(int i) const {
        if constexpr (VECTOR == 1 || sizeof(T) == 4) {
            return this->at(i);
        } else {
            unsigned x;
            const unsigned bytes = is_bf16<T> ? (i % 2 ? 0x3244 : 0x1044) : (i % 2 ? 0x4432 : 0x4410);
            asm("prmt.b32 %0, %1, 0, %2;" : "=r"(x) : "r"(this->word[i / 2]), "r"(bytes));
            if constexpr (is_bf16<T>) return __uint_as_float(x);
            else return to_float(T{static_cast<unsigned short>(x)});
        }
    }
};

// A thread's part of a head's state: as float, or as T_STATE, whose numbers are converted each time that they are used,
// so that they take half the registers meanwhile.
template <typename T> struct Tile {
    static constexpr int ACCESSES = VALUES * KEYS / VECTOR;
    static constexpr bool IS_WIDE = sizeof(T) == 4;
    Access<T> accesses[ACCESSES];

    static __device__ constexpr int access_of(int i, int j) { return IS_VK ? (i * KEYS + j) / VECTOR : j; }
    static __device__ constexpr int in_access(int i, int j) { return IS_VK ? j % VECTOR : i; }
    // The thread's value i of its key j.
    __device__ float at(int i, int j) const { return accesses[access_of(i, j)].at(in_access(i, j)); }
    __device__ void set(int i, int j, float x) { accesses[access_of(i, j)].set(in_access(i, j), x); }
    // The access that begins with value i of key j, with change(i, j, x) in the place of each number x.
    template <typename Change> __device__ Access<T> changed(int i, int j, Change change) const {
        const Access<T> old = accesses[access_of(i, j)];
        Access<T> access{};
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            access.set(e, IS_VK ? change(i, j + e, old.at_again(e)) : change(i + e, j, old.at_again(e)));
        return access;
    }
};

struct Same { __device__ float operator()(int, int, float x) const { return x; } };

// Calls visit(i, j, offset, is_there) for every access: its first element, of value i and key j, is `offset` elements
// from the thread's first one. Where no thread has anything past the end, the compiler knows.
template <typename Visit> __device__ inline void for_accesses(int first_value, Visit visit) {
    constexpr bool HAS_ALL_KEYS = PADDED_KEYS == HEAD_SIZE, HAS_ALL_VALUES = VALUE_SIZE % BLOCK_VALUES == 0;
    const int value = first_value + own_values();
#pragma unroll
    for (int i = 0; i < (IS_VK ? VALUES : 1); ++i)
#pragma unroll
        for (int j = 0; j < KEYS; j += IS_VK ? VECTOR : 1) {
            const bool has_key = HAS_ALL_KEYS || key_of(j) < HEAD_SIZE;
            const bool has_value = HAS_ALL_VALUES || value + i < VALUE_SIZE;
            visit(i, j, IS_VK ? i * HEAD_SIZE + j * KEY_LANES : j * KEY_WARPS * KEY_LANES * VALUE_SIZE,
                  has_key && has_value);
        }
}
// The place of the thread's first element in the head.
__device__ inline int first_element(int first_value) {
    const int value = first_value + own_values();
    return IS_VK ? value * HEAD_SIZE + key_of(0) : key_of(0) * VALUE_SIZE + value;
}
// Past the caches of a multiprocessor, so that a later load does not find what is old by then.
__device__ inline Index read_from_l2(const Index* source) { return *static_cast<const volatile Index*>(source); }

// Has the tile brought near: a line by the thread whose access it begins with.
__device__ inline void prefetch_tile(const T_STATE* head, int first_value) {
    const T_STATE* const first = head + first_element(first_value);
    for_accesses(first_value, [&](int, int, int offset, bool is_there) {
        if (is_there && reinterpret_cast<unsigned long long>(first + offset) % 128 == 0)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(first + offset) : "memory");
    });
}

// All accesses are under way before the first one is looked at. One that is zero is not read.
template <typename T>
__device__ inline void read_tile(Tile<T>& tile, const T_STATE* head, int first_value, bool is_zero = false) {
    Tile<T_STATE> held;
    const T_STATE* const first = head + first_element(first_value);
    for_accesses(first_value, [&](int i, int j, int offset, bool is_there) {
        auto& access = held.accesses[held.access_of(i, j)];
        access = is_there && !is_zero ? load_early<Access<T_STATE>>(first + offset) : Access<T_STATE>{};
    });
#pragma unroll
    for (int n = 0; n < held.ACCESSES; ++n) {
        if constexpr (sizeof(T) == sizeof(T_STATE)) {
            tile.accesses[n] = held.accesses[n];
        } else {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) tile.accesses[n].set(e, held.accesses[n].at(e));
        }
    }
}

template <typename T, typename Change> __device__ inline void change_tile(Tile<T>& tile, Change change) {
    for_accesses(0, [&](int i, int j, int, bool) {
        tile.accesses[tile.access_of(i, j)] = tile.changed(i, j, change);
    });
}

template <typename T> __device__ inline void clear_tile(Tile<T>& tile) {
#pragma unroll
    for (Access<T>& access : tile.accesses) access = {};
}

// ---- rounding ----

// Philox 4x32 with 10 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011): 16 bytes at random
// of a counter and a seed.
__device__ inline uint4 philox(i64 counter, i64 seed) {
    unsigned x = counter, y = counter >> 32, z = 0, t = 0, key = seed, other_key = seed >> 32;
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        const unsigned low = 0xD2511F53u * x, high = __umulhi(0xD2511F53u, x);
        const unsigned other_low = 0xCD9E8D57u * z, other_high = __umulhi(0xCD9E8D57u, z);
        x = other_high ^ y ^ key, y = other_low, z = high ^ t ^ other_key, t = low;
        key += 0x9E3779B9u, other_key += 0xBB67AE85u;
    }
    return {x, y, z, t};
}

// One of the two neighbours of x, the nearer one more often, so that the mean is x; by 16 bits at random.
template <typename T> __device__ inline T round_at_random(float x, unsigned random) {
    constexpr int SPARE = is_bf16<T> ? 16 : 13;  // bits of a float that T has not
    const unsigned bits = __float_as_uint(x);
    // What is not finite, or may leave the range of float16, has nothing between its neighbours.
    if ((bits & 0x7fffffffu) >= (is_bf16<T> ? 0x7f7f0000u : 0x477fe000u)) return from_float<T>(x);
    if constexpr (!is_bf16<T>) {
        // Below 2^-14 the neighbours are multiples of 2^-24.
        if ((bits & 0x7fffffffu) < 0x38800000u) {
            const float whole = floorf(fabsf(x) * 16777216.0f + random * (1.0f / 65536.0f));
            return from_float<T>(copysignf(whole * (1.0f / 16777216.0f), x));
        }
    }
    const unsigned mask = (1u << SPARE) - 1;
    return from_float<T>(__uint_as_float((bits + (random & mask)) & ~mask));
}

constexpr int OF_ONE_DRAW = 8;  // elements of a head for which 16 bytes at random last
constexpr int TILES_OF_HEAD = ceil_div(VALUE_SIZE * HEAD_SIZE, OF_ONE_DRAW);

// One store for an access, spelt out: the compiler may make four of it.
template <typename T> __device__ inline void write_access(void* target, const T& x) {
    if constexpr (sizeof(T) == 16) {
        const uint4& words = reinterpret_cast<const uint4&>(x);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words.x), "r"(words.y),
                     "r"(words.z), "r"(words.w) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        const uint2& words = reinterpret_cast<const uint2&>(x);
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target), "r"(words.x), "r"(words.y) : "memory");
    } else {
        *static_cast<T*>(target) = x;
    }
}

// Writes change(i, j, x) for each number x. `draw` is the place of the head's first draw among those of the pool: the
// shape of blocks does not decide which bits an element gets.
template <typename T, typename Change = Same>
__device__ inline void write_tile(T_STATE* head, const Tile<T>& tile, int first_value, i64 seed, i64 draw,
                                  Change change = {}) {
    const int first = first_element(first_value);
    T_STATE* const target = head + first;
    for_accesses(first_value, [&](int i, int j, int offset, bool is_there) {
        if (!is_there) return;
        const Access<T> access = tile.changed(i, j, change);
        if constexpr (sizeof(T) == sizeof(T_STATE)) {
            write_access(target + offset, access);
        } else {
            Pack<T_STATE, VECTOR> pack;
            const int index = first + offset;
            const uint4 words = STOCHASTIC ? philox(draw + index / OF_ONE_DRAW, seed) : uint4{};
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const int place = (index + e) % OF_ONE_DRAW;
                const unsigned word = place < 2 ? words.x : place < 4 ? words.y : place < 6 ? words.z : words.w;
                if constexpr (STOCHASTIC)
                    pack.at[e] = round_at_random<T_STATE>(access.at(e), word >> (place % 2 * 16) & 0xffffu);
                else pack.at[e] = from_float<T_STATE>(access.at(e));
            }
            write_access(target + offset, pack);
        }
    });
}
