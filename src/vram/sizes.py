"""Sizes as people write them: "512MiB" to bytes and back.

KiB, MiB, GiB, TiB are powers of 1024. KB, MB, GB, TB are powers of 1000. The single letters K, M, G, T are
powers of 1024, as in other GPU tools. Case does not matter.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import SupportsIndex

from vram.arguments import shown
from vram.errors import ConfigError

__all__ = ["GrowthLimit", "format_count", "format_size", "parse_size"]

MAX_SIZE = 2**63
"""Sizes must be below this to fit every integer type on the way to the driver."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE | re.ASCII)
_MAX_TEXT = 64


def parse_size(size: SupportsIndex | float | str) -> int:
    """Return the bytes of an int, a whole float, or a string such as "512MiB" or "1.5G".

    Any type with `__index__` is accepted as an int, including NumPy's integers, but bool is not. Fractions of
    a byte are rounded down. Raises ConfigError for anything else.
    """
    if isinstance(size, str):
        return _checked(_parse_text(size), size)
    if isinstance(size, float):
        if not (math.isfinite(size) and size.is_integer()):
            raise _bad(size, "bytes must be whole and finite")
        return _checked(int(size), size)
    try:
        count = operator.index(size)
    except TypeError:
        count = None
    if count is None or isinstance(size, bool):
        raise _bad(size, "it must be bytes or a string")
    return _checked(count, size)


def format_size(size: int) -> str:
    """Return a size in the largest binary unit in which it is at least 1: 1610612736 is "1.5 GiB"."""
    largest = float(MAX_SIZE) ** 2
    if not -largest < size < largest:
        raise _bad(size, "it is larger than any memory")
    sign = "-" if size < 0 else ""
    if -1024 < size < 1024:
        return f"{sign}{abs(size)} B"
    value = abs(int(size))
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min((value.bit_length() - 1) // 10, len(units))
    # 1023.99 KiB would print as "1024 KiB": use the next unit instead.
    if power < len(units) and round(value / 1024**power, 2) >= 1024:
        power += 1
    number = f"{value / 1024**power:.2f}".rstrip("0").rstrip(".")
    return f"{sign}{number} {units[power - 1]}"


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise _bad(text, "write a number and a unit")
    number, prefix, suffix = match[1].replace("_", ""), match[2].lower(), match[3].lower()
    if not prefix and suffix.startswith("i"):
        raise _bad(text, "write a number and a unit")
    if suffix == "i":
        raise _bad(text, "the unit must end in B")
    base = 1000 if prefix and suffix == "b" else 1024
    return int(Fraction(number) * base ** _POWERS[prefix])


def _checked(count: int, size: SupportsIndex | float | str) -> int:
    if count < 0:
        raise _bad(size, "it is negative")
    if count >= MAX_SIZE:
        raise _bad(size, "it is 2**63 bytes or more")
    return count


def _bad(size: object, why: str) -> ConfigError:
    return ConfigError(
        f"{shown(size)} is not a size: {why}. "
        'Sizes are bytes as an int, or a string such as "512MiB", "1.5GiB", "2GB" or "64K" '
        "(units B, KiB, MiB, GiB, TiB; KB, MB, GB, TB; K, M, G, T).",
        value=size,
    )


def format_count(count: int, what: str) -> str:
    """Return "1 block" or "5 blocks"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True)
class GrowthLimit:
    """The most by which memory may grow between two runs: `bytes`, or a `share` of the first run's."""

    text: str
    bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> GrowthLimit:
        """Read a size such as "64MiB", or a percentage such as "5%"."""
        number = text.strip()
        if not number.endswith("%"):
            size = parse_size(number)
            return cls(format_size(size), bytes=size)
        try:
            share = float(number.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < float("inf"):
            raise ConfigError(f"{text!r} is neither a size such as 64MiB nor a percentage such as 5%")
        return cls(number, share=share)

    def exceeded(self, before: int, after: int) -> bool:
        """Whether `after` is too much."""
        allowed = self.bytes if self.share is None else self.share * before
        return allowed is not None and after - before > allowed
