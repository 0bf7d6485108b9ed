"""Errors of arguments, by the names that they have in the functions of other packages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

_NOTHING = object()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def named(legal: type = Tensor, /, **names: str) -> Callable[[_Function], _Function]:
    """Let a function refuse what is annotated as a tensor and is none, and its errors name arguments as it does.

    `names` has what it calls its arguments, by what the ops below call them. `legal` is object for a function that
    takes other arrays too, and checks them itself.
    """

    def decorate(function: _Function) -> _Function:
        kinds = [(x.name, str(x.annotation)) for x in inspect.signature(function).parameters.values()]
        checked = [
            (place, name, (legal, type(None)) if "None" in kind else legal)
            for place, (name, kind) in enumerate(kinds) if kind.startswith("Tensor")
        ]  # fmt: skip

        @wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            for place, name, kind in checked:
                x = given[place] if place < len(given) else options.get(name, _NOTHING)
                if not isinstance(x, kind) and x is not _NOTHING:
                    raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
            try:
                return function(*given, **options)
            except (TypeError, ValueError) as error:
                said = re.sub(r"(^|\blike |\bor )(\w+)\b", lambda x: x[1] + names.get(x[2], x[2]), str(error))
                error.args = (said,)
                raise

        return call  # type: ignore[return-value]

    return decorate
