"""What calls launch on five architectures is what tests/launches.json says: each change of it is looked at.

``pytest -n 0 tests/unit/test_launches.py --record-launches`` writes it anew.
"""

import difflib
import json
from pathlib import Path

import launch_calls
import pytest

from rwkv_jit.kernels import signatures

RECORD = Path(__file__).parents[1] / "launches.json"


@pytest.fixture(scope="module")
def record(pytestconfig):
    """What is recorded, by the kind of a call; where it is recorded anew, it is written at the end."""
    is_anew = pytestconfig.getoption("--record-launches")
    found = {} if is_anew else json.loads(RECORD.read_text(encoding="utf-8"))
    yield found
    if is_anew:
        RECORD.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("op", "verb"), launch_calls.KINDS)
def test_launches_are_those_that_were_recorded(op, verb, record, on_gpu, without_values, pytestconfig):
    found = {}
    for call in launch_calls.of(op, verb):
        assert call.name not in found
        several = found[call.name] = {}
        for arch in launch_calls.ARCHS:
            on_gpu.use(arch)
            signatures.forget()
            on_gpu.order.clear()
            call.run()
            several.setdefault("\n".join(launch_calls.lines(on_gpu.order)), []).append(arch)
        found[call.name] = {
            " ".join(archs) if len(several) > 1 else "all": text.split("\n") for text, archs in several.items()
        }
    if pytestconfig.getoption("--record-launches"):
        record[f"{op} {verb}"] = found
    before, now = (json.dumps(several, indent=0).splitlines() for several in (record[f"{op} {verb}"], found))
    changes = "\n".join(difflib.unified_diff(before, now, "recorded", "found", lineterm="", n=6))
    assert not changes, changes
