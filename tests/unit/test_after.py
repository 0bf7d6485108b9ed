"""What waits for imports: it outlives questions, imports that fail, reloads and threads, and leaves nothing behind."""

import copy
import importlib
import logging
import pickle
import sys
import textwrap
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from rwkv_jit.kernels import on_import

NAME = "waited_for"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The file of a module that nobody has imported."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)


@pytest.fixture
def called(source):
    """What is called with the names of modules that were executed, until the end of the test."""
    names = []
    yield names
    on_import.forget(names.extend)


def test_a_question_is_no_import(source, called):
    source.write_text("x = 1")
    finders, before = sys.meta_path, list(sys.meta_path)
    on_import.imported([NAME], called.extend)
    for _ in range(2):
        spec = importlib.util.find_spec(NAME)
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        assert spec.loader.get_filename(NAME) == str(source)
    assert called == []
    module = importlib.import_module(NAME)
    assert called == [NAME]
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert sys.meta_path is finders
    assert sys.meta_path == before  # one finder, which `import rwkv_jit` has put there


@pytest.mark.parametrize("kind", ["source", "zip"])
def test_specs_of_who_is_waited_for_are_as_others(kind, source, called, tmp_path, monkeypatch):
    """They equal each other and the module's own, and can be copied and pickled; and what is loaded by one is told."""
    if kind == "source":
        source.touch()
    else:
        with zipfile.ZipFile(tmp_path / "modules.zip", "w") as file:
            file.writestr(f"{NAME}.py", "")
        monkeypatch.syspath_prepend(str(tmp_path / "modules.zip"))
    on_import.imported([NAME], called.extend)
    spec, again, other = (importlib.util.find_spec(name) for name in (NAME, NAME, "wave"))
    assert spec.loader is not again.loader
    assert spec == again
    assert hash(spec.loader) == hash(again.loader)
    assert spec.loader != other.loader
    module = importlib.import_module(NAME)
    assert spec == module.__spec__
    assert module.__spec__ == spec
    for loaded in (copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))):
        if kind == "source":  # a zipimporter equals no copy
            assert loaded(spec) == spec
        made = loaded(again)
        made.loader.exec_module(importlib.util.module_from_spec(made))
    assert called == [NAME] * 3


def test_each_import_that_ends_well_is_told(source, called):
    on_import.imported([NAME], called.extend)
    on_import.imported([NAME], called.extend)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    source.write_text("raise OSError")
    importlib.invalidate_caches()
    with pytest.raises(OSError):  # noqa: PT011 - of the module
        importlib.import_module(NAME)
    assert called == []
    source.write_text("fine = True")
    module = importlib.import_module(NAME)
    importlib.reload(module)
    del sys.modules[NAME]
    assert importlib.import_module(NAME) is not module
    assert called == [NAME] * 3
    on_import.forget(called.extend)
    importlib.reload(sys.modules[NAME])
    assert called == [NAME] * 3


def test_what_is_there_is_told_at_once_and_what_is_barred_is_not(source, called):
    source.touch()
    importlib.import_module(NAME)
    on_import.imported([NAME, "json"], called.extend)
    assert called == [NAME, "json"]
    sys.modules[NAME] = None
    on_import.imported([NAME], called.extend)
    assert called == [NAME, "json"]


def test_loaders_that_modules_share_are_left_as_they_are(tmp_path, called, monkeypatch):
    path = str(tmp_path / "modules.zip")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{NAME}.py", "")
        file.writestr("beside.py", "")
    monkeypatch.syspath_prepend(path)
    on_import.imported([NAME], called.extend)
    shared = importlib.util.find_spec("beside").loader
    importlib.import_module(NAME)
    assert called == [NAME]
    assert vars(shared).keys().isdisjoint({"exec_module", "create_module"})
    assert sys.modules[NAME].__loader__ is importlib.util.find_spec("beside").loader


def test_a_finder_that_asks_all_others_does_not_double_what_is_told(source, called, monkeypatch):
    """As those of wrapt and of tools like it."""

    class Asking:
        busy = False

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if cls.busy:
                return None
            cls.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                cls.busy = False

    source.touch()
    on_import.imported([NAME], called.extend)
    monkeypatch.setattr(sys, "meta_path", [Asking, *sys.meta_path])
    importlib.import_module(NAME)
    assert called == [NAME]
    del sys.modules[NAME]
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[1], Asking, *sys.meta_path[2:]])
    importlib.import_module(NAME)
    assert called == [NAME] * 2


def test_who_raises_breaks_no_import(source, called, caplog):
    def fail(names):
        raise RuntimeError("a fault of ours")

    source.touch()
    on_import.imported([NAME], fail)
    on_import.imported([NAME], called.extend)
    try:
        with caplog.at_level(logging.WARNING):
            importlib.import_module(NAME)
    finally:
        on_import.forget(fail)
    assert called == [NAME]
    assert "waited_for" in caplog.text
    assert "a fault of ours" in caplog.text


