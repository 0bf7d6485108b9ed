"""The picture of a result: what is drawn of it, and that it is drawn."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from rwkv_jit.bench import plot, words

_spec = importlib.util.spec_from_file_location("made_up_result", Path(__file__).with_name("made_up_result.py"))
made_up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made_up)
row, result, left_out = made_up.row, made_up.result, made_up.left_out


# ---- words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((8, 4096, 64, 64, 64), "(8, 4096, 64, 64)"),
        ((32, 2048, 4, 256, 512), "(32, 2048, 4, K = 256, V = 512)"),
        ((32, 768, 768), "(32, 768, 768)"),
    ],
)
def test_shapes_in_words(shape, text):
    assert words.shape(row(shape=shape)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00514, "0.00514"), (0.14, "0.140"), (0.9999, "1.00"), (2.4, "2.40"), (11.24, "11.2"), (99.97, "100")],
)
def test_times_have_three_digits(value, text):
    assert words.milliseconds(value) == text


def test_machine_in_words():
    assert words.machine(result()) == (
        "NVIDIA H200, sm_90, 139 GiB, torch 2.11.0, NVRTC 13.0, commit c753463aaa, copy 4.00 TB/s"
    )
    assert words.machine(made_up.on_cpu()) == "CPU reference; not the speed of the kernels, torch 2.13.0+cpu"


# ---- what is drawn -----------------------------------------------------------------------------------------------


def test_cases_have_the_fastest_first_and_what_was_left_out_last():
    rows = [left_out(what="a"), row(what="b", median=2.0), row(what="c"), row(what="d", phase="backward")]
    found = plot.cases_of(result(rows=rows))
    assert {name: [each["what"] for each in several] for name, several in found.items()} == {
        "wkv7, forward\n(8, 4096, 64, 64) bfloat16": ["c", "b", "a"],
        "wkv7, backward\n(8, 4096, 64, 64) bfloat16": ["d"],
    }


def test_rate_is_the_fewest_bytes_over_the_time():
    assert plot.rate(row(median=1.0, floor_ms=0.25), result()) == 1.0  # a quarter of what a copy does
    assert plot.rate(left_out(), result()) is None
    assert plot.rate(row(floor_ms=None), result()) is None
    assert plot.rate(row(), result(copy_tb_per_s=None)) is None


def test_lines_go_over_tokens_batch_and_head_size():
    found = {
        panel: {name: {size: each["median_ms"] for size, each in line.items()} for name, line in lines.items()}
        for panel, lines in plot.scaling(made_up.rows()).items()
    }
    assert list(found) == [
        ("wkv7 bfloat16, forward\nB = 8, T = 4096, H N = 4096", "N, head size"),
        ("wkv7 bfloat16, forward+backward\nB = 8, T = 4096, H N = 4096", "N, head size"),
        ("wkv6 bfloat16, forward\nB = 1, H = 32, N = 64", "T, tokens"),
        ("gla bfloat16, forward\nT = 2048, H = 4, K = 256, V = 512", "B, batch"),
    ]
    by_size, _, by_tokens, by_batch = found.values()
    assert by_size == {"rwkv_jit": {64: 0.7, 128: 0.7, 256: 0.7}, "fla chunk": {64: 4.5, 128: 4.5}}
    assert by_tokens["torch naive loop"] == {54: 1.08, 512: 10.24, 4096: 81.92}
    assert list(by_tokens) == ["rwkv_jit", "rwkv_jit recurrent", "torch naive loop"]
    assert by_batch == {"rwkv_jit": {1: 0.1, 8: 0.8}}


def test_lines_need_two_sizes_and_the_same_of_all_else():
    first = row(shape=(8, 4096, 64, 64, 64), who="fla")
    others = [
        {"shape": (4, 2048, 64, 64, 64)}, {"shape": (8, 4096, 64, 64, 128)},
        {"shape": (8, 2048, 64, 64, 64), "what": "x"}, {"shape": (8, 2048, 64, 64, 64), "phase": "backward"},
        {"shape": (8, 2048, 64, 64, 64), "op": "wkv6"}, {"shape": (8, 2048, 64, 64, 64), "dtype": "float32"},
    ]  # fmt: skip
    for other in others:
        assert plot.scaling([first, row(**{"who": "fla", **other})]) == {}
    assert plot.scaling([first, left_out(shape=(8, 2048, 64, 64, 64))]) == {}


def test_backends_that_calls_take_by_themselves_are_one_line():
    sizes = [(8, 4096, 4096 // size, size, size) for size in (64, 256)]
    rows = [row(shape=sizes[0]), row(shape=sizes[0], what="recurrent"), row(shape=sizes[1], what="scan")]
    (lines,) = plot.scaling(rows).values()
    assert {name: [each["what"] for each in line.values()] for name, line in lines.items()} == {
        "rwkv_jit": ["chunked", "scan"]
    }


@pytest.mark.parametrize(
    ("op", "shapes", "over", "sizes"),
    [
        ("wkv7", ((8, 64, 32, 64, 64), (8, 64, 32, 128, 128)), "N, head size", [64, 128]),  # of the same heads
        ("wkv4", ((8, 64, 128), (8, 32, 128)), "T, tokens", [32, 64]),
        ("wkv4", ((8, 64, 128), (8, 64, 256)), "C, channels", [128, 256]),
        ("timex", ((8, 64, 128), (8, 64, 256)), "T, tokens", [128, 256]),
        ("timex", ((8, 64, 128), (4, 64, 128)), "B, batch", [4, 8]),
    ],
)
def test_dimensions_are_those_of_the_op(op, shapes, over, sizes):
    ((panel, lines),) = plot.scaling([row(op, shape) for shape in shapes]).items()
    assert panel[1] == over
    assert [list(line) for line in lines.values()] == [sizes]


# ---- drawing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a result; returns the figure, which is not saved."""

    def draw(given):
        kept = []
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append(figure))
            plot.draw(given, tmp_path / "x.png")
        return kept[0]

    return draw


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_bars_are_medians_with_whiskers_and_the_floor(drawn):
    rows = [row(median=2.0), row(who="fla", what="chunk", median=4.0), left_out("no\nroom", who="torch", what="loop")]
    bars, roof = drawn(result(rows=rows)).subfigs
    (axis,) = bars.axes
    assert axis.get_title(loc="left") == "wkv7, forward\n(8, 4096, 64, 64) bfloat16"
    assert [patch.get_width() for patch in axis.patches] == [2.0, 4.0]
    (whiskers,) = [each for each in axis.collections if hasattr(each, "get_segments")]
    ends = [[x for x, _ in segment] for segment in whiskers.get_segments()]
    assert ends == [pytest.approx([1.96, 2.08]), pytest.approx([3.92, 4.16])]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["rwkv_jit chunked", "fla chunk", "torch loop"]
    named = [text.get_text() for text in bars.legends[0].get_texts()]
    assert named[:2] == ["rwkv_jit", "fla"]  # who was measured
    assert named[2].startswith("floor")
    assert texts(axis) == ["2.00  25%", "4.00  12%", "left out: no room"]
    assert [list(line.get_xdata()) for line in axis.lines if line.get_linestyle() == "--"] == [[0.5, 0.5]]
    (axis,) = roof.axes
    assert texts(axis) == ["a copy: 4.00 TB/s"]
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines[:2]]
    assert points == [(2.0, 1.0), (2.0, 0.5)]  # GB, TB/s


