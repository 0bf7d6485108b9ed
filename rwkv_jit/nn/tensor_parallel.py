"""Tensor parallelism: the heads of time mixing and the hidden channels of channel mixing, over the ranks of a mesh.

Parameters become DTensors. Activations stay plain tensors: a module takes what its rank holds of its parameters, and
runs the code of one rank with it, for fewer heads. What goes into a mix is whole on every rank, and has the sum of all
ranks' gradients; what comes out is the sum of their parts.
"""

from __future__ import annotations

import copy
from functools import cache
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rwkv_jit.layers.loss import linear_cross_entropy
from rwkv_jit.nn import common
from rwkv_jit.nn.language_model import LanguageModel
from rwkv_jit.nn.mixing import ChannelMix
from rwkv_jit.nn.rwkv4 import RWKV4TimeMix
from rwkv_jit.nn.rwkv5 import RWKV5TimeMix
from rwkv_jit.nn.rwkv6 import RWKV6TimeMix
from rwkv_jit.nn.rwkv7 import RWKV7ChannelMix, RWKV7TimeMix

Model = TypeVar("Model", bound=nn.Module)

# Along which dimension a parameter is cut; of others every rank has the whole.
_MATRICES = {"receptance.weight": 0, "key.weight": 0, "value.weight": 0, "output.weight": 1}
_WITH_HEADS = {**_MATRICES, "gate.weight": 0, "time_faaaa": 0, "ln_x.weight": 0, "ln_x.bias": 0}
_OF_CHANNELS = {"key.weight": 0, "value.weight": 1}
_CUTS: dict[type[nn.Module], dict[str, int]] = {
    RWKV4TimeMix: {**_MATRICES, "time_decay": 0, "time_first": 0},
    RWKV5TimeMix: {**_WITH_HEADS, "time_decay": 0},
    RWKV6TimeMix: {**_WITH_HEADS, "time_decay": 2, "time_decay_w2": 1},
    RWKV7TimeMix: {
        **_WITH_HEADS, "r_k": 0, "w0": 2, "a0": 2, "v0": 2, "k_k": 2, "k_a": 2, "w2": 1, "a2": 1, "v2": 1, "g2": 1,
    },
    ChannelMix: _OF_CHANNELS,
    RWKV7ChannelMix: _OF_CHANNELS,
    nn.Embedding: {"weight": 1},
    nn.Linear: {"weight": 0, "bias": 0},
    nn.LayerNorm: {},
}  # fmt: skip


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Split the parameters of a model over ranks, by heads and hidden channels, in place.

    Parameters
    ----------
    model : torch.nn.Module
        `RWKV7`, or modules that consist of the time mixing and channel mixing of RWKV-4, 5, 6 and 7, of layer norms,
        embeddings and linear layers. On every rank, on the device of the mesh. All ranks get the values of the first
        one.
    mesh : torch.distributed.device_mesh.DeviceMesh
        The ranks, in one dimension. Their number must divide the heads and the hidden channels of every layer.

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message has its name, what was expected and what came. No parameter has changed.

    Notes
    -----
    A rank has its part of the matrices of receptance, key, value and gate by rows, of those behind the recurrence and
    the hidden channels by columns, of the second low-rank matrices, and of the vectors of channels behind them. It has
    the whole of mixes, first low-rank matrices and norms. The embedding is cut by channels, and the head by tokens.

    Nothing else changes. All ranks call the model with the same tokens, and have the same loss and logits. States have
    the heads of the rank, the last tokens whole. Parameters keep their names in state dicts, where they are DTensors:
    `full_tensor()` is the official one. Make the optimizer, and call `torch.distributed.fsdp.fully_shard`, after this.
    Decoding and files are for a model that has not been spread.

    A mix exchanges the residual once in the forward and once in the backward. For the loss the rows of the batch are
    cut over the ranks too, and each gathers the head's matrix.

    References
    ----------
    Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism,
    arXiv:1909.08053.

    Examples
    --------
    >>> mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,))  # under torchrun, of two ranks
    >>> model = rwkv_jit.parallel.tensor_parallel(rwkv_jit.nn.RWKV7(256, width=128, layers=2, device="cuda"), mesh)
    >>> tokens = torch.randint(256, (2, 33), device="cuda")
    >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> model.blocks[0].att.key.weight.to_local().shape
    torch.Size([64, 128])
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, such as mesh['tp'] of a larger one, got {mesh.ndim}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: expected one with this rank, {torch.distributed.get_rank()}, got {mesh}")
    modules = _modules(model)
    owners: dict[int, str] = {}  # of parameters, the first ones that have them
    for name, module in modules.items():
        _check(name, module, mesh, owners)
    for module in modules.values():
        _spread(module, mesh)
    if hasattr(model, "new_pool"):
        model.__class__ = _class_of((_Model, type(model)))
    return model


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are cut as a whole, by their names."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") or not other for other in found)
        if is_inside or not (_cuts(module) is not None or [*module.parameters(recurse=False)]):
            continue
        found[name] = module
    return found


def _cuts(module: nn.Module) -> dict[str, int] | None:
    """Return along which dimensions parameters of a module are cut; None where nobody knows."""
    return next((cuts for kind, cuts in _CUTS.items() if isinstance(module, kind)), None)


