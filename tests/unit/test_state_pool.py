"""The pool of states: which slot is whose, what is in it, and files of it."""

import copy
import doctest
import inspect
import json
import os
import re
import stat
import sys

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rwkv_jit
from rwkv_jit import ReplayRing, RwkvJitError, StatePool, StateSpec

SPECS = {
    "wkv": StateSpec(2, (2, 3), torch.float32),
    "shift": StateSpec(3, (4,), torch.bfloat16, fill=-1.5),
    "max": StateSpec(1, (), torch.float16, fill=7),
}


def make(slots=6, specs=SPECS, reserved=1, **options):
    return StatePool(slots, specs, device="cpu", reserved=reserved, **options)


def state(pool, slot):
    """A copy of what a slot holds."""
    return {name: pool[name][:, slot].clone() for name in SPECS}


def fresh(specs=SPECS):
    """What a slot holds before the first token."""
    return {name: torch.full((x.layers, *x.shape), x.fill, dtype=x.dtype) for name, x in specs.items()}


def write(pool, slot, number):
    """Put numbers into a slot that no other name, layer or place has; all dtypes hold them exactly."""
    for name in SPECS:
        x = pool[name][:, slot]
        x.copy_((number * 16 + torch.arange(x.numel())).reshape(x.shape))


def equal(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def everything(pool):
    """What a call that fails must leave as it is."""
    return pool.allocated, pool.free_count, {name: pool[name].clone() for name in SPECS}


def unchanged(pool, before):
    return everything(pool)[:2] == before[:2] and equal(everything(pool)[2], before[2])


@pytest.fixture
def pool():
    """Slots 1, 2 and 4 of six are allocated, and each slot holds numbers of its own."""
    pool = make()
    pool.allocate(4)
    pool.free(3)
    for slot in range(6):
        write(pool, slot, slot)
    return pool


# ---- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_one_tensor_for_each_name_and_filled_from_the_start():
    pool = make()
    for name, spec in SPECS.items():
        x = pool[name]
        assert x.shape == (spec.layers, 6, *spec.shape)
        assert x.dtype == spec.dtype
        assert (x == spec.fill).all()
        assert x.is_contiguous()
        assert getattr(pool, name) is x
        assert not x.requires_grad
    pool["wkv"][1][3] = 5  # the part of a layer is no copy
    assert (pool.wkv[1, 3] == 5).all()
    assert (pool.wkv == 5).sum() == 6
    assert (len(pool), pool.slots, pool.reserved, pool.device) == (6, 6, 1, torch.device("cpu"))
    assert pool.nbytes == 2 * 6 * 6 * 4 + 3 * 6 * 4 * 2 + 6 * 2


def test_pool_of_rwkv7():
    pool = StatePool.rwkv7(5, 3, 2, 4, 9, state_dtype=torch.float16, device="cpu", reserved=1)
    assert (pool.wkv.shape, pool.wkv.dtype) == ((3, 5, 2, 4, 4), torch.float16)
    for name in ("time_shift", "channel_shift"):
        assert (pool[name].shape, pool[name].dtype) == ((3, 5, 9), torch.bfloat16)
    assert pool.time_shift.data_ptr() != pool.channel_shift.data_ptr()
    assert pool.allocate() == [1]
    usual = StatePool.rwkv7(1, 1, 1, 1, 1, shift_dtype=torch.float32, device="cpu")
    assert [usual[name].dtype for name in ("wkv", "time_shift", "channel_shift")] == [torch.float32] * 3
    assert usual.allocate() == [0]


def test_a_pool_and_a_ring_say_what_they_hold():
    pool = StatePool.rwkv7(8, layers=2, heads=4, head_size=64, width=256, device="cpu", reserved=1)
    pool.allocate(3)
    shift = "2 x [256] bfloat16"
    assert repr(pool) == (
        "StatePool(8 slots: 3 allocated, 4 free, 1 reserved; "
        f"wkv 2 x [4, 64, 64] float32, time_shift {shift}, channel_shift {shift}; 1.1 MB on cpu)"
    )
    assert pool.nbytes == 8 * 2 * (4 * 4 * 64 * 64 + 2 * 2 * 256)
    pool = StatePool(1, {"a": StateSpec(3, (5,), torch.float64, fill=-1.0)}, device="cpu")
    assert repr(pool) == "StatePool(1 slots: 0 allocated, 1 free, 0 reserved; a 3 x [5] float64 of -1.0; 0.0 MB on cpu)"
    ring = ReplayRing(8, "wkv7", 4, 64, 32, length=5, drafts=2, device="cpu")
    assert repr(ring) == (
        "ReplayRing(wkv7, 8 slots, 4 heads of K 64 and V 32, 5 entries and 2 speculative tokens, "
        "bfloat16 beside states of float32; 0.2 MB on cpu)"
    )
    assert ring.nbytes == 8 * (4 * 7 * (4 * 64 + 2 * 2 * 64 + 2 * 32 + 4 * 32) + 2 * 4)


def test_names_that_there_are_not():
    pool = make()
    with pytest.raises(KeyError, match="expected one of wkv, shift, max, got 'wkw'"):
        pool["wkw"]
    with pytest.raises(AttributeError, match="StatePool has no attribute 'wkw'; its states are wkv, shift, max"):
        pool.wkw  # noqa: B018


def test_copy_of_a_pool_has_memory_and_slots_of_its_own(pool):
    before = everything(pool)
    other = copy.deepcopy(pool)
    assert unchanged(other, before)
    other.reset(other.allocate(2))
    other.free(1)
    write(other, 2, 9)
    assert unchanged(pool, before)


def test_pool_of_inference_mode_works_outside_of_it():
    with torch.inference_mode():
        pool = make()
        first = pool.allocate()
    pool.fork(first[0])
    pool.reset(first)
    assert pool.allocated == (1, 2)


def test_device_that_torch_makes_tensors_on_does_not_matter():
    with torch.device("meta"):
        pool = make()
        (slot,) = pool.allocate()
    assert {x.device.type for x in (pool.wkv, pool.indices(slot))} == {"cpu"}


# ---- slots -------------------------------------------------------------------------------------------------------


def test_slots_are_given_out_lowest_first():
    pool = make(slots=6, reserved=0)
    assert pool.allocate() == [0]
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([3, 0])
    pool.free(2)
    assert (pool.allocated, pool.free_count) == ((1, 4), 4)
    assert pool.fork(4) == [0]
    assert pool.allocate(2) == [2, 3]
    assert pool.allocate(0) == []
    assert pool.allocate() == [5]
    assert (pool.allocated, pool.free_count) == ((0, 1, 2, 3, 4, 5), 0)


def test_reserved_slots_are_never_given_out():
    pool = make(slots=4, reserved=2)
    assert pool.allocate(2) == [2, 3]
    with pytest.raises(RwkvJitError):
        pool.allocate()
    for refused in (pool.free, pool.reset, pool.fork):
        with pytest.raises(ValueError, match="expected allocated slots, got \\[1\\]"):
            refused(1)


def test_allocating_fills_the_slots_in_question_alone(pool):
    before = [state(pool, slot) for slot in range(6)]
    assert pool.allocate(2) == [3, 5]
    for slot in range(6):
        assert equal(state(pool, slot), fresh() if slot in (3, 5) else before[slot])


def test_freeing_and_asking_write_nothing(pool):
    before = everything(pool)[2]
    pool.free([4, 1])
    assert pool.indices(2).tolist() == [2]
    assert equal(everything(pool)[2], before)


def test_fork_copies_all_of_a_state(pool):
    before = [state(pool, slot) for slot in range(6)]
    assert pool.fork(4, 2) == [3, 5]
    for slot in range(6):
        assert equal(state(pool, slot), before[4 if slot in (3, 5) else slot])
    write(pool, 3, 9)
    assert equal(state(pool, 4), before[4])
    assert equal(state(pool, 5), before[4])
    assert pool.fork(4, 0) == []


def test_copy_reads_all_sources_before_it_writes(pool):
    before = [state(pool, slot) for slot in range(6)]
    pool.copy([1, 2, 1], [2, 1, 4])
    for slot, source in enumerate([0, 2, 1, 3, 1, 5]):
        assert equal(state(pool, slot), before[source])
    pool.copy(2, 4)
    assert equal(state(pool, 4), before[1])
    assert equal(state(pool, 2), before[1])
    pool.copy([], [])


def test_reset_fills_the_slots_in_question_alone(pool):
    before = [state(pool, slot) for slot in range(6)]
    pool.reset((4, 1))
    for slot in range(6):
        assert equal(state(pool, slot), fresh() if slot in (1, 4) else before[slot])
    pool.reset(2)
    assert equal(state(pool, 2), fresh())


def test_indices_take_reserved_slots_as_padding(pool):
    index = pool.indices([4, 0, 1, 0])
    assert (index.dtype, index.tolist()) == (torch.int32, [4, 0, 1, 0])
    assert (pool.indices([]).dtype, pool.indices([]).shape) == (torch.int32, (0,))
    assert torch.equal(pool.wkv[0][index][2], pool.wkv[0, 1])


@pytest.mark.parametrize("slots", [range(1, 3), {1, 2}, (1, 2), pytest.param((x for x in (1, 2)), id="generator")])
def test_slots_may_come_as_any_iterable(pool, slots):
    pool.free(slots)
    assert pool.allocated == (4,)


# ---- what does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [lambda pool: pool.allocate(3), lambda pool: pool.fork(1, 3)], ids=["allocate", "fork"])
def test_with_too_few_slots_none_is_taken(pool, ask):
    before = everything(pool)
    with pytest.raises(RwkvJitError, match=r"^StatePool: expected 3 free slots, got 2 of 6; free some, or make the "):
        ask(pool)
    assert unchanged(pool, before)
    assert pool.allocate(2) == [3, 5]


REFUSED = {
    "free": (lambda pool: pool.free([1, 3]), ValueError, "slots: expected allocated slots, got [3]"),
    "free twice": (lambda pool: pool.free([1, 2, 1]), ValueError, "slots: expected each slot once, got [1, 2, 1]"),
    "free none": (lambda pool: pool.free(None), TypeError, "slots: expected an int or several, got None"),
    "free text": (lambda pool: pool.free("12"), TypeError, "slots: expected an int or several, got '12'"),
    "free bool": (lambda pool: pool.free([True]), TypeError, "slots: expected an int or several, got [True]"),
    "free tensor": (
        lambda pool: pool.free(torch.tensor([1])), TypeError, "slots: expected an int or several, got tensor([1])"
    ),
    "free beyond": (lambda pool: pool.free(6), ValueError, "slots: expected allocated slots, got [6]"),
    "free negative": (lambda pool: pool.free(-1), ValueError, "slots: expected allocated slots, got [-1]"),
    "reset": (lambda pool: pool.reset([1, 3]), ValueError, "slots: expected allocated slots, got [3]"),
    "reset twice": (lambda pool: pool.reset([1, 1]), ValueError, "slots: expected each slot once, got [1, 1]"),
    "fork": (lambda pool: pool.fork(3), ValueError, "slot: expected allocated slots, got [3]"),
    "fork several": (lambda pool: pool.fork([1, 2]), TypeError, "slot: expected an int, got [1, 2]"),
    "fork count": (lambda pool: pool.fork(1, -1), ValueError, "count: expected at least 0, got -1"),
    "allocate": (lambda pool: pool.allocate(-1), ValueError, "count: expected at least 0, got -1"),
    "allocate float": (lambda pool: pool.allocate(1.0), TypeError, "count: expected an int, got 1.0"),
    "allocate bool": (lambda pool: pool.allocate(True), TypeError, "count: expected an int, got True"),
    "copy from": (lambda pool: pool.copy([1, 3], [2, 4]), ValueError, "source: expected allocated slots, got [3]"),
    "copy to": (lambda pool: pool.copy([1, 2], [4, 0]), ValueError, "target: expected allocated slots, got [0]"),
    "copy twice": (lambda pool: pool.copy([1, 2], [4, 4]), ValueError, "target: expected each slot once, got [4, 4]"),
    "copy fewer": (lambda pool: pool.copy(1, [2, 4]), ValueError, "target: expected 1 slots like source, got 2"),
    "indices": (lambda pool: pool.indices([0, 1, 3]), ValueError, "slots: expected allocated slots, got [3]"),
    "indices twice": (lambda pool: pool.indices([0, 1, 1]), ValueError, "slots: expected each slot once, got [1, 1]"),
    "save": (lambda pool: pool.save("file", [1, 3]), ValueError, "slots: expected allocated slots, got [3]"),
    "save twice": (lambda pool: pool.save("file", [1, 1]), ValueError, "slots: expected each slot once, got [1, 1]"),
    "save metadata": (
        lambda pool: pool.save("file", 1, {"step": 1}), TypeError, "metadata: expected str for str, got 1 for 'step'"
    ),
    "save format": (
        lambda pool: pool.save("file", 1, {"rwkv_jit.format": "2"}),
        ValueError,
        "metadata: expected other keys than rwkv_jit.format and rwkv_jit.specs, got rwkv_jit.format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_call_names_the_argument_and_changes_nothing(case, pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, error, message = REFUSED[case]
    before = everything(pool)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(pool)
    assert unchanged(pool, before)
    assert not os.path.exists("file")


def of(**changed):
    """Specs of one state, which is changed."""
    return {"wkv": StateSpec(2, (3,), torch.float32)._replace(**changed)}


DTYPES = "torch.float16 or torch.bfloat16 or torch.float32 or torch.float64"
NAMES = (
    "specs: expected names that are identifiers, without an underscore in front, and no attributes of StatePool, got "
)
NO_POOL = {
    "no slots": (lambda: make(slots=0), ValueError, "slots: expected at least 1, got 0"),
    "float slots": (lambda: make(slots=2.0), TypeError, "slots: expected an int, got 2.0"),
    "reserved": (lambda: make(slots=2, reserved=2), ValueError, "reserved: expected fewer than the 2 slots, got 2"),
    "negative reserved": (lambda: make(reserved=-1), ValueError, "reserved: expected at least 0, got -1"),
    "bool reserved": (lambda: make(reserved=True), TypeError, "reserved: expected an int, got True"),
    "no specs": (lambda: make(specs={}), TypeError, "specs: expected a StateSpec for one name or more, got {}"),
    "a list": (lambda: make(specs=[1]), TypeError, "specs: expected a StateSpec for one name or more, got [1]"),
    "a tuple": (lambda: make(specs={"x": (2, 3)}), TypeError, "specs['x']: expected a StateSpec, got (2, 3)"),
    **{
        f"name {name!r}": (lambda name=name: make(specs={name: SPECS["wkv"]}), ValueError, f"{NAMES}{name!r}")
        for name in ("slots", "device", "free", "nbytes", "rwkv7", "_free", "__metadata__", "a.b", "", 1)
    },
    "layers": (lambda: make(specs=of(layers=0)), ValueError, "specs['wkv'].layers: expected at least 1, got 0"),
    "shape": (lambda: make(specs=of(shape=3)), TypeError, "specs['wkv'].shape: expected a tuple of ints, got 3"),
    "sizes": (lambda: make(specs=of(shape=(3, 0))), ValueError, "specs['wkv'].shape: expected at least 1, got 0"),
    "dtype": (
        lambda: make(specs=of(dtype=torch.int8)),
        TypeError,
        f"specs['wkv'].dtype: expected {DTYPES}, got torch.int8",
    ),
    "fill": (
        lambda: make(specs=of(fill=float("nan"))), ValueError, "specs['wkv'].fill: expected a finite number, got nan"
    ),
    "large fill": (
        lambda: make(specs=of(fill=-1e38, dtype=torch.float16)),
        ValueError,
        "specs['wkv'].fill: expected a number that fits into torch.float16, got -1e+38",
    ),
    "heads": (lambda: StatePool.rwkv7(4, 2, 0, 64, 8, device="cpu"), ValueError, "heads: expected at least 1, got 0"),
    "width": (lambda: StatePool.rwkv7(4, 2, 1, 64, "8", device="cpu"), TypeError, "width: expected an int, got '8'"),
    "shift_dtype": (
        lambda: StatePool.rwkv7(4, 2, 1, 64, 8, shift_dtype="half", device="cpu"),
        TypeError,
        f"shift_dtype: expected {DTYPES}, got 'half'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_POOL)
def test_pool_that_cannot_be_made(case):
    call, error, message = NO_POOL[case]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_shape_may_be_a_list():
    pool = make(specs=of(shape=[3, 2], fill=-1e38))
    assert pool.wkv.shape == (2, 6, 3, 2)


@pytest.mark.parametrize("ask", ["allocate", "fork", "load"])
def test_slots_stay_free_where_the_work_on_them_fails(ask, pool, tmp_path, monkeypatch):
    pool.save(tmp_path / "file", 1)
    before = pool.allocated, pool.free_count

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for name in ("index_fill_", "index_copy_"):
        monkeypatch.setattr(torch.Tensor, name, fail)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(pool, ask)(*{"allocate": [], "fork": [1], "load": [tmp_path / "file"]}[ask])
    assert (pool.allocated, pool.free_count) == before
    monkeypatch.undo()
    assert pool.allocate(2) == [3, 5]


# ---- any sequence of calls ---------------------------------------------------------------------------------------

SLOTS, RESERVED = 7, 1


class Calls(RuleBasedStateMachine):
    """A pool beside a dict of the states of each slot."""

    @initialize()
    def begin(self):
        self.pool, self.model = make(SLOTS, reserved=RESERVED), {}

    def free_slots(self):
        return [slot for slot in range(RESERVED, SLOTS) if slot not in self.model]

    def some(self, data, least=0):
        """Some slots that are allocated, in any order."""
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=least))

    def took(self, new, count, states):
        assert new == self.free_slots()[:count]
        self.model |= {slot: {name: x.clone() for name, x in states.items()} for slot in new}

    @rule(count=st.integers(0, SLOTS))
    def allocate(self, count):
        if count > len(self.free_slots()):
            with pytest.raises(RwkvJitError):
                self.pool.allocate(count)
        else:
            self.took(self.pool.allocate(count), count, fresh())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, 3))
    def fork(self, data, count):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if count > len(self.free_slots()):
            with pytest.raises(RwkvJitError):
                self.pool.fork(slot, count)
        else:
            self.took(self.pool.fork(slot, count), count, self.model[slot])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        slots = self.some(data)
        self.pool.free(slots)
        for slot in slots:
            del self.model[slot]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def copy(self, data):
        targets = self.some(data)
        sources = [data.draw(st.sampled_from(sorted(self.model))) for _ in targets]
        self.pool.copy(sources, targets)
        before = {slot: {name: x.clone() for name, x in states.items()} for slot, states in self.model.items()}
        self.model |= {target: before[source] for source, target in zip(sources, targets, strict=True)}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reset(self, data):
        slots = self.some(data)
        self.pool.reset(slots)
        self.model |= {slot: fresh() for slot in slots}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), number=st.integers(0, 9))
    def write(self, data, number):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        write(self.pool, slot, number)
        self.model[slot] = {
            name: (number * 16 + torch.arange(x.numel())).reshape(x.shape).to(x.dtype) for name, x in fresh().items()
        }

    @rule(data=st.data(), name=st.sampled_from(["free", "reset", "copy", "fork"]))
    def refuse(self, data, name):
        strangers = st.sampled_from([-1, SLOTS, *range(RESERVED), *self.free_slots()])
        slot, own = data.draw(strangers), sorted(self.model)
        arguments = {"free": [[*own, slot]], "reset": [[*own, slot]], "copy": [[*own, slot]] * 2, "fork": [slot]}
        with pytest.raises(ValueError, match="expected (allocated slots|at least 0)"):
            getattr(self.pool, name)(*arguments[name])

    @invariant()
    def pool_is_as_the_model(self):
        assert self.pool.allocated == tuple(sorted(self.model))
        assert self.pool.free_count == len(self.free_slots())
        for slot, states in self.model.items():
            assert equal(state(self.pool, slot), states)
        for slot in range(RESERVED):
            assert equal(state(self.pool, slot), fresh())


