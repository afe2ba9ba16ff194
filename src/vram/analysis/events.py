"""Events of a recording by what they say, found at the speed of C loops over the column of actions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from vram.trace import Action, Trace

__all__ = ["BLOCK_ACTIONS", "MAPPING_ACTIONS", "SEGMENT_ACTIONS", "events_of", "pages_move"]

BLOCK_ACTIONS = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
MAPPING_ACTIONS = (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)


def events_of(trace: Trace, actions: Iterable[Action]) -> list[int]:
    """The numbers of the events of some actions, in order."""
    wanted = bytes(code in set(actions) for code in range(256))
    return list(compress(range(trace.events), trace.action.tobytes().translate(wanted)))


def pages_move(trace: Trace) -> bool:
    """Whether it is of a pool of ours: its pages move under the addresses, so that growth has none (0)."""
    mappings = events_of(trace, MAPPING_ACTIONS)
    return bool(mappings) and not any(map(trace.address.__getitem__, mappings))
