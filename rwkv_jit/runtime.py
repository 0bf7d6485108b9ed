"""What can be done without calling an op: specialise a kernel, look at the cache and at the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from itertools import chain, product
from typing import Any

import torch

from rwkv_jit import cache, cuda, env, identity, kernel, stats, tensors
from rwkv_jit.errors import NvrtcNotFoundError, UnsupportedConfigError
from rwkv_jit.ops import (
    backends,
    boundary,
    choices,
    gated,
    gla,
    linear_attention,
    prepared,
    recurrent,
    split,
    wide_keys,
    wkv4,
    wkv4_walk,
    wkv5,
    wkv6,
    wkv7,
)
from rwkv_jit.ops.choices import Choice
from rwkv_jit.template import Parameter

OPS = {op.name: op for op in (wkv5.OP, wkv6.OP, wkv7.OP, gla.OP, linear_attention.OP)}
DIRECTIONS = ("forward", "backward")


def specialize(
    op: str,
    head_size: int | None = None,
    value_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    arch: str | None = None,
    direction: str = "forward",
    backend: str = "auto",
    decay: str | None = None,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    **parameters: Parameter,
) -> kernel.Kernel:
    """Compile one direction of an op, or find it in the cache; neither a GPU nor a driver is needed.

    Parameters
    ----------
    op : {"wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention"}
        The op.
    head_size : int
        K, from 1. None for wkv4, which has no heads.
    value_size : int, optional
        V; `head_size` by default.
    dtype : torch.dtype, default torch.bfloat16
        Of r, k, v and the gradients: float16, bfloat16 or float32.
    arch : str, optional
        E.g. "sm_90a", or "compute_80" for PTX; RWKVJIT_ARCH or this machine's GPU by default.
    direction : {"forward", "backward"}, default "forward"
        Which kernels.
    backend : {"auto", "recurrent", "chunked", "split"}, default "auto"
        Which algorithm. "auto" is what a call of many tokens takes that gives no `decay_bound`; "chunked" is the tensor
        cores; "split" runs the same kernels for heads that these take, and those of larger heads. Of wkv4, "split" is
        the kernel of a part of the tokens.
    decay : {"raw", "sigmoid", "log", "direct"}, optional
        The map from w to the per-step factor; by default the op's: "raw", for gla "log", for linear_attention "none",
        which is all it has.
    chunk_len, num_threads : int, optional
        By default as calls on this GPU take them, tuned or chosen by the head size; with an `arch`, by the head size.
    **parameters
        Any other parameter of the template in lower case: t_w and t_state ("fp16", "bf16", "fp32"), t_u (wkv5, wkv6),
        state_layout ("vk", "kv"); lanes_per_row, rows_per_thread (recurrent), blocks_per_sm,
        and for the forward largest_decay (chunked): 0 is for calls with a `decay_bound`.

    Returns
    -------
    Kernel
        With `source`, `cubin`, `ptx`, `origin` ("compiled", "memory", "disk", "shared" or "bundle") and the integers
        `registers`, `spill_bytes` and `shared_bytes`, each the maximum over the direction's kernels.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit.
    UnsupportedConfigError
        There is no kernel for these parameters: the rule, and the nearest legal value.
    CompileError, NvrtcNotFoundError
        The kernel is not cached and cannot be compiled.

    Examples
    --------
    >>> kernel = rwkv_jit.specialize("wkv7", head_size=96, dtype=torch.bfloat16, arch="sm_90a")
    >>> kernel.origin, kernel.spill_bytes
    ('compiled', 0)
    """
    name, request = call_request(
        op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, parameters
    )
    if op == "wkv4":
        return kernel.get(request)
    return prepared.get_kernels(backends.KERNELS[op][name].nearest, [request], chunk_len, num_threads)[0]


def compile_async(
    op: str,
    head_size: int | None = None,
    value_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    arch: str | None = None,
    direction: str = "forward",
    backend: str = "auto",
    decay: str | None = None,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    **parameters: Parameter,
) -> Future[kernel.Kernel]:
    """Do what `specialize` does in the background, where at most cores / local ranks kernels compile at once.

    Parameters
    ----------
    op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, **parameters
        As in `specialize`.

    Returns
    -------
    concurrent.futures.Future
        Its `result()` is the Kernel, or raises what `specialize` would have raised while compiling.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; at once.

    Examples
    --------
    >>> futures = [rwkv_jit.compile_async("wkv7", head_size=n, arch="sm_90") for n in (64, 96)]
    >>> kernels = [future.result() for future in futures]
    """
    _, request = call_request(
        op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, parameters
    )
    return kernel.get_async(request)


def warm(
    op: str,
    head_sizes: int | Iterable[int] | None = None,
    dtypes: torch.dtype | Iterable[torch.dtype] = torch.bfloat16,
    backward: bool = True,
    arch: str | Iterable[str] | None = None,
    decay: str | None = None,
    state_layout: str | None = None,
    w_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] | None = None,
    decay_bound: float | None = None,
) -> list[kernel.Kernel]:
    """Compile what calls of an op will need, side by side, so that no call has to; or find it in the cache.

    Parameters
    ----------
    op : {"wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention"}
        The op.
    head_sizes : int or iterable of int, optional
        K, with V equal to it; left out for wkv4 alone, which has no heads.
    dtypes : torch.dtype or iterable of torch.dtype, default torch.bfloat16
        Of r, k, v.
    backward : bool, default True
        The kernels of the gradients too.
    arch : str or iterable of str, optional
        Architectures; RWKVJIT_ARCH or this machine's GPU by default.
    decay : {"raw", "sigmoid", "log", "direct"}, optional
        The map from w to the per-step factor; by default the op's: "raw", for gla "log", for linear_attention "none",
        which is all it has.
    state_layout : {"vk", "kv"}, optional
        Order of the last two dimensions of the states; by default the op's: "vk", for gla and linear_attention "kv".
    w_dtype : torch.dtype, optional
        Of w (g, and u): float32, or like r, k, v, which is the default.
    state_dtype : torch.dtype, default torch.float32
        Of the initial state.
    progress : callable, optional
        Called with the numbers of finished and of all kernels, before the first and after each.
    decay_bound : float, optional
        The promise that calls will give: it can make chunks shorter, and kernels then need not look at the decays.

    Returns
    -------
    list of Kernel
        One per architecture, head size, dtype and direction; a second forward, for calls with few heads, where that is
        another kernel; and where long calls take the tensor cores those kernels too, before the recurrent ones.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; nothing has been compiled.
    UnsupportedConfigError, CompileError, NvrtcNotFoundError
        A kernel is not cached and cannot be compiled.

    Examples
    --------
    >>> kernels = rwkv_jit.warm("wkv7", head_sizes=[64, 96], arch=["sm_80", "sm_90"])
    """
    cases = product(
        _several(arch, str) or [None],
        [None] if head_sizes is None else _several(head_sizes, int),
        _several(dtypes, torch.dtype),
        DIRECTIONS if backward else DIRECTIONS[:1],
    )
    requests = [
        request
        for target, head_size, dtype, direction in cases
        for request in call_requests(
            op, head_size, dtype, target, direction, decay, state_layout, w_dtype, state_dtype, decay_bound
        )
    ]
    return compile_all(requests, progress)


def compile_all(
    requests: Sequence[kernel.Request], progress: Callable[[int, int], None] | None = None
) -> list[kernel.Kernel]:
    """Find or compile kernels side by side and tell how far it is; equal requests are one kernel.

    The ranks of a node begin at different ones: each compiles some, and reads those that others have compiled.
    """
    different = list({kernel.memory_key(request): request for request in requests}.values())
    begin = int(env.place_among_ranks() * len(different))
    futures = [kernel.get_async(request) for request in (*different[begin:], *different[:begin])]
    futures = [*futures[len(different) - begin :], *futures[: len(different) - begin]]  # as they were asked for
    try:
        for done, _ in enumerate(chain([None], as_completed(futures))):
            if progress:
                progress(done, len(futures))
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _several(given: Any, one: type) -> list[Any]:
    return [] if given is None else [given] if isinstance(given, one) else list(given)


def call_requests(
    op: str, head_size: int | None, dtype: torch.dtype, arch: str | None, direction: str, decay: str | None,
    state_layout: str | None, w_dtype: torch.dtype | None, state_dtype: torch.dtype, decay_bound: float | None,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels that calls of an op may need in one direction.

    Long and short ones, with many and few heads, for gradients and not; some of the kernels may be equal.
    """
    if op == "wkv4":
        unwanted = {"state_layout": state_layout, "decay_bound": decay_bound}
        if state_dtype != torch.float32:
            raise TypeError(f"state_dtype: states of wkv4 are torch.float32, got {state_dtype}")
        of_w = tensors.STORAGE.get(w_dtype or dtype)
        if of_w is None:
            raise TypeError(f"w_dtype: expected {' or '.join(map(str, tensors.STORAGE))}, got {w_dtype}")
        return [
            _wkv4_request(dtype, arch, direction, backend, decay, {"t_w": of_w, "t_u": of_w}, head_size, unwanted)
            for backend in ("recurrent", "split")
        ]
    of = _op(op)
    if head_size is None:
        raise TypeError(f"head_sizes: {op} needs some, got None")
    decay, state_layout = decay or of.decay, state_layout or of.state_layout
    for name, kind in (("w_dtype", w_dtype or dtype), ("state_dtype", state_dtype)):
        if kind not in tensors.STORAGE:
            raise TypeError(f"{name}: expected {' or '.join(map(str, tensors.STORAGE))}, got {kind}")
    chosen: dict[str, Parameter] = {"state_layout": state_layout}
    if direction == "forward":
        chosen["t_state"] = tensors.STORAGE[state_dtype]
    chosen |= {f"t_{name}": tensors.STORAGE[w_dtype or dtype] for name in ("w", "u") if name in of.names}
    purposes = (True, False) if direction == "forward" else (True,)  # for gradients, and not
    calls = product((backends.LEAST_TOKENS, 1), (False, True), purposes, _known_choices(arch))
    target, also = tensors.targets(arch)
    case = backends.Case(op, dtype, head_size, head_size, backends.LEAST_TOKENS, decay, decay_bound, None)
    sizes = {head_size, *wide_keys.part_sizes("auto", case, lambda: target)} if op in gated.OPS else {head_size}
    of_calls = [
        call_request(
            op, size, head_size, dtype, arch, direction, "auto", decay, None, None, chosen, decay_bound, *call
        )
        for size, call in product(sorted(sizes), calls)
    ]  # fmt: skip
    found = [request for _, request in of_calls]
    of_chunks = [request for name, request in of_calls if name == "chunked"]
    if of_chunks:
        found.append(split.join_request(op, head_size, head_size, direction == "backward", target, also))
    for like in of_chunks:
        found.append(split.segment_request(op, like.parameters, direction == "backward", target, also))
        found.append(split.chunked_request(like))
    for request in [request for name, request in of_calls if name == "scan"]:
        length = int(request.parameters["CHUNK_LEN"])
        of_inputs = {name.upper(): storage for name, storage in chosen.items() if name.startswith("t_")}
        keys = int(request.parameters["HEAD_SIZE"])
        found += backends.SCANS[op].companions(
            op, direction, keys, head_size, {**request.parameters, **of_inputs, "DECAY": decay}, target, length,
            also, backends.is_guarded("scan", length, decay, decay_bound),
        )  # fmt: skip
    return found


