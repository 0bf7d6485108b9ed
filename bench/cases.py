"""What is measured: an op on a shape in a phase, and inputs like a model's, in sets that no cache holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.desk import figures
from rwkv_jit.desk import inputs as of_ops
from rwkv_jit.desk.inputs import OF_ONE_TOKEN, UPDATE
from rwkv_jit.plain.reference import SIGMOID_RATE
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.table import ALL

# Phases over a pool of states, by the functions that are named after them: of a few tokens of each row, and of prompts.
REPLAY, VERIFY, VARLEN = "replay", "verify", "varlen"
OF_FEW = (UPDATE, REPLAY, VERIFY)
POOLED = (*OF_FEW, VARLEN)
PACKED, DECODES, PROMPTS = 16, 256, 4  # sequences
# Kinds of inputs. One head is one of one sequence. States are float32, in the layout that the op takes by itself.
KINDS = {
    "usual": "", "strong": "strong decays", "one-strong": "one head's decays strong", "packed": "16 packed",
    "bf16-states": "bfloat16 states", "kv-states": "states [K, V]", "vk-states": "states [V, K]",
    "bf16-kv-states": "bfloat16 states [K, V]", "bf16-vk-states": "bfloat16 states [V, K]",
}  # fmt: skip
# Ops that run others are measured by suites alone, with some kinds that the others do not have. A kind of suites may be
# several, with + between them, those of states last.
DERIVED = {name: op.through.name for name, op in ALL.items() if op.through is not None}
KINDS_OF_SUITES = {
    **KINDS, "16-keys": "16 key heads", "4-keys": "4 key heads", "strong-gates": "strong gates",
    "slow-gates": "slow gates", "served": f"{DECODES} decodes and {PROMPTS} prompts",
}  # fmt: skip


class Case(NamedTuple):
    """A call that is measured; a decode takes one token and a state, a prefill returns the state.

    An update takes a few tokens of each sequence, whose states are in a pool and change in place. A replay keeps tokens
    in a ring, in all phases of which there are rows, and a verify takes speculative ones. A varlen takes prompts.
    """

    op: str
    shape: tuple[int, ...]  # B, T, H, K, V; the channels of wkv4 and timex are those of all heads
    dtype: torch.dtype
    phase: str = "forward"
    wide_decay: bool = False  # whether w is float32 beside inputs in 16 bits
    kind: str = "usual"  # of KINDS_OF_SUITES

    @property
    def about(self) -> Op:
        """What the op is."""
        return ALL[self.op]

    @property
    def shown(self) -> list[int]:
        """The shape as it is written for the op: [B, T, H, K, V], wkv4 [B, T, C], timex [B, C, T]."""
        return of_ops.Case(*self[:3]).shown

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward in it."""
        return "backward" in self.phase

    @property
    def names(self) -> list[str]:
        """The names of the inputs, in the op's order."""
        named = zip(self.about.public_names, self.about.names, strict=True)
        return [public for public, name in named if name not in self.about.optional]

    def dims(self, name: str) -> str:
        """Return the letters of the dimensions of an input, of y or of a state."""
        return dict(zip(self.about.public_names, self.about.inputs.values(), strict=True)).get(name, self.about.output)

    @property
    def decay(self) -> str:
        """How w is read: as in the op's models, but for decays that these do not have."""
        return str(self.options.get("decay", of_ops.decay_of(self.op)))

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the states."""
        return torch.bfloat16 if "bf16" in self.kind else torch.float32

    @property
    def state_layout(self) -> str:
        """The order of the last two dimensions of a state of an op that has heads."""
        return next((layout for layout in ("vk", "kv") if layout in self.kind), self.about.state_layout)

    @property
    def options(self) -> dict[str, Any]:
        """What calls of the op and of its reference take beside the inputs: strong decays are no sigmoids."""
        decay = {"decay": "raw"} if self.op == "wkv7" and "strong" in self.kind else {}
        layout = {} if self.state_layout == self.about.state_layout else {"state_layout": self.state_layout}
        return {**of_ops.OPTIONS.get(self.op, {}), **decay, **layout}

    @property
    def key_heads(self) -> int:
        """The heads of keys, of which one of a state space is for all."""
        count, keys, _ = self.kind.partition("-keys")
        return int(count) if keys else 1 if self.op == "ssd" else self.shape[2]

    @property
    def is_pooled(self) -> bool:
        """Whether its states are in a pool."""
        return self.phase in POOLED

    @property
    def sequences(self) -> int:
        """How many there are."""
        return {"packed": PACKED, "served": DECODES + PROMPTS}.get(self.kind.split("+")[-1], self.shape[0])

    def _fits(self, kind: str) -> bool:
        """Return whether the op has inputs of one kind."""
        op = self.about
        if kind.endswith("-keys"):
            return "G" in op.inputs.get("k", "") and self.op != "ssd"
        if kind.endswith("-gates"):
            return self.op == "kda"
        if kind == "served":
            rest = self.shape[1] - DECODES
            return self.phase == VARLEN and self.shape[0] == 1 and rest > 0 and rest % PROMPTS == 0
        has_strong = op.decay != "none" and self.op not in DERIVED
        return op.has_heads and f"{op.state_layout}-" not in kind and ("strong" not in kind or has_strong)

    def check(self) -> Case:
        """Return the case itself. Raises ValueError where the op has no such phase, or no such inputs."""
        of_ops.Case(*self[:3], UPDATE if self.is_pooled else self.phase).check()
        if self.kind != "usual" and not all(map(self._fits, self.kind.split("+"))):
            raise ValueError(f"--inputs: {self.op} has none that are {self.kind}")
        if self.kind.endswith("states") and not self.is_pooled:
            raise ValueError(f"--inputs: {self.kind} are only for updates, not for {self.phase}")
        if self.kind == "packed" and (self.shape[0] != 1 or self.shape[1] < PACKED or self.phase == "decode"):
            raise ValueError(f"--inputs: packed ones are a batch of 1 with {PACKED} or more tokens, and no decode")
        if self.shape[2] % self.key_heads:
            raise ValueError(f"--inputs: {self.kind} are for a multiple of as many heads, and not for {self.shape[2]}")
        return self


class Given(NamedTuple):
    """What a call is given: leaves that want gradients, the gradient of y, the state of a decode, ends of sequences.

    The state of a call over a pool is the pool, and `slots` says where the state of each sequence lies in it.
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


