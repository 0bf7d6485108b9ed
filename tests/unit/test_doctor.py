"""What the doctor finds on machines that lack something, and that it always comes to an end."""

import json
import os
import shutil
import sys
import types

import pytest
import torch

from rwkv_jit.desk import demo, doctor, inputs
from rwkv_jit.kernels import cache, cuda, env, identity
from rwkv_jit.kernels.cache import bundle, lock
from rwkv_jit.kernels.errors import NvrtcNotFoundError

INSTALL_12 = 'pip install "cupy-cuda12x>=14.0.1,!=14.1.0" "nvidia-cuda-nvrtc-cu12>=12.4"'


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpus(monkeypatch):
    """Puts GPUs of these compute capabilities into the machine."""

    def install(*capabilities):
        memory = types.SimpleNamespace(total_memory=80 << 30)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU of the test {index}")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])

    return install


@pytest.fixture
def compiler(monkeypatch):
    """Puts a compiler and a driver into the machine."""

    def install(nvrtc="12.9", driver="12.9", known=(80, 90, 120), wheels=("cupy-cuda12x 14.2.0",), torch_for=None):
        library = types.SimpleNamespace(getSupportedArchs=lambda: known)
        monkeypatch.setattr(cuda, "nvrtc", lambda: library)
        monkeypatch.setattr(cuda, "installed_cupy", lambda: list(wheels))
        monkeypatch.setattr(cuda, "driver_version", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", torch_for)
        monkeypatch.setattr(identity, "identity", lambda: f"{nvrtc} 0123abcd")
        monkeypatch.setattr(identity, "libraries", lambda: ["/somewhere/libnvrtc.so"])
        for module in (identity, doctor.compiler):
            monkeypatch.setattr(module, "version", lambda: nvrtc)

    return install


def found(check, name=None):
    """What a check found, or the one finding of that name."""
    findings = list(doctor._guarded(check))
    if name is None:
        return [tuple(finding) for finding in findings]
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding[1:]


# ---- the command -------------------------------------------------------------------------------------------------


def test_machine_without_cupy_fails_with_the_command_on_a_line_of_its_own(monkeypatch, run):
    monkeypatch.setattr(cuda, "installed_cupy", list)
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    code, printed, _ = run("doctor", "--json")
    data = json.loads(printed)
    assert (code, data["passed"]) == (1, False)
    assert [finding for finding in data["findings"] if finding["state"] == "error"] == [
        {"name": "CuPy and NVRTC", "state": "error", "text": "CuPy is not installed; CUDA kernels need it",
         "mend": INSTALL_12}
    ]  # fmt: skip
    assert {finding["name"] for finding in data["findings"]} >= {"package", "GPU", "cache directory", "locks"}
    code, printed, _ = run("doctor")
    lines = printed.splitlines()
    assert code == 1
    assert lines[0].split() == ["check", "state", "found"]
    assert lines[lines.index(f"    {INSTALL_12}") - 1].startswith("CuPy and NVRTC: CuPy is not installed")
    warnings = sum(finding["state"] == "warning" for finding in data["findings"])
    assert lines[-1] == f"Errors: 1, warnings: {warnings}."


def test_a_check_that_stumbles_does_not_hide_the_others_and_warnings_pass(monkeypatch, run):
    def _strange():
        yield doctor.Finding("first", "warning", "fine")
        raise LookupError("what is this?")

    monkeypatch.setattr(doctor, "_CHECKS", (_strange, doctor._package))
    code, printed, _ = run("doctor", "--json")
    findings = json.loads(printed)["findings"]
    assert (code, [finding["name"] for finding in findings]) == (1, ["first", "strange", "package"])
    assert findings[1] == {
        "name": "strange", "state": "error", "text": "LookupError: what is this?", "mend": ""
    }  # fmt: skip
    monkeypatch.setattr(doctor, "_CHECKS", (lambda: [doctor.Finding("a", "warning", "")],))
    code, printed, _ = run("doctor")
    assert (code, printed.splitlines()[-1]) == (0, "Errors: 0, warnings: 1.")


# ---- GPUs, CuPy, NVRTC, driver -----------------------------------------------------------------------------------


def test_no_gpu_is_a_warning(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    state, text, mend = found(doctor._gpus, "GPU")
    assert (state, "not run" in text, mend) == ("warning", True, "see what nvidia-smi says")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found(doctor._gpus, "GPU")[2] == "unset CUDA_VISIBLE_DEVICES"


def test_gpus_are_named(gpus):
    gpus((9, 0), (12, 0))
    assert found(doctor._gpus, "GPU 1") == ("ok", "GPU of the test 1, sm_120, 80 GiB", "")


OLD_TORCH = "2.5.1+cu121 is older than 2.6, the oldest that rwkv_jit supports"


@pytest.mark.parametrize(
    ("version", "built_for", "state", "text"),
    [
        ("2.5.1+cu121", "12.1", "error", OLD_TORCH),
        ("2.6.0a0+git1", "13.0", "ok", "2.6.0a0+git1, for CUDA 13.0"),
        ("2.10.0", "13.0", "ok", "2.10.0, for CUDA 13.0"),
        ("3.0", None, "warning", "3.0"),
    ],
)
def test_torch_and_its_cuda(version, built_for, state, text, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    found_state, found_text, mend = found(doctor._gpus, "torch")
    assert (found_state, bool(mend)) == (state, state != "ok")
    assert found_text.startswith(text)
    assert state != "error" or mend == 'pip install --upgrade "torch>=2.6"'


def test_nvrtc_that_is_too_old(compiler):
    text = "12.3 is older than 12.4, the oldest that rwkv_jit supports"
    compiler("12.3")
    assert found(doctor._compiler, "NVRTC") == ("error", text, f"{INSTALL_12} --upgrade")
    compiler("12.3", torch_for="12.3")  # that torch brought it
    assert found(doctor._compiler, "NVRTC") == ("error", text, 'pip install --upgrade "torch>=2.6"')
    assert found(doctor._ops) == []
    compiler("12.3", torch_for="13.0")  # which has another of its own
    assert found(doctor._compiler, "NVRTC")[2] == f"{INSTALL_12} --upgrade"
    compiler("12.4", torch_for="12.4")
    assert found(doctor._compiler, "NVRTC")[0] == "ok"


def test_cupy_that_is_too_old(compiler, monkeypatch):
    def old():
        raise NvrtcNotFoundError(f"cupy-cuda12x 13.0.0 is too old:\n    {INSTALL_12}")

    compiler()
    for module, name in ((identity, "identity"), (cuda, "nvrtc")):
        monkeypatch.setattr(module, name, old)
    assert found(doctor._compiler, "CuPy and NVRTC") == ("error", "cupy-cuda12x 13.0.0 is too old", INSTALL_12)
    assert found(doctor._ops) == []


def test_different_cudas_of_cupy_and_torch_are_fine(compiler):
    compiler(torch_for="13.0")
    state, text, mend = found(doctor._compiler, "CuPy and torch")
    assert (state, mend) == ("ok", "")
    assert text.startswith("CUDA 12 and CUDA 13; they need not agree")


@pytest.mark.parametrize(
    ("nvrtc", "driver", "state", "mend"),
    [
        ("13.0", "12.8", "warning", f"pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc && {INSTALL_12} --upgrade"),
        ("13.0", "13.0", "ok", ""),
        ("13.2", "13.0", "ok", ""),
        ("12.9", "12.4", "ok", ""),
        ("12.9", "13.0", "ok", ""),
    ],
)
def test_nvrtc_against_driver(nvrtc, driver, state, mend, compiler):
    compiler(nvrtc, driver, wheels=("cupy-cuda13x 14.2.0",))
    assert found(doctor._compiler, "driver") == ("ok", f"supports CUDA {driver}", "")
    found_state, text, found_mend = found(doctor._compiler, "NVRTC and driver")
    assert (found_state, found_mend) == (state, mend)
    assert nvrtc in text


def test_no_driver_is_a_warning(compiler):
    compiler(driver="none")
    assert found(doctor._compiler, "driver")[0] == "warning"


def test_nvrtc_that_torch_brought_goes_with_that_torch(compiler, monkeypatch):
    mend = "install a torch for CUDA {}, which brings its NVRTC: https://pytorch.org/get-started/locally"
    compiler("13.2", driver="12.8", torch_for="13.0")
    assert found(doctor._compiler, "NVRTC and driver")[2] == mend.format(12)
    compiler("12.8", wheels=("cupy-cuda13x 14.2.0",), torch_for="12.8")
    monkeypatch.setenv("RWKVJIT_ARCH", "sm_121")
    assert found(doctor._compiler, "architecture")[2] == mend.format(13)


@pytest.mark.parametrize(
    ("arch", "state", "text", "mend"),
    [
        ("sm_90a", "ok", "sm_90a", ""),
        ("sm_130", "warning", "PTX of compute_120", "cupy-cuda13x>="),
        ("sm_70", "error", "sm_120, got sm_70", f"which a torch for CUDA 13 brings: {INSTALL_12}"),
        ("sm_85", "error", "got sm_85", "unset RWKVJIT_ARCH"),
        ("banana", "error", "'banana'", "unset RWKVJIT_ARCH"),
    ],
)
def test_architecture(arch, state, text, mend, compiler, monkeypatch):
    compiler()
    monkeypatch.setenv("RWKVJIT_ARCH", arch)
    finding = found(doctor._compiler, "architecture")
    assert finding[0] == state
    assert text in finding[1]
    assert mend in finding[2]
    assert state != "error" or found(doctor._ops) == []


def test_architectures_of_all_gpus(compiler, gpus):
    compiler()
    gpus((9, 0), (8, 0), (9, 0))
    texts = [text for name, _, text, _ in found(doctor._compiler) if name == "architecture"]
    assert texts == ["NVRTC compiles for sm_80", "NVRTC compiles for sm_90"]


# ---- cache -------------------------------------------------------------------------------------------------------


def test_good_cache(fresh_service):
    findings = found(doctor._cache)
    assert [(name, state) for name, state, _, _ in findings] == [
        (name, "ok") for name in ("cache directory", "cache file system", "cache space", "locks")
    ]
    assert list(fresh_service.iterdir()) == []


def test_kernels_are_counted(make_entry, tmp_path, monkeypatch, fresh_service):
    for number in range(2):
        cache.put(*make_entry(number, 3 << 20)[:2])
    path = tmp_path / "x.bundle"
    bundle.write(path, [make_entry()[:2]])
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(path))
    assert found(doctor._cache, "cache directory")[1] == f"{fresh_service}, 2 kernels, 6 MiB"
    assert found(doctor._cache, "cache layer") == ("ok", f"{path}, 1 kernels", "")


@pytest.mark.parametrize(
    ("place", "text", "mend"),
    [
        ("open", "{} can be written by others (mode 777)", "chmod go-w '{}', or trust it: RWKVJIT_CACHE_SHARED=1"),
        ("file/cache", "{} cannot be written: Not a directory", "set RWKVJIT_CACHE_DIR to a directory that you own"),
    ],
)
def test_cache_directory_that_cannot_be_used(place, text, mend, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    path = tmp_path / place
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(path))
    assert found(doctor._cache) == [("cache directory", "error", text.format(path), mend.format(path))]


def test_network_file_systems(monkeypatch, fresh_service):
    monkeypatch.setattr(lock, "network_file_system", lambda path: "nfs4")
    state, text, mend = found(doctor._cache, "cache file system")
    assert (state, "(nfs4)" in text, "RWKVJIT_CACHE_DIR" in mend) == ("warning", True, True)
    state, text, mend = found(doctor._cache, "locks")
    assert (state, "(nfs4)" in text, "TMPDIR" in mend) == ("warning", True, True)


@pytest.mark.parametrize(
    ("free", "taken", "state"),
    [(100 << 20, 0, "warning"), (100 << 20, 411 << 20, "warning"), (100 << 20, 412 << 20, "ok"), (1 << 40, 0, "ok")],
)
def test_free_space(free, taken, state, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    monkeypatch.setattr(cache, "size", lambda: taken)  # of the kernels that are there
    found_state, text, mend = found(doctor._cache, "cache space")
    assert found_state == state
    assert text == f"{free >> 20} MiB free; kernels may take 512 MiB"
    assert bool(mend) == (state == "warning")


def test_cache_that_is_off(monkeypatch, fresh_service):
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    assert [(name, state, mend) for name, state, _, mend in found(doctor._cache)] == [
        ("cache", "warning", "unset RWKVJIT_CACHE")
    ]
    assert not fresh_service.exists()
    monkeypatch.delenv("RWKVJIT_CACHE")
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", "~nosuchuser/x")
    assert found(doctor._cache) == [(
        "cache", "warning",
        "off, RWKVJIT_CACHE_DIR='~nosuchuser/x' names a home directory that there is not: every process compiles its "
        "kernels", "unset RWKVJIT_CACHE_DIR",
    )]  # fmt: skip


def test_layers(tmp_path, monkeypatch, fresh_service):
    tmp_path.chmod(0o755)
    good, open_to_all, broken = tmp_path / "good", tmp_path / "open", tmp_path / "broken.bundle"
    for folder, mode in ((good, 0o755), (open_to_all, 0o777)):
        folder.mkdir()
        folder.chmod(mode)
    broken.write_bytes(b"PK")
    broken.chmod(0o600)
    imported = fresh_service / "bundles" / "x.bundle"
    imported.parent.mkdir(mode=0o700, parents=True)
    fresh_service.chmod(0o700)
    imported.write_bytes(b"")
    imported.chmod(0o600)
    layers = (good, open_to_all, broken, tmp_path / "missing")
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join(map(str, layers)))
    findings = [finding[1:] for finding in found(doctor._cache) if finding[0] == "cache layer"]
    assert [state for state, _, _ in findings] == ["error"] * 4 + ["ok"]
    texts = [text for _, text, _ in findings]
    assert texts[0].startswith(f"{imported} is not an intact rwkv_jit bundle")
    assert texts[1] == f"{open_to_all} can be written by others (mode 777)"
    assert texts[2].startswith(f"{broken} is not an intact rwkv_jit bundle")
    assert texts[3] == f"{tmp_path}/missing cannot be read: No such file or directory"
    assert texts[4] == f"{good}, 0 kernels"
    assert findings[1][2].startswith(f"chmod go-w '{open_to_all}'")
    assert findings[2][2] == f"repair {broken}, delete it, or take it out of RWKVJIT_CACHE_PATH"


@pytest.mark.parametrize("shared", ["0", "1"])
def test_lock_directory_that_others_can_write(shared, monkeypatch, tmp_path):
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", shared)
    monkeypatch.setattr(lock, "directory", lambda: tmp_path / "locks")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o777)
    state, text, mend = found(doctor._cache, "locks")
    assert state == "warning"
    assert text == f"{tmp_path}/locks can be written by others (mode 777): every process compiles for itself"
    assert mend.startswith("chmod go-w")


# ---- variables ---------------------------------------------------------------------------------------------------


def test_wrong_settings_are_told_once_with_what_mends_them(monkeypatch, fresh_service):
    monkeypatch.setenv("RWKVJIT_CACHE", "maybe")
    monkeypatch.setenv("RWKVJIT_CHECK", "2")
    result = doctor.run()
    told = [x for x in result["findings"] if "maybe" in x["text"] or "RWKVJIT_CHECK" in x["text"]]
    assert [(x["name"], x["state"], x["mend"]) for x in told] == [
        ("setting", "error", "unset RWKVJIT_CACHE"), ("setting", "error", "unset RWKVJIT_CHECK")
    ]  # fmt: skip
    assert told[0]["text"].startswith("RWKVJIT_CACHE: expected 0 or 1 ")
    assert not result["passed"]


def test_settings_and_misspelt_variables(monkeypatch, fresh_service):
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    monkeypatch.setenv("RWKVJIT_CACHEDIR", "/x")
    monkeypatch.setenv("RWKVJIT_QQQQQQQQ", "1")
    monkeypatch.setenv("RWKV_JIT_ON", "1")  # RWKV-LM's
    assert found(doctor._variables) == [
        (
            "setting", "ok", f"RWKVJIT_CACHE_DIR={fresh_service}: {env.DESCRIPTIONS['RWKVJIT_CACHE_DIR']}", ""
        ),
        (
            "setting", "ok", f"RWKVJIT_ASSERT_CACHED=1: {env.DESCRIPTIONS['RWKVJIT_ASSERT_CACHED']}", ""
        ),
        (
            "setting", "warning", "RWKVJIT_CACHEDIR is not a variable of rwkv_jit and has no effect",
            "is RWKVJIT_CACHE_DIR meant?",
        ),
        (
            "setting", "warning", "RWKVJIT_QQQQQQQQ is not a variable of rwkv_jit and has no effect",
            f"there are: {', '.join(env.DESCRIPTIONS)}",
        ),
    ]  # fmt: skip


# ---- ops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "state"), [(True, "ok"), (False, "error")])
def test_op_is_run_by_the_check_of_the_demo(passed, state, monkeypatch):
    given = []

    def check(*arguments):
        given.append(arguments)
        if arguments[0] == "wkv4":
            raise RuntimeError("CUDA error: no kernel image")
        return {"error": 1.25e-7, "gradient_error": 2.5e-7, "limit": 5e-6, "passed": passed}

    monkeypatch.setattr(demo, "check", check)
    assert doctor._run_op("wkv6") == (
        "run wkv6", state, "errors against float64: 1.2e-07, of gradients 2.5e-07, limit 5e-06", ""
    )  # fmt: skip
    assert doctor._run_op("wkv4")[1:3] == ("error", "CUDA error: no kernel image")
    assert given == [(op, size, torch.float32, "cuda") for op, size in (("wkv6", doctor.HEAD_SIZE), ("wkv4", None))]


def test_check_of_the_demo_sees_a_wrong_op(monkeypatch):
    good = demo.check("wkv6", 4, torch.float32, "cpu")
    assert good["passed"]
    assert 0 < good["error"] < good["limit"] == 5e-6
    function = inputs.OPS["wkv6"]

    def wrong(*inputs, **options):
        y, state = function(*inputs, **options)
        return 1.001 * y, state

    monkeypatch.setitem(inputs.OPS, "wkv6", wrong)
    assert not demo.check("wkv6", 4, torch.float32, "cpu")["passed"]
