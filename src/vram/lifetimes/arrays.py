"""NumPy arrays on an arena's memory, and checked arrays, which raise when used after their lifetime.

Loaded with the first array of an arena on host memory, because it needs NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vram import _native
from vram.arguments import shown
from vram.core.buffer import Buffer
from vram.errors import ConfigError
from vram.lifetimes.elements import checked_shape
from vram.sizes import MAX_SIZE

__all__ = ["CheckedArray", "checked_array", "fill_value_of", "plain_array", "raw_type"]

MOST_KNOWN = 1000
"""Maximum number of spellings of types to remember."""
_ndarray: Any = np.ndarray
_types: dict[Any, tuple[np.dtype[Any], int]] = {}  # the dtype and the bytes of one element


def plain_array(arena: _native.ArenaCore, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Allocate a plain NumPy array."""
    try:
        found, item = _types[dtype]
    except (KeyError, TypeError):
        found = raw_type(dtype)
        item = found.itemsize
        if len(_types) < MOST_KNOWN and not isinstance(dtype, (list, dict)):
            _types[dtype] = found, item
    if type(shape) is tuple:
        count = math.prod(shape)
    elif type(shape) is int and shape < MAX_SIZE:
        count = shape
    else:
        shape = checked_shape(shape)
        count = math.prod(shape)
    array: np.ndarray[Any, Any] = _ndarray(shape, found, arena.allocate(count * item))
    return array


def checked_array(arena: _native.ArenaCore, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Allocate an array that knows its allocation in the arena."""
    array = plain_array(arena, shape, dtype)
    checked = array.view(CheckedArray)
    checked.__dict__["_piece"] = array.base
    return checked


def raw_type(dtype: Any) -> np.dtype[Any]:
    """Return an element type that raw memory can hold; raise ConfigError for Python objects."""
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
    try:
        found: np.dtype[Any] = np.dtype(name)
    except UnicodeError:
        raise ConfigError(f"{shown(dtype)} is not a valid dtype", dtype=dtype) from None
    if found.hasobject:
        raise ConfigError(
            f"arrays of {found} hold references to Python objects, which raw memory cannot store; use a "
            "numeric dtype",
            dtype=str(found),
        )
    return found


def fill_value_of(value: Any, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return the value as an array that broadcasts to the shape and has the type, by default its own."""
    try:
        found = np.asarray(value, None if dtype is None else raw_type(dtype))
        raw_type(found.dtype)
        if found.ndim:
            np.broadcast_to(found, checked_shape(shape))
    except (TypeError, ValueError, OverflowError) as error:
        kind = "" if dtype is None else f" of {shown(dtype)}"
        raise ConfigError(
            f"{shown(value)} cannot fill an array{kind} with the shape {shown(shape)}: {error}", value=value
        ) from error
    return found


class CheckedArray(np.ndarray[Any, Any]):
    """An array that knows its allocation in an arena. Every use after its lifetime raises InvalidFree.

    The same applies to views. Results of computations are plain arrays. Python cannot see uses through
    `np.asarray`, a memoryview or DLPack; released memory is overwritten, so such uses read NaN.
    """

    _piece: Buffer | None

    def __array_finalize__(self, source: Any, /) -> None:
        """Bind a view to the same allocation, and a copy to none."""
        bound = source.__dict__.get("_piece") if isinstance(source, CheckedArray) else None
        object.__setattr__(
            self, "_piece", bound if np.ndarray.__dict__["base"].__get__(self) is not None else None
        )

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            _require_live(self)
        return super().__getattribute__(name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute with plain arrays after checking that all of them are live."""
        if "out" in options:
            given = options["out"]
            options["out"] = tuple(map(_plain, given))
            result = getattr(ufunc, method)(*map(_plain, inputs), **options)
            return given[0] if len(given) == 1 and given[0] is not None else result
        return getattr(ufunc, method)(*map(_plain, inputs), **options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Call the function with plain arrays and bind views in its result again."""
        _require_live_within(arguments)
        _require_live_within(options)
        return super().__array_function__(function, types, arguments, options)


def _live_first(name: str) -> Any:
    plain = getattr(np.ndarray, name)

    def method(self: CheckedArray, *arguments: Any) -> Any:
        _require_live(self)
        return plain(self, *arguments)

    method.__name__ = name
    return method


_USES = "getitem setitem len contains iter bool int float complex index str repr format"
_COPIES = "copy deepcopy reduce reduce_ex"
for _name in f"{_USES} {_COPIES}".split():
    setattr(CheckedArray, f"__{_name}__", _live_first(f"__{_name}__"))


def _require_live(array: CheckedArray) -> None:
    piece = np.ndarray.__getattribute__(array, "__dict__").get("_piece")
    if piece is not None and piece.freed:
        piece.record_stream(None)  # raises and reports where it was allocated


def _require_live_within(values: Any) -> None:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, CheckedArray):
            _require_live(value)
        elif isinstance(value, (list, tuple, dict)):
            _require_live_within(value)


def _plain(value: Any) -> Any:
    if not isinstance(value, CheckedArray):
        return value
    _require_live(value)
    return np.ndarray.view(value, np.ndarray)
