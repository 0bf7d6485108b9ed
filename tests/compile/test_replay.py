"""The kernel that reads entries beside states: every architecture, odd sizes, and what its template refuses."""

import itertools

import pytest
from problems import by_turns, problem

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import replay, update

pytestmark = pytest.mark.usefixtures("from_ledger")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Multiples of an access, of a part of one, and of none.
SIZES = [(64, 64), (128, 128), (256, 64), (100, 52), (50, 6), (7, 13), (1, 1)]


def request(
    op="wkv7", sizes=(64, 64), *, arch="sm_90", layout="vk", state="fp32", tokens=1, length=5, drafts=0, pool=None
):
    given = problem(
        op, K=sizes[0], V=sizes[1], T=tokens, arch=arch, state_layout=layout, state_type=state, few_heads=True
    )
    ring = replay.Ring(length, length + drafts, length, is_draft=drafts > 0 and tokens > 0)
    (made,) = replay.schedule(given, pool or update.Pool(1, 0), ring, tokens).requests(given.gpu)
    return made


@pytest.mark.parametrize(
    ("arch", "kind", "layout"), by_turns(ARCHS, (("wkv7", "fp32"), ("wkv6", "bf16")), ("vk", "kv"))
)
def test_steps_compile_everywhere(arch, kind, layout):
    op, state = kind
    kernel.get(request(op, arch=arch, layout=layout, state=state))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(("tokens", "drafts"), [(4, 4), (0, 4)])
def test_drafts_and_commits_compile(arch, tokens, drafts):
    kernel.get(request(arch=arch, tokens=tokens, drafts=drafts))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", ["wkv6", "wkv7", "linear_attention"])
def test_any_sizes_rounding_and_indices(op, sizes):
    pools = list(itertools.product((16, 2), (4, 8), (False, True)))
    place = 3 * SIZES.index(sizes) + len(op)  # each size and op meets some of them
    alignment, index_bytes, is_stochastic = pools[place % len(pools)]
    pool = update.Pool(3, 1, alignment, index_bytes, is_stochastic=is_stochastic)
    more = {"layout": ("vk", "kv")[place % 2], "tokens": (1, 2, 0)[place % 3], "drafts": (0, 3)[place % 2]}
    kernel.get(request(op, sizes, state="bf16", pool=pool, length=2, **more))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"LENGTH": 0}, "drafts have room"),
        ({"ENTRIES": 4}, "drafts have room"),
        ({"SHARED_BYTES": 64}, "shared_bytes is what the geometry says"),
    ],
)
def test_rules(change, rule):
    made = request()
    with pytest.raises(UnsupportedConfigError, match=f"replay_states: {rule}; got "):
        kernel.get(made._replace(parameters={**made.parameters, **change}))
