"""The CuPy of this environment: it is imported whatever the home is, and a report names it."""

from pathlib import Path

import pytest

import rwkv_jit
from rwkv_jit import cuda, identity

IMPORT_CUPY = """
import os
from rwkv_jit import cuda
make = cuda._private_folder
def told():
    folder = make()
    status = os.stat(folder)
    print(folder, oct(status.st_mode & 0o777), status.st_uid == os.getuid())
    return folder
cuda._private_folder = told
cuda.driver()
assert cuda.nvrtc().getVersion() >= (12, 0)
print(os.environ.get("CUPY_CACHE_DIR", "default"))
"""
NOBODY = """
import os, pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""
NO_INODES = """
import os
real = os.mkdir
def full(path, *more, **named):
    if "/home" in os.fspath(path):
        raise OSError(28, "No space left on device", path)
    real(path, *more, **named)
os.mkdir = full
"""
NO_TEMPORARY_DIRECTORY = """
import tempfile
tempfile._candidate_tempdir_list = lambda: []
"""


def test_cupy_is_imported_where_the_home_cannot_be_written(child, read_only, tmp_path):
    home = read_only(tmp_path / "home")
    done = child(IMPORT_CUPY, unprivileged=True, env={"HOME": str(home)}, remove=["CUPY_CACHE_DIR"])
    told, variable = done.stdout.splitlines()
    folder, mode, is_own = told.split()
    assert (mode, is_own, variable) == ("0o700", "True", "default")
    assert not Path(folder).is_relative_to(home)
    assert not Path(folder).exists()  # it went with the process
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("home", "trouble"),
    [("nowhere", ""), ("HERE/file/home", ""), (None, NOBODY), ("HERE/home", NO_INODES)],
    ids=["relative", "no directory", "unknown", "without inodes"],
)
def test_cupy_is_imported_whatever_the_home_is(home, trouble, child, tmp_path):
    (tmp_path / "file").touch(0o644)
    environment = {"HOME": home.replace("HERE", str(tmp_path))} if home else {}
    removed = ["CUPY_CACHE_DIR"] if home else ["CUPY_CACHE_DIR", "HOME"]
    done = child(trouble + IMPORT_CUPY, env=environment, remove=removed)
    assert " 0o700 True\ndefault\n" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_cupy_is_imported_where_no_directory_can_be_made(child):
    done = child(
        NO_TEMPORARY_DIRECTORY + IMPORT_CUPY.replace("cuda._private_folder = told", ""),
        env={"HOME": "nowhere"}, remove=["CUPY_CACHE_DIR"],
    )  # fmt: skip
    assert done.stdout == "default\n"


def test_folder_for_cupy_outlives_a_process_that_has_forked(child):
    done = child(
        IMPORT_CUPY + "child = os.fork()\nif child:\n    os.waitpid(child, 0)\n",
        env={"HOME": "nowhere"}, remove=["CUPY_CACHE_DIR"],
    )  # fmt: skip
    folder = Path(done.stdout.split()[0])
    assert folder.is_dir()
    folder.rmdir()


def test_folder_that_cupy_cannot_make_is_an_error_that_names_it(child, tmp_path):
    (tmp_path / "file").touch()
    code = "from rwkv_jit import cuda\ntry:\n    cuda.nvrtc()\nexcept RuntimeError as error:\n    print(error)\n"
    done = child(code, env={"CUPY_CACHE_DIR": str(tmp_path / "file" / "cupy")})
    assert f"NVRTC is not ([Errno 20] Not a directory: '{tmp_path}/file/cupy')" in done.stdout


def test_cupys_own_cache_setting_is_left_alone(child, tmp_path):
    chosen = str(tmp_path / "cupy")
    done = child(IMPORT_CUPY, env={"HOME": str(tmp_path / "none"), "CUPY_CACHE_DIR": chosen})
    assert done.stdout.strip() == chosen


def test_report_names_cupy_and_the_library_that_compiles():
    report = rwkv_jit.env_report()
    assert report["cupy"] == cuda.installed_cupy() != []
    assert report["nvrtc"] == identity.identity()
    assert any("libnvrtc" in path for path in report["nvrtc_libraries"])
