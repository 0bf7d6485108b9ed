"""The kernels of the training loss for every architecture, and what templates refuse."""

import pytest
from problems import by_turns

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import loss
from rwkv_jit.schedules.loss import Given

pytestmark = pytest.mark.usefixtures("from_ledger")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
DIRECTIONS = ("forward", "backward", "in_place")


def request(direction, arch="sm_90", io="bf16", classes=65_536, target_bytes=8, l2_wrap=1e-4):
    given = Given(Gpu(arch), io, 3, classes, target_bytes, -100, l2_wrap)
    (step,) = loss.DIRECTIONS[direction](given).launches
    return step.request(given.gpu)


def scale(arch="sm_90", io="bf16", made="bf16", count=48):
    schedule, problem = loss.scale(Gpu(arch), io, (count,), made)
    (step,) = schedule.launches
    return step.request(problem.gpu)


@pytest.mark.parametrize(("arch", "io"), by_turns(ARCHS, ("bf16", "fp16", "fp32")))
@pytest.mark.parametrize("count", [48, 12, 7])
def test_gradients_times_a_number_compile_everywhere(arch, io, count):
    for made in {io, "fp32"}:
        kernel.get(scale(arch, made, io, count))


@pytest.mark.parametrize("l2_wrap", [0.0, 1e-4])
@pytest.mark.parametrize(("arch", "direction", "io"), by_turns(ARCHS, DIRECTIONS, ("bf16", "fp16", "fp32")))
def test_compiles_everywhere(arch, direction, io, l2_wrap):
    kernel.get(request(direction, arch, io, l2_wrap=l2_wrap))


@pytest.mark.parametrize("classes", [1, 7, 255, 1001, 50_277, 65_536, 65_537])
def test_any_number_of_classes(classes):
    for direction in DIRECTIONS:
        for target_bytes, io in ((4, "bf16"), (8, "fp32")):
            kernel.get(request(direction, io=io, classes=classes, target_bytes=target_bytes))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"NUM_THREADS": 48}, "num_threads must be a multiple of 32 up to 1024"),
        ({"VECTOR": 4}, "a piece is an access of 16 bytes"),
    ],
)
def test_rules(direction, change, rule):
    made = request(direction)
    with pytest.raises(UnsupportedConfigError, match=f"layer_loss_{direction}: {rule}; got "):
        kernel.get(made._replace(parameters={**made.parameters, **change}))
