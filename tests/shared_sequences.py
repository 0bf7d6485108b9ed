"""What every process of a group checks of a sequence that they share: its part is that of the whole."""

import functools

import torch
import torch.distributed as dist

import rwkv_jit
from rwkv_jit import parallel
from rwkv_jit.schedules.table import OPS

NAMES = ("wkv7", "wkv6", "wkv5", "gla", "linear_attention")
HEADS = 2
# The bounds of packed texts, and how long parts are: texts that pass a part, begin or end with one, and empty ones.
LAYOUTS = {
    2: [(None, [10, 14]), ([0, 3, 3, 14, 24], [10, 14]), ([0, 24], [8, 16]), ([0, 12, 12, 20, 24, 24], [12, 12])],
    4: [
        (None, [3, 9, 5, 7]), (None, [3, 9, 12, 0]), ([0, 3, 3, 14, 24], [3, 9, 12, 0]), ([0, 24], [3, 0, 9, 12]),
        ([0, 12, 12, 20, 24, 24], None), ([0, 2, 23, 24], [6, 6, 6, 6]), ([0, 12, 24], None),
    ],
}  # fmt: skip


def make_inputs(name, batch, tokens, sizes=(4, 6), dtype=torch.float64):
    letters = {"B": batch, "T": tokens, "H": HEADS, "K": sizes[0], "V": sizes[1]}
    made = [torch.randn(*(letters[dim] for dim in dims)) * 0.5 for dims in OPS[name].inputs.values()]
    if name == "gla":
        made[3] = torch.nn.functional.logsigmoid(made[3])
    if name == "wkv7":
        made[4] = torch.nn.functional.normalize(made[4], dim=-1)
        made[5] = -made[4] * torch.rand_like(made[5])
    return [x.to(dtype) for x in made]


def texts_of(bounds, begin, end, is_last):
    """Which texts a part has tokens of; an empty one belongs to the part that begins there, or to the last."""
    found = []
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        is_own = begin <= first < end or (is_last and first == end)
        if max(first, begin) < min(last, end) or (first == last and is_own):
            found.append(i)
    return found


