"""What each command of `rwkv-jit` does: it returns its result and the function that prints it.

torch is imported by the commands that need it, and by no others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rwkv_jit.desk import kernel_table, terminal
from rwkv_jit.kernels import cache, env
from rwkv_jit.kernels.cache import bundle, files
from rwkv_jit.kernels.errors import CacheError, RwkvJitError, printable
from rwkv_jit.schedules import build_command

if TYPE_CHECKING:
    from rwkv_jit.kernels.kernel import Kernel, Request

_RESOURCES = ("registers", "spill_bytes", "shared_bytes")
Outcome = tuple[dict[str, Any], Callable[[dict[str, Any]], None]]


def _of_module(name: str) -> Callable[[argparse.Namespace], Outcome]:
    """Return the command of a module that has `run` and `show`."""

    def command(parsed: argparse.Namespace) -> Outcome:
        module = import_module(f"rwkv_jit.desk.{name}")
        if name in ("demo", "bench") and getattr(parsed, "shape", None) is None:  # their tensors are small
            import_module("rwkv_jit.desk.bench").use_one_thread()
        return module.run(parsed), module.show

    return command


demo, doctor, bench, profile = map(_of_module, ("demo", "doctor", "bench", "profiling"))


def tune(parsed: argparse.Namespace) -> Outcome:
    """Choose geometries by measuring, list what is chosen, or delete it."""
    from rwkv_jit.call import tuned
    from rwkv_jit.desk import tune

    if parsed.show:
        return tune.listed(), tune.show_listed
    if parsed.forget:
        deleted, path = tuned.delete(), str(tuned.path())
        text = f"{path} deleted" if deleted else f"there is no {path}"
        return {"path": path, "deleted": deleted}, lambda _: terminal.say(text)
    if not parsed.dry_run:
        _check_writable(None, "store nothing with --dry-run")
    return tune.run(parsed), tune.show


def info(parsed: argparse.Namespace) -> Outcome:
    """Return what belongs in a bug report."""
    from rwkv_jit.ahead import kernel_wheels
    from rwkv_jit.desk import versions

    about = {"cache": versions.cache_info(), "environment": versions.env_report()}
    wheels = {wheel.name: wheel.text for wheel in (kernel_wheels.listed() if env.cache_is_on() else ())}
    return about | ({"wheels of kernels": wheels} if wheels else {}), _show_sections


def _show_sections(result: dict[str, Any]) -> None:
    for title, entries in result.items():
        print(title)
        terminal.table((), [(name.replace("_", " "), terminal.text(value)) for name, value in entries.items()])


# ---- kernels -----------------------------------------------------------------------------------------------------


def build(parsed: argparse.Namespace) -> Outcome:
    """Compile kernels, once everything that can be wrong beforehand has been checked."""
    from rwkv_jit.ahead import models

    if parsed.model:
        models.fill(parsed)
    _check_used(parsed, parsed.op)
    for op in parsed.op:
        if build_command.OPS[op].has_heads and parsed.head_size is None:
            raise ValueError(f"--head-size: {op} needs some, got none")
    if parsed.digest and not parsed.output:
        raise ValueError("--digest: is that of a bundle, which --output names")
    from rwkv_jit.call import switches  # with torch, which takes seconds
    from rwkv_jit.kernels import compiler, identity

    with switches.at(switches.HIGH) if parsed.precision else contextlib.nullcontext():
        requests = [request._replace(also=()) for request in _asked_for(parsed)]  # exactly what was asked for
    if not requests:
        if parsed.op == ["timex"]:
            raise ValueError("--tokens: calls of timex with so many run torch.fft, and there is nothing to compile")
        raise ValueError(f"--direction: {', '.join(parsed.op)} has no kernels for {parsed.direction}")
    for arch in dict.fromkeys(request.arch for request in requests):
        compiler.target_for(arch, newer=False)  # a bundle for a GPU that is not known is a slip of the pen
    _check_writable(parsed.output, "name a bundle with --output")
    kernels = _compile(requests, alike=parsed.output is not None)
    written = bundle.write(Path(parsed.output), (kernel.entry() for kernel in kernels)) if parsed.output else None
    return {
        "kernels": [_about(kernel) for kernel in kernels],
        "compiler": identity.identity(),
        "path": parsed.output or str(env.cache_dir()),
        "bytes": written,
        **_digest(parsed, parsed.output),
    }, partial(_show_built, is_verbose=parsed.verbose)


def _asked_for(parsed: argparse.Namespace) -> list[Request]:
    """Return the kernels that the options of a build name. What an op does not have is for the others."""
    from rwkv_jit.ahead import requests as ahead_requests
    from rwkv_jit.call.plan import DTYPES

    defaults = {"dtype": "bf16", "state_dtype": "fp32"}
    asked = vars(parsed) | ({"direction": list(ahead_requests.DIRECTIONS)} if parsed.direction == "both" else {})
    names = [name for name in ahead_requests.Calls._fields if name not in ("op", "rings", "inputs", "switches")]
    of_some = {name for op in build_command.OPS for name in ahead_requests.options_of(op)}

    def values(op: str, name: str) -> list[Any]:
        given, own = asked[name], ahead_requests.options_of(op)
        if name in of_some - {*own} and any(name in ahead_requests.options_of(other) for other in parsed.op):
            given = None
        if given is None:
            given = defaults.get(name)
        several = given if isinstance(given, list) else [given]
        return [DTYPES.get(value) for value in several] if name.endswith("dtype") else several

    inputs = _inputs(parsed)
    requests: list[Request] = []
    for op in parsed.op:
        of_op = {name: inputs[name] for name in build_command.OPS[op].public_names if name in inputs}
        for case in product(*(values(op, name) for name in names)):
            given = dict(zip(names, case, strict=True))
            calls = ahead_requests.Calls(op, **given, inputs=of_op, switches=_switches(parsed, op))
            requests += ahead_requests.call_requests(calls)
    return requests


def _inputs(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the inputs that a command line names, with their dtypes or None."""
    from rwkv_jit.call.plan import DTYPES

    return {name: None if dtype is None else DTYPES[dtype] for name, dtype in parsed.inputs or ()}


