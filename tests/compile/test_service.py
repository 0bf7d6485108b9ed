"""From parameters to a cubin: where a kernel comes from, what is refused and how, and which compiler did it."""

import ctypes
import hashlib
import json
import re
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from problems import problem, requests

import rwkv_jit
from rwkv_jit.kernels import cache, compiler, cuda, identity, kernel, stats, template
from rwkv_jit.kernels.errors import CompileError, UnsupportedConfigError
from rwkv_jit.schedules.recurrent import VARIANTS

pytestmark = pytest.mark.usefixtures("compiled_once")

# What specialize() below asks for, without torch, which takes seconds to load.
PRINT_KERNEL = """
import hashlib, json, sys
from rwkv_jit.kernels import kernel, template
request = kernel.Request(template.library("wkv7_recurrent_forward"), json.loads(PARAMETERS), "sm_90")
found = kernel.get(request)
assert "torch" not in sys.modules
print(found.origin, hashlib.sha256(found.cubin).hexdigest(), found.registers, found.shared_bytes)
"""
PARAMETERS = requests("forward", problem("wkv7", K=24))["wkv7_recurrent_forward"].parameters
PRINT_KERNEL = PRINT_KERNEL.replace("PARAMETERS", repr(json.dumps(PARAMETERS)))


@pytest.fixture(autouse=True)
def _no_notice_of_slow_compiles(monkeypatch):
    """Tests read the whole log; on a busy machine any compile is slow."""
    monkeypatch.setattr(stats, "_QUIET_SECONDS", 600)


def specialize(op="wkv7", head_size=24, arch="sm_90", **more):
    return rwkv_jit.specialize(op, head_size=head_size, arch=arch, **{"backend": "recurrent", **more})


def shown(made):
    return f"{made.origin} {hashlib.sha256(made.cubin).hexdigest()} {made.registers} {made.shared_bytes}\n"


def counts():
    found = stats.snapshot()
    return found["compiled"], found["disk"], found["memory"]


# ---- compiled, memory, disk --------------------------------------------------------------------------------------


@pytest.mark.anew
def test_kernel_comes_from_the_compiler_then_from_memory_then_from_disk():
    before = counts()
    compiled, memory = specialize(), specialize()
    kernel.forget()
    disk, again = specialize(), specialize()
    assert [each.origin for each in (compiled, memory, disk, again)] == ["compiled", "memory", "disk", "memory"]
    assert [after - was for after, was in zip(counts(), before, strict=True)] == [1, 1, 2]
    for other in (memory, disk, again):
        assert other.cubin == compiled.cubin
        assert other.source == compiled.source
        assert other.resources == compiled.resources
        assert other.target == compiled.target
    assert compiled.compile_seconds > 0


def test_second_process_takes_the_kernel_from_disk_without_loading_the_compiler(child, tmp_path):
    """From any directory and with any hash seed."""
    made = specialize()
    (tmp_path / "elsewhere").mkdir()
    code = PRINT_KERNEL + "assert not {'cupy', 'filelock'} & set(sys.modules)\n"
    for cwd, seed in ((tmp_path, "1"), (tmp_path / "elsewhere", "2")):
        variables = {"RWKVJIT_ASSERT_CACHED": "1", "PYTHONHASHSEED": seed, "LC_ALL": "C"}
        assert child(code, cwd=cwd, env=variables).stdout == shown(made).replace("compiled", "disk")


def test_two_processes_compile_the_same_bytes_and_one_needs_neither_toolkit_nor_path_nor_compiler(child, tmp_path):
    toolkit = ["CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "CPATH", "CC", "CXX", "NVCC"]
    outputs = [
        child(PRINT_KERNEL, env={"RWKVJIT_CACHE_DIR": str(tmp_path / name), **variables}, remove=removed).stdout
        for name, variables, removed in (("a", {}, []), ("b", {"PATH": "", "HOME": str(tmp_path)}, toolkit))
    ]
    assert outputs[0].startswith("compiled ")
    assert outputs[0] == outputs[1]
    first, second = ([*(tmp_path / name).glob("sm_90/*.cubin")] for name in "ab")
    assert [path.name for path in first] == [path.name for path in second]
    assert first[0].read_bytes() == second[0].read_bytes()


def test_miss_is_an_error_where_everything_must_be_cached(monkeypatch):
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    with pytest.raises(CompileError, match=r"RWKVJIT_ASSERT_CACHED is set and wkv7_recurrent_forward for sm_90"):
        specialize()
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "0")
    assert specialize().origin == "compiled"
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    assert specialize().origin == "memory"


