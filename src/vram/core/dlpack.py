"""`from_dlpack`: memory of other libraries without a copy, through the DLPack protocol.

The other library keeps the memory. `Buffer.__dlpack__` is the other direction.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.stream import stream_handle
from vram.errors import DeviceError
from vram.sizes import format_size

__all__ = ["View", "described", "from_dlpack"]

VERSION: Final = (1, 0)
"""The newest DLPack whose capsules are read here."""
_CPU, _CUDA, _CUDA_HOST, _EXTENSION, _CUDA_MANAGED = 1, 2, 3, 12, 13
_KINDS: Final = {0: "i", 1: "u", 2: "f", 4: "V", 5: "c", 6: "b"}  # 4: bfloat16, which NumPy has no letter for
_READ_ONLY: Final = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class View:
    """Memory that another library owns, and that lives at least as long as this object. See `from_dlpack`.

    `ptr` is the first element, `size` the bytes of all elements, `shape` and `strides` are in elements,
    `typestr` is NumPy's name of their type. Other libraries can import it through DLPack or the array
    interface of its device.
    """

    __slots__ = ("_capsule", "_source", "device", "ptr", "readonly", "shape", "size", "strides", "typestr")

    def __init__(self, source: Any, capsule: Any) -> None:
        """Read a capsule that `source` made; it is kept, not consumed, and frees itself later."""
        tensor, self.readonly = _read(capsule)
        self._source, self._capsule = source, capsule
        self.device = _device_of(tensor, source)
        self.ptr, item, self.shape, self.strides = _layout(tensor)
        self.size: int = math.prod(self.shape) * item
        kind = _KINDS.get(tensor.code, "V")
        self.typestr = f"{'|' if item == 1 or kind == 'V' else '<'}{kind}{item}"

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous in C order."""
        return self.size == 0 or all(
            stride == packed
            for length, stride, packed in zip(self.shape, self.strides, _packed(self.shape), strict=True)
            if length != 1
        )

    def __dlpack__(self, **request: Any) -> Any:
        """A new capsule of the same memory, from its owner."""
        return self._source.__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device of the memory."""
        kind, number = self._source.__dlpack_device__()
        return int(kind), int(number)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.kind != "cuda":
            raise AttributeError(f"memory on {self.device.name} has no __cuda_array_interface__")
        return {**self._interface(), "stream": None}  # ordered when it was imported

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device.kind != "host":
            raise AttributeError(f"memory on {self.device.name} has no __array_interface__")
        return self._interface()

    def _interface(self) -> dict[str, Any]:
        item = int(self.typestr[2:])
        return {
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (self.ptr if self.size else 0, self.readonly),
            "strides": None if self.contiguous else tuple(stride * item for stride in self.strides),
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"<vram.View of {format_size(self.size)} at {self.ptr:#x} on {self.device.name}>"


def from_dlpack(source: Any, stream: Any = None) -> View:
    """View another library's array (anything with `__dlpack__`) without a copy.

    On a GPU, work queued on `stream` (None: the default stream) from now on waits for work that the other
    library has queued. The view keeps the memory alive; `readonly` says whether it may be written.
    """
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise TypeError(f"{type(source).__name__} has no __dlpack__; pass an array of another library")
    kind, number = (int(each) for each in source.__dlpack_device__())
    request: dict[str, Any] = {}
    if kind in (_CUDA, _CUDA_MANAGED):
        # DLPack uses 1 for the default stream; 0 would be ambiguous.
        request["stream"] = stream_handle(stream, Device(f"cuda:{number}")) or 1
    try:
        capsule = source.__dlpack__(max_version=VERSION, **request)
    except TypeError:  # an exporter of the first generation
        capsule = source.__dlpack__(**request)
    return View(source, capsule)


def described(capsule: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...], bool]:
    """A capsule's address, bytes per element, shape, strides in bytes, and whether it is read-only."""
    tensor, readonly = _read(capsule)
    address, item, shape, strides = _layout(tensor)
    return address, item, shape, tuple(stride * item for stride in strides), readonly


def _layout(tensor: _Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Address, bytes per element, shape, and strides in elements."""
    shape = tuple(tensor.shape[: tensor.dimensions])
    strides = tuple(tensor.strides[: tensor.dimensions]) if tensor.strides else _packed(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return address, (tensor.bits * tensor.lanes + 7) // 8, shape, strides


def _read(capsule: Any) -> tuple[_Tensor, bool]:
    """The tensor that a capsule describes, and whether it is read-only."""
    name: bytes | None = _capsule_name(capsule)
    if name == b"dltensor":
        return _Tensor.from_address(_address(capsule, name)), False
    if name != b"dltensor_versioned":
        raise DeviceError(f"{name!r} is not a readable DLPack capsule: it was consumed, or is something else")
    versioned = _Versioned.from_address(_address(capsule, name))
    if versioned.major > VERSION[0]:
        raise DeviceError(f"the capsule is of DLPack {versioned.major}; up to {VERSION[0]} can be read here")
    return versioned.tensor, bool(versioned.flags & _READ_ONLY)


def _address(capsule: Any, name: bytes) -> int:
    address: int = _capsule_pointer(capsule, name)
    return address


def _device_of(tensor: _Tensor, source: Any) -> Device:
    if tensor.device_type in (_CPU, _CUDA_HOST):
        return Device("host")
    if tensor.device_type in (_CUDA, _CUDA_MANAGED):
        return Device(f"cuda:{tensor.device_id}")
    if tensor.device_type == _EXTENSION and isinstance(source, (Buffer, View)):
        device: Device = source.device
        return device
    raise DeviceError(
        f"DLPack's device type {tensor.device_type} is not one that vram knows; 1 (host), 2 (CUDA), "
        "3 (pinned) and 13 (managed) are",
        code="unsupported",
    )


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of contiguous elements."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
