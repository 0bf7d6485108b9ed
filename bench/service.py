"""What the service costs: imports, kernels from disk, many processes at once, first calls and later ones.

Of an op, and of a kernel of one line by every loader there is.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bench import ROOT, record, timing
from rwkv_jit.call import prepared
from rwkv_jit.desk import bench, inputs, terminal, versions
from rwkv_jit.kernels import env
from rwkv_jit.kernels.errors import RwkvJitError

PROCESSES = 16
REPEATS = 3  # of first calls from disk
_KERNELS = [24, 32, 40, 48, 56, 64, 72, 80]  # head sizes
_ARCH = "sm_90"

# ---- programs: processes of their own ----------------------------------------------------------------------------

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
from rwkv_jit.kernels import kernel
from rwkv_jit.schedules import recurrent
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules.table import OPS
from rwkv_jit.schedules.problem import Problem
op, gpu = OPS["wkv7"], Gpu(sys.argv[1])
problems = [
    Problem(op, gpu, dict.fromkeys(op.names, "bf16"), K=n, V=n, decay=op.decay) for n in json.loads(sys.argv[2])
]
requests = [step.request(gpu) for p in problems for step in recurrent.forward(p).launches]
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

# A process of its own, timed from where imports, the CUDA context and torch's own first uses are done. It ends at once:
# a thread of torch's backward that still waits for the interpreter when that ends aborts the process, with any op.
_FIRST_CALL = """
import os, sys, time, torch
from pathlib import Path
PREPARE
torch.cuda.synchronize()
started = time.perf_counter()
LOAD
call()
torch.cuda.synchronize()
first = time.perf_counter() - started
assert is_right()
from bench import timing
print([first * 1e3, timing.host_us([call])], flush=True)
os._exit(0)
"""
# Where it keeps what it compiled, what comes before, and what is timed with the first call.
_OF_RWKV_JIT = "RWKVJIT_CACHE_DIR"
_WKV7 = (
    _OF_RWKV_JIT,
    """
import platformdirs, rwkv_jit
from rwkv_jit.kernels import cuda
from rwkv_jit.desk.inputs import make_inputs
cuda.driver()
given = make_inputs("wkv7", (1, 64, 4, 64), torch.bfloat16)
x = torch.ones(8, 8, device="cuda", requires_grad=True)
(x @ x).backward(torch.ones(8, 8, device="cuda"))
dy = torch.ones_like(given[3])
rwkv_jit.wkv7
grads = ()
def is_right():
    return len(grads) == 6 and all(bool(x.isfinite().all()) for x in grads)
""",
    """
def call():
    global grads
    grads = torch.autograd.grad(rwkv_jit.wkv7(*given)[0], given, dy)
""",
)
# The same kernel of one line by each.
_ADD_ONE = """
source = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }'
x = torch.zeros(32, device="cuda")
def is_right():
    return float(x.sum()) == 32
"""
_LOADERS = {
    "rwkv_jit": (
        _OF_RWKV_JIT,
        """
import platformdirs, rwkv_jit
from rwkv_jit.kernels import cuda
rwkv_jit.Template, cuda.driver()
file = Path(sys.argv[1], 'add_one.cu')
file.write_text(source)
""",
        """
add_one = rwkv_jit.Template(file).specialize()
def call():
    add_one.launch(1, 32, x)
""",
    ),
    "CuPy's RawModule": (
        "CUPY_CACHE_DIR",
        """
import cupy
cupy.cuda.Device().use()
array = cupy.from_dlpack(x)
""",
        """
add_one = cupy.RawModule(code=source).get_function('add_one')
def call():
    add_one((1,), (32,), (array,))
""",
    ),
    "Triton": (
        "TRITON_CACHE_DIR",
        """
import triton
Path(sys.argv[1], 'of_triton.py').write_text('''
import triton, triton.language as tl
@triton.jit
def add_one(x):
    i = x + tl.arange(0, 32)
    tl.store(i, tl.load(i) + 1.0)
''')
sys.path.insert(0, sys.argv[1])
""",
        """
from of_triton import add_one
def call():
    add_one[(1,)](x)
""",
    ),
    "torch's extension loader": (
        "TORCH_EXTENSIONS_DIR",
        """
from torch.utils import cpp_extension
declared = 'void one_more(torch::Tensor x);'
source = '#include <torch/extension.h>\\n' + source + (
    'void one_more(torch::Tensor x) { add_one<<<1, 32>>>(x.data_ptr<float>()); }')
""",
        """
loaded = cpp_extension.load_inline('one_more', [declared], [source], functions=['one_more'])
def call():
    loaded.one_more(x)
