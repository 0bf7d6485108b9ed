"""The layers of the cache: where a kernel is found, where it is kept, and that trouble costs one warning at most."""

import ast
import contextlib
import errno
import json
import os
import random
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import pytest
from images import image

import rwkv_jit
from rwkv_jit.kernels import cache, compiler, env, identity, stats, template
from rwkv_jit.kernels.cache import bundle, entry, files, owned


def get(digest, name="made_up", arch="sm_90"):
    """The code and the origin that the cache has for a key."""
    found = cache.get(name, arch, digest)
    return found and (found[0].image, found[1])


NOTE = f"nvrtc-{'0' * 16}.json"


def all_files(root):
    """What there is beside the marker."""
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return [name for name in found if Path(name).name != owned.MARKER]


def link(path):
    """Move what is there out of the cache, and put a link in its place."""
    moved = env.cache_dir().with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def made(make_entry):
    """One entry: name, bytes, what it holds, digest."""
    return make_entry()


@pytest.fixture
def fill(make_entry):
    """Puts an entry into a directory as another process would have done, with a time of its last use."""

    def fill(root, number=0, used=None, size=100, **about):
        name, data, compiled, digest = make_entry(number, size, **about)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        files.write(root / name, data)
        if used is not None:
            os.utime(root / name, (used, used))
        return root / name, compiled.image, digest

    return fill


# ---- put and get -------------------------------------------------------------------------------------------------


def test_kernels_that_were_put_are_got_and_their_bytes_counted(make_entry, fill, tmp_path, monkeypatch):
    one, other = made = [make_entry(1), make_entry(2, size=5000)]
    fill(tmp_path / "more", 3)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "more"))
    assert get(one[3]) is None
    for name, data, _, _ in made:
        cache.put(name, data)
        assert (env.cache_dir() / name).read_bytes() == data
    assert sorted(cache.entries()) == sorted(env.cache_dir() / name for name, *_ in made)
    assert all(name.startswith("sm_90/made_up-") for name, *_ in made)
    for _, _, compiled, digest in (one, *made):
        kernel, origin = cache.get("made_up", "sm_90", digest)
        assert (kernel.image, kernel.target, kernel.resources) == (compiled.image, compiled.target, compiled.resources)
        assert origin == "disk"
    info = rwkv_jit.cache_info()
    assert info["layers"] == [str(env.cache_dir()), str(tmp_path / "more")]
    assert (info["entries"], info["bytes"]) == (2, len(one[1]) + len(other[1]))
    assert (info["bytes_written"], info["bytes_read"]) == (info["bytes"], len(one[1]) + info["bytes"])
    assert info["max_bytes"] == 512 * 2**20
    json.dumps(info)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_directories_and_files_are_the_users_alone(umask, made):
    before = os.umask(umask)
    try:
        cache.put(*made[:2])
    finally:
        os.umask(before)
    (path,) = cache.entries()
    assert [mode(place) for place in (env.cache_dir(), path.parent, path)] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("name", ["été", "中文", "with spaces and 'quotes'", "[brackets]*?", "d" * 200])
def test_cache_directories_of_any_name(name, tmp_path, monkeypatch, made):
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / name / name))
    cache.put(*made[:2])
    assert get(made[3]) == (made[2].image, "disk")
    assert rwkv_jit.cache_info()["path"] == str(tmp_path / name / name)


def test_cache_that_is_off_neither_reads_nor_writes(made, fill, monkeypatch, tmp_path):
    name, data, _, digest = made
    fill(env.cache_dir())
    fill(tmp_path / "more")
    before = all_files(tmp_path)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "more"))
    monkeypatch.setenv("RWKVJIT_CACHE", "0")
    assert get(digest) is None
    cache.put(name, data)
    cache.write_note("nvrtc-x.json", {})
    with cache.one_at_a_time(digest, "a kernel"):
        assert os.listdir(tempfile.gettempdir()) == []
    with pytest.raises(OSError, match="off"):
        cache.source_folder("sources")
    assert all_files(tmp_path) == before
    assert cache.layers() == ()
    monkeypatch.setenv("RWKVJIT_CACHE", "1")
    assert get(digest) is not None


# ---- entries that are not intact ---------------------------------------------------------------------------------


DAMAGE = {
    "damaged": lambda data: b"",
    "of another format": lambda data: seal(data[:8] + bytes([entry.SCHEMA + 1]) + data[9:-32]),
    "another kernel's": lambda data: data,  # as it lies under the name of another one
}


def seal(body):
    """Add a right checksum."""
    return body + sha256(body).digest()


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_entry_is_a_miss_with_one_warning_and_is_replaced(
    fault, made, make_entry, fill, tmp_path, monkeypatch, caplog
):
    """Where another layer has the kernel, it serves meanwhile."""
    name, data, compiled, digest = made
    path, _, _ = fill(env.cache_dir())
    path.write_bytes(DAMAGE[fault](make_entry(1)[1]))
    for _ in range(2):
        assert get(digest) is None
    fill(tmp_path / "more")
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "more"))
    assert get(digest) == (compiled.image, "shared")
    assert caplog.messages == [f"cache entry {path} is {fault}: not used"]
    cache.put(name, data)
    assert get(digest) == (compiled.image, "disk")


