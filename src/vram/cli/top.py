"""`vram top`: what a running process holds, live.

This file has the command and the printed form. The full screen is in `top_screen`, which needs Textual.
The tables of both are in `top_tables`, and the data comes from `vram.observe.monitor`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import rich_click as click

from vram.errors import ConfigError

from .console import draw_grid, draw_line, json_option, open_console, pid_argument, read_duration, top_option
from .top_tables import TABLES, Status, Table, device_line, heading

__all__ = ["top_command"]

NEEDS_TEXTUAL = 'the live screen needs Textual: pip install "vram[tui]"; vram top -1 works without it'


@click.command("top")
@pid_argument
@click.option("-1", "--once", is_flag=True, help="Print once and exit; needs no terminal.")
@click.option(
    "--every",
    metavar="TIME",
    default="1s",
    show_default=True,
    callback=read_duration,
    help="Update interval, such as 500ms.",
)
@click.option("--filter", "wanted", metavar="TEXT", default="", help="Show only rows that contain TEXT.")
@top_option
@json_option
def top_command(pid: int | None, once: bool, every: float, wanted: str, top: int, as_json: bool) -> None:
    """Show what a running process holds, by pool, stream, tag and line, and who else uses its devices.

    PID is a process of yours that called vram.monitor() or was started with vram run --monitor. You can omit
    it if there is only one.
    """
    from vram.observe.monitor import attach

    if not (once or as_json):
        run = _screen()
    with attach(pid) as client:
        if as_json:
            click.echo(json.dumps(client.status(top)))
        elif once:
            _draw(client.status(top), wanted, top)
        else:
            run(lambda: client.status(top), max(0.05, every / 1e6), wanted)


def _screen() -> Callable[[Callable[[], Status], float, str], None]:
    try:
        from .top_screen import show
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise ConfigError(NEEDS_TEXTUAL) from error
    return show


def _draw(status: Status, wanted: str, top: int) -> None:
    console = open_console()
    draw_line(console, heading(status), "bold")
    for device in status["devices"]:
        draw_line(console, device_line(device))
    for table in TABLES:
        rows = table.rows(status, wanted=wanted)
        console.print()
        draw_line(console, f"{table.name}{_age(table, status)}", "bold")
        if rows:
            draw_grid(console, table.columns, rows, top=top)
        else:
            draw_line(console, f"none{' with ' + repr(wanted) if wanted else ''}")
        if left := status["left_out"].get(table.name, 0):
            draw_line(console, f"and {left} more: --top shows more", "dim")


def _age(table: Table, status: Status) -> str:
    """Return the age of data that is not refreshed on every update."""
    old = status["holders_age_s"]
    return f", {old:.0f} s ago" if table.name == "holders" and old >= 1 else ""


# ---- lines ------------------------------------------------------------------------------------------------
