"""What modules share: checks, files of states, how parameters begin, last tokens, short convolutions, and autocast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.utils import _pytree as pytree

from rwkv_jit.call import sharding, tensors
from rwkv_jit.layers.causal_conv1d import causal_conv1d, causal_conv1d_update
from rwkv_jit.layers.gated import gated
from rwkv_jit.layers.gated_norm import gated_norm
from rwkv_jit.nn import pools
from rwkv_jit.pool import functions as updates
from rwkv_jit.pool.arguments import check_shape, count
from rwkv_jit.schedules.convolution import LEAST_WIDTH, MOST_WIDTH
from rwkv_jit.schedules.legal import Gate, Norm

_State = TypeVar("_State", bound=type)


def in_files(state: _State) -> _State:
    """Let files of `torch.export` and of `torch.save` hold states of a type, which is a named tuple."""
    torch.serialization.add_safe_globals([state])
    pytree._register_namedtuple(state, serialized_type_name=f"rwkv_jit.nn.{state.__name__}")
    return state


class Pooled(NamedTuple):
    """A state of a layer in a pool [slots, ...], and the slots of the sequences, None for sequence i in slot i."""

    pool: Tensor
    slots: Tensor | None
    null_index: int

    @property
    def options(self) -> dict[str, Any]:
        """Return the slots as functions over a pool take them."""
        return {"state_indices": self.slots, "null_index": self.null_index}


class Sized(nn.Module):
    """A module that says its sizes in its repr, and sets all parameters to their initial values again."""

    _sizes: ClassVar[tuple[str, ...]] = ()  # attributes beside the width
    width: int

    def extra_repr(self) -> str:
        """Return the sizes of the module, for its repr."""
        return ", ".join([str(self.width), *(f"{name}={getattr(self, name)}" for name in self._sizes)])

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.RMSNorm)):
                module.reset_parameters()
        self._fill()

    def _fill(self) -> None:
        """Set those that no module inside has."""


class Decoding(Sized):
    """A layer that returns y and its state, and decodes over the states of a pool."""

    def _taps(self) -> Mapping[str, int]:
        """Return the channels of its short convolutions by name."""
        return {}

    @torch.no_grad()
    def step(self, x: Tensor, state: Any, slots: Tensor | None = None, null_index: int = -1) -> Tensor:
        """Return what is added to the residual for the next token of sequences, whose states change in a pool.

        Parameters
        ----------
        x : torch.Tensor, shape (B, C)
            The normed residual of a token of each sequence.
        state : as `forward` takes and returns it
            The pool: with slots in the place of sequences. A slot has no gaps.
        slots : torch.Tensor, shape (B,), int32 or int64, optional
            The slot of each sequence; by default sequence i has slot i.
        null_index : int, default -1
            A sequence with this slot, or one below, is padding: no state changes, and its result means nothing.

        Returns
        -------
        y : torch.Tensor, shape (B, C)

        Raises
        ------
        TypeError, ValueError
            An argument does not fit: the name, what was expected and what came. No state has changed.

        Notes
        -----
        Without gradients. The convolution and the recurrence are one launch each on a GPU, with norms of keys, gates
        and rates inside, and states are read and written where they lie. Beside products there are up to 6 launches, 7
        for norms of Mamba-2 in several groups. With hooks, or other modules in the place of convolutions, this is a
        call of the layer between copies of the states.
        """
        if tensor_of("x", x).dim() != 2 or x.shape[-1] != self.width:
            raise ValueError(f"x: expected shape [batch, {self.width}], got {list(x.shape)}")
        is_pair = bool(self._taps())
        several = tuple(tensors_of(state if is_pair else (state,), 1 + is_pair))
        for each in several:
            if each is None or each.device != x.device:
                got = "None" if each is None else each.device
                raise ValueError(f"state: expected memory of a pool on {x.device}, got {got}")
        if is_plain(self, type(self)) and are_plain_taps(self, self._taps()):
            pooled = tuple(Pooled(each, slots, null_index) for each in several)
            y, _ = self.forward(x.unsqueeze(1), pooled if is_pair else pooled[0])  # [B, 1, C]
            return y.squeeze(1)  # type: ignore[no-any-return]

        def of_rows(x: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            y, after = self(x, before if is_pair else before[0])
            return y, after if is_pair else (after,)

        return pools.step(of_rows, x, several, slots, null_index)[0]


def check_heads(width: int, head_size: int) -> int:
    """Return how many heads of a size a width has, once both are checked."""
    if count("width", width, 1) % count("head_size", head_size, 1):
        raise ValueError(f"width: expected a multiple of the head size, {head_size}, got {width}")
    return width // head_size


def fill_orthogonal(matrix: Tensor, gain: float) -> None:
    """Fill a matrix with orthogonal rows or columns. A matrix of 16 bits is rounded from one of float32."""
    made = torch.empty_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32), requires_grad=False)
    nn.init.orthogonal_(made, gain)
    with torch.no_grad():
        matrix.copy_(made)


def under_autocast(x: Tensor) -> Tensor:
    """Return the input of a layer in the dtype of autocast: norms before it leave float32, twice the memory."""
    return tensor_of("x", x).to(dtype_under_autocast(x))


def dtype_under_autocast(x: Tensor) -> torch.dtype:
    """Return the dtype in which a layer takes what is normed of a residual: that of autocast, but for float64."""
    dtype = tensors.autocast_dtype(x)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


# ---- modules that are run by functions of their parameters -------------------------------------------------------


_GLOBAL_HOOKS = (
    of_modules._global_forward_hooks, of_modules._global_forward_pre_hooks,
    of_modules._global_backward_hooks, of_modules._global_backward_pre_hooks,
)  # fmt: skip


def is_plain(module: nn.Module, kind: type[nn.Module], **settings: Any) -> bool:
    """Return whether a call of a module does what its type does with such settings: no adapter, and without hooks."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if type(module) is not kind or "forward" in module.__dict__ or any(hooks) or any(_GLOBAL_HOOKS):
        return False
    return all(getattr(module, name) == value for name, value in settings.items())


