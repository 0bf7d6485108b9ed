"""Calls that these kernels run where they can, and the code of others where they cannot."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from rwkv_jit.kernels.errors import UnsupportedConfigError

_log = logging.getLogger("rwkv_jit")
_said: set[tuple[str, str]] = set()
Note = Callable[[str, UnsupportedConfigError | None], object]


def say_once(name: str, error: UnsupportedConfigError | None) -> None:
    """Log why the code of others runs a call, the first time that it does."""
    if error is not None and not torch.compiler.is_compiling() and (name, str(error)) not in _said:
        _said.add((name, str(error)))
        _log.info("%s stays as it was: %s", name, error)


def with_fallback(
    name: str, ours: Callable[..., Any], theirs: Callable[..., Any], note: Note = say_once
) -> Callable[..., Any]:
    """Return what runs ours, and theirs where ours cannot do what is asked; `note` is told of each call."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            result = ours(*arguments, **options)
        except UnsupportedConfigError as error:
            note(name, error)
            return theirs(*arguments, **options)
        note(name, None)
        return result

    # Not what stands in its dict: there torch keeps that FLA wants it out of compiled code.
    return functools.update_wrapper(call, theirs, updated=())
