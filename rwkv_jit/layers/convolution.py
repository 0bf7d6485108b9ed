"""The short causal convolution before recurrences: public functions, checks and torch ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from rwkv_jit.call import checks, recording, sharding, tensors, torch_op
from rwkv_jit.call.plan import Plan
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.kernels.signatures import BySignature
from rwkv_jit.layers import registry
from rwkv_jit.plain import layers
from rwkv_jit.pool import arguments
from rwkv_jit.pool.calls import one_slot
from rwkv_jit.schedules import convolution
from rwkv_jit.schedules.convolution import LEAST_WIDTH, MOST_STATE_LEN, MOST_WIDTH
from rwkv_jit.schedules.layers import Given, Sequences
from rwkv_jit.schedules.legal import Activation
from rwkv_jit.schedules.schedule import Result

_ACTIVATIONS = {None: "identity", "silu": "silu"}  # as the kernels call them
_INPUTS = ("x", "weight", "bias", "initial_state")


# ---- the public functions ----------------------------------------------------------------------------------------


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    activation: Activation | None = None,
    **_unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:
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
        A second derivative is wanted, or on a GPU one in forward mode: `causal_conv1d_ref` has these.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtype is, under autocast too, and nothing is rounded but the results. A sequence
    may be cut into calls anywhere.

    x, weight, bias and initial_state have gradients, and final_state passes them on. The backward keeps these inputs
    and nothing else, and makes the sum again. The gradients of weight and bias are sums over tokens in float32, of
    blocks first and then over blocks, the same from run to run. A second derivative is an error.

    CPU tensors run plain torch, with one notice. DTensors are refused.

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
    name = "causal_conv1d"
    _refuse_distributed(name, (x, weight, bias, initial_state, cu_seqlens))
    x = tensors.from_any("x", x)
    if x.dim() != 3 or not x.shape[-1]:
        raise ValueError(f"x: expected shape [batch, tokens, channels], got {list(x.shape)}")
    weight, bias = _check_taps(x, weight, bias)
    chosen = _check_activation(activation)
    wants_state = checks.check_flag("output_final_state", output_final_state)
    texts, (channels, width) = x.shape[0], weight.shape
    if cu_seqlens is not None:
        cu_seqlens = tensors.from_any("cu_seqlens", cu_seqlens)
        checks.check_packing(cu_seqlens, x)
        if tensors.is_eager() and tensors.are_plain([cu_seqlens]):
            cu_seqlens = tensors.packing(cu_seqlens, x.shape[1])
        texts = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = tensors.from_any("initial_state", initial_state)
        arguments.check_shape("initial_state", initial_state, (texts, channels, width - 1))
        arguments.check_dtype("initial_state", initial_state, (x.dtype,), x)
    y = registry.find("causal_conv1d_fwd")(x, weight, bias, initial_state, cu_seqlens, chosen, True)
    return y, layers.last_windows(x, initial_state, cu_seqlens, width - 1) if wants_state else None


def causal_conv1d_update(
    x: Array,
    conv_state: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: Activation | None = None,
    cache_seqlens: Array | None = None,
    state_indices: Array | None = None,
    null_index: int = -1,
    num_active: Array | None = None,
    out: Array | None = None,
    **_unknown: NoReturn,
) -> Tensor:
    r"""Convolve the next tokens of rows, whose last tokens are in a pool: `causal_conv1d` for decoding.

    B is the number of rows, T the tokens of each, C the channels, W the width, L the tokens that the pool keeps.

    Parameters
    ----------
    x : torch.Tensor, shape (B, C), or (B, T, C) for T tokens of each row, float16, bfloat16 or float32
        The input, with strides as in `causal_conv1d`.
    conv_state : torch.Tensor, shape (slots, C, L), L from W - 1 to 16, float16, bfloat16 or float32
        The pool of the last tokens, the last one last, which is changed. The convolution takes W - 1 of them. A slot
        has no gaps, in the order of its dimensions or with the channels last in memory; between slots there may be
        some. With `cache_seqlens` L may be larger.
    weight : torch.Tensor, shape (C, W), W from 2 to 8, dtype of x or float32
        As in `causal_conv1d`.
    bias : torch.Tensor, shape (C,), dtype of x or float32, optional
        As in `causal_conv1d`.
    activation : {"silu"}, optional
        The function of the sum.
    cache_seqlens : torch.Tensor, shape (B,), int32, optional
        How many tokens each row has read before. Slots are then ring buffers: token i of a sequence is at i modulo L.
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    null_index : int, default -1
        A row with this slot, or one below, begins with zeros and writes no state.
    num_active : torch.Tensor, shape (1,), int32, optional
        How many rows are computed: later ones get zeros, and their slots do not change.
    out : torch.Tensor, shape and dtype of x, optional
        Memory for y, without gaps.

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
        `out`, if passed.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been launched
        or changed.
    RuntimeError
        A gradient is wanted; call it in torch.no_grad().
    RwkvJitError, NvrtcNotFoundError
        As `causal_conv1d`.

    Notes
    -----
    Arithmetic is that of `causal_conv1d`. Tokens are rounded as the pool has them before the next one takes them, so
    that it does not matter where a sequence is cut into calls.

    On the CPU, and on a GPU with RWKVJIT_CHECK=1, a slot past the pool, or one for two rows, is an error. Else it is as
    one at `null_index`, and rows that share a slot leave it with the tokens of one of them. DTensors are refused.

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
    name = "causal_conv1d_update"
    _refuse_distributed(name, (x, conv_state, weight, bias, cache_seqlens, state_indices, num_active, out))
    x = tensors.from_any("x", x)
    if x.dim() not in (2, 3) or not x.shape[-1]:
        raise ValueError(f"x: expected shape [rows, channels] or [rows, tokens, channels], got {list(x.shape)}")
    weight, bias = _check_taps(x, weight, bias)
    chosen = _check_activation(activation)
    arguments.null_index(null_index)
    conv_state = tensors.from_any("conv_state", conv_state, in_place=True)
    rows = x.shape[0]
    if cache_seqlens is not None:
        cache_seqlens = tensors.from_any("cache_seqlens", cache_seqlens)
        arguments.check_shape("cache_seqlens", cache_seqlens, (rows,))
        arguments.check_dtype("cache_seqlens", cache_seqlens, (torch.int32,), x)
    _check_pool(conv_state, x, weight.shape[1], MOST_STATE_LEN if cache_seqlens is None else sys.maxsize)
    indices = arguments.indices("state_indices", state_indices, rows, x)
    active = arguments.num_active(num_active, x)
    arguments.check_room("conv_state", conv_state, indices, rows)
    if arguments.may_look_at([indices, active]):
        there = arguments.check_active(active, rows)
        slots = {"state_indices": None if indices is None else indices[:there]}
        arguments.check_slots(slots, conv_state.shape[0], null_index)
    if out is None:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        y = arguments.out(out, tuple(x.shape), x, " like x")
    if x.numel():
        tokens, target = (x, y) if x.dim() == 3 else (x.unsqueeze(1), y.unsqueeze(1))
        given = tokens, conv_state, weight, bias, cache_seqlens, indices, active, target, null_index, chosen
        registry.find("causal_conv1d_update")(*given)
    return y


