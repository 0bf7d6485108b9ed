"""With the wheel of this GPU installed, the first calls of a process compile nothing and do not load NVRTC."""

import os
import subprocess
import sys

import torch

import rwkv_jit

CALLED = """
import sys
import torch
import rwkv_jit
sys.path.insert(0, sys.argv[1])
torch.manual_seed(int(sys.argv[2]))
import kernels_wheel
from rwkv_jit.kernels import cuda, stats
from rwkv_jit.desk import inputs

for of in kernels_wheel.CALLS:
    op = getattr(rwkv_jit, of.op)
    for (keys, values), dtype, decay, tokens in (
        (sizes, dtype, decay, tokens)
        for sizes in of.sizes for dtype in of.dtypes for decay in of.decays for tokens in of.tokens
    ):
        named = {} if decay is None else {"decay": decay}
        lengths = [(8, tokens, 12)] if of.op == "timex" else [(1, 1, 2), (4, 1, 64), (4, 96, 64), (1, 2048, 2)]
        for shape in lengths:
            given = inputs.make_inputs(of.op, (*shape, keys or 64, values or 64), dtype)
            asked = dict(named) if of.op == "timex" else dict(named, output_final_state=True)
            with torch.no_grad():
                op(*given, **asked)
            made = op(*given, **asked)
            y = made if of.op == "timex" else made[0]
            y.float().sum().backward()
            assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in given), (of.op, shape)
torch.cuda.synchronize()
counts = stats.snapshot()
print(counts["compiled"], counts["disk"], counts["bundle"] > 100, cuda.nvrtc.cache_info().misses)
"""

# As the tool does, but with the NVRTC of this machine, whatever its CUDA.
BUILT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import kernels_wheel
kernels_wheel.write(sys.argv[2], kernels_wheel.build(sys.argv[2]), Path(sys.argv[3]))
"""


def test_calls_compile_nothing(tmp_path, root, seed):
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    arch = {"sm_90": "sm_90a"}.get(capability, capability)

    def run(*command, **variables):
        environment = {**os.environ, "RWKVJIT_CACHE_DIR": str(tmp_path / "cache"), **variables}
        done = subprocess.run(
            [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, env=environment, cwd=root
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-c", BUILT, root / "tools", arch, tmp_path, LOCAL_WORLD_SIZE="8")  # other tests want cores too
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    path = os.pathsep.join([str(tmp_path / "site"), str(rwkv_jit.__path__[0]).removesuffix("rwkv_jit")])
    called = run("-c", CALLED, root / "tools", seed, PYTHONPATH=path, RWKVJIT_ASSERT_CACHED="1")
    assert called == "0 0 True 0\n"
