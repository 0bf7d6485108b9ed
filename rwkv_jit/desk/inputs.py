"""Calls that are measured, profiled, tuned and checked: inputs like a model's, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import rwkv_jit
from rwkv_jit.plain import reference
from rwkv_jit.schedules.table import ALL

Function = Callable[..., Any]
Who = tuple[str, str]  # and by what: a backend, or what torch has
OPS: dict[str, Function] = {op: getattr(rwkv_jit, op) for op in ALL}
REFERENCES: dict[str, Function] = {op: getattr(reference, f"{op}_ref") for op in ALL}
for _functions in (OPS, REFERENCES):  # timex answers as the others do
    _functions["timex"] = lambda *x, _timex=_functions["timex"], **options: (_timex(*x, **options), None)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIONS: dict[str, dict[str, Any]] = {  # as in the models, where that is not the default
    "wkv7": {"decay": "sigmoid"},
    **{name: {"qk_norm": True} for name, op in ALL.items() if "qk_norm" in op.traits},
}
OURS, UPDATE = "rwkv_jit", "update"
PHASES = ("forward", "backward", "forward+backward", "decode", "prefill", UPDATE)
USUAL_PHASES, OF_ONE_TOKEN, WITH_STATES = PHASES[:3:2], ("decode", UPDATE), ("decode", "prefill")


class Case(NamedTuple):
    """A call that is measured: a decode takes one token and a state, an update one token of each row and a pool."""

    op: str
    shape: tuple[int, ...]  # B, T, H, K, V; of an op without heads its channels are those of all
    dtype: torch.dtype
    phase: str = "forward"

    @property
    def shown(self) -> list[int]:
        """The shape as it is written: [B, T, H, K, V]; of wkv4 [B, T, C], and of timex [B, C, T]."""
        batch, tokens, channels = self.shape[0], self.shape[1], self.shape[2] * self.shape[-1]
        return {"wkv4": [batch, tokens, channels], "timex": [batch, channels, tokens]}.get(self.op, list(self.shape))

    def check(self) -> Case:
        """Return the case. Raises ValueError where the op has no such phase."""
        if self.phase not in phases_of(self.op):
            expected = f"{', '.join(phases_of(self.op))} for {self.op}"
            raise ValueError(f"--phase: expected one of {expected}, got {self.phase}")
        return self


def phases_of(op: str) -> Sequence[str]:
    """Return the phases that an op has."""
    return PHASES[:3] if op == "timex" else PHASES[:5] if op == "wkv4" else PHASES


def read_shape(text: str, counts: Sequence[int] = (4,), forms: str = "B,T,H,N") -> tuple[int, ...]:
    """Return so many positive numbers from a command line. Raises ValueError."""
    parts = text.split(",")
    if len(parts) not in counts or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ValueError(f"--shape: expected positive numbers {forms}, got {text!r}")
    return tuple(map(int, parts))


def shape_of(op: str, text: str, phase: str = "forward") -> tuple[int, int, int, int, int]:
    """Return B, T, H, K, V from a command line, with T = 1 for a decode and an update. Raises ValueError."""
    forms = {"wkv4": "B,T,C or B,T,H,N", "timex": "B,C,T or B,T,H,N"}
    sizes = read_shape(text, (3, 4) if op in forms else (4, 5), f"{forms.get(op, 'B,T,H,N or B,T,H,K,V')} for {op}")
    if len(sizes) == 3:
        sizes = (sizes[0], sizes[1], 1, sizes[2]) if op == "wkv4" else (sizes[0], sizes[2], 1, sizes[1])
    return sizes[0], 1 if phase in OF_ONE_TOKEN else sizes[1], sizes[2], sizes[3], sizes[-1]


def switches_of(op: str) -> dict[str, Any]:
    """Return the switches of the op in calls that are measured."""
    return {name: value for name, value in OPTIONS.get(op, {}).items() if name in ALL[op].traits}


def decay_of(op: str) -> str:
    """Return how w is read in such calls; "none" where there is no w of heads."""
    return str(OPTIONS.get(op, {}).get("decay", ALL[op].decay if ALL[op].has_heads else "none"))


def make_inputs(
    op: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cuda", key_heads: int | None = None
) -> list[Tensor]:
    """Return inputs like a model's, in the op's order, all of one dtype, that require gradients.

    The shape is B, T, H and the head size, or B, T, H, K, V. The channels of wkv4 and timex are those of all heads.
    Keys of ops that run others have as many heads as values, or `key_heads`.
    """
    (batch, tokens, heads, size), random = shape[:4], partial(torch.randn, device=device)
    channels, keys = heads * size, (batch, tokens, heads, size)
    if op == "wkv4":
        w, (k, v) = torch.linspace(-6, 1, channels, device=device), random(2, batch, tokens, channels)
        several = [w, random(channels) * 0.5, k, v]
    elif op == "timex":
        several = [random(channels, tokens), random(batch, channels, tokens)]
    elif ALL[op].through is not None:
        sizes = {"B": batch, "T": tokens, "G": key_heads or heads, "H": heads, "K": size, "V": shape[-1]}
        needed = {name: dims for name, dims in ALL[op].inputs.items() if name not in ALL[op].optional}
        several = [_like_model(op, name, random(*(sizes[dim] for dim in dims))) for name, dims in needed.items()]
    else:
        values = (batch, tokens, heads, shape[-1])
        r, k, v, kk, w = (random(*sizes) for sizes in (keys, keys, values, keys, keys))
        r, k, w, kk = r * 0.5, k * 0.5, w - 0.6, functional.normalize(kk, dim=-1)
        raw = w - 2.4  # RWKV-5 and 6 begin with -6 to -1; where one of many is above 4, a head leaves a chunk's range
        several = {
            "wkv5": [r, k, v, raw[0, 0], random(heads, size)],
            "wkv6": [r, k, v, raw, random(heads, size)],
            "wkv7": [r, w, k, v, -kk, kk * torch.rand_like(kk)],
            "gla": [r, k, v, functional.logsigmoid(w) / 16],
            "linear_attention": [r, k, v],
        }[op]
    return [x.to(dtype).requires_grad_() for x in several]


def _like_model(op: str, name: str, x: Tensor) -> Tensor:
    """Return an input of ops such as kda, by the name that kernels have for it, of normal numbers."""
    if name in ("beta", "write_gate"):
        return torch.exp(x - 4) if op == "ssd" else torch.sigmoid(x)
    if name == "w":  # of channels, or of heads
        return -functional.softplus(x - (0.6 if "K" in ALL[op].inputs[name] else 2))
    if name == "a_log":
        return -torch.linspace(1, 16, len(x), device=x.device)
    return x * 0.5 if name in ("r", "k") else x


def state_of(op: str, shape: Sequence[int], device: str = "cuda", layout: str = "") -> Tensor:
    """Return float32 states of an op, one for each row, in the layout that the op takes by itself or in another one."""
    batch, _, heads, keys, values = shape
    if op == "wkv4":  # num, den and max
        num, den, top = torch.randn(3, batch, heads * keys, device=device)
        return torch.stack([num, den.abs() + 0.5, top], 1)
    sizes = (values, keys) if (layout or ALL[op].state_layout) == "vk" else (keys, values)
    return torch.randn(batch, heads, *sizes, device=device)


class Given(NamedTuple):
    """What a case is measured with: functions, their inputs, and gradients of the first of their results."""

    functions: dict[Who, Function]
    inputs: Sequence[Tensor]
    dys: Sequence[Tensor]
    options: dict[str, Any]  # those of the reference
    slots: Tensor | None = None  # where an update's states lie in the pool


def backends_of(op: str, phase: str = "forward") -> list[str]:
    """Return the backends that calls of an op can name, "auto" first, which alone updates have."""
    return ["auto"] if phase == UPDATE else [name for name in ALL[op].backends if name != "reference"]


def given_for(case: Case, backends: Sequence[str] = ("auto",), device: str = "cuda") -> Given:
    """Return what a case is measured with: ours by these backends, and on a GPU what torch alone can do.

    A loop in torch over many tokens takes minutes, and its backward all memory: neither is there. Raises ValueError.
    """
    (name, shape, dtype, phase), on_gpu = case, device == "cuda"
    if wrong := [backend for backend in backends if phase == UPDATE and backend != "auto"]:
        raise ValueError(f"--backend: expected auto for an update, got {wrong[0]}")
    inputs = [x.detach().requires_grad_("backward" in phase) for x in make_inputs(name, shape, dtype, device)]
    needed = [each for each in ALL[name].names if each not in ALL[name].optional]
    dys = [torch.randn_like(inputs[needed.index("k" if name == "timex" else "v")], requires_grad=False)]
    options, function, in_torch = dict(OPTIONS.get(name, {})), OPS[name], dict[Who, Function]()
    state = None if name == "timex" else state_of(name, shape, device)
    if phase == UPDATE and state is not None:
        slots, (pool, other) = torch.randperm(len(state), device=device), state.repeat(2, 1, 1, 1, 1)
        update = partial(getattr(rwkv_jit, f"{name}_update"), pool, state_indices=slots.int(), **options)
        with_state = {"output_final_state": True, **options}

        def step(*x: Tensor) -> tuple[Tensor, Tensor]:
            y, final = function(*x, initial_state=other[slots], backend="reference", **with_state)
            return y, other.index_copy_(0, slots, final)

        functions: dict[Who, Function] = {(OURS, "auto"): lambda *x: (update(*x), pool)}
        functions |= {("torch", "step"): step} if on_gpu else {}
        return Given(functions, inputs, dys, {"initial_state": state[slots], **with_state}, slots)
    options |= {"output_final_state": True} if phase in WITH_STATES else {}
    options |= {"initial_state": state} if phase == "decode" else {}
    if on_gpu and name == "timex":
        convolved = partial(functional.conv1d, groups=shape[2] * shape[3])
        in_torch["torch", "conv1d"] = lambda w, k: convolved(functional.pad(k, (shape[1] - 1, 0)), w.unsqueeze(1))
    elif on_gpu and shape[1] <= (128 if "backward" in phase else 4096):
        in_torch["torch", "loop"] = partial(function, backend="reference", **options)
    functions = {(OURS, backend): partial(function, backend=backend, **options) for backend in backends}
    return Given(functions | in_torch, inputs, dys, options)


def _several(results: Any) -> list[Any]:
    return [results] if isinstance(results, Tensor) else list(results)


def call_of(function: Function, given: Any, phase: str, grad: Function = torch.autograd.grad) -> Callable[[], Any]:
    """Return the call of a phase, which returns results or gradients; for a backward alone, the forward runs here."""

    def backward(results: Sequence[Tensor], keep: bool = False) -> Any:
        wanted = [x for x in given.inputs if x.requires_grad]
        return grad(results[: len(given.dys)], wanted, given.dys, retain_graph=keep, allow_unused=True)

    if "backward" not in phase:
        return lambda: _several(function(*given.inputs))
    if phase == "forward+backward":
        return lambda: backward(_several(function(*given.inputs)))
    results = _several(function(*given.inputs))
    return lambda: backward(results, True)