def test_any_sequence_of_calls_does_what_it_does_to_a_dict():
    run_state_machine_as_test(Calls, settings=settings(max_examples=60, stateful_step_count=30, database=None))


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_states_come_back_bit_for_bit(dtype, tmp_path):
    specs = of(dtype=dtype)
    pool, other = make(specs=specs), make(9, specs, reserved=0)
    first, second, third = pool.allocate(3)
    pool.wkv.copy_(torch.randn(pool.wkv.shape, dtype=torch.float64) * 1e-3)
    pool.wkv[0, third, 0] = float("nan")
    pool.save(tmp_path / "file", [third, first])
    other.allocate(2)
    before = other.wkv.clone()
    assert other.load(tmp_path / "file") == [2, 3]
    assert other.allocated == (0, 1, 2, 3)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(other.wkv[:, [2, 3]].view(words), pool.wkv[:, [third, first]].view(words))
    assert torch.equal(other.wkv[:, [0, 1, *range(4, 9)]], before[:, [0, 1, *range(4, 9)]])


def test_file_has_all_names_and_says_what_it_is(pool, tmp_path):
    path = tmp_path / "file.safetensors"
    before = everything(pool)
    pool.save(str(path), metadata={"model": "rwkv7 ☃"})
    assert unchanged(pool, before)
    held = load_file(path)
    assert equal(held, {name: pool[name][:, [1, 2, 4]] for name in SPECS})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("model") == "rwkv7 ☃"
    assert metadata.pop("rwkv_jit.format") == "1"
    assert json.loads(metadata.pop("rwkv_jit.specs")) == {
        "wkv": {"layers": 2, "shape": [2, 3], "dtype": "float32", "fill": 0.0},
        "shift": {"layers": 3, "shape": [4], "dtype": "bfloat16", "fill": -1.5},
        "max": {"layers": 1, "shape": [], "dtype": "float16", "fill": 7},
    }
    assert metadata == {}
    assert os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o600
    other = make(4)
    assert other.load(str(path)) == [1, 2, 3]
    for slot, source in zip((1, 2, 3), (1, 2, 4), strict=True):
        assert equal(state(other, slot), state(pool, source))


