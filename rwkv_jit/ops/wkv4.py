"""RWKV-4 time mixing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rwkv_jit import stats, tensors
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.ops import boundary, wkv4_walk
from rwkv_jit.reference import wkv4_ref
from rwkv_jit.signatures import BySignature

DECAYS = ("raw", "log")
BACKENDS = ("auto", "recurrent", "split", "reference")

# ---- the torch op ------------------------------------------------------------------------------------------------

_reference: Callable[..., Any] = wkv4_ref
_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")
_GIVEN = "Tensor w, Tensor u, Tensor k, Tensor v, Tensor? initial_state, str decay, str backend"
_LIBRARY.define(f"wkv4_fwd({_GIVEN}, bool output_final_state, bool save) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"wkv4_bwd(Tensor? dy, Tensor? grad_final, {_GIVEN}, Tensor saved) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("wkv4_step(Tensor(a!) state, Tensor w, Tensor u, Tensor k, Tensor v, str decay) -> Tensor")


def _is_for_kernels(backend: str, like: Tensor) -> bool:
    """Return whether kernels run a call: CUDA tensors take them, all others plain torch."""
    return backend != "reference" and like.is_cuda


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
        y, final, saved = wkv4_walk.forward(w, u, k, v, state, decay, backend, output_final_state, save)
        return y, _present(final, y), _present(saved, y)
    _say_reference(k)
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
    if save and _is_for_kernels(backend, k):
        chunks = (tokens + wkv4_walk.CHUNK_LEN - 1) // wkv4_walk.CHUNK_LEN
        saved = v.new_empty((batch, chunks, 3, channels), dtype=torch.float32)
    return y, final, saved


def _backward(
    dy: Tensor | None, grad_final: Tensor | None, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None,
    decay: str, backend: str, saved: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    if _is_for_kernels(backend, k):
        *of_inputs, of_state = wkv4_walk.backward(dy, grad_final, w, u, k, v, state, decay, backend, saved)
        return (*of_inputs, _present(of_state, k))
    with torch.enable_grad(), boundary.autograd_dispatch():
        leaves = [None if x is None else x.detach().requires_grad_() for x in (w, u, k, v, state)]
        outputs: Any = _reference(*leaves, True, decay)
        pairs = [(x, grad) for x, grad in zip(outputs, (dy, grad_final), strict=True) if grad is not None]
        wanted = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(
            [x for x, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True, materialize_grads=True
        )
    # An op's results own their memory, in the layout its fake promises.
    owned = tuple(grad.detach().clone(memory_format=torch.contiguous_format) for grad in grads)
    return owned if state is not None else (*owned, k.new_empty(0))


def _backward_fake(
    dy: Tensor | None, grad_final: Tensor | None, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (w, u, k, v)]
    of_state = k.new_empty(0) if state is None else torch.empty_like(state, memory_format=torch.contiguous_format)
    return (*grads, of_state)


def _step(state: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, decay: str) -> Tensor:
    k, v = k.unsqueeze(1), v.unsqueeze(1)
    if k.is_cuda:
        in_place = state.is_contiguous()
        y, final, _ = wkv4_walk.forward(w, u, k, v, state, decay, "recurrent", True, False, state if in_place else None)
        if not in_place:
            state.copy_(final)  # type: ignore[arg-type]
    else:
        _say_reference(k)
        y, final = wkv4_ref(w, u, k, v, state, True, decay)
        state.copy_(final)  # type: ignore[arg-type]
    return y.squeeze(1)


def _step_fake(state: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, decay: str) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


for _name, _run, _fake in (
    ("wkv4_fwd", _forward, _forward_fake),
    ("wkv4_bwd", _backward, _backward_fake),
    ("wkv4_step", _step, _step_fake),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"rwkv_jit::{_name}", _fake, lib=_LIBRARY)
_forward_op, _backward_op, _step_op = (
    getattr(torch.ops.rwkv_jit, name).default for name in ("wkv4_fwd", "wkv4_bwd", "wkv4_step")
)


class _Gradient(torch.autograd.Function):
    """The backward as a function of its own, so that a second derivative is a clear error and not a wrong zero."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_backward_op(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("wkv4 has no second derivative; differentiate wkv4_ref twice instead")


