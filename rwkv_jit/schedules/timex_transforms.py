"""TimeX by Fourier transforms that a block holds in shared memory, for rows too long for tiles.

`timex_transform.cu` says how. What a filter multiplies spectra by comes first. A gradient of the filter is a sum over
the batch, in parts where the channels are too few for all blocks.
"""

from __future__ import annotations

from typing import Any

from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step, Stride

# Of transforms, and points of a thread; no shorter one pays, and no block holds a longer one. Lengths between powers of
# two do not pay either: with a first pass of 24 points, 1536 took 0.166 ms where 2048 took 0.138, and 6144 0.87 where
# 8192 took 0.49 (8 rows of 768 channels, float32, H200).
_LENGTHS = {1024: 32, 2048: 16, 4096: 16, 8192: 32, 16384: 32}
_REGISTERS = {1024: 160, 2048: 96, 4096: 80, 8192: 128, 16384: 128}  # of a thread
_GRADIENT_REGISTERS = _REGISTERS | {4096: 128}  # of one that sums spectra: with 80 it has too few
_ALL_REGISTERS = 2**16  # of a multiprocessor
_MOST_BLOCKS = 2**31 - 1  # of a launch
_ROUNDS = 4  # of groups of rows that blocks shall take, so that few of them wait at the end


def length(tokens: int) -> int:
    """Return the shortest transform in which nothing comes round, or the longest; torch 2.6 can only compile a loop."""
    for each in _LENGTHS:
        if each >= tokens:
            return each
    return max(_LENGTHS)


def _shared_bytes(points: int) -> int:
    return points // 16 * 17 * 8


def obstacle(p: Problem) -> str | None:
    """Return why such rows cannot be taken, for a sentence that begins with who they are for."""
    if max(_LENGTHS) < p.T:
        return f"takes at most {max(_LENGTHS)} tokens, got {p.T}"
    needed, limit = _shared_bytes(length(p.T)), p.gpu.shared_limit
    return None if needed <= limit else f"needs {needed} bytes of shared memory, {p.gpu.arch} has {limit}"


def forward(p: Problem) -> Schedule:
    """Return the convolution."""
    return Schedule(tuple(_convolve(p, "k", "y")), {"y": Result(p.shape("k"), p.types["k"])}, {}, _factors(p))


def backward(p: Problem) -> Schedule:
    """Return the gradients: of w a sum for each group of rows, of k the correlation with the filter."""
    parameters = _parameters(p, "dy", "k")
    at_once = (p.multiprocessors or 1) * int(parameters["GRADIENT_BLOCKS_PER_SM"])
    group_rows = -(-p.B // -(-_ROUNDS * at_once // p.C))
    groups = -(-p.B // group_rows)
    blocks = min(at_once, p.C * groups)
    scratch = {"spectra": 24 * blocks * length(p.T), **_factors(p)}
    is_sum = groups == 1 and p.types["w"] == "fp32"
    bind = {
        **common.given(p), "g": "dy", "scratch": "spectra", "sums": "dw" if is_sum else "sums",
        "g_batch_stride": Stride("dy", "B"), "g_stride": Stride("dy", "C"), "k_batch_stride": Stride("k", "B"),
        "k_stride": Stride("k", "C"), "group_rows": group_rows, "groups": groups,
    }  # fmt: skip
    steps = [_step("timex_transform_gradient", parameters, blocks, bind)]
    if not is_sum:
        scratch["sums"] = 4 * groups * p.C * p.T
        columns = 1 if p.T % 4 else 4  # not by C, which calls ahead of time do not know
        steps.append(common.sum_rows("sums", "dw", 1, groups, p.C * p.T, p.types["w"], thread_columns=columns))
    steps += _convolve(p, "dy", "dk")
    return Schedule(tuple(steps), common.backward_results(p), scratch=scratch)


def _convolve(p: Problem, source: str, target: str) -> list[Step]:
    """Return the convolution of k, or the correlation of dy, which is the gradient of k: the rows first."""
    rows = p.B * p.C
    if rows > _MOST_BLOCKS:
        raise UnsupportedConfigError(f"k: 'transforms' take at most {_MOST_BLOCKS} rows, got {rows}; use 'fft'")
    is_correlation = source == "dy"
    bind = {
        **common.given(p), "k": source, "out": target, "w_stride": Stride("w", "C"),
        "k_batch_stride": Stride(source, "B"), "k_stride": Stride(source, "C"), "eps": 0.0 if is_correlation else p.eps,
        "conjugates": int(is_correlation),
    }  # fmt: skip
    parameters = _parameters(p, "w", source)
    return [_step("timex_factors", parameters, p.C, bind), _step("timex_transform", parameters, rows, bind)]


def _step(entry: str, parameters: dict[str, Parameter], blocks: Any, bind: dict[str, Any]) -> Step:
    return Step("timex_transform", entry, parameters, (blocks, 1, 1), bind)


def _factors(p: Problem) -> dict[str, Any]:
    """Return the bytes of what filters multiply spectra by."""
    return {"factors": 16 * p.C * length(p.T)}


def _parameters(p: Problem, *sources: str) -> dict[str, Parameter]:
    """Return those of all kernels; they read two neighbours of these inputs at once, or one."""
    points = length(p.T)
    threads, shared = points // _LENGTHS[points], _shared_bytes(points)
    room = p.gpu.shared_per_multiprocessor // (shared + 1024)
    blocks, of_gradient = (
        min(room, _ALL_REGISTERS // (threads * registers[points])) for registers in (_REGISTERS, _GRADIENT_REGISTERS)
    )
    return {
        "T_W": p.types["w"], "T_IO": p.types["k"], "LENGTH": points, "NUM_THREADS": threads,
        "BLOCKS_PER_SM": blocks, "GRADIENT_BLOCKS_PER_SM": of_gradient, "SHARED_BYTES": shared,
        "PAIRED": common.together(p, *sources) > 1,
    }  # fmt: skip
