"""FLA's functions on these kernels against float64, and FLA itself with them: who runs what, layers and a model."""

import os
import subprocess
import sys
import types
import warnings

import pytest
import torch
import warm
from torch.nn import functional as F

import rwkv_jit
import rwkv_jit.nn
from rwkv_jit.compat import fla as ours
from rwkv_jit.compat.falling_back import with_fallback
from rwkv_jit.compat.fla import functions
from rwkv_jit.kernels.errors import UnsupportedConfigError

B, T, H, K, V = 2, 13, 3, 8, 6


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64) / 2


def logs(*shape):
    return F.logsigmoid(rows(*shape) * 4)


def delta():
    kk = F.normalize(rows(B, T, H, K), dim=-1)
    return rows(B, T, H, K), logs(B, T, H, K), rows(B, T, H, K), rows(B, T, H, V), -kk, kk * torch.rand(B, T, H, K)


def same(found, want):
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape
        assert (x - y).norm() <= 1e-5 * y.norm()


def check(ours, theirs, leaves):
    """Results and gradients are the same."""
    found, want = [[x for x in result if x is not None] for result in (ours, theirs)]
    same(found, want)
    grads = [torch.randn_like(x) for x in want]
    same(torch.autograd.grad(found, leaves, grads), torch.autograd.grad(want, leaves, grads))


@pytest.fixture(params=["alone", "state", "scale"])
def asked(request):
    """Options of a call."""
    if request.param == "alone":
        return {}
    given = {"initial_state": rows(B, H, K, V).float(), "output_final_state": True}
    return given | ({"scale": 0.3} if request.param == "scale" else {})


def leaves_of(inputs):
    return [x.float().requires_grad_() for x in inputs]


def options(asked, scale):
    return {"scale": scale, "state_layout": "kv", "decay": "log", **asked}


@pytest.mark.parametrize(
    ("name", "scale"), [("chunk_rwkv7", 1.0), ("fused_recurrent_rwkv7", K**-0.5), ("fused_mul_recurrent_rwkv7", 1.0)]
)
def test_rwkv7(name, scale, asked):
    r, w, k, v, a, b = leaves = leaves_of(delta())
    wanted = options(asked, scale)
    if name == "fused_recurrent_rwkv7":
        wanted = {"output_final_state": True} | wanted
    if name == "fused_mul_recurrent_rwkv7":
        want = rwkv_jit.wkv7_ref(r, w, k, v, -a, a * b, **wanted)
    else:
        want = rwkv_jit.wkv7_ref(r, w, k, v, a, b, **wanted)
    check(getattr(functions, name)(*leaves, **asked), want, leaves)


