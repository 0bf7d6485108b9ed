"""What calls cost that are the first of a process, compiled and from disk, and the host a later one.

Of an op, and of a kernel of one line by every loader there is.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rwkv_jit import report
from rwkv_jit.errors import RwkvJitError

REPEATS = 3  # from disk

# A process of its own, timed from where imports, the CUDA context and torch's own first uses are done. It ends at once:
# a thread of torch's backward that still waits for the interpreter when that ends aborts the process, with any op.
_PROGRAM = """
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
from rwkv_jit.bench import timing
print(first * 1e3, timing.host_us([call]), flush=True)
os._exit(0)
"""
# Where it keeps what it compiled, what comes before, and what is timed with the first call.
_OF_RWKV_JIT = "RWKVJIT_CACHE_DIR"
_WKV7 = (
    _OF_RWKV_JIT,
    """
import platformdirs, rwkv_jit
from rwkv_jit import cuda
from rwkv_jit.bench import make_inputs
cuda.cupy()
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
from rwkv_jit import cuda
rwkv_jit.Template, cuda.cupy()
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


def first_calls() -> dict[str, float]:
    """Return what calls of wkv7 with gradients cost.

    Returns
    -------
    dict
        compiled_ms, from_disk_ms : milliseconds of a first call, with an empty cache and with a full one, each in a new
        process; call_us : microseconds of the host for a later one.
    """
    return _times("wkv7", *_WKV7)


def one_line_kernels() -> dict[str, dict[str, float]]:
    """Return the same of a kernel of one line, by who loads it; without those that are missing or find no compiler."""
    found = {}
    for name, (variable, prepare, load) in _LOADERS.items():
        with suppress(RwkvJitError):
            found[name] = _times(name, variable, _ADD_ONE + prepare, load)
    return found


def _times(what: str, variable: str, prepare: str, load: str) -> dict[str, float]:
    program = _PROGRAM.replace("PREPARE", prepare).replace("LOAD", load)
    times: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder, report.progress(f"first calls of {what}") as tell:
        child = {**os.environ, variable: str(Path(folder, "cache")), "RWKVJIT_LOG": "error"}
        command = [sys.executable, "-c", program, folder]
        while len(times) <= REPEATS:
            if tell:
                tell(len(times), 1 + REPEATS)
            done = subprocess.run(command, env=child, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip()[-2000:]
                raise RwkvJitError(f"the process that calls {what} ended with exit code {done.returncode}: {said}")
            times.append([float(number) for number in done.stdout.splitlines()[-1].split()])
    from_disk, later = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return {"compiled_ms": times[0][0], "from_disk_ms": from_disk, "call_us": later}


def show_first_calls(first: dict[str, float], one_line: dict[str, dict[str, float]]) -> None:
    """Print them."""
    of_loaders = {f"a kernel of one line, {name}": each for name, each in one_line.items()}
    report.table(
        ("calls in a new process", "first, empty cache ms", "first, from disk ms", "a later one, host us"),
        [
            (name, f"{each['compiled_ms']:.0f}", f"{each['from_disk_ms']:.1f}", f"{each['call_us']:.1f}")
            for name, each in {"wkv7, forward and backward": first, **of_loaders}.items()
        ],
    )
