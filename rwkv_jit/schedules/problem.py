"""What an op is, and what a call of it asks of the kernels: sizes, types, options and the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rwkv_jit.kernels.gpu import Gpu
from rwkv_jit.schedules.legal import Backend, Decay

if TYPE_CHECKING:
    from rwkv_jit.kernels.template import Parameter


STATE = "initial_state"  # what stands beside the inputs of an op
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, eq=False)
class Op:
    """One recurrence."""

    name: str
    # The dimensions of every input, by the name that kernels call it, in the order of the public call. B is the batch,
    # T the tokens, H the heads, G the heads of what several heads share, K and V the head sizes of keys and values, C
    # the channels of ops without heads. What has no T is the same for every token.
    inputs: Mapping[str, str]
    family: str = ""  # which algorithms there are for it: "delta" has the delta term, "diagonal" a decay alone
    stem: str = ""  # how the names of the templates begin
    public: tuple[str, ...] = ()  # what callers call the inputs, where that differs
    state: str = "HVK"  # the dimensions of a state behind the sequences, in its default layout; none without states
    state_types: tuple[str, ...] = ("fp16", "bf16", "fp32")
    sizes: Mapping[str, int] = field(default_factory=dict)  # of dimensions that no input has
    output: str = "BTHV"  # the dimensions of y
    lead: int = 0  # the place of the input that says a call's batch, dtype and device
    decay: str = "raw"  # the map of w by default; "none" where there is no decay to choose
    decays: tuple[str, ...] = get_args(Decay)  # the legal maps, where there is a choice
    backends: tuple[str, ...] = get_args(Backend)
    scale: float | None = 1.0  # the factor of y by default; None is K^-0.5
    wide: tuple[str, ...] = ("w", "u")  # inputs that may be float32 beside others of 16 bits
    optional: tuple[str, ...] = ()  # inputs that may be None
    # Other dimensions that callers may give an input, for messages; those in brackets are one, side by side.
    also: Mapping[str, str] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)  # switches of the recurrence, with their defaults
    through: Op | None = None  # the op that runs calls for which there are no dedicated kernels, with other inputs
    # Parameters of the templates that tell the op from others of its family; those of the backward alone.
    constants: Mapping[str, Parameter] = field(default_factory=dict)
    backward_constants: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Return what kernels call the inputs."""
        return tuple(self.inputs)

    @property
    def public_names(self) -> tuple[str, ...]:
        """Return what callers call the inputs."""
        return self.public or self.names

    @property
    def has_heads(self) -> bool:
        """Return whether it has heads, with a state each."""
        return any("H" in dims for dims in self.inputs.values())

    @property
    def streamed(self) -> tuple[str, ...]:
        """Return the inputs that have tokens."""
        return tuple(name for name, dims in self.inputs.items() if "T" in dims)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return the inputs that are the same for every token."""
        return tuple(name for name, dims in self.inputs.items() if "T" not in dims)

    @property
    def state_layout(self) -> str:
        """Return the order of the last two dimensions of states by default."""
        return "kv" if self.state.endswith("KV") else "vk"

    def types_of(
        self, storage: str, wide: str | None = None, chosen: Mapping[str, str | None] | None = None
    ) -> dict[str, str]:
        """Return the storage types of the inputs of a call, which has the optional ones that `chosen` has.

        Rows, and what may be float32 unless `wide` names a type, are of `storage`; parameters of heads of an op through
        another are float32; `chosen` has other types by public names, or None for the default.
        """
        several, types = dict(chosen or {}), dict[str, str]()
        for public, name, dims in zip(self.public_names, self.names, self.inputs.values(), strict=True):
            usual = storage
            if name in self.wide:
                usual = "fp32" if self.through is not None and "T" not in dims else wide or storage
            if public in several or name not in self.optional:
                types[name] = several.get(public) or usual
        return types

    @property
    def transition(self) -> tuple[str, str]:
        """Return the sizes of what tokens make of a state beside what they add: a number, a row or a matrix, of a head.

        The sizes are dimensions of inputs, or "1".
        """
        if (self.through or self).family == "delta":
            return "K", "K"
        return "1", "K" if "K" in self.inputs.get("w", "") else "1"

    def state_dims(self, layout: str) -> str:
        """Return the dimensions of a state in a layout, which goes for states of keys and values alone."""
        return self.state[:-2] + layout.upper() if self.state.endswith(("VK", "KV")) else self.state


# The most that half a chunk may decay in its frame, as a logarithm, by the type of r, k and v. Operands have this type
# and are scaled by the decay from their token to the middle of the chunk; neither they nor their sums may leave its
# range. That of bfloat16 and float32 ends at e^88; that of float16 at e^11, and what is below e^-10 has fewer digits.
LARGEST_DECAY = {"bf16": 64, "fp32": 64, "fp16": 7}
# The least log-decays that maps have on their own.
_LEAST_LOG_DECAYS = {"none": 0.0, "sigmoid": -math.exp(-0.5)}


def is_framed(storage: str, decay: str, decay_bound: float | None, chunk_len: int) -> bool:
    """Return whether no decay leaves the frame of chunks of this length, if the bound holds."""
    least = _LEAST_LOG_DECAYS.get(decay, decay_bound)
    return least is not None and -least * chunk_len / 2 <= LARGEST_DECAY[storage]


class Problem(NamedTuple):
    """All that decides about a call on a GPU: its algorithm, and its kernels.

    The rule looks at it and returns it with the algorithm. Sizes may be symbolic where a compiler traces.

    B is the batch, T the tokens, H the heads, G those of shared inputs, K and V the head sizes of keys and values, N
    the sequences: B, or those that are packed. An op without heads has C channels, and S numbers in a state of each.
    """

    op: Op
    gpu: Gpu
    types: Mapping[str, str]  # storage types by input that a call has; all gradients have their input's
    B: Any = 1
    T: Any = 1
    H: Any = 1
    K: Any = 0
    V: Any = 0
    N: Any = 1
    G: Any = 0
    C: Any = 0
    S: Any = 0
    state_type: str = "fp32"
    is_packed: bool = False
    training: bool = False  # the forward keeps what the backward needs
    has_initial_state: bool = False  # and the backward makes its gradient, if it is wanted
    has_final_state: bool = False  # it is wanted; in the backward there is a gradient of it
    scale: float = 1.0
    decay: str = "none"
    decay_bound: float | None = None  # a hint: log-decays are at least about this
    state_layout: str = "vk"
    checkpoint_interval: int = 64
    backend: str = "recurrent"  # an algorithm if it `is_chosen`; else as a caller names it, for the rule to choose
    is_chosen: bool = True
    chunk_len: int = 0  # 0 lets the rule or the algorithm choose
    num_threads: int | None = None
    forward_blocks: int | None = None  # of a multiprocessor, where they were tuned
    backward_blocks: int | None = None
    eps: float = 0.0  # what timex adds to every output
    # How many neighbours of each input, and behind these of dy, can be read at once, where kernels go by that; without
    # it as many as of contiguous ones.
    vectors: tuple[int, ...] = ()
    # Whose gradients the backward makes, of the inputs and STATE, where these are not all.
    wanted: tuple[str, ...] = ()
    is_narrow: bool = False  # the tensor cores take rows as float16 ones of another call
    is_batch_invariant: bool = False  # nothing goes by how many sequences and tokens there are
    longest: int = 0  # about the tokens of the longest packed sequence, where it is known
    # The states are slots of a pool, and of the sequences, which are packed, one launch may leave some to others.
    is_pooled: bool = False
    w0_type: str = "void"  # the storage type of what kernels add to w before its map; "void" where that is nothing
    waves: int = 1  # of launches, one after another, each for a piece of every sequence; N is all pieces
    # Whether sequences are cut is chosen when the call runs: what the forward keeps has room for it either way.
    leaves_cut_open: bool = False
    # Other processes have the tokens before these and behind them. A direction says what it does to any state, pauses,
    # and goes on from the state that it is given then.
    is_shard: bool = False
    traits: tuple[tuple[str, Any], ...] = ()  # the switches of the op by name

    @property
    def present(self) -> tuple[str, ...]:
        """Return the inputs that a call has."""
        return tuple(name for name in self.op.inputs if name in self.types)

    def trait(self, name: str) -> Any:
        """Return a switch of the op; None where the op has no such switch."""
        return dict(self.traits).get(name)

    @property
    def has_halves(self) -> bool:
        """Return whether kernels halve chunks whose decays leave the range of the chunk's frame."""
        return not is_framed(self.types["v"], self.decay, None, self.chunk_len)

    @property
    def storage(self) -> str:
        """Return the type of the rows that kernels on the tensor cores take."""
        return "fp16" if self.is_narrow else self.types["v"]

    @property
    def multiprocessors(self) -> int | None:
        """Return how many multiprocessors there are to share the work between; None where that does not matter."""
        return None if self.is_batch_invariant else self.gpu.multiprocessors

    @property
    def tokens(self) -> Any:
        """Return the tokens of a sequence, on average."""
        return self.T // max(self.N, 1) if self.is_packed else self.T

    @property
    def all_heads(self) -> Any:
        """Return the heads of all sequences."""
        return self.N * self.H

    def slots(self, length: int) -> Any:
        """Return how many pieces of so many tokens there can be; packed sequences fit whatever their lengths are."""
        return self.T // length + self.N if self.is_packed else self.B * ((self.T + length - 1) // length)

    @property
    def state_bytes(self) -> Any:
        """Return the bytes of a float32 state per head."""
        return 4 * self.N * self.H * self.V * self.K

    @property
    def state_shape(self) -> tuple[Any, ...]:
        """Return the shape of a call's states."""
        return (self.N, *(getattr(self, dim) for dim in self.op.state_dims(self.state_layout)))

    def shape(self, name: str) -> tuple[Any, ...]:
        """Return the shape of an input."""
        return tuple(getattr(self, dim) for dim in self.op.inputs[name])
