"""Which format the bytes of a file are, known by how they begin, and the reader of each.

Decompression and limits are for `files`; what happens in a process of its own for `sandbox`.
"""

from __future__ import annotations

from .arrow import PARQUET_MAGIC, STREAM_MAGIC, read_parquet, read_stream
from .files import BoundedReader
from .model import Trace
from .rmm_log import looks_like_log, read_log
from .torch_snapshot import read_snapshot

__all__ = ["read_trace"]

HEAD_BYTES = 256


def read_trace(reader: BoundedReader, source: str, device: int | None = None) -> Trace:
    """Return the trace in `reader`. `device` chooses among several, where a file has several."""
    head = reader.peek(HEAD_BYTES)
    if head.startswith(STREAM_MAGIC):
        return read_stream(reader, source)
    if head.startswith(PARQUET_MAGIC):
        return read_parquet(reader, source)
    if looks_like_log(head):
        return read_log(reader, source)
    return read_snapshot(reader, source, device)
