// What a block makes of a row of logits: the sum and the largest of it, its loss, and its gradient.
#pragma once
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

// That of a whole row, in every thread of the warps up to `last`. All threads of the block take part.
__device__ inline Part part_of_row(const T_IO* logits, const Cut& cut, i64 columns, int last, Smem& smem) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    part = Part();
    if (warp > last) return part;
    if (lane < WARPS) part.top = smem.top[lane], part.sum = smem.sum[lane], part.place = smem.place[lane];
    part.add_lanes();
    return part;
}

// The loss, of the logarithm of the sum; of no column of the row NaN. Both differences are small where the target is
// likely: lse itself has fewer digits behind the point.
__device__ inline float loss_of_row(float log_sum, const Part& part, float target, bool is_there) {
    return is_there ? log_sum + (part.top - target) : __int_as_float(0x7fffffff);
}

// Writes zeros for the gradient of a row.
__device__ inline void write_zeros(T_IO* dlogits, const Cut& cut, i64 columns) {
    const float zeros[VECTOR] = {};
    for (int piece = threadIdx.x; piece < cut.pieces; piece += NUM_THREADS)
        write(dlogits + cut.head + piece * VECTOR, zeros);
    if (cut.edge < columns) dlogits[cut.edge] = from_float<T_IO>(0.0f);
}

// Writes factor times the gradient of a row, in which `own` is the target.
__device__ inline void write_gradient(const T_IO* logits, T_IO* dlogits, const Cut& cut, i64 columns, float lse, int own,
                                      int largest, float factor, float l2_wrap) {
    const auto gradient = [&](float x, int column) {
        float y = exponential(x - lse);
        if (column == own) y -= 1.0f;
        if constexpr (HAS_ARGMAX) {
            if (column == largest) y += l2_wrap * x;
        }
        return factor * y;
    };
    cut.for_pieces(logits, [&](const Piece<T_IO>& held, int column) {
        float result[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) result[i] = gradient(held.at(i), column + i);
        write(dlogits + column, result);
    });
    if (cut.edge < columns) dlogits[cut.edge] = from_float<T_IO>(gradient(to_float(logits[cut.edge]), cut.edge));
}
