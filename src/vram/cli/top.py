"""`vram top`: what a running process holds, live. Here are the command, the tables and the printed form; the
full screen is `top_screen`'s, which needs Textual. What is shown is told by `vram.observe.monitor`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import rich_click as click

from vram.analysis.places import place_of
from vram.errors import ConfigError
from vram.sizes import format_count, format_size
from vram.trace.model import Frame

from .console import draw_grid, draw_line, json_option, open_console, pid_argument, read_duration, top_option

__all__ = ["TABLES", "Table", "Told", "device_line", "heading", "top_command"]

Told: TypeAlias = dict[str, Any]
"""The status of a process, as `vram.observe.status` makes it."""
NEEDS_TEXTUAL = 'the live screen needs Textual: pip install "vram[tui]"; vram top -1 prints once without it'


@click.command("top")
@pid_argument
@click.option("-1", "--once", is_flag=True, help="Print once and leave; needs no terminal.")
@click.option(
    "--every",
    metavar="TIME",
    default="1s",
    show_default=True,
    callback=read_duration,
    help="How often to look, such as 500ms.",
)
@click.option("--filter", "wanted", metavar="TEXT", default="", help="Only rows that contain it.")
@top_option
@json_option
def top_command(pid: int | None, once: bool, every: float, wanted: str, top: int, as_json: bool) -> None:
    """Show what a running process holds: pools, streams, tags, holders, devices.

    PID is a process of yours that called vram.monitor() or was started with vram run --monitor; it may be
    left out where there is only one.
    """
    from vram.observe.monitor import attach

    if not (once or as_json):
        run = _screen()
    with attach(pid) as client:
        if as_json:
            click.echo(json.dumps(client.status(top)))
        elif once:
            _draw(client.status(top), wanted, top)
        else:
            run(lambda: client.status(top), max(0.05, every / 1e6), wanted)


def _screen() -> Callable[[Callable[[], Told], float, str], None]:
    try:
        from .top_screen import show
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise ConfigError(NEEDS_TEXTUAL) from error
    return show


def _draw(told: Told, wanted: str, top: int) -> None:
    console = open_console()
    draw_line(console, heading(told), "bold")
    for device in told["devices"]:
        draw_line(console, device_line(device))
    for table in TABLES:
        rows = table.rows(told, wanted=wanted)
        console.print()
        draw_line(console, f"{table.name}{_age(table, told)}", "bold")
        if rows:
            draw_grid(console, table.columns, rows, top=top)
        else:
            draw_line(console, f"none{' with ' + repr(wanted) if wanted else ''}")
        if left := told["left_out"].get(table.name, 0):
            draw_line(console, f"and {left} more: --top shows more", "dim")


def _age(table: Table, told: Told) -> str:
    """Said where it matters."""
    old = told["holders_age_s"]
    return f", {old:.0f} s ago" if table.name in ("tags", "holders") and old >= 1 else ""


# ---- lines ------------------------------------------------------------------------------------------------


def heading(told: Told) -> str:
    """One line about the process."""
    rate = sum(pool["rate"] for pool in told["pools"])
    held = sum(pool["allocated"] for pool in told["pools"])
    kept = sum(pool["reserved"] for pool in told["pools"])
    return (
        f"{told['program']} ({told['pid']}): {format_size(held)} allocated, {format_size(kept)} reserved in "
        f"{format_count(len(told['pools']), 'pool')}, {rate:,.0f} allocations/s"
    )


def device_line(device: Told) -> str:
    """Whose the memory of a device is; the parts sum to the whole."""
    named = ", ".join(f"{name} {format_size(size)}" for name, size in device["named"].items())
    parts = [
        f"pools {format_size(device['pools'])}",
        f"other libraries {format_size(device['libraries'])}" + (f" ({named})" if named else ""),
        f"other processes {format_size(device['processes'])}",
        f"unknown {format_size(device['unknown'])}",
        f"free {format_size(device['free'])}",
    ]
    return f"{device['name']}: {format_size(device['total'])} = {' + '.join(parts)}"


# ---- tables -----------------------------------------------------------------------------------------------

Cells: TypeAlias = tuple[str, ...]
_Keyed: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Table:
    """One list of the status: `columns` as `draw_grid` takes them, and for each row values and their text."""

    name: str
    columns: str
    values: Callable[[Told], tuple[_Keyed, Cells]]
    sort: int
    """The column that is sorted by at first, largest first."""

    @property
    def titles(self) -> list[str]:
        """The columns' titles."""
        return [title.removeprefix(">") for title in self.columns.split("|")]

    def rows(
        self, told: Told, *, wanted: str = "", sort: int | None = None, reverse: bool = False
    ) -> list[Cells]:
        """The rows that contain `wanted`, by a column: numbers largest first, names by letter."""
        made = [self.values(each) for each in told[self.name]]
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


def _pool(pool: Told) -> tuple[_Keyed, Cells]:
    limit = pool["limit"]
    name = f"{pool['kind']} {pool['pool']} on {pool['device']}"
    sizes = [pool[key] for key in ("allocated", "reserved", "pending", "cached", "peak_allocated")]
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


def _stream(stream: Told) -> tuple[_Keyed, Cells]:
    name = f"{stream['stream']:#x}" if stream["stream"] else "default"
    where = f"pool {stream['pool']} on {stream['device']}"
    live, cached, pending = stream["live"], stream["cached"], stream["pending_blocks"]
    shown = name + (" (gone)" if stream["retired"] else "")
    return (shown, where, live, cached, pending), (shown, where, *_sizes(live, cached), f"{pending:,}")


def _tag(tag: Told) -> tuple[_Keyed, Cells]:
    name = "(no tag)" if tag["tag"] is None else tag["tag"]
    return (name, tag["bytes"], tag["count"]), (name, format_size(tag["bytes"]), f"{tag['count']:,}")


def _holder(holder: Told) -> tuple[_Keyed, Cells]:
    frame = place_of([Frame(*each) for each in holder["stack"]])
    place = f"{frame.filename}:{frame.line} in {frame.name}" if frame else "(no stack: see stacks)"
    tag = holder["tag"] or ""
    return (
        (place, tag, holder["pool"], holder["bytes"], holder["count"]),
        (place, tag, str(holder["pool"]), format_size(holder["bytes"]), f"{holder['count']:,}"),
    )


TABLES = (
    Table(
        "pools",
        "pool|>allocated|>reserved|>pending|>cached|>peak|>limit|>live|>alloc/s|>hits|>fragmented",
        _pool,
        1,
    ),
    Table("streams", "stream|of|>live|>cached|>pending blocks", _stream, 2),
    Table("tags", "tag|>bytes|>blocks", _tag, 1),
    Table("holders", "allocated at|tag|>pool|>bytes|>blocks", _holder, 3),
)