def test_missing_quartiles_have_no_whiskers(drawn):
    (bars,) = drawn(result(rows=[row(median=2.0) | dict.fromkeys(made_up.MISSING)])).subfigs
    (axis,) = bars.axes
    assert texts(axis) == ["2.00"]
    (whiskers,) = [each for each in axis.collections if hasattr(each, "get_segments")]
    assert all(math.isnan(x) for segment in whiskers.get_segments() for x, _ in segment)


def test_a_rich_result_has_bars_roof_and_scaling(drawn):
    figure = drawn(result())
    bars, roof, scaling = figure.subfigs
    shown = [axis for axis in bars.axes if axis.axison]
    assert len(shown) == len(plot.cases_of(result())) == 13
    assert texts(shown[-1]) == ["left out: no reason is recorded"]
    assert len(roof.axes[0].lines) - 1 == sum(each["floor_ms"] is not None for each in made_up.rows())
    panels = [axis for axis in scaling.axes if axis.axison]
    assert [axis.get_xlabel() for axis in panels] == ["N, head size", "N, head size", "T, tokens", "B, batch"]
    assert [tick.get_text() for tick in panels[2].get_xticklabels()] == ["54", "512", "4096"]
    names = [text.get_text() for text in panels[2].get_legend().get_texts()]
    assert sorted(names) == ["floor", "rwkv_jit", "rwkv_jit recurrent", "torch naive loop"]
    assert figure.get_suptitle() == words.machine(result())


def test_contestants_keep_their_colours(drawn):
    bars, roof, scaling = drawn(result()).subfigs
    first = bars.axes[0].patches
    assert [patch.get_facecolor() for patch in bars.axes[1].patches] == [patch.get_facecolor() for patch in first]
    assert first[0].get_facecolor() != first[1].get_facecolor()


def test_picture_of_a_cpu_says_what_it_is(drawn):
    figure = drawn(made_up.on_cpu())
    assert figure.get_suptitle().startswith("CPU reference; not the speed of the kernels")
    assert len(figure.subfigs) == 1


def test_file_is_a_picture_that_says_of_what(tmp_path):
    plot.draw(result(), tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.width == 1650
        assert picture.height > 1000
        assert len(picture.convert("RGB").getcolors(2**24)) > 50
        assert picture.info["Description"] == words.digest(result())
    plot.draw(made_up.on_cpu(), tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert words.digest(made_up.on_cpu()) in text
    assert ">rwkv_jit reference</text>" in text  # and no outlines of letters
    plot.draw(made_up.on_cpu(), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="^--plot: needs matplotlib; pip install matplotlib$"):
        plot.draw(result(), tmp_path / "x.png")


def test_places_that_no_picture_can_have_are_told_beforehand(tmp_path):
    for name in ("x.doc", "x", "png"):
        with pytest.raises(ValueError, match=r"--plot: expected a file that ends in .*\.png, .*got .*" + name):
            plot.check(tmp_path / name)
    with pytest.raises(OSError, match="--plot: expected a file in a folder that exists, got .*none"):
        plot.check(tmp_path / "none" / "x.png")
    plot.check(str(tmp_path / "X.PNG"))


def test_nothing_measured_is_an_error(tmp_path):
    for rows in ([], [left_out()]):
        with pytest.raises(ValueError, match="expected a result with a measured row, got none"):
            plot.draw(result(rows=rows), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
