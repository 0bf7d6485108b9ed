"""Functions with the names and arguments of those in RWKV-LM, RWKV-PEFT, Albatross and others.

Those are RWKV-CUDA, the `rwkv` package, flash-rwkv and rwkv7-hf.

B is the batch, T the tokens, H the heads, N the head size, and C = H N the channels. Rows and y are (B, T, C) in the
dtype of v, states [V, K], but where a function says otherwise. All tensors have any strides and are float16, bfloat16
or float32.

Each raises TypeError or ValueError where an argument does not fit: the message has its name, what was expected and
what came.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.compat import buffers, rows
from rwkv_jit.compat.naming import named
from rwkv_jit.ops.timex import timex
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7

_F = TypeVar("_F", bound=Callable[..., Any])
_ROWS_OF_RWKV6 = ("r", "k", "v", "w", "u")


def scriptable(function: _F) -> _F:
    """Return a function that TorchScript calls and does not compile.

    TorchScript reads the types of a call from the signature. It does not read types that are strings, and gives no
    defaults to a function that it calls. So one with defaults shows its other arguments without types, and `others`:
    then it takes as many as a script has, and returns a tensor.
    """
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(needed) < len(parameters):
        parameters = [each.replace(annotation=each.empty) for each in needed]
        parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_POSITIONAL))
        signature = inspect.Signature(parameters)
    function.__signature__ = signature  # type: ignore[attr-defined]
    vars(function).pop("__wrapped__", None)  # of which TorchScript would read the signature
    return torch.jit.ignore(function)  # type: ignore[no-any-return]


# ---- RWKV-7 for training -----------------------------------------------------------------------------------------


@scriptable
@named(r="q")
def RUN_CUDA_RWKV7g(
    q: Any, w: Any, k: Any, v: Any, a: Any, b: Any, HEAD_SIZE: int = 64, dot_prec: str = "fp32"
) -> Tensor:
    """Return y of RWKV-7 from no state, as `wkv7` with the decay exp(-exp(w)); q is its r.

    From RWKV-LM and RWKV-PEFT. HEAD_SIZE is any divisor of C. `dot_prec` has no effect: `set_bfloat16_precision` says
    what products are worth.
    """
    return buffers.y_of(wkv7, rows.by_size(HEAD_SIZE, q=q, w=w, k=k, v=v, a=a, b=b)).flatten(2)


@scriptable
def RWKV7_CLAMPW_CUDA(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, HEAD_SIZE: int = 64) -> Tensor:
    """Return y of RWKV-7 from no state, as `wkv7` with decay="sigmoid": w is not clamped yet. From RWKV-LM."""
    inputs = rows.by_size(HEAD_SIZE, r=r, w=w, k=k, v=v, a=a, b=b)
    return buffers.y_of(wkv7, inputs, decay="sigmoid").flatten(2)


@scriptable
def RWKV7_STATE_CLAMPW_CUDA(s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y of `RWKV7_STATE_PASSING_CLAMPW_CUDA`."""
    return RWKV7_STATE_PASSING_CLAMPW_CUDA(s0, r, w, k, v, a, b)[0]


