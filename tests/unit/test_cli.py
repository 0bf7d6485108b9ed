"""The command line: what each command prints and returns, what it says to bad input, and how it looks."""

import io
import json
import os
import re
import stat
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timedelta
from hashlib import sha256

import pytest
from images import image

import rwkv_jit
from rwkv_jit.desk import cli, commands, kernel_table
from rwkv_jit.desk import terminal as report
from rwkv_jit.kernels import cache, env, sass
from rwkv_jit.kernels.cache import Compiled, Resources, bundle
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.schedules.build_command import OPS as BUILT
from rwkv_jit.schedules.table import ALL as OPS


def put(head_size=48, arch="sm_90", name="wkv7_recurrent_forward", **parameters):
    """Store a kernel nobody compiled; return its file."""
    parameters = {"HEAD_SIZE": head_size, "VALUE_SIZE": head_size, "T_IO": "bf16", **parameters}
    digest = sha256(repr((name, arch, parameters)).encode()).hexdigest()
    compiled = Compiled(
        image(b"code", arch), arch, {"first": Resources(40, 0, 1024), "second": Resources(128, 16, 512)}
    )
    about = {"name": name, "arch": arch, "parameters": parameters, "compiler": "12.9 0123abcd"}
    file = cache.file_name(name, arch, digest)
    cache.put(file, cache.pack(digest, compiled, about))
    return env.cache_dir() / file


def damage(path):
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.fixture
def data(run):
    """Runs a command with --json; returns what it printed."""

    def data(*arguments, code=0):
        found, printed, said = run(*arguments, "--json")
        assert (found, said) == (code, "")
        return json.loads(printed)

    return data


# ---- the program -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["build", "--help"], ["bench", "--help"], ["cache", "--help"], ["cache", "list"], ["cache", "verify"]],
)
def test_help_and_the_cache_need_no_torch(arguments, child):
    code = "import sys; from rwkv_jit.desk.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    done = child(f"{code}print(*sorted({{'torch', 'cupy', 'numpy', 'rich'}} & set(sys.modules)), 'loaded')", *arguments)
    assert done.stdout.splitlines()[-1] == "loaded"


def test_no_command_prints_the_commands(run):
    code, printed, said = run()
    assert (code, said) == (0, "")
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("    ") and line[4] != " "] == [
        "demo", "doctor", "info", "bench", "profile", "tune", "build", "warm", "show", "run", "cache",
    ]  # fmt: skip


