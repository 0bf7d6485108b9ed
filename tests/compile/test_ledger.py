"""The ledger: its kernels keep to the limits, and what it says of other texts is not believed."""

import json
from types import SimpleNamespace

import ledger
import pytest

import rwkv_jit
from rwkv_jit.kernels import kernel, template

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) fill(float* x) {
    float a[SIZE];
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) a[i] = x[i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) x[i] = a[i] * a[SIZE - 1 - i];
}
"""


@pytest.fixture
def own(pytestconfig, monkeypatch):
    """The ledger of this run, as if it were empty and took no notes."""
    found = pytestconfig.pluginmanager.get_plugin("ledger")
    for name in ("known", "used"):
        monkeypatch.setattr(found, name, {"kernels": {}, "verdicts": {}})
    monkeypatch.setattr(found, "anew", set())
    for option in ("compiles_all", "records"):
        monkeypatch.setattr(found, option, False)
    return found


@pytest.fixture
def get(own, from_ledger):
    """Finds a kernel that this process does not have; returns what it takes."""

    def get(request):
        kernel.forget()
        rwkv_jit.clear_cache()
        return kernel.get(request).resources

    return get


# ---- the file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def text(pytestconfig):
    if pytestconfig.getoption("--record-ledger"):
        pytest.skip("this run writes another one")
    return ledger.FILE.read_text(encoding="utf-8")


@pytest.fixture
def kernels(text):
    return json.loads(text)["kernels"]


def test_kernels_keep_to_the_limits(kernels):
    for line, used in kernels.items():
        ledger.check_limits(line, used)


def test_every_limit_is_needed(kernels):
    """There are kernels that it is of, and one of them spills where it lets them."""
    for words, _, spills, why in ledger.LIMITS:
        found = [used for line, used in kernels.items() if ledger.fits(line, words)]
        most = max((each[1] for used in found for each in used.values()), default=-1)
        assert most >= 0, words
        assert why
        assert not spills or most > spills // 2, words


def test_file_is_as_a_run_writes_it(text):
    assert text == ledger.text_of(json.loads(text))
    assert len(text) < 1_250_000


# ---- kernels -----------------------------------------------------------------------------------------------------


def test_known_kernel_is_not_compiled_and_a_changed_one_is(own, get, tiny):
    (found,) = get(tiny()).values()
    (line,) = own.used["kernels"]
    assert line.startswith("tiny sm_90 ")
    assert own.anew == {line}
    own.known["kernels"][ledger.digest_in(line)] = {"fill": [99, 0, 7]}
    assert vars(get(tiny())["fill"]) == {"registers": 99, "spill_bytes": 0, "shared_bytes": 7}
    body = 'extern "C" __global__ void fill(float* x) { *x = SIZE; }\n'
    assert get(tiny(text=f"// what it does\n{body}"))["fill"].registers == 99
    others = tiny(text=body.replace("SIZE", "SIZE + 1")), tiny(size=2), tiny(arch="sm_80")
    for other in others:
        assert get(other)["fill"].registers == found.registers
    assert len(own.anew) == 1 + len(others)


def test_wrong_numbers_fail_where_all_is_compiled(own, get, tiny, monkeypatch):
    get(tiny())
    ((line, used),) = own.used["kernels"].items()
    monkeypatch.setattr(own, "compiles_all", True)
    own.known["kernels"][ledger.digest_in(line)] = used
    get(tiny())
    own.known["kernels"][ledger.digest_in(line)] = {"fill": [used["fill"][0] + 1, 0, 0]}
    with pytest.raises(AssertionError, match="the ledger says"):
        get(tiny())
    monkeypatch.setattr(own, "records", True)  # it is about to be written
    get(tiny())


def test_kernel_that_spills_fails_unless_it_is_named(own, get, tiny, monkeypatch):
    request = tiny(size=64, text=SPILLING)
    with pytest.raises(AssertionError, match="and may spill 0: tiny sm_90"):
        get(request)
    monkeypatch.setattr(own, "has_limits", False)  # as in tests that only --full runs
    get(request)
    monkeypatch.setattr(own, "has_limits", True)
    monkeypatch.setattr(ledger, "LIMITS", [("tiny sm_90 SIZE=64", 255, 1000, "")])
    assert 0 < get(request)["fill"].spill_bytes <= 1000
    monkeypatch.setattr(ledger, "LIMITS", [("tiny", 16, 1000, "")])
    with pytest.raises(AssertionError, match="and may take 16: tiny sm_90"):
        get(request)


def test_nobody_can_read_machine_code_that_no_compiler_made(get, tiny):
    get(tiny())
    with pytest.raises(AssertionError, match="no machine code"):
        kernel.get(tiny()).cubin  # noqa: B018


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_known_verdict_is_believed_until_something_changes(own, own_templates, monkeypatch):
    ran = []

    def run():
        ran.append("test")
        return {"sum_rows", "copy_states"}

    def ask(name="test"):
        ran.clear()
        own.passes(name, ledger.ROOT / "tests" / "compile" / "test_results.py", run)
        own.known["verdicts"] |= own.used["verdicts"]
        return len(ran)

    assert [ask(), ask()] == [1, 0]
    assert own.used["verdicts"]["test"].split()[1:] == ["copy_states", "sum_rows"]
    assert ask("another test") == 1
    own.known["verdicts"]["old test"] = "0123456789abcdef sum_rows gone"
    assert ask("old test") == 1
    for file, number in (("wkv7_segment.cu", 0), ("sum_rows.cu", 1), ("types.cuh", 1)):
        (path,) = own_templates.rglob(file)
        path.write_text(path.read_text(encoding="utf-8") + "constexpr int MORE = 1;\n", encoding="utf-8")
        template.library.cache_clear()
        assert [ask(), ask()] == [number, 0]
    monkeypatch.setattr(ledger, "digest_of_python", lambda file: "another")
    assert [ask(), ask()] == [1, 0]
    monkeypatch.setattr(own, "compiles_all", True)
    assert [ask(), ask()] == [1, 1]


def test_failed_verdict_is_none(own):
    def run():
        raise ValueError

    with pytest.raises(ValueError, match="^$"):
        own.passes("test", ledger.ROOT / "tests" / "compile" / "test_results.py", run)
    assert own.used["verdicts"] == {}


def test_verdict_covers_what_decides_it():
    tests = ledger.ROOT / "tests"
    fixtures = [tests / "compile" / "conftest.py"]
    rooms = [path for room in ledger.ROOMS for path in (ledger.ROOT / "rwkv_jit" / room).glob("*.py")]
    found = {
        path.relative_to(ledger.ROOT).as_posix()
        for path in ledger.closure([tests / "compile" / "test_results.py", *fixtures, *rooms])
    }
    assert {
        "tests/ptx_machine.py", "tests/ptx_instructions.py", "tests/ptx_text.py", "tests/gpu/comparing.py",
        "tests/derived_cases.py", "tests/unit/stub_driver.py", "rwkv_jit/plain/reference.py",
        "rwkv_jit/kernels/launch.py",
        "rwkv_jit/schedules/segments.py", "rwkv_jit/ops/wkv7.py", "rwkv_jit/schedules/layer_gradients.py",
    } <= found  # fmt: skip
    assert not [name for name in found if name.startswith(("rwkv_jit/compat", "rwkv_jit/bench", "tests/ledger"))]


# ---- writing it --------------------------------------------------------------------------------------------------


def of_run(tmp_path, monkeypatch, *arguments, **more):
    """The ledger of another run with these arguments, which has its file in a folder of the test."""
    monkeypatch.setattr(ledger, "FILE", tmp_path / "ledger.json")
    option = SimpleNamespace(**{"full": False, "keyword": "", "markexpr": "", **more})
    config = SimpleNamespace(getoption=lambda name: name == "--record-ledger", option=option, args=arguments)
    return ledger.Ledger(config)


def test_only_a_whole_run_that_passed_is_written_with_what_its_workers_used(tmp_path, monkeypatch):
    made = of_run(tmp_path, monkeypatch, str(ledger.ROOT / "tests" / "compile"))
    for number in (2, 1):
        part = {"kernels": {f"name {number}": {"f": [number, 0, 0]}}, "verdicts": {f"t{number}": "1 a"}, "anew": ["x"]}
        made.pytest_testnodedown(SimpleNamespace(workeroutput={"ledger": part}))
    made.pytest_testnodedown(SimpleNamespace())  # one that came to a sudden end
    assert made.anew == {"x"}
    run = SimpleNamespace(config=SimpleNamespace())
    made.pytest_sessionfinish(run, 1)
    assert not ledger.FILE.exists()
    made.pytest_sessionfinish(run, 0)
    assert ledger.FILE.read_text(encoding="utf-8").splitlines() == [
        "{", '"kernels": {', '"name 1": {"f":[1,0,0]},', '"name 2": {"f":[2,0,0]}', "},",
        '"verdicts": {', '"t1": "1 a",', '"t2": "1 a"', "}", "}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "more"),
    [("tests/compile/test_ledger.py", {}), ("tests/unit", {}), ("tests", {"full": True}), ("tests", {"keyword": "x"})],
)
def test_part_of_the_tier_is_not_written(argument, more, tmp_path, monkeypatch):
    with pytest.raises(pytest.UsageError, match="is for all of the tier"):
        of_run(tmp_path, monkeypatch, str(ledger.ROOT / argument), **more)
