"""What can be done without calling an op: specialise a kernel, look at the cache and at the machine."""

from __future__ import annotations

import platform
from typing import Any

import torch

from rwkv_jit import cache, compiler, cuda, env, kernel, stats, tensors
from rwkv_jit.errors import NvrtcNotFoundError, UnsupportedConfigError
from rwkv_jit.ops import boundary, recurrent, wkv6, wkv7
from rwkv_jit.template import Parameter

OPS = {op.name: op for op in (wkv6.OP, wkv7.OP)}
DIRECTIONS = ("forward", "backward")


def specialize(
    op: str,
    head_size: int | None = None,
    value_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    arch: str | None = None,
    direction: str = "forward",
    backend: str = "auto",
    decay: str = "raw",
    chunk_len: int | None = None,
    num_threads: int | None = None,
    **parameters: Parameter,
) -> kernel.Kernel:
    """Compile one direction of an op, or find it in the cache; neither a GPU nor a driver is needed.

    Parameters
    ----------
    op : {"wkv6", "wkv7"}
        The op.
    head_size : int
        K, from 1.
    value_size : int, optional
        V; `head_size` by default.
    dtype : torch.dtype, default torch.bfloat16
        Of r, k, v and the gradients: float16, bfloat16 or float32.
    arch : str, optional
        E.g. "sm_90a", or "compute_80" for PTX; RWKVJIT_ARCH or this machine's GPU by default.
    direction : {"forward", "backward"}, default "forward"
        Which kernels.
    backend : {"auto", "recurrent"}, default "auto"
        Which algorithm.
    decay : {"raw", "sigmoid", "log", "direct"}, default "raw"
        The map from w to the per-step factor.
    chunk_len, num_threads : int, optional
        Chosen by the head size by default.
    **parameters
        Any other parameter of the template in lower case: t_w and t_state ("fp16", "bf16", "fp32"), t_u (wkv6),
        state_layout ("vk", "kv"), lanes_per_row, rows_per_thread.

    Returns
    -------
    Kernel
        With `source`, `cubin`, `ptx`, `origin` ("compiled", "disk" or "memory") and the integers `registers`,
        `spill_bytes` and `shared_bytes`, each the maximum over the direction's kernels.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit.
    UnsupportedConfigError
        The template has no kernel for these parameters: its rule, and the nearest legal value.
    CompileError, NvrtcNotFoundError
        The kernel is not cached and cannot be compiled.

    Examples
    --------
    >>> kernel = rwkv_jit.specialize("wkv7", head_size=96, dtype=torch.bfloat16, arch="sm_90a")
    >>> kernel.origin, kernel.spill_bytes
    ('compiled', 0)
    """
    request = _request(
        op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, parameters
    )
    return recurrent.get_kernels([request], chunk_len, num_threads)[0]


def _request(
    op: str, head_size: int | None, value_size: int | None, dtype: torch.dtype, arch: str | None, direction: str,
    backend: str, decay: str, chunk_len: int | None, num_threads: int | None, parameters: dict[str, Parameter],
) -> kernel.Request:  # fmt: skip
    layout = str(parameters.get("state_layout", "vk"))
    boundary.check_options(1.0, decay, None, layout, 1, chunk_len, num_threads, backend)
    for name, value, legal in (("op", op, tuple(OPS)), ("direction", direction, DIRECTIONS)):
        if value not in legal:
            raise ValueError(f"{name}: expected one of {', '.join(legal)}, got {value!r}")
    if backend == "reference":
        raise UnsupportedConfigError("backend: the reference is plain torch and has no kernel")
    if head_size is None:
        raise TypeError(f"head_size: {op} needs one, got None")
    value_size = head_size if value_size is None else value_size
    for name, size in (("head_size", head_size), ("value_size", value_size)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")
    if dtype not in tensors.STORAGE:
        raise TypeError(f"dtype: expected {' or '.join(map(str, tensors.STORAGE))}, got {dtype}")
    if arch is None:
        if env.arch() is None and not torch.cuda.is_available():
            raise ValueError("arch: there is no GPU to take it from; pass one, e.g. arch='sm_90'")
        arch = tensors.arch(torch.cuda.current_device()) if env.arch() is None else env.arch()
    storage = tensors.STORAGE[dtype]
    types: dict[str, Parameter] = {
        "T_IO": storage, "T_W": storage, "T_STATE": "fp32", "DECAY": decay, "STATE_LAYOUT": layout,
    }  # fmt: skip
    if OPS[op].fixed:
        types["T_U"] = storage
    chosen = {name.upper(): value for name, value in parameters.items()}
    return recurrent.specialize(
        op,
        direction,
        head_size,
        value_size,
        types,
        compiler.check_arch(str(arch)),
        chunk_len,
        num_threads,
        chosen=chosen,
    )


def is_available() -> bool:
    """Return whether kernels can run here.

    Returns
    -------
    bool
        There is a GPU that torch sees, CuPy, and NVRTC.
    """
    if not torch.cuda.is_available():
        return False
    try:
        cuda.nvrtc()
    except NvrtcNotFoundError:
        return False
    return True


def cache_info() -> dict[str, Any]:
    """Return where kernels are kept, how many, their bytes, and this process's counters.

    Returns
    -------
    dict
        path, entries, bytes; memory, disk, compiled (kernels by origin), compile_seconds.
    """
    files = cache.entries()
    return {
        "path": str(env.cache_dir()),
        "entries": len(files),
        "bytes": sum(path.stat().st_size for path in files if path.exists()),
        **stats.snapshot(),
    }


def clear_cache() -> int:
    """Delete the kernels on disk. Kernels in use stay loaded.

    Returns
    -------
    int
        How many there were.
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
        variables that are set. `nvrtc` is the library that was really loaded.
    """
    report: dict[str, Any] = {
        "rwkv_jit": _version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cupy": cuda.installed_cupy(),
    }
    try:
        report["nvrtc"] = compiler.identity()
        report["nvrtc_libraries"] = cuda.loaded_libraries("libnvrtc")
    except NvrtcNotFoundError as error:
        report["nvrtc"] = str(error)
    report["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
    report["cache"] = str(env.cache_dir())
    report["environment"] = env.set_variables()
    return report


def _version() -> str:
    from rwkv_jit import __version__

    return __version__


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory >> 30} GiB"
