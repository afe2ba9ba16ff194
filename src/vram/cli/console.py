"""What all commands share: the console, how their options are read, and how an error reaches the user."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import rich_click as click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from vram.config import split_settings
from vram.errors import ConfigError, VramError
from vram.sizes import parse_size

__all__ = [
    "FINDING",
    "Commands",
    "device_option",
    "draw_grid",
    "draw_line",
    "open_console",
    "progress_bar",
    "read_conf",
    "read_duration",
    "read_size",
]

FINDING = 1
BAD_INPUT = 2
PIPED_WIDTH = 120
SHOWN_AFTER_S = 1.0
MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


device_option = click.option(
    "--device",
    metavar="N",
    type=int,
    help="Which device of the recording; by default the one with most events.",
)


class Commands(click.RichGroup):
    """A group whose commands end with one line on stderr, not a traceback, when the library refuses."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of the library is the user's to read."""
        try:
            return super().invoke(ctx)
        except VramError as error:
            click.echo(f"vram: {_one_line(str(error))}", err=True)
            ctx.exit(BAD_INPUT)


def _one_line(message: str) -> str:
    """A message that may quote a stranger's file: one line, and nothing a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))


def open_console() -> Console:
    """Standard output, wide enough for a table where no terminal says how wide it is."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def draw_line(console: Console, line: str, style: str = "") -> None:
    """A line of text that may quote a stranger's file."""
    console.print(Text(_one_line(line), style=style), soft_wrap=True)


def draw_grid(console: Console, columns: str, rows: Iterable[Iterable[str]]) -> None:
    """A table without lines. `columns` are titles between `|`; those that begin with `>` align right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns.split("|"):
        table.add_column(
            title.lstrip(">"), justify="right" if title.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(_one_line(cell)) for cell in row))
    console.print(table)


def read_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """`512MiB` as 536870912."""
    try:
        return None if value is None else parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def read_duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """`5ms` as 5000.0 microseconds."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|µs|ms|s)", value.strip())
    if match:
        return float(match[1]) * MICROSECONDS[match[2]]
    if value.strip() == "0":
        return 0.0
    raise click.BadParameter(f"{value!r} is not a time; write 5ms, 250us or 0.1s", ctx, param)


def read_conf(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, object]:
    """`cross_stream:wait,limit:2GiB` as a dict of text; each setting is read by who knows what it wants."""
    try:
        return dict(split_settings(value))
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Takes what is done of how much; shows it on a terminal's stderr once it has taken a second."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task(what)
    started = time.monotonic()

    def show(done: int, count: int) -> None:
        if console.is_terminal and time.monotonic() - started > SHOWN_AFTER_S:
            bar.start()
            bar.update(task, completed=done, total=count)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
