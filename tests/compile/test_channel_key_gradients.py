"""The gradients of keys of Kimi Delta Attention, by the PTX of their kernel, beside those of torch in float64."""

import struct

import derived_cases
import ptx_machine
import pytest
import torch

from rwkv_jit.call.tensors import STORAGE
from rwkv_jit.kernels import compiler, template
from rwkv_jit.plain.reference import _log_decays, _rates
from rwkv_jit.schedules.channel_decay import CHUNK_LEN as CHUNK
from rwkv_jit.schedules.channel_decay import key_gradient_bytes
from rwkv_jit.schedules.layers import BETA_MAPS
from rwkv_jit.schedules.problem import LARGEST_DECAY

pytestmark = pytest.mark.usefixtures("verdict")

NAME, ENTRY = "channel_decay_group_key_gradients", "channel_decay_key_gradients"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def parameters(case):
    io, wide = STORAGE[case.inputs["q"].dtype], STORAGE[case.inputs["g"].dtype]
    gate = "given" if "A_log" not in case.parameters else "bounded" if "lower_bound" in case.options else "softplus"
    return {
        "HEAD_SIZE": 128, "VALUE_SIZE": 128, "CHUNK_LEN": CHUNK, "NUM_THREADS": 256,
        "SHARED_BYTES": key_gradient_bytes(wide), "LARGEST_DECAY": LARGEST_DECAY[io], "T_IO": io, "T_W": wide,
        "T_BETA": STORAGE[case.inputs["beta"].dtype], "DECAY": "log",
        "GATE": ("given", "softplus", "bounded").index(gate),
        "HAS_NORM": "qk_norm" in case.options, "HAS_BIAS": "dt_bias" in case.parameters,
        "BETA_MAP": BETA_MAPS.index(case.options.get("beta_map", "identity")), "BLOCKS_PER_SM": 1,
    }  # fmt: skip


