"""The calls whose launches `tests/launches.json` holds: of every op, verb and layer op, small and large ones.

Random calls have any memory, sizes, dtypes, slots and lengths. The others are those of models, whose sizes choose
other kernels: few heads and many, short and long, packed and not, each dtype, head sizes of 40 to 512.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import comparing
import derived_cases
import layer_cases
import pytest
import random_calls
import torch
from random_calls import BF16, FP16, FP32

import rwkv_jit

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
KINDS = random_calls.KINDS
RANDOM = 3  # random calls of a kind
SIZES = random_calls.SIZES
# Sequences, tokens, key heads, heads, head sizes; bounds of packed ones.
MODELS = {
    "many heads": ((2, 1024, 32, 64, 64), None),
    "few heads": ((1, 2048, 4, 64, 64), None),
    "few heads of 128": ((1, 2048, 4, 128, 128), None),
    "heads of 128": ((4, 512, 32, 128, 128), None),
    "heads of 96": ((2, 512, 16, 96, 96), None),
    "packed": ((1, 1500, 16, 64, 64), [0, 1, 1, 700, 1024, 1500]),
    "packed of 128": ((1, 1500, 32, 128, 128), [0, 500, 1000, 1500]),
    "one token": ((4, 1, 16, 64, 64), None),
    "short": ((3, 17, 4, 64, 64), None),
    "large heads": ((1, 512, 4, 256, 256), None),
    "wide values": ((2, 256, 4, 128, 256), None),
}


class Run(NamedTuple):
    """A call by its name: `run` makes it with the same tensors each time."""

    name: str
    run: Callable[[], Any]
    has_backward: bool = False


def of(op, verb):
    """Yield the calls of a kind."""
    for number in range(RANDOM):
        yield _random(op, verb, number)
    if verb == "sequences" and op in random_calls.POOLED:
        yield from _models(op)
    elif verb in ("update", "varlen") and op in random_calls.POOLED:
        yield from _pools(op, verb)
    elif verb == "layer" and op in random_calls.LAYERS:
        yield from _layers(op)
    elif op in _OTHERS:
        yield from _OTHERS[op]()


def _seeded(*words):
    draw = random.Random(" ".join(map(str, words)))
    torch.manual_seed(draw.randrange(2**31))
    return draw


def _random(op, verb, number):
    draw = _seeded("launches", op, verb, number)
    profile = random_calls.profile(draw, op, verb)
    call = random_calls.make(draw, op, verb, profile)
    laid = {name: call.places.get(name, random_calls.lay)(draw, x).view for name, x in call.tensors.items()}
    wants = number != 1 and call.has_gradients and not call.written
    return Run(f"random {number}", partial(_run, call.run, laid, wants), wants)


def _run(run, tensors, wants):
    """Run a call, and its backward."""
    given = {name: x.detach().requires_grad_(wants) if x.is_floating_point() else x for name, x in tensors.items()}
    with torch.set_grad_enabled(wants):
        results = run(given)
    pairs = [(x, torch.ones_like(x)) for x in results if x.requires_grad]
    if pairs:
        leaves = [x for x in given.values() if x.requires_grad]
        torch.autograd.grad([x for x, _ in pairs], leaves, [x for _, x in pairs], allow_unused=True)


def _models(op):
    for model, (sizes, bounds) in MODELS.items():
        for place, how in enumerate(_ways(op, model)):
            yield from _model(op, model, sizes, bounds, how, place)


def _ways(op, model):
    if op in derived_cases.WAYS:
        return derived_cases.WAYS[op] if model in ("many heads", "few heads of 128") else derived_cases.WAYS[op][-1:]
    if op == "linear_attention":
        return ("",)
    return ("sigmoid", "raw", "direct") if model == "many heads" and op != "gla" else ("log",)


def _model(op, model, sizes, bounds, how, place):
    batch, tokens, heads, head_size, value_size = sizes
    for dtype, wide in ((BF16, False), (BF16, True), (FP16, False), (FP32, False)):
        is_usual = place == 0 and model in ("many heads", "packed", "few heads")
        if not is_usual and (dtype, wide) != (BF16, True):
            continue
        profile = random_calls.Profile(head_size, value_size, dtype, FP32, "vk", how, how, wide)
        tensors, arguments = _inputs(op, profile, (batch, tokens, heads))
        if bounds:
            tensors["cu_seqlens"] = torch.tensor(bounds)
        for wants in (False, True) if dtype == BF16 and place == 0 else (True,):
            run = partial(_sequences, op, arguments, wants)
            words = [model, how, str(dtype)[6:], "wide" * wide, "gradients" * wants]
            yield Run(" ".join(filter(None, words)), partial(_run, run, tensors, wants), wants)


def _inputs(op, p, sizes):
    """The tensors of a call, all zeros, and what makes arguments of them."""
    with pytest.MonkeyPatch.context() as patch:  # what is large would be filled, rounded and dropped
        for name in ("randn", "rand"):
            patch.setattr(torch, name, partial(_described, getattr(torch, name)))
        tensors, arguments = _described_inputs(op, p, sizes)
    return {name: _zeros_like(x) for name, x in tensors.items()}, arguments


def _described(make, *shape, device=None, **more):
    return make(*shape, device="meta", **more)


def _zeros_like(x):
    last = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape, strict=True))
    return torch.zeros(last + 1 if x.numel() else 0, dtype=x.dtype).as_strided(x.shape, x.stride())


def _described_inputs(op, p, sizes):
    batch, tokens, heads = sizes
    wide = FP32 if p.wide else p.dtype
    if op in random_calls.BASE:
        decay = p.decay or None
        given = comparing.make_inputs(op, p.dtype, batch, tokens, heads, p.K, p.V, "usual", decay, wide)
        tensors = {name: x.detach() for name, x in given.items()}
        options = {"decay": decay} if decay else {}
        inputs = list(tensors)
        return tensors, lambda given: ([given[name] for name in inputs], options)
    of_heads = batch, tokens, heads // 2 if op != "hgrn2" and heads > 4 else heads, heads, p.K, p.V
    case = derived_cases.make(op, p.how, of_heads, p.dtype, wide, FP32, has_state=False)
    tensors = {**case.inputs, **case.parameters}

    def arguments(given):
        more = {name: given[name] for name in case.parameters}
        return [given[name] for name in case.inputs], {**case.options, **more}

    return tensors, arguments


def _sequences(op, arguments, wants, given):
    inputs, options = arguments(given)
    packing = {name: given[name] for name in ("cu_seqlens",) if name in given}
    return [
        x for x in getattr(rwkv_jit, op)(*inputs, output_final_state=not wants, **packing, **options) if x is not None
    ]


def _pools(op, verb):
    for head_size, dtype, state in ((64, BF16, FP32), (128, BF16, FP32), (128, FP16, BF16), (96, FP32, FP32)):
        several = ((1, 1), (64, 1), (8, 4)) if verb == "update" else ((8, 512), (2, 4096))
        for rows, tokens in several if head_size == 64 else several[-1:]:
            how = derived_cases.WAYS.get(op, ("log" if op != "linear_attention" else "",))[-1]
            profile = random_calls.Profile(head_size, head_size, dtype, state, "vk", how, how, False)
            sizes = (rows, tokens, 16) if verb == "update" else (1, tokens, 16)
            tensors, arguments = _inputs(op, profile, sizes)
            slots = torch.zeros(rows + 3, 16, head_size, head_size, dtype=state)
            tensors["state"], tensors["state_indices"] = slots, torch.arange(rows) + 1
            if verb == "varlen":
                tensors["cu_seqlens"] = torch.linspace(0, tokens, rows + 1).int()
            name = f"{rows} rows, {tokens} tokens, {head_size} {str(dtype)[6:]} {str(state)[6:]} {how}"
            yield Run(name, partial(_run, partial(_pooled, op, verb, arguments), tensors, False))


def _pooled(op, verb, arguments, given):
    inputs, options = arguments(given)
    more = {name: given[name] for name in ("state_indices", "cu_seqlens") if name in given}
    return [getattr(rwkv_jit, f"{op}_{verb}")(given["state"], *inputs, **more, **options)]


def _layers(op):
    for how in layer_cases.WAYS[op]:
        _seeded(op, how)
        sizes = layer_cases.sizes_of(op, how, 600, 16, 64)
        case = layer_cases.make(op, how, sizes, BF16, FP32)
        for wants in (False, True):
            yield Run(f"{how} {wants}", partial(_run, case.run, case.tensors, wants), wants)


def _wkv4():
    for batch, tokens, channels in ((8, 1024, 768), (1, 4096, 768)):
        tensors = {name: torch.zeros(channels) for name in "wu"}
        tensors |= {name: torch.zeros(batch, tokens, channels, dtype=BF16) for name in "kv"}
        run = partial(_called, rwkv_jit.wkv4)
        yield Run(f"{batch} {tokens} {channels}", partial(_run, run, tensors, True), True)


def _timex():
    for batch, channels, tokens in ((32, 768, 768), (8, 64, 4096)):
        for dtype in (BF16, FP32):
            tensors = {"w": torch.zeros(channels, tokens), "k": torch.zeros(batch, channels, tokens, dtype=dtype)}
            run = partial(_called, rwkv_jit.timex)
            yield Run(f"{batch} {channels} {tokens} {str(dtype)[6:]}", partial(_run, run, tensors, True), True)


def _called(function, given):
    results = function(*given.values())
    return [x for x in results if x is not None] if isinstance(results, tuple) else [results]


_OTHERS = {"wkv4": _wkv4, "timex": _timex}


# ---- launches ----------------------------------------------------------------------------------------------------


def lines(order):
    """Return what a driver was asked for, a line each."""
    return [" ".join(_launch(x) if hasattr(x, "entry") else _other(*x)) for x in order]


def _other(kind, *rest):
    yield kind
    yield str(rest[1]) if kind == "zero" else f"{rest[0]} for {rest[1]}"  # bytes; streams


def _launch(x):
    """Yield template, digest of parameters, grid, block, shared bytes (+: it overlaps), numbers, ~null pointers."""
    yield x.template if x.template == x.entry else f"{x.template}:{x.entry}"
    text = json.dumps({name: str(value) for name, value in x.parameters.items()}, sort_keys=True)
    yield hashlib.sha256(text.encode()).hexdigest()[:8]
    yield "x".join(map(str, x.grid)).removesuffix("x1").removesuffix("x1")
    yield str(x.block[0])
    yield str(x.shared_bytes) + "+" * x.overlaps
    numbers = itertools.groupby(_number(value, x.letters[name]) for name, value in x.numbers.items())
    counted = [(text, len([*same])) for text, same in numbers]
    yield ",".join(text if count == 1 else f"{text}*{count}" for text, count in counted) or "-"
    addresses = x.addresses
    pointers = [(place, addresses[name]) for place, name in enumerate(x.letters) if name in addresses]
    places = [str(place) for place, address in pointers if not address]
    if places:
        yield f"~{','.join(places)}"
    if x.stream >= 1000:
        yield "beside"


def _number(value, letters):
    """Return a number, or several of a struct, in which an address is a star."""
    if isinstance(value, tuple):
        several = [*map(str, value)]
        return ":".join([*several[:-1], "*"] if letters.endswith("Q") else several)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
