"""An op is data: one that the library does not have, with inputs that none of its ops has, does all that these do."""

from pathlib import Path

import made_up
import pytest
import torch
import torch._decomp.decompositions_for_jvp  # noqa: F401, as it compiles functions of torch that `on_gpu` replaces
from torch._subclasses.fake_tensor import FakeTensorMode

from rwkv_jit.kernels.errors import UnsupportedConfigError

B, T, G, H, K, V = SIZES = 2, 5, 2, 4, 3, 6
PACKED = [0, 3, 3, 11, 12]
OPTIONS = (1.0, "none", "vk", 64, None, None, "auto", None, None, False, False, False)  # of the torch op
FORWARD, BACKWARD = torch.ops.rwkv_jit.made_up_fwd.default, torch.ops.rwkv_jit.made_up_bwd.default


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run(given, *more, **options):
    return made_up.made_up(*given.values(), *more, **options)


# ---- plain torch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [(SIZES, None), ((1, 12, 1, 3, 3, 6), PACKED), ((2, 1, 3, 3, 4, 2), None), ((2, 0, G, H, K, V), None)],
    ids=["rows", "packed", "one token, no key head is shared", "no tokens"],
)
def test_values_and_gradients(sizes, bounds, has_state, state_layout):
    given = made_up.make_inputs(sizes, grad=True)
    cu_seqlens, sequences = (None, sizes[0]) if bounds is None else (torch.tensor(bounds), len(bounds) - 1)
    dtype = torch.float64 if has_state else None
    errors = made_up.errors_of_call(given, sequences, dtype, cu_seqlens, state_layout)
    assert max(errors.values()) < 1e-12, errors
    errors = made_up.errors_of_call(given, sequences, dtype, cu_seqlens, state_layout, scale=0.3)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16])
def test_types(g_dtype):
    """The results have those of v, gradients those of their inputs; states are float32 where none is given."""
    given = made_up.make_inputs(SIZES, torch.bfloat16, g_dtype, grad=True)
    y, final = run(given, None, True)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad([y.sum(), final.sum()], [*given.values()])
    assert [x.dtype for x in grads] == [x.dtype for x in given.values()]
    errors = made_up.errors_of_call(given, B, torch.float16)
    assert max(errors.values()) < 5e-3, errors


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("k", (B, T, 1, K), r"k: expected shape \[2, 5, 2, 3\] like q, got \[2, 5, 1, 3\]"),
        ("v", (B, 4, H, V), r"v: expected shape \[2, 5, H, value size\] like q, got \[2, 4, 4, 6\]"),
        ("v", (B, T, 3, V), "q: expected key heads that divide the 3 heads, got 2"),
        ("g", (B, T, 3), r"g: expected shape \[2, 5, 4\] like v, got \[2, 5, 3\]"),
        ("g", (B, T, H, K), r"g: expected shape \[2, 5, 4\] like q, got \[2, 5, 4, 3\]"),
        ("q", (B, T, K), r"q: expected 4 dimensions \[B, T, G, head size\], got shape \(2, 5, 3\)"),
        ("d", (3,), r"d: expected shape \[4\] \[heads\], got \[3\]"),
        ("initial_state", (B, G, V, K), r"initial_state: expected shape \[2, 4, 6, 3\] or \[4, 6, 3\], got \[2, 2, 6"),
    ],
)
def test_wrong_shapes_are_named(name, shape, text):
    given = {**made_up.make_inputs(), "initial_state": None, name: torch.zeros(shape, dtype=torch.float64)}
    if shape == (B, T, 3, V):
        given |= {"g": given["g"][:, :, :3], "d": given["d"][:3]}
    with pytest.raises(ValueError, match=text):
        made_up.made_up(**given)


def test_heads_need_key_heads():
    given = made_up.make_inputs()
    none = {name: given[name][:, :, :0] for name in ("q", "k")}
    with pytest.raises(ValueError, match="q: expected key heads that divide the 4 heads, got 0"):
        made_up.made_up(**{**given, **none})
    y, final = run(made_up.make_inputs((B, T, 0, 0, K, V)), output_final_state=True)
    assert (y.shape, final.shape) == ((B, T, 0, V), (B, 0, V, K))


