"""Plans on a driver that takes notes: how a schedule is bound to tensors, and what happens when it runs."""

import ctypes
import gc
import re
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from stub_driver import profiled

import rwkv_jit
from rwkv_jit.call import tensors
from rwkv_jit.call.plan import Plan
from rwkv_jit.desk import cli, commands
from rwkv_jit.kernels import cuda, kernel
from rwkv_jit.kernels.errors import CompileError, RwkvJitError
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.kernels.template import Template
from rwkv_jit.schedules.problem import Op, Problem
from rwkv_jit.schedules.schedule import Result, Schedule, Step, Stride, Zero, renamed
from rwkv_jit.schedules.table import OPS

STRIDES = ("strides.cuh", "struct Strides { i64 batch, token, head; };\nstruct RowStrides { i64 batch, token; };\n")
OP = Op("mix", {"x": "BTHK", "u": "HK"}, "mix", output="BTHK")
B, T, H, K = 2, 6, 3, 8
MIX = "const float* __restrict__ x, const float* __restrict__ u, float* __restrict__ y"


def template(entry, arguments):
    text = f'extern "C" __global__ void __launch_bounds__(NUM_THREADS) {entry}(\n    {arguments}) {{\n}}\n'
    return Template(entry, text, (STRIDES,))


def step(arguments=MIX, bind=None, entry="mix", grid=(4, 3, 1), parameters=(), **more):
    return Step(template(entry, arguments), entry, {"NUM_THREADS": 64, **dict(parameters)}, grid, bind or {}, **more)


def schedule(*steps, results=True, **more):
    return Schedule(steps or (step(),), {"y": Result((B, T, H, K), "fp32")} if results else {}, **more)


def make(u=(H, K)):
    return {"x": torch.randn(B, T, H, K), "u": torch.randn(u)}


def plan_of(made, arrays, *more):
    problem = Problem(OP, Gpu("sm_80"), {"x": "fp32", "u": "fp32"}, B=B, T=T, H=H, K=K, N=B)
    return Plan(made, problem, arrays, *more)


def run(made, arrays, *more):
    return plan_of(made, arrays, *more).run([*arrays.values()])


def places(arrays):
    return {name: 0 if x is None else x.data_ptr() for name, x in arrays.items()}


# ---- kernels that may not be compiled ----------------------------------------------------------------------------

SIZES = {"B": 2, "T": 64, "H": 2, "G": 2, "K": 16, "V": 16, "C": 32}
HALF, FULL = torch.bfloat16, torch.float32


def called(name, dtype=HALF, tokens=None, grad=False, pool=None, inputs=None, **options):
    """Call an op, or one over a pool of states of this dtype; return the error."""
    op = OPS[name.split("_")[0] if name.startswith("wkv") else name.removesuffix("_update").removesuffix("_varlen")]
    sizes = SIZES | ({"T": tokens} if tokens else {})
    own = {
        x: torch.randn([sizes[dim] for dim in dims]).to((inputs or {}).get(x, dtype)) for x, dims in op.inputs.items()
    }
    arrays = [x.requires_grad_(grad) for x in own.values()]
    if name.endswith(("_update", "_varlen")):
        arrays = [x.flatten(0, 1) if x.dim() == 4 and name.endswith("_varlen") else x for x in arrays]
        arrays = [x[:, 0] if x.dim() == 4 or (x.dim() == 3 and name == "wkv4_update") else x for x in arrays]
        shape = (2, 3, 32) if name == "wkv4_update" else (2, 2, 16, 16)
        arrays = [torch.zeros(shape, dtype=pool), *arrays]
        if name.endswith("_varlen"):
            options["cu_seqlens"] = torch.tensor([0, 64, 128])
    with pytest.raises(CompileError) as caught:
        getattr(rwkv_jit, name)(*arrays, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        *({"name": op} for op in OPS),
        *({"name": op, "grad": True, "dtype": torch.float16} for op in OPS),
        {"name": "wkv7", "dtype": FULL, "tokens": 3},
        {"name": "wkv7", "decay": "log", "state_layout": "kv"},
        {"name": "wkv6", "inputs": {"w": FULL, "u": FULL}},
        {"name": "timex", "tokens": 192},
        *({"name": f"{op}_update", "pool": FULL} for op in OPS if OPS[op].state),
        {"name": "wkv7_update", "pool": HALF, "decay": "sigmoid"},
        *({"name": f"{op}_varlen", "pool": FULL} for op in ("wkv7", "gla")),
    ],
    ids=lambda call: " ".join(map(str, call.values())),
)
def test_what_is_not_in_the_cache_is_named_with_the_command_that_compiles_it(call, on_gpu, monkeypatch):
    wanted, get_most = [], kernel.get_most
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    monkeypatch.setattr(kernel, "_stored", lambda *_: None)
    monkeypatch.setattr(kernel, "get_most", lambda own, rest, soon: wanted.extend([*own, *rest]) or get_most(own, rest))
    error = called(**call)
    match = re.fullmatch(
        r"RWKVJIT_ASSERT_CACHED is set and \w+ for sm_80 is not in the cache; to compile it: (.*)", error
    )
    program, *arguments = match[1].split()
    assert (program, arguments[:2]) == ("rwkv-jit", ["warm", "--op"])
    parsed = cli._parser().parse_args(arguments)
    made = {kernel.memory_key(request) for request in commands._asked_for(parsed)}
    assert wanted
    assert [dict(each.parameters) for each in wanted if kernel.memory_key(each) not in made] == []


