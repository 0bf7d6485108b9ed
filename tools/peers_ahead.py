"""Compile FLA's Triton kernels for the bench's suites where no GPU is: on the GPU, tuners then only time them.

    python tools/peers_ahead.py build FOLDER                  all suites: about 45 minutes of two cores
    python tools/peers_ahead.py build FOLDER gla --mib 15     one suite, in archives of at most 15 MiB
    python tools/peers_ahead.py unpack FOLDER                 on the GPU machine, into TRITON_CACHE_DIR
    python tools/peers_ahead.py pack OTHER                    there, behind the bench: what it compiled and tuned

Kernels are for sm_90. Both machines need one version of Triton, of FLA and of Python, the same ptxas and the same
variables of Triton. What does not fit is left out, and `unpack` says so. Triton's own files may differ, on which keys
depend: these are worked out by `unpack`. Unpack archives of your own alone: they are pickles.

A build that was interrupted goes on where it ended, with what FOLDER/cache has. The archives alone are carried.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import lzma
import multiprocessing
import os
import pickle
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the suites are this checkout's

import torch  # noqa: E402

from bench import cases, measure, peers, suites  # noqa: E402
from rwkv_jit.desk.bench import one_line  # noqa: E402

# What FLA and Triton ask of a GPU before they choose kernels, as an H100 answers.
NAME, CAPABILITY, SMS, SHARED = "NVIDIA H100 80GB HBM3", (9, 0), 132, 232448
_TARGET = ("cuda", 90, 32)
_KEPT = (".cubin", ".json", ".so")
_AHEAD = "ahead"  # a file in the cache's folders that `unpack` made from a build: `pack` leaves them there
_SMALLER = 8  # what kernels take is about so many times what their archive does
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]  # kernels are like those far before them


class Entry(NamedTuple):
    """One folder of Triton's cache, and what a machine must have to use it.

    The folder of a kernel compiled ahead has no name yet: its key is a digest of Triton's files on the GPU machine and
    of `behind`.
    """

    needs: dict[str, str]
    files: dict[str, bytes]
    folder: str = ""
    behind: str = ""


# ---- archives ----------------------------------------------------------------------------------------------------


def write(entries: Iterable[Entry], folder: Path, stem: str, mib: float) -> list[Path]:
    """Write archives of at most `mib` MiB each in the place of older ones, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{stem}-*.xz"):
        old.unlink()
    most = int(mib * 2**20)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [data for each in pool.map(lambda part: _packed(part, most), _parts(entries, most)) for data in each]
    paths = [folder / f"{stem}-{number:02}.xz" for number in range(len(made))]
    for path, data in zip(paths, made, strict=True):
        path.write_bytes(data)
    return paths


def _parts(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        own = sum(map(len, entry.files.values()))
        if part and size + own > _SMALLER * most:
            yield part
            part, size = [], 0
        part.append(entry)
        size += own
    if part:
        yield part


def _packed(entries: Sequence[Entry], most: int) -> list[bytes]:
    data = lzma.compress(pickle.dumps([tuple(entry) for entry in entries]), filters=_FILTERS)
    if len(data) <= most:
        return [data]
    if len(entries) == 1:
        raise ValueError(f"--mib: {', '.join(entries[0].files)} alone takes {len(data) / 2**20:.3f}")
    half = len(entries) // 2
    return [*_packed(entries[:half], most), *_packed(entries[half:], most)]


def unpack(path: Path, cache: Path, here: Mapping[str, str]) -> str:
    """Put the entries of an archive that fit this machine where Triton looks for them; say what was done."""
    left_out: Counter[str] = Counter()
    placed = 0
    for entry in (Entry(*each) for each in pickle.loads(lzma.decompress(path.read_bytes()))):
        other = [name for name, needed in entry.needs.items() if here[name] != needed]
        if other:
            left_out[" and another ".join(other)] += 1
        else:
            _place(entry, cache, here)
            placed += 1
    return "".join([f"{path.name}: {placed} placed", *(f", {n} left out of another {x}" for x, n in left_out.items())])


def _place(entry: Entry, cache: Path, here: Mapping[str, str]) -> None:
    files, name = dict(entry.files), entry.folder
    metadata = next((name for name in files if name.endswith(".json") and not _is_result(name)), None)
    if entry.behind:
        digest = sha256((here["build of Triton"] + entry.behind).encode()).hexdigest()
        name = _folder_of(digest)
        files[str(metadata)] = json.dumps({**json.loads(files[str(metadata)]), "hash": digest}).encode()
    if metadata is not None:  # Triton finds the files of a kernel by their paths
        paths = {file: str(cache / name / file) for file in files}
        files[f"__grp__{metadata}"] = json.dumps({"child_paths": paths}).encode()
    if "build of Triton" not in entry.needs:
        files[_AHEAD] = b""
    (cache / name).mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (cache / name / file).write_bytes(data)


def added(cache: Path, here: Mapping[str, str]) -> Iterator[Entry]:
    """Give what a cache has beside what a build put there: kernels, what launches them, and results of tuners."""
    for folder in sorted(cache.iterdir()):
        if not folder.is_dir():
            continue
        files = _read(folder)
        needed = ["build of Triton"]
        if any(map(_is_result, files)):
            needed.append("GPU")
        elif (folder / _AHEAD).exists() or not any(name.endswith((".cubin", ".so")) for name in files):
            continue
        elif any(name.endswith(".so") for name in files):
            needed.append("Python")
        yield Entry({name: here[name] for name in needed}, files, folder.name)


def _read(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.iterdir()) if path.name.endswith(_KEPT)]
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith("__grp__")}


