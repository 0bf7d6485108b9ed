"""Options of the test run and what several tiers share."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Root ignores permission bits; a process without capabilities does not, and it can still read what root owns.
DROP_CAPABILITIES = """
import ctypes
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
"""
# What Windows does not have.
REMOVE_POSIX_NAMES = """
import os, sys
sys.modules["fcntl"] = None
for name in ("getuid", "O_NOFOLLOW"):
    delattr(os, name)
"""


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests marked full too")
    parser.addoption("--record-budget", action="store_true", help="write tests/compile/budget.json from this run")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full") or "full" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def root():
    """The checkout."""
    return ROOT


@pytest.fixture
def fresh_service(tmp_path, monkeypatch):
    """An empty cache of the test's own, and a process that has compiled and said nothing yet."""
    from rwkv_jit import compiler, cuda, env, kernel, stats, template

    for name in env.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    cache_dir = tmp_path / "cache"
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(cache_dir))

    def forget():
        kernel.forget()
        stats._said.clear()
        for cached in (compiler.identity, cuda.cupy, cuda.nvrtc, template._load):
            cached.cache_clear()

    forget()
    yield cache_dir
    monkeypatch.undo()
    forget()


@pytest.fixture
def own_templates(tmp_path, monkeypatch):
    """Makes the service read its templates from a copy, which is returned and may be changed."""
    from rwkv_jit import template

    copy = tmp_path / "templates"
    shutil.copytree(template.directory(), copy)
    monkeypatch.setattr(template, "directory", lambda: copy)
    template._load.cache_clear()
    return copy


@pytest.fixture
def child(tmp_path):
    """Runs Python code in another process that imports the same rwkv_jit; returns what it did."""
    import rwkv_jit

    package = Path(rwkv_jit.__file__).resolve().parents[1]

    def run(code, *arguments, unprivileged=False, without_posix=False, cwd=None, env=(), remove=(), check=True):
        prefix = (DROP_CAPABILITIES if unprivileged else "") + (REMOVE_POSIX_NAMES if without_posix else "")
        environment = {**os.environ, "PYTHONPATH": str(package), **dict(env)}
        for name in remove:
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-c", prefix + code, *map(str, arguments)],
            cwd=cwd or tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture
def read_only():
    """Takes the write permission of directories away until the test ends."""
    with contextlib.ExitStack() as restore:

        def protect(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o555)
            restore.callback(path.chmod, 0o755)
            return path

        yield protect


@pytest.fixture(scope="session")
def make_inputs():
    """Makes the tensors of a call, by name in the order of the signature; `low` and `high` bound the log-decay."""
    import torch

    def make(
        op, batch=2, tokens=5, heads=2, head_size=3, value_size=4, dtype=torch.float64, decay="raw",
        low=-2.0, high=-0.1, seed=0, requires_grad=True,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        shape = (batch, tokens, heads, head_size)
        log_decay = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
        w = {
            "raw": lambda g: torch.log(-g),
            "sigmoid": lambda g: torch.logit((-g / 0.6065306597126334).clamp(0.01, 0.99)),
            "log": lambda g: g,
            "direct": torch.exp,
        }[decay](log_decay)
        given = {"r": random(*shape), "w": w, "k": random(*shape), "v": random(batch, tokens, heads, value_size)}
        if op == "wkv6":
            given["u"] = random(heads, head_size)
        else:
            unit = torch.nn.functional.normalize(random(*shape), dim=-1)
            given["a"], given["b"] = -unit, unit * torch.rand(shape, generator=generator, dtype=torch.float64)
        order = "rkvwu" if op == "wkv6" else "rwkvab"
        return {name: given[name].to(dtype).requires_grad_(requires_grad) for name in order}

    return make


@pytest.fixture(scope="session")
def make_state():
    """Makes an initial state [sequences, heads, V, K], without `sequences` [heads, V, K]; K before V in layout kv."""
    import torch

    def make(sequences, heads=2, head_size=3, value_size=4, layout="vk", dtype=torch.float64, seed=1):
        sizes = (value_size, head_size) if layout == "vk" else (head_size, value_size)
        shape = (heads, *sizes) if sequences is None else (sequences, heads, *sizes)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return make
