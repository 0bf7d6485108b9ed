"""Kernels before they are called for: warm, compile_async, and how many compile at once."""

import os
import threading

import pytest
import torch

import rwkv_jit
from rwkv_jit import cache, compiler, cuda, env, kernel, runtime, stats, tensors
from rwkv_jit.errors import CompileError, UnsupportedConfigError
from rwkv_jit.ops import boundary, gated_groups, gated_scan, prepared, recurrent, scan, scan_geometry, split
from rwkv_jit.ops.interface import LARGEST_DECAY, Inputs, Options


@pytest.fixture
def cores(monkeypatch):
    """A process that has started no workers yet, on a machine of 6 cores."""
    monkeypatch.setattr(kernel, "_process", kernel._Process())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)


@pytest.fixture
def at_once(monkeypatch):
    """How many compiles ran at the same time, each time one began; each waits a moment for another one."""
    running, most, compile = [], [], compiler.compile

    def watched(*arguments):
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.05)
        try:
            return compile(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(compiler, "compile", watched)
    return most


def shown(each):
    return each.name, each.arch, each.parameters["HEAD_SIZE"], each.parameters["T_IO"]


# ---- in the background -------------------------------------------------------------------------------------------


def test_background_gives_the_kernel_that_the_foreground_gives():
    future = rwkv_jit.compile_async("wkv7", head_size=4, arch="sm_90")
    made = future.result()
    again = rwkv_jit.specialize("wkv7", head_size=4, arch="sm_90")
    assert (made.origin, again.origin) == ("compiled", "memory")
    assert made.cubin == again.cubin
    assert made.parameters == again.parameters
    assert stats.snapshot()["compiled"] == 1


def test_background_raises_what_the_foreground_raises():
    future = rwkv_jit.compile_async("wkv7", head_size=4, arch="sm_90", chunk_len=3)
    with pytest.raises(UnsupportedConfigError, match="chunk_len must be 1, 2, 4, 8 or 16; got .*CHUNK_LEN=3"):
        future.result()


def test_the_same_kernel_asked_for_often_is_compiled_once(tiny):
    futures = [kernel.get_async(tiny()) for _ in range(20)]
    origins = [future.result().origin for future in futures]
    assert sorted(origins) == ["compiled", *["memory"] * 19]


@pytest.mark.parametrize(("ranks", "workers"), [(None, 6), ("2", 3), ("4", 1), ("100", 1)])
def test_no_more_compile_at_once_than_there_are_cores_for_each_rank(ranks, workers, cores, at_once, tiny, monkeypatch):
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    # Different first bytes of the keys, as two kernels that share one wait for each other.
    futures = [kernel.get_async(tiny(size)) for size in range(8)]
    assert [future.result().origin for future in futures] == ["compiled"] * 8
    assert max(at_once) <= workers == env.workers()
    assert max(at_once) >= min(workers, 2)


def test_several_kernels_of_one_call_compile_side_by_side(cores, at_once, tiny):
    found = kernel.get_all([tiny(size) for size in range(4)])
    assert [each.parameters["SIZE"] for each in found] == [0, 1, 2, 3]
    assert max(at_once) > 1
    assert [each.origin for each in kernel.get_all([tiny(2), tiny(9), tiny(0)])] == ["memory", "compiled", "memory"]


# ---- warm --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("checked_only")
def test_warm_compiles_what_calls_need_and_finds_it_the_next_time():
    progress = []
    made = rwkv_jit.warm(
        "wkv7", [4, 5], [torch.float32, torch.bfloat16], arch="sm_75", progress=lambda *done: progress.append(done)
    )
    assert {shown(each) for each in made} == {
        (f"wkv7_recurrent_{direction}", "sm_75", head_size, dtype)
        for direction in ("forward", "backward")
        for head_size in (4, 5)
        for dtype in ("fp32", "bf16")
    }
    assert progress == [(done, len(made)) for done in range(len(made) + 1)]
    assert {each.origin for each in made} == {"compiled"}
    assert len(cache.entries()) == len(made) == stats.snapshot()["compiled"]
    kernel.forget()
    again = rwkv_jit.warm("wkv7", [4, 5], [torch.float32, torch.bfloat16], arch="sm_75")
    assert [each.cubin for each in again] == [each.cubin for each in made]
    assert {each.origin for each in again} == {"disk"}


def test_warm_compiles_just_what_specialize_names():
    made = rwkv_jit.warm(
        "wkv6", 4, torch.float16, backward=False, arch="sm_80", decay="log", state_layout="kv",
        w_dtype=torch.float32, state_dtype=torch.bfloat16,
    )  # fmt: skip
    assert [each.name for each in made[2:]] == ["gla_join", "gla_segment", "gla_scan"]
    for backend, each in zip(("chunked", "recurrent"), made[:2], strict=True):
        same = rwkv_jit.specialize(
            "wkv6", 4, None, torch.float16, "sm_80", "forward", backend, "log", state_layout="kv", t_w="fp32",
            t_u="fp32", t_state="bf16",
        )  # fmt: skip
        assert same.origin == "memory"
        assert same.cubin == each.cubin


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize(("op", "decay", "layout"), [
    ("wkv5", "raw", "vk"), ("wkv6", "raw", "vk"), ("gla", "log", "kv"), ("linear_attention", "none", "kv"),
])  # fmt: skip
def test_warm_makes_what_calls_of_an_op_with_its_own_defaults_take(op, decay, layout):
    of = runtime.OPS[op]
    inputs = Inputs(
        op,
        of.names,
        tuple(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16) for _ in of.streamed),
        tuple(torch.zeros(1, 8, dtype=torch.bfloat16) for _ in of.fixed),
        1,
    )
    options = Options(1.0, decay, layout, 64, None, None, "recurrent")
    types = prepared.types_of(inputs, options, torch.float32)
    made = rwkv_jit.warm(op, 8, arch="sm_80")
    for direction in ("forward", "backward"):
        request = recurrent.specialize(op, direction, 8, 8, types, "sm_80")
        assert kernel.get(request).origin == "memory"
        assert request.parameters in [each.parameters for each in made]


