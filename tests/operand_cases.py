"""Launches around a recurrence, alone, and the same in float64 as the equations are written."""

import math
from typing import NamedTuple

import plain_layer
import torch
import torch.nn.functional as F
from comparing import relative

from rwkv_jit.call import tensors
from rwkv_jit.call.plan import Plan
from rwkv_jit.schedules import common, delta_operands, operands, schedule
from rwkv_jit.schedules import layers as steps
from rwkv_jit.schedules.operands import Behind, Operands
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, renamed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {name: dtype for dtype, name in tensors.STORAGE.items()}
LIMITS = {FP32: 2e-6, FP16: 2e-3, BF16: 1e-2}
LIMIT = (0.25, 1.5)  # of steps
# What may be of another type than rows, and in which words of a case inputs are there.
WIDE = ("g", "dt", "A", "dt_bias", "D")
LAYOUTS = ("plain", "strided", "heads first", "unaligned")
WORDS = {
    "operands": (
        "heads", "heads fixed", "heads keys", "heads keys fixed", "steps", "steps keys softplus bias",
        "steps keys bias limit", "steps softplus bias limit D", "steps keys D channels", "gates", "keys",
    ),
    "behind": ("D", "D channels", "z", "D z", "D channels z", "z sigmoid", "z identity"),
    "head_steps": ("", "softplus bias", "softplus limit", "bias limit"),
}  # fmt: skip
# Operands of delta rules.
DELTA = (
    "", "l2 q", "channels log l2 q", "log q", "channels softplus bias sigmoid l2 q",
    "channels bounded bias twice_sigmoid l2 q", "softplus bias sigmoid l2 q", "softplus", "channels bounded q",
    "channels log rates l2 q", "channels softplus rates bias q", "log l2 q",
)  # fmt: skip
LOWER_BOUND = -5.0
ALL = [(name, words) for name, several in WORDS.items() for words in several]


class Case(NamedTuple):
    """What a case reads, by name, the gradients of what it writes, and what it is."""

    name: str
    words: str
    problem: Problem
    inputs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]  # by the names of what is written

    @property
    def how(self):
        """Where operands come from."""
        words, source = self.words.split(), self.words.split()[0] if self.words else "steps"
        keys = {"q": "q", "k": "k"} if "keys" in words else {}
        limits = LIMIT if "limit" in words else None
        if source == "steps" or self.name == "head_steps":
            more = {"dt_bias": "dt_bias"} if "bias" in words else {}
            v = {"v": "v"} if self.name == "operands" else {}
            return Operands(
                "steps", **keys, **v, g="dt", A="A", **more, has_softplus="softplus" in words, limits=limits
            )
        return Operands("none" if source == "keys" else source, **keys, g="" if source == "keys" else "g")

    @property
    def behind(self):
        """What stands behind a recurrence."""
        words = self.words.split()
        share = {"x": "v", "D": "D"} if "D" in words else {}
        gate = next((word for word in ("sigmoid", "identity") if word in words), "silu")
        return Behind(**share, **({"z": "z"} if "z" in words else {}), gate=gate)


def of_problem(name, words, sizes, dtype, wide, gpu):
    """Return a case of `sizes` B, T, heads of keys and of values, K and V, without tensors."""
    B, T, G, H, K, V = sizes
    several, dims = words.split(), dict[str, str]()
    if "keys" in several:
        dims |= {"q": "BTGK", "k": "BTGK"}
    if name == "behind":
        dims |= {"y": "BTHV"}
    if several[:1] == ["steps"] or "D" in several:
        dims |= {"v": "BTHV"}
    if several[:1] == ["steps"] or name == "head_steps":
        dims |= {"dt": "BTH", "A": "H"}
    if several[:1] in (["heads"], ["gates"]):
        dims |= {"g": "BTHK" if several[0] == "gates" else "H" if "fixed" in several else "BTH"}
    dims |= {"dt_bias": "H"} if "bias" in several else {}
    dims |= {"z": "BTHV"} if "z" in several else {}
    dims |= {"D": "HV" if "channels" in several else "H"} if "D" in several else {}
    if not any(each in dims for each in ("q", "v", "y")):
        dims = {"rows": "BTHK", **dims}  # what says the type of rows
    lead = next(place for place, each in enumerate(dims) if each in ("q", "v", "y", "rows"))
    op = Op("around", dims, "diagonal", lead=lead, wide=WIDE)
    types = {each: tensors.STORAGE[wide if each in WIDE else dtype] for each in dims}
    p = Problem(op, gpu, types, B=B, T=T, H=H, K=K, V=V, N=B, G=G if "keys" in several else 0)
    return Case(name, words, p, {}, {})