def _is_result(name: str) -> bool:
    return name.endswith(".autotune.json")


def _folder_of(digest: str) -> str:
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def machine() -> dict[str, str]:
    """Return what decides whether an entry fits: of the GPU here, or without one of sm_90."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    has_gpu = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if has_gpu else CAPABILITY
    return {
        "Triton": triton.__version__,
        "build of Triton": triton_key(),
        "FLA": importlib.metadata.version("fla-core"),
        "ptxas or architecture": make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash(),
        "environment": str(sorted(get_cache_invalidating_env_vars().items())),
        "Python": sysconfig.get_config_var("EXT_SUFFIX"),
        "GPU": torch.cuda.get_device_name() if has_gpu else "",
    }


# ---- a build -----------------------------------------------------------------------------------------------------


def _pretend() -> None:
    """Let FLA and Triton see an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    about = {"max_shared_mem": SHARED, "multiprocessor_count": SMS, "max_num_regs": 65536, "warpSize": 32}
    driver.set_active(
        types.SimpleNamespace(
            utils=types.SimpleNamespace(get_device_properties=lambda device: about),
            get_current_target=lambda: GPUTarget(*_TARGET),
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_device_interface=lambda: torch.cuda,
        )
    )
    properties = types.SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=SMS, total_memory=80 << 30,
        shared_memory_per_block_optin=SHARED, L2_cache_size=50 << 20, warp_size=32,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "synchronize": None, "get_device_name": NAME,
        "get_device_capability": CAPABILITY, "get_device_properties": properties,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def collect(names: Sequence[str], here: Mapping[str, str]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return every kernel that FLA's calls in suites reach with any choice of its tuner, by what its key is of.

    The calls are made on meta tensors. Nothing is compiled or launched. Which call tunes a kernel depends on which
    comes first, so all of them have all choices.
    """
    from triton.runtime import autotuner, jit

    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    run = jit.JITFunction.run

    def note(
        self: Any, key: Any, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:
        source, backend = self.ASTSource(self, signature, constexprs, attrs), self.device_caches[device][3]
        behind = f"-{source.hash()}-{backend.hash()}-{options.hash()}-{here['environment']}"
        found.setdefault(behind, (source, dict(options.__dict__)))

    def every_choice(self: Any, *args: Any, **options: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(options) if len(self.configs) > 1 else self.configs:
            self.fn.run(*args, **options, **config.all_kwargs())

    jit.JITFunction._do_compile = note
    jit.JITFunction.run = lambda self, *args, grid, warmup, **more: run(self, *args, grid=grid, warmup=True, **more)
    autotuner.Autotuner.run = every_choice
    for case in dict.fromkeys(entry.case for entry in suites.entries_of(names)):
        given = cases.given_for(case._replace(kind="usual") if case.kind == "packed" else case, "meta")
        given = given._replace(cu_seqlens=cases.ends_of(case, "cpu"))  # their values are read
        for peer in peers.peers_of(case):
            if peer.who == "fla":
                measure.run_once(case, peer, given)()
    return found


def _compiled(behind: str) -> tuple[str, str]:
    """Compile one of `_found`, or find it in the cache; return its folder, or else what went wrong."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compiler

    source, options = _found[behind]
    try:
        return _folder_of(compiler.compile(source, target=GPUTarget(*_TARGET), options=options).hash), ""
    except Exception as error:
        return "", f"{source.name}: {one_line(error)}"


def _launchers(sources: Iterable[Any], here: Mapping[str, str]) -> list[Entry]:
    """Return what Triton builds with a C compiler to launch kernels, linked to a library that stands for CUDA's."""
    from triton.backends.nvidia import driver
    from triton.runtime import build

    texts = {("cuda_utils", Path(driver.dirname, "driver.c").read_text(encoding="utf-8"))}
    for source in sources:
        indices = source.fn.arg_names.index
        constants = {(indices(key),) if isinstance(key, str) else key: x for key, x in source.constants.items()}
        texts.add(("__triton_launcher", driver.make_launcher(constants, dict(source.signature), None)))

    with tempfile.TemporaryDirectory() as stub:
        made = [os.environ.get("CC", "cc"), "-shared", "-x", "c", os.devnull, "-o", str(Path(stub, "libcuda.so.1"))]
        subprocess.run(made, check=True)

        def built(named: tuple[str, str]) -> Entry:
            name, text = named
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"{name}.c")
                path.write_text(text, encoding="utf-8")
                where = [driver.libdevice_dir, stub], driver.include_dirs, driver.libraries, ["-s"]
                library = Path(build._build(name, str(path), folder, *where))
                digest = sha256((text + build.platform_key()).encode()).hexdigest()
                return Entry({"Python": here["Python"]}, {library.name: library.read_bytes()}, _folder_of(digest))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(built, sorted(texts)))


