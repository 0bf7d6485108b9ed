"""One sequence in parts, as several processes would have them: here one after another, on one GPU."""

import comparing
import derived_cases
import pytest
import torch

import rwkv_jit
from rwkv_jit.call.options import complete
from rwkv_jit.parallel import paused, recurrences, summaries
from rwkv_jit.schedules.table import OPS as TABLE

OPS = tuple(comparing.NAMES)
GATE, GATES = 6e-3, {"da": 8e-3, "db": 8e-3, "dw": 8e-3}
PARTS_GATE = 5e-3  # of wkv5's dw, beside the size of its parts
LENGTHS = (192, 64, 640)


class InParts(torch.autograd.Function):
    """An op over parts, each of which is told the state before it, and the gradient of the state behind it."""

    @staticmethod
    def forward(ctx, call, lengths, initial, *inputs):
        ctx.parts, ctx.op = [], call.op
        made, state, begin = [], initial, 0
        for length in lengths:
            own = part_of(call.op, inputs, begin, begin + length)
            begin += length
            way = paused.way_of(call, own, [True] * (len(inputs) + 1))
            told = {}

            def at_summary(bias, transition, told=told, state=state):
                told["bias"], told["transition"] = bias.clone(), transition.clone()
                return state

            y, final, saved = way.forward(own, at_summary)
            joined = summaries.after(state, told["bias"], told["transition"])
            assert comparing.relative(joined, final) < 5e-3
            alone = way.summary(own)
            assert torch.equal(alone[0], told["bias"])
            assert torch.equal(alone[1], told["transition"])
            ctx.parts.append((way, saved, told["transition"]))
            made.append(y)
            state = final
        return torch.cat(made, 1), state

    @staticmethod
    def backward(ctx, dy, grad_final):
        grads, behind = [], grad_final
        lengths = [saved_length(ctx.op, part) for part in ctx.parts]
        for (way, saved, transition), own in zip(reversed(ctx.parts), reversed(dy.split(lengths, 1)), strict=True):
            told = []

            def at_summary(bias, told=told, behind=behind):
                told.append(bias.clone())
                return behind

            *of_inputs, of_state = way.backward(saved, own, at_summary)
            joined = summaries.after(behind, told[0], transition, backward=True)
            assert comparing.relative(joined, of_state) < 8e-3
            grads.insert(0, of_inputs)
            behind = of_state
        whole = [
            torch.cat(several, 1) if "T" in dims else sum(x.double() for x in several).to(several[0].dtype)
            for dims, several in zip(ctx.op.inputs.values(), zip(*grads, strict=True), strict=True)
        ]
        return None, None, behind, *whole


def part_of(op, inputs, begin, end):
    return [x[:, begin:end] if "T" in dims else x for dims, x in zip(op.inputs.values(), inputs, strict=True)]


def saved_length(op, part):
    _, saved, _ = part
    return saved[op.names.index("v")].shape[1]


def in_parts(name, lengths=LENGTHS):
    """The op in parts, as a function like its own."""

    def run(*inputs, initial_state, output_final_state, **options):
        assert output_final_state
        call = paused.Call(TABLE[name], complete(TABLE[name], options, inputs[0]))
        layout = call.whole["state_layout"]
        state = initial_state if layout == "vk" else initial_state.mT
        y, final = InParts.apply(call, lengths, state.float(), *inputs)
        return y, final if layout == "vk" else final.mT

    return run


def check(name, given, lengths=LENGTHS, gate=GATE, gates=GATES, **options):
    state = comparing.make_state(given, given["r"].shape[0], layout=options.get("state_layout", "vk"))
    options = {"state_layout": "vk", **options}
    if name != "linear_attention":
        options = {"decay": "raw", **options}
    weights = comparing.run(name, given, state, **options)[3]
    exact = {n: x for n, x in options.items() if n in ("decay", "scale", "state_layout")}
    parts_of = {**options, "function": in_parts(name, lengths)}
    errors, final, named = comparing.compare(name, given, state, parts_of, exact, weights)
    if name == "wkv5":
        gates = {**gates, "dw": PARTS_GATE}
        errors["dw"] = comparing.error_of_constant_decay(named["dw"], given, state, weights, **exact)
    limits = comparing.limits_of(errors, final, named, given, gate, gates)
    wrong = {each: error for each, error in errors.items() if not error <= limits[each]}
    assert not wrong, (wrong, limits)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 24), (37, 100)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("op", ["parallel"])
def test_parts_are_the_whole(op, name, dtype, sizes, launched):
    heads = comparing.enough_heads(sizes[0])
    given = comparing.make_inputs(
        name, comparing.DTYPES[dtype], batch=2, tokens=sum(LENGTHS), heads=heads, head_size=sizes[0],
        value_size=sizes[1], decay="raw",
    )  # fmt: skip
    check(name, given, scale=0.7)
    assert {"unit_states", f"{TABLE[name].stem}_segment"} <= {kernel.name for kernel in launched}


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decays", ["mixed", "-20 or 0", (-40.0, -5.0)])
@pytest.mark.parametrize("name", [name for name in OPS if name != "linear_attention"])
@pytest.mark.parametrize("op", ["parallel"])
def test_strong_decays(op, name, decays):
    given = comparing.make_inputs(
        name, torch.bfloat16, batch=1, tokens=sum(LENGTHS), heads=4, decays=decays, decay="raw"
    )
    check(name, given)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("op", ["parallel"])
