// Products of a few rows with matrices, several of them in one launch, for steps of decode. Part p:
//
//     y[n] = f((sum over d of x[n, d] W[d]) + bias) sigmoid(gate[n]) + add[n]
//
//   x          [rows, depth]   T_IO  in
//   W          [width, depth]  T_IO  in, as nn.Linear has it; or [depth, width] where the layout says so
//   bias       [width]         T_IO  in or null
//   gate, add  [rows, width]   T_IO  in or null
//   y          [rows, width]   T_IO  out
//
// `places` has the addresses of up to eight parts; `sizes` their depths and widths, and what is done with them (the
// function of a sum in bits 0 to 2: 0 is the sum itself, 1 tanh, 2 the sigmoid, 3 the square of relu, 4 silu; the
// layout in bit 3); `firsts` which block is the first of each: of parts that are not there, one that no grid has.
//
// Each weight is read once for ROWS rows. A block makes UNIT columns of y (DEEP_UNIT where the layout is [depth,
// width]) of a part: its warps share the depth, in steps of STEP, and their sums are added up in the order of warps. So
// a sum is the same in every batch, and from run to run. Weights are the left operand of mma.sync, as their 16 rows of
// outputs fill it; a row of x is a column of the right operand, which has eight of them whatever the batch is: a block
// has ROW_TILES of these. Which element of the depth is which of the instruction is the same on both sides, and chosen
// so that a thread reads neighbours.
//
// The first weights are under way before the launch before has ended: who launches this must know that it does not
// write any of them. Grid (units of all parts, rows / ROWS).
#include "layer.cuh"
#include "mma.cuh"

constexpr int MOST_PARTS = 8, WARPS = NUM_THREADS / 32, ROWS = 8 * ROW_TILES, STEP = 64;
constexpr int UNIT = 16 * TILES, DEEP_UNIT = 32;
constexpr bool IS_WHOLE = VECTOR == 8;  // rows of matrices consist of whole accesses, and so do those of x
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS <= 512, "num_threads must be a multiple of 32 up to 512");
static_assert(TILES == 1 || TILES == 2, "tiles must be 1 or 2");
static_assert(ROW_TILES == 1 || ROW_TILES == 2 || ROW_TILES == 4, "row_tiles must be 1, 2 or 4");

struct Places { i64 x[8], weight[8], bias[8], gate[8], add[8], y[8]; };
struct Sizes { int depth[8], width[8], what[8]; };
struct Firsts { int at[8]; };

// The matrix of a part, from the first column of y on that a block makes of it.
struct Matrix {
    const T_IO* start;
    int depth, width, column;
};

// COUNT neighbours of a row, of which `count` are there: zeros for the others. Weights, which are read once, stay out
// of the L1 cache. The instruction has the condition itself: a branch around it would keep others from being under way.
template <int COUNT, bool IS_READ_ONCE> __device__ inline void load(Words<T_IO, COUNT>& held, const T_IO* place,
                                                                    int count) {
    held = {};
    if constexpr (!IS_WHOLE) {
#pragma unroll 1
        for (int i = 0; i < COUNT && i < count; ++i) {
            const unsigned own = static_cast<unsigned>(load_early<T_IO>(place + i).bits) << (16 * (i % 2));
#pragma unroll
            for (int w = 0; w < COUNT / 2; ++w) held.word[w] |= w == i / 2 ? own : 0u;
        }
    } else {
        unsigned(&word)[COUNT / 2] = held.word;
#define LOAD(KIND, PLACES, COUNT_PLACE, PLACE, ...)                                                              \
    asm volatile("{\n.reg .pred is_there;\nsetp.gt.s32 is_there, " COUNT_PLACE ", 0;\n@is_there ld.global" KIND  \
                 " {" PLACES "}, [" PLACE "];\n}" : __VA_ARGS__ : "l"(place), "r"(count) : "memory")
#define TWO "+r"(word[0]), "+r"(word[1])
#define FOUR TWO, "+r"(word[2]), "+r"(word[3])
        if constexpr (COUNT == 8 && IS_READ_ONCE)
            LOAD(".L1::no_allocate.v4.b32", "%0, %1, %2, %3", "%5", "%4", FOUR);
        else if constexpr (COUNT == 8)
            LOAD(".v4.b32", "%0, %1, %2, %3", "%5", "%4", FOUR);
        else if constexpr (IS_READ_ONCE)
            LOAD(".L1::no_allocate.v2.b32", "%0, %1", "%3", "%2", TWO);
        else
            LOAD(".v2.b32", "%0, %1", "%3", "%2", TWO);
#undef FOUR
#undef TWO
#undef LOAD
    }
}