@pytest.mark.parametrize("names", [[], ["build"], ["cache", "export"], ["run"]], ids=" ".join)
def test_help_of_a_command(names, capsys):
    printed = []
    for arguments in (["help", *names], [*names, "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        printed.append(capsys.readouterr())
    assert printed[0] == printed[1]
    assert printed[0].out.startswith(f"usage: {' '.join(['rwkv-jit', *names])} ")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["help", "dance"], ["'dance'", "demo", "cache"]),
        (["dance"], ["'dance'", "demo", "cache"]),
        (["cache"], ["rwkv-jit cache", "required", "command"]),
        (["cache", "dance"], ["'dance'", "verify"]),
        (["build", "--head-size", "64"], ["rwkv-jit build", "--op", "required"]),
        (["build", "wkv7"], ["rwkv-jit build: ", "required; did you mean --op wkv7?"]),
        (["warm", "--head-size", "64", "gla"], ["rwkv-jit warm: ", "did you mean --op gla?"]),
        (["build", "kda"], ["rwkv-jit build: ", "required; did you mean --op kda?"]),
        (["build", "--op", "kda"], ["--head-size", "kda needs some"]),
        (["build", "--op", "wkv7", "--arch", "sm_90"], ["--head-size", "wkv7 needs some"]),
        (["build", "--op", "timex", "--arch", "sm_90"], ["build: --tokens: expected a number for timex"]),
        (["build", "--op", "wkv4", "--head-size", "8", "--arch", "sm_90"], ["--head-size: wkv4 has none, got 8"]),
        (
            ["build", "--op", "wkv7", "--head-size", "8", "--tokens", "9", "--arch", "sm_90"],
            ["--tokens: is only for timex"],
        ),
        (["build", "--op", "timex", "--tokens", "16385", "--arch", "sm_90"], ["--tokens: ", "torch.fft", "nothing"]),
        (["build", "--op", "wkv7", "--head-size", "64,none"], ["--head-size", "whole number of at least 1", "'none'"]),
        (["build", "--op", "wkv7", "--head-size", "0"], ["--head-size", "at least 1", "'0'"]),
        (["build", "--op", "wkv7", "--head-size", "8", "--dtype", "fp8"], ["--dtype", "bf16, fp16, fp32", "'fp8'"]),
        (["build", "--op", "wkv7", "--head-size", "8", "--w-dtype", "x"], ["--w-dtype", "bf16, fp16, fp32", "'x'"]),
        (["build", "--op", "wkv7", "--head-size", "8", "--direction", "up"], ["--direction", "'up'", "both"]),
        (["show", "wkv7", "--arch", "sm_90"], ["show: --head-size: wkv7 needs one"]),
        (["show", "timex", "--arch", "sm_90"], ["show: --tokens: expected a number for timex"]),
        (["show", "wkv4", "--value-size", "8", "--arch", "sm_90"], ["show: --value-size: wkv4 has none, got 8"]),
        (["show", "wkv7", "--head-size", "8", "--ptx", "--sass"], ["--sass", "not allowed with", "--ptx"]),
        (["cache", "prune", "--max-mb", "-1"], ["--max-mb", "at least 0", "'-1'"]),
        (["cache", "prune", "--max-mb", "nan"], ["--max-mb", "at least 0", "'nan'"]),
        (["cache", "show", "nothing"], ["rwkv-jit cache show: name:", "'nothing'", "`rwkv-jit cache list`"]),
        (["cache", "export", "x.bundle"], ["rwkv-jit cache export: x.bundle", "no intact kernel", "`rwkv-jit build`"]),
        (["cache", "export", "x", "--op", "wkv6", "--arch", "a,b"], ["--op wkv6 and --arch a,b", "cache list"]),
        (["cache", "import", "missing.bundle"], ["rwkv-jit cache import: missing.bundle cannot be read"]),
    ],
)
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_bad_input_is_told_on_standard_error(arguments, parts, json_option, run):
    code, printed, said = run(*arguments, *json_option)
    assert (code, printed) == (2, "")
    assert all(part in said.splitlines()[-1] for part in parts), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("x: expected 1, got 2"), 2, "rwkv-jit cache list: x: expected 1, got 2\n"),
        (TypeError("x"), 2, "rwkv-jit cache list: x\n"),
        (RwkvJitError("x"), 2, "rwkv-jit cache list: x\n"),
        (OSError("x"), 2, "rwkv-jit cache list: x\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_a_command(error, code, said, monkeypatch, run):
    def fail(parsed):
        raise error

    monkeypatch.setattr(commands, "cache_list", fail)
    assert run("cache", "list") == (code, "", said)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_has_gone_is_no_traceback(unbuffered, fresh_service):
    put()
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "rwkv_jit", "cache", "list"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


# ---- demo, info, bench -------------------------------------------------------------------------------------------


def test_kernels_of_shared_templates_are_told_apart_by_their_parameters():
    def named(name, **parameters):
        return {"name": name, "arch": "sm_90", "parameters": parameters}

    backward = named("gla_recurrent_backward", BONUS=True, CONSTANT_DECAY=True, HEAD_SIZE=8)
    forward = named("gla_recurrent_forward", BONUS=True, HEAD_SIZE=8)
    plain = named("gla_recurrent_forward", BONUS=False, DECAY="none", T_U="fp32", T_W="fp32")
    mine = named("gladly")
    wanted = {"wkv5": [backward, forward], "wkv6": [forward], "linear_attention": [plain], "wkv7": [], "gladly": [mine]}
    for op, kernels in wanted.items():
        every = (backward, forward, plain, mine)
        assert [each for each in every if commands._is_chosen(each, [op], None)] == kernels


def test_temporary_cache_of_the_demo_reads_nothing_and_leaves_the_variables_as_they_were(monkeypatch, fresh_service):
    from rwkv_jit.desk import demo

    put()
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(fresh_service))
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    before = dict(os.environ)
    with demo.empty_cache():
        assert env.cache_dir() != fresh_service
        assert env.cache_dir().is_dir()
        assert list(cache.stored()) == []
        assert not env.assert_cached()
        temporary = env.cache_dir()
    assert dict(os.environ) == before
    assert not temporary.exists()
    monkeypatch.delenv("RWKVJIT_CACHE_DIR")
    with demo.empty_cache():
        pass
    assert "RWKVJIT_CACHE_DIR" not in os.environ


def test_demo_tells_how_far_it_is(monkeypatch):
    from rwkv_jit.desk import demo

    told = []

    @contextmanager
    def progress(what):
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr(report, "progress", progress)
    monkeypatch.setattr(demo, "compiled", lambda arch: [])
    monkeypatch.setattr(demo, "_call", lambda *_: {"passed": True})
    monkeypatch.setattr(demo.identity, "version", lambda: "12.9")
    calls = len(demo.run()["calls"])
    assert told == [(done, calls) for done in range(calls)]


