"""The small work of a layer without a GPU: values in plain torch, what is checked, what is launched, how it is cut."""

import contextlib
import ctypes
import itertools
import math
from collections import Counter

import plain_layer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import check_sums
from stub_driver import entered
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.ahead import warm
from rwkv_jit.call import registry
from rwkv_jit.kernels import kernel, signatures, template
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.layers import calls
from rwkv_jit.nn import RWKV7
from rwkv_jit.pool import arguments as of_pool
from rwkv_jit.pool.arguments import INDEX_TYPES
from rwkv_jit.schedules import layer_table
from rwkv_jit.schedules import layers as layer_steps
from rwkv_jit.schedules.layers import Given, Options, Sequences
from rwkv_jit.schedules.problem import BYTES

B, T, C, SLOTS, H, N = 3, 4, 12, 7, 3, 4
IN_DECODE = {f"layer_{name}" for name in ("shift_mix", "prepare_keys", "gated_norm", "activate")}
LIMITS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
DTYPE = pytest.mark.parametrize("dtype", LIMITS)


def check(x, want, times=1):
    assert x.shape == want.shape
    assert float((x.double() - want).norm()) <= times * LIMITS[x.dtype] * float(want.norm())


def make_shift(shape=(B, C), mixes=6, dtype=torch.float32, parameters=None, slots=SLOTS, add=True):
    """Arguments of `shift_mix` by name."""
    channels, parameters = shape[-1], parameters or dtype
    made = {"x": torch.randn(shape), "weight": 1 + torch.randn(channels) / 5, "bias": torch.randn(channels)}
    made |= {"mixes": torch.rand(mixes, channels) if mixes else torch.rand(channels)}
    made |= {"shift": torch.randn(slots, channels)} | ({"add": torch.randn(shape)} if add else {})
    return {n: x.to(parameters if n in ("weight", "bias", "mixes") else dtype) for n, x in made.items()}


def make_keys(dtype=torch.float32, parameters=None, lead=(B,), heads=H, size=N, first=True):
    """Arguments of `prepare_keys` by name."""
    parameters = parameters or dtype
    made = {name: torch.randn(*lead, heads, size).to(dtype) for name in ("k", "v")}
    made |= {"rate": torch.randn(*lead, heads * size).to(parameters)}
    made |= {name: torch.randn(heads * size).to(parameters) for name in ("k_k", "k_a", "a0")}
    if first:
        made |= {"v_first": torch.randn(*lead, heads, size).to(dtype), "v0": torch.randn(heads, size).to(parameters)}
        made |= {"v_gate": torch.randn(*lead, heads * size).to(parameters)}
    return made


def make_norm(dtype=torch.float32, parameters=None, lead=(B,), heads=H, size=N):
    """Arguments of `gated_norm` by name."""
    made = {name: torch.randn(*lead, heads, size).to(dtype) for name in "yrkv"}
    made |= {"g": torch.randn(*lead, heads * size).to(dtype), "r_k": torch.randn(heads, size).to(parameters or dtype)}
    return made | {name: torch.randn(heads * size).to(parameters or dtype) for name in ("weight", "bias")}


# ---- values ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_texts_of_a_pool(data):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    slots = data.draw(st.lists(st.integers(-2, SLOTS - 1), min_size=len(lengths), max_size=len(lengths)))
    null_index, mixes = data.draw(st.integers(-2, 2)), data.draw(st.integers(0, 6))
    dtype = data.draw(st.sampled_from(list(LIMITS)))
    has_row, has_add = data.draw(st.booleans()), data.draw(st.booleans())
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    tokens, bound_dtype = bounds[-1] + data.draw(st.integers(0, 2)), data.draw(st.sampled_from(INDEX_TYPES))
    shape = (1, tokens, C) if has_row else (tokens, C)
    arguments = make_shift(shape, mixes, dtype, data.draw(st.sampled_from([dtype, torch.float32])), add=has_add)
    options = {"state_indices": torch.tensor(slots, dtype=torch.int32), "null_index": null_index}
    options["cu_seqlens"] = torch.tensor(bounds, dtype=bound_dtype)
    flags = st.none() | st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))
    has_state, active = data.draw(flags), data.draw(st.none() | st.integers(0, len(lengths)))
    if has_state is not None:
        options["has_initial_state"] = torch.tensor(has_state).to(data.draw(st.sampled_from([torch.bool, torch.uint8])))
    if active is not None:
        options["num_active"] = torch.tensor([active], dtype=torch.int32)
    before = arguments["shift"].clone()
    there = [slot for slot in slots[:active] if slot > null_index]
    if len(set(there)) < len(there) or any(slot < 0 for slot in there):
        with pytest.raises(ValueError, match="state_indices: expected"):
            rwkv_jit.shift_mix(**arguments, **options)
        assert torch.equal(arguments["shift"], before)
        return
    if dtype == torch.float64 and arguments["weight"].dtype != dtype:
        arguments |= {n: arguments[n].double() for n in ("weight", "bias", "mixes")}
    named = {n: x for n, x in arguments.items() if n != "shift"}
    named |= {"bounds": bounds, "slots": slots, "null_index": null_index, "has_state": has_state, "active": active}
    want_z, want, pool = plain_layer.shift_mix(**named, pool=before)
    if active is not None:  # of what is not there nobody knows anything
        for name in ("x", "add") if has_add else ("x",):
            arguments[name].view(tokens, C)[bounds[active] :] = math.nan
    z, mixed = rwkv_jit.shift_mix(**arguments, **options)
    assert mixed.shape == ((mixes, *shape) if mixes else shape)
    check(mixed.view(want.shape), want, 2)
    check(arguments["shift"], pool.double())
    if has_add:
        check(z, want_z)
    else:
        assert z is arguments["x"]


@pytest.mark.parametrize("tokens", [None, 3])
def test_rows_that_are_new_or_not_there(tokens):
    arguments = make_shift((5, C) if tokens is None else (5, tokens, C))
    named, before = {n: x for n, x in arguments.items() if n != "shift"}, arguments["shift"].clone()
    bounds, slots = [(tokens or 1) * row for row in range(6)], [4, 2, 0, 2, 9]
    has_state = [True, False, False, True, True]
    want_z, want, pool = plain_layer.shift_mix(
        **named, pool=before, bounds=bounds, slots=slots, has_state=has_state, active=3
    )
    options = {"has_initial_state": torch.tensor(has_state), "num_active": torch.tensor([3], dtype=torch.int32)}
    z, mixed = rwkv_jit.shift_mix(**arguments, state_indices=torch.tensor(slots), **options)
    check(mixed.view(want.shape), want, 2)
    check(z, want_z)
    check(arguments["shift"], pool.double())
    assert not z[3:].any()
    assert (arguments["shift"] != before).any(1).nonzero().flatten().tolist() == [0, 2, 4]


