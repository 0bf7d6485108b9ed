// Kimi Delta Attention, 64 tokens of a head at once: what warps make of the rows of a chunk, 16 tokens and 64 channels
// each, a lane a pair of channels.
//
// Needs what channel_decay.cuh needs, and HAS_BIAS.
#pragma once
#include "bulk_copy.cuh"
#include "chunk.cuh"
#include "channel_decay.cuh"
#include "fresh.cuh"

constexpr int SLABS = HEAD_SIZE / TILE_COLUMNS, TWO_GROUPS = 2 * GROUP_THREADS;
// Keeps the compiler from rounding later than here, so that what is rounded leaves its registers.
__device__ inline void hold(Fragment& fragment) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragment.at[j])::"memory");
}
template <int COUNT> __device__ inline void hold(Fragment (&fragments)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) hold(fragments[i]);
}

__device__ inline int fresh_lane() {
    const int lane = fresh(lane_id());
    __builtin_assume(lane >= 0 && lane < 32);
    return lane;
}

constexpr float LEAST_LOGARITHM = -160.0f;  // less is a factor of 0 to a float

// Queries and keys as they come, and later the rows that take their places.
struct Rows { Slab<CHUNK_LEN> q[SLABS], k[SLABS]; };
struct Factors {
    float of_k[CHUNK_LEN];     // 1 over the norm of k
    float of_q[CHUNK_LEN];     // scale over the norm of q
    float written[CHUNK_LEN];  // the rate over the norm of k
    float of_both[CHUNK_LEN];  // what M has on its diagonal
    float end[HEAD_SIZE];      // e^D
};
struct TokenMatrices { Slab<CHUNK_LEN> tm, m; };
// Values [row, row + 16) and channels [16 c, 16 c + 16). Two lanes side by side exchange halves, so that a row of 32
// bytes is written at once.
__device__ inline void write_tiles(StateTiles& to, int row, int c, const Fragment& f) {
    Slab<64>& slab = to.at[row / 64][16 * c / TILE_COLUMNS];
    const bool is_odd = quad_lane() % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned low = f.at[i], high = f.at[2 + i];
        const unsigned other = __shfl_xor_sync(0xffffffffu, is_odd ? low : high, 1);
        const int pair = 8 * c % 32 + (is_odd ? 4 : 0) + quad_lane() / 2 * 2;
        *reinterpret_cast<uint2*>(word_of(slab, row % 64 + 8 * i, group(), pair)) =
            is_odd ? uint2{other, high} : uint2{low, other};
    }
}

