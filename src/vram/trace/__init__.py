"""Recordings of memory: open a file of another tool, and see it as columns or as a program of allocations.

Needs neither the native core nor numpy. Running a trace through a pool is for `vram.replay`.
"""

from __future__ import annotations

import os

from vram.errors import TraceError

from .files import DEFAULT_MAX_BYTES, BoundedReader, open_regular_file
from .lifetimes import ALLOCATE, AT_ONCE, BEFORE, FREE, Lifetimes, lifetimes, peak_allocated
from .model import Action, Annotation, Block, BlockState, Frame, Segment, Trace
from .sandbox import read_in_child
from .steps import STEP_PREFIX, Steps, find_steps
from .torch_snapshot import read_snapshot

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
    "Segment",
    "Steps",
    "Trace",
    "find_steps",
    "lifetimes",
    "open_trace",
    "peak_allocated",
]


def open_trace(
    path: str | os.PathLike[str],
    *,
    device: int | None = None,
    trusted: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Trace:
    """Read a PyTorch memory snapshot, plain or compressed (gzip, xz, bzip2, zstd), as a `Trace`.

    `device` chooses among several; by default the one with most events. The file is read by a child process
    under limits unless it is `trusted`; no class of it is loaded in either case. `max_bytes` bounds the file
    and what it unpacks to. Anything but a well-formed snapshot is a `TraceError`; its `place` says where.
    """
    source = os.fsdecode(path)
    with open_regular_file(path, max_bytes) as file:
        try:
            if trusted:
                return read_snapshot(BoundedReader(file, max_bytes), source, device)
            return read_in_child(file, source, device, max_bytes)
        except TraceError as error:
            raise TraceError(f"{source}: {error.message}", **error.facts) from error
