"""RWKV-5 time mixing."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import torch_op
from rwkv_jit.call.options import DecayOptions
from rwkv_jit.call.tensors import Array
from rwkv_jit.ops import wide_keys
from rwkv_jit.schedules.table import OPS

OP = torch_op.define(OPS["wkv5"], in_parts=wide_keys.in_parts)


def wkv5(
    r: Array, k: Array, v: Array, w: Array, u: Array, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-5 time mixing over sequences, with gradients to every input and to the initial state.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per head and token, with S [V, K]. B is the batch, T the tokens, H the heads, K and V the head sizes of keys and
    values (equal or not), N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    r, k : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Receptance and key. Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of
        other libraries.
    v : torch.Tensor, shape (B, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, the same for every token.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    initial_state, output_final_state, cu_seqlens
        As `wkv7` takes them.
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend.

    Returns
    -------
    y, final_state
        As `wkv7` returns them.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    As of `wkv6`. dw is added over tokens and sequences in float32, too.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> r, k = (torch.randn(2, 128, 4, 48, device="cuda") for _ in range(2))
    >>> v = torch.randn(2, 128, 4, 96, device="cuda")
    >>> w, u = (torch.randn(4, 48, device="cuda") for _ in range(2))
    >>> y, state = rwkv_jit.wkv5(r, k, v, w, u, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 96]), torch.Size([2, 4, 96, 48]))
    """
    return torch_op.call(OP, (r, k, v, w, u), initial_state, output_final_state, cu_seqlens, tuple(options.items()))
