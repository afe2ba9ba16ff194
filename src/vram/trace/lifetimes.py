"""A trace as a program of allocations and frees that a pool can run again.

Addresses are gone: an allocation has a dense id instead, so that any pool may place it anywhere. What a pool
does with the program is for replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vram.arguments import require

from .model import EMPTY_STACK, Action, BlockState, Trace
from .series import reserved_before, reserved_series

__all__ = ["ALLOCATE", "FREE", "Lifetimes", "lifetimes", "peak_allocated", "rounded"]

ALLOCATE = 0
FREE = 1
AT_ONCE = -1
"""In `completed_us` and `completed_event`: the memory was free for its own stream the moment the program
freed it."""
BEFORE = -1
"""In `event`: the operation happened before the first event."""

GRANULE_BYTES = 512
"""Every allocator compared here rounds requests up to at least this."""


@dataclass(frozen=True)
class Lifetimes:
    """One entry an operation, in the order the program made them.

    - `op`: ALLOCATE or FREE; `id`: which allocation, dense from 0 in order of allocation
    - `size`: requested bytes, the same at an allocation and at its free
    - `stream`: the allocation's, an index into `Trace.streams` (`streams` of them)
    - `time_us`: as in the trace; 0 for what was live before its beginning
    - `completed_us`: for a free that another stream's work delayed, the time the memory really became free
      (the end of the recording where that is not in it); else AT_ONCE
    - `completed_event`: the event that says so (one past the last where none does); else AT_ONCE
    - `event`: index of the event in the trace, or BEFORE

    The first operations are the allocations that were live before the first event (`carried` of them).
    `segment_size` and `segment_address` are the plain segments the recorded allocator got from the driver, in
    order; none where the recording does not begin with the job, as those before it are not known.
    `emptied` are the events at which the program had cached memory given back (`torch.cuda.empty_cache`).
    """

    allocations: int
    carried: int
    streams: int
    op: array[int]
    id: array[int]
    size: array[int]
    stream: array[int]
    time_us: array[int]
    completed_us: array[int]
    completed_event: array[int]
    event: array[int]
    segment_size: array[int] = field(default_factory=lambda: array("Q"))
    segment_address: array[int] = field(default_factory=lambda: array("Q"))
    emptied: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.op)


class _Carried(NamedTuple):
    """An allocation made before the first event.

    `pending`: its free was requested before it as well; `until`: the event that first mentions it.
    """

    address: int
    size: int
    stream: int
    pending: bool
    until: int


def lifetimes(trace: Trace) -> Lifetimes:
    """The program in `trace`. An allocation ends when its free is requested.

    What was live before the beginning is allocated first: blocks whose free is in the trace without their
    allocation, and blocks in use at the end that the trace never mentions. Lifetimes mostly nest, so
    those freed last are taken to be the oldest.
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"{type(trace).__name__} is no Trace; vram.open reads one from a file")
    carried = _carried(trace)
    writer = _Writer()
    for allocation in carried:
        writer.allocate(allocation.address, allocation.size, allocation.stream, 0, BEFORE)
        if allocation.pending:
            writer.free(allocation.address, 0, BEFORE)
    _write_events(trace, writer)
    writer.finish(trace.span_us, trace.events)
    return Lifetimes(
        allocations=len(writer.sizes),
        carried=len(carried),
        streams=len(trace.streams),
        op=writer.op,
        id=writer.id,
        size=array("Q", map(writer.sizes.__getitem__, writer.id)),
        stream=array("I", map(writer.streams.__getitem__, writer.id)),
        time_us=writer.time_us,
        completed_us=writer.completed_us,
        completed_event=writer.completed_event,
        event=writer.event,
        **_segments(trace, complete=not carried),
        emptied=array("q", _emptied(trace)),
    )


def _carried(trace: Trace) -> list[_Carried]:
    """What the first mention of each address tells about the time before the first event."""
    found: list[_Carried] = []
    mentioned: set[int] = set()
    rows = zip(trace.action, trace.address, trace.size, trace.stream, strict=True)
    for event, (action, address, size, stream) in enumerate(rows):
        if action <= Action.FREE_COMPLETED and address not in mentioned:
            mentioned.add(address)
            if action != Action.ALLOC:
                found.append(_Carried(address, size, stream, action == Action.FREE_COMPLETED, event))
    for segment in trace.segments:
        for block in segment.blocks:
            if block.state != BlockState.FREE and block.address not in mentioned:
                pending = block.state == BlockState.PENDING
                found.append(
                    _Carried(block.address, block.requested_size, segment.stream, pending, trace.events)
                )
    # Those already freed come first: their memory was still in use, but no longer held by the program.
    return sorted(found, key=lambda each: (not each.pending, -each.until, each.address))