def is_plain_norm(norm: Any, kind: type[nn.Module], size: int) -> bool:
    """Return whether a norm is plain, lacks no parameter and no eps, and is one of so many channels each."""
    if not is_plain(norm, kind) or any(getattr(norm, own, 0) is None for own in ("weight", "bias", "eps")):
        return False
    if kind is nn.GroupNorm:
        return bool(norm.num_channels == norm.num_groups * size)
    return bool(norm.normalized_shape == (size,))


def is_plain_block(block: Any) -> bool:
    """Return whether all modules of a layer that a function may run are plain."""
    norms = block.ln1, block.ln2
    mixes_are = all(map(is_plain, (block.att, block.ffn), block._kinds))
    return mixes_are and all(is_plain_norm(norm, nn.LayerNorm, block.att.width) for norm in norms)


def norm_heads(
    norm: Any, kind: type[nn.Module], y: Tensor, gate: Tensor, gate_map: Gate, bonus: Tensor | None = None, **more: Any
) -> Tensor:
    """Return norms of heads and a bonus, gated, [..., H V], of y [..., H, V]. `more` makes a bonus: r, k, v, r_k."""
    if is_plain_norm(norm, kind, y.shape[-1]):
        of_norm: Norm = "rms" if kind is nn.RMSNorm else "layer"
        options: dict[str, Any] = {"bonus": bonus, "gate": gate_map, "norm": of_norm, "eps": norm.eps}
        if kind is nn.GroupNorm:
            return gated_norm(y, gate, norm.weight, norm.bias, **more, **options)
        if y.shape[1] != 1 or torch.is_grad_enabled() or sharding.any_distributed((y,)):
            return gated_norm(y, gate, norm.weight.expand(y.shape[-2:]), **options)
        # The heads of one token stand for tokens of one head, so that no launch repeats the weight for each head.
        gates = gate.reshape(y.shape[0], *y.shape[2:])  # [B, H, V]
        return gated_norm(y.transpose(1, 2), gates, norm.weight, **options).view_as(gate)
    normed = norm(y) if kind is nn.RMSNorm else norm(y.flatten(0, -3).flatten(1)).view_as(y)
    if more:
        r, k, v = (more[name].view_as(y) for name in "rkv")
        bonus = (r * k * more["r_k"]).sum(-1, keepdim=True) * v
    normed = normed if bonus is None else normed + bonus.view_as(y)
    return gated(normed.flatten(-2).to(y.dtype), gate, gate_map)  # it is float32 under autocast


# ---- short convolutions before recurrences -----------------------------------------------------------------------