def test_what_no_command_compiles_is_named_with_the_call_that_does(on_gpu, monkeypatch):
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    monkeypatch.setattr(kernel, "_stored", lambda *_: None)
    with pytest.raises(CompileError, match="is not in the cache; call cross_entropy once without that variable$"):
        rwkv_jit.cross_entropy(torch.ones(3, 32), torch.zeros(3, dtype=torch.int64))


# ---- arguments by their names ------------------------------------------------------------------------------------


def test_arguments_are_bound_by_their_names(on_gpu):
    """Tensors and results of these names, what `bind` says, and null pointers; more names than there are do no harm."""
    arguments = (
        f"{MIX}, const float* __restrict__ from, float* __restrict__ missing, const i64* __restrict__ cu_seqlens, "
        "Strides x_strides, RowStrides u_strides, Strides own_strides, Strides no_strides, i64 tokens, int few, "
        "float factor, bool is_on, i64 between"
    )
    bind = {
        "from": "u", "missing": None, "no": None, "own_strides": "x", "tokens": 2**40, "few": -3, "factor": 0.25,
        "is_on": True, "between": Stride("x", "T"), "what the kernel does not have": "neither",
    }  # fmt: skip
    arrays = {**make(), "cu_seqlens": None}
    arrays["x"] = torch.randn(B, T, H, 2 * K)[..., :K]
    (y,) = run(schedule(step(arguments, bind)), arrays)
    (launch,) = on_gpu.launches
    of_x = (T * H * 2 * K, H * 2 * K, 2 * K)
    assert launch.named == {
        **places(arrays), "y": y.data_ptr(), "from": arrays["u"].data_ptr(), "missing": 0, "x_strides": of_x,
        "u_strides": (0, 0), "own_strides": of_x, "no_strides": (0, 0, 0), "tokens": 2**40, "few": -3, "factor": 0.25,
        "is_on": True, "between": H * 2 * K,
    }  # fmt: skip
    assert (launch.grid, launch.block, launch.stream, launch.shared_bytes) == ((4, 3, 1), (64, 1, 1), 100, 0)
    assert (y.shape, y.dtype) == ((B, T, H, K), torch.float32)


@pytest.mark.parametrize(
    ("argument", "bind"),
    [
        ("float* wrong", {}),
        ("float* wrong", {"wrong": "nobody"}),
        ("i64 wrong", {}),
        ("float wrong", {"wrong": None}),
        ("i64 wrong", {"wrong": "x"}),
    ],
)
def test_argument_that_nothing_is_bound_to_is_an_error(argument, bind, on_gpu):
    message = f"mix: nothing is bound to its argument {argument}"
    with pytest.raises(RwkvJitError, match=f"^{re.escape(message)}$"):
        plan_of(schedule(step(f"{MIX}, {argument}", bind)), make())
    assert on_gpu.launches == []


def test_kernel_that_the_template_does_not_show_is_an_error(on_gpu):
    hidden = step()._replace(template=Template("mix", "#define NAME mix\n", (STRIDES,)))
    on_gpu.sizes["mix"] = []
    with pytest.raises(RwkvJitError, match="^mix: there is no kernel 'mix' whose arguments can be read$"):
        plan_of(schedule(hidden), make())


