"""Functions with the names and arguments of those in RWKV-LM, RWKV-CUDA, the `rwkv` package, Albatross and RWKV-PEFT.

B is the batch, T the tokens, H the heads, N the head size, and C = H N the channels. All tensors have any strides and
are float16, bfloat16 or float32; states are [V, K], as in all of these projects but where a function says otherwise.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.compat import buffers, rows
from rwkv_jit.compat.naming import named
from rwkv_jit.compat.scripts import scriptable
from rwkv_jit.ops.timex import timex
from rwkv_jit.ops.wkv4 import wkv4
from rwkv_jit.ops.wkv5 import wkv5
from rwkv_jit.ops.wkv6 import wkv6
from rwkv_jit.ops.wkv7 import wkv7

_ROWS_OF_RWKV6 = ("r", "k", "v", "w", "u")

# ---- RWKV-7 for training -----------------------------------------------------------------------------------------


@scriptable
def RUN_CUDA_RWKV7g(
    q: Any, w: Any, k: Any, v: Any, a: Any, b: Any, HEAD_SIZE: int = 64, dot_prec: str = "fp32"
) -> Tensor:
    """Return y of RWKV-7 from no state, as `wkv7` with the decay exp(-exp(w)).

    Parameters
    ----------
    q, w, k, v, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, q for its r, in rows of channels.
    HEAD_SIZE : int, default 64
        N, any divisor of C.
    dot_prec : str, default "fp32"
        Taken for the sake of RWKV-PEFT, and of no effect: `set_bfloat16_precision` says what products are worth.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    return buffers.y_of(wkv7, rows.by_size(HEAD_SIZE, q=q, w=w, k=k, v=v, a=a, b=b)).flatten(2)


@scriptable
def RWKV7_CLAMPW_CUDA(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, HEAD_SIZE: int = 64) -> Tensor:
    """Return y of RWKV-7 from no state, as `wkv7` with decay="sigmoid".

    Parameters
    ----------
    r, w, k, v, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, in rows of channels; w is not clamped yet.
    HEAD_SIZE : int, default 64
        N, any divisor of C. The trainer has 64 in its text.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    inputs = rows.by_size(HEAD_SIZE, r=r, w=w, k=k, v=v, a=a, b=b)
    return buffers.y_of(wkv7, inputs, decay="sigmoid").flatten(2)


@scriptable
def RWKV7_STATE_CLAMPW_CUDA(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> Tensor:  # fmt: skip
    """Return y of RWKV-7 from a state, as `wkv7` with decay="sigmoid".

    Parameters
    ----------
    s0 : torch.Tensor, shape (B, H, N, N)
        State before the first token, of which there are gradients too. It tells the head size.
    r, w, k, v, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, in rows of channels; w is not clamped yet.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    return RWKV7_STATE_PASSING_CLAMPW_CUDA(s0, r, w, k, v, a, b)[0]


