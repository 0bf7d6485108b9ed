"""Source and architecture to machine code through NVRTC; no GPU, driver, toolkit header or include path needed."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from rwkv_jit import cuda, env, stats
from rwkv_jit.errors import CompileError, UnsupportedConfigError
from rwkv_jit.template import Parameter, Rendered

_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_ASSERTION = re.compile(r'static assertion failed with "([^"]*)"')
_HEAD = "parameters.cu"  # the name of the lines above `#line 1`
_PLACE = re.compile(r"^([\w.]+)\((\d+)\): error", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor. Zeros where the driver compiles it from PTX."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """A cubin, or PTX for the driver, and the resources of each kernel in it."""

    image: bytes
    target: str
    resources: dict[str, Resources]
    seconds: float = 0.0


def options(target: str) -> tuple[str, ...]:
    """Return NVRTC's options, in the order of the cache key.

    ``--no-cache`` because NVRTC's own cache lives in the driver and hides the resource report;
    ``--modify-stack-limit=false`` because the default changes the whole process's limits.
    """
    return (f"-arch={target}", "-std=c++17", "--no-cache", "--modify-stack-limit=false", "--ptxas-options=-v")


def check_arch(arch: str) -> str:
    """Return `arch` if it is written like one.

    Raises
    ------
    ValueError
        It is not of the form sm_90, sm_90a or compute_90.
    """
    if not isinstance(arch, str) or not _ARCH.fullmatch(arch):
        raise ValueError(f"arch: expected sm_NN, sm_NNa or compute_NN, got {arch!r}")
    return arch


def target_for(arch: str) -> str:
    """Return what the NVRTC at hand compiles for `arch`: itself, or PTX when the GPU is newer than the compiler."""
    match = _ARCH.fullmatch(check_arch(arch))
    assert match is not None
    number = int(match[2])
    known = [int(a) for a in cuda.nvrtc().getSupportedArchs()]
    if number in known:
        return arch
    if number > max(known):
        target = f"compute_{max(known)}"
        stats.say_once(
            f"{arch} is newer than this NVRTC ({version()}): compiling PTX for {target}, from which the driver "
            "makes the machine code"
        )
        return target
    raise UnsupportedConfigError(
        f"arch: NVRTC {version()} compiles sm_{min(known)} to sm_{max(known)}, got {arch}"
        + (f"; older GPUs need the CUDA 12 compiler: {cuda.INSTALL[12]}" if number < min(known) else "")
    )


def compile(rendered: Rendered, arch: str, parameters: Mapping[str, Parameter]) -> Compiled:
    """Compile a rendered template.

    Raises
    ------
    UnsupportedConfigError
        A ``static_assert`` of the template failed: its text is the message.
    CompileError
        Anything else that NVRTC refused.
    """
    target = target_for(arch)
    image, log, seconds = _run(rendered, target, parameters)
    return Compiled(image, target, _parse_resources(log), seconds)


def ptx(rendered: Rendered, arch: str, parameters: Mapping[str, Parameter]) -> str:
    """Compile to PTX for reading."""
    target = re.sub("^sm_", "compute_", target_for(arch))
    return _run(rendered, target, parameters)[0].decode()


def _run(rendered: Rendered, target: str, parameters: Mapping[str, Parameter]) -> tuple[bytes, str, float]:
    nvrtc = cuda.nvrtc()
    names = [name.encode() for name, _ in rendered.headers]
    texts = [text.encode() for _, text in rendered.headers]
    program = nvrtc.createProgram(rendered.source, _HEAD, texts, names)
    started = time.perf_counter()
    try:
        nvrtc.compileProgram(program, list(options(target)))
        log = nvrtc.getProgramLog(program)
        if target.startswith("compute_"):
            image = nvrtc.getPTX(program)
            image = image if isinstance(image, bytes) else image.encode()
        else:
            # CuPy's getCUBIN drops the last byte, which NVRTC always pads with zero.
            image = bytes(nvrtc.getCUBIN(program)) + b"\0"
    except nvrtc.NVRTCError as error:
        raise _explain(rendered, target, parameters, nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    return image, log, time.perf_counter() - started


def _explain(rendered: Rendered, target: str, parameters: Mapping[str, Parameter], log: str) -> Exception:
    where = f"{rendered.name} for {target} with " + ", ".join(f"{k}={v}" for k, v in sorted(parameters.items()))
    rule = _ASSERTION.search(log)
    if rule:
        return UnsupportedConfigError(f"{rendered.name}: {rule[1]}; got {where.split(' with ')[1]}")
    place = _PLACE.search(log)
    excerpt = ""
    if place:
        excerpt = _excerpt(rendered, place[1], int(place[2]))
    return CompileError(
        f"NVRTC {version()} could not compile {where}\noptions: {' '.join(options(target))}\n{excerpt}{log}"
    )


def _excerpt(rendered: Rendered, file: str, line: int, around: int = 4) -> str:
    """Numbered lines around an error; the template's own numbers start after the `#line 1` of the rendering."""
    head, body = rendered.source.split("#line 1", 1)
    texts = {**dict(rendered.headers), _HEAD: head, f"{rendered.name}.cu": body.split("\n", 1)[1]}
    text = texts.get(file, "")
    lines = text.splitlines()
    first = max(line - around, 1)
    numbered = (
        f"{'>' if n == line else ' '}{n:5} | {lines[n - 1]}" for n in range(first, min(line + around, len(lines)) + 1)
    )
    return f"{file}:\n" + "\n".join(numbered) + "\n"