// The groups that make chunks, one after another: a warp of them, with 16 tokens and 64 channels of each chunk. Memory
// has what comes and what is made: by chunk rows and written[2], w, totals, diagonals.
template <typename Memory> struct RowMaker {
    Memory& smem;
    const int slab, p, first;  // its channels, and tokens
    int lane, channel;         // and the first one of a lane's pair
    Gate gate;
    float bias[2] = {};
    // Of the chunk to be made.
    int chunk, steps;

    __device__ RowMaker(Memory& smem, int slab, const Gate& gate, const float* dt_bias)
        : smem(smem), slab(slab), p(warp_id() % 4), first(BLOCK * p), lane(lane_id()),
          channel(slab * TILE_COLUMNS + 2 * lane), gate(gate) {
        if constexpr (HAS_BIAS) bias[0] = dt_bias[channel], bias[1] = dt_bias[channel + 1];
    }
    // Has the compiler find addresses anew: kept from stage to stage they would not fit into the registers.
    __device__ void forget_addresses() {
        asm volatile("" : "+r"(lane));
        channel = slab * TILE_COLUMNS + 2 * lane;
    }
    __device__ static void synchronize() { synchronize_threads(1, TWO_GROUPS); }
    __device__ Rows& rows() const { return smem.rows[chunk % (sizeof(smem.rows) / sizeof(Rows))]; }
    __device__ Slab<CHUNK_LEN>& written() const { return smem.written[chunk % 2][slab]; }
    // Those of token first + t.
    __device__ float2 gates(int t) const {
        const Words<T_W, 2> g = *reinterpret_cast<const Words<T_W, 2>*>(&smem.w[first + t][channel]);
        return {g.at(0), g.at(1)};
    }
    // Multiplies query and key of each token t, where they are, by factors(t), and calls make(t, key) with the key as
    // it was. Some tokens are read at once: the compiler does not read before it writes what may be the same. Given
    // gates are faster one token after another.
    template <typename Factors, typename Make> __device__ void scale_rows(Factors factors, Make make) const {
        constexpr int AT_ONCE = LOG_DECAY == LogDecay::given ? 1 : 4;
#pragma unroll
        for (int begin = 0; begin < BLOCK; begin += AT_ONCE) {
            unsigned queries[AT_ONCE], keys[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                queries[i] = *word_of(rows().q[slab], first, begin + i, lane);
                keys[i] = *word_of(rows().k[slab], first, begin + i, lane);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int t = begin + i;
                const float2 q = unpack(queries[i]), k = unpack(keys[i]), f = factors(t);
                *word_of(rows().q[slab], first, t, lane) = pack(q.x * f.x, q.y * f.y);
                *word_of(rows().k[slab], first, t, lane) = pack(k.x * f.x, k.y * f.y);
                make(t, k);
            }
        }
    }

    // The dots of rows over the group's channels; those over all are known after the next barrier.
    __device__ void multiply_rows() const {
        DiagonalSums sums = {};
        sums.add(tile_of(rows().k[slab]), tile_of(rows().q[slab]), first);
        if (!has_diagonal()) return;
        auto& to = smem.diagonals[slab];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first + group() + 8 * i;
            to[0][token] = sums.keys[i], to[2][token] = sums.both[i];
            if constexpr (HAS_NORM) to[1][token] = sums.queries[i];
        }
    }
    __device__ void write_factors(Factors& factors, float beta, float scale) const {
        if (threadIdx.x & GROUP_THREADS || lane >= BLOCK) return;  // asked this way, `slab` needs no register
        const int token = first + lane;
        float sums[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if (!HAS_NORM && i == 1) continue;
            sums[i] = smem.diagonals[0][i][token] + smem.diagonals[1][i][token];
        }
        const float of_k = HAS_NORM ? norm_factor(sums[0]) : 1.0f;
        const float of_q = scale * (HAS_NORM ? norm_factor(sums[1]) : 1.0f);
        const float written = token < steps ? rate_of(beta) * of_k : 0.0f;
        factors.of_k[token] = of_k, factors.of_q[token] = of_q, factors.written[token] = written;
        factors.of_both[token] = sums[2] * of_q;
    }
    // The sums of log-decays from a block's first token on, base 2.
    __device__ void sum_decays(float (&sums)[BLOCK][2]) const {
        const float most = -LEAST_LOGARITHM / fabsf(gate.speed);
        float sum[2] = {};
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float2 g = gates(t);
            sums[t][0] = sum[0] -= gate.speed * smaller(gate.share(g.x, bias[0]), most);
            sums[t][1] = sum[1] -= gate.speed * smaller(gate.share(g.y, bias[1]), most);
        }
        if (first + BLOCK <= steps) return;
        float last[2] = {};  // what is past the last token does not decay
#pragma unroll
        for (int t = 0; t < BLOCK; ++t)
#pragma unroll
            for (int j = 0; j < 2; ++j) last[j] = sums[t][j] = first + t < steps ? sums[t][j] : last[j];
    }

    // Q e^c, K e^c and K e^(D - c), and e^D. `copy_gates` begins to copy the next chunk's.
    template <typename Copy> __device__ void make_rows(Factors& factors, float beta, float scale, Copy copy_gates) {
        float sums[BLOCK][2];
        sum_decays(sums);
        __syncwarp();  // the warp's gates are read
        copy_gates();
        reinterpret_cast<float2&>(smem.totals[p][channel]) = {sums[BLOCK - 1][0], sums[BLOCK - 1][1]};
        synchronize();  // the sums over all blocks are there
        write_factors(factors, beta, scale);
        float2 before = {}, after = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 whole = reinterpret_cast<const float2&>(smem.totals[i][channel]);
            if (i < p) before.x += whole.x, before.y += whole.y;
            if (i > p) after.x += whole.x, after.y += whole.y;
        }
        const float all[2] = {sums[BLOCK - 1][0], sums[BLOCK - 1][1]};
        if (p == 0)
            reinterpret_cast<float2&>(factors.end[channel]) = {exp2_fast(all[0] + after.x),
                                                               exp2_fast(all[1] + after.y)};
        forget_addresses();
        scale_rows(
            [&](int t) -> float2 { return {exp2_fast(before.x + sums[t][0]), exp2_fast(before.y + sums[t][1])}; },
            [&](int t, float2 k) {
                *word_of(written(), first, t, lane) = pack(k.x * exp2_fast(after.x + (all[0] - sums[t][0])),
                                                           k.y * exp2_fast(after.y + (all[1] - sums[t][1])));
            });
    }
};

