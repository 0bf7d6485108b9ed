"""DTensors: every rank computes the rows and heads that it holds, as what they hold needs nothing of the others.

A call is replicated over a dimension of the mesh, or cut along the batch, or the heads (or channels). All else would
move data, and is an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import tensors

Roles = Mapping[str, int]  # which dimension of a tensor is the batch, and which are heads or channels


_ROLES = {"B": "batch", "H": "heads", "G": "heads", "C": "channels"}


def roles(dims: str) -> dict[str, int]:
    """Return which dimensions, by their letters, are the batch and heads or channels."""
    return {role: dims.index(dim) for dim, role in _ROLES.items() if dim in dims}


def any_distributed(arrays: Sequence[Any]) -> bool:
    """Return whether one of these is a DTensor."""
    if tensors.are_plain(arrays) or "torch.distributed.tensor" not in sys.modules:
        return False
    return any(isinstance(x, _dtensor().DTensor) for x in arrays)


def run(
    function: Callable[..., Sequence[Tensor | None]], given: Mapping[str, tuple[Any, Roles]], first_name: str,
    results: Sequence[Roles],
) -> list[Any]:  # fmt: skip
    """Run a function of tensors on the part that this rank holds, and return its results as DTensors.

    `given` has the tensors and their dimensions by the names of the arguments, in the function's order; `results` the
    dimensions of the results. All are cut like the tensor `first_name`; another one is a TypeError or ValueError.
    """
    module = _dtensor()
    first, roles = given[first_name]
    if not isinstance(first, module.DTensor):
        raise TypeError(f"{first_name}: expected a DTensor like another argument, got {type(first).__name__}")
    mesh, cuts = first.device_mesh, [_cut(first_name, placement, roles) for placement in first.placements]
    local = [_local(name, x, own, first_name, mesh, cuts) for name, (x, own) in given.items()]
    made: list[Any] = []
    for x, own in zip(function(*local), results, strict=True):
        if x is None:
            made.append(None)
            continue
        shape = list(x.shape)
        for role, dim in own.items():
            if role in roles:  # no call is cut along what the first tensor does not have
                shape[dim] = first.shape[roles[role]]
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        made.append(
            module.DTensor.from_local(
                x, mesh, _placements(cuts, own), run_check=False, shape=torch.Size(shape), stride=tuple(strides)
            )
        )
    return made


def _dtensor() -> Any:
    return sys.modules["torch.distributed.tensor"]


def _cut(name: str, placement: Any, roles: Roles) -> str | None:
    """Return along what a dimension of the mesh cuts a call; None where it does not."""
    if placement.is_replicate():
        return None
    for role, dim in roles.items():
        if placement.is_shard(dim):
            return role
    legal = " or ".join(f"Shard({dim}) ({role})" for role, dim in roles.items())
    raise ValueError(f"{name}: expected DTensors placed by Replicate() or {legal}, got {placement}")


def _placements(cuts: Sequence[str | None], roles: Roles) -> list[Any]:
    module = _dtensor()
    dims = [None if cut is None else roles.get(cut) for cut in cuts]
    return [module.Replicate() if dim is None else module.Shard(dim) for dim in dims]


def _local(name: str, x: Any, roles: Roles, first_name: str, mesh: Any, cuts: Sequence[str | None]) -> Tensor | None:
    """Return this rank's part of a tensor, whose gradients are summed where ranks share it."""
    module = _dtensor()
    if not isinstance(x, module.DTensor):
        if x is None or name == "cu_seqlens":
            return x  # type: ignore[no-any-return]
        raise TypeError(f"{name}: expected a DTensor like {first_name}, got {type(x).__name__}")
    wanted = _placements(cuts, roles)
    if x.device_mesh != mesh or list(x.placements) != wanted:
        raise ValueError(
            f"{name}: expected a DTensor placed by {wanted} of {mesh}, to go with {first_name}, "
            f"got {list(x.placements)} of {x.device_mesh}"
        )
    summed = [
        module.Partial() if cut is not None and cut not in roles else placement
        for cut, placement in zip(cuts, wanted, strict=True)
    ]
    local: Tensor = x.to_local(grad_placements=summed)
    return local
