"""CUDA graphs that a CPU repeats: a capture notes every op of torch with its memory, and a replay does them again."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}


class _Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.__name__.partition(".")[0] in _HOST:
            raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
        made = op(*args, **(kwargs or {}))
        self.steps.append((op, args, kwargs or {}, made))
        return made


class TapeGraph:
    """A stand-in for `graphs.Graph`. As a capture on a GPU does nothing, its first replay is left out.

    A replay runs no Python of the function: what a graph on a GPU leaves out, this leaves out too.
    """

    captured = 0
    replayed = 0

    def __init__(self, function, device, pool, stream):
        noting = _Noting()
        with noting:
            self.results = function()
        self.steps, self.is_new = noting.steps, True
        type(self).captured += 1

    def replay(self):
        type(self).replayed += 1
        if self.is_new:
            self.is_new = False
            return
        for op, args, kwargs, made in self.steps:
            again = op(*args, **kwargs)
            for x, y in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(x, torch.Tensor) and x.data_ptr() != y.data_ptr() and x.numel():
                    x.copy_(y)
