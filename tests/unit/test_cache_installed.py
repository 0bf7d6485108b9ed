"""Bundles that pip installed: how they are found, when they are trusted, and that looking for them costs nothing."""

import json
import os
import stat
from importlib import metadata
from pathlib import Path

import pytest

import rwkv_jit
from rwkv_jit.ahead import kernel_wheels
from rwkv_jit.desk import doctor, versions
from rwkv_jit.kernels import cache, env, stats
from rwkv_jit.kernels.cache import bundle, installed

NAME = "rwkv-jit-kernels-sm-90a"


@pytest.fixture
def install(tmp_path, monkeypatch, _fresh_service):
    """Puts a distribution of entries on the path, as pip would; returns the path of its bundle."""
    monkeypatch.setattr(installed, "_left_aside", False)
    site = tmp_path / "site"
    site.mkdir(mode=0o755)
    monkeypatch.syspath_prepend(str(site))

    def install(data, name=NAME, version="1.2.3", points="sm_90a = {package}"):
        package = name.replace("-", "_")
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[rwkv_jit.kernels]\n{points.format(package=package)}\n")
        (site / package).mkdir(mode=0o755)
        path = site / package / "kernels.bundle"
        path.write_bytes(data)
        path.chmod(0o644)
        cache.forget()
        return path

    return install


@pytest.fixture
def made_up(make_entry):
    """Bytes of a bundle of one entry, and the entry's digest."""
    name, data, _, digest = make_entry(arch="sm_90a")
    return bundle.pack({name: data}), digest


def test_installed_bundle_serves_after_all_others(install, made_up, make_entry, tmp_path, monkeypatch):
    path = install(made_up[0])
    bundle.write(tmp_path / "more.bundle", [make_entry(2)[:2]])
    monkeypatch.setenv("RWKVJIT_CACHE_PATH", str(tmp_path / "more.bundle"))
    assert [layer.path for layer in cache.layers()] == [env.cache_dir(), tmp_path / "more.bundle", path]
    compiled, origin = cache.get("made_up", "sm_90a", made_up[1])
    assert (compiled.target, origin) == ("sm_90a", "bundle")
    assert list(cache.compilers()) == ["12.9 0123abcd"]
    (stored,) = [each for each in cache.stored() if each.layer.path == path]
    assert (stored.manifest["name"], stored.fault) == ("made_up", "")
    assert cache.clear() == 0
    assert path.exists()


def test_kernel_of_the_users_directory_costs_no_look_at_distributions(install, made_up, make_entry, monkeypatch):
    install(made_up[0])
    name, data, _, digest = make_entry(7)
    cache.put(name, data)
    monkeypatch.setattr(installed, "distributions", lambda: pytest.fail("looked for distributions"))
    assert cache.get("made_up", "sm_90", digest)[1] == "disk"


def test_distributions_are_looked_for_once(install, made_up, monkeypatch):
    install(made_up[0])
    looks, entry_points = [], metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **given: looks.append(given) or entry_points(**given))
    for digest in ("0" * 64, "1" * 64, made_up[1]):
        cache.get("made_up", "sm_90a", digest)
    assert looks == [{"group": "rwkv_jit.kernels"}]


def test_entry_point_that_is_no_folder_is_not_followed(install, made_up, tmp_path):
    (tmp_path / "kernels.bundle").write_bytes(made_up[0])
    for number, point in enumerate(("a = ..", "b = os:system", "c = os.path")):
        install(made_up[0], name=f"other{number}", points=point)
    assert installed.distributions() == []


def test_broken_metadata_of_anyone_is_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(installed, "_left_aside", False)

    def broken(**_):
        raise AttributeError("a distribution without a name")

    monkeypatch.setattr(metadata, "entry_points", broken)
    for _ in range(2):
        cache.forget()
        assert cache.get("made_up", "sm_90a", "0" * 64) is None
    assert caplog.messages == ["kernels that pip installed are not read: AttributeError: a distribution without a name"]


