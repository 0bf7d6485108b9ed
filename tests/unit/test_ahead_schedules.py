"""What is compiled ahead of calls: every kernel of every call is among what `warm` lists for calls like it."""

import contextlib
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rwkv_jit
from rwkv_jit.ahead import warm
from rwkv_jit.call import checks, options, prepared, tensors, torch_op, tuned
from rwkv_jit.call import switches as modes
from rwkv_jit.desk import cli, commands
from rwkv_jit.kernels import kernel, signatures
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.ops import wide_keys
from rwkv_jit.parallel import paused
from rwkv_jit.schedules import directions
from rwkv_jit.schedules.table import ALL, OPS

DTYPES = {name: dtype for dtype, name in tensors.STORAGE.items()}
WITH_HEADS = [name for name, op in OPS.items() if op.has_heads]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Sizes around those where another algorithm begins, or a last part of the keys is of another one.
SIZES = (1, 8, 30, 32, 40, 64, 72, 96, 104, 128, 136, 200, 256, 257, 264, 300)
FEW, MANY = 1, 2**20  # of the multiprocessors of a GPU, for the heads of any call here: heads enough, and too few
MULTIPROCESSORS = (FEW, 8, 132, MANY)


def keys(requests):
    """What tells kernels apart, with their names."""
    return {(request.template.name, kernel.memory_key(request)[1], request.arch) for request in requests}


def warmed(op, **options):
    """The kernels that are compiled ahead."""
    return _warmed(op, modes.current(), tuple(options.items()))


@functools.cache
def _warmed(op, switches, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "compile_all", lambda requests, progress: requests)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return keys(rwkv_jit.warm(op, **dict(options)))


class Recorder:
    """A known call that launches nothing; `asked` are the kernels of all of them, of each backward too."""

    asked = []

    def __init__(self, problem, arrays, asked, by_op):
        self.problem = problem
        Recorder.asked += directions.forward(problem).requests(problem.gpu)
        if problem.training:
            for has_final_state in {False, problem.has_final_state}:
                own = problem._replace(has_final_state=has_final_state)
                Recorder.asked += directions.backward(own).requests(own.gpu)

    def run(self, arrays):
        made = [
            torch.empty(result.shape, dtype=DTYPES[result.dtype])
            for result in directions.forward(self.problem).results.values()
        ]
        return [*made, torch.empty(0)] if self.problem.training else made

    def record(self, arrays):
        y, *states, kept = self.run(arrays)
        return (y, states[0] if self.problem.has_final_state else None), (*arrays, kept)


def longest(cu_seqlens, tokens):
    """The tokens of the longest packed sequence, as a call on a GPU finds them."""
    return 0 if cu_seqlens is None else int(cu_seqlens.diff().max())


def as_on_gpu(patch, arch, multiprocessors, choices):
    """Let tensors be taken for those of such a GPU."""
    patch.setattr(tensors, "gpu", lambda device: Gpu(arch, (), multiprocessors))
    patch.setattr(tensors, "multiprocessors", lambda device: multiprocessors)
    patch.setattr(tensors, "longest", longest)
    patch.setattr(tuned, "on_device", lambda device: choices)
    patch.setattr(tuned, "is_sound", lambda device, place: True)
    for module in (checks, torch_op, paused):
        patch.setattr(module, "is_for_kernels", lambda backend, x: backend != "reference")


