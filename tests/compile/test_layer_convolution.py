"""The kernels of the short causal convolution for every architecture, and what templates refuse."""

import itertools

import pytest
from problems import by_turns

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import convolution
from rwkv_jit.schedules.layers import Given, Options, Sequences
from rwkv_jit.schedules.schedule import Result

pytestmark = pytest.mark.usefixtures("from_ledger")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
DIRECTIONS = ("forward", "backward", "update")
TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32"))
TOKENS = 4096


def request(
    direction, arch="sm_90", io="bf16", parameters="bf16", channels=2048, width=4, *, bias=True, state=False,
    bound_bytes=0, activation="silu", kept=None, state_len=None, channels_last=False, ring=False, alignment=16,
):  # fmt: skip
    types = {"x": io, "weight": parameters} | ({"bias": parameters} if bias else {})
    given = Given(Gpu(arch), types, 2 * TOKENS, (channels, width), alignment)
    if direction == "update":
        given = given._replace(types={**types, "conv_state": kept or io})
        rows = Sequences(
            5, 1, slots=9, slot_stride=channels * (width - 1), index_bytes=4, state_len=state_len,
            channels_last=channels_last, ring=ring,
        )  # fmt: skip
        schedule = convolution.update(given, Options(kinds=(activation,), texts=rows))
        return schedule.launches[0].request(given.gpu)
    given = given._replace(types=types | ({"initial_state": io} if state else {}))
    texts = Sequences(5, 2 * TOKENS, bound_bytes) if bound_bytes else Sequences(2, TOKENS)
    options = Options(kinds=(activation,), texts=texts)
    if direction == "forward":
        schedule = convolution.forward(given, options)
    else:
        results = {f"d{x}": Result((channels,), storage) for x, storage in given.types.items()}
        given = given._replace(types={**given.types, "grad_y": io}, results=results)
        schedule = convolution.backward(given, options)
    return schedule.launches[0].request(given.gpu)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("arch", "direction", "types"), by_turns(ARCHS, DIRECTIONS, TYPES))
def test_compiles_everywhere(arch, direction, types, width):
    ways = [{"channels_last": x, "state_len": width, "ring": ring} for x in (False, True) for ring in (False, True)]
    if direction != "update":
        ways = [{"state": state, "bound_bytes": size} for state, size in ((False, 0), (True, 0), (False, 8), (True, 4))]
    for way in ways:
        kernel.get(request(direction, arch, *types, width=width, **way))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wide_kernels_compile(arch, direction):
    for width, io in itertools.product((5, 8), ("bf16", "fp32")):
        way = {"state": True, "bound_bytes": 8} if direction != "update" else {"state_len": 16}
        kernel.get(request(direction, arch, io, io, width=width, **way))


@pytest.mark.parametrize("channels", [1, 6, 100, 999, 2052, 6144, 20_000])
def test_any_number_of_channels_and_address(channels):
    some = itertools.cycle(itertools.product((16, 4, 2), ("bf16", "fp16", "fp32"), (True, False), (None, "identity")))
    for direction, width in itertools.product(DIRECTIONS, (2, 4)):
        alignment, io, bias, activation = next(some)
        more = {"bias": bias, "activation": activation or "silu", "alignment": max(alignment, 4 if io == "fp32" else 2)}
        kernel.get(request(direction, "sm_90", io, "fp32", channels, width, **more))


@pytest.mark.parametrize("kept", ["fp32", "fp16", "bf16"])
def test_pools_of_any_type(kept):
    for io, last in itertools.product(("bf16", "fp32"), (False, True)):
        kernel.get(request("update", io=io, kept=kept, channels_last=last))


@pytest.mark.parametrize(
    ("direction", "change", "rule"),
    [
        ("forward", {"WIDTH": 9}, "width must be from 2 to 8"),
        ("backward", {"CHANNELS": 2050}, "a row consists of whole accesses"),
        ("update", {"STATE_LEN": 2}, "state_len must be from width - 1 to 16"),
    ],
)
def test_rules(direction, change, rule):
    made = request(direction)
    with pytest.raises(UnsupportedConfigError, match=f"{made.template.name}: {rule}; got "):
        kernel.get(made._replace(parameters={**made.parameters, **change}))
