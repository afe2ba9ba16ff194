"""Memory that moved between the device and the host in a recording of a pool that spills.

A move is an event of PyTorch's kind `user_defined`, so that readers that do not know moves skip it. Its stack
is one frame that says what it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from vram.arguments import require

from .model import Action, Frame, Trace
from .series import events_of

__all__ = ["RETURNED", "SPILLED", "Move", "find_moves", "moved_by_tag", "spilled_at"]

SPILLED, RETURNED = Frame("vram", 0, "spill"), Frame("vram", 0, "return")


@dataclass(frozen=True, slots=True)
class Move:
    """`size` bytes of the allocation at `address` moved to host memory, or `back` to the device."""

    event: int
    time_us: int
    address: int
    size: int
    tag: str
    back: bool


def find_moves(trace: Trace) -> list[Move]:
    """Every move of a recording, in order."""
    require(trace, Trace, "trace")
    kinds = {
        number: trace.frames_of(number) for number, frames in enumerate(trace.stacks) if len(frames) == 1
    }
    backs = {
        number: found == (RETURNED,) for number, found in kinds.items() if found[0] in (SPILLED, RETURNED)
    }
    return [
        Move(
            event,
            trace.time_us[event],
            trace.address[event],
            trace.size[event],
            trace.tags[trace.tag[event]],
            backs[trace.stack[event]],
        )
        for event in events_of(trace, (Action.USER_DEFINED,))
        if trace.stack[event] in backs
    ]


def moved_by_tag(trace: Trace) -> dict[str, tuple[int, int]]:
    """Bytes moved to the host and back for each tag, most first; "" for memory without one."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for move in find_moves(trace):
        totals[move.tag][move.back] += move.size
    return {tag: (out, back) for tag, (out, back) in sorted(totals.items(), key=lambda item: -sum(item[1]))}


def spilled_at(trace: Trace, event: int) -> int:
    """Bytes of live allocations that are in host memory when an event happens.

    Without what was there when the recording began, which it does not tell.
    """
    moves = {move.event: move for move in find_moves(trace) if move.event < event}
    addresses = {move.address for move in moves.values()}
    away: defaultdict[int, int] = defaultdict(int)
    for each in events_of(trace, (Action.USER_DEFINED, Action.FREE_REQUESTED)) if moves else ():
        if each >= event:
            break
        address = trace.address[each]
        if each in moves:
            move = moves[each]
            away[address] = max(0, away[address] - move.size) if move.back else away[address] + move.size
        elif address in addresses and trace.action[each] == Action.FREE_REQUESTED:
            away[address] = 0
    return sum(away.values())
