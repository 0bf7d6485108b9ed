"""RWKV-4 time mixing."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from rwkv_jit.call import torch_op
from rwkv_jit.call.tensors import Array
from rwkv_jit.kernels.errors import unexpected
from rwkv_jit.schedules.legal import Wkv4Backend, Wkv4Decay
from rwkv_jit.schedules.table import OPS

OP = torch_op.define(OPS["wkv4"])


def wkv4(
    w: Array, u: Array, k: Array, v: Array, initial_state: Array | None = None, output_final_state: bool = False,
    decay: Wkv4Decay = "raw", backend: Wkv4Backend = "auto", **_unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""RWKV-4 time mixing over sequences, with gradients to every input and to the initial state.

        y_t = (num_t + e^(u + k_t) v_t) / (den_t + e^(u + k_t))
        num_(t+1) = e^d num_t + e^(k_t) v_t;   den_(t+1) = e^d den_t + e^(k_t)

    per channel, with the log-decay d = -exp(w), or w itself. B is the batch, T the tokens, C the channels.

    Parameters
    ----------
    w, u : torch.Tensor, shape (C,), dtype of k or float32
        Decay (`time_decay` of the models), read as `decay` says, and bonus of the current token (`time_first`). Arrays
        of other libraries come in through DLPack.
    k, v : torch.Tensor, shape (B, T, C), float16, bfloat16 or float32
        Key, of any size, and value. Any strides; if the last one is not 1, the input is copied.
    initial_state : torch.Tensor, shape (B, 3, C) or (3, C), float32, optional
        num, den and max before the first token: the sums are e^max num and e^max den. 0, 0 and -1e38 by default. den
        must not be negative, and num be 0 where den is. Without B the same for every row.
    output_final_state : bool, default False
        Whether to return the state after the last token.
    decay : {"raw", "log"}, default "raw"
        What w is: "raw" the logarithm of the negative log-decay, as models keep it; "log" the log-decay.
    backend : {"auto", "recurrent", "split", "reference"}, default "auto"
        "recurrent" is a CUDA thread for each channel of a row, "split" one for each of several parts of the tokens,
        which are looked at twice; "reference" is plain torch. "auto" takes the reference for tensors that are not on a
        GPU, split where B C threads would leave most of it idle and the tokens make 4 parts of at least 64, else
        recurrent. The choice depends on the batch too: name a backend for results that do not.

    Returns
    -------
    y : torch.Tensor, shape (B, T, C), dtype of v
    final_state : torch.Tensor, shape (B, 3, C), float32, or None
        max is the largest exponent so far. For T = 0 a differentiable copy of the initial state.

    Raises
    ------
    TypeError, ValueError, UnsupportedConfigError
        As `wkv7`.
    RwkvJitError, NvrtcNotFoundError
        As `shift_mix`.

    Notes
    -----
    Arithmetic, state and saved states are float32, with the larger of two exponents taken out: no key and no decay
    overflows. Relative L2 error against float64 on the same rounded inputs, y and gradients: below 1e-5 in float32,
    with keys of 30 times the usual size too; below 3e-3 in float16 and bfloat16, which is the rounding of the outputs.

    The backward recomputes the states forward from saved ones: 12 B C ceil(T / 16) bytes are kept between the passes.
    What it adds up are differences of values from their running mean, so that nothing cancels. dw and du are summed
    over rows and parts in float32. The gradient of max is that of num times num and of den times den, and of the final
    max where it comes from the initial one.

    Results have the same bits in every run. A second derivative is an error. Under `torch.autocast` k and v are cast to
    its dtype like the inputs of torch's ops; w and u may stay float32, and the state keeps its dtype. Forward-mode
    derivatives (`torch.func.jvp`, `jacfwd`) work for CPU tensors and backend="reference"; kernels raise an error.
    DTensors may be replicated or sharded over the batch or the channels.

    The first call with a dtype and decay compiles for this GPU and stores the result on disk. CPU tensors run the
    reference, with one notice.

    References
    ----------
    Peng et al., RWKV: Reinventing RNNs for the Transformer Era, arXiv:2305.13048.

    Examples
    --------
    >>> k, v = (torch.randn(2, 128, 96, device="cuda") for _ in range(2))
    >>> w, u = torch.linspace(-5, 1, 96, device="cuda"), torch.zeros(96, device="cuda")
    >>> y, state = rwkv_jit.wkv4(w, u, k, v, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 96]), torch.Size([2, 3, 96]))
    """
    if _unknown:
        raise unexpected("wkv4", next(iter(_unknown)))
    options = ("decay", decay), ("backend", backend)
    return torch_op.call(OP, (w, u, k, v), initial_state, output_final_state, None, options)
