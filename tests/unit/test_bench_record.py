"""The recorded result: its file, what pages and pictures show of it, and how two results are compared."""

import math
import shutil
import subprocess
import sys

import pytest
from matplotlib.figure import Figure
from PIL import Image

from bench import plot, record, suites, tables
from rwkv_jit.desk.bench import cases

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
    return {"format": 3, "machines": {MACHINE: ENVIRONMENT}, "rows": many_rows(), "training": []} | changes


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


def test_rows_say_where_they_come_from(monkeypatch):
    monkeypatch.setattr(record, "commit", lambda: COMMIT)
    monkeypatch.setattr(record, "sources_of", lambda row: f"of {row['op']}")
    bare = {name: x for name, x in row().items() if name not in ("machine", "copy_tb_per_s", "commit", "sources")}
    measured = {"env": ENVIRONMENT, "copy_tb_per_s": COPY, "device": "cuda", "rows": [bare]}
    assert record.result_of(measured) == {
        "format": 3, **measured, "machines": {MACHINE: ENVIRONMENT}, "rows": [row(sources="of wkv7")],
    }  # fmt: skip


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


def test_two_kinds_of_gpus_stand_side_by_side(checkout):
    there = [row(suite="wind"), row(suite="wind", who="fla", median=3.0)]
    record.write(result(rows=there))
    here = [row(suite="wind", median=2.0, **ON_H100), row(suite="wind", who="fla", median=8.0, **ON_H100)]
    record.write(result(rows=here, machines={ON_H100["machine"]: H100}))
    found = record.read(checkout / "bench.json")
    assert (found["rows"], list(found["machines"])) == (there + here, [MACHINE, ON_H100["machine"]])
    assert [each.written for each in tables.speedups(found["rows"])] == ["3.0×", "4.0×"]
    table = tables.blocks(found)["wkv7"].splitlines()[2:]
    assert [line.split(" | ")[0] for line in table] == ["| H200", "| H200", "| H100", "| H100"]
    record.write(result(rows=there[:1]))
    assert record.read(checkout / "bench.json")["rows"] == here + there[:1]


def test_pages_say_what_was_measured_where():
    rows = [row(suite="wind"), row("gla", suite="gla", commit="second"), row("gla", suite="family", **ON_H100)]
    assert tables.blocks(result(rows=rows))["machine"].endswith(
        "| suites | measured on | at commit | copy TB/s |\n| --- | --- | --- | --- |\n"
        f"| wind | {MACHINE} | c753463aaa | 4.00 |\n| gla | {MACHINE} | second | 4.00 |\n"
        f"| family | {ON_H100['machine']} | c753463aaa | 4.00 |\n"
    )


def test_rows_of_other_sources_are_stale(monkeypatch, capsys):
    monkeypatch.setattr(record, "sources_of", lambda row: "1" * 64 if row.get("op") != "gla" else "2" * 64)
    rows = [row(), row("gla"), row("gla", suite="gla"), row("wkv6", commit=None, **ON_H100)]
    model = {"machine": MACHINE, "commit": COMMIT, "sources": None}
    found = record.stale(result(rows=rows, training=[model]))
    record.show_stale(found)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  studies   H200  c753463aaaaabbbbbccccc     2      1",
        "  gla       H200  c753463aaaaabbbbbccccc     1      1",
        "  studies   H100  unknown                    1",
        "  training  H200  c753463aaaaabbbbbccccc     1      1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "stale"),
    [
        ("kernel_templates/recurrent/wkv7_recurrent_forward.cu", {"wkv7", "kda", "update", "model"}),
        ("rwkv_jit/derived/delta.py", {"kda", "ssd", "model"}),
        ("rwkv_jit/pool/update.py", {"update"}),
        ("rwkv_jit/schedules/layers.py", {"kda", "ssd", "model"}),
        ("rwkv_jit/schedules/recurrent.py", {"wkv7", "kda", "ssd", "update", "model"}),
        ("rwkv_jit/plain/reference.py", set()),
    ],
)
def test_digests_are_those_of_all_that_runs(path, stale, tmp_path, monkeypatch, root):
    """Of the op's own and of those that it is made of, whichever folder they lie in."""
    for folder in ("kernel_templates", "rwkv_jit"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "record.py").parent.mkdir(exist_ok=True)
    gpu = tmp_path / "tests" / "gpu" / "record.py"
    gpu.parent.mkdir(parents=True)
    gpu.write_bytes(record._DIGESTS.read_bytes())
    monkeypatch.setattr(record, "_DIGESTS", gpu)
    rows = {"wkv7": row(), "kda": row("kda"), "ssd": row("ssd"), "update": row(phase="update"), "model": {"by": "x"}}

    def digests():
        record._digest.cache_clear()
        return {name: record.sources_of(each) for name, each in rows.items()}

    before = digests()
    with open(tmp_path / path, "a", encoding="utf-8") as file:
        file.write("\nEXTRA = 1\n" if path.endswith(".py") else "\nconstexpr int EXTRA = 1;\n")
    after = digests()
    record._digest.cache_clear()
    assert {name for name in rows if before[name] != after[name]} == stale


