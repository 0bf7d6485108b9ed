"""A few tokens without gradients: one launch of an update's kernel; what takes others; known and compiled calls."""

from functools import partial

import derived_cases
import pytest
import torch
from stub_driver import frames
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rwkv_jit
from rwkv_jit.call import switches
from rwkv_jit.kernels import signatures
from rwkv_jit.schedules.table import ALL
from rwkv_jit.schedules.update import FEW_TOKENS

BASE = ("wkv5", "wkv6", "wkv7", "gla", "linear_attention")
EACH = pytest.mark.parametrize("op", [*BASE, *derived_cases.WAYS])
BATCH, HEADS, HEAD_SIZE = 3, 4, 32
UPDATES = (["update_states"], ["update_rules"])


def call_of(op, tokens, head_size=HEAD_SIZE, has_state=True, heads=HEADS, batch=BATCH, bounds=None):
    """A call of bfloat16 rows that takes options; its v and its initial state."""
    if op in derived_cases.WAYS:
        sizes = (batch, tokens, heads if op == "hgrn2" else heads // 2, heads, head_size, head_size)
        case = derived_cases.make(
            op, derived_cases.WAYS[op][-1], sizes, torch.bfloat16, torch.float32, torch.float32, has_state=False
        )
        arrays, named = list(case.inputs.values()), {**case.parameters, **case.options}
    else:
        dims = {"B": batch, "T": tokens, "H": heads, "K": head_size, "V": head_size}
        arrays = [torch.zeros([dims[dim] for dim in each]).bfloat16() for each in ALL[op].inputs.values()]
        named = {}
    sequences = batch if bounds is None else len(bounds) - 1
    state = {"initial_state": torch.zeros(sequences, heads, head_size, head_size)} if has_state else {}
    packing = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    run = partial(getattr(rwkv_jit, op), *arrays, output_final_state=True, **state, **packing, **named)
    return run, {"v": arrays[list(ALL[op].inputs).index("v")], **state}


def without_state(options):
    """The options that a call over a pool takes too."""
    return {name: x for name, x in options.items() if name not in ("initial_state", "output_final_state")}


def launched(on_gpu, run, **options):
    """The templates of the launches of a call that is not known."""
    signatures.forget()
    on_gpu.order.clear()
    run(**options)
    return [launch.request.template.name for launch in on_gpu.take()]


@EACH
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_one_launch_and_nothing_else(op, arch, on_gpu):
    on_gpu.use(arch)
    name = "update_rules" if op in derived_cases.WAYS else "update_states"
    for tokens in range(1, FEW_TOKENS + 1):
        run, _ = call_of(op, tokens)
        for layout in ("vk", "kv"):
            assert launched(on_gpu, run, state_layout=layout) == [name]
            assert on_gpu.order == []  # nothing is zeroed, and no stream waits
    run, _ = call_of(op, FEW_TOKENS + 1)
    assert not {*launched(on_gpu, run)} & {"update_states", "update_rules"}


@EACH
def test_the_kernel_reads_one_memory_and_writes_another(op, on_gpu):
    for has_state in (True, False):
        run, tensors = call_of(op, 2, has_state=has_state)
        for has_final in (True, False):
            signatures.forget()
            y, final = run(output_final_state=has_final)
            (launch,) = on_gpu.take()
            passed = launch.named
            assert passed["initial_state"] == (tensors["initial_state"].data_ptr() if has_state else 0)
            assert passed["final_state"] == (final.data_ptr() if has_final else 0)
            assert passed["y"] == y.data_ptr()
            assert (passed["slots"], passed["slot_stride"]) == (BATCH, HEADS * HEAD_SIZE**2)
            assert (passed["batch"], passed["tokens"], passed["heads"]) == (BATCH, 2, HEADS)
            assert {passed[x] for x in ("state_indices", "write_indices", "seed")} == {0}
            assert launch.parameters["HAS_STATE"] == has_state


@EACH
def test_the_kernel_is_that_of_calls_over_a_pool(op, on_gpu):
    """So it need not be compiled twice. A D of each head is one of each channel in a call over sequences."""
    run, tensors = call_of(op, 1)
    run()
    getattr(rwkv_jit, f"{op}_update")(tensors["initial_state"], *run.args, **without_state(run.keywords))
    own, other = on_gpu.take()
    differing = {name for name, x in own.parameters.items() if x != other.parameters[name]}
    assert differing <= {"SKIP_PER_CHANNEL"}
    assert (own.entry, own.grid, own.block) == (other.entry, other.grid, other.block)


OTHERS = {
    "gradients": {}, "recurrent": {"backend": "recurrent"}, "chunks": {"chunk_len": 16}, "threads": {"num_threads": 64},
    "packed": {}, "batch invariant": {}, "no tokens": {}, "no rows": {}, "long keys": {},
}  # fmt: skip


@EACH
@pytest.mark.parametrize("why", OTHERS)
def test_other_calls_take_what_they_did(op, why, on_gpu):
    on_gpu.use("sm_90")
    sizes = {
        "packed": {"batch": 1, "bounds": [0, 1, 5]}, "no rows": {"batch": 0},
        "long keys": {"head_size": 1032, "heads": 2},
    }.get(why, {})  # fmt: skip
    run, tensors = call_of(op, 0 if why == "no tokens" else 5, **sizes)
    tensors["v"].requires_grad_(why == "gradients")
    switches.set_batch_invariant(why == "batch invariant")
    options = OTHERS[why]
    if why == "threads":
        options = options | {"backend": "recurrent" if op in derived_cases.WAYS else "auto"}
    try:
        taken = launched(on_gpu, run, **options)
        assert not {*taken} & {"update_states", "update_rules"}
        assert taken or why == "no rows"
        if why == "gradients":  # which are recorded for whoever needs them, and not where nobody records
            with torch.no_grad():
                assert launched(on_gpu, run) in UPDATES
    finally:
        switches.set_batch_invariant(False)


@EACH
def test_a_bound_of_decays_does_not_matter(op, on_gpu):
    if ALL[op].decay == "none":
        return
    run, _ = call_of(op, 6)
    assert launched(on_gpu, run, decay_bound=-2.0) in UPDATES


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("op", ["wkv5", "gla", "simple_gla", "ssd", "hgrn2"])
def test_long_keys_do_not_go_in_parts(op, tokens, on_gpu):
    on_gpu.use("sm_80")
    run, tensors = call_of(op, tokens, head_size=512, heads=2)
    assert launched(on_gpu, run) in UPDATES
    tensors["v"].requires_grad_()
    assert not {*launched(on_gpu, run)} & {"update_states", "update_rules"}


@EACH
def test_known_calls_are_short(op, on_gpu):
    run, _ = call_of(op, 1)
    run()
    run()
    on_gpu.order.clear()
    count, _ = frames(run)
    (launch,) = on_gpu.take()
    assert launch.request is not None
    assert count <= 12


@EACH
def test_states_that_begin_anywhere_and_one_for_all(op, on_gpu):
    run, tensors = call_of(op, 1)
    run()
    (whole,) = on_gpu.take()
    state = tensors["initial_state"]
    moved = torch.zeros(state.numel() + 1)[1:].view(state.shape)
    for given in (moved, state[0], state[:1].expand(state.shape)):
        before = given.clone()
        for _ in range(2):
            run(initial_state=given)
            (launch,) = on_gpu.take()
            assert launch.named["initial_state"] % 16 == 0  # of a copy
            assert launch.named["initial_state"] != given.data_ptr()
            assert launch.parameters == whole.parameters
        assert torch.equal(given, before)


class Notes(TorchDispatchMode):
    """A mode that keeps the calls of the package's ops, as a compiler does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("rwkv_jit."):
            self.calls.append(partial(function, *args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


@EACH
def test_what_a_compiler_runs_later_launches_the_same(op, on_gpu):
    """Its graph has the call as it was, and the kernels are chosen when it runs."""
    run, _ = call_of(op, 2)
    (eager,) = launched(on_gpu, run)
    with Notes() as notes:
        assert launched(on_gpu, run) == [eager]
    (call,) = notes.calls
    assert str(call.func) == f"rwkv_jit.{op}_fwd.default"
    assert "auto" in call.args
    assert launched(on_gpu, call) == [eager]


def test_counted_operations_are_those_of_the_op(on_gpu):
    run, _ = call_of("wkv7", 2)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == 8 * BATCH * 2 * HEADS * HEAD_SIZE**2
    (launch,) = on_gpu.take()
    assert launch.entry == "update_states"
