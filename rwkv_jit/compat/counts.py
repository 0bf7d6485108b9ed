"""How many elements the tensors of an extension's op have, found before it runs: its kernels would have crashed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rwkv_jit.compat import rows

# By the letters of the sizes that a call says, N = C / H; R are the elements of r, or of q where it is called so.
OF_HEADS = {"r k v w a b y gy gr gk gv gw": "BTC", "u": "C", "gu": "BC", "state": "BCN", "s gs": "CN BCN"}
OF_CHANNELS = {"k v y gy gk gv": "BTC", "w u": "C", "gw gu aa bb pp": "BC"}
OF_FILTERS = {"w": "CT", "k out gy gw gk": "BCT"}
ALIKE = {"w k v a b z y dy dr dq dw dk dv da db dz": "R"}


def checked(run: Callable[..., Any], names: Sequence[str], counts: Mapping[str, str]) -> Callable[..., Any]:
    """Return what runs an op after its tensors have been counted.

    Parameters
    ----------
    run : callable
        Runs the op.
    names : sequence of str
        Of its arguments.
    counts : mapping of str to str
        How many elements: words of letters, of which any will do, by the names of tensors.
    """
    by_name = {name: words for several, words in counts.items() for name in several.split() if name in names}

    @functools.wraps(run)
    def count(*given: Any) -> Any:
        # One of the two extensions of RWKV-4 leaves y out.
        own = names if len(given) == len(names) else [name for name in names if name != "y"]
        arguments = dict(zip(own, given, strict=True))
        sizes = {letter: arguments[letter] for letter in "BTCH" if letter in arguments}
        if "H" in sizes:
            sizes["N"] = rows.head_size(sizes["C"], sizes["H"])
        if not sizes:
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
        return run(*given)

    return count