// What a thread reads of steps [width, depth]: row g and row g + 8 of each tile, eight neighbours of two halves of the
// step. Of rows behind the last one, of the matrix or of x, it reads that one: nobody writes what it makes of
// them.
struct Wide {
    // Steps that are under way, and columns of y of a block.
    static constexpr int AHEAD = ROW_TILES == 4 ? 1 : 2 / TILES, COLUMNS = UNIT;
    struct Weights { Words<T_IO, 8> at[TILES][2][2]; };
    struct Row { Words<T_IO, 8> at[2]; };
    const T_IO* start[2 * TILES];
    int depth;  // from the thread's place on

    __device__ void begin(const Matrix& matrix) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i)
            start[i] = matrix.start + i64(min_of(matrix.column + 8 * i + group(), matrix.width - 1)) * matrix.depth
                     + 8 * quad_lane();
        depth = matrix.depth - 8 * quad_lane();
    }
    __device__ static const T_IO* of_thread(const T_IO* row) { return row + 8 * quad_lane(); }
    __device__ void load(Weights& weights, int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i)
                ::load<8, true>(weights.at[i / 2][half][i % 2], start[i] + STEP * step + 32 * half,
                                depth - STEP * step - 32 * half);
    }
    __device__ void load(Row& x, const T_IO* row, int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ::load<8, false>(x.at[half], row + STEP * step + 32 * half, depth - STEP * step - 32 * half);
    }
    __device__ static void multiply(Accumulator (&sums)[2], const Weights& weights, const Row& x) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const Words<T_IO, 8>&upper = weights.at[tile][half][0], &lower = weights.at[tile][half][1];
                    const Fragment left = {{upper.word[pair], lower.word[pair], upper.word[pair + 1],
                                            lower.word[pair + 1]}};
                    multiply_add(sums[tile], left, x.at[half].word[pair], x.at[half].word[pair + 1]);
                }
    }
    // Which column of y, of those of the block, is in a place of an accumulator.
    __device__ static int column_of(int tile, int group, bool is_lower) { return 16 * tile + 8 * is_lower + group; }
};

// The same of steps [depth, width]: four neighbours of four rows, of four quarters of the step.
struct Deep {
    static constexpr int AHEAD = 1, COLUMNS = DEEP_UNIT;
    struct Weights { Words<T_IO, 4> at[4][4]; };
    struct Row { Words<T_IO, 4> at[4]; };
    const T_IO* start;
    int depth, width, count;  // of neighbours

    __device__ void begin(const Matrix& matrix) {
        const int column = matrix.column + 4 * group();
        start = matrix.start + i64(4 * quad_lane()) * matrix.width + column;
        depth = matrix.depth - 4 * quad_lane(), width = matrix.width, count = width - column;
    }
    __device__ static const T_IO* of_thread(const T_IO* row) { return row + 4 * quad_lane(); }
    __device__ void load(Weights& weights, int step) const {
        const T_IO* place = start + i64(STEP * step) * width;
        int rows = depth - STEP * step;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter, rows -= 16, place += 12 * width)
#pragma unroll
            for (int i = 0; i < 4; ++i, place += width)
                ::load<4, true>(weights.at[quarter][i], place, i < rows ? count : 0);
    }
    __device__ void load(Row& x, const T_IO* row, int step) const {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter)
            ::load<4, false>(x.at[quarter], row + STEP * step + 16 * quarter, depth - STEP * step - 16 * quarter);
    }
    __device__ static void multiply(Accumulator (&sums)[2], const Weights& weights, const Row& x) {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                Fragment left;  // pairs of two rows of the matrix: of its column 2 tile, and of the one behind it
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    left.at[i] = __byte_perm(weights.at[quarter][i / 2 * 2].word[tile],
                                             weights.at[quarter][i / 2 * 2 + 1].word[tile], i % 2 ? 0x7632 : 0x5410);
                multiply_add(sums[tile], left, x.at[quarter].word[0], x.at[quarter].word[1]);
            }
    }
    __device__ static int column_of(int tile, int group, bool is_lower) { return 4 * group + 2 * tile + is_lower; }
};

using Sums = float[WARPS][2][4][32];  // of warps: tiles, places of an accumulator, lanes

