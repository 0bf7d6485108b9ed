"""deepspeed's FusedAdam without a compiler: the op against formulas in float64, and who has it in a stand-in for it."""

import importlib
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rwkv_jit import compat
from rwkv_jit.compat.deepspeed import multi_tensor_adam

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # 16 bits are rounded once
BUILDER = "deepspeed.ops.op_builder.builder"
NOT_READ = 65536, torch.ones(1, dtype=torch.int32)


def step_of_adam(g, p, m, v, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay):
    """What parameters and moments become, in float64."""
    g, p, m, v = (x.double() for x in (g, p, m, v))
    if mode == 0:
        g = g + weight_decay * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    of_mean, of_square = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    update = m / of_mean / ((v / of_square).sqrt() + epsilon)
    return p - lr * (update + weight_decay * p * (mode == 1)), m, v


def make(dtype, sizes):
    """Lists of gradients, parameters, means and squares; every third gradient is zero."""
    lists = [[torch.randn(size).to(dtype) for size in sizes] for _ in range(4)]
    for g, _, _, v in zip(*lists, strict=True):
        g.view(-1)[::3] = 0
        v.square_().add_(0.01)
    return lists


@given(
    dtype=st.sampled_from(list(LIMITS)),
    mode=st.sampled_from([0, 1]),
    bias_correction=st.sampled_from([0, 1]),
    sizes=st.lists(st.sampled_from([(0,), (1,), (3, 5), (33, 7), (1031,), ()]), max_size=4),
    step=st.sampled_from([1, 2, 7, 10_000]),
    epsilon=st.sampled_from([1e-8, 1e-18]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.99), (0.0, 0.5)]),
)
def test_a_step_of_adam(dtype, mode, bias_correction, sizes, step, epsilon, weight_decay, betas):
    lists = make(dtype, sizes)
    options = 1e-2, *betas, epsilon, step, mode, bias_correction, weight_decay
    want = [step_of_adam(*tensors, *options) for tensors in zip(*lists, strict=True)]
    grads = [g.clone() for g in lists[0]]
    parameters = [p.requires_grad_() for p in lists[1]]
    assert multi_tensor_adam(*NOT_READ, lists, *options) is None
    for changed, exact in zip(zip(*lists[1:], strict=True), want, strict=True):
        for x, y in zip(changed, exact, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x.detach().double(), y, rtol=LIMITS[dtype], atol=LIMITS[dtype] / 10)
    assert all(torch.equal(*pair) for pair in zip(grads, lists[0], strict=True))
    assert all(p.is_leaf and p.grad is None for p in parameters)


def test_moments_of_zeros_and_gradients_of_zeros_change_nothing():
    lists = [[torch.zeros(5)], [torch.arange(5.0)], [torch.zeros(5)], [torch.zeros(5)]]
    multi_tensor_adam(*NOT_READ, lists, 1e-2, 0.9, 0.99, 1e-18, 1, 1, 1, 0.0)
    assert torch.equal(lists[1][0], torch.arange(5.0))


def test_many_steps_are_those_of_torch():
    lists = make(torch.float32, [(7,), (3, 2)])
    for several in lists[2:]:
        for x in several:
            x.zero_()
    leaves = [p.clone().requires_grad_() for p in lists[1]]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        lists[0] = [torch.randn_like(p) for p in leaves]
        for p, g in zip(leaves, lists[0], strict=True):
            p.grad = g.clone()
        optimizer.step()
        multi_tensor_adam(*NOT_READ, lists, 1e-2, 0.9, 0.99, 1e-8, step, 1, 1, 0.1)
    for p, x in zip(leaves, lists[1], strict=True):
        torch.testing.assert_close(x, p.detach(), rtol=1e-5, atol=1e-6)


def test_tensors_in_another_order_are_an_error_and_nothing_is_written():
    options = 1e-2, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1
    of_images = [x.to(memory_format=torch.channels_last) for (x,) in make(torch.float32, [(2, 3, 4, 5)])]
    (p,) = step_of_adam(*of_images, *options)[:1]
    multi_tensor_adam(*NOT_READ, [[x] for x in of_images], *options)
    torch.testing.assert_close(of_images[1].double(), p, rtol=1e-5, atol=1e-6)
    for wrong in ([torch.ones(5, 4).T, *(torch.ones(4, 5) for _ in range(3))], [torch.ones(8)[::2] for _ in range(4)]):
        with pytest.raises(ValueError, match=r"tensor_lists: expected contiguous tensors, got strides \[\(.*"):
            multi_tensor_adam(*NOT_READ, [[torch.ones(2), x] for x in wrong], *options)
        assert all((x == 1).all() for x in wrong)
    with pytest.raises(ValueError, match="zip"):
        multi_tensor_adam(*NOT_READ, [[], [p], [p], [p]], *options)


# ---- who answers -------------------------------------------------------------------------------------------------

STAND_IN = """
class OpBuilder:
    _loaded_ops = {}

    def load(self):
        if "fused_adam" in __class__._loaded_ops:
            return __class__._loaded_ops["fused_adam"]
        raise RuntimeError("Unable to JIT load the fused_adam op due to ninja not being installed.")
"""


@pytest.fixture
def deepspeed(tmp_path, monkeypatch):
    """Imports the part of deepspeed that looks for extensions, anew each time."""
    folder = tmp_path / "deepspeed" / "ops" / "op_builder"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent, folder.parents[1]):
        (path / "__init__.py").touch()
    (folder / "builder.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "is_installed", False)

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]

    def imported():
        forget()
        return importlib.import_module(BUILDER).OpBuilder

    forget()
    yield imported
    compat.uninstall()
    forget()


def adam_of(builder):
    return builder().load().multi_tensor_adam


def test_installed_before_the_import(deepspeed):
    compat.install()
    assert adam_of(deepspeed()) is multi_tensor_adam


def test_installed_after_the_import_and_taken_away(deepspeed):
    builder = deepspeed()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ninja"):
            builder().load()
        compat.install()
        compat.install()
        assert adam_of(builder) is multi_tensor_adam
        compat.uninstall()
        compat.uninstall()
    assert builder._loaded_ops == {}


def test_taken_away_before_the_import(deepspeed):
    compat.install()
    compat.uninstall()
    builder = deepspeed()
    assert builder._loaded_ops == {}
    compat.install()
    assert adam_of(builder) is multi_tensor_adam


def test_what_deepspeed_has_built_stays(deepspeed):
    builder = deepspeed()
    own = builder._loaded_ops["fused_adam"] = object()
    compat.install()
    assert builder().load() is own
    compat.uninstall()
    assert builder._loaded_ops == {"fused_adam": own}


def test_a_deepspeed_that_keeps_no_ops_is_left_alone(deepspeed):
    builder = deepspeed()
    del builder._loaded_ops
    compat.install()
    compat.uninstall()
    assert not hasattr(builder, "_loaded_ops")
