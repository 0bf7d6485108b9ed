// What warp groups that make the gradients of keys multiply and add up: places in shared memory, rows of sums and of
// operands, sums over columns.
//
// Needs what chunk.cuh needs.
#pragma once
#include "chunk.cuh"
#include "wgmma.cuh"

constexpr int PIECE = TILE_COLUMNS, PIECES = VALUE_SIZE / PIECE;  // of the values of a head
constexpr int SLABS = HEAD_SIZE / TILE_COLUMNS;
using StatePiece = unsigned[PIECE / 8][CHANNELS / 8][32];
using KeySlabs = Slab<CHUNK_LEN>[SLABS];

// Places in shared memory as products take them: a constant from one base.
struct Descriptors {
    const unsigned char* shared;
    unsigned base;
    __device__ explicit Descriptors(const unsigned char* shared)
        : shared(shared), base(shared_address(shared) >> 4 & 0x3fffu) {}
    __device__ unsigned from(const void* place) const {
        return base + static_cast<unsigned>(static_cast<const unsigned char*>(place) - shared) / 16;
    }
    __device__ unsigned long long rows(const Slab<CHUNK_LEN>& slab, int row, int column) const {
        return 0x4000004000010000ull + (from(&slab) + (128 * row + 2 * column) / 16);
    }
    __device__ unsigned long long matrices(const StatePiece& state, int row, int slab) const {
        constexpr unsigned long long STEPS = 128ull / 16 << 32 | sizeof(state[0]) / 16 << 16;
        return STEPS + from(&state[row / 8][slab * TILE_COLUMNS / 8]);
    }
};

// Of [token, channel], of which a warp has 16 tokens and a lane two rows, eight apart.
using Sums = Accumulator[CHANNELS / 8];

// The lane's words of a row of an operand: columns 8 n + 2 quad_lane() on.
struct RowWords {
    unsigned start;
    __device__ RowWords(const KeySlabs& keys, int row)
        : start(shared_address(&keys[0].units[row][row % 8]) + 4 * quad_lane()) {}
    __device__ unsigned place(int n) const { return (start ^ n % 8 * 16) + n / 8 * sizeof(Slab<CHUNK_LEN>); }
    __device__ unsigned load(int n) const {
        unsigned word;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(place(n)));
        return word;
    }
    __device__ void store(int n, unsigned word) const {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place(n)), "r"(word) : "memory");
    }
};

// Sums += rows times a factor each, from `row` on; the dots are the lane's share of their products with rows of an
// operand, times a factor each.
template <typename Factor, typename DotFactor>
__device__ inline void add_rows(Sums& sums, const Sums& rows, float (&dots)[2], KeySlabs& keys, int row, Factor factor,
                                DotFactor dot_factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half;
        const float f = factor(own);
        const RowWords words(keys, own);
        float parts[2] = {};
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; ++n) {
            const unsigned word = words.load(n);
            const float *const x = &rows[n][2 * half];
            parts[0] += low_of(word) * x[0], parts[1] += high_of(word) * x[1];
            sums[n][2 * half] += f * x[0], sums[n][2 * half + 1] += f * x[1];
        }
        dots[half] = dot_factor(own) * (parts[0] + parts[1]);
    }
}

// Of sums by lane of columns 8 n + 2 quad_lane() + i: for all lanes of the same columns, those that the lane ends up
// with. Each exchange halves what it keeps.
__device__ inline float2 sum_columns(float (&x)[CHUNK_LEN / 8][2]) {
#pragma unroll
    for (int delta = 16, kept = CHUNK_LEN / 16; delta >= 4; delta /= 2, kept /= 2) {
        const bool is_upper = lane_id() & delta;
#pragma unroll
        for (int n = 0; n < kept; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float other = is_upper ? x[n][i] : x[n + kept][i];
                x[n][i] = (is_upper ? x[n + kept][i] : x[n][i]) + __shfl_xor_sync(0xffffffffu, other, delta);
            }
    }
    return {x[0][0], x[0][1]};
}

// A thread's share of the products of two states, element by element.
__device__ inline void add_products(float& sum, const StatePiece& state, const StatePiece& slope) {
#pragma unroll
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(StatePiece) / 16); i += NUM_THREADS) {
        const uint4 x = reinterpret_cast<const uint4*>(&state)[i], y = reinterpret_cast<const uint4*>(&slope)[i];
        const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum += low_of(xs[j]) * low_of(ys[j]);
            sum += high_of(xs[j]) * high_of(ys[j]);
        }
    }
}

// A pair of columns of a row.
__device__ inline unsigned word_in(const Slab<CHUNK_LEN>& slab, int row, int pair) {
    return reinterpret_cast<const unsigned*>(&slab.units[row][pair / 4 ^ row % 8])[pair % 4];
}
