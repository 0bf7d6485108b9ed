"""RWKV-7 time mixing."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import torch_op
from rwkv_jit.call.options import DecayOptions
from rwkv_jit.call.tensors import Array
from rwkv_jit.schedules.table import OPS

OP = torch_op.define(OPS["wkv7"])


def wkv7(
    r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-7 time mixing over sequences, with gradients to every input and to the initial state.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per head and token, with S [V, K]. B is the batch, T the tokens, H the heads, K and V the head sizes of keys and
    values (usually equal), N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    r, k, a, b : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Receptance, key, and the two sides of the state's rank-one correction (in the model a = -kk, b = kk * a').
        Any strides; if the last one is not 1, the input is copied. DLPack hands over arrays of other libraries.
    w : torch.Tensor, shape (B, T, H, K), dtype of r or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (B, T, H, V), dtype of r
        Value.
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
        No kernel for this `chunk_len` or `num_threads`, with the legal values or the nearest one; or a call that the
        `backend` cannot do.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    The recurrent kernels: arithmetic, state and saved states are float32. Relative L2 error against float64 on the
    same rounded inputs, y and gradients: below 5e-6 in float32; below 3e-3 in float16 and bfloat16, which is the
    rounding of the outputs. The backward recomputes the states forward from the saved ones and never divides by the
    decay, so any decay is safe. It keeps 4 B H V (T + K ceil(T / checkpoint_interval)) bytes between the passes.

    The chunked kernels: products of operands of the inputs' dtype with float32 sums, the state in float32. Relative L2
    errors, measured on an H200 in bfloat16: y 3.5e-3; dr, dk, dv and dw up to 4.2e-3; da and db 5.4e-3; with decays
    near 1 y 4.2e-3, dw 4.9e-3, da and db 6.0e-3, and 2.5e-2 where keys repeat. In float16 an eighth of these, as long
    as products and states stay within its range (`CallOptions`). 2 B H V K ceil(T / chunk_len) bytes are kept between
    the passes, with V and K rounded up to multiples of 32. Above head size 128 with multiples of 64 (K of 128 above
    256, of 256 above 512), and beside them B H T (8 K + 2 V) bytes and some 350 a token and head; a forward without
    gradients needs B H T (8 K + 350) bytes while it runs, and so does that of few smaller heads where it is faster.

    Results have the same bits in every run. A second derivative is an error.

    Under `torch.autocast` r, k, v, a and b are cast to its dtype like the inputs of torch's ops; w may stay
    float32, and states keep their dtype. Forward-mode derivatives (`torch.func.jvp`, `jacfwd`) work for CPU tensors and
    backend="reference"; kernels raise an error. DTensors may be replicated or sharded over the batch or the heads.

    The first call with a head size, dtype and decay compiles for this GPU and stores the result on disk. CPU tensors
    run plain torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> r, w, k, v, a, b = (torch.randn(2, 128, 4, 40, device="cuda") * 0.2 for _ in range(6))
    >>> y, state = rwkv_jit.wkv7(r, w, k, v, a, b, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 40]), torch.Size([2, 4, 40, 40]))
    """
    return torch_op.call(OP, (r, w, k, v, a, b), initial_state, output_final_state, cu_seqlens, tuple(options.items()))
