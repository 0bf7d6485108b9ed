"""RWKV-7 for one text: its equations as they are written, token by token in float64."""

import torch
from torch.nn import functional as F

from rwkv_jit.nn import RWKV7


def random_weights(layers, heads, head_size, vocab, ranks):
    """Weights by the official names, vectors [width], of which none is zero or one, so that each of them counts."""
    generator, found = torch.Generator().manual_seed(0), {}
    model = RWKV7(vocab, heads * head_size, layers, head_size, ranks=ranks, device="meta")
    for name, like in model.state_dict().items():
        x = torch.randn(like.shape, generator=generator)
        found[name] = x * x.shape[-1] ** -0.5 if x.dim() == 2 else 0.5 + 0.5 * x.flatten()
    return found


def model_of(weights, ranks):
    """The model of such weights."""
    (vocab, width), (_, head_size) = weights["emb.weight"].shape, weights["blocks.0.att.r_k"].shape
    layers = sum(name.endswith("ln1.weight") for name in weights)
    model = RWKV7(vocab, width, layers, head_size, ranks=ranks, dtype=weights["emb.weight"].dtype)
    model.load_state_dict({name: weights[name].view_as(x) for name, x in model.state_dict().items()})
    return model


def expected_logits(weights, tokens):
    """Logits behind every token."""
    return read_alone(weights, tokens)[0]


def read_alone(weights, tokens):
    """Logits behind every token, and of each layer the states of its heads and the last tokens that it has mixed."""
    p = {name: x.double() for name, x in weights.items()}
    layers = sum(name.endswith("ln1.weight") for name in p)
    H, N = p["blocks.0.att.r_k"].shape
    width = H * N
    state = [torch.zeros(H, N, N, dtype=torch.float64) for _ in range(layers)]
    last = [[torch.zeros(width, dtype=torch.float64)] * 2 for _ in range(layers)]
    rows = []

    def norm(x, name):
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    for token in tokens:
        x = norm(p["emb.weight"][token], "blocks.0.ln0")
        for layer in range(layers):
            att, ffn = f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
            z, before = norm(x, f"blocks.{layer}.ln1"), last[layer][0]
            r_, w_, k_, v_, a_, g_ = ((1 - p[att + f"x_{c}"]) * z + p[att + f"x_{c}"] * before for c in "rwkvag")
            r, k, v = (p[f"{att}{name}.weight"] @ y for name, y in (("receptance", r_), ("key", k_), ("value", v_)))
            w = -F.softplus(-(p[att + "w0"] + torch.tanh(w_ @ p[att + "w1"]) @ p[att + "w2"])) - 0.5
            rate = torch.sigmoid(p[att + "a0"] + a_ @ p[att + "a1"] @ p[att + "a2"])
            gate = torch.sigmoid(g_ @ p[att + "g1"]) @ p[att + "g2"]
            if layer == 0:
                first_v = v
            else:
                mixed = torch.sigmoid(p[att + "v0"] + v_ @ p[att + "v1"] @ p[att + "v2"])
                v = (1 - mixed) * v + mixed * first_v
            heads = []
            for head in range(H):
                at = slice(head * N, (head + 1) * N)
                kk = (k * p[att + "k_k"])[at]
                kk = kk / kk.norm()
                k2 = (k * (1 + (rate - 1) * p[att + "k_a"]))[at]
                S = state[layer][head]
                transition = torch.diag(torch.exp(-torch.exp(w[at]))) - torch.outer(kk, kk * rate[at])
                S = state[layer][head] = S @ transition + torch.outer(v[at], k2)
                y = S @ r[at]
                y = (y - y.mean()) / (y.var(correction=0) + 64e-5).sqrt()
                y = y * p[att + "ln_x.weight"][at] + p[att + "ln_x.bias"][at]
                heads.append(y + (r[at] * k2 * p[att + "r_k"][head]).sum() * v[at])
            last[layer] = [z, last[layer][1]]
            x = x + p[att + "output.weight"] @ (torch.cat(heads) * gate)
            z, before = norm(x, f"blocks.{layer}.ln2"), last[layer][1]
            mixed = z + p[ffn + "x_k"] * (before - z)
            last[layer] = [last[layer][0], z]
            x = x + p[ffn + "value.weight"] @ (p[ffn + "key.weight"] @ mixed).clamp(min=0) ** 2
        rows.append(p["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(rows), state, last
