"""Who else can do a case: FLA, torch itself, Wind and flash-rwkv, imported where they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.bench.cases import Case
from rwkv_jit.reference import SIGMOID_RATE

Inputs = Sequence[Tensor]
MOST_LOOPED_TOKENS = 128  # of a loop in torch: its launches are many, and its time grows no other way than linearly


class Contestant(NamedTuple):
    """Who is measured: a backend of ours, or a peer.

    `run` takes inputs, the state before them or None, and whether the state behind them is wanted; it returns both y
    and that state. `convert` makes such inputs of the op's, as differentiable operations; it is not timed.
    """

    who: str
    what: str
    run: Callable[[Inputs, Tensor | None, bool], tuple[Tensor, Any]]
    convert: Callable[[Inputs], Inputs] = lambda inputs: inputs
    convert_state: Callable[[Tensor], Tensor] = lambda state: state
    is_foreign: bool = False  # whether it is tried in a process of its own first, as it may end one


def of(case: Case) -> list[Contestant]:
    """Return the peers of a case, of the packages that are installed; what they lack shows when they are called."""
    makers = {"fla": _fla, "wind_rwkv": _wind, "flash_rwkv": _flash_rwkv}
    found = [peer for package, make in makers.items() if find_spec(package) is not None for peer in make(case)]
    return [*found, *_torch(case)]


@cache
def _loaded(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def log_decay(w: Tensor, decay: str) -> Tensor:
    """Return the logarithm of the per-step factor, in the dtype of w."""
    wide = w.float()
    return {
        "raw": lambda: -torch.exp(wide),
        "sigmoid": lambda: -SIGMOID_RATE * torch.sigmoid(wide),
        "log": lambda: wide,
    }[decay]().to(w.dtype)


def _replaced(inputs: Inputs, index: int, change: Callable[[Tensor], Tensor]) -> Inputs:
    return [change(x) if position == index else x for position, x in enumerate(inputs)]


def _swapped(state: Tensor) -> Tensor:
    return state.transpose(-1, -2).contiguous()


# ---- flash-linear-attention --------------------------------------------------------------------------------------

_SCALED = {"scale": 1.0}
# A bound on the decays, which are sigmoids, lets FLA take its faster chunks of 64. At head size 256 these end in an
# illegal memory access.
_BOUNDED, _LARGEST_BOUNDED = {"lower_bound": -SIGMOID_RATE}, 128
# Tokens up to which its kernels that go token by token are measured: above they take ten times as long as its chunks,
# and minutes to tune.
_MOST_STEPS = 1024
# By op: module, and functions with what they are given beside the inputs to compute the same.
_OF_FLA: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "wkv6": ("rwkv6", {"chunk_rwkv6": _SCALED, "fused_recurrent_rwkv6": _SCALED}),
    "wkv7": ("rwkv7", {"chunk_rwkv7": {**_SCALED, **_BOUNDED}, "fused_recurrent_rwkv7": _SCALED}),
    "gla": ("gla", {"chunk_gla": {}, "fused_recurrent_gla": {}}),
    "linear_attention": (
        "linear_attn",
        dict.fromkeys(
            ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"), {"normalize": False}
        ),
    ),
}


def _fla(case: Case) -> list[Contestant]:
    """FLA takes logarithms of the decays, and states [B, H, K, V]."""
    if case.op == "wkv4":
        return [Contestant("fla", "fused_recurrent_rwkv4", _fla_wkv4, is_foreign=True)]
    if case.op not in _OF_FLA:
        return []
    module, functions = _OF_FLA[case.op]
    if case.shape[1] > _MOST_STEPS:
        functions = {name: options for name, options in functions.items() if not name.startswith("fused_recurrent")}
    if case.op == "wkv7" and case.shape[3] > _LARGEST_BOUNDED:
        functions = dict.fromkeys(functions, _SCALED)

    def contestant(name: str, options: dict[str, Any]) -> Contestant:
        def run(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, Any]:
            function = _loaded(f"fla.ops.{module}", name)
            y, final = function(*inputs, initial_state=state, output_final_state=with_state, **options)[:2]
            return y, final

        if case.op == "wkv6":
            return Contestant("fla", name, run, lambda x: _replaced(x, 3, _of_raw), _swapped, True)
        if case.op == "wkv7":
            return Contestant("fla", name, run, lambda x: _replaced(x, 1, _of_sigmoid), _swapped, True)
        return Contestant("fla", name, run, is_foreign=True)

    return [contestant(name, options) for name, options in functions.items()]


def _of_raw(w: Tensor) -> Tensor:
    return log_decay(w, "raw")


def _of_sigmoid(w: Tensor) -> Tensor:
    return log_decay(w, "sigmoid")


def _fla_wkv4(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, Any]:
    """FLA's states are [B, 3, 1, C], and there always is one."""
    k = inputs[2]
    if state is None:
        state = torch.zeros(k.shape[0], 3, k.shape[2], dtype=torch.float32, device=k.device)
        state[:, 2] = -1e38
    y, final = _loaded("fla.ops.rwkv4", "fused_recurrent_rwkv4")(*inputs, state.unsqueeze(2))
    return y, final


