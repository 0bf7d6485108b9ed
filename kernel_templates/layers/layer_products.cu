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
// A unit is 16 TILES columns of y of a part, or DEEP_UNIT where the layout is [depth, width], for ROWS rows, for which
// each weight is read once. The warps of the CLUSTER blocks that make it share the depth, in steps, and their sums are
// added up in the order of warps: so a sum is the same in every batch, and from run to run. Weights are the left operand of
// mma.sync, as their 16 rows of outputs fill it; a row of x is a column of the right operand, which has eight of them
// whatever the batch is: there are ROW_TILES of these. Which element of the depth is which of the instruction is the
// same on both sides, and chosen so that a thread reads neighbours.
//
// AHEAD steps are under way to shared memory, where each thread reads only what it has fetched. Weights of the first ones
// are before the launch before has ended: who launches this must know that it does not write any of them.
// Grid (units of all parts, CLUSTER blocks each, rows / ROWS).
//
// Needs T_IO, VECTOR, NUM_THREADS, CLUSTER, TILES, ROW_TILES, AHEAD, BLOCKS_PER_SM, SHARED_BYTES.
#include "layer.cuh"
#include "mma.cuh"

constexpr int MOST_PARTS = 8, WARPS = NUM_THREADS / 32, SHARES = CLUSTER * WARPS, ROWS = 8 * ROW_TILES;
constexpr int DEEP_UNIT = 32, MOST_TILES = max_of(TILES, 2);
// Bytes of a step: of weights, of both operands, and of all steps that a warp has under way.
constexpr int WEIGHT_BYTES = 2048 * TILES, SLOT = WEIGHT_BYTES + 1024 * ROW_TILES, RING = AHEAD * SLOT;
constexpr bool IS_WHOLE = VECTOR == 8;  // rows of matrices consist of whole accesses, and so do those of x
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS <= 512, "num_threads must be a multiple of 32 up to 512");
static_assert(TILES == 1 || TILES == 2 || TILES == 4, "tiles must be 1, 2 or 4");
static_assert(ROW_TILES == 1 || ROW_TILES == 2 || ROW_TILES == 4, "row_tiles must be 1, 2 or 4");
static_assert(SHARED_BYTES == WARPS * RING, "shared_bytes must be those of all warps");

struct Places { i64 x[8], weight[8], bias[8], gate[8], add[8], y[8]; };
struct Sizes { int depth[8], width[8], what[8]; };
struct Firsts { int at[8]; };

// The matrix of a part, from the first column of y on that a block makes of it.
struct Matrix {
    const T_IO* start;
    int depth, width, column;
};

// COUNT neighbours of a row to the thread's place in shared memory, without waiting. Those from `count` on are zeros.
template <int COUNT> __device__ inline void fetch(Words<T_IO, COUNT>& target, const T_IO* place, int count) {
    const unsigned to = shared_address(&target);
    const int bytes = count > 0 ? 2 * COUNT : 0;
    if constexpr (!IS_WHOLE) {
        Words<T_IO, COUNT> held = {};
#pragma unroll 1
        for (int i = 0; i < COUNT && i < count; ++i) {
            const unsigned own = static_cast<unsigned>(load_early<T_IO>(place + i).bits) << (16 * (i % 2));
#pragma unroll
            for (int w = 0; w < COUNT / 2; ++w) held.word[w] |= w == i / 2 ? own : 0u;
        }
        target = held;
    } else if constexpr (COUNT == 8) {  // whole lines come to the L2 cache: a row of a step has two accesses
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(place), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to), "l"(place), "r"(bytes) : "memory");
    }
}
__device__ inline void end_step() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until the step that began first of those under way is there.
__device__ inline void wait_for_step() { asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory"); }

// What a thread reads of steps [width, depth]: row g and row g + 8 of each tile, eight neighbours of two halves of the
// step. Of rows behind the last one of the matrix it reads that one: nobody writes what it makes of them.
struct Wide {
    static constexpr int STEP = 64, COLUMNS = 16 * TILES;  // depth of a step, and columns of y of a unit
    using Weights = Words<T_IO, 8>[2][2 * TILES][32];
    using Rows = Words<T_IO, 8>[2][ROW_TILES][32];
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
    __device__ void fetch(Weights& weights, int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i)
                ::fetch(weights[half][i][lane_id()], start[i] + STEP * step + 32 * half,
                        depth - STEP * step - 32 * half);
    }
    __device__ void fetch(Rows& rows, int tile, const T_IO* row, bool is_there, int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ::fetch(rows[half][tile][lane_id()], row + STEP * step + 32 * half,
                    is_there ? depth - STEP * step - 32 * half : 0);
    }
    __device__ static void multiply(Accumulator (&sums)[ROW_TILES][MOST_TILES], const Weights& weights,
                                    const Rows& rows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Words<T_IO, 8> x[ROW_TILES];
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) x[t] = rows[half][t][lane_id()];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const Words<T_IO, 8> upper = weights[half][2 * tile][lane_id()];
                const Words<T_IO, 8> lower = weights[half][2 * tile + 1][lane_id()];
#pragma unroll
                for (int pair = 0; pair < 4; pair += 2) {
                    const Fragment left = {{upper.word[pair], lower.word[pair], upper.word[pair + 1],
                                            lower.word[pair + 1]}};
#pragma unroll
                    for (int t = 0; t < ROW_TILES; ++t)
                        multiply_add(sums[t][tile], left, x[t].word[pair], x[t].word[pair + 1]);
                }
            }
        }
    }
    // Which column of y, of those of the unit, is in a place of an accumulator.
    __device__ static int column_of(int tile, int group, bool is_lower) { return 16 * tile + 8 * is_lower + group; }
};

