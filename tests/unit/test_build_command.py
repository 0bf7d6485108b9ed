"""What is warmed serves calls, of every op, verb and function of a layer; and errors name the command that warms it."""

import contextlib
import itertools
import re
from functools import partial

import derived_cases
import launch_calls
import layer_cases
import pytest
import torch
from random_calls import BF16, FP16, FP32

import rwkv_jit
from rwkv_jit.ahead import warm
from rwkv_jit.desk import cli, commands
from rwkv_jit.kernels import compiler, identity, kernel, signatures
from rwkv_jit.kernels.errors import CompileError, UnsupportedConfigError
from rwkv_jit.schedules.build_command import OPS
from rwkv_jit.schedules.table import ALL

HEADS, HEAD_SIZE, CHANNELS, TOKENS = 16, 64, 96, 256
WITH_PACKED = [name for name, op in ALL.items() if op.has_heads]
# What else a call of `derived_cases` has, by its words, as `warm` is told it.
SWITCHES = {
    "norm": {"qk_norm": True}, "sigmoid": {"beta_map": "sigmoid"}, "twice_sigmoid": {"beta_map": "twice_sigmoid"},
    "bounded": {"lower_bound": -5.0}, "softplus": {"dt_softplus": True}, "limit": {"least_step": 0.1, "most_step": 0.7},
}  # fmt: skip
INPUTS = {"raw": ["A_log"], "bounded": ["A_log"], "bias": ["dt_bias"], "D": ["D"], "z": ["z"], "wide": ["D"]}


class Cache:
    """The kernels that are there; nothing is compiled."""

    def __init__(self):
        self.keys = set()

    def clear(self):
        """Forget all kernels, and calls that have come before."""
        self.keys.clear()
        kernel.forget()
        signatures.forget()

    def keep(self, requests, *_, **__):
        self.keys |= {kernel.memory_key(request) for request in requests}
        return []


@pytest.fixture
def cache(on_gpu, without_values, monkeypatch):
    """An sm_90 whose calls find what `warm` or the command line has listed, and nothing else."""
    on_gpu.use("sm_90")
    made, serve = Cache(), on_gpu.serve

    def stored(request, *rest):
        return serve(request, *rest) if kernel.memory_key(request) in made.keys else None

    monkeypatch.setattr(warm, "compile_all", made.keep)
    monkeypatch.setattr(commands, "_compile", made.keep)
    monkeypatch.setattr(kernel, "_stored", stored)
    monkeypatch.setattr(identity, "identity", lambda: "12.9 0123abcd")
    monkeypatch.setattr(compiler, "target_for", lambda arch, newer: arch)
    monkeypatch.setenv("RWKVJIT_ASSERT_CACHED", "1")
    return made


def run_commands(call, most=8):
    """Run what errors of a call say until it passes; return the commands."""
    said = []
    for _ in range(most):
        try:
            call()
            return said
        except CompileError as error:
            text = str(error)
        match = re.fullmatch(
            r"RWKVJIT_ASSERT_CACHED is set and \w+ for \w+ is not in the cache; to compile it: (.*)", text
        )
        assert match, text
        program, *arguments = match[1].split()
        assert program == "rwkv-jit"
        assert match[1] not in said, match[1]
        said.append(match[1])
        assert cli.main(arguments) == 0
    raise AssertionError(said)


# ---- ops ---------------------------------------------------------------------------------------------------------


