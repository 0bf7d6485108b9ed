"""The modules of RWKV-7 on the GPU in 16 bits, against the same model in float64 on the CPU."""

import comparing
import nn_cases
import plain_layer
import pytest
import torch

from rwkv_jit.nn import RWKV7, RWKV7State

pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record
MODELS = {
    "64": {"vocabulary": 500, "width": 256, "head_size": 64, "hidden": 512, "ranks": {}},
    "48": {"vocabulary": 333, "width": 144, "head_size": 48, "hidden": 200, "ranks": {"w": 24, "v": 17}},
}
SIZES = pytest.mark.parametrize("sizes", MODELS)
B, T = 3, 70
# Three layers lose so much in bfloat16; gradients of mixes and low-rank matrices are sums of both signs. That nothing
# else is lost is seen in float32. In 16 bits, gradients are compared of texts that go on from a state: without one,
# the first token's y is v times r.k, and where that is near 0 the norm behind it makes any rounding large.
OF_LOGITS, OF_GRADIENTS = 2.5e-2, {torch.bfloat16: 0.1, torch.float32: 2e-3}


def pair(sizes, dtype=torch.bfloat16):
    """A model on the GPU, and the same in float64 on the CPU."""
    seed = int(torch.randint(2**31, ()))
    model = nn_cases.make(dtype, seed, **MODELS[sizes])
    exact = nn_cases.make(torch.float64, seed, **MODELS[sizes])
    exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return model.cuda(), exact


def make_tokens(model, *shape):
    return nn_cases.make_tokens(model, *shape, seed=int(torch.randint(2**31, ())))


def make_states(model, texts):
    """A state of every layer in float64, and the same on the GPU in float32; all want gradients."""
    state = nn_cases.make_state(model, texts, seed=int(torch.randint(2**31, ())))
    return state, [RWKV7State(*(x.detach().float().cuda().requires_grad_() for x in each)) for each in state]


def check(found, want, limit=OF_LOGITS):
    for x, y in zip(found, want, strict=True):
        assert comparing.relative(x.cpu(), y) < limit


def check_gradients(model, found, exact, want):
    grads = torch.autograd.grad(nn_cases.weighted(found), [*model.parameters()])
    exact_grads = torch.autograd.grad(nn_cases.weighted(want), [*exact.parameters()])
    for (name, parameter), x, y in zip(model.named_parameters(), grads, exact_grads, strict=True):
        assert x.dtype == parameter.dtype
        assert comparing.relative(x.cpu(), y) < OF_GRADIENTS[found[0].dtype], name
    return grads


@SIZES
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_values_and_gradients(op, sizes, how):
    model, exact = pair(sizes, torch.bfloat16 if how == "bfloat16" else torch.float32)
    tokens = make_tokens(exact, B, T)
    for state, on_gpu in ((None, None), make_states(exact, B)):
        with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
            found = nn_cases.flat(*model(tokens.cuda(), on_gpu, return_state=True))
        want = nn_cases.flat(*exact(tokens, state, return_state=True))
        assert found[0].dtype == torch.bfloat16
        check(found, want)
        if state is not None:
            check_gradients(model, found[:1], exact, want[:1])


@SIZES
def test_float32(op, sizes):
    model, exact = pair(sizes, torch.float32)
    tokens = make_tokens(exact, B, T)
    found = nn_cases.flat(*model(tokens.cuda(), return_state=True))
    want = nn_cases.flat(*exact(tokens, return_state=True))
    check(found, want, limit=1e-4)
    check_gradients(model, found[:1], exact, want[:1])


@SIZES
def test_parts_and_packed_texts(op, sizes):
    model, exact = pair(sizes)
    tokens = make_tokens(exact, 1, T)
    bounds = torch.tensor([0, 0, 31, 31, T])
    for cu_seqlens, texts in ((None, 1), (bounds, 4)):
        state, on_gpu = make_states(exact, texts)
        found = nn_cases.flat(
            *model(tokens.cuda(), on_gpu, None if cu_seqlens is None else cu_seqlens.cuda(), return_state=True)
        )
        want = nn_cases.flat(*exact(tokens, state, cu_seqlens, return_state=True))
        check(found, want)
        check_gradients(model, found[:1], exact, want[:1])
    state, on_gpu = make_states(exact, 1)
    before, middle = model(tokens[:, :33].cuda(), on_gpu, return_state=True)
    behind, after = model(tokens[:, 33:].cuda(), middle, return_state=True)
    parts = nn_cases.flat(torch.cat([before, behind], 1), after)
    want = nn_cases.flat(*exact(tokens, state, return_state=True))
    check(parts, want)
    check_gradients(model, parts[:1], exact, want[:1])


