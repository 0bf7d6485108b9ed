"""The delta rules that share a key between reading, erasing and writing: `wkv7` with other operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from rwkv_jit.call import checks, tensors, torch_op
from rwkv_jit.call.options import CallOptions, DecayOptions
from rwkv_jit.call.tensors import Array
from rwkv_jit.schedules.legal import BetaMap
from rwkv_jit.schedules.table import DERIVED as OPS

_KDA, _GATED_DELTA_RULE, _DELTA_RULE, _GATED_DELTA_RULE2 = (
    torch_op.define(OPS[name]) for name in ("kda", "gated_delta_rule", "delta_rule", "gated_delta_rule2")
)


def _by_heads(dt_bias: Any, g: Any) -> Any:
    """Return what is added to the channels of all heads, by heads where it is flat; the checks say what is wrong."""
    shape = tuple(getattr(g, "shape", ()))[-2:]
    is_flat = getattr(dt_bias, "ndim", 0) == 1 and len(shape) == 2 and dt_bias.shape[0] == shape[0] * shape[1]
    return tensors.from_any("dt_bias", dt_bias).reshape(shape) if is_flat else dt_bias


def kda(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: BetaMap = "identity", **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Kimi Delta Attention over sequences, with gradients to every input and to the initial state.

        S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per head, with S [V, K]. B is the batch, T the tokens, G the key heads, H the value heads, K and V the head
    sizes of keys and values, N the number of sequences: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        Log-decay of each channel; raw with A_log.
    beta : torch.Tensor, shape (B, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    initial_state : torch.Tensor, shape (N, H, K, V) or (H, K, V), optional
        State before the first token, float16, bfloat16 or float32; zeros by default. Without N the same for every
        sequence. In the vk layout the last two sizes are (V, K).
    output_final_state : bool, default False
        Whether to return the state after the last token.
    cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
        Sequences packed along T with B = 1: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1].
    A_log : torch.Tensor, shape (H,), dtype of q or float32, optional
        With it g is raw: the log-decay is -exp(A_log) softplus(g + dt_bias).
    dt_bias : torch.Tensor, shape (H, K) or (H * K,), dtype of q or float32, optional
        Is added to the raw g; goes with A_log.
    lower_bound : float, optional
        Below 0, and goes with A_log: the log-decay is lower_bound sigmoid(exp(A_log) (g + dt_bias)) then. It is the
        `decay_bound` too, where none is given.
    qk_norm : bool, default False
        Whether q and k are first divided by sqrt(|x|^2 + 1e-6), per head.
    beta_map : {"identity", "sigmoid", "twice_sigmoid"}, default "identity"
        The map from beta to the rate; "twice_sigmoid" is 2 sigmoid(beta).
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend. By default scale is K^-0.5 and state_layout "kv"; decay is "log" alone.

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
    One kernel prepares the inputs of `wkv7`, with norms, gates and rates, and `wkv7` does the rest: its notes have
    precision and choice of kernels. These inputs are rounded to the dtype of q; computed log-decays are float32. Any
    decay is right. Besides what `wkv7` keeps between the passes, they are kept: for each token and value head 3 K
    numbers of the dtype of q, and one of float32 for each of K where A_log is given.

    On sm_90, calls with 16 bits and enough heads of 128 run dedicated kernels, which prepare no such inputs;
    with gradients, those with as many key heads as value heads. Besides inputs, y and final state these keep between
    the passes, for every 64 tokens of a head a state of 128 x 128 and two matrices of 64 x 64, and for each token and
    head the 128 numbers of v - S k, all of 16 bits.

    Results have the same bits in every run. A second derivative is an error. Under `torch.autocast` inputs are cast
    like those of `wkv7`; g and beta may stay float32. CPU tensors run plain torch, with one notice.

    References
    ----------
    Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.

    Examples
    --------
    >>> q, k = torch.randn(2, 2, 128, 4, 64, device="cuda")
    >>> v, g = torch.randn(2, 128, 4, 64, device="cuda"), -torch.rand(2, 128, 4, 64, device="cuda")
    >>> beta = torch.rand(2, 128, 4, device="cuda")
    >>> y, state = rwkv_jit.kda(q, k, v, g, beta, output_final_state=True, qk_norm=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    if dt_bias is not None:
        dt_bias = _by_heads(dt_bias, g)
    return torch_op.call(
        _KDA, (q, k, v, g, beta, A_log, dt_bias), initial_state, output_final_state, cu_seqlens,
        tuple(options.items()), traits=(("lower_bound", lower_bound), ("qk_norm", qk_norm), ("beta_map", beta_map)),
    )  # fmt: skip


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, *, A_log: Array | None = None,
    dt_bias: Array | None = None, qk_norm: bool = False, beta_map: BetaMap = "identity", **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The gated delta rule over sequences, with gradients to every input and to the initial state.

        S <- e^g S;   u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per head, with S [V, K]. The letters are those of `kda`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, T, H), dtype of q or float32
        Log-decay of each head; raw with A_log.
    beta : torch.Tensor, shape (B, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    initial_state, output_final_state, cu_seqlens, A_log, qk_norm, beta_map
        As `kda` takes them.
    dt_bias : torch.Tensor, shape (H,), dtype of q or float32, optional
        Is added to the raw g; goes with A_log.
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
    Prepared inputs, results, derivatives and `torch.autocast` are as of `kda`, but of these inputs are kept, for each
    token and value head, 3 K numbers of the dtype of q, and K of float32.

    Calls with 16 bits, head sizes up to 128 and enough heads run dedicated kernels in both directions, which compute
    norms, gates and rates, and take any decay. Besides inputs, y and final state these keep between the passes, for
    each token and value head V numbers of the dtype of v, K V / 64 more, and about 200 bytes.

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.

    Examples
    --------
    >>> q, k = torch.randn(2, 2, 128, 2, 64, device="cuda")
    >>> v = torch.randn(2, 128, 4, 64, device="cuda")
    >>> g, beta = -torch.rand(2, 128, 4, device="cuda"), torch.rand(2, 128, 4, device="cuda")
    >>> y, state = rwkv_jit.gated_delta_rule(q, k, v, g, beta, output_final_state=True, qk_norm=True)
    >>> y.shape, state.shape
    (torch.Size([2, 128, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    return torch_op.call(
        _GATED_DELTA_RULE, (q, k, v, g, beta, A_log, dt_bias), initial_state, output_final_state, cu_seqlens,
        tuple(options.items()), traits=(("qk_norm", qk_norm), ("beta_map", beta_map)),
    )  # fmt: skip


def delta_rule(
    q: Array, k: Array, v: Array, beta: Array, initial_state: Array | None = None, output_final_state: bool = False,
    cu_seqlens: Array | None = None, *, qk_norm: bool = False, beta_map: BetaMap = "identity",
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The delta rule over sequences, with gradients to every input and to the initial state.

        u = beta (v - S k);   S <- S + u k^T;   y = scale S q

    per head, with S [V, K]. The letters are those of `kda`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    beta : torch.Tensor, shape (B, T, H), dtype of q or float32
        Rate of erasing and writing, behind `beta_map`.
    initial_state, output_final_state, cu_seqlens, qk_norm, beta_map
        As `kda` takes them.
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
    Prepared inputs, results, derivatives and `torch.autocast` are as of `kda`, but of these inputs are kept, for each
    token and value head, 3 K numbers of the dtype of q, and K more.

    Calls with 16 bits, head sizes up to 128 and enough heads run dedicated kernels in both directions, which compute
    norms and rates. Besides inputs, y and final state these keep between the passes, for each token and value head
    V numbers of the dtype of v, K V / 64 more, and about 200 bytes.

    References
    ----------
    Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv:2406.06484.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 128, 4, 64, device="cuda")
    >>> beta = torch.rand(2, 128, 4, device="cuda")
    >>> y, _ = rwkv_jit.delta_rule(q, k, v, beta, qk_norm=True)
    >>> y.shape
    torch.Size([2, 128, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    return torch_op.call(
        _DELTA_RULE, (q, k, v, beta), initial_state, output_final_state, cu_seqlens, tuple(options.items()),
        traits=(("qk_norm", qk_norm), ("beta_map", beta_map)),
    )  # fmt: skip


def gated_delta_rule2(
    q: Array, k: Array, v: Array, g: Array, beta: Array, write_gate: Array, initial_state: Array | None = None,
    output_final_state: bool = False, cu_seqlens: Array | None = None, *, A_log: Array | None = None,
    dt_bias: Array | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""The gated delta rule by channels over sequences, with gradients to every input and to the initial state.

        S <- S diag(e^g);   u = write_gate v - S (beta k);   S <- S + u k^T;   y = scale S q

    per head, with S [V, K]. The letters are those of `kda`.

    Parameters
    ----------
    q, k : torch.Tensor, shape (B, T, G, K), float16, bfloat16 or float32
        Query and key. Any strides; where the last one is not 1, a copy is made.
    v : torch.Tensor, shape (B, T, H, V), dtype of q
        Value. Value head h has key head h // (H // G).
    g : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        Log-decay of each channel; raw with A_log.
    beta : torch.Tensor, shape (B, T, H, K), dtype of q or float32
        How much of each channel of the key is erased.
    write_gate : torch.Tensor, shape (B, T, H, V), dtype of q
        How much of each value is written.
    initial_state, output_final_state, cu_seqlens, A_log, dt_bias, lower_bound, qk_norm
        As `kda` takes them.
    **options
        By name, as `DecayOptions` says: scale, decay, decay_bound, state_layout, checkpoint_interval, chunk_len,
        num_threads, backend. By default scale is K^-0.5 and state_layout "kv"; decay is "log" alone.

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
    Prepared inputs, results, derivatives and `torch.autocast` are as of `kda`, but of these inputs are kept, for each
    token and value head, 3 K numbers of the dtype of q and V more, and K of float32 where A_log is given. There are no
    dedicated kernels.

    References
    ----------
    Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, with gates for channels as in
    NVIDIA's GDN-2.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 128, 4, 64, device="cuda")
    >>> g, beta, write_gate = -torch.rand(2, 128, 4, 64, device="cuda"), *torch.rand(2, 2, 128, 4, 64, device="cuda")
    >>> y, _ = rwkv_jit.gated_delta_rule2(q, k, v, g, beta, write_gate, qk_norm=True)
    >>> y.shape
    torch.Size([2, 128, 4, 64])
    """
    if qk_norm is not True and qk_norm is not False:
        qk_norm = checks.check_flag("qk_norm", qk_norm)
    if dt_bias is not None:
        dt_bias = _by_heads(dt_bias, g)
    return torch_op.call(
        _GATED_DELTA_RULE2, (q, k, v, g, beta, write_gate, A_log, dt_bias), initial_state, output_final_state,
        cu_seqlens, tuple(options.items()), traits=(("lower_bound", lower_bound), ("qk_norm", qk_norm)),
    )  # fmt: skip
