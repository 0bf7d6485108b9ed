"""Calls of a layer's small work that have gradients, and the same in float64 as the equations are written."""

from functools import partial
from typing import Any, NamedTuple

import plain_layer
import torch

import rwkv_jit

LETTERS = "NTHKC"
RANDOM = torch.randn


class Case(NamedTuple):
    """A call: its tensors by name, and its options."""

    name: str
    tensors: dict[str, Any]
    options: dict[str, Any]

    def run(self, tensors, function=None):
        """Return what a function of the library makes, as a list."""
        made = (function or getattr(rwkv_jit, self.name))(**tensors, **self.options)
        if self.name == "norm_shift":
            residual, mixed, last = made
            return [residual, *mixed, last]
        several = list(made) if isinstance(made, tuple) else [made]
        return several if self.name != "prepare_keys" or "v_first" in tensors else [several[0], *several[2:]]

    def plainly(self, tensors):
        """Return the same in float64."""
        made = self.run(tensors, getattr(plain_layer, self.name))
        return list(made[0].unbind()) if self.name == "token_shift" else made


def make(name, how, sizes, dtype, parameters, device="cpu"):
    """Return a call; `how` says which of the optional inputs it has."""
    return _CASES[name](how, sizes, partial(_random, device, dtype), partial(_random, device, parameters), device)


def _random(device, dtype, *shape):
    return RANDOM(shape, device=device).to(dtype)


def _apart(x, mean=0):
    """Return rows whose few channels lie apart: a norm of next to nothing would make any rounding large."""
    count = x.shape[-1]
    places = torch.arange(count, device=x.device) - (count - 1) / 2
    return (x + mean + (4 * places if count < 8 else 0)).to(x.dtype)


def _keys(how, sizes, rows, fixed, device):
    *lead, heads, head_size = sizes
    shape, flat = (*lead, heads, head_size), (*lead, heads * head_size)
    given = {"k": _apart(rows(*shape)), "v": rows(*flat), "rate": rows(*flat), "k_k": fixed(heads * head_size),
             "k_a": fixed(heads, head_size)}  # fmt: skip
    if "a0" in how:
        given["a0"] = fixed(heads * head_size)
    if "first" in how:
        given |= {"v_first": rows(*shape), "v_gate": rows(*flat)}
    if "v0" in how:
        given["v0"] = fixed(heads, head_size)
    if "bonus" in how:
        given |= {"r": rows(*flat), "r_k": fixed(heads, head_size)}
    return Case("prepare_keys", given, {"rate_map": "identity"} if "given" in how else {})


def _norm(how, sizes, rows, fixed, device):
    *lead, heads, head_size = sizes
    shape, flat = (*lead, heads, head_size), (*lead, heads * head_size)
    # A mean that is not zero shows a variance that is not that of what is left.
    given = {"y": _apart(rows(*shape), 3), "g": rows(*flat), "weight": fixed(heads * head_size)}
    if "bias" in how:
        given["bias"] = fixed(heads, head_size)
    if "ready" in how:
        given["bonus"] = rows(*flat)
    elif "bonus" in how:
        given |= {"r": rows(*flat), "k": rows(*shape), "v": rows(*flat), "r_k": fixed(heads, head_size)}
    options = {"gate": next((x for x in ("silu", "sigmoid") if x in how), "identity")}
    return Case("gated_norm", given, {**options, "norm": "rms" if "rms" in how else "layer"})


def _gated(how, sizes, rows, fixed, device):
    return Case("gated", {"x": rows(*sizes), "g": rows(*sizes)}, {"gate": how})


def _activate(how, sizes, rows, fixed, device):
    kinds = ["relu_squared", "tanh", "sigmoid", "identity", "relu_squared"]
    return Case("activate", {"x": rows(len(kinds), *sizes)}, {"kinds": kinds})


