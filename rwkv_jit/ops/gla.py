"""Gated linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call import torch_op
from rwkv_jit.call.tensors import Array
from rwkv_jit.ops import wide_keys
from rwkv_jit.plain.reference import gla_ref
from rwkv_jit.schedules.table import OPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import DecayOptions

OP = torch_op.define(OPS["gla"], gla_ref)


def gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""Gated linear attention over sequences, with gradients to every input and to the initial state.

        S_t = S_{t-1} diag(d(g_t)) + v_t k_t^T;   y_t = scale S_t q_t        per head, S [V, K]

    Parameters
    ----------
    q, k, v : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v, float16, bfloat16 or float32
        Query, key and value, in memory and with the letters of `wkv7`. K and V may differ.
    g : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        Decay before the map that `decay` names; by default its logarithm.
    initial_state, output_final_state, cu_seqlens
        As `wkv7` takes them, but that states are (K, V), and in the vk layout (V, K).
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend. By default scale is K^-0.5, decay "log" and state_layout "kv".

    Returns
    -------
    y, final_state : as `wkv7` returns them, the state (N, H, K, V) or (N, H, V, K)

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
    return torch_op.call(
        OP, (q, k, v, g), initial_state, output_final_state, cu_seqlens, tuple(options.items()), wide_keys.in_parts
    )
