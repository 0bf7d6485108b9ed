"""What is compiled ahead of a training run or of decoding: every kernel of whole models is among it."""

import contextlib
import itertools
import warnings

import pytest
import torch

import rwkv_jit
from rwkv_jit import nn
from rwkv_jit.ahead import warm
from rwkv_jit.call import tensors
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.nn import mixing
from rwkv_jit.schedules import products
from rwkv_jit.schedules.layers import Given, Options

MODELS = {"RWKV5": "wkv5", "RWKV6": "wkv6", "RWKV7": "wkv7"}
WIDTH, HEAD_SIZE = 288, 16  # heads enough that threads of a block differ from those of one head
OF_TRAINING = {
    "layer_gated_norm",
    "layer_activate",
    "layer_loss_in_place",
    "layer_loss_gradients",
}
BACKWARD = {"layer_gated_norm_backward", "layer_activate_backward", "sum_buffers"}
OF_FAMILY = {
    **dict.fromkeys(("RWKV5", "RWKV6"), {"layer_gated", "layer_token_shift"}),
    "RWKV7": {"layer_prepare_keys", "layer_norm_shift"},
}
EVERY = pytest.mark.parametrize("name", MODELS)


def warmed(monkeypatch, name, dtype, width=WIDTH, **options):
    """What tells the kernels apart that are made ahead."""
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: requests)
    decay = {"decay": "sigmoid"} if name == "RWKV7" else {}
    made = rwkv_jit.warm(MODELS[name], HEAD_SIZE, dtype, arch="sm_90", widths=width, **decay, **options)
    return {kernel.memory_key(request) for request in made}


def check_asked(on_gpu, made):
    """Check that all kernels since the last time were made ahead, and return their names."""
    launches = on_gpu.take()
    assert [(x.template, x.parameters) for x in launches if kernel.memory_key(x.request) not in made] == []
    return {x.template for x in launches}


def last_tokens(x, first, cu_seqlens):
    """A state as large as the real one: no copy goes to the device that tensors say they are on."""
    return x.new_zeros(x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, x.shape[2])


@pytest.fixture
def without_products():
    """Products of matrices are zeros: nobody looks at numbers here, and torch takes long for those of float16."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is another implementation
        library.impl("mm", lambda x, y: x.new_zeros(x.shape[0], y.shape[1]), "CPU")
    yield
    library._destroy()


def make(name, dtype, vocabulary=64):
    return getattr(nn, name)(vocabulary, WIDTH, 2, HEAD_SIZE, dtype=dtype)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("under_autocast", [False, True])
def test_every_kernel_of_training_is_made_ahead(on_gpu, without_products, name, dtype, under_autocast, monkeypatch):
    if under_autocast and dtype == torch.float32:
        return  # is no autocast
    on_gpu.use("sm_90")
    monkeypatch.setattr(mixing, "last_tokens", last_tokens)
    parameters = torch.float32 if under_autocast else dtype
    made = warmed(monkeypatch, name, dtype, w_dtype=parameters)
    context = contextlib.nullcontext()
    if under_autocast:  # which torch has on a CPU, and calls look for on a GPU
        context = torch.autocast("cpu", dtype)
        monkeypatch.setattr(tensors, "autocast_dtype", lambda x: dtype if torch.is_autocast_enabled("cpu") else None)
        monkeypatch.setattr(tensors, "exactly", lambda x: torch.autocast("cpu", enabled=False))
        monkeypatch.setattr(tensors, "casting", lambda x, dtype: torch.autocast("cpu", dtype, dtype is not None))
    seen = set()
    for vocabulary in (64, 3000):
        model = make(name, parameters, vocabulary)
        two, one = torch.tensor([0, 3, 70]), torch.tensor([0, 70]).int()
        for tokens, bounds in ((70, None), (5, None), (70, two), (70, one)):
            state = None
            for l2_wrap, index in ((1e-4, torch.int64), (0.0, torch.int32)):
                targets = torch.zeros(1, tokens, dtype=index)
                with context:
                    loss, state = model.loss(targets, targets, l2_wrap, state, bounds, return_state=True)
                loss.backward()
                state = [each.detach() for each in state]
            seen |= check_asked(on_gpu, made)
    of_family = OF_FAMILY[name] | {f"{x}_backward" for x in OF_FAMILY[name] - {"layer_gated"}}
    assert OF_TRAINING | BACKWARD | of_family <= seen


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_kernel_of_decoding_is_made_ahead(on_gpu, name, dtype, monkeypatch):
    on_gpu.use("sm_90")
    made = warmed(monkeypatch, name, dtype, updates=True, w_dtype=dtype)
    model = make(name, dtype)
    pool = model.new_pool(300)
    for count in (1, 8, 12, 20, 32, 33, 300):
        model.step(torch.zeros(count, dtype=torch.int64), pool, torch.arange(count, dtype=torch.int32))
        between = "layer_activate" if dtype == torch.float32 else "layer_products"
        assert {"layer_shift_mix", "update_states", "layer_gated_norm", between} <= check_asked(on_gpu, made)


@pytest.mark.parametrize("width", [512, 768, 1024, 2048, 2560, 4096])
def test_products_of_official_sizes_are_made_ahead(width, monkeypatch):
    """Of each layer of RWKV-7, and of the logits."""
    made = warmed(monkeypatch, "RWKV7", torch.float16, width=width, updates=True, w_dtype=torch.float16)
    model = nn.RWKV7(65536, width, 2, device="meta", dtype=torch.float16)
    launches = [[(model.head.weight, "wide")]]
    for block in model.blocks:
        att, letters = block.att, "wag" if block.att.is_first else "wagv"
        downs = [(getattr(att, f"{x}1"), "deep") for x in letters]
        launches += [
            [*((x.weight, "wide") for x in (att.receptance, att.key, att.value)), *downs],
            [(getattr(att, f"{x}2"), "deep") for x in letters],
            *([(x.weight, "wide")] for x in (att.output, block.ffn.key, block.ffn.value)),
        ]  # fmt: skip
    for launch, rows in itertools.product(launches, (1, 2, 8, 9, 16, 17, 31, 32, 33, 64, 300, 1024)):
        matrices = [x for x in launch if rows <= products.ROWS or min(x[0].shape) <= products.LOW_RANK]
        if matrices:
            sizes = tuple(n for x, layout in matrices for n in (x.shape[::-1] if layout == "wide" else x.shape))
            types = {f"{x}{p}": "fp16" for p in range(len(matrices)) for x in ("x", "weight")}
            given = Given(Gpu("sm_90"), types, rows, sizes)
            options = Options(kinds=tuple(x for _, layout in matrices for x in ("identity", layout)))
            several = products.products(given, options).requests(given.gpu)
            assert all(kernel.memory_key(x) in made for x in several), (rows, sizes, several)


@EVERY
def test_what_is_not_trained_has_no_kernels_of_gradients(name, monkeypatch):
    monkeypatch.setattr(warm, "compile_all", lambda requests, progress: {x.template.name for x in requests})
    for backward in (False, True):
        names = rwkv_jit.warm(MODELS[name], HEAD_SIZE, arch="sm_90", widths=WIDTH, backward=backward)
        assert ("layer_gated_norm_backward" in names) == backward
        assert ("layer_norm_shift" if name == "RWKV7" else "layer_token_shift") in names
        assert "layer_shift_mix" not in names
        without = rwkv_jit.warm(MODELS[name], HEAD_SIZE, arch="sm_90", backward=backward)
        assert not [x for x in without if x.startswith("layer_")]
