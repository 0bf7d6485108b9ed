// A made-up op, for the tests: linear attention whose key heads are shared, with a decay for each head and token.
//
//   S_t = e^(g_t) S_{t-1} + v_t k_t^T;   y_t = scale S_t q_t + d v_t
//
//   q, k           [B, T, key_heads, HEAD_SIZE]  T_IO  in; several neighbouring heads share a key head
//   v, y           [B, T, heads, VALUE_SIZE]  T_IO  in, out
//   g              [B, T, heads]  T_G  in
//   d              [heads]  T_IO  in
//   initial_state, final_state  [sequences, heads, state]  T_STATE  in, out, each or null
//   states         [B, T, heads, VALUE_SIZE, HEAD_SIZE]  fp32: after every token; out or null, in the backward in
//
// Grid (sequences * heads): a block has a head of a sequence. All fp32.
#include "sequence.cuh"

static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS <= 1024, "num_threads must be a multiple of 32 up to 1024");
constexpr int STATE_SIZE = VALUE_SIZE * HEAD_SIZE;

__device__ inline i64 offset(Strides strides, i64 batch, i64 token, i64 head) {
    return batch * strides.batch + token * strides.token + head * strides.head;
}

// A thread has a row of the state in registers, and then another one.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) made_up_forward(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_G* __restrict__ g,
    const T_IO* __restrict__ d, const T_STATE* __restrict__ initial_state, const i64* __restrict__ cu_seqlens,
    T_IO* __restrict__ y, T_STATE* __restrict__ final_state, float* __restrict__ states, Strides q_strides,
    Strides k_strides, Strides v_strides, Strides g_strides, i64 tokens, i64 heads, i64 key_heads, float scale) {
    const i64 sequence = blockIdx.x / heads, head = blockIdx.x % heads, key_head = head / (heads / key_heads);
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const i64 own_state = i64(blockIdx.x) * STATE_SIZE;
    const float factor = to_float(d[head]);
    for (int row = threadIdx.x; row < VALUE_SIZE; row += NUM_THREADS) {
        float state[HEAD_SIZE];
#pragma unroll
        for (int i = 0; i < HEAD_SIZE; ++i) {
            const i64 index = own_state + state_index<STATE_LAYOUT>(row, i);
            state[i] = initial_state == nullptr ? 0.0f : to_float(initial_state[index]);
        }
        for (i64 t = span.begin; t < span.begin + span.length; ++t) {
            const T_IO* query = q + offset(q_strides, span.batch, t, key_head);
            const T_IO* key = k + offset(k_strides, span.batch, t, key_head);
            const float value = to_float(v[offset(v_strides, span.batch, t, head) + row]);
            const float decay = expf(to_float(g[offset(g_strides, span.batch, t, head)]));
            const i64 token = (span.batch * tokens + t) * heads + head;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD_SIZE; ++i) {
                state[i] = decay * state[i] + value * to_float(key[i]);
                sum += state[i] * to_float(query[i]);
                if (states != nullptr) states[token * STATE_SIZE + row * HEAD_SIZE + i] = state[i];
            }
            y[token * VALUE_SIZE + row] = from_float<T_IO>(scale * sum + factor * value);
        }
        if (final_state == nullptr) continue;
#pragma unroll
        for (int i = 0; i < HEAD_SIZE; ++i) {
            final_state[own_state + state_index<STATE_LAYOUT>(row, i)] = from_float<T_STATE>(state[i]);
        }
    }
}

// The sum over the threads of a block, for the first of them.
__device__ inline float block_sum(float x) {
    __shared__ float parts[NUM_THREADS];
    __syncthreads();  // the last sum has been read
    parts[threadIdx.x] = x;
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_THREADS; ++i) sum += parts[i];
    }
    return sum;
}