def test_what_tells_ops_apart_is_no_choice():
    for op, parameter in (("gla", "bonus"), ("wkv5", "constant_decay"), ("linear_attention", "t_w"), ("gla", "t_u")):
        with pytest.raises(ValueError, match=f"parameter {parameter.upper()}: is no choice for {op}"):
            rwkv_jit.specialize(op, 8, arch="sm_80", **{parameter: "fp32"})
    with pytest.raises(ValueError, match="decay: expected one of none, got 'log'"):
        rwkv_jit.warm("linear_attention", 8, arch="sm_80", decay="log")


@pytest.mark.usefixtures("checked_only")
def test_warm_adds_the_forward_for_few_heads_where_that_is_another_kernel():
    from rwkv_jit.ops.recurrent import geometry

    plain = geometry("wkv7", "forward", 64, 64)
    few = {**plain, **geometry("wkv7", "forward", 64, 64, few_heads=True)}
    assert plain != few
    made = rwkv_jit.warm("wkv7", 64, torch.float32, backward=False, arch="sm_90")
    assert [{name: each.parameters[name] for name in plain} for each in made] == [plain, few]


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize("options", [{"decay": "sigmoid"}, {"decay_bound": -0.7}], ids=str)
def test_warm_compiles_both_backends_where_long_calls_take_the_chunked_one(options):
    made = rwkv_jit.warm("wkv7", 24, [torch.bfloat16, torch.float32], arch="sm_90", **options)
    ways = ("forward", "backward")
    assert sorted({(each.name, each.parameters.get("T_IO", "")) for each in made}) == sorted(
        [(f"wkv7_chunked_{way}", "bf16") for way in ways]
        + [(f"wkv7_recurrent_{way}", dtype) for way in ways for dtype in ("bf16", "fp32")]
        + [("wkv7_join", ""), ("wkv7_segment", "bf16")]
    )
    for name in ("wkv7_join", "wkv7_segment"):
        assert {each.parameters["BACKWARD"] for each in made if each.name == name} == {True, False}
    decay, more = options.get("decay", "raw"), {} if "decay" in options else {"largest_decay": 0}
    same = rwkv_jit.specialize("wkv7", 24, arch="sm_90", backend="chunked", decay=decay, **more)
    assert same.origin == "memory"


