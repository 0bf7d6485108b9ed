"""What of this machine kernels need, checked one by one, each with the command that mends it."""

from __future__ import annotations

import difflib
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rwkv_jit.ahead import kernel_wheels
from rwkv_jit.desk import terminal, versions
from rwkv_jit.kernels import __version__, cache, compiler, cuda, env, identity
from rwkv_jit.kernels.cache import files, lock
from rwkv_jit.kernels.errors import NvrtcNotFoundError, RwkvJitError, reason

HEAD_SIZE = 16  # compiles fast
OLDEST_TORCH = (2, 6)  # the bound of the package


class Finding(NamedTuple):
    """What one check found. `state` is ok, warning or error; `mend` is a command or a sentence, or empty."""

    name: str
    state: str
    text: str
    mend: str = ""


def run(_: object = None) -> dict[str, Any]:
    """Check everything; return findings, dicts of name, state, text and mend, and passed, whether none is an error."""
    found, said = [finding for check in _CHECKS for finding in _guarded(check)], env.faults().values()
    # What a wrong variable stops is told once, with the variable.
    findings = [x._asdict() for x in found if x.name == "setting" or not any(text in x.text for text in said)]
    return {"findings": findings, "passed": all(finding["state"] != "error" for finding in findings)}


def show(result: dict[str, Any]) -> None:
    """Print what `run` returned; commands stand on lines of their own, to be copied."""
    findings = result["findings"]
    terminal.records({"check": "{name}", "state": "{state}", "found": "{text}"}, findings)
    for finding in findings:
        if finding["mend"]:
            terminal.say("\n{name}: {text}\n    {mend}".format(**finding))
    states = Counter(finding["state"] for finding in findings)
    print(f"\nErrors: {states['error']}, warnings: {states['warning']}.")


def _finding(name: str, text: str, mend: str = "") -> Finding:
    """Return what is well, or a warning where there is something to mend."""
    return Finding(name, "warning" if mend else "ok", text, mend)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except NvrtcNotFoundError as error:
        text, _, command = str(error).partition("\n")
        yield Finding("CuPy and NVRTC", "error", text.rstrip(":"), command.strip())
    except Exception as error:  # whatever one check stumbles over, the others still say what they find
        yield Finding(check.__name__.strip("_"), "error", f"{type(error).__name__}: {error}")


def _package() -> Iterator[Finding]:
    yield _finding("package", f"rwkv_jit {__version__}, Python {platform.python_version()}, {platform.platform()}")


