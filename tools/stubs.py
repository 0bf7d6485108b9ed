"""Write the types of the packages whose names load when they are used: __init__.pyi beside each __init__.py.

    python tools/stubs.py

Most names are said to be those of their modules, whose sources have the types and the docstrings. A function with
`output_final_state` stands there itself, with an overload for each result. A unit test fails while a file is not what
this would write.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any, get_args

from rwkv_jit.schedules import legal

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rwkv_jit", "rwkv_jit.nn", "rwkv_jit.parallel", "rwkv_jit.compat")
HEAD = '''"""{doc}"""

# tools/stubs.py has written this.
# ruff: noqa
# fmt: off
'''
WIDTH = 120
# Where the names of annotations are from, but for those of `legal`, whose values stand there themselves.
SOURCES = {
    "Any": "typing", "CallOptions": "rwkv_jit.call.options", "DecayOptions": "rwkv_jit.call.options",
    "Literal": "typing",
    "Shard": "rwkv_jit.parallel.shard", "SupportsDLPack": "rwkv_jit.call.tensors", "Tensor": "torch",
    "Unpack": "typing_extensions", "inf": "math", "overload": "typing",
}  # fmt: skip
# What a package has itself.
OF_PACKAGE = {
    "rwkv_jit": "__version__: str\n",
    "rwkv_jit.compat": """\
MODELS: tuple[str, ...]
is_installed: bool

def install() -> None: ...
def put(owner: object, name: str, ours: object) -> None: ...
def uninstall() -> None: ...
""",
}
FLAG, PAIR = "output_final_state", "normalize"
TRUE, FALSE = "Literal[True]", "Literal[False]"


def path_of(package: str) -> Path:
    """Return where the types of a package stand."""
    return ROOT / package.replace(".", "/") / "__init__.pyi"


def text_of(package: str) -> str:
    """Return the types of a package."""
    module = importlib.import_module(package)
    doc = inspect.getdoc(module)
    assert doc is not None
    same, own = [], []
    for name in sorted(module.__all__):
        public = getattr(module, name)
        if name not in module._MODULES:
            continue
        if inspect.isfunction(public) and FLAG in inspect.signature(public).parameters:
            own.append(function(public))
        else:
            same.append(f"from {module._MODULES[name]} import {name} as {name}")
    rooms = [f"from {package} import {name} as {name}" for name in getattr(module, "_ROOMS", ())]
    body = "\n\n".join(own)
    used: dict[str, list[str]] = {}
    for name, source in SOURCES.items():
        if re.search(rf"\b{name}\b", body):
            used.setdefault(source, []).append(name)
    first = [f"from {source} import {', '.join(several)}" for source, several in sorted(used.items())]
    of_package = f"\n{OF_PACKAGE[package]}" if package in OF_PACKAGE else ""
    names = textwrap.wrap(", ".join(f'"{name}"' for name in sorted(module.__all__)), WIDTH - 4)
    listed = "\n".join(f"    {line}" for line in names)
    parts = [
        HEAD.format(doc=doc.splitlines()[0]), "\n".join(first), "\n".join([*rooms, *sorted(same)]),
        f"{of_package}\n__all__ = [\n{listed}\n]\n", body,
    ]  # fmt: skip
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def function(public: Any) -> str:
    """Return the overloads of a function, the first one with the first sentence of its docstring."""
    said = inspect.getdoc(public)
    assert said is not None
    texts = []
    for changed, result in overloads(inspect.signature(public).parameters):
        doc = f'\n    """{said.splitlines()[0]}"""\n' if not texts else " ...\n"
        texts.append(f"@overload\n{head(public, changed, result)}{doc}")
    return "".join(texts)


# What an overload has instead of a parameter: an annotation, and whether there is no default.
Changed = Mapping[str, tuple[str, bool]]


def overloads(parameters: Mapping[str, Parameter]) -> Iterator[tuple[Changed, str]]:
    """Yield what each overload changes, and its result.

    A state is wanted by position or by name: before it stand arguments with defaults, which are given then.
    """
    by_position = parameters[FLAG].kind is Parameter.POSITIONAL_OR_KEYWORD
    usual: Changed = {}
    if PAIR in parameters:
        state = annotation(parameters["initial_state"])
        pair = re.search(r"tuple\[.*\]", state)
        one = state.replace(f"{pair[0]} | ", "") if pair else state
        usual = {PAIR: (FALSE, False), "initial_state": (one, False)}
        normalized = {PAIR: (TRUE, True), "initial_state": (f"{pair[0]} | None" if pair else state, False)}
        yield {**normalized, FLAG: (FALSE, False)}, "tuple[Tensor, None]"
        yield {**normalized, FLAG: (TRUE, True)}, "tuple[Tensor, tuple[Tensor, Tensor]]"
    yield {**usual, FLAG: (FALSE, False)}, "tuple[Tensor, None]"
    if by_position:
        there = {name: (one, True) for name, (one, _) in usual.items() if name != PAIR}
        before = {name: (annotation(parameters[name]), True) for name in ahead_of(FLAG, parameters)}
        yield {**usual, **before, **there, FLAG: (TRUE, True)}, "tuple[Tensor, Tensor]"
    yield {**usual, FLAG: (TRUE, True)}, "tuple[Tensor, Tensor]"
    yield {}, "tuple[Tensor, Any]" if PAIR in parameters else "tuple[Tensor, Tensor | None]"


def ahead_of(name: str, parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the parameters with defaults before this one."""
    names = list(parameters)
    return [before for before in names[: names.index(name)] if parameters[before].default is not Parameter.empty]


def head(public: Any, changed: Changed, result: str) -> str:
    """Return the first lines of a function, up to its colon."""
    words, has_star, has_default = [], False, False
    for name, parameter in inspect.signature(public).parameters.items():
        kind, default = parameter.kind, parameter.default
        written, is_required = changed.get(name, (annotation(parameter), False))
        is_required = is_required or default is Parameter.empty
        # Without a default behind one with a default: by name alone.
        is_named = kind is Parameter.KEYWORD_ONLY or (
            kind is Parameter.POSITIONAL_OR_KEYWORD and has_default and is_required
        )
        if is_named and not has_star:
            words.append("*")
            has_star = True
        stars = "**" if kind is Parameter.VAR_KEYWORD else ""
        has_default = has_default or not is_required
        words.append(f"{stars}{name}: {written}" + ("" if is_required else f" = {default!r}"))
    line = f"def {public.__name__}({', '.join(words)}) -> {result}:"
    if len(line) <= WIDTH - 4:
        return line
    lines, current = [], "   "
    for word in words:
        if len(current) + len(word) + 2 > WIDTH:
            lines.append(current)
            current = "   "
        current += f" {word},"
    return "\n".join([f"def {public.__name__}(", *lines, current, f") -> {result}:"])


def annotation(parameter: Parameter) -> str:
    """Return the type of a parameter as a user reads it."""
    written = parameter.annotation if isinstance(parameter.annotation, str) else parameter.annotation.__name__
    written = re.sub(r"\bArray\b", "Tensor | SupportsDLPack", written)
    for name, value in vars(legal).items():
        if get_args(value):
            written = re.sub(rf"\b{name}\b(?!\[)", f"Literal[{', '.join(map(repr, get_args(value)))}]", written)
    return written


def main() -> None:
    """Write all of them."""
    for package in PACKAGES:
        path_of(package).write_text(text_of(package), encoding="utf-8")


if __name__ == "__main__":
    main()