def asked(requests):
    """The kernels of requests, however often each is there."""
    return {kernel.memory_key(request): request.template.name for request in requests}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("arch", "decay", "decay_bound", "chunk_len"),
    [
        ("sm_90", "sigmoid", None, 64),
        ("sm_90", "raw", -2.0, 64),
        ("sm_90", "log", -3.0, 32),
        ("sm_100", "sigmoid", None, 64),
        ("sm_86", "direct", -1.0, 32),
    ],
)
@pytest.mark.parametrize("head_size", [129, 256, 512])
def test_calls_with_large_heads_find_all_their_kernels_made(head_size, arch, decay, decay_bound, chunk_len, direction):
    state_dtype, options = torch.float16, Options(1.0, decay, "kv", 64, chunk_len, None, "scan")
    streamed = [torch.zeros(1, 1, 1, head_size, dtype=torch.bfloat16) for _ in range(6)]
    inputs = Inputs("wkv7", ("r", "w", "k", "v", "a", "b"), tuple(streamed), (), 1)
    types = prepared.types_of(inputs, options, state_dtype if direction == "forward" else torch.float32)
    of_calls = [
        request
        for few_heads in (False, True)
        for request in scan_geometry.requests(
            "wkv7", direction, head_size, head_size, types, arch, chunk_len, few_heads=few_heads
        )
    ]
    made = runtime.call_requests(
        "wkv7", head_size, torch.bfloat16, arch, direction, decay, "kv", None, state_dtype, decay_bound
    )
    wanted, found = asked(of_calls), asked(made)
    assert wanted.items() <= found.items()
    # The others are for short calls; nothing is made that no call takes.
    assert {name.split("_")[1] for key, name in found.items() if key not in wanted} == {"recurrent"}


