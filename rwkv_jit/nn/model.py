"""The whole language models of RWKV-5, 6 and 7, with the parameters of the official checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rwkv_jit.nn import checkpoints
from rwkv_jit.nn.language_model import LanguageModel
from rwkv_jit.nn.rwkv5 import RWKV5Block, RWKV5State
from rwkv_jit.nn.rwkv6 import RWKV6Block, RWKV6State
from rwkv_jit.nn.rwkv7 import RWKV7Block, RWKV7State


class RWKV5(LanguageModel):
    """The RWKV-5.2 language model, which the released "World" models are: its state dict has their names and shapes.

    Parameters
    ----------
    vocabulary, width, layers, head_size, hidden, checkpointing, device, dtype
        As in `RWKV7`, with K and V of `wkv5`; by default `hidden` is the multiple of 32 at or below 3.5 times the
        width, 32 at least.

    Notes
    -----
    Initial values and the groups of `param_groups` are those of the official trainer. Everything else is as in `RWKV7`.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892. Names and
    initial values are those of x052 in RWKV-LM, https://github.com/BlinkDL/RWKV-LM.

    Examples
    --------
    >>> model = rwkv_jit.nn.RWKV5(256, width=128, layers=2, device="cuda")
    >>> tokens = torch.randint(256, (2, 33), device="cuda")
    >>> model(tokens).shape, model.generate(tokens, 5).shape
    (torch.Size([2, 33, 256]), torch.Size([2, 5]))
    """

    _Block, _State, _by_head, _fast = RWKV5Block, RWKV5State, "time_faaaa", "time_decay"


class RWKV6(LanguageModel):
    """The RWKV-6 language model: its state dict has the names and shapes of the official checkpoints.

    Parameters
    ----------
    vocabulary, width, layers, head_size, hidden, checkpointing, device, dtype
        As in `RWKV5`, with K and V of `wkv6`.

    Notes
    -----
    Initial values and the groups of `param_groups` are those of the official trainer. Everything else is as in `RWKV7`.

    References
    ----------
    As of `RWKV5`; names and initial values are those of x060 in RWKV-LM.

    Examples
    --------
    >>> model = rwkv_jit.nn.RWKV6(256, width=128, layers=2, device="cuda")
    >>> tokens = torch.randint(256, (2, 33), device="cuda")
    >>> model(tokens).shape, model.generate(tokens, 5).shape
    (torch.Size([2, 33, 256]), torch.Size([2, 5]))
    """

    _Block, _State, _by_head, _fast = RWKV6Block, RWKV6State, "time_faaaa", "time_decay"


class RWKV7(LanguageModel):
    """The RWKV-7 language model: its state dict has the names and shapes of the official checkpoints.

    B is the batch, T the tokens, C the channels, N the number of sequences: B, or one less than the length of
    `cu_seqlens`.

    Parameters
    ----------
    vocabulary : int
        Number of different tokens.
    width : int
        C, a multiple of the head size.
    layers : int
        Number of layers.
    head_size : int, default 64
        K and V of `wkv7`.
    hidden : int, optional
        Of channel mixing; four times the width by default.
    ranks : mapping of str to int, optional
        As in `RWKV7TimeMix`.
    checkpointing : bool, default False
        Whether the backward computes the activations of each layer again, instead of keeping them. It is an attribute,
        which may be changed.
    device : torch.device or str, optional
        Where parameters are. On "meta" they have no memory: call `to_empty`, then `reset_parameters`.
    dtype : torch.dtype, optional
        Of the parameters.

    Notes
    -----
    Initial values are those that the official trainer begins with: orthogonal matrices, zeros where a branch ends, a
    small embedding, and decays, mixes and norms that depend on the layer. `param_groups` has its learning rates.

    `loss` and `step` are methods beside `forward`. Wrappers that work only in `forward`, like DistributedDataParallel,
    need a module whose `forward` calls `loss`.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456. Names and initial values are
    those of RWKV-LM's trainer, https://github.com/BlinkDL/RWKV-LM.

    Examples
    --------
    >>> model = rwkv_jit.nn.RWKV7(256, width=128, layers=2, device="cuda")
    >>> optimizer = torch.optim.AdamW(model.param_groups(lr=6e-4, weight_decay=0.001), betas=(0.9, 0.99), eps=1e-18)
    >>> tokens = torch.randint(256, (2, 33), device="cuda")
    >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> optimizer.step()
    >>> model(tokens).shape, model.generate(tokens, 5).shape
    (torch.Size([2, 33, 256]), torch.Size([2, 5]))
    """

    _Block, _State, _by_head, _fast = RWKV7Block, RWKV7State, "r_k", "w0"
    _begin = (None,)  # values of a layer before the first one
    # The official trainer has these too and never reads them; released files lack them.
    _unused = frozenset(f"blocks.0.att.v{number}" for number in range(3))

    def __init__(
        self, vocabulary: int, width: int, layers: int, head_size: int = 64, *, hidden: int | None = None,
        ranks: Mapping[str, int] | None = None, checkpointing: bool = False, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place = {"device": device, "dtype": dtype}
        self._make(vocabulary, width, layers, head_size, checkpointing, place, hidden=hidden, ranks=ranks)

    @staticmethod
    def _sizes_in(path: str | os.PathLike[str], found: Mapping[str, Tensor]) -> dict[str, Any]:
        # The first layer has no v1, and a model of one layer no rank of it.
        names = {x: f"blocks.{int(x == 'v')}.att.{x}1" for x in "wavg"}
        return {"ranks": {x: checkpoints.matrix(path, found, name)[1] for x, name in names.items() if name in found}}
