// Where a half of a layer begins, in training: the residual, its norm, and mixes of a token with the one before it. Per
// token t of a text:
//
//     z_t = x_t + add_t;  n_t = (z_t - mean) / sqrt(variance + eps) weight + bias;  mixed_m[t] = n_t + (n_{t-1} - n_t) mixes_m
//
//   x            [rows, CHANNELS]  T_IO  in
//   add          [rows, CHANNELS]  T_MIXED  in with HAS_ADD, else null
//   weight, bias  [CHANNELS]  T_WEIGHT, T_BIAS  in       mixes  [MIXES, CHANNELS]  T_MIXES  in
//   first        [texts, CHANNELS]  T_MIXED  in with HAS_FIRST, else null, for zeros: n of the token before a text
//   cu_seqlens   [texts + 1]  int32 or int64  in where PACKED: where texts begin and end; else each has `tokens` rows
//   residual     [rows, CHANNELS]  T_IO  out, or null: z
//   mixed0, ...  [rows, CHANNELS]  T_MIXED  out, MIXES of them
//   last         [texts, CHANNELS]  T_MIXED  out: n of the last token of a text; of one without tokens its `first`
//   stats        [rows, 2]  fp32  out, or null: the mean and 1 / sqrt(variance + eps), for the backward
//
// What is normed is z as it is stored, and n_{t-1} is rounded as `last` is: so it does not matter where a text is cut.
//
// Grid (rows / block_rows). A block makes the norm of the row before its first one once more.
#include "layer_rows.cuh"
#include "layer_texts.cuh"

constexpr int MOST_MIXES = 6;
static_assert(1 <= MIXES && MIXES <= MOST_MIXES, "mixes must be from 1 to 6");

struct Smem {
    Parts parts[2][1];  // of sums over a row
};

// A row of z as it comes from memory.
struct Incoming {
    Piece<T_IO> own[ITEMS];
    Piece<T_MIXED> added[HAS_ADD ? ITEMS : 1];
    __device__ void load(const T_IO* x, const T_MIXED* add, i64 row) {
        for_pieces([&](int n, int channel) {
            own[n].load(x + row * CHANNELS + channel);
            if constexpr (HAS_ADD) added[n].load(add + row * CHANNELS + channel);
        });
    }
    __device__ float at(int n, int i) const {
        return HAS_ADD ? rounded<T_IO>(own[n].at(i) + added[HAS_ADD ? n : 0].at(i)) : own[n].at(i);
    }
};

// n before a text, as it comes from memory.
__device__ inline Piece<T_MIXED> token_before(i64 text, const T_MIXED* first, int channel) {
    Piece<T_MIXED> token = {};
    if (HAS_FIRST && text >= 0) token.load(first + text * CHANNELS + channel);
    return token;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, max_of(1, 768 / NUM_THREADS)) layer_norm_shift(
    const T_IO* __restrict__ x, const T_MIXED* __restrict__ add, const T_WEIGHT* __restrict__ weight,
    const T_BIAS* __restrict__ bias, const T_MIXES* __restrict__ mixes, const T_MIXED* __restrict__ first,
    const Bound* __restrict__ cu_seqlens, T_IO* __restrict__ residual, T_MIXED* __restrict__ mixed0,
    T_MIXED* __restrict__ mixed1, T_MIXED* __restrict__ mixed2, T_MIXED* __restrict__ mixed3,
    T_MIXED* __restrict__ mixed4, T_MIXED* __restrict__ mixed5, T_MIXED* __restrict__ last,
    float* __restrict__ stats, i64 rows, i64 tokens, i64 texts, i64 block_rows, float eps) {
    __shared__ Smem smem;
    let_next_launch_begin();
    x = after_previous_launch(x);
    add = written_meanwhile(add), weight = written_meanwhile(weight), bias = written_meanwhile(bias);
    mixes = written_meanwhile(mixes), first = written_meanwhile(first), cu_seqlens = written_meanwhile(cu_seqlens);

    T_MIXED* const mixed[MOST_MIXES] = {mixed0, mixed1, mixed2, mixed3, mixed4, mixed5};
    if (PACKED && blockIdx.x == 0)
        for (i64 number = 0; number < texts; ++number)  // those without tokens
            if (cu_seqlens[number] >= cu_seqlens[number + 1])
                for_pieces([&](int, int channel) {
                    const Piece<T_MIXED> token = token_before(number, first, channel);
                    float x[VECTOR];
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) x[i] = token.at(i);
                    write(last + number * CHANNELS + channel, x);
                });

    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    Text text = text_of(begin, cu_seqlens, tokens, texts, rows);
    Incoming own, next;
    Row before = {};
    i64 row = text.begin < begin ? begin - 1 : begin;
    next.load(x, add, row);
    for (; row < end; ++row) {
        own = next;
        if (row + 1 < end) next.load(x, add, row + 1);
        const bool is_own = row >= begin;
        Row z;
        for_pieces([&](int n, int channel) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) z[n][i] = own.at(n, i);
            if (is_own && residual != nullptr) write(residual + row * CHANNELS + channel, z[n]);
        });
        const Statistics found = centre(z, eps, smem.parts[0], smem.parts[1]);
        if (is_own && threadIdx.x == 0 && stats != nullptr)
            stats[2 * row] = found.mean, stats[2 * row + 1] = found.factor;
        if (is_own && row == text.end) text = text_of(row, cu_seqlens, tokens, texts, rows);
        for_pieces([&](int n, int channel) {
            Piece<T_WEIGHT> slope;
            Piece<T_BIAS> offset;
            slope.load(weight + channel), offset.load(bias + channel);
            if (row == text.begin) {
                const Piece<T_MIXED> token = token_before(text.number, first, channel);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) before[n][i] = token.at(i);
            }
            float change[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                z[n][i] = z[n][i] * found.factor * slope.at(i) + offset.at(i);
                change[i] = before[n][i] - z[n][i], before[n][i] = rounded<T_MIXED>(z[n][i]);
            }
            if (!is_own) return;
#pragma unroll
            for (int m = 0; m < MIXES; ++m) {
                Piece<T_MIXES> mix;
                mix.load(mixes + m * CHANNELS + channel);
                float result[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) result[i] = z[n][i] + change[i] * mix.at(i);
                write(mixed[m] + row * CHANNELS + channel, result);
            }
            if (row + 1 == text.end && text.number >= 0) write(last + text.number * CHANNELS + channel, z[n]);
        });
    }
}
