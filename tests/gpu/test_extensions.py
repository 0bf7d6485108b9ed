"""Extensions of RWKV projects on a GPU: what they are held to on a CPU, and the `rwkv` package with its GPU kernels."""

import pytest
import torch
from test_compat import (  # noqa: F401
    forwards,
    installed,
    test_a_backward_takes_what_the_forward_has_recorded,
    test_backstepping,
    test_checkpoints_record_the_call_that_is_repeated,
    test_clampw,
    test_clampw_from_a_state,
    test_flags_are_ignored_and_a_second_head_size_is_right,
    test_ops_of_the_rwkv_package,
    test_rwkv4,
    test_rwkv5,
    test_rwkv5_and_6_in_place,
    test_rwkv6,
    test_rwkv6_from_a_state,
    test_rwkv7_from_no_state,
    test_rwkv7_in_place,
    test_scratch_that_several_calls_share_is_of_the_last_one,
    test_scripts_of_torch_find_the_ops,
    test_timex,
    test_what_nobody_differentiates_is_not_kept,
)
from test_compat_packages import checkpoint, generate


@pytest.fixture(autouse=True)
def on_a_gpu():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("strategy", ["cuda fp32", "cuda fp16"])
@pytest.mark.parametrize("name", ["RWKV7", "RWKV6", "RWKV5"])
def test_the_rwkv_package_reads_the_same(name, strategy, tmp_path):
    """With TorchScript on, but for rounding: its products are of TF32 at best."""
    path = str(tmp_path / name)
    checkpoint(name, path + ".pth")
    (_, logits, _), (_, found, calls) = generate(name, path, "alone"), generate(name, path, "ours", strategy)
    logits, found = torch.tensor(logits)[0], torch.tensor(found)[0]
    assert (found - logits).norm() < 2e-2 * logits.norm()
    assert calls == 4
