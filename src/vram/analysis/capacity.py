"""How much memory a recorded allocator had: from the recording, from the user, or inferred.

A PyTorch snapshot says how much was free on the device at an out-of-memory, but not the size of the device
or the limit (`set_per_process_memory_fraction`). What is unknown is bounded, and the result says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from vram.core.verdict import Account, Possible, judge_limits, judge_moment, judge_request
from vram.sizes import format_size
from vram.trace import Action, Trace
from vram.trace.series import MAPPING_ACTIONS, SEGMENT_ACTIONS, events_of, pages_move, reserved_series

from .memory import Memory, memory_at
from .moments import allocated_series, find_moment
from .torch_rules import segment_bytes, whole_pages

__all__ = [
    "Capacity",
    "Request",
    "describe_limit",
    "find_capacity",
    "find_request",
    "judge",
    "of_torch",
    "open_account",
    "recorded_capacity",
]

GIB = 1 << 30
DEVICE_SIZES = (2, 4, 6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)
"""Memory sizes of GPUs, in GiB."""
SHOWN = 0.92
CONTEXT = GIB
"""A program sees at least this share of a device's size, minus this much for its own context."""

LIMIT_SHOWN = 'PyTorch\'s error message has it ("... GiB allowed")'
TOTAL_SHOWN = 'PyTorch\'s error message has it ("a total capacity of ... GiB"), and nvidia-smi shows it'
"""Where a user reads what a PyTorch snapshot does not contain."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that failed. `needed` is what the allocator would have reserved for it.

    `device_free` is what was free on the device, None if the recording does not say.
    """

    size: int
    needed: int
    stream: int
    stack: int
    device_free: int | None

    @property
    def limited(self) -> bool:
        """Whether it failed although the device had enough memory, so that a limit refused it."""
        return self.device_free is None or self.device_free >= self.needed


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that the allocator could reserve: `bytes`, exact if `known`, else a lower bound.

    `below` is an upper bound if only a range is known. `bound` is what limits it: "limit", "device", or None
    if nothing failed. `total` is the whole device, None if unknown. `note` says how it was found.
    """

    bytes: int | None
    known: bool
    bound: str | None
    below: int | None = None
    total: int | None = None
    note: str = ""


def find_request(trace: Trace, event: int) -> Request | None:
    """The request that failed at `event`; None if none did."""
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
    """What could be reserved; `given` is the device's memory or the limit, if the user knows it."""
    limit, total = _recorded(trace, "limit"), _recorded(trace, "device_total")
    objection = "" if given is None else _objection(trace, memory, request, given)
    if objection:
        given = None
    if request is None:
        bounds = [size for size in (given, limit, total) if size is not None]
        return Capacity(min(bounds, default=None), bool(bounds), None, total=total or given, note=objection)
    if given is not None:
        if request.limited and given < memory.reserved + request.needed:
            limit = given
        else:
            total = given
    find = partial(_limit, limit=limit) if request.limited else _device
    found = find(trace, memory, request, total=total)
    return replace(found, note=f"{objection} {found.note}".strip())


def _objection(trace: Trace, memory: Memory, request: Request | None, given: int) -> str:
    """Why `given` can be neither the limit nor the size of the device; empty if it can be one of them."""
    most = _most_reserved(trace, memory, request, ever=True)
    if given < most:
        return _contradiction(given, f"{format_size(most)} were reserved")
    if request is None:
        return ""
    served, visible = memory.reserved + request.needed, memory.reserved + (request.device_free or 0)
    if given >= visible or (request.limited and given < served):
        return ""
    elif request.limited:
        why = f"with {format_size(served)} the request would have been served"
    else:
        why = f"the program could use {format_size(visible)}"
    return _contradiction(given, why)


def _contradiction(given: int, why: str) -> str:
    return f"The capacity of {format_size(given)} contradicts the recording and is not used: {why}."


def recorded_capacity(trace: Trace) -> Capacity:
    """What the allocator of a recording could reserve, as far as the recording says."""
    if not trace.events:
        return Capacity(None, False, None)
    event = find_moment(trace).event
    return find_capacity(trace, memory_at(trace, event), find_request(trace, event), None)


