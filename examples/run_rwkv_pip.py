"""The `rwkv` package as it is, on these kernels: it reads a prompt and writes on, and no compiler is needed.

    python examples/run_rwkv_pip.py [--model RWKV-x070-....pth --prompt "..."]

Needs the package: pip install rwkv. Without a model it makes a small one at random, which writes numbers of tokens that
mean nothing. Prints what was compiled and found on disk, and tokens a second.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import rwkv_jit
import rwkv_jit.nn
from rwkv_jit import compat


def random_model(path: Path) -> None:
    """Write a small RWKV-7 model with random parameters."""
    model = rwkv_jit.nn.RWKV7(vocabulary=512, width=128, layers=3, head_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 20)
    torch.save(model.state_dict(), path)


def write_on(model, prompt: list[int], count: int) -> tuple[list[int], float, float]:
    """Return the most likely tokens behind a prompt, and the seconds of the prompt and of a token."""
    started = time.perf_counter()
    logits, state = model.forward(prompt, None)
    tokens, read = [int(logits.argmax())], time.perf_counter() - started
    started = time.perf_counter()
    while len(tokens) < count:
        logits, state = model.forward([tokens[-1]], state)
        tokens.append(int(logits.argmax()))
    return tokens, read, (time.perf_counter() - started) / max(count - 1, 1)


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint of RWKV-7, .pth; a random one by default")
    parser.add_argument("--prompt", default="The Eiffel tower is in the city of", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="how many to write; default: %(default)s")
    parser.add_argument("--strategy", help='as the package takes it; default: "cuda fp16", or "cpu fp32" without a GPU')
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens: expected 1 or more, got {options.tokens}")
    strategy = options.strategy or ("cuda fp16" if rwkv_jit.is_available() else "cpu fp32")
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "1"}  # the package's, read at its import
    compat.install()
    try:
        from rwkv.model import RWKV
        from rwkv.utils import PIPELINE
    except ImportError:
        return "this example needs the rwkv package: pip install rwkv"
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "random.pth"
        if options.model is None:
            random_model(path)
        elif not path.is_file():
            return f"--model: there is no file {path}"
        model = RWKV(model=str(path.with_suffix("")), strategy=strategy)
    if options.model is None:
        decode, prompt = lambda tokens: " ".join(map(str, ["", *tokens])), [*options.prompt.encode()]
    else:
        pipeline = PIPELINE(model, "rwkv_vocab_v20230424")
        decode, prompt = pipeline.decode, pipeline.encode(options.prompt)

    tokens, first, _ = write_on(model, prompt, options.tokens)
    again, read, token = write_on(model, prompt, options.tokens)
    kernels = rwkv_jit.cache_info()
    print(f"{options.prompt}{decode(tokens)}")
    print(f"kernels: {kernels['compiled']} compiled, {kernels['disk']} from disk")
    print(
        f"prompt of {len(prompt)} tokens: {1e3 * first:.0f} ms, then {1e3 * read:.1f}; {1 / token:.0f} tokens a second"
    )
    return None if again == tokens else "the second time it wrote other tokens"


if __name__ == "__main__":
    sys.exit(main())
