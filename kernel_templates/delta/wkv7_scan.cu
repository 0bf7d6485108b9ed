// RWKV-7 time mixing, the states of one head after another chunk of tokens: the value side of the split form, forwards,
// or, with BACKWARD, from the last chunk to the first, for gradients. With what wkv7_prepare found,
//
//     S' = S diag(e^m)          X = W S'^T    Y  = R0 S'^T + M V       U  = X + TA V
//     S <- (S' + V^T K0 + X^T B) diag(e^(D - m))
//     E' = E diag(e^(D - m))    Z = B E'^T    dV = K0 E'^T + M^T dY    dX = Tm^T Z + G^T dY
//     E <- (E' + dY^T R0 + Z^T W) diag(e^m)
//
//   input        [batch, tokens, heads, V]  T_IO  in: v, or dy
//   first        [sequences, heads, V, K] or kv  T_STATE  in or null: initial state, or gradient of the final one
//   operands, matrices, frames  from wkv7_prepare
//   output       [batch, tokens, heads, V]  T_IO  out: y, or dv
//   solved       [batch, tokens, heads, V]  T_IO  out, or null forwards: U, or dX
//   states       [slots, heads, SLABS, VALUES] rows of 64 channels, T_IO  out or null: S', or E', of every chunk, in
//                the order of lanes (wkv7_operands.cuh)
//   last         [sequences, heads, V, K] or kv  T_STATE  out or null: final state, or gradient of the initial one
//
// Grid (sequences x blocks of VALUE_ROWS rows, heads). A warp holds 16 value rows and CHANNELS / KEY_WARPS channels of
// the state in fp32 for the whole sequence; KEY_WARPS warps have the same rows and add up their X and Y. The operands
// come in stages, 64 channels of two of them for each of these warps, STAGES - 1 stages ahead. Between two chunks the
// state lacks the factor that ends a chunk; it gets it together with the one that begins the next.
#include "pooled.cuh"
#include "wkv7_slab.cuh"

constexpr int ROW_WARPS = WARPS / KEY_WARPS, VALUE_ROWS = 16 * ROW_WARPS;
constexpr int SPAN_SLABS = SLABS / KEY_WARPS;  // of a warp
// stages of a chunk: first W and R0, then B and K0; backwards the other way
constexpr int STEPS = 2 * SPAN_SLABS;
constexpr int SHARE = max_of(CHUNK_LEN / KEY_WARPS, 16);  // tokens whose outputs a warp finishes
constexpr int FIRST_MATRIX = BACKWARD ? 1 : 0, TAKEN = BACKWARD ? 3 : 2;  // of the chunk's
constexpr int VALUE_PITCH = VALUE_ROWS + 8;
constexpr int FRAME_CHANNELS = ceil_div(CHANNELS, NUM_THREADS);
static_assert(KEY_WARPS == 1 || KEY_WARPS == 2 || KEY_WARPS == 4, "key_warps must be 1, 2 or 4");
static_assert(SLABS % KEY_WARPS == 0, "channels must be a multiple of 64 key_warps");
static_assert(SPAN_SLABS <= 4, "key_warps must leave a warp 256 channels at most");
static_assert(WARPS % KEY_WARPS == 0 && WARPS <= 16, "num_threads must be a multiple of 32 key_warps, up to 512");
static_assert(STAGES >= 2 && STAGES <= STEPS + 1, "stages must be 2 at least and look ahead one chunk at most");

