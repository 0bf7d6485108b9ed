"""The checks of arguments that calls over a pool share; errors name the argument, what was expected and came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from rwkv_jit.call import checks, recording, tensors
from rwkv_jit.kernels import env
from rwkv_jit.kernels.errors import brief
from rwkv_jit.schedules.legal import Rounding
from rwkv_jit.schedules.problem import Op

ROUNDINGS: tuple[str, ...] = get_args(Rounding)
INDEX_TYPES = (torch.int32, torch.int64)


# ---- options -----------------------------------------------------------------------------------------------------


def names(op: Op, options: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the decay, the state's layout and the rounding."""
    decay, layout = options.get("decay", op.decay), options.get("state_layout", op.state_layout)
    rounds = options.get("rounding", "nearest")
    for option, value, values in (
        ("decay", decay, ("none",) if op.decay == "none" else op.decays),
        ("state_layout", layout, checks.STATE_LAYOUTS),
        ("rounding", rounds, ROUNDINGS),
    ):
        checks.check_name(option, value, values)
    return decay, layout, rounds


def scale(op: Op, options: Mapping[str, Any], sizes: Mapping[str, int]) -> float:
    """Return the factor of y."""
    value = options.get("scale", op.scale)
    value = float(sizes["K"]) ** -0.5 if value is None else value
    checks.check_number("scale", value)
    return float(value)


def refuse_gradients(op: Op, name: str, given: Sequence[Any]) -> None:
    """Raise RuntimeError if a tensor, or one of a list, needs a gradient, which states changed in place cannot give."""
    several = [x for each in given for x in (each if isinstance(each, (list, tuple)) else (each,))]
    if (torch.is_grad_enabled() and recording.any_requires_grad(several)) or recording.any_tangent(several):
        raise RuntimeError(
            f"{name}: changes the states in place and has no gradient; use {op.name}, or torch.no_grad()"
        )


# ---- tensors -----------------------------------------------------------------------------------------------------


def check_pool(op: Op, state: Tensor, of_slot: tuple[int, ...], lead: Tensor, wide: bool) -> None:
    """Check a pool whose slots have this shape."""
    if state.dim() != 1 + len(of_slot) or tuple(state.shape[1:]) != of_slot:
        raise ValueError(f"state: expected shape [slots, {', '.join(map(str, of_slot))}], got {list(state.shape)}")
    checks.check_state(op, "state", state, [tuple(state.shape)], lead, wide)
    check_memory("state", state, may_have_gaps=not op.has_heads)


def check_memory(name: str, pool: Tensor, may_have_gaps: bool = False) -> None:
    """Check where the slots of a pool lie, and that no two numbers lie in one place."""
    if pool.numel() and not may_have_gaps and not pool[0].is_contiguous():
        raise ValueError(f"{name}: expected slots without gaps, got strides {pool.stride()} of {list(pool.shape)}")
    # What dimensions before these reach. Nothing that a compiler traces is sorted.
    dims, end = [(pool.stride(0), pool.shape[0])], pool[0].numel() if pool.numel() else 0
    if may_have_gaps:
        dims, end = sorted(zip(pool.stride(), pool.shape, strict=True)), 1
    for stride, size in dims:
        if size > 1 and stride < end:
            raise ValueError(f"{name}: expected slots that do not overlap, got strides {pool.stride()}")
        end += stride * (size - 1)


