"""The files that a page may show, and the processes with limits that read them and answer queries.

A file of unknown origin must not be able to end the server, which may run inside a training job: each file
has a process (`child`), and its death is an error of the queries that wait for it. A query names its file by
a number in a table that was created when the page was opened; the page never sends a path.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import queue
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from vram import errors
from vram.errors import ConfigError, TraceError
from vram.trace.sandbox import WATCH_SECONDS, Watch, start_child, why_it_ended

from .recordings import Answer, Parameters, whole

__all__ = ["Recordings"]

NO_RECORDINGS = (".md", ".html", ".py")
"""Files in a folder that are not listed: notes, reports and programs."""
KEPT_PROCESSES = 4
"""Maximum number of processes without a query; each has a recording in memory."""

Progress: TypeAlias = Callable[[int, int], None]


class Recordings:
    """The files of a page: a table, opened on demand. Only `add` extends it. Any thread may use it."""

    def __init__(self, paths: Iterable[Path], *, device: int | None = None) -> None:
        """Set the files. Directories are listed now; nothing is read yet."""
        given = list(paths)
        self.folder = next((path.name or str(path) for path in given if path.is_dir()), "")
        self._paths = list(_listed(given))
        self._device = device
        self._summaries: dict[int, bytes] = {}
        self._processes: OrderedDict[int, _Process] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._paths)

    def names(self) -> list[Answer]:
        """Return number, name and size of each file."""
        return [
            {"file": number, "name": path.name, "bytes": path.stat().st_size if path.exists() else 0}
            for number, path in enumerate(self._paths)
        ]

    def add(self, path: Path) -> int:
        """Add a file to the table and return its number."""
        with self._lock:
            self._paths.append(path)
            return len(self._paths) - 1

    def open(self, number: int, progress: Progress | None = None) -> None:
        """Read a file if needed, and raise its errors; `progress` is that of `vram.open`."""
        self._process(number).ask("open", {"file": str(number)}, self._named(number), reading=progress)

    def answer(self, question: str, given: Parameters, progress: Progress | None = None) -> bytes:
        """Answer a query of the page by its name, in JSON."""
        if question == "files":
            return json.dumps({"files": self.names()}).encode()
        number = whole(given, "file")
        if question == "reading":
            return json.dumps(self._reading(number)).encode()
        if question == "summary" and number in self._summaries:
            return self._summaries[number]
        named = self._named(number, *([whole(given, "against_file")] if "against_file" in given else []))
        found = self._process(number).ask(question, given, named, progress=progress)
        if question == "summary":  # kept, so that an index reads each file once
            self._summaries[number] = found
        return found

    def _reading(self, number: int) -> Answer:
        """Return how much of a file was read so far; never waits."""
        process = self._processes.get(number)
        done, size = (0, 0) if process is None else process.read
        return {"done": done, "bytes": size, "open": process is not None and process.opened}

    def _named(self, *numbers: int) -> dict[int, str]:
        """The paths of some files of the table."""
        for number in numbers:
            if not 0 <= number < len(self._paths):
                raise ConfigError(f"recording {number} does not exist; there are {len(self._paths)}")
        return {number: str(self._paths[number]) for number in numbers}

    def _process(self, number: int) -> _Process:
        """The process of a file. One that died is replaced."""
        named = self._named(number)
        with self._lock:
            found = self._processes.get(number)
            if found is None or found.ended:
                found = self._processes[number] = _Process(number, named[number], self._device)
            self._processes.move_to_end(number)
            idle = [each for each in self._processes if each != number and not self._processes[each].busy]
            for other in idle[: max(0, len(self._processes) - KEPT_PROCESSES)]:
                self._processes.pop(other).close()
            return found

    def descriptors(self) -> list[int]:
        """The pipes to the processes."""
        return [each for process in self._processes.values() for each in process.descriptors()]

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            while self._processes:
                self._processes.popitem()[1].close()


def _listed(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(filter(_may_be_recording, path.iterdir()))
        elif path.is_file():
            yield path
        else:
            raise TraceError(f"cannot open {path}: no such file or directory", place="file")


def _may_be_recording(path: Path) -> bool:
    return path.is_file() and path.name[0] != "." and path.suffix not in NO_RECORDINGS


# ---- processes ---------------------------------------------------------------------------------------------


class _Process:
    """A process that has read one file. `child` describes what it is asked and what it answers."""

    def __init__(self, number: int, path: str, device: int | None) -> None:
        self._name = Path(path).name
        self.read = (0, 0)
        self.opened = self.ended = False
        request = json.dumps({"file": number, "path": path, "device": device})
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._child = start_child("vram.web.child", request, ("numpy", "pyarrow"), **streams)
        self._watch = Watch(self._child.pid)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[tuple[str, bytes]]] = {}
        self._failure = ("", b"")
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="vram-page-files", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a query waits for its answer."""
        return bool(self._waiting)

    def ask(
        self,
        question: str,
        given: Parameters,
        paths: Mapping[int, str],
        *,
        progress: Progress | None = None,
        reading: Progress | None = None,
    ) -> bytes:
        """Return the answer, in JSON, or raise the error that the process answers or dies of.

        `progress` is called with how far the answer is, `reading` with how much of the file is read.
        """
        answers: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        asked = {"question": question, "given": dict(given), "paths": paths}
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answers
            if self.ended:
                answers.put(self._failure)
            else:
                self._send({"number": number, **asked})
        try:
            while True:
                kind, content = self._next(answers, reading)
                if kind == "answer":
                    return content
                if kind == "progress" and progress is not None:
                    progress(*json.loads(content))
                elif kind == "error":
                    raise _error(*json.loads(content))
        finally:
            with self._lock:
                del self._waiting[number]

    def _send(self, asked: Mapping[str, object]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which the listener is about to tell
            self._child.stdin.write(json.dumps(asked).encode() + b"\n")
            self._child.stdin.flush()

    def _next(
        self, answers: queue.SimpleQueue[tuple[str, bytes]], reading: Progress | None
    ) -> tuple[str, bytes]:
        """What comes next; meanwhile the memory of the process is watched."""
        while True:
            try:
                return answers.get(timeout=WATCH_SECONDS)
            except queue.Empty:
                self._watch.look()
            if reading is not None and not self.opened:
                reading(*self.read)

    def _listen(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        for line in self._child.stdout:  # its last line may be incomplete
            if not line.endswith(b"\n"):
                break
            number, kind, content = line.rstrip(b"\n").split(b" ", 2)
            if kind == b"memory":
                self._watch.allow(int(content))
            elif kind == b"reading":
                done, size = json.loads(content)
                self.read = done, size
            elif kind == b"opened":
                self.opened = True
            elif kind == b"failure":  # it could not read the file, and ends
                self._failure = "error", content
            elif int(number) in self._waiting:
                self._waiting[int(number)].put((kind.decode(), content))
        status = self._child.wait()
        self._child.stdout.close()
        if not self._failure[0]:
            why = f"{self._name}: {why_it_ended(status, watch=self._watch)}"
            self._failure = "error", json.dumps(["TraceError", why, ""]).encode()
        with self._lock:
            self.ended, self.opened = True, False
            for answers in self._waiting.values():
                answers.put(self._failure)
            with contextlib.suppress(OSError):
                self._child.stdin.close()

    def descriptors(self) -> list[int]:
        """The pipes to the process."""
        pipes = (self._child.stdin, self._child.stdout)
        return [pipe.fileno() for pipe in pipes if pipe is not None and not pipe.closed]

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.wait()


def _error(kind: str, message: str, traceback: str) -> Exception:
    """An error of the process, as if it had been raised here."""
    known = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if not isinstance(known, type) or not issubclass(known, Exception):
        known, message = RuntimeError, f"{kind}: {message}"
    found = known(message)
    if traceback:
        found.add_note(traceback)
    return found
