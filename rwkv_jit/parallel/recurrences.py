"""The recurrences over sequences that many processes share, each with a part of every one.

A process finds what its part does to any state, S -> S P + Q. One exchange brings all to every process, which joins
those before its part to the state at its start. Gradients pass backwards in the same manner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import checks, switches, tensors, torch_op
from rwkv_jit.call.options import complete
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.parallel import paused
from rwkv_jit.parallel import shard as shards
from rwkv_jit.parallel import shards as parts
from rwkv_jit.parallel.paused import Call, Way
from rwkv_jit.parallel.shard import Shard
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import OPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import CallOptions, DecayOptions


class _Prepared(NamedTuple):
    """What the first call of a signature works out for every later one."""

    call: Call
    way: Way | None  # of a part of one text


_prepared: BySignature[_Prepared] = BySignature()


def _run(
    name: str, arrays: Sequence[Any], shard: Any, initial_state: Any, output_final_state: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    op, shard = OPS[name], shards.of(shard)
    cast = torch_op.under_autocast(op, arrays)
    if cast is not None:
        with tensors.exactly(cast[0]):
            return _run(name, cast, shard, initial_state, output_final_state, options)
    records = torch.is_grad_enabled()
    wants = tuple([records and getattr(x, "requires_grad", False) for x in (*arrays, initial_state)])
    asked = name, tuple(options.items()), output_final_state, switches.current(), wants, shard.texts
    key = (*asked, tensors.signature((*arrays, initial_state)))
    try:
        prepared = _prepared.get(key) if key[-1] is not None else None
    except TypeError:  # an option that cannot be one and has no hash
        prepared = None
    inputs = arrays
    if prepared is None:
        inputs, initial_state, prepared = _prepare(op, arrays, shard, initial_state, output_final_state, options, wants)
        if key[-1] is not None and all(x is y for x, y in zip(inputs, arrays, strict=True)):
            _prepared.keep(key, prepared)
    shard.check(op.public_names[op.lead], inputs[op.lead])
    call, way = prepared
    sizes = ", ".join(f"{dim} {size}" for dim, size in torch_op.sizes_of(op, inputs).items() if dim != "T")
    said = f"{name} of {inputs[op.lead].dtype} with {sizes}, scale {call.tail.scale}, decay {call.tail.decay}"
    shard.agree(said, inputs[op.lead].device)
    is_turned = call.tail.state_layout == "kv"
    initial = initial_state
    if initial is not None:
        wide = torch.promote_types(inputs[op.lead].dtype, torch.float32)
        initial = (initial.mT if is_turned else initial).to(wide)
        if initial.dim() == len(op.state):
            initial = initial.expand(inputs[op.lead].shape[0] if shard.bounds is None else shard.texts, *initial.shape)
    if way is not None:
        y, final = parts.of_one_text(way, shard, initial, inputs)
    else:
        y, final = parts.of_texts(call, shard, wants, initial, inputs)
    if not output_final_state:
        return y, None
    final = final.mT if is_turned else final
    return y, final if initial_state is None else final.to(initial_state.dtype)


def _prepare(
    op: Op, arrays: Sequence[Any], shard: Shard, initial_state: Any, output_final_state: Any, options: dict[str, Any],
    wants: tuple[bool, ...],
) -> tuple[list[Tensor], Tensor | None, _Prepared]:  # fmt: skip
    """Check a call, and return its arrays as tensors and what is prepared for it."""
    inputs, call = _checked(op, arrays, options)
    checks.check_flag("output_final_state", output_final_state)
    lead, tail = inputs[op.lead], call.tail
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        like = call.states(inputs, lead.shape[0] if shard.bounds is None else shard.texts)
        shape = tuple(like.mT.shape if tail.state_layout == "kv" else like.shape)
        wide = not checks.is_for_kernels(tail.backend, lead)
        checks.check_state(op, "initial_state", initial_state, (shape, shape[1:]), lead, wide)
    way = paused.way_of(call, inputs, wants) if shard.texts == 1 else None
    return inputs, initial_state, _Prepared(call, way)


def _checked(op: Op, arrays: Sequence[Any], options: dict[str, Any]) -> tuple[list[Tensor], Call]:
    """Check the inputs and the options of a call, and return the inputs as tensors, and the call."""
    tail = complete(op, options, arrays[0], "parallel.")
    checks.check_options(op, *tail)
    inputs, _, _ = checks.check_tensors(op, arrays, None, None, tail.state_layout, tail.backend)
    return inputs, Call(op, tail)


# Compilers do not see messages.
_shared: Callable[..., tuple[Tensor, Tensor | None]] = torch.compiler.disable(_run)


def summary(op: str, *inputs: Any, **options: Any) -> Tensor:
    r"""Return what tokens do to any state: S -> S P + Q, per sequence and head.

    B is the batch, H the heads, K and V the head sizes of keys and values.

    Parameters
    ----------
    op, *inputs, **options
        "wkv5", "wkv6", "wkv7", "gla" or "linear_attention", and what `rwkv_jit`'s function of this name takes, without
        gradients. Summaries are [V, K] whatever `state_layout` is.

    Returns
    -------
    torch.Tensor, shape (B, H, V + K, K), float32
        The rows of Q, and behind them those of P; float64 for inputs in float64. `merge` puts a state through it, and
        `compose` joins it to others.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.

    Examples
    --------
    >>> inputs = [torch.randn(2, 128, 4, 64, device="cuda") * 0.2 for _ in range(6)]
    >>> rwkv_jit.parallel.summary("wkv7", *inputs).shape
    torch.Size([2, 4, 128, 64])
    """
    names = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
    checks.check_name("op", op, names)
    made = OPS[op]
    if len(inputs) != len(made.inputs):
        raise TypeError(f"inputs: expected {', '.join(made.public_names)} of {op}, got {len(inputs)} of them")
    given, call = _checked(made, inputs, options)
    way = paused.way_of(call, given, [False] * (len(given) + 1))
    with torch.no_grad():
        bias, transition = way.summary([x.detach() for x in given])
    if transition.shape[-2] != transition.shape[-1]:
        transition = torch.diag_embed(transition.squeeze(-2))
    return torch.cat([bias, transition], -2)


def wkv7(
    r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-7 time mixing over sequences that many processes share, with gradients.

        sa_t = S_{t-1} a_t;   S_t = S_{t-1} diag(d(w_t)) + sa_t b_t^T + v_t k_t^T;   y_t = scale S_t r_t

    per head, with S [V, K]. B is the batch, T the tokens of this process's part, H the heads, K and V the head sizes of
    keys and values, N the sequences that have tokens here: B, or the packed sequences of this part.

    Parameters
    ----------
    r, w, k, v, a, b : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v
        This part of the inputs of `rwkv_jit.wkv7`, with the same dtypes, strides and meanings.
    shard : Shard, ProcessGroup or DeviceMesh
        Which part it is, and whether sequences are packed.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token of each sequence; zeros by default. Where a sequence began in another part, this
        state does not count and has no gradient.
    output_final_state : bool, default False
        Whether to return the states.
    **options
        By name, as `rwkv_jit.wkv7` takes them.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, V, K), or None
        State after the last token of each sequence in this part.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As `rwkv_jit.wkv7`, and where an argument does not fit the shard. Nothing has been sent.

    Notes
    -----
    All processes of the group call it, forwards and backwards, in the same order with other calls of theirs: each
    direction has one all-gather. A process tells the others N H (V + K) K numbers in the forward and N H V K in the
    backward. The part at whose begin all sequences begin does not wait for the forward's, the last one not for the
    backward's.

    A part of one sequence, or of a batch, runs once where `rwkv_jit.wkv7` takes the tensor cores for heads that a block
    holds and T is a multiple of 64. Its kernels find what the part does to any state, wait, and go on. Other parts of
    one sequence run three times in the forward, and twice in the backward. A part with the end of a sequence and the
    beginning of another runs once: what begins there first, and the rest when its state is there.

    Numbers that are exchanged are float32, and joined in float64. `torch.compile` leaves the call out of its graphs.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456. That parts of a sequence are
    joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv7(r, w, k, v, a, b, shard)  # of this process's tokens
    """
    return _shared("wkv7", (r, w, k, v, a, b), shard, initial_state, output_final_state, dict(options))


