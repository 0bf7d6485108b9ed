"""Runs the PTX of a kernel on the CPU: all threads of a launch in step, their registers as arrays of numpy.

Memory that a launch may not touch, threads that wait for ever and parts of warps in what whole warps do raise a Fault.
Threads that race for a place in memory do not: here they always come in the same order.
"""

import numpy as np
import ptx_instructions
import ptx_text
from ptx_text import Address, Fault

AT_ONCE = 16384  # threads
MOST_STEPS = 20_000_000
LOWEST = 4096


class _Everything:
    """All memory of this process, as numpy takes it."""

    def __init__(self, size):
        self.__array_interface__ = {
            "data": (LOWEST, False), "shape": ((1 << 47) // size,), "typestr": f"<u{size}", "version": 3,
        }  # fmt: skip


SIZES = (1, 2, 4, 8)
MEMORY = {size: np.asarray(_Everything(size)) for size in SIZES}


def bits_of(dtype):
    """Return the unsigned type of the same size."""
    return np.dtype(f"<u{np.dtype(dtype).itemsize}")


class Barrier:
    """A barrier in shared memory."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0


class Machine:
    """A kernel that can be launched. Of a launch it has the state of some blocks at a time."""

    # Where generic addresses begin that are not global.
    WINDOWS = {"shared": 1 << 60, "local": 1 << 61}
    # Where the addresses of parameters begin, and how far apart they are.
    PARAMETERS, PARAMETER_SHIFT = 1 << 59, 12
    # In addresses of 32 bits in the shared memory of a cluster: its block's number and one more.
    RANK_SHIFT = 24

    def __init__(self, text, entry):
        self.text, self.entry, self.functions = text, entry, {}
        self._function(entry)

    def _function(self, name):
        """Return a kernel or a function, and what its instructions do, as far as threads have come there."""
        if name not in self.functions:
            kernel = ptx_text.read(self.text, name)
            self.functions[name] = kernel, [None] * len(kernel.instructions)
        return self.functions[name]

    def launch(self, grid, block, shared_bytes, arguments, memory=()):
        """Run all blocks. `arguments` are bytes; `memory` has begin and end of what threads may touch."""
        self.kernel, self.steps = self._function(self.entry)
        kernel, threads = self.kernel, int(np.prod(block))
        if threads % 32:
            raise Fault("the threads of a block are no whole warps")
        self.frame = {}  # bytes of parameters
        for (name, size), given in zip(kernel.parameters.items(), arguments, strict=True):
            if len(given) != size:
                raise Fault(f"an argument of {len(given)} bytes for {size}")
            self.frame[name] = np.frombuffer(given, np.uint8)
        constants = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in kernel.constants.values()]
        allowed = np.array(sorted([*memory, *constants]), np.int64).reshape(-1, 2)
        self.begins, self.ends = allowed[:, 0], np.maximum.accumulate(allowed[:, 1])
        places = np.stack(np.meshgrid(*(np.arange(x) for x in grid[::-1]), indexing="ij"), -1).reshape(-1, 3)[:, ::-1]
        most = max(1, AT_ONCE // threads // kernel.cluster) * kernel.cluster
        with np.errstate(all="ignore"):
            for first in range(0, len(places), most):
                self._begin(grid, block, places[first : first + most], shared_bytes)
                self._run()

    def _begin(self, grid, block, blocks, shared_bytes):
        threads = int(np.prod(block))
        self.threads, self.count = threads, threads * len(blocks)
        self.everyone = np.arange(self.count)
        self.block_of = np.repeat(np.arange(len(blocks)), threads)
        thread = np.tile(np.arange(threads, dtype=np.uint32), len(blocks))
        self.lane = (thread % 32).astype(np.int64)
        x, y, _ = (np.uint32(size) for size in block)
        at = {"tid": (thread % x, thread // x % y, thread // x // y), "ntid": block, "nctaid": grid}
        at["ctaid"] = np.repeat(blocks.astype(np.uint32), threads, axis=0).T
        self.special = {f"%{name}.{d}": value for name, xyz in at.items() for d, value in zip("xyz", xyz, strict=True)}
        self.special |= {"%laneid": thread % 32, "%cluster_ctarank": self.block_of % self.kernel.cluster}
        self.special = {name: self.full(np.asarray(x, np.uint32)) for name, x in self.special.items()}
        # What nobody has written is no number, of whatever type.
        self.limits = {"shared": self.kernel.shared_bytes + shared_bytes, "local": self.kernel.local_bytes}
        self.sizes = {space: -(-limit // 1024) * 1024 for space, limit in self.limits.items()}
        counts = {"shared": len(blocks), "local": self.count}
        self.memory = {space: np.full(size * counts[space], 0xFF, np.uint8) for space, size in self.sizes.items()}
        self.registers = {}
        self.groups = {0: np.ones(self.count, bool)}  # who comes to which instruction next
        self.parked = {}  # who has waited there for a barrier in memory, in vain
        self.at_barriers = {}  # by block or cluster, and number: who waits, and where they go on
        self.at_warps = {}  # who waits for others of a warp, by the instruction
        self.barriers = {}  # those in memory, by block and place
        self.has_turned = True  # one of these, since those who are parked have last looked
        self.stalled = None
        self.done = np.zeros(self.count, bool)
        self.depth = 0  # of calls

    # ---- threads ----

    def _run(self):
        count = 0
        while self.groups or self.parked or self.at_barriers or self.at_warps:
            if not self.groups:
                if not self.parked or not self.has_turned:
                    raise Fault(f"threads wait for each other: {self._waiting()}")
                self.groups, self.parked, self.has_turned = self.parked, {}, False
            place = min(self.groups)
            count += self._follow(place, self.groups.pop(place))
            if count > MOST_STEPS:
                raise Fault("a loop without an end")

    def _waiting(self):
        places = [(place, mask) for waiting in self.at_barriers.values() for place, mask, _, _ in waiting]
        places = [(place - 1, mask) for place, mask in places] + [*self.at_warps.items(), *self.parked.items()]
        return "; ".join(f"{mask.sum()} at {self.kernel.instructions[place].text}" for place, mask in places)

    def _follow(self, place, mask):
        """Run threads until they go elsewhere, or come to where others are; returns how many instructions that were."""
        next_place = min(self.groups, default=None)
        kernel, given, count = self.kernel, None if mask.all() else mask, 0
        while place != next_place:
            step, count = self.steps[place], count + 1
            try:
                if step is None:
                    step = self.steps[place] = ptx_instructions.make(self, kernel.instructions[place])
                if step(given):
                    return count
            except Fault as fault:
                raise Fault(f"{kernel.instructions[place].text}: {fault}") from fault
            place += 1
        self.go(place, mask)
        return count

    def go(self, place, mask):
        """Let threads go on at an instruction."""
        if mask.any():
            self.groups[place] = self.groups[place] | mask if place in self.groups else mask

    def jump(self, place, mask):
        """The same; those who look for a barrier in memory in vain look again when one has turned."""
        if self.stalled is not None and (again := mask & self.stalled).any():
            self.parked[place] = self.parked[place] | again if place in self.parked else again
            mask = mask & ~again
        self.stalled = None
        self.go(place, mask)

    def call(self, name, arguments, results, mask, place):
        """Let threads run a function to its end before they go on; others meanwhile stay where they are."""
        own = "kernel", "steps", "registers", "frame", "groups", "parked", "at_barriers", "at_warps"
        before = {x: getattr(self, x) for x in own}
        self.kernel, self.steps = self._function(name)
        if self.kernel.local:
            raise Fault("a function with memory of its own")
        self.frame = {own: self.frame[x] for own, x in zip(self.kernel.parameters, arguments, strict=True)}
        self.registers, self.groups, self.parked, self.at_barriers, self.at_warps = {}, {0: mask}, {}, {}, {}
        self.depth += 1
        self._run()
        self.depth -= 1
        made = [self.frame[x] for x in self.kernel.results]
        vars(self).update(before)
        self.frame |= dict(zip(results, made, strict=True))
        self.go(place, mask)

    def come_back(self, mask):
        """End a function for threads, or all, and then nobody waits for them any longer."""
        if self.depth == 0:
            self.done |= mask
            for key in list(self.at_barriers):
                self._release(key)
            for place in list(self.at_warps):
                self.go(place, self.at_warps.pop(place))

    def wait(self, mask, number, count, place, votes=None, answer=None, of=1):
        """Let threads wait at a barrier of their block, or of the cluster `of` so many, and go on at `place`.

        `answer` is told the votes of all who were there.
        """
        for block in np.unique(self.block_of[mask] // of):
            key = (int(block), of, number, count)
            here = mask & (self.block_of // of == block)
            self.at_barriers.setdefault(key, []).append((place, here, votes, answer))
            self._release(key)

    def gather(self, mask, place, members, threads):
        """Return who of a mask, and of those who wait at an instruction, may run it; the others wait there.

        They wait for those that their `members` name, or for all of a group of more than 32 `threads`, that are not
        done.
        """
        here = mask | self.at_warps.pop(place) if place in self.at_warps else mask
        missing = self.bits(~(here | self.done)) & members
        if threads > 32:
            missing = np.repeat(missing.reshape(-1, threads).any(1), threads)
        late = here & (missing != 0)
        if not late.any():
            return here
        self.at_warps[place] = late
        return here & ~late

    def bits(self, mask):
        """Return for each thread which threads of its warp are in a mask, as bits."""
        return np.repeat(np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0], 32)

    def _release(self, key):
        block, of, _, count = key
        waiting = self.at_barriers[key]
        there = np.logical_or.reduce([mask for _, mask, _, _ in waiting])
        if there.sum() < (count or (~self.done & (self.block_of // of == block)).sum()):
            return
        del self.at_barriers[key]
        cast = [votes[mask] for _, mask, votes, _ in waiting if votes is not None]
        for place, mask, _, answer in waiting:
            if answer is not None:
                answer(np.concatenate(cast), mask)
            self.go(place, mask)

    def mask(self, mask):
        """Return a mask, also of all threads."""
        return np.ones(self.count, bool) if mask is None else mask

    def chosen(self, mask):
        """Return the numbers of the threads of a mask."""
        return self.everyone if mask is None else np.flatnonzero(mask)

    def warps(self, mask):
        """Return the threads of the warps of a mask as [warps, 32]; parts of warps are a fault."""
        rows = self.everyone.reshape(-1, 32)
        if mask is None:
            return rows
        here = mask.reshape(-1, 32)
        if (here.any(1) != here.all(1)).any():
            raise Fault("a part of a warp")
        return rows[here[:, 0]]

    # ---- registers ----

    def full(self, x):
        """Return a value of each thread."""
        if np.shape(x) == (self.count,):
            return np.ascontiguousarray(x)
        return np.full(self.count, x)

    def register(self, name):
        """Return what a register holds; what nobody has written is no number."""
        if name not in self.registers:
            dtype = np.dtype(self.kernel.registers[name])
            fill = 0 if dtype.kind == "b" else 0xFF
            self.registers[name] = np.full(self.count * dtype.itemsize, fill, np.uint8).view(dtype)
        return self.registers[name]

    def source(self, operand, dtype):
        """Return a function that reads an operand as a type: an array, or a number that all threads share."""
        kernel, dtype = self.kernel, np.dtype(dtype)
        if operand in kernel.registers:
            held = np.dtype(kernel.registers[operand])
            if (held.kind == "b") != (dtype.kind == "b") or held.itemsize < dtype.itemsize:
                raise Fault(f"{operand} is no {dtype}")
            if held == dtype:
                return lambda: self.register(operand)
            if held.itemsize == dtype.itemsize:
                return lambda: self.register(operand).view(dtype)
            return lambda: self.register(operand).view(bits_of(held)).astype(bits_of(dtype)).view(dtype)
        if operand in self.special:
            return lambda: self.special[operand].astype(dtype)
        value = self._constant(operand, dtype)
        return lambda: value

    def _constant(self, text, dtype):
        kernel = self.kernel
        if text in kernel.parameters:
            return dtype.type(self.PARAMETERS + ([*kernel.parameters].index(text) << self.PARAMETER_SHIFT))
        if text in kernel.constants:
            return dtype.type(kernel.constants[text].ctypes.data)
        for places in (kernel.shared, kernel.local):
            if text in places:
                return dtype.type(places[text])
        try:
            is_float = text[:2] in ("0f", "0d")
            bits = int(text[2:], 16) if is_float else int(text.rstrip("U"), 0)
        except (TypeError, ValueError):
            raise Fault(f"no operand {text}") from None
        if dtype.kind == "b":
            return np.bool_(bits)
        return np.array(bits % (1 << 8 * dtype.itemsize), bits_of(dtype)).view(dtype)[()]

    def target(self, operand):
        """Return a function that writes a value into a register, for the threads of a mask; narrow ones are widened."""
        if operand == "_":
            return lambda value, mask: None
        if operand not in self.kernel.registers:
            raise Fault(f"no register {operand}")
        held = np.dtype(self.kernel.registers[operand])

        def write(value, mask):
            if value.dtype != held:
                if (held.kind == "b") != (value.dtype.kind == "b") or value.dtype.itemsize > held.itemsize:
                    raise Fault(f"{operand} is no {value.dtype}")
                if value.dtype.itemsize < held.itemsize:
                    value = value.astype(f"<{'i' if value.dtype.kind == 'i' else 'u'}{held.itemsize}")
                value = value.view(held)
            if mask is None:
                self.registers[operand] = value if value.shape else np.full(self.count, value)
            else:
                self.registers[operand] = np.where(mask, value, self.register(operand))

        return write

    # ---- memory ----

    def address(self, operand):
        """Return a function that returns each thread's address."""
        base, offset = operand if isinstance(operand, Address) else (operand, 0)
        held = np.dtype(self.kernel.registers.get(base, np.uint64))
        read = self.source(base, bits_of(held))
        return lambda: self.full(read()).astype(np.int64, copy=False) + offset

    def place(self, space, at, size, threads):
        """Return a view of all memory of a kind in numbers of a size, and where addresses of threads lie in it."""
        if space == "generic":
            space = self._space_of(at)
        if at.size and (at & size - 1).any():
            raise Fault(f"a misaligned {space} address")
        shift = size.bit_length() - 1
        if space == "global":
            self.check(at, size)
            return MEMORY[size], at - LOWEST >> shift
        at = np.where(at >= self.WINDOWS[space], at - self.WINDOWS[space], at)
        owner, at = self._of_blocks(at, threads) if space == "shared" else (threads, at)
        if at.size and (at.min() < 0 or at.max() + size > self.limits[space]):
            raise Fault(f"{space} addresses {at.min()} to {at.max()} of {self.limits[space]} bytes")
        return self.memory[space].view(f"<u{size}"), owner * self.sizes[space] + at >> shift

    def _of_blocks(self, at, threads):
        """Return the blocks in whose shared memory addresses are, and where in it."""
        rank, at = at >> self.RANK_SHIFT, at & (1 << self.RANK_SHIFT) - 1
        if (rank > self.kernel.cluster).any():
            raise Fault(f"block {rank.max() - 1} of a cluster of {self.kernel.cluster}")
        own = self.block_of[threads]
        return np.where(rank > 0, own // self.kernel.cluster * self.kernel.cluster + rank - 1, own), at

    def _space_of(self, at):
        found = np.unique(np.searchsorted([*self.WINDOWS.values()], at, side="right"))
        if len(found) > 1:
            raise Fault("addresses of several kinds of memory")
        return ["global", *self.WINDOWS][found[0]] if len(found) else "global"

    def check(self, at, size):
        """Check that so many bytes from each address on are the launch's."""
        if at.size == 0:
            return
        row = np.searchsorted(self.begins, at, side="right") - 1
        is_outside = (row < 0) | (at + size > (self.ends[row] if self.ends.size else 0))
        if is_outside.any():
            raise Fault(f"the global address {int(at[is_outside][0]):#x} is in no tensor of the launch")

    def load(self, space, at, dtype, mask):
        """Return what the threads of a mask find at their addresses."""
        if mask is None:
            view, where = self.place(space, at, np.dtype(dtype).itemsize, self.everyone)
            return view[where].view(dtype)
        threads = self.chosen(mask)
        view, where = self.place(space, at[threads], np.dtype(dtype).itemsize, threads)
        found = np.zeros(self.count, dtype)
        found[threads] = view[where].view(dtype)
        return found

    def load_parameter(self, at, dtype, mask):
        """Return what the threads of a mask find at addresses in parameters of the kernel."""
        threads, frame = self.chosen(mask), [*self.frame.values()]
        which, offset = at - self.PARAMETERS >> self.PARAMETER_SHIFT, at & (1 << self.PARAMETER_SHIFT) - 1
        found = np.zeros(self.count, dtype)
        for own in np.unique(which[threads]):
            here = threads[which[threads] == own]
            if not 0 <= own < len(frame) or (offset[here] + dtype.itemsize > frame[own].size).any():
                raise Fault("an address behind the parameters")
            found[here] = frame[own][offset[here, None] + np.arange(dtype.itemsize)].view(dtype)[:, 0]
        return found

    def store(self, space, at, values, mask):
        """Write values of the threads of a mask."""
        threads = self.chosen(mask)
        view, where = self.place(space, at[threads], values.dtype.itemsize, threads)
        view[where] = self.full(values)[threads].view(bits_of(values.dtype))

    # ---- barriers in memory ----

    def barrier_keys(self, at, threads):
        """Return block and place of the barriers at addresses of threads."""
        at = np.where(at >= self.WINDOWS["shared"], at - self.WINDOWS["shared"], at)
        block, at = self._of_blocks(at, threads)
        return list(zip(block.tolist(), at.tolist(), strict=True))

    def begin_barrier(self, key, count):
        """Make a barrier that turns after so many arrivals."""
        self.barriers[key] = Barrier(count)

    def barrier(self, key):
        """Return the barrier of a block at a place."""
        if key not in self.barriers:
            raise Fault(f"no barrier at {key[1]}")
        return self.barriers[key]

    def arrive(self, key, arrivals=0, more_bytes=0):
        """Count arrivals and bytes, by which a barrier may turn."""
        barrier = self.barrier(key)
        barrier.bytes += more_bytes
        barrier.pending -= arrivals
        if barrier.pending < 0:
            raise Fault("more arrivals than a barrier counts")
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase ^= 1
            barrier.pending = barrier.count
            self.has_turned = True
