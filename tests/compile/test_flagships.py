"""Kernels of usual calls, whose registers, spills and shared memory stand in the ledger."""

import itertools

import pytest
import torch
from problems import problem, requests

import rwkv_jit
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules import delta_operands, update
from rwkv_jit.schedules import layers as layer_steps
from rwkv_jit.schedules.schedule import Result

pytestmark = pytest.mark.usefixtures("from_ledger")

WAYS = ("forward", "backward")
# The kernels that `specialize` names, in both directions.
KINDS = {
    "wkv5": {"op": "wkv5", "head_size": 64, "backend": "recurrent"},
    "gla": {"op": "gla", "head_size": 64, "backend": "recurrent"},
    "linear_attention": {"op": "linear_attention", "head_size": 64, "backend": "recurrent"},
    "wkv6": {"op": "wkv6", "head_size": 64, "backend": "recurrent"},
    "wkv7": {"op": "wkv7", "head_size": 64, "backend": "recurrent"},
    "wkv7_chunked": {"op": "wkv7", "head_size": 64, "backend": "chunked", "decay": "sigmoid"},
    "wkv6_chunked": {"op": "wkv6", "head_size": 64, "backend": "chunked", "decay": "sigmoid"},
    "wkv6_chunked_128": {"op": "wkv6", "head_size": 128, "backend": "chunked", "decay": "sigmoid"},
    "wkv5_chunked": {"op": "wkv5", "head_size": 64, "backend": "chunked", "decay": "sigmoid"},
    "gla_chunked_128": {"op": "gla", "head_size": 128, "backend": "chunked"},
    "linear_attention_chunked_128": {"op": "linear_attention", "head_size": 128, "backend": "chunked"},
    "gla_scan": {"op": "gla", "head_size": 256, "value_size": 512, "backend": "split", "chunk_len": 32},
    "wkv7_chunked_128": {"op": "wkv7", "head_size": 128, "backend": "chunked", "decay": "sigmoid"},
}


def large(op, **more):
    """Return the problem of heads that no block holds."""
    given = {"K": 256, "V": 256 if op == "wkv7" else 512, "decay": "sigmoid", "state_layout": "vk"}
    return problem(op, backend="large", **{"chunk_len": 64, **given, **more})


def timex(batch, tokens):
    return problem("timex", "fp32", backend="tiles", B=batch, T=tokens, C=768)


