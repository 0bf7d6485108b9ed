"""Calls of an extension's ops by the names of their arguments, with the elements of their tensors counted before.

Kernels of the extensions would have crashed on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rwkv_jit.compat import rows
from rwkv_jit.compat.buffers import Run

# By the letters of the sizes that a call says, N = C / H; R are the elements of r, or of q where it is called so.
OF_HEADS = {"r k v w a b y gy gr gk gv gw": "BTC", "u": "C", "gu": "BC", "state": "BCN", "s gs": "CN BCN"}
OF_CHANNELS = {"k v y gy gk gv": "BTC", "w u": "C", "gw gu aa bb pp": "BC"}
OF_FILTERS = {"w": "CT", "k out gy gw gk": "BCT"}
ALIKE = {"w k v a b z y dy dr dq dw dk dv da db dz": "R"}


def checked(run: Run, names: Sequence[str], counts: Mapping[str, str]) -> Callable[..., Any]:
    """Return what runs an op by the names of its arguments.

    `counts` says how many elements tensors have: words of letters, of which any will do, by their names.
    """
    by_name = {name: words for several, words in counts.items() for name in several.split() if name in names}

    def call(*values: Any) -> Any:
        # One of the two extensions of RWKV-4 leaves y out.
        present = names if len(values) == len(names) else [name for name in names if name != "y"]
        arguments = dict(zip(present, values, strict=True))
        sizes = {letter: arguments[letter] for letter in "BTCH" if letter in arguments}
        if counts and "H" in sizes:
            sizes["N"] = rows.head_size(sizes["C"], sizes["H"])
        if counts and not sizes:
            sizes["R"] = arguments["r" if "r" in arguments else "q"].numel()
        for name, words in by_name.items():
            if name not in arguments:
                continue
            found = arguments[name].numel()
            if all(found != math.prod(sizes[letter] for letter in word) for word in words.split()):
                word = words.split()[-1]
                said = " x ".join(f"{letter} {sizes[letter]}" for letter in word)
                raise ValueError(
                    f"{name}: expected {math.prod(sizes[letter] for letter in word)} elements, {said}, "
                    f"got shape {list(arguments[name].shape)}"
                )
        return run(arguments)

    return call