@SIZES
def test_steps(op, sizes):
    model, exact = pair(sizes)
    tokens, (state, on_gpu) = make_tokens(exact, B, 20), make_states(exact, B)
    pool, slots = model.new_pool(8, reserved=1), torch.tensor([5, 2, 7], device="cuda")
    for layer, own in enumerate(on_gpu):
        for name in own._fields:
            pool[name][layer, slots] = getattr(own, name).detach().to(pool[name].dtype)
    want, state = exact(tokens, state, return_state=True)
    found = torch.stack([model.step(token, pool, slots) for token in tokens.T.cuda()], 1)
    check([found], [want])
    for layer, own in enumerate(state):
        check([pool[name][layer, slots] for name in own._fields], own)
    assert not pool.wkv[:, [0, 1, 3, 4, 6]].any()


def test_steps_of_new_sequences_in_float32(op):
    """Slots of a new pool are zeros, and nothing is rounded to 16 bits."""
    model, exact = pair("64", torch.float32)
    tokens = make_tokens(exact, B, 20)
    pool, slots = model.new_pool(8, reserved=1), torch.tensor([5, 2, 7], device="cuda")
    want, state = exact(tokens, return_state=True)
    found = torch.stack([model.step(token, pool, slots) for token in tokens.T.cuda()], 1)
    check([found], [want], 1e-4)
    for layer, own in enumerate(state):
        check([pool[name][layer, slots] for name in own._fields], own, 1e-4)
    assert not pool.wkv[:, [0, 1, 3, 4, 6]].any()


def test_step_in_a_graph(op):
    model, _ = pair("64")
    several = make_tokens(model, 4, B).cuda()
    eager, pool = model.new_pool(B), model.new_pool(B)
    slots = torch.arange(B, dtype=torch.int32, device="cuda")
    token = several[0].clone()
    model.step(token, pool, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.step(token, pool, slots)
    for name in RWKV7State._fields:
        pool[name].zero_()
    for each in several:
        token.copy_(each)
        graph.replay()
        assert torch.equal(logits, model.step(each, eager, slots))


def test_prompts_at_slots_as_ints_wait_for_nothing(op):
    """Beside them tokens and bounds are on the GPU; a row of a reserved slot is padding."""
    model, _ = pair("64")
    tokens, bounds = make_tokens(model, 1, 60).cuda(), torch.tensor([0, 20, 21, 60], device="cuda")
    pool, other = model.new_pool(8, reserved=1), model.new_pool(8, reserved=1)
    want = model.prefill(tokens, other, torch.tensor([5, 0, 7], device="cuda"), bounds)
    model.prefill(tokens, model.new_pool(8, reserved=1), [5, 0, 7], bounds)  # all is loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = model.prefill(tokens, pool, [5, 0, 7], bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[[0, 2]], want[[0, 2]])
    for name in RWKV7State._fields:
        assert torch.equal(pool[name], other[name])
        assert not pool[name][:, 0].any()


def test_generated_tokens_are_good_ones(op):
    """In 16 bits another token may win that is as good but for its rounding."""
    model, exact = pair("64")
    prompt = make_tokens(exact, B, 12)
    written = model.generate(prompt.cuda(), 16, temperature=0).cpu()
    with torch.no_grad():
        logits = exact(torch.cat([prompt, written], 1))[:, 11:-1]
    lost = logits.amax(-1) - logits.gather(-1, written.unsqueeze(-1)).squeeze(-1)
    assert float((lost / logits.std(-1)).max()) < 0.3
    drawn = [
        model.generate(prompt.cuda(), 16, top_p=0.9, generator=torch.Generator("cuda").manual_seed(1)) for _ in range(2)
    ]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("layer", [0, 1])
def test_compiled_block(op, layer):
    model, exact = pair("64")
    x, v_first = (torch.randn(B, T, 256).bfloat16() for _ in range(2))
    compiled = torch.compile(model.blocks[layer], fullgraph=True)
    state, on_gpu = (each[layer] for each in make_states(exact, B))
    found = nn_cases.flat(*_block(compiled, x.cuda(), v_first.cuda() if layer else None, on_gpu))
    want = nn_cases.flat(*_block(exact.blocks[layer], x.double(), v_first.double() if layer else None, state))
    check(found, want)
    check_gradients(model.blocks[layer], found[:1], exact.blocks[layer], want[:1])


def _block(block, x, v_first, state):
    y, _, state = block(x, v_first, state)
    return y, [state]


def test_checkpointing_changes_no_gradient(op):
    model, _ = pair("64")
    tokens = make_tokens(model, B, T + 1).cuda()

    def gradients():
        return torch.autograd.grad(model.loss(tokens[:, :-1], tokens[:, 1:]), [*model.parameters()])

    want = gradients()
    model.checkpointing = True
    for x, y in zip(gradients(), want, strict=True):
        assert comparing.relative(x, y) < 1e-2  # the embedding's gradient is added up in any order


def test_training_takes_no_more_memory_from_step_to_step(op):
    model = RWKV7(500, 256, 3, device="cuda")
    optimizer = torch.optim.AdamW(model.param_groups(lr=1e-3, weight_decay=0.001), betas=(0.9, 0.99), eps=1e-18)
    tokens = make_tokens(model, B, T + 1).cuda()
    held, losses = [], []
    for _ in range(12):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[2:])) == 1
    assert losses[-1] < losses[0] - 0.5


