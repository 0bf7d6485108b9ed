"""TimeX: a causal convolution of every channel with a filter as long as the sequence."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rwkv_jit import kernel, stats, template, tensors
from rwkv_jit.errors import RwkvJitError, UnsupportedConfigError
from rwkv_jit.launch import Plan
from rwkv_jit.ops import chunked
from rwkv_jit.reference import timex_ref
from rwkv_jit.template import Parameter

BACKENDS = ("auto", "tiles", "fft", "reference")
# Tokens up to which "auto" takes the tensor cores: their work grows with T^2, that of the transforms with T log T.
MOST_TOKENS = {torch.float32: 3072, torch.float16: 8192, torch.bfloat16: 8192}
LONGEST = 2**24  # tokens of a row are counted in 32 bits
LEAST_ARCH = 80  # m16n8k16 products

_THREADS, _ROWS = 256, 4  # of a block; tiles of a warp
_TILE, _CHUNK = 16, _THREADS // 32 * _ROWS  # tokens of a tile; tiles of a chunk of what is streamed
_BLOCKS = 2  # that a multiprocessor shall have room for
_DIAGONALS = 32  # floats for each tile of lags, of the gradient of w


# ---- which kernel, and how it is launched ------------------------------------------------------------------------


class Geometry(NamedTuple):
    """How blocks are cut."""

    batch: int  # rows of a block
    streamed: bool  # whether what a block reads is more than its shared memory
    tiles: int  # of 16 tokens, with those that fill up
    shared_bytes: int


def geometry(direction: str, batch: int, tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str) -> Geometry:
    """Return how the convolution ("forward") or the gradient of the filter is cut, for the dtypes of w and k.

    As many rows as there are and as let two blocks be on a multiprocessor; of those that are streamed the least always
    fit. Only the convolution of 16-bit rows takes 32 at once: of float32 ones 16 are faster (0.154 ms for 0.161 at
    (32, 768, 768) on an H200).
    """
    largest = 32 if direction == "forward" and types[1].itemsize == 2 else 16
    shared_bytes = _convolution_bytes if direction == "forward" else _gradient_bytes
    cuts = []
    for streamed in (False, True):
        multiple = _CHUNK if streamed else _ROWS
        tiles = -(-tokens // (_TILE * multiple)) * multiple
        for size in (16, 8) if streamed else (32, 16, 8):
            if size <= largest and (size == 8 or batch > size // 2):
                cuts.append(Geometry(size, streamed, tiles, shared_bytes(size, streamed, tiles, types)))
    limit = chunked.shared_per_multiprocessor(arch) // _BLOCKS - 1024
    return next((cut for cut in cuts if cut.shared_bytes <= limit), cuts[-1])


def _convolution_bytes(batch: int, streamed: bool, tiles: int, types: tuple[torch.dtype, torch.dtype]) -> int:
    w_parts, k_parts = (dtype.itemsize // 2 for dtype in types)
    held, before = (_CHUNK, _CHUNK) if streamed else (tiles, _ROWS)
    return 4 * w_parts * _TILE * (before + held) + 2 * k_parts * batch * (_TILE * held + 8) + 2 * batch * (held // 2)


def _gradient_bytes(batch: int, streamed: bool, tiles: int, types: tuple[torch.dtype, torch.dtype]) -> int:
    parts = types[1].itemsize // 2
    held = (_CHUNK, 2 * _CHUNK) if streamed else (tiles, tiles)
    operands = sum(2 * parts * batch * (_TILE * count + 8) + 4 * (count // 2) for count in held)
    return operands + 4 * (_THREADS // 32) * 16 * 17


def requests(
    batch: int, tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str, also: tuple[str, ...] = (),
    vector: int = 4, training: bool = True,
) -> list[kernel.Request]:  # fmt: skip
    """Return the kernels of a call: the convolution, and for gradients the one of k and the one of w."""
    found = [_request("forward", batch, tokens, types, arch, also, vector, False)]
    if training:
        found.append(_request("forward", batch, tokens, types, arch, also, vector, True))
        found.append(_request("backward", batch, tokens, types, arch, also, vector, False))
    return found


def _request(
    direction: str, batch: int, tokens: int, types: tuple[torch.dtype, torch.dtype], arch: str, also: tuple[str, ...],
    vector: int, is_reversed: bool,
) -> kernel.Request:  # fmt: skip
    cut = geometry(direction, batch, tokens, types, arch)
    parameters: dict[str, Parameter] = {
        "T_W": tensors.STORAGE[types[0]], "T_IO": tensors.STORAGE[types[1]], "BATCH": cut.batch,
        "STREAMED": cut.streamed, "ROWS": _ROWS, "NUM_THREADS": _THREADS, "VECTOR": vector, "BLOCKS_PER_SM": _BLOCKS,
    }  # fmt: skip
    if direction == "forward":
        parameters["REVERSED"] = is_reversed
    name = "timex_convolve" if direction == "forward" else "timex_filter_gradient"
    return kernel.Request(template.library(name), parameters, arch, also)


class _Prepared(NamedTuple):
    """Launches of one signature, one after the other."""

    plans: tuple[Plan, ...]
    scratch: int = 0  # floats


_MOST_SIGNATURES = 4096  # a server that meets every length there is must not grow without end
_known: dict[Any, _Prepared] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_known.clear)  # nothing of CUDA survives a fork


def _neighbours(x: Tensor) -> Tensor:
    """Return `x`, or a copy where its tokens are not neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _vector(*arrays: Tensor) -> int:
    """Return how many neighbours [B, C, T] tensors let a thread read at once."""
    for x in arrays:
        if x.data_ptr() % (4 * x.element_size()) or x.shape[-1] % 4 or x.stride(0) % 4 or x.stride(1) % 4:
            return 1
    return 4