@pytest.mark.parametrize("name", ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"])
def test_dplr(name, asked):
    r, w, k, v, a, b = leaves = leaves_of(delta())
    want = rwkv_jit.wkv7_ref(r, w, k, v, a, b, **options(asked, K**-0.5))
    check(getattr(functions, name)(r, k, v, a, b, w, **asked), want, leaves)


def test_a_bound_and_chunks_change_nothing():
    r, _, k, v, a, b = (x.float() for x in delta())
    w = -0.6 * torch.rand(B, T, H, K)
    want, _ = rwkv_jit.wkv7_ref(r, w, k, v, a, b, decay="log", state_layout="kv")
    more = {"lower_bound": -0.6, "safe_gate": True, "chunk_size": 64, "disable_recompute": True}
    torch.testing.assert_close(functions.chunk_rwkv7(r, w, k, v, a, b, **more)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["chunk_rwkv6", "fused_recurrent_rwkv6"])
def test_rwkv6(name, asked):
    leaves = leaves_of((rows(B, T, H, K), rows(B, T, H, K), rows(B, T, H, V), logs(B, T, H, K), rows(H, K)))
    want = rwkv_jit.wkv6_ref(*leaves, **options(asked, K**-0.5))
    check(getattr(functions, name)(*leaves, **asked), want, leaves)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", ["chunk_gla", "fused_recurrent_gla"])
def test_gla(name, v_first, asked):
    leaves = leaves_of((rows(B, T, H, K), rows(B, T, H, K), rows(B, T, H, V), logs(B, T, H, K)))
    wanted = options(asked, K**-0.5)
    if v_first:
        wanted["state_layout"] = "vk"
        if asked:
            asked = asked | {"initial_state": asked["initial_state"].mT}
            wanted["initial_state"] = asked["initial_state"]
    want = rwkv_jit.gla_ref(*leaves, **wanted)
    check(getattr(functions, name)(*leaves, state_v_first=v_first, **asked), want, leaves)


def test_gla_without_gates():
    leaves = leaves_of((rows(B, T, H, K), rows(B, T, H, K), rows(B, T, H, V)))
    want = rwkv_jit.linear_attention_ref(*leaves, scale=K**-0.5, state_layout="kv")
    check(functions.fused_recurrent_gla(*leaves), want, leaves)


@pytest.mark.parametrize("begins", ["with nothing", "with S", "with both", "with z"])
@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"])
def test_normalized_linear_attention(name, begins):
    leaves = leaves_of((rows(B, T, H, K).abs(), rows(B, T, H, K).abs(), rows(B, T, H, V)))
    state, z = rows(B, H, K, V).float(), rows(B, 1, H, K).abs().float()
    given = {"with nothing": None, "with S": state, "with both": (state, z), "with z": (None, z)}[begins]
    whole = (
        state if begins in ("with S", "with both") else torch.zeros_like(state),
        z.squeeze(1) if begins in ("with both", "with z") else torch.zeros(B, H, K),
    )
    options = {"normalize": True, "output_final_state": True}
    y, (last, last_z) = getattr(functions, name)(*leaves, initial_state=given, **options)
    want, (want_last, want_z) = rwkv_jit.linear_attention_ref(*leaves, whole, scale=K**-0.5, **options)
    assert last_z.shape == (B, 1, H, K)
    check((y, last, last_z.squeeze(1)), (want, want_last, want_z), leaves)


def test_linear_attention_as_it_is_by_default():
    leaves = leaves_of((rows(B, T, H, K).abs(), rows(B, T, H, K).abs(), rows(B, T, H, V)))
    for name, normalize in (("chunk_linear_attn", True), ("fused_recurrent_linear_attn", False)):
        y, state = getattr(functions, name)(*leaves)
        assert state is None
        want, _ = rwkv_jit.linear_attention_ref(*leaves, scale=K**-0.5, normalize=normalize)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


def test_rwkv4():
    w, u, k, v = leaves_of((rows(5), rows(5), rows(B, T, 5), rows(B, T, 5)))
    state = torch.stack([rows(B, 5), rows(B, 5).abs() + 1, rows(B, 5)], 1).float().requires_grad_()
    leaves = w, u, k, v, state
    y, last = functions.fused_recurrent_rwkv4(w, u, k, v, state.unsqueeze(2))
    assert last.shape == (B, 3, 1, 5)
    check((y, last.squeeze(2)), rwkv_jit.wkv4_ref(w, u, k, v, state, True), leaves)


@pytest.mark.parametrize("packed", [False, True])
def test_token_shift(packed):
    x, cache = (x.float().requires_grad_() for x in (rows(1 if packed else B, T, 5), rows(B, 5)))
    bounds = torch.tensor([0, 4, T]) if packed else None
    delta, last = functions.token_shift(x, bounds, cache, output_cache=True)
    parts = [x[:, :4], x[:, 4:]] if packed else [x]
    firsts = [cache[:1], cache[1:]] if packed else [cache]
    before = torch.cat([torch.cat([c[:, None], p[:, :-1]], 1) for c, p in zip(firsts, parts, strict=True)], 1)
    check((delta, last), (before - x, torch.cat([p[:, -1] for p in parts])), (x, cache))


def test_packed_sequences():
    inputs = [x.float().flatten(0, 1)[None] for x in delta()]
    bounds = torch.tensor([0, 5, 5, 2 * T])
    y, last = functions.chunk_rwkv7(*inputs, output_final_state=True, cu_seqlens=bounds, cu_seqlens_cpu=bounds)
    want = rwkv_jit.wkv7_ref(
        *inputs, output_final_state=True, cu_seqlens=bounds, decay="log", state_layout="kv"
    )  # fmt: skip
    torch.testing.assert_close((y, last), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("chunk_rwkv7", {"cp_context": object()}),
        ("chunk_dplr_delta_rule", {"head_first": True}),
        ("chunk_rwkv6", {"head_first": True}),
        ("fused_mul_recurrent_rwkv7", {"reverse": True}),
        ("fused_recurrent_gla", {"gv": torch.zeros(B, T, H, V)}),
        ("fused_recurrent_rwkv6", {"reverse": True}),
        ("fused_recurrent_linear_attn", {"reverse": True}),
    ],
)
def test_what_the_kernels_cannot_do(name, option):
    given = [torch.zeros(1)] * {"gla": 3, "rn_rwkv6": 5, "near_attn": 3}.get(name[-9:].lstrip("_"), 6)
    if "gla" in name or "linear" in name:
        given = given[:3]
    elif "rwkv6" in name:
        given = given[:5]
    with pytest.raises(UnsupportedConfigError, match=f"{next(iter(option))}.* is not supported"):
        getattr(functions, name)(*given, **option)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("chunk_rwkv7", 6), ("fused_recurrent_rwkv7", 6), ("fused_mul_recurrent_rwkv7", 6),
        ("chunk_dplr_delta_rule", 6), ("fused_recurrent_dplr_delta_rule", 6), ("chunk_rwkv6", 5),
        ("fused_recurrent_rwkv6", 5), ("chunk_gla", 4), ("fused_recurrent_gla", 4), ("fused_recurrent_gla", 3),
        ("chunk_linear_attn", 3), ("fused_chunk_linear_attn", 3), ("fused_recurrent_linear_attn", 3),
    ],
)  # fmt: skip
def test_final_states_are_float32_beside_initial_ones_of_16_bits(name, count, dtype):
    inputs = [-rows(B, T, H, K).abs().float() for _ in range(count)]
    if count == 5:
        inputs[4] = inputs[4][0, 0]
    state = rows(B, H, K, K).to(dtype).requires_grad_()
    for normalize in [False, True] if "linear" in name else [None]:
        options = {"output_final_state": True} | ({} if normalize is None else {"normalize": normalize})
        found, want = (getattr(functions, name)(*inputs, initial_state=x, **options) for x in (state, state.float()))
        finals, wanted = (x[1] if normalize else [x[1]] for x in (found, want))
        assert all(x.dtype == torch.float32 for x in finals)
        same([found[0], *finals], [want[0], *wanted])
        (grad,) = torch.autograd.grad(found[0].sum(), state)
        assert grad.dtype == dtype
        assert grad.any()


