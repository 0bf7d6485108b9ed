"""Keys in parts: sums of calls with some of a head's channels."""

import pytest
import torch

import rwkv_jit
from rwkv_jit import runtime
from rwkv_jit.ops import backends, gated, gated_groups, wide_keys

OPS = gated.OPS


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_sums_of_parts_are_the_whole(op, packed, layout, make_inputs, monkeypatch):
    batch, tokens = (1, 11) if packed else (2, 6)
    given = make_inputs(op, batch, tokens, 3, 13, 4)
    state = torch.randn(2, 3, *((4, 13) if layout == "vk" else (13, 4)), dtype=torch.float64, requires_grad=True)
    leaves = [*given.values(), state]
    cu_seqlens = torch.tensor([0, 4, 11]) if packed else None
    weights = torch.randn_like(given["v"])

    def results():
        y, final = getattr(rwkv_jit, op)(*given.values(), state, True, cu_seqlens, scale=0.7, state_layout=layout)
        return y, final, *torch.autograd.grad((y * weights).sum() + final.square().sum(), leaves)

    wanted = results()
    calls, call = [], wide_keys.boundary.call
    monkeypatch.setattr(wide_keys, "_may_be_in_parts", lambda *_: True)
    monkeypatch.setattr(wide_keys, "part_sizes", lambda *_: [5, 5, 3])
    monkeypatch.setattr(
        wide_keys.boundary, "call", lambda op, given, *more: calls.append(given) or call(op, given, *more)
    )
    for x, want in zip(results(), wanted, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-12, atol=1e-12)
    assert [given[0].shape[3] for given in calls] == [13, 5, 5, 3]


@pytest.mark.parametrize("op", OPS)
def test_results_of_parts_are_those_of_the_call(op, make_inputs, monkeypatch):
    monkeypatch.setattr(wide_keys, "in_parts", lambda *given: ("y", given[3:5]))
    assert getattr(rwkv_jit, op)(*make_inputs(op, 1, 2, 1, 4, 4).values(), None, True) == ("y", (True, None))


@pytest.mark.parametrize(
    ("head_size", "arch", "more", "sizes"),
    [
        (512, "sm_80", {}, [256, 256]),
        (512, "sm_90", {}, [512]),  # warp groups
        (512, "sm_90", {"chunk_len": 32}, [256, 256]),
        (512, "sm_90", {"num_threads": 256}, [256, 256]),
        (512, "sm_90", {"num_threads": 384}, [512]),
        (512, "sm_80", {"tokens": 1}, [512]),
        (512, "sm_80", {"dtype": torch.float32}, [512]),
        (512, "sm_75", {}, [512]),
        (257, "sm_120", {}, [136, 121]),
        (1024, "sm_89", {}, [256] * 4),
        (700, "sm_86", {}, [240, 240, 220]),
        (256, "sm_80", {}, [256]),
        (1100, "sm_80", {}, [224] * 4 + [204]),
    ],
)
def test_sizes_of_parts(head_size, arch, more, sizes):
    case = backends.Case("gla", torch.bfloat16, head_size, 512, 4096, "log", None, None, None)
    assert wide_keys.part_sizes("auto", case._replace(**more), lambda: arch) == sizes


@pytest.mark.parametrize("op", OPS)
def test_kernels_of_parts_can_be_built_ahead(op):
    made = runtime.call_requests(op, 512, torch.bfloat16, "sm_80", "forward", None, None, None, torch.float32, None)
    scans = [r.parameters for r in made if r.template.name == "gla_scan"]
    assert {(p["HEAD_SIZE"], p["VALUE_SIZE"]) for p in scans} == {(256, 512)}
    back = runtime.call_requests(op, 512, torch.bfloat16, "sm_80", "backward", None, None, None, torch.float32, None)
    assert {"gla_scan", "gla_key_gradients"} <= {r.template.name for r in back}
    assert all(r.parameters["HEAD_SIZE"] == 256 for r in back if "recurrent" not in r.template.name)
    whole = runtime.call_requests(op, 512, torch.bfloat16, "sm_90", "forward", None, None, None, torch.float32, None)
    assert not any(r.parameters["HEAD_SIZE"] == 256 for r in whole)
    assert gated_groups.can("sm_90", 64, None)
