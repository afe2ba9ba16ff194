"""`vram report`: a recording as one HTML file that needs no server. `vram.web` writes it."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from vram.sizes import format_size
from vram.trace import open_trace

from .console import device_option, draw_line, file_argument, open_console, progress_bar

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
    help="Where to write it.",
)
@click.option("--redact", is_flag=True, help="Leave out the folders of files in stacks, tags and marks.")
@click.option(
    "--sweep/--no-sweep",
    default=True,
    help="Whether to try other allocators and settings for the what-if table.",
)
@device_option
def report_command(file: Path, output: Path, redact: bool, sweep: bool, device: int | None) -> None:
    """Write a recording as one HTML file: over time, by address and by stack at its peak, and why.

    It is the page of `vram serve` with its answers in it: it works offline and can be given away.
    """
    from vram.web import write_report

    trace = open_trace(file, device=device)
    with progress_bar("trying settings") as show:
        write_report(trace, output, redact=redact, sweep=sweep, progress=show)
    draw_line(open_console(), f"{output}: {format_size(output.stat().st_size)}")
