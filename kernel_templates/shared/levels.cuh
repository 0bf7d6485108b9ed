// A chunk of any decay, by halves: for where the frame of a chunk's middle would leave the range of floats.
//
// A pair of tokens j < i lies in two neighbouring blocks of LEVEL tokens for exactly one LEVEL of 1, 2, 4 .. CHUNK_LEN
// / 2: j in the right operand's block and i in the left operand's, which begins at b. There
//
//     e^(c_i - c_j) = e^(c_i - c_(b-1)) e^(c_(b-1) - c_j)
//
// and where tokens decay, neither factor is above 1: nothing overflows, and what underflows is nothing. On a level
// every token is left or right, so one tile holds both operands: X has the rows of the left operand for left tokens and
// those of the right one for right tokens, and the level's pairs are among the products X X^T.
#pragma once

// Whether a pair of tokens is one of a level: of its larger number alone the bit of LEVEL is set, and no higher one
// differs.
__device__ inline bool is_of_level(int row, int column, int level) {
    return (row & level) && ((row ^ column) & -level) == level;
}
