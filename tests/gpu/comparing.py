"""What the GPU tests share: inputs like a model's, and the comparison with the float64 recurrence."""

import itertools
import math

import torch

import rwkv_jit

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The inputs of the ops, by what the kernels call them, and those of them that are the same for every token.
NAMES = {"wkv5": "rkvwu", "wkv6": "rkvwu", "wkv7": "rwkvab", "gla": "rkvw", "linear_attention": "rkv"}
FIXED = {"wkv5": "wu", "wkv6": "u"}
# Log-decay per step: none at all, what models have, so fast that a division by it would overflow, and all together.
DECAY_RANGES = {"none": (-1e-6, 0.0), "usual": (-0.6, -0.01), "fast": (-20.0, -15.0), "mixed": (-20.0, 0.0)}
# One of two: a step forgets a channel, or keeps it as it is.
DECAY_PAIRS = {"-5 or 0": (-5.0, 0.0), "-20 or 0": (-20.0, 0.0)}
# Where all tokens are the same, y is v times a number a head, a sum of both signs: among few heads, all may cancel.
HEADS_OF_ONE_TOKEN = 17  # odd, as strides with fewer factors of two are the harder ones


def make_inputs(
    op, dtype, batch=2, tokens=65, heads=3, head_size=64, value_size=None, decays="usual", decay=None, w_dtype=None
):
    """Model-like inputs, with the op's own decay by default: for wkv7 a = -kk and b = kk * eta with unit kk, so that
    states stay bounded.
    """
    value_size = value_size or head_size
    shape = (batch, tokens, heads, head_size)
    r, k = (torch.randn(shape, device="cuda") * 0.5 for _ in range(2))
    v = torch.randn(batch, tokens, heads, value_size, device="cuda")
    of_w = (heads, head_size) if "w" in FIXED.get(op, "") else shape
    low, high = DECAY_PAIRS.get(decays) or DECAY_RANGES.get(decays, decays)
    random = torch.rand(of_w, device="cuda", dtype=torch.float64)
    log_decay = low + (high - low) * (random.round() if decays in DECAY_PAIRS else random)
    w = {
        "raw": lambda g: torch.log(-g + 1e-12),
        "sigmoid": lambda g: torch.logit((-g / 0.6065306597126334).clamp(1e-6, 1 - 1e-3)),
        "log": lambda g: g,
        "direct": torch.exp,
    }[decay or {"gla": "log"}.get(op, "raw")](log_decay)
    kk = torch.nn.functional.normalize(torch.randn(shape, device="cuda"), dim=-1)
    u = torch.randn(heads, head_size, device="cuda") * 0.5
    made = {"r": r, "w": w, "k": k, "v": v, "u": u, "a": -kk, "b": kk * torch.rand(shape, device="cuda")}
    given = {n: made[n] for n in NAMES[op]}
    return {n: x.to(w_dtype if n == "w" and w_dtype else dtype).requires_grad_() for n, x in given.items()}


def enough_heads(head_size):
    """So many that du and wkv5's dw are 256 sums over all tokens: a few may all cancel, and lose any digits."""
    return max(2, math.ceil(256 / head_size))


def make_state(given, sequences, dtype=torch.float32, layout="vk"):
    (heads, head_size), value_size = given["r"].shape[2:], given["v"].shape[3]
    sizes = (value_size, head_size) if layout == "vk" else (head_size, value_size)
    return torch.randn(sequences, heads, *sizes, device="cuda").to(dtype).requires_grad_()


def of_tokens(op, given, index):
    """The inputs of some rows or tokens, as `index` picks them."""
    return {n: x if n in FIXED.get(op, "") else x[index] for n, x in given.items()}


def relative(x, reference):
    x, reference = x.detach().double(), reference.detach().double()
    assert x.shape == reference.shape
    assert torch.isfinite(x).all()
    return float((x - reference).norm() / reference.norm().clamp_min(1e-300)) if x.numel() else 0.0


def run(op, given, state=None, weights=None, function=None, **options):
    """y, final state and the gradients of a random weighting of both."""
    leaves = [*given.values(), *([state] if state is not None else [])]
    y, final = (function or getattr(rwkv_jit, op))(
        *given.values(), initial_state=state, output_final_state=True, **options
    )
    if weights is None:
        weights = (
            torch.randn(y.shape, device=y.device).to(y.dtype),
            torch.randn(final.shape, device=y.device).to(final.dtype),
        )
    weighted = [w.to(o.dtype) for w, o in zip(weights, (y, final), strict=True)]
    # Without tokens the reference uses no input at all; a kernel always gives every gradient.
    grads = torch.autograd.grad([y, final], leaves, weighted, materialize_grads=function is not None)
    return y, final, grads, weights


def reference(op, given, state, weights, **options):
    """The same in float64."""
    exact = {n: x.detach().double().requires_grad_() for n, x in given.items()}
    exact_state = None if state is None else state.detach().double().requires_grad_()
    return run(op, exact, exact_state, weights, getattr(rwkv_jit, f"{op}_ref"), **options)


def compare(op, given, state=None, options=(), exact_options=(), weights=None):
    """The errors of y, of the final state and of every gradient by name; the final state; the gradients by name."""
    y, final, grads, weights = run(op, given, state, weights, **dict(options))
    want_y, want_final, want_grads, _ = reference(op, given, state, weights, **dict(exact_options))
    errors = {"y": relative(y, want_y), "state": relative(final, want_final)}
    named = {f"d{n}": grad for n, grad in zip([*given, "initial_state"], grads, strict=False)}
    errors |= {n: relative(grad, want) for (n, grad), want in zip(named.items(), want_grads, strict=True)}
    return errors, final, named