def test_shared_memory_is_that_of_the_kernel_or_of_the_step(on_gpu):
    of_kernel = step(parameters={"SHARED_BYTES": 70_000}, shared_bytes=5)
    run(schedule(of_kernel, step(shared_bytes=5, parameters={"N": 1})), make())
    assert [launch.shared_bytes for launch in on_gpu.launches] == [70_000, 5]
    assert [*on_gpu.shared_bytes.values()] == [70_000]  # asked for where it is more than every GPU gives


@pytest.mark.parametrize(("wanted", "given"), [(1000, 264), (100, 100)])
def test_resident_blocks_are_no_more_than_there_is_room_for(wanted, given, on_gpu):
    """132 multiprocessors with room for two each; every block has a piece of scratch of its own."""
    made = step(f"{MIX}, float* scratch", grid=(wanted, 3, 1), is_resident=True, per_block=("scratch", 48))
    plan = plan_of(schedule(made), make())
    plan.run([*make().values()])
    assert on_gpu.launches[0].grid == (given, 3, 1)
    assert plan._scratch_bytes == 48 * given


def test_resident_blocks_are_as_many_as_a_kernel_was_made_for(on_gpu):
    """No driver is asked: before a launch it knows nothing of the shared memory above what every GPU gives."""
    sizes = {"BLOCKS_PER_SM": 3, "SHARED_BYTES": 70_000}
    plan_of(schedule(step(grid=(1000, 1, 1), is_resident=True, parameters=sizes)), make()).run([*make().values()])
    assert on_gpu.launches[0].grid == (3 * 132, 1, 1)


# ---- copies ------------------------------------------------------------------------------------------------------


def test_tensors_that_kernels_read_in_place_are_not_copied(on_gpu):
    arrays = make()
    arrays["x"] = torch.randn(T, H, B, K).permute(2, 0, 1, 3)
    run(schedule(step(f"{MIX}, Strides x_strides"), vectors={"x": 4, "u": 4}), arrays)
    named = on_gpu.launches[0].named
    assert (named["x"], named["u"]) == (arrays["x"].data_ptr(), arrays["u"].data_ptr())
    assert named["x_strides"] == arrays["x"].stride()[:3]


