"""Whose files are read, how they are written, and that nothing else is ever opened as a kernel."""

import errno
import io
import os
import shlex
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from rwkv_jit.kernels.cache import files

NAME = "sm_90/a.cubin"


@pytest.fixture
def tree(tmp_path):
    """A root with one folder and one file."""
    root = tmp_path / "root"
    (root / "sm_90").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    (root / NAME).write_bytes(b"right")
    (root / NAME).chmod(0o600)
    return root


def places(root):
    """The root, its folder and its file by name."""
    return {"root": root, "folder": root / "sm_90", "file": root / NAME}


# ---- reading -----------------------------------------------------------------------------------------------------


def test_file_is_read_whole(tree):
    assert files.read(tree, NAME) == b"right"
    (tree / NAME).write_bytes(bytes(range(256)) * 20_000)
    assert files.read(tree, NAME) == bytes(range(256)) * 20_000
    (tree / NAME).write_bytes(b"")
    assert files.read(tree, NAME) == b""


@pytest.mark.parametrize("name", ["sm_90/b.cubin", "sm_80/a.cubin", "b.cubin", f"{NAME}/inside"])
def test_file_that_is_not_there_is_none(tree, name):
    assert files.read(tree, name) is None


@pytest.mark.parametrize("place", ["root", "folder"])
def test_file_in_the_place_of_a_directory_is_none(tree, place):
    path = places(tree)[place]
    path.rename(path.with_name("moved"))
    path.touch(0o600)
    assert files.read(tree, NAME) is None


def test_what_cannot_be_read_is_an_error(tree, child):
    (tree / NAME).chmod(0o000)
    code = """
import sys
from pathlib import Path
from rwkv_jit.kernels.cache import files
try:
    files.read(Path(sys.argv[1]), sys.argv[2])
except PermissionError as error:
    assert not isinstance(error, files.UntrustedError)
    print(error.strerror)
"""
    assert child(code, tree, NAME, unprivileged=True).stdout == "Permission denied\n"


# ---- whose files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777], ids=oct)
@pytest.mark.parametrize("place", ["root", "folder", "file"])
def test_what_others_may_write_is_refused_with_a_command_that_mends_it(tree, place, mode):
    path = places(tree)[place]
    path.chmod(mode)
    with pytest.raises(files.UntrustedError, match=f"can be written by others .mode {mode:o}.; fix it: ") as caught:
        files.read(tree, NAME)
    assert str(caught.value).startswith(f"{path} ")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    subprocess.run(shlex.split(str(caught.value).split("fix it: ")[1].split(", or")[0]), check=True)
    assert files.read(tree, NAME) == b"right"


def test_symbolic_link_above_the_root_is_the_users_own_business(tree):
    """A home or ~/.cache that leads to another disk."""
    (tree.parent / "home").symlink_to(tree.parent)
    assert files.read(tree.parent / "home" / "root", NAME) == b"right"


def test_own_files_and_those_of_root_are_read_and_no_others(tree, give_away, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert files.read(tree, NAME) == b"right"  # all root's
    give_away(tree / NAME)
    assert files.read(tree, NAME) == b"right"
    os.chown(tree / NAME, 54322, 0)
    with pytest.raises(files.UntrustedError, match="belongs to user 54322"):
        files.read(tree, NAME)


def test_pipe_in_the_place_of_a_file_is_refused_without_waiting_for_a_writer(tree):
    (tree / NAME).unlink()
    os.mkfifo(tree / NAME)
    (tree / NAME).chmod(0o600)
    messages = []

    def read():
        try:
            files.read(tree, NAME)
        except files.UntrustedError as error:
            messages.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert messages == [f"{tree / NAME} is not a file; fix it: rm -r '{tree / NAME}'"]


@pytest.mark.parametrize("place", ["root", "folder", "file"])
def test_what_is_swapped_once_it_has_been_opened_is_not_read(tree, place, monkeypatch):
    """Whoever checks a name and then opens it reads the wrong file here."""
    path = places(tree)[place]
    wrong = tree.parent / "wrong"
    (wrong / "sm_90").mkdir(parents=True)
    (wrong / NAME).write_bytes(b"wrong")
    swapped, really_check = [], files.check

    def check(checked, status, *more):
        really_check(checked, status, *more)
        if Path(checked) == path and not swapped:
            path.rename(path.with_name("moved"))
            places(wrong)[place].rename(path)
            swapped.append(path)

    monkeypatch.setattr(files, "check", check)
    assert files.read(tree, NAME) == b"right"
    assert swapped == [path]
    assert (tree / NAME).read_bytes() == b"wrong"


@pytest.mark.parametrize("place", ["folder", "file"])
def test_link_that_appears_between_two_openings_is_not_followed(tree, place, monkeypatch):
    path, really_open = places(tree)[place], os.open
    wrong = tree.parent / "wrong"
    (wrong / "sm_90").mkdir(parents=True)
    (wrong / NAME).write_bytes(b"wrong")

    def open_after_swap(part, *more, **options):
        if Path(part).name == path.name:
            path.rename(path.with_name("moved"))
            path.symlink_to(places(wrong)[place])
        return really_open(part, *more, **options)

    monkeypatch.setattr(os, "open", open_after_swap)
    with pytest.raises(files.UntrustedError, match="is a symbolic link"):
        files.read(tree, NAME)


def test_no_handle_is_left_open(tree):
    before = len(os.listdir("/proc/self/fd"))
    files.read(tree, NAME)
    files.read(tree, "sm_90/b.cubin")
    (tree / NAME).chmod(0o666)
    with pytest.raises(files.UntrustedError):
        files.read(tree, NAME)
    files.write(tree / NAME, b"new")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- stamps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "used", "stamp"),
    [(3700, 1e9, 1e9), (3500, 1e9, 1e9 - 3500), (3700, None, 1e9 - 3700), (-50, 1e9, 1e9 + 50), (-1e8, 1e9, 1e9)],
)
def test_file_is_stamped_as_used_at_most_once_an_hour(tree, age, used, stamp):
    os.utime(tree / NAME, (1e9 - age, 1e9 - age))
    files.read(tree, NAME, used)
    assert (tree / NAME).stat().st_mtime == stamp


