"""The picture of a result: bars, the roof that a copy's bandwidth is, and times over tokens, batch and head size."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rwkv_jit.bench import words
from rwkv_jit.bench.words import Row

_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a400")  # told apart by all eyes
_OURS, _GREY = "#0072b2", "#666666"
_MARKERS = "osD^vPX*"
_COLUMNS, _WIDTH = 3, 15.0  # panels beside each other; inches


def check(path: Path | str) -> None:
    """Check that a picture can be drawn, before anything is measured for it.

    Parameters
    ----------
    path : path
        The file to write; its suffix says the format: png, svg, pdf.

    Raises
    ------
    ValueError
        matplotlib is missing, or does not know the suffix.
    OSError
        There is no such folder.
    """
    path = Path(path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib; pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot: expected a file that ends in .{', .'.join(sorted(known))}, got {path}")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"--plot: expected a file in a folder that exists, got {path}")


def draw(result: Mapping[str, Any], path: Path | str) -> None:
    """Draw a result.

    A panel of bars for each case, fastest first: medians, whiskers from quartile to quartile, and the floor. Then,
    where floors are known, achieved bytes a second under the bandwidth of a copy; and where cases differ in T, B or N
    alone, times over it. N also where H N stays the same, as in models of one width.

    Parameters
    ----------
    result : dict
        As `rwkv-jit bench --json` prints it.
    path : path
        The file to write; its suffix says the format: png, svg, pdf.

    Raises
    ------
    ValueError
        matplotlib is missing or does not know the suffix, or nothing was measured.
    OSError
        The file cannot be written.
    """
    check(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    cases = cases_of(result)
    if not any(row["median_ms"] is not None for rows in cases.values() for row in rows):
        raise ValueError("--plot: expected a result with a measured row, got none")
    colours = _colours(result["rows"])
    columns = min(_COLUMNS, len(cases))
    heights = [0.95 + 0.26 * max(map(len, line)) for line in _lines(list(cases.values()), columns)]
    roofed = [row for row in result["rows"] if rate(row, result) is not None]
    panels = scaling(result["rows"])
    below = _lines(list(panels), _COLUMNS)
    sizes = [sum(heights) + 0.4, *([5.0] if roofed else []), *([3.4 * len(below) + 0.4] if panels else [])]
    figure = Figure(figsize=(_WIDTH, sum(sizes) + 0.9), layout="constrained")
    figure.suptitle(words.machine(result), fontsize=13)
    parts = iter(figure.subfigures(len(sizes), 1, height_ratios=sizes, squeeze=False)[:, 0])
    _draw_bars(next(parts), cases, colours, columns, heights)
    if roofed:
        _draw_roof(next(parts), roofed, result, colours)
    if panels:
        _draw_scaling(next(parts), panels, colours)
    suffix = Path(path).suffix.lower()
    about: dict[str, str | None] | None = {"Description": words.digest(result)} if suffix in (".png", ".svg") else None
    if about and suffix == ".svg":
        about["Date"] = None
    # The same file for the same result, with text that can be searched.
    with rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=110, metadata=about)


# ---- what is drawn -----------------------------------------------------------------------------------------------


def cases_of(result: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the rows of each case, the fastest first and what was left out last."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        found.setdefault(f"{row['op']}, {row['phase']}\n{words.shape(row)} {row['dtype']}", []).append(row)
    return {name: sorted(rows, key=lambda row: _or(row["median_ms"], math.inf)) for name, rows in found.items()}


def rate(row: Row, result: Mapping[str, Any]) -> float | None:
    """Return the TB/s that a row's fewest bytes make over its median."""
    copy = result.get("copy_tb_per_s")
    if copy is None or not row.get("floor_ms") or not row["median_ms"]:
        return None
    return float(copy * row["floor_ms"] / row["median_ms"])


Panel = tuple[str, str]  # its title, and what its times are drawn over