@pytest.mark.parametrize(
    ("change", "vectors", "segments"),
    [
        (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), {}, 1),
        (lambda x: torch.cat([x, x[..., :2]], -1)[..., :K], {"x": 4}, 1),
        (lambda x: torch.cat([x, x], 1)[:, :T], {}, 3),
    ],
    ids=["channels apart", "rows between vectors", "sequences apart in segments"],
)
def test_tensor_that_kernels_cannot_read_is_copied_every_time(change, vectors, segments, on_gpu):
    seen, arrays = [], make()
    x = arrays["x"] = change(arrays["x"])
    on_gpu.while_running = lambda launch: seen.append(torch.tensor(_floats(launch.named["x"], x.numel())).view(x.shape))
    plan = plan_of(schedule(step(f"{MIX}, Strides x_strides", segments=segments), vectors=vectors), arrays)
    for _ in range(2):
        x.copy_(torch.randn(x.shape))
        plan.run([*arrays.values()])
        assert torch.equal(seen[-1], x)
        named = on_gpu.launches[-1].named
        assert named["x"] != x.data_ptr()
        assert named["x_strides"] == (T // segments * H * K, H * K, K)
    unchanged = plan_of(schedule(step(segments=segments)), make())
    assert unchanged._copies == ()


def _floats(address, count):
    return [*(ctypes.c_float * count).from_address(address)]


def test_input_without_tokens_that_has_gaps_is_copied(on_gpu):
    arrays = make()
    arrays["u"] = torch.randn(H, 2 * K)[:, :K]
    run(schedule(step(f"{MIX}, Strides u_strides")), arrays)
    named = on_gpu.launches[0].named
    assert named["u"] != arrays["u"].data_ptr()
    assert named["u_strides"] == (0, 0, K)


def test_address_that_cannot_be_read_has_all_inputs_copied_by_one_plan(on_gpu):
    """Strides are those of the copies, whatever those of the tensors are; the plan for that is made once."""
    made = schedule(step(f"{MIX}, Strides x_strides"), vectors={"x": 4})
    arrays = {**make(), "state": torch.randn(5)[1:]}
    arrays["x"] = torch.randn(B, H, T, K).transpose(1, 2)
    plan = plan_of(made, arrays)
    plan.run([*arrays.values()])
    assert on_gpu.launches[-1].named["x_strides"] == arrays["x"].stride()[:3]
    shifted = torch.randn(arrays["x"].numel() + 1)[1:].view(B, H, T, K).transpose(1, 2)
    functions = len(on_gpu.functions)
    for _ in range(2):
        plan.run([shifted, *list(arrays.values())[1:]])
        named = on_gpu.launches[-1].named
        assert named["x"] not in (0, shifted.data_ptr())
        assert named["x"] % 16 == 0
        assert named["u"] != arrays["u"].data_ptr()
        assert named["x_strides"] == (T * H * K, H * K, K)
    assert len(on_gpu.functions) == functions + 1
    # A kernel that reads one element at a time does not care.
    plan_of(schedule(), arrays).run([shifted, *list(arrays.values())[1:]])
    assert on_gpu.launches[-1].named["x"] == shifted.data_ptr()


CHANGES = f"{MIX}, float* state, const float* __restrict__ w0"


def _adds_one_to(name, count):
    """What a kernel does that changes so many numbers."""

    def run(launch):
        numbers = (ctypes.c_float * count).from_address(launch.named[name])
        numbers[:] = [x + 1 for x in numbers]

    return run


def test_a_pool_with_gaps_is_changed_in_place_also_beside_inputs_that_are_copied(on_gpu):
    """A plan is bound to one slot; the one for copies of the inputs takes the pool itself all the same."""
    on_gpu.while_running = _adds_one_to("state", 5)
    pool = torch.zeros(3, 7)[:, :5]
    arrays = {**make(), "state": pool[0], "w0": torch.randn(4, 2)[:, 0]}
    plan = plan_of(schedule(step(CHANGES), vectors={"x": 4}), arrays)
    shifted = torch.randn(B * T * H * K + 1)[1:].view(B, T, H, K)
    for count, x in enumerate((arrays["x"], shifted, shifted, arrays["x"]), 1):
        plan.run([x, arrays["u"], pool, arrays["w0"]])
        named = on_gpu.launches[-1].named
        assert named["state"] == pool.data_ptr()
        assert named["w0"] != arrays["w0"].data_ptr()  # which is read alone, and has gaps
        assert (pool[0] == count).all()
    assert not pool[1:].any()


@pytest.mark.parametrize("how", ["has gaps", "lies apart", "both"])
def test_what_kernels_change_in_a_copy_is_written_back(how, on_gpu):
    """An input that is changed in place, as the rows of an activation."""
    on_gpu.while_running = _adds_one_to("x", B * T * H * K)
    arrays = make()
    memory = torch.zeros(B * T * H * 2 * K + 1)
    x = memory[1 if how != "has gaps" else 0 :][: B * T * H * 2 * K].view(B, T, H, K, 2)
    x = x[..., 0] if how != "lies apart" else x.flatten()[: B * T * H * K].view(B, T, H, K)
    made = schedule(step(MIX.replace("const float* __restrict__ x", "float* x")), vectors={"x": 4})
    plan = plan_of(
        made, {**arrays, "x": x if how == "has gaps" else arrays["x"]}, {}, (), None if how != "both" else [0]
    )
    for count in (1, 2):
        plan.run([x, arrays["u"]])
        assert on_gpu.launches[-1].named["x"] != x.data_ptr()
        assert (x == count).all()
    assert memory.sum() == 2 * x.numel()


def test_memory_that_a_caller_wants_written_may_lie_anywhere(on_gpu):
    """Kernels that write several numbers at once get memory of their own, which is written back."""
    on_gpu.while_running = _adds_one_to("out", 8)
    arrays = {**make(), "out": torch.zeros(8)}
    plan = plan_of(schedule(step(f"{MIX}, float* out"), vectors={"x": 4, "out": 4}), arrays)
    for begin in (0, 1, 4, 3):
        memory = torch.zeros(16)
        out = memory[begin : begin + 8]
        plan.run([arrays["x"], arrays["u"], out])
        named = on_gpu.launches[-1].named
        assert named["out"] % 16 == 0
        assert (named["out"] == out.data_ptr()) == (begin % 4 == 0)
        assert (out == 1).all()
        assert memory.sum() == 8


# ---- results and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(B, T, H, K), (B, T, H, K + 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_results_are_contiguous_and_of_their_type(shape, turned, on_gpu):
    arrays = make()
    if turned:
        arrays["x"] = torch.randn(B, H, T, K).transpose(1, 2)
    made = Schedule((step(),), {"y": Result(shape, "fp32"), "z": Result((4,), "bf16")})
    y, z = run(made, arrays)
    assert (y.shape, y.dtype, z.shape, z.dtype) == (shape, torch.float32, (4,), torch.bfloat16)
    assert y.is_contiguous()
    assert y.data_ptr() not in places(arrays).values()
    assert on_gpu.launches[0].named["y"] == y.data_ptr()


POINTERS = "float* __restrict__ one, float* __restrict__ two, float* __restrict__ three"


def test_what_is_kept_lies_in_one_tensor_that_the_backward_reads(on_gpu):
    pieces = {"one": 32, "two": 48, "three": 20}
    arrays = make()
    y, kept = run(schedule(step(f"{MIX}, {POINTERS}"), kept=pieces), arrays)
    assert (kept.dtype, kept.numel()) == (torch.float32, 25)
    begin = kept.data_ptr()
    wanted = {"one": begin, "two": begin + 32, "three": begin + 80}
    assert {name: on_gpu.launches[0].named[name] for name in pieces} == wanted
    assert run(schedule(step(POINTERS), results=False), {**arrays, "dy": y, "saved": kept}, pieces) == []
    assert on_gpu.launches[1].named == wanted


def test_pieces_of_scratch_are_apart_and_begin_where_16_bytes_can_be_read(on_gpu):
    sizes = {"one": 20, "two": 0, "three": 33}
    made = schedule(step(f"{MIX}, {POINTERS}"), scratch=sizes)
    run(made, make())
    named = on_gpu.launches[0].named
    assert named["two"] == 0  # there is nothing in it
    assert (named["one"] % 16, named["three"] % 16) == (0, 0)
    assert abs(named["three"] - named["one"]) >= 32


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (3, 0, 5), (0,)])
def test_memory_of_results_is_that_of_contiguous_tensors(shape):
    made = tensors.memory(shape, torch.float32)
    assert made.strides == torch.empty(shape).stride()