//   dy             [B, T, heads, VALUE_SIZE]  T_IO  in
//   grad_final_state, grad_initial_state  [sequences, heads, state]  fp32  in, out, each or null
//   dq, dk         [heads of a key head, B, T, key_heads, HEAD_SIZE]  fp32  out
//   dv, dg         as v and g  out
//   dd             [sequences, heads]  fp32  out
//   grad_states    [sequences, heads, VALUE_SIZE, HEAD_SIZE]  fp32  scratch
extern "C" __global__ void __launch_bounds__(NUM_THREADS) made_up_backward(
    const T_IO* __restrict__ q, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const T_G* __restrict__ g,
    const T_IO* __restrict__ d, const T_STATE* __restrict__ initial_state, const i64* __restrict__ cu_seqlens,
    const T_IO* __restrict__ dy, const float* __restrict__ states, const float* __restrict__ grad_final_state,
    float* __restrict__ dq, float* __restrict__ dk, T_IO* __restrict__ dv, T_G* __restrict__ dg, float* __restrict__ dd,
    float* __restrict__ grad_initial_state, float* __restrict__ grad_states, Strides q_strides, Strides k_strides,
    Strides v_strides, Strides g_strides, Strides dy_strides, i64 batch, i64 tokens, i64 heads, i64 key_heads,
    float scale) {
    const i64 sequence = blockIdx.x / heads, head = blockIdx.x % heads, sharing = heads / key_heads;
    const i64 key_head = head / sharing;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const i64 own_state = i64(blockIdx.x) * STATE_SIZE;
    const float factor = to_float(d[head]);
    float* grad = grad_states + own_state;
    for (int i = threadIdx.x; i < STATE_SIZE; i += NUM_THREADS) {
        const i64 index = own_state + state_index<STATE_LAYOUT>(i / HEAD_SIZE, i % HEAD_SIZE);
        grad[i] = grad_final_state == nullptr ? 0.0f : grad_final_state[index];
    }
    float grad_factor = 0.0f;
    for (i64 t = span.begin + span.length - 1; t >= span.begin; --t) {
        const T_IO* query = q + offset(q_strides, span.batch, t, key_head);
        const T_IO* key = k + offset(k_strides, span.batch, t, key_head);
        const T_IO* value = v + offset(v_strides, span.batch, t, head);
        const T_IO* grad_y = dy + offset(dy_strides, span.batch, t, head);
        const float decay = expf(to_float(g[offset(g_strides, span.batch, t, head)]));
        const i64 token = (span.batch * tokens + t) * heads + head;
        const float* state = states + token * STATE_SIZE;
        for (int i = threadIdx.x; i < STATE_SIZE; i += NUM_THREADS) {
            grad[i] += scale * to_float(grad_y[i / HEAD_SIZE]) * to_float(query[i % HEAD_SIZE]);
        }
        __syncthreads();  // the gradient of this token's state is there
        for (int column = threadIdx.x; column < HEAD_SIZE; column += NUM_THREADS) {
            float of_query = 0.0f, of_key = 0.0f;
            for (int row = 0; row < VALUE_SIZE; ++row) {
                of_query += to_float(grad_y[row]) * state[row * HEAD_SIZE + column];
                of_key += to_float(value[row]) * grad[row * HEAD_SIZE + column];
            }
            const i64 of_sharing = ((head % sharing * batch + span.batch) * tokens + t) * key_heads + key_head;
            dq[of_sharing * HEAD_SIZE + column] = scale * of_query;
            dk[of_sharing * HEAD_SIZE + column] = of_key;
        }
        for (int row = threadIdx.x; row < VALUE_SIZE; row += NUM_THREADS) {
            float sum = 0.0f;
            for (int i = 0; i < HEAD_SIZE; ++i) sum += to_float(key[i]) * grad[row * HEAD_SIZE + i];
            dv[token * VALUE_SIZE + row] = from_float<T_IO>(sum + factor * to_float(grad_y[row]));
            grad_factor += to_float(value[row]) * to_float(grad_y[row]);
        }
        float change = 0.0f;
        for (int i = threadIdx.x; i < STATE_SIZE; i += NUM_THREADS) {
            float before = 0.0f;
            if (t > span.begin) {
                before = state[i - heads * STATE_SIZE];
            } else if (initial_state != nullptr) {
                const i64 index = own_state + state_index<STATE_LAYOUT>(i / HEAD_SIZE, i % HEAD_SIZE);
                before = to_float(initial_state[index]);
            }
            change += before * grad[i];
        }
        change = block_sum(change);  // and every thread has read what others change below
        if (threadIdx.x == 0) dg[token] = from_float<T_G>(decay * change);
        for (int i = threadIdx.x; i < STATE_SIZE; i += NUM_THREADS) grad[i] *= decay;
    }
    grad_factor = block_sum(grad_factor);
    if (threadIdx.x == 0) dd[blockIdx.x] = grad_factor;
    if (grad_initial_state == nullptr) return;
    for (int i = threadIdx.x; i < STATE_SIZE; i += NUM_THREADS) {
        grad_initial_state[own_state + state_index<STATE_LAYOUT>(i / HEAD_SIZE, i % HEAD_SIZE)] = grad[i];
    }
}
