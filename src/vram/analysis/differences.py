"""How two runs differ: the gap between the memory at their peaks, attributed to places in the program.

Groups are those of `groups`. A line is the same in both runs if its file, number and function are. A line
that only moved within its function, as between two versions of a program, is the same too: see `_join_moved`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.sizes import format_count
from vram.trace import Trace

from .columns import Table
from .groups import Group, check_grouping, group_blocks
from .memory import memory_at
from .moments import find_moment

__all__ = ["Difference", "difference"]

Row: TypeAlias = "tuple[str, Group, Group]"
_LINE = re.compile(r"(.+):(\d+) (.+)", re.DOTALL)
"""A line as `groups` names it: file, number and function."""
MOST_PAIRS = 100_000
"""Of lines in a function that are compared; beyond it, lines are the same only if their numbers are."""


@dataclass(frozen=True)
class Difference:
    """Two runs at one moment each. `before` and `after` are live bytes, `events` the moments.

    `table` has a row for each group that differs, most first: `group`, bytes `before` and `after`, the `gap`,
    and blocks in both. The gaps of the rows sum to the gap of the runs.
    """

    by: str
    before: int
    after: int
    events: tuple[int, int]
    table: Table

    @property
    def gap(self) -> int:
        """Bytes that the second run holds beyond the first; negative if it holds less."""
        return self.after - self.before

    @property
    def growth(self) -> float:
        """The gap as a share of what the first run holds; infinite if only the second holds anything."""
        if self.before:
            return self.gap / self.before
        return float("inf") if self.after else 0.0

    def _repr_html_(self) -> str:
        from .html import difference_html

        return difference_html(self)

    def __repr__(self) -> str:
        groups = format_count(len(self.table), "group")
        return f"<Difference by {self.by}: {self.gap:+,} bytes in {groups}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "by": self.by,
            "before": self.before,
            "after": self.after,
            "gap": self.gap,
            "events": list(self.events),
            "groups": self.table.to_pylist(),
        }


def difference(first: Trace, second: Trace, by: str = "line", at: str | int | None = "peak") -> Difference:
    """What `second` holds beyond `first`, each at the moment `at` (see `find_moment`), by groups."""
    if check_grouping(by) == "stack":
        raise ConfigError("stacks of two runs differ; compare by line or module")
    events = (find_moment(first, at).event, find_moment(second, at).event)
    sides = [
        {group.label: group for group in group_blocks(trace, memory_at(trace, event).blocks(), by)}
        for trace, event in zip((first, second), events, strict=True)
    ]
    nothing = Group(None, "", 0, 0, 0)
    rows = [
        (label, sides[0].get(label, nothing), sides[1].get(label, nothing))
        for label in {**sides[0], **sides[1]}
    ]
    if by == "line":
        rows = _without_common_folder(_join_moved(rows))
    rows = [row for row in rows if row[1].bytes != row[2].bytes]
    rows.sort(key=lambda row: (-abs(row[2].bytes - row[1].bytes), row[0]))
    return Difference(
        by,
        sum(group.bytes for group in sides[0].values()),
        sum(group.bytes for group in sides[1].values()),
        events,
        Table(
            {
                "group": ("string", [label for label, _, _ in rows]),
                "before": ("int64", [before.bytes for _, before, _ in rows]),
                "after": ("int64", [after.bytes for _, _, after in rows]),
                "gap": ("int64", [after.bytes - before.bytes for _, before, after in rows]),
                "blocks_before": ("int64", [before.blocks for _, before, _ in rows]),
                "blocks_after": ("int64", [after.blocks for _, _, after in rows]),
            }
        ),
    )


def _join_moved(rows: list[Row]) -> list[Row]:
    """Rows in which a line that moved within its function is one row, under its new number.

    If the lines of a function have other numbers in the second run, they are aligned in their order, so that
    the sum of what differs is least.
    """
    kept = []
    functions: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        place = _LINE.fullmatch(row[0])
        if place is None:
            kept.append(row)
        else:
            functions[place[1], place[3]].append(row)
    for lines in functions.values():
        before = sorted((row for row in lines if row[1].blocks), key=_number)
        after = sorted((row for row in lines if row[2].blocks), key=_number)
        moved = before != after and len(before) * len(after) <= MOST_PAIRS
        kept += _aligned(before, after) if moved else lines
    return kept


def _aligned(before: list[Row], after: list[Row]) -> list[Row]:
    """Pairs of lines in order, and lines without a partner, so that the sum of their differences is least."""
    nothing = Group(None, "", 0, 0, 0)
    least = [[0] * (len(after) + 1) for _ in range(len(before) + 1)]  # of the lines from there on
    for i in range(len(before), -1, -1):
        for j in range(len(after), -1, -1):
            if i < len(before) or j < len(after):
                least[i][j] = min(cost for cost, _, _ in _choices(least, before, after, i, j))
    joined: list[Row] = []
    i = j = 0
    while i < len(before) or j < len(after):
        _, down, right = min(_choices(least, before, after, i, j))
        old = before[i][1] if down else nothing
        new = after[j][2] if right else nothing
        joined.append((after[j][0] if right else before[i][0], old, new))
        i, j = i + down, j + right
    return joined


def _choices(
    least: list[list[int]], before: list[Row], after: list[Row], i: int, j: int
) -> Iterator[tuple[int, int, int]]:
    """The cost of pairing lines `i` and `j`, or of leaving out either, and how far each choice goes."""
    if i < len(before) and j < len(after):
        yield abs(before[i][1].bytes - after[j][2].bytes) + least[i + 1][j + 1], 1, 1
    if i < len(before):
        yield before[i][1].bytes + least[i + 1][j], 1, 0
    if j < len(after):
        yield after[j][2].bytes + least[i][j + 1], 0, 1


def _number(row: Row) -> int:
    place = _LINE.fullmatch(row[0])
    return int(place[2]) if place else 0


def _without_common_folder(rows: list[Row]) -> list[Row]:
    """Rows without the folder that all files with an absolute path are in, such as that of a checkout."""
    files = {place[1] for row in rows if (place := _LINE.fullmatch(row[0])) and os.path.isabs(place[1])}
    if not files:
        return rows
    folder = os.path.join(os.path.commonpath([os.path.dirname(file) for file in files]), "")
    return [(label.removeprefix(folder), before, after) for label, before, after in rows]
