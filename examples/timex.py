"""A TimeX layer learns a filter: from the inputs and outputs of an unknown filter, w comes close to it.

    python examples/timex.py [--steps N] [--plot FILE]

The filter is as long as the sequence, so that every output depends on all inputs before it. Prints the loss and the
error of the filter, and with --plot draws the learned filter and the unknown one. Runs on a GPU if there is one; the
CPU takes a few seconds.
"""

import argparse
import sys

import torch

import rwkv_jit


class TimeX(torch.nn.Module):
    """Every channel of x [B, C, T] convolved with a filter of its own, of T taps."""

    def __init__(self, channels, tokens):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(channels, tokens))

    def forward(self, x):
        """Return the outputs [B, C, T]."""
        return rwkv_jit.timex(self.w, x)


def learn(steps):
    """Return the filter that was to be learned, and the one that was."""
    torch.manual_seed(0)
    device = "cuda" if rwkv_jit.is_available() else "cpu"
    batch, channels, tokens = 16, 8, 48
    ages = torch.arange(tokens - 1, -1, -1, device=device)  # of what a tap weighs, in tokens
    rates = torch.linspace(0.05, 0.5, channels, device=device)
    wanted = torch.exp(-rates[:, None] * ages) * torch.cos(ages / 3)
    layer = TimeX(channels, tokens).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for step in range(steps + 1):
        x = torch.randn(batch, channels, tokens, device=device)
        loss = torch.nn.functional.mse_loss(layer(x), rwkv_jit.timex(wanted, x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.5f}")
    return wanted, layer.w.detach()


def draw(figure, wanted, learned, path):
    """Save both filters of the slowest and the fastest channel."""
    axes = figure.subplots(1, 2, sharey=True)
    for axis, channel in zip(axes, (0, -1), strict=True):
        for each, label, style in ((wanted, "to be learned", "-"), (learned, "learned", "--")):
            axis.plot(each[channel].flip(-1).cpu(), style, label=label)
        axis.set(title=f"channel {channel % len(wanted)}", xlabel="tokens ago")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    print(f"filters: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    parser.add_argument("--plot", metavar="FILE", help="draw the filters, e.g. filters.png")
    options = parser.parse_args()
    if options.plot:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            sys.exit("--plot needs matplotlib: pip install matplotlib tqdm")
    wanted, learned = learn(options.steps)
    error = float((learned - wanted).norm() / wanted.norm())
    print(f"relative error of the filter: {error:.3f}")
    if options.plot:
        draw(Figure(figsize=(8, 3.2), layout="tight"), wanted, learned, options.plot)
    return error


if __name__ == "__main__":
    main()