def test_entry_that_is_too_large_is_a_miss_with_one_warning_and_is_pruned(made, caplog):
    name, data, _, digest = made
    cache.put(name, data)
    (path,) = cache.entries()
    os.truncate(path, 200 << 30)
    for _ in range(2):
        assert get(digest) is None
    (message,) = caplog.messages
    assert (
        message
        == f"cache entry {path} cannot be read: its {200 << 30} bytes are more than the {64 << 20} that are read"
    )
    (shown,) = cache.stored()
    assert "bytes are more than" in shown.fault
    assert cache.delete_damaged() == (1, 0)
    assert cache.entries() == []


NOTES = {
    "nested": b"[" * 100_000,
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "identity of another type": b'{"identity": [1]}',
    "identity that cannot be printed": b'{"identity": "\\ud800"}',
    "libraries of another type": b'{"identity": "x", "libraries": ["/lib"]}',
    "a path with a zero": b'{"identity": "x", "libraries": {"/a\\u0000b": [1, 2]}}',
    "a path that is no text": b'{"identity": "x", "libraries": {"/\\ud800": [1, 2]}}',
    "a stamp of another type": b'{"identity": "x", "libraries": {"/lib": 1}}',
    "a stamp of texts": b'{"identity": "x", "libraries": {"/lib": ["1", "2"]}}',
    "too long": b'{"identity": "x"}' + b" " * (1 << 20),
}
UNFINISHED = {
    "no fields": {},
    "no libraries": {"identity": "x"},
    "an empty table": {"identity": "x", "libraries": {}},
    "a library that is gone": {"identity": "x", "libraries": {"/gone": [1, 2]}},
}


@pytest.mark.parametrize("note", UNFINISHED)
def test_note_that_says_too_little_is_not_believed(note, caplog):
    cache.write_note(identity._note_name(), UNFINISHED[note])
    assert cache.read_note(env.cache_dir(), identity._note_name()) == UNFINISHED[note]
    assert identity.assumed_identity() is None
    assert caplog.messages == []


@pytest.mark.parametrize("note", NOTES)
def test_malformed_note_is_none_with_one_warning(note, caplog):
    name = identity._note_name()
    cache.write_note(name, {"identity": "right", "libraries": {"/lib": [1, 2]}})
    assert cache.read_note(env.cache_dir(), name) == {"identity": "right", "libraries": {"/lib": [1, 2]}}
    (env.cache_dir() / name).write_bytes(NOTES[note])
    for _ in range(2):
        assert cache.read_note(env.cache_dir(), name) == {}
        assert identity.assumed_identity() is None
    (message,) = caplog.messages
    assert message.startswith(f"note {env.cache_dir() / name} ")


def test_directory_in_the_place_of_an_entry_makes_way_if_it_is_empty(made, caplog):
    """One with files is named, with the command that mends it."""
    path = env.cache_dir() / made[0]
    path.mkdir(parents=True, mode=0o700)
    assert get(made[3]) is None
    cache.put(*made[:2])
    assert get(made[3]) == (made[2].image, "disk")
    assert caplog.messages == []
    path.unlink()
    path.mkdir(mode=0o700)
    (path / "mine.txt").touch()
    for _ in range(2):
        assert get(made[3]) is None
        cache.put(*made[:2])
    assert caplog.messages == [
        f"kernels are not read from the cache: {path} is not a file; fix it: rm -r '{path}'",
        f"kernels are not kept: {path.parent} cannot be written "
        f"(there is a directory with this name; fix it: rm -r '{path}')",
    ]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    subprocess.run(shlex.split(caplog.messages[0].split("fix it: ")[1]), check=True)
    cache.put(*made[:2])
    assert get(made[3]) is not None


# ---- layers ------------------------------------------------------------------------------------------------------


def test_layers_are_asked_in_order(tmp_path, fill, make_entry, monkeypatch):
    """The user's directory, imported bundles, then what RWKVJIT_CACHE_PATH names."""
    name, data, compiled, digest = make_entry()
    first, second = tmp_path / "first", tmp_path / "second.bundle"
    places = [fill(env.cache_dir())[0], fill(first)[0]]
    bundle.write(second, [(name, data)])
    bundle.write(tmp_path / "imported.bundle", [(name, data)])
    cache.import_bundle(tmp_path / "imported.bundle")
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join([str(first), str(tmp_path / "missing"), str(second)]))
    (imported,) = (env.cache_dir() / "bundles").iterdir()
    assert [layer.path for layer in cache.layers()] == [env.cache_dir(), imported, first, second]
    assert [layer.origin for layer in cache.layers()] == ["disk", "bundle", "shared", "bundle"]
    asked = []
    for layer in cache.layers():
        really_read = layer.read
        layer.read = lambda name, layer=layer, read=really_read: asked.append(layer.path) or read(name)
    for deleted, origin in ((None, "disk"), (places[0], "bundle"), (imported, "shared"), (places[1], "bundle")):
        if deleted:
            deleted.unlink()
        if deleted == imported:
            cache.forget()
        assert get(digest) == (compiled.image, origin)
    assert asked == [env.cache_dir(), env.cache_dir(), imported]


