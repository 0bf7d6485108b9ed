"""The public names, their signatures, defaults and texts are what tests/api.txt says: each change of it is looked at.

``pytest -n 0 tests/unit/test_api.py --record-api`` writes it anew.
"""

import enum
import importlib
import inspect
from hashlib import sha256
from pathlib import Path

RECORD = Path(__file__).parents[1] / "api.txt"
PACKAGES = ("rwkv_jit", "rwkv_jit.nn", "rwkv_jit.parallel", "rwkv_jit.compat")


def lines():
    """Yield a line for each name, with the digest of its docstring."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield from of(f"{package}.{name}", getattr(module, name))


def of(path, public):
    text = inspect.getdoc(public) or ""
    digest = sha256(text.encode()).hexdigest()[:8]
    if inspect.isclass(public):
        is_plain = issubclass(public, (tuple, dict, Exception, enum.Enum))
        yield f"{path}{'' if is_plain else inspect.signature(public)} {digest}"
        fields = getattr(public, "__annotations__", {}) if is_plain else {}
        yield from (f"{path}.{field}: {getattr(kind, '__forward_arg__', kind)}" for field, kind in fields.items())
        for name in sorted(vars(public)):
            member = inspect.getattr_static(public, name)
            if name.startswith("_") or name in fields:
                continue
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if inspect.isfunction(member):
                yield from of(f"{path}.{name}", member)
            elif isinstance(member, property):
                yield from of(f"{path}.{name}", member.fget)
    elif callable(public):
        yield f"{path}{inspect.signature(public)} {digest}"
    else:
        yield f"{path} {type(public).__name__} {digest}"


def test_public_names_are_those_that_were_recorded(pytestconfig):
    text = "\n".join(lines()) + "\n"
    if pytestconfig.getoption("--record-api"):
        RECORD.write_text(text, encoding="utf-8")
    assert text == RECORD.read_text(encoding="utf-8")
