"""Switches of the process: results whatever the batch, and products of float32."""

import pytest
import torch

import rwkv_jit
from rwkv_jit.ahead import requests
from rwkv_jit.call import switches
from rwkv_jit.schedules.table import OPS

HALF = torch.bfloat16
GATED = "wkv6", "wkv5", "gla", "linear_attention"
SHAPES = {"short": (64, 2, 4, 64), "one chunk": (64, 16, 4, 64), "usual": (64, 300, 4, 64), "few": (1, 4096, 1, 64)}


@pytest.fixture(autouse=True)
def usual_modes():
    yield
    rwkv_jit.set_batch_invariant(False)
    rwkv_jit.set_bfloat16_precision("medium")
    torch.set_float32_matmul_precision("highest")


def make(op, shape, dtype, grad=False):
    sizes = {**dict(zip("BTHK", shape, strict=True)), "V": shape[-1]}
    shapes = [[sizes[dim] for dim in dims] for dims in OPS[op].inputs.values()]
    return [torch.empty(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]  # nobody looks at numbers


def run(op, given, **options):
    return getattr(rwkv_jit, op)(*given, **options)


def kernels(gpu):
    """What was launched since the last look, without what tells calls apart in their arguments."""
    return [(launch.template, sorted(launch.parameters.items()), launch.block) for launch in gpu.take()]


def call(op, shape, grad, bounds=None, dtype=HALF):
    given = make(op, shape, dtype, grad)
    more = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    y, _ = run(op, given, **more)
    if grad:
        torch.autograd.grad(y, given, torch.empty_like(y))


@pytest.mark.parametrize("enabled", [1, None, "on"])
def test_switch_takes_a_bool(enabled):
    with pytest.raises(TypeError, match="enabled: expected a bool, got"):
        rwkv_jit.set_batch_invariant(enabled)
    assert rwkv_jit.is_batch_invariant() is False


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("op", ["wkv7", *GATED])
def test_kernels_are_the_same_for_every_batch_and_length(op, head_size, grad, on_gpu):
    """With the switch; without it they differ, so that there is something to switch."""
    on_gpu.home = 1  # an sm_90
    several = {}
    for enabled in (False, True):
        rwkv_jit.set_batch_invariant(enabled)
        several[enabled] = []
        for shape in SHAPES.values():
            call(op, (*shape[:3], head_size), grad)
            several[enabled].append(kernels(on_gpu))
        call(op, (1, 300, 4, head_size), grad, bounds=[0, 1, 1, 60, 300])
        several[enabled].append(kernels(on_gpu))
    assert all(one == several[True][0] for one in several[True])
    assert any(one != several[False][0] for one in several[False])


def test_threads_of_short_chunks_are_the_same_for_every_length(on_gpu):
    """Those of wkv7's forward say in which order decays are summed."""
    rwkv_jit.set_batch_invariant(True)
    several = []
    for tokens in (40, 400):
        run("wkv7", make("wkv7", (4, tokens, 4, 64), HALF, grad=True), chunk_len=16)
        several.append(kernels(on_gpu))
    assert several[0] == several[1]


@pytest.mark.parametrize("op", ["wkv4", "timex"])
def test_kernels_of_ops_without_heads_are_the_same_for_every_batch(op, on_gpu):
    """With the switch; without it a row alone takes others."""
    on_gpu.home = 1
    for enabled in (False, True):
        rwkv_jit.set_batch_invariant(enabled)
        several = []
        for batch in (1, 3, 8, 2000):
            if op == "wkv4":
                k = torch.randn(batch, 700, 8)
                rwkv_jit.wkv4(torch.randn(8), torch.randn(8), k, torch.randn(batch, 700, 8))
            else:
                rwkv_jit.timex(torch.randn(8, 400), torch.randn(batch, 8, 400))
            several.append(kernels(on_gpu))
        assert all(one == several[0] for one in several) == enabled


def test_switch_is_looked_at_in_every_call(on_gpu):
    seen = []
    for enabled in (False, True, False, True):
        rwkv_jit.set_batch_invariant(enabled)
        call("wkv6", (4, 2, 4, 64), grad=False)
        seen.append(kernels(on_gpu)[0][0])
    assert seen == ["update_states", "gla_scan"] * 2


def test_segments_that_are_asked_for_are_refused(on_gpu):
    rwkv_jit.set_batch_invariant(True)
    with pytest.raises(rwkv_jit.UnsupportedConfigError, match="nothing under `set_batch_invariant`"):
        run("wkv6", make("wkv6", (1, 4096, 1, 64), HALF), backend="split")


@pytest.mark.parametrize("op", GATED)
def test_float32_takes_tensor_cores_where_torch_allows_it_and_batches_do_not_matter(op, on_gpu):
    seen = []
    for precision, enabled in (("highest", False), ("high", False), ("medium", False), ("high", True)):
        torch.set_float32_matmul_precision(precision)
        rwkv_jit.set_batch_invariant(enabled)
        call(op, (4, 64, 4, 64), grad=True, dtype=torch.float32)
        seen.append({template for template, _, _ in kernels(on_gpu)})
    exact = {"gla_recurrent_forward", "gla_recurrent_backward"}
    assert exact <= seen[0]
    assert exact <= seen[3]
    for fast in seen[1:3]:
        assert {"narrow_rows", "gla_scan"} <= fast
        assert not exact & fast


@pytest.mark.parametrize("precision", ["highest", None, "bf16"])
def test_precision_of_bfloat16_is_one_of_two(precision):
    with pytest.raises(ValueError, match="precision: expected 'medium' or 'high', got"):
        rwkv_jit.set_bfloat16_precision(precision)
    assert rwkv_jit.get_bfloat16_precision() == "medium"


def test_older_torch_says_it_in_other_words(monkeypatch):
    for said, expected in (("highest", ()), ("high", ("fp32",)), ("medium", ("fp32",))):
        monkeypatch.setattr(switches, "products_of_float32", lambda said=said: said)
        assert switches.current() == (expected, False)


@pytest.mark.parametrize("op", ["wkv7", *GATED])
def test_bfloat16_is_as_exact_as_is_asked_for(op, on_gpu):
    seen = []
    for precision in ("medium", "high", "medium", "high"):
        rwkv_jit.set_bfloat16_precision(precision)
        assert rwkv_jit.get_bfloat16_precision() == precision
        call(op, (4, 64, 4, 64), grad=True)
        taken = {template: dict(parameters) for template, parameters, _ in kernels(on_gpu) if template != "sum_buffers"}
        products = {parameters["T_IO"] for parameters in taken.values() if "T_IO" in parameters}
        seen.append(("narrow_rows" in taken, products))
    assert seen == [(False, {"bf16"}), (True, {"fp16"})] * 2


# ---- when the switches are looked at -----------------------------------------------------------------------------


def switched(narrow, is_batch_invariant):
    torch.set_float32_matmul_precision("high" if narrow else "highest")
    rwkv_jit.set_bfloat16_precision("high" if narrow else "medium")
    rwkv_jit.set_batch_invariant(is_batch_invariant)


@pytest.mark.parametrize("op", ["wkv7", "gla"])
def test_trace_keeps_what_our_switches_were(op):
    """Where torch's own one is another, torch traces anew."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def arguments(graph):
        (call,) = [node for node in graph.graph.nodes if f"{op}_fwd" in str(node.target)]
        names = [x.name for x in getattr(torch.ops.rwkv_jit, f"{op}_fwd").default._schema.arguments]
        given = dict(zip(names, call.args, strict=False))
        return given["is_narrow"], given["is_batch_invariant"], given["is_chosen"]

    given = make(op, (1, 4, 2, 8), HALF)
    for state in ((False, False), (True, False), (False, True)):
        switched(*state)
        torch.set_float32_matmul_precision("highest")
        torch._dynamo.reset()
        compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, backend=keep)
        compiled(*given)
        assert arguments(graphs[-1]) == (*state, False)
        rwkv_jit.set_bfloat16_precision("medium" if state[0] else "high")
        rwkv_jit.set_batch_invariant(not state[1])
        compiled(*given)
        assert len(graphs) == 1
        graphs.clear()
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, backend=keep)
    given = make(op, (1, 4, 2, 8), torch.float32)
    for is_narrow in (False, True):
        switched(is_narrow, False)
        compiled(*given)
        assert arguments(graphs[-1]) == (is_narrow, False, False)


def of_torch_op(op, given, is_narrow, is_batch_invariant):
    """A call whose algorithm is chosen when it runs, as a compiled graph has it."""
    decay = OPS[op].decay
    options = (1.0, decay, OPS[op].state_layout, 64, None, None, "auto", None, None, is_narrow, is_batch_invariant)
    return getattr(torch.ops.rwkv_jit, f"{op}_fwd")(*given, None, None, *options, False, False, False)[0]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "linear_attention"])
def test_torch_op_goes_by_its_own_arguments(op, dtype, on_gpu):
    """Whatever the switches are when it runs, and when its backward does: what was saved fits both."""
    given = make(op, (2, 64, 2, 64), dtype, grad=True)
    for is_narrow in (False, True):
        for at_first in (False, True):
            switched(at_first, False)
            y = of_torch_op(op, given, is_narrow, False)
            switched(not at_first, False)
            torch.autograd.grad(y.float().sum(), given)
            taken = {template for template, _, _ in kernels(on_gpu)}
            assert ("narrow_rows" in taken) == is_narrow
            assert any("recurrent" in template for template in taken) == (dtype == torch.float32 and not is_narrow)


def test_torch_op_is_batch_invariant_by_its_own_argument(on_gpu):
    given = make("wkv6", (4, 2, 4, 64), HALF)
    for is_batch_invariant in (False, True):
        rwkv_jit.set_batch_invariant(not is_batch_invariant)
        of_torch_op("wkv6", given, False, is_batch_invariant)
        (taken,) = kernels(on_gpu)
        assert taken[0] == ("gla_scan" if is_batch_invariant else "update_states")


def test_rows_that_autocast_makes_float16_stay_as_they_are(on_gpu):
    """An exported program casts what it asked for as float32."""
    given = make("gla", (2, 64, 2, 64), torch.float16)
    of_torch_op("gla", given, True, False)
    assert {template for template, _, _ in kernels(on_gpu)} == {"gla_scan"}


def test_call_is_known_by_the_switches_that_it_went_by(on_gpu, monkeypatch):
    """Another thread may change them while it is prepared."""
    exact, fast = switches.USUAL, (("fp32",), False)
    given, answers = make("gla", (2, 64, 2, 64), torch.float32), [exact, fast]
    monkeypatch.setattr(switches, "current", lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    taken = []
    for _ in range(3):
        run("gla", given)
        taken.append(kernels(on_gpu)[0][0])
    assert taken == ["gla_recurrent_forward", "narrow_rows", "narrow_rows"]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_kernels_of_calls_can_be_compiled_ahead(dtype, on_gpu):
    """By the switches as they are: those of any call are among them."""
    for narrow in (False, True):
        switched(narrow, False)
        for op in ("wkv7", "linear_attention"):
            given = make(op, (2, 64, 2, 64), dtype, grad=True)
            ahead_of = {
                (request.template.name, tuple(sorted(request.parameters.items())))
                for direction in requests.DIRECTIONS
                for request in requests.call_requests(requests.Calls(op, 64, dtype, "sm_80", direction))
            }
            y, final = run(op, given, output_final_state=True)
            torch.autograd.grad(y.float().sum() + final.sum(), given)
            taken = {(template, tuple(parameters)) for template, parameters, _ in kernels(on_gpu)}
            assert taken <= ahead_of
            assert any(template == "narrow_rows" for template, _ in taken) == narrow