def test_file_of_no_slots(tmp_path):
    pool = make()
    pool.save(tmp_path / "none allocated")
    pool.allocate()
    pool.save(tmp_path / "none named", [])
    for path in tmp_path.iterdir():
        assert pool.load(path) == []
    assert pool.allocated == (1,)


def test_file_with_more_slots_than_are_free_takes_none(pool, tmp_path):
    pool.save(tmp_path / "file")
    before = everything(pool)
    with pytest.raises(RwkvJitError, match="expected 3 free slots, got 2 of 6"):
        pool.load(tmp_path / "file")
    assert unchanged(pool, before)


OTHER_SPECS = {
    "names": (
        {"wkv": SPECS["wkv"], "shifts": SPECS["shift"]},
        "expected a file with the states max, shift, wkv, got shifts, wkv",
    ),
    "fewer": ({"wkv": SPECS["wkv"]}, "expected a file with the states max, shift, wkv, got wkv"),
    "layers": (
        SPECS | {"shift": SPECS["shift"]._replace(layers=2)},
        "expected shift [3, slots, 4] in bfloat16, got [2, 2, 4] in bfloat16",
    ),
    "shape": (
        SPECS | {"wkv": SPECS["wkv"]._replace(shape=(3, 2))},
        "expected wkv [2, slots, 2, 3] in float32, got [2, 2, 3, 2] in float32",
    ),
    "dimensions": (
        SPECS | {"max": SPECS["max"]._replace(shape=(1,))},
        "expected max [1, slots] in float16, got [1, 2, 1] in float16",
    ),
    "dtype": (
        SPECS | {"shift": SPECS["shift"]._replace(dtype=torch.float16)},
        "expected shift [3, slots, 4] in bfloat16, got [3, 2, 4] in float16",
    ),
}


