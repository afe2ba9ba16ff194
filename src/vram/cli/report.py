"""`vram report`: a recording as one HTML file that needs no server. `vram.web` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import rich_click as click

from vram.replay.run import can_replay
from vram.sizes import format_size
from vram.trace import open_trace
from vram.trace.convert import output_file

from .console import NOT_TRIED, device_option, draw_line, file_argument, open_console, progress_bar
from .limited import limited

__all__ = ["report_command"]


@click.command("report")
@file_argument
@click.option(
    "-o",
    "--output",
    metavar="HTML",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="Output file.",
)
@click.option("--redact", is_flag=True, help="Remove directories of files in stacks, tags and marks.")
@click.option(
    "--sweep/--no-sweep",
    default=True,
    help="Replay other allocators and settings for the what-if table.",
)
@device_option
def report_command(file: Path, output: Path, redact: bool, sweep: bool, device: int | None) -> None:
    """Write a recording as one HTML file: memory over time, by address and by stack, and the explanation.

    The file is the page of `vram serve` with its data included. It works offline and can be shared.
    """
    with output_file(output) as page:
        _render(file, device, redact, sweep, page)
    console = open_console()
    draw_line(console, f"{output}: {format_size(output.stat().st_size)}")
    if sweep and not can_replay():
        draw_line(console, f"not tried: {NOT_TRIED}", "dim")


@limited
def _render(file: Path, device: int | None, redact: bool, sweep: bool, page: BinaryIO) -> None:
    from vram.web.report import render_report

    trace = open_trace(file, device=device)
    with progress_bar("trying settings") as show:
        page.write(render_report(trace, redact=redact, sweep=sweep, progress=show).encode())
    page.flush()