def spans_of(case):
    batch, tokens = case.inputs["q"].shape[:2]
    if case.cu_seqlens is None:
        per_row = -(-tokens // CHUNK)
        return [(row, 0, tokens, row * per_row) for row in range(batch)], batch * per_row
    bounds = case.cu_seqlens.tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    spans = [(0, begin, end, begin // CHUNK + i) for i, (begin, end) in enumerate(pairs)]
    return spans, tokens // CHUNK + len(bounds)


def kept(case, weights):
    """U, dV and the states S_0 and E of chunks, token by token in float64, as [slots, heads, V, K]."""
    given = case.reference()
    x, parameters = given.inputs, {name: x.double() for name, x in given.parameters.items()}
    q, k = x["q"], x["k"]
    if "qk_norm" in case.options:
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    decays = _log_decays(x["g"], parameters.get("A_log"), parameters.get("dt_bias"), case.options.get("lower_bound"))
    rates = _rates(x["beta"], case.options.get("beta_map", "identity"))
    v = x["v"].clone().requires_grad_()
    spans, slots = spans_of(case)
    heads = v.shape[2]
    us, ends, states = torch.zeros_like(v), {}, torch.zeros(slots, heads, 128, 128, dtype=torch.float64)
    slopes, loss = torch.zeros_like(states), 0.0
    for n, (row, begin, end, slot) in enumerate(spans):
        state = given.state[n].mT.clone().requires_grad_()
        for i, t in enumerate(range(begin, end)):
            if i % CHUNK == 0:
                states[slot + i // CHUNK] = state.detach()
            state = state * decays[row, t].exp().unsqueeze(-2)
            u = v[row, t] - (state @ k[row, t].unsqueeze(-1)).squeeze(-1)
            us[row, t] = u.detach()
            state = state + (rates[row, t].unsqueeze(-1) * u).unsqueeze(-1) * k[row, t].unsqueeze(-2)
            y = (state @ q[row, t].unsqueeze(-1)).squeeze(-1) * 128**-0.5
            loss = loss + (y * weights[0][row, t].double()).sum()
            if i % CHUNK == CHUNK - 1 or t == end - 1:
                state = state.clone()  # without what this token reads of it
                state.retain_grad()
                ends[slot + i // CHUNK] = state
        loss = loss + (state * weights[1][n].double().mT).sum()
    loss.backward()
    for slot, state in ends.items():
        slopes[slot] = state.grad
    return us.detach(), v.grad, states, slopes


def tiles(x, dtype):
    """[slots, heads, V, K] as swizzled tiles of 64 x 64."""
    slots, heads = x.shape[:2]
    x = x.to(dtype).view(slots, heads, 2, 64, 2, 8, 8).transpose(3, 4)  # value tile, channel tile, row, unit, element
    rows = torch.arange(64)
    places = (torch.arange(8) ^ rows.view(-1, 1) % 8).view(1, 1, 1, 1, 64, 8, 1).expand(x.shape)
    return torch.gather(x, 5, places).contiguous()


def with_gaps(x, gap):
    """The same numbers in a tensor whose rows lie further apart; its strides of batch, tokens and heads."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide, wide.stride()[:3]


class Machine(ptx_machine.Machine):
    """One that takes notes of which chunks were in their frames: all threads of a block say so, at a barrier."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = set()

    def wait(self, mask, number, count, place, votes=None, answer=None, of=1):
        def noted(cast, mask):
            self.seen.add(bool(cast.all()))
            answer(cast, mask)

        super().wait(mask, number, count, place, votes, answer and noted, of)


def launch(case, weights, blocks):
    """Return the gradients, and whether there were chunks in their frames, out of them, or both."""
    io, chosen = case.inputs["q"].dtype, parameters(case)
    text = template.library(NAME)
    text.check(chosen)
    us, dv, states, slopes = kept(case, weights)
    q = case.inputs["q"]
    batch, tokens, heads, _ = q.shape
    spans, slots = spans_of(case)
    results = {
        "dr": torch.full_like(q, torch.nan), "dk": torch.full_like(q, torch.nan),
        "dw": torch.full_like(case.inputs["g"], torch.nan), "dbeta": torch.full_like(case.inputs["beta"], torch.nan),
        "a_log_chunks": torch.zeros(slots, heads), "bias_chunks": torch.zeros(slots, heads, 128),
    }  # fmt: skip
    fixed = {name: x.float() for name, x in case.parameters.items()}
    arrays = {
        "r": q, "k": case.inputs["k"], "w": case.inputs["g"], "beta": case.inputs["beta"],
        "a_log": fixed.get("A_log"), "dt_bias": fixed.get("dt_bias"), "dy": weights[0].to(io), "dv": dv.to(io),
        "kept_u": us.to(io), "states": tiles(states, io), "slopes": tiles(slopes, io), "cu_seqlens": case.cu_seqlens,
        **results,
    }  # fmt: skip
    arrays = {name: None if x is None else x.contiguous() for name, x in arrays.items()}
    strides = {"beta": (tokens * heads, heads, 1)}
    for gap, name in enumerate(("r", "k", "w", "dy")):
        arrays[name], strides[name] = with_gaps(arrays[name], 8 * gap)
    numbers = {"sequences": len(spans), "tokens": tokens, "heads": heads, "slots": slots}
    floats = {"scale": 128**-0.5, "lower_bound": case.options.get("lower_bound", 0.0)}
    given, memory = [], []
    for argument in text.arguments(ENTRY):
        name = argument.name
        if argument.type.endswith("*"):
            x = arrays[name]
            given.append(struct.pack("<q", 0 if x is None else x.data_ptr()))
            if x is not None:
                memory.append((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()))
        elif argument.type == "Strides":
            given.append(struct.pack("<3q", *strides[name.removesuffix("_strides")]))
        else:
            given.append(struct.pack("<q", numbers[name]) if name in numbers else struct.pack("<f", floats[name]))
    ptx = compiler.ptx(text.render(chosen), "sm_90a", chosen)
    machine = Machine(ptx, ENTRY)
    machine.launch((blocks, 1, 1), (256, 1, 1), chosen["SHARED_BYTES"], given, memory)
    found = {"q": results["dr"], "k": results["dk"], "g": results["dw"], "beta": results["dbeta"]}
    found["A_log"], found["dt_bias"] = results["a_log_chunks"].sum(0), results["bias_chunks"].sum(0)
    return found, machine.seen


def drawn(*largest):
    """Half of the log-decays none, and others down to one of `largest`, 64 tokens each."""

    def make(shape):
        decays = torch.tensor(largest)[torch.arange(shape[1]) // CHUNK % len(largest)].view(-1, 1, 1)
        return decays * torch.rand(shape) * (torch.rand(shape) < 0.5)

    return make


def each(*decays):
    """Those of one token after another, again and again, in all channels."""
    return lambda shape: torch.tensor(decays)[torch.arange(shape[1]) % len(decays)].view(1, -1, 1, 1).expand(shape)


def with_decays(case, decays):
    if "A_log" in case.parameters:
        return derived_cases.with_decays(case, decays)
    return case._replace(inputs={**case.inputs, "g": decays.to(case.inputs["g"].dtype)})


# Rounding U, dV and states alone makes the gradients of these rates 6.1e-3, 1.2e-2 and 1.4e-3 wrong.
OF_RATES = {"mixed": 8e-3, "strong everywhere": 1.5e-2, "strong everywhere fp16": 2e-3}
IN, OUT, BOTH = {True}, {False}, {True, False}

# How a call is made, its sizes, types of rows and of gates, bounds, log-decays, blocks; whether its chunks are in their
# frames; the limit of errors.
CASES = {
    "raw": (("raw bias sigmoid norm", (1, 70, 1, 1, 128, 128), BF16, BF16, None, None, 1), IN, 5e-3),
    "wide": (("raw bias sigmoid norm", (2, 70, 2, 2, 128, 128), BF16, FP32, None, None, 3), IN, 5e-3),
    "packed": (("bounded bias norm", (1, 150, 2, 2, 128, 128), FP16, FP32, [0, 0, 20, 150], None, 2), OUT, 1e-3),
    "packed narrow": (
        ("bounded bias norm", (1, 150, 1, 1, 128, 128), FP16, FP16, [0, 0, 20, 150], None, 2), OUT, 1e-3,
    ),
    "packed in frames": (
        ("raw norm", (1, 150, 1, 1, 128, 128), FP16, FP32, [0, 0, 20, 150], drawn(-0.8), 2), IN, 1e-3,
    ),
    "bounded": (("bounded bias norm", (1, 100, 1, 1, 128, 128), BF16, BF16, None, None, 1), IN, 5e-3),
    "direct": (("norm twice_sigmoid", (1, 140, 1, 1, 128, 128), BF16, FP32, None, drawn(-2000.0), 2), OUT, 5e-3),
    "mixed": (("norm", (1, 200, 1, 1, 128, 128), BF16, FP32, None, drawn(-2000.0, -0.1, -3.0), 1), BOTH, 5e-3),
    "mixed raw": (("raw bias norm", (1, 130, 1, 1, 128, 128), BF16, FP32, None, drawn(-0.1, -2000.0), 1), BOTH, 5e-3),
    "mixed fp16": (("norm", (1, 130, 1, 1, 128, 128), FP16, FP32, None, drawn(-0.4, -2000.0), 1), BOTH, 1e-3),
    "whole": (("raw bias sigmoid norm", (1, 128, 2, 2, 128, 128), BF16, FP32, None, drawn(-1.0), 1), IN, 5e-3),
    "no rates": (("norm", (1, 64, 1, 1, 128, 128), FP16, FP32, None, drawn(-0.3, -2000.0), 1), IN, 1e-3),
    "no norm": (("", (1, 100, 1, 1, 128, 128), BF16, BF16, None, None, 2), IN, 5e-3),
    "no norm fp16": (("", (1, 100, 1, 1, 128, 128), FP16, FP16, None, drawn(-0.1), 2), IN, 1e-3),
    "strong": (("raw bias sigmoid norm", (1, 150, 1, 1, 128, 128), BF16, FP32, None, drawn(-4.0), 1), IN, 5e-3),
    "strong fp16": (("raw bias norm", (1, 150, 1, 1, 128, 128), FP16, FP32, None, drawn(-0.8), 1), IN, 1e-3),
    "strong everywhere": (("norm sigmoid", (1, 100, 1, 1, 128, 128), BF16, FP32, None, each(-4.0), 1), IN, 5e-3),
    "strong everywhere fp16": (("norm sigmoid", (1, 100, 1, 1, 128, 128), FP16, FP32, None, each(-0.8), 1), IN, 1e-3),
    "in and out": (
        ("raw norm", (1, 300, 1, 1, 128, 128), BF16, FP32, None, drawn(-4.0, -2000.0, -2000.0, -4.0, -0.1), 1),
        BOTH, 5e-3,
    ),
    "in and out fp16": (
        ("raw norm", (1, 300, 1, 1, 128, 128), FP16, FP32, None, drawn(-0.8, -20.0, -20.0, -0.8, -0.1), 1), BOTH, 1e-3,
    ),
    # What just fits, and what just does not.
    "edge": (("norm", (1, 128, 1, 1, 128, 128), BF16, FP32, None, each(*[-7.9] * 64, *[-8.1] * 64), 1), BOTH, 5e-3),
    "edge fp16": (
        ("norm", (1, 128, 1, 1, 128, 128), FP16, FP32, None, each(*[-0.87] * 64, *[-0.88] * 64), 1), BOTH, 1e-3,
    ),
    # Blocks of 16 tokens.
    "beside none": (
        ("raw sigmoid norm", (1, 128, 1, 1, 128, 128), BF16, FP32, None, each(*[-6.0] * 16, *[0.0] * 16), 1), IN, 5e-3,
    ),
    # The last token of a block and the next one see each other, while all between the middles is nothing to a float.
    "seams": (
        ("norm sigmoid", (1, 128, 1, 1, 128, 128), BF16, FP32, None, each(0.0, *[-9.0] * 14, 0.0), 1), IN, 5e-3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_key_gradients(name):
    torch.manual_seed(0)
    (how, sizes, io, wide, bounds, decays, blocks), where, limit = CASES[name]
    case = derived_cases.make("kda", how, sizes, io, wide, FP32, bounds=bounds)
    if decays:
        case = with_decays(case, decays(case.inputs["g"].shape))
    if name == "no rates":
        case.inputs["beta"][:, ::3] = 0
    weights = torch.randn(case.inputs["v"].shape).to(io), torch.randn(case.state.shape)
    _, wanted = derived_cases.exactly(case, [x.double() for x in weights])
    found, seen = launch(case, weights, blocks)
    errors = {}
    for key, want in wanted.items():
        if key in found:
            errors[key] = derived_cases.error_of(case, key, found[key].view(want.shape), want)
    print(name, seen, {key: f"{error:.1e}" for key, error in errors.items()})
    # A_log is one number a head, of all tokens and channels, of both signs.
    limits = {"A_log": 2 * limit, "beta": OF_RATES.get(name, limit)}
    wrong = {key: error for key, error in errors.items() if not error <= limits.get(key, limit)}
    assert not wrong, wrong
    assert seen == where
