"""How many times faster a result finds us: which rows are compared, the table, and the picture."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rwkv_jit.bench import record, speedups

_spec = importlib.util.spec_from_file_location("made_up_result", Path(__file__).with_name("made_up_result.py"))
made_up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made_up)
row, result, left_out = made_up.row, made_up.result, made_up.left_out

BOTH = {"phase": "forward+backward"}


def test_what_calls_take_is_compared_with_the_fastest_peer_of_the_same_case():
    rows = [
        row(median=2.0), row(what="recurrent", median=0.5),  # a call takes the first
        row(who="fla", what="slow", median=9.0), row(who="torch", what="best", median=6.0), left_out(who="fla"),
        row(who="fla", median=1.0, phase="backward"), row(who="fla", median=1.0, shape=(1, 2, 3, 4, 4)),
    ]  # fmt: skip
    (found,) = speedups.of(rows)
    assert (found.ours["what"], found.peer["what"], found.times) == ("chunked", "best", 3.0)


def test_without_a_time_of_both_there_is_no_speedup():
    assert speedups.of([row()]) == []
    assert speedups.of([row(), left_out(who="fla")]) == []
    assert speedups.of([left_out(), row(what="recurrent"), row(who="fla")]) == []  # what calls take was left out
    assert speedups.times(row(who="fla", median=3.0), speedups.ours([row(median=2.0)])) == 1.5
    assert speedups.times(row(who="fla", median=1.0), speedups.ours([row(median=2.0)])) == 0.5  # slower, and says so


def test_table_has_a_line_for_each_call_with_gradients_one_op_after_another():
    rows = [
        row(median=0.5), row(who="fla", what="chunk", median=2.0),
        row(**BOTH, median=2.0, peak_mib=1024.0), row(**BOTH, who="fla", what="loop", median=3.0, peak_mib=2560.0),
        row("gla", **BOTH, median=1.0), row("gla", **BOTH, who="fla", what="g", median=4.0, peak_mib=None),
        row("timex", (32, 768, 768), "backward", median=1.0), row("timex", (32, 768, 768), "backward", "torch", "fft"),
        row("wkv6"), row("wkv6", who="fla", median=2.0),  # forward alone
        row(**BOTH, shape=(1, 2, 3, 4, 4)), row(**BOTH, shape=(1, 2, 3, 4, 4), who="fla", what="chunk", median=7.0),
    ]  # fmt: skip
    assert speedups.lines(rows)[2:] == [
        ("wkv7", "(8, 4096, 64, 64) bfloat16", "fla chunk, fla loop", "0.500 vs 2.00", "**4.0×**", "2.00 vs 3.00",
         "**1.5×**", "1.0 vs 2.5"),
        ("wkv7", "(1, 2, 3, 4) bfloat16", "fla chunk", "", "", "1.00 vs 7.00", "**7.0×**", "0.5 vs 0.5"),
        ("gla", "(8, 4096, 64, 64) bfloat16", "fla g", "", "", "1.00 vs 4.00", "**4.0×**", ""),
        ("timex", "(32, 768, 768) bfloat16", "torch fft", "", "", "1.00 vs 1.00 (backward alone)", "**1.0×**",
         "0.5 vs 0.5"),
    ]  # fmt: skip


def test_picture_has_a_bar_and_text_for_the_first_shape_of_each_op_and_head_size():
    drawing = ElementTree.fromstring(speedups.picture(result()))
    texts = ["".join(each.itertext()) for each in drawing.findall(".//{*}text")]
    assert texts == [
        "Times faster than the best peer, forward and backward",
        "NVIDIA H200, sm_90, 139 GiB, torch 2.11.0, NVRTC 13.0",
        "wkv7 (8, 4096, 64, 64)", "6.4× fla chunk",
        "wkv7 (8, 4096, 32, 128)", "6.4× fla chunk",
        "timex (32, 768, 768), backward", "110.0× torch conv1d",
    ]  # fmt: skip
    lengths = [float(bar.get("width")) for bar in drawing.findall(".//{*}rect")]
    assert lengths == pytest.approx([lengths[2] * 6.43 / 110] * 2 + [lengths[2]], abs=0.1)
    (title,) = drawing.findall(".//{*}title")
    assert title.text == speedups.sentence(result()["rows"])


def test_picture_of_a_result_without_peers_is_empty_and_still_one():
    assert ElementTree.fromstring(speedups.picture(result(rows=[row()]))).findall(".//{*}rect") == []


def test_picture_of_the_record_is_small_and_fits(root):
    drawn = speedups.picture(record.read(root / "bench.json"))
    assert len(drawn) < 8000
    drawing = ElementTree.fromstring(drawn)
    for bar in drawing.findall(".//{*}rect"):
        assert float(bar.get("x")) + float(bar.get("width")) < 0.8 * float(drawing.get("width"))