@pytest.mark.parametrize("phase", ["forward", "forward+backward"])
def test_pages_and_picture_are_those_of_a_record_with_few_rows(phase, root, checkout):
    """As the first part of one has, and one without peers."""
    (checkout / "docs" / "guides").mkdir(parents=True)
    for page in record.PAGES:
        (checkout / page).write_text((root / page).read_text(encoding="utf-8"), encoding="utf-8")
    record.write(result(rows=[row("wkv5", phase=phase)]))
    assert "The record has none of these yet." in (checkout / "docs" / "speed.md").read_text(encoding="utf-8")
    assert (checkout / "docs" / "speedups.png").is_file()


def test_what_recording_writes_is_no_change_of_the_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    files = ("bench.json", "README.md", "docs/speed.md", "docs/speedups.png", "kernel.cu")
    for name in files:
        (tmp_path / name).write_text("before")
    assert record.commit() is None
    git("init")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "all")
    for name in files[:-1]:
        (tmp_path / name).write_text("after")
    head = record.commit()
    assert len(head) == 40
    (tmp_path / "kernel.cu").write_text("after")
    assert record.commit() == f"{head}+"


COSTS = {
    "env": {"gpus": ["NVIDIA H100, sm_90, 80 GiB"], "torch": "2.12.0", "nvrtc": "12.9 0123abcd"},
    "commit": "0123456789abcdef",
    "import_ms": 0.71, "op_import_ms": 31.6, "host_us": {"wkv7": 10.54, "torch.add|out": 4.2},
    "from_disk_us": [508.4, 140.0, 149.0, 500.0], "peers_from_disk_us": {"Triton": [358000.0, 690.0]},
    "together": {"processes": 16, "compiled": 1, "alone_s": 0.614, "slowest_s": 0.641},
    "first_call": {"compiled_ms": 1012.3, "from_disk_ms": 4.512, "call_us": 80.25},
    "one_line": {"rwkv_jit": {"compiled_ms": 61.4, "from_disk_ms": 1.5, "call_us": 7.04}},
}  # fmt: skip


def test_service_is_recorded_beside_the_suites(checkout):
    with pytest.raises(FileNotFoundError):
        record.write_service(COSTS)
    record.write(result())
    record.write_service(COSTS)
    assert record.read(checkout / "bench.json") == result(service=COSTS)
    record.write(result(rows=[row(median=2.0)]))
    assert record.read(checkout / "bench.json")["service"] == COSTS


@pytest.mark.parametrize("there", ["{", '{"rows": [], "format": 0}'])
def test_a_record_that_cannot_be_read_costs_no_measurement(there, checkout):
    (checkout / "bench.json").write_text(there)
    with pytest.raises(ValueError, match="expected"):
        record.write_service(COSTS)
    assert (checkout / "bench.json").read_text() == there
    record.write(result())
    assert record.read(checkout / "bench.json") == result(service=None)


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


