// timex: the gradient of the filter, on tensor cores.
//
//     gw[c, T-1-x] = sum_b sum_{t >= x} g[b, c, t] k[b, c, t-x]
//
//   g, k  [batch, channels, T]                     T_IO  in   .._batch and .._channel apart
//   sums  [groups, channels, tiles, 32]            fp32  out  of the first kernel, in of the second
//   gw    [channels, T]                            T_W   out  contiguous
//
// A tile is 16 tokens. Tile I of g, transposed, times tile J of k, summed over the batch and over all I - J = D, is a
// matrix whose diagonals belong to the lags x = 16 D + i - j. The first kernel writes the 31 sums of its diagonals; a
// lag has one in D and one in D + 1, which the second kernel adds, with those of all groups of BATCH rows, in their
// order.
//
// A warp has ROWS neighbouring D and keeps as many tiles of k: a step of I reads one of g and one of k. fp32: both are
// two fp16 each (timex_product.cuh), the three products of a pair of tiles are added to the sums by fmaf, which also
// undoes the scales: of 32 tokens of all rows, as these are summed.
//
// Grid (channels, groups, blocks of D). A block has all D, or with STREAMED one for each of WARPS * ROWS, and walks
// over g in chunks as long, and over k in twice as long ones. Shared memory: tiles of g and k, their scales, a matrix
// per warp.
#include "timex_product.cuh"

constexpr bool SCALED = sizeof(T_IO) == 4;
using T_PRODUCT = typename ProductOf<T_IO, SCALED>::type;
constexpr int PARTS = PARTS_OF<T_IO>, WARPS = NUM_THREADS / 32, WORDS = BATCH / 4;  // of a fragment
constexpr int CHUNK = STREAMED ? WARPS * ROWS : 0;  // tiles
constexpr int PITCH = 17, DIAGONALS = 32;

static_assert(BATCH == 8 || BATCH == 16, "batch must be 8 or 16");
static_assert(ROWS >= 2 && ROWS <= 8 && ROWS % 2 == 0, "rows must be 2, 4, 6 or 8");
static_assert(NUM_THREADS % 128 == 0 && NUM_THREADS <= 512, "num_threads must be a multiple of 128 up to 512");
static_assert(VECTOR == 1 || VECTOR == 4, "vector must be 1 or 4");

using Block = unsigned[PARTS][WORDS];  // 16 tokens of all rows

// Reads a block by this lane's address, with both parts at once where they are one load.
__device__ inline void read_block(Block& block, unsigned address, int part_bytes) {
    if constexpr (WORDS == 4) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Fragment f = load_matrices_transposed(address + part * part_bytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) block[part][i] = f.at[i];
        }
    } else if constexpr (PARTS == 2) {
        const Fragment f = load_matrices_transposed(address);
        block[0][0] = f.at[0], block[0][1] = f.at[1], block[1][0] = f.at[2], block[1][1] = f.at[3];
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(block[0][0]), "=r"(block[0][1]) : "r"(address));
    }
}

struct TileWalk {
    unsigned g, k, g_scales, k_scales;  // this lane's addresses of what shared memory has first
    int g_part_bytes, k_part_bytes;
    Block window[ROWS];  // tile I - D of k for D of every row
    float k_scale[ROWS];
    Accumulator sums[ROWS][2];

