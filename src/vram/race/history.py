"""The history of each allocation: who used which bytes, who owned the addresses before, what is unordered.

This module has the rules of race checking without the texts: `regions` compares bytes, `clocks` orders,
`checker` observes and reports.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from vram.race.call_sites import Site
from vram.race.clocks import Clock, Clocks, StreamKey, join
from vram.race.finding import Race
from vram.race.regions import Region

__all__ = ["Allocation", "Group", "History", "Use", "UseMap"]

MOST_REPORTED = 256
"""Maximum number of misuses of one allocation that are remembered; beyond that, one may be reported again."""
MOST_USES = 64
"""Maximum number of strided arrays kept per stream; beyond that, older ones are merged into one range."""


@dataclass(slots=True, eq=False)
class Use:
    """What a stream did to bytes of an allocation, at its own tick.

    `holds`: the work keeps the Buffer alive until it has run, so dropping the Buffer comes after it.
    `unsure`: it reads, and perhaps it writes.
    """

    key: StreamKey
    tick: int
    writes: bool
    region: Region
    site: Site
    holds: bool = False
    unsure: bool = False

    def replaces(self, other: Use) -> bool:
        """Return whether everything that must come after `other` must also come after this use."""
        if self.key != other.key or self.tick < other.tick or other.force > self.force:
            return False
        return self.region.solid or self.region == other.region

    @property
    def force(self) -> int:
        """The more it has, the more uses conflict with it."""
        return 2 if self.writes else int(self.unsure)

    def encloses(self, other: Use) -> bool:
        """Return whether it replaces a use whose bytes are all within its own."""
        region, inner = self.region, other.region
        return self.replaces(other) and region.start <= inner.start and inner.end <= region.end


class UseMap:
    """The uses that still matter, by the bytes they touch. Earlier uses of a stream come before these."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, int, tuple[Use, ...]]] = []  # contiguous ranges that do not overlap
        self._pointers: dict[int, tuple[Use, ...]] = {}
        self._strided: tuple[Use, ...] = ()

    def __iter__(self) -> Iterator[Use]:
        yield from {id(use): use for _, _, uses in self._spans for use in uses}.values()
        for uses in (*self._pointers.values(), self._strided):
            yield from uses

    def rivals(self, region: Region, writes: bool) -> list[Use]:
        """Return uses of the same bytes where at least one of the two writes, or perhaps writes."""
        near = [self._pointers.get(region.start, ())] if region.open else list(self._pointers.values())
        near += [uses for _, _, uses in self._spans[slice(*self._touched(region))]]
        near.append(self._strided)
        found = {id(use): use for uses in near for use in uses if writes or use.force}
        return [use for use in found.values() if use.region.overlaps(region)]

    def add(self, use: Use) -> None:
        region = use.region
        if region.open:
            self._pointers[region.start] = _added(self._pointers.get(region.start, ()), use)
        elif region.steps:
            self._add_strided(use)
        else:
            self._strided = tuple(old for old in self._strided if not use.encloses(old))
            for start in [each for each in self._pointers if region.start <= each < region.end]:
                self._pointers[start] = tuple(old for old in self._pointers[start] if not use.encloses(old))
            self._put(use)

    def _add_strided(self, use: Use) -> None:
        same = [old for old in self._strided if (old.key, old.writes) == (use.key, use.writes)]
        if len(same) >= MOST_USES:
            low, high = min(old.region.start for old in same), max(old.region.end for old in same)
            self._strided = tuple(old for old in self._strided if old not in same)
            self._put(replace(max(same, key=lambda old: old.tick), region=Region(low, high)))
        self._strided = _added(self._strided, use)

    def _put(self, use: Use) -> None:
        at, end = use.region.start, use.region.end
        first, last = self._touched(use.region)
        pieces: list[tuple[int, int, tuple[Use, ...]]] = []
        for start, stop, uses in self._spans[first:last]:
            if start < at:
                pieces.append((start, at, uses))
            elif start > at:
                pieces.append((at, start, (use,)))
            low, high = max(start, at), min(stop, end)
            pieces.append((low, high, _added(uses, use)))
            if stop > end:
                pieces.append((end, stop, uses))
            at = high
        if at < end:
            pieces.append((at, end, (use,)))
        joined = _joined(pieces)
        self._spans[first:last] = joined
        self._starts[first:last] = [piece[0] for piece in joined]

    def _touched(self, region: Region) -> tuple[int, int]:
        first = bisect_right(self._starts, region.start) - 1
        if first < 0 or self._spans[first][1] <= region.start:
            first += 1
        return first, bisect_left(self._starts, region.end)