__device__ inline float function_of(int kind, float x) {
    if (kind == 1) return tanhf(x);
    if (kind == 2) return sigmoid(x);
    if (kind == 3) return x < 0.0f ? 0.0f : x * x;
    return kind == 4 ? x * sigmoid(x) : x;
}

template <typename Layout> __device__ inline void multiply_part(const Places& places, const Sizes& sizes, int part,
                                                                int unit, i64 rows, Sums& parts) {
    constexpr int AHEAD = Layout::AHEAD, TILES_OF_LAYOUT = Layout::COLUMNS / 16;
    const int warp = threadIdx.x / 32;
    const i64 first_row = ROWS * blockIdx.y;
    const auto at = [](i64 address) { return reinterpret_cast<T_IO*>(address); };
    const Matrix matrix = {at(places.weight[part]), sizes.depth[part], sizes.width[part], unit * Layout::COLUMNS};
    const int steps = ceil_div(matrix.depth, STEP);
    Layout layout;
    typename Layout::Weights weights[AHEAD];
    typename Layout::Row x[AHEAD][ROW_TILES];
    layout.begin(matrix);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) layout.load(weights[i], warp + WARPS * i);
    const T_IO *const first = after_previous_launch(at(places.x[part])), *row_of_x[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
        row_of_x[tile] = Layout::of_thread(first + min_of(first_row + 8 * tile + group(), rows - 1) * matrix.depth);
    const auto load_rows = [&](int i, int step) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) layout.load(x[i][tile], row_of_x[tile], step);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_rows(i, warp + WARPS * i);

    Accumulator sums[ROW_TILES][2] = {};
#pragma unroll 1
    for (int step = warp; step < steps; step += WARPS * AHEAD)
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {  // what is used makes room for what will be
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) Layout::multiply(sums[tile], weights[i], x[i][tile]);
            const int next = step + WARPS * (i + AHEAD);
            layout.load(weights[i], next), load_rows(i, next);
        }

    asm volatile("" : "+r"(part), "+r"(unit));  // what follows from these need not be kept from above
    const int width = sizes.width[part], first_column = unit * Layout::COLUMNS;
    const T_IO *const bias = at(places.bias[part]), *const gate = at(places.gate[part]);
    const T_IO* const add = at(places.add[part]);
    T_IO* const y = at(places.y[part]);
    const int others = min_of(ceil_div(sizes.depth[part], STEP), WARPS), kind = sizes.what[part] % 8;
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
        if (row_tile > 0) __syncthreads();  // nobody reads the parts of the tile before any more
#pragma unroll
        for (int tile = 0; tile < TILES_OF_LAYOUT; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) parts[warp][tile][i][lane_id()] = sums[row_tile][tile][i];
        __syncthreads();  // all parts are there
        for (int place = threadIdx.x; place < 128 * TILES_OF_LAYOUT; place += NUM_THREADS) {
            const int tile = place / 128, i = place / 32 % 4, lane = place % 32;
            const int column = first_column + Layout::column_of(tile, lane / 4, i >= 2);
            const i64 row_of_y = first_row + 8 * row_tile + 2 * (lane % 4) + i % 2, at = row_of_y * width + column;
            if (row_of_y >= rows || column >= width) continue;
            const float offset = bias != nullptr ? to_float(load_early<T_IO>(bias + column)) : 0.0f;
            const float opening = gate != nullptr ? sigmoid(to_float(load_early<T_IO>(gate + at))) : 1.0f;
            const float added = add != nullptr ? to_float(load_early<T_IO>(add + at)) : 0.0f;
            float sum = 0.0f;
#pragma unroll 8
            for (int other = 0; other < others; ++other) sum += parts[other][tile][i][lane];
            y[at] = from_float<T_IO>(fmaf(function_of(kind, sum + offset), opening, added));
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, (ROW_TILES == 1 ? 768 : 512) / NUM_THREADS) layer_products(
    const __grid_constant__ Places places, const __grid_constant__ Sizes sizes, const Firsts firsts, i64 rows) {
    __shared__ Sums parts;
    let_next_launch_begin();
    const int block = blockIdx.x;
    int part = 0, unit = block;
#pragma unroll
    for (int p = 1; p < MOST_PARTS; ++p)
        if (block >= firsts.at[p]) part = p, unit = block - firsts.at[p];
    if (sizes.what[part] < 8) multiply_part<Wide>(places, sizes, part, unit, rows, parts);
    else multiply_part<Deep>(places, sizes, part, unit, rows, parts);
}
