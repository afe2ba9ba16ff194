"""Shapes and element types of arrays in arenas and growable buffers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from vram.arguments import shown
from vram.errors import ConfigError
from vram.sizes import MAX_SIZE

__all__ = ["ELEMENTS", "Element", "checked_shape", "element_of"]


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
