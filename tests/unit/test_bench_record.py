"""The recorded result, what the pages show of it, and how two results are compared."""

import importlib.util
import json
from pathlib import Path

import pytest

from rwkv_jit.bench import record, speedups, words
from rwkv_jit.bench import result as bench_result
from rwkv_jit.errors import RwkvJitError

_spec = importlib.util.spec_from_file_location("made_up_result", Path(__file__).with_name("made_up_result.py"))
made_up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made_up)
row, result, left_out = made_up.row, made_up.result, made_up.left_out

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
    monkeypatch.setattr(record, "checkout", lambda: tmp_path)
    return tmp_path


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


# ---- the checkout ------------------------------------------------------------------------------------------------


def test_pages_show_all_that_is_recorded(root):
    """Else: `record.write` of what `rwkv-jit bench --json` printed, or markers for what was recorded."""
    assert record.disagreements(root) == []
    shown = {name: page for page, text in record._pages(root).items() for name in record._shown(text, page)}
    assert set(shown) == set(record.blocks(record.read(root / "bench.json")))


def test_root_is_the_checkout(root, monkeypatch):
    module = root / "rwkv_jit" / "bench" / "result.py"  # the tests may run with an installed one
    monkeypatch.setattr(bench_result, "__file__", str(module))
    assert record.root() == root


def test_an_installed_package_has_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_PACKAGE", tmp_path / "site-packages" / "rwkv_jit")
    monkeypatch.setattr(bench_result, "__file__", str(tmp_path / "site-packages" / "rwkv_jit" / "bench" / "result.py"))
    with pytest.raises(RwkvJitError, match="--record: expected rwkv_jit in a checkout, got one in .*site-packages"):
        record.write(result())
    assert list(tmp_path.iterdir()) == []


# ---- writing -----------------------------------------------------------------------------------------------------


def test_writing_fills_the_readme_and_they_agree(checkout):
    assert record.write(result()) == checkout / "bench.json"
    assert record.read(checkout / "bench.json") == result(service=None)
    text = (checkout / "README.md").read_text(encoding="utf-8")
    blocks = record.blocks(result())
    assert text == TEXT.replace("an old table\n", blocks["wkv7"]).replace(
        "<!-- bench:machine -->\n", f"<!-- bench:machine -->\n{blocks['machine']}"
    )
    assert record.disagreements(checkout) == []
    record.write(result())
    assert (checkout / "README.md").read_text(encoding="utf-8") == text


def test_a_table_has_a_line_for_each_contestant_and_a_column_for_each_phase():
    rows = [
        row(median=0.7, error=2e-3, peak_mib=100.0, host_us=10.66),
        row(median=2.25, phase="forward+backward", error=5e-3, peak_mib=300.4, host_us=185.0),
        row(who="fla", what="a|b", median=200.0) | dict.fromkeys(made_up.MISSING),
        row(who="fla", what="a|b", median=400.0, phase="forward+backward") | dict.fromkeys(made_up.MISSING),
        left_out("no\n room", who="torch", what="loop"),
        left_out("no room", who="fla", what="b"),
        row("wkv6"),
    ]
    assert record.blocks(result(rows=rows))["wkv7"] == (
        "| shape | dtype | by | forward ms | forward + backward ms | rwkv_jit is faster | host us | error | memory MiB"
        " |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| (8, 4096, 64, 64) | bfloat16 | rwkv_jit chunked | 0.700 (0.686 to 0.728) 71% | 2.25 (2.21 to 2.34) 22%"
        " |  | 10.7 | 5.0e-03 | 300 |\n"
        "| (8, 4096, 64, 64) | bfloat16 | fla a/b | 200 | 400 | 285.7×, 177.8× |  |  |  |\n"
        "| (8, 4096, 64, 64) | bfloat16 | torch loop | left out |  |  |  |  |  |\n"
        "| (8, 4096, 64, 64) | bfloat16 | fla b | left out |  |  |  |  |  |\n"
        "\nLeft out:\n\n"
        "- no room: torch loop (8, 4096, 64, 64) bfloat16 forward; fla b (8, 4096, 64, 64) bfloat16 forward\n"
    )