def _switches(parsed: argparse.Namespace, op: str) -> dict[str, Any]:
    """Return the switches of an op that a command line names."""
    named = {name: getattr(parsed, name, None) for name in build_command.OPS[op].traits}
    return {name: value for name, value in named.items() if value is not None}


def _check_used(parsed: argparse.Namespace, ops: Iterable[str]) -> None:
    """Check that some op has each switch and each input that a command line names."""
    several = [build_command.OPS[op] for op in ops]
    switches = {name for name in build_command.SWITCHES if getattr(parsed, name, None) is not None}
    inputs = {name: [op.public_names for op in several] for name, _ in parsed.inputs or ()}
    for name in switches - {name for op in several for name in op.traits}:
        raise ValueError(f"{name}: {', '.join(ops)} has none, got {getattr(parsed, name)}")
    for name, legal in inputs.items():
        if not any(name in names for names in legal):
            expected = ", ".join(dict.fromkeys(name for names in legal for name in names))
            raise ValueError(f"inputs: expected some of {expected}, got {name!r}")


def warm(parsed: argparse.Namespace) -> Outcome:
    """Compile kernels into the cache; of the ranks that torchrun starts the first one prints them."""
    parsed.output, parsed.digest = None, False
    result, show = build(parsed)
    return result, show if os.environ.get("RANK", "0") == "0" else lambda _: None


def _check_writable(output: str | None, otherwise: str) -> None:
    argument, folder = ("--output", Path(output).parent) if output else ("RWKVJIT_CACHE_DIR", env.cache_dir())
    try:
        if output is None:
            if not env.cache_is_on():
                off = "RWKVJIT_CACHE=0 turns the cache off: unset it"
                raise CacheError(f"{env.cache_fault() or off}, or {otherwise}")
            files.make_directory(folder)
        elif Path(output).is_dir():
            raise IsADirectoryError(None, "it is a directory")
        files.check_writable(folder)
    except files.UntrustedError:
        raise
    except OSError as error:
        raise CacheError(
            f"{argument}: expected a place that can be written, got {output or folder} ({error.strerror}); name another"
        ) from error


def _compile(requests: list[Request], alike: bool) -> list[Kernel]:
    """Find or compile kernels; where they must be `alike`, all are the work of the compiler at hand."""
    from rwkv_jit.ahead import warm as ahead
    from rwkv_jit.desk.versions import empty_cache
    from rwkv_jit.kernels import identity

    with terminal.progress("compiling") as progress:
        kernels = ahead.compile_all(requests, progress)
        if alike and any(kernel.compiler != identity.identity() for kernel in kernels):
            with empty_cache():
                kernels = ahead.compile_all(requests, progress)
    return kernels


def _about(kernel: Kernel) -> dict[str, Any]:
    about = {name: getattr(kernel, name) for name in ("name", "arch", "target", "parameters", "compiler", "origin")}
    about["bytes"] = len(kernel.entry()[1])
    for name in _RESOURCES:  # not known of PTX
        about[name] = getattr(kernel, name) if kernel.resources else None
    return about | kernel_table.described(kernel.name, kernel.parameters)


