"""What a backend is: what its module answers, what it is asked with, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rwkv_jit import kernel
from rwkv_jit.launch import Extent
from rwkv_jit.template import Parameter

# The most that half a chunk may decay, as a logarithm. Operands are scaled by the decay from their token to the middle
# of the chunk, and neither they nor their sums may leave the range of bfloat16 and float32, which ends at e^88.
LARGEST_DECAY = 64


class Geometry(NamedTuple):
    """How blocks are cut, where something else than a backend's rule says so."""

    chunk_len: int | None = None
    num_threads: int | None = None  # of the forward, in the chunked kernels
    forward_blocks: int | None = None  # that a multiprocessor shall have room for
    backward_blocks: int | None = None


class Candidate(NamedTuple):
    """A geometry of one direction that can be measured."""

    direction: str
    chunk_len: int
    num_threads: int
    blocks: int  # that a multiprocessor shall have room for


class Options(NamedTuple):
    """What a call chooses beside its tensors, as the torch op takes it.

    The backend is the one that will run, but where `guarded` is None: then all is as the caller asked, and what runs
    goes by the device that the tensors are on when it does.
    """

    scale: float
    decay: str
    state_layout: str
    checkpoint_interval: int
    chunk_len: int | None
    num_threads: int | None
    backend: str
    forward_blocks: int | None = None
    backward_blocks: int | None = None
    guarded: bool | None = False  # heads whose decay leaves the kernels' range are done by the recurrent ones


@dataclass(slots=True)
class Inputs:
    """The tensors of a call, in the order of the kernels' arguments."""

    op: str
    names: tuple[str, ...]  # of the streamed ones, then of the fixed ones
    streamed: tuple[Tensor, ...]  # [B, T, H, K], and v [B, T, H, V]
    fixed: tuple[Tensor, ...]  # the same for every token
    sequences: int

    def __getitem__(self, name: str) -> Tensor:
        return (*self.streamed, *self.fixed)[self.names.index(name)]


class Saved(NamedTuple):
    """What the forward keeps for the backward, in one tensor of floats: states at checkpoints and sometimes sa."""

    floats: Any  # in all; symbolic while a compiler traces
    sa: Any = -1  # where sa begins; -1 where there is none

    def addresses(self, saved: Tensor | None) -> list[int]:
        """Return the kernel's arguments."""
        first = 0 if saved is None else saved.data_ptr()
        return [first] if self.sa < 0 else [first, first and first + 4 * self.sa]


class Launch(NamedTuple):
    """How a kernel is launched, and what it takes beside the addresses and strides that all kernels take."""

    entry: str
    grid: Extent
    shared_bytes: int  # dynamic ones
    constants: list[bytes]  # after the strides
    scratch: int | None = None  # floats behind the last address; None where the kernel wants none
    # A flag for every sequence and head, whose decays leave the range of chunks: the chunked forward writes it, and the
    # recurrent kernels compute these heads alone.
    takes_flags: bool = False
    takes_any_decay: bool = False  # in the forward: the results of heads with a flag are right too
    nulls: int = 0  # null addresses behind the inputs, and behind their gradients, for what the op does not have
    strides: Sequence[tuple[int, ...]] = ()  # behind those of the streamed inputs, for what is not streamed in this op


class Kernels(Protocol):
    """What every backend's module answers."""

    def specialize(
        self,
        op: str,
        direction: str,
        head_size: int,
        value_size: int,
        types: Mapping[str, Parameter],
        arch: str,
        chunk_len: int | None = None,
        num_threads: int | None = None,
        few_heads: bool = False,
        chosen: Mapping[str, Parameter] | None = None,
        also: tuple[str, ...] = (),
    ) -> kernel.Request:
        """Return the template and parameters of one direction; `chosen` overrides them."""

    def nearest(self, request: kernel.Request, argument: str, value: int) -> int | None:
        """Return the legal value nearest to one that a caller gave in a refused request; None where it is legal."""

    def saved_for(self, inputs: Inputs, packed: bool, options: Options) -> Saved:
        """Return what the forward saves."""


class Backend(Kernels, Protocol):
    """What the module of a backend answers that is one kernel in each direction."""

    def vector(self, x: Tensor) -> int:
        """Return how many neighbouring elements of `x` are read at once."""

    def launch(self, found: kernel.Kernel, direction: str, inputs: Inputs, options: Options) -> Launch:
        """Return how a kernel is launched on its device, which is current."""


class Chunks(Backend, Protocol):
    """What the module of kernels in chunks answers whose blocks hold a head: to the rule, and to who measures them."""

    CHUNK_LENS: tuple[int, ...]

    def obstacle(
        self,
        op: str,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        arch: Callable[[], str],
        chunk_len: int | None = None,
        training: bool = True,
    ) -> tuple[Any, ...] | None:
        """Return why they cannot do a call, as the end of a sentence and what to format it with."""

    def default_chunk_len(self, head_size: int, value_size: int, arch: str, training: bool = True) -> int:
        """Return the chunk length that is fastest."""

    def candidates(self, direction: str, size: int, arch: str) -> list[Candidate]:
        """Return what one direction may be launched with, for keys and values of one size; the rule's is among it."""

    def templates(self, op: str) -> tuple[str, ...]:
        """Return the names of all templates that an op takes, whatever the geometry."""


class Forward(Protocol):
    """A prepared forward, which can be run with any tensors of its signature."""

    @property
    def options(self) -> Options:
        """Return what the call chooses."""

    def run(
        self,
        inputs: Sequence[Tensor],
        state: Tensor | None,
        bounds: Tensor | None,
        output_final_state: bool,
        save: bool,
        /,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return y, the final state, and what the backward needs; None for what is not wanted.

        `bounds` are those of packed sequences.
        """


class Guardable(Forward, Protocol):
    """A forward that looks at the decays where its options say so."""

    @property
    def takes_any_decay(self) -> bool:
        """Return whether its results are right for any decay then, or but for heads with a flag."""

    def run(
        self,
        inputs: Sequence[Tensor],
        state: Tensor | None,
        bounds: Tensor | None,
        output_final_state: bool,
        save: bool,
        into: Tensor | None = None,
        flags: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the same, with what the backward needs `into` where that is given.

        `flags` of sequences and heads are set to whether a decay leaves the range of chunks.
        """


class Several(Kernels, Protocol):
    """What the module of a backend answers that is several kernels in a direction."""

    def prepare_forward(
        self, inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options, training: bool
    ) -> Guardable:
        """Prepare what a forward launches."""

    def backward(
        self,
        inputs: Inputs,
        dy: Tensor,
        grad_final_state: Tensor | None,
        cu_seqlens: Tensor | None,
        saved: Tensor,
        options: Options,
        want_initial_state: bool,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Run the backward, as `prepared.backward` does."""
