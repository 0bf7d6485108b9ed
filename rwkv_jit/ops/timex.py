"""TimeX: a causal convolution of every channel with a filter as long as the sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from rwkv_jit.call import checks, differentiable, prepared, recording, registry, sharding, switches, tensors, torch_op
from rwkv_jit.call import plan as plans
from rwkv_jit.call.differentiable import Differentiable, Named, Values
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.prepared import Arrays, Gradients, Prepared
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import UnsupportedConfigError, unexpected
from rwkv_jit.plain.reference import timex_ref
from rwkv_jit.schedules import directions, timex_tiles, timex_transforms
from rwkv_jit.schedules.legal import TimexBackend
from rwkv_jit.schedules.problem import BYTES, Problem
from rwkv_jit.schedules.table import OPS

_OP = OPS["timex"]
_OWN = directions.ALGORITHMS["timex"]  # the backends that are kernels of this library
# Tokens up to which tiles are faster than transforms of a length on an H200, by direction and the bytes of a number,
# for eight rows of a channel or more. The work of tiles grows with T^2, that of transforms with their length.
_MOST_TOKENS: dict[str, dict[int, dict[int, int]]] = {
    "forward": {4: {1024: 704, 2048: 1408}, 2: {1024: 1450, 2048: 2304, 4096: 2816}},
    "backward": {4: {1024: 832, 2048: 1408}, 2: {1024: 1450, 2048: 2304, 4096: 3072}},
}


# ---- torch.fft --------------------------------------------------------------------------------------------------


def _transform_length(tokens: int) -> int:
    """Return the shortest length of a fast transform in which nothing comes round: 2^i, 3 2^i or 5 2^i."""
    needed = max(2 * tokens - 1, 1)
    return min(odd << max(0, (-(-needed // odd) - 1).bit_length()) for odd in (1, 3, 5))


def _spectrum(x: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.rfft(x.float(), n=_transform_length(x.shape[-1]))
    return spectrum


def _mirrored(x: Tensor) -> Tensor:
    """Return the spectrum of `x` backwards in time; not by `conj`, whose mark the code below torch must not see."""
    return _spectrum(x).conj_physical()


def _signal(spectrum: Tensor, tokens: int) -> Tensor:
    signal: Tensor = torch.fft.irfft(spectrum, n=_transform_length(tokens))
    return signal[..., :tokens]


def _fft_forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    if k.numel() == 0:
        return torch.empty_like(k, memory_format=torch.contiguous_format)
    return (_signal(_spectrum(w.flip(-1)) * _spectrum(k), k.shape[-1]) + eps).to(k.dtype)


def _fft_backward(g: Tensor, w: Tensor, k: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    if k.numel() == 0:
        return {}
    of_g, tokens, found = _spectrum(g), k.shape[-1], dict[str, Tensor]()
    if "w" in names:
        found["w"] = _signal((of_g * _mirrored(k)).sum(0), tokens).flip(-1).to(w.dtype)
    if "k" in names:
        found["k"] = _signal(of_g * _mirrored(w.flip(-1)), tokens).to(k.dtype)
    return found


# ---- plain torch -------------------------------------------------------------------------------------------------


def _in_order(x: Tensor) -> Tensor:
    """Return `x` with the strides that its fake promises: `contiguous` leaves any where a dimension has size 1.

    With strides that differ, ranks that make gradients of DTensors by torch 2.6 wait for each other for ever.
    """
    return x.reshape(-1).view(x.shape)


def _reference_backward(g: Tensor, w: Tensor, k: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradients as convolutions: of g backwards in time, and of k with g as the filter of each row."""
    wide, found = torch.promote_types(torch.promote_types(w.dtype, k.dtype), torch.float32), dict[str, Tensor]()
    if "w" in names:
        flat = (k.shape[0] * k.shape[1], k.shape[2])
        rows = timex_ref(g.to(wide).reshape(flat), k.to(wide).reshape(1, *flat))
        found["w"] = rows.view(k.shape).sum(0).to(w.dtype)
    if "k" in names:
        found["k"] = timex_ref(w.to(wide), g.to(wide).flip(-1)).flip(-1).to(k.dtype)
    return found


# ---- calls that kernels run --------------------------------------------------------------------------------------