def test_tables_of_the_demo(capsys, monkeypatch):
    from rwkv_jit.desk import demo

    kernel = {
        "op": "wkv7", "head_size": 40, "direction": "forward", "backend": "recurrent", "arch": "sm_90",
        "target": "sm_90", "compile_ms": 447.4, "disk_ms": 0.321, "memory_ms": 0.05, "registers": 212, "spill_bytes": 0,
        "shared_bytes": 13824,
    }  # fmt: skip
    call = {
        "op": "wkv7", "head_size": 40, "dtype": "bfloat16", "error": 1.6e-3, "gradient_error": 1.7e-3,
        "limit": 3e-3, "forward_ms": 0.5, "forward_backward_ms": 2.25,
    }  # fmt: skip
    result = {
        "device": "a GPU", "on_gpu": True, "compiler": "NVRTC 12.9", "missing": None, "kernels": [kernel],
        "calls": [call], "checked_shape": (2, 128, 4), "timed_shape": (8, 1024, 32), "passed": True,
        "cache": {"path": "/cache", "entries": 3, "bytes": 77},
    }  # fmt: skip
    demo.show(result)
    lines = capsys.readouterr().out.splitlines()
    cells = [re.split("  +", line.strip()) for line in lines]
    for row in (
        ["op", "head size", "direction", "backend", "compile ms", "disk ms", "memory ms", "registers", "spill B",
         "shared B"],
        ["wkv7", "40", "forward", "recurrent", "447", "0.32", "0.050", "212", "0", "13824"],
        ["op", "head size", "dtype", "error y", "error grads", "limit", "forward ms", "fwd + bwd ms"],
        ["wkv7", "40", "bfloat16", "1.6e-03", "1.7e-03", "3e-03", "0.500", "2.250"],
        ["Errors are within the limits."],
    ):  # fmt: skip
        assert row in cells
    assert lines[-1] == "Your kernel cache was not touched: /cache, 3 kernels, 77 bytes."
    other = {name: 1.1 * x if isinstance(x, float) else x for name, x in call.items()} | {"op": "linear_attention"}
    narrow = shown(80, monkeypatch, lambda: demo.show(result | {"calls": [call, other]}))
    (row,) = (line.split() for line in narrow if line.startswith("  linear_attention"))
    assert row == ["linear_attention", "40", "bfloat16", "1.8e-03", "1.9e-03", "3e-03", "0.550", "2.475"]


def test_info_is_a_bug_report(data, run, fresh_service, monkeypatch):
    monkeypatch.setenv("RWKVJIT_LINEINFO", "1")
    found = data("info")
    assert found["cache"]["path"] == found["environment"]["cache"] == str(fresh_service)
    assert {"nvrtc", "torch", "cupy", "gpus", "python"} <= set(found["environment"])
    assert found["environment"]["rwkv_jit"] == rwkv_jit.__version__
    variables = {"RWKVJIT_CACHE_DIR": str(fresh_service), "RWKVJIT_LINEINFO": "1"}
    assert found["environment"]["environment"] == variables
    lines = run("info")[1].splitlines()
    assert lines[:2] == ["cache", f"  path             {fresh_service}"]
    words = ["environment", f"RWKVJIT_CACHE_DIR={fresh_service},", "RWKVJIT_LINEINFO=1"]
    assert words in [line.split() for line in lines]  # how wide the names are depends on whether NVRTC is there


WITHOUT_TORCH = """
import sys
from rwkv_jit.desk import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
sys.exit(f"imported torch: {'torch' in sys.modules}, {code}")
"""


OPS_SHOWN = f"expected one of {', '.join(OPS)}, got 'wkv8'"
BUILT_SHOWN = f"expected one of {', '.join(BUILT)}, got 'wkv8'"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("build --op wkv8", 2, f"--op: {BUILT_SHOWN}"),
        ("warm --op wkv6,wkv7", 2, "--head-size: wkv6 needs some, got none"),
        ("build --op wkv7 --head-size x", 2, "--head-size: expected a whole number of at least 1, got 'x'"),
        ("build --op wkv7 --arch sm_9", 2, "--arch: expected sm_NN, sm_NNa or compute_NN, got 'sm_9'"),
        (
            "build --op wkv7 --arch 90a",
            2,
            "--arch: expected sm_NN, sm_NNa or compute_NN, got '90a'; did you mean sm_90a?",
        ),
        ("build --op wkv7 --state-layout kk", 2, "--state-layout: expected one of vk, kv, got 'kk'"),
        ("build --op wkv4 --digest", 2, "--digest: is that of a bundle, which --output names"),
        ("build --model none.json", 2, "--model: none.json cannot be read: No such file or directory"),
        ("show wkv8", 2, f"op: {OPS_SHOWN}"),
        ("banana", 2, "command: invalid choice: 'banana'"),
        ("build --op wkv4 a\x1b[31mb", 2, r"unrecognized arguments: a\x1b[31mb"),
        ("info", 0, ""),
        ("cache list", 0, ""),
    ],
)
def test_what_needs_no_torch_does_not_import_it(command, code, message, child):
    done = child(WITHOUT_TORCH, *command.split(), check=False)
    *lines, last = done.stderr.splitlines()
    assert last == f"imported torch: False, {code}", done.stderr
    program = "rwkv-jit" if message.startswith(("command", "unrecog")) else f"rwkv-jit {command.split()[0]}"
    assert [line.startswith(f"{program}: {message}") for line in lines] == [True] * bool(message), done.stderr


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_path(run, data, fresh_service):
    assert run("cache", "path") == (0, f"{fresh_service}\n", "")
    assert data("cache", "path") == {"path": str(fresh_service)}


