"""Models of transformers with short convolutions, KDA, the gated delta rule or Mamba-2, beside their own code."""

import gc
import importlib
import inspect
import logging
import os
import sys
import types
import weakref

import pytest
import torch
from stub_driver import Launching
from torch import nn

import rwkv_jit
from rwkv_jit import compat
from rwkv_jit.compat import hf, hf_layers, hf_models
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.nn import common as nn_common

transformers = pytest.importorskip("transformers")

WORDS, T = 61, 11
MODEL = dict(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=128,
)  # fmt: skip
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6, head_dim=8
)
EXPERTS = dict(num_experts=4, moe_intermediate_size=16)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=4)
KIMI = dict(
    linear_num_heads=2, linear_head_dim=8, num_experts_per_token=2, kv_lora_rank=8, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4,
)  # fmt: skip
MODELS = {
    "qwen3_next": (
        "Qwen3Next",
        MODEL | DELTA | LINEAR | EXPERTS | dict(num_experts_per_tok=2, shared_expert_intermediate_size=16),
    ),
    "qwen3_5": ("Qwen3_5", MODEL | DELTA | LINEAR),
    "olmo_hybrid": ("OlmoHybrid", MODEL | DELTA | LINEAR),
    "kimi_linear": ("KimiLinear", MODEL | LINEAR | EXPERTS | KIMI),
    "mamba2": (
        "Mamba2",
        dict(vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, state_size=8, num_heads=6, head_dim=8, n_groups=2,
             chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=None),
    ),
    "bamba": ("Bamba", MODEL | MAMBA | {"attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronH",
        MODEL | dict(mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=8, chunk_size=4, head_dim=8,
                     layers_block_type=["mamba", "attention"]),
    ),
    "falcon_h1": ("FalconH1", MODEL | MAMBA | {"mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MODEL | MAMBA | dict(layer_types=["mamba", "attention"], num_local_experts=2, num_experts_per_tok=1,
                             shared_intermediate_size=16),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def restored():
    yield
    compat.uninstall()


@pytest.fixture(scope="module", autouse=True)
def without_fla():
    """The files of models as they are where FLA is not installed: it is looked for when they are imported."""
    there = {name: sys.modules.pop(name, None) for name in compat.MODELS}
    kept = {name: x for name, x in sys.modules.items() if name.split(".")[0] == "fla"}
    for name in kept:
        del sys.modules[name]
    sys.modules["fla"] = None
    yield
    del sys.modules["fla"]
    sys.modules.update(kept)
    for name, module in there.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def file_of(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def model_of(name, **more):
    """A random model in which all that is learned counts."""
    kind, options = MODELS[name]
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(configs, f"{kind}TextConfig", None) or getattr(configs, f"{kind}Config")
    torch.manual_seed(7)
    model = getattr(file_of(name), f"{kind}ForCausalLM")(config(**options, **more))
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return model


def words(*shape):
    return torch.randint(2, WORDS, shape)


def run(model, text, mask=None):
    """Logits and gradients of training, and what is generated."""
    out = model.train()(text, attention_mask=mask, labels=text)
    grads = torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True)
    generated = model.eval().generate(text, attention_mask=mask, max_new_tokens=4, do_sample=False)
    return [out.logits.detach(), *(x for x in grads if x is not None)], generated.tolist()


def counted(monkeypatch):
    """The names of ours that run from now on."""
    calls, find = [], hf_models.find

    def counting(name):
        function = find(name)

        def call(*arguments, **options):
            result = function(*arguments, **options)
            calls.append(name)
            return result

        return call

    monkeypatch.setattr(hf_models, "find", counting)
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "padded"), [*((x, False) for x in MODELS), ("qwen3_next", True), ("mamba2", True)])
def test_models_train_and_generate_the_same(monkeypatch, name, padded):
    model, text = model_of(name), words(2, T)
    mask = torch.ones_like(text)
    if padded:
        mask[0, :3] = 0
    want, chosen = run(model, text, mask)
    calls = counted(monkeypatch)
    names = hf.patch(model)
    assert all(x.startswith(f"{file_of(name).__name__}.") for x in names)
    steps = [x for x in names if x.endswith(".forward")]
    assert len(steps) == (name not in ("qwen3_5", "olmo_hybrid", "falcon_h1"))
    assert len(names) == 4 + len(steps)
    ours, step = [], nn_common.Decoding.step
    monkeypatch.setattr(nn_common.Decoding, "step", lambda *given: ours.append(given) or step(*given))
    found, generated = run(model, text, mask)
    ran = {f"{file_of(name).__name__}.{x}" for n in set(calls) for x in hf_models.FUNCTIONS[n].called}
    updates = {x for x in names if "update" in x or "recurrent" in x}
    if steps:  # all tokens but the first are steps, of each layer of the kind
        assert len(ours) == 3 * [*map(type, model.modules())].count(getattr(file_of(name), steps[0].split(".")[-2]))
        assert not ran & updates
    assert ran >= set(names) - set(steps) - (updates if steps else set())
    assert generated == chosen
    for x, y in zip(found, want, strict=True):
        assert (x - y).norm() <= 1e-3 * y.norm() + 1e-6


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba2"])
def test_sixteen_bits(monkeypatch, name):
    model, text = model_of(name), words(2, T)
    exact = model(text).logits.detach()
    model.to(torch.bfloat16)
    theirs = model(text).logits.detach().float()
    calls = counted(monkeypatch)
    hf.patch(model)
    found = model(text).logits
    assert calls
    limit = 0.03 * exact.norm() + 2 * (theirs - exact).norm()  # their own rounding comes on top
    assert (found - exact).norm() <= limit


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba2"])
def test_parts_with_a_cache_are_the_whole(name):
    model, text = model_of(name).eval(), words(2, T)
    hf.patch(model)
    with torch.no_grad():
        want, cache, found = model(text).logits, None, []
        for part in text.split([5, 1, 5], 1):
            key = "cache_params" if name == "mamba2" else "past_key_values"
            out = model(part, **{key: cache}, use_cache=True)
            cache = out[key]
            found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("qwen3_next", "GatedDeltaNet"), ("mamba2", "Mixer"), ("bamba", "Mixer")])
