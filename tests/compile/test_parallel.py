"""The kernels of shards compile: joins of unit states have other rows than those of calls."""

import pytest
from problems import by_turns, problem

from rwkv_jit.kernels import kernel
from rwkv_jit.schedules import directions, segments

pytestmark = pytest.mark.usefixtures("from_ledger")


@pytest.mark.parametrize(
    ("op", "sizes", "arch"),
    by_turns(
        ("wkv5", "wkv6", "wkv7", "gla", "linear_attention"), ((64, 64), (128, 128), (37, 100), (7, 7)),
        ("sm_80", "sm_90", "sm_120"),
    ),
)  # fmt: skip
def test_kernels_of_shards_compile(op, sizes, arch):
    p = problem(
        op, K=sizes[0], V=sizes[1], arch=arch, backend="segments", chunk_len=16, T=4096, training=True, is_shard=True,
        has_initial_state=True, has_final_state=True, state_layout="vk", wanted=("v",),
    )  # fmt: skip
    assert segments.takes_shard(p)
    (pause,) = [place for place, step in enumerate(directions.forward(p).steps) if step == ()]
    before = [step for step in directions.forward(p).steps[:pause] if hasattr(step, "template")]
    assert kernel.get_all([step.request(p.gpu) for step in before])
