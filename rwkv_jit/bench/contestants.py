"""Who is measured for a case: every backend of ours that can do it, and its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import tensors
from rwkv_jit.bench import peers
from rwkv_jit.bench.cases import OPS, Case, decay_of
from rwkv_jit.bench.peers import Contestant, Inputs
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import backends, wkv4, wkv4_walk
from rwkv_jit.ops import timex as timex_module

OURS = "rwkv_jit"
BACKENDS = [name for name in backends.NAMES if name != "reference"]
_OWN_BACKENDS = {"wkv4": wkv4.BACKENDS, "timex": timex_module.BACKENDS}


def backends_of(op: str) -> list[str]:
    """Return the backends that calls of an op can ask for, "auto" first."""
    return [name for name in _OWN_BACKENDS.get(op, BACKENDS) if name != "reference"]


def backend_of(case: Case, asked: str) -> str:
    """Return the backend that a case takes where this one is asked for.

    Raises
    ------
    UnsupportedConfigError
        It cannot do it: what is in the way.
    """
    batch, tokens, heads, head_size, value_size = case.shape
    device = torch.cuda.current_device()
    if case.op == "timex":
        directions = {"forward": ["forward"], "backward": ["backward"]}.get(case.phase, timex_module.MOST_TOKENS)
        taken = [
            timex_module.choose(asked, case.dtype, batch, tokens, lambda: tensors.arch(device), direction)
            for direction in directions
        ]
        return ", ".join(dict.fromkeys(taken))
    if case.op == "wkv4":
        return wkv4_walk.backend_of(asked, batch * heads * head_size, tokens, tensors.multiprocessors(device))
    looked_at = backends.Case(
        case.op, case.dtype, head_size, value_size, tokens, decay_of(case.op), None, None,
        training=case.has_gradients, blocks=batch * heads, multiprocessors=lambda: tensors.multiprocessors(device),
    )  # fmt: skip
    return backends.choose(asked, looked_at, lambda: tensors.arch(device))[0]


def of(
    case: Case, asked: Sequence[str] | None = None, with_peers: bool = True
) -> tuple[list[Contestant], dict[str, str]]:
    """Return who is measured.

    Parameters
    ----------
    case : Case
        The call.
    asked : sequence of str, optional
        Backends of ours; by default all that can do it. Names that come to the same backend are one contestant.
    with_peers : bool, default True
        Whether others are measured too.

    Returns
    -------
    contestants : list of Contestant
        What "auto" takes is the first.
    obstacles : dict
        What is in the way of backends that were asked for, by their names.
    """
    ours: dict[str, Contestant] = {}
    obstacles: dict[str, str] = {}
    for name in backends_of(case.op) if asked is None else asked:
        try:
            taken = backend_of(case, name)
        except UnsupportedConfigError as error:
            if asked is not None:
                obstacles[name] = str(error)
            continue
        ours.setdefault(taken, Contestant(OURS, taken, call_of(case, name)))
    return [*ours.values(), *(peers.of(case) if with_peers else [])], obstacles


def call_of(case: Case, backend: str) -> Callable[[Inputs, Tensor | None, bool], tuple[Tensor, Any]]:
    """Return the call of a case by a backend of ours."""
    function: Callable[..., Any] = partial(OPS[case.op], backend=backend, **case.options)

    def run(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, Any]:
        y, final = function(*inputs, initial_state=state, output_final_state=True) if with_state else function(*inputs)
        return y, final

    return run
