"""deepspeed's FusedAdam without a compiler: its extension `fused_adam`, from the fused Adam of torch."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import compat
from rwkv_jit.compat import replacing

_NAME = "fused_adam"
_ORDERS = (torch.contiguous_format, torch.channels_last)


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], lr: float, beta1: float,
    beta2: float, epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Change parameters and their moments in place by a step of Adam, as deepspeed's own does.

    `tensor_lists` are gradients, parameters, means of gradients and means of their squares, all contiguous, or all of a
    parameter channels last; `step` counts from 1. `mode` 0 adds weight_decay times the parameters to the gradients, 1
    is AdamW. `chunk_size` and `noop_flag` have no effect; the flag has none in deepspeed either. Raises ValueError
    where the lists differ in length, or a tensor is not contiguous.
    """
    grads, parameters, means, squares = map(list, tensor_lists)
    for tensors in zip(grads, parameters, means, squares, strict=True):
        # On a CPU torch reads and writes the memory in its order, whatever the strides are.
        if not any(all(x.is_contiguous(memory_format=order) for x in tensors) for order in _ORDERS):
            raise ValueError(f"tensor_lists: expected contiguous tensors, got strides {[x.stride() for x in tensors]}")
    if not parameters:  # of which torch cannot tell the device
        return
    # Where nothing corrects the means, it is as if infinitely many steps had been done.
    count = float(step) if bias_correction == 1 else float("inf")
    steps = [torch.full((), count, dtype=torch.float32, device=parameters[0].device)] * len(parameters)
    update = torch._fused_adamw_ if mode == 1 else torch._fused_adam_
    update(
        parameters, grads, means, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
        eps=epsilon, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip


_MODULE = SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
_given: list[dict[str, Any]] = []  # what deepspeed has loaded, by name, where the op is ours


def take_over(builder: ModuleType) -> None:
    """Put the op among those that deepspeed has loaded, unless it has its own.

    For what is there it asks for neither ninja, nvcc nor CUDA_HOME. Old ones keep nothing there, and build the op.
    """
    loaded = getattr(getattr(builder, "OpBuilder", None), "_loaded_ops", None)
    with replacing.LOCK:
        if compat.is_installed and loaded is not None and loaded.setdefault(_NAME, _MODULE) is _MODULE:
            _given.append(loaded)


def give_back() -> None:
    """Take the op away: optimizers that are made from now on have deepspeed's."""
    while _given:
        loaded = _given.pop()
        if loaded.get(_NAME) is _MODULE:
            del loaded[_NAME]
