"""`vram summary`: who holds memory in a recording. Draws a table of `vram.analysis`."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from vram.analysis import GROUPINGS, find_moment, summary
from vram.sizes import format_size
from vram.trace import open_trace

from .console import device_option, draw_grid, draw_line, open_console

__all__ = ["summary_command"]


@click.command("summary")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--by", type=click.Choice(GROUPINGS), default="stack", show_default=True, help="How to group.")
@click.option(
    "--at",
    metavar="MOMENT",
    default="peak",
    show_default=True,
    help="peak, oom, an event's number or step:N.",
)
@click.option("--top", metavar="N", default=20, show_default=True, help="Rows to draw; JSON has all of them.")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def summary_command(file: Path, by: str, at: str, top: int, device: int | None, as_json: bool) -> None:
    """Show who holds the memory of a recorded job at its peak, or at another moment."""
    trace = open_trace(file, device=device)
    moment = find_moment(trace, at)
    rows = summary(trace, by, at).to_pylist()
    whole = sum(row["bytes"] for row in rows)
    if as_json:
        document = {"by": by, "event": moment.event, "step": moment.step, "bytes": whole, "groups": rows}
        click.echo(json.dumps(document))
        return
    console = open_console()
    step = "" if moment.step is None else f" in step {moment.step}"
    draw_line(console, f"{file.name}: {format_size(whole)} live at event {moment.event}{step}", "bold")
    draw_grid(
        console,
        f"{by}|>size|>share|>blocks",
        (
            (row["group"], format_size(row["bytes"]), f"{row['share']:.1%}", str(row["blocks"]))
            for row in rows[:top]
        ),
    )
    if len(rows) > top:
        rest = sum(row["bytes"] for row in rows[top:])
        draw_line(console, f"and {len(rows) - top} more with {format_size(rest)}; --top shows more", "dim")
