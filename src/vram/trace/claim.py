"""A recording's file belongs to one writer at a time: two would overwrite each other.

A claim is a lock of the operating system on the file itself. It works between processes and within one, under
any name of the file, and ends with the process. Windows has no such lock; there a file is not protected.
"""

from __future__ import annotations

import os
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from vram.errors import TraceError

__all__ = ["Claim"]

try:
    import fcntl as _fcntl

    fcntl: Any = _fcntl
except ImportError:
    fcntl = None


class Claim:
    """An empty file at `path` that no other recording can claim until `release`.

    On file systems without locks there is no protection.
    """

    _descriptor: int | None = None

    def __init__(self, path: Path) -> None:
        """Create or empty the file. TraceError if another recording is being written to it."""
        self.path = path
        self._descriptor = _take(path)
        _claims.add(self)

    def put_aside(self, kept: Path) -> None:
        """Rename the file to `kept` and claim an empty one in its place.

        The path refers to a claimed file all the time, so that no other writer can claim it.
        """
        fresh = Claim(self.path.with_name(self.path.name + ".new"))
        kept.unlink(missing_ok=True)
        try:
            os.link(self.path, kept)
        except OSError:  # without hard links there is a moment without a claimed file
            self.path.rename(kept)
        fresh.path.rename(self.path)
        self.release()
        self._descriptor, fresh._descriptor = fresh._descriptor, None

    def release(self) -> None:
        """Release the file. Releasing it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # forked children share the lock and may still run
                if fcntl is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    def _leave_to_parent(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _take(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _lock(descriptor, path)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was renamed before it was locked


def _lock(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise TraceError(f"{path} is not a regular file; name one to record to", place="file")
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TraceError(
            f"another recording, of this process or of another one, is being written to {path}; give each "
            "its own file, with the rank or the process number in the name",
            place="file",
            in_use=True,
        ) from None
    except OSError:
        pass


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The parent continues to write; a child that outlives it must not block the file for others."""
    for claim in tuple(_claims):
        claim._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