def make(name, words, sizes, dtype=BF16, wide=FP32, layout="plain", device="cuda"):
    """Return a case with inputs, and gradients of what it writes; both are random."""
    case = of_problem(name, words, sizes, dtype, wide, tensors.gpu(0))
    p = case.problem
    inputs = {
        each: _random(each, p.shape(each), DTYPES[p.types[each]], layout if "T" in of else "plain", device, words)
        for each, of in p.op.inputs.items()
    }  # fmt: skip
    results = results_of(case)
    if case.how.source == "gates":  # decays are the input itself
        results["w"] = Result((p.B, p.T, p.H, p.K), p.types["g"])
    grads = {each: torch.randn(x.shape, device=device).to(DTYPES[x.dtype]) for each, x in results.items()}
    return case._replace(inputs=inputs, grads=grads)


def _random(name, shape, dtype, layout, device, words):
    x = torch.randn(shape, device=device)
    if name == "dt":  # some of them on both limits, and beyond 20
        x = x.abs() if "softplus" not in words else x
        flat = x.view(-1)
        flat[::7], flat[3::7], flat[5::11] = LIMIT[0], LIMIT[1], 25.0 if "softplus" in words else 0.5
    if name in ("g", "A"):
        x = -x.abs()
    x = x.to(dtype)
    if layout == "strided":
        wider = torch.full((*shape[:-1], shape[-1] + 8), math.nan, device=device, dtype=dtype)
        wider[..., : shape[-1]] = x
        return wider[..., : shape[-1]]
    if layout == "heads first" and len(shape) > 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "unaligned":
        whole = torch.empty(x.numel() + 1, device=device, dtype=dtype)
        whole[1:] = x.reshape(-1)
        return whole[1:].view(shape)
    return x


def results_of(case):
    """Return what a case writes."""
    p = case.problem
    if case.name == "behind":
        return {"out": Result((p.B, p.T, p.H, p.V), operands._io(p))}
    if case.name == "head_steps":
        return {name: Result((p.B, p.T, p.H), "fp32") for name in ("step", "w")}
    return {name: Result(*each) for name, each in operands._operand_sizes(p, case.how).items()}


def gradients_of(case):
    """Return the gradients that a case has."""
    p, absent = case.problem, {"rows"}
    if case.name == "operands":
        absent |= {"D"}
    if case.name == "behind" and not case.behind.z:
        absent |= {"y"}  # whose gradient is that of the output
    return {f"d{name}": Result(p.shape(name), p.types[name]) for name in p.op.inputs if name not in absent}


def forward(case):
    """Return the schedule that writes what a case writes."""
    p, how, behind = case.problem, case.how, case.behind
    if case.name == "behind":
        step, vectors = operands.skip_gate(p, behind, "y", "out"), operands.behind_vectors(p, behind, "y")
    elif case.name == "head_steps":
        step, vectors = operands.head_steps(p, how), {}
    else:
        step, vectors = operands.operands(p, how), operands.operand_vectors(p, how)
    return Schedule((step,), results_of(case), vectors=vectors)


def backward(case):
    """Return the schedule of the gradients."""
    p, how, behind = case.problem, case.how, case.behind
    if case.name == "behind":
        names = {"dy": "d_y"} if behind.z else {}
        part = operands.skip_gate_gradients(p, behind, "y", names)
        vectors = operands.behind_vectors(p, behind, "y", "dy")
    elif case.name == "head_steps":
        part, vectors = operands.head_step_gradients(p, how), {}
    else:
        behind = behind if behind.D else None
        part = operands.operand_gradients(p, how, behind)
        vectors = operands.operand_vectors(p, how, behind)
    results = {"d_y" if name == "dy" else name: x for name, x in gradients_of(case).items()}
    return common.with_sums(Schedule(part.steps, results, scratch=part.scratch, vectors=vectors), [*results])


def run(case):
    """Return what the launches of a case write, by name."""
    return _run(case, forward(case), case.inputs)


def differentiate(case, unwanted=()):
    """Return the gradients that the launches of a case make, but for those that are not wanted, by name."""
    grads = {f"grad_{name}": x for name, x in case.grads.items()}
    if case.name == "behind":
        grads = {"dy": case.grads["out"]}
    elif case.behind.D:
        grads["dy"] = _dy_of(case)
    whole = backward(case)
    return _run(case, schedule.without(whole, unwanted) if unwanted else whole, {**case.inputs, **grads})