def _show_built(result: dict[str, Any], is_verbose: bool) -> None:
    kernels, compiled_by = result["kernels"], result["compiler"].split()[0]
    kernel_table.show(kernels, {"origin": "{origin}"}, is_verbose)
    terminal.say(f"\n{len(kernels)} kernels, {kernel_table.size(kernels)}, in {result['path']}, by NVRTC {compiled_by}")
    _show_digest(result)


def _digest(parsed: argparse.Namespace, path: str) -> dict[str, str]:
    return {"sha256": bundle.digest(Path(path))} if parsed.digest else {}


def _show_digest(result: dict[str, Any]) -> None:
    if "sha256" in result:
        print(f"SHA-256 {result['sha256']}")


def show(parsed: argparse.Namespace) -> Outcome:
    """Return a kernel's resources, or one of its texts."""
    from dataclasses import asdict

    from rwkv_jit.ahead import warm as ahead
    from rwkv_jit.call.plan import DTYPES
    from rwkv_jit.kernels import sass

    _check_used(parsed, [parsed.op])
    kernel = ahead.specialize(
        parsed.op, parsed.head_size, parsed.value_size, DTYPES[parsed.dtype], parsed.arch, parsed.direction,
        parsed.backend, parsed.decay, tokens=parsed.tokens, batch=parsed.batch, heads=parsed.heads,
        key_heads=parsed.key_heads, inputs=_inputs(parsed), **_switches(parsed, parsed.op),
    )  # fmt: skip
    result = _about(kernel) | {"resources": {name: asdict(used) for name, used in kernel.resources.items()}}
    if parsed.part == "resources":
        return result, _show_resources
    if parsed.part == "sass":
        if not kernel.cubin:
            raise RwkvJitError(f"--sass: expected an architecture like sm_90, got {kernel.target}, which is PTX: --ptx")
        text = sass.disassemble(kernel.cubin, kernel.target)
    else:
        text = getattr(kernel, parsed.part)
    return result | {parsed.part: text}, lambda _: print(text)


def _show_resources(result: dict[str, Any]) -> None:
    terminal.say(
        f"{result['name']} for {result['target']}, by NVRTC {result['compiler'].split()[0]}: {result['origin']}"
    )
    terminal.say(f"{terminal.text(result['parameters'])}\n")
    terminal.table(
        ("kernel", "registers", "spill B", "shared B"),
        [(name, *used.values()) for name, used in result["resources"].items()],
    )


# ---- the cache ---------------------------------------------------------------------------------------------------


def cache_path(parsed: argparse.Namespace) -> Outcome:
    """Return the user's directory."""
    return {"path": str(env.cache_dir())}, lambda result: print(printable(result["path"]))


def cache_list(parsed: argparse.Namespace) -> Outcome:
    """Return what is stored."""
    show = partial(_show_list, is_verbose=parsed.verbose)
    return {"on": env.cache_is_on(), "entries": [_row(kernel) for kernel in cache.stored()]}, show


def _row(kernel: cache.Stored) -> dict[str, Any]:
    manifest, path = kernel.manifest, kernel.path
    name, parameters = path.stem.rpartition("-")[0], manifest.get("parameters", {})
    resources = manifest.get("resources", {}).values()
    used = None  # only the user's directory keeps account of it
    if kernel.layer.origin == "disk" and path.exists():
        used = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes")
    return {
        "layer": kernel.layer.origin,
        "arch": kernel.name.split("/")[0],
        "name": name,
        **kernel_table.described(name, parameters),
        "bytes": kernel.bytes,
        "last_used": used,
        **{name: max((used.get(name, 0) for used in resources), default=None) for name in _RESOURCES},
        "state": kernel.state,
        "path": str(path),
        "parameters": parameters,
    }


def _show_list(result: dict[str, Any], is_verbose: bool) -> None:
    if not result["on"]:
        terminal.say(env.cache_fault() or "RWKVJIT_CACHE=0 turns the cache off")
    elif not result["entries"]:
        print("no kernels")
    else:
        rows, more = result["entries"], {"unused": "{age}"}
        more |= {name: f"{{{name}}}" for name in ("layer", "state") if {row[name] for row in rows} - {"disk", "ok"}}
        kernel_table.show(rows, more, is_verbose)
        terminal.say(f"\n{_counted([row['layer'] for row in rows])}, {kernel_table.size(rows)}")


def _counted(layers: Sequence[str]) -> str:
    """Return how many kernels there are and where; one that lies in several layers counts in each."""
    where = ", ".join(f"{layer} {count}" for layer, count in Counter(layers).items())
    return f"{len(layers)} kernels ({where or 'none'})"