def test_dtypes_that_only_fla_may_take():
    r, w, k, v, a, b = (x.float() for x in delta())
    for given in ((r.half(), w, k, v, a, b), (r, w, k, v.bfloat16(), a, b)):
        with pytest.raises(UnsupportedConfigError, match=r"torch\.\w+ beside torch\.float32 is not supported"):
            functions.chunk_rwkv7(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert functions.chunk_rwkv7(r, w, k, v.bfloat16(), a, b)[0].dtype == torch.bfloat16


# ---- with FLA ----------------------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that there is no GPU
    theirs = pytest.importorskip("fla", exc_type=ImportError)
    from fla.layers.rwkv7 import RWKV7Attention
    from fla.models import RWKV7Config, RWKV7ForCausalLM
    from fla.models.rwkv7.modeling_rwkv7 import RWKV7FeedForward
    from fla.models.utils import Cache
from rwkv_jit.compat.fla import layers, patches  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:According to Bo")
WIDTH = 24


@pytest.fixture
def installed():
    ours.install()
    patches._calls.clear()
    yield
    ours.uninstall()


def test_every_name_is_ours_wherever_it_was_imported_to_until_uninstall():
    module = sys.modules["user_of_fla"] = types.ModuleType("user_of_fla")
    try:
        import fla.layers.gla
        import fla.ops.gla
        import fla.ops.rwkv4

        module.gla = original = fla.ops.gla.chunk_gla
        forward = RWKV7Attention.forward
        ours.install()
        assert module.gla is fla.ops.gla.chunk_gla is fla.layers.gla.chunk_gla is not original
        assert RWKV7Attention.forward is not forward
        replaced = {getattr(sys.modules[name], x) for name, names in ours.FUNCTIONS.items() for x in names}
        assert {x.__name__ for x in replaced - set(patches._replaced)} == set(patches._DISPATCHED)
        assert replaced >= set(patches._replaced)
        ours.install()
        ours.uninstall()
        assert module.gla is fla.ops.gla.chunk_gla is fla.layers.gla.chunk_gla is original
        assert RWKV7Attention.forward is forward
    finally:
        ours.uninstall()
        del sys.modules["user_of_fla"]


def child(code, after=(), **environment):
    command = [*warm.python(*after), "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_install_before_the_import():
    """Of FLA; what it imports of others takes seconds, and is there."""
    code = "import sys, rwkv_jit.compat.fla as ours; ours.install(); assert 'fla' not in sys.modules;"
    code += "import fla.ops.rwkv7; from fla.layers import rwkv7; from rwkv_jit.compat.fla import patches;"
    code += "assert fla.ops.rwkv7.chunk_rwkv7 in patches._replaced;"
    code += "assert rwkv7.chunk_rwkv7 is fla.ops.rwkv7.chunk_rwkv7;"
    code += "assert rwkv7.RWKV7Attention in patches._forwards"
    child(code, after=["transformers.modeling_utils"])


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("off", False)])
def test_a_variable_is_enough(value, expected):
    code = "import sys, rwkv_jit.compat.autoload; from rwkv_jit.compat import fla as ours;"
    code += f"assert 'torch' not in sys.modules; assert ours.is_installed is {expected};"
    code += "assert not sys.modules['rwkv_jit.compat'].is_installed"
    child(code, RWKVJIT_FLA=value)