def test_list(run, data, tmp_path, monkeypatch):
    damaged, other = put(48, name="wkv7_join", VALUE_SIZE=64), put(8, arch="sm_80", name="my_template", T_IO="fp16")
    cache.export(tmp_path / "x.bundle", [each for each in cache.stored() if each.name.startswith("sm_80")])
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "x.bundle"))
    damage(damaged)
    more = {"VALUE_SIZE": 64, "NUM_THREADS": 64, "BACKWARD": True}
    for path in (damaged, other, put(48, name="wkv7_join", arch="sm_90a", **more)):
        used = int((datetime.now() - timedelta(hours=50)).timestamp())
        os.utime(path, (used, used))
    code, printed, said = run("cache", "list")
    assert (code, said) == (0, "")
    grouped = [
        ["op", "sizes", "dtype", "arch", "kernels", "MB", "unused", "layer", "state"],
        ["my_template", "8", "fp16", "sm_80", "1", "0.00", "2 d", "disk", "ok"],
        ["my_template", "8", "fp16", "sm_80", "1", "0.00", "-", "bundle", "ok"],
        ["wkv7", "48x64", "bf16", "sm_90a", "1", "0.00", "2 d", "disk", "ok"],
        ["wkv7_join", "-", "-", "sm_90", "1", "0.00", "2 d", "disk", "damaged"],
        [""],
        ["4 kernels (disk 3, bundle 1), 0.00193 MB"],
    ]
    assert [re.split("  +", line.strip()) for line in printed.splitlines()] == grouped
    lines = [
        ["op", "direction", "sizes", "dtype", "arch", "KB", "unused", "layer", "state", "kernel"],
        ["my_template", "-", "8", "fp16", "sm_80", "1", "2 d", "disk", "ok", "my_template"],
        ["wkv7_join", "-", "-", "-", "sm_90", "1", "2 d", "disk", "damaged", "wkv7_join"],
        ["wkv7", "backward", "48x64", "bf16", "sm_90a", "1", "2 d", "disk", "ok", "wkv7_join"],
        ["my_template", "-", "8", "fp16", "sm_80", "1", "-", "bundle", "ok", "my_template"],
    ]
    of_details = [
        ["threads", "chunk len", "registers", "spill B", "shared B", "parameters"],
        ["-", "-", "128", "16", "1024", "HEAD_SIZE=8, T_IO=fp16, VALUE_SIZE=8"],
        ["-", "-", "-", "-", "-", "none"],
        ["64", "-", "128", "16", "1024", "BACKWARD=True, HEAD_SIZE=48, NUM_THREADS=64, T_IO=bf16, VALUE_SIZE=64"],
        ["-", "-", "128", "16", "1024", "HEAD_SIZE=8, T_IO=fp16, VALUE_SIZE=8"],
    ]
    printed = run("cache", "list", "--verbose")[1].splitlines()
    found = [re.split("  +", line.strip()) for line in printed[:5]]
    assert found == [own + more for own, more in zip(lines, of_details, strict=False)]
    assert printed[5:] == ["", *grouped[-1]]
    rows = data("cache", "list")["entries"]
    assert [row["state"] for row in rows] == ["ok", "damaged", "ok", "ok"]
    assert rows[0] == {
        "layer": "disk", "arch": "sm_80", "name": "my_template", "op": "my_template", "direction": None,
        "head_size": "8", "dtype": "fp16",
        "threads": None, "chunk_len": None, "bytes": other.stat().st_size,
        "last_used": datetime.fromtimestamp(used).isoformat(" ", "minutes"),
        "registers": 128, "spill_bytes": 16, "shared_bytes": 1024, "state": "ok", "path": str(other),
        "parameters": {"HEAD_SIZE": 8, "VALUE_SIZE": 8, "T_IO": "fp16"},
    }  # fmt: skip
    assert rows[3]["last_used"] is None
    run("cache", "verify")
    assert other.stat().st_mtime == used  # listing is no use


def test_list_of_a_template_whose_sizes_are_no_whole_numbers(run):
    for size in (64.0, 8, 16, "wide"):
        put(size, name="my_template")
    code, printed, said = run("cache", "list")
    assert (code, said) == (0, "")
    assert [line.split()[1] for line in printed.splitlines()[1:5]] == ["8", "16", "64.0", "wide"]


def test_list_of_nothing(run, monkeypatch):
    assert run("cache", "list") == (0, "no kernels\n", "")
    put()
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    assert run("cache", "list") == (0, "RWKVJIT_CACHE=0 turns the cache off\n", "")
    monkeypatch.delenv("RWKVJIT_CACHE")
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", "~nosuchuser/x")
    code, printed, _ = run("cache", "list")
    assert (code, printed) == (0, "RWKVJIT_CACHE_DIR='~nosuchuser/x' names a home directory that there is not\n")


