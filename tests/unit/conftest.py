"""Every test of this tier has a cache of its own, and no CuPy; none depends on how fast a machine is."""

import gc
import os
import runpy
import sys
from pathlib import Path

import hypothesis
import pytest
from stub_driver import gpus, on_gpu  # noqa: F401, fixtures of this tier

# A machine that has more to do is no fault.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")
WITHOUT_CUPY = Path(__file__).with_name("without_cupy")
NO_CUPY = runpy.run_path(str(WITHOUT_CUPY / "sitecustomize.py"))["NoCupy"]
sys.meta_path.remove(NO_CUPY)  # other tiers are collected in this process too


@pytest.fixture(autouse=True)
def _fresh_service(fresh_service):
    """Nothing is shared with the test before."""


@pytest.fixture(scope="module", autouse=True)
def _without_cupy():
    """The tier says the same where CuPy is installed and where it is not: neither a test nor its processes have it.

    A test that needs more of CuPy than a stub belongs to tests/compile.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("cupy")]:
            patch.delitem(sys.modules, name)  # of a test of another tier in this process
        patch.setenv("PYTHONPATH", str(WITHOUT_CUPY), prepend=os.pathsep)
        sys.meta_path.insert(0, NO_CUPY)
        yield
        sys.meta_path.remove(NO_CUPY)


@pytest.fixture(scope="module", autouse=True)
def _nothing_to_look_through():
    """What a module leaves stays: each collection of garbage in a later one would look through all of it.

    In a process that has run a few thousand tests one takes a second, and `bench` collects before each row.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_values(on_gpu, monkeypatch):  # noqa: F811
    """Random tensors on the GPU are zeros, for tests of what is launched alone: filling them is most of their time."""
    import random_calls
    import torch

    for name in ("randn", "rand"):
        monkeypatch.setattr(torch, name, torch.zeros)
    monkeypatch.setattr(random_calls, "DEVICE", "cpu")  # where all say that they are on a GPU


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """CPU tensors are taken for those of an sm_90; a trace could not go into the question which one it is."""
    import torch

    from rwkv_jit.call import checks, tensors, torch_op

    def answered(answer):
        def ask(device):
            torch._dynamo.graph_break()
            return answer

        return ask

    gpu = answered(("sm_90", (), 132))
    gpu._dynamo_marked_constant = tensors._gpu._dynamo_marked_constant
    monkeypatch.setattr(tensors, "_gpu", gpu)
    monkeypatch.setattr(tensors, "_capability", answered("sm_90"))
    monkeypatch.setattr(torch.cuda, "get_device_name", answered("a GPU"))
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 132)
    for module in (torch_op, checks):
        monkeypatch.setattr(module, "is_for_kernels", lambda backend, like: backend != "reference")
