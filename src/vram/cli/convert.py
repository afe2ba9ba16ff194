"""`vram convert`: write a recording in the format of another tool. The library does the writing."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from vram.errors import ConfigError
from vram.sizes import format_size
from vram.trace import open_trace
from vram.trace.convert import FORMATS, convert

from .console import device_option, file_argument, json_option

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
    trace = open_trace(file, device=device)
    convert(trace, to, target)
    written = target.stat().st_size
    if as_json:
        result = {"trace": trace.heading(), "output": str(target), "format": to, "bytes": written}
        click.echo(json.dumps(result))
    else:
        click.echo(f"{target}: {trace.events} events, {format_size(written)}")


def default_output(file: Path, to: str) -> Path:
    """Return `run.perfetto.json` for `run.pickle.xz`."""
    return file.with_name(file.name.split(".", 1)[0] + FORMATS[to].suffix)
