"""What is kept by signature: bounded, and dropped as a whole."""

import pytest

from rwkv_jit import signatures
from rwkv_jit.signatures import BySignature


@pytest.fixture
def memories(monkeypatch):
    """Two, beside those of the package."""
    monkeypatch.setattr(signatures, "_all", [])
    return BySignature(), BySignature()


def test_what_is_kept_is_found_and_returned(memories):
    plan, other = object(), object()
    assert memories[0].keep(("wkv7", 64), plan) is plan
    assert memories[0].keep(("wkv7", 32), other) is other
    assert memories[0] == {("wkv7", 64): plan, ("wkv7", 32): other}
    assert memories[1] == {}


def test_there_are_never_more_than_the_most(memories, monkeypatch):
    monkeypatch.setattr(signatures, "MOST", 3)
    sizes = []
    for signature in range(8):
        memories[0].keep(signature, str(signature))
        sizes.append(len(memories[0]))
        assert memories[0][signature] == str(signature)
    assert sizes == [1, 2, 3, 1, 2, 3, 1, 2]


def test_all_are_dropped(memories):
    for memory in memories:
        memory.keep("wkv6", 1)
    signatures.forget()
    assert memories == ({}, {})
