// timex in the forms that its CUDA kernel went through, one after another: what `python -m bench history --op timex`
// compares, and no op takes. Every sum is in fp32, by fmaf.
//
//     out[b, c, t] = sum_{s <= t} w[c, T-1-(t-s)] k[b, c, s]
//
//   w  [channels, T]  T_IO  in          k, out  [batch, channels, T]  T_IO  in, out          all contiguous
//
// Grid (channels, groups of BATCHES rows of the batch): a block has all outputs of its rows.
//   STAGED   a block reads its rows of w and k once, into shared memory as floats
//   OUTPUTS  neighbouring outputs of a thread; with 4 it reads four floats at once, of which each feeds up to four sums
//   BATCHES  rows of the batch that a thread has, for which it reads w once
//   PAIRED   a thread has the outputs from the front and as many from the back: all threads have equal work
#include "types.cuh"

static_assert(OUTPUTS == 1 || (OUTPUTS == 4 && STAGED), "outputs must be 1, or 4 where rows are staged");
static_assert(BATCHES == 1 || OUTPUTS == 4, "several batches need four outputs");
static_assert(NUM_THREADS >= 32 && NUM_THREADS <= 1024, "num_threads must be 32 to 1024");

constexpr int AFTER = 4;  // zeros behind the filter, for tokens to come

// Sums of the outputs from `first` on.
template <typename T> __device__ inline void convolve(float (&sums)[BATCHES][OUTPUTS], const T* w, const T* k,
                                                      int k_pitch, int first, int length) {
    if constexpr (OUTPUTS == 1) {
        for (int s = 0; s <= first; ++s)
            sums[0][0] = fmaf(to_float(w[length - 1 - first + s]), to_float(k[s]), sums[0][0]);
    } else {
        const float* const weights = w + length - 4 - first;  // of the first output's first input, and three before it
        float4 low = *reinterpret_cast<const float4*>(weights);
        for (int s = 0; s <= first; s += 4) {
            const float4 high = *reinterpret_cast<const float4*>(weights + s + 4);
            const float seven[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int b = 0; b < BATCHES; ++b) {
                const float4 four = *reinterpret_cast<const float4*>(k + b * k_pitch + s);
                const float inputs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < OUTPUTS; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[b][i] = fmaf(seven[3 - i + j], inputs[j], sums[b][i]);
            }
            low = high;
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) timex_history(
    const T_IO* w, const T_IO* k, T_IO* out, i64 batch, i64 channels, int length) {
    extern __shared__ __align__(16) float shared[];
    const i64 channel = blockIdx.x, first_row = i64(blockIdx.y) * BATCHES, row_stride = channels * length;
    const int present = static_cast<int>(min(batch - first_row, i64(BATCHES)));
    w += channel * length, k += first_row * row_stride + channel * length,
        out += first_row * row_stride + channel * length;

    // The filter ends at a multiple of four, wherever it begins.
    const int pitch = (length + 3) / 4 * 4, before = pitch - length;
    float* const k_smem = shared + pitch + AFTER;
    if constexpr (STAGED) {
        for (int i = threadIdx.x; i < pitch + AFTER; i += NUM_THREADS)
            shared[i] = i >= before && i < pitch ? to_float(w[i - before]) : 0.0f;
        for (int b = 0; b < BATCHES; ++b)
            for (int i = threadIdx.x; i < pitch; i += NUM_THREADS)
                k_smem[b * pitch + i] = b < present && i < length ? to_float(k[b * row_stride + i]) : 0.0f;
        __syncthreads();
    }

    const auto write = [&](int group) {
        float sums[BATCHES][OUTPUTS] = {};
        const int first = group * OUTPUTS;
        if constexpr (STAGED) convolve(sums, shared + before, k_smem, pitch, first, length);
        else convolve(sums, w, k, 0, first, length);
#pragma unroll
        for (int b = 0; b < BATCHES; ++b)
#pragma unroll
            for (int i = 0; i < OUTPUTS; ++i)
                if (b < present && first + i < length) out[b * row_stride + first + i] = from_float<T_IO>(sums[b][i]);
    };
    const int groups = (length + OUTPUTS - 1) / OUTPUTS;
    for (int group = threadIdx.x; group < (PAIRED ? (groups + 1) / 2 : groups); group += NUM_THREADS) {
        write(group);
        if (PAIRED && groups - 1 - group != group) write(groups - 1 - group);
    }
}
