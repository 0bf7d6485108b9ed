"""Updates of ops whose decays and values are computed of other inputs: one kernel, beside float64, and its compilation.

Nothing is rounded before it is written, so that y and states are as near to float64 as their types are.
"""

import itertools
import math

import derived_cases
import pytest
import torch
from comparing import relative
from problems import by_turns, problem_of

import rwkv_jit
from rwkv_jit.kernels import kernel
from rwkv_jit.kernels.errors import UnsupportedConfigError
from rwkv_jit.schedules import update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {FP32: 2e-6, FP16: 6e-4, BF16: 4e-3}
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
BESIDE = {
    "kda": ("", "norm sigmoid", "raw bias twice_sigmoid norm", "bounded flat bias norm", "raw"),
    "gated_delta_rule": ("", "norm twice_sigmoid", "raw bias sigmoid norm", "raw"),
    "delta_rule": ("", "norm sigmoid", "twice_sigmoid"),
    "gated_delta_rule2": ("", "norm", "raw bias", "bounded bias norm"),
    "simple_gla": ("", "fixed"),
    "hgrn2": ("",),
    "ssd": ("", "D z bias softplus", "wide limit", "bias D softplus limit", "z bias"),
}  # fmt: skip
ALL = [(op, how) for op, several in BESIDE.items() for how in several]
# Heads of keys and of values, and their sizes: of all lanes, of some, and of odd ones.
SIZES = [(2, 4, 16, 24), (1, 3, 13, 33), (2, 2, 64, 64), (1, 4, 33, 13), (1, 2, 64, 20), (2, 6, 24, 16), (1, 1, 130, 8)]
# Inputs, gates and rates.
TYPES = [(BF16, FP32), (FP32, FP32), (FP16, FP16), (BF16, BF16), (FP16, FP32)]
LAYOUTS, STATES = ("vk", "kv"), (FP32, BF16, FP16)


def pool_of(state, slots, gap):
    """A pool with so many slots and a gap behind each, in which states of rows lie in `slots`, and all numbers."""
    count = max(slots) + 2
    memory = torch.randn(count, state[0].numel() + gap).to(state.dtype)
    pool = memory[:, : state[0].numel()].view(count, *state.shape[1:])
    for row, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = state[row]
    return memory, pool


def check(op, how, layout, state_type, tokens, turn):
    """A call whose rows have slots, none, or one outside of the pool, and may write to other slots than they read."""
    dtype, wide = TYPES[turn % len(TYPES)]
    sizes = SIZES[turn % len(SIZES)]
    case = derived_cases.make(op, how, (4, tokens, *sizes), dtype, wide, state_type, layout=layout)
    slots = [3, -1, 1, 2 if turn % 3 == 0 else 0]
    memory, pool = pool_of(case.state, slots, 16 * (turn % 2))
    before = memory.clone()
    index = torch.int64 if turn % 2 else torch.int32
    rows, written, options = [0, 2], [3, 1], {}
    if turn % 3 == 0:  # the last one reads a slot, and writes none
        options["write_indices"] = torch.tensor([4, -1, 1, (0, len(pool))[turn % 2]], dtype=index)
        options["null_index"] = -1 if turn % 2 else 0
        rows, written = [0, 2, 3], [4, 1, None]
    elif turn % 3 == 1:
        slots[3] = len(pool) + 5
    else:
        rows, written = [0, 2, 3], [3, 1, 0]
    options["state_indices"] = torch.tensor(slots, dtype=index)
    given = case.part((slice(None), 0)) if tokens == 1 and turn % 2 else case
    y = derived_cases.pooled(given, "update", pool, **options).view(case.inputs["x" if op == "ssd" else "v"].shape)
    wanted, final = case.reference().run(getattr(rwkv_jit, f"{op}_ref"))
    assert relative(y[rows], wanted[rows]) <= LIMITS[dtype]
    for row, slot in zip(rows, written, strict=True):
        if slot is not None:
            assert relative(pool[slot], final[row]) <= LIMITS[state_type]
            pool[slot] = before[slot, : pool[0].numel()].view(pool[0].shape)
    assert torch.equal(memory, before)  # nothing else is written, not even between slots
    y[rows] = 0
    assert not y.any()


