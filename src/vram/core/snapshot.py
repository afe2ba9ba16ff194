"""The state of a pool at one moment: segments, blocks, and the allocations that outlived a mark.

Plain data. Pools take snapshots, front ends draw them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vram.arguments import require, shown
from vram.errors import ConfigError
from vram.sizes import format_count, format_size
from vram.trace.model import Frame

__all__ = ["Block", "Leak", "Mark", "Segment", "Snapshot", "Stack", "backed_runs"]

PAGE_BYTES = 2 << 20
"""Every byte of a block is on a page of at least this size, with this alignment."""

STATES = ("live", "suspended", "cached", "pending", "free")
"""The states of a block."""

Stack = tuple[Frame, ...]
"""Where an allocation was made, innermost frame first."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment: "live", "suspended", "cached", "pending" or "free" by its `state`.

    `size` is in bytes; `spilled` of them are in host memory. `stack` is where it was allocated, if it is live
    or pending and the pool keeps stacks.
    """

    address: int
    size: int
    requested: int
    state: str
    stream: int
    tag: str | None
    serial: int
    stack: Stack = ()
    spilled: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of addresses. Unless it is `plain`, its free blocks may have no memory behind them."""

    address: int
    size: int
    stream: int
    kind: str
    plain: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every segment and block of a pool at one moment, with the totals of that moment in bytes.

    `allocated` includes suspended and spilled blocks; `suspended` has the bytes of the pages that were
    released, `spilled` those of pages in host memory. Neither is in `reserved`.
    """

    device: str
    segments: tuple[Segment, ...]
    allocated: int
    reserved: int
    pending: int
    cached: int
    suspended: int = 0
    spilled: int = 0

    @classmethod
    def of(cls, device: str, segments: Iterable[Mapping[str, Any]], raw: Mapping[str, Any]) -> Snapshot:
        """The snapshot of what the native `raw_snapshot()` and `raw_stats()` returned."""
        return cls(
            device=device,
            segments=tuple(_segment(segment) for segment in segments),
            allocated=raw["live"],
            reserved=raw["reserved"]["current"],
            pending=raw["pending"]["current"],
            cached=raw["cached"],
            suspended=raw["suspended"],
            spilled=raw.get("spilled", 0),
        )

    def blocks(self, state: str | None = None) -> Iterator[Block]:
        """Every block, or those of one state."""
        if state not in (None, *STATES):
            raise ConfigError(f"a block is {', '.join(STATES)}, not {shown(state)}", value=state)
        return self._blocks(state)

    def _blocks(self, state: str | None) -> Iterator[Block]:
        for segment in self.segments:
            for block in segment.blocks:
                if state is None or block.state == state:
                    yield block

    def allocations(self) -> Iterator[Block]:
        """The blocks that the program holds: live or suspended."""
        for block in self.blocks():
            if block.state in ("live", "suspended"):
                yield block

    def by_tag(self) -> dict[str | None, int]:
        """Allocated bytes by tag, suspended ones included, most first; None for those without a tag."""
        totals: defaultdict[str | None, int] = defaultdict(int)
        for block in self.allocations():
            totals[block.tag] += block.size
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def spilled_by_tag(self) -> dict[str | None, int]:
        """Bytes of allocations in host memory by tag, most first; None for those without a tag."""
        totals: defaultdict[str | None, int] = defaultdict(int)
        for block in self.allocations():
            if block.spilled:
                totals[block.tag] += block.spilled
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain dicts and lists, ready for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from vram.core.html import snapshot_html

        return snapshot_html(self, [run for segment in self.segments for run in backed_runs(segment)])

    def __repr__(self) -> str:
        live = sum(1 for _ in self.blocks("live"))
        return (
            f"<vram.Snapshot of {self.device}: {format_count(len(self.segments), 'segment')}, "
            f"{format_count(live, 'live block')}, "
            f"{format_size(self.allocated)} allocated, {format_size(self.reserved)} reserved>"
        )


def _segment(raw: Mapping[str, Any]) -> Segment:
    return Segment(
        address=raw["address"],
        size=raw["bytes"],
        stream=raw["stream"],
        kind="small" if raw["small"] else "large",
        plain=raw["plain"],
        blocks=tuple(Block(*block) for block in raw["blocks"]),
    )


def backed_runs(segment: Segment) -> list[list[Block]]:
    """The runs of blocks of a segment that have memory behind them.

    In a mapped segment a free block is a range of addresses. Only the parts of it that share pages with its
    neighbours are known to be backed.
    """
    if segment.plain:
        return [list(segment.blocks)] if segment.blocks else []
    runs: list[list[Block]] = [[]]
    hole: Block | None = None
    for block in segment.blocks:
        if block.state == "free":
            hole = block if hole is None else _joined(hole, block)
            continue
        if hole is not None:
            _bridge(runs, hole, followed=True)
            hole = None
        runs[-1].append(block)
    if hole is not None:
        _bridge(runs, hole, followed=False)
    return [run for run in runs if run]


def _bridge(runs: list[list[Block]], hole: Block, *, followed: bool) -> None:
    """Append the backed beginning of a hole to the run before it; its backed end starts the next run."""
    begin, end = hole.address, hole.address + hole.size
    left = min(end, -(-begin // PAGE_BYTES) * PAGE_BYTES) if runs[-1] else begin
    right = max(begin, end // PAGE_BYTES * PAGE_BYTES) if followed else end
    if left >= right and runs[-1]:
        runs[-1].append(hole)
        return
    if left > begin:
        runs[-1].append(_part(hole, begin, left))
    runs.append([_part(hole, right, end)] if right < end else [])


def _joined(one: Block, next_one: Block) -> Block:
    return _part(one, one.address, next_one.address + next_one.size)


def _part(block: Block, begin: int, end: int) -> Block:
    return Block(begin, end - begin, 0, "free", block.stream, None, 0)


# ---- what outlived a mark ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a pool, from `Pool.mark()`: the allocations that were live then."""

    live: frozenset[tuple[int, int]]

    def __repr__(self) -> str:
        return f"<vram.Mark, {len(self.live)} live>"


