"""The fused ops of RWKV-LM's trainer on a GPU: what they are held to on a CPU."""

import pytest
import torch
from test_compat_trainer import (  # noqa: F401
    differentiable,
    installed,
    test_autograd_that_a_user_registers,
    test_keys_of_zeros_have_the_gradient_of_a_division_by_the_least_length,
    test_layers_made_of_the_ops,
    test_loss_of_a_head,
    test_loss_of_logits,
    test_ops_are_what_their_schemas_say_with_and_without_memory,
    test_rates_may_be_anything,
    test_scripts_call_the_ops_and_have_gradients,
    test_strides_and_autocast_change_nothing_and_nothing_is_recorded,
    test_values_and_gradients,
    test_what_forwards_make_for_backwards,
)


@pytest.fixture(autouse=True)
def on_a_gpu():
    with torch.device("cuda"):
        yield
