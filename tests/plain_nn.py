"""The modules of `rwkv_jit.nn` but for those of RWKV-7, as the papers have them: a token of one text at a time."""

import math

import torch


def shifted(p, x, before, letters, prefix="time_mix"):
    """What token and token before are together, for each of the letters."""
    shares = [p[f"{prefix}_{letter}"].flatten() for letter in letters]
    if prefix == "time_maa":
        return [x + (before - x) * share for share in shares]
    return [x * share + before * (1 - share) for share in shares]


def rwkv4_time_mix(module, p, x, state):
    before, num, den = state
    xk, xv, xr = shifted(p, x, before, "kvr")
    k, v, r = p["key.weight"] @ xk, p["value.weight"] @ xv, p["receptance.weight"] @ xr
    now = torch.exp(p["time_first"] + k)
    wkv = (num + now * v) / (den + now)
    kept = torch.exp(-torch.exp(p["time_decay"]))
    y = p["output.weight"] @ (torch.sigmoid(r) * wkv)
    return y, [x, kept * num + torch.exp(k) * v, kept * den + torch.exp(k)]


def heads_of(x, heads):
    return x.view(heads, -1)


def normed(y, weight, bias, eps):
    """Norm of each head."""
    y = y - y.mean(1, keepdim=True)
    return (y / (y.square().mean(1, keepdim=True) + eps).sqrt()).flatten() * weight + bias


def after_heads(p, r, k, v, w, g, S, u):
    """What RWKV-5 and 6 make of receptance, key, value and decay of a token."""
    heads = len(u)
    r, k, v, w = (heads_of(each, heads) for each in (r, k, v, w))
    kv = v[:, :, None] * k[:, None]
    y = torch.einsum("hvk,hk->hv", S + u[:, None] * kv, r)
    y = normed(y / 8, p["ln_x.weight"], p["ln_x.bias"], 1e-5)
    S = S * torch.exp(-torch.exp(w))[:, None] + kv
    return p["output.weight"] @ (y * g * torch.sigmoid(g)), S


def rwkv5_time_mix(module, p, x, state):
    before, S = state
    mixed = shifted(p, x, before, "rkvg")
    names = "receptance", "key", "value", "gate"
    r, k, v, g = (p[f"{own}.weight"] @ each for own, each in zip(names, mixed, strict=True))
    y, S = after_heads(p, r, k, v, p["time_decay"].flatten(), g, S, p["time_faaaa"])
    return y, [x, S]


def rwkv6_time_mix(module, p, x, state):
    before, S = state
    (mixed,) = shifted(p, x, before, "x", "time_maa")
    low_rank = torch.tanh(mixed @ p["time_maa_w1"]).view(5, -1)
    made = {}
    for number, letter in enumerate("wkvrg"):
        share = p[f"time_maa_{letter}"].flatten() + low_rank[number] @ p["time_maa_w2"][number]
        made[letter] = x + (before - x) * share
    w = p["time_decay"].flatten() + torch.tanh(made["w"] @ p["time_decay_w1"]) @ p["time_decay_w2"]
    names = {"r": "receptance", "k": "key", "v": "value", "g": "gate"}
    r, k, v, g = (p[f"{own}.weight"] @ made[letter] for letter, own in names.items())
    y, S = after_heads(p, r, k, v, w, g, S, p["time_faaaa"])
    return y, [x, S]


def channel_mix(prefix):
    def mix(module, p, x, state):
        xk, xr = shifted(p, x, state[0], "kr", prefix)
        k = torch.relu(p["key.weight"] @ xk) ** 2
        return torch.sigmoid(p["receptance.weight"] @ xr) * (p["value.weight"] @ k), [x]

    return mix


def root_mean_square(y, weight):
    return (y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight).flatten()


def gated_linear_attention(module, p, x, state):
    made = [p[f"{letter}_proj.weight"] @ x for letter in "qkv"]
    g = p["gk_proj.1.weight"] @ (p["gk_proj.0.weight"] @ x) + p["gk_proj.1.bias"]
    q, k, v, kept = (heads_of(each, module.heads) for each in (*made, torch.sigmoid(g) ** (1 / 16)))
    S = kept[:, :, None] * state[0] + k[:, :, None] * v[:, None]
    y = torch.einsum("hkv,hk->hv", S, q) / math.sqrt(q.shape[1])
    gate = p["g_proj.weight"] @ x
    y = root_mean_square(y, p["g_norm_swish_gate.weight"])
    return p["o_proj.weight"] @ (y * gate * torch.sigmoid(gate)), [S]


def linear_attention(module, p, x, state):
    q, k, v = (heads_of(p[f"{letter}_proj.weight"] @ x, module.heads) for letter in "qkv")
    q, k = (torch.where(each > 0, each + 1, torch.exp(each)) for each in (q, k))
    S = state[0] + k[:, :, None] * v[:, None]
    y = torch.einsum("hkv,hk->hv", S, q) / math.sqrt(q.shape[1])
    return p["o_proj.weight"] @ root_mean_square(y, p["norm.weight"]), [S]


STEPS = {
    "RWKV4TimeMix": rwkv4_time_mix, "RWKV5TimeMix": rwkv5_time_mix, "RWKV6TimeMix": rwkv6_time_mix,
    "RWKV4ChannelMix": channel_mix("time_mix"), "RWKV5ChannelMix": channel_mix("time_mix"),
    "RWKV6ChannelMix": channel_mix("time_maa"), "GatedLinearAttention": gated_linear_attention,
    "LinearAttention": linear_attention,
}  # fmt: skip