# ---- inputs ------------------------------------------------------------------------------------------------------


def given_for(case: Case, device: str = "cuda") -> Given:
    """Return what a call of a case is given; A of ssd is the same for all tokens, and wants no gradient."""
    names = case.names
    inputs = dict(zip(names, of_ops.make_inputs(*case[:2], torch.float32, device, case.key_heads), strict=True))
    inputs = {name: x.detach() for name, x in inputs.items()}
    w = next((name for name in ("w", "g") if name in names), None)
    if w is not None:
        inputs[w] = _decays(case, inputs[w])
    # Log-decays and steps of heads are float32, but for those of kda.
    wide = {"g", "dt", "A"} if case.op in DERIVED and case.op != "kda" else {w} if case.wide_decay else set()
    made = [x.to(torch.float32 if name in wide else case.dtype) for name, x in inputs.items()]
    leaves = [x.requires_grad_(name != "A") for name, x in zip(names, made, strict=True)]
    like_y = leaves[names.index(next(name for name in ("v", "x", "k") if name in names))]
    state = None
    if case.is_pooled or case.phase in OF_ONE_TOKEN:
        shape = (case.sequences, *case.shape[1:])
        state = of_ops.state_of(case.op, shape, device, case.state_layout).to(case.state_dtype)
    slots = torch.randperm(case.sequences, device=device).int() if case.is_pooled else None
    return Given(leaves, torch.randn_like(like_y, requires_grad=False), state, ends_of(case, device), slots)


def _decays(case: Case, w: Tensor) -> Tensor:
    """Return decays of the kind of a case in the place of usual ones."""
    if case.kind == "strong-gates":  # with which all channels forget within some tokens
        return -5 * torch.sigmoid(torch.randn_like(w))
    if case.kind == "slow-gates":  # as Kimi Linear begins: steps of channels from 0.001 to 0.1
        steps = torch.exp(torch.randn_like(w) / 4) * 10 ** (-1 - 2 * torch.rand_like(w))
        return -torch.linspace(1, 16, case.shape[2], device=w.device)[:, None] * steps
    if "strong" not in case.kind:
        return w
    # Decays of e^-2 to e^-8 a step in the place of all of w, or of one head's.
    if case.op == "wkv7":  # raw ones, as those of sigmoids end at e^-0.6
        w = torch.log(SIGMOID_RATE * torch.sigmoid(w))
    rates = 2 + 6 * torch.rand_like(w)
    one_head = (slice(1), slice(None), slice(1)) if w.dim() == 4 else (slice(1),)
    part = (slice(None),) if case.kind == "strong" else one_head
    w[part] = (rates.log() if case.decay == "raw" else -rates)[part]
    return w


def ends_of(case: Case, device: str = "cuda") -> Tensor | None:
    """Return where packed sequences end, whose lengths grow from a few tokens to a tenth of all; None for others.

    Behind decodes there are prompts of equal lengths.
    """
    if "served" in case.kind:
        lengths = [*[1] * DECODES, *[(case.shape[1] - DECODES) // PROMPTS] * PROMPTS]
        return torch.tensor([0, *lengths]).cumsum(0).to(device)
    if case.kind != "packed":
        return None
    shares = torch.linspace(0, 1, PACKED + 1, dtype=torch.float64).pow(1.5)
    return shares.mul(case.shape[1]).ceil().long().maximum(torch.arange(PACKED + 1)).to(device)


# ---- floors ------------------------------------------------------------------------------------------------------


def floor_ms(case: Case, given: Given, copy_tb_per_s: float) -> float:
    """Return the milliseconds of the fewest bytes at the bandwidth of a copy, in terabytes (10^12) a second.

    A pass reads inputs and writes results, and a backward reads all inputs again. A ring is counted as no bytes, and as
    no write of a state.
    """
    _, _, heads, head_size, value_size = case.shape
    channels = case.sequences * heads * head_size
    state = case.state_dtype.itemsize * channels * (value_size if case.about.has_heads else 3)
    reads, writes = {"backward": (2, 1), "forward+backward": (3, 2)}.get(case.phase, (1, 1))
    of_states = {"prefill": 1, "decode": 2, UPDATE: 2, VARLEN: 2, REPLAY: 1, VERIFY: 1}.get(case.phase, 0) * state
    inputs = sum(x.nbytes for x in given.inputs)
    return (reads * inputs + writes * given.dy.nbytes + of_states) / copy_tb_per_s * 1e-9


def copy_tb_per_s() -> float:
    """Return the bandwidth of a copy on the GPU in terabytes (10^12) a second, bytes read and written both counted."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 4)  # smaller only where the GPU has no room
    source, target = torch.ones(2, size, dtype=torch.uint8, device="cuda")
    return 2 * size / figures.median_ms(lambda: target.copy_(source)) * 1e-9
