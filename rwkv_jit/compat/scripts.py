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
    defaults to a function that it calls. So one with defaults shows its other arguments without types, and `others`:
    then it takes as many as a script has, and returns a tensor.
    """
    signature = inspect.signature(function, eval_str=True)
    needed = [each for each in signature.parameters.values() if _is_needed(each)]
    if len(needed) < len(signature.parameters):
        parameters = [each.replace(annotation=each.empty) for each in needed]
        parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_POSITIONAL))
        signature = inspect.Signature(parameters)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return torch.jit.ignore(function)  # type: ignore[no-any-return]


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
