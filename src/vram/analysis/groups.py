"""Who holds memory at one moment: live blocks grouped by stack, line, module, stream, tag, step or size.

Groups are a flat list, or a tree for a flame graph in which a node has the bytes of all nodes below it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.sizes import format_count, format_size
from vram.trace import BEFORE, Block, Frame, Trace, find_steps
from vram.trace.model import EARLIER, EMPTY_STACK

from .columns import Table
from .memory import memory_at
from .moments import find_moment
from .places import Phases, frame_text, is_framework, module_of, place_of

__all__ = [
    "GROUPINGS",
    "TREES",
    "Group",
    "Holder",
    "Key",
    "check_grouping",
    "compare_holders",
    "group_blocks",
    "holders",
    "key_of",
    "label_of",
    "place_name",
    "stack_labels",
    "summary",
]

GROUPINGS = ("stack", "line", "module", "stream", "tag", "step", "size")
"""How live blocks can be grouped; a line is the innermost line of the user's own program."""
Key: TypeAlias = "str | int | None"
_NUMBER = re.compile(r"(\d+)")

UNKNOWN = {"tag": "(no tag)", "step": "(outside steps)"}
"""What a group without a key is called; without a stack: `Trace.no_stack`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of one key. `frames` is the stack, innermost first, where they were grouped by it."""

    key: Key
    label: str
    bytes: int
    requested: int
    blocks: int
    frames: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Group {self.label!r}: {format_size(self.bytes)} in {format_count(self.blocks, 'block')}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `frames` only where there is a stack."""
        plain = {"group": self.label, "key": self.key, "bytes": self.bytes, "blocks": self.blocks}
        return {**plain, "frames": list(self.frames)} if self.frames else plain


def check_grouping(by: str) -> str:
    """`by`, or a ConfigError that names what there is."""
    if by not in GROUPINGS:
        raise ConfigError(f"cannot group by {by!r}; there is {', '.join(GROUPINGS)}")
    return by


def key_of(trace: Trace, by: str) -> Callable[[Block], Key]:
    """The function that tells the group of a block: comparable between recordings, except for `stack`."""
    check_grouping(by)
    if by == "stream":
        return lambda block: trace.streams[block.stream]
    if by == "size":
        return lambda block: 1 << max(0, block.requested_size - 1).bit_length()
    recorded = _recorded_key(trace, by)
    by_event = by in UNKNOWN

    def key(block: Block) -> Key:
        if block.event == BEFORE and (by_event or block.stack == EMPTY_STACK):
            return EARLIER if trace.events else None
        return recorded(block)

    return key


def _recorded_key(trace: Trace, by: str) -> Callable[[Block], Key]:
    """`key_of` for blocks whose step, tag or stack the recording can have."""
    if by == "step":
        steps = find_steps(trace)
        return lambda block: steps.of(block.event)
    if by == "tag":
        phases = Phases(trace)
        return lambda block: trace.tags[trace.tag[block.event]] or phases.at(trace.time_us[block.event])
    if by == "stack":
        return _stack_of(trace)
    named = cache(lambda stack: place_name(trace, by, stack))
    return lambda block: named(block.stack)


def _in_order(label: str) -> tuple[str, ...]:
    """A key that sorts numbers in labels as numbers: step 2 before step 10."""
    return tuple(part.zfill(20) if part.isdecimal() else part for part in _NUMBER.split(label))


def _stack_of(trace: Trace) -> Callable[[Block], Key]:
    """The number of a block's stack; of stacks with the same frames, that of the first."""
    first: dict[tuple[Frame, ...], int] = {}
    number = cache(lambda stack: first.setdefault(tuple(trace.frames_of(stack)), stack))
    return lambda block: number(block.stack) or None


def place_name(trace: Trace, by: str, stack: int) -> str | None:
    """The line or module of a stack."""
    frames = trace.frames_of(stack)
    if by == "module":
        return module_of(frames)
    place = place_of(frames)
    return frame_text(place) if place else None


def label_of(trace: Trace, by: str, key: Key) -> str:
    """A group's name for a person."""
    if key is None or key == EARLIER:
        return key or UNKNOWN.get(by, trace.no_stack)
    if by == "stack":
        frames = trace.frames_of(int(key))
        return _stack_label(frames)
    if by == "size":
        return f"up to {format_size(int(key))}"
    return f"{by} {key}" if by in ("stream", "step") else str(key)


