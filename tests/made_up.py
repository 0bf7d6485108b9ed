"""An op that the library does not have, with kernels of its own: all that an op is, in one file.

    S_t = e^(g_t) S_{t-1} + v_t k_t^T;   y_t = scale S_t q_t + d v_t

per head, with S [V, K]. Several neighbouring heads share one of the G key heads of q and k. g is the logarithm of a
head's decay in a token, and d a factor without tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rwkv_jit.call import plain, registry, torch_op
from rwkv_jit.kernels import template
from rwkv_jit.plain import reference
from rwkv_jit.schedules import common, directions
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.schedule import Schedule, Step

MADE_UP = Op(
    "made_up", dict(q="BTGK", k="BTGK", v="BTHV", g="BTH", d="H"), "made up", decay="none", scale=None, wide=("g",)
)  # fmt: skip
TEMPLATE = template.read(Path(__file__).with_suffix(".cu"))
THREADS = tuple(range(32, 1025, 32))  # that a block may have


def made_up(q, k, v, g, d, initial_state=None, output_final_state=False, cu_seqlens=None, **options):
    """Return y and the final state, if it is wanted; options are those of `options.CallOptions`."""
    return torch_op.call(OP, (q, k, v, g, d), initial_state, output_final_state, cu_seqlens, tuple(options.items()))


def made_up_ref(q, k, v, g, d, initial_state, output_final_state, cu_seqlens, scale, state_layout):
    """Return the same in plain torch, one token after another."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    sharing = v.shape[2] // max(q.shape[2], 1)
    queries, keys = (x.to(dtype).repeat_interleave(sharing, 2) for x in (q, k))
    values, factors, d = v.to(dtype), g.to(dtype).exp(), d.to(dtype)
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = v.shape[0] if cu_seqlens is None else len(bounds) - 1
    sizes = v.shape[2], v.shape[3], q.shape[3]
    states = reference.starting_states(initial_state, sequences, *sizes, values, state_layout)
    outputs, finals = [], []
    starts = [states] if cu_seqlens is None else states.split(1)
    for state, begin, end in zip(starts, bounds, bounds[1:], strict=False):
        for t in range(begin, end):
            update = values[:, t, :, :, None] * keys[:, t, :, None, :]
            state = factors[:, t, :, None, None] * state + update
            outputs.append(scale * (state @ queries[:, t, :, :, None]).squeeze(-1) + d[:, None] * values[:, t])
        finals.append(state)
    y = torch.stack(outputs, 1) if outputs else values
    return y.to(v.dtype), reference.final_states(torch.cat(finals), initial_state, state_layout)


# ---- the algorithm -----------------------------------------------------------------------------------------------


def kept(p):
    """Return what the forward keeps: the state after every token."""
    return {"states": 4 * p.B * p.T * p.H * p.V * p.K}


def forward(p):
    """Return the forward."""
    left = kept(p) if p.training else {}
    step = _step(p, "made_up_forward", {} if p.training else {"states": None})
    return Schedule((step,), common.forward_results(p), left)


def backward(p):
    """Return the backward: heads that share a key head leave a row each, and these are added up."""
    bind = {"dq": "dq_heads", "dk": "dk_heads", **common.to_sequence_gradients(p)}
    sharing, width = p.H // max(p.G, 1), p.B * p.T * p.G * p.K
    sums = [common.sum_rows(f"d{name}_heads", f"d{name}", 1, sharing, width, p.types[name]) for name in ("q", "k")]
    scratch = {
        "dq_heads": 4 * sharing * width, "dk_heads": 4 * sharing * width, "grad_states": 4 * p.N * p.H * p.V * p.K,
        **common.sequence_gradients(p),
    }  # fmt: skip
    return Schedule((_step(p, "made_up_backward", bind), *sums), common.backward_results(p), scratch=scratch)


def _step(p, entry, bind):
    parameters = {
        "HEAD_SIZE": p.K, "VALUE_SIZE": p.V, "NUM_THREADS": p.num_threads or 64, **common.types(p, "DECAY")
    }  # fmt: skip
    return Step(TEMPLATE, entry, parameters, (p.N * p.H, 1, 1), {**common.given(p), **bind})


def nearest(step, argument, value):
    """Return the legal number of threads nearest to a refused one."""
    return min(THREADS, key=lambda threads: abs(threads - value)) if argument == "num_threads" else None