@pytest.mark.parametrize(
    "change",
    [{"op": "wkv6"}, {"direction": "backward"}, {"dtype": torch.float32}, {"arch": "sm_90a"}, {"decay": "log"},
     {"value_size": 40}, {"chunk_len": 4}, {"state_layout": "kv"}, {"t_state": "bf16"}, {"backend": "chunked"},
     {"head_size": 40}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_every_choice_is_a_kernel_of_its_own(change):
    made, other = specialize(), specialize(**change)
    assert (other.origin, other.cubin == made.cubin) == ("compiled", False)
    assert len(cache.entries()) == 2
    again = specialize(value_size=24)  # which is the default
    assert (again.origin, again.cubin, again.parameters["HEAD_SIZE"]) == ("memory", made.cubin, 24)
    about = {each.name: each.manifest for each in cache.stored()}[made.entry()[0]]
    assert about["parameters"] == made.parameters
    assert (about["name"], about["arch"], about["compiler"]) == (made.name, "sm_90", identity.identity())


def test_changed_template_text_is_compiled_again(own_templates):
    before = specialize()
    with open(template.path_of("types.cuh"), "a", encoding="utf-8") as file:
        file.write("// another line\n")
    template.library.cache_clear()
    kernel.forget()
    assert specialize().origin == "compiled"
    assert specialize().cubin == before.cubin


def test_damaged_entry_is_compiled_again_and_mended(caplog):
    made = specialize()
    (path,) = cache.entries()
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + whole[201:])
    kernel.forget()
    again = specialize()
    assert again.origin == "compiled"
    assert again.cubin == made.cubin
    assert caplog.messages == [f"cache entry {path} is damaged: not used"]
    assert path.read_bytes() == whole


@pytest.mark.anew
def test_clearing_the_cache_compiles_again():
    made = specialize()
    assert rwkv_jit.cache_info()["entries"] == 1
    assert rwkv_jit.clear_cache() == 1
    again = specialize()
    assert again.origin == "compiled"
    assert again.cubin == made.cubin


@pytest.mark.anew
def test_threads_that_want_the_same_kernels_compile_each_once():
    before, start = counts()[0], threading.Barrier(6)

    def ask(size):
        start.wait()
        return specialize(head_size=size)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(ask, [8, 16] * 3))
    assert counts()[0] - before == 2
    assert sorted(each.origin for each in results) == ["compiled"] * 2 + ["memory"] * 4
    assert len({each.cubin for each in results}) == 2
    assert len(cache.entries()) == 2


# ---- the kernel object -------------------------------------------------------------------------------------------


def test_kernel_shows_what_it_is():
    made = specialize(direction="backward")
    assert made.name == "wkv7_recurrent_backward"
    assert (made.registers, made.shared_bytes) == (
        max(each.registers for each in made.resources.values()),
        max(each.shared_bytes for each in made.resources.values()),
    )
    assert set(made.resources) == {"wkv7_backward"}
    assert f"{made.registers} registers" in repr(made)
    assert "HEAD_SIZE=24" in repr(made)
    assert made.compiler == identity.identity()
    table = made._repr_html_()
    assert "<th>HEAD_SIZE</th><td>24</td>" in table
    assert f"<th>cubin bytes</th><td>{len(made.cubin)}</td>" in table


def test_ptx_of_a_cubin_kernel_is_made_when_it_is_read():
    made = specialize(arch="sm_90a")
    assert ".target sm_90a" in made.ptx
    assert ".visible .entry wkv7_forward(" in made.ptx
    assert made.ptx is made.ptx


