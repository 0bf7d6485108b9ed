"""What NVRTC made of kernels, and which calls passed on the PTX machine: neither is done again for the same texts.

``tests/compile/ledger.json`` has one line for each kernel: its template, its target, its parameters and a digest, then
registers, bytes of spills and bytes of shared memory of each entry. The digest covers all that NVRTC reads: the text
with its headers but for comments, the target, the options, and the build of NVRTC.

It has one line for each test that runs kernels on the PTX machine and passed, with the templates that ran and a digest
of what decides the verdict: these templates with their headers, all Python between a public call and a launch, the
test's own module and what it imports of `tests`, the fixtures, and the versions of NVRTC, torch and numpy. The line's
name is the test with its parameters, and inputs are drawn from seeds that these modules have.

The package `rwkv_jit` counts by its rooms of calls and all that these import. What only stands above them (`nn`,
`compat`, `bench`, commands) decides nothing, and neither do comments and docstrings.
"""

import ast
import importlib.metadata
import json
import re
import struct
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "compile" / "ledger.json"
HELPERS = [ROOT / "tests", ROOT / "tests" / "unit", ROOT / "tests" / "gpu"]
ROOMS = ("derived", "layers", "ops", "parallel", "pool")  # of public calls
FULL = "a thread has all registers that there are"
ROOM = "with more registers fewer threads have room on a multiprocessor"
HEADS = "a warp holds a whole head, and few models have heads as wide"
ASKED = "only a caller asks for such a block"
SMALL = "a multiprocessor has room for 1024 threads"
BLOCKS = "two to five blocks have room on a multiprocessor"
LOADS = "three blocks of the most threads have room on a multiprocessor, so that some load meanwhile"
# What kernels may take that is not 255 registers and no spills: words that their lines have, the most registers, the
# most bytes of spills, and why. Of several that fit, a kernel keeps to all limits of registers, and to the widest of
# spills.
LIMITS = [
    ("layer_loss_forward NUM_THREADS=512", 48, 0, LOADS),
    ("layer_loss_backward", 64, 0, LOADS),
    ("layer_loss_in_place NUM_THREADS=1024", 64, 0, SMALL),
    ("layer_convolution CHANNELS=2048 HAS_STATE=False", 128, 0, BLOCKS),
    ("layer_convolution HAS_STATE=True", 168, 0, BLOCKS),
    ("layer_convolution_backward CHANNELS=2048 HAS_STATE=False", 128, 0, BLOCKS),
    ("layer_convolution_backward HAS_STATE=True", 168, 0, BLOCKS),
    ("layer_convolution_update CHANNELS=2048", 96, 0, BLOCKS),
    ("copy_states", 64, 0, SMALL),
    ("cut_sequences", 64, 0, SMALL),
    ("narrow_rows", 64, 0, SMALL),
    ("sum_rows", 64, 0, SMALL),
    ("sum_buffers", 64, 0, SMALL),
    ("gla_join", 128, 0, BLOCKS),
    ("wkv7_join", 128, 0, BLOCKS),
    ("timex_convolve", 128, 0, BLOCKS),
    ("timex_filter_gradient", 128, 0, BLOCKS),
    # What spills.
    ("channel_decay_group_forward", 255, 24, ROOM),
    ("channel_decay_group_key_gradients T_W=bf16", 255, 16, FULL),
    ("gla_chunked_backward CHUNK_LEN=64", 255, 20, ASKED),
    ("gla_group_key_gradients BY_HALVES=True", 255, 48, FULL),
    ("gla_group_scan T_IO=fp16 VALUE_SIZE=129", 255, 24, ROOM),
    ("gla_prepare BY_HALVES=True", 255, 88, ROOM),
    ("gla_recurrent_backward HEAD_SIZE=1 VALUE_SIZE=160", 255, 1136, FULL),
    ("gla_recurrent_backward HEAD_SIZE=40 T_IO=fp32", 255, 472, FULL),
    ("gla_recurrent_backward HEAD_SIZE=64 CONSTANT_DECAY=True", 255, 104, FULL),
    ("gla_recurrent_backward HEAD_SIZE=96", 255, 88, FULL),
    ("gla_recurrent_backward HEAD_SIZE=100 sm_75", 255, 212, FULL),
    ("gla_recurrent_backward HEAD_SIZE=256", 255, 968, FULL),
    ("gla_recurrent_forward HEAD_SIZE=64 DECAY=none", 255, 40, ROOM),
    ("gla_recurrent_forward HEAD_SIZE=264", 255, 36, ROOM),
    ("gla_scan NUM_THREADS=384", 255, 1568, ASKED),
    ("gla_scan NUM_THREADS=512", 255, 2772, ASKED),
    ("gla_scan HEAD_SIZE=1 VALUE_SIZE=129", 255, 16, ROOM),
    ("gla_scan HEAD_SIZE=7", 255, 80, ROOM),
    ("gla_scan HEAD_SIZE=64 DECAY=log T_W=fp32", 255, 56, ROOM),
    ("gla_scan HEAD_SIZE=64 DECAY=raw T_W=fp32", 255, 68, ROOM),
    ("gla_scan HEAD_SIZE=64 SHARED_BYTES=31520", 255, 68, ROOM),
    ("gla_scan HEAD_SIZE=64 T_W0=bf16", 255, 24, ROOM),
    ("gla_scan HEAD_SIZE=64 T_W0=fp16", 255, 36, ROOM),
    ("gla_scan HEAD_SIZE=64 T_W0=fp32", 255, 44, ROOM),
    ("gla_scan HEAD_SIZE=128 DECAY=log sm_90", 255, 24, FULL),
    ("gla_scan HEAD_SIZE=128 T_W0=fp32", 255, 24, FULL),
    ("gla_scan HEAD_SIZE=200", 255, 48, FULL),
    ("gla_scan HEAD_SIZE=256 VALUE_SIZE=512 NUM_THREADS=256", 255, 24, FULL),
    ("head_decay_backward", 255, 96, FULL),
    ("head_decay_forward", 255, 100, FULL),
    ("head_decay_group_forward", 255, 44, ROOM),
    ("head_decay_group_key_gradients", 255, 232, FULL),
    ("head_decay_key_gradients HEAD_SIZE=33", 255, 504, ROOM),
    ("head_decay_key_gradients HEAD_SIZE=100", 255, 1916, ROOM),
    ("head_decay_key_gradients HEAD_SIZE=128", 255, 732, ROOM),
    ("layer_convolution sm_75", 255, 60, "sm_75 has no instruction that rounds to bfloat16"),
    ("layer_delta_operands HEAD_SIZE=999", 255, 1152, HEADS),
    ("layer_delta_operands HEAD_SIZE=1024", 255, 1008, HEADS),
    ("layer_delta_operands_backward sm_100", 255, 15, ROOM),
    ("layer_delta_operands_backward HEAD_SIZE=999", 255, 3940, HEADS),
    ("layer_delta_operands_backward HEAD_SIZE=999 GROUP=3 BETA_PER_CHANNEL=True", 255, 5246, HEADS),
    ("layer_delta_operands_backward HEAD_SIZE=1024", 255, 2844, HEADS),
    ("layer_delta_operands_backward HEAD_SIZE=1024 GROUP=3 BETA_PER_CHANNEL=True", 255, 3292, HEADS),
    ("layer_gated_norm_backward HEAD_SIZE=999", 255, 2468, HEADS),
    ("layer_gated_norm_backward HEAD_SIZE=1024", 255, 2116, HEADS),
    ("layer_norm_shift_backward CHANNELS=2048", 255, 48, ROOM),
    ("layer_norm_shift_backward CHANNELS=8192", 255, 160, ROOM),
    ("layer_prepare_keys HEAD_SIZE=999", 255, 1424, HEADS),
    ("layer_prepare_keys HEAD_SIZE=1024", 255, 560, HEADS),
    ("layer_prepare_keys_backward HEAD_SIZE=999", 255, 7160, HEADS),
    ("layer_prepare_keys_backward HEAD_SIZE=1024", 255, 5940, HEADS),
    ("replay_rules BETA_PER_CHANNEL=True", 255, 24, ROOM),
    ("replay_rules HEAD_SIZE=256", 255, 24, ROOM),
    ("replay_rules STATE_LAYOUT=vk", 255, 60, ROOM),
    ("timex_convolve sm_120", 255, 68, ROOM),
    ("timex_transform PAIRED=True", 255, 224, ROOM),
    ("timex_transform sm_75", 255, 224, ROOM),
    ("timex_transform sm_86", 255, 8, ROOM),
    ("update_rules PACKED=True sm_80", 255, 16, ROOM),
    ("update_states ONE_TOKEN=False T_STATE=bf16", 255, 24, ROOM),
    ("wkv7_chunked_backward BY_HALVES=True", 255, 112, FULL),
    ("wkv7_chunked_forward CHUNK_LEN=16 HEAD_SIZE=64", 255, 16, ROOM),
    ("wkv7_chunked_forward HEAD_SIZE=80", 255, 380, ASKED),
    ("wkv7_chunked_forward HEAD_SIZE=100 BY_HALVES=True", 255, 72, FULL),
    ("wkv7_group_scan CHANNELS=64", 255, 76, ROOM),
    ("wkv7_group_scan HEAD_SIZE=300", 255, 24, ROOM),
    ("wkv7_group_scan HEAD_SIZE=512", 255, 32, ROOM),
    ("wkv7_group_scan HEAD_SIZE=1024", 255, 28, ROOM),
    ("wkv7_key_gradients HEAD_SIZE=40", 255, 32, ROOM),
    ("wkv7_key_gradients_by_halves", 255, 232, FULL),
    ("wkv7_prepare BY_HALVES=False DECAY=direct", 255, 12, ROOM),
    ("wkv7_prepare BY_HALVES=True", 255, 288, ROOM),
    ("wkv7_recurrent_backward HEAD_SIZE=128 VALUE_SIZE=160", 255, 860, FULL),
    ("wkv7_recurrent_backward HEAD_SIZE=136", 255, 8, FULL),
    ("wkv7_recurrent_backward HEAD_SIZE=256", 255, 216, FULL),
    ("wkv7_recurrent_forward HEAD_SIZE=50 sm_75", 255, 288, FULL),
    ("wkv7_segment VALUE_SIZE=96", 255, 496, FULL),
    ("wkv7_segment HEAD_SIZE=37", 255, 8, FULL),
    ("wkv7_segment HEAD_SIZE=128", 255, 248, FULL),
]
# What ptxas says of products that wait for each other though nothing of the source asks for it: C7510, C7514, C7520 ..
# "wgmma.mma_async instructions are serialized", C7517 and C7519 "warpgroup.wait is injected". In one kernel C7519 is of
# "warpgroup.arrive", before products that have operands in registers, and nothing waits there.
COMPLAINT = re.compile(r"\(C75\d\d\)(?! warpgroup.arrive is injected .* in function 'head_decay_key_gradients').*")


