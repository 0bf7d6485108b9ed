"""Bundles: the same bytes for the same kernels, and nothing in them that was not checked."""

import io
import json
import logging
import os
import random
import re
import stat
import time
import tracemalloc
import zipfile
from hashlib import sha256

import pytest
from images import image

from rwkv_jit.kernels import cache, env
from rwkv_jit.kernels.cache import bundle
from rwkv_jit.kernels.cache.bundle import Bundle
from rwkv_jit.kernels.errors import CacheError


@pytest.fixture
def three(make_entry):
    """Three entries by name, of two compilers and two architectures."""
    made = [make_entry(1), make_entry(2, arch="sm_80"), make_entry(3, compiler="13.0 feed")]
    return {name: data for name, data, _, _ in made}


@pytest.fixture
def made_up(make_entry):
    """One entry: name, bytes, what it holds, digest."""
    return make_entry()


@pytest.fixture
def write(tmp_path):
    """Writes bytes as a file that is trusted."""

    def write(data, name="kernels.bundle"):
        path = tmp_path / name
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    return write


def zipped(members):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def about(**changes):
    return json.dumps({"format": "rwkv_jit bundle 1", "compilers": ["12.9 x"], **changes})


def chosen(entries):
    return [each for each in cache.stored() if each.name in entries]


def in_users(entries):
    for name, data in entries.items():
        cache.put(name, data)


# ---- the bytes ---------------------------------------------------------------------------------------------------