# ---- what torch does with an op ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [None, [0, 2, T]], ids=["rows", "packed"])
def test_torch_accepts_the_op(bounds):
    given = made_up.make_inputs((B if bounds is None else 1, *SIZES[1:]), torch.float32, grad=True)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    state = made_up.make_state(given, 2, torch.float32, grad=True)
    arrays = (*given.values(), state, cu_seqlens)
    arguments = (*arrays, *OPTIONS)
    torch.library.opcheck(FORWARD, (*arguments, True, False))
    made = FORWARD(*arguments, True, False)
    dy, grad_final, saved = (torch.ones_like(x).requires_grad_() for x in made)
    torch.library.opcheck(BACKWARD, (*arrays, saved, dy, grad_final, *OPTIONS))


def test_fake_promises_what_the_forward_keeps():
    """Where a compiler traces a call of CUDA tensors, on a machine without a GPU too."""
    with FakeTensorMode():
        given = made_up.make_inputs(SIZES, torch.bfloat16, torch.float32, "cuda")
        y, final, saved = FORWARD(*given.values(), None, None, *OPTIONS, True, True)
    assert (y.shape, y.dtype) == (given["v"].shape, torch.bfloat16)
    assert (final.shape, final.dtype) == ((B, H, V, K), torch.float32)
    assert saved.shape == (B * T * H * V * K,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_wide_inputs_alone(dtype):
    given = made_up.make_inputs(dtype=torch.float32)
    want = run({name: x if name == "g" else x.to(dtype) for name, x in given.items()})[0]
    with torch.autocast("cpu", dtype):
        y = run(given)[0]
        bare = FORWARD(*given.values(), None, None, K**-0.5, *OPTIONS[1:], False, False)[0]
    assert y.dtype == bare.dtype == dtype
    assert torch.equal(y, want)
    assert torch.equal(bare, want)


RANK = """
import os, sys
sys.path.append(sys.argv[1])
import made_up, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
mesh, given = init_device_mesh("cpu", (1,)), made_up.make_inputs()
want = made_up.made_up(*given.values(), output_final_state=True)
for of_tokens in (Replicate(), Shard(0)):
    placements = {name: Replicate() if name == "d" else of_tokens for name in given}
    placed = [distribute_tensor(x, mesh, [placements[name]]) for name, x in given.items()]
    for x, exact in zip(made_up.made_up(*placed, output_final_state=True), want, strict=True):
        assert x.placements == (of_tokens,) and x.shape == exact.shape
        torch.testing.assert_close(x.full_tensor(), exact)
print("done")
sys.stdout.flush()
os._exit(0)  # threads of torch that still wait for the interpreter when that ends can abort the process
"""


def test_dtensors_whose_first_input_has_no_heads(child, tmp_path):
    done = child(RANK, Path(made_up.__file__).parent, tmp_path / "meeting", after="torch")
    assert done.stdout.splitlines()[-1] == "done"


# ---- launches ----------------------------------------------------------------------------------------------------


def addresses(tensors):
    return {name: 0 if x is None else x.data_ptr() for name, x in tensors.items()}


def taken(launch, names):
    return {name: launch.named[name] for name in names}


@pytest.mark.parametrize("bounds", [None, PACKED], ids=["rows", "packed"])
def test_every_argument_of_a_call_is_bound(bounds, on_gpu):
    sizes = (2, 12, *SIZES[2:]) if bounds is None else (1, 12, *SIZES[2:])
    cu_seqlens, sequences = (None, 2) if bounds is None else (torch.tensor(bounds), len(bounds) - 1)
    given = made_up.make_inputs(sizes, torch.bfloat16, torch.float32, grad=True)
    given["k"] = given["k"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    state = made_up.make_state(given, sequences, torch.float32, grad=True)
    y, final = run(given, state, True, cu_seqlens)
    weights = torch.ones_like(y), torch.ones_like(final)
    grads = torch.autograd.grad([y, final], [*given.values(), state], weights)
    results = dict(zip((*(f"d{name}" for name in given), "grad_initial_state"), grads, strict=True))

    forward, backward, *sums = on_gpu.launches
    batch, tokens = sizes[:2]
    inputs = {**given, "initial_state": state, "cu_seqlens": cu_seqlens}
    numbers = {"tokens": tokens, "heads": H, "key_heads": G}
    strides = {
        "q_strides": (tokens * G * K, G * K, K), "k_strides": (tokens * G * K, K, tokens * K),
        "v_strides": (tokens * H * V, H * V, V), "g_strides": (tokens * H, H, 1),
    }  # fmt: skip
    for launch in (forward, backward):
        assert (launch.template, launch.grid, launch.block) == ("made_up", (sequences * H, 1, 1), (64, 1, 1))
        assert taken(launch, inputs) == addresses(inputs)
        assert taken(launch, numbers) == numbers
        assert taken(launch, strides) == strides
        assert launch.named["scale"] == pytest.approx(K**-0.5)
    assert (forward.entry, backward.entry) == ("made_up_forward", "made_up_backward")
    assert forward.request == backward.request  # one compile serves both directions
    assert forward.parameters == {
        "HEAD_SIZE": K, "VALUE_SIZE": V, "NUM_THREADS": 64, "T_IO": "bf16", "T_G": "fp32", "T_STATE": "fp32",
        "STATE_LAYOUT": "vk",
    }  # fmt: skip
    assert taken(forward, ("y", "final_state")) == addresses({"y": y, "final_state": final})
    assert forward.named["states"] == backward.named["states"] != 0
    own = ("dv", "dg", "grad_initial_state")
    assert taken(backward, own) == addresses({name: results[name] for name in own})
    assert backward.named["dy"] == weights[0].data_ptr()
    assert backward.named["grad_final_state"] == weights[1].data_ptr()
    assert backward.named["dy_strides"] == strides["v_strides"]
    assert backward.named["batch"] == batch

    of_heads = {"group_rows": H // G, "width": batch * tokens * G * K}
    *sums, of_sequences = sums
    assert of_sequences.template == "sum_buffers"
    numbers = {"rows0": backward.named["dd"], "sums0": results["dd"].data_ptr(), "group_rows0": sequences, "width0": H}
    assert taken(of_sequences, numbers) == numbers
    wanted = {"dq": of_heads, "dk": of_heads}
    assert [launch.template for launch in sums] == ["sum_rows"] * len(wanted)
    for launch, (name, numbers) in zip(sums, wanted.items(), strict=True):
        assert launch.named["rows"] == backward.named[name] != 0
        assert launch.named["sums"] == results[name].data_ptr()
        assert launch.named["cu_seqlens"] == 0
        assert taken(launch, numbers) == numbers
        assert launch.grid == (-(-numbers["width"] // 32), 1, 1)
        assert launch.parameters["T_OUT"] == "bf16"
    buffers = {backward.named[name] for name in ("dq", "dk", "dd", "grad_states")}
    assert len(buffers) == 4
    assert 0 not in buffers


def test_call_without_tokens_has_gradients(on_gpu):
    given = made_up.make_inputs((B, 0, *SIZES[2:]), torch.float32, grad=True)
    y, final = run(given, None, True)
    torch.autograd.grad([y, final], [*given.values()], [torch.ones_like(y), torch.ones_like(final)])
    *_, total = on_gpu.launches
    assert [x.entry for x in on_gpu.launches] == ["made_up_forward", "made_up_backward", "sum_buffers"]
    assert total.named["width0"] == H  # those of q and k have no elements


def test_algorithms_of_other_ops_are_refused(on_gpu):
    with pytest.raises(UnsupportedConfigError, match="made_up has none but 'auto' and 'recurrent', got 'chunked'"):
        run(made_up.make_inputs(dtype=torch.float32), backend="chunked")
    run(made_up.make_inputs(dtype=torch.float32), backend="recurrent", num_threads=128)
    (launch,) = on_gpu.launches
    assert launch.block == (128, 1, 1)