def test_packed_texts_are_texts_alone(name, kind):
    """Which transformers' own code in plain torch refuses."""
    model = model_of(name).eval()
    (layer, *_) = (x for x in model.modules() if type(x).__name__.endswith(kind))
    x = torch.randn(1, T, model.config.hidden_size)
    bounds = torch.tensor([0, 4, T], dtype=torch.int32)
    packed = {"seq_idx": torch.tensor([[0] * 4 + [1] * (T - 4)], dtype=torch.int32), "cu_seq_lens_q": bounds}
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        layer(x, **packed)
    hf.patch(model)
    want = torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1)
    assert (layer(x, **packed) - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "kind", "launches"),
    [("qwen3_next", "GatedDeltaNet", 6), ("kimi_linear", "DeltaAttention", 4), ("mamba2", "Mixer", 6)],
)
def test_a_token_of_a_layer_is_at_most_six_launches_beside_products(
    request, monkeypatch, name, kind, launches, dtype
):  # fmt: skip
    model = model_of(name).to(dtype)
    (layer, *_) = (x for x in model.modules() if type(x).__name__.endswith(kind))
    hf.patch(model)
    ours = hf_layers._twin(hf_layers.LAYERS[type(layer).__name__], layer)
    heads, size = (ours.heads, ours.head_size) if name == "mamba2" else (ours.value_heads, ours.key_size)
    last = ours.state_size if name == "mamba2" else ours.value_size
    states = torch.randn(2, layer.conv_dim, layer.conv_kernel_size).to(dtype), torch.randn(2, heads, size, last)
    cache = types.SimpleNamespace(
        get_conv_state=lambda i: states[0], get_recurrent_state=lambda i: states[1], is_recording_past=lambda i: False
    )
    on_gpu, x = request.getfixturevalue("on_gpu"), torch.randn(2, 1, model.config.hidden_size).to(dtype)
    with torch.no_grad():
        layer(x, cache_params=cache)
        on_gpu.take()
        with Launching(monkeypatch) as noted:
            assert layer(x, cache_params=cache).shape == x.shape
    templates = [launch.template for launch in on_gpu.take()]
    assert templates[:2] == ["layer_convolution_update", "update_rules"]
    assert len(templates) + len(noted.others) == launches, (templates, noted.others)


