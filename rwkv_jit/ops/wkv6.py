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
    w : torch.Tensor, shape (B, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    initial_state : torch.Tensor, shape (N, H, V, K) or (H, V, K), optional
        State before the first token, float16, bfloat16 or float32; zeros by default. Without N the same for every
        sequence. In the kv layout the last two sizes are (K, V).
    output_final_state : bool, default False
        Whether to return the state after the last token.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Sequences packed along T with B = 1: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1], which may be
        none. Its values are read in every call; on a GPU they are checked once per tensor, with one copy to the host,
        and clamped by the kernels.
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, V, K) or (N, H, K, V), or None
        Dtype of `initial_state`, float32 without one. For T = 0 a differentiable copy of the initial state.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        No kernel for this `chunk_len` or `num_threads`, with the legal values; or a call that the `backend` cannot do.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    The recurrent kernels: arithmetic, state and saved states are float32. Relative L2 error against float64 on the
    same rounded inputs, y and gradients: below 5e-6 in float32; below 3e-3 in float16 and bfloat16, which is the
    rounding of the outputs. The backward recomputes the states forward from the saved ones and never divides by
    the decay, so any decay is safe. It keeps 4 B H V K ceil(T / checkpoint_interval) bytes between the passes.

    The tensor cores: products of operands of the inputs' dtype with float32 sums, the state in float32. Relative L2
    errors in bfloat16 are below 6e-3, of dw 8e-3; in float16 an eighth of these, as long as products and states stay
    within its range (`CallOptions`). 2 B H V K ceil(T / chunk_len) bytes are kept between the passes, with V and K
    rounded up to multiples of 32; for heads that blocks share the backward needs as many again while it runs. Segments
    keep 4 K bytes more for each of their heads.

    Results are the same bit for bit from run to run. du is added over tokens and sequences in float32. A second
    derivative is an error.

    Under `torch.autocast` r, k and v are cast to its dtype like the inputs of torch's ops; w and u may stay
    float32, and states keep their dtype. Forward-mode derivatives (`torch.func.jvp`, `jacfwd`) work for CPU tensors and
    backend="reference"; kernels raise an error. DTensors may be replicated or sharded over the batch or the heads.

    The first call with a head size, dtype and decay compiles for this GPU and stores the result on disk. CPU tensors
    run plain torch, with one notice.

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
