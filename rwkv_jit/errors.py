"""Errors that `rwkv_jit` raises beside plain ``TypeError`` and ``ValueError`` for wrong arguments.

RwkvJitError (RuntimeError)
├── CompileError             NVRTC refused a kernel: options, numbered source lines and log are in the message
├── NvrtcNotFoundError       CuPy or NVRTC is missing or doubled: the message ends with the command to type
├── UnsupportedConfigError   (also ValueError) no kernel for these parameters: the rule and the nearest legal value
└── CacheError               an explicit cache command could not do its work
"""


def short(text: str, most: int = 200) -> str:
    """Return a text for a message, of a long one the begin."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def brief(value: object, most: int = 200) -> str:
    """Return the repr of a value for a message, of a long one the begin."""
    try:
        return short(repr(value), most)
    except Exception:  # an int of too many digits, or a class whose repr fails
        return f"a value of type {type(value).__name__} that cannot be printed"


def printable(text: str) -> str:
    """Return a text for a terminal, which would obey the control characters of a name: they are written as escapes."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() or x in "\n\t" else x.encode("unicode_escape").decode() for x in text)


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
    """CuPy or NVRTC cannot be used; the message ends with the command that mends it."""


class UnsupportedConfigError(RwkvJitError, ValueError):
    """No kernel exists for these parameters, or not on this device."""


class CacheError(RwkvJitError):
    """An explicit cache command failed."""
