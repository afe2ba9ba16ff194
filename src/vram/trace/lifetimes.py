"""A trace as a program of allocations and frees that an allocator can run again.

Allocations have dense ids instead of addresses, so that any allocator may place them anywhere. `vram.replay`
runs the program.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from vram.arguments import require

from .allocations import Allocations, find_allocations
from .model import BEFORE, EMPTY_STACK, Action, Trace
from .roles import find_roles
from .series import events_of, reserved_before, reserved_series
from .steps import find_steps

__all__ = [
    "ALLOCATE",
    "FREE",
    "Lifetimes",
    "held_series",
    "intended",
    "last_failure",
    "lifetimes",
    "peak_allocated",
    "rounded",
]

ALLOCATE = 0
"""In `op`: an allocation begins."""
FREE = 1
"""In `op`: the program frees it."""
AT_ONCE = -1
"""In `completed_us` and `completed_event`: the memory was free for its own stream when the program freed
it."""

ELSEWHERE = 1 << 62
"""An address that no recording has."""
GRANULE_BYTES = 512
"""Every allocator compared here rounds requests up to a multiple of this."""


@dataclass(frozen=True)
class Lifetimes:
    """One entry per operation, in the order of the program.

    - `op`: ALLOCATE or FREE; `id`: which allocation, dense from 0 in order of allocation
    - `size`: requested bytes, the same at an allocation and at its free
    - `stream`: the allocation's, an index into `Trace.streams` (`streams` of them)
    - `time_us`: as in the trace; 0 for what was live before its beginning
    - `completed_us`: for a free that another stream's work delayed, the time at which the memory became free
      (the end of the recording if that is not in it); else AT_ONCE
    - `completed_event`: the event that says so (one past the last if none does); else AT_ONCE
    - `event`: index of the event in the trace, or BEFORE

    The first operations are the allocations that were live before the first event (`carried` of them).
    `segment_size` and `segment_address` are the plain segments that the recorded allocator got from the
    driver, in order; none if the recording does not begin with the job, because earlier ones are unknown.
    `emptied` are the events at which the program released cached memory (`torch.cuda.empty_cache`), `steps`
    those at which its steps begin (`find_steps`). `role` has the `Role` of each allocation; it is empty if
    the recording does not tell.
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
    steps: array[int] = field(default_factory=lambda: array("q"))
    role: array[int] = field(default_factory=lambda: array("B"))

    def __len__(self) -> int:
        return len(self.op)

    def __repr__(self) -> str:
        return f"<Lifetimes: {len(self):,} operations of {self.allocations:,} allocations>"


def lifetimes(trace: Trace) -> Lifetimes:
    """The program in `trace`. An allocation ends when its free is requested.

    Allocations from before the first event come first; see `find_allocations`.
    """
    _require_trace(trace)
    return _lifetimes(trace, find_allocations(trace))


def _lifetimes(trace: Trace, made: Allocations) -> Lifetimes:
    carried = bisect_right(made.start, BEFORE)
    op, identity, event = _operations(trace, made, carried)
    delays = _delays(made)
    completed = [
        delays[number] if code == FREE else AT_ONCE for code, number in zip(op, identity, strict=True)
    ]
    times = [*trace.time_us, trace.span_us, 0]  # the last two: behind the last event, and BEFORE
    return Lifetimes(
        allocations=len(made),
        carried=carried,
        streams=len(trace.streams),
        op=op,
        id=identity,
        size=array("Q", map(made.size.__getitem__, identity)),
        stream=array("I", map(made.stream.__getitem__, identity)),
        time_us=array("q", map(times.__getitem__, event)),
        completed_us=array("q", [AT_ONCE if each == AT_ONCE else times[each] for each in completed]),
        completed_event=array("q", completed),
        event=event,
        **_segments(trace, complete=not carried),
        emptied=array("q", _emptied(trace)),
        steps=array("q", find_steps(trace).first),
        role=find_roles(trace, made),
    )


def intended(trace: Trace) -> Lifetimes:
    """The program in `trace`; a failed request that it ends with counts as an allocation."""
    _require_trace(trace)
    failed = last_failure(trace)
    return lifetimes(trace) if failed is None else with_served(trace, failed)


def with_served(trace: Trace, event: int) -> Lifetimes:
    """The program in `trace`; the request that failed at `event` counts as an allocation."""
    return _lifetimes(trace, find_allocations(_with_served(trace, event)))


def _require_trace(trace: object) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(f"{type(trace).__name__} is not a Trace; vram.open reads one from a file")