def test_zeros_are_written_in_their_order_on_the_streams_of_calls(on_gpu, monkeypatch):
    seen, new = [], tensors.new
    on_gpu.while_running = lambda launch: seen.append(_floats(launch.named["flags"], 4))
    monkeypatch.setattr(tensors, "new", lambda *memory: new(*memory).fill_(7))
    steps = (step(f"{MIX}, float* flags"), Zero("flags"), step(f"{MIX}, float* flags"), Zero("nothing"))
    run(schedule(*steps, scratch={"flags": 16, "nothing": 0}), make())
    assert seen[0] != [0.0] * 4
    assert seen[1] == [0.0] * 4
    address = on_gpu.launches[0].named["flags"]
    assert [x for x in on_gpu.order if x[0] == "zero"] == [("zero", address, 16, 100)]
    seen.clear()
    plan = plan_of(schedule(Zero("flags"), steps[0], kept={"flags": 16}), make())
    plan.run([*make().values()])
    assert seen == [[0.0] * 4]


# ---- streams, devices and threads --------------------------------------------------------------------------------


def test_steps_beside_the_others_wait_as_the_schedule_says(on_gpu):
    first, beside, after, last = (
        step(entry=entry, is_beside=entry == "beside", waits=entry in ("beside", "after"))
        for entry in ("first", "beside", "after", "last")
    )
    made = schedule(first, beside, Zero("x_zero"), after, last, scratch={"x_zero": 16})
    run(made, make())
    main, side = 100, 1001
    assert [x if x[0] == "wait" else (x[0] if x[0] == "zero" else x.entry, x[-1] if x[0] == "zero" else x.stream)
            for x in on_gpu.order] == [
        ("first", main), ("wait", side, main), ("beside", side), ("zero", main), ("wait", main, side), ("after", main),
        ("last", main),
    ]  # fmt: skip


def test_error_leaves_no_stream_that_others_do_not_wait_for(on_gpu):
    """The memory that a kernel beside the others uses goes back to torch with the call."""

    def fail(launch):
        if launch.entry == "last":
            raise RuntimeError("it failed")

    on_gpu.while_running = fail
    with pytest.raises(RuntimeError, match="^it failed$"):
        run(schedule(step(entry="beside", is_beside=True, waits=True), step(entry="last")), make())
    assert on_gpu.order[-1] == ("wait", 100, 1001)


