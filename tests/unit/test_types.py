"""What type checkers read of the package: every name, with the types that calls take, and nothing else."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys

import pytest

import rwkv_jit

PACKAGES = ["rwkv_jit", "rwkv_jit.nn", "rwkv_jit.parallel"]
# A user's file. A line that ends with a comment is a mistake, with what mypy has to say of it.
# Of a function with several types of results it says that none of these takes the arguments.
FILE = """
import numpy as np
import rwkv_jit
import torch
from torch import Tensor
from typing_extensions import assert_type
from rwkv_jit import wkv8  # Module "rwkv_jit" has no attribute "wkv8"

x, w, u = torch.randn(1, 16, 2, 8), torch.randn(2, 8), torch.randn(2, 8)
pool, slots, cu_seqlens = torch.zeros(4, 2, 8, 8), torch.arange(1), torch.tensor([0, 16])
ring = rwkv_jit.ReplayRing(4, "wkv8", 2, 8)  # Argument 2 to "ReplayRing" has incompatible type

# Names.
rwkv_jit.nosuch  # Module has no attribute "nosuch"
rwkv_jit.nn.RWKV8  # Module has no attribute "RWKV8"
rwkv_jit.parallel.nosuch  # Module has no attribute "nosuch"
rwkv_jit.compat.nosuch  # Module has no attribute "nosuch"
rwkv_jit.compat.fla.nosuch  # Module has no attribute "nosuch"
rwkv_jit.compat.install()
model = rwkv_jit.nn.RWKV7(64, 16, 2, head_size=8)

# Options.
rwkv_jit.gla(x, x, x, x, decay="logs")  # No overload variant of "gla" matches argument types
rwkv_jit.wkv7(x, x, x, x, x, x, state_layout="vv")  # No overload variant of "wkv7" matches argument types
rwkv_jit.wkv7(x, x, x, x, x, x, backend="triton")  # No overload variant of "wkv7" matches argument types
rwkv_jit.wkv7(x, x, x, x, x, x, chunk=16)  # No overload variant of "wkv7" matches argument types
rwkv_jit.kda(x, x, x, x, w, beta_map="tanh")  # No overload variant of "kda" matches argument types
rwkv_jit.wkv4(w, u, x, x, decay="sigmoid")  # No overload variant of "wkv4" matches argument types
rwkv_jit.timex(w, x, backend="chunked")  # Argument "backend" to "timex" has incompatible type
rwkv_jit.wkv7_update(pool, x, x, x, x, x, x, rounding="up")  # Argument "rounding" to "wkv7_update" has incompatible
rwkv_jit.wkv7_update(pool, x, x, x, x, x, x, state_indices=[0])  # Argument "state_indices" to "wkv7_update" has
rwkv_jit.wkv7_varlen(pool, x, x, x, x, x, x, state_indices=slots)  # Missing named argument "cu_seqlens"
rwkv_jit.activate(x, ("tanh", "gelu"))  # Argument 2 to "activate" has incompatible type
rwkv_jit.gated(x, x, "tanh")  # Argument 3 to "gated" has incompatible type
rwkv_jit.gated_norm(x, x, w, norm="group")  # Argument "norm" to "gated_norm" has incompatible type
rwkv_jit.prepare_keys(x, x, x, w, w, rate_map="tanh")  # Argument "rate_map" to "prepare_keys" has incompatible type
rwkv_jit.causal_conv1d(x, w, activation="swish")  # No overload variant of "causal_conv1d" matches argument types
rwkv_jit.cross_entropy(x, slots, reduction="average")  # Argument "reduction" to "cross_entropy" has incompatible type
rwkv_jit.linear_cross_entropy(x, w, slots, reduction="none")  # Argument "reduction" to "linear_cross_entropy" has
rwkv_jit.set_bfloat16_precision("highest")  # Argument 1 to "set_bfloat16_precision" has incompatible type
rwkv_jit.wkv7(x, x, x, x, x, x, decay="sigmoid", state_layout="kv", backend="chunked", chunk_len=16)

# Tensors, and arrays of other libraries.
rwkv_jit.wkv7([1.0], x, x, x, x, x)  # No overload variant of "wkv7" matches argument types
rwkv_jit.gla(x, x, x, None)  # No overload variant of "gla" matches argument types
rwkv_jit.gla(x, x, x)  # No overload variant of "gla" matches argument types
rwkv_jit.gla(np.ones((1, 16, 2, 8), np.float32), x, x, x, cu_seqlens=np.array([0, 16]))

# Results.
y, state = rwkv_jit.wkv7(x, x, x, x, x, x)
state.shape  # "None" has no attribute "shape"
y, final = rwkv_jit.wkv7(x, x, x, x, x, x, output_final_state=True)
assert_type(final, Tensor)
y, final = rwkv_jit.wkv7(x, x, x, x, x, x, None, True, cu_seqlens, scale=1.0)
y, final = rwkv_jit.causal_conv1d(x, w, output_final_state=True)
y, final = rwkv_jit.ssd_ref(x, x, w, x, x, None, True)
y, sums = rwkv_jit.linear_attention(x, x, x, output_final_state=True, normalize=True)
assert_type(sums, tuple[Tensor, Tensor])
y, final = rwkv_jit.linear_attention(x, x, x, output_final_state=True)
final + y


