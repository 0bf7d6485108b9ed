// Gradients of diagonal_operands, with its names. Per token, key head and value head:
//
//     dq = sum grad_r;   dk = sum grad_new_k     over the value heads of a key head, with REPEATS
//     dg = sum grad_w                            over the channels of a head                       SOURCE heads
//     d(step) = A sum grad_w + sum v grad_new_v;   dv = step grad_new_v + D dy                     SOURCE steps
//     dA = sum step sum grad_w;   ddt = ddt_bias of the token = d(step) softplus'(dt + dt_bias), 0 outside of limits
//     dg = grad_w - e^g grad_new_k                                                                 SOURCE gates
//
// D dy is there with HAS_SKIP: what the gradient of v has of a part of the output that is D v (skip_gate.cu). The order
// of all sums is fixed: float32 in a thread, then by lanes, and sums over tokens of the rows of a block first, which
// a launch behind this one adds up.
//
//   v, g, A, dt_bias             as diagonal_operands
//   grad_r, grad_new_k, grad_w, grad_new_v   like r, new_k, w and new_v  in
//   D                            [H], or with VALUE_SIZE behind  T_D  in;   dy  like new_v, by strides  T_IO  in
//   dq, dk, dv, dg               like q, k, v and g without gaps  out
//   dg_rows, dA_rows, ddt_bias_rows   [blocks of rows, H]  fp32  out; dg_rows of fixed decays alone
//
// What is not wanted is null, and what serves it alone is not read. Grid (rows / block_rows, slices): the slots of the
// first `key_slices` are pieces of key heads, or of gates; in the others LANES lanes have a value head. No shared
// memory.
#include "diagonal_operands.cuh"

static_assert(32 % LANES == 0 && NUM_THREADS % 32 == 0, "heads do not cross warps");

// Adds up what the value heads of a key head have.
__device__ inline void sum_heads(T_IO* target, const T_IO* source, i64 group) {
    float sum[VECTOR] = {};
#pragma unroll 4
    for (i64 j = 0; j < group; ++j) {
        Piece<T_IO> piece;
        piece.load(source + j * HEAD_SIZE);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += piece.at(i);
    }
    write(target, sum);
}

// The sum over the lanes of a head, in each of them.
__device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

