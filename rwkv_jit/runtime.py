"""What can be done without calling an op: specialise a kernel, look at the cache and at the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    timex,
    timex_tiles,
    timex_transforms,
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
NAMES = ("wkv4", *OPS, "timex")
# What is told of calls to ops that have it, beside dtypes.
OPTIONS = {
    **dict.fromkeys(OPS, ("head_size", "value_size", "decay", "decay_bound", "state_layout", "state_dtype")),
    "wkv4": ("decay",),
    "timex": ("tokens", "batch"),
}
DIRECTIONS = ("forward", "backward")
# Of these sizes one stands for each set of kernels that calls of timex take: they differ up to 8 rows, and above 16.
_BATCHES = (*range(1, 9), 16, 32)


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
    tokens: int | None = None,
    batch: int | None = None,
    **parameters: Parameter,
) -> kernel.Kernel:
    """Compile one direction of an op, or find it in the cache; neither a GPU nor a driver is needed.

    Parameters
    ----------
    op : {"wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex"}
        The op.
    head_size : int
        K, from 1. None for wkv4 and timex, which have no heads.
    value_size : int, optional
        V; `head_size` by default.
    dtype : torch.dtype, default torch.bfloat16
        Of r, k, v and the gradients: float16, bfloat16 or float32.
    arch : str, optional
        E.g. "sm_90a", or "compute_80" for PTX; RWKVJIT_ARCH or this machine's GPU by default.
    direction : {"forward", "backward"}, default "forward"
        Which kernels. Of timex's tiles "backward" is the gradient of w; that of k is another form of the forward.
    backend : {"auto", "recurrent", "chunked", "split"}, default "auto"
        Which algorithm. "auto" is what a call of many tokens takes that gives no `decay_bound`; "chunked" is the tensor
        cores; "split" runs the same kernels for heads that these take, and those of larger heads. Of wkv4, "split" is
        the kernel of a part of the tokens. timex has "tiles" and "transforms" instead.
    decay : {"raw", "sigmoid", "log", "direct"}, optional
        The map from w to the per-step factor; by default the op's: "raw", for gla "log", for linear_attention "none",
        which is all it has.
    chunk_len, num_threads : int, optional
        By default as calls on this GPU take them, tuned or chosen by the head size; with an `arch`, by the head size.
    tokens, batch : int, optional
        Of timex alone, whose kernels go by T and B: T, and B, which is 8 or more by default.
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
    name, request = _specialized(
        op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, tokens, batch,
        parameters,
    )  # fmt: skip
    if op not in OPS:
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
    tokens: int | None = None,
    batch: int | None = None,
    **parameters: Parameter,
) -> Future[kernel.Kernel]:
    """Do what `specialize` does in the background, where at most cores / local ranks kernels compile at once.

    Parameters
    ----------
    op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, tokens, batch, \
**parameters
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
    _, request = _specialized(
        op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, tokens, batch,
        parameters,
    )  # fmt: skip
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
    value_sizes: int | Iterable[int] | None = None,
    tokens: int | Iterable[int] | None = None,
    batches: int | Iterable[int] | None = None,
) -> list[kernel.Kernel]:
    """Compile what calls of an op will need, side by side, so that no call has to; or find it in the cache.

    Parameters
    ----------
    op : {"wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex"}
        The op.
    head_sizes : int or iterable of int, optional
        K; left out for wkv4 and timex alone, which have no heads.
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
    value_sizes : int or iterable of int, optional
        V; by default that of each head size.
    tokens : int or iterable of int, optional
        T, for timex alone: its kernels go by the tokens of a row. Calls with contiguous inputs find them.
    batches : int or iterable of int, optional
        B, for timex alone; by default all.

    Returns
    -------
    list of Kernel
        One per architecture, head size, dtype and direction; a second forward, for calls with few heads, where that is
        another kernel; and where long calls take the tensor cores those kernels too, before the recurrent ones. None
        for calls of timex that torch.fft does.

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
        *([None] if given is None else _several(given, int) for given in (head_sizes, value_sizes, tokens, batches)),
        _several(dtypes, torch.dtype),
        DIRECTIONS if backward else DIRECTIONS[:1],
    )
    requests = [
        request
        for target, head_size, value_size, count, batch, dtype, direction in cases
        for request in call_requests(
            op, head_size, dtype, target, direction, decay, state_layout, w_dtype, state_dtype, decay_bound,
            value_size, count, batch,
        )
    ]  # fmt: skip
    return compile_all(requests, progress)


