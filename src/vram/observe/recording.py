"""What recordings of a running program share: a thread that writes, marks, and an end.

`vram.observe.recorder` records a pool, `vram.torch.watch` PyTorch's own allocator.
"""

from __future__ import annotations

import abc
import atexit
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from vram.core.closing import Closing
from vram.core.locks import new_event, new_lock
from vram.core.observer import marks
from vram.errors import TraceError
from vram.trace import TraceWriter

__all__ = ["Recording", "beside", "close_after", "path_of_rank", "require_writable"]

_log = logging.getLogger("vram")


class Recording(Closing, abc.ABC):
    """A recording under way. Any thread may use it."""

    _title = "vram.Recording"

    def __init__(self, path: Path) -> None:
        """Prepare; `_start` begins, once everything is ready for the writing thread."""
        self.path = path
        self._lock = new_lock()  # of the file; a finalizer may come in between
        self._ending = new_event()
        # What ended it, until close() raises it. The error would keep what the program's functions hold.
        self._failure: str | None = None

    def _start(self, thread: str) -> None:
        self._end_marks = marks.add(self.mark)
        _open.append(self)
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._thread.start()

    @property
    def events(self) -> int:
        """Events written so far, including those of earlier files."""
        return sum(writer.events for writer in self._writers())

    @property
    def dropped(self) -> int:
        """Events that were lost because reading or writing fell behind; the trace counts them, too."""
        return sum(writer.dropped for writer in self._writers())

    @property
    def closed(self) -> bool:
        """Whether the recording has ended."""
        return self._ending.is_set()

    @abc.abstractmethod
    def mark(self, stage: str, name: str) -> None:
        """Note the "START" or "END" of the phase `name` at this point of the recording."""

    def flush(self) -> None:
        """Write what has happened up to now."""
        with self._lock:
            if not self.closed:
                self._write()

    def close(self) -> None:
        """Write the rest, and what is in use at the end. Closing again does nothing.

        Raises a TraceError if the file could not be written completely.
        """
        with self._lock:
            if not self.closed:
                try:
                    self._finish()
                except Exception as error:
                    self._fail(error)
                self._leave()
            failure, self._failure = self._failure, None
        self._join()
        if failure is not None:
            raise TraceError(
                f"the recording to {self.path} ended early, after {self.events} events: {failure}",
                place="file",
                events=self.events,
            )

    @abc.abstractmethod
    def _writers(self) -> Sequence[TraceWriter]:
        """The files."""

    @abc.abstractmethod
    def _run(self) -> None:
        """Write from time to time until the recording ends."""

    @abc.abstractmethod
    def _write(self) -> None:
        """Write what is new."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Write what is new, and what is in use at the end."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """Have the allocator record no more."""

    def _fail(self, error: Exception) -> None:
        """The file cannot be written. The program continues, and close() reports the error."""
        self._failure = str(error)
        _log.error("the recording to %s ends after %d events: %s", self.path, self.events, self._failure)
        self._leave()

    def _leave(self) -> None:
        if not self.closed:
            self._ending.set()
            self._end_marks()
            self._stop()
            _open.remove(self)

    def _leave_to_parent(self) -> None:
        """In the child of a fork: forget the recording, whose thread and file belong to the parent."""
        self._ending.set()

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __exit__(self, *exception: object) -> None:
        close_after(exception, self)

    @classmethod
    def open_ones(cls) -> list[Self]:
        """The open recordings of this class, oldest first."""
        return [each for each in _open if isinstance(each, cls)]

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        counts = f"{self.events} events, {self.dropped} dropped"
        return f"<{self._title} to {str(self.path)!r}: {counts}, {state}>"


# ---- where recordings go ----------------------------------------------------------------------------------


def beside(path: Path, name: str) -> Path:
    """Where the recording of another device or process goes."""
    return path.with_name(f"{path.stem}.{name.replace(':', '-')}{path.suffix}")


_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables with the rank of a process and the number of ranks; the innermost launcher first."""


def path_of_rank(path: Path) -> Path:
    """`path`, or in a job of several processes a name beside it that has the rank of this one."""
    for number, count in _LAUNCHERS:
        rank, ranks = os.environ.get(number, ""), os.environ.get(count, "")
        if rank.isdecimal() and ranks.isdecimal():
            return beside(path, f"rank-{rank}") if int(ranks) > 1 else path
    return path


def require_writable(path: Path) -> None:
    """Raise a TraceError if no recording can be written to `path`; nothing is created."""
    why = None
    if not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif path.exists() and not path.is_file():
        why = "it is not a regular file"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is not writable"
    if why is not None:
        raise TraceError(f"cannot record to {path}: {why}", place="file")


# ---- the end of the process, and forks --------------------------------------------------------------------

_open: list[Recording] = []
_parents: list[Recording] = []  # kept forever: their end would write into the parent's file


class _Closable(Protocol):
    path: Path

    def close(self) -> None: ...


def close_after(exception: tuple[object, ...], recording: _Closable) -> None:
    """End a recording at the end of a `with` block, whose own exception stays the one that is raised."""
    if not any(exception):
        recording.close()
    else:
        _close_and_log(recording)


def _close_and_log(recording: _Closable) -> None:
    try:
        recording.close()
    except (TraceError, RuntimeError, OSError) as error:
        _log.error("the end of the recording to %s is missing: %s", recording.path, error)


def _close_all() -> None:
    for recording in tuple(_open):
        _close_and_log(recording)


def _after_fork_in_child() -> None:
    _parents.extend(_open)
    for recording in _open:
        recording._leave_to_parent()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
