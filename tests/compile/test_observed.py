"""What the service tells of itself: counters, hooks, messages, kept sources and line numbers."""

import _thread
import contextlib
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from rwkv_jit.desk import demo
from rwkv_jit.kernels import cache, compiler, cuda, identity, kernel, stats
from rwkv_jit.kernels.cache import bundle, lock
from rwkv_jit.kernels.errors import CompileError, NvrtcNotFoundError
from rwkv_jit.kernels.template import Template, read

BROKEN = '#include "types.cuh"\nextern "C" __global__ void fill(float* x) {\n    *x = SIZE + missing;\n}\n'

RULE = 'static_assert(SIZE > 9, "size must be more than 9");\n'


def counts(*names):
    found = stats.snapshot()
    return [found[name] for name in names]


# ---- counters ----------------------------------------------------------------------------------------------------


def test_counters_of_a_scripted_run_are_exact(tiny, tmp_path, monkeypatch, fresh_service):
    one, two, three, four = (tiny(size) for size in range(4))
    shared, bundled = tmp_path / "shared", tmp_path / "kernels.bundle"
    made = {size: kernel.get(request) for size, request in enumerate((one, two, three))}
    sizes = {size: len(each.entry()[1]) for size, each in made.items()}
    assert counts("compiled", "bytes_written", "bytes_read") == [3, sum(sizes.values()), 0]
    assert counts("compile_seconds") == [pytest.approx(sum(each.compile_seconds for each in made.values()))]
    (shared / "sm_90").mkdir(parents=True)
    (fresh_service / made[1].entry()[0]).rename(shared / made[1].entry()[0])
    bundle.write(bundled, [made[2].entry()])
    (fresh_service / made[2].entry()[0]).unlink()
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join([str(shared), str(bundled)]))
    kernel.forget()
    origins = [kernel.get(request).origin for request in (one, two, three, four, one, one, two, three, four)]
    assert origins == ["disk", "shared", "bundle", "compiled", *["memory"] * 5]
    assert counts("compiled", "disk", "shared", "bundle", "memory") == [4, 1, 1, 1, 5]
    assert counts("bytes_read") == [sum(sizes.values())]
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", "0")
    kernel.forget()
    kernel.get(tiny(5))
    assert counts("evictions", "wait_seconds") == [2, 0]


def test_what_fails_is_not_counted(tiny):
    with pytest.raises(CompileError):
        kernel.get(tiny(text=BROKEN))
    assert not any(stats.snapshot().values())


# ---- hooks -------------------------------------------------------------------------------------------------------


def test_hook_is_told_of_every_kernel(tiny):
    events = []
    remove = stats.add_hook(events.append)
    made = kernel.get(tiny(7))
    kernel.get(tiny(7))
    kernel.forget()
    kernel.get(tiny(7))
    remove()
    kernel.get(tiny(7))
    same = {"name": "tiny", "arch": "sm_90", "parameters": {"SIZE": 7}}
    assert events == [
        {"origin": "compiled", "compile_seconds": made.compile_seconds, **same},
        {"origin": "memory", "compile_seconds": made.compile_seconds, **same},
        {"origin": "disk", "compile_seconds": 0.0, **same},
    ]


def test_hook_that_raises_reaches_the_caller_and_loses_no_kernel(tiny):
    def broken(event):
        raise RuntimeError("hook")

    remove = stats.add_hook(broken)
    with pytest.raises(RuntimeError, match="hook"):
        kernel.get(tiny())
    assert len(cache.entries()) == 1
    remove()
    assert kernel.get(tiny()).origin == "memory"
    assert counts("compiled", "memory") == [1, 1]