# ---- tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"shape": (8, 4096, 64, 64, 64)}, "(8, 4096, 64, 64)"),
        ({"shape": (32, 2048, 4, 256, 512)}, "(32, 2048, 4, K = 256, V = 512)"),
        ({"shape": (1, 768, 768), "inputs": "packed"}, "(1, 768, 768), 16 packed"),
    ],
)
def test_shapes_in_words(given, text):
    assert tables.shape_of(row(**given)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00514, "0.00514"), (0.14, "0.140"), (0.9999, "1.00"), (2.4, "2.40"), (11.24, "11.2"), (99.97, "100")],
)
def test_times_have_three_digits(value, text):
    assert tables.milliseconds(value) == text


def test_machine_in_words():
    assert tables.machine({"env": ENVIRONMENT, "device": "cuda"}) == MACHINE
    cpu = {"env": {"gpus": [], "torch": "2.13.0+cpu", "nvrtc": "there is none"}, "device": "cpu"}
    assert tables.machine(cpu) == "CPU reference; not the speed of the kernels, torch 2.13.0+cpu"


def test_a_table_has_a_line_for_each_contestant_and_a_column_for_each_phase():
    rows = [
        row(median=0.7, error=2e-3, peak_mib=100.0, host_us=10.66),
        row(**BOTH, median=2.25, error=5e-3, peak_mib=300.4, host_us=3185.0),
        row(who="fla", what="a|b", median=200.0) | dict.fromkeys(MISSING),
        row(who="fla", what="a|b", median=400.0, **BOTH) | dict.fromkeys(MISSING),
        left_out("no\n room", who="torch", what="loop"),
        left_out("no room", who="fla", what="b"),
        row(inputs="strong"),
        row("wkv6"),
    ]
    assert tables.blocks(result(rows=rows))["wkv7"] == (
        "| GPU | shape | dtype | by | forward ms | forward + backward ms | rwkv_jit is faster | host us | error |"
        " memory MiB |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| H200 | (8, 4096, 64, 64) | bfloat16 | rwkv_jit chunked | 0.700 (0.686 to 0.728) 71% | 2.25 (2.21 to 2.34)"
        " 22% |  | 10.7, 3185.0 † | 5.0e-03 | 300 |\n"
        "| H200 | (8, 4096, 64, 64) | bfloat16 | FLA a/b | 200 | 400 | 285.7×, 177.8× |  |  |  |\n"
        "| H200 | (8, 4096, 64, 64) | bfloat16 | torch loop | left out |  |  |  |  |  |\n"
        "| H200 | (8, 4096, 64, 64) | bfloat16 | FLA b | left out |  |  |  |  |  |\n"
        "| H200 | (8, 4096, 64, 64), strong decays | bfloat16 | rwkv_jit chunked | 1.00 (0.980 to 1.04) 50% |  |  |"
        " 12.0 | 4.0e-03 | 512 |\n"
        "\nLeft out:\n\n"
        "- no room: torch loop (8, 4096, 64, 64) bfloat16 forward; FLA b (8, 4096, 64, 64) bfloat16 forward\n"
    )


def test_blocks_are_the_machine_the_picture_the_speedups_and_the_ops():
    blocks = tables.blocks(result())
    ops = *cases.OPS, *cases.DERIVED
    others = ["machine", "picture", "speedups", "float32", "training", "service", "errors", "inference"]
    assert list(blocks) == [*others, *ops]
    assert all(blocks[name] == "The record has none of these yet.\n" for name in ("float32", "training", "inference"))
    empty = {op for op in ops if blocks[op] == "The record has none of these yet.\n"}
    assert empty == {"wkv5", "linear_attention", *cases.DERIVED}
    assert blocks["machine"].startswith("Medians")
    assert blocks["picture"] == (
        f"![{tables.sentence(result()['rows'])}](docs/speedups.png)\n\nNo other implementation is faster.\n"
    )
    assert all(text.endswith("\n") for text in blocks.values())


