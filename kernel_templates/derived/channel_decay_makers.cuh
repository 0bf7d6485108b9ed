// Kimi Delta Attention, 64 tokens of a head at once: what two groups of four warps make of a chunk before its state is
// there, in shared memory. Each has 64 of the channels, a warp of it a block of 16 tokens, and a lane a pair of
// channels. With everything as in channel_decay_group_forward.cu.
//
// A block is in a frame of its own: with f a number between the sums of logarithms at its start and at its end,
//
//     rows  Q e^(c - f), K e^(c - f)    columns  K e^(f - c)    written  K e^(D - c)
//
// A frame is a whole power of two. So the way from one frame to another rounds nothing: for products of two blocks,
// rows are multiplied by the power from their frame to that of the other block's columns; for products with the state,
// the state is multiplied by the power from the chunk's start to the frame of a block's rows.
//
// Where a channel decays by more than 2^-125 in a block (e^-14 with float16), its rows are in a frame at the block's
// start and its columns in one at its end. Nothing overflows; but the products of the block's tokens with each other
// are made one by one.
//
// Norms and rates are factors of rows and columns of products.
//
// Needs what channel_decay_rows.cuh needs, and LARGEST_DECAY, SHARED_BYTES, KEEPS.
#pragma once
#include "channel_decay_rows.cuh"

// Of a block, base 2, with one bit for what a frame's power is rounded by. Where two blocks meet, tokens may hardly
// forget each other, though both blocks lose this: so the power between their frames has to be a number of 16 bits.
constexpr float LEAST_IN_FRAME = 1.0f - (is_bf16<T_IO> ? 126.0f : 2.0f * LOG2_E * LARGEST_DECAY);
// Chunks whose token matrices are there at once: with wide gates there is no room for two.
constexpr int AHEAD = sizeof(T_W) == 2 ? 2 : 1;

struct Solver {
    Slab<CHUNK_LEN> lower;  // -L, without the blocks on its diagonal
    Slab<BLOCK> turned[4];
    float diagonal[4][BLOCK][BLOCK + 4];  // its blocks there, a column per row
};
struct TileWork {
    Slab<CHUNK_LEN> columns[SLABS];
    Solver solver;
};
union Work {
    TileWork tiles;
    float sums[CHUNK_LEN][HEAD_SIZE];  // of logarithms, where products are made one by one
};
// A factor of each channel, two to a word: a lane of four has its 16 words side by side, as left operands have them.
struct Powers {
    uint4 words[4][HEAD_SIZE / 32];

    // Of channels 2 `pair` and 2 `pair` + 1, by their logarithms.
    __device__ void write(int pair, float2 logarithms) {
        unsigned* row = reinterpret_cast<unsigned*>(words[pair % 4]);
        row[pair / 8 * 2 + pair % 8 / 4] = pack(exp2_fast(logarithms.x), exp2_fast(logarithms.y));
    }
    // Left operands of 64 channels, times these.
    __device__ void multiply(Fragment (&rows)[TILE_COLUMNS / 16], int slab) const {
#pragma unroll
        for (int i = 0; i < TILE_COLUMNS / 32; ++i) {
            const uint4 four = words[quad_lane()][slab * TILE_COLUMNS / 32 + i];
            const unsigned factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                unsigned& word = rows[2 * i + j / 4].at[j % 4];
                const unsigned factor = factors[j / 4 * 2 + j % 4 / 2];
                if constexpr (is_bf16<T_IO>) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(word) : "r"(factor));
                else asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(word) : "r"(factor));
            }
        }
    }
};

struct __align__(1024) Smem {
    Rows rows[2];
    TokenMatrices matrices[AHEAD];
    Slab<CHUNK_LEN> values[2][2];  // by chunk and group; later Y
    T_W w[CHUNK_LEN][HEAD_SIZE];
    Work work;
    float diagonals[SLABS][3][CHUNK_LEN];  // k . k, q . q and q . k of tokens, over 64 of the channels
    float totals[BLOCKS][HEAD_SIZE];       // of blocks: sums of logarithms
    Factors factors[2];
    Powers from_start[2][BLOCKS];          // from the chunk's start to the frames of rows
    Powers to_columns[BLOCKS];             // from a block's rows to the columns of the block before
    Powers between_columns[BLOCKS];        // from the columns of the block behind to a block's
    Powers to_first_columns[2];            // from the last block's rows to its start, and to the first one's columns
    float diagonal[CHUNK_LEN];             // of M
    alignas(16) int leaves[2 * BLOCKS];    // whether a warp's channels leave the frame
    CopyBarrier ready[2], rows_free[2], free[2];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// Products of tokens from `row` on with keys from `column` on, as M has them, or -L.
__device__ inline void scale_pairs(Accumulator (&pairs)[2], const Factors& factors, int row, int column,
                                   bool is_query) {
    const float* of_row = is_query ? factors.of_q : factors.of_k;
    const float rows[2] = {of_row[row + group()], of_row[row + group() + 8]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float2 written = reinterpret_cast<const float2&>(factors.written[column + 8 * n + 2 * quad_lane()]);
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[n][j] *= rows[j / 2] * (is_query ? 1.0f : j % 2 ? -written.y : -written.x);
    }
}

// The same, with the token matrices of the forward.
struct Maker : RowMaker<Smem> {
    using RowMaker<Smem>::RowMaker;
    __device__ static void synchronize_group() { synchronize_threads(2, GROUP_THREADS); }  // the first one
    // Until all is read of the chunk that had a chunk's place before.
    __device__ void wait_for_place(int of_chunk) const {
        if (of_chunk > 1) wait_for(smem.free[of_chunk % 2], (of_chunk / 2 - 1) % 2);
    }
    __device__ TokenMatrices& matrices() const { return smem.matrices[chunk % AHEAD]; }