def test_each_thread_keeps_one_event_while_it_lives(on_gpu):
    """A thread that recorded the event of another between its record and its wait would have that wait for less."""
    plan = plan_of(schedule(step(entry="beside", is_beside=True, waits=True), step(entry="last")), make())

    def run():
        plan.run([*make().values()])

    for _ in range(3):
        run()
    assert on_gpu.events == [1001]  # of the stream beside, for which the call's waits last
    worker = threading.Thread(target=lambda: [run(), run()])
    worker.start()
    worker.join()
    gc.collect()
    assert len(on_gpu.events) == 2
    assert on_gpu.events[1] == "destroyed"
    run()
    assert len(on_gpu.events) == 2
    assert len(on_gpu.streams) == 1


def test_a_plan_follows_the_current_stream_with_one_beside_each(on_gpu, monkeypatch):
    plan = plan_of(schedule(step(entry="beside", is_beside=True), step(entry="last")), make())
    for stream in (100, 7, 100, 7, *range(200, 300), 7):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device, stream=stream: stream, raising=False)
        on_gpu.order.clear()
        arrays = make()
        plan.run([*arrays.values()])
        side = cuda.side_stream(0, stream).raw
        assert [x.stream for x in on_gpu.launches] == [side, stream]
        assert on_gpu.order[-1] == ("wait", stream, side)
        assert {x.named["x"] for x in on_gpu.launches} == {arrays["x"].data_ptr()}
    (launches,) = plan._launches
    assert len(launches._rooms.by_stream) <= 64


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("home", [0, 1])
def test_plan_runs_on_its_device_whichever_is_current(home, current, is_beside, on_gpu):
    on_gpu.use("sm_80")
    on_gpu.home, on_gpu.current = home, current
    plan = plan_of(schedule(step(), step(is_beside=is_beside, parameters={"N": 1})), make())
    plan.run([*make().values()])
    assert on_gpu.current == current
    assert {(launch.device, launch.current_device) for launch in on_gpu.launches} == {(home, home)}
    assert on_gpu.launches[0].stream == 100 + home
    assert on_gpu.streams == [home] * is_beside
    assert [module.device for module in on_gpu.modules] == [home] * 2


def test_threads_that_run_a_plan_at_once_do_not_mix_values(on_gpu):
    count, ys = 6, {}
    plan = plan_of(schedule(step(f"{MIX}, float* scratch"), scratch={"scratch": 64}), make())
    inputs = [make() for _ in range(count)]
    all_written = threading.Barrier(count, timeout=60)
    on_gpu.before_reading = all_written.wait

    def work(n):
        (ys[inputs[n]["x"].data_ptr()],) = plan.run([*inputs[n].values()])

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    named = {launch.named["x"]: launch.named for launch in on_gpu.launches}
    assert len(named) == count
    assert {x: launch["y"] for x, launch in named.items()} == {x: y.data_ptr() for x, y in ys.items()}
    assert len({launch["scratch"] for launch in named.values()}) == count


# ---- the first time ----------------------------------------------------------------------------------------------


def test_capture_needs_all_kernels_loaded(on_gpu):
    arrays, made = make(), schedule(step(), step(entry="other", parameters={"N": 1}))
    on_gpu.capturing = True
    message = "^mix: first use inside a CUDA graph capture, where nothing can be compiled or loaded; call it once with"
    for is_loaded in (False, True):
        with pytest.raises(RwkvJitError, match=message):
            plan_of(made, arrays)
        if not is_loaded:  # one of the two
            on_gpu.capturing = False
            plan_of(schedule(), arrays)
            on_gpu.capturing = True
    on_gpu.capturing = False
    plan_of(made, arrays)
    on_gpu.capturing = True
    plan_of(made, arrays).run([*arrays.values()])
    assert len(on_gpu.launches) == 2


def test_kernels_that_are_wanted_soon_are_asked_for_too(on_gpu):
    soon = step(entry="later").request(Gpu("sm_80"))
    plan_of(schedule(), make(), None, [soon])
    assert [request.template.name for request in on_gpu.asked] == ["mix", "later"]


