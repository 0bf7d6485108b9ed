"""How the commands print: tables, and the progress of a compile."""

from __future__ import annotations

import re
import shutil
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rwkv_jit.kernels.errors import printable

_STYLES = {"error": "red", "warning": "yellow", "ok": "green"}
_INDENT = _GAP = "  "
_PIECE = re.compile(r"\s*[^\s/]+/*|\s*/+")  # a word, or a part of a path: a line may end behind it

Column = Sequence[str]  # its name, which may be empty, and the cells


def table(head: Sequence[str], rows: Sequence[Sequence[object]], spare: Sequence[str] = ()) -> None:
    """Print a table: as wide as a terminal, else in whole lines that other programs can read.

    On a terminal, lines break between words and behind the slashes of a path. Of a table that is still too wide, what
    all rows have in common is said once; then it loses columns that can be spared, the first of `spare` first; then it
    becomes a list of records. `head` is empty for a table without names of columns. A column of numbers is set to the
    right.
    """
    texts = [[printable(" ".join(str(cell).splitlines())) for cell in row] for row in rows]
    if not head and not texts:
        return
    columns: list[Column] = list(zip(head or [""] * len(texts[0]), *texts, strict=True))
    if sys.stdout.isatty():
        _print_styled(_on_terminal(columns, spare, shutil.get_terminal_size().columns - len(_INDENT)))
        return
    for line in _lines(columns, [max(map(len, column)) for column in columns]):
        print(line)


def text(value: object) -> str:
    """Return what a cell shows of a value."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


class _Formatter(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, spec))


def records(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], spare: Sequence[str] = ()) -> None:
    """Print a table of records; a "-" stands for None.

    `columns` has the form of the cells, like "{compile_ms:.0f}", by the name of the column; `spare` is as in `table`.
    """
    form = _Formatter().vformat
    table(list(columns), [[form(cell, (), row) for cell in columns.values()] for row in rows], spare)


def say(text: str) -> None:
    """Print sentences, on a terminal in lines that it need not break."""
    for line in printable(text).split("\n"):
        # A command stands on a line of its own, with spaces before it, and stays whole.
        is_whole = line.startswith(" ") or not sys.stdout.isatty()
        print(line if is_whole else "\n".join(broken(line, shutil.get_terminal_size().columns)))


def broken(text: str, width: int) -> list[str]:
    """Break a text between words, and behind the slashes of a path; a longer word has a line of its own."""
    return _filled(_PIECE.findall(text), width)


def _filled(pieces: Iterable[str], width: int) -> list[str]:
    """Return lines of pieces; one that is longer than a line has a line of its own."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return lines


def _lines(columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table; a row takes several where a cell is wider than its column."""
    are_numbers = [len(cells) > 0 and all(map(_is_number, cells)) for _, *cells in columns]
    for row in zip(*columns, strict=True):
        if not any(row):
            continue  # columns without names
        cells = [broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for place in range(max(map(len, cells))):
            texts = [cell[place] if place < len(cell) else "" for cell in cells]
            set_out = (
                text.rjust(width) if is_number else text.ljust(width)
                for text, width, is_number in zip(texts, widths, are_numbers, strict=True)
            )
            yield (_INDENT + _GAP.join(set_out)).rstrip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


# ---- on a terminal -----------------------------------------------------------------------------------------------


def _on_terminal(columns: Sequence[Column], spare: Sequence[str], room: int) -> list[str]:
    """Return the lines of a table in the first form that has room."""
    notes: list[str] = []
    widths = _widths(columns, room)
    if widths is None:
        columns, notes = _narrowed(columns, spare, room)
        widths = _widths(columns, room)
    said = [_INDENT + line for note in notes for line in broken(note, room)]
    if widths is None:
        return said + [_INDENT + line for line in _records(columns, room)]
    lines = list(_lines(columns, widths))
    names = len(list(_lines([column[:1] for column in columns], widths)))
    rule = [_INDENT + _GAP.join("─" * width for width in widths)] if names else []
    return [*said, *lines[:names], *rule, *lines[names:]]


def _widths(columns: Sequence[Column], room: int) -> list[int] | None:
    """Return what each column gets of the room; None where that is too little for their longest words."""
    least = [max(len(piece.strip()) for cell in column for piece in _PIECE.findall(cell) or [""]) for column in columns]
    of_cells = [max(map(len, cells), default=0) for _, *cells in columns]
    widths = [max(map(len, column)) for column in columns]
    room -= len(_GAP) * (len(columns) - 1)
    if sum(least) > room:
        return None
    for limits in (list(map(max, least, of_cells)), least):  # names are broken before cells are
        while sum(widths) > room and widths != limits:
            _, widest = max((width, place) for place, width in enumerate(widths) if width > limits[place])
            widths[widest] -= 1
    return widths


def _narrowed(columns: Sequence[Column], spare: Sequence[str], room: int) -> tuple[Sequence[Column], list[str]]:
    """Return the columns whose cells differ, of them those that have room or else all, and what is to be said."""
    shared = [column for column in columns[1:] if column[0] and len(column) > 2 and len(set(column[1:])) == 1]
    notes = [f"In every row: {', '.join(f'{column[0]} {column[1]}' for column in shared)}."] if shared else []
    whole = [column for column in columns if column not in shared]
    left, gone = whole, list[str]()
    for name in spare:
        if _widths(left, room) is not None:
            break
        gone += [title for title, *_ in left if title == name]
        left = [column for column in left if column[0] != name]
    if _widths(left, room) is None:
        return whole, notes
    return left, [*notes, *([f"A wider terminal shows {', '.join(gone)} too."] if gone else [])]


def _records(columns: Sequence[Column], room: int) -> Iterator[str]:
    """Yield a paragraph for each row: its first cell, and below it the others with the names of their columns."""
    names, *rows = zip(*columns, strict=True)
    for first, *others in rows:
        yield from broken(first, room)
        known = [(name, cell) for name, cell in zip(names[1:], others, strict=True) if cell not in ("", "-")]
        pairs = [f" {name} {cell}," for name, cell in known]
        pairs[-1:] = [pair.removesuffix(",") for pair in pairs[-1:]]
        width = room - len(_INDENT)
        # A pair is broken only where it is wider than a line.
        for line in (part for whole in _filled(pairs, width) for part in broken(whole, width)):
            yield _INDENT + line


def _print_styled(lines: Sequence[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    begin = next((place for place, line in enumerate(lines) if line.startswith(f"{_INDENT}─")), 0)
    for place, line in enumerate(lines):
        text = Text(line)
        for word, style in _STYLES.items() if place >= begin else ():  # as a whole cell, and not as a column's name
            text.highlight_regex(rf"(?:(?<=  )|^){word}(?=  |$)", style)
        console.print(text, soft_wrap=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on standard error while the work inside calls what it gets with the finished and all parts.

    Where standard error is no terminal there is no bar, and the work gets None.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Its thread would be waited for: it may not come to life where memory is short.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)
