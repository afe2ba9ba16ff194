"""Segments with nothing in use, over time: what an allocator keeps cached and could give back to the device.

Of plain segments only: which pages of an expandable segment or of a pool of ours are idle is for `memory`,
which looks at one moment.
"""

from __future__ import annotations

from heapq import heappop, heappush

from vram.trace import BEFORE, Action, Trace
from vram.trace.series import MAPPING_ACTIONS, SEGMENT_ACTIONS, events_of

from .allocations import Allocations
from .columns import Column, numpy

__all__ = ["idle_changes"]


def idle_changes(trace: Trace, made: Allocations) -> tuple[Column, Column] | None:
    """Events and by how many bytes each changes what is idle; None where segments are not plain."""
    np = numpy()
    if events_of(trace, MAPPING_ACTIONS) or any(segment.is_expandable for segment in trace.segments):
        return None
    first, size, begin, end = _segments(trace)
    if not len(first):
        return None
    # In use from its allocation until its memory is free again; a free that nothing delayed is at once.
    until = np.where(made.delayed, made.completed, made.freed)
    which = _segment_of(made, first, size, begin, end)
    placed = np.flatnonzero(which >= 0)
    events = np.concatenate([np.maximum(made.start[placed], begin[which[placed]]), until[placed]])
    users = np.concatenate([np.ones(len(placed), np.int64), -np.ones(len(placed), np.int64)])
    segment = np.concatenate([which[placed], which[placed]])
    order = np.lexsort((events, segment))
    events, users, segment = events[order], users[order], segment[order]
    # What is so after the last change of each event counts.
    after = np.cumsum(users)
    final = np.append((segment[1:] != segment[:-1]) | (events[1:] != events[:-1]), True)[: len(events)]
    events, after, segment = events[final], after[final], segment[final]
    fresh = np.append(True, segment[1:] != segment[:-1])[: len(segment)]
    used = after > 0
    before = np.where(fresh, False, np.append(False, used[:-1])[: len(used)])
    turned = (used != before) & (events < end[segment])
    in_use_at_end = np.zeros(len(first), bool)
    last = np.append(fresh[1:], True)[: len(segment)]
    in_use_at_end[segment[last]] = used[last]
    changes = np.where(used, -size[segment], size[segment])[turned]
    return (
        np.concatenate([begin, end, events[turned]]),
        np.concatenate([size, np.where(in_use_at_end, 0, -size), changes]),
    )


def _segments(trace: Trace) -> tuple[Column, Column, Column, Column]:
    """Address, size, first event and the one that gives it back, of every plain segment there ever was."""
    np = numpy()
    rows: list[tuple[int, int, int, int]] = []
    held: dict[int, tuple[int, int]] = {}
    mentioned: set[int] = set()
    for event in events_of(trace, SEGMENT_ACTIONS):
        address, bytes_held = trace.address[event], trace.size[event]
        if trace.action[event] == Action.SEGMENT_ALLOC:
            held[address] = (bytes_held, event)
        else:
            known = held.pop(address, None)
            if known is not None or address not in mentioned:
                rows.append((address, *(known or (bytes_held, BEFORE)), event))
        mentioned.add(address)
    rows += [(address, *known, trace.events) for address, known in held.items()]
    rows += [
        (segment.address, segment.total_size, BEFORE, trace.events)
        for segment in trace.segments
        if segment.address not in mentioned
    ]
    rows.sort(key=lambda row: (row[0], row[2]))
    addresses = np.array([row[0] for row in rows], np.uint64)
    size, begin, end = (np.array([row[place] for row in rows], np.int64) for place in (1, 2, 3))
    return addresses, size, begin, end


def _segment_of(made: Allocations, first: Column, size: Column, begin: Column, end: Column) -> Column:
    """The segment each allocation lies in, or -1. Segments are in order of address, then of time."""
    np = numpy()
    address = made.address.astype(np.uint64)
    starts, group = np.unique(first, return_inverse=True)
    reach = np.zeros(len(starts), np.uint64)
    np.maximum.at(reach, group, first + size.astype(np.uint64))
    if np.all(reach[:-1] <= starts[1:]):
        # One after the other: the last one there that began before the allocation.
        scale = made.events + 2
        place = np.searchsorted(starts, address, side="right") - 1
        found = np.searchsorted(group * scale + begin + 1, place * scale + made.start + 1, side="right") - 1
        sure = np.maximum(found, 0)
        inside = (
            (found >= 0) & (group[sure] == place) & (address < first[sure] + size[sure].astype(np.uint64))
        )
        return np.where(inside & (made.start < end[sure]), found, -1)
    return _segment_then(made, group, first + size.astype(np.uint64), begin, end, starts)


def _segment_then(
    made: Allocations, group: Column, behind: Column, begin: Column, end: Column, starts: Column
) -> Column:
    """The same where addresses came back in other segments: by going through time with what was held then.

    `behind` is where each segment ends, `group` the place of its address in `starts`.
    """
    np = numpy()
    found = np.full(len(made), -1, np.int64)
    address = made.address.astype(np.uint64)
    # At one event segments end, then begin, then allocations are made.
    moments = np.concatenate([end, begin, made.start])
    kinds = np.repeat([0, 1, 2], [len(end), len(begin), len(made)])
    numbers = np.concatenate([np.arange(len(end)), np.arange(len(begin)), np.arange(len(made))])
    order = np.lexsort((kinds, moments))
    places, addresses, ends = group.tolist(), address.tolist(), behind.tolist()
    below = (np.searchsorted(starts, address, side="right") - 1).tolist()
    held = _Held(len(starts))
    for kind, number in zip(kinds[order].tolist(), numbers[order].tolist(), strict=True):
        if kind == 0:
            held.remove(places[number], number)
        elif kind == 1:
            held.add(places[number], number)
        else:
            segment = held.last(below[number])
            if segment >= 0 and addresses[number] < ends[segment]:
                found[number] = segment
    return found


class _Held:
    """Numbers of segments at places. The last place that has one is found without looking at all of them."""

    STRIDE = 512

    def __init__(self, places: int) -> None:
        self._numbers: list[list[int]] = [[] for _ in range(places)]  # heaps, the highest number first
        self._gone: set[int] = set()
        self._taken = bytearray(places)
        self._strides = [0] * (places // self.STRIDE + 1)  # how many places of each stride are taken
        self._any = bytearray(len(self._strides))

    def add(self, place: int, number: int) -> None:
        heappush(self._numbers[place], -number)
        self._take(place, 1)

    def remove(self, place: int, number: int) -> None:
        self._gone.add(number)
        numbers = self._numbers[place]
        while numbers and -numbers[0] in self._gone:
            heappop(numbers)
        if not numbers:
            self._take(place, 0)

    def _take(self, place: int, taken: int) -> None:
        stride = place // self.STRIDE
        self._strides[stride] += taken - self._taken[place]
        self._taken[place] = taken
        self._any[stride] = self._strides[stride] > 0

    def last(self, place: int) -> int:
        """The highest number at the last place up to this one; -1 if there is none."""
        stride = place // self.STRIDE
        found = self._taken.rfind(1, stride * self.STRIDE, place + 1)
        if found < 0:
            stride = self._any.rfind(1, 0, max(stride, 0))
            found = (
                self._taken.rfind(1, stride * self.STRIDE, (stride + 1) * self.STRIDE) if stride >= 0 else -1
            )
        return -self._numbers[found][0] if found >= 0 else -1
