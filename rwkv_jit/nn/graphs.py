"""Calls that a GPU repeats by itself, from CUDA graphs: the engine, and steps of decoding."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rwkv_jit.call import switches, tensors
from rwkv_jit.kernels import stats
from rwkv_jit.kernels.signatures import forget_with
from rwkv_jit.nn import common, node

_MOST_SEEN = 4096  # calls that are counted before they are captured
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_HOOKS = [name for name, x in nn.Module().__dict__.items() if name.endswith("hooks") and "state_dict" not in name]
_GLOBAL = "there are global hooks"
devices = {"cuda"}  # on others every call runs as it is


# ---- the engine --------------------------------------------------------------------------------------------------

_capturing = threading.RLock()


class Graph:
    """A call that was captured on a stream: each replay writes its `results` again."""

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: Any, stream: torch.cuda.Stream):
        graph, options = torch.cuda.CUDAGraph(), dict[str, Any](stream=stream, capture_error_mode="thread_local")
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), _garbage_kept():
            number = torch.zeros((), device=device)  # []
            try:
                with torch.cuda.graph(graph, pool=pool, **options):
                    self.results = function()
            except BaseException:
                # Where a capture was invalid, torch leaves its memory open, and numbers cannot be drawn on the device
                # until another capture has ended.
                with suppress(Exception):
                    torch._C._cuda_endAllocateToPool(device.index, pool)
                with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), **options):
                    number.zero_()
                raise
        self.replay = graph.replay


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep garbage for as long: a graph that is destroyed with it during a capture makes that one invalid."""
    with _capturing:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class _Captured(NamedTuple):
    arrays: list[Tensor]  # where a replay reads its inputs
    graph: Any


class Calls:
    """Calls by key: each runs as it is once, then from a graph. Of these at most `most` are kept.

    Whoever has always other calls does not wait for captures for ever: after 4 times as many there are no more.
    All graphs share one pool of memory and one lock: they run one after another, whatever threads and streams call.
    """

    def __init__(self, what: str, most: int):
        self._what, self._most, self._lock = what, most, threading.RLock()
        self.forget()
        forget_with(self)

    def forget(self) -> None:
        """Drop all graphs, as in a process that was forked, and begin anew."""
        self.graphs: OrderedDict[Any, _Captured] = OrderedDict()
        self._seen: dict[Any, int] = {}
        self._captures = 0
        self._memory: Any = None
        self._stream: Any = None  # of the last replay
        self._has_failed = False

    def run(self, key: Any, function: Callable[..., Any], arrays: Sequence[Tensor]) -> list[Any] | None:
        """Return copies of the results, which are None or tensors; None for a call that has to run as it is."""
        with self._lock:
            call = self.graphs.get(key) or self._captured(key, function, arrays)
            if call is None:
                return None
            self.graphs.move_to_end(key)
            if arrays[0].is_cuda:
                now = torch.cuda.current_stream(arrays[0].device)
                if self._stream is not None and self._stream != now:
                    now.wait_stream(self._stream)
                self._stream = now
            with torch.no_grad():
                for own, x in zip(call.arrays, arrays, strict=True):
                    own.copy_(x)
                call.graph.replay()
                return [None if x is None else x.clone() for x in call.graph.results]

    def _captured(self, key: Any, function: Callable[..., Any], arrays: Sequence[Tensor]) -> _Captured | None:
        """Return a graph of a call that comes for the second time; one that was dropped is not captured again."""
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        count = self._seen[key] = self._seen.get(key, 0) + 1
        if self._has_failed or count != 2 or self._captures >= 4 * self._most:
            return None
        self._captures += 1
        device = arrays[0].device
        with torch.inference_mode(False):  # or else nothing could be copied into its inputs outside of that mode
            own = [torch.empty_like(x, requires_grad=False).copy_(x) for x in arrays]
            try:
                if self._memory is None:
                    is_cuda = device.type == "cuda"
                    self._memory = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) if is_cuda else (0, None)
                graph = Graph(lambda: function(*own), device, *self._memory)
            except Exception as error:
                self._has_failed, self._memory = True, None
                say(self._what, f"it cannot be captured: {str(error).partition(chr(10))[0]}")
                return None
        self.graphs[key] = call = _Captured(own, graph)
        if len(self.graphs) > self._most:
            self.graphs.popitem(last=False)
            stats.say_once(f"{self._what}: more than {self._most} kinds of calls; the oldest run without CUDA graphs")
        return call


