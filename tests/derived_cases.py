"""Calls of the ops that are made of wkv7 and gla, and the same token by token, as the equations are written."""

import math
from typing import Any, NamedTuple

import torch
from problems import ROWS as OPS

import rwkv_jit
from rwkv_jit.call import torch_op
from rwkv_jit.call.options import complete
from rwkv_jit.parallel import paused, summaries
from rwkv_jit.schedules.table import ALL as ALL_OPS

# How calls are made: what an op has beside its inputs, by words.
WAYS = {
    "kda": ("", "norm twice_sigmoid", "raw bias sigmoid norm", "bounded flat bias norm", "raw"),
    "gated_delta_rule": ("", "norm", "raw bias sigmoid norm", "raw twice_sigmoid"),
    "delta_rule": ("", "norm sigmoid", "twice_sigmoid"),
    "gated_delta_rule2": ("norm", "raw bias", "bounded bias norm"),
    "simple_gla": ("", "fixed"),
    "hgrn2": ("",),
    "ssd": ("", "D z bias softplus", "wide z limit", "bias D softplus limit"),
}  # fmt: skip
ALL = [(op, how) for op, several in WAYS.items() for how in several]
DELTA = ("kda", "gated_delta_rule", "delta_rule", "gated_delta_rule2")
USUAL = (-1.0, -0.01)  # log-decays
WIDE = ("g", "beta", "dt", "A", "A_log", "dt_bias", "D")  # what may be float32 beside inputs of 16 bits
LIMIT = (0.1, 0.7)  # of steps


class Case(NamedTuple):
    """A call: its inputs in their order, its parameters and options by name, and the state that it begins with."""

    op: str
    inputs: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    options: dict[str, Any]
    state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None = None

    @property
    def tensors(self):
        """All that may have a gradient."""
        return {**self.inputs, **self.parameters, **({} if self.state is None else {"initial_state": self.state})}

    def replaced(self, tensors):
        """The same call of other tensors."""
        return self._replace(
            inputs={name: tensors[name] for name in self.inputs},
            parameters={name: tensors[name] for name in self.parameters}, state=tensors.get("initial_state"),
        )  # fmt: skip

    def run(self, function=None, **options):
        """y and the final state."""
        function = function or getattr(rwkv_jit, self.op)
        given = self.state, True, self.cu_seqlens
        return function(*self.inputs.values(), *given, **self.parameters, **self.options, **options)

    def reference(self):
        """The call in float64, of a reference."""
        return self.replaced({name: x.detach().double() for name, x in self.tensors.items()})

    def part(self, index):
        """The inputs and the parameters of some tokens, or of some rows."""
        op = ALL_OPS[self.op]
        streamed = [name for name, dims in zip(op.public_names, op.inputs.values(), strict=True) if "T" in dims]
        streamed = [x for x in streamed if x != "g" or self.inputs["g"].dim() > 1]
        inputs = {name: x[index] if name in streamed else x for name, x in self.inputs.items()}
        more = {name: x[index] if name == "z" else x for name, x in self.parameters.items()}
        return self._replace(inputs=inputs, parameters=more)


