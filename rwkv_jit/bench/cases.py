"""What is measured: an op on a shape in a phase, and inputs like a model's, in sets that no cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import reference, runtime
from rwkv_jit.ops import timex as timex_module
from rwkv_jit.ops.gla import gla
from rwkv_jit.ops.linear_attention import linear_attention
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7


def _with_state(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return what answers as the other ops do."""
    return lambda *given, **options: (function(*given, **options), None)


OPS: dict[str, Callable[..., Any]] = {
    "wkv4": wkv4,
    "wkv5": wkv5,
    "wkv6": wkv6,
    "wkv7": wkv7,
    "gla": gla,
    "linear_attention": linear_attention,
    "timex": _with_state(timex_module.timex),  # the channels of its w [C, T] and k [B, C, T] are those of all heads
}
REFERENCES: dict[str, Callable[..., Any]] = {op: getattr(reference, f"{op}_ref") for op in (*runtime.OPS, "wkv4")}
REFERENCES["timex"] = _with_state(reference.timex_ref)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIONS = {"wkv7": {"decay": "sigmoid"}}  # as in the models, where that is not the default
PHASES = ("forward", "backward", "forward+backward", "decode", "prefill")
WITH_STATES = ("decode", "prefill")
WITHOUT_HEADS = {"wkv4": ("w", "u", "k", "v"), "timex": ("w", "k")}  # their inputs
MOST_SETS = 256


class Case(NamedTuple):
    """A call that is measured; a decode takes one token and a state, a prefill returns the state."""

    op: str
    shape: tuple[int, int, int, int, int]  # B, T, H, K, V; the channels of wkv4 and timex are those of all heads
    dtype: torch.dtype
    phase: str = "forward"
    wide_decay: bool = False  # whether w is float32 beside inputs in 16 bits

    @property
    def shown(self) -> list[int]:
        """The shape as it is written for the op: [B, T, H, K, V], wkv4 [B, T, C], timex [B, C, T]."""
        batch, tokens, heads, head_size, _ = self.shape
        channels = heads * head_size
        return {"wkv4": [batch, tokens, channels], "timex": [batch, channels, tokens]}.get(self.op, list(self.shape))

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward in it."""
        return "backward" in self.phase

    @property
    def options(self) -> dict[str, Any]:
        """What calls of the op and of its reference are given beside the inputs."""
        return OPTIONS.get(self.op, {})


class Given(NamedTuple):
    """What a call is given: leaves that want gradients, the state of a decode, the gradient of y."""

    inputs: list[Tensor]
    state: Tensor | None
    dy: Tensor

    def size(self) -> int:
        """Return the bytes of all."""
        return sum(x.numel() * x.element_size() for x in (*self.inputs, self.dy, self.state) if x is not None)


def read_shape(text: str) -> tuple[int, ...]:
    """Return B, T, H, N from a command line.

    Raises
    ------
    ValueError
        These are not four positive numbers.
    """
    parts = text.split(",")
    if len(parts) != 4 or not _are_sizes(parts):
        raise ValueError(f"shape: expected four positive numbers B,T,H,N, got {text!r}")
    return tuple(map(int, parts))


def _are_sizes(parts: Sequence[str]) -> bool:
    return all(part.strip().isdigit() and int(part) > 0 for part in parts)


def shape_of(op: str, text: str) -> tuple[int, int, int, int, int]:
    """Return B, T, H, K, V from a command line, where B,T,H,N stands for equal head sizes.

    Raises
    ------
    ValueError
        These are not four or five positive numbers; of wkv4 and timex not those of B,T,C and B,C,T either.
    """
    parts = text.split(",")
    counts = (3, 4) if op in WITHOUT_HEADS else (4, 5)
    if len(parts) not in counts or not _are_sizes(parts):
        forms = {"wkv4": "B,T,C or B,T,H,N", "timex": "B,C,T or B,T,H,N"}.get(op, "B,T,H,N or B,T,H,K,V")
        raise ValueError(f"--shape: expected positive numbers {forms} for {op}, got {text!r}")
    sizes = list(map(int, parts))
    if len(sizes) == 3:
        batch, tokens, channels = sizes if op == "wkv4" else (sizes[0], sizes[2], sizes[1])
        return batch, tokens, 1, channels, channels
    batch, tokens, heads, head_size = sizes[:4]
    return batch, tokens, heads, head_size, sizes[-1]


def decay_of(op: str) -> str:
    """Return how w is read in the models of an op."""
    return OPTIONS.get(op, {}).get("decay", runtime.OPS[op].decay)


def names_of(op: str) -> tuple[str, ...]:
    """Return the names of an op's inputs, in its order."""
    return WITHOUT_HEADS.get(op) or tuple(runtime.OPS[op].public)


