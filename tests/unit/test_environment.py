"""What the package needs of a machine, what it says where that is missing, and which module may import which."""

import _thread
import ast
import functools
import os
import re
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import platformdirs
import pytest

import rwkv_jit
from rwkv_jit.kernels import cache, cuda, env, errors, identity, stats
from rwkv_jit.kernels.errors import NvrtcNotFoundError

PACKAGE = Path(rwkv_jit.__file__).parent
INSTALL_12 = 'pip install "cupy-cuda12x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc-cu12>=12.4"'
INSTALL_13 = 'pip install "cupy-cuda13x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc>=13"'
CALL_ON_CPU = """
import torch, rwkv_jit
x = torch.ones(1, 2, 1, 4, requires_grad=True)
y, _ = rwkv_jit.wkv7(x, x, x, x, -x, x)
y.sum().backward()
assert y.shape == (1, 2, 1, 4) and x.grad.abs().sum() > 0
"""


# ---- importing ---------------------------------------------------------------------------------------------------


def test_import_touches_neither_torch_nor_cupy_nor_the_disk(child, tmp_path):
    done = child(
        """
import sys
import rwkv_jit
print(rwkv_jit.__version__, *sorted(m for m in ("torch", "cupy", "numpy", "logging") if m in sys.modules))
""",
        env={"HOME": str(tmp_path / "home"), "RWKVJIT_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": ""},
    )
    assert done.stdout.strip() == rwkv_jit.__version__
    assert list(tmp_path.iterdir()) == []


def test_every_public_name_can_be_had_and_is_listed():
    for name in rwkv_jit.__all__:
        assert getattr(rwkv_jit, name).__name__ == name
        assert name in dir(rwkv_jit)
    assert sorted(rwkv_jit.__all__) == sorted(rwkv_jit._MODULES)
    with pytest.raises(AttributeError, match="module 'rwkv_jit' has no attribute 'wkv8'"):
        rwkv_jit.wkv8  # noqa: B018


@pytest.mark.parametrize("without_posix", [False, True])
def test_cpu_tensors_leave_cupy_and_the_disk_alone(without_posix, child, tmp_path):
    code = CALL_ON_CPU + "import sys; assert 'cupy' not in sys.modules"
    child(code, after="torch", without_posix=without_posix, env={"RWKVJIT_CACHE_DIR": str(tmp_path / "cache")})
    assert not (tmp_path / "cache").exists()


# ---- CuPy and NVRTC ----------------------------------------------------------------------------------------------


OVERWRITE = "are both installed and overwrite each other's files; keep one"


