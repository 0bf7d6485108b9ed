"""What instructions of PTX do: each is made into a function that takes the threads that are to do it.

Those that are here are the ones that kernels of the library have. Approximations are exact, and no small number is
flushed to zero.
"""

import operator
import re

import numpy as np
from ptx_text import TYPES, Fault

# What would change a result, and no kernel asks for.
_UNKNOWN_WAYS = {"sat", "satfinite", "relu", "rz", "rm", "rp", "cc", "NaN", "xorsign"}
_KNOWN_WAYS = {"cvt.sat.f32.f32", "fma.rm.f32", "add.rz.f32", "min.NaN.f32"}
MOST_BYTES = 64  # of a parameter of a function
_MAKERS = {}


def instruction(*names):
    """Say which instructions a maker is for."""

    def note(maker):
        _MAKERS.update(dict.fromkeys(names, maker))
        return maker

    return note


def make(machine, given):
    """Return what an instruction does: a function of a mask, or of None for all threads; true where they have left."""
    maker, is_plain = _MAKERS.get(given.parts[0]), not _UNKNOWN_WAYS & {*given.parts}
    if maker is None or not (is_plain or ".".join(x for x in given.parts if x != "ftz") in _KNOWN_WAYS):
        raise Fault("an unknown instruction")
    run = maker(machine, given)
    if given.has("sync") and (given.has("warp") or given.parts[0] not in ("bar", "barrier")):
        run = _together(machine, given, run)
    if given.predicate is None:
        return run

    def run_where(mask):
        chosen = machine.register(given.predicate) ^ given.is_negated
        if mask is not None:
            chosen = chosen & mask
        if chosen.all():
            return run(None)
        has_left = chosen.any() and run(chosen)
        if has_left:
            machine.go(given.place + 1, machine.mask(mask) & ~chosen)
        return has_left

    return run_where


def _members(machine, given):
    """Return a function that returns who is to come to an instruction, as bits of a warp; all where none are named."""
    return machine.source("-1" if given.has("aligned") else given.operands[-1], np.uint32)


def _together(machine, given, run):
    """Return what an instruction does for threads that wait for others of their warp, or of their group of warps."""
    members, is_of_group = _members(machine, given), given.has("fence") or given.has("mma_async")
    threads = min(machine.threads, 128) if is_of_group else 32

    def run_together(mask):
        here = mask if mask is None else machine.gather(mask, given.place, members(), threads)
        if here is mask:
            return run(mask)
        if here.any():
            run(here)
            machine.go(given.place + 1, here)
        return True

    return run_together


def _common(machine, value, mask, what):
    """Return the number that all threads of a mask have."""
    found = np.unique(machine.full(value)[machine.chosen(mask)])
    if len(found) > 1:
        raise Fault(f"threads differ in {what}")
    return found[0]


# ---- where threads go ----


@instruction("bra")
def _branch(machine, given):
    place = machine.kernel.targets[given.operands[0]]
    return lambda mask: machine.jump(place, machine.mask(mask)) or True


@instruction("ret")
def _return(machine, given):
    return lambda mask: machine.come_back(machine.mask(mask)) or True


@instruction("call")
def _call(machine, given):
    *results, name, arguments = given.operands
    results = results[0] if results else ()
    return lambda mask: machine.call(name, arguments, results, machine.mask(mask), given.place + 1) or True


_VOTES = {"or": np.any, "and": np.all, "popc": np.count_nonzero}


@instruction("bar", "barrier")
def _barrier(machine, given):
    if given.has("warp"):  # at which all have waited
        return lambda mask: None
    if given.has("cluster"):
        if given.has("arrive"):  # which the same threads wait for at once
            return lambda mask: None
        return lambda mask: machine.wait(machine.mask(mask), 0, 0, given.place + 1, of=machine.kernel.cluster) or True
    operands, votes, answer = given.operands, None, None
    if given.has("red"):
        combine = next(_VOTES[x] for x in given.parts if x in _VOTES)
        write, votes = machine.target(operands[0]), _truth(machine, operands[-1])
        kind = TYPES["pred" if given.kind() == "pred" else "u32"]
        operands = operands[1:-1]
        answer = lambda cast, mask: write(kind(combine(cast)), mask)  # noqa: E731
    elif not given.has("sync"):
        raise Fault("an unknown instruction")
    numbers = [machine.source(x, np.uint32) for x in operands]

    def wait(mask):
        mask = machine.mask(mask)
        named = np.stack([machine.full(read()) for read in numbers], 1)
        for several in np.unique(named[mask], axis=0):
            number, count = [*several.tolist(), 0][:2]
            here = mask & (named == several).all(1)
            machine.wait(here, number, count, given.place + 1, votes and votes(), answer)
        return True

    return wait