def test_float32_is_held_against_bfloat16_on_the_same_gpu():
    float32 = {"suite": "float32", "dtype": "float32"}
    rows = [
        row(suite="front", median=0.5), row(**float32, median=2.45), row(**BOTH, suite="front", median=2.0),
        row(**BOTH, **float32, median=26.0), row("gla", **float32), row(suite="wind", median=9.0),
        row(**float32, **ON_H100), row(suite="front", who="fla", median=9.0),
    ]  # fmt: skip
    assert tables.blocks(result(rows=rows))["float32"].splitlines()[2:] == [
        "| wkv7 (8, 4096, 64, 64), forward | 2.45 | 0.500 | 5× | H200, c753463aaa |",
        "| wkv7 (8, 4096, 64, 64), forward + backward | 26.0 | 2.00 | 13× | H200, c753463aaa |",
    ]


def test_steps_of_models_name_the_dtype_of_their_parameters():
    step = {
        "part": "steps", "by": "rwkv_jit", "parameters": "bfloat16", "layers": 24, "width": 1024, "batch": 8,
        "tokens": 4096, "median_ms": 194.2, "tokens_per_s": 168733.0, "flops_use": 0.402, "peak_mib": 55091.2,
        "skipped": None, "machine": MACHINE, "commit": COMMIT,
    }  # fmt: skip
    rows = [step, step | {"by": "fla", "skipped": "no memory"}, {"part": "layer", "skipped": None}]
    assert tables.blocks(result(training=rows))["training"].splitlines()[2:] == [
        "| 24 x 1024, 8 x 4096 tokens | rwkv_jit | bfloat16 | 194 | 168,733 | 40% | 54 | H200, c753463aaa |"
    ]


def test_errors_are_a_table_of_results():
    errors = {"y": 1e-3, "dr": 2.5e-3}
    rows = [row(**BOTH, errors=errors, other="recurrent", other_error=3e-3), row(who="fla", errors=errors), row()]
    assert tables.blocks(result(rows=rows))["errors"].splitlines()[2:] == [
        "| wkv7 (8, 4096, 64, 64) bfloat16 | rwkv_jit chunked | forward+backward | y 1.0e-03, dr 2.5e-03 | "
        "3.0e-03 from recurrent |"
    ]
    assert tables.blocks(result())["errors"] == "The record has none of these yet.\n"


def test_updates_are_a_table_of_their_own():
    update = {"shape": (32, 1, 64, 64, 64), "phase": "update"}
    errors = {"y": 1.7e-3, "state": 4e-8}
    rows = [
        row(),
        row(**update, what="update", median=0.1, fraction=0.9, errors=errors, error=1.7e-3),
        row(**update, who="torch", what="copy", median=0.08, errors={}, error=None),
        row(**update, who="fla", what="step", median=0.2, errors={"y": 2e-3, "state": 1e-7}, host_us=250.0),
        row(**update, what="update", inputs="bf16-states", median=0.05, fraction=0.8, errors=errors),
        left_out("no\n room", **update, who="fla", what="step", inputs="bf16-states"),
    ]
    blocks = tables.blocks(result(rows=rows))
    assert blocks["inference"] == (
        "| GPU | call | dtype | by | update ms | rwkv_jit is faster | host us | error of y | of the states |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| H200 | wkv7 (32, 1, 64, 64) | bfloat16 | rwkv_jit update | 0.100 (0.0980 to 0.104) 90% |  | 12.0 | 1.7e-03"
        " | 4.0e-08 |\n"
        "| H200 | wkv7 (32, 1, 64, 64) | bfloat16 | torch copy | 0.0800 (0.0784 to 0.0832) 625% | 0.8× | 12.0 |  |  |\n"
        "| H200 | wkv7 (32, 1, 64, 64) | bfloat16 | FLA step | 0.200 (0.196 to 0.208) 250% | 2.0× | 250.0 † | 2.0e-03"
        " | 1.0e-07 |\n"
        "| H200 | wkv7 (32, 1, 64, 64), bfloat16 states | bfloat16 | rwkv_jit update | 0.0500 (0.0490 to 0.0520) 80% |"
        "  | 12.0 | 1.7e-03 | 4.0e-08 |\n"
        "| H200 | wkv7 (32, 1, 64, 64), bfloat16 states | bfloat16 | FLA step | left out |  |  |  |  |\n"
        "\nLeft out:\n\n- no room: FLA step (32, 1, 64, 64), bfloat16 states bfloat16 update\n"
    )
    assert blocks["wkv7"] == tables.blocks(result(rows=rows[:1]))["wkv7"]
    assert blocks["errors"] == "The record has none of these yet.\n"