    __device__ void begin() {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            k_scale[row] = 0.0f;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < WORDS; ++i) window[row][part][i] = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[row][half][i] = 0.0f;
        }
    }

    // Adds the products of so many tiles, from these of shared memory on. Not unrolled, as in the convolution.
    __device__ void multiply_tiles(int count, int g_tile, int k_tile) {
#pragma unroll 1
        for (int step = 0; step < count; ++step, ++g_tile, ++k_tile) {
#pragma unroll
            for (int row = ROWS - 1; row >= 1; --row) {
                k_scale[row] = k_scale[row - 1];
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
#pragma unroll
                    for (int i = 0; i < WORDS; ++i) window[row][part][i] = window[row - 1][part][i];
            }
            Block left;
            float g_scale = 0.0f;
            read_block(window[0], k + 32 * k_tile, k_part_bytes);
            read_block(left, g + 32 * g_tile, g_part_bytes);
            if constexpr (SCALED) {
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(k_scale[0]) : "r"(k_scales + 4 * (k_tile / 2)));
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(g_scale) : "r"(g_scales + 4 * (g_tile / 2)));
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const auto product = [&](Accumulator& result, int g_part, int k_part, const Accumulator& sum) {
                        multiply<T_PRODUCT, BATCH>(result, left[g_part], window[row][k_part] + half * (WORDS / 2), sum);
                    };
                    if constexpr (SCALED) {
                        Accumulator fresh = {};
                        multiply_parts<PARTS, PARTS>(fresh, product);
                        const float scale = g_scale * k_scale[row];
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[row][half][i] = fmaf(fresh[i], scale, sums[row][half][i]);
                    } else {
                        multiply_parts<1, 1>(sums[row][half], product);
                    }
                }
        }
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_filter_gradient(
    const T_IO* __restrict__ g, const T_IO* __restrict__ k, float* __restrict__ sums, i64 g_batch, i64 g_channel,
    i64 k_batch, i64 k_channel, i64 batch, i64 channels, int length, int tiles) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int g_tiles = STREAMED ? CHUNK : tiles, k_tiles = STREAMED ? 2 * CHUNK : tiles;
    const i64 channel = blockIdx.x, first_row = i64(blockIdx.y) * BATCH;
    const int present = static_cast<int>(min(batch - first_row, i64(BATCH)));
    const int warp = threadIdx.x / 32, first_of_block = STREAMED ? blockIdx.z * CHUNK : 0;
    g += first_row * g_batch + channel * g_channel, k += first_row * k_batch + channel * k_channel;

    const Rows<PARTS, BATCH> g_rows{shared_address(shared), pitch_of(16 * g_tiles)};
    const Rows<PARTS, BATCH> k_rows{g_rows.start + PARTS * g_rows.part_bytes(), pitch_of(16 * k_tiles)};
    const unsigned first_scale = PARTS * (g_rows.part_bytes() + k_rows.part_bytes());
    float* const g_scales = reinterpret_cast<float*>(shared + first_scale);
    float* const k_scales = g_scales + g_tiles / 2;
    float* const matrix = k_scales + k_tiles / 2 + warp * 16 * PITCH;

    const auto stage_both = [&](int g_first, int k_first) {
        stage<T_IO, T_PRODUCT, SCALED, false, VECTOR, NUM_THREADS>(
            g_rows, g, g_batch, present, 16 * g_first, 16 * g_tiles, length,
            [&](int segment, int, float scale) { g_scales[segment] = scale; });
        stage<T_IO, T_PRODUCT, SCALED, false, VECTOR, NUM_THREADS>(
            k_rows, k, k_batch, present, 16 * k_first, 16 * k_tiles, length,
            [&](int segment, int, float scale) { k_scales[segment] = scale; });
    };
    if constexpr (!STREAMED) {
        stage_both(0, 0);
        __syncthreads();
    }

    // The 8 x 8 matrices of a block are (rows, tokens): a left operand wants both halves of the tokens first, a right
    // one both halves of the rows. With eight rows there is one half of these, and the part comes in its place.
    const int row = lane_id() % 8, low = lane_id() / 8 % 2, high = lane_id() / 16;
    TileWalk walk;
    if constexpr (WORDS == 4) {
        walk.g = g_rows.address(0, row + 8 * high, 8 * low), walk.k = k_rows.address(0, row + 8 * low, 8 * high);
    } else {
        walk.g = g_rows.address(high % PARTS, row, 8 * low), walk.k = k_rows.address(high % PARTS, row, 8 * low);
    }
    walk.g_scales = shared_address(g_scales), walk.k_scales = shared_address(k_scales);
    walk.g_part_bytes = g_rows.part_bytes(), walk.k_part_bytes = k_rows.part_bytes();

    const int groups = tiles / ROWS, passes = STREAMED ? 1 : ceil_div(groups, WARPS);
    for (int pass = 0; pass < passes; ++pass) {
        const int item =
            STREAMED ? (warp < WARPS / 2 ? warp : WARPS - 1 - (warp - WARPS / 2)) : item_of(pass, warp, WARPS);
        const int first = first_of_block + item * ROWS;  // D of row 0
        if (!STREAMED && first >= tiles) break;
        walk.begin();
        if constexpr (STREAMED) {
            for (int chunk = first_of_block; chunk < tiles; chunk += CHUNK) {
                const int k_first = chunk - first_of_block - CHUNK, begin = max(chunk, first);
                __syncthreads();  // all have read the chunk before
                stage_both(chunk, k_first);
                __syncthreads();
                walk.multiply_tiles(chunk + CHUNK - begin, begin - chunk, begin - first - k_first);
            }
        } else {
            walk.multiply_tiles(tiles - first, first, 0);
        }

#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    matrix[(group() + i / 2 * 8) * PITCH + 8 * half + 2 * quad_lane() + i % 2] = walk.sums[r][half][i];
            __syncwarp();
            // Lane n sums the diagonal i - j = n - 15; the last has none.
            const int difference = lane_id() - 15;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 16; ++j)
                if (j + difference >= 0 && j + difference < 16) sum += matrix[(j + difference) * PITCH + j];
            sums[((blockIdx.y * channels + channel) * tiles + first + r) * DIAGONALS + lane_id()] = sum;
            __syncwarp();
        }
    }
}

// Grid (blocks of lags, channels): a thread has a lag.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) timex_filter_gradient_sum(
    const float* __restrict__ sums, T_W* __restrict__ gw, i64 groups, i64 channels, int length, int tiles) {
    const int lag = blockIdx.y * NUM_THREADS + threadIdx.x, tile = lag / 16, offset = lag % 16;
    if (lag >= length) return;
    const i64 channel = blockIdx.x, group_size = channels * tiles * DIAGONALS;
    const float* const own = sums + (channel * tiles + tile) * DIAGONALS + 15 + offset;
    const bool has_next = offset > 0 && tile + 1 < tiles;
    float sum = 0.0f;
    for (i64 i = 0; i < groups; ++i) {
        sum += own[i * group_size];
        if (has_next) sum += own[i * group_size + DIAGONALS - 16];
    }
    gw[channel * length + length - 1 - lag] = from_float<T_W>(sum);
}
