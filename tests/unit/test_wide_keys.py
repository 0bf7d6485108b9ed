"""Keys in parts: sums of calls with some of a head's channels."""

import pytest
import torch
from problems import problem

import rwkv_jit
from rwkv_jit.call import torch_op
from rwkv_jit.ops import wide_keys
from rwkv_jit.schedules.table import OPS

DIAGONAL = [name for name, op in OPS.items() if op.family == "diagonal"]


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", DIAGONAL)
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
    calls, call = [], torch_op.call
    monkeypatch.setattr(wide_keys, "_may_be_in_parts", lambda *_: True)
    monkeypatch.setattr(wide_keys, "part_sizes", lambda *_: [5, 5, 3])
    monkeypatch.setattr(torch_op, "call", lambda op, given, *more: calls.append(given) or call(op, given, *more))
    for x, want in zip(results(), wanted, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-12, atol=1e-12)
    assert [given[0].shape[3] for given in calls] == [13, 5, 5, 3]


@pytest.mark.parametrize(
    ("head_size", "arch", "more", "sizes"),
    [
        (512, "sm_80", {}, [256, 256]),
        (512, "sm_90", {}, [512]),  # warp groups
        (512, "sm_90", {"chunk_len": 32}, [256, 256]),
        (512, "sm_90", {"num_threads": 256}, [256, 256]),
        (512, "sm_90", {"num_threads": 384}, [512]),
        (512, "sm_80", {"T": 1}, [512]),
        (512, "sm_80", {"types": {"v": "fp32"}}, [512]),
        (512, "sm_75", {}, [512]),
        (257, "sm_120", {}, [136, 121]),
        (1024, "sm_89", {}, [256] * 4),
        (700, "sm_86", {}, [240, 240, 220]),
        (256, "sm_80", {}, [256]),
        (1100, "sm_80", {}, [224] * 4 + [204]),
        (1100, "sm_90", {}, [224] * 4 + [204]),
    ],
)
def test_sizes_of_parts(head_size, arch, more, sizes):
    p = problem("gla", "bf16", head_size, 512, arch, backend="auto", training=True)
    assert wide_keys.part_sizes(p._replace(**more)) == sizes