def _shift(how, sizes, rows, fixed, device):
    *lead, channels = sizes
    mixes = next((int(x) for x in how.split() if x.isdigit()), 6)
    given = {"x": rows(*lead, channels), "mixes": fixed(mixes, channels)}
    texts = lead[0]
    if "packed" in how:
        bounds = sorted(torch.randint(lead[1] + 1, (min(lead[1], 7),)).tolist())
        bounds = [0, 0, *bounds, lead[1], lead[1]]  # empty ones at both ends
        given["cu_seqlens"] = torch.tensor(bounds, device=device)
        texts = len(bounds) - 1
    if "amounts" in how:
        given["amounts"] = rows(mixes, *lead, channels)
    if "first" in how:
        given["first"] = rows(texts, channels)
    return Case("token_shift", given, {})


def _norm_shift(how, sizes, rows, fixed, device):
    shifted = _shift(how, sizes, rows, fixed, device).tensors
    # A mean that is not zero shows a variance that is not that of what is left.
    given = {"x": _apart(shifted.pop("x"), 3), "weight": fixed(sizes[-1]), "bias": fixed(sizes[-1]), **shifted}
    if "add" in how:
        given["add"] = rows(*sizes)
    return Case("norm_shift", given, {})


_CASES = {
    "prepare_keys": _keys, "gated_norm": _norm, "gated": _gated, "activate": _activate,
    "token_shift": _shift, "norm_shift": _norm_shift,
}  # fmt: skip
# How calls are made, by their names.
WAYS = {
    "prepare_keys": (
        "", "a0", "first", "a0 first v0", "a0 bonus", "a0 first v0 bonus", "given", "given a0 first bonus",
    ),
    "gated_norm": ("bias bonus", "bias silu", "rms silu", "bonus sigmoid", "", "bias ready bonus"),
    "gated": ("identity", "sigmoid", "silu"),
    "activate": ("",),
    "token_shift": ("6", "1 first", "2 packed", "5 amounts", "6 packed first", "5 packed amounts first", "3"),
    "norm_shift": ("6", "1 add first", "2 packed", "6 add packed first"),
}  # fmt: skip
SHIFTS = ("token_shift", "norm_shift")
ALL = [(name, how) for name, several in WAYS.items() for how in several]


def sizes_of(name, how, rows, heads, head_size):
    """Return the sizes of a call of about so many rows."""
    if name in SHIFTS:
        return ((1, rows) if "packed" in how else (3, -(-rows // 3))) + (heads * head_size,)
    return (rows, heads, head_size)


def differentiate(case, function, weights=None, wanted=None):
    """Return the results of `function`, the gradients by name, and the weights of the results, as they are rounded."""
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point() and (wanted is None or name in wanted))
        for name, x in case.tensors.items()
    }
    results = function(leaves)
    if weights is None:
        weights = [torch.randn_like(x) for x in results]
    asked = {name: x for name, x in leaves.items() if x.requires_grad}
    of_results = [weight.to(x.dtype) for weight, x in zip(weights, results, strict=True)]
    asked_for = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(results, list(asked.values()), of_results, **asked_for)
    return [x.detach() for x in results], dict(zip(asked, grads, strict=True)), of_results


def exactly(case, weights):
    """Return results and gradients in float64, in which no part of a gradient is rounded either."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in case.tensors.items()}
    options = case.options
    if case.name == "norm_shift":  # what it norms and carries is rounded all the same
        dtype = case.tensors["x"].dtype
        options = {"dtype": dtype, **options, "normed": dtype}
    case = case._replace(tensors=wide, options=options)
    return differentiate(case, case.plainly, weights)[:2]


def check_sums(launches, backward, grads):
    """Check that one launch adds up what the blocks of a backward leave of these gradients, and of no others."""
    if not grads:
        assert launches == []
        return
    (launch,) = launches
    assert launch.template == "sum_buffers"
    named = [{x: launch.named[f"{x}{n}"] for x in ("rows", "sums", "group_rows", "width", "storage")} for n in range(5)]
    for (x, grad), found in zip(grads.items(), named, strict=False):
        assert found == {
            "rows": backward.named[f"d{x}_rows"], "sums": grad.data_ptr(), "group_rows": backward.grid[0],
            "width": grad.numel(), "storage": [torch.float16, torch.bfloat16, torch.float32].index(grad.dtype),
        }  # fmt: skip
    assert all(not found["rows"] and not found["sums"] and not found["width"] for found in named[len(grads) :])
    assert launch.grid == (sum(-(-grad.numel() // 32) for grad in grads.values()), 1, 1)