def make(
    op, how="", sizes=(2, 13, 2, 4, 6, 5), dtype=torch.float64, wide=None, state_type=None, decays=USUAL, bounds=None,
    device="cpu", layout=None, has_state=True,
):  # fmt: skip
    """Return a call of `sizes` B, T, the heads of keys and of values, K and V; gates and rates are `wide`."""
    batch, tokens, key_heads, heads, head_size, value_size = sizes
    wide, words = wide or dtype, how.split()
    if op == "hgrn2":
        key_heads = heads
    lead = (batch, tokens)

    def random(*shape):
        return torch.randn(shape, device=device)

    def share(*shape):
        return torch.rand(shape, device=device)

    def log_decays(*shape):
        low, high = decays
        return low + (high - low) * share(*shape)

    key, value = (*lead, key_heads, head_size), (*lead, heads, value_size)
    channels, scalars = (*lead, heads, head_size), (*lead, heads)
    # Keys whose norm is about 1 leave states bounded.
    q, k = random(*key), random(*key) * (1 if "norm" in words else head_size**-0.5)
    of_g = channels if op in ("kda", "gated_delta_rule2", "hgrn2") else scalars
    is_raw = "raw" in words or "bounded" in words
    g = random(*of_g) if is_raw else log_decays(*((heads,) if "fixed" in words else of_g))
    beta = share(*(channels if op == "gated_delta_rule2" else scalars))
    beta = random(*scalars) if "sigmoid" in how else beta
    if op == "ssd":
        steps = random(*scalars) if "softplus" in words else share(*scalars)
        inputs = {"x": random(*value), "dt": steps, "A": log_decays(heads), "B": k, "C": q}
    else:
        made = {"q": q, "k": k, "v": random(*value), "g": g, "beta": beta, "write_gate": share(*value)}
        inputs = {name: made[name] for name in OPS[op].inputs}
    parameters, options = {}, {}
    if is_raw:
        parameters["A_log"] = random(heads) / 2
    if "bias" in words:
        of_bias = (heads,) if op in ("ssd", "gated_delta_rule") else (heads, head_size)
        parameters["dt_bias"] = random(math.prod(of_bias)) if "flat" in words else random(*of_bias)
    if "D" in words or "wide" in words:
        parameters["D"] = random(heads, value_size) if "wide" in words else random(heads)
    if "z" in words:
        parameters["z"] = random(*value)
    if "bounded" in words:
        options["lower_bound"] = -5.0
    if "norm" in words:
        options["qk_norm"] = True
    if "sigmoid" in how:
        options["beta_map"] = "twice_sigmoid" if "twice_sigmoid" in words else "sigmoid"
    if "softplus" in words:
        options["dt_softplus"] = True
    if "limit" in words:
        options["dt_limit"] = LIMIT
    if layout:
        options["state_layout"] = layout
    sequences = batch if bounds is None else len(bounds) - 1
    of_state = (heads, head_size, value_size)
    if (layout or OPS[op].state_layout) == "vk":
        of_state = heads, value_size, head_size
    state = random(sequences, *of_state).to(state_type or dtype) if has_state else None
    bounds = None if bounds is None else torch.tensor(bounds, device=device)
    inputs, parameters = (
        {name: x.to(wide if name in WIDE else dtype) for name, x in several.items()} for several in (inputs, parameters)
    )
    return Case(op, inputs, parameters, options, state, bounds)


def pooled(case, kind, pool, ring=None, **options):
    """Its y, as an update, with a ring or of sequences of any lengths, whose states are in a pool."""
    function, beside = getattr(rwkv_jit, f"{case.op}_{kind}"), () if ring is None else (ring,)
    with torch.no_grad():
        return function(pool, *beside, *case.inputs.values(), **case.parameters, **case.options, **options)


