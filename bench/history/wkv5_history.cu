// RWKV-5 forward in the forms that its CUDA kernel went through, one after another: what `python -m bench history
// --op wkv5` compares, and no op takes. Per head, S [N, N]:
//
//     y_t = scale (S_{t-1} r_t + (sum_j u_j r_tj k_tj) v_t);   S_t = S_{t-1} diag(w) + v_t k_t^T
//
//   r k v  [batch, tokens, heads, N]  T_IO  in           y  the same shape  T_Y  out
//   w  [heads, N]  fp32  in: the factor of a step        u  [heads, N]  T_IO  in
//
// Grid (batch * heads, blocks of NUM_THREADS value rows): a thread walks over the tokens with a row of S in registers.
//   ATOMICS  every product is added to y in memory, which no other thread touches; else they are summed in a register
//   VECTOR   neighbouring channels of r, k, w, u that one access reads
//   STAGED   a block reads r, k, w, u once, into shared memory as floats; else every thread reads all of them
constexpr int VALUE_SIZE = HEAD_SIZE;
#include "sequence.cuh"

static_assert(HEAD_SIZE >= 1 && HEAD_SIZE % VECTOR == 0, "vector must divide the head size");
static_assert(NUM_THREADS >= 1 && NUM_THREADS <= 1024, "num_threads must be 1 to 1024");
static_assert(!ATOMICS || sizeof(T_Y) == sizeof(float), "atomics add to fp32");

struct alignas(16) Smem { float r[HEAD_SIZE], k[HEAD_SIZE], w[HEAD_SIZE], u[HEAD_SIZE]; };

template <typename T> __device__ inline Words<T, VECTOR> read(const T* source) {
    return *reinterpret_cast<const Words<T, VECTOR>*>(source);
}

template <typename T> __device__ inline void stage(float (&target)[HEAD_SIZE], const T* source) {
    for (int j = threadIdx.x * VECTOR; j < HEAD_SIZE; j += NUM_THREADS * VECTOR) {
        const auto found = read(source + j);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) target[j + i] = found.at(i);
    }
}

// One token of one row, wherever its channels are.
template <typename T, typename Y>
__device__ inline void step(
    float (&state)[HEAD_SIZE], const T* r, const T* k, const float* w, const T* u, float v, Y* y, float scale) {
    float sum = 0.0f;
    if constexpr (ATOMICS) *y = 0.0f;
#pragma unroll
    for (int j = 0; j < HEAD_SIZE; j += VECTOR) {
        const auto r_j = read(r + j), k_j = read(k + j), u_j = read(u + j);
        const auto w_j = read(w + j);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float kv = k_j.at(i) * v, product = r_j.at(i) * (u_j.at(i) * kv + state[j + i]);
            if constexpr (ATOMICS) atomicAdd(y, scale * product);
            else sum += product;
            state[j + i] = state[j + i] * w_j.at(i) + kv;
        }
    }
    if constexpr (!ATOMICS) *y = from_float<Y>(scale * sum);
}

// No __restrict__ for w, u and y: the compiler would keep w and u in registers, which none of the forms did.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) wkv5_history(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ v, const float* w, const T_IO* u,
    T_Y* y, Strides r_strides, Strides k_strides, Strides v_strides, i64 tokens, i64 heads, float scale) {
    __shared__ Smem smem;
    const i64 sequence = blockIdx.x / heads, head = blockIdx.x % heads;
    const int row = blockIdx.y * NUM_THREADS + threadIdx.x;
    const bool has_row = HEAD_SIZE % NUM_THREADS == 0 || row < HEAD_SIZE;
    const auto start = [&](Strides s) { return sequence * s.batch + head * s.head; };
    r += start(r_strides), k += start(k_strides), v += start(v_strides) + row;
    w += head * HEAD_SIZE, u += head * HEAD_SIZE;
    y += (sequence * tokens * heads + head) * HEAD_SIZE + row;

    float state[HEAD_SIZE] = {};
    if constexpr (STAGED) stage(smem.w, w), stage(smem.u, u);
    for (i64 token = 0; token < tokens; ++token) {
        if constexpr (STAGED) {
            __syncthreads();  // all have read the token before
            stage(smem.r, r), stage(smem.k, k);
            __syncthreads();
            if (has_row) step(state, smem.r, smem.k, smem.w, smem.u, to_float(*v), y, scale);
        } else if (has_row) {
            step(state, r, k, w, u, to_float(*v), y, scale);
        }
        r += r_strides.token, k += k_strides.token, v += v_strides.token;
        y += heads * HEAD_SIZE;
    }
}
