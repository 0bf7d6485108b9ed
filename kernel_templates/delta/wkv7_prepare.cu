// RWKV-7 time mixing, what a chunk's tokens do to any state, for all chunks at once: the keys' side of the split form.
// With the operands and token matrices of wkv7_chunk.cuh,
//
//     W = Tm A    G = Arb Tm    R0 = R + G A    TA = Tm Aak    K0 = K + TA^T B    M = Ark + G Aak
//
// a chunk that begins with S has, S' = S diag(e^m), X = W S'^T,
//
//     Y = R0 S'^T + M V    U = X + TA V    S <- (S' + V^T K0 + X^T B) diag(e^(D - m))
//
// and its backward is the same with time reversed: E' = E diag(e^(D - m)), Z = B E'^T,
//
//     dV = K0 E'^T + M^T dY    dX = Tm^T Z + G^T dY    E <- (E' + dY^T R0 + Z^T W) diag(e^m)
//
//   r k a b, w  [batch, tokens, heads, K]  T_IO, T_W  in; w with w0, see decay_bias.cuh
//   operands    [slots, heads, 2, SLABS, 2] tiles  out: W R0, then B K0, with BY_LANES in the order of lanes
//   matrices    [slots, heads, 4] triangles        out: TA M Tm G, or M alone for a forward that saves nothing
//   frames      [slots, heads, 2, CHANNELS]  fp32  out: m and D - m to the base 2; of slabs by halves twice e^D
//   halved      [slots, heads, SLABS]  out: whether the decays of a slab leave the range of its middle's frame. Then R
//               and A have the decay from the chunk's start on, K and B that up to its end, and states have no frame
//
// With BY_HALVES any number of blocks make those chunks again of which the first launch has found slabs that leave.
//
// Grid (chunks, heads, sequences), a block per chunk and head. It goes over the channels, 64 at a time, first for the
// token matrices and then back for the products with them. In between the operands lie where these products will.
#include "decay_bias.cuh"
#include "levels.cuh"
#include "halved.cuh"
#include "wkv7_operands.cuh"

static_assert(NUM_THREADS == 2 * CHUNK_LEN * 2, "num_threads must be four times chunk_len");

struct Smem {
    Operands operands[2];  // the second in place of the raw rows, on the way back
    Triangle tm, ak, rb, rk, ta;
    Triangle ab;                  // later G
    float lower[BLOCKS][16][20];  // the diagonal blocks of Aab, a column of a block per row
    float2 totals[SEGMENTS][PAIRS];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// Tm on the diagonal: by substitution in fp32, half a warp for a block and a lane for a column, since products of
// narrow powers lose everything where keys repeat.
__device__ inline void invert_diagonal(Triangle& tm, const float (&lower)[BLOCKS][16][20], int block, int column) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < 15; ++i)
#pragma unroll
        for (int row = (i + 1) / 4 * 4; row < 16; row += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&lower[block][i][row]);
            const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row + j > i) x[row + j] += factors[j] * x[i];
        }
    T_IO* const target = reinterpret_cast<T_IO*>(tm.units[block * (block + 3) / 2]);  // (block, block)
#pragma unroll
    for (int i = 0; i < 16; ++i)
        target[(i / 8 + column / 8 * 2) * 64 + i % 8 * 8 + column % 8] = from_float<T_IO>(x[i]);
}

// A slab that leaves the range of its middle's frame, by halves (chunk_rows.cuh): R and K in one tile, A and B in
// another.
struct LevelMatrices {
    float2 (&totals)[SEGMENTS][PAIRS];
    HalfTriangle& sum;
    BlockDecays decays;
    TokenRows r, a, k, b;

