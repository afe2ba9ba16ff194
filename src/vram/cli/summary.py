"""`vram summary`: what holds memory in a recording. Prints a table of `vram.analysis`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import rich_click as click

from vram.analysis import GROUPINGS, Moment, find_moment, summary
from vram.sizes import format_size
from vram.trace import moved_by_tag, open_trace

from .console import (
    at_option,
    device_option,
    draw_grid,
    draw_line,
    file_argument,
    json_option,
    open_console,
    top_option,
)
from .limited import limited

__all__ = ["summary_command"]

KINDS = {"peak": "the peak, ", "oom": "the out-of-memory error, "}
"""Moments that have a name."""


@click.command("summary")
@file_argument
@click.option("--by", type=click.Choice(GROUPINGS), default="stack", show_default=True, help="How to group.")
@at_option
@top_option
@device_option
@json_option
@limited
def summary_command(file: Path, by: str, at: str, top: int, device: int | None, as_json: bool) -> None:
    """Show what holds the memory of a recorded job at its peak or at another moment."""
    trace = open_trace(file, device=device)
    moment = find_moment(trace, at)
    rows = summary(trace, by, at).to_pylist()
    whole = sum(row["bytes"] for row in rows)
    if as_json:
        moved = {tag: {"out": out, "back": back} for tag, (out, back) in moved_by_tag(trace).items()}
        at_moment = {"at": asdict(moment), "by": by, "bytes": whole, "groups": rows, "spilled": moved}
        click.echo(json.dumps({"trace": trace.heading(), **at_moment}))
        return
    console = open_console()
    draw_line(console, f"{file.name}: {format_size(whole)} live at {_when(moment)}", "bold")
    rest = format_size(sum(row["bytes"] for row in rows[top:]))
    draw_grid(
        console,
        f"{by}|>size|>share|>blocks",
        [
            (row["group"], format_size(row["bytes"]), f"{row['share']:.1%}", str(row["blocks"]))
            for row in rows
        ],
        top=top,
        rest=f"{rest}; --top shows more",
    )
    for tag, (out, back) in [*moved_by_tag(trace).items()][:top]:
        label = f"memory tagged {tag!r}" if tag else "memory without a tag"
        draw_line(
            console, f"Spilled, {label}: {format_size(out)} moved to host memory, {format_size(back)} back."
        )


def _when(moment: Moment) -> str:
    if moment.kind == "end":
        return "the end of the recording, which has no events"
    step = "" if moment.step is None else f" in step {moment.step}"
    return f"{KINDS.get(moment.kind, '')}event {moment.event}{step}"