def test_call_with_large_heads_asks_for_no_kernel_that_warm_has_not_made(monkeypatch):
    """The whole way of a call on CPU tensors, up to where its kernels would be loaded."""
    made = runtime.call_requests(
        "wkv7", 192, torch.bfloat16, "sm_90", "forward", "sigmoid", "vk", None, torch.float32, None
    ) + runtime.call_requests(
        "wkv7", 192, torch.bfloat16, "sm_90", "backward", "sigmoid", "vk", None, torch.float32, None
    )
    wanted = []

    class Enough(Exception):  # noqa: N818
        pass

    def get_all(requests):
        wanted.extend(requests)
        raise Enough

    monkeypatch.setattr(boundary, "_is_for_kernels", lambda backend, like: True)
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_90")
    monkeypatch.setattr(tensors, "also", lambda device: ())
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda device: 0)
    monkeypatch.setattr(prepared, "check_capture", lambda *_: None)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(kernel, "get_all", get_all)
    for heads in (1, 64):
        x = torch.zeros(1, 64, heads, 192, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(Enough):
            rwkv_jit.wkv7(x, x, x, x, x, x, decay="sigmoid")
    assert len(wanted) == 10
    assert len(asked(wanted)) == 7  # the scans of both directions are others with few heads
    assert asked(wanted).items() <= asked(made).items()


@pytest.fixture
def wanted(nothing_known, monkeypatch):
    """The kernels that forwards and backwards on CPU tensors ask for, on an sm_90; they are never launched."""
    wanted = []

    class Driver:
        @staticmethod
        def occupancyMaxActiveBlocksPerMultiprocessor(*_):  # noqa: N802
            return 1

    class Made:
        def __init__(self, request):
            self.name, self.parameters = request.template.name, request.parameters

        def function(self, device, entry):
            return None

    class Launch:
        def __init__(self, *_):
            pass

    def get_all(requests):
        wanted.extend(requests)
        return [Made(request) for request in requests]

    monkeypatch.setattr(boundary, "_is_for_kernels", lambda backend, like: True)
    monkeypatch.setattr(tensors, "_capability", lambda device: "sm_90")
    monkeypatch.setattr(tensors, "also", lambda device: ())
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(tensors, "validate", lambda name, x: None)
    monkeypatch.setattr(tensors, "launch", lambda plan, values, side=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda device: 0)
    monkeypatch.setattr(prepared, "check_capture", lambda *_: None)
    monkeypatch.setattr(kernel, "get_all", get_all)
    monkeypatch.setattr(cuda, "driver", Driver)
    for module in (prepared, scan, split, gated_scan, gated_groups):
        monkeypatch.setattr(module, "Plan", Launch)
    return wanted


def made_for(op, head_size, decay=None, layout=None, w_dtype=None, state_dtype=torch.float32, decay_bound=None):
    return [
        request
        for way in ("forward", "backward")
        for request in runtime.call_requests(
            op, head_size, torch.bfloat16, "sm_90", way, decay, layout, w_dtype, state_dtype, decay_bound
        )
    ]


def call_both_ways(op, tokens, heads, head_size, w_dtype=torch.bfloat16, **options):
    """For gradients and not."""
    of, x = runtime.OPS[op], torch.zeros(1, tokens, heads, head_size, dtype=torch.bfloat16)
    given = [(x if n in of.streamed else x[0, 0]).to(w_dtype if n in "wu" else x.dtype) for n in of.names]
    function = getattr(rwkv_jit, op)
    function(*given, **options)
    given = [each.clone().requires_grad_() for each in given]
    y, _ = function(*given, **options)
    torch.autograd.grad(y.sum(), given)


@pytest.mark.parametrize("head_size", [7, 64, 128, 192])
@pytest.mark.parametrize(("decay", "decay_bound"), [("raw", None), ("log", -8.0), ("direct", -9.0)])
@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", ["wkv5", "wkv6", "wkv7", "gla"])
def test_guarded_calls_ask_for_no_kernel_that_warm_has_not_made(op, w_dtype, decay, decay_bound, head_size, wanted):
    made = made_for(op, head_size, decay, None, w_dtype, decay_bound=decay_bound)
    for heads, tokens in ((1, 64), (64, 64), (1, 2048), (64, 20)):
        options = {"decay": decay, "decay_bound": decay_bound}
        call_both_ways(op, tokens, heads, head_size, w_dtype, **options)
    assert asked(wanted).items() <= asked(made).items()
    is_look = [each.parameters.get("LARGEST_DECAY", 0) > 0 for each in wanted]
    has_shorter = head_size <= 128 or op != "wkv7"  # chunks of 16, which keep the promise
    assert any(is_look) == (decay_bound != -8.0 or not has_shorter)
    names = {request.template.name for request in wanted}
    stem = "wkv7" if op == "wkv7" else "gla"
    assert ({f"{stem}_segment", f"{stem}_join"} <= names) == (head_size <= 128)


@pytest.mark.parametrize(("keys", "values"), [(8, 16), (64, 96), (64, 136), (192, 64), (300, 512)])
@pytest.mark.parametrize("op", ["wkv5", "wkv7", "gla"])
def test_calls_with_other_values_ask_for_no_kernel_that_warm_has_not_made(op, keys, values, wanted):
    made = [
        request
        for way in ("forward", "backward")
        for request in runtime.call_requests(
            op, keys, torch.bfloat16, "sm_90", way, None, None, None, torch.float32, None, value_size=values
        )
    ]
    of = runtime.OPS[op]
    for heads, tokens in ((1, 64), (64, 64), (1, 2048), (64, 20)):
        k, v = (torch.zeros(1, tokens, heads, size, dtype=torch.bfloat16) for size in (keys, values))
        given = [v if name == "v" else k if name in of.streamed else k[0, 0] for name in of.names]
        function = getattr(rwkv_jit, op)
        function(*given)
        given = [each.clone().requires_grad_() for each in given]
        torch.autograd.grad(function(*given)[0].sum(), given)
    assert wanted
    assert asked(wanted).items() <= asked(made).items()


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("op", runtime.OPS)
def test_segments_have_their_kernels_made_whatever_states_callers_have(op, state_dtype, layout, wanted):
    options = {} if op == "linear_attention" else {"decay": "sigmoid"}
    made = made_for(op, 64, options.get("decay"), layout, None, state_dtype)
    state = torch.zeros(1, 2, 64, 64, dtype=state_dtype)
    call_both_ways(op, 2048, 2, 64, initial_state=state, state_layout=layout, backend="split", **options)
    assert asked(wanted).items() <= asked(made).items()
    assert len(asked(wanted)) == 6


OF_GROUPS = {"gla_prepare", "gla_group_scan", "gla_group_key_gradients"}


@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("op", "decay", "decay_bound"),
    [
        ("wkv5", "raw", None),
        ("wkv6", "sigmoid", None),
        ("wkv6", "log", -8.1),
        ("gla", "log", None),
        ("gla", "direct", -2.0),
        ("gla", "log", -3.0),
        ("linear_attention", None, None),
    ],
)
@pytest.mark.parametrize("head_size", [136, 512])
def test_calls_of_the_other_ops_ask_for_no_kernel_that_warm_has_not_made(
    head_size, op, decay, decay_bound, w_dtype, wanted, monkeypatch
):
    monkeypatch.setattr(tensors, "multiprocessors", lambda device: 16)
    made = [
        request
        for way in ("forward", "backward")
        for request in runtime.call_requests(
            op, head_size, torch.bfloat16, "sm_90", way, decay, "vk", w_dtype, torch.float32, decay_bound
        )
    ]
    streamed, fixed = runtime.OPS[op].streamed, runtime.OPS[op].fixed
    for heads, tokens in ((1, 64), (64, 64), (64, 20)):
        shapes = dict.fromkeys(streamed, (1, tokens, heads, head_size)) | dict.fromkeys(fixed, (heads, head_size))
        given = [
            torch.zeros(shape, dtype=w_dtype if name in ("w", "u") else torch.bfloat16)
            for name, shape in shapes.items()
        ]
        options = {} if decay is None else {"decay": decay, "decay_bound": decay_bound}
        getattr(rwkv_jit, op)(*given, state_layout="vk", **options)
        given = [each.requires_grad_() for each in given]
        y, _ = getattr(rwkv_jit, op)(*given, state_layout="vk", **options)
        torch.autograd.grad(y.sum(), given)
    found = asked(wanted)
    assert found.items() <= asked(made).items()
    in_groups = decay_bound != -3.0 or head_size > 256  # a shorter chunk keeps that bound, where it can
    assert (set(found.values()) >= OF_GROUPS) is in_groups
    if in_groups:
        looks = {each.parameters["LARGEST_DECAY"] for each in wanted if each.template.name == "gla_prepare"}
        is_bounded = decay in ("sigmoid", None) or decay_bound == -2.0
        assert looks == {0 if is_bounded else LARGEST_DECAY}
        # Both directions, with many and few heads.
        assert [*found.values()].count("gla_group_scan") == 4


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize(
    ("arch", "name", "target"), [("sm_90", "wkv7_group_scan", "sm_90a"), ("sm_80", "wkv7_scan", "sm_80")]
)
def test_warm_compiles_all_kernels_of_large_heads(arch, name, target):
    of_both_ways = {"wkv7_prepare", name, "wkv7_token_gradients", "wkv7_key_gradients"}
    made = rwkv_jit.warm("wkv7", 192, arch=arch, decay="sigmoid")
    assert {each.name for each in made} == of_both_ways | {"wkv7_recurrent_forward", "wkv7_recurrent_backward"}
    scans = [each for each in made if each.name == name]
    assert {each.parameters["BACKWARD"] for each in scans} == {False, True}
    assert {each.target for each in scans} == {target}
    assert {each.arch for each in made} <= {arch, target}
    assert {each.parameters["BY_LANES"] for each in made if each.name == "wkv7_prepare"} == {target == "sm_90a"}
    forward = rwkv_jit.warm("wkv7", 192, arch=arch, decay="sigmoid", backward=False)
    assert {each.origin for each in forward} == {"memory"}
    assert {each.name for each in forward} == {"wkv7_prepare", name, "wkv7_recurrent_forward"}
    same = rwkv_jit.specialize("wkv7", 192, arch=arch, backend="split", decay="sigmoid")
    assert (same.name, same.arch, same.origin) == (name, target, "memory")


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize(("head_size", "backend"), [(8, "chunked"), (136, "scan")])
@pytest.mark.parametrize("decay", ["raw", "log", "direct"])
@pytest.mark.parametrize(("decay_bound", "looks"), [(None, True), (-0.61, False), (-8.1, True)])
def test_warm_without_a_bound_adds_what_looks_at_decays(decay_bound, looks, decay, head_size, backend):
    made = rwkv_jit.warm("wkv7", head_size, arch="sm_90", decay=decay, decay_bound=decay_bound, w_dtype=torch.float32)
    names = {each.name for each in made}
    assert ("wkv7_decay_range" in names) == (looks and head_size > 128)
    assert {"wkv7_recurrent_forward", "wkv7_recurrent_backward"} < names
    assert any(backend in name for name in names)
    looking = "wkv7_decay_range" if head_size > 128 else "wkv7_chunked_forward"
    found = [each for each in made if each.name == looking]
    lengths = {each.parameters["CHUNK_LEN"] for each in made if backend in each.name}
    assert {each.parameters["CHUNK_LEN"] for each in found} == (lengths if looks or head_size <= 128 else set())
    for each in found:
        wanted = {"HEAD_SIZE": head_size, "T_W": "fp32", "DECAY": decay, "LARGEST_DECAY": 64 if looks else 0}
        assert wanted.items() <= each.parameters.items()


