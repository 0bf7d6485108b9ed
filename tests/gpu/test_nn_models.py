"""The whole models of RWKV-5 and 6 on the GPU against float64 on the CPU; and what all of them compile ahead."""

import os
import subprocess
import sys

import comparing
import nn_cases
import pytest
import torch

MODELS = pytest.mark.parametrize("name", ["RWKV5", "RWKV6"])
SIZES = {
    "64": {"vocabulary": 500, "width": 256, "head_size": 64, "hidden": 512, "layers": 2},
    "48": {"vocabulary": 333, "width": 144, "head_size": 48, "hidden": 200, "layers": 2},
}
EVERY_SIZE = pytest.mark.parametrize("sizes", SIZES)
B, T = 3, 70
BOUNDS = (0, 0, 31, 31, T)
# Of what comes out, and of gradients: each in float32, and all together in 16 bits, where those of mixes and low-rank
# matrices are sums of roundings of both signs. Decays of RWKV-6 are made of matrices too. Three to four times the
# largest error of plain torch on the CPU.
OF_FLOAT32 = (1e-4, 1e-3)
LIMITS = {
    "RWKV5": {torch.bfloat16: (0.035, 0.06), torch.float16: (4.5e-3, 7e-3), torch.float32: OF_FLOAT32},
    "RWKV6": {torch.bfloat16: (0.07, 0.12), torch.float16: (9e-3, 0.015), torch.float32: OF_FLOAT32},
}
# Models and states are like trained ones: decays are that much slower than those of `nn_cases`, and states that much
# larger, as those of many tokens are. Otherwise little may be left of what a head reads, from few tokens or before the
# first ones; the norm behind divides by it, and any rounding harms the gradients of all.
SLOWER, LARGER = 3.0, 16.0
EVERY_DTYPE = pytest.mark.parametrize("dtype", LIMITS["RWKV5"], ids=str)
pytestmark = pytest.mark.parametrize("op", ["nn"])  # the section of the record


def pair(name, sizes, dtype):
    """A model on the GPU, and the same in float64 on the CPU."""
    seed = int(torch.randint(2**31, ()))
    model, exact = (nn_cases.make(x, seed, name, **SIZES[sizes]) for x in (dtype, torch.float64))
    with torch.no_grad():
        for block in model.blocks:
            block.att.time_decay.sub_(SLOWER)
    exact.load_state_dict({own: x.double() for own, x in model.state_dict().items()})
    return model.cuda(), exact


def make_tokens(model, *shape):
    return nn_cases.make_tokens(model, *shape, seed=int(torch.randint(2**31, ())))


def begun(exact, texts, dtype):
    """A state on the GPU and on the CPU, with the same numbers: the norm of a first token alone may have any error."""
    on_gpu, on_cpu = [], []
    for each in nn_cases.make_state(exact, texts, seed=int(torch.randint(2**31, ()))):
        each = each._replace(wkv=LARGER * each.wkv)
        held = [x.detach().to(torch.float32 if x is each.wkv else dtype) for x in each]
        on_gpu.append(type(each)(*(x.cuda().requires_grad_() for x in held)))
        on_cpu.append(type(each)(*(x.double().requires_grad_() for x in held)))
    return on_gpu, on_cpu


def gradients(model, results, state):
    asked = {**dict(model.named_parameters()), **{f"state{i}": x for i, x in enumerate(x for s in state for x in s)}}
    grads = torch.autograd.grad(nn_cases.weighted(results[:1]), list(asked.values()))
    return dict(zip(asked, grads, strict=True))


def check(model, exact, tokens, limits, bounds=None, dtype=None):
    texts = len(tokens) if bounds is None else len(bounds) - 1
    state, exact_state = begun(exact, texts, dtype or model.emb.weight.dtype)
    found = nn_cases.flat(*model(tokens.cuda(), state, None if bounds is None else bounds.cuda(), return_state=True))
    want = nn_cases.flat(*exact(tokens, exact_state, bounds, return_state=True))
    of_results, of_gradients = limits
    for x, y in zip(found, want, strict=True):
        assert comparing.relative(x.cpu(), y) < of_results
    grads, exact_grads = gradients(model, found, state), gradients(exact, want, exact_state)
    both = {own: (x.cpu(), exact_grads[own]) for own, x in grads.items()}
    if limits != OF_FLOAT32:
        both = {"all": [torch.cat([x.double().flatten() for x in each]) for each in zip(*both.values(), strict=True)]}
    for own, (x, y) in both.items():
        assert comparing.relative(x, y) < of_gradients, own
    return found


