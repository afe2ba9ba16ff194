"""The process that reads an untrusted file, started by `sandbox`: lowers its limits, reads, answers.

It may use memory and processor time in proportion to the bytes it has read: the limits rise as bytes arrive.
`formats` interprets the bytes. Where the system has no such limits (Windows, in part macOS), the bounds of
`formats` remain.

What it sends:    one line of JSON, then the bytes of the columns in the order of COLUMNS
    {"error": [message, facts]}
    {"notes": {...as in `notes`...}, "events": count}
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any, BinaryIO

from vram.errors import TraceError

from .files import BoundedReader
from .formats import Parts, read_parts
from .model import COLUMNS

__all__ = ["lower_limits", "raise_limits", "serve"]

try:
    import resource as _resource

    resource: Any = _resource
except ImportError:
    resource = None

# A snapshot takes about 7 bytes of memory for each of its own, and a second for every 20 MB.
MEMORY_FLOOR_BYTES = 512 << 20
MEMORY_FACTOR = 16
PROCESSOR_FLOOR_SECONDS = 3
BYTES_A_SECOND = 2_000_000

TOO_MUCH_MEMORY = "reading it takes more memory than a recording of its size needs"


def serve(request: str) -> None:
    """Read standard input, answer on standard output, and exit without freeing what was read."""
    options = json.loads(request)
    output = os.fdopen(1, "wb", closefd=False)
    lower_limits()
    try:
        with io.FileIO(0, closefd=False) as file:
            reader = BoundedReader(file, options["max_bytes"], raise_limits)
            _send(read_parts(reader, options["device"]), output)
    except MemoryError:
        _send_error(TraceError(TOO_MUCH_MEMORY, place="file"), output)
    except TraceError as error:
        _send_error(error, output)
    output.flush()
    os._exit(0)


def lower_limits() -> None:
    """From here on: no core dump, no file written, no more memory and time than an empty snapshot needs."""
    if resource is None:
        return
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, 0)
    raise_limits(0)


def raise_limits(count: int) -> None:
    """Allow what `count` bytes of a snapshot may need."""
    if resource is None:
        return
    _set_limit(resource.RLIMIT_AS, MEMORY_FLOOR_BYTES + MEMORY_FACTOR * count)
    _set_limit(resource.RLIMIT_CPU, PROCESSOR_FLOOR_SECONDS + count // BYTES_A_SECOND)


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
        if sys.platform != "darwin":  # which does not limit addresses
            raise


def _send_error(error: TraceError, output: BinaryIO) -> None:
    output.write(json.dumps({"error": [error.message, error.facts]}).encode() + b"\n")


def _send(parts: Parts, output: BinaryIO) -> None:
    notes, columns = parts
    header = {"notes": notes, "events": len(columns["action"])}
    output.write(json.dumps(header).encode() + b"\n")
    for name in COLUMNS:
        output.write(columns[name])
