// Kimi Delta Attention, 64 tokens of a head at once: what warps make of the rows of a chunk, 16 tokens and 64 channels
// each, a lane a pair of channels.
//
// Needs what channel_decay.cuh needs, and HEAD_SIZE, VALUE_SIZE, HAS_BIAS.
#pragma once
#include "bulk_copy.cuh"
#include "chunk.cuh"
#include "channel_decay.cuh"

static_assert(sizeof(T_IO) == 2, "the chunked kernels take float16 and bfloat16");
static_assert(HEAD_SIZE == 128 && VALUE_SIZE == 128, "heads have 128 channels and values");
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");

constexpr int SLABS = HEAD_SIZE / TILE_COLUMNS, GROUP_THREADS = 128;
// Keeps the compiler from rounding later than here, so that what is rounded leaves its registers.
template <int COUNT> __device__ inline void hold(Fragment (&fragments)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragments[i].at[j])::"memory");
}

constexpr float LEAST_LOGARITHM = -160.0f;  // less is a factor of 0 to a float

struct Factors {
    float of_k[CHUNK_LEN];     // 1 over the norm of k
    float of_q[CHUNK_LEN];     // scale over the norm of q
    float written[CHUNK_LEN];  // the rate over the norm of k
    float begin[HEAD_SIZE];    // of the state before the chunk, for products
    float end[HEAD_SIZE];      // of the same for what the chunk is added to; backward e^D
};
struct TokenMatrices { Slab<CHUNK_LEN> tm, m; };
// A state, [value, channel], as gradients of keys read it.
struct StateTiles { Slab<64> at[VALUE_SIZE / 64][SLABS]; };
// Values [row, row + 16) and channels [16 c, 16 c + 16).
__device__ inline void write_tiles(StateTiles& to, int row, int c, const Fragment& f) {
    Slab<64>& slab = to.at[row / 64][16 * c / TILE_COLUMNS];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        *word_of(slab, row % 64 + group() + i % 2 * 8, 8 * c % 32 + 4 * (i / 2) + quad_lane()) = f.at[i];
}

// The groups that make chunks, one after another: a warp of them, with 16 tokens and 64 channels of each chunk. Memory
// has what comes and what is made: q, k, w, erased, read, written, totals, diagonal, sums.diagonals, keys_free.
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
    __device__ static void synchronize() { synchronize_threads(1, 2 * GROUP_THREADS); }
    // Those of token first + t.
    __device__ float2 gates(int t) const {
        const Words<T_W, 2> g = *reinterpret_cast<const Words<T_W, 2>*>(&smem.w[first + t][channel]);
        return {g.at(0), g.at(1)};
    }
    __device__ float2 query(int t) const { return unpack(*word_of(smem.q[slab], first, t, lane)); }
    __device__ float2 key(int t) const { return unpack(*word_of(smem.k[slab], first, t, lane)); }

    // Rows and columns, as words of tiles: of token first + t times a factor for each channel.
    __device__ unsigned scaled_key(int t, float x, float y) const {
        const float2 k = key(t);
        return pack(k.x * x, k.y * y);
    }
    __device__ unsigned scaled_query(int t, float x, float y) const {
        const float2 q = query(t);
        return pack(q.x * x, q.y * y);
    }

    // The dots of rows, whose sums over all channels are known after the next barrier.
    __device__ void multiply_rows() const {
        DiagonalSums sums = {};
        sums.add(tile_of(smem.k[slab]), tile_of(smem.q[slab]), first);
        if (!has_diagonal()) return;
        auto& to = smem.sums.diagonals[slab];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = first + group() + 8 * i;
            to[0][token] = sums.keys[i], to[2][token] = sums.both[i];
            if constexpr (HAS_NORM) to[1][token] = sums.queries[i];
        }
    }
    __device__ void write_factors(Factors& factors, float beta, float scale) const {
        if (slab > 0 || lane >= BLOCK) return;
        const int token = first + lane;
        float sums[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if (!HAS_NORM && i == 1) continue;
            sums[i] = smem.sums.diagonals[0][i][token] + smem.sums.diagonals[1][i][token];
        }
        const float of_k = HAS_NORM ? norm_factor(sums[0]) : 1.0f;
        const float of_q = scale * (HAS_NORM ? norm_factor(sums[1]) : 1.0f);
        const float written = token < steps ? rate_of(beta) * of_k : 0.0f;
        factors.of_k[token] = of_k, factors.of_q[token] = of_q, factors.written[token] = written;
        smem.diagonal[token] = sums[2] * of_q;
    }
    // The sums of log-decays from a block's first token on, base 2. Of ANY size they keep their digits.
    template <bool ANY> __device__ void sum_decays(float (&sums)[BLOCK][2]) const {
        float sum[2] = {};
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float2 g = gates(t);
            const auto logarithm = [&](float x, float own_bias) {
                const float made = gate.logarithm(x, own_bias);
                return ANY && made < LEAST_LOGARITHM ? LEAST_LOGARITHM : made;
            };
            sums[t][0] = sum[0] += logarithm(g.x, bias[0]);
            sums[t][1] = sum[1] += logarithm(g.y, bias[1]);
        }
        if (first + BLOCK <= steps) return;
        float last[2] = {};  // what is past the last token does not decay
