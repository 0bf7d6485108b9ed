"""What is compiled ahead of calls: the kernels of the schedules that calls take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from itertools import chain, product
from typing import Any

import torch

from rwkv_jit.ahead.requests import DIRECTIONS, UPDATE, Calls, call_requests, named
from rwkv_jit.call import checks, prepared
from rwkv_jit.kernels import env, kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError, brief
from rwkv_jit.schedules.build_command import OPS


def specialize(
    op: str, head_size: int | None = None, value_size: int | None = None, dtype: torch.dtype = torch.bfloat16,
    arch: str | None = None, direction: str = "forward", backend: str = "auto", decay: str | None = None,
    chunk_len: int | None = None, num_threads: int | None = None, tokens: int | None = None, batch: int | None = None,
    heads: int | None = None, key_heads: int | None = None,
    inputs: Iterable[str] | Mapping[str, torch.dtype | None] = (), **parameters: Any,
) -> kernel.Kernel:  # fmt: skip
    """Compile one direction of an op, or find it in the cache; neither a GPU nor a driver is needed.

    Parameters
    ----------
    op : str
        The op, by the name of its function: "wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex", "kda",
        "gated_delta_rule", "delta_rule", "gated_delta_rule2", "simple_gla", "hgrn2" or "ssd".
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
        Only for timex, whose kernels depend on T and B: T, and B, which is 8 or more by default.
    heads, key_heads : int, optional
        As in `warm`.
    inputs : iterable of str or mapping of str to torch.dtype, default ()
        As in `warm`.
    **parameters
        Switches of the op as in `warm`, with the defaults of calls, and any other parameter of the template in lower
        case: t_w and t_state ("fp16", "bf16", "fp32"), t_u (wkv5, wkv6), state_layout ("vk", "kv"); lanes_per_row,
        rows_per_thread (recurrent), blocks_per_sm, and largest_decay (on the tensor cores): 0 leaves out the code for
        decays that are out of a chunk's range.

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
    calls = Calls(
        op, head_size, dtype, arch, direction, decay, value_size=value_size, tokens=tokens, batch=batch, heads=heads,
        key_heads=key_heads, inputs=_by_name(inputs),
    )  # fmt: skip
    made = named(calls, backend, chunk_len, num_threads, parameters)
    try:
        return kernel.get(made.request)
    except UnsupportedConfigError as error:
        geometry = {"chunk_len": chunk_len, "num_threads": num_threads}
        asked = {name: value for name, value in geometry.items() if value is not None}
        if not asked:
            raise
        raise prepared.with_nearest(error, made.problem, made.schedule, asked) from error