def scaling(rows: Sequence[Row]) -> dict[Panel, dict[str, dict[int, Row]]]:
    """Return, for each panel of sizes that differ in one dimension alone, the rows of every contestant by that size.

    What calls of ours take by themselves, the first of a case, is one contestant, whichever backend that is.
    """
    found: dict[Panel, dict[str, dict[int, Row]]] = {}
    for row in rows:
        if row["median_ms"] is None:
            continue
        for over, size, fixed in _sizes(row["shape"], row["op"]):
            panel = (f"{row['op']} {row['dtype']}, {row['phase']}\n{fixed}", over)
            lines = found.setdefault(panel, {})
            is_taken = row["who"] == words.OURS and size not in lines.get(words.OURS, {})
            lines.setdefault(words.OURS if is_taken else words.contestant(row), {})[size] = row
    several = {
        panel: {name: dict(sorted(line.items())) for name, line in lines.items() if len(line) > 1}
        for panel, lines in found.items()
    }
    return {panel: lines for panel, lines in several.items() if lines}


def _sizes(shape: Sequence[int], op: str) -> Iterator[tuple[str, int, str]]:
    """Return each dimension that a line can go along, its size, and the others in words."""
    if len(shape) == 5:
        batch, tokens, heads, keys, values = shape
        size = f"N = {keys}" if keys == values else f"K = {keys}, V = {values}"
        yield "T, tokens", tokens, f"B = {batch}, H = {heads}, {size}"
        yield "B, batch", batch, f"T = {tokens}, H = {heads}, {size}"
        if keys == values:
            yield "N, head size", keys, f"B = {batch}, T = {tokens}, H = {heads}"
            yield "N, head size", keys, f"B = {batch}, T = {tokens}, H N = {heads * keys}"
        return
    batch, tokens, channels = shape if op == "wkv4" else (shape[0], shape[2], shape[1])
    yield "T, tokens", tokens, f"B = {batch}, C = {channels}"
    yield "B, batch", batch, f"T = {tokens}, C = {channels}"
    yield "C, channels", channels, f"B = {batch}, T = {tokens}"


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _lines(given: list[Any], columns: int) -> list[list[Any]]:
    return [given[first : first + columns] for first in range(0, len(given), columns)]


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    others = [who for who in dict.fromkeys(row["who"] for row in rows) if who != words.OURS]
    return {words.OURS: _OURS} | {who: _COLOURS[place % len(_COLOURS)] for place, who in enumerate(others)}


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    """Return how far the quartiles are below and above the medians; NaN, which is not drawn, where there are none."""
    low = [row["median_ms"] - _or(row["low_ms"], math.nan) for row in rows]
    return [low, [_or(row["high_ms"], math.nan) - row["median_ms"] for row in rows]]


# ---- drawing -----------------------------------------------------------------------------------------------------


def _draw_bars(
    part: Any, cases: Mapping[str, Sequence[Row]], colours: Mapping[str, str], columns: int, heights: Sequence[float]
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = dict.fromkeys(row["who"] for rows in cases.values() for row in rows if row["median_ms"] is not None)
    handles: list[Any] = [Patch(color=colours[who], label=who) for who in shown]
    about = "medians in ms; whiskers: quartiles"
    if any(row.get("floor_ms") for rows in cases.values() for row in rows):
        about += "; %: floor over median"
        handles.append(Line2D([], [], color="black", linestyle="--", label="floor: fewest bytes at a copy's bandwidth"))
    handles.append(Patch(alpha=0, label=about))
    part.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    axes = list(part.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat)
    for axis, (title, rows) in zip(axes, cases.items(), strict=False):
        _draw_case(axis, title, rows, colours)
    for axis in axes[len(cases) :]:
        axis.set_axis_off()


def _draw_case(axis: Any, title: str, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    measured = [row for row in rows if row["median_ms"] is not None]
    largest = max((_or(row["high_ms"], row["median_ms"]) for row in measured), default=1.0)
    axis.barh(
        range(len(measured)), [row["median_ms"] for row in measured], xerr=_spread(measured), height=0.7,
        color=[colours[row["who"]] for row in measured], error_kw={"elinewidth": 1, "capsize": 2.5},
    )  # fmt: skip
    for place, row in enumerate(rows):
        if row["median_ms"] is None:
            text = textwrap.shorten(f"left out: {words.obstacle(row)}", 62, placeholder=" ...")
            axis.text(largest * 0.01, place, text, va="center", fontsize=7.5, color=_GREY, style="italic")
        else:
            reached = "" if row.get("fraction") is None else f"  {words.percent(row['fraction'])}"
            end = _or(row["high_ms"], row["median_ms"]) + largest * 0.02
            axis.text(end, place, f"{words.milliseconds(row['median_ms'])}{reached}", va="center", fontsize=8)
    floor = next((row["floor_ms"] for row in rows if row.get("floor_ms")), None)
    if floor is not None:
        axis.plot([floor, floor], [-0.5, len(measured) - 0.5], color="black", linestyle="--", linewidth=1)
    axis.set_xlim(0, largest * 1.28)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), [words.contestant(row) for row in rows], fontsize=8)
    axis.set_xlabel("ms" if measured else "", fontsize=8, labelpad=1)
    if not measured:
        axis.set_xticks([])
    _clean(axis)