def _truth(machine, operand):
    """Return a function that reads a predicate, which may be negated."""
    read, is_negated = machine.source(operand.removeprefix("!"), np.bool_), operand.startswith("!")
    return lambda: machine.full(read() ^ is_negated)


@instruction("fence", "membar", "prefetch", "griddepcontrol", "nanosleep", "setmaxnreg")
def _nothing(machine, given):
    return lambda mask: None


# ---- numbers ----


def _from_bf16(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(x):
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _from_f16(bits):
    return bits.view(np.float16).astype(np.float32)


def _to_f16(x):
    return x.astype(np.float16).view(np.uint16)


_HALVES = {"bf16": (_from_bf16, _to_bf16), "f16": (_from_f16, _to_f16)}


def _number(machine, operand, kind):
    """Return a function that reads an operand as numbers; of packed halves two of each thread, one after another."""
    read = machine.source(operand, TYPES[kind])
    if kind.removesuffix("x2") not in _HALVES:
        return read
    widen, _ = _HALVES[kind.removesuffix("x2")]
    return lambda: widen(machine.full(read()).view(np.uint16))


def _bits(x, kind):
    """Return numbers as registers of a type hold them."""
    if kind.removesuffix("x2") not in _HALVES:
        return x.astype(TYPES[kind], copy=False)
    return _HALVES[kind.removesuffix("x2")][1](x.astype(np.float32, copy=False)).view(TYPES[kind])


def _compute(machine, given, function, kind=None, to=None):
    """Return an instruction that makes a number of others of one type; `to` is the type of the result."""
    kind = kind or given.kind()
    to = to or kind
    write, sources = machine.target(given.operands[0]), [_number(machine, x, kind) for x in given.operands[1:]]
    return lambda mask: write(_bits(np.asarray(function(*[read() for read in sources])), to), mask)


_FUNCTIONS = {
    "add": operator.add, "sub": operator.sub, "neg": operator.neg, "abs": np.abs, "not": operator.invert,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": np.reciprocal, "rsqrt": lambda a: 1 / np.sqrt(a),
    "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip


@instruction(*_FUNCTIONS)
def _plain(machine, given):
    if given.has("rz"):
        return _compute(machine, given, lambda a, b: _rounded(np.asarray(a).astype(np.float64) + b, toward=0))
    return _compute(machine, given, _FUNCTIONS[given.parts[0]])


def _rounded(x, toward):
    """Return float32 numbers that are no farther from a limit than x."""
    near = x.astype(np.float32)
    is_beyond = np.abs(near) > np.abs(x) if toward == 0 else near > x
    return np.where(is_beyond, np.nextafter(near, np.float32(toward)), near)


@instruction("min", "max")
def _choice(machine, given):
    # Of a number and none the number, but for .NaN.
    of_floats, of_integers = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[given.parts[0]]
    is_of_numbers = "f" in given.kind() and not given.has("NaN")
    return _compute(machine, given, of_floats if is_of_numbers else of_integers)


def _exact(x):
    return np.asarray(x).astype(object)


@instruction("mul", "mad", "fma")
def _product(machine, given):
    kind = given.kind()
    if given.has("wide"):
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        a, b = (machine.source(x, TYPES[kind]) for x in given.operands[1:3])
        more = [machine.source(x, TYPES[wide]) for x in given.operands[3:]]
        write = machine.target(given.operands[0])

        def multiply(mask):
            product = np.asarray(a()).astype(TYPES[wide]) * np.asarray(b()).astype(TYPES[wide])
            write(sum([read() for read in more], product), mask)

        return multiply
    if given.has("hi"):
        shift = int(kind[1:])
        return _compute(machine, given, lambda a, b: _exact(a) * _exact(b) >> shift)
    if kind == "f32" and len(given.operands) == 4:
        finish = (lambda x: _rounded(x, -np.inf)) if given.has("rm") else np.asarray
        return _compute(machine, given, lambda a, b, c: finish(np.asarray(a).astype(np.float64) * b + c))
    return _compute(machine, given, lambda a, b, c=None: a * b if c is None else a * b + c)


@instruction("div", "rem")
def _quotient(machine, given):
    if "f" in given.kind():
        return _compute(machine, given, operator.truediv)

    def divide(a, b):
        a, b = np.broadcast_arrays(a, np.where(b == 0, np.ones_like(b), b))
        rest = np.fmod(a, b)
        return rest if given.parts[0] == "rem" else (a - rest) // b

    return _compute(machine, given, divide)


@instruction("shl", "shr")
def _shift(machine, given):
    kind = given.kind().replace("b", "u")
    dtype, bits = np.dtype(TYPES[kind]), int(kind[1:])
    shift = np.left_shift if given.parts[0] == "shl" else np.right_shift
    write, read = machine.target(given.operands[0]), machine.source(given.operands[1], dtype)
    count = machine.source(given.operands[2], np.uint32)

    def move(mask):
        by, x = count(), read()
        moved = shift(x, np.minimum(by, bits - 1).astype(dtype))
        if kind[0] != "s" and np.any(by >= bits):
            moved = np.where(by < bits, moved, dtype.type(0))
        write(moved, mask)

    return move


@instruction("prmt")
def _permute(machine, given):
    def choose(a, b, selector):
        given_bytes = np.stack([machine.full(x) for x in (a, b)], 1).view(np.uint8)
        chosen = machine.full(selector)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        found = np.take_along_axis(given_bytes, (chosen & np.uint32(7)).astype(np.int64), 1)
        signs = np.where(found & np.uint8(128), np.uint8(255), np.uint8(0))
        return np.where(chosen & np.uint32(8), signs, found).view(np.uint32)[:, 0]

    return _compute(machine, given, choose)


@instruction("bfi")
def _insert(machine, given):
    def insert(a, b, begin, size):
        a, b, begin, size = (np.asarray(x).astype(np.int64) for x in (a, b, begin, size))
        field = (1 << size) - 1 << begin
        return b & ~field | a << begin & field

    return _compute(machine, given, lambda *x: insert(*x) & 0xFFFFFFFF)


@instruction("bfind", "brev")
def _turn_or_find(machine, given):
    bits = int(given.kind()[1:])
    if given.parts[0] == "brev":
        return _compute(machine, given, lambda a: _each(machine, a, lambda x: int(f"{x:0{bits}b}"[::-1], 2)))

    def find(x):
        """Return the place of the highest bit, or how far a shift would bring it there."""
        if x == 0:
            return (1 << 32) - 1
        return bits - x.bit_length() if given.has("shiftamt") else x.bit_length() - 1

    return _compute(machine, given, lambda a: _each(machine, a, find), to="b32")


def _each(machine, x, function):
    return np.array([function(each) for each in machine.full(x).tolist()])


_COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": operator.ne, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
}  # fmt: skip


@instruction("setp")
def _compare(machine, given):
    kind, compare = given.kind(), _COMPARISONS[given.parts[1]]
    if given.parts[1] == "ne" and "f" in kind:
        compare = lambda a, b: (a < b) | (a > b)  # noqa: E731
    write = machine.target(given.operands[0])
    a, b = (_number(machine, x, kind) for x in given.operands[1:3])
    if len(given.operands) == 3:
        return lambda mask: write(np.asarray(compare(a(), b())), mask)
    join = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[given.parts[2]]
    c = _truth(machine, given.operands[3])
    return lambda mask: write(join(np.asarray(compare(a(), b())), c()), mask)


@instruction("selp")
def _select(machine, given):
    dtype = TYPES[given.kind()]
    write, (a, b) = machine.target(given.operands[0]), (machine.source(x, dtype) for x in given.operands[1:3])
    c = machine.source(given.operands[3], np.bool_)
    return lambda mask: write(np.where(c(), a(), b()), mask)


@instruction("mov")
def _move(machine, given):
    to, source = given.operands
    dtype = np.dtype(TYPES[given.kind()])
    if isinstance(to, tuple):
        part = f"<u{dtype.itemsize // len(to)}"
        writes, read = [machine.target(x) for x in to], machine.source(source, dtype)

        def scatter(mask):
            parts = machine.full(read()).view(part).reshape(-1, len(to))
            for i, write in enumerate(writes):
                write(parts[:, i].copy(), mask)

        return scatter
    write = machine.target(to)
    if isinstance(source, tuple):
        part = f"<u{dtype.itemsize // len(source)}"
        reads = [machine.source(x, part) for x in source]
        return lambda mask: write(np.stack([machine.full(x()) for x in reads], 1).view(dtype)[:, 0], mask)
    read = machine.source(source, dtype)
    return lambda mask: write(read(), mask)


@instruction("cvta")
def _window(machine, given):
    space = next((x for x in given.parts if x in machine.WINDOWS), None)
    window = np.uint64(machine.WINDOWS.get(space, 0))
    move = operator.sub if given.has("to") else operator.add
    return _compute(machine, given, lambda a: move(a, window))


_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def _convert(machine, given):
    to, kind = given.parts[-2:]
    write, reads = machine.target(given.operands[0]), [_number(machine, x, kind) for x in given.operands[1:]]
    rounding = next((_ROUNDINGS[x] for x in given.parts if x in _ROUNDINGS), None)
    if to.endswith("x2"):  # the first one is the higher half
        high, low = reads
        return lambda mask: write(_bits(np.stack([machine.full(x()) for x in (low, high)], 1).reshape(-1), to), mask)
    (read,) = reads

    def convert(mask):
        x = np.asarray(read())
        x = x if rounding is None else rounding(x)
        x = np.fmin(np.fmax(x, 0), 1) if given.has("sat") else x
        if x.dtype.kind == "f" and "f" not in to:
            limits = np.iinfo(TYPES[to])
            # The largest integer below a limit that a float64 holds.
            most = np.nextafter(float(limits.max), 0) if limits.bits == 64 else float(limits.max)
            x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), float(limits.min), most)
        write(_bits(x, to), mask)

    return convert


