"""Public functions say everything in their docstrings, and the ops' signatures are what they promise."""

import doctest
import inspect
import re
from typing import is_typeddict

import pytest
import torch
from problems import ROWS

import rwkv_jit
from rwkv_jit import nn, parallel
from rwkv_jit.call.options import CallOptions, DecayOptions, complete
from rwkv_jit.kernels import errors
from rwkv_jit.pool import options as pooled
from rwkv_jit.schedules import table

FUNCTIONS = [name for name in rwkv_jit.__all__ if inspect.isfunction(getattr(rwkv_jit, name))]
OPS = ["wkv5", "wkv6", "wkv7", "gla", "linear_attention"]
WITHOUT_HEADS = ["timex", "wkv4", "wkv4_update"]  # their arguments are their own
UPDATES = [f"{op}_{kind}" for kind in ("update", "varlen", "replay", "verify") for op in OPS]
DERIVED = [*ROWS]
DERIVED_POOLED = [f"{op}_{kind}" for kind in ("update", "varlen", "replay", "verify") for op in DERIVED]
COMMITTING = ["replay_commit", "replay_flush"]
DIFFERENTIABLE = ["prepare_keys", "gated_norm", "activate", "gated", "token_shift", "norm_shift"]
CONVOLUTIONS = ["causal_conv1d", "causal_conv1d_update"]
LAYER = ["shift_mix", *DIFFERENTIABLE, "cross_entropy", "linear_cross_entropy", *CONVOLUTIONS]
REFERENCES = [f"{op}_ref" for op in (*OPS, "timex", "wkv4", *DIFFERENTIABLE, "causal_conv1d", *DERIVED)]
COMPILING = ["specialize", "compile_async", "warm"]
ASKING = ["is_available", "env_report", "cache_info", "clear_cache", "get_bfloat16_precision", "is_batch_invariant"]
SETTING = ["set_bfloat16_precision", "set_batch_invariant"]
OF_A_CALL = ("initial_state", "output_final_state", "cu_seqlens")
OPTIONS = {
    "scale": 1.0, "decay": "raw", "decay_bound": None, "state_layout": "vk", "checkpoint_interval": 64,
    "chunk_len": None, "num_threads": None, "backend": "auto",
}  # fmt: skip
OF_FLA = {"scale": None, "decay": "log", "state_layout": "kv"}  # conventions of the others are those of RWKV


WITHOUT_DECAYS = ("linear_attention", "gated_delta_rule", "delta_rule", "simple_gla", "ssd")


def options(op):
    """The options by name, and their defaults."""
    of_fla = op != "ssd" and op in ("gla", "linear_attention", *DERIVED)
    every = OPTIONS | (OF_FLA if of_fla else {}) | ({"scale": 1.0} if op == "hgrn2" else {})
    return {name: x for name, x in every.items() if op not in WITHOUT_DECAYS or "decay" not in name}


def parameters(name):
    return inspect.signature(getattr(rwkv_jit, name)).parameters


def sections(name):
    """The NumPy sections of a public name's docstring, by title."""
    return sections_of(getattr(rwkv_jit, name))


