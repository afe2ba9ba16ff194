"""`vram predict`: whether a program fits a GPU, without a GPU. Runs it with `vram.predict` and prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.predict import Prediction, run
from vram.sizes import format_count, format_size

from .console import (
    FINDING,
    BAD_INPUT,
    draw_facts,
    draw_grid,
    draw_line,
    json_option,
    open_console,
    progress_bar,
    read_size,
)

__all__ = ["predict_command"]

MOST_HOLDERS = 10
MOST_LISTED = 10
FITS = {"yes": "yes", "tight": "yes, after releasing cached memory", "no": "no", "unknown": "?"}


@click.command(
    "predict", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)
@click.option("--gpu", metavar="NAME[:N]", help="The GPU, such as h200, a100-80gb, rtx4090 or h200:8.")
@click.option("--memory", metavar="SIZE", callback=read_size, help="Memory of the GPU, such as 24GiB.")
@click.option("--gpus", metavar="N", type=click.IntRange(min=1), help="Number of GPUs.")
@click.option("--steps", metavar="N", type=click.IntRange(min=1), help="Stop the program after N steps.")
@click.option(
    "--save", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Keep the recording."
)
@json_option
@click.argument("program", metavar="PROGRAM [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def predict_command(
    ctx: click.Context,
    gpu: str | None,
    memory: int | None,
    gpus: int | None,
    steps: int | None,
    save: Path | None,
    as_json: bool,
    program: tuple[str, ...],
) -> None:
    """Predict how much GPU memory a program needs, and whether it fits. Needs no GPU."""
    found = run(
        program, gpu, memory=memory, gpus=gpus, steps=steps, stdout=sys.stderr if as_json else None
    )
    if save is not None:
        found.save(save)
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        _draw(found, open_console())
    ctx.exit(_status(found))


def _status(found: Prediction) -> int:
    if found.outcome == "failed":
        return BAD_INPUT
    return 0 if found.fits else FINDING


def _draw(found: Prediction, console: Console) -> None:
    draw_line(console, found.text, "bold")
    draw_facts(
        console,
        {
            "peak allocated": format_size(found.peak_allocated),
            "peak reserved": format_size(found.peak_reserved),
            "used of the device": f"{format_size(found.peak_used)}, with the context",
            "ran": f"{format_count(found.steps, 'step')} in {found.seconds:.1f} s",
        },
    )
    console.print()
    draw_grid(
        console,
        "GPU|>memory|>room|fits",
        [(each.gpu.key, format_size(each.gpu.memory), format_size(each.room), FITS[each.fits]) for each in found.table()],
    )
    console.print()
    draw_grid(
        console,
        "held at the peak|>size|>blocks",
        [(group.label, format_size(group.bytes), str(group.blocks)) for group in found.holders()],
        top=MOST_HOLDERS,
    )
    console.print()
    with progress_bar("settings") as progress:
        ranked = found.settings(progress)
    draw_grid(
        console,
        "allocator|>smallest device|>peak reserved|to set",
        [
            (
                each.policy,
                "none" if each.smallest_capacity is None else format_size(each.smallest_capacity),
                format_size(each.peak_reserved),
                each.environment,
            )
            for each in ranked
        ],
    )
