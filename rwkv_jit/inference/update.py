"""One or a few tokens of many sequences, whose states lie in a pool and change in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from rwkv_jit import env, modes, tensors
from rwkv_jit.inference import registry, rounding, slot_checks, steps
from rwkv_jit.inference.steps import Pool
from rwkv_jit.ops import checks, plain, sharding, torch_op
from rwkv_jit.ops.table import OPS
from rwkv_jit.plan import Plan
from rwkv_jit.problem import Op, Problem
from rwkv_jit.reference import gla_ref, linear_attention_ref, wkv5_ref, wkv6_ref, wkv7_ref
from rwkv_jit.signatures import BySignature
from rwkv_jit.tensors import Memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFERENCES: dict[str, Callable[..., Any]] = {
    "wkv5": wkv5_ref, "wkv6": wkv6_ref, "wkv7": wkv7_ref, "gla": gla_ref, "linear_attention": linear_attention_ref,
}  # fmt: skip
_ROUNDINGS = ("nearest", "stochastic")


class UpdateOptions(TypedDict, total=False):
    """Options of `wkv5_update`, `wkv6_update`, `wkv7_update`, `gla_update` and `linear_attention_update`, by name.

    Attributes
    ----------
    state_indices : torch.Tensor, shape (B,), int32 or int64, optional
        The slot of each row. Without it row i has slot i.
    write_indices : torch.Tensor, shape (B,), dtype of `state_indices`, optional
        The slot that each row's state is written to, where that is another one than it is read from. Two rows must not
        write to one slot, nor one read what another writes.
    null_index : int, default -1
        A slot at or below it is none: SGLang and FlashInfer have -1, vLLM has 0. A row that has none gets zeros for y,
        and no state of it is read or written. Where `write_indices` has none, y is right and no state is written. So it
        is with a slot past the pool.
    out : torch.Tensor, shape and dtype of v, optional
        Where y is written, without gaps.
    scale : float
        Factor of y: 1 by default, for `gla_update` and `linear_attention_update` K^-0.5.
    state_layout : {"vk", "kv"}
        Order of the last two dimensions of a state: "vk" by default, for `gla_update` and `linear_attention_update`
        "kv".
    rounding : {"nearest", "stochastic"}, default "nearest"
        How a state of 16 bits is rounded when it is written, once in a call. "stochastic" takes one of the two
        neighbours, the nearer one more often, so that many small changes are not lost.
    seed : int or torch.Tensor of one int64 on the device
        For "stochastic", which needs one; give another one in each step. Results are the same for the same seed, slots
        and states, whatever the batch. In a CUDA graph it must be a tensor, which replays read.
    """

    state_indices: Any
    write_indices: Any
    null_index: int
    out: Any
    scale: float
    state_layout: str
    rounding: str
    seed: Any


class DecayUpdateOptions(UpdateOptions, total=False):
    """Options of the updates that have a decay, beside those of `UpdateOptions`.

    Attributes
    ----------
    decay : {"raw", "sigmoid", "log", "direct"}
        As in `DecayOptions`: "raw" by default, for `gla_update` "log".
    w0 : torch.Tensor, shape (H, K) or (H * K,), float16, bfloat16 or float32, optional
        Is added to w (g) before the map that `decay` names, in float32.
    """

    decay: str
    w0: Any


# ---- the public calls --------------------------------------------------------------------------------------------


def wkv7_update(
    state: Any, r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, **options: Unpack[DecayUpdateOptions]
) -> Tensor:
    r"""RWKV-7 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        sa = S a;   S <- S diag(d(w)) + sa b^T + v k^T;   y = scale S r

    per row and head, token by token, with S [V, K]. B is the rows, T the tokens, H the heads, K and V the head sizes of
    keys and values.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool. A slot has no gaps; between slots there may be some. In the kv layout the last two sizes are (K, V).
        It is changed, so it must have memory of its own for every element.
    r, k, a, b : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens of each row, float16, bfloat16 or float32
        As `wkv7` takes them. Any strides; where the last one is not 1, a copy is made.
    w : torch.Tensor, shape and dtype of r, or float32
        Decay before the map that `decay` names.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    **options
        By name, as `UpdateOptions` and `DecayUpdateOptions` say: state_indices, write_indices, null_index, out, w0,
        scale, decay, state_layout, rounding, seed.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. The states are as they were.
    RuntimeError
        An input wants a gradient, which states changed in place cannot give: `wkv7` can.
    RwkvJitError
        The first call of its kind is inside the capture of a CUDA graph, where nothing can be compiled.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Arithmetic is float32 whatever the dtypes are; a state of 16 bits is rounded once in a call. Relative L2 error of y
    and of float32 states against float64 on the same inputs: below 5e-6, and that of rounding y where it has 16 bits.

    Indices on the CPU are checked. On a GPU kernels read and write no slot that is not in the pool. With
    RWKVJIT_CHECK=1 from the start every call looks at them, which waits for the GPU: an index past the pool, and two
    rows that write to one slot, are errors then.

    Long prompts are for `wkv7`: tokens go one after another here. The first call with a head size, dtype and decay
    compiles for this GPU and stores the result on disk; in a CUDA graph it must have come before. CPU tensors run plain
    torch, with one notice.

    References
    ----------
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> r, w, k, v, a, b = torch.randn(6, 3, 4, 64, device="cuda") / 8
    >>> slots = torch.tensor([5, 2, 11], dtype=torch.int32, device="cuda")
    >>> rwkv_jit.wkv7_update(pool, r, w, k, v, a, b, state_indices=slots).shape
    torch.Size([3, 4, 64])
    """
    return _call(OPS["wkv7"], state, (r, w, k, v, a, b), options)


def wkv6_update(state: Any, r: Any, k: Any, v: Any, w: Any, u: Any, **options: Unpack[DecayUpdateOptions]) -> Tensor:
    r"""RWKV-6 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv7_update`.
    r, k : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens of each row, float16, bfloat16 or float32
        Receptance and key, as `wkv6` takes them.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    w : torch.Tensor, shape and dtype of r, or float32
        Decay before the map that `decay` names.
    u : torch.Tensor, shape (H, K), dtype of r or float32
        Bonus of the current token.
    **options
        As in `wkv7_update`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_update`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_update`.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> r, k, v, w = torch.randn(4, 3, 4, 64, device="cuda")
    >>> rwkv_jit.wkv6_update(pool, r, k, v, w, torch.zeros(4, 64, device="cuda")).shape
    torch.Size([3, 4, 64])
    """
    return _call(OPS["wkv6"], state, (r, k, v, w, u), options)


def wkv5_update(state: Any, r: Any, k: Any, v: Any, w: Any, u: Any, **options: Unpack[DecayUpdateOptions]) -> Tensor:
    r"""RWKV-5 time mixing of one or a few tokens, which changes states of a pool in place: for decoding.

        y = scale (S r + (sum_j u_j r_j k_j) v);   S <- S diag(d(w)) + v k^T

    per row and head, token by token, with S [V, K] and one decay for all tokens.

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, V, K), float16, bfloat16 or float32
        The pool, as in `wkv7_update`.
    r, k : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens of each row, float16, bfloat16 or float32
        Receptance and key, as `wkv5` takes them.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of r
        Value.
    w, u : torch.Tensor, shape (H, K), dtype of r or float32
        Decay before the map that `decay` names, and bonus of the current token.
    **options
        As in `wkv7_update`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_update`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_update`.

    References
    ----------
    Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv:2404.05892.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 64, device="cuda")
    >>> r, k, v = torch.randn(3, 3, 4, 64, device="cuda")
    >>> w, u = torch.randn(2, 4, 64, device="cuda")
    >>> rwkv_jit.wkv5_update(pool, r, k, v, w, u).shape
    torch.Size([3, 4, 64])
    """
    return _call(OPS["wkv5"], state, (r, k, v, w, u), options)


def gla_update(state: Any, q: Any, k: Any, v: Any, g: Any, **options: Unpack[DecayUpdateOptions]) -> Tensor:
    r"""Gated linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S diag(d(g)) + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, K, V), float16, bfloat16 or float32
        The pool, as in `wkv7_update`. In the vk layout the last two sizes are (V, K).
    q, k : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens of each row, float16, bfloat16 or float32
        Query and key, as `gla` takes them.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value.
    g : torch.Tensor, shape and dtype of q, or float32
        Decay before the map that `decay` names; by default its logarithm.
    **options
        As in `wkv7_update`.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_update`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_update`.

    References
    ----------
    Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 128, device="cuda")
    >>> q, k, x = torch.randn(3, 3, 4, 64, device="cuda")
    >>> v = torch.randn(3, 4, 128, device="cuda")
    >>> rwkv_jit.gla_update(pool, q, k, v, torch.nn.functional.logsigmoid(x)).shape
    torch.Size([3, 4, 128])
    """
    return _call(OPS["gla"], state, (q, k, v, g), options)


def linear_attention_update(state: Any, q: Any, k: Any, v: Any, **options: Unpack[UpdateOptions]) -> Tensor:
    r"""Linear attention of one or a few tokens, which changes states of a pool in place: for decoding.

        S <- S + v k^T;   y = scale S q

    per row and head, token by token, with S [V, K].

    Parameters
    ----------
    state : torch.Tensor, shape (slots, H, K, V), float16, bfloat16 or float32
        The pool, as in `wkv7_update`. In the vk layout the last two sizes are (V, K).
    q, k : torch.Tensor, shape (B, H, K), or (B, T, H, K) for T tokens of each row, float16, bfloat16 or float32
        Query and key, as `linear_attention` takes them.
    v : torch.Tensor, shape (B, H, V) or (B, T, H, V), dtype of q
        Value.
    **options
        By name, as `UpdateOptions` says: state_indices, write_indices, null_index, out, scale, state_layout, rounding,
        seed.

    Returns
    -------
    y : torch.Tensor, shape and dtype of v
        `out` where it is given.

    Raises
    ------
    TypeError, ValueError, RuntimeError, RwkvJitError, NvrtcNotFoundError
        As `wkv7_update`.

    Notes
    -----
    Precision, checks and first calls are those of `wkv7_update`.

    References
    ----------
    Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236.

    Examples
    --------
    >>> pool = torch.zeros(16, 4, 64, 128, device="cuda")
    >>> q, k = torch.randn(2, 3, 4, 64, device="cuda")
    >>> rwkv_jit.linear_attention_update(pool, q, k, torch.randn(3, 4, 128, device="cuda")).shape
    torch.Size([3, 4, 128])
    """
    return _call(OPS["linear_attention"], state, (q, k, v), options)


# ---- a call ------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A call that has been checked."""

    op: Op
    state: Tensor
    y: Tensor
    inputs: Sequence[Tensor]
    w0: Tensor | None
    state_indices: Tensor | None
    write_indices: Tensor | None
    seed: Tensor | None
    null_index: int
    scale: float
    decay: str
    state_layout: str

    @property
    def tensors(self) -> list[Tensor | None]:
        """Return the tensors in the order in which plans take them."""
        return [*self.inputs, self.w0, self.state, self.state_indices, self.write_indices, self.seed, self.y]


class _Known(NamedTuple):
    """A call that has come before: what tells whether another one is like it, its plan, and what its y is made of."""

    options: list[tuple[str, Any]]  # that are no tensors
    tensors: list[str]  # those that are
    are_alike: Callable[..., bool]  # the pool, the inputs and these
    plan: Plan
    y: Memory


_known: BySignature[_Known] = BySignature()
_plans: BySignature[Plan] = BySignature()
_PLAIN = (str, int, float, type(None))
_ADDRESS_BITS = 15  # of an address that is no multiple of 16


def _call(op: Op, state: Any, arrays: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Run an update: at once where the call is known, else after all checks."""
    asked: Any = None
    known: _Known | None = None
    try:
        if tensors.is_eager():
            asked = (
                op.name, arrays[0].shape, tuple(options), torch.is_grad_enabled(), modes.is_batch_invariant(),
                state.data_ptr() & _ADDRESS_BITS,
            )  # fmt: skip
            known = _known.get(asked)
            if known is not None:
                for name, value in known.options:
                    if options[name] is not value and options[name] != value:
                        known = None
                        break
                else:
                    if not known.are_alike(state, *arrays, *[options[name] for name in known.tensors]):
                        known = None
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or an option that cannot be one
        asked = known = None
    if known is None:
        return _checked_call(op, state, arrays, dict(options), asked)
    get = options.get
    y = get("out")
    if y is None:
        y = tensors.new_on(known.plan.device.index, known.y)
    known.plan.run([*arrays, get("w0"), state, get("state_indices"), get("write_indices"), get("seed"), y])
    return y


def _checked_call(op: Op, state: Any, arrays: Sequence[Any], options: dict[str, Any], asked: Any) -> Tensor:
    """Run an update after all checks; one that was `asked` for so is known from then on."""
    name = f"{op.name}_update"
    if sharding.any_distributed((state, *arrays, *options.values())):
        raise TypeError(f"state: {name} changes it in place and takes no DTensors; pass to_local() of each")
    cast = torch_op.under_autocast(op, arrays)
    if cast is not None:
        with tensors.exactly(cast[0]):
            return _call(op, state, cast, options)
    step = _check(op, name, state, arrays, options)
    if not (step.state.is_cuda and tensors.is_eager() and tensors.are_plain(step.tensors)):
        registry.find("update_states")(op.name, *step[1:])
        return step.y
    if step.y.numel() == 0:
        return step.y
    plan = _run_kernel(step)
    own = [option for option, value in options.items() if isinstance(value, Tensor)]
    others = [(option, value) for option, value in options.items() if option not in own]
    # Others are looked at anew each time: arrays of another library, seeds that are numbers, slots to check.
    are_the_same = all(isinstance(x, Tensor) for x in (state, *arrays)) and not env.checks_indices()
    are_the_same = are_the_same and all(isinstance(x, _PLAIN) and option != "seed" for option, x in others)
    if asked is not None and are_the_same:
        are_alike = tensors.likeness([state, *arrays, *(options[option] for option in own)])
        _known.keep(asked, _Known(others, own, are_alike, plan, tensors.memory(step.y.shape, step.y.dtype)))
    return step.y


def _check(op: Op, name: str, state: Any, arrays: Sequence[Any], options: dict[str, Any]) -> _Step:
    """Check a call, and return it with all options.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        Naming the argument, what was expected and what came.
    """
    has_decay = op.decay != "none"
    legal = [x for x in DecayUpdateOptions.__annotations__ if has_decay or x not in ("decay", "w0")]
    for option in options:
        if option not in legal:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}; there are {', '.join(legal)}")
    decay, layout = options.get("decay", op.decay), options.get("state_layout", op.state_layout)
    rounds = options.get("rounding", "nearest")
    for option, value, values in (
        ("decay", decay, op.decays if has_decay else ("none",)), ("state_layout", layout, checks.STATE_LAYOUTS),
        ("rounding", rounds, _ROUNDINGS),
    ):  # fmt: skip
        checks.check_name(option, value, values)
    null_index = options.get("null_index", -1)
    if not isinstance(null_index, int) or isinstance(null_index, bool) or not -(2**31) <= null_index < 2**31:
        raise TypeError(f"null_index: expected an int of 32 bits, got {null_index!r}")

    inputs = checks.as_tensors(op, arrays)
    lead = inputs[op.lead]
    if lead.dim() == 3:  # one token
        inputs = [x.unsqueeze(1) if x.dim() == 3 else x for x in inputs]
    wide = not lead.is_cuda
    sizes = checks.check_inputs(op, inputs, wide)
    lead = inputs[op.lead]
    scale = options.get("scale", op.scale)
    scale = float(sizes["K"]) ** -0.5 if scale is None else scale
    checks.check_number("scale", scale)

    state = tensors.from_any("state", state, in_place=True)
    _check_pool(op, state, tuple(sizes[dim] for dim in op.state_dims(layout)), lead, wide)
    batch, heads, head_size = sizes["B"], sizes["H"], sizes["K"]
    w0 = options.get("w0")
    if w0 is not None:
        w0 = tensors.from_any("w0", w0)
        if tuple(w0.shape) not in ((heads, head_size), (heads * head_size,)):
            raise ValueError(
                f"w0: expected shape [{heads}, {head_size}] or [{heads * head_size}], got {list(w0.shape)}"
            )
        slot_checks.check_dtype("w0", w0, tuple(tensors.STORAGE), lead)
    indices = [slot_checks.check_indices(x, options.get(x), batch, lead) for x in ("state_indices", "write_indices")]
    if None not in indices and indices[0].dtype != indices[1].dtype:  # type: ignore[union-attr]
        raise TypeError(f"write_indices: expected {indices[0].dtype} like state_indices, got {indices[1].dtype}")  # type: ignore[union-attr]
    if indices[0] is None and batch > state.shape[0]:
        raise ValueError(f"state: expected a slot for each of the {batch} rows, or state_indices; got {state.shape[0]}")
    slot_checks.check_slots(indices[0], indices[1], state.shape[0], null_index)
    v = inputs[op.names.index("v")]
    y = options.get("out")
    if y is None:
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        y = y if len(arrays[op.lead].shape) == 4 else y.squeeze(1)
    else:
        y = _check_out(y, tensors.from_any("v", arrays[op.names.index("v")]))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, y, w0, *inputs)):
        raise RuntimeError(f"{name}: {_no_gradient(op)}")
    seed = _seed(options.get("seed"), rounds, state, lead)
    return _Step(op, state, y, inputs, w0, indices[0], indices[1], seed, null_index, float(scale), decay, layout)


def _no_gradient(op: Op) -> str:
    return f"changes the states in place and has no gradient; use {op.name}, or torch.no_grad()"


def _check_pool(op: Op, state: Tensor, of_slot: tuple[int, ...], lead: Tensor, wide: bool) -> None:
    if state.dim() != 4 or tuple(state.shape[1:]) != of_slot:
        raise ValueError(f"state: expected shape [slots, {', '.join(map(str, of_slot))}], got {list(state.shape)}")
    checks.check_state(op, "state", state, [tuple(state.shape)], lead, wide)
    if state.numel() and not state[0].is_contiguous():
        raise ValueError(f"state: expected slots without gaps, got strides {state.stride()} of {list(state.shape)}")
    if state.shape[0] > 1 and state.stride(0) < state[0].numel():
        raise ValueError(f"state: expected slots that do not overlap, got strides {state.stride()}")


def _check_out(out: Any, v: Tensor) -> Tensor:
    y = tensors.from_any("out", out, in_place=True)
    if y.shape != v.shape:
        raise ValueError(f"out: expected shape {list(v.shape)} like v, got {list(y.shape)}")
    slot_checks.check_dtype("out", y, (v.dtype,), v)
    if not y.is_contiguous():
        raise ValueError(f"out: expected memory without gaps, got strides {y.stride()}")
    return y


def _seed(seed: Any, rounds: str, state: Tensor, lead: Tensor) -> Tensor | None:
    """Return the seed as a tensor; None where nothing is rounded at random."""
    if rounds == "nearest":
        if seed is not None:
            raise ValueError(f"seed: goes with rounding='stochastic', got {seed!r}")
        return None
    if seed is None:
        raise ValueError("seed: rounding='stochastic' needs an int or a tensor of one int64, got None")
    if isinstance(seed, Tensor):
        if seed.numel() != 1:
            raise ValueError(f"seed: expected one number, got shape {list(seed.shape)}")
        slot_checks.check_dtype("seed", seed, (torch.int64,), lead)
    elif not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise TypeError(f"seed: expected an int of 64 bits or a tensor of one, got {seed!r}")
    else:
        seed = torch.full((1,), seed, dtype=torch.int64, device=lead.device)
    return seed if state.dtype in (torch.float16, torch.bfloat16) else None


# ---- kernels -----------------------------------------------------------------------------------------------------


def _run_kernel(step: _Step) -> Plan:
    """Run a step by its kernel, and return its plan."""
    alignment = step.state.data_ptr() & _ADDRESS_BITS
    key = step.op.name, *step[-4:], modes.is_batch_invariant(), alignment, tensors.signature(step.tensors)
    plan = _plans.get(key)
    if plan is None:
        problem, pool = _described(step)
        names = (*step.op.names, "w0", "state", "state_indices", "write_indices", "seed", "y")
        named = dict(zip(names, step.tensors, strict=True))
        # The kernel takes the pool's address, which is that of the first slot: a slot has no gaps.
        named["state"] = step.state[0] if step.state.shape[0] else step.state
        plan = _plans.keep(key, Plan(steps.schedule(problem, pool), problem, named))
    plan.run(step.tensors)
    return plan


def _described(step: _Step) -> tuple[Problem, Pool]:
    op, state = step.op, step.state
    sizes: dict[str, Any] = {}
    for dims, x in zip(op.inputs.values(), step.inputs, strict=True):
        sizes.update(zip(dims, x.shape, strict=True))
    problem = Problem(
        op, tensors.gpu(state.device.index),
        {name: tensors.STORAGE[x.dtype] for name, x in zip(op.names, step.inputs, strict=True)},
        N=sizes["B"], state_type=tensors.STORAGE[state.dtype], scale=step.scale, decay=step.decay,
        state_layout=step.state_layout, is_batch_invariant=modes.is_batch_invariant(), **sizes,
    )  # fmt: skip
    slots = state.shape[0]
    stride = state.stride(0) if slots > 1 else 0
    address = state.data_ptr() | 16 | (stride * state.element_size() if slots > 1 else 0)
    indices = step.state_indices if step.state_indices is not None else step.write_indices
    return problem, Pool(
        slots, stride, address & -address, 4 if indices is None else indices.element_size(), step.null_index,
        "fp32" if step.w0 is None else tensors.STORAGE[step.w0.dtype], step.seed is not None,
    )  # fmt: skip


# ---- plain torch, and the torch op -------------------------------------------------------------------------------


def _run_plainly(step: _Step) -> None:
    """Run a step in plain torch."""
    op, state, slots = step.op, step.state, step.state.shape[0]
    rows = torch.arange(step.inputs[op.lead].shape[0], device=state.device)
    read = rows if step.state_indices is None else step.state_indices.to(torch.int64)
    written = read if step.write_indices is None else step.write_indices.to(torch.int64)
    null_index = step.null_index if step.state_indices is not None else -1
    there = (read > null_index) & (read >= 0) & (read < slots)
    null_index = step.null_index if step.write_indices is not None else null_index
    written = written.masked_fill(~there | (written <= null_index) | (written >= slots), -1)

    inputs = dict(zip(op.names, step.inputs, strict=True))
    if step.w0 is not None:
        w0 = step.w0.view(inputs["w"].shape[-2:]).float()
        inputs["w"] = inputs["w"].to(torch.promote_types(inputs["w"].dtype, torch.float32)) + w0
    some = {name: x[there] if "B" in op.inputs[name] else x for name, x in inputs.items()}
    wide = torch.promote_types(state.dtype, torch.float32)
    begun = state[read[there]].to(wide)
    y, final = plain.loop(
        _REFERENCES[op.name], list(some.values()), begun, None, step.scale, step.decay, step.state_layout
    )
    shown = step.y.view(step.inputs[op.names.index("v")].shape)
    shown.zero_()
    shown[there] = y.to(shown.dtype)
    kept = written[there] >= 0
    places, final = written[there][kept], final[kept]
    if step.seed is not None:
        of_slot = final[0].numel() // final.shape[1] if final.numel() else 0
        bits = rounding.random_bits(places, final.shape[1], of_slot, int(step.seed))
        final = rounding.round_at_random(final.float(), state.dtype, bits.view(final.shape))
    state[places] = final.to(state.dtype)


def run(op: str, *arguments: Any) -> None:
    """Run the torch op with CPU or CUDA tensors."""
    step = _Step(OPS[op], *arguments)
    if step.y.numel() == 0:
        return
    if step.state.is_cuda:
        _run_kernel(step)
        return
    torch_op.say_reference(f"{op}_update", step.state)
    with tensors.exactly(step.state), torch.no_grad():
        _run_plainly(step)


def fake(op: str, *arguments: Any) -> None:
    """Do nothing with tensors that have no memory."""


def record(keys: Any, op: str, state: Tensor, y: Tensor, inputs: Sequence[Tensor], *rest: Any) -> None:
    """Refuse to record gradients."""
    given = (state, y, *inputs, *rest)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
        raise RuntimeError(f"{op}_update: {_no_gradient(OPS[op])}")
    with torch._C._AutoDispatchBelowAutograd():
        registry.find("update_states").redispatch(keys & torch._C._after_autograd_keyset, op, state, y, inputs, *rest)