def _op(name: str) -> boundary.Op:
    if name == "timex":
        raise UnsupportedConfigError(
            "op: timex has no head size to compile for; its kernels go by dtype, batch and tokens, and compile when "
            "rwkv_jit.timex is first called with such tensors"
        )
    if name not in OPS:
        raise ValueError(f"op: expected one of {', '.join((*OPS, 'wkv4'))}, got {name!r}")
    return OPS[name]


def _wkv4_request(
    dtype: torch.dtype, arch: str | None, direction: str, backend: str, decay: str | None,
    parameters: dict[str, Parameter], head_size: int | None, unwanted: dict[str, Any],
) -> kernel.Request:  # fmt: skip
    """Check everything and return a kernel of wkv4: that of the results, or with "split" that of a part on its own."""
    for name, value in {"head_size": head_size, **unwanted}.items():
        if value is not None:
            raise ValueError(f"{name}: wkv4 has none, got {value!r}")
    for name, given, legal in (
        ("direction", direction, DIRECTIONS),
        ("backend", backend, ("auto", "recurrent", "split")),
        ("decay", decay or "raw", wkv4.DECAYS),
        ("dtype", dtype, tuple(tensors.STORAGE)),
    ):
        if given not in legal:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, legal))}, got {given!r}")
    storage = tensors.STORAGE[dtype]
    types: dict[str, Parameter] = {"T_IO": storage, "T_W": storage, "T_U": storage, "DECAY": decay or "raw"}
    types |= {name.upper(): value for name, value in parameters.items()}
    return wkv4_walk.requests(direction, types, *tensors.targets(arch))[backend != "split"]


