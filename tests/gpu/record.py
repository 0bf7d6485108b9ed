"""What a GPU run covers: one digest per op, over what decides its results and nothing else."""

import ast
import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("record.json")
OWED = Path(__file__).with_name("owed.json")
# The ops, and how the names of their templates begin. Inference, layers, parallel and nn are as four more, each with a
# room, and the first two with a folder of templates. Of the modules of inference wkv4 needs all, as its update stands
# there, and layers some. The models of nn are made of layers, and of products of few rows, which nothing else takes.
INFERENCE, LAYERS, NN, PARALLEL = "inference", "layers", "nn", "parallel"
STEMS = {
    "timex": ("timex",), "wkv4": ("wkv4",), "wkv5": ("gla",), "wkv6": ("gla",), "wkv7": ("wkv7",), "gla": ("gla",),
    "linear_attention": ("gla",), INFERENCE: ("gla", "wkv7"), PARALLEL: ("gla", "wkv7"),
    LAYERS: (), NN: (),  # beside those in folders of their own
}  # fmt: skip
OPS = tuple(STEMS)
# The modules between a call and the driver: of the kernel service those that launch, and whole rooms. References and
# the cache decide nothing about a kernel's results, and plain torch launches none.
LAUNCHING = tuple(
    f"kernels/{name}.py" for name in ("compiler", "cuda", "dlpack", "gpu", "kernel", "launch", "signatures", "template")
)
ROOMS, PLAIN = ("call", "ops", "schedules"), "call/plain.py"
# Of these rooms, what others have: schedules of calls over a pool, and of layers, which stand for ops that are another
# one with other inputs, too.
OF_POOL = {f"schedules/{name}.py" for name in ("replay", "varlen")}
OF_LAYERS = {
    f"schedules/{name}.py"
    for name in (
        "channel_decay", "convolution", "head_decay", "layer_gradients", "layers", "loss", "operands", "products",
    )
} | {"ops/delta.py", "ops/diagonal.py"}  # fmt: skip
FOR_LAYERS = {"pool/arguments.py", "pool/calls.py"}
OF_NN = {"schedules/products.py", "layers/products.py", "layer_products.cu"}
_MEASURED_WITH = re.compile(r'^_TEMPLATES = "\w+"$', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'#include "([\w.]+)"')


def template_text(name: str, seen: set[str], paths: dict[str, Path]) -> str:
    """A template and what it includes, without comments and with single spaces."""
    text = paths[name].read_text(encoding="utf-8")
    included = [n for n in _INCLUDE.findall(text) if not (n in seen or seen.add(n))]
    own = " ".join(_COMMENT.sub(" ", text).split())
    return own + "".join(template_text(n, seen, paths) for n in included)


def module_tree(name: str) -> str:
    text = (ROOT / "rwkv_jit" / name).read_text(encoding="utf-8")
    if name == "call/tuned.py":  # of which templates a shipped choice is; that kernels are right does not go by it
        text = _MEASURED_WITH.sub("", text)
    return text_tree(text)


@cache  # most ops share most modules
def text_tree(text: str) -> str:
    """A module's syntax tree without docstrings, comments and positions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return canonical(tree)


def canonical(node):
    """The tree as text, the same in every Python: `ast.dump` shows empty fields in some versions only."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({', '.join(f'{name}={canonical(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(canonical, node))}]"
    return repr(node)


def own_modules(op: str) -> set[str]:
    """The modules that only this op has."""
    return {name for name in _in_rooms() if re.fullmatch(rf"\w+/{op}(_\w+)?\.py", name)}


def _in_rooms() -> set[str]:
    return set().union(*map(_in_room, ROOMS))


def _in_room(room: str) -> set[str]:
    return {f"{room}/{path.name}" for path in (ROOT / "rwkv_jit" / room).glob("*.py")}


def modules(op: str) -> list[str]:
    """All modules that decide about the results of an op."""
    with_own = {op, LAYERS} if op == NN else {op}
    of_others = set().union(*(own_modules(other) for other in OPS if other not in with_own))
    own = _in_room("pool") | OF_POOL if op in (INFERENCE, "wkv4") else set()
    if op in (LAYERS, NN):
        own = _in_room(LAYERS) | FOR_LAYERS | OF_LAYERS
        own = own - OF_NN if op == LAYERS else own | _in_room(NN)
    if op == PARALLEL:
        own = _in_room(PARALLEL)
    return sorted({*LAUNCHING, *own, *(_in_rooms() - OF_POOL - OF_LAYERS)} - of_others - {PLAIN})


def templates(op: str) -> list[str]:
    """The kernels of an op, and those that all ops take."""
    folder = ROOT / "kernel_templates"
    found = [path for stem in STEMS[op] for path in folder.rglob(f"{stem}_*.cu")]
    of_layers = "shared", LAYERS, "derived"
    for name in {INFERENCE: ("shared", INFERENCE), LAYERS: of_layers, NN: of_layers}.get(op, ("shared",)):
        found += (folder / name).glob("*.cu")
    if op != INFERENCE and ({"gla", "wkv7"} & {*STEMS[op]} or op in (LAYERS, NN)):  # calls of a few tokens
        found += (folder / INFERENCE).glob("update_*.cu")
    return sorted({path.name for path in found} - (OF_NN if op == LAYERS else set()))


def digest(op: str) -> str:
    """The digest of what a GPU run of `op` covers."""
    paths = {path.name: path for path in (ROOT / "kernel_templates").rglob("*.cu*")}
    parts = [template_text(name, {"types.cuh"}, paths) for name in templates(op)]
    parts += [template_text("types.cuh", set(), paths), *map(module_tree, modules(op))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_due(name: str, digest: str, section: dict | None) -> bool:
    """Whether the record lacks a test: any of an op whose sources are others, else one that failed or did not run."""
    return section is None or section["digest"] != digest or name in section.get("due", ())


def section(digest: str, outcomes: dict[str, str], tests: set[str], before: dict | None) -> dict:
    """What is recorded of an op, from the outcomes of a run by test, and from what was recorded of the same sources.

    `tests` are all that the op has. Those that neither passed nor were skipped are due: they failed, or the run took
    some tests alone, or did not come to its end.
    """
    if before is None or before["digest"] != digest or tests <= outcomes.keys():
        due, counts = set(tests), {"passed": 0, "skipped": 0}
    else:
        due, counts = set(before.get("due", ())), {kind: before[kind] for kind in ("passed", "skipped")}
    for name, outcome in outcomes.items():
        if outcome == "failed":
            counts["passed"] -= name not in due  # it had passed
            due.add(name)
        elif name in due:
            counts[outcome] += 1
            due.remove(name)
    left = sorted(due & tests)
    return {**counts, "digest": digest, **({"due": left} if left else {})}
