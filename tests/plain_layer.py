"""The small work of a layer of RWKV-7, and a whole layer of decode, as the equations are written, in float64."""

import math

import torch


def norm(x, weight, bias, eps):
    """Over the last dimension."""
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() + bias.double()


def shift_mix(
    x, weight, bias, mixes, pool, bounds, slots, add=None, null_index=-1, eps=1e-5, off=0.0, has_state=None, active=None
):
    """The residual, the mixes [M, tokens, C] and the pool afterwards, of texts that `bounds` and `slots` list.

    n of the token before is rounded to the pool's dtype when it is `off` by so much. `has_state` says which texts begin
    with their slot, and `active` how many there are.
    """
    channels, pool = x.shape[-1], pool.clone()
    z = x.double() if add is None else x.double() + add.double()
    n, shares = norm(z.view(-1, channels), weight, bias, eps), mixes.double().view(-1, channels)
    mixed = torch.empty(len(shares), *n.shape, dtype=torch.float64, device=x.device)
    behind = range(bounds[-1], len(n))  # tokens of no text, which are as texts without a slot
    has_state = [True] * len(slots) if has_state is None else has_state
    texts = [*zip(slots, has_state, bounds, bounds[1:], strict=False)]
    texts = [*texts, *((-1, True, token, token + 1) for token in behind)] if active is None else texts[:active]
    for slot, has_own, begin, end in texts:
        is_there = null_index < slot and 0 <= slot < len(pool)
        before = (
            pool[slot].double() if is_there and has_own else torch.zeros(channels, dtype=torch.float64, device=x.device)
        )
        for token in range(begin, end):
            mixed[:, token] = n[token] + (before - n[token]) * shares
            before = (n[token] + off).to(pool.dtype).double()
        if is_there and begin < end:
            pool[slot] = n[end - 1].to(pool.dtype)
    if active is not None:  # what is behind the texts that there are gets zeros
        mixed[:, bounds[active] :] = z.view(-1, channels)[bounds[active] :] = 0
    return z, mixed, pool


def prepare_keys(
    k, v, rate, k_k, k_a, a0=None, v_first=None, v_gate=None, v0=None, r=None, r_k=None, rate_map="sigmoid"
):
    """The new k and v, a and b, and the bonus with r."""
    heads = k.shape[-2:]
    of_token, of_layer = (lambda x: x.double().reshape(k.shape)), (lambda x: x.double().reshape(heads))
    rate = of_token(rate) + (0 if a0 is None else of_layer(a0))
    rate = torch.sigmoid(rate) if rate_map == "sigmoid" else rate
    kk = of_token(k) * of_layer(k_k)
    kk = kk / kk.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
    v = of_token(v)
    if v_first is not None:
        v = v + (of_token(v_first) - v) * torch.sigmoid(of_token(v_gate) + (0 if v0 is None else of_layer(v0)))
    k = of_token(k) * (1 + (rate - 1) * of_layer(k_a))
    if r is None:
        return k, v, -kk, kk * rate
    return k, v, -kk, kk * rate, (of_token(r) * k * of_layer(r_k)).sum(-1, keepdim=True) * v


