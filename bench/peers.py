"""Who else can do a case: FLA, Wind, RWKV-LM, cuDNN, flash-rwkv and mamba-ssm, loaded where they are called, and torch.

They are what is installed, but RWKV-LM's kernels: those of the checkout that the variable RWKV_LM names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from bench import measure
from bench.cases import DERIVED, OF_FEW, Case
from bench.measure import Contestant, Inputs
from rwkv_jit.desk.inputs import PHASES, UPDATE
from rwkv_jit.plain.reference import SIGMOID_RATE


def peers_of(case: Case) -> list[Contestant]:
    """Return the peers of a case, of the packages that are installed; what they lack shows when they are called."""
    makers = {"fla": _fla, "wind_rwkv": _wind, "flash_rwkv": _flash_rwkv, "mamba_ssm": _mamba, "cudnn": _cudnn}
    foreign = [peer for package, make in makers.items() if find_spec(package) is not None for peer in make(case)]
    return [*foreign, *(_rwkv_lm(case) if _RWKV_LM in os.environ else ()), *measure.torch_peers(case)]


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


def _replacing(index: int | None, change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    """Return what changes one of the inputs, or none."""
    return lambda inputs: [change(x) if place == index else x for place, x in enumerate(inputs)]


# ---- flash-linear-attention --------------------------------------------------------------------------------------

# A bound on the decays, which are sigmoids, lets FLA take its faster chunks of 64. At head size 256 these end in an
# illegal memory access.
_LARGEST_BOUNDED = 128
# Tokens up to which its kernels that go token by token are measured: above they take ten times as long as its chunks,
# and minutes to tune. Up to so few of them its chunks are left out.
_MOST_STEPS, _FEW = 1024, 8
_NORMED_KEYS = {"use_qk_l2norm_in_kernel": True}
_SAFE_GATE = {"safe_gate": True, "lower_bound": -5.0}  # which takes the tensor cores for more; gates here are above
# By op: module, and functions with what they are given beside the inputs to compute the same.
_OF_FLA: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "wkv6": ("rwkv6", {"chunk_rwkv6": {"scale": 1.0}, "fused_recurrent_rwkv6": {"scale": 1.0}}),
    "wkv7": ("rwkv7", {"chunk_rwkv7": {"scale": 1.0}, "fused_recurrent_rwkv7": {"scale": 1.0}}),
    "gla": ("gla", {"chunk_gla": {}, "fused_recurrent_gla": {}}),
    "kda": ("kda", {
        "chunk_kda": _NORMED_KEYS, "chunk_kda safe_gate": {**_NORMED_KEYS, **_SAFE_GATE},
        "fused_recurrent_kda": _NORMED_KEYS,
    }),
    **{
        op: (op, {f"{name}_{op}": _NORMED_KEYS for name in ("chunk", "fused_recurrent")})
        for op in ("gated_delta_rule", "delta_rule")
    },
    "gated_delta_rule2": ("gdn2", {"chunk_gdn2": _NORMED_KEYS, "fused_recurrent_gdn2": _NORMED_KEYS}),
    "simple_gla": ("simple_gla", {"chunk_simple_gla": {}, "fused_recurrent_simple_gla": {}}),
    "hgrn2": ("gla", {"chunk_gla": {"scale": 1.0}, "fused_recurrent_gla": {"scale": 1.0}}),
    "linear_attention": ("linear_attn", {
        f"{name}_linear_attn": {"normalize": False} for name in ("chunk", "fused_chunk", "fused_recurrent")
    }),
}  # fmt: skip
# Functions that take `disable_recompute`, to keep for the backward what they compute again by default.
_KEEPING = ("chunk_rwkv7", "chunk_kda", "chunk_kda safe_gate")
_LATE_RATES = "fused_recurrent_gated_delta_rule"  # which has other gates before beta


def _fla(case: Case) -> list[Contestant]:
    """FLA takes logarithms of the decays, and states [B, H, K, V] in float32. It writes new states, and no pool."""
    if case.op == "wkv4":
        return [Contestant("fla", "fused_recurrent_rwkv4", _fla_wkv4, is_foreign=True)]
    if case.op not in _OF_FLA:
        return []
    module, functions = _OF_FLA[case.op]
    # Token by token, of which not all have gradients, and in chunks.
    steps = case.shape[1] <= _MOST_STEPS and not (case.op in DERIVED and case.has_gradients)
    fits = {True: steps, False: case.shape[1] > _FEW}
    functions = {name: each for name, each in functions.items() if fits[name.startswith("fused_recurrent")]}
    if "chunk_rwkv7" in functions and case.decay == "sigmoid" and case.shape[3] <= _LARGEST_BOUNDED:
        functions["chunk_rwkv7"] = {**functions["chunk_rwkv7"], "lower_bound": -SIGMOID_RATE}
    for name in _KEEPING if case.has_gradients else ():
        if name in functions:
            functions[f"{name} disable_recompute"] = {**functions[name], "disable_recompute": True}
    index = {"wkv6": 3, "wkv7": 1}.get(case.op)  # of w

    def as_there(state: Tensor) -> Tensor:
        """Return states as FLA has them, or FLA's as the case has them."""
        return state.float().mT.contiguous() if case.state_layout == "vk" else state.float()

    convert = _replacing(index, partial(log_decay, decay=case.decay))
    if case.op == "hgrn2":
        convert = _with_keys

    def contestant(name: str, options: dict[str, Any]) -> Contestant:
        def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
            function = _loaded(f"fla.ops.{module}", name.split()[0])
            late = {"beta": inputs[-1]} if name == _LATE_RATES else {}
            y, final = function(*inputs[: -1 if late else None], initial_state=state, **late, **options, **more)[:2]
            return y, final

        return Contestant("fla", name, run, convert, as_there, is_foreign=True)

    return [contestant(name, options) for name, options in functions.items()]


