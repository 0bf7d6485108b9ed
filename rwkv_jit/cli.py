"""The program `rwkv-jit`: parsing and printing only. Each command loads what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

COMMANDS = {
    "demo": "compile wkv6 and wkv7, run them, compare them with float64 and time them",
    "info": "versions, GPUs, compiler and kernel cache of this machine",
    "bench": "measure the speed of the ops",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; that of the process by default.

    Returns
    -------
    int
        0; 1 where the demo finds an error above its limit; 2 where the command could not do its work.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parser()
    # The benchmark's options live beside its cases, and loading them loads torch: only its own command pays for that.
    if given[:1] == ["bench"]:
        from rwkv_jit import bench

        bench.add_arguments(commands["bench"])
    parsed = parser.parse_args(given)
    if parsed.command is None:
        parser.print_help()
        return 0

    from rwkv_jit import stats
    from rwkv_jit.errors import RwkvJitError

    stats.configure_logging()
    try:
        result = _run(parsed)
    except (RwkvJitError, TypeError, ValueError) as error:
        print(f"rwkv-jit {parsed.command}: {error}", file=sys.stderr)
        return 2
    if parsed.json:
        print(json.dumps(result, indent=2, default=str))
    else:
        _show(parsed.command, result)
    return 0 if result.get("passed", True) else 1


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    from rwkv_jit import __version__

    parser = argparse.ArgumentParser(
        prog="rwkv-jit", description="RWKV CUDA kernels, compiled for your GPU when they are first called."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    commands = {}
    for name, summary in COMMANDS.items():
        commands[name] = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        commands[name].add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser, commands


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    if parsed.command == "demo":
        from rwkv_jit import demo

        return demo.run()
    if parsed.command == "bench":
        from rwkv_jit import bench

        measured: dict[str, Any] = bench.run(parsed)
        return measured
    from rwkv_jit import runtime

    return {"cache": runtime.cache_info(), "environment": runtime.env_report()}


def _show(command: str, result: dict[str, Any]) -> None:
    if command == "demo":
        from rwkv_jit import demo

        demo.show(result)
    elif command == "bench":
        from rwkv_jit import bench

        bench.show(result)
    else:
        for title, entries in result.items():
            print(title)
            for name, value in entries.items():
                print(f"  {name.replace('_', ' '):<18}{_text(value)}")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