PTX_ROWS = [
    pytest.param(op, arch, marks=() if each_time else pytest.mark.full)
    for op, of_75, of_80 in (
        ("wkv5", True, False), ("wkv6", False, True), ("wkv7", True, True), ("gla", False, True),
        ("linear_attention", True, False),
    )
    for arch, each_time in (("compute_75", of_75), ("compute_80", of_80))
]  # fmt: skip


@pytest.mark.parametrize(("op", "arch"), PTX_ROWS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ptx_for_the_driver(direction, op, arch):
    made = specialize(op, direction=direction, arch=arch)
    assert made.cubin == b""
    assert made.target == arch
    assert f".target {arch.replace('compute', 'sm')}\n" in made.ptx
    assert f".visible .entry {made.name.split('_')[0]}_{direction}(" in made.ptx
    assert (made.registers, made.spill_bytes, made.shared_bytes) == (0, 0, 0)
    kernel.forget()
    again = specialize(op, direction=direction, arch=arch)
    assert (again.origin, again.ptx) == ("disk", made.ptx)


# ---- architectures this compiler does not know -------------------------------------------------------------------


def test_newer_architecture_gets_ptx_of_the_newest_known_one_and_one_line(caplog):
    newest = max(int(arch) for arch in cuda.nvrtc().getSupportedArchs())
    first, second = specialize(arch="sm_999"), specialize(op="wkv6", arch="sm_999")
    for made in (first, second):
        assert made.arch == "sm_999"
        assert made.target == f"compute_{newest}"
        assert made.cubin == b""
        assert f".target sm_{newest}\n" in made.ptx
    assert len([m for m in caplog.messages if "sm_999 is newer than this NVRTC" in m]) == 1
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("arch", ["sm_30", "compute_35", "in a gap"])
def test_unknown_older_architecture_is_refused_with_the_range(arch):
    known = [int(each) for each in cuda.nvrtc().getSupportedArchs()]
    if arch == "in a gap":
        arch = f"sm_{next(number for number in range(min(known), max(known)) if number not in known)}"
    with pytest.raises(UnsupportedConfigError, match=f"compiles for sm_{min(known)}, .*, got {arch}"):
        specialize(arch=arch)
    assert cache.entries() == []


def test_compiler_upgrade_replaces_ptx_of_an_architecture_it_now_knows(monkeypatch):
    nvrtc, name = cuda.nvrtc(), identity.identity()

    class Older:
        def __getattr__(self, name):
            return getattr(nvrtc, name)

        def getSupportedArchs(self):  # noqa: N802
            return (75, 80)

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "nvrtc", Older)
        patch.setattr(identity, "identity", lambda: "an older " + name)
        patch.setattr(identity, "assumed_identity", lambda: None)
        assert specialize().cubin == b""
    kernel.forget()
    assert specialize().cubin[:4] == b"\x7fELF"
    assert len(cache.entries()) == 2  # one of each compiler


# ---- rules of the templates --------------------------------------------------------------------------------------

