"""Packages from the registry run unchanged on these kernels: they give what they give alone."""

import json
import os
import subprocess

import pytest
import torch
import warm

import rwkv_jit.nn

pytest.importorskip("rwkv")
# The package chooses what it builds by the environment, while it is imported.
GENERATE = """
import json, sys
path, is_ours, strategy = sys.argv[1], sys.argv[2] == "ours", sys.argv[3]
if is_ours:
    from rwkv_jit import compat
    compat.install()
    from rwkv_jit.compat import recurrences
    calls, plain = [], recurrences.buffers.run
    recurrences.buffers.run = lambda *given, **named: calls.append(1) or plain(*given, **named)
from rwkv.model import RWKV
model = RWKV(model=path, strategy=strategy)
tokens = [(7 * i * i + 3) % 97 for i in range(37)]
logits, state = model.forward(tokens, None)
found = [logits.tolist()]
chosen = []
for _ in range(10):
    chosen.append(int(logits.argmax()))
    logits, state = model.forward([chosen[-1]], state)
logits, state = model.forward(tokens[:5], state)
found.append(logits.tolist())
print(json.dumps([chosen, found, len(calls) if is_ours else 0]))
"""


def checkpoint(name, path):
    torch.manual_seed(1)
    model = getattr(rwkv_jit.nn, name)(vocabulary=97, width=128, layers=2, head_size=64)
    with torch.no_grad():
        for parameter in model.parameters():  # at the beginning many are 0, and layers do nothing
            parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.save(model.state_dict(), path)


def generate(name, path, who, strategy="cpu fp32"):
    switches = {"RWKV_JIT_ON": "1", "RWKV_CUDA_ON": str(int(who == "ours")), "RWKV_V7_ON": str(int(name == "RWKV7"))}
    command = [*warm.python("torch"), "-c", GENERATE, path, who, strategy]
    done = subprocess.run(command, env=os.environ | switches, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["RWKV7", "RWKV6", "RWKV5"])
def test_the_rwkv_package_generates_the_same(name, tmp_path):
    """With TorchScript on. Of RWKV-5 and 6 it calls its kernels for GPUs alone; its scripts look them up at once."""
    path = str(tmp_path / name)
    checkpoint(name, path + ".pth")
    (chosen, logits, _), (ours, our_logits, calls) = (generate(name, path, who) for who in ("alone", "ours"))
    assert ours == chosen
    assert len(set(chosen)) > 1
    torch.testing.assert_close(torch.tensor(our_logits), torch.tensor(logits), rtol=1e-4, atol=1e-4)
    assert calls == (4 if name == "RWKV7" else 0)  # two layers, two texts of more than a token