    __device__ static void write(Slab<CHUNK_LEN>& tile, int i, float2 x) {
        const int column = column_pair<BY_LANES ? Order::lanes : Order::channels>(threadIdx.x % PAIRS);
        *word_of(tile, threadIdx.x / PAIRS * SEGMENT_LEN + i, column) = pack(x.x, x.y);
    }
    // The pairs that `is_kept` names, of a warp's half of a triangle; it is asked for blocks first.
    template <int HALF, typename IsKeptBlock, typename IsKept>
    __device__ void add_pairs(SlabTile left, SlabTile right, IsKeptBlock is_kept_block, IsKept is_kept) {
        for_blocks_of_half<HALF>([&](int n, int p, int q) {
            if (!is_kept_block(p, q)) return;
            Accumulator all[2] = {};
#pragma unroll
            for (int c = 0; c < TILE_COLUMNS; c += 16)
                multiply_add(all, load_left(left, 16 * p, c), load_right_transposed(right, 16 * q, c));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
                if (is_kept(row, column)) sum[n][i / 4][i % 4] += all[i / 4][i % 4];
            }
        });
    }
    template <typename IsKeptBlock, typename IsKept>
    __device__ void add_pairs(SlabTile left, SlabTile right, IsKeptBlock is_kept_block, IsKept is_kept) {
        if (warp_id() < 4) add_pairs<0>(left, right, is_kept_block, is_kept);
        else add_pairs<HALVES - 1>(left, right, is_kept_block, is_kept);
    }
    // A level after another. Their rows are written while slower warps may read those of the last one, but not those
    // before.
    template <int LEVEL>
    __device__ void add_levels(Slab<CHUNK_LEN>& with_r, Slab<CHUNK_LEN>& with_a, Slab<CHUNK_LEN>& next_r,
                               Slab<CHUNK_LEN>& next_a) {
#pragma unroll
        for (int i = 0; i < SEGMENT_LEN; ++i) {
            const bool later = is_later_token<LEVEL>(i);
            write(with_r, i, later ? r[i] : k[i]), write(with_a, i, later ? a[i] : b[i]);
        }
        __syncthreads();  // the rows are there
        double_blocks<LEVEL>(r, k, decays, totals), double_blocks<LEVEL>(a, b, decays, totals);
        double_blocks<LEVEL>(decays);
        const bool is_r = warp_id() & 1, is_k = warp_id() & 2;
        add_pairs(
            tile_of(is_r ? with_r : with_a), tile_of(is_k ? with_r : with_a),
            [](int p, int q) { return LEVEL < 16 ? p == q : (p ^ q) / max_of(LEVEL / 16, 1) == 1; },
            [](int row, int other) { return LEVEL >= 16 || is_of_level(row, other, LEVEL); });
        if constexpr (2 * LEVEL < CHUNK_LEN) add_levels<2 * LEVEL>(next_r, next_a, with_r, with_a);
    }
};

// Its share of the warp's triangle is added to `sum`, and R A K B go to the tiles.
__device__ inline void prepare_by_halves(float2 (&totals)[SEGMENTS][PAIRS], Operands& tiles, const RawKeys& raw,
                                         const RawDecays& raw_w, const DecayBias& bias, HalfTriangle& sum,
                                         float* frame, int first_channel, int steps, float scale) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS, channel = first_channel + 2 * index;
    const bool is_r = warp_id() & 1, is_k = warp_id() & 2;
    LevelMatrices level = {totals, sum};
    begin_blocks<false, TILE_COLUMNS>(level.decays, totals, raw_w, steps, nullptr, first_channel, bias);
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        const auto read = [&](const T_IO (&rows)[CHUNK_LEN][TILE_COLUMNS]) {
            const float2 x = unpack(*reinterpret_cast<const unsigned*>(&rows[segment * SEGMENT_LEN + i][2 * index]));
            return float2{has_channel(channel) ? x.x : 0.0f, has_channel(channel + 1) ? x.y : 0.0f};
        };
        const float2 x = read(raw.r), r = {scale * x.x, scale * x.y};
        level.a[i] = read(raw.a), level.k[i] = read(raw.k), level.b[i] = read(raw.b);
        level.r[i] = product(r, level.decays.at[i]);
        // A token's own pair, which the outputs see, has no decay.
        level.write(tiles.r, i, r), level.write(tiles.k, i, level.k[i]), level.write(tiles.b, i, level.b[i]);
    }
    __syncthreads();  // the rows and the totals are there
    if (is_r)
        level.add_pairs(tile_of(tiles.r), tile_of(is_k ? tiles.k : tiles.b), [](int p, int q) { return p == q; },
                        [](int row, int other) { return row == other; });
    __syncthreads();  // nobody reads the rows any more
    level.add_levels<1>(tiles.r, tiles.a, tiles.k, tiles.b);
    __syncthreads();  // nobody reads the last level's rows any more