def ends(is_wanted: bool) -> None:
    y, final = rwkv_jit.kda(x, x, x, x, w, output_final_state=is_wanted)
    final.shape  # Item "None" of "Tensor | None" has no attribute "shape"
    y, of_part = rwkv_jit.parallel.wkv7(x, x, x, x, x, x, rwkv_jit.parallel.Shard(), output_final_state=True)
    assert_type(of_part, Tensor)
    rwkv_jit.parallel.gla(x, x, x, x, 1)  # No overload variant of "gla" matches argument types
"""


def tool_of(root, name):
    spec = importlib.util.spec_from_file_location(name, root / "tools" / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    sys.modules[name] = tool  # named tuples look for the module of their annotations
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture
def tool(root):
    return tool_of(root, "stubs")


def parsed(root, package):
    return ast.parse((root / package.replace(".", "/") / "__init__.pyi").read_text(encoding="utf-8")).body


def of_kinds(arguments):
    """The arguments of a function: what each is called, how it is given, and its default."""
    args = arguments.args
    defaults = [None] * (len(args) - len(arguments.defaults)) + arguments.defaults
    several = [(x.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
               for x, default in zip(args, defaults, strict=True)]  # fmt: skip
    several += [(x.arg, inspect.Parameter.KEYWORD_ONLY, default)
                for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]  # fmt: skip
    if arguments.kwarg:
        several.append((arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, None))
    return [(name, kind, "" if default is None else ast.unparse(default)) for name, kind, default in several]


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_those_of_the_sources(package, root, tool):
    """Else: python tools/stubs.py."""
    assert package in tool.PACKAGES
    assert tool.path_of(package) == root / package.replace(".", "/") / "__init__.pyi"
    assert tool.path_of(package).read_text(encoding="utf-8") == tool.text_of(package)


def test_variations_are_those_of_the_functions_over_sequences(root):
    """Else: python tools/functions.py."""
    assert all(path.read_text(encoding="utf-8") == text for path, text in tool_of(root, "functions").files().items())


@pytest.mark.parametrize("package", PACKAGES)
def test_types_have_every_public_name_and_no_other(package, root):
    module = importlib.import_module(package)
    body, named = parsed(root, package), {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname:
                    named[alias.asname] = f"{node.module}.{alias.name}"
                    assert alias.asname == alias.name
        elif isinstance(node, ast.FunctionDef):
            named[node.name] = None
    rooms = list(getattr(module, "_ROOMS", ()))
    assert sorted(named) == sorted([*module.__all__, *rooms])
    for name in module.__all__:
        if named[name] is not None:
            assert getattr(importlib.import_module(named[name].rpartition(".")[0]), name) is getattr(module, name)
    (listed,) = [node.value for node in body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(listed) == module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_overloads_take_what_the_functions_take(package, root):
    """The last one has all: names, kinds and defaults; those before differ where a state is wanted."""
    module, functions = importlib.import_module(package), {}
    for node in parsed(root, package):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    for name, overloads in functions.items():
        there = inspect.signature(getattr(module, name)).parameters.values()
        plain = [(x.name, x.kind, "" if x.default is x.empty else repr(x.default)) for x in there]
        assert of_kinds(overloads[-1].args) == plain
        for overload in overloads:
            assert [ast.unparse(x) for x in overload.decorator_list] == ["overload"]
            assert [x[0] for x in of_kinds(overload.args)] == [x.name for x in there]
            assert overload.returns is not None
    public = {name: getattr(module, name) for name in module.__all__}
    several = {name: x for name, x in public.items() if inspect.isfunction(x)}
    several = [name for name, x in several.items() if "output_final_state" in inspect.signature(x).parameters]
    assert sorted(functions) == several


def test_mypy_finds_mistakes_in_the_file_of_a_user(root, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-context", str(path)],  # with the cache of a run over all
        capture_output=True, text=True, cwd=root, env={"MYPYPATH": str(root), "PATH": ""}, timeout=600,
    )  # fmt: skip
    said = dict(re.findall(r"mine\.py:(\d+): error: (.*)", done.stdout))
    expected = {str(number): line.partition("  # ")[2] for number, line in enumerate(FILE.splitlines(), 1)
                if "  # " in line}  # fmt: skip
    assert said.keys() == expected.keys(), done.stdout + done.stderr
    for number, text in expected.items():
        assert text in said[number]


def test_a_package_lists_its_public_names_alone():
    for package in (rwkv_jit, rwkv_jit.nn, rwkv_jit.parallel):
        listed = [name for name in dir(package) if not name.startswith("__")]
        assert listed == sorted([*package.__all__, *getattr(package, "_ROOMS", ())])
