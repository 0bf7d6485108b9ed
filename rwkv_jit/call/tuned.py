"""Tuned geometries of the chunked kernels: measured on a GPU, and taken there instead of the rule's.

A choice is the geometry for an op, a head size in steps of 32, and a forward for gradients with its backward, or a
forward alone. A user's, in one file beside the cached kernels, go before those of SHIPPED. Illegal ones, and those
measured with other kernels, do not count.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rwkv_jit.call import tensors
from rwkv_jit.kernels import cache, compiler, env, stats, template
from rwkv_jit.kernels.cache import files
from rwkv_jit.kernels.errors import CacheError, reason
from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules.common import Candidate, padded
from rwkv_jit.schedules.directions import ALGORITHMS
from rwkv_jit.schedules.problem import Problem
from rwkv_jit.schedules.table import OPS

CHUNKS = {
    name: ALGORITHMS[op.family]["chunked"] for name, op in OPS.items() if op.family in ("delta", "diagonal")
}  # whose geometries they are, by op
FILE = "tuned.json"
Key = tuple[str, str, str, int, bool]  # the first fields of a choice


class Geometry(NamedTuple):
    """How blocks are cut, where something else than an algorithm's rule says so."""

    chunk_len: int = 0  # 0 lets the rule choose
    num_threads: int | None = None  # of the forward, in the chunked kernels
    forward_blocks: int | None = None  # that a multiprocessor shall have room for
    backward_blocks: int | None = None


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
_TEMPLATES = "2c0720fe2ca8d511"
_H200 = ("NVIDIA H200", "sm_90", "wkv7")
SHIPPED: tuple[Choice, ...] = (
    Choice(*_H200, 96, True, 32, 192, 2, 1, _TEMPLATES),  # 4.22 ms at (8, 4096, 42, 96), not 4.44
    Choice(*_H200, 96, False, 32, 192, 2, None, _TEMPLATES),  # 1.03, not 1.23
)


def key(gpu: str, arch: str, op: str, head_size: int, training: bool) -> Key:
    """Return what a choice for calls of a head size is known by."""
    return gpu, arch, op, padded(head_size), training


def gpu(device: int) -> tuple[str, str]:
    """Return name and architecture of a device, e.g. "NVIDIA H200" and "sm_90"."""
    return torch.cuda.get_device_name(device), tensors.arch(device)


# ---- what is in force --------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """A choice, where it comes from, and why it is not used."""

    choice: Choice
    origin: str  # "tuned" or "shipped"
    fault: str  # empty where it is used


def on_device(device: int) -> tuple[Choice, ...]:
    """Return the choices for a device. They are read once: what is tuned later is for later processes."""
    return _own(_root(), *gpu(device))


def is_sound(device: int, place: int) -> bool:
    """Return whether one of these can be used: only then are its kernels read."""
    choice = on_device(device)[place]
    fault = _fault(choice)
    if fault:
        stats.say_once(f"a tuned geometry is {fault} and not used; `rwkv-jit tune` measures anew")
    return not fault


# As `tensors.arch`: a trace takes the answer, and does not go into how it is found.
on_device._dynamo_marked_constant = is_sound._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_arch(arch: str) -> list[tuple[Choice, ...]]:
    """Return the sound choices for GPUs of an architecture, for each that has some."""
    target = arch.rstrip("a")  # machine code for sm_90a runs where sm_90 is measured
    sound = [row.choice for row in listed() if not row.fault and row.choice.arch == target]
    return [tuple(x for x in sound if x.gpu == name) for name in dict.fromkeys(x.gpu for x in sound)]


def find(choices: Sequence[Choice], op: str, head_size: int, value_size: int, training: bool) -> list[int]:
    """Return the places of those for a call. It compares, as sizes have no hash while a compiler traces."""
    keys, values, places = padded(head_size), padded(value_size), []
    for place, choice in enumerate(choices):
        sizes_agree = choice.head_size == keys and choice.head_size == values
        if choice.op == op and choice.training == training and sizes_agree:
            places.append(place)
    return places


def listed() -> list[Listed]:
    """Return the choices for all GPUs, one for each key: a sound one before others, the user's before the shipped."""
    rows: dict[Key, Listed] = {}
    for origin, choices in _sources(_root()):
        for choice in choices:
            fault = _fault(choice)
            if not fault or choice.key not in rows:
                rows[choice.key] = Listed(choice, origin, fault)
    return list(rows.values())


def shipped(wanted: Key) -> Choice | None:
    """Return the shipped choice for a key, if there is one that can be used."""
    return next((choice for choice in SHIPPED if choice.key == wanted and not _fault(choice)), None)


def _root() -> Path | None:
    return env.cache_dir() if env.cache_is_on() else None


def _sources(root: Path | None) -> list[tuple[str, tuple[Choice, ...]]]:
    return [("shipped", SHIPPED), ("tuned", _read(root) if root else ())]


@functools.cache
def _own(root: Path | None, name: str, arch: str) -> tuple[Choice, ...]:
    """Return the choices for one kind of GPU, the user's first."""
    (_, shipped_ones), (_, users) = _sources(root)
    return tuple(choice for choice in (*users, *shipped_ones) if choice.key[:2] == (name, arch))


@functools.cache
def _fault(choice: Choice) -> str:
    """Return why a choice cannot be used, or an empty string."""
    size, chunked = choice.head_size, CHUNKS.get(choice.op)
    if chunked is None or size < 1 or size != padded(size):
        return "not legal"
    gpu, op = Gpu(choice.arch), OPS[choice.op]
    if chunked.why_not(Problem(op, gpu, op.types_of("bf16"), K=size, V=size, training=True)) is not None:
        return "not legal"
    forward = Candidate("forward", choice.chunk_len, choice.num_threads, choice.forward_blocks)
    backwards: set[int | None] = {None}
    if choice.training:
        legal = chunked.candidates("backward", size, gpu)
        backwards = {candidate.blocks for candidate in legal if candidate.chunk_len == choice.chunk_len}
    if forward not in chunked.candidates("forward", size, gpu) or choice.backward_blocks not in backwards:
        return "not legal"
    return "" if choice.templates == templates_of(choice.op) else "measured with other kernels"


@functools.cache
def templates_of(op: str) -> str:
    """Return the digest of the chunked kernels of an op, without comments: what a choice was measured with."""
    texts = [template.library(name) for name in CHUNKS[op].TEMPLATES]
    code = [(template.code(text.body), [(name, template.code(x)) for name, x in text.headers]) for text in texts]
    return sha256(repr(code).encode()).hexdigest()[:16]


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
    """Write a measured choice for a key, or None for none, into the user's file; raises CacheError where that fails."""
    root = env.cache_dir()
    try:
        files.make_directory(root)
        # Two tuners that read and write at once would lose what one of them has measured.
        with cache.one_at_a_time(sha256(FILE.encode()).hexdigest(), FILE):
            others = [choice for choice in _read(root) if choice.key not in measured]
            choices = [*others, *(choice for choice in measured.values() if choice is not None)]
            files.write(root / FILE, json.dumps([choice._asdict() for choice in choices], indent=1).encode())
    except OSError as error:
        raise CacheError(f"{root / FILE} cannot be written: {reason(error)}") from error


def delete() -> bool:
    """Delete the user's file; return whether there was one. Raises CacheError where it cannot be deleted."""
    try:
        files.delete(env.cache_dir(), FILE)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CacheError(f"{path()} cannot be deleted: {reason(error)}") from error
    return True