struct Smem {
    Slab<CHUNK_LEN> ring[STAGES][KEY_WARPS][2];
    Triangle matrices[2][TAKEN];
    T_IO values[2][CHUNK_LEN][VALUE_PITCH], outputs[CHUNK_LEN][VALUE_PITCH];
    float factor[CHANNELS];
    // Where several warps have the same rows: sums for the others, by whom they are for, and X.
    float4 parts[ROW_WARPS][KEY_WARPS][max_of(KEY_WARPS - 1, 1)][2][KEY_WARPS > 1 ? SHARE / 8 : 1][32];
    uint4 solution[ROW_WARPS][KEY_WARPS > 1 ? BLOCKS : 1][32];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// state[n] is the channels 8 n .. of a warp's: visit(element, value, channel, whether it exists).
using StateRows = Accumulator[SPAN_SLABS * 8];
template <typename Visit> __device__ inline void for_each_element(StateRows& state, int row, int first_channel,
                                                                  Visit visit) {
#pragma unroll
    for (int n = 0; n < SPAN_SLABS * 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int value = row + group() + i / 2 * 8, channel = first_channel + 8 * n + 2 * quad_lane() + i % 2;
            visit(state[n][i], value, channel, value < VALUE_SIZE && channel < HEAD_SIZE);
        }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) wkv7_scan(
    const T_IO* __restrict__ input, const T_STATE* __restrict__ first, const i64* __restrict__ cu_seqlens,
    const uint4* __restrict__ operands, const uint4* __restrict__ matrices, const float* __restrict__ frames,
    const int* __restrict__ halved, T_IO* __restrict__ output, T_IO* __restrict__ solved, uint4* __restrict__ states,
    T_STATE* __restrict__ last, Strides input_strides, i64 tokens, i64 heads, const Piece* __restrict__ pieces,
    i64 slot_stride, int wave, int waves) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    constexpr int ROW_BLOCKS = ceil_div(VALUE_SIZE, VALUE_ROWS);
    const i64 sequence = piece_of(blockIdx.x / ROW_BLOCKS, wave, waves), head = blockIdx.y;
    const int block_row = blockIdx.x % ROW_BLOCKS * VALUE_ROWS, warp = warp_id();
    const int row_warp = warp % ROW_WARPS, key_warp = warp / ROW_WARPS;
    const int own_row = 16 * row_warp, first_value = block_row + own_row,
              first_channel = key_warp * (SPAN_SLABS * TILE_COLUMNS);
    if (is_for_others(pieces, sequence, wave)) return;
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const int chunks = static_cast<int>((span.length + CHUNK_LEN - 1) / CHUNK_LEN);
    const i64 first_slot = first_checkpoint(cu_seqlens, sequence, span, CHUNK_LEN);
    const auto index_of = [&](int n) { return BACKWARD ? chunks - 1 - n : n; };  // chunks by the order they are met in
    const auto place_of_chunk = [&](int n) { return (first_slot + index_of(n)) * heads + head; };

    input +=
        span.batch * input_strides.batch + span.begin * input_strides.token + head * input_strides.head + block_row;
    const i64 out_stride = heads * VALUE_SIZE, out_row = (span.batch * tokens + span.begin) * heads + head;
    output += out_row * VALUE_SIZE + first_value;
    if (solved != nullptr) solved += out_row * VALUE_SIZE + first_value;
    const i64 state_offset = (sequence * heads + head) * (VALUE_SIZE * HEAD_SIZE);

