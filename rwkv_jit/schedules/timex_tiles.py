"""TimeX by tensor cores: the rows as Toeplitz tiles, whose work grows with the square of the tokens."""

from __future__ import annotations

from typing import NamedTuple

from rwkv_jit.kernels.gpu import TENSOR_CORES, Gpu
from rwkv_jit.kernels.template import Parameter
from rwkv_jit.schedules import common
from rwkv_jit.schedules.problem import BYTES, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step, Stride

_THREADS, _ROWS = 256, 4  # of a block; tiles of a warp
_MOST_BLOCKS = 65535  # of a grid's second extent
LONGEST = _MOST_BLOCKS * _THREADS  # tokens of a row
MOST_ROWS = _MOST_BLOCKS * 8  # of a channel
LARGEST_BATCH = 32  # rows of a block
_TILE, _CHUNK = 16, _THREADS // 32 * _ROWS  # tokens of a tile; tiles of a chunk of what is streamed
_BLOCKS = 2  # that a multiprocessor shall have room for
_DIAGONALS = 32  # floats for each tile of lags, of the gradient of w


def obstacle(p: Problem) -> str | None:
    """Return why such rows cannot be taken, for a sentence that begins with who they are for."""
    if p.T > LONGEST:
        return f"takes at most {LONGEST} tokens, got {p.T}"
    if p.B > MOST_ROWS:
        return f"takes at most {MOST_ROWS} sequences, got {p.B}"
    if not p.gpu.has_tensor_cores:
        return f"needs an architecture from sm_{TENSOR_CORES} on, got {p.gpu.arch}"
    return None


class Geometry(NamedTuple):
    """How blocks are cut."""

    batch: int  # rows of a block
    streamed: bool  # whether what a block reads is more than its shared memory
    tiles: int  # of 16 tokens, with those that fill up
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """Return how many blocks share the rows of a channel."""
        return self.tiles // _CHUNK if self.streamed else 1


def geometry(direction: str, batch: int, tokens: int, types: tuple[str, str], gpu: Gpu) -> Geometry:
    """Return how the convolution ("forward") or the gradient of the filter is cut, for the types of w and k.

    As many rows as let two blocks be on an SM; the least always fit. Only the convolution of 16-bit rows takes 32 at
    once: of float32 ones 16 are faster (0.154 ms for 0.161 at (32, 768, 768) on an H200).
    """
    largest = LARGEST_BATCH if direction == "forward" and BYTES[types[1]] == 2 else 16
    shared_bytes = _convolution_bytes if direction == "forward" else _gradient_bytes
    cuts = []
    for streamed in (False, True):
        multiple = _CHUNK if streamed else _ROWS
        tiles = -(-tokens // (_TILE * multiple)) * multiple
        for size in (16, 8) if streamed else (LARGEST_BATCH, 16, 8):
            if size <= largest and (size == 8 or batch > size // 2):
                cuts.append(Geometry(size, streamed, tiles, shared_bytes(size, streamed, tiles, types)))
    limit = gpu.shared_per_multiprocessor // _BLOCKS - 1024
    return next((cut for cut in cuts if cut.shared_bytes <= limit), cuts[-1])


def _convolution_bytes(batch: int, streamed: bool, tiles: int, types: tuple[str, str]) -> int:
    w_parts, k_parts = (BYTES[storage] // 2 for storage in types)
    held, before = (_CHUNK, _CHUNK) if streamed else (tiles, _ROWS)
    return 4 * w_parts * _TILE * (before + held) + 2 * k_parts * batch * (_TILE * held + 8) + 2 * batch * (held // 2)


def _gradient_bytes(batch: int, streamed: bool, tiles: int, types: tuple[str, str]) -> int:
    k_parts = BYTES[types[1]] // 2
    held = (_CHUNK, 2 * _CHUNK) if streamed else (tiles, tiles)
    operands = sum(2 * k_parts * batch * (_TILE * count + 8) + 4 * (count // 2) for count in held)
    return operands + 4 * (_THREADS // 32) * 16 * 17


def forward(p: Problem) -> Schedule:
    """Return the convolution."""
    return Schedule((_convolve(p, "k", "y"),), {"y": Result(p.shape("k"), p.types["k"])})


def backward(p: Problem) -> Schedule:
    """Return the gradients: of w a sum for each group of rows, of k the correlation with the filter."""
    cut = _geometry(p, "backward")
    groups = -(-p.B // cut.batch)
    scratch = {"sums": 4 * groups * p.C * cut.tiles * _DIAGONALS}
    parameters = _parameters(p, cut, "dy", "k")
    bind = {
        **common.given(p), "g": "dy", "gw": "dw", "groups": groups, "length": p.T, "tiles": cut.tiles,
        "g_batch": Stride("dy", "B"), "g_channel": Stride("dy", "C"), "k_batch": Stride("k", "B"),
        "k_channel": Stride("k", "C"),
    }  # fmt: skip
    template, grid = "timex_filter_gradient", (p.C, groups, cut.blocks)
    steps = (
        Step(template, template, parameters, grid, bind, shared_bytes=cut.shared_bytes),
        Step(template, f"{template}_sum", parameters, (p.C, -(-p.T // _THREADS), 1), bind),
        _convolve(p, "dy", "dk"),
    )
    return Schedule(steps, common.backward_results(p), scratch=scratch)


def _convolve(p: Problem, source: str, target: str) -> Step:
    """Return the convolution of k, or the correlation of dy, which is the gradient of k."""
    cut = _geometry(p, "forward")
    parameters = {**_parameters(p, cut, source), "REVERSED": source == "dy"}
    bind = {
        **common.given(p), "k": source, "out": target, "w_stride": Stride("w", "C"), "k_batch": Stride(source, "B"),
        "k_channel": Stride(source, "C"), "length": p.T, "tiles": cut.tiles, "eps": 0.0 if source == "dy" else p.eps,
    }  # fmt: skip
    grid = (p.C, -(-p.B // cut.batch), cut.blocks)
    return Step("timex_convolve", "timex_convolve", parameters, grid, bind, shared_bytes=cut.shared_bytes)


def _geometry(p: Problem, direction: str) -> Geometry:
    batch = LARGEST_BATCH if p.is_batch_invariant else p.B
    return geometry(direction, batch, p.T, (p.types["w"], p.types["k"]), p.gpu)


def _parameters(p: Problem, cut: Geometry, *sources: str) -> dict[str, Parameter]:
    return {
        "T_W": p.types["w"], "T_IO": p.types["k"], "BATCH": cut.batch, "STREAMED": cut.streamed, "ROWS": _ROWS,
        "NUM_THREADS": _THREADS, "VECTOR": 4 if common.together(p, *sources) == 4 else 1, "BLOCKS_PER_SM": _BLOCKS,
    }  # fmt: skip