def test_layers_with_hooks_or_masks_decode_by_their_code(monkeypatch):
    """What a step would not call, or not read."""
    model, text = model_of("mamba2").eval(), words(2, 5)
    layer = model.backbone.layers[0].mixer
    hf.patch(model)
    monkeypatch.setattr(nn_common.Decoding, "step", lambda *given: pytest.fail("it is a step"))
    for change in (lambda: layer.norm.register_forward_hook(lambda *given: None), None):
        with torch.no_grad():
            cache = model(text, use_cache=True).cache_params
            handle = change() if change else None
            x, more = torch.randn(2, 1, model.config.hidden_size), {} if change else {"seq_idx": torch.zeros(2, 1)}
            if change:
                assert layer(x, cache_params=cache, **more).shape == x.shape
                handle.remove()
            else:
                assert hf_layers._states(hf_layers.LAYERS["Mamba2Mixer"], layer, x, cache, None, more) is None
                assert hf_layers._states(hf_layers.LAYERS["Mamba2Mixer"], layer, x, cache, None, {}) is not None
                mask = torch.ones(2, 6)
                assert hf_layers._states(hf_layers.LAYERS["Mamba2Mixer"], layer, x, cache, mask, {}) is None


def test_decoding_that_wants_gradients_stays_theirs(caplog):
    """Through a state that changes in place there are none."""
    model, text = model_of("mamba2").eval(), words(1, 5)
    hf.patch(model)
    cache = model(text, use_cache=True).cache_params
    with caplog.at_level(logging.INFO, "rwkv_jit"):
        model(words(1, 1), cache_params=cache, use_cache=True)
    said = "stays as it was: a gradient through states that change in place is not supported"
    for called in ("mamba2_selective_state_update", "causal_conv1d_update"):
        assert f"{file_of('mamba2').__name__}.{called} {said}" in caplog.text


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_models_that_have_short_convolutions_alone(monkeypatch, name):
    sizes = {"lfm2": MODEL | {"layer_types": ["conv", "full_attention"]}}.get(
        name, dict(vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, state_size=8, pad_token_id=0, bos_token_id=1,
                   eos_token_id=None)
    )  # fmt: skip
    monkeypatch.setitem(MODELS, name, (name.capitalize(), sizes))
    model, text = model_of(name), words(2, T)
    want, chosen = run(model, text)
    calls = counted(monkeypatch)
    assert hf.patch(model) == [f"{file_of(name).__name__}.causal_conv1d_{x}" for x in ("fn", "update")]
    found, generated = run(model, text)
    assert set(calls) == {"causal_conv1d_fn", "causal_conv1d_update"}
    assert generated == chosen
    for x, y in zip(found, want, strict=True):
        assert (x - y).norm() <= 1e-3 * y.norm() + 1e-6


def test_patch_of_a_file_and_back():
    module = file_of("qwen3_next")
    theirs = module.torch_chunk_gated_delta_rule
    for _ in range(2):
        names = hf.patch(module)
        assert module.torch_chunk_gated_delta_rule.__wrapped__ is theirs
    called = "torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule causal_conv1d_fn causal_conv1d_update"
    called += " Qwen3NextGatedDeltaNet.forward"
    assert names == [f"{module.__name__}.{x}" for x in called.split()]
    compat.uninstall()
    assert module.torch_chunk_gated_delta_rule is theirs


@pytest.mark.parametrize(
    ("name", "owner", "module"),
    [("mamba2", "Mamba2Mixer", "norm"), ("bamba", "BambaMixer", "norm"), ("qwen3_next", "GatedDeltaNet", "norm"),
     ("kimi_linear", "DeltaAttention", "o_norm"), ("kimi_linear", "DeltaAttention", "forget_gate"),
     ("mamba2", "Mamba2Mixer", "conv1d")],
)  # fmt: skip
def test_other_modules_in_the_place_of_those_that_are_read_run(monkeypatch, name, owner, module):
    """Subclasses, classes with other attributes, and hooks."""
    model, text = model_of(name).eval(), words(2, 5)
    (layer, *_) = (x for x in model.modules() if type(x).__name__.endswith(owner))
    read, ran = getattr(layer, module), []

    class Other(type(read)):
        def forward(self, *given):
            ran.append(given)
            return super().forward(*given)

    class Fused(nn.Module):  # as those of FLA, whose epsilon has another name
        def __init__(self):
            super().__init__()
            self.weight, self.eps = read.weight, 1e-5

        def forward(self, *given):
            ran.append(given)
            return read(*given)

    changes = [lambda: setattr(read, "__class__", Other)] if module != "conv1d" else []
    if module.endswith("norm"):
        changes.append(lambda: setattr(layer, module, Fused()))
    changes.append(lambda: (setattr(read, "__class__", Other.__base__), setattr(layer, module, read),
                            read.register_forward_hook(lambda *given: ran.append(given))))  # fmt: skip
    hf.patch(model)
    monkeypatch.setattr(nn_common.Decoding, "step", lambda *given: pytest.fail("it is a step"))
    entry = hf_layers.LAYERS[type(layer).__name__]
    with torch.no_grad():
        made = model(text, use_cache=True)
        cache = made.cache_params if name == "mamba2" else made.past_key_values
        x = torch.randn(2, 1, model.config.hidden_size)
        assert hf_layers._states(entry, layer, x, cache, None, {}) is not None
        for change in changes:
            change()
            ran.clear()
            assert layer(x, cache_params=cache).shape == x.shape
            assert ran or module == "conv1d"  # which transformers reads too


