"""The program `rwkv-jit`: its arguments, its exit codes, and what it says when something is wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rwkv_jit.kernels.errors import printable
from rwkv_jit.schedules.build_command import OPS as _BUILT
from rwkv_jit.schedules.build_command import SWITCHES
from rwkv_jit.schedules.layers import LEGAL
from rwkv_jit.schedules.table import ALL as OPS

_DTYPES = ("bf16", "fp16", "fp32")
_DIGEST = "print the bundle's SHA-256, which `rwkv-jit cache import --digest` checks"
_OPS = tuple(OPS)
_BACKENDS = ("auto", "recurrent", "chunked", "split", "tiles", "transforms", "fft")
_PHASES = ("forward", "backward", "forward+backward", "decode", "prefill", "update")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of a command line without the program's name; that of the process by default.

    Returns 0; 1 where demo, doctor or verify found an error; 2 where the command could not do its work; as in a shell,
    130 after an interrupt and 141 when the reader of the output has gone.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes standard output when it ends, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: list[str]) -> int:
    parser = _parser()
    _Parser.given = arguments = [*arguments[1:], "--help"] if arguments[:1] == ["help"] else arguments
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    if parsed.command == "run":
        return _run_script(parsed)
    from rwkv_jit.desk import commands
    from rwkv_jit.kernels import stats
    from rwkv_jit.kernels.errors import RwkvJitError

    try:
        stats.configure_logging()
        result, show = getattr(commands, parsed.function)(parsed)
        if parsed.json:
            print(json.dumps(result, indent=2, default=str))
        else:
            show(result)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (RwkvJitError, TypeError, ValueError, OSError) as error:
        print(f"{parsed.program}: {printable(_in_options(str(error), parsed, arguments))}", file=sys.stderr)
        return 2
    return 0 if result.get("passed", True) else 1


def _run_script(parsed: argparse.Namespace) -> int:
    """Run a script or a module as Python does, which says itself what goes wrong in it."""
    import runpy

    from rwkv_jit import compat
    from rwkv_jit.kernels import stats

    where = os.getcwd() if parsed.m else os.path.dirname(os.path.abspath(parsed.script))
    if not getattr(sys.flags, "safe_path", False):  # -P leaves out folders of scripts, and what is first is another's
        sys.path[0] = where
    if not (_is_module(parsed.script) if parsed.m else os.path.isfile(parsed.script)):
        expected = "-m: expected a module that can be run" if parsed.m else "script: expected a Python file"
        print(f"{parsed.program}: {expected}, got {parsed.script!r}", file=sys.stderr)
        return 2
    compat.install()
    os.environ["RWKVJIT_COMPAT"] = "1"  # for ranks that the script starts: Lightning runs `python train.py` for each
    sys.argv = [parsed.script, *parsed.arguments]
    try:
        if parsed.m:
            runpy.run_module(parsed.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(parsed.script, run_name="__main__")
    finally:
        if parsed.json:
            answered = getattr(sys.modules.get("rwkv_jit.compat.loading"), "answered", {})
            print(json.dumps({"extensions": answered, "kernels": stats.snapshot(), "fla": compat.fla.report()}))
    return 0


def _is_module(name: str) -> bool:
    """Return whether Python can run a module of this name: for a package that is its `__main__`."""
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return spec is not None and (not is_package or find_spec(f"{name}.__main__") is not None)
    except (ImportError, ValueError):
        return False


def _in_options(message: str, parsed: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Return a message that names arguments of Python as the command line has them: --head-size, --arch sm_90."""

    def option(match: re.Match[str]) -> str:
        flag = f"--{match[1].replace('_', '-')}"
        is_option = getattr(parsed, match[1], "") is None or any(given.split("=")[0] == flag for given in arguments)
        value = f" {match[2]}" if match.lastindex == 2 else ""
        return flag + value if is_option else match[0]

    return re.sub(r"\b(\w+)='(\w+)'", option, re.sub(r"^(\w+)(?=: )", option, message))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the commands do, and what may be meant."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        op = next((word for word in self.given[1:] if word in _BUILT), "")
        if message.endswith("--op --model is required") and op:
            message += f"; did you mean --op {op}?"
        self.exit(2, f"{self.prog}: {printable(message.removeprefix('argument '))}\n")