def _run(case, steps, arrays):
    written = Plan(steps, case.problem, arrays).run([*arrays.values()])
    return dict(zip(steps.results, written, strict=True))


def _dy_of(case):
    """Return the gradient of what stands behind a recurrence, where a case has it."""
    return case.inputs["v"].flip(1) / 2  # any numbers that are the same every time


def exactly(case):
    """Return the same in float64: what is written, and the gradients."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in case.inputs.items()}
    written = _equations(case, leaves)
    loss = sum((written[name] * grad.double()).sum() for name, grad in case.grads.items())
    if case.name == "operands" and "D" in leaves:
        loss = loss + (_dy_of(case).double() * _share(leaves["D"]).detach() * leaves["v"]).sum()
    names = [name.removeprefix("d") for name in gradients_of(case)]
    grads = torch.autograd.grad(loss, [leaves[name] for name in names])
    several = dict(zip(names, grads, strict=True))
    written = {name: x.detach() for name, x in written.items()}
    return written, {"d_y" if name == "y" else f"d{name}": x for name, x in several.items()}


def _share(D):
    return D if D.dim() == 2 else D.unsqueeze(-1)


def _equations(case, x):
    words, p = case.words.split(), case.problem
    if case.name == "behind":
        out = x["y"] + x["v"] * _share(x["D"]) if "D" in x else x["y"]
        opened = {"silu": F.silu, "sigmoid": torch.sigmoid, "identity": lambda z: z}[case.behind.gate]
        return {"out": out * opened(x["z"]) if "z" in x else out}
    written = {}
    if "keys" in words:
        group = p.H // p.G
        written |= {name: x[of].repeat_interleave(group, -2) for name, of in (("r", "q"), ("new_k", "k"))}
    if case.how.source == "gates":
        return {"new_k": -torch.expm1(x["g"]), "w": x["g"]}
    if case.how.source == "heads":
        return {**written, "w": x["g"].expand(p.B, p.T, p.H).unsqueeze(-1).expand(-1, -1, -1, p.K)}
    if case.how.source == "none":
        return written
    step = x["dt"] + x["dt_bias"] if "dt_bias" in x else x["dt"]
    step = F.softplus(step) if "softplus" in words else step
    step = step.clamp(*LIMIT) if "limit" in words else step
    decays = step * x["A"]
    if case.name == "head_steps":
        return {"step": step, "w": decays}
    w = decays.unsqueeze(-1).expand(-1, -1, -1, p.K)
    return {**written, "w": w, "new_v": x["v"] * step.unsqueeze(-1)}


def check(name, words, sizes, dtype=BF16, wide=FP32, layout="plain"):
    """Check values and gradients of a case, and that each gradient alone is the same."""
    case = make(name, words, sizes, dtype, wide, layout)
    wanted, wanted_grads = exactly(case)
    grads = differentiate(case)
    errors = {each: relative(x, wanted[each]) / LIMITS[x.dtype] for each, x in run(case).items()}
    errors |= {each: relative(x, wanted_grads[each]) / LIMITS[x.dtype] for each, x in grads.items()}
    wrong = {each: error for each, error in errors.items() if not error <= 1}
    assert not wrong, f"{wrong} times the limit from float64"
    for each, x in grads.items():
        alone = differentiate(case, [other for other in grads if other != each])
        assert torch.equal(alone[each], x)


def check_delta(words, sizes, dtype=BF16, wide=FP32):
    """Check operands of delta rules, in both directions, also of key heads with more value heads than kernels take.

    `sizes` are B, T, heads of keys and of values, and K.
    """
    B, T, G, H, K = sizes
    several, storage = delta_operands.times_shared(G, H), tensors.STORAGE[dtype]
    p, kinds = delta_problem(words, sizes, dtype, wide, tensors.gpu(0))
    inputs = {each: torch.randn(p.shape(each), device="cuda").to(DTYPES[p.types[each]]) for each in p.op.inputs}
    if kinds[0] == "log":
        inputs["g"] = -inputs["g"].abs()
    makes = {"r": "q" in inputs, "w": kinds[0] in ("softplus", "bounded") or kinds[:2] == ("log", "head")}
    results = {
        each: Result((B, T, H, K), "fp32" if each == "w" else storage)
        for each in ("r", "w", "new_k", "a", "b") if makes.get(each, True)
    }  # fmt: skip
    absent = {each: None for each in ("q", "g", "A_log", "dt_bias", "r", "w") if each not in {**inputs, **results}}
    call = steps.Given(p.gpu, p.types, B * T, (G * several, K, H, several), results=results)
    whole = delta_operands.operands(call, LOWER_BOUND, kinds)
    whole = Schedule(tuple(renamed(whole.steps, absent)), results, vectors=whole.vectors)
    written = Plan(whole, p, inputs).run([*inputs.values()])
    grads = {f"grad_{each}": torch.randn_like(x) for each, x in zip(results, written, strict=True)}
    if kinds[0] == "softplus":
        # A token that leaves nothing has no gradient of its log-decay. Of one sign, so that sums for a head do not
        # cancel, and small, so that they stay in the range of float16.
        grads["grad_w"].abs_().mul_(2**-6).masked_fill_(written[[*results].index("w")] < -87, 0)

    types = {**p.types, **{each: tensors.STORAGE[x.dtype] for each, x in grads.items()}}
    parts = {f"d{each}": f"d{each}_parts" for each in ("k", "q") if each in inputs} if several > 1 else {}
    results = {f"d{each}": Result(p.shape(each), p.types[each]) for each in p.op.inputs}
    call = call._replace(types=types, results=results)
    whole = common.with_sums(
        delta_operands.operand_gradients(call, LOWER_BOUND, kinds), [f"d{each}" for each in inputs]
    )
    launches = renamed(whole.steps, parts | absent)
    if parts:
        names = {"grad_r": "dq_parts", "grad_new_k": "dk_parts"}
        launches += operands.operand_gradients(p._replace(H=G * several), Operands(q="q", k="k"), names=names).steps
    scratch = {**whole.scratch, **{each: inputs["k"].nbytes * several for each in parts.values()}}
    whole = Schedule(tuple(launches), results, scratch=scratch, vectors=whole.vectors)
    found = Plan(whole, p, {**inputs, **grads}).run([*inputs.values(), *grads.values()])

    leaves = {each: x.double().requires_grad_() for each, x in inputs.items()}
    wanted = plain_layer.delta_operands(**leaves, kinds=kinds, lower_bound=LOWER_BOUND)
    wanted_grads = torch.autograd.grad(wanted, [*leaves.values()], [x.double() for x in grads.values()])
    for x, want in zip((*written, *found), (*wanted, *wanted_grads), strict=True):
        # A gradient of few heads is a few sums of both signs, which may all be small.
        least = 1e-3 if x.dim() == 1 and dtype != FP32 else 0.0
        error, limit = relative(x, want), max(LIMITS[dtype], LIMITS[x.dtype], least)
        assert error < limit, (x.shape, error, limit)


def delta_schedules(words, sizes, dtype, wide, gpu):
    """Return the schedules of operands of delta rules, in both directions, without tensors."""
    p, kinds = delta_problem(words, sizes, dtype, wide, gpu)
    several = delta_operands.times_shared(p.G, p.H)
    call = steps.Given(gpu, p.types, p.B * p.T, (p.G * several, p.K, p.H, several))
    grads = {f"grad_{each}": "fp32" if each == "w" else p.types["k"] for each in ("r", "w", "new_k", "a", "b")}
    results = {f"d{each}": Result(p.shape(each), p.types[each]) for each in p.op.inputs}
    of_gradients = call._replace(types={**p.types, **grads}, results=results)
    return (
        delta_operands.operands(call, LOWER_BOUND, kinds),
        common.with_sums(delta_operands.operand_gradients(of_gradients, LOWER_BOUND, kinds), [*results]),
    )


def delta_problem(words, sizes, dtype, wide, gpu):
    """Return the problem of operands of delta rules, and what their kernels are told of it."""
    B, T, G, H, K = sizes
    several = words.split()
    gate = next((word for word in ("log", "softplus", "bounded") if word in several), "none")
    gate_of, rate_of = "channel" if "channels" in several else "head", "channel" if "rates" in several else "head"
    rate_map = next((word for word in ("sigmoid", "twice_sigmoid") if word in several), "identity")
    dims = {"k": "BTGK", **({"q": "BTGK"} if "q" in several else {}), "beta": "BTHK" if rate_of == "channel" else "BTH"}
    dims |= {"g": "BTHK" if gate_of == "channel" else "BTH"} if gate != "none" else {}
    dims |= {"A_log": "H"} if gate in ("softplus", "bounded") else {}
    dims |= {"dt_bias": "HK" if gate_of == "channel" else "H"} if "bias" in several else {}
    types = {each: tensors.STORAGE[dtype if each in ("k", "q") else wide] for each in dims}
    p = Problem(Op("delta", dims), gpu, types, B=B, T=T, H=H, K=K, N=B, G=G)
    return p, (gate, gate_of, rate_map, rate_of, "l2" if "l2" in several else "none")
