"""RWKV-7 ("Goose", x070) over slots of a pool that a serving engine owns. It imports no engine.

    python -m rwkv7_slots FILE FOLDER

writes a folder that the plugins of vLLM and SGLang read, from one of BlinkDL's checkpoints. Parameters keep the names
and the shapes that they have there. The layers are those of `rwkv_jit.nn.RWKV7`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rwkv_jit
from rwkv_jit.nn import RWKV7

ARCHITECTURE, MODEL_TYPE = "RwkvJitRwkv7ForCausalLM", "rwkv_jit_rwkv7"
NULL_INDEX = 0  # neither engine gives slot 0 to a text; padding has it or, in SGLang's graphs, -1
UNUSED = {f"blocks.0.att.v{number}" for number in range(3)}  # the first layer's v is not mixed; some files have them


# ---- a batch -----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Which tokens of a batch belong to which sequence, and where the states of each one are.

    Attributes
    ----------
    slots : torch.Tensor, shape (N,), int32
        The slot of each sequence. 0 and less is none: the sequence is padding.
    bounds : torch.Tensor, shape (N + 1,), int32
        Where each sequence begins and ends. Tokens behind the last bound are padding.
    has_state : torch.Tensor, shape (N,), bool, optional
        Whether something of the sequence was read before. Without it that is so for all.
    longest : int
        About the most tokens of a sequence.
    """

    slots: Tensor
    bounds: Tensor
    has_state: Tensor | None = None
    longest: int = 1

    def is_decode(self, tokens: int) -> bool:
        """Return whether row i is the next token of sequence i, so that nothing depends on `bounds`."""
        return self.longest == 1 and self.has_state is None and len(self.slots) == tokens


class States(NamedTuple):
    """What a layer keeps of every text: the parts of the engine's pool that are this layer's."""

    wkv: Tensor  # [slots, H, V, K]
    time_shift: Tensor  # [slots, C]
    channel_shift: Tensor  # [slots, C]


def power_of_two(count: int) -> int:
    """Return the next power of two: lengths that are rounded so let calls share their plans."""
    return 1 << max(count - 1, 0).bit_length()


# ---- the model ---------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The sizes of a model. The ranks are those of the corrections of w, a, v and g."""

    layers: int
    width: int
    heads: int
    vocab: int
    inner: int
    w_rank: int
    a_rank: int
    v_rank: int
    g_rank: int


