"""Recordings of memory: open a file of vram or of another tool, as columns or as a program of allocations.

Needs neither the native core nor NumPy. `vram.replay` runs a trace through allocators.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

from vram.arguments import require_path
from vram.errors import TraceError

from .arrow import STREAM_MAGIC, TraceWriter
from .files import DEFAULT_MAX_BYTES, BoundedReader, open_regular_file
from .formats import read_parts
from .lifetimes import ALLOCATE, AT_ONCE, FREE, Lifetimes, lifetimes, peak_allocated
from .limits import TOO_MUCH_MEMORY, allow_work, in_force, while_reading
from .model import BEFORE, Action, Annotation, Block, BlockState, Frame, Segment, Trace
from .moves import Move, find_moves, moved_by_tag
from .notes import unpack
from .pieces import belongs, join_pieces, list_pieces, rebased
from .sandbox import Progress, read_in_child
from .steps import STEP_PREFIX, Steps, find_steps

__all__ = [
    "ALLOCATE",
    "AT_ONCE",
    "BEFORE",
    "DEFAULT_MAX_BYTES",
    "FREE",
    "STEP_PREFIX",
    "Action",
    "Annotation",
    "Block",
    "BlockState",
    "Frame",
    "Lifetimes",
    "Move",
    "Segment",
    "Steps",
    "Trace",
    "TraceWriter",
    "find_moves",
    "find_steps",
    "lifetimes",
    "moved_by_tag",
    "open_trace",
    "peak_allocated",
]


def open_trace(
    path: str | os.PathLike[str],
    *,
    device: int | None = None,
    trusted: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a recording as a `Trace`: a PyTorch memory snapshot, a log of RMM, or a file of vram.

    The format and the compression (gzip, xz, bzip2, zstd) are detected by content. `device` selects one of
    several devices; the default is the one with most events. A rotated recording of vram opens as one trace.
    Unless it is `trusted`, a child process with limits reads the file; in no case is a class of it loaded.
    `max_bytes` bounds the file and its unpacked size. A malformed file raises `TraceError`; its `place` says
    where the error is. While a child reads, `progress` is called with the bytes read and those of the file.
    """
    require_path(path)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, not {type(progress).__name__}")
    options = (device, trusted, max_bytes, progress)
    trace = _open_file(path, *options)
    if not _is_stream(path):
        return trace
    pieces = [_open_file(piece, *options) for _, piece in list_pieces(Path(path))]
    return rebased(join_pieces([*(piece for piece in pieces if belongs(piece, trace)), trace]))


def _open_file(
    path: str | os.PathLike[str], device: int | None, trusted: bool, max_bytes: int, progress: Progress = None
) -> Trace:
    source = _shown(path)
    with open_regular_file(path, max_bytes) as file:
        try:
            if trusted:
                reader = BoundedReader(file, max_bytes, max_expansion=None)
                return unpack(*read_parts(reader, device), source)
            if in_force():
                return _read_here(file, source, device, max_bytes, progress)
            return read_in_child(file, source, device, max_bytes, progress)
        except TraceError as error:
            raise TraceError(f"{source}: {error.message}", **error.facts) from error


def _read_here(file: io.FileIO, source: str, device: int | None, max_bytes: int, progress: Progress) -> Trace:
    """Read in this process, which has limits. Work on the recording is allowed what it needs."""
    allow, whole = while_reading(), os.fstat(file.fileno()).st_size

    def arrived(count: int) -> None:
        allow(count)
        if progress is not None:
            progress(min(file.tell(), whole), whole)

    try:
        trace = unpack(*read_parts(BoundedReader(file, max_bytes, arrived), device), source)
    except MemoryError:
        raise TraceError(TOO_MUCH_MEMORY, place="file") from None
    if progress is not None:
        progress(whole, whole)
    allow_work(trace.events + sum(1 + len(segment.blocks) for segment in trace.segments))
    return trace


def _shown(path: str | os.PathLike[str]) -> str:
    """The name as text that can be printed, even if the file's own is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _is_stream(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(len(STREAM_MAGIC)) == STREAM_MAGIC