def say(what: str, why: str) -> None:
    """Say once why something runs without graphs."""
    stats.say_once(f"{what} runs without CUDA graphs: {why}")


class Held:
    """What graphs hold of a model: its modules as they are, and where its parameters and buffers lie."""

    def __init__(self, model: nn.Module):
        self.snapshot = node.Snapshot.of(model)
        modules = model, *self.snapshot.others
        for module, attributes in zip(modules, self.snapshot.attributes, strict=True):
            attributes["_parameters"] = dict(module._parameters)
        held = [(own, name, x) for m in modules for own in (m._parameters, m._buffers) for name, x in own.items()]
        self.present: list[Tensor] = [*{id(x): x for _, _, x in held if x is not None}.values()]
        # Dicts that are compared tell tensors apart by identity, but for these of one number, which would be read.
        self._numbers = [place for place in held if place[2] is not None and place[2].numel() == 1]
        self.why = self._obstacle(modules)
        self._addresses = [] if self.why else [*map(Tensor.data_ptr, self.present)]

    @classmethod
    def of(cls, model: nn.Module, before: Held | None) -> Held:
        """Return what graphs would hold now: what was `before`, where that has not changed."""
        return before if before is not None and before.is_same(model) else cls(model)

    def is_same(self, model: nn.Module) -> bool:
        """Return whether this is of a model of which all is what it was, but for values."""
        if not all([own.get(name) is x for own, name, x in self._numbers]) or not self.snapshot.is_alike(model):
            return False
        if any(common._GLOBAL_HOOKS) != (self.why == _GLOBAL):
            return False
        return bool(self.why) or [*map(Tensor.data_ptr, self.present)] == self._addresses

    def _obstacle(self, modules: Sequence[nn.Module]) -> str:
        """Return why no graph can hold the model, empty where one can."""
        if any(common._GLOBAL_HOOKS):
            return _GLOBAL
        for module in modules:
            if not _WRAPPERS.isdisjoint([kind.__name__ for kind in type(module).__mro__]):
                return f"{type(module).__name__} talks to other processes"
            if any([module.__dict__.get(name) for name in _HOOKS]):
                return f"{type(module).__name__} has hooks"
        if not self.present or not tensors.are_plain(self.present):
            return "the parameters are no plain tensors"
        if {x.device.type for x in self.present} - devices or len({x.device for x in self.present}) > 1:
            return "the model is not on one GPU"
        return ""


