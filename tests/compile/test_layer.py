"""The kernels of the small work of a layer for every architecture, at odd sizes too, and what templates refuse."""

import itertools

import pytest
from problems import by_turns

from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.layers.calls import kind_of
from rwkv_jit.schedules import layer_table
from rwkv_jit.schedules.layers import Given, Options, Sequences
from rwkv_jit.schedules.schedule import Result

pytestmark = pytest.mark.usefixtures("from_ledger")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
OPS = layer_table.OPS
KINDS = {
    "prepare_keys": ("sigmoid",), "gated_norm": ("identity", "layer"), "gated": ("silu",),
    "activate": ("tanh", "sigmoid"),
}  # fmt: skip
ROWS = 6


def given_for(name, channels, heads, arch, io, parameters, mixes, without, alignment):
    """What the steps of an op go by."""
    op, head_size = OPS[name], channels // heads
    types = {x: parameters if x in op.wide else io for x in op.inputs if x not in without}
    sizes = {"NHK": (heads, head_size), "HK": (heads, head_size), "N": (channels,)}.get(next(iter(op.inputs.values())))
    sizes = sizes or ((channels,) if name == "activate" else (channels, mixes))
    rows = 2 if name == "activate" else 1 if name == "gated" else ROWS
    return Given(Gpu(arch), types, rows, sizes, alignment)