_found: dict[str, tuple[Any, dict[str, Any]]] = {}  # for processes that are forked


def _build(given: argparse.Namespace) -> Iterator[str]:
    cache = given.folder / "cache"
    os.environ |= {"TRITON_CACHE_DIR": str(cache.resolve()), "TRITON_STORE_BINARY_ONLY": "1"}
    here = machine()
    needs = {name: here[name] for name in ("Triton", "FLA", "ptxas or architecture", "environment")}
    _pretend()
    _found.update(collect(given.suites or ["studies"], here))
    yield f"{len(_found)} kernels to compile"
    entries: list[Entry] = []
    with multiprocessing.get_context("fork").Pool() as pool:
        for done, (behind, (folder, error)) in enumerate(zip(_found, pool.imap(_compiled, _found), strict=True), 1):
            if error:
                yield error
            else:
                entries.append(Entry(needs, _read(cache / folder), behind=behind))
            if done % 200 == 0:
                yield f"{done} compiled"
    entries.sort(key=lambda entry: (sorted(entry.files), entry.behind))
    entries += _launchers((source for source, _ in _found.values()), here)
    yield from map(_sized, write(entries, given.folder, "kernels", given.mib))


def _unpack(given: argparse.Namespace) -> Iterator[str]:
    from triton import knobs

    here, cache = machine(), Path(knobs.cache.dir)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda path: unpack(path, cache, here), sorted(given.folder.glob("*.xz")))


def _pack(given: argparse.Namespace) -> Iterator[str]:
    from triton import knobs

    yield from map(_sized, write(added(Path(knobs.cache.dir), machine()), given.folder, "tuned", given.mib))


def _sized(path: Path) -> str:
    return f"{path}: {path.stat().st_size / 2**20:.1f} MiB"


def _main() -> Iterator[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    for run, summary in (
        (_build, "compile kernels, and write archives of them"),
        (_unpack, "put what archives have into Triton's cache"),
        (_pack, "write archives of what a run of the bench added to Triton's cache"),
    ):
        command = commands.add_parser(run.__name__[1:], help=summary, description=f"{summary}.")
        command.add_argument("folder", type=Path)
        command.set_defaults(run=run)
        if run is not _unpack:
            command.add_argument("--mib", type=float, default=4, help="the most that an archive has (default: 4)")
        if run is _build:
            of = f"of {', '.join(suites.SUITES)} (default: studies)"
            command.add_argument("suites", nargs="*", metavar="SUITE", help=of)
    given = parser.parse_args()
    for suite in given.suites if given.run is _build else ():
        if suite not in suites.SUITES:
            parser.error(f"SUITE: expected some of {', '.join(suites.SUITES)}, got {suite!r}")
    yield from given.run(given)


if __name__ == "__main__":
    for line in _main():
        print(line, flush=True)
