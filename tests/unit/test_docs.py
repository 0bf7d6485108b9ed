"""README.md and the pages of docs/: what they show runs, what they link is there, what they name exists."""

import argparse
import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import rwkv_jit
import rwkv_jit.compat.fla
import rwkv_jit.compat.hf
import rwkv_jit.compat.mamba
import rwkv_jit.compat.megatron
from rwkv_jit import cli, env
from rwkv_jit.algorithms import recurrent
from rwkv_jit.derived import table as derived
from rwkv_jit.ops.table import OPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernel_templates/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, language):
    """What stands in the fences of a language. `python` runs here; `py` needs a GPU or files, and only has to parse."""
    return [code for found, code in _FENCE.findall(text) if found == language]


def anchors(text):
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


# ---- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.is_file(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{name_of(page)}: {target}"


def test_site_has_every_page():
    listed = re.findall(r": ([\w/]+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


# ---- code --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if "```py" in page.read_text(encoding="utf-8")], ids=name_of)
def test_code_runs(page):
    """On a CPU, from the top of the page to its end."""
    text = page.read_text(encoding="utf-8")
    for code in blocks(text, "py"):
        ast.parse(code)
    torch.manual_seed(0)
    names = {}
    for code in blocks(text, "python"):
        exec(compile(code, name_of(page), "exec"), names)


# ---- what is said of the API -------------------------------------------------------------------------------------


def test_api_page_has_every_public_name():
    listed = re.findall(r"^::: rwkv_jit\.([\w.]+)$", read("docs/api.md"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    tables = (rwkv_jit._MODULES, rwkv_jit.nn._MODULES, rwkv_jit.parallel._MODULES, rwkv_jit.compat._MODULES)
    modules = {f"{module.removeprefix('rwkv_jit.')}.{name}" for table in tables for name, module in table.items()}
    modules |= {"compat.install", "compat.uninstall"}
    modules |= {f"compat.fla.{name}" for name in rwkv_jit.compat.fla.__all__}
    modules |= {f"compat.hf.{name}" for name in rwkv_jit.compat.hf.__all__}
    modules |= {f"compat.mamba.{name}" for name in rwkv_jit.compat.mamba.__all__}
    modules |= {f"compat.megatron.{name}" for name in rwkv_jit.compat.megatron.__all__}
    assert set(listed) == modules | {"custom.OwnKernel", "kernel.Kernel"}
    assert set(rwkv_jit._MODULES) == set(rwkv_jit.__all__)


@pytest.mark.parametrize("page", ["README.md", "docs/ops.md"])
def test_defaults_in_the_tables_are_those_of_the_ops(page):
    lines = re.findall(r"^\| `(\w+)\(([^)]*?)(?:, \.\.\.)?\)`.*\| (.*) \|$", read(page), re.MULTILINE)
    found = {name: (inputs.split(", "), re.findall(r"`(\w+)`|\b(1|K\^\(-1/2\))", said)) for name, inputs, said in lines}
    for name in ("wkv5", "wkv6", "wkv7", "gla", "linear_attention", *derived.OPS):
        op, parameters = (OPS | derived.OPS)[name], inspect.signature(getattr(rwkv_jit, name)).parameters
        inputs, said = found[name]
        assert inputs == list(parameters)[: len(inputs)]
        said = [word or number for word, number in said]
        decay = [op.decay] if name in OPS and op.decay != "none" else []
        assert said == [*decay, op.state_layout, "K^(-1/2)" if op.scale is None else "1"]


def test_variables_are_those_there_are():
    assert re.findall(r"^\| `(RWKVJIT_\w+)` \|", read("docs/command_line.md"), re.MULTILINE) == list(env.DESCRIPTIONS)


def test_commands_and_the_options_of_bench_are_those_there_are():
    text = read("docs/command_line.md")
    (commands,) = [each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction)]
    assert sorted(re.findall(r"^\| `rwkv-jit (\w+)", text, re.MULTILINE)) == sorted(commands.choices)
    options = {option for each in commands.choices["bench"]._actions for option in each.option_strings}
    cells = re.findall(r"^\| (`--[^|]*)\|", text.partition("## bench")[2].partition("\n## ")[0], re.MULTILINE)
    assert set(re.findall(r"--[\w-]+", " ".join(cells))) == options - {"-h", "--help"}


def largest_head(op, direction):
    """The largest size, K and V alike, whose recurrent kernel fits into the shared memory that every GPU gives."""

    def shared_bytes(size):
        chosen = recurrent.geometry(OPS[op].stem, direction, size, size)
        lanes, threads = chosen["LANES_PER_ROW"], chosen["NUM_THREADS"]
        columns, staging = recurrent._columns(size, lanes), recurrent._STAGING[OPS[op].stem, direction]
        staged = staging.keys * lanes * columns + staging.values * threads // lanes * chosen["ROWS_PER_THREAD"]
        return 4 * (chosen["CHUNK_LEN"] * staged + staging.sums * threads * columns)

    return max(size for size in range(128, 8192, 128) if shared_bytes(size) <= recurrent._SHARED_LIMIT)


def test_limits_of_head_sizes_are_those_of_the_kernels():
    text = read("docs/ops.md")
    for op, line in (("wkv7", "| wkv7 |"), ("wkv6", "| wkv5, wkv6, gla, linear_attention |")):
        forward, backward = largest_head(op, "forward"), largest_head(op, "backward")
        (row,) = [each for each in text.splitlines() if each.startswith(line)]
        assert f"up to {backward} with gradients, {forward} without" in row
        assert re.search(rf"\b1 to {backward}\b[\w ]* \({forward}\b", read("README.md"))


def test_nobody_is_told_that_any_head_size_will_do():
    pages = [name_of(page) for page in PAGES if "any head size" in page.read_text(encoding="utf-8").lower()]
    assert set(pages) <= {"CHANGELOG.md"}


def test_messages_that_are_explained_are_raised_somewhere():
    text = read("docs/guides/troubleshooting.md").partition("## Wrong results")[0]
    sources = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "rwkv_jit").rglob("*.py"))
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if message not in sources] == []


