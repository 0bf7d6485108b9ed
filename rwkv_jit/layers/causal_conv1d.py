"""The short causal convolution before recurrences."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.layers import calls, common
from rwkv_jit.plain import layers as plain
from rwkv_jit.pool import arguments
from rwkv_jit.schedules import convolution
from rwkv_jit.schedules.convolution import LEAST_WIDTH, MOST_STATE_LEN, MOST_WIDTH
from rwkv_jit.schedules.layer_table import CONVOLUTION, CONVOLUTION_UPDATE
from rwkv_jit.schedules.layers import Given, Sequences
from rwkv_jit.schedules.legal import Activation

_ACTIVATIONS = {None: "identity", "silu": "silu"}  # as the kernels call them


# ---- the public functions ----------------------------------------------------------------------------------------


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, *, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, activation: Activation | None = None,
    **_unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Convolve every channel with a few tokens before: what KDA, gated delta net and Mamba-2 do before a recurrence.

        y_t = activation(bias + sum_j weight_j x_{t-W+1+j}),   j = 0 ... W - 1

    The tokens before a sequence are `initial_state`, or zeros. B is the batch, T the tokens, C the channels,
    W the width, N the sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, C), float16, bfloat16 or float32
        What is convolved. Kernels read it in place at any strides of batch and tokens, as in a part of a wider product;
        channels that are no neighbours are copied. On the CPU also float64.
    weight : torch.Tensor, shape (C, W), W from 2 to 8, dtype of x or float32
        The taps, that of the token itself last: those of `torch.nn.Conv1d` with as many groups as channels, without
        the dimension of 1.
    bias : torch.Tensor, shape (C,), dtype of x or float32, optional
        Is added before the activation.
    initial_state : torch.Tensor, shape (N, C, W - 1), dtype of x, optional
        The tokens before the first of each sequence, the last one last.
    output_final_state : bool, default False
        Also return the last tokens of each sequence.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Bounds of N packed sequences: where each begins, and where the last one ends. B is then 1.
    activation : {"silu"}, optional
        The function of the sum.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of x
    final_state : torch.Tensor, shape (N, C, W - 1), dtype of x, or None
        The last W - 1 tokens of each sequence, of one with fewer what came before too: the `initial_state` of what
        follows.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been launched.
    RuntimeError
        A second derivative is needed, or on a GPU one in forward mode: `causal_conv1d_ref` has these.
    RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Arithmetic is float32 whatever the dtype is, under autocast too, and only results are rounded. A sequence may be cut
    into calls anywhere. CPU tensors run plain torch, with one notice. DTensors are refused.

    x, weight, bias and initial_state have gradients, and final_state passes them on. The backward keeps these inputs,
    and makes the sum again. The gradients of weight and bias are sums over tokens in float32, the same from run to run.
    A second derivative is an error.

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060. Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> x, weight = torch.randn(2, 5, 256, device="cuda"), torch.randn(256, 4, device="cuda")
    >>> y, state = rwkv_jit.causal_conv1d(x, weight, activation="silu", output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 5, 256]), torch.Size([2, 256, 3]))
    """
    if _unknown:
        raise unexpected("causal_conv1d", next(iter(_unknown)))
    if output_final_state is not True and output_final_state is not False:
        output_final_state = checks.check_flag("output_final_state", output_final_state)
    (y,) = calls.call(KIND, (x, weight, bias, initial_state, cu_seqlens), (), (activation,))
    if not output_final_state:
        return y, None
    named = {"x": x, "weight": weight, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    given: list[Any] = [None if a is None else tensors.from_any(name, a) for name, a in named.items()]
    return y, plain.last_windows(given[0], given[2], given[3], given[1].shape[1] - 1)


def causal_conv1d_update(
    x: Array, conv_state: Array, weight: Array, bias: Array | None = None, *, activation: Activation | None = None,
    cache_seqlens: Array | None = None, state_indices: Array | None = None, null_index: int = -1,
    num_active: Array | None = None, out: Array | None = None, **_unknown: NoReturn,
) -> Tensor:  # fmt: skip
    r"""Convolve the next tokens of rows, whose last tokens are in a pool: `causal_conv1d` for decoding.

    B is the rows, T the tokens of each, C the channels, W the width, L the tokens that the pool keeps.

    Parameters
    ----------
    x : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        The input, with strides as in `causal_conv1d`.
    conv_state : torch.Tensor, shape (slots, C, L), L from W - 1 to 16, float16, bfloat16 or float32
        The pool of the last tokens, the last one last, which is changed. The convolution takes W - 1 of them. A slot
        has no gaps, in the order of its dimensions or with the channels last in memory; between slots there may be
        some. With `cache_seqlens` L may be larger.
    weight, bias, activation : torch.Tensor, shapes (C, W) and (C,), and {"silu"}, bias and activation optional
        As `causal_conv1d` takes them.
    cache_seqlens : torch.Tensor, shape (B,), int32, optional
        How many tokens each row has read before. Slots are then ring buffers: token i of a sequence is at i modulo L.
    state_indices, num_active : torch.Tensor, shapes (B,) and (1,), optional
        As `shift_mix` takes them.
    null_index : int, default -1
        A row with this slot, or one below, begins with zeros and writes no state.
    out : torch.Tensor, shape and dtype of x, optional
        Memory for y, without gaps.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
        `out`, if passed.

    Raises
    ------
    TypeError, ValueError, RwkvJitError, NvrtcNotFoundError
        As `causal_conv1d`. Nothing has been changed.
    RuntimeError
        A gradient is needed; call it in torch.no_grad().

    Notes
    -----
    Arithmetic is that of `causal_conv1d`. Tokens are rounded as the pool has them before the next one reads them, so
    that it does not matter where a sequence is cut into calls. On the CPU, and on a GPU with RWKVJIT_CHECK=1, a slot
    past the pool, or one for two rows, is an error. Else it is as one at `null_index`, and rows that share a slot leave
    it with the tokens of one of them. DTensors are refused.

    References
    ----------
    Those of `causal_conv1d`.

    Examples
    --------
    >>> pool = torch.zeros(8, 256, 3, device="cuda")
    >>> x, weight = torch.randn(2, 256, device="cuda"), torch.randn(256, 4, device="cuda")
    >>> slots = torch.tensor([5, 2], device="cuda")
    >>> y = rwkv_jit.causal_conv1d_update(x, pool, weight, activation="silu", state_indices=slots)
    >>> y.shape, torch.equal(pool[5, :, -1], x[0])
    (torch.Size([2, 256]), True)
    """
    if _unknown:
        raise unexpected("causal_conv1d_update", next(iter(_unknown)))
    inputs = x, weight, bias, cache_seqlens, state_indices, num_active
    new = calls.call(UPDATE, inputs, (conv_state, out), (null_index, activation))
    return new[0] if out is None else out  # type: ignore[return-value]


# ---- checks ------------------------------------------------------------------------------------------------------


def _check(inputs: Sequence[Any], written: Sequence[Any], activation: Any) -> calls.Call:
    x, weight, bias, initial_state, cu_seqlens = inputs
    x = tensors.from_any("x", x)
    if x.dim() != 3 or not x.shape[-1]:
        raise ValueError(f"x: expected shape [batch, tokens, channels], got {list(x.shape)}")
    weight, bias = _check_taps(x, weight, bias)
    gate = _check_activation(activation)
    cu_seqlens, sequences = common.packing_of(cu_seqlens, x)
    shape = sequences, weight.shape[0], weight.shape[1] - 1
    initial_state = arguments.optional("initial_state", initial_state, shape, (x.dtype,), x)
    given = [x, weight, bias, initial_state, cu_seqlens]
    return calls.Call(KIND, given, written, {"y": tuple(x.shape)}, x, kinds=(gate,))


def _check_update(inputs: Sequence[Any], written: Sequence[Any], null_index: Any, activation: Any) -> calls.Call:
    x, weight, bias, cache_seqlens, state_indices, num_active = inputs
    conv_state, out = written
    x = tensors.from_any("x", x)
    if x.dim() not in (2, 3) or not x.shape[-1]:
        raise ValueError(f"x: expected shape [rows, channels] or [rows, tokens, channels], got {list(x.shape)}")
    weight, bias = _check_taps(x, weight, bias)
    gate = _check_activation(activation)
    arguments.null_index(null_index)
    conv_state = tensors.from_any("conv_state", conv_state, in_place=True)
    rows = x.shape[0]
    cache_seqlens = arguments.optional("cache_seqlens", cache_seqlens, (rows,), (torch.int32,), x)
    channels, least, most = x.shape[-1], weight.shape[1] - 1, MOST_STATE_LEN if cache_seqlens is None else sys.maxsize
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or not least <= conv_state.shape[2] <= most:
        legal = f"{least} to {most}" if cache_seqlens is None else f"at least {least}"
        raise ValueError(f"conv_state: expected shape [slots, {channels}, {legal}], got {list(conv_state.shape)}")
    arguments.check_dtype("conv_state", conv_state, common.dtypes_of(x), x)
    pool = conv_state.transpose(1, 2) if _has_channels_last(conv_state) else conv_state
    arguments.check_memory("conv_state", pool)
    indices = arguments.indices("state_indices", state_indices, rows, x)
    active = arguments.num_active(num_active, x)
    arguments.check_room("conv_state", conv_state, indices, rows)
    if arguments.may_look_at([indices, active]):
        there = arguments.check_active(active, rows)
        slots = {"state_indices": None if indices is None else indices[:there]}
        arguments.check_slots(slots, conv_state.shape[0], null_index)
    y = None if out is None else arguments.out(out, tuple(x.shape), x, " like x")
    given = [x, weight, bias, cache_seqlens, indices, active]
    results = {"y": tuple(x.shape)} if y is None else {}
    return calls.Call(UPDATE, given, [conv_state, y], results, x, null_index, kinds=(gate,))


def _check_taps(x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
    """Check what is convolved, and return what it is convolved with."""
    common.check_lead("x", x)
    weight, channels = tensors.from_any("weight", weight), x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != channels or not LEAST_WIDTH <= weight.shape[1] <= MOST_WIDTH:
        raise ValueError(
            f"weight: expected shape [{channels}, {LEAST_WIDTH} to {MOST_WIDTH}], got {list(weight.shape)}"
        )
    wide = tuple(dict.fromkeys((x.dtype, torch.float32)))
    arguments.check_dtype("weight", weight, wide, x)
    return weight, arguments.optional("bias", bias, (channels,), wide, x)


def _check_activation(activation: Any) -> str:
    if activation is not None:
        checks.check_name("activation", activation, get_args(Activation))
    return _ACTIVATIONS[activation]


def _has_channels_last(pool: Tensor) -> bool:
    """Return whether the memory of a slot is [tokens, channels]."""
    return pool.shape[0] > 0 and not pool[0].is_contiguous() and pool[0].t().is_contiguous()


# ---- what the engine must know -----------------------------------------------------------------------------------


def _given(call: calls.Call) -> Given:
    weight = call.inputs[1]
    given = common.given_of(call, call.lead.numel() // weight.shape[0], tuple(weight.shape))
    return given if call.kind is KIND else common.with_pool(given, "conv_state", call.written[0])


def _rows(call: calls.Call) -> Sequences:
    _, _, _, cache_seqlens, indices, _ = call.inputs
    pool = call.written[0]
    of_pool = {"state_len": pool.shape[2], "channels_last": _has_channels_last(pool), "ring": cache_seqlens is not None}
    return common.rows_of(call, indices)._replace(**of_pool)


def _plain_update(
    inputs: Sequence[Any], written: Sequence[Tensor], null_index: int, eps: float, kinds: Sequence[str]
) -> None:  # fmt: skip
    (x, *others), (pool, y) = inputs, written
    x, y = (x, y) if x.dim() == 3 else (x.unsqueeze(1), y.unsqueeze(1))
    weight, bias, cache_seqlens, indices, active = others
    plain.causal_conv1d_update(x, pool, weight, bias, cache_seqlens, indices, active, y, null_index, kinds[0])


KIND = calls.define(calls.Kind(
    CONVOLUTION, ("y",), _check, given=_given, forward=convolution.forward, backward=convolution.backward,
    plain=lambda inputs, eps, kinds: [plain.causal_conv1d(*inputs, *kinds)], choices=("activation",),
    beside=("cu_seqlens",), stand_ins=common.PACKED_AND_NOT,
    texts=lambda call: common.sequences_of(call)._replace(tokens=call.lead.shape[1]),  # those of all packed ones
    options=lambda eps, kinds: (None if kinds[0] == "identity" else kinds[0],),
))  # fmt: skip
UPDATE = calls.define(calls.Kind(
    CONVOLUTION_UPDATE, ("conv_state", "y"), _check_update, given=_given, forward=convolution.update,
    beside=("cache_seqlens", "state_indices", "num_active"), placed=(0, 1, 2), texts=_rows, choices=("activation",),
    plain_in_place=_plain_update, instead="causal_conv1d",
))  # fmt: skip
