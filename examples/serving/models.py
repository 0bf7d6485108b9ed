"""Language models of other layers than those of RWKV, as the scheduler serves them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit.nn import RWKV7, GatedDeltaNet, KimiDeltaAttention, Mamba2

HIDDEN = 3  # of the gated layers between, in widths
STATES = "taps", "recurrence"  # of a layer: the last tokens of its convolution, and what its recurrence is at


def _kimi(width: int, heads: int, size: int, **place: Any) -> nn.Module:
    return KimiDeltaAttention(width, heads, key_size=size, **place)


def _gated_delta_net(width: int, heads: int, size: int, **place: Any) -> nn.Module:
    return GatedDeltaNet(width, max(heads // 2, 1), 2 * max(heads // 2, 1), size, size, **place)


def _mamba2(width: int, heads: int, size: int, **place: Any) -> nn.Module:
    return Mamba2(width, 2 * heads, size, 2 * size, **place)


MIXERS = {"kimi": _kimi, "gated_delta_net": _gated_delta_net, "mamba2": _mamba2}
MODELS = ("rwkv7", *MIXERS)


def make(kind: str, vocab: int, width: int, layers: int, head_size: int, **place: Any) -> nn.Module:
    """Return a model of a kind, of sizes as `serve.py` has them."""
    if kind == "rwkv7":
        return RWKV7(vocab, width, layers, head_size, **place)
    mixers = [MIXERS[kind](width, width // head_size, head_size, **place) for _ in range(layers)]
    return Model(vocab, width, mixers, has_hidden=kind != "mamba2", **place)


class Hidden(nn.Module):
    """down(silu(gate(x)) up(x))"""

    def __init__(self, width: int, **place: Any):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, HIDDEN * width, bias=False, **place) for _ in range(2))
        self.down = nn.Linear(HIDDEN * width, width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the residual, [..., C]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """Layers that mix tokens, and a gated layer behind each of them, with a norm before each; Mamba-2 has no others."""

    def __init__(self, vocab: int, width: int, mixers: list[nn.Module], has_hidden: bool, **place: Any):
        super().__init__()
        self.emb = nn.Embedding(vocab, width, **place)
        self.mixers = nn.ModuleList(mixers)
        self.hidden = nn.ModuleList(Hidden(width, **place) if has_hidden else nn.Identity() for _ in mixers)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5, **place) for _ in range(2 * len(mixers) + 1))
        self.head = nn.Linear(width, vocab, bias=False, **place)
        self.decode: tuple[Any, Any] = (None, None)  # a pool, and the step over it

    def new_pool(self, slots: int, reserved: int = 0) -> rwkv_jit.StatePool:
        """Return memory for the states of sequences."""
        weight = self.emb.weight
        with torch.no_grad():
            _, state = self.mixers[0](torch.zeros_like(weight[:1]).unsqueeze(0))  # [1, 1, C]
        specs = {
            name: rwkv_jit.StateSpec(len(self.mixers), tuple(x.shape[1:]), x.dtype)
            for name, x in zip(STATES, state, strict=True)
        }
        return rwkv_jit.StatePool(slots, specs, weight.device, reserved)

    def _logits(self, x: Tensor, mix: Any) -> Tensor:
        """Return logits of embedded tokens; `mix` runs a layer by its number."""
        for layer, hidden in enumerate(self.hidden):
            x = x + mix(layer, self.norms[2 * layer](x))
            if isinstance(hidden, Hidden):
                x = x + hidden(self.norms[2 * layer + 1](x))
        return self.head(self.norms[-1](x))

    @torch.no_grad()
    def prefill(self, tokens: Tensor, pool: rwkv_jit.StatePool, slots: list[int], cu_seqlens: Tensor) -> Tensor:
        """Read the next tokens of sequences, packed in [1, T], and return the logits behind each, [N, vocab]."""
        rows = torch.empty(len(slots), dtype=torch.int64, device=tokens.device)
        rows.copy_(torch.tensor(slots), non_blocking=True)  # nobody waits for a GPU
        last = cu_seqlens[1:] - 1

        def mix(layer: int, x: Tensor) -> Tensor:
            y, state = self.mixers[layer](x, tuple(pool[name][layer][rows] for name in STATES), cu_seqlens)
            for name, each in zip(STATES, state, strict=True):
                pool[name][layer][rows] = each
            return y

        return self._logits(self.emb(tokens), mix)[0, last]

    def step(self, tokens: Tensor, pool: rwkv_jit.StatePool, slots: Tensor) -> Tensor:
        """Read one token of each sequence, [B], and return the logits behind it, on a GPU from CUDA graphs."""
        if self.decode[0] is not pool:

            def step(tokens: Tensor, slots: Tensor, _: Any) -> tuple[Tensor, tuple[()]]:
                def mix(layer: int, x: Tensor) -> Tensor:
                    states = tuple(pool[name][layer] for name in STATES)
                    return self.mixers[layer].step(x, states, slots, pool.reserved - 1)

                return self._logits(self.emb(tokens), mix), ()

            self.decode = pool, rwkv_jit.nn.graphed_decode(self, (), step)
        return self.decode[1](tokens, slots)