def test_inputs_are_compared_with_dlpack_when_they_come_first(on_gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(tensors, "validate", lambda name, x: seen.append(name))
    arrays = {**make(), "initial_state": torch.randn(3), "cu_seqlens": None}
    plan = plan_of(schedule(), arrays)
    plan.run([*arrays.values()])
    assert seen == ["x", "u"]
    backward = {**arrays, "dy": torch.randn(B, T, H, K), "saved": torch.randn(4)}
    plan_of(schedule(), backward, {"kept": 16})
    assert seen == ["x", "u"]  # which the backward has again


# ---- kernels that are not needed yet -----------------------------------------------------------------------------

REST = step("const int* __restrict__ counts, float* __restrict__ y", entry="rest", idle_at=("counts", 5))
COUNTS = step("int* __restrict__ counts, float* __restrict__ y", entry="count")


@pytest.fixture
def compiling(on_gpu, monkeypatch):
    """The kernel "rest" is nowhere, and compiles until its future is given one; "count" leaves three numbers."""
    futures, stored, really_get, counts = [], kernel._stored, kernel.get_async, [5, 7, 5]

    def get_async(request):
        futures.append((request, Future()))
        return futures[-1][1]

    def finish():
        request, future = futures[-1]
        future.set_result(stored(request, request.template.render(request.parameters), None))

    def count(launch):
        if launch.entry == "count":
            ctypes.memmove(launch.named["counts"], struct.pack("=3i", *counts), 12)

    monkeypatch.setattr(
        kernel, "_stored", lambda request, *more: None if request.template.name == "rest" else stored(request, *more)
    )
    monkeypatch.setattr(kernel, "get_async", get_async)

    def give_up():
        for _, future in futures:
            future.set_exception(TimeoutError("nobody finished the kernel"))

    on_gpu.while_running = count
    timer = threading.Timer(20, give_up)
    timer.start()
    yield SimpleNamespace(counts=counts, finish=finish, futures=futures, get_async=really_get)
    timer.cancel()


@pytest.fixture(params=["scratch", "kept"])
def counting(request, compiling, on_gpu):
    """Run a plan whose second launch is needed where a count is below 5; returns what it launched."""
    arrays = make()
    made = plan_of(schedule(COUNTS, REST, **{request.param: {"before": 16, "counts": 12}}), arrays)

    def run():
        made.run([*arrays.values()])
        return [launch.entry for launch in on_gpu.take()]

    return run


def test_calls_go_on_without_a_kernel_that_has_nothing_to_do_while_it_compiles(counting, compiling, on_gpu):
    for _ in range(2):
        assert counting() == ["count"]
    compiling.finish()
    bound = []
    for _ in range(2):
        assert counting() == ["count", "rest"]
        bound.append(len(on_gpu.functions))
    assert bound == [2, 2]  # once for all calls
    assert "_launch" not in [code.co_name for code in profiled(counting)[0]]  # nothing looks whether it is there
    assert len(compiling.futures) == 1


@pytest.mark.parametrize("counts", [[4, 5, 5], [5, 5, 4], [0, 9, 9]])
def test_a_kernel_that_has_something_to_do_is_waited_for(counts, counting, compiling):
    compiling.counts[:] = counts
    timer = threading.Timer(0.1, compiling.finish)
    timer.start()
    assert counting() == ["count", "rest"]
    timer.join()


def test_threads_may_wait_for_a_kernel_at_once(counting, compiling, on_gpu):
    compiling.counts[:] = [4, 5, 5]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(counting) for _ in range(2)]
        time.sleep(0.2)  # both are in their launch
        compiling.finish()
        for call in calls:
            call.result()
    on_gpu.take()
    assert counting() == ["count", "rest"]


def test_a_capture_waits_for_a_kernel_that_still_compiles(counting, compiling, on_gpu):
    """A graph may replay with inputs that need it, and nothing can be read in a capture."""
    assert counting() == ["count"]
    on_gpu.capturing = True
    timer = threading.Timer(0.1, compiling.finish)
    timer.start()
    assert counting() == ["count", "rest"]
    timer.join()


def test_counts_are_those_of_the_forward_in_a_backward(compiling, on_gpu):
    rest = REST._replace(idle_at=("kept_counts", 5), bind={"counts": "kept_counts"})
    saved = torch.tensor([0, 5, 6, 0, 0, 4, 9, 9], dtype=torch.int32).view(torch.float32)
    arrays = {**make(), "dy": torch.randn(B, T, H, K), "saved": saved}
    made = plan_of(schedule(rest, step()), arrays, {"before": 4, "kept_counts": 8, "behind": 20})
    made.run([*arrays.values()])
    assert [launch.entry for launch in on_gpu.take()] == ["mix"]
    saved.view(torch.int32)[2] = 4
    compiling.finish()
    made.run([*arrays.values()])
    assert [launch.entry for launch in on_gpu.take()] == ["rest", "mix"]


