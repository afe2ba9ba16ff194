"""`vram diff`: what one run holds beyond another at its peak. Draws a table of `vram.analysis`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich_click as click

from vram.analysis import GROUPINGS, difference
from vram.sizes import format_size
from vram.trace import open_trace

from .console import FINDING, draw_grid, draw_line, open_console, read_size

__all__ = ["diff_command"]


@click.command("diff")
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--by",
    type=click.Choice([name for name in GROUPINGS if name != "stack"]),
    default="line",
    show_default=True,
    help="What to attribute the gap to.",
)
@click.option(
    "--at",
    metavar="MOMENT",
    default="peak",
    show_default=True,
    help="peak, oom, an event's number or step:N.",
)
@click.option(
    "--fail-above",
    metavar="SIZE",
    callback=read_size,
    help="Exit with 1 if B holds more than this beyond A, such as 64MiB.",
)
@click.option("--top", metavar="N", default=20, show_default=True, help="Rows to draw; JSON has all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def diff_command(
    ctx: click.Context,
    before: Path,
    after: Path,
    by: str,
    at: str,
    fail_above: int | None,
    top: int,
    as_json: bool,
) -> None:
    """Show what run B holds at its peak beyond run A, and which lines of the program it comes from."""
    found = difference(open_trace(before), open_trace(after), by, at)
    failed = fail_above is not None and found.gap > fail_above
    if as_json:
        click.echo(json.dumps({**found.to_json(), "fail_above": fail_above, "failed": failed}))
    else:
        console = open_console()
        draw_line(
            console,
            f"{before.name} holds {format_size(found.before)}, {after.name} {format_size(found.after)}: "
            f"{_signed(found.gap)}",
            "bold",
        )
        rows: list[dict[str, Any]] = found.table.to_pylist()
        draw_grid(
            console,
            f"{by}|>before|>after|>gap|>blocks",
            (
                (
                    row["group"],
                    format_size(row["before"]),
                    format_size(row["after"]),
                    _signed(row["gap"]),
                    f"{row['blocks_before']} → {row['blocks_after']}",
                )
                for row in rows[:top]
            ),
        )
        if len(rows) > top:
            draw_line(console, f"and {len(rows) - top} more; --top shows more", "dim")
        if failed:
            assert fail_above is not None
            draw_line(console, f"The gap is above the {format_size(fail_above)} allowed.", "bold")
    if failed:
        ctx.exit(FINDING)


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else ''}{format_size(size)}"