def _parse_resources(log: str) -> dict[str, Resources]:
    """Read ptxas -v, e.g. ``Used 40 registers, used 1 barriers, 1024 bytes smem``."""
    found: dict[str, Resources] = {}
    entry, spills = "", 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, spills = match[1], 0
        elif match := _SPILL.search(line):
            spills = int(match[1]) + int(match[2])
        elif match := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            found[entry] = Resources(int(match[1]), spills, int(shared[1]) if shared else 0)
    return found


# ---- which compiler this is --------------------------------------------------------------------------------------


def version() -> str:
    """Return NVRTC's version, e.g. "12.9"; builds of one version differ, so the cache key uses `identity`."""
    return ".".join(str(part) for part in cuda.nvrtc().getVersion())


@cache
def identity() -> str:
    """Return what tells compiler builds apart: version and build-ids of the libraries really loaded."""
    libraries = _libraries()
    parts = [version(), *(_build_id(path) for path in libraries)]
    name = " ".join(parts)
    _remember(name, libraries)
    return name


def assumed_identity() -> str | None:
    """Return the identity noted by an earlier process, without loading NVRTC, while its files are unchanged."""
    try:
        note = json.loads(_note().read_text(encoding="utf-8"))
        unchanged = all(_stamp(path) == stamp for path, stamp in note["libraries"].items())
        return str(note["identity"]) if unchanged and note["libraries"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _libraries() -> list[str]:
    """Return libnvrtc and, beside it, its builtins, which it loads at the first compile."""
    cuda.nvrtc()
    main = [path for path in cuda.loaded_libraries("libnvrtc.") if "builtins" not in path]
    return main + sorted(
        str(p) for path in main for p in Path(path).parent.glob("libnvrtc-builtins*") if ".alt." not in p.name
    )


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _note() -> Path:
    environment = sha256(os.path.realpath(sys.prefix).encode()).hexdigest()[:16]
    return env.cache_dir() / f"nvrtc-{environment}.json"


def _remember(name: str, libraries: list[str]) -> None:
    """Note the identity for `assumed_identity`; without a writable cache there is nothing to find anyway."""
    note = json.dumps({"identity": name, "libraries": {path: _stamp(path) for path in libraries}})
    try:
        _note().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=_note().parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(note)
        os.replace(temporary, _note())
    except OSError:
        pass


def _build_id(path: str) -> str:
    """Return the GNU build-id of a 64-bit ELF library; where it carries none, the hash of the file."""
    with open(path, "rb") as file:
        for kind, name, text in _elf_notes(file.read(64), file):
            if kind == 3 and name == b"GNU\0":
                return text.hex()
        file.seek(0)
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _elf_notes(header: bytes, file: object) -> Iterator[tuple[int, bytes, bytes]]:
    if header[:5] != b"\x7fELF\x02":
        return
    table, entry_size, count = struct.unpack_from("<32xQ14xHH", header)
    for index in range(count):
        file.seek(table + index * entry_size)  # type: ignore[attr-defined]
        kind, offset, size = struct.unpack("<I4xQ16xQ", file.read(40))  # type: ignore[attr-defined]
        if kind != 4:  # PT_NOTE
            continue
        file.seek(offset)  # type: ignore[attr-defined]
        notes = file.read(size)  # type: ignore[attr-defined]
        at = 0
        while at + 12 <= len(notes):
            name_size, text_size, note_kind = struct.unpack_from("<III", notes, at)
            name_end = at + 12 + name_size
            text_start = at + 12 + (name_size + 3) // 4 * 4
            yield note_kind, notes[at + 12 : name_end], notes[text_start : text_start + text_size]
            at = text_start + (text_size + 3) // 4 * 4
