"""Small whole models without zeros, and what is compared of two of them."""

import torch

import rwkv_jit

SIZES = {"vocabulary": 11, "width": 12, "layers": 3, "head_size": 4, "hidden": 20}
RANKS = {"w": 2, "a": 3, "v": 4, "g": 5}


def make(dtype=torch.float64, seed=0, name="RWKV7", **more):
    """A small model on the CPU, in which every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {**SIZES, **({"ranks": RANKS} if name == "RWKV7" else {}), **more}
    model = getattr(rwkv_jit.nn, name)(**sizes, dtype=dtype)
    with torch.no_grad():
        for name, x in model.named_parameters():
            scale = x.shape[-1] ** -0.5 if x.dim() == 2 else 1 / 3
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64) * scale
            x.copy_(noise + (1 if "ln" in name and name.endswith("weight") else 0))
    return model


def make_tokens(model, *shape, seed=1):
    return torch.randint(model.head.weight.shape[0], shape, generator=torch.Generator().manual_seed(seed))


def make_state(model, texts, seed=2):
    """A state of every layer, whose tensors want gradients."""
    generator = torch.Generator().manual_seed(seed)
    dtype, width, size = model.emb.weight.dtype, model.emb.weight.shape[1], model.head_size
    make_it = getattr(rwkv_jit.nn, f"{type(model).__name__}State")
    shapes = (texts, width // size, size, size), (texts, width), (texts, width)
    return [
        make_it(*(torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)) for _ in model.blocks
    ]


def flat(logits, state):
    """Results as a list."""
    return [logits, *(x for each in state for x in each)]


def weighted(results, seed=3):
    """A sum of all results with weights of their own, so that nothing cancels."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    return sum((x.double() * w.to(x.device)).sum() for x, w in zip(results, weights, strict=True))
