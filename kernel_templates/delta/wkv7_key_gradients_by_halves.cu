// What wkv7_key_gradients.cu does, for those slabs of 64 channels of a chunk whose decays leave the range of its
// middle's frame: by halves (wkv7_halves.cuh). Arguments are as there.
//
// Grid (any number of blocks): each takes slabs of a chunk and head, one after another. A warp has 32 channels of 16
// tokens while it sums over the values, and goes down the trees with 16 of them after the other 16: with more warps
// there are no registers for either. Channels stand in the order of lanes, as the states have them.
#include "chunk.cuh"
#include "halved.cuh"
#include "slab_copy.cuh"
#include "slots.cuh"
#include "wkv7_halves.cuh"
#include "wkv7_layouts.cuh"

constexpr int DECAY_CHANNELS = TILE_COLUMNS, DECAY_PARTS = SLABS;
constexpr bool DECAYS_COME_IN_PARTS = true;
#include "chunk_decay.cuh"
#include "pair_rows.cuh"

constexpr int CHANNEL_GROUPS = TILE_COLUMNS / 16, OWN_GROUPS = 2;  // of 16 channels: in all, and of a warp
constexpr int CHANNEL_WARPS = CHANNEL_GROUPS / OWN_GROUPS;
constexpr int DISTANCES = max_of(BLOCKS / 2, 1);  // of blocks that meet: 1 and 2
static_assert(NUM_THREADS == 32 * CHANNEL_WARPS * BLOCKS, "num_threads must be 4 for each token of a chunk");

