// Gradients of the mixes of layer_norm_shift, where rows are too wide for layer_norm_shift_backward to add them up too:
//
//     dmixes_m = sum_t grad_mixed_m[t] (n_{t-1} - n_t)
//
//   x, weight, bias, first, stats, cu_seqlens, grad_mixed0, ...  as layer_norm_shift_backward
//   dmixes_rows  [blocks of rows, MIXES, CHANNELS]  fp32  out: the sums of a block
//
// Grid (rows / block_rows, channels / (VECTOR NUM_THREADS)). A thread has VECTOR channels of all rows of its block.
#include "layer.cuh"
#include "layer_texts.cuh"

constexpr int MOST_MIXES = 6;
static_assert(1 <= MIXES && MIXES <= MOST_MIXES, "mixes must be from 1 to 6");
static_assert(CHANNELS % VECTOR == 0, "a row consists of whole accesses");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_norm_shift_mixes(
    const T_IO* __restrict__ x, const T_WEIGHT* __restrict__ weight, const T_BIAS* __restrict__ bias,
    const T_MIXED* __restrict__ first, const float* __restrict__ stats, const Bound* __restrict__ cu_seqlens,
    const T_MIXED* __restrict__ grad_mixed0, const T_MIXED* __restrict__ grad_mixed1,
    const T_MIXED* __restrict__ grad_mixed2, const T_MIXED* __restrict__ grad_mixed3,
    const T_MIXED* __restrict__ grad_mixed4, const T_MIXED* __restrict__ grad_mixed5, float* __restrict__ dmixes_rows,
    i64 rows, i64 tokens, i64 texts, i64 block_rows) {
    const T_MIXED* const grads[MOST_MIXES] = {grad_mixed0, grad_mixed1, grad_mixed2,
                                              grad_mixed3, grad_mixed4, grad_mixed5};
    const int channel = (static_cast<int>(blockIdx.y) * NUM_THREADS + static_cast<int>(threadIdx.x)) * VECTOR;
    if (channel >= CHANNELS) return;
    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    Text text = text_of(begin, cu_seqlens, tokens, texts, rows);
    Piece<T_WEIGHT> slope;
    Piece<T_BIAS> offset;
    slope.load(weight + channel), offset.load(bias + channel);

    // n of a row that has been loaded.
    const auto normed = [&](const Piece<T_IO>& z, i64 row, float (&n)[VECTOR]) {
        const float mean = load_early<float>(stats + 2 * row), factor = load_early<float>(stats + 2 * row + 1);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) n[i] = (z.at(i) - mean) * factor * slope.at(i) + offset.at(i);
    };
    float sums[MIXES][VECTOR] = {}, before[VECTOR] = {}, own[VECTOR];
    Piece<T_IO> z, next;
    Piece<T_MIXED> grad[MIXES];
    if (text.begin < begin) {
        z.load(x + (begin - 1) * CHANNELS + channel);
        normed(z, begin - 1, before);
    }
    next.load(x + begin * CHANNELS + channel);
    for (i64 row = begin; row < end; ++row) {
#pragma unroll
        for (int m = 0; m < MIXES; ++m) grad[m].load(grads[m] + row * CHANNELS + channel);
        z = next;
        if (row + 1 < end) next.load(x + (row + 1) * CHANNELS + channel);
        normed(z, row, own);
        if (row == text.end) text = text_of(row, cu_seqlens, tokens, texts, rows);
        Piece<T_MIXED> token = {};
        const bool is_first = row == text.begin;
        if (HAS_FIRST && is_first && text.number >= 0) token.load(first + text.number * CHANNELS + channel);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float change = (is_first ? token.at(i) : rounded<T_MIXED>(before[i])) - own[i];
#pragma unroll
            for (int m = 0; m < MIXES; ++m) sums[m][i] += grad[m].at(i) * change;
            before[i] = own[i];
        }
    }
#pragma unroll
    for (int m = 0; m < MIXES; ++m) write(dmixes_rows + (i64(blockIdx.x) * MIXES + m) * CHANNELS + channel, sums[m]);
}
