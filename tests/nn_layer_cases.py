"""Modules of `rwkv_jit.nn` of any sizes, whose parameters are all at work, and what they make of texts."""

import torch

from rwkv_jit import nn


def _of_heads(name):
    def make(heads, head_size, **place):
        return getattr(nn, name)(heads * head_size, 1, 3, head_size, **place)

    return make


def _of_width(name, **sizes):
    def make(heads, head_size, **place):
        return getattr(nn, name)(heads * head_size, 1, 3, **sizes, **place)

    return make


def _of_attention(name):
    def make(heads, head_size, **place):
        return getattr(nn, name)(heads * head_size, heads, heads * (head_size // 2 + 1), **place)

    return make


MAKERS = {
    "RWKV4TimeMix": _of_width("RWKV4TimeMix"),
    "RWKV4ChannelMix": _of_width("RWKV4ChannelMix"),
    "RWKV5TimeMix": _of_heads("RWKV5TimeMix"),
    "RWKV5ChannelMix": _of_width("RWKV5ChannelMix", hidden=40),
    "RWKV6TimeMix": _of_heads("RWKV6TimeMix"),
    "RWKV6ChannelMix": _of_width("RWKV6ChannelMix", hidden=40),
    "GatedLinearAttention": _of_attention("GatedLinearAttention"),
    "LinearAttention": _of_attention("LinearAttention"),
    "TimeX": lambda heads, head_size, **place: nn.TimeX(heads * head_size, 40, 0.25, **place),
}
NAMES = list(MAKERS)
WITH_STATE = [name for name in NAMES if name != "TimeX"]


def make(name, heads=3, head_size=4, **place):
    """Return a module with no initial value in which another one would not show."""
    module = MAKERS[name](heads, head_size, **place)
    with torch.no_grad():
        for own, parameter in module.named_parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 and "time_" not in own else 0.2
            parameter.add_(spread * torch.randn(parameter.shape).to(parameter))
    return module


def width_of(name, module):
    return module.weight.shape[0] if name == "TimeX" else module.o_proj.out_features if "A" in name else module.width


def run(function, x, *arguments):
    """Return all that a module makes, or a function as one, y first, in a flat list."""
    made = function(x, *arguments)
    if isinstance(made, torch.Tensor):
        return [made]
    y, state = made
    return [y, *flat(state)]


def flat(state):
    return [state] if isinstance(state, torch.Tensor) else list(state)


def summed(module):
    """Return a module as a function, whose state of `wkv4` is the sums themselves.

    What is taken out of them is the largest exponent so far, and roundings decide which one that is.
    """
    if not isinstance(module, nn.RWKV4TimeMix):
        return module

    def call(*arguments):
        y, (last, recurrent) = module(*arguments)
        num, den, most = recurrent.unbind(1)
        return y, (last, num * most.exp(), den * most.exp())

    return call


def differentiate(module, x, state=None, cu_seqlens=None, weights=None, function=None):
    """Return what a module makes, or a function of its parameters, and the gradients of all inputs by name.

    With the weights of what is made.
    """
    x = x.detach().requires_grad_()
    given = () if state is None else tuple(each.detach().requires_grad_() for each in flat(state))
    state = None if state is None else given[0] if isinstance(state, torch.Tensor) else given
    arguments = () if state is None and cu_seqlens is None else (state, cu_seqlens)
    made = run(module if function is None else function, x, *arguments)
    weights = [torch.randn_like(each) for each in made] if weights is None else weights
    leaves = {**dict(module.named_parameters()), "x": x, **{f"state{i}": each for i, each in enumerate(given)}}
    of_made = [weight.to(each) for weight, each in zip(weights, made, strict=True)]
    grads = torch.autograd.grad(made, list(leaves.values()), of_made)
    return [each.detach() for each in made], dict(zip(leaves, grads, strict=True)), weights


def pairs(found, want):
    """Return what two calls of `differentiate` made, and their gradients, each beside its like, by name."""
    made = {f"result{i}": both for i, both in enumerate(zip(found[0], want[0], strict=True))}
    assert found[1].keys() == want[1].keys()
    return {**made, **{own: (grad, want[1][own]) for own, grad in found[1].items()}}
