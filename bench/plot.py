"""Pictures of a result: its speedups, for the pages; and all of it: bars, the roof of a copy, and scaling."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench import tables
from bench.tables import Row, contestant, shape_of
from rwkv_jit.desk.inputs import OURS

_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a400")  # told apart by all eyes
_OUR_COLOUR, _GREY = "#0072b2", "#666666"
_ON_ANY_PAGE = "#7a828e"  # in contrast to white and to black alike
_MARKERS = "osD^vPX*"
_COLUMNS, _PANEL = 3, (5, 3.4)  # panels beside each other, and inches of each


def draw_speedups(rows: Sequence[Row], folder: Path) -> Path:
    """Draw how many times as fast as the fastest other library we are, where pages of a folder look for it.

    It can be read at a width of 400 pixels, and on a white or a dark page, as nothing is behind it. The file says in
    words what it shows, by which a test knows whether it is that of the record.
    """
    from matplotlib.figure import Figure

    shown = tables.bars(rows)
    height = 0.5 + 0.44 * max(len(shown), 1)
    figure = Figure(figsize=(4, height))
    axis = figure.add_axes((0.01, 0, 0.98, 1 - 0.4 / height))  # below the title
    colours = [_OUR_COLOUR if each.times >= 1 else _COLOURS[4] for each in shown]
    axis.barh(range(len(shown)), [each.times for each in shown], height=0.36, color=colours)
    for place, each in enumerate(shown):
        call = f"{each.ours['op']} {shape_of(each.ours).replace('K = ', '').replace('V = ', '')}"
        said = f"{call}: {each.written} vs {tables.library(each.peer)}"
        axis.text(0, place - 0.3, said, fontsize=8.5, color=_ON_ANY_PAGE)
        axis.plot([1, 1], [place - 0.24, place + 0.24], color=_ON_ANY_PAGE, linewidth=1.5)
    axis.set_ylim(len(shown) - 0.6, -0.7)
    axis.set_xlim(left=0)
    axis.set_axis_off()
    about = ", ".join(dict.fromkeys(name for each in shown for name in (each.ours["dtype"], tables.gpu_of(each.ours))))
    title = f"Times as fast as the fastest other library,\nforward + backward, {about}; the marks are at 1×"
    axis.set_title(title, loc="left", fontsize=8.5, color=_ON_ANY_PAGE)
    path = folder / tables.PICTURE
    path.parent.mkdir(exist_ok=True)
    metadata = {"Description": tables.sentence(rows), "Software": None}
    figure.savefig(path, dpi=220, metadata=metadata, transparent=True)
    return path


# ---- all of a result ---------------------------------------------------------------------------------------------


def check(path: Path | str) -> None:
    """Check that a picture can be drawn, before anything is measured for it.

    Raises ValueError where matplotlib is missing, or does not know the suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib; pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ValueError(f"--plot: expected a file that ends in .{', .'.join(sorted(known))}, got {path}")


def draw(result: Mapping[str, Any], path: Path | str) -> None:
    """Draw a result.

    A panel of bars for each case, fastest first: medians, whiskers from quartile to quartile, and the floor. Then,
    where floors are known, achieved bytes a second under the bandwidth of a copy; and where cases differ in T, B or N
    alone, times over it. N also where H N stays the same, as in models of one width.

    Raises ValueError where nothing was measured.
    """
    from matplotlib.figure import Figure

    measured = [row for row in result["rows"] if row["median_ms"] is not None]
    if not measured:
        raise ValueError("--plot: expected a result with a measured row, got none")
    others = [who for who in dict.fromkeys(row["who"] for row in result["rows"]) if who != OURS]
    colours = {OURS: _OUR_COLOUR} | {who: _COLOURS[place % len(_COLOURS)] for place, who in enumerate(others)}
    cases: dict[str, list[Row]] = {}
    for row in result["rows"]:
        cases.setdefault(f"{row['op']}, {row['phase']}\n{shape_of(row)} {row['dtype']}", []).append(row)
    panels: list[Callable[[Any], None]] = [partial(_draw_case, colours, *case) for case in cases.items()]
    roofed = [row for row in measured if row["copy_tb_per_s"] is not None and row["floor_ms"]]
    panels += [partial(_draw_roof, colours, roofed)] if roofed else []
    panels += [partial(_draw_lines, colours, *panel, lines) for panel, lines in _scaling(measured).items()]
    count = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _PANEL[0], count * _PANEL[1] + 1), layout="constrained")
    about = "medians in ms; whiskers: quartiles; dashed and %: the floor, the fewest bytes at a copy's bandwidth"
    figure.suptitle(f"{'; '.join(result['machines'])}\n{about}", fontsize=11)
    for axis, panel in zip_longest(figure.subplots(count, _COLUMNS, squeeze=False).flat, panels):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_axisbelow(True)
        axis.set_axis_off() if panel is None else panel(axis)
    figure.savefig(path, dpi=110)


def _scaling(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, dict[int, Row]]]:
    """Return, for each panel of sizes that differ in one dimension alone, the rows of every contestant by that size.

    A panel is its title and what times are drawn over. What calls of ours take by themselves, the first of a case, is
    one contestant, whichever backend that is.
    """
    panels: dict[tuple[str, str], dict[str, dict[int, Row]]] = {}
    for row in rows:
        for over, size, fixed in _sizes(row) if row["inputs"] == "usual" else ():
            lines = panels.setdefault((f"{row['op']} {row['dtype']}, {row['phase']}\n{fixed}", over), {})
            is_taken = row["who"] == OURS and size not in lines.get(OURS, {})
            lines.setdefault(OURS if is_taken else contestant(row), {})[size] = row
    for lines in panels.values():
        for name in [name for name, line in lines.items() if len(line) < 2]:
            del lines[name]
    return {panel: lines for panel, lines in panels.items() if lines}