def test_what_went_where(installed):
    r, w, k, v, a, b = (x.float() for x in delta())
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
    from fla.ops.rwkv7 import chunk_rwkv7

    want, _ = rwkv_jit.wkv7_ref(r, w, k, v, a, b, decay="log", state_layout="kv")
    torch.testing.assert_close(chunk_rwkv7(r, w, k, v, a, b)[0], want, rtol=1e-5, atol=1e-6)
    by_registry = chunk_dplr_delta_rule(r, k, v, a, b, w, scale=1.0)
    torch.testing.assert_close(by_registry[0], want, rtol=1e-5, atol=1e-6)

    def own(*arguments, **named):
        return arguments, named

    call = with_fallback("chunk_rwkv7", functions.chunk_rwkv7, own, patches._note)
    assert call(r, w, k, v, a, b, cp_context=3) == ((r, w, k, v, a, b), {"cp_context": 3})
    assert ours.report() == {
        "chunk_rwkv7": {"rwkv_jit": 1, "FLA: cp_context of int is not supported": 1},
        "chunk_dplr_delta_rule": {"rwkv_jit": 1},
    }
    ours.uninstall()
    with pytest.raises(Exception):  # noqa: B017, PT011 - Triton's, on a CPU
        chunk_dplr_delta_rule(r, k, v, a, b, w)


def test_heads_first_is_refused_by_fla_itself(installed):
    r, w, k, v, a, b = (x.float() for x in delta())
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
    from fla.ops.rwkv6 import chunk_rwkv6

    with pytest.raises(DeprecationWarning, match="head_first has been removed"):
        chunk_dplr_delta_rule(r, k, v, a, b, w, head_first=True)
    with pytest.raises(DeprecationWarning, match="head_first has been removed"):
        chunk_rwkv6(r, k, v, w, r[0, 0], head_first=True)
    assert {name: list(who) for name, who in ours.report().items()} == {
        "chunk_dplr_delta_rule": ["FLA: head_first is not supported"],
        "chunk_rwkv6": ["FLA: head_first is not supported"],
    }


def test_compiled_code_has_no_breaks(installed):
    from fla.ops import gla

    compiled = torch.compile(lambda *x: gla.chunk_gla(*x)[0], fullgraph=True, backend="eager")
    inputs = [x.float() for x in (rows(B, T, H, K), rows(B, T, H, K), rows(B, T, H, V), logs(B, T, H, K))]
    want, _ = rwkv_jit.gla_ref(*inputs, scale=K**-0.5)
    torch.testing.assert_close(compiled(*inputs), want, rtol=1e-5, atol=1e-6)


# ---- its layers --------------------------------------------------------------------------------------------------


