// Mixes of every token with the one before it. Per token t of a text:
//
//     mixed_m[t] = x_t + (x_{t-1} - x_t) (mixes_m + amounts_m[t])
//
//   x           [rows, CHANNELS]  T_IO  in
//   mixes       [MIXES, CHANNELS]  T_MIXES  in
//   amounts     [MIXES, rows, CHANNELS]  T_IO  in with HAS_AMOUNTS, else null
//   first       [texts, CHANNELS]  T_IO  in with HAS_FIRST, else null, for zeros: the token before a text
//   cu_seqlens  [texts + 1]  int32 or int64  in where PACKED: where texts begin and end; else each has `tokens` rows
//   mixed0, ...  [rows, CHANNELS]  T_IO  out, MIXES of them
//
// Grid (rows / ROWS, channels / (VECTOR NUM_THREADS)).
#include "layer_token_shift.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_token_shift(
    const T_IO* __restrict__ x, const T_MIXES* __restrict__ mixes, const T_IO* __restrict__ amounts,
    const T_IO* __restrict__ first, const Bound* __restrict__ cu_seqlens, T_IO* __restrict__ mixed0,
    T_IO* __restrict__ mixed1, T_IO* __restrict__ mixed2, T_IO* __restrict__ mixed3, T_IO* __restrict__ mixed4,
    T_IO* __restrict__ mixed5, i64 rows, i64 tokens, i64 texts) {
    let_next_launch_begin();
    x = after_previous_launch(x), mixes = written_meanwhile(mixes), amounts = written_meanwhile(amounts);
    first = written_meanwhile(first), cu_seqlens = written_meanwhile(cu_seqlens);
    T_IO* const mixed[MOST_MIXES] = {mixed0, mixed1, mixed2, mixed3, mixed4, mixed5};
    const int channel = own_channel();
    if (channel >= CHANNELS) return;
    const i64 begin = i64(blockIdx.x) * ROWS;
    const int count = static_cast<int>(min(i64(ROWS), rows - begin));
    const Amounts amounts_of(mixes, amounts, rows, channel);
    Text text = text_of(begin, cu_seqlens, tokens, texts, rows);
    x += channel;

    Piece<T_IO> own[ROWS], before = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        if (i < count) own[i].load(x + (begin + i) * CHANNELS);
    if (text.begin < begin) before.load(x + (begin - 1) * CHANNELS);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const i64 row = begin + i;
        if (i >= count) break;
        if (row == text.end) text = text_of(row, cu_seqlens, tokens, texts, rows);
        const Amounts::Row amount = amounts_of.of(row);
        if (row == text.begin) before = token_before(text, first, channel);
        float change[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) change[e] = before.at(e) - own[i].at(e);
#pragma unroll
        for (int m = 0; m < MIXES; ++m) {
            float result[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) result[e] = own[i].at(e) + change[e] * amounts_of.at(amount, m, e);
            write(mixed[m] + row * CHANNELS + channel, result);
        }
        before = own[i];
    }
}
