"""Kimi Delta Attention in a kernel of its own, against float64; and which calls that is for."""

import comparing
import derived_cases
import pytest
import torch
from derived_cases import differentiate, error_of, exactly, limit_of

import rwkv_jit
from rwkv_jit.schedules import channel_decay

pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
# Keys that are not normed make errors grow.
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
# B, T, key heads, value heads; heads have 128 channels and values.
SIZES = [(2, 200, 2, 4), (1, 64, 3, 3), (3, 65, 1, 2), (1, 1000, 4, 4), (70, 33, 1, 2)]
DECAYS = [(-1.0, -0.01), (-0.05, 0.0), (-0.001, 0.0), (-80.0, 0.0), (-2000.0, -1000.0)]


@pytest.fixture(autouse=True)
def any_heads(monkeypatch):
    """Few heads go there too, on the architecture that has these products."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    monkeypatch.setattr(channel_decay, "LEAST_BLOCKS", 0)


def own(launched, kind="forward"):
    """How often a kernel of this op was launched."""
    return sum(seen.name == f"channel_decay_group_{kind}" for seen in launched)


def own_backwards(launched):
    """How often gradients were made by kernels of this op, which launches two."""
    assert own(launched, "backward") == own(launched, "key_gradients")
    return own(launched, "backward")


def make(how, sizes, dtype=torch.bfloat16, wide=torch.float32, state=torch.float32, **options):
    return derived_cases.make("kda", how, (*sizes, 128, 128), dtype, wide, state, device="cuda", **options)


def check(case, **options):
    """Compare a call without gradients with the reference."""
    with torch.no_grad():
        y, final = case.run(**options)
        want, want_final = case.reference().run(rwkv_jit.kda_ref)
    limit = LIMITS[y.dtype]
    assert (y.dtype, final.dtype) == (case.inputs["q"].dtype, case.state.dtype)
    assert comparing.relative(y, want) < limit
    rounding = {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(case.state.dtype, 0.0)
    assert comparing.relative(final, want_final) < limit + rounding


@pytest.mark.parametrize("how", derived_cases.WAYS["kda"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(op, how, sizes, launched, guarded_memory):
    for dtype in LIMITS:
        for wide in (torch.float32, dtype):
            check(make(how, sizes, dtype, wide))
    assert own(launched) == 2 * len(LIMITS)


@pytest.mark.parametrize("decays", DECAYS, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_any_decay(op, decays, dtype, launched):
    case, (low, high) = make("raw norm", (2, 300, 2, 4), dtype), decays
    check(derived_cases.with_decays(case, low + (high - low) * torch.rand_like(case.inputs["g"])))
    assert own(launched) == 1


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_decays_of_all_kinds_beside_each_other(op, dtype, launched):
    case = make("raw norm", (2, 300, 2, 4), dtype)
    check(derived_cases.with_decays(case, torch.where(torch.rand_like(case.inputs["g"]) < 0.5, -2000.0, 0.0)))
    assert own(launched) == 1


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_chunks_in_a_frame_and_by_halves_behind_each_other(op, dtype, launched):
    """Of the log-decays of each 64 tokens half are none, and others down to one number."""
    case = make("raw norm", (2, 700, 2, 4), dtype)
    shape = case.inputs["g"].shape
    largest = torch.tensor([-2000.0, -0.1, -4.0, -2000.0, -2000.0, -0.01], device="cuda")
    largest = largest[torch.arange(shape[1], device="cuda") // 64 % len(largest)].view(-1, 1, 1)
    draws, is_kept = torch.rand(2, *shape, device="cuda")
    check(derived_cases.with_decays(case, largest * draws * (is_kept < 0.5)))
    assert own(launched) == 1


def test_many_tokens_that_hardly_forget(op, launched):
    """What a token forgets is less than a float has beside 1."""
    case = make("raw norm", (1, 4096, 1, 1), torch.float16)
    check(derived_cases.with_decays(case, torch.full_like(case.inputs["g"], -2e-7)))
    assert own(launched) == 1


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_sequences_and_states(op, layout, state, launched, guarded_memory):
    bounds = [0, 0, 1, 64, 129, 500]
    check(make("raw bias sigmoid norm", (1, 500, 2, 4), bounds=bounds, layout=layout, state=state))
    assert own(launched) == 1


def test_the_same_again_bit_for_bit(op, launched):
    case = make("bounded bias norm", (2, 777, 4, 8))
    with torch.no_grad():
        first, again = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert own(launched) == 2


def test_strided_rows(op, launched):
    """q, k and v as parts of one tensor."""
    case = make("raw norm", (2, 130, 4, 4))
    rows = torch.stack([case.inputs[name] for name in "qkv"], 2)
    check(case._replace(inputs={**case.inputs, **dict(zip("qkv", rows.unbind(2), strict=True))}))
    assert own(launched) == 1


def test_other_calls_go_elsewhere(op, launched, monkeypatch):
    sizes = (2, 130, 2, 4)
    usual = make("raw norm", sizes)
    with torch.no_grad():
        derived_cases.make("kda", "raw norm", (*sizes, 64, 64), torch.bfloat16, device="cuda").run()
        usual.run(chunk_len=32)
        monkeypatch.setattr(channel_decay, "LEAST_BLOCKS", 1)
        usual.run()
    differentiate(usual)  # of fewer key heads than value heads
    assert own(launched) == own_backwards(launched) == 0


# ---- gradients -----------------------------------------------------------------------------------------------------

KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
TRAINED_SIZES = [(2, 200, 4), (1, 64, 3), (3, 65, 2), (1, 1000, 4), (70, 33, 2)]  # B, T, heads
BOUNDS = [0, 0, 1, 64, 129, 129, 500, 500]


def heads_of(sizes):
    """Sizes with as many key heads as value heads."""
    return *sizes, sizes[-1]


def check_gradients(case, of=(0, 1), **options):
    """Compare results and gradients of all tensors of a call with the reference; return the gradients of both."""
    kind = KINDS[case.inputs["q"].dtype]
    results, grads, weights = differentiate(case, None, None, of, **options)
    want, want_grads = exactly(case, weights, of)
    for found, x in zip(results, want, strict=True):
        assert comparing.relative(found, x) < derived_cases.LIMITS[kind]
    for name, grad in grads.items():
        assert (grad.dtype, grad.shape) == (case.tensors[name].dtype, case.tensors[name].shape)
        assert error_of(case, name, grad, want_grads[name], of) < limit_of(case, name, kind), name
    return grads, want_grads


@pytest.mark.parametrize("how", derived_cases.WAYS["kda"])
@pytest.mark.parametrize("sizes", TRAINED_SIZES, ids=str)
def test_gradients(op, how, sizes, launched, guarded_memory):
    for dtype in KINDS:
        check_gradients(make(how, heads_of(sizes), dtype))
    assert own(launched) == own_backwards(launched) == len(KINDS)


@pytest.mark.parametrize("how", derived_cases.WAYS["kda"])
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_gradients_with_gates_of_16_bits(op, how, dtype, launched, guarded_memory):
    check_gradients(make(how, (2, 200, 3, 3), dtype, dtype))
    assert own(launched) == own_backwards(launched) == 1


@pytest.mark.parametrize("decays", [(-1.0, -0.01), (-0.05, 0.0), (-20.0, 0.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_gradients_with_decays_of_any_strength(op, decays, dtype, launched, guarded_memory):
    case = make("norm", (2, 300, 2, 2), dtype, decays=decays)
    check_gradients(case)
    assert own(launched) == own_backwards(launched) == 1


@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.get)
def test_gradients_of_chunks_in_a_frame_and_out_of_it(op, dtype, launched, guarded_memory):
    case = make("norm", (2, 700, 2, 2), dtype)
    shape = case.inputs["g"].shape
    largest = torch.tensor([-2000.0, -0.1, -4.0, -2000.0, -2000.0, -0.01], device="cuda")
    largest = largest[torch.arange(shape[1], device="cuda") // 64 % len(largest)].view(-1, 1, 1)
    draws, is_kept = torch.rand(2, *shape, device="cuda")
    case.inputs["g"].copy_(largest * draws * (is_kept < 0.5))
    check_gradients(case)
    assert own(launched) == own_backwards(launched) == 1


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_packed_sequences_and_states(op, layout, state, launched, guarded_memory):
    check_gradients(make("raw bias sigmoid norm", (1, 500, 4, 4), bounds=BOUNDS, layout=layout, state=state))
    assert own(launched) == own_backwards(launched) == 1


@pytest.mark.parametrize("of", [(0,), (1,)], ids=["y", "state"])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["batch", "packed"])
def test_gradients_of_one_result(op, of, bounds, launched, guarded_memory):
    # The end of a sequence reads its initial state, and so do its first tokens.
    case = make("norm", (1, 500, 2, 2), decays=(-0.02, 0.0), bounds=bounds)
    check_gradients(case, of)
    assert own(launched) == own_backwards(launched) == 1


def test_gradients_without_a_state(op, launched, guarded_memory):
    check_gradients(make("raw norm", (2, 130, 2, 2), has_state=False))
    assert own(launched) == own_backwards(launched) == 1


def test_the_same_gradients_again_bit_for_bit(op, launched):
    case = make("bounded bias norm", (2, 777, 8, 8))
    _, first, weights = differentiate(case)
    _, again, _ = differentiate(case, None, weights)
    assert all(torch.equal(grad, again[name]) for name, grad in first.items())
    assert own(launched) == own_backwards(launched) == 2
