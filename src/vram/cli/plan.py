"""`vram plan`: how little memory buffers need with fixed offsets. Prints the plan; computes nothing."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import rich_click as click

from vram.analysis.moments import find_window, require_contents
from vram.lifetimes.plan import Plan, plan, read_csv
from vram.sizes import format_size
from vram.trace import open_trace
from vram.trace.convert import output_file
from vram.trace.limits import allow_work

from .console import (
    FINDING,
    device_option,
    draw_line,
    file_argument,
    json_option,
    open_console,
    read_size,
)
from .limited import limited

__all__ = ["plan_command"]

CSV_SUFFIX = ".csv"
LEAST_ROW = len("1,0,1,1\n")
"""Bytes of the shortest row of a CSV."""
TRACE_ALIGN = 512


@click.command("plan")
@file_argument
@click.option(
    "--between",
    metavar="FROM,TO",
    help="Plan only what is live in a range, such as step:2,step:3 or event:0,event:90; ends included.",
)
@click.option("--capacity", metavar="SIZE", callback=read_size, help="Stop at a plan that fits this size.")
@click.option(
    "--align",
    metavar="SIZE",
    callback=read_size,
    help="Alignment of offsets and sizes. Default: 512 for traces, 1 for CSV.",
)
@click.option(
    "--time-limit",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Time limit of the search. Default: about 1, up to 9 with --capacity.",
)
@device_option
@json_option
@click.option(
    "--svg", "picture", metavar="OUT", type=click.Path(path_type=Path), help="Write an image of the layout."
)
@click.pass_context
def plan_command(
    ctx: click.Context,
    file: Path,
    between: str | None,
    capacity: int | None,
    align: int | None,
    time_limit: float | None,
    device: int | None,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Assign a fixed offset to each buffer of a recorded job, using as little memory as possible.

    FILE is a trace, or a CSV of `id,lower,upper,size` (live from lower to upper, excluding upper). Exits with
    1 if no plan within --capacity was found.
    """
    if file.suffix.lower() == CSV_SUFFIX and (between is not None or device is not None):
        raise click.UsageError("--between and --device apply to traces, not to CSV files")
    with nullcontext() if picture is None else output_file(picture) as drawn:
        feasible = _plan(file, between, capacity, align, time_limit, device, as_json, drawn)
    if not feasible:
        ctx.exit(FINDING)


@limited
def _plan(
    file: Path,
    between: str | None,
    capacity: int | None,
    align: int | None,
    time_limit: float | None,
    device: int | None,
    as_json: bool,
    drawn: BinaryIO | None,
) -> bool:
    """Print the plan; returns whether it fits."""
    if file.suffix.lower() == CSV_SUFFIX:
        allow_work(file.stat().st_size // LEAST_ROW if file.exists() else 0, time_limit or 0.0)
        found = plan(read_csv(file), align=align or 1, capacity=capacity, time_limit=time_limit)
    else:
        trace = open_trace(file, device=device)
        allow_work(0, time_limit or 0.0)
        require_contents(trace)
        part = None if between is None else find_window(trace, between)
        found = plan(
            trace, align=align or TRACE_ALIGN, capacity=capacity, time_limit=time_limit, between=part
        )
    if drawn is not None:
        drawn.write(found.picture().encode())
        drawn.flush()
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        _draw(file, found)
    return found.feasible


def _draw(file: Path, found: Plan) -> None:
    lines = [
        f"{file.name}: {len(found)} buffers need {format_size(found.peak)} ({found.peak} bytes)",
        f"{found.ratio:.4f} times the {format_size(found.lower_bound)} that is live at once",
        f"found in {found.seconds:.2f} s by {found.method or 'nothing to do'}",
    ]
    if found.capacity is not None:
        verdict = "fits" if found.feasible else "does not fit"
        lines.append(f"it {verdict} into {format_size(found.capacity)}{_why_not(found)}")
    console = open_console()
    for line in lines:
        draw_line(console, line)


def _why_not(found: Plan) -> str:
    if found.feasible:
        return ""
    return "; no plan can fit" if found.proven else "; a longer --time-limit may find a plan that fits"
