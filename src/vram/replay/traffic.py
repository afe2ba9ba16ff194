"""What spilling to host memory moves, and what it costs, by step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from vram.config import KEPT_FREE
from vram.trace import ALLOCATE, Lifetimes

__all__ = ["SpillTraffic", "traffic"]

BUS_BYTES_PER_US = 55e3
READ_BYTES_PER_US = 50e3
"""Copies, and kernels that read host memory in place: the prices of native/backends/driver_costs.hpp."""


@dataclass(frozen=True)
class SpillTraffic:
    """What spilling to host memory did and would cost, in bytes, counts and microseconds.

    `moved_out` and `moved_back` were copied in `swaps` and `returns`, which held all streams for `held_us`.
    `read` was used in place over the bus, for which it takes `read_us`. A recording has no uses of memory, so
    this is assumed: a block in host memory is read once before it is freed, and once in each step at whose
    end it is there. `created_us` is what creating host pages takes once, while the streams run; `peak` is the
    most host memory. `steps` and `step_us` are the number and the recorded time of the steps in which
    any of this happened (without steps: 1, and the whole recording). A recording may end inside a step, so
    the last one counts as long as the median of the others, or longer.

    `saved` is the part of `moved_out`, and of `moved_back`, that is tensors which PyTorch saves for the
    backward pass. They are copied ahead of need, and `held_us` has the time of these copies, as if none of it
    overlapped with computation.
    """

    moved_out: int
    moved_back: int
    read: int
    swaps: int
    returns: int
    peak: int
    held_us: float
    read_us: float
    created_us: float
    steps: int
    step_us: int
    saved: int = 0

    @property
    def added_us(self) -> float:
        """How much longer the job takes."""
        return self.held_us + self.read_us

    @property
    def moved_in_step(self) -> int:
        """Bytes over the bus in each of the steps, in both directions."""
        return (self.moved_out + self.moved_back + self.read) // max(1, self.steps)

    @property
    def slowdown(self) -> float | None:
        """How many times as long these steps take; None if the recording has no times."""
        return 1 + self.added_us / self.step_us if self.step_us else None


def traffic(rows: list[dict[str, Any]], program: Lifetimes, capacity: int) -> SpillTraffic | None:
    """The totals of `rows`: what spilling had done when each step began, and at the end.

    `rows` are of pages alone. Under PyTorch saved tensors leave before pages must, if the program has any.
    """
    if not rows:
        return None
    if program.forward and program.steps and rows[-1]["swaps"]:
        rows = _rows_of_saved(program, capacity)
    starts = [0, *map(_time_at(program), program.steps)]
    whole = [end - start for start, end in pairwise(starts[1:])]
    last = program.time_us[-1] if len(program) else 0
    ends = [*starts[1:], max(last, starts[-1] + int(median(whole)) if whole else last)]
    before = {name: 0 for name in rows[-1]}
    steps = step_us = 0
    for row, start, end in zip(rows, starts, ends, strict=False):
        if any(row[name] > before[name] for name in ("moved_out", "moved_back", "read")):
            steps += 1
            step_us += end - start
        before = row
    return SpillTraffic(**rows[-1], steps=steps, step_us=step_us)


def _time_at(program: Lifetimes) -> Callable[[int], int]:
    """When the first operation at or after an event took place."""

    def time_at(event: int) -> int:
        row = bisect_left(program.event, event)
        return program.time_us[min(row, len(program) - 1)] if len(program) else 0

    return time_at


# ---- saved tensors ----------------------------------------------------------------------------------------


def _rows_of_saved(program: Lifetimes, capacity: int) -> list[dict[str, Any]]:
    """The rows of a program whose saved tensors leave: in each step as much as is lacking at its peak.

    What the forward pass of a step allocated is taken for saved tensors. If that is not enough, other memory
    moves once and is read in place.
    """
    row = {"moved_out": 0, "moved_back": 0, "read": 0, "swaps": 0, "returns": 0, "peak": 0}
    times = {"held_us": 0.0, "read_us": 0.0, "created_us": 0.0}
    rows, moved = [{**row, **times, "saved": 0}], 0
    for peak, there in _peaks_of(program):
        lacking = max(0, peak - int(capacity * (1 - KEPT_FREE)))
        saved = min(lacking, there)
        others = lacking - saved
        more, moved = max(0, others - moved), max(others, moved)
        last = rows[-1]
        made = {
            "moved_out": last["moved_out"] + saved + more,
            "moved_back": last["moved_back"] + saved,
            "saved": last["saved"] + saved,
            "read": last["read"] + others,
            "swaps": last["swaps"] + bool(more),
            "returns": 0,
            "peak": max(last["peak"], lacking),
        }
        rows.append(made | _times(made))
    return rows


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {
        "held_us": (row["moved_out"] + row["moved_back"]) / BUS_BYTES_PER_US,
        "read_us": row["read"] / READ_BYTES_PER_US,
        "created_us": 0.0,
    }


def _peaks_of(program: Lifetimes) -> Iterator[tuple[int, int]]:
    """The bytes in use at the peak of each step, and how much of that its forward pass allocated."""
    starts = iter(program.steps)
    start = next(starts, None)
    live = forward = 0
    peak, there = 0, 0
    own: set[int] = set()  # allocations of this step's forward pass
    begun = False
    for op, number, size, event in zip(program.op, program.id, program.size, program.event, strict=True):
        while start is not None and event >= start:
            if begun:
                yield peak, there
            peak, there, forward = live, 0, 0
            own.clear()
            begun, start = True, next(starts, None)
        made = op == ALLOCATE
        live += size if made else -size
        if made and program.forward[number]:
            own.add(number)
            forward += size
        elif number in own:
            own.remove(number)
            forward -= size
        if live > peak:
            peak, there = live, forward
    yield peak, there
