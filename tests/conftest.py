"""Options of the test run and what several tiers share."""

import contextlib
import functools
import gc
import itertools
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import images
import ledger
import pytest
import warm

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for the folder `bench`; behind all others, so that an installed rwkv_jit is the one tested

# Workers take the cores. torch's threads would share them, and wait for each other for most of the time. Without
# workers too: the tensors of the tests are small, and a machine has more to do than these.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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


def pytest_xdist_auto_num_workers():
    """No more than four, each of which imports torch; ``-n`` with a number has as many."""
    return min(os.cpu_count() or 1, 4)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests marked full too")
    parser.addoption("--record-api", action="store_true", help="write tests/api.txt from this run")
    parser.addoption("--record-launches", action="store_true", help="write tests/launches.json from this run")
    parser.addoption("--record-ledger", action="store_true", help="write tests/compile/ledger.json from this run")
    parser.addoption("--compile-all", action="store_true", help="compile what the ledger knows too, and compare")
    parser.addoption("--seed", type=int, metavar="N", help="repeat the random inputs that tests/gpu had with this seed")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:
        config.option.seed = secrets.randbelow(2**32)
    if not hasattr(config, "workerinput") and warm.VARIABLE not in os.environ:
        config.add_cleanup(warm.start())
    config.pluginmanager.register(ledger.Ledger(config), "ledger")
    logging.getLogger().addHandler(logging.NullHandler())  # what nobody takes would be printed among what tests read
    # What the package or a test is warned of is a fault of ours; other packages may warn themselves.
    config.addinivalue_line("filterwarnings", r"error::UserWarning:(rwkv_jit|tests)\b")
    config.addinivalue_line(
        "filterwarnings", "ignore:.* is read as .batch, tokens, heads:UserWarning"
    )  # many have few tokens


def pytest_configure_node(node):
    """Give a worker of pytest-xdist the seed of the run: it would draw one of its own."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full") or "full" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nearly all that is imported and made here stays: it need not be looked at for garbage time and again.

    Nor does much of what tests import and compile, which Python would look through after any 700 new objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_report_header(config):
    return f"tests/gpu: random inputs of --seed {config.option.seed}"


def pytest_terminal_summary(terminalreporter):
    """Say whether kernels have run: a log of a machine without a GPU looks like any other."""
    import torch

    ran = {
        report.nodeid
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.nodeid.startswith("tests/gpu/")
    }
    if ran:
        text = f"{len(ran)} tests ran on {torch.cuda.get_device_name()}"
    else:
        text = "not run, " + ("none was chosen" if torch.cuda.is_available() else "no GPU")
    terminalreporter.write_line(f"tests/gpu: {text}")


@pytest.fixture
def root():
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def temporaries(tmp_path_factory):
    """Folders, each for one test. `mktemp` would look at all that are there, and they are thousands."""
    root = tmp_path_factory.mktemp("temporaries")
    return (root / str(number) for number in itertools.count())


@pytest.fixture
def fresh_service(temporaries, monkeypatch):
    """An empty cache and locks of the test's own, and a process that has compiled, counted and said nothing yet."""
    from rwkv_jit.kernels import cuda, env, identity, kernel, stats
    from rwkv_jit.kernels.cache import installed

    for name in env.DESCRIPTIONS:
        monkeypatch.delenv(name, raising=False)
    folder = next(temporaries)
    cache_dir, temporary = folder / "cache", folder / "tmp"
    temporary.mkdir(0o700, parents=True)
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(cache_dir))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(stats, "_counters", dict(stats.COUNTERS))
    monkeypatch.setattr(stats, "_hooks", {})
    monkeypatch.setattr(installed, "_left_aside", True)  # whatever wheels of kernels this environment has

    def forget():
        kernel.forget()  # and what the cache remembers
        stats._said.clear()
        identity._assumed.clear()
        for cached in (identity.identity, cuda._layer, cuda.nvrtc):
            cached.cache_clear()

    forget()
    yield cache_dir
    kernel._process.workers.waiting.clear()  # what nobody has waited for must not run into the next test
    kernel._process.workers.finish()
    monkeypatch.undo()
    forget()


class Logged(logging.Handler):
    """What is logged meanwhile, with the names that pytest's plugin has."""

    def __init__(self):
        super().__init__()
        self.records, self.emit = (records := []), records.append

    @property
    def messages(self):
        return [x.getMessage() for x in self.records]

    @property
    def text(self):
        return "\n".join(map(self.format, self.records))

    @contextlib.contextmanager
    def at_level(self, level, logger=None):
        logger = logging.getLogger(logger)
        before = logger.level
        logger.setLevel(level)
        yield
        logger.setLevel(before)


@pytest.fixture
def caplog():
    """That of pytest's plugin looks through all loggers that there are, thrice a test, as long as a short one takes."""
    root, logged = logging.getLogger(), Logged()
    root.addHandler(logged)
    yield logged
    root.removeHandler(logged)