    // Makes rows, columns and token matrices of the chunk, but Tm. `copy_gates` and `copy_rows` begin to copy the next
    // one's.
    template <typename CopyGates, typename CopyRows>
    __device__ void make(Factors& factors, float beta, float scale, CopyGates copy_gates, CopyRows copy_rows) {
        Accumulator own[2] = {};  // products of a block that leaves the frame
        float sums[BLOCK][2];
        sum_decays(sums);
        __syncwarp();  // the warp's gates are read
        copy_gates();
        const float2 total = {sums[BLOCK - 1][0], sums[BLOCK - 1][1]};
        const bool fits = total.x >= LEAST_IN_FRAME && total.y >= LEAST_IN_FRAME;
        reinterpret_cast<float2&>(smem.totals[p][channel]) = total;
        smem.leaves[BLOCKS * slab + p] = !__all_sync(0xffffffffu, fits);
        synchronize();  // the sums over all blocks are there
        wait_for_place(chunk);
        write_factors(factors, beta, scale);
        const int4 one = reinterpret_cast<const int4&>(smem.leaves[0]);
        const int4 other = reinterpret_cast<const int4&>(smem.leaves[BLOCKS]);
        const int4 leave = {one.x | other.x, one.y | other.y, one.z | other.z, one.w | other.w};
        const bool is_direct = p == 0 ? leave.x : p == 1 ? leave.y : p == 2 ? leave.z : leave.w;
        if (leave.x | leave.y | leave.z | leave.w) multiply_directly(own, sums, is_direct);

        const Frame frame = p == 0   ? find_frame<0>(factors)
                            : p == 1 ? find_frame<1>(factors)
                            : p == 2 ? find_frame<2>(factors)
                                     : find_frame<3>(factors);
        forget_addresses();
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) {
            const float x = sums[t][0], y = sums[t][1];
            const float2 k = scale_rows(t, {exp2_fast(x - frame.of_rows.x), exp2_fast(y - frame.of_rows.y)});
            const float2 column = {k.x * exp2_fast(frame.of_columns.x - x), k.y * exp2_fast(frame.of_columns.y - y)};
            *word_of(smem.work.tiles.columns[slab], first, t, lane) = pack(column.x, column.y);
            *word_of(rows().written[slab], first, t, lane) = pack(column.x * frame.to_end.x, column.y * frame.to_end.y);
        }
        publish_writes();
        synchronize();  // rows, columns and factors are there
        if (AHEAD == 1) wait_for_place(chunk + 1);
        multiply_pairs(factors, own, is_direct);
        copy_rows();
    }
    // Of the warp's block and a lane's channels: frames, from the block's start on, base 2; and the decays from the
    // columns' frame to the chunk's end.
    struct Frame { float2 of_rows, of_columns, to_end; };
    // Says also what is multiplied from frame to frame.
    template <int P> __device__ Frame find_frame(Factors& factors) {
        float whole[BLOCKS][2], row[2], column[2], rest[2];
        float from_start[2], to_column[2], behind[2], to_last[2] = {}, from_last[2] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const float2 both = reinterpret_cast<const float2&>(smem.totals[b][channel]);
            whole[b][0] = both.x, whole[b][1] = both.y;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const auto fits = [&](int b) { return whole[b][j] >= LEAST_IN_FRAME; };
            // Of block b, which begins at `start`: a sum in the order of blocks, so that all warps find the same.
            const auto row_frame = [&](int b, float start) {
                return rintf(start + (fits(b) ? 0.5f : 0.0f) * whole[b][j]);
            };
            const auto column_frame = [&](int b, float start) {
                return rintf(start + (fits(b) ? 0.5f : 1.0f) * whole[b][j]);
            };
            float start = 0.0f, before = 0.0f;
#pragma unroll
            for (int b = 0; b < P; ++b) {
                if (b == P - 1) before = column_frame(b, start);
                start += whole[b][j];
            }
            const float of_rows = row_frame(P, start), of_columns = column_frame(P, start);
            float end = start + whole[P][j];
            behind[j] = P + 1 < BLOCKS ? column_frame(P + 1 < BLOCKS ? P + 1 : P, end) - of_columns : 0.0f;
#pragma unroll
            for (int b = P + 1; b < BLOCKS; ++b) {
                if (P == 0 && b == BLOCKS - 1)
                    to_last[j] = row_frame(b, end) - rintf(end), from_last[j] = rintf(end) - of_columns;
                end += whole[b][j];
            }
            from_start[j] = of_rows, to_column[j] = of_rows - before, rest[j] = end - of_columns;
            row[j] = of_rows - start, column[j] = of_columns - start;
            if (P == 0) factors.end[channel + j] = exp2_fast(end);
        }
        smem.from_start[chunk % 2][P].write(channel / 2, {from_start[0], from_start[1]});
        if (P == 0) {
            smem.to_first_columns[0].write(channel / 2, {to_last[0], to_last[1]});
            smem.to_first_columns[1].write(channel / 2, {from_last[0], from_last[1]});
        }
        if (P > 0) smem.to_columns[P].write(channel / 2, {to_column[0], to_column[1]});
        if (P < BLOCKS - 2) smem.between_columns[P].write(channel / 2, {behind[0], behind[1]});
        return {{row[0], row[1]}, {column[0], column[1]}, {exp2_fast(rest[0]), exp2_fast(rest[1])}};
    }

    // Products of the tokens of a block with each other, one by one, where the warp's block leaves its frame. The first
    // group takes keys, the second queries. All warps come here, as they read what others write.
    __device__ void multiply_directly(Accumulator (&pairs)[2], const float (&sums)[BLOCK][2], bool is_direct) const {
        auto& of = smem.work.sums;
#pragma unroll
        for (int t = 0; t < BLOCK; ++t) reinterpret_cast<float2&>(of[first + t][channel]) = {sums[t][0], sums[t][1]};
        synchronize();  // the sums are there
        if (is_direct) {
            auto& left = slab == 0 ? rows().k : rows().q;
#pragma unroll 1
            for (int t = 1; t < BLOCK; ++t)
#pragma unroll 1
                for (int s = 0; s < t; ++s) {
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 0; i < SLABS; ++i) {
                        const int c = i * TILE_COLUMNS + 2 * lane;
                        const float2 upper = reinterpret_cast<const float2&>(of[first + t][c]);
                        const float2 lower = reinterpret_cast<const float2&>(of[first + s][c]);
                        const float2 x = unpack(*word_of(left[i], first + t, lane));
                        const float2 k = unpack(*word_of(rows().k[i], first + s, lane));
                        sum += x.x * k.x * exp2_fast(upper.x - lower.x) + x.y * k.y * exp2_fast(upper.y - lower.y);
                    }
#pragma unroll
                    for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
                    const bool is_here = group() == t % 8 && quad_lane() == s % 8 / 2;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (is_here && i == s / 8 * 4 + t / 8 * 2 + s % 2) pairs[i / 4][i % 4] = sum;
                }
        }
        synchronize();  // rows are read as they came, and so are the sums
    }

    // -L, by the first group, and M, by the second: the warp's row of blocks, from the diagonal on. That of the last
    // block is shared with the first, which has one alone.
    __device__ void multiply_pairs(const Factors& factors, const Accumulator (&own)[2], bool is_direct) const {
        Left left;
        load_rows(left, first);
#pragma unroll
        for (int b = BLOCKS - 1; b >= 0; --b) {
            if (b > p || (b == 0 && p == BLOCKS - 1)) continue;
            if (b < p) multiply_rows_by(b == p - 1 ? smem.to_columns[p] : smem.between_columns[b], left);
            Accumulator pairs[2] = {};
            if (b == p && is_direct) {
#pragma unroll
                for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = own[i / 4][i % 4];
            } else {
                multiply_columns(pairs, left, b);
            }
            write_pairs(factors, pairs, p, b);
        }
        if (p > 0) return;
        load_rows(left, BLOCK * (BLOCKS - 1));
        for (int i = 0; i < 2; ++i) multiply_rows_by(smem.to_first_columns[i], left);
        Accumulator pairs[2] = {};
        multiply_columns(pairs, left, 0);
        write_pairs(factors, pairs, BLOCKS - 1, 0);
    }
    using Left = Fragment[SLABS][TILE_COLUMNS / 16];
    __device__ static auto tile(const Slab<CHUNK_LEN> (&slabs)[SLABS]) {
        return SlabsTile<sizeof(Slab<CHUNK_LEN>)>{shared_address(&slabs[0].units[0][0])};
    }
    __device__ void load_rows(Left& left, int token) const {
        const auto of_rows = tile(slab > 0 ? rows().q : rows().k);
#pragma unroll
        for (int c = 0; c < HEAD_SIZE / 16; ++c) left[c / 4][c % 4] = load_left(of_rows, token, 16 * c);
    }
    __device__ static void multiply_rows_by(const Powers& powers, Left& left) {
#pragma unroll
        for (int i = 0; i < SLABS; ++i) powers.multiply(left[i], i);
    }
    __device__ void multiply_columns(Accumulator (&pairs)[2], const Left& left, int b) const {
        const auto of_columns = tile(smem.work.tiles.columns);
        Accumulator more[2] = {};  // a sum over half of the channels does not wait for that over the others
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS; c += 16) {
            multiply_add(pairs, left[0][c / 16], load_right_transposed(of_columns, 16 * b, c));
            multiply_add(more, left[1][c / 16], load_right_transposed(of_columns, 16 * b, TILE_COLUMNS + c));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] += more[i / 4][i % 4];
    }
    // Block (`of_rows`, b) of M, or of -L.
    __device__ void write_pairs(const Factors& factors, Accumulator (&pairs)[2], int of_rows, int b) const {
        const bool is_query = slab > 0;
        Solver& solver = smem.work.tiles.solver;
        scale_pairs(pairs, factors, 16 * of_rows, 16 * b, is_query);
        if (b == of_rows)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = group() + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * quad_lane() + i % 2;
                float& pair = pairs[i / 4][i % 4];
                if (!is_query) solver.diagonal[b][column][row] = pair;
                else pair = column < row ? pair : column == row ? smem.diagonal[16 * b + row] : 0.0f;
            }
        if (is_query || b < of_rows)
            store_block(tile_of(is_query ? matrices().m : solver.lower), 16 * of_rows, 16 * b,
                        to_fragment(pairs[0], pairs[1]));
    }

    // Of the token matrices the one that the group made, for the backward.
    __device__ void keep(TokenMatrices& target) const {
        constexpr int UNITS = sizeof(Slab<CHUNK_LEN>) / sizeof(uint4);
        const uint4* from = reinterpret_cast<const uint4*>(slab == 0 ? &matrices().tm : &matrices().m);
        uint4* to = reinterpret_cast<uint4*>(slab == 0 ? &target.tm : &target.m);
#pragma unroll
        for (int i = 0; i < UNITS; i += GROUP_THREADS) {
            const int unit = i + threadIdx.x % GROUP_THREADS;
            write_global(to + unit, from[unit]);
        }
    }
    // Tm, block by block. Of two blocks the one below them is Tm_11 (-L)_10 Tm_00.
    __device__ void solve() const {
        const auto tm = tile_of(matrices().tm), lower = tile_of(smem.work.tiles.solver.lower);
        Slab<BLOCK>& turned = smem.work.tiles.solver.turned[p];
        solve_block(smem.work.tiles.solver.diagonal[p], turned);
        store_block_transposed(tm, first, first, load_left(tile_of(turned), 0, 0));
        synchronize_group();  // -L and the blocks on the diagonal are there
        if (p < 2) {
            const int top = 32 * p, bottom = top + 16;
            Accumulator carried[2] = {}, sum[2] = {};
            multiply_add(carried, load_left_transposed(tm, top, top), load_right_transposed(lower, bottom, top));
            multiply_add(sum, load_left(tm, bottom, bottom), transposed(to_fragment(carried[0], carried[1])));
            store_block(tm, bottom, top, to_fragment(sum[0], sum[1]));
        }
        synchronize_group();
        if (p < 2) {
            Right carried[2];  // rows 32 and 48 of -L Tm, of this warp's columns
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Accumulator sum[2] = {};
#pragma unroll
                for (int q = 0; q < 2; ++q)  // above the diagonal there are zeros
                    multiply_add(sum, load_left_transposed(tm, 16 * q, 16 * p),
                                 load_right_transposed(lower, 32 + 16 * i, 16 * q));
                carried[i] = transposed(to_fragment(sum[0], sum[1]));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Accumulator sum[2] = {};
#pragma unroll
                for (int q = 0; q <= i; ++q) multiply_add(sum, load_left(tm, 32 + 16 * i, 32 + 16 * q), carried[q]);
                store_block(tm, 32 + 16 * i, 16 * p, to_fragment(sum[0], sum[1]));
            }
        }
    }
};
