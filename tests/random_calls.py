"""Random calls of every op, verb and layer op in random memory, each against its recurrence in float64.

Tensors begin at any address, have gaps, any order of dimensions, or one row for all; pools have gaps between their
slots; rows have no slot, sequences no tokens. All memory around a tensor is no number and has to stay as it is.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import comparing
import derived_cases
import layer_cases
import plain_convolution
import plain_layer
import torch

import rwkv_jit

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BASE = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
POOLED = (*BASE, *derived_cases.WAYS)
LAYERS = tuple(layer_cases.WAYS)
OTHERS = ("shift_mix", "causal_conv1d", "causal_conv1d_update", "cross_entropy", "linear_cross_entropy", "activate_out")
KINDS = (
    *((op, "sequences") for op in ("wkv4", "timex", *POOLED)),
    *((op, "update") for op in ("wkv4", *POOLED)),
    *((op, "varlen") for op in POOLED),
    *((op, "replay") for op in POOLED),
    *((op, "layer") for op in (*LAYERS, *OTHERS)),
)
# Of the norm of a result, and how often what inputs change that are rounded otherwise.
LIMITS, TIMES = {FP32: 1e-5, FP16: 3e-3, BF16: 2e-2}, 2
MOST_DRAWS = 8  # of inputs that are rounded otherwise
DEVICE = "cuda"
PAST_THE_POOL = True  # whether rows may have slots that are not there: on a GPU they count as none
FILL = {torch.int32: 2**30, torch.int64: 2**40, torch.uint8: 1, torch.bool: True}


# ---- memory ------------------------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """A tensor somewhere in a buffer, and the bytes of the buffer as they were."""

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def check(self, name, written=None):
        """Nothing has changed but the elements that `written` picks of a tensor of this shape."""
        changed = (self.buffer.view(torch.uint8) != self.before).view(len(self.buffer), -1).any(1)
        if written is not None:
            places = torch.arange(len(self.buffer), device=self.buffer.device)
            view = self.view
            changed[places.as_strided(view.shape, view.stride(), view.storage_offset())[written].flatten()] = False
        assert not changed.any(), f"{name}: {int(changed.sum())} elements beside it have changed"


def _in_buffer(x, strides, offset):
    length = offset + 1 + sum(step * (size - 1) for step, size in zip(strides, x.shape, strict=True) if size)
    fill = FILL.get(x.dtype, math.nan)
    buffer = torch.full((length + 8,), fill, dtype=x.dtype, device=x.device)
    view = buffer.as_strided(x.shape, strides, offset)
    if 0 not in [step for step, size in zip(strides, x.shape, strict=True) if size > 1]:
        view.copy_(x)
    else:  # one row for all: that of the first
        index = [
            slice(0, 1) if step == 0 and size else slice(None) for step, size in zip(strides, x.shape, strict=True)
        ]
        view[tuple(index)] = x[tuple(index)]
    return Laid(view, buffer, buffer.view(torch.uint8).clone())


def lay(draw, x, may_expand=True):
    """Lay a tensor anywhere: in any order of its dimensions, with gaps, or with one row for all."""
    order = list(range(x.dim()))
    if draw.random() < 0.25:
        draw.shuffle(order)
    strides, step = [0] * x.dim(), draw.choice([1] * 9 + [2])
    for place in reversed(order):
        strides[place] = step
        step = step * max(x.shape[place], 1) + draw.choice([0] * 5 + [1, 3, 8])
    if may_expand and x.dim() > 1 and draw.random() < 0.1:
        strides[draw.randrange(x.dim() - 1)] = 0
    return _in_buffer(x, strides, draw.choice([0, 0, 1, 2, 3, 4, 8]))


def lay_pool(draw, x):
    """Lay a pool: slots without gaps, and between them there may be some."""
    size = math.prod(x.shape[1:])
    strides, step = [0] * x.dim(), 1
    for place in reversed(range(1, x.dim())):
        strides[place] = step
        step *= x.shape[place]
    strides[0] = size + draw.choice([0, 0, 1, 2, 4, 8, 24])
    return _in_buffer(x, strides, draw.choice([0, 0, 1, 2, 4, 8]))


def lay_whole(draw, x):
    """Lay a tensor without gaps, at any address."""
    return _in_buffer(x, torch.empty(x.shape, device="meta").stride(), draw.choice([0, 0, 1, 2, 3, 4, 8]))


# ---- calls -------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of tensors by name: what runs it, and the same in float64. Both return a list of results."""

    name: str
    tensors: dict[str, torch.Tensor]
    run: Callable[[dict], list]
    exactly: Callable[[dict], list]
    dtype: torch.dtype  # the narrowest of the inputs
    written: dict[str, Any] = {}  # what of a tensor is changed in place; these may have no gradient
    places: dict[str, Callable] = {}  # how a tensor is laid, where not as any other
    has_gradients: bool = True