RULES = {
    "head_size and value_size must be at least 1": {"HEAD_SIZE": 0},
    "num_threads must be 32, 64, 128 or 256": {"NUM_THREADS": 48},
    "lanes_per_row must be a power of two up to 32": {"LANES_PER_ROW": 3},
    "rows_per_thread must be 1, 2, 4 or 8": {"ROWS_PER_THREAD": 16},
    "chunk_len must be 1, 2, 4, 8 or 16": {"CHUNK_LEN": 3},
    "chunk_len x head_size needs more than 48 KB of shared memory": {"CHUNK_LEN": 16, "HEAD_SIZE": 256},
    "held_states must divide chunk_len": {"CHUNK_LEN": 2, "HELD_STATES": 4},
}
CHUNKED_RULES = {
    "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
    "chunk_len must be 16 or 32": {"CHUNK_LEN": 8},
    "num_threads must be a multiple of 32 from 64 to 512": {"NUM_THREADS": 544},
    "num_threads must be at least the head size, rounded up to a multiple of 32": {"HEAD_SIZE": 128},
    "num_threads must be once or twice the value size, rounded up to a multiple of 32": {"NUM_THREADS": 96},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 16},
}
OTHER_RULES = {
    "wkv7_join": {
        "num_threads must be a multiple of 32 up to 256": {"NUM_THREADS": 272},
        "rows must leave each equal lanes of one warp": {"ROWS": 12},
    },
    "gla_join": {"num_threads must be enough for the rows": {"ROWS": 6}},
    "gla_segment": {
        "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
        "num_threads must be twice the value size, rounded up to a multiple of 32": {"NUM_THREADS": 96},
    },
    "wkv7_segment": {**CHUNKED_RULES, "rows must be a multiple of 32": {"ROWS": 48}},
    "sum_rows": {"columns must divide the threads": {"COLUMNS": 48}},
    "unit_states": {"value size must be 1 or the head size": {"VALUE_SIZE": 3}},
    "copy_states": {"num_threads must be a multiple of 32 up to 1024": {"NUM_THREADS": 48}},
    "narrow_rows": {"vectors must divide the rows": {"VECTOR": 16}},
}
del OTHER_RULES["wkv7_segment"]["num_threads must be once or twice the value size, rounded up to a multiple of 32"]
GATED_RULES = {**CHUNKED_RULES, "chunk_len must be 16, 32 or 64": {"CHUNK_LEN": 8}}
del GATED_RULES["chunk_len must be 16 or 32"]
OTHER_RULES["gla_chunked_backward"] = GATED_RULES
OTHER_RULES["gla_scan"] = {rule: change for rule, change in GATED_RULES.items() if "value size" not in rule}
OTHER_RULES["gla_scan"]["rows must be a multiple of those of a warp"] = {"ROWS": 40, "SHARED_BYTES": 26768}
WITH_TESTS_OF_THEIR_OWN = (
    "timex", "wkv4", "update", "replay", "layer", "head_decay", "channel_decay", "diagonal_operands", "operand_rows",
)  # fmt: skip
OTHER_RULES["gla_scan"]["a forward for groups must have no decay and chunks of up to 64"] = {"FOR_GROUPS": True}
OTHER_RULES["gla_group_backward"] = {
    "there must be no decay and no bonus": {"BONUS": True},
    "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
    "head sizes must be multiples of 8 from 72 to 128, value sizes from 104": {"HEAD_SIZE": 64},
    "num_threads must be 256": {"NUM_THREADS": 128},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 16},
}
OTHER_RULES["wkv7_group_backward"] = {
    "the chunked kernels take float16 and bfloat16": {"T_IO": "fp32"},
    "head sizes in steps of 64, chunks of 32": {"HEAD_SIZE": 40},
    "num_threads must be twice the value size": {"NUM_THREADS": 64},
    # Four groups for two tiles.
    "a group has whole tiles of columns": {"VALUE_SIZE": 256, "NUM_THREADS": 512, "SHARED_BYTES": 212992},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 16},
}
OTHER_RULES["wkv7_key_gradients_by_halves"] = {
    "num_threads must be 4 for each token of a chunk": {"NUM_THREADS": 512},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 16},
}
OTHER_RULES["gla_key_gradients"] = {"shared_bytes is what the geometry says": {"SHARED_BYTES": 16}}
GROUP_RULES = {
    "chunk_len must be 64": {"CHUNK_LEN": 32},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 16},
}
OTHER_RULES["gla_prepare"] = {
    **GROUP_RULES,
    "num_threads must be 256": {"NUM_THREADS": 128},
    "takes float16 and bfloat16": {"T_IO": "fp32"},
    "num_threads must make two or more equal segments of a chunk": {"NUM_THREADS": 32},
}
OTHER_RULES["gla_group_scan"] = {
    **GROUP_RULES,
    "num_threads must be 384": {"NUM_THREADS": 256},
    "value_rows must be 32 or 64": {"VALUE_ROWS": 48},
    "stages must be 4 at least: two pairs of slabs are held at once": {"STAGES": 3},
}
OTHER_RULES["gla_group_key_gradients"] = {
    **GROUP_RULES,
    "num_threads must be 128": {"NUM_THREADS": 256},
    "stages must be 2 at least": {"STAGES": 1},
    "num_threads must make two or more equal segments of a chunk": {"NUM_THREADS": 32},
}
# Of all kernels of the scan; of those that make operands; of each.
SLAB_RULES = {
    "the split kernels take float16 and bfloat16": {"T_IO": "fp32"},
    "chunk_len must be 32 or 64": {"CHUNK_LEN": 16},
    "channels must be head_size, rounded up to multiples of 64": {"CHANNELS": 96},
    "shared_bytes is what the geometry says": {"SHARED_BYTES": 16},
}
OPERAND_RULES = {
    "num_threads must make two or more equal segments of a chunk": {"NUM_THREADS": 32},
    "num_threads must be four times chunk_len": {"NUM_THREADS": 64},
}
SCAN_RULES = {
    "wkv7_prepare": SLAB_RULES | OPERAND_RULES,
    "wkv7_scan": {
        **SLAB_RULES,
        "key_warps must be 1, 2 or 4": {"KEY_WARPS": 3},
        "channels must be a multiple of 64 key_warps": {"KEY_WARPS": 2},
        "key_warps must leave a warp 256 channels at most": {"CHANNELS": 512},
        "num_threads must be a multiple of 32 key_warps, up to 512": {"NUM_THREADS": 544},
        "stages must be 2 at least and look ahead one chunk at most": {"STAGES": 4},
    },
    "wkv7_group_scan": {
        **SLAB_RULES,
        "num_threads must be 384": {"NUM_THREADS": 256},
        "chunk_len must be 64": {"CHUNK_LEN": 32},
        "value_rows must be 32 or 64": {"VALUE_ROWS": 48},
        "cluster must divide the blocks of a head": {"CLUSTER": 3},
        "stages must be 2 at least": {"STAGES": 1},
    },
    "wkv7_token_gradients": {**SLAB_RULES, "num_threads must be four times chunk_len": {"NUM_THREADS": 64}},
    "wkv7_key_gradients": SLAB_RULES | OPERAND_RULES,
}
# What no parameter breaks but a change of a file: the kernel, the file, what is changed there, and into what.
OWN_RULES = {
    "own terms have the place of Tm for a while": (
        "wkv7_chunked_forward", "wkv7_chunk.cuh", "OwnTerms = float[2]", "OwnTerms = float[32]",
    ),
    "the token matrices fill one stage": ("wkv7_group_scan", "wkv7_group_scan.cu", "BACKWARD ? 3 : 2;", "4;"),
    "products have 32 or 64 columns": (
        "wkv7_group_scan", "wkv7_group_scan.cu", "multiply_group<VALUE_ROWS,", "multiply_group<16,",
    ),
    "a middle lies between two segments": ("gla_key_gradients", "gla_key_gradients.cu", "CHUNK_LEN / TOKENS;", "1;"),
    "each of the threads has equally many rows": (
        "wkv7_token_gradients", "slab_copy.cuh", "ROW_STEP = THREADS / PER_ROW;", "ROW_STEP = 3;",
    ),
    "every thread has equally many rows": (
        "gla_group_scan", "group_scan.cuh", "ROW_STEP = CONSUMERS / PER_ROW;", "ROW_STEP = 3;",
    ),
    "products have 16, 32 or 64 columns": (
        "gla_group_scan", "gla_group_scan.cu", "multiply_group<OWN_ROWS,", "multiply_group<8,",
    ),
}  # fmt: skip
# And the bytes by which that makes shared memory larger: of 16 x 16 blocks, in each of three stages.
MORE_BYTES = {"the token matrices fill one stage": 3 * (4 * 10 - 32) * 512}
OF_HALVES = ("own terms have the place of Tm for a while",)  # and not of chunks in frames
OF_THE_BACKWARD = {"held_states must divide chunk_len"} | {rule for rule in CHUNKED_RULES if "value size" in rule}
BROKEN = [
    (f"{kind}_{direction}", rule, rules[rule])
    for kind, rules in (("gla_recurrent", RULES), ("wkv7_recurrent", RULES), ("wkv7_chunked", CHUNKED_RULES))
    for direction in ("forward", "backward")
    for rule in rules
    if direction == "backward" or rule not in OF_THE_BACKWARD
] + [(name, rule, change) for name, rules in (OTHER_RULES | SCAN_RULES).items() for rule, change in rules.items()]
# The other halves of rules.
BROKEN += [
    ("wkv7_scan", "channels must be head_size, rounded up to multiples of 64", {"HEAD_SIZE": 65}),
    ("wkv7_scan", "stages must be 2 at least and look ahead one chunk at most", {"STAGES": 1}),
    ("wkv7_scan", "num_threads must be a multiple of 32 key_warps, up to 512",
     {"KEY_WARPS": 2, "CHANNELS": 128, "NUM_THREADS": 96}),
    ("wkv7_group_scan", "channels must be head_size, rounded up to multiples of 64", {"HEAD_SIZE": 65}),
    ("wkv7_group_scan", "cluster must divide the blocks of a head", {"VALUE_SIZE": 1024, "CLUSTER": 16}),
]  # fmt: skip