#pragma unroll
    for (int i = 0; i < SEGMENT_LEN; ++i) {
        level.write(tiles.r, i, level.r[i]), level.write(tiles.a, i, level.a[i]);
        level.write(tiles.k, i, level.k[i]), level.write(tiles.b, i, level.b[i]);
    }
    if (threadIdx.x < PAIRS) {
        const float2 all = multiply_segments<SEGMENTS>(totals, 0);
        float2* const target = reinterpret_cast<float2*>(frame) + index;
        target[0] = target[CHANNELS / 2] = all;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_prepare(
    const T_IO* __restrict__ r, const T_W* __restrict__ w, const T_IO* __restrict__ k, const T_IO* __restrict__ a,
    const T_IO* __restrict__ b, const i64* __restrict__ cu_seqlens, uint4* __restrict__ operands,
    uint4* __restrict__ matrices, float* __restrict__ frames, int* __restrict__ halved, Strides r_strides,
    DecayStrides w_strides, Strides k_strides,
    Strides a_strides, Strides b_strides, i64 tokens, i64 heads, i64 sequences, float scale, int saves,
    int first_chunk, i64 part_slots, int part_chunks) {
    auto prepare = [=](i64 slot, i64 head) mutable {
        extern __shared__ __align__(1024) unsigned char shared_bytes[];
        Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
        const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
        if (chunk.steps == 0) return;
        const int warp = warp_id(), steps = chunk.steps;
        const auto start = [&](Strides s) {
            return chunk.span.batch * s.batch + (chunk.span.begin + chunk.token) * s.token + head * s.head;
        };
        const KeyRows keys = {{r + start(r_strides), r_strides.token}, {a + start(a_strides), a_strides.token},
                              {k + start(k_strides), k_strides.token}, {b + start(b_strides), b_strides.token}};
        w += start(w_strides);
        const i64 place = slot * heads + head;
        operands += place * (4 * SLABS * SLAB_UNITS);
        matrices += place * (MATRICES * TRIANGLE_UNITS);
        frames += place * (2 * CHANNELS);

        const auto tm = tile_of(smem.tm), ak = tile_of(smem.ak), rb = tile_of(smem.rb), rk = tile_of(smem.rk);
        const auto ta = tile_of(smem.ta), ab = tile_of(smem.ab), g = ab;

        RawKeys& raw = *reinterpret_cast<RawKeys*>(&smem.operands[1]);
        RawDecays next_w;
        DecayBias bias;
        const auto load_slab = [&](int slab) {
            copy_keys(raw, keys, slab * TILE_COLUMNS, steps), commit_copies();
            next_w.load(w, w_strides.token, steps, slab * TILE_COLUMNS);
            bias = bias_of(w_strides, head, slab * TILE_COLUMNS + threadIdx.x % PAIRS * 2);
        };
        HalfTriangle sum = {};
        bool leaves_any = false;  // whether a slab has left its frame: such a chunk is flagged here and made BY_HALVES
        const auto make_operands = [&](int slab) {  // returns whether its products are there too
            const bool by_halves = BY_HALVES && halved[place * SLABS + slab];
            RateSums sums;
            if (!by_halves) sum_rates(sums, smem.totals, next_w, steps, slab * TILE_COLUMNS, bias);
            wait_for_copies<0>();
            __syncthreads();  // the raw rows are there, and nobody reads the last slab's operands any more
            if constexpr (BY_HALVES)
                if (by_halves) {
                    prepare_by_halves(smem.totals, smem.operands[0], raw, next_w, bias, sum,
                                      frames + slab * TILE_COLUMNS, slab * TILE_COLUMNS, steps, scale);
                    __syncthreads();  // the operands are there
                    return true;
                }
            Frame frame = frame_of(smem.totals);
            if constexpr (LARGEST_DECAY > 0 && !BY_HALVES)
#pragma unroll
                for (int i = 0; i < SEGMENT_LEN; ++i)
                    frame.farthest = fmaxf(frame.farthest, fmaxf(fabsf(frame.origin.x + RATE_UNIT * sums.at[i].x),
                                                                 fabsf(frame.origin.y + RATE_UNIT * sums.at[i].y)));
            write_operands<BY_LANES ? Order::lanes : Order::channels>(sums, frame.origin, raw, smem.operands[0],
                                                                      slab * TILE_COLUMNS, scale);
            if (threadIdx.x < PAIRS) {
                float2* const middle = reinterpret_cast<float2*>(frames + slab * TILE_COLUMNS) + threadIdx.x;
                middle[0] = frame.middle;
                middle[CHANNELS / 2] = {frame.end.x - frame.middle.x, frame.end.y - frame.middle.y};
            }
            if constexpr (LARGEST_DECAY > 0 && !BY_HALVES) {
                const bool leaves = __syncthreads_or(leaves_range(frame, steps) || is_steep(sums));
                if (threadIdx.x == 0) halved[place * SLABS + slab] = leaves;
                leaves_any |= leaves;
            } else {
                __syncthreads();
            }
            return false;
        };
        // A slab's tiles to the tensor and back; every thread has the same units both times.
        constexpr int PAIR_UNITS = 2 * SLAB_UNITS;  // A and R, B and K
        const auto put_slab = [&](const Operands& tiles, int slab) {
            const uint4* const units = &tiles.a.units[0][0];
#pragma unroll
            for (int i = threadIdx.x; i < 2 * PAIR_UNITS; i += NUM_THREADS)
                operands[(i / PAIR_UNITS * SLABS + slab) * PAIR_UNITS + i % PAIR_UNITS] = units[i];
        };
        const auto fetch_slab = [&](Operands& tiles, int slab) {
            const uint4* const source = operands + slab * PAIR_UNITS + threadIdx.x;
            copy_units(reinterpret_cast<Slab<CHUNK_LEN>(&)[2]>(tiles.a), source);
            copy_units(reinterpret_cast<Slab<CHUNK_LEN>(&)[2]>(tiles.b), source + SLABS * PAIR_UNITS);
            commit_copies();
        };

        // The token matrices: each warp half a triangle of one of them.
        const bool is_r = warp & 1, is_k = warp & 2;
        load_slab(0);
        for (int slab = 0; slab < SLABS; ++slab) {
            const bool is_done = make_operands(slab);
            if (slab + 1 < SLABS) load_slab(slab + 1);
            if (!BY_HALVES && leaves_any) continue;
            if (slab + 1 < SLABS) put_slab(smem.operands[0], slab);
            else if (SLABS > 1) fetch_slab(smem.operands[1], SLABS - 2);
            if (is_done) continue;
            const Operands& tiles = smem.operands[0];
            const auto left = tile_of(is_r ? tiles.r : tiles.a), right = tile_of(is_k ? tiles.k : tiles.b);
            if (warp < 4) add_products<0>(sum, left, right);
            else add_products<HALVES - 1>(sum, left, right);
        }
        if (!BY_HALVES && leaves_any) return;
        const auto store = [&](int i, int p, int q) {
            if (p == q) keep_lower(sum[i], !is_r);
            if (is_r || is_k || p != q) {
                store_block(is_r ? is_k ? rk : rb : is_k ? ak : ab, p, q, to_fragment(sum[i][0], sum[i][1]));
                return;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int row = group() + j % 4 / 2 * 8, column = j / 4 * 8 + 2 * quad_lane() + j % 2;
                smem.lower[p][column][row] = sum[i][j / 4][j % 4];
            }
        };
        if (warp < 4) for_blocks_of_half<0>(store);
        else for_blocks_of_half<HALVES - 1>(store);
        __syncthreads();  // Aab Aak Arb Ark are there

        if (warp < BLOCKS / 2) invert_diagonal(smem.tm, smem.lower, 2 * warp + lane_id() / 16, lane_id() % 16);
        __syncthreads();  // the diagonal of Tm is there
        if (warp < BLOCKS - 1) {  // a column of blocks a warp: Tm_pq = Tm_pp sum_m Aab_pm Tm_mq
            for (int p = warp + 1; p < BLOCKS; ++p) {
                Accumulator carried[2] = {};  // transpose of the sum over m
                for (int m = warp; m < p; ++m)
                    multiply_add(carried, load_left_transposed(tm, m, warp), transposed(load_left(ab, p, m)));
                Accumulator solved[2] = {};
                multiply_add(solved, load_left(tm, p, p), transposed(to_fragment(carried[0], carried[1])));
                store_block(tm, p, warp, to_fragment(solved[0], solved[1]));
                __syncwarp();
            }
        }
        __syncthreads();  // Tm is there, and nobody reads Aab any more
        for (int task = warp; task < 2 * TRIANGLE; task += WARPS) {
            const auto [p, q] = triangle_block(task / 2);
            const bool is_g = task % 2;
            Accumulator product[2] = {};
            for (int m = q; m <= p; ++m)
                multiply_add(product, load_left(is_g ? rb : tm, p, m), load_right(is_g ? tm : ak, m, q));
            store_block(is_g ? g : ta, p, q, to_fragment(product[0], product[1]));
        }
        __syncthreads();  // G and TA are there
        for (int task = warp; task < TRIANGLE; task += WARPS) {  // M in the place of Ark
            const auto [p, q] = triangle_block(task);
            Accumulator product[2];
            from_fragment(product, load_left(rk, p, q));
            for (int m = q; m <= p; ++m) multiply_add(product, load_left(g, p, m), load_right(ak, m, q));
            store_block(rk, p, q, to_fragment(product[0], product[1]));
        }
        __syncthreads();  // M is there
        const auto write = [&](int index, const Triangle& triangle) {
            for (int i = threadIdx.x; i < TRIANGLE_UNITS; i += NUM_THREADS)
                matrices[index * TRIANGLE_UNITS + i] = triangle.units[i / 32][i % 32];
        };
        write(1, smem.rk);
        if (saves) write(0, smem.ta), write(2, smem.tm), write(3, smem.ab);

        const int row = warp % BLOCKS, column = warp / BLOCKS * (TILE_COLUMNS / 2);  // 16 tokens and 32 channels a warp
        for (int slab = SLABS - 1; slab >= 0; --slab) {
            Operands& tiles = smem.operands[(SLABS - 1 - slab) % 2];
            if (slab + 1 < SLABS) {
                wait_for_copies<0>();
                __syncthreads();  // the operands are there, and nobody reads the last slab's any more
                if (slab > 0) fetch_slab(smem.operands[(SLABS - slab) % 2], slab - 1);
            }
            const auto operand_a = tile_of(tiles.a), operand_r = tile_of(tiles.r);
            const auto operand_b = tile_of(tiles.b), operand_k = tile_of(tiles.k);
            Accumulator w_sum[2][2] = {}, r_sum[2][2], k_sum[2][2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                from_fragment(r_sum[n], load_left(operand_r, 16 * row, column + 16 * n));
                from_fragment(k_sum[n], load_left(operand_k, 16 * row, column + 16 * n));
            }
            for (int m = 0; m <= row; ++m) {
                const Fragment with_w = load_left(tm, row, m), with_r = load_left(g, row, m);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const Right block = load_right(operand_a, 16 * m, column + 16 * n);
                    multiply_add(w_sum[n], with_w, block), multiply_add(r_sum[n], with_r, block);
                }
            }
            for (int m = row; m < BLOCKS; ++m) {
                const Fragment with_k = load_left_transposed(ta, m, row);
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    multiply_add(k_sum[n], with_k, load_right(operand_b, 16 * m, column + 16 * n));
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {  // nobody else reads these blocks of R and K
                store_block(operand_r, 16 * row, column + 16 * n, to_fragment(r_sum[n][0], r_sum[n][1]));
                store_block(operand_k, 16 * row, column + 16 * n, to_fragment(k_sum[n][0], k_sum[n][1]));
            }
            __syncthreads();  // nobody reads A any more
#pragma unroll
            for (int n = 0; n < 2; ++n)
                store_block(operand_a, 16 * row, column + 16 * n, to_fragment(w_sum[n][0], w_sum[n][1]));
            __syncthreads();  // W R0 B K0 are there
            put_slab(tiles, slab);
        }
    };
    if constexpr (BY_HALVES)
        for_each_halved<SLABS>(
            halved, part_slots * heads,
            [=](i64 item) {
                return slot_of_part(item / heads, part_chunks, first_chunk, tokens) * heads + item % heads;
            },
            [=](i64 place) mutable { prepare(place / heads, place % heads); });
    else prepare(slot_of(blockIdx.x, first_chunk, tokens), blockIdx.y);
}
