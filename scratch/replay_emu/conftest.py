import sys; sys.path[:0]=["/tmp/w/replay/tests/unit","/tmp/w/replay/tests","/tmp/w"]
from stub_driver import gpus, on_gpu
import pytest
from rwkv_jit import signatures
@pytest.fixture
def nothing_known():
    signatures.forget(); yield; signatures.forget()
