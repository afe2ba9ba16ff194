"""The memory of a recorded allocator at any event: segments, the blocks in use in them, and what is free.

Blocks come from the allocations of the recording, segments from their events, or else from the state at the
end. A recording without its beginning is read like a complete one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

from vram.arguments import require, whole_number
from vram.sizes import format_size
from vram.trace import Action, Block, BlockState, Segment, Trace
from vram.trace.allocations import Allocations, find_allocations
from vram.trace.series import MAPPING_ACTIONS, SEGMENT_ACTIONS, events_of, pages_move, reserved_series

from .torch_rules import LARGE_PAGE, SMALL_PAGE, Rules

__all__ = ["Memories", "Memory", "final_sizes", "free_pieces", "memory_at"]


def final_sizes(trace: Trace) -> dict[int, int]:
    """The size of each block in use at the end, by address."""
    return {
        block.address: block.size
        for segment in trace.segments
        for block in segment.blocks
        if block.state != BlockState.FREE
    }


def free_pieces(segment: Segment) -> Iterator[tuple[int, int]]:
    """Address and size of what lies between the blocks in use."""
    start = segment.address
    for block in segment.blocks:
        if block.address > start:
            yield start, block.address - start
        start = block.address + block.size
    if segment.address + segment.total_size > start:
        yield start, segment.address + segment.total_size - start


def _idle(segment: Segment) -> int:
    """Free bytes that could be released to the device: a whole segment, or whole pages of it."""
    if not segment.blocks:
        return segment.total_size
    if not segment.is_expandable:
        return 0
    page = SMALL_PAGE if segment.kind == "small" else LARGE_PAGE
    return sum(_whole_pages(at - segment.address, size, page) for at, size in free_pieces(segment))


def _whole_pages(start: int, size: int, page: int) -> int:
    """Bytes of the pages that lie completely in a range."""
    return max(0, (start + size) // page * page - -(-start // page) * page)


@dataclass(frozen=True)
class Memory:
    """Everything the allocator held after `event`. Segments have only the blocks in use, by address."""

    event: int
    segments: tuple[Segment, ...]
    suspended: int = 0
    """Bytes of the segments that have no memory behind them, because the pool was suspended."""

    def blocks(self, *, pending: bool | None = False) -> Iterator[Block]:
        """The live blocks, the pending ones, or with None both."""
        for segment in self.segments:
            for block in segment.blocks:
                if pending is None or block.pending == pending:
                    yield block

    @cached_property
    def requested(self) -> int:
        """Bytes requested by live blocks."""
        return sum(block.requested_size for block in self.blocks())

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
        return sum(segment.total_size for segment in self.segments) - self.suspended

    @cached_property
    def cached(self) -> int:
        """Idle bytes, which could be released to the device."""
        return max(0, min(self.reserved - self.pending, sum(map(_idle, self.segments))))

    def _repr_html_(self) -> str:
        from .html import memory_html

        return memory_html(self)

    def __repr__(self) -> str:
        held = f"{format_size(self.allocated)} allocated, {format_size(self.reserved)} reserved"
        return f"<Memory after event {self.event}: {held} in {len(self.segments)} segments>"

    def largest_free(self, stream: int | None = None) -> int:
        """The largest free piece, of one stream or of any."""
        chosen = (each for each in self.segments if stream is None or each.stream == stream)
        return max((size for segment in chosen for _, size in free_pieces(segment)), default=0)


def memory_at(trace: Trace, event: int) -> Memory:
    """What the allocator held after `event`; before the first with -1. For many events: `Memories`."""
    return Memories(trace).at(event)


class Memories:
    """The memory of one recording at any of its events: what is the same for all of them is read once."""

    def __init__(self, trace: Trace, made: Allocations | None = None) -> None:
        """Find the allocations of `trace`, unless they are given."""
        self._trace = require(trace, Trace, "trace")
        self._made = find_allocations(trace) if made is None else require(made, Allocations, "made")
        self._changes = events_of(trace, SEGMENT_ACTIONS)
        self._mappings = events_of(trace, MAPPING_ACTIONS)
        self._pages_move = pages_move(trace)
        self._final = final_sizes(trace)

    def __repr__(self) -> str:
        return f"<Memories of {self._trace.source!r}: {self._trace.events} events>"

    def at(self, event: int) -> Memory:
        """What the allocator held after `event`; before the first with -1."""
        event = whole_number(event, "event", least=-1, most=self._trace.events - 1)
        reader = _Reader(self._trace, event, self._made, self._final)
        if self._pages_move:
            return _paged(reader, event, self._reserved[event] if event >= 0 else 0)
        plain = _plain_segments(self._trace, event, self._changes)
        mapped = _mapped_segments(self._trace, event, self._mappings)
        return Memory(event, tuple(reader.fill(sorted(plain + mapped, key=lambda at: at.address))))

    @cached_property
    def _reserved(self) -> list[int]:
        return reserved_series(self._trace)


# ---- which blocks ------------------------------------------------------------------------------------------


class _Reader:
    """Finds the blocks in use after an event, and lays them into segments."""

    def __init__(self, trace: Trace, event: int, made: Allocations, final: dict[int, int]) -> None:
        self._event = event
        self._made = made
        self._rules = Rules(trace.settings)
        self._final = final

    def fill(self, ranges: list[Segment]) -> Iterator[Segment]:
        """The segments with their blocks; a block outside all of them is a segment of its own.

        Each block is in one segment, even if segments overlap, which only damaged recordings have.
        """
        found = self._found
        starts = [block.address for block in found]
        placed = 0
        for each in ranges:
            first = max(placed, bisect_left(starts, each.address))
            last = max(first, bisect_left(starts, each.address + each.total_size))
            yield from self._strays(found[placed:first])
            yield replace(each, blocks=tuple(self._sized(found[first:last], each)))
            placed = last
        yield from self._strays(found[placed:])

    def _strays(self, found: Iterable[Block]) -> Iterator[Segment]:
        for each in found:
            block = replace(each, size=self._least_size(each))
            yield Segment(block.address, block.size, block.stream, "large", blocks=(block,))

    @cached_property
    def _found(self) -> list[Block]:
        """The blocks in use, by address; the size of each is 0 unless the end of the recording tells it."""
        made, event = self._made, self._event
        spans = zip(made.start, made.completed, strict=True)
        there = [number for number, (start, end) in enumerate(spans) if start <= event < end]
        return sorted(map(self._block, there), key=lambda block: block.address)

    def _block(self, number: int) -> Block:
        made = self._made
        lasts = made.completed[number] == made.events
        return Block(
            address=made.address[number],
            size=self._final.get(made.address[number], 0) if lasts else 0,
            requested_size=made.size[number],
            state=BlockState.PENDING if made.freed[number] <= self._event else BlockState.LIVE,
            stack=made.stack[number],
            stream=made.stream[number],
            event=made.start[number],
        )

    def pages(self) -> list[Segment]:
        """The pages that blocks in use lie on, joined where they touch."""
        joined: list[list[int]] = []
        for each in self._found:
            end = each.address + self._least_size(each)
            first, last = each.address // SMALL_PAGE * SMALL_PAGE, -(-end // SMALL_PAGE) * SMALL_PAGE
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last, each.stream])
        return [Segment(first, last - first, stream, "small") for first, last, stream in joined]

    # ---- how large a block is ----

    def _least_size(self, each: Block) -> int:
        return each.size or self._rules.rounded(each.requested_size)

    def _sized(self, found: list[Block], segment: Segment) -> Iterator[Block]:
        end = segment.address + segment.total_size
        for index, each in enumerate(found):
            bound = found[index + 1].address if index + 1 < len(found) else end
            size = each.size or self._size(each, bound, segment)
            yield replace(each, size=min(size, bound - each.address))

    def _size(self, each: Block, bound: int, segment: Segment) -> int:
        rounded = self._rules.rounded(each.requested_size)
        if segment.kind == "small" or segment.is_expandable:
            return rounded
        rest = self._boundary(each, each.address + rounded, bound) - each.address - rounded
        return rounded + rest if self._rules.keeps_rest(rounded, rest) else rounded

    def _boundary(self, each: Block, end: int, bound: int) -> int:
        """Where the free block ended that `each` was taken from, as far as the recording shows it.

        Blocks are taken from the front of free ones, and free ones are merged. So while a block lives, what
        follows it starts where its own memory ends: any block seen behind it in its lifetime shows where.
        """
        starts = self._starts
        for index in range(bisect_left(starts, end), bisect_left(starts, bound)):
            if self._last[starts[index]] > each.event:
                return starts[index]
        return bound

    @cached_property
    def _last(self) -> dict[int, int]:
        """For each address the last event up to this one that mentions it: of its latest allocation."""
        made, now = self._made, self._event
        last: dict[int, int] = {}
        rows = zip(made.address, made.start, made.freed, made.completed, strict=True)
        for address, start, freed, completed in rows:
            if start <= now:
                last[address] = completed if completed <= now else freed if freed <= now else start
        return last

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(self._last)


# ---- which segments ----------------------------------------------------------------------------------------


def _plain_segments(trace: Trace, event: int, changes: list[int]) -> list[Segment]:
    """The segments that are not expandable: what events say, else what is there at the end."""
    final = {segment.address: segment for segment in trace.segments if not segment.is_expandable}
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for each in changes:
        if each <= event:
            last[trace.address[each]] = each
        else:
            first.setdefault(trace.address[each], each)
    found = [
        _segment(trace, at, final.get(address) if address not in first else None)
        for address, at in last.items()
        if trace.action[at] == Action.SEGMENT_ALLOC
    ]
    found += [
        _segment(trace, at, None)
        for address, at in first.items()
        if address not in last and trace.action[at] == Action.SEGMENT_FREE
    ]
    found += [
        replace(segment, blocks=())
        for address, segment in final.items()
        if address not in last and address not in first
    ]
    return found


def _segment(trace: Trace, event: int, final: Segment | None) -> Segment:
    size = trace.size[event]
    kind = final.kind if final else ("small" if size == SMALL_PAGE else "large")
    return Segment(trace.address[event], size, trace.stream[event], kind)


class _Mapped:
    """Mapped ranges of expandable segments. The last change of an address counts."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, int, tuple[int, str] | None]] = []  # start, end, (stream, kind)

    def add(self, start: int, end: int, owner: tuple[int, str]) -> None:
        self._changes.append((start, end, owner))

    def remove(self, start: int, end: int) -> None:
        self._changes.append((start, end, None))

    def merged(self) -> Iterator[Segment]:
        """The ranges in order of address, none of which overlap; those that touch are one."""
        start = stop = 0
        held: tuple[int, str] | None = None
        for low, high, owner in self._pieces():
            if owner != held or low != stop:
                if held:
                    yield Segment(start, stop - start, *held, is_expandable=True)
                start, held = low, owner
            stop = high
        if held:
            yield Segment(start, stop - start, *held, is_expandable=True)

    def _pieces(self) -> Iterator[tuple[int, int, tuple[int, str] | None]]:
        """What lies between two neighbouring ends of changes, and whose it is."""
        changes = self._changes
        coming = sorted(range(len(changes)), key=lambda number: changes[number][0], reverse=True)
        there: list[int] = []  # a heap of changes that reach this far, the last one first
        for low, high in pairwise(sorted({end for change in changes for end in change[:2]})):
            while coming and changes[coming[-1]][0] <= low:
                heappush(there, -coming.pop())
            while there and changes[-there[0]][1] <= low:
                heappop(there)
            yield low, high, changes[-there[0]][2] if there else None


def _mapped_segments(trace: Trace, event: int, changes: list[int]) -> list[Segment]:
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


# ---- pools of vram -----------------------------------------------------------------------------------------


def _paged(reader: _Reader, event: int, reserved: int) -> Memory:
    """The memory of a pool of vram, whose recording does not say which addresses had pages.

    Blocks in use have their pages; the rest is idle and counts as one segment at address 0. Large pages are
    counted as if they were small. If blocks in use need more pages than were reserved, the others were
    suspended.
    """
    segments = tuple(reader.fill(reader.pages()))
    idle = reserved - sum(segment.total_size for segment in segments)
    if idle > 0:
        segments = (*segments, Segment(0, idle, 0, "small"))
    return Memory(event, segments, suspended=max(0, -idle))