# The problems whose directions have these templates, where they are not those of small heads.
LARGE = {"backend": "large", "chunk_len": 64}
SEGMENTS = {"backend": "segments", "chunk_len": 32}
GIVEN = {
    "wkv7_scan": {"arch": "sm_80", **LARGE},
    "gla_scan": {"backend": "chunked", "chunk_len": 32},
    "gla_key_gradients": {"backend": "large", "chunk_len": 32},
    "wkv7_group_backward": {"K": 64, "backend": "chunked", "chunk_len": 32},
    "gla_group_backward": {"op": "linear_attention", "K": 128, "backend": "chunked", "chunk_len": 32},
    **dict.fromkeys(("wkv7_join", "wkv7_segment", "gla_join", "gla_segment"), SEGMENTS),
    **dict.fromkeys(("wkv7_chunked_forward", "wkv7_chunked_backward", "gla_chunked_backward"), SEGMENTS),
    **dict.fromkeys(("wkv7_prepare", "wkv7_token_gradients", "wkv7_key_gradients", "wkv7_group_scan"), LARGE),
    "wkv7_key_gradients_by_halves": LARGE,
    **dict.fromkeys(("gla_prepare", "gla_group_scan", "gla_group_key_gradients"), LARGE),
    "sum_rows": {"op": "wkv6", "backend": "large", "chunk_len": 32},
    "copy_states": {**SEGMENTS, "T": 64, "has_final_state": True},
    "unit_states": {**LARGE, "backend": "large_segments"},
    "narrow_rows": {"backend": "chunked", "chunk_len": 32, "is_narrow": True},
}


