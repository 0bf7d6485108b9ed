"""How many times faster a result finds us than the best of the others: as rows, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rwkv_jit.bench import words
from rwkv_jit.bench.words import Row

_TITLE = "Times faster than the best peer, forward and backward"
WITH_GRADIENTS = ("forward+backward", "backward")
_WIDTH, _LABELS, _BAR, _BARS = 760, 240, 26, 310  # pixels: the whole, the names on the left, a line, the longest bar


class Speedup(NamedTuple):
    """What a call of ours takes by itself, beside the fastest peer of the same case."""

    ours: Row
    peer: Row

    @property
    def times(self) -> float:
        """How many times as long the peer takes."""
        return float(self.peer["median_ms"] / self.ours["median_ms"])


Case = tuple[Any, ...]


def _case(row: Row) -> Case:
    return row["suite"], row["op"], tuple(row["shape"]), row["dtype"], row["phase"]


def ours(rows: Iterable[Row]) -> dict[Case, Row]:
    """Return the measured row of what our calls take by themselves, the first of a case."""
    found: dict[Case, Row] = {}
    for row in rows:
        if row["who"] == words.OURS:
            found.setdefault(_case(row), row)
    return {case: row for case, row in found.items() if row["median_ms"] is not None}


def times(row: Row, of_ours: Mapping[Case, Row]) -> float | None:
    """Return how many times as long a peer takes as we do; None for a row of ours, and where a time is missing."""
    first = of_ours.get(_case(row))
    if first is None or row["who"] == words.OURS or row["median_ms"] is None:
        return None
    return Speedup(first, row).times


def of(rows: Sequence[Row]) -> list[Speedup]:
    """Return the speedup over the best peer of every case that has both, one op after another."""
    found = []
    for case, first in ours(rows).items():
        others = [row for row in rows if _case(row) == case and row["who"] != words.OURS]
        measured = [row for row in others if row["median_ms"] is not None]
        if measured:
            found.append(Speedup(first, min(measured, key=lambda row: float(row["median_ms"]))))
    ops = list(dict.fromkeys(each.ours["op"] for each in found))
    return sorted(found, key=lambda each: ops.index(each.ours["op"]))


def written(factor: float) -> str:
    """Return a speedup as it is written."""
    return f"{factor:.1f}×"


# ---- the table ---------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each op, shape and dtype that was measured with gradients, beside its best peers."""
    by_call: dict[Case, dict[str, Speedup]] = {}
    for each in of(rows):
        *call, phase = _case(each.ours)
        by_call.setdefault(tuple(call), {})[phase] = each
    table: list[tuple[str, ...]] = [
        ("op", "shape", "best peer", "forward ms", "faster", "forward + backward ms", "faster", "memory GiB"),
        ("---",) * 8,
    ]
    for phases in by_call.values():
        trained = next((phases[phase] for phase in WITH_GRADIENTS if phase in phases), None)
        if trained is None:
            continue
        shown = [each for each in (phases.get("forward"), trained) if each is not None]
        peers = ", ".join(dict.fromkeys(words.contestant(each.peer) for each in shown))
        row = trained.ours
        alone = " (backward alone)" if row["phase"] == "backward" else ""
        table.append((
            row["op"], f"{words.shape(row)} {row['dtype']}", peers, *_cells(phases.get("forward")),
            f"{_cells(trained)[0]}{alone}", _cells(trained)[1], _memory(trained),
        ))  # fmt: skip
    return table


def _cells(each: Speedup | None) -> tuple[str, str]:
    if each is None:
        return "", ""
    both = (words.milliseconds(row["median_ms"]) for row in each)
    return " vs ".join(both), f"**{written(each.times)}**"


def _memory(each: Speedup) -> str:
    if any(row["peak_mib"] is None for row in each):
        return ""
    return " vs ".join(f"{row['peak_mib'] / 1024:.1f}" for row in each)


# ---- the picture -------------------------------------------------------------------------------------------------


def bars(rows: Sequence[Row]) -> list[Speedup]:
    """Return what the picture shows: with gradients, the first shape of each op and head size."""
    found: dict[tuple[Any, ...], Speedup] = {}
    for each in of(rows):
        if each.ours["phase"] in WITH_GRADIENTS:
            sizes = tuple(each.ours["shape"][3:])
            found.setdefault((each.ours["op"], sizes), each)
    return list(found.values())


def sentence(rows: Sequence[Row]) -> str:
    """Return in words what the picture shows."""
    shown = (f"{each.ours['op']} {words.shape(each.ours)} {written(each.times)}" for each in bars(rows))
    return f"Times faster than the best peer, with gradients: {', '.join(shown)}"


def picture(result: Mapping[str, Any]) -> str:
    """Return an SVG of the speedups: a bar for each, with its name and its number as text."""
    shown = bars(result["rows"])
    longest = max((each.times for each in shown), default=1.0)
    where = words.machine({**result, "commit": None, "copy_tb_per_s": None})
    height = 58 + _BAR * len(shown)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(sentence(result['rows']))}</title>",
        "<style>text{fill:#24292f}.by{fill:#6e7781}rect{fill:#0072b2}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.by{fill:#9198a1}rect{fill:#58a6ff}}</style>",
        f'<text x="8" y="20" font-size="15" font-weight="600">{_TITLE}</text>',
        f'<text x="8" y="40" class="by">{escape(where)}</text>',
    ]
    for place, each in enumerate(shown):
        top = 52 + _BAR * place
        length = _BARS * each.times / longest
        name = f"{each.ours['op']} {words.shape(each.ours).replace('K = ', '').replace('V = ', '')}"
        name += ", backward" if each.ours["phase"] == "backward" else ""
        middle, end = top + 14, _LABELS + length + 8
        drawn += [
            f'<text x="{_LABELS - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABELS}" y="{top}" width="{length:.1f}" height="{_BAR - 8}" rx="2"/>',
            f'<text x="{end:.1f}" y="{middle}"><tspan font-weight="600">{written(each.times)}</tspan> '
            f'<tspan class="by">{escape(words.contestant(each.peer))}</tspan></text>',
        ]
    return "\n".join([*drawn, "</svg>\n"])
