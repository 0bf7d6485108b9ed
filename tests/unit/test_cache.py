"""The cache on disk: what the key covers, what an entry holds, and that nothing damaged is ever served."""

import errno
import json
import logging
import os
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit
from rwkv_jit import cache, env
from rwkv_jit.compiler import Compiled, Resources
from rwkv_jit.template import Rendered

RENDERED = Rendered("wkv7_recurrent_forward", "int x;\n", (("a.cuh", "// a"), ("b.cuh", "// é")))
OPTIONS = ("-arch=sm_90", "-std=c++17", "--no-cache")
ARCH, COMPILER = "sm_90", "12.9 0123abcd"
GOLDEN_KEY = "b181093e7c62221b94263fdcda991e0a551d99ccb229efd244a8828bfe14aae2"

DIGEST = sha256(b"a key").hexdigest()
ABOUT = {"name": "wkv7_recurrent_forward", "arch": "sm_90", "parameters": {"HEAD_SIZE": 48, "DECAY": "raw"}}
COMPILED = Compiled(b"\x7fELF machine code\0", "sm_90", {"wkv7_forward": Resources(128, 16, 4096)}, 0.5)
ENTRY = cache.pack(DIGEST, COMPILED, ABOUT)


def key(rendered=RENDERED, options=OPTIONS, arch=ARCH, compiler=COMPILER):
    return cache.key(rendered, options, arch, compiler)


def same(found):
    """The time it took is not part of an entry."""
    return (found.image, found.target, found.resources) == (COMPILED.image, COMPILED.target, COMPILED.resources)


def put(digest=DIGEST, compiled=COMPILED):
    cache.put("wkv7_recurrent_forward", "sm_90", digest, compiled, ABOUT)


def get(digest=DIGEST):
    return cache.get("wkv7_recurrent_forward", "sm_90", digest)


def the_entry():
    (path,) = cache.entries()
    return path


def sealed(manifest, image=b"code", magic=b"rwkvjit\0", schema=cache.SCHEMA):
    """An entry with a right checksum whatever is in it."""
    text = json.dumps(manifest).encode()
    body = struct.pack("<8sII", magic, schema, len(text)) + text + image
    return body + sha256(body).digest()


# ---- the key -----------------------------------------------------------------------------------------------------


def test_key_of_a_known_request():
    assert key() == GOLDEN_KEY


@pytest.mark.parametrize(
    "changed",
    [
        {"rendered": Rendered("wkv7_recurrent_forwarD", RENDERED.source, RENDERED.headers)},
        {"rendered": Rendered(RENDERED.name, "int x; \n", RENDERED.headers)},
        {"rendered": Rendered(RENDERED.name, RENDERED.source, (("A.cuh", "// a"), ("b.cuh", "// é")))},
        {"rendered": Rendered(RENDERED.name, RENDERED.source, (("a.cuh", "// A"), ("b.cuh", "// é")))},
        {"rendered": Rendered(RENDERED.name, RENDERED.source, (("a.cuh", "// a"), ("b.cuh", "// e")))},
        {"rendered": Rendered(RENDERED.name, RENDERED.source, (("a.cuh", "// é"), ("b.cuh", "// a")))},
        {"rendered": Rendered(RENDERED.name, RENDERED.source, RENDERED.headers[:1])},
        {"options": OPTIONS[:2]},
        {"options": (OPTIONS[1], OPTIONS[0], OPTIONS[2])},
        {"options": ("-arch=sm_80", *OPTIONS[1:])},
        {"arch": "sm_90a"},
        {"compiler": "12.9 0123abce"},
    ],
    ids=["name", "source", "header name", "header text", "last header", "headers swapped", "header gone", "option gone",
         "options swapped", "option", "architecture", "compiler"],
)  # fmt: skip
def test_key_changes_with_every_field(changed):
    assert key(**changed) != key()


def test_key_changes_with_the_schema(monkeypatch):
    before = key()
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    assert key() != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key(options=("-a", "b")), key(options=("-ab",))),
        (key(options=("-a", "b")), key(options=("-a b",))),
        (key(rendered=Rendered("ab", "c", ())), key(rendered=Rendered("a", "bc", ()))),
        (key(arch="sm_9", compiler="0x"), key(arch="sm_90", compiler="x")),
        (
            key(rendered=Rendered("a", "b", (("-x", "-y"),)), options=()),
            key(rendered=Rendered("a", "b", ()), options=("-x", "-y")),
        ),
    ],
    ids=["options", "option with a space", "name and source", "architecture and compiler", "headers and options"],
)
def test_text_cannot_move_from_one_field_to_its_neighbour(one, other):
    assert one != other