def request_of(name):
    """Return a kernel of a call with heads of 24 channels, or of the sizes that its template takes."""
    op = name.split("_")[0]
    of_op = {"op": op if op in ("wkv7", "gla") else "wkv7", "K": 24, "state_layout": "vk"}
    given = problem(**{**of_op, **GIVEN.get(name, {})})
    kernels = requests("backward", given) | requests("forward", given)
    return kernels[name] if name in kernels else requests("backward", given, by_halves=True)[name]


def parameters(name):
    return request_of(name).parameters


@pytest.mark.parametrize(("name", "rule", "change"), BROKEN, ids=lambda x: str(x))
def test_broken_rule_of_a_template_comes_back_as_its_text(name, rule, change):
    request = request_of(name)
    with pytest.raises(UnsupportedConfigError) as caught:
        kernel.get(request._replace(parameters={**request.parameters, **change}))
    message = str(caught.value)
    assert message.startswith(f"{name}: {rule}; got ")
    for parameter, value in change.items():
        assert f"{parameter}={value}" in message
    assert isinstance(caught.value, ValueError)
    assert cache.entries() == []


@pytest.mark.parametrize("rule", OWN_RULES)
def test_broken_rule_of_a_template_about_itself_comes_back_as_its_text(rule, own_templates):
    name, file, was, becomes = OWN_RULES[rule]
    text = template.path_of(file).read_text(encoding="utf-8")
    assert was in text
    template.path_of(file).write_text(text.replace(was, becomes), encoding="utf-8")
    given = parameters(name)
    given = {**given, "SHARED_BYTES": given["SHARED_BYTES"] + MORE_BYTES.get(rule, 0)}
    if rule in OF_HALVES:
        given["BY_HALVES"] = True
    with pytest.raises(UnsupportedConfigError, match=f"^{name}: {rule}; got "):
        kernel.get(kernel.Request(template.library(name), given, "sm_90a"))