def compile_async(
    op: str, head_size: int | None = None, value_size: int | None = None, dtype: torch.dtype = torch.bfloat16,
    arch: str | None = None, direction: str = "forward", backend: str = "auto", decay: str | None = None,
    chunk_len: int | None = None, num_threads: int | None = None, tokens: int | None = None, batch: int | None = None,
    heads: int | None = None, key_heads: int | None = None,
    inputs: Iterable[str] | Mapping[str, torch.dtype | None] = (), **parameters: Any,
) -> Future[kernel.Kernel]:  # fmt: skip
    """Do what `specialize` does in the background, where at most cores / local ranks kernels compile at once.

    Parameters
    ----------
    op, head_size, value_size, dtype, arch, direction, backend, decay, chunk_len, num_threads, tokens, batch, \
heads, key_heads, inputs, **parameters
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
    calls = Calls(
        op, head_size, dtype, arch, direction, decay, value_size=value_size, tokens=tokens, batch=batch, heads=heads,
        key_heads=key_heads, inputs=_by_name(inputs),
    )  # fmt: skip
    made = named(calls, backend, chunk_len, num_threads, parameters)
    return kernel.get_async(made.request)


def warm(
    op: str, head_sizes: int | Iterable[int] | None = None,
    dtypes: torch.dtype | Iterable[torch.dtype] = torch.bfloat16, backward: bool = True,
    arch: str | Iterable[str] | None = None, decay: str | None = None, state_layout: str | None = None,
    w_dtype: torch.dtype | None = None, state_dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] | None = None, decay_bound: float | None = None,
    value_sizes: int | Iterable[int] | None = None, tokens: int | Iterable[int] | None = None,
    batches: int | Iterable[int] | None = None, updates: bool = False, rings: Iterable[tuple[int, int]] = (),
    widths: int | Iterable[int] | None = None, shards: bool = False, heads: int | None = None,
    key_heads: int | None = None, index_bits: int = 32, inputs: Iterable[str] | Mapping[str, torch.dtype | None] = (),
    **switches: Any,
) -> list[kernel.Kernel]:  # fmt: skip
    """Compile in parallel, or find in the cache, all kernels that calls of an op will need.

    They are those for the current values of `set_bfloat16_precision` and `torch.set_float32_matmul_precision`.

    Parameters
    ----------
    op : str
        The op, by the name of its function, as in `specialize`; or a function of a layer's small work: "shift_mix",
        "token_shift", "norm_shift", "prepare_keys", "gated_norm", "activate", "gated" or "causal_conv1d".
    head_sizes : int or iterable of int, optional
        K; None for what has no heads: wkv4, timex, and functions over channels.
    dtypes : torch.dtype or iterable of torch.dtype, default torch.bfloat16
        Of r, k, v, and of all inputs that are not said to have another.
    backward : bool, default True
        Also the kernels of the gradients.
    arch : str or iterable of str, optional
        Architectures; RWKVJIT_ARCH or this machine's GPU by default.
    decay : {"raw", "sigmoid", "log", "direct"}, optional
        The map from w to the per-step factor; by default the op's: "raw", for gla "log", for linear_attention "none",
        which is all it has.
    state_layout : {"vk", "kv"}, optional
        Order of the last two dimensions of the states; by default the op's: "vk", for gla and linear_attention "kv".
    w_dtype : torch.dtype, optional
        Of what may be float32 beside 16 bits, such as w, g, u, beta and dt: float32, or like r, k, v, which is the
        default. Parameters of heads (A, A_log, D, dt_bias) are float32 by default.
    state_dtype : torch.dtype, default torch.float32
        Of the initial state, and of pools.
    progress : callable, optional
        Called with the numbers of finished and of all kernels, before the first and after each.
    decay_bound : float, optional
        That of the calls: it can make chunks shorter.
    value_sizes : int or iterable of int, optional
        V; by default that of each head size.
    tokens : int or iterable of int, optional
        T, only for timex: its kernels depend on it. Calls with contiguous inputs find them.
    batches : int or iterable of int, optional
        B, only for timex; by default all.
    updates : bool, default False
        The kernels of `<op>_update` and `<op>_varlen` too, for batches of any size, one token and several, both
        roundings of states, and a w0 that is float32 or of the dtype of w. wkv4 and causal_conv1d have only an update,
        and timex none.
    rings : iterable of (int, int), default ()
        Beside `updates`: `length` and `drafts` of each kind of `ReplayRing`, for the kernels of `<op>_replay` of one
        token, of `<op>_verify` of one token and of `drafts`, of `replay_commit` and of `replay_flush`.
    widths : int or iterable of int, optional
        C, of functions over channels. Of models of RWKV-5, 6 or 7: also the other kernels of a layer of `rwkv_jit.nn`.
        Those of training are `token_shift`, `prepare_keys`, `gated_norm`, `activate`, `gated` and the losses. With
        `updates` also `shift_mix` and the functions after it. Parameters are all float32 or all of the dtype of r, k,
        v; the pool of last tokens has that dtype or `state_dtype`. In updates of RWKV-7, rate and v_gate have the dtype
        of w; a0 is there, with v0 where there is v_first, or neither is.
    shards : bool, default False
        Also the kernels of `rwkv_jit.parallel`, which ops with heads have. Parts of wkv5, wkv6, wkv7, gla and
        linear_attention that cannot be cut into equal segments take the kernels of other calls.
    heads : int, optional
        H, of ops such as kda, and of functions over heads: kernels of their inputs depend on it. By default that of
        many heads.
    key_heads : int, optional
        G, the heads of q and k, where they are fewer; H by default.
    index_bits : {32, 64}, default 32
        Beside `updates`: of the indices of slots.
    inputs : iterable of str or mapping of str to torch.dtype, default ()
        Which optional inputs calls have, by the names of their function, such as "A_log", "dt_bias", "D" or "z"; and,
        in a mapping, their dtypes and those of other inputs that may be float32. None there is the default.
    **switches
        What else calls choose, by the names of their function: qk_norm, beta_map, lower_bound, dt_softplus, gate, norm,
        rate_map. What is on or off and not named is compiled both ways. Of ssd, `least_step` and `most_step` are the
        limits other than 0 and inf; of shifts `mixes` is their number and `mixed` the type ("bf16") of what is mixed,
        and of causal_conv1d `taps` is the width, `state_len` the tokens that a pool keeps.

    Returns
    -------
    list of Kernel
        Each once: for every architecture, head size, dtype and direction those of long calls, before those of calls
        that are too short for the tensor cores, with many heads and with few. None for calls of timex that run
        torch.fft.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; nothing has been compiled.
    UnsupportedConfigError, CompileError, NvrtcNotFoundError
        A kernel is not cached and cannot be compiled.

    Examples
    --------
    >>> kernels = rwkv_jit.warm("wkv7", head_sizes=[64, 96], arch=["sm_80", "sm_90"])
    >>> kernels = rwkv_jit.warm("kda", 128, arch="sm_90", qk_norm=True, inputs=["A_log", "dt_bias"])
    >>> kernels = rwkv_jit.warm("norm_shift", widths=2048, mixes=6, arch="sm_90")
    """
    checks.check_names("warm", switches, OPS[op].traits if isinstance(op, str) and op in OPS else ())
    several_rings, types = tuple(_several("rings", rings)), _by_name(inputs)
    flags = {"backward": backward, "updates": updates, "shards": shards}
    backward, updates, shards = (checks.check_flag(name, flag) for name, flag in flags.items())
    sizes = {"head_sizes": head_sizes, "value_sizes": value_sizes, "tokens": tokens, "batches": batches}
    cases = product(
        _several("arch", arch, str), *(_several(name, given, int) for name, given in sizes.items()),
        _several("dtypes", dtypes, torch.dtype), [*DIRECTIONS[: 1 + backward], *([UPDATE] if updates else [])],
    )  # fmt: skip
    requests = [
        request
        for target, head_size, value_size, count, batch, dtype, direction in cases
        for width in _several("widths", widths, int)
        for request in call_requests(Calls(
            op, head_size, dtype, target, direction, decay, state_layout, w_dtype, state_dtype, decay_bound,
            value_size, count, batch, width, several_rings, shards, heads, key_heads, index_bits, types, switches,
        ))
    ]  # fmt: skip
    return compile_all(requests, progress)


def compile_all(
    requests: Sequence[kernel.Request], progress: Callable[[int, int], None] | None = None
) -> list[kernel.Kernel]:
    """Find or compile kernels side by side and tell how far it is; equal requests are one kernel.

    The ranks of a node begin at different ones: each compiles some, and reads those that others have compiled.
    """
    different = {kernel.memory_key(request): request for request in requests}
    keys = list(different)
    begin = int(env.place_among_ranks() * len(keys))
    # The recurrent kernels say at once where sizes are too large for all calls.
    in_turn = sorted((*keys[begin:], *keys[:begin]), key=lambda key: "recurrent" not in different[key].template.name)
    futures = {key: kernel.get_async(different[key]) for key in in_turn}
    try:
        for done, future in enumerate(chain([None], as_completed(futures.values()))):
            if future:
                future.result()  # the first error ends it
            if progress:
                progress(done, len(futures))
        return [futures[key].result() for key in keys]
    finally:
        for future in futures.values():
            future.cancel()


def _by_name(inputs: Any) -> dict[str, Any]:
    """Return dtypes of inputs by name; None stands for the default."""
    if isinstance(inputs, str):
        raise TypeError(f"inputs: expected names or dtypes by name, got {inputs!r}")
    names = _several("inputs", inputs)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"inputs: expected names or dtypes by name, got {brief(wrong[0])}")
    return dict(inputs) if isinstance(inputs, Mapping) else dict.fromkeys(names)


def _several(name: str, given: Any, one: type | tuple[()] = ()) -> list[Any]:
    """Return what was given as a list, where it may be `one`; None stands for a default of its own then."""
    if isinstance(given, one) or (given is None and one):
        return [given]
    try:
        return list(given)
    except TypeError:
        raise TypeError(f"{name}: expected one or several, got {brief(given)}") from None
