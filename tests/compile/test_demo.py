"""The demo without a GPU: it compiles every op, and its calls on the CPU are right."""

import itertools
import json

import pytest
import torch

from rwkv_jit.desk import demo
from rwkv_jit.schedules.table import ALL as OPS


@pytest.mark.usefixtures("from_ledger")
def test_demo_compiles_and_keeps_the_errors_small(run, fresh_service, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "HEAD_SIZE", 16)
    monkeypatch.setattr(demo, "ODD", {})
    code, printed, _ = run("demo", "--json")
    data = json.loads(printed)
    kernels, calls = data["kernels"], data["calls"]
    assert {(k["op"], k["direction"]) for k in kernels} == set(itertools.product(OPS, ("forward", "backward")))
    assert all(k["registers"] > 0 for k in kernels)
    assert all(k["origins"] == ["compiled", "disk", "memory"] for k in kernels)
    with_decays_of_heads = ("delta_rule", "gated_delta_rule", "simple_gla", "ssd")
    own = {"timex": "tiles", "wkv4": "recurrent", **dict.fromkeys(with_decays_of_heads, "dedicated")}
    assert all(k["backend"] == own.get(k["op"], "chunked") for k in kernels)
    assert code == 0
    assert data["passed"]
    assert all(0 < c["error"] < c["limit"] and 0 < c["gradient_error"] < c["limit"] for c in calls)
    assert not list(fresh_service.glob("*/*.cubin"))
