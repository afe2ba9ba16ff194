"""The tables of `vram top`, printed once by `top` and drawn live by `top_screen`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vram.analysis.places import place_of
from vram.sizes import format_count, format_size
from vram.trace.model import Frame

__all__ = ["TABLES", "Status", "Table", "device_line", "heading"]

Status: TypeAlias = dict[str, Any]
"""The status of a process, as returned by `vram.observe.status`."""


def heading(status: Status) -> str:
    """Summarize the process in one line."""
    rate = sum(pool["rate"] for pool in status["pools"])
    held = sum(pool["allocated"] for pool in status["pools"])
    kept = sum(pool["reserved"] for pool in status["pools"])
    return (
        f"{status['program']} ({status['pid']}): {format_size(held)} allocated, {format_size(kept)} reserved"
        f"{_spilled(status)} in {format_count(len(status['pools']), 'pool')}, {rate:,.0f} allocations/s"
    )


def _spilled(status: Status) -> str:
    """What is in host memory, and what was moved so far. Older processes do not tell."""
    totals: Counter[str] = Counter()
    for pool in status["pools"]:
        totals.update({"spilled": pool.get("spilled", 0), **pool.get("spill", {})})
    text = f", {format_size(totals['spilled'])} spilled" if totals["spilled"] else ""
    if totals["moved_out_bytes"]:
        text += (
            f" ({format_size(totals['moved_out_bytes'])} moved to host memory so far, "
            f"{format_size(totals['moved_back_bytes'])} back, streams held for {totals['seconds']:.3f} s)"
        )
    if totals["saved_bytes"]:
        text += f", {format_size(totals['saved_bytes'])} of saved tensors in host memory"
    return text


def device_line(device: Status) -> str:
    """Split the memory of a device by owner; the parts add up to the total."""
    named = ", ".join(f"{name} {format_size(size)}" for name, size in device["named"].items())
    parts = [
        f"pools {format_size(device['pools'])}",
        f"other libraries {format_size(device['libraries'])}" + (f" ({named})" if named else ""),
        f"other processes {format_size(device['processes'])}",
        f"unknown {format_size(device['unknown'])}",
        f"free {format_size(device['free'])}",
    ]
    busy = device.get("utilization")
    return (
        f"{device['name']}: {format_size(device['total'])} = {' + '.join(parts)}"
        f"{'' if busy is None else f'; {busy} % busy'}"
    )


# ---- tables -----------------------------------------------------------------------------------------------

Cells: TypeAlias = tuple[str, ...]
_Keyed: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Table:
    """One table of the status: `columns` as in `draw_grid`, and for each row its values and their text."""

    name: str
    columns: str
    values: Callable[[Status], tuple[_Keyed, Cells]]
    sort: int
    """The column sorted by initially, largest first."""

    @property
    def titles(self) -> list[str]:
        """The titles of the columns."""
        return [title.removeprefix(">") for title in self.columns.split("|")]

    def rows(
        self, status: Status, *, wanted: str = "", sort: int | None = None, reverse: bool = False
    ) -> list[Cells]:
        """Return rows that contain `wanted`, sorted by a column: numbers descending, names ascending."""
        made = [self.values(each) for each in status.get(self.name, ())]  # older processes tell less
        if wanted:
            made = [row for row in made if any(wanted.lower() in cell.lower() for cell in row[1])]
        place = self.sort if sort is None else sort
        names = [row for row in made if isinstance(row[0][place], str)]
        numbers = [row for row in made if not isinstance(row[0][place], str)]
        names.sort(key=lambda row: row[0][place], reverse=reverse)
        numbers.sort(key=lambda row: row[0][place], reverse=not reverse)
        return [row[1] for row in (*numbers, *names)]


def _sizes(*sizes: int) -> Sequence[str]:
    return [format_size(size) for size in sizes]


def _pool(pool: Status) -> tuple[_Keyed, Cells]:
    limit = pool["limit"]
    name = f"{pool['kind']} {pool['pool']} on {pool['device']}"
    sizes = [
        pool.get(key, 0)
        for key in ("allocated", "reserved", "pending", "cached", "spilled", "peak_allocated")
    ]
    return (
        (name, *sizes, limit or 0, pool["live"], pool["rate"], pool["hit_rate"], pool["fragmentation"]),
        (
            name,
            *_sizes(*sizes),
            format_size(limit) if limit else "none",
            f"{pool['live']:,}",
            f"{pool['rate']:,.0f}",
            f"{pool['hit_rate']:.1%}",
            f"{pool['fragmentation']:.1%}",
        ),
    )


def _stream(stream: Status) -> tuple[_Keyed, Cells]:
    name = f"{stream['stream']:#x}" if stream["stream"] else "default"
    where = f"pool {stream['pool']} on {stream['device']}"
    live, cached, pending = stream["live"], stream["cached"], stream["pending_blocks"]
    shown = name + (" (destroyed)" if stream["retired"] else "")
    return (shown, where, live, cached, pending), (shown, where, *_sizes(live, cached), f"{pending:,}")


def _holder(holder: Status) -> tuple[_Keyed, Cells]:
    frame = place_of([Frame(*each) for each in holder["stack"]])
    place = (
        f"{frame.filename}:{frame.line} in {frame.name}" if frame else "(no stack; enable the stacks setting)"
    )
    tag = "(no tag)" if holder["tag"] is None else holder["tag"]
    size, of_tag, away = holder["bytes"], holder["tag_bytes"], holder.get("spilled", 0)
    return (
        (tag, (of_tag, tag, size), place, holder["pool"], size, away, holder["count"]),
        (tag, format_size(of_tag), place, str(holder["pool"]), *_sizes(size, away), f"{holder['count']:,}"),
    )


def _spilled_tag(row: Status) -> tuple[_Keyed, Cells]:
    tag = "(no tag)" if row["tag"] is None else row["tag"]
    names = ("", "moved_out_", "moved_back_", "saved_", "saved_out_", "saved_back_")
    sizes, seconds = [row[f"{name}bytes"] for name in names], row["seconds"]
    return (tag, row["pool"], *sizes, seconds), (tag, str(row["pool"]), *_sizes(*sizes), f"{seconds:.3f} s")


def _process(process: Status) -> tuple[_Keyed, Cells]:
    name, size = process["name"] or "(not visible here)", process["bytes"]
    return (
        (process["pid"], name, process["device"], -1 if size is None else size),
        (str(process["pid"]), name, process["device"], "not told" if size is None else format_size(size)),
    )


TABLES = (
    Table(
        "pools",
        "pool|>allocated|>reserved|>pending|>cached|>spilled|>peak|>limit|>live|>alloc/s|>hits|>fragmented",
        _pool,
        1,
    ),
    Table("streams", "stream|pool|>live|>cached|>pending blocks", _stream, 2),
    Table("holders", "tag|>of tag|allocated at|>pool|>bytes|>spilled|>blocks", _holder, 1),
    Table(
        "spilled",
        "tag|>pool|>in host memory|>moved there|>moved back|>saved tensors there|>copied there|>copied back|"
        ">streams held",
        _spilled_tag,
        3,
    ),
    Table("processes", ">pid|process|device|>bytes", _process, 3),
)