def sections_of(public):
    parts = re.split(r"^(\w+)\n-{3,}\n", inspect.getdoc(public) + "\n", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(name):
    """The names that the Parameters section describes."""
    return documented_in(sections(name).get("Parameters", ""))


def documented_in(parameters):
    lines = re.findall(r"^(\S.*?)(?: :.*)?$", parameters, flags=re.MULTILINE)
    return [part.strip().lstrip("*") for line in lines for part in line.split(",")]


def types_of(name):
    """The types that say what a call over a pool shares with others: of all, and of those that are like it."""
    (own,) = re.findall(r"Unpack\[(\w+)\]", str(parameters(name)["options"]))
    keys = getattr(pooled, own).__annotations__.keys()
    several = [each for each in vars(pooled).values() if is_typeddict(each)]
    return [each for each in several if each.__name__ in (own, "PoolOptions") or each.__annotations__.keys() < keys]


def test_the_public_functions_are_known():
    assert sorted(FUNCTIONS) == sorted([
        *OPS, *WITHOUT_HEADS, *UPDATES, *DERIVED, *DERIVED_POOLED, *LAYER, *REFERENCES, *COMPILING, *ASKING, *SETTING,
        *COMMITTING, "add_hook",
    ])  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_a_first_sentence_and_the_sections_that_apply(name):
    wanted = {"Raises", "Examples"} if name in (*SETTING, *COMMITTING) else {"Returns"}
    if parameters(name):
        wanted.add("Parameters")
    recurrences = *OPS, *WITHOUT_HEADS, *UPDATES, *DERIVED, *DERIVED_POOLED
    if name in (*recurrences, *LAYER, *COMPILING):
        wanted |= {"Raises", "Examples"}
    if name in (*recurrences, *LAYER):
        wanted |= {"Notes", "References"}
    if name in (*UPDATES, *DERIVED_POOLED, *COMMITTING, "wkv4_update"):  # which their types have, as the next test says
        wanted -= {"Raises", "Notes"}
    first, second = (inspect.getdoc(getattr(rwkv_jit, name)) + "\n\n").splitlines()[:2]
    assert (first[-1] in ".:", second) == (True, "")
    assert wanted <= set(sections(name))
    assert all(text.strip() for text in sections(name).values())


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if parameters(name)])
def test_docstring_describes_every_parameter_once_and_in_order(name):
    listed = documented(name)
    assert sorted(listed) == sorted(parameters(name))
    order = [parameter for parameter in parameters(name) if parameter in OF_A_CALL]
    assert [parameter for parameter in listed if parameter in order] == order


@pytest.mark.parametrize("name", [*UPDATES, *DERIVED_POOLED, *COMMITTING])
def test_what_calls_over_a_pool_share_is_said_by_the_types_to_which_they_refer(name):
    """The pool, the ring and every option, errors and precision. What a verify takes is said of its replay."""
    (own,) = re.findall(r"Unpack\[(\w+)\]", str(parameters(name)["options"]))
    of_replay = name.replace("_verify", "_replay")
    shown = sections(name)["Parameters"]
    if name != of_replay:
        assert f"As in `{of_replay}`" in shown
        assert parameters(name) == parameters(of_replay)
        shown = sections(of_replay)["Parameters"]
    (shared, referred) = re.search(r"^(state, .*\*\*options)\n((?: .*\n)+)", shown, flags=re.MULTILINE).groups()
    assert re.search(rf"[Aa]s `PoolOptions` and `{own}` say", referred)
    text = "\n".join(map(inspect.getdoc, types_of(name)))
    for argument in shared.replace(", **options", "").split(", "):
        assert re.search(rf"`{argument}` is the", " ".join(text.split()))
    lines = re.findall(r"^(\w+(?:, \w+)*)(?: : .*)?\n    \S", text, flags=re.MULTILINE)
    described = {option for line in lines for option in line.split(", ")}
    assert getattr(pooled, own).__annotations__.keys() <= described
    for section in ("Raises", "Notes"):
        assert f"\n{section}\n---" in inspect.getdoc(pooled.PoolOptions)


def test_wkv4_update_refers_to_the_types_of_the_other_updates():
    shared = re.search(
        r"^(.*null_index.*)\n    As `PoolOptions` and `UpdateOptions` say",
        sections("wkv4_update")["Parameters"],
        flags=re.MULTILINE,
    )
    documented = inspect.getdoc(pooled.PoolOptions) + inspect.getdoc(pooled.UpdateOptions)
    assert all(f"\n{option} : " in documented for option in shared[1].split(", "))


@pytest.mark.parametrize("name", ["specialize", "warm", "wkv4", "timex", *LAYER])
def test_docstring_names_the_defaults(name):
    text = sections(name)["Parameters"]
    for parameter in parameters(name).values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD or parameter.name == "head_size":
            continue
        line = re.search(rf"^(.*\b{parameter.name}\b.* : .*)$", text, flags=re.MULTILINE)[1]
        if parameter.default is None:
            assert line.endswith("optional")
        elif parameter.default is not inspect.Parameter.empty:
            assert re.search(rf'default "?{re.escape(str(parameter.default))}"?$', line)


