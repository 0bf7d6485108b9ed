"""Launches around a recurrence: values and gradients without a GPU, and kernels for every architecture."""

import math

import operand_cases
import pytest
import torch
from operand_cases import ALL, BF16, DELTA, FP16, FP32
from problems import by_turns

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import operands

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TYPES = ((BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP16))
SIZES = (2, 9, 2, 6, 16, 24), (1, 21, 1, 5, 8, 8), (3, 5, 2, 2, 7, 13), (1, 33, 1, 4, 300, 40)


@pytest.mark.parametrize(("name", "words"), ALL)
@pytest.mark.parametrize("place", range(3))
def test_values_and_gradients(name, words, place, interpreted):
    torch.manual_seed(0)
    turn = place + ALL.index((name, words))
    interpreted.use("sm_90" if turn % 2 else "sm_80")
    interpreted.multiprocessors = 1 + turn % 2
    layout = operand_cases.LAYOUTS[turn % 4]
    operand_cases.check(name, words, SIZES[turn % 3], *TYPES[turn % 5], layout)


@pytest.mark.parametrize("place", range(4))
def test_steps_of_any_type(place, interpreted):
    """Heads that lanes take in turns, limits, and D v, in all layouts."""
    torch.manual_seed(0)
    layout = operand_cases.LAYOUTS[place]
    operand_cases.check("operands", "steps keys softplus bias limit D", SIZES[3], *TYPES[place], layout)


@pytest.mark.parametrize(("name", "words"), ALL)
@pytest.mark.parametrize("sizes", [(0, 3, 2, 4, 8, 8), (2, 0, 2, 4, 8, 8), (2, 3, 0, 0, 8, 8)])
def test_calls_without_rows_or_heads(name, words, sizes, interpreted):
    """What sums have nothing of is 0."""
    case = operand_cases.make(name, words, sizes)
    operand_cases.run(case)
    assert all((x == 0).all() for x in operand_cases.differentiate(case).values())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fixed_decays_of_heads_with_one_channel(dtype, interpreted):
    """What kernels with one decay for a head leave of fixed ones, summed over tokens."""
    operand_cases.check("operands", "heads fixed", (3, 70, 5, 5, 1, 8), dtype, dtype)


def test_slopes_are_those_of_torch(interpreted):
    """On limits and outside of them, above the threshold of the softplus, and of what is no number."""
    for words, steps in (
        ("steps limit", [0.0, operand_cases.LIMIT[0], 1.0, operand_cases.LIMIT[1], 2.0, math.inf, -math.inf]),
        ("steps softplus", [-200.0, -20.0, 0.0, 19.9, 20.0, 20.1, 100.0]),
    ):
        case = operand_cases.make("operands", words, (1, len(steps), 1, 1, 4, 4), FP32, FP32)
        case.inputs["dt"].copy_(torch.tensor(steps).view(1, -1, 1))
        found, (_, wanted) = operand_cases.differentiate(case), operand_cases.exactly(case)
        assert torch.allclose(found["ddt"].double(), wanted["ddt"], rtol=1e-5, atol=1e-12)
        if "limit" in words:
            assert [x != 0 for x in found["ddt"].flatten().tolist()] == [False, True, True, True, False, False, False]
    case = operand_cases.make("operands", "steps limit", (1, 2, 1, 1, 4, 4), FP32, FP32)
    case.inputs["dt"].copy_(torch.tensor([math.nan, 1.0]).view(1, -1, 1))
    found = operand_cases.run(case)
    assert found["w"][:, 0].isnan().all()
    assert found["new_v"][:, 0].isnan().all()
    assert found["new_v"][:, 1].isfinite().all()
    assert operand_cases.differentiate(case)["ddt"][0, 0] == 0.0


