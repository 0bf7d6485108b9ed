// Gradients of layer_token_shift. With s_t = sum_m grad_m[t] (mixes_m + amounts_m[t]):
//
//     dx_t = sum_m grad_m[t] - s_t + s_{t+1};  damounts_m[t] = grad_m[t] (x_{t-1} - x_t);  dmixes_m = sum_t damounts_m[t]
//
// with s_{t+1} = 0 behind the last token of a text, whose dfirst is s of its first token.
//
//   x, mixes, amounts, first, cu_seqlens  as layer_token_shift
//   grad_mixed0, ...  [rows, CHANNELS]  T_IO  in, MIXES of them
//   dx           [rows, CHANNELS]  T_IO  out, or null
//   dmixes_rows  [blocks of rows, MIXES, CHANNELS]  fp32  out, or null: the sums of a block
//   damounts     [MIXES, rows, CHANNELS]  T_IO  out, or null
//   dfirst       [texts, CHANNELS]  T_IO  out, or null
//
// Grid (rows / block_rows, channels / (VECTOR NUM_THREADS)). A block goes from its last row to its first, and reads the
// row behind its last one too.
#include "layer_token_shift.cuh"

struct Grads {
    Piece<T_IO> of_mix[MIXES];
    __device__ void load(const T_IO* const (&grads)[MOST_MIXES], i64 place) {
#pragma unroll
        for (int m = 0; m < MIXES; ++m) of_mix[m].load(grads[m] + place);
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) layer_token_shift_backward(
    const T_IO* __restrict__ x, const T_MIXES* __restrict__ mixes, const T_IO* __restrict__ amounts,
    const T_IO* __restrict__ first, const Bound* __restrict__ cu_seqlens, const T_IO* __restrict__ grad_mixed0,
    const T_IO* __restrict__ grad_mixed1, const T_IO* __restrict__ grad_mixed2, const T_IO* __restrict__ grad_mixed3,
    const T_IO* __restrict__ grad_mixed4, const T_IO* __restrict__ grad_mixed5, T_IO* __restrict__ dx,
    float* __restrict__ dmixes_rows, T_IO* __restrict__ damounts, T_IO* __restrict__ dfirst, i64 rows, i64 tokens,
    i64 texts, i64 block_rows) {
    const T_IO* const grads[MOST_MIXES] = {grad_mixed0, grad_mixed1, grad_mixed2,
                                           grad_mixed3, grad_mixed4, grad_mixed5};
    const int channel = own_channel();
    if (channel >= CHANNELS) return;
    const float zeros[VECTOR] = {};
    if (PACKED && dfirst != nullptr && blockIdx.x == 0)
        for (i64 number = 0; number < texts; ++number)  // those without tokens
            if (cu_seqlens[number] >= cu_seqlens[number + 1]) write(dfirst + number * CHANNELS + channel, zeros);

    const i64 begin = i64(blockIdx.x) * block_rows, end = min(begin + block_rows, rows);
    const Amounts amounts_of(mixes, amounts, rows, channel);
    Text text = text_of(end - 1, cu_seqlens, tokens, texts, rows);
    float sums[MIXES][VECTOR] = {}, behind[VECTOR] = {};  // s of the row behind
    Grads next, grad;
    if (end < text.end) {
        grad.load(grads, end * CHANNELS + channel);
        const Amounts::Row amount = amounts_of.of(end);
#pragma unroll
        for (int m = 0; m < MIXES; ++m)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) behind[e] += grad.of_mix[m].at(e) * amounts_of.at(amount, m, e);
    }
    Piece<T_IO> own, before, two_before;
    // The row before one that may be the first of all: it is not looked at then.
    const auto load_before = [&](Piece<T_IO>& to, i64 row) { to.load(x + max(row - 1, i64(0)) * CHANNELS + channel); };
    own.load(x + (end - 1) * CHANNELS + channel), load_before(before, end - 1);
    grad.load(grads, (end - 1) * CHANNELS + channel);
    for (i64 row = end - 1; row >= begin; --row) {
        const Amounts::Row amount = amounts_of.of(row);
        if (row > begin) next.load(grads, (row - 1) * CHANNELS + channel), load_before(two_before, row - 1);
        const bool is_first = row == text.begin;
        const Piece<T_IO> other = is_first ? token_before(text, first, channel) : before;
        float change[VECTOR], all[VECTOR] = {}, moved[VECTOR] = {};
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) change[e] = other.at(e) - own.at(e);
#pragma unroll
        for (int m = 0; m < MIXES; ++m) {
            float slope[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float g = grad.of_mix[m].at(e);
                all[e] += g, moved[e] += g * amounts_of.at(amount, m, e);
                slope[e] = g * change[e], sums[m][e] += slope[e];
            }
            if (HAS_AMOUNTS && damounts != nullptr) write(damounts + (m * rows + row) * CHANNELS + channel, slope);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) all[e] += behind[e] - moved[e], behind[e] = is_first ? 0.0f : moved[e];
        if (dx != nullptr) write(dx + row * CHANNELS + channel, all);
        if (is_first) {
            if (dfirst != nullptr && text.number >= 0) write(dfirst + text.number * CHANNELS + channel, moved);
            if (row > begin) text = text_of(row - 1, cu_seqlens, tokens, texts, rows);
        }
        own = before, before = two_before, grad = next;
    }
    if (dmixes_rows == nullptr) return;
#pragma unroll
    for (int m = 0; m < MIXES; ++m) write(dmixes_rows + (i64(blockIdx.x) * MIXES + m) * CHANNELS + channel, sums[m]);
}
