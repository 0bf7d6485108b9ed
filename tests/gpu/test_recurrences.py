"""The recurrent kernels on the GPU against the float64 recurrence on the same rounded inputs, values and gradients."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import comparing
import pytest
import torch

import rwkv_jit
from rwkv_jit.call import prepared
from rwkv_jit.desk import versions
from rwkv_jit.kernels import kernel, signatures
from rwkv_jit.kernels.errors import RwkvJitError
from rwkv_jit.schedules import recurrent, table

DTYPES, FIXED, NAMES, STRIDES = comparing.DTYPES, comparing.FIXED, comparing.NAMES, comparing.STRIDES
DECAY_KINDS = [*comparing.DECAY_RANGES, *comparing.DECAY_PAIRS]
compare, make_inputs, reference, relative = (
    comparing.compare, comparing.make_inputs, comparing.reference, comparing.relative,
)  # fmt: skip
of_tokens, run, strided, with_room = comparing.of_tokens, comparing.run, comparing.strided, comparing.with_room

OPS = tuple(NAMES)
WITH_DECAY = [op for op in OPS if "w" in NAMES[op]]
GATE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 3e-3}


def check(op, given, state=None, options=(), exact_options=(), gate=None, weights=None):
    gate = gate or GATE[given["r"].dtype]
    errors, final, named = compare(op, given, state, {"backend": "recurrent", **dict(options)}, exact_options, weights)
    limits = dict.fromkeys(errors, gate)
    if final.dtype == torch.float32:
        limits["state"] = GATE[torch.float32]
    limits = with_room(limits, named)
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, (wrong, limits)
    return errors


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 63, 65, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_length(op, dtype, tokens):
    state = torch.randn(2, 3, 64, 64, device="cuda", requires_grad=True)
    check(op, make_inputs(op, DTYPES[dtype], tokens=tokens), state)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [1, 2, 3, 7, 8, 16, 24, 25, 32, 40, 48, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_every_head_size(op, dtype, head_size):
    heads = comparing.enough_heads(head_size)
    check(op, make_inputs(op, DTYPES[dtype], tokens=70, heads=heads, head_size=head_size))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("sizes", [(64, 128), (40, 24), (100, 7), (5, 300), (320, 320), (512, 1)])
@pytest.mark.parametrize("op", OPS)
def test_keys_and_values_of_different_size(op, sizes):
    check(op, make_inputs(op, torch.float32, tokens=37, head_size=sizes[0], value_size=sizes[1]))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("head_size", [512, 1024])
@pytest.mark.parametrize("op", OPS)
def test_the_largest_head_sizes(op, head_size):
    """Where little shared memory is left, blocks stage few tokens of few value rows."""
    check(op, make_inputs(op, torch.float32, batch=1, tokens=9, heads=1, head_size=head_size))


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("decays", DECAY_KINDS)
@pytest.mark.parametrize("decay", ["raw", "sigmoid", "log", "direct"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", WITH_DECAY)
def test_every_decay(op, decay, decays, dtype):
    given = make_inputs(op, DTYPES[dtype], tokens=130, decays=decays, decay=decay, w_dtype=torch.float32)
    options, weights = {"decay": decay, "backend": "recurrent"}, None
    if "w" in FIXED.get(op, ""):
        # Of decays mixed a few near one are most of dw. Where y and the state weigh themselves no sum of it cancels.
        weights = [x.detach() for x in run(op, given, **options)[:2]]
    check(op, given, options=options, exact_options={"decay": decay}, weights=weights)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("op", OPS)
def test_state_in_and_out(op, layout, state_dtype):
    given = make_inputs(op, torch.float32, head_size=24, value_size=40)
    sizes = (40, 24) if layout == "vk" else (24, 40)
    state = torch.randn(2, 3, *sizes, device="cuda").to(DTYPES[state_dtype]).requires_grad_()
    errors = check(op, given, state, {"state_layout": layout}, {"state_layout": layout}, gate=GATE[DTYPES[state_dtype]])
    assert errors["dinitial_state"] <= GATE[DTYPES[state_dtype]]


@pytest.mark.parametrize("op", OPS)
def test_state_shared_by_all_sequences(op):
    given = make_inputs(op, torch.float32, batch=3, head_size=16)
    state = torch.randn(3, 16, 16, device="cuda", requires_grad=True)
    check(op, given, state)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_copy_the_state(op):
    given = make_inputs(op, torch.float32, tokens=0, head_size=16)
    state = torch.randn(2, 3, 16, 16, device="cuda", requires_grad=True)
    y, final, grads, weights = run(op, given, state)
    assert y.numel() == 0
    assert torch.equal(final, state)
    assert torch.equal(grads[-1], weights[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_the_sequences_one_by_one(op, index_dtype):
    bounds = [0, 0, 5, 69, 70, 70, 198, 200]
    given = make_inputs(op, torch.bfloat16, batch=1, tokens=200, head_size=40)
    state = torch.randn(len(bounds) - 1, 3, 40, 40, device="cuda", requires_grad=True)
    pinned = {"chunk_len": 4, "num_threads": 64, "backend": "recurrent"}
    cu_seqlens = comparing.check_one_by_one(op, given, state, bounds, index_dtype, **pinned)
    check(op, given, state, {"cu_seqlens": cu_seqlens}, {"cu_seqlens": cu_seqlens})


@pytest.mark.parametrize("op", OPS)
def test_a_strided_packing(op):
    given = make_inputs(op, torch.float32, batch=1, tokens=20, head_size=16)
    spread = torch.tensor([0, 99, 7, 99, 20, 99], device="cuda")[::2]
    check(op, given, None, {"cu_seqlens": spread}, {"cu_seqlens": spread})


@pytest.mark.parametrize("op", OPS)
def test_seventy_thousand_sequences(op):
    count = 70_000
    given = make_inputs(op, torch.float32, batch=1, tokens=count, heads=1, head_size=4)
    cu_seqlens = torch.arange(count + 1, device="cuda")
    y, final, grads, weights = run(op, given, cu_seqlens=cu_seqlens)
    fixed = FIXED.get(op, "")
    by_row = {n: (x if n in fixed else x.transpose(0, 1)).detach().requires_grad_() for n, x in given.items()}
    by_row_weights = weights[0].transpose(0, 1), weights[1]
    want_y, want_final, want_grads, _ = reference(op, by_row, None, by_row_weights)
    assert relative(y, want_y.transpose(0, 1)) < 5e-6
    assert relative(final, want_final) < 5e-6
    for name, grad, want in zip(given, grads, want_grads, strict=True):
        assert relative(grad, want if name in fixed else want.transpose(0, 1)) < 5e-6, name


MEMORY = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.skipif(MEMORY <= 100 * 2**30, reason="takes 100 GiB of a GPU")
@pytest.mark.parametrize("op", OPS)
def test_more_than_two_billion_elements(op):
    batch, first = 132, make_inputs(op, torch.bfloat16, batch=1, tokens=4096, heads=64, head_size=64)
    assert batch * first["v"].numel() > 2**31
    pinned = {"chunk_len": 4, "num_threads": 128, "backend": "recurrent"}
    comparing.check_rows(op, first, batch, (0, 65, batch - 1), **pinned)


@pytest.mark.parametrize("op", OPS)
def test_results_repeat_bit_for_bit(op):
    comparing.check_repeats(op, make_inputs(op, torch.bfloat16, batch=4, tokens=300, heads=8))


@pytest.mark.parametrize("op", OPS)
def test_the_batch_around_a_sequence_changes_nothing(op):
    """Also across the two tiles the forward takes for few and for many heads."""
    given = make_inputs(op, torch.float32, batch=64, tokens=40, heads=8)
    many, _ = getattr(rwkv_jit, op)(*given.values())
    few, _ = getattr(rwkv_jit, op)(*of_tokens(op, given, slice(5, 6)).values())
    assert torch.equal(many[5:6], few)


@pytest.mark.parametrize("split", [1, 33, 64])
@pytest.mark.parametrize("op", OPS)
def test_a_prompt_continues_from_its_state(op, split):
    given = make_inputs(op, torch.float32, tokens=100)
    function = getattr(rwkv_jit, op)
    whole, last = function(*given.values(), output_final_state=True)
    head = of_tokens(op, given, (slice(None), slice(0, split))).values()
    tail = of_tokens(op, given, (slice(None), slice(split, None))).values()
    y_head, state = function(*head, output_final_state=True)
    y_tail, final = function(*tail, initial_state=state, output_final_state=True)
    assert torch.equal(torch.cat([y_head, y_tail], 1), whole)
    assert torch.equal(final, last)


@pytest.mark.parametrize("how", [*STRIDES, "expanded"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_inputs_of_any_stride(op, dtype, how):
    given = make_inputs(op, DTYPES[dtype], heads=comparing.HEADS_OF_ONE_TOKEN, head_size=24)
    odd = {n: (x.detach().t().contiguous().t() if x.dim() == 2 else strided(x, how)) for n, x in given.items()}
    assert not any(x.is_contiguous() for x in odd.values())
    check(op, {n: x.requires_grad_() for n, x in odd.items()})


@pytest.mark.parametrize("op", OPS)
def test_an_expanded_output_gradient(op):
    given = make_inputs(op, torch.float32)
    y, _ = getattr(rwkv_jit, op)(*given.values())
    grads = torch.autograd.grad(y.sum(), list(given.values()))
    _, _, want, _ = reference(op, given, None, (torch.ones_like(y), torch.zeros(2, 3, 64, 64, device="cuda")))
    assert max(relative(g, w) for g, w in zip(grads, want, strict=True)) < 5e-6


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("chunk_len", recurrent.VARIANTS["chunk_len"])
@pytest.mark.parametrize("num_threads", recurrent.VARIANTS["num_threads"])
@pytest.mark.parametrize("op", OPS)
def test_every_chunk_length_and_block_size(op, num_threads, chunk_len):
    given = make_inputs(op, torch.float32, batch=1, tokens=37, heads=2, head_size=16, value_size=24)
    check(op, given, options={"chunk_len": chunk_len, "num_threads": num_threads, "backend": "recurrent"})


@pytest.mark.parametrize("interval", [1, 3, 16, 64, 100, 5000])
@pytest.mark.parametrize("op", OPS)
def test_every_checkpoint_interval(op, interval):
    given = make_inputs(op, torch.float32, tokens=150, head_size=40)
    check(op, given, options={"checkpoint_interval": interval, "backend": "recurrent"})


@pytest.mark.parametrize("op", OPS)
def test_scale(op):
    check(op, make_inputs(op, torch.float32), options={"scale": 0.37}, exact_options={"scale": 0.37})


@pytest.mark.parametrize("op", WITH_DECAY)
def test_float32_decay_beside_half_inputs(op):
    given = make_inputs(op, torch.float16, w_dtype=torch.float32)
    check(op, given)
    y, _ = getattr(rwkv_jit, op)(*given.values())
    assert torch.autograd.grad(y.sum(), given["w"])[0].dtype == torch.float32


@pytest.mark.parametrize("op", OPS)
def test_one_specialisation_serves_every_length(op):
    counts = []
    for tokens in (1, 40, 2000):
        check(op, make_inputs(op, torch.float32, batch=40, tokens=tokens, heads=4, head_size=12))
        kernel._process.workers.finish()  # what this test and others began to compile for later
        counts.append(rwkv_jit.cache_info()["compiled"])
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("op", OPS)
def test_gradient_of_the_final_state_alone(op):
    given = make_inputs(op, torch.float32, head_size=16)
    _, final = getattr(rwkv_jit, op)(*given.values(), output_final_state=True)
    weight = torch.randn_like(final)
    grads = torch.autograd.grad(final, list(given.values()), weight)
    zeros = torch.zeros_like(given["v"])
    _, _, want, _ = reference(op, given, None, (zeros, weight))
    errors = [relative(g, w) for g, w in zip(grads, want, strict=True) if float(w.norm()) > 0]
    assert max(errors) < 5e-6


@pytest.mark.parametrize("op", OPS)
def test_a_side_stream_is_followed(op):
    """The inputs are made on the side stream behind long work: a launch on any other stream would read zeros."""
    given = make_inputs(op, torch.float32, batch=1, tokens=20, heads=1)
    want, _ = getattr(rwkv_jit, op)(*given.values())
    late = {n: torch.zeros_like(x) for n, x in given.items()}
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            busy = busy @ busy * 1e-4
        for n, x in given.items():
            late[n].copy_(x.detach())
        y, _ = getattr(rwkv_jit, op)(*late.values())
    side.synchronize()
    assert torch.equal(y, want)


if torch.cuda.device_count() > 1:

    @pytest.mark.parametrize("op", OPS)
    def test_tensors_of_a_device_that_is_not_current(op):
        given = make_inputs(op, torch.float32, head_size=24)
        elsewhere = {n: x.detach().to("cuda:1").requires_grad_() for n, x in given.items()}
        for _ in range(2):  # prepared, then known
            y, final, grads, weights = run(op, given)
            other = run(op, elsewhere, None, [w.to("cuda:1") for w in weights])
            assert torch.cuda.current_device() == 0
            assert other[0].device == torch.device("cuda:1")
            assert torch.equal(other[0].to("cuda:0"), y)
            assert all(torch.equal(b.to("cuda:0"), a) for a, b in zip(grads, other[2], strict=True))


@pytest.mark.parametrize("op", OPS)
def test_two_head_sizes_in_one_process(op):
    for head_size in (64, 128, 64):
        check(op, make_inputs(op, torch.float32, tokens=20, head_size=head_size))


@pytest.mark.parametrize("op", OPS)
def test_first_use_in_a_capture_is_a_clear_error(op):
    size = 19 + 2 * OPS.index(op)  # ops share templates
    given = {n: x.detach() for n, x in make_inputs(op, torch.float32, head_size=size).items()}
    kernel.forget()  # whatever other tests have called
    signatures.forget()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            with pytest.raises(RwkvJitError, match="capture"):
                getattr(rwkv_jit, op)(*given.values())
        finally:
            graph.capture_end()
    check(op, make_inputs(op, torch.float32, head_size=size))


@pytest.mark.parametrize("op", OPS)
def test_new_shapes_of_a_loaded_kernel_can_be_captured(op):
    size = {"head_size": 12, "batch": 2}
    getattr(rwkv_jit, op)(*[x.detach() for x in make_inputs(op, torch.float32, tokens=9, **size).values()])
    given = {n: x.detach() for n, x in make_inputs(op, torch.float32, tokens=23, **size).items()}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = getattr(rwkv_jit, op)(*given.values())
    graph.replay()
    assert torch.equal(y, getattr(rwkv_jit, op)(*given.values())[0])


@pytest.mark.parametrize("op", OPS)
def test_known_signature_at_an_address_the_kernel_cannot_read(op):
    given = {n: x.detach() for n, x in make_inputs(op, torch.bfloat16, head_size=16).items()}
    # Heads before tokens: the strides of a copy are others.
    given = {n: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for n, x in given.items()}
    want, _ = getattr(rwkv_jit, op)(*given.values())
    known = len(prepared.calls)
    for moved, x in given.items():
        memory = torch.empty(x.numel() + 1, dtype=torch.bfloat16, device="cuda")
        shifted = memory.as_strided(x.shape, x.stride(), 1).copy_(x)
        y, _ = getattr(rwkv_jit, op)(*{**given, moved: shifted}.values())
        assert torch.equal(y, want)
    assert len(prepared.calls) == known


@pytest.mark.parametrize("op", OPS)
def test_torch_op_and_direct_call_do_the_same(op):
    """A dispatch mode makes a call take the way of compilers, through the torch op."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(function))
            return function(*args, **(kwargs or {}))

    given = make_inputs(op, torch.float32, head_size=16)
    y, final, grads, weights = run(op, given)
    with Recorder() as recorder:
        again = run(op, given, None, weights)
    assert f"rwkv_jit.{op}_fwd.default" in recorder.seen
    assert torch.equal(again[0], y)
    assert all(torch.equal(a, b) for a, b in zip(again[2], grads, strict=True))