@pytest.mark.parametrize(
    ("installed", "said", "command"),
    [
        ([], "CuPy is not installed; CUDA kernels need it", INSTALL_12),
        (["cupy-cuda12x 14.0.1"],
         "cupy-cuda12x 14.0.1 cannot be imported (No module named 'cupy_backends'); CUDA kernels need it", INSTALL_12),
        (["cupy-cuda12x 14.0.1", "cupy-cuda13x 14.2.0"], f"cupy-cuda12x 14.0.1 and cupy-cuda13x 14.2.0 {OVERWRITE}",
         f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {INSTALL_13}"),
        (["cupy-cuda12x 14.0.1", "cupy 13.0.0"], f"cupy-cuda12x 14.0.1 and cupy 13.0.0 {OVERWRITE}",
         f"pip uninstall -y cupy-cuda12x cupy && {INSTALL_12}"),
        (["cupy-cuda11x 13.0.0", "cupy-cuda12x 14.0.1"], f"cupy-cuda11x 13.0.0 and cupy-cuda12x 14.0.1 {OVERWRITE}",
         f"pip uninstall -y cupy-cuda11x cupy-cuda12x && {INSTALL_12}"),
    ],
)  # fmt: skip
def test_without_cupy_a_kernel_is_an_error_with_the_command_and_all_else_works(installed, said, command, monkeypatch):
    numbers = dict(wheel.split() for wheel in installed)

    def version(name):
        if name not in numbers:
            raise metadata.PackageNotFoundError(name)
        return numbers[name]

    monkeypatch.setattr(cuda.metadata, "version", version)
    with pytest.raises(NvrtcNotFoundError) as caught:
        rwkv_jit.specialize("wkv7", head_size=64, arch="sm_90")
    assert str(caught.value) == f"{said}:\n    {command}"
    report = rwkv_jit.env_report()
    assert report["cupy"] == installed
    assert "pip install" in report["nvrtc"]
    assert rwkv_jit.is_available() is False
    assert (rwkv_jit.cache_info()["entries"], rwkv_jit.clear_cache()) == (0, 0)


def test_torch_and_gpus_are_known_without_importing_it(monkeypatch):
    import torch

    report = rwkv_jit.env_report()
    assert (report["torch"], report["torch_cuda"]) == (torch.__version__, torch.version.cuda)

    def write(reference, value):
        reference._obj.value = value

    functions = {
        "cuInit": lambda flags: 0,
        "cuDeviceGetCount": lambda count: write(count, 2),
        "cuDeviceGet": lambda device, index: write(device, 10 + index),
        "cuDeviceGetName": lambda name, size, device: setattr(name, "value", f"GPU of {device.value}".encode()),
        "cuDeviceTotalMem_v2": lambda memory, device: write(memory, device.value << 30),
        "cuDeviceGetAttribute": lambda number, which, device: write(number, {75: 12, 76: 1}[which]),
    }
    monkeypatch.setattr(cuda, "_driver_function", functions.get)
    assert rwkv_jit.env_report()["gpus"] == ["GPU of 10, sm_121, 10 GiB", "GPU of 11, sm_121, 11 GiB"]
    functions["cuInit"] = lambda flags: 100  # there is none
    assert rwkv_jit.env_report()["gpus"] == []
    functions.clear()  # nor a driver
    assert rwkv_jit.env_report()["gpus"] == []


def test_nvrtc_that_was_noted_is_told_where_torch_has_loaded_none(tmp_path, monkeypatch):
    paths = [str(tmp_path / name) for name in ("libnvrtc.so.12", "libnvrtc-builtins.so.12")]
    for path in paths:
        Path(path).write_bytes(b"library")
    cache.write_note(
        identity._note_name(), {"identity": "12.9 0123", "libraries": {p: identity._stamp(p) for p in paths}}
    )
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    report = rwkv_jit.env_report()
    assert (report["nvrtc"], report["nvrtc_libraries"]) == ("12.9 0123", paths)
    Path(paths[0]).write_bytes(b"another")
    os.utime(paths[0], (0, 0))
    assert "pip install" in rwkv_jit.env_report()["nvrtc"]


@pytest.mark.parametrize(("wheel", "command"), [("cupy-cuda12x", INSTALL_12), ("cupy-cuda13x", INSTALL_13)])
def test_missing_nvrtc_names_what_goes_with_the_cupy_at_hand(wheel, command, monkeypatch):
    def missing():
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(cuda, "installed_cupy", lambda: [f"{wheel} 14.0.1"])
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", types.SimpleNamespace(getVersion=missing))
    with pytest.raises(NvrtcNotFoundError) as caught:
        rwkv_jit.specialize("wkv7", head_size=64, arch="sm_90")
    assert str(caught.value) == f"CuPy is installed but NVRTC is not (libnvrtc.so not found):\n    {command}"


@pytest.mark.parametrize(("wheel", "command"), [("cupy-cuda12x", INSTALL_12), ("cupy-cuda13x", INSTALL_13)])
def test_cupy_without_a_finder_is_too_old(wheel, command, monkeypatch):
    monkeypatch.setattr(cuda, "nvrtc", lambda: None)
    monkeypatch.setattr(cuda, "installed_cupy", lambda: [f"{wheel} 13.6.0"])
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(NvrtcNotFoundError) as caught:
        cuda.nvrtc_library()
    assert str(caught.value) == f"{wheel} 13.6.0 is too old:\n    {command}"


@pytest.mark.parametrize(("extra", "command"), [("cuda12", INSTALL_12), ("cuda13", INSTALL_13)])
def test_command_installs_what_the_extra_does(extra, command, root):
    (needed,) = re.findall(rf"^{extra} = \[(.*)\]$", (root / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert command == "pip install " + needed.replace(", ", " ")


# ---- variables, messages, report ---------------------------------------------------------------------------------


SWITCHES = {
    "RWKVJIT_CACHE": env.cache_is_on,
    "RWKVJIT_CACHE_SHARED": env.cache_is_shared,
    "RWKVJIT_ASSERT_CACHED": env.assert_cached,
    "RWKVJIT_LINEINFO": env.lineinfo,
    "RWKVJIT_KEEP_SOURCE": env.keep_source,
    "RWKVJIT_FLA": env.runs_fla,
    "RWKVJIT_COMPAT": env.runs_compat,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switch_is_read_as_people_write_it(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    by_default = name == "RWKVJIT_CACHE"
    assert SWITCHES[name]() is by_default
    for value in ("", *"01", "false", "True", "NO", "yes", "Off", "on"):
        monkeypatch.setenv(name, value)
        assert SWITCHES[name]() is {"": by_default, "0": False, "false": False, "NO": False, "Off": False}.get(
            value, True
        ), value
    for value in ("00", "2", "y", "nein", " 1", "x" * 100_000):
        monkeypatch.setenv(name, value)
        for ask in (SWITCHES[name], env.check):
            with pytest.raises(ValueError, match=f"^{name}: expected 0 or 1 .or false, no, off; true, yes, on., got "):
                ask()


@pytest.mark.parametrize(("text", "size"), [("", 512 * 2**20), ("0", 0), ("0.5", 2**19), ("1e300", int(1e300 * 2**20))])
def test_bound_of_the_cache_is_in_megabytes(text, size, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", text)
    assert env.cache_max_bytes() == size
    env.check()


@pytest.mark.parametrize("text", ["much", "512MB", "-1", "nan", "inf", "1e308", "1e999"])
def test_bound_that_is_no_size_is_an_error_that_names_it(text, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", text)
    for ask in (env.check, rwkv_jit.cache_info, lambda: cache.put("sm_90/a.cubin", b"")):
        with pytest.raises(ValueError, match=f"^RWKVJIT_CACHE_MAX_MB: expected a number of at least 0, got '{text}'$"):
            ask()


@pytest.mark.parametrize("found", ["relative", "none"])
def test_without_a_home_there_is_no_directory_and_the_cache_is_off(found, monkeypatch):
    def user_cache_path(name, appauthor):
        if found == "none":
            raise RuntimeError("could not determine the home directory")
        return Path("~", ".cache", name)

    monkeypatch.setattr(platformdirs, "user_cache_path", user_cache_path)
    monkeypatch.delenv("RWKVJIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", f"no home of this test: {found}")  # nothing else has asked for it before
    assert not env.cache_is_on()
    assert not env.cache_is_lasting()
    assert env.cache_fault() == "the home directory is not known; set RWKVJIT_CACHE_DIR to a directory that you own"
    with pytest.raises(NotADirectoryError):
        env.cache_dir().mkdir(parents=True)


def test_directories_of_the_variables(monkeypatch, tmp_path):
    monkeypatch.delenv("RWKVJIT_CACHE_DIR")
    assert env.cache_dir() == platformdirs.user_cache_path("rwkv_jit", appauthor=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join(["~/more", "", "/absolute"]))
    assert env.cache_dir() == tmp_path / "kernels"
    assert env.cache_path() == [tmp_path / "more", Path("/absolute")]
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", "~nosuchuser/x")
    assert not env.cache_is_on()
    assert env.cache_fault() == "RWKVJIT_CACHE_DIR='~nosuchuser/x' names a home directory that there is not"
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", "~nosuchuser/y")
    assert env.cache_path() == [Path("~nosuchuser/y")]
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", "here")
    assert (env.cache_dir(), env.cache_fault(), env.cache_is_lasting()) == (Path("here"), "", True)
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", f"/tmp/{env.TEMPORARY}0/cache")
    assert (env.cache_is_on(), env.cache_is_lasting()) == (True, False)


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, 16),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "5"}, 3),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 16),
        ({"LOCAL_WORLD_SIZE": "many"}, 16),
        ({"LOCAL_WORLD_SIZE": "²"}, 16),
        ({"LOCAL_WORLD_SIZE": "9" * 5000, "MPI_LOCALNRANKS": "2"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 2),
        ({"MPI_LOCALNRANKS": "2"}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "MPI_LOCALNRANKS": "2"}, 4),
    ],
    ids=str,
)
def test_workers_are_the_cores_of_this_process_shared_with_the_ranks_of_the_node(variables, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.workers() == workers


def test_no_variable_is_taken_from_rwkv_lm(root):
    assert all(name.startswith("RWKVJIT_") for name in env.DESCRIPTIONS)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call | ast.Subscript):
                assert "'RWKV_JIT_" not in ast.unparse(node), path.name


def test_a_message_is_said_once_and_as_it_is(caplog):
    messages = ["first", "100 % full", "%s %d", "{braces}"]
    for message in (*messages, *messages):
        stats.say_once(message)
    stats.say_once("second", key="first")
    assert caplog.messages == messages


def test_only_slow_work_is_spoken_of(monkeypatch, caplog):
    with stats.say_if_slow("quick"):
        pass
    monkeypatch.setattr(stats, "_QUIET_SECONDS", 0.0)
    with stats.say_if_slow("slow"):
        for _ in range(60_000):
            if caplog.messages:
                break
            time.sleep(0.001)
    assert caplog.messages == ["slow"]


@pytest.mark.parametrize("fault", [RuntimeError("can't start new thread"), MemoryError(), None])
def test_work_is_done_where_no_thread_comes_to_life_to_speak_of_it(fault, monkeypatch):
    def start(*_):
        if fault:
            raise fault

    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("it waits for a thread"))
    done = []
    with stats.say_if_slow("slow"):
        done.append("work")
    assert done == ["work"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 300, "'" + "x" * 199 + "... (302 characters)"),
        (10**5000, "a value of type int that cannot be printed"),
        ("a\0b", r"'a\x00b'"),
    ],
    ids=["long", "many digits", "unprintable"],
)
def test_message_shows_no_more_of_a_value_than_can_be_read(value, shown):
    assert errors.brief(value) == shown