@pytest.mark.parametrize("shape", [(B, C), (B, T, C)])
@DTYPE
def test_rows_without_indices_have_their_own_slots(shape, dtype):
    arguments = make_shift(shape, dtype=dtype)
    tokens = 1 if len(shape) == 2 else T
    named = {n: x for n, x in arguments.items() if n != "shift"}
    bounds = range(0, B * tokens + 1, tokens)
    want_z, want, pool = plain_layer.shift_mix(**named, pool=arguments["shift"], bounds=bounds, slots=range(B))
    out = torch.full((6, *shape), math.nan).to(dtype)
    z, mixed = rwkv_jit.shift_mix(**arguments, out=out)
    assert mixed is out
    check(mixed.view(want.shape), want, 2)
    check(z, want_z)
    check(arguments["shift"], pool.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_may_be_cut_anywhere(dtype):
    arguments = make_shift((B, 6, C), dtype=dtype)
    pool = arguments["shift"].clone()
    _, whole = rwkv_jit.shift_mix(**arguments)
    parts = []
    for begin, end in ((0, 1), (1, 4), (4, 6)):
        part = {n: arguments[n][:, begin:end] for n in ("x", "add")}
        parts.append(rwkv_jit.shift_mix(**(arguments | part | {"shift": pool}))[1])
    assert torch.equal(torch.cat(parts, 2), whole)
    assert torch.equal(pool, arguments["shift"])


@pytest.mark.parametrize("first", [False, True])
@DTYPE
def test_keys_and_values(dtype, first):
    for lead in ((B,), (2, 3), ()):
        arguments = make_keys(dtype, torch.promote_types(dtype, torch.float32), lead, first=first)
        if lead:
            arguments.pop("v0", None)
            del arguments["a0"]
        made = rwkv_jit.prepare_keys(**arguments)
        for x, want in zip(made, plain_layer.prepare_keys(**arguments), strict=True):
            check(x, want)
        assert (made[1] is arguments["v"]) != first


@DTYPE
@pytest.mark.parametrize("rate_map", layer_steps.RATE_MAPS)
def test_results_that_a_call_names(dtype, rate_map):
    given = make_keys(dtype) | {"r": torch.randn(B, H, N).to(dtype), "r_k": torch.randn(H, N).to(dtype)}
    k, v, a, b, bonus = plain_layer.prepare_keys(**given, rate_map=rate_map)
    rate = (given["rate"].double() + given["a0"].double()).view(k.shape)
    rate = torch.sigmoid(rate) if rate_map == "sigmoid" else rate
    factor = 1 / (given["k"].double() * given["k_k"].double().view(H, N)).norm(dim=-1)
    every = {"new_k": k, "new_v": v, "a": a, "b": b, "bonus": bonus, "new_rate": rate, "factors": factor}
    for asked in (["new_rate"], ["new_v"], ["new_k", "a", "b", "factors"], [*every]):
        made = calls.call_for(asked, "prepare_keys", given, (rate_map,))
        for name, x in zip(asked, made, strict=True):
            check(x, every[name])
            assert x.dtype == (torch.promote_types(dtype, torch.float32) if name == "factors" else dtype)
    with pytest.raises(RuntimeError, match="prepare_keys: is for inference and has no gradient"):
        calls.call_for(["a"], "prepare_keys", given | {"k": given["k"].requires_grad_()}, (rate_map,))


@DTYPE
@pytest.mark.parametrize("norm", layer_steps.NORMS)
def test_statistics_of_heads(dtype, norm):
    given = make_norm(dtype)
    y = given["y"].double()
    mean = y.mean(-1) if norm == "layer" else torch.zeros_like(y[..., 0])
    factor = ((y - mean.unsqueeze(-1)).square().mean(-1) + 0.1).rsqrt()
    want = [plain_layer.gated_norm(**given, eps=0.1, norm=norm), mean, factor]
    made = calls.call_for(["out", "means", "factors"], "gated_norm", given, (0.1, "identity", norm))
    for x, y in zip(made, want, strict=True):
        check(x, y)
    assert [x.dtype for x in made] == [dtype, *[torch.promote_types(dtype, torch.float32)] * 2]


def test_keys_of_zero_have_no_direction():
    arguments = make_keys(first=False) | {"k": torch.zeros(B, H, N)}
    _, _, a, b = rwkv_jit.prepare_keys(**arguments)
    assert not a.any()
    assert not b.any()


@DTYPE
def test_norm_of_heads_with_bonus_and_gate(dtype):
    for lead in ((B,), (2, 3), ()):
        arguments = make_norm(dtype, torch.promote_types(dtype, torch.float32), lead)
        out = torch.empty(*lead, H * N, dtype=dtype)
        assert rwkv_jit.gated_norm(**arguments, out=out) is out
        check(out, plain_layer.gated_norm(**arguments), 2)
        check(rwkv_jit.gated_norm(**arguments, eps=0.5), plain_layer.gated_norm(**arguments, eps=0.5), 2)


@DTYPE
def test_activations(dtype):
    x, kinds = (2 * torch.randn(4, 3, 5)).to(dtype), list(plain_layer.ACTIVATIONS)
    want = torch.stack([plain_layer.ACTIVATIONS[kind](part.double()) for kind, part in zip(kinds, x, strict=True)])
    check(rwkv_jit.activate(x, kinds), want)
    for kind in kinds:
        check(rwkv_jit.activate(x[0].T, kind), plain_layer.ACTIVATIONS[kind](x[0].T.double()))
    assert rwkv_jit.activate(x, kinds, out=x) is x
    check(x, want)


@pytest.mark.parametrize("name", layer_table.OPS)
def test_launches_that_may_begin_early_wait(name):
    """On sm_90 each begins beside the launch before it, whatever that is."""
    assert "after_previous_launch(" in template.library(f"layer_{name}").body


def test_what_is_no_number_stays():
    x = torch.tensor([math.nan, -1.0])
    assert rwkv_jit.activate(x, "relu_squared").isnan().tolist() == [True, False]


def test_nothing_is_done_with_nothing():
    for arguments in (make_shift((0, C)), make_shift((B, 0, C))):
        before = arguments["shift"].clone()
        z, mixed = rwkv_jit.shift_mix(**arguments)
        assert (z.shape, mixed.shape) == (arguments["x"].shape, (6, *arguments["x"].shape))
        assert torch.equal(arguments["shift"], before)
    assert [x.numel() for x in rwkv_jit.prepare_keys(**make_keys(lead=(0,)))] == [0] * 4
    assert rwkv_jit.gated_norm(**make_norm(lead=(0,))).shape == (0, H * N)
    assert rwkv_jit.activate(torch.ones(2, 0), ("tanh", "sigmoid")).shape == (2, 0)


def test_what_lies_elsewhere_is_read():
    arguments, keys, norms = make_shift((B, T, C)), make_keys(), make_norm()
    for function, passed in (
        (rwkv_jit.shift_mix, arguments), (rwkv_jit.prepare_keys, keys), (rwkv_jit.gated_norm, norms)
    ):  # fmt: skip
        own = passed | ({"shift": passed["shift"].clone()} if "shift" in passed else {})
        want = function(**passed)
        spread = {n: torch.stack((x, x), -1)[..., 0] if n != "shift" else x for n, x in own.items()}
        for x, y in zip(function(**spread), want, strict=True):
            torch.testing.assert_close(x, y)


# ---- torch -------------------------------------------------------------------------------------------------------


def test_compiled_whole():
    arguments, keys, norms = make_shift(), make_keys(), make_norm()
    slots = torch.tensor([5, -1, 0])

    def layer(arguments, keys, norms, slots):
        z, mixed = rwkv_jit.shift_mix(**arguments, state_indices=slots)
        low = torch.ones(2, 3) * z[0, 0]
        rwkv_jit.activate(low, ("tanh", "sigmoid"), out=low)
        more = {"has_initial_state": slots > 0, "num_active": torch.full((1,), 2, dtype=torch.int32)}
        _, other = rwkv_jit.shift_mix(**arguments, state_indices=slots, **more)
        return [2 * z, mixed, other, *rwkv_jit.prepare_keys(**keys), rwkv_jit.gated_norm(**norms), low]

    own = arguments | {"shift": arguments["shift"].clone()}
    want = layer(own, keys, norms, slots)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(arguments, keys, norms, slots)
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(own["shift"], arguments["shift"])


CALLS = {
    "shift_mix": lambda **more: rwkv_jit.shift_mix(**(make_shift() | more)),
    "prepare_keys": lambda **more: rwkv_jit.prepare_keys(**(make_keys() | more)),
    "gated_norm": lambda **more: rwkv_jit.gated_norm(**(make_norm() | more)),
    "activate": lambda **more: rwkv_jit.activate(**({"x": torch.ones(2, 3), "kinds": "tanh"} | more)),
}


def test_what_changes_a_pool_has_no_gradient():
    parameter = torch.ones(C, requires_grad=True)
    with pytest.raises(RuntimeError, match="shift_mix: is for inference and has no gradient; call it in torch.no_grad"):
        CALLS["shift_mix"](weight=parameter)
    with torch.no_grad():
        CALLS["shift_mix"](weight=parameter)
    with pytest.raises(RuntimeError, match="activate: is for inference"):
        torch.ops.rwkv_jit.layer_step("activate", [parameter], [torch.empty(C)], -1, 0.0, ["tanh"])


# ---- faults ------------------------------------------------------------------------------------------------------

ZEROS = torch.zeros
FAULTS = [
    ("shift_mix", ValueError, r"x: expected shape \[rows, channels\] or", {"x": ZEROS(C)}),
    ("shift_mix", TypeError, "x: expected torch.float16 or", {"x": ZEROS(B, C).int()}),
    ("shift_mix", TypeError, "x: expected a torch.Tensor or an array", {"x": None}),
    ("shift_mix", ValueError, r"weight: expected shape \[12\], got \[13\]", {"weight": ZEROS(C + 1)}),
    ("shift_mix", TypeError, "bias: expected torch.float32, got torch.float16", {"bias": ZEROS(C).half()}),
    ("shift_mix", ValueError, r"mixes: expected shape \[12\] or \[1 to 6, 12\], got \[7, 12\]", {"mixes": ZEROS(7, C)}),
    ("shift_mix", ValueError, "mixes: expected shape", {"mixes": None}),
    ("shift_mix", ValueError, r"add: expected shape \[3, 12\]", {"add": ZEROS(B, C + 1)}),
    ("shift_mix", TypeError, "add: expected torch.float32, got torch.bfloat16", {"add": ZEROS(B, C).bfloat16()}),
    ("shift_mix", ValueError, r"shift: expected shape \[slots, 12\]", {"shift": ZEROS(SLOTS, 1, C)}),
    ("shift_mix", TypeError, "shift: expected torch.float16 or", {"shift": ZEROS(SLOTS, C).int()}),
    ("shift_mix", ValueError, "shift: expected a slot for each of the 3 rows", {"shift": ZEROS(2, C)}),
    ("shift_mix", ValueError, "shift: expected slots without gaps", {"shift": ZEROS(C, SLOTS).T}),
    (
        "shift_mix", ValueError, "shift: expected slots that do not overlap",
        {"shift": ZEROS(SLOTS + C).as_strided((SLOTS, C), (1, 1))},
    ),
    ("shift_mix", ValueError, "shift: is changed in place", {"shift": ZEROS(1, C).expand(SLOTS, C)}),
    ("shift_mix", ValueError, r"state_indices: expected shape \[3\]", {"state_indices": ZEROS(2).int()}),
    ("shift_mix", TypeError, "state_indices: expected torch.int32 or", {"state_indices": ZEROS(3)}),
    ("shift_mix", ValueError, "state_indices: expected slots below 7", {"state_indices": torch.tensor([0, 1, 7])}),
    ("shift_mix", ValueError, r"state_indices: .* got \[1\] twice", {"state_indices": torch.tensor([1, 0, 1])}),
    ("shift_mix", ValueError, r"cu_seqlens: expected shape \[sequences \+ 1\]", {"cu_seqlens": ZEROS(1).int()}),
    ("shift_mix", TypeError, "cu_seqlens: expected torch.int32 or", {"cu_seqlens": ZEROS(2)}),
    ("shift_mix", ValueError, "cu_seqlens: .* end at 3 at most, got", {"cu_seqlens": torch.tensor([0, 4])}),
    (
        "shift_mix", ValueError, "cu_seqlens: expected a batch of 1 with packed sequences, got a batch of 3",
        {"x": ZEROS(B, T, C), "add": None, "cu_seqlens": torch.tensor([0, 4])},
    ),
    ("shift_mix", ValueError, r"has_initial_state: expected shape \[3\]", {"has_initial_state": ZEROS(2).bool()}),
    ("shift_mix", TypeError, "has_initial_state: expected torch.bool or", {"has_initial_state": ZEROS(3)}),
    ("shift_mix", ValueError, r"num_active: expected shape \[1\]", {"num_active": ZEROS(2).int()}),
    ("shift_mix", TypeError, "num_active: expected torch.int32, got", {"num_active": ZEROS(1).long()}),
    ("shift_mix", ValueError, "num_active: expected 0 to 3, got 4", {"num_active": ZEROS(1).int() + 4}),
    ("shift_mix", TypeError, "null_index: expected an int of 32 bits, got None", {"null_index": None}),
    ("shift_mix", ValueError, "eps: expected a finite number, got nan", {"eps": math.nan}),
    ("shift_mix", ValueError, r"out: expected shape \[6, 3, 12\]", {"out": ZEROS(B, C)}),
    ("shift_mix", TypeError, "out: expected torch.float32", {"out": ZEROS(6, B, C).half()}),
    ("shift_mix", ValueError, "out: expected memory without gaps", {"out": ZEROS(6, B, 2 * C)[..., ::2]}),
    ("prepare_keys", ValueError, r"k: expected shape \[..., heads, head size\]", {"k": ZEROS(3)}),
    ("prepare_keys", TypeError, "k: expected torch.float16 or", {"k": ZEROS(B, H, N).int()}),
    ("prepare_keys", ValueError, r"v: expected shape \[3, 3, 4\] or \[3, 12\]", {"v": ZEROS(B, N, H)}),
    ("prepare_keys", TypeError, "v: expected a torch.Tensor", {"v": None}),
    ("prepare_keys", TypeError, "rate: expected torch.float32, got torch.float16", {"rate": ZEROS(B, C).half()}),
    ("prepare_keys", ValueError, r"k_a: expected shape \[3, 4\] or \[12\]", {"k_a": ZEROS(N)}),
    ("prepare_keys", ValueError, "v_gate: expected a tensor beside v_first, got None", {"v_gate": None}),
    ("prepare_keys", ValueError, "v_first: expected a tensor beside v_gate, got None", {"v_first": None}),
    ("prepare_keys", ValueError, "v0: needs v_first and v_gate", {"v_first": None, "v_gate": None}),
    ("gated_norm", ValueError, r"y: expected shape \[..., heads, head size\]", {"y": ZEROS(B, H, 0)}),
    ("gated_norm", ValueError, r"g: expected shape \[3, 3, 4\] or \[3, 12\]", {"g": ZEROS(B, C + 1)}),
    ("gated_norm", TypeError, "r: expected torch.float32, got torch.bfloat16", {"r": ZEROS(B, H, N).bfloat16()}),
    ("gated_norm", ValueError, "r_k: the bonus needs r, k, v and r_k, got None", {"r_k": None}),
    ("gated_norm", ValueError, "eps: expected a finite number", {"eps": math.inf}),
    ("gated_norm", ValueError, r"out: expected shape \[3, 12\]", {"out": ZEROS(B, H, N)}),
    ("activate", ValueError, "kinds: expected one of identity, tanh, sigmoid, relu_squared", {"kinds": "gelu"}),
    ("activate", ValueError, "kinds: expected one for each of the 2 parts of x, up to 31", {"kinds": ["tanh"] * 3}),
    ("activate", TypeError, "kinds: expected a str or a sequence", {"kinds": 3}),
    ("activate", TypeError, "kinds: .* got memoryview", {"kinds": memoryview(b"abcd").cast("B", (2, 2))}),
    ("activate", TypeError, "x: expected torch.float16 or", {"x": ZEROS(2).int()}),
    ("activate", ValueError, r"out: expected shape \[2, 3\]", {"out": ZEROS(3, 2)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "message", "change"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_names_the_argument(name, kind, message, change):
    with pytest.raises(kind, match=message):
        CALLS[name](**change)


def test_memory_with_gaps_is_not_changed_in_place():
    x = torch.ones(2, 6)[:, ::2]
    with pytest.raises(ValueError, match="out: expected memory without gaps"):
        rwkv_jit.activate(x, "tanh", out=x)


def test_slots_without_a_row_are_as_they_were():
    arguments = make_shift()
    before = arguments["shift"].clone()
    _, mixed = rwkv_jit.shift_mix(**arguments, state_indices=torch.tensor([4, 0, -3]), null_index=0)
    assert (arguments["shift"] != before).any(1).nonzero().tolist() == [[4]]
    null = arguments | {"shift": torch.zeros(B, C)}
    assert torch.equal(mixed[:, 1:], rwkv_jit.shift_mix(**null)[1][:, 1:])


# ---- what is launched --------------------------------------------------------------------------------------------


def test_the_kernel_gets_the_pool_and_the_texts(on_gpu):
    arguments = make_shift((5, C))
    memory = torch.zeros(2 * SLOTS, C)
    arguments["shift"], slots = memory[::2], torch.tensor([5, 2, -1])
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    new, active = torch.tensor([True, False, True]), torch.tensor([2], dtype=torch.int32)
    for _ in range(2):
        texts = {"state_indices": slots, "cu_seqlens": bounds, "has_initial_state": new, "num_active": active}
        z, mixed = rwkv_jit.shift_mix(**arguments, **texts, null_index=0, eps=0.25)
        (launch,) = on_gpu.take()
        passed = launch.named
        assert (passed["shift"], passed["slot_stride"], passed["slots"]) == (memory.data_ptr(), 2 * C, SLOTS)
        assert (passed["state_indices"], passed["cu_seqlens"]) == (slots.data_ptr(), bounds.data_ptr())
        assert (passed["has_initial_state"], passed["num_active"]) == (new.data_ptr(), active.data_ptr())
        assert (passed["rows"], passed["sequences"], passed["null_index"], passed["eps"]) == (5, 3, 0, 0.25)
        assert (passed["residual"], passed["mixed"]) == (z.data_ptr(), mixed.data_ptr())
        assert {n: passed[n] for n in ("x", "add", "mixes")} == {
            n: arguments[n].data_ptr() for n in ("x", "add", "mixes")
        }
        numbers = {name: launch.parameters[name] for name in ("PACKED", "ONE_TOKEN", "INDEX_BYTES", "BOUND_BYTES")}
        assert numbers == {"PACKED": True, "ONE_TOKEN": False, "INDEX_BYTES": 8, "BOUND_BYTES": 4}
        assert launch.grid == (5, 1, 1)


def test_rows_of_several_tokens_have_no_bounds(on_gpu):
    rwkv_jit.shift_mix(**make_shift((B, 5, C)))
    (launch,) = on_gpu.take()
    assert (launch.named["rows"], launch.named["sequences"], launch.named["tokens"]) == (5 * B, B, 5)
    numbers = {name: launch.parameters[name] for name in ("PACKED", "ONE_TOKEN")}
    assert numbers == {"PACKED": False, "ONE_TOKEN": False}


def test_what_is_not_given_is_null(on_gpu):
    arguments = make_shift(add=False, mixes=0)
    z, mixed = rwkv_jit.shift_mix(**arguments)
    (launch,) = on_gpu.take()
    assert z is arguments["x"]
    assert mixed.shape == z.shape
    assert {n for n, x in launch.addresses.items() if not x} == {
        "add", "residual", "state_indices", "cu_seqlens", "has_initial_state", "num_active",
    }  # fmt: skip
    assert (launch.parameters["ONE_TOKEN"], launch.parameters["MIXES"]) == (True, 1)
    keys = make_keys(first=False)
    del keys["a0"]
    assert rwkv_jit.prepare_keys(**keys)[1] is keys["v"]
    (launch,) = on_gpu.take()
    assert {n for n, x in launch.addresses.items() if not x} == {
        "v_first", "v_gate", "a0", "v0", "new_v", "r", "r_k", "bonus", "new_rate", "factors",
    }  # fmt: skip


# Results that calls name, and eps and the kinds before these.
ASKED = [
    ("prepare_keys", (), ("sigmoid",), ("new_v",)), ("prepare_keys", (), ("sigmoid",), ("new_rate",)),
    ("prepare_keys", (), ("identity",), ("new_k", "a", "b", "factors")),
    ("gated_norm", (64e-5,), ("identity", "layer"), ("out", "means", "factors")),
    ("gated_norm", (0.1,), ("silu", "rms"), ("factors",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "eps", "kinds", "asked"), ASKED)
def test_what_a_call_names_is_written_alone(on_gpu, name, eps, kinds, asked):
    """In the first call, in one that is known, and by the torch op, which compilers call."""
    given = make_keys() if name == "prepare_keys" else make_norm()
    several = [calls.call_for(asked, name, given, (*eps, *kinds)) for _ in range(2)]
    several.append([torch.empty_like(x) for x in several[0]])
    inputs = [given.get(x) for x in layer_table.OPS[name].inputs]
    registry.find("layer_step")(name, inputs, several[2], -1, *(eps or (0.0,)), [*kinds, *asked])
    for launch, made in zip(on_gpu.take(), several, strict=True):
        written = {x: address for x, address in launch.addresses.items() if address and x not in given}
        assert written == {x: y.data_ptr() for x, y in zip(asked, made, strict=True)}
        flags = {x: own for x, own in launch.parameters.items() if x.startswith("MAKES_")}
        assert len(flags) == 2
        assert flags == {x: x.removeprefix("MAKES_").lower() in asked for x in flags}


def test_nothing_is_launched_for_nothing(on_gpu):
    for _ in range(2):
        assert rwkv_jit.shift_mix(**make_shift((0, C)))[1].shape == (6, 0, C)
        assert rwkv_jit.prepare_keys(**make_keys(lead=(0,)))[0].shape == (0, H, N)
        assert rwkv_jit.gated_norm(**make_norm(lead=(0,))).shape == (0, C)
        assert rwkv_jit.activate(torch.ones(2, 0), "tanh").shape == (2, 0)
    assert not on_gpu.take()


def test_results_are_those_of_the_kernel(on_gpu):
    for _ in range(2):
        k, v, a, b = rwkv_jit.prepare_keys(**make_keys())
        (launch,) = on_gpu.take()
        made = {n: launch.named[n] for n in ("new_k", "new_v", "a", "b")}
        assert made == {"new_k": k.data_ptr(), "new_v": v.data_ptr(), "a": a.data_ptr(), "b": b.data_ptr()}
        assert (launch.named["rows"], launch.named["heads"], launch.named["block_rows"]) == (B, H, 1)
        assert launch.grid == (B, 1, 1)
        out = rwkv_jit.gated_norm(**make_norm())
        (launch,) = on_gpu.take()
        assert (launch.named["out"], launch.named["eps"]) == (out.data_ptr(), pytest.approx(64e-5))
        assert launch.grid == (B, 1, 1)
        x = torch.ones(4, 2, 3)
        y = rwkv_jit.activate(x, list(layer_steps.KINDS))
        assert rwkv_jit.activate(x, list(layer_steps.KINDS), out=x) is x
        for launch, target in zip(on_gpu.take(), (y, x), strict=True):
            assert (launch.named["x"], launch.named["y"]) == (x.data_ptr(), target.data_ptr())
            assert (launch.named["count"], launch.named["kinds"], launch.grid) == (6, 0b11100100, (1, 4, 1))


def test_known_calls_are_short(on_gpu):
    arguments, keys, norms, low = make_shift(), make_keys(), make_norm(), torch.ones(3, 2, 8)
    slots, kinds = torch.tensor([5, 2, 0], dtype=torch.int32), ("tanh", "identity", "sigmoid")
    for call in (
        lambda: rwkv_jit.shift_mix(**arguments, state_indices=slots),
        lambda: rwkv_jit.prepare_keys(**keys),
        lambda: rwkv_jit.gated_norm(**norms),
        lambda: rwkv_jit.activate(low, kinds, out=low),
    ):
        assert len(entered(call)) <= 12
    on_gpu.take()
    # Memory that begins elsewhere and another option make other calls.
    moved = torch.zeros(SLOTS * C + 1)[1:].view(SLOTS, C)
    rwkv_jit.shift_mix(**(arguments | {"shift": moved}), state_indices=slots)
    rwkv_jit.shift_mix(**arguments, state_indices=slots, eps=0.5)
    first, second = on_gpu.take()
    assert (first.named["shift"], first.parameters["VECTOR"]) == (moved.data_ptr(), 1)
    assert (second.named["eps"], second.parameters["VECTOR"]) == (0.5, 4)


def test_inputs_that_begin_elsewhere_are_copied(on_gpu):
    arguments = make_norm()
    rwkv_jit.gated_norm(**arguments)
    moved = torch.zeros(B * C + 1)[1:].view(B, H, N)
    read = []
    on_gpu.while_running = lambda launch: read.append(launch.named["y"])
    rwkv_jit.gated_norm(**(arguments | {"y": moved}))
    assert read[0] % 16 == 0
    assert on_gpu.take()[-1].parameters["VECTOR"] == 4


def test_the_backward_of_the_first_layer_leaves_its_values_alone(on_gpu):
    """They are returned as they are: a kernel that has no gradient of theirs writes none."""
    for _ in range(2):
        keys = {name: x.requires_grad_() for name, x in make_keys(first=False).items()}
        k, v, *_ = rwkv_jit.prepare_keys(**keys)
        assert v is keys["v"]
        on_gpu.take()
        weights = torch.randn_like(k), torch.randn_like(v)
        grads = torch.autograd.grad((k, v), [*keys.values()], weights)
        assert torch.equal(grads[list(keys).index("v")], weights[1])
        launch = on_gpu.take()[0]
        assert launch.template == "layer_prepare_keys_backward"
        assert not any(launch.addresses[name] for name in ("grad_new_v", "dv", "dv_first", "dv_gate", "dv0_rows"))


@pytest.mark.parametrize("name", ["prepare_keys", "gated_norm"])
def test_known_calls_with_gradients_are_short(on_gpu, name):
    given = {x: each.requires_grad_() for x, each in (make_keys() if name == "prepare_keys" else make_norm()).items()}

    def run():
        results = getattr(rwkv_jit, name)(**given)
        return results if isinstance(results, tuple) else (results,)

    results = run()
    weights = [torch.randn_like(x) for x in results]
    backward = lambda: torch.autograd.grad(results, [*given.values()], weights, retain_graph=True)  # noqa: E731
    backward()
    on_gpu.take()
    assert len(entered(run)) <= 16
    assert len(entered(backward)) <= 24
    assert {x.template for x in on_gpu.take()} == {f"layer_{name}", f"layer_{name}_backward", "sum_buffers"}


def test_what_a_backward_launches(on_gpu):
    for wanted in ({"k_k"}, {"k", "rate"}, {"k_a", "v0"}, {"k", "v", "k_k", "k_a", "a0", "v0"}):
        keys = make_keys()
        for name in wanted:
            keys[name].requires_grad_()
        results = rwkv_jit.prepare_keys(**keys)
        (launch,) = on_gpu.take()
        assert launch.template == "layer_prepare_keys"
        grads = torch.autograd.grad(results, [keys[name] for name in wanted], results)
        grads = dict(zip(wanted, grads, strict=True))
        first, *others = on_gpu.take()
        assert (first.template, first.named["block_rows"]) == ("layer_prepare_keys_backward", B)
        summed = {"k_k", "k_a", "a0", "v0"}
        check_sums(others, first, {x: grads[x] for x in ("k_k", "k_a", "a0", "v0") if x in wanted})
        places = {f"d{name}_rows" if name in summed else f"d{name}" for name in keys}
        made = {f"d{name}_rows" if name in summed else f"d{name}" for name in wanted}
        assert {place for place in places if first.addresses.get(place)} == made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_backward_of_a_norm_takes_the_residual(on_gpu, dtype):
    x, add = torch.randn(2, 3, 5, C).to(dtype).requires_grad_().unbind()
    weight, bias, mixes = (torch.randn(*shape, C).to(dtype).requires_grad_() for shape in ((), (), (6,)))
    asked = x, add, weight, bias, mixes
    for _ in range(3):
        residual, mixed, last = rwkv_jit.norm_shift(x, weight, bias, mixes, add=add)
        (forward,) = on_gpu.take()
        results = [residual, *mixed]
        grads = torch.autograd.grad(results, asked, [torch.randn_like(y) for y in results])
        backward, *sums = on_gpu.take()
        assert backward.template == "layer_norm_shift_backward"
        check_sums(sums, backward, dict(zip(("weight", "bias", "mixes"), grads[2:], strict=True)))
        assert backward.named["x"] == forward.named["residual"] == residual.data_ptr()
        assert backward.named["stats"] == forward.named["stats"] != 0
        assert {n for n, y in backward.addresses.items() if not y} == {"first", "cu_seqlens", "grad_last", "dfirst"}
        assert backward.named["dx"] == grads[0].data_ptr() == grads[1].data_ptr()
        assert {n for n, y in forward.addresses.items() if not y} == {"first", "cu_seqlens"}
    parameters = (y.detach() for y in (x, weight, bias, mixes))
    residual, mixed, last = rwkv_jit.norm_shift(*parameters, add=add)
    (grad,) = torch.autograd.grad(last.sum(), add)  # of results that nothing else is made of
    first, *sums = on_gpu.take()[1:]
    assert {n for n, y in first.addresses.items() if not y} >= {"grad_residual", "dweight_rows", "dmixes_rows"}
    assert (sums, first.named["grad_last"] != 0, first.named["dx"]) == ([], True, grad.data_ptr())


def test_a_residual_of_float32_gets_a_gradient_of_16_bits_for_what_is_added(on_gpu):
    x, add = torch.randn(3, 5, C).requires_grad_(), torch.randn(3, 5, C).bfloat16().requires_grad_()
    weight, bias, mixes = torch.randn(C), torch.randn(C), torch.randn(2, C)
    for _ in range(2):
        residual, mixed, last = rwkv_jit.norm_shift(x, weight, bias, mixes, add=add, dtype=torch.bfloat16)
        assert [y.dtype for y in (residual, *mixed, last)] == [torch.float32, *[torch.bfloat16] * 3]
        grads = torch.autograd.grad(mixed, [x, add], [torch.randn_like(y) for y in mixed])
        assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16]
        forward, backward = on_gpu.take()
        assert {y.parameters["T_IO"] for y in (forward, backward)} == {"fp32"}
        assert {y.parameters["T_MIXED"] for y in (forward, backward)} == {"bf16"}


@pytest.mark.parametrize("with_add", [False, True])
def test_a_norm_without_gradients_writes_what_is_read_alone(on_gpu, with_add):
    x, add = torch.randn(2, 3, 5, C).unbind()
    weight, bias, mixes = (torch.randn(*shape, C) for shape in ((), (), (2,)))
    add = add if with_add else None
    unread = {"stats"} if with_add else {"stats", "residual"}
    for mode in (contextlib.nullcontext(), contextlib.nullcontext(), FlopCounterMode(display=False)):
        with mode:
            residual, mixed, last = rwkv_jit.norm_shift(x, weight, bias, mixes, add=add)
        assert (residual is x) == (not with_add)
        assert (residual.shape, len(mixed), last.shape) == (x.shape, 2, (3, C))
        (launch,) = on_gpu.take()
        assert {name for name in ("residual", "stats", "last") if not launch.addresses[name]} == unread
    residual, *_ = rwkv_jit.norm_shift(x, weight.requires_grad_(), bias, mixes, add=add)
    assert residual is not x
    (launch,) = on_gpu.take()
    assert launch.addresses["residual"] == residual.data_ptr()
    assert launch.addresses["stats"]
    with torch.no_grad():
        assert not rwkv_jit.norm_shift(x.clone().requires_grad_(), weight, bias, mixes, add=add)[0].requires_grad


def test_what_was_saved_may_come_back_with_other_strides(on_gpu):
    keys = {name: x.requires_grad_() for name, x in make_keys().items()}
    seen = []

    def read(launch):
        if launch.template == "layer_prepare_keys_backward":
            memory = (ctypes.c_float * keys["k"].numel()).from_address(launch.named["k"])
            seen.append(torch.frombuffer(bytearray(memory), dtype=torch.float32))

    on_gpu.while_running = read
    for come_back in (torch.clone, torch.clone, lambda x: torch.stack([x, x], -1)[..., 0]):
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, come_back):
            results = rwkv_jit.prepare_keys(**keys)
        torch.autograd.grad(results, [keys["k"]], [torch.ones_like(x) for x in results])
    assert len(seen) == 3
    assert all(torch.equal(x, keys["k"].flatten()) for x in seen)


def test_slots_and_bounds_on_a_gpu_are_looked_at_when_asked(on_gpu, monkeypatch):
    arguments, slots = make_shift(), torch.tensor([5, 9, 0], dtype=torch.int32)
    rwkv_jit.shift_mix(**arguments, state_indices=slots)
    assert len(on_gpu.take()) == 1
    monkeypatch.setenv("RWKVJIT_CHECK", "1")
    signatures.forget()
    slots[1] = 2
    rwkv_jit.shift_mix(**arguments, state_indices=slots)
    on_gpu.take()
    slots[1] = 9
    with pytest.raises(ValueError, match=r"state_indices: expected slots below 7, .* got \[9\]"):
        rwkv_jit.shift_mix(**arguments, state_indices=slots)
    active = torch.tensor([1], dtype=torch.int32)
    rwkv_jit.shift_mix(**arguments, state_indices=slots, num_active=active)
    assert len(on_gpu.take()) == 1
    active[0] = -1
    with pytest.raises(ValueError, match="num_active: expected 0 to 3, got -1"):
        rwkv_jit.shift_mix(**arguments, state_indices=slots, num_active=active)
    with pytest.raises(ValueError, match="cu_seqlens: expected to begin at 0, never fall and end at 3 at most"):
        rwkv_jit.shift_mix(**arguments, cu_seqlens=torch.tensor([0, 2, 1]))
    assert not on_gpu.take()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_launches_overlap_where_they_can(on_gpu, arch):
    on_gpu.use(arch)
    rwkv_jit.gated_norm(**make_norm())
    assert [launch.overlaps for launch in on_gpu.take()] == [arch == "sm_90"]


# ---- a layer of decode -------------------------------------------------------------------------------------------

PRODUCTS = {
    "linear": 6,
    "addmm": 1,
    "matmul": 7,
}  # of a layer behind the first: large matrices and w's second; low-rank ones


class Calls(torch.overrides.TorchFunctionMode):
    """What is asked of torch, but for views, new memory and questions."""

    FREE = (
        "view", "__getitem__", "unbind", "__iter__", "__len__", "__get__", "data_ptr", "empty_strided", "numel", "dim",
        "is_contiguous", "stride", "get_device", "element_size", "t", "to", "unflatten", "reshape",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ not in self.FREE:
            self.names[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_layer_of_decode_takes_eight_launches_and_little_else_beside_products(on_gpu):
    launched, asked = {}, {}
    for layers in (2, 3):
        model, slots = RWKV7(64, 32, layers, 16), torch.tensor([1, 3])
        pool, tokens = model.new_pool(5, reserved=1), torch.tensor([5, 7])
        model.step(tokens, pool, slots)
        on_gpu.take()
        with Calls() as calls:
            model.step(tokens, pool, slots)
        asked[layers], launched[layers] = calls.names, [launch.template for launch in on_gpu.take()]
    layer = [
        "layer_shift_mix", "layer_activate", "layer_activate", "layer_prepare_keys", "update_states",
        "layer_gated_norm", "layer_shift_mix", "layer_activate",
    ]  # fmt: skip
    assert launched == {layers: layers * layer for layers in (2, 3)}
    assert asked[3] - asked[2] == Counter(PRODUCTS)  # mixes of all layers are made at once


# ---- what is made ahead ------------------------------------------------------------------------------------------


def warmed(monkeypatch, dtype, **options):
    """What tells the kernels apart that are made ahead for heads of 16 in 32 channels."""
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: requests)
    made = rwkv_jit.warm("wkv7", 16, dtype, backward=False, arch="sm_90", updates=True, widths=32, **options)
    return {kernel.memory_key(request) for request in made}


def check_asked(on_gpu, made):
    """Check that all kernels since the last time were made ahead, and return their names."""
    launches = on_gpu.take()
    assert [x.template for x in launches if kernel.memory_key(x.request) not in made] == []
    return {x.template for x in launches}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_kernel_of_a_serving_step_is_made_ahead(on_gpu, dtype, monkeypatch):
    on_gpu.use("sm_90")
    # A copy to a GPU needs one.
    monkeypatch.setattr(of_pool, "on_device", lambda slots, device, dtype=torch.int64: torch.tensor(slots, dtype=dtype))
    made = warmed(monkeypatch, dtype, decay="sigmoid")
    model = RWKV7(64, 32, 2, 16, dtype=dtype)
    pool = model.new_pool(301, reserved=1)
    for count in (1, 300):
        model.step(torch.arange(count) % 64, pool, torch.arange(1, count + 1, dtype=torch.int32))
        asked = check_asked(on_gpu, made)
        if dtype != torch.float32:  # low-rank products have the functions behind them
            assert asked == IN_DECODE - {"layer_activate"} | {"layer_products", "update_states"}
        else:
            assert asked == IN_DECODE | {"update_states"}
    for lengths in ((40,), (1, 2), (9, 1, 70)):
        bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        model.prefill(torch.full((1, sum(lengths)), 3), pool, [*range(1, 1 + len(lengths))], bounds)
        assert "layer_norm_shift" in " ".join(check_asked(on_gpu, made))


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_every_kernel_of_a_layer_is_made_ahead(on_gpu, parameters, gates, kept, monkeypatch):
    on_gpu.use("sm_90")
    made = warmed(monkeypatch, torch.bfloat16, w_dtype=gates, state_dtype=torch.float16)
    for mixes, add, bounds, shape in itertools.product(
        (6, 0), (True, False), (None, torch.int32, torch.int64), ((B, 32), (1, T, 32))
    ):
        if mixes or add:
            arguments = make_shift(shape, mixes, torch.bfloat16, parameters, add=add)
            arguments["shift"] = arguments["shift"].to(kept)
            packed = {} if bounds is None else {"cu_seqlens": torch.tensor([0, 2], dtype=bounds)}
            rwkv_jit.shift_mix(**arguments, **packed)
    for first, has_biases in itertools.product((True, False), (True, False)):
        given = make_keys(torch.bfloat16, parameters, heads=2, size=16, first=first)
        given |= {name: given[name].to(gates) for name in ("rate", "v_gate") if name in given}
        rwkv_jit.prepare_keys(**{name: x for name, x in given.items() if has_biases or name not in ("a0", "v0")})
    rwkv_jit.gated_norm(**make_norm(torch.bfloat16, parameters, heads=2, size=16))
    for count in (1, 2, 3, 4, 8, 12):
        rwkv_jit.activate(torch.ones(2, count).bfloat16(), ("tanh", "sigmoid"))
    assert check_asked(on_gpu, made) == IN_DECODE


def test_a_width_goes_with_ops_whose_layers_are_known():
    for op in ("gla", "linear_attention"):
        with pytest.raises(ValueError, match="width: is only for wkv5, wkv6, wkv7, got 32"):
            rwkv_jit.warm(op, 16, arch="sm_90", widths=32)
    with pytest.raises(ValueError, match="width: expected an int of at least 1, got 0"):
        rwkv_jit.warm("wkv7", 16, arch="sm_90", updates=True, widths=[32, 0])


# ---- how it is cut -----------------------------------------------------------------------------------------------

STORAGE = st.sampled_from(["bf16", "fp16", "fp32"])


def is_whole(size, vector, sizes, alignment):
    """Whether accesses of so many neighbours are whole, and at addresses that they can have."""
    return size % vector == 0 and all(min(16, vector * each) <= alignment for each in sizes) and vector * sizes[0] <= 16


@settings(max_examples=300)
@given(st.integers(1, 20_000), STORAGE, STORAGE, st.sampled_from([2, 4, 8, 16]), st.integers(1, 6), st.integers(1, 3))
def test_blocks_have_all_channels(channels, io, kept, alignment, mixes, tokens):
    sizes = [BYTES[io], BYTES[kept]]
    alignment = max(alignment, *sizes)
    types = dict.fromkeys(("x", "weight", "bias", "mixes"), io) | {"shift": kept}
    given = Given(Gpu("sm_90"), types, 6, (channels, mixes), alignment)
    (step,) = layer_steps.shift_mix(given, Options(texts=Sequences(6 // tokens, tokens))).launches
    threads, vector = step.parameters["NUM_THREADS"], step.parameters["VECTOR"]
    items = math.ceil(channels / (threads * vector))
    assert threads % 32 == 0
    assert threads <= 512
    assert items * threads * vector >= channels
    assert items == 1 or threads == 512
    assert is_whole(channels, vector, sizes, alignment) or vector == 1
    assert not is_whole(channels, 2 * vector, sizes, alignment)
    assert step.grid == (6, 1, 1)


@settings(max_examples=300)
@given(st.integers(1, 1024), st.integers(1, 70), st.integers(1, 70_000), STORAGE, st.sampled_from([2, 4, 8, 16]))
def test_lanes_have_all_of_a_head(size, heads, rows, io, alignment):
    alignment = max(alignment, BYTES[io])
    types = dict.fromkeys(layer_table.OPS["gated_norm"].inputs, io)
    given = Given(Gpu("sm_90"), types, rows, (heads, size), alignment)
    (step,) = layer_steps.gated_norm(given, Options(kinds=("identity", "layer"))).launches
    lanes, vector, threads = (step.parameters[name] for name in ("LANES", "VECTOR", "NUM_THREADS"))
    assert 32 % lanes == 0
    assert lanes == 32 or lanes * vector >= size
    assert lanes == 1 or lanes * vector < 2 * size
    assert is_whole(size, vector, [BYTES[io]], alignment) or vector == 1
    assert not is_whole(size, 2 * vector, [BYTES[io]], alignment)
    assert step.grid[1] * (threads // lanes) >= heads
    assert (step.grid[1] - 1) * (threads // lanes) < heads
    assert step.grid[0] * step.bind["block_rows"] >= rows
    assert (step.grid[0] - 1) * step.bind["block_rows"] < rows


def test_an_exported_program_finds_the_module_of_every_op(child):
    code = """
import torch
import rwkv_jit
from rwkv_jit.schedules.layer_table import OPS
x, weight, pool, y = torch.ones(2, 3, 4), torch.ones(4, 2), torch.zeros(2, 4, 1), torch.empty(2, 3, 4)
torch.ops.rwkv_jit.layer_step("causal_conv1d_update", [x, weight, None, None, None, None], [pool, y], -1, 0.0, ["silu"])
print(y[0, 1, 0].item() == torch.nn.functional.silu(torch.tensor(2.0)).item())
from rwkv_jit.layers.calls import kind_of
print(all(kind_of(name).name == name for name in (*OPS, "causal_conv1d", "causal_conv1d_update")))
"""
    done = child(code, after="torch")
    assert done.stdout.split() == ["True", "True"]