def replay_in_any_order(
    op, how, layout, dtype, state_type, draw, sizes=(2, 4, 12, 20), length=3, drafts=4, steps=16, device="cpu",
    rows=4, slots=7,
):  # fmt: skip
    """Steps, drafts and flushes of random rows of a pool; return the largest error of y, and that of states.

    One that is no number is the largest.
    """
    key_heads, heads, size, value_size = sizes
    key_heads = heads if op == "hgrn2" else key_heads
    wide, reference = torch.promote_types(dtype, torch.float32), getattr(rwkv_jit, f"{op}_ref")

    def tokens_of(count, rows=rows):
        return make(op, how, (rows, count, *sizes), dtype, wide, state_type, device=device, layout=layout)

    case = tokens_of(1, slots)
    fixed = {name: x for name, x in case.inputs.items() if x.dim() == 1}
    fixed |= {name: case.parameters[name] for name in ("A_log", "dt_bias", "D") if name in case.parameters}
    pool = case.state.contiguous()
    ring = rwkv_jit.ReplayRing(slots, op, heads, size, value_size, length, drafts, dtype, state_type, device, key_heads)
    for x in ring.tensors:
        if x.is_floating_point():
            x.fill_(math.nan)
    truth, options, errors = pool.double().clone(), {"state_layout": case.options["state_layout"]}, []
    for _ in range(steps):
        places, count = torch.randperm(slots)[:rows], draw.randint(1, drafts)
        places[draw.randrange(rows)] = -1
        given = tokens_of(count)
        given = given.replaced({**given.tensors, **fixed})
        kind, counts = draw.choice(["replay", "replay", "verify"]), [count] * rows
        out = torch.full_like(given.inputs["x" if op == "ssd" else "v"], math.nan)
        index = places.to(device, torch.int32)
        assert pooled(given, kind, pool, ring=ring, state_indices=index, out=out) is out
        if kind == "verify":
            counts = [draw.randint(0, count) for _ in range(rows)]
            accepted = torch.tensor(counts, dtype=torch.int32, device=device)
            rwkv_jit.replay_commit(pool, ring, accepted, state_indices=index, **options)
        for row, slot in enumerate(places.tolist()):
            if slot < 0:
                assert not out[row].any()
                continue
            own = given.part(slice(row, row + 1))._replace(state=truth[slot : slot + 1]).reference()
            want, _ = own.run(reference)
            errors.append(float((out[row] - want[0]).norm() / want.norm()))
            if counts[row]:
                truth[slot] = own.part((slice(None), slice(counts[row]))).run(reference)[1][0]
        assert int(ring.cursors.max()) <= length
    rwkv_jit.replay_flush(pool, ring, **options)
    assert not ring.cursors.any()
    assert not ring.arrivals.any()
    return float(torch.tensor(errors).max()), float((pool - truth).norm() / truth.norm())


def check_without_slots(op, how, kind, is_whole, null_index, dtype, device="cpu"):
    """Rows without a slot get zeros and change no state, whatever their inputs are.

    So do tokens of no sequence, and of sequences that are not active. A call that is not `is_whole` is without T or B.
    """
    slots = torch.tensor([2, null_index, 3, 1, null_index - 3, 4])
    gone = slots <= null_index
    sizes = (6, 2, 1, 2, 4, 6) if kind == "update" else (1, 14, 1, 2, 4, 6)
    case = make(op, how, sizes, dtype, has_state=False, device=device)
    options = {"state_indices": slots.to(device), "null_index": null_index}
    if kind == "varlen":
        lengths = torch.tensor([3, 2, 0, 4, 2, 1])
        options["cu_seqlens"] = torch.tensor([0, *lengths.cumsum(0)], device=device)
        options["num_active"] = torch.tensor([5], dtype=torch.int32, device=device)
        gone[5] = True
        gone = torch.cat([gone.repeat_interleave(lengths), torch.tensor([True, True])])
        gone = (slice(None), gone) if is_whole else gone
    if not is_whole:
        case = case.part((slice(None), 0) if kind == "update" else 0)
    pool = torch.randn(5, *((2, 6, 4) if OPS[op].state_layout == "vk" else (2, 4, 6)), device=device)
    want_pool = pool.clone()
    want = pooled(case, kind, want_pool, **options)
    fixed = {id(x) for x in (case.inputs | case.parameters).values()}
    case = case.part(slice(None))  # what belongs to rows or tokens is a view now
    for x in (case.inputs | case.parameters).values():
        if id(x) not in fixed:
            x[gone] = float("nan")
    for out in (None, torch.full_like(want, float("nan"))):
        own = pool.clone()
        found = pooled(case, kind, own, **options, out=out)
        assert out is None or found is out
        assert not found[gone].any()
        assert torch.equal(found, want)
        assert torch.equal(own, want_pool)


