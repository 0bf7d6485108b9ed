"""Results of a sequence whatever the batch, bit for bit, where `set_batch_invariant` asks for it."""

import comparing
import pytest
import torch

import rwkv_jit

LENGTHS = [1, 3, 16, 130, 1030]
BOUNDS = [0, 1, 4, 20, 150, 1180]
OPS = tuple(comparing.NAMES)


@pytest.fixture(autouse=True)
def invariant():
    before = torch.get_float32_matmul_precision()
    rwkv_jit.set_batch_invariant(True)
    torch.set_float32_matmul_precision("high")  # float32 is exact nevertheless
    yield
    rwkv_jit.set_batch_invariant(False)
    torch.set_float32_matmul_precision(before)


def results(op, given, state, weights, bounds=None, **options):
    """y, the final state, and the gradients of what each sequence has for itself."""
    packing = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    y, final, grads, _ = comparing.run(op, given, state, weights, state_layout="vk", **packing, **options)
    own = [grad for name, grad in zip([*given, "state"], grads, strict=True) if name not in comparing.FIXED.get(op, "")]
    return [y, final, *own]


def one(x, index):
    """A part of a tensor in memory of its own."""
    return x.detach()[index].clone(memory_format=torch.contiguous_format).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [40, 64, 128, 256])
@pytest.mark.parametrize("op", OPS)
def test_sequence_alone_packed_and_in_a_batch(op, head_size, dtype):
    decay = {} if op == "linear_attention" else {"decay": "log"}
    given = comparing.make_inputs(op, dtype, batch=1, tokens=BOUNDS[-1], heads=2, head_size=head_size, decay="log")
    state = comparing.make_state(given, len(LENGTHS))
    weights = torch.randn_like(given["v"]), torch.randn_like(state)
    together = results(op, given, state, weights, BOUNDS, **decay)
    for place, (begin, end) in enumerate(zip(BOUNDS, BOUNDS[1:], strict=False)):
        tokens, own = (slice(0, 1), slice(begin, end)), slice(place, place + 1)
        fixed = comparing.FIXED.get(op, "")
        alone = {n: x.detach().requires_grad_() if n in fixed else one(x, tokens) for n, x in given.items()}
        of_one = weights[0][tokens], weights[1][own]
        single = results(op, alone, one(state, own), of_one, **decay)
        wanted = [x[tokens] if x.shape[1] == BOUNDS[-1] else x[own] for x in together]
        assert all(torch.equal(x, want) for x, want in zip(single, wanted, strict=True)), end - begin
        rows = {n: x if n in fixed else torch.cat([one(x, ...), *[torch.randn_like(x)] * 6]) for n, x in alone.items()}
        rows = {n: x.detach().requires_grad_() for n, x in rows.items()}
        states = torch.cat([state[own], torch.randn_like(state[own]).expand(6, -1, -1, -1)]).detach().requires_grad_()
        several = tuple(torch.cat([x, *[torch.randn_like(x)] * 6]) for x in of_one)
        batch = results(op, rows, states, several, **decay)
        assert all(torch.equal(x[:1], want) for x, want in zip(batch, single, strict=True)), end - begin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [5, 700])
@pytest.mark.parametrize("op", ["wkv4"])
def test_row_of_wkv4_in_a_batch(op, tokens, dtype):
    def made(batch):
        return torch.randn(batch, tokens, 24, device="cuda").to(dtype)

    w, u = torch.randn(2, 24, device="cuda")
    k, v, dy = (made(300) for _ in range(3))
    few = []
    for rows in (slice(0, 1), slice(0, 300)):
        mine = [x[rows].clone().requires_grad_() for x in (k, v)]
        y, final = getattr(rwkv_jit, op)(w, u, *mine, output_final_state=True)
        few.append([x[:1] for x in (y, final, *torch.autograd.grad(y, mine, dy[rows]))])
    assert all(torch.equal(x, other) for x, other in zip(*few, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [5, 600, 1200, 5000])
@pytest.mark.parametrize("op", ["timex"])
def test_row_of_timex_in_a_batch(op, tokens, dtype):
    w = torch.randn(6, tokens, device="cuda").to(dtype)
    k, dy = (torch.randn(40, 6, tokens, device="cuda").to(dtype) for _ in range(2))
    few = []
    for rows in (slice(3, 4), slice(0, 40)):
        mine = k[rows].clone().requires_grad_()
        y = getattr(rwkv_jit, op)(w, mine)
        few.append([x[3:4] if len(x) > 1 else x for x in (y, *torch.autograd.grad(y, mine, dy[rows]))])
    assert all(torch.equal(x, other) for x, other in zip(*few, strict=True))