# ---- memory ----

_SPACES = ("global", "shared", "local", "param")


def _space(given):
    named = (x.split("::")[0] for x in given.parts)
    return next((x for x in named if x in _SPACES), "generic")


def _vector(given, operand):
    """Return the registers of an operand, and their type."""
    several = operand if isinstance(operand, tuple) else (operand,)
    return several, np.dtype(TYPES[given.kind()])


def _check_vector(at, size, mask):
    if ((at if mask is None else at[mask]) & size - 1).any():
        raise Fault(f"a misaligned address of {size} bytes")


@instruction("ld")
def _load(machine, given):
    space, (names, dtype) = _space(given), _vector(given, given.operands[0])
    writes = [machine.target(x) for x in names]
    if space == "param" and given.operands[1].base in machine.kernel.registers:
        address = machine.address(given.operands[1])

        def read_place(mask):
            at = address()
            _check_vector(at, len(writes) * dtype.itemsize, mask)
            found = [machine.load_parameter(at + i * dtype.itemsize, dtype, mask) for i in range(len(writes))]
            for write, value in zip(writes, found, strict=True):
                write(value, mask)

        return read_place
    if space == "param":
        name, offset = given.operands[1]

        def read_parameter(mask):
            found = machine.frame[name][..., offset : offset + len(writes) * dtype.itemsize].copy().view(dtype)
            for i, write in enumerate(writes):
                write(found[..., i].copy(), mask)

        return read_parameter
    address = machine.address(given.operands[1])

    def load(mask):
        at = address()
        _check_vector(at, len(writes) * dtype.itemsize, mask)
        # All are read before one is written: it may be the address.
        found = [machine.load(space, at + i * dtype.itemsize, dtype, mask) for i in range(len(writes))]
        for write, value in zip(writes, found, strict=True):
            write(value, mask)

    return load


