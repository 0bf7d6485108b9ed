"""RWKV-6 time mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rwkv_jit.call import torch_op
from rwkv_jit.call.tensors import Array
from rwkv_jit.ops import wide_keys
from rwkv_jit.plain.reference import wkv6_ref
from rwkv_jit.schedules.table import OPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rwkv_jit.call.options import DecayOptions

OP = torch_op.define(OPS["wkv6"], wkv6_ref)


def wkv6(
    r: Array,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:
    r"""RWKV-6 time mixing over sequences, with gradients to every input and to the initial state.

        y_t = scale (S_{t-1} r_t + (sum_j u_j r_tj k_tj) v_t);   S_t = S_{t-1} diag(d(w_t)) + v_t k_t^T

    per head, with S [V, K].

    Parameters
    ----------
    r, k, v : torch.Tensor, shape (B, T, H, K), and (B, T, H, V) of v, float16, bfloat16 or float32
        Receptance, key and value, in memory and with the letters of `wkv7`. K and V may differ.
    w, u : torch.Tensor, shape (B, T, H, K), and (H, K) of u, dtype of r or float32
        Decay before the map that `decay` names, and bonus of the current token.
    initial_state, output_final_state, cu_seqlens
        As `wkv7` takes them.
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend.

    Returns
    -------
    y, final_state : as `wkv7` returns them

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError, NvrtcNotFoundError
        As `wkv7`.

    Notes
    -----
    As of `wkv7`, but for errors and memory; u may stay float32 too. The tensor cores: errors in bfloat16 are below
    6e-3, of dw 8e-3, in float16 an eighth of these. Between the passes the recurrent kernels keep 4 B H V K ceil(T /
    checkpoint_interval) bytes, and the tensor cores 2 B H V K ceil(T / chunk_len), with V and K rounded up to multiples
    of 32, and 4 K more for each head of a segment. For heads that blocks share the backward needs as many again while
    it runs. du is added over tokens and sequences in float32.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> r, k, w = (torch.randn(2, 128, 4, 48, device="cuda") for _ in range(3))
    >>> v, u = torch.randn(2, 128, 4, 96, device="cuda"), torch.randn(4, 48, device="cuda")
    >>> y, state = rwkv_jit.wkv6(r, k, v, w, u, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 96]), torch.Size([2, 4, 96, 48]))
    """
    return torch_op.call(
        OP, (r, k, v, w, u), initial_state, output_final_state, cu_seqlens, tuple(options.items()), wide_keys.in_parts
    )
