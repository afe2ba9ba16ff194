"""Processes with limits that work on files of unknown origin, as their parents see them.

`read_in_child` reads a file in one and returns columns instead of objects; `child` describes the answer. The
command line and the page use the rest. `limits` has what such a process may use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import select
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from vram.errors import TraceError

from . import limits
from .limits import TOO_MUCH_MEMORY, TOO_MUCH_TIME
from .model import COLUMNS, Trace
from .notes import unpack

__all__ = [
    "HOSTILE",
    "Progress",
    "Watch",
    "follow_child",
    "read_in_child",
    "start_child",
    "why_it_ended",
]

# Isolated (-I), and without running the __init__ of packages on the way to the module. Libraries come from
# where the caller finds them.
_BOOTSTRAP = """
import importlib, sys, types
root, module = sys.argv[1:3]
for name in "vram", module.rpartition(".")[0]:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + name.removeprefix("vram").replace(".", "/")]
sys.path += sys.argv[4:]
importlib.import_module(module).serve(sys.argv[3])
"""

Progress: TypeAlias = Callable[[int, int], None] | None
PROGRESS_SECONDS = 0.05
WATCH_SECONDS = 0.05
HOSTILE = "the file is damaged or hostile"


def start_child(
    module: str, request: str, libraries: Iterable[str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start an interpreter that calls `serve(request)` of a module of vram."""
    package = str(Path(__file__).resolve().parent.parent)
    interpreter = [sys.executable or "python3", "-I", "-c", _BOOTSTRAP]
    command = [*interpreter, package, module, request, *_library_paths(libraries)]
    # A preloaded library (a sanitizer, a profiler) or an allocator other than the system's may reserve more
    # addresses than the limit allows.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", **limits.ONE_THREAD}
    try:
        return subprocess.Popen(command, env=environment, **streams)
    except OSError as error:
        raise TraceError(
            f"cannot start a process to read the file safely: {error}; pass trusted=True if you trust it",
            place="file",
        ) from error


def _library_paths(names: Iterable[str]) -> list[str]:
    found = (importlib.util.find_spec(name) for name in names)
    return list(dict.fromkeys(str(Path(each.origin).parents[1]) for each in found if each and each.origin))


class Watch:
    """Ends a process that takes more memory than the files it has read account for."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._most = _resident_bytes(process) + limits.WORK_FLOOR_BYTES
        self.ended = False

    def allow(self, count: int) -> None:
        """The process may take so many more bytes."""
        self._most += count

    def look(self) -> None:
        """End the process if it has too much."""
        if _resident_bytes(self._process) > self._most:
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)


def _resident_bytes(process: int) -> int:
    """0 where the system does not tell."""
    try:
        with open(f"/proc/{process}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def follow_child(output: int, watch: Watch) -> Iterator[tuple[str, Any]]:
    """What a process sends as lines of a kind and JSON, until it ends; meanwhile its memory is watched."""
    ahead = bytearray()
    while True:
        while not select.select([output], [], [], WATCH_SECONDS)[0]:
            watch.look()
        data = os.read(output, 1 << 20)
        if not data:
            return
        ahead += data
        *lines, rest = ahead.split(b"\n") if b"\n" in data else [ahead]
        ahead = rest
        for line in lines:
            kind, _, content = line.partition(b" ")
            yield kind.decode(), json.loads(content)


def why_it_ended(status: int, *, watch: Watch | None = None, complaint: str = "") -> str:
    """The reason for which a process ended without an answer; `status` as of `subprocess`."""
    if (watch is not None and watch.ended) or "MemoryError" in complaint:
        return f"{TOO_MUCH_MEMORY}; {HOSTILE}"
    if status == -getattr(signal, "SIGXCPU", 0) != 0:
        return f"{TOO_MUCH_TIME}; {HOSTILE}"
    if status == -getattr(signal, "SIGKILL", 0) != 0:
        return (
            "the process that worked on it was killed: by a user, by a limit of processor time (ulimit -t) "
            "or because the system ran out of memory"
        )
    if status < 0:
        how = f"died of signal {-status} ({signal.strsignal(-status)})"
    else:
        last_line = complaint.rpartition("\n")[2][:200]
        how = f"ended with status {status}{last_line and f' ({last_line})'}"
    return f"the process that worked on it {how}; {HOSTILE}, or this is an error of vram"


# ---- reading -----------------------------------------------------------------------------------------------


def read_in_child(
    file: io.FileIO, source: str, device: int | None, max_bytes: int, progress: Progress = None
) -> Trace:
    """The trace in `file`, read by a child process."""
    request = json.dumps({"device": device, "max_bytes": max_bytes})
    streams = {"stdin": file, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_child("vram.trace.child", request, ["pyarrow"], **streams) as child:
        try:
            if progress is not None:
                _follow(child, file.fileno(), progress)
            return _receive(child, source)
        except BaseException:
            child.kill()
            raise


def _follow(child: subprocess.Popen[bytes], file: int, progress: Callable[[int, int], None]) -> None:
    """Report how far the child has read until it answers. It shares the position in the file with us."""
    assert child.stdout is not None
    whole = os.fstat(file).st_size
    while not select.select([child.stdout], [], [], PROGRESS_SECONDS)[0]:
        progress(min(os.lseek(file, 0, os.SEEK_CUR), whole), whole)
    progress(whole, whole)


def _receive(child: subprocess.Popen[bytes], source: str) -> Trace:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line.endswith(b"\n"):
        raise _failure(child)
    reply = json.loads(line)
    if "error" in reply:
        message, facts = reply["error"]
        raise TraceError(message, **facts)
    columns: dict[str, array[int]] = {}
    for name, typecode in COLUMNS.items():
        columns[name] = array(typecode)
        try:
            columns[name].fromfile(child.stdout, reply["events"])
        except EOFError:
            raise _failure(child) from None
    return unpack(reply["notes"], columns, source)


def _failure(child: subprocess.Popen[bytes]) -> TraceError:
    """The error of a child that ended without an answer."""
    assert child.stderr is not None
    complaint = child.stderr.read().decode("utf-8", "replace").strip()
    status = child.wait()
    return TraceError(why_it_ended(status, complaint=complaint), place="file", status=status)