def test_blocks_are_the_machine_the_picture_the_speedups_and_the_ops():
    blocks = record.blocks(result())
    assert list(blocks) == [
        "machine", "picture", "speedups", "service", "wkv7", "wkv6", "gla", "timex", "wkv4",
    ]  # fmt: skip
    assert blocks["machine"].startswith(f"{words.machine(result())}. Medians")
    assert "floor over the median" in blocks["machine"]
    assert "floor" not in record.blocks(result(copy_tb_per_s=None))["machine"]
    assert blocks["picture"] == f"![{speedups.sentence(result()['rows'])}](docs/speedups.svg)\n"
    assert all(text.endswith("\n") for text in blocks.values())


COSTS = {
    "env": {"gpus": ["NVIDIA H100, sm_90, 80 GiB"], "torch": "2.12.0", "nvrtc": "12.9 0123abcd"},
    "commit": "0123456789abcdef",
    "import_ms": 0.71, "op_import_ms": 31.6, "host_us": {"wkv7": 10.54, "torch.add|out": 4.2},
    "from_disk_us": [508.4, 140.0, 149.0, 500.0], "peers_from_disk_us": {"Triton": [358000.0, 690.0]},
    "together": {"processes": 16, "compiled": 1, "alone_s": 0.614, "slowest_s": 0.641},
    "first_call": {"compiled_ms": 1012.3, "from_disk_ms": 4.512, "call_us": 80.25},
    "one_line": {"rwkv_jit": {"compiled_ms": 61.4, "from_disk_ms": 1.5, "call_us": 7.04}},
}  # fmt: skip