def called(arch, multiprocessors, choices, is_eager, call):
    """The kernels that a call asks for on such a GPU: its tensors are taken for those of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "asked", [])
        as_on_gpu(patch, arch, multiprocessors, choices)
        patch.setattr(wide_keys, "_may_be_in_parts", lambda *_: True)
        patch.setattr(prepared, "of_problem", Recorder)
        if not is_eager:
            patch.setattr(tensors, "is_eager", lambda: False)
        signatures.forget()  # no call has come before
        call()
        signatures.forget()
        return keys(Recorder.asked)


def make(shape, dtype, requires_grad=False):
    """A tensor without memory."""
    return torch.empty((), dtype=dtype).expand(shape).detach().requires_grad_(requires_grad)


# ---- ops with heads ----------------------------------------------------------------------------------------------

DECAYS = {
    "decay": st.sampled_from(["raw", "sigmoid", "log", "direct"]),
    "decay_bound": st.sampled_from([None, -1.0, -3.0, -100.0]),
}
OF_HEADS = {
    "op": st.sampled_from(WITH_HEADS),
    "arch": st.sampled_from(ARCHS),
    "dtype": st.sampled_from(["bf16", "bf16", "fp16", "fp32"]),
    "K": st.sampled_from(SIZES) | st.integers(1, 300),
    "V": st.sampled_from(SIZES) | st.integers(1, 300),
    "H": st.integers(1, 3),
    "multiprocessors": st.sampled_from(MULTIPROCESSORS),
    "has_wide_decay": st.booleans(),
    "layout": st.sampled_from(["vk", "kv"]),
    "is_high": st.booleans(),  # the switches of precision
    **DECAYS,
}
CALLS = st.fixed_dictionaries({
    **OF_HEADS,
    "B": st.integers(1, 2),
    "T": st.sampled_from([0, 1, 16, 31, 32, 100, 300, 1024, 2048, 2**16]) | st.integers(2, 40),
    "leaves": st.sampled_from(["", "inputs", "v", "state"]),  # whose gradients are wanted
    "is_eager": st.booleans(),
    "is_packed": st.booleans(),
    "state": st.sampled_from([None, "fp32", "bf16", "fp16"]),
    "has_final_state": st.booleans(),
    "is_tuned": st.booleans(),
})  # fmt: skip


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=pytest.mark.full)])
def test_calls_ask_for_no_kernel_that_warm_does_not_list(examples):
    settings(max_examples=examples)(given(call=CALLS)(check))()


ONE_HEAD = {
    "dtype": "bf16", "arch": "sm_90", "K": 64, "V": 64, "B": 1, "H": 1, "has_wide_decay": False, "layout": "vk",
    "decay": "log", "decay_bound": None, "is_high": False, "is_eager": True, "is_tuned": False, "has_final_state": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({}, id="a block holds a head"),
        pytest.param({"decay": "sigmoid", "is_tuned": True}, id="tuned"),
        pytest.param({"decay": "direct", "decay_bound": -8.0}, id="short chunks"),
        pytest.param({"K": 200, "V": 200, "layout": "kv"}, id="large"),
        pytest.param({"arch": "sm_80", "K": 136, "V": 200}, id="large, no warp groups"),
        pytest.param({"dtype": "fp32"}, id="recurrent"),
        pytest.param({"dtype": "fp32", "is_high": True}, id="narrow"),
    ],
)
@pytest.mark.parametrize("op", WITH_HEADS)
def test_so_it_is_with_each_length_number_of_heads_and_purpose(op, row):
    several = itertools.product(
        (1, 2, 16, 32, 64, 128, 600, 2**12, 2**16), (FEW, 3, MANY), ((False, "fp32"), (False, None), (True, "fp32")),
        ("", "inputs", "state"),
    )  # fmt: skip
    for tokens, multiprocessors, (is_packed, state), leaves in several:
        if state is None and leaves == "state":
            continue  # a call of which nothing is wanted, as without leaves
        call = {"T": tokens, "multiprocessors": multiprocessors, "is_packed": is_packed, "state": state}
        check(ONE_HEAD | row | call | {"op": op, "leaves": leaves})


def check(call):
    op, dtype = OPS[call["op"]], DTYPES[call["dtype"]]
    sizes = {dim: call[dim] for dim in "BTHKV"} | ({"B": 1} if call["is_packed"] else {})
    wide = torch.float32 if call["has_wide_decay"] else dtype
    arrays = [
        make([sizes[dim] for dim in dims], wide if name in op.wide else dtype, call["leaves"] in ("inputs", name))
        for name, dims in op.inputs.items()
    ]
    sequences = 2 if call["is_packed"] else sizes["B"]
    ends = torch.tensor([0, sizes["T"] // 8, sizes["T"]]) if call["is_packed"] else None
    state = None
    if call["state"] is not None:
        shape = [sequences, sizes["H"], *(sizes[dim] for dim in call["layout"].upper())]
        state = make(shape, DTYPES[call["state"]], call["leaves"] == "state")
    training = call["leaves"] in ("inputs", "v") or (call["leaves"] == "state" and state is not None)
    decays = {} if op.decay == "none" else {name: call[name] for name in DECAYS}
    several = tuned.on_arch(call["arch"])
    with modes.at(modes.HIGH) if call["is_high"] else contextlib.nullcontext():
        asked = called(
            call["arch"], call["multiprocessors"], several[0] if several and call["is_tuned"] else (), call["is_eager"],
            lambda: getattr(rwkv_jit, op.name)(
                *arrays, state, call["has_final_state"], ends, state_layout=call["layout"], **decays
            ),
        )  # fmt: skip
        listed = warmed(
            op.name, head_sizes=sizes["K"], value_sizes=sizes["V"], dtypes=dtype, arch=call["arch"], w_dtype=wide,
            state_dtype=DTYPES[call["state"] or "fp32"], state_layout=call["layout"], backward=training, **decays,
        )  # fmt: skip
    assert asked
    assert asked <= listed


# ---- parts of sequences ------------------------------------------------------------------------------------------

PARTS = st.fixed_dictionaries({
    **OF_HEADS, "B": st.integers(1, 2), "T": st.sampled_from([0, 32, 64, 96, 100, 1024, 4096, 2**16]),
    "training": st.booleans(),
})  # fmt: skip


@pytest.mark.parametrize("examples", [80, pytest.param(1500, marks=pytest.mark.full)])
def test_calls_over_parts_ask_for_no_kernel_that_warm_does_not_list(examples):
    def check(call):
        check_part(call)

    settings(max_examples=examples)(given(call=PARTS)(check))()


def test_so_it_is_with_each_length_of_parts():
    several = itertools.product(WITH_HEADS, (64, 256, 2**16), (FEW, 132, MANY), (True, False))
    found = [
        check_part(ONE_HEAD | {"op": op, "T": tokens, "multiprocessors": multiprocessors, "training": training})
        for op, tokens, multiprocessors, training in several
    ]
    assert all(found)


def check_part(call):
    """Compare the kernels of a part that pause with those that are made ahead; return whether there are any."""
    op, dtype = OPS[call["op"]], DTYPES[call["dtype"]]
    wide = torch.float32 if call["has_wide_decay"] else dtype
    arrays = [make([call[dim] for dim in dims], wide if name in op.wide else dtype) for name, dims in op.inputs.items()]
    decays = {} if op.decay == "none" else {name: call[name] for name in DECAYS}
    with pytest.MonkeyPatch.context() as patch, modes.at(modes.HIGH) if call["is_high"] else contextlib.nullcontext():
        as_on_gpu(patch, call["arch"], call["multiprocessors"], ())
        of_part = paused.Call(op, options.complete(op, decays, arrays[0]))
        p = paused._problem(of_part, arrays, call["training"])
        if p is None:
            return False
        asked = directions.forward(p).requests(p.gpu) + directions.forward(p._replace(training=False)).requests(p.gpu)
        if p.training:
            asked += directions.backward(p).requests(p.gpu)
        listed = warmed(
            op.name, head_sizes=call["K"], value_sizes=call["V"], dtypes=dtype, arch=call["arch"], w_dtype=wide,
            backward=call["training"], shards=True, **decays,
        )  # fmt: skip
    assert keys(asked) <= listed
    return True


@pytest.mark.parametrize("multiprocessors", [FEW, 132])
@pytest.mark.parametrize("tokens", [40, 192, 2048])
@pytest.mark.parametrize("op", [name for name, op in ALL.items() if op.through])
def test_kernels_of_parts_of_other_ops(op, tokens, multiprocessors):
    """Those that find what a part does to any state are among them: of values, and of units where that is a matrix."""
    entry = ALL[op]
    sizes = {"B": 1, "T": tokens, "G": 32, "H": 32, "K": 64, "V": 128}
    arrays = [
        None if name in entry.optional else
        make([sizes[dim] for dim in dims], torch.bfloat16 if "T" in dims else torch.float32)
        for name, dims in entry.inputs.items()
    ]  # fmt: skip
    traits = tuple(entry.traits.items())
    listed = warmed(op, head_sizes=64, value_sizes=128, arch="sm_90", shards=True, heads=32)
    with pytest.MonkeyPatch.context() as patch:
        as_on_gpu(patch, "sm_90", multiprocessors, ())
        call = paused.Call(entry, options.complete(entry, {}, arrays[0]), traits)
        p = paused._problem(call, arrays, True)
        if p is not None:
            several = [directions.forward(p), directions.forward(p._replace(training=False)), directions.backward(p)]
        else:
            p = call.problem(arrays, None)
            several = [directions.forward(each) for each in (p, p._replace(training=False))]
            several += [directions.backward(each) for each in (p, p._replace(wanted=("initial_state",)))]
            if entry.transition[0] == "K":
                units = [
                    make([*x.shape[:-1], 64], x.dtype) if dims[-1] == "V" else x
                    for x, dims in zip(arrays, entry.inputs.values(), strict=True)
                ]
                several.append(directions.forward(call.problem(units, None)._replace(training=False)))
        asked = [request for schedule in several for request in schedule.requests(p.gpu)]
    assert keys(asked) <= listed


def test_a_build_takes_the_kernels_of_parts_where_an_op_has_them():
    def built(*more):
        asked = ["warm", "--op", "gla,wkv4", "--head-size", "64", "--arch", "sm_90", *more]
        return keys(commands._asked_for(cli._parser().parse_args(asked)))

    with_parts = built("--shards")
    assert built() < with_parts
    assert "unit_states" in {name for name, *_ in with_parts - built()}


def test_ops_without_parts_have_no_kernels_for_them():
    for op, sizes in (("wkv4", {}), ("timex", {"tokens": 32})):
        with pytest.raises(ValueError, match=f"shards: {op} has no calls over parts of sequences"):
            rwkv_jit.warm(op, arch="sm_90", shards=True, **sizes)


# ---- pools of states ---------------------------------------------------------------------------------------------

POOLS = st.fixed_dictionaries({
    **OF_HEADS,
    "lengths": st.lists(st.sampled_from([0, 1, 2, 8, 9, 16, 40, 300, 2100]), min_size=1, max_size=3)
    | st.sampled_from([[9000], [1, 9000]]),
    "is_update": st.booleans(),
    "state": st.sampled_from(["fp32", "bf16", "fp16"]),
    "w0": st.sampled_from([None, "fp32", "like w"]),
    "is_stochastic": st.booleans(),
    "max_seqlen": st.sampled_from([None, 1, 8, 9, 100, 9000]),  # any is right
    "has_checkpoints": st.booleans(),
    "bounds": st.sampled_from([torch.int32, torch.int64]),
})  # fmt: skip


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_calls_over_a_pool_ask_for_no_kernel_that_warm_does_not_list(examples, on_gpu):
    settings(max_examples=examples)(given(call=POOLS)(lambda call: check_pool(on_gpu, call)))()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"state": "bf16"}, id="a block holds a head"),
        pytest.param({"arch": "sm_80", "K": 136, "V": 200, "layout": "kv", "is_high": True}, id="large"),
        pytest.param({"dtype": "fp32", "is_high": True}, id="recurrent"),
    ],
)
@pytest.mark.parametrize("op", WITH_HEADS)
def test_so_it_is_with_each_number_of_tokens_over_a_pool(op, row, on_gpu):
    row = ONE_HEAD | {"op": op, "state": "fp32", "bounds": torch.int32, "has_checkpoints": False} | row
    calls = [{"is_update": True, "lengths": [tokens], "max_seqlen": None} for tokens in (1, 2, 6)]
    calls += [
        {"is_update": False, "lengths": lengths, "max_seqlen": most}
        for lengths, most in (
            ([2, 1], None), ([2, 1], 100), ([12, 1], None), ([40, 1], 1), ([40, 1], None), ([1, 900], None),
            ([9000], 9000), ([600], None), ([600, 1], 600),
        )
    ]  # fmt: skip
    calls.append({"is_update": False, "lengths": [2], "max_seqlen": None, "has_checkpoints": True})
    several = itertools.product(calls, (FEW, MANY), (None, "fp32", "like w"), (False, True))
    for call, multiprocessors, w0, is_stochastic in several:
        more = {"multiprocessors": multiprocessors, "w0": w0, "is_stochastic": is_stochastic}
        check_pool(on_gpu, row | call | more)


def check_pool(gpu, call):
    """Check a call of `<op>_update`, of rows of the first length, or of `<op>_varlen`."""
    op, dtype, lengths = OPS[call["op"]], DTYPES[call["dtype"]], call["lengths"]
    wide = torch.float32 if call["has_wide_decay"] else dtype
    sizes = {dim: call[dim] for dim in "HKV"} | {"B": 1, "T": sum(lengths)}
    options = {"state_layout": call["layout"]}
    decays = {} if op.decay == "none" else {name: call[name] for name in DECAYS}
    if call["is_update"]:
        sizes["T"] = max(lengths[0], 1)
        options |= {name: value for name, value in decays.items() if name == "decay"}
    else:
        options |= decays | {"cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=call["bounds"])}
        if call["max_seqlen"]:
            options["max_seqlen"] = call["max_seqlen"]
        if call["has_checkpoints"]:
            places = torch.arange(len(lengths), dtype=torch.int32)[:, None]
            options |= {"checkpoint_offsets": places.to(call["bounds"]), "checkpoint_indices": places + len(lengths)}
    if decays and call["w0"]:
        w0_dtype = torch.float32 if call["w0"] == "fp32" else wide
        options["w0"] = torch.empty(sizes["H"], sizes["K"], dtype=w0_dtype)
    if call["is_stochastic"] and call["state"] != "fp32":
        options |= {"rounding": "stochastic", "seed": 1}
    inputs = [
        torch.empty([sizes[dim] for dim in dims], dtype=wide if name in op.wide else dtype)
        for name, dims in op.inputs.items()
    ]
    of_slot = [sizes[dim] for dim in op.state_dims(call["layout"])]
    state = torch.empty(2 * len(lengths), *of_slot, dtype=DTYPES[call["state"]])
    gpu.use(call["arch"])
    gpu.multiprocessors = call["multiprocessors"]
    with modes.at(modes.HIGH) if call["is_high"] else contextlib.nullcontext():
        signatures.forget()
        getattr(rwkv_jit, f"{op.name}_{'update' if call['is_update'] else 'varlen'}")(state, *inputs, **options)
        listed = warmed(
            op.name, head_sizes=sizes["K"], value_sizes=sizes["V"], dtypes=dtype, arch=call["arch"], w_dtype=wide,
            state_dtype=state.dtype, state_layout=call["layout"], backward=False, updates=True, **decays,
        )  # fmt: skip
    launches = gpu.take()
    assert bool(launches) == (sizes["T"] > 0)
    assert keys(launch.request for launch in launches) <= listed


# ---- wkv4 and timex ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_calls_of_wkv4_ask_for_no_kernel_that_warm_does_not_list(dtype, wide):
    several = itertools.product(
        ((1, 1, 1), (2, 0, 3), (2, 100, 3), (1, 4096, 8)), MULTIPROCESSORS, ("raw", "log"), (False, True),
        (False, True), (False, True),
    )  # fmt: skip
    for (batch, tokens, channels), multiprocessors, decay, training, has_state, is_eager in several:
        w, u = (make((channels,), DTYPES[wide], training) for _ in range(2))
        k, v = (make((batch, tokens, channels), DTYPES[dtype], training) for _ in range(2))
        state = torch.zeros(batch, 3, channels) if has_state else None
        with torch.no_grad() if not training else contextlib.nullcontext():
            asked = called(
                "sm_90", multiprocessors, (), is_eager,
                lambda given=(w, u, k, v, state, True, decay): rwkv_jit.wkv4(*given),
            )  # fmt: skip
        assert asked
        assert asked <= warmed(
            "wkv4", dtypes=DTYPES[dtype], w_dtype=DTYPES[wide], decay=decay, arch="sm_90", backward=training
        )
