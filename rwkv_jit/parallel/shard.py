"""Which part of each sequence a process has, and what processes tell one another about theirs."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.kernels.errors import brief

_SAID = 480  # bytes of what a process says of a call, before the digest of all of it
_MOST_CALLS = 1024  # that are known of a group
_known: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()  # calls that all of a group make alike

# Its name changed with torch 2.13.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Shard:
    """The part of every sequence that this process has; parts follow each other in the order of the ranks.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or DeviceMesh of one dimension, optional
        The processes that share the sequences; all of them by default.
    cu_seqlens : torch.Tensor or sequence of int, shape (N + 1,), optional
        Where each of N packed sequences begins, and where the last one ends, in the tokens of all parts together. A
        sequence may span many parts, and a part may have many sequences.
    lengths : sequence of int, optional
        The tokens of each rank's part, if sequences are packed; equal by default.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
        The processes.
    rank, size : int
        The index of this process among them, and their number.
    bounds : tuple of int or None
        Where the sequences of this part begin in it, and where the last one ends; None where no sequences are packed.
    is_continued, is_to_be_continued : bool
        Whether the first sequence of this part began in an earlier one, and whether the last one continues in a later
        one.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument does not fit; the message has its name, what was expected and what came. Or there is no process
        group.

    Notes
    -----
    Sequences of a batch are shared alike: each process has tokens [B, T'] of all of them, with the same B. T' may
    differ between processes. Creating a shard sends no message to other processes.

    All processes of the group call an op, forwards and backwards, in the same order with other calls of theirs. A part
    takes a state S to S P + Q, with a matrix P for each head of a delta rule, a row of decays of channels, or one
    number where heads decay. A process tells the others N H (V + K) K, N H (V + 1) K or N H (V K + 1) numbers in the
    forward, and N H V K in the backward: in float32, by one all-gather, and they join them in float64. The part at
    whose begin all sequences begin does not wait for the forward's, the last one not for the backward's. Gradients of
    inputs without tokens are those of this part: the sum over the processes is the whole. `torch.compile` leaves the
    calls out of its graphs.

    A part of one sequence, or of a batch, runs once where wkv7 or gla, or ops that go through them, take the tensor
    cores for heads that a block holds and T is a multiple of 64. Their kernels find P and Q, wait, and go on. Other
    parts of one sequence, those in dedicated kernels among them, run once for Q, once from unit states for a matrix P
    that others need, and once from the state, whose gradient has two runs. A part with the end of a sequence and the
    beginning of another runs once: what begins there first, and the rest when its state is there.

    Processes first compare their calls: the op, dtype, batch, heads, sizes, scale, decay, switches, `cu_seqlens` and
    `lengths`. Where these are not the same, all of them raise a ValueError that says what two of them have. On GPUs the
    host waits for that, so it is done for the first call of each kind alone.

    References
    ----------
    That parts of a sequence are joined by what they do to a state is the scan of Blelloch, Prefix Sums and Their
    Applications, 1990.

    Examples
    --------
    >>> shard = rwkv_jit.parallel.Shard()  # in each process that torchrun started
    >>> y, _ = rwkv_jit.parallel.wkv7(*inputs_of_this_part, shard)
    """

    def __init__(self, group: Any = None, cu_seqlens: Any = None, lengths: Sequence[int] | None = None):
        self.group = _group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.bounds: tuple[int, ...] | None = None
        self.is_continued, self.is_to_be_continued = self.rank > 0, self.rank < self.size - 1
        self._layout = "no cu_seqlens"
        if cu_seqlens is not None:
            self._pack(_bounds(cu_seqlens), lengths)
        elif lengths is not None:
            raise ValueError("lengths: expected none without cu_seqlens, as parts of a batch may have any length")
        self._tensors: dict[tuple[torch.device, int], Tensor] = {}

    @classmethod
    def of_bounds(cls, group: Any, cu_seqlens: Any, is_continued: bool, is_to_be_continued: bool) -> Shard:
        """Return a shard whose own bounds are known, where those of the others are not."""
        shard = cls(group)
        shard.bounds, shard._layout = tuple(_bounds(cu_seqlens)), "bounds of each rank"
        shard.is_continued, shard.is_to_be_continued = is_continued, is_to_be_continued
        return shard

    def _pack(self, bounds: list[int], lengths: Sequence[int] | None) -> None:
        total = bounds[-1]
        if lengths is not None:
            try:
                lengths = [index(x) for x in lengths]
            except TypeError as error:
                raise TypeError(f"lengths: expected a sequence of int, got {brief(lengths)}") from error
        else:
            if total % self.size:
                raise ValueError(f"lengths: expected a list, as {self.size} ranks cannot share {total} tokens equally")
            lengths = [total // self.size] * self.size
        if len(lengths) != self.size or any(x < 0 for x in lengths) or sum(lengths) != total:
            raise ValueError(f"lengths: expected {self.size} of them with {total} tokens in all, got {lengths}")
        self._layout = f"lengths={lengths}, cu_seqlens={bounds}"
        end = list(accumulate(lengths))[self.rank]
        begin, texts = end - lengths[self.rank], list(zip(bounds, bounds[1:], strict=False))
        self.is_continued = any(first < begin < last for first, last in texts)
        self.is_to_be_continued = any(first < end < last for first, last in texts)
        # An empty text belongs to the part that begins with it, or to the last one.
        empty_until = end + (self.rank == self.size - 1)
        own = [
            first - begin for first, last in texts
            if (first < end and last > begin) or (first == last and begin <= first < empty_until)
        ]  # fmt: skip
        self.bounds = (*(max(place, 0) for place in own or [0]), end - begin)

    @property
    def texts(self) -> int:
        """Return how many sequences the part has of each row of the batch."""
        return 1 if self.bounds is None else len(self.bounds) - 1

    @property
    def is_passed(self) -> bool:
        """Return whether a sequence passes the part: it began before it and goes on behind it."""
        return self.is_continued and self.is_to_be_continued and self.texts == 1

    def cu_seqlens(self, device: torch.device, begin: int = 0) -> Tensor:
        """Return the bounds of this part's sequences from one of them on, as ops take them."""
        assert self.bounds is not None
        known = self._tensors.get((device, begin))
        if known is None:
            bounds = [place - self.bounds[begin] for place in self.bounds[begin:]]
            known = self._tensors[device, begin] = torch.tensor(bounds, device=device)
        return known

    def packing(self, device: torch.device) -> Tensor | None:
        """Return the bounds of this part's sequences as ops take them; None where no sequences are packed."""
        return None if self.bounds is None else self.cu_seqlens(device)

    def check(self, name: str, x: Tensor) -> None:
        """Raise ValueError if the batch and the tokens of an input are not those of the part."""
        if self.bounds is not None and tuple(x.shape[:2]) != (1, self.bounds[-1]):
            raise ValueError(
                f"{name}: expected a batch of 1 and the {self.bounds[-1]} tokens of rank {self.rank}'s part, "
                f"got {list(x.shape[:2])}"
            )

    def agree(self, call: str, device: torch.device) -> None:
        """Raise ValueError, in all processes before anything else is sent, if they do not make the same call."""
        known = _known.setdefault(self.group, set())
        if self.size == 1 or (call, self._layout) in known:
            return
        text = f"{call}, {self._layout}".encode()
        said = bytearray(text[:_SAID].ljust(_SAID) + sha256(text).digest())
        told = self.gather(torch.frombuffer(said, dtype=torch.uint8).to(device)).wait().tolist()
        other = next((rank for rank, x in enumerate(told) if x != told[0]), None)
        if other is not None:
            first, second = (bytes(told[rank][:_SAID]).decode().strip() for rank in (0, other))
            raise ValueError(
                f"shard: expected the same call on all ranks, got {first} on rank 0 and {second} on rank {other}"
            )
        if device.type == "cuda":
            if len(known) == _MOST_CALLS:  # on all ranks at once, as they make the same calls
                known.clear()
            known.add((call, self._layout))

    def gather(self, x: Tensor) -> Gathered:
        """Begin to fetch a tensor of the same shape from every process."""
        return Gathered(x, self)


class Gathered:
    """Tensors of all processes, which may still be underway."""

    def __init__(self, own: Tensor, shard: Shard):
        own = own.contiguous()
        self._all = own.new_empty(shard.size, *own.shape)
        self._work: Any = None
        if shard.size > 1:
            self._work = _gather(self._all.view(-1), own.view(-1), shard.group, async_op=True)
        else:
            self._all[0] = own

    def wait(self) -> Tensor:
        """Return them, [ranks, ...], once they are there; on a GPU it is the stream that waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._all


def of(given: Any) -> Shard:
    """Return the shard itself, or that of a process group or mesh."""
    return given if isinstance(given, Shard) else Shard(given)


def _group(given: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: there is no process group; call torch.distributed.init_process_group first")
    if given is None:
        return dist.group.WORLD
    if hasattr(given, "mesh_dim_names"):  # a DeviceMesh
        if given.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, got {given}; take one by its name, mesh['cp']")
        return given.get_group()
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected one that this process belongs to")
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup or a DeviceMesh, got {type(given).__name__}")
    return given


def _bounds(cu_seqlens: Any) -> list[int]:
    try:
        values = torch.as_tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"cu_seqlens: expected a tensor or a sequence of int, got {brief(cu_seqlens)}") from error
    values = tensors.from_any("cu_seqlens", values)
    if values.dim() != 1 or values.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {list(values.shape)}")
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected torch.int32 or torch.int64, got {values.dtype}")
    bounds: list[int] = values.tolist()
    if bounds[0] != 0 or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"cu_seqlens: expected numbers from 0 that do not fall, got {bounds[:8]}")
    return bounds
