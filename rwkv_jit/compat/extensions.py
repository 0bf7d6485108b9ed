"""What extensions of RWKV projects are called, the ops that each defines, and who runs them here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from rwkv_jit.call import tensors
from rwkv_jit.compat import recurrences, rows, trainer, wind
from rwkv_jit.compat.buffers import Run
from rwkv_jit.compat.listed import Listed
from rwkv_jit.compat.recurrences import RWKV6, RWKV7, Recurrence
from rwkv_jit.kernels.errors import brief
from rwkv_jit.kernels.signatures import BySignature

_SUFFIX = r"(_(op|cuda|infer|runner|eval|ref|for|h100|alt|vcoll|bf16|fp16|f?p?32|v?\d\w*))*\.(cpp|cu|cuh|h|hip)"
_SIZES, _CHANNELS = "int B, int T, int C, int H", "int B, int T, int C"
# By the letters of the sizes that a call says, N = C / H; R are the elements of r, or of q where it is called so.
OF_HEADS = {
    "r k v w a b y gy gr gk gv gw": "BTC", "u w1 ww1 u1 w2 ww2 u2": "C", "gu gw1 gu1 gw2 gu2": "BC", "state": "BCN",
    "s gs": "CN BCN",
}  # fmt: skip
OF_ONE_DECAY = {**OF_HEADS, "w ww": "C", "gw": "BC"}  # for all tokens
OF_CHANNELS = {"k v y gy gk gv": "BTC", "w u": "C", "gw gu aa bb pp": "BC"}
OF_FILTERS = {"w": "CT", "k out gy gw gk": "BCT"}
ALIKE = {"w k v a b z y dy dr dq dw dk dv da db dz": "R"}
_COUNTS = {"": ALIKE, _SIZES: OF_HEADS, _CHANNELS: OF_CHANNELS}


@dataclass(frozen=True)
class Entry:
    """An op: its arguments as torch's schemas write them, and what runs it."""

    schema: str
    run: Callable[..., Any]


@dataclass(frozen=True)
class Extension:
    """The ops of an extension. Without a namespace it is a module of Python alone."""

    namespace: str
    ops: Mapping[str, Entry]
    stems: str = ""  # how names of its sources begin, apart by |; as the namespace by default, without wind_

    def is_of(self, source: str) -> bool:
        """Return whether projects call a source of this extension so."""
        return re.fullmatch(f"({self.stems or self.namespace.removeprefix('wind_')}){_SUFFIX}", source) is not None


def checked(
    run: Run, names: Sequence[str], counts: Mapping[str, str], tensor_names: Collection[str]
) -> Callable[..., Any]:  # fmt: skip
    """Return what runs an op by the names of its arguments, with the elements of its tensors counted before.

    Kernels of the extensions would have crashed on others.
    `counts` says how many elements tensors have: words of letters, of which any will do, by their names.
    """
    by_name = {name: words for several, words in counts.items() for name in several.split() if name in names}
    counted: BySignature[None] = BySignature()  # shapes and sizes of calls that were right

    def call(*values: Any) -> Any:
        # One of the two extensions of RWKV-4 leaves y out.
        present = names if len(values) == len(names) else [name for name in names if name != "y"]
        arguments = dict(zip(present, values, strict=True))
        is_eager = tensors.is_eager()  # else sizes may have no values
        shapes = tuple([x if isinstance(x, (int, float)) else getattr(x, "shape", None) for x in values])
        if is_eager and shapes in counted:
            return run(arguments)
        sizes = {letter: arguments[letter] for letter in "BTCH" if letter in arguments}
        if counts and "H" in sizes:
            sizes["N"] = rows.head_size(sizes["C"], sizes["H"])
        for name, x in arguments.items():
            if name in tensor_names and not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {brief(x)}")
        if counts and not sizes:
            sizes["R"] = arguments["r" if "r" in arguments else "q"].numel()
        for name, words in by_name.items():
            if name not in arguments:
                continue
            found = arguments[name].numel()
            if all(found != math.prod(sizes[letter] for letter in word) for word in words.split()):
                word = words.split()[-1]
                said = " x ".join(f"{letter} {sizes[letter]}" for letter in word)
                raise ValueError(
                    f"{name}: expected {math.prod(sizes[letter] for letter in word)} elements, {said}, "
                    f"got shape {list(arguments[name].shape)}"
                )
        if is_eager:
            counted.keep(shapes, None)
        return run(arguments)

    return call


