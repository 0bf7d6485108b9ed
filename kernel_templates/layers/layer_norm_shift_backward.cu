// Gradients of layer_norm_shift. With u = (z - mean) factor, n = u weight + bias, s_t = sum_m grad_mixed_m[t] mixes_m:
//
//     dn_t = sum_m grad_mixed_m[t] - s_t + s_{t+1} + grad_last at the last token of a text
//     dz_t = factor (dn_t weight - mean(dn_t weight) - u_t mean(dn_t weight u_t)) + grad_residual[t]
//     dweight = sum_t dn_t u_t;   dbias = sum_t dn_t;   dmixes_m = sum_t grad_mixed_m[t] (n_{t-1} - n_t)
//
// with s_{t+1} = 0 behind the last token of a text, whose dfirst is s of its first token, or without tokens grad_last.
//
//   x            [rows, CHANNELS]  T_IO  in: the residual that the forward made, z
//   weight, bias, mixes, first, stats, cu_seqlens  as layer_norm_shift; stats are in
//   grad_residual  [rows, CHANNELS]  T_IO  in, or null
//   grad_mixed0, ...  [rows, CHANNELS]  T_MIXED  in, MIXES of them
//   grad_last    [texts, CHANNELS]  T_MIXED  in, or null
//   dx           [rows, CHANNELS]  T_IO  out, or null: dz
//   dweight_rows, dbias_rows  [blocks, CHANNELS]  fp32  out, or null: the sums of a block
//   dmixes_rows  [blocks, MIXES, CHANNELS]  fp32  out with SUMS_MIXES, or null: else layer_norm_shift_mixes makes them
//   dfirst       [texts, CHANNELS]  T_MIXED  out, or null
//
// Grid (rows / block_rows). A block goes from its last row to its first, and reads the row behind its last one too. What
// the row two before needs comes near meanwhile; where a thread has a single piece of a row of 16 bits, what the row before
// needs is on its way while sums and dz are made.
#include "layer_rows.cuh"
#include "layer_texts.cuh"

constexpr int MOST_MIXES = 6;
static_assert(1 <= MIXES && MIXES <= MOST_MIXES, "mixes must be from 1 to 6");

struct Smem {
    Parts parts[2][2];  // of sums over a row, by turns
};

constexpr bool IS_AHEAD = ITEMS == 1 && sizeof(T_IO) == 2;

// A piece of the gradients of the mixes.
struct Grads {
    const T_MIXED* of[MOST_MIXES];
    Piece<T_MIXED> held[MIXES];
    __device__ void load(i64 place) {
#pragma unroll
        for (int m = 0; m < MIXES; ++m) held[m].load(of[m] + place);
    }
};

// A piece of a row of z, and the row's statistics.
struct Stored {
    Piece<T_IO> held;
    Statistics of;
    __device__ void load(const T_IO* x, i64 row, int channel) { held.load(x + row * CHANNELS + channel); }
    __device__ void load_statistics(const float* stats, i64 row) {
        of = {load_early<float>(stats + 2 * row), load_early<float>(stats + 2 * row + 1)};
    }
    __device__ float at(int i) const { return (held.at(i) - of.mean) * of.factor; }  // u
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_norm_shift_backward(
    const T_IO* __restrict__ x, const T_WEIGHT* __restrict__ weight, const T_BIAS* __restrict__ bias,
    const T_MIXES* __restrict__ mixes, const T_MIXED* __restrict__ first, const float* __restrict__ stats,
    const Bound* __restrict__ cu_seqlens, const T_IO* __restrict__ grad_residual,
    const T_MIXED* __restrict__ grad_mixed0, const T_MIXED* __restrict__ grad_mixed1,
    const T_MIXED* __restrict__ grad_mixed2, const T_MIXED* __restrict__ grad_mixed3,
    const T_MIXED* __restrict__ grad_mixed4, const T_MIXED* __restrict__ grad_mixed5,
    const T_MIXED* __restrict__ grad_last, T_IO* __restrict__ dx, float* __restrict__ dweight_rows,
    float* __restrict__ dbias_rows, float* __restrict__ dmixes_rows, T_MIXED* __restrict__ dfirst, i64 rows, i64 tokens,
    i64 texts, i64 block_rows) {
    __shared__ Smem smem;
    if (PACKED && dfirst != nullptr && blockIdx.x == 0)
        for (i64 number = 0; number < texts; ++number)  // those without tokens
            if (cu_seqlens[number] >= cu_seqlens[number + 1])
                for_pieces([&](int, int channel) {
                    const i64 place = number * CHANNELS + channel;
                    Piece<T_MIXED> token = {};
                    if (grad_last != nullptr) token.load(grad_last + place);
                    float own[VECTOR];
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) own[i] = token.at(i);
                    write(dfirst + place, own);
                });

    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    Text text = text_of(end - 1, cu_seqlens, tokens, texts, rows);
    Row dweight = {}, dbias = {}, dmixes[SUMS_MIXES ? MIXES : 1] = {}, behind = {};  // s of the row behind
    Grads grads{{grad_mixed0, grad_mixed1, grad_mixed2, grad_mixed3, grad_mixed4, grad_mixed5}};
    if (end < text.end)
        for_pieces([&](int n, int channel) {
            grads.load(end * CHANNELS + channel);
#pragma unroll
            for (int m = 0; m < MIXES; ++m) {
                Piece<T_MIXES> mix;
                mix.load(mixes + m * CHANNELS + channel);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) behind[n][i] += grads.held[m].at(i) * mix.at(i);
            }
        });
    const auto before = [](i64 row) { return max(row - 1, i64(0)); };  // of the first row of all it is not looked at
    Stored own, other, next;
    own.load_statistics(stats, end - 1), other.load_statistics(stats, before(end - 1));
    if constexpr (IS_AHEAD)
        for_pieces([&](int, int channel) {
            own.load(x, end - 1, channel), other.load(x, before(end - 1), channel);
            grads.load((end - 1) * CHANNELS + channel);
        });
    int turn = 0;
