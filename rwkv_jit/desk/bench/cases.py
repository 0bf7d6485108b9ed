"""What is measured: an op on a shape in a phase, and inputs like a model's, in sets that no cache holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

import rwkv_jit
from rwkv_jit.plain import reference
from rwkv_jit.schedules import derived_table as derived
from rwkv_jit.schedules import table
from rwkv_jit.schedules.problem import Op


def _with_state(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return what answers as the other ops do."""
    return lambda *given, **options: (function(*given, **options), None)


OPS: dict[str, Callable[..., Any]] = {
    # The channels of timex's w [C, T] and k [B, C, T] are those of all heads.
    **{op: getattr(rwkv_jit, op) for op in table.OPS}, "timex": _with_state(rwkv_jit.timex),
}  # fmt: skip
REFERENCES: dict[str, Callable[..., Any]] = {
    **{op: getattr(reference, f"{op}_ref") for op in table.OPS}, "timex": _with_state(reference.timex_ref),
}  # fmt: skip
# What is made of these is measured by suites alone: what the models do first is a part of the call. Which op runs it.
DERIVED = {"kda": "wkv7", "gated_delta_rule": "wkv7", "delta_rule": "wkv7", "simple_gla": "gla", "ssd": "gla"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# As in the models, where that is not the default.
OPTIONS: dict[str, dict[str, Any]] = {
    "wkv7": {"decay": "sigmoid"}, **dict.fromkeys(("kda", "gated_delta_rule", "delta_rule"), {"qk_norm": True}),
}  # fmt: skip
UPDATE = "update"
PHASES = ("forward", "backward", "forward+backward", "decode", "prefill", UPDATE)
WITH_STATES = ("decode", "prefill")
OF_ONE_TOKEN = ("decode", UPDATE)
WITHOUT_HEADS = tuple(name for name, op in table.OPS.items() if not op.has_heads)
# Kinds of inputs. Of one head means of one of a batch: of 512 where a batch of 8 has 64. Those of states are for
# updates: usual ones are float32, in the layout that calls of the op take by themselves.
KINDS = {
    "usual": "", "strong": "strong decays", "one-strong": "one head's decays strong", "packed": "16 packed",
    "bf16-states": "bfloat16 states", "kv-states": "states [K, V]", "vk-states": "states [V, K]",
    "bf16-kv-states": "bfloat16 states [K, V]", "bf16-vk-states": "bfloat16 states [V, K]",
}  # fmt: skip
KINDS_OF_SUITES = {**KINDS, "16-keys": "16 key heads", "strong-gates": "strong gates", "slow-gates": "slow gates"}
_WITH_HEADS = tuple(name for name, op in table.OPS.items() if op.has_heads)
_WITH_DECAYS = tuple(name for name in _WITH_HEADS if table.OPS[name].decay != "none")
_WITH_LAYOUT = {x: tuple(name for name in _WITH_HEADS if table.OPS[name].state_layout == x) for x in ("vk", "kv")}
_OPS_OF_KINDS = {
    "16-keys": tuple(op for op in DERIVED if op != "ssd"), "strong-gates": ("kda",), "slow-gates": ("kda",),
    "strong": _WITH_DECAYS, "one-strong": _WITH_DECAYS, "packed": _WITH_HEADS, "bf16-states": _WITH_HEADS,
    "kv-states": _WITH_LAYOUT["vk"], "bf16-kv-states": _WITH_LAYOUT["vk"],
    "vk-states": _WITH_LAYOUT["kv"], "bf16-vk-states": _WITH_LAYOUT["kv"],
}  # fmt: skip
UPDATES: dict[str, Callable[..., Tensor]] = {op: getattr(rwkv_jit, f"{op}_update") for op in _WITH_HEADS}
_PACKED = 16  # sequences
MOST_SETS = 256


class Case(NamedTuple):
    """A call that is measured; a decode takes one token and a state, a prefill returns the state.

    An update takes one token of each sequence, whose states are in a pool and change in place.
    """

    op: str
    shape: tuple[int, int, int, int, int]  # B, T, H, K, V; the channels of wkv4 and timex are those of all heads
    dtype: torch.dtype
    phase: str = "forward"
    wide_decay: bool = False  # whether w is float32 beside inputs in 16 bits
    kind: str = "usual"  # of KINDS

    @property
    def shown(self) -> list[int]:
        """The shape as it is written for the op: [B, T, H, K, V], wkv4 [B, T, C], timex [B, C, T]."""
        batch, tokens, heads, head_size, _ = self.shape
        channels = heads * head_size
        return {"wkv4": [batch, tokens, channels], "timex": [batch, channels, tokens]}.get(self.op, list(self.shape))

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward in it."""
        return "backward" in self.phase

    @property
    def with_state(self) -> bool:
        """Whether the state behind the tokens is returned."""
        return self.phase in WITH_STATES

    @property
    def decay(self) -> str:
        """How w is read: as in the op's models, but for decays that these do not have."""
        return "raw" if self.op == "wkv7" and "strong" in self.kind else decay_of(self.op)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the states."""
        return torch.bfloat16 if "bf16" in self.kind else torch.float32

    @property
    def state_layout(self) -> str:
        """The order of the last two dimensions of a state of an op that has heads."""
        return next((layout for layout in ("vk", "kv") if layout in self.kind), op_of(self.op).state_layout)

    @property
    def options(self) -> dict[str, Any]:
        """What calls of the op and of its reference are given beside the inputs."""
        own = {name: self.decay if name == "decay" else x for name, x in OPTIONS.get(self.op, {}).items()}
        is_usual = self.state_layout == op_of(self.op).state_layout
        return own if is_usual else {**own, "state_layout": self.state_layout}

    @property
    def key_heads(self) -> int:
        """The heads of keys, of which one of a state space is for all."""
        return 16 if self.kind == "16-keys" else 1 if self.op == "ssd" else self.shape[2]

    def check(self) -> Case:
        """Return the case itself. Raises ValueError where the op has no such phase, or no such inputs."""
        phases = phases_of(self.op)
        if self.phase not in phases:
            raise ValueError(f"--phase: expected one of {', '.join(phases)} for {self.op}, got {self.phase}")
        if self.op not in ops_of(self.kind):
            raise ValueError(f"--inputs: {self.op} has none that are {self.kind}")
        if self.kind.endswith("states") and self.phase != UPDATE:
            raise ValueError(f"--inputs: {self.kind} are only for updates, not for {self.phase}")
        if self.shape[2] % self.key_heads:
            raise ValueError(f"--inputs: {self.kind} are for a multiple of as many heads, and not for {self.shape[2]}")
        if self.kind == "packed" and (self.shape[0] != 1 or self.shape[1] < _PACKED or self.phase == "decode"):
            raise ValueError(f"--inputs: packed ones are a batch of 1 with {_PACKED} or more tokens, and no decode")
        return self


class Given(NamedTuple):
    """What a call is given: leaves that want gradients, the gradient of y, the state of a decode, ends of sequences.

    The state of an update is the pool, and `slots` says where the state of each sequence lies in it.
    """

    inputs: list[Tensor]
    dy: Tensor
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    slots: Tensor | None = None

    def size(self) -> int:
        """Return the bytes of all."""
        return sum(x.nbytes for x in (*self.inputs, self.dy, self.state, self.slots) if x is not None)

    def states(self, most: int | None = None) -> Tensor | None:
        """Return the states of the first sequences, of all by default, one after another; of a pool a copy."""
        if self.state is None:
            return None
        return self.state[:most] if self.slots is None else self.state[self.slots[:most]]


def op_of(name: str) -> Op:
    """Return what an op is."""
    return table.OPS.get(name) or derived.OPS[name]


def function_of(op: str) -> Callable[..., Any]:
    """Return an op, as it answers here."""
    return OPS[op] if op in OPS else _derived(op, getattr(rwkv_jit, op))


def reference_of(op: str) -> Callable[..., Any]:
    """Return the reference of an op, as it answers here."""
    return REFERENCES[op] if op in OPS else _derived(op, getattr(rwkv_jit, f"{op}_ref"))


def _derived(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the inputs that have tokens alone."""

    def of_states(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:
        return function(x, dt, rates_of(x.shape[2], x.device), B, C, **options)

    return of_states if op == "ssd" else function


@cache
def rates_of(heads: int, device: torch.device) -> Tensor:
    """Return A of a state space as models begin with, which is the same for all."""
    return -torch.linspace(1, 16, heads, device=device)


def ops_of(kind: str) -> Sequence[str]:
    """Return the ops that have inputs of a kind."""
    return _OPS_OF_KINDS.get(kind, (*OPS, *DERIVED))


def phases_of(op: str) -> Sequence[str]:
    """Return the phases that an op has."""
    without = {"wkv4": (UPDATE,), **dict.fromkeys(("timex", *DERIVED), (*WITH_STATES, UPDATE))}.get(op, ())
    return tuple(phase for phase in PHASES if phase not in without)


# ---- shapes ------------------------------------------------------------------------------------------------------


def read_shape(text: str) -> tuple[int, ...]:
    """Return B, T, H, N from a command line. Raises ValueError where these are not four positive numbers."""
    sizes = _sizes(text)
    if len(sizes) != 4:
        raise ValueError(f"shape: expected four positive numbers B,T,H,N, got {text!r}")
    return sizes


def _sizes(text: str) -> tuple[int, ...]:
    """Return positive numbers that commas part; none where something is no such number."""
    parts = text.split(",")
    return tuple(map(int, parts)) if all(part.strip().isdigit() and int(part) > 0 for part in parts) else ()


def shape_of(op: str, text: str, phase: str = "forward") -> tuple[int, int, int, int, int]:
    """Return B, T, H, K, V from a command line, where B,T,H,N stands for equal head sizes.

    T is 1 for a decode and for an update. Raises ValueError where these are not four or five positive numbers; of wkv4
    and timex not those of B,T,C and B,C,T either.
    """
    sizes = _sizes(text)
    if len(sizes) not in ((3, 4) if op in WITHOUT_HEADS else (4, 5)):
        forms = {"wkv4": "B,T,C or B,T,H,N", "timex": "B,C,T or B,T,H,N"}.get(op, "B,T,H,N or B,T,H,K,V")
        raise ValueError(f"--shape: expected positive numbers {forms} for {op}, got {text!r}")
    if len(sizes) == 3:
        batch, tokens, channels = sizes if op == "wkv4" else (sizes[0], sizes[2], sizes[1])
        sizes = (batch, tokens, 1, channels)
    batch, tokens, heads, head_size = sizes[:4]
    return batch, 1 if phase in OF_ONE_TOKEN else tokens, heads, head_size, sizes[-1]


# ---- inputs ------------------------------------------------------------------------------------------------------


def decay_of(op: str) -> str:
    """Return how w is read in the models of an op; "none" where it has no such w."""
    return str(OPTIONS.get(op, {}).get("decay", op_of(op).decay if op_of(op).has_heads else "none"))


def names_of(op: str) -> tuple[str, ...]:
    """Return the names of an op's inputs, in its order."""
    return op_of(op).public_names


def make_inputs(op: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Return inputs like a model's, in the op's order, all of one dtype, that require gradients.

    The shape is B, T, H and the head size, or B, T, H, K, V.
    """
    batch, tokens, heads, head_size = shape[:4]
    channels = heads * head_size  # of all heads

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device)

    if op == "wkv4":
        k, v = (random(batch, tokens, channels) for _ in range(2))
        given = [torch.linspace(-6, 1, channels, device=device), random(channels) * 0.5, k, v]
        return [x.to(dtype).requires_grad_() for x in given]
    if op == "timex":
        return [x.to(dtype).requires_grad_() for x in (random(channels, tokens), random(batch, channels, tokens))]
    keys, values = (batch, tokens, heads, head_size), (batch, tokens, heads, shape[-1])
    r, k, v, kk, w = (random(*sizes) for sizes in (keys, keys, values, keys, keys))
    kk = torch.nn.functional.normalize(kk, dim=-1)
    r, k, w = r * 0.5, k * 0.5, w - 0.6
    raw = w - 2.4  # RWKV-5 and 6 begin with -6 to -1; where one of many is above 4, a head leaves the range of chunks
    bonus = random(heads, head_size)
    made = {
        "wkv5": [r, k, v, raw[0, 0], bonus],
        "wkv6": [r, k, v, raw, bonus],
        "wkv7": [r, w, k, v, -kk, kk * torch.rand_like(kk)],
        "gla": [r, k, v, torch.nn.functional.logsigmoid(w) / 16],
        "linear_attention": [r, k, v],
    }[op]
    return [x.to(dtype).requires_grad_() for x in made]


def _inputs_of_derived(case: Case, device: str) -> list[Tensor]:
    """Return inputs like a model's of an op that is made of others; log-decays and steps of heads are float32."""
    batch, tokens, heads, head_size, value_size = case.shape

    def random(*sizes: int) -> Tensor:
        return torch.randn(batch, tokens, *sizes, device=device)

    keys = case.key_heads, head_size
    made = {
        "q": random(*keys), "k": random(*keys), "B": random(*keys), "C": random(*keys), "v": random(heads, value_size),
        "x": random(heads, value_size), "beta": torch.sigmoid(random(heads)), "dt": torch.exp(random(heads) - 4),
        "g": -softplus(random(heads, head_size) - 0.6 if case.op == "kda" else random(heads) - 2),
    }  # fmt: skip
    if case.op == "simple_gla":  # which has no norm of them
        made |= {name: made[name] * 0.5 for name in "qk"}
    if case.kind == "strong-gates":  # with which all channels forget within some tokens
        made["g"] = -5 * torch.sigmoid(random(*keys))
    if case.kind == "slow-gates":  # as Kimi Linear begins: steps of channels from 0.001 to 0.1
        steps = torch.exp(random(*keys) / 4) * 10 ** (-1 - 2 * torch.rand(*keys, device=device))
        made["g"] = rates_of(heads, device)[:, None] * steps
    wide = () if case.op == "kda" else ("g", "dt")
    return [made[name].to(torch.float32 if name in wide else case.dtype).requires_grad_() for name in names_of(case.op)]


def given_for(case: Case, device: str = "cuda") -> Given:
    """Return what a call of a case is given."""
    names = names_of(case.op)
    if case.op in DERIVED:
        inputs = _inputs_of_derived(case, device)
        return Given(inputs, torch.randn_like(inputs[names.index("x" if case.op == "ssd" else "v")].detach()))
    inputs = make_inputs(case.op, case.shape, case.dtype, device)
    index = next((names.index(name) for name in ("w", "g") if name in names), None)
    if index is not None and "strong" in case.kind:
        inputs[index] = _strong(case, inputs[index].detach()).requires_grad_()
    if index is not None and case.wide_decay:
        inputs[index] = inputs[index].detach().float().requires_grad_()
    like_y = inputs[1] if case.op == "timex" else inputs[names.index("v")]
    state = _state(case, device) if case.phase in OF_ONE_TOKEN else None
    slots = torch.randperm(case.shape[0], device=device).int() if case.phase == UPDATE else None
    return Given(inputs, torch.randn_like(like_y, requires_grad=False), state, ends_of(case, device), slots)


def ends_of(case: Case, device: str = "cuda") -> Tensor | None:
    """Return where packed sequences end, whose lengths grow from a few tokens to a tenth of all; None for others."""
    if case.kind != "packed":
        return None
    shares = torch.linspace(0, 1, _PACKED + 1, dtype=torch.float64).pow(1.5)
    return shares.mul(case.shape[1]).ceil().long().maximum(torch.arange(_PACKED + 1)).to(device)


def _strong(case: Case, w: Tensor) -> Tensor:
    """Return decays of e^-2 to e^-8 a step, for all heads or for one of the batch beside those of a model."""
    rates = 2 + 6 * torch.rand_like(w, dtype=torch.float32)
    strong = rates.log() if case.decay == "raw" else -rates
    if case.kind == "strong":
        return strong.to(w.dtype)
    if case.op == "wkv7":  # the model's are read as sigmoids
        w = torch.log(reference.SIGMOID_RATE * torch.sigmoid(w.float())).to(w.dtype)
    one = (slice(0, 1),) if w.dim() == 2 else (slice(0, 1), slice(None), slice(0, 1))
    w[one] = strong[one].to(w.dtype)
    return w


def _state(case: Case, device: str) -> Tensor:
    batch, _, heads, head_size, value_size = case.shape
    if case.op == "wkv4":  # num, den and max
        made = torch.randn(batch, 3, heads * head_size, device=device)
        made[:, 1] = made[:, 1].abs() + 0.5
        return made
    sizes = (value_size, head_size) if case.state_layout == "vk" else (head_size, value_size)
    return torch.randn(batch, heads, *sizes, device=device).to(case.state_dtype)


def sets_for(case: Case, cache_bytes: int) -> list[Given]:
    """Return sets of inputs that calls take in turn: together more than twice `cache_bytes`, but at most MOST_SETS.

    A set comes round when everything of it has left the cache.
    """
    first = given_for(case)
    count = min(2 * cache_bytes // first.size() + 1, MOST_SETS)
    return [first, *(given_for(case) for _ in range(count - 1))]


def are_cold(sets: Sequence[Given], cache_bytes: int) -> bool:
    """Return whether sets that are taken in turn find nothing of them in a cache."""
    return sum(given.size() for given in sets) > 2 * cache_bytes


# ---- floors ------------------------------------------------------------------------------------------------------


def least_bytes(case: Case) -> int:
    """Return the fewest bytes through memory: every input is read once in a pass, every result written once.

    With I the bytes of the inputs, Y those of y, which are those of its gradient, and S those of the state, float32 but
    in updates of other states:

        forward I + Y;   backward I + Y + I;   forward+backward both;   prefill I + Y + S
        decode and update I + Y + 2 S

    The backward reads the inputs again, as the gradient of y comes after the whole forward. What a kernel keeps between
    the passes, or between its own parts, is not counted: an algorithm could do without it. Nor are slots.
    """
    op, item = op_of(case.op), case.dtype.itemsize
    batch, _, heads, head_size, value_size = case.shape
    channels = heads * head_size
    sizes = {**dict(zip("BTHKV", case.shape, strict=True)), "C": channels, "G": case.key_heads}
    wide = {"w"} if case.wide_decay else set() if case.op == "kda" or case.op not in DERIVED else {"g", "dt"}

    def elements(dims: str) -> int:
        return math.prod(sizes[dim] for dim in dims)

    inputs = sum(elements(dims) * (4 if name in wide else item) for name, dims in op.inputs.items())
    output = item * elements(op.output)
    sequences = _PACKED if case.kind == "packed" else batch
    state = case.state_dtype.itemsize * sequences * channels * (value_size if op.has_heads else 3)
    forward, backward = inputs + output, inputs + output + inputs
    return {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward + backward,
        "prefill": forward + state,
        **dict.fromkeys(OF_ONE_TOKEN, forward + 2 * state),
    }[case.phase]


def floor_ms(case: Case, copy_tb_per_s: float) -> float:
    """Return the milliseconds of the fewest bytes at the bandwidth of a copy, in terabytes (10^12) a second."""
    return least_bytes(case) / copy_tb_per_s * 1e-9
