"""A kernel that the library does not have, RWKV's token shift, from a template of one's own: token_shift.cu.

    python examples/own_kernel.py

Compiles it for this GPU, launches it on torch tensors, and prints its error against float64 and its time beside that
of the same in torch. Without a GPU it is compiled for sm_90.
"""

import argparse
import math
from pathlib import Path

import torch

import rwkv_jit

CHANNELS, NUM_THREADS = 2048, 128


def milliseconds(run, repeats: int = 50) -> float:
    """Return the time of one call, on the GPU and after a first one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    template = rwkv_jit.Template(Path(__file__).with_name("token_shift.cu"))
    on_gpu = rwkv_jit.is_available()
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 8)):  # 16 bytes at once
        kernel = template.specialize(
            arch=None if on_gpu else "sm_90", T_IO=dtype, CHANNELS=CHANNELS, WIDTH=width, NUM_THREADS=NUM_THREADS
        )
        print(f"{dtype}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, {kernel.origin}")
        if not on_gpu:
            continue
        x, mu = torch.randn(8, 1024, CHANNELS, device="cuda").to(dtype), torch.rand(CHANNELS, device="cuda")
        y = torch.empty_like(x)
        grid = math.ceil(x.numel() / (width * NUM_THREADS))

        def launch(kernel=kernel, grid=grid, x=x, mu=mu, y=y) -> None:
            kernel.launch(grid, NUM_THREADS, x=x, mu=mu, y=y, batch=x.shape[0], tokens=x.shape[1])

        def in_torch(x=x, mu=mu) -> torch.Tensor:
            before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
            return x + (before - x) * mu

        launch()
        exact = in_torch(x.double(), mu.double())
        print(f"  relative L2 error against float64: {((y - exact).norm() / exact.norm()).item():.1e}")
        print(f"  {milliseconds(launch):.3f} ms; in torch {milliseconds(in_torch):.3f} ms")


if __name__ == "__main__":
    main()
