"""`vram explain`: why a recorded job ran out of memory. Prints what `vram.analysis` found."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.analysis import Explanation, explain
from vram.analysis.explanation import Remedy
from vram.core.verdict import MEANINGS
from vram.sizes import format_size
from vram.trace import open_trace

from .console import (
    FINDING,
    device_option,
    draw_grid,
    draw_line,
    file_argument,
    json_option,
    open_console,
    read_size,
)

__all__ = ["explain_command"]

MOST_HOLDERS = 5
MOST_IN_JSON = 50


@click.command("explain")
@file_argument
@click.option(
    "--at",
    metavar="MOMENT",
    help="oom, peak, an event number or step:N. Default: the out-of-memory error if any, else the peak.",
)
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=read_size,
    help="Device memory or process limit, if the recording does not contain it.",
)
@device_option
@json_option
@click.pass_context
def explain_command(
    ctx: click.Context, file: Path, at: str | None, capacity: int | None, device: int | None, as_json: bool
) -> None:
    """Explain why a recorded job ran out of memory: the verdict, what holds memory, what would have helped.

    FILE is a PyTorch memory snapshot, an RMM log or a vram recording. The verdict is one of true-demand,
    fragmentation, pending, cached, rounding and foreign. Exits with 1 if it explained an out-of-memory error.
    """
    found = explain(open_trace(file, device=device), at, capacity=capacity)
    if as_json:
        click.echo(json.dumps(found.to_json(MOST_IN_JSON)))
    else:
        _draw(found, open_console())
    if found.request is not None:
        ctx.exit(FINDING)


def _draw(found: Explanation, console: Console) -> None:
    draw_line(console, found.text)
    if len(found.trace.devices) > 1:
        others = ", ".join(map(str, found.trace.devices))
        draw_line(console, f"Device {found.trace.device} of {others}; choose another with --device.", "dim")
    console.print()
    device = max(1, found.account.device)
    draw_grid(
        console,
        "memory|>size|>share|meaning",
        [
            (name, format_size(size), f"{size / device:.1%}", MEANINGS[name])
            for name, size in found.account.parts().items()
            if size
        ],
    )
    if found.request is not None:
        draw_line(console, _largest(found))
    for by in found.holders:
        _draw_holders(found, by, console)
    if found.remedies:
        console.print()
        draw_line(console, "What would have helped", "bold")
        for remedy in found.remedies:
            draw_line(console, f"- {_remedy(remedy)}")


def _largest(found: Explanation) -> str:
    """Describe the largest free block."""
    anywhere, here = found.largest_free, found.largest_on_stream
    if not anywhere:
        return "There is no free block."
    on_stream = "" if here is None or here == anywhere else f", {format_size(here)} on the request's stream"
    return f"The largest free block is {format_size(anywhere)}{on_stream}."


def _draw_holders(found: Explanation, by: str, console: Console) -> None:
    groups = found.holders[by]
    if not groups or (len(groups) < 2 and by != "stack"):
        return  # one group adds nothing to the account
    at = "" if found.moment.kind == "end" else f" --at {found.moment.event}"
    console.print()
    draw_grid(
        console,
        f"held by {by}|>size|>blocks",
        [(group.label, format_size(group.bytes), str(group.blocks)) for group in groups],
        top=MOST_HOLDERS,
        rest=f"vram summary {shlex.quote(found.trace.source)}{at} --by {by}",
    )


def _remedy(remedy: Remedy) -> str:
    setting = f" ({remedy.setting})" if remedy.setting else ""
    if remedy.fits is None or remedy.reserved is None:
        return remedy.what + setting
    size = format_size(remedy.reserved)
    if remedy.fits:
        return f"{remedy.what}{setting}: in a replay, the job fits with a peak of {size} reserved"
    return f"not {remedy.what}{setting}: in a replay, the job still runs out of memory"
