"""Kimi Delta Attention, gated delta net and Mamba-2 as modules, beside transformers' own and beside equations."""

import copy
import importlib
import itertools
import sys

import pytest
import torch
from stub_driver import Launching
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit import nn

WIDTH, TOKENS = 24, 9
DOUBLE = {"dtype": torch.float64}
# Sizes that are no powers of 2, and more value heads than key heads.
MAKERS = {
    "KimiDeltaAttention": lambda **place: nn.KimiDeltaAttention(WIDTH, 2, 6, 7, 5, conv_width=3, **place),
    "GatedDeltaNet": lambda **place: nn.GatedDeltaNet(WIDTH, 2, 6, 7, 5, **place),
    "Mamba2": lambda **place: nn.Mamba2(WIDTH, 6, 5, 7, 2, **place),
}
EVERY = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def stir(module):
    """Move all parameters from initial values in which another one would not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape).to(parameter))
    return module


def make(name, **place):
    return stir(MAKERS[name](**place))


def tokens(*lead, **place):
    return torch.randn(*lead, WIDTH, **place)


def close(found, want, limit=1e-12):
    assert found.shape == want.shape
    assert found.dtype == want.dtype
    assert (found.double() - want.double()).abs().max() <= limit * (1 + want.double().abs().max())


def gradients(function, module, inputs, weights):
    """Return what a function makes, and gradients of the module's parameters and of its inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    made = function(*inputs)
    loss = sum((y * weight).sum() for y, weight in zip(made, weights, strict=False))
    return made, torch.autograd.grad(loss, [*module.parameters(), *inputs])


# ---- beside the modules of transformers --------------------------------------------------------------------------


def in_torch(monkeypatch, name):
    """A file of transformers as it is without packages of kernels: it looks for these when it is imported."""
    pytest.importorskip("transformers")
    file = f"transformers.models.{name}.modeling_{name}"
    for own in ("fla", "mamba_ssm", "causal_conv1d", file):
        monkeypatch.setitem(sys.modules, own, None)
    del sys.modules[file]
    return importlib.import_module(file)


def of_transformers(name, monkeypatch):
    """A module of transformers, and ours of its sizes."""
    if name == "GatedDeltaNet":
        modeling = in_torch(monkeypatch, "qwen3_next")
        config = modeling.Qwen3NextConfig(
            hidden_size=WIDTH, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=7,
            linear_value_head_dim=5, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
        )  # fmt: skip
        return modeling.Qwen3NextGatedDeltaNet(config, 0), MAKERS[name]()
    modeling = in_torch(monkeypatch, "mamba2")
    config = modeling.Mamba2Config(
        hidden_size=15, num_heads=6, head_dim=5, state_size=7, n_groups=2, num_hidden_layers=1, chunk_size=4,
        time_step_limit=(0.05, 1.5),
    )  # fmt: skip
    return modeling.Mamba2Mixer(config, 0), nn.Mamba2(15, 6, 5, 7, 2, norm_groups=1, dt_limit=(0.05, 1.5))


@pytest.mark.parametrize("name", ["GatedDeltaNet", "Mamba2"])
def test_is_the_module_of_transformers(monkeypatch, name):
    theirs, ours = of_transformers(name, monkeypatch)
    stir(theirs).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, TOKENS, ours.width)
    weights = [torch.randn(x.shape)]
    # By name: our order of parameters need not be theirs.
    names = [own for own, _ in theirs.named_parameters()]
    assert {*names} == {own for own, _ in ours.named_parameters()}
    (want,), of_theirs = gradients(lambda x: [theirs(x)], theirs, [x], weights)
    (found, _), of_ours = gradients(ours, ours, [x], weights)
    close(found, want, 1e-5)
    by_name = dict(zip([own for own, _ in ours.named_parameters()], of_ours[:-1], strict=True))
    for own, grad in zip(names, of_theirs[:-1], strict=True):
        assert grad.abs().max() > 0, own
        close(by_name[own], grad, 1e-4)
    close(of_ours[-1], of_theirs[-1], 1e-4)


# ---- beside equations --------------------------------------------------------------------------------------------


