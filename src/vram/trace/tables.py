"""Numbers for what the columns of a trace refer to: streams, tags, stacks and their frames.

`TraceWriter` writes the tables to a file as they grow; `make_trace` makes a `Trace` of them in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vram.arguments import require, whole_number

from .checked import MAX_UINT64, fitting_text, integer
from .model import Frame, Segment, Trace
from .moves import RETURNED, SPILLED
from .notes import GROWING, pack_segment, unpack

__all__ = ["Tables", "make_trace"]

_INTERNED = tuple(name for name in GROWING if name != "annotations")


class Tables:
    """Interns streams, tags and stacks. One thread at a time."""

    def __init__(self) -> None:
        """Start with the empty stack and the empty tag, which are number 0."""
        self._tables: dict[str, dict[Any, int]] = {name: {} for name in _INTERNED}
        self._tables["stacks"][()] = 0
        self._tables["tags"][""] = 0
        self._new = self._all()

    def stream(self, handle: int) -> int:
        """The number of a stream."""
        return self._intern("streams", whole_number(handle, "handle", most=MAX_UINT64))

    def tag(self, name: str | None) -> int:
        """The number of a tag; 0 for none."""
        return self._intern("tags", fitting_text("" if name is None else require(name, str, "name")))

    def stack(self, frames: Sequence[Frame]) -> int:
        """The number of a stack, innermost frame first; 0 for none."""
        return self._intern("stacks", tuple(self._frame(*frame) for frame in frames))

    def move(self, back: bool) -> int:
        """The stack of an event that says that memory moved to the host, or back; see `vram.trace.moves`."""
        return self.stack((RETURNED if back else SPILLED,))

    def _all(self) -> dict[str, list[Any]]:
        """Everything so far, as notes; annotations are not interned."""
        return {**{name: list(table) for name, table in self._tables.items()}, "annotations": []}

    def _count(self, table: str) -> int:
        return len(self._tables[table])

    def _intern(self, table: str, value: Any) -> int:
        known = self._tables[table]
        number = known.get(value)
        if number is None:
            number = known[value] = len(known)
            self._new[table].append(value)
        return number

    def _frame(self, filename: str, line: int, name: str) -> int:
        file, function = (self._intern("texts", fitting_text(each)) for each in (filename, name))
        return self._intern("frames", (file, integer(line, "line"), function))


def make_trace(
    tables: Tables,
    columns: Mapping[str, array[int]],
    *,
    source: str = "",
    device: int = 0,
    start_us: int = 0,
    dropped: int = 0,
    segments: Iterable[Segment] = (),
    settings: Mapping[str, object] | None = None,
) -> Trace:
    """The trace of columns and segments that use the numbers of `tables`."""
    packed = [pack_segment(segment) for segment in segments]  # which may number streams and stacks
    notes = {
        **tables._all(),
        "device": device,
        "devices": [device],
        "start_us": start_us,
        "timed": True,
        "segments": packed,
        "settings": dict(settings or {}),
        "truncated": False,
        "dropped": dropped,
    }
    return unpack(notes, columns, source)
