"""The commands that compile: build, show and doctor."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import rwkv_jit
from rwkv_jit.kernels import cache, identity, kernel, stats, template
from rwkv_jit.kernels.cache import bundle
from rwkv_jit.schedules.build_command import OPS
from rwkv_jit.schedules.table import ALL

pytestmark = pytest.mark.usefixtures("compiled_once")

SMALL = ("--op", "wkv7", "--head-size", "16", "--arch", "sm_90")
# Calls take the chunked kernels, and with decays that nothing bounds the recurrent ones too.
WAYS = (
    "wkv7_chunked_forward", "wkv7_chunked_backward", "wkv7_recurrent_forward", "wkv7_recurrent_backward", "wkv7_join",
    "wkv7_segment", "copy_states",
)  # fmt: skip


@pytest.fixture
def build(run):
    """Builds; returns what --json printed."""

    def build(*arguments):
        code, printed, said = run("build", *arguments, "--json")
        assert code == 0, said
        return json.loads(printed)

    return build


def parameters(made, *names):
    return [tuple((each | each["parameters"]).get(name) for name in names) for each in made["kernels"]]


# ---- build -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("listed_only")
def test_bundle_holds_what_was_asked_for_and_serves_it(build, tmp_path, monkeypatch, fresh_service):
    tmp_path.chmod(0o755)
    file = tmp_path / "wkv.bundle"
    made = build("--op", "wkv7", "--head-size", "16,8", "--arch", "sm_90", "--arch", "compute_80", "-o", file)
    assert (made["path"], made["bytes"], made["compiler"]) == (str(file), file.stat().st_size, identity.identity())
    archs = ("sm_90", "compute_80")
    asked = {(size, arch, way) for size in (8, 16) for arch in archs for way in WAYS}
    asked |= {(None, arch, "cut_sequences") for arch in archs}
    asked |= {(size, arch, "update_states") for size in (8, 16) for arch in archs}
    of_few_heads = {("sm_90", "wkv7_prepare"), ("sm_90a", "wkv7_group_scan")}
    asked |= {(size, *kernel) for size in (8, 16) for kernel in of_few_heads}
    found = {(each["parameters"].get("HEAD_SIZE"), each["arch"], each["name"]) for each in made["kernels"]}
    assert found == asked
    assert all((each["registers"] is None) == (each["target"] == "compute_80") for each in made["kernels"])
    names = bundle.Bundle(file).names()
    assert len(names) == len(made["kernels"])
    assert sorted(names) == sorted(path.relative_to(fresh_service).as_posix() for path in cache.entries())

    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(file))
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    kernel.forget()
    assert rwkv_jit.specialize("wkv7", 8, arch="compute_80", direction="backward").origin == "bundle"


@pytest.mark.usefixtures("listed_only")
def test_equal_builds_are_equal_bytes_whatever_the_cache_held(build, tmp_path, monkeypatch):
    files = [tmp_path / f"{number}.bundle" for number in range(4)]
    origins = []
    for number, (archs, file) in enumerate(zip(("sm_80,sm_90", "sm_90,sm_80", "sm_80,sm_90"), files, strict=False)):
        if number == 2:
            monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / "another cache"))
        kernel.forget()
        made = build("--op", "wkv7", "--head-size", "8", "--arch", archs, "--direction", "forward", "-o", file)
        origins.append({each["origin"] for each in made["kernels"]})
    assert origins == [{"compiled"}, {"disk"}, {"compiled"}]
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()

    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    kernel.forget()
    build("--op", "wkv7", "--head-size", "8", "--arch", "sm_80,sm_90", "--direction", "forward", "-o", files[3])
    assert files[3].read_bytes() == files[0].read_bytes()


def test_kernels_of_another_compiler_do_not_get_into_a_bundle(build, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    one = (*SMALL, "--direction", "backward", "--dtype", "fp32", "-o")
    named = {"head_size": 16, "dtype": torch.float32, "arch": "sm_90", "direction": "backward"}
    build(*one, tmp_path / "own.bundle")
    foreign = rwkv_jit.specialize("wkv7", **named)
    foreign.compiler = "99.9 ffff"
    bundle.write(tmp_path / "foreign.bundle", [foreign.entry()])
    cache.clear()
    cache.import_bundle(tmp_path / "foreign.bundle")
    kernel.forget()
    assert rwkv_jit.specialize("wkv7", **named).compiler == "99.9 ffff"

    made = build(*one, tmp_path / "again.bundle")
    assert {each["compiler"] for each in made["kernels"]} == {identity.identity()}
    assert (tmp_path / "again.bundle").read_bytes() == (tmp_path / "own.bundle").read_bytes()


def test_without_a_file_the_cache_is_filled(build, run, fresh_service):
    small = (*SMALL, "--direction", "backward", "--dtype", "fp32")
    made = build(*small)
    assert (made["path"], made["bytes"]) == (str(fresh_service), None)
    assert len(cache.entries()) == len(made["kernels"]) == 1
    code, printed, _ = run("build", *small, "--verbose")
    assert code == 0
    (row,) = [line.split(maxsplit=13) for line in printed.splitlines() if "wkv7" in line]
    (about,) = made["kernels"]
    (path,) = cache.entries()
    size = path.stat().st_size
    assert row[:-1] == [
        "wkv7", "backward", "16", "fp32", "sm_90", str(-(-size // 1024)), "memory", "wkv7_recurrent_backward",
        str(about["threads"]), str(about["chunk_len"]), str(about["registers"]), str(about["spill_bytes"]),
        str(about["shared_bytes"]),
    ]  # fmt: skip
    assert "HEAD_SIZE=16" in row[-1]
    assert printed.splitlines()[-1] == (
        f"1 kernels, {size / 2**20:.3g} MB, in {fresh_service}, by NVRTC {identity.version()}"
    )


@pytest.mark.usefixtures("listed_only")
def test_every_option_is_a_list(build):
    made = build(
        "--op", "wkv6", "--head-size", "8", "--arch", "compute_80", "--direction", "forward", "--dtype", "bf16, fp16",
        "--decay", "log", "--decay", "direct", "--state-layout", "kv", "--w-dtype", "fp32", "--state-dtype",
        "fp16,fp32",
    )  # fmt: skip
    found = parameters(made, "name", "RAGGED", "T_IO", "T_W", "T_U", "DECAY", "STATE_LAYOUT", "T_STATE")
    cases = [(dtype, "fp32", decay) for dtype in ("bf16", "fp16") for decay in ("log", "direct")]
    states = [("kv", "fp16"), ("kv", "fp32")]
    wanted = [("cut_sequences", *[None] * 7)]
    wanted += [("copy_states", False, *[None] * 6)] * 4  # from and to both types of states
    wanted += [("copy_states", True, *[None] * 6)] * 2  # to both
    for is_ragged in (False, True):
        wanted += [("gla_join", is_ragged, *[None] * 6)]
        wanted += [("gla_segment", is_ragged, *case[:2], None, case[2], None, None) for case in cases]
    of_scans = [*4 * states, ("vk", "fp32")]  # of long calls and short ones, many heads and few, and of segments
    for name, of_states in (("gla_recurrent_forward", states), ("gla_scan", of_scans)):
        wanted += [(name, None, *case[:2], "fp32", case[2], *state) for case in cases for state in of_states]
    # Of one token and of several, from states of these types, or from none.
    of_few_tokens = [*2 * states, *2 * states[1:]]
    wanted += [("update_states", None, *case[:2], "fp32", case[2], *state) for case in cases for state in of_few_tokens]
    assert sorted(found, key=str) == sorted(wanted, key=str)


@pytest.mark.usefixtures("listed_only")
@pytest.mark.parametrize(("dtype", "usual"), [("bf16", {"bf16"}), ("fp32", set())])
def test_precision_is_that_of_calls_after_the_switches(build, dtype, usual):
    options = ("--op", "gla", "--head-size", "8", "--arch", "sm_80", "--dtype", dtype)
    for more, operands in (((), usual), (("--precision", "high"), {"fp16"})):
        found = parameters(build(*options, *more), "name", "T_IO")
        assert {row[1] for row in found if row[0] == "gla_scan"} == operands
        assert ("narrow_rows" in {row[0] for row in found}) == bool(more)


@pytest.mark.usefixtures("listed_only")
def test_every_op_is_built_with_the_options_that_it_has(build, run, tmp_path):
    """Head sizes are for wkv7, tokens for timex, and rows are told apart by what they show."""
    tmp_path.chmod(0o755)
    sizes = ("--head-size", "8", "--value-size", "8,16", "--tokens", "250")
    options = ("--op", "wkv4,timex,wkv7", *sizes, "--arch", "sm_80")
    made = build(*options, "--state-layout", "kv", "--decay-bound", "-1", "-o", tmp_path / "all.bundle")["kernels"]
    for name, count in (("wkv4_forward", 2), ("wkv4_backward", 2), ("timex_convolve", 6), ("timex_filter_gradient", 2)):
        assert [each["name"] for each in made].count(name) == count
    assert {each["parameters"]["VECTOR"] for each in made if each["name"] == "timex_convolve"} == {1}
    of_wkv7 = [each["parameters"] for each in made if each["name"].startswith("wkv7")]
    assert {(each["HEAD_SIZE"], each["VALUE_SIZE"]) for each in of_wkv7} == {(8, 8), (8, 16)}
    assert {each["STATE_LAYOUT"] for each in of_wkv7 if "STATE_LAYOUT" in each} == {"kv", "vk"}
    grouped = run("build", *options)[1].splitlines()[1:-2]
    assert sum(int(line.split()[-3]) for line in grouped) == 77
    assert len(grouped) == 13
    rows = run("build", *options, "--verbose")[1].splitlines()[1:-2]
    assert len(rows) == len(set(rows)) == 77

    for op, stem in (("wkv4", "wkv4_"), ("timex", "timex_")):
        file = tmp_path / f"{op}.bundle"
        assert run("cache", "export", file, "--op", op)[0] == 0
        kinds = {name.split("/")[1].split("_")[0] + "_" for name in bundle.Bundle(file).names()}
        assert kinds - {"sum_", "copy_", "cut_"} == {stem}  # and what all ops take
    one_batch = build("--op", "timex", "--tokens", "512", "--batch", "8", "--direction", "forward", "--arch", "sm_80")
    assert parameters(one_batch, "name", "BATCH") == [("timex_convolve", 8)]


@pytest.mark.usefixtures("listed_only")
@pytest.mark.parametrize(
    ("bound", "dtypes"), [((), ["bf16"]), (("--decay-bound", "-1", "--dtype", "bf16,fp16"), ["bf16", "fp16"])]
)
def test_defaults_are_those_of_a_call(bound, dtypes, build):
    """A bound of the decay changes no kernel, where the chunk is short enough for it."""
    made = build("--op", "wkv6", "--head-size", "8", "--arch", "compute_80", "--direction", "forward", *bound)
    both = (False, True)  # segments that are equal, and ragged ones
    wanted = {("cut_sequences", *[None] * 7), ("copy_states", True, *[None] * 6)}
    wanted |= {("gla_join", is_ragged, *[None] * 6) for is_ragged in both}
    for dtype in dtypes:
        names = "gla_recurrent_forward", "gla_scan", "update_states"
        wanted |= {(name, None, *[dtype] * 3, "raw", "vk", "fp32") for name in names}
        wanted |= {("gla_segment", is_ragged, dtype, dtype, None, "raw", None, None) for is_ragged in both}
    assert set(parameters(made, "name", "RAGGED", "T_IO", "T_W", "T_U", "DECAY", "STATE_LAYOUT", "T_STATE")) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "wkv7,wkv8"), f"op: expected one of {', '.join(OPS)}, got 'wkv8'"),
        (("--arch", "sm_80,banana"), "arch: expected sm_NN, sm_NNa or compute_NN, got 'banana'"),
        (("--arch", "sm_90,"), "arch: expected sm_NN, sm_NNa or compute_NN, got ''"),
        (("--arch", "sm_30"), "got sm_30"),
        (("--decay", "raw,soft"), "decay: expected one of raw, sigmoid, log, direct, got 'soft'"),
        (("--state-layout", "kk"), "--state-layout: expected one of vk, kv, got 'kk'"),
        (("--decay-bound", "1"), "--decay-bound: expected a negative number, the least log-decay of a step, got 1.0"),
        (("-o", "{tmp}/missing/x.bundle"), "{tmp}/missing/x.bundle (No such file or directory); name another"),
        (("-o", "{tmp}/file/x.bundle"), "{tmp}/file/x.bundle (Not a directory); name another"),
        (("-o", "{tmp}"), "--output: expected a place that can be written, got {tmp} (it is a directory)"),
    ],
)
@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_bad_input_is_told_before_anything_is_compiled(arguments, message, json_option, run, tmp_path):
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*.bundle"))
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    rest = [] if "-o" in given else ["-o", tmp_path / "x.bundle"]
    code, printed, said = run("build", *SMALL, *given, *rest, *json_option)
    assert (code, printed) == (2, "")
    assert said.startswith("rwkv-jit build: ")
    assert message.format(tmp=tmp_path) in said
    assert said.count("\n") == 1
    assert stats.snapshot()["compiled"] == 0
    assert sorted(tmp_path.rglob("*.bundle")) == before == []


@pytest.mark.parametrize(
    ("cache_is_on", "arguments", "message"),
    [
        ("1", SMALL[:4], "--arch: there is no GPU; pass an architecture, e.g. --arch sm_90\n"),
        ("0", SMALL, "RWKVJIT_CACHE=0 turns the cache off: unset it, or name a bundle with --output\n"),
        ("1", SMALL, "{} can be written by others (mode 777); fix it: chmod go-w"),
    ],
    ids=["no GPU", "off", "others may write"],
)
def test_cache_that_cannot_be_filled_is_told_before_compiling(
    cache_is_on, arguments, message, run, monkeypatch, fresh_service
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("RWKVJIT_CACHE", cache_is_on)
    fresh_service.mkdir()
    fresh_service.chmod(0o777)
    code, _, said = run("build", *arguments)
    assert (code, stats.snapshot()["compiled"]) == (2, 0)
    assert said.startswith(f"rwkv-jit build: {message.format(fresh_service)}")


def test_directory_without_permission_to_write_is_told_before_compiling(child, read_only, tmp_path):
    folder = read_only(tmp_path / "protected")
    code = "import sys\nfrom rwkv_jit.desk import cli\nfrom rwkv_jit.kernels import stats\n"
    code += "print(cli.main(sys.argv[1:]), stats.snapshot()['compiled'])"
    done = child(code, "build", *SMALL, "-o", folder / "x.bundle", after="torch", unprivileged=True)
    assert done.stdout == "2 0\n"
    assert f"got {folder}/x.bundle (Permission denied); name another" in done.stderr


def test_rule_of_a_template_that_does_not_hold_leaves_no_file(run, tmp_path):
    (tmp_path / "x.bundle").write_bytes(b"of before")
    code, printed, said = run("build", "--op", "wkv7", "--head-size", "9000", "--arch", "sm_90", "-o",
                              tmp_path / "x.bundle")  # fmt: skip
    assert (code, printed) == (2, "")
    assert "rwkv-jit build: wkv7_recurrent_" in said
    assert "needs more than 48 KB of shared memory; got" in said
    assert (tmp_path / "x.bundle").read_bytes() == b"of before"
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_interrupt_leaves_neither_traceback_nor_file(tmp_path, fresh_service):
    sizes = ",".join(map(str, range(1, 33)))  # whose kernels take seconds
    command = [sys.executable, "-m", "rwkv_jit", "build", "--op", "wkv7", "--head-size", sizes, "--dtype", "fp32",
               "--direction", "forward", "--arch", "sm_90", "-o", str(tmp_path / "x.bundle")]  # fmt: skip

    def heed():  # what runs in the background of a shell ignores interrupts, and so do its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    ) as process:
        deadline = time.monotonic() + 300
        while not cache.entries() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=300)
    assert cache.entries()
    assert process.returncode == 130, said
    assert printed == ""
    assert "Traceback" not in said
    assert not (tmp_path / "x.bundle").exists()


# ---- show --------------------------------------------------------------------------------------------------------


def test_resources(run):
    made = rwkv_jit.specialize("wkv7", 12, arch="sm_90", direction="backward")
    arguments = ("show", "wkv7", "--head-size", 12, "--arch", "sm_90", "--direction", "backward")
    code, printed, _ = run(*arguments)
    assert code == 0
    lines = printed.splitlines()
    assert lines[0] == f"wkv7_chunked_backward for sm_90, by NVRTC {identity.version()}: memory"
    assert lines[3].split() == ["kernel", "registers", "spill", "B", "shared", "B"]
    assert {line.split()[0]: [*map(int, line.split()[1:])] for line in lines[4:]} == {
        name: [used.registers, used.spill_bytes, used.shared_bytes] for name, used in made.resources.items()
    }
    data = json.loads(run(*arguments, "--resources", "--json")[1])
    assert (data["registers"], data["parameters"]["HEAD_SIZE"], data["compiler"]) == (
        made.registers, 12, identity.identity(),
    )  # fmt: skip


@pytest.mark.usefixtures("listed_only")
@pytest.mark.parametrize(
    ("arguments", "name", "found"),
    [
        (("wkv4", "--backend", "split"), "wkv4_backward", {"RESULTS": False, "T_IO": "bf16"}),
        (("timex", "--tokens", "512", "--batch", "8"), "timex_filter_gradient", {"BATCH": 8}),
        (("timex", "--tokens", "512", "--backend", "transforms"), "timex_transform", {"LENGTH": 1024}),
    ],
)
def test_ops_without_heads_are_shown(arguments, name, found, run):
    code, printed, said = run("show", *arguments, "--arch", "sm_90", "--direction", "backward", "--json")
    assert (code, said) == (0, "")
    data = json.loads(printed)
    assert data["name"] == name
    assert found.items() <= data["parameters"].items()


def test_source_ptx_and_options(run):
    arguments = ("show", "wkv6", "--head-size", 12, "--value-size", 20, "--dtype", "fp16", "--arch", "sm_80",
                 "--decay", "log")  # fmt: skip
    code, source, _ = run(*arguments, "--source")
    assert code == 0
    for line in ("constexpr int HEAD_SIZE = 12;", "constexpr int VALUE_SIZE = 20;", "using T_IO = fp16;",
                 "constexpr auto DECAY = Decay::log;"):  # fmt: skip
        assert line in source.splitlines()
    data = json.loads(run(*arguments, "--ptx", "--json")[1])
    assert data["ptx"] == run(*arguments, "--ptx")[1].removesuffix("\n")
    assert ".target sm_80" in data["ptx"]


def test_machine_code_is_what_the_disassembler_makes_of_the_cubin(run, tmp_path, monkeypatch):
    (tmp_path / "nvdisasm").write_text("#!/bin/sh\n/usr/bin/env cksum < $2\n")
    (tmp_path / "nvdisasm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    made = rwkv_jit.specialize("wkv7", 8, arch="sm_90")
    checksum = subprocess.run(["cksum"], input=made.cubin, capture_output=True, check=True).stdout.decode()
    assert run("show", "wkv7", "--head-size", 8, "--arch", "sm_90", "--sass") == (0, checksum + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wkv8",), f"show: op: expected one of {', '.join(ALL)}, got 'wkv8'"),
        (("wkv7", "--decay", "soft"), "decay: expected one of raw, sigmoid, log, direct, got 'soft'"),
        (
            ("wkv7", "--backend", "tensor"),
            "backend: expected one of auto, recurrent, chunked, split, reference, got 'tensor'",
        ),
        (
            ("wkv6", "--backend", "split", "--head-size", "1032"),
            "backend: 'split' takes head sizes up to 1024, got 1032 and 1032 for v",
        ),
        (("wkv7", "--arch", "banana"), "arch: expected sm_NN, sm_NNa or compute_NN, got 'banana'"),
        (("wkv7", "--arch", "compute_80", "--sass"), "--sass: expected an architecture like sm_90, got compute_80"),
        (("wkv7", "--head-size", "9000"), "shared memory; got "),
    ],
)
def test_what_cannot_be_shown(arguments, message, run):
    code, printed, said = run("show", "--head-size", "8", "--arch", "sm_90", *arguments, "--json")
    assert (code, printed) == (2, "")
    assert said.startswith("rwkv-jit show: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "width", "message"),
    [
        (10**6, 64, "wkv7_recurrent_forward: chunk_len x head_size needs more than 48 KB of shared memory"),
        (2**30, 2**30, "width: expected at most 65536, got 1073741824"),
        (64, 10**9, "width: expected at most 65536, got 1000000000"),
    ],
)
def test_sizes_that_no_kernel_takes_compile_none(size, width, message, run, tmp_path):
    about = {"model_type": "rwkv7", "head_size": size, "hidden_size": width, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    code, _, said = run("build", "--model", tmp_path, "--arch", "sm_90", "-o", tmp_path / "x.bundle")
    assert (code, said.startswith(f"rwkv-jit build: {message}")) == (2, True), said
    kernel._process.workers.finish()
    assert stats.snapshot()["compiled"] == 0


# ---- doctor ------------------------------------------------------------------------------------------------------


def test_doctor_compiles_a_kernel_and_leaves_the_cache_alone(run, fresh_service):
    code, printed, _ = run("doctor", "--json")
    data = json.loads(printed)
    assert (code, data["passed"]) == (0, True), printed
    (compiled,) = [finding for finding in data["findings"] if finding["name"].startswith("compile ")]
    assert (compiled["name"], compiled["state"], "registers" in compiled["text"]) == ("compile wkv7", "ok", True)
    assert stats.snapshot()["compiled"] == 1
    assert {finding["state"] for finding in data["findings"]} <= {"ok", "warning"}
    nvrtc = next(finding for finding in data["findings"] if finding["name"] == "NVRTC")
    assert nvrtc["text"] == identity.identity()
    assert cache.entries() == []


def test_doctor_says_that_its_kernel_does_not_compile(run, own_templates, monkeypatch):
    path = template.path_of("wkv7_recurrent_forward.cu")
    path.write_text(path.read_text() + "\n#error broken on purpose\n")
    code, printed, _ = run("doctor", "--json")
    assert code == 1
    (error,) = [finding for finding in json.loads(printed)["findings"] if finding["state"] == "error"]
    assert error["name"] == "compile wkv7"
    assert "broken on purpose" in error["text"]