def test_compiling_in_the_background_takes_what_compiling_takes():
    foreground, background = (inspect.signature(getattr(rwkv_jit, name)) for name in ("specialize", "compile_async"))
    assert background.parameters == foreground.parameters


@pytest.mark.parametrize("name", [*OPS, *DERIVED])
def test_options_have_the_defaults_that_are_documented(name):
    """Each has a line of its own where all options are said, and the op names those that it has."""
    op = (table.OPS | ROWS)[name]
    tail = complete(op, {}, torch.ones(1, 1, 1, 16))
    assert {option: tail[option] for option in options(name)} == options(name) | (
        {"scale": 0.25} if options(name)["scale"] is None else {}
    )
    text = inspect.getdoc(CallOptions) + inspect.getdoc(DecayOptions)
    for option, default in OPTIONS.items():
        (line,) = re.findall(rf"^ *{option} : (.*)$", text, flags=re.MULTILINE)
        if option in ("checkpoint_interval", "backend"):
            assert re.search(rf'default "?{re.escape(str(default))}"?$', line)
        else:
            assert line.endswith("optional") == (default is None)
    (own,) = re.findall(r"^\*\*options\n((?: .*\n)+)", sections(name)["Parameters"], flags=re.MULTILINE)
    assert re.findall(r"\w+", own.partition("says: ")[2].partition(".")[0]) == list(options(name))
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'chunk' .did you mean 'chunk_len'... there are .*, scale, "
    ):
        complete(op, {"chunk": 1}, None)