class Rwkv7(RWKV7):
    """The model, whose parameters have the names of BlinkDL's checkpoints. Engines bring its states."""

    def __init__(self, sizes: Sizes):
        ranks = {"w": sizes.w_rank, "a": sizes.a_rank, "v": sizes.v_rank, "g": sizes.g_rank}
        of_layers = {"head_size": sizes.width // sizes.heads, "hidden": sizes.inner, "ranks": ranks}
        super().__init__(sizes.vocab, sizes.width, sizes.layers, **of_layers, device="meta")
        self.to_empty(device=torch.empty(0).device)  # where the engine puts modules: `load` fills them
        self.sizes = sizes
        self.requires_grad_(False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return tokens [T] as vectors [T, C]."""
        return self.emb(tokens)

    def forward(self, x: Tensor, states: Sequence[States], step: Step) -> Tensor:
        """Return the vectors [T, C] from which `head` makes logits, and change the states of every layer.

        Nothing here waits for the GPU, and shapes depend on those of the arguments alone.
        """
        where: dict[str, Any] = {"state_indices": step.slots, "null_index": NULL_INDEX}
        recurrence, options = rwkv_jit.wkv7_update, {**where, "decay": "sigmoid"}
        if not step.is_decode(len(x)):
            where |= {"cu_seqlens": step.bounds, "has_initial_state": step.has_state}
            recurrence, options = rwkv_jit.wkv7_varlen, {**options, **where, "max_seqlen": step.longest}
        first_v = None  # the v of the first layer
        for block, own in zip(self.blocks, states, strict=True):
            run = partial(recurrence, own.wkv, **options)
            mix = partial(block.att.with_recurrence, v_first=first_v, recurrence=run)
            x, first_v = block.stepped(x, own, where, mix)
        return self.ln_out(x)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters by name, and return their names.

        Raises
        ------
        ValueError
            There is one that the model does not have, one of another shape, or too few.
        """
        parameters, loaded = dict(self.named_parameters()), set()
        for name, x in weights:
            if name in UNUSED:
                continue
            if name not in parameters:
                raise ValueError(f"{name}: the model has no such parameter")
            own = parameters[name]
            if [n for n in x.shape if n > 1] != [n for n in own.shape if n > 1]:  # vectors are [1, 1, C] in the files
                raise ValueError(f"{name}: expected shape {list(own.shape)}, got {list(x.shape)}")
            own.data.copy_(x.reshape(own.shape))
            loaded.add(name)
        if missing := sorted(parameters.keys() - loaded):
            raise ValueError(f"the checkpoint lacks {', '.join(missing[:4])}{' and more' if len(missing) > 4 else ''}")
        return loaded


# ---- a folder for the engines ------------------------------------------------------------------------------------


def sizes_of(weights: dict[str, Tensor]) -> Sizes:
    """Return the sizes of the model that parameters belong to.

    Raises
    ------
    ValueError
        They belong to no RWKV-7 model; with what they lack.
    """

    def shape(name: str) -> torch.Size:
        if name not in weights:
            raise ValueError(f"this is no RWKV-7 model: it lacks {name}")
        return weights[name].shape

    layers = 1 + max((int(number) for name in weights for number in re.findall(r"^blocks\.(\d+)\.", name)), default=0)
    ranks = [shape(f"blocks.0.att.{letter}1")[1] for letter in "wa"]
    ranks.append(shape("blocks.1.att.v1")[1] if layers > 1 else 1)
    ranks.append(shape("blocks.0.att.g1")[1])
    vocab, width = shape("emb.weight")
    return Sizes(layers, width, shape("blocks.0.att.r_k")[0], vocab, shape("blocks.0.ffn.key.weight")[0], *ranks)


def config_of(sizes: Sizes, dtype: torch.dtype, longest_text: int) -> dict[str, Any]:
    """Return what config.json says of a model."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "head_dim": sizes.width // sizes.heads,
        "intermediate_size": sizes.inner,
        "ranks": [sizes.w_rank, sizes.a_rank, sizes.v_rank, sizes.g_rank],
        "max_position_embeddings": longest_text,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def sizes_in(config: Any) -> Sizes:
    """Return the sizes that a config with the entries of `config_of` says."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    return Sizes(*(getattr(config, name) for name in names), *config.ranks)


def write_folder(weights: dict[str, Tensor], folder: Path, longest_text: int = 1 << 16) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    sizes, dtype = sizes_of(weights), weights["emb.weight"].dtype
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in Rwkv7(sizes).named_parameters()}
    kept = {name: x.reshape(shapes.get(name, x.shape)).contiguous() for name, x in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: x for name, x in kept.items() if name not in UNUSED}, folder / "model.safetensors")
    text = json.dumps(config_of(sizes, dtype, longest_text), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def main() -> str | None:
    """Run the program, and return what went wrong."""
    parser = argparse.ArgumentParser(prog="rwkv7_slots", description="Write a folder that vLLM and SGLang read.")
    parser.add_argument("file", type=Path, help="an RWKV-7 checkpoint, .pth or .safetensors")
    parser.add_argument("folder", type=Path, help="where config.json and model.safetensors go")
    parser.add_argument("--longest-text", type=int, default=1 << 16, help="tokens, which engines ask for")
    options = parser.parse_args()
    try:
        if options.file.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(options.file)
        else:
            weights = torch.load(options.file, map_location="cpu", weights_only=True)
        write_folder(weights, options.folder, options.longest_text)
    except (OSError, ValueError) as error:
        return f"{options.file}: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
