"""Tells the null GPU which numbers this thread reads from it next."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["announcing", "remember_mask"]


def announcing(
    reads: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that reads these numbers from the device, in this order."""
    if not reads or _announce is None:
        return function(*args, **kwargs)
    _announce((ctypes.c_int64 * len(reads))(*reads), len(reads))
    try:
        return function(*args, **kwargs)
    finally:
        _announce(None, 0)


def remember_mask(mask: Any, count: int) -> None:
    """Tell how many elements a mask selects, for as long as it exists: its backward pass asks again."""
    if _set_mask is None or not mask.is_contiguous():
        return
    address = mask.data_ptr()
    _set_mask(address, count)
    if address not in _masks:
        _masks[address] = weakref.ref(mask.untyped_storage(), lambda _storage: _forget_mask(address))


def _forget_mask(address: int) -> None:
    _masks.pop(address, None)
    _set_mask(address, -1)


def _find(name: str, *argtypes: Any) -> Any:
    """A function of the null GPU."""
    found = getattr(ctypes.CDLL(None), f"vram_null_gpu_{name}", None)
    if found is not None:
        found.argtypes, found.restype = argtypes, None
    return found


_announce = _find("announce", ctypes.POINTER(ctypes.c_int64), ctypes.c_int)
_set_mask = _find("mask", ctypes.c_void_p, ctypes.c_int64)
_masks: dict[int, Any] = {}
