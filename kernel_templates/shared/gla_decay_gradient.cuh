// The type of the log-decay's gradient in gated linear attention and its kin.
//
// Needs CONSTANT_DECAY, T_W.
#pragma once
#include "types.cuh"

// A constant decay's gradients are summed, in fp32.
template <bool SUMS> struct DecayGradient { using Type = T_W; };
template <> struct DecayGradient<true> { using Type = float; };
using T_DW = DecayGradient<CONSTANT_DECAY>::Type;
