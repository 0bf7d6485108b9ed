"""The loss of training as its equations are written, in float64."""

import torch


def cross_entropy(logits, targets, l2_wrap=0.0, ignore_index=-100, reduction="mean", weights=None):
    """The loss of logits, and its gradient: of the sum of losses times `weights` where there is no reduction."""
    x, targets = logits.detach().double().reshape(-1, logits.shape[-1]), targets.flatten().long()
    counts = targets != ignore_index
    aims = torch.where(counts, targets, 0)
    rows = torch.arange(len(x), device=x.device)
    shifted = x - x.amax(-1, keepdim=True)
    exponentials = shifted.exp()
    sums = exponentials.sum(-1)
    loss = torch.where(counts, sums.log() - shifted[rows, aims], 0.0)
    gradient = exponentials / sums[:, None]
    gradient[rows, aims] -= 1
    largest = x.argmax(-1)
    gradient[rows, largest] += l2_wrap * x[rows, largest]
    gradient = torch.where(counts[:, None], gradient, 0.0)
    if reduction == "mean":
        return loss.sum() / counts.sum(), (gradient / counts.sum()).view(logits.shape)
    if reduction == "sum":
        return loss.sum(), gradient.view(logits.shape)
    return loss.view(logits.shape[:-1]), (gradient * weights.double().flatten()[:, None]).view(logits.shape)


def linear_cross_entropy(hidden, weight, targets, bias=None, **options):
    """The loss of hidden states, and its gradients with respect to these, the matrix and the bias.

    Logits are rounded to the dtype of hidden.
    """
    x, matrix = (y.detach().double() for y in (hidden, weight))
    x = x.reshape(-1, x.shape[-1])
    logits = (x @ matrix.T + (0 if bias is None else bias.detach().double())).to(hidden.dtype)
    loss, gradient = cross_entropy(logits, targets, **options)
    return loss, ((gradient @ matrix).view(hidden.shape), gradient.T @ x, gradient.sum(0))
