"""The only importer of CuPy: NVRTC, the driver, modules, and what the machine has."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from importlib import metadata
from typing import Any

from rwkv_jit.errors import NvrtcNotFoundError

CUPY_WHEELS = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
# The packages themselves, so that the command works for a checkout as well; the extras cuda12 and cuda13 name the same.
INSTALL = {
    12: 'pip install "cupy-cuda12x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc-cu12>=12.8"',
    13: 'pip install "cupy-cuda13x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc>=13"',
}


def installed_cupy() -> list[str]:
    """Return the CuPy distributions of this environment, e.g. ``["cupy-cuda12x 14.2.0"]``."""
    found = []
    for name in CUPY_WHEELS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def cupy() -> Any:
    """Import CuPy, or say which command installs it.

    Raises
    ------
    NvrtcNotFoundError
        No CuPy, two CuPy wheels (they overwrite each other's files), or one that cannot be imported.
    """
    wheels = installed_cupy()
    if len(wheels) > 1:
        names = " ".join(wheel.split()[0] for wheel in wheels)
        raise NvrtcNotFoundError(
            f"{' and '.join(wheels)} are both installed and overwrite each other's files; keep one:\n"
            f"    pip uninstall -y {names} && {INSTALL[13 if 'cupy-cuda13x' in names else 12]}"
        )
    # CuPy makes its cache folder on import and fails where HOME cannot be written; we never use that cache.
    home_cache = os.path.join(os.path.expanduser("~"), ".cupy", "kernel_cache")
    if "CUPY_CACHE_DIR" not in os.environ and not _creatable(home_cache):
        os.environ["CUPY_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"cupy-{os.getpid()}")
    try:
        import cupy as module
    except ImportError as error:
        cause = "CuPy is not installed" if not wheels else f"{wheels[0]} cannot be imported ({error})"
        raise NvrtcNotFoundError(f"{cause}; CUDA kernels need it:\n    {INSTALL[12]}") from error
    return module


def _creatable(path: str) -> bool:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


@cache
def nvrtc() -> Any:
    """Return CuPy's NVRTC module with the library loaded.

    Raises
    ------
    NvrtcNotFoundError
        The library is not there.
    """
    from_wheel = next((13 if "cuda13x" in wheel else 12 for wheel in installed_cupy()), 12)
    cupy()
    from cupy.cuda import nvrtc as module

    try:
        module.getVersion()
    except Exception as error:  # CuPy raises differently by version; each means that the library did not load
        raise NvrtcNotFoundError(
            f"CuPy is there but NVRTC is not ({' '.join(str(error).split())}):\n    {INSTALL[from_wheel]}"
        ) from error
    return module


def driver() -> Any:
    """Return CuPy's thin layer over the CUDA driver."""
    cupy()
    from cupy.cuda import driver as module

    return module


def load_module(image: bytes) -> Any:
    """Load a cubin or PTX into the current context."""
    cupy()
    from cupy.cuda.function import Module

    module = Module()
    module.load(image)
    return module


def from_dlpack(tensor: Any) -> Any:
    """View a tensor as a CuPy array through DLPack, without a copy."""
    return cupy().from_dlpack(tensor)


def loaded_libraries(stem: str) -> list[str]:
    """Return the paths of the shared libraries in this process whose file name starts with `stem`."""
    if not sys.platform.startswith("linux"):
        return []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return sorted(path for path in paths if os.path.basename(path).startswith(stem))
