"""A prepared call and its gradients: what it saves, what kernels get, and where their gradients go."""

import pytest
import torch

from rwkv_jit.call import prepared
from rwkv_jit.call.prepared import Gradients, Prepared
from rwkv_jit.call.recording import Leaves

HALF = torch.bfloat16


class Plan:
    """A plan that computes in plain torch, and notes what it gets."""

    problem = None

    def __init__(self, compute):
        self.compute, self.seen = compute, []

    def run(self, arrays):
        self.seen.append(list(arrays))
        return self.compute(*arrays)


def of_plans(forward, backwards, by_op=None, behind=0, bounds=None, **more):
    """A call of a, b, an input that is absent, and the bounds of sequences."""

    def plan(arrays):
        backwards.append(Plan(lambda a, b, c, bounds, kept, dy, dz: [2 * dy, dz + kept]))
        return backwards[-1]

    gradients = Gradients(2, plan, by_op, [1, 0], 4, **more)
    return Prepared(forward, gradients, behind, bounds)


def made(a, b, c, bounds, *behind):
    return [a + b, a - b, a * b]  # the last one is kept


def inputs():
    return torch.rand(3), torch.rand(3).requires_grad_(), None, torch.tensor([0, 3])


def test_gradients_go_to_the_places_of_their_inputs():
    forward, backwards = Plan(made), []
    call = of_plans(forward, backwards, behind=2)
    a, b, c, bounds = inputs()
    a.requires_grad_()
    y, z = prepared.record(call, a, b, c, bounds)
    assert forward.seen[0][4:] == [None, None]
    weights = torch.rand(3), torch.rand(3)
    da, db = torch.autograd.grad([y, z], [a, b], weights)
    assert torch.equal(db, 2 * weights[0])
    assert torch.equal(da, weights[1] + (a * b).detach())
    for _ in range(2):  # the plan of a backward is found once
        torch.autograd.grad(prepared.record(call, a, b, c, bounds), [a, b], weights)
    assert [len(x.seen) for x in backwards] == [3]
    wide = torch.rand(6)[::2]
    torch.autograd.grad(prepared.record(call, a, b, c, bounds), [a, b], (wide, weights[1]))
    assert [len(x.seen) for x in backwards] == [3, 1]  # another one for other strides


def test_what_nothing_depends_on_has_zeros_where_kernels_need_a_tensor():
    backwards = []
    call = of_plans(Plan(made), backwards, needed=[(6, (3,), HALF)])
    a, b, c, bounds = inputs()
    y, _ = prepared.record(call, a, b, c, bounds)
    torch.autograd.grad(y, b, torch.ones(3))
    dz = backwards[0].seen[0][6]
    assert dz.dtype == HALF
    assert torch.equal(dz, torch.zeros(3, dtype=HALF))


def test_inputs_may_be_saved_as_results_or_not_at_all():
    call = of_plans(Plan(made), [], replaced=[(0, 1), (1, None)])
    a, b, c, bounds = inputs()
    results, saved = call.record((a, b, c, bounds))
    assert len(results) == 2
    assert torch.equal(saved[0], a - b)
    assert saved[1] is None
    assert saved[3] is bounds
    assert torch.equal(saved[4], a * b)


def test_a_shared_gradient_has_its_dtype():
    call = of_plans(Plan(made), [], shared=[(2, 1, HALF)])
    grads = call.differentiate((*inputs(), torch.rand(3)), (torch.rand(3), torch.rand(3)))
    assert grads[2].dtype == HALF
    assert torch.equal(grads[2], grads[1].to(HALF))
    assert grads[3] is None


def test_results_and_kept_tensors_that_a_call_lacks_are_none():
    forward = Plan(lambda *arrays: made(*arrays)[:1])
    call = of_plans(forward, [], absent=(None,), unkept=(None,))
    results, saved = call.record(inputs())
    assert [x is None for x in results] == [False, True]
    assert [x is None for x in saved] == [False, False, True, False, True]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_bounds_are_made_readable_once_and_saved_so(is_recorded):
    forward, seen = Plan(made), []
    call = of_plans(forward, [], bounds=(3, lambda x: seen.append(x) or x.long()))
    a, b, c, _ = inputs()
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    if is_recorded:
        _, saved = call.record((a, b, c, bounds))
        assert saved[3].dtype == torch.int64
    else:
        call.run((a, b, c, bounds))
    assert len(seen) == 1
    assert seen[0] is bounds
    assert forward.seen[0][3].dtype == torch.int64


def test_tensors_that_are_not_torchs_go_to_the_op():
    class Own(torch.Tensor):
        pass

    call = of_plans(Plan(made), [], lambda saved, grads: (len(saved), len(grads)))
    saved = (*inputs(), torch.rand(3))
    assert call.differentiate(saved, (torch.rand(3).as_subclass(Own), torch.rand(3))) == (5, 2)


def test_gradients_of_an_op_in_plain_torch():
    """Of two inputs of which one wants none, and another tensor behind them."""
    leaves = Leaves(("a", "b", "c"))
    a, b, factor = torch.rand(3), torch.rand(3), torch.rand(3)
    arrays, weight = (a, b, None, factor), torch.rand(3)
    assert leaves.wanted(arrays, ()) == ["a", "b"]
    assert leaves.wanted(arrays, ("b", "c")) == ["b"]
    found = leaves.plainly(lambda x: (x[0] * x[1] * x[3], x[0] + 1), arrays, (weight, None), ["b"])
    assert found.keys() == {"b"}
    torch.testing.assert_close(found["b"], weight * (a * factor))
    nothing = leaves.plainly(lambda x: (x[0] * x[1],), arrays, (None,), ["a", "b"])
    assert not any(x.any() for x in nothing.values())
    placed = leaves.in_places(found, ["a", "b"], arrays)
    assert torch.equal(placed[0], torch.zeros(3))  # wanted, and nothing depends on it
    assert placed[1] is found["b"]
    assert placed[2].shape == (0,)
    assert [x.shape for x in leaves.without_memory(arrays, ["b"])] == [(0,), (3,), (0,)]
    assert torch.equal(Leaves(("a",)).in_places({"a": a}, ["a"], arrays), a)  # alone it is no tuple
