"""The memory of a recorded allocator at any event: segments, the blocks in use in them, what is free between.

The last mention of an address up to the event tells what was there; else the first mention after it; else
the segments at the end of the recording. So a recording whose beginning is missing is read as well as a whole
one. What it means is for the other modules.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from vram.arguments import require, whole_number
from vram.trace import BEFORE, Action, Block, BlockState, Segment, Trace
from vram.trace.series import (
    BLOCK_ACTIONS,
    MAPPING_ACTIONS,
    SEGMENT_ACTIONS,
    events_of,
    pages_move,
    reserved_series,
)

from .torch_rules import LARGE_PAGE, SMALL_PAGE, Rules

__all__ = ["HeldBlock", "HeldSegment", "Memories", "Memory", "memory_at"]


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block in use: live, or `pending` (freed, but a stream may still use it).

    `event` is that of its allocation, or BEFORE. `stack` indexes `Trace.stacks`, `stream` `Trace.streams`.
    """

    address: int
    size: int
    requested: int
    stream: int
    stack: int
    event: int
    pending: bool = False


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A range the allocator held, with the blocks in use in it by address. `free` has (address, size)."""

    address: int
    size: int
    stream: int
    kind: str = "large"
    expandable: bool = False
    blocks: tuple[HeldBlock, ...] = ()

    @property
    def free(self) -> Iterator[tuple[int, int]]:
        """What lies between the blocks."""
        start = self.address
        for block in self.blocks:
            if block.address > start:
                yield start, block.address - start
            start = block.address + block.size
        if self.address + self.size > start:
            yield start, self.address + self.size - start

    @property
    def idle(self) -> int:
        """Free bytes that could be given back to the device: a whole segment, or whole pages of it."""
        if not self.blocks:
            return self.size
        if not self.expandable:
            return 0
        page = SMALL_PAGE if self.kind == "small" else LARGE_PAGE
        return sum(_whole_pages(at - self.address, size, page) for at, size in self.free)


def _whole_pages(start: int, size: int, page: int) -> int:
    """Bytes of the pages that lie wholly in a stretch."""
    return max(0, (start + size) // page * page - -(-start // page) * page)


@dataclass(frozen=True)
class Memory:
    """Everything the allocator held after `event`."""

    event: int
    segments: tuple[HeldSegment, ...]
    suspended: int = 0
    """Bytes of the segments that have no memory behind them, because the pool was suspended."""

    def blocks(self, *, pending: bool | None = False) -> Iterator[HeldBlock]:
        """The live blocks, the pending ones, or with None both."""
        for segment in self.segments:
            for block in segment.blocks:
                if pending is None or block.pending == pending:
                    yield block

    @cached_property
    def requested(self) -> int:
        """Bytes that live blocks were asked for."""
        return sum(block.requested for block in self.blocks())

    @cached_property
    def allocated(self) -> int:
        """Bytes of live blocks."""
        return sum(block.size for block in self.blocks())

    @cached_property
    def pending(self) -> int:
        """Bytes freed that a stream may still use."""
        return sum(block.size for block in self.blocks(pending=True))

    @cached_property
    def reserved(self) -> int:
        """Bytes of all segments that the device gave."""
        return sum(segment.size for segment in self.segments) - self.suspended

    @cached_property
    def cached(self) -> int:
        """Idle bytes, which could be given back to the device."""
        return max(0, min(self.reserved - self.pending, sum(segment.idle for segment in self.segments)))

    def largest_free(self, stream: int | None = None) -> int:
        """The largest free piece, of one stream or of any."""
        chosen = (each for each in self.segments if stream is None or each.stream == stream)
        return max((size for segment in chosen for _, size in segment.free), default=0)


def memory_at(trace: Trace, event: int) -> Memory:
    """What the allocator held after `event`; before the first with -1. For many events: `Memories`."""
    return Memories(trace).at(event)


class Memories:
    """The memory of one recording at any of its events: what is the same for all of them is read once."""

    def __init__(self, trace: Trace) -> None:
        """Note where each address is mentioned."""
        self._trace = require(trace, Trace, "trace")
        self._blocks = _Mentions(trace, BLOCK_ACTIONS)
        self._segments = _Mentions(trace, SEGMENT_ACTIONS)
        self._mappings = events_of(trace, MAPPING_ACTIONS)
        self._pages_move = pages_move(trace)
        self._final = {
            block.address: (block, segment.stream)
            for segment in trace.segments
            for block in segment.blocks
            if block.state != BlockState.FREE
        }

    def at(self, event: int) -> Memory:
        """What the allocator held after `event`; before the first with -1."""
        event = whole_number(event, "event", least=-1, most=self._trace.events - 1)
        reader = _Reader(self._trace, event, self._blocks, self._final)
        if self._pages_move:
            return _paged(reader, event, self._reserved[event] if event >= 0 else 0)
        plain = _plain_segments(self._trace, *self._segments.around(event))
        mapped = _mapped_segments(self._trace, event, self._mappings)
        return Memory(event, tuple(reader.fill(sorted(plain + mapped, key=lambda at: at.address))))

    @cached_property
    def _reserved(self) -> list[int]:
        return reserved_series(self._trace)


# ---- who is there ------------------------------------------------------------------------------------------

Mentioned: TypeAlias = dict[int, int]
"""One event for each address."""


class _Mentions:
    """For each address the events that mention it, among some actions."""

    def __init__(self, trace: Trace, actions: Iterable[Action]) -> None:
        self._actions = trace.action
        self._events: defaultdict[int, list[int]] = defaultdict(list)
        events = events_of(trace, actions)
        for address, event in zip(map(trace.address.__getitem__, events), events, strict=True):
            self._events[address].append(event)

    def around(self, event: int) -> tuple[Mentioned, Mentioned]:
        """For each address the last event up to a moment, and the first after it."""
        last: Mentioned = {}
        first: Mentioned = {}
        for address, events in self._events.items():
            place = bisect_right(events, event)
            if place:
                last[address] = events[place - 1]
            if place < len(events):
                first[address] = events[place]
        return last, first

    def allocation_of(self, address: int, event: int) -> int | None:
        """The last event before `event` that allocated there."""
        events = self._events[address]
        for place in range(bisect_left(events, event) - 1, -1, -1):
            if self._actions[events[place]] == Action.ALLOC:
                return events[place]
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    """A block in use whose size is not known yet, or is (`size`) from the end of the recording."""

    address: int
    requested: int
    stream: int
    stack: int
    event: int
    pending: bool
    size: int | None = None


class _Reader:
    """Finds the blocks in use after an event, and lays them into segments."""

    def __init__(
        self, trace: Trace, event: int, mentions: _Mentions, final: dict[int, tuple[Block, int]]
    ) -> None:
        self._trace = trace
        self._rules = Rules(trace.settings)
        self._mentions = mentions
        self._last, self._first = mentions.around(event)
        self._final = final

    def fill(self, ranges: list[HeldSegment]) -> Iterator[HeldSegment]:
        """The segments with their blocks; a block outside all of them is a segment of its own."""
        found = sorted(self._found(), key=lambda block: block.address)
        starts = [block.address for block in found]
        placed = 0
        for each in ranges:
            first, last = bisect_left(starts, each.address), bisect_left(starts, each.address + each.size)
            yield from self._strays(found[placed:first])
            yield HeldSegment(
                each.address,
                each.size,
                each.stream,
                each.kind,
                each.expandable,
                tuple(self._sized(found[first:last], each)),
            )
            placed = max(placed, last)
        yield from self._strays(found[placed:])

    def _strays(self, found: Iterable[_Found]) -> Iterator[HeldSegment]:
        for each in found:
            block = _block(each, each.size or self._rules.rounded(each.requested))
            yield HeldSegment(block.address, block.size, block.stream, blocks=(block,))

    def _found(self) -> Iterator[_Found]:
        actions, last, first = self._trace.action, self._last, self._first
        for address, event in last.items():
            if actions[event] == Action.ALLOC:
                yield self._of_event(address, event, pending=False)
            elif actions[event] == Action.FREE_REQUESTED:
                made = self._mentions.allocation_of(address, event)
                yield self._of_event(address, event if made is None else made, pending=True)
        for address, event in first.items():
            if address not in last and actions[event] != Action.ALLOC:
                yield self._carried(address, event)
        for address, (block, stream) in self._final.items():
            if address not in last and address not in first:
                pending = block.state == BlockState.PENDING
                yield _Found(address, block.requested_size, stream, block.stack, BEFORE, pending, block.size)

    def _of_event(self, address: int, event: int, *, pending: bool) -> _Found:
        trace = self._trace
        known = self._final.get(address) if address not in self._first else None
        made = trace.action[event] == Action.ALLOC
        return _Found(
            address,
            trace.size[event],
            trace.stream[event],
            trace.stack[event] if made else 0,
            event if made else BEFORE,
            pending,
            known[0].size if known else None,
        )

    def _carried(self, address: int, event: int) -> _Found:
        """In use since before the recording; the stack of its free does not tell who made it."""
        trace = self._trace
        pending = trace.action[event] == Action.FREE_COMPLETED
        return _Found(address, trace.size[event], trace.stream[event], 0, BEFORE, pending)

    def pages(self) -> list[HeldSegment]:
        """The pages that blocks in use lie on, joined where they touch."""
        joined: list[list[int]] = []
        for each in sorted(self._found(), key=lambda block: block.address):
            end = each.address + (each.size or self._rules.rounded(each.requested))
            first, last = each.address // SMALL_PAGE * SMALL_PAGE, -(-end // SMALL_PAGE) * SMALL_PAGE
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last, each.stream])
        return [HeldSegment(first, last - first, stream, "small") for first, last, stream in joined]

    # ---- how large a block is ----

    def _sized(self, found: list[_Found], segment: HeldSegment) -> Iterator[HeldBlock]:
        end = segment.address + segment.size
        for index, each in enumerate(found):
            bound = found[index + 1].address if index + 1 < len(found) else end
            yield _block(each, min(each.size or self._size(each, bound, segment), bound - each.address))

    def _size(self, each: _Found, bound: int, segment: HeldSegment) -> int:
        rounded = self._rules.rounded(each.requested)
        if segment.kind == "small" or segment.expandable:
            return rounded
        rest = self._boundary(each, each.address + rounded, bound) - each.address - rounded
        return rounded + rest if self._rules.keeps_rest(rounded, rest) else rounded

    def _boundary(self, each: _Found, end: int, bound: int) -> int:
        """Where the free block ended that `each` was taken from, as far as it can be told.

        Blocks are taken from the front of free ones, and free ones are merged. So while a block lives, what
        follows it starts where its own memory ends: any block seen behind it in its lifetime tells.
        """
        starts = self._starts
        for index in range(bisect_left(starts, end), bisect_left(starts, bound)):
            if self._last[starts[index]] > each.event:
                return starts[index]
        return bound

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(self._last)


def _block(found: _Found, size: int) -> HeldBlock:
    return HeldBlock(
        found.address, size, found.requested, found.stream, found.stack, found.event, found.pending
    )


# ---- which segments ----------------------------------------------------------------------------------------


def _plain_segments(trace: Trace, last: Mentioned, first: Mentioned) -> list[HeldSegment]:
    final = {segment.address: segment for segment in trace.segments if not segment.is_expandable}
    actions = trace.action
    found = [
        _segment(trace, at, final.get(address) if address not in first else None)
        for address, at in last.items()
        if actions[at] == Action.SEGMENT_ALLOC
    ]
    found += [
        _segment(trace, at, None)
        for address, at in first.items()
        if address not in last and actions[at] == Action.SEGMENT_FREE
    ]
    found += [
        HeldSegment(address, segment.total_size, segment.stream, segment.kind)
        for address, segment in final.items()
        if address not in last and address not in first
    ]
    return found


def _segment(trace: Trace, event: int, final: Segment | None) -> HeldSegment:
    size = trace.size[event]
    kind = final.kind if final else ("small" if size == SMALL_PAGE else "large")
    return HeldSegment(trace.address[event], size, trace.stream[event], kind)


class _Mapped:
    """Mapped ranges of expandable segments, none of which overlap, in order of address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, tuple[int, str]]] = {}  # start: (end, (stream, kind))

    def add(self, start: int, end: int, owner: tuple[int, str]) -> None:
        if start < end:
            self.remove(start, end)
            insort(self._starts, start)
            self._ranges[start] = end, owner

    def remove(self, start: int, end: int) -> None:
        first = max(0, bisect_right(self._starts, start) - 1)
        if self._starts and self._ranges[self._starts[first]][0] <= start:
            first += 1  # the one that begins before ends before, too
        last = max(first, bisect_left(self._starts, end))
        cut = self._starts[first:last]
        kept: list[int] = []
        for low in cut:
            high, owner = self._ranges.pop(low)
            for rest, stop in ((low, start), (end, high)):
                if rest < stop:
                    self._ranges[rest] = stop, owner
                    kept.append(rest)
        self._starts[first:last] = kept

    def merged(self) -> Iterator[HeldSegment]:
        start = stop = 0
        held: tuple[int, str] | None = None
        for low in self._starts:
            high, owner = self._ranges[low]
            if held == owner and low == stop:
                stop = high
                continue
            if held:
                yield HeldSegment(start, stop - start, *held, expandable=True)
            start, stop, held = low, high, owner
        if held:
            yield HeldSegment(start, stop - start, *held, expandable=True)


