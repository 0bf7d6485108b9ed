"""FLA's RWKV-7 layer on these kernels, by one line: its time with and without them, and who ran which calls.

    python examples/fla_layer.py [--width 2048 --batch 8 --tokens 4096]

Needs FLA: pip install flash-linear-attention. Without a GPU, where FLA's kernels do not run, it runs only a small layer
on these.
"""

import argparse
import statistics
import sys
import time
import warnings

import torch

import rwkv_jit
from rwkv_jit.compat import fla as ours

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what FLA says at its import
        from fla.layers import RWKV7Attention
except ImportError:
    sys.exit("this example needs FLA: pip install flash-linear-attention")


def milliseconds(step, device: str, runs: int) -> float:
    """Return the median time of a step, after two that do not count."""
    times = []
    for _ in range(runs + 2):
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    is_gpu = rwkv_jit.is_available()
    sizes = {"width": (2048, 128), "batch": (8, 2), "tokens": (4096, 64), "runs": (20, 2)}
    for name, of in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=of[not is_gpu], help="default: %(default)s")
    options = parser.parse_args()
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(options, name)}")
    if options.width % 64:
        parser.error(f"--width: expected a multiple of 64, the head size, got {options.width}")
    device, dtype = ("cuda", torch.bfloat16) if is_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's word on whose figures to trust
        layer = RWKV7Attention(hidden_size=options.width, head_dim=64, layer_idx=0, num_hidden_layers=12)
    layer = layer.to(device, dtype)
    torch.nn.init.normal_(layer.o_proj.weight, std=options.width**-0.5)  # it begins as zeros
    x = torch.randn(options.batch, options.tokens, options.width, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = layer(x)[0]
        (dx,) = torch.autograd.grad(y, x, dy)
        return y.detach(), dx

    if is_gpu:
        print("FLA tunes itself: a minute or more", flush=True)
        theirs = step()
        alone = milliseconds(step, device, options.runs)
    ours.install()
    found = step()
    installed = milliseconds(step, device, options.runs)
    if is_gpu:
        for name, a, b in zip(("y", "the gradient of x"), found, theirs, strict=True):
            print(f"{name}: {((a - b).float().norm() / b.float().norm()).item():.1e} from FLA's")
        print(f"forward and backward: FLA {alone:.2f} ms, with rwkv_jit {installed:.2f} ms")
    else:
        print(f"forward and backward on the CPU: {installed:.1f} ms")
    for name, calls in ours.report().items():
        print(f"{name}: {', '.join(f'{who} {count}' for who, count in calls.items())}")


if __name__ == "__main__":
    main()
