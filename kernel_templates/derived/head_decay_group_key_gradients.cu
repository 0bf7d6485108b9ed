// Recurrences with one decay for a head, backward, what chunks have for themselves, as head_decay_key_gradients.cu does
// it (arguments and formulas are there), with the products of four warps at once: for head sizes of 64 and 128 on
// sm_90a. `states` and `slopes` are matrices of 8 x 8, as these products read them.
//
// A block takes one chunk and key head after another, and the value heads of each in turn, 64 values of a head at a
// time: as much again is on its way. The first group of warps makes P, N and dQ, the second dK.
#include "bulk_copy.cuh"
#include "fresh.cuh"
#include "head_decay_factors.cuh"
#include "head_decay_gate_gradients.cuh"
#include "head_decay_group_sums.cuh"
#include "head_decay_group_tasks.cuh"

static_assert(HEAD_SIZE % TILE_COLUMNS == 0 && VALUE_SIZE % TILE_COLUMNS == 0, "head sizes in steps of 64");
static_assert(CHUNK_LEN == 64, "chunk_len must be 64");
static_assert(NUM_THREADS == 256, "num_threads must be 256");
constexpr int SIDES = HAS_DELTA ? 2 : 1;  // what is read, and what is erased
constexpr int PARTS = CHUNK_LEN / PART_LEN;
using PartFactors = PairFactors<PART_LEN>;
using TokenFactors = FactorsOf<PART_LEN>;

// A delta leaves no registers for addresses from one chunk to the next.
__device__ inline int fresh_with_delta(int number) { return HAS_DELTA ? fresh(number) : number; }

struct Stage {
    Slab<CHUNK_LEN> u, left[SIDES];  // U; dY and dV
    StatePiece state, slope;
};
struct __align__(1024) Smem {
    Stage ring[2];
    KeySlabs q[2], k[2];           // later dq and dk
    Slab<CHUNK_LEN> pairs[SIDES];  // P and N
    PartFactors parts[2][PARTS];
    ChunkFactors<CHUNK_LEN> factors;
    // Of pairs' factors, to the base 2: c with the logarithms of of_q and of of_k, and c less that of of_k.
    float left_exponents[SIDES][CHUNK_LEN], right_exponents[CHUNK_LEN];
    float of_query[CHUNK_LEN];                      // q . dQ
    float rest[CHUNK_LEN];                          // what P's diagonals have lost, with no delta
    float of_rows[CHUNK_LEN];                       // what pairs add to x ..
    float of_columns[4][CHUNK_LEN];                 // .. and to y, a part for each warp
    float of_states[2][CHUNK_LEN];                  // what states give to x and y
    float ends[WARPS];                              // of the gradient of D
    float of_own[WARPS][HAS_OWN ? VALUE_SIZE : 1];  // of what outputs have of values, over eight tokens each
    Task tasks[3];                                  // at hand, next, and after it
    CopyBarrier arrived[2];                         // the states of a stage
};
static_assert(sizeof(Smem) == SHARED_BYTES, "shared_bytes is what the geometry says");

// The factors of a thread's token; one that is not there has a factor of 0 in pairs too.
__device__ inline void read_factors(Smem& smem, const PartFactors (&parts)[PARTS], int steps) {
    if (threadIdx.x >= CHUNK_LEN) return;
    const int token = threadIdx.x;
    smem.factors.read<PART_LEN>(token, steps, [&](int part) -> const PartFactors& { return parts[part]; });
    const float decay = smem.factors.decay[token], of_k = log2_fast(smem.factors.of_k[token]);
    smem.left_exponents[0][token] = decay + log2_fast(fabsf(smem.factors.of_q[token]));
    if constexpr (HAS_DELTA) smem.left_exponents[SIDES - 1][token] = decay + of_k;
    smem.right_exponents[token] = decay - of_k;
}

