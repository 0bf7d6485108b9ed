"""Source and architecture to machine code through NVRTC; no GPU, driver, toolkit header or include path needed."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from rwkv_jit.kernels import cache, cuda, env, forks, stats
from rwkv_jit.kernels.cache import Compiled, Resources, entry
from rwkv_jit.kernels.errors import CompileError, UnsupportedConfigError, brief, short
from rwkv_jit.kernels.identity import version
from rwkv_jit.kernels.template import Parameter, Rendered

_ARCH = re.compile(r"(sm|compute)_([1-9][0-9]{1,2})([af]?)")
_FIRST_WITH = {"": 0, "a": 90, "f": 100}  # the suffixes: for one kind of GPU alone, for a family of them
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_ASSERTION = re.compile(r'static assertion failed with "([^"]*)"')
_HEAD = "parameters.cu"  # the name of the lines above `#line 1`
_PLACE = re.compile(r"^([^()\n]+)\((\d+)\): (?:catastrophic )?error", re.MULTILINE)
# What the source is to blame for, in the words of the compiler and of the assembler.
_OF_SOURCE = re.compile(r"\(\d+\): (?:catastrophic )?error(?!: out of memory)|^ptxas .*\berror\b", re.MULTILINE)
_UNKNOWN_ARCH = re.compile(r"--nv_arch|--gpu-architecture")
_MOST_OF_A_LINE = 500
_MOST_OF_A_LOG = 20_000


def options(target: str) -> tuple[str, ...]:
    """Return what the NVRTC at hand gets: what decides the code, and how to report on it.

    ``--no-cache`` as the cache in the driver hides the resource report; an NVRTC before 12.9 has none, and refuses it.
    """
    return (*key_options(target), "--no-cache") if cuda.nvrtc().getVersion() >= (12, 9) else key_options(target)


def key_options(target: str) -> tuple[str, ...]:
    """Return the options of the cache key, in its order, the same for every NVRTC.

    ``--modify-stack-limit=false`` because the default changes the whole process's limits.
    """
    fixed = (f"-arch={target}", "-std=c++17", "--modify-stack-limit=false", "--ptxas-options=-v")
    return (*fixed, "-lineinfo") if env.lineinfo() else fixed


def check_arch(arch: str) -> str:
    """Return `arch`; ValueError if it is not like sm_90, sm_90a or compute_90, or too old for code of its kind."""
    match = _ARCH.fullmatch(arch) if isinstance(arch, str) else None
    if match is None:
        raise ValueError(f"arch: expected sm_NN, sm_NNa or compute_NN, got {brief(arch)}")
    if int(match[2]) < _FIRST_WITH[match[3]]:
        raise ValueError(f"arch: expected sm_{_FIRST_WITH[match[3]]} or newer before {match[3]!r}, got {arch!r}")
    return arch


def target_for(arch: str, newer: bool = True) -> str:
    """Return what the NVRTC at hand compiles for `arch`: itself, or with `newer` PTX where the GPU is newer than NVRTC.

    NVRTC may know a GPU of a larger number and not this one, as sm_103 came after sm_120; UnsupportedConfigError if it
    cannot.
    """
    match = _ARCH.fullmatch(check_arch(arch))
    assert match is not None
    number = int(match[2])
    known = [int(a) for a in cuda.nvrtc().getSupportedArchs()]
    if number in known:
        return arch
    if newer and number > min(max(known), entry.NEWEST_THAT_ALL_KNOW):
        target = f"compute_{max(older for older in known if older < number)}"
        stats.say_once(
            f"{arch} is newer than this NVRTC ({version()}): compiling PTX for {target}, from which the driver "
            "makes the machine code"
        )
        return target
    mend = ""
    if 50 <= number < min(known):
        needed = "the CUDA 12 compiler and no NVRTC 13 beside it, which a torch for CUDA 13 brings"
        mend = f"; older GPUs need {needed}: {cuda.INSTALL[12]}"
    raise UnsupportedConfigError(
        f"arch: NVRTC {version()} compiles for {', '.join(f'sm_{number}' for number in known)}, got {arch}{mend}"
    )


def compile(rendered: Rendered, arch: str, parameters: Mapping[str, Parameter]) -> Compiled:
    """Compile a rendered template; UnsupportedConfigError for a ``static_assert``, CompileError for all else."""
    target = target_for(arch)
    image, log, seconds = _run(rendered, target, parameters)
    dynamic = parameters.get("SHARED_BYTES")
    return Compiled(image, target, _parse_resources(log, dynamic if isinstance(dynamic, int) else 0), seconds)


def ptx(rendered: Rendered, arch: str, parameters: Mapping[str, Parameter]) -> str:
    """Compile to PTX for reading."""
    return _run(rendered, re.sub("^sm_", "compute_", target_for(arch)), parameters)[0].decode()


def _run(rendered: Rendered, target: str, parameters: Mapping[str, Parameter]) -> tuple[bytes, str, float]:
    nvrtc = cuda.nvrtc()
    names = [name.encode() for name, _ in rendered.headers]
    texts = [text.encode() for _, text in rendered.headers]
    program, log = 0, ""
    with forks.held_back():
        started = time.perf_counter()
        try:
            program = nvrtc.createProgram(rendered.source, _HEAD, texts, names)
            nvrtc.compileProgram(program, list(options(target)))
            log = nvrtc.getProgramLog(program)
            if target.startswith("compute_"):
                image = nvrtc.getPTX(program)
                image = image if isinstance(image, bytes) else image.encode()
            else:
                image = _whole(bytes(nvrtc.getCUBIN(program)))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program) if program else str(error)
            raise _explain(rendered, target, parameters, log) from error
        finally:
            if program:
                nvrtc.destroyProgram(program)
    return image, log, time.perf_counter() - started


def _whole(cubin: bytes) -> bytes:
    """Return the cubin with its last byte: CuPy's getCUBIN drops it, and it is zero."""
    missing = entry.elf_bytes(cubin) - len(cubin)
    if missing not in (0, 1):
        raise CompileError(f"NVRTC {version()} returned a cubin with {missing} bytes missing")
    return cubin + bytes(missing)


