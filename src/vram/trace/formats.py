"""Detects the format of a file by its first bytes, and calls the reader of that format."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

from vram.errors import TraceError

from .arrow import PARQUET_MAGIC, STREAM_MAGIC, read_parquet, read_stream
from .checked import integer
from .files import BoundedReader
from .model import COLUMNS, Trace
from .notes import pack
from .rmm_log import looks_like_log, read_log
from .torch_snapshot import read_snapshot

__all__ = ["Parts", "read_parts"]

HEAD_BYTES = 256


Parts: TypeAlias = "tuple[dict[str, Any], Mapping[str, array[int]]]"
"""Notes and columns; `notes.unpack` checks them and makes them a Trace."""


def read_parts(reader: BoundedReader, device: int | None = None) -> Parts:
    """Return the contents of `reader`. `device` selects one of several; only snapshots have several."""
    head = reader.peek(HEAD_BYTES)
    if not head:
        raise TraceError("the file is empty; no recording has been written to it yet", place="byte 0")
    if head.startswith(STREAM_MAGIC):
        notes, columns = read_stream(reader)
    elif head.startswith(PARQUET_MAGIC):
        notes, columns = read_parquet(reader)
    elif looks_like_log(head):
        notes, columns = _apart(read_log(reader))
    else:
        return _apart(read_snapshot(reader, device))
    held = integer(notes.get("device"), "device")
    if device not in (None, held):
        raise TraceError(f"device {device} is not in this file; it has device {held}", place="file")
    return notes, columns


def _apart(trace: Trace) -> Parts:
    return pack(trace), {name: getattr(trace, name) for name in COLUMNS}