def test_layers_that_are_called_otherwise_keep_their_code():
    """Those of remote code and of older versions have the names too, and caches that are other classes."""

    class Mamba2Mixer(nn.Module):
        def forward(self, hidden_states, cache_params=None, cache_position=None, attention_mask=None):
            return cache_position

    module = types.ModuleType("modeling_of_the_hub")
    module.Mamba2Mixer, module.causal_conv1d_fn = Mamba2Mixer, theirs
    assert hf.patch(module) == ["modeling_of_the_hub.causal_conv1d_fn"]
    assert Mamba2Mixer()(torch.zeros(1, 1, 8), object(), 3) == 3

    layer, x = model_of("mamba2").backbone.layers[0].mixer, torch.zeros(1, 1, 8)
    with torch.no_grad():
        assert hf_layers._states(hf_layers.LAYERS["Mamba2Mixer"], layer, x, types.SimpleNamespace(), None, {}) is None


class Older(nn.Module):
    """A layer that has its functions itself, as in older versions."""

    def __init__(self):
        super().__init__()
        self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = theirs

    def forward(self, q, k, v, g, beta):
        return self.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False)[0]


def theirs(*arguments, **options):
    return ("theirs",)


def test_layers_that_have_the_functions_themselves():
    model = nn.Sequential(nn.Identity(), Older())
    assert hf.patch(model) == ["1.chunk_gated_delta_rule", "1.recurrent_gated_delta_rule"]
    q, k, v, g, beta = *torch.randn(3, 2, T, 2, 8), -torch.rand(2, T, 2), torch.rand(2, T, 2)
    torch.testing.assert_close(model[1](q, k, v, g, beta), rwkv_jit.gated_delta_rule_ref(q, k, v, g, beta)[0])
    v_first = {"output_final_state": True, "transpose_state_layout": True, "cache_position": 3}
    assert model[1].chunk_gated_delta_rule(q, k, v[..., :5], g, beta, **v_first)[1].shape == (2, 2, 5, 8)
    layer, gone = model[1], weakref.ref(model[1])
    compat.uninstall()
    assert layer.chunk_gated_delta_rule is theirs
    hf.patch(layer)
    del model, layer
    gc.collect()
    assert gone() is None


def test_what_the_kernels_cannot_do_stays_theirs():
    module = types.ModuleType("transformers_modules.mamba")
    module.selective_state_update = theirs
    hf.patch(module)
    x = torch.randn(2, 6)
    assert module.selective_state_update(torch.zeros(2, 6, 8), x, x, torch.zeros(6, 8), x, x) == ("theirs",)
    module.selective_state_update = None  # where the package is missing
    with pytest.raises(ValueError, match=r"target: expected a module with .* or chunk_kda or .*, got transformers_m"):
        hf.patch(module)


def test_options_that_ours_do_not_know_are_not_read():
    """Models hand on what they were given."""
    x, dt, A, b = torch.randn(2, T, 4, 6), torch.rand(2, T, 4), -torch.rand(4), torch.randn(2, T, 2, 8)
    found = hf_models.find("mamba_chunk_scan_combined")(x, dt, A, b, b, chunk_size=4, use_cache=False, logits_to_keep=0)
    torch.testing.assert_close(found, rwkv_jit.ssd_ref(x, dt, A, b, b)[0])


# ---- install -----------------------------------------------------------------------------------------------------

