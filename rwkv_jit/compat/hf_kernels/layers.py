"""Our functions as the layers that `kernels` wants: without parameters, and with the arguments of what they replace."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from rwkv_jit.compat import hf, hf_models
from rwkv_jit.kernels.errors import UnsupportedConfigError


def __getattr__(name: str) -> type[nn.Module]:
    """Return the layer of a function. What the kernels cannot do goes to the forward that it takes the place of."""
    if name not in (*hf.FUNCTIONS, *hf_models.FUNCTIONS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = hf.find(name)

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        try:
            return function(*inputs, **named)
        except UnsupportedConfigError:
            theirs: Any = type(self).forward
            if theirs is forward:
                raise
            return theirs(self, *inputs, **named)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([own, *inspect.signature(function).parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(name, (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})
