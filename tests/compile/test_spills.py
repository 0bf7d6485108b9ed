"""Kernels for sm_100 that keep all they have in registers, with the blocks that a multiprocessor shall have room for.

kernel_templates/README.md says which others spill there, and why they are left so.
"""

import itertools

import pytest
from problems import problem, requests

from rwkv_jit.kernels import kernel

pytestmark = pytest.mark.usefixtures("compiled_once")

CHUNKED = {"backend": "chunked", "chunk_len": 32}
LARGE = {"backend": "large", "K": 256, "chunk_len": 64}
# The direction, the template, whether it is by halves, the op, and the rest of the problem.
CLEAN = [
    ("forward", "wkv7_chunked_forward", False, "wkv7", CHUNKED | {"decay": "sigmoid"}),
    ("forward", "gla_scan", False, "linear_attention", CHUNKED),
    ("forward", "wkv7_prepare", False, "wkv7", LARGE),
]
# Those that take longer to compile.
MORE = [
    *(("forward", "gla_scan", False, op, CHUNKED) for op in ("wkv5", "wkv6", "gla")),
    ("forward", "wkv7_chunked_forward", True, "wkv7", CHUNKED),
    *(
        (way, f"wkv7_chunked_{way}", False, "wkv7", CHUNKED | {"K": size, "decay": "sigmoid"})
        for way, size in (("backward", 64), *itertools.product(("forward", "backward"), (96, 128)))
    ),
    *(("backward", "gla_chunked_backward", False, "linear_attention", CHUNKED | {"K": size}) for size in (64, 96, 128)),
    *(
        ("backward", "gla_chunked_backward", False, "wkv6", CHUNKED | {"K": size, "decay": "sigmoid"})
        for size in (64, 96, 128)
    ),
    *(
        (way, "gla_scan", False, "wkv6", LARGE | {"chunk_len": 32, "decay": "sigmoid"})
        for way in ("forward", "backward")
    ),
    *((way, "wkv7_scan", False, "wkv7", LARGE) for way in ("forward", "backward")),
    ("backward", "wkv7_token_gradients", False, "wkv7", LARGE),
    ("backward", "wkv7_key_gradients", False, "wkv7", LARGE | {"chunk_len": 32}),
    *(
        ("backward", "gla_key_gradients", False, op, LARGE | {"chunk_len": 32})
        for op in ("wkv5", "wkv6", "gla", "linear_attention")
    ),
    *(
        (way, f"{stem}_segment", False, op, {"backend": "segments", "chunk_len": 32, "decay": decay, "T": 64})
        for way in ("forward", "backward")
        for stem, op, decay in (("wkv7", "wkv7", "sigmoid"), ("gla", "wkv6", "raw"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("direction", "template", "by_halves", "op", "given"),
    [*CLEAN, *(pytest.param(*row, marks=pytest.mark.full) for row in MORE)],
)
def test_kernel_for_sm_100_does_not_spill(direction, template, by_halves, op, given):
    made = kernel.get(requests(direction, problem(op, arch="sm_100", **given), by_halves)[template])
    assert made.spill_bytes == 0