def delta_operands(k, beta, q=None, g=None, A_log=None, dt_bias=None, *, kinds, lower_bound):
    """r, w, k, a and b of `wkv7`; of r and w what there is to make."""
    gate, gate_of, rate_map, rate_of, norm = kinds
    heads = beta.shape[k.dim() - 2]

    def of_value_heads(x):
        x = x.double()
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if norm == "l2" else x
        return torch.stack([x[..., head * x.shape[-2] // heads, :] for head in range(heads)], -2)

    def each(x, of):
        return x.double() if of == "channel" else x.double()[..., None].expand(*x.shape, k.shape[-1])

    key, rate = of_value_heads(k), each(beta, rate_of)
    if rate_map != "identity":
        rate = {"sigmoid": 1, "twice_sigmoid": 2}[rate_map] / (1 + torch.exp(-rate))
    w, made = torch.zeros_like(key), [] if q is None else [of_value_heads(q)]
    if gate != "none":
        w = each(g, gate_of)
        if dt_bias is not None:
            w = w + each(dt_bias.reshape(heads, -1)[:, 0] if gate_of == "head" else dt_bias, gate_of)
        if gate != "log":
            speed = torch.exp(A_log.double())[:, None]
            w = lower_bound / (1 + torch.exp(-speed * w)) if gate == "bounded" else -speed * torch.log(1 + torch.exp(w))
        if gate_of == "head" or gate != "log":
            made.append(w)
    erased, written = (rate * key, key) if rate_of == "channel" else (key, rate * key)
    return (*made, written, torch.exp(w) * erased, -written)


def gated_norm(
    y, g, weight, bias=None, r=None, k=None, v=None, r_k=None, eps=64e-5, gate="identity", norm="layer", bonus=None
):
    """[..., C]."""
    heads, y = y.shape[-2:], y.double()
    centred = y - y.mean(-1, keepdim=True) if norm == "layer" else y
    z = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double().reshape(heads)
    if bias is not None:
        z = z + bias.double().reshape(heads)
    if r_k is not None:
        r, k, v = (x.double().reshape(y.shape) for x in (r, k, v))
        z = z + (r * k * r_k.double().reshape(heads)).sum(-1, keepdim=True) * v
    if bonus is not None:
        z = z + bonus.double().reshape(y.shape)
    return gated(z, g.reshape(y.shape), gate).flatten(-2)


def gated(x, g, gate="sigmoid"):
    """x behind its gate."""
    g = g.double()
    return x.double() * {"identity": lambda: g, "sigmoid": g.sigmoid, "silu": lambda: g * g.sigmoid()}[gate]()


def token_shift(x, mixes, amounts=None, first=None, cu_seqlens=None):
    """The mixes [M, B, T, C]."""
    x, before = x.double(), torch.zeros_like(x, dtype=torch.float64)
    rows = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        rows = [(0, begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    for text, (row, begin, end) in enumerate(rows):
        if begin < end:
            before[row, begin + 1 : end] = x[row, begin : end - 1]
            before[row, begin] = 0 if first is None else first[text].double()
    share = mixes.double()[:, None, None] + (0 if amounts is None else amounts.double())
    return x + (before - x) * share


def norm_shift(x, weight, bias, mixes, add=None, first=None, cu_seqlens=None, eps=1e-5, dtype=None, normed=None):
    """The residual, the mixes [M, B, T, C] and the last tokens [N, C]; what is normed and carried is rounded."""
    z = _rounded(x.double() if add is None else x.double() + add.double(), normed or x.dtype)
    n = norm(z, weight, bias, eps)
    carried = _rounded(n, dtype or x.dtype)
    bounds = range(0, x.shape[0] * x.shape[1] + 1, x.shape[1] or 1) if cu_seqlens is None else cu_seqlens.tolist()
    texts = x.shape[0] if cu_seqlens is None else len(bounds) - 1
    nothing = 0 * weight.double().expand(texts, -1)
    before = token_shift(carried, torch.ones(1, x.shape[2], device=x.device), None, first, cu_seqlens)[0]
    mixed = [n + (before - n) * share for share in mixes.double()]
    last = list((nothing if first is None else first.double()).unbind())
    if x.shape[1]:
        ends = zip(bounds, bounds[1:], strict=False)
        last = [carried.flatten(0, 1)[end - 1] if begin < end else last[i] for i, (begin, end) in enumerate(ends)]
    return z, mixed, torch.stack(last)


def _rounded(x, dtype):
    """What is left of x in a dtype, with gradients as if it were all of it."""
    return x + (x.to(dtype).double() - x).detach()


def activate(x, kinds):
    """A function of every element, another one in each part."""
    return torch.stack([ACTIVATIONS[kind](part) for kind, part in zip(kinds, x.double(), strict=True)])


ACTIVATIONS = {
    "identity": lambda x: x, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "relu_squared": lambda x: x.clamp(min=0).square(),
}  # fmt: skip


def decode(p, x, time_shift, channel_shift, states, v_first=None):
    """One layer for a token of each row: x, v, and what the row's slots hold then. `p` is named as in checkpoints."""
    p = {name: each.double() for name, each in p.items()}
    heads = p["att.r_k"].shape
    n = norm(x, p["ln1.weight"], p["ln1.bias"], 1e-5)
    xr, xw, xk, xv, xa, xg = (n + (time_shift.double() - n) * p[f"att.x_{letter}"] for letter in "rwkvag")
    r, k, v = (y @ p[f"att.{name}.weight"].T for name, y in (("receptance", xr), ("key", xk), ("value", xv)))
    w = torch.tanh(xw @ p["att.w1"]) @ p["att.w2"] + p["att.w0"]
    g = torch.sigmoid(xg @ p["att.g1"]) @ p["att.g2"]
    more = {}
    if v_first is not None:
        more = {"v_first": v_first, "v_gate": xv @ p["att.v1"] @ p["att.v2"], "v0": p["att.v0"]}
    rate = xa @ p["att.a1"] @ p["att.a2"]
    own = v.view(-1, *heads)
    k, v, a, b = prepare_keys(k.view(-1, *heads), own, rate, p["att.k_k"], p["att.k_a"], p["att.a0"], **more)
    d, r = torch.exp(-math.exp(-0.5) * torch.sigmoid(w)).view(-1, *heads), r.view(-1, *heads)
    states = states.double()
    read = torch.einsum("bhvk,bhk->bhv", states, a)
    states = states * d[:, :, None] + read[..., None] * b[:, :, None] + v[..., None] * k[:, :, None]
    y = torch.einsum("bhvk,bhk->bhv", states, r)
    y = gated_norm(y, g, p["att.ln_x.weight"], p["att.ln_x.bias"], r, k, v, p["att.r_k"])
    x = x.double() + y @ p["att.output.weight"].T
    m = norm(x, p["ln2.weight"], p["ln2.bias"], 1e-5)
    mixed = m + (channel_shift.double() - m) * p["ffn.x_k"]
    x = x + (mixed @ p["ffn.key.weight"].T).clamp(min=0).square() @ p["ffn.value.weight"].T
    return x, own if v_first is None else v_first, n, m, states
