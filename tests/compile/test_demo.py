"""The demo without a GPU: it compiles every op, and its calls on the CPU are right."""

import itertools
import json

from rwkv_jit.ops.table import OPS

# Without a GPU, and of the two head sizes the one that nobody ships: half of the compiles.
DEMO = """
import sys
from rwkv_jit import cli, demo
demo.HEAD_SIZES = demo.HEAD_SIZES[1:]
sys.exit(cli.main(["demo", "--json"]))
"""


def test_demo_compiles_and_keeps_the_errors_small(child, fresh_service):
    done = child(DEMO, env={"CUDA_VISIBLE_DEVICES": ""})
    data = json.loads(done.stdout)
    kernels, calls = data["kernels"], data["calls"]
    assert {(k["op"], k["direction"]) for k in kernels} == set(itertools.product(OPS, ("forward", "backward")))
    assert all(k["registers"] > 0 for k in kernels)
    assert all(k["origins"] == ["compiled", "disk", "memory"] for k in kernels)
    own = {"timex": "tiles", "wkv4": "recurrent"}
    assert all(k["backend"] == own.get(k["op"], "chunked") for k in kernels)
    assert data["passed"]
    assert all(0 < c["error"] < 3e-3 and 0 < c["gradient_error"] < 3e-3 for c in calls)
    assert not list(fresh_service.glob("*/*.cubin"))