def check_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype], lead: Tensor) -> None:
    """Check a dtype, and that a tensor is where the inputs are."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != lead.device:
        raise ValueError(f"{name}: expected device {lead.device}, got {x.device}")


def optional(
    name: str, given: Any, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], lead: Tensor, of: str = ""
) -> Tensor | None:
    """Return a tensor where the inputs are, or None where nobody gives any."""
    if given is None:
        return None
    x = tensors.from_any(name, given)
    check_shape(name, x, shape, of=of)
    check_dtype(name, x, dtypes, lead)
    return x


def indices(name: str, given: Any, batch: int, lead: Tensor) -> Tensor | None:
    """Return the slots of the rows, or None where nobody gives any."""
    return optional(name, given, (batch,), INDEX_TYPES, lead, ", a slot for each row")


def check_room(name: str, pool: Tensor, indices: Tensor | None, rows: int, word: str = "rows") -> None:
    """Check that there is a slot for each row where nobody gives indices."""
    if indices is None and rows > pool.shape[0]:
        raise ValueError(
            f"{name}: expected a slot for each of the {rows} {word}, or state_indices; got {pool.shape[0]}"
        )


def has_initial_state(given: Any, sequences: int, lead: Tensor) -> Tensor | None:
    """Return which sequences begin with their slot, or None where nobody says so."""
    return optional("has_initial_state", given, (sequences,), (torch.bool, torch.uint8), lead)


def num_active(given: Any, lead: Tensor) -> Tensor | None:
    """Return how many sequences there are as a tensor, or None where nobody says so."""
    return optional("num_active", given, (1,), (torch.int32,), lead)


def check_active(given: Tensor | None, sequences: int) -> int:
    """Check the value of num_active, and return how many sequences there are."""
    active = sequences if given is None else int(given)
    if not 0 <= active <= sequences:
        raise ValueError(f"num_active: expected 0 to {sequences}, got {active}")
    return active


def check_shape(name: str, x: Tensor, *shapes: tuple[int, ...], of: str = "") -> None:
    """Check that a shape is one of these, of which `of` says what they are of."""
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(str(list(n)) for n in shapes)}{of}, got {list(x.shape)}")


def check_alike(given: Mapping[str, Tensor | None]) -> None:
    """Check that indices, those that are there, have one dtype."""
    present = {name: x for name, x in given.items() if x is not None}
    for name, x in present.items():
        first = next(iter(present))
        if x.dtype != present[first].dtype:
            raise TypeError(f"{name}: expected {present[first].dtype} like {first}, got {x.dtype}")


def may_look_at(given: Iterable[Tensor | None]) -> bool:
    """Return whether values may be looked at: where that costs nothing, on the CPU, or with RWKVJIT_CHECK=1."""
    present = [x for x in given if x is not None]
    if not present or torch.compiler.is_compiling() or not tensors.are_plain(present):
        return False
    return not present[0].is_cuda or (env.checks_indices() and not tensors.capturing())


def check_bounds(bounds: Sequence[int], tokens: int) -> None:
    """Check the values of cu_seqlens."""
    falls = any(end < begin for begin, end in zip(bounds, bounds[1:], strict=False))
    if bounds[0] != 0 or bounds[-1] > tokens or falls:
        raise ValueError(
            f"cu_seqlens: expected to begin at 0, never fall and end at {tokens} at most, got {bounds[:8]}"
        )


def check_slots(
    given: Mapping[str, Tensor | None], slots: int, null_index: int, more_written: Tensor | None = None,
    begun: Tensor | None = None,
) -> None:  # fmt: skip
    """Check the values of slots that are read, and behind them of those that are written, where there are such.

    `more_written` are slots of checkpoints [rows, checkpoints], `begun` says which rows read theirs.
    """
    values = {name: x.flatten().tolist() for name, x in given.items() if x is not None}
    if more_written is not None:
        values["checkpoint_indices"] = more_written.flatten().tolist()
    for name, numbers in values.items():
        outside = [number for number in numbers if number > null_index and not 0 <= number < slots]
        if outside:
            raise ValueError(f"{name}: expected slots below {slots}, or up to {null_index} for none; got {outside[:8]}")
    written = [name for name in given if name in values][-1:] + [name for name in values if name not in given]
    rows = max([len(x) for x in (*given.values(), more_written) if x is not None], default=0)
    writers: dict[int, list[int]] = {}  # rows by slots
    for name in written:
        for place, slot in enumerate(values[name]):
            writers.setdefault(slot, []).append(place * rows // len(values[name]))
    twice = sorted(slot for slot, several in writers.items() if slot > null_index and len(several) > 1)
    if twice:
        raise ValueError(f"{written[-1]}: expected another slot for each state that is written, got {twice[:8]} twice")
    lead = next(iter(given))
    read, nothing = values.get(lead, [*range(rows)]), null_index if lead in values else -1
    for row, slot in enumerate(read):
        writer = writers.get(slot, [row])[0] if slot > null_index else row
        if writer != row and min(slot, read[writer]) > nothing and (begun is None or begun[row]):
            raise ValueError(f"{lead}: expected slots that no other row writes, got {slot} of rows {row} and {writer}")


def w0(given: Any, sizes: Mapping[str, int], lead: Tensor) -> Tensor | None:
    """Return what is added to w before its map."""
    if given is None:
        return None
    heads, head_size = sizes["H"], sizes["K"]
    x = tensors.from_any("w0", given)
    check_shape("w0", x, (heads, head_size), (heads * head_size,))
    check_dtype("w0", x, tuple(tensors.STORAGE), lead)
    return x


def count(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Return a number of things."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {brief(value)}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {brief(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name}: expected at most {most}, got {brief(value)}")
    return value


def on_device(slots: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return slots as a tensor. From pinned memory the copy does not wait for the GPU."""
    is_cuda = device.type == "cuda"
    index = torch.tensor(slots, dtype=dtype, device="cpu", pin_memory=is_cuda)
    return index.to(device, non_blocking=is_cuda)


