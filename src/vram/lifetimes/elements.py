"""Shapes and element types of arrays in arenas and growable buffers."""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from vram.arguments import shown
from vram.errors import ConfigError
from vram.sizes import MAX_SIZE

__all__ = ["ELEMENTS", "Element", "checked_shape", "element_of", "pattern_of", "type_of_value"]


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape given as a number or a sequence of numbers as a tuple."""
    try:
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        whole = tuple(operator.index(each) for each in lengths)
    except TypeError:
        whole = (-1,)
    if any(not 0 <= each < MAX_SIZE for each in whole):
        raise ConfigError(f"{shown(shape)} is not a shape; use integers of at least 0", shape=shape)
    return whole


class Element(NamedTuple):
    """An element type: its size in bytes, NumPy's name and DLPack's code."""

    size: int
    typestr: str
    code: int


ELEMENTS: Final[dict[Any, Element]] = {
    "bool": Element(1, "|b1", 6),
    **{f"int{8 * size}": Element(size, f"{'|' if size == 1 else '<'}i{size}", 0) for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": Element(size, f"{'|' if size == 1 else '<'}u{size}", 1) for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": Element(size, f"<f{size}", 2) for size in (2, 4, 8)},
    **{f"complex{8 * size}": Element(size, f"<c{size}", 5) for size in (8, 16)},
    "bfloat16": Element(2, "|V2", 4),
}
for _builtin, _name in ((bool, "bool"), (int, "int64"), (float, "float64"), (complex, "complex128")):
    ELEMENTS[_builtin] = ELEMENTS[_name]


def element_of(dtype: Any) -> Element:
    """Return the element type for a name, a built-in type, or a dtype of NumPy or PyTorch."""
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENTS:
        try:
            import numpy

            name = numpy.dtype(dtype).name
        except (ImportError, TypeError, ValueError):
            pass
    if name not in ELEMENTS:
        raise ConfigError(
            f"{shown(dtype)} is not a valid dtype on a device; valid: "
            f"{', '.join(each for each in ELEMENTS if isinstance(each, str))}",
            dtype=str(dtype),
        )
    return ELEMENTS.setdefault(dtype, ELEMENTS[name])


def type_of_value(value: Any) -> Any:
    """Return the type that an array filled with the value has if none is given."""
    if isinstance(value, int) and 1 << 63 <= value < 1 << 64:
        return "uint64"
    if isinstance(value, (bool, int, float, complex)):
        return next(kind for kind in (bool, int, float, complex) if isinstance(value, kind))
    return getattr(value, "dtype", None) or type(value)


_PACKED: Final = {
    **{"|b1": "?", "|i1": "b", "<i2": "h", "<i4": "i", "<i8": "q", "|u1": "B", "<u2": "H", "<u4": "I"},
    **{"<u8": "Q", "<f2": "e", "<f4": "f", "<f8": "d", "<c8": "ff", "<c16": "dd"},
}
"""The formats of `struct` for the types of NumPy."""
BFLOAT16: Final = "|V2"


def pattern_of(element: Element, value: Any) -> bytes:
    """Return the bytes of one element with the value. Conversions are NumPy's."""
    try:
        if element.typestr == BFLOAT16:
            return _bfloat16(float(value))
        packed = _PACKED[element.typestr]
        if len(packed) == 2:
            whole = complex(value)
            return struct.pack(f"<{packed}", whole.real, whole.imag)
        convert: Any = bool if packed == "?" else float if packed in "efd" else int
        return struct.pack(f"<{packed}", convert(value))
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise ConfigError(
            f"{shown(value)} is not a value for an array of {element.typestr}: {error}", value=value
        ) from error


def _bfloat16(value: float) -> bytes:
    """Round to the nearest, ties to even. A NaN stays one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value != value:
        return b"\xc0\x7f"
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
