"""Sums over the rows of several buffers, on the PTX machine: any widths, rows and types, and more buffers than five."""

import struct
from functools import cache

import ptx_machine
import pytest
import torch

from rwkv_jit.call.plan import DTYPES
from rwkv_jit.kernels import compiler, template
from rwkv_jit.schedules import common
from rwkv_jit.schedules.schedule import Result, Schedule

LIMITS = {"fp16": 1e-3, "bf16": 8e-3, "fp32": 1e-6}  # of an error, as a share of the largest sum


@cache
def machine(name, parameters):
    text = compiler.ptx(template.library(name).render(dict(parameters)), "sm_90", dict(parameters))
    return ptx_machine.Machine(text, name)


def launch(step, arrays):
    """Run a step that may touch the arrays alone that it is bound to."""
    arguments, memory = [], []
    for argument in step.arguments():
        value = step.bind[argument.name]
        if not argument.type.endswith("*"):
            arguments.append(struct.pack("<q" if argument.type == "i64" else "<i", value))
            continue
        x = arrays.get(value)
        arguments.append(struct.pack("<Q", 0 if x is None else x.data_ptr()))
        memory += [] if x is None else [(x.data_ptr(), x.data_ptr() + x.nbytes)]
    block = (step.parameters["NUM_THREADS"], 1, 1)
    machine(step.template, tuple(step.parameters.items())).launch(step.grid, block, 0, arguments, memory)


# The width, the rows and the type of each.
@pytest.mark.parametrize(
    "several",
    [
        [(1, 1, "fp32")],
        [(33, 9, "bf16"), (64, 8, "fp32"), (31, 40, "fp16"), (5, 2, "bf16"), (96, 1, "fp32")],
        [(32, 7, "fp16"), (32, 300, "fp32"), (1, 65, "bf16")],
        [(40, 7, "fp16")] * 7,
    ],
    ids=len,
)
def test_sums_of_several_buffers(several):
    named = {f"d{place}": each for place, each in enumerate(several)}
    rows = {f"{name}_rows": torch.randn(count, width) for name, (width, count, _) in named.items()}
    sums = {name: torch.full((width,), torch.nan, dtype=DTYPES[own]) for name, (width, _, own) in named.items()}
    schedule = Schedule(
        (), {name: Result((width,), own) for name, (width, _, own) in named.items()},
        scratch={name: x.nbytes for name, x in rows.items()},
    )  # fmt: skip
    for step in common.with_sums(schedule, named).launches:
        launch(step, {**rows, **sums})
    for name, (_, _, own) in named.items():
        wanted = rows[f"{name}_rows"].double().sum(0)
        assert (sums[name].double() - wanted).abs().max() <= LIMITS[own] * wanted.abs().max()
