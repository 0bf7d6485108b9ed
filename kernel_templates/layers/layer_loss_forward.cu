// The cross entropy of every row, and what its gradient needs:
//
//     lse = log(sum_j e^logits_j);  loss = lse - logits_target
//
//   logits   [rows, columns]  T_IO  in, from a multiple of 16 bytes on
//   targets  [rows]  int32 or int64, of TARGET_BYTES  in
//   loss     [rows]  float  out: NaN where the target is no column
//   lse      [rows]  float  out
//   argmax   [rows]  int  out with HAS_ARGMAX, else null: the first of the largest logits
//
// Where the target is `ignore_index` the row is not read, and all of these are 0.
// Grid (rows). Each thread has a maximum and a sum of its own, which it scales where its maximum rises.
#include "layer_loss.cuh"

constexpr int WARPS = NUM_THREADS / 32;

// Of some columns: the largest logit, where it is, and sum_j e^(logits_j - top).
struct Part {
    // The least number: minus infinity must not be subtracted from itself.
    float top = -3.4028234663852886e38f, sum = 0.0f;
    int place = 0;

    __device__ void add(const Part& other) {
        const bool is_others = other.top > top || (other.top == top && other.place < place);
        const float most = fmaxf(top, other.top);
        sum = sum * exponential(top - most) + other.sum * exponential(other.top - most);
        top = most;
        if (is_others) place = other.place;
    }

    // Neighbours behind all columns that there were before.
    __device__ void add(const Piece<T_IO>& held, int column) {
        float x[VECTOR], most = held.at(0), more = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[i] = held.at(i), most = fmaxf(most, x[i]);
        if (most > top) {
            sum *= exponential(top - most);
            top = most;
            if constexpr (HAS_ARGMAX) {
#pragma unroll
                for (int i = VECTOR - 1; i >= 0; --i)
                    if (x[i] == most) place = column + i;
            }
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) more += exponential(x[i] - top);
        sum += more;
    }

    // All lanes' together, in each of them.
    __device__ void add_lanes() {
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            Part other;
            other.top = __shfl_xor_sync(0xffffffffu, top, bit), other.sum = __shfl_xor_sync(0xffffffffu, sum, bit);
            if constexpr (HAS_ARGMAX) other.place = __shfl_xor_sync(0xffffffffu, place, bit);
            add(other);
        }
    }
};

struct Smem {
    float top[WARPS], sum[WARPS];
    int place[WARPS];
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS) layer_loss_forward(
    const T_IO* __restrict__ logits, const Target* __restrict__ targets, float* __restrict__ loss,
    float* __restrict__ lse, int* __restrict__ argmax, i64 columns, i64 ignore_index) {
    __shared__ Smem smem;
    const i64 row = blockIdx.x, target = targets[row];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    logits += row * columns;
    if (target == ignore_index) {
        if (threadIdx.x == 0) {
            loss[row] = 0.0f, lse[row] = 0.0f;
            if constexpr (HAS_ARGMAX) argmax[row] = 0;
        }
        return;
    }

    const Cut cut(logits, static_cast<int>(columns));
    Part part;
    cut.for_pieces(logits, [&](const Piece<T_IO>& held, int column) { part.add(held, column); });
    if (cut.edge < columns) {
        Part edge;
        edge.sum = 1.0f, edge.place = cut.edge;
        const float x = to_float(logits[cut.edge]);
        if (x > edge.top) edge.top = x;
        else edge.sum = exponential(x - edge.top);
        part.add(edge);
    }
    part.add_lanes();
    if (lane == 0) smem.top[warp] = part.top, smem.sum[warp] = part.sum, smem.place[warp] = part.place;
    __syncthreads();  // the parts of all warps are there
    if (warp > 0) return;
    part = Part();
    if (lane < WARPS) part.top = smem.top[lane], part.sum = smem.sum[lane], part.place = smem.place[lane];
    part.add_lanes();
    if (lane > 0) return;
    const float log_sum = logf(part.sum);
    lse[row] = part.top + log_sum;
    if constexpr (HAS_ARGMAX) argmax[row] = part.place;
    // Both differences are small where the target is likely: lse itself has fewer digits behind the point.
    const bool is_there = target >= 0 && target < columns;
    loss[row] = is_there ? log_sum + (part.top - to_float(logits[target])) : __int_as_float(0x7fffffff);
}