def with_decays(case, log_decays):
    """The same call with raw gates that make these log-decays: A_log is 0, and what is added is taken off before."""
    g = case.inputs["g"]
    raw = log_decays.neg().double().clamp_min(1e-30)
    raw = torch.where(raw > 30, raw, raw.expm1().log())
    if "dt_bias" in case.parameters:
        raw = raw - case.parameters["dt_bias"].view(g.shape[-2:])
    parameters = {**case.parameters, "A_log": torch.zeros_like(case.parameters["A_log"])}
    return case._replace(inputs={**case.inputs, "g": raw.to(g.dtype)}, parameters=parameters)


def differentiate(case, function=None, weights=None, of=(0, 1), **options):
    """y and the final state, the gradients by name, and the weights of the results, of which only those `of` count."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors.items()}
    y, final = case.replaced(leaves).run(function, **options)
    if weights is None:
        weights = torch.randn_like(y), torch.randn_like(final)
    of_results = [weight.to(x.dtype) for weight, x in zip(weights, (y, final), strict=True)]
    counting = [(y, final)[place] for place in of], [*leaves.values()], [of_results[place] for place in of]
    found = torch.autograd.grad(*counting, allow_unused=True, materialize_grads=True)
    return (y.detach(), final.detach()), dict(zip(leaves, found, strict=True)), of_results


def in_two_phases(case, pauses):
    """Results, gradients and weights of a part that is told the state before it, and the gradient of that behind it.

    What the part says that it does to any state is what it does to these; `pauses` is whether its kernels wait.
    """
    op, turned = ALL_OPS[case.op], (case.options.get("state_layout") or OPS[case.op].state_layout) == "kv"
    options = {name: x for name, x in case.options.items() if name not in op.traits}
    named = case.inputs | case.parameters
    inputs = [named.get(name) for name in op.public_names]
    call = paused.Call(op, complete(op, options, inputs[0]), torch_op.traits_of(op, case.options))
    way = paused.way_of(call, inputs, [x is not None for x in (*inputs, case.state)])
    assert isinstance(way, paused._Kernels) == pauses
    state, told = case.state.mT if turned else case.state, []

    def at_summary(*summary):
        told.append([x.clone() for x in summary])
        return grad_final if len(summary) == 1 else state

    y, final, saved = way.forward(inputs, at_summary)
    dy, grad_final = torch.randn_like(y), torch.randn_like(final)
    *grads, of_state = way.backward(saved, dy, at_summary)
    alone = way.summary(inputs)
    (bias, transition), (bias_of_gradient,) = told
    assert torch.equal(alone[0], bias)
    assert torch.equal(alone[1], transition)
    assert relative(summaries.after(state, bias, transition), final) < 2e-2
    assert relative(summaries.after(grad_final, bias_of_gradient, transition, backward=True), of_state) < 2e-2
    final, of_state, grad_final = (x.mT if turned else x for x in (final, of_state, grad_final))
    made = dict(zip((*op.public_names, "initial_state"), (*grads, of_state), strict=True))
    return (y, final), {name: made[name] for name in case.tensors}, (dy, grad_final)


def relative(x, want):
    """The norm of the error beside that of what is right."""
    return float((x.double() - want.double()).norm() / want.double().norm())


def exactly(case, weights, of=(0, 1)):
    """Results and gradients of the reference in float64."""
    return differentiate(case.reference(), getattr(rwkv_jit, f"{case.op}_ref"), weights, of)[:2]


def roundings_of_own_parts(sizes, dtype, device="cpu", **options):
    """Return the errors of y, dq, dk and dv of `simple_gla` whose tokens forget all before them, by name.

    They are relative to the errors of exact numbers that are rounded to the type.
    """
    case = make("simple_gla", "", sizes, dtype, torch.float32, torch.float32, decays=(-200.0, -150.0), device=device)
    results, grads, weights = differentiate(case, of=(0,), **options)
    exact, exact_grads = exactly(case, weights, of=(0,))
    pairs = {"y": (results[0], exact[0]), **{f"d{name}": (grads[name], exact_grads[name]) for name in "qkv"}}
    return {
        name: float((found.double() - want).norm() / (want.to(dtype).double() - want).norm())
        for name, (found, want) in pairs.items()
    }


# How far gradients may be from those in float64. Operands are rounded to the dtype of the inputs, and so are the
# gradients of operands.
LIMITS = {"fp32": 2e-5, "fp16": 3e-3, "bf16": 1.5e-2}
# The same of one number a head, beside what it usually is. For the calls of the GPU tests on CPU tensors, the largest
# error of a head is 3e-3 in the middle and 1.1e-2 at most in bfloat16, 3e-4 and 1.2e-3 in float16, 2e-7 and 4e-6 in
# float32; 50 seeds of the smaller ones.
OF_HEADS = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 4e-2}
# Of what heads usually have together, the share that each has at least: strong decays leave one next to nothing.
LEAST_SHARE = 0.1


def is_of_heads(case, name):
    """Whether a tensor has one number a head, whose gradient is a sum over all tokens, of both signs."""
    return case.tensors[name].shape == case.inputs["x" if case.op == "ssd" else "v"].shape[2:3]


def usual_sizes(case, name, of=(0, 1)):
    """The root mean square, over random weights of the results, of the exact gradient of each head's one number.

    The gradient is linear in these weights, so this is the norm of the derivative of the head's results by the number;
    no other head has a part in them. What is left of the sum for some weights may be far less.
    """
    exact, step = case.reference(), 1e-5
    number = exact.tensors[name]
    with torch.no_grad():
        more, less = (
            exact.replaced({**exact.tensors, name: number + change}).run(getattr(rwkv_jit, f"{case.op}_ref"))
            for change in (step, -step)
        )
    changes = [((more[place] - less[place]) / (2 * step)).movedim(1 if place else 2, 0) for place in of]
    return sum(change.flatten(1).square().sum(1) for change in changes).sqrt()


def usual_norms(case, draws=16):
    """The root mean square, over random weights of the results, of the norms of the exact gradients by name.

    Where decays are strong a few numbers make a norm, each a sum of K V terms of both signs. For some weights next to
    nothing is left of them, but roundings are those of the terms.
    """
    leaves = {name: x.requires_grad_() for name, x in case.reference().tensors.items()}
    results = case.replaced(leaves).run(getattr(rwkv_jit, f"{case.op}_ref"))
    weights = [torch.randn(draws, *x.shape, dtype=x.dtype, device=x.device) for x in results]
    found = torch.autograd.grad(results, [*leaves.values()], weights, allow_unused=True, is_grads_batched=True)
    norms = [torch.zeros(()) if x is None else (x.square().sum() / draws).sqrt() for x in found]
    return dict(zip(leaves, norms, strict=True))


def error_of(case, name, grad, want, of=(0, 1), norm=None):
    """How far a gradient is from that in float64, relative to its norm; a head's one number, to its usual size.

    A `norm` takes the place of the gradient's.
    """
    assert grad.shape == want.shape
    assert torch.isfinite(grad).all()
    apart = grad.detach().double() - want
    if not is_of_heads(case, name):
        return float(apart.norm() / (want.norm() if norm is None else norm).clamp_min(1e-300))
    usual = usual_sizes(case, name, of)
    least = LEAST_SHARE * usual.square().mean().sqrt()
    return float((apart.abs() / usual.maximum(least).clamp_min(1e-300)).max())


def limit_of(case, name, kind):
    """How large the error of the gradient of an input may be, where q is of a `kind`."""
    # The gradient of D takes no rounded products.
    return (OF_HEADS if is_of_heads(case, name) and name != "D" else LIMITS)[kind]


# ---- one token and one head after another ------------------------------------------------------------------------


def by_hand(case):
    """y and the final state, with states [V, K] of one head of one sequence at a time."""
    given = {name: x.double() for name, x in (case.inputs | case.parameters).items()}
    options = {"lower_bound": None, "qk_norm": False, "beta_map": "identity", "dt_limit": (0.0, math.inf)}
    options |= case.options
    values = given["x" if case.op == "ssd" else "v"]
    batch, tokens, heads, _ = values.shape
    is_vk = case.options.get("state_layout", OPS[case.op].state_layout) == "vk"
    states = case.state.double() if is_vk else case.state.double().mT
    bounds = case.cu_seqlens
    spans = [(row, 0, tokens) for row in range(batch)]
    if bounds is not None:
        spans = [(0, int(begin), int(end)) for begin, end in zip(bounds, bounds[1:], strict=False)]
    y, finals = torch.zeros_like(values), torch.empty_like(states)
    step = _STEPS.get(case.op, _delta)
    for sequence, (row, begin, end) in enumerate(spans):
        for head in range(heads):
            state = states[sequence, head]
            for token in range(begin, end):
                state, y[row, token, head] = step(case.op, given, options, state, (row, token), head)
            finals[sequence, head] = state
    return y, finals if is_vk else finals.mT


def _of_key(x, at, head, heads):
    return x[at][head * x.shape[2] // heads]


def _delta(op, given, options, state, at, head):
    heads, size = given["v"].shape[2], given["k"].shape[3]
    q, k = (_of_key(given[name], at, head, heads) for name in "qk")
    if options["qk_norm"]:
        q, k = (x / math.sqrt(float(x @ x) + 1e-6) for x in (q, k))
    g = given["g"][at][head] if "g" in given else torch.zeros(())
    if "A_log" in given:
        if "dt_bias" in given:
            g = g + given["dt_bias"].reshape(heads, *g.shape)[head]
        speed = given["A_log"][head].exp()
        if options["lower_bound"] is None:
            g = -speed * torch.log1p(g.exp())
        else:
            g = options["lower_bound"] / (1 + torch.exp(-speed * g))
    beta, v = given["beta"][at][head], given["v"][at][head]
    if options["beta_map"] != "identity":
        beta = {"sigmoid": 1, "twice_sigmoid": 2}[options["beta_map"]] / (1 + torch.exp(-beta))
    state = state * g.exp().expand(size)
    u = given["write_gate"][at][head] * v - state @ (beta * k) if op.endswith("2") else beta * (v - state @ k)
    state = state + torch.outer(u, k)
    return state, state @ q * size**-0.5


def _simple(op, given, options, state, at, head):
    heads, size = given["v"].shape[2], given["k"].shape[3]
    q, k = (_of_key(given[name], at, head, heads) for name in "qk")
    g = given["g"][head] if given["g"].dim() == 1 else given["g"][at][head]
    state = state * g.exp() + torch.outer(given["v"][at][head], k)
    return state, state @ q * size**-0.5


def _hgrn2(op, given, options, state, at, head):
    g = given["g"][at][head]
    state = state * g.exp() + torch.outer(given["v"][at][head], 1 - g.exp())
    return state, state @ given["q"][at][head]


def _ssd(op, given, options, state, at, head):
    x, heads = given["x"][at][head], given["x"].shape[2]
    keys, queries = (_of_key(given[name], at, head, heads) for name in "BC")
    step = given["dt"][at][head] + (given["dt_bias"][head] if "dt_bias" in given else 0)
    step = torch.log1p(step.exp()) if options.get("dt_softplus") else step
    least, most = options["dt_limit"]
    step = step.clamp(least, most)
    state = state * (step * given["A"][head]).exp() + torch.outer(step * x, keys)
    y = state @ queries
    if "D" in given:
        y = y + given["D"][head] * x
    if "z" in given:
        z = given["z"][at][head]
        y = y * z / (1 + torch.exp(-z))
    return state, y


_STEPS = {"simple_gla": _simple, "hgrn2": _hgrn2, "ssd": _ssd}
