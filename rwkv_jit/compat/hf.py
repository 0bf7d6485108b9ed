"""Models of the Hugging Face Hub on these ops: functions for their modules, and layers for `kernels`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from rwkv_jit.compat import hf_models, replacing
from rwkv_jit.compat.naming import named
from rwkv_jit.kernels.errors import brief
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6

__all__ = ["kernel_mapping", "patch", "rwkv5_linear_attention", "rwkv6_linear_attention"]

# What the functions are called in models of the Hub, and which module has ours.
FUNCTIONS = {
    "rwkv5_linear_attention": "rwkv_jit.compat.hf",
    "rwkv6_linear_attention": "rwkv_jit.compat.hf",
    "rwkv7_recurrent": "rwkv_jit.compat",
}
KERNELS = Path(__file__).with_name("hf_kernels")
_NAMES = {"r": "receptance", "k": "key", "v": "value", "w": "time_decay", "u": "time_first", "initial_state": "state"}


@named(**_NAMES)
def rwkv5_linear_attention(
    training: bool, receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RWKV-5 time mixing as the remote code of its checkpoints calls it, on `wkv5` with state_layout="kv".

    `training` is not read. Rows are (B, T, H N), time_decay (w as in the model) and time_first (u) (H, N), the state
    (B, H, N, N) or None, which is not changed. Returns out, (B, T, H, N), rounded to the dtype of receptance and then
    float32, and the last state, in the dtype of the first, else float32. Raises TypeError or ValueError where an
    argument does not fit, before anything runs.
    """
    rows = _heads(time_first, receptance=receptance, key=key, value=value)
    if time_decay.shape != time_first.shape:
        raise ValueError(f"time_decay: expected shape {list(time_first.shape)}, got {list(time_decay.shape)}")
    return _mix(wkv5, rows, time_decay, time_first, state)


@named(**_NAMES)
def rwkv6_linear_attention(
    training: bool, receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RWKV-6 time mixing as `rwkv5_linear_attention`, on `wkv6`; time_decay is (B, T, H N)."""
    *rows, decay = _heads(time_first, receptance=receptance, key=key, value=value, time_decay=time_decay)
    return _mix(wkv6, rows, decay, time_first, state)


def _heads(time_first: Tensor, **rows: Tensor) -> list[Tensor]:
    """Return rows of channels as (batch, tokens, heads, channels of a head)."""
    if time_first.dim() != 2:
        raise ValueError(f"time_first: expected shape [heads, head size], got {list(time_first.shape)}")
    for name, x in rows.items():
        if x.dim() != 3 or x.shape[2] != time_first.numel():
            raise ValueError(f"{name}: expected shape [B, T, {time_first.numel()}], got {list(x.shape)}")
    return [x.unflatten(2, time_first.shape) for x in rows.values()]


def _mix(op: Any, rows: list[Tensor], w: Tensor, u: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    options = {"initial_state": state, "output_final_state": True, "state_layout": "kv"}
    y, final = op(*rows, w.float(), u.float(), **options)
    return y.float(), final


def find(name: str) -> Callable[..., Any]:
    """Return our function of this name."""
    if name in hf_models.FUNCTIONS:
        return hf_models.find(name)
    return getattr(import_module(FUNCTIONS[name]), name)  # type: ignore[no-any-return]


def patch(target: ModuleType | nn.Module) -> list[str]:
    """Let models of transformers, and remote code of the Hub, call functions of rwkv_jit.

    The names are `rwkv5_linear_attention`, `rwkv6_linear_attention` and `rwkv7_recurrent`, and those of models with
    short convolutions, KDA, the gated delta rule or Mamba-2: `torch_chunk_gated_delta_rule` and others. A decoded token
    of a layer of Qwen3-Next, Kimi Linear, Mamba-2, Bamba, Granite or Nemotron-H is a step of a layer of `rwkv_jit.nn`.
    Calls that the kernels cannot do still run the original functions. `rwkv_jit.compat.uninstall` restores these.

    Parameters
    ----------
    target : module or torch.nn.Module
        A Python module that has such a function, or a model: then the Python modules of its parts, and parts that have
        such a function.

    Returns
    -------
    list of str
        Names of the replaced functions, with their modules or parts.

    Raises
    ------
    TypeError
        It is neither.
    ValueError
        There is no such function in it, or one that takes other arguments than ours. Nothing is replaced then.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained("RWKV/v6-Finch-1B6-HF", trust_remote_code=True)
    >>> rwkv_jit.compat.hf.patch(model)
    ['transformers_modules.RWKV.v6-Finch-1B6-HF.modeling_rwkv6.rwkv6_linear_attention']
    >>> model = AutoModelForCausalLM.from_pretrained("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    >>> for name in rwkv_jit.compat.hf.patch(model):
    ...     print(name)
    transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention
    transformers.models.kimi_linear.modeling_kimi_linear.recurrent_kimi_delta_attention
    transformers.models.kimi_linear.modeling_kimi_linear.causal_conv1d_fn
    transformers.models.kimi_linear.modeling_kimi_linear.causal_conv1d_update
    transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention.forward
    """
    if isinstance(target, nn.Module):
        names = dict.fromkeys(type(part).__module__ for part in target.modules())
        modules = [sys.modules[name] for name in names if name in sys.modules]  # some classes are made on the fly
    elif isinstance(target, ModuleType):
        modules = [target]
    else:
        raise TypeError(f"target: expected a module of Python or a torch.nn.Module, got {brief(target)}")
    found = {(module, name): find(name) for module in modules for name in FUNCTIONS if name in vars(module)}
    for (module, name), ours in found.items():
        theirs, wanted = (list(inspect.signature(x).parameters) for x in (getattr(module, name), ours))
        if theirs != wanted:
            raise ValueError(
                f"{module.__name__}.{name}: expected the arguments {', '.join(wanted)}, got {', '.join(theirs)}"
            )
    for (module, name), ours in found.items():
        replacing.put(module, name, ours)
    owners: list[tuple[str, Any]] = [(module.__name__, module) for module in modules]
    if isinstance(target, nn.Module):
        owners += [(name or type(part).__name__, part) for name, part in target.named_modules()]
    replaced = [f"{module.__name__}.{name}" for module, name in found] + hf_models.put_into(owners)
    if not replaced:
        known = " or ".join((*FUNCTIONS, *hf_models.FUNCTIONS))
        raise ValueError(f"target: expected a module with {known}, got {', '.join(x.__name__ for x in modules)}")
    return replaced


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """Return what Hugging Face's `kernels` needs to put our functions into layers.

    It is for functions and modules under ``kernels.use_kernel_forward_from_hub(name)``. The name is one of those that
    `patch` knows, as `kernels` says it (`chunk_gated_delta_rule`), and the arguments are those of our function. For a
    ``KernelConfig(..., use_local_kernel=True)`` of transformers the path of the repository is
    `rwkv_jit.compat.hf.KERNELS`.

    Returns
    -------
    dict
        By name and by device ("cuda", "cpu"), a layer of the repository that this package brings: nothing is loaded
        from the Hub.

    Raises
    ------
    ImportError
        `kernels` is not installed.

    Examples
    --------
    >>> with kernels.use_kernel_mapping(rwkv_jit.compat.hf.kernel_mapping()):
    ...     model = kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    """
    try:
        from kernels import LocalLayerRepository
    except ImportError as error:
        raise ImportError("layers for Hugging Face's kernels need it: pip install kernels") from error
    return {
        name: {device: LocalLayerRepository(KERNELS, layer_name=name) for device in ("cuda", "cpu")}
        for name in (*FUNCTIONS, *hf_models.FUNCTIONS)
    }
