"""RWKV-7 ("Goose", x070) for inference, in matrix products of torch and the ops of rwkv_jit. `serve.py` serves it.

A model reads tokens of several sequences at once, whose states are in a `StatePool`. Its parameters have the names of
BlinkDL's checkpoints, which it loads. The equations are those of arXiv:2503.14456.
"""

import re
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import rwkv_jit

# Where random vectors lie, by the end of their names; matrices have a variance of one over their inputs.
RANGES = {"w0": (-6, 1), "a0": (-1, 1), "v0": (-1, 1), "k_k": (0.7, 1), "k_a": (0.7, 1)}
RANGES |= {"weight": (1, 1), "bias": (0, 0)}
# The low-rank corrections: which of them a layer has after the first, and what stands between their matrices.
CORRECTIONS = {"w": "tanh", "a": "identity", "g": "sigmoid", "v": "identity"}
MIXES = "wagvrk"  # the order of mixed tokens: those of the corrections come first
UNUSED = [f"blocks.0.att.v{number}" for number in range(3)]  # the first layer's v is not mixed; some files have them


# ---- the model ---------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The next tokens of some texts, one text behind another."""

    tokens: Tensor  # [T]
    slots: Tensor  # [N], int32, where the states of each text are
    bounds: Tensor | None = None  # [N + 1], int32, where each text begins and ends; None if all have one token


def pack(pieces: list[tuple[int, list[int]]], device: str) -> Batch:
    """Return the batch of several (slot, tokens)."""
    tokens = torch.tensor([token for _, piece in pieces for token in piece], device=device)
    slots, bounds = [slot for slot, _ in pieces], [0, *accumulate(len(piece) for _, piece in pieces)]
    return Batch(tokens, *(torch.tensor(x, dtype=torch.int32, device=device) for x in (slots, bounds)))


