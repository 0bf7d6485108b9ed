"""Linear attention whose decays, keys or values are made of other inputs: `gla` with other operands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkv_jit.call import checks, tensors
from rwkv_jit.call.tensors import Array
from rwkv_jit.derived import arguments, head_decays
from rwkv_jit.derived.operands import for_heads
from rwkv_jit.ops.gla import gla
from rwkv_jit.schedules.derived_table import OPS, Core

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import CallOptions, DecayOptions


# ---- sequences ---------------------------------------------------------------------------------------------------


def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""Scalar-gated linear attention over sequences, with gradients to every input and to the initial state.

        S <- e^g S + v k^T;   y = scale S q

    per head, with S [V, K]. B is the batch, T the tokens, G the key heads, H the value heads, K and V the head
    sizes of keys and values, N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, T, H) or (H,), dtype of q or float32
        Logarithm of the decay of each head: of each token, or fixed, as in retention and lightning attention.
    initial_state, output_final_state, cu_seqlens
        As `gla` takes them.
    **options
        By name, as `CallOptions` says: scale, state_layout, checkpoint_interval, chunk_len, num_threads, backend. By
        default scale is K^-0.5 and state_layout "kv".

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, K, V) or (N, H, V, K), or None
        Dtype of `initial_state`, float32 without one.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `gla`.

    Notes
    -----
    Kernels get one decay for all channels of a head, and keys for all heads that share them. `gla` does the rest:
    its notes have precision and choice of kernels. Any decay is right.

    Calls with 16 bits, head sizes up to 128 and enough heads run dedicated kernels in both directions, which take any
    decay. Besides inputs, y and final state these keep between the passes, for each token and value head K V / 64
    numbers of the dtype of v, and about 200 bytes.

    Results have the same bits in every run. A second derivative is an error. Under `torch.autocast` inputs are cast
    like those of `gla`; g may stay float32. CPU tensors run plain torch, with one notice.

    References
    ----------
    Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621, with a fixed
    decay; Qin et al., Lightning Attention-2, arXiv:2401.04658.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 128, 4, 64, device="cuda")
    >>> y, state = rwkv_jit.simple_gla(q, k, v, -torch.rand(2, 128, 4, device="cuda"), output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    g = of_tokens(g, v)
    call = arguments.sequences(OPS["simple_gla"], (q, k, v, g), initial_state, cu_seqlens, options)
    q, k, v, g = call.inputs
    way = head_decays.way(call, q, v, False)
    if way is not None:
        return head_decays.run(Core(False, has_rate=False), (q, k, v, g), call, way, output_final_state)
    return call.run(gla, for_heads(q, k, v, g), output_final_state)


def hgrn2(
    q: Array,
    g: Array,
    v: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""HGRN2 over sequences, with gradients to every input and to the initial state.

        S <- S diag(e^g) + v (1 - e^g)^T;   y = scale S q

    per head, with S [V, K]. B is the batch, T the tokens, H the heads, K and V the head sizes of keys and values, N
    the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    q : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Query. Any strides; where the last one is not 1, a copy is made.
    g : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        Logarithm of the forget gate, at most 0; 1 - e^g is the key.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value.
    initial_state, output_final_state, cu_seqlens
        As `gla` takes them.
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend. By default scale is 1 and state_layout "kv"; decay is "log" alone.

    Returns
    -------
    y, final_state
        As `simple_gla` returns them.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `gla`.

    Notes
    -----
    The keys are computed first, in the dtype of q. `gla` does the rest: its notes have precision and choice of kernels.
    Any decay is right. Results, derivatives and `torch.autocast` are as of `simple_gla`.

    References
    ----------
    Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.

    Examples
    --------
    >>> q, x, v = torch.randn(3, 2, 128, 4, 64, device="cuda")
    >>> y, _ = rwkv_jit.hgrn2(q, torch.nn.functional.logsigmoid(x), v)
    >>> y.shape
    torch.Size([2, 128, 4, 64])
    """
    call = arguments.sequences(OPS["hgrn2"], (q, g, v), initial_state, cu_seqlens, options)
    return call.run(gla, with_keys(*call.inputs), output_final_state)


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""The state space of Mamba-2 over sequences, with gradients to every input and to the initial state.

        S <- e^(dt A) S + dt x B^T;   y = (S C + D x) silu(z)

    per head, with S [V, K]; without D and z their parts are left out. B is the batch, T the tokens, G the groups, H the
    heads, K and V the head sizes of keys and values, N the number of sequences: B, or one less than the length of
    `cu_seqlens`.

    Parameters
    ----------
    x : torch.Tensor, shape (B, T, H, V), float16, bfloat16 or float32
        Input. Any strides; where the last one is not 1, a copy is made.
    dt : torch.Tensor, shape (B, T, H), dtype of x or float32
        Step; raw with `dt_bias` and `dt_softplus`.
    A : torch.Tensor, shape (H,), dtype of x or float32
        Log-decay of a step of 1, which is negative.
    B, C : torch.Tensor, shape (B, T, G, K), dtype of x
        Key by which an input is written, and query by which the state is read. Head h has those of group h // (H // G).
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token, float16, bfloat16 or float32; zeros by default. Without N the same for every
        sequence. In the kv layout the last two sizes are (K, V).
    output_final_state, cu_seqlens
        As `gla` takes them.
    D : torch.Tensor, shape (H,) or (H, V), dtype of x or float32, optional
        How much of the input is added to y.
    z : torch.Tensor, shape and dtype of x, optional
        y is multiplied by silu(z).
    dt_bias : torch.Tensor, shape (H,), dtype of x or float32, optional
        Is added to the raw dt.
    dt_softplus : bool, default False
        Whether the step is the softplus of that sum.
    dt_limit : pair of float, default (0.0, inf)
        The least and the largest step: others are clamped to these.
    **options
        By name, as `CallOptions` says: scale, state_layout, checkpoint_interval, chunk_len, num_threads, backend. By
        default scale is 1 and state_layout "vk".

    Returns
    -------
    y : torch.Tensor, shape and dtype of x
    final_state : torch.Tensor, shape (N, H, V, K) or (N, H, K, V), or None
        Dtype of `initial_state`, float32 without one.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `gla`.

    Notes
    -----
    Steps are computed first, in float32, then the inputs times the step, in the dtype of x; D and z are last. `gla`
    does the rest: its notes have precision and choice of kernels. Any decay is right.

    Calls with 16 bits, head sizes up to 128 and enough heads run dedicated kernels in both directions, which take any
    decay and, without a `dt_limit`, compute the steps of `dt_softplus`. Besides inputs, y and final state these keep
    between the passes, for each token and value head K V / 64 numbers of the dtype of x, and about 200 bytes. There the
    gradient of A is a sum of steps times differences of float32 sums: with long steps it may be mostly rounding. Tokens
    whose decay is 0 in float32 have no part in it.

    Results have the same bits in every run. A second derivative is an error. Under `torch.autocast` inputs are cast
    like those of `gla`; dt may stay float32. CPU tensors run plain torch, with one notice.

    References
    ----------
    Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality, arXiv:2405.21060.

    Examples
    --------
    >>> x, dt = torch.randn(2, 128, 4, 64, device="cuda"), torch.rand(2, 128, 4, device="cuda")
    >>> B, C = torch.randn(2, 2, 128, 1, 32, device="cuda")
    >>> y, state = rwkv_jit.ssd(x, dt, -torch.rand(4, device="cuda"), B, C, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 64]), torch.Size([2, 4, 64, 32]))
    """
    call = arguments.sequences(OPS["ssd"], (x, dt, B, C), initial_state, cu_seqlens, options)
    x, dt, B, C = call.inputs
    own, gate = check_behind(x, D, z)
    raw = _raw_steps(x, A, dt_bias, dt_softplus, dt_limit)
    of_steps = [*steps_of(x, dt, A, dt_bias, dt_softplus, dt_limit)] if raw is None else raw
    way = head_decays.way(call, C, x, False, own, *of_steps)
    if way is None:
        steps, decays = of_steps if raw is None else steps_of(x, dt, A, dt_bias, dt_softplus, dt_limit)
        y, state = call.run(gla, of_states(x, steps, decays, B, C), output_final_state)
    else:
        core = Core(False, has_own=own is not None, has_step=raw is not None, has_bias=raw is not None and len(raw) > 1)
        shares = []
        if own is not None:
            wide = own.to(torch.promote_types(own.dtype, torch.float32))
            shares, own = [wide.view(x.shape[-2], -1).expand(x.shape[-2:]).contiguous()], None
        gates = [*reversed(of_steps), *shares] if raw is None else [dt, *shares, *raw]
        y, state = head_decays.run(core, (C, B, x, *gates), call, way, output_final_state)
    return behind(y, x, own, gate), state


# ---- operands ----------------------------------------------------------------------------------------------------


def of_tokens(g: Any, v: Any) -> Any:
    """Return decays of heads for each token, where they are fixed; what is wrong with them the checks say."""
    is_fixed = getattr(g, "ndim", 0) == 1 and getattr(v, "ndim", 0) > 2 and g.shape[0] == v.shape[-2]
    return tensors.from_any("g", g).expand(v.shape[:-1]) if is_fixed else g


def with_keys(q: Tensor, g: Tensor, v: Tensor) -> list[Tensor]:
    """Return what `gla` takes, of forget gates."""
    return [q, -torch.expm1(g).to(q.dtype), v, g]


def steps_of(x: Tensor, dt: Tensor, A: Any, dt_bias: Any, dt_softplus: Any, dt_limit: Any) -> tuple[Tensor, Tensor]:
    """Return the steps of a state space and its log-decays, in float32 at least."""
    heads = x.shape[-2]
    rates = arguments.check_fixed("A", A, [(heads,)], x)
    step = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if dt_bias is not None:
        step = step + arguments.check_fixed("dt_bias", dt_bias, [(heads,)], x)
    if checks.check_flag("dt_softplus", dt_softplus):
        step = F.softplus(step)
    least, most = _limit(dt_limit)
    if (least, most) != (0.0, math.inf) or not dt_softplus:
        step = step.clamp(least, most)
    return step, step * rates


def _raw_steps(x: Tensor, A: Any, dt_bias: Any, dt_softplus: Any, dt_limit: Any) -> list[Tensor] | None:
    """Return A and the bias in float32 at least, where kernels can make steps of them; None for other steps."""
    if not checks.check_flag("dt_softplus", dt_softplus) or _limit(dt_limit) != (0.0, math.inf):
        return None
    heads = x.shape[-2]
    given = [(name, each) for name, each in (("A", A), ("dt_bias", dt_bias)) if name == "A" or each is not None]
    fixed = [arguments.check_fixed(name, each, [(heads,)], x) for name, each in given]
    return [each.to(torch.promote_types(each.dtype, torch.float32)) for each in fixed]


def of_states(x: Tensor, steps: Tensor, decays: Tensor, B: Tensor, C: Tensor) -> list[Tensor]:
    """Return what `gla` takes, of a state space."""
    return for_heads(C, B, (x * steps.unsqueeze(-1)).to(x.dtype), decays)


def _limit(dt_limit: Any) -> tuple[float, float]:
    """Return what steps are brought between."""
    is_pair = isinstance(dt_limit, (tuple, list)) and len(dt_limit) == 2
    if not (is_pair and all(isinstance(x, (int, float)) for x in dt_limit) and dt_limit[0] <= dt_limit[1]):
        raise ValueError(f"dt_limit: expected a pair of numbers that does not fall, got {dt_limit!r}")
    return float(dt_limit[0]), float(dt_limit[1])


def check_behind(x: Tensor, D: Any, z: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return D and z as tensors, those that are there."""
    heads, size = x.shape[-2:]
    own = None if D is None else arguments.check_fixed("D", D, [(heads,), (heads, size)], x)
    return own, None if z is None else arguments.check_fixed("z", z, [tuple(x.shape)], x)


def behind(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Return outputs with what they have of the input itself, behind their gate."""
    made = y
    if D is not None:  # in float32 at least, as the gradient of D is a sum of products that shall not be rounded
        made = y + x * D.to(torch.promote_types(D.dtype, torch.float32)).view(x.shape[-2], -1)
    return (made if z is None else made * F.silu(z.to(made.dtype))).to(y.dtype)
