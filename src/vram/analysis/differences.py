"""How two runs differ: the gap between the memory at their peaks, attributed to places in the program.

Groups are those of `groups`. A line is the same in both runs if its file, number and function are. A line
that only moved within its function, as between two versions of a program, is the same too: see `_join_moved`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.sizes import format_count
from vram.trace import Trace

from .columns import arrow_table
from .groups import Group, check_grouping, group_blocks
from .memory import memory_at
from .moments import find_moment

__all__ = ["Difference", "difference"]

Row: TypeAlias = "tuple[str, Group, Group]"
_LINE = re.compile(r"(.+):(\d+) (.+)", re.DOTALL)
"""A line as `groups` names it: file, number and function."""


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
    table: Any

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
        arrow_table(
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

    Lines of one run only are joined within a file and function: first those that hold the same bytes in as
    many blocks, then all others in their order if both runs have equally many of them.
    """
    alone: defaultdict[tuple[str, str], tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    kept = []
    for row in rows:
        place = _LINE.fullmatch(row[0])
        if place is None or (row[1].blocks and row[2].blocks):
            kept.append(row)
        else:
            alone[place[1], place[3]][bool(row[2].blocks)].append(row)
    for before, after in alone.values():
        kept += _joined(sorted(before, key=_number), sorted(after, key=_number))
    return kept


def _joined(before: list[Row], after: list[Row]) -> list[Row]:
    joined = []
    for old in list(before):
        same = (new for new in after if (new[2].bytes, new[2].blocks) == (old[1].bytes, old[1].blocks))
        if (new := next(same, None)) is not None:
            before.remove(old)
            after.remove(new)
            joined.append((new[0], old[1], new[2]))
    if len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return [*joined, *((new[0], old[1], new[2]) for old, new in pairs)]
    return [*joined, *before, *after]


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