@pytest.mark.parametrize(("rule", "layout", "state_type"), by_turns(ALL, LAYOUTS, STATES))
@pytest.mark.parametrize("tokens", [1, 3])
def test_values_and_states(rule, layout, state_type, tokens, interpreted):
    turn = ALL.index(rule) + 3 * LAYOUTS.index(layout) + 7 * STATES.index(state_type) + 2 * tokens
    torch.manual_seed(turn)
    interpreted.use("sm_90" if turn % 2 else "sm_80")
    interpreted.multiprocessors = (132, 1)[turn // 2 % 2]  # blocks are few or many
    check(*rule, layout, state_type, tokens, turn)
    assert {launch.template for launch in interpreted.launches} == {"update_rules"}
    assert len(interpreted.launches) == 1


@pytest.mark.parametrize(("op", "how"), ALL)
def test_rows_without_indices_and_inputs_with_gaps(op, how, interpreted):
    """Row i has slot i, and inputs are parts of larger tensors, as where one product makes several of them."""
    torch.manual_seed(5)
    interpreted.use("sm_90")
    case = derived_cases.make(op, how, (2, 2, 1, 2, 12, 10), BF16, FP32, FP32)
    apart = {}
    for name, x in case.inputs.items():
        if x.dim() < 3 or name == "A":
            apart[name] = x
        else:
            memory = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
            memory[..., 1:-2] = x
            apart[name] = memory[..., 1:-2]
    pool = case.state.clone()
    y = derived_cases.pooled(case._replace(inputs=apart), "update", pool)
    wanted, final = case.reference().run(getattr(rwkv_jit, f"{op}_ref"))
    assert relative(y, wanted) <= LIMITS[BF16]
    assert relative(pool, final) <= LIMITS[FP32]


@pytest.mark.parametrize(("op", "how"), [(op, several[-1]) for op, several in BESIDE.items()])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_states_are_rounded_at_random(op, how, dtype, interpreted):
    """To one neighbour or the other, by the seed."""
    torch.manual_seed(6)
    interpreted.use("sm_80")
    case = derived_cases.make(op, how, (2, 1, 1, 2, 16, 16), BF16, FP32, dtype)
    pools = [case.state.clone() for _ in range(3)]
    for pool, seed in zip(pools, (1, 1, 2), strict=True):
        derived_cases.pooled(case, "update", pool, rounding="stochastic", seed=seed)
    assert torch.equal(pools[0], pools[1])
    assert not torch.equal(pools[0], pools[2])
    _, final = case.reference().run(getattr(rwkv_jit, f"{op}_ref"))
    apart = (pools[0].double() - final).abs() / final.abs().clamp_min(1e-2)
    assert 0.5 * torch.finfo(dtype).eps < apart.max() <= 1.01 * torch.finfo(dtype).eps
    assert abs(float((pools[0].double() - final).mean())) < 0.1 * torch.finfo(dtype).eps


STRONG = [-math.inf, -1e4, -104.0, -88.0, -20.0, -1e-30, 0.0, 0.0]
RAW = [-math.inf, -1e4, -104.0, -20.0, 0.0, 20.0, 104.0, 1e4]


@pytest.mark.parametrize(
    ("op", "how"),
    [(op, how) for op, how in ALL if "g" in derived_cases.make(op, how).inputs]
    + [("ssd", "softplus bias"), ("ssd", "")],
)
def test_any_decay_is_safe(op, how, interpreted):
    """Also none at all, and what is no number stays none, and stays in its head."""
    torch.manual_seed(7)
    interpreted.use("sm_90")
    case = derived_cases.make(op, how, (1, len(RAW), 1, 2, 8, 6), FP32, FP32, FP32)
    name = "dt" if op == "ssd" else "g"
    x = case.inputs[name]
    is_raw = "raw" in how or "bounded" in how or "softplus" in how
    values = torch.tensor(RAW if is_raw else [1e4, 104.0, 20.0, 1.0, 0.5, 1e-30, 0.0, 0.0] if op == "ssd" else STRONG)
    if "fixed" in how:
        x[0] = -math.inf
    else:
        values = values if op != "hgrn2" else values.clamp_max(-1e-3)
        x.copy_(values.view(1, -1, *[1] * (x.dim() - 2)).expand(x.shape))
    if "A_log" in case.parameters:
        case.parameters["A_log"][1] = 120.0
    if is_raw and op != "ssd":  # what is infinite times 0 is for nobody
        x.clamp_(-1e4, 1e4)
    for is_broken in (False, True):
        if is_broken:
            x[..., :1] = math.nan if "fixed" in how or x.dim() == 3 else x[..., :1]
            if x.dim() == 4:
                x[..., 0, :] = math.nan
        pool = case.state.clone()
        y = derived_cases.pooled(case, "update", pool)
        wanted, final = case.reference().run(getattr(rwkv_jit, f"{op}_ref"))
        for found, want in ((y, wanted), (pool, final)):
            assert torch.equal(found.isnan(), want.isnan())
            assert torch.allclose(found.nan_to_num().double(), want.nan_to_num(), rtol=1e-4, atol=1e-4)
        assert y.isnan().any() == is_broken


# ---- compilation -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("rule", "arch"), by_turns(ALL, ARCHS))
def test_compiles_everywhere_without_spills(rule, arch):
    """For usual heads and odd ones, one token and several, in both layouts."""
    turn = ALL.index(rule)
    choices = itertools.product(((128, 128), (64, 64), ((13, 33), (256, 64), (7, 7))[turn % 3]), (1, 3))
    for place, (sizes, tokens) in enumerate(choices):
        layout, state = LAYOUTS[(turn + place // 2) % 2], ("fp32", "bf16", "fp16")[(turn + place) % 3]
        given = problem_of(*rule, arch, sizes, tokens, layout, state, (turn + place) % 2 == 0)
        pool = update.Pool(5, 1 << 20, index_bytes=(4, 8)[turn % 2])
        for is_packed in (False, True):
            step = update.step(given, pool, is_packed)
            found = kernel.get(step.request(given.gpu)).resources["update_rules"]
            assert found.spill_bytes <= (16 if is_packed and arch == "sm_80" else 0)


@pytest.mark.usefixtures("from_ledger")
@pytest.mark.parametrize(("rule", "arch"), by_turns(ALL, [x for x in ARCHS if x != "sm_80"]))
def test_narrow_states_of_keys_that_do_not_fill_the_lanes(rule, arch):
    """They have predicates in the place of constants, so that as many threads as usual would spill."""
    for size, state in ((40, "bf16"), (72, "fp16")):
        given = problem_of(*rule, arch, (size, size), 1, "vk", state, True)
        step = update.step(given, update.Pool(5, 1 << 20))
        assert kernel.get(step.request(given.gpu)).resources["update_rules"].spill_bytes == 0


@pytest.mark.usefixtures("from_ledger")
def test_heads_that_need_too_much_shared_memory_are_refused():
    given = problem_of("kda", "norm", "sm_90", (64, 64), 1, "kv", "fp32")
    (made,) = update.schedule(given, update.Pool(1, 0)).requests(given.gpu)
    rule = "update_rules: head_size needs more than 48 KB of shared memory; got "
    with pytest.raises(UnsupportedConfigError, match=rule):
        kernel.get(made._replace(parameters={**made.parameters, "HEAD_SIZE": 8192, "ROWS": 1024}))
