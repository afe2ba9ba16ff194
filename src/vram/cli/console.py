"""What all commands share: the console, option parsing and error reporting."""

from __future__ import annotations

import errno
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
    "BADGE_WIDTH",
    "FINDING",
    "INTERRUPTED",
    "NOT_TRIED",
    "NO_CODE",
    "READER_LEFT",
    "Commands",
    "at_option",
    "device_option",
    "draw_facts",
    "draw_grid",
    "draw_item",
    "draw_line",
    "draw_paragraph",
    "draw_title",
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
    "report_error",
    "top_option",
]

FINDING = 1
BAD_INPUT = 2
INTERRUPTED = 128 + 2
"""What shells report for a program ended by Ctrl-C."""
READER_LEFT = 128 + 13
OUTPUT_FULL = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What shells report for a program ended by SIGPIPE."""
NO_CODE = "code after -c is not supported; write it to a file and name the file"
PIPED_WIDTH = 120
SHOWN_AFTER_S = 1.0
MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "min": 60e6}
GAP = 2
"""Spaces between the columns of a grid."""
BADGE_WIDTH = 14
"""Columns before the text of an item of a list."""
NOT_TRIED = "other allocators: the native core is not installed; Linux on x86_64 and aarch64 has it"
"""What a command says that would have replayed the recording."""
LEAST_WIDTH = 16
"""Minimum width of a text column in characters, even on a narrow terminal."""

file_argument = click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)


def _monitored(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Complete a PID with those of the monitored processes."""
    from vram.observe.monitor import processes

    return [str(each.pid) for each in processes() if str(each.pid).startswith(begun)]


pid_argument = click.argument("pid", type=int, required=False, shell_complete=_monitored)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
at_option = click.option(
    "--at",
    metavar="MOMENT",
    default="peak",
    show_default=True,
    help="Moment to show: peak, oom, an event number or step:N.",
)
top_option = click.option(
    "--top",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of rows to print; JSON contains all rows.",
)
device_option = click.option(
    "--device",
    metavar="N",
    type=int,
    help="Device number in the recording. Default: the one with the most events.",
)


class Commands(click.RichGroup):
    """A group whose commands report library errors as one line on stderr instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn errors of the library into a message and an exit code."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # the encoding may lack some characters
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except VramError as error:
            ctx.exit(report_error(error))
        except KeyboardInterrupt:
            click.echo("vram: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:  # for example `| head`: discard what remains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(READER_LEFT)
        except OSError as error:
            if error.errno not in OUTPUT_FULL:
                raise
            click.echo(f"vram: cannot write the output: {error.strerror}", err=True)
            ctx.exit(BAD_INPUT)


def report_error(error: VramError) -> int:
    """Print an error of the library; returns the exit code."""
    click.echo(f"vram: {one_line(str(error))}", err=True)
    return BAD_INPUT


def one_line(message: str) -> str:
    """Make a message from an untrusted file safe for a terminal: one line, no control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))


class _Output(Console):
    """Standard output whose reader may close the pipe."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise, so that `Commands` handles every broken pipe in one place."""
        raise BrokenPipeError


def open_console() -> Console:
    """Open standard output; a pipe gets a fixed width that is enough for a paragraph."""
    console = _Output(highlight=False)
    if _is_piped(console):
        console.width = PIPED_WIDTH
    return console


def _is_piped(console: Console) -> bool:
    return not console.is_terminal and "COLUMNS" not in os.environ


def draw_line(console: Console, line: str, style: str = "", *, indent: int = 0) -> None:
    """Print one line of text that may come from an untrusted file."""
    console.print(Text(" " * indent + one_line(line), style=style), soft_wrap=True)


def draw_paragraph(console: Console, text: str, style: str = "") -> None:
    """Print text that may come from an untrusted file; on a terminal, lines break between words."""
    console.print(Text(one_line(text), style=style), soft_wrap=_is_piped(console))


def draw_title(console: Console, title: str) -> None:
    """Print the title of a section, after an empty line."""
    console.print()
    draw_line(console, title, "bold underline")


def draw_item(console: Console, badge: str, style: str, text: str) -> None:
    """Print an item of a list: a coloured word, then text that on a terminal wraps beside it."""
    if _is_piped(console):
        console.print(Text(f"{badge:{BADGE_WIDTH}}{one_line(text)}"), soft_wrap=True)
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=0)
    table.add_column(width=BADGE_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(badge, style=style), Text(one_line(text)))
    console.print(table, crop=False)


def draw_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print names and values, one pair per line, at any width."""
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
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table without borders. `columns` holds the titles, separated by `|`; `>` marks number columns.

    Numbers are right-aligned and never cut. On a narrow terminal, text columns and the titles of number
    columns wrap. In a pipe nothing wraps: each row is one line. Only the first `top` rows are printed; `rest`
    tells the user how to see more. `styles` has the style of rows, by their first cell.
    """
    cells = [[one_line(cell) for cell in row] for row in rows[:top]]
    numbers = [title.startswith(">") for title in columns.split("|")]
    titles = [title.removeprefix(">") for title in columns.split("|")]
    if _is_piped(console):
        _print_rows(console, [titles, *cells], numbers)
    else:
        _print_table(console, titles, cells, numbers, styles or {})
    if len(rows) > len(cells):
        draw_line(console, f"and {len(rows) - len(cells)} more: {rest}", "dim")


def _print_rows(console: Console, rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> None:
    """Print each row as one line that ends with its last letter."""
    widths = _widths(rows[0], rows[1:])
    for row in rows:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            space + cell if number else cell + space
            for cell, space, number in zip(row, padding, numbers, strict=True)
        ]
        console.print(Text((" " * GAP).join(cells).rstrip()), soft_wrap=True)


def _print_table(
    console: Console,
    titles: Sequence[str],
    cells: Sequence[Sequence[str]],
    numbers: Sequence[bool],
    styles: Mapping[str, str],
) -> None:
    """Print a table that is no wider than the terminal, if that is possible."""
    gaps = GAP * (len(titles) - 1)
    least = _widths(titles, cells)
    width, room = sum(least), console.width - gaps
    if width > room:
        titles = [title.replace(" ", "\n") if numbers[i] else title for i, title in enumerate(titles)]
        folded = _widths(titles, cells)
        least = [each if numbers[i] else min(each, LEAST_WIDTH) for i, each in enumerate(folded)]
        width = min(sum(folded), max(room, sum(least)))
    table = Table(box=None, pad_edge=False, header_style="bold", width=width + gaps)
    for title, number, letters in zip(titles, numbers, least, strict=True):
        justify: JustifyMethod = "right" if number else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=number, min_width=letters)
    for row in cells:
        table.add_row(*map(Text, row), style=styles.get(row[0], ""))
    console.print(table, crop=False)


def _widths(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the longest line in each column."""
    columns = zip(titles, *cells, strict=True)
    return [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]


def read_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse `512MiB` as 536870912."""
    try:
        return None if value is None else parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def read_duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse `5ms` as 5000.0 microseconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|µs|ms|s|min)", value.strip())
    if match:
        return float(match[1]) * MICROSECONDS[match[2]]
    if value.strip() == "0":
        return 0.0
    raise click.BadParameter(f"{value!r} is not a duration; write 5ms, 0.1s or 2min", ctx, param)


def read_conf(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, object]:
    """Split `cross_stream:wait,limit:2GiB` into a dict of strings. Values stay unparsed."""
    try:
        return dict(split_settings(value))
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total). It shows a progress bar on a terminal after one second."""
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
