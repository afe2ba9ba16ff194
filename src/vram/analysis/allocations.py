"""Every allocation of a recording in columns: where it began and ended, how large it was and whose.

Says the same as `memory` does of one moment, for all moments at once: an allocation is live from `start` to
`freed`, and pending from there to `completed`. What is drawn of it is for `timeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vram.errors import ConfigError
from vram.trace import BEFORE, Action, BlockState, Trace

from .columns import Column, column, numpy
from .groups import label_of, place_name
from .places import Phases
from .torch_rules import Rules

__all__ = ["SPLITS", "Allocations", "Split", "find_allocations", "split_allocations"]

SPLITS = ("stream", "tag", "module", "line")
"""What memory over time can be split by; `stack`, too, for who can bear so many."""


@dataclass(frozen=True)
class Allocations:
    """One entry an allocation, by `start`. Columns are NumPy arrays:

    - `start`: the event that made it, or BEFORE; `freed`: the one that asked for its free; `completed`: the
      one by which its memory was free; `events` of the recording where there was none
    - `size`: bytes as asked for; `held`: rounded, or known from the end of the recording
    - `address`; `stream`, `stack` and `tag` as in `Trace`

    Invariant: `start <= freed <= completed <= events`.
    """

    events: int
    start: Column
    freed: Column
    completed: Column
    address: Column
    size: Column
    held: Column
    stream: Column
    stack: Column
    tag: Column

    def __len__(self) -> int:
        return len(self.start)

    @property
    def delayed(self) -> Column:
        """Which frees were delayed: one that was not is completed by the very next event."""
        return (self.completed > self.freed + 1) | (
            (self.completed == self.events) & (self.freed < self.events)
        )

    def check(self) -> None:
        """Verify what is promised."""
        np = numpy()
        assert np.all(np.diff(self.start) >= 0)
        assert np.all(self.start <= self.freed) and np.all(self.freed <= self.completed)
        assert np.all(self.completed <= self.events) and np.all(self.start >= BEFORE)
        assert all(len(getattr(self, each.name)) == len(self) for each in fields(self)[1:])


def find_allocations(trace: Trace) -> Allocations:
    """All of them; those made before the first event come first."""
    np = numpy()
    mentions = _Mentions(trace)
    made, carried, left = _made(trace, mentions), _carried(trace, mentions), _left(trace, mentions)
    columns = {name: np.concatenate([carried[name], left[name], made[name]]) for name in made}
    order = np.argsort(columns["start"], kind="stable")
    return Allocations(trace.events, **{name: values[order] for name, values in columns.items()})


class _Mentions:
    """The events of blocks, by address and then in order; `following` is the next one there."""

    def __init__(self, trace: Trace) -> None:
        np = numpy()
        action, address = column(trace, "action"), column(trace, "address")
        events = np.flatnonzero(action <= Action.FREE_COMPLETED)
        events = events[np.argsort(address[events], kind="stable")]
        # A free that is asked for twice counts once.
        again = np.zeros(len(events), bool)
        free = action[events] == Action.FREE_REQUESTED
        again[1:] = (address[events[1:]] == address[events[:-1]]) & free[1:] & free[:-1]
        self.events = events[~again].astype(np.int64)
        self.address = address[self.events]
        self.action = action[self.events]
        self.first = np.ones(len(self.events), bool)
        self.first[1:] = self.address[1:] != self.address[:-1]
        ends = np.append(self.first[1:], True)[: len(self.events)]
        self.following = np.where(ends, trace.events, np.append(self.events[1:], trace.events)[: len(ends)])
        self.following_action = np.where(ends, 255, np.append(self.action[1:], 255)[: len(ends)])


def _rows(trace: Trace, events: Column, start: Column, freed: Column, completed: Column) -> dict[str, Column]:
    """Columns of allocations of which an event tells address, size and stream, and if it made them whose."""
    np = numpy()
    made = start >= 0
    size = column(trace, "size")[events].astype(np.int64)
    return {
        "start": start,
        "freed": freed,
        "completed": completed,
        "address": column(trace, "address")[events],
        "size": size,
        "held": _rounded(trace, size),
        "stream": column(trace, "stream")[events],
        "stack": np.where(made, column(trace, "stack")[events], 0),
        "tag": np.where(made, column(trace, "tag")[events], 0),
    }


def _rounded(trace: Trace, size: Column) -> Column:
    np = numpy()
    rounded = Rules(trace.settings).rounded
    sizes, places = np.unique(size, return_inverse=True)
    return np.array([rounded(each) for each in sizes.tolist()], np.int64)[places]


def _made(trace: Trace, mentions: _Mentions) -> dict[str, Column]:
    np = numpy()
    at = np.flatnonzero(mentions.action == Action.ALLOC)
    freed = mentions.following[at]
    asked = mentions.following_action[at] == Action.FREE_REQUESTED
    after = mentions.following[np.minimum(at + 1, max(len(mentions.following) - 1, 0))]
    start = mentions.events[at]
    return _rows(trace, start, start, freed, np.where(asked, after, freed))


def _carried(trace: Trace, mentions: _Mentions) -> dict[str, Column]:
    """What was there before: the first mention of its address is not its allocation."""
    np = numpy()
    at = np.flatnonzero(mentions.first & (mentions.action != Action.ALLOC))
    events = mentions.events[at]
    live = mentions.action[at] == Action.FREE_REQUESTED
    start = np.full(len(at), BEFORE, np.int64)
    return _rows(
        trace, events, start, np.where(live, events, BEFORE), np.where(live, mentions.following[at], events)
    )


def _left(trace: Trace, mentions: _Mentions) -> dict[str, Column]:
    """What no event mentions, and was there in the end."""
    np = numpy()
    blocks = [
        (block, segment.stream)
        for segment in trace.segments
        for block in segment.blocks
        if block.state != BlockState.FREE
    ]
    known = np.isin(np.array([block.address for block, _ in blocks], np.uint64), mentions.address).tolist()
    blocks = [each for each, seen in zip(blocks, known, strict=True) if not seen]
    pending = [block.state == BlockState.PENDING for block, _ in blocks]

    def whole(values: list[int], kind: Any = np.int64) -> Column:
        return np.array(values, kind)

    return {
        "start": whole([BEFORE] * len(blocks)),
        "freed": whole([BEFORE if each else trace.events for each in pending]),
        "completed": whole([trace.events] * len(blocks)),
        "address": whole([block.address for block, _ in blocks], np.uint64),
        "size": whole([block.requested_size for block, _ in blocks]),
        "held": whole([block.size for block, _ in blocks]),
        "stream": whole([stream for _, stream in blocks], np.uint32),
        "stack": whole([block.stack for block, _ in blocks], np.uint32),
        "tag": whole([0] * len(blocks), np.uint32),
    }


# ---- whose -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Which group each allocation belongs to: `group[i]` indexes `labels` and `keys`, those of `groups`."""

    labels: tuple[str, ...]
    keys: tuple[str | int | None, ...]
    group: Column