# ---- messages ----------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_compiler(monkeypatch, caplog):
    """A compile that ends when something has been said."""
    compile = compiler.compile

    def slow(*arguments):
        for _ in range(60_000):
            if caplog.messages:
                break
            threading.Event().wait(0.001)
        return compile(*arguments)

    monkeypatch.setattr(stats, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(compiler, "compile", slow)


@pytest.mark.parametrize(
    ("place", "said"),
    [("lasting", "; later processes find it in {}"), ("off", "; the cache on disk is off"), ("temporary", "")],
)
def test_slow_compile_is_one_line_that_says_where_the_kernel_will_be(
    place, said, slow_compiler, tiny, caplog, monkeypatch, fresh_service
):
    monkeypatch.setenv("RWKVJIT_CACHE", "0" if place == "off" else "1")
    with demo.empty_cache() if place == "temporary" else contextlib.nullcontext():
        kernel.get(tiny())
    assert caplog.messages == [f"compiling tiny for sm_90{said.format(fresh_service)}"]


def test_quick_compile_is_silent_but_for_one_line_of_information(tiny, caplog, monkeypatch):
    monkeypatch.setattr(stats, "_QUIET_SECONDS", 600)
    threads = _thread._count()
    with caplog.at_level(logging.INFO, logger="rwkv_jit"):
        made = kernel.get(tiny())
        kernel.get(tiny())
        kernel.forget()
        kernel.get(tiny())
    assert caplog.messages == [f"compiled tiny for sm_90 in {1e3 * made.compile_seconds:.0f} ms"]
    for _ in range(3000):  # what would speak of it may not have ended yet
        if _thread._count() <= threads:  # one of a test before may have ended
            break
        time.sleep(0.01)
    assert _thread._count() <= threads


# ---- kept sources ------------------------------------------------------------------------------------------------


def run(command):
    return subprocess.run(shlex.split(command), capture_output=True, text=True, check=False, timeout=300)


def test_source_of_a_compiled_kernel_is_kept_with_a_program_that_compiles_it(tiny, monkeypatch, fresh_service):
    kernel.get(tiny(1))
    assert not (fresh_service / "sources").exists()
    monkeypatch.setenv("RWKVJIT_KEEP_SOURCE", "1")
    kernel.get(tiny(1))
    made = kernel.get(tiny(2))
    (folder,) = (fresh_service / "sources").iterdir()
    assert folder.name.startswith("tiny-sm_90-")
    assert (folder / "tiny.cu").read_text(encoding="utf-8") == made.source
    assert (folder / "types.cuh").read_text(encoding="utf-8") == dict(made._rendered.headers)["types.cuh"]
    assert sorted(path.name for path in folder.iterdir()) == ["compile.py", "tiny.cu", "types.cuh"]
    done = run(shlex.join([sys.executable, str(folder / "compile.py")]))
    assert done.returncode == 0, done.stderr
    assert f"Used {made.registers} registers" in done.stdout


def test_sources_that_cannot_be_kept_cost_one_warning(tiny, monkeypatch, fresh_service, caplog):
    fresh_service.mkdir(mode=0o700)
    (fresh_service / "sources").touch()
    monkeypatch.setenv("RWKVJIT_KEEP_SOURCE", "1")
    assert [kernel.get(tiny(size)).origin for size in range(2)] == ["compiled", "compiled"]
    (message,) = caplog.messages
    assert message.startswith("sources are not kept: ")
    assert len(cache.entries()) == 2


def test_kernel_with_line_numbers_is_another_kernel(tiny, monkeypatch):
    plain = kernel.get(tiny())
    monkeypatch.setenv("RWKVJIT_LINEINFO", "1")
    lines = kernel.get(tiny())
    assert lines.origin == "compiled"
    assert b".debug_line" in lines.cubin
    assert b".debug_line" not in plain.cubin
    assert len(cache.entries()) == 2
    kernel.forget()
    assert kernel.get(tiny()).cubin == lines.cubin
    monkeypatch.delenv("RWKVJIT_LINEINFO")
    assert kernel.get(tiny()).cubin == plain.cubin


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The compiles that were begun."""
    begun, run = [], compiler._run

    def counting(rendered, *more):
        begun.append(rendered.name)
        return run(rendered, *more)

    monkeypatch.setattr(compiler, "_run", counting)
    return begun


@pytest.mark.parametrize(
    ("text", "mended", "error", "message"),
    [
        (BROKEN, BROKEN.replace("missing", "1"), CompileError, "could not compile tiny for sm_90"),
        (RULE, RULE.replace("> 9", "> 0"), ValueError, "^tiny: size must be more than 9; got SIZE=[12]$"),
    ],
    ids=["broken text", "rule that does not hold"],
)
def test_failed_compile_is_remembered_until_its_text_changes(text, mended, error, message, tiny, calls):
    def fail(size=1):
        with pytest.raises(error, match=message) as caught:
            kernel.get(tiny(size, text=text))
        return caught.value

    assert fail() is fail()
    assert calls == ["tiny"]
    fail(size=2)
    assert len(calls) == 2
    assert kernel.get(tiny(text=mended)).origin == "compiled"
    assert len(calls) == 3
    kernel.forget()
    fail()
    assert len(calls) == 4


FAIL = """
import sys
from pathlib import Path
from rwkv_jit.kernels import kernel, template
from rwkv_jit.kernels.errors import CompileError
try:
    kernel.get(kernel.Request(template.read(Path(sys.argv[1])), {"SIZE": 1}, "sm_90"))
except CompileError as error:
    print(error.command)
"""


def test_failed_compile_is_forgotten_by_the_next_process(tiny, child, tmp_path, fresh_service):
    with pytest.raises(CompileError):
        kernel.get(tiny(text=BROKEN))
    assert cache.entries() == []
    command = child(FAIL, tmp_path / "tiny.cu").stdout
    assert str(fresh_service / "failed") in command
    (tmp_path / "tiny.cu").write_text(BROKEN.replace("missing", "1"), encoding="utf-8")
    assert child(FAIL, tmp_path / "tiny.cu").stdout == ""


def logged(error):
    """The compiler's own lines of a CompileError's message."""
    return [line for line in str(error).splitlines() if "error: " in line or " detected in " in line]


def test_command_of_an_error_runs_and_fails_alike(tiny, fresh_service):
    with pytest.raises(CompileError) as caught:
        kernel.get(tiny(text=BROKEN))
    error = caught.value
    assert error.command.endswith("compile.py")
    assert str(fresh_service / "failed") in error.command
    assert str(error).endswith(f"once more: {error.command}")
    done = run(error.command)
    assert done.returncode == 1
    assert logged(error) == [
        'tiny.cu(3): error: identifier "missing" is undefined',
        '1 error detected in the compilation of "parameters.cu".',
    ]
    assert [line for line in done.stderr.splitlines() if line in logged(error)] == logged(error)


# ---- threads -----------------------------------------------------------------------------------------------------


def refuse(error):
    def start(*_):
        raise error

    return start


# A thread that dies before it begins has a number, and says nothing else.
@pytest.mark.parametrize(
    "start",
    [refuse(RuntimeError("can't start new thread")), refuse(MemoryError()), lambda *_: 1],
    ids=["too many", "no memory", "dies unborn"],
)
def test_kernels_are_compiled_where_no_thread_comes_to_life(start, tiny, monkeypatch, fresh_service):
    monkeypatch.setattr(kernel, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("it waits for a thread"))
    assert [each.origin for each in kernel.get_all([tiny(1), tiny(2)])] == ["compiled", "compiled"]
    assert kernel.get_async(tiny(3)).result().origin == "compiled"
    with pytest.raises(CompileError):
        kernel.get_all([tiny(4, text=BROKEN), tiny(5, text=BROKEN)])
    assert kernel._process.workers.count == 0
    assert not any(held.locked() for held in kernel._process.locks.values())
    assert not lock._held


def test_a_thread_that_begins_late_leaves_the_work_to_who_has_begun_it(tiny, monkeypatch):
    late = []
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_PATIENCE_SECONDS", 0.01)
        patch.setattr(_thread, "start_new_thread", lambda work, arguments: late.append((work, arguments)))
        assert kernel.get_async(tiny(1)).result().origin == "compiled"
    for work, arguments in late:
        work(*arguments)
    assert kernel._process.workers.count == 0
    assert kernel.get_async(tiny(2)).result(60).origin == "compiled"


AT_EXIT = """
import atexit, sys
from pathlib import Path
from rwkv_jit.kernels import kernel, template
read = template.read(Path(sys.argv[1]))
requests = [kernel.Request(read, {"SIZE": size}, "sm_90") for size in (1, 2)]
atexit.register(lambda: print([each.origin for each in kernel.get_all(requests)]))
"""


def test_kernels_are_compiled_when_the_interpreter_ends(tiny, child, tmp_path):
    tiny()
    assert child(AT_EXIT, tmp_path / "tiny.cu").stdout == "['compiled', 'compiled']\n"


# ---- saved sources -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ['" + str(open("PWNED", "w")) + "', 'a"b', "new\nline", "back\\slash", "x{y}'"])
def test_name_of_a_template_is_no_code(name, tmp_path, monkeypatch):
    path = tmp_path / f"{name}.cu"
    path.write_text('extern "C" __global__ void fill(float* x) { *x = SIZE; }\n', encoding="utf-8")
    assert kernel.get(kernel.Request(read(path), {"SIZE": 1}, "sm_90")).origin == "compiled"
    path.write_text(BROKEN, encoding="utf-8")
    with pytest.raises(CompileError, match='.cu.3.: error: identifier "missing" is undefined') as caught:
        kernel.get(kernel.Request(read(path), {"SIZE": 1}, "sm_90"))
    monkeypatch.chdir(tmp_path)
    assert 'identifier "missing" is undefined' in run(caught.value.command).stderr
    evil = Template(name, BROKEN, (("types.cuh", ""), (f"{name}.cuh", "")))  # of a name that read() would not give
    program = compiler.save_source(tmp_path, evil.render({"SIZE": 1}), "sm_90")
    run(shlex.join([sys.executable, str(program)]))
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "trouble", ["a file in the way", "a folder of another", "the cache is off", "the cache is temporary"]
)
def test_what_failed_is_saved_among_temporary_files_where_the_cache_cannot_take_it(
    trouble, tiny, fresh_service, monkeypatch, give_away
):
    place = contextlib.nullcontext()
    if trouble == "the cache is temporary":
        place = demo.empty_cache()
    elif trouble == "the cache is off":
        monkeypatch.setenv("RWKVJIT_CACHE", "0")
    elif trouble == "a file in the way":
        fresh_service.touch()
    else:
        (fresh_service / "failed").mkdir(parents=True)
        give_away(fresh_service / "failed")
    with place, pytest.raises(CompileError) as caught:
        kernel.get(tiny(text=BROKEN))
    assert tempfile.gettempdir() in caught.value.command
    assert 'identifier "missing" is undefined' in run(caught.value.command).stderr


def test_error_without_any_place_to_save_has_no_command(tiny, fresh_service, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    fresh_service.touch()
    monkeypatch.setattr(compiler.tempfile, "mkdtemp", full)
    with pytest.raises(CompileError, match='identifier "missing" is undefined') as caught:
        kernel.get(tiny(text=BROKEN))
    assert caught.value.command == ""
    assert "once more" not in str(caught.value)


def test_command_of_a_template_in_another_folder_with_headers_in_folders_runs(tmp_path, tiny):
    request = tiny()
    headers = (("parts/deep.cuh", "// here\n"), ("types.cuh", dict(request.template.headers)["types.cuh"]))
    body = '#include "parts/deep.cuh"\n' + BROKEN
    with pytest.raises(CompileError) as caught:
        kernel.get(kernel.Request(Template("with space", body, headers), {"SIZE": 1}, "sm_90"))
    assert 'identifier "missing" is undefined' in run(caught.value.command).stderr


@pytest.mark.parametrize(
    ("log", "is_remembered"),
    [
        ("tiny.cu(1): catastrophic error: out of memory\n  int x;\n", False),
        ("ptxas fatal   : Memory allocation failure\n", False),
        ("", False),
        ('tiny.cu(1): error: identifier "y" is undefined\n', True),
        ('tiny.cu(1): error #20-D: identifier "y" is undefined\n', True),
        ("ptxas error   : Entry function 'k' uses too much shared data (0xc3500 bytes, 0xc000 max)\n", True),
    ],
)
def test_failure_that_passes_is_not_remembered(log, is_remembered, tiny, calls, monkeypatch):
    nvrtc = cuda.nvrtc()

    class Failing:
        """NVRTC, which fails in this way."""

        def __getattr__(self, name):
            return getattr(nvrtc, name)

        def compileProgram(self, program, options):
            raise nvrtc.NVRTCError(6)

        def getProgramLog(self, program):
            return log

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "nvrtc", Failing)
        with pytest.raises(CompileError):
            kernel.get(tiny())
    if is_remembered:
        with pytest.raises(CompileError):
            kernel.get(tiny())
        assert len(calls) == 1
    else:
        assert kernel.get(tiny()).origin == "compiled"


def test_failure_of_the_compiler_is_none_of_the_kernel(tiny, monkeypatch):
    nvrtc = cuda.nvrtc()

    def is_full(*_):
        raise nvrtc.NVRTCError(1)

    def is_missing():
        raise NvrtcNotFoundError("not there")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "createProgram", is_full)
        with pytest.raises(CompileError, match="NVRTC_ERROR_OUT_OF_MEMORY"):
            kernel.get(tiny())
        patch.setattr(identity, "identity", is_missing)
        patch.setattr(cuda, "nvrtc", is_missing)
        with pytest.raises(NvrtcNotFoundError, match="not there"):
            kernel.get(tiny())
    assert kernel.get(tiny()).origin == "compiled"


def test_long_values_and_lines_are_shown_in_part(tiny):
    text = BROKEN.replace("missing", "missing + LEVEL /*" + 10**5 * "x" + "*/")
    request = tiny(text=text)._replace(parameters={"SIZE": 1, "LEVEL": 10**4 * "y"})
    with pytest.raises(CompileError, match=r"with LEVEL=y{200}\.\.\. .10000 characters., SIZE=1") as caught:
        kernel.get(request)
    assert len(str(caught.value)) < 30_000


@pytest.mark.parametrize(
    ("name", "value"),
    [("RWKVJIT_CACHE_MAX_MB", "1e308"), ("RWKVJIT_LOG", "nonsense"), ("RWKVJIT_KEEP_SOURCE", "maybe")],
)
def test_wrong_setting_is_an_error_of_every_call_before_anything_is_compiled(name, value, tiny, calls, monkeypatch):
    monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got '{value}'$"):
            kernel.get(tiny(0))
    assert (calls, cache.entries()) == ([], [])
    monkeypatch.delenv(name)
    assert kernel.get(tiny(0)).origin == "compiled"
    kernel.forget()
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{name}: expected .*, got '{value}'$"):
                kernel.get(tiny(0))  # although it lies on the disk
    assert kernel.get(tiny(0)).origin == "disk"