registry.register_op(MADE_UP, "made_up")
directions.ALGORITHMS[MADE_UP.family] = {"recurrent": sys.modules[__name__]}
plain.REFERENCES[MADE_UP.name] = made_up_ref
OP = torch_op.define(MADE_UP)


# ---- what tests of all tiers share -------------------------------------------------------------------------------


def make_inputs(sizes=(2, 5, 2, 4, 3, 6), dtype=torch.float64, g_dtype=None, device="cpu", grad=False):
    """Return inputs by name, of batch, tokens, key heads, heads and the head sizes of keys and values."""
    sizes = dict(zip("BTGHKV", sizes, strict=True))
    given = {n: torch.randn([sizes[dim] for dim in dims], device=device) / 2 for n, dims in MADE_UP.inputs.items()}
    given["g"] = -given["g"].abs()
    dtypes = {name: g_dtype or dtype if name == "g" else dtype for name in given}
    return {name: x.to(dtypes[name]).requires_grad_(grad) for name, x in given.items()}


def make_state(given, sequences, dtype=torch.float64, state_layout="vk", grad=False):
    """Return a state for each sequence."""
    (heads, *_), sizes = given["d"].shape, {"v": given["v"].shape[3], "k": given["k"].shape[3]}
    shape = sequences, heads, *(sizes[letter] for letter in state_layout)
    return given["v"].detach().new_empty(shape, dtype=torch.float32).normal_().to(dtype).requires_grad_(grad)


def definition(q, k, v, g, d, initial_state=None, cu_seqlens=None, scale=None, state_layout="vk"):
    """Return y and the final states in float64, as sums over all pairs of tokens."""
    q, k, v, g, d = (x.double() for x in (q, k, v, g, d))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [], []
    for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        q_, k_, v_, g_ = (x[:, begin:end] for x in (q, k, v, g))
        total = g_.cumsum(1)
        over = torch.ones(end - begin, end - begin, device=g.device).triu(1).bool()[:, :, None]  # s behind t
        decay = (total[:, :, None] - total[:, None]).masked_fill(over, -torch.inf).exp()  # from token s to t
        rest = (total[:, -1:] - total).exp() if end > begin else total
        y = torch.einsum("bthk,bshk,btsh,bshv->bthv", q_, k_, decay, v_)
        final = torch.einsum("bsh,bshv,bshk->bhvk", rest, v_, k_)
        if initial_state is not None:
            state = (initial_state if cu_seqlens is None else initial_state[index : index + 1]).double()
            state = state.mT if state_layout == "kv" else state
            y = y + torch.einsum("bth,bhvk,bthk->bthv", total.exp(), state, q_)
            final = final + g_.sum(1).exp()[:, :, None, None] * state
        outputs.append(scale * y + d[:, None] * v_)
        finals.append(final)
    final = torch.cat(finals)
    return torch.cat(outputs, 1), final.mT if state_layout == "kv" else final


def errors_of_call(given, sequences, state_dtype, cu_seqlens=None, state_layout="vk", **options):
    """Return the relative error of y, the final state and every gradient, by name, against float64."""
    state = None if state_dtype is None else make_state(given, sequences, state_dtype, state_layout, grad=True)
    leaves = {name: x for name, x in {**given, "state": state}.items() if x is not None}
    outputs = made_up(*given.values(), state, True, cu_seqlens, state_layout=state_layout, **options)
    weights = [torch.randn_like(x) for x in outputs]
    grads = torch.autograd.grad(outputs, [*leaves.values()], weights)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    inputs, exact_state = [exact[name] for name in given], exact.get("state")
    wanted = definition(*inputs, exact_state, cu_seqlens, options.get("scale"), state_layout)
    wanted_grads = torch.autograd.grad(
        wanted, [*exact.values()], [x.double() for x in weights], materialize_grads=True
    )  # fmt: skip
    names = ["y", "final", *(f"d{name}" for name in leaves)]
    pairs = zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True)
    return {name: _error(x, want) for name, (x, want) in zip(names, pairs, strict=True)}


def _error(x, want):
    assert x.shape == want.shape
    want = want.detach()
    return float((x.detach().double() - want).norm() / want.norm().clamp_min(1e-300))
