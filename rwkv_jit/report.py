"""How the commands print: tables, and the progress of a compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_STYLES = {"error": "red", "warning": "yellow", "ok": "green"}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: drawn by rich on a terminal, else in plain columns that other programs can read.

    Parameters
    ----------
    head : sequence of str
        The names of the columns; empty for a table without them.
    rows : sequence of sequence
        The cells. A column of numbers is set to the right.
    """
    texts = [[" ".join(str(cell).splitlines()) for cell in row] for row in rows]
    numbers = [all(map(_is_number, column)) for column in zip(*texts, strict=True)] or [False] * len(head)
    if sys.stdout.isatty():
        _draw(head, texts, numbers)
        return
    lines = [list(head), *texts] if head else texts
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, numbers, strict=True)
        print("  " + "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


def _draw(head: Sequence[str], texts: Sequence[Sequence[str]], numbers: Sequence[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, show_header=bool(head))
    for name, right in zip(head or [""] * len(numbers), numbers, strict=True):
        drawn.add_column(name, justify="right" if right else "left", overflow="fold")
    for line in texts:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    Console().print(drawn)


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

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
