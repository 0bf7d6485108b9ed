"""RWKV-4 time mixing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import stats, tensors
from rwkv_jit.algorithms.wkv4 import backend_of, kept
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.gpu import Gpu
from rwkv_jit.ops import known_calls, recording, registry, sharding
from rwkv_jit.ops.checks import check_flag, check_name
from rwkv_jit.ops.known_calls import Known
from rwkv_jit.ops.table import OPS
from rwkv_jit.problem import Problem
from rwkv_jit.reference import wkv4_ref
from rwkv_jit.schedule import floats

_OP = OPS["wkv4"]
_NO_GRADIENT = "changes the state in place and has no gradient; use wkv4, or torch.no_grad()"
DECAYS = ("raw", "log")
BACKENDS = ("auto", "recurrent", "split", "reference")

# ---- calls that kernels run --------------------------------------------------------------------------------------


def _is_for_kernels(backend: str, like: Tensor) -> bool:
    """Return whether kernels run a call: CUDA tensors take them, all others plain torch."""
    return backend != "reference" and like.is_cuda


def _problem(
    arrays: Sequence[Tensor], state: Tensor | None, decay: str, backend: str, output_final_state: bool, training: bool,
    in_place: bool = False,
) -> Problem:  # fmt: skip
    """Return the problem of a call on CUDA tensors that has been checked."""
    batch, tokens, channels = arrays[2].shape
    gpu = tensors.gpu(arrays[2].device.index)
    return Problem(
        _OP, gpu, {name: tensors.STORAGE[x.dtype] for name, x in zip(_OP.names, arrays, strict=True)},
        B=batch,
        T=tokens,
        C=channels,
        N=batch,
        training=training,
        has_initial_state=state is not None,
        has_final_state=output_final_state,
        decay=decay,
        backend=backend_of(backend, batch * channels, tokens, gpu.multiprocessors or 0),
        in_place=in_place,
    )  # fmt: skip


def _prepare(
    asked: tuple[Any, ...], arrays: Sequence[Tensor], state: Tensor | None, decay: str, backend: str,
    output_final_state: bool, training: bool,
) -> Known:  # fmt: skip
    """Return the call of tensors that have been checked; `asked` is what else tells calls apart, as it came."""

    def prepare() -> Known:
        problem = _problem(arrays, state, decay, backend, output_final_state, training)
        return Known(problem, (*arrays, _for_all_rows(state, arrays[2]), None), {})

    return known_calls.find_or_keep(asked, training, _key(*arrays), state, None, prepare)


def _prepare_step(
    asked: tuple[Any, ...], state: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, decay: str
) -> Known:
    """Return the call of a token whose final state takes the place of the initial one."""

    def prepare() -> Known:
        arrays = (w, u, k.unsqueeze(1), v.unsqueeze(1))
        problem = _problem(arrays, state, decay, "recurrent", True, False, in_place=True)
        return Known(problem, (*arrays, state, None), {})

    return known_calls.find_or_keep(asked, False, _key(w, u, k, v), state, None, prepare)


def _run_step(known: Known, state: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own = state.contiguous()
    y = known.run((w, u, k.unsqueeze(1), v.unsqueeze(1)), own, None)[0]
    if own is not state:
        state.copy_(own)
    return y.squeeze(1)


def _key(w: Any, u: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Return the arrays as known calls are looked for: by the shape of the first one."""
    return k, v, w, u


def _for_all_rows(state: Tensor | None, k: Tensor) -> Tensor | None:
    return state if state is None or state.dim() == 3 else state.expand(k.shape[0], *state.shape)


