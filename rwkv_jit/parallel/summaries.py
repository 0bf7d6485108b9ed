"""What a part does to any state, S -> S P + Q, as rows of Q and of P in one tensor; products are float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def neutral(
    *batch: int, head_size: int, value_size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the summary of no tokens: Q is zero and P the identity.

    Parameters
    ----------
    *batch : int
        The sizes before the last two, such as the sequences and the heads.
    head_size, value_size : int
        K and V.
    dtype, device : default torch.float32 and "cpu"
        Of the summary.

    Returns
    -------
    torch.Tensor, shape (*batch, V + K, K)

    Examples
    --------
    >>> rwkv_jit.parallel.neutral(2, head_size=1, value_size=1)[1].tolist()
    [[0.0], [1.0]]
    """
    bias = torch.zeros(*batch, value_size, head_size, dtype=dtype, device=device)
    return torch.cat([bias, torch.eye(head_size, dtype=dtype, device=device).expand(*batch, -1, -1)], -2)


def compose(first: Tensor, *others: Tensor) -> Tensor:
    """Return the summary of parts that follow each other: P is the product of theirs.

    Parameters
    ----------
    first, *others : torch.Tensor, shape (..., V + K, K)
        The summaries of the parts, in their order.

    Returns
    -------
    torch.Tensor, shape and dtype of first

    Raises
    ------
    ValueError
        A summary has no rows for P, or another shape than the first.

    Examples
    --------
    >>> first, second = torch.tensor([[1.0], [0.5]]), torch.tensor([[2.0], [0.25]])
    >>> rwkv_jit.parallel.compose(first, second).tolist()
    [[2.25], [0.125]]
    """
    rows, values = first, _values("first", first)
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"others: expected shape {list(first.shape)} like the first, got {list(other.shape)}")
        rows = after(rows, other[..., :values, :], other[..., values:, :])
    return rows


def merge(state: Tensor, summary: Tensor) -> Tensor:
    """Return the state behind a part, from the state before it.

    Parameters
    ----------
    state, summary : torch.Tensor, shapes (..., V, K) and (..., V + K, K)
        S before the part, and what the part does to it.

    Returns
    -------
    torch.Tensor, shape and dtype of state

    Raises
    ------
    ValueError
        The shapes do not fit.

    Examples
    --------
    >>> rwkv_jit.parallel.merge(torch.tensor([[4.0]]), torch.tensor([[2.0], [0.25]])).tolist()
    [[3.0]]
    """
    values = _values("summary", summary)
    if state.shape[-2:] != (values, summary.shape[-1]):
        raise ValueError(f"state: expected shape [..., {values}, {summary.shape[-1]}], got {list(state.shape)}")
    return after(state, summary[..., :values, :], summary[..., values:, :])


def _values(name: str, summary: Tensor) -> int:
    values = summary.shape[-2] - summary.shape[-1] if summary.dim() > 1 else 0
    if values < 1:
        raise ValueError(f"{name}: expected shape [..., V + K, K], got {list(summary.shape)}")
    return values


# ---- Q and P apart, where P may be a row, the diagonal of one, or a number -----------------------------------------


def after(state: Tensor, bias: Tensor, transition: Tensor, backward: bool = False) -> Tensor:
    """Return S P + Q, or backwards E P^T + Q; rows of the state behind those of Q get none of it."""
    wide = state.to(torch.float64)
    if transition.shape[-2] == 1:
        product = wide * transition
    else:
        transition = transition.to(torch.float64)
        product = wide @ (transition.mT if backward else transition)
    if bias.shape == product.shape:
        return (product + bias).to(state.dtype)
    return torch.cat([product[..., : bias.shape[-2], :] + bias, product[..., bias.shape[-2] :, :]], -2).to(state.dtype)


def joined(parts: Sequence[tuple[Tensor, Tensor]], backward: bool = False) -> Tensor:
    """Return the state behind some parts that follow each other, from no state, by Q and P of each."""
    state = parts[0][0]
    for bias, transition in parts[1:]:
        state = after(state, bias, transition, backward)
    return state