def test_service_is_a_table_of_its_own():
    assert tables.blocks(result())["service"] == "Not measured: `python -m bench service --record` does it.\n"
    assert tables.blocks(result(service=COSTS))["service"] == (
        "NVIDIA H100, sm_90, 80 GiB, torch 2.12.0, NVRTC 12.9, commit 0123456789.\n\n"
        "|  | of | measured |\n| --- | --- | --- |\n"
        "| host time of a call | wkv7 | 10.5 us |\n"
        "| host time of a call | torch.add/out | 4.2 us |\n"
        "| host time of a call | wkv7, forward and backward | 80.2 us |\n"
        "| host time of a call | one line, rwkv_jit | 7.0 us |\n"
        "| a kernel from disk in a new process, the first, each other | rwkv_jit | 0.508, 0.149 ms |\n"
        "| a kernel from disk in a new process, the first, each other | Triton | 358, 0.690 ms |\n"
        "| first call in a new process, nothing compiled, from disk | wkv7, forward and backward | 1012, 4.51 ms |\n"
        "| first call in a new process, nothing compiled, from disk | one line, rwkv_jit | 61.4, 1.50 ms |\n"
        "| 16 processes want a kernel that is nowhere | 1 compiled | the slowest has it after 0.64 s, a process alone "
        "0.61 s |\n"
        "| import | rwkv_jit, after torch | 0.7 ms |\n"
        "| import | its first op | 31.6 ms |\n"
    )


def test_what_calls_take_is_compared_with_the_fastest_peer_of_the_same_case():
    rows = [
        row(median=2.0), row(what="recurrent", median=0.5),  # a call takes the first
        row(who="fla", what="slow", median=9.0), row(who="torch", what="best", median=6.0), left_out(who="fla"),
        row(who="fla", median=1.0, phase="backward"), row(who="fla", median=1.0, inputs="strong"),
    ]  # fmt: skip
    (found,) = tables.speedups(rows)
    assert (found.ours["what"], found.peer["what"], found.times) == ("chunked", "best", 3.0)
    assert tables.speedups([left_out(), row(what="recurrent"), row(who="fla")]) == []  # what calls take was left out
    assert tables.speedups([row(), left_out(who="fla")]) == []
    (slower,) = tables.speedups([row(median=2.0), row(who="fla", median=1.0)])
    assert slower.written == "0.5×"  # and says so


def test_what_is_slower_is_said_in_words_the_slowest_first():
    decode = {"phase": "decode", "shape": (1, 1, 32, 64, 64)}
    rows = [
        row(**decode, median=0.004), row(**decode, who="fla", median=0.003),
        row("kda", median=2.0), row("kda", who="cudnn", median=0.5), row("kda", who="fla", median=1.0),
        row("kda", **BOTH, median=2.0), row("kda", **BOTH, who="cudnn", median=1.0), row("gla", who="fla", median=0.1),
        row("gla", **ON_H100), row("wkv6"), row("wkv6", who="fla", median=2.0), left_out(op="ssd"),
        row(phase="update"), row(phase="update", who="torch", median=0.5),
    ]  # fmt: skip
    assert tables.blocks(result(rows=rows))["picture"].splitlines()[2:] == [
        "Slower than another implementation: `kda` (8, 4096, 64, 64) on one H200 (forward 2.00 ms where cuDNN takes "
        "0.500, forward + backward 2.00 ms where cuDNN takes 1.00); `wkv7` (1, 1, 32, 64) on one H200 (one token "
        "0.00400 ms where FLA takes 0.00300)."
    ]