def check(draw, call, wanted=None):
    """Run a call twice, the second time at other addresses and so as one that is known, and compare both.

    `wanted` are the tensors that have a gradient; without it they are drawn.
    """
    if wanted is None:
        wanted = [name for name, x in call.tensors.items() if x.is_floating_point() and draw.random() < 0.7]
        wanted = wanted if call.has_gradients and not call.written and draw.random() < 0.7 else []
    laid = {name: call.places.get(name, lay)(draw, x) for name, x in call.tensors.items()}
    values = {name: x.view.clone() for name, x in laid.items()}  # of one row for all these are others
    expected = None
    for attempt in ("the first call", "a known call"):
        given = {name: x.view.detach().requires_grad_(name in wanted) for name, x in laid.items()}
        with nullcontext() if wanted else torch.no_grad():
            results = call.run(given)
        if expected is None:
            of_results = [lay(draw, torch.randn_like(x)).view for x in results]
            expected = _Expected(call, values, of_results, wanted)
        found = [x.detach() for x in results]
        if wanted:
            found += _gradients(results, [given[name] for name in wanted], of_results)
        for name, x in laid.items():
            x.check(name, call.written.get(name))
        names = [*map(str, range(len(results))), *(f"d{name}" for name in wanted)]
        for place, (name, x) in enumerate(zip(names, found, strict=True)):
            expected.compare(f"{call.name}: {name} of {attempt}", place, x)
        for name, x in values.items():
            laid[name] = _moved(draw, laid[name], x)


def _moved(draw, laid, values):
    """The values at another address, with the same strides."""
    shape, strides, before = laid.view.shape, laid.view.stride(), laid.view.storage_offset()
    return _in_buffer(values.view(shape), strides, draw.choice([x for x in (0, 1, 2, 3, 4, 8) if x != before]))


class _Expected:
    """Results and gradients of a call in float64."""

    def __init__(self, call, values, weights, wanted):
        self.call, self.values, self.weights, self.wanted = call, values, weights, wanted
        self.results, self.rounded = self._exactly(), []

    def _exactly(self, noise=0.0):
        """Return them for inputs that are rounded otherwise where there is `noise`."""
        given = {}
        for name, x in self.values.items():
            if x.is_floating_point():
                x = x.double() * (1 + noise * (2 * torch.rand_like(x, dtype=torch.float64) - 1))
                # Keys of hgrn2 are 1 - e^g in the dtype of q: float16 rounds those below 6e-5 to multiples of 6e-8.
                if noise and name == "g" and self.call.name.startswith("hgrn2") and self.call.dtype == FP16:
                    x = x + 2.0**-25 * (2 * torch.rand_like(x) - 1)
            given[name] = x.requires_grad_(name in self.wanted)
        with nullcontext() if self.wanted else torch.no_grad():
            results = self.call.exactly(given)
        made = [x.detach() for x in results]
        if self.wanted:
            weights = [x.double() for x in self.weights]
            made += _gradients(results, [given[name] for name in self.wanted], weights)
        return made

    def compare(self, what, place, found):
        """Check that a result is as near as results are of inputs that are rounded otherwise."""
        want = self.results[place]
        assert found.shape == want.shape, what
        assert torch.isfinite(found).all(), f"{what}: not finite"
        error, norm = float((found.double() - want).norm()), float(want.norm())
        limit = LIMITS[self.call.dtype]
        if error <= limit * norm:
            return
        for number in range(MOST_DRAWS):
            if number == len(self.rounded):
                self.rounded.append(self._exactly(limit / 5))
            apart = max(float((several[place] - want).norm()) for several in self.rounded[: number + 1])
            if error <= limit * norm + TIMES * apart:
                return
        raise AssertionError(f"{what}: {error / max(norm, 1e-300):.3e} from float64")


def _gradients(results, leaves, weights):
    """The gradients of weighted results, as far as these have any."""
    pairs = [(x, weight) for x, weight in zip(results, weights, strict=True) if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in leaves]
    options = {"allow_unused": True, "materialize_grads": True}
    return [*torch.autograd.grad([x for x, _ in pairs], leaves, [weight for _, weight in pairs], **options)]


# ---- sizes -------------------------------------------------------------------------------------------------------


class Profile(NamedTuple):
    """What a kernel is compiled for. Several calls have one, as compiling takes longer than a call."""

    K: int
    V: int
    dtype: torch.dtype
    state: torch.dtype
    layout: str
    decay: str
    how: str
    wide: bool