def test_show_by_name_key_and_file(data, run, monkeypatch):
    first, second, third = put(48), put(64), put(48, name="wkv6_recurrent_forward")
    manifest = {path: each.manifest for each in cache.stored() for path in [each.layer.path / each.name]}

    def shown(text):
        return {entry["path"] for entry in data("cache", "show", text)["entries"]}

    assert shown("wkv7_recurrent_forward") == {str(first), str(second)}
    assert shown("wkv") == {str(first), str(second), str(third)}
    key = manifest[first]["key"]
    assert shown(key) == shown(key[:12]) == shown(first) == shown(first.name) == {str(first)}
    monkeypatch.chdir(first.parent)
    assert shown(f"./{first.name}") == {str(first)}
    (entry,) = data("cache", "show", key)["entries"]
    assert entry == {"path": str(first), "layer": "disk", "state": "ok", "manifest": manifest[first]}
    lines = run("cache", "show", key)[1].splitlines()
    assert lines[0] == f"{first}: ok"
    assert f"  key         {key}" in lines
    assert "  parameters  HEAD_SIZE=48, T_IO=bf16, VALUE_SIZE=48" in lines
    assert any("'registers': 128" in line for line in lines)
    damage(first)
    (entry,) = data("cache", "show", key[:40])["entries"]
    assert (entry["state"], entry["manifest"]) == ("damaged", {})


def test_verify_names_what_is_damaged_in_any_layer(data, run, tmp_path, monkeypatch, fresh_service):
    intact, damaged = put(48), put(64)
    assert run("cache", "verify") == (0, "2 kernels (disk 2) read, 0 faults\n", "")
    damage(damaged)
    swapped = fresh_service / "sm_90" / f"wkv7_recurrent_forward-{'0' * 40}.cubin"
    swapped.write_bytes(intact.read_bytes())
    swapped.chmod(0o600)
    swapped.with_name("foreign.cubin").write_bytes(b"")
    broken, missing = tmp_path / "broken.bundle", tmp_path / "missing"
    broken.write_bytes(b"PK nothing")
    broken.chmod(0o600)
    shared = tmp_path / "shared" / "sm_90"
    shared.mkdir(parents=True)
    for folder in (tmp_path, shared.parent, shared):
        folder.chmod(0o755)
    (shared / intact.name).write_bytes(b"short")
    (shared / intact.name).chmod(0o600)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join(map(str, (broken, missing, shared.parent))))
    code, printed, _ = run("cache", "verify", "--json")
    found = json.loads(printed)
    assert code == 1
    assert found["checked"] == 4
    assert not found["passed"]
    faults = {entry["path"]: entry["fault"] for entry in found["damaged"]}
    assert set(faults) == set(map(str, (damaged, swapped, broken, missing, shared / intact.name)))
    assert faults[str(damaged)] == "damaged"
    assert "another kernel" in faults[str(swapped)]
    assert "not an intact rwkv_jit bundle" in faults[str(broken)]
    assert "No such file" in faults[str(missing)]
    code, printed, _ = run("cache", "verify")
    assert code == 1
    assert f"{damaged}: damaged\n" in printed
    assert printed.endswith("4 kernels (disk 3, shared 1) read, 5 faults\n")


@pytest.mark.parametrize("number", [None, "2"])
@pytest.mark.parametrize("arguments", [["demo"], ["bench"], ["bench", "--shape", "1,8,2,8"]])
def test_small_tensors_are_computed_on_one_thread(arguments, number, run, monkeypatch):
    torch = pytest.importorskip("torch")
    threads = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if number:
        monkeypatch.setenv("OMP_NUM_THREADS", number)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("rwkv_jit.desk.demo", "rwkv_jit.desk.bench"):
        monkeypatch.setattr(f"{module}.run", lambda *_: {})
        monkeypatch.setattr(f"{module}.show", lambda _: None)
    assert run(*arguments)[0] == 0
    assert threads == ([] if number or "--shape" in arguments else [1])


def test_prune_deletes_an_imported_bundle_that_is_damaged(run, fresh_service, tmp_path):
    put(48)
    for name in ("first", "second"):
        assert run("cache", "export", str(tmp_path / name))[0] == 0
        assert run("cache", "import", str(tmp_path / name))[0] == 0
        put(64)
    first, second = sorted(fresh_service.glob("bundles/*.bundle"))
    untouched = second.read_bytes()
    first.write_bytes(first.read_bytes()[:200])
    cache.forget()
    printed = run("cache", "verify")[1]
    assert printed.startswith(f"{first} is not an intact rwkv_jit bundle: ")
    assert printed.count(str(first)) == 1
    said = run("cache", "prune")[1]
    assert said.startswith("0 damaged and 0 old kernels deleted, and 1 damaged bundles; 2 are left, ")
    assert (first.exists(), second.read_bytes()) == (False, untouched)
    assert run("cache", "verify")[0] == 0
    second.write_bytes(b"not of this format")  # its name is the digest: another version may have written it
    second = second.rename(second.with_name(f"{sha256(b'not of this format').hexdigest()[:40]}.bundle"))
    assert "bundles" not in run("cache", "prune")[1]
    assert second.exists()


def test_prune_deletes_what_is_damaged_then_what_was_not_used_for_long(data, run, fresh_service):
    old, new, damaged, untrusted = put(1), put(2), put(3), put(4)
    cache.forget()  # what this process has stored would stay
    damage(damaged)
    for age, path in ((4e8, old), (3e8, new), (2e8, untrusted)):
        os.utime(path, (1e9 - age, 1e9 - age))
    untrusted.chmod(0o666)
    assert data("cache", "prune") == {
        "damaged": 1, "damaged_bundles": 0, "evicted": 0, "entries": 3, "bytes": cache.size()
    }  # fmt: skip
    assert not damaged.exists()
    limit = (cache.size() - 1) / 2**20
    found = data("cache", "prune", "--max-mb", limit)
    assert (found["evicted"], found["entries"]) == (1, 2)
    assert not old.exists()
    assert new.exists()
    assert untrusted.exists()
    assert run("cache", "prune", "--max-mb", 0)[1] == "0 damaged and 2 old kernels deleted; 0 are left, 0 bytes\n"


