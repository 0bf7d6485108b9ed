"""Who else can do a case: FLA, Wind, flash-rwkv and mamba-ssm, imported where they are called, and torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.bench import measure
from rwkv_jit.bench.cases import UPDATE, Case, rates_of
from rwkv_jit.bench.measure import Contestant, Inputs, swapped
from rwkv_jit.reference import SIGMOID_RATE


def peers_of(case: Case) -> list[Contestant]:
    """Return the peers of a case, of the packages that are installed; what they lack shows when they are called."""
    makers = {"fla": _fla, "wind_rwkv": _wind, "flash_rwkv": _flash_rwkv, "mamba_ssm": _mamba}
    foreign = [peer for package, make in makers.items() if find_spec(package) is not None for peer in make(case)]
    return [*foreign, *measure.torch_peers(case)]


@cache
def _loaded(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def log_decay(w: Tensor, decay: str) -> Tensor:
    """Return the logarithm of the per-step factor, in the dtype of w."""
    wide = w.float()
    return (-torch.exp(wide) if decay == "raw" else -SIGMOID_RATE * torch.sigmoid(wide)).to(w.dtype)


def raw_decay(w: Tensor, decay: str) -> Tensor:
    """Return w as exp(-exp(w)) reads it, in its dtype."""
    return w if decay == "raw" else torch.log(SIGMOID_RATE * torch.sigmoid(w.float())).to(w.dtype)


def _replaced(inputs: Inputs, index: int, change: Callable[[Tensor], Tensor]) -> Inputs:
    return [change(x) if position == index else x for position, x in enumerate(inputs)]


# ---- flash-linear-attention --------------------------------------------------------------------------------------

# A bound on the decays, which are sigmoids, lets FLA take its faster chunks of 64. At head size 256 these end in an
# illegal memory access.
_LARGEST_BOUNDED = 128
# Tokens up to which its kernels that go token by token are measured: above they take ten times as long as its chunks,
# and minutes to tune.
_MOST_STEPS = 1024
_NOT_NORMALIZED = {"normalize": False}
_NORMED_KEYS = {"use_qk_l2norm_in_kernel": True}
# By op: module, and functions with what they are given beside the inputs to compute the same.
_OF_FLA: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "wkv6": ("rwkv6", {"chunk_rwkv6": {"scale": 1.0}, "fused_recurrent_rwkv6": {"scale": 1.0}}),
    "wkv7": ("rwkv7", {"chunk_rwkv7": {"scale": 1.0}, "fused_recurrent_rwkv7": {"scale": 1.0}}),
    "gla": ("gla", {"chunk_gla": {}, "fused_recurrent_gla": {}}),
    "kda": ("kda", {"chunk_kda": _NORMED_KEYS}),
    "gated_delta_rule": ("gated_delta_rule", {"chunk_gated_delta_rule": _NORMED_KEYS}),
    "delta_rule": ("delta_rule", {"chunk_delta_rule": _NORMED_KEYS}),
    "simple_gla": ("simple_gla", {"chunk_simple_gla": {}}),
    "linear_attention": (
        "linear_attn",
        {
            "chunk_linear_attn": _NOT_NORMALIZED,
            "fused_chunk_linear_attn": _NOT_NORMALIZED,
            "fused_recurrent_linear_attn": _NOT_NORMALIZED,
        },
    ),
}
_KEPT = "chunk_rwkv7 disable_recompute"  # keeps for its backward what chunk_rwkv7 computes again


def _fla(case: Case) -> list[Contestant]:
    """FLA takes logarithms of the decays, and states [B, H, K, V] in float32. It writes new states, and no pool."""
    if case.op == "wkv4":
        return [Contestant("fla", "fused_recurrent_rwkv4", _fla_wkv4, is_foreign=True)]
    if case.op not in _OF_FLA:
        return []
    module, functions = _OF_FLA[case.op]

    def is_measured(name: str) -> bool:
        return case.shape[1] <= _MOST_STEPS if name.startswith("fused_recurrent") else case.phase != UPDATE

    functions = {name: options for name, options in functions.items() if is_measured(name)}
    if "chunk_rwkv7" in functions:
        if case.decay == "sigmoid" and case.shape[3] <= _LARGEST_BOUNDED:
            functions["chunk_rwkv7"] = {**functions["chunk_rwkv7"], "lower_bound": -SIGMOID_RATE}
        if case.has_gradients:
            functions[_KEPT] = {**functions["chunk_rwkv7"], "disable_recompute": True}
    index = {"wkv6": 3, "wkv7": 1}.get(case.op)  # of w

    def as_there(state: Tensor) -> Tensor:
        """Return states as FLA has them, or FLA's as the case has them."""
        return swapped(state.float()) if case.state_layout == "vk" else state.float()

    def contestant(name: str, options: dict[str, Any]) -> Contestant:
        def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
            function = _loaded(f"fla.ops.{module}", name.split()[0])
            y, final = function(*inputs, initial_state=state, **options, **more)[:2]
            return y, final

        if index is None:
            return Contestant("fla", name, run, convert_state=as_there, is_foreign=True)
        convert = partial(_replaced, index=index, change=partial(log_decay, decay=case.decay))
        return Contestant("fla", name, run, convert, as_there, True)

    return [contestant(name, options) for name, options in functions.items()]


