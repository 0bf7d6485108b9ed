"""Tuning on this GPU: kernels of every geometry agree, and a choice that is stored is what calls then take."""

import json

import pytest
import torch

from rwkv_jit.call import prepared, tuned
from rwkv_jit.call.tuned import Geometry
from rwkv_jit.desk import inputs, tune
from rwkv_jit.kernels import signatures
from rwkv_jit.schedules.table import OPS

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 0), reason="needs sm_80")
SHAPE = (1, 128, 4, 32)


@pytest.fixture(autouse=True)
def forget(fresh_service, nothing_known, monkeypatch):
    """Nothing is known of calls and choices before and after."""
    monkeypatch.setattr(tuned, "SHIPPED", ())
    tuned._own.cache_clear()
    yield
    tuned._own.cache_clear()


def results(op, seed):
    torch.manual_seed(seed)  # again, for the same inputs
    given = inputs.make_inputs(op, SHAPE, torch.bfloat16)
    y, _ = inputs.OPS[op](*given, **inputs.OPTIONS.get(op, {}))
    gradients = torch.autograd.grad(y, given, torch.randn_like(y))
    return {"y": y.detach(), **{f"d{name}": x for name, x in zip(OPS[op].public_names, gradients, strict=True)}}


@pytest.mark.parametrize("op", sorted(tuned.CHUNKS))
def test_a_small_shape_is_tuned(op, seed, run, monkeypatch):
    """Every candidate is compiled, launched, found right and timed; what is chosen depends on the GPU."""
    before = results(op, seed)
    arguments = ("tune", "--op", op, "--shape", ",".join(map(str, SHAPE)))
    code, printed, said = run(*arguments, "--json")
    assert (code, said) == (0, "")
    result = json.loads(printed)
    name, arch = tuned.gpu(0)
    assert (result["gpu"], result["arch"], result["path"]) == (name, arch, str(tuned.path()))
    assert [(row["op"], row["training"]) for row in result["rows"]] == [(op, True), (op, False)]
    for row in result["rows"]:
        assert row["dropped"] == []
        assert {each["direction"] for each in row["measured"]} >= {"forward"}
        assert all(each["ms"] > 0 for each in row["measured"])
        assert row["fastest"]["ms"] <= row["default"]["ms"]
    assert len(tuned.listed()) == sum(row["chosen"] for row in result["rows"])
    assert all(not each.fault for each in tuned.listed())

    monkeypatch.setattr(tune, "beats", lambda times, default: True)  # whatever is fastest is chosen
    run(*arguments)
    signatures.forget()
    tuned._own.cache_clear()
    assert len(tuned.on_device(0)) == 2
    after = results(op, seed)
    (known,) = prepared.calls.values()
    (place,) = tuned.find(tuned.on_device(0), op, 32, 32, True)
    taken = [getattr(known.problem, field) for field in Geometry._fields]
    assert taken == list(tuned.on_device(0)[place].geometry)
    assert tune._error(op, after, before) < tune.LARGEST_ERROR