def short(*parts):
    return sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---- kernels -----------------------------------------------------------------------------------------------------


@cache
def code_of(text):
    """A text without comments."""
    from rwkv_jit.kernels import template

    return template.code(text)


def line_of(rendered, target, parameters):
    """What the ledger calls a kernel: something to read, and the digest."""
    from rwkv_jit.kernels import compiler, identity

    head, body = rendered.source.split("#line 1", 1)
    headers = [part for name, text in rendered.headers for part in (name, code_of(text))]
    digest = short(head, code_of(body), *headers, *compiler.options(target), identity.identity())
    chosen = ",".join(f"{name}={value}" for name, value in sorted(parameters.items()))
    return f"{rendered.name} {target} {chosen} {digest}"


def digest_in(line):
    return line.rsplit(" ", 1)[1]


@cache
def _words(text):
    return {*re.split("[ ,]", text)}


def fits(line, words):
    return _words(words) <= _words(line)


def check_limits(line, used):
    """A kernel takes no more registers and spills no more bytes than LIMITS say."""
    fit = [limits for words, *limits, _ in LIMITS if fits(line, words)]
    registers, spills = min([255, *(x for x, _ in fit)]), max([0, *(x for _, x in fit)])
    for entry, (takes, spilled, _) in used.items():
        assert 0 < takes <= registers, f"{entry} takes {takes} registers and may take {registers}: {line}"
        assert spilled <= spills, f"{entry} spills {spilled} bytes and may spill {spills}: {line}"


