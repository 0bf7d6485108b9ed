"""What DLPack shows of a tensor: the view that kernels, and other libraries, have of its memory."""

from __future__ import annotations

import ctypes

from torch import Tensor


class _Array(ctypes.Structure):
    """DLTensor of the DLPack standard, with its nested structures spelled out."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32), ("type_code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    )  # fmt: skip


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def view(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int]:
    """Return address, shape, strides (in elements), device and bytes of an element that DLPack shows of a tensor.

    No stream waits, as nothing is read.
    """
    capsule = x.detach().__dlpack__(stream=-1)
    array = _Array.from_address(_pointer(capsule, b"dltensor"))
    count = array.dimensions
    address, element_bytes = (array.data or 0) + array.offset, array.bits * array.lanes // 8
    return address, tuple(array.shape[:count]), tuple(array.strides[:count]), array.device, element_bytes