_WORDS = {"T": "T, tokens", "B": "B, batch", "N": "N, head size", "C": "C, channels"}


def _sizes(row: Row) -> Iterator[tuple[str, int, str]]:
    """Yield each dimension that a line can go along, its size, and the others in words."""
    letters = {"wkv4": "BTC", "timex": "BCT"}.get(row["op"], "BTHKV")
    sizes = dict(zip(letters, row["shape"], strict=True))
    if sizes.get("K") == sizes.get("V", 0):
        sizes = {"B": sizes["B"], "T": sizes["T"], "H": sizes["H"], "N": sizes["K"]}
        yield _WORDS["N"], sizes["N"], f"B = {sizes['B']}, T = {sizes['T']}, H N = {sizes['H'] * sizes['N']}"
    for name in [name for name in sizes if name in _WORDS]:
        yield _WORDS[name], sizes[name], ", ".join(f"{other} = {x}" for other, x in sizes.items() if other != name)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    """Return how far the quartiles are below and above the medians; NaN, which is not drawn, where there are none."""
    low = [row["median_ms"] - _or(row["low_ms"], math.nan) for row in rows]
    return [low, [_or(row["high_ms"], math.nan) - row["median_ms"] for row in rows]]


# ---- panels ------------------------------------------------------------------------------------------------------


def _draw_case(colours: Mapping[str, str], title: str, rows: Sequence[Row], axis: Any) -> None:
    """Draw the rows of a case, the fastest first and what was left out last."""
    rows = sorted(rows, key=lambda row: _or(row["median_ms"], math.inf))
    axis.set_title(title, fontsize=9, loc="left")
    measured = [row for row in rows if row["median_ms"] is not None]
    largest = max((_or(row["high_ms"], row["median_ms"]) for row in measured), default=1.0)
    axis.barh(
        range(len(measured)), [row["median_ms"] for row in measured], xerr=_spread(measured), height=0.7,
        color=[colours[row["who"]] for row in measured], error_kw={"elinewidth": 1, "capsize": 2.5},
    )  # fmt: skip
    for place, row in enumerate(rows):
        if row["median_ms"] is None:
            text = textwrap.shorten(f"left out: {tables.obstacle(row)}", 62, placeholder=" ...")
            axis.text(largest * 0.01, place, text, va="center", fontsize=7.5, color=_GREY, style="italic")
        else:
            reached = "" if row["fraction"] is None else f"  {tables.percent(row['fraction'])}"
            end = _or(row["high_ms"], row["median_ms"]) + largest * 0.02
            axis.text(end, place, f"{tables.milliseconds(row['median_ms'])}{reached}", va="center", fontsize=8)
    floor = next((row["floor_ms"] for row in rows if row["floor_ms"]), None)
    if floor is not None:
        axis.plot([floor, floor], [-0.5, len(measured) - 0.5], color="black", linestyle="--", linewidth=1)
    axis.set_xlim(0, largest * 1.28)
    axis.set_ylim(max(len(rows), 4) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), [contestant(row) for row in rows], fontsize=8)


def _draw_roof(colours: Mapping[str, str], rows: Sequence[Row], axis: Any) -> None:
    """Draw the TB/s that the fewest bytes of each row make over its median."""
    from matplotlib.lines import Line2D

    copy = max(float(row["copy_tb_per_s"]) for row in rows)
    ops = {op: _MARKERS[place % len(_MARKERS)] for place, op in enumerate(dict.fromkeys(row["op"] for row in rows))}
    for row in rows:
        gigabytes = row["floor_ms"] * row["copy_tb_per_s"]  # ms times TB/s
        face = "white" if "backward" in row["phase"] else colours[row["who"]]
        colour = {"color": colours[row["who"]], "markerfacecolor": face}
        axis.plot(gigabytes, gigabytes / row["median_ms"], ops[row["op"]], markersize=6, **colour)
    axis.axhline(copy, color="black", linestyle="--", linewidth=1)
    axis.text(1, copy, f"a copy: {copy:.2f} TB/s", transform=axis.get_yaxis_transform(), ha="right", va="bottom")
    axis.set(xscale="log", yscale="log", xlabel="fewest bytes of the case, GB", ylabel="achieved, TB/s")
    axis.set_title("The fewest bytes of a case over its time; open: with gradients", fontsize=9, loc="left")
    handles = [Line2D([], [], marker="s", linestyle="", color=colour, label=who) for who, colour in colours.items()]
    handles += [Line2D([], [], marker=marker, linestyle="", color="black", label=op) for op, marker in ops.items()]
    axis.legend(handles=handles, frameon=False, fontsize=7)


def _draw_lines(
    colours: Mapping[str, str], title: str, over: str, lines: Mapping[str, Mapping[int, Row]], axis: Any
) -> None:
    floors: dict[int, float] = {}
    for place, (name, line) in enumerate(lines.items()):
        rows = list(line.values())
        axis.errorbar(
            list(line), [row["median_ms"] for row in rows], _spread(rows), label=name, color=colours[rows[0]["who"]],
            marker=_MARKERS[place % len(_MARKERS)], markersize=5, capsize=2.5, linewidth=1.5,
        )  # fmt: skip
        floors |= {size: row["floor_ms"] for size, row in line.items() if row["floor_ms"]}
    if len(floors) > 1:
        axis.plot(*zip(*sorted(floors.items()), strict=True), color="black", linestyle="--", lw=1, label="floor")
    axis.set_title(title, fontsize=9.5, loc="left")
    axis.set(xlabel=over, ylabel="ms", yscale="log")
    axis.set_xscale("log", base=2)
    sizes = sorted({size for line in lines.values() for size in line})
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=7.5)
