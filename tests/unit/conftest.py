"""Every test of this tier has a cache of its own, and no CuPy."""

import os
import runpy
import sys
from pathlib import Path

import pytest
from stub_driver import gpus, on_gpu  # noqa: F401, fixtures of this tier

WITHOUT_CUPY = Path(__file__).with_name("without_cupy")


@pytest.fixture(autouse=True)
def _fresh_service(fresh_service):
    """Nothing is shared with the test before."""


@pytest.fixture(autouse=True)
def _without_cupy(monkeypatch):
    """The tier says the same where CuPy is installed and where it is not: neither a test nor its processes have it.

    A test that needs more of CuPy than a stub belongs to tests/compile.
    """
    for name in [name for name in sys.modules if name.startswith("cupy")]:
        monkeypatch.delitem(sys.modules, name)  # of a test of another tier in this process
    monkeypatch.setenv("PYTHONPATH", str(WITHOUT_CUPY), prepend=os.pathsep)
    finder = runpy.run_path(str(WITHOUT_CUPY / "sitecustomize.py"))["NoCupy"]
    yield
    sys.meta_path.remove(finder)
