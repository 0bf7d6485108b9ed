"""A TimeX layer learns a filter: given inputs and what an unknown filter made of them, w comes close to it.

The filter is as long as the sequence, so that every output depends on all inputs before it. Runs on a GPU where there
is one; the CPU takes a few seconds.
"""

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


def main(steps=60):
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
    error = float((layer.w.detach() - wanted).norm() / wanted.norm())
    print(f"relative error of the filter: {error:.3f}")
    return error


if __name__ == "__main__":
    main()
