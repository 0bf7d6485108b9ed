"""A result of the bench that nobody measured: several ops, phases, contestants and shapes, and what can be missing."""

COPY = 4.0  # TB/s
MISSING = ("low_ms", "high_ms", "host_us", "floor_ms", "fraction", "peak_mib", "error")


def row(op="wkv7", shape=(8, 4096, 64, 64, 64), phase="forward", who="rwkv_jit", what="chunked", median=1.0, **changes):
    """A row whose quartiles are 2 % below and 4 % above its median, with a floor of 0.5 ms."""
    made = {
        "suite": "studies", "op": op, "shape": list(shape), "dtype": "bfloat16", "phase": phase, "who": who,
        "what": what, "median_ms": median, "low_ms": 0.98 * median, "high_ms": 1.04 * median, "runs": 30,
        "in_graph": False, "host_us": 12.0, "floor_ms": 0.5, "fraction": 0.5 / median, "peak_mib": 512.0,
        "error": 4e-3, "skipped": None,
    }  # fmt: skip
    return made | changes


def left_out(why="out of memory", **given):
    return row(**given) | dict.fromkeys(("median_ms", *MISSING)) | {"runs": 0, "skipped": why}


def rows():
    made = []
    for shape in ((8, 4096, 64, 64, 64), (8, 4096, 32, 128, 128), (8, 4096, 16, 256, 256)):
        for phase, factor in (("forward", 1), ("forward+backward", 3)):
            made.append(row(shape=shape, phase=phase, median=0.7 * factor))
            if shape[3] == 256:
                made.append(
                    left_out("CUDA error:\nan illegal access", shape=shape, phase=phase, who="fla", what="chunk")
                )
            else:
                made.append(row(shape=shape, phase=phase, who="fla", what="chunk", median=4.5 * factor))
    for tokens in (54, 512, 4096):
        shape, floor = (1, tokens, 32, 64, 64), tokens / 1e5
        made.append(row("wkv6", shape, median=2 * floor, floor_ms=floor, fraction=0.5))
        made.append(row("wkv6", shape, what="recurrent", median=5 * floor, floor_ms=floor, fraction=0.2))
        naive = row("wkv6", shape, who="torch", what="naive loop", median=tokens / 50)
        made.append(naive | dict.fromkeys(MISSING))
    for batch in (1, 8):
        made.append(
            row(
                "gla", (batch, 2048, 4, 256, 512), what="split", median=0.1 * batch, floor_ms=0.04 * batch, fraction=0.4
            )
        )
    for who, what, median in (("rwkv_jit", "tiles", 0.3), ("torch", "conv1d", 33.0)):
        floor = {"floor_ms": 0.06, "fraction": 0.06 / median, "dtype": "float32"}
        made.append(row("timex", (32, 768, 768), "backward", who, what, median, **floor))
    made.append(left_out(None, op="wkv4", shape=(8, 4096, 4096), what="recurrent"))
    return made


def result(**changes):
    made = {
        "format": 1,
        "env": {"gpus": ["NVIDIA H200, sm_90, 139 GiB"], "torch": "2.11.0", "nvrtc": "13.0 0123abcd"},
        "commit": "c753463aaaaabbbbbccccc",
        "sources": {"wkv7": "1" * 64, "wkv6": "2" * 64},
        "copy_tb_per_s": COPY,
        "device": "cuda",
        "rows": rows(),
    }
    return made | changes


def on_cpu():
    rows = [row(shape=(1, 48, 2, 16, 16), what="reference", median=8.0, floor_ms=None, fraction=None, peak_mib=None)]
    env = {"gpus": [], "torch": "2.13.0+cpu", "nvrtc": "there is none"}
    return result(env=env, device="cpu", copy_tb_per_s=None, commit=None, rows=rows)
