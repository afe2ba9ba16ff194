"""What is known of each allocation: who used it last, who had its place before, and what is unordered.

The rules of race checking, without its words: `order` keeps the clocks, `race` watches and tells.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vram.order import Clock, Clocks, StreamKey, join
from vram.sites import Site

if TYPE_CHECKING:
    from vram.race import Race

__all__ = ["Allocation", "Books", "Use"]


@dataclass(slots=True, eq=False)
class Use:
    """What a stream did to an allocation, at its own tick."""

    key: StreamKey
    tick: int
    writes: bool
    site: Site


@dataclass(slots=True, eq=False)
class Allocation:
    """One allocation, live or freed, with the last uses of each stream; earlier ones come before these."""

    key: StreamKey  # the stream it belongs to
    address: int
    size: int
    born: int  # the tick of its stream at which it was made
    site: Site | None
    recorded: set[StreamKey] = field(default_factory=set)
    latest: dict[StreamKey, Use] = field(default_factory=dict)
    written: dict[StreamKey, Use] = field(default_factory=dict)
    left: dict[tuple[StreamKey, bool], Use] = field(default_factory=dict)  # by who had its place before
    freed: Site | None = None
    races: list[tuple[Race, Use]] = field(default_factory=list)  # told at its free
    took_over: list[Race] = field(default_factory=list)  # those that came true when it was allocated
    told: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.address + max(1, self.size)

    def first_time(self, *what: object) -> bool:
        """Whether this is news: each misuse of an allocation is told once."""
        if what in self.told:
            return False
        self.told.add(what)
        return True


class Ranges:
    """Which allocation an address belongs to: pieces that do not overlap, by address. Freed ones stay
    until something else is put there.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, Allocation]] = []

    def at(self, address: int) -> Allocation | None:
        i = bisect_right(self._starts, address) - 1
        return self._pieces[i][2] if i >= 0 and address < self._pieces[i][1] else None

    def put(self, new: Allocation) -> list[Allocation]:
        """Returns those that had the addresses before. What is left of freed ones stays theirs."""
        first = bisect_right(self._starts, new.address) - 1
        if first < 0 or self._pieces[first][1] <= new.address:
            first += 1
        last = bisect_left(self._starts, new.end)
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


class Books:
    """The rules: what is known of every allocation, and which uses and frees of it are not ordered."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self._ranges: defaultdict[Any, Ranges] = defaultdict(Ranges)

    def find(self, core: Any, address: int) -> Allocation | None:
        return self._ranges[core].at(address)

    def allocate(self, key: StreamKey, address: int, size: int, site: Site | None) -> Allocation:
        clock = self.clocks.advance(key)
        new = Allocation(key, address, size, clock[key], site)
        for old in self._ranges[key.core].put(new):
            new.took_over += [race for race, use in old.races if clock.get(use.key, 0) < use.tick]
            unfinished = [use for use in old.left.values() if not self.clocks.finished(use.key, use.tick)]
            _add_latest(new.left, unfinished)
        return new

    def unordered_at_free(self, memory: Allocation) -> list[Use]:
        """Uses that may still run when the memory serves again.

        The pool hands it out behind its own stream's work until now, and behind that of recorded streams.
        """
        before = self.clocks.view(memory.key)
        for key in memory.recorded:
            join(before, self.clocks.view(key))
        return [
            use
            for use in memory.latest.values()
            if before.get(use.key, 0) < use.tick and memory.first_time("free", use.key, use.tick)
        ]

    def free(self, memory: Allocation, site: Site) -> None:
        memory.freed = site
        waited: Clock = {}
        for key in memory.recorded:
            join(waited, self.clocks.view(key))
        uses = [*memory.latest.values(), *memory.written.values()]
        _add_latest(memory.left, [use for use in uses if waited.get(use.key, 0) < use.tick])

    def unordered_before(self, memory: Allocation, key: StreamKey, clock: Clock, writes: bool) -> list[Use]:
        """Earlier uses that a use at this point of a stream conflicts with and does not come after."""
        rivals = list((memory.latest if writes else memory.written).values())
        if clock.get(memory.key, 0) < memory.born:
            # Not behind its allocation: what was done there before, by other owners, may still run.
            rivals += [use for use in memory.left.values() if writes or use.writes]
        return [
            use
            for use in rivals
            if clock.get(use.key, 0) < use.tick and memory.first_time("use", use.key, use.tick, key)
        ]

    def use(self, memory: Allocation, key: StreamKey, clock: Clock, writes: bool, site: Site) -> None:
        if memory.freed:
            return
        use = memory.latest[key] = Use(key, clock[key], writes, site)
        if writes:
            memory.written[key] = use


def _add_latest(left: dict[tuple[StreamKey, bool], Use], uses: list[Use]) -> None:
    for use in uses:
        known = left.get((use.key, use.writes))
        if known is None or known.tick < use.tick:
            left[use.key, use.writes] = use
