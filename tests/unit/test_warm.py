"""A fork of a process that has imported torch does what a Python does that begins there."""

import os
import signal
import subprocess
import time

import pytest
import warm

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork: without it Python just begins")
TELL = """
import json, os, sys, warnings
told = [sys.argv[1:], os.getcwd(), os.environ.get("TOLD"), __name__, sys.path[:2], sys.stdin.read()]
with warnings.catch_warnings(record=True) as said:
    warnings.warn("told")
print(json.dumps([*told, len(said), sorted({"rwkv_jit", "numpy.random"} & set(sys.modules))]))
"""


@pytest.fixture
def both(tmp_path, monkeypatch):
    """What Python does with these arguments, and what a fork does."""
    monkeypatch.setenv("TOLD", "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"), prepend=os.pathsep)

    def run(*arguments, **options):
        commands = [[*warm.python(*modules), *map(str, arguments)] for modules in ((), ("torch",))]
        return [subprocess.run(x, cwd=tmp_path, capture_output=True, text=True, **options) for x in commands]

    return run


@pytest.mark.parametrize("how", ["code", "script", "module"])
@pytest.mark.parametrize("flags", [(), ("-W", "ignore")], ids=" ".join)
def test_it_begins_as_python_does(how, flags, both, tmp_path):
    script = tmp_path / "inside" / "told.py"
    script.parent.mkdir()
    script.write_text(TELL)
    words = {"code": ("-c", TELL), "script": (script,), "module": ("-m", "inside.told")}[how]
    python, fork = both(*flags, *words, "-x", "y", input="read")
    assert (python.returncode, python.stderr) == (fork.returncode, fork.stderr) == (0, "")
    assert python.stdout == fork.stdout != ""


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import sys; print('out'); sys.exit(3)", 3), ("raise ValueError('wrong')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit; atexit.register(print, 'at the end')", 0), ("import sys; sys.exit('said')", 1),
    ],
)  # fmt: skip
def test_it_ends_as_python_does(code, ended, both):
    python, fork = both("-c", code)
    assert (python.returncode, fork.returncode) == (ended, ended)
    assert python.stdout == fork.stdout
    assert python.stderr.splitlines()[-1:] == fork.stderr.splitlines()[-1:]


def test_a_fork_ends_with_who_asked_for_it(start):
    asked = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)", after="torch")
    fork = int(asked.stdout.readline())
    assert fork != asked.pid
    asked.kill()
    for _ in range(6000):
        try:
            os.kill(fork, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the fork goes on")


def test_who_is_gone_before_it_is_served_harms_nobody(both):
    before = both("-c", "print(1)")
    for name, said in (("start", b"torch"), ("start", b""), ("torch", b""), ("torch", b"\n[")):
        with warm._connection(os.environ[warm.VARIABLE], name) as gone:
            gone.sendall(said)
    after = both("-c", "print(1)")
    assert [x.stdout for x in (*before, *after)] == ["1\n"] * 4


def test_without_a_process_that_forks_python_begins(both, monkeypatch):
    monkeypatch.delenv(warm.VARIABLE)
    _, fork = both("-c", "import sys; print('torch' in sys.modules)")
    assert fork.stdout == "False\n"


def test_torch_is_there(both):
    python, fork = both("-c", "import sys; print('torch' in sys.modules)")
    assert (python.stdout, fork.stdout) == ("False\n", "True\n")
