"""Calls of a layer's small work of DTensors: each rank makes what it has of the batch, of channels or of heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from rwkv_jit.call import checks, sharding
from rwkv_jit.schedules.layers import OPS, SHIFTS, makes_decays
from rwkv_jit.schedules.legal import Reduction

REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def run(
    name: str, named: Mapping[str, Any], options: Sequence[Any], call: Callable[[Sequence[Any]], list[Tensor]]
) -> list[Tensor]:
    """Return the results of a call, which `call` makes of what a rank has of its inputs."""
    # Results of `delta_operands` have as many heads as beta.
    lead, mixes = "beta" if name == "delta_operands" else next(iter(named)), named.get("mixes")
    if not isinstance(named[lead], Tensor):
        raise TypeError(f"{lead}: expected a DTensor like another argument, got {type(named[lead]).__name__}")
    roles = _roles(name, named, options)

    def of_rank(*local: Any) -> list[Tensor]:
        made = call(local)
        # Flat heads would be as many as there are channels.
        return [x.unflatten(-1, local[0].shape[-2:]) for x in made] if name == "gated_norm" else made

    count = {
        "norm_shift": 3 + (mixes.shape[0] if isinstance(mixes, Tensor) and mixes.dim() else 1),
        "delta_operands": 3 + (named.get("q") is not None) + (name == "delta_operands" and makes_decays(*options[1:3])),
        "prepare_keys": 3 + sum(named.get(own) is not None for own in ("v_first", "r")),
        "token_shift": mixes.shape[0] if isinstance(mixes, Tensor) and mixes.dim() else 1,
    }.get(name, 1)
    given = {own: (x, roles[own]) for own, x in named.items()}
    made: list[Tensor] = sharding.run(of_rank, given, lead, [roles[lead]] * count)
    return [x.flatten(-2) for x in made] if name == "gated_norm" else made


def _roles(name: str, named: Mapping[str, Any], options: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Return which dimensions of the inputs may be cut over ranks."""
    if name in SHIFTS:
        dims = {"x": "BTC", "mixes": "MC", "amounts": "MBTC", "first": "BC", "cu_seqlens": ""}
        if name == "norm_shift":  # whose norm takes all channels
            dims = {"x": "BT", "add": "BT", "weight": "", "bias": "", "mixes": "", "first": "B", "cu_seqlens": ""}
        roles = {own: sharding.roles(letters) for own, letters in dims.items()}
        if named["cu_seqlens"] is not None:
            for each in roles.values():
                each.pop("batch", None)
        return roles
    lead = next(iter(named.values()))
    count = lead.dim()
    if name in ("activate", "gated"):  # every element is for itself, but parts have kinds of their own
        first = int(name == "activate" and not isinstance(options[0], str))
        return dict.fromkeys(named, {f"dimension {dim}": dim for dim in range(first, count)})
    of_rows = {"batch": 0, "heads": count - 2} if count > 2 else {"heads": 0}
    return {own: of_rows if "N" in dims else {"heads": 0} for own, dims in OPS[name].inputs.items()}


def loss_of_logits(
    cross_entropy: Callable[..., Tensor], logits: Any, targets: Any, options: Mapping[str, Any]
) -> Tensor:
    """Return the loss of DTensors: each rank's rows, of which a reduction is whole on every rank."""
    checks.check_name("reduction", options["reduction"], REDUCTIONS)
    roles = {"batch": 0} if logits.dim() > 1 else {}

    def of_rank(logits: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (cross_entropy(logits, targets, **{**options, "reduction": "none"}),)

    (rows,) = sharding.run(of_rank, {"logits": (logits, roles), "targets": (targets, roles)}, "logits", (roles,))
    if options["reduction"] == "none":
        return rows  # type: ignore[no-any-return]
    return reduced(rows.sum().full_tensor(), targets, options)


def reduced(total: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return a sum of losses, or the mean of rows that count: NaN where there are none, with a gradient of zeros."""
    if options["reduction"] == "sum":
        return total
    count: Any = (targets != options["ignore_index"]).sum()
    count = getattr(count, "full_tensor", lambda: count)()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def loss_of_rows(
    linear_cross_entropy: Callable[..., Tensor], hidden: Any, weight: Any, bias: Any, targets: Any,
    options: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Return the loss where the matrix is a DTensor, or all are.

    Where ranks hold parts of the matrix, each takes a part of the rows and gathers the matrix: products are shared, and
    a chunk of logits is as small as that of one rank.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    checks.check_name("reduction", options["reduction"], REDUCTIONS[:2])
    if not isinstance(weight, DTensor):
        raise TypeError(f"weight: expected a DTensor like another argument, got {type(weight).__name__}")
    mesh, whole = weight.device_mesh, [Replicate()] * weight.device_mesh.ndim
    given = {"hidden": hidden, "targets": targets, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, x in given.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor like weight, got {type(x).__name__}. Where FSDP has cut weight, call the "
                "module that has it and take cross_entropy; rows that are the same on every rank are "
                "DTensor.from_local(x, mesh, [Replicate()])"
            )
        like = {"targets": hidden, "bias": weight}.get(name)
        is_known = all(placement in (Replicate(), Shard(0)) for placement in x.placements)
        if x.device_mesh != mesh or not is_known or (like is not None and x.placements != like.placements):
            legal = "by Replicate() or Shard(0)" if like is None else f"by {list(like.placements)}"
            raise ValueError(
                f"{name}: expected a DTensor placed {legal} of {mesh}, got {list(x.placements)} of {x.device_mesh}"
            )
    pairs = [*zip(hidden.placements, weight.placements, strict=True)]
    if any(x.is_shard() and y.is_shard() for x, y in pairs):
        raise ValueError(
            f"weight: expected Replicate() where hidden is cut, by {list(hidden.placements)}, "
            f"got {list(weight.placements)}"
        )
    cuts = [y if y.is_shard() else x for x, y in pairs]  # of the rows that a rank takes
    summed = [Partial() if cut.is_shard() else cut for cut in cuts]
    local = {"hidden": hidden.flatten(0, -2), "targets": targets.flatten()}
    local = {name: x.redistribute(placements=cuts).to_local() for name, x in local.items()}
    for name in [name for name in given if name not in local]:  # in one order on all ranks, as they wait for each other
        local[name] = given[name].redistribute(placements=whole).to_local(grad_placements=summed)
    total = linear_cross_entropy(**local, **{**options, "reduction": "sum"})
    return reduced(DTensor.from_local(total, mesh, summed, run_check=False).full_tensor(), targets, options)
