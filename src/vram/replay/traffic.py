"""What spilling to host memory moves, and what it costs, by step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from vram.trace import Lifetimes

from .saved import Copied

__all__ = ["SpillTraffic", "traffic"]

BUS_BYTES_PER_US = 55e3
"""Copies: the price of native/backends/driver_costs.hpp."""


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

    `saved` of `moved_out` and `saved_back` of `moved_back` are tensors that PyTorch saves for the backward
    pass. They are copied ahead of need. `held_us` has the time of these copies, too (`copied_us`), as if none
    of it overlapped with computation.
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
    saved_back: int = 0

    @property
    def copied_us(self) -> float:
        """How long the copies of saved tensors take."""
        return (self.saved + self.saved_back) / BUS_BYTES_PER_US

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


def traffic(
    rows: list[dict[str, Any]], program: Lifetimes, copied: Sequence[Copied] = ()
) -> SpillTraffic | None:
    """The totals of `rows`: what spilling had done when each step began, and at the end.

    `rows` are of pages alone; `copied` are the saved tensors at the same moments.
    """
    if not rows:
        return None
    if copied:
        rows = [_both(*each) for each in zip(rows, copied, strict=True)]
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


def _both(row: dict[str, Any], copied: Copied) -> dict[str, Any]:
    """A row with saved tensors, none of whose copies overlaps with computation."""
    more = {
        "moved_out": copied.out,
        "moved_back": copied.back,
        "held_us": (copied.out + copied.back) / BUS_BYTES_PER_US,
        "peak": copied.most,
    }
    saved = {"saved": copied.out, "saved_back": copied.back}
    return {name: value + more.get(name, 0) for name, value in row.items()} | saved


def _time_at(program: Lifetimes) -> Callable[[int], int]:
    """When the first operation at or after an event took place."""

    def time_at(event: int) -> int:
        row = bisect_left(program.event, event)
        return program.time_us[min(row, len(program) - 1)] if len(program) else 0

    return time_at
