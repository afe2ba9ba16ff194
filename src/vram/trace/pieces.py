"""A rotated recording is several files: `run.vtrace` is the newest, `run.vtrace.000001` the oldest.

This module finds them and joins their traces; `arrow` writes them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .model import COLUMNS, Annotation, Trace

__all__ = ["belongs", "join_pieces", "list_pieces", "piece_path", "rebased"]

MAX_PIECES = 10_000


def piece_path(path: Path, number: int) -> Path:
    """The path of piece `number` of the recording at `path` once it is complete."""
    return path.with_name(f"{path.name}.{number:06d}")


def list_pieces(path: Path) -> list[tuple[int, Path]]:
    """Return (number, path) of the complete pieces beside `path`, oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6})")
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
    found = [(int(match[1]), path.with_name(name)) for name in names if (match := pattern.fullmatch(name))]
    return sorted(found)[-MAX_PIECES:]


def belongs(piece: Trace, last: Trace) -> bool:
    """Whether `piece` is an earlier part of the recording that ends with `last`, which repeats its names."""
    tables = ("streams", "frames", "stacks", "tags")
    return (piece.start_us, piece.device) == (last.start_us, last.device) and all(
        getattr(last, name)[: len(getattr(piece, name))] == getattr(piece, name) for name in tables
    )


def join_pieces(pieces: Sequence[Trace]) -> Trace:
    """Return one trace of the pieces of one recording, oldest first.

    Every piece repeats what was interned before it, so the last has all the names. Its `dropped` counts from
    the beginning of the recording, as if it were alone.
    """
    last = pieces[-1]
    columns = {name: array(typecode) for name, typecode in COLUMNS.items()}
    for piece in pieces:
        for name, column in columns.items():
            column.extend(getattr(piece, name))
    marks = tuple(mark for piece in pieces for mark in piece.annotations)
    held = sum(piece.events for piece in pieces[:-1])
    return replace(last, **columns, annotations=marks, dropped=max(0, last.dropped - held))  # type: ignore[arg-type]


def rebased(trace: Trace) -> Trace:
    """Return `trace` with times that count from its first event."""
    first = trace.time_us[0] if trace.time_us else 0
    if first == 0:
        return trace
    return replace(
        trace,
        start_us=trace.start_us + first,
        time_us=array("q", [time - first for time in trace.time_us]),
        annotations=tuple(
            Annotation(mark.stage, mark.name, mark.time_us - first) for mark in trace.annotations
        ),
    )
