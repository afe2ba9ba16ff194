"""The directory of the monitors' sockets, and whether it is safe."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from vram.errors import ConfigError

__all__ = ["runtime_directories", "runtime_directory", "unsafe"]


def runtime_directory() -> Path:
    """Return the directory of this user's sockets, created if missing; raise ConfigError if it is unsafe."""
    path = runtime_directories()[0]
    with contextlib.suppress(FileExistsError):
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            raise ConfigError(
                f"failed to create a directory for the monitor's socket: {error}; set VRAM_RUNTIME_DIR"
            ) from error
    if why := unsafe(path):
        raise ConfigError(
            f"{path} is not a safe directory for the monitor's socket: {why}; remove it, or set "
            "VRAM_RUNTIME_DIR to a directory of your own"
        )
    return path


def runtime_directories() -> list[Path]:
    """Return the directories where sockets may be; this process uses the first.

    If VRAM_RUNTIME_DIR is set, it is the only one: processes with different values do not see each other.
    Otherwise there are two, because a process that was started elsewhere may not have XDG_RUNTIME_DIR.
    """
    if own := os.environ.get("VRAM_RUNTIME_DIR"):
        return [Path(own)]
    fallback = Path(tempfile.gettempdir()) / f"vram-{os.geteuid()}"
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given) and os.access(given, os.W_OK | os.X_OK):
        return [Path(given) / "vram", fallback]
    return [fallback]


def unsafe(path: Path) -> str:
    """Return why others could interfere there; an empty string if they cannot."""
    try:
        found = path.lstat()
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    return f"other users can access it (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o077 else ""