def random_layer(kind, **sizes):
    layer = kind(hidden_size=WIDTH, num_hidden_layers=3, **sizes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    return layer


def time_mix(layer):
    """The same layer of ours, with its parameters."""
    own = rwkv_jit.nn.RWKV7TimeMix(
        WIDTH, layer.layer_idx, 3, layer.head_dim,
        ranks={x: getattr(layer, f"{x}_lora").low_rank_dim for x in "wavg" if hasattr(layer, f"{x}_lora")},
    )  # fmt: skip
    given = {name: getattr(layer, name) for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "r_k")}
    for x in "wavg":
        if lora := getattr(layer, f"{x}_lora", None):
            given |= {f"{x}1": lora.lora[0].weight.T, f"{x}2": lora.lora[2].weight.T, f"{x}0": lora.lora[2].bias}
    for name, theirs in {"receptance": "r", "key": "k", "value": "v", "output": "o"}.items():
        given[f"{name}.weight"] = getattr(layer, f"{theirs}_proj").weight
    given |= {"ln_x.weight": layer.g_norm.weight, "ln_x.bias": layer.g_norm.bias}
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(given[name].view_as(parameter))
    return own, given


@pytest.mark.parametrize("fuse_norm", [False, True])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_time_mixing(installed, layer_idx, fuse_norm):
    layer = random_layer(RWKV7Attention, head_dim=K, layer_idx=layer_idx, fuse_norm=fuse_norm)
    layer.g_norm.eps = 64e-5
    own, given = time_mix(layer)
    x, v_first = (torch.randn(B, T, WIDTH, requires_grad=True) for _ in range(2))
    y, _, _, v = layer(x, v_first=v_first)
    want, want_v, _ = own(x, v_first)
    check((y, v), (want, want_v), (x,) if layer_idx == 0 else (x, v_first))
    dy = torch.randn_like(y)
    names = [name for name, _ in own.named_parameters()]
    found = torch.autograd.grad(
        layer(x, v_first=v_first)[0], [given[name] for name in names if name[-1] not in "12"], dy
    )
    of = torch.autograd.grad(own(x, v_first)[0], [p for n, p in own.named_parameters() if n[-1] not in "12"], dy)
    same(found, [x.view_as(y) for x, y in zip(of, found, strict=True)])
    assert ours.report()["RWKV7Attention"] == {"rwkv_jit": 2}


def test_channel_mixing(installed):
    layer = random_layer(RWKV7FeedForward, layer_idx=1)
    own = rwkv_jit.nn.RWKV7ChannelMix(WIDTH, 1, 3, layer.intermediate_size)
    with torch.no_grad():
        own.x_k.copy_(layer.x_k.view(1, 1, -1))
        own.key.weight.copy_(layer.key.weight)
        own.value.weight.copy_(layer.value.weight)
    x = torch.randn(B, T, WIDTH, requires_grad=True)
    check(layer(x)[:1], own(x)[:1], (x,))