@pytest.mark.parametrize("words", DELTA)
def test_operands_of_delta_rules(words, interpreted):
    torch.manual_seed(0)
    turn = DELTA.index(words)
    interpreted.use("sm_90" if turn % 2 else "sm_80")
    heads = ((2, 2), (2, 4), (1, 3), (1, 4))[turn % 4]
    operand_cases.check_delta(words, (2, 9, *heads, (16, 12)[turn // 4 % 2]), *TYPES[turn % 5])


@pytest.mark.parametrize(("heads", "dtype"), [((2, 12), FP32), ((1, 5), BF16), ((1, 8), FP16), ((2, 6), FP32)])
def test_key_heads_with_many_value_heads(heads, dtype, interpreted):
    torch.manual_seed(0)
    operand_cases.check_delta("log l2 q", (2, 9, *heads, 16), dtype)


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("case", "arch"), by_turns(ALL, ARCHS))
def test_compiles_without_spills_everywhere(case, arch):
    """At usual sizes, as threads have the most there; what is cut by other sizes has less."""
    gpu, turn = Gpu(arch, multiprocessors=100), ALL.index(case)
    sizes = ((8, 4096, 8, 32, 64, 64), (1, 100, 1, 5, 256, 100))[turn % 2]
    each = operand_cases.of_problem(*case, sizes, *TYPES[turn % 5], gpu)
    for schedule in (operand_cases.forward(each), operand_cases.backward(each)):
        for step in schedule.launches:
            found = kernel.get(step.request(gpu)).resources[step.entry]
            assert found.spill_bytes == 0
            blocks = int(step.parameters.get("BLOCKS_PER_SM", 1))
            assert found.registers * int(step.parameters["NUM_THREADS"]) * blocks <= 65536


def compile_delta(words, arch, head_sizes):
    """Compile the operands of a delta rule, forward and backward."""
    turn = DELTA.index(words)
    for size in head_sizes:
        sizes = (8, 4096, 2, 2 * (1 + turn % 4), size)
        for schedule in operand_cases.delta_schedules(words, sizes, *TYPES[turn % 5], Gpu(arch)):
            for request in schedule.requests(Gpu(arch)):
                kernel.get(request)


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("words", "arch"), by_turns(DELTA, ARCHS))
def test_operands_of_delta_rules_compile_everywhere(words, arch):
    compile_delta(words, arch, (64, 128, (1, 7, 33, 100, 256)[DELTA.index(words) % 5]))


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize("words", DELTA)
def test_operands_of_delta_rules_compile_for_the_largest_heads(words):
    compile_delta(words, "sm_90", (999, 1024))


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("words", "types", "index_bytes"), [("D channels z", TYPES[0], 8), ("D z", TYPES[1], 4)])
def test_outputs_over_a_pool_compile_without_spills(arch, words, types, index_bytes):
    each = operand_cases.of_problem(
        "behind", words, (8, 4096, 8, 32, 64, 64), *types, Gpu(arch, multiprocessors=100)
    )  # fmt: skip
    slots = operands.Slots(16, index_bytes, -1, 9, 8)
    (step,) = (operands.over_slots(step, slots) for step in operand_cases.forward(each).launches)
    found = kernel.get(step.request(each.problem.gpu)).resources["skip_gate_slots"]
    assert found.spill_bytes == 0
    blocks = int(step.parameters["BLOCKS_PER_SM"])
    assert found.registers * int(step.parameters["NUM_THREADS"]) * blocks <= 65536


@pytest.mark.parametrize(
    ("name", "rule", "change"),
    [
        ("diagonal_operands", "a head consists of whole accesses", {"VECTOR": 8}),
        ("diagonal_operands_backward", "a head consists of whole accesses", {"VECTOR": 8}),
        ("diagonal_operands_backward", "heads do not cross warps", {"NUM_THREADS": 48}),
    ],
)
def test_broken_rule_of_a_template_comes_back_as_its_text(name, rule, change):
    gpu = Gpu("sm_90", multiprocessors=100)
    each = operand_cases.of_problem("operands", "steps keys", (1, 9, 2, 4, 100, 36), *TYPES[0], gpu)
    launches = (*operand_cases.forward(each).launches, *operand_cases.backward(each).launches)
    request = next(step.request(gpu) for step in launches if step.template == name)
    with pytest.raises(UnsupportedConfigError, match=f"^{name}: {rule}; got "):
        kernel.get(request._replace(parameters={**request.parameters, **change}))