def test_service_is_a_table_of_its_own():
    assert record.blocks(result())["service"] == "Not measured: `rwkv-jit bench --latency --record` does it.\n"
    assert record.blocks(result(service=COSTS))["service"] == (
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


def test_a_suite_and_the_service_are_recorded_one_after_another(checkout):
    edit(checkout / "README.md", "The end.", "<!-- bench:service -->\n<!-- /bench -->")
    with pytest.raises(FileNotFoundError):
        record.write_service(COSTS)
    record.write(result())
    assert record.write_service(COSTS) == checkout / "bench.json"
    assert record.read(checkout / "bench.json") == result(service=COSTS)
    assert "16 processes want a kernel" in (checkout / "README.md").read_text(encoding="utf-8")
    assert record.disagreements(checkout) == []
    record.write(result(commit="another"))
    assert record.read(checkout / "bench.json") == result(commit="another", service=COSTS)


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
def test_faults_of_a_readme_cost_no_measurement(old, new, said, checkout):
    edit(checkout / "README.md", old, new)
    before = (checkout / "README.md").read_text()
    with pytest.raises(ValueError, match=said):
        record.write(result())
    assert record.read(checkout / "bench.json") == result(service=None)
    assert (checkout / "README.md").read_text() == before


def test_what_no_gpu_measured_is_not_recorded(checkout):
    with pytest.raises(ValueError, match="expected a result of a GPU, got one of 'cpu'"):
        record.write(made_up.on_cpu())
    assert not (checkout / "bench.json").exists()
    assert (checkout / "README.md").read_text() == TEXT


def test_picture_is_drawn_where_a_page_shows_one(checkout):
    (checkout / "docs").mkdir()
    (checkout / "docs" / "speed.md").write_text("<!-- bench:wkv6 -->\n<!-- /bench -->\n")
    record.write(result())
    assert not (checkout / "docs" / "speedups.svg").exists()
    edit(checkout / "README.md", "The end.", "<!-- bench:picture -->\n<!-- /bench -->")
    record.write(result())
    assert record.disagreements(checkout) == []
    edit(checkout / "docs" / "speedups.svg", ">6.4×<", ">6.5×<")
    assert record.disagreements(checkout) == ["docs/speedups.svg is not that of bench.json"]
    (checkout / "docs" / "speedups.svg").unlink()
    assert record.disagreements(checkout) == ["docs/speedups.svg is not that of bench.json"]


def test_every_page_is_filled_and_held_to_the_record(checkout):
    (checkout / "docs").mkdir()
    page = checkout / "docs" / "speed.md"
    page.write_text("<!-- bench:gla -->\n<!-- /bench -->\n")
    record.write(result())
    assert page.read_text(encoding="utf-8") == f"<!-- bench:gla -->\n{record.blocks(result())['gla']}<!-- /bench -->\n"
    edit(page, "0.100 (", "0.200 (")
    assert record.disagreements(checkout) == ["bench:gla of docs/speed.md is not that of bench.json"]


# ---- disagreements -----------------------------------------------------------------------------------------------


def test_nothing_recorded_and_nothing_shown_agree(checkout):
    (checkout / "README.md").write_text("# A title\n")
    assert record.disagreements(checkout) == []


def test_tables_without_a_record_disagree(checkout):
    assert record.disagreements(checkout) == [
        "README.md shows bench:machine, and there is no bench.json",
        "README.md shows bench:wkv7, and there is no bench.json",
    ]


def test_a_record_that_is_not_shown_disagrees(checkout):
    record.write(result())
    (checkout / "README.md").write_text("# A title\n")
    (said,) = record.disagreements(checkout)
    assert said.startswith("README.md and docs/speed.md show nothing of bench.json: no <!-- bench:machine -->")


@pytest.mark.parametrize(
    ("file", "old", "new", "which"),
    [
        ("README.md", "0.700 (", "0.600 (", ["wkv7"]),
        ("README.md", "torch 2.11.0", "torch 2.12.0", ["machine"]),
        ("bench.json", '"median_ms": 0.7,', '"median_ms": 0.6,', ["wkv7"]),
        ("bench.json", '"gpus"', '"chips"', ["machine"]),
        ("README.md", "bench:wkv7", "bench:wkv8", ["wkv8"]),
    ],
)
def test_any_change_of_one_of_the_two_disagrees(file, old, new, which, checkout):
    record.write(result())
    edit(checkout / file, old, new)
    assert record.disagreements(checkout) == [f"bench:{name} of README.md is not that of bench.json" for name in which]


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "expected JSON of `rwkv-jit bench --json`"),
        (b"\xff\xfe\x00", "expected JSON of `rwkv-jit bench --json`"),
        (b"[]", "got JSON without its rows"),
        (b'{"format": 1}', "got JSON without its rows"),
        (b'{"rows": []}', "expected a result of format 1, got None"),
        (b'{"rows": [], "format": 2}', "expected a result of format 1, got 2"),
    ],
)
def test_what_is_no_result_is_told(content, said, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json: ") as caught:
        record.read(tmp_path / "a.json")
    assert said in str(caught.value)


# ---- two results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "median", "high", "verdict"),
    [
        (0.80, 0.90, 0.97, "faster"),
        (0.80, 0.90, 0.98, "the same"),  # 0.98 is the first one's lower quartile
        (1.04, 1.05, 1.06, "the same"),
        (1.05, 1.06, 1.07, "slower"),
        (0.50, 0.60, 2.00, "the same"),
        (None, 0.10, 0.11, "unknown"),
        (0.09, 0.10, None, "unknown"),
    ],
)
def test_verdict_is_that_of_the_quartiles(low, median, high, verdict):
    a, b = result(rows=[row(median=1.0)]), result(rows=[row(median=median, low_ms=low, high_ms=high)])
    (found,) = record.compare(a, b)["rows"]
    assert found == {
        "suite": "studies", "op": "wkv7", "shape": [8, 4096, 64, 64, 64], "dtype": "bfloat16", "phase": "forward",
        "who": "rwkv_jit", "what": "chunked", "a_ms": 1.0, "b_ms": median, "ratio": median, "verdict": verdict,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("median", "verdict"), [(0.975, "faster"), (0.985, "the same"), (1.015, "the same"), (1.025, "slower")]
)
def test_what_another_machine_may_do_is_no_verdict(median, verdict):
    first = row(median=1.0, low_ms=0.999, high_ms=1.001)
    now = row(median=median, low_ms=median - 0.001, high_ms=median + 0.001)
    (found,) = record.compare(result(rows=[first]), result(rows=[now]))["rows"]
    assert found["verdict"] == verdict


def test_a_row_that_was_left_out_has_no_verdict():
    for first, second in ((row(), left_out()), (left_out(), row()), (left_out(), left_out())):
        (found,) = record.compare(result(rows=[first]), result(rows=[second]))["rows"]
        assert (found["verdict"], found["ratio"]) == ("unknown", None)