def describe_limit(capacity: Capacity) -> str:
    """The limit in words for a sentence, such as "between 8.09 GiB and 9.59 GiB"; empty if unknown."""
    if capacity.bytes is None:
        return ""
    if capacity.below is not None:
        return f"between {format_size(capacity.bytes)} and {format_size(capacity.below)}"
    return format_size(capacity.bytes)


def _recorded(trace: Trace, name: str) -> int | None:
    """A setting that a recording of vram has about its pool."""
    size = trace.settings.get(name)
    return size if isinstance(size, int) and size > 0 else None


def _limit(trace: Trace, memory: Memory, request: Request, limit: int | None, total: int | None) -> Capacity:
    """A limit refused it: at least the most ever reserved, and less than the request would have needed."""
    if limit is not None:
        return Capacity(limit, True, "limit", total=total)
    if request.device_free is None and total is not None:
        note = "The free memory of the device is not in the recording: what is not in use counts as foreign."
        return Capacity(memory.reserved, False, "device", total=total, note=note)
    below = memory.reserved + request.needed
    most = _most_reserved(trace, memory, request, ever=True)
    if most >= below:  # the limit was raised later
        most = _most_reserved(trace, memory, request)
    least = max(memory.reserved, min(most, below - 1))
    where = f"{LIMIT_SHOWN}; pass it" if of_torch(trace, request) else "If you know the limit, pass it"
    note = (
        f"The limit is not in the recording: it was at least {format_size(least)}, the most ever reserved, "
        f"and below {format_size(below)}, which was refused. {where} with --capacity."
    )
    return Capacity(least, False, "limit", below=below, total=total, note=note)


def _most_reserved(trace: Trace, memory: Memory, request: Request | None, *, ever: bool = False) -> int:
    """The most reserved up to that moment, or ever; without recorded segments, the most allocated."""
    end = trace.events if ever else memory.event + 1
    if request is None or request.device_free is not None:
        return max([memory.reserved, *reserved_series(trace)[:end]])
    series = allocated_series(trace)
    return memory.allocated + max(series[:end]) - series[memory.event]


def of_torch(trace: Trace, request: Request) -> bool:
    """Whether PyTorch's own allocator refused it: only its recordings have segments with addresses."""
    return request.device_free is not None and not pages_move(trace)


def _device(trace: Trace, memory: Memory, request: Request, total: int | None) -> Capacity:
    """The device was full. The visible memory is known; what others hold is known if the size is."""
    visible = memory.reserved + (request.device_free or 0)
    if total is not None:
        return Capacity(visible, True, "device", total=max(total, visible))
    most = _most_reserved(trace, memory, request)
    total, note = visible, ""
    if most > visible:
        total = most
        note = (
            f"The program had {format_size(most)} of the device earlier and now sees {format_size(visible)}: "
            "others took the rest."
        )
    elif visible >= GIB and _least_shown(visible) > visible:
        total = _least_shown(visible)
        note = (
            f"The size of the device is not in the recording. The program sees {format_size(visible)} of it, "
            "less than it would see alone on any known GPU, so others hold at least "
            f"{format_size(total - visible)}. {TOTAL_SHOWN}; pass it with --capacity."
        )
    else:
        note = (
            f"The size of the device is not in the recording; {format_size(visible)} of it are visible. If "
            f"it is much larger, others hold the rest. {TOTAL_SHOWN}; pass it with --capacity."
        )
    return Capacity(visible, True, "device", total=total, note=note)


def _least_shown(visible: int) -> int:
    """What a program alone on the smallest device with at least `visible` bytes would see."""
    size = next((size * GIB for size in DEVICE_SIZES if size * GIB >= visible), visible)
    return int(SHOWN * size) - CONTEXT


def open_account(memory: Memory, request: Request | None, capacity: Capacity) -> Account:
    """Where the bytes of the device are. Suspended blocks are not on the device."""
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
    if request is None:  # what others held at that time is not recorded
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


def judge(account: Account, request: Request | None, capacity: Capacity) -> tuple[Possible, ...]:
    """The verdict on a moment; several, in the order of their limits, if a limit decides that is unknown."""
    if request is None:
        return (Possible(judge_moment(account)),)
    if capacity.below is None:
        return (Possible(judge_request(account, request.size, request.needed)),)
    return judge_limits(account, request.size, request.needed, capacity.below)