def test_every_rule_of_the_templates_is_provoked_above():
    paths = [path for path in template.directory().rglob("*.cu*") if not path.name.startswith(WITH_TESTS_OF_THEIR_OWN)]
    texts = "".join(path.read_text(encoding="utf-8") for path in paths)
    written = re.findall(r'static_assert\([^;]*?"([^"]*)"\)', texts)
    assert len(written) == texts.count("static_assert(")
    assert set(written) == set().union(RULES, CHUNKED_RULES, OWN_RULES, *OTHER_RULES.values(), *SCAN_RULES.values())


@pytest.mark.parametrize(
    ("choice", "nearest"),
    [
        ({"chunk_len": 3}, "chunk_len=2"),
        ({"chunk_len": 7}, "chunk_len=8"),
        ({"chunk_len": 100}, "chunk_len=16"),
        ({"num_threads": 1}, "num_threads=32"),
        ({"num_threads": 100}, "num_threads=128"),
        ({"num_threads": 1024}, "num_threads=256"),
        ({"num_threads": 33, "chunk_len": 5}, "chunk_len=4, num_threads=32"),
    ],
)
def test_refused_choice_comes_with_the_nearest_legal_value(choice, nearest):
    with pytest.raises(UnsupportedConfigError, match=f"must be .*; nearest legal: {nearest}$"):
        specialize(**choice)


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("given", "nearest"), [(32, 96), (100, 96), (544, 512)])
def test_refused_number_of_threads_of_the_chunked_forward_comes_with_the_nearest(given, nearest):
    choice = {"head_size": 80, "backend": "chunked"}
    with pytest.raises(UnsupportedConfigError, match=f"num_threads must be .*; nearest legal: num_threads={nearest}$"):
        specialize(**choice, num_threads=given)
    assert specialize(**choice, num_threads=nearest).parameters["NUM_THREADS"] == nearest


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", ["wkv6", "wkv7"])  # of each stem, which decides what a chunk takes
def test_chunk_that_does_not_fit_comes_with_one_that_compiles(op, direction):
    with pytest.raises(UnsupportedConfigError, match="more than 48 KB of shared memory") as caught:
        specialize(op, head_size=256, direction=direction, chunk_len=16)
    nearest = int(re.search(r"nearest legal: chunk_len=(\d+)$", str(caught.value))[1])
    assert nearest < 16
    assert specialize(op, head_size=256, direction=direction, chunk_len=nearest).shared_bytes <= 48 * 1024


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize(
    "choice",
    [{"chunk_len": value, "num_threads": 32} for value in VARIANTS["chunk_len"]]
    + [{"num_threads": value} for value in VARIANTS["num_threads"]],
    ids=str,
)
def test_listed_variants_are_legal(choice):
    made = specialize(head_size=16, **choice)
    for name, value in choice.items():
        assert f"constexpr int {name.upper()} = {value};" in made.source


# ---- what NVRTC refuses ------------------------------------------------------------------------------------------