def test_other_directories_are_never_written(tmp_path, fill, monkeypatch, make_entry):
    path, _, digest = fill(tmp_path / "more", used=1000)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "more"))
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", "0")
    assert get(digest)[1] == "shared"
    cache.put(*make_entry(1)[:2])
    cache.prune(0)
    assert cache.clear() == 1
    assert all_files(tmp_path / "more") == [str(path.relative_to(tmp_path / "more"))]
    assert path.stat().st_mtime == 1000


def test_missing_part_of_the_path_is_said_once(tmp_path, fill, monkeypatch, caplog):
    _, image, digest = fill(tmp_path / "more")
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join([str(tmp_path / "missing"), str(tmp_path / "more")]))
    for _ in range(2):
        assert get(digest) == (image, "shared")
        assert get("0" * 64) is None
    assert caplog.messages == [
        f"kernels are not read from a part of the cache: {tmp_path / 'missing'} cannot be read: "
        "No such file or directory"
    ]


def test_changed_variables_are_seen_at_once(tmp_path, fill, monkeypatch):
    _, _, digest = fill(tmp_path / "one")
    assert get(digest) is None
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "one"))
    assert get(digest)[1] == "shared"
    monkeypatch.setenv("RWKVJIT_CACHE_DIR", str(tmp_path / "one"))
    assert get(digest)[1] == "disk"


def test_compilers_are_announced_by_bundles_and_other_directories_but_not_by_the_users(tmp_path, made, monkeypatch):
    cache.write_note(NOTE, {"identity": "of the user's"})
    for number, note in enumerate(['{"identity": "of a directory"}', "{", "[]", '{"identity": "of a directory"}']):
        (tmp_path / "more").mkdir(exist_ok=True)
        (tmp_path / "more" / f"nvrtc-{number:016}.json").write_text(note)
    bundle.write(tmp_path / "kernels.bundle", [made[:2]])
    parts = [str(tmp_path / "kernels.bundle"), str(tmp_path / "more")]
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", os.pathsep.join(parts))
    assert list(cache.compilers()) == ["12.9 0123abcd", "of a directory"]


# ---- trouble with the disk ---------------------------------------------------------------------------------------


def use(made):
    """What a process does with two kernels that are nowhere."""
    name, data, _, digest = made
    for suffix in ("", "0"):
        cache.get(f"made_up{suffix}", "sm_90", digest)
        cache.put(name.replace("made_up", f"made_up{suffix}"), data)


USE = """
from rwkv_jit.kernels import cache, identity
for name in ("a", "b"):
    assert cache.get(name, "sm_90", "0" * 64) is None
    identity.assumed_identity()
    cache.put(f"sm_90/{name}-" + 40 * "0" + ".cubin", b"data")
    cache.write_note("nvrtc-x.json", {})
print(len(cache.entries()), cache.size())
"""


@pytest.mark.parametrize("protection", [0o555, 0o111, 0o000], ids=oct)
@pytest.mark.parametrize("place", ["home", "home/cache", "home/cache/sm_90"])
def test_directory_without_permission_costs_one_warning(place, protection, child, tmp_path):
    (tmp_path / "home" / "cache").mkdir(parents=True)
    if place.endswith("sm_90"):
        (tmp_path / place).mkdir()
    if place == "home":
        (tmp_path / "home" / "cache").rmdir()
    path = tmp_path / place
    path.chmod(protection)
    done = child(USE, unprivileged=True, env={"RWKVJIT_CACHE_DIR": str(tmp_path / "home" / "cache")})
    path.chmod(0o755)
    assert done.stdout == "0 0\n"
    assert done.stderr.count("\n") == done.stderr.count("Permission denied") == 1, done.stderr
    assert all_files(tmp_path / "home") == (["cache/nvrtc-x.json"] if path.name == "sm_90" else [])


@pytest.mark.parametrize("place", ["cache", "cache/sm_90"])
def test_file_in_the_place_of_a_directory_costs_one_warning(place, fresh_service, made, caplog):
    path = fresh_service.parent / place
    path.parent.mkdir(exist_ok=True, mode=0o700)
    path.write_text("in the way")
    use(made)
    (message,) = caplog.messages
    assert message == f"kernels are not kept: {env.cache_dir() / 'sm_90'} cannot be written (File exists)"
    assert path.read_text() == "in the way"
    assert rwkv_jit.cache_info()["entries"] == 0


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name"), [(Path, "mkdir"), (tempfile, "mkstemp"), (os, "replace")], ids=["directory", "file", "replacing"]
)
def test_full_disk_costs_one_warning_and_leaves_nothing_behind(owner, name, made, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, no_space)
        use(made)
        cache.write_note("nvrtc-x.json", {})
    (message,) = caplog.messages
    assert message == f"kernels are not kept: {env.cache_dir() / 'sm_90'} cannot be written (No space left on device)"
    assert all_files(env.cache_dir().parent) == []
    assert stats.snapshot()["bytes_written"] == 0
    cache.put(*made[:2])
    assert get(made[3]) is not None