LOG = """
from rwkv_jit.kernels import stats
stats.configure_logging()
stats.logger.info("informed")
stats.say_once("warned")
"""


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("info", "rwkv_jit: informed\nrwkv_jit: warned\n"),
        ("WARNING", "rwkv_jit: warned\n"),
        ("error", ""),
        ("", "warned\n"),  # logging's own last resort
    ],
)
def test_messages_go_to_standard_error_from_the_level_asked_for(level, said, child):
    assert child(LOG, env={"RWKVJIT_LOG": level}).stderr == said


def test_level_that_there_is_not_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("RWKVJIT_LOG", "loud")
    for ask in (env.check, stats.configure_logging):
        with pytest.raises(ValueError, match="^RWKVJIT_LOG: expected debug, info, warning or error, got 'loud'$"):
            ask()


def test_wrong_level_is_an_error_of_every_call_on_the_cpu(monkeypatch):
    import torch

    x = torch.ones(1, 2, 1, 4)
    monkeypatch.setenv("RWKVJIT_LOG", "nonsense")
    for _ in range(3):
        with pytest.raises(ValueError, match="^RWKVJIT_LOG: expected debug, info, warning or error, got 'nonsense'$"):
            rwkv_jit.wkv7(x, x, x, x, -x, x)
    monkeypatch.delenv("RWKVJIT_LOG")
    rwkv_jit.wkv7(x, x, x, x, -x, x)


