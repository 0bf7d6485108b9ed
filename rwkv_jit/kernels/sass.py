"""Machine code as text, by NVIDIA's disassembler where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rwkv_jit.kernels.errors import RwkvJitError

_ARGUMENTS = {"nvdisasm": "-c", "cuobjdump": "-sass"}
_WHEELS = ("nvidia/*/bin", "triton/backends/nvidia/bin")  # where the wheels that have one put it
_OLDEST_OF_CUDA_13 = 75


def disassemble(cubin: bytes, arch: str) -> str:
    """Return the SASS of a cubin; RwkvJitError with the command that installs a disassembler that knows its GPU."""
    complaint = "there is neither nvdisasm nor cuobjdump"
    with tempfile.TemporaryDirectory(prefix="rwkv_jit-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        for tool in _tools():
            command = [tool, _ARGUMENTS[Path(tool).stem], str(file)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                complaint = f"{tool} cannot be run ({error.strerror})"
                continue
            if done.returncode == 0:
                return done.stdout
            complaint = f"{tool} cannot read {arch} ({' '.join(done.stderr.split())})"
    raise RwkvJitError(f"{complaint}; install a disassembler of {arch}: {_install(arch)}")


def _tools() -> Iterator[str]:
    """Yield the disassemblers of PATH, of the toolkit and of installed wheels."""
    home = os.environ.get("CUDA_HOME")
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *([os.path.join(home, "bin")] if home else [])]
    folders += [str(found) for path in sys.path for where in _WHEELS for found in Path(path).glob(where)]
    for name in _ARGUMENTS:
        for folder in folders:
            if folder and (tool := shutil.which(name, path=folder)):
                yield tool


def _install(arch: str) -> str:
    number = int(re.sub(r"\D", "", arch))
    # The wheels of CUDA 12's nvcc have no disassembler, and that of CUDA 13 knows nothing older than Turing.
    return "pip install nvidia-cuda-nvdisasm" if number >= _OLDEST_OF_CUDA_13 else "pip install triton==3.6.0"