class Model:
    """RWKV-7, from parameters with the names of BlinkDL's checkpoints."""

    def __init__(self, weights: dict[str, Tensor]):
        self.heads, self.head_size = weights["blocks.0.att.r_k"].shape
        self.vocab, self.width = weights["emb.weight"].shape
        self.dtype, self.device = weights["emb.weight"].dtype, str(weights["emb.weight"].device)
        self.blocks: list[dict[str, Tensor]] = []
        while f"blocks.{len(self.blocks)}.ln1.weight" in weights:
            prefix = f"blocks.{len(self.blocks)}."
            self.blocks.append({name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)})
        for p in self.blocks:
            self.join(p)
        self.top = {name: x for name, x in weights.items() if not name.startswith("blocks.")}
        # The first norm sees single tokens: it is taken once for the whole vocabulary.
        self.embedding = self.norm(weights["emb.weight"], self.blocks[0], "ln0")
        self.parameters = sum(x.numel() for x in weights.values())

    def join(self, p: dict[str, Tensor]) -> None:
        """Make one tensor of all mixes of a layer, one of its three large matrices, and two of its low-rank ones."""
        p["mixes"] = torch.stack([p.pop(f"att.x_{letter}") for letter in MIXES])
        p["vrk"] = torch.stack([p.pop(f"att.{name}.weight") for name in ("value", "receptance", "key")]).mT
        pairs = [[p.pop(f"att.{x}{number}") for number in "12"] for x in CORRECTIONS if f"att.{x}1" in p]
        rank = max(second.shape[0] for _, second in pairs)
        p["first"] = torch.stack([F.pad(first, (0, rank - first.shape[1])) for first, _ in pairs])
        p["second"] = torch.stack([F.pad(second, (0, 0, 0, rank - second.shape[0])) for _, second in pairs])

    def new_pool(self, texts: int) -> rwkv_jit.StatePool:
        """Return memory for the states of so many texts. Slot 0 is the padding of batches."""
        sizes = len(self.blocks), self.heads, self.head_size, self.width
        return rwkv_jit.StatePool.rwkv7(texts + 1, *sizes, shift_dtype=self.dtype, device=self.device, reserved=1)

    @torch.inference_mode()
    def logits(self, batch: Batch, pool: rwkv_jit.StatePool) -> Tensor:
        """Read a batch, and return the logits [N, vocab] behind the last token of every text."""
        x, branch, first_v = self.embedding[batch.tokens], None, None
        texts = {"state_indices": batch.slots, "null_index": 0, "cu_seqlens": batch.bounds}
        for layer, p in enumerate(self.blocks):
            norm = p["ln1.weight"], p["ln1.bias"]
            x, mixed = rwkv_jit.shift_mix(x, *norm, p["mixes"], pool.time_shift[layer], add=branch, **texts)
            branch, first_v = self.time_mix(mixed, first_v, p, pool.wkv[layer], batch)
            norm = p["ln2.weight"], p["ln2.bias"]
            x, mixed = rwkv_jit.shift_mix(x, *norm, p["ffn.x_k"], pool.channel_shift[layer], add=branch, **texts)
            inner = F.linear(mixed, p["ffn.key.weight"])
            branch = F.linear(rwkv_jit.activate(inner, "relu_squared", out=inner), p["ffn.value.weight"])
        x = x + branch
        if batch.bounds is not None:
            x = x[batch.bounds[1:] - 1]
        return F.linear(self.norm(x, self.top, "ln_out"), self.top["head.weight"]).float()

    def norm(self, x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        """Return the layer norm of every token."""
        return F.layer_norm(x, (self.width,), p[f"{name}.weight"], p[f"{name}.bias"])

    def time_mix(
        self, mixed: Tensor, first_v: Tensor | None, p: dict[str, Tensor], states: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return what is added to the residual, and the v of the first layer."""
        p = {name.removeprefix("att."): z for name, z in p.items()}
        v, r, k = torch.bmm(mixed[3:], p["vrk"]).view(3, -1, self.heads, self.head_size)
        low = torch.bmm(mixed[: len(p["first"])], p["first"])
        rwkv_jit.activate(low, list(CORRECTIONS.values())[: len(low)], out=low)
        w, rate, gate, *v_gate = torch.bmm(low, p["second"])
        if first_v is None:
            first_v, more = v, {}
        else:
            more = {"v_first": first_v, "v_gate": v_gate[0], "v0": p["v0"]}
        k, v, a, b = rwkv_jit.prepare_keys(k, v, rate, p["k_k"], p["k_a"], a0=p["a0"], **more)

        options = {"state_indices": batch.slots, "null_index": 0, "decay": "sigmoid", "w0": p["w0"]}
        recurrence = rwkv_jit.wkv7_update
        if batch.bounds is not None:
            recurrence, options["cu_seqlens"] = rwkv_jit.wkv7_varlen, batch.bounds
        y = recurrence(states, r, w.view(k.shape), k, v, a, b, **options)
        y = rwkv_jit.gated_norm(y, gate, p["ln_x.weight"], p["ln_x.bias"], r, k, v, p["r_k"])
        return F.linear(y, p["output.weight"]), first_v


# ---- its parameters ----------------------------------------------------------------------------------------------


def shapes(layers: int, width: int, heads: int, vocab: int, inner: int, ranks: dict[str, int]) -> dict[str, tuple]:
    """Return the shape of every parameter; `ranks` are those of the corrections of w, a, v and g."""
    vectors = ["ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias", "att.ln_x.weight", "att.ln_x.bias", "ffn.x_k"]
    vectors += [f"att.{name}" for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")]
    block = {name: (width,) for name in vectors} | {"att.r_k": (heads, width // heads)}
    block |= {f"att.{name}.weight": (width, width) for name in ("receptance", "key", "value", "output")}
    block |= {"ffn.key.weight": (inner, width), "ffn.value.weight": (width, inner)}
    for letter, rank in ranks.items():
        block |= {f"att.{letter}1": (width, rank), f"att.{letter}2": (rank, width)}
    found = {"emb.weight": (vocab, width), "blocks.0.ln0.weight": (width,), "blocks.0.ln0.bias": (width,)}
    found |= {f"blocks.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    found |= {"ln_out.weight": (width,), "ln_out.bias": (width,), "head.weight": (vocab, width)}
    return {name: shape for name, shape in found.items() if name not in UNUSED}


def random_weights(layers: int, width: int, head_size: int, vocab: int, seed: int, device: str, dtype) -> dict:
    """Return random parameters."""
    generator = torch.Generator(device).manual_seed(seed)
    ranks = {"w": 1.8 * width**0.5, "a": 1.8 * width**0.5, "v": 1.3 * width**0.5, "g": 0.6 * width**0.8}
    ranks = {letter: max(32, round(rank / 32) * 32) for letter, rank in ranks.items()}
    weights = {}
    for name, shape in shapes(layers, width, width // head_size, vocab, 4 * width, ranks).items():
        if len(shape) == 1:
            low, high = RANGES.get(name.rpartition(".")[2], (0, 1))
            x = low + (high - low) * torch.rand(shape, generator=generator, device=device)
        else:
            inputs = shape[1] if name.endswith("weight") else shape[0]
            x = torch.randn(shape, generator=generator, device=device) * inputs**-0.5
        weights[name] = x.to(dtype)
    return weights


def read_weights(path: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters in a file.

    Raises
    ------
    ValueError
        The file has none of an RWKV-7 model; with what it lacks.
    ImportError, OSError
        safetensors is not installed; or the file cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (ImportError, OSError):
        raise
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"{path} is no checkpoint that torch or safetensors can read") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{path} is no RWKV-7 model: expected a dict of tensors")

    def size(name: str, axis: int) -> int:
        return found[name].shape[axis] if name in found and found[name].dim() == 2 else 1

    layers = 1 + max([int(number) for name in found for number in re.findall(r"^blocks\.(\d+)\.", name)], default=0)
    ranks = {letter: size(f"blocks.{int(letter == 'v')}.att.{letter}1", 1) for letter in "wavg"}
    (vocab, width), heads = (size("emb.weight", 0), size("emb.weight", 1)), size("blocks.0.att.r_k", 0)
    expected = shapes(layers, width, heads, vocab, size("blocks.0.ffn.key.weight", 0), ranks)
    for problem, names in (
        ("it lacks", [name for name in expected if name not in found]),
        ("it also has", [name for name in found if name not in expected and name not in UNUSED]),
    ):
        if names:
            others = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ValueError(f"{path} is no RWKV-7 model: {problem} {', '.join(names[:4])}{others}")
    for name, shape in expected.items():  # vectors are [1, 1, width] in the files
        if [n for n in found[name].shape if n > 1] != [n for n in shape if n > 1]:
            raise ValueError(f"{path}: {name}: expected shape {list(shape)}, got {list(found[name].shape)}")
    return {name: found[name].reshape(shape).to(device, dtype) for name, shape in expected.items()}
