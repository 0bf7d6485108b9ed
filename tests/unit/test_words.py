"""Words that users need not know: they stand neither in pages, nor in help texts, messages and public docstrings."""

import argparse
import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from bench import __main__ as bench_program
from rwkv_jit.desk import cli

ROOT = Path(__file__).resolve().parents[2]
# A word or a phrase, and what to write instead.
WORDS = {
    r"multiprocessors?": "SM",
    r"shall": "may, must, or the present tense",
    r"(?:go|goes|going|went|gone) by": "depends on, uses",
    r"of (?:its|their|your|our|his) own": "your own ..., a separate ...",
    r"elsewhere": "say where",
    r"what (?:is|was|were|are) (?:given|asked|made|wanted)": "name it: the argument, the result",
    r"(?:is|are|was|were|been|be|that) asked for": "requested, needed",
    r"texts": "sequences",
    r"(?:packed|each|long|longer|another|running|one|several|whole|some) text": "sequence",
    r"(?<!`)drafts?": "speculative tokens",
    r"made of": "built on, consists of",
    r"(?<!your )own kernels?": "dedicated kernels",
    r"by halves": "split in two",
    r"(?:its|their) like": "name them, or: the other ...",
    r"mend(?:s|ed|ing)?": "fix",
    r"percents": "percent",
    r"held against": "compared with",
    r"go(?:es)? the way": "takes",
    r"(?:the|this|that) way (?:there|back|from|to|that)": "say what happens",
    r"rooms?": "memory, space; module",
    r"bears?": "say what fails",
    r"in its place": "instead",
    r"in its way": "and why",
    r"as ever": "say who does it",
    r"the (?:model|library|kernel|op)'s own": "that of the model, ...",
}
_ANY = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.IGNORECASE)


def found(text):
    """House words of a text, without what stands in its code."""
    text = re.sub(r"`[^`]*`|{[^}]*}", "`", " ".join(text.split()))
    return [match[0] for match in _ANY.finditer(text)]


def prose(page):
    """A page without code, targets of links, and the tables that the bench fills."""
    text = page.read_text(encoding="utf-8")
    for pattern in (r"<!-- bench:.*?<!-- /bench -->", r"^```.*?^```$"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_pages(page):
    assert found(prose(page)) == []


def parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


@pytest.mark.parametrize("program", [cli, bench_program], ids=["rwkv-jit", "bench"])
def test_help(program):
    texts = [parser.format_help() for parser in parsers(program._parser())]
    assert len(texts) > 5
    assert [word for text in texts for word in found(text)] == []


def messages(path):
    """Strings of a module that are no docstrings and have two words: most of them are said to users."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and " " in node.value.strip():
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", ["rwkv_jit", "bench", "examples"])
def test_messages(folder):
    assert [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in messages(path)
        for word in found(text)
    ] == []


def public():
    """What docs/api/ lists, and the public methods and properties of its classes."""
    for page in sorted((ROOT / "docs" / "api").iterdir()):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            value = getattr(importlib.import_module(module), attribute)
            yield name, value
            for of_class, member in inspect.getmembers(value) if inspect.isclass(value) else []:
                has_code = getattr(member, "fget", getattr(member, "__func__", member))
                if not of_class.startswith("_") and (getattr(has_code, "__module__", "") or "").startswith("rwkv_jit"):
                    yield f"{name}.{of_class}", member


def test_public_docstrings():
    names = dict(public())
    assert len(names) > 150
    # Neither examples nor names and shapes of parameters, as in "drafts : int".
    of_code = re.compile(r"^ *(?:>>>|\.\.\.).*$|^[\w, ]+ : .*$", re.MULTILINE)
    said = {name: found(of_code.sub("", inspect.getdoc(value) or "")) for name, value in names.items()}
    assert {name: words for name, words in said.items() if words} == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A pool that shall not change.", ["shall"]),
        ("It goes by the\nvalue.", ["goes by"]),
        ("Kernels of their own, and your own kernels.", ["of their own"]),
        ("The argument `drafts` of a text file.", []),
    ],
)
def test_words_are_found(text, words):
    assert found(text) == words
