"""The small operations of a layer and the loss beside plain torch; time mixing and a layer beside their products."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import rwkv_jit
from rwkv_jit.desk import bench, figures
from rwkv_jit.desk.inputs import DTYPES, OURS, PHASES, USUAL_PHASES, Function, Given, Who, call_of, read_shape

# Their inputs: t has all tokens, h has them by heads, c and digits have channels alone, f has four taps of each.
WORKS = {
    "token_shift, 6 mixes": "t6", "token_shift, 1 mix": "t1", "norm_shift, 6 mixes": "tcc6", "causal_conv1d": "tf",
    "prepare_keys": "hhhhhcccc", "gated_norm": "htcchhhc",
    "gated": "tt", "activate": "t", "cross_entropy": "", "linear_cross_entropy": "", "RWKV7TimeMix": "tt",
    "RWKV7TimeMix, products": "", "RWKV7Block": "tt", "RWKV7Block, products": "",
}  # fmt: skip
show = bench.show


class Work(NamedTuple):
    """A work of a layer that is measured."""

    op: str
    shape: tuple[int, ...]  # B, T, C
    dtype: torch.dtype
    phase: str

    @property
    def shown(self) -> list[int]:
        """The shape as it is written."""
        return list(self.shape)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    parser.add_argument("--shape", metavar="B,T,C", help="instead of 8,4096,2048; C is a multiple of 64")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure all works; without a GPU small ones on the CPU. Raises ValueError where a shape cannot be read."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = cases_of(parsed, device)
    if device == "cuda":
        bench.check_gpu()
    rows = bench.measured(cases, lambda case: rows_of(case, device), bench.row_of)
    return {"env": bench.environment(), "device": device, "rows": rows}


def cases_of(parsed: argparse.Namespace, device: str) -> list[Work]:
    """Return the works in their passes. Raises ValueError."""
    text, forms = parsed.shape or ("8,4096,2048" if device == "cuda" else "2,16,128"), "B,T,C with C a multiple of 64"
    if (shape := read_shape(text, (3,), forms))[2] % 64:
        raise ValueError(f"--shape: expected positive numbers {forms}, got {text!r}")
    passes = {"linear_cross_entropy": USUAL_PHASES[1:]} | dict.fromkeys(list(WORKS)[-4:], USUAL_PHASES)
    return [Work(work, shape, DTYPES[parsed.dtype], phase) for work in WORKS for phase in passes.get(work, PHASES[:2])]


def rows_of(case: Work, device: str) -> list[dict[str, Any]]:
    """Measure a work: return a row for ours and for torch."""
    given = calls_for(case._replace(shape=(1, min(case.shape[1], 300), case.shape[2])), device)
    names = [f"{'d' if 'backward' in case.phase else 'y'}{number}" for number in range(len(given.inputs) + 9)]
    exact = given.functions.get(("torch", "plain"))
    errors = figures.distances(given, case.phase, exact, names) if exact else {}
    return bench.measured_rows(case, calls_for(case, device), errors, device, True)


def calls_for(case: Work, device: str) -> Given:
    """Return what a work of a layer is measured with; a module stands beside the products of its matrices alone."""
    (batch, tokens, width), random = case.shape, partial(torch.randn, device=device, dtype=case.dtype)
    sizes = {"t": (batch, tokens, width), "h": (batch, tokens, width // 64, 64), "c": (width,), "f": (width, 4)}
    inputs = [random(sizes.get(letter) or (int(letter), width)) for letter in WORKS[case.op]]
    name, _, more = case.op.partition(", ")
    ours: Any = getattr(rwkv_jit.nn if name.startswith("RWKV7") else rwkv_jit, name)
    theirs: Any = getattr(rwkv_jit, f"{name}_ref", None)
    if name.startswith("RWKV7"):
        module = ours(width, 1, 24, 64, device=device, dtype=case.dtype)
        ours, inputs = lambda x, first, *_: module(x, first)[0], [*inputs, *module.parameters()]
        if more:  # matrices of linear layers are [out, in], low-rank ones [in, out]; r_k is none
            named = [(own, x) for own, x in module.named_parameters() if x.dim() == 2 and not own.endswith("r_k")]
            weights = [random(x.shape if own.endswith("weight") else x.T.shape) * 0.02 for own, x in named]
            inputs = [*(random(batch, tokens, x.shape[1]) for x in weights), *weights]
            ours, theirs = None, lambda *x: tuple(map(functional.linear, x[: len(named)], x[len(named) :]))
    elif "cross_entropy" in name:
        vocabulary, rows, is_linear = 65536 if device == "cuda" else 100, batch * tokens, name.startswith("linear")
        inputs = [random(rows, width), 0.02 * random(vocabulary, width)] if is_linear else [random(rows, vocabulary)]
        aims = torch.randint(vocabulary, (rows,), device=device)
        ours = partial(lambda function, *x: function(*x, aims), ours)
        theirs = partial(lambda *x: functional.cross_entropy(functional.linear(*x) if is_linear else x[0], aims))
    elif name == "prepare_keys":
        names = ("k", "v", "rate", "v_first", "v_gate", "k_k", "k_a", "a0", "v0")
        ours, theirs = (partial(lambda f, *x: f(**dict(zip(names, x, strict=True))), f) for f in (ours, theirs))
    elif name == "norm_shift":
        ours, theirs = (partial(_mixed_and_last, f) for f in (ours, theirs))
    elif name == "causal_conv1d":
        ours, theirs = (partial(lambda f, *x: f(*x)[0], f) for f in (ours, theirs))
    elif name == "activate":
        ours, theirs = (partial(f, kinds="relu_squared") for f in (ours, theirs))
    everyone: dict[Who, Function | None] = {
        (OURS, "kernels"): ours,
        ("torch", more if ours is None else "plain"): theirs,
    }
    functions = {who: function for who, function in everyone.items() if function is not None}
    inputs = [x.requires_grad_("backward" in case.phase) for x in inputs]
    dys = [torch.randn_like(x) for x in call_of(ours or theirs, Given({}, inputs, (), {}), "forward")()]
    return Given(functions, inputs, dys, {})


def _mixed_and_last(norm_shift: Function, *x: Any) -> tuple[Any, ...]:
    """Return the results of `norm_shift` but the residual, which is x itself here."""
    _, mixed, last = norm_shift(*x)
    return *mixed, last
