"""Launches around a recurrence on the GPU, alone: values and gradients against float64, and the same bits again."""

import operand_cases
import pytest
import torch
from operand_cases import ALL, BF16, DELTA, FP16, FP32

pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
TYPES = ((BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP16))
SIZES = [
    (2, 150, 2, 4, 64, 64), (1, 1100, 1, 24, 128, 64), (3, 33, 2, 10, 7, 13), (1, 70, 1, 3, 300, 40),
    (2, 1, 4, 8, 64, 128), (1, 4099, 8, 8, 64, 64),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), ALL)
@pytest.mark.parametrize("place", range(len(SIZES)))
def test_values_and_gradients(op, name, words, place):
    turn = place + ALL.index((name, words))
    for layout in operand_cases.LAYOUTS:
        operand_cases.check(name, words, SIZES[place], *TYPES[turn % len(TYPES)], layout)


@pytest.mark.parametrize("words", DELTA)
@pytest.mark.parametrize("types", TYPES)
def test_operands_of_delta_rules(op, words, types):
    for sizes in ((2, 150, 2, 4, 64), (1, 1100, 8, 8, 128), (3, 33, 2, 6, 7)):
        operand_cases.check_delta(words, sizes, *types)


@pytest.mark.parametrize("heads", [(2, 12), (1, 5), (1, 64), (4, 8)])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_key_heads_with_many_value_heads(op, heads, dtype):
    operand_cases.check_delta("log l2 q", (2, 300, *heads, 64), dtype)


@pytest.mark.parametrize(("name", "words"), ALL)
def test_results_are_the_same_in_every_run(op, name, words):
    case = operand_cases.make(name, words, (4, 3000, 2, 16, 64, 64))
    written, grads = operand_cases.run(case), operand_cases.differentiate(case)
    for _ in range(3):
        assert all(torch.equal(x, written[each]) for each, x in operand_cases.run(case).items())
        assert all(torch.equal(x, grads[each]) for each, x in operand_cases.differentiate(case).items())


@pytest.mark.parametrize(("name", "words"), ALL)
def test_rows_do_not_depend_on_the_batch(op, name, words):
    """What has tokens is the same beside other rows."""
    whole = operand_cases.make(name, words, (4, 700, 2, 16, 64, 64))
    written, grads = operand_cases.run(whole), operand_cases.differentiate(whole)
    p = whole.problem
    inputs = {each: x[:1] if "T" in p.op.inputs[each] else x for each, x in whole.inputs.items()}
    first = whole._replace(
        problem=p._replace(B=1, N=1), inputs=inputs, grads={each: x[:1] for each, x in whole.grads.items()}
    )
    for each, x in operand_cases.run(first).items():
        assert torch.equal(x, written[each][:1])
    for each, x in operand_cases.differentiate(first).items():
        if "T" in p.op.inputs["y" if each == "d_y" else each.removeprefix("d")]:
            assert torch.equal(x, grads[each][:1])