SIZES = [(64, 64)] * 3 + [(128, 128)] * 3 + [(40, 24), (33, 50), (128, 64), (16, 16), (7, 13), (96, 96), (256, 64)]
SMALL = [(16, 16)] * 2 + [(7, 13), (8, 24), (24, 8)]


def profile(draw, op, verb, sizes=SIZES):
    """Draw one."""
    decays = ["log", "direct", "raw", "sigmoid"] if op.startswith("wkv") else ["log", "direct"]
    return Profile(
        *draw.choice(sizes), draw.choice([BF16, BF16, FP16, FP32]), draw.choice([FP32, FP32, BF16, FP16]),
        draw.choice(["vk", "kv"]), draw.choice(decays) if op in BASE and op != "linear_attention" else "",
        draw.choice(derived_cases.WAYS.get(op) or layer_cases.WAYS.get(op) or ("",)), draw.random() < 0.5,
    )  # fmt: skip


def bounds_of(draw, tokens, most=6):
    """Where packed sequences begin and end: some have no tokens."""
    inside = sorted(draw.choice([0, tokens, *range(tokens + 1)]) for _ in range(draw.randrange(most)))
    return [0, *inside, tokens]


def _packing(draw, bounds):
    return torch.tensor(bounds, dtype=draw.choice([torch.int32, torch.int64]), device=DEVICE)


def tokens_of(draw, most):
    """How many tokens a sequence has: the ends of chunks, or any number."""
    return draw.choice([0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 130, draw.randrange(1, 200)]) % (most + 1)


# ---- sequences ---------------------------------------------------------------------------------------------------


def make(draw, op, verb, p, most=200):
    """Draw a call."""
    if verb == "layer":
        return _OTHERS[op](draw, p, most) if op in _OTHERS else _layer(draw, op, p, most)
    if op in ("wkv4", "timex"):
        return (
            {"sequences": _wkv4, "update": _wkv4_update}[verb](draw, p, most) if op == "wkv4" else _timex(draw, p, most)
        )
    return {"sequences": _sequences, "update": _pooled, "varlen": _pooled, "replay": _replay}[verb](
        draw, op, verb, p, most
    )


def _heads(draw, op):
    heads = draw.choice([1, 2, 3, 4])
    return heads if op in BASE or op == "hgrn2" else heads * draw.choice([1, 1, 2, 3]), heads


def _given(draw, op, p, batch, tokens, bounds):
    """The tensors of a call without its state, a function of these that runs it, and the shape of a state."""
    heads, key_heads = _heads(draw, op)
    of_state = (heads, p.V, p.K) if p.layout == "vk" else (heads, p.K, p.V)
    wide = FP32 if p.wide else p.dtype
    if op in BASE:
        decays = draw.choice(["usual", "usual", "none", "mixed"])
        given = comparing.make_inputs(op, p.dtype, batch, tokens, heads, p.K, p.V, decays, p.decay or None, wide)
        tensors = {name: x.detach() for name, x in given.items()}
        options = {"state_layout": p.layout, **({"decay": p.decay} if p.decay else {})}
        if op in ("gla", "linear_attention"):
            options["scale"] = p.K**-0.5
        inputs = list(tensors)
        return tensors, lambda given, **others: ([given[name] for name in inputs], {**options, **others}), of_state
    decays = draw.choice([(-1.0, -0.01), (-1.0, -0.01), (-8.0, 0.0), (-1e-6, 0.0)])
    sizes = batch, tokens, key_heads, heads, p.K, p.V
    case = derived_cases.make(op, p.how, sizes, p.dtype, wide, FP32, decays, device=DEVICE, layout=p.layout)
    tensors = {**case.inputs, **case.parameters}

    def arguments(given, **others):
        more = {name: given[name] for name in case.parameters}
        return [given[name] for name in case.inputs], {**case.options, **more, **others}

    return tensors, arguments, of_state


def _sequences(draw, op, verb, p, most):
    tokens, bounds = tokens_of(draw, most), None
    batch = draw.choice([0, 1, 1, 1, 2, 2, 3])
    if draw.random() < 0.4:
        batch, bounds = 1, bounds_of(draw, tokens)
    tensors, arguments, of_state = _given(draw, op, p, batch, tokens, bounds)
    if draw.random() < 0.6:
        tensors["initial_state"] = torch.randn(len(bounds) - 1 if bounds else batch, *of_state, device=DEVICE).to(
            p.state
        )
    if bounds:
        tensors["cu_seqlens"] = _packing(draw, bounds)
    with_state = draw.random() < 0.7

    def run(given, function=op):
        more = {name: given[name] for name in ("initial_state", "cu_seqlens") if name in given}
        inputs, options = arguments(given, output_final_state=with_state, **more)
        return [x for x in getattr(rwkv_jit, function)(*inputs, **options) if x is not None]

    exactly = partial(run, function=f"{op}_ref")
    return Call(f"{op} {p} {batch}x{tokens} {bounds}", tensors, run, exactly, _narrowest(tensors))


