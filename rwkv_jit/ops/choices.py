"""Choices: geometries of the chunked kernels that were measured on a GPU and are taken there instead of the rule's.

A choice is one for an op, a head size in steps of 32, and a forward for gradients with its backward, or a forward
alone. Those of a user lie in one file beside the cached kernels, and go before those of SHIPPED. What is not legal, or
was measured with other kernels than these, is not used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rwkv_jit import cache, compiler, env, stats, template, tensors
from rwkv_jit.cache import files
from rwkv_jit.errors import CacheError
from rwkv_jit.ops import chunked, gated
from rwkv_jit.ops.interface import Candidate, Chunks, Geometry

CHUNKS: dict[str, Chunks] = {"wkv7": chunked, **dict.fromkeys(gated.OPS, gated)}  # whose geometries they are, by op
FILE = "tuned.json"
Key = tuple[str, str, str, int, bool]  # the first fields of a choice


class Choice(NamedTuple):
    """A geometry, and what it is for."""

    gpu: str
    arch: str
    op: str
    head_size: int  # of keys and values, rounded up to a multiple of 32
    training: bool  # a forward for gradients and its backward; else a forward alone
    chunk_len: int
    num_threads: int
    forward_blocks: int
    backward_blocks: int | None  # None for a forward alone
    templates: str  # digest of those it was measured with

    @property
    def key(self) -> Key:
        """What a choice is for."""
        return self[:5]

    @property
    def geometry(self) -> Geometry:
        """What is chosen."""
        return Geometry(self.chunk_len, self.num_threads, self.forward_blocks, self.backward_blocks)


_TYPES = ((str,), (str,), (str,), (int,), (bool,), (int,), (int,), (int,), (int, type(None)), (str,))

# Where `rwkv-jit tune` found something faster than the rules, which are for head sizes 64 and 128.
_TEMPLATES = "67c34240a1c2f4f3"
_H200 = ("NVIDIA H200", "sm_90", "wkv7")
SHIPPED: tuple[Choice, ...] = (
    # With gradients at 32, four blocks win at 128 heads of batch 8, 2.75 ms and not 3.04; fewer were not measured.
    Choice(*_H200, 32, False, 32, 128, 4, None, _TEMPLATES),  # 0.76 ms at (8, 4096, 128, 32), not 0.93
    Choice(*_H200, 96, True, 32, 192, 2, 1, _TEMPLATES),  # 4.16 at (8, 4096, 42, 96), not 4.36
    Choice(*_H200, 96, False, 32, 192, 2, None, _TEMPLATES),  # 1.03, not 1.25
)


def key(gpu: str, arch: str, op: str, head_size: int, training: bool) -> Key:
    """Return what a choice for calls of a head size is known by."""
    return gpu, arch, op, chunked.padded(head_size), training


def gpu(device: int) -> tuple[str, str]:
    """Return name and architecture of a device, e.g. "NVIDIA H200" and "sm_90"."""
    return torch.cuda.get_device_name(device), tensors.arch(device)


# ---- what is in force --------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """A choice, where it comes from, and why it is not used."""

    choice: Choice
    origin: str  # "tuned" or "shipped"
    fault: str  # empty where it is used


def of(device: int) -> tuple[Choice, ...]:
    """Return the choices in force on a device. They are read once: what is tuned later is for later processes."""
    return _in_force(_root(), *gpu(device))


# As `tensors.arch`: a trace takes the answer, and does not go into how it is found.
of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def of_arch(arch: str) -> list[tuple[Choice, ...]]:
    """Return the choices in force on GPUs of an architecture, for each that has some."""
    target = arch.rstrip("a")  # machine code for sm_90a runs where sm_90 is measured
    found = [each.choice for each in listed() if not each.fault and each.choice.arch == target]
    return [tuple(each for each in found if each.gpu == name) for name in dict.fromkeys(each.gpu for each in found)]


def find(known: Sequence[Choice], op: str, head_size: int, value_size: int, training: bool) -> Choice | None:
    """Return the one for a call. It compares, as sizes have no hash while a compiler traces."""
    keys, values = chunked.padded(head_size), chunked.padded(value_size)
    for each in known:
        if each.op == op and each.training == training and each.head_size == keys and each.head_size == values:
            return each
    return None


def listed() -> list[Listed]:
    """Return the choices for all GPUs, one for each key: a sound one before others, the user's before the shipped."""
    return _listed(_root())


