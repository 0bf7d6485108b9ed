"""What there is to work with: the GPUs, the compiler, versions, and the cache of kernels."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rwkv_jit.kernels import __version__, cache, cuda, env, identity, kernel, stats
from rwkv_jit.kernels.cache import installed
from rwkv_jit.kernels.errors import NvrtcNotFoundError

_CACHE_VARIABLES = ("RWKVJIT_CACHE_DIR", "RWKVJIT_CACHE_PATH", "RWKVJIT_CACHE", "RWKVJIT_ASSERT_CACHED")


def is_available() -> bool:
    """Return whether kernels can run here.

    Returns
    -------
    bool
        There is a GPU that torch sees, CuPy, and NVRTC.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        cuda.nvrtc()
    except NvrtcNotFoundError:
        return False
    return True


@contextmanager
def empty_cache() -> Iterator[None]:
    """Work in a temporary cache, where kernels are compiled whatever else is stored or remembered."""
    with tempfile.TemporaryDirectory(prefix=env.TEMPORARY) as folder:
        before = {name: os.environ.pop(name, None) for name in _CACHE_VARIABLES}
        os.environ["RWKVJIT_CACHE_DIR"] = folder
        kernel.forget()
        try:
            with installed.left_aside():
                yield
        finally:
            kernel.forget()
            del os.environ["RWKVJIT_CACHE_DIR"]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def default_arch() -> str | None:
    """Return the architecture to name where the user names none: None, which is the GPU's, if there is one."""
    import torch

    return None if torch.cuda.is_available() or env.arch() else "sm_90a"


def cache_info() -> dict[str, Any]:
    """Return where kernels are kept, how many, their bytes, and this process's counters.

    Returns
    -------
    dict
        path, entries, bytes and max_bytes of the user's directory; layers, what is read in order; kernels of this
        process by origin: memory, disk (the user's directory), shared (other directories), bundle, compiled;
        compile_seconds; wait_seconds for other processes that compiled; bytes_read, bytes_written; evictions.
    """
    return {
        "path": str(env.cache_dir()),
        "entries": len(cache.entries()),
        "bytes": cache.size(),
        "max_bytes": env.cache_max_bytes(),
        "layers": [str(layer.path) for layer in cache.layers()],
        **stats.snapshot(),
    }


def clear_cache() -> int:
    """Delete the kernels of the user's directory, imported bundles too. Kernels in use stay loaded.

    Returns
    -------
    int
        How many there were.

    Raises
    ------
    CacheError
        One of them cannot be deleted.
    """
    count = cache.clear()
    kernel.forget()
    return count


def env_report() -> dict[str, Any]:
    """Return versions and settings that matter for a bug report; nothing is compiled.

    Returns
    -------
    dict
        package, python, platform, torch, torch_cuda, cupy, nvrtc, nvrtc_libraries, gpus, cache and the RWKVJIT_*
        variables that are set. `nvrtc` is the library that really compiles. torch is not imported for it.
    """
    noted = {} if "torch" in sys.modules else identity.noted()  # torch decides which of several NVRTCs is loaded
    try:
        nvrtc: dict[str, Any] = {
            "nvrtc": noted.get("identity") or identity.identity(),
            "nvrtc_libraries": sorted(noted.get("libraries", ()), key=len) or identity.libraries(),
        }
    except NvrtcNotFoundError as error:
        nvrtc = {"nvrtc": str(error)}
    return {
        "rwkv_jit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_torch(),
        "cupy": cuda.installed_cupy(),
        **nvrtc,
        "gpus": cuda.devices(),
        "cache": str(env.cache_dir()),
        "environment": env.set_variables(),
    }


def _torch() -> dict[str, str | None]:
    """Return torch's version and its CUDA as the installed files say them, without importing it."""
    distribution = metadata.distribution("torch")
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:  # an editable one
        text = ""
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^'\n]*)'", text, re.MULTILINE))
    return {"torch": found.get("__version__", distribution.version), "torch_cuda": found.get("cuda")}
