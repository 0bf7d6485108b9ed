"""What is checked of a call before anything is launched."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.kernels.errors import UnsupportedConfigError, unexpected
from rwkv_jit.schedules.layers import BETA_MAPS
from rwkv_jit.schedules.legal import StateLayout
from rwkv_jit.schedules.problem import Op

STATE_LAYOUTS: tuple[str, ...] = get_args(StateLayout)
_LARGEST = sys.float_info.max
# Of calls that _warn_of_order is silent about, and the modules between those and a user.
_FEW_TOKENS, _MOST_HEADS = 16, 128
_BETWEEN = ("rwkv_jit.call.", "rwkv_jit.ops.", "rwkv_jit.compat")
_has_warned = False
# What messages call the dimensions of inputs.
_DIMENSIONS = {"K": "head size", "V": "value size", "G": "key heads", "C": "channels"}


# ---- options -----------------------------------------------------------------------------------------------------


def check_options(op: Op, options: Mapping[str, Any]) -> None:
    """Check all options of a call; errors name the argument, what was expected and what came."""
    decays = ("none",) if op.decay == "none" else op.decays
    for name, legal in (("decay", decays), ("state_layout", STATE_LAYOUTS), ("backend", op.backends)):
        check_name(name, options[name], legal)
    check_number("scale", options["scale"])
    check_decay_bound(options["decay_bound"])
    for name in ("checkpoint_interval", "chunk_len", "num_threads"):
        if options[name] is not None or name == "checkpoint_interval":
            check_count(name, options[name])


def check_decay_bound(decay_bound: Any) -> None:
    """Check the hint about decays."""
    if decay_bound is None:
        return
    if not (isinstance(decay_bound, (int, float)) and decay_bound < 0):
        raise ValueError(f"decay_bound: expected a negative number, the least log-decay of a step, got {decay_bound!r}")
    if isinstance(decay_bound, int):
        check_number("decay_bound", decay_bound)


def check_switches(op: Op, arrays: Sequence[Any], traits: Mapping[str, Any]) -> None:
    """Check the switches of a call, and that raw gates have all that they need."""
    named, bound = dict(zip(op.names, arrays, strict=True)), traits.get("lower_bound")
    check_name("beta_map", traits.get("beta_map", "identity"), BETA_MAPS)
    if "least_step" in traits:
        least, most = traits["least_step"], traits["most_step"]
        step_limits((0.0 if least is None else least, math.inf if most is None else most))
    if "a_log" in op.optional and named.get("a_log") is None:
        for name, x in (("dt_bias", named.get("dt_bias")), ("lower_bound", bound)):
            if x is not None:
                raise ValueError(f"{name}: needs A_log too")
    if bound is not None:
        check_lower_bound(bound)


def step_limits(dt_limit: Any) -> tuple[float | None, float | None]:
    """Return the limits of steps, None for those that there are without any."""
    if isinstance(dt_limit, (tuple, list)) and len(dt_limit) == 2:
        least, most = dt_limit
        if isinstance(least, (int, float)) and isinstance(most, (int, float)) and least <= most:
            return None if least == 0.0 else float(least), None if most == math.inf else float(most)
    raise ValueError(f"dt_limit: expected a pair of numbers that does not fall, got {dt_limit!r}")


def check_lower_bound(lower_bound: Any) -> None:
    """Check the least log-decay of a gate."""
    check_number("lower_bound", lower_bound)
    if lower_bound >= 0:
        raise ValueError(f"lower_bound: expected a negative number, got {lower_bound!r}")


def check_count(name: str, count: Any) -> None:
    """Check a number of tokens or threads."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name}: expected an int, got {count!r}")
    if not 1 <= count < 2**31:
        raise ValueError(f"{name}: expected at least 1, got {count}")


def check_names(function: str, options: Iterable[str], legal: Collection[str]) -> None:
    """Check that there are such options."""
    for option in options:
        if option not in legal:
            raise unexpected(function, option, legal)


