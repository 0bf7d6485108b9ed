"""Kernels compile for every architecture: a sample in which any two choices meet, and the whole matrix."""

import itertools
import random
import struct

import pytest
import torch

import rwkv_jit
from rwkv_jit import cache
from rwkv_jit.cache.entry import unpack

AXES = {
    "op": ("wkv6", "wkv7"),
    "direction": ("forward", "backward"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "head_size": (1, 7, 24, 40, 64, 96, 100, 128, 256),
    "arch": ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"),
    "decay": ("raw", "sigmoid", "log", "direct"),
    "state_layout": ("vk", "kv"),
    "w_dtype": ("like the rest", "fp32"),
    "value_size": ("like K", 33, 160),
}
# The two longest axes decide different things; their pairs alone would double the sample.
UNPAIRED = {"head_size", "arch"}


def sample():
    """Rows in which any two values of different axes meet, but for UNPAIRED; the same rows every time."""
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(AXES, 2)
        if {a, b} != UNPAIRED
        for x in AXES[a]
        for y in AXES[b]
    }
    rng, rows = random.Random(0), []
    while pairs:
        must = dict(min(pairs, key=str))
        candidates = [{axis: must.get(axis, rng.choice(x)) for axis, x in AXES.items()} for _ in range(60)]
        best = max(candidates, key=lambda row: len(pairs.intersection(itertools.combinations(row.items(), 2))))
        pairs -= set(itertools.combinations(best.items(), 2))
        rows.append(best)
    return rows


def name(row):
    return "-".join(str(value).removeprefix("torch.").replace(" ", "_") for value in row.values())


def whole_product():
    """Op x direction x dtype x head size x architecture; the other choices take turns."""
    first = list(AXES)[:5]
    rng = random.Random(0)
    return [
        {axis: values[first.index(axis)] if axis in first else rng.choice(x) for axis, x in AXES.items()}
        for values in itertools.product(*(AXES[axis] for axis in first))
    ]


def compile_row(row):
    more = {} if row["w_dtype"] == "like the rest" else {"t_w": "fp32"}
    return rwkv_jit.specialize(
        row["op"], row["head_size"], None if row["value_size"] == "like K" else row["value_size"], row["dtype"],
        row["arch"], row["direction"], decay=row["decay"], state_layout=row["state_layout"], **more,
    )  # fmt: skip


def elf_extent(image):
    """Bytes that an ELF file needs by its own headers: of the header tables and of all they point to."""
    program_table, section_table = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", image, 54)
    ends = [program_table + program_size * programs, section_table + section_size * sections]
    for index in range(sections):
        kind, offset, size = struct.unpack_from("<4xI16xQQ", image, section_table + index * section_size)
        ends.append(offset + size if kind != 8 else 0)  # SHT_NOBITS takes no bytes
    for index in range(programs):
        offset, size = struct.unpack_from("<8xQ16xQ", image, program_table + index * program_size)
        ends.append(offset + size)
    return max(ends)


def check(kernel, row):
    image = kernel.cubin
    kind, machine = struct.unpack_from("<HH", image, 16)
    assert image[:6] == b"\x7fELF\x02\x01"
    assert (kind, machine) == (2, 190)  # an executable for EM_CUDA
    assert elf_extent(image) == len(image)
    (path,) = cache.entries()
    assert unpack(path.read_bytes())[0].image == image
    (flags,) = struct.unpack_from("<I", image, 48)
    number = int("".join(filter(str.isdigit, row["arch"])))
    assert number in (flags & 0xFF, flags >> 8 & 0xFF)
    entry = f"{row['op']}_{row['direction']}"
    assert f".text.{entry}\0".encode() in image
    assert entry in kernel.resources
    assert 0 < kernel.registers <= 255
    assert 0 < kernel.shared_bytes <= 48 * 1024
    assert kernel.spill_bytes >= 0
    assert kernel.origin == "compiled"
    assert (kernel.arch, kernel.target) == (row["arch"], row["arch"])
    assert f"constexpr int HEAD_SIZE = {row['head_size']};" in kernel.source


@pytest.mark.parametrize("row", sample(), ids=name)
def test_sample_of_all_choices(row):
    check(compile_row(row), row)


@pytest.mark.full
@pytest.mark.parametrize("row", whole_product(), ids=name)
def test_every_combination(row):
    check(compile_row(row), row)


def test_sample_is_the_same_every_time_and_holds_every_value():
    rows = sample()
    assert rows == sample()
    assert 40 <= len(rows) <= 60
    for axis, values in AXES.items():
        assert {row[axis] for row in rows} == set(values)
