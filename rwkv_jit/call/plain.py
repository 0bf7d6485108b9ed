"""The recurrences in plain torch, by blocks of tokens and products of matrices: what CPU tensors run.

Tokens read the tokens before them in a tree: chunks of one token are merged to chunks of two, those to chunks of four,
and so on. What the second half reads of the first one is a product of matrices: its queries, decayed from the middle to
the token, times the keys of the first half, decayed from the token to the middle. So factors of the state are only ever
multiplied: nothing divides by a decay or takes its logarithm, and factors of 0 and below are as good as others. No
product holds a later token either: what is not finite there leaves earlier results alone.

For wkv7, u_t = S_{t-1} a_t is a value of key b_t that is known once the tokens before have been read. A token then has
two queries, one for u and one for y, and u of the first half moves the queries of the second one:

    S_{t-1} a_t = S a_t^T + u_t        with S the state before the block, and a_t the query after all merges
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.plain import operands, reference
from rwkv_jit.plain.reference import decay_factor, final_states, starting_states
from rwkv_jit.schedules.legal import Wkv4Decay
from rwkv_jit.schedules.problem import Op

FAMILIES = ("delta", "diagonal")  # that it knows
CHUNK_LEN = 32  # tokens between states
PIECE = 2**16  # elements of an input that are worked on at once: they fit into the caches, and calls cost little
FEWEST_TOKENS = 8  # for fewer, the loop of the reference makes fewer calls
# Factors whose product over a chunk stays far from the largest float32.
LARGEST_FACTOR = 8.0
# What w is where there is no token, so that the state stays as it is.
NO_DECAY = {"raw": -torch.inf, "sigmoid": -torch.inf, "log": 0.0, "direct": 1.0}


def _wkv4(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, output_final_state: bool, *_: Any,
    decay: Wkv4Decay, **__: Any,
) -> Any:  # fmt: skip
    return reference.wkv4_ref(w, u, k, v, initial_state, output_final_state, decay)


# The definitions, by the op that they are of: what ops that go through another run is that of the other.
REFERENCES: dict[str, Callable[..., Any]] = {
    "wkv4": _wkv4, "wkv5": reference.wkv5_ref, "wkv6": reference.wkv6_ref, "wkv7": reference.wkv7_ref,
    "gla": reference.gla_ref, "linear_attention": reference.linear_attention_ref,
}  # fmt: skip
Block = Callable[..., tuple[Tensor, Tensor]]  # state [B, H, V, K], streams [B, T, H, .], fixed [H, K] -> y, state


# ---- a block of tokens -------------------------------------------------------------------------------------------


def _halves(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second `rows` of every two times as many."""
    first, second = x.reshape(x.shape[0] * x.shape[1] // (2 * rows), 2, rows, x.shape[2]).unbind(1)
    return first, second


def _merge(
    q: Tensor, k: Tensor, b: Tensor | None, v: Tensor, z: Tensor, d: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Let the tokens of every chunk read those before them.

    `q` [chunks, rows * tokens, K] is what each token reads the state before it with: one row, or those for u and y. `k`
    and `b` [chunks, tokens, K] are the keys of v and of u, `v` [chunks, tokens, V] the values, `d` the factors of the
    state, shaped as k, and `z` [chunks, rows * tokens, V] is what each query found in its token. Return q for the
    state before the chunk, z, k and b as after it, and the product of the factors, [chunks, 1, K].
    """
    (chunks, length, _), rows = k.shape, q.shape[1] // k.shape[1]
    total = None if d is None else d.reshape(chunks * length, 1, d.shape[2])
    size = 1
    while size < length:
        (q1, q2), (z1, z2) = _halves(q, rows * size), _halves(z, rows * size)
        (k1, k2), (v1, _) = _halves(k, size), _halves(v, size)
        z2 = torch.baddbmm(z2, q2 @ k1.mT, v1)
        moved = q2
        if total is not None:
            total1, total2 = _halves(total, 1)
            total, moved, k1 = total1 * total2, q2 * total1, k1 * total2
        if b is not None:
            b1, b2 = _halves(b, size)
            read = q2 @ b1.mT
            z2 = torch.baddbmm(z2, read, z1[:, ::rows])
            moved = torch.baddbmm(moved, read, q1[:, ::rows])
            b = torch.cat((b1 if total is None else b1 * total2, b2), 1)
        q, k, z = torch.cat((q1, moved), 1), torch.cat((k1, k2), 1), torch.cat((z1, z2), 1)
        size *= 2
    return q, z, k, b, total


def _block(
    state: Tensor, q: Tensor, k: Tensor, b: Tensor | None, v: Tensor, z: Tensor, d: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run tokens [B, T, H, .] on from a state [B, H, V, K]; return what queries found, and the state after them.

    Queries and results have a row for each token and head, [B, T, H, rows, .], of which the last is for y.
    """
    batch, tokens, heads, rows, _ = q.shape
    length = min(CHUNK_LEN, 1 << (tokens - 1).bit_length())
    count = -(-tokens // length)
    missing = count * length - tokens

    def in_chunks(x: Tensor, filler: float = 0.0) -> Tensor:
        """Return [count * B * H, length * rows, .], with `filler` behind the last token."""
        x = x.unsqueeze(3) if x.dim() == 4 else x
        if missing:
            x = torch.cat((x, x.new_full((batch, missing, *x.shape[2:]), filler)), 1)
        x = x.view(batch, count, length, *x.shape[2:]).permute(1, 0, 3, 2, 4, 5)
        return x.reshape(count * batch * heads, length * x.shape[4], x.shape[5])

    def chunks_of(x: Tensor | None) -> Sequence[Any]:
        """Return what each chunk has, [B * H, ., .]."""
        return [None] * count if x is None else x.view(count, batch * heads, *x.shape[1:]).unbind(0)

    v = in_chunks(v)
    b, d = None if b is None else in_chunks(b), None if d is None else in_chunks(d, 1.0)
    merged = _merge(in_chunks(q), in_chunks(k), b, v, in_chunks(z), d)
    after, results = state.reshape(batch * heads, *state.shape[2:]), []
    for v_, q_, z_, k_, b_, total_ in zip(*(chunks_of(x) for x in (v, *merged)), strict=True):
        read = torch.baddbmm(z_, q_, after.mT)
        results.append(read[:, rows - 1 :: rows])
        after = torch.baddbmm(after if total_ is None else after * total_, v_.mT, k_)
        if b_ is not None:
            after = torch.baddbmm(after, read[:, ::rows].mT, b_)
    y = torch.stack(results).view(count, batch, heads, length, v.shape[2]).permute(1, 0, 3, 2, 4)
    return y.reshape(batch, count * length, heads, v.shape[2])[:, :tokens], after.view(state.shape)


def _gated(
    decay: str, scale: float, state: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor | None = None,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run all ops but wkv7 on. The tokens see the state before the update with a bonus u, and after it without one."""
    dtype = v.dtype
    r, k, v = (x.to(state.dtype) for x in (r, k, v))
    d = None if w is None else decay_factor(w.to(state.dtype), decay).expand(r.shape)
    own = ((r if u is None else r * u.to(state.dtype)) * k).sum(-1, keepdim=True) * v
    q = r if u is not None or d is None else r * d
    y, state = _block(state, q.unsqueeze(3), k, None, v, own.unsqueeze(3), d)
    return (scale * y).to(dtype), state


def _wkv7(
    decay: str, scale: float, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Run wkv7 on: y_t = S_{t-1} (d r + a (b . r)) + v (k . r)."""
    dtype = v.dtype
    r, w, k, v, a, b = (x.to(state.dtype) for x in (r, w, k, v, a, b))
    d = decay_factor(w, decay)
    q = torch.stack((a, r * d + a * (b * r).sum(-1, keepdim=True)), 3)
    own = v * (k * r).sum(-1, keepdim=True)
    y, state = _block(state, q, k, b, v, torch.stack((torch.zeros_like(v), own), 3), d)
    return (scale * y).to(dtype), state


# ---- sequences ---------------------------------------------------------------------------------------------------


class _Recomputed(torch.autograd.Function):
    """A block whose intermediates are computed again in the backward, and not kept until then."""

    @staticmethod
    def forward(ctx: Any, block: Block, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.block = block
        ctx.save_for_backward(*inputs)
        return block(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad(), tensors.exactly(grads[0]):
            leaves = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted, strict=True)]
            asked = [x for x in leaves if x.requires_grad]
            # y alone depends on queries.
            results = [(x, grad) for x, grad in zip(ctx.block(*leaves), grads, strict=True) if x.requires_grad]
            own_grads = iter(torch.autograd.grad([x for x, _ in results], asked, [grad for _, grad in results]))
        return None, *(next(own_grads) if x.requires_grad else None for x in leaves)


def _walk(block: Block, state: Tensor, streams: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run sequences of one length, block by block. Parts come by `split`, whose backward is one concatenation."""
    batch, tokens, heads, _ = streams[0].shape
    per_token = batch * heads * max(x.shape[3] for x in streams)
    most = max(1, PIECE // (per_token * CHUNK_LEN)) * CHUNK_LEN
    rest = tokens % CHUNK_LEN
    lengths = [min(most, tokens - rest - begin) for begin in range(0, tokens - rest, most)] + [rest] * (rest > 0)
    # The last block's backward comes first. A transform of torch.func has to see what a block does.
    recomputed = len(lengths) - 1 if torch.is_grad_enabled() and tensors.is_eager() else 0
    recompute: Callable[..., tuple[Tensor, Tensor]] = _Recomputed.apply
    outputs = []
    for index, parts in enumerate(zip(*(x.split(lengths, 1) for x in streams), strict=True)):
        given = state, *parts, *fixed
        y, state = recompute(block, *given) if index < recomputed else block(*given)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _walk_packed(
    block: Block, starts: Tensor, streams: Sequence[Tensor], fixed: Sequence[Tensor], fillers: Sequence[float],
    bounds: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run packed sequences, those of about one length as a batch. `fillers` stand where a sequence is over."""
    groups: dict[int, list[int]] = {}
    for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        length = end - begin
        is_short = length <= CHUNK_LEN
        size = 1 << (length - 1).bit_length() if is_short and length else -(-length // CHUNK_LEN) * CHUNK_LEN
        groups.setdefault(size, []).append(index)
    tokens, device = bounds[-1], starts.device
    edges = torch.tensor(bounds, device=device)
    place = torch.empty(tokens, dtype=torch.int64, device=device)  # of a token among the results
    outputs, finals, members, done = [], [], [], 0
    for size, group in groups.items():
        chosen = torch.tensor(group, device=device)
        members.append(chosen)
        state = starts.index_select(0, chosen)
        if size:
            at = edges[chosen, None] + torch.arange(size, device=device)
            is_over = at >= edges[chosen + 1, None]
            place[at[~is_over]] = done + (~is_over).flatten().nonzero().squeeze(1)
            done += at.numel()
            rows = [
                x[0].index_select(0, at.clamp(max=tokens - 1).flatten()).unflatten(0, at.shape)
                .masked_fill(is_over[:, :, None, None], filler)
                for x, filler in zip(streams, fillers, strict=True)
            ]  # fmt: skip
            y, state = _walk(block, state, rows, fixed)
            outputs.append(y.flatten(0, 1))
        finals.append(state)
    final = torch.cat(finals).index_select(0, torch.cat(members).argsort())
    return torch.cat(outputs).index_select(0, place).unsqueeze(0), final


# ---- a call ------------------------------------------------------------------------------------------------------


def _grows(w: Tensor, decay: str) -> bool:
    """Return whether products of factors may leave the range of numbers where the state itself does not."""
    if decay not in ("log", "direct"):
        return False
    return bool((decay_factor(w.detach(), decay).abs() > LARGEST_FACTOR).any())


def loop(
    name: str, inputs: Sequence[Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    decay: str, state_layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the final state of a call that has been checked, by the op's reference."""
    own_decay = {} if decay == "none" else {"decay": decay}
    with tensors.exactly(inputs[0]):
        given = *inputs, initial_state, True, cu_seqlens, scale
        return REFERENCES[name](*given, state_layout=state_layout, **own_decay)  # type: ignore[no-any-return]


def run(
    name: str, inputs: Sequence[Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    decay: str, state_layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the final state of a checked call, differentiable once.

    The op's reference runs a few tokens, CUDA tensors, which may be in a capture, and factors whose products overflow.
    """
    v = inputs[3 if name == "wkv7" else 2]
    w = None if decay == "none" else inputs[1 if name == "wkv7" else 3]
    with tensors.exactly(v):
        is_small = v.shape[1] < FEWEST_TOKENS or v.numel() == 0
        if is_small or v.is_cuda or (w is not None and _grows(w, decay)):
            return loop(name, inputs, initial_state, cu_seqlens, scale, decay, state_layout)
        block = functools.partial(_wkv7 if name == "wkv7" else _gated, decay, scale)
        if cu_seqlens is not None and w is not None and w.dim() == 2:
            w = w.expand(inputs[0].shape)  # where a sequence is over, its state does not decay
            inputs = [*inputs[:3], w, *inputs[4:]]
        streams, fixed = [x for x in inputs if x.dim() == 4], [x for x in inputs if x.dim() == 2]
        batch, _, heads, head_size = inputs[0].shape
        bounds = None if cu_seqlens is None else cu_seqlens.tolist()
        sequences = batch if bounds is None else len(bounds) - 1
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        accumulator = v.new_empty(0, dtype=dtype)
        starts = starting_states(initial_state, sequences, heads, v.shape[3], head_size, accumulator, state_layout)
        if bounds is None:
            y, final = _walk(block, starts, streams, fixed)
        else:
            fillers = [NO_DECAY[decay] if x is w else 0.0 for x in streams]
            y, final = _walk_packed(block, starts, streams, fixed, fillers, bounds)
        return y, final_states(final, initial_state, state_layout)


def call(
    op: Op, inputs: Sequence[Any], traits: Mapping[str, Any], initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, decay: str, state_layout: str, by_blocks: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the final state of a checked call of an op, or of one through the op below.

    It is differentiable once backwards and faster `by_blocks`, else any number of times.
    """
    below, given = op.through or op, inputs
    if op.through is not None:
        decay = "log"
        with tensors.exactly(inputs[0]):
            given = operands.operands(op, inputs, traits)
    compute = run if by_blocks and below.family in FAMILIES else loop
    y, final = compute(below.name, given, initial_state, cu_seqlens, scale, decay, state_layout)
    return y if op.through is None else operands.behind(op, y, inputs), final
