// What the walks over the chunks with warp groups share: the ring of stages that one warp keeps full, the state in the
// registers of two groups of four warps, the rows of values.
//
// The state is kept transposed, channels down and values across, so that a block may have few value rows. A group has
// every other slab of 64 channels in fp32 for the whole sequence, a warp of it 16 channels of each and all values.
//
// Needs HEAD_SIZE, VALUE_SIZE, CHUNK_LEN, NUM_THREADS, VALUE_ROWS, STAGES, BACKWARD, STATE_LAYOUT, T_IO, DECAY; SLABS,
// CHANNELS, and channel_of(row): the channel of a slab that a row of its products is.
#pragma once
#include "bulk_copy.cuh"
#include "copy.cuh"
#include "decay.cuh"
#include "sequence.cuh"
#include "wgmma.cuh"

constexpr int GROUPS = 2, GROUP_THREADS = 128, CONSUMERS = GROUPS * GROUP_THREADS;
constexpr int OWN_SLABS = ceil_div(SLABS, GROUPS);  // a group has slabs group, group + 2 ..
// 65536 are 168 for each of 384 threads at first; the copies need few of theirs.
constexpr int COPY_REGISTERS = 24, PRODUCT_REGISTERS = 240;
constexpr int ROW_BLOCKS = ceil_div(VALUE_SIZE, VALUE_ROWS);
static_assert(NUM_THREADS == CONSUMERS + GROUP_THREADS, "num_threads must be 384");
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");
static_assert(VALUE_ROWS == 32 || VALUE_ROWS == 64, "value_rows must be 32 or 64");

// Where in the ring one is.
struct Turn {
    int slot = 0, parity = 0;
    __device__ void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

using StateSlab = Accumulator[VALUE_ROWS / 8];
struct Part {
    int group_of_warps, first_row;
    __device__ int slab(int i) const { return GROUPS * i + group_of_warps; }
    __device__ bool has(int i) const { return SLABS % GROUPS == 0 || slab(i) < SLABS; }
    // A lane has two of the channels: a row of the accumulators, and the one eight further down.
    __device__ int channel(int i, int half) const {
        return slab(i) * TILE_COLUMNS + channel_of(first_row + group() + 8 * half);
    }
};
// visit(element, whether it exists, its place in a tensor's state)
template <typename Visit>
__device__ inline void for_each_element(StateSlab (&state)[OWN_SLABS], const Part& part, int row, Visit visit) {
#pragma unroll
    for (int i = 0; i < OWN_SLABS; ++i)
#pragma unroll
        for (int j = 0; j < VALUE_ROWS / 8; ++j) {
            asm volatile("" ::: "memory");  // a few addresses at a time
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int value = row + 8 * j + 2 * quad_lane() + e % 2, channel = part.channel(i, e / 2);
                const bool present = part.has(i) && value < VALUE_SIZE && channel < HEAD_SIZE;
                visit(state[i][j][e], present, state_index<STATE_LAYOUT>(value, channel));
            }
        }
}
template <typename Visit> __device__ inline void for_each_accumulator(StateSlab (&state)[OWN_SLABS], Visit visit) {
#pragma unroll
    for (int i = 0; i < OWN_SLABS; ++i)
#pragma unroll
        for (int j = 0; j < VALUE_ROWS / 8; ++j) visit(state[i][j], i * (VALUE_ROWS / 8) + j);
}
// An accumulator from memory, or as it is: spelt out, as a branch around it takes registers for what comes of either
// way.
__device__ inline void load_if(bool wanted, Accumulator& x, const float4* source) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %5, 0;\n@wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
        : "l"(source), "r"(int(wanted))
        : "memory");
}
// The rounded image of a group's slabs, transposed.
template <typename Image>
__device__ inline void write_image(Image& image, const StateSlab (&state)[OWN_SLABS], const Part& part) {
#pragma unroll
    for (int i = 0; i < OWN_SLABS; ++i)
        if (part.has(i))
#pragma unroll
            for (int j = 0; j < VALUE_ROWS / 8; j += 2)
                store_block_transposed(tile_of(image[part.slab(i)]), 8 * j, part.first_row,
                                       to_fragment(state[i][j], state[i][j + 1]));
}

// The frames of the chunks, as exponents to the base 2 of the lane's channels; the state changes from one to the next.
struct Exponents {
    using OfChannels = float[OWN_SLABS][2];
    OfChannels begins = {}, ends = {}, pending_exponent = {};  // of the chunk that comes; what the last one left behind
    // Whether the slabs of the chunk that comes, and of the last one, were taken by halves: a number as it was loaded,
    // as a test of it here would wait for it.
    int by_halves[OWN_SLABS] = {}, were_by_halves[OWN_SLABS] = {};