def last_failure(trace: Trace) -> int | None:
    """The event of the failed request that `trace` ends with.

    None if no request failed, or if the program allocated again, and so continued without that memory.
    """
    failures = events_of(trace, [Action.OOM])
    return failures[-1] if failures and Action.ALLOC not in trace.action[failures[-1] :] else None


def _with_served(trace: Trace, event: int) -> Trace:
    action, address = trace.action[:], trace.address[:]
    action[event], address[event] = Action.ALLOC, ELSEWHERE
    return replace(trace, action=action, address=address)


def _operations(trace: Trace, made: Allocations, carried: int) -> tuple[array[int], array[int], array[int]]:
    """Operation, allocation and event of each row. An event frees and makes one allocation at most."""
    op, identity, events = array("B"), array("I"), array("q")

    def write(code: int, number: int, event: int) -> None:
        op.append(code)
        identity.append(number)
        events.append(event)

    for number in range(carried):
        write(ALLOCATE, number, BEFORE)
        if made.freed[number] == BEFORE:
            write(FREE, number, BEFORE)
    frees: list[int | None] = [None] * (trace.events + 1)  # the last one: what no event frees or makes
    makes = frees.copy()
    for number, (start, freed) in enumerate(zip(made.start, made.freed, strict=True)):
        frees[freed] = makes[start] = number
    for event in range(trace.events):
        if (freed_one := frees[event]) is not None:
            write(FREE, freed_one, event)
        if (new_one := makes[event]) is not None:
            write(ALLOCATE, new_one, event)
    return op, identity, events


def _delays(made: Allocations) -> list[int]:
    """For each allocation the event that completed its free, or AT_ONCE where nothing delayed it.

    A free that nothing delayed completes in the very next event.
    """
    return [
        AT_ONCE if freed != BEFORE and completed <= freed + 1 and completed < made.events else completed
        for freed, completed in zip(made.freed, made.completed, strict=True)
    ]


def _segments(trace: Trace, *, complete: bool) -> dict[str, array[int]]:
    segment_alloc = int(Action.SEGMENT_ALLOC)
    rows = zip(trace.action, trace.size, trace.address, strict=True)
    found = [(size, address) for action, size, address in rows if action == segment_alloc] if complete else []
    return {
        "segment_size": array("Q", [size for size, _ in found]),
        "segment_address": array("Q", [address for _, address in found]),
    }


RELEASED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
TAKEN = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)


def _emptied(trace: Trace) -> list[int]:
    """Where segments were released, but not by an allocator that ran out of memory and was about to retry.

    In that case the request after them has the same stack or, without stacks, would have exceeded the most
    that the allocator ever held.
    """
    if not any(action in trace.action for action in RELEASED):
        return []
    reserved = [reserved_before(trace), *reserved_series(trace)]
    limit = max(reserved)
    found = []
    for first, after in _released_runs(trace):
        following = trace.action[after] if after < trace.events else None
        if following in TAKEN or following == Action.OOM:
            stacks = {trace.stack[first], trace.stack[after]}
            full = following == Action.OOM or reserved[first] + trace.size[after] > limit
            if full if stacks == {EMPTY_STACK} else len(stacks) == 1:
                continue
        found.append(first)
    return found


def _released_runs(trace: Trace) -> Iterator[tuple[int, int]]:
    """Each run of events that release segments: its first event, and the one after it."""
    first = None
    for event, action in enumerate(trace.action):
        if action in RELEASED:
            first = event if first is None else first
        elif first is not None:
            yield first, event
            first = None
    if first is not None:
        yield first, trace.events


def rounded(size: int) -> int:
    """`size`, rounded up to 512 bytes."""
    return (size + GRANULE_BYTES - 1) & -GRANULE_BYTES


def peak_allocated(program: Lifetimes) -> int:
    """The most bytes the program held at once, each request rounded up to 512 bytes.

    An allocation counts from its event until its free is requested (not until the free completes): the
    program decides what it holds, the allocator when memory can be reused. PyTorch counts `allocated_bytes`
    in the same way, except that its blocks may be larger than requested.
    """
    return max(held_series(require(program, Lifetimes, "program")), default=0)


def held_series(program: Lifetimes) -> Iterator[int]:
    """Bytes the program holds after each operation, each request rounded up to 512 bytes."""
    sizes = {size: rounded(size) for size in set(program.size)}
    rows = zip(program.op, program.size, strict=True)
    return accumulate(sizes[size] if op == ALLOCATE else -sizes[size] for op, size in rows)
