"""Every test of this tier has a cache of its own."""

import os
import pickle
from hashlib import sha256

import pytest

from rwkv_jit import compiler


@pytest.fixture(autouse=True)
def _fresh_service(fresh_service):
    """Nothing is shared with the test before."""


@pytest.fixture
def compiled_once(monkeypatch, tmp_path_factory):
    """What NVRTC made of a source in this run, it need not make again: for tests that are about which kernels."""
    root = tmp_path_factory.getbasetemp()
    made = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "compiled"  # which the workers share
    made.mkdir(exist_ok=True)
    run = compiler._run

    def remembered(rendered, target, parameters):
        file = made / sha256(repr((rendered, target, compiler.options(target))).encode()).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        found = run(rendered, target, parameters)
        part = file.with_suffix(f".{os.urandom(8).hex()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(file)
        return found

    monkeypatch.setattr(compiler, "_run", remembered)
