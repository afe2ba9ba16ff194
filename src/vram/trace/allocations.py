"""Every allocation of a trace: when it began and ended, how large it was, and who made it.

This is the one reconstruction of lifetimes from events. `lifetimes` makes a program of it, `vram.analysis`
the memory at any event and over time.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from vram.arguments import require

from .model import BEFORE, Action, BlockState, Trace

__all__ = ["Allocations", "find_allocations"]


@dataclass(frozen=True)
class Allocations:
    """One entry per allocation, by `start`:

    - `start`: the event that made it, or BEFORE; `freed`: the event that requested its free, or BEFORE;
      `completed`: the event by which its memory was free; the number of events if there was none
    - `address`; `size`: bytes as requested; `stream`, `stack` and `tag` as in `Trace`
    - `held`: bytes of its block, if only the end of the recording tells of it; else 0

    Invariant: `start <= freed <= completed <= events`.
    """

    events: int
    start: array[int]
    freed: array[int]
    completed: array[int]
    address: array[int]
    size: array[int]
    held: array[int]
    stream: array[int]
    stack: array[int]
    tag: array[int]

    def __len__(self) -> int:
        return len(self.start)

    def check(self) -> None:
        """Verify the invariants."""
        assert all(first <= second for first, second in zip(self.start, self.start[1:], strict=False))
        for start, freed, completed in zip(self.start, self.freed, self.completed, strict=True):
            assert BEFORE <= start <= freed <= completed <= self.events
        assert all(len(getattr(self, each.name)) == len(self) for each in fields(self)[1:])


def find_allocations(trace: Trace) -> Allocations:
    """All of them, oldest first.

    Allocations from before the first event are those whose free is recorded without their allocation, and
    blocks in use at the end that no event mentions. Lifetimes mostly nest, so those freed last count as the
    oldest; those that were freed before the first event come first of all.
    """
    found = _Finder(require(trace, Trace, "trace"))
    found.read_events()
    told = found.told

    def gathered(column: array[int]) -> list[int]:
        return [column[event] for event in told]

    made = Allocations(
        trace.events,
        start=array("q", found.start),
        freed=array("q", found.freed),
        completed=array("q", found.completed),
        address=array("Q", gathered(trace.address)),
        size=array("Q", gathered(trace.size)),
        held=array("Q", bytes(8 * len(told))),
        stream=array("I", gathered(trace.stream)),
        stack=array("I", gathered(trace.stack)),
        tag=array("I", gathered(trace.tag)),
    )
    early = found.early
    for number in early:  # the stack and tag of its free do not tell who made it
        made.stack[number] = made.tag[number] = 0
    early += _append_left(trace, made, found.at)
    return _ordered(made, early, [*told, *[trace.events] * (len(made) - len(told))]) if early else made


class _Finder:
    """Follows the events. `at` has the allocation last seen at each address, or FREE once it is free."""

    FREE = -1

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.at: dict[int, int] = {}
        self.told: list[int] = []  # the event that first mentions each allocation
        self.early: list[int] = []  # allocations from before the first event
        self.start: list[int] = []
        self.freed: list[int] = []
        self.completed: list[int] = []

    def read_events(self) -> None:
        """The longest loop of preparing a replay, so it is written for speed."""
        allocate, complete, free = int(Action.ALLOC), int(Action.FREE_COMPLETED), self.FREE
        trace, at, freed, completed = self.trace, self.at, self.freed, self.completed
        seen, told, started, events = at.get, self.told.append, self.start.append, trace.events
        for event, action, address in zip(range(events), trace.action, trace.address, strict=True):
            if action == allocate:
                before = seen(address, free)
                if before != free:  # its free, or its completion, was not recorded
                    freed[before] = min(freed[before], event)
                    completed[before] = event
                at[address] = len(freed)
                told(event)
                started(event)
                freed.append(events)
                completed.append(events)
            elif action <= complete:
                number = seen(address)
                if number is None:  # it was made before the first event
                    number = at[address] = len(freed)
                    self.early.append(number)
                    told(event)
                    started(BEFORE)
                    freed.append(BEFORE if action == complete else events)
                    completed.append(events)
                if number == free:
                    continue
                if freed[number] > event:
                    freed[number] = event
                if action == complete:
                    completed[number] = event
                    at[address] = free


def _append_left(trace: Trace, made: Allocations, mentioned: Container[int]) -> list[int]:
    """Append what is in use at the end and no event mentions; returns the numbers."""
    first = len(made)
    for segment in trace.segments:
        for block in segment.blocks:
            if block.state != BlockState.FREE and block.address not in mentioned:
                made.start.append(BEFORE)
                made.freed.append(BEFORE if block.pending else trace.events)
                made.completed.append(trace.events)
                made.address.append(block.address)
                made.size.append(block.requested_size)
                made.held.append(block.size)
                made.stream.append(segment.stream)
                made.stack.append(block.stack)
                made.tag.append(0)
    return list(range(first, len(made)))


def _ordered(made: Allocations, early: list[int], told: Sequence[int]) -> Allocations:
    """`made` by start, with the `early` ones in the order described above."""
    bounds = [-1, *sorted(early), len(made)]  # the others stay in order: whole slices of them are copied
    kept = [slice(one + 1, other) for one, other in pairwise(bounds) if one + 1 < other]
    early.sort(key=lambda number: (made.freed[number] != BEFORE, -told[number], made.address[number]))

    def order(held: array[int]) -> array[int]:
        ordered = array(held.typecode, map(held.__getitem__, early))
        for each in kept:
            ordered += held[each]
        return ordered

    return Allocations(
        made.events, **{each.name: order(getattr(made, each.name)) for each in fields(made)[1:]}
    )
