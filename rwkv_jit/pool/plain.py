"""Calls over a pool of states in plain torch: what CPU tensors run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit.call import plain
from rwkv_jit.plain import operands, rounding
from rwkv_jit.plain.reference import decay_factor
from rwkv_jit.schedules.problem import Op
from rwkv_jit.schedules.replay import entry_fields
from rwkv_jit.schedules.table import ALL
from rwkv_jit.schedules.update import FEW_TOKENS


def _with_w0(op: Op, inputs: Sequence[Tensor], w0: Tensor) -> list[Tensor]:
    """Return the inputs with w + w0 for w, in float32 at least."""
    place = op.names.index("w")
    w = inputs[place]
    summed = w + w0.view(w.shape[-2:]).to(torch.promote_types(w.dtype, torch.float32))
    return [*inputs[:place], summed, *inputs[place + 1 :]]


def update(
    op: Op, state: Tensor, y: Tensor, inputs: Sequence[Tensor], *, state_indices: Tensor | None,
    write_indices: Tensor | None, null_index: int, decay: str, w0: Tensor | None = None, seed: Tensor | None = None,
    scale: float = 1.0, state_layout: str = "vk", traits: Any = (),
) -> None:  # fmt: skip
    """Run as many tokens of each row."""
    slots = state.shape[0]
    rows = torch.arange(inputs[op.lead].shape[0], device=state.device)
    read = rows if state_indices is None else state_indices.to(torch.int64)
    written = read if write_indices is None else write_indices.to(torch.int64)
    nothing = null_index if state_indices is not None else -1
    there = (read > nothing) & (read >= 0) & (read < slots)
    nothing = null_index if write_indices is not None else nothing
    written = written.masked_fill(~there | (written <= nothing) | (written >= slots), -1)

    summed = inputs if w0 is None else _with_w0(op, inputs, w0)
    several = zip(summed, op.inputs.values(), strict=True)
    some = [x[there] if "B" in dims and x is not None else x for x, dims in several]
    begun = state[read[there]].to(torch.promote_types(state.dtype, torch.float32))
    result, final = plain.call(op, some, dict(traits), begun, None, scale, decay, state_layout)
    shown = y.view(inputs[op.names.index("v")].shape)
    shown.zero_()
    shown[there] = result.to(shown.dtype)
    kept = written[there] >= 0
    _write(state, written[there][kept], final[kept], seed)


def _write(state: Tensor, places: Tensor, final: Tensor, seed: Tensor | None) -> None:
    """Write states to their slots, rounded at random where there is a seed."""
    if seed is not None:
        of_slot = final[0].numel() // final.shape[1] if final.numel() else 0
        bits = rounding.random_bits(places, final.shape[1], of_slot, int(seed))
        final = rounding.round_at_random(final.float(), state.dtype, bits.view(final.shape))
    state[places] = final.to(state.dtype)


class Piece(NamedTuple):
    """A sequence, or its tokens between two checkpoints; slots are negative where nothing is read or written."""

    begin: int
    end: int
    read: int
    write: int
    is_whole: bool  # nothing of the sequence comes before


def varlen(
    op: Op, state: Tensor, y: Tensor, inputs: Sequence[Tensor], w0: Tensor | None, cu_seqlens: Tensor,
    state_indices: Tensor | None, write_indices: Tensor | None, has_initial_state: Tensor | None,
    num_active: Tensor | None, checkpoint_offsets: Tensor | None, checkpoint_indices: Tensor | None,
    seed: Tensor | None, null_index: int, scale: float, decay: str, state_layout: str, traits: Any, **_: Any,
) -> None:  # fmt: skip
    """Run sequences of any lengths; those of a few tokens are rounded at random where there is a seed."""
    shown = y.view(inputs[op.names.index("v")].shape)
    shown.zero_()
    summed = inputs if w0 is None else _with_w0(op, inputs, w0)
    given = (cu_seqlens, state_indices, write_indices, has_initial_state, num_active)
    for piece in pieces(shown.shape[1], state.shape[0], null_index, *given, checkpoint_offsets, checkpoint_indices):
        rows = slice(piece.begin, piece.end)
        several = zip(summed, op.inputs.values(), strict=True)
        some = [x[:, rows] if "T" in dims and x is not None else x for x, dims in several]
        wide = torch.promote_types(state.dtype, torch.float32)
        begun = state[piece.read : piece.read + 1] if piece.read >= 0 else torch.zeros_like(state[:1])
        result, final = plain.call(op, some, dict(traits), begun.to(wide), None, scale, decay, state_layout)
        shown[:, rows] = result.to(shown.dtype)
        if piece.write >= 0:
            at_random = piece.is_whole and piece.end - piece.begin <= FEW_TOKENS
            _write(state, torch.tensor([piece.write]), final, seed if at_random else None)


def pieces(
    tokens: int, slots: int, null_index: int, cu_seqlens: Tensor, state_indices: Tensor | None,
    write_indices: Tensor | None, has_initial_state: Tensor | None, num_active: Tensor | None,
    checkpoint_offsets: Tensor | None, checkpoint_indices: Tensor | None,
) -> Iterator[Piece]:  # fmt: skip
    """Return what there is to do, in an order in which it can be done."""
    count = cu_seqlens.shape[0] - 1
    bounds = [min(max(each, 0), tokens) for each in cu_seqlens.tolist()]
    active = count if num_active is None else min(max(int(num_active), 0), count)

    def legal(slot: int, is_given: bool = True) -> int:
        return -1 if (is_given and slot <= null_index) or not 0 <= slot < slots else slot

    own = range(count) if state_indices is None else state_indices.tolist()
    for i in range(active):
        begin, end = bounds[i], max(bounds[i + 1], bounds[i])
        slot = legal(own[i], state_indices is not None)
        if slot < 0 or begin == end:
            continue
        last = slot if write_indices is None else legal(int(write_indices[i]))
        read, done = slot if has_initial_state is None or bool(has_initial_state[i]) else -1, begin
        if checkpoint_offsets is not None and checkpoint_indices is not None:
            for offset, given in zip(checkpoint_offsets[i].tolist(), checkpoint_indices[i].tolist(), strict=True):
                place = legal(given)
                if place >= 0 and done < begin + offset <= end:
                    yield Piece(done, begin + offset, read, place, False)
                    read, done = place, begin + offset
        yield Piece(done, end, read, last, done == begin)


def replay(
    op: Op, state: Tensor, y: Tensor | None, cursors: Tensor, arrivals: Tensor, d: Tensor | None, b: Tensor | None,
    k: Tensor, v: Tensor, u: Tensor | None, length: int, inputs: Sequence[Tensor], w0: Tensor | None,
    state_indices: Tensor | None, accept_lens: Tensor | None, seed: Tensor | None, null_index: int, scale: float,
    decay: str, state_layout: str, kept: int | None, traits: Any = (),
) -> None:  # fmt: skip
    """Run the tokens of each row on its state with its entries; with more than `kept` of them the state is written."""
    slots, tokens, heads = state.shape[0], inputs[op.lead].shape[1] if inputs else 0, state.shape[1]
    wide = torch.promote_types(state.dtype, torch.promote_types(k.dtype, torch.float32))
    rows = next((x for x in (*inputs[:1], accept_lens) if x is not None), state)
    read = torch.arange(len(rows), device=state.device) if state_indices is None else state_indices.to(torch.int64)
    there = (read > (-1 if state_indices is None else null_index)) & (read >= 0) & (read < slots)
    places = read[there]
    past = cursors[places].to(torch.int64).clamp(0, length)
    if accept_lens is not None:
        past = past + accept_lens[there].to(torch.int64).clamp(0, k.shape[2] - length)
    now = state[places].to(wide)
    now = now if state_layout == "vk" else now.transpose(-1, -2)
    keys_say_decays = entry_fields(ALL[op.name])["k"][1]
    for i in range(k.shape[2]):
        of_d, of_u, of_b, of_v = (None if x is None else x[places, :, i].to(wide) for x in (d, u, b, v))
        of_k = operands.of_value_heads(k[places, :, i].to(wide), heads)
        of_d = 1 - of_k if keys_say_decays else of_d.unsqueeze(-1) if of_d is not None and of_d.dim() == 2 else of_d
        with_entry = _with_entry(now, of_d, of_u, of_b, of_v, of_k)
        now = torch.where((i < past)[:, None, None, None], with_entry, now)
    is_written = torch.zeros_like(past, dtype=torch.bool) if kept is None else past + tokens > kept

    if tokens and y is not None:
        summed = inputs if w0 is None else _with_w0(op, inputs, w0)
        several = zip(summed, op.inputs.values(), strict=True)
        some = [x if x is None else (x[there] if "B" in dims else x).to(wide) for x, dims in several]
        given, of_entry = _tokens_of(op, some, dict(traits), decay)
        results = []
        for t in range(tokens):
            token = {name: x[:, t] if x.dim() == 4 else x.expand_as(given["k"][:, t]) for name, x in given.items()}
            own_u = (now @ token["a"].unsqueeze(-1)).squeeze(-1) if "a" in token else None
            before, now = now, _with_entry(now, token.get("w"), own_u, token.get("b"), token["v"], token["k"])
            result = ((before if "u" in token else now) @ token["r"].unsqueeze(-1)).squeeze(-1)
            if "u" in token:
                result = result + (token["u"] * token["r"] * token["k"]).sum(-1, keepdim=True) * token["v"]
            results.append(scale * result)
            keeps, added, of_w, of_k = ~is_written, token["v"], token.get("w"), token["k"]
            if of_entry is not None:
                of_k, factor = (x[:, t] for x in of_entry)
                added = (added if own_u is None else added - own_u) * factor
            if d is not None and d.dim() == 3 and of_w is not None:
                of_w = of_w[..., 0]
            for field, x in zip((d, u, b, v, k), (of_w, own_u, token.get("b"), added, of_k), strict=True):
                if field is not None and x is not None:
                    field[places[keeps], :, (past + t)[keeps]] = x[keeps].to(field.dtype)
        found = operands.behind(op, torch.stack(results, 1), some) if op.through else torch.stack(results, 1)
        shown = y.view(inputs[op.names.index("v")].shape)
        shown.zero_()
        shown[there] = found.to(shown.dtype)
    if kept is None:
        return
    final = now if state_layout == "vk" else now.transpose(-1, -2)
    _write(state, places[is_written], final[is_written].contiguous(), seed)
    cursors[places] = torch.where(is_written, 0, past + tokens).to(torch.int32)


def _tokens_of(
    op: Op, inputs: Sequence[Any], traits: dict[str, Any], decay: str
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
    """Return the inputs of the recurrence by name, decays as factors; of an op below, what entries have too.

    That is keys as they come, and the factors of what is added to the state that are theirs in the op below.
    """
    named = {name: x for name, x in zip(op.names, inputs, strict=True) if x is not None}
    if op.through is None:
        return {**named, **({"w": decay_factor(named["w"], decay)} if "w" in named else {})}, None
    below = dict(zip(op.through.inputs, operands.operands(op, inputs, traits), strict=True))
    below["w"] = below["w"].exp()
    keys = named.get("k", below["k"])
    whole = operands.of_value_heads(keys, below["v"].shape[-2])
    most = whole.abs().amax(-1, keepdim=True)  # by which the squares of small keys are more than zero
    most = torch.where(most > 0, most, 1.0)
    along = whole / most
    squares = along.square().sum(-1, keepdim=True).clamp(0.5)
    return below, (keys, (below["k"] * along).sum(-1, keepdim=True) / squares / most)


def _with_entry(
    now: Tensor, d: Tensor | None, u: Tensor | None, b: Tensor | None, v: Tensor | None, k: Tensor | None
) -> Tensor:
    """Return states [V, K] with one more token in them."""
    assert v is not None
    assert k is not None
    now = now if d is None else now * d.unsqueeze(-2)
    now = now + v.unsqueeze(-1) * k.unsqueeze(-2)
    return now if u is None or b is None else now + u.unsqueeze(-1) * b.unsqueeze(-2)
