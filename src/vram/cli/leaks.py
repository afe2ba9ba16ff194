"""`vram leaks`: what grew over a range of a recording. Prints a table of `vram.analysis`."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.analysis import Leaks, find_leaks
from vram.sizes import format_count, format_size
from vram.trace import open_trace

from .console import (
    FINDING,
    device_option,
    draw_grid,
    draw_line,
    draw_paragraph,
    file_argument,
    json_option,
    open_console,
    top_option,
)
from .limited import limited

__all__ = ["leaks_command"]


@click.command("leaks")
@file_argument
@click.option(
    "--between",
    metavar="FROM,TO",
    help="Range to examine, such as step:10,step:50 or event:0,event:90000; both ends are included. "
    "Default: all steps, or the whole recording if it has none.",
)
@top_option
@device_option
@json_option
@click.pass_context
@limited
def leaks_command(
    ctx: click.Context, file: Path, between: str | None, top: int, device: int | None, as_json: bool
) -> None:
    """Find memory that steps leave behind: allocated within a range and still live at its end, by stack.

    Confidence is the share of steps that left memory behind. A leak is likely from one half upwards. Exits
    with 1 if a leak is likely.
    """
    trace = open_trace(file, device=device)
    found = find_leaks(trace, between)
    if as_json:
        click.echo(json.dumps({"trace": trace.heading(), **found.to_json()}))
    else:
        _draw(found, file.name, top, open_console())
    if found.likely:
        ctx.exit(FINDING)


def _draw(found: Leaks, name: str, top: int, console: Console) -> None:
    stretch = f"events {found.first} to {found.last}, {format_count(found.steps, found.unit)}"
    draw_line(console, f"{name}, {stretch}: {found.headline}", "bold")
    if found.doubt:
        draw_paragraph(console, found.doubt, "dim")
    rows = found.table.to_pylist()
    if not rows:
        draw_line(console, "Nothing allocated in this range was still live at its end.")
        return
    draw_grid(
        console,
        f"stack|>left|>blocks|>per {found.unit}|>confidence|>at the end",
        [
            (
                row["group"],
                format_size(row["bytes"]),
                str(row["blocks"]),
                format_size(round(row["growth"])),
                f"{row['confidence']:.0%}",
                format_size(row["bytes_at_end"]),
            )
            for row in rows
        ],
        top=top,
    )