def _narrowest(tensors):
    dtypes = {x.dtype for x in tensors.values()}
    return BF16 if BF16 in dtypes else FP16 if FP16 in dtypes else FP32


# ---- pools -------------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """Which slot each row reads and writes: None where it has none."""

    count: int
    options: dict[str, torch.Tensor]
    null_index: int
    read: list
    written: list


def _slots(draw, rows, may_write_apart):
    """Draw them, as tensors that say so too."""
    null_index, count = draw.choice([-1, -1, 0]), rows + draw.choice([1, 2, 5])
    dtype = draw.choice([torch.int32, torch.int64])
    free = list(range(null_index + 1, count))
    draw.shuffle(free)
    nothing = [null_index, null_index - 3, *[count, count + 7] * PAST_THE_POOL]
    read = [free.pop() if free and draw.random() < 0.8 else draw.choice(nothing) for _ in range(rows)]
    options = {"state_indices": torch.tensor(read, dtype=dtype, device=DEVICE)}
    written = read
    if may_write_apart and draw.random() < 0.3:
        written = [free.pop() if free and draw.random() < 0.7 else draw.choice([x, null_index]) for x in read]
        options["write_indices"] = torch.tensor(written, dtype=dtype, device=DEVICE)

    def there(several):
        return [x if null_index < x < count else None for x in several]

    return Slots(count, options, null_index, there(read), there(written))