def _gpus() -> Iterator[Finding]:
    import torch

    oldest = ".".join(map(str, OLDEST_TORCH))
    if _numbers(torch.__version__) < OLDEST_TORCH:
        text = f"{torch.__version__} is older than {oldest}, the oldest that rwkv_jit supports"
        yield Finding("torch", "error", text, f'pip install --upgrade "torch>={oldest}"')
    elif torch.version.cuda is None:
        mend = "to run kernels, install a torch with CUDA: https://pytorch.org/get-started/locally"
        yield _finding("torch", f"{torch.__version__}, without CUDA", mend)
    else:
        yield _finding("torch", f"{torch.__version__}, for CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory >> 30
        yield _finding(f"GPU {index}", f"{torch.cuda.get_device_name(index)}, {_arch_of(index)}, {memory} GiB")
    if not torch.cuda.device_count():
        is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        mend = "unset CUDA_VISIBLE_DEVICES" if is_hidden else "see what nvidia-smi says"
        yield _finding("GPU", "torch sees none: kernels can be compiled here, but not run", mend)


def _arch_of(index: int) -> str:
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a version, whatever comes behind them."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _compiler() -> Iterator[Finding]:
    import torch

    wheels = cuda.installed_cupy()
    cuda.nvrtc()
    yield _finding("CuPy", ", ".join(wheels) or "not from a wheel")
    built_for = re.search(r"cuda(\d+)x", " ".join(wheels))
    if built_for and torch.version.cuda:
        text = f"CUDA {built_for[1]} and CUDA {torch.version.cuda.split('.')[0]}"
        share = "; they need not agree: one primary context serves both, and cubins go through the driver"
        yield _finding("CuPy and torch", text + share)
    yield _nvrtc()
    yield from (_finding("NVRTC library", path) for path in identity.libraries())
    yield from _driver()
    yield from map(_arch, _archs())


def _nvrtc() -> Finding:
    import torch

    version, oldest = identity.version(), ".".join(map(str, cuda.OLDEST_NVRTC))
    if not _is_too_old(version):
        return _finding("NVRTC", identity.identity())
    mend = f"{cuda.INSTALL[12]} --upgrade"
    if torch.version.cuda and _numbers(torch.version.cuda) == _numbers(version):
        mend = 'pip install --upgrade "torch>={}.{}"'.format(*OLDEST_TORCH)  # which brings its own
    return Finding("NVRTC", "error", f"{version} is older than {oldest}, the oldest that rwkv_jit supports", mend)


def _is_too_old(nvrtc: str) -> bool:
    return _numbers(nvrtc) < cuda.OLDEST_NVRTC


def _instead(major: int) -> str:
    """Return how to get NVRTC of another CUDA: CuPy takes the one that torch loaded, else the newest installed."""
    import torch

    if torch.version.cuda and torch.version.cuda.split(".")[0] != str(major):
        return f"install a torch for CUDA {major}, which brings its NVRTC: https://pytorch.org/get-started/locally"
    wheels = " ".join(wheel.split()[0] for wheel in cuda.installed_cupy())
    return f"pip uninstall -y {wheels} nvidia-cuda-nvrtc && {cuda.INSTALL[major]} --upgrade"


def _driver() -> Iterator[Finding]:
    driver, nvrtc = cuda.driver_version(), identity.version()
    if driver == "none":
        yield _finding("driver", "there is no NVIDIA driver", "to run kernels, install NVIDIA's driver")
        return
    yield _finding("driver", f"supports CUDA {driver}")
    needed = int(nvrtc.split(".")[0])
    if needed > int(driver.split(".")[0]):
        text = f"cubins of NVRTC {nvrtc} need a driver for CUDA {needed}, this one is for {driver}"
        yield _finding("NVRTC and driver", text, _instead(12))
    else:
        yield _finding("NVRTC and driver", f"the driver loads cubins of NVRTC {nvrtc}")


def _archs() -> list[str]:
    """Return what kernels are compiled for here."""
    import torch

    chosen = os.environ.get("RWKVJIT_ARCH") or versions.default_arch()  # which `_arch` checks
    return [chosen] if chosen else sorted({_arch_of(index) for index in range(torch.cuda.device_count())})


def _arch(arch: str) -> Finding:
    try:
        target = compiler.target_for(arch)
    except ValueError as error:
        return Finding("architecture", "error", *_text_and_mend(str(error), "unset RWKVJIT_ARCH"))
    if target == arch:
        return _finding("architecture", f"NVRTC compiles for {arch}")
    text = f"NVRTC {identity.version()} does not know {arch}: the driver makes its code from PTX of {target}"
    return _finding("architecture", text, _instead(13))


def _cache() -> Iterator[Finding]:
    if not env.cache_is_on():
        fault = f", {env.cache_fault()}" if env.cache_fault() else ""
        text, mend = _text_and_mend(f"off{fault}", f"unset RWKVJIT_CACHE{'_DIR' if fault else ''}")
        yield _finding("cache", f"{text}: every process compiles its kernels", mend)
        return
    root = env.cache_dir()
    fault = _write_fault(root)
    if fault:
        mend = "set RWKVJIT_CACHE_DIR to a directory that you own"
        yield Finding("cache directory", "error", *_text_and_mend(fault, mend))
        return
    size, free, most = cache.size(), shutil.disk_usage(root).free, env.cache_max_bytes()
    yield _finding("cache directory", f"{root}, {len(cache.entries())} kernels, {size >> 20} MiB")
    kind = lock.network_file_system(root)
    if kind:
        text = f"{root} is on a network file system ({kind}): it works, but slower"
        yield _finding("cache file system", text, "set RWKVJIT_CACHE_DIR to a directory of this node")
    else:
        yield _finding("cache file system", "a disk of this node")
    text = f"{free >> 20} MiB free; kernels may take {most >> 20} MiB"
    yield _finding("cache space", text, "free some, or set RWKVJIT_CACHE_MAX_MB to less" if free + size < most else "")
    yield from _layers()
    yield from _locks()


def _write_fault(folder: Path, is_private: bool = False) -> str:
    """Write a small file, as the cache would, and delete it; return what is wrong."""
    try:
        files.make_directory(folder, is_private)
        files.check_writable(folder)
    except files.UntrustedError as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be written: {reason(error)}"
    return ""


def _text_and_mend(message: str, otherwise: str) -> tuple[str, str]:
    """Split a message of this package, which says how to mend it after a semicolon, if it does."""
    text, _, mend = message.partition("; ")
    return text, mend.removeprefix("fix it: ") or otherwise


def _layers() -> Iterator[Finding]:
    faults = cache.unreadable()
    for path, fault in faults.items():
        otherwise = f"repair {path}, delete it, or take it out of RWKVJIT_CACHE_PATH"
        yield Finding("cache layer", "error", *_text_and_mend(fault, otherwise))
    wheels = kernel_wheels.listed()
    for layer in cache.layers()[1:]:
        if layer.path not in faults and layer.path not in {wheel.path for wheel in wheels}:
            yield _finding("cache layer", f"{layer.path}, {len(layer.names())} kernels")
    for wheel in wheels:
        if wheel.path not in faults:
            mend = "" if wheel.usable else f"install the {wheel.name} of rwkv_jit {__version__}"
            yield _finding("kernel wheel", f"{wheel.name} {wheel.text}", mend)


def _locks() -> Iterator[Finding]:
    folder = lock.directory()
    kind = lock.network_file_system(folder)
    fault = f"{folder} is on a network file system ({kind})" if kind else _write_fault(folder, is_private=True)
    if fault:
        text, mend = _text_and_mend(fault, "set TMPDIR to a directory of this node")
        yield _finding("locks", f"{text}: every process compiles for itself", mend)
    else:
        yield _finding("locks", str(folder))


def _variables() -> Iterator[Finding]:
    faults = env.faults()
    for name, value in env.set_variables().items():
        if name in faults:
            yield Finding("setting", "error", faults[name], f"unset {name}")
        else:
            yield _finding("setting", f"{name}={value}: {env.DESCRIPTIONS[name]}")
    for name in sorted(os.environ):
        if name.startswith("RWKVJIT_") and name not in env.DESCRIPTIONS:
            near = difflib.get_close_matches(name, env.DESCRIPTIONS, n=1)
            mend = f"is {near[0]} meant?" if near else f"there are: {', '.join(env.DESCRIPTIONS)}"
            yield _finding("setting", f"{name} is not a variable of rwkv_jit and has no effect", mend)


def _ops() -> Iterator[Finding]:
    import torch

    from rwkv_jit.ahead import warm
    from rwkv_jit.schedules.table import ALL as OPS

    if not _can_compile():
        return  # the check of the compiler says why
    try:
        with versions.empty_cache():
            made = warm.specialize("wkv7", HEAD_SIZE, arch=versions.default_arch(), backend="recurrent")
    except (RwkvJitError, ValueError) as error:
        yield Finding("compile wkv7", "error", str(error))
        return
    text = f"{made.target}: {made.registers} registers, {made.spill_bytes} bytes spilled"
    yield _finding("compile wkv7", f"{text}, {1e3 * made.compile_seconds:.0f} ms")
    if torch.cuda.is_available():
        yield from map(_run_op, OPS)


def _can_compile() -> bool:
    try:
        cuda.nvrtc()
        return not _is_too_old(identity.version()) and all(compiler.target_for(arch) for arch in _archs())
    except (NvrtcNotFoundError, ValueError):
        return False


def _run_op(op: str) -> Finding:
    import torch

    from rwkv_jit.desk import demo

    try:
        checked = demo.check(op, None if demo.sizes_of(op) == (None,) else HEAD_SIZE, torch.float32, "cuda")
    except RuntimeError as error:  # of ours or torch's
        return Finding(f"run {op}", "error", str(error))
    text = "errors against float64: {error:.1e}, of gradients {gradient_error:.1e}, limit {limit:.0e}".format(**checked)
    return Finding(f"run {op}", "ok" if checked["passed"] else "error", text)


_CHECKS = (_package, _gpus, _compiler, _cache, _variables, _ops)
