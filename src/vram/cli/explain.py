"""`vram explain`: why a recorded job ran out of memory. Draws what `vram.analysis` found."""

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
    help="oom, peak, an event's number or step:N; by default the out-of-memory, else the peak.",
)
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=read_size,
    help="Memory of the device, or the limit set for the process, where the recording does not say.",
)
@device_option
@json_option
@click.pass_context
def explain_command(
    ctx: click.Context, file: Path, at: str | None, capacity: int | None, device: int | None, as_json: bool
) -> None:
    """Say why a recorded job ran out of memory: the verdict, who holds what, and what would have helped.

    FILE is a PyTorch memory snapshot, a log of RMM or a recording of vram. The verdict is true-demand,
    fragmentation, pending, cached, rounding or foreign. Exits with 1 where an out-of-memory was explained.
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
        draw_line(console, f"This is device {found.trace.device} of {others}; --device shows another.", "dim")
    console.print()
    device = max(1, found.account.device)
    draw_grid(
        console,
        "memory|>size|>share|what it is",
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
        draw_line(console, "What would have let it fit", "bold")
        for remedy in found.remedies:
            draw_line(console, f"- {_remedy(remedy)}")


def _largest(found: Explanation) -> str:
    """The piece of memory that came nearest to the request."""
    anywhere, here = found.largest_free, found.largest_on_stream
    if not anywhere:
        return "There is no free block."
    on_stream = "" if here is None or here == anywhere else f", {format_size(here)} on the request's stream"
    return f"The largest free block has {format_size(anywhere)}{on_stream}."


def _draw_holders(found: Explanation, by: str, console: Console) -> None:
    groups = found.holders[by]
    if not groups or (len(groups) < 2 and by != "stack"):
        return  # one group says nothing that the account does not
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
        return f"{remedy.what}{setting}: replayed, and it fits, with {size} reserved at most"
    return f"not {remedy.what}{setting}: replayed, and it runs out as well"