# ---- torch -------------------------------------------------------------------------------------------------------


def _torch(case: Case) -> list[Contestant]:
    if case.op == "timex":
        return [Contestant("torch", "conv1d", _conv1d), Contestant("torch", "fft", _fft)]
    if case.op in ("wkv5", "wkv6") and case.shape[1] <= MOST_LOOPED_TOKENS:
        return [Contestant("torch", "naive loop", _naive, convert_state=_swapped)]
    return []


def _conv1d(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, None]:
    w, k = inputs
    _, channels, tokens = k.shape
    padded = torch.nn.functional.pad(k, (tokens - 1, 0))
    return torch.nn.functional.conv1d(padded, w.unsqueeze(1), groups=channels), None


def _fft(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, None]:
    w, k = inputs
    tokens = k.shape[-1]
    spectra = [torch.fft.rfft(x.float(), n=2 * tokens) for x in (w.flip(-1), k)]
    return torch.fft.irfft(spectra[0] * spectra[1], n=2 * tokens)[..., :tokens].to(k.dtype), None


def _naive(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, Tensor]:
    """RWKV-5 and 6 as Hugging Face models compute them without kernels: token by token, states [B, H, K, V]."""
    r, k, v, w, u = (x.float() for x in inputs)
    batch, tokens, heads, head_size = r.shape
    if state is None:
        state = r.new_zeros(batch, heads, head_size, v.shape[-1])
    factors = torch.exp(-torch.exp(w)).unsqueeze(-1)
    outputs = []
    for t in range(tokens):
        product = k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        outputs.append((r[:, t].unsqueeze(-2) @ (u.unsqueeze(-1) * product + state)).squeeze(-2))
        state = product + (factors[:, t] if w.dim() == 4 else factors) * state
    return torch.stack(outputs, dim=1).to(inputs[2].dtype), state


# ---- Wind and flash-rwkv -----------------------------------------------------------------------------------------

_OF_WIND = ("chunked_cuda", "backstepping_longhead", "backstepping_smallhead", "triton_bighead_bf16")
_head_sizes: dict[str, int] = {}  # that kernels of Wind were compiled for: each for one in a process


def _wind(case: Case) -> list[Contestant]:
    """Wind takes RWKV-7 in bfloat16, decays as exp(-exp(w)) and states in bfloat16."""
    if case.op != "wkv7":
        return []

    def contestant(name: str) -> Contestant:
        def run(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, Any]:
            batch, _, heads, head_size = inputs[0].shape
            _load_wind(name, head_size, batch * heads)
            if state is None:
                state = inputs[0].new_zeros(batch, heads, head_size, head_size)
            y, final = _loaded("wind_rwkv.rwkv7", f"attn_{name}")(*inputs, state)
            return y, final

        return Contestant(
            "wind_rwkv", name, run, lambda x: _replaced(x, 1, _raw_of_sigmoid), lambda x: x.bfloat16(), True
        )

    return [contestant(name) for name in _OF_WIND]


def _load_wind(name: str, head_size: int, heads: int) -> None:
    known = _head_sizes.setdefault(name, head_size)
    if known != head_size and "triton" not in name:
        raise ValueError(f"is compiled for one head size in a process, here {known}; measure {head_size} on its own")
    if "chunked" in name or "smallhead" in name:
        _loaded("wind_rwkv.rwkv7", f"load_{name}")(head_size)
    elif "longhead" in name:
        _loaded("wind_rwkv.rwkv7", f"load_{name}")(head_size, heads)


def _raw_of_sigmoid(w: Tensor) -> Tensor:
    return torch.log(SIGMOID_RATE * torch.sigmoid(w.float())).to(w.dtype)


def _flash_rwkv(case: Case) -> list[Contestant]:
    """flash-rwkv computes the forward of RWKV-6 at head size 64, on [B, T, C]."""
    if case.op != "wkv6" or case.has_gradients:
        return []

    def run(inputs: Inputs, state: Tensor | None, with_state: bool) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, head_size = inputs[0].shape
        if head_size != 64:
            raise ValueError(f"takes a head size of 64, got {head_size}")
        if state is None:
            state = torch.zeros(batch, heads, 64, 64, dtype=torch.float32, device=inputs[0].device)
        flat = [x.reshape(batch, tokens, heads * 64) for x in inputs[:4]]
        y, final = _loaded("flash_rwkv", "rwkv6_cuda_linear_attention")(*flat, inputs[4].reshape(-1), state)
        return y, final

    return [Contestant("flash_rwkv", "rwkv6_cuda_linear_attention", run, is_foreign=True)]
