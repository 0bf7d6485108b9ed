"""Rows that become float16: what goes around the kernels, which plain torch computes here in the memory they are given.

A driver that takes notes calls `play` for every launch. The kernels of `narrow_rows` are done as their comments say.
"""

import ctypes
import math

import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels.template import STORAGE_TYPES
from rwkv_jit.schedules import delta_large, segments
from rwkv_jit.schedules.table import OPS

WITH_HEADS = tuple(name for name, op in OPS.items() if op.has_heads)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
B, T, H, K, V = 2, 37, 2, 8, 12
TENSORS = "q", "k", "v", "dy"
DIGITS = {torch.float32: 1e-3, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def switches():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    rwkv_jit.set_bfloat16_precision("high")
    yield
    rwkv_jit.set_bfloat16_precision("medium")
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def player(on_gpu):
    """Kernels that compute."""
    on_gpu.while_running = play
    return on_gpu


# ---- kernels -----------------------------------------------------------------------------------------------------


def memory(address, dtype, shape, strides=None):
    """The numbers at an address."""
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


def play(launch):
    narrow = {"narrow_rows", "narrow_as_they_are", "narrow_again", "find_largest"}
    if launch.entry in narrow:
        play_narrow(launch)
    elif launch.template == "sum_buffers":
        for place in range(5):
            address, target, count, width, storage = (
                launch.named[f"{name}{place}"] for name in ("rows", "sums", "group_rows", "width", "storage")
            )
            if width:
                rows = memory(address, torch.float32, (count, width))
                memory(target, DTYPES[STORAGE_TYPES[storage]], (width,)).copy_(rows.sum(0))
    elif launch.template == "copy_states":
        play_copy(launch)
    elif "largest" not in launch.named and not launch.parameters.get("BY_HALVES"):
        play_recurrence(launch)


def exponent_of(launch, tensor):
    p, given = launch.parameters, launch.named
    if not p["FACTORS"] >> TENSORS.index(tensor) & 1:
        return 0
    name, place = ("largest_of_dy", 0) if tensor == "dy" else ("largest_of_rows", TENSORS.index(tensor))
    largest = float(memory(given[name], torch.float32, (place + 1,))[place])
    assert math.isfinite(largest)
    if largest < 2.0**-126:
        return 0
    exponent = math.frexp(largest)[1] - 1
    if tensor in ("v", "dy"):
        return exponent - p["EXPONENT"]
    return 0 if p["LEAST_EXPONENT"] <= exponent <= p["MOST_EXPONENT"] else exponent


def play_narrow(launch):
    p, given = launch.parameters, launch.named
    tokens, heads = given["tokens"], given["heads"]
    batch = launch.grid[0] // max(-(-tokens // p["TOKENS"]), 1)
    assert batch * -(-tokens // p["TOKENS"]) == launch.grid[0]
    shape = batch, tokens, heads, p["SIZE"]
    source = memory(given["from"], DTYPES[p["T_FROM"]], shape, (*given["from_strides"], 1))
    for address, dtype in ((given["from"], p["T_FROM"]), (given.get("to", 0), p["T_TO"])):
        assert address % (DTYPES[dtype].itemsize * p["VECTOR"]) == 0
    assert p["SIZE"] % p["VECTOR"] == 0
    assert all(
        stride % p["VECTOR"] == 0 for stride, size in zip(given["from_strides"], shape, strict=False) if size > 1
    )
    exponent = 0
    if launch.entry != "narrow_as_they_are":
        exponent = sum(exponent_of(launch, tensor) for tensor in TENSORS) * (1 if p["RESTORES"] else -1)
    scaled = torch.ldexp(source.double(), torch.tensor(float(exponent))).float()
    if launch.entry in ("find_largest", "narrow_as_they_are"):
        largest = memory(given["largest"], torch.float32, (p["SLOT"] + 1,))[p["SLOT"]]
        finite = scaled[scaled.isfinite()].abs()
        largest.copy_(max(largest, finite.max()) if len(finite) else largest)
    if launch.entry in ("narrow_rows", "narrow_as_they_are") or (launch.entry == "narrow_again" and exponent):
        memory(given["to"], DTYPES[p["T_TO"]], shape).copy_(scaled.clone())


def play_copy(launch):
    p, given = launch.parameters, launch.named
    size, layouts = (p["HEAD_SIZE"], p["VALUE_SIZE"]), (p["FROM_VK"], p["TO_VK"])
    assert (given["row_step"], given["first_row"]) == (1, 0)
    shapes = [(launch.grid[0], *(size[::-1] if is_vk else size)) for is_vk in layouts]
    source = memory(given["from"], DTYPES[p["T_FROM"]], shapes[0]).clone()
    target = memory(given["to"], DTYPES[p["T_TO"]], shapes[1])
    target.copy_(source if layouts[0] == layouts[1] else source.transpose(1, 2))


def play_recurrence(launch):
    """Compute the only kernel of a direction of the chunked ones, by the reference in float64."""
    p, given = launch.parameters, launch.named
    stem, direction = ("wkv7" if "wkv7" in launch.template else "gla"), "backward" if "dy" in given else "forward"
    names = {"q": "r", "first": "initial_state", "last": "final_state", "input": "v", "output": "y", "dq": "dr"}
    for name, own in names.items():
        for suffix in ("", "_strides"):
            if name + suffix in given:
                given[own + suffix] = given[name + suffix]
    sequences, heads, tokens = launch.grid[0], given["heads"], given["tokens"]
    key, value = p["HEAD_SIZE"], p["VALUE_SIZE"]
    bounds = memory(given["cu_seqlens"], torch.int64, (sequences + 1,)) if given["cu_seqlens"] else None
    op = stem
    if stem == "gla":
        op = "linear_attention" if p["DECAY"] == "none" else "wkv6" if p["BONUS"] else "gla"
        op = "wkv5" if p["BONUS"] and given["w_strides"][:2] == (0, 0) else op
    io, layout = DTYPES[p["T_IO"]], p.get("STATE_LAYOUT", "vk")
    assert io == torch.float16
    assert p.get("T_STATE", "fp32") == "fp32"
    batch = 1 if bounds is not None else sequences

    def read(name, dtype, size):
        shape = (batch, tokens, heads, size)
        return memory(given[name], dtype, shape, (*given[f"{name}_strides"], 1)).double()

    types = {"w": DTYPES[p.get("T_W", p["T_IO"])], "u": DTYPES[p.get("T_U", p["T_IO"])]}
    inputs = {}
    for name, dims in OPS[op].inputs.items():
        if name == "u":
            inputs[name] = memory(given[name], types["u"], (heads, key)).double()
        elif "T" not in dims:
            inputs[name] = memory(given[name], types["w"], (heads, key), (given["w_strides"][2], 1)).double()
        else:
            inputs[name] = read(name, types.get(name, io), value if name == "v" else key)
    shape = (sequences, heads, *((value, key) if layout == "vk" else (key, value)))
    decay = {} if p["DECAY"] == "none" else {"decay": p["DECAY"]}
    options = {"scale": given["scale"], "state_layout": layout, **decay}

    def of_sequence(i):
        begin, end = (0, tokens) if bounds is None else bounds[i : i + 2].tolist()
        row = slice(0, 1) if bounds is not None else slice(i, i + 1)
        return {n: x if n == "u" or x.dim() == 2 else x[row, begin:end] for n, x in inputs.items()}, row, begin, end

    # States and the gradients of states at the other ends, in the calls of the directions.
    first = memory(given["initial_state"], torch.float32, shape).double() if given.get("initial_state") else None
    if direction == "forward":
        for i in range(sequences):
            mine, row, begin, end = of_sequence(i)
            y, final = reference(op, mine, None if first is None else first[i : i + 1], options)
            memory(given["y"], io, (batch, tokens, heads, value))[row, begin:end] = y.to(io)
            if given.get("final_state"):
                memory(given["final_state"], torch.float32, shape)[i] = final[0].float()
        play.first = None if first is None else first.clone()  # what a kernel finds in its checkpoints
        return
    dy, first = read("dy", io, value), play.first
    for i in range(sequences):
        mine, row, begin, end = of_sequence(i)
        leaves = {n: x.clone().requires_grad_() for n, x in mine.items()}
        state = torch.zeros(shape[1:]).double()[None] if first is None else first[i : i + 1]
        state = state.clone().requires_grad_()
        with torch.enable_grad():
            y, final = reference(op, leaves, state, options)
            weighted = (y * dy[row, begin:end]).sum()
            if given.get("grad_final_state"):
                weighted = (
                    weighted + (final * memory(given["grad_final_state"], torch.float32, shape)[i].double()).sum()
                )
            grads = torch.autograd.grad(weighted, [*leaves.values(), state], materialize_grads=True)
        for name, grad in zip(leaves, grads, strict=False):
            dtype = types.get(name, io)
            if grad.dim() == 2:
                memory(given[f"d{name}"], torch.float32, (sequences, heads, key))[i] = grad.float()
            else:
                memory(given[f"d{name}"], dtype, (batch, tokens, heads, grad.shape[3]))[row, begin:end] = grad.to(dtype)
        if given.get("grad_initial_state"):
            memory(given["grad_initial_state"], torch.float32, shape)[i] = grads[-1][0].float()


def reference(op, given, state, options):
    return getattr(rwkv_jit, f"{op}_ref")(*given.values(), initial_state=state, output_final_state=True, **options)


# ---- calls -------------------------------------------------------------------------------------------------------


def make(op, dtype=torch.float32, wide=True, batch=B):
    """Inputs of a model's sizes; decays and u stay float32 where they may be `wide`."""
    sizes = {"B": batch, "T": T, "H": H, "K": K, "V": V}
    made = {name: torch.randn([sizes[dim] for dim in dims]) for name, dims in OPS[op].inputs.items()}
    if "a" in made:
        kk = torch.nn.functional.normalize(made["a"], dim=-1)
        made |= {"a": -kk, "b": kk * torch.rand_like(kk)}
    if "w" in made:
        made["w"] = -0.7 * torch.rand_like(made["w"])
    return {n: x if wide and n in ("w", "u") else x.to(dtype) for n, x in made.items()}


def compare(op, given, state=None, weights=None, dtype=torch.float32, **options):
    """Hold a call and its gradients against the reference in float64."""
    options |= {"decay": "log"} if OPS[op].decay != "none" else {}
    public = [x.requires_grad_() for x in given.values()]
    leaves = public + ([] if state is None else [state.requires_grad_()])
    y, final = getattr(rwkv_jit, op)(
        *public, initial_state=state, output_final_state=True, backend="chunked", **options
    )
    if weights is None:
        weights = [torch.randn_like(x) for x in (y, final)]
    grads = torch.autograd.grad([y, final], leaves, weights)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wide = exact[: len(public)], None if state is None else exact[-1]
    want = getattr(rwkv_jit, f"{op}_ref")(*wide[0], initial_state=wide[1], output_final_state=True, **options)
    wanted = torch.autograd.grad(want, exact, [x.double() for x in weights], materialize_grads=True)
    names = ["y", "final", *(f"d{name}" for name in given), "dstate"]
    for name, x, exactly in zip(names, (y, final, *grads), (*want, *wanted), strict=False):
        x, exactly = x.detach(), exactly.detach()
        norm = float(exactly.norm())
        error = float((x.double() - exactly).norm()) / (norm or 1.0)
        # A decay of wkv5 sums terms of both signs over all tokens.
        assert error <= DIGITS[dtype] * (5 if (op, name) == ("wkv5", "dw") else 1), (name, error)


def make_state(sequences, layout="vk", dtype=torch.float32):
    return torch.randn(sequences, H, *((V, K) if layout == "vk" else (K, V))).to(dtype)


@pytest.mark.parametrize("dtype", list(DIGITS))
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("op", WITH_HEADS)
def test_results_are_those_of_the_call(op, wide, dtype, player):
    given = make(op, dtype, wide)
    compare(op, given, dtype=dtype)
    assert "narrow_rows" in {launch.template for launch in player.launches}


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["wkv7", "wkv5", "linear_attention"])
def test_states_of_every_kind(op, state_dtype, layout, player):
    state = make_state(B, layout, state_dtype)
    compare(op, make(op, torch.bfloat16), state, dtype=torch.bfloat16, state_layout=layout)


@pytest.mark.parametrize("size", [1e-9, 1e9])
@pytest.mark.parametrize("scaled", [0, "k", "v"])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5", "linear_attention"])
def test_sizes_that_float16_does_not_have(op, scaled, size, player):
    """And states and gradients as large and small as goes with these."""
    given = make(op)
    name = scaled or next(iter(given))
    given[name] = given[name] * size
    state, of_state = make_state(B), size if scaled == 0 else 1.0
    state = state * (1.0 if scaled == 0 else size)
    sizes = torch.randn(B, T, H, V) * 1e6, torch.randn_like(state) * 1e6 * of_state
    compare(op, given, state, sizes, state_layout="vk")


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "gla"])
def test_packed_sequences(op, player):
    """Their gradients of u are added up by chunks, which nothing plays here."""
    bounds = torch.tensor([0, 5, 5, 30, T])
    given = make(op, batch=1)
    if op == "wkv6":
        given["u"] = torch.zeros_like(given["u"])
    compare(op, given, make_state(4), state_layout="vk", cu_seqlens=bounds)