def modes() -> tuple[Any, ...]:
    """Return what changes the kernels of torch or ours, beside a call."""
    return (
        switches.current(), switches.is_batch_invariant(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


# ---- decoding ----------------------------------------------------------------------------------------------------


class Decoder(node.Memo):
    """The graphs of a model's steps, and of the prompts that it reads, among its attributes."""

    def __init__(self) -> None:
        self.steps, self.prompts = Calls("decoding", most=32), Calls("reading prompts", most=8)
        self._held: Held | None = None

    def is_ready(self, model: nn.Module, like: Tensor) -> bool:
        """Return whether graphs can hold a model, which lies where `like` does; those of what it was are dropped."""
        if like.device.type not in devices or not tensors.is_eager():
            return False
        held = Held.of(model, self._held)
        if held is not self._held:
            self.steps.forget()
            self.prompts.forget()
            self._held = held
            if held.why:
                say("decoding", held.why)
        return not held.why

    def run(
        self, calls: Calls, function: Callable[..., Tensor], states: Sequence[Tensor], arrays: Sequence[Tensor],
        *more: Any,
    ) -> Tensor:  # fmt: skip
        """Return what a function of arrays does, which may change states: from a graph, where one can hold it."""
        lead, found = arrays[0], None
        is_held = tensors.are_plain([*states, *arrays]) and lead.numel() and not (lead.is_cuda and tensors.capturing())
        if is_held and all(x.device == lead.device for x in (*states, *arrays)):
            where = tuple([(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in states])
            key = where, tensors.signature(arrays), more, tensors.autocast_dtype(lead), modes()
            found = calls.run(key, torch.no_grad()(lambda *own: [function(*own)]), arrays)
        return function(*arrays) if found is None else found[0]


class GraphedDecode:
    """What `graphed_decode` returns: a step of decoding, and the state that it has come to."""

    def __init__(self, model: nn.Module, state: Any, function: Callable[..., tuple[Tensor, Any]]):
        held, self._form = pytree.tree_flatten(state)
        self._model, self._function, self._decoder = model, function, Decoder()
        self._held = [common.tensor_of("state", x).detach().clone() for x in held]

    @property
    def state(self) -> Any:
        """The state, in memory that stays. Another one of the same shapes can be assigned, which is copied."""
        return pytree.tree_unflatten(self._held, self._form)

    @state.setter
    @torch.no_grad()
    def state(self, state: Any) -> None:
        several = [common.tensor_of("state", x) for x in pytree.tree_leaves(state)]
        if [x.shape for x in several] != [x.shape for x in self._held]:
            shapes = [[list(x.shape) for x in each] for each in (self._held, several)]
            raise ValueError(f"state: expected tensors of shapes {shapes[0]}, got {shapes[1]}")
        read = [x if x is own else self._apart(x) for own, x in zip(self._held, several, strict=True)]
        for own, x in zip(self._held, read, strict=True):
            own.copy_(x)

    def _apart(self, x: Tensor) -> Tensor:
        """Return a tensor, as a copy if it lies in the state, which is about to be written."""
        held = [own.untyped_storage().data_ptr() for own in self._held]
        return x.clone() if x.untyped_storage().data_ptr() in held else x

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result of a step, a new tensor; the state changes in place."""
        arrays = [common.tensor_of("inputs", x) for x in inputs]
        if arrays and self._decoder.is_ready(self._model, arrays[0]):
            return self._decoder.run(self._decoder.steps, self._step, self._held, arrays)
        return self._step(*arrays)

    def _step(self, *inputs: Tensor) -> Tensor:
        result, state = self._function(*inputs, self.state)
        result = self._apart(common.tensor_of("the first result", result))
        self.state = state
        return result


def graphed_decode(
    model: nn.Module, state: Any, step: Callable[..., tuple[Tensor, Any]] | None = None
) -> GraphedDecode:  # fmt: skip
    """Return a function that does a step of decoding, which a GPU repeats from CUDA graphs.

    It is for models of layers that return their states, such as `KimiDeltaAttention`, `GatedDeltaNet` and `Mamba2`.
    `step` and `generate` of RWKV5, RWKV6 and RWKV7 have graphs by themselves.

    Parameters
    ----------
    model : torch.nn.Module
        What a step runs, on one GPU.
    state : tree of torch.Tensor
        Of tuples, lists and dicts: what the step begins with, of all sequences and layers. It is copied.
    step : callable, optional
        `step(*inputs, state)` returns a tensor and the state after it; `model` by default. It has to be a function of
        tensors: what it does in Python beside that, a graph does not repeat.

    Returns
    -------
    callable
        `decode(*inputs)` takes tensors and returns the first result of the step, a new tensor without gradients.
        `decode.state` is the state then. It lies in the same memory after every step, and another one of these shapes
        may be assigned, as for the next prompt.

    Notes
    -----
    The first call with inputs of a shape runs as it is, the second one is captured, later ones cost the host about one
    launch. Up to 32 shapes have graphs, which share the memory of the largest step. Beside that there are the state,
    once, and inputs and result of each graph. Each call looks whether modules, hooks or memory of parameters have
    changed: graphs of what was are dropped. Where no graph can hold the step, it runs as it is, and a line of the log
    says why.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit, or a step returns a state of other shapes.

    Examples
    --------
    >>> layer = rwkv_jit.nn.Mamba2(96, head_size=32, state_size=16, device="cuda")
    >>> y, state = layer(torch.randn(2, 10, 96, device="cuda"))
    >>> decode = rwkv_jit.nn.graphed_decode(layer, state)
    >>> for _ in range(5):
    ...     y = decode(torch.randn(2, 1, 96, device="cuda"))
    >>> y.shape, [each.shape for each in decode.state]
    (torch.Size([2, 1, 96]), [torch.Size([2, 224, 3]), torch.Size([2, 6, 32, 16])])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return GraphedDecode(model, state, model if step is None else step)