@pytest.mark.parametrize(("protection", "locks"), [(0o755, 1), (0o555, 0), (0o777, 0)], ids=oct)
def test_processes_wait_for_each_other_only_where_they_can_leave_something(protection, locks, child, fresh_service):
    code = """
from rwkv_jit.kernels import cache
from rwkv_jit.kernels.cache import lock
with cache.one_at_a_time("ab", "a kernel"):
    print(len(lock._held))
"""
    fresh_service.mkdir()
    fresh_service.chmod(protection)
    done = child(code, unprivileged=True)
    assert (done.stdout, done.stderr) == (f"{locks}\n", "")


@pytest.mark.parametrize("part", ["{}", "{}/inside", "{}/kernels.bundle"])
def test_part_of_the_path_that_cannot_be_looked_at_costs_one_warning(part, child, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    closed.chmod(0o000)
    done = child(USE, unprivileged=True, env={"RWKVJIT_CACHE_PATH": part.format(closed)})
    assert done.stderr.count("\n") == done.stderr.count("Permission denied") == 1, done.stderr
    assert done.stdout == "2 8\n"


# ---- whose files -------------------------------------------------------------------------------------------------


def others_may_write(path, give_away):
    path.chmod(0o777 if path.is_dir() else 0o666)


def belongs_to_another(path, give_away):
    give_away(path)


def is_a_link(path, give_away):
    link(path)


def owner_and_mode(path):
    return path.lstat().st_uid, path.lstat().st_mode


@pytest.mark.parametrize(
    ("make_it_so", "mend"),
    [
        (others_may_write, "fix it: chmod go-w '{}', or trust it: RWKVJIT_CACHE_SHARED=1"),
        (belongs_to_another, "{} belongs to user 54321; use a directory that you own, or trust it"),
        (is_a_link, "{} is a symbolic link; name its target instead"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("place", ["root", "folder", "file"])
def test_what_others_may_have_written_is_neither_read_nor_repaired(
    place, make_it_so, mend, fill, made, make_entry, give_away, caplog
):
    path, _, digest = fill(env.cache_dir())
    bad = {"root": env.cache_dir(), "folder": path.parent, "file": path}[place]
    make_it_so(bad, give_away)
    before = [*all_files(env.cache_dir()), path.read_bytes(), *owner_and_mode(bad)]
    for _ in range(2):
        assert get(digest) is None
        if place != "file":
            cache.put(*make_entry(7)[:2])
    (message,) = caplog.messages
    assert mend.format(bad) in message
    assert [*all_files(env.cache_dir()), path.read_bytes(), *owner_and_mode(bad)] == before
    cache.put(*made[:2])
    assert (get(digest) is not None) == (place == "file")  # the next compile puts its own in the place of a file
    assert not path.is_symlink()


@pytest.mark.parametrize("make_it_so", [others_may_write, belongs_to_another, is_a_link])
def test_root_that_others_may_have_written_has_no_notes_and_gets_no_sources(make_it_so, give_away):
    cache.write_note("nvrtc-x.json", {"identity": "x"})
    assert cache.read_note(env.cache_dir(), "nvrtc-x.json") == {"identity": "x"}
    make_it_so(env.cache_dir(), give_away)
    assert cache.read_note(env.cache_dir(), "nvrtc-x.json") == {}
    cache.write_note("nvrtc-y.json", {})
    with pytest.raises(files.UntrustedError):
        cache.source_folder("failed")
    assert all_files(env.cache_dir()) == ["nvrtc-x.json"]


@pytest.mark.parametrize("origin", ["disk", "shared"])
@pytest.mark.parametrize("place", ["root", "folder", "file"])
def test_others_files_serve_where_the_user_trusts_them(place, origin, fill, give_away, tmp_path, monkeypatch):
    root = env.cache_dir() if origin == "disk" else tmp_path / "more"
    path, image, digest = fill(root)
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "more"))
    trusted = {"root": root, "folder": path.parent, "file": path}[place]
    trusted.chmod(0o777)
    give_away(trusted)
    assert get(digest) is None
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", "1")
    assert get(digest) == (image, origin)
    link(trusted)
    assert get(digest) is None


# ---- the bound ---------------------------------------------------------------------------------------------------

LONG_AGO = 1_000_000_000


@pytest.mark.parametrize("seed", range(12))
def test_cache_stays_below_its_bound_and_keeps_what_was_used_last(seed, fill, monkeypatch):
    """But for what serves this process. Stamps of the future and files too large to be read go first."""
    monkeypatch.setattr(files, "MOST_BYTES", 20_000)
    rng, total, expected = random.Random(seed), 0, set()
    stamps = {}
    for number in range(20):
        age = rng.choice([rng.randrange(1, 10**8), -rng.randrange(3700, 10**8)])
        path, _, digest = fill(env.cache_dir(), number, time.time() - age, size=rng.choice((400, 4000, 40_000)))
        is_useless = age < 0 or path.stat().st_size > files.MOST_BYTES
        serves = rng.random() < 0.2 and get(digest) is not None
        assert not serves or abs(time.time() - path.stat().st_mtime) < 60  # a use makes the stamp right
        if not serves:
            stamps[path] = (0 if is_useless else path.stat().st_mtime, path.name)
        total += path.stat().st_size
    bound = rng.randrange(total)
    for path in sorted(stamps, key=stamps.get):
        if total > bound:
            total -= path.stat().st_size
            expected.add(path)
    before = set(cache.entries())
    assert cache.prune(bound) == len(expected) == stats.snapshot()["evictions"]
    assert before - set(cache.entries()) == expected
    assert cache.prune(cache.size()) == 0


def test_putting_a_kernel_keeps_the_cache_below_its_bound(fill, made, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", "0.1")
    for number in range(1, 31):
        fill(env.cache_dir(), number, LONG_AGO + number, size=10_000)
    cache.put(*made[:2])
    assert env.cache_max_bytes() == 104857
    assert 0 < env.cache_max_bytes() - cache.size() < 11_000
    assert get(made[3]) is not None


def test_nothing_but_kernels_is_evicted(fill, tmp_path, make_entry):
    bundle.write(tmp_path / "kernels.bundle", [make_entry(1)[:2]])
    cache.import_bundle(tmp_path / "kernels.bundle")
    cache.write_note("nvrtc-x.json", {})
    (env.cache_dir() / "sources").mkdir()
    (env.cache_dir() / "sources" / "a.cu").write_text("text")
    fill(env.cache_dir(), 2)
    before = set(all_files(env.cache_dir()))
    assert cache.prune(0) == 1
    assert before - set(all_files(env.cache_dir())) == {make_entry(2)[0]}
    assert get(make_entry(1)[3])[1] == "bundle"


def test_kernel_that_another_process_evicted_meanwhile_makes_room_too(fill, monkeypatch):
    gone, _, _ = fill(env.cache_dir(), 1, LONG_AGO)
    kept, _, _ = fill(env.cache_dir(), 2, LONG_AGO + 1)
    really_delete = files.delete

    def delete(root, name):
        really_delete(root, name)
        if root / name == gone:
            raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(files, "delete", delete)
    assert cache.prune(kept.stat().st_size) == 0
    assert cache.entries() == [kept]


def test_what_killed_writers_left_is_no_entry_and_goes_after_an_hour(made):
    cache.put(*made[:2])
    folder = env.cache_dir() / "sm_90"
    old, future, new, foreign = (folder / f".{name}.tmp" for name in (
        "rwkvjit-0_aaaaaa", "rwkvjit-0_bbbbbb", "rwkvjit-0_cccccc", "settings"
    ))  # fmt: skip
    for path in (old, future, new, foreign):
        path.write_bytes(made[1])
    for path, age in ((old, 3700), (future, -3700), (foreign, 3700)):
        os.utime(path, (time.time() - age, time.time() - age))
    assert len(cache.entries()) == 1
    assert len(list(cache.stored())) == 1
    cache.put(*made[:2])
    assert [path.exists() for path in (old, future, new, foreign)] == [False, False, True, True]


def test_kernel_is_kept_though_tidying_up_fails(made, fill, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path, _, _ = fill(env.cache_dir(), 1, LONG_AGO)
    temporary = env.cache_dir() / ".rwkvjit-aaaaaaaa.tmp"
    temporary.touch()
    os.utime(temporary, (LONG_AGO, LONG_AGO))
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", "0")
    monkeypatch.setattr(files, "delete", refused)
    cache.put(*made[:2])
    assert get(made[3]) is not None
    assert stats.snapshot()["evictions"] == 0
    (env.cache_dir() / made[0]).unlink()
    with pytest.raises(rwkv_jit.CacheError, match=f"^{path} cannot be deleted: Operation not permitted$"):
        cache.clear()


# ---- a group -----------------------------------------------------------------------------------------------------

AS_ANOTHER = """
import os, sys, tempfile
from hashlib import sha256
from images import image
from rwkv_jit.kernels import cache, env, stats
from rwkv_jit.kernels.cache import lock
import fcntl  # what is imported late lies where this user may not look
user, group, umask = (int(text) for text in sys.argv[1:4])
os.setgroups([group])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
os.umask(umask)
def put(number):
    digest = sha256(bytes([number])).hexdigest()
    about = {"name": "made_up", "arch": "sm_90", "compiler": "x"}
    with cache.one_at_a_time(digest, "a kernel"):
        compiled = cache.Compiled(image(b"code"), "sm_90", {})
        cache.put(cache.file_name("made_up", "sm_90", digest), cache.pack(digest, compiled, about))
def get(number):
    found = cache.get("made_up", "sm_90", sha256(bytes([number])).hexdigest())
    return found and found[1]
"""


@pytest.fixture
def group(child, give_away):
    """Runs code as one of two users of a group, who share a cache; other files and rights of theirs differ."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        top, team = Path(place), 23000
        top.chmod(0o1777)

        def run(user, code, umask=0o022, shared="1"):
            environment = {"RWKVJIT_CACHE_DIR": str(top / "team" / "kernels"), "TMPDIR": str(top)}
            environment |= {"RWKVJIT_CACHE_SHARED": shared, "HOME": str(top / "nowhere")}
            done = child(AS_ANOTHER + code, user, team, umask, env=environment, cwd="/")
            assert done.stderr == "", done.stderr
            return done.stdout.strip()

        run.root = top / "team" / "kernels"
        run.root.parent.mkdir()
        os.chown(run.root.parent, 0, team)
        run.root.parent.chmod(0o2770)
        yield run


@pytest.mark.parametrize(("maker", "umask"), [("a user", 0o077), ("an administrator", 0o022)])
def test_two_users_of_a_group_read_and_publish_in_one_cache(maker, umask, group):
    if maker == "an administrator":
        group.root.mkdir()
        group.root.chmod(0o2770)
        os.chown(group.root, 0, 23000)
    assert group(23001, "put(1); print(get(1), get(2))", umask) == "disk None"
    assert group(23002, "put(2); put(3); print(get(1), get(2))", umask) == "disk disk"
    assert group(23001, "put(2); print(get(1), get(2), get(3))", umask) == "disk disk disk"
    files_of = {path.stat().st_uid for path in (group.root / "sm_90").iterdir()}
    assert files_of == {23001, 23002}
    for path in (group.root, *group.root.rglob("*")):
        assert (path.stat().st_gid, mode(path)) == (23000, 0o2770 if path.is_dir() else 0o660), path
    for path in (group.root / "sm_90").iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))
    group(23002, "get(1)")  # which keeps it from being evicted by the other one
    assert group(23001, "print(cache.prune(300), get(1), get(2), get(3))") == "2 disk None None"
    assert group(23002, "print(cache.prune(0))") == "1"
    assert group(23001, "put(1); print(cache.clear())") == "1"


def test_users_who_do_not_say_that_they_share_keep_to_themselves(group):
    assert group(23001, "put(1); print(get(1))", shared="0") == "disk"
    assert mode(group.root) & 0o077 == 0
    assert {mode(path) for path in group.root.rglob("*") if path.is_file()} == {0o600}


# ---- many at once ------------------------------------------------------------------------------------------------

WRITE = """
import sys
from images import image
from rwkv_jit.kernels import cache
from hashlib import sha256
for turn in range(150):
    number = (turn + int(sys.argv[1])) % 12
    digest = sha256(bytes([number])).hexdigest()
    compiled = cache.Compiled(image(bytes([number]) * 20_000), "sm_90", {})
    about = {"name": "made_up", "arch": "sm_90", "compiler": "x"}
    cache.put(cache.file_name("made_up", "sm_90", digest), cache.pack(digest, compiled, about))
    cache.forget()  # so that what it wrote may be evicted
"""
EVICT = """
import os, sys
from rwkv_jit.kernels import cache, stats
stop = False
while not stop:
    stop = os.path.exists(sys.argv[1])
    cache.prune(60_000)
print(stats.snapshot()["evictions"])
"""


def test_readers_see_whole_kernels_or_none_while_others_write_and_evict(start, tmp_path, caplog):
    stop = tmp_path / "stop"
    others = [start(WRITE, 0), start(WRITE, 6), start(EVICT, stop)]
    seen, missed = 0, 0
    while any(writer.poll() is None for writer in others[:2]):
        for number in range(12):
            found = get(sha256(bytes([number])).hexdigest())
            assert found in (None, (image(bytes([number]) * 20_000), "disk"))
            seen, missed = seen + bool(found), missed + (not found)
    stop.touch()
    errors = [other.stderr.read() for other in others]
    assert [(other.wait(), error) for other, error in zip(others, errors, strict=True)] == [(0, "")] * 3
    assert int(others[2].stdout.read()) > 0
    assert seen > 0
    assert missed > 0
    assert caplog.messages == []
    assert all(path.suffix == ".cubin" for path in (env.cache_dir() / "sm_90").iterdir())
    cache.forget()
    cache.prune(60_000)
    assert 0 < cache.size() <= 60_000
    assert [each.fault for each in cache.stored()] == [""] * len(cache.entries())


@pytest.mark.parametrize("origin", ["disk", "bundle"])
@pytest.mark.parametrize(
    ("target", "code"),
    [("sm_90", b""), ("compute_80", image(b"", "compute_80")), ("sm_90", image(b"", "sm_80"))],
    ids=["empty", "PTX", "another GPU's"],
)
def test_forged_kernel_with_a_right_checksum_is_a_miss_with_one_warning(
    target, code, origin, make_entry, tmp_path, monkeypatch, caplog
):
    name, _, _, digest = make_entry(1)
    about = {"name": "made_up", "arch": "sm_90", "compiler": "12.9 0123abcd"}
    data = cache.pack(digest, cache.Compiled(code, target, {}), about)
    if origin == "disk":
        cache.put(name, data)
    else:
        path = tmp_path / "forged.bundle"
        with monkeypatch.context() as patch:
            patch.setattr(entry, "_fault_of_image", lambda *_: "")
            bundle.write(path, [(name, data)])
        with pytest.raises(rwkv_jit.CacheError, match="is not an intact rwkv_jit bundle: .* is damaged"):
            cache.import_bundle(path)
        monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(path))
    assert [get(digest), get(digest)] == [None, None]
    (message,) = caplog.messages
    assert re.match("cache entry .* is damaged .*: not used$", message)
    name, data, compiled, digest = make_entry(1)
    cache.put(name, data)
    assert get(digest) == (compiled.image, "disk")


@pytest.mark.parametrize(
    ("field", "value"), [("name", "another"), ("arch", "sm_80")], ids=["another template's", "another architecture's"]
)
def test_kernel_that_lies_where_another_belongs_is_a_miss(field, value, make_entry):
    name, _, _, digest = make_entry(1)
    about = {"name": "made_up", "arch": "sm_90", "compiler": "12.9 0123abcd"} | {field: value}
    arch = about["arch"]
    cache.put(name, cache.pack(digest, cache.Compiled(image(b"code", arch), arch, {}), about))
    assert get(digest) is None


def test_pruning_a_directory_that_others_are_about_to_make_is_no_fault(fill, monkeypatch):
    look = owned.adopt

    def look_before_others_write(root):
        is_marked = look(root)
        fill(root, 0)
        return is_marked

    monkeypatch.setattr(owned, "adopt", look_before_others_write)
    assert cache.prune(0) == 0


# ---- clearing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def save_source(monkeypatch):
    """Keeps a source as the compiler does, and returns its folder."""
    monkeypatch.setattr(compiler, "options", compiler.key_options)  # the others depend on which NVRTC there is

    def save_source(kind="sources"):
        rendered = template.Rendered("wkv7", "int x;", (("types.cuh", "// types"),))
        return compiler.save_source(cache.source_folder(kind), rendered, "sm_90").parent

    return save_source


def test_saved_headers_whose_names_make_the_same_file_stay_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "options", lambda target: ("-arch=sm_90",))
    names = ("a/x.cuh", "a_x.cuh", "compile.py", "mine.cu", "types.cuh")
    rendered = template.Rendered("mine", "the source", tuple((name, f"text of {name}") for name in names))
    program = compiler.save_source(tmp_path, rendered, "sm_90")
    (line,) = [line for line in program.read_text().splitlines() if line.startswith("HEADERS = ")]
    files = ast.literal_eval(line.partition(" = ")[2])
    assert {name: (program.parent / files[name]).read_text() for name in names} == dict(rendered.headers)
    assert (program.parent / "mine.cu").read_text() == "the source"
    assert [files[name] for name in names[::4]] == ["a_x.cuh", "types.cuh"]


def test_clearing_deletes_kernels_and_what_belongs_to_them_and_nothing_else(fill, save_source):
    cache.write_note(identity._note_name(), {})
    for number in range(2):
        fill(env.cache_dir(), number)
    folders = [save_source(kind) for kind in ("sources", "failed")]
    precious = [
        "sm_90/notes.txt",
        "sources/thesis.tex",
        f"failed/{folders[1].name}/measured.csv",
        "bundles/mine.bundle",
    ]
    for name in precious:
        (env.cache_dir() / name).parent.mkdir(exist_ok=True)
        (env.cache_dir() / name).write_text("mine")
    info = rwkv_jit.cache_info()
    assert info["entries"] == 2
    assert info["bytes"] == sum(path.stat().st_size for path in cache.entries()) > 0
    assert rwkv_jit.clear_cache() == 2
    assert rwkv_jit.clear_cache() == 0
    assert not folders[0].exists()
    assert all_files(env.cache_dir()) == sorted(precious)
    assert {(env.cache_dir() / name).read_text() for name in precious} == {"mine"}


# ---- what is ours ------------------------------------------------------------------------------------------------

FOREIGN = [
    "sources/t.tex", "failed/x/a.cu", "bundles/mine.bundle", "sm_90/kernel.cubin", "nvrtc-x.json", ".git/.x.tmp",
    ".notes.tmp", "sm_90/.notes12.tmp", "models/sm_90/k-" + 40 * "0" + ".cubin",
]  # fmt: skip


@pytest.fixture
def foreign():
    """A directory with files of somebody's work, all of them long untouched."""
    for name in FOREIGN:
        path = env.cache_dir() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (LONG_AGO, LONG_AGO))
    return env.cache_dir()


def test_directory_with_foreign_files_serves_and_loses_none(foreign, made, make_entry, monkeypatch, caplog):
    monkeypatch.setenv("RWKVJIT_CACHE_MAX_MB", "0")
    assert cache.clear() == 0
    for number in range(2):
        cache.put(*make_entry(number)[:2])
        assert get(make_entry(number)[3]) == (make_entry(number)[2].image, "disk")
        cache.forget()
    assert cache.delete_damaged() == (0, 0)
    refusal = (
        f"{foreign} holds files that rwkv_jit did not write, so it deletes nothing there; name a directory for the "
        f"cache alone in RWKVJIT_CACHE_DIR, or let it delete its own files here: touch '{foreign}/.rwkvjit-cache'"
    )
    for delete in (lambda: cache.prune(0), cache.clear):
        with pytest.raises(rwkv_jit.CacheError) as caught:
            delete()
        assert str(caught.value) == refusal
    assert caplog.messages.count(f"the cache is larger than 0 bytes: {refusal}") == 1
    kernels = [make_entry(number)[0] for number in range(2)]
    assert all_files(foreign) == sorted([*FOREIGN, *kernels])
    subprocess.run(shlex.split(refusal.split("here: ")[1]), check=True)
    (foreign / kernels[0]).write_bytes(b"damaged")
    assert cache.delete_damaged() == (1, 0)
    assert cache.prune(0) == 1
    assert cache.clear() == 0
    assert all_files(foreign) == sorted(FOREIGN)
    assert {(foreign / name).read_text() for name in FOREIGN} == {"mine"}


def test_caches_of_before_there_was_a_marker_are_tidied_too(fill, made, tmp_path):
    """All that an earlier version wrote is known as ours; its choices and temporaries stay."""
    root = env.cache_dir()
    paths = [fill(root, number, LONG_AGO + number)[0] for number in range(3)]
    for name in (NOTE, "tuned.json", ".ab_cd012.tmp", "sm_90/.ab_cd013.tmp", f"bundles/{'a' * 40}.bundle"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    folder = root / "failed" / f"wkv7-sm_90a-{'0' * 16}"
    folder.mkdir(parents=True)
    for name in ("compile.py", "wkv7.cu", "types.cuh"):
        (folder / name).touch()
    assert not (root / owned.MARKER).exists()
    assert cache.prune(paths[0].stat().st_size) == 2
    assert cache.entries() == [paths[2]]
    assert (root / owned.MARKER).exists()
    assert cache.clear() == 1
    assert all_files(root) == [".ab_cd012.tmp", "sm_90/.ab_cd013.tmp", "tuned.json"]
    assert not folder.parent.exists()


def test_empty_and_new_directories_are_marked_when_something_is_written(made, fresh_service):
    assert cache.clear() == cache.prune(0) == 0
    assert not fresh_service.exists()
    for make in (lambda: None, lambda: fresh_service.mkdir(mode=0o700)):
        make()
        cache.put(*made[:2])
        assert b"rwkv_jit" in (fresh_service / owned.MARKER).read_bytes()
        shutil.rmtree(fresh_service)


@pytest.mark.parametrize("place", ["", "sm_90", "bundles", "sources", "failed/wkv7-sm_90-{digest}"])
def test_nothing_is_deleted_through_a_link(place, fill, save_source, make_entry, tmp_path, monkeypatch):
    bundle.write(tmp_path / "kernels.bundle", [make_entry(1)[:2]])
    cache.import_bundle(tmp_path / "kernels.bundle")
    path, _, _ = fill(env.cache_dir(), used=LONG_AGO)
    digest = save_source("sources").name.rpartition("-")[2]
    save_source("failed")
    temporary = path.with_name(".rwkvjit-aaaaaaaa.tmp")
    temporary.touch()
    os.utime(temporary, (LONG_AGO, LONG_AGO))
    linked = env.cache_dir() / place.format(digest=digest)
    behind = all_files(linked)
    assert behind
    link(linked)
    with contextlib.suppress(rwkv_jit.CacheError):
        cache.prune(0)
    with contextlib.suppress(rwkv_jit.CacheError):
        cache.delete_damaged()
    with pytest.raises(rwkv_jit.CacheError, match=f"{linked} is a symbolic link"):
        cache.clear()
    assert all_files(linked.resolve()) == behind
    assert linked.is_symlink()


def test_link_in_the_place_of_a_file_stays(made, tmp_path):
    cache.put(*made[:2])
    (path,) = cache.entries()
    path.unlink()
    (tmp_path / "mine").write_bytes(made[1])
    path.symlink_to(tmp_path / "mine")
    assert cache.prune(0) == cache.clear() == 0
    assert path.is_symlink()
    assert (tmp_path / "mine").read_bytes() == made[1]
