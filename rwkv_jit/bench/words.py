"""How a result's rows are named, in tables and in pictures alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
OURS = "rwkv_jit"
CPU = "CPU reference; not the speed of the kernels"


def shape(row: Row) -> str:
    """Return a row's shape as it is written: one N where K and V are equal."""
    sizes = list(row["shape"])
    if len(sizes) == 5:
        *others, keys, values = sizes
        sizes = [*others, keys] if keys == values else [*others, f"K = {keys}", f"V = {values}"]
    return f"({', '.join(map(str, sizes))})"


def contestant(row: Row) -> str:
    """Return who did it, and by what: a backend of ours by the name that calls give it."""
    what = "split" if (row["who"], row["what"]) == (OURS, "scan") else row["what"]
    return f"{row['who']} {what}"


def obstacle(row: Row) -> str:
    """Return in one line why a row has no time."""
    return " ".join((row["skipped"] or "no reason is recorded").split())


def milliseconds(value: float) -> str:
    """Return a time with three digits that count."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def percent(fraction: float) -> str:
    """Return a share as it is written."""
    return f"{fraction:.0%}" if fraction >= 0.005 else "<1%"


def machine(result: Mapping[str, Any]) -> str:
    """Return what a result was measured on: GPUs, versions, commit and copy bandwidth, as far as they are known."""
    env = result["env"]
    gpus = list(env.get("gpus") or ())[:1] if result["device"] == "cuda" else [CPU]
    versions = [
        f"{name} {env[key].split()[0]}" for name, key in (("torch", "torch"), ("NVRTC", "nvrtc")) if _is(env, key)
    ]
    commit = [f"commit {result['commit'][:10]}"] if result.get("commit") else []
    copy = result.get("copy_tb_per_s")
    return ", ".join([*gpus, *versions, *commit, *([] if copy is None else [f"copy {copy:.2f} TB/s"])])


def _is(env: Mapping[str, Any], key: str) -> bool:
    """Return whether the report has a version there: a sentence stands for an NVRTC that was not found."""
    return bool(env.get(key)) and str(env[key])[0].isdigit()


def digest(result: Mapping[str, Any]) -> str:
    """Return a digest of a result, by which a picture says what it shows."""
    return hashlib.sha256(json.dumps(result, sort_keys=True, default=str).encode()).hexdigest()[:16]
