"""Registers, spills and shared memory of the flagship kernels against what was recorded.

``pytest tests/compile --record-budget`` records them anew.
"""

import json
from pathlib import Path

import pytest
import torch

import rwkv_jit
from rwkv_jit import identity

BUDGET = Path(__file__).with_name("budget.json")
KINDS = {
    "wkv6": {"op": "wkv6", "head_size": 64, "backend": "recurrent"},
    "wkv7": {"op": "wkv7", "head_size": 64, "backend": "recurrent"},
    "wkv7_chunked": {"op": "wkv7", "head_size": 64, "backend": "chunked", "decay": "sigmoid"},
    "wkv7_chunked_128": {"op": "wkv7", "head_size": 128, "backend": "chunked", "decay": "sigmoid"},
}
FLAGSHIPS = [(kind, direction) for kind in KINDS for direction in ("forward", "backward")]


def used(kind, direction):
    kernel = rwkv_jit.specialize(**KINDS[kind], dtype=torch.bfloat16, arch="sm_90", direction=direction)
    return {name: getattr(kernel, name) for name in ("registers", "spill_bytes", "shared_bytes")}


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


@pytest.mark.parametrize(("kind", "direction"), FLAGSHIPS)
def test_flagship_kernel_takes_what_was_recorded(kind, direction, recorded, pytestconfig):
    found, name = used(kind, direction), f"{kind}_{direction}"
    if pytestconfig.getoption("--record-budget"):
        recorded["kernels"][name] = found
    limit = recorded["kernels"][name]
    if identity.identity() == recorded["nvrtc"] or pytestconfig.getoption("--record-budget"):
        assert found == limit
    else:  # another compiler allocates otherwise; it must not start to spill in earnest
        assert found["shared_bytes"] == limit["shared_bytes"]
        assert found["spill_bytes"] <= 2 * limit["spill_bytes"] + 64


def test_budget_covers_the_flagships_and_nothing_else(recorded):
    assert set(recorded["kernels"]) == {f"{kind}_{direction}" for kind, direction in FLAGSHIPS}
    for kernel in recorded["kernels"].values():
        assert 0 < kernel["registers"] <= 255