// For each piece of a head that the lane has: `act(channel)`.
template <int SIZE, typename Act> __device__ inline void for_pieces_of_lane(Act act) {
    const int begin = static_cast<int>(threadIdx.x) % LANES * VECTOR;
    static_assert(SIZE % VECTOR == 0, "a head consists of whole accesses");
    if constexpr (SIZE <= LANES * VECTOR) {
        if (SIZE == LANES * VECTOR || begin < SIZE) act(begin);
    } else {
#pragma unroll 2
        for (int channel = begin; channel < SIZE; channel += LANES * VECTOR) act(channel);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) diagonal_operands_backward(
    const T_IO* __restrict__ v, const T_G* __restrict__ g, const T_A* __restrict__ A,
    const T_DT_BIAS* __restrict__ dt_bias, const T_D* __restrict__ D, const T_IO* __restrict__ dy,
    const T_IO* __restrict__ grad_r, const T_IO* __restrict__ grad_new_k, const T_W* __restrict__ grad_w,
    const T_IO* __restrict__ grad_new_v, T_IO* __restrict__ dq, T_IO* __restrict__ dk, T_IO* __restrict__ dv,
    T_G* __restrict__ dg, float* __restrict__ dg_rows, float* __restrict__ dA_rows, float* __restrict__ ddt_bias_rows,
    Strides v_strides, Strides g_strides, Strides dy_strides, i64 rows, i64 tokens, i64 heads, i64 key_heads,
    i64 key_slices, i64 block_rows, float least, float most) {
    RowWalk walk(rows, block_rows, tokens);
    if (blockIdx.y < key_slices) {
        const PieceOfHead<HEAD_SIZE> piece;
        if (piece.head >= key_heads) return;
#pragma unroll 1
        for (; walk.exists(); walk.next()) {
            const i64 place = (walk.row * key_heads + piece.head) * HEAD_SIZE + piece.channel;
            if constexpr (HAS_GATES) {
                Piece<T_G> gate;
                Piece<T_W> of_decay;
                Piece<T_IO> of_key;
                gate.load(g + walk.in(g_strides, piece.head) + piece.channel);
                of_decay.load(grad_w + place), of_key.load(grad_new_k + place);
                float grad[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) grad[i] = of_decay.at(i) - of_key.at(i) * expf(gate.at(i));
                write(dg + place, grad);
            } else if constexpr (REPEATS) {
                const i64 group = heads / key_heads;
                const i64 first = (walk.row * heads + piece.head * group) * HEAD_SIZE + piece.channel;
                if (dq != nullptr) sum_heads(dq + place, grad_r + first, group);
                if (dk != nullptr) sum_heads(dk + place, grad_new_k + first, group);
            }
        }
    } else if constexpr (HAS_DECAYS) {
        const i64 slot = (i64(blockIdx.y) - key_slices) * NUM_THREADS + threadIdx.x, head = min(slot / LANES, heads - 1);
        const bool is_there = slot / LANES < heads, writes = is_there && threadIdx.x % LANES == 0;
        const bool wants_decay = dg != nullptr || dg_rows != nullptr || dA_rows != nullptr || ddt_bias_rows != nullptr;
        float rate = 1.0f, bias = 0.0f, of_rate = 0.0f, of_bias = 0.0f;
        if constexpr (HAS_STEPS) {
            const StepMap map(A, dt_bias, head, {least, most});
            rate = map.rate, bias = map.bias;
        }
#pragma unroll 1
        for (; walk.exists(); walk.next()) {
            const i64 place = walk.row * heads + head;
            float of_decay = 0.0f, of_step = 0.0f;
            if (wants_decay)
                for_pieces_of_lane<HEAD_SIZE>([&](int channel) {
                    Piece<T_W> piece;
                    piece.load(grad_w + place * HEAD_SIZE + channel);
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) of_decay += piece.at(i);
                });
            if constexpr (HAS_STEPS) {
                const StepMap map(rate, bias, {least, most});
                const float dt = to_float(g[walk.in(g_strides, head)]), step = map.step(dt);
                const i64 value_head = walk.in(v_strides, head), skip_head = HAS_SKIP ? walk.in(dy_strides, head) : 0;
                for_pieces_of_lane<VALUE_SIZE>([&](int channel) {
                    Piece<T_IO> grad, value, skipped;
                    Factors<T_D, SKIP_PER_CHANNEL, VALUE_SIZE> share;
                    grad.load(grad_new_v + place * VALUE_SIZE + channel);
                    if (wants_decay) value.load(v + value_head + channel);
                    if constexpr (HAS_SKIP)
                        if (dv != nullptr) skipped.load(dy + skip_head + channel), share.load(D, head, channel);
                    if (wants_decay)
#pragma unroll
                        for (int i = 0; i < VECTOR; ++i) of_step += grad.at(i) * value.at(i);
                    if (dv != nullptr && is_there) {
                        float of_value[VECTOR];
#pragma unroll
                        for (int i = 0; i < VECTOR; ++i) {
                            of_value[i] = grad.at(i) * step;
                            if constexpr (HAS_SKIP) of_value[i] += skipped.at(i) * share.at(i);
                        }
                        write(dv + place * VALUE_SIZE + channel, of_value);
                    }
                });
                if (!wants_decay) continue;
                of_decay = sum_of_lanes(of_decay), of_step = sum_of_lanes(of_step);
                const float of_dt = map.back(dt, of_step + rate * of_decay);
                of_rate += of_decay * step, of_bias += of_dt;
                if (dg != nullptr && writes) dg[place] = from_float<T_G>(of_dt);
            } else {
                of_decay = sum_of_lanes(of_decay), of_rate += of_decay;
                if (dg != nullptr && writes) dg[place] = from_float<T_G>(of_decay);
            }
        }
        const i64 part = i64(blockIdx.x) * heads + head;
        if (!writes) return;
        if (HAS_STEPS && dA_rows != nullptr) dA_rows[part] = of_rate;
        if (HAS_STEPS && ddt_bias_rows != nullptr) ddt_bias_rows[part] = of_bias;
        if (!HAS_STEPS && dg_rows != nullptr) dg_rows[part] = of_rate;
    }
}
