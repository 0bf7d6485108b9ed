// timex: a causal convolution of every channel with a filter as long as the sequence, on tensor cores.
//
//     out[b, c, t] = eps + sum_{s <= t} w[c, T-1-(t-s)] k[b, c, s]             f[x] = w[c, T-1-x] is the filter by lag
//
// With REVERSED time runs the other way, which is the gradient of k:
//     out[b, c, s] = sum_{t >= s} w[c, T-1-(t-s)] k[b, c, t]
//
//   w    [channels, T]         T_W   in    rows w_stride apart
//   k    [batch, channels, T]  T_IO  in    k_batch and k_channel apart
//   out  the same shape        T_IO  out   contiguous
//
// A tile is 16 tokens. Tile I of the outputs is the sum over J <= I of a Toeplitz matrix F[i, j] = f[16 (I - J) + i -
// j] times tile J of the inputs, with the batch as the columns. A fragment of F is three words: its two diagonal blocks
// are one, and the block above of one lag is the block below of the lag before. So a warp with ROWS neighbouring tiles
// I keeps their fragments, moves them on with every step of J, and reads two words for each part, whatever the batch.
//
// fp32: both operands are two fp16 each (timex_product.cuh), and the three products of a tile are added to the sums by
// fmaf, which also undoes the scale of 32 inputs of a row. An input that is not finite spoils its row alone, and there
// up to 63 outputs on the wrong side of it too; an infinite weight spoils its channel.
//
// Grid (channels, groups of BATCH rows, row blocks). A block has all of the outputs, or with STREAMED those of one tile
// for each of WARPS * ROWS, and walks over its inputs in chunks as long; the last row blocks, with the most work, come
// first. Shared memory: the filter as words (f[x], f[x - 1]) for every x, interleaved by part; inputs; their scales.
#include "timex_product.cuh"

constexpr bool SCALED = sizeof(T_W) == 4;
using T_PRODUCT = typename ProductOf<T_IO, SCALED>::type;
constexpr int W_PARTS = PARTS_OF<T_W>, K_PARTS = PARTS_OF<T_IO>;
// a warp's 8 columns
constexpr int WARPS = NUM_THREADS / 32, COLUMNS = min_of(BATCH / 8, 2), SLICES = BATCH / (8 * COLUMNS);
constexpr int CHUNK = STREAMED ? WARPS * ROWS : 0;  // tiles
// words of the filter before the lag of a row block's first output
constexpr int BEFORE = 16 * (STREAMED ? CHUNK : ROWS);

static_assert(BATCH == 8 || BATCH == 16 || BATCH == 32, "batch must be 8, 16 or 32");
static_assert(ROWS >= 2 && ROWS <= 8 && ROWS % 2 == 0, "rows must be 2, 4, 6 or 8");
static_assert(NUM_THREADS % 128 == 0 && NUM_THREADS <= 512, "num_threads must be a multiple of 128 up to 512");
static_assert(VECTOR == 1 || VECTOR == 4, "vector must be 1 or 4");
static_assert(!STREAMED || SLICES == 1, "streamed inputs need a batch of 8 or 16");
static_assert(sizeof(T_IO) <= sizeof(T_W), "w must be fp32 beside k in fp32");

struct Filter { unsigned word[W_PARTS]; };

// A warp's walk over the tiles of inputs. Addresses are this lane's, of the step that is next; WAY leads to the one
// after.
constexpr int WAY = REVERSED ? -1 : 1, HALF_BYTES = 8 * sizeof(Filter);
constexpr int LATER = REVERSED ? 2 : 1, EARLIER = REVERSED ? 1 : 2;  // words of a fragment, by the lag of their block
struct TileWalk {
    unsigned filter, inputs, scales, next_columns;
    int place;  // of the tile of inputs, in what shared memory has
    unsigned window[W_PARTS][ROWS][4];  // fragments: that of row r is of the lag (tile of row r) - (tile of inputs)
    Accumulator sums[ROWS][COLUMNS];

