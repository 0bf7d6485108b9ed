// A row of logits as a block reads it: whole accesses of 16 bytes, and single elements before and behind them.
//
// Rows follow each other without gaps. So where their length is odd, few of them begin where an access may.
//
// Needs T_IO, VECTOR, TARGET_BYTES, NUM_THREADS.
#pragma once
#include "layer.cuh"

template <int BYTES> struct TargetOf { using Type = int; };
template <> struct TargetOf<8> { using Type = i64; };
using Target = TargetOf<TARGET_BYTES>::Type;

constexpr int AHEAD = 4;  // pieces of a thread that are under way at once
static_assert(VECTOR * sizeof(T_IO) == 16, "a piece is an access of 16 bytes");
static_assert(NUM_THREADS % 32 == 0 && NUM_THREADS <= 1024, "num_threads must be a multiple of 32 up to 1024");

// Pieces of a row, the first behind `head` elements. What they leave, before and behind, is an element for a thread.
struct Cut {
    int head, pieces, edge;  // edge is not below the columns where the thread has none
    __device__ Cut(const T_IO* row, int columns) {
        const int off = static_cast<int>(reinterpret_cast<unsigned long long>(row) / sizeof(T_IO) % VECTOR);
        head = min_of((VECTOR - off) % VECTOR, columns);
        pieces = (columns - head) / VECTOR;
        const int thread = threadIdx.x;
        edge = thread < head ? thread : thread + pieces * VECTOR;
    }

    // For each whole piece of the thread: `act(piece, column)`. All loads of a few are under way before the first act.
    template <typename Act> __device__ void for_pieces(const T_IO* row, Act act) const {
        for (int first = threadIdx.x; first < pieces; first += AHEAD * NUM_THREADS) {
            Piece<T_IO> held[AHEAD];
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
                if (first + n * NUM_THREADS < pieces) held[n].load(row + head + (first + n * NUM_THREADS) * VECTOR);
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
                if (first + n * NUM_THREADS < pieces) act(held[n], head + (first + n * NUM_THREADS) * VECTOR);
        }
    }
};
