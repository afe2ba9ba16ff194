"""Every allocation of a recording as NumPy columns, and in groups by stream, tag, module or line.

`memory` describes one moment, this module all of them: an allocation is live from `start` to `freed`, and
pending from there to `completed`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vram.arguments import require
from vram.errors import ConfigError
from vram.trace import BEFORE, Trace, allocations
from vram.trace.model import EARLIER, EMPTY_STACK

from .columns import Column, column, numpy
from .groups import label_of, place_name
from .memory import final_sizes
from .places import Phases
from .torch_rules import Rules

__all__ = ["SPLITS", "Allocations", "Split", "find_allocations", "split_allocations"]

SPLITS = ("stream", "tag", "module", "line")
"""What memory over time can be split by; besides these `stack`, which has many groups."""


@dataclass(frozen=True)
class Allocations:
    """The columns of `vram.trace.allocations.Allocations` as NumPy arrays.

    `held` is the rounded size where it is unknown.
    """

    events: int
    start: Column
    freed: Column
    completed: Column
    address: Column
    size: Column
    held: Column
    stream: Column
    stack: Column
    tag: Column

    def __len__(self) -> int:
        return len(self.start)

    @property
    def delayed(self) -> Column:
        """Which frees were delayed: one that was not is completed by the very next event."""
        return (self.completed > self.freed + 1) | (
            (self.completed == self.events) & (self.freed < self.events)
        )


def find_allocations(trace: Trace, found: allocations.Allocations | None = None) -> Allocations:
    """All of them; those made before the first event come first. `found` are those of `trace`, if known."""
    np = numpy()
    if found is None:
        found = allocations.find_allocations(trace)
    found = require(found, allocations.Allocations, "found")
    columns = {each.name: np.asarray(getattr(found, each.name)) for each in fields(found)[1:]}
    size, held = columns["size"].astype(np.int64), columns["held"].astype(np.int64)
    held = np.where(held > 0, held, _rounded(trace, size))
    _set_final(trace, columns, held)
    return Allocations(trace.events, **{**columns, "size": size, "held": held})


def _set_final(trace: Trace, columns: dict[str, Column], held: Column) -> None:
    """Set the sizes of blocks in use at the end, which the recording knows exactly."""
    np = numpy()
    final = final_sizes(trace)
    for number in np.flatnonzero(columns["completed"] == trace.events).tolist():
        held[number] = final.get(int(columns["address"][number]), held[number])


def _rounded(trace: Trace, size: Column) -> Column:
    np = numpy()
    rounded = Rules(trace.settings).rounded
    sizes, places = np.unique(size, return_inverse=True)
    return np.array([rounded(each) for each in sizes.tolist()], np.int64)[places]


# ---- groups ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Which group each allocation belongs to: `group[i]` indexes `labels` and `keys`, those of `groups`."""

    labels: tuple[str, ...]
    keys: tuple[str | int | None, ...]
    group: Column


def split_allocations(trace: Trace, made: Allocations, by: str) -> Split:
    """The allocations by stack, line, module, stream or tag; groups as in `groups`."""
    np = numpy()
    if by not in (*SPLITS, "stack"):
        raise ConfigError(f"cannot split by {by!r}; there is {', '.join(SPLITS)} and stack")
    if by == "tag":
        names, numbers = _tags(trace, made)
    elif by == "stream":
        names, numbers = list(trace.streams), made.stream
    elif by == "stack":
        names, numbers = (
            [*(stack or None for stack in range(len(trace.stacks))), EARLIER],
            _stacks(trace, made),
        )
    else:
        names = [*(place_name(trace, by, stack) for stack in range(len(trace.stacks))), EARLIER]
        numbers = _stacks(trace, made)
    keys: list[Any] = list(dict.fromkeys(names))
    places = {key: place for place, key in enumerate(keys)}
    found = np.array([places[name] for name in names], np.int64)
    return Split(tuple(label_of(trace, by, key) for key in keys), tuple(keys), found[numbers])


def _stacks(trace: Trace, made: Allocations) -> Column:
    """The stack of each allocation; one past the last for those that were made before the recording."""
    earlier = (made.start == BEFORE) & (made.stack == EMPTY_STACK) & bool(trace.events)
    return numpy().where(earlier, len(trace.stacks), made.stack)


def _tags(trace: Trace, made: Allocations) -> tuple[list[Any], Column]:
    """The tag of each allocation, else the phase in which it was made."""
    np = numpy()
    phases = Phases(trace)
    names: list[Any] = [None, *trace.tags[1:], None, *phases.names, EARLIER]
    recorded = made.start >= 0
    times = column(trace, "time_us")
    when = times[np.maximum(made.start, 0)] if trace.events else np.zeros(len(made), np.int64)
    phase = np.searchsorted(np.array(phases.times, np.int64), when, side="right") + len(trace.tags)
    tag = made.tag.astype(np.int64)
    tag = np.where(recorded | (not trace.events), tag, len(names) - 1)
    return names, np.where(recorded & (tag == 0), phase, tag)