@scriptable
def RWKV7_STATE_PASSING_CLAMPW_CUDA(
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-7 from a state, as `wkv7` with decay="sigmoid".

    Parameters
    ----------
    s0, r, w, k, v, a, b : torch.Tensor
        As in `RWKV7_STATE_CLAMPW_CUDA`.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v
    sT : torch.Tensor, shape (B, H, N, N), dtype of s0
        State after the last token; gradients go through it.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
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

    Parameters
    ----------
    r, k, v, w, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, in rows of channels. The order is another one.
    s : torch.Tensor, shape (H, N, N) or (B, H, N, N)
        State before the first token. The gradient of one for all sequences is their sum.
    HEAD_SIZE : int, default 64
        N, any divisor of C.
    dot_prec : str, default "fp32"
        As in `RUN_CUDA_RWKV7g`.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v
    None
        For the last state, which a caller that trains states does not read.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    inputs = rows.by_size(HEAD_SIZE, r=r, w=w, k=k, v=v, a=a, b=b)
    return buffers.y_of(wkv7, inputs, s).flatten(2), None


@named(initial_state="s")
def RUN_RWKV7_INFCTX(
    r: Any, k: Any, v: Any, w: Any, a: Any, b: Any, s: Any, HEAD_SIZE: int = 64, dot_prec: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of RWKV-7, as `wkv7` with the decay exp(-exp(w)) and state_layout="kv".

    Parameters
    ----------
    r, k, v, w, a, b, HEAD_SIZE, dot_prec
        As in `RUN_RWKV7_STATE`.
    s : torch.Tensor, shape (B, H, N, N) or (H, N, N)
        State before the first token, [K, V].

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, N), dtype of v
    state : torch.Tensor, shape (B, H, N, N), float32
        State after the last token, [K, V]; gradients go through it.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    inputs = rows.by_size(HEAD_SIZE, r=r, w=w, k=k, v=v, a=a, b=b)
    return buffers.with_final(wkv7, inputs, buffers.in_float32(s), state_layout="kv")


class TritonRWKV7:
    """RWKV-7 with the `apply` of a class of the same name in RWKV-PEFT."""

    @staticmethod
    @named(r="q", a="z", initial_state="s0")
    def apply(w: Any, q: Any, k: Any, v: Any, z: Any, b: Any, s0: Any, dot_prec: str) -> tuple[Tensor, Tensor]:
        """Return y and the last state, as `wkv7` with the decay exp(-exp(w)).

        Parameters
        ----------
        w, q, k, v, z, b : torch.Tensor, shape (B, T, H, N)
            As `wkv7` takes them: w comes first, q is its r and z its a.
        s0 : torch.Tensor, shape (B, H, N, N) or (H, N, N), or None
            State before the first token; zeros in the dtype of w for None.
        dot_prec : str
            As in `RUN_CUDA_RWKV7g`.

        Returns
        -------
        y : torch.Tensor, shape (B, T, H, N), dtype of v
        sT : torch.Tensor, shape (B, H, N, N), dtype of s0

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the message has its name, what was expected and what came.
        """
        return buffers.with_final(wkv7, [q, w, k, v, z, b], buffers.or_zeros(s0, w))


# ---- RWKV-7 for inference ----------------------------------------------------------------------------------------


@scriptable
def RWKV7_OP(state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y of one sequence of RWKV-7 and move its state on, as `wkv7` with the decay exp(-exp(w)).

    Parameters
    ----------
    state : torch.Tensor, shape (H, N, N), float32
        State before the first token, and then after the last. It tells the head size.
    r, w, k, v, a, b : torch.Tensor, shape (T, C)
        As `wkv7` takes them, in rows of channels.

    Returns
    -------
    y : torch.Tensor, shape (T, C), dtype of v
        Nothing is recorded for gradients.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The state is as it was.
    """
    return RWKV7_BATCH_OP(state[None], r[None], w[None], k[None], v[None], a[None], b[None])[0]


@scriptable
def RWKV7_BATCH_OP(state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y of sequences of RWKV-7 and move their states on, as `wkv7` with the decay exp(-exp(w)).

    Parameters
    ----------
    state : torch.Tensor, shape (B, H, N, N), float32
        States before the first token, and then after the last. They tell the head size.
    r, w, k, v, a, b : torch.Tensor, shape (B, T, C)
        As `wkv7` takes them, in rows of channels.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v
        Nothing is recorded for gradients.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The states are as they
        were.
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
    """Return y of RWKV-6 from no state, as `wkv6` with the decay exp(-exp(w)).

    Parameters
    ----------
    *given, **named
        r, k, v, w and u, as in RWKV-LM, or B, T, C and H before them, as in RWKV-PEFT and RWKV-CUDA. All is as in
        `RUN_CUDA_RWKV6_STATE`.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
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
    if u.dim() != 2:
        raise ValueError(f"u: expected shape [H, N], got {list(u.shape)}")
    return buffers.y_of(wkv6, [*rows.by_size(u.shape[1], r=r, k=k, v=v, w=w), u]).flatten(2)


@scriptable
def RUN_CUDA_RWKV6_STATE(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor | None
) -> Tensor:
    """Return y of RWKV-6 from a state, as `wkv6` with the decay exp(-exp(w)).

    Parameters
    ----------
    B, T, C, H : int
        The sizes of r and of u.
    r, k, v, w : torch.Tensor, shape (B, T, C)
        As `wkv6` takes them, in rows of channels. w is as in the model, in every dtype.
    u : torch.Tensor, shape (H, N)
        Bonus of the current token.
    s : torch.Tensor, shape (H, N, N) or (B, H, N, N), or None
        State before the first token; zeros for None. The gradient of one for all sequences is their sum.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    size = rows.head_size(C, H)
    inputs = rows.by_shape((B, T, H, size), r=r, k=k, v=v, w=w)
    return buffers.y_of(wkv6, [*inputs, *rows.by_shape((H, size), u=u)], s).flatten(2)


@scriptable
def RUN_CUDA_RWKV5(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor
) -> Tensor:  # fmt: skip
    """Return y of RWKV-5 from no state, as `wkv5` with the decay exp(-exp(w)).

    Parameters
    ----------
    B, T, C, H : int
        The sizes of r and of u.
    r, k, v : torch.Tensor, shape (B, T, C)
        As `wkv5` takes them, in rows of channels.
    w, u : torch.Tensor, shape (H, N)
        Decay as in the model, and bonus of the current token.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    size = rows.head_size(C, H)
    inputs = rows.by_shape((B, T, H, size), r=r, k=k, v=v)
    return buffers.y_of(wkv5, [*inputs, *rows.by_shape((H, size), w=w, u=u)]).flatten(2)


@scriptable
def RUN_CUDA(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return y of RWKV-4 from no state, as `wkv4` with the log-decay -exp(w).

    Parameters
    ----------
    B, T, C : int
        The sizes of k.
    w, u : torch.Tensor, shape (C,)
        Decay as in the model, and bonus of the current token.
    k, v : torch.Tensor, shape (B, T, C)
        Key and value.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.
    """
    return buffers.y_of(wkv4, [*rows.by_shape((C,), w=w, u=u), *rows.by_shape((B, T, C), k=k, v=v)])


class TimeX:
    """The convolution of RWKV-2 and 3 with the `apply` of a class of the same name there. `nn.TimeX` is a module."""

    @staticmethod
    def apply(w: Tensor, k: Tensor, B: int, C: int, T: int, eps: float) -> Tensor:
        """Return what `timex` does.

        Parameters
        ----------
        w : torch.Tensor, shape (C, T)
            Filter of every channel; the weight of the current token is the last.
        k : torch.Tensor, shape (B, C, T)
            What is added up.
        B, C, T : int
            The sizes of k.
        eps : float
            Added to every result.

        Returns
        -------
        out : torch.Tensor, shape (B, C, T)

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the message has its name, what was expected and what came.
        """
        (w,), (k,) = rows.by_shape((C, T), w=w), rows.by_shape((B, C, T), k=k)
        return timex(w, k, eps)
