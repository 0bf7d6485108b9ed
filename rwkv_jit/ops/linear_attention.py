"""Linear attention, without any decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import checks, sharding, tensors, torch_op
from rwkv_jit.call.options import CallOptions, complete
from rwkv_jit.call.tensors import Array
from rwkv_jit.ops import wide_keys
from rwkv_jit.schedules.table import OPS

OP = torch_op.define(OPS["linear_attention"], in_parts=wide_keys.in_parts)


def linear_attention(
    q: Array, k: Array, v: Array, initial_state: Array | tuple[Array, Array] | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, normalize: bool = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Any]:  # fmt: skip
    r"""Linear attention over sequences, with gradients to every input and to the initial state.

        S <- S + v k^T;   y = scale S q

    per head and token, with S [V, K]; with `normalize` y = scale S q / (scale z . q + 1e-10), where z is the sum of the
    keys so far. B is the batch, T the tokens, H the heads, K and V the head sizes of keys and values (equal or not),
    N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token, float16, bfloat16 or float32; zeros by default. Without N the same for every
        sequence. In the vk layout the last two sizes are (V, K). With `normalize` a pair of this and z, the sum of the
        keys, (N, H, K) or (H, K) in the same dtype.
    output_final_state, cu_seqlens
        As `wkv7` takes them.
    normalize : bool, default False
        Whether y is divided by what it would be for values of 1.
    **options
        By name, as `CallOptions` says: scale, state_layout, checkpoint_interval, chunk_len, num_threads, backend. By
        default scale is K^-0.5 and state_layout "kv".

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, K, V) or (N, H, V, K), or None
        Dtype of `initial_state`, float32 without one. For T = 0 a differentiable copy of the initial state. With
        `normalize` a pair, as the initial state is.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    Precision, and what is kept between the passes, are as of `wkv6`. On the tensor cores errors of all gradients are
    below 6e-3 in bfloat16 and 8e-4 in float16; about half as many bytes are kept where a state is saved every 64
    tokens.

    With `normalize` the op runs on values with up to eight more columns, one of them ones, and y is divided by what
    comes out of that one, in the dtype of v: errors then are about twice as large in float16 and bfloat16, and grow
    where z . q is near 0, as keys and queries may not all be positive.

    Results, derivatives, `torch.autocast`, DTensors, the first call and CPU tensors are as of `wkv6`, with q for r.

    References
    ----------
    Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention,
    arXiv:2006.16236.

    Examples
    --------
    >>> q, k = (torch.rand(2, 128, 4, 48, device="cuda") for _ in range(2))
    >>> v = torch.randn(2, 128, 4, 96, device="cuda")
    >>> y, state = rwkv_jit.linear_attention(q, k, v, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 96]), torch.Size([2, 4, 48, 96]))
    >>> y, (state, z) = rwkv_jit.linear_attention(q, k, v, output_final_state=True, normalize=True)
    >>> z.shape
    torch.Size([2, 4, 48])
    """
    if not checks.check_flag("normalize", normalize):
        return torch_op.call(OP, (q, k, v), initial_state, output_final_state, cu_seqlens, tuple(options.items()))

    if sharding.any_distributed((q, k, v)):
        raise TypeError("q: normalize=True takes no DTensors; pass to_local() of each")
    cast = torch_op.under_autocast(OP.op, (q, k, v))
    if cast is not None:
        with tensors.exactly(cast[0]):
            q, k, v = cast
            return linear_attention(q, k, v, initial_state, output_final_state, cu_seqlens, True, **options)
    whole = complete(OP.op, options, q)
    checks.check_options(OP.op, whole)
    state, z = _pair(initial_state)
    layout, backend = whole["state_layout"], whole["backend"]
    (q, k, v), state, cu_seqlens = checks.check_tensors(OP.op, (q, k, v), state, cu_seqlens, layout, backend)
    size, value_dim = v.shape[-1], -1 if layout == "kv" else -2  # the dimension of states
    if state is not None:
        state = _with_total(state, _checked_z(z, state, value_dim), value_dim)
    wide = _with_total(v, torch.ones_like(v[..., 0]), -1)
    y, final = torch_op.call(OP, (q, k, wide), state, output_final_state, cu_seqlens, tuple(options.items()))
    exact = y.to(torch.promote_types(y.dtype, torch.float32))
    y = (exact[..., :size] / (exact[..., size : size + 1] + 1e-10)).to(v.dtype)
    if final is None:
        return y, None
    return y, (final.narrow(value_dim, 0, size).contiguous(), final.select(value_dim, size).contiguous())


def _with_total(x: Tensor, total: Tensor, dim: int) -> Tensor:
    """Return `x` with `total` behind it along `dim`, and zeros up to a multiple of 8: kernels read several at once."""
    zeros = torch.zeros_like(total).unsqueeze(dim)
    return torch.cat([x, total.unsqueeze(dim), *[zeros] * (7 - x.shape[dim] % 8)], dim)


def _pair(initial_state: Any) -> tuple[Any, Any]:
    if initial_state is None:
        return None, None
    if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
        got = type(initial_state).__name__
        raise TypeError(f"initial_state: expected a pair (S, z) with normalize=True, got {got}")
    state, z = initial_state
    if (state is None) != (z is None):
        missing, given = ("S", "z") if state is None else ("z", "S")
        raise ValueError(f"initial_state: expected both S and z, or None for both, got {given} without {missing}")
    return state, z


def _checked_z(given: Any, state: Tensor, value_dim: int) -> Tensor:
    z = tensors.from_any("initial_state[1]", given)
    want = state.select(value_dim, 0).shape
    if z.shape != want:
        raise ValueError(f"initial_state[1]: expected shape {list(want)} like the state's keys, got {list(z.shape)}")
    if z.dtype != state.dtype:
        raise TypeError(f"initial_state[1]: expected {state.dtype} like the state, got {z.dtype}")
    if z.device != state.device:
        raise ValueError(f"initial_state[1]: expected device {state.device}, got {z.device}")
    return z
