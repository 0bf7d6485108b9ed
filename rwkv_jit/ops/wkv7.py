"""RWKV-7 time mixing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rwkv_jit.ops import boundary
from rwkv_jit.reference import wkv7_ref

OP = boundary.define("wkv7", ("r", "w", "k", "v", "a", "b"), (), wkv7_ref)


def wkv7(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    scale: float = 1.0,
    decay: str = "raw",
    decay_bound: float | None = None,
    state_layout: str = "vk",
    checkpoint_interval: int = 64,
    chunk_len: int | None = None,
    num_threads: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""RWKV-7 time mixing over sequences, with gradients to every input and to the initial state.

        sa_t = S_{t-1} a_t;   S_t = S_{t-1} diag(d(w_t)) + sa_t b_t^T + v_t k_t^T;   y_t = scale S_t r_t

    per head, with S [V, K]. B is the batch, T the tokens, H the heads, K and V the head sizes of keys and values (any,
    usually equal), N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    r, k, a, b : torch.Tensor, shape (B, T, H, K), float16, bfloat16 or float32
        Receptance, key, and the two sides of the state's rank-one correction (in the model a = -kk, b = kk * a').
        Any strides; where the last one is not 1, a copy is made. Arrays of other libraries come in through DLPack.
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
    scale : float, default 1.0
        Factor of y.
    decay : {"raw", "sigmoid", "log", "direct"}, default "raw"
        d(w): exp(-exp(w)), exp(-e^(-1/2) sigmoid(w)), exp(w), or w itself.
    decay_bound : float, optional
        A promise that every log d is at least this negative number: -0.61 for the decays of a model in "raw". The
        chunked kernels can take what decays by e^-64 or less in half a chunk. Where the promise says so, or "sigmoid",
        they take it without looking, and give NaN where it is broken; a shorter chunk is taken where that keeps it.
        Otherwise they look, and the recurrent kernels compute heads of sequences with stronger decays once more: any
        decay is right.
    state_layout : {"vk", "kv"}, default "vk"
        Order of the last two dimensions of the states.
    checkpoint_interval : int, default 64
        Tokens between the states that the recurrent kernels save for the backward. The chunked kernels save one every
        `chunk_len` tokens, in bfloat16.
    chunk_len : int, optional
        Tokens that a block works on at once: 1, 2, 4, 8 or 16 in the recurrent kernels, 16 or 32 in the chunked ones,
        32 or 64 in those for head sizes above 128.
        Chosen by the head size, the GPU and whether gradients are wanted by default, or as `rwkv-jit tune` measured.
    num_threads : int, optional
        Threads of a block: 32, 64, 128 or 256 in the recurrent kernels; in the chunked ones of the forward, a multiple
        of 32 from 64 to 512 and at least the head size, while their backward has one choice; above head size 128 those
        of the kernel that carries the state, one of those that the error names. Chosen by the head size by default,
        or as tuned where `chunk_len` is not given either.
    backend : {"auto", "recurrent", "chunked", "split", "reference"}, default "auto"
        "recurrent" and "chunked" are CUDA kernels, fp32 and tensor cores; "split" runs the chunked ones on segments of
        the sequences side by side, or for head sizes above 128 others that share a head between blocks; "reference" is
        plain torch. "auto" takes the reference for tensors that are not on a GPU; the chunked kernels for float16 and
        bfloat16 from sm_80 on, head sizes up to 128 with K at most twice V and 32 tokens a sequence on
        average, split where there are few heads and no cu_seqlens and T makes 4 segments or more of at least 512 tokens
        and a multiple of 32; the same by "split" for K or V above 128 up to 1024; and the recurrent ones for everything
        else. The choice goes by the batch too: name a backend, its
        chunk_len and num_threads for results that do not.

    Returns
    -------
    y : torch.Tensor, shape (B, T, H, V), dtype of v
    final_state : torch.Tensor, shape (N, H, V, K) or (N, H, K, V), or None
        Dtype of `initial_state`, float32 without one. For T = 0 a differentiable copy of the initial state.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        No kernel for this `chunk_len` or `num_threads`, with the nearest legal value; or a call that the `backend`
        cannot do, with what is in its way.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    The recurrent kernels: arithmetic, state and saved states are float32. Relative L2 error against float64 on the
    same rounded inputs, y and gradients: below 5e-6 in float32; below 3e-3 in float16 and bfloat16, which is the
    rounding of the outputs. The backward recomputes the states forward from the saved ones and never divides by the
    decay, so any decay is safe. It keeps 4 B H V (T + K ceil(T / checkpoint_interval)) bytes between the passes.

    The chunked kernels: products of bfloat16 operands with float32 sums, the state in float32. Relative L2 errors,
    measured on an H200 in bfloat16 and float16: y 3.5e-3; dr, dk, dv and dw up to 4.2e-3; da and db 5.4e-3; with decays
    near 1 y 4.2e-3, dw 4.9e-3, da and db 6.0e-3, and 2.5e-2 where keys repeat. 2 B H V K ceil(T / chunk_len) bytes are
    kept between the passes, with V and K rounded up to multiples of 32. Above head size 128 with multiples of 64 (K of
    128 above 256, of 256 above 512), and beside them B H T (8 K + 2 V) bytes and some 350 a token and head; a forward
    without gradients needs B H T (8 K + 350) bytes while it runs.

    Where the decays are looked at, the backward needs what the recurrent kernels keep while it runs: there they repeat
    their forward. Their work is that of the heads they compute, and errors are those of the kernels that computed a
    head.

    Results are the same bit for bit from run to run. A second derivative is an error.

    Under `torch.autocast` r, k, v, a and b are cast to its dtype as torch's own ops cast theirs; w may stay
    float32, and states keep their dtype. Forward-mode derivatives (`torch.func.jvp`, `jacfwd`) are there for CPU
    tensors and backend="reference"; of kernels they are an error. DTensors may be replicated or sharded over the
    batch or the heads.

    The first call with a head size, dtype and decay compiles for this GPU and stores the result on disk. CPU tensors
    run the reference, with one notice.

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
    return boundary.call(
        OP, (r, w, k, v, a, b), initial_state, output_final_state, cu_seqlens, scale, decay, decay_bound, state_layout,
        checkpoint_interval, chunk_len, num_threads, backend,
    )  # fmt: skip
