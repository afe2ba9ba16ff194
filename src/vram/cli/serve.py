"""`vram serve`: show recordings or a running process in the browser. `vram.web` serves the page."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from vram.errors import ConfigError

from .console import device_option, open_console, progress_bar

if TYPE_CHECKING:
    from vram.web import Page

__all__ = ["serve_command"]


@click.command("serve")
@click.argument("files", metavar="[FILE|DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--pid", metavar="PID", type=int, help="Your running process that called vram.monitor().")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=0, help="Port. Default: any free one."
)
@click.option(
    "--open/--no-open",
    "opened",
    default=None,
    help="Open the browser. Default: if a desktop is available.",
)
@device_option
def serve_command(
    files: tuple[Path, ...], pid: int | None, port: int, opened: bool | None, device: int | None
) -> None:
    """Show recordings or a running process in the browser: memory over time, by address, by stack, and why.

    The page is served on 127.0.0.1. Requests must carry the token in the printed address. The page loads
    nothing from other servers.
    """
    from vram.observe.monitor import attach
    from vram.web import Page

    if not files and pid is None:
        raise ConfigError("specify a recording, a directory of recordings, or a running process with --pid")
    live = None if pid is None else attach(pid).status
    page = Page(files, live=live, port=port, device=device)
    try:
        _serve(page, files, opened)
    finally:
        page.close()


def _serve(page: Page, files: tuple[Path, ...], opened: bool | None) -> None:
    if len(files) == 1 and not files[0].is_dir():
        with progress_bar("reading") as show:
            page.recordings.open(0, show)  # a file that cannot be read fails here, not in the browser
    open_console().print(page.url, soft_wrap=True, markup=False)
    sys.stdout.flush()
    if opened or (opened is None and _has_desktop()):
        page.open_browser()
    elif opened is None:
        click.echo(_tunnel(page.port), err=True)
    page.run()


def _tunnel(port: int) -> str:
    """How to open the page in the browser of another machine."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    host, ssh_port = (connection[2], connection[3]) if len(connection) == 4 else (socket.gethostname(), "22")
    other_port = "" if ssh_port == "22" else f" -p {ssh_port}"
    return (
        "To open it in the browser of another machine, run this there, then open the address above:\n"
        f"  ssh -N -L {port}:127.0.0.1:{port}{other_port} {_user()}@{host}"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry for this user, as in some containers
        return "USER"


def _has_desktop() -> bool:
    if os.environ.get("SSH_CONNECTION"):
        return False  # a browser would open there, not where the user sits
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
