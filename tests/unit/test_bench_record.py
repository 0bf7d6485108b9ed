"""The recorded result: its file, what pages and pictures show of it, and how two results are compared."""

import pytest
from PIL import Image

from bench import record, tables

COPY = 4.0  # TB/s
ENVIRONMENT = {"gpus": ["NVIDIA H200, sm_90, 139 GiB"], "torch": "2.11.0", "nvrtc": "13.0 0123abcd"}
MACHINE, COMMIT = "NVIDIA H200, sm_90, 139 GiB, torch 2.11.0, NVRTC 13.0", "c753463aaaaabbbbbccccc"
H100 = {"gpus": ["NVIDIA H100, sm_90, 79 GiB"], "torch": "2.12.0"}
ON_H100 = {"machine": "NVIDIA H100, sm_90, 79 GiB, torch 2.12.0"}
MISSING = ("low_ms", "high_ms", "host_us", "floor_ms", "fraction", "peak_mib", "error")


def row(op="wkv7", shape=(8, 4096, 64, 64, 64), phase="forward", who="rwkv_jit", what="chunked", median=1.0, **changes):
    """A row whose quartiles are 2 % below and 4 % above its median, with a floor of 0.5 ms."""
    made = {
        "suite": "studies", "op": op, "shape": list(shape), "dtype": "bfloat16", "phase": phase, "inputs": "usual",
        "who": who, "what": what, "median_ms": median, "low_ms": 0.98 * median, "high_ms": 1.04 * median, "runs": 30,
        "in_graph": False, "host_us": 12.0, "floor_ms": 0.5, "fraction": 0.5 / median, "peak_mib": 512.0,
        "error": 4e-3, "errors": {}, "other": None, "other_error": None, "skipped": None, "machine": MACHINE,
        "copy_tb_per_s": COPY, "commit": COMMIT, "sources": "1" * 64,
    }  # fmt: skip
    return made | changes


def left_out(why="out of memory", **given):
    return row(**given) | dict.fromkeys(("median_ms", *MISSING)) | {"runs": 0, "skipped": why}


def many_rows():
    made = []
    for heads, head_size in ((64, 64), (32, 128)):
        shape = (8, 4096, heads, head_size, head_size)
        for phase, factor in (("forward", 1), ("forward+backward", 3)):
            made.append(row(shape=shape, phase=phase, median=0.7 * factor))
            made.append(row(shape=shape, phase=phase, who="fla", what="chunk", median=4.5 * factor))
    made.append(left_out("CUDA error:\nan illegal access", who="fla", what="another chunk"))
    made += [row("wkv6", who="torch", what="naive loop") | dict.fromkeys(MISSING), row("gla", median=0.1)]
    for who, what, median in (("rwkv_jit", "tiles", 0.3), ("torch", "conv1d", 33.0)):
        made.append(row("timex", (32, 768, 768), "backward", who, what, median))
    made.append(left_out(None, op="wkv4", shape=(8, 4096, 4096), what="recurrent"))
    return made


def result(**changes):
    return {
        "format": 3,
        "machines": {MACHINE: ENVIRONMENT},
        "rows": many_rows(),
        "training": [],
        "decode": [],
    } | changes


BOTH = {"phase": "forward+backward"}
TEXT = """# A title

<!-- bench:machine -->
<!-- /bench -->

## Tables
<!-- bench:wkv7 -->
an old table
<!-- /bench -->
The end.
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose README shows two blocks; what is written goes there."""
    (tmp_path / "README.md").write_text(TEXT)
    monkeypatch.setattr(record, "FILE", tmp_path / "bench.json")
    return tmp_path


# ---- the checkout ------------------------------------------------------------------------------------------------


def test_pages_show_all_that_is_recorded(root):
    """Else: python -m bench pages, or markers for what was recorded."""
    recorded, shown = tables.blocks(record.read(root / "bench.json")), set()
    for page in record.PAGES:
        text = (root / page).read_text(encoding="utf-8")
        assert record.fill(text, recorded, page) == text
        shown |= set(record._OPENING.findall(text))
    assert shown == set(recorded)