def _draw_roof(part: Any, rows: Sequence[Row], result: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    copy = float(result["copy_tb_per_s"])
    axis = part.subplots()
    ops = {op: _MARKERS[place % len(_MARKERS)] for place, op in enumerate(dict.fromkeys(row["op"] for row in rows))}
    for row in rows:
        gigabytes = row["floor_ms"] * copy  # ms times TB/s
        filled = row["phase"] in ("forward", "prefill", "decode")
        axis.plot(
            gigabytes, rate(row, result), ops[row["op"]], markersize=7, color=colours[row["who"]],
            markerfacecolor=colours[row["who"]] if filled else "white",
        )  # fmt: skip
    axis.axhline(copy, color="black", linestyle="--", linewidth=1)
    axis.annotate(
        f"a copy: {copy:.2f} TB/s", (1, copy), xycoords=("axes fraction", "data"), xytext=(-4, 3),
        textcoords="offset points", ha="right", va="bottom", fontsize=8.5,
    )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="fewest bytes of the case, GB", ylabel="achieved, TB/s")
    axis.margins(0.05, 0.12)
    for along in (axis.xaxis, axis.yaxis):
        _mark(along)
    axis.set_title("Roofline: the fewest bytes of a case over its time", fontsize=11, fontweight="bold")
    who = dict.fromkeys(row["who"] for row in rows)
    handles = [Line2D([], [], marker="s", linestyle="", color=colours[name], label=name) for name in who]
    handles += [Line2D([], [], marker=marker, linestyle="", color="black", label=op) for op, marker in ops.items()]
    for label, face in (("filled: forward", "black"), ("open: with gradients", "white")):
        handles.append(Line2D([], [], marker="h", linestyle="", color="black", markerfacecolor=face, label=label))
    part.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    axis.grid(which="major", color="#dddddd", linewidth=0.7)
    _clean(axis)


def _draw_scaling(
    part: Any, panels: Mapping[Panel, Mapping[str, Mapping[int, Row]]], colours: Mapping[str, str]
) -> None:
    from matplotlib.ticker import NullLocator

    part.suptitle("Scaling", fontsize=11, fontweight="bold")
    axes = list(part.subplots(-(-len(panels) // _COLUMNS), _COLUMNS, squeeze=False).flat)
    for axis, ((title, over), lines) in zip(axes, panels.items(), strict=False):
        drawn: dict[str, int] = {}  # how many lines there are of each colour
        for name, line in lines.items():
            rows = list(line.values())
            who = rows[0]["who"]
            axis.errorbar(
                list(line), [row["median_ms"] for row in rows], _spread(rows), label=name, color=colours[who],
                marker=_MARKERS[drawn.get(who, 0) % len(_MARKERS)], markersize=5, capsize=2.5, linewidth=1.5,
            )  # fmt: skip
            drawn[who] = drawn.get(who, 0) + 1
        floors = {size: row["floor_ms"] for line in lines.values() for size, row in line.items() if row.get("floor_ms")}
        if len(floors) > 1:
            axis.plot(*zip(*sorted(floors.items()), strict=True), color="black", linestyle="--", lw=1, label="floor")
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        sizes = sorted({size for line in lines.values() for size in line})
        axis.set_xticks(sizes, list(map(str, sizes)))
        axis.xaxis.set_minor_locator(NullLocator())
        _mark(axis.yaxis)
        axis.set_xlabel(over, fontsize=9)
        axis.set_ylabel("ms", fontsize=9)
        axis.legend(frameon=False, fontsize=7.5)
        axis.grid(which="major", color="#dddddd", linewidth=0.7)
        _clean(axis)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()


def _mark(along: Any) -> None:
    """Mark a logarithmic axis with plain numbers: 1, 2 and 5 of each decade where these are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = along.get_view_interval()
    along.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    along.set_major_formatter(lambda value, _: f"{value:g}")
    along.set_minor_formatter(NullFormatter())


def _clean(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_axisbelow(True)