// The same of steps [depth, width]: four neighbours of four rows, of two halves of the step.
struct Deep {
    static constexpr int STEP = 32, COLUMNS = DEEP_UNIT;
    using Weights = Words<T_IO, 4>[2][4][32];
    using Rows = Words<T_IO, 4>[2][ROW_TILES][32];
    const T_IO* start;
    int depth, width, count;  // of neighbours

    __device__ void begin(const Matrix& matrix) {
        const int column = matrix.column + 4 * group();
        start = matrix.start + i64(4 * quad_lane()) * matrix.width + column;
        depth = matrix.depth - 4 * quad_lane(), width = matrix.width, count = width - column;
    }
    __device__ static const T_IO* of_thread(const T_IO* row) { return row + 4 * quad_lane(); }
    __device__ void fetch(Weights& weights, int step) const {
        const T_IO* place = start + i64(STEP * step) * width;
        int rows = depth - STEP * step;
#pragma unroll
        for (int half = 0; half < 2; ++half, rows -= 16, place += 12 * width)
#pragma unroll
            for (int i = 0; i < 4; ++i, place += width)
                ::fetch(weights[half][i][lane_id()], place, i < rows ? count : 0);
    }
    __device__ void fetch(Rows& rows, int tile, const T_IO* row, bool is_there, int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ::fetch(rows[half][tile][lane_id()], row + STEP * step + 16 * half,
                    is_there ? depth - STEP * step - 16 * half : 0);
    }
    __device__ static void multiply(Accumulator (&sums)[ROW_TILES][MOST_TILES], const Weights& weights,
                                    const Rows& rows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Words<T_IO, 4> of_depth[4], x[ROW_TILES];
#pragma unroll
            for (int i = 0; i < 4; ++i) of_depth[i] = weights[half][i][lane_id()];
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) x[t] = rows[half][t][lane_id()];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                Fragment left;  // pairs of two rows of the matrix: of its column 2 tile, and of the one behind it
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    left.at[i] = __byte_perm(of_depth[i / 2 * 2].word[tile], of_depth[i / 2 * 2 + 1].word[tile],
                                             i % 2 ? 0x7632 : 0x5410);
#pragma unroll
                for (int t = 0; t < ROW_TILES; ++t) multiply_add(sums[t][tile], left, x[t].word[0], x[t].word[1]);
            }
        }
    }
    __device__ static int column_of(int tile, int group, bool is_lower) { return 4 * group + 2 * tile + is_lower; }
};

__device__ inline float function_of(int kind, float x) {
    if (kind == 1) return tanhf(x);
    if (kind == 2) return sigmoid(x);
    if (kind == 3) return x < 0.0f ? 0.0f : x * x;
    return kind == 4 ? x * sigmoid(x) : x;
}

// Four neighbours from `start` on, of which `count` are there: zeros where there is no tensor.
struct Four { float at[4]; };
__device__ inline Four read_four(const T_IO* tensor, i64 start, int count, bool is_whole) {
    Four x = {};
    if (tensor == nullptr) return x;
    if (is_whole) {
        const auto words = load_early<Words<T_IO, 4>>(tensor + start);
#pragma unroll
        for (int i = 0; i < 4; ++i) x.at[i] = words.at(i);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) x.at[i] = to_float(load_early<T_IO>(tensor + start + i));
    }
    return x;
}

__device__ inline int rank_of_block() {
    int rank = 0;
    if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void synchronize_unit() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}
// Of another block of the cluster, what it has in the place of `mine`.
__device__ inline float4 of_block(const float4& mine, int rank) {
    if constexpr (CLUSTER == 1) return mine;
    float4 x;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(shared_address(&mine)), "r"(rank) : "memory");
    return x;
}