def test_a_module_that_is_half_imported_is_told_when_the_next_import_ends(source, called):
    """Its import began before somebody came to wait, and goes on in the very thread."""
    source.write_text(
        f"import builtins; from rwkv_jit.kernels import on_import as after; after.imported(['{NAME}'], builtins.add)"
    )
    sys.meta_path.remove(on_import._FINDER)
    import builtins

    builtins.add = called.extend
    try:
        importlib.import_module(NAME)
        assert called == []
        (source.parent / "another.py").touch()
        importlib.import_module("another")
        assert called == [NAME]
        importlib.reload(sys.modules["another"])
        assert called == [NAME]
    finally:
        del builtins.add
        sys.modules.pop("another", None)
        assert sys.meta_path.count(on_import._FINDER) == 1


def test_an_import_of_another_thread_is_waited_for(source, called):
    import builtins

    builtins.begun, builtins.goes_on = threading.Event(), threading.Event()
    source.write_text("import builtins; builtins.begun.set(); assert builtins.goes_on.wait(60); x = 1")
    sys.meta_path.remove(on_import._FINDER)
    try:
        thread = threading.Thread(target=importlib.import_module, args=(NAME,))
        thread.start()
        assert builtins.begun.wait(60)
        seen = []
        waiting = threading.Thread(
            target=on_import.imported, args=([NAME], lambda names: seen.extend(sys.modules[name].x for name in names))
        )
        waiting.start()
        assert seen == []
        builtins.goes_on.set()
        waiting.join()
        thread.join()
        assert seen == [1]
    finally:
        del builtins.begun, builtins.goes_on
        on_import._waiting.pop(NAME)


def test_threads(source, called):
    source.write_text("import time; time.sleep(0.05)")
    start = threading.Barrier(16)

    def work(number):
        start.wait()
        for _ in range(20):
            assert importlib.util.find_spec("json")
            on_import.imported([NAME], called.extend)
            importlib.import_module(NAME)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert set(called) == {NAME}
    assert sys.meta_path.count(on_import._FINDER) == 1


# ---- who waits ---------------------------------------------------------------------------------------------------


def test_torch_learns_of_the_ops_and_its_counter_of_their_formulas(child):
    child("""
import importlib, sys, rwkv_jit
from importlib.util import find_spec
finders, before = sys.meta_path, list(sys.meta_path)
assert find_spec("torch") and find_spec("torch")
import torch
assert torch.ops.rwkv_jit.wkv7_fwd and torch.ops.rwkv_jit.update_states and torch.ops.rwkv_jit.gated_fwd
assert find_spec("torch.utils.flop_counter")
from torch.utils import flop_counter as first
def knows_all(counter):
    ops = ("wkv7_bwd", "varlen_states", "linear_cross_entropy_fwd")
    return all(getattr(torch.ops.rwkv_jit, op) in counter.flop_registry for op in ops)
assert knows_all(first) and knows_all(importlib.reload(first))
del sys.modules[first.__name__]
again = importlib.import_module(first.__name__)
assert again is not first and knows_all(again)
assert sys.meta_path is finders and sys.meta_path == before
""")


STAND_INS = {
    "torch.utils.cpp_extension": ("", "module.load.__module__ == 'rwkv_jit.compat.loading'"),
    "deepspeed.ops.op_builder.builder": ("class OpBuilder: _loaded_ops = {}", "module.OpBuilder._loaded_ops"),
    "transformers.models.rwkv.modeling_rwkv": (
        "rwkv_cuda_kernel = load_wkv_cuda_kernel = None", "module.rwkv_cuda_kernel is not None",
    ),
    "transformers.models.lfm2.modeling_lfm2": (
        "def causal_conv1d_fn(hidden_states, weight, bias, activation=None): ...",
        "module.causal_conv1d_fn.__code__.co_filename.endswith('falling_back.py')",
    ),
    "fla.ops.gla.chunk": (
        "def chunk_gla(q, k, v, g): ...", "module.chunk_gla.__code__.co_filename.endswith('falling_back.py')",
    ),
}  # fmt: skip
EVENTS = """
import importlib, sys, builtins
from importlib.util import find_spec
import torch, rwkv_jit

name, ours = sys.argv[1:3]
owner = rwkv_jit.compat.fla if name.startswith("fla") else rwkv_jit.compat
finders, before = sys.meta_path, list(sys.meta_path)

def is_ours():
    module = sys.modules[name]
    return bool(eval(ours))

for half in (None, type(sys)("half")):
    sys.modules[name] = half
    owner.install() if half is None else None
    del sys.modules[name]
owner.install()
assert find_spec(name) and find_spec(name)
builtins.fails = not name.startswith("torch")
try:
    importlib.import_module(name)
except OSError:
    assert builtins.fails
builtins.fails = False
importlib.import_module(name)
assert is_ours()
importlib.reload(sys.modules[name])
assert is_ours()
owner.install()
first = sys.modules.pop(name)
importlib.import_module(name)
assert sys.modules[name] is not first and is_ours()
owner.uninstall()
assert not is_ours()
importlib.reload(sys.modules[name])
assert not is_ours()
sys.modules[name] = first
assert not is_ours()
assert sys.meta_path is finders and sys.meta_path == before
owner.install()
assert is_ours()
"""


@pytest.mark.parametrize("name", STAND_INS)
def test_what_is_installed_stays_until_it_is_uninstalled(name, child, tmp_path):
    source, ours = STAND_INS[name]
    if source:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
        path.write_text(f"import builtins\nif builtins.fails: raise OSError\n{source}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(EVENTS)}"
    child(code, name, ours, after="torch")