def test_other_layouts_and_many_segments(op, name):
    lengths = (4096, 1024)
    given = comparing.make_inputs(name, torch.bfloat16, batch=1, tokens=sum(lengths), heads=4, decay="raw")
    check(name, given, lengths, state_layout="kv")


@pytest.mark.parametrize(("dtype", "sizes", "lengths"), [
    ("fp32", (64, 64), (60, 4, 70)), ("bf16", (64, 64), (60, 1, 70)), ("bf16", (192, 192), (128, 128)),
])  # fmt: skip
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("op", ["parallel"])
def test_calls_that_do_not_pause(op, name, dtype, sizes, lengths):
    given = comparing.make_inputs(
        name, comparing.DTYPES[dtype], batch=2, tokens=sum(lengths), heads=comparing.enough_heads(sizes[0]),
        head_size=sizes[0], value_size=sizes[1], decay="raw",
    )  # fmt: skip
    exact = dtype == "fp32"
    check(name, given, lengths, *((2e-5, {}) if exact else (GATE, GATES)))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("op", ["parallel"])
def test_summaries_join(op, name):
    given = comparing.make_inputs(name, torch.bfloat16, batch=2, tokens=256, heads=3, decay="raw")
    options = {} if name == "linear_attention" else {"decay": "raw"}
    inputs = [x.detach() for x in given.values()]
    first, second, whole = (
        recurrences.summary(name, *part_of(TABLE[name], inputs, *span), **options)
        for span in ((0, 128), (128, 256), (0, 256))
    )
    assert whole.shape == (2, 3, 128, 64)
    assert comparing.relative(rwkv_jit.parallel.compose(first, second), whole) < 5e-3
    state = torch.randn(2, 3, 64, 64, device="cuda")
    _, final = getattr(rwkv_jit, name)(*inputs, state, True, state_layout="vk", **options)
    assert comparing.relative(rwkv_jit.parallel.merge(state, whole), final) < 5e-3


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(("name", "how", "sizes", "pauses"), [
    ("kda", "raw bias sigmoid norm", (2, 200, 32, 32, 128, 128), False),
    ("kda", "norm", (2, 192, 2, 4, 64, 64), True),
    ("gated_delta_rule", "raw bias sigmoid norm", (2, 200, 16, 32, 128, 128), False),
    ("gated_delta_rule", "norm", (2, 192, 2, 4, 64, 64), True),
    ("delta_rule", "norm sigmoid", (2, 200, 32, 32, 64, 128), False),
    ("gated_delta_rule2", "raw bias", (2, 192, 4, 4, 64, 64), True),
    ("simple_gla", "", (2, 200, 32, 32, 128, 64), False), ("hgrn2", "", (2, 192, 8, 8, 64, 64), True),
    ("ssd", "wide z bias softplus", (2, 200, 4, 32, 128, 64), False),
])  # fmt: skip
@pytest.mark.parametrize("op", ["parallel"])
def test_parts_of_other_ops(op, name, how, sizes, pauses):
    case = derived_cases.make(name, how, sizes, torch.bfloat16, torch.float32, torch.float32, device="cuda")
    results, grads, weights = derived_cases.in_two_phases(case, pauses)
    wanted, wanted_grads = derived_cases.exactly(case, weights)
    for found, want in zip(results, wanted, strict=True):
        assert comparing.relative(found, want) < 1e-2
    for each, grad in grads.items():
        error = derived_cases.error_of(case, each, grad, wanted_grads[each])
        assert error <= derived_cases.limit_of(case, each, "bf16"), each


@pytest.mark.parametrize("op", ["parallel"])
def test_gradients_that_nobody_wants_are_left_out(op):
    given = comparing.make_inputs("wkv7", torch.bfloat16, batch=1, tokens=128, heads=2)
    inputs = list(given.values())
    call = paused.Call(TABLE["wkv7"], complete(TABLE["wkv7"], {}, inputs[0]))
    way = paused.way_of(call, inputs, [False, True, False, False, True, False, False])
    state = torch.randn(1, 2, 64, 64, device="cuda")
    _, _, saved = way.forward([x.detach() for x in inputs], lambda bias, transition: state)
    dy = torch.randn_like(inputs[3])
    grads = way.backward(saved, dy, torch.zeros_like)
    assert [x is not None for x in grads] == [False, True, False, False, True, False, False]
    leaves = [x.detach().requires_grad_() for x in inputs]
    y, _ = rwkv_jit.wkv7(*leaves, initial_state=state)
    whole = torch.autograd.grad(y, leaves, dy)
    for place in (1, 4):
        assert comparing.relative(grads[place], whole[place]) < 5e-3
