"""Tuning on this GPU: kernels of every geometry agree, and a choice that is stored is what calls then take."""

import json

import pytest
import torch

import rwkv_jit
from rwkv_jit import bench, tune
from rwkv_jit.ops import boundary, choices
from rwkv_jit.ops.prepared import Geometry

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 0), reason="needs sm_80")
SHAPE = (1, 128, 4, 32)


@pytest.fixture(autouse=True)
def forget(fresh_service, monkeypatch):
    """Nothing is known of calls and choices before and after."""
    monkeypatch.setattr(choices, "SHIPPED", ())
    boundary._forget()
    choices._in_force.cache_clear()
    yield
    boundary._forget()
    choices._in_force.cache_clear()


def results():
    torch.manual_seed(0)
    given = bench.make_inputs("wkv7", SHAPE, torch.bfloat16)
    y, _ = rwkv_jit.wkv7(*given, decay="sigmoid")
    return [y, *torch.autograd.grad(y, given, torch.ones_like(y))]


def test_a_small_shape_is_tuned(run, monkeypatch):
    """Every candidate is compiled, launched, found right and timed; what is chosen depends on the GPU."""
    before = results()
    code, printed, said = run("tune", "--shape", ",".join(map(str, SHAPE)), "--json")
    assert (code, said) == (0, "")
    result = json.loads(printed)
    name, arch = choices.gpu(0)
    assert (result["gpu"], result["arch"], result["path"]) == (name, arch, str(choices.path()))
    assert [row["training"] for row in result["rows"]] == [True, False]
    for row in result["rows"]:
        assert row["dropped"] == []
        assert {each["direction"] for each in row["measured"]} >= {"forward"}
        assert all(each["ms"] > 0 for each in row["measured"])
        assert row["fastest"]["ms"] <= row["default"]["ms"]
    assert len(choices.listed()) == sum(row["chosen"] for row in result["rows"])
    assert all(not each.fault for each in choices.listed())

    monkeypatch.setattr(tune, "beats", lambda times, default: True)  # whatever is fastest is chosen
    run("tune", "--shape", ",".join(map(str, SHAPE)))
    boundary._forget()
    choices._in_force.cache_clear()
    assert len(choices.of(0)) == 2
    after = results()
    (known,) = boundary._known.values()
    taken = [getattr(known.options, field) for field in Geometry._fields]
    assert taken == list(choices.find(choices.of(0), "wkv7", 32, 32, True).geometry)
    for x, want in zip(after, before, strict=True):
        assert (x.float() - want.float()).norm() < tune.LARGEST_ERROR * want.float().norm()