def test_decoding_takes_no_more_memory_from_step_to_step(op):
    model, _ = pair("64")
    pool, token = model.new_pool(B), make_tokens(model, B).cuda()
    held = []
    for _ in range(6):
        token = model.step(token, pool).argmax(-1)
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[2:])) == 1


# ---- steps and prompts over a pool -------------------------------------------------------------------------------


def model_of(layers, width, size, vocabulary, dtype):
    """A model with random parameters: with those that training begins with, layers would return zeros."""
    torch.manual_seed(0)
    model = RWKV7(vocabulary, width, layers, size, device="cuda")
    for name, x in model.state_dict().items():
        if x.dim() == 2:
            x.normal_(std=(x.shape[1] if name.endswith("weight") else x.shape[0]) ** -0.5)
        elif not name.endswith(("weight", "bias")):
            x.uniform_(-1, 1)
    return model.to(dtype)


def expected(model, tokens, slots, states):
    """The logits of a step of decode in float64, and the states of all layers afterwards, by slot."""
    weights = {name: x.squeeze() for name, x in model.state_dict().items()}
    ln0 = [weights[f"blocks.0.ln0.{name}"] for name in ("weight", "bias")]
    x, v_first = plain_layer.norm(weights["emb.weight"][tokens], *ln0, 1e-5), None
    for layer in range(len(model.blocks)):
        prefix = f"blocks.{layer}."
        p = {name.removeprefix(prefix): z for name, z in weights.items() if name.startswith(prefix)}
        kept = [states[name][layer] for name in ("time_shift", "channel_shift", "wkv")]
        x, v_first, *left = plain_layer.decode(p, x, *(z[slots] for z in kept), v_first)
        for z, new in zip(kept, left, strict=True):
            z[slots] = new
    x = plain_layer.norm(x, weights["ln_out.weight"], weights["ln_out.bias"], 1e-5)
    return x @ weights["head.weight"].double().T


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-4), ("bf16", 6e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize(("width", "size"), [(256, 64), (96, 24), (256, 128)])
def test_decode_of_a_model(op, dtype, limit, width, size):
    model, kept = model_of(2, width, size, 300, comparing.DTYPES[dtype]), ("wkv", "time_shift", "channel_shift")
    with torch.no_grad():  # with those of `model_of`, rounding the weights moves results by a tenth
        for name, x in model.named_parameters():
            if not name.endswith(("weight", "bias")) and x.squeeze().dim() == 1:
                x.mul_(0.25)
    pool, slots = model.new_pool(10, reserved=1), torch.tensor([7, 2, 0, 9, 4]).cuda()
    for name in kept:
        pool[name].normal_()
    begun = {name: pool[name].clone() for name in kept}
    there = torch.tensor([0, 1, 3, 4], device="cuda")
    for _ in range(6):  # the second one is captured
        tokens, states = torch.randint(300, (5,), device="cuda"), {name: pool[name].double() for name in kept}
        logits = model.step(tokens, pool, slots)
        want = expected(model, tokens[there], slots[there], states)
        assert comparing.relative(logits[there], want) < limit
        for name, x in states.items():
            assert comparing.relative(pool[name], x) < limit
    for name in kept:
        others = [slot for slot in range(10) if slot not in (7, 2, 9, 4)]
        assert torch.equal(pool[name][:, others], begun[name][:, others])


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-4), ("bf16", 6e-2)])
def test_prompts_of_a_model_are_its_decode(op, dtype, limit):
    model, slots = model_of(3, 256, 64, 300, comparing.DTYPES[dtype]), (3, 1, 4)
    texts = [torch.randint(300, (length,), device="cuda") for length in (5, 1, 9)]
    packed, stepped = model.new_pool(6, reserved=1), model.new_pool(6, reserved=1)
    logits = model.prefill(torch.cat(texts).unsqueeze(0), packed, slots, torch.tensor([0, 5, 6, 15], device="cuda"))
    for row, (slot, text) in enumerate(zip(slots, texts, strict=True)):
        for token in text:
            last = model.step(token.unsqueeze(0), stepped, [slot])
        assert comparing.relative(logits[row], last[0]) < limit
    for name in ("wkv", "time_shift", "channel_shift"):
        assert comparing.relative(packed[name], stepped[name]) < limit
