"""A log of RMM's logging adaptor (CSV) as a Trace: `Thread,Time,Action,Pointer,Size,Stream`, a line per call.

RMM frees in stream order, so a free is requested and completed at the same time. Threads are not kept.
`child` limits memory and time.
"""

from __future__ import annotations

import io
import re
from array import array
from typing import Any, NoReturn

from vram.errors import TraceError

from .checked import MAX_INT64, wrong
from .files import CHUNK_BYTES, BoundedReader
from .model import Action, Trace

__all__ = ["looks_like_log", "read_log"]

MAX_LINE_BYTES = 1000
DAY_US = 24 * 3600 * 1_000_000

_TIME = rb"(\d\d):(\d\d):(\d\d)[.:](\d{1,9})"
_ACTION = rb"(allocate failure|allocate|free)"
_ADDRESS = rb"(?:(?:0x)?([0-9a-fA-F]{1,16})|\(nil\)|nullptr)"
_SIZE = rb"(\d{1,19})"
_SYNTAX = (
    (b"Thread", rb"[^,]*", "text"),
    (b"Time", _TIME, "HH:MM:SS.ffffff"),
    (b"Action", _ACTION, "allocate, free or allocate failure"),
    (b"Pointer", _ADDRESS, "an address such as 0x7f0000000000"),
    (b"Size", _SIZE, "a number of bytes"),
    (b"Stream", _ADDRESS, "a handle such as 0x1"),
)
_LINE = re.compile(rb" *, *".join(pattern for _, pattern, _ in _SYNTAX) + rb"\s*")
HEADER = b",".join(name for name, _, _ in _SYNTAX)
_ACTIONS = {
    b"allocate": (Action.ALLOC,),
    b"free": (Action.FREE_REQUESTED, Action.FREE_COMPLETED),
    b"allocate failure": (Action.OOM,),
}


def looks_like_log(head: bytes) -> bool:
    """Whether a file that begins with `head` is such a log."""
    return head.startswith(HEADER)


def read_log(reader: BoundedReader) -> Trace:
    """Return the events of a log. An incomplete last line is left out (`truncated`)."""
    rows = _Rows()
    truncated = False
    with io.BufferedReader(reader, CHUNK_BYTES) as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES):
            number += 1
            if not line.strip() or line.startswith(HEADER):
                continue
            try:
                rows.add(line, number)
            except TraceError:
                truncated = not line.endswith(b"\n") and not lines.read(1)
                if not truncated:
                    raise
    return Trace(
        source="",
        device=0,
        devices=(0,),
        start_us=rows.start_us,
        timed=True,
        **rows.columns(),
        streams=tuple(rows.streams),
        frames=(),
        stacks=((),),
        truncated=truncated,
    )


class _Rows:
    """The columns while lines are read. Times have no date: one far before the last is of the next day."""

    def __init__(self) -> None:
        self._action = array("B")
        self._stream = array("I")
        self._address = array("Q")
        self._size = array("Q")
        self._time_us = array("q")
        self.streams: dict[int, int] = {}
        self.start_us = 0
        self._day_us = 0
        self._last_us = 0

    def columns(self) -> dict[str, Any]:
        nothing = array("I", bytes(4 * len(self._action)))
        return {
            "action": self._action,
            "stream": self._stream,
            "address": self._address,
            "size": self._size,
            "time_us": self._time_us,
            "stack": nothing,
        }

    def add(self, line: bytes, number: int) -> None:
        match = _LINE.fullmatch(line)
        if match is None:
            _blame(line, f"line {number}")
        hours, minutes, seconds, fraction, action, pointer, size, stream = match.groups(b"0")
        asked = int(size)
        if asked > MAX_INT64:
            wrong(f"line {number}, Size", asked, f"at most {MAX_INT64}")
        time = (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
        self._write(
            _ACTIONS[action],
            int(pointer, 16),
            asked,
            int(stream, 16),
            self._time(time * 1_000_000 + int(fraction.ljust(6, b"0")[:6])),
        )

    def _write(self, actions: tuple[Action, ...], address: int, size: int, handle: int, time_us: int) -> None:
        stream = self.streams.setdefault(handle, len(self.streams))
        for action in actions:
            self._action.append(action)
            self._stream.append(stream)
            self._address.append(address)
            self._size.append(size)
            self._time_us.append(time_us - self.start_us)

    def _time(self, of_day_us: int) -> int:
        time = self._day_us + of_day_us
        if time < self._last_us - DAY_US // 2:
            self._day_us += DAY_US
            time += DAY_US
        if not self._action:
            self.start_us = time
        # Threads that log concurrently may be slightly out of order.
        self._last_us = max(time, self._last_us)
        return self._last_us


def _blame(line: bytes, place: str) -> NoReturn:
    """Name the first field that is wrong."""
    fields = [field.strip() for field in line.split(b",")]
    if len(fields) != len(_SYNTAX):
        raise TraceError(f"{place} has {len(fields)} fields, expected {len(_SYNTAX)}", place=place)
    for field, (name, pattern, expected) in zip(fields, _SYNTAX, strict=True):
        if not re.fullmatch(pattern, field):
            wrong(f"{place}, {name.decode()}", field.decode("utf-8", "replace"), expected)
    raise TraceError(f"{place} is not a line of a log", place=place)
