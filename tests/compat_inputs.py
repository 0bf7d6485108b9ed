"""Random inputs of compat's functions and extensions, and how they are held to references in float64."""

import pytest
import torch

from rwkv_jit.compat import listed

B, T, H, N = 3, 19, 2, 5


def rows(*shape, dtype=torch.float32):
    """Random numbers whose channels do not lie side by side."""
    return (torch.randn(*shape, 2, dtype=torch.float64) * 0.5).to(dtype)[..., 0]


def delta_inputs(sizes, dtype=torch.float32):
    """R, w, k, v, a and b of RWKV-7, [B, T, H, N]."""
    r, k, v, w = (rows(*sizes, dtype=dtype) for _ in range(4))
    direction = torch.nn.functional.normalize(rows(*sizes, dtype=torch.float64), dim=-1)
    return r, w, k, v, (-direction).to(dtype), (direction * 0.5).to(dtype)


def states(sizes, dtype=torch.float32):
    batch, _, heads, size = sizes
    return rows(batch, heads, size, size, dtype=dtype)


LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def near(found, want, limit=1e-5):
    for x, y in zip(found, want, strict=True):
        assert (x.double() - y.reshape(x.shape)).norm() <= limit * y.norm() + 1e-12


def agree(function, reference, inputs, limit=None):
    """Results and gradients of `function`, whatever shapes it gives them, are those of `reference` in float64."""
    ours = [x.detach().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    found, want = ([x for x in results if x is not None] for results in (function(*ours), reference(*theirs)))
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in want]
    grads = torch.autograd.grad(found, ours, [w.reshape(x.shape).to(x) for w, x in zip(weights, found, strict=True)])
    weights = [w.to(x.dtype).double() for w, x in zip(weights, found, strict=True)]
    exact = torch.autograd.grad(want, theirs, weights, materialize_grads=True)
    near((*found, *grads), (*want, *exact), limit or LIMITS[inputs[0].dtype])
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    return found


def channels(*xs):
    return [x.flatten(2) for x in xs]


def by_token(sizes, dtype):
    return [rows(*sizes, dtype=dtype) for _ in range(4)]


@pytest.fixture(params=[0, 1, 2], ids=["a function", "a first list", "a known list"])
def calls(request, monkeypatch):
    """How often an op is called, of which the last call counts: as a list on the CPU too, or without."""
    if request.param == 0:
        yield 1
        return
    found = []
    monkeypatch.setattr(listed, "devices", {"cpu"})
    find = listed.find

    def counted(*arguments):
        found.append(find(*arguments))
        return found[-1]

    monkeypatch.setattr(listed, "find", counted)
    yield request.param
    assert found
    assert None not in found