@pytest.fixture
def nothing_known():
    """No call has come before, and none of this test comes before another."""
    from rwkv_jit.kernels import signatures

    signatures.forget()
    yield
    signatures.forget()


@pytest.fixture
def own_templates(tmp_path, monkeypatch):
    """Makes the service read its templates from a copy, which is returned and may be changed."""
    from rwkv_jit.kernels import template

    copy = tmp_path / "templates"
    shutil.copytree(template.directory(), copy)
    with monkeypatch.context() as patch:
        patch.setattr(template, "directory", lambda: copy)
        template.library.cache_clear()
        yield copy
    template.library.cache_clear()


@pytest.fixture
def tiny(tmp_path):
    """Makes requests for a kernel of one line, which compiles in no time."""
    from rwkv_jit.kernels import kernel, template

    def make(size=1, arch="sm_90", name="tiny", text='extern "C" __global__ void fill(float* x) { *x = SIZE; }\n'):
        path = tmp_path / f"{name}.cu"
        path.write_text(text, encoding="utf-8")
        return kernel.Request(template.read(path), {"SIZE": size}, arch)

    return make


@pytest.fixture
def make_entry():
    """Makes name and bytes of an entry, and what it holds; numbers tell entries apart."""
    from rwkv_jit.kernels import cache

    def make(number=0, size=100, name="made_up", arch="sm_90", compiler="12.9 0123abcd"):
        digest = sha256(f"{number} {name} {arch} {compiler}".encode()).hexdigest()
        code = images.image(number.to_bytes(4, "little") * (size // 4), arch)
        compiled = cache.Compiled(code, arch, {name: cache.Resources(32, 0, 64)})
        about = {"name": name, "arch": arch, "compiler": compiler, "parameters": {"NUMBER": number}}
        return cache.file_name(name, arch, digest), cache.pack(digest, compiled, about), compiled, digest

    return make


@pytest.fixture
def start(tmp_path):
    """Starts Python code in another process that imports the same rwkv_jit; it is killed where it outlives the test.

    `after` names modules that are imported before: where the test is not about their import, that takes no time.
    """
    import rwkv_jit

    package = str(Path(rwkv_jit.__file__).resolve().parents[1])
    with contextlib.ExitStack() as started:

        def start(code, *arguments, after="", unprivileged=False, without_posix=False, cwd=None, env=(), remove=()):
            prefix = (DROP_CAPABILITIES if unprivileged else "") + (REMOVE_POSIX_NAMES if without_posix else "")
            paths = os.pathsep.join(filter(None, [package, str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": paths, **dict(env)}
            for name in remove:
                environment.pop(name, None)
            process = subprocess.Popen(
                [*warm.python(*after.split()), "-c", prefix + code, *map(str, arguments)],
                cwd=cwd or tmp_path,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


@pytest.fixture
def child(start):
    """Runs Python code as `start` does, to its end; returns what it did."""

    def run(code, *arguments, check=True, **options):
        process = start(code, *arguments, **options)
        output, errors = process.communicate(timeout=300)
        if check:
            assert process.returncode == 0, errors
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run


@pytest.fixture
def give_away():
    """Makes a file or directory another user's."""
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root can give files away")
    return lambda path: os.chown(path, 54321, 54321)


@pytest.fixture
def run_main(capsys):
    """Runs a program's main function in this process; returns its exit code, what it printed and what it said."""

    def run_main(main, *arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        printed, said = capsys.readouterr()
        return code, printed, said

    return run_main


@pytest.fixture
def run(run_main):
    """Runs a command of `rwkv-jit` in this process; returns its exit code, what it printed and what it said."""
    from rwkv_jit.desk import cli

    return functools.partial(run_main, cli.main)


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
        op, batch=2, tokens=5, heads=2, head_size=3, value_size=4, dtype=torch.float64, decay=None,
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
            "none": lambda g: g,
        }[decay or {"gla": "log"}.get(op, "raw")](log_decay)
        r, k, v = random(*shape), random(*shape), random(batch, tokens, heads, value_size)
        u, unit = random(heads, head_size), torch.nn.functional.normalize(random(*shape), dim=-1)
        kept = torch.rand(shape, generator=generator, dtype=torch.float64)
        constant = w.new_ones(heads, head_size) * (w[0, 0] if batch * tokens else -0.5)
        given = {
            "wkv5": {"r": r, "k": k, "v": v, "w": constant, "u": u},
            "wkv6": {"r": r, "k": k, "v": v, "w": w, "u": u},
            "wkv7": {"r": r, "w": w, "k": k, "v": v, "a": -unit, "b": unit * kept},
            "gla": {"q": r, "k": k, "v": v, "g": w},
            "linear_attention": {"q": r, "k": k, "v": v},
        }[op]
        return {name: x.to(dtype).requires_grad_(requires_grad) for name, x in given.items()}

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