def _parser() -> argparse.ArgumentParser:
    from rwkv_jit.kernels import __version__

    parser = _Parser(
        prog="rwkv-jit",
        description="CUDA kernels for RWKV and linear attention, compiled for your GPU when you first call them.",
        epilog="`rwkv-jit help COMMAND` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    _add(commands, "demo", "compile the ops, run them, compare them with float64 and time them")
    _add(
        commands, "doctor", "check whether this machine can compile and run kernels, and say how to fix what it cannot"
    )
    _add(commands, "info", "versions, GPUs, compiler and kernel cache of this machine")
    bench = _add(commands, "bench", "measure the speed of the ops, beside torch")
    bench.epilog = (
        "`python -m bench` in a checkout measures layers, models and other libraries too, and compares results."
    )
    add_cases(bench)
    _add_profile(_add(commands, "profile", "the kernels of an op, by torch.profiler, or for NVIDIA's profilers"))
    _add_tune(_add(commands, "tune", "measure which geometries of the chunked kernels are fastest on this GPU"))
    build = _add(commands, "build", "compile kernels without a GPU, into the cache or into a bundle")
    _add_build(build)
    build.add_argument("-o", "--output", metavar="FILE", help="the bundle to write (default: into the cache)")
    build.add_argument("--digest", action="store_true", help=_DIGEST)
    _add_build(_add(commands, "warm", "compile kernels into the cache, each one once, even if many ranks run this"))
    _add_show(_add(commands, "show", "source, PTX, machine code or resources of a kernel"))
    _add_run(commands)
    summary = "list, check, delete, export and import the kernels on disk"
    cache = commands.add_parser("cache", help=summary, description=_sentence(summary))
    _add_cache(cache.add_subparsers(required=True, metavar="command"))
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _add(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command; rwkv_jit.desk.commands has a function of its name, with `cache_` before those of the cache."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=_sentence(summary))
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    function = "_".join(parser.prog.split()[1:])
    parser.set_defaults(function=function, program=parser.prog)
    return parser


def _add_run(commands: Any) -> None:
    summary = "run a script with rwkv_jit instead of the extensions that it would compile"
    run = commands.add_parser("run", help=summary, description=_sentence(summary))
    run.add_argument("-m", action="store_true", help="SCRIPT is the name of a module, as with `python -m`")
    text = "print a line of JSON at the end: the extensions that were loaded with who answered, and counts of kernels"
    run.add_argument("--json", action="store_true", help=text)
    run.add_argument("script", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    run.set_defaults(program=run.prog)


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    parser.add_argument("--op", action="append", choices=_OPS, help="only this op (may be repeated)")
    parser.add_argument("--shape", help="B,T,H,N or B,T,H,K,V instead of the usual shapes; wkv4 B,T,C, timex B,C,T too")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: bf16")
    parser.add_argument("--backend", choices=_BACKENDS, help="only this backend of rwkv_jit (default: all)")
    text = "may be repeated (default: forward and forward+backward)"
    parser.add_argument("--phase", action="append", choices=_PHASES, help=text)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=_OPS, help="the op to run")
    text = "or a shape of bench (default: 8,4096,64,64); decode and update take one token"
    parser.add_argument("--shape", default="8,4096,64,64", metavar="B,T,H,N", help=text)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--phase", choices=_PHASES, default="forward", help="default: forward")
    parser.add_argument("--backend", default="auto", help="backend of the op (default: auto)")
    instead = parser.add_mutually_exclusive_group()
    text = "also write the trace, for the viewers of Chrome and Perfetto, and for TensorBoard"
    instead.add_argument("--trace", metavar="DIR", help=text)
    text = "print the command line with which Nsight Compute measures this kernel; needs no GPU"
    instead.add_argument("--ncu", metavar="KERNEL", help=text)
    text = "also a function on the same inputs, with logarithms of decays, e.g. fla.ops.rwkv7.chunk_rwkv7"
    parser.add_argument("--beside", metavar="NAME", help=text)
    text = "run once, without torch.profiler, between cudaProfilerStart and Stop: for ncu and nsys"
    instead.add_argument("--bare", action="store_true", help=text)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    text = "op to tune; may be repeated (default: all ops)"
    parser.add_argument("--op", action="append", choices=_OPS, help=text)
    text = "shape to tune for; may be repeated (default: 8,4096,64,64 and 8,4096,32,128)"
    parser.add_argument("--shape", action="append", metavar="B,T,H,N", help=text)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="measure, but store nothing")
    instead.add_argument("--show", action="store_true", help="list the stored choices; needs no GPU")
    instead.add_argument("--forget", action="store_true", help="delete the stored choices")


def _add_build(parser: argparse.ArgumentParser) -> None:
    def add(name: str, help: str, kind: Callable[[str], Any] = str, **more: Any) -> None:
        parser.add_argument(name, type=_list_of(kind), action="extend", metavar="LIST", help=help, **more)

    parser.epilog = "A LIST is one value, or several separated by commas; the option may also be repeated."
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--op", type=_list_of(_op), action="extend", metavar="LIST", help=", ".join(_BUILT))
    text = "the ops, sizes and dtype of this model: a checkpoint (.pth, .safetensors) or its config.json"
    what.add_argument("--model", metavar="FILE", help=text)
    _add_kernels(parser, several=True)
    text = "channels: of a function over channels; of a model of RWKV-5, 6 or 7 it adds the other kernels of its layers"
    add("--width", text, _size)
    text = "of the indices of slots, for --direction update (default: 32)"
    parser.add_argument("--index-bits", type=int, choices=(32, 64), default=32, help=text)
    for name, default in SWITCHES.items():
        _add_switch(parser, name, default)
    text = "default: both; update: the kernels of <op>_update and <op>_varlen"
    parser.add_argument("--direction", choices=("forward", "backward", "both", "update"), default="both", help=text)
    parser.add_argument("--decay-bound", type=float, metavar="X", help="that of the calls, e.g. -1")
    add("--state-layout", "vk, kv (default: the op's)", _one_of("vk", "kv"))
    add("--w-dtype", "of what may be fp32, as w, g, u, beta, dt (default: that of r, k, v)", _dtype)
    add("--state-dtype", "of initial states and pools (default: fp32)", _dtype)
    text = "high: for calls after torch.set_float32_matmul_precision('high') and set_bfloat16_precision('high')"
    parser.add_argument("--precision", choices=("high",), help=text)
    text = "also the kernels of rwkv_jit.parallel, for sequences over several GPUs (context parallel)"
    parser.add_argument("--shards", action="store_true", help=text)
    _add_verbose(parser)


def _add_kernels(parser: argparse.ArgumentParser, several: bool) -> None:
    """Add the options that say which kernels of an op are meant: lists of values, or one of each."""
    for option, kind, letter, text in (
        ("--head-size", _size, "K", "from 1; for all that has heads"),
        ("--value-size", _size, "V", "default: the head size"),
        ("--tokens", _size, "T", "only for timex"),
        ("--batch", _size, "B", "only for timex (default: all)"),
        ("--dtype", _dtype, "TYPE", "of r, k, v: bf16 (default), fp16, fp32"),
        ("--arch", _arch, "ARCH", "e.g. sm_90a, or compute_80 for PTX (default: this machine's GPU)"),
        ("--decay", str, "MAP", "raw, sigmoid, log, direct (default: the op's)"),
    ):
        shape = {"type": _list_of(kind), "action": "extend", "metavar": "LIST"}
        parser.add_argument(option, help=text, **(shape if several else {"type": kind, "metavar": letter}))
    text = "value heads, for ops such as kda and functions over heads (default: many)"
    parser.add_argument("--heads", type=_size, metavar="H", help=text)
    parser.add_argument("--key-heads", type=_size, metavar="G", help="heads of q and k (default: as many)")
    text = "optional inputs that calls have, as A_log,dt_bias; or with their dtypes, as A_log=fp32,beta=bf16"
    parser.add_argument("--inputs", type=_list_of(_input), action="extend", metavar="LIST", help=text)


def _add_switch(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    """Add an option for a switch of ops, by its default."""
    ops = ", ".join(op.name for op in _BUILT.values() if name in op.traits)
    option, legal = f"--{name.replace('_', '-')}", LEGAL.get(name)
    if isinstance(default, bool):
        text = f"of {ops} (default: both)"
        parser.add_argument(option, type=_flag, metavar="{yes,no}", help=text)
    elif legal:
        parser.add_argument(option, choices=legal, help=f"of {ops} (default: {default or 'that of x'})")
    else:
        kind = _size if isinstance(default, int) or name == "state_len" else float
        parser.add_argument(option, type=kind, metavar="X", help=f"of {ops} (default: {default or 'none'})")


def _flag(text: str) -> bool:
    _check(text in ("yes", "no"), "yes or no", text)
    return text == "yes"


def _input(text: str) -> tuple[str, str | None]:
    name, has_dtype, dtype = text.partition("=")
    return name, _dtype(dtype) if has_dtype else None


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="also registers and parameters of each kernel")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", type=_one_of(*_OPS), help=f"one of {', '.join(_OPS)}")
    _add_kernels(parser, several=False)
    parser.set_defaults(dtype="bf16")
    for name in dict.fromkeys(name for op in OPS.values() for name in op.traits):
        _add_switch(parser, name, SWITCHES[name])
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward", help="default: forward")
    parser.add_argument(
        "--backend", default="auto", help="auto (default), recurrent, chunked, split; of timex tiles, transforms"
    )
    parts = parser.add_mutually_exclusive_group()
    for part, text in (
        ("resources", "registers, spills and shared memory (default)"),
        ("source", "the CUDA source as the compiler reads it"),
        ("ptx", "the PTX"),
        ("sass", "the machine code, from nvdisasm or cuobjdump"),
    ):
        parts.add_argument(f"--{part}", action="store_const", dest="part", const=part, default="resources", help=text)


def _add_cache(commands: Any) -> None:
    _add(commands, "path", "print the directory of the kernels")
    _add_verbose(_add(commands, "list", "list all kernels that can be read"))
    show = _add(commands, "show", "print everything that is stored about a kernel")
    show.add_argument("name", help="start of the name, key or file of one or more kernels")
    _add(commands, "verify", "read every kernel and say which are damaged")
    prune = _add(commands, "prune", "delete what is damaged, then the least recently used kernels above the limit")
    prune.add_argument("--max-mb", type=_megabytes, metavar="N", help="default: RWKVJIT_CACHE_MAX_MB, or 512")
    _add(commands, "clear", "delete all kernels of the user's directory")
    export = _add(commands, "export", "write kernels into a bundle")
    export.add_argument("file", help="the bundle")
    for option in ("--op", "--arch"):
        export.add_argument(option, type=_list_of(str), action="extend", metavar="LIST", help="only these")
    export.add_argument("--digest", action="store_true", help=_DIGEST)
    imported = _add(commands, "import", "copy bundles into the user's directory")
    imported.add_argument("files", nargs="+", metavar="file")
    imported.add_argument(
        "--digest", type=_sha256, metavar="HEX", help="refuse a file with another SHA-256, without reading it"
    )


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part.strip()) for part in text.split(",")]


def _check(holds: bool, expected: str, text: str) -> None:
    if not holds:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def _size(text: str) -> int:
    _check(text.isdecimal() and int(text) >= 1, "a whole number of at least 1", text)
    return int(text)


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        _check(text in names, f"one of {', '.join(names)}", text)
        return text

    return read


_dtype, _op = _one_of(*_DTYPES), _one_of(*_BUILT)


def _arch(text: str) -> str:
    from rwkv_jit.kernels import compiler

    try:
        return compiler.check_arch(text)
    except ValueError as error:
        hint = f"; did you mean sm_{text}?" if re.fullmatch("[0-9]{2,3}a?", text) else ""
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2] + hint) from error


def _sha256(text: str) -> str:
    is_digest = re.fullmatch("[0-9a-f]{64}", text.lower()) is not None
    _check(is_digest, "the 64 hexadecimal digits that --digest printed", text)
    return text.lower()


def _megabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    _check(0 <= number * 2**20 < float("inf"), "a number of at least 0", text)  # in bytes
    return number