def break_line(path, line):
    """Puts a line that is no C++ behind line number `line` of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines.insert(line, "this is no C++;")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    template.library.cache_clear()


@pytest.mark.parametrize("file", ["wkv7_recurrent_forward.cu", "types.cuh"])
def test_syntax_error_comes_back_with_everything_needed_to_mend_it(file, own_templates):
    break_line(template.path_of(file), 12)
    with pytest.raises(CompileError) as caught:
        specialize()
    message = str(caught.value)
    assert "could not compile wkv7_recurrent_forward for sm_90 with CHUNK_LEN=" in message
    assert "HEAD_SIZE=24" in message
    assert "options: " + " ".join(compiler.options("sm_90")) in message
    assert f"{file}:\n" in message
    assert ">   13 | this is no C++;" in message
    before = template.path_of(file).read_text(encoding="utf-8").splitlines()[11]
    assert f"    12 | {before}\n" in message
    assert f"{file}(13): error" in message
    assert cache.entries() == []


def test_error_in_a_rendered_parameter_is_shown_too():
    request = kernel.Request(template.library("wkv7_recurrent_forward"), {**PARAMETERS, "DECAY": "missing"}, "sm_90")
    with pytest.raises(CompileError) as caught:
        kernel.get(request)
    message = str(caught.value)
    assert "DECAY=missing" in message
    (marked,) = [line for line in message.splitlines() if line.startswith(">")]
    assert marked.endswith("| constexpr auto DECAY = Decay::missing;")


def test_missing_header_is_named(own_templates):
    path = template.path_of("wkv7_recurrent_forward.cu")
    path.write_text("#include <cuda_bf16.h>\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    template.library.cache_clear()
    with pytest.raises(CompileError, match="cuda_bf16.h"):
        specialize()


# ---- which compiler ----------------------------------------------------------------------------------------------


def build_id(path):
    """The GNU build-id by the section headers; the service reads it by the program headers."""
    data = Path(path).read_bytes()
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length, *_ in headers:
        if data[strings + name :].startswith(b".note.gnu.build-id\0"):
            return data[offset + 16 : offset + length].hex()
    return hashlib.sha256(data).hexdigest()


def own_version(path):
    """What an NVRTC says of itself."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return major.value, minor.value


@pytest.mark.anew
def test_identity_is_version_and_build_ids_of_the_files_that_compile():
    specialize()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnvrtc" in line}
    builtins = {Path(path).parent: path for path in mapped if "builtins" in path}
    version = cuda.nvrtc().getVersion()
    # A torch with CUDA loads an NVRTC too, maybe of another version.
    (main,) = [path for path in mapped - {*builtins.values()} if own_version(path) == version]
    expected = f"{version[0]}.{version[1]} {build_id(main)} {build_id(builtins[Path(main).parent])}"
    assert identity.identity() == expected
    assert re.fullmatch(r"\d+\.\d+( [0-9a-f]{16,64}){2}", expected)


def test_identity_leaves_out_an_nvrtc_that_another_package_loaded(child, tmp_path):
    code = "import ctypes, sys\nfor path in sys.argv[1:]: ctypes.CDLL(path)\n"
    code += "from rwkv_jit.kernels import identity\nprint(identity.identity())\n"
    other = shutil.copy(cuda.nvrtc().__file__, tmp_path / "libnvrtc.so.11")  # any library by such a name
    assert child(code, other).stdout == child(code).stdout


def test_identity_of_a_library_without_build_id_is_its_hash(tmp_path):
    path = tmp_path / "libnothing.so"
    path.write_bytes(b"not even ELF")
    assert identity._build_id(str(path)) == hashlib.sha256(b"not even ELF").hexdigest()


def test_note_of_the_compiler_is_not_believed_once_its_library_changed(tmp_path, monkeypatch):
    library = tmp_path / "libnvrtc.so"
    library.write_bytes(b"one")
    monkeypatch.setattr(identity, "libraries", lambda: [str(library)])
    name = identity.identity()
    assert identity.assumed_identity() == name
    library.write_bytes(b"another")
    identity._assumed.clear()  # as in another process
    assert identity.assumed_identity() is None
    identity.identity.cache_clear()
    assert identity.identity() != name
    library.unlink()
    assert identity.assumed_identity() is None


def test_another_environment_has_a_note_of_its_own(tmp_path, monkeypatch, fresh_service):
    name = identity.identity()
    monkeypatch.setattr(identity.sys, "prefix", str(tmp_path))
    assert identity.assumed_identity() is None
    identity.identity.cache_clear()
    assert identity.identity() == name == identity.assumed_identity()
    assert len(list(fresh_service.glob("nvrtc-*.json"))) == 2
