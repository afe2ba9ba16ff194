"""The terminal of a predicted program: its output passes through, with a progress line below it.

The program gets a terminal of its own (a pty), so that it prints as it does without vram. What it prints is
copied to the real terminal, above the progress line. Without a terminal nothing is drawn and the program
inherits the standard streams.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from types import TracebackType
from typing import IO, Any

from vram.predict import Progress
from vram.sizes import format_count, format_size

__all__ = ["ProgramScreen"]

CHUNK = 1 << 16
LOOK_SECONDS = 0.2
USUAL_COLUMNS = 80
ERASE = b"\r\x1b[2K"


class ProgramScreen:
    """The streams of a program: `stdout` and `stderr` are for `vram.predict.run`, `show` is its progress.

    With `to_stderr`, everything that the program prints goes to standard error.
    """

    def __init__(self, to_stderr: bool = False) -> None:
        """Prepare; nothing is opened before the `with` block."""
        self.stdout: int | IO[Any] | None = sys.stderr if to_stderr else None
        self.stderr: int | IO[Any] | None = None
        self._lock = threading.Lock()
        self._line = b""
        self._at_start = True  # of a line: the progress line does not interrupt the program's
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgramScreen:
        if sys.stderr.isatty():
            with contextlib.suppress(OSError):
                self._open()
        return self

    def _open(self) -> None:
        self._ours, self._theirs = os.openpty()
        settings = termios.tcgetattr(self._theirs)
        settings[1] &= ~termios.OPOST  # the real terminal does it
        termios.tcsetattr(self._theirs, termios.TCSANOW, settings)
        termios.tcsetwinsize(self._theirs, termios.tcgetwinsize(sys.stderr))
        self.stderr = self._theirs
        if self.stdout is not None or sys.stdout.isatty():
            self.stdout = self._theirs
        self._thread = threading.Thread(target=self._copy, name="vram-predict", daemon=True)
        self._thread.start()

    def show(self, progress: Progress) -> None:
        """Show how far the program has come."""
        if self._thread is None:
            return
        ranks = f" in each of {progress.processes} processes" if progress.processes > 1 else ""
        steps, reserved = format_count(progress.steps, "step"), format_size(progress.reserved)
        text = f"vram: {steps}, {reserved} reserved{ranks}, {progress.seconds:.0f} s"
        with self._lock:
            self._erase()
            self._line = text[: _columns() - 1].encode()
            self._draw()

    def _copy(self) -> None:
        """Copy what the program prints, until it has ended and everything was read."""
        while True:
            ready, _, _ = select.select([self._ours], [], [], LOOK_SECONDS)
            if not ready and self._ending.is_set():
                return
            with contextlib.suppress(OSError):
                if ready:
                    self._print(os.read(self._ours, CHUNK))

    def _print(self, data: bytes) -> None:
        with self._lock:
            self._erase()
            _write(data)
            self._at_start = data.endswith(b"\n")
            self._draw()

    def _erase(self) -> None:
        if self._line and self._at_start:
            _write(ERASE)

    def _draw(self) -> None:
        if self._at_start:
            _write(self._line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        self._ending.set()
        self._thread.join()
        self._erase()
        os.close(self._theirs)
        os.close(self._ours)


def _columns() -> int:
    """The width of the terminal; one that does not know it says 0."""
    return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS


def _write(data: bytes) -> None:
    """Write to the terminal, all of it."""
    while data:
        data = data[os.write(sys.stderr.fileno(), data) :]