@dataclass(frozen=True, slots=True)
class Leak:
    """Live allocations of one tag and requested size. `stacks` has where they were made, if recorded."""

    tag: str | None
    size: int
    count: int
    addresses: tuple[int, ...]
    stacks: tuple[Stack, ...]

    @property
    def bytes(self) -> int:
        """Bytes asked for by all of them."""
        return self.size * self.count

    def __repr__(self) -> str:
        return f"<Leak {self}>"

    def __str__(self) -> str:
        label = f" tagged {self.tag!r}" if self.tag is not None else ""
        text = f"{self.count} × {format_size(self.size)}{label}"
        if self.stacks and self.stacks[0]:
            frame = self.stacks[0][0]
            text += f", allocated at {frame.filename}:{frame.line} in {frame.name}"
        return text


def mark_of(snapshot: Snapshot) -> Mark:
    """Remember which allocations are live."""
    return Mark(frozenset((block.address, block.serial) for block in snapshot.allocations()))


def leaks_of(snapshot: Snapshot, since: Mark | None) -> list[Leak]:
    """Group what is live, and newer than `since`, by tag and requested size; most bytes first."""
    old = require(since, Mark, "since").live if since is not None else frozenset()
    groups: defaultdict[tuple[str | None, int], list[Block]] = defaultdict(list)
    for block in snapshot.allocations():
        if (block.address, block.serial) not in old:
            groups[block.tag, block.requested].append(block)
    found = [_leak(tag, size, members) for (tag, size), members in groups.items()]
    return sorted(found, key=lambda leak: (-leak.bytes, leak.tag or ""))


def _leak(tag: str | None, size: int, members: list[Block]) -> Leak:
    stacks = dict.fromkeys(block.stack for block in members if block.stack)
    return Leak(tag, size, len(members), tuple(block.address for block in members), tuple(stacks))