OF_SEQUENCES = "initial_state=None, output_final_state=False, cu_seqlens=None"
OF_RWKV = "scale=1.0, decay='raw', decay_bound=None, state_layout='vk'"
SIGNATURES = {
    "wkv5": f"r, k, v, w, u, {OF_SEQUENCES}, **options",
    "wkv6": f"r, k, v, w, u, {OF_SEQUENCES}, **options",
    "wkv7": f"r, w, k, v, a, b, {OF_SEQUENCES}, **options",
    "gla": f"q, k, v, g, {OF_SEQUENCES}, **options",
    "linear_attention": f"q, k, v, {OF_SEQUENCES}, normalize=False, **options",
    "wkv4": "w, u, k, v, initial_state=None, output_final_state=False, decay='raw', backend='auto'",
    "wkv4_update": "state, w, u, k, v, decay='raw', *, state_indices=None, write_indices=None, null_index=-1, out=None",
    "wkv5_update": "state, r, k, v, w, u, **options",
    "wkv6_update": "state, r, k, v, w, u, **options",
    "wkv7_update": "state, r, w, k, v, a, b, **options",
    "gla_update": "state, q, k, v, g, **options",
    "linear_attention_update": "state, q, k, v, **options",
    "wkv5_varlen": "state, r, k, v, w, u, **options",
    "wkv6_varlen": "state, r, k, v, w, u, **options",
    "wkv7_varlen": "state, r, w, k, v, a, b, **options",
    "gla_varlen": "state, q, k, v, g, **options",
    "linear_attention_varlen": "state, q, k, v, **options",
    "timex": "w, k, eps=0.0, backend='auto'",
    "shift_mix": "x, weight, bias, mixes, shift, *, add=None, state_indices=None, cu_seqlens=None, "
    "has_initial_state=None, null_index=-1, num_active=None, eps=1e-05, out=None",
    "prepare_keys": "k, v, rate, k_k, k_a, *, a0=None, v_first=None, v_gate=None, v0=None, r=None, r_k=None, "
    "rate_map='sigmoid'",
    "gated_norm": "y, g, weight, bias=None, r=None, k=None, v=None, r_k=None, *, bonus=None, gate='identity', "
    "norm='layer', eps=0.00064, out=None",
    "activate": "x, kinds, *, out=None",
    "gated": "x, g, gate='sigmoid'",
    "token_shift": "x, mixes, amounts=None, first=None, cu_seqlens=None",
    "norm_shift": "x, weight, bias, mixes, *, add=None, first=None, cu_seqlens=None, eps=1e-05, dtype=None",
    "norm_shift_ref": "x, weight, bias, mixes, add=None, first=None, cu_seqlens=None, eps=1e-05, dtype=None",
    "prepare_keys_ref": "k, v, rate, k_k, k_a, a0=None, v_first=None, v_gate=None, v0=None, r=None, r_k=None, "
    "rate_map='sigmoid'",
    "gated_norm_ref": "y, g, weight, bias=None, r=None, k=None, v=None, r_k=None, bonus=None, gate='identity', "
    "norm='layer', eps=0.00064",
    "activate_ref": "x, kinds",
    "gated_ref": "x, g, gate='sigmoid'",
    "token_shift_ref": "x, mixes, amounts=None, first=None, cu_seqlens=None",
    "cross_entropy": "logits, targets, *, l2_wrap=0.0, ignore_index=-100, reduction='mean'",
    "linear_cross_entropy": "hidden, weight, targets, *, bias=None, l2_wrap=0.0, ignore_index=-100, reduction='mean', "
    "chunk_rows=None",
    "causal_conv1d": "x, weight, bias=None, *, initial_state=None, output_final_state=False, cu_seqlens=None, "
    "activation=None",
    "causal_conv1d_update": "x, conv_state, weight, bias=None, *, activation=None, cache_seqlens=None, "
    "state_indices=None, null_index=-1, num_active=None, out=None",
    "causal_conv1d_ref": "x, weight, bias=None, initial_state=None, output_final_state=False, cu_seqlens=None, "
    "activation=None",
    "wkv5_ref": f"r, k, v, w, u, {OF_SEQUENCES}, {OF_RWKV}",
    "wkv6_ref": f"r, k, v, w, u, {OF_SEQUENCES}, {OF_RWKV}",
    "wkv7_ref": f"r, w, k, v, a, b, {OF_SEQUENCES}, {OF_RWKV}",
    "gla_ref": f"q, k, v, g, {OF_SEQUENCES}, scale=None, decay='log', decay_bound=None, state_layout='kv'",
    "linear_attention_ref": f"q, k, v, {OF_SEQUENCES}, scale=None, state_layout='kv', normalize=False",
    "wkv4_ref": "w, u, k, v, initial_state=None, output_final_state=False, decay='raw'",
    "timex_ref": "w, k, eps=0.0",
}
# What derived ops take beside the recurrence, of calls over sequences and over a pool alike.
GATES, OF_KEYS = "A_log=None, dt_bias=None, lower_bound=None", "qk_norm=False, beta_map='identity'"
OF_STEPS = "D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, inf)"
for op, inputs, more in (
    ("kda", "q, k, v, g, beta", f"{GATES}, {OF_KEYS}"),
    ("gated_delta_rule", "q, k, v, g, beta", f"A_log=None, dt_bias=None, {OF_KEYS}"),
    ("delta_rule", "q, k, v, beta", OF_KEYS),
    ("gated_delta_rule2", "q, k, v, g, beta, write_gate", f"{GATES}, qk_norm=False"),
    ("simple_gla", "q, k, v, g", ""),
    ("hgrn2", "q, g, v", ""),
    ("ssd", "x, dt, A, B, C", OF_STEPS),
):
    named = f"*, {more}, " if more else ""
    scale, layout = ("1.0" if op in ("hgrn2", "ssd") else "None"), ("vk" if op == "ssd" else "kv")
    SIGNATURES |= {
        op: f"{inputs}, {OF_SEQUENCES}, {named}**options",
        f"{op}_update": f"state, {inputs}, {named}**options",
        f"{op}_varlen": f"state, {inputs}, {named}**options",
        f"{op}_ref": f"{inputs}, {OF_SEQUENCES}, {more + ', ' if more else ''}scale={scale}, state_layout='{layout}'",
    }
SIGNATURES |= {
    f"{op}_{kind}": SIGNATURES[f"{op}_update"].replace("state, ", "state, ring, ", 1)
    for op in (*OPS, *DERIVED) for kind in ("replay", "verify")
}  # fmt: skip


