"""Errors that `rwkv_jit` raises beside plain ``TypeError`` and ``ValueError`` for wrong arguments.

RwkvJitError (RuntimeError)
├── CompileError             NVRTC refused a kernel: options, numbered source lines and log are in the message
├── NvrtcNotFoundError       CuPy or NVRTC is missing or doubled: the message ends with the command to type
├── UnsupportedConfigError   (also ValueError) no kernel for these parameters: the rule and the nearest legal value
└── CacheError               an explicit cache command could not do its work
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def short(text: str, most: int = 200) -> str:
    """Return a text for a message, of a long one the begin."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def brief(value: object) -> str:
    """Return the repr of a value for a message, of a long one the begin."""
    try:
        return short(repr(value))
    except Exception:  # an int of too many digits, or a class whose repr fails
        return f"a value of type {type(value).__name__} that cannot be printed"


def printable(text: str) -> str:
    """Return a text for a terminal, which would obey the control characters of a name: they are written as escapes."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() or x in "\n\t" else x.encode("unicode_escape").decode() for x in text)


# What other libraries call arguments, by what these are here: an argument, of functions that have it, or what to do.
_NAMES_ELSEWHERE = {
    name: here for here, names in {
        "leave it out, tensors are [B, T, H, K]": "head_first",
        "flip the tokens of the inputs and of the result": "reverse",
        "leave it out, any decay is right": "safe_gate",
        "leave it out, cu_seqlens is enough": "cu_seqlens_cpu chunk_indices",
        "cu_seqlens=": "offsets seq_idx query_start_loc",
        "initial_state=": "h0 s0 initial_states",
        "output_final_state=": "return_final_states return_final_state",
        "qk_norm=True": "use_qk_l2norm_in_kernel",
        "A_log=": "use_gate_in_kernel",
        "beta_map='sigmoid'": "use_beta_sigmoid_in_kernel",
        "beta_map='twice_sigmoid'": "allow_neg_eigval",
        "state_layout='vk'": "state_v_first transpose_state_layout",
        "chunk_len=": "chunk_size",
        "g=": "gk log_decay g_gamma",
        "state_indices=": "cache_indices conv_state_indices ssm_state_indices state_batch_indices slot_mapping",
        "null_index=": "pad_slot_id",
        "vocabulary=": "vocab_size",
        "width=": "n_embd hidden_size d_model",
        "layers=": "n_layer num_hidden_layers",
    }.items() for name in names.split()
}  # fmt: skip


def unexpected(function: str, name: str, options: Iterable[str] = ()) -> TypeError:
    """Return the error of a keyword argument that a public `function` or class does not have; it takes `options`."""
    import difflib  # neither is needed before
    import inspect

    import rwkv_jit

    public: Any = rwkv_jit
    for part in function.split("."):
        public = getattr(public, part, None)
    parameters = inspect.signature(public).parameters.values() if public else ()
    legal = [*(x.name for x in parameters if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)), *options]
    hint, near = _NAMES_ELSEWHERE.get(name, ""), difflib.get_close_matches(name, legal, 1)
    if "=" in hint:
        hint = f"here it is {hint}" if hint.partition("=")[0] in legal else ""
    if not hint and near:
        hint = f"did you mean {near[0]!r}?"
    said = f" ({hint})" if hint else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{said}; there are {', '.join(legal)}")


def reason(error: OSError) -> str:
    """Return what the system says of an error, without number and path."""
    return error.strerror or str(error)


class RwkvJitError(RuntimeError):
    """Base of all errors of this package."""


class CompileError(RwkvJitError):
    """NVRTC refused a kernel.

    Attributes
    ----------
    command : str
        Compiles the saved source once more, with the same options; empty where nothing could be saved.
    is_lasting : bool
        Whether the source is at fault, so that it would fail again; not where memory or the disk was short.
    """

    command = ""
    is_lasting = False


class NvrtcNotFoundError(RwkvJitError):
    """CuPy or NVRTC cannot be used; the message ends with the command that fixes it."""


class UnsupportedConfigError(RwkvJitError, ValueError):
    """No kernel exists for these parameters, or not on this device."""


class CacheError(RwkvJitError):
    """An explicit cache command failed."""
