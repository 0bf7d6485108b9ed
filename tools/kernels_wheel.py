#!/usr/bin/env python
"""Build wheels of compiled kernels, one for each architecture: with one installed, first calls compile nothing.

    python tools/kernels_wheel.py                      all architectures, into dist/
    python tools/kernels_wheel.py --arch sm_90a,sm_80 -o wheels

No GPU is needed. A wheel holds one bundle and no code; equal sources and an equal NVRTC make equal wheels, byte for
byte. `CALLS` says which calls are covered.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # what is built is this checkout's

import torch  # noqa: E402

import rwkv_jit  # noqa: E402
from rwkv_jit.ahead import requests as ahead_requests  # noqa: E402
from rwkv_jit.ahead import warm  # noqa: E402
from rwkv_jit.desk import demo, terminal  # noqa: E402
from rwkv_jit.kernels import identity  # noqa: E402
from rwkv_jit.kernels.cache import bundle, installed  # noqa: E402
from rwkv_jit.kernels.kernel import Kernel, Request  # noqa: E402

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


class Calls(NamedTuple):
    """Calls of one op that a wheel has the kernels of: with and without gradients, of any length, batch and heads."""

    op: str
    sizes: tuple[tuple[int | None, int | None], ...] = ((None, None),)  # of keys and values
    dtypes: tuple[torch.dtype, ...] = (_BF16, _FP16, _FP32)
    decays: tuple[str | None, ...] = (None,)  # None is the op's own
    tokens: tuple[int | None, ...] = (None,)  # of timex alone
    w_dtypes: tuple[torch.dtype | None, ...] = (None,)  # of gates; None is that of r, k, v
    heads: tuple[int | None, int | None] = (None, None)  # of values and of keys
    inputs: tuple[str, ...] = ()  # optional ones
    switches: Mapping[str, Any] = {}


_HALF, _NORM = (_BF16, _FP16), {"qk_norm": True}
# States are float32. Head sizes are those of the models that there are.
CALLS = (
    Calls("wkv4"),
    Calls("wkv5", ((64, 64),)),
    Calls("wkv6", ((64, 64),)),
    Calls("wkv7", ((64, 64),), decays=("raw", "sigmoid")),
    Calls("gla", ((64, 64),)),
    Calls("gla", ((128, 128), (128, 256), (256, 512)), (_BF16, _FP16)),
    Calls("linear_attention", ((64, 64),)),
    Calls("linear_attention", ((128, 128),), (_BF16, _FP16)),
    Calls("timex", tokens=(256, 512, 768, 1024)),
    # As Kimi Linear, Qwen3-Next and Mamba-2 call them.
    Calls("kda", ((128, 128),), _HALF, w_dtypes=(None, _FP32), switches=_NORM),
    Calls("kda", ((128, 128),), _HALF, inputs=("A_log", "dt_bias"), switches=_NORM),
    Calls("gated_delta_rule", ((128, 128),), _HALF, w_dtypes=(None, _FP32), heads=(32, 16), switches=_NORM),
    Calls("ssd", ((128, 64),), _HALF, heads=(64, 1), inputs=("D", "dt_bias"), switches={"dt_softplus": True}),
)


def requests(arch: str, calls: Iterable[Calls] = CALLS) -> list[Request]:
    """Return the kernels that calls need on an architecture, as `rwkv_jit.warm` lists them."""
    return [
        request._replace(also=())
        for of in calls
        for head_size, value_size in of.sizes
        for dtype in of.dtypes
        for decay in of.decays
        for tokens in of.tokens
        for w_dtype in of.w_dtypes
        for direction in ahead_requests.DIRECTIONS
        for request in ahead_requests.call_requests(
            ahead_requests.Calls(
                of.op,
                head_size,
                dtype,
                arch,
                direction,
                decay,
                w_dtype=w_dtype,
                value_size=value_size,
                tokens=tokens,
                heads=of.heads[0],
                key_heads=of.heads[1],
                inputs=dict.fromkeys(of.inputs),
                switches=of.switches,
            )  # fmt: skip
        )
    ]


def build(arch: str, calls: Iterable[Calls] = CALLS) -> list[Kernel]:
    """Compile the kernels of calls on all cores. What was tuned or stored on this machine decides nothing."""
    with demo.empty_cache(), terminal.progress(f"compiling for {arch}") as progress:
        return warm.compile_all(requests(arch, calls), progress)


def write(arch: str, kernels: Iterable[Kernel], folder: Path) -> Path:
    """Write the wheel of an architecture and return its path."""
    name, version = f"rwkv-jit-kernels-{arch.replace('_', '-')}", rwkv_jit.__version__
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    about = {
        "Metadata-Version": "2.1",
        "Name": name,
        "Version": version,
        "Summary": f"Kernels of rwkv_jit {version}, compiled for NVIDIA GPUs of {arch}: first calls compile nothing",
        "License": "Apache-2.0",
        "Requires-Python": ">=3.10",
        "Requires-Dist": f"rwkv-jit=={version}",
    }
    made = {
        f"{package}/{installed.FILE}": bundle.pack(dict(kernel.entry() for kernel in kernels)),
        f"{info}/METADATA": _headers(about),
        f"{info}/WHEEL": _headers(
            {"Wheel-Version": "1.0", "Generator": "kernels_wheel", "Root-Is-Purelib": "true", "Tag": "py3-none-any"}
        ),
        f"{info}/entry_points.txt": f"[{installed.GROUP}]\n{arch} = {package}\n".encode(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    path = folder / f"{package}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_zipped({**made, f"{info}/RECORD": _record(made, f"{info}/RECORD")}))
    return path


def _headers(fields: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {text}\n" for name, text in fields.items()).encode()


def _record(made: Mapping[str, bytes], own: str) -> bytes:
    def line(name: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(data)}\n"

    return "".join([*(line(name, data) for name, data in made.items()), f"{own},,\n"]).encode()


def _zipped(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file that depends on nothing but what is in it: neither on the time nor on the user."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name)  # dated 1980
            member.create_system, member.external_attr = 3, 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data, compresslevel=9)
    return made.getvalue()


def _main() -> Iterator[str]:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--arch", default=",".join(ARCHS), help="separated by commas (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"), help="folder (default: %(default)s)")
    given = parser.parse_args()
    for arch in given.arch.split(","):
        if arch not in ARCHS:
            parser.error(f"--arch: expected some of {', '.join(ARCHS)}, got {arch!r}")
    nvrtc = identity.version()
    if int(nvrtc.split(".")[0]) > 12:
        parser.error(f"expected NVRTC 12, whose kernels drivers for CUDA 12 and for later ones load, got {nvrtc}")
    os.environ.pop("RWKVJIT_LINEINFO", None)  # with it, kernels have other keys
    for arch in given.arch.split(","):
        began = time.perf_counter()
        kernels = build(arch)
        path = write(arch, kernels, given.output)
        seconds = time.perf_counter() - began
        size = path.stat().st_size / 1e6
        yield f"{path}: {len(kernels)} kernels by NVRTC {nvrtc}, {size:.2f} MB, {seconds:.0f} s"


if __name__ == "__main__":
    for line in _main():
        print(line, flush=True)
