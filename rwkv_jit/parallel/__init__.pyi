"""One sequence or one model over many GPUs: each name loads its module when it is used."""

# tools/stubs.py has written this.
# ruff: noqa
# fmt: off

from math import inf
from rwkv_jit.call.options import CallOptions, DecayOptions
from rwkv_jit.call.tensors import SupportsDLPack
from rwkv_jit.parallel.shard import Shard
from torch import Tensor
from typing import Literal, overload
from typing_extensions import Unpack
from rwkv_jit.nn.tensor_parallel import tensor_parallel as tensor_parallel
from rwkv_jit.parallel.recurrences import summary as summary
from rwkv_jit.parallel.shard import Shard as Shard
from rwkv_jit.parallel.shifting import token_shift as token_shift
from rwkv_jit.parallel.summaries import compose as compose
from rwkv_jit.parallel.summaries import merge as merge
from rwkv_jit.parallel.summaries import neutral as neutral

__all__ = [
    "Shard", "causal_conv1d", "compose", "delta_rule", "gated_delta_rule", "gated_delta_rule2", "gla", "hgrn2", "kda",
    "linear_attention", "merge", "neutral", "simple_gla", "ssd", "summary", "tensor_parallel", "token_shift", "wkv5",
    "wkv6", "wkv7"
]

@overload
def causal_conv1d(
    x: Tensor | SupportsDLPack, weight: Tensor | SupportsDLPack, bias: Tensor | SupportsDLPack | None = None, *,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    activation: Literal['silu'] | None = None,
) -> tuple[Tensor, None]:
    """Convolve every channel with a few tokens before, which other processes may have."""
@overload
def causal_conv1d(
    x: Tensor | SupportsDLPack, weight: Tensor | SupportsDLPack, bias: Tensor | SupportsDLPack | None = None, *,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[True],
    activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor | SupportsDLPack, weight: Tensor | SupportsDLPack, bias: Tensor | SupportsDLPack | None = None, *,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    activation: Literal['silu'] | None = None,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False, *,
    qk_norm: bool = False, beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity',
    **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """The delta rule over sequences that many processes share, with gradients."""
@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True], *,
    qk_norm: bool = False, beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity',
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    qk_norm: bool = False, beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity',
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, beta: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False, *,
    qk_norm: bool = False, beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity',
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """The gated delta rule over sequences that many processes share, with gradients."""
@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """The gated delta rule by channels over sequences that many processes share, with gradients."""
@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True], *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_delta_rule2(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, write_gate: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False, *,
    A_log: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None,
    lower_bound: float | None = None, qk_norm: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """Gated linear attention over sequences that many processes share, with gradients."""
@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """HGRN2 over sequences that many processes share, with gradients."""
@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True], **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn2(
    q: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """Kimi Delta Attention over sequences that many processes share, with gradients."""
@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def kda(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    beta: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, *, A_log: Tensor | SupportsDLPack | None = None,
    dt_bias: Tensor | SupportsDLPack | None = None, lower_bound: float | None = None, qk_norm: bool = False,
    beta_map: Literal['identity', 'sigmoid', 'twice_sigmoid'] = 'identity', **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """Linear attention over sequences that many processes share, with gradients."""
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True], **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """Scalar-gated linear attention over sequences that many processes share, with gradients."""
@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None, output_final_state: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def simple_gla(
    q: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, g: Tensor | SupportsDLPack,
    shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, *, D: Tensor | SupportsDLPack | None = None,
    z: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, None]:
    """The state space of Mamba-2 over sequences that many processes share, with gradients."""
@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], *, D: Tensor | SupportsDLPack | None = None,
    z: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], D: Tensor | SupportsDLPack | None = None,
    z: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(
    x: Tensor | SupportsDLPack, dt: Tensor | SupportsDLPack, A: Tensor | SupportsDLPack, B: Tensor | SupportsDLPack,
    C: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, *, D: Tensor | SupportsDLPack | None = None,
    z: Tensor | SupportsDLPack | None = None, dt_bias: Tensor | SupportsDLPack | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf), **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """RWKV-5 time mixing over sequences that many processes share, with gradients."""
@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv5(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: Literal[False] = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """RWKV-6 time mixing over sequences that many processes share, with gradients."""
@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None, *,
    output_final_state: Literal[True], **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6(
    r: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack,
    u: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None = None,
    output_final_state: bool = False, **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, None]:
    """RWKV-7 time mixing over sequences that many processes share, with gradients."""
@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, shard: Shard, initial_state: Tensor | SupportsDLPack | None,
    output_final_state: Literal[True], **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, *, output_final_state: Literal[True],
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def wkv7(
    r: Tensor | SupportsDLPack, w: Tensor | SupportsDLPack, k: Tensor | SupportsDLPack, v: Tensor | SupportsDLPack,
    a: Tensor | SupportsDLPack, b: Tensor | SupportsDLPack, shard: Shard,
    initial_state: Tensor | SupportsDLPack | None = None, output_final_state: bool = False,
    **options: Unpack[DecayOptions],
) -> tuple[Tensor, Tensor | None]: ...
