"""What lets scripts of torch call functions of compat."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def scriptable(function: _Function) -> _Function:
    """Return a function that TorchScript calls and does not compile.

    TorchScript reads the types of a call from the signature. It does not read types that are strings, and gives no
    defaults to a function that has types. So one with defaults shows none: it takes as many arguments as a script has,
    and returns a tensor. Numbers may come as tensors then.
    """
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())
    if any(each.default is not each.empty or each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters):
        parameters = [each.replace(annotation=each.empty) for each in parameters]
        signature = signature.replace(parameters=parameters, return_annotation=signature.empty)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return torch.jit.ignore(function)  # type: ignore[no-any-return]