def test_key_depends_on_nothing_around_the_process(child, tmp_path):
    code = """
import locale
from rwkv_jit import cache, template
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:
    pass
rendered = template.render("wkv7_recurrent_forward", {"T_IO": "bf16", "HEAD_SIZE": 48, "DECAY": "raw"})
print(cache.key(rendered, ("-arch=sm_90",), "sm_90", "12.9 \\u00e9"))
"""
    other = tmp_path / "elsewhere"
    other.mkdir()
    first = child(code, env={"PYTHONHASHSEED": "1"}).stdout
    second = child(
        code,
        cwd=other,
        env={"PYTHONHASHSEED": "2", "HOME": str(other), "LC_ALL": "tr_TR.UTF-8", "LANG": "C", "TZ": "Asia/Tokyo",
             "PYTHONUTF8": "0", "RWKVJIT_CACHE_DIR": str(other)},
    ).stdout  # fmt: skip
    assert len(first.strip()) == 64
    assert first == second


# ---- an entry ----------------------------------------------------------------------------------------------------


def test_entry_reads_back_as_it_was_written():
    assert same(cache.unpack(ENTRY, DIGEST))


def test_equal_kernels_give_equal_bytes_whatever_compiling_took():
    slower = Compiled(COMPILED.image, COMPILED.target, COMPILED.resources, 9.0)
    assert cache.pack(DIGEST, slower, dict(reversed(ABOUT.items()))) == ENTRY


def test_entry_says_what_it_is():
    length = struct.unpack_from("<8sII", ENTRY)[2]
    manifest = json.loads(ENTRY[16 : 16 + length])
    assert ENTRY.startswith(b"rwkvjit\0")
    assert manifest["key"] == DIGEST
    assert manifest["parameters"] == {"HEAD_SIZE": 48, "DECAY": "raw"}
    assert manifest["resources"] == {"wkv7_forward": {"registers": 128, "shared_bytes": 4096, "spill_bytes": 16}}


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(ENTRY) - 1), st.integers(0, len(ENTRY)), st.binary(max_size=40)), min_size=1
    )
)
def test_changed_entry_is_refused_or_reads_back_the_same(edits):
    data = ENTRY
    for begin, end, replacement in edits:
        data = data[:begin] + replacement + data[max(begin, end) :]
    try:
        found = cache.unpack(data, DIGEST)
    except ValueError:
        return
    assert data == ENTRY
    assert same(found)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="damaged|of another format|another kernel's"):
        cache.unpack(data, DIGEST)


# ---- on disk -----------------------------------------------------------------------------------------------------