def _differentiate_known(
    problem: Problem, saved: Sequence[Tensor | None], dy: Tensor | None, grad_final: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the inputs, and of the initial state where there is one, by the torch op."""
    *given, _, states = saved
    assert states is not None
    grads = _gradients(given, (problem.decay, problem.backend), states, dy, grad_final)
    return grads[: len(_OP.inputs) + problem.has_initial_state]


_run_known = known_calls.recorded(_differentiate_known)


# ---- the torch op ------------------------------------------------------------------------------------------------


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    """Return what an op returns for a tensor that is not there."""
    return like.new_empty(0) if x is None else x


def _say_reference(like: Tensor) -> None:
    if not like.is_cuda:
        stats.say_once("wkv4: CPU tensors run the reference in plain torch", key="cpu")


def _forward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None, decay: str, backend: str,
    output_final_state: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _is_for_kernels(backend, k):
        arrays, asked = (w, u, k, v), ("wkv4_fwd", decay, backend, output_final_state)
        known = _prepare(asked, arrays, state, decay, backend, output_final_state, save)
        results = known.run(arrays, state, None)
        y = results[0]
        return y, results[1] if output_final_state else y.new_empty(0), results[-1] if save else y.new_empty(0)
    _say_reference(k)
    return _plainly(w, u, k, v, state, decay, backend, output_final_state, save)


def _plainly(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None, decay: str, backend: str,
    output_final_state: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `_forward` does, in plain torch."""
    if _is_for_kernels(backend, k):
        recording.refuse_forward_mode("wkv4")
    with tensors.exactly(k):
        y, final = wkv4_ref(w, u, k, v, state, output_final_state, decay)
    return y, _present(final, y), y.new_empty(0)


def _forward_fake(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None, decay: str, backend: str,
    output_final_state: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, tokens, channels = k.shape
    y, final, saved = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(0), v.new_empty(0)
    if output_final_state:
        dtype = torch.promote_types(v.dtype, torch.float32) if state is None else state.dtype
        final = v.new_empty((batch, 3, channels), dtype=dtype)
    if save and _is_for_kernels(backend, k):  # whatever the GPU, and in however many parts
        saved = v.new_empty(floats(kept(Problem(_OP, Gpu(""), {}, B=batch, T=tokens, C=channels))), dtype=torch.float32)
    return y, final, saved


def _backward(
    dy: Tensor | None, grad_final: Tensor | None, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None,
    decay: str, backend: str, saved: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    if _is_for_kernels(backend, k):
        problem = _problem((w, u, k, v), state, decay, backend, False, True)
        grads = known_calls.differentiate(problem, (w, u, k, v, state, None, saved), dy, grad_final)
    else:
        with recording.plain_torch():
            leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in (w, u, k, v, state)]
            given: tuple[Any, ...] = (*leaves, decay, backend, True, False)
            y, final, _ = _plainly(*given)
            grads = recording.gradients((y, final), (dy, grad_final), [x for x in leaves if x is not None])
    return (*grads, *([] if state is not None else [k.new_empty(0)]))


def _backward_fake(
    dy: Tensor | None, grad_final: Tensor | None, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (w, u, k, v)]
    of_state = k.new_empty(0) if state is None else torch.empty_like(state, memory_format=torch.contiguous_format)
    return (*grads, of_state)


def _step(state: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, decay: str) -> Tensor:
    if k.is_cuda:
        known = _prepare_step(("wkv4_step", decay), state, w, u, k, v, decay)
        return _run_step(known, state, w, u, k, v)
    _say_reference(k)
    y, final, _ = _plainly(w, u, k.unsqueeze(1), v.unsqueeze(1), state, decay, "reference", True, False)
    state.copy_(final)
    return y.squeeze(1)


def _step_fake(state: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, decay: str) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_forward_op, _backward_op, _step_op = map(registry.find, ("wkv4_fwd", "wkv4_bwd", "wkv4_step"))
_record_backward, _run_backward = recording.backward(_backward_op, "wkv4")


def _keep(ctx: Any, arguments: Sequence[Any], final: Tensor, saved: Tensor) -> None:
    """Keep what the backward takes."""
    ctx.save_for_backward(*arguments[:5], saved)
    ctx.options, ctx.has_final_state = arguments[5:7], arguments[7]
    ctx.mark_non_differentiable(*([saved] if ctx.has_final_state else [final, saved]))


def _in_context(ctx: Any, dy: Tensor | None, grad_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    *given, saved = ctx.saved_tensors
    # A compiled graph passes zeros for a result that has no gradient, here for the empty final state.
    grad_final = grad_final if ctx.has_final_state else None
    return *_gradients(given, ctx.options, saved, dy, grad_final), None, None, None, None


def _gradients(
    given: Sequence[Tensor | None], options: Sequence[str], saved: Tensor, dy: Tensor | None, grad_final: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of w, u, k, v and the initial state, by the torch op."""
    *grads, of_state = _run_backward(dy, grad_final, *given, *options, saved)
    return [*grads, None if given[-1] is None else of_state]


def _cast(w: Any, u: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...] | None:
    """Return the arguments as torch's own ops take them under autocast; None where that is off."""
    dtype = tensors.autocast_dtype(k if isinstance(k, Tensor) else tensors.from_any("k", k))
    if dtype is None:
        return None
    fixed = [tensors.under_autocast(tensors.from_any(n, x), dtype, keep=True) for n, x in (("w", w), ("u", u))]
    return (*fixed, *[tensors.under_autocast(tensors.from_any(n, x), dtype) for n, x in (("k", k), ("v", v))], *rest)


registry.implement(
    "wkv4_fwd",
    _forward,
    _forward_fake,
    recording.forward(
        _forward_op,
        saving=lambda arguments: (*arguments[:-1], True),
        setup=lambda ctx, arguments, _, results: _keep(ctx, arguments, *results[1:]),
        backward=_in_context,
        plainly=_plainly,
    ),
    lambda *arguments: _cast(*arguments) or arguments,
)
registry.implement("wkv4_bwd", _backward, _backward_fake, _record_backward)
registry.implement(
    "wkv4_step",
    _step,
    _step_fake,
    recording.nothing(_step_op, "wkv4_update", _NO_GRADIENT),
    lambda state, *arguments: (state, *(_cast(*arguments) or arguments)),
)


# ---- the public calls --------------------------------------------------------------------------------------------


def _as_checked(
    name: str, w: Any, u: Any, k: Any, v: Any, state: Any, decay: str, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the arguments of a call as tensors.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    for option, value, legal in (("decay", decay, DECAYS), ("backend", backend, BACKENDS)):
        check_name(option, value, legal)
    w, u, k, v = (tensors.from_any(n, x) for n, x in (("w", w), ("u", u), ("k", k), ("v", v)))
    if backend not in ("auto", "reference") and not _is_for_kernels(backend, k):
        raise UnsupportedConfigError(
            f"backend: {backend!r} runs on CUDA tensors, got {k.device}; use 'auto' or 'reference'"
        )
    sizes = "[B, T, C]" if name == "wkv4" else "[B, C]"
    if k.dim() != sizes.count(",") + 1:
        raise ValueError(f"k: expected {sizes.count(',') + 1} dimensions {sizes}, got shape {list(k.shape)}")
    dtypes = [*tensors.STORAGE] if _is_for_kernels(backend, k) else [*tensors.STORAGE, torch.float64]
    if k.dtype not in dtypes:
        raise TypeError(f"k: expected {' or '.join(map(str, dtypes))}, got {k.dtype}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {list(k.shape)} like k, got {list(v.shape)}")
    if v.dtype != k.dtype:
        raise TypeError(f"v: expected {k.dtype} like k, got {v.dtype}")
    channels = k.shape[-1]
    for n, x in (("w", w), ("u", u)):
        if tuple(x.shape) != (channels,):
            raise ValueError(f"{n}: expected shape [{channels}] (channels), got {list(x.shape)}")
        if x.dtype not in (k.dtype, torch.float32):
            raise TypeError(f"{n}: expected {k.dtype} like k or torch.float32, got {x.dtype}")
    if state is not None:
        n = "initial_state" if name == "wkv4" else "state"
        state = tensors.from_any(n, state, in_place=name == "wkv4_update")
        want = (k.shape[0], 3, channels)
        shapes = [want, want[1:]] if name == "wkv4" else [want]
        if tuple(state.shape) not in shapes:
            raise ValueError(f"{n}: expected shape {' or '.join(str([*s]) for s in shapes)}, got {list(state.shape)}")
        if state.dtype != torch.float32 and (state.dtype not in dtypes[3:]):
            raise TypeError(f"{n}: expected torch.float32{' or torch.float64' * len(dtypes[3:])}, got {state.dtype}")
    for n, x in (("w", w), ("u", u), ("v", v), ("initial_state" if name == "wkv4" else "state", state)):
        if x is not None and x.device != k.device:
            raise ValueError(f"{n}: expected device {k.device} like k, got {x.device}")
    return w, u, k, v, state


def _distributed(w: Any, u: Any, k: Any, v: Any, state: Any, *options: Any) -> tuple[Tensor, Tensor | None]:
    """Run a call of DTensors."""
    streamed, fixed = {"batch": 0, "channels": 2}, {"channels": 0}
    of_state = {"channels": 1} if state is not None and state.dim() == 2 else streamed
    given = {
        "k": (k, streamed),
        "v": (v, streamed),
        "w": (w, fixed),
        "u": (u, fixed),
        "initial_state": (state, of_state),
    }
    y, final = sharding.run(lambda k, v, w, u, state: wkv4(w, u, k, v, state, *options), given, (streamed, streamed))
    return y, final


def wkv4(
    w: Any,
    u: Any,
    k: Any,
    v: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    decay: str = "raw",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""RWKV-4 time mixing over sequences, with gradients to every input and to the initial state.

        y_t = (num_t + e^(u + k_t) v_t) / (den_t + e^(u + k_t))
        num_(t+1) = e^d num_t + e^(k_t) v_t;   den_(t+1) = e^d den_t + e^(k_t)

    per channel, with the log-decay d = -exp(w), or w itself. B is the batch, T the tokens, C the channels.

    Parameters
    ----------
    w : torch.Tensor, shape (C,), dtype of k or float32
        Decay (`time_decay` of the models), read as `decay` says. Arrays of other libraries come in through DLPack.
    u : torch.Tensor, shape (C,), dtype of k or float32
        Bonus of the current token (`time_first`).
    k : torch.Tensor, shape (B, T, C), float16, bfloat16 or float32
        Key, of any size. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, T, C), dtype of k
        Value.
    initial_state : torch.Tensor, shape (B, 3, C) or (3, C), float32, optional
        num, den and max before the first token: the sums are e^max num and e^max den. 0, 0 and -1e38 by default. den
        must not be negative, and num be 0 where den is. Without B the same for every row.
    output_final_state : bool, default False
        Whether to return the state after the last token.
    decay : {"raw", "log"}, default "raw"
        What w is: "raw" the logarithm of the negative log-decay, as models keep it; "log" the log-decay.
    backend : {"auto", "recurrent", "split", "reference"}, default "auto"
        "recurrent" is a CUDA thread for each channel of a row, "split" one for each of several parts of the tokens,
        which are looked at twice; "reference" is plain torch. "auto" takes the reference for tensors that are not on a
        GPU, split where B C threads would leave most of it idle and the tokens make 4 parts of at least 64, else
        recurrent. The choice goes by the batch too: name a backend for results that do not.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v
    final_state : torch.Tensor, shape (B, 3, C), float32, or None
        max is the largest exponent so far. For T = 0 a differentiable copy of the initial state.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        A call that the `backend` cannot do, with what is in its way.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic, state and saved states are float32, with the larger of two exponents taken out: no key and no decay
    overflows. Relative L2 error against float64 on the same rounded inputs, y and gradients: below 1e-5 in float32,
    with keys of 30 times the usual size too; below 3e-3 in float16 and bfloat16, which is the rounding of the outputs.

    The backward recomputes the states forward from saved ones: 12 B C ceil(T / 16) bytes are kept between the passes.
    What it adds up are differences of values from their running mean, so that nothing cancels. dw and du are summed
    over rows and parts in float32. The gradient of max is that of num times num and of den times den, and of the final
    max where it comes from the initial one.

    Results are the same bit for bit from run to run. A second derivative is an error.

    Under `torch.autocast` k and v are cast to its dtype as torch's own ops cast theirs; w and u may stay float32,
    and the state keeps its dtype. Forward-mode derivatives (`torch.func.jvp`, `jacfwd`) are there for CPU tensors
    and backend="reference"; of kernels they are an error. DTensors may be replicated or sharded over the batch or
    the channels.

    The first call with a dtype and decay compiles for this GPU and stores the result on disk. CPU tensors run the
    reference, with one notice.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> k, v = (torch.randn(2, 128, 96, device="cuda") for _ in range(2))
    >>> w, u = torch.linspace(-5, 1, 96, device="cuda"), torch.zeros(96, device="cuda")
    >>> y, state = rwkv_jit.wkv4(w, u, k, v, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 96]), torch.Size([2, 3, 96]))
    """
    if output_final_state is not True and output_final_state is not False:
        output_final_state = check_flag("output_final_state", output_final_state)
    asked = ("wkv4", output_final_state, decay, backend, torch.is_grad_enabled())
    known, training = known_calls.find(asked, _key(w, u, k, v), initial_state, None)
    if known is None:
        if sharding.any_distributed((w, u, k, v, initial_state)):
            return _distributed(w, u, k, v, initial_state, output_final_state, decay, backend)
        cast = _cast(w, u, k, v, initial_state, output_final_state, decay, backend)
        if cast is not None:
            with tensors.exactly(cast[2]):
                return wkv4(*cast)
        w, u, k, v, initial_state = _as_checked("wkv4", w, u, k, v, initial_state, decay, backend)
        is_direct = tensors.is_eager() and tensors.are_plain((w, u, k, v, initial_state))
        if is_direct and _is_for_kernels(backend, k):
            known = _prepare(asked, (w, u, k, v), initial_state, decay, backend, output_final_state, training)
    state = _for_all_rows(initial_state, k)
    if known is None:
        y, final, _ = _forward_op(w, u, k, v, state, decay, backend, output_final_state, False)
        return y, final if output_final_state else None
    if training:
        return _run_known(known, w, u, k, v, state, None)
    results = known.run((w, u, k, v), state, None)
    return results[0], results[1] if output_final_state else None


def wkv4_update(state: Any, w: Any, u: Any, k: Any, v: Any, decay: str = "raw") -> Tensor:
    """RWKV-4 time mixing of one token, which changes the state in place: for decoding.

        y = (num + e^(u + k) v) / (den + e^(u + k));   num <- e^d num + e^k v;   den <- e^d den + e^k

    Parameters
    ----------
    state : torch.Tensor, shape (B, 3, C), float32
        num, den and max, as `wkv4` takes and returns them; begin with 0, 0 and -1e38. It is changed, so it must have
        memory of its own for every element, and an array of another library must be one that torch can write.
    w, u : torch.Tensor, shape (C,), dtype of k or float32
        Decay and bonus.
    k, v : torch.Tensor, shape (B, C), float16, bfloat16 or float32
        Key and value of the token.
    decay : {"raw", "log"}, default "raw"
        Whether the log-decay d is -exp(w) or w.

    Returns
    -------
    y : torch.Tensor, shape (B, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. The state is as it was.
    RuntimeError
        An input wants a gradient, which a state changed in place cannot give: `wkv4` can.

    Notes
    -----
    The kernel, its precision, its first call and what autocast does are those of `wkv4`. No gradient is recorded.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> state = torch.tensor([0.0, 0.0, -1e38], device="cuda").view(1, 3, 1).repeat(2, 1, 96)
    >>> w, u = torch.linspace(-5, 1, 96, device="cuda"), torch.zeros(96, device="cuda")
    >>> y = rwkv_jit.wkv4_update(state, w, u, *torch.randn(2, 2, 96, device="cuda"))
    >>> y.shape
    torch.Size([2, 96])
    """
    asked = ("wkv4_update", decay, torch.is_grad_enabled())
    known, _ = known_calls.find(asked, _key(w, u, k, v), state, None)
    if known is not None:
        return _run_step(known, state, w, u, k, v)
    if sharding.any_distributed((state, w, u, k, v)):
        raise TypeError("state: wkv4_update changes it in place and takes no DTensors; pass to_local() of each")
    cast = _cast(w, u, k, v, decay)
    if cast is not None:
        with tensors.exactly(cast[2]):
            return wkv4_update(state, *cast)
    w, u, k, v, state = _as_checked("wkv4_update", w, u, k, v, state, decay, "auto")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (state, w, u, k, v)):
        raise RuntimeError(f"wkv4_update: {_NO_GRADIENT}")
    if k.is_cuda and tensors.is_eager() and tensors.are_plain((w, u, k, v, state)):
        return _run_step(_prepare_step(asked, state, w, u, k, v, decay), state, w, u, k, v)
    return _step_op(state, w, u, k, v, decay)  # type: ignore[no-any-return]