def _added(uses: tuple[Use, ...], use: Use) -> tuple[Use, ...]:
    if any(old.tick > use.tick and old.replaces(use) for old in uses):
        return uses
    return (*(old for old in uses if not use.replaces(old)), use)


def _joined(pieces: list[tuple[int, int, tuple[Use, ...]]]) -> list[tuple[int, int, tuple[Use, ...]]]:
    """Merge neighbors with the same uses."""
    joined: list[tuple[int, int, tuple[Use, ...]]] = []
    for start, end, uses in pieces:
        if joined and joined[-1][1] == start and joined[-1][2] == uses:
            joined[-1] = (joined[-1][0], end, uses)
        else:
            joined.append((start, end, uses))
    return joined


@dataclass(slots=True, eq=False)
class Group:
    """State shared by allocations with a common lifetime: one allocation, or parts of an arena or growable.

    `waits`: at a free the owning stream waits for the recorded streams (an arena on a device). Otherwise the
    memory stays pending until they complete, as in pools; with `own`, also for uses on the owning stream.
    """

    recorded: set[StreamKey] = field(default_factory=set)
    waits: bool = False
    own: bool = False


@dataclass(slots=True, eq=False)
class Allocation:
    """One allocation, live or freed, with its uses and those of previous owners of its addresses."""

    key: StreamKey  # the stream it belongs to
    address: int
    size: int
    born: int  # the tick of its stream at the allocation
    site: Site | None
    block: int  # its start; later growth of a growable buffer is behind it
    group: Group
    pool: Any  # a weak reference
    uses: UseMap = field(default_factory=UseMap)
    before: UseMap = field(default_factory=UseMap)
    freed: Site | None = None
    suspended: Site | None = None
    done: Clock = field(default_factory=dict)  # what has completed before it is reused
    races: list[tuple[Race, Use]] = field(default_factory=list)  # reported at its free
    took_over: list[Race] = field(default_factory=list)  # those confirmed when it was allocated
    growable: bool = False  # part of a growable buffer, which `Pool.suspend` skips
    captured: bool = False  # allocated during a capture: a graph owns it
    noun: str = "buffer"  # what the program calls such memory: "tensor" for that of PyTorch
    reported: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.address + max(1, self.size)

    @property
    def gone(self) -> Site | None:
        """Where it was freed or suspended."""
        return self.freed or self.suspended

    def first_time(self, *what: object) -> bool:
        """Return whether this is new: each misuse of an allocation is reported once."""
        if what in self.reported:
            return False
        if len(self.reported) >= MOST_REPORTED:
            self.reported.clear()
        self.reported.add(what)
        return True