""",
    ),
}

# ---- measuring ---------------------------------------------------------------------------------------------------


def run() -> dict[str, Any]:
    """Measure; the user's cache is not touched. Without a GPU nothing is called, and there is no peer.

    Returns env, commit : what it was measured with; import_ms, op_import_ms : what `import rwkv_jit`, and its first op,
    add to `import torch`; from_disk_us and peers_from_disk_us : time of each of eight kernels, found on disk by a fresh
    process; together : processes, compiled (how many of them did), alone_s and slowest_s from imports done to kernel in
    hand; host_us : a call with and without gradients and things to compare it with, or None; first_call and one_line :
    what `first_calls` and `one_line_kernels` return, or None.
    """
    compileall.compile_dir(ROOT / "rwkv_jit", quiet=2)  # as an installer does
    imports = [_child(_IMPORT) for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        cache = {"RWKVJIT_CACHE_DIR": folder}
        sizes = json.dumps(_KERNELS)
        _child(_FROM_DISK, _ARCH, sizes, '["compiled"]', environment=cache)
        from_disk = [_child(_FROM_DISK, _ARCH, sizes, '["disk"]', environment=cache) for _ in range(5)]
    on_gpu = versions.is_available()
    return {
        "env": bench.environment(),
        "commit": record.commit(),
        "import_ms": statistics.median(times[0] for times in imports),
        "op_import_ms": statistics.median(times[1] for times in imports),
        "from_disk_us": _medians(from_disk),
        "peers_from_disk_us": _peers_from_disk() if on_gpu else {},
        "together": _together(),
        "host_us": host_us() if on_gpu else None,
        "first_call": first_calls() if on_gpu else None,
        "one_line": one_line_kernels() if on_gpu else None,
    }


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process, which runs the checkout and says no word of its temporary caches."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "RWKVJIT_LOG": "error", **more}


def _child(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Return what a program prints last, as JSON.

    Raises RwkvJitError where it failed.
    """
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=_environment(environment or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip()[-2000:]
        raise RwkvJitError(f"a process to measure ended with exit code {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])


def _medians(runs: list[list[float]]) -> list[float]:
    """The median of each kernel over the processes; the first kernel of a process pays for first uses."""
    return [statistics.median(times) for times in zip(*runs, strict=True)]


def _peers_from_disk() -> dict[str, list[float]]:
    times = {}
    for name, program in (("CuPy RawModule", _CUPY), ("Triton", _TRITON)):
        with tempfile.TemporaryDirectory() as folder, suppress(RwkvJitError):  # one that is not installed
            caches = {"CUPY_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
            runs = [_child(program, folder, json.dumps(_KERNELS), environment=caches) for _ in range(4)]
            times[name] = _medians(runs[1:])
    return times


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
    with tempfile.TemporaryDirectory(prefix=env.TEMPORARY) as folder:
        command = [sys.executable, "-c", _TOGETHER, _ARCH, "[64]"]
        environment = _environment({"RWKVJIT_CACHE_DIR": str(Path(folder) / "cache")})
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


def first_calls() -> dict[str, float]:
    """Return what calls of wkv7 with gradients cost.

    Returns compiled_ms, from_disk_ms : milliseconds of a first call, with an empty cache and with a full one, each in a
    new process; call_us : microseconds of the host for a later one.
    """
    return _times(*_WKV7)


def one_line_kernels() -> dict[str, dict[str, float]]:
    """Return the same of a kernel of one line, by who loads it; without those that are missing or find no compiler."""
    times = {}
    for name, (variable, prepare, load) in _LOADERS.items():
        with suppress(RwkvJitError):
            times[name] = _times(variable, _ADD_ONE + prepare, load)
    return times


def _times(variable: str, prepare: str, load: str) -> dict[str, float]:
    program = _FIRST_CALL.replace("PREPARE", prepare).replace("LOAD", load)
    with tempfile.TemporaryDirectory() as folder:
        cache = {variable: str(Path(folder, "cache"))}
        (compiled, _), *times = [_child(program, folder, environment=cache) for _ in range(1 + REPEATS)]
    from_disk, later = (statistics.median(row) for row in zip(*times, strict=True))
    return {"compiled_ms": compiled, "from_disk_ms": from_disk, "call_us": later}


def host_us() -> dict[str, float]:
    """Return the host's time of calls: of wkv7, of what it has prepared, and of others to compare these with."""
    wkv7: Callable[..., Any] = inputs.OPS["wkv7"]
    given = inputs.make_inputs("wkv7", (1, 1, 4, 64), torch.bfloat16)
    constants = [x.detach() for x in given]
    wkv7(*constants)
    known = next(reversed(prepared.calls.values()))
    x = torch.ones(64, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "wkv7": lambda: wkv7(*constants),
        "wkv7, inputs with gradients": lambda: wkv7(*given),
        "its prepared forward": lambda: known.run((*constants, None, None)),
        "torch.add(x, x, out=x)": lambda: torch.add(x, x, out=x),
    }
    with suppress(ImportError):
        from fla.ops.rwkv7 import fused_recurrent_rwkv7

        calls["FLA fused_recurrent_rwkv7"] = lambda: fused_recurrent_rwkv7(*constants)
    return {name: timing.host_us([call]) for name, call in calls.items()}


# ---- printing ----------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Print a measurement."""
    added = f"{result['import_ms']:.1f} ms to import torch, its first op {result['op_import_ms']:.1f} ms"
    terminal.say(f"import rwkv_jit adds {added}.\n")
    terminal.table(
        ("a kernel from disk, in a fresh process", "first us", "each other us"),
        [
            (name, f"{times[0]:.0f}", f"{statistics.median(times[1:]):.0f}")
            for name, times in {"rwkv_jit": result["from_disk_us"], **result["peers_from_disk_us"]}.items()
        ],
    )
    together = result["together"]
    terminal.say(
        f"{together['processes']} processes want one kernel that is nowhere: {together['compiled']} compiled; the "
        f"slowest had it after {together['slowest_s']:.2f} s, a process alone after {together['alone_s']:.2f} s.\n"
    )
    if result["host_us"]:
        terminal.table(("host time of a call", "us"), [(name, f"{us:.1f}") for name, us in result["host_us"].items()])
    if result["first_call"]:
        one_line = {f"a kernel of one line, {name}": times for name, times in result["one_line"].items()}
        terminal.table(
            ("calls in a new process", "first, empty cache ms", "first, from disk ms", "a later one, host us"),
            [
                (name, f"{times['compiled_ms']:.0f}", f"{times['from_disk_ms']:.1f}", f"{times['call_us']:.1f}")
                for name, times in {"wkv7, forward and backward": result["first_call"], **one_line}.items()
            ],
        )
