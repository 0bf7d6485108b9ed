"""What whole language models share: loss, groups of the optimizer, decoding, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rwkv_jit.call import checks
from rwkv_jit.kernels.errors import brief
from rwkv_jit.layers.loss import cross_entropy, linear_cross_entropy
from rwkv_jit.nn import common, pools, sampling
from rwkv_jit.nn.checkpoints import InFiles
from rwkv_jit.nn.graphs import Decoder
from rwkv_jit.nn.mixing import mixes_of
from rwkv_jit.nn.products import Product, products
from rwkv_jit.nn.sampling import Sampler
from rwkv_jit.pool import arguments
from rwkv_jit.pool.state_pool import StatePool

_ENDED_EVERY = 16  # steps after which the host looks whether all sequences have stopped
MOST_READ = 1024  # tokens of prompts that a graph reads: for more of them the GPU takes longer than the host


class LanguageModel(InFiles):
    """A whole model: embedding, layers, norm and head, with the names and shapes of the official checkpoints."""

    _Block: ClassVar[type[nn.Module]]
    _State: ClassVar[Any]  # the type of what a layer remembers
    _fast: ClassVar[str]  # the parameter of time mixing that has twice the learning rate
    _begin: ClassVar[tuple[None, ...]] = ()  # what the first layer is given beside the residual, by the layer before

    def __init__(
        self, vocabulary: int, width: int, layers: int, head_size: int = 64, *, hidden: int | None = None,
        checkpointing: bool = False, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        place = {"device": device, "dtype": dtype}
        self._make(vocabulary, width, layers, head_size, checkpointing, place, hidden=hidden)

    def _make(
        self, vocabulary: int, width: int, layers: int, head_size: int, checkpointing: bool, place: dict[str, Any],
        **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        arguments.count("vocabulary", vocabulary, 1)
        arguments.count("width", width, 1)
        arguments.count("layers", layers, 1)
        self.checkpointing, self.head_size = checkpointing, head_size
        self._decoder = Decoder()
        self.emb = nn.Embedding(vocabulary, width, **place)
        self.blocks = nn.ModuleList(
            self._Block(width, layer, layers, head_size, **sizes, **place) for layer in range(layers)
        )
        self.ln_out = nn.LayerNorm(width, **place)
        self.head = nn.Linear(width, vocabulary, bias=False, **place)
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
        common.fill_orthogonal(self.head.weight, 0.5 * max(vocabulary / width, 1) ** 0.5)

    # ---- training ------------------------------------------------------------------------------------------------

    def forward(
        self, tokens: Tensor, state: Sequence[Any] | None = None, cu_seqlens: Tensor | None = None,
        return_state: bool = False, shard: Any = None,
    ) -> Any:  # fmt: skip
        """Return the logits of the next token, at every token.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32
            The sequences.
        state : sequence of states, optional
            Of each layer, what came before this part of the sequences, as in `RWKV7State`; zeros by default. Gradients
            reach it.
        return_state : bool, default False
            Whether to return the state after the last tokens too.
        cu_seqlens, shard
            As `RWKV7TimeMix.forward` takes them.

        Returns
        -------
        logits : torch.Tensor, shape (B, T, vocabulary)
        state : list of states
            With `return_state`. It is not detached: `[x.detach() for x in state]` is.
        """
        checks.check_flag("return_state", return_state)
        hidden, after = self._hidden(tokens, state, cu_seqlens, shard)
        logits = self.head(hidden)
        return (logits, after) if return_state else logits

    def loss(
        self, tokens: Tensor, targets: Tensor, l2_wrap: float = 1e-4, state: Sequence[Any] | None = None,
        cu_seqlens: Tensor | None = None, return_state: bool = False, shard: Any = None,
    ) -> Any:  # fmt: skip
        """Return the mean loss of the next tokens, by `linear_cross_entropy`, which never stores all logits.

        A head with an adapter or hooks, or sharded alone, is called, and computes all logits.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32
            The sequences.
        targets : torch.Tensor, shape (B, T), int64 or int32
            The next token of each token; -100 if there is none, or if it does not count.
        l2_wrap : float, default 1e-4
            As in `cross_entropy`.
        state, cu_seqlens, return_state, shard
            As in `forward`. With a shard it is the mean over this part.

        Returns
        -------
        loss : torch.Tensor, shape (), float32
        state : list of states
            With `return_state`. It is not detached.
        """
        checks.check_flag("return_state", return_state)
        hidden, after = self._hidden(tokens, state, cu_seqlens, shard)
        loss = self._loss(hidden, targets, l2_wrap)
        return (loss, after) if return_state else loss

    def _loss(self, hidden: Tensor, targets: Tensor, l2_wrap: float) -> Tensor:
        head: Any = self.head
        if common.is_plain(head, nn.Linear):
            return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, l2_wrap=l2_wrap)
        return cross_entropy(head(hidden), targets, l2_wrap=l2_wrap)

    def _hidden(
        self, tokens: Tensor, state: Sequence[Any] | None = None, cu_seqlens: Tensor | None = None, shard: Any = None
    ) -> tuple[Tensor, list[Any]]:
        """Return what the head reads, and the state after the last tokens."""
        sampling.check_tokens(tokens, "batch", "tokens")
        if state is not None and not isinstance(state, (tuple, list)):
            raise TypeError(f"state: expected one of each layer, got {type(state).__name__}")
        if state is not None and len(state) != len(self.blocks):
            raise ValueError(f"state: expected one of each of the {len(self.blocks)} layers, got {len(state)}")
        between, after = [self.emb(tokens), *self._begin], []  # what a layer hands to the next one, the residual first
        for layer, block in enumerate(self.blocks):
            given = *between, None if state is None else state[layer], cu_seqlens, shard
            if self.checkpointing and torch.is_grad_enabled():
                *between, own = checkpoint(block, *given, use_reentrant=False)
            else:
                *between, own = block(*given)
            after.append(own)
        return self.ln_out(between[0]), after

    def param_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of an optimizer as the official trainer has them, each parameter in one.

        Parameters
        ----------
        lr : float
            Learning rate. The decays of time mixing (w0, or time_decay of RWKV-5 and 6) have twice as much.
        weight_decay : float
            Of the matrices of linear layers, the embedding and the head. Nothing else decays: neither norms and vectors
            nor low-rank matrices nor parameters per head.

        Returns
        -------
        list of dict
            For `torch.optim.AdamW` and other optimizers. A scheduler that multiplies keeps the ratio of the rates.

        Examples
        --------
        >>> groups = model.param_groups(lr=6e-4, weight_decay=0.001)
        >>> [(group["lr"], group["weight_decay"]) for group in groups]
        [(0.0006, 0.0), (0.0012, 0.0), (0.0006, 0.001)]
        """
        plain, fast, decaying = list[Tensor](), list[Tensor](), list[Tensor]()
        for name, parameter in self.named_parameters():
            if name.endswith(f"att.{self._fast}"):
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
        """Return memory for the states of several sequences.

        Parameters
        ----------
        slots : int
            Number of slots, including the reserved ones.
        reserved : int, default 0
            How many slots at the front are never allocated. `step` uses them for the padding of a batch.

        Returns
        -------
        StatePool
            With "wkv" [layers, slots, H, V, K], and with "time_shift" and "channel_shift" [layers, slots, width].
            "wkv" is float32, and so are the last tokens of a model in float64; of others they have the dtype of the
            embedding.
        """
        like, size = self.emb.weight, self.head_size
        width, shift_dtype = like.shape[1], torch.float32 if like.dtype == torch.float64 else like.dtype
        sizes = len(self.blocks), width // size, size, width
        return StatePool.rwkv7(slots, *sizes, shift_dtype=shift_dtype, device=like.device, reserved=reserved)

    @torch.no_grad()
    def step(self, tokens: Tensor, pool: StatePool, slots: Any = None) -> Tensor:
        """Read one token of each sequence, and return the logits of the next one.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B,), int64 or int32
            The tokens.
        pool : StatePool
            The states, from `new_pool`. They change in place.
        slots : torch.Tensor, shape (B,), int32 or int64, or sequence of int, optional
            The slot of each sequence. Without it sequence i has slot i. A row with a reserved slot is padding.

        Returns
        -------
        logits : torch.Tensor, shape (B, vocabulary)

        Notes
        -----
        It runs `shift_mix`, an update such as `wkv7_update` and the rest of each layer, without gradients. With up to
        32 sequences, or any number after `set_batch_invariant(True)`, products of float16 and bfloat16 are made by a
        kernel that reads each weight once, and in which a sequence has the same bits in any batch. On a GPU a
        second call with this pool and batch size is captured in a CUDA graph, which later calls replay. A model keeps
        up to 32 graphs, which share the memory of the largest step. Beside that each graph has its logits, and 4 bytes
        or 8 for each token and slot; pools are not kept. With hooks, or in a capture of the caller's, each call runs as
        it is. Parameters may change in place; if they or modules are replaced, graphs are captured anew.

        Examples
        --------
        >>> pool = model.new_pool(8)
        >>> slots = pool.allocate(2)
        >>> model.step(torch.tensor([72, 105], device="cuda"), pool, slots).shape
        torch.Size([2, 256])
        """
        sampling.check_tokens(tokens, "batch")
        slots = pools.slots_of(pool, self._State._fields, len(self.blocks), slots, tokens, len(tokens))
        return self._step(tokens, pool, slots, self._decoder.is_ready(self, self.emb.weight))

    @torch.no_grad()
    def prefill(self, tokens: Tensor, pool: StatePool, slots: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Read a prompt of each sequence, or the next part of one, and return the logits of the next token.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32
            The tokens.
        pool : StatePool
            The states, from `new_pool`, which each sequence continues. They change in place.
        slots : optional
            As `step` takes them, one for each sequence.
        cu_seqlens : torch.Tensor, shape (N + 1,), int32 or int64, optional
            Bounds of N packed sequences, of at least one token each: where each begins, and where the last one ends. B
            is then 1.

        Returns
        -------
        logits : torch.Tensor, shape (B, vocabulary) or (N, vocabulary)

        Notes
        -----
        As of `step`, graphs are kept of up to 8 kinds of calls: those that are not packed, of up to 1024 tokens in all,
        whose sequences all have a slot. They share the memory of the largest. With slots as ints nothing waits for the
        GPU; with a tensor of them the host looks which are reserved.

        Examples
        --------
        >>> pool = model.new_pool(8)
        >>> slots = pool.allocate(2)
        >>> bounds = torch.tensor([0, 2, 7], device="cuda")
        >>> model.prefill(torch.randint(256, (1, 7), device="cuda"), pool, slots, bounds).shape
        torch.Size([2, 256])
        """
        sampling.check_prompts(tokens, cu_seqlens)
        count, listed = len(tokens) if cu_seqlens is None else len(cu_seqlens) - 1, slots
        slots = pools.slots_of(pool, self._State._fields, len(self.blocks), slots, tokens, count)
        arguments.check_room("pool", pool[self._State._fields[0]][0], slots, count)
        read, written = pools.rows_of(slots, pool.reserved - 1, count, listed)
        states = [pool[name] for name in self._State._fields]
        if slots is not None and len(written[0]) < count:  # a row is without a slot
            return self._prefilled(states, tokens, cu_seqlens, read, written)
        return self._prefilled_rows(states, tokens, cu_seqlens, read)

    def _prefilled_rows(self, states: Sequence[Tensor], tokens: Tensor, cu_seqlens: Tensor | None, rows: Any) -> Tensor:
        """Return the logits of `prefill` for sequences that all have a row, from a graph where there may be one."""
        is_alike = cu_seqlens is None and tokens.numel() <= MOST_READ
        if not is_alike or not self._decoder.is_ready(self, self.emb.weight):
            return self._prefilled(states, tokens, cu_seqlens, rows, rows)

        def function(tokens: Tensor, rows: Any = rows) -> Tensor:
            return self._prefilled(states, tokens, None, rows, rows)

        arrays = [tokens, rows] if isinstance(rows, Tensor) else [tokens]
        return self._decoder.run(self._decoder.prompts, function, states, arrays)

    def _prefilled(
        self, states: Sequence[Tensor], tokens: Tensor, cu_seqlens: Tensor | None, read: Any, written: Any
    ) -> Tensor:  # fmt: skip
        """Return the logits of `prefill`; states, of all layers, change in place in the rows that are `written`."""
        of_layers, like = self._by_layer(states), self.emb.weight
        hidden, after = self._hidden(tokens, [pools.read(read, x, like) for x in of_layers], cu_seqlens)
        for several, own in zip(of_layers, after, strict=True):
            pools.write(several, written, own)
        last = hidden[:, -1] if cu_seqlens is None else hidden[0, cu_seqlens[1:].long() - 1]  # [sequences, C]
        return self.head(last)  # type: ignore[no-any-return]

    def _by_layer(self, states: Sequence[Tensor]) -> list[Any]:
        """Return the states of each layer, which are parts of those of all layers."""
        return [self._State(*(x[layer] for x in states)) for layer in range(len(self.blocks))]

    def _step(self, tokens: Tensor, pool: StatePool, slots: Tensor | None, has_graphs: bool) -> Tensor:
        """Return the logits of `step` for arguments that were checked, from a graph where there may be one."""
        states, null_index = [pool[name] for name in self._State._fields], pool.reserved - 1
        function, arrays = partial(self._stepped, states, null_index), [tokens] if slots is None else [tokens, slots]
        if not has_graphs:
            return function(*arrays)
        return self._decoder.run(self._decoder.steps, function, states, arrays, null_index)

    def _stepped(
        self, states: Sequence[Tensor], null_index: int, tokens: Tensor, slots: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Return the logits of a step, layer by layer; states, of all layers, change in place."""
        between: tuple[Any, ...] = (self.emb(tokens), *self._begin)
        blocks: list[Any] = [getattr(block, "_orig_mod", block) for block in self.blocks]  # of those that are compiled
        plain = [x for x in blocks if common.is_plain(x, self._Block) and common.is_plain_block(x)]
        # Mixes of all layers at once, as small launches of each would stand between its large ones.
        mixes = [mixes_of([getattr(x, half) for x in plain]).unbind() if plain else () for half in ("att", "ffn")]
        of_plain = {id(x): both for x, *both in zip(plain, *mixes, strict=True)}
        for own, of_layer in zip(blocks, self._by_layer(states), strict=True):
            given = *between, of_layer, slots, null_index
            made = own.step(*given, of_plain[id(own)]) if id(own) in of_plain else pools.step(own, *given)
            between = made if isinstance(made, tuple) else (made,)
        return products(Product(self.ln_out(between[0]), self.head))[0]

    @torch.no_grad()
    def generate(
        self, tokens: Tensor | Sequence[Tensor], count: int, *, temperature: float = 1.0, top_p: float = 1.0,
        generator: torch.Generator | None = None, lengths: Any = None, top_k: int | None = None, stop: Any = None,
        repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
        stream: Callable[[Tensor], object] | None = None,
    ) -> Tensor:  # fmt: skip
        """Continue sequences.

        Parameters
        ----------
        tokens : torch.Tensor, shape (B, T), int64 or int32, or sequence of torch.Tensor, shape (T,)
            Prompts, of at least one token each.
        count : int
            How many tokens to write.
        temperature : float, default 1.0
            Logits are divided by it. 0 takes the most likely token.
        top_p : float, default 1.0
            Tokens are drawn from the most likely ones that have this probability together.
        generator : torch.Generator, optional
            Source of random numbers, on the device of the model.
        lengths : sequence of int or torch.Tensor, shape (B,), optional
            How many tokens at the front of each row are its prompt; by default all.
        top_k : int, optional
            Tokens are drawn from so many of the most likely ones, before `top_p`.
        stop : int or sequence of int, optional
            Tokens that end a sequence, which then repeats its stop token.
        repetition_penalty : float, default 1.0
            Positive logits of tokens that are in the sequence, prompt included, are divided by it, others multiplied.
        presence_penalty : float, default 0.0
            It is subtracted from the logits of tokens that were written before.
        frequency_penalty : float, default 0.0
            The same, as often as they were written.
        stream : callable, optional
            Takes the tokens of each step, [B], as soon as they are queued on the GPU.

        Returns
        -------
        torch.Tensor, shape (B, count), dtype of tokens

        Notes
        -----
        Prompts of different lengths are packed into one row, without padding. Each token is a `step`. When every
        sequence has stopped, it may return before all random numbers are drawn.
        """
        options = {
            "temperature": temperature, "top_p": top_p, "generator": generator, "top_k": top_k, "stop": stop,
            "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
        }  # fmt: skip
        if stream is not None and not callable(stream):
            raise TypeError(f"stream: expected a function of the tokens of a step, got {brief(stream)}")
        prompts, sampler = sampling.prompts_of(tokens, count, lengths), Sampler(**options)
        written = prompts[0].new_empty(sum(map(len, prompts)), count)
        place = 0
        for drawn in self._continued(prompts, count, sampler, stream is not None):
            written[:, place], place = drawn, place + 1
            if stream is not None:
                stream(drawn)
        if place < count:
            written[:, place:] = written[:, place - 1 : place]
        return written

    def generate_stream(
        self, tokens: Tensor | Sequence[Tensor], count: int, *, lengths: Any = None, **options: Any
    ) -> Iterator[Tensor]:  # fmt: skip
        """Continue sequences, and yield the tokens of each step as soon as they are queued on the GPU.

        Parameters
        ----------
        tokens, count, lengths, **options
            As `generate` takes them, but for `stream`.

        Yields
        ------
        torch.Tensor, shape (B,), dtype of tokens
            It ends early when every sequence has stopped.

        Examples
        --------
        >>> for token in model.generate_stream(torch.tensor([[72, 105]], device="cuda"), 3, temperature=0):
        ...     print(token.tolist())
        """
        return self._continued(sampling.prompts_of(tokens, count, lengths), count, Sampler(**options), True)

    @torch.no_grad()
    def _continued(self, prompts: Sequence[Tensor], count: int, sampler: Sampler, is_watched: bool) -> Iterator[Tensor]:
        """Yield the tokens that continue prompts: one [B, T], or several [1, T] of different lengths."""
        pool = self.new_pool(sum(map(len, prompts)))  # first: it lies where that of the last call lay, as graphs know
        tokens, bounds = prompts[0], None
        if len(prompts) > 1:
            ends = torch.tensor([x.shape[1] for x in prompts]).cumsum(0)
            tokens, bounds = torch.cat([*prompts], 1), nn.functional.pad(ends, (1, 0)).to(tokens.device)
        states = [pool[name] for name in self._State._fields]
        logits = self._prefilled_rows(states, tokens, bounds, slice(len(pool)))
        has_graphs = self._decoder.is_ready(self, self.emb.weight)
        sampler.begin(logits, [row for x in prompts for row in x])
        for place in range(count):
            drawn = sampler.draw(logits).to(prompts[0].dtype)
            yield drawn
            if place + 1 == count or ((is_watched or place % _ENDED_EVERY == 0) and sampler.has_ended()):
                return
            if is_watched:  # by somebody who may have changed the model
                has_graphs = self._decoder.is_ready(self, self.emb.weight)
            logits = self._step(drawn, pool, None, has_graphs)
