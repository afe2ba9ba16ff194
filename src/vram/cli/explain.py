"""`vram explain`: why a recorded job ran out of memory. Prints what `vram.analysis` found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.analysis import Explanation, explain
from vram.analysis.explanation import Remedy
from vram.analysis.places import frame_text
from vram.core.verdict import MEANINGS, OUTSIDE
from vram.replay.run import can_replay
from vram.sizes import format_size
from vram.trace import open_trace
from vram.trace.model import IN_BACKWARD

from .console import (
    BADGE_WIDTH,
    FINDING,
    NOT_TRIED,
    device_option,
    draw_grid,
    draw_item,
    draw_line,
    draw_paragraph,
    draw_title,
    file_argument,
    json_option,
    open_console,
    progress_bar,
    read_size,
)
from .limited import limited

__all__ = ["explain_command"]

MOST_HOLDERS = 5
MOST_IN_JSON = 50
WITHOUT_STACK = "Backward passes run on threads without Python frames, so their memory has no stack."


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
@click.option("--stack", "stacks", is_flag=True, help="Print whole stacks of the request and of the holders.")
@device_option
@json_option
@click.pass_context
@limited
def explain_command(
    ctx: click.Context,
    file: Path,
    at: str | None,
    capacity: int | None,
    stacks: bool,
    device: int | None,
    as_json: bool,
) -> None:
    """Explain why a recorded job ran out of memory: what happened, the evidence, and what to do next.

    FILE is a PyTorch memory snapshot, an RMM log or a vram recording. The verdict is one of true-demand,
    fragmentation, pending, cached, rounding and foreign. Exits with 1 if it explained an out-of-memory error.
    """
    with progress_bar("trying other allocators") as progress:
        found = explain(open_trace(file, device=device), at, capacity=capacity, progress=progress)
    if as_json:
        click.echo(json.dumps(found.to_json(MOST_IN_JSON)))
    else:
        _draw(found, open_console(), stacks)
    if found.request is not None:
        ctx.exit(FINDING)


def _draw(found: Explanation, console: Console, stacks: bool) -> None:
    _draw_headline(found, console)
    _draw_account(found, console)
    if stacks and found.request is not None:
        frames = [frame_text(frame) for frame in found.trace.frames_of(found.request.stack)]
        draw_title(console, "Stack of the request, innermost call first")
        _draw_frames(frames or (found.trace.no_stack,), console)
    for by in found.holders:
        _draw_holders(found, by, console, stacks)
    _draw_next_steps(found, console, stacks)


def _draw_headline(found: Explanation, console: Console) -> None:
    draw_paragraph(console, found.headline, "bold" if found.request is None else "bold red")
    draw_paragraph(console, f"Verdict: {found.verdict}: {found.reason}", "bold")
    for doubt in found.doubts:
        draw_paragraph(console, doubt, "dim")
    if len(found.trace.devices) > 1:
        others = ", ".join(map(str, found.trace.devices))
        draw_line(console, f"Device {found.trace.device} of {others}; choose another with --device.", "dim")


def _draw_account(found: Explanation, console: Console) -> None:
    """Where the memory is. Shares are of what the job could use; the rest of the device has none."""
    draw_title(console, "Evidence")
    shares = found.account.shares()
    draw_grid(
        console,
        "memory|>size|>share|meaning",
        [
            (name, format_size(size), _share(shares[name]), MEANINGS[name])
            for name, size in found.account.parts().items()
            if size
        ],
        styles={**{each.verdict: "bold yellow" for each in found.verdicts}, **dict.fromkeys(OUTSIDE, "dim")},
    )
    if found.request is not None:
        draw_line(console, _largest(found))


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _largest(found: Explanation) -> str:
    """Describe the largest free block."""
    anywhere, here = found.largest_free, found.largest_on_stream
    if not anywhere:
        return "There is no free block."
    on_stream = "" if here is None or here == anywhere else f", {format_size(here)} on the request's stream"
    return f"The largest free block is {format_size(anywhere)}{on_stream}."


def _draw_holders(found: Explanation, by: str, console: Console, stacks: bool) -> None:
    groups = found.holders[by]
    if not groups or (len(groups) < 2 and by != "stack"):
        return  # one group adds nothing to the account
    at = "" if found.moment.kind == "end" else f" --at {found.moment.event}"
    console.print()
    held = max(1, found.account.allocated + found.spilled)
    draw_grid(
        console,
        f"held by {by}|>size|>share|>blocks",
        [
            (group.label, format_size(group.bytes), f"{group.bytes / held:.1%}", str(group.blocks))
            for group in groups
        ],
        top=MOST_HOLDERS,
        rest=f"vram summary {shlex.quote(found.trace.source)}{at} --by {by}",
    )
    if by == "stack" and any(group.label == IN_BACKWARD for group in groups):
        draw_paragraph(console, WITHOUT_STACK, "dim")
    for group in groups[:MOST_HOLDERS] if stacks and by == "stack" else ():
        draw_title(console, f"{format_size(group.bytes)} allocated at, innermost call first")
        _draw_frames(group.frames or (group.label,), console)


def _draw_frames(frames: Sequence[str], console: Console) -> None:
    for frame in frames:
        draw_line(console, frame, indent=2)


def _draw_next_steps(found: Explanation, console: Console, stacks: bool) -> None:
    draw_title(console, "Next steps")
    for remedy in found.remedies:
        word, style = _badge(remedy)
        draw_item(console, word, style, f"{remedy.what}{f': {remedy.evidence}' if remedy.evidence else ''}")
        if remedy.setting:
            draw_line(console, remedy.setting, "cyan", indent=BADGE_WIDTH)
    if found.request is not None and not can_replay():
        draw_item(console, "not tried", "dim", NOT_TRIED)
    for what, command in _commands(found, stacks):
        draw_item(console, "see", "", what)
        draw_line(console, f"vram {command} {shlex.quote(found.trace.source)}", "cyan", indent=BADGE_WIDTH)


def _commands(found: Explanation, stacks: bool) -> Iterator[tuple[str, str]]:
    """Commands that show more of the same file."""
    if not stacks:
        yield "whole stacks", "explain --stack"
    if found.request is None:
        yield "what the job would need with other allocators", "replay"
    yield "memory over time and by address, in the browser", "serve"


def _badge(remedy: Remedy) -> tuple[str, str]:
    """A word for what the replays found, and its colour."""
    if not remedy.evidence:
        return "try", ""
    return {True: ("fits", "green"), None: ("may fit", "yellow"), False: ("does not fit", "red")}[remedy.fits]