    // The lane's pairs of a block of the filter, so many blocks further than the diagonal of row 0's fragment.
    __device__ Filter read(int blocks) const {
        Filter pair;
        const unsigned address = filter + blocks * HALF_BYTES;
        if constexpr (W_PARTS == 2)
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pair.word[0]), "=r"(pair.word[1]) : "r"(address));
        else
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair.word[0]) : "r"(address));
        return pair;
    }
    __device__ void set(int row, const Filter& later, const Filter& middle, const Filter& earlier) {
#pragma unroll
        for (int part = 0; part < W_PARTS; ++part) {
            unsigned (&word)[4] = window[part][row];
            word[0] = word[3] = middle.word[part], word[LATER] = later.word[part], word[EARLIER] = earlier.word[part];
        }
    }
    // As it is one tile before the first.
    __device__ void begin() {
#pragma unroll
        for (int row = 0; row < ROWS - 1; ++row) set(row, read(2 * row + 3), read(2 * row + 2), read(2 * row + 1));
    }
    // Adds the products of so many tiles of inputs to the rows from FIRST on. Not unrolled: the fragments are moved, as
    // many of them by name are more registers than there are.
    template <int FIRST> __device__ void multiply_tiles(int count) {
#pragma unroll 1
        for (int step = 0; step < count; ++step) {
            Filter later;
#pragma unroll
            for (int part = 0; part < W_PARTS; ++part) {
                later.word[part] = window[part][0][EARLIER];
#pragma unroll
                for (int row = ROWS - 1; row >= 1; --row)
#pragma unroll
                    for (int i = 0; i < 4; ++i) window[part][row][i] = window[part][row - 1][i];
            }
            set(0, later, read(0), read(-1));
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) multiply_tile<FIRST>(n);
            filter -= 2 * HALF_BYTES, place += WAY;
        }
    }
    template <int FIRST> __device__ void multiply_tile(int n) {
        const unsigned address = inputs + 32 * place + n * next_columns;
        unsigned right[K_PARTS][2], scale = 0;
        if constexpr (K_PARTS == 2) {
            const Fragment f = load_matrices(address);
            right[0][0] = f.at[0], right[0][1] = f.at[1], right[1][0] = f.at[2], right[1][1] = f.at[3];
        } else {
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                         : "=r"(right[0][0]), "=r"(right[0][1]) : "r"(address));
        }
        if constexpr (SCALED)
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scale) : "r"(scales + 2 * (place / 2 * BATCH + 8 * n)));
#pragma unroll
        for (int row = FIRST; row < ROWS; ++row) {
            const auto product = [&](Accumulator& result, int w_part, int k_part, const Accumulator& sum) {
                multiply<T_PRODUCT, 16>(result, window[w_part][row], right[k_part], sum);
            };
            if constexpr (SCALED) {
                Accumulator fresh = {};
                multiply_parts<W_PARTS, K_PARTS>(fresh, product);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[row][n][i] = fmaf(fresh[i], i % 2 ? high_of<bf16>(scale) : low_of<bf16>(scale), sums[row][n][i]);
            } else {
                multiply_parts<1, 1>(sums[row][n], product);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_convolve(
    const T_W* __restrict__ w, const T_IO* __restrict__ k, T_IO* __restrict__ out, i64 w_stride, i64 k_batch,
    i64 k_channel, i64 batch, i64 channels, int length, int tiles, float eps) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float largest[WARPS];
    const int columns = 16 * (STREAMED ? CHUNK : tiles);  // of inputs that shared memory has
    const int words = BEFORE + columns;                   // of the filter
    Filter* const filter = reinterpret_cast<Filter*>(shared);
    const unsigned inputs_at = shared_address(shared) + static_cast<int>(sizeof(Filter)) * words;
    const Rows<K_PARTS, BATCH> inputs{inputs_at, pitch_of(columns)};
    const unsigned scales_at = inputs_at + K_PARTS * inputs.part_bytes();
    const i64 channel = blockIdx.x, first_row = i64(blockIdx.y) * BATCH;
    const int present = static_cast<int>(min(batch - first_row, i64(BATCH)));
    const int warp = threadIdx.x / 32;
    w += channel * w_stride, k += first_row * k_batch + channel * k_channel;

    float down = 1.0f, up = 1.0f;
    if constexpr (SCALED) {
        float most = 0.0f;
        for (int i = threadIdx.x; i < length; i += NUM_THREADS) most = fmaxf(most, fabsf(to_float(w[i])));
        most = largest_of_lanes(most, 32);
        if (lane_id() == 0) largest[warp] = most;
        __syncthreads();
        for (int i = 0; i < WARPS; ++i) most = fmaxf(most, largest[i]);
        const Scale scale(most);
        up = scale.up, down = scale.down;
    }
    const auto stage_filter = [&](int first_lag) {
        const auto value = [&](int lag) {
            return lag >= 0 && lag < length ? to_float(w[length - 1 - lag]) * up : 0.0f;
        };
        for (int i = threadIdx.x; i < words; i += NUM_THREADS) {
            const float low = value(first_lag + i), high = value(first_lag + i + (REVERSED ? 1 : -1));
            const unsigned pair = pack<T_PRODUCT>(low, high);
            filter[i].word[0] = pair;
            if constexpr (W_PARTS == 2) filter[i].word[1] = pack_rest(pair, low, high);
        }
    };
    const auto stage_inputs = [&](int first) {
        const auto tell = [&](int segment, int row, float scale) {
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(scales_at + 2 * (segment * BATCH + row)),
                         "h"(static_cast<short>(__float_as_uint(scale) >> 16))
                         : "memory");
        };
        stage<T_IO, T_PRODUCT, SCALED, true, VECTOR, NUM_THREADS>(inputs, k, k_batch, present, first, columns, length,
                                                                  tell);
    };
    if constexpr (!STREAMED) {
        stage_filter(-BEFORE);
        stage_inputs(0);
        __syncthreads();
    }

    const int first_column = STREAMED ? 0 : warp % SLICES * 8 * COLUMNS;
    const unsigned filter_at = shared_address(filter) + static_cast<int>(sizeof(Filter)) *
                               (BEFORE + (REVERSED ? 2 * quad_lane() - group() : group() - 2 * quad_lane()));
    TileWalk walk;
    walk.inputs = inputs.address(lane_id() / 16 % K_PARTS, first_column + lane_id() % 8, lane_id() / 8 % 2 * 8);
    walk.scales = scales_at + 2 * (first_column + 2 * quad_lane());
    walk.next_columns = 16 * inputs.pitch;

    // Groups of ROWS tiles. Tiles, chunks and groups count in the order of REVERSED time.
    const int groups = tiles / ROWS, first_of_block = STREAMED ? (gridDim.z - 1 - blockIdx.z) * CHUNK : 0;
    const int passes = STREAMED ? 1 : ceil_div(groups * SLICES, WARPS);
    for (int pass = 0; pass < passes; ++pass) {
        // A chunk's warps there and back, so that each quarter of a multiprocessor has as much of the triangle.
        const int group_of_chunk = warp < WARPS / 2 ? WARPS - 1 - warp : warp - WARPS / 2;
        const int index = STREAMED ? group_of_chunk : groups - 1 - item_of(pass, warp, WARPS) / SLICES;
        if (!STREAMED && index < 0) break;
        const int begin = first_of_block + index * ROWS;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) walk.sums[row][n][i] = 0.0f;

        const int chunk_tiles = STREAMED ? CHUNK : tiles;
        for (int chunk_begin = 0; chunk_begin <= first_of_block; chunk_begin += chunk_tiles) {
            if constexpr (STREAMED) {
                __syncthreads();  // all have read the chunk before
                stage_filter(16 * (first_of_block - chunk_begin) - BEFORE);
                stage_inputs(16 * (REVERSED ? tiles - chunk_begin - CHUNK : chunk_begin));
                __syncthreads();
            }
            walk.filter = filter_at + 2 * index * ROWS * HALF_BYTES;
            walk.place = REVERSED ? chunk_tiles - 1 : 0;
            if (chunk_begin == 0) walk.begin();
            walk.multiply_tiles<0>(min(begin - chunk_begin, chunk_tiles));
            if (chunk_begin == first_of_block) {  // the diagonal, where the upper rows have less
                walk.multiply_tiles<0>(ROWS / 2);
                walk.multiply_tiles<ROWS / 2>(ROWS / 2);
            }
        }

        const int of_lane = first_column + 2 * quad_lane();
        const i64 row_stride = channels * length;
        T_IO* const target = out + (first_row + of_lane) * row_stride + channel * length;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 16 * (REVERSED ? tiles - 1 - begin - row : begin + row) + group() + i / 2 * 8;
                    const int next = 8 * n + i % 2;
                    const float sum = SCALED ? fmaf(walk.sums[row][n][i], down, eps) : walk.sums[row][n][i] + eps;
                    if (token < length && of_lane + next < present)
                        target[next * row_stride + token] = from_float<T_IO>(sum);
                }
    }
}
