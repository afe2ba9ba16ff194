"""What all commands share: the console, how their options are read, and how an error reaches the user."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import rich_click as click
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from vram.config import split_settings
from vram.errors import ConfigError, VramError
from vram.sizes import parse_size

__all__ = [
    "FINDING",
    "INTERRUPTED",
    "Commands",
    "at_option",
    "device_option",
    "draw_facts",
    "draw_grid",
    "draw_line",
    "file_argument",
    "files_argument",
    "json_option",
    "one_line",
    "open_console",
    "pid_argument",
    "progress_bar",
    "read_conf",
    "read_duration",
    "read_size",
    "top_option",
]

FINDING = 1
BAD_INPUT = 2
INTERRUPTED = 128 + 2
"""As shells say it of a program that Ctrl-C ended."""
READER_LEFT = 128 + 13
"""As shells say it of a program that SIGPIPE ended."""
PIPED_WIDTH = 120
SHOWN_AFTER_S = 1.0
MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
GAP = 2
"""Spaces between the columns of a grid."""
LEAST_WIDTH = 16
"""Letters that a column of names keeps, however narrow the terminal."""

file_argument = click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)


def _monitored(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """What a shell offers in place of a PID."""
    from vram.observe.monitor import processes

    return [str(each.pid) for each in processes() if str(each.pid).startswith(begun)]


pid_argument = click.argument("pid", type=int, required=False, shell_complete=_monitored)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
at_option = click.option(
    "--at",
    metavar="MOMENT",
    default="peak",
    show_default=True,
    help="peak, oom, an event's number or step:N.",
)
top_option = click.option(
    "--top",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Rows to draw; JSON has all of them.",
)
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
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # not every terminal and pipe knows every letter
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except VramError as error:
            click.echo(f"vram: {one_line(str(error))}", err=True)
            ctx.exit(BAD_INPUT)
        except KeyboardInterrupt:
            click.echo("vram: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:  # as `| head` does it: what is left to flush goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(READER_LEFT)


def one_line(message: str) -> str:
    """A message that may quote a stranger's file: one line, and nothing a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))


class _Output(Console):
    """Standard output whose reader may leave."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `Commands`, which hears of it from other writers, too."""
        raise BrokenPipeError


def open_console() -> Console:
    """Standard output, wide enough for a paragraph where no terminal says how wide it is."""
    console = _Output(highlight=False)
    if _is_piped(console):
        console.width = PIPED_WIDTH
    return console


def _is_piped(console: Console) -> bool:
    return not console.is_terminal and "COLUMNS" not in os.environ


def draw_line(console: Console, line: str, style: str = "") -> None:
    """A line of text that may quote a stranger's file."""
    console.print(Text(one_line(line), style=style), soft_wrap=True)


def draw_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Names and values, a line each, whatever the width."""
    width = max(map(cell_len, facts), default=0)
    for name, value in facts.items():
        padded = name + " " * (width - cell_len(name))
        console.print(Text(f"  {padded}  {one_line(value)}"), soft_wrap=True)


def draw_grid(
    console: Console,
    columns: str,
    rows: Sequence[Sequence[str]],
    *,
    top: int | None = None,
    rest: str = "--top shows more",
) -> None:
    """A table without lines. `columns` are titles between `|`; those that begin with `>` have numbers.

    Numbers align right and are never cut; where it is narrow their titles and the other columns fold. In a
    pipe nothing does: a row is a line. Of the rows the first `top` are drawn; `rest` says how to see more.
    """
    cells = [[one_line(cell) for cell in row] for row in rows[:top]]
    numbers = [title.startswith(">") for title in columns.split("|")]
    titles = [title.removeprefix(">") for title in columns.split("|")]
    gaps = GAP * (len(titles) - 1)
    least = _widths(titles, cells)
    width, room = sum(least), console.width - gaps
    if width > room and not _is_piped(console):
        titles = [title.replace(" ", "\n") if numbers[i] else title for i, title in enumerate(titles)]
        folded = _widths(titles, cells)
        least = [each if numbers[i] else min(each, LEAST_WIDTH) for i, each in enumerate(folded)]
        width = min(sum(folded), max(room, sum(least)))
    table = Table(box=None, pad_edge=False, header_style="bold", width=width + gaps)
    for title, number, letters in zip(titles, numbers, least, strict=True):
        justify: JustifyMethod = "right" if number else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=number, min_width=letters)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table, crop=False)
    if len(rows) > len(cells):
        draw_line(console, f"and {len(rows) - len(cells)} more: {rest}", "dim")


def _widths(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    """The letters of the longest line in each column."""
    columns = zip(titles, *cells, strict=True)
    return [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]


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
