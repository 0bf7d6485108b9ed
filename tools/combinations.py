"""Try rwkv_jit with every torch that it says it takes, and record what works in tests/combinations.json.

    python tools/combinations.py                          # every torch of TORCH: gigabytes, and ten minutes each
    python tools/combinations.py 2.6.0 2.9.1              # these
    python tools/combinations.py --without-unit-tests     # all but the longest step

Each torch gets an environment of its own, which is deleted afterwards. There the checkout is installed as the README
says, with the extra that fits that torch, and must leave the torch as it is. Then it is imported, `rwkv-jit doctor`
compiles every op for sm_80 and sm_90a, every op is traced into one graph forwards and backwards, and the unit tests
run.
A result is written as soon as it is there, and takes the place of an older one. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "combinations.json"
# The last patch of every minor version from the oldest that pyproject.toml admits.
TORCH = (
    "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
)  # fmt: skip
PIP_OPTIONS = ("--quiet", "--no-cache-dir", "--no-compile", "--disable-pip-version-check")
ARCHS = ("sm_80", "sm_90a")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
# These hold the record and what README shows of it to the sources: while it changes, they say nothing of a torch.
OF_THE_RECORD = (
    "--ignore=tests/unit/test_combinations.py",
    "--deselect=tests/unit/test_docs.py::test_readme_shows_the_torch_versions_that_were_tried",
)
STEPS = ("install", "import", "compile", "trace", "unit tests")

ABOUT_TORCH = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"

IMPORT = """
import json, platform
from importlib.metadata import version
import torch, rwkv_jit
about = rwkv_jit.env_report()
cuda = about["nvrtc"].split(".")[0]
nvrtc = version("nvidia-cuda-nvrtc-cu12" if cuda == "12" else "nvidia-cuda-nvrtc")
assert nvrtc.startswith(about["nvrtc"].split()[0] + "."), (nvrtc, about["nvrtc"])
print(json.dumps({"python": platform.python_version(), "cupy": " ".join(about["cupy"]), "nvrtc": nvrtc}))
"""

TRACE = """
import torch, rwkv_jit

def random(*shape):
    return torch.randn(*shape, requires_grad=True)

B, T, H, K = 2, 6, 2, 4
def streamed(count):
    return [random(B, T, H, K) for _ in range(count)]

calls = {
    "wkv4": [random(H * K), random(H * K), random(B, T, H * K), random(B, T, H * K)],
    "wkv5": [*streamed(3), random(H, K), random(H, K)],
    "wkv6": [*streamed(4), random(H, K)],
    "wkv7": streamed(6),
    "gla": streamed(4),
    "linear_attention": streamed(3),
    "timex": [random(H * K, T), random(B, H * K, T)],
}
for name, inputs in calls.items():
    def call(*inputs, op=getattr(rwkv_jit, name)):
        found = op(*inputs)
        return found[0] if isinstance(found, tuple) else found

    def both_ways(function):
        y = function(*inputs)
        return y, *torch.autograd.grad(y.square().sum(), inputs)

    torch.compiler.reset()
    traced = both_ways(torch.compile(call, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(traced, both_ways(call))
    print(name)
"""


class StepFailed(Exception):
    """A step did not pass; what it printed has been shown."""


class Environment:
    """A virtual environment, and the commands that run in it."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self._bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RWKVJIT_", "PYTHON"))}
        # Without GPUs, which would want to run what is compiled for another one; with a cache of its own.
        self._variables = {**kept, "CUDA_VISIBLE_DEVICES": "", "RWKVJIT_CACHE_DIR": str(folder / "cache")}
        self._folder = folder

    def run(self, program: str, *arguments: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Run a program of the environment away from the checkout; return what it printed."""
        done = subprocess.run(
            [self._bin / program, *arguments],
            cwd=cwd or self._folder, env={**self._variables, **variables},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            raise StepFailed
        return done.stdout


def install(environment: Environment, torch: str, found: dict[str, str]) -> None:
    """Install torch, then the checkout with the extra for the CUDA of that torch."""
    pip = ("-m", "pip", "install", *PIP_OPTIONS)
    environment.run("python", *pip, f"torch=={torch}")
    before = environment.run("python", "-c", ABOUT_TORCH)
    version, cuda = json.loads(before)
    extra = f"cuda{(cuda or '12').split('.')[0]}"
    found |= {"torch": version, "extra": extra}
    environment.run("python", *pip, f"{ROOT}[{extra}]")
    after = environment.run("python", "-c", ABOUT_TORCH)
    if after != before:
        print(f"torch {version} was replaced: {after}", file=sys.stderr)
        raise StepFailed


def import_it(environment: Environment, torch: str, found: dict[str, str]) -> None:
    """Import the package and load the compiler."""
    found |= json.loads(environment.run("python", "-c", IMPORT).splitlines()[-1])


def compile_ops(environment: Environment, torch: str, found: dict[str, str]) -> None:
    """Compile every op in both directions."""
    for arch in ARCHS:
        environment.run("rwkv-jit", "doctor", "--json", RWKVJIT_ARCH=arch)


def trace(environment: Environment, torch: str, found: dict[str, str]) -> None:
    """Trace every op into one graph, and compare values and gradients with those of a plain call."""
    environment.run("python", "-c", TRACE)


def run_unit_tests(environment: Environment, torch: str, found: dict[str, str]) -> None:
    """Run the unit tests of the checkout."""
    environment.run("python", "-m", "pip", "install", *PIP_OPTIONS, f"{ROOT}[{found['extra']},test]")
    printed = environment.run("python", "-m", "pytest", "-q", "tests/unit", *OF_THE_RECORD, cwd=ROOT)
    print(printed.splitlines()[-1])


RUN = dict(zip(STEPS, (install, import_it, compile_ops, trace, run_unit_tests), strict=True))


def try_torch(torch: str, steps: tuple[str, ...]) -> bool:
    """Record versions, and which steps passed, of which none follows one that failed; return whether none did."""
    found: dict[str, str] = {}
    states = dict.fromkeys(STEPS, NOT_RUN)
    with tempfile.TemporaryDirectory(prefix="rwkv_jit-torch-", ignore_cleanup_errors=True) as folder:
        environment = Environment(Path(folder))
        for step in steps:
            try:
                RUN[step](environment, torch, found)
            except StepFailed:
                states[step] = FAILED
                break
            states[step] = PASSED
            print(f"torch {torch}: {step} passed", flush=True)
        record(torch, {**found, **states})
    return FAILED not in states.values()


def record(torch: str, result: dict[str, str]) -> None:
    """Write a result, in the place of an older one of the same torch."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results[torch] = result
    in_order = sorted(results.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    RESULTS.write_text(json.dumps(dict(in_order), indent=2) + "\n", encoding="utf-8")
    print(f"torch {torch}: {json.dumps(result)}", flush=True)


def main() -> int:
    """Try those that were asked for; return 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="*", default=TORCH, help="versions, by default every one that is supported")
    parser.add_argument("--without-unit-tests", action="store_true", help="leave the longest step out")
    options = parser.parse_args()
    steps = STEPS[:-1] if options.without_unit_tests else STEPS
    return 0 if all([try_torch(torch, steps) for torch in options.torch]) else 1


if __name__ == "__main__":
    sys.exit(main())