def _entry(
    run: Run, reads: str, fills: str, begin: str = "", returns: str = "()",
    elements: Mapping[str, str] | None = None,
) -> Entry:  # fmt: skip
    """Return an op that reads tensors, and fills others or makes them.

    An exclamation mark stands behind a read one that it fills, a question mark behind one that may be None. `elements`
    are what `checked` counts; by default what goes with `begin`.
    """
    arguments, alias = [begin] if begin else [], 0
    for name in [*reads.split(), *(f"{x}!" for x in fills.split())]:
        if ":" in name:  # a number, as float:eps
            arguments.append(name.replace(":", " "))
        elif name.endswith("!"):
            arguments.append(f"Tensor({chr(ord('a') + alias)}!) {name[:-1]}")
            alias += 1
        elif name.endswith("?"):
            arguments.append(f"Tensor? {name[:-1]}")
        else:
            arguments.append(f"Tensor {name}")
    names = [argument.split()[-1] for argument in ", ".join(arguments).split(", ")]
    tensor_names = {x.split()[-1] for x in arguments if x.startswith(("Tensor ", "Tensor("))}
    counted = _COUNTS.get(begin, {}) if elements is None else elements
    return Entry(f"({', '.join(arguments)}) -> {returns}", checked(run, names, counted, tensor_names))


def _functional(run: Run, reads: str, returns: str = "Tensor[]", is_listed: bool = True) -> Entry:
    """Return an op that makes its results."""
    entry = _entry(trainer.alone(run), reads, "", returns=returns, elements={})  # it checks its tensors itself
    return replace(entry, run=Listed(entry.run, is_alone=returns == "Tensor")) if is_listed else entry


def _of_logits(run: Run, reads: str, returns: str = "Tensor[]") -> Entry:
    """Return an op that makes its results of logits, of which memory has no place for others to note a list."""
    return _functional(run, reads, returns, is_listed=False)


def _trained(names: str, decay: str, state: str = "", last: str = "", others: str = "") -> dict[str, Entry]:
    """Return forward and backward of RWKV-7 for training; `others` are its rows in the order of `wkv7`."""
    runs = recurrences.trained(others or names, decay, state, last)
    read, grads = f"{state} {names}".strip(), " ".join(f"d{x}" for x in (*state.split(), *names.split()))
    return _pair(
        _entry(runs[0], read, f"y {last} s sa"), _entry(runs[1], f"{names} dy {f'd{last} ' if last else ''}s sa", grads)
    )


def _recurrent(forward: Recurrence, backward: Recurrence | None = None, state: str = "") -> dict[str, Entry]:
    """Return forward and backward of a recurrence, which may have its log-decays in the backward alone."""
    backward = backward or forward
    elements = OF_HEADS if "w" in forward.rows.split() else OF_ONE_DECAY
    names = f"{backward.rows} {backward.heads} {state}".split()
    reads = re.sub(r"ww(\d?)", r"w\1 ww\1", " ".join(names))  # decays as the forward has them are passed too
    grads = " ".join(f"g{name.replace('ww', 'w')}" for name in names)
    return _pair(
        _entry(forward.forward, f"{forward.rows} {forward.heads} {state}", "y", _SIZES, elements=elements),
        _entry(backward.backward, f"{reads} gy", grads, _SIZES, elements=elements),
    )


def _in_place(of: Recurrence, *suffixes: str) -> dict[str, Entry]:
    """Return a forward that moves states on, once for each end of its name."""
    elements = OF_ONE_DECAY if of.op is recurrences.RWKV5.op else OF_HEADS
    entry = _entry(of.in_place, f"state! {of.rows} {of.heads}", "y", _SIZES, elements=elements)
    return {f"forward{suffix}": entry for suffix in suffixes}


def _pair(forward: Entry, backward: Entry) -> dict[str, Entry]:
    return {"forward": forward, "backward": backward}


_CLAMPW = _trained("r w k v a b", "sigmoid")
_BY_DTYPE = ("_fp16", "_bf16", "_fp32")
_RWKV6_STATE = _recurrent(RWKV6, state="s")
_RWKV5 = _recurrent(recurrences.RWKV5, recurrences.RWKV5_LOG)
_WIND = "dw dq dk dv da db ds0"
_WIND_BACKSTEPPING = _pair(
    _entry(wind.forward, "w q k v a b s0 y! s? sa? sT!", ""), _entry(wind.backward, "w q k v a b dy s sa dsT", _WIND)
)
_VALUE = _functional(trainer.value_forward, "v v_first v0 v12", "Tensor")

