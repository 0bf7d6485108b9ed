"""A bundle's SHA-256: printed where one is written, and checked before anything of one is looked at."""

import json
import zipfile
from hashlib import sha256

import pytest

from rwkv_jit.kernels import cache, env
from rwkv_jit.kernels.cache import bundle


@pytest.fixture
def made(make_entry, tmp_path):
    """A bundle of one entry; returns its path and its SHA-256."""
    path = tmp_path / "kernels.bundle"
    bundle.write(path, [make_entry()[:2]])
    return path, sha256(path.read_bytes()).hexdigest()


def test_export_prints_what_import_checks(make_entry, run, tmp_path):
    name, data, _, _ = make_entry()
    cache.put(name, data)
    path = tmp_path / "made.bundle"
    code, printed, _ = run("cache", "export", path, "--digest")
    digest = sha256(path.read_bytes()).hexdigest()
    assert (code, printed.splitlines()[1:]) == (0, [f"SHA-256 {digest}"])
    assert json.loads(run("cache", "export", path, "--digest", "--json")[1])["sha256"] == digest
    assert "sha256" not in json.loads(run("cache", "export", path, "--json")[1])
    assert run("cache", "import", path, "--digest", digest.upper())[0] == 0
    assert len(list((env.cache_dir() / "bundles").glob("*.bundle"))) == 1


def test_bundle_of_another_digest_is_refused_unread(made, run, monkeypatch):
    path, digest = made
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("looked into it"))
    code, printed, said = run("cache", "import", path, "--digest", "0" * 64)
    wanted = f"{path} is another bundle: expected one of SHA-256 {'0' * 64}, it has {digest}"
    assert (code, printed, said) == (2, "", f"rwkv-jit cache import: {wanted}\n")
    assert not env.cache_dir().exists()


@pytest.mark.parametrize("given", ["", "12", "g" * 64, "0" * 63 + " "])
def test_what_is_no_digest_is_refused(given, made, run):
    code, _, said = run("cache", "import", made[0], "--digest", given)
    assert code == 2
    assert f"--digest: expected the 64 hexadecimal digits that --digest printed, got {given!r}" in said


def test_digest_is_of_one_bundle(made, run):
    path, digest = made
    assert run("cache", "import", path, path, "--digest", digest)[::2] == (
        2, "rwkv-jit cache import: --digest: is that of one bundle, got 2 files\n"
    )  # fmt: skip