def wkv6(
    r: Array, k: Array, v: Array, w: Array, u: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-6 time mixing over sequences that many processes share, with gradients.

        y_t = scale (S_{t-1} + v_t (u k_t)^T) r_t;   S_t = S_{t-1} diag(d(w_t)) + v_t k_t^T        per head, S [V, K]

    Parameters
    ----------
    r, k, v, w, u : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v, (H, K) of u
        This part of the inputs of `rwkv_jit.wkv6`. u is the same in every process; its gradient is that of this part:
        the sum over the processes is the whole.
    shard, initial_state, output_final_state, **options
        As `rwkv_jit.parallel.wkv7` takes them, which says what is exchanged, and `rwkv_jit.wkv6`.

    Returns
    -------
    y, final_state : as `rwkv_jit.parallel.wkv7` returns them

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As there.

    Examples
    --------
    >>> y, _ = rwkv_jit.parallel.wkv6(r, k, v, w, u, shard)
    """
    return _shared("wkv6", (r, k, v, w, u), shard, initial_state, output_final_state, dict(options))


def wkv5(
    r: Array, k: Array, v: Array, w: Array, u: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-5 time mixing over sequences that many processes share, with gradients.

        y_t = scale (S_{t-1} + v_t (u k_t)^T) r_t;   S_t = S_{t-1} diag(d(w)) + v_t k_t^T        per head, S [V, K]

    Parameters
    ----------
    r, k, v, w, u : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v, (H, K) of w and u
        This part of the inputs of `rwkv_jit.wkv5`. w and u are the same in every process; their gradients are those of
        this part, as that of u in `rwkv_jit.parallel.wkv6`.
    shard, initial_state, output_final_state, **options
        As `rwkv_jit.parallel.wkv7` takes them, which says what is exchanged, and `rwkv_jit.wkv5`.

    Returns
    -------
    y, final_state : as `rwkv_jit.parallel.wkv7` returns them

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As there.

    Examples
    --------
    >>> y, _ = rwkv_jit.parallel.wkv5(r, k, v, w, u, shard)
    """
    return _shared("wkv5", (r, k, v, w, u), shard, initial_state, output_final_state, dict(options))


def gla(
    q: Array, k: Array, v: Array, g: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Gated linear attention over sequences that many processes share, with gradients.

        S_t = S_{t-1} diag(d(g_t)) + v_t k_t^T;   y_t = scale S_t q_t        per head, S [V, K]

    Parameters
    ----------
    q, k, v, g : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v
        This part of the inputs of `rwkv_jit.gla`.
    shard, initial_state, output_final_state, **options
        As `rwkv_jit.parallel.wkv7` takes them, which says what is exchanged, and `rwkv_jit.gla`; states are [K, V] by
        default.

    Returns
    -------
    y, final_state : as `rwkv_jit.parallel.wkv7` returns them

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As there.

    Examples
    --------
    >>> y, _ = rwkv_jit.parallel.gla(q, k, v, g, shard)
    """
    return _shared("gla", (q, k, v, g), shard, initial_state, output_final_state, dict(options))


def linear_attention(
    q: Array, k: Array, v: Array, shard: Shard, initial_state: Array | None = None,
    output_final_state: bool = False, **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Linear attention over sequences that many processes share, with gradients.

        S_t = S_{t-1} + v_t k_t^T;   y_t = scale S_t q_t        per head, S [V, K]

    Parameters
    ----------
    q, k, v : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v
        This part of the inputs of `rwkv_jit.linear_attention`.
    shard, initial_state, output_final_state, **options
        As `rwkv_jit.parallel.gla` takes them, and `rwkv_jit.linear_attention`, without `normalize`.

    Returns
    -------
    y, final_state : as `rwkv_jit.parallel.wkv7` returns them

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError
        As there.

    Examples
    --------
    >>> y, _ = rwkv_jit.parallel.linear_attention(q, k, v, shard)
    """
    return _shared("linear_attention", (q, k, v), shard, initial_state, output_final_state, dict(options))