@pytest.mark.parametrize("where", ["scratch", "kept", "saved"])
def test_where_nothing_is_counted_a_kernel_is_never_needed(where, compiling, on_gpu):
    on_gpu.while_running = lambda launch: None
    arrays = make() if where != "saved" else {**make(), "saved": torch.zeros(4)}
    steps = (REST, step()) if where == "saved" else (COUNTS, REST)
    buffers = {"before": 16, "counts": 0}
    made = (
        plan_of(schedule(*steps), arrays, buffers)
        if where == "saved" else plan_of(schedule(*steps, **{where: buffers}), arrays)
    )  # fmt: skip
    compiling.finish()
    made.run([*arrays.values()])
    assert "rest" not in [launch.entry for launch in on_gpu.take()]


def test_steps_that_take_other_buffers_look_at_those():
    (other,) = renamed([REST], {"counts": "other", "y": "z"})
    assert other.idle_at == ("other", 5)
    (same,) = renamed([step()], {"counts": "other"})
    assert same.idle_at is None


def test_a_kernel_that_does_not_compile_is_an_error_of_the_next_call(counting, compiling):
    assert counting() == ["count"]
    compiling.futures[-1][1].set_exception(CompileError("it does not compile"))
    with pytest.raises(CompileError, match="it does not compile"):
        counting()


def test_where_nothing_may_compile_the_first_call_says_what_is_missing(compiling, monkeypatch):
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    monkeypatch.setattr(kernel, "get_async", compiling.get_async)
    with pytest.raises(CompileError, match="rest .* is not in the cache"):
        plan_of(schedule(COUNTS, REST, scratch={"counts": 12}), make())


def test_kernels_that_may_be_idle_compile_behind_all_others(monkeypatch, on_gpu):
    asked = []
    monkeypatch.setattr(kernel, "_stored", lambda *_: None)
    monkeypatch.setattr(kernel, "get_async", lambda request: asked.append(request.template.name) or Future())
    monkeypatch.setattr(kernel, "_wait", lambda requests, served: 1 / 0)
    soon = step(entry="later").request(Gpu("sm_80"))
    with pytest.raises(ZeroDivisionError):
        plan_of(schedule(REST, COUNTS, scratch={"counts": 12}), make(), None, [soon])
    assert asked == ["count", "later", "rest"]


def test_nobody_waits_for_a_kernel_that_may_be_idle_while_another_call_compiles_it(on_gpu, monkeypatch):
    """As the forward's call has asked for those of the backward."""
    may_compile, is_compiling, stored = threading.Event(), threading.Event(), kernel._stored

    def compile_once(request, rendered):
        is_compiling.set()
        assert may_compile.wait(60)
        return stored(request, rendered, None)

    monkeypatch.setattr(
        kernel, "_stored", lambda request, *more: None if request.template.name == "rest" else stored(request, *more)
    )
    monkeypatch.setattr(kernel, "_compile_once", compile_once)
    kernel.get_async(REST.request(Gpu("sm_80")))
    assert is_compiling.wait(60)
    arrays = make()
    made = plan_of(schedule(COUNTS, REST, scratch={"counts": 12}), arrays)
    on_gpu.while_running = lambda launch: ctypes.memmove(launch.named["counts"], struct.pack("=3i", 5, 5, 5), 12)
    made.run([*arrays.values()])
    assert [launch.entry for launch in on_gpu.take()] == ["count"]
    may_compile.set()


def test_what_another_call_compiles_is_waited_for_and_nothing_that_is_queued_behind_it(on_gpu, monkeypatch):
    """A machine with one worker has a backward's kernel, and still compiles one that it does not need."""
    events, compiled, stored = {"mix": threading.Event(), "rest": threading.Event()}, [], kernel._stored

    def compile_once(request, rendered):
        events[request.template.name].wait(60)
        compiled.append(request.template.name)
        return stored(request, rendered, None)

    monkeypatch.setattr(kernel, "_stored", lambda *_: None)
    monkeypatch.setattr(kernel, "_compile_once", compile_once)
    monkeypatch.setattr(kernel.env, "workers", lambda: 1)
    mix = step()
    for each in (mix, REST):
        kernel.get_async(each.request(Gpu("sm_80")))
    while not kernel._lock(kernel.memory_key(mix.request(Gpu("sm_80")))).locked():
        pass
    timer = threading.Timer(0.1, events["mix"].set)
    timer.start()
    soon = [mix.request(Gpu("sm_80"))]  # nor is it asked for again
    plan_of(schedule(mix, REST, scratch={"counts": 12}), make(), None, soon)
    assert compiled == ["mix"]
    events["rest"].set()
    timer.join()