def test_the_first_page_has_a_line_for_each_call_with_gradients_one_op_after_another():
    front = {"suite": "front"}
    rows = [
        row(**front, median=0.5), row(**front, who="fla", what="chunk", median=2.0),
        row(**front, **BOTH, median=2.0, host_us=3000.0), row(**front, **BOTH, who="wind_rwkv", what="c", median=3.0),
        row("gla", **front, **BOTH, median=4.0), row("gla", **front, **BOTH, who="cudnn", what="g", median=3.0),
        left_out("no room", op="gla", **front, **BOTH, who="fla", what="h"),
        row("wkv6", **front), row("wkv6", **front, who="fla", median=2.0),  # forward alone
        row(**front, **BOTH, shape=(1, 2, 3, 4, 4)), row(**front, **BOTH, shape=(1, 2, 3, 4, 4), who="fla", median=7.0),
        row("wkv4", **BOTH), row("wkv4", **BOTH, who="fla", median=2.0),  # of another suite
    ]  # fmt: skip
    assert tables.blocks(result(rows=rows))["speedups"].splitlines()[2:] == [
        "| wkv7 | (8, 4096, 64, 64) | bfloat16, H200 | 0.500 | 2.00 FLA chunk (**4.0×**) | 2.00 | 3.00 Wind c "
        "(**1.5×**) | 12.0, 3000.0 † |",
        "| wkv7 | (1, 2, 3, 4) | bfloat16, H200 |  |  | 1.00 | 7.00 FLA chunked (**7.0×**) | 12.0 |",
        "| gla | (8, 4096, 64, 64) | bfloat16, H200 |  |  | 4.00 | 3.00 cuDNN g (0.8×, slower) | 12.0 |",
        "",
        "bfloat16, on one H200, at commit c753463aaa, beside FLA, Wind, cuDNN. †: the host takes longer than the "
        "GPU, so calls one after another take the host's time.",
        "", "Left out:", "", "- no room: FLA h (8, 4096, 64, 64) bfloat16 forward+backward",
    ]  # fmt: skip


def test_the_first_page_has_eight_rows_at_most_of_calls_that_are_measured_in_one_run():
    calls = {entry.case._replace(phase="") for entry in suites.entries_of(["front"])}
    assert len(calls) == 8
    assert {"wkv7", "kda", "ssd"} < {case.op for case in calls}


# ---- pictures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws by a function; returns the figure, which is not saved."""

    def draw(function, *given):
        kept = []
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append(figure))
            function(*given)
        return kept[0]

    return draw


def texts(axis):
    return [text.get_text() for text in axis.texts]


_SLOWER = [row("gla", suite="front", who=who, **BOTH, median=m) for who, m in (("rwkv_jit", 2.0), ("cudnn", 1.0))]


