"""Linear attention whose decays, keys or values are made of other inputs: `gla` with other operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import checks, tensors, torch_op
from rwkv_jit.call.options import CallOptions, DecayOptions
from rwkv_jit.call.tensors import Array
from rwkv_jit.ops import wide_keys
from rwkv_jit.schedules.table import DERIVED as OPS

_SIMPLE_GLA, _HGRN2, _SSD = (
    torch_op.define(OPS[name], wide_keys.in_parts) for name in ("simple_gla", "hgrn2", "ssd")
)  # fmt: skip


# ---- sequences ---------------------------------------------------------------------------------------------------


def simple_gla(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None, output_final_state: bool = False,
    cu_seqlens: Array | None = None, **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
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
    y, final_state
        As `gla` returns them.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

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
    if not isinstance(g, Tensor) or g.dim() == 1:
        g = _of_tokens(g, v)
    return torch_op.call(
        _SIMPLE_GLA, (q, k, v, g), initial_state, output_final_state, cu_seqlens, tuple(options.items())
    )  # fmt: skip


def hgrn2(
    q: Array, g: Array, v: Array, initial_state: Array | None = None, output_final_state: bool = False,
    cu_seqlens: Array | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
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
        As `gla` returns them.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    The keys are computed first, in the dtype of q; below 6e-5 float16 has fewer digits, which forget gates that are as
    near to 1 lose. `gla` does the rest: its notes have precision and choice of kernels. Any decay is right. Results,
    derivatives and `torch.autocast` are as of `simple_gla`.

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
    return torch_op.call(_HGRN2, (q, g, v), initial_state, output_final_state, cu_seqlens, tuple(options.items()))


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, *, D: Array | None = None,
    z: Array | None = None, dt_bias: Array | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
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
    initial_state, output_final_state, cu_seqlens
        As `wkv7` takes them.
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
    y, final_state
        As `wkv7` returns them, with x for v.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    Steps are computed first, in float32, then the inputs times the step, in the dtype of x; D and z are last. `gla`
    does the rest: its notes have precision and choice of kernels. Any decay is right.

    Calls with 16 bits, head sizes up to 128 and enough heads run dedicated kernels in both directions, which take any
    decay and, without a `dt_limit`, compute the steps of `dt_softplus`. Besides inputs, y and final state these keep
    between the passes, for each token and value head K V / 64 numbers of the dtype of x, and about 200 bytes. There the
    gradient of A is a sum of steps times differences of float32 sums: with long steps it may be mostly rounding. Tokens
    whose decay is 0 in float32 have no part in it.

    Results, derivatives and `torch.autocast` are as of `simple_gla`; dt may stay float32.

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
    if dt_softplus is not True and dt_softplus is not False:
        dt_softplus = checks.check_flag("dt_softplus", dt_softplus)
    is_pair = type(dt_limit) is tuple and len(dt_limit) == 2  # whose numbers the checks of a call look at
    least, most = dt_limit if is_pair else checks.step_limits(dt_limit)
    if D is not None and not isinstance(D, Tensor):
        D = tensors.from_any("D", D)
    of_heads = tuple(getattr(x, "shape", ()))[-2:]
    if D is not None and D.shape == of_heads[:1]:
        # One number for a head, whose gradient is a sum over channels of products that must not be rounded.
        D = D.to(torch.promote_types(D.dtype, torch.float32)).unsqueeze(-1).expand(of_heads)
    least, most = None if least == 0.0 else least, None if most == math.inf else most
    return torch_op.call(
        _SSD, (x, dt, A, B, C, D, z, dt_bias), initial_state, output_final_state, cu_seqlens, tuple(options.items()),
        (("dt_softplus", dt_softplus), ("least_step", least), ("most_step", most)),
    )  # fmt: skip


# ---- arguments ---------------------------------------------------------------------------------------------------


def _of_tokens(g: Any, v: Any) -> Any:
    """Return decays of heads for each token, where they are fixed; what is wrong with them the checks say."""
    is_fixed = getattr(g, "ndim", 0) == 1 and getattr(v, "ndim", 0) > 2 and g.shape[0] == v.shape[-2]
    if not is_fixed:
        return g
    return (g if isinstance(g, Tensor) else tensors.from_any("g", g)).expand(v.shape[:-1])  # [..., H]