def test_parts_with_a_cache_are_the_whole(installed):
    torch.manual_seed(0)
    time, channel = random_layer(RWKV7Attention, head_dim=K, layer_idx=0), random_layer(RWKV7FeedForward, layer_idx=0)
    x = torch.randn(B, T, WIDTH)
    want, want_mixed = time(x)[0], channel(x)[0]
    cache, found, mixed = Cache(), [], []
    with torch.no_grad():
        for part in x.split([1, 6, T - 7], 1):
            y, _, cache, _ = time(part, past_key_values=cache, use_cache=True)
            found.append(y)
            mixed.append(channel(part, state=cache)[0])
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(mixed, 1), want_mixed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixes_time", [True, False])
def test_packed_texts_and_padding_in_front_are_texts_alone(installed, mixes_time):
    layer = (
        random_layer(RWKV7Attention, head_dim=K, layer_idx=1)
        if mixes_time
        else random_layer(RWKV7FeedForward, layer_idx=1)
    )
    x = torch.randn(2, T, WIDTH)  # the last of two is v_first

    def run(x, **options):
        return layer(x[:1], v_first=x[1:], **options)[0] if mixes_time else layer(x[:1], **options)[0]

    def padded(part):  # as long as all of it, with anything in front
        return torch.cat([torch.randn(2, T - part.shape[1], WIDTH), part], 1)

    bounds, parts = torch.tensor([0, 4, T]), [x[:, :4], x[:, 4:]]
    want = [run(part) for part in parts]
    torch.testing.assert_close(run(x, cu_seqlens=bounds), torch.cat(want, 1), rtol=1e-5, atol=1e-5)
    forward = getattr(layers, type(layer).__name__).forward  # it is left to FLA's, whose functions are ours
    with pytest.raises(UnsupportedConfigError, match="padding is not supported"):
        forward(layer, torch.randn(1, T + 3, WIDTH), cu_seqlens=bounds)
    for part, y in zip(parts, want, strict=True):
        mask = (torch.arange(T) >= T - part.shape[1]).long()[None]
        found = run(padded(part), attention_mask=mask)
        torch.testing.assert_close(found[:, T - part.shape[1] :], y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_idx", [0, 1])
@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0]], ids=str)
def test_padding_anywhere_is_what_it_is_to_fla(installed, monkeypatch, layer_idx, mask):
    """Beside FLA's own forward, with its references in plain torch."""
    layer = random_layer(RWKV7Attention, head_dim=K, layer_idx=layer_idx)
    x, v_first, mask = torch.randn(B, 7, WIDTH), torch.randn(B, 7, WIDTH), torch.tensor([mask] * B)

    def run():
        cache = Cache() if layer_idx == 0 else None  # which has layers from the first on
        y, _, _, v = layer(x, attention_mask=mask, v_first=v_first, past_key_values=cache, use_cache=cache is not None)
        return [y, v.view_as(y), *([] if cache is None else [cache[0]["recurrent_state"]])]

    found = run()
    ours.uninstall()
    module = sys.modules["fla.layers.rwkv7"]
    from fla.ops.rwkv7 import fused_addcmul, fused_k_update, gate_output_correction

    def shift(x, bounds, output_cache, cache):
        before = torch.zeros_like(x[:, :1]) if cache is None else cache.view(len(x), 1, -1)
        return torch.cat([before, x[:, :-1]], 1) - x, x[:, -1:]

    def recurrence(r, w, k, v, a, b, initial_state, output_final_state, **_):
        return rwkv_jit.wkv7_ref(
            r, w, k, v, a, b, initial_state, output_final_state, decay="log", state_layout="kv", scale=1.0
        )

    for name, plain in {
        "token_shift": shift, "fused_addcmul_rwkv7": fused_addcmul.torch_addcmul_rwkv7, "chunk_rwkv7": recurrence,
        "fused_k_rwkv7": fused_k_update.k_update_ref,
        "gate_output_correction": gate_output_correction.gate_output_correction_ref,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, plain)
    torch.testing.assert_close(found, run(), rtol=1e-4, atol=1e-4)


def test_layers_that_the_kernels_have_not():
    layer = random_layer(RWKV7Attention, head_dim=K, layer_idx=0, value_dim=2 * WIDTH)
    with pytest.raises(UnsupportedConfigError, match="values of 16 for keys of 8 are not supported"):
        layers.RWKV7Attention.forward(layer, torch.randn(B, T, WIDTH))
    layer = random_layer(RWKV7FeedForward, layer_idx=0, hidden_act="relu")
    with pytest.raises(UnsupportedConfigError, match="another function than the square of relu is not supported"):
        layers.RWKV7FeedForward.forward(layer, torch.randn(B, T, WIDTH))


def test_a_model_trains_and_generates(installed):
    torch.manual_seed(3)
    config = RWKV7Config(
        hidden_size=WIDTH, head_dim=K, num_hidden_layers=2, vocab_size=11, fuse_norm=False, fuse_cross_entropy=False,
        fuse_linear_cross_entropy=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = RWKV7ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    ids = torch.randint(1, 11, (2, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    model.eval()
    mask = torch.ones_like(ids)
    ids[0, :2] = mask[0, :2] = 0  # padding in front
    found = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for row, text in enumerate((ids[:1, 2:], ids[1:])):
        for _ in range(5):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert found[row, -5:].tolist() == text[0, -5:].tolist()
    assert set(ours.report()["RWKV7Attention"]) == {"rwkv_jit"}