def check(rank, size, name, bounds, lengths, dtype=torch.float64, sizes=(4, 6), gate=1e-9, scale=24):
    """Check y, the states and all gradients of this process's part against the whole, which every process computes."""
    torch.manual_seed(1)
    op, unit = OPS[name], scale // 24
    bounds = bounds and [place * unit for place in bounds]
    lengths = [24 * unit // size] * size if lengths is None else [length * unit for length in lengths]
    batch = 2 if bounds is None else 1
    inputs = make_inputs(name, batch, 24 * unit, sizes, dtype)
    count = batch if bounds is None else len(bounds) - 1
    order = (1, 0) if op.state_layout == "vk" else (0, 1)
    wide = torch.promote_types(dtype, torch.float32)
    initial = torch.randn(count, HEADS, *(sizes[i] for i in order)).to(wide)
    leaves = [x.clone().requires_grad_() for x in (*inputs, initial)]
    packing = None if bounds is None else torch.tensor(bounds)
    function = getattr(rwkv_jit, name)
    y, final = function(*leaves[:-1], leaves[-1], True, cu_seqlens=packing)
    dy, grad_final = torch.randn_like(y), torch.randn_like(final)
    outputs, weights = [y, final], [dy, grad_final]
    behind = torch.randn(size, *final.shape).to(final)  # gradients of states behind parts, where sequences go on
    for place in range(size - 1) if bounds is None else ():
        cut = sum(lengths[: place + 1])
        before = [x[:, :cut] if "T" in dims else x for dims, x in zip(op.inputs.values(), leaves, strict=False)]
        outputs.append(function(*before, leaves[-1], True)[1])
        weights.append(behind[place])
    whole = torch.autograd.grad(outputs, leaves, weights)

    begin = sum(lengths[:rank])
    end, is_last = begin + lengths[rank], rank == size - 1
    shard = parallel.Shard() if bounds is None else parallel.Shard(None, packing, lengths)
    texts = list(range(count)) if bounds is None else texts_of(bounds, begin, end, is_last)
    own = [x[:, begin:end] if "T" in dims else x for dims, x in zip(op.inputs.values(), inputs, strict=True)]
    own = [x.clone().requires_grad_() for x in (*own, initial[texts] if texts else initial[:1])]
    part, states = getattr(parallel, name)(*own[:-1], shard, own[-1], output_final_state=True)
    expect = functools.partial(expect_close, name, bounds, lengths, rank, gate=gate)
    expect("y", part, y[:, begin:end])
    grad_states = torch.zeros_like(states)
    for place, text in enumerate(texts):
        if not shard.is_to_be_continued or place + 1 < len(texts) and bounds is not None:
            expect("state", states[place], final[text])
            grad_states[place] = grad_final[text]
        elif bounds is None:
            expect("state", states[place], outputs[2 + rank][text])
            grad_states[place] = behind[rank, text]
    grads = torch.autograd.grad((part, states), own, (dy[:, begin:end], grad_states), allow_unused=True)
    for each, dims, grad, want in zip(op.inputs, op.inputs.values(), grads, whole, strict=False):
        if "T" not in dims:
            grad = grad.to(wide)
            dist.all_reduce(grad)
        expect(f"d{each}", grad, want[:, begin:end] if "T" in dims else want)
    for place, text in enumerate(texts):
        if not shard.is_continued or place and bounds is not None:
            expect("grad_initial_state", grads[-1][place], whole[-1][text])


def expect_close(name, bounds, lengths, rank, what, x, want, gate):
    assert x.shape == want.shape, (name, bounds, lengths, rank, what, x.shape, want.shape)
    x, want = x.detach().double(), want.detach().double()
    assert torch.isfinite(x).all(), (name, bounds, lengths, rank, what)
    error = float((x - want).norm() / want.norm().clamp_min(1e-300)) if x.numel() else 0.0
    assert error <= gate, (name, bounds, lengths, rank, what, error)


def check_shift(rank, size, bounds, lengths, dtype=torch.float64):
    """Check token shift: a part's first token is mixed with the last one before it."""
    torch.manual_seed(2)
    lengths = [24 // size] * size if lengths is None else lengths
    batch, width = (2 if bounds is None else 1), 5
    x, mixes = torch.randn(batch, 24, width).to(dtype), torch.rand(3, width).to(dtype)
    leaves = [each.clone().requires_grad_() for each in (x, mixes)]
    packing = None if bounds is None else torch.tensor(bounds)
    whole = torch.stack(rwkv_jit.token_shift(*leaves, cu_seqlens=packing))
    weights = torch.randn_like(whole)
    want = torch.autograd.grad(whole, leaves, weights)
    begin = sum(lengths[:rank])
    end = begin + lengths[rank]
    shard = parallel.Shard() if bounds is None else parallel.Shard(None, packing, lengths)
    own = [x[:, begin:end].clone().requires_grad_(), mixes.clone().requires_grad_()]
    part = torch.stack(parallel.token_shift(*own, shard=shard))
    grads = [*torch.autograd.grad(part, own, weights[:, :, begin:end])]
    dist.all_reduce(grads[1])
    gate = 1e-9 if dtype == torch.float64 else 5e-3
    expect_close("token_shift", bounds, lengths, rank, "mixed", part, whole[:, :, begin:end], gate)
    expect_close("token_shift", bounds, lengths, rank, "dx", grads[0], want[0][:, begin:end], gate)
    expect_close("token_shift", bounds, lengths, rank, "dmixes", grads[1], want[1], gate)


def check_model(rank, size, name, bounds, lengths):
    """Check the loss of a whole model and all gradients of its parameters, with states before the first tokens too."""
    torch.manual_seed(3)
    lengths = [24 // size] * size if lengths is None else lengths
    model = getattr(rwkv_jit.nn, name)(11, 16, 2, 8, dtype=torch.float64)
    for x in model.parameters():  # of which some begin as zeros
        x.data.add_(torch.randn_like(x) / 8)
    batch = 2 if bounds is None else 1
    count = batch if bounds is None else len(bounds) - 1
    tokens, targets = torch.randint(11, (2, batch, 24))
    packing = None if bounds is None else torch.tensor(bounds)
    _, first = model(torch.randint(11, (count, 3)), return_state=True)
    first = [type(each)(*(x.detach() for x in each)) for each in first]
    whole = model.loss(tokens, targets, state=first, cu_seqlens=packing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    want = torch.autograd.grad(whole, parameters, allow_unused=True)
    begin = sum(lengths[:rank])
    end, is_last = begin + lengths[rank], rank == size - 1
    shard = parallel.Shard() if bounds is None else parallel.Shard(None, packing, lengths)
    texts = list(range(count)) if bounds is None else texts_of(bounds, begin, end, is_last)
    own = [type(each)(*(x[texts] for x in each)) for each in first]
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        loss = model.loss(tokens[:, begin:end], targets[:, begin:end], state=own, shard=shard)
        share = loss * (end - begin) / 24
        grads = torch.autograd.grad(share, parameters, allow_unused=True)
        share = share.detach()
        dist.all_reduce(share)
        expect_close(name, bounds, lengths, rank, "loss", share, whole, 1e-9)
        for each, grad, wanted in zip(names, grads, want, strict=True):
            grad = torch.zeros_like(wanted) if grad is None else grad.contiguous()
            dist.all_reduce(grad)
            expect_close(name, bounds, lengths, rank, each, grad, wanted, 1e-8)
