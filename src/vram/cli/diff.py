"""`vram diff`: compare the memory of two runs at their peaks. Prints a table of `vram.analysis`."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.analysis import GROUPINGS, Difference, difference
from vram.sizes import format_size
from vram.trace import open_trace

from .console import (
    FINDING,
    at_option,
    device_option,
    draw_grid,
    draw_line,
    json_option,
    open_console,
    read_size,
    top_option,
)

__all__ = ["diff_command"]


@click.command("diff")
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--by",
    type=click.Choice([name for name in GROUPINGS if name != "stack"]),
    default="line",
    show_default=True,
    help="How to group the difference.",
)
@at_option
@click.option(
    "--fail-above",
    metavar="SIZE",
    callback=read_size,
    help="Exit with 1 if B holds more than A by more than this, such as 64MiB.",
)
@top_option
@device_option
@json_option
@click.pass_context
def diff_command(
    ctx: click.Context,
    before: Path,
    after: Path,
    by: str,
    at: str,
    fail_above: int | None,
    top: int,
    device: int | None,
    as_json: bool,
) -> None:
    """Show how much more memory run B holds than run A at the peak, and which lines of code allocate it."""
    first, second = (open_trace(path, device=device) for path in (before, after))
    found = difference(first, second, by, at)
    failed = fail_above is not None and found.gap > fail_above
    if as_json:
        headings = [first.heading(), second.heading()]
        document = {"traces": headings, **found.to_json(), "fail_above": fail_above, "failed": failed}
        click.echo(json.dumps(document))
    else:
        console = open_console()
        _draw(found, (before.name, after.name), top, console)
        if fail_above is not None and failed:
            draw_line(console, f"The difference exceeds the limit of {format_size(fail_above)}.", "bold")
    if failed:
        ctx.exit(FINDING)


def _draw(found: Difference, names: tuple[str, str], top: int, console: Console) -> None:
    held = f"{names[0]} holds {format_size(found.before)}, {names[1]} {format_size(found.after)}"
    draw_line(console, f"{held}: {_signed(found.gap)}", "bold")
    rows = [
        (
            row["group"],
            format_size(row["before"]),
            format_size(row["after"]),
            _signed(row["gap"]),
            f"{row['blocks_before']} → {row['blocks_after']}",
        )
        for row in found.table.to_pylist()
    ]
    if rows:
        draw_grid(console, f"{found.by}|>before|>after|>gap|>blocks", rows, top=top)
    else:
        draw_line(console, f"No difference when grouped by {found.by}.")


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else ''}{format_size(size)}"