_OF_TORCH: dict[str, Mapping[str, Entry]] = {  # by their namespaces, which are their names
    "wind_backstepping_smallhead": _WIND_BACKSTEPPING,
    "wind_backstepping_longhead": _WIND_BACKSTEPPING,
    "wind_smallhead_moh": _pair(
        _entry(wind.routed_forward, "w q k v a b s0 y! s! sa! sT! statei s_offset", ""),
        _entry(wind.routed_backward, f"w q k v a b dy s sa dsT {_WIND.replace(' ', '! ')}! sT statei s_offset", ""),
    ),
    "rwkv7_clampw": _CLAMPW,
    "rwkv7_clampw_v3": _CLAMPW,
    "rwkv7_clampw128_v2": _CLAMPW,
    "rwkv7_state_clampw": _trained("r w k v a b", "sigmoid", "s0"),
    "rwkv7_statepassing_clampw": _trained("r w k v a b", "sigmoid", "s0", "sT"),
    "wkv7": {"forward": _recurrent(RWKV7)["forward"]},
    "wkv7s": _in_place(RWKV7, "", *_BY_DTYPE),
    "rwkv7_state_fwd_fp16": _in_place(RWKV7, ""),
    "wkv6": _recurrent(RWKV6),
    "wkv6state": _RWKV6_STATE,
    "wkv6b": _RWKV6_STATE,
    "wkv5": _RWKV5,
    "wkv5a": _recurrent(recurrences.RWKV5A, recurrences.RWKV5A_LOG),
    "rwkv5": _in_place(recurrences.RWKV5, *_BY_DTYPE),
    "rwkv6": _in_place(recurrences.RWKV6_DIRECT, *_BY_DTYPE),
    "wkv": _pair(
        _entry(recurrences.rwkv4_forward, "w u k v", "y", _CHANNELS),
        _entry(recurrences.rwkv4_backward, "w u k v y gy", "gw gu gk gv", _CHANNELS),
    ),
    "timex": _pair(
        _entry(recurrences.timex_forward, "w k out! float:eps int:B int:C int:T", "", elements=OF_FILTERS),
        _entry(recurrences.timex_backward, "w k gy gw! gk! int:B int:C int:T", "", elements=OF_FILTERS),
    ),
    "rwkv7_tmix_mix6_bf16_v5": _pair(
        _functional(trainer.mix_forward, f"x {trainer.SHARES}"),
        _functional(trainer.mix_backward, f"grad_r grad_w grad_k grad_v grad_a grad_g x {trainer.SHARES}"),
    ),
    "rwkv7_tmix_a_gate_bf16": _pair(
        _functional(trainer.rate_forward, "a0 a12", "Tensor"), _functional(trainer.rate_backward, "grad_out a0 a12")
    ),
    "rwkv7_tmix_vres_gate_bf16_v1": _pair(
        _VALUE, _functional(partial(trainer.value_backward, in_rows=True), "grad_out v v_first v0 v12")
    ),
    "rwkv7_tmix_vres_gate_bf16_v3": _pair(_VALUE, _functional(trainer.value_backward, "grad_out v v_first v0 v12")),
    "rwkv7_tmix_kk_pre_bf16_v5": _pair(
        _functional(trainer.keys_forward, "k k_k a k_a int:head_size"),
        _functional(trainer.keys_backward, "grad_new_k grad_neg_kk grad_kka k k_k a k_a inv_d int:head_size"),
    ),
    "rwkv7_tmix_lnx_rkvres_xg_bf16_v1": _pair(
        _functional(trainer.out_forward, trainer.OUT),
        _functional(trainer.out_backward, f"grad_xg {trainer.OUT} mean rstd"),
    ),
    "rwkv7_cmix_bf16_v5": _pair(
        _functional(trainer.channels_forward, "x x_k key_weight value_weight"),
        _functional(trainer.channels_backward, "grad_out x x_k key_weight value_weight mixed act"),
    ),
}
NAMES = {name: Extension(name, ops) for name, ops in _OF_TORCH.items()} | {
    "wind_backstepping": Extension(
        "wind_backstepping", _trained("w q k v z a", "raw", others="q w k v z a"), "wkv7|backstepping"
    ),
    "wind_chunked_cuda": Extension("wind_chunked_cuda", _pair(
        _entry(wind.forward, "w q k v a b s0 y! s? sT!", ""),
        _entry(wind.backward, "w q k v a b dy s dsT", _WIND),
    ), "chunked_cuda|tile"),
    "wind_chunked_cuda_varlen": Extension("wind_chunked_cuda_varlen", _pair(
        _entry(wind.forward, "w q k v a b s0 y! s? sT! cu_seqlens", ""),
        _entry(wind.backward, f"w q k v a b dy s dsT {_WIND.replace(' ', '! ')}! cu_seqlens", ""),
    ), "chunked_cuda_varlen|tile"),
    "wkv6infctx": Extension("", _pair(
        _entry(recurrences.overwriting_forward, "r k v w u s!", "y", _SIZES),
        _entry(recurrences.overwriting_backward, "r k v w u s gy", "gr gk gv gw gu gs", _SIZES),
    ), "wkv6infctx"),
    "wkv5_ref": Extension("wkv5_ref", _RWKV5, "wkv5"),
    "wkv_cuda": Extension("rwkv", {
        "wkv_forward": _entry(recurrences.rwkv4_in_place, "w u k v", "y aa bb pp", _CHANNELS),
        "mm8_seq": _entry(recurrences.mm8, "x w mx rx my ry", "y", "int B, int N, int M"),
        "mm8_one": _entry(recurrences.mm8, "x w mx rx my ry", "y", "int N, int M"),
        "gemm_fp16_cublas": _entry(recurrences.gemm_fp16_cublas, "a b", "c", elements={}),
    }, "wrapper|operators|gemm_fp16_cublas"),
    "rwkv7_l2wrap_ce_bf16_v2": Extension("", _pair(
        _of_logits(trainer.loss_forward, "logits targets"),
        _of_logits(trainer.loss_backward, "grad_loss logits targets lse max_vals argmax", "Tensor"),
    ), "rwkv7_l2wrap_ce"),
    "rwkv7_head_l2wrap_ce_bf16_v4": Extension("", {
        "forward": _of_logits(trainer.head_forward, "hidden weight targets int:chunk_rows"),
    }, "rwkv7_head_l2wrap_ce"),
}  # fmt: skip
_FLASH_RWKV = {  # by a source, as both are built under the one name flash_rwkv_5
    "wkv5_op.cpp": Extension("", {
        **_in_place(recurrences.RWKV5, *_BY_DTYPE), **{f"backward{x}": _RWKV5["backward"] for x in _BY_DTYPE},
    }, ".*"),
    "wkv6_op.cpp": Extension("", _in_place(recurrences.RWKV6_LOG, *_BY_DTYPE), ".*"),
}  # fmt: skip
_LONGEST_IN_NAME = re.compile(r"wkv_\d+(_bf16)?")  # a build for at most so many tokens