def test_counts_agree_where_kernels_lie_in_a_bundle_too(run, tmp_path, fresh_service):
    put(1), put(2)
    tmp_path.chmod(0o755)
    run("cache", "export", tmp_path / "x.bundle", "--op", "wkv7")
    put(3)
    run("cache", "import", tmp_path / "x.bundle")
    count = "5 kernels (disk 3, bundle 2)"
    assert run("cache", "list")[1].splitlines()[-1] == f"{count}, 0.00242 MB"
    assert run("cache", "verify")[1] == f"{count} read, 0 faults\n"
    assert run("cache", "clear")[1] == f"{count} deleted from {fresh_service}\n"
    assert run("cache", "verify")[1] == "0 kernels (none) read, 0 faults\n"


def test_export_and_import_go_around(run, data, tmp_path, fresh_service):
    forward, _ = put(48), put(48, name="wkv7_recurrent_backward", arch="sm_80")
    stranger = put(48, name="wkv7extra")
    damage(put(8))
    tmp_path.chmod(0o755)
    file = tmp_path / "x.bundle"
    assert data("cache", "export", file)["kernels"] == 3
    assert data("cache", "export", file, "--op", "wkv7")["kernels"] == 2
    assert data("cache", "export", file, "--op", "wkv7,wkv7extra", "--arch", "sm_90")["kernels"] == 2
    assert sorted(bundle.Bundle(file).names()) == sorted(f"sm_90/{path.name}" for path in (forward, stranger))
    assert data("cache", "export", file, "--arch", "sm_90", "--op", "wkv7_recurrent_forward") == {
        "path": str(file), "kernels": 1, "bytes": file.stat().st_size,
    }  # fmt: skip
    entry = forward.read_bytes()
    cache.clear()
    code, printed, _ = run("cache", "import", file, file)
    assert code == 0
    assert printed == f"1 kernels of {file} copied into {fresh_service}\n" * 2
    (stored,) = cache.stored()
    assert stored.layer.origin == "bundle"
    assert stored.layer.read(stored.name) == entry
    assert data("cache", "import", file)["bundles"] == [{"path": str(file), "kernels": 1}]
    (imported,) = (fresh_service / "bundles").iterdir()
    assert imported.read_bytes() == file.read_bytes()
    assert stat.S_IMODE(imported.parent.stat().st_mode) == 0o700
    kernel, origin = cache.get(stored.manifest["name"], "sm_90", stored.manifest["key"])
    assert (kernel.image, origin) == (image(b"code"), "bundle")


# ---- tables ------------------------------------------------------------------------------------------------------

HEAD = ("op", "head size", "state")
ROWS = [("wkv7", 64, "ok"), ("wkv6", "8", "a [red] word"), ("x", "-", "error\nin two lines")]


def test_plain_table(capsys):
    report.table(HEAD, ROWS)
    report.table((), [("path", "/x y"), ("bytes", "7")])
    report.table(HEAD, [])
    assert capsys.readouterr().out == (
        "  op    head size  state\n"
        "  wkv7         64  ok\n"
        "  wkv6          8  a [red] word\n"
        "  x             -  error in two lines\n"
        "  path   /x y\n"
        "  bytes  7\n"
        "  op  head size  state\n"
    )


class Terminal(io.StringIO):
    """What is written to it is kept."""

    def isatty(self):
        return True


def test_table_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    report.table(HEAD, ROWS)
    report.table((), [("path", "/x"), ("long", "long " * 30 + "y" * 120)])
    text = terminal.getvalue()
    assert "─" in text
    assert "a [red] word" in text
    assert "  wkv7         64  ok\n" in text
    assert "path\n    /x" in text
    assert "y" * 120 in text


