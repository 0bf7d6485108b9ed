"""FLA's functions of the delta rules and of decays for heads on these ops: against float64, and against FLA's own."""

import inspect
import itertools
import sys
import warnings
from importlib import import_module

import pytest
import torch
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit.compat import fla as ours
from rwkv_jit.compat.fla import family, functions
from rwkv_jit.kernels.errors import UnsupportedConfigError

B, T, H, HV, K, V = 2, 13, 2, 4, 8, 6
KDA, GDN = ("chunk_kda", "fused_recurrent_kda"), ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
DELTA, GDN2 = ("chunk_delta_rule", "fused_recurrent_delta_rule"), ("chunk_gdn2", "fused_recurrent_gdn2")
SIMPLE = ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla")
RETENTION = ("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention")
LIGHTNING = ("chunk_lightning_attn", "fused_recurrent_lightning_attn")


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64) / 2


def same(found, want, limit=1e-5):
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y.double()).norm() <= limit * y.double().norm()


def check(found, want, leaves, exact, limit=1e-5):
    """Results and gradients are the same."""
    found, want = [[x for x in result if x is not None] for result in (found, want)]
    same(found, want, limit)
    grads = [torch.randn_like(x) for x in found]
    of = torch.autograd.grad(want, exact, [x.to(y.dtype) for x, y in zip(grads, want, strict=True)])
    same(torch.autograd.grad(found, leaves, grads), of, limit)


