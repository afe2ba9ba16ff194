"""A log of RMM's logging adaptor (CSV) as a Trace: `Thread,Time,Action,Pointer,Size,Stream`, one line a call.

Every stream and every failure is kept. RMM frees in stream order, so that a free is requested and complete at
once; the thread is not kept. Bounds on memory and time are for `child`.
"""

from __future__ import annotations

import io
import re
from array import array
from typing import Any

from vram.errors import TraceError

from .checked import MAX_INT64, MAX_UINT64, integer, wrong
from .files import CHUNK_BYTES, BoundedReader
from .model import COLUMNS, Action, Trace

__all__ = ["looks_like_log", "read_log"]

HEADER = b"Thread,Time,Action,Pointer,Size,Stream"
FIELDS = HEADER.count(b",") + 1
MAX_LINE_BYTES = 1000
DAY_US = 24 * 3600 * 1_000_000
NULL_POINTERS = (b"(nil)", b"0", b"nullptr")

_TIME = re.compile(rb"(\d\d):(\d\d):(\d\d)[.:](\d{1,9})")
_ACTIONS = {
    b"allocate": (Action.ALLOC,),
    b"free": (Action.FREE_REQUESTED, Action.FREE_COMPLETED),
    b"allocate failure": (Action.OOM,),
}


def looks_like_log(head: bytes) -> bool:
    """Whether a file that begins so is such a log."""
    return head.startswith(HEADER)


def read_log(reader: BoundedReader) -> Trace:
    """Return the events of a log. A last line that was not written to its end is left out (`truncated`)."""
    rows = _Rows()
    truncated = False
    with io.BufferedReader(reader, CHUNK_BYTES) as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES):
            number += 1
            if not line.strip() or line.startswith(HEADER):
                continue
            try:
                rows.add(line, f"line {number}")
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
        **rows.columns,
        streams=tuple(rows.streams),
        frames=(),
        stacks=((),),
        truncated=truncated,
    )


class _Rows:
    """Columns as lines are read. Times have no date: one far before the last is of the next day."""

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {name: array(typecode) for name, typecode in COLUMNS.items()}
        self.streams: dict[int, int] = {}
        self.start_us = 0
        self._day_us = 0
        self._last_us = 0

    def add(self, line: bytes, place: str) -> None:
        fields = [field.strip() for field in line.split(b",")]
        if len(fields) != FIELDS:
            raise TraceError(f"{place} has {len(fields)} fields, expected {FIELDS}", place=place)
        _, time, action, pointer, size, stream = fields
        if action not in _ACTIONS:
            wrong(f"{place}, Action", _shown(action), "allocate, free or allocate failure")
        address = _hexadecimal(pointer, f"{place}, Pointer")
        bytes_asked = _decimal(size, f"{place}, Size")
        handle = _hexadecimal(stream, f"{place}, Stream")
        self._write(_ACTIONS[action], address, bytes_asked, handle, self._time(time, f"{place}, Time"))

    def _write(self, actions: tuple[Action, ...], address: int, size: int, handle: int, time_us: int) -> None:
        stream = self.streams.setdefault(handle, len(self.streams))
        for action in actions:
            row = (action, stream, address, size, time_us - self.start_us, 0, 0)
            for column, value in zip(self.columns.values(), row, strict=True):
                column.append(value)

    def _time(self, field: bytes, place: str) -> int:
        match = _TIME.fullmatch(field)
        if match is None:
            wrong(place, _shown(field), "HH:MM:SS.ffffff")
        hours, minutes, seconds = (int(match[index]) for index in (1, 2, 3))
        fraction = int(match[4].ljust(6, b"0")[:6])
        time = self._day_us + ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + fraction
        if time < self._last_us - DAY_US // 2:
            self._day_us += DAY_US
            time += DAY_US
        # Threads that log at once may be a little out of order.
        self._last_us = max(time, self._last_us)
        if not self.columns["action"]:
            self.start_us = self._last_us
        return self._last_us


def _shown(field: bytes) -> str:
    return field.decode("utf-8", "replace")


def _decimal(field: bytes, place: str) -> int:
    if not field.isdigit() or len(field) > 20:
        wrong(place, _shown(field), "a number of bytes")
    return integer(int(field), place, MAX_INT64)


def _hexadecimal(field: bytes, place: str) -> int:
    if field in NULL_POINTERS:
        return 0
    digits = field.removeprefix(b"0x")
    if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", digits):
        wrong(place, _shown(field), "an address such as 0x7f0000000000")
    return integer(int(digits, 16), place, MAX_UINT64)
