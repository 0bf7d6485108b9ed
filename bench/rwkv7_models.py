"""The RWKV-7 that training is measured with: ours, and FLA's of the same parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rwkv_jit
from rwkv_jit.nn import RWKV7

HEAD_SIZE = 64
# What FLA calls the parts of a name, in time mixing and elsewhere.
_PARTS = {
    "emb": "model.embeddings", "blocks": "model.layers", "ln_out": "model.norm", "head": "lm_head", "ln0": "pre_norm",
    "ln1": "attn_norm", "ln2": "ffn_norm", "att": "attn",
}  # fmt: skip
_OF_TIME = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
_OF_LOW_RANK = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}  # by the digit behind the letter
_FLAT = ("att.k_k", "att.k_a", "ffn.x_k")  # [1, 1, width] here, [width] there

Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens and the same one token on


class Sizes(NamedTuple):
    """A model, and the tokens of a step."""

    layers: int
    width: int
    batch: int
    tokens: int
    vocabulary: int


def our_model(sizes: Sizes, device: str, dtype: torch.dtype, kind: Any = RWKV7) -> Any:
    """Return a model with its initial values, the same ones in every call."""
    torch.manual_seed(0)
    return kind(sizes.vocabulary, sizes.width, sizes.layers, HEAD_SIZE, device=device, dtype=dtype)


# ---- FLA's -------------------------------------------------------------------------------------------------------


def name_in_fla(name: str) -> str:
    """Return what FLA calls a parameter with an official name."""
    *path, last = name.split(".")
    if low_rank := re.fullmatch(r"([wavg])([012])", last):
        last = f"{low_rank[1]}_lora.lora.{_OF_LOW_RANK[low_rank[2]]}"
    parts = _PARTS | _OF_TIME if "ffn" not in path else _PARTS
    return ".".join(parts.get(part, part) for part in [*path, last])


def state_in_fla(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return official parameters as FLA has them: by its names, low-rank matrices transposed."""
    made = {}
    for name, x in state.items():
        if name.endswith(_FLAT) or re.search(r"\.[wav]0$", name):
            x = x.flatten()
        elif re.search(r"\.[wavg][12]$", name):
            x = x.T
        made[name_in_fla(name)] = x.detach().clone(memory_format=torch.contiguous_format)
    return made


def fla_model(ours: RWKV7, **options: Any) -> nn.Module:
    """Return FLA's model with copies of the parameters of ours; `options` go to its configuration.

    Raises RuntimeError where a parameter is missing, left over or of another shape.
    """
    models = import_module("fla.models.rwkv7")
    vocabulary, width = ours.emb.weight.shape
    block: Any = ours.blocks[-1]
    config = models.RWKV7Config(
        hidden_size=width, num_hidden_layers=len(ours.blocks), head_dim=ours.head_size, vocab_size=vocabulary,
        intermediate_size=block.ffn.key.weight.shape[0], **_ranks(block.att), use_cache=False, **options,
    )  # fmt: skip
    return _filled(models.RWKV7ForCausalLM, state_in_fla(ours.state_dict()), config=config).train()


def fla_time_mix(ours: Any, **options: Any) -> nn.Module:
    """Return FLA's time mixing with copies of the parameters of ours."""
    begin = "blocks.0.att."
    state = state_in_fla({begin + name: x for name, x in ours.state_dict().items()})
    return _filled(
        import_module("fla.layers.rwkv7").RWKV7Attention,
        {name.removeprefix(name_in_fla(begin)): x for name, x in state.items()},
        hidden_size=ours.width, head_dim=ours.head_size, layer_idx=ours.layer, num_hidden_layers=ours.layers,
        **_ranks(ours), **options,
    )  # fmt: skip


def _filled(make: Callable[..., nn.Module], state: Mapping[str, Tensor], **options: Any) -> nn.Module:
    with torch.device("meta"):
        module = make(**options)
    module.load_state_dict(state, assign=True)
    return module


def _ranks(time_mix: Any) -> dict[str, int]:
    names = {"w": "decay", "g": "gate", "a": "a", "v": "v"}
    return {f"{names[letter]}_low_rank_dim": rank for letter, rank in time_mix.ranks.items()}


def fla_loss(model: nn.Module) -> Loss:
    """Return the loss of FLA's model, as a function like `RWKV7.loss`."""
    return lambda tokens, targets: model(tokens, shift_labels=targets, use_cache=False).loss


def groups_in_fla(ours: RWKV7, theirs: nn.Module, **rates: float) -> list[dict[str, Any]]:
    """Return the groups of `RWKV7.param_groups` with FLA's parameters."""
    names = {id(x): name_in_fla(name) for name, x in ours.named_parameters()}
    held = dict(theirs.named_parameters())
    return [{**each, "params": [held[names[id(x)]] for x in each["params"]]} for each in ours.param_groups(**rates)]


@contextmanager
def with_our_wkv7() -> Iterator[None]:
    """Let FLA's time mixing call our `wkv7` inside the block."""

    def ours(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **_: Any) -> tuple[Tensor, None]:
        return rwkv_jit.wkv7(r, w, k, v, a, b, decay="log")[0], None

    module: Any = import_module("fla.layers.rwkv7")
    theirs = module.chunk_rwkv7
    module.chunk_rwkv7 = ours
    try:
        yield
    finally:
        module.chunk_rwkv7 = theirs
