"""Let an RWKV-7 model continue a text.

    python examples/sample.py CHECKPOINT [--prompt TEXT] [--vocabulary FILE] [--tokens N] [--temperature X] [--top-p X]
                              [--seed N] [--cpu]

CHECKPOINT is a file of `train_lm.py` (model.pth) or an official one (.pth or .safetensors). Without --vocabulary a byte
is a token; the official models need the list of their tokens, rwkv_vocab_v20230424.txt.
"""

import argparse
import sys
from pathlib import Path

import torch
from serve import limited
from serving.vocabularies import vocabulary_of

import rwkv_jit
from rwkv_jit.nn import RWKV7


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="an RWKV-7 model, .pth or .safetensors")
    parser.add_argument("--prompt", default="The ", help="what is continued; 'The ' by default")
    parser.add_argument("--vocabulary", metavar="FILE", type=Path, help="its tokens, as of serve.py; else bytes")
    parser.add_argument("--tokens", type=limited(int, 1), default=200, help="how many are written (200)")
    parser.add_argument("--temperature", type=limited(float, 0), default=0.8, help="0 is greedy (0.8)")
    parser.add_argument("--top-p", type=limited(float, 0, 1, above=True), default=1.0, help="by default 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    return parser.parse_args()


def main() -> int | str:
    options = read_options()
    device = "cpu" if options.cpu or not rwkv_jit.is_available() else "cuda"
    try:
        vocabulary = vocabulary_of(options.vocabulary)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = RWKV7.from_checkpoint(options.checkpoint, device=device, dtype=dtype)
    except ImportError:
        return "a .safetensors file needs safetensors: pip install safetensors"
    except (OSError, ValueError) as error:
        return str(error)
    prompt = vocabulary.encode(options.prompt.encode())
    if not prompt:
        return "--prompt: expected at least one token, got none"
    if vocabulary.largest >= len(model.emb.weight):
        return f"the vocabulary goes to token {vocabulary.largest}, the model to {len(model.emb.weight) - 1}"
    generator = torch.Generator(device).manual_seed(options.seed)
    with torch.no_grad():
        written = model.generate(
            torch.tensor([prompt], device=device), options.tokens, temperature=options.temperature,
            top_p=options.top_p, generator=generator,
        )  # fmt: skip
    print(options.prompt + vocabulary.decode(written[0].tolist()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
