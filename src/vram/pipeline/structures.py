"""Structures of arrays for batches and results: tuples, lists and dicts of arrays and other values.

Also defines what counts as an array on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vram.core.pinned import Pin
from vram.pipeline.arrays import HostArray, np

__all__ = ["host_array", "leaves", "walk"]


def walk(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the same structure of tuples, lists and dicts with every leaf converted."""
    if isinstance(value, dict):
        return {key: walk(each, convert) for key, each in value.items()}
    if isinstance(value, tuple):
        parts = [walk(each, convert) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [walk(each, convert) for each in value]
    return convert(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a structure in order."""
    found: list[Any] = []
    walk(value, found.append)
    return iter(found)


def host_array(leaf: Any) -> HostArray | None:
    """Return host memory as a NumPy array without a copy; None if it is not an array."""
    if isinstance(leaf, Pin):
        leaf = leaf.array
    if isinstance(leaf, (np.generic, bytes, str)):
        return None
    if not isinstance(leaf, np.ndarray):
        known = ("__array_interface__", "__array__", "__dlpack__", "__buffer__")
        if not any(hasattr(leaf, name) for name in known) and not _has_buffer(leaf):
            return None
        leaf = np.asarray(leaf)
    if leaf.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be copied to a device; convert it to numbers")
    return leaf


def _has_buffer(leaf: Any) -> bool:
    try:
        memoryview(leaf).release()
    except TypeError:
        return False
    return True