@instruction("st")
def _store(machine, given):
    space, (names, dtype) = _space(given), _vector(given, given.operands[1])
    if space == "param":
        (name, offset), (read,) = given.operands[0], [machine.source(x, dtype) for x in names]

        def write_parameter(mask):
            threads = machine.chosen(mask)
            found = machine.frame.get(name, np.zeros((machine.count, MOST_BYTES), np.uint8)).copy()
            found[threads, offset : offset + dtype.itemsize] = machine.full(read())[threads, None].view(np.uint8)
            machine.frame[name] = found

        return write_parameter
    address, reads = machine.address(given.operands[0]), [machine.source(x, dtype) for x in names]

    def store(mask):
        at = address()
        _check_vector(at, len(reads) * dtype.itemsize, mask)
        for i, read in enumerate(reads):
            machine.store(space, at + i * dtype.itemsize, np.asarray(read()), mask)

    return store


@instruction("atom")
def _atomic(machine, given):
    space, dtype = _space(given), np.dtype(TYPES[given.kind()])
    write, address = machine.target(given.operands[0]), machine.address(given.operands[1])
    read = machine.source(given.operands[2], dtype)
    change = next((_CHANGES[x] for x in given.parts if x in _CHANGES), None)
    if change is None:
        raise Fault("an unknown instruction")

    def change_all(mask):
        threads = machine.chosen(mask)
        view, where = machine.place(space, address()[threads], dtype.itemsize, threads)
        view, values, old = view.view(dtype), machine.full(read())[threads], np.zeros(machine.count, dtype)
        for thread, place, value in zip(threads, where, values, strict=True):
            old[thread] = view[place]
            view[place] = change(view[place], value)
        write(old, mask)

    return change_all


