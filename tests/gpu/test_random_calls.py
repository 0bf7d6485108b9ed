"""Random calls of every op, verb and layer op: any memory, sizes, dtypes, slots and lengths, against float64."""

import random

import pytest
import random_calls

from rwkv_jit.call import tensors

PROFILES, CALLS = 4, 7  # of a kind: sizes and types that kernels are compiled for, and the calls that share them
NAMES = ("wkv4", "wkv5", "wkv6", "wkv7", "gla", "linear_attention", "timex")
# The section of the record, beside the kind.
KINDS = [
    (name if verb == "sequences" and name in NAMES else "layers" if verb in ("layer", "sequences") else "inference",
     name, verb)
    for name, verb in random_calls.KINDS
]  # fmt: skip


@pytest.mark.parametrize("part", range(PROFILES))
@pytest.mark.parametrize(("op", "name", "verb"), KINDS)
def test_random_calls(op, name, verb, part, seed, monkeypatch):
    new = tensors.new

    def poisoned(shape, strides, dtype):
        made = new(shape, strides, dtype)
        made.untyped_storage().fill_(0xFF)  # no number in any dtype
        return made

    monkeypatch.setattr(tensors, "new", poisoned)
    draw = random.Random(seed)
    profile = random_calls.profile(draw, name, verb)
    for _ in range(CALLS):
        random_calls.check(draw, random_calls.make(draw, name, verb, profile))