@pytest.mark.usefixtures("checked_only")
def test_warm_leaves_the_chunked_kernels_alone_where_no_call_takes_them():
    for made in (
        rwkv_jit.warm("wkv7", 4, torch.float32, arch="sm_90"),
        rwkv_jit.warm("wkv7", 4, arch="sm_75"),
        rwkv_jit.warm("wkv7", 4, arch="sm_75", decay="sigmoid"),
        rwkv_jit.warm("wkv6", 4, torch.float32, arch="sm_90", decay="sigmoid"),
        rwkv_jit.warm("gla", 264, torch.float32, arch="sm_80", backward=False),
    ):
        assert {each.name.split("_")[1] for each in made} == {"recurrent"}


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize(
    ("op", "decay", "bound", "looks"),
    [
        ("wkv5", None, None, 64),
        ("gla", None, -1.0, 0),
        ("wkv6", "sigmoid", None, 0),
        ("linear_attention", None, None, 0),
    ],
)
@pytest.mark.parametrize("size", [40, 136])
def test_warm_makes_the_gated_kernels_that_look_at_decays_where_calls_take_them(size, op, decay, bound, looks):
    made = rwkv_jit.warm(op, size, arch="sm_80", decay=decay, decay_bound=bound)
    forward, *_ = [each for each in made if each.name == "gla_scan" and not each.parameters["BACKWARD"]]
    assert forward.parameters["LARGEST_DECAY"] == looks
    others = {"gla_chunked_backward", "gla_segment", "gla_join"} if size == 40 else {"gla_key_gradients"}
    names = {"gla_scan", "gla_recurrent_forward", "gla_recurrent_backward"} | others
    assert {each.name for each in made} == names
    scans = [each.parameters["BACKWARD"] for each in made if each.name == "gla_scan"]
    in_vk = [False] * (size == 40 and op in ("gla", "linear_attention"))  # of segments, beside the op's own layout
    assert sorted(scans) == sorted([False, *in_vk] if size == 40 else [False, True])
    for name in others - {"gla_chunked_backward", "gla_key_gradients"}:
        assert {each.parameters["BACKWARD"] for each in made if each.name == name} == {True, False}


