"""Kernel templates: read one, and write typed parameters above its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rwkv_jit.kernels.errors import UnsupportedConfigError, brief, short

Parameter = int | bool | float | str
STORAGE_TYPES = ("fp16", "bf16", "fp32")
_LARGEST_FLOAT = 3.4028234663852886e38
_WORD = re.compile(r"\w+")
_NOT_IN_A_NAME = re.compile(r"[^\w .+-]")
# An include as nearly all are, or what may be another one. Not anchored to a line: that would be ten times slower.
_INCLUDE = re.compile(r'#[^\S\n]*(?:include[^\S\n]*"([^"\n]+)"|/\*|import|embed|\w*\\\n)')

# What few files need, or only those that are compiled, is compiled then.
_CONSTANT = r"\bconstexpr \w+ (\w+) ="
_DEFINED = r"#\s*define\s+(\w+)"
# Declared: `float x[4]`, `int row = 0`, `const float* __restrict__ y,`, `float *z)`; not `return SIZE;` or `2 * SIZE;`.
_DECLARED = (
    r"\b(?!(?:return|case|else|goto|throw|new|delete|sizeof|and|or|not)\b)"
    r"(?:[A-Za-z_]\w*[*&]*\s|(?:auto|bool|char|double|float|int|void)\s+[*&]+)\s*([a-z]\w*)\s*(?:[=;,)[({]|:(?!:))"
)
_READS_A_FILE = r"(?m)^[^\S\n]*(?:#|%:|\?\?=)[^\S\n]*(include\w*|import|embed)\b(.*)|\b__has_(?:include|embed)\w*"
# What is no code, or ends a line: a raw string, another one, a character, both kinds of comments.
_TOKEN = (
    r"""R"([^\s()\\]*)\([\s\S]*?\)\1"|"(?:\\[\s\S]|[^"\\\n])*"|'(?:\\.|[^'\\\n]){1,10}'"""
    r"""|//(?:\\\n|[^\n])*|/\*[\s\S]*?(?:\*/|\Z)|\\\n|\n"""
)


class Argument(NamedTuple):
    """An argument of a kernel, as its template declares it."""

    name: str
    type: str  # without const and __restrict__; a pointer's ends in *
    is_read_alone: bool = False  # a pointer through which nothing is written


@dataclass(frozen=True)
class Rendered:
    """A template with its parameters: everything the compiler reads."""

    name: str
    source: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Template:
    """The text of a kernel file, and name and text of every header it includes, itself or through others."""

    name: str
    body: str
    headers: tuple[tuple[str, str], ...]

    def render(self, parameters: Mapping[str, Parameter]) -> Rendered:
        """Write `parameters` as typed constants above the text; raises ValueError or TypeError for what can be none."""
        lines = [_line(parameter, parameters[parameter]) for parameter in sorted(parameters)]
        head = "\n".join(['#include "types.cuh"', *lines, f'#line 1 "{self.name}.cu"'])
        return Rendered(self.name, f"{head}\n{self.body}", self.headers)

    def arguments(self, entry: str) -> tuple[Argument, ...] | None:
        """Return the arguments of a kernel in their order; None where the text does not show them plainly."""
        return _arguments(self.body, entry)

    def check(self, parameters: Mapping[str, Parameter]) -> None:
        """Check that the template has all these parameters: words it uses and does not define; ValueError names one."""
        text = "\n".join([self.body, *(text for _, text in self.headers)])
        code = _code(text, with_strings=False)
        own = (name for pattern in (_CONSTANT, _DEFINED, _DECLARED) for name in re.findall(pattern, code))
        known = set(_WORD.findall(text)) - set(own)
        for parameter in parameters:
            if parameter not in known:
                raise ValueError(f"template {self.name} has no parameter {short(parameter)}")


@cache
def _arguments(text: str, entry: str) -> tuple[Argument, ...] | None:
    kernel = re.search(rf"\b__global__\b[^;{{}}]*?\b{re.escape(entry)}\s*\(([^(){{}}]*)\)\s*\{{", _code(text))
    return None if kernel is None else tuple(_argument(x) for x in kernel[1].split(",") if x.strip())


_NO_TYPES = "const", "__restrict__", "__grid_constant__"  # words of an argument that are no part of its type


def _argument(declared: str) -> Argument:
    """Return `const T_IO* __restrict__ r` as r of type T_IO*."""
    *words, name = re.findall(r"[\w:]+|\*", declared)
    is_read_alone = "*" in words and "const" in words[: words.index("*")]
    return Argument(name, "".join(word for word in words if word not in _NO_TYPES), is_read_alone)


def directory() -> Path:
    """Return the folder of the library's templates: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "kernel_templates"
    return inside if inside.is_dir() else package.parent / "kernel_templates"


def _own_files() -> dict[str, Path]:
    return {path.name: path for path in directory().rglob("*.cu*")}


def path_of(file: str) -> Path:
    """Return where a file of the library lies; in no folder of it where there is no such file."""
    return _own_files().get(file, directory() / file)


def names() -> list[str]:
    """Return the names of the library's templates."""
    return sorted(path.stem for path in directory().rglob("*.cu"))


