"""Memory over time at any level of detail: from a whole run in as many columns as a screen has, to single
allocations.

A level has the minimum and maximum of each column, so that no peak is lost; a range with fewer changes than
columns has every change. Bands are the most important allocations of a range, stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vram.errors import ConfigError
from vram.trace import Trace, allocations
from vram.trace.series import reserved_before, reserved_changes

from .allocations import Allocations, Split, find_allocations, split_allocations
from .columns import Column, column, numpy
from .idle import idle_changes

__all__ = ["AXES", "Band", "Level", "Series", "Timeline"]

AXES = ("time", "event")
MOST_GROUPS = 12
"""The largest groups of a split, which are kept apart; the others are joined."""
OTHERS = "(others)"


@dataclass(frozen=True)
class Series:
    """Bytes after each event that changed them: `values[i]` from `events[i]` on, `before` up to the first."""

    events: Column
    values: Column
    before: int = 0

    @classmethod
    def of(cls, events: Column, changes: Column, last: int) -> Series:
        """From changes in any order; those below event 0 are `before`, those from `last` on are ignored."""
        np = numpy()
        kept = (events >= 0) & (events < last)
        before = int(changes[events < 0].sum())
        order = np.argsort(events[kept], kind="stable")
        events, values = events[kept][order], before + np.cumsum(changes[kept][order])
        final = np.append(events[1:] != events[:-1], True)[: len(events)]
        return cls(events[final], values[final].astype(np.int64), before)

    def at(self, event: int) -> int:
        """Bytes after an event."""
        place = int(numpy().searchsorted(self.events, event, side="right"))
        return int(self.values[place - 1]) if place else self.before

    @property
    def most(self) -> int:
        """The maximum."""
        return max(self.before, int(self.values.max(initial=0)))

    def envelope(self, places: Column) -> tuple[Column, Column]:
        """The minimum and maximum between each two of the events `places`, including both."""
        np = numpy()
        values = np.concatenate([[self.before], self.values])
        index = np.searchsorted(self.events, places, side="left")
        stretch, starts = values[: index[-1] + 1], index[:-1]
        low = np.minimum(np.minimum.reduceat(stretch, starts), values[index[1:]])
        high = np.maximum(np.maximum.reduceat(stretch, starts), values[index[1:]])
        return low, high


@dataclass(frozen=True)
class Level:
    """Some series over one range: `values` has for each name its bytes at each of `x`.

    `exact`: every change of the range is there, and a value holds up to the next. Else each column has two
    entries, its minimum and maximum.
    """

    exact: bool
    x: Column
    values: dict[str, Column]


@dataclass(frozen=True, slots=True)
class Band:
    """One allocation in a stack of them: `path` alternates x and the offset in bytes from there on.

    `number` is its index in `Timeline.allocations`; it ends at `end`.
    """

    number: int
    end: int
    path: list[int]


class Timeline:
    """What a recorded program and its allocator held over time, for queries about any range."""

    def __init__(self, trace: Trace, found: allocations.Allocations | None = None) -> None:
        """Find the allocations of `trace`, unless they are given as `found`."""
        self.trace = trace
        self.allocations: Allocations = find_allocations(trace, found)

    # ---- over time ----

    @cached_property
    def series(self) -> dict[str, Series]:
        """`allocated`, `pending`, `reserved`, `free` (reserved and neither of these), and of that `cached`.

        If a pool is suspended, more is allocated than reserved, and nothing is free. Cached memory is in
        segments with nothing in use; it is known only for plain segments.
        """
        np = numpy()
        made, last = self.allocations, self.trace.events
        grown = reserved_changes(self.trace)
        changes: dict[str, tuple[Column, Column]] = {
            "allocated": self._held(np.ones(len(made), bool)),
            "pending": self._pending(),
            "reserved": (
                np.array([-1, *grown], np.int64),
                np.array([reserved_before(self.trace), *grown.values()], np.int64),
            ),
        }
        signs = {"reserved": 1, "allocated": -1, "pending": -1}
        changes["free"] = (
            np.concatenate([changes[name][0] for name in signs]),
            np.concatenate([sign * changes[name][1] for name, sign in signs.items()]),
        )
        idle = idle_changes(self.trace, made)
        if idle is not None:
            changes["cached"] = idle
        found = {name: Series.of(*pair, last) for name, pair in changes.items()}
        free = found["free"]
        return found | {"free": Series(free.events, np.maximum(free.values, 0), max(free.before, 0))}

    def _held(self, chosen: Column) -> tuple[Column, Column]:
        np = numpy()
        made = self.allocations
        held = made.held[chosen]
        return np.concatenate([made.start[chosen], made.freed[chosen]]), np.concatenate([held, -held])

    def _pending(self) -> tuple[Column, Column]:
        np = numpy()
        made = self.allocations
        chosen = made.delayed
        held = made.held[chosen]
        return np.concatenate([made.freed[chosen], made.completed[chosen]]), np.concatenate([held, -held])

    def split(self, by: str) -> dict[str, Series]:
        """Allocated bytes by stream, tag, module, line or stack: the largest groups, and the others."""
        if by not in self._splits:
            self._splits[by] = self._split(split_allocations(self.trace, self.allocations, by))
        return self._splits[by]

    @cached_property
    def _splits(self) -> dict[str, dict[str, Series]]:
        return {}

    def _split(self, split: Split) -> dict[str, Series]:
        np = numpy()
        last = self.trace.events
        made = self.allocations
        span = (np.minimum(made.freed, last) - np.maximum(made.start, 0)).astype(float)
        weight = np.bincount(split.group, made.held * np.maximum(span, 1), len(split.labels))
        order = [int(each) for each in np.argsort(-weight, kind="stable") if weight[each] > 0]
        kept, rest = order[:MOST_GROUPS], order[MOST_GROUPS:]
        found = {split.labels[each]: Series.of(*self._held(split.group == each), last) for each in kept}
        if rest:
            found[OTHERS] = Series.of(*self._held(np.isin(split.group, rest)), last)
        return found

    @cached_property
    def peak(self) -> int:
        """The first event after which the program held most; -1 if there are no events."""
        held = self.series["allocated"]
        if not self.trace.events:
            return -1
        most = int(held.values.max(initial=0))
        return 0 if held.at(0) >= most else int(held.events[held.values.argmax()])

    # ---- a range of it ----

    def span(self, axis: str) -> tuple[int, int]:
        """Where an axis begins and ends; never empty."""
        _check_axis(axis)
        end = self.trace.span_us if axis == "time" else self.trace.events
        return 0, max(1, end)

    def x_of(self, axis: str, events: Column) -> Column:
        """The positions of events on an axis; its beginning before the first, its end after the last."""
        np = numpy()
        if _check_axis(axis) == "event":
            return np.clip(events, 0, max(1, self.trace.events))
        if not self.trace.events:
            return np.zeros(len(events), np.int64)
        times = self._times
        return np.where(events < 0, 0, times[np.clip(events, 0, self.trace.events - 1)])

    def event_at(self, axis: str, x: float) -> int:
        """The last event up to a position on an axis, or the first event."""
        places = self._places(axis, numpy().array([x], float), side="right")
        return max(0, min(int(places[0]), self.trace.events) - 1)

    @cached_property
    def _times(self) -> Column:
        """Times that never decrease, even if the clock did."""
        return numpy().maximum.accumulate(column(self.trace, "time_us"))

    def _places(self, axis: str, x: Column, side: str = "left") -> Column:
        """The number of events before each x, or up to it."""
        np = numpy()
        if _check_axis(axis) == "time":
            return np.searchsorted(self._times, x, side=side)
        counts = np.ceil(x) if side == "left" else np.floor(x) + 1
        return np.clip(counts, 0, self.trace.events).astype(np.int64)

    def level(self, axis: str, low: float, high: float, columns: int, by: str | None = None) -> Level:
        """The series, or with `by` those of a split, from `low` to `high` in `columns` columns."""
        np = numpy()
        low, high = self._stretch(axis, low, high)
        chosen = self.series if by is None else self.split(by)
        first, last = self._places(axis, np.array([low, high], float))
        changed = [_between(series.events, first, last) for series in chosen.values()]
        if sum(map(len, changed)) <= 2 * columns:
            return self._exact(axis, low, high, chosen, np.unique(np.concatenate([*changed, [last]])[:-1]))
        edges = np.linspace(low, high, columns + 1)
        places = self._places(axis, edges)
        middles = (edges[:-1] + edges[1:]) / 2
        return Level(
            False,
            np.repeat(middles, 2),
            {name: _by_turns(*series.envelope(places)) for name, series in chosen.items()},
        )

    def _exact(self, axis: str, low: float, high: float, chosen: dict[str, Series], events: Column) -> Level:
        np = numpy()
        events = events.astype(np.int64)
        before = self._places(axis, np.array([low], float))[0] - 1
        at = np.concatenate([[before], events, events[-1:] if len(events) else [before]])
        x = np.concatenate([[low], self.x_of(axis, events), [high]])
        values = {}
        for name, series in chosen.items():
            known = np.concatenate([[series.before], series.values])
            values[name] = known[np.searchsorted(series.events, at, side="right")]
        return Level(True, x, values)

    def _stretch(self, axis: str, low: float, high: float) -> tuple[float, float]:
        first, last = self.span(axis)
        low = min(max(low, first), last)
        high = min(max(high, first), last)
        return (low, high) if low < high else (float(first), float(last))

    # ---- single allocations ----

    def bands(
        self,
        axis: str,
        low: float,
        high: float,
        most: int = 1000,
        *,
        columns: int = 3000,
        vertices: int = 30_000,
    ) -> list[Band]:
        """The allocations with the largest area between `low` and `high`, stacked, long-lived ones lowest.

        At most `most` of them, limited to `vertices` vertices in total. Several moves within one of the
        `columns` count as one.
        """
        np = numpy()
        low, high = self._stretch(axis, low, high)
        first, last = self._places(axis, np.array([low, high], float))
        made = self.allocations
        there = np.flatnonzero((made.start < last) & (made.freed > first))
        begin = np.maximum(self.x_of(axis, made.start[there]), low)
        end = np.minimum(self.x_of(axis, made.freed[there]), high)
        room = made.held[there] * np.maximum(end - begin, 0.0)
        there, room = there[room > 0], room[room > 0]
        there = there[np.argsort(-room, kind="stable")[:most]]
        while len(there):
            lives = made.freed[there] - made.start[there]
            lowest_first = there[np.argsort(-lives, kind="stable")]
            found = self._stack(axis, lowest_first, (low, high), columns, vertices)
            if found is not None:
                return found
            there = there[: len(there) // 2]
        return []

    def _stack(
        self, axis: str, numbers: Column, stretch: tuple[float, float], columns: int, vertices: int
    ) -> list[Band] | None:
        """Stack `numbers`, the first one lowest; None if it takes too many vertices."""
        np = numpy()
        made = self.allocations
        held = made.held[numbers]
        begins, ends = self.x_of(axis, made.start[numbers]), self.x_of(axis, made.freed[numbers])
        # Every change, those before the range as one: when, which, and whether it is live from then on.
        x = np.maximum(np.concatenate([begins, ends]), int(stretch[0]))
        which = np.tile(np.arange(len(numbers)), 2)
        there = np.repeat([True, False], len(numbers))
        order = np.lexsort((there, np.concatenate([made.start[numbers], made.freed[numbers]])))
        order = order[x[order] <= stretch[1]]
        x, which, there = x[order], which[order], there[order]
        column = np.floor((x - stretch[0]) * (columns / (stretch[1] - stretch[0])))
        bounds = np.flatnonzero(np.append(column[1:] != column[:-1], True)) + 1
        alive = np.zeros(len(numbers), bool)
        known = np.full(len(numbers), -1, np.int64)
        moved: list[tuple[Column, int, Column]] = []
        begun = 0
        for bound in bounds.tolist():
            alive[which[begun:bound]] = there[begun:bound]
            top = np.cumsum(np.where(alive, held, 0))
            offsets = np.where(alive, top - held, -1)
            changed = np.flatnonzero((offsets != known) & alive)
            known = offsets
            vertices -= len(changed)
            if vertices < 0:
                return None
            moved.append((changed, int(x[bound - 1]), offsets[changed]))
            begun = bound
        return _paths(numbers, begins, ends, moved)

    def rows(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The facts about allocations."""
        made = self.allocations
        for number in numbers:
            yield {
                "start": int(made.start[number]),
                "freed": int(made.freed[number]),
                "size": int(made.size[number]),
                "held": int(made.held[number]),
                "stream": int(made.stream[number]),
                "stack": int(made.stack[number]),
                "address": int(made.address[number]),
            }


def _paths(
    numbers: Column, begins: Column, ends: Column, moved: list[tuple[Column, int, Column]]
) -> list[Band]:
    """A band for each allocation that is visible, from the moves."""
    paths: list[list[int]] = [[] for _ in range(len(numbers))]
    for changed, x, offsets in moved:
        for each, offset in zip(changed.tolist(), offsets.tolist(), strict=True):
            paths[each] += x, offset
    found = []
    for number, begin, end, path in zip(numbers.tolist(), begins.tolist(), ends.tolist(), paths, strict=True):
        if path:
            path[0] = min(begin, path[0])
            found.append(Band(number, end, path))
    return found


def _check_axis(axis: str) -> str:
    if axis not in AXES:
        raise ConfigError(f"there is no axis {axis!r}; there is {' and '.join(AXES)}")
    return axis


def _between(events: Column, first: int, last: int) -> Column:
    low, high = numpy().searchsorted(events, [first, last])
    return events[low:high]


def _by_turns(low: Column, high: Column) -> Column:
    return numpy().stack([low, high], axis=1).ravel()
