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
// by that from the chunk's start to their frame, by those that have the state, once all pairs of rows are made.
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
    Slab<CHUNK_LEN> lower;  // -L, with blocks of Tm on its diagonal, their columns as rows
    float diagonal[4][BLOCK][BLOCK + 4];  // what -L has there, a column per row
};
struct TileWork {
    Slab<CHUNK_LEN> columns[SLABS];
    Solver solver;
};
union Work {
    TileWork tiles;
    float sums[CHUNK_LEN][HEAD_SIZE];  // of logarithms, where products are made one by one
};
// A factor of each channel, two to a word: what a lane of four needs at once lies side by side, as left operands have
// it, and lanes beside each other read what lies in different banks.
struct Powers {
    uint4 words[HEAD_SIZE / 32][4];

    // Of channels 2 `pair` and 2 `pair` + 1, by their logarithms.
    __device__ void write(int pair, float2 logarithms) {
        unsigned* of_lane = reinterpret_cast<unsigned*>(&words[pair / 16][pair % 4]);
        of_lane[pair % 16 / 8 * 2 + pair % 8 / 4] = pack(exp2_fast(logarithms.x), exp2_fast(logarithms.y));
    }
    // Left operands of 64 channels, times these.
    __device__ void multiply(Fragment (&rows)[TILE_COLUMNS / 16], int slab) const {
#pragma unroll
        for (int i = 0; i < TILE_COLUMNS / 32; ++i) {
            const uint4 four = words[slab * TILE_COLUMNS / 32 + i][quad_lane()];
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
    Slab<CHUNK_LEN> written[2][SLABS];  // by chunk: what is added to the state
    Slab<CHUNK_LEN> tm[AHEAD], m[2];
    Slab<CHUNK_LEN> values[2][2];  // by chunk and group; later Y
    T_W w[CHUNK_LEN][HEAD_SIZE];
    Work work;
    float diagonals[SLABS][3][CHUNK_LEN];  // k . k, q . q and q . k of tokens, over 64 of the channels
    float totals[BLOCKS][HEAD_SIZE];       // of blocks: sums of logarithms
    Factors factors[2];
    Powers from_start[2][BLOCKS];          // by chunk: from its start to the frames of rows
    Powers to_columns[BLOCKS - 1];         // from rows of the block behind to a block's columns
    Powers between_columns[BLOCKS - 2];    // from the columns of the block behind to a block's
    Powers to_first_columns[2];            // from the last block's rows to its start, and to the first one's columns
    alignas(16) int leaves[2][2 * BLOCKS];  // by chunk: whether a warp's channels leave the frame
    CopyBarrier ready[2], rows_free[2], free[2], columns_free;
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

__device__ inline auto tile_of(const Slab<CHUNK_LEN> (&slabs)[SLABS]) {
    return SlabsTile<sizeof(Slab<CHUNK_LEN>)>{shared_address(&slabs[0].units[0][0])};
}
// Pairs of tokens, in blocks of 16 x 16, by the warps of two groups: those of the first make the blocks on the
// diagonal, those of the other what is below. A warp has the rows of one block of tokens, `row`.
struct Pairs {
    Smem& smem;
    const int half, p, row;
    Fragment left[SLABS][TILE_COLUMNS / 16];

    __device__ Pairs(Smem& smem, int half) : smem(smem), half(half), p(warp_id() % 4), row(min(p + half, BLOCKS - 1)) {}
    // Of queries, or of keys.
    __device__ void load(const Slab<CHUNK_LEN> (&rows)[SLABS]) {
#pragma unroll
        for (int c = 0; c < HEAD_SIZE / 16; ++c)
            left[c / 4][c % 4] = load_left(tile_of(rows), BLOCK * row, 16 * c);
    }
    // `write` gets the column of each block, and its sums. Without `diagonal` others make the blocks there.
    template <typename Write> __device__ void make(bool diagonal, Write write) {
        if (half == 0) {
            if (diagonal) multiply(row, write);
        } else if (p < BLOCKS - 1) {
            leave_frame(smem.to_columns[row - 1]);
            multiply(row - 1, write);
            if (p == 0) return;
            leave_frame(smem.between_columns[row - 2]);
            multiply(row - 2, write);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) leave_frame(smem.to_first_columns[i]);
            multiply(0, write);
        }
    }
    __device__ void leave_frame(const Powers& power) {
#pragma unroll
        for (int i = 0; i < SLABS; ++i) power.multiply(left[i], i);
    }
    template <typename Write> __device__ void multiply(int b, Write write) const {
        const auto of_columns = tile_of(smem.work.tiles.columns);
        const int row = BLOCK * fresh(b);  // so that no addresses are kept
        Accumulator pairs[2] = {}, more[2] = {};  // half of the channels does not wait for the others
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS; c += 16) {
            multiply_add(pairs, left[0][c / 16], load_right_transposed(of_columns, row, c));
            multiply_add(more, left[1][c / 16], load_right_transposed(of_columns, row, TILE_COLUMNS + c));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] += more[i / 4][i % 4];
        write(b, pairs);
    }
};
__device__ inline void scale_pairs(Accumulator (&pairs)[2], const float* of_rows) {
    const float rows[2] = {of_rows[group()], of_rows[group() + 8]};
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] *= rows[i % 4 / 2];
}
// The row and the column that a lane's sum i has in a block.
__device__ inline int row_of(int i) { return group() + i % 4 / 2 * 8; }
__device__ inline int column_of(int i) { return i / 4 * 8 + 2 * quad_lane() + i % 2; }
// Block (row, b) of M.
__device__ inline void write_query_pairs(Slab<CHUNK_LEN>& m, const Factors& factors, Accumulator (&pairs)[2], int row,
                                         int b) {
    scale_pairs(pairs, &factors.of_q[BLOCK * row]);
    if (b == row)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& pair = pairs[i / 4][i % 4];
            const int t = row_of(i), s = column_of(i);
            pair = s < t ? pair : s == t ? factors.of_both[BLOCK * row + t] : 0.0f;
        }
    store_block(tile_of(m), BLOCK * row, BLOCK * fresh(b), to_fragment(pairs[0], pairs[1]));
}