def test_picture_shows_what_is_recorded_and_is_small(root):
    path = root / tables.PICTURE
    with Image.open(path) as picture:
        assert picture.info["Description"] == tables.sentence(record.read(root / "bench.json")["rows"])
        assert 600 < picture.width < 1200
    assert path.stat().st_size < 150_000


def test_sentences_of_pages_are_those_of_the_record(root):
    """What float32 costs, and what a whole model makes."""
    recorded, costs = record.read(root / "bench.json"), {}
    for line in tables.blocks(recorded)["float32"].splitlines()[2:]:
        call, _, _, times, _ = line.strip("| ").split(" | ")
        costs.setdefault("backward" in call, []).append(int(times.removesuffix("×")))
    (low, high), (lowest, highest) = ((min(costs[which]), max(costs[which])) for which in (False, True))
    said = f"{low} to {high} times as long forward, and {lowest} to {highest} times with gradients"
    pages = {
        name: " ".join((root / name).read_text(encoding="utf-8").split()) for name in (*record.PAGES, "docs/ops.md")
    }
    assert {name for name, text in pages.items() if said in text} == {*pages} - {"docs/speed.md"}
    steps = {row["parameters"]: f"{row['tokens_per_s']:,.0f}" for row in recorded["training"] if row["part"] == "steps"}
    assert f"{steps['bfloat16']} tokens a second with parameters and moments in bfloat16" in pages["README.md"]
    assert f"{steps['float32']} with parameters in float32 under autocast" in pages["README.md"]
    medians = {
        row["who"]: tables.milliseconds(row["median_ms"])
        for row in recorded["rows"]
        if (row["inputs"], row["shape"][1], row["phase"]) == ("slow-gates", 8192, "forward")
    }
    assert f"takes {medians['cudnn']} ms, and `kda` {medians['rwkv_jit']}." in pages["README.md"]


# ---- writing -----------------------------------------------------------------------------------------------------


def test_writing_fills_the_pages_and_draws_the_picture(checkout):
    (checkout / "docs").mkdir()
    (checkout / "docs" / "speed.md").write_text("<!-- bench:gla -->\n<!-- /bench -->\n")
    record.write(result())
    assert record.read(checkout / "bench.json") == result(service=None)
    blocks = tables.blocks(result())
    filled = TEXT.replace("an old table\n", blocks["wkv7"])
    filled = filled.replace("<!-- bench:machine -->\n", f"<!-- bench:machine -->\n{blocks['machine']}")
    assert (checkout / "README.md").read_text(encoding="utf-8") == filled
    assert blocks["gla"] in (checkout / "docs" / "speed.md").read_text(encoding="utf-8")
    with Image.open(checkout / "docs" / "speedups.png") as picture:
        assert picture.info["Description"] == tables.sentence(many_rows())
    record.write(result())
    assert (checkout / "README.md").read_text(encoding="utf-8") == filled


def test_calls_over_a_pool_have_a_table_of_their_functions():
    """And none in those of their ops, nor among what is slower than others."""
    about = {"op": "kda", "shape": (256, 1, 32, 128, 128), "inputs": "16-keys+bf16-states", "phase": "replay"}
    rows = [
        row(**about, what="replay", median=0.25, calls_us=251.5), row(**about, what="update", median=0.5),
        row(**about, who="torch", what="copy", median=0.125),
        row("kda", (1, 1, 32, 128, 128), "decode", what="update", median=0.004, calls_us=9.5),
    ]  # fmt: skip
    shown = tables.blocks(result(rows=rows))
    call = "| H200 | kda_replay (256, 1, 32, 128), 16 key heads, bfloat16 states | bfloat16"
    assert shown["inference"].splitlines()[0].startswith("| GPU | call | dtype | by | call ms | rwkv_jit is faster |")
    assert shown["inference"].splitlines()[2:] == [
        f"{call} | rwkv_jit replay | 0.250 (0.245 to 0.260) 200% |  | 12.0 | 251.5 |  |  |",
        f"{call} | rwkv_jit update | 0.500 (0.490 to 0.520) 100% |  | 12.0 |  |  |  |",
        f"{call} | torch copy | 0.125 (0.122 to 0.130) 400% | 0.5× | 12.0 |  |  |  |",
    ]
    assert shown["kda"].splitlines()[0].startswith("| GPU | shape | dtype | by | decode ms |")
    assert len(shown["kda"].splitlines()) == 3
    assert "No other implementation is faster." in shown["picture"]
    assert record.sources_of(rows[0]) != record.sources_of(rows[-1])