def check_name(name: str, value: Any, legal: Sequence[str]) -> None:
    """Check that an option is one of these."""
    if not isinstance(value, str) or value not in legal:
        raise ValueError(f"{name}: expected one of {', '.join(legal)}, got {value!r}")


def check_number(name: str, value: Any) -> None:
    """Check that an option is a number that a kernel can take."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return
    got = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "an integer too large for a float"
    raise ValueError(f"{name}: expected a finite number, got {got}")


def check_flag(name: str, value: Any) -> bool:
    """Return a switch, which may be any object that is true or false."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}: {error}") from error


def is_for_kernels(backend: str, x: Tensor) -> bool:
    """Return whether kernels run a call: CUDA tensors take them, all others plain torch."""
    if backend not in ("auto", "reference") and x.device.type != "cuda":
        raise UnsupportedConfigError(
            f"backend: {backend!r} runs on CUDA tensors, got {x.device}; use 'auto' or 'reference'"
        )
    return backend != "reference" and x.device.type == "cuda"


# ---- tensors -----------------------------------------------------------------------------------------------------


def check_tensors(
    op: Op, arrays: Sequence[Any], initial_state: Any, cu_seqlens: Any, state_layout: str, backend: str
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Check the arrays of a call whose options are right, and return them as tensors; errors as of `check_options`."""
    given = as_tensors(op, arrays)
    lead = given[op.lead]
    wide = not is_for_kernels(backend, lead)
    sizes = check_inputs(op, given, wide)
    sequences = sizes["B"]
    if cu_seqlens is None:
        if op.has_heads and tensors.is_eager() and sizes["T"] < sizes["H"]:
            _warn_of_order(op, lead, sizes["T"], sizes["H"])
    else:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        check_packing(cu_seqlens, lead)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        shape = (sequences, *(sizes[dim] for dim in op.state_dims(state_layout)))
        check_state(op, "initial_state", initial_state, (shape, shape[1:]), lead, wide)
    return given, initial_state, cu_seqlens


def _warn_of_order(op: Op, lead: Tensor, tokens: int, heads: int) -> None:
    """Warn once if heads seem to stand before tokens, but in layers that know the order."""
    global _has_warned
    if _has_warned or tokens < 2 or (tokens < _FEW_TOKENS and heads <= _MOST_HEADS):
        return
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_BETWEEN):
        frame, depth = frame.f_back, depth + 1
    if frame.f_globals["__name__"].partition(".")[0] in ("rwkv_jit", "fla", "transformers"):
        return
    _has_warned = True
    warnings.warn(
        f"{op.name}: {op.public_names[op.lead]} of shape {list(lead.shape)} is read as [batch, tokens, heads, head "
        f"size], as {tokens} tokens of {heads} heads. If it is [batch, heads, tokens, head size], call transpose(1, 2) "
        "on all inputs and on the result",
        stacklevel=depth,
    )


def as_tensors(op: Op, arrays: Sequence[Any]) -> list[Tensor]:
    """Return the inputs of a call as tensors; optional ones stay None."""
    given: list[Any] = [
        None if x is None and name in op.optional else tensors.from_any(public, x)
        for name, public, x in zip(op.names, op.public_names, arrays, strict=True)
    ]
    return given


def check_inputs(op: Op, given: Sequence[Any], wide: bool) -> dict[str, int]:
    """Check the inputs by their dimensions, and return the sizes of these; `wide` admits float64 for plain torch."""
    lead, lead_name = given[op.lead], op.public_names[op.lead]
    dtypes = [*tensors.STORAGE, torch.float64] if wide else list(tensors.STORAGE)
    rows = list(zip(op.public_names, op.names, op.inputs.values(), given, strict=True))
    first, rows = rows[op.lead], [row for row in rows if row[3] is not None]
    streamed, fixed = [row for row in rows if "T" in row[2]], [row for row in rows if "T" not in row[2]]
    sizes = dict(op.sizes)
    sources: dict[str, str] = {}  # of dimensions: the inputs that have shown their sizes
    for name, own_name, dims, x in (first, *streamed, *fixed):
        is_known = all(dim in sizes for dim in dims)
        if x.dim() != len(dims) and not is_known:
            listed = ", ".join("head size" if dim in "KV" else dim for dim in dims)
            raise ValueError(f"{name}: expected {len(dims)} dimensions [{listed}], got shape {tuple(x.shape)}")
        if x.dim() != len(dims) or any(sizes.get(dim, size) != size for dim, size in zip(dims, x.shape, strict=True)):
            want = ", ".join(str(sizes.get(dim, _DIMENSIONS.get(dim, dim))) for dim in dims)
            listed = ", ".join("heads" if dim == "H" else _DIMENSIONS.get(dim, dim) for dim in dims)
            differ = [dim for dim, size in zip(dims, x.shape, strict=False) if sizes.get(dim, size) != size]
            source = sources.get(differ[0] if differ and x.dim() == len(dims) else "B", lead_name)
            whose = f"like {source}" if "B" in dims else f"[{listed}]"
            also = _also(op, own_name, sizes)
            raise ValueError(f"{name}: expected shape [{want}]{also or f' {whose}'}, got {list(x.shape)}")
        sizes.update(zip(dims, x.shape, strict=True))
        sources = {**dict.fromkeys(dims, name), **sources}
        if dims[-1] in "KV" and x.shape[-1] < 1:
            raise ValueError(f"{name}: expected a head size of at least 1, got shape {list(x.shape)}")
        if x.device != lead.device:
            raise ValueError(f"{name}: expected device {lead.device} like {lead_name}, got {x.device}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
        may_be_float32 = own_name in op.wide and lead.dtype != torch.float32
        if x.dtype != lead.dtype and not (may_be_float32 and x.dtype == torch.float32):
            also = " or torch.float32" if may_be_float32 else ""
            raise TypeError(f"{name}: expected {lead.dtype} like {lead_name}{also}, got {x.dtype}")
    if "G" in sizes and (sizes["H"] % sizes["G"] if sizes["G"] else sizes["H"]):
        raise ValueError(f"{sources['G']}: expected key heads that divide the {sizes['H']} heads, got {sizes['G']}")
    return sizes


def _also(op: Op, name: str, sizes: Mapping[str, int]) -> str:
    """Return the other shape that callers may give an input, as the end of a part of a sentence."""
    dims = op.also.get(name, "")
    several = [sizes[dim] for dim in dims.strip("()")]
    legal = [math.prod(several)] if dims.startswith("(") else several
    return f" or {legal}" if dims else ""


def check_state(op: Op, name: str, state: Tensor, shapes: Sequence[tuple[int, ...]], lead: Tensor, wide: bool) -> None:
    """Check a state that may have any of these shapes; `wide` admits float64 for plain torch."""
    if tuple(state.shape) not in shapes:
        legal = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected shape {legal}, got {list(state.shape)}")
    if state.device != lead.device:
        raise ValueError(f"{name}: expected device {lead.device}, got {state.device}")
    dtypes = [dtype for dtype, storage in tensors.STORAGE.items() if storage in op.state_types]
    if state.dtype not in dtypes and not (wide and state.dtype == torch.float64):
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {state.dtype}")


def check_packing(cu_seqlens: Tensor, lead: Tensor) -> None:
    """Check what can be said of cu_seqlens without reading its values."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected torch.int32 or torch.int64, got {cu_seqlens.dtype}")
    if lead.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected a batch of 1 with packed sequences, got a batch of {lead.shape[0]}")
    if cu_seqlens.device != lead.device:
        raise ValueError(f"cu_seqlens: expected device {lead.device}, got {cu_seqlens.device}")