def test_the_picture_has_a_bar_for_each_of_the_first_calls_of_the_first_page(drawn, tmp_path):
    rows = [{**each, "suite": "front"} for each in many_rows()]
    (axis,) = drawn(plot.draw_speedups, rows, tmp_path).axes
    assert texts(axis) == [
        "wkv7 (8, 4096, 64, 64): 6.4× vs FLA", "wkv7 (8, 4096, 32, 128): 6.4× vs FLA",
        "timex (32, 768, 768): 110.0× vs torch",
    ]  # fmt: skip
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([6.43, 6.43, 110], abs=0.01)
    assert axis.get_title(loc="left").endswith(", bfloat16, H200; the marks are at 1×")
    colours = [bar.get_facecolor() for bar in drawn(plot.draw_speedups, [*rows, *_SLOWER], tmp_path).axes[0].patches]
    assert len(set(colours[:3])) == 1
    assert colours[3] != colours[0]  # what is slower looks so
    assert drawn(plot.draw_speedups, [row()], tmp_path).axes[0].containers[0].patches == []
    many = [row(op, suite="front", who=who, **BOTH) for op in cases.OPS for who in ("rwkv_jit", "fla")]
    assert len(drawn(plot.draw_speedups, many, tmp_path).axes[0].patches) == 6


def test_the_picture_can_be_read_when_it_is_small_and_on_any_page(drawn, tmp_path):
    rows = [
        row("linear_attention", (8, 4096, 32, 128, 64), suite="front", who=who, **BOTH)
        for who in ("rwkv_jit", "mamba_ssm")
    ]
    figure = drawn(plot.draw_speedups, rows, tmp_path)
    figure.canvas.draw()
    (label,) = figure.axes[0].texts
    assert label.get_window_extent().x1 <= figure.bbox.x1
    assert label.get_fontsize() / 72 * 400 / figure.get_figwidth() > 11  # pixels, at a width of 400
    plot.draw_speedups(rows, tmp_path)
    with Image.open(tmp_path / tables.PICTURE) as picture:
        assert picture.getpixel((0, 0))[3] == 0  # nothing is behind it
        inks = {pixel[:3] for _, pixel in picture.getcolors(2**24) if pixel[3] == 255}
    assert all(60 < sum(ink) / 3 < 200 for ink in inks)  # neither white nor black


def test_bars_are_medians_with_whiskers_and_the_floor(drawn):
    rows = [
        left_out("no\nroom", who="torch", what="loop"), row(who="fla", what="chunk", median=4.0), row(median=2.0),
        row(phase="backward") | dict.fromkeys(MISSING),
    ]  # fmt: skip
    bars, roof = drawn(plot.draw, result(rows=rows), "x.png").subfigs
    axis, bare = (axis for axis in bars.axes if axis.axison)
    assert axis.get_title(loc="left") == "wkv7, forward\n(8, 4096, 64, 64) bfloat16"
    assert [patch.get_width() for patch in axis.patches] == [2.0, 4.0]
    (whiskers,) = [each for each in axis.collections if hasattr(each, "get_segments")]
    ends = [[x for x, _ in segment] for segment in whiskers.get_segments()]
    assert ends == [pytest.approx([1.96, 2.08]), pytest.approx([3.92, 4.16])]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["rwkv_jit chunked", "FLA chunk", "torch loop"]
    assert texts(axis) == ["2.00  25%", "4.00  12%", "left out: no room"]
    assert [list(line.get_xdata()) for line in axis.lines if line.get_linestyle() == "--"] == [[0.5, 0.5]]
    (whiskers,) = [each for each in bare.collections if hasattr(each, "get_segments")]
    assert all(math.isnan(x) for segment in whiskers.get_segments() for x, _ in segment)
    (axis,) = roof.axes
    assert texts(axis) == ["a copy: 4.00 TB/s"]
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines[:2]]
    assert points == [(2.0, 0.5), (2.0, 1.0)]  # GB, TB/s


@pytest.mark.parametrize(
    ("op", "shapes", "over", "sizes"),
    [
        ("wkv7", ((8, 64, 32, 64, 64), (8, 64, 32, 128, 128)), "N, head size", [64, 128]),  # of the same heads
        ("wkv4", ((8, 64, 128), (8, 32, 128)), "T, tokens", [32, 64]),
        ("timex", ((8, 64, 128), (8, 64, 256)), "T, tokens", [128, 256]),
        ("timex", ((8, 64, 128), (4, 64, 128)), "B, batch", [4, 8]),
    ],
)
def test_dimensions_are_those_of_the_op(op, shapes, over, sizes):
    ((panel, lines),) = plot.scaling([row(op, shape) for shape in shapes]).items()
    assert panel[1] == over
    assert [list(line) for line in lines.values()] == [sizes]


