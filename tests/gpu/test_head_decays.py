"""Ops with one decay for a head without gradients, in their own kernel, against float64; and which calls it is for."""

import comparing
import derived_cases
import pytest
import torch

import rwkv_jit
from rwkv_jit.derived import head_decays

pytestmark = pytest.mark.parametrize("op", ["layers"])  # the section of the record
KERNEL = "head_decay_forward"
# Keys that are not normed make errors grow.
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAMES = ("gated_delta_rule", "delta_rule", "simple_gla", "ssd")
CASES = pytest.mark.parametrize(("name", "how"), [each for each in derived_cases.ALL if each[0] in NAMES])
# B, T, key heads, value heads, K and V.
SIZES = [
    (2, 200, 2, 4, 128, 128), (1, 130, 1, 3, 40, 24), (2, 70, 2, 2, 64, 64), (3, 5, 1, 1, 16, 32),
    (1, 133, 2, 6, 128, 64), (2, 33, 1, 2, 33, 65), (2, 97, 2, 4, 17, 128), (1, 64, 4, 4, 100, 96),
    (70, 33, 1, 2, 128, 128),
]  # fmt: skip
DECAYS = [(-1.0, -0.01), (-0.001, 0.0), (-80.0, 0.0), (-2000.0, -1000.0)]


@pytest.fixture(autouse=True)
def any_heads(monkeypatch):
    """Few heads go there too."""
    monkeypatch.setattr(head_decays, "LEAST_BLOCKS", 0)


def own(launched):
    """How often the kernel was launched."""
    return sum(seen.name == KERNEL for seen in launched)


def check(case, **options):
    """Compare a call without gradients with the reference."""
    with torch.no_grad():
        y, final = case.run(**options)
        want, want_final = case.reference().run(getattr(rwkv_jit, f"{case.op}_ref"))
    limit = LIMITS[y.dtype]
    assert (y.dtype, final.dtype) == (next(iter(case.inputs.values())).dtype, case.state.dtype)
    assert comparing.relative(y, want) < limit
    rounding = {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(case.state.dtype, 0.0)
    assert comparing.relative(final, want_final) < limit + rounding


@CASES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(op, name, how, sizes, launched, guarded_memory):
    for dtype in LIMITS:
        check(derived_cases.make(name, how, sizes, dtype, torch.float32, torch.float32, device="cuda"))
    assert own(launched) == len(LIMITS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decays", DECAYS, ids=str)
@pytest.mark.parametrize("chunk_len", [16, 32])
def test_any_decay(op, name, decays, chunk_len, launched):
    case = derived_cases.make(
        name, "", (2, 130, 2, 4, 64, 64), torch.bfloat16, torch.float32, torch.float32, decays, device="cuda"
    )  # fmt: skip
    check(case, chunk_len=chunk_len)
    assert own(launched) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_sequences_and_states(op, name, layout, state_type, launched, guarded_memory):
    bounds = [0, 0, 1, 40, 105, 105, 130]
    case = derived_cases.make(
        name, "", (1, 130, 1, 2, 64, 96), torch.bfloat16, torch.float32, state_type, bounds=bounds, device="cuda",
        layout=layout,
    )  # fmt: skip
    check(case)
    assert own(launched) == 1


@pytest.mark.parametrize("name", NAMES)
def test_one_state_for_all_sequences_and_none(op, name, launched):
    case = derived_cases.make(
        name, "", (3, 40, 2, 2, 32, 32), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )
    alike = case._replace(state=case.state[:1].expand_as(case.state))
    with torch.no_grad():
        want, of_one = alike.run(), alike._replace(state=case.state[0]).run()
        zeros, without = case._replace(state=torch.zeros_like(case.state)).run(), case._replace(state=None).run()
    for found, x in zip((*of_one, *without), (*want, *zeros), strict=True):
        assert torch.equal(found, x)
    assert own(launched) == 4


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_blocks_change_no_result(op, name, launched):
    """Few heads share their value rows between blocks; where results may not depend on the batch, they do not."""
    case = derived_cases.make(
        name, "", (2, 100, 1, 2, 128, 128), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )  # fmt: skip
    with torch.no_grad():
        shared = case.run()
        rwkv_jit.set_batch_invariant(True)
        try:
            whole = case.run()
            first = case.part(slice(0, 1))._replace(state=case.state[:1]).run()
        finally:
            rwkv_jit.set_batch_invariant(False)
    for x, y, z in zip(shared, whole, first, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(y[:1], z)


@pytest.mark.parametrize("name", NAMES)
def test_strided_inputs_and_a_graph(op, name, launched):
    case = derived_cases.make(
        name, "", (2, 66, 2, 4, 64, 64), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )
    apart = {n: x if x.dim() < 3 else torch.stack([x, x + 1], 2)[:, :, 0] for n, x in case.inputs.items()}
    with torch.no_grad():
        want = case.run()
        for found, x in zip(case._replace(inputs=apart).run(), want, strict=True):
            assert torch.equal(found, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case.run()
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
    for found, x in zip(captured, want, strict=True):
        assert torch.equal(found, x)


def test_other_calls_go_to_other_kernels(op, launched):
    case = derived_cases.make(
        "gated_delta_rule", "norm", (2, 40, 2, 4, 64, 64), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )  # fmt: skip
    derived_cases.differentiate(case)  # gradients
    with torch.no_grad():
        case.run(backend="recurrent")
        case.reference().run(backend="reference")  # float64, which no kernel takes
        case.run(num_threads=128)
        case.reference().replaced({n: x.float() for n, x in case.tensors.items()}).run()
        short = case.part((slice(None), slice(0, 3)))
        short.run()
        large = derived_cases.make(
            "gated_delta_rule", "norm", (1, 40, 1, 1, 192, 192), torch.bfloat16, torch.float32, torch.float32,
            device="cuda",
        )  # fmt: skip
        large.run()
    assert own(launched) == 0
    with torch.no_grad():
        case.run()
    assert own(launched) == 1


def test_few_heads_go_in_segments(op, monkeypatch):
    monkeypatch.undo()
    case = derived_cases.make(
        "simple_gla", "", (1, 64, 1, 1, 64, 64), torch.bfloat16, torch.float32, torch.float32, device="cuda"
    )  # fmt: skip
    call = head_decays.chunk_len
    with torch.no_grad():
        found = []
        monkeypatch.setattr(head_decays, "chunk_len", lambda *given: found.append(call(*given)))
        case.run()
    assert found == [None]