@pytest.mark.parametrize("name", [*OPS, *WITHOUT_HEADS, *UPDATES, *DERIVED, *DERIVED_POOLED, *LAYER, *REFERENCES])
def test_signature(name):
    plain = [x.replace(annotation=inspect.Parameter.empty) for x in parameters(name).values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", [*OPS, *WITHOUT_HEADS, *UPDATES, *DERIVED, *DERIVED_POOLED, *LAYER])
def test_results_in_the_examples_are_right(name, monkeypatch):
    run_example(name)


def run_example(name):
    """Run an example on the CPU as it stands, but for the device."""
    text = inspect.getdoc(getattr(rwkv_jit, name)).replace('device="cuda"', 'device="cpu"')
    example = doctest.DocTestParser().get_doctest(text, {"torch": torch, "rwkv_jit": rwkv_jit}, name, None, None)
    assert len(example.examples) >= 3
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    return example


# What those of RWKV-7 are made of goes by options; they, layers and whole models have tests of their own.
OF_THEIR_OWN = re.compile(r"RWKV7\w*|RWKV\d(Block|State|)|graphed_\w+")


@pytest.mark.parametrize("name", [name for name in nn.__all__ if not OF_THEIR_OWN.fullmatch(name)])
def test_docstring_of_a_module(name, monkeypatch):
    """It has all sections, every parameter and what is registered; its example is right.

    Errors are said of all modules, and papers of models: of RWKV-4, which is none, of time mixing.
    """
    module = getattr(nn, name)
    monkeypatch.setattr(rwkv_jit, name, module, raising=False)
    assert {"Parameters", "Attributes", "Notes", "Examples"} <= set(sections(name))
    whose = name if not name.startswith("RWKV") else "RWKV4TimeMix" if name[4] == "4" else name[:5]
    assert "References" in sections_of(getattr(nn, whose))
    assert "TypeError or ValueError" in nn.__doc__
    assert documented(name) == list(parameters(name))
    example = run_example(name)
    made = example.globs["layer"]
    described = re.findall(r"^(\w.*?) : torch", sections(name)["Attributes"], flags=re.MULTILINE)
    attributes = [x for line in described for x in line.split(", ")]
    assert sorted(attributes) == sorted({own.split(".")[0] for own, _ in made.named_parameters()})
    signature = inspect.signature(module.forward).parameters
    assert [x for x in signature if x != "self"] == documented_in(sections_of(module.forward)["Parameters"])


@pytest.mark.parametrize("name", parallel.__all__)
def test_docstring_over_many_processes(name, monkeypatch):
    """It has all sections and every parameter; those of an op are that op's, with the part behind the inputs."""
    function, own = getattr(parallel, name), parameters(name) if name in table.ALL else {}
    monkeypatch.setattr(rwkv_jit, name, function, raising=False)
    named = list(parameters(name))
    wanted = {"Parameters", "Examples", "Attributes" if name == "Shard" else "Returns"}
    assert wanted | ({"Raises"} if name != "neutral" else set()) <= set(sections(name))
    op = table.ALL.get(name)
    if op is None:
        assert documented(name) == named
    else:
        assert sorted(documented(name)) == sorted(named)  # what is as in the op stands together
        count = len(op.inputs) - len(op.optional)
        assert named[: count + 3] == [*op.public_names[:count], "shard", "initial_state", "output_final_state"]
        assert sorted(named) == sorted({*own, "shard"} - {"cu_seqlens", "normalize"})


def test_error_tree_is_drawn_as_it_is():
    drawing = errors.__doc__
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(re.findall(r"\b(\w+Error)\b", drawing)) - {"RuntimeError", "TypeError", "ValueError"} == set(classes)
    assert "RwkvJitError (RuntimeError)" in drawing
    for name, value in classes.items():
        assert issubclass(value, errors.RwkvJitError)
        assert (f"── {name} " in drawing) == (value.__base__ is errors.RwkvJitError)
    assert issubclass(errors.RwkvJitError, RuntimeError)
    also_value_errors = [name for name, value in classes.items() if issubclass(value, ValueError)]
    assert also_value_errors == re.findall(r"── (\w+) +\(also ValueError\)", drawing)
    assert all(name in rwkv_jit.__all__ for name in classes)