def split_allocations(trace: Trace, allocations: Allocations, by: str) -> Split:
    """The allocations by stack, line, module, stream or tag; groups as in `groups`."""
    np = numpy()
    if by not in (*SPLITS, "stack"):
        raise ConfigError(f"cannot split by {by!r}; there is {', '.join(SPLITS)} and stack")
    if by == "tag":
        names, numbers = _tags(trace, allocations)
    elif by == "stream":
        names, numbers = list(trace.streams), allocations.stream
    elif by == "stack":
        names, numbers = [stack or None for stack in range(len(trace.stacks))], allocations.stack
    else:
        names = [place_name(trace, by, stack) for stack in range(len(trace.stacks))]
        numbers = allocations.stack
    keys: list[Any] = list(dict.fromkeys(names))
    places = {key: place for place, key in enumerate(keys)}
    found = np.array([places[name] for name in names], np.int64)
    return Split(tuple(label_of(trace, by, key) for key in keys), tuple(keys), found[numbers])


def _tags(trace: Trace, allocations: Allocations) -> tuple[list[Any], Column]:
    """The tag an allocation was given, else the phase it was made in."""
    np = numpy()
    phases = Phases(trace)
    names: list[Any] = [None, *trace.tags[1:], None, *phases.names]
    made = allocations.start >= 0
    times = column(trace, "time_us")
    when = times[np.maximum(allocations.start, 0)] if trace.events else np.zeros(len(allocations), np.int64)
    phase = np.searchsorted(np.array(phases.times, np.int64), when, side="right") + len(trace.tags)
    tag = allocations.tag.astype(np.int64)
    return names, np.where(made & (tag == 0), phase, tag)
