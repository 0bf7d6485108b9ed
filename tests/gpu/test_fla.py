"""FLA on a GPU: its functions on these kernels against float64, and its layers beside its own kernels."""

import pytest
import torch

autotuner = pytest.importorskip("triton.runtime.autotuner")
_init = autotuner.Autotuner.__init__
# FLA's tuners choose among dozens of kernels each, which takes minutes. Any of them is right.
autotuner.Autotuner.__init__ = lambda self, fn, names, configs, *more, **named: _init(
    self, fn, names, configs[:2], *more, **named
)
pytest.importorskip("fla")

from fla.layers import (  # noqa: E402
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    MultiScaleRetention,
    RWKV6Attention,
    RWKV7Attention,
)
from fla.layers.simple_gla import SimpleGatedLinearAttention  # noqa: E402
from test_compat_fla import (  # noqa: E402, F401
    asked,
    installed,
    test_channel_mixing,
    test_dplr,
    test_gla,
    test_gla_without_gates,
    test_normalized_linear_attention,
    test_packed_sequences,
    test_packed_texts_and_padding_in_front_are_texts_alone,
    test_parts_with_a_cache_are_the_whole,
    test_rwkv4,
    test_rwkv6,
    test_rwkv7,
    test_time_mixing,
)
from test_fla_family import (  # noqa: E402, F401
    call,
    test_against_functions_of_fla,
    test_decays_of_the_recurrent_function,
    test_delta_rule,
    test_fixed_decays,
    test_gated_delta_rule,
    test_gates_of_fla,
    test_gdn2,
    test_kda,
    test_packed_sequences_and_what_changes_nothing,
    test_simple_gla,
    test_states_before_chunks,
    test_tokens_behind_the_last_sequence_are_zeros,
)

from rwkv_jit.compat import fla as ours  # noqa: E402

WIDTH = 128


@pytest.fixture(autouse=True)
def on_a_gpu():
    with torch.device("cuda"):
        yield


def run(layer, x, dy):
    """Y and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)[0]
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y, wanted, dy, allow_unused=True)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (RWKV7Attention, {"head_dim": 64, "layer_idx": 0, "num_hidden_layers": 3}),
        (RWKV7Attention, {"head_dim": 64, "layer_idx": 0, "num_hidden_layers": 3, "fuse_norm": True}),
        (RWKV6Attention, {"num_heads": 2}),
        (GatedLinearAttention, {"num_heads": 2}),
        (LinearAttention, {"num_heads": 2}),
        (KimiDeltaAttention, {"head_dim": 64, "num_heads": 2}),
        (
            KimiDeltaAttention,
            {"head_dim": 64, "num_heads": 1, "num_v_heads": 2, "safe_gate": True, "lower_bound": -5.0},
        ),
        (GatedDeltaNet, {"head_dim": 64, "num_heads": 2}),
        (GatedDeltaNet, {"head_dim": 64, "num_heads": 1, "num_v_heads": 2, "allow_neg_eigval": True}),
        (GatedDeltaNet2, {"head_dim": 64, "num_heads": 2}),
        (DeltaNet, {"num_heads": 2}),
        (SimpleGatedLinearAttention, {"num_heads": 2}),
        (MultiScaleRetention, {"num_heads": 2}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_layers_give_what_they_give_alone(kind, options):
    layer = kind(hidden_size=WIDTH, **options).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=WIDTH**-0.5)
    x, dy = torch.randn(2, 2, 130, WIDTH, dtype=torch.bfloat16)
    dy[:, :8] = 0  # where a state is almost empty, the norm behind it makes any rounding large
    found = run(layer, x, dy)
    calls = ours.report()
    ours.uninstall()
    try:
        want = run(layer, x, dy)
    except RuntimeError as error:  # some of FLA's own gradients are wrong with some Tritons, with which it refuses them
        if "Triton" not in str(error):
            raise
        with torch.no_grad():
            want, found = [layer(x)[0]], found[:1]
    assert sum(who.get("rwkv_jit", 0) for who in calls.values()) == 1
    for a, b in zip(found, want, strict=True):
        if b is not None:
            assert (a.float() - b.float()).norm() <= 3e-2 * b.float().norm()