@pytest.mark.usefixtures("checked_only")
@pytest.mark.parametrize(
    ("op", "decay", "bound", "looks"),
    [
        ("wkv5", None, None, 64),
        ("gla", None, -1.0, 0),
        ("wkv6", "sigmoid", None, 0),
        ("linear_attention", None, None, 0),
    ],
)
@pytest.mark.parametrize("size", [136, 264])
def test_warm_makes_the_kernels_of_warp_groups(size, op, decay, bound, looks):
    made = rwkv_jit.warm(op, size, arch="sm_90", decay=decay, decay_bound=bound)
    assert {each.name for each in made} == OF_GROUPS | {"gla_recurrent_forward", "gla_recurrent_backward"}
    assert {each.target for each in made if each.name in OF_GROUPS} == {"sm_90a"}
    (prepare,) = [each for each in made if each.name == "gla_prepare"]
    assert prepare.parameters["LARGEST_DECAY"] == looks
    scans = [(each.parameters["BACKWARD"], each.parameters["VALUE_ROWS"]) for each in made if "scan" in each.name]
    assert sorted(scans) == [(False, 32), (False, 64), (True, 32), (True, 64)]
    forward = rwkv_jit.warm(op, size, arch="sm_90", decay=decay, decay_bound=bound, backward=False)
    assert {each.origin for each in forward} == {"memory"}
    assert {each.name for each in forward} == {"gla_prepare", "gla_group_scan", "gla_recurrent_forward"}


