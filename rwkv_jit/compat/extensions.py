"""What extensions of RWKV projects are called, the ops that each defines, and who runs them here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rwkv_jit.compat import recurrences, rows, trainer, wind
from rwkv_jit.compat.buffers import Run
from rwkv_jit.kernels.errors import brief

_SUFFIX = r"(_(op|cuda|infer|runner|eval|ref|for|h100|alt|vcoll|bf16|fp16|f?p?32|v?\d\w*))*\.(cpp|cu|cuh|h|hip)"
_SIZES, _CHANNELS = "int B, int T, int C, int H", "int B, int T, int C"
# By the letters of the sizes that a call says, N = C / H; R are the elements of r, or of q where it is called so.
OF_HEADS = {"r k v w a b y gy gr gk gv gw": "BTC", "u": "C", "gu": "BC", "state": "BCN", "s gs": "CN BCN"}
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


def checked(run: Run, names: Sequence[str], counts: Mapping[str, str]) -> Callable[..., Any]:
    """Return what runs an op by the names of its arguments, with the elements of its tensors counted before.

    Kernels of the extensions would have crashed on others.
    `counts` says how many elements tensors have: words of letters, of which any will do, by their names.
    """
    by_name = {name: words for several, words in counts.items() for name in several.split() if name in names}

    def call(*values: Any) -> Any:
        # One of the two extensions of RWKV-4 leaves y out.
        present = names if len(values) == len(names) else [name for name in names if name != "y"]
        arguments = dict(zip(present, values, strict=True))
        sizes = {letter: arguments[letter] for letter in "BTCH" if letter in arguments}
        if counts and "H" in sizes:
            sizes["N"] = rows.head_size(sizes["C"], sizes["H"])
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
    counted = _COUNTS.get(begin, {}) if elements is None else elements
    return Entry(f"({', '.join(arguments)}) -> {returns}", checked(run, names, counted))


def _functional(run: Run, reads: str, returns: str = "Tensor[]") -> Entry:
    """Return an op that makes its results."""
    return _entry(run, reads, "", returns=returns, elements={})  # it checks its tensors itself


def _trained(names: str, decay: str, state: str = "", last: str = "", others: str = "") -> dict[str, Entry]:
    """Return forward and backward of RWKV-7 for training; `others` are its rows in the order of `wkv7`."""
    runs = recurrences.trained(others or names, decay, state, last)
    read, grads = f"{state} {names}".strip(), " ".join(f"d{x}" for x in (*state.split(), *names.split()))
    return _pair(
        _entry(runs[0], read, f"y {last} s sa"), _entry(runs[1], f"{names} dy {f'd{last} ' if last else ''}s sa", grads)
    )


def _pair(forward: Entry, backward: Entry) -> dict[str, Entry]:
    return {"forward": forward, "backward": backward}


_CLAMPW = _trained("r w k v a b", "sigmoid")
_IN_PLACE = _entry(recurrences.in_place(recurrences.RWKV7), "state! r w k v a b", "y", _SIZES)
_BY_DTYPE = ("fp16", "bf16", "fp32")
_RWKV6_STATE = _pair(
    _entry(recurrences.forward(recurrences.RWKV6), "r k v w u s", "y", _SIZES),
    _entry(recurrences.backward(recurrences.RWKV6), "r k v w u s gy", "gr gk gv gw gu gs", _SIZES),
)
_ONE_DECAY = {**OF_HEADS, "w ww": "C", "gw": "BC"}  # for all tokens
_RWKV5 = _pair(
    _entry(recurrences.forward(recurrences.RWKV5), "r k v w u", "y", _SIZES, elements=_ONE_DECAY),
    _entry(
        recurrences.backward(recurrences.RWKV5_LOG), "r k v w ww u gy", "gr gk gv gw gu", _SIZES, elements=_ONE_DECAY
    ),
)
_TWO_DECAYS = {**OF_HEADS, "w1 ww1 u1 w2 ww2 u2": "C", "gw1 gu1 gw2 gu2": "BC"}
_RWKV5_IN_PLACE = _entry(recurrences.in_place(recurrences.RWKV5), "state! r k v w u", "y", _SIZES, elements=_ONE_DECAY)
_WIND = "dw dq dk dv da db ds0"
_WIND_BACKSTEPPING = _pair(
    _entry(wind.forward, "w q k v a b s0 y! s? sa? sT!", ""), _entry(wind.backward, "w q k v a b dy s sa dsT", _WIND)
)
_RWKV4 = _pair(
    _entry(recurrences.rwkv4_forward, "w u k v", "y", _CHANNELS),
    _entry(recurrences.rwkv4_backward, "w u k v y gy", "gw gu gk gv", _CHANNELS),
)
_VALUE = _functional(trainer.value_forward, "v v_first v0 v12", "Tensor")

NAMES: dict[str, Extension] = {
    "wind_backstepping": Extension(
        "wind_backstepping", _trained("w q k v z a", "raw", others="q w k v z a"), "wkv7|backstepping"
    ),
    "wind_chunked_cuda": Extension("wind_chunked_cuda", _pair(
        _entry(wind.forward, "w q k v a b s0 y! s? sT!", ""),
        _entry(wind.backward, "w q k v a b dy s dsT", _WIND),
    ), "chunked_cuda|tile"),
    "wind_chunked_cuda_varlen": Extension("wind_chunked_cuda_varlen", _pair(
        _entry(wind.forward, "w q k v a b s0 y! s? sT! cu_seqlens", ""),
        _entry(wind.backward, "w q k v a b dy s dsT dw! dq! dk! dv! da! db! ds0! cu_seqlens", ""),
    ), "chunked_cuda_varlen|tile"),
    "wind_backstepping_smallhead": Extension("wind_backstepping_smallhead", _WIND_BACKSTEPPING),
    "wind_backstepping_longhead": Extension("wind_backstepping_longhead", _WIND_BACKSTEPPING),
    "wind_smallhead_moh": Extension("wind_smallhead_moh", _pair(
        _entry(wind.routed_forward, "w q k v a b s0 y! s! sa! sT! statei s_offset", ""),
        _entry(wind.routed_backward, f"w q k v a b dy s sa dsT {_WIND.replace(' ', '! ')}! sT statei s_offset", ""),
    )),
    "rwkv7_clampw": Extension("rwkv7_clampw", _CLAMPW),
    "rwkv7_clampw_v3": Extension("rwkv7_clampw_v3", _CLAMPW),
    "rwkv7_clampw128_v2": Extension("rwkv7_clampw128_v2", _CLAMPW),
    "rwkv7_state_clampw": Extension("rwkv7_state_clampw", _trained("r w k v a b", "sigmoid", "s0")),
    "rwkv7_statepassing_clampw": Extension("rwkv7_statepassing_clampw", _trained("r w k v a b", "sigmoid", "s0", "sT")),
    "wkv7": Extension("wkv7", {"forward": _entry(recurrences.forward(recurrences.RWKV7), "r w k v a b", "y", _SIZES)}),
    "wkv7s": Extension("wkv7s", {"forward": _IN_PLACE, **{f"forward_{x}": _IN_PLACE for x in _BY_DTYPE}}),
    "rwkv7_state_fwd_fp16": Extension("rwkv7_state_fwd_fp16", {"forward": _IN_PLACE}),
    "wkv6": Extension("wkv6", _pair(
        _entry(recurrences.forward(recurrences.RWKV6), "r k v w u", "y", _SIZES),
        _entry(recurrences.backward(recurrences.RWKV6), "r k v w u gy", "gr gk gv gw gu", _SIZES),
    )),
    "wkv6state": Extension("wkv6state", _RWKV6_STATE),
    "wkv6b": Extension("wkv6b", _RWKV6_STATE),
    "wkv6infctx": Extension("", _pair(
        _entry(recurrences.overwriting_forward, "r k v w u s!", "y", _SIZES),
        _entry(recurrences.overwriting_backward, "r k v w u s gy", "gr gk gv gw gu gs", _SIZES),
    ), "wkv6infctx"),
    "wkv5": Extension("wkv5", _RWKV5),
    "wkv5_ref": Extension("wkv5_ref", _RWKV5, "wkv5"),
    "wkv5a": Extension("wkv5a", _pair(
        _entry(recurrences.forward(recurrences.RWKV5A), "r k v w1 u1 w2 u2", "y", _SIZES, elements=_TWO_DECAYS),
        _entry(
            recurrences.backward(recurrences.RWKV5A_LOG), "r k v w1 ww1 u1 w2 ww2 u2 gy",
            "gr gk gv gw1 gu1 gw2 gu2", _SIZES, elements=_TWO_DECAYS,
        ),
    )),
    "rwkv5": Extension("rwkv5", {
        f"forward_{x}": _RWKV5_IN_PLACE for x in _BY_DTYPE
    }),
    "rwkv6": Extension("rwkv6", {
        f"forward_{x}": _entry(recurrences.in_place(recurrences.RWKV6_DIRECT), "state! r k v w u", "y", _SIZES)
        for x in _BY_DTYPE
    }),
    "wkv": Extension("wkv", _RWKV4),
    "timex": Extension("timex", _pair(
        _entry(recurrences.timex_forward, "w k out! float:eps int:B int:C int:T", "", elements=OF_FILTERS),
        _entry(recurrences.timex_backward, "w k gy gw! gk! int:B int:C int:T", "", elements=OF_FILTERS),
    )),
    "wkv_cuda": Extension("rwkv", {
        "wkv_forward": _entry(recurrences.rwkv4_in_place, "w u k v", "y aa bb pp", _CHANNELS),
        "mm8_seq": _entry(recurrences.mm8, "x w mx rx my ry", "y", "int B, int N, int M"),
        "mm8_one": _entry(recurrences.mm8, "x w mx rx my ry", "y", "int N, int M"),
        "gemm_fp16_cublas": _entry(recurrences.gemm_fp16_cublas, "a b", "c", elements={}),
    }, "wrapper|operators|gemm_fp16_cublas"),
    "rwkv7_tmix_mix6_bf16_v5": Extension("rwkv7_tmix_mix6_bf16_v5", _pair(
        _functional(trainer.mix_forward, "x x_r x_w x_k x_v x_a x_g"),
        _functional(
            trainer.mix_backward, "grad_r grad_w grad_k grad_v grad_a grad_g x x_r x_w x_k x_v x_a x_g"
        ),
    )),
    "rwkv7_tmix_a_gate_bf16": Extension("rwkv7_tmix_a_gate_bf16", _pair(
        _functional(trainer.rate_forward, "a0 a12", "Tensor"),
        _functional(trainer.rate_backward, "grad_out a0 a12"),
    )),
    "rwkv7_tmix_vres_gate_bf16_v1": Extension("rwkv7_tmix_vres_gate_bf16_v1", _pair(
        _VALUE, _functional(trainer.value_backward_in_rows, "grad_out v v_first v0 v12"),
    )),
    "rwkv7_tmix_vres_gate_bf16_v3": Extension("rwkv7_tmix_vres_gate_bf16_v3", _pair(
        _VALUE, _functional(trainer.value_backward, "grad_out v v_first v0 v12"),
    )),
    "rwkv7_tmix_kk_pre_bf16_v5": Extension("rwkv7_tmix_kk_pre_bf16_v5", _pair(
        _functional(trainer.keys_forward, "k k_k a k_a int:head_size"),
        _functional(
            trainer.keys_backward, "grad_new_k grad_neg_kk grad_kka k k_k a k_a inv_d int:head_size"
        ),
    )),
    "rwkv7_tmix_lnx_rkvres_xg_bf16_v1": Extension("rwkv7_tmix_lnx_rkvres_xg_bf16_v1", _pair(
        _functional(trainer.out_forward, "x r k v r_k weight bias g"),
        _functional(trainer.out_backward, "grad_xg x r k v r_k weight bias g mean rstd"),
    )),
    "rwkv7_cmix_bf16_v5": Extension("rwkv7_cmix_bf16_v5", _pair(
        _functional(trainer.channels_forward, "x x_k key_weight value_weight"),
        _functional(trainer.channels_backward, "grad_out x x_k key_weight value_weight mixed act"),
    )),
    "rwkv7_l2wrap_ce_bf16_v2": Extension("", _pair(
        _functional(trainer.loss_forward, "logits targets"),
        _functional(trainer.loss_backward, "grad_loss logits targets lse max_vals argmax", "Tensor"),
    ), "rwkv7_l2wrap_ce"),
    "rwkv7_head_l2wrap_ce_bf16_v4": Extension("", {
        "forward": _functional(trainer.head_forward, "hidden weight targets int:chunk_rows"),
    }, "rwkv7_head_l2wrap_ce"),
}  # fmt: skip
_FLASH_RWKV: dict[str, Extension] = {  # by a source, as both are built under the one name flash_rwkv_5
    "wkv5_op.cpp": Extension("", {
        **{f"forward_{x}": _RWKV5_IN_PLACE for x in _BY_DTYPE},
        **{f"backward_{x}": _RWKV5["backward"] for x in _BY_DTYPE},
    }, ".*"),
    "wkv6_op.cpp": Extension("", {
        f"forward_{x}": _entry(recurrences.in_place(recurrences.RWKV6_LOG), "state! r k v w u", "y", _SIZES)
        for x in _BY_DTYPE
    }, ".*"),
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
