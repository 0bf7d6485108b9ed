"""What every process of a group checks of a sequence that they share: its part is that of the whole."""

import functools

import derived_cases
import torch
import torch.distributed as dist

import rwkv_jit
from rwkv_jit import parallel
from rwkv_jit.schedules.table import OPS

NAMES = ("wkv7", "wkv6", "wkv5", "gla", "linear_attention")
HEADS = 2
# Of the other ops, calls with all that they may have, and with nothing of it.
FAMILY = (
    ("kda", "raw bias sigmoid norm"), ("kda", ""), ("gated_delta_rule", "raw bias sigmoid norm"),
    ("delta_rule", "norm sigmoid"), ("gated_delta_rule2", "bounded bias norm"), ("simple_gla", "fixed"),
    ("simple_gla", ""), ("hgrn2", ""), ("ssd", "D z bias softplus"), ("ssd", "wide z limit"),
)  # fmt: skip
# The bounds of packed texts, and how long parts are: texts that pass a part, begin or end with one, and empty ones.
LAYOUTS = {
    2: [(None, [10, 14]), ([0, 3, 3, 14, 24], [10, 14]), ([0, 24], [8, 16]), ([0, 12, 12, 20, 24, 24], [12, 12])],
    3: [(None, [11, 1, 12]), ([0, 2, 23, 24], [7, 8, 9]), ([0, 24], [1, 21, 2])],
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


def make_case(name, how, batch, tokens, sizes, dtype, bounds):
    wide = torch.promote_types(dtype, torch.float32)
    if name not in OPS:
        of = batch, tokens, HEADS // 2, HEADS, *sizes
        device = torch.get_default_device()
        return derived_cases.make(name, how, of, dtype, wide, wide, bounds=bounds, device=device)
    inputs = make_inputs(name, batch, tokens, sizes, dtype)
    count = batch if bounds is None else len(bounds) - 1
    state = torch.randn(count, HEADS, *(sizes["KV".index(letter)] for letter in OPS[name].state_layout.upper()))
    packing = None if bounds is None else torch.tensor(bounds)
    named = dict(zip(OPS[name].public_names, inputs, strict=True))
    return derived_cases.Case(name, named, {}, {}, state.to(wide), packing)


def leaves_of(case):
    return case.replaced({name: x.detach().clone().requires_grad_() for name, x in case.tensors.items()})


def texts_of(bounds, begin, end, is_last):
    """Which texts a part has tokens of; an empty one belongs to the part that begins there, or to the last."""
    found = []
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        is_own = begin <= first < end or (is_last and first == end)
        if max(first, begin) < min(last, end) or (first == last and is_own):
            found.append(i)
    return found


def check(rank, size, name, bounds, lengths, dtype=torch.float64, sizes=(4, 6), gate=1e-9, scale=24, how=""):
    """Check y, the states and all gradients of this process's part against the whole, which every process computes."""
    torch.manual_seed(1)
    unit = scale // 24
    bounds = bounds and [place * unit for place in bounds]
    lengths = [24 * unit // size] * size if lengths is None else [length * unit for length in lengths]
    batch = 2 if bounds is None else 1
    case = make_case(name, how, batch, 24 * unit, sizes, dtype, bounds)
    count, packing = len(case.state), case.cu_seqlens
    leaves = leaves_of(case)
    y, final = leaves.run()
    dy, grad_final = torch.randn_like(y), torch.randn_like(final)
    outputs, weights = [y, final], [dy, grad_final]
    behind = torch.randn(size, *final.shape).to(final)  # gradients of states behind parts, where sequences go on
    for place in range(size - 1) if bounds is None else ():
        outputs.append(leaves.part((slice(None), slice(0, sum(lengths[: place + 1])))).run()[1])
        weights.append(behind[place])
    whole = dict(zip(leaves.tensors, torch.autograd.grad(outputs, [*leaves.tensors.values()], weights), strict=True))

    begin = sum(lengths[:rank])
    end, is_last = begin + lengths[rank], rank == size - 1
    shard = parallel.Shard() if bounds is None else parallel.Shard(None, packing, lengths)
    texts = list(range(count)) if bounds is None else texts_of(bounds, begin, end, is_last)
    own = case.part((slice(None), slice(begin, end)))
    own = leaves_of(own._replace(state=case.state[texts] if texts else case.state[:1]))

    def of_part(*given, **more):
        *inputs, state, wants_final, _ = given
        return getattr(parallel, name)(*inputs, shard, state, output_final_state=wants_final, **more)

    part, states = own.run(of_part)
    expect = functools.partial(expect_close, f"{name} {how}", bounds, lengths, rank, gate=gate)
    expect("y", part, y[:, begin:end])
    grad_states = torch.zeros_like(states)
    for place, text in enumerate(texts):
        if not shard.is_to_be_continued or place + 1 < len(texts) and bounds is not None:
            expect("state", states[place], final[text])
            grad_states[place] = grad_final[text]
        elif bounds is None:
            expect("state", states[place], outputs[2 + rank][text])
            grad_states[place] = behind[rank, text]
    grads = dict(zip(own.tensors, torch.autograd.grad(
        (part, states), [*own.tensors.values()], (dy[:, begin:end], grad_states), allow_unused=True,
    ), strict=True))  # fmt: skip
    of_states = grads.pop("initial_state")
    for each, grad in grads.items():
        has_tokens = own.tensors[each].shape != case.tensors[each].shape or lengths[rank] == 24 * unit
        if has_tokens:
            expect(f"d{each}", grad, whole[each][:, begin:end])
            continue
        grad = grad.to(torch.promote_types(dtype, torch.float32))
        dist.all_reduce(grad)
        expect(f"d{each}", grad, whole[each])
    for place, text in enumerate(texts):
        if not shard.is_continued or place and bounds is not None:
            expect("grad_initial_state", of_states[place], whole["initial_state"][text])


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


def check_convolution(rank, size, bounds, lengths, width, activation, dtype=torch.float64, gate=1e-9):
    """Check the convolution: of parts with fewer tokens than it sees, and with states before and behind."""
    torch.manual_seed(4)
    lengths = [24 // size] * size if lengths is None else lengths
    batch, channels = (2 if bounds is None else 1), 5
    count = batch if bounds is None else len(bounds) - 1
    given = [torch.randn(shape).to(dtype) for shape in ((batch, 24, channels), (channels, width), (channels,))]
    given.append(torch.randn(count, channels, width - 1).to(dtype))
    leaves = [each.clone().requires_grad_() for each in given]
    packing = None if bounds is None else torch.tensor(bounds)
    options = {"activation": activation, "output_final_state": True}
    y, final = rwkv_jit.causal_conv1d(*leaves[:3], initial_state=leaves[3], cu_seqlens=packing, **options)
    begin = sum(lengths[:rank])
    end = begin + lengths[rank]
    shard = parallel.Shard() if bounds is None else parallel.Shard(None, packing, lengths)
    texts = list(range(count)) if bounds is None else texts_of(bounds, begin, end, rank == size - 1)
    own = [given[0][:, begin:end], *given[1:3], given[3][texts] if texts else given[3][:1]]
    own = [x.clone().requires_grad_() for x in own]
    part, states = parallel.causal_conv1d(*own[:3], initial_state=own[3], shard=shard, **options)
    expect = functools.partial(expect_close, f"convolution {width} {activation}", bounds, lengths, rank, gate=gate)
    expect("y", part, y[:, begin:end])
    dy, grad_final = torch.randn_like(y), torch.randn_like(final)
    grad_states = torch.zeros_like(states)
    for place, text in enumerate(texts):
        if not shard.is_to_be_continued or bounds is not None and place + 1 < len(texts):
            expect("state", states[place], final[text])
            grad_states[place] = grad_final[text]
    whole = torch.autograd.grad([y, final], leaves, [dy, grad_final])
    grads = [*torch.autograd.grad([part, states], own, [dy[:, begin:end], grad_states], allow_unused=True)]
    expect("dx", grads[0], whole[0][:, begin:end])
    for each, grad, want in zip(("dweight", "dbias"), grads[1:3], whole[1:3], strict=True):
        dist.all_reduce(grad)
        expect(each, grad, want)
    for place, text in enumerate(texts):
        if not shard.is_continued or place and bounds is not None:
            expect("grad_initial_state", grads[3][place], whole[3][text])


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