    const auto load_stage = [&](int stage) {
        const int n = stage / STEPS, step = stage % STEPS;
        if (n < chunks) {
            const i64 place = place_of_chunk(n);
            const int pair = (step >= SPAN_SLABS) != BACKWARD, slab = step % SPAN_SLABS;
            const uint4* const source =
                operands + ((place * 2 + pair) * SLABS + slab) * (2 * SLAB_UNITS) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < KEY_WARPS; ++i)
                copy_units(smem.ring[stage % STAGES][i], source + i * (SPAN_SLABS * 2 * SLAB_UNITS));
            if (step == 0) {
                const uint4* const triangles =
                    matrices + (place * MATRICES + FIRST_MATRIX) * TRIANGLE_UNITS + threadIdx.x;
#pragma unroll
                for (int i = 0; i < TAKEN; ++i)  // TA only where U is wanted
                    if (BACKWARD || i > 0 || solved != nullptr)
                        copy_units(smem.matrices[n % 2][i], triangles + i * TRIANGLE_UNITS);
                const i64 token = i64(index_of(n)) * CHUNK_LEN;
                copy_rows<T_IO, VALUE_SIZE, CHUNK_LEN, VALUE_ROWS, VALUE_PITCH, NUM_THREADS>(
                    smem.values[n % 2][0], input + token * input_strides.token, input_strides.token,
                    span.length - token, min(VALUE_ROWS, VALUE_SIZE - block_row), threadIdx.x);
            }
        }
        commit_copies();
    };

    // Factors: 2^x of the thread's channels, from the frame of the chunk to come and what the last one left behind.
    float pending_exponent[FRAME_CHANNELS] = {}, begins[FRAME_CHANNELS], ends[FRAME_CHANNELS];
    const auto load_frame = [&](int n) {
        const i64 place = place_of_chunk(n);
        const float* const frame = frames + place * (2 * CHANNELS);
#pragma unroll
        for (int i = 0; i < FRAME_CHANNELS; ++i) {
            const int channel = min(static_cast<int>(threadIdx.x) + i * NUM_THREADS, CHANNELS - 1);
            const bool has_frame = LARGEST_DECAY == 0 || !halved[place * SLABS + channel / TILE_COLUMNS];
            begins[i] = has_frame ? frame[(BACKWARD ? CHANNELS : 0) + channel] : 0.0f;
            ends[i] = has_frame ? frame[(BACKWARD ? 0 : CHANNELS) + channel] : 0.0f;
        }
    };
    const auto write_factor = [&](bool is_last) {
#pragma unroll
        for (int i = 0; i < FRAME_CHANNELS; ++i) {
            const int channel = threadIdx.x + i * NUM_THREADS;
            const float exponent = pending_exponent[i] + (is_last ? 0.0f : begins[i]);
            if (channel < CHANNELS) smem.factor[channel] = exp2_fast(exponent / FACTOR_STEPS);
            pending_exponent[i] = ends[i];
        }
    };
    StateRows state;
    const auto scale_slab = [&](int slab) {
#pragma unroll
        for (int n = 8 * slab; n < 8 * slab + 8; ++n) {
            const float2 f = *reinterpret_cast<const float2*>(&smem.factor[first_channel + 8 * n + 2 * quad_lane()]);
#pragma unroll
            for (int i = 0; i < FACTOR_STEPS; ++i)
                state[n][0] *= f.x, state[n][1] *= f.y, state[n][2] *= f.x, state[n][3] *= f.y;
        }
    };
    // A slab that was taken by halves has no frame: what is in the state passes the chunk's decay, which stands in its
    // place.
    const auto pass_slab = [&](int chunk, int slab) {
        const i64 place = place_of_chunk(chunk);
        if (!halved[place * SLABS + first_channel / TILE_COLUMNS + slab]) return;
        const float* const decays = frames + place * (2 * CHANNELS) + first_channel + 2 * quad_lane();
#pragma unroll
        for (int n = 8 * slab; n < 8 * slab + 8; ++n) {
            const float2 f = *reinterpret_cast<const float2*>(&decays[8 * n]);
            state[n][0] *= f.x, state[n][1] *= f.y, state[n][2] *= f.x, state[n][3] *= f.y;
        }
    };

    for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.values) / 4); i += NUM_THREADS)
        reinterpret_cast<unsigned*>(smem.values)[i] = 0;  // columns past the last value stay zero
    __syncthreads();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) load_stage(stage);
    if (chunks > 0) load_frame(0);
    const T_STATE* const own_first = first_state(first, state_offset, pieces, sequence, head, slot_stride);
    for_each_element(state, first_value, first_channel, [&](float& x, int value, int channel, bool present) {
        x = present && own_first != nullptr ? to_float(own_first[state_index<STATE_LAYOUT>(value, channel)]) : 0.0f;
    });

    int stage = 0;
    const auto next_stage = [&] {  // the tiles of the stage that is there now
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        load_stage(stage + STAGES - 1);
        return &smem.ring[stage++ % STAGES][key_warp];
    };
    for (int n = 0; n < chunks; ++n) {
        const i64 token = i64(index_of(n)) * CHUNK_LEN;
        write_factor(false);
        if (n + 1 < chunks) load_frame(n + 1);
        // Accumulators [value, token]: X and the output.
        Accumulator x[CHUNK_LEN / 8] = {}, out[CHUNK_LEN / 8] = {};
#pragma unroll
        for (int slab = 0; slab < SPAN_SLABS; ++slab) {
            const auto& tiles = *next_stage();
            // Forwards W R0, backwards B K0.
            const SlabTile for_x = {shared_address(&tiles[0].units[0][0])};
            const SlabTile for_out = {shared_address(&tiles[1].units[0][0])};
            scale_slab(slab);
#pragma unroll
            for (int c = 0; c < TILE_COLUMNS / 16; c += 2) {
                Fragment rows[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int at = 8 * slab + 2 * (c + i);
                    rows[i] = to_fragment(state[at], state[at + 1]);
                }
                if (states != nullptr) {
                    uint4* const target =
                        states + ((place_of_chunk(n) * SLABS + first_channel / TILE_COLUMNS + slab) * VALUES +
                                  first_value + group()) *
                                     8;
                    const int unit = (c / 2 * 4 + quad_lane()) ^ group();
                    target[unit] = {rows[0].at[0], rows[0].at[2], rows[1].at[0], rows[1].at[2]};
                    target[64 + unit] = {rows[0].at[1], rows[0].at[3], rows[1].at[1], rows[1].at[3]};
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int p = 0; p < BLOCKS; ++p) {
                        multiply_add(&x[2 * p], rows[i], load_right_transposed(for_x, 16 * p, 16 * (c + i)));
                        multiply_add(&out[2 * p], rows[i], load_right_transposed(for_out, 16 * p, 16 * (c + i)));
                    }
            }
            if constexpr (LARGEST_DECAY > 0) pass_slab(n, slab);
        }

        Fragment x_rows[BLOCKS], value_rows[BLOCKS];
        if constexpr (KEY_WARPS == 1) {
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) x_rows[q] = to_fragment(x[2 * q], x[2 * q + 1]);
        } else {  // the first SHARE / 8 accumulators become the warp's own tokens
            constexpr int COUNT = SHARE / 8, SHARES = CHUNK_LEN / SHARE;
            const auto as_four = [](const Accumulator& sum) { return float4{sum[0], sum[1], sum[2], sum[3]}; };
#pragma unroll
            for (int other = 0; other < SHARES; ++other) {
                if (other == key_warp) continue;
                auto& parts = smem.parts[row_warp][other][key_warp - (key_warp > other)];
#pragma unroll
                for (int j = 0; j < COUNT; ++j) {
                    parts[0][j][lane_id()] = as_four(x[other * COUNT + j]);
                    parts[1][j][lane_id()] = as_four(out[other * COUNT + j]);
                }
            }
#pragma unroll
            for (int other = 1; other < SHARES; ++other)
                if (other == key_warp)
#pragma unroll
                    for (int j = 0; j < COUNT; ++j)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            x[j][i] = x[other * COUNT + j][i], out[j][i] = out[other * COUNT + j][i];
            __syncthreads();  // the parts are there
            if (key_warp < SHARES) {
#pragma unroll
                for (int from = 0; from < KEY_WARPS - 1; ++from)
#pragma unroll
                    for (int j = 0; j < COUNT; ++j) {
                        const float4 a = smem.parts[row_warp][key_warp][from][0][j][lane_id()];
                        const float4 b = smem.parts[row_warp][key_warp][from][1][j][lane_id()];
                        x[j][0] += a.x, x[j][1] += a.y, x[j][2] += a.z, x[j][3] += a.w;
                        out[j][0] += b.x, out[j][1] += b.y, out[j][2] += b.z, out[j][3] += b.w;
                    }
#pragma unroll
                for (int j = 0; j < SHARE / 16; ++j) {
                    const Fragment f = to_fragment(x[2 * j], x[2 * j + 1]);
                    smem.solution[row_warp][key_warp * (SHARE / 16) + j][lane_id()] = {f.at[0], f.at[1], f.at[2],
                                                                                       f.at[3]};
                }
            }
            __syncthreads();  // X is there
#pragma unroll
            for (int q = 0; q < BLOCKS; ++q) {
                const uint4 f = smem.solution[row_warp][q][lane_id()];
                x_rows[q] = {{f.x, f.y, f.z, f.w}};
            }
        }
        const Tile<VALUE_PITCH> values = {shared_address(&smem.values[n % 2][0][0])};
        const Tile<VALUE_PITCH> outputs = {shared_address(&smem.outputs[0][0])};