@pytest.mark.parametrize("case", OTHER_SPECS)
def test_file_of_another_pool_is_refused_and_changes_nothing(case, pool, tmp_path):
    specs, message = OTHER_SPECS[case]
    other = make(specs=specs)
    other.save(tmp_path / "file", other.allocate(2))
    before = everything(pool)
    with pytest.raises(ValueError, match=f"^path: {re.escape(message)}$"):
        pool.load(tmp_path / "file")
    assert unchanged(pool, before)


def test_file_is_read_by_a_pool_that_fills_otherwise(tmp_path):
    pool, other = make(specs=of(fill=1)), make(specs=of(fill=2))
    pool.save(tmp_path / "file", pool.allocate())
    (slot,) = other.load(tmp_path / "file")
    assert (other.wkv[:, slot] == 1).all()


def made_otherwise(path, format_number="1", **changed):
    """A file that `save` did not write."""
    held = {name: torch.zeros(spec.layers, 2, *spec.shape, dtype=spec.dtype) for name, spec in SPECS.items()}
    save_file(held | changed, path, metadata=format_number and {"rwkv_jit.format": format_number})


OF_A_KIND = "expected a file of StatePool.save with format '1', got "
MADE_OTHERWISE = {
    "no metadata": ({"format_number": None}, f"{OF_A_KIND}none"),
    "newer": ({"format_number": "2"}, f"{OF_A_KIND}'2'"),
    "uneven": ({"shift": torch.zeros(3, 1, 4).bfloat16()}, "expected shift of 2 slots like wkv, got 1"),
    "flat": ({"wkv": torch.zeros(2)}, "expected wkv [2, slots, 2, 3] in float32, got [2] in float32"),
    "number": ({"max": torch.zeros(()).half()}, "expected max [1, slots] in float16, got [] in float16"),
    "integers": (
        {"max": torch.zeros(1, 2).short()}, "expected max [1, slots] in float16, got [1, 2] in int16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE_OTHERWISE)
def test_file_that_another_program_wrote(case, pool, tmp_path):
    about, message = MADE_OTHERWISE[case]
    made_otherwise(tmp_path / "file", **about)
    before = everything(pool)
    with pytest.raises(ValueError, match=f"^path: {re.escape(message)}$"):
        pool.load(tmp_path / "file")
    assert unchanged(pool, before)
    made_otherwise(tmp_path / "file")
    assert pool.load(tmp_path / "file") == [3, 5]


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -100, -1])
def test_truncated_file_is_refused_and_changes_nothing(kept, pool, tmp_path):
    path = tmp_path / "file"
    pool.save(path, [1, 2])
    path.write_bytes(path.read_bytes()[:kept])
    before = everything(pool)
    with pytest.raises(ValueError, match=f"^path: expected a safetensors file, got {path}, which is damaged: "):
        pool.load(path)
    assert unchanged(pool, before)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 1000, b"x" * 1000, (2).to_bytes(8, "little") + b"{}" + b"more"], ids=range(4)
)
def test_garbage_is_refused(data, pool, tmp_path):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="^path: expected a safetensors file, got "):
        pool.load(tmp_path / "file")


