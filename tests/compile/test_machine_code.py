"""Machine code of kernels, where the assembler of CUDA is known to be wrong."""

import itertools
import re
import subprocess

import pytest

from rwkv_jit.kernels import kernel, sass, template

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+) )?(\S+) ?(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
SECOND = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/")
CYCLES = 10  # the least that all other kernels have between zeros of CS2R and their first reader
BOTH = itertools.product
TOOLS = [tool for tool in sass._tools() if "nvdisasm" in tool]


def instructions(cubin, path):
    """Condition, name, operands, and the cycles that the next instruction waits, of each; None where others enter."""
    path.write_bytes(cubin)
    text = subprocess.run([TOOLS[0], "-hex", path], capture_output=True, text=True, check=True).stdout
    found, held = None, []
    for line in text.split("\n"):
        if match := LINE.search(line):
            found = match
        elif found and (second := SECOND.match(line)):
            held.append((*found.groups(), int(second[1], 16) >> 41 & 15))
            found = None
        elif line.startswith(".L_"):
            held.append(None)
    return held


def registers(operand):
    return {int(x) + i for x, wide in re.findall(r"\bR(\d+)(\.64)?", operand) for i in range(1 + bool(wide))}


def soonest_reads(code):
    """After how many cycles zeros are read that a condition may have written over, for each of these."""
    for place, zero in enumerate(code):
        if zero is None or zero[0] or zero[1] != "CS2R" or not zero[2].endswith("SRZ"):
            continue
        first, cycles, is_conditional = min(registers(zero[2])), zero[3], False
        pair = {first, first + 1}
        for each in code[place + 1 :]:
            if each is None or each[1].startswith(("BRA", "EXIT", "CALL", "RET")):
                break
            condition, name, operands, stall = each
            target, *sources = operands.split(", ")
            if name.startswith(("ST", "RED", "ATOM")):
                sources = [target, *sources]
            elif registers(target) & pair and not any(registers(x) & pair for x in sources):
                if not condition:
                    break
                is_conditional = True
            if any(registers(x) & pair for x in sources):
                if is_conditional:
                    yield cycles
                break
            cycles += stall


# What each kernel of updates is told beside what both are.
OF_UPDATES = {
    "update_states": {
        "DELTA": False, "BONUS": False, "DECAY": "log", "T_W": "fp16", "T_U": "fp32", "T_W0": "fp32", "PACKED": False,
    },
    "update_rules": {
        "PACKED": False,
        "DELTA": True, "GATE": 2, "G_PER_CHANNEL": True, "BETA_MAP": 1, "BETA_PER_CHANNEL": False, "HAS_NORM": True,
        "SOURCE": 0, "HAS_SOFTPLUS": False, "HAS_LIMITS": False, "HAS_SKIP": False, "SKIP_PER_CHANNEL": False,
        "HAS_GATE": False, "HAS_DT_BIAS": True, "HAS_WRITE_GATE": False, "T_G": "fp16", "T_BETA": "fp16",
        "T_A_LOG": "fp32", "T_DT_BIAS": "fp32", "T_D": "fp32",
    },
}  # fmt: skip


@pytest.mark.skipif(not TOOLS, reason="there is no disassembler")
@pytest.mark.parametrize("name", OF_UPDATES)
@pytest.mark.parametrize(
    ("head_size", "index_bytes", "has_one_token", "has_state"),
    [*BOTH((33, 64), (4, 8), (True, False), (True,)), *BOTH((33, 64), (4,), (True, False), (False,))],
)
def test_zeros_are_not_read_before_they_are_there(name, head_size, index_bytes, has_one_token, has_state, tmp_path):
    """A pointer that is null or moved, and is compared with null behind that, was compared before it was there."""
    parameters = {
        "HEAD_SIZE": head_size, "VALUE_SIZE": 50, "T_IO": "fp16", "T_STATE": "fp32", "STATE_LAYOUT": "kv",
        "STOCHASTIC": False, "INDEX_BYTES": index_bytes, "ONE_TOKEN": has_one_token, "VECTOR": 2, "KEY_LANES": 4,
        "KEY_WARPS": 8, "ROWS": 2, "NUM_THREADS": 256, "BLOCKS_PER_SM": 3 if has_one_token else 2,
        "HAS_STATE": has_state, **OF_UPDATES[name],
    }  # fmt: skip
    made = kernel.get(kernel.Request(template.library(name), parameters, "sm_90"))
    code = instructions(made._image, tmp_path / "kernel.cubin")
    assert len(code) > 200
    assert all(cycles >= CYCLES for cycles in soonest_reads(code))