def base_names(sources: Any) -> list[str]:
    """Return the base names of what `load` is given as sources."""
    listed = [sources] if isinstance(sources, str | os.PathLike) else sources
    if not isinstance(listed, Collection) or not all(isinstance(x, str | os.PathLike) for x in listed):
        raise TypeError(f"sources: expected a path or a list of paths, got {brief(sources)}")
    return [os.path.basename(x) for x in listed]


def find(name: str, sources: Collection[str] = ()) -> Extension | None:
    """Return the extension of a name that `load` is called with; None of one that is not known.

    Where several builds share a name the base names of their sources tell which it is: flash-rwkv's two, the wkv5 that
    remote code of RWKV-5 builds as `wkv_64`, and RWKV-4's as `wkv_cuda`.
    """
    if name == "flash_rwkv_5":
        return next((_FLASH_RWKV[x] for x in sources if x in _FLASH_RWKV), None)
    if _LONGEST_IN_NAME.fullmatch(name) or (name == "wkv_cuda" and any(x.startswith("wkv_") for x in sources)):
        return None if any(x.startswith("wkv5") for x in sources) else NAMES["wkv"]
    return NAMES.get(name)


def ops_of(namespace: str) -> set[str]:
    """Return the names of the ops that stand in a namespace."""
    return {op for extension in NAMES.values() if extension.namespace == namespace for op in extension.ops}