@scriptable
@named(object, initial_state="s0")
def RWKV7_STATE_PASSING_CLAMPW_CUDA(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-7 from s0 (B, H, N, N), as `wkv7` with decay="sigmoid"; w is not clamped yet.

    From RWKV-LM. s0 tells the head size and has a gradient; the last state has its dtype, and gradients go through it.
    """
    s0, inputs = rows.by_state(s0, "s0", r=r, w=w, k=k, v=v, a=a, b=b)
    y, last = buffers.with_final(wkv7, inputs, s0, decay="sigmoid")
    return y.flatten(2), last


# ---- RWKV-7 as RWKV-PEFT calls it --------------------------------------------------------------------------------


@named(initial_state="s")
def RUN_RWKV7_STATE(
    r: Any, k: Any, v: Any, w: Any, a: Any, b: Any, s: Any, HEAD_SIZE: int = 64, dot_prec: str = "fp32"
) -> tuple[Tensor, None]:
    """Return y of RWKV-7 from a state that is trained, as `wkv7` with the decay exp(-exp(w)), and None.

    From RWKV-PEFT, which does not read the last state. s is (H, N, N) or (B, H, N, N): the gradient of one for all
    sequences is their sum. HEAD_SIZE and `dot_prec` as in `RUN_CUDA_RWKV7g`.
    """
    inputs = rows.by_size(HEAD_SIZE, r=r, w=w, k=k, v=v, a=a, b=b)
    return buffers.y_of(wkv7, inputs, s).flatten(2), None


@named(initial_state="s")
def RUN_RWKV7_INFCTX(
    r: Any, k: Any, v: Any, w: Any, a: Any, b: Any, s: Any, HEAD_SIZE: int = 64, dot_prec: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H, N) and the last state, as `wkv7` with the decay exp(-exp(w)) and state_layout="kv".

    From RWKV-PEFT. s is (B, H, N, N) or (H, N, N), [K, V]; the last state is float32, and gradients go through it.
    """
    inputs = rows.by_size(HEAD_SIZE, r=r, w=w, k=k, v=v, a=a, b=b)
    return buffers.with_final(wkv7, inputs, buffers.in_float32(s), state_layout="kv")


class TritonRWKV7:
    """RWKV-7 with the `apply` of a class of the same name in RWKV-PEFT."""

    @staticmethod
    @named(r="q", a="z", initial_state="s0")
    def apply(w: Any, q: Any, k: Any, v: Any, z: Any, b: Any, s0: Any, dot_prec: str) -> tuple[Tensor, Tensor]:
        """Return y and the last state, as `wkv7` with the decay exp(-exp(w)); q is its r and z its a.

        Rows are (B, T, H, N), s0 (B, H, N, N) or (H, N, N); None are zeros in the dtype of w. `dot_prec` has no effect.
        """
        return buffers.with_final(wkv7, [q, w, k, v, z, b], buffers.or_zeros(s0, "w", w))


# ---- RWKV-7 for inference ----------------------------------------------------------------------------------------


@scriptable
def RWKV7_OP(state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y (T, C) of one sequence and move its state (H, N, N) on, as `RWKV7_BATCH_OP`. From Albatross."""
    state = tensors.from_any("state", state, in_place=True)
    return RWKV7_BATCH_OP(state[None], *rows.of_batch_1(r=r, w=w, k=k, v=v, a=a, b=b))[0]


@scriptable
@named(object, initial_state="state")
def RWKV7_BATCH_OP(state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y of RWKV-7 and move the states (B, H, N, N), float32, on, as `wkv7` with the decay exp(-exp(w)).

    From Albatross. The states tell the head size; nothing is recorded for gradients. After an error they are as before.
    """
    state = tensors.from_any("state", state, in_place=True)
    state, inputs = rows.by_state(state, "state", r=r, w=w, k=k, v=v, a=a, b=b)
    y, last = buffers.run(wkv7, inputs, state)
    with torch.no_grad():
        buffers.fill(state, last)
    return y.flatten(2)


# ---- RWKV-6, 5 and 4, and TimeX ----------------------------------------------------------------------------------


@overload
def RUN_CUDA_RWKV6(r: Any, k: Any, v: Any, w: Any, u: Any) -> Tensor: ...
@overload
def RUN_CUDA_RWKV6(B: int, T: int, C: int, H: int, r: Any, k: Any, v: Any, w: Any, u: Any) -> Tensor: ...
@scriptable
def RUN_CUDA_RWKV6(*given: Any, **named: Any) -> Tensor:
    """Return y of RWKV-6 from no state, as `RUN_CUDA_RWKV6_STATE` does.

    The arguments are r, k, v, w and u, as in RWKV-LM, or B, T, C and H before them, as in RWKV-PEFT and RWKV-CUDA.
    """
    names = _ROWS_OF_RWKV6 if len(given) + len(named) == 5 else ("B", "T", "C", "H", *_ROWS_OF_RWKV6)
    by_name = {**dict(zip(names, given, strict=False)), **named}
    if len(given) + len(named) != len(names) or by_name.keys() != set(names):
        raise TypeError(
            "RUN_CUDA_RWKV6: expected r, k, v, w, u or B, T, C, H, r, k, v, w, u, "
            f"got {len(given)} arguments and {', '.join(named) or 'none'} by name"
        )
    r, k, v, w, u = (by_name[name] for name in _ROWS_OF_RWKV6)
    if "B" in by_name:
        B, T, C, H = (by_name[name] for name in names[:4])
        return RUN_CUDA_RWKV6_STATE(B, T, C, H, r, k, v, w, u, None)
    u = tensors.from_any("u", u)
    if u.dim() != 2:
        raise ValueError(f"u: expected shape [H, N], got {list(u.shape)}")
    return buffers.y_of(wkv6, [*rows.by_size(u.shape[1], r=r, k=k, v=v, w=w), u]).flatten(2)


@scriptable
@named(object, initial_state="s")
def RUN_CUDA_RWKV6_STATE(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor | None
) -> Tensor:
    """Return y of RWKV-6 from a state, as `wkv6` with the decay exp(-exp(w)), w as in the model in every dtype.

    From RWKV-PEFT. u is (H, N), s (H, N, N), (B, H, N, N) or None, which are zeros: the gradient of one for all
    sequences is their sum.
    """
    size = rows.head_size(C, H)
    inputs = rows.by_shape((B, T, H, size), r=r, k=k, v=v, w=w)
    return buffers.y_of(wkv6, [*inputs, *rows.by_shape((H, size), u=u)], s).flatten(2)


@scriptable
def RUN_CUDA_RWKV5(B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Return y of RWKV-5 from no state, as `wkv5` with the decay exp(-exp(w)); w and u are (H, N). From RWKV-LM."""
    size = rows.head_size(C, H)
    inputs = rows.by_shape((B, T, H, size), r=r, k=k, v=v)
    return buffers.y_of(wkv5, [*inputs, *rows.by_shape((H, size), w=w, u=u)]).flatten(2)


@scriptable
def RUN_CUDA(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return y of RWKV-4 from no state, as `wkv4` with the log-decay -exp(w); w and u are (C,). From RWKV-LM."""
    return buffers.y_of(wkv4, [*rows.by_shape((C,), w=w, u=u), *rows.by_shape((B, T, C), k=k, v=v)])


class TimeX:
    """The convolution of RWKV-2 and 3 with the `apply` of a class of the same name there. `nn.TimeX` is a module."""

    @staticmethod
    def apply(w: Tensor, k: Tensor, B: int, C: int, T: int, eps: float) -> Tensor:
        """Return what `timex` does: w is (C, T), whose last weight is the current token's, k and out (B, C, T)."""
        (w,), (k,) = rows.by_shape((C, T), w=w), rows.by_shape((B, C, T), k=k)
        return timex(w, k, eps)


# ---- with states that are returned -------------------------------------------------------------------------------


@named(object, r="receptance", k="key", v="value", w="time_decay", u="time_first", initial_state="state")
def rwkv5_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, C) and the last state of RWKV-5, as `wkv5` with the decay exp(-exp(w)); w, u (H, N) or (C,).

    From flash-rwkv. The state (B, H, N, N) tells the head size and stays as it is; the last one has its dtype.
    Gradients go through it and to every argument.
    """
    state, inputs = rows.by_state(state, "state", receptance=receptance, key=key, value=value)
    by_head = rows.by_shape(tuple(state.shape[1:3]), time_decay=time_decay, time_first=time_first)
    out, last = buffers.with_final(wkv5, [*inputs, *by_head], state)
    return out.flatten(2), last


@named(object, r="receptance", k="key", v="value", w="time_decay", u="time_first", initial_state="state")
def rwkv6_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H, N) and the last state of RWKV-6, as `wkv6` with the decay exp(-exp(w)); u (C,) or (H, N).

    From flash-rwkv, as `rwkv5_cuda_linear_attention`; time_decay is (B, T, C).
    """
    state, inputs = rows.by_state(state, "state", receptance=receptance, key=key, value=value, time_decay=time_decay)
    by_head = rows.by_shape(tuple(state.shape[1:3]), time_first=time_first)
    return buffers.with_final(wkv6, [*inputs, *by_head], state)


@named(r="receptance", w="decay", k="key", v="value")
def rwkv7_recurrent(
    receptance: Tensor, decay: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, initial_state: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the last state of RWKV-7, as `wkv7` with decay="direct" and state_layout="kv"; decay is its w.

    From rwkv7-hf, for rows (B, T, H, N). Where `attention_mask` (B, T) is false or 0, y is 0 and the state stays as it
    is, whatever the token holds; no gradients go there. They go to every other argument, and through the last state,
    which has the dtype of the initial one.
    """
    if attention_mask is not None:
        if attention_mask.shape != receptance.shape[:2]:
            raise ValueError(
                f"attention_mask: expected shape {list(receptance.shape[:2])} like receptance, "
                f"got {list(attention_mask.shape)}"
            )
        is_read = attention_mask.to(receptance.device, torch.bool)[:, :, None, None]
        decay = torch.where(is_read, decay, torch.ones_like(decay))
        receptance, key, value, a, b = (
            torch.where(is_read, x, torch.zeros_like(x)) for x in (receptance, key, value, a, b)
        )
    inputs = (receptance, decay, key, value, a, b)
    return buffers.with_final(wkv7, inputs, initial_state, decay="direct", state_layout="kv")
