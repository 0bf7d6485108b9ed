"""Gated linear attention."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import torch_op
from rwkv_jit.call.options import DecayOptions
from rwkv_jit.call.tensors import Array
from rwkv_jit.ops import wide_keys
from rwkv_jit.schedules.table import OPS

OP = torch_op.define(OPS["gla"], in_parts=wide_keys.in_parts)


def gla(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None, output_final_state: bool = False,
    cu_seqlens: Array | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Gated linear attention over sequences, with gradients to every input and to the initial state.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per head and token, with S [V, K]. B is the batch, T the tokens, H the heads, K and V the head sizes of keys and
    values (equal or not), N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Query and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other
        libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value.
    g : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        Decay before the map that `decay` names; by default its logarithm.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token, float16, bfloat16 or float32; zeros by default. Without N the same for every
        sequence. In the vk layout the last two sizes are (V, K).
    output_final_state, cu_seqlens
        As `wkv7` takes them.
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend. By default scale is K^-0.5, decay "log" and state_layout "kv".

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, K, V) or (N, H, V, K), or None
        Dtype of `initial_state`, float32 without one. For T = 0 a differentiable copy of the initial state.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    As of `wkv6`, with q for r and g for w.

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> q, k, x = (torch.randn(2, 128, 4, 48, device="cuda") for _ in range(3))
    >>> v, g = torch.randn(2, 128, 4, 96, device="cuda"), torch.nn.functional.logsigmoid(x) / 16
    >>> y, state = rwkv_jit.gla(q, k, v, g, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 96]), torch.Size([2, 4, 48, 96]))
    """
    return torch_op.call(OP, (q, k, v, g), initial_state, output_final_state, cu_seqlens, tuple(options.items()))
