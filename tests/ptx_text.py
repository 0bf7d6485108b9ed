"""Reads the PTX of a kernel: its parameters, its memory, its registers, and its instructions in their order."""

import re
from typing import NamedTuple

import numpy as np

# What registers and memory hold, by the names of PTX; of packed and narrow floating-point numbers the bits.
TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.uint16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f64": np.float64,
}  # fmt: skip

_ARRAY = r"\.align (\d+) \.(\w+) ([\w$]+)\[(\d*)\]"
_SHARED = re.compile(rf"(\.extern )?\.shared {_ARRAY};")
_CONSTANT = re.compile(rf"\.(?:global|const) {_ARRAY} = \{{([^}}]*)\}};")
_LOCAL = re.compile(rf"\.local {_ARRAY};")
_POINTER = r"\.ptr (?:\.(?!align)\w+ )*(?:\.align \d+ )?"
_PARAMETER = re.compile(rf"\.param (?:\.align \d+ )?\.(\w+) (?:{_POINTER})?([\w$]+)(?:\[(\d+)\])?")
_REGISTER = re.compile(r"([\w%$]+)(?:<(\d+)>)?")
_ADDRESS = re.compile(r"\[ ?([^\]+ ]+?) ?(?:\+ ?(-?\w+))? ?\]")
# A label, the begin of a scope, its end, or what ends in a semicolon; vectors have braces too.
_STATEMENT = re.compile(r" ?(?:([\w$]+):(?!:)|(\{)(?= ?(?:\.|[\w$]+:))|(\})|((?:[^;{}]|\{[^{};]*\})+);)")


class Fault(Exception):
    """What is wrong with a kernel's text, or with what its threads do."""


class Address(NamedTuple):
    """An operand in brackets: a register or a name, and bytes behind it."""

    base: str
    offset: int


class Instruction(NamedTuple):
    """An instruction; registers have the names of `Kernel.registers`, operands in braces are tuples."""

    place: int  # among those of the kernel
    text: str
    predicate: str | None
    is_negated: bool
    parts: tuple[str, ...]  # mma, sync, aligned and so on
    operands: tuple

    def has(self, part):
        """Return whether the name has this part."""
        return part in self.parts

    def kind(self):
        """Return its type, which stands last."""
        return self.parts[-1]


class Kernel(NamedTuple):
    """A kernel as its text says it."""

    parameters: dict  # their bytes
    results: list  # those that a function returns
    shared: dict  # the place of each array in shared memory
    shared_bytes: int  # without those of the launch
    local: dict
    local_bytes: int
    constants: dict  # arrays
    registers: dict  # dtypes
    instructions: list
    targets: dict  # places among the instructions
    cluster: int  # blocks side by side that share their shared memory


def read(text, name):
    """Return the kernel of this name, or a function that it calls."""
    text = " ".join(re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", " ", text).split())
    begin = re.search(rf"(?:\.entry|\.func)(?: ?\(([^)]*)\))? {re.escape(name)} ?\(([^)]*)\)(?= ?[.{{])", text)
    if begin is None:
        raise Fault(f"no kernel {name}")
    results, head, body = begin[1], begin[2], text[begin.end() :]
    cluster = re.search(r"\.reqnctapercluster (\d+)(?:, 1)*", body[: body.index("{")])
    body = body[body.index("{") + 1 : _end(body)]
    shared, shared_bytes = _places(match.groups()[1:] for match in _SHARED.finditer(text))
    local, local_bytes = _places(match.groups() for match in _LOCAL.finditer(body))
    constants = {
        name: np.array([int(x, 0) for x in values.split(",")], TYPES[kind])
        for _, kind, name, _, values in _CONSTANT.findall(text)
    }
    given, made = _parameters(head), [*_parameters(results or "")]
    inside = _Body().read(body)
    blocks = int(cluster[1]) if cluster else 1
    return Kernel(given, made, shared, shared_bytes, local, local_bytes, constants, *inside, blocks)


def _end(body):
    """Where the brace that comes first is closed."""
    depth = 0
    for place in re.finditer(r"[{}]", body):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return place.start()
    raise Fault("a kernel without an end")


def _places(arrays):
    """Where arrays lie one behind another, those of no size last, and how many bytes the others have."""
    places, used = {}, 0
    for align, kind, name, size in sorted(arrays, key=lambda array: not array[3]):
        align = max(int(align), 1 if size else 1024)  # as kernels that ask for it find it
        used = -(-used // align) * align
        places[name] = used
        used += int(size or 0) * np.dtype(TYPES[kind]).itemsize
    return places, used


def _parameters(head):
    return {name: int(size or 1) * np.dtype(TYPES[kind]).itemsize for kind, name, size in _PARAMETER.findall(head)}


class _Body:
    """Reads statements; names of an inner scope have its number in front."""

    def __init__(self):
        self.registers, self.targets, self.waiting = {}, {}, []
        self.scopes, self.count = [""], 0

    def read(self, body):
        place, end = 0, len(body.rstrip())
        while place < end:
            match = _STATEMENT.match(body, place)
            if match is None:
                raise Fault(f"cannot read {body[place : place + 80]!r}")
            place = match.end()
            label, opens, closes, text = match.groups()
            if label:
                self.targets[self.scopes[-1] + label] = len(self.waiting)
            elif opens:
                self.count += 1
                self.scopes.append(f"{self.count}~")
            elif closes:
                self.scopes.pop()
            elif text.strip().startswith(".reg"):
                self._declare(text.strip())
            elif not text.strip().startswith("."):
                self.waiting.append((text.strip(), tuple(self.scopes)))
        # Labels may stand behind what goes to them.
        instructions = [self._instruction(place, *statement) for place, statement in enumerate(self.waiting)]
        return self.registers, instructions, self.targets

    def _declare(self, text):
        _, kind, names = text.split(" ", 2)
        for name, many in _REGISTER.findall(names):
            several = [f"{name}{i}" for i in range(int(many))] if many else [name]
            self.registers |= dict.fromkeys((self.scopes[-1] + x for x in several), TYPES[kind[1:]])

    def _instruction(self, place, text, scopes):
        match = re.fullmatch(r"(?:@(!?)([\w%$]+) )?([\w.:]+) ?(.*)", text)
        if match is None:
            raise Fault(f"cannot read {text!r}")
        negated, predicate, name, rest = match.groups()
        operands = tuple(self._operand(x, scopes) for x in _split(rest))
        predicate = predicate and self._name(predicate, scopes)
        return Instruction(place, text, predicate, bool(negated), tuple(name.split(".")), operands)

    def _operand(self, text, scopes):
        if text[0] in "{(":
            return tuple(self._operand(x, scopes) for x in _split(text[1:-1]))
        if text.startswith("["):
            base, offset = _ADDRESS.fullmatch(text).groups()
            return Address(self._name(base, scopes), int(offset or "0", 0))
        if "|" in text:
            return tuple(self._name(x, scopes) for x in text.split("|"))
        return self._name(text, scopes)

    def _name(self, name, scopes):
        """Return the name of what the innermost scope means by it; what has no scope as it is."""
        for scope in reversed(scopes):
            if scope + name in self.registers or scope + name in self.targets:
                return scope + name
        return name


def _split(text):
    """Return the operands of a text: commas within braces, brackets and parentheses part none."""
    operands = re.findall(r"(?:[^,{}\[\]()]|\{[^}]*\}|\[[^\]]*\]|\([^)]*\))+", text)
    return [x.strip() for x in operands if x.strip()]