// A warp's rows of a chunk come to shared memory: 16 bytes for a lane at once, of ROWS rows of r and k, W_ROWS of w.
template <typename Memory> struct RowCopies {
    static constexpr int PER_UNIT = 16 / sizeof(T_W), UNITS = TILE_COLUMNS / PER_UNIT;
    static constexpr int ROWS = 32 / 8, W_ROWS = 32 / UNITS;
    Memory& smem;
    const int slab, first;
    const T_IO *r, *k;
    const T_W* w;

    __device__ RowCopies(Memory& smem, int slab, int first, const T_IO* r, const T_IO* k, const T_W* w)
        : smem(smem), slab(slab), first(first), r(r + slab * TILE_COLUMNS), k(k + slab * TILE_COLUMNS),
          w(w + slab * TILE_COLUMNS) {}
    // Of the chunk that begins at token `start`, if it exists, and has so many tokens.
    __device__ void copy_rows(Rows& to, i64 start, bool exists, int steps, Strides r_strides, Strides k_strides) const {
        if (exists) {
            const int present = min(steps - first, BLOCK), lane = fresh_lane(), row = lane / 8, unit = lane % 8;
            const T_IO* of_r = r + (start + (first + row)) * r_strides.token + unit * 8;
            const T_IO* of_k = k + (start + (first + row)) * k_strides.token + unit * 8;
#pragma unroll
            for (int i = 0; i < BLOCK; i += ROWS) {
                const auto place = [&](Slab<CHUNK_LEN>& slab) {
                    return shared_address(&slab.units[first + i + row][unit ^ (i + row) % 8]);
                };
                copy_async<16>(place(to.q[slab]), of_r + i * r_strides.token, i + row < present);
                copy_async<16>(place(to.k[slab]), of_k + i * k_strides.token, i + row < present);
            }
        }
        commit_copies();
    }
    __device__ void copy_gates(i64 start, bool exists, int steps, Strides w_strides) const {
        if (exists) {
            const int present = min(steps - first, BLOCK), lane = fresh_lane(), row = lane / UNITS;
            const int unit = lane % UNITS * PER_UNIT;
            const T_W* of_w = w + (start + (first + row)) * w_strides.token + unit;
#pragma unroll
            for (int i = 0; i < BLOCK; i += W_ROWS)
                copy_async<16>(shared_address(&smem.w[first + i + row][slab * TILE_COLUMNS + unit]),
                               of_w + i * w_strides.token, i + row < present);
        }
        commit_copies();
    }
};

// Values of 16 tokens from token `start` on, of which so many are present, come to a tile's rows from `first` on.
__device__ inline void copy_values(Slab<CHUNK_LEN>& to, int first, int lane, const T_IO* v, i64 start, int present,
                                   Strides strides) {
    const int row = lane / 8, unit = lane % 8;
    const T_IO* from = v + (start + row) * strides.token + unit * 8;
#pragma unroll
    for (int i = 0; i < 16; i += 4)
        copy_async<16>(shared_address(&to.units[first + i + row][unit ^ (i + row) % 8]), from + i * strides.token,
                       i + row < present);
}
// A warp's values [column, column + 16) of a chunk go to memory, in rows of 32 bytes: every other row for eight lanes,
// whose banks then differ.
__device__ inline void write_values(T_IO* to, const Slab<CHUNK_LEN>& from, int column, int steps, i64 stride) {
    const int lane = fresh_lane(), unit = column / 8 + lane % 2;
    const int row_of_lane = lane / 16 * 8 + lane / 8 % 2 + lane % 8 / 2 * 2;
    uint4 held[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * i + row_of_lane;
        held[i] = from.units[row][unit ^ row % 8];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * i + row_of_lane;
        if (row < steps) write_global(to + (row * stride + lane % 2 * 8), held[i]);
    }
}

// Sums of values and tokens times factors of tokens, as left operands.
__device__ inline void scale_tokens(Fragment (&to)[BLOCKS], const Accumulator (&sums)[CHUNK_LEN / 8],
                                    const float* factors, float sign) {
#pragma unroll
    for (int q = 0; q < BLOCKS; ++q) {
        Accumulator pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 f = reinterpret_cast<const float2&>(factors[16 * q + 8 * n + 2 * quad_lane()]);
#pragma unroll
            for (int j = 0; j < 4; ++j) pair[n][j] = sign * sums[2 * q + n][j] * (j % 2 ? f.y : f.x);
        }
        to[q] = to_fragment(pair[0], pair[1]);
    }
}