def test_kernel_that_was_put_is_got():
    assert get() is None
    put()
    assert same(get())
    assert the_entry().parent.name == "sm_90"
    assert the_entry().name.startswith("wkv7_recurrent_forward-")


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "empty": b"",
    "one byte": ENTRY[:1],
    "cut in the head": ENTRY[:10],
    "cut in the manifest": ENTRY[:60],
    "cut by one byte": ENTRY[:-1],
    "one byte more": ENTRY + b"\0",
    "flip in the magic": flip(ENTRY, 0),
    "flip in the schema": flip(ENTRY, 8),
    "flip in the length": flip(ENTRY, 12),
    "flip in the manifest": flip(ENTRY, 40),
    "flip in the code": flip(ENTRY, len(ENTRY) - 40),
    "flip in the checksum": flip(ENTRY, len(ENTRY) - 1),
    "zeros": bytes(len(ENTRY)),
    "another kernel's": cache.pack(sha256(b"another key").hexdigest(), COMPILED, ABOUT),
    "another program's": sealed({"key": DIGEST}, magic=b"othrjit\0"),
    "of a later schema": sealed({"key": DIGEST, "target": "sm_90", "resources": {}}, schema=cache.SCHEMA + 1),
    "a list": sealed([]),
    "no key": sealed({"target": "sm_90", "resources": {}}),
    "no target": sealed({"key": DIGEST, "resources": {}}),
    "resources of another kind": sealed({"key": DIGEST, "target": "sm_90", "resources": []}),
    "unknown resource": sealed({"key": DIGEST, "target": "sm_90", "resources": {"wkv7_forward": {"barriers": 1}}}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_a_miss_with_a_warning_and_is_replaced(damage, caplog):
    put()
    the_entry().write_bytes(DAMAGE[damage])
    with caplog.at_level(logging.WARNING, logger="rwkv_jit"):
        assert get() is None
        assert get() is None
    (record,) = caplog.records
    assert str(the_entry()) in record.getMessage()
    assert "compiling again" in record.getMessage()
    put()
    assert same(get())


def test_entry_under_another_name_is_a_miss(caplog):
    put()
    other = sha256(b"another key").hexdigest()
    the_entry().rename(the_entry().with_name(f"wkv7_recurrent_forward-{other[:40]}.cubin"))
    assert get(other) is None
    assert "another kernel's" in caplog.text


def test_directory_in_the_place_of_an_entry_costs_one_warning(caplog):
    put()
    path = the_entry()
    path.unlink()
    path.mkdir()
    assert get() is None
    put()
    assert "kernels are not kept" in caplog.text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_two_kernels_do_not_disturb_each_other():
    other_digest = sha256(b"another key").hexdigest()
    other = Compiled(b"other code", "sm_90", {})
    put()
    put(other_digest, other)
    assert same(get())
    assert get(other_digest).image == b"other code"
    assert len(cache.entries()) == 2


def test_a_file_in_the_place_of_the_cache_directory_costs_one_warning(fresh_service, caplog):
    fresh_service.write_text("in the way")
    for _ in range(2):
        put()
        assert get() is None
    (record,) = caplog.records
    assert "kernels are not kept" in record.getMessage()
    assert str(fresh_service) in record.getMessage()
    assert fresh_service.read_text() == "in the way"
    assert rwkv_jit.cache_info()["entries"] == 0


def test_a_cache_directory_without_write_permission_costs_one_warning(child, read_only, tmp_path):
    directory = read_only(tmp_path / "read only")
    code = """
from rwkv_jit import cache
from rwkv_jit.compiler import Compiled
for _ in range(2):
    cache.put("a", "sm_90", "0" * 64, Compiled(b"code", "sm_90", {}), {})
    assert cache.get("a", "sm_90", "0" * 64) is None
"""
    done = child(code, unprivileged=True, env={"RWKVJIT_CACHE_DIR": str(directory)})
    assert done.stderr.count("kernels are not kept") == 1
    assert "ermission" in done.stderr
    assert list(directory.iterdir()) == []


def test_a_full_disk_costs_one_warning_and_leaves_nothing_behind(monkeypatch, caplog):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        put()
        put()
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert [path for path in env.cache_dir().rglob("*") if path.is_file()] == []


def test_an_interrupted_write_leaves_nothing_behind(monkeypatch, fresh_service):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put()
    assert [path for path in fresh_service.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["été", "中文", "with spaces and 'quotes'", "d" * 200])
def test_cache_directories_of_any_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / name / name))
    put()
    assert same(get())
    assert rwkv_jit.cache_info()["path"] == str(tmp_path / name / name)


def test_tilde_in_the_cache_directory_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"


def test_default_directory_is_the_users_cache(monkeypatch):
    import platformdirs

    monkeypatch.delenv("RWKVJIT_CACHE_DIR")
    assert env.cache_dir() == platformdirs.user_cache_path("rwkv_jit", appauthor=False)


def test_processes_that_write_one_entry_at_once_leave_one_whole_file(child, fresh_service, caplog):
    code = """
from rwkv_jit import cache
from rwkv_jit.compiler import Compiled
for _ in range(100):
    cache.put("a", "sm_90", "0" * 64, Compiled(b"code" * 20000, "sm_90", {}), {})
"""
    package = Path(rwkv_jit.__file__).resolve().parents[1]
    writers = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(package)}) for _ in range(3)
    ]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        found = cache.get("a", "sm_90", "0" * 64)
        seen += found is not None
        assert found is None or found.image == b"code" * 20000
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen > 0
    assert caplog.records == []
    assert [path.name for path in (fresh_service / "sm_90").iterdir()] == [f"a-{'0' * 40}.cubin"]


def test_clearing_deletes_kernels_and_nothing_else(fresh_service):
    put()
    put(sha256(b"another key").hexdigest())
    precious = fresh_service / "sm_90" / "notes.txt"
    precious.write_text("mine")
    info = rwkv_jit.cache_info()
    assert info["entries"] == 2
    assert info["bytes"] == sum(path.stat().st_size for path in cache.entries()) > 0
    assert rwkv_jit.clear_cache() == 2
    assert rwkv_jit.clear_cache() == 0
    assert precious.read_text() == "mine"
    assert get() is None