# Other kernels of calls: the direction, the template, and the problem.
PART = problem("wkv4", "bf16", backend="split", T=1024, C=64, types={"w": "fp32", "u": "fp32"})
SEGMENTED = ("wkv7", "gla")
SEGMENTS = {"backend": "segments", "chunk_len": 32, "decay": "sigmoid", "T": 64}
CHUNKED = {"backend": "chunked", "chunk_len": 32, "decay": "sigmoid"}
STATES = {"state_type": "bf16", "has_initial_state": True, "has_final_state": True}
NARROW = {"backend": "chunked", "chunk_len": 32, "is_narrow": True}
OTHERS = {
    **{f"wkv7_group_scan_{way}": (way, "wkv7_group_scan", large("wkv7")) for way in WAYS},
    **{f"wkv7_group_scan_{way}_few_heads": (way, "wkv7_group_scan", large("wkv7", few_heads=True)) for way in WAYS},
    **{f"wkv7_scan_{way}": (way, "wkv7_scan", large("wkv7", num_threads=256)) for way in WAYS},
    **{
        f"wkv7_scan_{way}_few_heads": (way, "wkv7_scan", large("wkv7", arch="sm_100", few_heads=True))
        for way in WAYS
    },
    "wkv7_prepare": ("forward", "wkv7_prepare", large("wkv7")),
    "wkv7_token_gradients": ("backward", "wkv7_token_gradients", large("wkv7")),
    "wkv7_key_gradients": ("backward", "wkv7_key_gradients", large("wkv7")),
    "wkv5_key_gradients": ("backward", "gla_key_gradients", large("wkv5", chunk_len=32)),
    "gla_key_gradients": ("backward", "gla_key_gradients", large("gla", chunk_len=32)),
    "gla_prepare": ("forward", "gla_prepare", large("gla")),
    **{f"gla_group_scan_{way}": (way, "gla_group_scan", large("gla")) for way in WAYS},
    "gla_group_key_gradients": ("backward", "gla_group_key_gradients", large("gla")),
    "wkv6_prepare": ("forward", "gla_prepare", large("wkv6")),
    "wkv6_group_key_gradients": ("backward", "gla_group_key_gradients", large("wkv6")),
    **{f"{op}_segment_{way}": (way, f"{op}_segment", problem(op, **SEGMENTS)) for op in SEGMENTED for way in WAYS},
    # With 128 registers a thread they would spill.
    "wkv7_chunked_forward_sm_100": ("forward", "wkv7_chunked_forward", problem("wkv7", **CHUNKED, arch="sm_100")),
    "wkv6_chunked_forward_sm_100": ("forward", "gla_scan", problem("wkv6", **CHUNKED, arch="sm_100")),
    # Short sequences that begin with nothing.
    **{
        f"wkv7_chunked_{way}_short": (way, f"wkv7_chunked_{way}", problem("wkv7", **CHUNKED | {"chunk_len": 16}, T=16))
        for way in WAYS
    },
    # What every op takes around its own kernels.
    "sum_rows": ("backward", "sum_rows", large("wkv6")),
    "copy_states": ("backward", "copy_states", problem("wkv7", **STATES)),
    "narrow_rows": ("forward", "narrow_rows", problem("wkv7", "fp32", **NARROW)),
    # RWKV-4: all, and what a part of the tokens does on its own.
    **{f"wkv4_{way}": (way, f"wkv4_{way}", PART) for way in WAYS},
    # timex at 32 rows of 768 tokens, and at 8 rows of 4096, which are streamed.
    **{
        f"timex_{name}{suffix}": (way, template, timex(*shape))
        for suffix, shape in {"": (32, 768), "_streamed": (8, 4096)}.items()
        for name, way, template in (
            ("forward", "forward", "timex_convolve"), ("gradient_k", "backward", "timex_convolve"),
            ("gradient_w", "backward", "timex_filter_gradient"),
        )
    },
}  # fmt: skip
# The same for what has left its frame.
ANY = {"decay": "raw"}
OF_HALVES = {
    **{f"wkv7_chunked_{way}": (way, problem("wkv7", backend="chunked", chunk_len=32, **ANY)) for way in WAYS},
    "wkv7_prepare": ("forward", large("wkv7", **ANY)),
    "wkv7_key_gradients_by_halves": ("backward", large("wkv7", **ANY)),
    "gla_prepare": ("forward", large("gla", **ANY)),
    "gla_group_key_gradients": ("backward", large("gla", **ANY)),
}  # fmt: skip
HALVES = {f"{template.removesuffix('_by_halves')}_by_halves": template for template in OF_HALVES}
PARTS = {f"wkv4_part_{way}": f"wkv4_{way}" for way in WAYS}
# One token over a pool, with few blocks and many.
UPDATES = {
    f"{op}_update_{layout}_{head_size}_{state_type}_{batch}": problem(
        op, K=head_size, T=1, H=32, B=batch, N=batch, state_type=state_type, state_layout=layout
    )._replace(gpu=Gpu("sm_90", multiprocessors=132))
    for op, head_size in (("wkv7", 64), ("gla", 128))
    for layout in ("vk", "kv")
    for state_type, batch in (("fp32", 1), ("fp32", 256), ("bf16", 256))
}  # fmt: skip
# Operands of the delta rules as models have them: the value heads of a key head, whose gates are of channels or heads.
OPERANDS = {
    f"{op}_operands_{way}": (way, group, gate_of)
    for op, group, gate_of in (("kda", 1, "channel"), ("gated_delta_rule", 2, "head"))
    for way in WAYS
}  # fmt: skip
FLAGSHIPS = [
    *(f"{kind}_{way}" for kind in KINDS for way in WAYS), *OTHERS, *HALVES, *PARTS, *UPDATES, *OPERANDS,
]  # fmt: skip