def _with_keys(inputs: Inputs) -> Inputs:
    """Return q, k, v and g of q, g and v of hgrn2, whose keys are 1 - e^g."""
    q, g, v = inputs
    return [q, -torch.expm1(g.float()).to(g.dtype), v, g]


def _fla_wkv4(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """FLA's states are [B, 3, 1, C], and there always is one."""
    k = inputs[2]
    if state is None:
        state = torch.zeros(k.shape[0], 3, k.shape[2], dtype=torch.float32, device=k.device)
        state[:, 2] = -1e38
    y, final = _loaded("fla.ops.rwkv4", "fused_recurrent_rwkv4")(*inputs, state.unsqueeze(2))
    return y, final


# ---- kernels that are built where they are called ----------------------------------------------------------------

_BUILDS = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
_RWKV_LM, _CHUNK = "RWKV_LM", 16  # the variable, and tokens
# By its own figures the first is the fastest up to this head size; what builds the others is left out there.
_OF_WIND = ("chunked_cuda", "backstepping_longhead", "backstepping_smallhead", "triton_bighead_bf16")
_LARGEST_CHUNKED = 128
# By head size: what its trainer takes by itself, and what it says is faster on an H100.
_OF_RWKV_LM = {
    64: ("rwkv7_clampw", "rwkv7_clampw_v3_for_h100", "rwkv7_clampw_v3_for_h100_alt"), 128: ("rwkv7_clampw128_v2",),
}  # fmt: skip


def _folder(*names: object) -> Path:
    """Return a folder for what is built of some names: one for all head sizes would hand out that of another."""
    folder = _BUILDS / "-".join(map(str, ("bench", *names)))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _wind(case: Case) -> list[Contestant]:
    """Wind takes RWKV-7 in bfloat16, decays as exp(-exp(w)) and states in bfloat16; its chunks are of 16 tokens."""
    if case.op != "wkv7" or case.kind == "packed" or case.is_pooled:
        return []

    def run(name: str, inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        batch, _, heads, head_size = inputs[0].shape
        if "triton" not in name:
            _load(f"load_{name}", head_size, *([batch * heads] if "longhead" in name else []))
        if state is None:
            state = inputs[0].new_zeros(batch, heads, head_size, head_size)
        y, final = _loaded("wind_rwkv.rwkv7", f"attn_{name}")(*inputs, state)
        return y, final

    convert = _replacing(1, partial(raw_decay, decay=case.decay))
    return [
        Contestant("wind_rwkv", name, partial(run, name), convert, lambda state: state.bfloat16(), is_foreign=True)
        for name in _OF_WIND[: 1 if case.shape[3] <= _LARGEST_CHUNKED else None]
    ]


@cache
def _load(name: str, *sizes: int) -> None:
    """Build one of Wind's kernels, which a process can do for one head size."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(_folder(name, *sizes))
    _loaded("wind_rwkv.rwkv7", name)(*sizes)


def _rwkv_lm(case: Case) -> list[Contestant]:
    """RWKV-LM trains RWKV-7 in bfloat16, with decays of sigmoids and no states; its chunks are of 16 tokens."""
    is_trained = case.phase in ("forward", "backward", "forward+backward") and case.kind == "usual"
    if case.op != "wkv7" or case.dtype != torch.bfloat16 or not is_trained or case.shape[3] != case.shape[4]:
        return []

    def run(name: str, inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, None]:
        y: Tensor = _OfTrainer.apply(_of_trainer(name, inputs[0].shape[3]), *inputs)  # type: ignore[no-untyped-call]
        return y, None

    names = _OF_RWKV_LM.get(case.shape[3], ())
    return [Contestant("rwkv_lm", name, partial(run, name), is_foreign=True) for name in names]


@cache
def _of_trainer(name: str, head_size: int) -> Any:
    """Build a kernel of RWKV-LM's trainer; two of them have one name there, and get one each here."""
    sources, folder = Path(os.environ[_RWKV_LM], "RWKV-v7", "train_temp", "cuda"), _folder(name, head_size)
    there, source = name.split("_for_")[0], folder / f"{name}.cpp"
    text = (sources / f"{there}.cpp").read_text("utf-8").replace(f"TORCH_LIBRARY({there},", f"TORCH_LIBRARY({name},")
    if not source.is_file() or source.read_text("utf-8") != text:  # a file that is written again is built again
        source.write_text(text, "utf-8")
    flags = ["--use_fast_math", "-O3", "-Xptxas", "-O3", "--extra-device-vectorization"]  # those of the trainer
    _loaded("torch.utils.cpp_extension", "load")(
        name, [str(sources / f"{name}.cu"), str(source)], build_directory=str(folder), is_python_module=False,
        extra_cuda_cflags=[f"-D_N_={head_size}", f"-D_CHUNK_LEN_={_CHUNK}", *flags],
    )  # fmt: skip
    return getattr(torch.ops, name)


class _OfTrainer(torch.autograd.Function):
    """A call of RWKV-LM's trainer, whose forward keeps the states before every chunk."""

    @staticmethod
    def forward(ctx: Any, kernels: Any, *inputs: Tensor) -> Tensor:
        batch, tokens, heads, head_size = inputs[0].shape
        y, kept = torch.empty_like(inputs[3]), torch.empty_like(inputs[3], dtype=torch.float32)
        states = kept.new_empty(batch, heads, tokens // _CHUNK, head_size, head_size)
        kernels.forward(*inputs, y, states, kept)
        ctx.kernels = kernels
        ctx.save_for_backward(*inputs, states, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states, kept = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in inputs]
        ctx.kernels.backward(*inputs, dy, states, kept, *grads)
        return None, *grads


# ---- cuDNN, flash-rwkv and mamba-ssm -----------------------------------------------------------------------------


def _cudnn(case: Case) -> list[Contestant]:
    """The frontend of cuDNN packs sequences. Its backward of KDA takes gates in float32, and q and k of length 1."""
    if case.op != "kda" or case.kind == "packed" or case.phase not in PHASES[:3]:
        return []

    def convert(inputs: Inputs) -> Inputs:
        q, k, v, g, beta = inputs
        q, k = (normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        return [q, k, v, g.float(), beta.float()]

    def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        function = _loaded("cudnn.linear_attention.ops", "kimi_delta_attention")
        y, final = function(*(x.flatten(0, 1) for x in inputs), _ends(*inputs[0].shape[:2], inputs[0].device))
        return y.view_as(inputs[2]), final

    return [Contestant("cudnn", "kimi_delta_attention", run, convert, is_foreign=True)]


@cache
def _ends(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return where sequences of equal lengths begin and end."""
    return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)


def _flash_rwkv(case: Case) -> list[Contestant]:
    """flash-rwkv computes the forward of RWKV-6 at head size 64, on [B, T, C]."""
    if case.op != "wkv6" or case.has_gradients or case.kind == "packed" or case.is_pooled:
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


_MAMBA_CHUNK = 256  # tokens, as its models have
_MAMBA_STEP, _MAMBA_SCAN = "selective_state_update", "mamba_chunk_scan_combined"


def _mamba(case: Case) -> list[Contestant]:
    """mamba-ssm computes the state space of Mamba-2 in Triton, with states [B, H, V, K], and one token over a pool.

    Its step wants a bias and D, which are zeros here, and takes its fast path where what a head has for all is no copy.
    """
    if case.op != "ssd" or case.sequences != case.shape[0] or case.phase == "decode":
        return []
    heads, keys, values = case.shape[2:]

    def expand(inputs: Inputs) -> Inputs:
        x, dt, a, *others = inputs
        zeros = x.new_zeros(heads, 1).expand(heads, values)
        wide = a.float()[:, None, None].expand(heads, values, keys)
        return [x[:, 0], dt[:, 0, :, None].expand(-1, -1, values), wide, *(x[:, 0] for x in others), zeros, zeros]

    def step(inputs: Inputs, pool: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        *several, own, bias = inputs
        function, slots = _loaded("mamba_ssm.ops.triton.selective_state_update", _MAMBA_STEP), more["others"]
        return function(pool, *several, own, dt_bias=bias, state_batch_indices=slots["state_indices"]), pool

    def run(inputs: Inputs, state: Tensor | None, more: Mapping[str, Any]) -> tuple[Tensor, Any]:
        function, wants = _loaded("mamba_ssm.ops.triton.ssd_combined", _MAMBA_SCAN), "output_final_state" in more
        found = function(*inputs, _MAMBA_CHUNK, initial_states=state, return_final_states=wants)
        return found if wants else (found, None)

    if case.phase in OF_FEW:
        few = [Contestant("mamba_ssm", _MAMBA_STEP, step, expand, is_foreign=True, verb=UPDATE)]
        return few if case.shape[1] == 1 else []
    return [Contestant("mamba_ssm", _MAMBA_SCAN, run, is_foreign=True)]