def test_hooks_are_called_in_order_until_they_are_taken_off():
    """By themselves too, which spares no other one. A function that is hooked twice is called once less."""
    events = []

    def once(event):
        events.append("once")
        remove_once()

    remove_once = stats.add_hook(once)
    first, second = stats.add_hook(events.append), stats.add_hook(events.append)
    stats.tell({"origin": "disk"})
    assert events == ["once", {"origin": "disk"}, {"origin": "disk"}]
    first()
    first()
    stats.tell({"origin": "disk"})
    assert events[3:] == [{"origin": "disk"}]
    second()
    stats.tell({"origin": "memory"})
    assert len(events) == 4
    assert (stats.snapshot()["disk"], stats.snapshot()["memory"]) == (2, 1)


def test_forked_child_counts_though_a_thread_of_its_parent_was_counting(child):
    code = """
import os, signal
from rwkv_jit.kernels import kernel, stats  # the former asks to be told of forks
stats.count("disk")
with stats._lock:
    forked = os.fork()
    if forked == 0:
        signal.alarm(60)
        stats.count("disk")
        stats.say_once("said")
        print(stats.snapshot()["disk"], flush=True)
        os._exit(0)
print(os.waitpid(forked, 0)[1])
"""
    assert child(code).stdout == "2\n0\n"


FORK_INSIDE = """
import os, signal, threading
from rwkv_jit.kernels import forks
signal.alarm(60)
def enter():
    with forks.held_back():
        pass
def enter_elsewhere():
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
with forks.held_back(), forks.held_back():
    child = os.fork()
    enter_elsewhere()
    if child:
        assert os.waitpid(child, 0)[1] == 0
enter_elsewhere()
if child:
    print("both went on")
"""


def test_work_that_forks_itself_does_not_wait_for_itself(child):
    assert child(FORK_INSIDE).stdout == "both went on\n"


