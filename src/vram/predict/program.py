"""Runs a program on a null GPU: finds it, starts it, follows it, and collects what its processes left.

`inside/session.py` writes the results that are read here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from vram.arguments import require_python, whole_number
from vram.errors import ConfigError

from .environment import null_environment, require_cuda_torch
from .gpus import Gpu
from .inside import FOLDER, STEPS

__all__ = ["Ended", "Program", "Progress", "execute", "read_program"]

PATIENCE_SECONDS = 30.0
"""How long an interrupted program may take to write its result."""
LOOK_SECONDS = 0.2
USE = struct.Struct("=QQ")
"""What the null GPU leaves of a device: bytes in use at most, and of the last request that it refused."""
UNTOLD: dict[str, Any] = {"peak_allocated": 0, "peak_reserved": 0, "peak_used": 0, "retries": 0}
UNREPORTED: dict[str, Any] = {
    "rank": None,
    "outcome": "running",
    "steps": 0,
    "devices": [],
    "failures": [],
    "error": None,
    "recordings": [],
    "guesses": [],
    "unknown": [],
    "problems": [],
    "static_runtimes": [],
}
"""The result of a process that left none, because it was killed or is not a Python program."""
Stream: TypeAlias = "int | IO[Any] | None"


@dataclass(frozen=True)
class Program:
    """A program as the user wrote it (`words`), and the command that runs it.

    `script` is its Python file, None for a module or another command.
    """

    words: tuple[str, ...]
    command: tuple[str, ...]
    script: Path | None = None

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Progress:
    """How far the processes of a program have come: the most steps, and bytes reserved on one device."""

    steps: int
    reserved: int
    processes: int
    seconds: float


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what each of its processes that used CUDA left.

    `status` is the exit status, negative for a signal; `interrupted` is set if the user ended it.
    """

    status: int
    interrupted: bool
    seconds: float
    results: tuple[dict[str, Any], ...]


def read_program(words: Sequence[str | os.PathLike[str]]) -> Program:
    """A program from the words of its command: a script, `-m MODULE`, or a command such as torchrun.

    A command of the same Python environment comes before others on PATH, as its scripts run there, too.
    """
    told = tuple(os.fspath(word) for word in words)
    if not told:
        raise ConfigError("name a program: script.py, -m module, or a command such as torchrun")
    if told[0] == "-m":
        if len(told) < 2:
            raise ConfigError("-m needs the name of a module")
        return Program(told, (sys.executable, *told))
    first = Path(told[0])
    if first.exists() and _is_python(first):
        require_python(first)
        return Program(told, (sys.executable, *told), first)
    command = shutil.which(told[0], path=os.path.dirname(sys.executable)) or shutil.which(told[0])
    if command is None:
        what = "script" if told[0].endswith(".py") or os.sep in told[0] else "script or command"
        where = "" if first.is_absolute() else f" in {os.getcwd()}"
        raise ConfigError(f"{what} {told[0]!r} not found{where}")
    return Program(told, (command, *told[1:]))


def _is_python(path: Path) -> bool:
    """Whether Python runs the file: by its name, or because the system could not."""
    return path.is_dir() or path.suffix in (".py", ".pyc", ".pyz") or not os.access(path, os.X_OK)


def execute(
    program: Program,
    folder: str,
    gpu: Gpu,
    devices: int = 1,
    *,
    steps: int | None = None,
    environment: Mapping[str, str] | None = None,
    stdout: Stream = None,
    stderr: Stream = None,
    progress: Callable[[Progress], object] | None = None,
) -> Ended:
    """Run the program to its end, or until it has done `steps` steps; results go to `folder`."""
    if program.command[0] == sys.executable:
        require_cuda_torch()
    settings = null_environment(gpu, devices, environment)
    settings[FOLDER] = folder
    if steps is not None:
        settings[STEPS] = str(whole_number(steps, "steps", least=1))
    begin = time.monotonic()
    with _signals() as asked:
        child = _Child(subprocess.Popen(program.command, env=settings, stdout=stdout, stderr=stderr), asked)
        try:
            while not child.ended():
                if progress is not None:
                    progress(_progress(folder, time.monotonic() - begin))
        finally:
            child.end()
    return Ended(child.status, bool(asked), time.monotonic() - begin, tuple(_results(folder)))


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of ending, if this is the main thread; a terminal sends Ctrl-C to
    the program as well."""
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)

    previous: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # in another thread than the main one, the handlers stay
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    try:
        yield asked
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)


class _Child:
    """The running program. Signals that `asked` for its end are passed on, and it is killed if it stays."""

    def __init__(self, process: subprocess.Popen[Any], asked: list[int]) -> None:
        self._process = process
        self._asked = asked
        self._passed = 0
        self._deadline = math.inf

    @property
    def status(self) -> int:
        return self._process.returncode

    def ended(self) -> bool:
        """Wait a little; whether the program has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)
            return True
        for number in self._asked[self._passed :]:
            self._pass_on(number)
        if time.monotonic() > self._deadline:
            self._process.kill()
        return False

    def _pass_on(self, number: int) -> None:
        """The first signal lets the program write its result; another one, or no reaction, kills it."""
        if self._passed:
            self._deadline = 0
        else:
            self._deadline = time.monotonic() + PATIENCE_SECONDS
            if number == signal.SIGTERM or not _has_terminal():
                self._process.send_signal(number)
        self._passed += 1

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _results(folder: str) -> Iterator[dict[str, Any]]:
    """What the processes left, by rank and then in the order of their numbers."""
    found: dict[int, dict[str, Any]] = {}
    for path in Path(folder).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            result = json.loads(path.read_text("utf-8"))
            found[result["pid"]] = result
    for path in Path(folder).glob("*.use"):
        with contextlib.suppress(OSError, ValueError):
            result = found.setdefault(int(path.stem), {**UNREPORTED, "pid": int(path.stem)})
            if result["outcome"] == "running":
                _add_use(result, path.read_bytes())
    yield from sorted(found.values(), key=lambda each: (each["rank"] is None, each["rank"] or 0, each["pid"]))


def _add_use(result: dict[str, Any], use: bytes) -> None:
    """Complete what a process has told so far by what the null GPU knows (native/null_gpu/report.hpp)."""
    told = {each["device"]: each for each in result["devices"]}
    for device, (peak, refused) in enumerate(USE.iter_unpack(use)):
        if peak:
            entry = told.setdefault(device, {**UNTOLD, "device": device})
            entry["peak_used"] = max(entry["peak_used"], peak)
            entry["refused"] = refused
    result["devices"] = [told[device] for device in sorted(told)]


def _progress(folder: str, seconds: float) -> Progress:
    results = list(_results(folder))
    return Progress(
        steps=max((each["steps"] for each in results), default=0),
        reserved=max((used["peak_reserved"] for each in results for used in each["devices"]), default=0),
        processes=len(results),
        seconds=seconds,
    )