def _check(name: str, module: nn.Module, mesh: DeviceMesh, owners: dict[int, str]) -> None:
    cuts, size = _cuts(module), mesh.size()
    if cuts is None:
        raise TypeError(f"model: expected modules that can be spread over ranks, got {type(module).__name__} ({name})")
    heads = getattr(module, "heads", 0)
    if heads % size:
        raise ValueError(f"mesh: expected a size that divides the {heads} heads of {name or 'model'}, got {size}")
    for own, x in module.named_parameters():
        where = f"{name}.{own}".lstrip(".")
        if isinstance(x, DTensor):
            raise TypeError(f"model: expected parameters of one rank, got a DTensor of {x.device_mesh} ({where})")
        if x.device.type != mesh.device_type:
            raise ValueError(f"model: expected parameters on {mesh.device_type}, as mesh is, got {x.device} ({where})")
        if owners.setdefault(id(x), where) != where:
            raise ValueError(f"model: expected weights that are not tied, got {owners[id(x)]} as {where} too")
        channels = x.shape[cuts[own]] if own in cuts else 0
        if channels % size and not isinstance(module, nn.Linear):  # tokens of a head may be cut anywhere
            raise ValueError(f"mesh: expected a size that divides the {channels} channels of {where}, got {size}")


def _spread(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters of a module by DTensors, and let it run with what this rank holds of them."""
    cuts = _cuts(module)
    assert cuts is not None
    part: Any = copy.deepcopy(module).to("meta")
    if hasattr(part, "heads"):
        part.heads //= mesh.size()
    for name, x in [*module.named_parameters()]:
        owner, _, own = name.rpartition(".")
        placement = Shard(cuts[name]) if name in cuts else Replicate()
        placed = nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]), x.requires_grad)
        module.get_submodule(owner).register_parameter(own, placed)
    kinds: dict[type[nn.Module], type[_Part]] = {nn.Embedding: _Embedding, nn.Linear: _Head, nn.LayerNorm: _Part}
    kind = next((kind for of, kind in kinds.items() if isinstance(module, of)), _Mix)
    module.__class__ = _class_of((kind, type(module)))
    spread: Any = module
    spread.mesh, spread.part, spread.names = mesh, (part,), [*signature(part.forward).parameters]


@cache
def _class_of(kinds: tuple[type, ...]) -> Any:
    """Return the class of a module that has been spread: what it becomes, and what it was."""
    return type(f"TensorParallel{kinds[-1].__name__}", kinds, {})


# ---- what modules become -----------------------------------------------------------------------------------------


class _Model(LanguageModel):
    """A model that has been spread: it is for training."""

    def _loss(self, hidden: Tensor, targets: Tensor, l2_wrap: float) -> Tensor:
        head: Any = self.head
        if not common.is_plain(head, _class_of((_Head, nn.Linear))):
            return super()._loss(hidden, targets, l2_wrap)
        whole = (DTensor.from_local(x, head.mesh, [Replicate()], run_check=False) for x in (hidden, targets))
        hidden, targets = whole  # the same on every rank
        return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, l2_wrap=l2_wrap)

    def new_pool(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "a model on several ranks can neither decode nor write files; gather its parameters, "
            "{name: x.full_tensor() for name, x in model.state_dict().items()}, for a model on one rank"
        )

    step = prefill = generate = save_checkpoint = new_pool


class _Part(nn.Module):
    """A module that runs with what its rank holds of its parameters."""

    mesh: DeviceMesh
    part: tuple[nn.Module]  # the module of so many heads, without parameters; in a tuple it is no submodule
    names: list[str]  # of what its forward takes

    def forward(self, *given: Any, **more: Any) -> Any:
        local = {name: self.local(x) for name, x in self.named_parameters()}
        return torch.func.functional_call(self.part[0], local, given, more)

    def local(self, x: Any) -> Tensor:
        """Return what this rank holds of a parameter, which others use too."""
        return x.to_local()  # type: ignore[no-any-return]

    def shared(self, x: Tensor) -> Tensor:
        """Return a tensor that is whole on every rank, whose gradient is the sum of what ranks make of it."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])


class _Embedding(_Part):
    """An embedding, of which a rank has some channels."""

    def forward(self, tokens: Tensor) -> Tensor:
        y = super().forward(tokens)
        return DTensor.from_local(y, self.mesh, [Shard(y.dim() - 1)], run_check=False).full_tensor()


class _Head(_Part):
    """A linear layer, of which a rank has some rows: the logits of some tokens."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.shared(x))
        shape = torch.Size([*y.shape[:-1], self.weight.shape[0]])
        strides = torch.empty(shape, device="meta").stride()
        placed = DTensor.from_local(y, self.mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=strides)
        return placed.full_tensor()


class _Mix(_Part):
    def local(self, x: Any) -> Tensor:
        """Return what this rank holds of a parameter; one that is whole has a gradient of its part from every rank."""
        local: Tensor = x.to_local()
        return local if x.placements[0].is_shard() else self.shared(local)

    def forward(self, x: Tensor, *given: Any, **named: Any) -> tuple[Any, ...]:
        """Return what the module of one rank does, with y summed over the ranks."""
        more = dict(zip(self.names[1:], given, strict=False)) | named
        state = more.pop("state", None)
        if isinstance(state, tuple):
            state = self.shared(state[0]), state[1]
        elif state is not None:
            state = self.shared(state)
        y, *others, after = super().forward(self.shared(x), state=state, **more)
        whole = DTensor.from_local(y, self.mesh, [Partial()], run_check=False).full_tensor()
        after = (self._once(after[0]), after[1]) if isinstance(after, tuple) else self._once(after)
        return whole, *others, after

    def _once(self, x: Tensor) -> Tensor:
        """Return what is whole on every rank, so that the sum over ranks has its gradient once."""
        fixed = x.detach()
        return fixed + (x - fixed) / self.mesh.size()
