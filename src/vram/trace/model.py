"""The recording in memory: columns with one row per event, interned stacks, segments and blocks at the end.

Plain data. `files`, `torch_snapshot` and `sandbox` read files; `allocations` and `lifetimes` interpret it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from html import escape
from typing import NamedTuple

from vram.arguments import whole_number
from vram.sizes import format_count

__all__ = [
    "BEFORE",
    "COLUMNS",
    "EARLIER",
    "Action",
    "Annotation",
    "Block",
    "BlockState",
    "Frame",
    "Segment",
    "Trace",
]

COLUMNS = {
    "action": "B",
    "stream": "I",
    "address": "Q",
    "size": "Q",
    "time_us": "q",
    "stack": "I",
    "tag": "I",
}
"""The columns of a trace and their types, as typecodes of `array`."""
EMPTY_STACK = 0
"""The stack of an event that was recorded without one: `stacks[0]` is always `()`."""
EARLIER = "(allocated before the recording)"
"""What a person sees in place of the stack, tag or step of an allocation that the recording does not have."""
NO_STACK = "(no Python stack)"
IN_BACKWARD = "(no Python stack, as in a backward pass)"
"""What a person sees in place of the empty stack of an event: see `Trace.no_stack`."""
BEFORE = -1
"""In place of the number of an event: it happened before the first one."""
NO_TAG = 0
"""The tag of an event that has none: `tags[0]` is always `""`."""


class Action(IntEnum):
    """What happened in an event; the names are PyTorch's in upper case."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    USER_DEFINED = 9


class BlockState(IntEnum):
    """A block is live, pending (freed, but a stream may still use it) or free."""

    FREE = 0
    LIVE = 1
    PENDING = 2


class Frame(NamedTuple):
    """One place in a program."""

    filename: str
    line: int
    name: str

    @property
    def begins_backward(self) -> bool:
        """Whether it is where PyTorch begins a backward pass; some recordings have qualified names."""
        name = self.name.rpartition(".")[2]
        return name in ("backward", "grad", "_engine_run_backward") and (
            "torch/autograd/" in self.filename.replace("\\", "/")
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment. `stack` indexes `Trace.stacks`, `stream` `Trace.streams`.

    `event` is that of its allocation where it is known, as in `vram.analysis.Memory`.
    """

    address: int
    size: int
    requested_size: int
    state: BlockState
    stack: int = EMPTY_STACK
    stream: int = 0
    event: int = BEFORE

    @property
    def pending(self) -> bool:
        """Whether it was freed, but a stream may still use it."""
        return self.state == BlockState.PENDING


@dataclass(frozen=True, slots=True)
class Segment:
    """A range that the allocator holds. `stream` indexes `Trace.streams`.

    `blocks` are all of its blocks where it is of `Trace.segments`, those in use where it is of a
    `vram.analysis.Memory`.
    """

    address: int
    total_size: int
    stream: int
    kind: str
    is_expandable: bool = False
    pool_id: tuple[int, int] = (0, 0)
    stack: int = EMPTY_STACK
    blocks: tuple[Block, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Annotation:
    """A mark between events, such as the start or end of an optimizer step; `time_us` as in `Trace`."""

    stage: str
    name: str
    time_us: int


@dataclass(frozen=True, repr=False)
class Trace:
    """Every event of one device, and the segments at the end. Columns have one entry per event:

    - `action`: an `Action`; `stream`: index into `streams` (the handles); `stack`: index into `stacks`
    - `address`: where; for `OOM` the bytes that were free on the device
    - `size`: for allocations and frees the bytes that the program requested, not rounded
    - `time_us`: microseconds since the first event, which happened at `start_us`; all zero unless `timed`
    - `tag`: index into `tags`, the labels of `vram.tag` or PyTorch's user metadata; all zero if not given

    `truncated` is set if a recording of vram ended without being closed; it has everything that was complete.
    `dropped` counts events known to be lost: in a full journal, in files that were rotated away, or because
    PyTorch's history was full. There may be more, and `complete` says whether an allocation is missing.
    """

    source: str
    device: int
    devices: tuple[int, ...]
    start_us: int
    timed: bool
    action: array[int]
    stream: array[int]
    address: array[int]
    size: array[int]
    time_us: array[int]
    stack: array[int]
    streams: tuple[int, ...]
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    segments: tuple[Segment, ...] = ()
    annotations: tuple[Annotation, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    tag: array[int] = field(default_factory=lambda: array("I"))
    tags: tuple[str, ...] = ("",)
    truncated: bool = False
    dropped: int = 0

    def __post_init__(self) -> None:
        if len(self.tag) != len(self.action):
            object.__setattr__(self, "tag", array("I", bytes(4 * len(self.action))))

    @property
    def events(self) -> int:
        """The number of events."""
        return len(self.action)

    @property
    def span_us(self) -> int:
        """Recorded microseconds from the first to the last event."""
        return self.time_us[-1] if self.time_us else 0

    @cached_property
    def complete(self) -> bool:
        """Whether the recording has every allocation that it mentions, so nothing was live before it."""
        allocated: set[int] = set()
        for action, address in zip(self.action, self.address, strict=True):
            if action == Action.ALLOC:
                allocated.add(address)
            elif action <= Action.FREE_COMPLETED and address not in allocated:
                return False
        return all(
            block.address in allocated
            for segment in self.segments
            for block in segment.blocks
            if block.state != BlockState.FREE
        )

    @cached_property
    def no_stack(self) -> str:
        """What a person sees in place of the empty stack of an event.

        Threads of PyTorch's backward pass run no Python code.
        """
        return IN_BACKWARD if any(frame.begins_backward for frame in self.frames) else NO_STACK

    def heading(self) -> dict[str, object]:
        """What identifies a recording in the JSON of every command, and whether it is complete."""
        return {
            "source": self.source,
            "device": self.device,
            "events": self.events,
            "dropped": self.dropped,
            "complete": self.complete,
            "truncated": self.truncated,
        }

    def frames_of(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack, innermost first."""
        number = whole_number(stack, "stack", most=len(self.stacks) - 1)
        return tuple(self.frames[index] for index in self.stacks[number])

    def _repr_html_(self) -> str:
        facts = {
            "file": self.source,
            "device": f"{self.device} of {', '.join(map(str, self.devices))}",
            "events": f"{self.events:,}",
            "time": f"{self.span_us / 1e6:,.3f} s",
            "dropped": f"{self.dropped:,}",
            "streams": f"{len(self.streams):,}",
            "stacks": f"{len(self.stacks):,}",
            "segments at the end": f"{len(self.segments):,}",
        }
        rows = "".join(f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
        return f"<p><b>Trace</b></p><table><tbody>{rows}</tbody></table>"

    def __repr__(self) -> str:
        return (
            f"<Trace {self.source!r}: {self.events} events on device {self.device}, "
            f"{format_count(len(self.streams), 'stream')}, {format_count(len(self.stacks), 'stack')}, "
            f"{format_count(len(self.segments), 'segment')}>"
        )