class AllocationMap:
    """Maps addresses to allocations that do not overlap. Freed ones stay until something else is allocated
    there.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, Allocation]] = []

    def __iter__(self) -> Iterator[Allocation]:
        return iter({id(piece[2]): piece[2] for piece in self._pieces}.values())

    def at(self, address: int) -> Allocation | None:
        i = bisect_right(self._starts, address) - 1
        return self._pieces[i][2] if i >= 0 and address < self._pieces[i][1] else None

    def over(self, start: int, end: int) -> list[Allocation]:
        return [piece[2] for piece in self._pieces[slice(*self._touched(start, end))]]

    def put(self, new: Allocation) -> list[Allocation]:
        """Insert an allocation and return previous owners of its addresses. Freed remainders stay."""
        first, last = self._touched(new.address, new.end)
        old = self._pieces[first:last]
        pieces = [(new.address, new.end, new)]
        for start, end, allocation in old:
            if allocation.freed and start < new.address:
                pieces.insert(0, (start, new.address, allocation))
            if allocation.freed and end > new.end:
                pieces.append((new.end, end, allocation))
        self._pieces[first:last] = pieces
        self._starts[first:last] = [piece[0] for piece in pieces]
        return [allocation for _, _, allocation in old]

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._pieces[first][1] <= start:
            first += 1
        return first, bisect_left(self._starts, end)


class History:
    """The rules: what is known of every allocation, and which uses and frees of it are unordered."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self._ranges: defaultdict[Any, AllocationMap] = defaultdict(AllocationMap)

    # ---- finding

    def cores(self) -> list[Any]:
        return list(self._ranges)

    def find(self, core: Any, address: int) -> Allocation | None:
        ranges = self._ranges.get(core)
        return None if ranges is None else ranges.at(address)

    def over(self, core: Any, region: Region) -> list[Allocation]:
        ranges = self._ranges.get(core)
        return [] if ranges is None else ranges.over(region.start, region.end)

    def of_pool(self, pool: Any) -> list[Allocation]:
        """Return the allocations of a pool that were not freed."""
        found = (each for ranges in self._ranges.values() for each in ranges)
        return [each for each in found if each.freed is None and each.pool() is pool]

    def pieces(self, core: Any, block: int) -> list[Allocation]:
        """Return the live parts of the allocation that begins at `block`, in order."""
        found: list[Allocation] = []
        piece = self.find(core, block)
        while piece is not None and piece.freed is None and piece.block == block:
            found.append(piece)
            piece = self.find(core, piece.address + piece.size) if piece.size else None
        return found

    # ---- allocating and freeing

    def allocate(
        self,
        key: StreamKey,
        address: int,
        size: int,
        site: Site | None,
        pool: Any,
        *,
        block: int | None = None,
        group: Group | None = None,
    ) -> Allocation:
        clock = self.clocks.advance(key)
        new = Allocation(
            key, address, size, clock[key], site, address if block is None else block, group or Group(), pool
        )
        for old in self._ranges[key.core].put(new):
            owner = old.pool()
            if old.freed is None and (owner is None or owner.closed):
                continue  # closing a pool waits for the device
            new.took_over += [race for race, use in old.races if clock.get(use.key, 0) < use.tick]
            for use in (*old.before, *old.uses):
                if old.done.get(use.key, 0) < use.tick and not self.clocks.finished(use.key, use.tick):
                    new.before.add(replace(use, region=use.region.closed()))
        return new

    def unordered_at_free(self, memory: Allocation, dropped: bool) -> list[Use]:
        """Return uses that may still run when the memory is reused.

        The pool reuses it after the work queued on its own stream until now, and on recorded streams. When a
        Buffer is dropped, all work that held it has released it.
        """
        before = self.waited_for(memory)
        return [
            use
            for use in memory.uses
            if before.get(use.key, 0) < use.tick
            and not (dropped and use.holds)
            and memory.first_time("free", use.key, use.tick)
        ]

    def waited_for(self, memory: Allocation) -> Clock:
        before = self.clocks.view(memory.key)
        for key in memory.group.recorded:
            join(before, self.clocks.view(key))
        return before

    def free(self, memory: Allocation, site: Site, *, dropped: bool = False) -> None:
        memory.freed = site
        for key in memory.group.recorded:
            if not memory.group.waits and (key != memory.key or memory.group.own):
                join(memory.done, self.clocks.view(key))
        for use in memory.uses if dropped else ():
            if use.holds:
                join(memory.done, {use.key: use.tick})

    def split(self, memory: Allocation, size: int) -> Allocation:
        """Split a part in two and return the one after `size` bytes."""
        rest = replace(
            memory,
            address=memory.address + size,
            size=memory.size - size,
            uses=_within(memory.uses, memory.address + size, memory.end),
            before=_within(memory.before, memory.address + size, memory.end),
        )
        kept = _within(memory.uses, memory.address, memory.address + size)
        memory.size, memory.uses = size, kept
        ranges = self._ranges[memory.key.core]
        ranges.put(memory)
        ranges.put(rest)
        return rest

    # ---- using

    def unordered_before(
        self, memory: Allocation, region: Region, key: StreamKey, clock: Clock, writes: bool
    ) -> list[tuple[Use, bool]]:
        """Return earlier uses that conflict with a use at this point of a stream and do not come before it.

        `writes`: whether it writes, or perhaps writes. The flag tells whether the earlier use was that of a
        previous owner.
        """
        rivals = [(use, False) for use in memory.uses.rivals(region, writes)]
        if clock.get(memory.key, 0) < memory.born:
            # Not ordered after its allocation: work of previous owners may still run.
            rivals += [(use, True) for use in memory.before.rivals(region.closed(), writes)]
        return [
            (use, inherited)
            for use, inherited in rivals
            if clock.get(use.key, 0) < use.tick and memory.first_time("use", use.key, use.tick, key)
        ]


def _within(uses: Iterable[Use], start: int, end: int) -> UseMap:
    part = Region(start, end)
    found = UseMap()
    for use in uses:
        if use.region.closed().overlaps(part):
            found.add(use)
    return found
