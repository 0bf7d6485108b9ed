"""RWKV-7 ("Goose", x070) over slots of a pool that a serving engine owns. It imports no engine.

    python -m rwkv7_slots FILE FOLDER

writes a folder that the plugins of vLLM and SGLang read, from one of BlinkDL's checkpoints. Parameters keep the names
that they have there. The equations are those of arXiv:2503.14456.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rwkv_jit

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


def shifted(x: Tensor, states: Tensor, step: Step) -> Tensor:
    """Return the token before each one, and keep the last one of every sequence.

    Padding reads and writes slot 0. Nothing here waits for the GPU, and shapes depend on those of the arguments alone.
    """
    slots = step.slots.clamp(min=NULL_INDEX)
    begun = states[slots].to(x.dtype)
    if step.is_decode(len(x)):
        states[slots] = x.to(states.dtype)
        return begun
    if step.has_state is not None:
        begun = torch.where(step.has_state.unsqueeze(-1), begun, 0)
    begin, end = step.bounds[:-1], step.bounds[1:]
    is_empty = end <= begin
    before = torch.cat([x.new_zeros(1, x.shape[1]), x])  # one row more than there are tokens, for empty sequences
    before[torch.where(is_empty, len(x), begin)] = begun
    last = x[torch.where(is_empty, 0, end - 1)]
    states[torch.where(is_empty, NULL_INDEX, slots)] = last.to(states.dtype)
    return before[:-1]


def mixed(states: Tensor, inputs: Sequence[Tensor], w0: Tensor, step: Step) -> Tensor:
    """Return y [T, H, V] of r, w, k, v, a, b [T, H, N], in one call that changes the states in the pool."""
    options: dict[str, Any] = {"state_indices": step.slots, "null_index": NULL_INDEX, "decay": "sigmoid", "w0": w0}
    if step.is_decode(len(inputs[0])):
        return rwkv_jit.wkv7_update(states, *inputs, **options)
    options |= {"cu_seqlens": step.bounds, "has_initial_state": step.has_state, "max_seqlen": step.longest}
    return rwkv_jit.wkv7_varlen(states, *inputs, **options)


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


def empty(*shape: int) -> nn.Parameter:
    """Return a parameter that is not loaded yet."""
    return nn.Parameter(torch.empty(shape))


class TimeMix(nn.Module):
    """The layer with states of heads."""

    def __init__(self, sizes: Sizes, layer: int):
        super().__init__()
        width, self.heads, self.is_first = sizes.width, sizes.heads, layer == 0
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "k_k", "k_a"):
            self.register_parameter(name, empty(width))
        self.r_k = empty(sizes.heads, width // sizes.heads)
        ranks = {"w": sizes.w_rank, "a": sizes.a_rank, "g": sizes.g_rank}
        if not self.is_first:
            self.v0 = empty(width)
            ranks["v"] = sizes.v_rank
        for letter, rank in ranks.items():
            self.register_parameter(f"{letter}1", empty(width, rank))
            self.register_parameter(f"{letter}2", empty(rank, width))
        for name in ("receptance", "key", "value", "output"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.ln_x = nn.GroupNorm(sizes.heads, width, eps=64e-5)

    def forward(self, x: Tensor, first_v: Tensor | None, states: States, step: Step) -> tuple[Tensor, Tensor]:
        """Return the mixed tokens, and the v of the first layer."""
        change = shifted(x, states.time_shift, step) - x
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, change, getattr(self, f"x_{letter}")) for letter in "rwkvag")
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w = torch.tanh(xw @ self.w1) @ self.w2  # without w0, which the kernels add
        rate = torch.sigmoid(self.a0 + xa @ self.a1 @ self.a2)
        gate = torch.sigmoid(xg @ self.g1) @ self.g2
        if self.is_first:
            first_v = v
        else:
            v = v + (first_v - v) * torch.sigmoid(self.v0 + xv @ self.v1 @ self.v2)
        kk = k * self.k_k
        k = k * (1 + (rate - 1) * self.k_a)
        r, w, k, v, kk, rate = (z.view(len(x), self.heads, -1) for z in (r, w, k, v, kk, rate))
        kk = F.normalize(kk, dim=-1)
        y = mixed(states.wkv, (r, w, k, v, -kk, kk * rate), self.w0, step)
        y = self.ln_x(y.reshape(x.shape)) + ((r * k * self.r_k).sum(-1, keepdim=True) * v).view(x.shape)
        return self.output(y * gate), first_v


class ChannelMix(nn.Module):
    """Two layers with a squared relu between them."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.x_k = empty(sizes.width)
        self.key = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.value = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor, states: States, step: Step) -> Tensor:
        """Return what the layer adds to the tokens."""
        change = shifted(x, states.channel_shift, step) - x
        return self.value(F.relu(self.key(torch.addcmul(x, change, self.x_k))).square())


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self, sizes: Sizes, layer: int):
        super().__init__()
        if layer == 0:
            self.ln0 = nn.LayerNorm(sizes.width)
        self.ln1, self.ln2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.att, self.ffn = TimeMix(sizes, layer), ChannelMix(sizes)

    def forward(self, x: Tensor, first_v: Tensor | None, states: States, step: Step) -> tuple[Tensor, Tensor]:
        """Return the tokens, and the v of the first layer."""
        added, first_v = self.att(self.ln1(x), first_v, states, step)
        x = x + added
        return x + self.ffn(self.ln2(x), states, step), first_v


class Rwkv7(nn.Module):
    """The model, whose parameters have the names of BlinkDL's checkpoints. Engines bring its states."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.emb = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, layer) for layer in range(sizes.layers))
        self.ln_out = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.requires_grad_(False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return tokens [T] as vectors [T, C]."""
        return self.blocks[0].ln0(self.emb(tokens))

    def forward(self, x: Tensor, states: Sequence[States], step: Step) -> Tensor:
        """Return the vectors [T, C] from which `head` makes logits, and change the states of every layer."""
        first_v = None
        for block, of_layer in zip(self.blocks, states, strict=True):
            x, first_v = block(x, first_v, of_layer, step)
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