def test_a_record_is_made_in_parts(checkout):
    """A case takes the place of its own rows on the same kind of GPU; all others stay, with their commits."""
    wind, gla = [row(suite="wind"), row(suite="wind", who="fla")], [row("gla", suite="gla")]
    record.write(result(rows=wind))
    record.write(result(rows=gla))
    assert record.read(checkout / "bench.json")["rows"] == wind + gla
    again = [row(suite="wind", median=2.0, commit="another", sources="2" * 64)]
    record.write(result(rows=again))
    assert record.read(checkout / "bench.json")["rows"] == gla + again
    newer = "NVIDIA H200, sm_90, 139 GiB, torch 2.12.0"
    record.write(result(rows=[row("gla", suite="gla", machine=newer)], machines={newer: {"torch": "2.12.0"}}))
    found = record.read(checkout / "bench.json")
    assert [each["machine"] for each in found["rows"]] == [MACHINE, newer]
    assert found["machines"] == {MACHINE: ENVIRONMENT, newer: {"torch": "2.12.0"}}


def test_rows_of_models_replace_those_of_the_same_model(checkout):
    """A row of an earlier version, which names no model, is of RWKV-7; others and their parts stay."""
    about = {"machine": MACHINE, "commit": COMMIT, "sources": "1" * 64, "skipped": None, "parameters": "float16"}
    of_model = {"layers": 24, "width": 1024, "batch": 8, "tokens": 4096, "vocabulary": 65536, "ranks": 1}
    times = {"median_ms": 100.0, "tokens_per_s": 10.0, "flops_use": 0.5, "peak_mib": 2048.0, **of_model, **about}
    old = {"part": "steps", "by": "rwkv_jit", **times}
    new, other = ({**old, "model": name, "host_ms": 40.0, "kernel_ms": 90.0} for name in ("RWKV7", "RWKV6"))
    record.write(result(rows=[old]), "training")
    record.write(result(rows=[other]), "training")
    assert record.read(checkout / "bench.json")["training"] == [old, other]
    record.write(result(rows=[new]), "training")
    tokens = {**new, "part": "token", "tokens": 1, "batch": 32, "copy_use": 0.75, "flops_use": None}
    record.write(result(rows=[tokens]), "decode")
    found = record.read(checkout / "bench.json")
    assert (found["training"], found["decode"]) == ([other, new], [tokens])
    shown = tables.blocks(found)
    line = "| rwkv_jit | float16 | 100 | 40.0 | 90% | 10 |"
    assert f"| RWKV-6 24 x 1024 | 8 x 4096 {line} 50% | 2 | H200, {COMMIT[:10]} |\n" in shown["training"]
    assert f"| RWKV-7 24 x 1024 | 32 x 1 {line} 75% |  | 2 | H200, {COMMIT[:10]} |\n" in shown["decode"]
    assert record.sources_of(new) != record.sources_of(other)
    assert record.sources_of(new) == record.sources_of(old) != record.sources_of(tokens)