def test_pictures_are_files_and_faults_are_said(tmp_path, monkeypatch):
    plot.draw(result(), tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.width == 1650
        assert len(picture.convert("RGB").getcolors(2**24)) > 50
    with pytest.raises(ValueError, match="expected a result with a measured row, got none"):
        plot.draw(result(rows=[left_out()]), tmp_path / "x.png")
    plot.check("X.PNG")
    for name in ("x.doc", "x", "png"):
        with pytest.raises(ValueError, match=r"--plot: expected a file that ends in .*\.png, .*got .*" + name):
            plot.check(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="^--plot: needs matplotlib; pip install matplotlib$"):
        plot.check("x.png")


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


@pytest.mark.parametrize(
    "other",
    [{"suite": None}, {"op": "wkv6"}, {"shape": (8, 4096, 64, 64, 32)}, {"dtype": "float16"}, {"phase": "backward"},
     {"who": "fla"}, {"what": "recurrent"}, {"inputs": "strong"}],
)  # fmt: skip
def test_rows_are_matched_by_all_that_names_them(other):
    found = record.compare(result(rows=[row()]), result(rows=[row(**other)]))
    assert found["rows"] == []
    assert found["only_a"] == ["studies: wkv7 (8, 4096, 64, 64) bfloat16 forward, rwkv_jit chunked"]
    assert len(found["only_b"]) == 1
    assert found["only_b"] != found["only_a"]


def test_a_row_that_is_there_twice_is_an_error():
    twice = result(rows=[row(), row(median=2.0)])
    for call in (lambda: record.compare(twice, result()), lambda: record.compare(result(), twice)):
        with pytest.raises(ValueError, match=r"rows: expected each once, got two of studies: wkv7 \(8, 4096, 64, 64\)"):
            call()


def test_a_comparison_in_print(capsys):
    env = {"gpus": ["another GPU"], "torch": "2.11.0", "nvrtc": "12.9 0123abcd", "cache": "/elsewhere"}
    a = result(rows=[row(), row("wkv6"), row("gla"), left_out(op="wkv5")])
    now = {"machine": "another GPU, torch 2.11.0", "commit": None}
    rows = [
        row(median=0.5, sources="3" * 64, **now), row("wkv6", median=1.5, **now), left_out(op="wkv5", **now),
        row("timex", (32, 768, 768), **now),
    ]  # fmt: skip
    record.show_comparison(record.compare(a, result(rows=rows, machines={now["machine"]: env})))
    assert capsys.readouterr().out == (
        "commit: c753463aaaaabbbbbccccc before, unknown now\n"
        "gpus: NVIDIA H200, sm_90, 139 GiB before, another GPU now\n"
        "nvrtc: 13.0 0123abcd before, 12.9 0123abcd now\n"
        "sources of wkv7: 1111111111 before, 3333333333 now\n"
        "  case                                     by                before ms  now ms  now / before  verdict\n"
        "  wkv7 (8, 4096, 64, 64) bfloat16 forward  rwkv_jit chunked       1.00   0.500         0.500  faster\n"
        "  wkv6 (8, 4096, 64, 64) bfloat16 forward  rwkv_jit chunked       1.00    1.50         1.500  slower\n"
        "  wkv5 (8, 4096, 64, 64) bfloat16 forward  rwkv_jit chunked          -       -             -  unknown\n"
        "Only before: studies: gla (8, 4096, 64, 64) bfloat16 forward, rwkv_jit chunked\n"
        "Only now: studies: timex (32, 768, 768) bfloat16 forward, rwkv_jit chunked\n\n"
        "1 faster, 1 slower, 0 the same, 1 unknown. Faster and slower: no overlap of quartiles, and medians over "
        "2% apart.\n"
    )
