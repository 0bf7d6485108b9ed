"""The tokens since the states of a pool were written: a ring of entries for each slot and head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import torch
from torch import Tensor

from rwkv_jit.kernels.errors import brief
from rwkv_jit.pool import arguments, states
from rwkv_jit.schedules import replay
from rwkv_jit.schedules.legal import ReplayOp
from rwkv_jit.schedules.table import ALL

OP_NAMES: tuple[str, ...] = get_args(ReplayOp)
MOST_ENTRIES = 16
_LEAST_BYTES = 2**24  # of the states of a call, from which replay pays: measured on an H100


class ReplayRing:
    """The tokens of each slot since its state was written, for the functions `_replay` and `_verify`.

    It has the memory and the cursors of one layer. A state of a pool and the entries of its slot together are the state
    of a sequence:

        S = S0 diag(d_1 ... d_n) + sum_i (u_i (p_i b_i)^T + v_i (p_i k_i)^T)   with p_i = d_{i+1} ... d_n

    with n the cursor of the slot, and u_i = S_{i-1} a_i; without the delta term there are no u and b, and linear
    attention has no d. Ops such as `kda` have no u and b either: v_i is all that token i adds to the state, as
    beta (v - S k) of delta rules. `replay_flush` computes it into S0, before a state is saved, copied or read by other
    calls.

    Parameters
    ----------
    slots, op : int, and str
        How many slots the pool has, and the op of the tokens: "wkv7", "wkv6", "wkv5", "gla", "linear_attention", "kda",
        "gated_delta_rule", "delta_rule", "gated_delta_rule2", "simple_gla", "hgrn2" or "ssd".
    heads, head_size, value_size : int, value_size optional
        H, K and V of a state; V is K by default.
    length : int, from 1 to 16, optional
        The most entries: the state is written once in `length` + 1 tokens. The default minimizes the time of a token,
        which is its share of that write and the entries that it reads: 4 for wkv7 with heads of 64 and float32 states,
        3 for 16-bit states, 6 for heads of 128, 7 of kda, 12 of Mamba-2; fewer where `drafts` are many.
    drafts : int, default 0
        The most speculative tokens of a call such as `wkv7_verify`; there is always memory for them behind the cursor.
        `length` and it together are at most 16.
    dtype, state_dtype : torch.dtype, default torch.bfloat16 and torch.float32
        Of r, k and v in the calls, which may be float64 on the CPU, and of the states.
    device : torch.device or str, default "cuda"
        Where the memory is.
    key_heads : int, optional
        G, the heads of keys that are shared by neighbouring heads of values; H by default.

    Attributes
    ----------
    slots, op, heads, key_heads, head_size, value_size, length, drafts, dtype, state_dtype : the arguments
    d : torch.Tensor, shape (slots, H, length + drafts, K) or (slots, H, length + drafts), float32, or None
        The factors of decay, of keys or one for all; those of hgrn2 are 1 - k.
    b, k : torch.Tensor, shape (slots, H, length + drafts, K), k of G heads, dtype; b may be None
    u, v : torch.Tensor, shape (slots, H, length + drafts, V), float32 and dtype; u may be None
        The keys of u and v, the products S a of state and a, and values. v of delta rules and Mamba-2, and k of hgrn2
        are float32.
    cursors : torch.Tensor, shape (slots,), int32
        How many entries each slot has.
    arrivals : torch.Tensor, shape (slots,), int32
        Counters of blocks during a launch; zeros between launches.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit, of `reset` too; the message has its name, what was expected and what came.

    Notes
    -----
    All memory is allocated at once: with bfloat16, wkv7 and heads of 64 an entry has 896 bytes for each head, where a
    float32 state has 16384.

    Examples
    --------
    >>> pool = rwkv_jit.StatePool.rwkv7(8, layers=2, heads=4, head_size=64, width=256)
    >>> rings = [rwkv_jit.ReplayRing(8, "wkv7", 4, 64) for _ in range(2)]
    >>> rings[0].length, rings[0].k.shape
    (4, torch.Size([8, 4, 4, 64]))
    """

    def __init__(
        self, slots: int, op: ReplayOp, heads: int, head_size: int, value_size: int | None = None,
        length: int | None = None, drafts: int = 0, dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32, device: torch.device | str = "cuda", key_heads: int | None = None,
    ):  # fmt: skip
        if op not in OP_NAMES:
            raise ValueError(f"op: expected one of {', '.join(OP_NAMES)}, got {op!r}")
        states.check_dtype("dtype", dtype)
        states.check_dtype("state_dtype", state_dtype)
        self.op, self.dtype, self.state_dtype = op, dtype, state_dtype
        self.slots, self.heads = arguments.count("slots", slots, 1), arguments.count("heads", heads, 1)
        self.head_size = arguments.count("head_size", head_size, 1)
        self.value_size = head_size if value_size is None else arguments.count("value_size", value_size, 1)
        self.drafts = arguments.count("drafts", drafts, most=MOST_ENTRIES - 1)
        self.key_heads = heads if key_heads is None else arguments.count("key_heads", key_heads, 1)
        several = replay.entry_fields(ALL[op])
        if heads % self.key_heads or (self.key_heads < heads and "G" not in several["k"][0]):
            whose = f"a divisor of {heads} heads" if "G" in several["k"][0] else f"{heads} of {op}"
            raise ValueError(f"key_heads: expected {whose}, got {key_heads}")
        sizes = {"H": heads, "G": self.key_heads, "K": head_size, "V": self.value_size}
        if length is None:
            of_state = heads * head_size * self.value_size * state_dtype.itemsize
            of_entry = replay.entry_bytes(ALL[op], sizes, dtype.itemsize)
            length = min(replay.best_length(of_state, of_entry), MOST_ENTRIES - drafts)
        self.length = arguments.count("length", length, 1)
        if self.entries > MOST_ENTRIES:
            raise ValueError(f"length: expected at most {MOST_ENTRIES} with {drafts} speculative tokens, got {length}")
        wide = torch.promote_types(dtype, torch.float32)

        def new(name: str) -> Tensor | None:
            if name not in several:
                return None
            dims, is_wide = several[name]
            shape = [slots, sizes[dims[0]], self.entries, *(sizes[dim] for dim in dims[1:])]
            return torch.zeros(shape, dtype=wide if is_wide else dtype, device=device)

        # A tensor that is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.d, self.b, self.u = new("d"), new("b"), new("u")
            self.k: Tensor = new("k")  # type: ignore[assignment]  # which all have
            self.v: Tensor = new("v")  # type: ignore[assignment]
            self.cursors = torch.zeros(slots, dtype=torch.int32, device=device)
            self.arrivals = torch.zeros(slots, dtype=torch.int32, device=device)
        # In the order in which kernels take them; None for those that are not there.
        self.fields = (self.cursors, self.arrivals, self.d, self.b, self.k, self.v, self.u)
        self.tensors = tuple(x for x in self.fields if x is not None)

    def __repr__(self) -> str:
        return (
            f"ReplayRing({self.op}, {self.slots} slots, {self.heads} heads of K {self.head_size} and V "
            f"{self.value_size}, {self.length} entries and {self.drafts} speculative tokens, {self.dtype} beside "
            f"states of {self.state_dtype}; {self.nbytes / 1e6:.1f} MB on {self.device})"
        ).replace("torch.", "")

    @property
    def entries(self) -> int:
        """How many entries fit into each slot and head."""
        return self.length + self.drafts

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.k.device

    def pays(self, rows: int) -> bool:
        """Return whether a step of so many rows takes less time than an update.

        On an H100 that is where their states have 16 MiB or more, and are not those of wkv7 in 16 bits: below that the
        entries cost more time than the writes, and an entry of wkv7 is large beside a state of 16 bits.

        Examples
        --------
        >>> rwkv_jit.ReplayRing(64, "wkv7", 64, 64).pays(16)
        True
        """
        arguments.count("rows", rows)
        is_large = rows * self.heads * self.head_size * self.value_size * self.state_dtype.itemsize >= _LEAST_BYTES
        return is_large and (self.u is None or self.state_dtype.itemsize > 2)

    @property
    def nbytes(self) -> int:
        """The bytes of all entries, of all slots."""
        return sum(x.nbytes for x in self.tensors)

    def reset(self, slots: int | Iterable[int] | Tensor | None = None) -> None:
        """Forget the entries of slots, whose states count as they are from then on: for new sequences.

        Parameters
        ----------
        slots : int, several ints or torch.Tensor of them, optional
            The slots; all by default. In a tensor those below 0 are none, as in calls. Those of a tensor on a GPU are
            not looked at, unless RWKVJIT_CHECK=1: what is no slot is left out there.

        Examples
        --------
        >>> ring.reset(pool.allocate(2))
        """
        if slots is None:
            self.cursors.zero_()
            return
        if isinstance(slots, Tensor):
            if slots.dtype not in arguments.INDEX_TYPES:
                raise TypeError(f"slots: expected torch.int32 or torch.int64, got {slots.dtype}")
            if arguments.may_look_at([slots]):
                outside = slots[slots >= self.slots].tolist()
                if outside:
                    expected = f"expected slots below {self.slots}, or below 0 for none"
                    raise ValueError(f"slots: {expected}; got {outside[:8]}")
            index = slots.flatten().to(self.device, torch.int64, non_blocking=self.device.type == "cuda")
        else:
            listed = arguments.listed("slots", slots)
            if any(not 0 <= slot < self.slots for slot in listed):
                raise ValueError(f"slots: expected slots below {self.slots}, got {brief(slots)}")
            index = arguments.on_device(listed, self.device)
        kept = torch.ones(self.slots + 1, dtype=torch.int32, device=self.device)  # the last one is for no slot
        kept.index_fill_(0, index.where((index >= 0) & (index < self.slots), self.slots), 0)
        self.cursors.mul_(kept[:-1])
