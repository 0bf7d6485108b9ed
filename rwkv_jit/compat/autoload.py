"""What RWKVJIT_FLA and RWKVJIT_COMPAT ask for. Where one is set, `rwkv_jit.pth` runs this file as Python begins.

It then imports itself from the package beside `rwkv_jit.pth`, whatever the working directory and PYTHONPATH have.
Neither torch nor FLA is imported. A wrong value is one line on standard error, and Python goes on.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _import_from(folder: str) -> None:
    """Import the package from this folder alone, and this module of it once, however often `site` reads the line."""
    spec = PathFinder.find_spec("rwkv_jit", [folder])
    if "rwkv_jit" not in sys.modules and spec is not None and spec.loader is not None:
        sys.modules["rwkv_jit"] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules["rwkv_jit"])
        except BaseException:
            del sys.modules["rwkv_jit"]
            raise
    import_module("rwkv_jit.compat.autoload")


def _install() -> None:
    env, compat, fla = (import_module(f"rwkv_jit.{name}") for name in ("kernels.env", "compat", "compat.fla"))
    for is_wanted, owner in ((env.runs_fla, fla), (env.runs_compat, compat)):
        try:
            if is_wanted():
                owner.install()
        except ValueError as error:
            print(f"rwkv_jit: {error}", file=sys.stderr)


if __name__ == "rwkv_jit.compat.autoload":
    _install()
else:
    try:
        _import_from(globals()["sitedir"])
    except Exception as error:
        print(f"rwkv_jit: {error}", file=sys.stderr)
