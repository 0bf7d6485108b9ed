"""Decays without a promise: the tensor cores for all heads, the recurrent kernels for heads outside their range.

The forward of the first finds out which heads of which sequences these are, on the device, so nothing waits for the
host; then the recurrent kernels compute them once more, exactly, in place of what is not right there. Where no head
leaves the range, that is a kernel that returns at once. Forwards that walk through such chunks by themselves need no
second one: there the flags are for the backward alone.

What is kept for the backward is what the first forward keeps, and a flag per sequence and head: the backward repeats
the forward of the recurrent kernels for the heads with a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import tensors
from rwkv_jit.ops import prepared, recurrent
from rwkv_jit.ops.interface import Guardable, Inputs, Options, Saved
from rwkv_jit.signatures import BySignature


class Kept(NamedTuple):
    """What the forward keeps, in one tensor: the floats of the fast one, then the flags."""

    fast: Any
    shape: tuple[Any, Any]  # of the flags: sequences, heads

    @property
    def floats(self) -> Any:
        """Return how many there are in all."""
        return self.fast + self.shape[0] * self.shape[1]

    def split(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return the fast forward's floats, and the flags."""
        return kept[: self.fast], kept[self.fast :].view(torch.int32).view(self.shape)


class Forward(NamedTuple):
    """A guarded forward that can be run with any tensors of its signature."""

    fast: Guardable  # what another backend has prepared; it writes the flags
    exact: prepared.Forward | None  # None where the fast one is right for any decay
    kept: Kept
    options: Options

    def run(
        self,
        inputs: Sequence[Tensor],
        state: Tensor | None,
        bounds: Tensor | None,
        output_final_state: bool,
        save: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run it, as `interface.Forward` says."""
        of, device = self.kept, inputs[0].device
        kept = torch.empty(of.floats, dtype=torch.float32, device=device) if save else None
        saved = flags = None
        if kept is not None:
            saved, flags = of.split(kept)
        elif self.exact is not None:
            flags = torch.empty(of.shape, dtype=torch.int32, device=device)
        y, final, _ = self.fast.run(inputs, state, bounds, output_final_state, save, saved, flags)
        if self.exact is not None:
            if bounds is not None:
                bounds = tensors.readable_packing(bounds)
            self.exact.run(inputs, state, bounds, output_final_state, False, None, flags, (y, final))
        return y, final, kept


def _exact_options(options: Options) -> Options:
    return Options(
        options.scale, options.decay, options.state_layout, options.checkpoint_interval, None, None, "recurrent"
    )


def kept_for(fast: Saved, inputs: Inputs) -> Kept:
    """Return what a guarded forward keeps."""
    return Kept(fast.floats, (inputs.sequences, inputs["v"].shape[2]))


def prepare_forward(
    fast: Guardable, fast_saved: Saved, inputs: Inputs, state_dtype: torch.dtype, packed: bool, options: Options,
    training: bool,
) -> Forward | Guardable:  # fmt: skip
    """Find or compile what a guarded forward launches beside `fast`, if anything.

    What the backward will launch compiles beside it.
    """
    if fast.takes_any_decay and not training:
        return fast  # with nothing to keep, no flags either
    exact = prepared.prepare_forward(recurrent, inputs, state_dtype, packed, _exact_options(options), training)
    return Forward(fast, None if fast.takes_any_decay else exact, kept_for(fast_saved, inputs), options)


# Forwards that the backward repeats, by signature.
_repeats: BySignature[prepared.Forward] = BySignature()


def _repeat(inputs: Inputs, state: Tensor | None, cu_seqlens: Tensor | None, options: Options, flags: Tensor) -> Tensor:
    """Return what the recurrent backward needs, from a forward of the heads with flags."""
    given = (*inputs.streamed, *inputs.fixed)
    key = (inputs.op, inputs.sequences, options, tensors.signature((*given, state, cu_seqlens)))
    known = _repeats.get(key)
    if known is None:
        state_dtype = torch.float32 if state is None else state.dtype
        packed = cu_seqlens is not None
        forward = prepared.prepare_forward(recurrent, inputs, state_dtype, packed, options, True)
        known = _repeats.keep(key, forward)
    bounds = None if cu_seqlens is None else tensors.readable_packing(cu_seqlens)  # the forward has checked its values
    nothing = flags.new_empty(0), None
    _, _, saved = known.run(given, state, bounds, False, True, None, flags, nothing)
    assert saved is not None
    return saved


def backward(
    run_fast: Callable[..., tuple[list[Tensor], list[Tensor], Tensor | None]],
    fast_saved: Saved,
    inputs: Inputs,
    dy: Tensor,
    grad_final_state: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Tensor,
    options: Options,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Run the backward; the arguments and results of `backends.backward`."""
    saved, flags = kept_for(fast_saved, inputs).split(kept)
    plain, exact = options._replace(guarded=False), _exact_options(options)
    results = run_fast(plain, inputs, dy, grad_final_state, state, cu_seqlens, saved)
    again = _repeat(inputs, state, cu_seqlens, exact, flags)
    return prepared.backward(
        recurrent, inputs, dy, grad_final_state, cu_seqlens, again, exact, state is not None, flags, results
    )