def test_equal_kernels_make_equal_bundles_byte_for_byte(three, child, tmp_path, write):
    packed = bundle.pack(three)
    assert bundle.pack(dict(reversed(three.items()))) == packed
    code = """
import os, sys
from pathlib import Path
from rwkv_jit.kernels.cache import bundle
os.umask(0o077)
bundle.write(Path("again.bundle"), reversed(list(bundle.Bundle(Path(sys.argv[1])).entries().items())))
"""
    child(code, write(packed), env={"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "2000000000"})
    assert (tmp_path / "again.bundle").read_bytes() == packed
    assert stat.S_IMODE((tmp_path / "again.bundle").stat().st_mode) == 0o644


def test_bundle_of_known_kernels_has_known_bytes():
    compiled = cache.Compiled(image(b"code"), "sm_90", {"f": cache.Resources(1, 2, 3)})
    data = cache.pack("0" * 64, compiled, {"name": "f", "arch": "sm_90", "compiler": "12.9 x"})
    assert sha256(bundle.pack({cache.file_name("f", "sm_90", "0" * 64): data})).hexdigest() == (
        "a755ccb9a7f8aaa4af715f70880e312bb1983d4e2c5c37fb7d8482ef705ba10f"
    )


def test_bundle_is_read_back(three, write):
    made = Bundle(write(bundle.pack(three)))
    assert made.entries() == three
    assert made.names() == sorted(three)
    assert {name: made.read(name) for name in three} == three
    assert made.read("sm_90/missing.cubin") is None
    assert made.compilers() == ["12.9 0123abcd", "13.0 feed"]


# ---- broken ones -------------------------------------------------------------------------------------------------


def holds(data):
    return lambda path: path.write_bytes(data)


def deflated(member, size):
    """A bundle with one member that is far larger than its file."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bundle.json", about() + " " * (size if member == "bundle.json" else 0))
        archive.writestr(member if member != "bundle.json" else "sm_90/x.cubin", bytes(size))
    return holds(made.getvalue())


def is_sparse(size, end=b""):
    """The bytes `end` after a hole."""
    return lambda path: (path.touch(), os.truncate(path, size), path.open("ab").write(end))


def tells_lies(member, at, value):
    """A bundle whose table has another byte about a member; zipfile raises a different kind of error for each."""
    packed = bytearray(
        bundle.pack({"sm_90/a.cubin": cache.pack("0" * 64, cache.Compiled(image(b""), "sm_90", {}), ABOUT)})
    )
    header = packed.index(b"PK\x01\x02")
    header = header if member == "bundle.json" else packed.index(b"PK\x01\x02", header + 4)
    packed[header + at] = value
    return holds(bytes(packed))


ABOUT = {"name": "a", "arch": "sm_90", "compiler": "12.9 x"}
LONG_TABLE = b"PK\5\6" + bytes(8) + (600 << 20).to_bytes(4, "little") + bytes(6)
LIES = {"encrypted": (8, 1), "deflated": (10, 8), "bzip2": (10, 12), "lzma": (10, 14), "unknown method": (10, 99)}
BROKEN = {
    "nothing": (lambda path: None, "No such file or directory"),
    "a directory": (lambda path: path.mkdir(0o700), "is not a file"),
    "a pipe": (lambda path: os.mkfifo(path, 0o600), "is not a file"),
    "a link": (lambda path: path.symlink_to("/dev/null"), "is a symbolic link; name its target instead"),
    "empty": (holds(b""), "it does not end as one"),
    "text": (holds(b"not a bundle\n"), "it does not end as one"),
    "no bundle.json": (holds(zipped({"sm_90/a.cubin": b""})), "no item named 'bundle.json' in the archive"),
    "bundle.json of another kind": (holds(zipped({"bundle.json": "[]"})), ""),
    "bundle.json that is no JSON": (holds(zipped({"bundle.json": "{"})), ""),
    "another format": (holds(zipped({"bundle.json": about(format="bundle 2")})), "format is 'bundle 2', not 'rwkv_jit"),
    "no compilers": (holds(zipped({"bundle.json": json.dumps({"format": "rwkv_jit bundle 1"})})), "compilers"),
    "compilers of another kind": (holds(zipped({"bundle.json": about(compilers=7)})), ""),
    "deflated bundle.json": (deflated("bundle.json", 1 << 22), "bundle.json is compressed"),
    "deflated kernel": (deflated("sm_90/k.cubin", 1 << 22), "compressed"),
    "sparse": (is_sparse(200 << 30), "its 214748364800 bytes are more than the 1073741824 that are read"),
    "a long table": (is_sparse(600 << 20, LONG_TABLE), "it has more kernels than are read"),
    "nested": (holds(zipped({"bundle.json": "[" * 100_000})), "recursion"),
    "many compilers": (holds(zipped({"bundle.json": about() + " " * (1 << 20)})), "bundle.json has [0-9]+ bytes"),
    **{f"{lie} bundle.json": (tells_lies("bundle.json", *change), "") for lie, change in LIES.items()},
    **{f"{lie} entry": (tells_lies("the entry", *change), "") for lie, change in LIES.items()},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_no_bundle_is_one_sentence_and_takes_no_memory(fault, tmp_path, monkeypatch, caplog):
    path = tmp_path / "kernels.bundle"
    make, said = BROKEN[fault]
    make(path)
    if path.is_file() and not path.is_symlink():
        path.chmod(0o600)
    tracemalloc.start()
    try:
        with pytest.raises(CacheError) as caught:
            cache.import_bundle(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert re.search(f"^{path} (is not an intact rwkv_jit bundle|cannot be read): .*{said}", str(caught.value))
    assert "\n" not in str(caught.value)
    assert not env.cache_dir().exists()
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(path))
    for _ in range(2):
        assert cache.get("made_up", "sm_90", "0" * 64) is None
    assert len(caplog.messages) == (0 if path.is_dir() else 1)  # other directories than bundles are read


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: {name: data[:-1]},
        lambda name, data: {name: data[:50] + b"?" + data[51:]},
        lambda name, data: {name.replace("made", "another"): data},
        lambda name, data: {name.replace("sm_90", "sm_80"): data},
        lambda name, data: {"../" + name: data},
        lambda name, data: {"sm_90/readme.txt": b"hello"},
    ],
    ids=["cut", "flipped", "renamed", "another architecture", "outside", "no kernel"],
)
def test_bundle_with_one_wrong_entry_is_not_imported_at_all(change, three, write):
    name = sorted(three)[-1]
    broken = {**three, **change(name, three[name])}
    path = write(zipped({"bundle.json": about(), **broken}))
    with pytest.raises(CacheError, match=f"^{path} is not an intact rwkv_jit bundle: .* is ") as caught:
        cache.import_bundle(path)
    assert "\n" not in str(caught.value)
    assert not env.cache_dir().exists()


def test_damaged_entry_of_a_bundle_is_a_miss_with_one_warning(make_entry, write, monkeypatch, caplog):
    name, data, right, digest = make_entry(1)
    other, other_data, _, other_digest = make_entry(2)
    packed = bundle.pack({name: data, other: other_data})
    at = packed.index(other_data)
    path = write(packed[: at + 60] + b"?" + packed[at + 61 :])
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(path))
    for _ in range(2):
        assert cache.get("made_up", "sm_90", other_digest) is None
        assert cache.get("made_up", "sm_90", digest)[0].image == right.image
    (message,) = caplog.messages
    assert message.startswith(f"cache entry {path}/{other} is damaged")


def test_changed_bundles_never_crash_and_never_serve_wrong_bytes(make_entry, write, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rwkv_jit"), "disabled", True)
    made = [make_entry(number) for number in range(2)]
    packed = bundle.pack({name: data for name, data, _, _ in made})
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(write(packed)))
    rng, outcomes = random.Random(0), []
    directory_of_zip = packed.rindex(b"PK\x01\x02", 0, packed.index(b"PK\x01\x02") + 4)
    for turn in range(1000):
        data = bytearray(packed)
        kind = rng.randrange(4)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            del data[rng.randrange(len(data)) : rng.randrange(len(data))]
        else:  # most of what zipfile believes stands at the end
            for _ in range(rng.choice((1, 2, 8))):
                first = directory_of_zip if turn % 2 else 0
                data[rng.randrange(first, len(data))] = rng.choice((0, 1, 8, 12, 14, 0x7F, 0xFF, rng.randrange(256)))
        path = write(bytes(data))
        cache.forget()
        for _, _, compiled, digest in made:
            found = cache.get("made_up", "sm_90", digest)
            assert found is None or (found[0].image == compiled.image and found[1] == "bundle")
            outcomes.append(found is not None)
        try:
            cache.import_bundle(path)
        except CacheError:
            assert not list(env.cache_dir().glob("bundles/*"))
        else:
            (imported,) = (env.cache_dir() / "bundles").iterdir()
            assert set(Bundle(imported).entries().items()) <= {(name, data) for name, data, _, _ in made}
            cache.clear()
    assert 0.1 < sum(outcomes) / len(outcomes) < 0.9


def test_bundle_with_one_member_that_is_too_large_is_one_sentence(three, write, monkeypatch):
    path = write(bundle.pack(three))
    monkeypatch.setattr(bundle.files, "MOST_BYTES", 300)
    with pytest.raises(CacheError, match=r"cubin has \d+ bytes, more than the 300 that are read"):
        Bundle(path)


def test_bundle_that_nobody_could_read_is_not_written(three, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_MOST_BYTES", 1000)
    with pytest.raises(CacheError, match=r"kernels.bundle is not written: its \d+ bytes .*; choose fewer kernels$"):
        bundle.write(tmp_path / "kernels.bundle", three.items())
    assert list(tmp_path.glob("*")) == []


# ---- whose bundles -----------------------------------------------------------------------------------------------


def link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


OPEN, OTHERS = r"can be written by others \(mode {}\); fix it: chmod go-w", "belongs to user 54321"
LINK = "is a symbolic link; name its target instead"
UNTRUSTED = {
    "others may write": (lambda path, give_away: path.chmod(0o622), OPEN.format(622), True),
    "another's": (lambda path, give_away: give_away(path), OTHERS, True),
    "others may replace": (lambda path, give_away: path.parent.chmod(0o777), OPEN.format(777), True),
    "in another's folder": (lambda path, give_away: give_away(path.parent), OTHERS, True),
    "in another's sticky folder": (
        lambda path, give_away: (path.parent.chmod(0o1777), give_away(path.parent)), OTHERS, True,
    ),
    "a link": (lambda path, give_away: link(path), LINK, False),
    "in a link": (lambda path, give_away: link(path.parent), LINK, False),
}  # fmt: skip


@pytest.mark.parametrize("why", UNTRUSTED)
def test_bundle_that_others_may_have_written_is_not_read(why, tmp_path, make_entry, give_away, monkeypatch, caplog):
    make_it_so, said, can_be_trusted = UNTRUSTED[why]
    name, data, _, digest = make_entry()
    path = tmp_path / "folder" / "kernels.bundle"
    path.parent.mkdir()
    bundle.write(path, [(name, data)])
    make_it_so(path, give_away)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(path))
    for _ in range(2):
        assert cache.get("made_up", "sm_90", digest) is None
    (message,) = caplog.messages
    assert re.search(said, message)
    with pytest.raises(CacheError, match=said):
        cache.import_bundle(path)
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", "1")
    cache.forget()
    assert (cache.get("made_up", "sm_90", digest) is not None) == can_be_trusted


def test_bundle_in_a_folder_like_tmp_is_read(tmp_path, three):
    tmp_path.chmod(0o1777)
    bundle.write(tmp_path / "kernels.bundle", three.items())
    assert Bundle(tmp_path / "kernels.bundle").entries() == three


@pytest.mark.parametrize("place", ["", "bundles"])
def test_imported_bundle_is_not_read_where_others_may_have_put_it(place, fresh_service, make_entry, write, caplog):
    name, data, _, digest = make_entry()
    cache.import_bundle(write(bundle.pack({name: data})))
    assert cache.get("made_up", "sm_90", digest)[1] == "bundle"
    (fresh_service / place).chmod(0o777)
    cache.forget()
    for _ in range(2):
        assert cache.get("made_up", "sm_90", digest) is None
    (message,) = caplog.messages
    assert f"{fresh_service / place} can be written by others (mode 777); fix it" in message


def test_bundle_that_is_swapped_once_it_has_been_opened_is_not_read(three, make_entry, write, monkeypatch):
    path, really_check = write(bundle.pack(three)), bundle.files.check
    wrong = write(bundle.pack(dict([make_entry(9)[:2]])), "wrong.bundle")

    def check(checked, *more, **named):
        really_check(checked, *more, **named)
        if checked == path and wrong.exists():
            wrong.replace(path)

    monkeypatch.setattr(bundle.files, "check", check)
    assert Bundle(path).entries() == three
    assert not wrong.exists()


# ---- export, import, clear ---------------------------------------------------------------------------------------


def test_only_chosen_and_intact_kernels_are_exported(three, tmp_path, caplog):
    in_users(three)
    names = sorted(three)
    (env.cache_dir() / names[0]).write_bytes(b"damaged")
    path = tmp_path / "kernels.bundle"
    assert cache.export(path, chosen(names[:2]))[0] == 1
    assert Bundle(path).entries() == {names[1]: three[names[1]]}
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("place", "said"), [("missing/kernels.bundle", "No such file or directory"), ("mine", "Is a directory")]
)
def test_export_to_a_place_that_cannot_be_written_is_one_sentence(place, said, three, tmp_path):
    in_users(three)
    (tmp_path / "mine").mkdir()
    with pytest.raises(CacheError, match=f"^{tmp_path / place} cannot be written: {said}$"):
        cache.export(tmp_path / place, cache.stored())
    assert (tmp_path / "mine").is_dir()


def test_import_into_a_place_that_cannot_be_written_is_one_sentence(three, write, fresh_service):
    fresh_service.touch()
    with pytest.raises(CacheError, match=f"^{fresh_service}/bundles cannot be written: File exists$"):
        cache.import_bundle(write(bundle.pack(three)))


def test_import_needs_the_cache_to_be_on(three, write, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    with pytest.raises(CacheError, match="RWKVJIT_CACHE=0 turns the cache off"):
        cache.import_bundle(write(bundle.pack(three)))
    assert not env.cache_dir().exists()


def test_import_of_a_bundle_that_was_zipped_anew_stores_what_it_should_have_been(three, write):
    """Other order, other times: the kernels are the same."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in reversed([("bundle.json", about(compilers=["wrong"])), *three.items()]):
            archive.writestr(name, data)
    assert cache.import_bundle(write(made.getvalue())) == 3
    (imported,) = (env.cache_dir() / "bundles").iterdir()
    assert imported.read_bytes() == bundle.pack(three)


def test_kernel_that_another_process_evicts_during_an_export_is_left_out_and_told_of(three, tmp_path, caplog):
    in_users(three)
    chosen = list(cache.stored())
    first, second, third = sorted(three)
    (env.cache_dir() / first).unlink()
    (env.cache_dir() / second).write_bytes(b"damaged")
    path = tmp_path / "kernels.bundle"
    assert cache.export(path, chosen) == (1, path.stat().st_size)
    assert Bundle(path).entries() == {third: three[third]}
    assert caplog.messages == [f"2 kernels were deleted while they were exported and are not in {path}"]


def test_what_a_killed_export_left_beside_its_file_goes_after_an_hour(three, tmp_path):
    names = {
        ".rwkvjit-0_aaaaaa.tmp": 3700,
        ".rwkvjit-0_bbbbbb.tmp": 3500,
        ".rwkvjit-mine.tmp": 3700,
        ".0_aaaaaa.tmp": 3700,
    }
    for name, age in names.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    bundle.write(tmp_path / "kernels.bundle", three.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*list(names)[1:], "kernels.bundle"])


def test_clearing_deletes_imported_bundles_and_leaves_those_of_others(three, write, make_entry, monkeypatch):
    path = write(bundle.pack(three))
    cache.import_bundle(path)
    in_users(dict([make_entry(7)[:2]]))
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(path))
    assert cache.clear() == 4
    assert cache.clear() == 0
    assert path.exists()
    assert list((env.cache_dir() / "bundles").iterdir()) == cache.entries() == []


# ---- forks -------------------------------------------------------------------------------------------------------


def test_forked_child_and_its_parent_both_read_right_afterwards(tmp_path, make_entry, child):
    """The child shares the position in the parent's open file, which must move for neither."""
    made = [make_entry(number, size=3000) for number in range(6)]
    bundle.write(tmp_path / "kernels.bundle", [(name, data) for name, data, _, _ in made])
    code = """
import os, sys
from hashlib import sha256
from rwkv_jit.kernels import cache, kernel  # the latter asks to be told of forks

def read(digests):
    return [sha256(cache.get("made_up", "sm_90", digest)[0].image).hexdigest() for digest in digests]

digests = sys.argv[1:]
first = read(digests[:1])
if os.fork() == 0:
    print(*read(digests), flush=True)
    os._exit(0)
os.wait()
print(*first, *read(digests[1:]), flush=True)
"""
    digests = [digest for *_, digest in made]
    done = child(code, *digests, env={"RWKVJIT_CACHE_PATH": str(tmp_path / "kernels.bundle")})
    wanted = " ".join(sha256(compiled.image).hexdigest() for _, _, compiled, _ in made)
    assert done.stdout.splitlines() == [wanted, wanted]
    assert done.stderr == ""
