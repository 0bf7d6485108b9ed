"""RWKV-7 time mixing on random tensors: one call, its error against float64, one gradient, and the state carried on.

    python examples/wkv7_forward.py

Runs the kernels where there is a GPU, and the reference in plain torch where there is none.
"""

import argparse

import torch
from torch.nn.functional import normalize, softplus

import rwkv_jit


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device = "cuda" if rwkv_jit.is_available() else "cpu"
    B, T, H, N = 2, 96, 4, 40
    torch.manual_seed(0)
    r, k, v, x, direction, rate = (torch.randn(B, T, H, N, device=device) for _ in range(6))
    w = -softplus(-x) - 0.5  # the raw decay of the model: each step keeps d = exp(-exp(w)) of a channel, at least 0.545
    kk = normalize(direction, dim=-1)
    a, b = -kk, kk * torch.sigmoid(rate)  # the state forgets what it stored along kk
    v.requires_grad_()

    y, state = rwkv_jit.wkv7(r, w, k, v, a, b, output_final_state=True)
    print(f"{device}: y {list(y.shape)} {y.dtype}, state {list(state.shape)} {state.dtype}")

    exact, _ = rwkv_jit.wkv7_ref(*(x.detach().double() for x in (r, w, k, v, a, b)))
    print(f"relative L2 error of y against float64: {((y - exact).norm() / exact.norm()).item():.1e}")

    (dv,) = torch.autograd.grad(y.square().mean(), v)
    print(f"gradient of v: {list(dv.shape)}, norm {dv.norm().item():.2e}")

    first, carried = rwkv_jit.wkv7(*(x[:, :50] for x in (r, w, k, v, a, b)), output_final_state=True)
    rest, _ = rwkv_jit.wkv7(*(x[:, 50:] for x in (r, w, k, v, a, b)), initial_state=carried)
    difference = (torch.cat([first, rest], dim=1) - y).abs().max().item()
    print(f"the same in two parts with the state carried: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
