"""What a program read from the null GPU although nobody knows it: counted by the line that asked."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

__all__ = ["Guess", "Guesses"]

LONGEST = 80
"""Characters of an expression that are kept."""
MOST_ELEMENTS = 8
"""Elements of a value that are kept."""


@dataclass
class Guess:
    """One place in the program that asked, how often, and what it was told the first time.

    `kind` is "read" for a value and "shape" for a size that depends on values; `assumed` says why this value.
    """

    kind: str
    what: str
    where: str
    count: int
    value: Any
    assumed: str


class Guesses:
    """All guesses of a process, in the order in which they were first made."""

    def __init__(self, *inside: str) -> None:
        """Prepare; frames of files below the folders `inside` are not the program's."""
        self._inside = tuple(inside)
        self._made: dict[tuple[str, str, str], Guess] = {}
        self._places: dict[tuple[CodeType, int], tuple[str, str]] = {}  # where and what, by the call

    def add(self, kind: str, value: Any, assumed: str) -> None:
        """Count one guess at the innermost frame of the program."""
        frame = self._asker()
        call = (frame.f_code, frame.f_lasti)
        place = self._places.get(call)
        if place is None:
            place = self._places[call] = (_where(frame), _expression(frame))
        known = self._made.get((kind, *place))
        if known is not None:
            known.count += 1
            return
        where, what = place
        self._made[kind, where, what] = Guess(kind, what, where, 1, _short(value), assumed)

    def list(self) -> list[Guess]:
        """The guesses so far."""
        return list(self._made.values())

    def _asker(self) -> FrameType:
        outermost = frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(self._inside):
            if frame.f_back is None:
                return outermost
            frame = frame.f_back
        return frame


def _where(frame: FrameType) -> str:
    """File and line, the file as seen from the current folder."""
    name = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    return f"{name[len(here) :] if name.startswith(here) else name}:{frame.f_lineno}"


def _expression(frame: FrameType) -> str:
    """The source of the call that a frame is in, or of its whole line."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    positions = getattr(frame.f_code, "co_positions", None)  # since Python 3.11
    if positions is not None and frame.f_lasti >= 0:
        first, last, start, end = list(positions())[frame.f_lasti // 2]
        if first == last == frame.f_lineno and start is not None and end is not None:
            encoded = line.encode()[start:end]  # columns are bytes
            line = encoded.decode(errors="replace") or line
    text = " ".join(line.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _short(value: Any) -> Any:
    """A value that fits on a line and into JSON."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        kept = [_short(each) for each in value[:MOST_ELEMENTS]]
        return kept if len(value) <= MOST_ELEMENTS else [*kept, "…"]
    return str(value)