def normed(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


RATES = {
    "identity": ({}, lambda x: x),
    "sigmoid": ({"use_beta_sigmoid_in_kernel": True}, torch.sigmoid),
    "twice": ({"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}, lambda x: 2 * torch.sigmoid(x)),
}
GATES = ("log", "softplus", "softplus without bias", "bounded", "bounded without A")


def gated(g, A_log, dt_bias, kind, of_channels):
    """FLA's options of a gate, and the log-decays that they ask for."""
    A, bias = (A_log[:, None], dt_bias.view(HV, K)) if of_channels else (A_log, dt_bias)
    if kind == "log":
        return {}, g
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    if kind == "softplus without bias":
        return options | {"dt_bias": None}, -A.exp() * F.softplus(g)
    if kind == "softplus":
        return options, -A.exp() * F.softplus(g + bias)
    options |= {"lower_bound": -5.0}
    if kind == "bounded":
        return options, -5 * torch.sigmoid(A.exp() * (g + bias))
    return options | {"A_log": None}, -5 * torch.sigmoid(g + bias)


@pytest.fixture(params=["alone", "state", "values first", "half state"])
def call(request):
    """Options of a call, and those of the reference."""
    if request.param == "alone":
        return {}, {}
    shape = (B, HV, V, K) if request.param == "values first" else (B, HV, K, V)
    state = rows(*shape).to(torch.float16 if request.param == "half state" else torch.float32)
    ref = {"initial_state": state.double(), "output_final_state": True}
    given = {"initial_state": state, "output_final_state": True}
    if request.param == "values first":
        return given | {"state_v_first": True, "scale": 0.3}, ref | {"state_layout": "vk", "scale": 0.3}
    return given, ref


def fitting(function, call):
    """The same of those options alone that a function of FLA has."""
    given, ref = (dict(options) for options in call)
    names = set(inspect.signature(function).parameters)
    if given.keys() - names - {"state_v_first"}:
        return [{name: x for name, x in options.items() if name == "scale"} for options in call]
    if "state_v_first" in given.keys() - names:
        del given["state_v_first"], ref["state_layout"]
        given["initial_state"], ref["initial_state"] = (x["initial_state"].mT for x in (given, ref))
    return given, ref


def two(*tensors):
    """Float32 leaves, and float64 ones of the same values."""
    leaves = [x.float().requires_grad_() for x in tensors]
    return leaves, [x.detach().double().requires_grad_() for x in leaves]


def used(result, leaves):
    """The leaves that have gradients."""
    given = torch.autograd.grad([x for x in result if x is not None], leaves, allow_unused=True, retain_graph=True,
                                grad_outputs=[torch.ones_like(x) for x in result if x is not None])  # fmt: skip
    return [i for i, x in enumerate(given) if x is not None]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("name", KDA)
def test_kda(name, kind, rate, call):
    inputs = rows(B, T, H, K), rows(B, T, H, K), rows(B, T, HV, V), -rows(B, T, HV, K).abs(), rows(B, T, HV)
    leaves, exact = two(*inputs, rows(HV), rows(HV * K))
    options, want = run_both(name, rwkv_jit.kda_ref, exact, leaves, kind, rate, call, of_channels=True)
    found = getattr(family, name)(*leaves[:5], **options)
    compare(found, want, leaves, exact)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", GATES[:3])
@pytest.mark.parametrize("name", GDN)
def test_gated_delta_rule(name, kind, rate, call):
    inputs = rows(B, T, H, K), rows(B, T, H, K), rows(B, T, HV, V), -rows(B, T, HV).abs(), rows(B, T, HV)
    leaves, exact = two(*inputs, rows(HV), rows(HV))
    options, want = run_both(name, rwkv_jit.gated_delta_rule_ref, exact, leaves, kind, rate, call, of_channels=False)
    q, k, v, g, beta = leaves[:5]
    found = getattr(family, name)(q, k, v, g=g, beta=beta, **options)
    compare(found, want, leaves, exact)


def run_both(name, reference, exact, leaves, kind, rate, call, of_channels):
    """The options of a call with a norm, a gate and a rate, and what these ask for."""
    q, k, v, g, beta, *gate = exact
    options, of_rate = RATES[rate]
    options = call[0] | options | gated(leaves[3], *leaves[5:], kind, of_channels)[0]
    is_normed = kind != "log"
    q, k = (normed(q), normed(k)) if is_normed else (q, k)
    want = reference(q, k, v, gated(g, *gate, kind, of_channels)[1], of_rate(beta), **call[1])
    return options | {"use_qk_l2norm_in_kernel": is_normed}, want


def compare(found, want, leaves, exact):
    for x in found[1:]:
        assert x is None or x.dtype == torch.float32
    wanted = used(want, exact)
    assert wanted == used(found, leaves)
    check(found, want, [leaves[i] for i in wanted], [exact[i] for i in wanted])


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("is_normed", [False, True])
def test_delta_rule(name, is_normed, call):
    call = fitting(getattr(family, name), call)
    leaves, exact = two(rows(B, T, H, K), rows(B, T, H, K), rows(B, T, HV, V), torch.rand(B, T, HV))
    q, k, v, beta = exact
    norm = normed if is_normed else lambda x: x
    want = rwkv_jit.delta_rule_ref(norm(q), norm(k), v, beta, **call[1])
    compare(getattr(family, name)(*leaves, use_qk_l2norm_in_kernel=is_normed, **call[0]), want, leaves, exact)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("name", GDN2)
def test_gdn2(name, kind, call):
    inputs = rows(B, T, H, K), rows(B, T, H, K), rows(B, T, HV, V), -rows(B, T, HV, K).abs()
    leaves, exact = two(*inputs, torch.rand(B, T, HV, K), torch.rand(B, T, HV, V), rows(HV), rows(HV * K))
    q, k, v, g, b, w, *gate = exact
    options, _ = gated(leaves[3], *leaves[6:], kind, of_channels=True)
    want = rwkv_jit.gated_delta_rule2_ref(
        normed(q), normed(k), v, gated(g, *gate, kind, of_channels=True)[1], b, w, **call[1]
    )
    found = getattr(family, name)(*leaves[:6], use_qk_l2norm_in_kernel=True, **options, **call[0])
    compare(found, want, leaves, exact)


@pytest.mark.parametrize("decays", ["of heads", "of channels", "of both", "none"])
def test_decays_of_the_recurrent_function(decays, call):
    leaves, exact = two(
        rows(B, T, H, K), rows(B, T, H, K), rows(B, T, HV, V), -torch.rand(B, T, HV), -torch.rand(B, T, HV, K)
    )
    q, k, v, g, gk = exact
    options = {"g": leaves[3], "gk": leaves[4]}
    if decays == "of heads":
        decay, options["gk"] = g[..., None].expand(gk.shape), None
    elif decays == "of channels":
        decay, options["g"] = gk, None
    elif decays == "of both":
        decay = gk + g[..., None]
    else:
        decay, options = torch.zeros_like(gk), {}
    want = rwkv_jit.kda_ref(q, k, v, decay, torch.ones_like(g), **call[1])  # beta is 1
    compare(family.fused_recurrent_gated_delta_rule(*leaves[:3], **options, **call[0]), want, leaves, exact)


@pytest.mark.parametrize("decays", ["of tokens", "fixed", "none"])
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_gla(name, decays, call):
    function = getattr(family, name)
    given = {"of tokens": ("g", -torch.rand(B, T, HV)), "fixed": ("g_gamma", -torch.rand(HV))}.get(decays)
    if given and given[0] not in inspect.signature(function).parameters:
        given = None  # without decays then
    call = fitting(function, call)
    leaves, exact = two(rows(B, T, HV, K), rows(B, T, HV, K), rows(B, T, HV, V), *([given[1]] if given else []))
    options = {given[0]: leaves[3]} if given else {}
    g = exact[3] if given else torch.zeros(HV, dtype=torch.float64)
    want = rwkv_jit.simple_gla_ref(*exact[:3], g, **call[1])
    compare(function(*leaves[:3], **options, **call[0]), want, leaves, exact)


@pytest.mark.parametrize("name", [*RETENTION, *LIGHTNING])
def test_fixed_decays(name, call):
    function = getattr(family, name)
    call = fitting(function, call)
    heads = torch.arange(HV, dtype=torch.float64)
    g, options = (1 - 2 ** (-5 - heads)).log(), {}
    if name in LIGHTNING:
        g, options = -(8 / HV * (1 - 3 / 7)) * heads, {"layer_idx": 3, "num_layers": 7}
    leaves, exact = two(rows(B, T, HV, K), rows(B, T, HV, K), rows(B, T, HV, V))
    want = rwkv_jit.simple_gla_ref(*exact, g, **call[1])
    compare(function(*leaves, **options, **call[0]), want, leaves, exact)


def test_packed_sequences_and_what_changes_nothing():
    bounds = torch.tensor([0, 5, 5, 2 * T])
    q, k, v, g, beta = (rows(1, 2 * T, *n).float() for n in ((H, K), (H, K), (HV, V), (HV, K), (HV,)))
    g, state = -g.abs(), rows(3, HV, K, V).float()
    packed = {"initial_state": state, "output_final_state": True, "cu_seqlens": bounds}
    want = rwkv_jit.kda_ref(q, k, v, g, beta, **packed)
    more = {"cu_seqlens_cpu": bounds, "chunk_size": 32, "disable_recompute": True, "max_num_seqs": 3, "layer_idx": 2}
    more |= {"safe_gate": True, "lower_bound": -5.0}
    same(family.chunk_kda(q, k, v, g, beta, **packed, **more), want)
    want = rwkv_jit.gated_delta_rule_ref(q, k, v, g[..., 0], beta, **packed)
    more = {"cu_seqlens_cpu": bounds, "chunk_size": 16, "chunk_indices": torch.zeros(3, 2, dtype=torch.long)}
    same(family.chunk_gated_delta_rule(q, k, v, g[..., 0], beta, **packed, **more), want)


@pytest.mark.parametrize("name", [*KDA, *GDN, *GDN2])
def test_parameters_of_heads_in_other_shapes(name):
    """FLA's kernels take the elements in their order, as [1, 1, HV, 1] too."""
    q, k, v, g, beta = (rows(B, T, *n).float() for n in ((H, K), (H, K), (HV, V), (HV, K), (HV,)))
    inputs = (q, k, v, g, torch.rand(B, T, HV, K), v) if name in GDN2 else (q, k, v, g, beta)
    if name in GDN:
        inputs = q, k, v, *((g[..., 0], beta) if name == GDN[0] else (g[..., 0], None, None, beta))
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    flat = [x.float().requires_grad_() for x in (rows(HV), rows(HV if name in GDN else HV * K))]
    shaped = [x.detach().view(shape).requires_grad_() for x, shape in zip(flat, [(1, 1, HV, 1), (HV, -1)], strict=True)]
    want, found = (
        getattr(family, name)(*inputs, **options, A_log=A_log, dt_bias=bias) for A_log, bias in (flat, shaped)
    )
    same(found, want, 1e-7)
    of_shaped, of_flat = (torch.autograd.grad(y.sum(), leaves) for (y, _), leaves in ((found, shaped), (want, flat)))
    same([x.flatten() for x in of_shaped], of_flat, 1e-6)


OLDER = {
    "chunk_kda": 5, "fused_recurrent_kda": 5, "chunk_gated_delta_rule": 5, "fused_recurrent_gated_delta_rule": 3,
    "chunk_gdn2": 6, "fused_recurrent_gdn2": 6, "fused_recurrent_simple_gla": 3, "fused_recurrent_retention": 3,
    "fused_recurrent_gla": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_the_older_name_of_values_first(name):
    function = getattr(family, name, None) or getattr(functions, name)
    rates = torch.rand(B, T, HV, *([] if "kda" in name or "rule" in name else [K]))
    decays = -torch.rand(B, T, HV, *([] if name == "chunk_gated_delta_rule" else [K]))
    v = rows(B, T, HV, V).float()
    inputs = [rows(B, T, HV, K).float(), rows(B, T, HV, K).float(), v, decays, rates, v][: OLDER[name]]
    for value, shape in ((True, (V, K)), (False, (K, V))):
        with pytest.warns(DeprecationWarning, match="transpose_state_layout is now state_v_first"):
            found = function(*inputs, output_final_state=True, transpose_state_layout=value)
        same(found, function(*inputs, output_final_state=True, state_v_first=value))
        assert found[1].shape == (B, HV, *shape)
        with pytest.raises(ValueError, match="transpose_state_layout: is the older name of state_v_first, got both"):
            function(*inputs, state_v_first=True, transpose_state_layout=value)


@pytest.mark.filterwarnings("error")
def test_names_that_fla_does_not_read():
    q = rows(B, T, HV, K).float()
    v = rows(B, T, HV, V).float()
    options = {"output_final_state": True, "transpose_state_layout": True, "layer_idx": 3}
    assert family.chunk_simple_gla(q, q, v, **options)[1].shape == (B, HV, K, V)
    assert family.chunk_retention(q, q, v, **options)[1].shape == (B, HV, K, V)
    assert functions.fused_recurrent_gla(q, q, v, output_final_state=True, layer_idx=3)[1].shape == (B, HV, K, V)


CHUNKS = {  # whose sizes FLA has, and whose not
    "chunk_kda": ((32, 64), (16, 48, 128, None)), "chunk_gated_delta_rule": ((16, 32, 64), (8, 128, None)),
    "chunk_delta_rule": ((16, 32, 64), (8, 128, None)), "chunk_gdn2": ((64,), (16, 32, 128)),
    "chunk_simple_gla": ((None, 1, 16, 128), (0, 48, -4)), "chunk_retention": ((None, 2, 64), (3, 96)),
    "chunk_lightning_attn": ((None, 4, 256), (5, 100)), "chunk_rwkv6": ((None, 8, 32), (7, 24)),
}  # fmt: skip


def inputs_of(name):
    q, k, v = (rows(1, 4, 2, K).bfloat16() for _ in range(3))
    g, beta = -torch.rand(1, 4, 2, K, dtype=torch.bfloat16), torch.rand(1, 4, 2, dtype=torch.bfloat16)
    more = {
        "chunk_kda": (g, beta), "chunk_gated_delta_rule": (g[..., 0], beta), "chunk_delta_rule": (beta,),
        "chunk_gdn2": (g, g.exp(), v), "chunk_lightning_attn": (1, 2), "chunk_rwkv6": (g, q[0, 0]),
    }  # fmt: skip
    return q, k, v, *more.get(name, ())


def call_of(name, tokens=T, batch=1, dtype=torch.float32):
    """A function of FLA, and its inputs by name: of tokens, and of heads alone."""
    function = getattr(family, name, None) or getattr(functions, name)
    shapes = {"g": (HV, K), "beta": (HV,), "b": (HV, K), "v": (HV, V), "w": (HV, V)}
    if name in functions.__dict__ or name in SIMPLE + LIGHTNING + ("chunk_retention",):
        shapes = dict.fromkeys(("v",), (H, V)) | {"g": (H,) if name in SIMPLE else (H, K)}
    if "delta_rule" in name and "gated" in name:
        shapes["g"] = (HV,)
    required = [x.name for x in inspect.signature(function).parameters.values() if x.default is x.empty]
    names = [x for x in required if x not in ("layer_idx", "num_layers", "more", "u")]
    names += [x for x in ("g", "gk") if name in (*SIMPLE, "fused_recurrent_gla", *GDN[1:]) and x in
              inspect.signature(function).parameters and x not in names][:1]  # fmt: skip
    names += ["beta"] if name in (GDN[1], DELTA[1]) else []
    given = {x: rows(batch, tokens, *shapes.get(x, (H, K))).to(dtype) for x in names}
    for x in ("g", "gk", "w"):
        if x in given and (x != "w" or name not in GDN2):
            given[x] = -given[x].abs()
    fixed = {"layer_idx": 1, "num_layers": 2} if "lightning" in name else {}
    fixed |= {"u": rows(H, K).to(dtype)} if "rwkv6" in name else {}
    return function, given, fixed


PACKED = [
    *KDA, *GDN, *DELTA, *GDN2, *SIMPLE, "chunk_retention", *LIGHTNING, "chunk_rwkv7", "chunk_dplr_delta_rule",
    "fused_mul_recurrent_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv6", "chunk_gla", "fused_recurrent_gla",
    "chunk_linear_attn", "fused_recurrent_linear_attn",
]  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_tokens_behind_the_last_sequence_are_zeros(name):
    """A padded batch: nothing there reaches a result, a state or a gradient."""
    function, given, fixed = call_of(name)
    bounds = torch.tensor([0, 4, 4, 9])
    finals = {"output_final_state": True} if "parallel" not in name else {}
    # There a product of two inputs has gradients of these.
    padding = 1.0 if name == "fused_mul_recurrent_rwkv7" else torch.nan
    padded = {n: torch.cat([x[:, :9], torch.full_like(x[:, 9:], padding)], 1) for n, x in given.items()}
    there = {n: x[:, :9].clone() for n, x in given.items()}
    for x in (*padded.values(), *there.values()):
        x.requires_grad_()
    found, want = (function(**x, **fixed, **finals, cu_seqlens=bounds) for x in (padded, there))
    assert found[0].shape[1] == T
    assert not found[0][:, 9:].any()
    assert torch.equal(found[0][:, :9], want[0])
    for x, y in zip(*(r[1] if isinstance(r[1], tuple) else (r[1],) for r in (found, want)), strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)
    weight = torch.randn_like(found[0])
    grads = torch.autograd.grad(found[0], [*padded.values()], weight)
    for x, y in zip(grads, torch.autograd.grad(want[0], [*there.values()], weight[:, :9]), strict=True):
        assert torch.equal(x[:, :9], y)
        assert not x[:, 9:].any()


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gdn2"])
@pytest.mark.parametrize("form", ["rows", "packed", "packed, with a state", "values first"])
@pytest.mark.parametrize(("size", "tokens"), [(64, 300), (64, 64), (64, 0), (32, 70)])
def test_states_before_chunks(name, form, size, tokens):
    if name == "chunk_gdn2" and size != 64:
        return
    packed = form.startswith("packed")
    function, given, _ = call_of(name, tokens, 1 if packed else 2)
    bounds = [0, tokens // 3, tokens // 3, tokens - tokens // 4] if packed else None  # and some tokens behind
    options = {"cu_seqlens": torch.tensor(bounds)} if packed else {"state_v_first": form == "values first"}
    if form == "packed, with a state":
        options["initial_state"] = rows(3, HV, K, V).float()
    plain = function(**given, **options, output_final_state=True)
    o, final, h = function(
        **given, **options, output_final_state=True, return_intermediate_states=True, chunk_size=size
    )
    assert torch.equal(o, plain[0])
    assert torch.equal(final, plain[1])
    wanted, places = (
        [],
        [(0, *x) for x in itertools.pairwise(bounds)] if packed else [(row, 0, tokens) for row in (0, 1)],
    )
    for n, (row, begin, end) in enumerate(places):
        first_states = {"initial_state": options["initial_state"][n, None]} if "initial_state" in options else {}
        for first in range(begin, end, size):
            part = {n: x[row : row + 1, begin:first] for n, x in given.items()}
            _, before = function(
                **part, **first_states, output_final_state=True, state_v_first=options.get("state_v_first", False)
            )
            wanted.append(before[0])
    wanted = torch.stack(wanted) if wanted else final[:0]
    assert h.dtype == o.dtype
    same([h], [wanted.view(1 if packed else 2, -1, *final.shape[1:])], 1e-5)
    assert function(**given, **options, return_intermediate_states=True)[1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gated_delta_rule", "chunk_delta_rule", "chunk_gdn2",
                                  "chunk_simple_gla", "chunk_rwkv7", "chunk_rwkv6", "chunk_gla"])  # fmt: skip
def test_decays_and_rates_of_another_dtype(name, dtype):
    """FLA takes any: kernels have them in float32 then."""
    function, given, fixed = call_of(name, dtype=dtype)
    other = torch.bfloat16 if dtype != torch.bfloat16 else torch.float16
    small = {"chunk_rwkv7": "w", "chunk_rwkv6": "w", "chunk_gdn2": "g b"}.get(name, "g beta").split()
    narrow = {n: x.to(other) if n in small else x for n, x in given.items()}
    wide = {n: x.float() if n in small else x for n, x in narrow.items()}
    fixed = {n: x.to(other) if n == "u" else x for n, x in fixed.items()}
    wides = {n: x.float() if n == "u" else x for n, x in fixed.items()}
    assert torch.equal(function(**narrow, **fixed)[0], function(**wide, **wides)[0])


def test_decays_of_tokens_and_fixed_ones_add_up():
    (q, k, v), g, gamma = rows(3, B, T, H, K).float(), -rows(B, T, H).abs().float(), -rows(H).abs().float()
    want = rwkv_jit.simple_gla_ref(*(x.double() for x in (q, k, v, g + gamma)), scale=K**-0.5)
    same(family.chunk_simple_gla(q, k, v, g, gamma)[:1], want[:1])


@pytest.mark.parametrize("name", CHUNKS)
def test_sizes_of_chunks(name):
    function, inputs = getattr(family, name, None) or getattr(functions, name), inputs_of(name)
    there, missing = CHUNKS[name]
    want = function(*inputs)[:1]
    for size in there:
        same(function(*inputs, chunk_size=size)[:1], want)
    for size in missing:
        with pytest.raises(UnsupportedConfigError, match=f"chunk_size={size} is not supported"):
            function(*inputs, chunk_size=size)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("chunk_kda", "cp_context"),
        ("chunk_gated_delta_rule", "cp_context"), ("fused_recurrent_gated_delta_rule", "gv"),
        ("chunk_gdn2", "cp_context"),
        ("fused_recurrent_simple_gla", "reverse"), ("fused_recurrent_retention", "reverse"),
        ("fused_recurrent_lightning_attn", "reverse"), ("parallel_simple_gla", "output_attentions"),
        ("parallel_retention", "output_attentions"), ("chunk_delta_rule", "head_first"),
        ("chunk_simple_gla", "head_first"), ("chunk_lightning_attn", "head_first"), ("chunk_retention", "head_first"),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_do(name, option):
    function = getattr(family, name)
    needed = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty]
    tensors = [torch.zeros(1, 3, 2, 4) for x in needed if x.kind == x.POSITIONAL_OR_KEYWORD]
    with pytest.raises(UnsupportedConfigError, match=f"{option}.* is not supported"):
        function(*tensors, **{option: tensors[0] if option == "gv" else True})


NAMES = sorted({x for several in ours.FUNCTIONS.values() for x in several})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [None, 0.5, [1, 2], "x"], ids=str)
def test_what_is_no_tensor_is_named(name, wrong):
    function = getattr(functions, name, None) or getattr(family, name)
    parameters = inspect.signature(function).parameters
    needed = {x: torch.zeros(1, 3, 2, 4) for x, kind in parameters.items() if kind.default is kind.empty}
    needed |= {x: 1 for x in ("layer_idx", "num_layers") if x in needed}
    needed.pop("more", None)
    for x, kind in parameters.items():
        if str(kind.annotation).startswith("Tensor") and (wrong is not None or "None" not in kind.annotation):
            with pytest.raises(TypeError, match=f"^{x}: expected a torch.Tensor, got {type(wrong).__name__}$"):
                function(**{**needed, x: wrong})


RWKV7, MUL = ("chunk_rwkv7", "fused_recurrent_rwkv7"), "fused_mul_recurrent_rwkv7"
OF_OPS = [
    *((name, x, x) for name in RWKV7 for x in "rwkvab"), (MUL, "r", "r"), (MUL, "w", "w"), (MUL, "kk", "kk"),
    *((name, x, x) for name in ("chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule") for x in
      ("q", "gk", "k", "v", "a", "b")),
    *((name, x, x) for name in GDN2 for x in "qkvgbw"), ("fused_recurrent_gla", "gk", "gk"), ("chunk_gla", "g", "g"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "said"), OF_OPS)
def test_what_ops_refuse_has_the_name_that_fla_gives_it(name, wrong, said):
    """Also where it is what another one should be like."""
    function = getattr(functions, name, None) or getattr(family, name)
    known = ("q", "r", "w", "k", "v", "kk", "a", "b", "g", "gk")
    given = {x: torch.zeros(1, 3, 2, 4) for x in inspect.signature(function).parameters if x in known}
    lead = "q" if "q" in given else "r"
    given[wrong] = torch.zeros(1, 3, 2) if wrong in (lead, "v") else torch.zeros(1, 3, 2, 1)
    with pytest.raises(ValueError, match=f"^{said}: expected ") as error:
        function(**given)
    if wrong not in (lead, "v"):
        like = "v" if (wrong, said) == ("w", "w") and name in GDN2 else lead  # the channels of values
        assert f"like {like}, got" in str(error.value)


def test_graphs_of_packed_sequences_are_left_to_fla():
    q, g, beta = torch.randn(1, 4, 2, 8), -torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2)
    with pytest.raises(UnsupportedConfigError, match="use_graph is not supported"):
        family.chunk_kda(q, q, q, g, beta, use_graph=True, cu_seqlens=torch.tensor([0, 4]))
    same(family.chunk_kda(q, q, q, g, beta, use_graph=True)[:1], rwkv_jit.kda_ref(q, q, q, g, beta)[:1])


def test_what_fla_may_take_and_the_kernels_do_not():
    q, g, beta = torch.randn(1, 4, 2, 8), -torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2)
    with pytest.raises(UnsupportedConfigError, match="a beta of each value is not supported"):
        family.fused_recurrent_kda(q, q, q, g, torch.rand(1, 4, 2, 8))
    with pytest.raises(UnsupportedConfigError, match=r"torch\.bfloat16 beside torch\.float32 is not supported"):
        family.chunk_gated_delta_rule(q, q, q.bfloat16(), g[..., 0], beta)
    with pytest.raises(UnsupportedConfigError, match="gk is not supported"):
        family.fused_recurrent_gated_delta_rule(q, q, q, g[..., 0], gk=g, use_gate_in_kernel=True)
    half = q.bfloat16()
    y, state = family.chunk_kda(half, half, half, g, beta.bfloat16(), output_final_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_bad_input_is_named():
    q, g, beta = torch.randn(1, 4, 2, 8), -torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2)
    with pytest.raises(ValueError, match="A_log: expected a tensor with use_gate_in_kernel, got None"):
        family.chunk_kda(q, q, q, g, beta, use_gate_in_kernel=True)
    for function, more in ((family.chunk_kda, (g, beta)), (family.chunk_gdn2, (g, g, q))):
        for bound in (None, -5.1, 0, 1.0, float("nan")):
            options = {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(2), "lower_bound": bound}
            with pytest.raises(ValueError, match=r"lower_bound: expected a number in \[-5, 0\) with safe_gate, got"):
                function(q, q, q, *more, **options)
            if bound == -5.1:
                function(q, q, q, *more, **options | {"safe_gate": False})
        function(q, q, q, *more, **options | {"lower_bound": -5})
    with pytest.raises(ValueError, match="allow_neg_eigval: needs use_beta_sigmoid_in_kernel"):
        family.fused_recurrent_kda(q, q, q, g, beta, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="g: expected a tensor with use_gate_in_kernel, got None"):
        family.fused_recurrent_gated_delta_rule(q, q, q, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match=r"g: expected shape .*, got \[1, 4, 3\]"):
        family.chunk_gated_delta_rule(q, q, q, torch.zeros(1, 4, 3), beta)
    with pytest.raises(ValueError, match=r"beta: expected shape .*, got \[1, 4\]"):
        family.chunk_delta_rule(q, q, q, torch.zeros(1, 4))
    with pytest.raises(ValueError, match="initial_state: expected shape"):
        family.chunk_retention(q, q, q, initial_state=torch.zeros(1, 3, 8, 8))


