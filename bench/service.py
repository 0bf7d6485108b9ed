"""What the service costs: imports, kernels from disk, many processes at once, first calls and later ones.

Of an op, and of a kernel of one line by every loader there is.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import ROOT, record, tables
from rwkv_jit.call import prepared
from rwkv_jit.desk import bench, figures, inputs, terminal, versions
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
# Processes that have imported everything meet in a folder, and begin together.
_TOGETHER = f"""{_COMPILE}
import os, time
from pathlib import Path
Path(sys.argv[3], str(os.getpid())).touch()
late = time.perf_counter() + 300
while len(os.listdir(sys.argv[3])) < int(sys.argv[4]) and time.perf_counter() < late:
    time.sleep(0.001)
started = time.perf_counter()
origin = kernel.get(requests[0]).origin
print(json.dumps([origin, time.perf_counter() - started]))
"""
_EACH = """
import json, sys, time
times = []
for each in KERNELS:
    started = time.perf_counter()
    LOAD
    times.append(1e6 * (time.perf_counter() - started))
print(json.dumps(times))
"""
_FROM_DISK = f"""{_COMPILE}{_EACH}
assert sys.argv[3] != '["disk"]' or "cupy" not in sys.modules
""".replace("KERNELS", "requests").replace("LOAD", "assert kernel.get(each).origin in json.loads(sys.argv[3])")
# A process, timed from where imports, the CUDA context and torch's first uses are done. It ends at once: a thread of
# torch's backward that still waits for the interpreter when that ends aborts the process, with any op.
_FIRST_CALL = """
import os, sys, time, torch
from pathlib import Path
PREPARE
torch.cuda.synchronize()
LOAD
started = time.perf_counter()
call = load(1)
call()
torch.cuda.synchronize()
first = time.perf_counter() - started
assert is_right()
from rwkv_jit.desk import figures
print([first * 1e3, figures.host_us([call])], flush=True)
os._exit(0)
"""


class Loader(NamedTuple):
    """Who loads a kernel: the variable for its cache, what comes before, and how a kernel with a number is loaded.

    `load` returns a call of it; a first call is timed with it.
    """

    cache: str
    prepare: str
    load: str


_WKV7 = Loader(
    "RWKVJIT_CACHE_DIR",
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
load = lambda n: call
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
    "rwkv_jit": Loader(
        "RWKVJIT_CACHE_DIR",
        """
import platformdirs, rwkv_jit
from rwkv_jit.kernels import cuda
rwkv_jit.Template, cuda.driver()
file = Path(sys.argv[1], 'add_one.cu')
file.write_text(source)
""",
        """
def load(n):
    add_one = rwkv_jit.Template(file).specialize()
    return lambda: add_one.launch(1, 32, x)
""",
    ),
    "CuPy's RawModule": Loader(
        "CUPY_CACHE_DIR",
        """
import cupy
cupy.cuda.Device().use()
array = cupy.from_dlpack(x)
""",
        """
def load(n):
    add = cupy.RawModule(code=source.replace('1.0f', f'{n}.0f')).get_function('add_one')
    return lambda: add((1,), (32,), (array,))
""",
    ),
    "Triton": Loader(
        "TRITON_CACHE_DIR",
        """
import triton
Path(sys.argv[1], 'of_triton.py').write_text('''
import triton, triton.language as tl
@triton.jit
def add(x, N: tl.constexpr):
    i = x + tl.arange(0, 32)
    tl.store(i, tl.load(i) + N)
''')
sys.path.insert(0, sys.argv[1])
torch.cuda.synchronize()
""",
        """
def load(n):
    from of_triton import add
    return lambda: add[(1,)](x, n)
""",
    ),
    "torch's extension loader": Loader(
        "TORCH_EXTENSIONS_DIR",
        """
from torch.utils import cpp_extension
declared = 'void one_more(torch::Tensor x);'
source = '#include <torch/extension.h>\\n' + source + (
    'void one_more(torch::Tensor x) { add_one<<<1, 32>>>(x.data_ptr<float>()); }')
""",
        """
def load(n):
    loaded = cpp_extension.load_inline('one_more', [declared], [source], functions=['one_more'])
    return lambda: loaded.one_more(x)
""",
    ),
}

# ---- measuring ---------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    parser.add_argument("--record", action="store_true", help="keep the result in bench.json")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure, and keep the result if that is wanted."""
    if parsed.record:
        bench.check_gpu()
    costs = measured()
    if parsed.record:
        record.keep({**record.read(record.FILE), "service": costs})
    return costs