#pragma unroll
        for (int t = 0; t < BLOCK; ++t)
#pragma unroll
            for (int j = 0; j < 2; ++j) last[j] = sums[t][j] = first + t < steps ? sums[t][j] : last[j];
    }

    // Rows and columns for any decay: K e^c, Q e^c and K e^(D - c), and e^D. `wait` returns when their tiles and
    // factors are free.
    template <typename Wait>
    __device__ void make_rows(Factors& factors, Slab<CHUNK_LEN> (&erased)[SLABS], Slab<CHUNK_LEN> (&read)[SLABS],
                              Slab<CHUNK_LEN> (&written)[SLABS], float beta, float scale, Wait wait) {
        float sums[BLOCK][2];
        sum_decays<true>(sums);
        reinterpret_cast<float2&>(smem.totals[p][channel]) = {sums[BLOCK - 1][0], sums[BLOCK - 1][1]};
        synchronize();  // the sums over all blocks are there
        wait();
        write_factors(factors, beta, scale);
        float2 whole[4], before = {}, after = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            whole[i] = reinterpret_cast<const float2&>(smem.totals[i][channel]);
            if (i < p) before.x += whole[i].x, before.y += whole[i].y;
            if (i > p) after.x += whole[i].x, after.y += whole[i].y;
        }
        const float all[2] = {sums[BLOCK - 1][0], sums[BLOCK - 1][1]};
        if (p == 0)
            reinterpret_cast<float2&>(factors.end[channel]) = {exp2_fast(all[0] + after.x), exp2_fast(all[1] + after.y)};
        forget_addresses();
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float2 down = {exp2_fast(before.x + sums[t][0]), exp2_fast(before.y + sums[t][1])};
            const float2 up = {exp2_fast(after.x + (all[0] - sums[t][0])), exp2_fast(after.y + (all[1] - sums[t][1]))};
            *word_of(erased[slab], first, t, lane) = scaled_key(t, down.x, down.y);
            *word_of(read[slab], first, t, lane) = scaled_query(t, down.x, down.y);
            *word_of(written[slab], first, t, lane) = scaled_key(t, up.x, up.y);
        }
    }
};

// A warp's rows of a chunk come to shared memory: 16 bytes for a lane at once, of ROWS rows of r and k, W_ROWS of w.
template <typename Memory> struct RowCopies {
    static constexpr int PER_UNIT = 16 / sizeof(T_W), UNITS = TILE_COLUMNS / PER_UNIT;
    static constexpr int ROWS = 32 / 8, W_ROWS = 32 / UNITS;
    Memory& smem;
    const int slab, first, row, unit, w_row, w_channel;
    const T_IO *r, *k;
    const T_W* w;

    // From where a chunk's rows begin.
    __device__ RowCopies(Memory& smem, int slab, int first, const T_IO* of_r, const T_IO* of_k, const T_W* of_w,
                         Strides r_strides, Strides k_strides, Strides w_strides)
        : smem(smem), slab(slab), first(first), row(lane_id() / 8), unit(lane_id() % 8), w_row(lane_id() / UNITS),
          w_channel(slab * TILE_COLUMNS + lane_id() % UNITS * PER_UNIT),
          r(of_r + (first + row) * r_strides.token + slab * TILE_COLUMNS + 8 * unit),
          k(of_k + (first + row) * k_strides.token + slab * TILE_COLUMNS + 8 * unit),
          w(of_w + (first + w_row) * w_strides.token + w_channel) {}
    // Of a chunk with so many tokens; the next one is CHUNKS further.
    template <int CHUNKS>
    __device__ void copy(bool exists, int steps, Strides r_strides, Strides k_strides, Strides w_strides) {
        if (exists) {
            const int present = min(steps - first, BLOCK);
#pragma unroll
            for (int i = 0; i < BLOCK; i += ROWS) {
                const auto place = [&](Slab<CHUNK_LEN>& to) {
                    return shared_address(&to.units[first + i + row][unit ^ (i + row) % 8]);
                };
                copy_async<16>(place(smem.q[slab]), r + i * r_strides.token, i + row < present);
                copy_async<16>(place(smem.k[slab]), k + i * k_strides.token, i + row < present);
            }
#pragma unroll
            for (int i = 0; i < BLOCK; i += W_ROWS)
                copy_async<16>(shared_address(&smem.w[first + i + w_row][w_channel]), w + i * w_strides.token,
                               i + w_row < present);
        }
        commit_copies();
        r += CHUNKS * CHUNK_LEN * r_strides.token, k += CHUNKS * CHUNK_LEN * k_strides.token;
        w += CHUNKS * CHUNK_LEN * w_strides.token;
    }
};

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