def test_rows_of_other_sources_are_stale(monkeypatch, capsys):
    monkeypatch.setattr(record, "sources_of", lambda row: "1" * 64 if row.get("op") != "gla" else "2" * 64)
    rows = [row(), row("gla"), row("gla", suite="gla"), row("wkv6", commit=None, **ON_H100)]
    model = {"machine": MACHINE, "commit": COMMIT, "sources": None}
    found = record.stale(result(rows=rows, training=[model], decode=[model]))
    record.show_stale(found)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  studies   H200  c753463aaaaabbbbbccccc     2      1",
        "  gla       H200  c753463aaaaabbbbbccccc     1      1",
        "  studies   H100  unknown                    1",
        "  training  H200  c753463aaaaabbbbbccccc     1      1",
        "  decode    H200  c753463aaaaabbbbbccccc     1      1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("bench:wkv7", "bench:wkv8", "README.md: expected bench:machine or bench:picture or .* got bench:wkv8"),
        ("<!-- /bench -->\nThe", "The", "expected <!-- /bench --> behind <!-- bench:wkv7 -->"),
        ("<!-- bench:machine -->\n<!-- /bench -->", "<!-- bench:machine -->", "behind <!-- bench:machine -->"),
    ],
)
def test_faults_of_a_page_cost_no_measurement(old, new, said, checkout):
    before = TEXT.replace(old, new)
    (checkout / "README.md").write_text(before)
    with pytest.raises(ValueError, match=said):
        record.write(result())
    assert record.read(checkout / "bench.json") == result(service=None)
    assert (checkout / "README.md").read_text() == before


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "expected JSON of `python -m bench ops --json`"),
        (b"\xff\xfe\x00", "expected JSON of `python -m bench ops --json`"),
        (b"[]", "got JSON without its rows"),
        (b'{"format": 1}', "got JSON without its rows"),
        (b'{"rows": []}', "expected a result of format 3, got None"),
        (b'{"rows": [], "format": 1}', "expected a result of format 3, got 1"),
    ],
)
def test_what_is_no_result_is_told(content, said, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json: ") as caught:
        record.read(tmp_path / "a.json")
    assert said in str(caught.value)


# ---- two results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "low", "median", "high", "verdict"),
    [
        ((0.98, 1.04), 0.80, 0.90, 0.97, "faster"),
        ((0.98, 1.04), 0.80, 0.90, 0.98, "the same"),  # 0.98 is the first one's lower quartile
        ((0.98, 1.04), 1.04, 1.05, 1.06, "the same"),
        ((0.98, 1.04), 1.05, 1.06, 1.07, "slower"),
        ((0.98, 1.04), 0.50, 0.60, 2.00, "the same"),
        ((0.98, 1.04), None, 0.10, 0.11, "unknown"),
        ((0.98, 1.04), 0.09, 0.10, None, "unknown"),
        ((0.999, 1.001), 0.974, 0.975, 0.976, "faster"),
        ((0.999, 1.001), 0.984, 0.985, 0.986, "the same"),  # as on another machine of that kind
        ((0.999, 1.001), 1.024, 1.025, 1.026, "slower"),
    ],
)
def test_verdict_is_that_of_the_quartiles(before, low, median, high, verdict):
    first = row(median=1.0, low_ms=before[0], high_ms=before[1])
    now = row(median=median, low_ms=low, high_ms=high)
    (compared,) = record.compare(result(rows=[first]), result(rows=[now]))["rows"]
    assert compared == {
        "suite": "studies", "op": "wkv7", "shape": [8, 4096, 64, 64, 64], "dtype": "bfloat16", "phase": "forward",
        "inputs": "usual", "who": "rwkv_jit", "what": "chunked", "a_ms": 1.0, "b_ms": median,
        "ratio": median, "verdict": verdict,
    }  # fmt: skip
    for rows in ((first, left_out()), (left_out(), now), (left_out(), left_out())):
        (compared,) = record.compare(*(result(rows=[one]) for one in rows))["rows"]
        assert (compared["verdict"], compared["ratio"]) == ("unknown", None)
