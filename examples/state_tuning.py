"""State tuning: a model does not change, and the initial states of a sequence are learned.

    python examples/state_tuning.py [--word state] [--quick]

A small RWKV-7 model learns to continue sequences that repeat a word of five letters, whichever it is. Then its
parameters are frozen, and its initial states learn to replace such a sequence: after the first letter the model writes
the word that it has never read. A sequence may be read in chunks, each of which begins with the states after the
previous one; the gradients of the initial states are those of the whole sequence.
"""

import argparse
import os
import re

import torch
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit.nn import RWKV7
from rwkv_jit.nn.rwkv7 import RWKV7State

WIDTH, LAYERS, HEAD_SIZE, LETTERS = 64, 2, 16, 5
TOKENS, CHUNK = 48, 16


def texts(words: torch.Tensor) -> torch.Tensor:
    """Return texts that repeat words, which are [texts, LETTERS], with a space behind each."""
    spaced = F.pad(words, (0, 1), value=ord(" "))
    return spaced.repeat(1, TOKENS // spaced.shape[1] + 1)[:, : TOKENS + 1]


def train(model: RWKV7, steps: int, device: str) -> float:
    """Teach a model to go on with any such text, and return its last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        tokens = texts(torch.randint(ord("a"), ord("z") + 1, (16, LETTERS), device=device))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def states_of(learned: list[torch.Tensor]) -> list[RWKV7State]:
    """Return what each layer begins with: the learned state, and no token before the first."""
    nothing = learned[0].new_zeros(1, WIDTH)
    return [RWKV7State(wkv[None], nothing, nothing) for wkv in learned]


def loss_of(model: RWKV7, learned: list[torch.Tensor], tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the mean loss of a text that is read in chunks."""
    states, losses = states_of(learned), []
    for inputs, targets in zip(tokens[:, :-1].split(chunk, 1), tokens[:, 1:].split(chunk, 1), strict=True):
        logits, states = model(inputs, states, return_state=True)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
    return torch.cat(losses).mean()


@torch.no_grad()
def written(model: RWKV7, learned: list[torch.Tensor], first: int, count: int) -> str:
    """Return the most likely letters behind the first one."""
    states, tokens = states_of(learned), [first]
    while len(tokens) < count:
        logits, states = model(torch.tensor([tokens[-1:]], device=learned[0].device), states, return_state=True)
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--word", default="state", help=f"of {LETTERS} small letters; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args()
    if not re.fullmatch(f"[a-z]{{{LETTERS}}}", options.word):
        parser.error(f"--word: expected {LETTERS} letters from a to z, got {options.word!r}")
    device = "cuda" if rwkv_jit.is_available() else "cpu"
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads would wait for each other longer than they compute
    torch.manual_seed(0)
    model = RWKV7(vocabulary=128, width=WIDTH, layers=LAYERS, head_size=HEAD_SIZE, device=device)
    loss = train(model, 150 if options.quick else 250, device)
    model.requires_grad_(False)
    print(f"the model goes on with any word: loss {loss:.3f}")

    heads = WIDTH // HEAD_SIZE
    learned = [torch.zeros(heads, HEAD_SIZE, HEAD_SIZE, device=device, requires_grad=True) for _ in model.blocks]
    print(
        f"{sum(x.numel() for x in model.parameters())} parameters stay, {sum(x.numel() for x in learned)} are learned"
    )
    text = texts(torch.tensor([list(options.word.encode())], device=device))
    whole, chunks = (torch.autograd.grad(loss_of(model, learned, text, chunk), learned) for chunk in (TOKENS, CHUNK))
    difference = max(((a - b).norm() / b.norm()).item() for a, b in zip(chunks, whole, strict=True))
    print(f"gradients in chunks of {CHUNK} are {difference:.1e} from those of the whole sequence")

    optimizer = torch.optim.Adam(learned, lr=0.05)
    for step in range(81):
        loss = loss_of(model, learned, text, CHUNK)
        if step % 20 == 0:
            print(f"step {step:2}: loss {loss.item():.3f}, {written(model, learned, ord(options.word[0]), 24)!r}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