def _mapped_segments(trace: Trace, event: int, changes: list[int]) -> list[HeldSegment]:
    """Expandable segments: from the end backwards where the recording has it, else from the beginning."""
    mapped = _Mapped()
    for segment in trace.segments:
        if segment.is_expandable:
            mapped.add(segment.address, segment.address + segment.total_size, (segment.stream, segment.kind))
    undo = bool(trace.segments)
    chosen = (
        [index for index in reversed(changes) if index > event]
        if undo
        else changes[: bisect_right(changes, event)]
    )
    for index in chosen:
        start, size = trace.address[index], trace.size[index]
        if (trace.action[index] == Action.SEGMENT_MAP) != undo:
            kind = "small" if size % LARGE_PAGE else "large"
            mapped.add(start, start + size, (trace.stream[index], kind))
        else:
            mapped.remove(start, start + size)
    return list(mapped.merged())


# ---- pools of ours -----------------------------------------------------------------------------------------


def _paged(reader: _Reader, event: int, reserved: int) -> Memory:
    """Which addresses had pages is not recorded: in-use blocks have theirs, and the rest of them lies idle.

    The idle rest is one segment at address 0. Pages larger than the least are counted as if they were small.
    Where blocks in use need more pages than were reserved, the others were suspended.
    """
    segments = tuple(reader.fill(reader.pages()))
    idle = reserved - sum(segment.size for segment in segments)
    if idle > 0:
        segments = (*segments, HeldSegment(0, idle, 0, "small"))
    return Memory(event, segments, suspended=max(0, -idle))
