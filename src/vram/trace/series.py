"""Events by action, found with C loops, and the bytes that the recorded allocator reserved over time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, compress

from .model import Action, Trace

__all__ = [
    "BLOCK_ACTIONS",
    "MAPPING_ACTIONS",
    "SEGMENT_ACTIONS",
    "events_of",
    "pages_move",
    "reserved_before",
    "reserved_changes",
    "reserved_series",
]

BLOCK_ACTIONS = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
MAPPING_ACTIONS = (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
MOST_SEARCHED = 16
"""If fewer than one event in so many is wanted, searching for each is faster than looking at all."""
_GROWS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)


def events_of(trace: Trace, actions: Iterable[Action]) -> list[int]:
    """The numbers of the events with some actions, in order."""
    wanted = set(actions)
    marks = trace.action.tobytes().translate(bytes(code in wanted for code in range(256)))
    if marks.count(1) > trace.events // MOST_SEARCHED:
        return list(compress(range(trace.events), marks))
    found, event = [], marks.find(1)
    while event >= 0:
        found.append(event)
        event = marks.find(1, event + 1)
    return found


def pages_move(trace: Trace) -> bool:
    """Whether it is of a vram pool, whose pages move between addresses, so that growth has address 0.

    Without growth, as in a pool that was suspended all the time, the settings at the end decide.
    """
    mappings = events_of(trace, MAPPING_ACTIONS)
    if not mappings:
        return "reserved" in trace.settings
    return not any(map(trace.address.__getitem__, mappings))


def reserved_series(trace: Trace) -> list[int]:
    """Bytes the allocator held from the device after each event."""
    before = reserved_before(trace)
    return [before + change for change in _growth(trace)]


def reserved_before(trace: Trace) -> int:
    """Bytes it held before the first event: exact if the recording has its end, else a lower bound."""
    growth = list(accumulate(reserved_changes(trace).values()))
    final = _reserved_at_end(trace)
    if final is None:
        return max(0, -min(growth, default=0))
    return max(0, final - (growth[-1] if growth else 0))


def reserved_changes(trace: Trace) -> dict[int, int]:
    """Bytes gained from the device by each event that reserves or releases some, in order."""
    return {
        event: trace.size[event] if trace.action[event] in _GROWS else -trace.size[event]
        for event in events_of(trace, SEGMENT_ACTIONS + MAPPING_ACTIONS)
    }


def _growth(trace: Trace) -> list[int]:
    """Bytes gained from the device since before the first event, after each one."""
    changes = [0] * trace.events
    for event, change in reserved_changes(trace).items():
        changes[event] = change
    return list(accumulate(changes))


def _reserved_at_end(trace: Trace) -> int | None:
    if pages_move(trace):
        reserved = trace.settings.get("reserved")
        return reserved if isinstance(reserved, int) else None
    return sum(segment.total_size for segment in trace.segments) if trace.segments else None