# ---- checks ------------------------------------------------------------------------------------------------------


def _refuse_distributed(name: str, arrays: Sequence[Any]) -> None:
    if sharding.any_distributed([x for x in arrays if x is not None]):
        raise TypeError(f"{name} takes no DTensors; pass to_local() of each")


def _check_taps(x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
    """Check what is convolved, and return what it is convolved with."""
    dtypes = [*tensors.STORAGE] if x.is_cuda else [*tensors.STORAGE, torch.float64]
    if x.dtype not in dtypes:
        raise TypeError(f"x: expected {' or '.join(map(str, dtypes))}, got {x.dtype}")
    weight, channels = tensors.from_any("weight", weight), x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != channels or not LEAST_WIDTH <= weight.shape[1] <= MOST_WIDTH:
        raise ValueError(
            f"weight: expected shape [{channels}, {LEAST_WIDTH} to {MOST_WIDTH}], got {list(weight.shape)}"
        )
    wide = tuple(dict.fromkeys((x.dtype, torch.float32)))
    arguments.check_dtype("weight", weight, wide, x)
    if bias is None:
        return weight, None
    bias = tensors.from_any("bias", bias)
    arguments.check_shape("bias", bias, (channels,))
    arguments.check_dtype("bias", bias, wide, x)
    return weight, bias


def _check_activation(activation: Any) -> str:
    if activation is not None:
        checks.check_name("activation", activation, get_args(Activation))
    return _ACTIVATIONS[activation]


def _check_pool(pool: Tensor, x: Tensor, width: int, most: int) -> None:
    channels, least = x.shape[-1], width - 1
    if pool.dim() != 3 or pool.shape[1] != channels or not least <= pool.shape[2] <= most:
        legal = f"{least} to {most}" if most == MOST_STATE_LEN else f"at least {least}"
        raise ValueError(f"conv_state: expected shape [slots, {channels}, {legal}], got {list(pool.shape)}")
    dtypes = [*tensors.STORAGE] if x.is_cuda else [*tensors.STORAGE, torch.float64]
    arguments.check_dtype("conv_state", pool, dtypes, x)
    arguments.check_memory("conv_state", pool.transpose(1, 2) if _has_channels_last(pool) else pool)


def _has_channels_last(pool: Tensor) -> bool:
    """Return whether the memory of a slot is [tokens, channels]."""
    return pool.shape[0] > 0 and not pool[0].is_contiguous() and pool[0].t().is_contiguous()


# ---- kernels -----------------------------------------------------------------------------------------------------

_plans: BySignature[Plan] = BySignature()


def _plan(direction: str, named: Mapping[str, Tensor | None], activation: str, wanted: tuple[str, ...] = ()) -> Plan:
    """Return the plan of whole sequences."""
    key = direction, activation, wanted, tensors.signature([*named.values()])
    plan = _plans.get(key)
    if plan is None:
        x, cu_seqlens = named["x"], named["cu_seqlens"]
        assert x is not None
        given = _given(named, convolution.OPS[direction].inputs)
        if cu_seqlens is None:
            texts = Sequences(*x.shape[:2])
        else:
            texts = Sequences(cu_seqlens.shape[0] - 1, x.shape[1], cu_seqlens.element_size())
        if direction == "forward":
            given = given._replace(results={"y": Result(tuple(x.shape), given.types["x"])})
            schedule = convolution.forward(given, texts, activation)
        else:
            there = {own: y for own, y in named.items() if own in _INPUTS and y is not None}
            results = {f"d{own}": Result(tuple(y.shape), given.types[own]) for own, y in there.items()}
            schedule = convolution.backward(given._replace(results=results), texts, activation, wanted)
        plan = _plans.keep(key, Plan(schedule, convolution.problem(direction, given), named))
    return plan


def _plan_of_update(named: Mapping[str, Tensor | None], null_index: int, activation: str) -> Plan:
    pool, y, indices = named["conv_state"], named["y"], named["state_indices"]
    assert pool is not None
    assert y is not None
    slots = pool.shape[0]
    stride = pool.stride(0) if slots > 1 else 0
    address = 16 | stride * pool.element_size()
    for name in ("x", "weight", "bias", "conv_state", "y"):  # inputs too, which need no copy then
        x = named[name]
        address |= 0 if x is None else x.data_ptr()
    alignment = address & -address
    key = "update", alignment, null_index, activation, tensors.signature([*named.values()])
    plan = _plans.get(key)
    if plan is None:
        given = _given(named, [*convolution.OPS["update"].inputs, "conv_state"])._replace(alignment=alignment)
        index_bytes = 4 if indices is None else indices.element_size()
        rows = Sequences(y.shape[0], y.shape[1], 0, slots, stride, index_bytes, null_index)
        is_last = _has_channels_last(pool)
        ring = named["cache_seqlens"] is not None
        schedule = convolution.update(given, rows, pool.shape[2], is_last, activation, ring)
        slot = one_slot(pool)
        bound = {**named, "conv_state": slot.t() if is_last else slot}
        plan = _plans.keep(key, Plan(schedule, convolution.problem("update", given), bound))
    return plan


def _given(named: Mapping[str, Tensor | None], names: Sequence[str] | Mapping[str, str]) -> Given:
    x, weight = named["x"], named["weight"]
    assert x is not None
    assert weight is not None
    there = {own: y for own in names if (y := named[own]) is not None}
    types = {own: tensors.STORAGE[y.dtype] for own, y in there.items()}
    channels, width = weight.shape
    return Given(tensors.gpu(x.device.index), types, x.numel() // channels, (channels, width))


# ---- the torch ops -----------------------------------------------------------------------------------------------


def causal_conv1d_fwd_run(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    activation: str, save: bool,
) -> Tensor:  # fmt: skip
    """Return y."""
    if not x.numel():
        return causal_conv1d_fwd_fake(x)
    given = x, weight, bias, initial_state, cu_seqlens
    if x.is_cuda:
        named = dict(zip((*_INPUTS, "cu_seqlens"), given, strict=True))
        return _plan("forward", named, activation).run(given)[0]
    torch_op.say_reference("causal_conv1d", x)
    if cu_seqlens is not None:
        tensors.packing(cu_seqlens, x.shape[1])  # a compiled call has not looked at it yet
    with tensors.exactly(x), torch.no_grad():
        return layers.causal_conv1d(x, weight, bias, initial_state, cu_seqlens, activation)


def causal_conv1d_fwd_fake(x: Tensor, *_: Any) -> Tensor:
    """Return the same without its values."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def causal_conv1d_fwd_record(keys: Any, *arguments: Any) -> Any:
    """Run the forward, and record it where a gradient is wanted."""
    return _forward()(keys, *arguments)


@cache
def _forward() -> Callable[..., Any]:
    def setup(ctx: Any, arguments: Sequence[Any], _: dict[str, Any], y: Any) -> None:
        *given, ctx.activation, _save = arguments
        ctx.save_for_backward(*given)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = list(ctx.needs_input_grad[2 : 2 + len(_INPUTS)])  # of a Function with two inputs before these
        made = _backward()[1](grad, *ctx.saved_tensors, ctx.activation, wanted)
        return *(x if is_wanted else None for x, is_wanted in zip(made, wanted, strict=True)), None, None, None

    def plainly(*arguments: Any) -> Any:
        if arguments[0].is_cuda:
            recording.refuse_forward_mode("causal_conv1d")
        return layers.causal_conv1d(*arguments[:-1])

    return recording.forward(registry.find("causal_conv1d_fwd"), setup, backward, plainly)


def causal_conv1d_bwd_run(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, activation: str, wanted: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of the inputs, as far as they are wanted."""
    inputs = x, weight, bias, initial_state
    names = tuple(name for name, is_wanted in zip(_INPUTS, wanted, strict=True) if is_wanted)
    if not x.numel():
        return tuple(y.zero_() for y in _gradients_like(inputs, wanted))
    if x.is_cuda:
        named = {**dict(zip(_INPUTS, inputs, strict=True)), "cu_seqlens": cu_seqlens, "grad_y": grad}
        several = _plan("backward", named, activation, names).run([*named.values()])
    else:
        with recording.plain_torch(), tensors.exactly(x):
            leaves: dict[str, Any] = {
                name: None if y is None else y.detach().requires_grad_(name in names)
                for name, y in zip(_INPUTS, inputs, strict=True)
            }
            y = layers.causal_conv1d(**leaves, cu_seqlens=cu_seqlens, activation=activation)
            several = recording.gradients([y], [grad], [leaves[name] for name in names])
    made = dict(zip(names, several, strict=True))
    return tuple(made[name] if name in made else x.new_empty(0) for name in _INPUTS)


def causal_conv1d_bwd_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, activation: str, wanted: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the same without their values."""
    return _gradients_like((x, weight, bias, initial_state), wanted)


def _gradients_like(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return memory for the gradients that are wanted."""
    return tuple(
        torch.empty_like(y, memory_format=torch.contiguous_format)
        if is_wanted and y is not None
        else inputs[0].new_empty(0)  # type: ignore[union-attr]
        for y, is_wanted in zip(inputs, wanted, strict=True)
    )


def causal_conv1d_bwd_record(keys: Any, *arguments: Any) -> Any:
    """Run the backward; a second derivative is an error."""
    return _backward()[0](keys, *arguments)


@cache
def _backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return recording.backward(registry.find("causal_conv1d_bwd"), "causal_conv1d")


def causal_conv1d_update_run(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, cache_seqlens: Tensor | None,
    state_indices: Tensor | None, num_active: Tensor | None, y: Tensor, null_index: int, activation: str,
) -> None:  # fmt: skip
    """Run the update."""
    if x.is_cuda:
        named = {
            "x": x, "weight": weight, "bias": bias, "conv_state": conv_state, "cache_seqlens": cache_seqlens,
            "state_indices": state_indices, "num_active": num_active, "y": y,
        }  # fmt: skip
        _plan_of_update(named, null_index, activation).run([*named.values()])
        return
    torch_op.say_reference("causal_conv1d_update", x)
    with tensors.exactly(x), torch.no_grad():
        layers.causal_conv1d_update(
            x, conv_state, weight, bias, cache_seqlens, state_indices, num_active, y, null_index, activation
        )  # fmt: skip


def causal_conv1d_update_fake(*_: Any) -> None:
    """Do nothing with tensors that have no memory."""


def causal_conv1d_update_record(keys: Any, *arguments: Any, **named: Any) -> None:
    """Refuse to record gradients."""
    instead = "is for inference and has no gradient; use causal_conv1d, or torch.no_grad()"
    op = registry.find("causal_conv1d_update")
    recording.nothing(op, "causal_conv1d_update", instead)(keys, *arguments, **named)
