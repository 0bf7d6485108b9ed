"""Megatron-core's gated delta rules on these ops, with layers that call them as its own do."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rwkv_jit
from rwkv_jit import compat
from rwkv_jit.compat import megatron

B, T, H, HV, K, V = 2, 9, 2, 4, 8, 6


def rows(*shape):
    return torch.randn(*shape) / 2


def theirs(q, k, v, g, *gates, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs):
    """What a layer has before."""
    return "theirs", kwargs.get("cp_context")


class Layer(nn.Module):
    """A layer as Megatron-core's are: it is told of its variant while it is made, and calls what it was given then."""

    def __init__(self, variant, cp_context=None):
        super().__init__()
        self.variant, self.cp_context = variant, cp_context
        self.A_log, self.dt_bias = nn.Parameter(rows(HV)), nn.Parameter(rows(HV * K))
        self._setup_variant_attrs()

    def _setup_variant_attrs(self):
        self.gated_delta_rule = theirs

    def forward(self, q, k, v, g, *gates, cu_seqlens=None):
        inputs = dict(q=q, k=k, v=v, g=g) | dict(zip({"gdn2": "bw"}.get(self.variant, ["beta"]), gates, strict=True))
        if self.variant == "kda":
            inputs |= {"A_log": self.A_log, "dt_bias": self.dt_bias, "use_gate_in_kernel": True}
            inputs |= {"safe_gate": True, "lower_bound": -5.0, "cp_context": self.cp_context}
        out, _ = self.gated_delta_rule(
            **inputs, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=cu_seqlens
        )
        return out


@pytest.fixture(autouse=True)
def restored():
    yield
    compat.uninstall()


def inputs_of(variant, batch=B):
    q, k, v, g = (rows(batch, T, *n) for n in ((H, K), (H, K), (HV, V), (HV, K)))
    if variant == "gdn2":
        return q, k, v, -g.abs(), torch.rand(batch, T, HV, K), torch.rand(batch, T, HV, V)
    return q, k, v, g if variant == "kda" else -g.abs()[..., 0], torch.rand(batch, T, HV)


def reference(layer, inputs, **options):
    q, k, v, g, *gates = (x.double() for x in inputs)
    if layer.variant == "gdn2":
        return rwkv_jit.gated_delta_rule2_ref(q, k, v, g, *gates, **options)[0]
    if layer.variant == "gdn":
        return rwkv_jit.gated_delta_rule_ref(q, k, v, g, *gates, **options)[0]
    A, bias = layer.A_log.double()[:, None], layer.dt_bias.double().view(HV, K)
    return rwkv_jit.kda_ref(q, k, v, -5 * torch.sigmoid(A.exp() * (g + bias)), *gates, **options)[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["gdn", "kda", "gdn2"])
def test_a_layer_of_each_variant(variant, packed):
    layer = Layer(variant)
    assert megatron.patch(layer) == [""]
    inputs = [x.requires_grad_() for x in inputs_of(variant, 1 if packed else B)]
    options = {"cu_seqlens": torch.tensor([0, 4, T], dtype=torch.int32)} if packed else {}
    found, want = layer(*inputs, **options), reference(layer, inputs, **options)
    assert (found - want).norm() <= 1e-5 * want.norm()
    wanted = [*inputs, *(layer.parameters() if variant == "kda" else ())]
    dy = torch.randn_like(found)
    of = torch.autograd.grad(want, wanted, dy.double())
    for x, y in zip(torch.autograd.grad(found, wanted, dy), of, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_states_and_norms():
    q, k, v, g, beta = inputs_of("gdn")
    state = rows(B, HV, K, V)
    options = {"initial_state": state, "output_final_state": True, "scale": 0.3}
    found = megatron.gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **options)
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    torch.testing.assert_close(found, rwkv_jit.gated_delta_rule_ref(q, k, v, g, beta, **options), rtol=1e-4, atol=1e-5)


def test_layers_of_a_model_and_back():
    model = nn.ModuleDict({"first": Layer("gdn"), "mlp": nn.Linear(2, 2), "second": Layer("kda")})
    for _ in range(2):
        assert megatron.patch(model) == ["first", "second"]
        assert model["first"].gated_delta_rule.__wrapped__ is theirs
    copied = copy.deepcopy(model)
    compat.uninstall()
    assert model["first"].gated_delta_rule is model["second"].gated_delta_rule is theirs
    inputs = inputs_of("gdn")
    torch.testing.assert_close(copied["first"](*inputs).double(), reference(copied["first"], inputs))


def test_a_patched_model_is_not_kept():
    model = Layer("gdn")
    megatron.patch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_the_kernels_cannot_do_stays_theirs(caplog):
    layer, context = Layer("kda", cp_context=object()), None
    megatron.patch(layer)
    with caplog.at_level(logging.INFO, "rwkv_jit"):
        for _ in range(2):
            assert layer(*inputs_of("kda")) == "theirs"
    assert caplog.messages == ["gated_delta_rule stays as it was: cp_context of object is not supported"]
    layer.cp_context = context
    assert layer(*inputs_of("kda")).shape == (B, T, HV, V)


def test_bad_input_is_named():
    q, k, v, g, beta = inputs_of("gdn")
    with pytest.raises(ValueError, match="beta: expected a tensor, or b and w, got None"):
        megatron.gated_delta_rule(q, k, v, g)
    with pytest.raises(ValueError, match="w: expected a tensor beside b, got None"):
        megatron.gated_delta_rule(q, k, v, g, b=torch.zeros(B, T, HV, K))
    with pytest.raises(ValueError, match=r"beta: expected shape .*, got \[2, 9, 3\]"):
        megatron.gated_delta_rule(q, k, v, g, beta[..., :3])
    with pytest.raises(ValueError, match="A_log: expected a tensor with use_gate_in_kernel, got None"):
        megatron.gated_delta_rule(q, k, v, g, beta, use_gate_in_kernel=True)
    with pytest.raises(TypeError, match=r"target: expected a torch\.nn\.Module, got 3"):
        megatron.patch(3)
    with pytest.raises(ValueError, match="expected a model with layers that have gated_delta_rule, got Linear"):
        megatron.patch(nn.Linear(2, 2))