@MODELS
@EVERY_SIZE
@EVERY_DTYPE
def test_values_and_gradients(op, name, sizes, dtype):
    model, exact = pair(name, sizes, dtype)
    assert check(model, exact, make_tokens(exact, B, T), LIMITS[name][dtype])[0].dtype == dtype


@MODELS
@EVERY_SIZE
@EVERY_DTYPE
def test_packed_texts(op, name, sizes, dtype):
    model, exact = pair(name, sizes, dtype)
    check(model, exact, make_tokens(exact, 1, T), LIMITS[name][dtype], torch.tensor(BOUNDS))


@MODELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(op, name, dtype):
    model, exact = pair(name, "64", torch.float32)
    with torch.autocast("cuda", dtype):
        found = check(model, exact, make_tokens(exact, B, T), LIMITS[name][dtype])
    assert found[0].dtype == dtype


@MODELS
@EVERY_SIZE
@EVERY_DTYPE
def test_steps(op, name, sizes, dtype):
    model, exact = pair(name, sizes, dtype)
    tokens = make_tokens(exact, B, 20)
    state, exact_state = begun(exact, B, dtype)
    want, after = exact(tokens, exact_state, return_state=True)
    pool = model.new_pool(8, reserved=1)
    slots = torch.tensor([5, 2, 7], device="cuda")
    for layer, own in enumerate(state):
        for part, x in own._asdict().items():
            pool[part][layer, slots] = x.detach().to(pool[part])
    found = torch.stack([model.step(token, pool, slots) for token in tokens.T.cuda()], 1)
    assert comparing.relative(found.cpu(), want) < LIMITS[name][dtype][0]
    for layer, own in enumerate(after):
        for part, x in own._asdict().items():
            assert comparing.relative(pool[part][layer, slots].cpu(), x) < LIMITS[name][dtype][0]
    assert not pool.wkv[:, [0, 1, 3, 4, 6]].any()


@MODELS
def test_step_in_a_graph(op, name):
    model, _ = pair(name, "64", torch.bfloat16)
    several = make_tokens(model, 4, B).cuda()
    eager, pool = model.new_pool(B), model.new_pool(B)
    slots, token = torch.arange(B, dtype=torch.int32, device="cuda"), several[0].clone()
    model.step(token, pool, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.step(token, pool, slots)
    for states in (pool.wkv, pool.time_shift, pool.channel_shift):
        states.zero_()
    for each in several:
        token.copy_(each)
        graph.replay()
        assert torch.equal(logits, model.step(each, eager, slots))


@MODELS
def test_training_and_decoding_take_no_more_memory_from_step_to_step(op, name):
    model, _ = pair(name, "64", torch.float32)
    optimizer = torch.optim.AdamW(model.param_groups(lr=1e-3, weight_decay=0.001), betas=(0.9, 0.99), eps=1e-18)
    tokens, held, losses = make_tokens(model, B, T + 1).cuda(), [], []
    pool = model.new_pool(B)
    for _ in range(12):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss
        model.step(tokens[:, 0], pool)
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[2:])) == 1
    assert losses[-1] < losses[0]


TRAINING = """
import os, torch, rwkv_jit
rwkv_jit.warm("{op}", 64, torch.bfloat16, {decay}w_dtype=torch.float32, widths=256)
os.environ["RWKVJIT_ASSERT_CACHED"] = "1"
model = rwkv_jit.nn.{name}(5000, 256, 2, device="cuda")
optimizer = torch.optim.AdamW(model.param_groups(lr=1e-3, weight_decay=0.001))
state = None
for tokens, bounds in ((300, None), (300, None), (40, None), (300, [0, 7, 300]), (300, [0, 7, 300])):
    texts = torch.randint(5000, (1, tokens + 1), device="cuda")
    bounds = None if bounds is None else torch.tensor(bounds, device="cuda")
    state = None if state is None or len(state[0].wkv) != (1 if bounds is None else 2) else state
    with torch.autocast("cuda", torch.bfloat16):
        loss, state = model.loss(texts[:, :-1], texts[:, 1:], state=state, cu_seqlens=bounds, return_state=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [each.detach() for each in state]
torch.cuda.synchronize()
print("trained")
"""


@pytest.mark.parametrize("name", ["RWKV5", "RWKV6", "RWKV7"])
def test_no_kernel_of_training_is_compiled_after_warm(op, name, tmp_path):
    decay = 'decay="sigmoid", ' if name == "RWKV7" else ""
    program = TRAINING.format(op=name.lower().replace("rwkv", "wkv"), name=name, decay=decay)
    env = {**os.environ, "RWKVJIT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=500)
    assert done.stdout.endswith("trained\n"), done.stderr