def short_convolution(channels: int, conv_width: int, bias: bool, place: dict[str, Any]) -> nn.Conv1d:
    """Return the taps of channels, by the names and shapes of torch's module. `convolve` does the work."""
    if not LEAST_WIDTH <= count("conv_width", conv_width) <= MOST_WIDTH:
        raise ValueError(f"conv_width: expected {LEAST_WIDTH} to {MOST_WIDTH}, got {conv_width}")
    return nn.Conv1d(channels, channels, conv_width, groups=channels, bias=bias, **place)


def are_plain_taps(layer: Any, sizes: Mapping[str, int]) -> bool:
    """Return whether calls of short convolutions would do what `convolve` does with their parameters."""
    settings: dict[str, Any] = {"stride": (1,), "dilation": (1,), "padding": (0,)}
    if len(sizes) > 1:
        settings["bias"] = None
    for name, size in sizes.items():
        own = {"in_channels": size, "out_channels": size, "groups": size, "kernel_size": (layer.conv_width,)}
        if not is_plain(getattr(layer, name), nn.Conv1d, **settings, **own):
            return False
    return True


def convolve(
    layer: Any, x: Tensor, sizes: Mapping[str, int], before: Tensor | Pooled | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return silu of convolved tokens, and each sequence's last ones; `sizes` are channels by convolution name."""
    before = before.to(x.dtype) if isinstance(before, Tensor) else before
    if not isinstance(before, Pooled) and not are_plain_taps(layer, sizes):
        return _convolve_by_calls(layer, x, sizes, before, cu_seqlens)
    taps = [getattr(layer, name) for name in sizes]
    several = [each.weight.squeeze(1) for each in taps]
    weight = several[0] if len(several) == 1 else torch.cat(several)  # [channels, W]
    if isinstance(before, Pooled):
        y = causal_conv1d_update(x, before.pool, weight, taps[0].bias, activation="silu", **before.options)
        return y, before.pool
    y, last = causal_conv1d(
        x, weight, taps[0].bias, initial_state=before, output_final_state=True, cu_seqlens=cu_seqlens,
        activation="silu",
    )  # fmt: skip
    assert last is not None
    return y, last


def _convolve_by_calls(
    layer: Any, x: Tensor, sizes: Mapping[str, int], before: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the same by calls of the modules, of one sequence after the other."""
    bounds, width = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist(), layer.conv_width - 1
    if before is None:
        before = x.new_zeros(max(x.shape[0], len(bounds) - 1), x.shape[2], width)  # [N, D, W - 1]
    made, lasts = [x.new_zeros(x.shape[0], x.shape[2], 0)], []  # [B, D, T]
    for begin, end, first in zip(bounds, bounds[1:], before.split(x.shape[0]), strict=False):
        text = torch.cat([first, x[:, begin:end].transpose(1, 2)], -1)  # [B, D, W - 1 + T]
        lasts.append(text[..., end - begin :])
        if begin < end:
            several: list[Tensor] = []
            for (name, size), part in zip(sizes.items(), text.split([*sizes.values()], 1), strict=True):
                several.append(getattr(layer, name)(part))
                check_shape(f"{name} of {list(part.shape)}", several[-1], (len(part), size, end - begin))
            made.append(torch.cat(several, 1))
    y = nn.functional.pad(torch.cat(made, -1), (0, x.shape[1] - bounds[-1]))
    return nn.functional.silu(y).transpose(1, 2), torch.cat(lasts)


def tensor_of(name: str, x: Any) -> Tensor:
    """Return an argument that is a dense tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")
    return tensors.from_any(name, x)


def tensors_of(state: Any, count: int = 2) -> Sequence[Any]:
    """Return the tensors of a state, or as many None where there is none."""
    if state is None:
        return (None,) * count
    if not isinstance(state, (tuple, list)) or len(state) != count:
        got = f"{len(state)} of them" if isinstance(state, (tuple, list)) else type(state).__name__
        raise TypeError(f"state: expected a tuple of {count} tensors, got {got}")
    return [None if x is None else tensor_of("state", x) for x in state]


def check_tokens(given: Any, width: int) -> Tensor:
    """Return what a layer reads, once its shape is checked."""
    x = tensor_of("x", given)
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"x: expected shape [batch, tokens, {width}], got {list(x.shape)}")
    return x


def check_both_states(
    state: Any, x: Tensor, cu_seqlens: Tensor | None, of_taps: tuple[int, ...], of_text: tuple[int, ...]
) -> tuple[Any, Any]:
    """Return the last tokens and the recurrence's state of each sequence, once their shapes are checked."""
    if state is None:
        return None, None
    if isinstance(state, tuple) and all(isinstance(each, Pooled) for each in state):
        kept = max(of_taps[1], *state[0].pool.shape[2:3], 0)  # a slot may keep more tokens than are read
        for i, (each, shape) in enumerate(zip(state, ((of_taps[0], kept), of_text), strict=True)):
            check_shape(f"state[{i}]", each.pool, (*each.pool.shape[:1], *shape))
            if not each.pool.is_floating_point():
                raise TypeError(f"state[{i}]: expected floating-point numbers, got {each.pool.dtype}")
        return state[0], state[1]
    if not (isinstance(state, (tuple, list)) and len(state) == 2 and all(isinstance(each, Tensor) for each in state)):
        raise TypeError(f"state: expected two torch.Tensor, got {type(state).__name__}")
    texts = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    for i, (each, shape) in enumerate(zip(state, (of_taps, of_text), strict=True)):
        check_shape(f"state[{i}]", each, (texts, *shape))
    return state[0], state[1]


def fill_steps(dt_bias: Tensor) -> None:
    """Fill what softplus makes steps of, so that these lie between 0.001 and 0.1, evenly by their logarithm."""
    least, most = math.log(0.001), math.log(0.1)
    steps = torch.exp(least + (most - least) * torch.rand(dt_bias.shape, device=dt_bias.device))
    with torch.no_grad():
        dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def fill_rates(A_log: Tensor, least: float) -> None:
    """Fill the logarithms of rates between a least one and 16."""
    with torch.no_grad():
        A_log.copy_(torch.empty(A_log.shape, device=A_log.device).uniform_(least, 16).log())


# ---- parts of sequences, of which other processes have the others ------------------------------------------------


def before_texts(
    x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, shard: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x, the token before each of its sequences, and where these end: of a part, where there is a shard.

    Both are in the dtype in which a layer mixes tokens.
    """
    x = under_autocast(x)
    first = None if first is None else tensor_of("state", first).to(x.dtype)
    if shard is None:
        return x, first, cu_seqlens
    from rwkv_jit.parallel import shifting

    bounds = bounds_of(x, cu_seqlens, shard)
    x, last = shifting.with_last(x)
    return x, shifting.token_before(last, shard, first), bounds


def normed_before_texts(
    x: Tensor, add: Tensor | None, norm: nn.LayerNorm, first: Tensor | None, shard: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return x, what is added to it, and the token before each sequence of a part as `norm_shift` takes it: normed."""
    from rwkv_jit.parallel import shifting

    x, last = shifting.with_last(x)
    if add is not None:
        add, last_added = shifting.with_last(add)
        last = last + last_added
    normed = nn.functional.layer_norm(last, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return x, add, shifting.token_before(normed.to(dtype_under_autocast(x)), shard, first)


def bounds_of(x: Tensor, cu_seqlens: Tensor | None, shard: Any) -> Tensor | None:
    """Return where packed sequences end: of a part, where there is a shard."""
    if shard is None:
        return cu_seqlens
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected None with a shard, which has the bounds of all parts")
    from rwkv_jit.parallel.shard import Shard

    if not isinstance(shard, Shard):
        raise TypeError(f"shard: expected a rwkv_jit.parallel.Shard, got {type(shard).__name__}")
    shard.check("x", x)
    return shard.packing(x.device)


def recur(
    op: Callable[..., tuple[Tensor, Tensor | None]], inputs: Sequence[Tensor], state: Tensor | Pooled | None,
    cu_seqlens: Tensor | None, shard: Any = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y of a recurrence and the states behind all sequences: of a part, where there is a shard."""
    if isinstance(state, Pooled):
        y = getattr(updates, f"{op.__name__}_update")(state.pool, *inputs, **options, **state.options)
        return y, state.pool
    if shard is None:
        y, final = op(*inputs, state, True, cu_seqlens, **options)
    else:
        from rwkv_jit.parallel import functions

        y, final = getattr(functions, op.__name__)(*inputs, shard, state, True, **options)
    assert final is not None
    return y, final
