"""What the service itself costs: imports, kernels from disk, many processes at once, first calls and later ones."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROCESSES = 16
_KERNELS = [24, 32, 40, 48, 56, 64, 72, 80]  # head sizes
_ARCH = "sm_90"
_QUIET = {"RWKVJIT_LOG": "error"}  # no word of temporary caches

_IMPORT = """
import json, time, torch
started = time.perf_counter()
import rwkv_jit
package = time.perf_counter()
rwkv_jit.wkv7
print(json.dumps([1e3 * (package - started), 1e3 * (time.perf_counter() - started)]))
"""

_COMPILE = """
import json, sys
from rwkv_jit import kernel, template
from rwkv_jit.ops import recurrent
types = {"T_IO": "bf16", "T_W": "bf16", "T_STATE": "fp32", "DECAY": "raw", "STATE_LAYOUT": "vk"}
requests = [recurrent.specialize("wkv7", "forward", n, n, types, sys.argv[1]) for n in json.loads(sys.argv[2])]
"""
_FROM_DISK = f"""{_COMPILE}
import time
times = []
for request in requests:
    started = time.perf_counter()
    assert kernel.get(request).origin in json.loads(sys.argv[3])
    times.append(1e6 * (time.perf_counter() - started))
assert sys.argv[3] != '["disk"]' or "cupy" not in sys.modules
print(json.dumps(times))
"""
_TOGETHER = f"""{_COMPILE}
import time
print("ready", flush=True)
sys.stdin.readline()
started = time.perf_counter()
origin = kernel.get(requests[0]).origin
print(json.dumps([origin, time.perf_counter() - started]))
"""
_CUPY = """
import json, sys, time, cupy
cupy.cuda.Device().use()
cupy.zeros(1)
times = []
for n in json.loads(sys.argv[2]):
    code = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = N; }'
    started = time.perf_counter()
    cupy.RawModule(code=code, options=(f"-DN={n}",)).get_function("f")
    times.append(1e6 * (time.perf_counter() - started))
print(json.dumps(times))
"""
_TRITON = """
import json, sys, tempfile, time, torch, importlib.util
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "kernel.py").write_text('''
import triton, triton.language as tl
@triton.jit
def f(x, N: tl.constexpr):
    i = tl.arange(0, 32)
    tl.store(x + i, tl.load(x + i) + N)
''')
sys.path.insert(0, str(folder))
x = torch.zeros(32, device="cuda")
torch.cuda.synchronize()
from kernel import f
times = []
for n in json.loads(sys.argv[2]):
    started = time.perf_counter()
    f[(1,)](x, n)
    times.append(1e6 * (time.perf_counter() - started))