Call: TypeAlias = tuple[Frame, int]
"""A frame, and how often it follows itself: recursion."""


def _stack_label(frames: Sequence[Frame], between: Iterable[Call] = ()) -> str:
    """The line of the program and the innermost call, with calls `between` them."""
    place = place_of(frames)
    inner = frame_text(frames[0])
    own = frame_text(place) if place else inner
    calls = [f"{frame_text(call)} ×{times}" if times > 1 else frame_text(call) for call, times in between]
    return own if own == inner and not calls else " ← ".join([own, *calls, inner])


def stack_labels(stacks: Sequence[Sequence[Frame]], empty: str = "") -> list[str]:
    """A short name for each stack, and `empty` for those without calls.

    Where names are equal, calls in which the stacks differ are added. Calls inside the framework are added
    only to stacks that do not differ in others.
    """
    labels = [_stack_label(frames) if frames else empty for frames in stacks]
    for framework in (False, True):
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for place, label in enumerate(labels):
            alike[label].append(place)
        for places in (each for each in alike.values() if len(each) > 1 and stacks[each[0]]):
            calls = [_calls(stacks[place], framework) for place in places]
            depths = _differing_depths(calls)
            for place, made in zip(places, calls, strict=True) if depths else ():
                shown = depths[: bisect_left(depths, len(made))]
                labels[place] = _stack_label(stacks[place], [made[depth] for depth in reversed(shown)])
    return labels


def _calls(frames: Sequence[Frame], framework: bool) -> list[Call]:
    """The calls of a stack, innermost first: the first, and after it those of the framework if wanted."""
    kept = [frame for frame in frames[1:] if framework or not is_framework(frame)]
    return [(call, len([*run])) for call, run in groupby((frames[0], *kept))]


def _differing_depths(stacks: Sequence[Sequence[Call]]) -> list[int]:
    """Depths at which the calls of `stacks` tell them apart, from the innermost outwards; few of them."""
    depths: list[int] = []
    alike = [list(range(len(stacks)))]  # groups of stacks that are not told apart yet
    depth = 0
    while alike:
        finer: list[list[int]] = []
        for group in alike:
            calls: defaultdict[Call | None, list[int]] = defaultdict(list)
            for place in group:
                calls[stacks[place][depth] if depth < len(stacks[place]) else None].append(place)
            ended = calls.pop(None, [])
            finer += [*calls.values(), *([ended] if ended else [])]
        if len(finer) > len(alike):
            depths.append(depth)
        depth += 1
        alike = [
            group for group in finer if len(group) > 1 and any(len(stacks[place]) > depth for place in group)
        ]
    return depths


def group_blocks(trace: Trace, blocks: Iterable[Block], by: str) -> list[Group]:
    """The blocks in groups, most bytes first."""
    key = key_of(trace, by)
    members: defaultdict[Key, list[Block]] = defaultdict(list)
    for block in blocks:
        members[key(block)].append(block)
    if by == "stack":
        labels = stack_labels([trace.frames_of(found) if isinstance(found, int) else () for found in members])
        names = [name or label_of(trace, by, found) for name, found in zip(labels, members, strict=True)]
    else:
        names = [label_of(trace, by, found) for found in members]
    groups = [
        _group(trace, by, found, label, held)
        for (found, held), label in zip(members.items(), names, strict=True)
    ]
    return sorted(groups, key=lambda group: (-group.bytes, _in_order(group.label)))


def _group(trace: Trace, by: str, key: Key, label: str, blocks: list[Block]) -> Group:
    by_stack = by == "stack"
    return Group(
        key=None if by_stack else key,  # the number of a stack means nothing outside its recording
        label=label,
        bytes=sum(block.size for block in blocks),
        requested=sum(block.requested_size for block in blocks),
        blocks=len(blocks),
        frames=tuple(map(frame_text, trace.frames_of(blocks[0].stack))) if by_stack else (),
    )