def test_dtype_that_torch_does_not_have_is_refused(pool, tmp_path):
    header = {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    text = json.dumps(header | {"__metadata__": {"rwkv_jit.format": "1"}}).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    with pytest.raises(ValueError, match="^path: expected "):
        pool.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["none", "."])
def test_file_that_is_not_there(name, pool, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"^path: there is no file {re.escape(str(tmp_path / name))}$"):
        pool.load(tmp_path / name)


@pytest.mark.parametrize("step", ["fdopen", "chmod", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(step, pool, tmp_path, monkeypatch):
    path = tmp_path / "file"
    pool.save(path, 1)
    old = path.read_bytes()

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left on device"):
        pool.save(path, [1, 2])
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_file_appears_when_it_is_whole(pool, tmp_path, monkeypatch):
    """Whoever looks before it is moved in place sees the old one."""
    path, replace, seen = tmp_path / "file", os.replace, []
    pool.save(path, 1)
    old = path.read_bytes()

    def look(source, target):
        seen.append((path.read_bytes() == old, os.path.dirname(source) == str(tmp_path), load_file(source).keys()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    pool.save(path, [1, 2])
    assert seen == [(True, True, SPECS.keys())]
    assert load_file(path)["wkv"].shape[1] == 2


@pytest.mark.parametrize("method", ["save", "load"])
def test_without_safetensors_the_error_says_how_to_get_it(method, pool, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"^StatePool.{method} needs safetensors: pip install safetensors$"):
        getattr(pool, method)(tmp_path / "file")


def test_a_pool_without_files_needs_no_safetensors(child):
    code = """
import sys
sys.modules["safetensors"] = None
import torch, rwkv_jit
pool = rwkv_jit.StatePool(2, {"wkv": rwkv_jit.StateSpec(1, (2,), torch.float32)}, "cpu")
assert pool.fork(*pool.allocate()) == [1]
"""
    child(code, after="torch")


# ---- docs --------------------------------------------------------------------------------------------------------

METHODS = [name for name, value in vars(StatePool).items() if name[0] != "_" and not isinstance(value, property)]


def test_the_public_methods_are_known():
    assert sorted(METHODS) == ["allocate", "copy", "fork", "free", "indices", "load", "reset", "rwkv7", "save"]


@pytest.mark.parametrize("name", ["StatePool", *METHODS])
def test_docstring_describes_every_parameter_and_has_examples_that_are_right(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    member = StatePool if name == "StatePool" else getattr(StatePool, name)
    text = inspect.getdoc(member)
    parts = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    documented = re.findall(r"^(\w+) : .*$", sections["Parameters"], flags=re.MULTILINE)
    assert documented == [each for each in inspect.signature(member).parameters if each != "self"]
    assert {"Raises", "Examples"} <= set(sections)
    for parameter in inspect.signature(member).parameters.values():
        if parameter.default not in (inspect.Parameter.empty, None):
            assert re.search(rf'^{parameter.name} : .*, default "?{re.escape(str(parameter.default))}"?$', text, re.M)
    names = {"torch": torch, "rwkv_jit": rwkv_jit, "pool": make(reserved=0)}
    example = doctest.DocTestParser().get_doctest(text.replace('"cuda"', '"cpu"'), names, name, None, None)
    assert doctest.DocTestRunner().run(example).failed == 0