def test_contributing_names_every_module():
    named = re.findall(r"`(?:ops/)?(\w+)`", read("CONTRIBUTING.md"))
    modules = {
        path.parent.name if path.stem == "__init__" else path.stem
        for folder in ("rwkv_jit", "bench") for path in (ROOT / folder).rglob("*.py")
    } - {"rwkv_jit"}  # fmt: skip
    assert modules - set(named) == set()
    rooms = read("CONTRIBUTING.md").partition("## Rooms")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|(?: \d \|)? (`[^|]*)\|", rooms, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) - modules == set()


def test_contributing_names_files_and_tables_that_are_there():
    text = read("CONTRIBUTING.md")
    paths = re.findall(r"\b(?:tests|tools|rwkv_jit|bench|docs|kernel_templates)/[\w/.]*\w", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    # "`OPS` of `one.py`, `two.py` and `three.py`"
    tables = re.findall(r"`(\w+)`\s+of\s+((?:`[\w/]+\.py`(?:,\s+|\s+and\s+)?)+)", text)
    named = [(table, path) for table, paths in tables for path in re.findall(r"`([\w/.]+)`", paths)]
    assert len(named) > 2
    for table, path in named:
        assert re.search(rf"^(?:def )?{table}\b", read(path), re.MULTILINE), f"{table} of {path}"


# ---- README ------------------------------------------------------------------------------------------------------


def test_readme_is_short_and_begins_with_what_it_is():
    lines = read("README.md").splitlines()
    assert len(lines) <= 230
    assert lines[:3] == ["# rwkv_jit", "", lines[2]]
    assert "CUDA kernels" in lines[2]


def test_readme_has_the_two_commands():
    assert blocks(read("README.md"), "bash") == [
        'pip install ".[cuda12]" && rwkv-jit demo\n',
        'pip install ".[cuda12,test]" && pytest\n',
    ]


# ---- what was tried ----------------------------------------------------------------------------------------------

_spec = importlib.util.spec_from_file_location("combinations", ROOT / "tools" / "readme_combinations.py")
combinations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(combinations)


def test_readme_shows_the_torch_versions_that_were_tried():
    """Else: python tools/readme_combinations.py."""
    text = read("README.md")
    assert text.count("<!-- combinations -->") == 1
    assert combinations.filled(text, combinations.recorded()) == text


def test_table_of_combinations():
    results = {
        "2.6.0": {"torch": "2.6.0+cu124", "extra": "cuda12", "python": "3.12.3", "cupy": "14.2", "nvrtc": "12.4.127",
                  "install": "passed", "trace": "failed"},
        "2.15.0": {"install": "failed", "trace": "not run"},
    }  # fmt: skip
    shown = combinations.filled("a\n<!-- combinations -->\nold\n<!-- /combinations -->\nb\n", results)
    assert shown == (
        "a\n<!-- combinations -->\n"
        "| torch | extra | NVRTC | Python | install | trace |\n| --- | --- | --- | --- | --- | --- |\n"
        "| 2.6.0+cu124 | cuda12 | 12.4.127 | 3.12.3 | passed | failed |\n"
        "| 2.15.0 |  |  |  | failed | not run |\n"
        "<!-- /combinations -->\nb\n"
    )
    assert combinations.table({}) == combinations.NONE