def _vectors(*arrays: Any) -> tuple[int, ...]:
    """Return how many tokens of each [.., T] tensor a thread can read at once: 4, 2 or 1."""
    several = []
    for x in arrays:
        *others, step = x.stride()
        # Where tokens have gaps, a copy is read, or there is one token.
        more = () if step != 1 else (*others, x.data_ptr() // x.element_size())
        several.append(math.gcd(4, x.shape[-1], *more))
    return tuple(several)


def _problem(backend: str, w: Tensor, k: Tensor, eps: float = 0.0, wanted: tuple[str, ...] = ()) -> Problem:
    (batch, channels, tokens), gpu = k.shape, tensors.gpu(k.device.index)
    types = {"w": tensors.STORAGE[w.dtype], "k": tensors.STORAGE[k.dtype]}
    return Problem(
        _OP, gpu, types, B=batch, T=tokens, C=channels, backend=backend, eps=eps, wanted=wanted,
        is_batch_invariant=switches.is_batch_invariant(),
    )  # fmt: skip


class _Plans:
    """The plans of a direction of a call, one for each of the vectors that the addresses of tensors allow."""

    def __init__(self, p: Problem, plan: Callable[[Problem, Arrays], Plan]):
        self.problem, self._plan = p, plan
        self._by_vectors: dict[tuple[int, ...], Plan] = {}

    def run(self, arrays: Arrays) -> list[Tensor]:
        vectors = _vectors(*arrays)
        plan = self._by_vectors.get(vectors)
        if plan is None:
            plan = self._by_vectors[vectors] = self._plan(self.problem._replace(vectors=vectors), arrays)
        return plan.run(arrays)


def _prepared(p: Problem, backward: str | None) -> Prepared:
    """Return a checked call, with the `backward` of this backend if there is one.

    The kernels of a backward whose gradient lies in memory as k does compile beside the forward.
    """

    def plan(p: Problem, arrays: Arrays) -> Plan:
        soon = []
        if backward in _OWN:
            later = p._replace(backend=backward, vectors=(*p.vectors, p.vectors[1]))
            soon = directions.backward(later).requests(later.gpu)
        return Plan(directions.forward(p), p, dict(zip(_OP.names, arrays, strict=True)), soon=soon)

    gradients = _gradients(p._replace(backend=backward)) if backward and p.wanted else None
    return Prepared(cast("Plan", _Plans(p, plan)), gradients)


def _gradients(p: Problem) -> Gradients:
    """Return how a call is differentiated by the kernels of a problem, for what is wanted."""

    def by_op(saved: Arrays, grads: Arrays) -> Sequence[Tensor | None]:
        return _differentiate(saved, grads, (p.eps, p.backend), p.wanted)

    places = [_OP.names.index(x) for x in p.wanted]
    return Gradients(1, lambda _: cast("Plan", _Plans(p, _plan_backward)), by_op, places, len(_OP.names))


def _plan_backward(p: Problem, arrays: Arrays) -> Plan:
    key = "timex", p.is_batch_invariant, p.backend, p.wanted, p.vectors, tensors.signature(arrays)
    named = dict(zip((*_OP.names, "dy"), arrays, strict=True))
    return plans.find(key, lambda: Plan(directions.backward(p), p, named))


# ---- the torch op ------------------------------------------------------------------------------------------------


def _forward(w: Tensor, k: Tensor, eps: float, backend: str, save: bool) -> Tensor:
    """Choose by the device and run; the kernels of the one that will run the backward compile beside these."""
    backward = _taken(backend, w, k, "backward") if save else None
    backend = _taken(backend, w, k, "forward")
    if backend in _OWN and k.numel():
        key = "timex_fwd", eps, backend, backward, switches.is_batch_invariant()
        known: Prepared | None = prepared.latest(key, (w, k), _OP.lead)
        if known is None:
            known = _prepared(_problem(backend, w, k, eps), backward)
            prepared.keep_latest(key, (w, k), known, _OP.lead)
        return known.run((w, k))[0]
    if backend == "fft" or backend in _OWN:  # where there is nothing to compute, these do the same
        with tensors.exactly(k):
            return _fft_forward(w, k, eps)
    torch_op.say_reference("timex", k)
    return _plainly(w, k, eps)


def _plainly(w: Tensor, k: Tensor, eps: float) -> Tensor:
    with tensors.exactly(k):
        return _in_order(timex_ref(w, k, eps))


def _forward_fake(w: Tensor, k: Tensor, eps: float, backend: str, save: bool) -> Tensor:
    return torch.empty_like(k, memory_format=torch.contiguous_format)


def _in_forward_mode(w: Tensor, k: Tensor, eps: float, backend: str, save: bool) -> Tensor:
    if _taken(backend, w, k, "forward") in _OWN:
        recording.refuse_forward_mode("timex")
    return _plainly(w, k, eps)


def _gradients_of_op(arrays: Values, options: Values, _: Named, names: Sequence[str]) -> Gradients | None:
    (w, k, _g), (eps, backend) = arrays, options
    backend = _taken(backend, w, k, "backward")
    return _gradients(_problem(backend, w, k, eps, tuple(names))) if backend in _OWN and k.numel() else None


def _by_hand(arrays: Values, options: Values, _: Named, names: Sequence[str]) -> dict[str, Tensor]:
    (w, k, g), (_eps, backend) = arrays, options
    is_plain = _taken(backend, w, k, "backward") == "reference"
    with tensors.exactly(k):
        found = (_reference_backward if is_plain else _fft_backward)(g, w, k, names)
        return {x: _in_order(y) for x, y in found.items()}


_differentiate = differentiable.define(
    Differentiable(
        "timex", recording.Leaves(_OP.names), 2, 1, _forward, _forward_fake, _in_forward_mode, _gradients_of_op,
        _by_hand, lambda w, k, *rest: (*(torch_op.under_autocast(_OP, (w, k)) or (w, k)), *rest), lead=_OP.lead,
    )
)  # fmt: skip


# ---- the public call ---------------------------------------------------------------------------------------------


def choose(p: Problem, direction: str = "forward") -> str:
    """Return the backend that a direction of a call on CUDA tensors takes; or raise."""
    p = p._replace(B=timex_tiles.LARGEST_BATCH) if p.is_batch_invariant else p
    if p.backend in _OWN:
        obstacle = _OWN[p.backend].obstacle(p)
        if obstacle is not None:
            raise UnsupportedConfigError(f"backend: {p.backend!r} {obstacle}; use 'auto' or 'fft'")
    if p.backend != "auto":
        return p.backend
    most = _MOST_TOKENS[direction][BYTES[p.types["k"]]].get(timex_transforms.length(p.T), 0)
    is_short = min(p.B, 8) * most**2 >= 8 * p.T**2  # a tile takes eight rows at once
    if is_short and timex_tiles.obstacle(p) is None:
        return "tiles"
    return "transforms" if timex_transforms.obstacle(p) is None else "fft"


def _taken(backend: str, w: Tensor, k: Tensor, direction: str) -> str:
    """Return the backend that a direction of a call takes that has been checked."""
    if not k.is_cuda:
        return "reference" if backend == "auto" else backend
    return backend if backend in ("fft", "reference") else choose(_problem(backend, w, k), direction)


def _check(w: Any, k: Any, eps: float, backend: str) -> tuple[Tensor, Tensor]:
    checks.check_name("backend", backend, _OP.backends)
    checks.check_number("eps", eps)
    w, k = checks.as_tensors(_OP, (w, k))
    on_gpu = k.device.type == "cuda"
    if backend in _OWN and not on_gpu:
        raise UnsupportedConfigError(
            f"backend: {backend!r} runs on CUDA tensors, got {k.device}; use 'auto', 'fft' or 'reference'"
        )
    checks.check_inputs(_OP, (w, k), wide=backend == "reference" or (backend == "auto" and not on_gpu))
    return w, k


def timex(w: Array, k: Array, eps: float = 0.0, backend: TimexBackend = "auto", **_unknown: NoReturn) -> Tensor:
    r"""TimeX: a causal convolution of every channel with a filter as long as the sequence, with gradients to both.

        out[b, c, t] = eps + sum_{s <= t} w[c, T-1-(t-s)] k[b, c, s]

    B is the batch, C the channels, T the tokens; each may be 0. w[c, T-1] is the weight of the current token.

    Parameters
    ----------
    w : torch.Tensor, shape (C, T), dtype of k or float32
        Filter of each channel: its last element is for the current token, its first for T - 1 tokens ago. Any strides;
        if the last one is not 1, the input is copied. DLPack hands over arrays of other libraries.
    k : torch.Tensor, shape (B, C, T), float16, bfloat16 or float32
        Input, of any strides as w.
    eps : float, default 0.0
        Added to every output.
    backend : {"auto", "tiles", "transforms", "fft", "reference"}, default "auto"
        "tiles" are CUDA kernels on the tensor cores, from sm_80 on; "transforms" Fourier transforms in shared memory,
        in float32, for T up to 16384, which takes 136 KiB for a block, or 8192 with 68; "fft" is torch.fft in float32
        over padded rows; "reference" is plain torch. "auto" takes the reference for tensors that are not on a GPU,
        else for each direction what is faster on an H200: with a batch of 8 or more tiles up to T = 704 (backward 832)
        in float32, between 1025 and 1408 too, and up to 2816 (3072) in 16 bits, with a smaller batch up to shorter
        T, and transforms above; fft where they cannot do it.

    Returns
    -------
    torch.Tensor, shape (B, C, T), dtype of k
        Contiguous.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    Gradients are those of

        gk[b, c, s] = sum_{t >= s} g[b, c, t] w[c, T-1-(t-s)]
        gw[c, T-1-x] = sum_b sum_{t >= x} g[b, c, t] k[b, c, t-x]

    with gw in the dtype of w, summed over the batch in float32. The backward keeps w and k and nothing else. While they
    run, tiles take 8 C T bytes for every 16 rows of the batch for gw; transforms of length L, the power of two that
    holds T, 16 C L bytes for the rows, and for gw 24 L for each block that fits on the GPU and 4 C T for each of
    at most B groups of rows. A second derivative is an error.

    tiles: a float32 number is split into two of float16 after scaling by a power of two, which is that of a whole
    filter, and of 32 inputs of a row; sums are float32. Relative L2 error against float64 is below 2e-6 in float32,
    whatever the signs, and the rounding of the outputs in 16 bits. Results are the same bit for bit from run to run. An
    input that is not finite spoils its row alone, and there up to 63 outputs before it too; an infinite weight spoils
    its channel.

    transforms and fft: float32 throughout, errors of 3e-7 relative to a row as a whole, its smallest outputs included;
    an input that is not finite spoils all of its row, the outputs before it too. In the reference it spoils up to 255
    outputs before it.

    Under `torch.autocast` k is cast to its dtype like the inputs of torch's ops; w may stay float32. Forward-mode
    derivatives (`torch.func.jvp`, `jacfwd`) are there for "fft" and "reference"; of the other kernels they are an
    error. DTensors may be replicated or sharded over the batch or the channels.

    The first call with a dtype and a range of lengths compiles for this GPU and stores the result on disk.

    References
    ----------
    Peng, RWKV-CUDA, depthwise_conv_1d: the operator; nothing of its code.

    Examples
    --------
    >>> w, k = torch.randn(96, 1000, device="cuda"), torch.randn(4, 96, 1000, device="cuda")
    >>> out = rwkv_jit.timex(w, k)
    >>> out.shape
    torch.Size([4, 96, 1000])
    """
    if _unknown:
        raise unexpected("timex", next(iter(_unknown)))
    key = ("timex", eps, backend, switches.is_batch_invariant(), torch.is_grad_enabled())
    known: Prepared | None = prepared.latest(key, (w, k), _OP.lead) if tensors.is_eager() else None
    if known is None:
        if sharding.any_distributed((w, k)):
            of_w, of_k = map(sharding.roles, _OP.inputs.values())
            given = {"w": (w, of_w), "k": (k, of_k)}
            (out,) = sharding.run(lambda w, k: (timex(w, k, eps, backend),), given, "k", (of_k,))
            return out  # type: ignore[no-any-return]
        cast_arrays = torch_op.under_autocast(_OP, (w, k))
        if cast_arrays is not None:
            w, k = cast_arrays
            with tensors.exactly(k):
                return timex(w, k, eps, backend)
        arrays = w, k
        w, k = _check(w, k, eps, backend)
        if tensors.is_eager() and tensors.are_plain((w, k)) and k.is_cuda and k.numel():
            forward, backward = (_taken(backend, w, k, direction) for direction in ("forward", "backward"))
            if _OWN.keys() >= {forward, backward}:
                wants = [torch.is_grad_enabled() and x.requires_grad for x in (w, k)]
                wanted = tuple(compress(_OP.names, wants))
                problem = _problem(forward, w, k, float(eps), wanted)
                known = _prepared(problem, backward if wanted else None)
                if w is arrays[0] and k is arrays[1]:
                    prepared.keep_latest(key, arrays, known, _OP.lead)
    if known is None:
        return registry.find("timex_fwd")(w, k, float(eps), backend, False)  # type: ignore[no-any-return]
    return prepared.record(known, w, k)[0] if known.is_recorded else known.run((w, k))[0]  # type: ignore[arg-type]
