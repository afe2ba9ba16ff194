"""How two runs differ: the gap between the memory at their peaks, attributed to places in the program.

Groups are those of `groups`; a line is the same in both runs if its file, number and function are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vram.errors import ConfigError
from vram.sizes import format_count
from vram.trace import Trace

from .columns import arrow_table
from .groups import Group, check_grouping, group_blocks
from .memory import memory_at
from .moments import find_moment

__all__ = ["Difference", "difference"]


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
