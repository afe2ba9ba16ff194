"""`vram convert`: write a recording in the format of another tool. The library does the writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import rich_click as click

from vram.errors import ConfigError
from vram.sizes import format_size
from vram.trace import open_trace
from vram.trace.convert import FORMATS, output_file

from .console import device_option, file_argument, json_option
from .limited import limited

__all__ = ["convert_command"]


@click.command("convert")
@file_argument
@click.option("--to", "to", required=True, type=click.Choice(sorted(FORMATS)), help="Target format.")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file. Default: next to FILE, with the suffix of the format.",
)
@device_option
@json_option
def convert_command(file: Path, to: str, output: Path | None, device: int | None, as_json: bool) -> None:
    """Convert a recording to the format of another tool.

    torch opens in PyTorch's memory viewer and perfetto in Perfetto. folded and speedscope show memory at the
    peak by stack. parquet is vram's own format, which opens fastest.
    """
    target = output or default_output(file, to)
    if target.exists() and file.exists() and target.samefile(file):
        raise ConfigError(f"{target} is the input file; choose another output file with -o")
    with output_file(target) as converted:
        heading = _convert(file, device, to, converted)
    written = target.stat().st_size
    if as_json:
        click.echo(json.dumps({"trace": heading, "output": str(target), "format": to, "bytes": written}))
    else:
        click.echo(f"{target}: {heading['events']} events, {format_size(written)}")


@limited
def _convert(file: Path, device: int | None, to: str, converted: BinaryIO) -> dict[str, object]:
    trace = open_trace(file, device=device)
    FORMATS[to].write(trace, converted)
    converted.flush()
    return trace.heading()


def default_output(file: Path, to: str) -> Path:
    """Return `run.perfetto.json` for `run.pickle.xz`."""
    return file.with_name(file.name.split(".", 1)[0] + FORMATS[to].suffix)
