"""`vram diff`: compare the memory of two runs at their peaks. Prints a table of `vram.analysis`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import rich_click as click
from rich.console import Console

from vram.analysis import GROUPINGS, Difference, difference
from vram.errors import ConfigError
from vram.sizes import GrowthLimit, format_size
from vram.trace import open_trace

from .console import (
    FINDING,
    at_option,
    device_option,
    draw_grid,
    draw_line,
    json_option,
    one_line,
    open_console,
    top_option,
)
from .limited import limited

__all__ = ["diff_command"]


def _read_limit(ctx: click.Context, param: click.Parameter, value: str | None) -> GrowthLimit | None:
    try:
        return None if value is None else GrowthLimit.parse(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


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
    metavar="SIZE|PERCENT",
    callback=_read_limit,
    help="Exit with 1 if B holds more than A by more than this, such as 64MiB or 5%.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown, for a comment on a pull request.")
@top_option
@device_option
@json_option
@click.pass_context
@limited
def diff_command(
    ctx: click.Context,
    before: Path,
    after: Path,
    by: str,
    at: str,
    fail_above: GrowthLimit | None,
    markdown: bool,
    top: int,
    device: int | None,
    as_json: bool,
) -> None:
    """Show how much more memory run B holds than run A at the peak, and which lines of code allocate it.

    A line that only moved within its function counts as the same line, so that A and B can be recordings of
    two versions of a program.
    """
    first, second = (open_trace(path, device=device) for path in (before, after))
    found = difference(first, second, by, at)
    failed = fail_above is not None and fail_above.exceeded(found.before, found.after)
    if as_json:
        headings = [first.heading(), second.heading()]
        limit = fail_above and (fail_above.text if fail_above.bytes is None else fail_above.bytes)
        document = {"traces": headings, **found.to_json(), "fail_above": limit, "failed": failed}
        click.echo(json.dumps(document))
    elif markdown:
        click.echo("\n".join(_markdown(found, top, fail_above)))
    else:
        console = open_console()
        _draw(found, (before.name, after.name), top, console)
        if fail_above is not None and failed:
            draw_line(console, f"The difference exceeds the limit of {fail_above.text}.", "bold")
    if failed:
        ctx.exit(FINDING)


def _markdown(found: Difference, top: int, limit: GrowthLimit | None) -> Iterator[str]:
    """A heading, the totals, and a row for each group; names are code, which Markdown does not interpret."""
    if limit is None:
        mark, verdict = "", ""
    elif limit.exceeded(found.before, found.after):
        mark, verdict = "❌ ", f" This is more than the limit of {limit.text}."
    else:
        mark, verdict = "✅ ", f" The limit is {limit.text}."
    share = f" ({found.growth:+.1%})" if found.before else ""
    yield f"### {mark}Peak GPU memory: {_signed(found.gap)}{share}"
    yield ""
    yield f"{format_size(found.before)} before, {format_size(found.after)} after.{verdict}"
    rows = found.table.to_pylist()
    if not rows:
        return
    yield ""
    yield f"| {found.by} | before | after | difference |"
    yield "|---|---:|---:|---:|"
    for row in rows[:top]:
        sizes = (format_size(row["before"]), format_size(row["after"]), _signed(row["gap"]))
        yield f"| {_code(row['group'])} | {' | '.join(sizes)} |"
    if len(rows) > top:
        rest = sum(row["gap"] for row in rows[top:])
        yield f"| {len(rows) - top} more | | | {_signed(rest)} |"


def _code(text: str) -> str:
    """A name from an untrusted file as code in a cell."""
    return "`" + one_line(text).replace("`", "'").replace("|", "\\|") + "`"


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
