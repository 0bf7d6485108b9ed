"""How time and channel mixing begin in inference: a sum, its norm and mixes with the token before, from a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import layers
from rwkv_jit.schedules.layer_table import MOST_MIXES, OPS
from rwkv_jit.schedules.layers import Sequences


def shift_mix(
    x: Array, weight: Array, bias: Array, mixes: Array, shift: Array, *, add: Array | None = None,
    state_indices: Array | None = None, cu_seqlens: Array | None = None, has_initial_state: Array | None = None,
    null_index: int = -1, num_active: Array | None = None, eps: float = 1e-5, out: Array | None = None,
    **_unknown: NoReturn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Add to the residual, normalize it, and mix every token with the previous one: how time and channel mixing begin.

        z_t = x_t + add_t;   n_t = (z_t - mean) / sqrt(variance + eps) weight + bias
        mixed_m = n_t + (n_{t-1} - n_t) mixes_m

    with the mean and the variance over the channels. The n before a sequence is read from a pool, and replaced by that
    of its last token. C is the channels, B the rows, T the tokens, M the mixes.

    Parameters
    ----------
    x : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        The residual.
    weight, bias : torch.Tensor, shape (C,), dtype of x or float32
        Of the layer norm.
    mixes : torch.Tensor, shape (M, C) with M up to 6, or (C,), dtype of x or float32
        The share of the previous token in each mix: x_r, x_w, x_k, x_v, x_a and x_g in any order, or x_k.
    shift : torch.Tensor, shape (slots, C), float16, bfloat16 or float32
        The pool of the last tokens, which changes in place. A slot has no gaps; between slots there may be some.
    add : torch.Tensor, shape and dtype of x, optional
        Added to the residual first, such as the previous branch.
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Bounds of N sequences in x, which is then [T, C] or [1, T, C]; `state_indices` has N. Tokens after the last
        sequence count as sequences without a slot.
    has_initial_state : torch.Tensor, shape (B,) or (N,), bool or uint8, optional
        If false, the row or sequence begins as with zeros in the pool, whatever its slot holds; its last token is still
        written there. Without it all begin with their slots.
    null_index : int, default -1
        A row with this slot, one below or one beyond the pool is padding: it begins as with zeros, and no slot is read
        or written.
    num_active : torch.Tensor of one int32, optional
        How many rows or sequences are computed, so that a CUDA graph serves any number: later ones get zeros, and no
        slot of theirs is read or written.
    eps : float, default 1e-05
        Of the layer norm.
    out : torch.Tensor, shape and dtype of the mixed tokens, optional
        Memory for these, without gaps; that of x or add costs a copy.

    Returns
    -------
    residual : torch.Tensor, shape and dtype of x
        z; x itself without `add`.
    mixed : torch.Tensor, shape (M, *x.shape), or that of x for mixes of shape (C,), dtype of x
        `out`, if passed.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. The pool is as it was.
    RuntimeError, RwkvJitError
        An input needs a gradient, which `token_shift` has. Or the first call of its kind is inside the capture of a
        CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are, and z is rounded only where it is written. Relative L2 error against
    float64 on the same inputs: below 5e-6, and that of rounding to 16 bits. n of the token before is rounded as the
    pool has it within a call too, so that a sequence may be cut into calls anywhere. A row's result does not depend on
    the others.

    The first call with new C, M, dtypes and addresses compiles for this GPU and stores the result on disk. On a GPU the
    values of slots and of `cu_seqlens` are checked with RWKVJIT_CHECK=1 alone; kernels touch no other memory whatever
    they are. CPU tensors run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool, x = torch.zeros(16, 256, device="cuda"), torch.randn(3, 256, device="cuda")
    >>> weight, bias, mixes = torch.randn(8, 256, device="cuda").split([1, 1, 6])
    >>> residual, mixed = rwkv_jit.shift_mix(x, weight[0], bias[0], mixes, pool, add=x)
    >>> residual.shape, mixed.shape
    (torch.Size([3, 256]), torch.Size([6, 3, 256]))
    """
    if _unknown:
        raise unexpected("shift_mix", next(iter(_unknown)))
    inputs = x, add, weight, bias, mixes, state_indices, cu_seqlens, has_initial_state, num_active
    mixed = tensors.apart(out, (x, add))
    made = calls.call(KIND, inputs, (shift, mixed, None), (null_index, eps))
    if mixed is not out:
        out.copy_(mixed)  # type: ignore[union-attr]
    return x if add is None else made[-1], made[0] if out is None else out  # type: ignore[return-value]


