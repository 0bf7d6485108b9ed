"""Errors of arguments, by the names that they have in the functions of other packages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def named(**names: str) -> Callable[[_Function], _Function]:
    """Let a function refuse what is annotated as a tensor and is none; `names` are what ops below call its arguments.

    That is, what the function calls them, by what the ops do.
    """

    def decorate(function: _Function) -> _Function:
        kinds = {x.name: str(x.annotation) for x in inspect.signature(function).parameters.values()}

        @wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            for name, x in (*zip(kinds, given, strict=False), *options.items()):
                kind = kinds.get(name, "")
                if kind.startswith("Tensor") and not (isinstance(x, Tensor) or (x is None and "None" in kind)):
                    raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
            try:
                return function(*given, **options)
            except (TypeError, ValueError) as error:
                said = re.sub(r"(^|\blike |\bor )(\w+)\b", lambda x: x[1] + names.get(x[2], x[2]), str(error))
                error.args = (said,)
                raise

        return call  # type: ignore[return-value]

    return decorate