def shipped(wanted: Key) -> Choice | None:
    """Return the shipped choice for a key, if there is one that can be used."""
    return next((each for each in SHIPPED if each.key == wanted and not _fault(each)), None)


def _root() -> Path | None:
    return env.cache_dir() if env.cache_is_on() else None


@functools.cache
def _in_force(root: Path | None, name: str, arch: str) -> tuple[Choice, ...]:
    own = [each for each in _listed(root) if each.choice.key[:2] == (name, arch)]
    for each in own:
        if each.fault:
            stats.say_once(f"a {each.origin} choice is {each.fault} and not used; `rwkv-jit tune` measures anew")
    return tuple(each.choice for each in own if not each.fault)


def _listed(root: Path | None) -> list[Listed]:
    found: dict[Key, Listed] = {}
    for origin, several in (("shipped", SHIPPED), ("tuned", _read(root) if root else ())):
        for choice in several:
            fault = _fault(choice)
            if not fault or choice.key not in found:
                found[choice.key] = Listed(choice, origin, fault)
    return list(found.values())


def _fault(choice: Choice) -> str:
    """Return why a choice cannot be used, or an empty string."""
    size, arch, of = choice.head_size, choice.arch, CHUNKS.get(choice.op)
    if of is None or size < 1 or size != chunked.padded(size):
        return "not legal"
    if of.obstacle(choice.op, torch.bfloat16, size, size, lambda: arch) is not None:
        return "not legal"
    forward = Candidate("forward", choice.chunk_len, choice.num_threads, choice.forward_blocks)
    backwards: set[int | None] = {None}
    if choice.training:
        legal = of.candidates("backward", size, arch)
        backwards = {each.blocks for each in legal if each.chunk_len == choice.chunk_len}
    if forward not in of.candidates("forward", size, arch) or choice.backward_blocks not in backwards:
        return "not legal"
    return "" if choice.templates == templates_of(choice.op) else "measured with other kernels"


def templates_of(op: str) -> str:
    """Return the digest of the chunked kernels of an op: what a choice was measured with."""
    read = [template.library(name) for name in CHUNKS[op].templates(op)]
    return sha256(repr([(each.body, each.headers) for each in read]).encode()).hexdigest()[:16]


# ---- the user's file ---------------------------------------------------------------------------------------------


def path() -> Path:
    """Return the user's file."""
    return env.cache_dir() / FILE


def _read(root: Path) -> tuple[Choice, ...]:
    """Return what the user's file holds: nothing, with one notice, where it is not one to trust or to understand."""
    try:
        data = files.read(root, FILE)
        return () if data is None else tuple(map(_choice, json.loads(data)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        stats.say_once(f"tuned choices in {root / FILE} are not used: {error}", key=str(root / FILE))
        return ()


def _choice(record: Any) -> Choice:
    choice = Choice(**record)
    if any(type(value) not in types for value, types in zip(choice, _TYPES, strict=True)):
        raise ValueError(f"{record} is no choice")
    compiler.check_arch(choice.arch)
    return choice


def store(measured: Mapping[Key, Choice | None]) -> None:
    """Write what was measured into the user's file: a choice for a key, or None where there shall be none.

    Raises
    ------
    CacheError
        The file cannot be written.
    """
    root = env.cache_dir()
    try:
        files.make_directory(root)
        # Two tuners that read and write at once would lose what one of them has measured.
        with cache.one_at_a_time(sha256(FILE.encode()).hexdigest(), FILE):
            others = [each for each in _read(root) if each.key not in measured]
            found = [*others, *(each for each in measured.values() if each is not None)]
            files.write(root / FILE, json.dumps([each._asdict() for each in found], indent=1).encode())
    except OSError as error:
        raise CacheError(f"{root / FILE} cannot be written: {error.strerror or error}") from error


def delete() -> bool:
    """Delete the user's file; return whether there was one.

    Raises
    ------
    CacheError
        It cannot be deleted.
    """
    try:
        files.delete(env.cache_dir(), FILE)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CacheError(f"{path()} cannot be deleted: {error.strerror or error}") from error
    return True
