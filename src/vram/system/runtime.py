"""Where the sockets of monitors are, and whether that place is safe."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from vram.errors import ConfigError

__all__ = ["runtime_directories", "runtime_directory", "unsafe"]


def runtime_directory() -> Path:
    """The directory of this user's sockets, made where it is missing; ConfigError where it is not safe."""
    path = runtime_directories()[0]
    with contextlib.suppress(FileExistsError):
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            raise ConfigError(
                f"there is no place for the monitor's socket: {error}; set VRAM_RUNTIME_DIR"
            ) from error
    if why := unsafe(path):
        raise ConfigError(
            f"{path} is no safe place for the monitor's socket: {why}; remove it, or set "
            "VRAM_RUNTIME_DIR to a directory of your own"
        )
    return path


def runtime_directories() -> list[Path]:
    """Where sockets may be; the first is where this process puts its own.

    VRAM_RUNTIME_DIR is the only place where it is set: processes with different ones do not see each other.
    Otherwise there are two, because a process started elsewhere may not know XDG_RUNTIME_DIR.
    """
    if own := os.environ.get("VRAM_RUNTIME_DIR"):
        return [Path(own)]
    fallback = Path(tempfile.gettempdir()) / f"vram-{os.geteuid()}"
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given) and os.access(given, os.W_OK | os.X_OK):
        return [Path(given) / "vram", fallback]
    return [fallback]


def unsafe(path: Path) -> str:
    """Why others could interfere there; empty where they cannot."""
    try:
        found = path.lstat()
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    return f"others may enter it (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o077 else ""
