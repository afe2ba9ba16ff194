"""The directory of the monitors' sockets, and whether directories and files are safe from other users."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from vram.errors import ConfigError

__all__ = ["runtime_directories", "runtime_directory", "unsafe", "writable_by_others"]

NAMESPACE_USERS = Path("/proc/self/uid_map")
OVERFLOW_USER = Path("/proc/sys/fs/overflowuid")


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


def writable_by_others(path: Path) -> str:
    """Return why users other than this one and root could change what is at `path`; an empty string if not.

    Code is loaded only from where nobody else can write. The directories above count too, because whoever can
    write to one of them can put something else in the place of what is below.
    """
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        try:
            found = place.lstat()
        except OSError as error:
            return f"{place}: {error.strerror}"
        if why := _others_write(found, above=place != real):
            return f"{place} {why}"
    return ""


def _others_write(found: os.stat_result, *, above: bool) -> str:
    """Say why others can write; a directory `above` is safe if it only lets others add entries."""
    if found.st_uid not in (os.geteuid(), 0) and not (above and found.st_uid == _unmapped_user()):
        return f"belongs to user {found.st_uid}"
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or (writers == stat.S_IWGRP and _is_private_group(found.st_gid)):
        return ""
    if above and found.st_mode & stat.S_ISVTX:
        return ""  # as in /tmp
    return f"can be written by other users (mode {found.st_mode & 0o7777:o})"


def _is_private_group(group: int) -> bool:
    """Whether only this user is in a group, as on systems where each user has one of the same name."""
    import grp  # Windows has neither
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def _unmapped_user() -> int | None:
    """The user that the system's root appears as in a user namespace; None outside of one."""
    try:
        if NAMESPACE_USERS.read_text().split() != ["0", "0", str(2**32 - 1)]:
            return int(OVERFLOW_USER.read_text())
    except (OSError, ValueError):
        pass
    return None
