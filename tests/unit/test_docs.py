"""README.md and the pages of docs/: what they show runs, what they link is there, what they name exists."""

import argparse
import ast
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import warm
from problems import ROWS

import rwkv_jit
import rwkv_jit.compat.fla
import rwkv_jit.compat.hf
import rwkv_jit.compat.mamba
import rwkv_jit.compat.megatron
from bench import __main__ as bench_program
from rwkv_jit.desk import cli
from rwkv_jit.kernels import env
from rwkv_jit.schedules import recurrent
from rwkv_jit.schedules.table import OPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernel_templates/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "examples").rglob("README.md"))
BY_TASK = ("README.md", "docs/index.md")  # whose blocks of Python are whole, each alone
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
    listed = re.findall(r"(?:: |- )([\w/]+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


def test_site_shows_the_version():
    site = example("tools/site.py")
    config = types.SimpleNamespace(site_name="rwkv_jit")
    assert site.on_config(config).site_name == f"rwkv_jit {rwkv_jit.__version__}"
    assert "hooks: [tools/site.py]" in read("mkdocs.yml")


# ---- code --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if "```py" in page.read_text(encoding="utf-8")], ids=name_of)
@pytest.mark.filterwarnings("ignore")  # of FLA, which has no Triton here
def test_code_runs(page, tmp_path, monkeypatch):
    """On a CPU, from the top of the page to its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = page.read_text(encoding="utf-8")
    for code in blocks(text, "py"):
        ast.parse(code)
    torch.manual_seed(0)
    names = {}
    try:
        for code in blocks(text, "python"):
            exec(compile(code, name_of(page), "exec"), {} if name_of(page) in BY_TASK else names)
    finally:
        rwkv_jit.compat.fla.uninstall()
        rwkv_jit.compat.uninstall()


# ---- commands ----------------------------------------------------------------------------------------------------

_COMMANDS = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```(console|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TOOLS = {"pip", "pytest", "mkdir", "chgrp", "chmod", "export", "curl", "vllm"}  # of others, in blocks that are not run


def command_blocks(page):
    """Why each block of commands is not run, and its commands; of a console those behind a prompt."""
    for why, language, text in _COMMANDS.findall(page.read_text(encoding="utf-8")):
        lines = text.replace("\\\n", " ").splitlines()
        yield why, [line.removeprefix("$ ") for line in lines if language == "bash" or line.startswith("$ ")]


def example(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_words(words, monkeypatch):
    """The arguments of a program of this project are those that it takes."""
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun":
        program = next(i for i, word in enumerate(words) if word in ("-m", "rwkv-jit") or word.endswith(".py"))
        words = words[program:] if words[program] == "rwkv-jit" else ["python", *words[program:]]
    if words[0] == "rwkv-jit" or words[:3] == ["python", "-m", "rwkv_jit"]:
        cli._parser().parse_args(words[1:] if words[0] == "rwkv-jit" else words[3:])
    elif words[:3] == ["python", "-m", "bench"]:
        bench_program._parser().parse_args(words[3:])
    elif words[0] == "python" and (ROOT / words[1]).is_file():
        module = example(words[1])
        if hasattr(module, "read_options"):
            monkeypatch.setattr(sys, "argv", words[1:])
            module.read_options()
    elif words[0] == "python":
        assert words[1] in ("-m", "-c", "train.py", "serve.py"), words
    else:
        assert words[0] in _TOOLS, words


_INLINE = re.compile(r"`((?:rwkv-jit|python -m (?:bench|rwkv_jit)|python examples/\S+) [^`]+)`")


def test_commands_have_the_options_that_programs_take(monkeypatch):
    """Also where a block is not run, and in the middle of a sentence."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    checked = 0
    for page in PAGES:
        lines = [line for _, block in command_blocks(page) for line in block]
        if page.name != "CHANGELOG.md":
            inline = _INLINE.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
            # Two words are a name: "`rwkv-jit warm` compiles". A word in capitals stands for something.
            lines += [" ".join(line.split()) for line in inline if len(line.split()) > 2 and "..." not in line]
        for line in lines:
            for command in line.split(" && "):
                words = shlex.split(command, comments=True)
                if not words or any(re.fullmatch("[A-Z]+", word) for word in words):
                    continue
                try:
                    check_words(words, monkeypatch)
                except SystemExit:
                    pytest.fail(f"{name_of(page)}: {line}")
                checked += 1
    assert checked > 40


@pytest.fixture
def checkout(tmp_path):
    """A folder like a checkout, with the files that commands name, and the environment of a user in it."""
    for name in ("examples", "tools", "bench", "tests", "docs", "bench.json"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text("print('training')\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    # Two ranks stand for more: each imports torch, and `tests/ranks.py` has four of the same example.
    fewer = 'if [ "$1" = --nproc-per-node ]; then shift 2; set -- --nproc-per-node 2 "$@"; fi\n'
    python = shlex.join(warm.python("torch", "torch._dynamo"))
    for name, before, arguments in (
        ("python", "", ""), ("rwkv-jit", "", "-m rwkv_jit"), ("torchrun", fewer, "-m torch.distributed.run"),
    ):  # fmt: skip
        (programs / name).write_text(f'#!/bin/sh\n{before}exec {python} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    paths = [str(ROOT), *os.environ["PYTHONPATH"].split(os.pathsep)]
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "", "RWKVJIT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore",
        "PET_STANDALONE": "1",  # torchrun takes any free port: another one may run on this machine
        "PYTHON_EXEC": str(programs / "python"),  # of the ranks that torchrun starts
    }  # fmt: skip
    return tmp_path, {**os.environ, **environment}


RUN = [page for page in PAGES if any(not why for why, _ in command_blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_commands_run(page, checkout):
    """All that no mark takes out; a mark stands right above its block: `<!-- not run: ... -->`."""
    folder, environment = checkout
    for why, block in command_blocks(page):
        if not why:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", "\n".join(block)], cwd=folder, env=environment, capture_output=True,
                text=True, check=False, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, f"{name_of(page)}: {block}\n{done.stdout}\n{done.stderr}"


# ---- tables ------------------------------------------------------------------------------------------------------


def is_rule(line):
    return re.fullmatch(r"\|(?: *:?-+:? *\|)+", line) is not None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_tables(page):
    """Each begins with a head and a rule, and every line has as many columns; a blank line would end it."""
    paragraphs = re.split(r"\n\s*\n", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for paragraph in paragraphs:
        lines = [line for line in paragraph.splitlines() if line.startswith("|")]
        if not lines:
            continue
        assert len(lines) > 2, f"{name_of(page)}: no table: {lines[0]}"
        assert is_rule(lines[1]), f"{name_of(page)}: no table: {lines[0]}"
        assert not any(map(is_rule, lines[2:])), f"{name_of(page)}: two tables in one: {lines[0]}"
        columns = [len(re.sub(r"\\\|", "", line)[1:-1].split("|")) for line in lines]
        assert set(columns) == {columns[0]}, f"{name_of(page)}: {lines[columns.index(min(columns))]}"


# ---- what is said of the API -------------------------------------------------------------------------------------


def test_api_page_has_every_public_name():
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").iterdir()))
    listed = re.findall(r"^::: rwkv_jit\.([\w.]+)$", pages, re.MULTILINE)
    assert len(listed) == len(set(listed))
    tables = (rwkv_jit._MODULES, rwkv_jit.nn._MODULES, rwkv_jit.parallel._MODULES, rwkv_jit.compat._MODULES)
    modules = {f"{module.removeprefix('rwkv_jit.')}.{name}" for table in tables for name, module in table.items()}
    modules |= {"compat.install", "compat.uninstall"}
    modules |= {f"compat.fla.{name}" for name in rwkv_jit.compat.fla.__all__}
    modules |= {f"compat.hf.{name}" for name in rwkv_jit.compat.hf.__all__}
    modules |= {f"compat.mamba.{name}" for name in rwkv_jit.compat.mamba.__all__}
    modules |= {f"compat.megatron.{name}" for name in rwkv_jit.compat.megatron.__all__}
    assert set(listed) == modules | {"call.custom.OwnKernel", "kernels.kernel.Kernel"}
    assert set(rwkv_jit._MODULES) == set(rwkv_jit.__all__)


def test_defaults_in_the_tables_are_those_of_the_ops():
    lines = re.findall(r"^\| `(\w+)\(([^)]*?)(?:, \.\.\.)?\)`.*\| (.*) \|$", read("docs/ops.md"), re.MULTILINE)
    found = {name: (inputs.split(", "), re.findall(r"`(\w+)`|\b(1|K\^\(-1/2\))", said)) for name, inputs, said in lines}
    for name in ("wkv5", "wkv6", "wkv7", "gla", "linear_attention", *ROWS):
        op, parameters = (OPS | ROWS)[name], inspect.signature(getattr(rwkv_jit, name)).parameters
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


def test_readme_begins_with_blocks_by_task():
    """Each is whole, has ten lines at most, and runs in `test_code_runs`; index.md has the first three too."""
    text = read("README.md")
    first = text[: text.index("```")].count("\n") + 2
    assert first <= 25
    start = text.partition("## Start")[2].partition("\n## ")[0]
    tasks = re.split(r"^### ", start, flags=re.MULTILINE)[1:]
    assert [len(blocks(task, "python")) for task in tasks] == [1, 1, 1, 1]
    for task in tasks:
        (code,) = blocks(task, "python")
        assert code.startswith("import torch")
        assert len(code.splitlines()) <= 10
    assert blocks(read("docs/index.md"), "python") == blocks(start, "python")[:3]


def test_readme_has_a_row_of_every_op():
    """A model with its page, the op, the layer, and what it stands for."""
    table = read("README.md").partition("## What it has")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[[^\]]+\]\([^)]+\) \| `(\w+)` \| (?:`(\w+)` )?\| .*\|$", table, re.MULTILINE)
    assert sorted(op for op, _ in rows) == sorted({*OPS, *ROWS})
    assert {layer for _, layer in rows if layer} <= set(rwkv_jit.nn.__all__)


def test_readme_leaves_out_nothing_that_is_there():
    text = read("README.md")
    assert "not here: context parallelism" not in text.lower()
    assert "context parallel" in text


@pytest.mark.parametrize(
    "word",
    ["AMD", "context parallel", "fine-tune", "license", "LoRA", "PyPI", "quick start", "resume", "tensor parallel"],
)
def test_pages_have_the_words_that_people_search_for(word):
    """The site's search looks at docs/ alone."""
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert re.search(rf"\b{word}\b", pages, re.IGNORECASE)


def test_readme_has_the_two_commands():
    assert blocks(read("README.md"), "bash") == [
        'pip install ".[cuda12]" && rwkv-jit demo\n',
        'pip install ".[cuda12,test]" && pytest\n',
    ]


# ---- what was tried ----------------------------------------------------------------------------------------------

_spec = importlib.util.spec_from_file_location("combinations", ROOT / "tools" / "combinations_table.py")
combinations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(combinations)


def test_install_shows_the_torch_versions_that_were_tried():
    """Else: python tools/combinations_table.py."""
    text = read("docs/install.md")
    assert text.count("<!-- combinations -->") == 1
    assert combinations.filled(text, combinations.recorded()) == text
    extras = dict(re.findall(r"^\| (.*torch|[\d.]+ .*from PyPI) +\| `?(\w+)`? \|$", text, re.MULTILINE))
    assert extras == {"your torch": "extra", "2.11 and newer, from PyPI": "cuda13", "2.6 to 2.10, from PyPI": "cuda12"}
    for each in combinations.recorded().values():
        minor = int(each["torch"].split(".")[1])
        assert each["torch"].endswith("+cpu") or each["extra"] == ("cuda13" if minor >= 11 else "cuda12")


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