def convolved(x, before, conv):
    """Silu of channels convolved with those before, by torch's own convolution."""
    seen = torch.cat([before, x.transpose(1, 2)], -1)
    return F.silu(F.conv1d(seen, conv.weight, conv.bias, groups=conv.groups)).transpose(1, 2), seen[..., x.shape[1] :]


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def kimi(m, x, before, state):
    heads, keys, values = m.value_heads, m.key_size, m.value_size
    befores = before.split([m.key_width, m.key_width, m.value_width], 1)
    (q, k, v), lasts = zip(
        *(
            convolved(getattr(m, f"{own}_proj")(x), each, getattr(m, f"{own}_conv1d"))
            for own, each in zip("qkv", befores, strict=True)
        ),
        strict=True,
    )
    q, k = (each.unflatten(-1, (m.key_heads, keys)) for each in (q, k))
    raw = (m.f_proj(x) + m.dt_bias).unflatten(-1, (heads, keys))
    rate = m.A_log.exp().view(heads, 1)
    g = -rate * F.softplus(raw) if m.lower_bound is None else m.lower_bound * torch.sigmoid(rate * raw)
    beta = m.b_proj(x).sigmoid() * (2 if m.allow_neg_eigval else 1)
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    y, final = rwkv_jit.kda_ref(q, k, v.unflatten(-1, (heads, values)), g, beta, state, True)
    y = rms(y, m.o_norm.eps) * m.o_norm.weight * m.g_proj(x).unflatten(-1, (heads, values)).sigmoid()
    return m.o_proj(y.flatten(2)), torch.cat(lasts, 1), final


def mamba(m, x, before, state):
    inner = m.heads * m.head_size
    z, mixed, dt = m.in_proj(x).split([inner, m.conv1d.weight.shape[0], m.heads], -1)
    mixed, last = convolved(mixed, before, m.conv1d)
    values, B, C = mixed.split([inner, *[m.groups * m.state_size] * 2], -1)
    B, C = (each.unflatten(-1, (m.groups, m.state_size)) for each in (B, C))
    steps = F.softplus(dt + m.dt_bias)
    values = values.unflatten(-1, (m.heads, m.head_size))
    y, final = rwkv_jit.ssd_ref(values, steps, -m.A_log.exp(), B, C, state, True, D=m.D)
    y = rms((y.flatten(2) * F.silu(z)).unflatten(-1, (m.norm_groups, -1)), m.norm.eps)
    return m.out_proj(y.flatten(2) * m.norm.weight), last, final


CASES = {
    "kimi": (lambda: make("KimiDeltaAttention", **DOUBLE), kimi),
    "kimi, options": (
        lambda: stir(nn.KimiDeltaAttention(WIDTH, 3, key_size=4, lower_bound=-5.0, allow_neg_eigval=True, **DOUBLE)),
        kimi,
    ),
    "mamba": (lambda: make("Mamba2", **DOUBLE), mamba),
}


@pytest.mark.parametrize("case", CASES)
def test_is_its_equations(case):
    maker, equations = CASES[case]
    module = maker()
    state = module(tokens(2, 5, **DOUBLE))[1]
    inputs = [tokens(2, TOKENS, **DOUBLE), *state]
    weights = [torch.randn_like(each) for each in inputs]
    want, of_equations = gradients(lambda *given: equations(module, *given), module, inputs, weights)
    found, of_module = gradients(
        lambda x, *both: (lambda y, after: [y, *after])(*module(x, both)), module, inputs, weights
    )
    for one, other in zip([*found, *of_module], [*want, *of_equations], strict=True):
        assert other.abs().max() > 0
        close(one, other, 1e-10)


# ---- published names ---------------------------------------------------------------------------------------------


def test_has_the_parameters_of_flas_layer():
    found = {name: tuple(x.shape) for name, x in MAKERS["KimiDeltaAttention"]().state_dict().items()}
    assert found == {
        "q_proj.weight": (14, WIDTH), "k_proj.weight": (14, WIDTH), "v_proj.weight": (30, WIDTH),
        "q_conv1d.weight": (14, 1, 3), "k_conv1d.weight": (14, 1, 3), "v_conv1d.weight": (30, 1, 3),
        "f_proj.0.weight": (5, WIDTH), "f_proj.1.weight": (42, 5), "b_proj.weight": (6, WIDTH), "A_log": (6,),
        "dt_bias": (42,), "g_proj.0.weight": (5, WIDTH), "g_proj.1.weight": (30, 5), "g_proj.1.bias": (30,),
        "o_norm.weight": (5,), "o_proj.weight": (WIDTH, 30),
    }  # fmt: skip