def call_of(op, how, mode, dtype=BF16, wide=None, heads=HEADS, tokens=TOKENS, head_size=HEAD_SIZE):
    """Return a call in a mode, and what `warm` is told of it."""
    wide = wide or dtype
    trains, bounds = mode == "training", [0, 1, 7, 12, tokens] if mode == "packed" else None
    told = {"head_sizes": head_size, "dtypes": dtype, "w_dtype": wide, "backward": trains}
    options, packing = {}, {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    if op in derived_cases.WAYS:
        words, key_heads = how.split(), heads if op == "hgrn2" else heads // 2
        sizes = (1 if bounds else 2, tokens, key_heads, heads, head_size, head_size)
        case = derived_cases.make(op, how, sizes, dtype, wide, has_state=False)
        arrays, options = list(case.inputs.values()), {**case.options, **case.parameters}
        told |= {"heads": heads, "key_heads": key_heads}
        for word in words:
            told |= SWITCHES.get(word, {})
        optional = {name: wide for word in words for name in INPUTS.get(word, ())}
        optional |= {"D": FP32} if "D" in words else {}
        told["inputs"] = optional | ({"A": wide} if op == "ssd" else {}) | ({"z": dtype} if "z" in words else {})
    else:
        batch = 1 if bounds else 2
        dims = {"B": batch, "T": tokens, "H": heads, "G": heads, "K": head_size, "V": head_size, "C": CHANNELS}
        arrays = [
            torch.zeros([dims[dim] for dim in shape], dtype=wide if name in ALL[op].wide else dtype)
            for name, shape in ALL[op].inputs.items()
        ]
        if not ALL[op].has_heads:
            told |= {"head_sizes": None}
        if op == "timex":
            told |= {"tokens": tokens, "batches": batch}
        if how:
            options["decay"] = told["decay"] = how
    tensors = [x.requires_grad_(trains) for x in arrays]
    tensors += [x.requires_grad_(trains) for x in options.values() if isinstance(x, torch.Tensor)]

    def call(**states):
        results = getattr(rwkv_jit, op)(*arrays, **packing, **options, **states)
        y = results[0] if isinstance(results, tuple) else results
        if trains:
            torch.autograd.grad(y, tensors, torch.ones_like(y))

    return call, told


CASES = [
    (op, how, mode)
    for op in ALL
    for how in derived_cases.WAYS.get(op, ("", "sigmoid") if op == "wkv7" else ("",))
    for mode in ("forward", "training", *(["packed"] if op in WITH_PACKED else []))
]
SIZES = {
    "usual": {}, "few heads": {"heads": 2, "tokens": 1024}, "long": {"tokens": 2100, "heads": 20},
    "heads of 128": {"head_size": 128, "heads": 40}, "few heads of 128": {"head_size": 128, "heads": 4, "tokens": 2100},
    "wide gates": {"wide": FP32}, "float32": {"dtype": FP32, "wide": FP32, "tokens": 40},
    "short": {"dtype": FP16, "tokens": 17}, "one token": {"tokens": 21, "head_size": 40}, "large": {"head_size": 200},
}  # fmt: skip


def sizes_of(op, how, mode, names, pytestconfig):
    """Return sizes of a call: a share of these in each mode of an op, other ones of the next op, or all with --full."""
    names = list(names)
    if pytestconfig.getoption("--full"):
        return [SIZES[name] for name in names]
    modes = [each for each in CASES if each[:2] == (op, how)]
    share = -(-len(names) // len(modes))
    begin = share * modes.index((op, how, mode)) + list(ALL).index(op)
    return [SIZES[names[place % len(names)]] for place in range(begin, begin + share)]


@pytest.mark.parametrize(("op", "how", "mode"), CASES)
def test_calls_find_what_was_warmed(op, how, mode, cache, pytestconfig):
    names = SIZES if how == derived_cases.WAYS.get(op, ("",))[-1] else ("usual", "few heads", "heads of 128")
    for sizes in sizes_of(op, how, mode, names, pytestconfig):
        call, told = call_of(op, how, mode, **sizes)
        cache.clear()
        with pytest.raises(CompileError):
            call()
        rwkv_jit.warm(op, arch="sm_90", **told)
        call()


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("op", WITH_PACKED)
def test_a_few_tokens_find_what_was_warmed_and_what_a_command_compiles(op, has_state, cache):
    how = derived_cases.WAYS.get(op, ("",))[-1]
    for tokens, heads in ((1, HEADS), (1, 512), (5, 2), (5, 512)):
        call, told = call_of(op, how, "forward", tokens=tokens, heads=heads)
        if has_state:
            call = partial(call, initial_state=torch.zeros(2, heads, HEAD_SIZE, HEAD_SIZE), output_final_state=True)
        cache.clear()
        rwkv_jit.warm(op, arch="sm_90", **told)
        call()
        cache.clear()
        (command,) = run_commands(call)
        assert "--direction" not in command


@pytest.mark.parametrize(("op", "how", "mode"), CASES)
def test_errors_name_the_command_that_compiles_what_is_missing(op, how, mode, cache, pytestconfig):
    for sizes in sizes_of(op, how, mode, ("usual", "few heads of 128", "wide gates"), pytestconfig):
        call, _ = call_of(op, how, mode, **sizes)
        cache.clear()
        said = run_commands(call)
        assert said
        assert {command.split()[3] for command in said} == {op}


# ---- pools, and functions of a layer -----------------------------------------------------------------------------

VERBS = [(op, verb) for op in ALL for verb in ("update", "varlen") if hasattr(rwkv_jit, f"{op}_{verb}")]


@pytest.mark.parametrize(("op", "verb"), VERBS)
def test_calls_over_a_pool_find_what_commands_compile(op, verb, cache, pytestconfig):
    """Half of the sizes of each op and verb in turn, or all with --full."""
    if op == "wkv4":
        tensors = [torch.zeros(CHANNELS), torch.zeros(CHANNELS), *torch.zeros(2, 3, CHANNELS)]
        run_commands(partial(rwkv_jit.wkv4_update, torch.zeros(3, 3, CHANNELS), *tensors))
        return
    first, step = (0, 1) if pytestconfig.getoption("--full") else (VERBS.index((op, verb)) // 2 % 2, 2)
    for each in itertools.islice(launch_calls._pools(op, verb), first, None, step):
        cache.clear()
        assert run_commands(each.run)


@pytest.mark.parametrize("op", list(layer_cases.WAYS))
def test_functions_of_a_layer_find_what_commands_compile(op, cache):
    for how in layer_cases.WAYS[op]:
        for size, heads, dtype, parameters in ((64, 16, BF16, FP32), (24, 2, FP16, FP16)):
            launch_calls._seeded(op, how)
            sizes = layer_cases.sizes_of(op, how, 100, heads, size)
            case = layer_cases.make(op, how, sizes, dtype, parameters)
            for wants in (False, True):
                cache.clear()
                assert run_commands(partial(launch_calls._run, case.run, case.tensors, wants))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_shift_mix_finds_what_commands_compile(tokens, packed, cache):
    x, w, mixes = torch.zeros(2, tokens, CHANNELS, dtype=BF16), torch.zeros(CHANNELS), torch.zeros(3, CHANNELS)
    options = {"cu_seqlens": torch.tensor([0, 1, 2 * tokens])} if packed else {}
    x = x.flatten(0, 1) if packed else x
    indices = torch.arange(2)
    pool = torch.zeros(4, CHANNELS, dtype=FP16)
    assert run_commands(partial(rwkv_jit.shift_mix, x, w, w, mixes, pool, state_indices=indices, **options))


@pytest.mark.parametrize("bias", [None, FP32])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolutions_find_what_commands_compile(bias, activation, cache):
    x, weight = torch.zeros(2, 9, CHANNELS, dtype=BF16), torch.zeros(CHANNELS, 3, dtype=BF16)
    given = {"bias": None if bias is None else torch.zeros(CHANNELS, dtype=bias), "activation": activation}
    assert run_commands(partial(rwkv_jit.causal_conv1d, x, weight, **given))
    x.requires_grad_()
    y, _ = rwkv_jit.causal_conv1d(x, weight, **given)
    assert len(run_commands(partial(torch.autograd.grad, y, [x], [torch.ones_like(y)], retain_graph=True))) < 2
    pool = torch.zeros(3, CHANNELS, 5, dtype=FP16)
    assert run_commands(partial(rwkv_jit.causal_conv1d_update, x.detach(), pool, weight, **given))


def test_functions_of_a_layer_find_what_was_warmed(cache):
    x, w = torch.zeros(2, 9, CHANNELS, dtype=BF16), torch.zeros(CHANNELS)
    for leaves in ([], [x]):
        rwkv_jit.warm("norm_shift", widths=CHANNELS, arch="sm_90", w_dtype=FP32, mixes=6, backward=bool(leaves))
        for leaf in leaves:
            leaf.requires_grad_()
        residual, mixed, _ = rwkv_jit.norm_shift(x, w, w, torch.zeros(6, CHANNELS))
        if leaves:
            torch.autograd.grad(mixed, leaves, [torch.ones_like(y) for y in mixed])
    rwkv_jit.warm("causal_conv1d", widths=CHANNELS, arch="sm_90", taps=4, activation="silu", updates=True)
    weight = torch.zeros(CHANNELS, 4, dtype=BF16)
    rwkv_jit.causal_conv1d(x.detach(), weight, activation="silu")
    rwkv_jit.causal_conv1d_update(x[:, 0].detach(), torch.zeros(3, CHANNELS, 3), weight, activation="silu")


# ---- what is refused ---------------------------------------------------------------------------------------------

REFUSED = [
    ("kda", {"norm": True}, TypeError, "warm() got an unexpected keyword argument 'norm' (did you mean 'qk_norm'?)"),
    ("gla", {"qk_norm": True}, TypeError, "warm() got an unexpected keyword argument 'qk_norm'; there are op, "),
    ("kda", {"inputs": ["D"]}, ValueError, "inputs: expected one of g, beta, A_log, dt_bias, got 'D'"),
    ("kda", {"inputs": {"g": torch.int8}}, TypeError, "inputs['g']: expected torch.float16 or "),
    ("kda", {"inputs": ["dt_bias"]}, ValueError, "dt_bias: needs A_log among the inputs too"),
    ("kda", {"beta_map": "tanh"}, ValueError, "beta_map: expected one of identity, sigmoid, twice_sigmoid, got 'tanh'"),
    ("kda", {"lower_bound": 1.0, "inputs": ["A_log"]}, ValueError, "decay_bound: expected a negative number"),
    ("kda", {"heads": 4, "key_heads": 3}, ValueError, "key_heads: expected a divisor of the 4 heads, got 3"),
    ("kda", {"key_heads": 3}, TypeError, "heads: expected a number where key_heads is given, got None and 3"),
    ("wkv7", {"heads": 4}, ValueError, "heads: kernels of wkv7 do not depend on how many there are, got 4"),
    ("token_shift", {"head_sizes": None}, TypeError, "widths: token_shift needs some, got None"),
    ("token_shift", {}, ValueError, "head_size: token_shift has none, got 64"),
    ("gated_norm", {"widths": 8}, ValueError, "width: is only for shift_mix, activate, gated, token_shift, "),
    ("token_shift", {"head_sizes": None, "widths": 8, "mixes": 7}, UnsupportedConfigError, "mixes: expected 1 to 6"),
    ("causal_conv1d", {"head_sizes": None, "widths": 8, "taps": 9}, UnsupportedConfigError, "taps: expected 2 to 8"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "options", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused(op, options, error, message, cache):
    with pytest.raises(error, match=re.escape(message)):
        rwkv_jit.warm(op, **{"head_sizes": 64, "arch": "sm_90", **options})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kda --head-size 64 --taps 3", "--taps: kda has none, got 3"),
        ("kda --head-size 64 --inputs D", "--inputs: expected some of q, k, v, g, beta, A_log, dt_bias, got 'D'"),
        ("kda", "--head-size: kda needs some, got none"),
        ("shift_mix --width 8 --direction backward", "--direction: shift_mix has no kernels for backward"),
        ("kda --head-size 64 --qk-norm 1", "--qk-norm: expected yes or no, got '1'"),
    ],
)
def test_command_says_which_option_does_not_fit(words, message, cache, capsys):
    with contextlib.suppress(SystemExit):  # of what the parser refuses
        assert cli.main(["warm", "--arch", "sm_90", "--op", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_every_switch_has_an_option():
    parsed = cli._parser().parse_args(["warm", "--op", "kda"])
    assert {name for op in OPS.values() for name in op.traits} <= vars(parsed).keys()