def listed(name: str, slots: Any) -> list[int]:
    """Return slots, one or several, as a list."""
    try:
        several = list(slots)
    except (TypeError, NotImplementedError):  # it is no several things
        several = [slots]
    if any(not isinstance(slot, int) or isinstance(slot, bool) for slot in several):
        raise TypeError(f"{name}: expected an int or several, got {brief(slots)}")
    return several


def null_index(value: Any) -> int:
    """Return the slot that is none, with all below it."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
        raise TypeError(f"null_index: expected an int of 32 bits, got {value!r}")
    return value


def y_of(given: Any, v: Tensor, asked_v: Tensor, name: str = "v") -> Tensor:
    """Return where y is written: what is `given`, or new memory; of the shape that the caller's v, or `name`, has."""
    if given is None:
        return torch.empty_like(v, memory_format=torch.contiguous_format).view(asked_v.shape)
    return out(given, tuple(asked_v.shape), asked_v, f" like {name}")


def out(given: Any, shape: tuple[int, ...], lead: Tensor, like: str = "") -> Tensor:
    """Return what the caller wants written, of the dtype of an input."""
    y = tensors.from_any("out", given, in_place=True)
    check_shape("out", y, shape, of=like)
    check_dtype("out", y, (lead.dtype,), lead)
    if not y.is_contiguous():
        raise ValueError(f"out: expected memory without gaps, got strides {y.stride()}")
    return y


def seed_tensor(seed: Any, rounds: str, state: Tensor, lead: Tensor) -> Tensor | None:
    """Return the seed as a tensor; None where nothing is rounded at random."""
    if rounds == "nearest":
        if seed is not None:
            raise ValueError(f"seed: needs rounding='stochastic', got {seed!r}")
        return None
    if seed is None:
        raise ValueError("seed: rounding='stochastic' needs an int or a tensor of one int64, got None")
    if isinstance(seed, Tensor):
        if seed.numel() != 1:
            raise ValueError(f"seed: expected one number, got shape {list(seed.shape)}")
        check_dtype("seed", seed, (torch.int64,), lead)
    elif not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise TypeError(f"seed: expected an int of 64 bits or a tensor of one, got {seed!r}")
    else:
        seed = torch.full((1,), seed, dtype=torch.int64, device=lead.device)
    return seed if state.dtype in (torch.float16, torch.bfloat16) else None
