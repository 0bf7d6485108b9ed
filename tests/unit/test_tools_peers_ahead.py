"""tools/peers_ahead.py: archives of Triton's cache. Nothing of Triton is needed for these."""

import importlib.util
import json
import random
import re

import pytest

HERE = {
    "build of Triton": "triton", "ptxas or architecture": "12.8-90", "environment": "[]", "Python": ".so", "GPU": "H100"
}  # fmt: skip


@pytest.fixture
def tool(root):
    spec = importlib.util.spec_from_file_location("peers_ahead", root / "tools" / "peers_ahead.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def kernel(tool, number, size=2000, **needs):
    files = {"k.cubin": random.Random(number).randbytes(size), "k.json": b'{"hash": "of the build", "num_warps": 4}'}
    return tool.Entry({"environment": "[]", **needs}, files, behind=f"-source-{number}")


def unpacked(tool, folder, cache):
    return [tool.unpack(path, cache, HERE) for path in sorted(folder.glob("*.xz"))]


def test_archives_are_split_by_size_and_come_back_whole(tool, tmp_path):
    kernels = [kernel(tool, number) for number in range(40)]
    (tmp_path / "kernels-99.xz").write_text("of an older build")
    paths = tool.write(kernels, tmp_path, "kernels", 10_000 / 2**20)
    assert sorted(tmp_path.glob("*.xz")) == paths
    assert len(paths) >= 8
    assert all(path.stat().st_size <= 10_000 for path in paths)
    said = unpacked(tool, tmp_path, tmp_path / "cache")
    assert sum(int(re.fullmatch(r"kernels-\d\d\.xz: (\d+) placed", line)[1]) for line in said) == 40
    found = list((tmp_path / "cache").iterdir())
    assert {(each / "k.cubin").read_bytes() for each in found} == {each.files["k.cubin"] for each in kernels}
    for each in found:
        about = json.loads((each / "k.json").read_text())
        assert (tool._folder_of(about["hash"]), about["num_warps"]) == (each.name, 4)
        paths = json.loads((each / "__grp__k.json").read_text())["child_paths"]
        assert paths == {name: str(each / name) for name in ("k.cubin", "k.json")}


def test_a_kernel_larger_than_an_archive_may_be_is_refused(tool, tmp_path):
    with pytest.raises(ValueError, match=r"--mib: k\.cubin, k\.json alone takes 0\.00"):
        tool.write([kernel(tool, 1, 8000)], tmp_path, "kernels", 4000 / 2**20)


def test_what_does_not_fit_is_left_out_with_a_message(tool, tmp_path):
    of_another = {"ptxas or architecture": "12.9-90"}
    kernels = [kernel(tool, 1), kernel(tool, 2, **of_another), kernel(tool, 3, **of_another, environment="[1]")]
    tool.write(kernels, tmp_path, "kernels", 1)
    (said,) = unpacked(tool, tmp_path, tmp_path / "cache")
    assert said == (
        "kernels-00.xz: 1 placed, 1 left out of another ptxas or architecture, "
        "1 left out of another environment and another ptxas or architecture"
    )
    (folder,) = (tmp_path / "cache").iterdir()
    assert (folder / "k.cubin").read_bytes() == kernels[0].files["k.cubin"]


def test_what_a_run_added_is_packed_without_what_was_there_before(tool, tmp_path):
    tool.write([kernel(tool, 1)], tmp_path / "built", "kernels", 1)
    cache, again = tmp_path / "cache", tmp_path / "again"
    unpacked(tool, tmp_path / "built", cache)
    new = {"KERNEL": ["n.cubin", "n.json", "n.ptx"], "LAUNCHER": ["launch.so"], "RESULT": ["n.autotune.json"]}
    for folder, names in new.items():
        (cache / folder).mkdir()
        for name in names:
            (cache / folder / name).write_text("{}")
    tool.write(tool.added(cache, HERE), tmp_path / "left", "tuned", 1)
    assert unpacked(tool, tmp_path / "left", again) == ["tuned-00.xz: 3 placed"]
    assert {folder.name: sorted(path.name for path in folder.iterdir()) for folder in again.iterdir()} == {
        "KERNEL": ["__grp__n.json", "n.cubin", "n.json"], "LAUNCHER": ["launch.so"], "RESULT": ["n.autotune.json"]
    }  # fmt: skip
    assert {entry.folder for entry in tool.added(again, HERE)} == set(new)
    (path,) = (tmp_path / "left").iterdir()
    assert tool.unpack(path, again, {**HERE, "GPU": "H200"}) == "tuned-00.xz: 2 placed, 1 left out of another GPU"
