"""The folder through which vram gives code to another process and reads its answers.

It belongs to the user of that process. If that is another user, as for root, a child process with the
identity of that user does everything there (`errands`), and sends what it read through a pipe. The code is
then in a folder of this user, which the process can only read: it may have begun another program meanwhile,
such as one of root.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vram.core.closing import Closing
from vram.errors import ConfigError, DeviceError

from . import errands
from .runtime import writable_by_others

__all__ = ["Exchange", "Identity"]

ANSWER_SECONDS = 60.0
"""How long the child may take for an answer. Only a file system that does not answer takes longer."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user and the groups that a process has at the moment."""

    user: int
    group: int
    groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Those of a process; the own ones where the system does not tell.

        Raises DeviceError if the process may do more than its user, who could use that through its files.
        """
        try:
            lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        except OSError:
            return cls(os.geteuid(), os.getegid())
        said = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        user = int(said["Uid"][1])
        able = user not in (0, os.geteuid()) and int(said["CapPrm"][0], 16)
        if able or len(set(said["Uid"])) > 1:
            raise DeviceError(f"process {pid} may do more than its user {user}, so vram attach refuses it")
        return cls(user, int(said["Gid"][1]), tuple(map(int, said["Groups"])))


class Exchange(Closing):
    """A new folder of the user with that identity. Only one thread may use it.

    `path` is the folder, and `code_path` where the code is, which only this user can change.
    """

    def __init__(self, identity: Identity, output: Path) -> None:
        """Make the folder: beside `output` if nobody else can write there, or where temporary files are."""
        self._child = None if identity.user == os.geteuid() else _Child(identity)
        try:
            if not os.access(output.parent, os.W_OK):
                output.parent.stat()  # says if it is not there
                raise PermissionError(errno.EACCES, "the directory is not writable")
            self.path = self._make_folder(output)
            self.code_path = self.path if self._child is None else _folder_to_read(self.path.parent)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot write {output}: {error.strerror}") from error

    def _make_folder(self, output: Path) -> Path:
        if self._child is not None:
            return Path(self._child.ask("make_folder", None))
        why = ""
        for parent in (str(output.parent), tempfile.gettempdir()):
            folder = errands.make_folder(parent)
            why = writable_by_others(Path(folder))
            if not why:
                return Path(folder)
            os.rmdir(folder)
        raise PermissionError(errno.EACCES, f"{why}. Set TMPDIR to a directory of your own")

    def _do(self, operation: str, *arguments: str) -> Any:
        try:
            if self._child is not None:
                return self._child.ask(operation, *arguments)
            return errands.OPERATIONS[operation](*arguments)
        except FileNotFoundError:
            if operation == "read":
                return ""
            raise DeviceError(f"{self.path} is gone, so the process cannot answer") from None
        except OSError as error:
            raise DeviceError(f"cannot {operation} {arguments[0]}: {error.strerror}") from error

    def write_code(self, name: str, text: str) -> None:
        """Write a file with code."""
        errands.write(str(self.code_path / name), text)
        if self._child is not None:
            (self.code_path / name).chmod(0o644)

    def remove_code(self, name: str) -> None:
        """Remove a file with code, if it is there."""
        errands.remove(str(self.code_path / name))

    def write(self, name: str, text: str) -> None:
        """Write a file there."""
        self._do("write", str(self.path / name), text)

    def read(self, name: str) -> str:
        """Read a short file. Returns an empty string if there is none."""
        found: str = self._do("read", str(self.path / name))
        return found

    def names(self) -> list[str]:
        """The names of files that are not empty."""
        found: list[str] = self._do("names", str(self.path))
        return found

    def take(self, name: str, target: Path, most_bytes: int) -> None:
        """Move a file to `target`; from the folder of another user, copy at most so many bytes."""
        source = str(self.path / name)
        size = 0
        try:
            if self._child is None:
                os.close(errands.open_file(source))
            else:
                size = self._child.ask("copy", source, most_bytes)
        except OSError as error:
            raise DeviceError(
                f"{name}, which the process wrote, cannot be read ({error.strerror}), so {target} was not "
                "written"
            ) from error
        try:
            if self._child is None:
                shutil.move(source, target)
            else:
                _write(target, self._child.frames(), size)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from error

    def remove_folder(self) -> None:
        """Remove the folder with all that is in it."""
        self._do("remove_folder", str(self.path))

    def remove_code_folder(self) -> None:
        """Remove the code as far as it is elsewhere, once the process has read it or must not read it."""
        if self.code_path != self.path:
            errands.remove_folder(str(self.code_path))

    def close(self) -> None:
        """End the child. The folder stays."""
        if self._child is not None:
            self._child.close()


def _folder_to_read(parent: Path) -> Path:
    """Make a folder of this user, in which others may read files whose names they know."""
    folder = Path(errands.make_folder(str(parent)))
    folder.chmod(0o711)
    if why := writable_by_others(folder):
        folder.rmdir()
        raise PermissionError(errno.EACCES, why)
    return folder


def _write(target: Path, pieces: Iterator[bytes], size: int) -> None:
    """Write a file of that size in one step, in the place of whatever is there. Raises OSError."""
    part = target.with_name(f".vram-attach-{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:
            written = sum(map(file.write, pieces))
        if written != size:
            raise OSError(errno.EIO, "the file changed while it was read")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
        for _ in pieces:
            pass


class _Child:
    """A process with the identity of another user that does errands."""

    def __init__(self, identity: Identity) -> None:
        self._user = identity.user
        words = map(str, (identity.user, identity.group, list(identity.groups)))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", errands.__file__, *words],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for its parent
        )

    def ask(self, operation: str, *arguments: str | int | None) -> Any:
        """Have an operation done. Raises OSError if it fails, and DeviceError if there is no answer."""
        if self._process.returncode is not None:
            raise self._gone("has ended")
        assert self._process.stdin is not None
        request = json.dumps([operation, *arguments]).encode()
        with contextlib.suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(errands.LENGTH.pack(len(request)) + request)
        answer = json.loads(self._frame())
        if "failed" in answer:
            raise OSError(*answer["failed"])
        return answer["done"]

    def frames(self) -> Iterator[bytes]:
        """What follows the answer to "copy"; all of it must be read."""
        while piece := self._frame():
            yield piece

    def _frame(self) -> bytes:
        (length,) = errands.LENGTH.unpack(self._exactly(errands.LENGTH.size))
        if length > errands.PIECE_BYTES:
            raise self._gone("sent what is no answer")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        content = b""
        until = time.monotonic() + ANSWER_SECONDS
        while len(content) < count:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._gone(f"did not answer within {ANSWER_SECONDS:.0f} s")
            piece = os.read(pipe, count - len(content))
            if not piece:
                raise self._gone("has ended")
            content += piece
        return content

    def _gone(self, what: str) -> DeviceError:
        self.close()
        return DeviceError(
            f"the helper process that reads and writes files as user {self._user} {what}. Run vram attach "
            "as that user, or as a root that may become any user (CAP_SETUID and CAP_SETGID)"
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with self._process:
            pass