ORDERS = """
import os, sys
from rwkv_jit import compat
if "before" in sys.argv:
    compat.install()
child = os.fork()
if not child:
    sys.modules["fla"] = None
import transformers.models.qwen3_next.modeling_qwen3_next as qwen
import transformers.models.mamba2.modeling_mamba2 as mamba
def is_ours(function):
    return getattr(function, "__code__", is_ours.__code__).co_filename.endswith("falling_back.py")
def ours():
    (answer,) = {
        is_ours(x)
        for x in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule, mamba.mamba2_chunk_scan)
    }
    return answer
if "after" in sys.argv:
    assert not ours()
    compat.install()
assert ours()
compat.install()
compat.uninstall()
assert not ours()
import transformers.models.kimi_linear.modeling_kimi_linear as kimi
assert not is_ours(kimi.chunk_kimi_delta_attention)
compat.install()
assert ours()
assert is_ours(kimi.chunk_kimi_delta_attention)
import torch
q, g, beta = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
import rwkv_jit
found = qwen.torch_chunk_gated_delta_rule(q, q, q, g=g, beta=beta, cu_seqlens=None, output_attentions=True)[0]
torch.testing.assert_close(found, rwkv_jit.gated_delta_rule_ref(q, q, q, g, beta)[0])
assert not child or os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("when", ["before", "after"])
def test_install_in_every_order(child, when):
    """Of our functions and the import of models, where FLA is installed and where it is not."""
    child(ORDERS, when, after="transformers.modeling_utils")


def test_every_file_of_transformers_that_there_is_is_known():
    from pathlib import Path

    known = set(compat.MODELS)
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        asks = any(f'fallback("{name}"' in text for name in hf_models.FUNCTIONS)
        assert asks == (f"transformers.models.{path.parent.name}.{path.stem}" in known)


# ---- layers for kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba2"])
def test_kernels_puts_ours_into_models(name):
    """The arguments of our layers are those of transformers' functions, or `kernels` would refuse them."""
    kernels = pytest.importorskip("kernels")
    functions = {
        x: f for x, f in vars(file_of(name)).items() if getattr(f, "kernel_layer_name", None) in hf_models.FUNCTIONS
    }
    for function in functions.values():
        wanted = inspect.signature(type(function).forward).parameters.values()
        layer = getattr(importlib.import_module("rwkv_jit.compat.hf_kernels").layers, function.kernel_layer_name)
        assert [(x.name, x.kind) for x in inspect.signature(layer.forward).parameters.values()] == [
            (x.name, x.kind) for x in wanted
        ]
    assert len(functions) == 4
    model, text = model_of(name), words(2, T)
    want, chosen = run(model, text)
    kept = {x: f.__dict__.get("forward") for x, f in functions.items()}
    with kernels.use_kernel_mapping(hf.kernel_mapping(), inherit_mapping=False):
        model.set_use_kernels(True)
    try:
        for function in functions.values():
            assert function.forward.__module__ == "rwkv_jit.compat.hf_kernels.layers"
        found, generated = run(model, text)
    finally:
        for x, f in functions.items():
            f.__dict__.pop("forward", None) if kept[x] is None else f.__dict__.update(forward=kept[x])
    assert generated == chosen
    for x, y in zip(found, want, strict=True):
        assert (x - y).norm() <= 1e-3 * y.norm() + 1e-6


def test_a_layer_gives_back_what_the_kernels_cannot_do():
    kernels = pytest.importorskip("kernels")
    arguments = hf_models.FUNCTIONS["selective_state_update"].arguments

    def original(*given, **named):
        return "theirs"

    original.__signature__ = inspect.signature(eval(f"lambda {arguments.replace(' ', ', ')}: None"))
    function = kernels.use_kernel_forward_from_hub("selective_state_update")(original)
    model = kernels.use_kernelized_func(function)(type("Layer", (nn.Identity,), {}))()
    with kernels.use_kernel_mapping(hf.kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    x = torch.randn(2, 6)
    given = torch.zeros(2, 6, 8), x, x, torch.zeros(6, 8), x, x
    assert function(*given) == "theirs"
    alone = importlib.import_module("rwkv_jit.compat.hf_kernels").layers.selective_state_update()
    with pytest.raises(UnsupportedConfigError, match="steps or rates of each channel are not supported"):
        alone(*given)
