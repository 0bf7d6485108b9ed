"""The whole RWKV-7 language model, with the parameters of the official checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rwkv_jit.inference import arguments
from rwkv_jit.inference.pool import StatePool
from rwkv_jit.layers.loss import linear_cross_entropy
from rwkv_jit.nn import checkpoints, parts
from rwkv_jit.nn.rwkv7 import RWKV7Block, RWKV7State
from rwkv_jit.ops import checks

# The official trainer has these too and never reads them; released files lack them.
_UNUSED = {f"blocks.0.att.v{number}" for number in range(3)}


class RWKV7(nn.Module):
    """The RWKV-7 language model: its state dict has the names and shapes of the official checkpoints.

    B is the batch, T the tokens, C the channels, N the number of texts: B, or one less than the length of `cu_seqlens`.

    Parameters
    ----------
    vocabulary : int
        Number of tokens that there are.
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
        Whether the backward computes the activations of each layer again, in place of keeping them. It is an attribute,
        which may be changed.
    device : torch.device or str, optional
        Where parameters are. On "meta" they have no memory: call `to_empty`, then `reset_parameters`.
    dtype : torch.dtype, optional
        Of the parameters.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came.

    Notes
    -----
    Initial values are those that the official trainer begins with: orthogonal matrices, zeros where a branch ends, a
    small embedding, and decays, mixes and norms that go by the layer. `param_groups` has its learning rates.

    `loss` and `step` are methods beside `forward`. Wrappers that work in `forward` alone, like DistributedDataParallel,
    take a module of your own whose `forward` calls `loss`.

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

    def __init__(
        self, vocabulary: int, width: int, layers: int, head_size: int = 64, *, hidden: int | None = None,
        ranks: Mapping[str, int] | None = None, checkpointing: bool = False, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        arguments.count("vocabulary", vocabulary, 1)
        arguments.count("layers", layers, 1)
        self.checkpointing, self.head_size = checkpointing, head_size
        self.emb = nn.Embedding(vocabulary, width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            RWKV7Block(width, layer, layers, head_size, hidden=hidden, ranks=ranks, device=device, dtype=dtype)
            for layer in range(layers)
        )
        self.ln_out = nn.LayerNorm(width, device=device, dtype=dtype)
        self.head = nn.Linear(width, vocabulary, bias=False, device=device, dtype=dtype)
        self._reset_own_parameters()

    def reset_parameters(self) -> None:
        """Give all parameters their initial values: those that the official trainer begins with."""
        for block in self.blocks:
            block.reset_parameters()  # type: ignore[operator]
        self._reset_own_parameters()

    def _reset_own_parameters(self) -> None:
        nn.init.uniform_(self.emb.weight, -1e-4, 1e-4)
        self.ln_out.reset_parameters()
        vocabulary, width = self.head.weight.shape
        parts.fill_orthogonal(self.head.weight, 0.5 * max(vocabulary / width, 1) ** 0.5)

    # ---- training ------------------------------------------------------------------------------------------------

    def forward(
        self, tokens: Tensor, state: Sequence[RWKV7State] | None = None, cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:  # fmt: skip
        """Return the logits of the next token, at every token.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32
            The texts.
        state : sequence of RWKV7State, optional
            Of each layer, what came before this part of the texts; zeros by default. Gradients reach it.
        cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
            Where each of N packed texts begins, and where the last one ends; B is 1 then.
        return_state : bool, default False
            Whether to return the state after the last tokens too.

        Returns
        -------
        logits : torch.Tensor, shape (B, T, vocabulary)
        state : list of RWKV7State
            With `return_state`. It is not detached: `[x.detach() for x in state]` is.
        """
        hidden, after = self._hidden(tokens, state, cu_seqlens)
        logits = self.head(hidden)
        return (logits, after) if return_state else logits

    def loss(
        self, tokens: Tensor, targets: Tensor, l2_wrap: float = 1e-4, state: Sequence[RWKV7State] | None = None,
        cu_seqlens: Tensor | None = None, return_state: bool = False,
    ) -> Any:  # fmt: skip
        """Return the mean loss of the next tokens, by `linear_cross_entropy`: the logits are never all in memory.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32
            The texts.
        targets : torch.Tensor, shape (B, T), int64 or int32
            The token behind each token; -100 where there is none, or where none shall be learned.
        l2_wrap : float, default 1e-4
            As in `cross_entropy`.
        state, cu_seqlens, return_state
            As in `forward`.

        Returns
        -------
        loss : torch.Tensor, shape (), float32
        state : list of RWKV7State
            With `return_state`. It is not detached.
        """
        hidden, after = self._hidden(tokens, state, cu_seqlens)
        loss = linear_cross_entropy(hidden, self.head.weight, targets, l2_wrap=l2_wrap)
        return (loss, after) if return_state else loss

    def _hidden(
        self, tokens: Tensor, state: Sequence[RWKV7State] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, list[RWKV7State]]:
        """Return what the head reads, and the state after the last tokens."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens: expected shape [batch, tokens], got {list(tokens.shape)}")
        if state is not None and len(state) != len(self.blocks):
            raise ValueError(f"state: expected one of each of the {len(self.blocks)} layers, got {len(state)}")
        x, v_first, after = self.emb(tokens), None, []
        for layer, block in enumerate(self.blocks):
            given = x, v_first, None if state is None else state[layer], cu_seqlens
            if self.checkpointing and torch.is_grad_enabled():
                x, v_first, own = checkpoint(block, *given, use_reentrant=False)
            else:
                x, v_first, own = block(*given)
            after.append(own)
        return self.ln_out(x), after

    def param_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of an optimizer as the official trainer has them, each parameter in one.

        Parameters
        ----------
        lr : float
            Learning rate. The decays' offsets, w0 of time mixing, have twice as much.
        weight_decay : float
            Of the matrices of linear layers, the embedding and the head. Nothing else decays: neither norms and vectors
            nor the low-rank matrices.

        Returns
        -------
        list of dict
            For `torch.optim.AdamW` and the like. A scheduler that multiplies keeps the ratio of the rates.

        Examples
        --------
        >>> groups = model.param_groups(lr=6e-4, weight_decay=0.001)
        >>> [(group["lr"], group["weight_decay"]) for group in groups]
        [(0.0006, 0.0), (0.0012, 0.0), (0.0006, 0.001)]
        """
        plain: list[Tensor] = []
        fast: list[Tensor] = []
        decaying: list[Tensor] = []
        for name, parameter in self.named_parameters():
            if name.endswith("att.w0"):
                fast.append(parameter)
            else:
                (decaying if name.endswith(".weight") and parameter.dim() == 2 else plain).append(parameter)
        return [
            {"params": plain, "lr": lr, "weight_decay": 0.0},
            {"params": fast, "lr": 2 * lr, "weight_decay": 0.0},
            {"params": decaying, "lr": lr, "weight_decay": weight_decay},
        ]

    # ---- decoding ------------------------------------------------------------------------------------------------

    def new_pool(self, slots: int, reserved: int = 0) -> StatePool:
        """Return memory for the states of several texts.

        Parameters
        ----------
        slots : int
            How many slots there are, the reserved ones too.
        reserved : int, default 0
            How many slots at the front are never given out. `step` takes them for the padding of a batch.

        Returns
        -------
        StatePool
            With the names of `StatePool.rwkv7`. `wkv` is float32, and so are the last tokens of a model in float64; of
            others they have the dtype of the embedding.
        """
        like = self.emb.weight
        dtype = torch.float32 if like.dtype == torch.float64 else like.dtype
        sizes = len(self.blocks), like.shape[1] // self.head_size, self.head_size, like.shape[1]
        return StatePool.rwkv7(slots, *sizes, shift_dtype=dtype, device=like.device, reserved=reserved)

    @torch.no_grad()
    def step(self, tokens: Tensor, pool: StatePool, slots: Any = None) -> Tensor:
        """Read one token of each text, and return the logits of the next one.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B,), int64 or int32
            The tokens.
        pool : StatePool
            The states, with the names of `StatePool.rwkv7`. They change in place.
        slots : torch.Tensor, shape (B,), int32 or int64, or sequence of int, optional
            The slot of each text. Without it text i has slot i. A reserved slot is none: its row is padding.

        Returns
        -------
        logits : torch.Tensor, shape (B, vocabulary)

        Notes
        -----
        It is `shift_mix`, `wkv7_update` and the rest of a layer over a token of many texts, without gradients. It can
        be captured in a CUDA graph once it has run.

        Examples
        --------
        >>> pool = model.new_pool(8)
        >>> slots = pool.allocate(2)
        >>> model.step(torch.tensor([72, 105], device="cuda"), pool, slots).shape
        torch.Size([2, 256])
        """
        if slots is not None and not isinstance(slots, Tensor):
            slots = torch.tensor(slots, dtype=torch.int32, device=tokens.device)
        x, v_first = self.emb(tokens), None
        for layer, block in enumerate(self.blocks):
            states = RWKV7State(*(pool[name][layer] for name in RWKV7State._fields))
            x, v_first = block.step(x, v_first, states, slots, pool.reserved - 1)  # type: ignore[operator]
        return self.head(self.ln_out(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 1.0, top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Continue texts.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32
            Prompts of one length, of at least one token.
        count : int
            How many tokens to write.
        temperature : float, default 1.0
            By which logits are divided. 0 takes the most likely token.
        top_p : float, default 1.0
            Tokens are drawn from the most likely ones that have this probability together.
        generator : torch.Generator, optional
            Where random numbers come from, on the device of the model.

        Returns
        -------
        torch.Tensor, shape (B, count), dtype of tokens
        """
        arguments.count("count", count)
        checks.check_number("temperature", temperature)
        checks.check_number("top_p", top_p)
        if temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: expected more than 0 and at most 1, got {top_p}")
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise ValueError(
                f"tokens: expected shape [batch, tokens] with at least one token, got {list(tokens.shape)}"
            )
        hidden, state = self._hidden(tokens)
        pool = self.new_pool(len(tokens))
        for layer, own in enumerate(state):
            for name, x in own._asdict().items():
                pool[name][layer].copy_(x)
        logits, written = self.head(hidden[:, -1]), tokens.new_empty(len(tokens), count)
        for place in range(count):
            written[:, place] = _drawn(logits, temperature, top_p, generator)
            if place + 1 < count:
                logits = self.step(written[:, place], pool)
        return written

    # ---- files ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_checkpoint(
        cls, path: str | os.PathLike[str], *, device: Any = None, dtype: torch.dtype | None = None
    ) -> RWKV7:
        """Return the model of an official checkpoint, whose sizes are read from the shapes in it.

        Parameters
        ----------
        path : str or path
            A file of `torch.save`, or of safetensors if its name ends so.
        device : torch.device or str, optional
            Where parameters shall be; by default on the CPU.
        dtype : torch.dtype, optional
            Of the parameters; by default as in the file.

        Returns
        -------
        RWKV7

        Raises
        ------
        ValueError
            The file has other parameters than an RWKV-7 model: every name that is missing or foreign, or every tensor
            that has another shape. v0, v1 and v2 of the first layer, which nobody reads, may be there.
        ImportError, OSError
            safetensors is not installed; or the file cannot be read.
        """
        found = {name: x for name, x in checkpoints.read(path).items() if name not in _UNUSED}
        checkpoints.check_names(path, found, cls(1, 1, _layers(found), 1, device="meta").state_dict())
        vocabulary, width = _matrix(path, found, "emb.weight")
        _, head_size = _matrix(path, found, "blocks.0.att.r_k")
        # The first layer has no v1, and a model of one layer no rank of it.
        matrices = {x: f"blocks.{int(x == 'v')}.att.{x}1" for x in "wavg"}
        ranks = {letter: _matrix(path, found, name)[1] for letter, name in matrices.items() if name in found}
        hidden, _ = _matrix(path, found, "blocks.0.ffn.key.weight")
        model = cls(vocabulary, width, _layers(found), head_size, hidden=hidden, ranks=ranks, device="meta")
        held = checkpoints.in_shape(path, found, model.state_dict())
        model.load_state_dict({name: x.to(device, dtype) for name, x in held.items()}, assign=True)
        return model

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters to a file that official programs read.

        Parameters
        ----------
        path : str or path
            Where to; a file of safetensors if its name ends so, and else of `torch.save`.

        Raises
        ------
        ImportError, OSError
            safetensors is not installed; or the file cannot be written. What was there stays then.
        """
        checkpoints.write(path, self.state_dict())


def _layers(names: Iterable[str]) -> int:
    found = (re.match(r"blocks\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=0)


def _matrix(path: str | os.PathLike[str], found: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    shape = found[name].shape
    if len(shape) != 2:
        raise ValueError(f"path: expected a matrix for {name} in {path}, got shape {list(shape)}")
    return shape[0], shape[1]


def _drawn(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Return the next token of every text."""
    if temperature == 0:
        return logits.argmax(-1)
    chances, order = torch.softmax(logits.float() / temperature, -1).sort(-1, descending=True)
    kept = chances * (chances.cumsum(-1) - chances < top_p)  # the most likely token always is
    return order.gather(-1, torch.multinomial(kept, 1, generator=generator)).squeeze(-1)