print(json.dumps(times))
"""


def run() -> dict[str, Any]:
    """Measure; the user's cache is not touched. Without a GPU nothing is called, and there is no peer.

    Returns
    -------
    dict
        env, commit : what it was measured with; import_ms, op_import_ms : what `import rwkv_jit`, and its first op, add
        to `import torch`; from_disk_us and peers_from_disk_us : time of each of eight kernels, found on disk by a fresh
        process; together : processes, compiled (how many of them did), alone_s and slowest_s from imports done to
        kernel in hand; host_us : a call with and without gradients and things to compare it with, or None; first_call
        and one_line : what `bench.first_calls` and `bench.one_line_kernels` return, or None.
    """
    imports = [_child(_IMPORT) for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        cache = {"RWKVJIT_CACHE_DIR": folder}
        sizes = json.dumps(_KERNELS)
        _child(_FROM_DISK, _ARCH, sizes, '["compiled"]', environment=cache)
        from_disk = [_child(_FROM_DISK, _ARCH, sizes, '["disk"]', environment=cache) for _ in range(5)]
    from rwkv_jit import bench, runtime

    on_gpu = runtime.is_available()
    return {
        "env": bench.environment(),
        "commit": bench.commit(),
        "import_ms": statistics.median(each[0] for each in imports),
        "op_import_ms": statistics.median(each[1] for each in imports),
        "from_disk_us": _medians(from_disk),
        "peers_from_disk_us": _peers_from_disk() if on_gpu else {},
        "together": _together(),
        "host_us": _host_us() if on_gpu else None,
        "first_call": bench.first_calls() if on_gpu else None,
        "one_line": bench.one_line_kernels() if on_gpu else None,
    }


def _child(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **_QUIET, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"bench: a process to measure failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _medians(runs: list[list[float]]) -> list[float]:
    """The median of each kernel over the processes; the first kernel of a process pays for first uses."""
    return [statistics.median(times) for times in zip(*runs, strict=True)]


def _peers_from_disk() -> dict[str, list[float]]:
    found = {}
    for name, program in (("CuPy RawModule", _CUPY), ("Triton", _TRITON)):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"CUPY_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
            try:
                _child(program, folder, json.dumps(_KERNELS), environment=caches)
                runs = [_child(program, folder, json.dumps(_KERNELS), environment=caches) for _ in range(3)]
            except ValueError:
                continue  # not installed
            found[name] = _medians(runs)
    return found


def _together() -> dict[str, Any]:
    alone = [_start_together(1)[0][1] for _ in range(3)]
    runs = _start_together(PROCESSES)
    return {
        "processes": PROCESSES,
        "compiled": sum(origin == "compiled" for origin, _ in runs),
        "alone_s": statistics.median(alone),
        "slowest_s": max(seconds for _, seconds in runs),
    }


def _start_together(count: int) -> list[tuple[str, float]]:
    """Let processes that have imported everything ask for one kernel at once, from an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TOGETHER, _ARCH, "[64]"]
        environment = {**os.environ, **_QUIET, "RWKVJIT_CACHE_DIR": str(Path(folder) / "cache")}
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(count)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [tuple(json.loads(process.communicate()[0])) for process in processes]


# ---- the host's part of a call -----------------------------------------------------------------------------------


def _host_us() -> dict[str, float]:
    import torch

    from rwkv_jit import bench
    from rwkv_jit.bench import timing
    from rwkv_jit.ops import known_calls, prepared

    wkv7: Callable[..., Any] = bench.OPS["wkv7"]
    given = bench.make_inputs("wkv7", (1, 1, 4, 64), torch.bfloat16)
    constants = [x.detach() for x in given]
    wkv7(*constants)
    known = next(reversed(known_calls.forwards.values()))
    assert isinstance(known, prepared.Forward)
    x = torch.ones(64, device="cuda")
    cases: dict[str, Callable[[], Any]] = {
        "wkv7": lambda: wkv7(*constants),
        "wkv7, inputs with gradients": lambda: wkv7(*given),
        "its prepared forward": lambda: known.run(constants, None, None, False, False),
        "torch.add(x, x, out=x)": lambda: torch.add(x, x, out=x),
    }
    try:
        from fla.ops.rwkv7 import fused_recurrent_rwkv7
    except ImportError:
        pass
    else:
        cases["FLA fused_recurrent_rwkv7"] = lambda: fused_recurrent_rwkv7(*constants)
    return {name: timing.host_us([case]) for name, case in cases.items()}


def show(result: dict[str, Any]) -> None:
    """Print a measurement."""
    from rwkv_jit import bench, report

    added = f"{result['import_ms']:.1f} ms to import torch, its first op {result['op_import_ms']:.1f} ms"
    report.say(f"import rwkv_jit adds {added}.\n")
    rows = [["rwkv_jit", *_first_and_others(result["from_disk_us"])]]
    rows += [[name, *_first_and_others(times)] for name, times in result["peers_from_disk_us"].items()]
    report.table(("a kernel from disk, in a fresh process", "first us", "each other us"), rows)
    together = result["together"]
    report.say(
        f"{together['processes']} processes want one kernel that is nowhere: {together['compiled']} compiled; the "
        f"slowest had it after {together['slowest_s']:.2f} s, a process alone after {together['alone_s']:.2f} s.\n"
    )
    if result["host_us"]:
        report.table(("host time of a call", "us"), [[name, f"{us:.1f}"] for name, us in result["host_us"].items()])
    if result["first_call"]:
        bench.show_first_calls(result["first_call"], result["one_line"])


def _first_and_others(times: list[float]) -> tuple[str, str]:
    return f"{times[0]:.0f}", f"{statistics.median(times[1:]):.0f}"
