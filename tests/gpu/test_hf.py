"""Models of transformers and functions of mamba_ssm on these kernels, beside transformers' own code in plain torch."""

import pytest
import torch

pytest.importorskip("transformers")

from test_compat_mamba import (  # noqa: E402, F401
    test_scan,
    test_scan_of_several_dtypes,
    test_sequences_in_rows_are_sequences_alone,
    test_steps_without_softplus_are_as_they_are,
    test_update,
    test_update_without_more,
)
from test_hf_models import (  # noqa: E402, F401
    restored,
    test_models_that_have_short_convolutions_alone,
    test_models_train_and_generate_the_same,
    test_packed_texts_are_texts_alone,
    test_parts_with_a_cache_are_the_whole,
    test_sixteen_bits,
    without_fla,
)


@pytest.fixture(autouse=True)
def on_a_gpu():
    with torch.device("cuda"):
        yield
