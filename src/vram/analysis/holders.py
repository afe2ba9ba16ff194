"""Who holds memory, as a tree for a flame graph: by stack from the outermost call inwards, or by module, tag
or stream first; and how two such trees differ.

Counts blocks of one moment, as `groups` does; a node has the bytes of all below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vram.errors import ConfigError
from vram.trace import Block, Trace

from .groups import UNKNOWN, key_of, label_of
from .places import frame_text

__all__ = ["TREES", "Holder", "compare_holders", "holders"]

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
    paths: dict[tuple[Any, int], tuple[str, ...]] = {}
    root = Holder("all")
    for block in blocks:
        place = (None if by == "stack" else key(block), block.stack)
        if place not in paths:
            paths[place] = _path(trace, by, *place)
        _add(root, paths[place], block)
    return root


def _path(trace: Trace, by: str, key: Any, stack: int) -> tuple[str, ...]:
    calls = trace.frames_of(stack)[::-1]
    frames = tuple(map(frame_text, calls[:MOST_LEVELS])) or (UNKNOWN["stack"],)
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
