"""The kernel of updates for every architecture, at odd sizes too, and what its template refuses."""

import itertools

import pytest
from problems import by_turns, problem

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import update

pytestmark = pytest.mark.usefixtures("from_ledger")

OPS = ("wkv6", "wkv7", "linear_attention")  # whose kernels have all that those of the others have
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Multiples of an access, of a part of one, and of none.
SIZES = [(64, 64), (128, 128), (256, 64), (100, 52), (50, 6), (7, 13), (1, 1)]


def request(op, head_size=64, value_size=64, *, arch="sm_90", layout="vk", state="fp32", pool=None):
    given = problem(
        op, K=head_size, V=value_size, T=1, arch=arch, state_layout=layout, state_type=state, few_heads=True
    )
    (made,) = update.schedule(given, pool or update.Pool(1, 0)).requests(given.gpu)
    return made


@pytest.mark.parametrize(
    ("arch", "kind", "layout"), by_turns(ARCHS, (("wkv7", "fp32"), ("wkv6", "bf16")), ("vk", "kv"))
)
def test_compiles_everywhere(arch, kind, layout):
    op, state = kind
    kernel.get(request(op, arch=arch, layout=layout, state=state))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_any_sizes_rounding_and_indices(op, sizes):
    pools = list(itertools.product((16, 2), (4, 8), (False, True)))
    size, place = SIZES.index(sizes), OPS.index(op)  # each of them meets both layouts, and some of the pools
    alignment, index_bytes, is_stochastic = pools[(5 * size + 2 * place) % len(pools)]
    pool = update.Pool(3, 1, alignment, index_bytes, is_stochastic=is_stochastic)
    kernel.get(request(op, *sizes, layout=("vk", "kv")[(size + place) % 2], state="bf16", pool=pool))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"ROWS": 1, "STATE_LAYOUT": "kv"}, "the lanes that share keys hold all of them"),
        ({"HEAD_SIZE": 66}, "a row of the state consists of whole accesses"),
        ({"KEY_WARPS": 2, "NUM_THREADS": 64}, "in the vk layout a warp holds all keys of its values"),
        ({"HEAD_SIZE": 4096, "KEY_LANES": 32, "ROWS": 1}, "head_size needs more than 48 KB of shared memory"),
    ],
)
def test_rules(change, rule):
    made = request("wkv7")
    with pytest.raises(UnsupportedConfigError, match=f"update_states: {rule}; got "):
        kernel.get(made._replace(parameters={**made.parameters, **change}))