def check_repeats(op, given, times=3, **options):
    """Check that a call gives the same results and gradients whenever it runs, bit for bit."""
    y, final, grads, weights = run(op, given, **options)
    for _ in range(times):
        again = run(op, given, None, weights, **options)
        for one, same in zip((y, final, *grads), (*again[:2], *again[2]), strict=True):
            assert torch.equal(one, same)


def check_fullgraph(op, given, dynamic=None, **options):
    """Check that a compiled call gives the same y and gradients, bit for bit."""
    y, _, grads, weights = run(op, given, **options)
    compiled = torch.compile(getattr(rwkv_jit, op), fullgraph=True, dynamic=dynamic)
    again = run(op, given, None, weights, compiled, **options)
    assert torch.equal(again[0], y)
    assert all(torch.equal(a, b) for a, b in zip(again[2], grads, strict=True))


def check_one_by_one(op, given, state, bounds, index_dtype, **options):
    """Check that packed sequences have, bit for bit, what each has alone; return cu_seqlens."""
    cu_seqlens = torch.tensor(bounds, device=state.device, dtype=index_dtype)
    y, final, grads, weights = run(op, given, state, cu_seqlens=cu_seqlens, **options)
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = of_tokens(op, given, (slice(None), slice(begin, end)))
        part = {n: x.detach().requires_grad_() for n, x in part.items()}
        own_state = state[i : i + 1].detach().requires_grad_()
        own = run(op, part, own_state, (weights[0][:, begin:end], weights[1][i : i + 1]), **options)
        assert torch.equal(own[0], y[:, begin:end])
        assert torch.equal(own[1], final[i : i + 1])
        assert torch.equal(own[2][-1], grads[-1][i : i + 1])
        for name, one, whole in zip(given, own[2], grads, strict=False):
            assert name in FIXED.get(op, "") or torch.equal(one, whole[:, begin:end]), name
    return cu_seqlens


def check_rows(op, first, batch, rows, **options):
    """Check a call with the same sequence in every row: some of them show an address that wrapped.

    A sequence alone is one of few heads, which other threads share, unless nothing goes by the batch.
    """
    rwkv_jit.set_batch_invariant(True)
    try:
        _check_rows(op, first, batch, rows, **options)
    finally:
        rwkv_jit.set_batch_invariant(False)


def _check_rows(op, first, batch, rows, **options):
    fixed, function = FIXED.get(op, ""), getattr(rwkv_jit, op)
    given = {n: (x if n in fixed else x.expand(batch, -1, -1, -1)).detach().contiguous() for n, x in first.items()}
    given = {n: x.requires_grad_() for n, x in given.items()}
    y, _ = function(*given.values(), **options)
    dy = torch.randn(1, *y.shape[1:], device=y.device).to(y.dtype)
    grads = torch.autograd.grad(y, list(given.values()), dy.expand_as(y))
    want, _ = function(*first.values(), **options)
    want_grads = torch.autograd.grad(want, list(first.values()), dy)
    for row in rows:
        assert torch.equal(y[row], want[0])
        for name, grad, one in zip(given, grads, want_grads, strict=True):
            assert name in fixed or torch.equal(grad[row], one[0]), name


def error_of_constant_decay(dw, given, state, weights, **options):
    """The error of wkv5's dw, relative to how large its parts are.

    A decay [H, K] has few gradients, each a sum over tokens of both signs. Where a few decays near one stand out, one
    of them is most of the norm: among 24 draws the error was up to 2.1e-2 of the sums, and up to 3.0e-3 of the parts.
    """
    of_tokens = {**given, "w": given["w"].detach().expand(given["r"].shape)}
    parts = reference("wkv6", of_tokens, state, weights, **options)[2][list(given).index("w")]
    want = reference("wkv5", given, state, weights, **options)[2][list(given).index("w")]
    return float((dw.detach().double() - want).norm() / parts.abs().sum((0, 1)).norm().clamp_min(1e-300))


def digits(dtype, dtype_of_result):
    """By what gates for bfloat16 are divided: float16 has three binary digits more, where a result can hold them."""
    return 8 if dtype == torch.float16 and dtype_of_result != torch.bfloat16 else 1


def limits_of(errors, final, named, given, gate, gates):
    """The limits of the kernels on the tensor cores, from their gates for bfloat16."""
    dtype, results = given["v"].dtype, {"state": final, **named}
    of_results = {name: results[name].dtype if name in results else dtype for name in errors}
    limits = {name: gates.get(name, gate) / digits(dtype, of_result) for name, of_result in of_results.items()}
    return with_room(limits, named)


def with_room(limits, named):
    """The gates are for many roundings together; among few, a single one may be as large as the dtype has them."""
    few = {n: torch.finfo(grad.dtype).eps for n, grad in named.items() if grad.numel() < 64}
    return limits | {n: max(limits[n], 1.05 * eps / 2) for n, eps in few.items()}


def strided(x, how):
    if how == "heads first":
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    if how == "channels last but one":
        return x.detach().transpose(2, 3).contiguous().transpose(2, 3)
    if how == "a slice at an odd address":
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, device=x.device, dtype=x.dtype)
        wide[..., 1:-2] = x.detach()
        return wide[..., 1:-2]
    if how.startswith("heads first, "):  # strides a kernel could read in place, but not from this address
        shift = int(how.split()[2])
        batch, tokens, heads, size = x.shape
        flat = torch.zeros(x.numel() + 8, device=x.device, dtype=x.dtype)[shift : shift + x.numel()]
        view = flat.view(batch, heads, tokens, size).transpose(1, 2)
        return view.copy_(x.detach())
    return x.detach()[:, :1].expand_as(x)


STRIDES = [
    "heads first",
    "heads first, 1 in",
    "heads first, 4 in",
    "channels last but one",
    "a slice at an odd address",
]