@EVERY
def test_begins_in_the_ranges_published(name):
    module = MAKERS[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    module.reset_parameters()
    steps, rates = F.softplus(module.dt_bias), module.A_log.exp()
    if name == "GatedDeltaNet":
        assert (module.dt_bias == 1).all()
    else:
        assert 0.00099 < steps.min() < steps.max() < 0.101
    assert (0 if name == "GatedDeltaNet" else 1) <= rates.min() < rates.max() <= 16.001
    for own, parameter in module.named_parameters():
        assert parameter.isfinite().all(), own
        assert not (parameter == 7).any(), own


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strength", [88, 89, 1000, float("inf")])
def test_the_strongest_decays_have_gradients(name, strength, dtype):
    module, x = make(name, dtype=dtype), tokens(2, TOKENS, dtype=dtype)
    with torch.no_grad():
        module.dt_bias.fill_(-60)
        module.A_log.fill_(88)
        want = run(module, x)[:2]
        module.A_log.fill_(strength)
    made, grads = gradients(lambda x: run(module, x)[:2], module, [x], [torch.randn_like(y) for y in want])
    for one, other in zip(made, want, strict=True):
        close(one, other)
    assert all(grad.isfinite().all() for grad in grads)
    assert any(grad.abs().max() > 0 for grad in grads)


# ---- cut, packed, and one by one ---------------------------------------------------------------------------------


def run(module, x, state=None, cu_seqlens=None):
    y, after = module(x, state, cu_seqlens)
    return [y, after] if isinstance(after, torch.Tensor) else [y, *after]


@EVERY
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_text_may_be_cut_anywhere(name, dtype, limit):
    module, x = make(name, dtype=dtype), tokens(2, 7, dtype=dtype)
    want = run(module, x)
    for cut in range(8):
        begun, state = module(x[:, :cut])
        y, *after = run(module, x[:, cut:], state)
        for one, other in zip([torch.cat([begun, y], 1), *after], want, strict=True):
            close(one, other, limit)


@EVERY
def test_token_by_token_is_the_same(name):
    module, state, outputs = make(name, **DOUBLE), None, []
    x = tokens(2, 6, **DOUBLE)
    for token in x.split(1, 1):
        y, state = module(token, state)
        outputs.append(y)
    for one, other in zip([torch.cat(outputs, 1), *state], run(module, x), strict=True):
        close(one, other)


@EVERY
def test_gradients_go_through_cuts(name):
    module, x = make(name, **DOUBLE), tokens(2, 7, **DOUBLE)
    weights = [torch.randn_like(x)]

    def cut(x):
        begun, state = module(x[:, :2])
        return [torch.cat([begun, module(x[:, 2:], state)[0]], 1)]

    _, found = gradients(cut, module, [x], weights)
    _, want = gradients(module, module, [x], weights)
    for one, other in zip(found, want, strict=True):
        close(one, other, 1e-11)


@EVERY
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_texts_are_as_one_by_one(name, index_dtype):
    module, x, bounds = make(name, **DOUBLE), tokens(1, TOKENS, **DOUBLE), (0, 0, 2, 3, 9, 9)
    inside = module(tokens(5, 4, **DOUBLE))[1]
    for state in (None, inside):
        y, *after = run(module, x, state, torch.tensor(bounds, dtype=index_dtype))
        for text, (begin, end) in enumerate(itertools.pairwise(bounds)):
            own = None if state is None else tuple(each[text : text + 1] for each in state)
            found = y[:, begin:end], *(each[text : text + 1] for each in after)
            for one, other in zip(found, run(module, x[:, begin:end], own), strict=True):
                if other.numel():
                    close(one, other)


@EVERY
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_module_is_called_where_it_has_a_hook(name, packed, dtype):
    """Taps and norms too, which are run by functions of their parameters where they have none."""
    module, x = make(name, dtype=dtype), tokens(1 if packed else 2, TOKENS, dtype=dtype)
    if name == "Mamba2":
        module.norm_groups = 1
    bounds = torch.tensor((0, 0, 2, 3, 9)) if packed else None
    texts = 4 if packed else 2
    state = tuple(each.detach() for each in module(tokens(texts, 4, dtype=dtype))[1])
    made = run(module, x, state, bounds)
    weights = [torch.randn_like(y) for y in made]
    plain = gradients(lambda x: run(module, x, state, bounds), module, [x], weights)
    seen = set()
    for own in module.modules():
        own.register_forward_hook(lambda own, given, made: seen.add(own))
    hooked = gradients(lambda x: run(module, x, state, bounds), module, [x], weights)
    assert seen == {*module.modules()}
    for found, want in zip(hooked, plain, strict=True):
        for one, other in zip(found, want, strict=True):
            close(one, other, 1e-11 if dtype == torch.float64 else 0.1)
    assert not run(module, x[:, :0], state, None if bounds is None else 0 * bounds)[0].numel()


# ---- modules of other settings -----------------------------------------------------------------------------------

NORMS = {
    "KimiDeltaAttention": "o_norm", "GatedDeltaNet": "norm", "Mamba2": "norm",
    "GatedLinearAttention": "g_norm_swish_gate", "LinearAttention": "norm",
}  # fmt: skip
KINDS = {
    "no eps": lambda *sizes: torch.nn.RMSNorm(sizes[-1]),
    "no weight": lambda *sizes: torch.nn.RMSNorm(sizes[-1], eps=0.5, elementwise_affine=False),
    "another eps": lambda *sizes: torch.nn.RMSNorm(sizes[-1], eps=0.5),
    "all heads at once": lambda *sizes: torch.nn.RMSNorm(sizes, eps=0.5),
    "of layers": lambda *sizes: torch.nn.LayerNorm(sizes[-1]),
}


def as_where_called(layer, replaced, x, *more):
    """Check values and all gradients beside those of a layer whose replaced modules have hooks, and return them."""
    weights = [torch.randn_like(y) for y in run(layer, x, *more)]
    found = gradients(lambda x: run(layer, x, *more), layer, [x], weights)
    for own in replaced:
        own.register_forward_hook(lambda *_: None)
    want = gradients(lambda x: run(layer, x, *more), layer, [x], weights)
    for one, other in zip([*found[0], *found[1]], [*want[0], *want[1]], strict=True):
        close(one, other, 1e-11)
    return found


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_other_settings_are_as_where_they_are_called(name, kind):
    makers = {**MAKERS, "Mamba2": lambda **place: nn.Mamba2(WIDTH, 6, 5, 7, **place)}
    layer = stir((makers.get(name) or (lambda **place: getattr(nn, name)(WIDTH, 4, **place)))(**DOUBLE))
    x = tokens(2, TOKENS, **DOUBLE)
    before = run(layer, x)[0]
    size, heads = getattr(layer, NORMS[name]).normalized_shape[0], getattr(layer, "value_heads", 4)
    norm = stir(KINDS[kind](*((size,) if name == "Mamba2" else (heads, size))).double())
    setattr(layer, NORMS[name], norm)
    (y, *_), _ = as_where_called(layer, [norm], x)
    assert not torch.allclose(y, before)


class Adapter(torch.nn.Module):
    """Taps of a low rank beside those of a layer, which stay as they are; it has no sizes of its own."""

    def __init__(self, base):
        super().__init__()
        self.base, (width,) = base, base.kernel_size
        self.down = torch.nn.Conv1d(base.in_channels, 2, width, bias=False, **DOUBLE)
        self.up = torch.nn.Conv1d(2, base.out_channels, 1, bias=False, **DOUBLE)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def other_taps(size, width, **settings):
    return torch.nn.Conv1d(size, size, **{"kernel_size": width, "groups": size, "bias": False, **DOUBLE, **settings})


CONVOLUTIONS = {
    "KimiDeltaAttention": ("q_conv1d", "k_conv1d", "v_conv1d"), "GatedDeltaNet": ("conv1d",), "Mamba2": ("conv1d",),
}  # fmt: skip
TAPS = {
    "with a bias": lambda base: other_taps(len(base.weight), *base.kernel_size, bias=True),
    "one group": lambda base: other_taps(len(base.weight), *base.kernel_size, groups=1),
    "two groups": lambda base: other_taps(len(base.weight), *base.kernel_size, groups=2),
    "apart": lambda base: other_taps(len(base.weight), 2, dilation=base.kernel_size[0] - 1),
    "adapter": Adapter,
}


@pytest.mark.parametrize(("name", "own"), [(name, own) for name, several in CONVOLUTIONS.items() for own in several])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", TAPS)
def test_convolutions_of_other_settings_are_as_where_they_are_called(name, own, packed, kind):
    layer, x = make(name, **DOUBLE), tokens(1 if packed else 2, TOKENS, **DOUBLE)
    state = tuple(each.detach() for each in layer(tokens(3 if packed else 2, 4, **DOUBLE))[1])
    more = state, torch.tensor([0, 2, 3, 9]) if packed else None
    before = run(layer, x, *more)[0]
    taps = stir(TAPS[kind](getattr(layer, own)))
    setattr(layer, own, taps)
    (y, *_), grads = as_where_called(layer, [taps], x, *more)
    assert not torch.allclose(y, before)
    assert all(grad.abs().max() > 0 for grad in grads)


@EVERY
def test_adapters_of_convolutions_that_add_nothing_change_nothing(name):
    layer, x = make(name, **DOUBLE), tokens(2, TOKENS, **DOUBLE)
    want = run(layer, x)
    for own in CONVOLUTIONS[name]:
        setattr(layer, own, Adapter(getattr(layer, own)))
        torch.nn.init.zeros_(getattr(layer, own).up.weight)
    begun, state = layer(x[:, :1])
    y, *after = run(layer, x[:, 1:], state)
    for one, other in zip([torch.cat([begun, y], 1), *after], want, strict=True):
        close(one, other)


def test_all_convolutions_may_have_a_bias():
    layer, x = make("KimiDeltaAttention", **DOUBLE), tokens(2, TOKENS, **DOUBLE)
    taps = [TAPS["with a bias"](getattr(layer, own)) for own in CONVOLUTIONS["KimiDeltaAttention"]]
    for own, each in zip(CONVOLUTIONS["KimiDeltaAttention"], taps, strict=True):
        setattr(layer, own, each)
    state = layer(tokens(2, 4, **DOUBLE))[1]
    found, want = run(layer, x, state), kimi(layer, x, *state)
    for one, other in zip(found, want, strict=True):
        close(one, other, 1e-10)
    (found[0].sum()).backward()
    assert all(each.bias.grad.abs().max() > 0 for each in taps)


@pytest.mark.parametrize(("name", "own"), [(name, several[-1]) for name, several in CONVOLUTIONS.items()])
@pytest.mark.parametrize("settings", [{"dilation": (2,)}, {"stride": (2,)}, {"padding": (3,)}, {"kernel_size": (2,)}])
def test_convolutions_that_make_no_token_of_each_are_errors(name, own, settings):
    layer = make(name, **DOUBLE)
    size, width = getattr(layer, own).weight.shape[::2]
    setattr(layer, own, other_taps(size, **{"width": width, **settings}))
    message = rf"^{own} of \[2, {size}, {TOKENS + width - 1}\]: expected shape \[2, {size}, {TOKENS}\], got "
    with pytest.raises(ValueError, match=message):
        layer(tokens(2, TOKENS, **DOUBLE))


def test_norms_of_several_groups_may_have_no_weight():
    layer, x = make("Mamba2", **DOUBLE), tokens(2, TOKENS, **DOUBLE)
    torch.nn.init.ones_(layer.norm.weight)
    want = run(layer, x)
    layer.norm = torch.nn.RMSNorm(30, eps=layer.norm.eps, elementwise_affine=False)
    for one, other in zip(run(layer, x), want, strict=True):
        close(one, other)


# ---- dtypes ------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("wide", [False, True], ids=["all bfloat16", "decays float32"])
def test_bfloat16(name, wide):
    module = make(name, dtype=torch.bfloat16)
    if wide:
        for own in {"A_log", "dt_bias", "D"} & {*dict(module.named_parameters())}:
            getattr(module, own).data = getattr(module, own).data.float()
    exact = copy.deepcopy(module).double()
    x = tokens(2, TOKENS, dtype=torch.bfloat16)
    y, (last, state) = module(x)
    want, _ = exact(x.double())
    assert (y.dtype, last.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert (y.double() - want).norm() < 0.03 * want.norm()
    y.sum().backward()
    for own, parameter in module.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, own
        assert parameter.grad.isfinite().all(), own


@EVERY
def test_autocast(name):
    module, x = make(name), tokens(2, TOKENS)
    want, _ = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = module(x[:, :4])
        rest, _ = module(x[:, 4:], state)
    assert y.dtype == torch.bfloat16
    assert (torch.cat([y, rest], 1) - want).norm() < 0.03 * want.norm()
    rest.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (lambda: nn.KimiDeltaAttention(0), "width: "),
        (lambda: nn.KimiDeltaAttention(8, 2, 3), "value_heads: expected a multiple of key_heads 2, got 3"),
        (lambda: nn.KimiDeltaAttention(8, 2, lower_bound=0.5), "lower_bound: expected a negative number, got 0.5"),
        (lambda: nn.GatedDeltaNet(8, 2, 4, conv_width=1), "conv_width: expected 2 to 8, got 1"),
        (lambda: nn.GatedDeltaNet(8, 2, 4, 0), "key_size: "),
        (lambda: nn.Mamba2(8, head_size=5), r"head_size: expected a divisor of 2 \* width 16, got 5"),
        (lambda: nn.Mamba2(8, 3, groups=2), "groups: expected a divisor of heads 3, got 2"),
        (lambda: nn.Mamba2(8, 2, 4, norm_groups=3), r"norm_groups: expected a divisor of heads \* head_size 8, got 3"),
        (lambda: nn.Mamba2(8, 2, 4, state_size=0), "state_size: "),
    ],
)
def test_sizes_that_do_not_fit(maker, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        maker()


@EVERY
def test_input_that_does_not_fit(name):
    module = make(name)
    x = tokens(2, 3)
    last, state = module(x)[1]
    with pytest.raises(ValueError, match=r"^x: expected shape \[batch, tokens, 24\], got \[2, 24\]"):
        module(x[:, 0])
    with pytest.raises(ValueError, match=r"^x: expected shape \[batch, tokens, 24\], got \[2, 3, 5\]"):
        module(x[..., :5])
    with pytest.raises(TypeError, match="^x: expected a torch.Tensor, got list"):
        module([1])
    with pytest.raises(TypeError, match="^state: expected two torch.Tensor, got Tensor"):
        module(x, state)
    with pytest.raises(ValueError, match=r"^state\[0\]: "):
        module(x, (last[:1], state))
    with pytest.raises(ValueError, match=r"^state\[1\]: "):
        module(x, (last, state[:, :-1]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        module(x, None, torch.tensor([0, 2, 3]))


# ---- steps over a pool -------------------------------------------------------------------------------------------

DECODING = MAKERS | {
    "GatedLinearAttention": lambda **place: nn.GatedLinearAttention(WIDTH, 3, 9, 15, **place),
    "LinearAttention": lambda **place: nn.LinearAttention(WIDTH, 3, 9, 15, **place),
}
CHANGES = {
    "none": lambda layer: None,
    "a hook": lambda layer: layer.register_forward_hook(lambda module, given, made: (made[0] * 2, made[1])),
    "another convolution": lambda layer: replace_taps(layer),
}


class Doubled(torch.nn.Conv1d):
    def forward(self, x):
        return super().forward(x) * 2


def replace_taps(layer):
    for name in layer._taps():
        getattr(layer, name).__class__ = Doubled


def listed(state):
    return [state] if isinstance(state, torch.Tensor) else list(state)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("name", DECODING)
def test_a_step_is_a_call_whose_states_are_in_a_pool(name, has_slots, dtype, change):
    layer = stir(DECODING[name](dtype=dtype))
    CHANGES[change](layer)
    x = tokens(3, 5, dtype=dtype)
    slots = torch.tensor([4, 0, 2]) if has_slots else None
    rows = [4, 0, 2] if has_slots else [0, 1, 2]
    with torch.no_grad():
        _, state = layer(x[:, :1])
        pool = [torch.randn(6, *each.shape[1:]).to(each.dtype) for each in listed(state)]
        for own, each in zip(pool, listed(state), strict=True):
            own[rows] = each
        before = [own.clone() for own in pool]
        for place in range(1, 5):
            want, state = layer(x[:, place : place + 1], state)
            found = layer.step(x[:, place], pool[0] if len(pool) == 1 else tuple(pool), slots)
            close(found, want[:, 0], 2e-6)  # a CPU rounds rows with gaps in another way
    others = [i for i in range(6) if i not in rows]
    for own, each, kept in zip(pool, listed(state), before, strict=True):
        close(own[rows], each, 2e-6)
        assert torch.equal(own[others], kept[others])


@pytest.mark.parametrize("change", ["none", "a hook"])
@pytest.mark.parametrize("name", DECODING)
def test_padding_of_a_step_changes_no_state(name, change):
    layer = stir(DECODING[name]())
    CHANGES[change](layer)
    x = tokens(3)
    shapes = [each.shape[1:] for each in listed(layer(x.unsqueeze(1))[1])]
    pool = [torch.randn(4, *shape) for shape in shapes]
    alone, before = [own.clone() for own in pool], [own.clone() for own in pool]
    y = layer.step(x, pool[0] if len(pool) == 1 else tuple(pool), torch.tensor([0, 2, 0]), null_index=0)
    (want,) = layer.step(x[1:2], alone[0] if len(alone) == 1 else tuple(alone), torch.tensor([2]))
    close(y[1], want, 1e-5)
    for own, one, kept in zip(pool, alone, before, strict=True):
        close(own, one, 1e-5)
        assert torch.equal(own[[0, 1, 3]], kept[[0, 1, 3]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.zeros(2, 1, WIDTH)}, "x: expected shape [batch, 24], got [2, 1, 24]"),
        ({"x": torch.zeros(2, 7)}, "x: expected shape [batch, 24], got [2, 7]"),
        ({"state": torch.zeros(4, 54, 2)}, "state: expected a tuple of 2 tensors, got Tensor"),
        (
            {"state": (torch.zeros(4, 53, 2), torch.zeros(4, 6, 7, 5))},
            "state[0]: expected shape [4, 58, 2], got [4, 53",
        ),
        (
            {"state": (torch.zeros(4, 58, 2), torch.zeros(4, 6, 7, 4))},
            "state[1]: expected shape [4, 6, 7, 5], got [4, 6",
        ),
        (
            {"state": (torch.zeros(4, 58, 2), torch.zeros(4, 6, 7, 5, dtype=torch.int64))},
            "state[1]: expected floating-point numbers, got torch.int64",
        ),
        ({"state": None}, "state: expected memory of a pool on cpu, got None"),
        ({"state": (torch.zeros(4, 58, 2), None)}, "state: expected memory of a pool on cpu, got None"),
        (
            {"state": (torch.zeros(4, 58, 2), torch.zeros(4, 6, 7, 5, device="meta"))},
            "state: expected memory of a pool on cpu, got meta",
        ),
        ({"state": (torch.zeros(4, 58, 2), torch.tensor(0.0))}, "state[1]: expected shape [6, 7, 5], got []"),
        ({"slots": torch.tensor([1])}, "state_indices: expected shape [2], a slot for each row, got [1]"),
        ({"slots": torch.tensor([1, 4])}, "state_indices: expected slots below 4"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(given, message):
    layer = MAKERS["KimiDeltaAttention"]()
    pool = torch.zeros(4, 58, 2), torch.zeros(4, 6, 7, 5)
    arguments = {"x": tokens(2), "state": pool, "slots": torch.tensor([1, 2]), **given}
    with pytest.raises((TypeError, ValueError)) as raised:
        layer.step(**arguments)
    assert message in str(raised.value)
    given_state = () if arguments["state"] is None else arguments["state"]
    held = [each for each in (*given_state, *pool) if each is not None and not each.is_meta]
    assert not any(each.any() for each in held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "sizes", "launches"),
    [("KimiDeltaAttention", (2, 2, 8), 5), ("GatedDeltaNet", (2, 4, 8, 8), 6), ("Mamba2", (4, 8, 8), 6)],
)
def test_a_step_is_at_most_six_launches_beside_products(on_gpu, monkeypatch, dtype, name, sizes, launches):
    layer, slots = getattr(nn, name)(WIDTH, *sizes, dtype=dtype), torch.tensor([1, 4, 2])
    with torch.no_grad():
        _, pool = layer(tokens(6, 2, dtype=dtype))
    x = tokens(3, dtype=dtype)
    layer.step(x, pool, slots, 0)
    on_gpu.take()
    with Launching(monkeypatch) as noted:
        layer.step(x, pool, slots, 0)
    ours = [launch.template for launch in on_gpu.take()]
    assert ours[:2] == ["layer_convolution_update", "update_rules"]
    assert noted.products >= 2
    assert len(ours) + len(noted.others) == launches, (ours, noted.others)
