// RWKV-7 time mixing, gradients of the token matrices for all chunks at once, in the backward of the split form:
//
//     dArk = tril(dY V^T)   dArb = tril(dY U^T)   dAak = tril(dX V^T, -1)   dAab = tril(dX U^T, -1)
//
//   v dy       [batch, tokens, heads, V]  T_IO  in         u dx  [batch, tokens, heads, V]  T_IO  in
//   gradients  [slots, heads, 4] triangles      out, in the order above
//
// Grid (chunks, heads, sequences), a block per chunk and head: each warp half a triangle of one of them, over 64 values
// at a time.
#include "wkv7_slab.cuh"

static_assert(NUM_THREADS == 4 * CHUNK_LEN, "num_threads must be four times chunk_len");

struct Stage { Slab<CHUNK_LEN> v, u, dy, dx; };
struct Smem { Stage stages[2]; };
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_token_gradients(
    const T_IO* __restrict__ v, const T_IO* __restrict__ dy, const i64* __restrict__ cu_seqlens,
    const T_IO* __restrict__ u, const T_IO* __restrict__ dx, uint4* __restrict__ gradients, Strides v_strides,
    Strides dy_strides, i64 tokens, i64 heads, i64 sequences, int first_chunk) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const i64 slot = slot_of(blockIdx.x, first_chunk, tokens), head = blockIdx.y;
    const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
    if (chunk.steps == 0) return;
    const i64 token = chunk.span.begin + chunk.token;
    const auto start = [&](Strides s) { return chunk.span.batch * s.batch + token * s.token + head * s.head; };
    // what is contiguous
    const i64 stride = heads * VALUE_SIZE, row = (chunk.span.batch * tokens + token) * heads + head;
    using Values = ValueColumns<TILE_COLUMNS, NUM_THREADS, T_IO>;
    using Solutions = ValueColumns<TILE_COLUMNS, NUM_THREADS, T_IO>;
    Values of_v(v + start(v_strides), v_strides.token), of_dy(dy + start(dy_strides), dy_strides.token);
    Solutions of_u(u + row * VALUE_SIZE, stride), of_dx(dx + row * VALUE_SIZE, stride);

    const auto load_stage = [&](int first_value) {
        if (first_value < VALUE_SIZE) {
            Stage& stage = smem.stages[first_value / TILE_COLUMNS % 2];
            of_v.copy(stage.v, 0, chunk.steps), of_dy.copy(stage.dy, 0, chunk.steps);
            of_u.copy(stage.u, 0, chunk.steps), of_dx.copy(stage.dx, 0, chunk.steps);
        }
        commit_copies();
    };
    const int warp = warp_id();
    const bool is_x = warp & 2, is_u = warp & 1;
    HalfTriangle sum = {};
    load_stage(0);
    for (int first_value = 0; first_value < VALUE_SIZE; first_value += TILE_COLUMNS) {
        load_stage(first_value + TILE_COLUMNS);
        wait_for_copies<1>();
        __syncthreads();  // this stage is there
        const Stage& stage = smem.stages[first_value / TILE_COLUMNS % 2];
        const auto left = tile_of(is_x ? stage.dx : stage.dy), right = tile_of(is_u ? stage.u : stage.v);
        if (warp < 4) add_products<0>(sum, left, right);
        else add_products<HALVES - 1>(sum, left, right);
        __syncthreads();  // nobody reads it any more
    }
    uint4* const target = gradients + ((slot * heads + head) * 4 + warp % 4) * TRIANGLE_UNITS;
    const auto store = [&](int i, int p, int q) {
        if (p == q) keep_lower(sum[i], is_x);
        const Fragment f = to_fragment(sum[i][0], sum[i][1]);
        unsigned* const block = reinterpret_cast<unsigned*>(target + (p * (p + 1) / 2 + q) * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) block[32 * j + lane_id()] = f.at[j];
    };
    if (warp < 4) for_blocks_of_half<0>(store);
    else for_blocks_of_half<HALVES - 1>(store);
}
