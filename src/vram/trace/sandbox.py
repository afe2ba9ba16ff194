"""Reads a file nobody vouches for in a process of its own, under limits, and takes back columns, not objects.

The child may use memory and processor time in proportion to the bytes it has read, never more: the limits are
raised as bytes arrive. A file that exceeds them, or crashes the child, is a TraceError here. What the bytes
mean is for `formats`.

What the child sends:    one line of JSON, then the columns' bytes one after another, in the order of COLUMNS
    {"error": [message, facts]}
    {"notes": {...as in `notes`...}, "events": count}
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import resource
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from typing import BinaryIO

from vram.errors import TraceError

from .files import BoundedReader
from .formats import read_trace
from .model import COLUMNS, Trace
from .notes import pack, unpack

__all__ = ["read_in_child"]

# A snapshot takes about 7 bytes of memory for each of its own, and a second for every 20 MB.
MEMORY_FLOOR_BYTES = 512 << 20
MEMORY_FACTOR = 16
PROCESSOR_FLOOR_SECONDS = 3
BYTES_A_SECOND = 2_000_000

TOO_MUCH_MEMORY = "reading it takes more memory than a snapshot of its size needs"

# Isolated (-I), and without running the package's own __init__: the child needs this sub-package only. The
# library that decodes Arrow is found where the caller finds it; it loads three times faster without numpy.
_BOOTSTRAP = (
    "import sys, types; "
    "package = types.ModuleType('vram'); package.__path__ = [sys.argv[1]]; sys.modules['vram'] = package; "
    "sys.path += sys.argv[3:]; sys.modules['numpy'] = None; "
    "from vram.trace.sandbox import serve; serve(sys.argv[2])"
)


# --- the caller's side --------------------------------------------------------------------------------------


def read_in_child(file: io.FileIO, source: str, device: int | None, max_bytes: int) -> Trace:
    """The trace in `file`, read by a child process."""
    package = str(Path(__file__).resolve().parent.parent)
    request = json.dumps({"device": device, "max_bytes": max_bytes})
    command = [sys.executable or "python3", "-I", "-c", _BOOTSTRAP, package, request, *_library_path()]
    # A preloaded library (a sanitizer, a profiler) may reserve more addresses than the limit allows, and so
    # may an allocator other than the system's.
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
            return _receive(child, source)
        except BaseException:
            child.kill()
            raise


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
    """Why a child ended without an answer."""
    assert child.stderr is not None
    complaint = child.stderr.read().decode("utf-8", "replace").strip()
    status = child.wait()
    if status == -signal.SIGXCPU:
        reason = "reading it took more processor time than a snapshot of its size needs"
    elif "MemoryError" in complaint:
        reason = TOO_MUCH_MEMORY
    elif status < 0:
        reason = f"the process reading it died of signal {-status}"
    else:
        last_line = complaint.rpartition("\n")[2][:200]
        reason = f"the process reading it ended with status {status} ({last_line})"
    return TraceError(f"{reason}; the file is damaged or hostile", place="pickle", status=status)


# --- the child's side ---------------------------------------------------------------------------------------


def serve(request: str) -> None:
    """Read standard input, answer on standard output, and leave without tearing down what was read."""
    options = json.loads(request)
    output = os.fdopen(1, "wb", closefd=False)
    _lower_limits()
    try:
        with io.FileIO(0, closefd=False) as file:
            reader = BoundedReader(file, options["max_bytes"], _raise_limits)
            _send(read_trace(reader, "", options["device"]), output)
    except MemoryError:
        _send_error(TraceError(TOO_MUCH_MEMORY, place="pickle"), output)
    except TraceError as error:
        _send_error(error, output)
    output.flush()
    os._exit(0)


def _lower_limits() -> None:
    """From here on: no dumped core, no file written, no more memory and time than an empty snapshot costs."""
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, 0)
    _raise_limits(0)


def _raise_limits(count: int) -> None:
    """Allow what `count` bytes of a snapshot may cost."""
    _set_limit(resource.RLIMIT_AS, MEMORY_FLOOR_BYTES + MEMORY_FACTOR * count)
    _set_limit(resource.RLIMIT_CPU, PROCESSOR_FLOOR_SECONDS + count // BYTES_A_SECOND)


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))


def _send_error(error: TraceError, output: BinaryIO) -> None:
    output.write(json.dumps({"error": [error.message, error.facts]}).encode() + b"\n")


def _send(trace: Trace, output: BinaryIO) -> None:
    header = {"notes": pack(trace), "events": trace.events}
    output.write(json.dumps(header).encode() + b"\n")
    for name in COLUMNS:
        output.write(getattr(trace, name))
