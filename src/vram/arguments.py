"""Argument checks shared by many public functions, and how messages quote rejected values.

An integer is anything with `__index__`, including NumPy's integers. Sizes are parsed by `sizes`, options by
`config`.
"""

from __future__ import annotations

import ast
import math
import operator
import os
from typing import Any, TypeVar

from vram.errors import ConfigError

__all__ = [
    "real_number",
    "require",
    "require_label",
    "require_path",
    "require_python",
    "shown",
    "whole_number",
]

ELF = b"\x7fELF"
"""How a compiled program begins."""
MOST_FIRST = 1024
"""Bytes of a script that are read to find out what it is for."""
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


def require_python(script: str | os.PathLike[str]) -> None:
    """Raise a ConfigError if Python cannot run the file or folder `script`: it is for another program."""
    name = os.fspath(script)
    if os.path.isdir(name):
        if not any(os.path.isfile(os.path.join(name, f"__main__.py{end}")) for end in ("", "c")):
            raise ConfigError(f"{name} is a folder without __main__.py; name a script in it")
        return
    with open(name, "rb") as file:
        first = file.readline(MOST_FIRST)
        if first.startswith(ELF):
            raise ConfigError(f"{name} is a compiled program, not a Python script")
        other = first.startswith(b"#!") and b"py" not in first
        if (other or name.endswith(".sh")) and not _parses(first + file.read()):
            reader = first[2:].decode(errors="replace").strip() if other else "the shell"
            raise ConfigError(
                f"{name} is a script for {reader}, not for Python; name the Python script that it starts, "
                "or call vram inside it"
            )


def _parses(source: bytes) -> bool:
    """Whether it is Python's all the same: installers write scripts that the shell and Python can read."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


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