def _segments(trace: Trace, *, complete: bool) -> dict[str, array[int]]:
    segment_alloc = int(Action.SEGMENT_ALLOC)
    rows = zip(trace.action, trace.size, trace.address, strict=True)
    found = [(size, address) for action, size, address in rows if action == segment_alloc] if complete else []
    return {
        "segment_size": array("Q", [size for size, _ in found]),
        "segment_address": array("Q", [address for _, address in found]),
    }


GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
TAKEN = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)


def _emptied(trace: Trace) -> list[int]:
    """Where segments were given back, but not by an allocator that had run out and was about to ask again.

    In that case the request behind them has the same stack, or, where there are no stacks, would have taken
    the allocator above all it ever held.
    """
    if not any(action in trace.action for action in GIVEN_BACK):
        return []
    reserved = [reserved_before(trace), *reserved_series(trace)]
    limit = max(reserved)
    found = []
    for first, after in _runs_given_back(trace):
        following = trace.action[after] if after < trace.events else None
        if following in TAKEN or following == Action.OOM:
            stacks = {trace.stack[first], trace.stack[after]}
            full = following == Action.OOM or reserved[first] + trace.size[after] > limit
            if full if stacks == {EMPTY_STACK} else len(stacks) == 1:
                continue
        found.append(first)
    return found


def _runs_given_back(trace: Trace) -> Iterator[tuple[int, int]]:
    """Each run of events that give segments back: its first, and the one behind it."""
    first = None
    for event, action in enumerate(trace.action):
        if action in GIVEN_BACK:
            first = event if first is None else first
        elif first is not None:
            yield first, event
            first = None
    if first is not None:
        yield first, trace.events


def _write_events(trace: Trace, writer: _Writer) -> None:
    allocate, free, complete = int(Action.ALLOC), int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)
    rows = zip(trace.action, trace.address, trace.size, trace.stream, trace.time_us, strict=True)
    for event, (action, address, size, stream, time) in enumerate(rows):
        if action == allocate:
            writer.allocate(address, size, stream, time, event)
        elif action == free:
            writer.free(address, time, event)
        elif action == complete:
            writer.complete(address, time, event)


class _Writer:
    """Operations as they are found. `live`: id by address; `freed`: row and event of frees not completed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.streams: list[int] = []
        self.op = array("B")
        self.id = array("I")
        self.time_us = array("q")
        self.completed_us = array("q")
        self.completed_event = array("q")
        self.event = array("q")
        self.live: dict[int, int] = {}
        self.freed: dict[int, tuple[int, int]] = {}

    def allocate(self, address: int, size: int, stream: int, time: int, event: int) -> None:
        if address in self.live:  # its free was not recorded; memory has one owner at a time
            self.free(address, time, event)
        self.live[address] = identity = len(self.sizes)
        self.sizes.append(size)
        self.streams.append(stream)
        self._write(ALLOCATE, identity, time, event)

    def free(self, address: int, time: int, event: int) -> None:
        identity = self.live.pop(address, None)
        if identity is not None:
            self.freed[address] = (len(self.op), event)
            self._write(FREE, identity, time, event)

    def complete(self, address: int, time: int, event: int) -> None:
        """A free that nothing delayed completes in the very next event."""
        row, requested = self.freed.pop(address, (None, 0))
        if row is not None and (requested == BEFORE or event != requested + 1):
            self.completed_us[row] = time
            self.completed_event[row] = event

    def finish(self, end: int, events: int) -> None:
        for row, _ in self.freed.values():
            self.completed_us[row] = end
            self.completed_event[row] = events

    def _write(self, op: int, identity: int, time: int, event: int) -> None:
        self.op.append(op)
        self.id.append(identity)
        self.time_us.append(time)
        self.completed_us.append(AT_ONCE)
        self.completed_event.append(AT_ONCE)
        self.event.append(event)


def rounded(size: int) -> int:
    """`size`, rounded up to 512 bytes."""
    return (size + GRANULE_BYTES - 1) & -GRANULE_BYTES


def peak_allocated(program: Lifetimes) -> int:
    """The most bytes the program held at once, each request rounded up to 512 bytes.

    An allocation counts from the event that makes it until its free is requested (not until the free
    completes): what the program holds is its own doing, when the memory can be used again is the allocator's.
    PyTorch counts `allocated_bytes` so, apart from what it adds by handing out blocks larger than asked.
    """
    require(program, Lifetimes, "program")
    current = peak = 0
    mask = GRANULE_BYTES - 1
    for op, size in zip(program.op, program.size, strict=True):
        if op == ALLOCATE:
            current += (size + mask) & ~mask
            if current > peak:
                peak = current
        else:
            current -= (size + mask) & ~mask
    return peak
