"""How much memory there was for a recorded allocator: what the recording says, what was given, what follows.

A PyTorch snapshot tells what the device had free at an out-of-memory, but neither how large the device is nor
which limit was set (`set_per_process_memory_fraction`). What is not told is bounded, and called so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vram.core.verdict import Account
from vram.sizes import format_size
from vram.trace import Action, Trace
from vram.trace.series import MAPPING_ACTIONS, SEGMENT_ACTIONS, events_of, pages_move, reserved_series

from .memory import Memory
from .moments import allocated_series
from .torch_rules import segment_bytes, whole_pages

__all__ = ["Capacity", "Request", "find_capacity", "find_request", "open_account"]

GIB = 1 << 30
DEVICE_SIZES = (2, 4, 6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)
"""GiB of memory that devices are sold with."""
SHOWN = 0.92
CONTEXT = GIB
"""A device shows a program at least so much of its size, less so much for the program's own context."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that failed. `needed` is what the allocator would have taken from the device for it.

    `device_free` is what the device had left, None where the recording does not say.
    """

    size: int
    needed: int
    stream: int
    stack: int
    device_free: int | None

    @property
    def limited(self) -> bool:
        """Whether it failed although the device had enough: then a limit refused it."""
        return self.device_free is None or self.device_free >= self.needed


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the allocator could reserve at most: `bytes`, known exactly or at least so much.

    `below` bounds it from above where only a range is known. `bound` says what limits: "limit", "device", or
    None where nothing failed. `total` is the whole device, None if unknown. `note` says how it was found.
    """

    bytes: int | None
    known: bool
    bound: str | None
    below: int | None = None
    total: int | None = None
    note: str = ""


def find_request(trace: Trace, event: int) -> Request | None:
    """The request that failed at `event`; None where none did."""
    if event < 0 or trace.action[event] != Action.OOM:
        return None
    size = trace.size[event]
    segmented = bool(trace.segments or events_of(trace, SEGMENT_ACTIONS + MAPPING_ACTIONS))
    growth = whole_pages if pages_move(trace) else segment_bytes
    return Request(
        size=size,
        needed=growth(size) if segmented else size,
        stream=trace.stream[event],
        stack=trace.stack[event],
        device_free=trace.address[event] if segmented else None,
    )


def find_capacity(trace: Trace, memory: Memory, request: Request | None, given: int | None) -> Capacity:
    """What there was to reserve; `given` is the device's memory or the limit, as the user knows it."""
    limit, total = _recorded(trace, "limit"), _recorded(trace, "device_total")
    if request is None:
        bounds = [size for size in (given, limit, total) if size is not None]
        return Capacity(min(bounds, default=None), bool(bounds), None, total=total or given)
    if request.limited and given is not None and memory.reserved <= given < memory.reserved + request.needed:
        limit = given
    elif given is not None:
        total = given
    if request.limited:
        return _limit(trace, memory, request, limit, total)
    return _device(trace, memory, request, total)


def _recorded(trace: Trace, name: str) -> int | None:
    """What a recording of ours says of its pool."""
    size = trace.settings.get(name)
    return size if isinstance(size, int) and size > 0 else None


def _limit(trace: Trace, memory: Memory, request: Request, limit: int | None, total: int | None) -> Capacity:
    """A limit stopped it: at least the most ever reserved, and less than the request would have taken."""
    if limit is not None:
        return Capacity(limit, True, "limit", total=total)
    if request.device_free is None and total is not None:
        note = (
            "The recording does not say what the device had free: all that is not in use counts as foreign."
        )
        return Capacity(memory.reserved, False, "device", total=total, note=note)
    below = memory.reserved + request.needed
    least = max(memory.reserved, min(_most_reserved(trace, memory, request), below - 1))
    note = (
        f"The limit is not in the recording: it was at least {format_size(least)}, the most ever reserved, "
        f"and below {format_size(below)}, which was refused. Pass the limit as the capacity if you know it."
    )
    return Capacity(least, False, "limit", below=below, total=total, note=note)


def _most_reserved(trace: Trace, memory: Memory, request: Request) -> int:
    """Up to the moment; where segments are not recorded, what was allocated."""
    if request.device_free is not None:
        return max(reserved_series(trace)[: memory.event + 1])
    series = allocated_series(trace)[: memory.event + 1]
    return memory.allocated + max(series) - series[-1]


def _device(trace: Trace, memory: Memory, request: Request, total: int | None) -> Capacity:
    """The device itself was full. What is visible is known, what others hold only if the device is."""
    visible = memory.reserved + (request.device_free or 0)
    if total is not None:
        return Capacity(visible, True, "device", total=max(total, visible))
    most = _most_reserved(trace, memory, request)
    total, note = visible, ""
    if most > visible:
        total = most
        note = (
            f"The device gave {format_size(most)} earlier, and now shows {format_size(visible)} in all: "
            "somebody else took the rest."
        )
    elif visible >= GIB and _least_shown(visible) > visible:
        total = _least_shown(visible)
        note = (
            f"The size of the device is not in the recording. It shows {format_size(visible)}, less than any "
            "device sold shows to a program that is alone on it, so at least "
            f"{format_size(total - visible)} must be held by others. Pass its size as the capacity to know."
        )
    else:
        note = (
            f"The size of the device is not in the recording; {format_size(visible)} of it are visible. If "
            "it is much larger, others hold the rest: pass its size as the capacity to know."
        )
    return Capacity(visible, True, "device", total=total, note=note)


def _least_shown(visible: int) -> int:
    """What the smallest device that could show `visible` bytes shows to a program that is alone on it."""
    size = next((size * GIB for size in DEVICE_SIZES if size * GIB >= visible), visible)
    return int(SHOWN * size) - CONTEXT


def open_account(memory: Memory, request: Request | None, capacity: Capacity) -> Account:
    """Where the bytes of the device are. Suspended blocks have none there."""
    resident = max(0, min(memory.allocated, memory.reserved - memory.pending - memory.cached))
    demand = min(memory.requested, resident)
    held = Account(
        demand=demand,
        rounding=resident - demand,
        pending=memory.pending,
        fragmentation=memory.reserved - resident - memory.pending - memory.cached,
        cached=memory.cached,
    )
    unused = max(0, (capacity.bytes or 0) - memory.reserved)
    visible = memory.reserved + unused
    if request is None:  # what others held then is not recorded, and is not made up
        visible = max(visible, capacity.total or 0)
    elif request.device_free is not None:
        visible = max(visible, memory.reserved + request.device_free)
    return replace(
        held,
        unused=unused,
        withheld=visible - memory.reserved - unused,
        foreign=max(0, (capacity.total or 0) - visible),
        limit=capacity.bytes if capacity.bound == "limit" else None,
    )