def _explain(rendered: Rendered, target: str, parameters: Mapping[str, Parameter], log: str) -> Exception:
    if cuda.nvrtc().getVersion() < cuda.OLDEST_NVRTC:
        oldest = ".".join(map(str, cuda.OLDEST_NVRTC))
        return CompileError(
            f"NVRTC {version()} is older than {oldest}, the oldest that rwkv_jit supports, and could not compile "
            f"{rendered.name}: `rwkv-jit doctor` prints the command that fixes it\n{log}"
        )
    values = ", ".join(f"{k}={short(str(v))}" for k, v in sorted(parameters.items()))
    rule = _ASSERTION.search(log)
    if rule:
        return UnsupportedConfigError(f"{rendered.name}: {rule[1]}; got {values}")
    if _UNKNOWN_ARCH.search(log):
        return UnsupportedConfigError(f"arch: NVRTC {version()} does not compile for {target}")
    place = _PLACE.search(log)
    excerpt = _excerpt(rendered, place[1], int(place[2])) if place else ""
    command = _save_failure(rendered, target)
    once_more = f"\nonce more: {command}" if command else ""
    error = CompileError(
        f"NVRTC {version()} could not compile {rendered.name} for {target} with {values}\n"
        f"options: {' '.join(options(target))}\n{excerpt}{log[:_MOST_OF_A_LOG]}{once_more}"
    )
    error.command = command
    error.is_lasting = _OF_SOURCE.search(log) is not None
    return error


def _save_failure(rendered: Rendered, target: str) -> str:
    """Save what did not compile, in a cache directory that lasts or else in a new folder; return the command."""
    folders: list[Callable[[], str | Path]] = [partial(tempfile.mkdtemp, prefix="rwkv_jit-")]
    if env.cache_is_lasting():
        folders.insert(0, partial(cache.source_folder, "failed"))
    for make in folders:
        with suppress(OSError):
            return shlex.join([sys.executable, str(save_source(Path(make()), rendered, target))])
    return ""


def save_source(folder: Path, rendered: Rendered, target: str) -> Path:
    """Write a rendered template, its headers and a program that compiles them; return the program's path."""
    digest = sha256("\0".join([rendered.source, *options(target), *map(str, rendered.headers)]).encode())
    folder = folder / f"{rendered.name}-{target}-{digest.hexdigest()[:16]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for name, _ in rendered.headers:
        file = re.sub(r"[^\w.-]", "_", name)
        while file in (f"{rendered.name}.cu", "compile.py", *files.values()):  # as of a/x.cuh beside a_x.cuh
            file = f"_{file}"
        files[name] = file
    for name, text in rendered.headers:
        (folder / files[name]).write_text(text, encoding="utf-8")
    (folder / f"{rendered.name}.cu").write_text(rendered.source, encoding="utf-8")
    program = folder / "compile.py"
    program.write_text(
        _PROGRAM.format(source=f"{rendered.name}.cu", headers=files, options=list(options(target))), encoding="utf-8"
    )
    return program


# What is filled in are literals of Python, so that no name becomes code.
_PROGRAM = '''"""Compile SOURCE, which lies beside this file, as rwkv_jit did, and print the compiler's log."""

import sys
from pathlib import Path

from cupy.cuda import nvrtc

SOURCE = {source!r}
HEADERS = {headers!r}
OPTIONS = {options!r}

here = Path(__file__).parent
headers = [(here / file).read_bytes() for file in HEADERS.values()]
source = (here / SOURCE).read_text(encoding="utf-8")
program = nvrtc.createProgram(source, "parameters.cu", headers, [name.encode() for name in HEADERS])
try:
    nvrtc.compileProgram(program, OPTIONS)
except nvrtc.NVRTCError as error:
    sys.exit(f"{{error}}\\n{{nvrtc.getProgramLog(program)}}")
print(nvrtc.getProgramLog(program))
'''


def _excerpt(rendered: Rendered, file: str, line: int, around: int = 4) -> str:
    """Numbered lines around an error; those of the template start after the `#line 1` of the rendering."""
    head, body = rendered.source.split("#line 1", 1)
    texts = {**dict(rendered.headers), _HEAD: head, f"{rendered.name}.cu": body.split("\n", 1)[1]}
    numbered = [
        f"{'>' if number == line else ' '}{number:5} | {text[:_MOST_OF_A_LINE]}\n"
        for number, text in enumerate(texts.get(file, "").splitlines(), 1)
        if abs(number - line) <= around
    ]
    return f"{file}:\n{''.join(numbered)}"


def _parse_resources(log: str, dynamic: int) -> dict[str, Resources]:
    """Read ptxas -v, e.g. ``Used 40 registers, 1024 bytes smem``: static shared memory, else `dynamic`."""
    resources: dict[str, Resources] = {}
    entry, spills = "", 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, spills = match[1], 0
        elif match := _SPILL.search(line):
            spills = int(match[1]) + int(match[2])
        elif match := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            resources[entry] = Resources(int(match[1]), spills, int(shared[1]) if shared else dynamic)
    return resources