@pytest.mark.parametrize(
    "other",
    [{"suite": None}, {"op": "wkv6"}, {"shape": (8, 4096, 64, 64, 32)}, {"dtype": "float16"}, {"phase": "backward"},
     {"who": "fla"}, {"what": "recurrent"}],
)  # fmt: skip
def test_rows_are_matched_by_all_that_names_them(other):
    found = record.compare(result(rows=[row()]), result(rows=[row(**other)]))
    assert found["rows"] == []
    assert found["only_a"] == ["studies: wkv7 (8, 4096, 64, 64) bfloat16 forward, rwkv_jit chunked"]
    assert len(found["only_b"]) == 1
    assert found["only_b"] != found["only_a"]


def test_order_of_rows_does_not_matter():
    found = record.compare(result(), result(rows=made_up.rows()[::-1]))
    assert (found["only_a"], found["only_b"], found["differs"]) == ([], [], [])
    assert len(found["rows"]) == len(made_up.rows())
    assert {each["verdict"] for each in found["rows"]} == {"the same", "unknown"}


def test_a_row_that_is_there_twice_is_an_error():
    twice = result(rows=[row(), row(median=2.0)])
    for call in (lambda: record.compare(twice, result()), lambda: record.compare(result(), twice)):
        with pytest.raises(ValueError, match=r"rows: expected each once, got two of studies: wkv7 \(8, 4096, 64, 64\)"):
            call()
    with pytest.raises(ValueError, match="rows: expected each once"):
        record.blocks(twice)


def test_other_conditions_are_said():
    env = {"gpus": ["another GPU"], "torch": "2.11.0", "nvrtc": "12.9 0123abcd", "cache": "/elsewhere"}
    other = result(env=env, commit=None, sources={"wkv7": "1" * 64, "wkv6": "3" * 64, "gla": "4" * 64})
    assert record.compare(result(), other)["differs"] == [
        {"what": "commit", "a": "c753463aaaaabbbbbccccc", "b": None},
        {"what": "gpus", "a": ["NVIDIA H200, sm_90, 139 GiB"], "b": ["another GPU"]},
        {"what": "nvrtc", "a": "13.0 0123abcd", "b": "12.9 0123abcd"},
        {"what": "sources of wkv6", "a": "2" * 64, "b": "3" * 64},
        {"what": "sources of gla", "a": None, "b": "4" * 64},
    ]


def test_a_comparison_in_print(capsys):
    env = {"gpus": ["another GPU"], "torch": "2.11.0", "nvrtc": "13.0 0123abcd"}
    a = result(rows=[row(), row("wkv6"), row("gla"), left_out(op="wkv5")])
    b = result(
        rows=[row(median=0.5), row("wkv6", median=1.5), left_out(op="wkv5"), row("timex", (32, 768, 768))], env=env
    )
    record.show_comparison(record.compare(a, b | {"sources": {"wkv7": "3" * 64, "wkv6": "2" * 64}}))
    assert capsys.readouterr().out == (
        "gpus: NVIDIA H200, sm_90, 139 GiB before, another GPU now\n"
        "sources of wkv7: 1111111111 before, 3333333333 now\n\n"
        "  case                                     by                before ms  now ms  now / before  verdict\n"
        "  wkv7 (8, 4096, 64, 64) bfloat16 forward  rwkv_jit chunked       1.00   0.500         0.500  faster\n"
        "  wkv6 (8, 4096, 64, 64) bfloat16 forward  rwkv_jit chunked       1.00    1.50         1.500  slower\n"
        "  wkv5 (8, 4096, 64, 64) bfloat16 forward  rwkv_jit chunked          -       -             -  unknown\n"
        "Only before: studies: gla (8, 4096, 64, 64) bfloat16 forward, rwkv_jit chunked\n"
        "Only now: studies: timex (32, 768, 768) bfloat16 forward, rwkv_jit chunked\n\n"
        "1 faster, 1 slower, 0 the same, 1 unknown. Faster and slower: no overlap of quartiles, and medians over "
        "2% apart.\n"
    )


def test_a_comparison_is_json(tmp_path):
    assert json.loads(json.dumps(record.compare(result(), result()))) == record.compare(result(), result())
