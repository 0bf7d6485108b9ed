"""What a first call costs, compiled and from disk: of an op, and of a kernel of one line by every loader there is."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rwkv_jit import report

REPEATS = 3  # from disk

# A process of its own, timed from where imports, the CUDA context and torch's own first uses are done.
_FIRST_CALL = """
import time, platformdirs, torch, rwkv_jit
from rwkv_jit import cuda
from rwkv_jit.bench import make_inputs
cuda.cupy()
given = make_inputs("wkv7", (1, 64, 4, 64), torch.bfloat16)
torch.cuda.current_stream().synchronize()
x = torch.ones(8, 8, device="cuda", requires_grad=True)
(x @ x).backward(torch.ones(8, 8, device="cuda"))
torch.cuda.synchronize()
rwkv_jit.wkv7
started = time.perf_counter()
y, _ = rwkv_jit.wkv7(*given)
y.backward(torch.ones_like(y))
torch.cuda.synchronize()
print((time.perf_counter() - started) * 1e3)
"""


# The same kernel of one line by each: what they import, and where each keeps what it compiled.
_ADD_ONE = """
import sys, time, torch
from pathlib import Path
source = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }'
x = torch.zeros(32, device="cuda")
torch.cuda.synchronize()
IMPORTS
started = time.perf_counter()
CALL
torch.cuda.synchronize()
assert float(x.sum()) == 32.0
print((time.perf_counter() - started) * 1e3)
"""
_LOADERS = {
    "rwkv_jit": (
        "RWKVJIT_CACHE_DIR",
        "import platformdirs, rwkv_jit\n"
        "from rwkv_jit import cuda\n"
        "rwkv_jit.Template, cuda.cupy()\n"
        "file = Path(sys.argv[1], 'add_one.cu')\n"
        "file.write_text(source)",
        "rwkv_jit.Template(file).specialize().launch(1, 32, x)",
    ),
    "CuPy's RawModule": (
        "CUPY_CACHE_DIR",
        "import cupy\ncupy.cuda.Device().use()\narray = cupy.from_dlpack(x)",
        "cupy.RawModule(code=source).get_function('add_one')((1,), (32,), (array,))",
    ),
    "Triton": (
        "TRITON_CACHE_DIR",
        "Path(sys.argv[1], 'of_triton.py').write_text('import triton, triton.language as tl\\n@triton.jit\\n'\n"
        "    'def add_one(x):\\n    i = x + tl.arange(0, 32)\\n    tl.store(i, tl.load(i) + 1.0)\\n')\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from of_triton import add_one",
        "add_one[(1,)](x)",
    ),
    "torch's extension loader": (
        "TORCH_EXTENSIONS_DIR",
        "from torch.utils import cpp_extension\n"
        "declared = 'void one_more(torch::Tensor x);'\n"
        "source = '#include <torch/extension.h>\\n' + source + (\n"
        "    'void one_more(torch::Tensor x) { add_one<<<1, 32>>>(x.data_ptr<float>()); }')",
        "cpp_extension.load_inline('one_more', [declared], [source], functions=['one_more']).one_more(x)",
    ),
}


def first_calls() -> dict[str, float]:
    """Return milliseconds of a first call with gradients: from an empty cache and from disk, each in a new process."""
    return _times(_FIRST_CALL, "RWKVJIT_CACHE_DIR", "wkv7")


def one_line_kernels() -> dict[str, dict[str, float]]:
    """Return the same of a kernel of one line, by who loads it; without those that are missing or find no compiler."""
    found = {}
    for name, (variable, imports, call) in _LOADERS.items():
        with suppress(subprocess.CalledProcessError):
            found[name] = _times(_ADD_ONE.replace("IMPORTS", imports).replace("CALL", call), variable, name)
    return found


def _times(program: str, variable: str, what: str) -> dict[str, float]:
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder, report.progress(f"first calls of {what}") as tell:
        child = {**os.environ, variable: str(Path(folder, "cache"))}
        command = [sys.executable, "-c", program, folder]
        while len(times) <= REPEATS:
            if tell:
                tell(len(times), 1 + REPEATS)
            done = subprocess.run(command, env=child, capture_output=True, text=True, check=True)
            times.append(float(done.stdout.splitlines()[-1]))
    return {"compiled_ms": times[0], "from_disk_ms": statistics.median(times[1:])}


def show_first_calls(first: dict[str, float], one_line: dict[str, dict[str, float]]) -> None:
    """Print them."""
    rows = {"wkv7 with gradients": first, **{f"a kernel of one line, {name}": each for name, each in one_line.items()}}
    report.table(
        ("first call in a new process, without imports", "empty cache ms", "from disk ms"),
        [(name, f"{each['compiled_ms']:.0f}", f"{each['from_disk_ms']:.1f}") for name, each in rows.items()],
    )