def request(
    name, channels=2048, heads=32, *, arch="sm_90", io="bf16", parameters="bf16", shift="bf16", mixes=6, tokens=1,
    bound_bytes=0, without=(), alignment=16, kinds=(), mixed=None,
):  # fmt: skip
    given = given_for(name, channels, heads, arch, io, parameters, mixes, without, alignment)
    if name == "shift_mix":
        given = given._replace(types=given.types | {"shift": shift})
    given = given._replace(results={"mixed0": Result((), mixed or io)})
    texts = Sequences(ROWS // tokens, tokens, bound_bytes, index_bytes=8)
    made = kind_of(name).forward(given, Options(64e-5, kinds or KINDS.get(name, ()), texts))
    (step,) = made.launches
    return step.request(given.gpu)


def backward(
    name, channels=2048, heads=32, *, arch="sm_90", io="bf16", parameters="bf16", mixes=6, tokens=1, bound_bytes=0,
    without=(), kinds=(), mixed=None,
):  # fmt: skip
    """The launches of a backward that makes all gradients."""
    without = (*without, "add")  # whose gradient is that of x
    given = given_for(name, channels, heads, arch, io, parameters, mixes, without, 16)
    sizes = {"N": ROWS, "T": ROWS, "H": heads, "K": channels // heads, "C": channels, "G": mixes, "S": 3}
    results = {
        f"d{x}": Result(tuple(sizes[dim] for dim in OPS[name].inputs[x]), storage) for x, storage in given.types.items()
    }
    grads = {f"grad_{x}": mixed or io for x in layer_table.RESULTS[name]} | dict.fromkeys(["grad_residual"], io)
    texts = Sequences(ROWS // tokens, tokens, bound_bytes)
    options = Options(64e-5, kinds or KINDS.get(name, ()), texts)
    given = given._replace(types=given.types | grads, results=results)
    return kind_of(name).gradients(given, options, [*OPS[name].inputs])


def gradients(name, *sizes, arch="sm_90", **more):
    """The first kernel of a backward, which makes all gradients but for those of mixes of the widest rows."""
    return backward(name, *sizes, arch=arch, **more).launches[0].request(Gpu(arch))


@pytest.mark.parametrize(
    ("arch", "name", "types"), by_turns(ARCHS, [*OPS], (("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32")))
)
def test_compiles_everywhere(arch, name, types):
    io, parameters = types
    for channels in (2048, 4096):
        kernel.get(request(name, channels, arch=arch, io=io, parameters=parameters, shift=io))


@pytest.mark.parametrize("channels", [2048, 8192])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_prompts_compile(channels, arch):
    for tokens, bound_bytes in ((3, 0), (1, 4), (1, 8)):
        kernel.get(request("shift_mix", channels, arch=arch, tokens=tokens, bound_bytes=bound_bytes))


# How calls with gradients are made: what they lack, their mixes and kinds.
WAYS = [
    ("token_shift", ("amounts", "first"), 6, ()), ("token_shift", ("amounts",), 1, ()), ("token_shift", (), 5, ()),
    ("token_shift", ("first",), 6, ()), ("prepare_keys", ("v_first", "v_gate", "v0"), 6, ()),
    ("prepare_keys", (), 6, ()), ("prepare_keys", ("r", "r_k"), 6, ()), ("gated_norm", ("bonus",), 6, ()),
    ("prepare_keys", ("v_first", "v_gate", "v0", "r", "r_k"), 6, ()), ("gated_norm", ("r", "k", "v", "r_k"), 6, ()),
    ("prepare_keys", ("v_first", "v_gate", "v0", "a0", "r", "r_k"), 6, ("identity",)),
    ("prepare_keys", (), 6, ("identity",)), ("gated", (), 6, ()),
    ("gated_norm", ("r", "k", "v", "r_k", "bonus"), 6, ("silu", "layer")),
    ("gated_norm", ("r", "k", "v", "r_k", "bonus", "bias"), 6, ("sigmoid", "rms")),
    ("norm_shift", ("add", "first"), 6, ()), ("norm_shift", (), 1, ()), ("norm_shift", ("first",), 5, ()),
    ("activate", (), 6, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "way", "types"), by_turns(ARCHS, WAYS, (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")))
)
def test_gradients_compile_everywhere(arch, way, types):
    (name, without, mixes, kinds), (io, parameters) = way, types
    more = {"arch": arch, "io": io, "parameters": parameters, "mixes": mixes, "without": without, "kinds": kinds}
    for bound_bytes in (0, 8) if name in layer_table.PACKED else (0,):
        kernel.get(gradients(name, bound_bytes=bound_bytes, **more))
    if name not in ("gated", "activate"):
        kernel.get(request(name, **more))


# Calls that name their results: what they lack, and their kinds with the names.
ASKED = [
    ("prepare_keys", ("v_first", "v_gate", "v0", "a0", "r", "r_k"), ("identity", "new_k", "a", "b", "factors")),
    ("prepare_keys", ("v_first", "v_gate", "v0", "r", "r_k"), ("sigmoid", "new_rate")),
    ("gated_norm", ("bonus",), ("identity", "layer", "out", "means", "factors")),
]


@pytest.mark.parametrize(
    ("arch", "way", "types"), by_turns(ARCHS, ASKED, (("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")))
)
def test_results_that_calls_name_compile_everywhere(arch, way, types):
    (name, without, kinds), (io, parameters) = way, types
    for size in (64, 7, 100, 999):
        more = {"arch": arch, "io": io, "parameters": parameters, "without": without, "kinds": kinds}
        made = request(name, 32 * size, 32, **more)
        kernel.get(made)
        usual = request(name, 32 * size, 32, **more | {"kinds": kinds[: len(KINDS[name])]})
        flags = {x: made.parameters[x] for x in made.parameters if made.parameters[x] != usual.parameters[x]}
        assert flags == {f"MAKES_{x.upper()}": True for x in kinds if x in ("new_rate", "means", "factors")}


@pytest.mark.parametrize("channels", [768, 2560, 4096, 8192])
@pytest.mark.parametrize(("arch", "mixes", "mixed"), by_turns(ARCHS, (6, 1), (None, "bf16")))
def test_norms_of_any_width_compile(channels, arch, mixes, mixed):
    """Rows that are too wide for the registers have a launch more."""
    for bound_bytes in (0, 8):
        more = {"arch": arch, "mixes": mixes, "bound_bytes": bound_bytes}
        more |= {"io": "fp32", "parameters": "fp32", "mixed": mixed} if mixed else {}
        kernel.get(request("norm_shift", channels, **more))
        several = backward("norm_shift", channels, **more)
        is_wide = channels > (2048 if mixes == 6 else 4096)
        own = [step.entry for step in several.launches if step.template != "sum_buffers"]
        assert own == ["layer_norm_shift_backward", *(["layer_norm_shift_mixes"] if is_wide else [])]
        for made in several.requests(Gpu(arch)):
            kernel.get(made)


@pytest.mark.parametrize("size", [1, 7, 33, 100, 256, 999, 1024])
def test_gradients_of_any_sizes(size):
    some = itertools.cycle(itertools.product(("fp16", "fp32"), ("bf16", "fp32")))
    for name, without, mixes, kinds in WAYS:
        io, parameters = next(some)
        kernel.get(
            gradients(name, 2 * size, 2, io=io, parameters=parameters, mixes=mixes, without=without, kinds=kinds)
        )


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
