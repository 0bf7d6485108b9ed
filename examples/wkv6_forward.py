"""RWKV-6 time mixing on random tensors, with values wider than keys: one call, its error against float64, gradients.

    python examples/wkv6_forward.py

Runs the kernels where there is a GPU, and the reference in plain torch where there is none.
"""

import argparse

import torch

import rwkv_jit


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device = "cuda" if rwkv_jit.is_available() else "cpu"
    B, T, H, K, V = 2, 96, 4, 48, 96
    torch.manual_seed(0)
    r, k, w = (torch.randn(B, T, H, K, device=device) for _ in range(3))
    w = w - 2  # the raw decay: each step keeps d = exp(-exp(w)) of a channel, 0.87 at w = -2
    v = torch.randn(B, T, H, V, device=device)
    u = torch.randn(H, K, device=device)  # how much the current token counts beside the state
    start = torch.zeros(H, V, K, device=device)  # one state for the whole batch, as state tuning learns it
    for x in (r, k, v, w, u, start):
        x.requires_grad_()

    y, state = rwkv_jit.wkv6(r, k, v, w, u, initial_state=start, output_final_state=True)
    print(f"{device}: y {list(y.shape)} {y.dtype}, state {list(state.shape)} {state.dtype}")

    exact, _ = rwkv_jit.wkv6_ref(*(x.detach().double() for x in (r, k, v, w, u)))
    print(f"relative L2 error of y against float64: {((y - exact).norm() / exact.norm()).item():.1e}")

    gradients = torch.autograd.grad(y.square().mean() + state.square().mean(), (r, k, v, w, u, start))
    for name, gradient in zip(("r", "k", "v", "w", "u", "initial_state"), gradients, strict=True):
        print(f"gradient of {name}: {list(gradient.shape)}, norm {gradient.norm().item():.2e}")


if __name__ == "__main__":
    main()