@pytest.mark.parametrize("how", ["heads first", "slices", "expanded"])
@pytest.mark.parametrize("op", ["wkv7", "wkv5"])
def test_inputs_of_any_stride(op, how, player):
    given = make(op)
    for name, x in given.items():
        if x.dim() == 4:
            given[name] = {
                "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
                "slices": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
                "expanded": lambda x: x[:1].expand_as(x),
            }[how](x).detach()
    state = torch.randn(B + 1, H, V, K)[1:]
    compare(op, given, state, [torch.randn(T, B, H, V).transpose(0, 1), make_state(B)], state_layout="vk")


@pytest.mark.parametrize("name", ["r", "k", "v", "dy"])
@pytest.mark.parametrize("op", ["wkv7", "gla"])
def test_zeros(op, name, player):
    given, weights = make(op), [torch.randn(B, T, H, V), torch.zeros(B, H, V, K)]
    if name == "dy":
        weights[0].zero_()
    else:
        given[name].zero_()
    compare(op, given, weights=weights, state_layout="vk")


@pytest.mark.parametrize("name", ["r", "k", "v", "dy"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("op", ["wkv7", "gla"])
def test_a_number_that_is_not_finite_spoils_its_sequence_alone(op, number, name, player):
    given, dy = make(op), torch.randn(B, T, H, V) * 1e5
    results = []
    for is_spoiled in (False, True):
        given[name if name != "dy" else "v"] = given[name if name != "dy" else "v"].detach().mul(1.0)
        for x in ("r", "k", "v"):
            given[x] = given[x].detach() * (1 if is_spoiled else 1e5)
        if is_spoiled:
            (dy if name == "dy" else given[name])[0, 5, 1, 3] = number
        leaves = [x.detach().clone().requires_grad_() for x in given.values()]
        y, _ = getattr(rwkv_jit, op)(*leaves, decay="log", backend="chunked")
        grads = torch.autograd.grad(y, leaves, dy)
        results.append([x.detach()[1] for x in (y, *grads)])
        assert bool(y.detach()[0].isfinite().all()) == (not is_spoiled or name == "dy")
    for x, want in zip(*results, strict=True):
        assert torch.isfinite(want).all()
        assert float((x - want).norm()) <= 1e-3 * float(want.norm())


@pytest.mark.parametrize("sizes", [(0, T), (B, 0)])
@pytest.mark.parametrize("op", ["wkv7", "wkv6"])
def test_no_sequences_and_no_tokens(op, sizes, player):
    """Without tokens the final state is the first one."""
    batch, tokens = sizes
    given = [x[:batch, :tokens] if x.dim() == 4 else x for x in make(op).values()]
    state = 1e9 * make_state(batch)
    y, final = getattr(rwkv_jit, op)(
        *given, initial_state=state, output_final_state=True, state_layout="vk", decay="log", backend="chunked"
    )
    assert y.shape == (batch, tokens, H, V)
    if not tokens:
        torch.testing.assert_close(final, state, rtol=1e-6, atol=0.0)


# ---- what is launched ----------------------------------------------------------------------------------------------


def test_results_wait_for_kernels_beside_them(on_gpu, monkeypatch):
    """The scan of few heads goes on beside the other kernels, and its y is what is widened."""
    on_gpu.use("sm_90")
    monkeypatch.setattr(delta_large, "_LEAST_CHUNKS", 30)
    given = [torch.randn(2, 64 * 30, 1, 256) for _ in range(6)]
    rwkv_jit.wkv7(*given, decay="sigmoid", chunk_len=64)
    order = [x[0] if x[0] in ("wait", "zero") else x.template for x in on_gpu.order]
    main, side = 100, 1001
    last = max(i for i, x in enumerate(order) if x == "wkv7_group_scan")
    assert on_gpu.order[last].stream == side
    assert on_gpu.order[last + 1] == ("wait", main, side)
    assert order[last + 2] == "narrow_rows"


def test_states_are_shared_between_many_blocks(on_gpu):
    """As many numbers as a block can have at a time, not whole states of many heads."""
    given = [torch.randn(1, 40, 32, 64) for _ in range(6)]
    rwkv_jit.wkv7(*given, initial_state=torch.randn(1, 32, 64, 64), output_final_state=True, decay="sigmoid")
    of_states = [x for x in on_gpu.launches if x.template == "narrow_rows" and x.parameters["VECTOR"] == 1]
    assert len(of_states) == 3
    for launch in of_states:
        numbers = launch.named["tokens"] * launch.named["heads"] * launch.parameters["SIZE"]
        assert numbers == 32 * 64 * 64
        assert numbers / launch.grid[0] <= 1024


def test_segments_have_their_rows_behind_each_other(on_gpu):
    """Whatever the strides of the tensors that they were made from."""
    on_gpu.home = 1
    given = [torch.randn(1, 1, 4096, 64).transpose(1, 2) for _ in range(4)]
    rwkv_jit.gla(*given)
    (step,) = [x for x in on_gpu.launches if x.template == "gla_segment"]
    count = segments.segments("diagonal", 1, 4096, on_gpu.multiprocessors)
    assert step.named["key_strides"] == (4096 // count * 64, 64, 64)


@pytest.mark.parametrize("op", ["wkv7", "wkv6"])
def test_ragged_segments_have_float16_rows_and_all_sequences_their_states(op, on_gpu):
    """One long sequence among short ones, with gradients."""
    sizes = {"B": 1, "T": 9000, "H": 1, "K": 64, "V": 64}
    given = [torch.randn([sizes[dim] for dim in dims]).requires_grad_() for dims in OPS[op].inputs.values()]
    state = torch.randn(3, 1, 64, 64).requires_grad_()
    y, final = getattr(rwkv_jit, op)(
        *given, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 8500, 8600, 9000])
    )
    torch.autograd.grad([y, final], [*given, state], [torch.randn_like(y), torch.randn_like(final)])
    taken = on_gpu.take()
    assert "cut_sequences" in {launch.template for launch in taken}
    assert {launch.parameters["T_IO"] for launch in taken if "T_IO" in launch.parameters} == {"fp16"}
    of_states = [x for x in taken if x.template == "narrow_rows" and x.named["tokens"] == 3 * 64]
    assert len(of_states) == 2 + 1 + 2 + 1  # the largest and a copy before each direction, a copy behind it
