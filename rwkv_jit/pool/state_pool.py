"""The states of the sequences that a model is serving: which slot is whose, and the memory of all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rwkv_jit.kernels.errors import RwkvJitError, brief
from rwkv_jit.pool import arguments, states
from rwkv_jit.pool.states import StateSpec


class StatePool:
    """Memory for the states of several sequences, and a record of which of its slots are taken.

    It is bookkeeping and no engine: it runs no model and schedules nothing. A slot holds all that a model remembers of
    one sequence, in all layers. For each name there is one tensor [layers, slots, *shape]: `pool["wkv"]` or `pool.wkv`.
    Its part of a layer, `pool["wkv"][layer]`, is [slots, *shape].

    Parameters
    ----------
    slots : int
        How many slots there are, the reserved ones too.
    specs : mapping of str to StateSpec
        What a slot holds. The names are identifiers.
    device : torch.device or str, default "cuda"
        Where the memory is.
    reserved : int, default 0
        How many slots at the front are never allocated, for example 1 where the padding of a batch points at slot 0.

    Attributes
    ----------
    slots, reserved, device : the arguments; `len(pool)` is `slots` too

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came.

    Notes
    -----
    All memory is taken at once and filled. The lowest free slots are allocated first, so that the same calls give the
    same slots. A call that raises TypeError, ValueError or RwkvJitError changes nothing.

    Work on a GPU goes to torch's current stream, and no call but `save` and `load` waits for it. Only the states of the
    slots in question are written.

    A pool is not thread-safe: let one thread use it, or put a lock around it.

    RWKV-4 begins with a max of -1e38, and with 0 for the rest of its state [3, C]: after `allocate` write
    `pool["wkv"][:, slots, 2] = -1e38`.

    Examples
    --------
    >>> specs = {"wkv": rwkv_jit.StateSpec(24, (32, 64, 64), torch.float32)}
    >>> pool = rwkv_jit.StatePool(8, specs, device="cuda", reserved=1)
    >>> pool.allocate(2), pool.free_count
    ([1, 2], 5)
    >>> pool["wkv"].shape
    torch.Size([24, 8, 32, 64, 64])
    >>> pool.free(1)
    >>> pool.allocated
    (2,)
    """

    def __init__(
        self, slots: int, specs: Mapping[str, StateSpec], device: torch.device | str = "cuda", reserved: int = 0
    ):
        self.slots = arguments.count("slots", slots, least=1)
        self.reserved = arguments.count("reserved", reserved)
        if reserved >= slots:
            raise ValueError(f"reserved: expected fewer than the {slots} slots, got {reserved}")
        self.device = torch.device(device)
        self._free = list(range(reserved, slots))  # sorted
        self._taken: set[int] = set()
        self._tensors: dict[str, Tensor] = {}
        self._specs = self._checked_specs(specs)
        # A tensor that is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            for name, (layers, shape, dtype, fill) in self._specs.items():
                x = torch.full((layers, slots, *shape), fill, dtype=dtype, device=self.device)
                self._tensors[name], self.device = x, x.device  # "cuda" is the GPU that was current here

    @classmethod
    def rwkv7(
        cls, slots: int, layers: int, heads: int, head_size: int, width: int, state_dtype: torch.dtype = torch.float32,
        shift_dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda", reserved: int = 0,
    ) -> StatePool:  # fmt: skip
        """Make a pool for an RWKV-7 model.

        Parameters
        ----------
        slots : int
            How many slots there are, the reserved ones too.
        layers : int
            Layers of the model.
        heads : int
            Heads of a layer, H.
        head_size : int
            K and V.
        width : int
            Channels of the model, whose last token each layer keeps twice.
        state_dtype : torch.dtype, default torch.float32
            Of the states of `wkv7`.
        shift_dtype : torch.dtype, default torch.bfloat16
            Of the last tokens.
        device : torch.device or str, default "cuda"
            Where the memory is.
        reserved : int, default 0
            How many slots at the front are never allocated.

        Returns
        -------
        StatePool
            With "wkv" [layers, slots, H, V, K], and with "time_shift" and "channel_shift" [layers, slots, width].

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the message has its name, what was expected and what came.

        Examples
        --------
        >>> pool = rwkv_jit.StatePool.rwkv7(8, layers=2, heads=3, head_size=64, width=192, device="cuda")
        >>> pool.wkv.shape, pool.time_shift.shape
        (torch.Size([2, 8, 3, 64, 64]), torch.Size([2, 8, 192]))
        """
        for name, size in (("layers", layers), ("heads", heads), ("head_size", head_size), ("width", width)):
            arguments.count(name, size, least=1)
        states.check_dtype("state_dtype", state_dtype)
        states.check_dtype("shift_dtype", shift_dtype)
        shift = StateSpec(layers, (width,), shift_dtype)
        specs = {
            "wkv": StateSpec(layers, (heads, head_size, head_size), state_dtype),
            "time_shift": shift,
            "channel_shift": shift,
        }
        return cls(slots, specs, device, reserved)

    def __getitem__(self, name: str) -> Tensor:
        """Return the states of a name, of all layers and slots: the memory itself, [layers, slots, *shape]."""
        if name not in self._tensors:
            raise KeyError(f"expected one of {', '.join(self._tensors)}, got {brief(name)}")
        return self._tensors[name]

    def __getattr__(self, name: str) -> Tensor:
        # Asked for what is no other attribute; of an object that is being copied, before there are tensors.
        held = vars(self).get("_tensors", {})
        if name not in held:
            raise AttributeError(f"StatePool has no attribute {name!r}; its states are {', '.join(held)}")
        return held[name]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        """Return how many slots there are, the reserved ones too."""
        return self.slots

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {spec}" for name, spec in self._specs.items())
        return (
            f"StatePool({self.slots} slots: {len(self._taken)} allocated, {self.free_count} free, {self.reserved} "
            f"reserved; {held}; {self.nbytes / 1e6:.1f} MB on {self.device})"
        )

    @property
    def free_count(self) -> int:
        """How many slots can be allocated."""
        return len(self._free)

    @property
    def allocated(self) -> tuple[int, ...]:
        """The slots that are allocated, sorted."""
        return tuple(sorted(self._taken))

    @property
    def nbytes(self) -> int:
        """The bytes of all states, of all slots."""
        return sum(x.nbytes for x in self._tensors.values())

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate slots for new sequences, and fill their states as the specs say.

        Parameters
        ----------
        count : int, default 1
            How many.

        Returns
        -------
        list of ints
            The lowest free slots.

        Raises
        ------
        RwkvJitError
            Too few slots are free; none is allocated.
        TypeError, ValueError
            `count` is not an int, or is negative.

        Examples
        --------
        >>> pool.allocate(2)
        [0, 1]
        """
        new = self._lowest(arguments.count("count", count))
        self._fill(new)
        return self._take(new)

    def fork(self, slot: int, count: int = 1) -> list[int]:
        """Take slots that begin with a copy of another one's states: to continue one sequence several times.

        Parameters
        ----------
        slot : int
            An allocated slot, which stays as it is.
        count : int, default 1
            How many copies.

        Returns
        -------
        list of ints
            The lowest free slots.

        Raises
        ------
        RwkvJitError
            Too few slots are free; none is allocated.
        TypeError, ValueError
            `slot` is not allocated, or `count` is not an int, or is negative.

        Examples
        --------
        >>> (slot,) = pool.allocate()
        >>> pool.fork(slot, 2)
        [1, 2]
        """
        self._check("slot", [arguments.count("slot", slot)])
        new = self._lowest(arguments.count("count", count))
        self._copy([slot], new)
        return self._take(new)

    def copy(self, source: int | Iterable[int], target: int | Iterable[int]) -> None:
        """Copy the states of slots over those of others.

        Parameters
        ----------
        source : int or several ints
            Allocated slots, which may repeat.
        target : int or several ints
            As many allocated slots, each once. All sources are read before a target is written.

        Raises
        ------
        TypeError, ValueError
            A slot is not allocated, a target comes twice, or there are not as many of both.

        Examples
        --------
        >>> first, second = pool.allocate(2)
        >>> pool.copy([first, second], [second, first])  # swaps them
        """
        sources, targets = arguments.listed("source", source), arguments.listed("target", target)
        self._check("source", sources, may_repeat=True)
        self._check("target", targets)
        if len(sources) != len(targets):
            raise ValueError(f"target: expected {len(sources)} slots like source, got {len(targets)}")
        self._copy(sources, targets)

    def reset(self, slots: int | Iterable[int]) -> None:
        """Fill the states of slots with what the specs say, as `allocate` does.

        Parameters
        ----------
        slots : int or several ints
            Allocated slots, each once.

        Raises
        ------
        TypeError, ValueError
            A slot is not allocated, or comes twice.

        Examples
        --------
        >>> pool.reset(pool.allocate(2))
        """
        listed = arguments.listed("slots", slots)
        self._check("slots", listed)
        self._fill(listed)

    def free(self, slots: int | Iterable[int]) -> None:
        """Give slots back. Their states stay in memory until the slots are allocated again.

        Parameters
        ----------
        slots : int or several ints
            Allocated slots, each once.

        Raises
        ------
        TypeError, ValueError
            A slot is not allocated, or comes twice.

        Examples
        --------
        >>> pool.free(pool.allocate(2))
        """
        listed = arguments.listed("slots", slots)
        self._check("slots", listed)
        self._taken.difference_update(listed)
        self._free = sorted([*self._free, *listed])

    def indices(self, slots: int | Iterable[int]) -> Tensor:
        """Return slots as a tensor on the pool's device, for kernels and for indexing.

        Parameters
        ----------
        slots : int or several ints
            Allocated slots, each once, and reserved ones as often as padding needs them.

        Returns
        -------
        torch.Tensor, shape (number of slots,), int32

        Raises
        ------
        TypeError, ValueError
            A slot is neither allocated nor reserved, or is allocated and comes twice.

        Examples
        --------
        >>> pool.indices(pool.allocate(2))
        tensor([0, 1], dtype=torch.int32)
        """
        listed = arguments.listed("slots", slots)
        reserved = range(self.reserved)
        self._check("slots", [slot for slot in listed if slot not in reserved])
        return arguments.on_device(listed, self.device, torch.int32)

    def save(
        self, path: str | os.PathLike[str], slots: int | Iterable[int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Write the states of slots to a safetensors file.

        Parameters
        ----------
        path : str or path
            The file. One that is there is replaced.
        slots : int or several ints, optional
            Allocated slots, each once; all that are allocated by default.
        metadata : mapping of str to str, optional
            What else the file should say, for example of which model the states are. `safetensors.safe_open` reads it.

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the message has its name, what was expected and what came.
        OSError
            The file cannot be written. One that was there is as it was.
        ImportError
            safetensors is not installed.

        Notes
        -----
        The file holds one tensor [layers, number of slots, *shape] for each name. It appears at once, when all of it is
        written, and only its owner may read it: a state tells something of its sequence.

        Examples
        --------
        >>> pool.save("prompt.safetensors", pool.allocate(), {"prompt": "You are a helpful assistant."})
        """
        listed = list(self.allocated) if slots is None else arguments.listed("slots", slots)
        self._check("slots", listed)
        text = states.described(self._specs, metadata)
        index = arguments.on_device(listed, self.device)
        states.write(path, {name: x.index_select(1, index).cpu() for name, x in self._tensors.items()}, text)

    def load(self, path: str | os.PathLike[str]) -> list[int]:
        """Take slots for the states of a file that `save` wrote, and read the states into them.

        Parameters
        ----------
        path : str or path
            The file. Names, layers, shapes and dtypes must be those of this pool; the device and the slots may differ.

        Returns
        -------
        list of ints
            The lowest free slots, in the order in which `save` was given those of the file.

        Raises
        ------
        ValueError
            The file is damaged, or of another kind, or of another pool: what was expected and what came.
        RwkvJitError
            Too few slots are free; none is allocated.
        OSError
            The file is not there, or cannot be read.
        ImportError
            safetensors is not installed.

        Examples
        --------
        >>> pool.save("prompt.safetensors", pool.allocate(2))
        >>> pool.load("prompt.safetensors")
        [2, 3]
        """
        held = states.read(path, self._specs)
        new = self._lowest(next(iter(held.values())).shape[1])
        index = arguments.on_device(new, self.device)
        for name, x in self._tensors.items():
            x.index_copy_(1, index, held[name].to(self.device))
        return self._take(new)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def _check(self, name: str, slots: Sequence[int], may_repeat: bool = False) -> None:
        """Check that slots are allocated, and each once unless they may repeat."""
        others = [slot for slot in slots if slot not in self._taken]
        if others:
            raise ValueError(f"{name}: expected allocated slots, got {brief(others)}")
        if len(set(slots)) < len(slots) and not may_repeat:
            raise ValueError(f"{name}: expected each slot once, got {brief(slots)}")

    def _lowest(self, count: int) -> list[int]:
        """Return the lowest free slots, which stay free until `_take`: the work on them may fail before that."""
        if count > len(self._free):
            raise RwkvJitError(
                f"StatePool: expected {count} free slots, got {len(self._free)} of {self.slots}; free some, or make "
                "the pool larger"
            )
        return self._free[:count]

    def _take(self, new: list[int]) -> list[int]:
        """Allocate what `_lowest` has just returned."""
        del self._free[: len(new)]
        self._taken.update(new)
        return new

    # ---- memory --------------------------------------------------------------------------------------------------

    def _fill(self, slots: Sequence[int]) -> None:
        index = arguments.on_device(slots, self.device)
        for name, x in self._tensors.items():
            x.index_fill_(1, index, self._specs[name].fill)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots over as many others, or one over several, all of which are read first."""
        read, written = arguments.on_device(sources, self.device), arguments.on_device(targets, self.device)
        for x in self._tensors.values():
            held = x.index_select(1, read)
            x.index_copy_(1, written, held.expand(-1, len(targets), *held.shape[2:]))

    # ---- specs ---------------------------------------------------------------------------------------------------

    def _checked_specs(self, specs: Mapping[str, StateSpec]) -> dict[str, StateSpec]:
        if not isinstance(specs, Mapping) or not specs:
            raise TypeError(f"specs: expected a StateSpec for one name or more, got {brief(specs)}")
        checked = {}
        for name, spec in specs.items():
            if not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or hasattr(self, name):
                raise ValueError(
                    "specs: expected names that are identifiers, without an underscore in front, and no attributes of "
                    f"StatePool, got {brief(name)}"
                )
            states.check_spec(name, spec)
            checked[name] = spec
        return checked