// Makes rows, and with them -L and Tm.
struct Maker : RowMaker<Smem> {
    using RowMaker<Smem>::RowMaker;
    __device__ static void synchronize_group() { synchronize_threads(2, GROUP_THREADS); }  // the first one
    // Until all is read of the chunk that had a chunk's place before.
    __device__ void wait_for_place(int of_chunk) const {
        if (of_chunk > 1) wait_for(smem.free[of_chunk % 2], (of_chunk / 2 - 1) % 2);
    }

    // Makes rows, columns and -L of the chunk, and what of M lies in a block that leaves its frame. `copy_gates` and
    // `copy_rows` begin to copy the next one's.
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
        smem.leaves[chunk % 2][BLOCKS * slab + p] = !__all_sync(0xffffffffu, fits);
        synchronize();  // the sums over all blocks are there
        wait_for_place(chunk);
        write_factors(factors, beta, scale);
        if (chunk > 0) wait_for(smem.columns_free, (chunk - 1) % 2);
        const int4 one = reinterpret_cast<const int4&>(smem.leaves[chunk % 2][0]);
        const int4 other = reinterpret_cast<const int4&>(smem.leaves[chunk % 2][BLOCKS]);
        const int4 leave = {one.x | other.x, one.y | other.y, one.z | other.z, one.w | other.w};
        const bool is_direct = p == 0 ? leave.x : p == 1 ? leave.y : p == 2 ? leave.z : leave.w;
        if (leave.x | leave.y | leave.z | leave.w) multiply_directly(own, sums, is_direct);

        const Frame frame = p == 0   ? find_frame<0>(factors)
                            : p == 1 ? find_frame<1>(factors)
                            : p == 2 ? find_frame<2>(factors)
                                     : find_frame<3>(factors);
        forget_addresses();
        scale_rows(
            [&](int t) -> float2 {
                return {exp2_fast(sums[t][0] - frame.of_rows.x), exp2_fast(sums[t][1] - frame.of_rows.y)};
            },
            [&](int t, float2 k) {
                const float2 column = {k.x * exp2_fast(frame.of_columns.x - sums[t][0]),
                                       k.y * exp2_fast(frame.of_columns.y - sums[t][1])};
                *word_of(smem.work.tiles.columns[slab], first, t, lane) = pack(column.x, column.y);
                *word_of(written(), first, t, lane) = pack(column.x * frame.to_end.x, column.y * frame.to_end.y);
            });
        publish_writes();
        synchronize();  // rows, columns and factors are there
        copy_rows();
        Pairs pairs(smem, slab);
        pairs.load(rows().k);
        pairs.make(!is_direct, [&](int b, Accumulator (&sums)[2]) { write_key_pairs(factors, sums, pairs.row, b); });
        if (is_direct) {
            if (slab == 0) write_key_pairs(factors, own, p, p);
            else write_query_pairs(smem.m[chunk % 2], factors, own, p, p);
        }
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
        if (P > 0) smem.to_columns[P > 0 ? P - 1 : 0].write(channel / 2, {to_column[0], to_column[1]});
        if (P < BLOCKS - 2) smem.between_columns[P < BLOCKS - 2 ? P : 0].write(channel / 2, {behind[0], behind[1]});
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

    // Block (row, b) of -L.
    __device__ void write_key_pairs(const Factors& factors, Accumulator (&pairs)[2], int row, int b) const {
        Solver& solver = smem.work.tiles.solver;
        scale_pairs(pairs, &factors.of_k[BLOCK * row]);
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] *= -factors.written[BLOCK * b + column_of(i)];
        if (b < row) store_block(tile_of(solver.lower), BLOCK * row, BLOCK * fresh(b), to_fragment(pairs[0], pairs[1]));
        else
#pragma unroll
            for (int i = 0; i < 8; ++i) solver.diagonal[b][column_of(i)][row_of(i)] = pairs[i / 4][i % 4];
    }
    // Tm, block by block, by the first group. Of two blocks the one below them is Tm_11 (-L)_10 Tm_00.
    __device__ void solve() const {
        const int first = fresh(this->first);
        const auto tm = tile_of(smem.tm[chunk % AHEAD]), lower = tile_of(smem.work.tiles.solver.lower);
        solve_block(smem.work.tiles.solver.diagonal[p], smem.work.tiles.solver.lower, first);
        store_block_transposed(tm, first, first, load_left(lower, first, first));
        synchronize();  // -L and the blocks on the diagonal are there
        if (p < 2) {
            const int top = 2 * first, bottom = top + 16;
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
                    multiply_add(sum, load_left_transposed(tm, 16 * q, first),
                                 load_right_transposed(lower, 32 + 16 * i, 16 * q));
                carried[i] = transposed(to_fragment(sum[0], sum[1]));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Accumulator sum[2] = {};
#pragma unroll
                for (int q = 0; q <= i; ++q) multiply_add(sum, load_left(tm, 32 + 16 * i, 32 + 16 * q), carried[q]);
                store_block(tm, 32 + 16 * i, first, to_fragment(sum[0], sum[1]));
            }
        }
    }
};
