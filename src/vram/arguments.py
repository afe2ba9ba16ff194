"""Argument checks shared by many public functions, and how messages quote rejected values.

An integer is anything with `__index__`, including NumPy's integers. Sizes are parsed by `sizes`, options by
`config`.
"""

from __future__ import annotations

import math
import operator
import os
from typing import Any, TypeVar

from vram.errors import ConfigError

__all__ = ["real_number", "require", "require_label", "require_path", "shown", "whole_number"]

_Kind = TypeVar("_Kind")
MOST_SHOWN = 64
"""Maximum number of characters of a value quoted in a message."""
MOST_LABEL = 1 << 20
"""Maximum length of a tag or phase name in UTF-8 bytes: pools and recordings store every name."""


def shown(value: object) -> str:
    """Return a rejected value for a message: its repr, truncated if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4300 digits has no repr
        return "an integer with thousands of digits"
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…"


def require(value: Any, kind: type[_Kind], name: str) -> _Kind:
    """Return the value if it is an instance of `kind`, else raise TypeError."""
    if isinstance(value, kind):
        return value
    raise TypeError(f"{name} must be a {kind.__module__}.{kind.__qualname__}, not {type(value).__name__}")


def require_label(name: Any, what: str) -> str:
    """Return the name of a tag or phase if it is valid in a recording."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, not {type(name).__name__}")
    if not name:
        raise ValueError(f"{what} must not be empty")
    if len(name.encode("utf-8", "replace")) > MOST_LABEL:
        raise ValueError(f"{what} must be at most {MOST_LABEL} bytes in UTF-8: {shown(name)} is longer")
    if name != name.encode("utf-8", "ignore").decode():
        raise ValueError(f"{what} must be valid Unicode: {shown(name)} contains a surrogate")
    return name


def require_path(path: Any) -> str | os.PathLike[str]:
    """Return the path of a file. Rejects descriptors, bytes, and names that no file can have."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a path must be a str or an os.PathLike, not {type(path).__name__}")
    try:
        os.fsencode(path)
    except UnicodeError:
        raise ConfigError(f"{shown(path)} is not a path: no file can have this name", value=path) from None
    return path


def whole_number(value: Any, name: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return `value` as an int; raise ConfigError if it is not an integer in the range."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(
            f"{name} must be an integer from {least} to {most}, not {shown(value)}", value=value
        )
    return number


def real_number(value: Any, name: str, *, least: float, most: float) -> float:
    """Return `value` as a float; raise ConfigError if it is not a number in the range."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(
            f"{name} must be a number from {least:g} to {most:g}, not {shown(value)}", value=value
        )
    return number