# ---- with FLA ----------------------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that there is no GPU
    pytest.importorskip("fla", exc_type=ImportError)
    import fla.layers
from rwkv_jit.compat.fla import patches  # noqa: E402

NAIVE = {
    "chunk_kda": ("kda.naive", "naive_recurrent_kda"),
    "chunk_gated_delta_rule": ("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule"),
    "chunk_delta_rule": ("delta_rule.naive", "delta_rule_recurrence"),
    "chunk_gdn2": ("gdn2.naive", "naive_recurrent_gdn2"),
    "chunk_simple_gla": ("simple_gla.naive", "naive_recurrent_simple_gla"),
}
MODULES = [(name, module) for module, names in ours.FUNCTIONS.items() for name in names if hasattr(family, name)]


@pytest.fixture
def installed():
    ours.install()
    patches._calls.clear()
    yield
    ours.uninstall()


def theirs(module, name):
    return getattr(import_module(f"fla.ops.{module}"), name)


@pytest.mark.parametrize("name", NAIVE)
def test_against_functions_of_fla(name):
    """FLA's functions in plain torch compute in float32."""
    q, k, v = (rows(B, T, HV, n) for n in (K, K, V))
    decay, beta, write = -torch.rand(B, T, HV, K), torch.rand(B, T, HV), torch.rand(B, T, HV, V)
    inputs = {
        "chunk_kda": (q, k, v, decay, beta), "chunk_gated_delta_rule": (q, k, v, beta, decay[..., 0]),
        "chunk_delta_rule": (q, k, v, beta), "chunk_gdn2": (q, k, v, decay, decay.exp(), write),
        "chunk_simple_gla": (q, k, v, decay[..., 0]),
    }[name]  # fmt: skip
    leaves, exact = (list(map(torch.Tensor.requires_grad_, (x.float() for x in inputs))) for _ in range(2))
    state = rows(B, HV, K, V).float()
    order = [0, 1, 2, 4, 3] if name == "chunk_gated_delta_rule" else range(len(leaves))
    found = getattr(family, name)(*(leaves[i] for i in order), initial_state=state, output_final_state=True)
    given, options = exact, {"initial_state": state, "output_final_state": True}
    if name == "chunk_delta_rule":  # heads first
        given = [x.transpose(1, 2) for x in exact]
    want = theirs(*NAIVE[name])(*given, **options)
    if name == "chunk_delta_rule":
        want = want[0].transpose(1, 2), want[1]
    check(found, want, leaves, exact, 2e-5)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_gates_of_fla(is_bounded):
    g, A_log, dt_bias = rows(B, T, HV, K).float(), rows(HV).float(), rows(HV * K).float()
    name, options = ("naive_kda_lowerbound_gate", {"lower_bound": -3.0}) if is_bounded else ("naive_kda_gate", {})
    made = theirs("kda.gate", name)(g, A_log, dt_bias, **options)
    q, k, v, beta = *(rows(B, T, HV, n).float() for n in (K, K, V)), torch.rand(B, T, HV)
    want = theirs("kda.naive", "naive_recurrent_kda")(q, k, v, made, beta)
    found = family.chunk_kda(
        q, k, v, g, beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, safe_gate=is_bounded, **options
    )
    same(found[:1], want[:1])