#pragma unroll
        for (int q = 0; q < BLOCKS; ++q) value_rows[q] = load_left_transposed(values, 16 * q, own_row);

        if (key_warp * SHARE < CHUNK_LEN) {
            const auto m = tile_of(smem.matrices[n % 2][1 - FIRST_MATRIX]);
            const auto for_solved = tile_of(smem.matrices[n % 2][FIRST_MATRIX]);  // TA, or Tm
            const auto g = tile_of(smem.matrices[n % 2][TAKEN - 1]);
            const int first_token = key_warp * SHARE,
                      steps = static_cast<int>(min(span.length - token, i64(CHUNK_LEN)));
            const int rows = min(steps - first_token, SHARE), width = min(16, VALUE_SIZE - first_value);
            const i64 target = (token + first_token) * out_stride;
#pragma unroll
            for (int j = 0; j < SHARE / 16; ++j) {
                const int p = first_token / 16 + j;
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q) {
                    if (BACKWARD ? q < p : q > p) continue;
                    const Right block = BACKWARD ? load_right(m, q, p) : load_right_transposed(m, p, q);
                    multiply_add(&out[2 * j], value_rows[q], block);
                }
                store_block_transposed(outputs, 16 * p, own_row, to_fragment(out[2 * j], out[2 * j + 1]));
            }
            __syncwarp();
            write_rows<T_IO, VALUE_SIZE, SHARE, 16, VALUE_PITCH, 32>(
                output + target, out_stride, &smem.outputs[first_token][own_row], rows, width, lane_id());
            if (solved != nullptr) {
                __syncwarp();
#pragma unroll
                for (int j = 0; j < SHARE / 16; ++j) {
                    const int p = first_token / 16 + j;
                    Accumulator sum[2] = {};
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (!BACKWARD) sum[i / 4][i % 4] = x[2 * j + i / 4][i % 4];
#pragma unroll
                    for (int q = 0; q < BLOCKS; ++q) {
                        if (BACKWARD ? q < p : q > p) continue;
                        if (BACKWARD) {
                            multiply_add(sum, x_rows[q], load_right(for_solved, q, p));
                            multiply_add(sum, value_rows[q], load_right(g, q, p));
                        } else {
                            multiply_add(sum, value_rows[q], load_right_transposed(for_solved, p, q));
                        }
                    }
                    store_block_transposed(outputs, 16 * p, own_row, to_fragment(sum[0], sum[1]));
                }
                __syncwarp();
                write_rows<T_IO, VALUE_SIZE, SHARE, 16, VALUE_PITCH, 32>(
                    solved + target, out_stride, &smem.outputs[first_token][own_row], rows, width, lane_id());
            }
            __syncwarp();
        }