class _Differentiable(torch.autograd.Function):
    """The op with gradients; `direct` calls leave out torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, direct: bool, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None, decay: str,
        backend: str, output_final_state: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run = _forward if direct else _forward_op
        y, final, saved = run(w, u, k, v, state, decay, backend, output_final_state, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(w, u, k, v, state, saved)
        ctx.options = (decay, backend)
        ctx.has_final_state = output_final_state
        if not output_final_state:
            ctx.mark_non_differentiable(final)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
        *given, saved = ctx.saved_tensors
        # A compiled graph passes zeros for a result that has no gradient, here for the empty final state.
        grad_final = grad_final if ctx.has_final_state else None
        run = _Gradient.apply if torch.is_grad_enabled() else _backward_op
        *grads, grad_state = run(dy, grad_final, *given, *ctx.options, saved)
        return None, *grads, None if given[4] is None else grad_state, None, None, None


_differentiable: Callable[..., tuple[Tensor, Tensor]] = _Differentiable.apply


# ---- the public calls --------------------------------------------------------------------------------------------

_checked: BySignature[None] = BySignature()  # those of calls that have passed all checks


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
        if value not in legal:
            raise ValueError(f"{option}: expected one of {', '.join(legal)}, got {value!r}")
    on_gpu = tensors.is_eager() and isinstance(k, Tensor) and _is_for_kernels(backend, k)
    signature = tensors.signature((w, u, k, v, state)) if on_gpu else None
    key = (name, backend, signature)
    if signature is not None and key in _checked:
        return w, u, k, v, state
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
        state = tensors.from_any(n, state)
        want = (k.shape[0], 3, channels)
        shapes = [want, want[1:]] if name == "wkv4" else [want]
        if tuple(state.shape) not in shapes:
            raise ValueError(f"{n}: expected shape {' or '.join(str([*s]) for s in shapes)}, got {list(state.shape)}")
        if state.dtype != torch.float32 and (state.dtype not in dtypes[3:]):
            raise TypeError(f"{n}: expected torch.float32{' or torch.float64' * len(dtypes[3:])}, got {state.dtype}")
    for n, x in (("w", w), ("u", u), ("v", v), ("initial_state" if name == "wkv4" else "state", state)):
        if x is not None and x.device != k.device:
            raise ValueError(f"{n}: expected device {k.device} like k, got {x.device}")
    if signature is not None:
        _checked.keep(key, None)
    return w, u, k, v, state


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
    w, u, k, v, state = _as_checked("wkv4", w, u, k, v, initial_state, decay, backend)
    if state is not None and state.dim() == 2:
        state = state.expand(k.shape[0], *state.shape)
    output_final_state = bool(output_final_state)
    direct = _is_for_kernels(backend, k) and tensors.is_eager() and tensors.are_plain((w, u, k, v, state))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (w, u, k, v, state)):
        y, final = _differentiable(direct, w, u, k, v, state, decay, backend, output_final_state)
    else:
        run = _forward if direct else _forward_op
        y, final, _ = run(w, u, k, v, state, decay, backend, output_final_state, False)
    return y, final if output_final_state else None


def wkv4_update(state: Any, w: Any, u: Any, k: Any, v: Any, decay: str = "raw") -> Tensor:
    """RWKV-4 time mixing of one token, which changes the state in place: for decoding.

        y = (num + e^(u + k) v) / (den + e^(u + k));   num <- e^d num + e^k v;   den <- e^d den + e^k

    Parameters
    ----------
    state : torch.Tensor, shape (B, 3, C), float32
        num, den and max, as `wkv4` takes and returns them; begin with 0, 0 and -1e38. It is changed.
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
    The kernel, its precision and its first call are those of `wkv4`. No gradient is recorded.

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
    w, u, k, v, state = _as_checked("wkv4_update", w, u, k, v, state, decay, "auto")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (state, w, u, k, v)):
        raise RuntimeError("wkv4_update: changes the state in place and has no gradient; use wkv4, or torch.no_grad()")
    direct = k.is_cuda and tensors.is_eager() and tensors.are_plain((w, u, k, v, state))
    y: Tensor = (_step if direct else _step_op)(state, w, u, k, v, decay)
    return y