def measured() -> dict[str, Any]:
    """Measure; the user's cache is not touched. Without a GPU nothing is called, and there is no peer.

    Returns env, commit : what it was measured with; import_ms, op_import_ms : what `import rwkv_jit`, and its first op,
    add to `import torch`; from_disk_us and peers_from_disk_us : time of each of eight kernels, found on disk by a fresh
    process; together : processes, compiled (how many of them did), alone_s and slowest_s from imports done to kernel in
    hand; host_us : a call with and without gradients and things to compare it with, or None; first_call and one_line :
    what `first_calls` and `one_line_kernels` return, or None.
    """
    compileall.compile_dir(ROOT / "rwkv_jit", quiet=2)  # as an installer does
    import_ms, op_import_ms = _medians([_child(_IMPORT) for _ in range(5)])
    sizes, on_gpu = json.dumps(_KERNELS), versions.is_available()
    with tempfile.TemporaryDirectory() as folder:
        cache = {"RWKVJIT_CACHE_DIR": folder}
        _child(_FROM_DISK, _ARCH, sizes, '["compiled"]', environment=cache)
        from_disk = [_child(_FROM_DISK, _ARCH, sizes, '["disk"]', environment=cache) for _ in range(5)]
    return {
        "env": bench.environment(), "commit": record.commit(), "import_ms": import_ms, "op_import_ms": op_import_ms,
        "from_disk_us": _medians(from_disk), "peers_from_disk_us": _peers_from_disk() if on_gpu else {},
        "together": _together(), "host_us": host_us() if on_gpu else None,
        "first_call": first_calls() if on_gpu else None, "one_line": one_line_kernels() if on_gpu else None,
    }  # fmt: skip


def _child(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Return what a program prints last, as JSON; it runs the checkout and says no word of its temporary caches.

    Raises RwkvJitError where it failed.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": paths, "RWKVJIT_LOG": "error", **(environment or {})}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip()[-2000:]
        raise RwkvJitError(f"a process to measure ended with exit code {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])


def _medians(runs: list[list[float]]) -> list[float]:
    """The median of each kernel over the processes; the first kernel of a process pays for first uses."""
    return [statistics.median(times) for times in zip(*runs, strict=True)]


def _peers_from_disk() -> dict[str, list[float]]:
    times = {}
    for name in ("CuPy's RawModule", "Triton"):
        loader = _LOADERS[name]
        program = f"import sys, torch\nfrom pathlib import Path\n{_ADD_ONE}{loader.prepare}{loader.load}{_EACH}"
        program = program.replace("KERNELS", json.dumps(_KERNELS)).replace("LOAD", "load(each)()")
        with tempfile.TemporaryDirectory() as folder, suppress(RwkvJitError):  # one that is not installed
            cache = {loader.cache: str(Path(folder, "cache"))}
            runs = [_child(program, folder, environment=cache) for _ in range(4)]
            times[name.replace("'s", "")] = _medians(runs[1:])
    return times


def _together() -> dict[str, Any]:
    """Let processes that have imported everything ask for one kernel at once, from an empty cache."""

    def started(count: int) -> list[tuple[str, float]]:
        with tempfile.TemporaryDirectory(prefix=env.TEMPORARY) as folder, ThreadPoolExecutor(count) as pool:
            cache, meeting = {"RWKVJIT_CACHE_DIR": str(Path(folder, "cache"))}, Path(folder, "meeting")
            meeting.mkdir()
            ask = partial(_child, _TOGETHER, _ARCH, "[64]", str(meeting), str(count), environment=cache)
            return [asked.result() for asked in [pool.submit(ask) for _ in range(count)]]

    alone, runs = [started(1)[0][1] for _ in range(3)], started(PROCESSES)
    return {
        "processes": PROCESSES, "compiled": sum(origin == "compiled" for origin, _ in runs),
        "alone_s": statistics.median(alone), "slowest_s": max(seconds for _, seconds in runs),
    }  # fmt: skip


def first_calls() -> dict[str, float]:
    """Return what calls of wkv7 with gradients cost.

    Returns compiled_ms, from_disk_ms : milliseconds of a first call, with an empty cache and with a full one, each in a
    new process; call_us : microseconds of the host for a later one.
    """
    return _times(_WKV7)


def one_line_kernels() -> dict[str, dict[str, float]]:
    """Return the same of a kernel of one line, by who loads it; without those that are missing or find no compiler."""
    times = {}
    for name, loader in _LOADERS.items():
        with suppress(RwkvJitError):
            times[name] = _times(loader._replace(prepare=_ADD_ONE + loader.prepare))
    return times


def _times(loader: Loader) -> dict[str, float]:
    program = _FIRST_CALL.replace("PREPARE", loader.prepare).replace("LOAD", loader.load)
    with tempfile.TemporaryDirectory() as folder:
        cache = {loader.cache: str(Path(folder, "cache"))}
        (compiled, _), *times = [_child(program, folder, environment=cache) for _ in range(1 + REPEATS)]
    from_disk, later = _medians(times)
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
    return {name: figures.host_us([call]) for name, call in calls.items()}


def show(result: dict[str, Any]) -> None:
    """Print a measurement."""
    terminal.table(("", "of", "measured"), tables.costs_of_service(result))