def test_colours_are_for_states_and_not_for_columns_that_are_called_so(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    printed = []
    for _ in range(2):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setenv("TERM", "xterm")
            report.table(("op", "error", "ok"), [("wkv7", "1e-3", "error"), ("wkv6", "1e-3", "ok")])
        printed.append(terminal.getvalue().splitlines())
        monkeypatch.setenv("NO_COLOR", "1")
    coloured, plain = printed
    assert [("\x1b[" in line) for line in coloured] == [False, False, True, True]
    assert plain == ["  op    error  ok", "  ────  ─────  ─────", "  wkv7   1e-3  error", "  wkv6   1e-3  ok"]


KERNELS = [
    {
        "name": name, "op": op, "arch": arch, "direction": way, "head_size": "128x256", "dtype": "bf16",
        "threads": threads, "chunk_len": 64, "registers": 1234567 + threads, "spill_bytes": 0, "shared_bytes": 7654321,
        "bytes": 654321,
        "origin": "compiled",
        "parameters": {f"A_LONG_CONSTANT_{number}": number for number in range(20)} | {"FOR_GROUPS": groups},
    }
    for name, op, arch, way, threads, groups in [
        ("wkv7_recurrent_backward", "wkv7", "sm_90a", "backward", 128, False),
        ("gla_scan", "gla, linear_attention", "sm_120a", "forward", 384, True),
        ("gla_scan", "wkv5 and 3 more", "sm_90a", "forward", 384, False),
        ("gla_group_key_gradients", "gla", "sm_90a", "backward", 1024, False),
    ]
]  # fmt: skip


def shown(columns, monkeypatch, show):
    """Return the lines printed on a terminal of so many columns; one that does not fit is a single word."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("TERM", "dumb")
        patch.setenv("COLUMNS", str(columns))
        show()
    lines = terminal.getvalue().splitlines()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines), "\n".join(lines)
    return lines


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_table_fits_the_terminal_and_breaks_no_word(columns, monkeypatch):
    shown(columns, monkeypatch, lambda: cli.main(["info"]))
    lines = shown(columns, monkeypatch, lambda: kernel_table.show(KERNELS, {"origin": "{origin}"}, is_verbose=True))
    words = {word.strip(",.") for line in lines for word in line.split()}
    always = {"wkv7_recurrent_backward", "gla_scan", "gla_group_key_gradients", "backward", "forward", "sm_90a",
              "128x256", "bf16", "128", "384", "1024", "64", "FOR_GROUPS=True", "FOR_GROUPS=False",
              "A_LONG_CONSTANT_19=19"}  # fmt: skip
    assert always <= words


@pytest.mark.parametrize("columns", [80, 120])
def test_kernels_of_an_op_and_its_sizes_take_one_line(columns, monkeypatch):
    several = [*KERNELS, KERNELS[0] | {"name": "wkv7_scan"}, KERNELS[0] | {"head_size": "64"}]
    lines = shown(columns, monkeypatch, lambda: kernel_table.show(several, {"origin": "{origin}"}, is_verbose=False))
    assert [re.split("  +", line.strip()) for line in lines[-5:]] == [
        ["gla", "128x256", "bf16", "sm_90a", "1", "0.62", "compiled"],
        ["gla, linear_attention", "128x256", "bf16", "sm_120a", "1", "0.62", "compiled"],
        ["wkv5 and 3 more", "128x256", "bf16", "sm_90a", "1", "0.62", "compiled"],
        ["wkv7", "64", "bf16", "sm_90a", "1", "0.62", "compiled"],
        ["wkv7", "128x256", "bf16", "sm_90a", "2", "1.25", "compiled"],
    ]


def test_the_list_of_a_longest_name_fits_80_columns(monkeypatch):
    ops = {kernel_table._called_by("head_decay_forward", {"HEAD_SIZE": 128, "HAS_DELTA": x}) for x in (True, False)}
    rows = [KERNELS[0] | {"op": op, "last_used": "2020-01-01 10:00", "arch": "sm_100"} for op in ops]
    lines = shown(80, monkeypatch, lambda: kernel_table.show(rows, {"unused": "{age}"}, is_verbose=False))
    assert len(lines) == 2 + len(ops)


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.through is None])
def test_kernels_are_listed_by_the_ops_that_take_them(op):
    """The constants of an op are in its kernels, and whatever names no op names its template."""
    entry, sizes = OPS[op], {"HEAD_SIZE": 8} if OPS[op].has_heads else {"T_IO": "bf16"}
    found = kernel_table.described(
        f"{entry.stem}_recurrent_backward", {**entry.constants, **entry.backward_constants, **sizes}
    )
    assert op in found["op"].split(", ")
    assert not kernel_table.is_of("wkv7" if op == "gla" else "gla", "update_states", {"DELTA": op != "gla", **sizes})
    assert not kernel_table.is_of(op, "update_rules", {"DELTA": op == "wkv7", **sizes})
    for name, is_delta in (("kda", True), ("delta_rule", True), ("ssd", False), ("hgrn2", False)):
        found = [kernel_table.is_of(name, "update_rules", {"DELTA": x}) for x in (is_delta, not is_delta)]
        assert found == [True, False]
    for name in ("copy_states", "layer_loss_forward", "update_rules", "mine"):
        assert kernel_table.described(name, {"HEAD_SIZE": 8})["op"] == name
    for name, called_by in (
        ("layer_gated_norm", "gated_norm"), ("layer_norm_shift_mixes", "norm_shift"),
        ("layer_convolution_update", "causal_conv1d"), ("channel_decay_group_forward", "kda"),
    ):  # fmt: skip
        assert kernel_table.described(name, {"HEAD_SIZE": 8})["op"] == called_by
    assert kernel_table.described("head_decay_forward", {"HAS_DELTA": True, "DECAY": "none"})["op"] == "delta_rule"
    of_kda = ("channel_decay_group_backward", "layer_delta_operands", "wkv7_scan")
    assert all(kernel_table.is_of("kda", name, {}) for name in of_kda)
    assert not any(kernel_table.is_of("ssd", name, {}) for name in of_kda)
    assert kernel_table.described("gla_join", {"HEAD_SIZE": 8})["op"] == "wkv5 and 3 more"


HOSTILE = "a\x1b[31mb\x9b2J\u202ec\x07\rd\udcff"
ESCAPED = r"a\x1b[31mb\x9b2J\u202ec\x07\rd\udcff"


@pytest.mark.parametrize(
    "command",
    [["cache", "list"], ["cache", "path"], ["cache", "verify"], ["cache", "show", "k"], ["info"], ["doctor"],
     ["cache", "import", HOSTILE], ["cache", "show", HOSTILE], ["show", HOSTILE],
     ["build", "--model", f"{HOSTILE}.json"], ["build", "--op", HOSTILE], ["cache", "clear"], ["run", HOSTILE]],
    ids=" ".join,
)  # fmt: skip
def test_a_terminal_does_not_obey_names(command, run, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / HOSTILE))
    damage(put(name=f"k{HOSTILE}"))
    put(name="k2")
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / f"no {HOSTILE}"))
    _, printed, said = run(*command)
    text = printed + said + "".join(caplog.messages)
    assert not re.search(r"[^\n -~…─\u2026]", text.replace("→", "")), ascii(text)
    assert r"\x1b[31mb" in text


def test_what_all_rows_share_is_said_once_where_there_is_little_room(monkeypatch):
    rows = [("a" * 20, "sm_90", "b" * 26, number) for number in range(3)]
    lines = shown(60, monkeypatch, lambda: report.table(("one", "arch", "two", "count"), rows))
    assert lines[0] == "  In every row: arch sm_90, two bbbbbbbbbbbbbbbbbbbbbbbbbb."
    assert lines[1].split() == ["one", "count"]
    assert [line.split() for line in lines[3:]] == [["a" * 20, str(number)] for number in range(3)]


def test_columns_are_spared_in_their_order(monkeypatch):
    rows = [(letter * 30, letter * 20, letter * 20, letter) for letter in "ab"]
    lines = shown(60, monkeypatch, lambda: report.table(("k", "l", "m", "n"), rows, ["x", "m", "l", "n"]))
    assert lines[0] == "  A wider terminal shows m too."
    assert [line.split() for line in lines[3:]] == [["a" * 30, "a" * 20, "a"], ["b" * 30, "b" * 20, "b"]]


def test_records_name_what_they_say(monkeypatch):
    rows = [("first", "x" * 40, 12, "-"), ("second", "y" * 40, 345, "z" * 30)]
    lines = shown(60, monkeypatch, lambda: report.table(("name", "long", "count", "rest"), rows))
    of_second = [f"    long {'y' * 40},", f"    count 345, rest {'z' * 30}"]
    assert lines == ["  first", f"    long {'x' * 40}, count 12", "  second", *of_second]


def test_paths_are_broken_behind_slashes(monkeypatch):
    path = "/home/somebody/a/long/way/to/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    lines = shown(60, monkeypatch, lambda: report.table((), [("nvrtc", path), ("bytes", "7")]))
    assert "".join(line.strip() for line in lines[:-1]).replace(" ", "") == f"nvrtc{path}"
    assert all(line.endswith("/") for line in lines[:-2])


def test_progress_is_shown_on_a_terminal_only(monkeypatch):
    with report.progress("compiling") as update:
        assert update is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with report.progress("compiling") as update:
        update(0, 4)
        update(1, 4)
    assert "compiling" in terminal.getvalue()
    assert "25%" in terminal.getvalue()


# ---- machine code ------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Puts programs in the place of NVIDIA's; returns the folder of those that PATH leads to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return folder


def program_at(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("arch", "command"),
    [("sm_75", "nvidia-cuda-nvdisasm"), ("sm_120", "nvidia-cuda-nvdisasm"), ("sm_70", "triton==3.6.0")],
)
def test_without_a_disassembler_the_error_names_the_wheel(arch, command, tools):
    with pytest.raises(RwkvJitError) as caught:
        sass.disassemble(b"", arch)
    assert str(caught.value) == (
        f"there is neither nvdisasm nor cuobjdump; install a disassembler of {arch}: pip install {command}"
    )


@pytest.mark.parametrize(
    "where", ["bin", "home/bin", "packages/nvidia/cu13/bin", "packages/triton/backends/nvidia/bin"]
)
@pytest.mark.parametrize(("name", "option"), [("nvdisasm", "-c"), ("cuobjdump", "-sass")])
def test_disassembler_is_found(where, name, option, tools, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    program_at(tmp_path / where, name, 'echo "$1"; /bin/cat "$2"')
    assert sass.disassemble(b"a cubin", "sm_90") == f"{option}\na cubin"


def test_disassembler_that_fails_makes_room_for_the_next(tools, tmp_path):
    program_at(tools, "nvdisasm", "echo too old >&2; exit 1")
    with pytest.raises(RwkvJitError, match=r"bin/nvdisasm cannot read sm_120 \(too old\); install .* sm_120: pip"):
        sass.disassemble(b"", "sm_120")
    program_at(tools, "cuobjdump", "echo code")
    assert sass.disassemble(b"", "sm_120") == "code\n"