#pragma unroll
        for (int slab = 0; slab < SPAN_SLABS; ++slab) {
            const auto& tiles = *next_stage();
            // Forwards B K0, backwards W R0.
            const SlabTile with_x = {shared_address(&tiles[0].units[0][0])};
            const SlabTile with_values = {shared_address(&tiles[1].units[0][0])};
#pragma unroll
            for (int c = 0; c < TILE_COLUMNS / 16; ++c)
#pragma unroll
                for (int q = 0; q < BLOCKS; ++q) {
                    multiply_add(&state[8 * slab + 2 * c], x_rows[q], load_right(with_x, 16 * q, 16 * c));
                    multiply_add(&state[8 * slab + 2 * c], value_rows[q], load_right(with_values, 16 * q, 16 * c));
                }
        }
    }
    wait_for_copies<0>();
    if (!has_last_state(last, pieces, sequence)) return;
    __syncthreads();
    write_factor(true);
    __syncthreads();
#pragma unroll
    for (int slab = 0; slab < SPAN_SLABS; ++slab) scale_slab(slab);
    T_STATE* const own_last = last_state(last, state_offset, pieces, sequence, head, slot_stride);
    for_each_element(state, first_value, first_channel, [&](float& x, int value, int channel, bool present) {
        if (present) own_last[state_index<STATE_LAYOUT>(value, channel)] = from_float<T_STATE>(x);
    });
}