_CHANGES = {"add": operator.add, "max": max, "inc": lambda old, most: 0 if old >= most else old + 1}


@instruction("cp")
def _copy(machine, given):
    if any(x in ("commit_group", "wait_group", "wait_all") for x in given.parts):
        return lambda mask: None
    if given.has("bulk"):
        return _bulk_copy(machine, given)
    (target, source), size = (machine.address(x) for x in given.operands[:2]), int(given.operands[2])
    of_source = machine.source(given.operands[3], np.uint32) if len(given.operands) > 3 else lambda: np.uint32(size)

    def copy(mask):
        threads, place = machine.chosen(mask), np.arange(size)
        to, at, count = (machine.full(x)[threads] for x in (target(), source(), of_source()))
        is_read = place < count[:, None]
        if (to % size).any() or (at[count > 0] % size).any():
            raise Fault("a misaligned copy")
        found = np.zeros((len(threads), size), np.uint8)
        view, where = machine.place("global", (at[:, None] + place)[is_read], 1, threads)
        found[is_read] = view[where]
        view, where = machine.place("shared", (to[:, None] + place).reshape(-1), 1, np.repeat(threads, size))
        view[where] = found.reshape(-1)

    return copy


def _bulk_copy(machine, given):
    target, source = (machine.address(x) for x in given.operands[:2])
    size = machine.source(given.operands[2], np.uint32)
    to_space, space = [x.split("::")[0] for x in given.parts if x.split("::")[0] in _SPACES]
    barrier = machine.address(given.operands[3]) if to_space == "shared" else None
    blocks = machine.source(given.operands[4], np.uint16) if given.has("multicast::cluster") else None

    def copy(mask):
        sizes, at, to = machine.full(size()).astype(np.int64), source(), target()
        for thread in machine.chosen(mask):
            count, owners = sizes[thread], machine.block_of[[thread]]
            if (to[thread] | at[thread] | count) % 16:
                raise Fault("a misaligned bulk copy")
            if blocks is not None:
                in_cluster = np.arange(machine.kernel.cluster)
                owners = owners // len(in_cluster) * len(in_cluster) + in_cluster
                owners = owners[machine.full(blocks())[thread] >> in_cluster & 1 == 1]
            for owner in owners:
                one = np.full(count, owner * machine.threads)
                to_view, to_places = machine.place(to_space, to[thread] + np.arange(count), 1, one)
                view, places = machine.place(space, at[thread] + np.arange(count), 1, one)
                to_view[to_places] = view[places]
                if barrier is not None:
                    (key,) = machine.barrier_keys(barrier()[[thread]], one[:1])
                    machine.arrive(key, more_bytes=-int(count))

    return copy