def call_request(
    op: str, head_size: int | None, value_size: int | None, dtype: torch.dtype, arch: str | None, direction: str,
    backend: str, decay: str | None, chunk_len: int | None, num_threads: int | None,
    parameters: dict[str, Parameter], decay_bound: float | None = None, tokens: int = backends.LEAST_TOKENS,
    few_heads: bool = False, training: bool = True, known: Sequence[Choice] | None = None,
) -> tuple[str, kernel.Request]:  # fmt: skip
    """Check everything and return the backend and the kernel of one direction that calls of so many tokens take."""
    if op == "wkv4":
        unwanted = {"value_size": value_size, "chunk_len": chunk_len, "num_threads": num_threads}
        request = _wkv4_request(dtype, arch, direction, backend, decay, parameters, head_size, unwanted)
        return "recurrent" if backend == "auto" else backend, request
    of = _op(op)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: expected one of {', '.join(DIRECTIONS)}, got {direction!r}")
    decay = of.decay if decay is None else decay
    layout = str(parameters.get("state_layout", of.state_layout))
    boundary.check_options(of.decays, 1.0, decay, decay_bound, layout, 1, chunk_len, num_threads, backend)
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
    target, also = tensors.targets(arch)
    for parameter, chosen_value in parameters.items():
        if isinstance(chosen_value, float):  # templates of one's own may take one; an op does not
            expected = "expected an int, a bool or an identifier"
            raise TypeError(f"parameter {parameter.upper()}: {expected}, got {chosen_value!r}")
        if parameter.upper() in recurrent.OPS[op].all_constants:
            raise ValueError(f"parameter {parameter.upper()}: is no choice for {op}, got {chosen_value!r}")
    storage = tensors.STORAGE[dtype]
    types: dict[str, Parameter] = {"T_IO": storage, "T_STATE": "fp32", "DECAY": decay, "STATE_LAYOUT": layout}
    types |= {f"T_{name.upper()}": storage for name in ("w", "u") if name in of.names}
    case = backends.Case(op, dtype, head_size, value_size, tokens, decay, decay_bound, chunk_len, num_threads, training)
    if backend == "split" and backends.holds_heads(case, lambda: target):
        backend = "chunked"  # the same kernels
    name, length = backends.choose(backend, case, lambda: target)
    geometry = backends.geometry(
        name, length, case, lambda: target, lambda: _known_choices(arch)[0] if known is None else known
    )
    guarded = backends.is_guarded(name, geometry.chunk_len, decay, decay_bound)
    looks = guarded and (name == "chunked" or op in gated.OPS)  # wkv7's scan has another kernel for that
    chosen = prepared.chosen(direction, geometry, looks)
    chosen |= {parameter.upper(): value for parameter, value in parameters.items()}
    request = backends.KERNELS[op][name].specialize(
        op, direction, head_size, value_size, types, target, geometry.chunk_len, geometry.num_threads, few_heads,
        chosen, also,
    )  # fmt: skip
    return name, request


def _known_choices(arch: str | None) -> list[Sequence[Choice]]:
    """Return the choices that calls may know: those of this GPU, or none and those of every GPU of an architecture."""
    if arch is None and torch.cuda.is_available():
        return [choices.of(torch.cuda.current_device())]
    return [(), *choices.of_arch(tensors.targets(arch)[0])]


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
        variables that are set. `nvrtc` is the library that really compiles.
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
        report["nvrtc"] = identity.identity()
        report["nvrtc_libraries"] = identity.libraries()
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