def _prepared(key: tuple[Any, ...], prepare: Callable[[], _Prepared]) -> _Prepared:
    found = _known.get(key)
    if found is None:
        kernel.check_not_forked()
        if len(_known) >= _MOST_SIGNATURES:
            _known.clear()
        found = _known[key] = prepare()
    return found


def _load(wanted: Sequence[kernel.Request], device: int) -> list[kernel.Kernel]:
    if tensors.capturing() and not all(kernel.is_loaded(request, device) for request in wanted):
        raise RwkvJitError(
            "timex: first use inside a CUDA graph capture, where nothing can be compiled or loaded; "
            "call it once with these shapes and dtypes before the capture"
        )
    return kernel.get_all(wanted)


def _convolve(w: Tensor, k: Tensor, eps: float, is_reversed: bool, training: bool = False) -> Tensor:
    """Run the kernel of the convolution; with `training` the kernels of the backward compile beside it."""
    w, k = _neighbours(w), _neighbours(k)
    out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if out.numel() == 0:
        return out
    vector = _vector(k)

    def prepare() -> _Prepared:
        (batch, channels, tokens), types, device = k.shape, (w.dtype, k.dtype), k.device.index
        arch, also = tensors.arch(device), tensors.also(device)
        cut = geometry("forward", batch, tokens, types, arch)
        wanted = [_request("forward", batch, tokens, types, arch, also, vector, is_reversed)]
        if training:
            wanted += requests(batch, tokens, types, arch, also, vector)[1:]
        with torch.cuda.device(device):
            found = _load(wanted, device)[0]
            tensors.validate("w", w)
            tensors.validate("k", k)
            blocks = cut.tiles // _CHUNK if cut.streamed else 1
            constants = [
                *[struct.pack("q", x) for x in (w.stride(0), k.stride(0), k.stride(1), batch, channels)],
                struct.pack("i", tokens), struct.pack("i", cut.tiles), struct.pack("f", eps),
            ]  # fmt: skip
            grid = (channels, -(-batch // cut.batch), blocks)
            plan = Plan(found, "timex_convolve", device, grid, (_THREADS, 1, 1), "QQQ", constants, cut.shared_bytes)
        return _Prepared((plan,))

    key = ("convolve", is_reversed, eps, vector, training, tensors.signature((w, k)))
    tensors.launch(_prepared(key, prepare).plans[0], (w.data_ptr(), k.data_ptr(), out.data_ptr()))
    return out


def _filter_gradient(g: Tensor, k: Tensor, w_dtype: torch.dtype) -> Tensor:
    """Run the kernels of the gradient of w."""
    g, k = _neighbours(g), _neighbours(k)
    batch, channels, tokens = k.shape
    gw = torch.zeros if k.numel() == 0 else torch.empty
    found = gw((channels, tokens), dtype=w_dtype, device=k.device)
    if k.numel() == 0:
        return found
    vector = _vector(g, k)

    def prepare() -> _Prepared:
        device, types = k.device.index, (w_dtype, k.dtype)
        arch, also = tensors.arch(device), tensors.also(device)
        cut = geometry("backward", batch, tokens, types, arch)
        with torch.cuda.device(device):
            (made,) = _load([_request("backward", batch, tokens, types, arch, also, vector, False)], device)
            tensors.validate("g", g)
            tensors.validate("k", k)
            groups, blocks = -(-batch // cut.batch), cut.tiles // _CHUNK if cut.streamed else 1
            strides = (g.stride(0), g.stride(1), k.stride(0), k.stride(1))
            sizes = [struct.pack("i", tokens), struct.pack("i", cut.tiles)]
            matrices = Plan(
                made, "timex_filter_gradient", device, (channels, groups, blocks), (_THREADS, 1, 1), "QQQ",
                [*[struct.pack("q", x) for x in (*strides, batch, channels)], *sizes], cut.shared_bytes,
            )  # fmt: skip
            counts = [struct.pack("q", groups), struct.pack("q", channels), *sizes]
            sums = Plan(
                made, "timex_filter_gradient_sum", device, (channels, -(-tokens // _THREADS), 1), (_THREADS, 1, 1),
                "QQ", counts,
            )  # fmt: skip
        return _Prepared((matrices, sums), groups * channels * cut.tiles * _DIAGONALS)

    known = _prepared(("gradient", w_dtype, vector, tensors.signature((g, k))), prepare)
    scratch = torch.empty(known.scratch, dtype=torch.float32, device=k.device)
    tensors.launch(known.plans[0], (g.data_ptr(), k.data_ptr(), scratch.data_ptr()))
    tensors.launch(known.plans[1], (scratch.data_ptr(), found.data_ptr()))
    return found


# ---- transforms --------------------------------------------------------------------------------------------------


def _transform_length(tokens: int) -> int:
    """Return the shortest length of a fast transform in which nothing comes round: 2^i, 3 2^i or 5 2^i."""
    needed = max(2 * tokens - 1, 1)
    return min(odd << max(0, (-(-needed // odd) - 1).bit_length()) for odd in (1, 3, 5))


def _spectrum(x: Tensor) -> Tensor:
    found: Tensor = torch.fft.rfft(x.float(), n=_transform_length(x.shape[-1]))
    return found


def _mirrored(x: Tensor) -> Tensor:
    """Return the spectrum of `x` backwards in time.

    Not by `conj`, which leaves a mark that what runs below torch's dispatcher may not look at.
    """
    return _spectrum(x).conj_physical()


def _signal(spectrum: Tensor, tokens: int) -> Tensor:
    found: Tensor = torch.fft.irfft(spectrum, n=_transform_length(tokens))
    return found[..., :tokens]


def _fft_forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    if k.numel() == 0:
        return torch.empty_like(k, memory_format=torch.contiguous_format)
    return (_signal(_spectrum(w.flip(-1)) * _spectrum(k), k.shape[-1]) + eps).to(k.dtype)


def _fft_backward(g: Tensor, w: Tensor, k: Tensor, want_w: bool, want_k: bool) -> tuple[Tensor | None, Tensor | None]:
    if k.numel() == 0:
        return torch.zeros_like(w) if want_w else None, torch.zeros_like(k) if want_k else None
    of_g, tokens = _spectrum(g), k.shape[-1]
    gw = _signal((of_g * _mirrored(k)).sum(0), tokens).flip(-1).to(w.dtype) if want_w else None
    return gw, _signal(of_g * _mirrored(w.flip(-1)), tokens).to(k.dtype) if want_k else None


# ---- plain torch -------------------------------------------------------------------------------------------------


def _reference_backward(
    g: Tensor, w: Tensor, k: Tensor, want_w: bool, want_k: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients as convolutions: of g backwards in time, and of k with g as the filter of each row."""
    wide = torch.promote_types(w.dtype, k.dtype)
    wide = torch.promote_types(wide, torch.float32)
    gw = gk = None
    if want_w:
        flat = (k.shape[0] * k.shape[1], k.shape[2])
        rows = timex_ref(g.to(wide).reshape(flat), k.to(wide).reshape(1, *flat))
        gw = rows.view(k.shape).sum(0).to(w.dtype)
    if want_k:
        gk = timex_ref(w.to(wide), g.to(wide).flip(-1)).flip(-1).to(k.dtype)
    return gw, gk


# ---- the torch op ------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("rwkv_jit", "FRAGMENT")
_LIBRARY.define("timex_fwd(Tensor w, Tensor k, float eps, str backend, bool training) -> Tensor")
_LIBRARY.define("timex_bwd(Tensor g, Tensor w, Tensor k, str backend, bool want_w, bool want_k) -> (Tensor, Tensor)")


def _forward(w: Tensor, k: Tensor, eps: float, backend: str, training: bool) -> Tensor:
    if backend == "tiles":
        return _convolve(w, k, eps, is_reversed=False, training=training)
    if backend == "fft":
        return _fft_forward(w, k, eps)
    if not k.is_cuda:
        stats.say_once("timex: CPU tensors run the reference in plain torch", key="cpu")
    return timex_ref(w, k, eps).contiguous()


def _backward(g: Tensor, w: Tensor, k: Tensor, backend: str, want_w: bool, want_k: bool) -> tuple[Tensor, Tensor]:
    gw: Tensor | None
    gk: Tensor | None
    if backend == "tiles":
        gw = _filter_gradient(g, k, w.dtype) if want_w else None
        gk = _convolve(w, g, 0.0, is_reversed=True) if want_k else None
    else:
        gw, gk = (_fft_backward if backend == "fft" else _reference_backward)(g, w, k, want_w, want_k)
    return w.new_empty(0) if gw is None else gw.contiguous(), k.new_empty(0) if gk is None else gk.contiguous()


def _forward_fake(w: Tensor, k: Tensor, eps: float, backend: str, training: bool) -> Tensor:
    return torch.empty_like(k, memory_format=torch.contiguous_format)


def _backward_fake(g: Tensor, w: Tensor, k: Tensor, backend: str, want_w: bool, want_k: bool) -> tuple[Tensor, Tensor]:
    def like(x: Tensor, wanted: bool) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else x.new_empty(0)

    return like(w, want_w), like(k, want_k)


for _name, _run, _fake in (("timex_fwd", _forward, _forward_fake), ("timex_bwd", _backward, _backward_fake)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"rwkv_jit::{_name}", _fake, lib=_LIBRARY)

_forward_op: Any = torch.ops.rwkv_jit.timex_fwd.default
_backward_op: Any = torch.ops.rwkv_jit.timex_bwd.default


class _Gradient(torch.autograd.Function):
    """The backward as a function of its own, so that a second derivative is a clear error and not a wrong zero."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        gw, gk = _backward_op(*arguments)
        return gw, gk

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("timex has no second derivative; differentiate timex_ref twice instead")


class _Timex(torch.autograd.Function):
    """The forward, and its backward from w and k."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, k: Tensor, eps: float, backend: str, direct: bool) -> Tensor:
        ctx.save_for_backward(w, k)
        ctx.backend = backend
        out: Tensor = (_forward if direct else _forward_op)(w, k, eps, backend, True)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        want_w, want_k = ctx.needs_input_grad[:2]
        run = _Gradient.apply if torch.is_grad_enabled() else _backward_op
        gw, gk = run(g, *ctx.saved_tensors, ctx.backend, want_w, want_k)
        return gw if want_w else None, gk if want_k else None, None, None, None


# ---- the public call ---------------------------------------------------------------------------------------------


def choose(backend: str, dtype: torch.dtype, tokens: int, arch: Callable[[], str]) -> str:
    """Return the backend that a call on CUDA tensors takes, for the dtype of k.

    Raises
    ------
    UnsupportedConfigError
        The one that was asked for cannot do it.
    """
    obstacle = None
    if tokens > LONGEST:
        obstacle = f"takes at most {LONGEST} tokens, got {tokens}"
    elif chunked.arch_number(arch()) < LEAST_ARCH:
        obstacle = f"needs an architecture from sm_{LEAST_ARCH} on, got {arch()}"
    if backend == "tiles" and obstacle is not None:
        raise UnsupportedConfigError(f"backend: 'tiles' {obstacle}; use 'auto' or 'fft'")
    if backend != "auto":
        return backend
    return "tiles" if obstacle is None and tokens <= MOST_TOKENS[dtype] else "fft"


def _check(w: Any, k: Any, eps: float, backend: str) -> tuple[Tensor, Tensor, str]:
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not -math.inf < eps < math.inf:
        raise ValueError(f"eps: expected a finite number, got {eps!r}")
    w, k = tensors.from_any("w", w), tensors.from_any("k", k)
    if k.dim() != 3:
        raise ValueError(f"k: expected 3 dimensions [B, C, T], got shape {tuple(k.shape)}")
    if w.shape != k.shape[1:]:
        raise ValueError(f"w: expected shape {list(k.shape[1:])} [C, T] like k, got {list(w.shape)}")
    if w.device != k.device:
        raise ValueError(f"w: expected device {k.device} like k, got {w.device}")
    on_gpu = k.device.type == "cuda"
    if backend == "tiles" and not on_gpu:
        raise UnsupportedConfigError(
            f"backend: 'tiles' runs on CUDA tensors, got {k.device}; use 'auto', 'fft' or 'reference'"
        )
    plain = backend == "reference" or (backend == "auto" and not on_gpu)
    legal = [*tensors.STORAGE, torch.float64] if plain else [*tensors.STORAGE]
    if k.dtype not in legal:
        raise TypeError(f"k: expected {' or '.join(map(str, legal))}, got {k.dtype}")
    if w.dtype not in (k.dtype, torch.float32) or (w.dtype == torch.float32 and k.dtype == torch.float64):
        also = "" if k.dtype in (torch.float32, torch.float64) else " or torch.float32"
        raise TypeError(f"w: expected {k.dtype} like k{also}, got {w.dtype}")
    if plain:
        return w, k, "reference"
    if not on_gpu:
        return w, k, backend
    return w, k, choose(backend, k.dtype, k.shape[2], lambda: tensors.arch(k.device.index))


def timex(w: Any, k: Any, eps: float = 0.0, backend: str = "auto") -> Tensor:
    r"""TimeX: a causal convolution of every channel with a filter as long as the sequence, with gradients to both.

        out[b, c, t] = eps + sum_{s <= t} w[c, T-1-(t-s)] k[b, c, s]

    B is the batch, C the channels, T the tokens; each may be 0. w[c, T-1] is the weight of the current token.

    Parameters
    ----------
    w : torch.Tensor, shape (C, T), dtype of k or float32
        Filter of each channel: its last element is for the current token, its first for T - 1 tokens ago. Any strides;
        where the last one is not 1, a copy is made. Arrays of other libraries come in through DLPack.
    k : torch.Tensor, shape (B, C, T), float16, bfloat16 or float32
        Input, of any strides as w.
    eps : float, default 0.0
        Added to every output.
    backend : {"auto", "tiles", "fft", "reference"}, default "auto"
        "tiles" are CUDA kernels on the tensor cores, from sm_80 on and for T up to 16384; "fft" is torch.fft in
        float32 over padded rows; "reference" is plain torch. "auto" takes the reference for tensors that are not on a
        GPU, else tiles up to T = 3072 in float32 and 8192 in 16 bits, and fft for what is longer or an older GPU.

    Returns
    -------
    torch.Tensor, shape (B, C, T), dtype of k
        Contiguous.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit: its name, what was expected and what came. Nothing has been launched.
    UnsupportedConfigError
        A call that the `backend` cannot do, with what is in its way.
    NvrtcNotFoundError
        CUDA tensors without CuPy or NVRTC; with the command that installs them.

    Notes
    -----
    Gradients are those of

        gk[b, c, s] = sum_{t >= s} g[b, c, t] w[c, T-1-(t-s)]
        gw[c, T-1-x] = sum_b sum_{t >= x} g[b, c, t] k[b, c, t-x]

    with gw in the dtype of w, summed over the batch in float32. The backward keeps w and k and nothing else; that of w
    takes 8 C T bytes for every 16 rows of the batch while it runs. A second derivative is an error.

    tiles: a float32 number is split into two of float16 after scaling by a power of two, which is that of a whole
    filter, and of 32 inputs of a row; sums are float32. Relative L2 error against float64 is below 2e-6 in float32,
    whatever the signs, and the rounding of the outputs in 16 bits. Results are the same bit for bit from run to run. An
    input that is not finite spoils its row alone, and there up to 63 outputs before it too; an infinite weight spoils
    its channel.

    The first call with a dtype and a range of lengths compiles for this GPU and stores the result on disk. CPU tensors
    run the reference, with one notice.

    References
    ----------
    Peng, RWKV-CUDA, depthwise_conv_1d: the operator; nothing of its code.

    Examples
    --------
    >>> w, k = torch.randn(96, 1000, device="cuda"), torch.randn(4, 96, 1000, device="cuda")
    >>> out = rwkv_jit.timex(w, k)
    >>> out.shape
    torch.Size([4, 96, 1000])
    """
    w, k, backend = _check(w, k, eps, backend)
    direct = tensors.is_eager() and tensors.are_plain((w, k))
    out: Tensor
    if torch.is_grad_enabled() and (w.requires_grad or k.requires_grad):
        out = _Timex.apply(w, k, float(eps), backend, direct)  # type: ignore[no-untyped-call]
    else:
        out = (_forward if direct else _forward_op)(w, k, float(eps), backend, False)
    return out
