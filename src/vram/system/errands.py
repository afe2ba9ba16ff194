"""Operations on the files of a folder that a process of another user may change at any moment.

`exchange` calls them, or has this file run as a program that takes the identity of that user first: then
links, FIFOs and files that change lead nowhere where that user could not go. Only the standard library is
used. As a program it reads requests and writes answers, in frames of a length and as many bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any

__all__ = ["LENGTH", "OPERATIONS", "PIECE_BYTES", "open_file"]

LENGTH = struct.Struct(">I")
PIECE_BYTES = 1 << 20
"""Maximum number of bytes of a frame."""
MOST_NAMES = 1000
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


def make_folder(parent: str | None) -> str:
    """Make a folder that only this user can enter."""
    return tempfile.mkdtemp(prefix=".vram-attach-", dir=parent)


def open_file(path: str) -> int:
    """Open a regular file for reading. Raises OSError for anything else, without waiting for a FIFO."""
    file = os.open(path, READ)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a regular file")


def read(path: str) -> str:
    """Read a short text, of which JSON fits into a frame: it takes at most 6 bytes for one."""
    with open(open_file(path), "rb") as file:
        content = file.read(PIECE_BYTES // 8 + 1)
    if len(content) > PIECE_BYTES // 8:
        raise OSError(errno.EFBIG, f"it is longer than {PIECE_BYTES // 8} bytes")
    return content.decode("utf-8", "replace")


def write(path: str, text: str) -> None:
    """Put a file there in one step, in the place of whatever was there."""
    with open(os.open(path + ".new", CREATE, 0o600), "wb") as file:
        file.write(text.encode())
    os.replace(path + ".new", path)


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: str) -> None:
    """Remove the folder with all that is in it."""
    shutil.rmtree(path, ignore_errors=True)


def is_content(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file that is not empty."""
    return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size > 0


def names(path: str) -> list[str]:
    """The names of files that are not empty."""
    with os.scandir(path) as entries:
        found = (each.name for each in entries if is_content(each))
        return sorted(name for name, _ in zip(found, range(MOST_NAMES), strict=False))


OPERATIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (make_folder, read, write, remove, remove_folder, names)
}


# ---- as a program ------------------------------------------------------------------------------------------


def become(user: int, group: int, groups: list[int]) -> None:
    """Take the identity of a user for good. The system does not let that user debug this process."""
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    if os.getresuid() != (user,) * 3 or os.getresgid() != (group,) * 3:
        raise PermissionError("the identity was not taken")
    os.chdir("/")


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Do what is asked for until the other end closes."""

    def send(content: bytes) -> None:
        answers.write(LENGTH.pack(len(content)) + content)
        answers.flush()

    while head := requests.read(LENGTH.size):
        name, *arguments = json.loads(requests.read(*LENGTH.unpack(head)))
        try:
            if name == "copy":
                copy(send, *arguments)
            else:
                send(json.dumps({"done": OPERATIONS[name](*arguments)}).encode())
        except OSError as error:
            send(json.dumps({"failed": [error.errno or 0, error.strerror or str(error)]}).encode())


def copy(send: Callable[[bytes], None], path: str, most_bytes: int) -> None:
    """Send the size of a file and its bytes, in frames until an empty one."""
    with open(open_file(path), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        if left > most_bytes:
            raise OSError(errno.EFBIG, f"it has {left} bytes, and {most_bytes} are the most")
        send(json.dumps({"done": left}).encode())
        try:
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                send(piece)
                left -= len(piece)
        finally:
            send(b"")


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
