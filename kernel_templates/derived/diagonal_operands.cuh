// Where the operands of gated linear attention come from, in both directions.
//
// Needs SOURCE, and what operand_rows.cuh and state_steps.cuh need.
#pragma once
#include "operand_rows.cuh"
#include "state_steps.cuh"

enum class Source { none, heads, steps, gates };
constexpr Source SOURCE_KIND = Source(SOURCE);
constexpr bool HAS_STEPS = SOURCE_KIND == Source::steps, HAS_GATES = SOURCE_KIND == Source::gates;
constexpr bool HAS_DECAYS = HAS_STEPS || SOURCE_KIND == Source::heads;
