// R, A, K and B of wkv7_chunk.cuh for 64 of a head's channels at a time, in tiles of 64 columns.
//
// Needs what wkv7_slab.cuh needs.
#pragma once
#include "wkv7_slab.cuh"

constexpr int DECAY_CHANNELS = TILE_COLUMNS, DECAY_PARTS = SLABS;
constexpr bool DECAYS_COME_IN_PARTS = true;
#include "chunk_rows.cuh"

struct Operands { Slab<CHUNK_LEN> a, r, b, k; };  // A R B K
struct RawKeys {
    T_IO r[CHUNK_LEN][TILE_COLUMNS], a[CHUNK_LEN][TILE_COLUMNS], k[CHUNK_LEN][TILE_COLUMNS], b[CHUNK_LEN][TILE_COLUMNS];
};

// The rows of a chunk in global memory: its first token, and what lies between two tokens.
struct Rows { const T_IO* first; i64 stride; };
struct KeyRows { Rows r, a, k, b; };

__device__ inline void copy_keys(RawKeys& raw, const KeyRows& rows, int first_channel, int steps) {
    // none behind the head
    const int width = HEAD_SIZE == SLABS * TILE_COLUMNS ? TILE_COLUMNS : min(TILE_COLUMNS, HEAD_SIZE - first_channel);
    const auto copy = [&](T_IO(&target)[CHUNK_LEN][TILE_COLUMNS], const Rows& from) {
        copy_rows<T_IO, HEAD_SIZE, CHUNK_LEN, TILE_COLUMNS, TILE_COLUMNS, NUM_THREADS>(
            target[0], from.first + first_channel, from.stride, steps, width, threadIdx.x);
    };
    copy(raw.r, rows.r), copy(raw.a, rows.a), copy(raw.k, rows.k), copy(raw.b, rows.b);
}

// The operands of a thread's tokens, of which `origin` is the frame's.
template <Order ORDER>
__device__ inline void write_operands(const RateSums& sums, float2 origin, const RawKeys& raw, Operands& operands,
                                      int first_channel, float scale) {
    const int index = threadIdx.x % PAIRS, segment = threadIdx.x / PAIRS, column = column_pair<ORDER>(index);
    const int channel = first_channel + 2 * index;
    const bool has_first = has_channel(channel), has_second = has_channel(channel + 1);
    float2 grown = {exp2_fast(origin.x), exp2_fast(origin.y)};  // of the token before
    constexpr int BATCH = min_of(SEGMENT_LEN, 4);  // tokens read at once, before anything is written
#pragma unroll
    for (int first = 0; first < SEGMENT_LEN; first += BATCH) {
        unsigned words[BATCH][4];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = segment * SEGMENT_LEN + first + i;
            const auto word = [&](const T_IO (&rows)[CHUNK_LEN][TILE_COLUMNS]) {
                return *reinterpret_cast<const unsigned*>(&rows[token][2 * index]);
            };
            words[i][0] = word(raw.r), words[i][1] = word(raw.a), words[i][2] = word(raw.k), words[i][3] = word(raw.b);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = segment * SEGMENT_LEN + first + i;
            const float2 sum = sums.at[first + i];
            const float2 c = {origin.x + RATE_UNIT * sum.x, origin.y + RATE_UNIT * sum.y};
            const float2 shrink = {exp2_fast(-c.x), exp2_fast(-c.y)};
            const auto write = [&](Slab<CHUNK_LEN>& tile, unsigned word, float2 factor) {
                const float2 x = unpack(word);  // past the last channel it is anything
                *word_of(tile, token, column) =
                    pack(has_first ? x.x * factor.x : 0.0f, has_second ? x.y * factor.y : 0.0f);
            };
            write(operands.a, words[i][1], grown);
            write(operands.k, words[i][2], shrink);
            write(operands.b, words[i][3], shrink);
            grown = {exp2_fast(c.x), exp2_fast(c.y)};
            write(operands.r, words[i][0], {grown.x * scale, grown.y * scale});
        }
    }
}