def cache_show(parsed: argparse.Namespace) -> Outcome:
    """Return the manifests of the entries that are meant."""
    entries = [
        {"path": str(kernel.path), "layer": kernel.layer.origin, "state": kernel.state, "manifest": kernel.manifest}
        for kernel in cache.stored()
        if _is_meant(kernel, parsed.name)
    ]
    if not entries:
        raise CacheError(
            f"name: expected the beginning of a kernel's name, key or file, got {parsed.name!r}; "
            "`rwkv-jit cache list` lists all kernels"
        )
    return {"entries": entries}, _show_manifests


def _is_meant(kernel: cache.Stored, given: str) -> bool:
    path = kernel.path
    names = (path.name, kernel.name, str(path), kernel.manifest.get("key") or path.stem.rpartition("-")[2])
    return str(path) == os.path.abspath(given) or any(name.startswith(given) for name in names)


def _show_manifests(result: dict[str, Any]) -> None:
    for entry in result["entries"]:
        terminal.say(f"{entry['path']}: {entry['state']}")
        terminal.table((), [(name, terminal.text(value)) for name, value in entry["manifest"].items()])


def cache_verify(parsed: argparse.Namespace) -> Outcome:
    """Read everything, and say what is damaged or cannot be read."""
    entries = list(cache.stored())
    faults = list(cache.unreadable().items()) if env.cache_is_on() else []
    faults += [(kernel.path, kernel.fault) for kernel in entries if kernel.fault]
    damaged = [{"path": str(path), "fault": fault} for path, fault in faults]
    layers = [kernel.layer.origin for kernel in entries]
    named = (fault if fault.startswith(str(path)) else f"{path}: {fault}" for path, fault in faults)
    lines = [*named, f"{_counted(layers)} read, {len(faults)} faults"]
    result = {"checked": len(entries), "layers": layers, "damaged": damaged, "passed": not faults}
    return result, lambda _: terminal.say("\n".join(lines))


def cache_prune(parsed: argparse.Namespace) -> Outcome:
    """Delete what is damaged in the user's directory, and old entries until it is small enough."""
    most = env.cache_max_bytes() if parsed.max_mb is None else int(parsed.max_mb * 2**20)
    damaged, bundles = cache.delete_damaged()
    result = {"damaged": damaged, "damaged_bundles": bundles, "evicted": cache.prune(most)}
    result |= {"entries": len(cache.entries()), "bytes": cache.size()}
    also = f", and {bundles} damaged bundles" if bundles else ""
    text = f"{{damaged}} damaged and {{evicted}} old kernels deleted{also}; {{entries}} are left, {{bytes}} bytes"
    return result, lambda _: terminal.say(text.format(**result))


def cache_clear(parsed: argparse.Namespace) -> Outcome:
    """Delete everything in the user's directory."""
    own, path = len(cache.entries()), str(env.cache_dir())
    count = cache.clear()
    where = _counted([*["disk"] * own, *["bundle"] * (count - own)])  # imported ones
    return {"deleted": count, "path": path}, lambda _: terminal.say(f"{where} deleted from {path}")


def cache_export(parsed: argparse.Namespace) -> Outcome:
    """Write a bundle of what is stored."""
    chosen = [
        kernel for kernel in cache.stored() if not kernel.fault and _is_chosen(kernel.manifest, parsed.op, parsed.arch)
    ]
    if not chosen and (parsed.op or parsed.arch):
        given = (("--op", parsed.op), ("--arch", parsed.arch))
        wanted = " and ".join(f"{name} {','.join(values)}" for name, values in given if values)
        raise CacheError(f"no stored kernel has {wanted}; `rwkv-jit cache list` lists all kernels")
    kernels, size = cache.export(Path(parsed.file), chosen)
    return {"path": parsed.file, "kernels": kernels, "bytes": size, **_digest(parsed, parsed.file)}, _show_exported


def _show_exported(result: dict[str, Any]) -> None:
    terminal.say("{kernels} kernels in {path}, {bytes} bytes".format(**result))
    _show_digest(result)


def _is_chosen(manifest: dict[str, Any], ops: Iterable[str] | None, archs: Iterable[str] | None) -> bool:
    kernel = manifest["name"], manifest.get("parameters", {})
    return (not ops or any(kernel_table.is_of(op, *kernel) for op in ops)) and (not archs or manifest["arch"] in archs)


def cache_import(parsed: argparse.Namespace) -> Outcome:
    """Copy bundles into the user's directory."""
    if parsed.digest and len(parsed.files) > 1:
        raise ValueError(f"--digest: is that of one bundle, got {len(parsed.files)} files")
    imported = [{"path": file, "kernels": cache.import_bundle(Path(file), parsed.digest)} for file in parsed.files]
    into = str(env.cache_dir())
    lines = [f"{row['kernels']} kernels of {row['path']} copied into {into}" for row in imported]
    return {"path": into, "bundles": imported}, lambda _: terminal.say("\n".join(lines))
