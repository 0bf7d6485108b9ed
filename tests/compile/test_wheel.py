"""The wheel: what is in it, and that a kernel compiles from it, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import rwkv_jit

COMPILE = """
import pathlib, sys, torch
import rwkv_jit
from rwkv_jit.kernels import template
home = pathlib.Path(sys.argv[1]).resolve()
assert pathlib.Path(rwkv_jit.__file__).resolve().is_relative_to(home), rwkv_jit.__file__
assert template.directory().is_relative_to(home), template.directory()
kernel = rwkv_jit.specialize("wkv7", head_size=40, dtype=torch.bfloat16, arch="sm_90")
assert kernel.origin == "compiled" and kernel.cubin[:4] == b"\\x7fELF" and b"wkv7_forward" in kernel.cubin
x = torch.ones(1, 2, 1, 4)
print(rwkv_jit.wkv7(x, x, x, x, x, x)[0].shape)
"""


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", "-w", target, Path(__file__).resolve().parents[2])  # fmt: skip
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_the_package_the_templates_and_nothing_else(wheel, root):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        contents = {name: archive.read(name) for name in names}
    folder = root / "kernel_templates"
    templates = {
        f"rwkv_jit/kernel_templates/{path.relative_to(folder).as_posix()}": path
        for path in folder.rglob("*")
        if path.is_file()
    }
    modules = {
        path.name if path.suffix == ".pth" else str(path.relative_to(root)): path
        for path in (root / "rwkv_jit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = [name for name in names if ".dist-info/" in name]
    assert sorted(set(names) - set(info)) == sorted([*templates, *modules])
    for name, path in {**templates, **modules}.items():
        assert contents[name] == path.read_bytes(), name
    assert "rwkv_jit/py.typed" in names
    assert "rwkv_jit/kernel_templates/shared/types.cuh" in names
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_wheel_is_pure_and_says_what_it_needs(wheel, root):
    assert wheel.name == f"rwkv_jit-{rwkv_jit.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(path))
    needed = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(need.split(">")[0].split(";")[0] for need in needed) == [
        "filelock", "numpy", "platformdirs", "rich", "torch",
    ]  # fmt: skip
    assert {"cuda12", "cuda13", "test"} <= set(metadata.get_all("Provides-Extra"))


@pytest.fixture
def venv(tmp_path):
    """Its interpreter, its folder and its packages: those of the running environment, but for this one.

    NVRTC is a link, as CuPy looks for it in the environment's own folder and not along sys.path. Other packages stay
    where they are: by another path Python would compile torch's modules again.
    """
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = next(
        path for path in (home / ("Scripts" if os.name == "nt" else "bin")).iterdir() if path.stem == "python"
    )
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    for path in (path for folder in folders for path in Path(folder).glob("nvidia*")):
        if not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    (packages / "others.pth").write_text("\n".join(folders), encoding="utf-8")
    return python, home, packages


def compile_in(python, expected, cwd, **variables):
    """Compile with the rwkv_jit that must lie in `expected`."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    output = run(python, "-c", COMPILE, expected, cwd=cwd, env={**clean, **variables})
    assert output == "torch.Size([1, 2, 1, 4])\n"


def test_kernel_compiles_from_the_installed_wheel(wheel, venv, tmp_path, fresh_service):
    python, home, _ = venv
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-index", "--ignore-installed", wheel)  # fmt: skip
    compile_in(python, home, tmp_path)
    for value, is_installed in (("1", True), ("0", False)):  # with no line in the program
        for variable, module in (("RWKVJIT_FLA", "compat.fla"), ("RWKVJIT_COMPAT", "compat")):
            said = f"import rwkv_jit.{module} as ours, sys; print(ours.is_installed, 'torch' in sys.modules)"
            environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | {variable: value}
            assert run(python, "-c", said, cwd=tmp_path, env=environment) == f"{is_installed} False\n"
    assert len(list(fresh_service.glob("sm_90/wkv7_chunked_forward-*.cubin"))) == 1


def test_kernel_compiles_from_an_editable_install(venv, root, tmp_path):
    """An editable install is a line in a .pth file."""
    python, _, packages = venv
    (packages / "_rwkv_jit.pth").write_text(str(root), encoding="utf-8")
    compile_in(python, root, tmp_path)