# ---- trust -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_code(monkeypatch):
    """Gives this library's own folder another mode, owner and group; its true ones stay."""
    stat_of = os.stat

    def set_to(mode=0o755, uid=None, gid=None):
        def seen(path, *arguments, **options):
            found = stat_of(path, *arguments, **options)
            if Path(path) != Path(installed.__file__).parent:
                return found
            fields = [*found[:10]]
            fields[0] = stat.S_IFDIR | mode
            fields[4] = found.st_uid if uid is None else uid
            fields[5] = found.st_gid if gid is None else gid
            return os.stat_result(fields)

        monkeypatch.setattr(installed.os, "stat", seen)

    return set_to


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has no such modes")
@pytest.mark.parametrize(
    ("mode", "of_code", "group", "read"),
    [(0o644, 0o755, None, True), (0o664, 0o755, None, False), (0o664, 0o775, None, True), (0o664, 0o775, 12345, False),
     (0o666, 0o775, None, False), (0o666, 0o777, None, True)],
)  # fmt: skip
def test_bundle_counts_as_far_as_the_librarys_own_code_does(
    mode, of_code, group, read, install, made_up, own_code, caplog
):
    """With a umask of 002 pip makes both writable for the user's group."""
    path = install(made_up[0])
    path.chmod(mode)
    own_code(of_code, gid=group)
    assert (cache.get("made_up", "sm_90a", made_up[1]) is not None) == read
    assert len(caplog.messages) == (0 if read else 1)
    assert read or f"kernels of {NAME} are not read: {path} cannot be read: {path} can be written" in caplog.text
    assert list(cache.unreadable()) == ([] if read else [path])


def test_bundle_of_another_user_counts_where_the_library_is_his_too(install, made_up, own_code, give_away):
    path = install(made_up[0])
    give_away(path)
    give_away(path.parent)
    assert cache.get("made_up", "sm_90a", made_up[1]) is None
    cache.forget()
    own_code(uid=54321)
    assert cache.get("made_up", "sm_90a", made_up[1]) is not None


def test_link_and_damage_are_one_warning_each(install, made_up, tmp_path, caplog):
    path = install(made_up[0])
    path.rename(tmp_path / "elsewhere.bundle")
    path.symlink_to(tmp_path / "elsewhere.bundle")
    for _ in range(2):
        assert cache.get("made_up", "sm_90a", made_up[1]) is None
    path.unlink()
    path.write_bytes(made_up[0][:-7])
    cache.forget()
    stats._said.clear()
    assert cache.get("made_up", "sm_90a", made_up[1]) is None
    assert ["symbolic link" in caplog.messages[0], "not an intact" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


# ---- what the commands say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["made_up", "wkv7_recurrent_forward"])
def test_wheel_for_other_sources_is_named(name, install, make_entry, run, monkeypatch):
    """Its templates are not there any more, or have another text."""
    file, data, _, _ = make_entry(name=name, arch="sm_90a")
    install(bundle.pack({file: data}))
    (wheel,) = kernel_wheels.listed()
    assert (wheel.name, wheel.version, wheel.kernels, wheel.usable, wheel.fault) == (NAME, "1.2.3", 1, 0, "")
    said = f"1.2.3, for other sources than those of this rwkv_jit {rwkv_jit.__version__}: not used"
    assert wheel.text == said
    monkeypatch.setattr(versions, "env_report", dict)
    code, printed, _ = run("info", "--json")
    assert code == 0
    assert json.loads(printed)["wheels of kernels"] == {NAME: said}
    (found,) = [each for each in doctor._layers() if "kernels" in each.text]
    mend = f"install the {NAME} of rwkv_jit {rwkv_jit.__version__}"
    assert found == ("kernel wheel", "warning", f"{NAME} {said}", mend)
    assert name in run("cache", "list", "--verbose")[1]


def test_wheel_that_is_damaged_is_named(install, made_up):
    path = install(made_up[0][:-7])
    (wheel,) = kernel_wheels.listed()
    assert (wheel.kernels, wheel.usable) == (0, 0)
    assert wheel.text.startswith(f"{path} is not an intact rwkv_jit bundle")
