"""Machine code and PTX that no compiler made, in the form that an entry of the cache must have."""

import struct


def image(code, target="sm_90"):
    """Return a cubin with this code behind its header, or PTX with a comment of it where the target is PTX."""
    kind, _, name = target.partition("_")
    if kind == "compute":
        return f".version 8.0\n.target sm_{name}\n// {code.hex()}\n".encode()
    number = int("".join(filter(str.isdigit, name)))
    end = 64 + len(code)  # where both tables would begin, of no sections and no segments
    head = struct.pack("<6s2xB7xHHIQQQIHHHHHH", b"\x7fELF\2\1", 7, 2, 190, 1, 0, end, end, number, 64, 56, 0, 64, 0, 0)
    return head + code