def summary(trace: Trace, by: str = "stack", at: str | int | None = "peak") -> Table:
    """Who holds memory at a moment, as a `Table`, most bytes first.

    Columns: `group` (its name), `key` (number of the stream or step, bytes of the size class; else null),
    `bytes`, `requested`, `blocks`, `share` of all live bytes, and `frames` of a stack, innermost first.
    """
    memory = memory_at(trace, find_moment(trace, at).event)
    groups = group_blocks(trace, memory.blocks(), check_grouping(by))
    whole = max(1, memory.allocated)
    return Table(
        {
            "group": ("string", [group.label for group in groups]),
            "key": ("uint64", [group.key if isinstance(group.key, int) else None for group in groups]),
            "bytes": ("int64", [group.bytes for group in groups]),
            "requested": ("int64", [group.requested for group in groups]),
            "blocks": ("int64", [group.blocks for group in groups]),
            "share": ("float64", [group.bytes / whole for group in groups]),
            "frames": ("strings", [list(group.frames) for group in groups]),
        }
    )


# ---- trees, for flame graphs -------------------------------------------------------------------------------

TREES = ("stack", "module", "tag", "stream")
"""What the first level of a tree may be."""
SMALLER = "(smaller ones)"
MOST_LEVELS = 250
"""Calls from the outermost inwards that have a node each; those inside them share one. Nodes nest in JSON,
and neither Python nor a browser takes thousands of levels."""


@dataclass
class Holder:
    """A node: bytes and blocks of all below it. `stacks` end at it; they index `Trace.stacks`.

    `before` is what it held at an earlier moment or in another recording, where two were compared.
    """

    name: str
    bytes: int = 0
    blocks: int = 0
    before: int = 0
    stacks: set[int] = field(default_factory=set)
    children: dict[str, Holder] = field(default_factory=dict)

    def child(self, name: str) -> Holder:
        """The child of that name, made where there is none."""
        return self.children.setdefault(name, Holder(name))

    def to_json(self, least: int = 0) -> dict[str, Any]:
        """Plain data; children that hold less than `least` bytes are one."""
        large = [each for each in self.children.values() if max(each.bytes, each.before) >= least]
        small = [each for each in self.children.values() if max(each.bytes, each.before) < least]
        rows = [each.to_json(least) for each in sorted(large, key=lambda each: (-each.bytes, each.name))]
        if small:
            rows.append(_joined(small).to_json())
        return {
            "name": self.name,
            "bytes": self.bytes,
            "before": self.before,
            "blocks": self.blocks,
            "stacks": sorted(self.stacks),
            "children": rows,
        }


def _joined(holders: list[Holder]) -> Holder:
    return Holder(
        SMALLER,
        sum(each.bytes for each in holders),
        sum(each.blocks for each in holders),
        sum(each.before for each in holders),
    )


def holders(trace: Trace, blocks: Iterable[Block], by: str = "stack") -> Holder:
    """The tree of `blocks`, with `by` the first level: one of TREES."""
    if by not in TREES:
        raise ConfigError(f"there is no tree by {by!r}; there is {', '.join(TREES)}")
    key = key_of(trace, by)
    paths: dict[tuple[Any, int, bool], tuple[str, ...]] = {}
    root = Holder("all")
    for block in blocks:
        place = (None if by == "stack" else key(block), block.stack, block.event == BEFORE)
        if place not in paths:
            paths[place] = _path(trace, by, *place)
        _add(root, paths[place], block)
    return root


def _path(trace: Trace, by: str, key: Any, stack: int, earlier: bool) -> tuple[str, ...]:
    calls = trace.frames_of(stack)[::-1]
    without = EARLIER if earlier and trace.events else trace.no_stack
    frames = tuple(map(frame_text, calls[:MOST_LEVELS])) or (without,)
    if len(calls) > MOST_LEVELS:
        frames = (*frames, f"({len(calls) - MOST_LEVELS} more calls)")
    return frames if by == "stack" else (label_of(trace, by, key), *frames)


def _add(root: Holder, path: tuple[str, ...], block: Block) -> None:
    node = root
    for name in (None, *path):
        node = node if name is None else node.child(name)
        node.bytes += block.size
        node.blocks += 1
    node.stacks.add(block.stack)


def compare_holders(before: Holder, after: Holder) -> Holder:
    """One tree of both: `bytes` of the second, `before` of the first. Numbers of stacks are the second's."""
    joined = Holder(after.name, after.bytes, after.blocks, before.bytes, set(after.stacks))
    nothing = Holder("")
    for name in {**after.children, **before.children}:
        joined.children[name] = compare_holders(
            before.children.get(name, nothing), after.children.get(name) or Holder(name)
        )
    return joined