def _fla_wkv4(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """FLA's states are [B, 3, 1, C], and there always is one."""
    k = inputs[2]
    if state is None:
        state = torch.zeros(k.shape[0], 3, k.shape[2], dtype=torch.float32, device=k.device)
        state[:, 2] = -1e38
    y, final = _loaded("fla.ops.rwkv4", "fused_recurrent_rwkv4")(*inputs, state.unsqueeze(2))
    return y, final


# ---- Wind and flash-rwkv -----------------------------------------------------------------------------------------

_OF_WIND = ("chunked_cuda", "backstepping_longhead", "backstepping_smallhead", "triton_bighead_bf16")


def _wind(case: Case) -> list[Contestant]:
    """Wind takes RWKV-7 in bfloat16, decays as exp(-exp(w)) and states in bfloat16; its chunks are of 16 tokens."""
    if case.op != "wkv7" or case.kind == "packed" or case.phase == UPDATE:
        return []

    def contestant(name: str) -> Contestant:
        def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
            batch, _, heads, head_size = inputs[0].shape
            if "longhead" in name:
                _load(f"load_{name}", head_size, batch * heads)
            elif "triton" not in name:
                _load(f"load_{name}", head_size)
            if state is None:
                state = inputs[0].new_zeros(batch, heads, head_size, head_size)
            y, final = _loaded("wind_rwkv.rwkv7", f"attn_{name}")(*inputs, state)
            return y, final

        convert = partial(_replaced, index=1, change=partial(raw_decay, decay=case.decay))
        return Contestant("wind_rwkv", name, run, convert, lambda state: state.bfloat16(), True)

    return [contestant(name) for name in _OF_WIND]


@cache
def _load(name: str, *sizes: int) -> None:
    """Build one of Wind's kernels, which a process can do for one head size."""
    _loaded("wind_rwkv.rwkv7", name)(*sizes)


def _flash_rwkv(case: Case) -> list[Contestant]:
    """flash-rwkv computes the forward of RWKV-6 at head size 64, on [B, T, C]."""
    if case.op != "wkv6" or case.has_gradients or case.kind == "packed" or case.phase == UPDATE:
        return []

    def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, head_size = inputs[0].shape
        if head_size != 64:
            raise ValueError(f"takes a head size of 64, got {head_size}")
        if state is None:
            state = torch.zeros(batch, heads, 64, 64, dtype=torch.float32, device=inputs[0].device)
        flat = [x.reshape(batch, tokens, heads * 64) for x in inputs[:4]]
        y, final = _loaded("flash_rwkv", "rwkv6_cuda_linear_attention")(*flat, inputs[4].reshape(-1), state)
        return y, final

    return [Contestant("flash_rwkv", "rwkv6_cuda_linear_attention", run, is_foreign=True)]


# ---- mamba-ssm ---------------------------------------------------------------------------------------------------

_MAMBA_CHUNK = 256  # tokens, as its models have


def _mamba(case: Case) -> list[Contestant]:
    """mamba-ssm computes the state space of Mamba-2 in Triton, with states [B, H, V, K]."""
    if case.op != "ssd":
        return []

    def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        x, dt, keys, queries = inputs
        function = _loaded("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
        return function(x, dt, rates_of(x.shape[2], x.device), keys, queries, _MAMBA_CHUNK), None

    return [Contestant("mamba_ssm", "mamba_chunk_scan_combined", run, is_foreign=True)]