// What P's diagonal, which decays leave alone, loses where it is rounded: of the warp's 16 rows. It is added to that of
// the value heads before this one, or begins the sum.
__device__ inline void write_rest(float (&rest)[CHUNK_LEN], const Accumulator (&pairs)[CHUNK_LEN / 8], int warp,
                                  bool begins) {
    float own[2] = {};
#pragma unroll
    for (int n = 0; n < CHUNK_LEN / 8; ++n)
        if (n / 2 == warp) own[n % 2] = group() % 2 ? pairs[n][n % 2 * 2 + 1] : pairs[n][n % 2 * 2];
    if (group() / 2 != quad_lane()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float& sum = rest[16 * warp + group() + 8 * half];
        sum = (begins ? 0.0f : sum) + (own[half] - to_float(from_float<T_IO>(own[half])));
    }
}
// The warp's block of a diagonal matrix, as a left operand.
__device__ inline Fragment diagonal_of(const float (&diagonal)[CHUNK_LEN], int warp) {
    const bool is_own = group() / 2 == quad_lane(), is_odd = group() % 2;
    const float upper = is_own ? diagonal[16 * warp + group()] : 0.0f,
                lower = is_own ? diagonal[16 * warp + group() + 8] : 0.0f;
    return {{is_odd ? pack(0.0f, upper) : pack(upper, 0.0f), 0, 0, is_odd ? pack(0.0f, lower) : pack(lower, 0.0f)}};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) head_decay_key_gradients(
    const T_IO* __restrict__ r, const T_IO* __restrict__ k, const T_IO* __restrict__ u, const T_IO* __restrict__ dy,
    const T_IO* __restrict__ dv, const T_W* __restrict__ w, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, const i64* __restrict__ cu_seqlens, const Checkpoint* __restrict__ states,
    const Checkpoint* __restrict__ slopes, const TokenFactors* __restrict__ factors, T_IO* __restrict__ dr,
    T_IO* __restrict__ dk, T_W* __restrict__ dw, T_BETA* __restrict__ dbeta, float* __restrict__ own_chunks,
    float* __restrict__ a_log_chunks, float* __restrict__ bias_chunks, Strides r_strides, Strides k_strides,
    Strides u_strides, Strides dy_strides, Strides w_strides, i64 sequences, i64 tokens, i64 heads,
    i64 slots) {
    __builtin_assume(threadIdx.x < NUM_THREADS);  // so that even shares need no test
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
    const int warp = warp_id(), first_row = warp % 4 * 16;
    const i64 key_heads = heads / GROUP;
    const Descriptors at(shared_bytes);

    // Sixteen bytes of a row of 64 elements, and of the 32nd row behind it.
    const auto copy_rows = [&](Slab<CHUNK_LEN>& slab, const T_IO* source, i64 stride, int steps) {
        constexpr int ROW_STEP = NUM_THREADS / 8;
        const int thread = fresh_with_delta(threadIdx.x), own = thread / 8, unit = thread % 8;
        const unsigned target = shared_address(&slab.units[own][unit ^ own % 8]);
        source += own * static_cast<int>(stride) + 8 * unit;
#pragma unroll
        for (int i = 0; i < CHUNK_LEN / ROW_STEP; ++i)
            copy_async<16>(target + i * (ROW_STEP * 128), source + i * (ROW_STEP * stride), own + i * ROW_STEP < steps);
    };
    const auto copy_piece = [&](const Task& from, int member, int turn, int piece, int to) {
        Stage& stage = smem.ring[to];
        const i64 head = from.key_head * GROUP + member, state = from.slot * heads + head;
        if (threadIdx.x == 0) {
            const int parts = piece == 0 ? (from.steps + PART_LEN - 1) / PART_LEN : 0;
            const auto copy = [&](void* target, const void* source, int bytes) {
                copy_bulk<1>(target, source, bytes, smem.arrived[to]);
            };
            constexpr int BYTES = sizeof(StatePiece);
            expect_bytes(smem.arrived[to], 2 * BYTES + parts * static_cast<int>(sizeof(PartFactors)));
            copy(stage.state, reinterpret_cast<const char*>(states + state) + piece * BYTES, BYTES);
            copy(stage.slope, reinterpret_cast<const char*>(slopes + state) + piece * BYTES, BYTES);
            for (int part = 0; part < parts; ++part)
                copy(&smem.parts[turn][part], factors[(from.first_part + part) * heads + head].decay,
                     sizeof(PartFactors));
        }
        __syncwarp();  // products are for whole warps
        const int column = piece * PIECE;
        copy_rows(stage.u, u + (from.u + head * u_strides.head + column), u_strides.token, from.steps);
        copy_rows(stage.left[0], dy + (from.dy + head * dy_strides.head + column), dy_strides.token, from.steps);
        if constexpr (HAS_DELTA)
            copy_rows(stage.left[1], dv + ((from.row * heads + head) * VALUE_SIZE + column), heads * VALUE_SIZE,
                      from.steps);
    };
    const auto copy_keys = [&](const Task& from, int to) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const int first = slab * TILE_COLUMNS;
            copy_rows(smem.q[to][slab], r + (from.q + first), r_strides.token, from.steps);
            copy_rows(smem.k[to][slab], k + (from.k + first), k_strides.token, from.steps);
        }
    };
    Tasks tasks = {cu_seqlens, slots, key_heads, sequences, tokens, r_strides, k_strides, u_strides, dy_strides,
                   w_strides};
    if (threadIdx.x == 0) {
        begin_barrier(smem.arrived[0], 1), begin_barrier(smem.arrived[1], 1), publish_barriers();
        smem.tasks[0] = tasks.next(), smem.tasks[1] = tasks.next();
    }
    __syncthreads();

    // Of the value head at hand, and of the one whose rows are on their way: which it is of its key head's, and the
    // places of its factors, of its keys and of its task.
    int member = 0, turn = 0, keys = 0, task = 0, next_member = 0, next_turn = 0, next_keys = 0, next_task = 0;
    if (smem.tasks[0].steps == 0) return;
    copy_keys(smem.tasks[0], 0);
    for (int piece = 0; piece < PIECES; ++piece) copy_piece(smem.tasks[0], 0, 0, piece, piece), commit_copies();
    const auto run = [&](bool makes_keys) {
        int parity = 0;
        Sums sum = {};          // dQ by the first group, dK by the second
        float squares[2] = {};  // q . dQ and k . dK of the lane's rows, of all value heads so far
        for (;;) {
            const int row = fresh_with_delta(first_row) + group();
            KeySlabs &q_rows = smem.q[keys], &k_rows = smem.k[keys];
            // By the first group A, and P and N; by the second B and C.
            Sums of_state = {};
            Accumulator second[max_of(CHANNELS, SIDES * CHUNK_LEN) / 8] = {};
            Sums& of_slope = reinterpret_cast<Sums&>(second);
            auto& pairs = reinterpret_cast<Accumulator(&)[SIDES][CHUNK_LEN / 8]>(second);
            float product = 0.0f;  // S_0 . E
#pragma unroll 1
            for (int piece = 0; piece < PIECES; ++piece) {
                const int at_hand = PIECES == 2 ? piece : turn;
                // As much is on its way as lies between a piece and the same one of the next value head.
                const auto copy_next = [&](int to) {
                    const Task& next = smem.tasks[next_task];
                    if (next.steps > 0) copy_piece(next, next_member, next_turn, piece, to);
                    commit_copies();
                };
                const auto copy_next_keys = [&] {
                    const Task& next = smem.tasks[next_task];
                    if (piece == 0 && next_member == 0 && next.steps > 0) copy_keys(next, next_keys);
                };
                wait_for_copies<PIECES - 1>();
                publish_writes();
                wait_for(smem.arrived[at_hand], parity);
                __syncthreads();  // the piece is there, and nobody reads the last one any more
                const Stage& stage = smem.ring[at_hand];
                if (piece == 0) {
                    next_turn ^= 1;
                    if (++next_member == GROUP) next_member = 0, next_keys ^= 1, next_task = (next_task + 1) % 3;
                }
                if constexpr (PIECES == 1) copy_next_keys(), copy_next(at_hand ^ 1);
                if (piece == 0) read_factors(smem, smem.parts[turn], smem.tasks[task].steps);

                hold(of_state), hold(second);  // which are there before products begin
                begin_products();
                if (!makes_keys) {
#pragma unroll
                    for (int c = 0; c < PIECE; c += 16) {
                        const auto of_u = at.rows(stage.u, 0, c), of_dy = at.rows(stage.left[0], 0, c);
                        multiply_group<64, Read::rows, Read::rows>(pairs[0], of_dy, of_u);
                        if constexpr (HAS_DELTA)
                            multiply_group<64, Read::rows, Read::rows>(pairs[SIDES - 1],
                                                                       at.rows(stage.left[SIDES - 1], 0, c), of_u);
#pragma unroll
                        for (int slab = 0; slab < SLABS; ++slab)
                            multiply_group<64, Read::rows, Read::columns>(&of_state[8 * slab], of_dy,
                                                                          at.matrices(stage.state, c, slab));
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < PIECE; c += 16)
#pragma unroll
                        for (int slab = 0; slab < SLABS; ++slab) {
                            if constexpr (HAS_DELTA)
                                multiply_group<64, Read::rows, Read::columns>(&of_state[8 * slab],
                                                                              at.rows(stage.left[SIDES - 1], 0, c),
                                                                              at.matrices(stage.state, c, slab));
                            multiply_group<64, Read::rows, Read::columns>(&of_slope[8 * slab],
                                                                          at.rows(stage.u, 0, c),
                                                                          at.matrices(stage.slope, c, slab));
                        }
                }
                end_batch();
                // What takes long is done while products are made; with a delta there are no registers for addresses.
                if (piece == 0 && member == 0 && threadIdx.x == 0) smem.tasks[(task + 2) % 3] = tasks.next();
                if constexpr (PIECES == 2 && !HAS_DELTA) copy_next_keys();
                if constexpr (HAS_DECAY) add_products(product, stage.state, stage.slope);
                if constexpr (HAS_OWN) {
                    float2 sums = {};
#pragma unroll
                    for (int token = 8 * warp; token < 8 * warp + 8; ++token) {
                        const unsigned x = word_in(stage.u, token, lane_id()),
                                       y = word_in(stage.left[0], token, lane_id());
                        sums.x += low_of(x) * low_of(y), sums.y += high_of(x) * high_of(y);
                    }
                    *reinterpret_cast<float2*>(&smem.of_own[warp][piece * PIECE + 2 * lane_id()]) = sums;
                }
                wait_for_batches<0>();
                hold(of_state), hold(second);
                if constexpr (PIECES == 2) {
                    if constexpr (HAS_DELTA) copy_next_keys();
                    __syncthreads();  // nobody reads the piece any more
                    copy_next(at_hand);
                }
            }
            if (PIECES == 2 || turn == 1) parity ^= 1;
            if constexpr (PIECES == 1) __syncthreads();  // the factors are there

            if constexpr (HAS_OWN)
                if (threadIdx.x < VALUE_SIZE) {
                    float sum_of_own = 0.0f;
#pragma unroll
                    for (int n = 0; n < WARPS; ++n) sum_of_own += smem.of_own[n][threadIdx.x];
                    const Task& here = smem.tasks[task];
                    const i64 head = here.slot * heads + here.key_head * GROUP + member;
                    own_chunks[head * VALUE_SIZE + threadIdx.x] = sum_of_own;
                }
            const float end = smem.factors.decay[CHUNK_LEN - 1];
            const auto grown = [&](int token) { return HAS_DECAY ? exp2_fast(smem.factors.decay[token]) : 1.0f; };
            const auto beta = [&](int token) { return HAS_RATE ? smem.factors.beta[token] : 1.0f; };
            const auto write = [&](float (&target)[CHUNK_LEN], const float (&of_lane)[2]) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float x = sum_of_lanes<1, 4>(of_lane[half]);
                    if (quad_lane() == 0) target[row + 8 * half] = x;
                }
            };
            float of_end = exp2_fast(end) * product;
            if (!makes_keys) {
                // Where registers allow, Q K^T while A is added and K K^T while P is made.
                constexpr bool IS_EARLY = GROUP == 1;
                Accumulator products[SIDES][CHUNK_LEN / 8];
                const auto multiply_keys = [&](KeySlabs& left, Accumulator* product) {
                    begin_products();
#pragma unroll
                    for (int c = 0; c < CHANNELS; c += 16)
                        multiply_group<64, Read::rows, Read::rows>(
                            c == 0, product, at.rows(left[c / TILE_COLUMNS], 0, c % TILE_COLUMNS),
                            at.rows(k_rows[c / TILE_COLUMNS], 0, c % TILE_COLUMNS));
                    end_batch();
                };
                float dots[2];
                const auto of_query = [&](int token) { return smem.factors.of_q[token] * grown(token); };
                if constexpr (IS_EARLY) multiply_keys(q_rows, products[0]);
                add_rows(sum, of_state, dots, q_rows, row, of_query, of_query);
                float of_column[CHUNK_LEN / 8][2] = {};
#pragma unroll
                for (int side = 0; side < SIDES; ++side) {
                    if constexpr (!IS_EARLY) multiply_keys(side == 0 ? q_rows : k_rows, products[side]);
                    wait_for_batches<0>();
                    hold(products[side]);
                    if (IS_EARLY && side + 1 < SIDES) multiply_keys(k_rows, products[SIDES - 1]);
                    const float sign = side == 0 ? copysignf(1.0f, smem.factors.of_q[0]) : -1.0f;
                    float exponents[2], of_row[2] = {};
#pragma unroll
                    for (int half = 0; half < 2; ++half) exponents[half] = smem.left_exponents[side][row + 8 * half];
#pragma unroll
                    for (int n = 0; n < CHUNK_LEN / 8; ++n) {
                        const int column = 8 * n + 2 * quad_lane();
                        const float2 to = pair_of(smem.right_exponents, column),
                                     rate = pair_of(smem.factors.beta, column);
                        const float rates[2] = {HAS_RATE ? sign * rate.x : sign, HAS_RATE ? sign * rate.y : sign};
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const bool exists = row + j / 2 * 8 - column - j % 2 >= side;  // on or below the diagonal
                            const float factor = exp2_fast(exponents[j / 2] - (j % 2 ? to.y : to.x));
                            const float pair = exists ? factor * pairs[side][n][j] : 0.0f,
                                        term = pair * products[side][n][j];
                            pairs[side][n][j] = rates[j % 2] * pair;
                            of_row[j / 2] += rates[j % 2] * term, of_column[n][j % 2] += sign * term;
                        }
                    }
                    if constexpr (!HAS_DELTA) write_rest(smem.rest, pairs[0], warp, member == 0);
#pragma unroll
                    for (int n = 0; n < CHUNK_LEN / 8; n += 2)
                        store_block(tile_of(smem.pairs[side]), first_row, 8 * n,
                                    to_fragment(pairs[side][n], pairs[side][n + 1]));
                    if constexpr (HAS_DECAY || HAS_NORM || HAS_RATE) {
                        if (side > 0) write(smem.of_rows, of_row);
                        else
#pragma unroll
                            for (int half = 0; half < 2; ++half) dots[half] += of_row[half];
                    }
                }
                if constexpr (HAS_DECAY || HAS_NORM || HAS_RATE) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) squares[half] += sum_of_lanes<1, 4>(dots[half]);
                    write(smem.of_query, dots);
                    const int column =
                        (lane_id() & 16) * 2 + (lane_id() & 8) * 2 + (lane_id() & 4) * 2 + 2 * quad_lane();
                    *reinterpret_cast<float2*>(&smem.of_columns[warp][column]) = sum_columns(of_column);
                }
            } else {
                if constexpr (HAS_DELTA) {
                    float dots[2];
                    const auto of_erased = [&](int token) { return -smem.factors.of_k[token] * grown(token); };
                    add_rows(sum, of_state, dots, k_rows, row, of_erased, of_erased);
                    write(smem.of_states[0], dots);
                }
                float dots[2];
                const auto of_written = [&](int token) {
                    return smem.factors.of_k[token] * (HAS_DECAY ? exp2_fast(end - smem.factors.decay[token]) : 1.0f);
                };
                add_rows(sum, of_slope, dots, k_rows, row, [&](int token) { return beta(token) * of_written(token); },
                         of_written);
                write(smem.of_states[1], dots);
#pragma unroll
                for (int half = 0; half < 2; ++half) of_end += beta(row + 8 * half) * dots[half];
            }
            if constexpr (HAS_DECAY) {
                of_end = sum_of_lanes<1, 32>(of_end);
                if (lane_id() == 0) smem.ends[warp] = of_end;
            }
            GateGradients of_gates;
            const i64 head = smem.tasks[task].key_head * GROUP + member;
            if (warp == 0)
                of_gates.load(w + (smem.tasks[task].w + head * w_strides.head), w_strides.token,
                              smem.tasks[task].steps);
            publish_writes();
            __syncthreads();  // P, N and the dots are there

            // dQ += P K   dK += P^T Q + N^T K + N K
            begin_products();
            if (!makes_keys) {
#pragma unroll
                for (int c = 0; c < CHUNK_LEN; c += 16)
#pragma unroll
                    for (int slab = 0; slab < SLABS; ++slab)
                        multiply_group<64, Read::rows, Read::columns>(&sum[8 * slab], at.rows(smem.pairs[0], 0, c),
                                                                      at.rows(k_rows[slab], c, 0));
            } else {
#pragma unroll
                for (int c = 0; c < CHUNK_LEN; c += 16)
#pragma unroll
                    for (int slab = 0; slab < SLABS; ++slab) {
                        multiply_group<64, Read::columns, Read::columns>(&sum[8 * slab], at.rows(smem.pairs[0], c, 0),
                                                                         at.rows(q_rows[slab], c, 0));
                        if constexpr (HAS_DELTA) {
                            const auto of_k = at.rows(k_rows[slab], c, 0);
                            const auto& n = smem.pairs[SIDES - 1];
                            multiply_group<64, Read::columns, Read::columns>(&sum[8 * slab], at.rows(n, c, 0), of_k);
                            multiply_group<64, Read::rows, Read::columns>(&sum[8 * slab], at.rows(n, 0, c), of_k);
                        }
                    }
            }
            end_batch();
            const Task& here = smem.tasks[task];
            const i64 first_token = here.row;
            const auto written = [&](int token) {  // y
                float y = smem.of_states[1][token];
#pragma unroll
                for (int n = 0; n < 4; ++n) y += smem.of_columns[n][token];
                return y;
            };
            const auto erased = [&](int token) {  // x
                return HAS_DELTA ? smem.of_states[0][token] + smem.of_rows[token] : 0.0f;
            };
            if ((HAS_DECAY || HAS_RATE) && warp == 0) {
                const GateMap map(a_log, dt_bias, head);
                float behind = 0.0f;  // dc of the tokens behind, and the gradient of D
                if constexpr (HAS_DECAY)
                    for (int n = 0; n < WARPS; ++n) behind += smem.ends[n];
#pragma unroll
                for (int first = CHUNK_LEN - 32; first >= 0; first -= 32) {
                    const int token = first + lane_id();
                    const float y = written(token);
                    const bool exists = token < here.steps;
                    const i64 at = (first_token + token) * heads + head;
                    if constexpr (HAS_RATE && !HAS_STEP)
                        if (exists) dbeta[at] = from_float<T_BETA>(y * slope_of_rate(beta(token)));
                    if constexpr (HAS_DECAY) {
                        const float sum = sum_from(smem.of_query[token] + erased(token) - beta(token) * y) + behind;
                        behind = __shfl_sync(0xffffffffu, sum, 0);
                        const float of_decay = smem.factors.of_decay(token, sum);
                        const float of_w = of_gates.through(map, first / 32, of_decay, y, exists);
                        if constexpr (HAS_STEP) {
                            if (exists) dbeta[at] = from_float<T_BETA>(of_w);
                        } else if (exists) {
                            dw[at] = from_float<T_W>(of_w);
                        }
                    }
                }
                of_gates.write(a_log_chunks, bias_chunks, here.slot * heads + head);
            }
            if (HAS_NORM && makes_keys)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    squares[half] += erased(row + 8 * half) + beta(row + 8 * half) * written(row + 8 * half);
            wait_for_batches<0>();
            hold(sum);
            turn ^= 1;
            if (++member < GROUP) continue;

            // dQ += rest K   dK += rest Q
            if constexpr (!HAS_DELTA) {
                const SlabsTile<sizeof(Slab<CHUNK_LEN>)> operand = {shared_address(makes_keys ? &q_rows : &k_rows)};
                const Fragment diagonal = diagonal_of(smem.rest, warp % 4);
#pragma unroll
                for (int c = 0; c < CHANNELS; c += 16)
                    multiply_add(&sum[c / 8], diagonal, load_right(operand, 16 * (warp % 4), c));
            }
            __syncthreads();  // nobody reads the keys any more
            KeySlabs& rows = makes_keys ? k_rows : q_rows;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int own = row + 8 * half;
                const float norm = makes_keys ? smem.factors.of_k[own] : smem.factors.norm_of_q[own],
                            f = norm * norm * squares[half];
                const RowWords words(rows, own);