# ---- making and writing ------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_directory_that_is_there_is_left_as_it_is(tmp_path):
    tmp_path.chmod(0o750)
    files.make_directory(tmp_path)
    files.make_folder(tmp_path / "sm_90")
    files.publish(tmp_path / "file", b"data")
    assert [mode(path) for path in (tmp_path, tmp_path / "sm_90", tmp_path / "file")] == [0o750, 0o700, 0o600]


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_):
    raise KeyboardInterrupt


class FullDisk(io.FileIO):
    write = no_space


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (tempfile, "mkstemp", no_space),
        (os, "fdopen", lambda handle, mode: FullDisk(handle, mode)),
        (os, "chmod", no_space),
        (os, "replace", no_space),
        (os, "replace", interrupted),
    ],
    ids=["creating", "writing", "mode", "replacing", "interrupted"],
)
def test_write_that_fails_leaves_what_was_there_and_nothing_else(tree, module, name, fault, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fault)
        with pytest.raises((OSError, KeyboardInterrupt), match="No space left|^$"):
            files.write(tree / NAME, b"new")
    assert [path.read_bytes() for path in (tree / "sm_90").iterdir()] == [b"right"]


def test_file_is_created_once(tree):
    files.create(tree / "claim", b"first")
    with pytest.raises(FileExistsError):
        files.create(tree / "claim", b"second")
    assert (tree / "claim").read_bytes() == b"first"
    assert mode(tree / "claim") == 0o600


# ---- deleting ----------------------------------------------------------------------------------------------------


def test_files_and_empty_folders_are_deleted(tree):
    files.delete(tree, NAME)
    assert not (tree / NAME).exists()
    with pytest.raises(FileNotFoundError):
        files.delete(tree, NAME)
    with pytest.raises(OSError, match="directory"):
        files.delete(tree, "sm_90")
    (tree / "sm_90" / "mine").touch()
    with pytest.raises(OSError, match="not empty"):
        files.delete(tree, "sm_90", os.rmdir)
    (tree / "sm_90" / "mine").unlink()
    files.delete(tree, "sm_90", os.rmdir)
    assert list(tree.iterdir()) == []


# ---- too large ---------------------------------------------------------------------------------------------------


def test_file_of_the_largest_size_is_read(tree):
    assert files.read(tree, NAME, most=5) == b"right"
    with pytest.raises(OSError, match="its 5 bytes are more than the 4 that are read"):
        files.read(tree, NAME, most=4)


@pytest.mark.parametrize("place", ["root", "folder", "file"])
def test_nothing_is_deleted_through_a_link(tree, place):
    path = places(tree)[place]
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))
    with pytest.raises(files.UntrustedError, match=f"^{path} is a symbolic link"):
        files.delete(tree, NAME)
    assert (tree / NAME).read_bytes() == b"right"
    assert path.is_symlink()


# ---- a group -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("above", "folder", "file"), [
    (0o2770, 0o2770, 0o660), (0o0770, 0o0770, 0o660), (0o2750, 0o2750, 0o640), (0o3777, 0o3777, 0o666),
    (0o700, 0o700, 0o600),
], ids=oct)  # fmt: skip
def test_what_is_made_in_a_shared_directory_is_for_those_who_may_write_there(
    above, folder, file, tmp_path, umask, monkeypatch
):
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", "1")
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(above)
    files.make_directory(root)
    files.make_folder(root / "sm_90")
    files.publish(root / NAME, b"data")
    files.create(root / "claim", b"data")
    assert [mode(path) for path in (root, root / "sm_90", root / NAME, root / "claim")] == [above, folder, file, file]


def test_directory_that_is_made_to_be_shared_is_its_groups(tmp_path, umask, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", "1")
    files.make_directory(tmp_path / "above" / "made")
    files.make_directory(tmp_path / "above" / "private", is_private=True)
    assert mode(tmp_path / "above" / "made") == 0o2770
    assert mode(tmp_path / "above" / "private") == 0o700


def test_what_is_private_is_not_trusted_to_others_though_the_cache_is_shared(tmp_path, give_away, monkeypatch):
    monkeypatch.setenv("RWKVJIT_CACHE_SHARED", "1")
    path = tmp_path / "private"
    path.mkdir()
    path.chmod(0o777)
    files.make_directory(path)
    with pytest.raises(files.UntrustedError, match=f"fix it: chmod go-w '{path}'$"):
        files.make_directory(path, is_private=True)
    path.chmod(0o700)
    give_away(path)
    with pytest.raises(files.UntrustedError, match="use a directory that you own$"):
        files.make_directory(path, is_private=True)


def test_directory_that_changes_while_it_is_looked_through_has_nothing(tree, monkeypatch):
    def changed(*_):
        raise FileNotFoundError(errno.ENOENT, "gone")

    assert files.find(tree, "*/*.cubin") == [tree / NAME]
    monkeypatch.setattr(os, "scandir", changed)
    assert files.find(tree, "*/*.cubin") == []
