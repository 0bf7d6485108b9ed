"""One sequence or one model over many GPUs: each name loads its module when it is used."""

# tools/stubs.py has written this.
# ruff: noqa
# fmt: off

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
    "Shard", "compose", "gla", "linear_attention", "merge", "neutral", "summary", "tensor_parallel", "token_shift",
    "wkv5", "wkv6", "wkv7"
]

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
