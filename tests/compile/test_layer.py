"""The kernels of the small work of a layer for every architecture, at odd sizes too, and what templates refuse."""

import itertools

import pytest
from problems import by_turns

from rwkv_jit import kernel
from rwkv_jit.errors import UnsupportedConfigError
from rwkv_jit.gpu import Gpu
from rwkv_jit.layers import steps as layer_steps
from rwkv_jit.layers.steps import Given, Sequences

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
OPS = layer_steps.OPS


def request(
    name, channels=2048, heads=32, *, arch="sm_90", io="bf16", parameters="bf16", shift="bf16", mixes=6, tokens=1,
    bound_bytes=0, without=(), alignment=16,
):  # fmt: skip
    op = OPS[name]
    types = {x: parameters if x in op.wide else io for x in op.inputs if x not in without}
    given = Given(Gpu(arch), types, 6, (heads, channels // heads), alignment)
    if name == "shift_mix":
        given = given._replace(types=types | {"shift": shift}, sizes=(channels, mixes))
        made = layer_steps.shift_mix(given, Sequences(6 // tokens, tokens, bound_bytes, index_bytes=8), 1e-5)
    elif name == "prepare_keys":
        made = layer_steps.prepare_keys(given)
    elif name == "gated_norm":
        made = layer_steps.gated_norm(given, 64e-5)
    else:
        made = layer_steps.activate(given._replace(sizes=(channels,), rows=2), ("tanh", "sigmoid"), False)
    (step,) = made.launches
    return step.request(given.gpu)


@pytest.mark.parametrize(
    ("arch", "name", "types"), by_turns(ARCHS, [*OPS], (("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32")))
)
def test_compiles_without_spills_everywhere(arch, name, types):
    io, parameters = types
    for channels in (2048, 4096):
        made = kernel.get(request(name, channels, arch=arch, io=io, parameters=parameters, shift=io))
        assert made.spill_bytes == 0


@pytest.mark.parametrize("channels", [2048, 8192])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_prompts_do_not_spill(channels, arch):
    for tokens, bound_bytes in ((3, 0), (1, 4), (1, 8)):
        made = kernel.get(request("shift_mix", channels, arch=arch, tokens=tokens, bound_bytes=bound_bytes))
        assert made.spill_bytes == 0


@pytest.mark.parametrize("size", [1, 7, 33, 100, 256, 999, 1024])
def test_any_sizes_types_and_addresses(size):
    some = itertools.cycle(itertools.product((16, 4, 2), ("bf16", "fp32"), ("fp16", "fp32")))
    absent = {"prepare_keys": [("v_first", "v_gate", "v0"), ("a0", "v0"), ()], "shift_mix": [("add",), ()]}
    for name in OPS:
        for without in absent.get(name, [()]):
            alignment, parameters, shift = next(some)
            alignment = max(alignment, 4 if shift == "fp32" and name == "shift_mix" else 2)
            more = {"parameters": parameters, "shift": shift, "without": without, "alignment": alignment}
            kernel.get(request(name, 2 * size, 2, mixes=1 + size % 6, tokens=1 + size % 2, **more))


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("shift_mix", {"NUM_THREADS": 48}, "num_threads must be a multiple of 32 up to 1024"),
        ("shift_mix", {"CHANNELS": 2052}, "a row consists of whole accesses"),
        ("gated_norm", {"HEAD_SIZE": 60}, "a head consists of whole accesses"),
        ("prepare_keys", {"LANES": 12}, "heads do not cross warps"),
    ],
)
def test_rules(name, change, rule):
    made = request(name)
    with pytest.raises(UnsupportedConfigError, match=f"layer_{name}: {rule}; got "):
        kernel.get(made._replace(parameters={**made.parameters, **change}))
