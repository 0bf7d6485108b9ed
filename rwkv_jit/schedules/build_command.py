"""The command line that compiles the kernels of calls, from what these ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rwkv_jit.schedules import directions, layer_table, layers
from rwkv_jit.schedules.problem import LARGEST_DECAY, Op, Problem
from rwkv_jit.schedules.schedule import Step
from rwkv_jit.schedules.table import ALL

# What kernels are compiled for ahead of calls: ops over sequences, and functions of a layer's small work.
LAYER_OPS = layer_table.FUNCTIONS
OPS: dict[str, Op] = {**ALL, **LAYER_OPS}
# What calls choose beside their inputs, with the defaults.
SWITCHES: dict[str, Any] = {name: default for op in OPS.values() for name, default in op.traits.items()}
_OF_POOLS = ("arrange_sequences", "wkv4_update", "layer_convolution_update")
_SHORT_TOKENS = 16  # whose chunks are short whatever decays are
_MOST_TOGETHER = 8  # elements that a thread takes
_LAYER_SIZES = {"CHANNELS": "width", "HEAD_SIZE": "head-size"}


def text(p: Problem, launches: Sequence[Step]) -> str:
    """Return the command that compiles what calls like this one launch; "" where there is none."""
    name = p.op.name.removesuffix("_update" if p.op.name.startswith("causal") else "").removesuffix("_backward")
    if name not in OPS:
        return ""
    is_update = p.is_pooled or any(step.template in _OF_POOLS for step in launches)
    storage = p.types[p.op.names[0 if name not in ALL else p.op.lead]]
    options = {"op": name, **(_sizes(p) if name in ALL else _layer_sizes(p, launches[0])), "dtype": storage}
    options |= {"arch": p.gpu.arch, "direction": is_update and "update", **_options(p)}
    switches = dict(p.traits) if name in ALL else layers.switches_of(p.op, launches[0].parameters)
    options |= _inputs(p, storage, options["w-dtype"] or None)
    options |= {
        trait.replace("_", "-"): ("no", "yes")[value] if isinstance(value, bool) else value
        for trait, value in switches.items()
        if isinstance(value, bool) or value != p.op.traits[trait]
    }
    if "T_SHIFT" in launches[0].parameters or "STATE_LEN" in launches[0].parameters:
        pool = launches[0].parameters.get("T_SHIFT", launches[0].parameters.get("T_STATE"))
        options["state-dtype"] = pool != "fp32" and pool
    options["index-bits"] = any(step.parameters.get("INDEX_BYTES") == 8 for step in launches) and 64
    words = [f"--{option} {value}" for option, value in options.items() if value]
    return " ".join(["rwkv-jit warm", *words, *(["--shards"] if p.is_shard else [])])


def _sizes(p: Problem) -> dict[str, Any]:
    if not p.op.has_heads:
        return {"tokens": p.T, "batch": p.B} if p.op.name == "timex" else {}
    heads = {"heads": p.H, "key-heads": p.G and p.G != p.H and p.G} if p.op.through is not None else {}
    return {"head-size": p.K, "value-size": p.V != p.K and p.V, **heads}


def _layer_sizes(p: Problem, step: Step) -> dict[str, Any]:
    """Return the sizes of a layer's function; `activate` and `gated` have a width that is a number of elements."""
    sizes = {option: step.parameters[name] for name, option in _LAYER_SIZES.items() if name in step.parameters}
    if "head-size" in sizes:
        return {**sizes, "heads": p.H, "key-heads": p.G and p.G != p.H and p.G}
    return sizes or {"width": math.gcd(p.C, _MOST_TOGETHER)}  # more do not matter


def _options(p: Problem) -> dict[str, Any]:
    storage, has_states = p.types[p.op.names[p.op.lead]], p.op.name in ALL and p.op.has_heads
    return {
        "decay": p.op.name in ALL and p.decay not in ("none", p.op.decay) and p.decay,
        "decay-bound": has_states and _bound(p),
        "state-layout": has_states and p.state_layout != p.op.state_layout and p.state_layout,
        "w-dtype": p.types.get("w", storage) != storage and p.types["w"],
        "state-dtype": has_states and p.state_type != "fp32" and p.state_type,
        "precision": p.is_narrow and "high",
    }  # fmt: skip


def _bound(p: Problem) -> Any:
    """Return a bound of decays that makes chunks as short as these are; None where they are as long as by default."""
    inner = directions.running(p)
    if p.op.decay == "none" or p.decay == "sigmoid" or inner.backend not in ("chunked", "segments"):
        return None
    usual = directions.ALGORITHMS[inner.op.family]["chunked"].default_chunk_len(inner)
    if p.tokens <= _SHORT_TOKENS or inner.chunk_len >= usual:
        return None
    return -2 * LARGEST_DECAY[inner.types["v"]] / inner.chunk_len


def _inputs(p: Problem, storage: str, wide: str | None) -> dict[str, str]:
    """Return the optional inputs that a call has, and those of another type than by default."""
    there = {name: x for x, name in zip(p.op.public_names, p.op.names, strict=True) if name in p.types}
    optional = {x: None for name, x in there.items() if name in p.op.optional}
    usual = p.op.types_of(storage, wide, optional)
    words = []
    for name, x in there.items():
        differs = p.types[name] != usual[name] and (name in p.op.wide or x in optional)
        if differs or x in optional:
            words.append(f"{x}={p.types[name]}" if differs else x)
    return {"inputs": ",".join(words)}
