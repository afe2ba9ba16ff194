"""Iterations of a recorded job: which events belong to which step.

Marks of `vram.step` take precedence over PyTorch's marks of optimizer steps; without both there are no steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from vram.arguments import require, whole_number

from .model import Action, Annotation, Trace

__all__ = ["LAST_STEP", "STEP_PREFIX", "Steps", "find_steps"]

STEP_PREFIX = "step#"
"""A mark of `vram.step(7)` is named `step#7`."""
LAST_STEP = 10**18 - 1
"""The highest number of a step."""
OPTIMIZER_PREFIX = "Optimizer.step#"

Stretch: TypeAlias = range
"""Consecutive events."""


@dataclass(frozen=True)
class Steps:
    """Step `numbers[i]` has the events from `first[i]` up to the next step's first, or the end.

    Invariant: `first` never decreases, `len(first) == len(numbers)`, all are at most `events`.
    """

    numbers: tuple[int, ...]
    first: tuple[int, ...]
    events: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        numbers = f", {min(self.numbers)} to {max(self.numbers)}" if self.numbers else ""
        return f"<Steps: {len(self)} in {self.events} events{numbers}>"

    def of(self, event: int) -> int | None:
        """The number of the step an event belongs to; None before the first."""
        index = bisect_right(self.first, whole_number(event, "event", least=-1)) - 1
        return self.numbers[index] if index >= 0 else None

    def range(self, number: int) -> Stretch:
        """The events of the first step with that number; KeyError if there is none."""
        for found, events in self.stretches():
            if found == number:
                return events
        raise KeyError(number)

    def stretches(self) -> Iterator[tuple[int, Stretch]]:
        """Every step with its events, in order; numbers repeat if the program restarts its count."""
        ends = (*self.first[1:], self.events)
        return zip(self.numbers, map(range, self.first, ends), strict=True)


def find_steps(trace: Trace) -> Steps:
    """The steps of a trace. PyTorch's are numbered from 1: each ends where its optimizer's step does.

    What follows the last one is a step of its own if it allocates, and otherwise belongs to the last.
    """
    require(trace, Trace, "trace")
    marks = [mark for mark in trace.annotations if mark.stage == "START" and _number(mark) is not None]
    if marks:
        numbers = tuple(number for mark in marks if (number := _number(mark)) is not None)
        return Steps(numbers, tuple(_first_event(trace, mark.time_us) for mark in marks), trace.events)
    ends = [
        mark for mark in trace.annotations if mark.name.startswith(OPTIMIZER_PREFIX) and mark.stage == "END"
    ]
    ends = [mark for mark in ends if mark.name == ends[0].name]
    starts = [0, *(_first_event(trace, mark.time_us) for mark in ends)]
    if ends and not _allocates(trace, starts[-1]):
        starts.pop()
    return Steps(
        tuple(range(1, len(starts) + 1)) if ends else (), tuple(starts) if ends else (), trace.events
    )


def _allocates(trace: Trace, first: int) -> bool:
    """Whether the events from `first` on are more than the cleanup after the last step."""
    return any(action in (Action.ALLOC, Action.OOM) for action in trace.action[first:])


def _number(mark: Annotation) -> int | None:
    digits = mark.name.removeprefix(STEP_PREFIX)
    return (
        int(digits)
        if digits != mark.name and digits.isdecimal() and len(digits) <= len(str(LAST_STEP))
        else None
    )


def _first_event(trace: Trace, time_us: int) -> int:
    return bisect_left(trace.time_us, time_us)