@pytest.mark.parametrize(("name", "module"), MODULES)
def test_the_arguments_are_those_of_fla(name, module):
    function = import_module(module).__dict__[name]
    theirs, own = (inspect.signature(inspect.unwrap(x)).parameters for x in (function, getattr(family, name)))
    positional = [x for x in theirs if theirs[x].kind == theirs[x].POSITIONAL_OR_KEYWORD]
    assert list(own)[: len(positional)] == positional
    assert [own[x].default for x in positional] == [theirs[x].default for x in positional]
    assert ("kwargs" in theirs) == ("more" in own)


def test_every_function_is_ours(installed):
    for name, module in MODULES:
        function = getattr(sys.modules[module], name)
        assert function in patches._replaced or name in patches._DISPATCHED
    assert fla.layers.kda.fused_recurrent_kda in patches._replaced
    assert fla.layers.delta_net.chunk_delta_rule in patches._replaced


def test_fla_s_registry_runs_ours(installed):
    q, k, v = (rows(B, T, HV, n).float() for n in (K, K, V))
    g, beta = -torch.rand(B, T, HV, K), torch.rand(B, T, HV)
    same(theirs("kda", "chunk_kda")(q, k, v, g, beta)[:1], rwkv_jit.kda_ref(q, k, v, g, beta)[:1])
    heads = g[..., 0]
    found = theirs("gated_delta_rule", "chunk_gdn")(q, k, v, g=heads, beta=beta)
    same(found[:1], rwkv_jit.gated_delta_rule_ref(q, k, v, heads, beta)[:1])
    want = rwkv_jit.simple_gla_ref(q, k, v, heads)
    for name in ("fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"):
        same(theirs("simple_gla", name)(q, k, v, heads)[:1], want[:1])
        assert name in patches._DISPATCHED
    assert all(who == {"rwkv_jit": 1} for who in ours.report().values())
    assert set(ours.report()) == set(patches._DISPATCHED) - {"chunk_dplr_delta_rule"}
    ours.uninstall()
    with pytest.raises(Exception):  # noqa: B017, PT011 - Triton's, on a CPU
        theirs("kda", "chunk_kda")(q, k, v, g, beta)