def shapes_of(op):
    """Of inputs in programs of their own."""
    return [(2, 20) if n in FIXED.get(op, "") else (1, 4, 2, 20) for n in NAMES[op]]


@pytest.mark.parametrize("op", OPS)
def test_a_forked_child_gets_a_clear_error(op, seed):
    program = (
        f"import os, torch, rwkv_jit\ntorch.manual_seed({seed})\n"
        f"given = [torch.randn(*shape, device='cuda') for shape in {shapes_of(op)}]\n"
        f"rwkv_jit.{op}(*given)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        f"        rwkv_jit.{op}(*given)\n"
        "    except rwkv_jit.RwkvJitError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        f"os.waitpid(child, 0); y, _ = rwkv_jit.{op}(*given); print(bool(y.isfinite().all()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert "forked" in done.stdout
    assert "spawn" in done.stdout
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize("op", OPS)
def test_fullgraph_compile(op):
    comparing.check_fullgraph(op, make_inputs(op, torch.float32))


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    given = [x.detach() for x in make_inputs(op, torch.float32, head_size=16).values()]
    state = torch.randn(2, 3, 16, 16, device="cuda")
    decay = "raw" if op in WITH_DECAY else "none"
    options = (1.0, decay, "vk", 64, None, None, "recurrent", None, None, False, False, True)
    forward = (*given, state, None, *options, True, True)
    torch.library.opcheck(getattr(torch.ops.rwkv_jit, f"{op}_fwd").default, forward)
    y, final, saved = getattr(torch.ops.rwkv_jit, f"{op}_fwd")(*forward)
    backward = (*given, state, None, saved, y, final, *options)
    torch.library.opcheck(getattr(torch.ops.rwkv_jit, f"{op}_bwd").default, backward)


@pytest.mark.parametrize("op", OPS)
def test_cupy_arrays_come_in_through_dlpack(op):
    import cupy

    given = {n: x.detach() for n, x in make_inputs(op, torch.float32, head_size=16).items()}
    want, _ = getattr(rwkv_jit, op)(*given.values())
    y, _ = getattr(rwkv_jit, op)(*[cupy.from_dlpack(x) for x in given.values()])
    assert torch.equal(y, want)


NATIVE = (
    [f"sm_{major}{minor}a" for major, minor in [torch.cuda.get_device_capability()] if major >= 9] if MEMORY else []
)


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", *NATIVE])
@pytest.mark.parametrize("op", OPS)
def test_other_architectures(op, arch, launched, monkeypatch):
    """The code that sm_75 and sm_80 get, as PTX that the driver makes run here, and this GPU's own extended target."""
    monkeypatch.setenv("RWKVJIT_ARCH", arch)
    for dtype in DTYPES.values():
        check(op, make_inputs(op, dtype, tokens=40, head_size=40))
    assert {made.target for made in launched} == {arch}
    stem = table.OPS[op].stem
    names = [made.name for made in launched if made.name.startswith(stem)]
    assert sorted(names) == sorted(f"{stem}_recurrent_{way}" for way in ("forward", "backward") for _ in DTYPES)


@pytest.mark.parametrize("op", OPS)
def test_a_second_process_finds_the_kernels_on_disk(op, seed, tmp_path):
    program = (
        f"import torch, rwkv_jit\ntorch.manual_seed({seed})\n"
        f"given = [torch.randn(*shape, device='cuda').requires_grad_() for shape in {shapes_of(op)}]\n"
        f"y, _ = rwkv_jit.{op}(*given)\ny.sum().backward()\ntorch.cuda.synchronize()\n"
        "print(rwkv_jit.cache_info())"
    )
    env = {**os.environ, "RWKVJIT_CACHE_DIR": str(tmp_path)}
    first = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    env["RWKVJIT_ASSERT_CACHED"] = "1"
    second = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    count = 3 if op in comparing.FIXED else 2  # with the kernel that adds up what has no tokens
    assert f"'compiled': {count}" in first.stdout
    assert f"'disk': {count}" in second.stdout
    assert "'compiled': 0" in second.stdout


@pytest.mark.parametrize("op", OPS)
def test_available_here(op):
    assert versions.is_available()
    assert op in table.OPS


# ---- the normalizer of linear attention --------------------------------------------------------------------------


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("value_size", [1, 7, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["linear_attention"])
def test_normalized(op, dtype, value_size, layout):
    """Keys and queries are positive, as a feature map makes them: their products are then far from 0."""
    given = make_inputs(op, DTYPES[dtype], tokens=130, head_size=40, value_size=value_size)
    given = {n: (x if n == "v" else x.abs() + 0.1).detach().requires_grad_() for n, x in given.items()}
    sizes = (value_size, 40) if layout == "vk" else (40, value_size)
    state = torch.randn(2, 3, *sizes, device="cuda", requires_grad=True)
    z = (torch.rand(2, 3, 40, device="cuda") + 0.1).requires_grad_()

    def results(function, leaves, weights=None):
        *inputs, state, z = leaves
        options = {"backend": "recurrent"} if function is rwkv_jit.linear_attention else {}
        y, (final, last) = function(*inputs, (state, z), True, state_layout=layout, normalize=True, **options)
        weights = weights or [torch.randn_like(x) for x in (y, final, last)]
        grads = torch.autograd.grad([y, final, last], leaves, [w.to(y.dtype) if i == 0 else w.to(final.dtype)
                                                              for i, w in enumerate(weights)])  # fmt: skip
        return [y, final, last, *grads], weights

    leaves = [*given.values(), state, z]
    found, weights = results(rwkv_jit.linear_attention, leaves)
    exact, _ = results(rwkv_jit.linear_attention_ref, [x.detach().double().requires_grad_() for x in leaves], weights)
    names = ("y", "S", "z", "dq", "dk", "dv", "dS", "dz")
    errors = {n: relative(x, want) for n, x, want in zip(names, found, exact, strict=True)}
    gate = 1e-5 if dtype == "fp32" else 8e-3
    assert all(error <= gate for error in errors.values()), errors
    assert max(errors["S"], errors["z"]) <= GATE[torch.float32]


@pytest.mark.parametrize("op", ["linear_attention"])
def test_normalized_prompt_continues_from_its_state(op):
    q, k, v = (x.detach().abs() for x in make_inputs(op, torch.float32, tokens=50).values())
    whole, last = rwkv_jit.linear_attention(q, k, v, None, True, normalize=True)
    _, state = rwkv_jit.linear_attention(q[:, :20], k[:, :20], v[:, :20], None, True, normalize=True)
    y, final = rwkv_jit.linear_attention(q[:, 20:], k[:, 20:], v[:, 20:], state, True, normalize=True)
    assert torch.equal(y, whole[:, 20:])
    assert all(torch.equal(a, b) for a, b in zip(final, last, strict=True))


@pytest.mark.parametrize("backend", ["recurrent", "auto"])
@pytest.mark.parametrize("op", OPS)
def test_thread_whose_first_use_of_a_gpu_is_a_known_call(op, backend):
    given = [x.detach() for x in make_inputs(op, torch.bfloat16).values()]
    want, _ = getattr(rwkv_jit, op)(*given, backend=backend)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        found, _ = pool.submit(getattr(rwkv_jit, op), *given, backend=backend).result()
    torch.cuda.synchronize()
    assert torch.equal(found, want)


def test_ops_of_one_template_agree_where_they_are_the_same():
    """Without decay gla is linear attention, and wkv5 is wkv6 with the same w for every token."""
    r, k, v, g = make_inputs("gla", torch.float32).values()
    y, final = rwkv_jit.gla(r, k, v, torch.zeros_like(g), None, True)
    same, last = rwkv_jit.linear_attention(r, k, v, None, True)
    assert relative(y, same) < 1e-6
    assert relative(final, last) < 1e-6
    r, k, v, w, u = make_inputs("wkv5", torch.float32).values()
    y, _ = rwkv_jit.wkv5(r, k, v, w, u)
    same, _ = rwkv_jit.wkv6(r, k, v, w.expand_as(r), u)
    assert torch.equal(y, same)