FORK_BESIDE = """
import os, signal, threading, time
from rwkv_jit.kernels import forks
signal.alarm(60)
forks._PATIENCE_SECONDS = 0.01
inside, go, said = threading.Event(), threading.Event(), []
class Say:
    def warning(self, message):
        said.append(message)
        threading.Thread(target=work, args=["later"]).start()  # held back until the fork is over
        go.set()
forks.stats.logger = Say()
done = []
def work(name):
    with forks.held_back():
        inside.set()
        go.wait()
        done.append(name)
threading.Thread(target=work, args=["first"]).start()
inside.wait()
child = os.fork()
if not child:
    assert done == ["first"] and said == ["a fork waits for the kernels that are being compiled"]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
while len(done) < 2:
    time.sleep(0.001)
print(done)
"""


def test_fork_waits_for_work_and_holds_back_what_comes_later(child):
    assert child(FORK_BESIDE).stdout == "['first', 'later']\n"


def test_counts_of_many_threads_add_up():
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [stats.count("disk") for _ in range(2000)], range(4)))
    assert stats.snapshot()["disk"] == 8000


# ---- who imports whom --------------------------------------------------------------------------------------------

# The rooms from the ground up: each imports from those before it alone. `schedules` know sizes and names, no tensors.
ROOMS = (
    "kernels", "schedules", "plain", "call", "pool", "ops", "layers", "parallel", "nn", "ahead", "compat", "desk",
    "__main__",
)  # fmt: skip
WITHOUT_TORCH = {
    "call.options", "call.rule", "ahead.kernel_wheels", "desk.cli", "desk.commands",
    "desk.kernel_table", "desk.terminal", "compat", "compat.alias", "compat.autoload", "compat.fla", "compat.replacing",
    "nn", "parallel", "__main__",
}  # fmt: skip


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"}


@functools.cache  # several tests read each file
def imports(path):
    """Every module that a file imports, at its top or inside functions, as full dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            for alias in node.names:
                inside = PACKAGE.parent / node.module.replace(".", "/") / alias.name
                is_module = inside.with_suffix(".py").exists() or (inside / "__init__.py").exists()
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return frozenset(names)


def own_imports(name):
    """Those from this package, but for the package itself."""
    own = {imported.removeprefix("rwkv_jit").lstrip(".") for imported in imports(MODULES[name])
           if imported.split(".")[0] == "rwkv_jit"}  # fmt: skip
    return own - {""}


def room(name):
    return name.split(".")[0]


def test_every_module_is_in_a_room():
    assert {room(name) for name in MODULES} == set(ROOMS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downward_only(name):
    assert {room(x) for x in own_imports(name)} <= set(ROOMS[: ROOMS.index(room(name)) + 1])


@pytest.mark.parametrize("name", ROOMS)
def test_no_two_modules_of_a_room_import_each_other(name):
    modules = [x for x in MODULES if room(x) == name]
    order = [*TopologicalSorter({x: own_imports(x) & set(modules) for x in modules}).static_order()]
    assert set(order) == set(modules)


@pytest.mark.parametrize("name", [x for x in MODULES if room(x) == "schedules"])
def test_what_calls_ask_for_is_worked_out_without_tensors(name):
    of_kernels = {x for x in own_imports(name) if room(x) == "kernels"}
    requests = {"kernels.kernel"} if name == "schedules.schedule" else set()
    assert of_kernels <= {"kernels.errors", "kernels.gpu", "kernels.template"} | requests
    assert not {imported.split(".")[0] for imported in imports(MODULES[name])} & {"torch", "cupy", "numpy"}


@pytest.mark.parametrize("name", MODULES)
def test_cupy_is_imported_by_one_module_and_torch_by_those_that_need_it(name):
    roots = {imported.split(".")[0] for imported in imports(MODULES[name])}
    assert not roots & {"cupy", "cupy_backends"} or name == "kernels.cuda"
    if name in WITHOUT_TORCH or (room(name) == "kernels" and name != "kernels.dlpack"):
        assert "torch" not in roots


def test_cupy_is_imported_only_inside_functions():
    tree = ast.parse(MODULES["kernels.cuda"].read_text(encoding="utf-8"))
    at_the_top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert at_the_top
    assert not any("cupy" in line for line in at_the_top)


def test_the_package_itself_imports_nothing_when_it_is_loaded():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_the_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    at_the_top |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert at_the_top == {"__future__", "rwkv_jit.kernels"}  # of which `on_import` and `lazy` import little