def _pooled(draw, op, verb, p, most):
    """Rows of a few tokens, or sequences of any lengths."""
    is_packed = verb == "varlen"
    tokens, bounds, active = draw.choice([1, 1, 1, 2, 5]), None, None
    batch = rows = draw.choice([1, 2, 3, 5])
    if is_packed:
        tokens = tokens_of(draw, most)
        bounds = bounds_of(draw, tokens)
        if draw.random() < 0.3:
            bounds = [min(x, tokens // 2) for x in bounds]  # tokens of no sequence
        batch, rows = 1, len(bounds) - 1
    tensors, arguments, of_state = _given(draw, op, p, batch, tokens, bounds)
    slots = _slots(draw, rows, True)
    tensors["state"] = torch.randn(slots.count, *of_state, device=DEVICE).to(p.state)
    tensors |= slots.options
    active = rows
    begins = [True] * rows
    if is_packed:
        tensors["cu_seqlens"] = _packing(draw, bounds)
        if draw.random() < 0.3:
            active = draw.randrange(rows + 1)
            tensors["num_active"] = torch.tensor([active], dtype=torch.int32, device=DEVICE)
        if draw.random() < 0.3:
            begins = [draw.random() < 0.5 for _ in range(rows)]
            tensors["has_initial_state"] = torch.tensor(begins, device=DEVICE)
    lengths = [end - begin for begin, end in pairwise(bounds)] if is_packed else [tokens] * rows
    done = [row for row in range(active) if slots.read[row] is not None and lengths[row]]
    names = {"state_indices", "write_indices", "cu_seqlens", "num_active", "has_initial_state", "w0"}
    if op in BASE and p.decay not in ("", "direct") and draw.random() < 0.3:
        w0 = -0.1 * torch.rand(tensors["k"].shape[2:], device=DEVICE)  # with it decays are none that grow a state
        tensors["w0"] = w0.to(FP32 if p.wide else p.dtype)
    v = tensors["x" if op == "ssd" else "v"]
    places = {"state": lay_pool, "out": lay_whole, "cu_seqlens": lambda draw, x: lay(draw, x, False)}
    where = draw.choice(["", "", "out", "input"])  # y goes to
    overwritten = ""
    if where == "out":
        tensors["out"] = torch.randn_like(v)
    elif where == "input":
        overwritten = draw.choice([name for name, x in tensors.items() if x.shape == v.shape and x.dtype == v.dtype])
        places[overwritten] = lay_whole
    most_seqlen = {"max_seqlen": max(lengths)} if is_packed and max(lengths) and draw.random() < 0.3 else {}

    def run(given):
        more = {name: x for name, x in given.items() if name in names}
        more |= {"out": given[overwritten or "out"]} if where else {}
        inputs, options = arguments(given, null_index=slots.null_index, **more, **most_seqlen)
        y = getattr(rwkv_jit, f"{op}_{verb}")(given["state"], *inputs, **options)
        assert not where or y is more["out"]
        return [y, given["state"]]

    def exactly(given):
        pool = given["state"].clone()
        y = torch.zeros(v.shape, dtype=torch.float64, device=DEVICE)
        of_tokens = {name for name, x in tensors.items() if x.dim() > 1 and tuple(x.shape[:2]) == (batch, tokens)}
        fixed = {"A", "D", "A_log", "dt_bias", *(comparing.FIXED.get(op, "") if op in BASE else "")}
        for row in done:
            span = (0, slice(bounds[row], bounds[row + 1])) if is_packed else (row, slice(None))
            part = {
                name: x[span[0] : span[0] + 1, span[1]] if name in of_tokens - fixed - {"state"} else x
                for name, x in given.items()
            }
            if "w0" in given:
                part["w"] = part["w"] + given["w0"]
            inputs, options = arguments(part)
            state = given["state"][slots.read[row]][None]
            state = state if begins[row] else torch.zeros_like(state)
            own, final = getattr(rwkv_jit, f"{op}_ref")(*inputs, state, True, **options)
            y[span[0], span[1]] = own[0]
            if slots.written[row] is not None:
                pool[slots.written[row]] = final[0]
        return [y, pool]

    written = {"state": sorted(slots.written[row] for row in done if slots.written[row] is not None)}
    written[overwritten or "out"] = ...
    name = f"{op}_{verb} {overwritten} {p} {bounds or (rows, tokens)} {slots} active {active}, begin {begins}"
    state_type = tensors["state"].dtype
    dtype = _narrowest({"state": tensors["state"], "v": v}) if state_type != FP32 else v.dtype
    return Call(name, tensors, run, exactly, dtype, written, places)


def _replay(draw, op, verb, p, most):
    """Some steps, a verification of which some tokens count, and a flush."""
    rows = draw.choice([1, 2, 3])
    slots = _slots(draw, rows, False)
    tokens = [draw.choice([1, 1, 2, 3]) for _ in range(draw.randrange(1, 6))]
    tensors, arguments, of_state = _given(draw, op, p, rows, sum(tokens), None)
    fixed = {"A", "D", "A_log", "dt_bias", *(comparing.FIXED.get(op, "") if op in BASE else "")}
    of_tokens = {name for name, x in tensors.items() if tuple(x.shape[:2]) == (rows, sum(tokens))} - fixed
    inputs, v = list(tensors), tensors["x" if op == "ssd" else "v"]
    keys = tensors.get("B" if op == "ssd" else "k")
    key_heads = of_state[0] if keys is None else keys.shape[2]
    state = torch.float32 if p.dtype == FP32 else p.state
    tensors["state"] = torch.randn(slots.count, *of_state, device=DEVICE).to(state)
    tensors |= slots.options
    accepted = draw.randrange(tokens[-1] + 1)
    places = {"state": lay_pool, **{name: lambda draw, x: lay(draw, x, False) for name in inputs}}
    common = {"null_index": slots.null_index, "state_layout": p.layout}

    def part(given, rows, span):
        several = {name: given[name] for name in inputs}
        return {name: x[rows, span] if name in of_tokens else x for name, x in several.items()}

    def run(given):
        ring = rwkv_jit.ReplayRing(
            slots.count, op, of_state[0], p.K, p.V, 3, 3, p.dtype, state, device=DEVICE, key_heads=key_heads
        )
        indices, made, begin = given["state_indices"], [], 0
        for place, count in enumerate(tokens):
            kind = "verify" if place == len(tokens) - 1 else "replay"
            own = part(given, slice(None), slice(begin, begin + count))
            arrays, options = arguments(own, null_index=slots.null_index, state_indices=indices)
            made.append(getattr(rwkv_jit, f"{op}_{kind}")(given["state"], ring, *arrays, **options))
            begin += count
        counts = torch.full((rows,), accepted, dtype=torch.int32, device=DEVICE)
        rwkv_jit.replay_commit(given["state"], ring, counts, state_indices=indices, **common)
        rwkv_jit.replay_flush(given["state"], ring, state_layout=p.layout)
        return [torch.cat(made, 1), given["state"]]

    def exactly(given):
        pool, reference = given["state"].clone(), getattr(rwkv_jit, f"{op}_ref")
        y = torch.zeros(v.shape, dtype=torch.float64, device=DEVICE)
        for row, slot in enumerate(slots.read):
            for count in () if slot is None else (sum(tokens), sum(tokens[:-1]) + accepted):
                arrays, options = arguments(part(given, slice(row, row + 1), slice(count)))
                own, final = reference(*arrays, given["state"][slot][None], True, **options)
                if count == sum(tokens):
                    y[row] = own[0]
                pool[slot] = final[0]
        return [y, pool]

    written = {"state": sorted(x for x in slots.read if x is not None)}
    dtype = _narrowest({"state": tensors["state"], "v": v})
    return Call(f"{op}_replay {p} {tokens} {accepted} {slots}", tensors, run, exactly, dtype, written, places)


# ---- ops without heads -------------------------------------------------------------------------------------------


def _wkv4(draw, p, most):
    tokens, channels, batch = tokens_of(draw, most), draw.choice([1, 33, 64, 130]), draw.choice([1, 2, 3])
    shape = batch, tokens, channels
    tensors = {"w": torch.linspace(-6, 1, channels, device=DEVICE), "u": torch.randn(channels, device=DEVICE)}
    tensors |= {name: torch.randn(shape, device=DEVICE) for name in "kv"}
    tensors = {name: x.to(p.dtype) for name, x in tensors.items()}
    inputs = list(tensors)
    if draw.random() < 0.5:
        first = [torch.randn(batch, 3, channels, device=DEVICE) for _ in "kv"]
        state = rwkv_jit.wkv4_ref(*(tensors[x].float() for x in "wu"), *first, output_final_state=True)[1]
        tensors["initial_state"] = state.float()

    def run(given, function=rwkv_jit.wkv4):
        state = given.get("initial_state")
        return list(function(*(given[name] for name in inputs), initial_state=state, output_final_state=True))

    exactly = partial(run, function=rwkv_jit.wkv4_ref)
    return Call(f"wkv4 {p} {shape}", tensors, run, exactly, p.dtype)


def _wkv4_update(draw, p, most):
    tokens, channels, rows = draw.choice([1, 1, 4]), draw.choice([1, 33, 64]), draw.choice([1, 2, 4])
    slots = _slots(draw, rows, True)
    shape = rows, tokens, channels
    tensors = {name: torch.randn(channels, device=DEVICE) for name in "wu"}
    tensors |= {name: torch.randn(shape, device=DEVICE) for name in "kv"}
    tensors = {name: x.to(p.dtype) for name, x in tensors.items()}
    first = [torch.randn(slots.count, 3, channels, device=DEVICE) for _ in "kv"]
    state = rwkv_jit.wkv4_ref(*(tensors[x].float() for x in "wu"), *first, output_final_state=True)[1]
    tensors |= {"state": state.float(), **slots.options}
    if draw.random() < 0.4:
        tensors["out"] = torch.randn_like(tensors["v"])

    def run(given):
        more = {name: given[name] for name in ("state_indices", "write_indices", "out") if name in given}
        y = rwkv_jit.wkv4_update(given["state"], *(given[x] for x in "wukv"), null_index=slots.null_index, **more)
        return [y, given["state"]]

    def exactly(given):
        pool, y = given["state"].clone(), torch.zeros(shape, dtype=torch.float64, device=DEVICE)
        for row, (slot, written) in enumerate(zip(slots.read, slots.written, strict=True)):
            if slot is None:
                continue
            own = given["k"][row][None], given["v"][row][None], given["state"][slot][None]
            y[row : row + 1], final = rwkv_jit.wkv4_ref(given["w"], given["u"], *own, True)
            if written is not None:
                pool[written] = final[0]
        return [y, pool]

    there = zip(slots.read, slots.written, strict=True)
    written = {"state": sorted(x for read, x in there if x is not None and read is not None), "out": ...}
    places = {"state": lay_pool, "out": lay_whole}
    return Call(f"wkv4_update {p} {shape} {slots}", tensors, run, exactly, p.dtype, written, places)


def _timex(draw, p, most):
    batch, channels, tokens = draw.choice([1, 2, 5]), draw.choice([1, 3, 40]), max(tokens_of(draw, most), 1)
    tensors = {
        "w": torch.randn(channels, tokens, device=DEVICE),
        "k": torch.randn(batch, channels, tokens, device=DEVICE),
    }
    tensors["w"] = tensors["w"].to(FP32 if p.wide else p.dtype)
    tensors["k"] = tensors["k"].to(p.dtype)
    run = lambda given: [rwkv_jit.timex(given["w"], given["k"], 0.1)]  # noqa: E731
    exactly = lambda given: [rwkv_jit.timex_ref(given["w"], given["k"], 0.1)]  # noqa: E731
    return Call(f"timex {p} {batch} {channels} {tokens}", tensors, run, exactly, p.dtype)


# ---- layers ------------------------------------------------------------------------------------------------------


def _layer(draw, op, p, most):
    heads, rows = draw.choice([1, 2, 3]), draw.choice([1, 2, 7, 33])
    sizes = layer_cases.sizes_of(op, p.how, rows, heads, p.K)
    case = layer_cases.make(op, p.how, sizes, p.dtype, FP32 if p.wide else p.dtype, device=DEVICE)
    given = {"dtype": p.dtype, "normed": p.dtype} if op == "norm_shift" else {}  # what it norms is rounded all the same
    exact = case._replace(options={**case.options, **given})
    places = {"cu_seqlens": lambda draw, x: lay(draw, x, False)}
    return Call(f"{op} {p} {sizes}", case.tensors, case.run, exact.plainly, p.dtype, {}, places)


def _activate_out(draw, p, most):
    case = layer_cases.make("activate", "", (draw.choice([1, 7, 33]), 2, p.K), p.dtype, p.dtype, device=DEVICE)
    kinds, x = case.options["kinds"], case.tensors["x"]
    in_place = draw.random() < 0.5
    tensors = {"x": x} if in_place else {"x": x, "out": torch.randn_like(x)}

    def run(given):
        out = given["x" if in_place else "out"]
        y = rwkv_jit.activate(given["x"], kinds, out=out)
        assert y is out
        return [y]

    def exactly(given):
        return case.plainly({"x": given["x"]})

    written = {"x" if in_place else "out": ...}
    places = {"x": lay_whole if in_place else lay, "out": lay_whole}
    return Call(f"activate {p} {in_place}", tensors, run, exactly, p.dtype, written, places)


def _shift_mix(draw, p, most):
    tokens, channels = tokens_of(draw, min(most, 40)), draw.choice([1, 24, 40, 64])
    bounds = bounds_of(draw, tokens)
    slots = _slots(draw, len(bounds) - 1, False)
    fixed = FP32 if p.wide else p.dtype
    tensors = {"x": layer_cases._apart(torch.randn(tokens, channels, device=DEVICE), 1).to(p.dtype)}
    tensors |= {name: torch.randn(channels, device=DEVICE).to(fixed) for name in ("weight", "bias")}
    tensors["mixes"] = torch.rand(draw.choice([1, 3, 6]), channels, device=DEVICE).to(fixed)
    tensors["shift"] = torch.randn(slots.count, channels, device=DEVICE).to(p.state)
    if draw.random() < 0.5:
        tensors["add"] = torch.randn(tokens, channels, device=DEVICE).to(p.dtype)
    tensors |= {**slots.options, "cu_seqlens": _packing(draw, bounds)}
    off_by_half = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 0.0}[p.state]

    def run(given):
        residual, mixed = rwkv_jit.shift_mix(**given, null_index=slots.null_index)
        return [residual, mixed, given["shift"]]

    def exactly(given):
        taken = {name: x for name, x in given.items() if name not in ("shift", "state_indices", "cu_seqlens")}
        names = "x", "weight", "bias", "mixes"
        x, weight, bias, mixes = (taken[name] for name in names)
        places = [-1 if slot is None else slot for slot in slots.read]
        return list(plain_layer.shift_mix(x, weight, bias, mixes, given["shift"], bounds, places, taken.get("add")))

    of_slots = zip(slots.read, pairwise(bounds), strict=True)
    written = {"shift": sorted(slot for slot, (begin, end) in of_slots if slot is not None and end > begin)}
    places = {"shift": lay_pool, "cu_seqlens": lambda draw, x: lay(draw, x, False)}
    dtype = max(p.dtype, p.state, key=LIMITS.__getitem__) if off_by_half else p.dtype
    return Call(f"shift_mix {p} {bounds} {slots}", tensors, run, exactly, dtype, written, places)


def _convolution(draw, p, most):
    tokens, channels, width = max(tokens_of(draw, most), 1), draw.choice([1, 7, 24, 64]), draw.choice([2, 3, 4, 8])
    bounds = bounds_of(draw, tokens) if draw.random() < 0.4 else None
    batch = 1 if bounds else draw.choice([1, 2, 3])
    fixed = FP32 if p.wide else p.dtype
    tensors = {"x": torch.randn(batch, tokens, channels, device=DEVICE).to(p.dtype)}
    tensors["weight"] = torch.randn(channels, width, device=DEVICE).to(fixed)
    if draw.random() < 0.5:
        tensors["bias"] = torch.randn(channels, device=DEVICE).to(fixed)
    if draw.random() < 0.5:
        of_state = len(bounds) - 1 if bounds else batch, channels, width - 1
        tensors["initial_state"] = torch.randn(of_state, device=DEVICE).to(p.dtype)
    if bounds:
        tensors["cu_seqlens"] = _packing(draw, bounds)
    activation = draw.choice([None, "silu"])

    def run(given):
        return list(rwkv_jit.causal_conv1d(**given, activation=activation, output_final_state=True))

    def exactly(given):
        return list(plain_convolution.causal_conv1d(**given, activation=activation))

    places = {"cu_seqlens": lambda draw, x: lay(draw, x, False)}
    name = f"causal_conv1d {p} {batch}x{tokens}x{channels} {width} {bounds} {activation}"
    return Call(name, tensors, run, exactly, p.dtype, {}, places)


def _convolution_update(draw, p, most):
    rows, tokens, channels, width = (draw.choice(x) for x in ([1, 3, 5], [1, 1, 2, 4], [1, 7, 24, 64], [2, 3, 4, 8]))
    slots = _slots(draw, rows, False)
    is_ring = draw.random() < 0.3
    length, fixed = width - 1 + draw.choice([0, 0, 1, 3, 20 * is_ring]), FP32 if p.wide else p.dtype
    is_last, activation = draw.random() < 0.4, draw.choice([None, "silu"])
    tensors = {"x": torch.randn(rows, tokens, channels, device=DEVICE).to(p.dtype)}
    tensors["weight"] = torch.randn(channels, width, device=DEVICE).to(fixed)
    if draw.random() < 0.5:
        tensors["bias"] = torch.randn(channels, device=DEVICE).to(fixed)
    of_slot = (length, channels) if is_last else (channels, length)
    tensors["conv_state"] = torch.randn(slots.count, *of_slot, device=DEVICE).to(p.state)
    tensors |= slots.options
    if is_ring:
        tensors["cache_seqlens"] = torch.tensor([draw.randrange(50) for _ in range(rows)], device=DEVICE).int()
    if draw.random() < 0.4:
        tensors["out"] = torch.randn_like(tensors["x"])

    def run(given):
        pool = given["conv_state"]
        given = {**given, "conv_state": pool.transpose(1, 2) if is_last else pool}
        y = rwkv_jit.causal_conv1d_update(**given, activation=activation, null_index=slots.null_index)
        return [y, pool]

    def exactly(given):
        pool = given["conv_state"].transpose(1, 2) if is_last else given["conv_state"]
        indices = torch.tensor([-1 if slot is None else slot for slot in slots.read])
        rounded = pool.to(p.state)  # tokens are rounded as the pool has them
        more = {"slots": indices, "cache_seqlens": given.get("cache_seqlens")}
        y, pool = plain_convolution.update(given["x"], rounded, given["weight"], given.get("bias"), activation, **more)
        return [y, pool.double().transpose(1, 2) if is_last else pool.double()]

    written = {"conv_state": sorted(x for x in slots.read if x is not None), "out": ...}
    places = {"conv_state": lay_pool, "out": lay_whole}
    dtype = max(p.dtype, p.state, key=LIMITS.__getitem__)
    name = f"causal_conv1d_update {p} {rows}x{tokens}x{channels} {width} {length} {is_last} {slots}"
    return Call(name, tensors, run, exactly, dtype, written, places)


def _cross_entropy(draw, p, most):
    rows, classes = draw.choice([1, 5, 33]), draw.choice([2, 100, 1003])
    targets = torch.randint(classes, (rows,), device=DEVICE)
    targets[torch.rand(rows, device=DEVICE) < 0.3] = -100
    tensors = {"logits": torch.randn(rows, classes, device=DEVICE).to(p.dtype), "targets": targets}

    def run(given, function=rwkv_jit.cross_entropy):
        return [function(given["logits"], given["targets"], reduction="sum")]

    exactly = partial(run, function=torch.nn.functional.cross_entropy)
    return Call(f"cross_entropy {p} {rows}x{classes}", tensors, run, exactly, p.dtype)


def _linear_cross_entropy(draw, p, most):
    rows, classes, width = draw.choice([1, 5, 33]), draw.choice([2, 100, 203]), draw.choice([8, 33, 64])
    targets = torch.randint(classes, (rows,), device=DEVICE)
    targets[torch.rand(rows, device=DEVICE) < 0.3] = -100
    tensors = {
        "hidden": torch.randn(rows, width, device=DEVICE).to(p.dtype),
        "weight": (torch.randn(classes, width, device=DEVICE) / width**0.5).to(p.dtype), "targets": targets,
    }  # fmt: skip

    def run(given):
        return [rwkv_jit.linear_cross_entropy(given["hidden"], given["weight"], given["targets"], reduction="sum")]

    def exactly(given):
        logits = given["hidden"] @ given["weight"].T  # [rows, classes]
        return [torch.nn.functional.cross_entropy(logits, given["targets"], reduction="sum")]

    return Call(f"linear_cross_entropy {p} {rows}x{classes}x{width}", tensors, run, exactly, p.dtype)


_OTHERS = dict(
    zip(OTHERS, (
        _shift_mix, _convolution, _convolution_update, _cross_entropy, _linear_cross_entropy, _activate_out,
    ), strict=True)
)  # fmt: skip
