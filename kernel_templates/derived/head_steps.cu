// Steps of a state space and its log-decays for kernels that take one of each for a head, and their gradients:
//
//     step = limits(softplus(dt + dt_bias));   w = A step
//     d(step) = grad_step + A grad_w;   ddt = d(step) by its slope;   dA = sum step grad_w;   ddt_bias = sum ddt
//
// with the maps and slopes of state_steps.cuh. float32, as all of it is; sums over tokens are of the rows of a block, in
// their order, and a launch behind this one adds them up.
//
//   dt          [batch, tokens, H]  T_G  in, by strides;   A, dt_bias  [H]  T_A, T_DT_BIAS  in
//   step, w, grad_step, grad_w  [batch, tokens, H]  fp32  out, out, in, in;   ddt  the same  T_G  out
//   dA_rows, ddt_bias_rows      [blocks of rows, H]  fp32  out
//
// What is not wanted is null. Grid (rows / block_rows, H / NUM_THREADS): a thread has a head. No shared memory.
#include "operand_rows.cuh"
#include "state_steps.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) head_steps(
    const T_G* __restrict__ dt, const T_A* __restrict__ A, const T_DT_BIAS* __restrict__ dt_bias,
    float* __restrict__ step, float* __restrict__ w, Strides dt_strides, i64 rows, i64 tokens, i64 heads,
    i64 block_rows, float least, float most) {
    const i64 head = i64(blockIdx.y) * NUM_THREADS + threadIdx.x;
    if (head >= heads) return;
    const StepMap map(A, dt_bias, head, {least, most});
    for (RowWalk walk(rows, block_rows, tokens); walk.exists(); walk.next()) {
        const float x = map.step(to_float(dt[walk.in(dt_strides, head)]));
        step[walk.row * heads + head] = x;
        w[walk.row * heads + head] = x * map.rate;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) head_steps_backward(
    const T_G* __restrict__ dt, const T_A* __restrict__ A, const T_DT_BIAS* __restrict__ dt_bias,
    const float* __restrict__ grad_step, const float* __restrict__ grad_w, T_G* __restrict__ ddt,
    float* __restrict__ dA_rows, float* __restrict__ ddt_bias_rows, Strides dt_strides, i64 rows, i64 tokens,
    i64 heads, i64 block_rows, float least, float most) {
    const i64 head = i64(blockIdx.y) * NUM_THREADS + threadIdx.x;
    if (head >= heads) return;
    const StepMap map(A, dt_bias, head, {least, most});
    float of_rate = 0.0f, of_bias = 0.0f;
    for (RowWalk walk(rows, block_rows, tokens); walk.exists(); walk.next()) {
        const i64 place = walk.row * heads + head;
        const float x = to_float(dt[walk.in(dt_strides, head)]), of_decay = grad_w[place];
        const float of_dt = map.back(x, grad_step[place] + map.rate * of_decay);
        of_rate += map.step(x) * of_decay, of_bias += of_dt;
        if (ddt != nullptr) ddt[place] = from_float<T_G>(of_dt);
    }
    const i64 part = i64(blockIdx.x) * heads + head;
    if (dA_rows != nullptr) dA_rows[part] = of_rate;
    if (ddt_bias_rows != nullptr) ddt_bias_rows[part] = of_bias;
}
