"""What a first call costs: compiled, and from disk; and what torch's extension loader takes for a kernel of a line."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

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


# The same for an extension; what torch imports for it is not counted.
_EXTENSION = """
import sys, time, torch
from torch.utils import cpp_extension
declared = "torch::Tensor one_more(torch::Tensor x);"
source = '''
#include <torch/extension.h>
__global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }
torch::Tensor one_more(torch::Tensor x) { add_one<<<1, 32>>>(x.data_ptr<float>()); return x; }
'''
x = torch.zeros(32, device="cuda")
torch.cuda.synchronize()
started = time.perf_counter()
made = cpp_extension.load_inline("one_more", [declared], [source], functions=["one_more"])
made.one_more(x)
torch.cuda.synchronize()
assert float(x.sum()) == 32.0
print((time.perf_counter() - started) * 1e3)
"""


def first_calls() -> dict[str, float]:
    """Return milliseconds of a first call with gradients: from an empty cache and from disk, each in a new process."""
    return _times(_FIRST_CALL, "RWKVJIT_CACHE_DIR", 5)


def extension_loads() -> dict[str, float] | None:
    """Return the same of torch's extension loader, or None where it finds no compiler."""
    try:
        return _times(_EXTENSION, "TORCH_EXTENSIONS_DIR", 3)
    except subprocess.CalledProcessError:
        return None


def _times(program: str, variable: str, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        child = {**os.environ, variable: cache}
        command = [sys.executable, "-c", program]
        times = [
            float(
                subprocess.run(command, env=child, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            )
            for _ in range(1 + repeats)
        ]
    return {"compiled_ms": times[0], "from_disk_ms": statistics.median(times[1:])}


def show_first_calls(first: dict[str, float], extension: dict[str, float] | None) -> None:
    """Print them."""
    print(
        f"First call of wkv7 with gradients: {first['compiled_ms']:.0f} ms from an empty cache, "
        f"{first['from_disk_ms']:.1f} ms from disk in a new process (imports and CUDA context not counted)."
    )
    if extension is not None:
        print(
            f"A kernel of one line by torch's extension loader: {extension['compiled_ms']:.0f} ms, "
            f"{extension['from_disk_ms']:.1f} ms from disk."
        )