@pytest.mark.usefixtures("checked_only")
def test_specialize_takes_what_long_calls_take():
    assert rwkv_jit.specialize("wkv7", 4, 136, arch="sm_80", decay="sigmoid").name == "wkv7_scan"
    for threads, name in ((None, "wkv7_group_scan"), (384, "wkv7_group_scan"), (128, "wkv7_scan")):
        found = rwkv_jit.specialize("wkv7", 4, 136, arch="sm_90", decay="sigmoid", num_threads=threads)
        assert found.name == name
    for threads, name, chunk_len in ((None, "gla_group_scan", 64), (384, "gla_group_scan", 64), (128, "gla_scan", 32)):
        found = rwkv_jit.specialize("gla", 4, 136, arch="sm_90", num_threads=threads)
        assert (found.name, found.parameters["CHUNK_LEN"]) == (name, chunk_len)
    assert rwkv_jit.specialize("gla", 4, 136, arch="sm_80").name == "gla_scan"
    for dtype, arch, decay, backend in (
        (torch.bfloat16, "sm_80", "sigmoid", "chunked"),
        (torch.bfloat16, "sm_80", "raw", "chunked"),
        (torch.float32, "sm_80", "raw", "recurrent"),
        (torch.bfloat16, "sm_75", "sigmoid", "recurrent"),
        (torch.float32, "sm_80", "sigmoid", "recurrent"),
    ):
        assert rwkv_jit.specialize("wkv7", 4, dtype=dtype, arch=arch, decay=decay).name == f"wkv7_{backend}_forward"


def test_warm_for_several_architectures():
    made = rwkv_jit.warm("wkv7", 4, torch.float32, backward=False, arch=["sm_80", "compute_80"])
    assert [(each.arch, bool(each.cubin)) for each in made] == [("sm_80", True), ("compute_80", False)]


def test_architecture_of_the_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("RWKVJIT_ARCH", "sm_89")
    (made,) = rwkv_jit.warm("wkv7", 4, torch.float32, backward=False)
    assert made.arch == rwkv_jit.compile_async("wkv7", 4, dtype=torch.float32).result().arch == "sm_89"


def test_nothing_to_warm_is_nothing():
    assert rwkv_jit.warm("wkv7", [], arch="sm_90") == []
    assert cache.entries() == []


def test_warm_raises_the_error_of_a_kernel(monkeypatch):
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    with pytest.raises(CompileError, match="RWKVJIT_ASSERT_CACHED is set and wkv7_chunked_"):
        rwkv_jit.warm("wkv7", [4, 5], arch="sm_90")


def test_progress_is_told_as_it_is_made(cores, tiny, monkeypatch):
    """One worker, whose every compile waits until all that is before it has been told."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    told, compile, in_time = [threading.Event() for _ in range(4)], compiler.compile, []

    def patient(*arguments):
        in_time.append(all(in_time) and told[len(in_time)].wait(30))
        return compile(*arguments)

    monkeypatch.setattr(compiler, "compile", patient)
    runtime.compile_all([tiny(size) for size in range(3)], lambda done, of: told[done].set())
    assert in_time == [True, True, True]


def test_progress_that_raises_stops_what_has_not_begun(cores, tiny, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")

    def stop(done, of):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        go, compile = threading.Event(), compiler.compile
        patch.setattr(compiler, "compile", lambda *arguments: go.wait(5) and compile(*arguments))
        with pytest.raises(KeyboardInterrupt):
            runtime.compile_all([tiny(size) for size in range(3)], stop)
        go.set()
        kernel._process.pool.shutdown()
    assert stats.snapshot()["compiled"] <= 1
