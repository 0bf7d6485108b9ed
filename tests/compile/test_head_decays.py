"""The kernel of ops with one decay for a head, for every architecture that has tensor cores, at odd sizes too."""

import itertools

import pytest
from problems import by_turns

from rwkv_jit import kernel
from rwkv_jit.derived import steps
from rwkv_jit.derived.table import Core
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.gpu import Gpu
from rwkv_jit.problem import Problem

pytestmark = pytest.mark.usefixtures("compiled_once")

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CORES = [
    *(Core(True, has_decay, has_norm=has_norm) for has_decay in (True, False) for has_norm in (True, False)),
    Core(False, has_rate=False), Core(False), Core(False, has_own=True),
]  # fmt: skip
SIZES = [(128, 128), (128, 64), (64, 64), (40, 24), (16, 32), (33, 65), (100, 96)]
WAYS = list(itertools.product(CORES, (32, 16), ("bf16", "fp16")))
MOST_SPILLED = 128  # bytes of a thread, where the state fills half of its registers


def problem(core, arch="sm_90", sizes=(128, 128), chunk_len=32, io="bf16", heads=32, layout="kv", state="fp32"):
    op = core.op
    types = {name: "fp32" if name in ("w", "own") else io for name in op.inputs}
    head_size, value_size = sizes
    return Problem(
        op, Gpu(arch, multiprocessors=132), types, 8, 4096, heads, head_size, value_size, 8, heads // 2, decay=op.decay,
        state_type=state, state_layout=layout, backend="chunked", chunk_len=chunk_len, has_initial_state=True,
        has_final_state=True,
    )  # fmt: skip


def compiled(given):
    (request,) = steps.forward(given).requests(given.gpu)
    (resources,) = kernel.get(request).resources.values()
    return resources


@pytest.mark.parametrize(("core", "arch"), by_turns(CORES, ARCHS), ids=str)
def test_usual_sizes(core, arch):
    made = compiled(problem(core, arch))
    assert made.spill_bytes <= MOST_SPILLED


@pytest.mark.parametrize(("sizes", "way"), by_turns(SIZES, WAYS), ids=str)
def test_odd_sizes(sizes, way):
    core, chunk_len, io = way
    layout, state = ("vk", "bf16") if io == "fp16" else ("kv", "fp32")
    compiled(problem(core, sizes=sizes, chunk_len=chunk_len, io=io, heads=2, layout=layout, state=state))


def test_few_heads_have_blocks_of_fewer_rows():
    (many,), (few,) = (steps.forward(problem(Core(True), heads=heads)).launches for heads in (32, 2))
    assert (many.grid, many.parameters["ROWS"]) == ((8, 32, 1), 128)
    assert (few.grid, few.parameters["ROWS"]) == ((8, 2, 4), 32)
    (whole,) = steps.forward(problem(Core(True), heads=2)._replace(is_batch_invariant=True)).launches
    assert whole.parameters["ROWS"] == 128


def test_what_does_not_fit_is_refused():
    given = problem(Core(True))
    (step,) = steps.forward(given).launches
    for changed, message in (
        ({"CHUNK_LEN": 64}, "chunk_len must be 16 or 32"), ({"SHARED_BYTES": 1024}, "shared_bytes is what"),
        ({"ROWS": 48}, "rows must be a multiple of 32"),
    ):  # fmt: skip
        wrong = step._replace(parameters={**step.parameters, **changed})
        with pytest.raises(UnsupportedConfigError, match=message):
            kernel.get(wrong.request(given.gpu))
