"""RWKV-4 time mixing on random tensors: one call, its error, gradients, and a text continued token by token.

    python examples/wkv4.py

Runs the kernels where there is a GPU, and the reference in plain torch where there is none.
"""

import argparse

import torch

import rwkv_jit


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device = "cuda" if rwkv_jit.is_available() else "cpu"
    B, T, C = 2, 96, 200
    torch.manual_seed(0)
    k, v = torch.randn(2, B, T, C, device=device)
    w = torch.linspace(-6, 1, C, device=device)  # time_decay: each step keeps exp(-exp(w)), from 0.998 to 0.066
    u = torch.randn(C, device=device) * 0.5  # time_first
    inputs = [x.requires_grad_() for x in (w, u, k * 30, v)]  # keys so large that exp(k) alone would overflow

    y, state = rwkv_jit.wkv4(*inputs, output_final_state=True)
    print(f"{device}: y {list(y.shape)} {y.dtype}, state {list(state.shape)}: num, den, max of every channel")

    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_y, _ = rwkv_jit.wkv4_ref(*exact)
    found, wanted = (
        (of.detach(), *torch.autograd.grad(of.square().mean(), leaves))
        for of, leaves in ((y, inputs), (exact_y, exact))
    )
    for name, x, want in zip(("y", "dw", "du", "dk", "dv"), found, wanted, strict=True):
        print(f"relative L2 error of {name} against float64: {((x - want).norm() / want.norm()).item():.1e}")

    with torch.no_grad():
        w, u, k, v = inputs
        _, state = rwkv_jit.wkv4(w, u, k[:, :90], v[:, :90], output_final_state=True)
        tokens = [rwkv_jit.wkv4_update(state, w, u, k[:, t], v[:, t]) for t in range(90, T)]
        difference = (torch.stack(tokens, dim=1) - y[:, 90:]).abs().max().item()
    print(f"the last tokens one at a time, the state changed in place: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
