"""`vram serve`: recordings, or a running process, on a page in the browser. `vram.web` serves it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import rich_click as click

from vram.errors import ConfigError

from .console import device_option, open_console

__all__ = ["serve_command"]


@click.command("serve")
@click.argument("files", metavar="[FILE|DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--pid", metavar="PID", type=int, help="A running process of yours that has vram.monitor() on.")
@click.option("--port", metavar="N", type=click.IntRange(0, 65535), default=0, help="By default any.")
@click.option(
    "--open/--no-open",
    "opened",
    default=None,
    help="Open the browser; by default where there is a desktop.",
)
@device_option
def serve_command(
    files: tuple[Path, ...], pid: int | None, port: int, opened: bool | None, device: int | None
) -> None:
    """Show recordings or a running process in the browser: over time, by address, by stack, and why.

    The page is served on 127.0.0.1 for who has the address that is printed, and loads nothing from elsewhere.
    """
    from vram.web import Page

    if not files and pid is None:
        raise ConfigError("name a recording, a folder of them, or a running process with --pid")
    live = None if pid is None else _attached(pid)
    page = Page(files, live=live, port=port, device=device)
    open_console().print(page.url, soft_wrap=True, markup=False)
    sys.stdout.flush()
    if opened or (opened is None and _has_desktop()):
        page.open_browser()
    try:
        page.run()
    finally:
        page.close()


def _attached(pid: int) -> Any:
    """The status of a process, over the socket of its monitor."""
    try:
        monitoring = importlib.import_module("vram.observe.monitor")
    except ImportError as error:
        raise ConfigError("this vram cannot attach to processes; serve a recording of it instead") from error
    return monitoring.attach(pid).status


def _has_desktop() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