@instruction("mbarrier")
def _memory_barrier(machine, given):
    act = {"init": _begin_barrier, "arrive": _arrive, "try_wait": _try_wait}.get(given.parts[1])
    if act is None:
        raise Fault("an unknown instruction")
    return act(machine, given)


def _begin_barrier(machine, given):
    address, count = machine.address(given.operands[0]), machine.source(given.operands[1], np.uint32)

    def begin(mask):
        threads = machine.chosen(mask)
        keys = machine.barrier_keys(address()[threads], threads)
        for key, arrivals in zip(keys, machine.full(count())[threads].tolist(), strict=True):
            machine.begin_barrier(key, arrivals)

    return begin


def _arrive(machine, given):
    address = machine.address(given.operands[1])
    amount = machine.source(given.operands[2], np.uint32) if given.has("expect_tx") else lambda: np.uint32(0)

    def arrive(mask):
        threads = machine.chosen(mask)
        keys = machine.barrier_keys(address()[threads], threads)
        for key, more in zip(keys, machine.full(amount())[threads].tolist(), strict=True):
            machine.arrive(key, 1, more)

    return arrive


def _try_wait(machine, given):
    write, address = machine.target(given.operands[0]), machine.address(given.operands[1])
    parity = machine.source(given.operands[2], np.uint32)

    def look(mask):
        threads = machine.chosen(mask)
        keys = machine.barrier_keys(address()[threads], threads)
        phases = {key: machine.barrier(key).phase for key in set(keys)}
        has_turned = np.zeros(machine.count, bool)
        has_turned[threads] = np.array([phases[key] for key in keys]) != machine.full(parity())[threads]
        write(has_turned, mask)
        stalled = machine.mask(mask) & ~has_turned
        machine.stalled = stalled if stalled.any() else None  # until they jump to look again

    return look


@instruction("mapa")
def _of_other_block(machine, given):
    return _compute(machine, given, lambda at, rank: at | rank + np.uint32(1) << np.uint32(machine.RANK_SHIFT))


# ---- warps ----


@instruction("shfl")
def _shuffle(machine, given):
    to, mode = given.operands[0], given.parts[2]
    to, is_inside = to if isinstance(to, tuple) else (to, "_")
    write, write_inside = machine.target(to), machine.target(is_inside)
    value, by, limits = (machine.source(x, np.uint32) for x in given.operands[1:4])
    members = _members(machine, given)

    def shuffle(mask):
        lane, step, limit = machine.lane, *(np.asarray(x()).astype(np.int64) for x in (by, limits))
        segment = limit >> 8 & 31
        last = lane & segment | limit & 31 & ~segment
        step = step & 31
        other = {
            "up": lane - step, "down": lane + step, "bfly": lane ^ step, "idx": lane & segment | step & ~segment,
        }[mode]  # fmt: skip
        inside = other >= last if mode == "up" else other <= last
        source = machine.everyone - lane + np.where(inside, other, lane)
        if mask is not None and not mask[source[mask]].all():
            raise Fault("threads read from others of their warp that are elsewhere")
        named = members()
        if (~named).any() and not (named >> (source % 32).astype(np.uint32) & 1)[machine.chosen(mask)].all():
            raise Fault("threads read from others of their warp that they do not name")
        write(machine.full(value())[source], mask)
        write_inside(inside, mask)

    return shuffle


@instruction("vote")
def _vote(machine, given):
    write, read, mode = machine.target(given.operands[0]), _truth(machine, given.operands[1]), given.parts[2]
    members = _members(machine, given)

    def vote(mask):
        votes, here, named = read(), machine.mask(mask), members()
        found = {
            "any": lambda: machine.bits(votes & here) & named != 0,
            "all": lambda: machine.bits(~votes & here) & named == 0,
            "ballot": lambda: machine.bits(votes & here) & named,
        }[mode]()
        write(found, mask)

    return vote