#pragma unroll
                for (int n = 0; n < CHANNELS / 8; ++n) {
                    float2 x = {sum[n][2 * half], sum[n][2 * half + 1]};
                    if constexpr (HAS_NORM) {
                        const unsigned word = words.load(n);
                        x.x -= f * low_of(word), x.y -= f * high_of(word);
                    }
                    words.store(n, pack(x.x, x.y));
                    sum[n][2 * half] = sum[n][2 * half + 1] = 0.0f;
                }
                squares[half] = 0.0f;
            }
            __syncwarp();
            const int steps = here.steps;
            constexpr int UNITS = HEAD_SIZE / 8, STEP = 32 / UNITS;
            const int lane = fresh_with_delta(lane_id()), first = first_row + lane / UNITS, unit = lane % UNITS;
            const int stride = static_cast<int>(key_heads) * HEAD_SIZE;
            T_IO* target = (makes_keys ? dk : dr) + ((first_token * key_heads + here.key_head) * HEAD_SIZE +
                                                     (first * stride + 8 * unit));
            uint4 held[16 / STEP];
#pragma unroll
            for (int i = 0; i < 16 / STEP; ++i)
                held[i] = rows[unit / 8].units[first + i * STEP][unit % 8 ^ (first + i * STEP) % 8];
#pragma unroll
            for (int i = 0; i < 16 / STEP; ++i, target += STEP * stride)
                if (first + i * STEP < steps) write_global(target, held[i]);
            member = 0, keys ^= 1, task = (task + 1) % 3;
            if (smem.tasks[task].steps == 0) break;
        }
    };
    // A loop for each group, so that the compiler sees that its warps go the same way, and lets products overlap; one
    // for both where sums of several heads and a delta leave too few registers for that.
    if constexpr (HAS_DELTA && GROUP > 1 && HEAD_SIZE > 64) run(warp >= 4);
    else if (warp >= 4) run(true);
    else run(false);
    wait_for_copies<0>();
}