@pytest.mark.parametrize("name", CHUNKS)
def test_fla_says_which_chunks_it_has(installed, name):
    module = next(module for module, names in ours.FUNCTIONS.items() if name in names)
    function, inputs = import_module(module).__dict__[name], inputs_of(name)
    there, missing = CHUNKS[name]
    for size in there:
        function(*inputs, chunk_size=size)
    assert ours.report() == {name: {"rwkv_jit": len(there)}}
    for size in missing:
        if size is not None:  # what FLA says of None, Triton may say
            with pytest.raises(ValueError, match=f"`chunk_size` must be .*, got {size}"):
                function(*inputs, chunk_size=size)


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gdn2"])
@pytest.mark.parametrize("bound", [None, -5.1, 0.0])
def test_bounds_are_refused_as_by_fla(name, bound):
    """Both refuse the same before anything runs."""
    options = {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(2), "lower_bound": bound}
    for function in (getattr(family, name), theirs(name.partition("_")[2], name)):
        with pytest.raises(ValueError, match="lower_bound"):
            function(*inputs_of(name), **options)


def test_functions_are_ours_where_the_registry_is_turned_off(child, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    code = "from rwkv_jit.compat import fla as ours; ours.install(); import fla.ops.kda, fla.ops.gated_delta_rule\n"
    code += "from rwkv_jit.compat.fla import patches\n"
    code += "assert fla.ops.kda.chunk_kda in patches._replaced\n"
    code += "assert fla.ops.gated_delta_rule.chunk_gdn in patches._replaced"
    child(code, after="transformers.modeling_utils")


# ---- its layers --------------------------------------------------------------------------------------------------


class Norm(torch.nn.Module):
    """What stands for the norms of FLA's layers, which need a GPU."""

    def forward(self, x, gate=None):
        x = F.rms_norm(x, x.shape[-1:])
        return x if gate is None else x * torch.sigmoid(gate)


class Rotary(torch.nn.Module):
    """What stands for FLA's rotary embedding, which needs a GPU: none."""

    def forward(self, q, k, **_):
        return q, k


LAYERS = [
    ("kda.KimiDeltaAttention", {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "use_short_conv": False}),
    ("gated_deltanet.GatedDeltaNet", {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "use_short_conv": False}),
    ("delta_net.DeltaNet", {"num_heads": 3, "use_short_conv": False}),
    ("gdn2.GatedDeltaNet2", {"head_dim": 8, "num_heads": 3, "use_short_conv": False}),
    ("simple_gla.SimpleGatedLinearAttention", {"num_heads": 3, "use_short_conv": False}),
    ("multiscale_retention.MultiScaleRetention", {"num_heads": 3}),
]


@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
@pytest.mark.parametrize(("name", "options"), LAYERS)
def test_layers_train_and_decode(installed, name, options):
    """A layer in parts is the whole, by other functions where gradients are wanted than where not."""
    from fla.models.utils import Cache

    layer = getattr(import_module(f"fla.layers.{name.split('.')[0]}"), name.split(".")[1])(
        hidden_size=24, layer_idx=0, **options
    )
    for norm in {"o_norm", "g_norm", "g_norm_swish_gate"} & set(dict(layer.named_children())):
        setattr(layer, norm, Norm())
    if hasattr(layer, "rotary"):
        layer.rotary = Rotary()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    x = torch.randn(2, T, 24)
    want = layer(x)[0]
    grads = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    assert all(x.isfinite().all() and x.any() for x in grads)
    layer.eval()
    cache = Cache()
    with torch.no_grad():
        found = [layer(part, past_key_values=cache, use_cache=True)[0] for part in x.split([1, 6, 6], 1)]
    same([torch.cat(found, 1)], [want.detach()], 1e-4)
    assert len(ours.report()) >= 1
    assert all(set(who) == {"rwkv_jit"} for who in ours.report().values())