def make_inputs(op: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Return inputs like a model's, in the op's order, that require gradients.

    Parameters
    ----------
    op : str
        The op.
    shape : sequence of int
        B, T, H and the head size, or B, T, H, K, V.
    dtype : torch.dtype
        Of all of them.
    device : str, default "cuda"
        Where they are made.

    Returns
    -------
    list of torch.Tensor
    """
    batch, tokens, heads, head_size = shape[:4]

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device)

    if op == "wkv4":  # channels of all heads
        channels = heads * head_size
        k, v = (random(batch, tokens, channels) for _ in range(2))
        given = [torch.linspace(-6, 1, channels, device=device), random(channels) * 0.5, k, v]
        return [x.to(dtype).requires_grad_() for x in given]
    if op == "timex":
        channels = heads * head_size
        return [x.to(dtype).requires_grad_() for x in (random(channels, tokens), random(batch, channels, tokens))]
    keys, values = (batch, tokens, heads, head_size), (batch, tokens, heads, shape[-1])
    r, k, v, kk, w = (random(*sizes) for sizes in (keys, keys, values, keys, keys))
    kk = torch.nn.functional.normalize(kk, dim=-1)
    r, k, w = r * 0.5, k * 0.5, w - 0.6
    raw = w - 2.4  # RWKV-5 and 6 begin with -6 to -1; where one of many is above 4, a head leaves the range of chunks
    bonus = random(heads, head_size)
    made = {
        "wkv5": [r, k, v, raw[0, 0], bonus],
        "wkv6": [r, k, v, raw, bonus],
        "wkv7": [r, w, k, v, -kk, kk * torch.rand_like(kk)],
        "gla": [r, k, v, torch.nn.functional.logsigmoid(w) / 16],
        "linear_attention": [r, k, v],
    }[op]
    return [x.to(dtype).requires_grad_() for x in made]


def given_for(case: Case, device: str = "cuda") -> Given:
    """Return what a call of a case is given.

    Raises
    ------
    ValueError
        An input is zeros alone.
    """
    inputs = make_inputs(case.op, case.shape, case.dtype, device)
    if case.wide_decay:
        index = runtime.OPS[case.op].names.index("w")
        inputs[index] = inputs[index].detach().float().requires_grad_()
    refuse_zeros(names_of(case.op), inputs)
    like = inputs[1] if case.op == "timex" else inputs[3] if case.op in ("wkv4", "wkv7") else inputs[2]  # k, or v
    state = _state(case, device) if case.phase == "decode" else None
    return Given(inputs, state, torch.randn_like(like, requires_grad=False))


def _state(case: Case, device: str) -> Tensor:
    batch, _, heads, head_size, value_size = case.shape
    if case.op == "wkv4":  # num, den and max
        made = torch.randn(batch, 3, heads * head_size, device=device)
        made[:, 1] = made[:, 1].abs() + 0.5
        return made
    sizes = (value_size, head_size) if runtime.OPS[case.op].state_layout == "vk" else (head_size, value_size)
    return torch.randn(batch, heads, *sizes, device=device)


def refuse_zeros(names: Sequence[str], given: Sequence[Tensor]) -> None:
    """Check that there are values to compute with: on zeros a GPU draws less power and clocks higher.

    Raises
    ------
    ValueError
        A tensor is zeros alone; it is named.
    """
    for name, x in zip(names, given, strict=True):
        if not bool(x.detach().any()):
            raise ValueError(f"{name}: expected values like a model's, got zeros alone, which a GPU computes faster")


def sets_for(case: Case, cache_bytes: int) -> list[Given]:
    """Return sets of inputs that calls take in turn: together more than twice `cache_bytes`, but at most MOST_SETS.

    A set comes round when everything of it has left the cache.
    """
    first = given_for(case)
    count = min(2 * cache_bytes // first.size() + 1, MOST_SETS)
    return [first, *(given_for(case) for _ in range(count - 1))]


def are_cold(sets: Sequence[Given], cache_bytes: int) -> bool:
    """Return whether sets that are taken in turn find nothing of them in a cache."""
    return sum(each.size() for each in sets) > 2 * cache_bytes