def _check(inputs: Sequence[Any], written: Sequence[Any], null_index: int, eps: float) -> calls.Call:
    x = tensors.from_any("x", inputs[0])
    *arrays, state_indices, cu_seqlens, has_initial_state, num_active = inputs
    _, add, weight, bias, mixes = common.as_tensors("shift_mix", arrays)
    if x.dim() not in (2, 3) or not x.shape[-1]:
        raise ValueError(f"x: expected shape [rows, channels] or [rows, tokens, channels], got {list(x.shape)}")
    common.check_lead("x", x)
    arguments.null_index(null_index)
    checks.check_number("eps", eps)
    channels, leading = x.shape[-1], x.shape[:-1]
    for name, given in (("weight", weight), ("bias", bias)):
        common.check("shift_mix", name, given, [(channels,)], x)
    if mixes is None or mixes.shape not in [(channels,), *((count, channels) for count in range(1, MOST_MIXES + 1))]:
        got = None if mixes is None else list(mixes.shape)
        raise ValueError(f"mixes: expected shape [{channels}] or [1 to {MOST_MIXES}, {channels}], got {got}")
    common.check("shift_mix", "mixes", mixes, [tuple(mixes.shape)], x)
    if add is not None:
        common.check("shift_mix", "add", add, [tuple(x.shape)], x)

    sequences = leading[0]
    if cu_seqlens is not None:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        checks.check_packing(cu_seqlens, x if x.dim() == 3 else x.unsqueeze(0))
        sequences = cu_seqlens.shape[0] - 1
    shift = tensors.from_any("shift", written[0], in_place=True)
    if shift.dim() != 2 or shift.shape[1] != channels:
        raise ValueError(f"shift: expected shape [slots, {channels}], got {list(shift.shape)}")
    arguments.check_dtype("shift", shift, common.dtypes_of(x), x)
    arguments.check_memory("shift", shift)
    indices = arguments.indices("state_indices", state_indices, sequences, x)
    has_state = arguments.has_initial_state(has_initial_state, sequences, x)
    active = arguments.num_active(num_active, x)
    arguments.check_room("shift", shift, indices, sequences)
    if arguments.may_look_at([cu_seqlens, indices, active]):
        if cu_seqlens is not None:
            arguments.check_bounds(cu_seqlens.tolist(), leading[-1])
        there = arguments.check_active(active, sequences)
        slots = {"state_indices": None if indices is None else indices[:there]}
        arguments.check_slots(slots, shift.shape[0], null_index)
    shape = (*mixes.shape[:-1], *x.shape)
    made = {} if written[1] is not None else {"mixed": shape}
    out = None if written[1] is None else arguments.out(written[1], shape, x)
    made |= {} if add is None else {"residual": tuple(x.shape)}
    given = [x, add, weight, bias, mixes, indices, cu_seqlens, has_state, active]
    return calls.Call(KIND, given, [shift, out, None], made, x, null_index, float(eps))


KIND = calls.define(calls.Kind(
    OPS["shift_mix"], ("shift", "mixed", "residual"), _check,
    given=lambda call: common.with_pool(common.given_of_mixes(call), "shift", call.written[0]),
    forward=layers.shift_mix, plain_in_place=lambda *arguments: plain.shift_mix(*arguments[:4]),
    beside=("state_indices", "cu_seqlens", "has_initial_state", "num_active"),
    texts=lambda call: common.rows_of(call, call.inputs[5], call.inputs[6]),
    stand_ins=(Sequences(1), Sequences(1, 2), Sequences(1, bound_bytes=4), Sequences(1, bound_bytes=8)),
))  # fmt: skip