    __device__ void load(OfChannels& to, const float* frame, const Part& part, bool is_end) {
        if constexpr (!HAS_DECAY) return;
        frame += is_end != BACKWARD ? CHANNELS : 0;
#pragma unroll
        for (int i = 0; i < OWN_SLABS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (part.has(i)) to[i][half] = frame[part.channel(i, half)];
    }
    // A chunk ahead, so that nobody waits for it.
    __device__ void load_halved(int (&to)[OWN_SLABS], const int* halved, const Part& part) {
        if constexpr (LARGEST_DECAY > 0)
#pragma unroll
            for (int i = 0; i < OWN_SLABS; ++i)
                if (part.has(i)) to[i] = halved[part.slab(i)];
    }
    // What a chunk has left behind that another launch has scanned.
    __device__ void load_pending(const float* frame, const int* halved, const Part& part) {
        load(pending_exponent, frame, part, true), load_halved(were_by_halves, halved, part);
    }
    // Slabs taken by halves have no frame: what is in the state passes the chunk's decay, which stands in its place.
    __device__ void pass(StateSlab (&state)[OWN_SLABS]) const {
#pragma unroll
        for (int i = 0; i < OWN_SLABS; ++i)
            if (by_halves[i])
#pragma unroll
                for (Accumulator& x : state[i])
#pragma unroll
                    for (int j = 0; j < 4; ++j) x[j] *= begins[i][j / 2];
    }
    __device__ void scale(StateSlab (&state)[OWN_SLABS], bool is_last) {
        if constexpr (!HAS_DECAY) return;
#pragma unroll
        for (int i = 0; i < OWN_SLABS; ++i) {
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float exponent = (were_by_halves[i] ? 0.0f : pending_exponent[i][half]) +
                                       (is_last || by_halves[i] ? 0.0f : begins[i][half]);
                factor[half] = exp2_fast(exponent / FACTOR_STEPS);
                pending_exponent[i][half] = ends[i][half];
            }
            were_by_halves[i] = by_halves[i];
#pragma unroll
            for (Accumulator& x : state[i])
#pragma unroll
                for (int j = 0; j < 4 * FACTOR_STEPS; ++j) x[j % 4] *= factor[j % 4 / 2];
        }
    }
};

// Rows of values: a thread copies the same place of every chunk.
struct ValueRows {
    static constexpr int VECTOR = vector_of(VALUE_SIZE, sizeof(T_IO)), PER_ROW = VALUE_ROWS / VECTOR;
    static constexpr int ROW_STEP = CONSUMERS / PER_ROW;
    static_assert(CHUNK_LEN % ROW_STEP == 0, "every thread has equally many rows");
    const T_IO* source;  // the thread's place of a sequence's first chunk
    i64 stride;
    int value, first_token;
    bool exists;

    __device__ ValueRows(const T_IO* first, i64 stride, int block_row)
        : stride(stride), value(threadIdx.x % PER_ROW * VECTOR), first_token(threadIdx.x / PER_ROW),
          exists(block_row + value < VALUE_SIZE) {
        source = first + first_token * stride + block_row + value;
    }
    __device__ T_IO* place(Slab<CHUNK_LEN>& tile, int row) const {
        return reinterpret_cast<T_IO*>(&tile.units[row][value / 8 ^ row % 8]) + value % 8;
    }
    // The chunk from `token` on, of `length` tokens in all.
    __device__ void copy(Slab<CHUNK_LEN>& tile, i64 token, i64 length) const {
        const T_IO* from = source + token * stride;
#pragma unroll
        for (int row = first_token, i = 0; i < CHUNK_LEN / ROW_STEP; ++i, row += ROW_STEP) {
            const bool present = exists && token + row < length;
            T_IO* const to = place(tile, row);
            if constexpr (VECTOR == 1) *to = present ? *from : T_IO{};
            else copy_async<2 * VECTOR>(shared_address(to), from, present);
            from += ROW_STEP * stride;
        }
    }
};

// Sums of 16 tokens to rows of a tensor, by way of `staged`.
template <int COLUMNS, int PITCH>
__device__ inline void write_outputs(T_IO* target, i64 stride, T_IO (&staged)[16][PITCH],
                                     const Accumulator (&sum)[COLUMNS / 8], int rows, int width) {
    const Tile<PITCH> tile = {shared_address(staged[0])};
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) store_block(tile, 0, 8 * j, to_fragment(sum[j], sum[j + 1]));
    __syncwarp();
    write_rows<T_IO, VALUE_SIZE, 16, COLUMNS, PITCH, 32>(target, stride, staged[0], rows, width, lane_id());
    __syncwarp();
}
