// The sequences of a call whose states lie in a pool, as `arrange_sequences` leaves them to the other launches.
#pragma once
#include "types.cuh"

// A sequence, or its tokens between two checkpoints. Slots are negative where nothing is read or written.
struct Piece {
    int read, write;  // the slots of its first and its last state
    int wave;         // of the launches by chunks, which come one after another; negative where it is for none of them
    int kind;         // PieceKind
};

// What the launch that goes token by token does with a piece: nothing, all of it, or zeros for its y.
namespace PieceKind { constexpr int none = 0, few_tokens = 1, zeros = 2; }