#pragma unroll 1
    for (i64 row = end - 1; row >= begin; --row, turn ^= 1) {
        const i64 start = row * CHANNELS;
        if (row - 2 >= begin)
            for_pieces([&](int, int channel) {
                const i64 place = start - 2 * CHANNELS + channel;
#pragma unroll
                for (int m = 0; m < MIXES; ++m) prefetch(grads.of[m] + place);
                if (grad_residual != nullptr) prefetch(grad_residual + place);
                prefetch(x + before(row - 2) * CHANNELS + channel);
            });
        Piece<T_IO> of_residual = {};
        if (IS_AHEAD && grad_residual != nullptr)
            for_pieces([&](int, int channel) { of_residual.load(grad_residual + start + channel); });
        const bool is_first = row == text.begin;
        const T_MIXED* const of_last = row + 1 == text.end && text.number >= 0 ? grad_last : nullptr;
        Row du;
        float sums[2] = {};  // of dn weight, and of that times u
        for_pieces([&](int n, int channel) {
            Piece<T_WEIGHT> slope;
            Piece<T_BIAS> offset;
            if constexpr (!IS_AHEAD) {
                own.load(x, row, channel), grads.load(start + channel);
                if constexpr (SUMS_MIXES) other.load(x, before(row), channel);
            }
            slope.load(weight + channel), offset.load(bias + channel);
            float change[VECTOR], dn[VECTOR], moved[VECTOR] = {};
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                change[i] = rounded<T_MIXED>(other.at(i) * slope.at(i) + offset.at(i));  // the token before
                dn[i] = behind[n][i];
            }
            if (is_first) {
                Piece<T_MIXED> token = {};
                if (HAS_FIRST && text.number >= 0) token.load(first + text.number * CHANNELS + channel);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) change[i] = token.at(i);
            }
            if (of_last != nullptr) {
                Piece<T_MIXED> token;
                token.load(of_last + text.number * CHANNELS + channel);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) dn[i] += token.at(i);
            }
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) change[i] -= own.at(i) * slope.at(i) + offset.at(i);
#pragma unroll
            for (int m = 0; m < MIXES; ++m) {
                Piece<T_MIXES> mix;
                mix.load(mixes + m * CHANNELS + channel);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    const float g = grads.held[m].at(i);
                    dn[i] += g, moved[i] += g * mix.at(i);
                    if constexpr (SUMS_MIXES) dmixes[m][n][i] += g * change[i];
                }
            }
            if (is_first && dfirst != nullptr && text.number >= 0)
                write(dfirst + text.number * CHANNELS + channel, moved);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                dn[i] -= moved[i], behind[n][i] = is_first ? 0.0f : moved[i];
                const float u = own.at(i);
                dbias[n][i] += dn[i], dweight[n][i] += dn[i] * u;
                du[n][i] = dn[i] * slope.at(i), sums[0] += du[n][i], sums[1] += du[n][i] * u;
            }
        });
        if (row > begin) {
            next.load_statistics(stats, before(row - 1));
            if constexpr (IS_AHEAD)
                for_pieces([&](int, int channel) {
                    grads.load(start - CHANNELS + channel), next.load(x, before(row - 1), channel);
                });
        }
        sum_block(sums, smem.parts[turn]);
        for_pieces([&](int n, int channel) {
            if constexpr (!IS_AHEAD) {
                own.load(x, row, channel);
                if (grad_residual != nullptr) of_residual.load(grad_residual + start + channel);
            }
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                du[n][i] = own.of.factor * (du[n][i] - (sums[0] + own.at(i) * sums[1]) * (1.0f / CHANNELS)) +
                           of_residual.at(i);
            if (dx != nullptr) write(dx + start + channel, du[n]);
        });
        if (is_first && row > begin) text = text_of(row - 1, cu_seqlens, tokens, texts, rows);
        own = other, other = next;
    }
    for_pieces([&](int n, int channel) {
        const i64 place = i64(blockIdx.x) * CHANNELS + channel;
        if (dweight_rows != nullptr) write(dweight_rows + place, dweight[n]);
        if (dbias_rows != nullptr) write(dbias_rows + place, dbias[n]);
        if (!SUMS_MIXES || dmixes_rows == nullptr) return;
#pragma unroll
        for (int m = 0; m < MIXES; ++m)
            write(dmixes_rows + (i64(blockIdx.x) * MIXES + m) * CHANNELS + channel, dmixes[SUMS_MIXES ? m : 0][n]);
    });
}
