"""The short causal convolution token by token, as its equation is written, in float64."""

import torch

ACTIVATIONS = {None: lambda x: x, "silu": lambda x: x / (1 + (-x).exp())}


def convolve(tokens, weight, bias, activation):
    """y of the last of each W neighbouring tokens of a list."""
    width = weight.shape[1]
    made = []
    for end in range(width, len(tokens) + 1):
        total = 0 if bias is None else bias.double()
        for tap, token in zip(weight.double().unbind(1), tokens[end - width : end], strict=True):
            total = total + tap * token.double()
        made.append(ACTIVATIONS[activation](total))
    return made


def causal_conv1d(x, weight, bias=None, initial_state=None, cu_seqlens=None, activation=None):
    """y [B, T, C] and the final states [N, C, W - 1]."""
    before = weight.shape[1] - 1
    if cu_seqlens is None:
        texts = list(x.unbind(0))
    else:
        bounds = cu_seqlens.tolist()
        texts = [x[0, begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    made, finals = [], []
    for n, text in enumerate(texts):
        earlier = 0 * x[0, :1, :].double().sum(0) if x.numel() else x.new_zeros(x.shape[2])
        earlier = [earlier] * before if initial_state is None else list(initial_state[n].unbind(1))
        tokens = [*earlier, *text.unbind(0)]
        made += convolve(tokens, weight, bias, activation)
        finals.append(torch.stack([token.double() for token in tokens[-before:]], 1))
    return torch.stack(made).view(x.shape), torch.stack(finals)


def update(x, pool, weight, bias=None, activation=None, slots=None, null_index=-1, active=None, cache_seqlens=None):
    """y of x [B, T, C], and the pool [slots, C, L] as it is then, in its dtype.

    With `cache_seqlens` token i of a row lies at i modulo L.
    """
    pool, made = pool.clone(), []
    for row, tokens in enumerate(x):
        if active is not None and row >= active:
            made.append(torch.zeros_like(tokens, dtype=torch.float64))
            continue
        slot = row if slots is None else int(slots[row])
        has_slot = (slots is None or slot > null_index) and 0 <= slot < len(pool)
        kept = list(pool[slot].unbind(1)) if has_slot else [pool.new_zeros(pool.shape[1])] * pool.shape[2]
        end = 0 if cache_seqlens is None else int(cache_seqlens[row]) % pool.shape[2]
        kept = kept[end:] + kept[:end]
        for token in tokens:
            made += convolve([*kept, token][-weight.shape[1] :], weight, bias, activation)
            kept = [*kept[1:], token.to(pool.dtype)]
        end = 0 if cache_seqlens is None else (end + len(tokens)) % pool.shape[2]
        if has_slot:
            pool[slot] = torch.stack(kept[len(kept) - end :] + kept[: len(kept) - end], 1)
    return torch.cat([y.view(-1, x.shape[2]) for y in made]).view(x.shape), pool