def elf_extent(image):
    """Bytes that an ELF file needs by its own headers: of the header tables and of all they point to."""
    program_table, section_table = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", image, 54)
    ends = [program_table + program_size * programs, section_table + section_size * sections]
    for index in range(sections):
        kind, offset, size = struct.unpack_from("<4xI16xQQ", image, section_table + index * section_size)
        ends.append(offset + size if kind != 8 else 0)  # SHT_NOBITS takes no bytes
    for index in range(programs):
        offset, size = struct.unpack_from("<8xQ16xQ", image, program_table + index * program_size)
        ends.append(offset + size)
    return max(ends)


def check_code(image, log, target):
    """What NVRTC made is whole, for this target, and its products by warp groups do not wait for each other."""
    number = int("".join(filter(str.isdigit, target)))
    if target.startswith("compute_"):
        assert f".target sm_{target.removeprefix('compute_')}".encode() in image
        return
    assert image[:6] == b"\x7fELF\x02\x01"
    assert struct.unpack_from("<HH", image, 16) == (2, 190)  # an executable for EM_CUDA
    assert elf_extent(image) == len(image)
    (flags,) = struct.unpack_from("<I", image, 48)
    assert number in (flags & 0xFF, flags >> 8 & 0xFF)
    entries = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", log)
    assert entries
    for entry, of in entries:
        assert (of, f".text.{entry}\0".encode() in image) == (target, True)
    found = COMPLAINT.findall(log)
    assert not found, found


# ---- verdicts ----------------------------------------------------------------------------------------------------