template <typename Layout> __device__ inline void multiply_part(const Places& places, const Sizes& sizes, int part,
                                                                int unit, i64 rows, unsigned char* shared) {
    const int warp = threadIdx.x / 32, rank = rank_of_block(), share = WARPS * rank + warp;
    const i64 first_row = ROWS * blockIdx.y, row_of_thread = first_row + group();
    const auto at = [](i64 address) { return reinterpret_cast<T_IO*>(address); };
    const Matrix matrix = {at(places.weight[part]), sizes.depth[part], sizes.width[part], unit * Layout::COLUMNS};
    const int steps = ceil_div(matrix.depth, Layout::STEP);
    static_assert(sizeof(typename Layout::Weights) <= WEIGHT_BYTES, "the weights of a step fit their place");
    unsigned char* const ring = shared + RING * warp;
    const auto weights = [&](int stage) -> auto& {
        return *reinterpret_cast<typename Layout::Weights*>(ring + SLOT * stage);
    };
    const auto rows_of_x = [&](int stage) -> auto& {
        return *reinterpret_cast<typename Layout::Rows*>(ring + SLOT * stage + WEIGHT_BYTES);
    };
    Layout layout;
    layout.begin(matrix);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (share + SHARES * i < steps) layout.fetch(weights(i), share + SHARES * i);
        end_step();
    }
    const T_IO* const first = Layout::of_thread(after_previous_launch(at(places.x[part])) + row_of_thread * matrix.depth);
    const auto fetch_rows = [&](int stage, int step) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
            layout.fetch(rows_of_x(stage), tile, first + 8 * tile * matrix.depth, row_of_thread + 8 * tile < rows, step);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (share + SHARES * i < steps) fetch_rows(i, share + SHARES * i);
        end_step();
    }

    Accumulator sums[ROW_TILES][MOST_TILES] = {};
    int stage = 0;
#pragma unroll 1
    for (int step = share; step < steps; step += SHARES) {
        wait_for_step();
        Layout::multiply(sums, weights(stage), rows_of_x(stage));
        const int next = step + SHARES * AHEAD;  // what is used makes room for what will be
        if (next < steps) layout.fetch(weights(stage), next), fetch_rows(stage, next);
        end_step();
        stage = stage + 1 < AHEAD ? stage + 1 : 0;
    }

    asm volatile("" : "+r"(part), "+r"(unit));  // what follows from these need not be kept from above
    const int width = sizes.width[part], first_column = unit * Layout::COLUMNS;
    const T_IO *const bias = at(places.bias[part]), *const gate = at(places.gate[part]);
    const T_IO* const add = at(places.add[part]);
    T_IO* const y = at(places.y[part]);
    const int shares = min_of(ceil_div(sizes.depth[part], Layout::STEP), SHARES), kind = sizes.what[part] % 8;
    // Of a warp: rows of sums, apart so that those of a quad of lanes meet different banks.
    using Sums = float4[ROWS][Layout::COLUMNS / 4 + 1];
    static_assert(sizeof(Sums) <= RING, "the sums of a warp fit its ring");
    const auto parts = [&](int of_warp) -> Sums& { return *reinterpret_cast<Sums*>(shared + RING * of_warp); };
    __syncwarp();  // the sums take the places of weights that nobody reads any more
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
        for (int tile = 0; tile < Layout::COLUMNS / 16; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                reinterpret_cast<float*>(parts(warp)[8 * t + 2 * quad_lane() + i % 2])[
                    Layout::column_of(tile, group(), i >= 2)] = sums[t][tile][i];
    synchronize_unit();  // all parts are there
    const bool has_fours = width % 4 == 0
        && (places.bias[part] | places.gate[part] | places.add[part] | places.y[part]) % 8 == 0;
    constexpr int FOURS = Layout::COLUMNS / 4;
    for (int item = rank * NUM_THREADS + threadIdx.x; item < ROWS * FOURS; item += CLUSTER * NUM_THREADS) {
        const int row = item / FOURS, four = item % FOURS, column = first_column + 4 * four;
        if (first_row + row >= rows || column >= width) continue;
        const int count = has_fours ? 4 : width - column;
        const i64 place = (first_row + row) * width + column;
        Four result = {};
#pragma unroll 8
        for (int other = 0; other < shares; ++other) {
            const float4 x = of_block(parts(other % WARPS)[row][four], other / WARPS);
            result.at[0] += x.x, result.at[1] += x.y, result.at[2] += x.z, result.at[3] += x.w;
        }
        const Four offset = read_four(bias, column, count, has_fours), opening = read_four(gate, place, count, has_fours);
        const Four added = read_four(add, place, count, has_fours);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = function_of(kind, result.at[i] + offset.at[i]);
            result.at[i] = fmaf(value, gate != nullptr ? sigmoid(opening.at[i]) : 1.0f, added.at[i]);
        }
        if (has_fours) {
            *reinterpret_cast<uint2*>(y + place) = {pack(result.at[0], result.at[1]), pack(result.at[2], result.at[3])};
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < count) y[place + i] = from_float<T_IO>(result.at[i]);
        }
    }
    if constexpr (CLUSTER > 1) synchronize_unit();  // nobody reads what is gone
}

#if __CUDA_ARCH__ >= 900
#define AS_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define AS_CLUSTERS
#endif

extern "C" __global__ void AS_CLUSTERS __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_products(
    const __grid_constant__ Places places, const __grid_constant__ Sizes sizes, const Firsts firsts, i64 rows) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    let_next_launch_begin();
    const int block = blockIdx.x / CLUSTER;
    int part = 0, unit = block;
#pragma unroll
    for (int p = 1; p < MOST_PARTS; ++p)
        if (block >= firsts.at[p]) part = p, unit = block - firsts.at[p];
    if (sizes.what[part] < 8) multiply_part<Wide>(places, sizes, part, unit, rows, shared_bytes);
    else multiply_part<Deep>(places, sizes, part, unit, rows, shared_bytes);
}