constexpr int PITCH = TILE_COLUMNS + 8;
using Row = T_IO[PITCH];
struct Rows { Row r[CHUNK_LEN], a[CHUNK_LEN], k[CHUNK_LEN], b[CHUNK_LEN]; };
struct Smem {
    union {
        struct {
            Slab<TILE_COLUMNS> state, e;  // 64 values
            Slab<CHUNK_LEN> v, dy, u, dx;
        } piece;
        struct {
            Rows raw, gradients;
            float growth[CHUNK_LEN][TILE_COLUMNS + 4];  // the tokens' decays; later the gradients of their logarithms
            float shared[BLOCKS][BLOCKS][TILE_COLUMNS];  // what a block gives to those of all tokens of another one
            // A block's rows for others, by the level's distance, as lanes take them.
            BothRows<Fragment> whole[DISTANCES][BLOCKS][CHANNEL_GROUPS][32];
        } rows;
    };
    Triangle gradients[4];  // dArk dArb dAak dAab
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// A triangle by rows and columns.
struct TriangleByTokens { TriangleTile tile; };
__device__ inline Right load_right(TriangleByTokens triangle, int row, int column) {
    return load_right(triangle.tile, row / 16, column / 16);
}
__device__ inline Right load_right_transposed(TriangleByTokens triangle, int row, int column) {
    return load_right_transposed(triangle.tile, row / 16, column / 16);
}
// A token with itself.
__device__ inline float own_pair(const Triangle& triangle, int token) {
    const int p = token / 16, t = token % 16;
    return to_float(reinterpret_cast<const T_IO*>(triangle.units[p * (p + 3) / 2])[t / 8 * 3 * 64 + t % 8 * 9]);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_key_gradients_by_halves(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ v,
    const T_IO* __restrict__ a, const T_IO* __restrict__ b, const T_IO* __restrict__ dy,
    const i64* __restrict__ cu_seqlens, const T_IO* __restrict__ u, const T_IO* __restrict__ dx,
    const uint4* __restrict__ states, const uint4* __restrict__ e, const uint4* __restrict__ gradients,
    const int* __restrict__ halved, T_IO* __restrict__ dr, T_W* __restrict__ dw, T_IO* __restrict__ dk,
    T_IO* __restrict__ da, T_IO* __restrict__ db, Strides r_strides, Strides w_strides, Strides k_strides,
    Strides v_strides, Strides a_strides, Strides b_strides, Strides dy_strides, i64 tokens, i64 heads, i64 sequences,
    float scale, int first_chunk, i64 part_slots, int part_chunks) {
    auto make = [=](i64 place) mutable {
        extern __shared__ __align__(1024) unsigned char shared_bytes[];
        Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
        const i64 slot = place / SLABS / heads, head = place / SLABS % heads;
        const int slab = place % SLABS, first_channel = slab * TILE_COLUMNS;
        const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
        if (chunk.steps == 0 || !has_channel(first_channel)) return;
        const int steps = chunk.steps;
        const i64 token = chunk.span.begin + chunk.token;
        const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
        const i64 row_of_outputs = (chunk.span.batch * tokens + token) * heads + head;
        states += place * (STATE_ROWS * 8) + threadIdx.x, e += place * (STATE_ROWS * 8) + threadIdx.x;
        w += start(w_strides);

        using Values = ValueColumns<TILE_COLUMNS, NUM_THREADS, T_IO>;
        using Solutions = ValueColumns<TILE_COLUMNS, NUM_THREADS, T_IO>;
        Values of_v(v + start(v_strides), v_strides.token), of_dy(dy + start(dy_strides), dy_strides.token);
        Solutions of_u(u + row_of_outputs * VALUE_SIZE, heads * VALUE_SIZE);
        Solutions of_dx(dx + row_of_outputs * VALUE_SIZE, heads * VALUE_SIZE);
        copy_units(smem.gradients, gradients + (slot * heads + head) * (4 * TRIANGLE_UNITS) + threadIdx.x);
        RawDecays raw_w;
        raw_w.load(w, w_strides.token, steps, first_channel);

        const int first_group = OWN_GROUPS * (warp_id() % CHANNEL_WARPS), block = warp_id() / CHANNEL_WARPS;
        struct Sums {
            BlockSums d_r, d_a, d_k, d_b;  // dY S, dX S, V E and U E, [channel, token]
            float state_terms[2];          // sum_v S E, the block's share of the values
        } sums[OWN_GROUPS] = {};
#pragma unroll 1
        for (int first_value = 0; first_value < VALUE_SIZE; first_value += TILE_COLUMNS) {
            auto& piece = smem.piece;
            of_v.copy(piece.v, 0, steps), of_dy.copy(piece.dy, 0, steps);
            of_u.copy(piece.u, 0, steps), of_dx.copy(piece.dx, 0, steps);
            copy_units(piece.state, states + first_value * 8), copy_units(piece.e, e + first_value * 8);
            commit_copies(), wait_for_copies<0>();
            __syncthreads();  // this piece is there
            const auto state = tile_of(piece.state), with_e = tile_of(piece.e);
            constexpr int STEP = 32;  // rows of the state that are behind the last value, in steps, may hold anything
#pragma unroll
            for (int at = 0; at < TILE_COLUMNS; at += STEP) {
                if (first_value + at >= VALUE_SIZE) break;
#pragma unroll
                for (int c = at; c < at + STEP; c += 16) {
                    const auto values = [&](Slab<CHUNK_LEN>& tile) {
                        return load_right_transposed(tile_of(tile), 16 * block, c);
                    };
                    const Right with_dy = values(piece.dy), with_dx = values(piece.dx), with_v = values(piece.v),
                                with_u = values(piece.u);
#pragma unroll
                    for (int g = 0; g < OWN_GROUPS; ++g) {
                        const int column = 16 * (first_group + g);
                        const Fragment x = load_left_transposed(state, c, column),
                                       y = load_left_transposed(with_e, c, column);
                        multiply_add(sums[g].d_r, x, with_dy), multiply_add(sums[g].d_a, x, with_dx);
                        multiply_add(sums[g].d_k, y, with_v), multiply_add(sums[g].d_b, y, with_u);
                        if (c / 16 % BLOCKS != block) continue;
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            sums[g].state_terms[i % 2] +=
                                low_of(x.at[i]) * low_of(y.at[i]) + high_of(x.at[i]) * high_of(y.at[i]);
                    }
                }
            }
            __syncthreads();  // nobody reads it any more
        }
#pragma unroll
        for (Sums& own : sums)
#pragma unroll
            for (float& term : own.state_terms) term = sum_quad(term);

        // A thread's pair of channels, and its tokens.
        auto& raw = smem.rows.raw;
        auto& growth = smem.rows.growth;
        const int index = threadIdx.x % PAIRS, first = threadIdx.x / PAIRS * SEGMENT_LEN,
                  channel = first_channel + 2 * index;
        const int pair = column_pair<Order::lanes>(index);
        const auto word = [&](Row (&rows)[CHUNK_LEN], int i) -> unsigned& {
            return *reinterpret_cast<unsigned*>(&rows[first + i][2 * pair]);
        };
        const auto read = [&](Row (&rows)[CHUNK_LEN], const T_IO* source, Strides strides) {
            source += start(strides);
#pragma unroll
            for (int i = 0; i < SEGMENT_LEN; ++i)
                word(rows, i) = first + i < steps ? read_pair(source + (first + i) * strides.token, channel) : 0u;
        };
        read(raw.r, r, r_strides), read(raw.a, a, a_strides), read(raw.k, k, k_strides), read(raw.b, b, b_strides);
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const auto decay = [&](int j) {
                return first + i < steps && has_channel(channel + j) ? token_decay<DECAY>(raw_w.at(i, j)) : 1.0f;
            };
            *reinterpret_cast<float2*>(&growth[first + i][2 * pair]) = {decay(0), decay(1)};
        }
        __syncthreads();  // rows and decays are there

        const auto tile = [](Row (&rows)[CHUNK_LEN]) { return Tile<PITCH>{shared_address(rows[0])}; };
        const auto triangle = [&](int i) { return TriangleByTokens{tile_of(smem.gradients[i])}; };
        auto& found = smem.rows.gradients;
        struct { Tile<PITCH> r, a, k, b; } const tiles = {tile(found.r), tile(found.a), tile(found.k), tile(found.b)};
        const PairGradients<TriangleByTokens> pairs = {triangle(0), triangle(1), triangle(2), triangle(3)};
        const auto own_pairs = [&](int t) {
            return float2{own_pair(smem.gradients[0], t), own_pair(smem.gradients[1], t)};
        };
        const auto copy_sums = [](BlockSums& to, const BlockSums& sums) {
            for_each_element([&](int n, int j, int i) { to[n][2 * j + i] = sums[n][2 * j + i]; });
        };
        const auto lane_rows = [&](int o, int b, int g) -> BothRows<Fragment>& {
            return smem.rows.whole[meeting_distance(o, b) - 1][o][first_group + g][lane_id()];
        };
        const auto of_channel = [&](int from, int to, int column, int j) -> float& {
            return smem.rows.shared[from][to][column + group() + 8 * j];
        };
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            const int column = 16 * (first_group + g);
            BlockProducts all;
            load_products(all, growth, column);
            const KeyBlock own(raw, growth, column, block, scale);
#pragma unroll
            for (int distance = 1; distance < BLOCKS; distance *= 2)
                lane_rows(block, block ^ distance, g) = own.whole_rows_for(distance, all, block);
        }
        __syncthreads();  // the rows for others are there
        BlockSums d_decay[OWN_GROUPS] = {};
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            const int column = 16 * (first_group + g);
            const Sums& begin = sums[g];
            BlockProducts all, shared = {};
            load_products(all, growth, column);
            const KeyBlock own(raw, growth, column, block, scale);
            write_key_block_by_halves(
                tiles, own, [&](int o) { return lane_rows(o, block, g); }, pairs,
                [&](TreeGradients& grads, int) { copy_sums(grads.left, begin.d_r), copy_sums(grads.right, begin.d_k); },
                [&](TreeGradients& grads, int) { copy_sums(grads.left, begin.d_a), copy_sums(grads.right, begin.d_b); },
                own_pairs, all, shared, d_decay[g], column, scale, block);
            float whole[2];
            multiply_blocks(whole, all, 0, BLOCKS);  // what decays of the state from the chunk's start to its end
            if (quad_lane() == 0)
#pragma unroll
                for (int o = 0; o < BLOCKS; ++o)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        of_channel(block, o, column, j) = shared[o][j] + begin.state_terms[j] * whole[j];
        }
        __syncthreads();  // what blocks give to each other is there, and nobody reads the decays any more
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            const int column = 16 * (first_group + g);
            float given[2] = {};
#pragma unroll
            for (int o = 0; o < BLOCKS; ++o)
#pragma unroll
                for (int j = 0; j < 2; ++j) given[j] += of_channel(o, block, column, j);
            for_each_element([&](int n, int j, int i) {
                growth[16 * block + token_of(n, i)][column + group() + 8 * j] = d_decay[g][n][2 * j + i] + given[j];
            });
        }
        __syncthreads();  // the gradients are there

        const i64 row_stride = heads * HEAD_SIZE;
        const auto write = [&](T_IO* target, Row (&rows)[CHUNK_LEN], int i, i64 row) {
            write_pair(target + row, channel, Words<T_IO, 2>{{word(rows, i)}});
        };
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            if (first + i >= steps) break;
            const i64 row = row_of_outputs * HEAD_SIZE + (first + i) * row_stride;
            write(dr, found.r, i, row), write(da, found.a, i, row), write(dk, found.k, i, row),
            write(db, found.b, i, row);
            const float2 d_decay = *reinterpret_cast<const float2*>(&growth[first + i][2 * pair]);
            write_pair(dw + row, channel, rounded<T_W>({d_decay.x * log_decay_slope<DECAY>(raw_w.at(i, 0)),
                                                        d_decay.y * log_decay_slope<DECAY>(raw_w.at(i, 1))}));
        }
    };
    const auto place_of = [=](i64 item) {
        const i64 slot = slot_of_part(item / SLABS / heads, part_chunks, first_chunk, tokens);
        return (slot * heads + item / SLABS % heads) * SLABS + item % SLABS;
    };
    for_each_halved<1>(halved, part_slots * heads * SLABS, place_of, make);
}
