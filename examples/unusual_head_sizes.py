"""wkv6 and wkv7 at head sizes from 8 to 256: what compiling costs, cold and from disk, and how exact the results are.

    python examples/unusual_head_sizes.py [--quick] [--output head_sizes.png]

Prints a table and saves a heat map of the errors. Cold is one op, head size and dtype compiled in an empty cache,
forward and backward side by side as the first training step does it; warm is the same found on disk by a process
that remembers nothing. Errors are relative L2 against float64 on the same rounded inputs, of y and of the worst
gradient. Without a GPU the kernels are compiled for sm_90 and the errors are those of the reference in plain torch.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import normalize, softplus

import rwkv_jit
from rwkv_jit.kernels import kernel

try:
    import matplotlib
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f"this example needs {missing.name}: pip install matplotlib tqdm")

HEAD_SIZES = (8, 16, 24, 32, 40, 48, 64, 80, 96, 100, 128, 256)
QUICK_HEAD_SIZES = (8, 40, 64, 100)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPS = {"wkv6": (rwkv_jit.wkv6, rwkv_jit.wkv6_ref), "wkv7": (rwkv_jit.wkv7, rwkv_jit.wkv7_ref)}


def compile_ms(op: str, head_size: int, dtype: torch.dtype, arch: str | None) -> tuple[float, float]:
    """Return the milliseconds that both directions take when compiled, and when read from disk."""

    def both_directions() -> tuple[float, set[str]]:
        kernel.forget()
        started = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(rwkv_jit.specialize, op, head_size, dtype=dtype, arch=arch, direction=direction)
                for direction in ("forward", "backward")
            ]
            origins = {job.result().origin for job in jobs}
        return 1e3 * (time.perf_counter() - started), origins

    cold, cold_origins = both_directions()
    warm, warm_origins = both_directions()
    if (cold_origins, warm_origins) != ({"compiled"}, {"disk"}):
        raise RuntimeError(f"expected compiled, then disk; got {cold_origins}, then {warm_origins}")
    return cold, warm


def errors(op: str, head_size: int, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Return the relative error of y, and the largest of the gradients'."""
    function, reference = OPS[op]
    B, T, H = (2, 130, 3) if device == "cuda" else (1, 33, 2)
    torch.manual_seed(head_size)
    r, k, v, x, direction, rate, dy = (torch.randn(B, T, H, head_size) for _ in range(7))
    w, kk = -softplus(-x) - 0.5, normalize(direction, dim=-1)
    given = (r, k, v, w, torch.randn(H, head_size)) if op == "wkv6" else (r, w, k, v, -kk, kk * torch.sigmoid(rate))
    rounded = [x.to(device, dtype) for x in given]
    dy = dy.to(device, dtype)
    results = []
    for run, inputs in ((function, rounded), (reference, [x.double() for x in rounded])):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y, _ = run(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    found = [((x.double() - exact).norm() / exact.norm()).item() for x, exact in zip(*results, strict=True)]
    return found[0], max(found[1:])


def draw(records: list[dict], head_sizes: tuple[int, ...], title: str, path: str) -> None:
    """Save the errors as a heat map: a row per head size, a column per op, dtype and result."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(op, dtype, what) for op in OPS for dtype in DTYPES for what in ("y", "gradient")]
    value = {(r["op"], r["dtype"], what, r["head size"]): r[what] for r in records for what in ("y", "gradient")}
    logs = torch.tensor([[value[(*column, size)] for column in columns] for size in head_sizes]).log10()
    figure, axes = pyplot.subplots(figsize=(1.1 + 0.75 * len(columns), 1.8 + 0.38 * len(head_sizes)))
    image = axes.imshow(logs, cmap="viridis", aspect="auto", vmin=-7.5, vmax=-2)
    axes.set_xticks(
        range(len(columns)), [f"{op}\n{dtype}\n{'y' if what == 'y' else 'grads'}" for op, dtype, what in columns]
    )
    axes.set_yticks(range(len(head_sizes)), [str(size) for size in head_sizes])
    axes.set_ylabel("head size")
    for row, cells in enumerate(logs.tolist()):
        for column, log in enumerate(cells):
            axes.text(column, row, f"{log:.1f}", ha="center", va="center", color="white" if log < -4.5 else "black")
    figure.colorbar(image, label="log10 of the relative L2 error")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"heat map: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"only the head sizes {QUICK_HEAD_SIZES}")
    parser.add_argument("--output", default="head_sizes.png", help="where the heat map goes")
    options = parser.parse_args()
    head_sizes = QUICK_HEAD_SIZES if options.quick else HEAD_SIZES
    on_gpu = rwkv_jit.is_available()
    device, arch = ("cuda", None) if on_gpu else ("cpu", "sm_90")
    title = f"{torch.cuda.get_device_name()}: kernels" if on_gpu else "CPU: the reference in plain torch"
    print(title if on_gpu else f"No GPU: kernels are compiled for {arch}, errors are those of the reference on the CPU")

    cases = [(size, op, dtype) for size in head_sizes for op in OPS for dtype in DTYPES]
    records = []
    with tempfile.TemporaryDirectory(prefix="rwkv_jit-temporary-") as folder:  # no message sends others there
        os.environ["RWKVJIT_CACHE_DIR"] = folder
        logging.getLogger("rwkv_jit").setLevel(logging.ERROR)  # notices would break the bar
        rwkv_jit.specialize("wkv6", 1, arch=arch)  # loads NVRTC, which is not what is measured
        for size, op, name in tqdm(cases, unit="kernel pair"):
            cold, warm = compile_ms(op, size, DTYPES[name], arch)
            y, gradient = errors(op, size, DTYPES[name], device)
            records.append(
                {"head size": size, "op": op, "dtype": name, "cold": cold, "warm": warm, "y": y, "gradient": gradient}
            )
    print("head size    op  dtype  cold ms  warm ms    error y  error grads")
    for r in records:
        print(
            f"{r['head size']:9}  {r['op']}   {r['dtype']}  {r['cold']:7.0f}  {r['warm']:7.1f}  {r['y']:9.1e}"
            f"  {r['gradient']:11.1e}"
        )
    draw(records, head_sizes, title, options.output)


if __name__ == "__main__":
    main()
