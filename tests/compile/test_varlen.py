"""The kernels of sequences of any lengths over a pool of states: all that a call launches compiles."""

import pytest
from problems import by_turns, problem

from rwkv_jit.kernels import kernel
from rwkv_jit.schedules import update, varlen
from rwkv_jit.schedules.varlen import Varlen

pytestmark = pytest.mark.usefixtures("from_ledger")


def requests(op, call, arch="sm_90", size=64, pool=None, **more):
    given = problem(op, K=size, arch=arch, **{"T": 300, "backend": "chunked", "chunk_len": 32, **more})
    schedule = varlen.schedule(given, pool or update.Pool(9, 1), call)
    return {
        (made.template.name, made.parameters.get("BY_HALVES", False)): made for made in schedule.requests(given.gpu)
    }


@pytest.mark.parametrize(
    ("op", "arch", "size", "more"),
    [
        ("wkv7", "sm_80", 64, {"decay": "sigmoid"}),
        ("wkv7", "sm_90", 128, {"decay": "raw", "state_layout": "kv", "state_type": "bf16"}),
        ("wkv7", "sm_90", 256, {"backend": "large", "chunk_len": 64}),
        ("wkv7", "sm_120", 200, {"backend": "large"}),
        ("wkv7", "sm_75", 50, {"backend": "recurrent", "chunk_len": 0}),
        ("wkv6", "sm_120", 64, {"state_type": "fp16"}),
        ("gla", "sm_90", 256, {"backend": "large", "chunk_len": 64}),
        ("wkv5", "sm_90", 36, {"backend": "recurrent", "chunk_len": 0}),
        ("linear_attention", "sm_100", 128, {}),
        ("wkv7", "sm_90", 64, {"backend": "segments", "T": 9000, "state_layout": "kv", "state_type": "bf16"}),
        ("gla", "sm_80", 64, {"backend": "segments", "T": 9000}),
        # With w0, of every type that it may have beside w.
        ("wkv7", "sm_120", 100, {"decay": "log", "w0_type": "bf16"}),
        ("wkv7", "sm_90", 256, {"backend": "large", "chunk_len": 64, "decay": "direct", "w0_type": "fp16"}),
        ("wkv7", "sm_80", 64, {"backend": "segments", "T": 9000, "w0_type": "fp32"}),
        ("wkv7", "sm_75", 50, {"backend": "recurrent", "chunk_len": 0, "w0_type": "fp16"}),
        ("wkv5", "sm_100", 128, {"w0_type": "fp32", "dtype": "fp16"}),
        ("wkv6", "sm_90", 256, {"backend": "large", "chunk_len": 64, "w0_type": "bf16"}),
        ("gla", "sm_90", 64, {"backend": "segments", "T": 9000, "w0_type": "fp16"}),
        ("gla", "sm_90", 33, {"backend": "recurrent", "chunk_len": 0, "w0_type": "fp32"}),
    ],
)
def test_all_kernels_compile(op, arch, size, more):
    for made in requests(op, Varlen(5), arch, size, **more).values():
        kernel.get(made)


@pytest.mark.parametrize("w0_type", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("op", "size", "more"),
    [
        ("wkv7", 64, {"decay": "sigmoid"}),
        ("wkv7", 64, {"decay": "raw"}),
        ("wkv7", 128, {"decay": "sigmoid", "chunk_len": 16}),
        ("wkv7", 256, {"backend": "large", "chunk_len": 64, "decay": "sigmoid"}),
        ("wkv7", 64, {"backend": "segments", "T": 9000, "decay": "sigmoid"}),
        ("wkv6", 64, {}),
        ("gla", 64, {"backend": "segments", "T": 9000}),
        ("gla", 256, {"backend": "large", "chunk_len": 64}),
    ],
)
def test_w0_takes_no_more_memory_for_registers_than_w_in_float32(op, size, more, w0_type):
    """As wide as w was when w0 was added to it by another launch."""
    summed, added = (
        requests(op, Varlen(5), size=size, **more, **own) for own in ({"types": {"w": "fp32"}}, {"w0_type": w0_type})
    )
    assert set(added) == set(summed)
    with_w0 = [
        name for name, made in added.items() if made.parameters.get("T_W0") == w0_type and name[0] != "update_states"
    ]
    assert with_w0
    for name in with_w0:
        assert kernel.get(added[name]).spill_bytes <= kernel.get(summed[name]).spill_bytes, name


@pytest.mark.parametrize("index_bytes", [4, 8])
@pytest.mark.parametrize("bound_bytes", [4, 8])
def test_bounds_and_indices_of_both_widths(index_bytes, bound_bytes):
    call = Varlen(5, checkpoints=2, bound_bytes=bound_bytes)
    kernel.get(requests("wkv7", call, pool=update.Pool(9, 1, index_bytes=index_bytes))["arrange_sequences", False])


@pytest.mark.parametrize(
    ("op", "arch", "layout"),
    by_turns(("wkv7", "wkv6", "linear_attention"), ("sm_80", "sm_90", "sm_120"), ("vk", "kv")),
)
def test_kernels_of_few_tokens_compile(op, arch, layout):
    kernel.get(requests(op, Varlen(5, has_few_tokens=True), arch, state_layout=layout)["update_states", False])
