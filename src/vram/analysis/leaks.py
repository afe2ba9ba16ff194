"""What grew: blocks allocated in a range of a recording that were still live at its end, by stack.

Memory that one step leaves behind is a cache or a state; memory that every step leaves behind is a leak. So
each stack is judged by the number of steps that left something behind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from vram.sizes import format_count, format_size
from vram.trace import Block, Trace, find_steps

from .columns import Table
from .groups import stack_labels
from .memory import memory_at
from .moments import find_window
from .places import frame_text

__all__ = ["LIKELY", "Leaks", "find_leaks"]

LIKELY = 0.5
"""A stack with at least this confidence counts as a leak."""
SLICES = 10
"""Without steps, the range is divided into this many equal parts."""


@dataclass(frozen=True)
class Leaks:
    """What a range left behind. `first` and `last` are its events, `steps` the number of steps, or slices.

    `table` has a row per stack, the likeliest leaks first: `group`, `bytes` and `blocks` live at its end,
    `growth` in bytes per step, `confidence`, `steps` that left something behind, `bytes_at_end` of the
    recording, `frames`. The confidence is the share of steps that left something behind. The last step
    does not count, because its work may be under way; if only one step did, the confidence is 0.
    """

    first: int
    last: int
    unit: str
    steps: int
    table: Table

    @property
    def likely(self) -> list[dict[str, Any]]:
        """The rows that count as leaks."""
        return [row for row in self.table.to_pylist() if row["confidence"] >= LIKELY]

    @property
    def headline(self) -> str:
        """What was found, in a few words."""
        if not self.likely:
            return "no leak is likely"
        leaked = format_size(sum(row["bytes"] for row in self.likely))
        return f"{leaked} {'may have' if self.doubt else 'likely'} leaked"

    @property
    def doubt(self) -> str:
        """Why leaks may not be leaks; empty if they were found by steps."""
        if self.unit == "step" or not self.likely:
            return ""
        return (
            "The recording has no steps, so memory that a single step holds looks like a leak; "
            "mark steps with vram.step."
        )

    def _repr_html_(self) -> str:
        from .html import leaks_html

        return leaks_html(self)

    def __repr__(self) -> str:
        likely = format_count(len(self.likely), "likely leak")
        return f"<Leaks of events {self.first} to {self.last}: {likely}, {len(self.table)} stacks>"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "first": self.first,
            "last": self.last,
            "unit": self.unit,
            "steps": self.steps,
            "leaked": sum(row["bytes"] for row in self.likely),
            "stacks": self.table.to_pylist(),
        }


def find_leaks(trace: Trace, between: str | None = None) -> Leaks:
    """Find leaks in "step:10,step:50" or "event:0,event:900"; both ends are included.

    The default is all steps, or the whole recording if it has none.
    """
    window = find_window(trace, between)
    first, last = window[0], window[-1]
    unit, starts = _steps(trace, first, last)
    left: defaultdict[int, list[Block]] = defaultdict(list)
    for block in memory_at(trace, last).blocks():
        if block.event >= first:
            left[block.stack].append(block)
    lasting = {(block.address, block.event) for block in memory_at(trace, trace.events - 1).blocks()}
    labels = stack_labels([*map(trace.frames_of, left)], trace.no_stack)
    rows = [
        _row(trace, stack, label, blocks, starts, lasting)
        for (stack, blocks), label in zip(left.items(), labels, strict=True)
    ]
    rows.sort(key=lambda row: (row["confidence"] < LIKELY, -row["bytes"], row["group"]))
    kinds = {
        "group": "string",
        "bytes": "int64",
        "blocks": "int64",
        "growth": "float64",
        "confidence": "float64",
        "steps": "int64",
        "bytes_at_end": "int64",
        "frames": "strings",
    }
    table = Table({name: (kind, [row[name] for row in rows]) for name, kind in kinds.items()})
    return Leaks(first, last, unit, len(starts), table)


def _steps(trace: Trace, first: int, last: int) -> tuple[str, list[int]]:
    """The first events of the steps in the range, or of equal slices of it."""
    starts = [event for event in find_steps(trace).first if first <= event <= last]
    if len(starts) > 1:
        return "step", [first, *starts[1:]]
    count = min(SLICES, last - first + 1)
    return "slice", [first + index * (last - first + 1) // count for index in range(count)]


def _row(
    trace: Trace,
    stack: int,
    label: str,
    blocks: list[Block],
    starts: list[int],
    lasting: set[tuple[int, int]],
) -> dict[str, Any]:
    size = sum(block.size for block in blocks)
    of_steps = {bisect_right(starts, block.event) - 1 for block in blocks}
    finished = max(1, len(starts) - 1)
    leaving = len(of_steps - {len(starts) - 1}) if len(starts) > 1 else 0
    return {
        "group": label,
        "bytes": size,
        "blocks": len(blocks),
        "growth": size / len(starts),
        "confidence": leaving / finished if leaving > 1 else 0.0,
        "steps": len(of_steps),
        "bytes_at_end": sum(block.size for block in blocks if (block.address, block.event) in lasting),
        "frames": [frame_text(frame) for frame in trace.frames_of(stack)],
    }
