"""Reads an untrusted file in a separate process with limits, which returns columns instead of objects.

A file that exceeds the limits or crashes the child raises a TraceError here. `child` describes the answer.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import select
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from vram.errors import TraceError

from .child import TOO_MUCH_MEMORY
from .model import COLUMNS, Trace
from .notes import unpack

__all__ = ["Progress", "read_in_child"]

# Isolated (-I), and without running any __init__: the child needs few modules. pyarrow comes from where the
# caller finds it, and loads three times faster without numpy.
_BOOTSTRAP = """
import sys, types
for name, path in ("vram", sys.argv[1]), ("vram.trace", sys.argv[1] + "/trace"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.path += sys.argv[3:]
sys.modules["numpy"] = None
from vram.trace.child import serve
serve(sys.argv[2])
"""


Progress: TypeAlias = Callable[[int, int], None] | None
PROGRESS_SECONDS = 0.05


def read_in_child(
    file: io.FileIO, source: str, device: int | None, max_bytes: int, progress: Progress = None
) -> Trace:
    """The trace in `file`, read by a child process."""
    package = str(Path(__file__).resolve().parent.parent)
    request = json.dumps({"device": device, "max_bytes": max_bytes})
    command = [sys.executable or "python3", "-I", "-c", _BOOTSTRAP, package, request, *_library_path()]
    # A preloaded library (a sanitizer, a profiler) or an allocator other than the system's may reserve more
    # addresses than the limit allows.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    try:
        child = subprocess.Popen(
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
    except OSError as error:
        raise TraceError(
            f"cannot start a process to read the file safely: {error}; pass trusted=True if you trust it",
            place="file",
        ) from error
    with child:
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


def _library_path() -> list[str]:
    found = importlib.util.find_spec("pyarrow")
    return [str(Path(found.origin).parents[1])] if found and found.origin else []


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
    if status == -getattr(signal, "SIGXCPU", 0) != 0:
        reason = "reading it took more processor time than a recording of its size needs"
    elif "MemoryError" in complaint:
        reason = TOO_MUCH_MEMORY
    elif status < 0:
        reason = f"the process reading it died of signal {-status}"
    else:
        last_line = complaint.rpartition("\n")[2][:200]
        reason = f"the process reading it ended with status {status} ({last_line})"
    return TraceError(f"{reason}; the file is damaged or hostile", place="file", status=status)
