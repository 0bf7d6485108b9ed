// Token shift of RWKV: each channel mixed with the same channel of the token before, with a learned share mu.
//
//     y_t = x_t + (x_{t-1} - x_t) mu,   x_{-1} = 0
//
//   x, y  [batch, tokens, CHANNELS]  T_IO  in, out      mu  [CHANNELS]  fp32  in      all contiguous
//
// One thread moves WIDTH neighbouring channels at once: grid ceil(batch * tokens * CHANNELS / WIDTH / NUM_THREADS).
#include "types.cuh"

static_assert(CHANNELS % WIDTH == 0, "width must divide channels");
static_assert((WIDTH & (WIDTH - 1)) == 0 && WIDTH * sizeof(T_IO) <= 16,
              "width must be a power of two, of at most 16 bytes together");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) token_shift(
    const T_IO* __restrict__ x, const float* __restrict__ mu, T_IO* __restrict__ y, i64 batch, i64 tokens) {
    using Piece = Pack<T_IO, WIDTH>;
    const i64 first = (i64(blockIdx.x) * NUM_THREADS + threadIdx.x) * WIDTH;
    const i64 row = first / CHANNELS;
    if (row >= batch * tokens) return;
    const Piece now = *reinterpret_cast<const Piece*>(x + first);
    Piece before = {};
    if (row % tokens != 0) before = *reinterpret_cast<const Piece*>(x + first - CHANNELS);
    Piece mixed;
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) {
        const float x_t = to_float(now.at[c]);
        mixed.at[c] = from_float<T_IO>(x_t + (to_float(before.at[c]) - x_t) * mu[first % CHANNELS + c]);
    }
    *reinterpret_cast<Piece*>(y + first) = mixed;
}