@cache
def library(name: str) -> Template:
    """Return one of the library's templates. Raises UnsupportedConfigError where there is no such template."""
    path = path_of(f"{name}.cu")
    if not path.is_file():
        raise UnsupportedConfigError(f"no kernel template {brief(name)}; there are: {', '.join(names())}")
    return read(path)


def read(path: Path) -> Template:
    """Read any template; its headers lie beside it or are those of the library.

    NVRTC compiles these sources, and the key in the cache covers them. A file that it opened by itself would not be,
    and a change would go unnoticed: every include is found here or refused. Raise OSError if a file cannot be read,
    ValueError if a header's name is none, it is not UTF-8, or it may read a file that is not named there.
    """
    body, own = path.read_text(encoding="utf-8"), _own_files()
    texts: dict[str, str] = {}
    wanted = [("types.cuh", path.name), *_includes(body, path.name)]
    while wanted:
        header, includer = wanted.pop()
        if header not in texts:
            texts[header] = _header(header, includer, path, own)
            wanted += _includes(texts[header], header)
    # The name stands in a `#line`, in file names and in messages.
    return Template(_NOT_IN_A_NAME.sub("_", path.stem), body, tuple(sorted(texts.items())))


def _header(name: str, includer: str, path: Path, own: Mapping[str, Path]) -> str:
    what = f'"{short(name)}", which {includer} includes,'
    beside = path.parent / name
    try:
        file = beside if beside.is_file() else own.get(name, directory() / name)
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        where = f"neither beside {path} nor among the headers of the library"
        raise FileNotFoundError(f"{what} is {where}") from None
    except OSError as error:
        raise type(error)(f"{what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not text in UTF-8 ({error})") from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{brief(name)}, which {includer} includes, cannot be read: {error}") from None


def _includes(text: str, name: str) -> list[tuple[str, str]]:
    """Return the headers that a source includes in quotes, with its name; ValueError for any other file."""
    plain = []
    is_plain = not ("\\" in text and "%:" in text)  # which is another # and may stand before a word on two lines
    for match in _INCLUDE.finditer(text):
        if match[1] and not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            plain.append((match[1], name))
        else:
            is_plain = False
    if is_plain and text.count("include") == len(plain):
        return plain
    return list(_includes_of_code(_code(text), name))  # takes longer, and is needed by few files


def _includes_of_code(code: str, name: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(_READS_A_FILE, code):
        what = (match[2] or "").strip()
        if match[1] == "include" and what.startswith('"') and '"' in what[1:]:
            yield what[1:].split('"')[0], name
        # Between angle brackets NVRTC finds what it was given, and nothing on the disk but by an absolute name.
        elif match[1] != "include" or not re.match(r"<\s*[^\s/\\:>][^:>]*>", what):
            line = code.count("\n", 0, match.start()) + 1
            raise ValueError(
                f"{name}, line {line}: {brief(match[0].strip())} may read a file that the cache cannot see; include "
                'headers as #include "NAME", with the name itself in quotes'
            )


def _code(text: str, with_strings: bool = True) -> str:
    """Return a text without comments, continued lines joined; each line begins at the number it had."""
    owed = 0  # line ends that were taken out of the line so far

    def kept(match: re.Match[str]) -> str:
        nonlocal owed
        token = match[0]
        if token == "\n":
            ends, owed = 1 + owed, 0
            return "\n" * ends
        if with_strings and token[0] in "\"'":
            return token.replace("\\\n", "")
        owed += token.count("\n")
        return "" if token == "\\\n" else " "

    return re.sub(_TOKEN, kept, text)


def code(text: str) -> str:
    """Return a text without comments and without space where there may be more or less of it."""
    return "\n".join(line for line in (" ".join(line.split()) for line in _code(text).splitlines()) if line)


def _line(name: str, value: Parameter) -> str:
    """`using T_IO = bf16;`, `constexpr int HEAD_SIZE = 48;` or `constexpr auto DECAY = Decay::raw;`."""
    if name.startswith("T_"):
        if value not in (*STORAGE_TYPES, "void"):  # which is the type of what is not there
            raise ValueError(f"parameter {name}: expected one of {', '.join(STORAGE_TYPES)}, got {brief(value)}")
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"parameter {name}: expected a 32-bit integer, got {brief(value)}")
        return f"constexpr int {name} = {int(value)};"
    if isinstance(value, float):
        if not abs(value) <= _LARGEST_FLOAT:
            raise ValueError(f"parameter {name}: expected a finite 32-bit float, got {value}")
        return f"constexpr float {name} = {float(value)!r}f;"
    if not isinstance(value, str) or not value.isidentifier():
        raise TypeError(f"parameter {name}: expected an int, a float, a bool or an identifier, got {brief(value)}")
    return f"constexpr auto {name} = {name.title().replace('_', '')}::{value};"
