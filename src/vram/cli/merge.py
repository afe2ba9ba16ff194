"""`vram merge`: compare the ranks of one run. Prints and writes what `vram.analysis` aligned."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import rich_click as click
from rich.console import Console

from vram.analysis import Merged, Rank, merge
from vram.analysis.ranks import encode_table
from vram.sizes import format_count, format_size
from vram.trace import open_trace
from vram.trace.convert import output_file

from .console import device_option, draw_grid, draw_line, files_argument, json_option, open_console
from .limited import limited

__all__ = ["merge_command"]


@click.command("merge")
@files_argument
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the table of ranks and steps: as JSON if the name ends in .json, else as Parquet.",
)
@device_option
@json_option
def merge_command(files: tuple[Path, ...], output: Path | None, device: int | None, as_json: bool) -> None:
    """Align the recordings of several ranks by step and show the rank that differs most first."""
    with nullcontext() if output is None else output_file(output) as file:
        _merge(files, output, file, device, as_json)
    if output is not None and not as_json:
        draw_line(open_console(), f"Wrote the table of ranks and steps to {output}.", "dim")


@limited
def _merge(
    files: tuple[Path, ...], output: Path | None, file: BinaryIO | None, device: int | None, as_json: bool
) -> None:
    traces = [open_trace(path, device=device) for path in files]
    found = merge(traces)
    if output is not None and file is not None:
        file.write(encode_table(found, output))
        file.flush()
    if as_json:
        click.echo(json.dumps({"traces": [trace.heading() for trace in traces], **found.to_json()}))
    else:
        _draw(found, open_console())


def _draw(found: Merged, console: Console) -> None:
    odd = [rank for rank in found.ranks if rank.odd]
    draw_line(console, _headline(odd, len(found.ranks), len(found.common_steps)), "bold")
    draw_grid(
        console,
        "rank|>peak allocated|>peak reserved|>from the median|>steps|>out of memory",
        [
            (
                rank.name,
                format_size(rank.peak_allocated),
                format_size(rank.peak_reserved),
                f"{rank.deviation:+.1%}",
                str(rank.steps),
                str(rank.ooms),
            )
            for rank in found.ranks
        ],
    )


def _headline(odd: list[Rank], ranks: int, steps: int) -> str:
    aligned = f"{format_count(ranks, 'rank')}, {format_count(steps, 'step')} in common"
    if not odd:
        return f"{aligned}: all alike"
    first = odd[0]
    failed = " and ran out of memory" if first.ooms else ""
    return f"{aligned}: {first.name} differs most, {first.deviation:+.1%} from the median{failed}"
