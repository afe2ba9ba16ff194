"""`vram attach`: write what a running process holds, or what it allocates for a while."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from vram.sizes import format_size

from .console import draw_line, one_line, open_console, progress_bar, read_duration

if TYPE_CHECKING:
    from vram.observe.remote import RemoteRecording

__all__ = ["attach_command"]

LOOK_SECONDS = 0.1


@click.command("attach")
@click.argument("pid", type=int)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, for vram explain, summary, serve and the others.",
)
@click.option(
    "--for",
    "duration",
    metavar="TIME",
    callback=read_duration,
    help="Record every allocation with its stack for so long, such as 30s. Ctrl-C stops early.",
)
@click.option(
    "--timeout",
    metavar="TIME",
    default="30s",
    show_default=True,
    callback=read_duration,
    help="How long to wait until the main thread of the process runs Python code.",
)
def attach_command(pid: int, output: Path, duration: float | None, timeout: float) -> None:
    """Write what a running Python process holds: PyTorch's memory and vram's pools. The process goes on.

    The process needs no preparation. On Linux this needs gdb, and the permission to debug the process; where
    vram and the process run under Python 3.14 or later, it needs no gdb.
    """
    from vram.observe.remote import RemoteRecording

    seconds = None if duration is None else duration / 1e6
    with RemoteRecording(pid, output, seconds) as recording:
        recording.wait_for_start(timeout / 1e6)
        if seconds is not None:
            _watch(recording, seconds)
        _draw(recording)


def _watch(recording: RemoteRecording, seconds: float) -> None:
    """Show the progress until the process writes; Ctrl-C ends the recording early."""
    try:
        click.echo(f"vram: recording process {recording.pid} for {seconds:g} s; Ctrl-C stops early", err=True)
        with progress_bar(f"recording process {recording.pid}") as show:
            while (said := recording.state())["state"] == "recording":
                show(round(said["seconds"] * 1000), round(seconds * 1000))
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        click.echo("vram: stopping; the process writes what was recorded", err=True)
        recording.stop()


def _draw(recording: RemoteRecording) -> None:
    console = open_console()
    for file in recording.finish():
        reserved = f", {format_size(file.reserved)} reserved" if file.reserved else ""
        draw_line(console, f"wrote {file.path}: {file.of}{reserved}")
        draw_line(console, f"vram explain {file.path}", "dim", indent=2)
    for note in recording.notes:
        click.echo(f"vram: {one_line(note)}", err=True)
