"""GPU tests: left out where torch sees no GPU; `--record` writes record.json from the run; `--seed` repeats inputs."""

import importlib.util
import json
import os
import platform
import random
import sys
from hashlib import sha256
from pathlib import Path

import numpy
import pytest
import torch

_spec = importlib.util.spec_from_file_location("gpu_record", Path(__file__).with_name("record.py"))
record = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(record)

HAS_GPU = torch.cuda.is_available()
collect_ignore_glob = [] if HAS_GPU else ["test_*.py"]
_outcomes = {op: {} for op in record.OPS}  # by test
_tests = {op: set() for op in record.OPS}  # all that there are
_sent = []  # whether a worker's are on their way to the process that has the workers: with its first report


def pytest_addoption(parser):
    parser.addoption(
        "--record", action="store_true",
        help="write tests/gpu/record.json from this run; where the last one was of the same sources, what it lacked "
        "and passes now is taken off",
    )  # fmt: skip
    parser.addoption(
        "--due", action="store_true",
        help="only the tests that tests/gpu/record.json lacks: all of an op whose sources changed, else what failed or "
        "did not run",
    )  # fmt: skip


def pytest_collection_modifyitems(config, items):
    for item in items:
        if _op_of(item) in _tests:
            _tests[_op_of(item)].add(item.nodeid)
    if not config.getoption("--due"):
        return
    sections, due = _recorded()["ops"], []
    digests = {op: record.digest(op) for op in record.OPS}
    for item in items:
        op = _op_of(item)
        if op in digests and record.is_due(item.nodeid, digests[op], sections.get(op)):
            due.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in due])
    items[:] = due


def _op_of(item):
    return item.callspec.params.get("op") if hasattr(item, "callspec") else None


def _recorded():
    return json.loads(record.RECORD.read_text(encoding="utf-8")) if record.RECORD.exists() else {"ops": {}}


def pytest_report_header():
    return "tests/gpu: " + (torch.cuda.get_device_name() if HAS_GPU else "left out, torch sees no GPU")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    op = _op_of(item)
    if op:
        report.user_properties.append(("op", op))
    if not _sent and hasattr(item.config, "workerinput"):
        _sent.append(True)
        report.user_properties.append(("tests", {op: [*names] for op, names in _tests.items()}))
    if report.failed:
        report.sections.append(("Random inputs", f"rerun with --seed {item.config.option.seed}"))


def pytest_runtest_logreport(report):
    properties = dict(report.user_properties)
    for name, tests in properties.get("tests", {}).items():
        _tests[name].update(tests)
    op = properties.get("op")
    if op in _outcomes and (report.when == "call" or report.outcome != "passed"):
        _outcomes[op][report.nodeid] = report.outcome


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Write the record, before the workers end: who waits for that may be interrupted."""
    config = session.config
    # Of a part of the folder nobody knows what else there is.
    is_whole = any(Path(__file__).is_relative_to(Path(x).resolve()) for x in config.args)
    if not (config.getoption("--record") and is_whole and HAS_GPU) or hasattr(config, "workerinput"):
        return
    from rwkv_jit.desk import versions

    sections = dict(_recorded()["ops"])
    for op, outcomes in _outcomes.items():
        if outcomes and _tests[op]:
            sections[op] = record.section(record.digest(op), outcomes, _tests[op], sections.get(op))
    report = versions.env_report()
    totals = {name: sum(section[name] for section in sections.values()) for name in ("passed", "skipped")}
    written = {
        **totals,
        "gpu": report["gpus"][0],
        "driver": _driver_version(),
        "versions": {
            "python": platform.python_version(),
            **{k: report[k] for k in ("torch", "torch_cuda", "cupy", "nvrtc")},
        },
        "ops": dict(sorted(sections.items())),
    }
    record.RECORD.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _driver_version():
    import subprocess

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()


@pytest.fixture(autouse=True)
def seed(request):
    """The seed of all that this test draws at random, from `--seed` and its name: alone it draws the same numbers."""
    text = f"{request.config.option.seed} {request.node.nodeid}"
    derived = int.from_bytes(sha256(text.encode()).digest()[:4], "little")  # numpy takes no more bits
    random.seed(derived)
    numpy.random.seed(derived)
    torch.manual_seed(derived)
    return derived


@pytest.fixture(autouse=True)
def forget_graphs():
    """Many tests compile one function, which torch.compile does a few times only in one process."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def most_of_the_memory(tmp_path_factory):
    """One test at a time that needs it, of all workers."""
    import fcntl

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which the workers share
    with (root / "memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


BAND = 1024
SENTINEL = 7


@pytest.fixture
def guarded_memory(monkeypatch):
    """New tensors of the call under test are full of NaN and have a band behind them that must stay as it is."""
    from rwkv_jit.call import tensors

    bands = []
    empty = torch.empty

    def guarded(*size, dtype=None, device=None, **more):
        plain = empty(*size, dtype=dtype, device="meta", **more)
        nan = float("nan") if plain.is_floating_point() else 255  # bytes that make a NaN of any float
        flat = torch.full((plain.numel() + BAND,), nan, dtype=plain.dtype, device=device)
        flat[plain.numel() :] = SENTINEL
        bands.append(flat[plain.numel() :])
        return flat[: plain.numel()].view(plain.shape)

    def guarded_like(x, dtype=None, memory_format=None):
        assert memory_format is torch.contiguous_format or x.is_contiguous()
        return guarded(x.shape, dtype=dtype or x.dtype, device=x.device)

    def new(shape, strides, dtype):
        made = guarded(*shape, dtype=dtype, device="cuda")
        assert made.stride() == strides
        return made

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", guarded_like)
    monkeypatch.setattr(tensors, "new", new)
    yield
    monkeypatch.undo()
    torch.cuda.synchronize()
    assert bands
    assert all(bool((band == SENTINEL).all()) for band in bands)


@pytest.fixture
def launched(nothing_known, monkeypatch):
    """The kernels that were launched, in their order, each with its name, target and parameters."""
    from rwkv_jit.kernels import launch

    seen, run = [], launch.Launches.launch

    def watched(known, *given):
        seen.extend(step.kernel for step in known.steps if isinstance(step, launch.Launch))
        run(known, *given)

    monkeypatch.setattr(launch.Launches, "launch", watched)
    return seen


@pytest.fixture
def short_segments(monkeypatch):
    """Large heads are cut from 3072 tokens on, for which the reference does not take long."""
    from rwkv_jit.schedules import segments

    monkeypatch.setitem(segments._LENGTHS, "large", segments._LENGTHS["large"]._replace(least=384))


@pytest.fixture
def problems(nothing_known):
    """Returns the problems of the calls that were made, in their order: which algorithm, and how it is cut."""
    from rwkv_jit.call import prepared

    return lambda: [known.problem for known in prepared.calls.values()]