def compile_all(
    requests: Sequence[kernel.Request], progress: Callable[[int, int], None] | None = None
) -> list[kernel.Kernel]:
    """Find or compile kernels side by side and tell how far it is; equal requests are one kernel."""
    different = list({kernel.memory_key(request): request for request in requests}.values())
    futures = [kernel.get_async(request) for request in different]
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
    value_size: int | None = None, tokens: int | None = None, batch: int | None = None,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels that calls of an op may need in one direction.

    Long and short ones, with many and few heads, for gradients and not; some of the kernels may be equal.
    """
    _check_choice("op", op, NAMES)
    for name, kind in (("dtype", dtype), ("w_dtype", w_dtype or dtype), ("state_dtype", state_dtype)):
        if kind not in tensors.STORAGE:
            raise TypeError(f"{name}: expected {' or '.join(map(str, tensors.STORAGE))}, got {kind}")
    of_w = tensors.STORAGE[w_dtype or dtype]
    if op not in OPS and state_dtype != torch.float32:
        whose = "timex has no states" if op == "timex" else f"states of {op} are torch.float32"
        raise TypeError(f"state_dtype: {whose}, got {state_dtype}")
    if op == "timex":
        if tokens is None:
            raise TypeError("tokens: the kernels of timex go by them, got None")
        sizes = {"head_size": head_size, "value_size": value_size}
        _refuse(op, **sizes, decay=decay, state_layout=state_layout, decay_bound=decay_bound)
        return [
            request
            for rows in (_BATCHES if batch is None else [batch])
            for request in _timex_requests(dtype, {"t_w": of_w}, arch, direction, "auto", tokens, rows)[1]
        ]
    _refuse_lengths(op, tokens, batch)
    if op == "wkv4":
        unwanted = {"value_size": value_size, "state_layout": state_layout, "decay_bound": decay_bound}
        return [
            _wkv4_request(dtype, arch, direction, backend, decay, {"t_w": of_w, "t_u": of_w}, head_size, unwanted)
            for backend in ("recurrent", "split")
        ]
    of = OPS[op]
    if head_size is None:
        raise TypeError(f"head_sizes: {op} needs some, got None")
    value_size = head_size if value_size is None else value_size
    decay, state_layout = decay or of.decay, state_layout or of.state_layout
    chosen: dict[str, Parameter] = {"state_layout": state_layout}
    if direction == "forward":
        chosen["t_state"] = tensors.STORAGE[state_dtype]
    chosen |= {f"t_{name}": of_w for name in ("w", "u") if name in of.names}
    purposes = (True, False) if direction == "forward" else (True,)  # for gradients, and not
    calls = product((backends.LEAST_TOKENS, 1), (False, True), purposes, _known_choices(arch))
    target, also = tensors.targets(arch)
    case = backends.Case(op, dtype, head_size, value_size, backends.LEAST_TOKENS, decay, decay_bound, None)
    key_sizes = {head_size, *wide_keys.part_sizes("auto", case, lambda: target)} if op in gated.OPS else {head_size}
    of_calls = [
        call_request(
            op, size, value_size, dtype, arch, direction, "auto", decay, None, None, chosen, decay_bound, *call
        )
        for size, call in product(sorted(key_sizes), calls)
    ]  # fmt: skip
    found = [request for _, request in of_calls]
    of_chunks = [request for name, request in of_calls if name == "chunked"]
    if of_chunks:
        found.append(split.join_request(op, head_size, value_size, direction == "backward", target, also))
    for like in of_chunks:
        found.append(split.segment_request(op, like.parameters, direction == "backward", target, also))
        found.append(split.chunked_request(like))
    for request in [request for name, request in of_calls if name == "scan"]:
        length = int(request.parameters["CHUNK_LEN"])
        of_inputs = {name.upper(): storage for name, storage in chosen.items() if name.startswith("t_")}
        keys = int(request.parameters["HEAD_SIZE"])
        found += backends.SCANS[op].companions(
            op, direction, keys, value_size, {**request.parameters, **of_inputs, "DECAY": decay}, target, length,
            also, backends.is_guarded("scan", length, decay, decay_bound),
        )  # fmt: skip
    return found


def _refuse(op: str, **unwanted: Any) -> None:
    for name, value in unwanted.items():
        if value is not None:
            raise ValueError(f"{name}: {op} has none, got {value!r}")


def _refuse_lengths(op: str, tokens: int | None, batch: int | None) -> None:
    for name, value in (("tokens", tokens), ("batch", batch)):
        if value is not None:
            raise ValueError(f"{name}: goes with timex alone, the kernels of {op} take any; got {value!r}")


def _check_choice(name: str, value: Any, legal: Sequence[Any]) -> None:
    if value not in legal:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, legal))}, got {value!r}")


def _wkv4_request(
    dtype: torch.dtype, arch: str | None, direction: str, backend: str, decay: str | None,
    parameters: dict[str, Parameter], head_size: int | None, unwanted: dict[str, Any],
) -> kernel.Request:  # fmt: skip
    """Check everything and return a kernel of wkv4: that of the results, or with "split" that of a part on its own."""
    _refuse("wkv4", head_size=head_size, **unwanted)
    _check_choice("direction", direction, DIRECTIONS)
    _check_choice("backend", backend, ("auto", "recurrent", "split"))
    _check_choice("decay", decay or "raw", wkv4.DECAYS)
    _check_choice("dtype", dtype, tuple(tensors.STORAGE))
    storage = tensors.STORAGE[dtype]
    types: dict[str, Parameter] = {"T_IO": storage, "T_W": storage, "T_U": storage, "DECAY": decay or "raw"}
    types |= {name.upper(): value for name, value in parameters.items()}
    return wkv4_walk.requests(direction, types, *tensors.targets(arch))[backend != "split"]


def _timex_requests(
    dtype: torch.dtype, parameters: Mapping[str, Parameter], arch: str | None, direction: str, backend: str,
    tokens: int, batch: int,
) -> tuple[str, list[kernel.Request]]:  # fmt: skip
    """Check everything and return the backend and the kernels of one direction of calls with contiguous inputs."""
    for name, value in (("tokens", tokens), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    of_w = parameters.get("t_w", tensors.STORAGE.get(dtype))
    _check_choice("direction", direction, DIRECTIONS)
    _check_choice("backend", backend, timex.BACKENDS)
    _check_choice("dtype", dtype, tuple(tensors.STORAGE))
    _check_choice("t_w", of_w, tuple(tensors.STORAGE.values()))
    types = (next(kind for kind, name in tensors.STORAGE.items() if name == of_w), dtype)
    target, also = tensors.targets(arch)
    name = timex.choose(backend, dtype, batch, tokens, lambda: target, direction)
    found = []
    if name == "tiles":  # which read four tokens at once, and transforms two, where rows are as long
        convolution, *gradients = timex_tiles.requests(batch, tokens, types, target, also, 1 if tokens % 4 else 4)
        found = [convolution] if direction == "forward" else gradients
    elif name == "transforms":
        found = [timex_transforms.request(tokens, types, target, also, is_paired=tokens % 2 == 0)]
    chosen = {parameter.upper(): value for parameter, value in parameters.items()}
    return name, [request._replace(parameters={**request.parameters, **chosen}) for request in found]


def _specialized(
    op: str, head_size: int | None, value_size: int | None, dtype: torch.dtype, arch: str | None, direction: str,
    backend: str, decay: str | None, chunk_len: int | None, num_threads: int | None, tokens: int | None,
    batch: int | None, parameters: dict[str, Parameter],
) -> tuple[str, kernel.Request]:  # fmt: skip
    """Check everything and return the backend and the kernel that `specialize` names."""
    _check_choice("op", op, NAMES)
    given = (op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, parameters)
    if op != "timex":
        _refuse_lengths(op, tokens, batch)
        return call_request(*given)
    sizes = {"head_size": head_size, "value_size": value_size}
    _refuse(op, **sizes, decay=decay, chunk_len=chunk_len, num_threads=num_threads)
    if tokens is None:
        raise TypeError("tokens: the kernels of timex go by them, got None")
    rows = _BATCHES[-1] if batch is None else batch
    name, found = _timex_requests(dtype, parameters, arch, direction, backend, tokens, rows)
    if not found:
        raise UnsupportedConfigError(f"backend: {name!r} has no kernel, and calls of {tokens} tokens take it")
    return name, found[-1]


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
    of = OPS[op]
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