@cache
def _imported(path):
    """Files of the package and of the tests that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    return [*filter(None, map(_file_of, names))]


def _file_of(name):
    """Where a module of the package or of the tests lies, if it is one of these."""
    folders = [ROOT] if name.split(".")[0] == "rwkv_jit" else HELPERS
    files = [folder / f"{name.replace('.', '/')}{end}" for folder in folders for end in (".py", "/__init__.py")]
    return next((file for file in files if file.is_file()), None)


def closure(files):
    """Files and all files of the package and of the tests that they import, themselves or through others."""
    seen, todo = {Path(__file__).resolve()}, list(files)  # which decides whether a test runs, and not how it ends
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imported(path)
    return sorted(seen - {Path(__file__).resolve()})


@cache
def digest_of_python(test_file):
    """That of the test's module, the fixtures, and all that both import, with the rooms of the package's calls."""
    from record import text_tree

    fixtures = [ROOT / "tests" / "conftest.py", ROOT / "tests" / "compile" / "conftest.py"]
    rooms = [path for room in ROOMS for path in (ROOT / "rwkv_jit" / room).glob("*.py")]
    files = closure([test_file, *fixtures, *rooms])
    return short(*(part for path in files for part in (path.relative_to(ROOT), text_tree(path.read_text("utf-8")))))


def digest_of_verdict(test_file, templates):
    from rwkv_jit.kernels import identity, template

    if not {*templates} <= {*template.names()}:
        return "one of them is gone"
    texts = [(source.body, *(text for _, text in source.headers)) for source in map(template.library, templates)]
    versions = [identity.identity(), *map(importlib.metadata.version, ("torch", "numpy"))]
    return short(digest_of_python(test_file), *versions, *(code_of(text) for each in texts for text in each))


# ---- the file ----------------------------------------------------------------------------------------------------


class Ledger:
    """The plugin of pytest that reads the ledger, takes notes of what a run uses, and writes it anew."""

    def __init__(self, config):
        self.compiles_all = config.getoption("--compile-all")
        self.records = config.getoption("--record-ledger")
        self.used = {"kernels": {}, "verdicts": {}}
        self.has_limits = True
        self.anew = set()  # kernels that were compiled and calls that were run
        if self.records:
            option = config.option
            folders = {ROOT, ROOT / "tests", ROOT / "tests" / "compile"} & {Path(x).resolve() for x in config.args}
            if option.full or option.keyword or option.markexpr or not folders:
                raise pytest.UsageError("--record-ledger is for all of the tier: pytest tests/compile --record-ledger")

    @cached_property
    def known(self):
        """Resources of kernels by digest, and verdicts by test."""
        found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"kernels": {}, "verdicts": {}}
        return {**found, "kernels": {digest_in(line): used for line, used in found["kernels"].items()}}

    def pytest_runtest_setup(self, item):
        """What only --full compiles has no limits, as those are of what every run compiles."""
        self.has_limits = item.get_closest_marker("full") is None

    def resources(self, line, find):
        """What a kernel takes, by entry: as the ledger knows it, or as `find` finds it."""
        known = self.known["kernels"].get(digest_in(line))
        used = known
        if known is None or self.compiles_all:
            used = find()
            self.anew.add(line)
            if self.has_limits:
                check_limits(line, used)
            if known is not None and not self.records:
                assert used == known, f"the ledger says {known}, and NVRTC {used}: {line}"
        self.used["kernels"][line] = used
        return used

    def passes(self, name, test_file, run):
        """Run a test unless the ledger knows that it passes; `run` returns the templates that ran."""
        known, *templates = self.known["verdicts"].get(name, "").split(" ")
        if self.compiles_all or not known or known != digest_of_verdict(test_file, templates):
            templates = sorted(run())
            self.anew.add(name)
            known = digest_of_verdict(test_file, templates)
        self.used["verdicts"][name] = " ".join([known, *templates])

    def pytest_sessionfinish(self, session, exitstatus):
        """Give a worker's notes to the run, or write those of the run."""
        part = {**self.used, "anew": sorted(self.anew)}
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["ledger"] = part
        elif self.records and exitstatus == 0:
            FILE.write_text(text_of(self.used), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        part = getattr(node, "workeroutput", {}).get("ledger", {"kernels": {}, "verdicts": {}, "anew": []})
        for kind, lines in self.used.items():
            lines |= part[kind]
        self.anew.update(part["anew"])

    def pytest_terminal_summary(self, terminalreporter):
        count = sum(map(len, self.used.values()))
        if count:
            text = f"{count} kernels and calls, of which {len(self.anew)} were compiled or run"
            terminalreporter.write_line(f"ledger: {text}" + ("; --record-ledger keeps them" if self.anew else ""))


def text_of(used):
    """The file, one line for each entry."""
    parts = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(x, separators=(',', ':'))}" for name, x in sorted(lines.items()))
        + "\n}"
        for kind, lines in sorted(used.items())
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"
