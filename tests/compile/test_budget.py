"""Registers, spills and shared memory of the flagship kernels against what was recorded.

``pytest -n 0 tests/compile --record-budget`` records them anew.
"""

import json
from pathlib import Path

import pytest
import torch

import rwkv_jit
from bench import history
from rwkv_jit import identity, kernel
from rwkv_jit.ops import gated_scan, scan_geometry, split, timex_tiles, wkv4_walk

pytestmark = pytest.mark.usefixtures("compiled_once")

BUDGET = Path(__file__).with_name("budget.json")
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
# Head size 256, all kernels: the architecture, the direction, and what else is asked for.
SCANS = {
    "wkv7_group_scan_forward": ("sm_90", "forward", {}),
    "wkv7_group_scan_forward_few_heads": ("sm_90", "forward", {"few_heads": True}),
    "wkv7_group_scan_backward": ("sm_90", "backward", {}),
    "wkv7_group_scan_backward_few_heads": ("sm_90", "backward", {"few_heads": True}),
    "wkv7_scan_forward": ("sm_90", "forward", {"num_threads": 256}),
    "wkv7_scan_forward_few_heads": ("sm_100", "forward", {"few_heads": True}),
    "wkv7_scan_backward": ("sm_90", "backward", {"num_threads": 256}),
    "wkv7_scan_backward_few_heads": ("sm_100", "backward", {"few_heads": True}),
    "wkv7_prepare": ("sm_90", "forward", {}),
    "wkv7_token_gradients": ("sm_90", "backward", {}),
    "wkv7_key_gradients": ("sm_90", "backward", {}),
}
# Keys of 256 and values of 512: the gradients of all chunks.
GATED_KEYS = {"wkv5_key_gradients": "wkv5", "gla_key_gradients": "gla"}
# The same sizes with products of warp groups.
GATED_GROUPS = {
    "gla_prepare": ("gla", "forward"),
    "gla_group_scan_forward": ("gla", "forward"),
    "gla_group_scan_backward": ("gla", "backward"),
    "gla_group_key_gradients": ("gla", "backward"),
    "wkv6_prepare": ("wkv6", "forward"),
    "wkv6_group_key_gradients": ("wkv6", "backward"),
}
# Head size 64: what segments of a sequence do to a state.
SEGMENTS = {f"{of}_segment_{way}": way == "backward" for of in ("wkv7", "gla") for way in ("forward", "backward")}
# The forms that wkv5 went through, at the head size that was studied, by their place.
HISTORY = {f"wkv5_history_{number}": number for number in range(1, 6)}
# RWKV-4: all, and what a part of the tokens does on its own.
WKV4 = {f"wkv4{of}_{way}": (way, bool(not of)) for of in ("", "_part") for way in ("forward", "backward")}
# timex at 32 rows of 768 tokens, and at 8 rows of 4096, which are streamed; by the place among the kernels of a call.
TIMEX = {
    f"timex_{name}{suffix}": (*shape, place)
    for suffix, shape in {"": (32, 768), "_streamed": (8, 4096)}.items()
    for place, name in enumerate(("forward", "gradient_k", "gradient_w"))
}
TYPES = {"T_IO": "bf16", "T_W": "bf16", "T_STATE": "fp32", "DECAY": "sigmoid", "STATE_LAYOUT": "vk"}
FLAGSHIPS = [
    *(f"{kind}_{direction}" for kind in KINDS for direction in ("forward", "backward")), *SCANS, *GATED_KEYS,
    *GATED_GROUPS, *SEGMENTS, *HISTORY, *WKV4, *TIMEX,
]  # fmt: skip


def request_of_scan(name):
    arch, direction, more = SCANS[name]
    given = ("wkv7", direction, 256, 256, TYPES, arch, 64)
    requests = [scan_geometry.specialize(*given, **more), *scan_geometry.companions(*given)]
    return next(request for request in requests if name.startswith(request.template.name))


def request_of_groups(name):
    op, direction = GATED_GROUPS[name]
    given = (op, direction, 256, 512, TYPES | {"T_U": "bf16"}, "sm_90", 64)
    requests = [gated_scan.specialize(*given), *gated_scan.companions(*given)]
    return next(each for each in requests if name.replace(op, "gla").startswith(each.template.name))


def used(name):
    if name in SCANS:
        found = kernel.get(request_of_scan(name))
    elif name in GATED_GROUPS:
        found = kernel.get(request_of_groups(name))
    elif name in GATED_KEYS:
        (request,) = gated_scan.companions(GATED_KEYS[name], "backward", 256, 512, TYPES | {"T_U": "bf16"}, "sm_90", 32)
        found = kernel.get(request)
    elif name in SEGMENTS:
        like = TYPES | {"HEAD_SIZE": 64, "VALUE_SIZE": 64, "CHUNK_LEN": 32}
        found = kernel.get(split.segment_request(name.split("_")[0], like, SEGMENTS[name], "sm_90"))
    elif name in WKV4:
        way, results = WKV4[name]
        types = {"T_IO": "bf16", "T_W": "fp32", "T_U": "fp32", "DECAY": "raw"}
        found = kernel.get(wkv4_walk.requests(way, types, "sm_90")[results])
    elif name in HISTORY:
        requests = history.requests("wkv5", (1, 54, 32, 64), torch.bfloat16, "sm_90")
        found = kernel.get(requests[HISTORY[name] - 1])
    elif name in TIMEX:
        batch, tokens, place = TIMEX[name]
        found = kernel.get(timex_tiles.requests(batch, tokens, (torch.float32,) * 2, "sm_90")[place])
    else:
        kind, direction = name.rsplit("_", 1)
        found = rwkv_jit.specialize(**KINDS[kind], dtype=torch.bfloat16, arch="sm_90", direction=direction)
    return {name: getattr(found, name) for name in ("registers", "spill_bytes", "shared_bytes")}


@pytest.fixture(scope="module")
def budget(pytestconfig):
    if not pytestconfig.getoption("--record-budget"):
        return json.loads(BUDGET.read_text(encoding="utf-8"))
    return {"nvrtc": None, "kernels": {}}


@pytest.fixture
def recorded(budget, pytestconfig):
    """The budget, or, when recording, a budget that takes every kernel as it is and is written down."""
    yield budget
    if pytestconfig.getoption("--record-budget"):
        budget["nvrtc"] = identity.identity()
        BUDGET.write_text(json.dumps(budget, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_flagship_kernel_takes_what_was_recorded(name, recorded, pytestconfig):
    found = used(name)
    if pytestconfig.getoption("--record-budget"):
        recorded["kernels"][name] = found
    limit = recorded["kernels"][name]
    if identity.identity() == recorded["nvrtc"] or pytestconfig.getoption("--record-budget"):
        assert found == limit
    else:  # another compiler allocates otherwise; it must not start to spill in earnest
        assert found["shared_bytes"] == limit["shared_bytes"]
        assert found["spill_bytes"] <= 2 * limit["spill_bytes"] + 64


def test_budget_covers_the_flagships_and_nothing_else(recorded):
    assert set(recorded["kernels"]) == set(FLAGSHIPS)
    for resources in recorded["kernels"].values():
        assert 0 < resources["registers"] <= 255