def operands(way, group, gate_of):
    """Return the kernel that makes operands of 16 bits of gates that have parameters, or their gradients."""
    types = {"k": "bf16", "q": "bf16", "beta": "bf16", "g": "bf16", "A_log": "fp32", "dt_bias": "fp32"}
    given = layer_steps.Given(Gpu("sm_90"), types, 4096, (16, 128, 16 * group, 1))
    kinds = "softplus", gate_of, "sigmoid", "head", "l2"
    if way == "forward":
        made = delta_operands.operands(given, 0.0, kinds)
    else:
        grads = {**{f"grad_{x}": "bf16" for x in ("r", "new_k", "a", "b")}, "grad_w": "fp32"}
        results = {f"d{x}": Result((1,), storage) for x, storage in types.items()}
        given = given._replace(types=types | grads, results=results)
        made = delta_operands.operand_gradients(given, 0.0, kinds)
    return kernel.get(made.requests(given.gpu)[0])


def get(name):
    if name in OTHERS:
        direction, template, given = OTHERS[name]
        made = kernel.get(requests(direction, given)[template])
    elif name in HALVES:
        direction, given = OF_HALVES[HALVES[name]]
        made = kernel.get(requests(direction, given, by_halves=True)[HALVES[name]])
    elif name in PARTS:
        direction, template, given = OTHERS[PARTS[name]]
        request = requests(direction, given)[template]
        made = kernel.get(request._replace(parameters={**request.parameters, "RESULTS": False}))
    elif name in OPERANDS:
        made = operands(*OPERANDS[name])
    elif name in UPDATES:
        (request,) = update.schedule(UPDATES[name], update.Pool(1, 0)).requests(UPDATES[name].gpu)
        made = kernel.get(request)
    else:
        kind, direction = name.rsplit("_", 1)
        made = rwkv_jit.specialize(**KINDS[kind], dtype=torch.bfloat16, arch="sm_90", direction=direction)
    return made


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_flagship_kernel_compiles(name):
    assert 0 < get(name).registers <= 255


IN_CHUNKS = {"backend": "chunked", "chunk_len": 32}
OF_LARGE = {"backend": "large", "K": 256, "chunk_len": 64}
# For sm_100: the direction, the template, whether it is by halves, the op, and the rest of the problem.
ON_SM_100 = [
    ("forward", "wkv7_chunked_forward", False, "wkv7", IN_CHUNKS | {"decay": "sigmoid"}),
    ("forward", "gla_scan", False, "linear_attention", IN_CHUNKS),
    ("forward", "wkv7_prepare", False, "wkv7", OF_LARGE),
    *(("forward", "gla_scan", False, op, IN_CHUNKS) for op in ("wkv5", "wkv6", "gla")),
    ("forward", "wkv7_chunked_forward", True, "wkv7", IN_CHUNKS),
    *(
        (way, f"wkv7_chunked_{way}", False, "wkv7", IN_CHUNKS | {"K": size, "decay": "sigmoid"})
        for way, size in (("backward", 64), *itertools.product(("forward", "backward"), (96, 128)))
    ),
    *(
        ("backward", "gla_chunked_backward", False, "linear_attention", IN_CHUNKS | {"K": size})
        for size in (64, 96, 128)
    ),
    *(
        ("backward", "gla_chunked_backward", False, "wkv6", IN_CHUNKS | {"K": size, "decay": "sigmoid"})
        for size in (64, 96, 128)
    ),
    *(
        (way, "gla_scan", False, "wkv6", OF_LARGE | {"chunk_len": 32, "decay": "sigmoid"})
        for way in ("forward", "backward")
    ),
    *((way, "wkv7_scan", False, "wkv7", OF_LARGE) for way in ("forward", "backward")),
    ("backward", "wkv7_token_gradients", False, "wkv7", OF_LARGE),
    ("backward", "wkv7_key_gradients", False, "wkv7", OF_LARGE | {"chunk_len": 32}),
    *(
        ("backward", "gla_key_gradients", False, op, OF_LARGE | {"chunk_len": 32})
        for op in ("wkv5", "wkv6", "gla", "linear_attention")
    ),
    *(
        (way, f"{stem}_segment", False, op, {"backend": "segments", "chunk_len": 32, "decay": decay, "T": 64})
        for way in ("forward", "backward")
        for stem, op, decay in (("wkv7", "wkv7", "sigmoid"), ("gla", "wkv6", "raw"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("direction", "template", "by_halves", "op", "given"), ON_SM_100)
def test_kernel_for_sm_100_compiles(direction, template, by_halves, op, given):
    """With the blocks that a multiprocessor shall have room for."""
    kernel.get(requests(direction, problem(op, arch="sm_100", **given), by_halves)[template])