@instruction("redux")
def _reduce(machine, given):
    dtype = TYPES[given.kind()]
    write, read = machine.target(given.operands[0]), machine.source(given.operands[1], dtype)
    reduce, members = {"min": np.minimum, "max": np.maximum}[given.parts[2]].reduce, _members(machine, given)

    def run(mask):
        machine.warps(mask)
        if (~members()).any():
            raise Fault("a part of a warp")
        write(np.repeat(reduce(machine.full(read()).reshape(-1, 32), axis=1), 32).astype(dtype), mask)

    return run


# ---- tiles of 8 x 8 halves: a thread has two neighbours of row lane / 4 ----

_LANES = np.arange(32)
_ROW, _COLUMN = np.broadcast_arrays((_LANES // 4)[:, None], (2 * (_LANES % 4))[:, None] + np.arange(2))


def _tile_places(at, i, is_turned):
    """Return the addresses of a tile's elements in memory by thread and half; `at` has those of rows by thread."""
    row, column = (_COLUMN, _ROW) if is_turned else (_ROW, _COLUMN)
    return at[:, 8 * i + row] + 2 * column


def _tiles(machine, given, address, count):
    """Return a function that returns the warps of a mask, and view and places of their tiles in shared memory."""

    def find(mask):
        warps = machine.warps(mask)
        at = address()[warps]
        _check_vector(at[:, : 8 * count], 16, None)
        for i in range(count):
            places = _tile_places(at, i, given.has("trans"))
            threads = np.broadcast_to(warps[:, :, None], places.shape)
            yield i, warps, *machine.place("shared", places, 2, threads)

    return find


@instruction("ldmatrix")
def _load_tiles(machine, given):
    writes = [machine.target(x) for x in given.operands[0]]
    find = _tiles(machine, given, machine.address(given.operands[1]), len(writes))

    def load(mask):
        found = []
        for _, warps, view, where in find(mask):
            words = np.zeros(machine.count, np.uint32)
            words[warps] = view[where].view(np.uint32)[..., 0]
            found.append(words)
        for write, words in zip(writes, found, strict=True):
            write(words, mask)

    return load


@instruction("stmatrix")
def _store_tiles(machine, given):
    reads = [machine.source(x, np.uint32) for x in given.operands[1]]
    find = _tiles(machine, given, machine.address(given.operands[0]), len(reads))

    def store(mask):
        for i, warps, view, where in find(mask):
            view[where] = machine.full(reads[i]())[warps][..., None].view(np.uint16)

    return store


@instruction("movmatrix")
def _turn_tile(machine, given):
    write, read = machine.target(given.operands[0]), machine.source(given.operands[1], np.uint32)

    def turn(mask):
        warps = machine.warps(mask)
        tiles = machine.full(read())[warps].view(np.uint16).reshape(-1, 8, 8)
        words = np.zeros(machine.count, np.uint32)
        words[warps] = tiles.transpose(0, 2, 1).copy().reshape(-1, 64).view(np.uint32)
        write(words, mask)

    return turn


def _left(machine, reads, threads, widen):
    """Return left operands [..., 16 for each 32 threads, 8 or 16] from registers of two tiles above each other."""
    tiles = [widen(machine.full(read())[threads].view(np.uint16)).reshape(-1, 8, 8) for read in reads]
    above, below = (np.concatenate(tiles[i::2], 2) for i in (0, 1))
    return np.concatenate([above, below], 1)


def _sums(machine, given, names):
    """Return a function that adds products [n, rows, columns] of threads [n, 2 rows] to what they have."""
    writes, reads = ([use(x) for x in names] for use in (machine.target, lambda x: machine.source(x, np.float32)))

    def add(product, threads, mask, keeps=True, olds=reads):
        count, rows, columns = product.shape
        # By register, then by thread: a thread has two neighbours of two rows, which are 8 apart, of every 8 columns.
        parts = product.reshape(count, rows // 16, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        made = []
        for part, old in zip(parts.reshape(len(names), *threads.shape), olds, strict=True):
            sums = np.zeros(machine.count, np.float32)
            sums[threads] = part
            made.append(sums + old() if keeps else sums)
        for write, sums in zip(writes, made, strict=True):
            write(sums, mask)

    return add


@instruction("mma")
def _multiply(machine, given):
    _, shape, *_, kind, _, _ = (x for x in given.parts if x not in ("sync", "aligned"))
    if shape not in ("m16n8k8", "m16n8k16") or kind not in _HALVES or given.kind() != "f32":
        raise Fault("an unknown instruction")
    widen, _ = _HALVES[kind]
    a, b = ([machine.source(x, np.uint32) for x in several] for several in given.operands[1:3])
    olds = [machine.source(x, np.float32) for x in given.operands[3]]
    add = _sums(machine, given, given.operands[0])

    def multiply(mask):
        warps = machine.warps(mask)
        left = _left(machine, a, warps, widen)
        right = [widen(machine.full(read())[warps].view(np.uint16)).reshape(-1, 8, 8) for read in b]
        add(left @ np.concatenate(right, 2).transpose(0, 2, 1), warps, mask, olds=olds)

    return multiply


@instruction("wgmma")
def _multiply_in_groups(machine, given):
    if given.has("fence"):  # what begins products of a group
        return lambda mask: machine.warps(mask) is None
    if not given.has("mma_async"):  # products are there at once
        return lambda mask: None
    columns = int(re.fullmatch(r"m64n(\d+)k16", given.parts[4])[1])
    widen, _ = _HALVES[given.kind()]
    sums, a, b, adds, *signs, turns = (*given.operands[:6], [int(x) for x in given.operands[6:]])
    if signs != ["1", "1"] or given.parts[5] != "f32":
        raise Fault("an unknown instruction")
    is_held = isinstance(a, tuple)
    left = [machine.source(x, np.uint32) for x in a] if is_held else machine.source(a, np.uint64)
    right, keeps = machine.source(b, np.uint64), machine.source(adds, np.bool_)
    add = _sums(machine, given, sums)

    def multiply(mask):
        warps = machine.warps(mask)
        if len(warps) % 4 or (machine.full(machine.special["%tid.x"])[warps[::4, 0]] % 128).any():
            raise Fault("a part of a group of warps")
        groups = warps.reshape(-1, 128)
        if is_held:
            rows = _left(machine, left, groups, widen).reshape(-1, 64, 16)
        else:
            rows = widen(_described(machine, left(), groups, 64, turns[0]))
        product = rows @ widen(_described(machine, right(), groups, columns, turns[-1])).transpose(0, 2, 1)
        add(product, groups, mask, _common(machine, keeps(), mask, "whether sums go on"))

    return multiply


def _described(machine, descriptors, groups, count, is_turned):
    """Return rows [groups, count, 16] of halves in shared memory, as the descriptor of each group says."""
    given = machine.full(descriptors)[groups]
    if (given != given[:, :1]).any():
        raise Fault("threads of a group differ in a descriptor")
    d = given[:, :1, None].astype(np.int64)
    begin, leading, stride = ((d >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    i, k = np.arange(count)[:, None], np.arange(16)
    modes = set((given[:, 0] >> np.uint64(62)).tolist())
    if modes == {1}:  # rows of 128 bytes, whose pieces of 16 bytes change places
        if is_turned:
            at = begin + i // 64 * leading + k // 8 * stride + k % 8 * 128 + i % 64 * 2
        else:
            at = begin + i // 8 * stride + i % 8 * 128 + k * 2
        at = at ^ (at >> 7 & 7) << 4
    elif modes == {0}:  # tiles one behind another
        if is_turned:
            at = begin + i // 8 * stride + k // 8 * leading + k % 8 * 16 + i % 8 * 2
        else:
            at = begin + i // 8 * stride + k // 8 * leading + i % 8 * 16 + k % 8 * 2
    else:
        raise Fault("an unknown descriptor")
    view, where = machine.place("shared", at, 2, groups[:, :1, None])
    return view[where]
